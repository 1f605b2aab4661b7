"""Count what Muon's step asks of a device for GPT-2 124M, at commit c1b9612 and now.

    python records/2026-11-23_Muon/launches.py

Launches are calls of PyTorch operations that are not views; on a GPU each is at least one kernel.
FLOPs are those of the matmuls. Tensors are on the meta device, so nothing is computed and no GPU is
needed.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "bench")]
from bench_muon import gpt2_shapes, load_script, script_at  # noqa: E402

VIEWS = {"_record_function_enter_new", "_record_function_exit", "_unsafe_view", "alias"}
VIEWS |= {"as_strided", "chunk", "detach", "diagonal", "empty", "expand", "new_empty", "permute"}
VIEWS |= {"select", "slice", "split", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view"}


class CountLaunches(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.launches = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.launches += function.overloadpacket.__name__ not in VIEWS
        return function(*args, **(kwargs or {}))


def count(muon, shapes):
    """Return (launches, FLOPs) of one step on matrices of these shapes."""
    params = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    for p in params:
        p.grad = torch.empty_like(p)
    optimizer = muon(params, lr=1e-4)
    optimizer.step()  # creates the momenta
    with CountLaunches() as launches, FlopCounterMode(display=False) as flops:
        optimizer.step()
    return launches.launches, flops.get_total_flops()


def main():
    with tempfile.TemporaryDirectory() as folder:
        for commit in ("c1b9612", None):
            script = load_script(script_at(commit, folder))
            script.gram = lambda X: X @ X.mT  # as on a GPU
            for title, shapes in {
                "768 x 768, 48 matrices": [(768, 768)] * 48,
                "3072 x 768, 12 matrices": [(3072, 768)] * 12,
                "768 x 3072, 12 matrices": [(768, 3072)] * 12,
                "GPT-2 124M": gpt2_shapes(12, 768),
            }.items():
                launches, flops = count(script.Muon, shapes)
                name = commit or "now"
                print(f"{name:8s} {title:24s} {launches:5d} launches {flops / 1e12:7.3f} TFLOP")


if __name__ == "__main__":
    main()
