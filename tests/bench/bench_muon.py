"""Time Muon's step against that of torch.optim.Muon.

    python tests/bench/bench_muon.py                        # one process, all cores
    python tests/bench/bench_muon.py --processes=2          # two ranks with one thread each

Both have their own processes. They take turns, and each ratio is of two turns of the same round. A
turn is five steps of a small set, so that caches are as warm as they are in training, or one step
of GPT-2 124M. torch.optim.Muon is not distributed: each of its ranks updates all matrices. It
always multiplies in bfloat16. On a CPU without bfloat16 instructions a turn is one step, and
torch.optim.Muon is left out for GPT-2 124M, where it would need minutes for one.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from bench_step import Team

import train_gpt2

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIBRARY = "torch.optim.Muon"


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


def seconds_of_step(optimizer):
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    optimizer.step()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def take_steps(pipe, rank, world_size, folder, name, dtype, shapes):
    """Answer each number of steps with the mean seconds of one."""
    if world_size > 1:
        torch.set_num_threads(1)
    params = random_parameters(shapes)
    if name == LIBRARY:
        optimizer = torch.optim.Muon(params, lr=1e-4, weight_decay=0.0)
    else:
        optimizer = train_gpt2.Muon(params, lr=1e-4, rank=rank, world_size=world_size, dtype=dtype)
    if world_size > 1:
        meeting = f"file://{folder}/rendezvous"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    seconds_of_step(optimizer)  # warms up
    pipe.send("ready")
    while True:
        steps = pipe.recv()
        pipe.send(sum(seconds_of_step(optimizer) for _ in range(steps)) / steps)


def compare(title, shapes, dtype, rounds, world_size):
    """Print a table for one set of matrices."""
    has_bf16 = dtype == torch.bfloat16
    small = sum(m * n for m, n in shapes) < 2**23
    steps = 5 if small and has_bf16 else 1
    print(
        f"\n{title}: {len(shapes)} matrices, {DEVICE.type}, {world_size} process(es) with "
        f"{torch.get_num_threads() if world_size == 1 else 1} thread(s), {rounds} rounds "
        f"of {steps} step(s); matmuls in {dtype}, {LIBRARY}'s in torch.bfloat16"
    )
    print(f"{'':18s} {'median ms':>10s} {'range':>19s} {'/ ours':>8s} {'range':>13s}")
    names = ["ours", LIBRARY]
    if not small and not has_bf16:
        print(f"{names.pop()} is left out: a step would take minutes")
    teams = {}
    for name in names:
        teams[name] = Team(take_steps, world_size, name, dtype, shapes)
        teams[name].hear()
    times = {name: [] for name in teams}
    for _ in range(rounds):
        for name, team in teams.items():
            times[name].append(1000 * max(team.ask(steps)))  # of the slowest rank
    for name, ms in times.items():
        ratios = [other / ours for other, ours in zip(ms, times["ours"])]
        print(
            f"{name:18s} {statistics.median(ms):10.1f} {min(ms):9.1f}-{max(ms):9.1f} "
            f"{statistics.median(ratios):8.2f} {min(ratios):6.2f}-{max(ratios):6.2f}",
            flush=True,
        )
        teams[name].end()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=SETS, help="one of the sets of matrices")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    dtype = train_gpt2.product_dtype(train_gpt2.Hyperparameters(), DEVICE)
    for title, shapes in SETS.items():
        if options.only in (None, title):
            compare(title, shapes, dtype, options.rounds, options.processes)


if __name__ == "__main__":
    main()
