"""Interrupt, damage and starve tiny runs, and check that no result is lost, wrong or inherited.

    python tests/bench/hostile.py [--kinds=kills,chains,...] [--seed=0]

Each case ends with two resumes without faults. Then model.pt must have the bits of an undisturbed
run, the log must hold its loss and no other, and the tools must be able to read it. A run that ends
with status 0 must satisfy this at once. Prints a line for each fault that it finds, and counts.
"""

import argparse
import contextlib
import random
import re
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "records" / "tools")]
import runlog  # noqa: E402
from conftest import SCRIPT, TINY, bits_of, launcher, run_forked, write_shard  # noqa: E402

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
    "main", "train", "validate", "claim_folder", "restore", "newest_file", "load_weights", "save",
    "read_pt", "save_checkpoint", "log_header", "log_summary", "write", "progress", "timed",
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
        self.cases = self.invocations = self.faults = 0

    def run(self, folder, ranks=1, script=SCRIPT, **changes):
        """Run once; if the status is 0 and the run was not stopped, check its result."""
        self.invocations += 1
        settings = self.fields | dict(log_dir=folder, run_id="r", resume="auto") | changes
        done = run_forked(settings, ranks, script)
        if done.returncode == 0 and "stopped by a signal" not in done.stdout:
            self.check(folder, ranks)
        self.require("Traceback" not in done.stderr, folder, done.stderr[-300:])
        return done

    def check(self, folder, ranks):
        state = train_gpt2.read_pt(folder / "r" / "model.pt")
        log = (folder / "r.txt").read_text(errors="replace")
        bits, losses = bits_of(state["model"]), set(re.findall("^val_loss: ?(.*)$", log, re.M))
        expected = self.expected.setdefault(ranks, (bits, losses))
        self.require(bits == expected[0], folder, "other weights")
        readable = {f"{runlog.read(folder / 'r.txt').val_loss:.4f}"}
        self.require(losses == expected[1] == readable, folder, f"the log says {losses}")

    def require(self, condition, folder, sentence):
        if not condition:
            self.faults += 1
            print(f"FAULT {folder.name}: {sentence}", flush=True)

    @contextlib.contextmanager
    def case(self, ranks=1, **changes):
        """Yield a new folder; then resume without faults, twice."""
        self.cases += 1
        folder = self.parent / f"case{self.cases}"
        folder.mkdir()
        try:
            yield folder
            for _ in range(2):
                done = self.run(folder, ranks, **changes)
                self.require(done.returncode == 0, folder, done.stderr[-300:])
            self.require("nothing to do" in done.stdout, folder, "not recognised as finished")
        except Exception as error:
            self.require(False, folder, repr(error))
        shutil.rmtree(folder)

    def traced(self, folder, at, number=9):
        """Return a script that gets a signal at a line of the machinery."""
        code = TRACE.format(names=MACHINERY, at=at, number=number, report=f"{folder}/lines")
        return launcher(folder, code)

    # ---- The kinds
    def kills(self, number=9):
        """A signal at every line of the machinery that a run executes."""
        with self.case() as folder:
            self.run(folder, script=self.traced(folder, -1))
            lines = int((folder / "lines").read_text())
        for at in range(1, lines + 1):
            with self.case() as folder:
                self.run(folder, script=self.traced(folder, at, number))

    def stops(self):
        """SIGTERM instead of SIGKILL."""
        self.kills(15)

    def chains(self):
        """Kills at random lines of each start, on one to three ranks, until the run ends."""
        for number in range(40):
            ranks = 1 + number % 3
            with self.case(ranks) as folder:
                for _ in range(self.random.randint(2, 6)):
                    self.run(folder, ranks, self.traced(folder, self.random.randint(1, 400)))

    def disks(self):
        """No file may be larger than a limit, of 60 sizes; then the limit is gone."""
        for size in [*range(40_000, 90_000, 1_000), *range(1_000, 40_000, 4_000)]:
            code = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, -1))"
            with self.case(save_every=0) as folder:
                self.run(folder, script=launcher(folder, code), save_every=0)

    def damages(self):
        """The newest checkpoint is cut, or a byte of it is changed."""
        for number in range(60):
            with self.case(save_every=1) as folder:
                self.run(folder, script=self.traced(folder, 300), save_every=1)
                paths = train_gpt2.checkpoints_in(folder / "r")
                if len(paths) > 1:
                    data = bytearray(paths[-1].read_bytes())
                    place = self.random.randrange(len(data))
                    data[place] ^= 1 + self.random.randrange(255)
                    paths[-1].write_bytes(data[: place if number % 2 else None])

    def doubles(self):
        """Two processes start the same run at the same moment."""
        for _ in range(24):
            with self.case() as folder, ThreadPoolExecutor(2) as pool:
                done = list(pool.map(self.run, [folder, folder]))
                trained = not all(run.returncode for run in done)
                self.require(trained, folder, "nobody has trained")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default="kills,stops,chains,disks,damages,doubles")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        trial = Trial(Path(parent), args.seed)
        for ranks in 1, 2, 3:
            with trial.case(ranks):
                pass  # undisturbed
        for kind in args.kinds.split(","):
            before = trial.invocations
            getattr(trial, kind)()
            print(f"{kind:8s} {trial.invocations - before:5d} invocations", flush=True)
    print(f"total {trial.invocations} invocations, {trial.faults} faults")
    sys.exit(trial.faults > 0)


if __name__ == "__main__":
    main()
