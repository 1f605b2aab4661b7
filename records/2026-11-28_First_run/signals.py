"""Send each signal to run.sh, to a series of runs and to the script, and print what happens.

    python records/2026-11-28_First_run/signals.py     # in a clone with data/torch_sources

Each command trains the preset `cpu` and gets the signal after two steps. A series of runs continues
its first run. A row says what the command returned, how long it took to end, how many of its
processes were left, and how many checkpoints it wrote.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {
    "bash run.sh": ["bash", "run.sh"],
    "bash run.sh --seed=1": ["bash", "run.sh", "--seed=1"],
    "bash run.sh repeat 2": ["bash", "run.sh", "repeat", "2"],
    "NPROC=2 bash run.sh": ["env", "NPROC=2", "bash", "run.sh"],
    "timeout -k 60 9999 bash run.sh": ["timeout", "-k", "60", "9999", "bash", "run.sh"],
    "python train_gpt2.py --preset=cpu": [
        os.environ.get("PYTHON", "python3"), "train_gpt2.py", "--preset=cpu",
    ],
}  # fmt: skip


def try_signal(command, number):
    """Return (status, seconds, processes left, sentence, checkpoints written)."""
    before = set(ROOT.glob("logs/*/state_step*.pt"))
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    steps = 0
    for line in process.stdout:
        steps += line.startswith("step:")
        if steps == 2:
            break
    start = time.perf_counter()
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    seconds = time.perf_counter() - start
    left = subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True, text=True)
    sentence = [line for line in output.splitlines() if "stopped by a signal" in line]
    written = len(set(ROOT.glob("logs/*/state_step*.pt")) - before)
    return process.returncode, seconds, len(left.stdout.split()), sentence, written


def main():
    print("| command | signal | status | seconds to end | processes left | checkpoints |")
    print("|---|---|---|---|---|---|")
    for name, command in COMMANDS.items():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            status, seconds, left, sentence, written = try_signal(command, number)
            saved = f"{written}" if sentence else f"{written}, but no sentence"
            row = f"`{name}` | {number.name} | {status} | {seconds:.1f} | {left} | {saved}"
            print(f"| {row} |", flush=True)


if __name__ == "__main__":
    main()
