"""Start train_gpt2.py with random settings: each must run, or end at once with one sentence.

    python tests/bench/settings.py --count 200 --seed 0        # ten minutes on 2 cores

Each case is a tiny run with one to four settings replaced by values from plausible to absurd. Some
have unknown names or malformed arguments. The table shows the outcome, the time, the arguments and
the last line. "result": it finished. "was training": it was stopped by SIGTERM after 30 s, as it
should. "rejected": it ended within 10 s, with status 1 or 2 and one line on stderr. Everything else
is a FAULT, and the exit status is then 1.
"""

import argparse
import dataclasses
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import get_args

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from conftest import ROOT, TINY, write_shard

from train_gpt2 import Hyperparameters

NUMBERS = ["0", "1", "2", "3", "7", "12", "16", "64", "100", "257", "1000", "65536", "1000003"]
ABSURD = ["-1", "2147483647", "2147483648", "1" + "0" * 23, "1e39", "nan", "inf", "-inf", "0x10"]
WORDS = ["", "True", "False", "none", "..", "a/b", "/dev/null", "/proc/1/mem", "ä ö", "*", "[", "~"]
RATES = ["0.0", "1e-9", "0.001", "0.02", "0.5", "1.0", "3.5", "1e6", "1e30"]
MALFORMED = ["--", "-", "--batch-size=4", "--batch_siz=4", "batch_size=4", "--=", "--n_layer", "="]


def random_value(field, choice):
    """Return a value for a field, as text: usually of its type."""
    if choice.random() < 0.05:
        return choice.choice(ABSURD + WORDS)
    if field.type is bool:
        return choice.choice(["True", "False"])
    if field.type in (int, float):
        plausible = NUMBERS if field.type is int else RATES
        return choice.choice(plausible if choice.random() < 0.85 else ABSURD)
    return choice.choice(get_args(field.type) or WORDS)


def random_arguments(choice):
    """Return random arguments for one to four settings, seldom a malformed one."""
    chosen = choice.sample(dataclasses.fields(Hyperparameters), choice.randint(1, 4))
    arguments = [f"--{field.name}={random_value(field, choice)}" for field in chosen]
    if choice.random() < 0.08:
        arguments.append(choice.choice(MALFORMED))
    return arguments


def run(arguments, folder):
    """Return (outcome, seconds, last line) of a tiny run with these arguments."""
    settings = {**TINY, "log_dir": f"{folder}/logs"}
    for name in ("train", "val"):
        settings[f"{name}_files"] = f"{folder}/{name}_*.bin"
    command = ["timeout", "--preserve-status", "--kill-after=120", "30"]
    command += [sys.executable, str(ROOT / "train_gpt2.py")]
    command += [f"--{name}={value}" for name, value in settings.items()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    start = time.monotonic()
    done = subprocess.run(
        command + arguments, capture_output=True, text=True, cwd=folder, env=environment
    )
    seconds = time.monotonic() - start
    lines = done.stderr.splitlines()
    last = (lines or done.stdout.splitlines() or [""])[-1]
    if done.returncode == 0 and "\nresult val_loss" in done.stdout:
        return "result", seconds, last
    if done.returncode == 0 and "\nstopped by a signal" in done.stdout and seconds > 30:
        return "was training", seconds, last
    one_sentence = len(lines) == 1 and last.startswith("train_gpt2.py: ")
    at_once = seconds < 10 or "step:0/" in done.stdout  # unless it had to train to find out
    if done.returncode in (1, 2) and one_sentence and at_once:
        return "rejected", seconds, last
    return "FAULT", seconds, f"exit status {done.returncode}: {done.stderr[-2000:]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"command: tests/bench/settings.py --count {args.count} --seed {args.seed}")
    choice = random.Random(args.seed)
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        stream = np.cumsum(np.random.default_rng(0).integers(1, 4, size=4000)) % 64
        write_shard(Path(folder) / "train_0.bin", stream[:3000])
        write_shard(Path(folder) / "val_0.bin", stream[3000:])
        for number in range(args.count):
            arguments = random_arguments(choice)
            outcome, seconds, last = run(arguments, folder)
            outcomes.append(outcome)
            print(f"{number:3d}  {outcome:12s}  {seconds:4.1f} s  {' '.join(arguments)}")
            print(f"       {last.replace(folder, 'DIR')}", flush=True)
    for outcome in sorted(set(outcomes)):
        print(f"{outcome}: {outcomes.count(outcome)}")
    sys.exit("FAULT" in outcomes)


if __name__ == "__main__":
    main()
