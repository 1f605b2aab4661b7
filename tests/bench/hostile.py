"""Interrupt, damage and starve tiny runs, and check that no result is lost, wrong or inherited.

    python tests/bench/hostile.py [--kinds=kills,chains,...] [--seed=0]

Each case ends with a resume without faults. Then model.pt must have the bits of an undisturbed run,
the log must hold its loss and no other, and the tools must be able to read it. A run that ends with
status 0 must satisfy this at once. Prints a line for each fault that it finds, and counts by kind.
Kinds that need strace or root are skipped where they are missing.
"""

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "records" / "tools")]
import runlog  # noqa: E402
from conftest import SCRIPT, TINY, bits_of, launcher, options, run_forked, write_shard  # noqa: E402

import train_gpt2  # noqa: E402

# Counts the lines that functions of these names run, and sends a signal at one of them.
TRACE = """
names, at, number = {names!r}, {at}, {number}
count = 0

def trace(frame, event, argument):
    global count
    if frame.f_code.co_filename != train_gpt2.__file__ or frame.f_code.co_name not in names:
        return None
    if event == "line":
        count += 1
        if count == at:
            os.kill(os.getpid(), number)
    return trace

leave_ranks = train_gpt2.leave_ranks

def report_and_leave():
    Path({report!r}).write_text(str(count))
    leave_ranks()

train_gpt2.leave_ranks = report_and_leave
sys.settrace(trace)"""
MACHINERY = [
    "main", "claim_folder", "is_finished", "restore",
    "newest_checkpoint", "load_checkpoint", "check_same", "save", "save_checkpoint", "finish",
    "save_and_stop", "log_header", "log_summary", "start_file", "write", "validate",
]  # fmt: skip


