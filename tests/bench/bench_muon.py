"""Time Muon's step on the matrices of GPT-2 124M against torch.optim.Muon's, in alternating turns.

    python tests/bench/bench_muon.py [--rounds=15] [--layers=12] [--width=768]

Each ratio compares two turns of the same round. torch.optim.Muon always multiplies in bfloat16; on
a CPU without bfloat16 instructions, each of its steps takes minutes.
"""

import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "records" / "tools")]
from runlog import argument_parser  # noqa: E402

import train_gpt2  # noqa: E402


def random_parameters(layers, C, device):
    """Return the matrices of a GPT's blocks, with gradients."""
    torch.manual_seed(0)
    params = []
    for shape in ([(C, C)] * 4 + [(4 * C, C), (C, 4 * C)]) * layers:
        p = torch.nn.Parameter(torch.randn(shape, device=device))
        p.grad = torch.randn(shape, device=device)
        params.append(p)
    return params


def ms_of_step(optimizer):
    """Return the time of a step in milliseconds."""
    start = time.perf_counter()
    optimizer.step()
    optimizer.param_groups[0]["params"][-1][0, 0].item()  # waits for a GPU
    return 1000 * (time.perf_counter() - start)


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    options = parser.parse_args()
    args = train_gpt2.Hyperparameters()
    device = train_gpt2.choose_device(args)
    dtype = getattr(torch, train_gpt2.choose_dtype(args, device))
    print(f"{device.type}, {torch.get_num_threads()} thread(s), our matmuls in {dtype}; {options}")
    sizes = options.layers, options.width, device
    optimizers = {
        "ours": train_gpt2.Muon(random_parameters(*sizes), lr=1e-4, dtype=dtype),
        "torch.optim.Muon": torch.optim.Muon(random_parameters(*sizes), lr=1e-4, weight_decay=0.0),
    }
    times = {name: [] for name in optimizers}
    for _ in range(options.rounds + 1):
        for name, optimizer in optimizers.items():
            times[name].append(ms_of_step(optimizer))
    print("                    median ms (range), median ratio to ours (range)")
    for name, (_, *ms) in times.items():  # the first round warms up
        ratios = [other / own for other, own in zip(ms, times["ours"][1:])]
        print(
            f"{name:18s} {statistics.median(ms):10.1f} ({min(ms):.1f}-{max(ms):.1f})"
            f"{statistics.median(ratios):8.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
