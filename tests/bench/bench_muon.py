"""Time Muon's step against torch.optim.Muon and against an earlier commit.

    python tests/bench/bench_muon.py                        # one process, all cores
    python tests/bench/bench_muon.py --processes=2          # two ranks with one thread each
    python tests/bench/bench_muon.py --before=c1b9612       # also Muon as it was at that commit

Every contender runs in processes of its own. They take turns, and each ratio is of two turns of
the same round. A turn is several steps of a small set, so that caches are as warm as they are in
training, and one step of GPT-2 124M. torch.optim.Muon is not distributed: each of its ranks updates
all matrices. It always multiplies in bfloat16; on a CPU without bfloat16 instructions one step
can take minutes, so a contender that needs more than a minute a step is left out, with the
estimate.
"""

import argparse
import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIBRARY = "torch.optim.Muon"


def gpt2_shapes(n_layer, C):
    return ([(C, C)] * 4 + [(4 * C, C), (C, 4 * C)]) * n_layer


SETS = {
    "4 layers x 128": gpt2_shapes(4, 128),
    "4 layers x 256": gpt2_shapes(4, 256),
    "GPT-2 124M": gpt2_shapes(12, 768),
}


def script_at(commit, folder):
    """Write train_gpt2.py as of a commit, or the current one, to folder; return its path."""
    path = Path(folder) / f"train_gpt2_{commit or 'now'}.py"
    if commit:
        git = ["git", "-C", str(ROOT), "show", f"{commit}:train_gpt2.py"]
        path.write_bytes(subprocess.run(git, check=True, capture_output=True).stdout)
    else:
        path.write_bytes((ROOT / "train_gpt2.py").read_bytes())
    return path


def load_script(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    script = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = script
    spec.loader.exec_module(script)
    return script


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


def steps_per_turn(shapes, dtype):
    """Return 5 for a small set, or 1 where torch.optim.Muon would need minutes for that."""
    return 5 if dtype == torch.bfloat16 and sum(m * n for m, n in shapes) < 2**23 else 1


def contender(script, dtype, shapes, rank, world_size, folder, pipe):
    """Be one rank of a contender: answer each request with the mean seconds of a step.

    script: path of the train_gpt2.py to take Muon from, or None for torch.optim.Muon. The first
    answer is None, or the estimated seconds of a step if that is more than a minute.
    """
    if world_size > 1:
        torch.set_num_threads(1)
    muon = None
    if script:
        muon = load_script(script).Muon

    def make(params):
        if muon is None:
            return torch.optim.Muon(params, lr=1e-4, weight_decay=0.0)
        return muon(params, lr=1e-4, rank=rank, world_size=world_size, dtype=dtype)

    if muon is None:
        m, n = shapes[0]
        probe = make(random_parameters([(m, n)]))
        seconds_of_step(probe)
        costs = [min(shape) ** 2 * (min(shape) + 2 * max(shape)) for shape in shapes]
        estimate = seconds_of_step(probe) * sum(costs) / costs[0]
        if estimate > 60:
            pipe.send(estimate)
            return
    if world_size > 1 and muon is not None:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
        )
    optimizer = make(random_parameters(shapes))
    seconds_of_step(optimizer)
    pipe.send(None)
    steps = steps_per_turn(shapes, dtype)
    while pipe.recv():
        pipe.send(sum(seconds_of_step(optimizer) for _ in range(steps)) / steps)


def start_team(script, dtype, shapes, world_size):
    """Start the processes of a contender; return their pipes."""
    context = torch.multiprocessing.get_context("spawn")
    folder = tempfile.mkdtemp()
    pipes = []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        arguments = (script, dtype, shapes, rank, world_size, folder, theirs)
        context.Process(target=contender, args=arguments, daemon=True).start()
        theirs.close()  # so that a dead process is noticed
        pipes.append(ours)
    return pipes


def milliseconds_of_turn(pipes):
    """Let all ranks take their steps; return the slowest one's mean time of a step."""
    for pipe in pipes:
        pipe.send(True)
    return 1000 * max([pipe.recv() for pipe in pipes])


def compare(title, shapes, scripts, dtype, rounds, world_size):
    """Print a table of the contenders for one set of matrices."""
    print(
        f"\n{title}: {len(shapes)} matrices, {DEVICE.type}, {world_size} process(es) with "
        f"{torch.get_num_threads() if world_size == 1 else 1} thread(s), {rounds} rounds "
        f"of {steps_per_turn(shapes, dtype)} step(s); matmuls in {dtype}, "
        f"{LIBRARY}'s in torch.bfloat16"
    )
    print(f"{'':18s} {'median ms':>10s} {'range':>19s} {'/ ours':>8s} {'range':>13s}")
    teams = {}
    for name, script in scripts.items():  # one after the other: probes must not disturb each other
        pipes = start_team(script, dtype, shapes, world_size)
        estimate = max([pipe.recv() or 0 for pipe in pipes])
        if not estimate:
            teams[name] = pipes
        else:
            print(f"{name:18s} left out: a step would take about {estimate:.0f} s")
    times = {name: [] for name in teams}
    for _ in range(rounds):
        for name, pipes in teams.items():
            times[name].append(milliseconds_of_turn(pipes))
    for name, ms in times.items():
        ratios = [other / ours for other, ours in zip(ms, times["ours"])]
        print(
            f"{name:18s} {statistics.median(ms):10.1f} {min(ms):9.1f}-{max(ms):9.1f} "
            f"{statistics.median(ratios):8.2f} {min(ratios):6.2f}-{max(ratios):6.2f}",
            flush=True,
        )
        for pipe in teams[name]:
            pipe.send(False)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=SETS, help="one of the sets of matrices")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--before", metavar="COMMIT", help="a commit to compare with")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scripts = {"ours": script_at(None, folder), LIBRARY: None}
        if options.before:
            scripts[options.before] = script_at(options.before, folder)
        script = load_script(scripts["ours"])
        dtype = script.product_dtype(script.Hyperparameters(), DEVICE)
        for title, shapes in SETS.items():
            if options.only in (None, title):
                compare(title, shapes, scripts, dtype, options.rounds, options.processes)


if __name__ == "__main__":
    main()
