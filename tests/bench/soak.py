"""Kill and stop runs at random and go on, again and again: does the result stay the same bits?

    python tests/soak.py --cycles 30 --processes 2 3      # about 8 minutes for each on 2 cores

A cycle starts `torchrun train_gpt2.py --resume=auto`, and at a random moment (from the start of
the processes on; a third of them while a checkpoint is being written) sends SIGKILL or SIGTERM to
a random rank. After the last cycle the run goes on to its end. Printed is a table of the cycles;
the exit status is 1 unless loss, data_hash and the whole last checkpoint equal those of a run that
nobody interrupted, no step is lost by a SIGTERM that a step could answer, and every run ended
within a minute of its signal.
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

sys.path.insert(0, str(Path(__file__).resolve().parent))
from conftest import ROOT, write_shard
from test_survive import ENVIRONMENT, same_state, torchrun, workers

SETTINGS = {
    "vocab_size": 256, "n_layer": 4, "n_head": 2, "n_embd": 128, "batch_size": 6,
    "device_batch_size": 1, "sequence_length": 64, "warmdown_iters": 100, "learning_rate": 0.01,
    "muon_learning_rate": 0.0005, "val_loss_every": 100, "val_tokens": 1280, "device": "cpu",
    "compile": False, "allow_repeat": True, "comm_timeout": 60, "save_every": 5,
    "checksum_every": 50,
}  # fmt: skip


def start(settings, processes):
    options = [f"--{name}={value}" for name, value in settings.items()]
    command = [*torchrun(processes), str(ROOT / "train_gpt2.py"), *options]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
        start_new_session=True,
    )  # fmt: skip


def steps(log):
    """Return the steps in a log's lines, in order; [] without a log."""
    text = Path(log).read_text() if os.path.exists(log) else ""
    return [int(step) for step in re.findall(r"^step:(\d+)/\d+ train_loss", text, re.M)]


def results(log):
    """Return {step: (validation loss, data_hash)}; a step said twice must say the same."""
    found = {}
    pattern = r"^step:(\d+)/\d+ val_loss:(\S+) .*data_hash:(\w+)$"
    for step, *said in re.findall(pattern, Path(log).read_text(), re.M):
        assert found.setdefault(int(step), said) == said, f"step {step}: {said}, {found[int(step)]}"
    return found


def wait_for_moment(run, processes, in_write, folder, choice):
    """Wait until the random moment has come; return the workers' process ids, [] if it ended."""
    began, pids = time.time(), []
    while run.poll() is None and len(pids) < processes:
        time.sleep(0.01)
        try:
            pids = workers(run.pid)
        except OSError:  # a process is just starting or ending
            pids = []
    end = time.monotonic() + (60 if in_write else choice.uniform(0, 9))
    while run.poll() is None and time.monotonic() < end:
        with contextlib.suppress(FileNotFoundError):  # it has just taken its name
            if in_write and any(p.stat().st_mtime > began for p in folder.glob("*.partial")):
                break
        time.sleep(0.001 if in_write else 0.01)
    return pids if run.poll() is None else []


def cycle(settings, processes, choice):
    """Start, interrupt, wait; return the row of the table, None if the run was at its end."""
    folder = Path(settings["log_dir"]) / settings["run_id"]
    log = folder.with_suffix(".txt")
    before = len(steps(log))
    number = choice.choice([signal.SIGKILL, signal.SIGTERM])
    in_write, rank = choice.random() < 1 / 3, choice.randrange(processes)
    run = start(settings, processes)
    pids = wait_for_moment(run, processes, in_write, folder, choice)
    if not pids:
        run.communicate()
        return None
    os.kill(pids[rank], number)
    sent = time.monotonic()
    try:
        _, stderr = run.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        raise SystemExit(f"still running 60 s after {number.name} to rank {rank}") from None
    seconds, done = time.monotonic() - sent, steps(log)[before:]
    saved = re.search("ended by a signal, saved in .*state_step0*([0-9]+)", last_line(log) or "")
    said = re.search("train_gpt2.py: (.*)", stderr)
    if run.returncode and not said and done:
        raise SystemExit(f"a failure without a sentence after {number.name} to {rank}:\n{stderr}")
    return dict(
        signal=number.name, rank=rank, moment="write" if in_write else "any",
        first=done[0] if done else None, last=done[-1] if done else None,
        saved=int(saved[1]) if saved and number == signal.SIGTERM and not run.returncode else None,
        exit=run.returncode, seconds=seconds,
    )  # fmt: skip


