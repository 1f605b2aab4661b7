"""What each piece of a recipe is worth: leave one out, or add one, over the same seeds.

    python records/tools/ablate.py --best="--preset=cpu" --seeds 5 --out logs/ablation \\
        --arm "no key shift: --key_shift=0" --arm "softcap: pieces/softcap.diff"
    python records/tools/ablate.py --logs logs/ablation --picture logs/ablation.png

An arm is a name and how it differs from the best settings: further settings, or a diff of
train_gpt2.py, which is applied to a copy. The arms are interleaved, seed after seed, so that
whatever slows down the machine slows down all of them.

Called again with the same --out, the tool keeps finished runs and resumes unfinished ones. It
refuses to start if --out holds a log of other settings or of another source under a name that it
needs, or a log that another process is writing. It deletes nothing except the final weights,
model.pt, of the runs that it has trained itself.

The table refuses an arm that mixes settings or sources, and arms that differ in data, validation
tokens, sequence_length, dtype or target. Differences are paired by seed: mean, 95% t-interval and
two-sided p, corrected for the number of arms by Holm's method. A positive difference means that the
best settings are better.
"""

import argparse
import contextlib
import fcntl
import importlib.util
import math
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from ab import step_ms
from compare import check_group, differences, unlike
from report import command, headed, markdown, new_figure, save
from runlog import INCIDENTAL, ROOT, Run, fingerprint, logs_in, packages, read, require

with packages():
    from scipy import stats

BEST = "best"


# ---- The runs -----------------------------------------------------------------------------------
def parse_arm(text):
    """Return (name, settings, diff) of an arm; diff is None or a Path. Raises ValueError."""
    name, _, change = (part.strip() for part in text.partition(":"))
    require(re.fullmatch(r"[\w .+-]+", name), f"arm {text!r} must be `name: settings or a .diff`")
    require(name != BEST, f"arm {text!r}: the name {BEST} is taken")
    if change.endswith(".diff"):
        require(Path(change).is_file(), f"arm {text!r}: {change} is not a file")
        return name, [], Path(change)
    settings = shlex.split(change)
    require(
        settings and all(setting.startswith("--") for setting in settings),
        f"arm {text!r} must name settings, --name=value, or a file that ends in .diff",
    )
    return name, settings, None


def script_of(diff, folder):
    """Return the path of train_gpt2.py, or of a copy in `folder` with the diff applied."""
    script = ROOT / "train_gpt2.py"
    if diff is None:
        return script
    folder = Path(tempfile.mkdtemp(dir=folder))  # its own: names of diffs may be equal
    copy = folder / script.name
    copy.write_text(script.read_text())
    argv = ["git", "apply", str(diff.resolve())]
    # outside any repository, or git would look for the file from its root
    environment = {"GIT_CEILING_DIRECTORIES": str(folder.parent), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True)
    require(done.returncode == 0, f"{diff} does not apply to train_gpt2.py: {done.stderr.strip()}")
    return copy


def settings_of(script, argv):
    """Return the settings, a dict, with which a training script would run."""
    name = f"train_gpt2_{fingerprint(script)}"
    spec = importlib.util.spec_from_file_location(name, script)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module.parse_args(argv))


def earlier_run(log, script, settings):
    """Return the Run in this log, or None if there is no log.

    Raises ValueError if it is another run than the script would do with these settings, or if
    another process is writing the log.
    """
    if not log.exists():
        return None
    fix = "ablate.py never deletes or continues other runs; give another --out"
    with open(log) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a run holds this lock on its log
        except BlockingIOError:
            raise ValueError(
                f"{log} is being written by another process: {fix}, or wait for that run to end"
            ) from None
    try:
        run = read(log)
    except ValueError as error:
        raise ValueError(f"{error}; {fix}, or move the file away") from None
    planned = Run(log, {"train_gpt2.py": script.read_text()}, settings, run.facts)
    differ = differences(run, planned, INCIDENTAL - {"seed"})
    require(
        differ == "nothing",
        f"{log} is of another run: it differs in {differ}: {fix}, or move that run away",
    )
    return run


def train(script, argv):
    """Run a training script; return its exit status."""
    done = subprocess.run([sys.executable, script, *argv], cwd=ROOT, stdout=subprocess.DEVNULL)
    return done.returncode


def run_all(options):
    """Run every arm with every seed that has no result yet. Raises ValueError if a run fails."""
    arms = [(BEST, [], None), *map(parse_arm, options.arm)]
    names = [name.replace(" ", "_") for name, _, _ in arms]
    require(
        len(set(names)) == len(names), f"the arms {names} must have different names: rename one"
    )
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        arms = [(name, settings, script_of(diff, folder)) for name, settings, diff in arms]
        seeds = range(1, options.seeds + 1)
        # a list: all arguments and logs are checked before the first run starts
        runs = [planned_run(out, arm, seed, options.best) for seed in seeds for arm in arms]
        for log, script, argv in filter(None, runs):
            require(train(script, argv) == 0, f"the run of {log} failed: see above")
            remove_weights(log.with_suffix(""))
            print(f"{log.stem}: {read(log).val_loss:.4f}", flush=True)


def planned_run(out, arm, seed, best):
    """Return (log, script, arguments) of a run, or None if it has a result already."""
    name, settings, script = arm
    run_id = f"{name.replace(' ', '_')}_seed{seed}"
    argv = [*shlex.split(best), *settings]
    argv += [f"--seed={seed}", f"--run_id={run_id}", f"--log_dir={out.resolve()}"]
    log = out / f"{run_id}.txt"
    earlier = earlier_run(log, script, settings_of(script, argv))
    if earlier and earlier.ended:
        return None
    return log, script, [*argv, "--resume=auto"] if earlier else argv


