"""Run a record again from its own log, and say whether the loss is within its spread.

    bash run.sh records/<date>_<Name> [NAME] [--field=value ...]

NAME: which of the record's runs, muon or muon_seed3; without it the first. Sources and settings
come from its log, so the code in the log is executed: only repeat logs that you trust. Data come
from where the log says; fields given here come last (--seed=11). The new loss is held against the
group's logs: within the 99% prediction interval of their mean and standard deviation (Student's t)
the exit status is 0, else 1; of a single run only the difference is said. Refused: other data than
the record's, fields that make it another experiment, a group with a run that was cut or prolonged.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from compare import check_finished, check_starts, differences, training_data
from report import command
from runlog import INCIDENTAL, RENAMED_SETTINGS, ROOT, defaults, logs_in, packages, read, require

with packages():
    from scipy import stats

LEVEL = 0.99
ROUNDING = 5e-5  # of a logged loss
OUR_OWN = {"run_id", "log_dir", "resume"}  # settings that a repetition does not take over


def choose(folder, name):
    """Return (the run to repeat, the runs of its group)."""
    records = [path.parent.name for path in sorted(ROOT.glob("records/*/README.md"))]
    listed = ", ".join(f"records/{record}" for record in records)
    require(Path(folder).is_dir(), f"{folder} is no record: give one of {listed}")
    runs = logs_in(folder)
    names = dict.fromkeys(name for run in runs for name in (run.label, run.path.stem))
    require(
        runs and "train_files" in runs[0].settings,
        f"{folder} holds no log of a training run of train_gpt2.py: nothing to repeat",
    )
    require(name in (None, *names), f"{folder} has no run {name!r}: give one of {[*names]}")
    run = next(run for run in runs if name in (None, run.label, run.path.stem))
    group = [other for other in runs if other.label == run.label]
    check_starts(group)
    for other in group:
        check_finished(other)
        require(
            len(other.planned) == 1,
            f"{other.path} was prolonged in a resume, and no run in one go repeats it",
        )
    return run, group


def unpack(run, folder):
    """Write the logged sources, laid out as in the repository; return the script's path."""
    for name, text in run.sources.items():
        path = (folder / name).resolve()
        require(folder in path.parents, f"{run.path} names a source outside its folder: {name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / next(iter(run.sources))


def fetch(run):
    """Make the data where it is of a kind that this repository can make."""
    pattern = run.settings["train_files"]
    if pattern.startswith("data/torch_sources/"):
        environment = os.environ | {"PYTHON": sys.executable}
        subprocess.run(["bash", "run.sh", "data"], check=True, env=environment)
    elif pattern.startswith("data/fineweb10B/"):
        shards = -(-run.settings["num_iterations"] * run.tokens_per_step // 10**8)
        subprocess.run([sys.executable, "data/fineweb.py", str(shards)], check=True)


def arguments_of(run):
    """Return the run's settings as command-line arguments, by the names that its source knows."""
    known = defaults(next(iter(run.sources.values())))
    names = {new: old for old, new in RENAMED_SETTINGS.items() if old in known}
    settings = {n: v for n, v in run.settings.items() if n not in OUR_OWN and v is not None}
    return [f"--{names.get(name, name)}={value}" for name, value in settings.items()]


def repeat(run, fields, log_dir):
    """Train again as logged; return the path of the new log."""
    name = f"rerun_{run.path.stem}_{time.strftime('%Y%m%d-%H%M%S')}"
    processes = int(run.facts.get("processes", 1))
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    with tempfile.TemporaryDirectory() as folder:
        script = unpack(run, Path(folder).resolve())
        argv = [sys.executable, *(launch if processes > 1 else []), str(script)]
        argv += [*arguments_of(run), *fields, f"--run_id={name}", f"--log_dir={log_dir}"]
        done = subprocess.run(argv)
    require(done.returncode == 0, f"the repetition ended with exit status {done.returncode}")
    return log_dir / f"{name}.txt"


def spread(losses):
    """Return (low, high) in which another run's loss lies with probability LEVEL."""
    n, half = len(losses), np.inf
    if n > 1:
        half = stats.t.isf((1 - LEVEL) / 2, n - 1) * np.std(losses, ddof=1) * np.sqrt(1 + 1 / n)
    return np.mean(losses) - half, np.mean(losses) + half


def judge(again, run, group):
    """Print how the repetition's loss lies; return the exit status."""
    check_finished(again)
    here, there = again.facts.get("val_hash"), run.facts.get("val_hash")
    require(
        here == there,
        f"val_hash is {here} here, {there} in the record: other validation tokens, so the losses "
        f"do not compare",
    )
    require(
        again.definition() == run.definition(),
        f"another experiment, and not a repetition: {differences(again, run)}",
    )
    require(not training_data([run, again]), "no data_hash in common: the data cannot be compared")
    products = [r.facts.get("products") for r in (again, run)]
    if products[0] != products[1]:
        print("products: {} here, {} in the log".format(*products))
    losses = [other.val_loss for other in group]
    low, high = spread(losses)
    print(
        f"\n{run.path}: seed {run.seed}, loss {run.val_loss:.4f}; again: seed {again.seed}, loss "
        f"{again.val_loss:.4f}, {again.train_ms / 1000:.0f} s of training after "
        f"{run.train_ms / 1000:.0f} s there."
    )
    if len(group) < 2:
        print(f"One run has no spread: the losses differ by {again.val_loss - run.val_loss:+.4f}.")
        return 0
    within = low - ROUNDING <= again.val_loss <= high + ROUNDING
    print(
        f"{'Within' if within else 'NOT within'} the spread of {run.label}, {low:.4f} to "
        f"{high:.4f} ({LEVEL:.0%} prediction interval, n={len(losses)})."
    )
    return int(not within)


def main(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("name", nargs="?")
    parser.add_argument("--log_dir", type=Path, default="logs")
    options, fields = parser.parse_known_args(argv)
    for field in fields:
        require(
            field.startswith("--") and field[2:].partition("=")[0] in INCIDENTAL,
            f"{field} would make it another experiment: a repetition may only change "
            f"{', '.join(sorted(INCIDENTAL - OUR_OWN))}",
        )
    run, group = choose(options.folder, options.name)
    logged = run.facts.get("torch")
    if logged != torch.__version__:
        print(f"torch {torch.__version__} here, {logged} in the log")
    print(f"executing the code in {run.path}: only do this with logs that you trust", flush=True)
    fetch(run)
    return judge(read(repeat(run, fields, options.log_dir)), run, group)


if __name__ == "__main__":
    os.chdir(ROOT)
    command(main)