def last_line(log):
    lines = Path(log).read_text().splitlines() if os.path.exists(log) else []
    return lines[-1] if lines else None


def soak(processes, cycles, folder, choice):
    """Run a whole run and one of many cycles; print the table; return whether they are the same."""
    settings = {
        **SETTINGS, "num_iterations": 20 * cycles, "train_files": f"{folder}/train_*.bin",
        "val_files": f"{folder}/val_*.bin", "log_dir": f"{folder}/logs{processes}",
    }  # fmt: skip
    whole = start({**settings, "run_id": "whole"}, processes)
    if whole.communicate()[0] or whole.returncode:
        raise SystemExit("the run that nobody interrupts failed")
    settings |= {"run_id": "soak", "resume": "auto"}
    # auto would find the whole run's checkpoints: they fit
    os.rename(f"{folder}/logs{processes}", f"{folder}/whole{processes}")
    print(f"\n{processes} processes, {settings['num_iterations']} steps, a checkpoint every "
          f"{settings['save_every']}")  # fmt: skip
    print("cycle  signal   rank  moment  steps done       exit  seconds  done twice")
    twice, previous, saved, ok = 0, 0, False, True  # saved: the last steps, by a SIGTERM
    for number in range(1, cycles + 1):
        row = cycle(settings, processes, choice)
        if row is None:
            print(f"{number:5d}  the run was at its end")
            break
        again = 0
        if row["first"]:
            again = previous + 1 - row["first"]
            ok, twice = ok and not (saved and again), twice + again
            previous, saved = row["last"], row["saved"] is not None
        done = f"{row['first']}..{row['last']}" if row["first"] else "none"
        print(
            f"{number:5d}  {row['signal']}  {row['rank']:4d}  {row['moment']:6s}  {done:15s}  "
            f"{row['exit']:4d}  {row['seconds']:7.1f}  {again:6d}",
            flush=True,
        )
    last = start(settings, processes)
    last.communicate()
    logs = f"{folder}/logs{processes}/soak.txt", f"{folder}/whole{processes}/whole.txt"
    name = f"state_step{settings['num_iterations']:06d}.pt"
    files = f"{folder}/logs{processes}/soak/{name}", f"{folder}/whole{processes}/whole/{name}"
    same = last.returncode == 0 and results(logs[0]) == results(logs[1]) and same_state(*files)
    final = results(logs[0])[settings["num_iterations"]] if last.returncode == 0 else None
    print(f"interrupted:   val_loss, data_hash {final}; not: "
          f"{results(logs[1])[settings['num_iterations']]}")  # fmt: skip
    print(f"all losses, hashes and the last checkpoint's bits the same: {same}; steps done twice "
          f"after SIGKILL: {twice}; after a SIGTERM: {'none' if ok else 'SOME'}")  # fmt: skip
    return same and ok


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=30)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"command: tests/soak.py --cycles {args.cycles} --seed {args.seed}")
    with tempfile.TemporaryDirectory() as folder:
        stream = np.cumsum(np.random.default_rng(0).integers(1, 4, size=120000)) % 256
        write_shard(Path(folder) / "train_0.bin", stream[:60000])
        write_shard(Path(folder) / "train_1.bin", stream[60000:110000])
        write_shard(Path(folder) / "val_0.bin", stream[110000:])
        choice = random.Random(args.seed)
        same = [soak(n, args.cycles, folder, choice) for n in args.processes]
    sys.exit(0 if all(same) else 1)


if __name__ == "__main__":
    main()
