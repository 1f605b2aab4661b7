"""Train a record again from its own log and test whether the loss is within the record's spread.

    bash run.sh records/<date>_<Name> [NAME] [--field=value ...]

NAME is a log of the record, such as seeds/B_round5 or muon_seed3. By default, it is a log of the
experiment with the most seeds. The source and the settings come from the log, so the code in the
log is executed: only rerun logs that you trust. Settings given here, such as --seed=11, override
them; those that would change the experiment are rejected.

The new loss is compared with the 99% prediction interval of all runs of the experiment, one per
seed (Student's t). The exit status is 0 if it lies inside, otherwise 1. For an experiment with one
seed, both losses are printed without a verdict.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import runlog
from compare import check_comparable, check_finished, differences
from report import check_equal
from runlog import ROOT, argument_parser, command, packages, require

with packages():
    from scipy import stats

LEVEL = 0.99
ROUNDING = 5e-5  # largest rounding error of a logged loss


def choose(folder, name):
    """Return (the run to repeat, the runs of its experiment with one run per seed)."""
    require(folder.is_dir(), f"{folder} is not a folder: give a folder in records/")
    # A single command cannot repeat a run that was continued.
    logs = [run for run in runlog.logs_in(folder) if not run.continued]
    runs = {f"{run.path.relative_to(folder).with_suffix('')}": run for run in logs}
    require(runs, f"{folder} holds no log of a training run: its README says how it was measured")
    require(name in (None, *runs), f"{folder} has no run {name!r}: give one of {[*runs]}")

    def repetitions(run):
        alike = [other for other in logs if differences(run, other) == "nothing"]
        for value in runlog.COMPARABLE.values():
            alike = [other for other in alike if value(other) == value(run)]
        return list({other.seed: other for other in alike}.values())

    run = runs[name] if name else max(logs, key=lambda run: len(repetitions(run)))
    group = repetitions(run)
    for other in group:
        check_finished(other)
    check_comparable(group)
    return run, group


def arguments_of(run):
    """Return the settings of a run as arguments for its own script."""
    given = sorted(run.settings.keys() - runlog.SET_FOR_EACH_RUN)
    return [f"--{name}={run.settings[name]}" for name in given if run.settings[name] is not None]


def repeat(run, fields, log_dir):
    """Train again as logged; return the path of the new log."""
    name = f"rerun_{run.path.stem}_{time.strftime('%Y%m%d-%H%M%S')}"
    processes = int(run.facts.get("processes", 1))
    with tempfile.TemporaryDirectory() as folder:
        for source, text in run.sources.items():  # laid out as in the repository
            path = Path(folder, source)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        script = f"{folder}/{next(iter(run.sources))}"
        argv = [*runlog.launch_command(processes), script]
        argv += [*arguments_of(run), *fields, f"--run_id={name}", f"--log_dir={log_dir}"]
        done = subprocess.run(argv)
    require(done.returncode == 0, f"the repetition ended with exit status {done.returncode}")
    return log_dir / f"{name}.txt"


def prediction_interval(losses):
    """Return (low, high) between which another run's loss lies with probability LEVEL."""
    n = len(losses)
    scale = np.std(losses, ddof=1) * np.sqrt(1 + 1 / n)
    half = scale * stats.t.isf((1 - LEVEL) / 2, n - 1) + ROUNDING
    return np.mean(losses) - half, np.mean(losses) + half


def judge(new_run, run, group):
    """Print how the loss of the repetition compares; return the exit status."""
    check_finished(new_run)
    for what in "validation data", "training data":
        check_equal(what, runlog.COMPARABLE[what], [run, new_run])
    for name in "torch", "matmul_dtype", "device":
        if new_run.facts.get(name) != run.facts.get(name):
            print(f"{name} is {new_run.facts.get(name)} here, {run.facts.get(name)} in the record")
    for name, one in (f"{run.path}", run), ("again", new_run):
        took = f"{one.train_seconds:.0f} s of training"
        print(f"{name}: seed {one.seed}, loss {one.val_loss:.4f}, {took}")
    if len(group) < 2:
        print("only one seed, so there is no spread to compare with")
        return 0
    low, high = prediction_interval([other.val_loss for other in group])
    within = low <= new_run.val_loss <= high
    print(
        f"{'Within' if within else 'NOT within'} the spread of the record, {low:.4f} to {high:.4f} "
        f"({LEVEL:.0%} prediction interval, n={len(group)})."
    )
    return int(not within)


def main(argv):
    parser = argument_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name", nargs="?")
    parser.add_argument("--log_dir", type=Path, default="logs")
    options, fields = parser.parse_known_args(argv)
    allowed = sorted(runlog.MAY_VARY - runlog.SET_FOR_EACH_RUN)
    for field in fields:
        known = field.startswith("--") and field[2:].partition("=")[0] in allowed
        limits = f"a rerun may only change {', '.join(allowed)}"
        require(known, f"{field} would change the experiment: {limits}")
    run, group = choose(options.folder, options.name)
    print(f"executing the code in {run.path}: only do this with logs that you trust", flush=True)
    if run.settings["train_files"].startswith("data/torch_sources/"):
        environment = os.environ | {"PYTHON": sys.executable}
        subprocess.run(["bash", ROOT / "run.sh", "data"], check=True, env=environment)
    return judge(runlog.read(repeat(run, fields, options.log_dir)), run, group)


if __name__ == "__main__":
    command(main)
