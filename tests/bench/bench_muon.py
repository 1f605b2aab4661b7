"""Time Muon's step against torch.optim.Muon's, in alternating turns.

    python tests/bench/bench_muon.py                        # all cores, or the GPU

A turn is five steps of a small set of matrices, so that caches are as warm as they are in training,
and one for GPT-2 124M. Each ratio compares two turns of the same round. torch.optim.Muon always
multiplies in bfloat16; on a CPU without bfloat16 instructions, each of its steps takes minutes.
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

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SETS = {"4 layers x 128": (4, 128, 5), "GPT-2 124M": (12, 768, 1)}  # layers, width, steps of a turn


def random_parameters(n_layer, C):
    """Return the matrices of a GPT's blocks, with gradients."""
    generator = torch.Generator().manual_seed(0)
    params = []
    for shape in ([(C, C)] * 4 + [(4 * C, C), (C, 4 * C)]) * n_layer:
        p = torch.nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE))
        p.grad = torch.randn(shape, generator=generator).to(DEVICE)
        params.append(p)
    return params


def ms_of_step(optimizer, steps):
    """Return the mean time of a step in milliseconds."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.step()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start) / steps


def compare(title, rounds):
    """Print a table for one set of matrices."""
    n_layer, C, steps = SETS[title]
    dtype = train_gpt2.choose_dtype(train_gpt2.Hyperparameters(), DEVICE)
    print(
        f"\n{title}: {DEVICE.type}, {torch.get_num_threads()} thread(s), {rounds} rounds of "
        f"{steps} step(s), our matmuls in {dtype}"
    )
    ours = train_gpt2.Muon(random_parameters(n_layer, C), lr=1e-4, dtype=dtype)
    theirs = torch.optim.Muon(random_parameters(n_layer, C), lr=1e-4, weight_decay=0.0)
    times = {"ours": (ours, []), "torch.optim.Muon": (theirs, [])}
    for optimizer, _ in times.values():
        ms_of_step(optimizer, 1)  # warms up
    for _ in range(rounds):
        for optimizer, ms in times.values():
            ms.append(ms_of_step(optimizer, steps))
    print(f"{'':18s} {'median ms':>10s} {'range':>19s} {'/ ours':>8s} {'range':>13s}")
    for name, (_, ms) in times.items():
        ratios = [other / own for other, own in zip(ms, times["ours"][1])]
        print(
            f"{name:18s} {statistics.median(ms):10.1f} {min(ms):9.1f}-{max(ms):9.1f} "
            f"{statistics.median(ratios):8.2f} {min(ratios):6.2f}-{max(ratios):6.2f}",
            flush=True,
        )


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=SETS, help="one of the sets of matrices")
    options = parser.parse_args()
    for title in SETS:
        if options.only in (None, title):
            compare(title, options.rounds)


if __name__ == "__main__":
    main()
