"""Time Muon's step on the matrices of GPT-2 124M against torch.optim.Muon's, in alternating turns.

    python tests/bench/bench_muon.py [--rounds=15] [--layers=12] [--width=768] [--before=FILE]

FILE: an earlier train_gpt2.py, which is timed, too. Each ratio compares two turns of a round, whose
order is random. With one thread on a CPU, times are those of the processor, so that other programs
disturb them less. torch.optim.Muon always multiplies in bfloat16; on a CPU without bfloat16
instructions, each of its steps takes minutes.
"""

import importlib.util
import random
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
    p = optimizer.param_groups[0]["params"][-1]
    one_thread = p.device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if one_thread else time.perf_counter
    start = clock()
    optimizer.step()
    p[0, 0].item()  # waits for a GPU
    return 1000 * (clock() - start)


def muon_of(path):
    """Return the class Muon of another train_gpt2.py."""
    spec = importlib.util.spec_from_file_location("before", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["before"] = module
    spec.loader.exec_module(module)
    return module.Muon


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--before", metavar="FILE", help="an earlier train_gpt2.py")
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
    if options.before:
        muon = muon_of(options.before)
        optimizers["before"] = muon(random_parameters(*sizes), lr=1e-4, dtype=dtype)
    times = {name: [] for name in optimizers}
    for _ in range(options.rounds + 1):
        for name in random.sample(list(optimizers), len(optimizers)):
            times[name].append(ms_of_step(optimizers[name]))
    print("                    median ms (range), median ratio to ours (range)")
    for name, (_, *ms) in times.items():  # the first round warms up
        ratios = [other / own for other, own in zip(ms, times["ours"][1:])]
        print(
            f"{name:18s} {statistics.median(ms):10.1f} ({min(ms):.1f}-{max(ms):.1f})"
            f"{statistics.median(ratios):8.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
