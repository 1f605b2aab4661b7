"""Kill and stop runs at random and go on, again and again: does the result stay the same bits?

    python tests/bench/soak.py --cycles 30 --processes 2 3     # some minutes for each on 2 cores

A cycle starts `torchrun train_gpt2.py --resume=...` (auto, or by chance the newest checkpoint's
name) and sends SIGKILL or SIGTERM to a random rank, at a moment that is by chance any from the
start of the processes on, after a number of steps, or while a checkpoint is being written; at the
last two torchrun itself may be hit (rank -1), which the ranks must answer by saving, or torchrun
and all ranks at once by SIGTERM (rank -2), as `pkill -f` or a cgroup's stop does. After the last
cycle the run goes on to its end. Among its checkpoints lie others that it did not write: a copy
under another name, and a damaged one that seems to be the newest, which a resume by name renames.
Printed is a table of the cycles. The exit status is 1 unless all losses and hashes and the whole
last checkpoint equal those of a run that nobody interrupted, no step is lost by a signal that a
step could answer, every run ended within a minute of its signal, and no file that the run did not
write has changed.
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
from conftest import ROOT, bits, ranks_of, write_shard

SETTINGS = {
    "vocab_size": 256,
    "n_layer": 4,
    "n_head": 2,
    "n_embd": 128,
    "batch_size": 6,
    "device_batch_size": 1,
    "sequence_length": 64,
    "warmdown_iters": 100,
    "learning_rate": 0.01,
    "muon_learning_rate": 0.0005,
    "val_loss_every": 100,
    "val_tokens": 1280,
    "device": "cpu",
    "compile": False,
    "allow_repeat": True,
    "comm_timeout": 60,
    "save_every": 5,
}


def start(settings, processes):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={processes}", str(ROOT / "train_gpt2.py")]
    command += [f"--{name}={value}" for name, value in settings.items()]
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def steps(text):
    """Return the steps in a log's lines, in order."""
    return [int(step) for step in re.findall(r"^step:(\d+)/\d+ train_loss", text, re.M)]


def results(text):
    """Return {step: (validation loss, data_hash)}; a step said twice must say the same."""
    found = {}
    pattern = r"^step:(\d+)/\d+ val_loss:(\S+) .*data_hash:(\w+) lr:\S+$"
    for step, *said in re.findall(pattern, text, re.M):
        assert found.setdefault(int(step), said) == said, f"step {step}: {said}, {found[int(step)]}"
    return found