def remove_weights(folder):
    """Remove the final weights of a run, which nobody needs, and its folder if that is empty."""
    (folder / "model.pt").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


# ---- The table ----------------------------------------------------------------------------------
def collect(folder):
    """Return {arm: {seed: Run}}, the best first. Raises ValueError for runs that do not compare:
    other settings or sources within an arm, other data or seeds between them."""
    groups = {}
    for run in logs_in(folder):
        groups.setdefault(run.label.replace("_", " "), []).append(run)
    require(BEST in groups and len(groups) > 1, f"{folder} holds no runs of {BEST!r} and of others")
    for name, runs in groups.items():
        check_group(name, runs, None)
    unlike([run for runs in groups.values() for run in runs])
    arms = {name: {run.seed: run for run in runs} for name, runs in groups.items()}
    seeds = sorted(arms[BEST])
    for name, runs in arms.items():
        fix = "run ablate.py again to fill the gaps"
        require(sorted(runs) == seeds, f"{name} has the seeds {sorted(runs)}, not {seeds}: {fix}")
    return {BEST: arms.pop(BEST), **arms}


def holm(values):
    """Return p-values corrected by Holm's rule, in the order given; NaN stays, and counts."""
    corrected = np.full(len(values), math.nan)
    highest = 0.0
    for rank, i in enumerate(np.argsort(values)):  # NaN comes last
        if not math.isnan(values[i]):
            highest = max(highest, min(1.0, values[i] * (len(values) - rank)))
            corrected[i] = highest
    return corrected.tolist()


def difference(runs, best):
    """Return (mean, half of its 95% interval, p) of an arm's losses minus the best's, by seed."""
    values = [runs[seed].val_loss - best[seed].val_loss for seed in sorted(best)]
    half = stats.sem(values) * stats.t.ppf(0.975, len(values) - 1)
    p = stats.ttest_1samp(values, 0).pvalue if half > 0 else math.nan  # no run differs
    return statistics.mean(values), half, p


def median_ms(runs):
    return statistics.median(step_ms(run) for run in runs.values())


def compared(arms):
    """Return [(name, mean difference, half interval, corrected p)], largest difference first."""
    best = arms[BEST]
    others = [name for name in arms if name != BEST]
    found = [difference(arms[name], best) for name in others]
    corrected = holm([p for _, _, p in found])
    rows = [(name, mean, half, p) for name, (mean, half, _), p in zip(others, found, corrected)]
    return sorted(rows, key=lambda row: -row[1])


def table(arms):
    """Return the table of all arms, as Markdown."""
    best = arms[BEST]
    losses = [run.val_loss for run in best.values()]
    mean = statistics.mean(losses)
    rows = [[BEST, f"{mean:.4f}", "", "", f"{median_ms(best):.1f}", "1.00"]]
    for name, change, half, p in compared(arms):
        ms = median_ms(arms[name])
        ratio = statistics.median(step_ms(arms[name][s]) / step_ms(best[s]) for s in best)
        interval = f"{change:+.4f} ({change - half:+.4f} to {change + half:+.4f})"
        rows.append(
            [
                name,
                f"{mean + change:.4f}",
                interval,
                "n/a" if math.isnan(p) else f"{p:.2g}",
                f"{ms:.1f}",
                f"{ratio:.2f}",
            ]
        )
    head = ["arm", "val loss", "difference (95%)", "p, corrected", "ms a step", "ratio"]
    steps = next(iter(best.values())).last
    says = (
        f"n={len(best)} seeds an arm, {steps} steps; sd of {BEST} {statistics.stdev(losses):.4f}."
    )
    return f"{markdown(head, rows)}\n\n{says}"


def draw(arms, path):
    """Write a picture of the differences with their intervals."""
    rows = compared(arms)[::-1]
    figure = new_figure(7, 1.5 + 0.4 * len(rows))
    axes = figure.subplots()
    for i, (_, mean, half, p) in enumerate(rows):
        color = "C0" if p < 0.05 else "0.6"
        axes.errorbar(mean, i, xerr=half, fmt="o", color=color, capsize=3)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.set_xlabel("validation loss minus that of the best settings, nats a token")
    axes.grid(axis="x", alpha=0.3)
    remark = "Mean and 95% interval, paired by seed; blue: p < 0.05 after Holm's correction."
    headed(figure, "What each change of the best settings does to the loss", remark)
    paths = [run.path for runs in arms.values() for run in runs.values()]
    save(figure, path, draw, compared, *paths)


def parse(argv):
    parser = argparse.ArgumentParser(
        prog="ablate.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--best", default="", help="settings of train_gpt2.py that all arms share")
    add("--arm", action="append", default=[], help="NAME: SETTINGS, or NAME: FILE.diff; repeat")
    add("--seeds", type=int, default=5, help="1 to so many (default: 5)")
    add("--out", help="folder of the logs")
    add("--logs", help="only make the table, of the logs in this folder")
    add("--picture", help="write the picture, .png and .svg")
    options = parser.parse_args(argv)
    if bool(options.out) == bool(options.logs):
        parser.error("give either --out, to run, or --logs, to read")
    if options.out and not (options.arm and options.seeds > 1):
        parser.error("--out needs at least one --arm, and --seeds of 2 or more")
    return options


def main(argv):
    options = parse(argv)
    if options.out:
        run_all(options)
    arms = collect(options.out or options.logs)
    print(table(arms))
    if options.picture:
        draw(arms, options.picture)


if __name__ == "__main__":
    command(main)
