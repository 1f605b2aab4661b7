"""Time a step of each Muon on the matrices of GPT-2 124M, in alternating turns.

    python tests/bench/bench_muon.py [--rounds=15] [--layers=12] [--width=768] [--before=FILE]

These are the Muon of records/modern/muon.py, that of train_gpt2.py, and torch.optim.Muon. FILE: an
earlier version of one of our files, which is timed, too. Each ratio compares two turns of a round,
whose order is random. torch.optim.Muon always multiplies in bfloat16, which takes minutes on a CPU
without bfloat16 instructions. There, all of them multiply in float32, and its cast is replaced.
"""

import random
import sys
from pathlib import Path
from unittest import mock

import torch
from bench_step import argument_parser, load_script, print_turns, timed

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "records" / "modern")]
import muon  # noqa: E402

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


def without_bfloat16(step):
    """Return a step in which the casts to bfloat16 of torch.optim.Muon give float32."""

    def patched_step():
        with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.float):
            step()

    return patched_step


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--before", metavar="FILE", help="an earlier muon.py or train_gpt2.py")
    options = parser.parse_args()
    args = train_gpt2.Hyperparameters()
    device = train_gpt2.choose_device(args)
    dtype = getattr(torch, train_gpt2.choose_dtype(args, device))
    print(f"{device.type}, {torch.get_num_threads()} thread(s), our matmuls in {dtype}; {options}")
    sizes = options.layers, options.width, device
    classes = {"muon.py": muon.Muon, "train_gpt2.py": train_gpt2.Muon}
    if options.before:
        classes["before"] = load_script(options.before).Muon
    optimizers = {
        name: kind(random_parameters(*sizes), lr=1e-4, dtype=dtype)
        for name, kind in classes.items()
    }
    optimizers["torch.optim.Muon"] = torch.optim.Muon(random_parameters(*sizes), lr=1e-4)
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0  # train_gpt2.py has none
    steps = {name: optimizer.step for name, optimizer in optimizers.items()}
    if dtype == torch.float32:
        steps["torch.optim.Muon"] = without_bfloat16(steps["torch.optim.Muon"])
    times = {name: [] for name in optimizers}
    for _ in range(options.rounds + 1):
        for name in random.sample(list(steps), len(steps)):
            times[name].append(timed(steps[name]))
    print_turns({name: turns[1:] for name, turns in times.items()})  # the first round warms up


if __name__ == "__main__":
    main()
