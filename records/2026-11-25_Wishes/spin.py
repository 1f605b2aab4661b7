"""Time training steps under several waiting policies of OpenMP, idle and beside other programs.

    python records/2026-11-25_Wishes/spin.py [--rounds=5] [--name=value ...]

Settings are those of train_gpt2.py (default: --preset=text). For each policy, two processes are
started and compiled once. In each round, every policy takes its turn: one process alone, one beside
a busy loop, and both at once. Prints the median step in ms of each turn, then medians and ratios.
"""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
POLICIES = {
    "libgomp's default": {"GOMP_SPINCOUNT": "300000"},
    "GOMP_SPINCOUNT=100": {"GOMP_SPINCOUNT": "100"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "GOMP_SPINCOUNT=3000": {"GOMP_SPINCOUNT": "3000"},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
}
STEPS = 6


def work(argv):
    """Train as many steps as each line of the standard input says; print their median in ms."""
    sys.path.insert(0, str(ROOT))
    import train_gpt2

    run = train_gpt2.set_up(train_gpt2.parse_args(argv), train_gpt2.StopRequest())
    train_gpt2.compile_model(run.model, run.args, *train_gpt2.validation_batch(run, 0))
    print("ready", flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            start = time.perf_counter()
            inputs, targets, _ = train_gpt2.read_batch(run)
            loss, _ = train_gpt2.train_step(run.model, run.optimizers, inputs, targets, run.args)
            loss.item()
            run.step += 1
            times.append(1000 * (time.perf_counter() - start))
        print(statistics.median(times), flush=True)


def start(policy, argv):
    command = [sys.executable, __file__, "work", *argv]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("GOMP", "OMP"))}
    environment = clean | POLICIES[policy]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment)
    while (line := process.stdout.readline()) != "ready\n":
        assert line, f"{policy} did not start"
    return process


def train(*processes):
    """Let processes train at the same time; return the mean of their medians in ms."""
    for process in processes:
        process.stdin.write(f"{STEPS}\n")
        process.stdin.flush()
    return statistics.mean(float(process.stdout.readline()) for process in processes)


def main(argv):
    rounds = 5
    if argv and argv[0].startswith("--rounds="):
        rounds = int(argv.pop(0).partition("=")[2])
    argv = argv or ["--preset=text"]
    print(*argv, f"rounds:{rounds} steps:{STEPS} cores:{os.cpu_count()}", flush=True)
    pairs = {policy: [start(policy, argv) for _ in range(2)] for policy in POLICIES}
    for first, second in pairs.values():
        train(first, second)  # the first steps create the states of the optimizers
    results = {policy: [] for policy in POLICIES}
    for number in range(1, rounds + 1):
        for policy, (first, second) in pairs.items():
            idle = train(first)
            loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            beside_loop = train(first)
            loop.kill()
            loop.wait()
            row = idle, beside_loop, train(first, second)
            results[policy].append(row)
            print(f"round {number}, {policy}:", *(f"{ms:.0f}" for ms in row), flush=True)
    print("\n| policy | idle, ms | idle / default | beside a busy loop / idle | two runs / idle |")
    print("|---|---|---|---|---|")
    for policy, rows in results.items():
        idles = [row[0] for row in rows]
        others = [row[0] for row in results["libgomp's default"]]
        cells = [f"{statistics.median(idles):.0f}"]
        for ratios in (
            [a / b for a, b in zip(idles, others)],
            [row[1] / row[0] for row in rows],
            [row[2] / row[0] for row in rows],
        ):
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
        print(f"| {policy} | " + " | ".join(cells) + " |")
    for first, second in pairs.values():
        first.kill()
        second.kill()


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(sys.argv[2:])
    else:
        main(sys.argv[1:])