class Trial:
    """A folder with data, in which runs are disturbed."""

    def __init__(self, parent, seed):
        self.parent, self.random = parent, random.Random(seed)
        steps = np.random.default_rng(0).integers(1, 4, size=4000)
        stream = np.cumsum(steps) % 64
        write_shard(parent / "train_0.bin", stream[:3000])
        write_shard(parent / "val_0.bin", stream[3000:3400])
        files = dict(train_files=f"{parent}/train_*.bin", val_files=f"{parent}/val_*.bin")
        self.fields = TINY | files | dict(save_every=2, dtype="float32", num_iterations=4)
        self.expected = {}  # {number of ranks: (bits of model.pt, loss in the log)}
        self.counts, self.faults = Counter(), []

    def settings(self, folder, **changes):
        return self.fields | dict(log_dir=folder, run_id="r", resume="auto") | changes

    def run(self, kind, folder, ranks=1, script=SCRIPT, **changes):
        """Run once; if the status is 0 and the run was not stopped, check its result."""
        self.counts[kind] += 1
        done = run_forked(self.settings(folder, **changes), ranks, script)
        if done.returncode == 0 and "stopped by a signal" not in done.stdout:
            self.check(kind, folder, ranks, done)
        if "Traceback" in done.stderr:
            self.fault(kind, folder, f"traceback: {done.stderr[-300:]}")
        return done

    def attempt(self, kind, case, folder):
        try:
            case(folder)
        except Exception as error:
            self.fault(kind, folder, repr(error))

    def result(self, folder):
        state = train_gpt2.read_pt(folder / "r" / "model.pt")
        log = (folder / "r.txt").read_text(errors="replace")
        return bits_of(state["model"]), set(re.findall("^val_loss: ?(.*)$", log, re.M))

    def check(self, kind, folder, ranks, done):
        try:
            found = self.result(folder)
            loss = runlog.read(folder / "r.txt").val_loss
        except Exception as error:
            self.fault(kind, folder, f"{error!r}, status 0")
            return
        self.expected.setdefault(ranks, found)
        bits, losses = self.expected[ranks]
        if found[0] != bits:
            self.fault(kind, folder, "other weights")
        if found[1] != losses or {f"{loss:.4f}"} != losses:
            self.fault(kind, folder, f"the log says {found[1]}, not {losses}")

    def fault(self, kind, folder, sentence):
        self.faults.append(f"{kind} {folder.name}: {sentence}")
        print("FAULT", self.faults[-1], flush=True)

    def end(self, kind, folder, ranks=1, **changes):
        """Resume without faults, twice; the second time, nothing may be left to do."""
        for _ in range(2):
            done = self.run(kind, folder, ranks, **changes)
            if done.returncode:
                self.fault(kind, folder, f"status {done.returncode}: {done.stderr[-300:]}")
        if "nothing to do" not in done.stdout:
            self.fault(kind, folder, "not recognised as finished")
        shutil.rmtree(folder)

    def traced(self, folder, at, number):
        code = TRACE.format(names=MACHINERY, at=at, number=number, report=f"{folder}/lines")
        return launcher(folder, code)

    # ---- The kinds. Each yields functions of a new folder.
    def kills(self, kind="kills", number=9):
        """A signal at every line of the machinery that a run executes."""
        folder = self.parent / f"count{number}"
        folder.mkdir()
        self.run(kind, folder, script=self.traced(folder, -1, number))
        for at in range(1, int((folder / "lines").read_text()) + 1):
            yield lambda folder, at=at: (
                self.run(kind, folder, script=self.traced(folder, at, number)),
                self.end(kind, folder),
            )

    def stops(self):
        """SIGTERM instead of SIGKILL."""
        yield from self.kills("stops", 15)

    def chains(self):
        """Kills at random lines of each start, on one to three ranks, until the run ends."""
        for number in range(40):
            ranks = 1 + number % 3

            def chain(folder, ranks=ranks):
                for _ in range(self.random.randint(2, 6)):
                    script = self.traced(folder, self.random.randint(1, 400), 9)
                    self.run("chains", folder, ranks, script)
                self.end("chains", folder, ranks)

            yield chain

    def disks(self):
        """No file may be larger than a limit, of 60 sizes; then the limit is gone."""
        for size in [*range(90_000, 120_000, 600), *range(1_000, 90_000, 9_000)]:
            code = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, -1))"
            yield lambda folder, code=code: (
                self.run("disks", folder, script=launcher(folder, code), save_every=0),
                self.end("disks", folder, save_every=0),
            )

    def tmpfs(self):
        """The disk is full at 63 sizes, the smallest without space for a log; then it has space."""
        for size in range(100, 604, 8):

            def fill(folder, size=size):
                mount = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", folder]
                subprocess.run(mount, check=True)
                try:
                    self.run("tmpfs", folder / "logs")
                    subprocess.run(["mount", "-o", "remount,size=64m", folder], check=True)
                    self.end("tmpfs", folder / "logs")
                finally:
                    subprocess.run(["umount", folder], check=True)

            yield fill

    def damages(self):
        """The newest checkpoint is cut, or a byte of it is changed."""
        for number in range(60):

            def damage(folder, number=number):
                self.run("damages", folder, script=self.traced(folder, 300, 9), save_every=1)
                paths = train_gpt2.checkpoints_in(folder / "r")
                if len(paths) > 1:
                    data = bytearray(paths[-1].read_bytes())
                    place = self.random.randrange(len(data))
                    data[place] ^= 1 + self.random.randrange(255)
                    paths[-1].write_bytes(data[: place if number % 2 else None])
                self.end("damages", folder, save_every=1)

            yield damage

    def doubles(self):
        """Two processes start the same run at the same moment."""
        for _ in range(24):

            def double(folder):
                with ThreadPoolExecutor(2) as pool:
                    done = list(pool.map(lambda _: self.run("doubles", folder), range(2)))
                if all(run.returncode for run in done):
                    self.fault("doubles", folder, "nobody has trained")
                self.end("doubles", folder)

            yield double

    def straced(self, kind, folder, inject, **changes):
        """Run under strace, which injects a fault. Return the CompletedProcess."""
        self.counts[kind] += 1
        command = ["strace", "-f", "-o", "/dev/null", *inject, sys.executable, str(SCRIPT)]
        command += options(self.settings(folder, **changes))
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode == 0:
            self.check(kind, folder, 1, done)
        return done

    def writes(self):
        """The n-th write into the log fails, for all n."""
        for n in range(1, 31):

            def fail(folder, n=n):
                inject = ["-P", f"{folder}/r.txt", "-e", f"inject=write:error=ENOSPC:when={n}"]
                self.straced("writes", folder, inject)
                self.end("writes", folder)

            yield fail

    def late_locks(self):
        """A start waits between its check and its lock, while another trains to the end."""
        for _ in range(4):

            def late(folder):
                inject = ["-e", "trace=flock", "-e", "inject=flock:delay_enter=12000000"]
                with ThreadPoolExecutor(1) as pool:
                    changes = dict(resume="", seed=2)
                    slow = pool.submit(self.straced, "late_locks", folder, inject, **changes)
                    while not (folder / "r" / "run.lock").exists():
                        pass
                    self.run("late_locks", folder, resume="")
                    if "exists: pass another" not in slow.result().stderr:
                        self.fault("late_locks", folder, slow.result().stderr[-200:])
                self.end("late_locks", folder)

            yield late


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = "kills,stops,chains,disks,tmpfs,damages,doubles,writes,late_locks"
    parser.add_argument("--kinds", default=kinds)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        trial = Trial(Path(parent), args.seed)
        for ranks in 1, 2, 3:
            folder = trial.parent / f"whole{ranks}"
            folder.mkdir()
            trial.run("undisturbed", folder, ranks)
        for kind in args.kinds.split(","):
            if kind in ("writes", "late_locks") and not shutil.which("strace"):
                print(f"{kind}: skipped, strace is missing")
                continue
            if kind == "tmpfs" and os.geteuid() != 0:
                print(f"{kind}: skipped, only root may mount it")
                continue
            for number, case in enumerate(getattr(trial, kind)()):
                folder = trial.parent / f"{kind}{number}"
                folder.mkdir()
                trial.attempt(kind, case, folder)
            faults = sum(fault.startswith(kind) for fault in trial.faults)
            print(f"{kind:12s} {trial.counts[kind]:5d} invocations, {faults} faults", flush=True)
    print(dict(trial.counts))
    print(f"total {trial.counts.total()} invocations, {len(trial.faults)} faults")
    sys.exit(len(trial.faults) > 0)


if __name__ == "__main__":
    main()