class Run:
    """A run that is started again and again, its checkpoints, and files that are not its own."""

    def __init__(self, settings, processes):
        self.settings, self.processes = settings, processes
        self.folder = Path(settings["log_dir"]) / settings["run_id"]
        self.foreign = {}  # path: its bytes

    def log(self):
        path = self.folder.with_suffix(".txt")
        return path.read_text() if path.exists() else ""

    def checkpoints(self):
        """Return the run's own, oldest first."""
        paths = sorted(self.folder.glob("state_step??????????.pt"))
        return [path for path in paths if path not in self.foreign]

    def add_foreign(self):
        """Put files that the run did not write beside its first checkpoints."""
        if self.foreign or not self.checkpoints():
            return
        whole = self.checkpoints()[0].read_bytes()
        self.foreign[self.folder / "state_step0000000000_mine.pt"] = whole
        self.foreign[self.folder / "state_step0000999999.pt"] = whole[: len(whole) // 2]
        for path, content in self.foreign.items():
            path.write_bytes(content)

    def changed(self):
        """Return the names of the foreign files that are no longer what they were.

        A resume from an older checkpoint adds .abandoned to the names of newer ones.
        """
        names = []
        for path, content in self.foreign.items():
            places = path, path.with_name(f"{path.name}.abandoned")
            if not any(place.exists() and place.read_bytes() == content for place in places):
                names.append(path.name)
        return names

    def start(self, resume="auto"):
        return start({**self.settings, "resume": resume}, self.processes)


def wait_for_moment(process, run, moment, choice):
    """Wait until the random moment has come; return the workers' process ids, [] if it ended."""
    began, pids = time.time(), []
    while process.poll() is None and len(pids) < run.processes:
        time.sleep(0.01)
        try:
            pids = ranks_of(process)
        except OSError:  # a process is just starting or ending
            pids = []
    enough = len(steps(run.log())) + choice.randrange(1, 20)
    end = time.monotonic() + (choice.uniform(0, 9) if moment == "any" else 60)
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(FileNotFoundError):  # none yet, or it has just taken its name
            if moment == "write" and (run.folder / "partial").stat().st_mtime > began:
                break
        if moment == "steps" and len(steps(run.log())) >= enough:
            break
        time.sleep(0.001 if moment == "write" else 0.02)
    return pids if process.poll() is None else []


def cycle(run, choice):
    """Start, interrupt, wait; return the row of the table, None if the run was at its end."""
    run.add_foreign()
    before = len(steps(run.log()))
    number = choice.choice([signal.SIGKILL, signal.SIGTERM])
    moment = choice.choice(["any", "steps", "write"])
    rank = choice.randrange(0 if moment == "any" else -2, run.processes)
    if rank == -2:
        number = signal.SIGTERM
    by_name = choice.random() < 1 / 3 and bool(run.checkpoints())
    process = run.start(run.checkpoints()[-1] if by_name else "auto")
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
    seconds, log = time.monotonic() - sent, run.log()
    done = steps(log)[before:]
    saved = re.search(r"^stopped by a signal after step \d+\n\Z", log, re.M)
    finished = re.search(r"^result .*\n\Z", log, re.M)
    answered = (saved or finished) if rank < 0 else "train_gpt2.py: " in stderr
    if process.returncode and done and not answered:
        raise SystemExit(f"no answer to {number.name} to rank {rank}:\n{stderr}")
    return dict(
        signal=number.name,
        rank=rank,
        resume="name" if by_name else "auto",
        moment=moment,
        first=done[0] if done else None,
        last=done[-1] if done else None,
        saved=bool(saved),
        exit=process.returncode,
        seconds=seconds,
    )


def soak(processes, cycles, folder, choice):
    """Run a whole run and one of many cycles; print the table; return whether they are the same."""
    settings = {
        **SETTINGS,
        "num_iterations": 20 * cycles,
        "train_files": f"{folder}/train_*.bin",
        "val_files": f"{folder}/val_*.bin",
        "log_dir": f"{folder}/logs{processes}",
    }
    whole = Run({**settings, "run_id": "whole"}, processes)
    process = whole.start()
    _, stderr = process.communicate()
    if process.returncode:
        raise SystemExit(f"the run that nobody interrupts failed:\n{stderr}")
    last_of_whole = whole.checkpoints()[-1]
    whole.foreign = {path: path.read_bytes() for path in whole.checkpoints()}
    run = Run({**settings, "run_id": "soak"}, processes)
    print(
        f"\n{processes} processes, {settings['num_iterations']} steps, a checkpoint every "
        f"{settings['save_every']}"
    )
    print("cycle  signal   rank  resume  moment  steps done       exit  seconds  done twice")
    twice, previous, saved, lost = 0, 0, False, False  # saved: the last steps, by an answer
    for number in range(1, cycles + 1):
        row = cycle(run, choice)
        if row is None:
            print(f"{number:5d}  the run was at its end")
            break
        again, done = 0, "none"
        if row["first"]:
            again = previous + 1 - row["first"]
            lost, twice = lost or (saved and again > 0), twice + again
            previous, saved = row["last"], row["saved"]
            done = f"{row['first']}..{row['last']}"
        print(
            f"{number:5d}  {row['signal']}  {row['rank']:4d}  {row['resume']:6s}  "
            f"{row['moment']:6s}  {done:15s}  {row['exit']:4d}  {row['seconds']:7.1f}  {again:6d}",
            flush=True,
        )
    last = run.start()
    _, stderr = last.communicate()
    if last.returncode:
        raise SystemExit(f"the run could not go on to its end:\n{stderr}")
    found, expected = results(run.log()), results(whole.log())
    changed = whole.changed() + run.changed()
    same = found == expected and bits(run.checkpoints()[-1]) == bits(last_of_whole)
    end = settings["num_iterations"]
    print(f"interrupted:   val_loss, data_hash {found[end]}; not: {expected[end]}")
    print(
        f"all losses, hashes and the last checkpoint's bits the same: {same}; steps done twice "
        f"after SIGKILL: {twice}; after an answer: {'SOME' if lost else 'none'}; files of others "
        f"in place: {len(run.foreign)}, changed: {changed or 'none'}"
    )
    return same and not lost and not changed and len(run.foreign) == 2


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=30)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"command: tests/bench/soak.py --cycles {args.cycles} --seed {args.seed}")
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
