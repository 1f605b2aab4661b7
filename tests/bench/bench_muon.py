"""Time Muon's step against that of torch.optim.Muon, in turns.

    python tests/bench/bench_muon.py                        # all cores, or the GPU

A turn is five steps of a small set of matrices, so that caches are as warm as they are in training,
or one step of GPT-2 124M. Each ratio compares two turns of the same round. torch.optim.Muon always
multiplies in bfloat16. On a CPU without bfloat16 instructions a turn is one step, and
torch.optim.Muon is left out for GPT-2 124M, where one of its steps would take minutes.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_gpt2

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def gpt2_shapes(n_layer, C):
    return ([(C, C)] * 4 + [(4 * C, C), (C, 4 * C)]) * n_layer


SETS = {
    "4 layers x 128": gpt2_shapes(4, 128),
    "4 layers x 256": gpt2_shapes(4, 256),
    "GPT-2 124M": gpt2_shapes(12, 768),
}


def random_parameters(shapes):
    generator = torch.Generator().manual_seed(0)
    params = []
    for shape in shapes:
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


def compare(title, shapes, dtype, rounds):
    """Print a table for one set of matrices."""
    has_bf16 = dtype == torch.bfloat16
    small = sum(m * n for m, n in shapes) < 2**23
    steps = 5 if small and has_bf16 else 1
    print(
        f"\n{title}: {len(shapes)} matrices, {DEVICE.type}, {torch.get_num_threads()} thread(s), "
        f"{rounds} rounds of {steps} step(s), matmuls of ours in {dtype}"
    )
    optimizers = {"ours": train_gpt2.Muon(random_parameters(shapes), lr=1e-4, dtype=dtype)}
    if small or has_bf16:
        params = random_parameters(shapes)
        optimizers["torch.optim.Muon"] = torch.optim.Muon(params, lr=1e-4, weight_decay=0.0)
    times = {name: [] for name in optimizers}
    for optimizer in optimizers.values():
        ms_of_step(optimizer, 1)  # warms up
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            times[name].append(ms_of_step(optimizer, steps))
    print(f"{'':18s} {'median ms':>10s} {'range':>19s} {'/ ours':>8s} {'range':>13s}")
    for name, ms in times.items():
        ratios = [other / ours for other, ours in zip(ms, times["ours"])]
        print(
            f"{name:18s} {statistics.median(ms):10.1f} {min(ms):9.1f}-{max(ms):9.1f} "
            f"{statistics.median(ratios):8.2f} {min(ratios):6.2f}-{max(ratios):6.2f}",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=SETS, help="one of the sets of matrices")
    options = parser.parse_args()
    dtype = train_gpt2.product_dtype(train_gpt2.Hyperparameters(), DEVICE)
    for title, shapes in SETS.items():
        if options.only in (None, title):
            compare(title, shapes, dtype, options.rounds)


if __name__ == "__main__":
    main()
