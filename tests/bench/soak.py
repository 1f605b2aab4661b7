"""Kill and stop runs at random and resume them, again and again: does the result stay the same?

    python tests/bench/soak.py --cycles 30 --processes 2 3     # some minutes for each on 2 cores

A cycle starts `torchrun train_gpt2.py --resume=auto` (or by chance the newest checkpoint's name)
and sends SIGKILL or SIGTERM to a random rank, to torchrun (rank -1), or SIGTERM to all of them at
once (rank -2), as `pkill -f` or a cgroup's stop does. The moment is random, too: any from the start
on, after some steps, or while a checkpoint is being written. After the last cycle the run goes on
to its end. Prints a table of the cycles. The exit status is 1 unless all losses and hashes and the
bits of the last checkpoint equal those of an uninterrupted run, no step is lost by a signal that a
step could answer, and every run ended within a minute of its signal.
"""

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from conftest import SCRIPT, bits, checkpoints, losses, options, ranks_of, validations, write_shard

SETTINGS = {
    "vocab_size": 256, "n_layer": 4, "n_head": 2, "n_embd": 128, "batch_size": 6,
    "device_batch_size": 1, "sequence_length": 64, "warmdown_iters": 100, "learning_rate": 0.01,
    "muon_learning_rate": 0.0005, "val_loss_every": 100, "val_tokens": 1280, "device": "cpu",
    "compile": False, "allow_repeat": True, "comm_timeout": 60, "save_every": 5,
}  # fmt: skip


class Run:
    """A run that is started again and again."""

    def __init__(self, settings, processes):
        self.settings, self.processes = settings, processes
        self.folder = Path(settings["log_dir"]) / settings["run_id"]

    def log(self):
        path = self.folder.with_suffix(".txt")
        return path.read_text() if path.exists() else ""

    def steps(self):
        """Return the steps in the log's lines, in order."""
        return [int(step) for step, name, _ in losses(self.log()) if name == "train_loss"]

    def newest(self):
        """Return the path of the newest checkpoint, or None."""
        names = checkpoints(self.folder)
        return self.folder / names[-1] if names else None

    def start(self, resume="auto"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={self.processes}", str(SCRIPT)]
        return subprocess.Popen(
            [*command, *options({**self.settings, "resume": resume})],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def finish(self):
        """Run to the end without a signal."""
        process = self.start()
        _, stderr = process.communicate()
        if process.returncode:
            raise SystemExit(f"a run that nobody interrupts failed:\n{stderr}")


def wait_for_moment(process, run, moment, choice):
    """Wait until the random moment has come; return the workers' process ids, [] if it ended."""
    began, pids = time.time(), []
    while process.poll() is None and len(pids) < run.processes:
        time.sleep(0.01)
        with contextlib.suppress(OSError):  # a process is just starting or ending
            pids = ranks_of(process)
    enough = len(run.steps()) + choice.randrange(1, 20)
    end = time.monotonic() + (choice.uniform(0, 9) if moment == "any" else 60)
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(FileNotFoundError):  # none yet, or it has just taken its name
            if moment == "write" and (run.folder / "partial").stat().st_mtime > began:
                break
        if moment == "steps" and len(run.steps()) >= enough:
            break
        time.sleep(0.001 if moment == "write" else 0.02)
    return pids if process.poll() is None else []


def cycle(run, choice):
    """Start, interrupt, wait; return (line of the table, steps done, whether the run saved).

    Returns None if the run was at its end.
    """
    before = len(run.steps())
    moment = choice.choice(["any", "steps", "write"])
    rank = choice.randrange(0 if moment == "any" else -2, run.processes)
    number = signal.SIGTERM if rank == -2 else choice.choice([signal.SIGKILL, signal.SIGTERM])
    by_name = choice.random() < 1 / 3 and run.newest() is not None
    process = run.start(run.newest() if by_name else "auto")
    pids = wait_for_moment(process, run, moment, choice)
    if not pids:
        _, stderr = process.communicate()
        if process.returncode:
            raise SystemExit(f"the run failed before its signal:\n{stderr}")
        return None
    targets = {-1: [process.pid], -2: [process.pid, *pids]}.get(rank) or [pids[rank]]
    for pid in targets:
        os.kill(pid, number)
    sent = time.monotonic()
    try:
        _, stderr = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise SystemExit(f"still running 60 s after {number.name} to rank {rank}") from None
    seconds = time.monotonic() - sent
    done = run.steps()[before:]
    saved = bool(re.search(r"^stopped by a signal after step \d+\n\Z", run.log(), re.M))
    finished = bool(re.search(r"^result .*\n\Z", run.log(), re.M))
    answered = (saved or finished) if rank < 0 else "train_gpt2.py: " in stderr
    if process.returncode and done and not answered:
        raise SystemExit(f"no answer to {number.name} to rank {rank}:\n{stderr}")
    resume = "name" if by_name else "auto"
    steps = f"{done[0]}..{done[-1]}" if done else "none"
    line = f"{number.name}  {rank:4d}  {resume}  {moment:6s}  {steps:12s}  {seconds:7.1f}"
    return line, done, saved


def soak(processes, cycles, folder, choice):
    """Compare an uninterrupted run with one of many cycles; return whether they are the same."""
    settings = {
        **SETTINGS, "num_iterations": 20 * cycles, "log_dir": f"{folder}/logs{processes}",
        "train_files": f"{folder}/train_*.bin", "val_files": f"{folder}/val_*.bin",
    }  # fmt: skip
    whole = Run({**settings, "run_id": "whole"}, processes)
    whole.finish()
    run = Run({**settings, "run_id": "soak"}, processes)
    print(f"\n{processes} processes, {20 * cycles} steps")
    print("signal   rank  resume moment  steps done   seconds  done twice")
    previous, saved, twice, lost = 0, False, 0, 0
    for _ in range(cycles):
        row = cycle(run, choice)
        if row is None:
            print("the run was at its end")
            break
        line, done, now_saved = row
        again = previous + 1 - done[0] if done else 0
        print(f"{line}  {again:6d}", flush=True)
        twice += again
        if done:
            lost += again if saved else 0
            previous, saved = done[-1], now_saved
    run.finish()
    # A step that was done twice must have the same loss and hash twice.
    same = set(validations(run.log())) == set(validations(whole.log()))
    same = same and bits(run.newest()) == bits(whole.newest())
    print(f"all losses, hashes and the bits of the last checkpoint are the same: {same}")
    print(f"steps done twice after SIGKILL: {twice}, after an answer: {lost}")
    return same and not lost


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=30)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stream = np.cumsum(np.random.default_rng(0).integers(1, 4, size=120000)) % 256
        write_shard(Path(folder) / "train_0.bin", stream[:110000])
        write_shard(Path(folder) / "val_0.bin", stream[110000:])
        choice = random.Random(args.seed)
        same = [soak(n, args.cycles, folder, choice) for n in args.processes]
    sys.exit(0 if all(same) else 1)


if __name__ == "__main__":
    main()
