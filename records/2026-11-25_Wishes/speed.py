"""Time training steps under several environments or settings, in turn.

    python records/2026-11-25_Wishes/speed.py waiting|settings [--idle] [--rounds=5] \
        [--name=value ...]

waiting compares policies of OpenMP for waiting threads; settings compares what a user may try if a
run is slow. Other arguments are settings of train_gpt2.py (default: --preset=text). For each case,
two processes are started and compiled once. In each round, every case takes its turn: one process
alone, one beside a busy loop, and both at once; with --idle, only one process alone. Prints the
median step in ms of each turn, then the medians of all rounds, and of the ratios, with their
ranges.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CASES = {  # environment and settings
    "waiting": {
        "libgomp's default": ({"GOMP_SPINCOUNT": "300000"}, []),
        "GOMP_SPINCOUNT=100": ({"GOMP_SPINCOUNT": "100"}, []),
        "GOMP_SPINCOUNT=1000": ({"GOMP_SPINCOUNT": "1000"}, []),
        "GOMP_SPINCOUNT=3000": ({"GOMP_SPINCOUNT": "3000"}, []),
        "OMP_WAIT_POLICY=PASSIVE": ({"OMP_WAIT_POLICY": "PASSIVE"}, []),
    },
    "settings": {
        "nothing changed": ({}, []),
        "OMP_NUM_THREADS=1": ({"OMP_NUM_THREADS": "1"}, []),
        "--compile=False": ({}, ["--compile=False"]),
        "--device_batch_size=4": ({}, ["--device_batch_size=4"]),
        "--device_batch_size=1": ({}, ["--device_batch_size=1"]),
    },
}
STEPS = 6


def work(argv):
    """Train as many steps as each line of the standard input says; print their median in ms."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as train_gpt2.py does
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
            train_gpt2.train_step(run.model, run.optimizers, inputs, targets, run.args).item()
            run.step += 1
            times.append(1000 * (time.perf_counter() - start))
        print(statistics.median(times), flush=True)


def start(environment, argv):
    command = [sys.executable, __file__, "work", *argv]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("GOMP", "OMP"))}
    process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=clean | environment)
    while (line := process.stdout.readline()) != "ready\n":
        assert line, f"{environment} {argv} did not start"
    return process


def train(*processes):
    """Let processes train at the same time; return the mean of their medians in ms."""
    for process in processes:
        process.stdin.write(f"{STEPS}\n")
        process.stdin.flush()
    return statistics.mean(float(process.stdout.readline()) for process in processes)


def cell(ratios):
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", choices=CASES)
    parser.add_argument("--idle", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    options, argv = parser.parse_known_args(argv)
    if not any(argument.startswith("--preset") for argument in argv):
        argv = ["--preset=text", *argv]
    print(*argv, f"rounds:{options.rounds} steps:{STEPS} cores:{os.cpu_count()}", flush=True)
    processes = {}
    for name, (environment, settings) in CASES[options.cases].items():
        count = 1 if options.idle else 2
        processes[name] = [start(environment, [*argv, *settings]) for _ in range(count)]
        train(*processes[name])  # the first steps create the states of the optimizers
    results = {name: [] for name in processes}
    for number in range(1, options.rounds + 1):
        for name, group in processes.items():
            row = [train(group[0])]
            if not options.idle:
                loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                row.append(train(group[0]))
                loop.kill()
                loop.wait()
                row.append(train(*group))
            results[name].append(row)
            print(f"round {number}, {name}:", *(f"{ms:.4g}" for ms in row), flush=True)
    print()
    first, *_ = results.values()
    for name, rows in results.items():
        cells = [name, f"{statistics.median(row[0] for row in rows):.4g}"]
        cells.append(cell([row[0] / other[0] for row, other in zip(rows, first)]))
        for turn in range(1, len(rows[0])):
            cells.append(cell([row[turn] / row[0] for row in rows]))
        print("| " + " | ".join(cells) + " |")
    for group in processes.values():
        for process in group:
            process.kill()


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(sys.argv[2:])
    else:
        main(sys.argv[1:])
