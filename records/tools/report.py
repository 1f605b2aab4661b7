"""Print tables and draw pictures from logs, and update the generated tables in the READMEs.

    python records/tools/report.py LOG...                   # a row per run, a row per group
    python records/tools/report.py muon='records/X/m*.txt' adamw=records/Y --picture curves.png
    python records/tools/report.py logs/RUN.txt --picture now.png       # also during training
    python records/tools/report.py --refresh                # regenerate the READMEs' tables

LOG is a file, a folder or a quoted glob. `NAME=` before it puts its runs into a group of that name.
Otherwise the group is named after the file, without the seed: muon_seed3.txt belongs to muon. n/a
means that the log does not contain the value. n counts every run. A group has no mean if one of its
runs is unfinished (stopped or still running) or has diverged.

Runs in a group must share validation data and tokens, the number of processes, dtype and
num_iterations, otherwise the group is rejected. All runs in a picture must share validation data.

In a README, a generated table stands between its command, `<!-- python SCRIPT ... -->`, and
`<!-- end -->`, each on a line of its own. --stale runs these commands, lists the READMEs whose
tables differ from their output, and exits with status 1 if there are any. --refresh rewrites them.
"""

import glob
import shlex
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from runlog import LOSS_DEPENDS_ON, ROOT, argument_parser, command, logs_in, packages, read, require

PIECES = 30  # a picture averages the training loss over this many equal parts of a run


def or_na(value, form="{}"):
    """Return a value as text, or n/a if the log does not contain it."""
    return "n/a" if value is None else form.format(value)


def progress(run):
    """Return the steps of a run, with a note if it has no result or its script was edited."""
    steps = run.steps
    text = f"{steps}" if run.finished else f"{run.last_step} of {steps}, {run.fault}"
    return f"{text}, script edited" if run.edited else text


COLUMNS = {  # name: text of a run
    "seed": lambda run: f"{run.seed}",
    "steps": progress,
    "val loss": lambda run: or_na(run.val_loss, "{:.4f}"),
    "train time": lambda run: or_na(run.train_seconds, "{:.0f} s"),
    "ms/step": lambda run: or_na(run.ms_per_step, "{:.1f}"),
    "peak memory": lambda run: or_na(run.facts.get("peak_memory_mib"), "{} MiB"),
    "device": lambda run: or_na(run.facts.get("device")),
    "torch": lambda run: or_na(run.facts.get("torch")),
}


# ---- Groups of runs ------------------------------------------------------------------------------
def collect(arguments):
    """Return {group: runs sorted by seed} for LOG arguments.

    The folder is part of a group's name if runs in several folders share a label. Raises ValueError
    if an argument names no log, or if the losses of a group are not comparable.
    """
    named = {}  # {path: (group or "", Run)}
    for argument in arguments:
        name, _, pattern = argument.partition("=")
        if not pattern or "/" in name:  # a path may contain "="
            name, pattern = "", argument
        paths = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern))
        runs = []
        for path in map(Path, paths):
            runs += logs_in(path) if path.is_dir() else [read(path)]
        require(runs, f"no log at {pattern!r}: name a log, a folder or a glob of logs")
        for run in runs:
            require(run.path.resolve() not in named, f"{run.path} is named twice")
            named[run.path.resolve()] = name, run
    places = {(run.label, run.path.resolve().parent) for _, run in named.values()}
    folders = Counter(label for label, _ in places)
    groups = {}
    for name, run in named.values():
        label = run.label
        if folders[label] > 1:
            label = f"{run.path.parent}/{label}"
        groups.setdefault(name or label, []).append(run)
    for runs in groups.values():
        runs.sort(key=lambda run: run.seed)
        for what, value_of in LOSS_DEPENDS_ON.items():
            check_equal(what, value_of, runs)
        check_equal("num_iterations", lambda run: run.num_iterations, runs)
    return groups


def check_equal(what, value_of, runs):
    """Raise ValueError if a value differs between runs. Missing values (None) do not count."""
    values = {f"{value_of(run)}": run.path for run in runs if value_of(run) is not None}
    listed = ", ".join(f"{text} in {path}" for text, path in values.items())
    require(
        len(values) < 2,
        f"these runs differ in {what}, so their losses are not comparable: {listed}",
    )


# ---- Tables --------------------------------------------------------------------------------------
def markdown(head, rows):
    """Return a table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def loss_of(runs):
    """Return the mean and standard deviation of the losses, or n/a if a run has no result."""
    losses = [run.val_loss for run in runs]
    if not all(run.finished for run in runs):
        return "n/a"
    if len(runs) == 1:
        return f"{losses[0]:.4f}"
    return f"{statistics.mean(losses):.4f} (sd {statistics.stdev(losses):.4f})"


def median_of(values, form):
    """Return the median as text, or n/a if a value is unknown."""
    return "n/a" if None in values else form.format(statistics.median(values))


def table(groups):
    """Return a row per run."""
    rows = []
    for group, runs in groups.items():
        rows += [[group, *(text_of(run) for text_of in COLUMNS.values())] for run in runs]
    return markdown(["group", *COLUMNS], rows)


def summary(groups):
    """Return a row per group: n, steps, loss, median times."""
    rows = []
    for group, runs in groups.items():
        times = [run.train_seconds if run.finished else None for run in runs]
        per_step = median_of([run.ms_per_step for run in runs], "{:.1f}")
        n, steps = f"{len(runs)}", f"{runs[0].num_iterations}"
        rows.append([group, n, steps, loss_of(runs), median_of(times, "{:.0f} s"), per_step])
    head = ["group", "n", "steps", "val loss", "train time, median", "ms/step, median"]
    return markdown(head, rows)


# ---- Pictures ------------------------------------------------------------------------------------
def curve(run, kind):
    """Return the steps and losses of a run to draw, as two arrays.

    The first tenth of the run is left out, because the loss is much higher there. Training losses
    are averaged over pieces of the run.
    """
    points = [point for point in run.points[kind] if point[0] > run.last_step / 10]
    if kind == "train":
        pieces = np.array_split(points, PIECES)
        points = [np.mean(piece, axis=0) for piece in pieces if len(piece)]
    return np.array(points).reshape(-1, 2).T


def draw(groups, path):
    """Draw the losses of all runs against the number of tokens read."""
    with packages():
        from matplotlib.figure import Figure
    runs = [run for members in groups.values() for run in members]
    check_equal("validation data", LOSS_DEPENDS_ON["validation data"], runs)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for i, (name, members) in enumerate(groups.items()):
        for run in members:
            for kind, style in ("train", "-"), ("val", "o:"):
                steps, losses = curve(run, kind)
                millions = steps * run.tokens_per_step / 1e6
                axes.plot(millions, losses, style, color=f"C{i}", linewidth=1, markersize=4)
        is_one_without_result = len(members) == 1 and not members[0].finished
        result = progress(members[0]) if is_one_without_result else loss_of(members)
        axes.plot([], [], "o-", color=f"C{i}", label=f"{name}: {result}, n={len(members)}")
    axes.set(xlabel="millions of tokens read", ylabel="loss, nats per token", xlim=(0, None))
    axes.set_ylim(axes.get_ylim())  # fix the limits: a distant target must not squeeze the curves
    for target in {run.settings.get("target_val_loss") for run in runs} - {None, 0}:
        axes.axhline(target, linestyle="--", color="black", label=f"target {target:g}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9, loc="upper right")
    axes.set_title("training loss (lines, averaged) and validation loss (points)", fontsize=11)
    figure.savefig(path, dpi=90)


# ---- READMEs -------------------------------------------------------------------------------------
def renewed(readme):
    """Return the text of a README with the current output of its commands."""
    lines, in_table = [], False
    for line in readme.read_text(encoding="utf-8").splitlines(keepends=True):
        in_table = in_table and line != "<!-- end -->\n"
        if not in_table:
            lines.append(line)
        if line.startswith("<!-- python "):
            require(not in_table, f"{readme}: no <!-- end --> before this line: {line.strip()}")
            arguments = shlex.split(line.removeprefix("<!-- python ").removesuffix("-->\n"))
            tool = [sys.executable, *arguments]
            done = subprocess.run(tool, cwd=ROOT, capture_output=True, text=True)
            # The status is 1 if compare.py says "Not significant"
            works = done.stdout and not done.stderr and done.returncode in (0, 1)
            require(works, f"{readme}: this command fails: {line.strip()} {done.stderr}")
            lines.append(done.stdout)
            in_table = True
    require(not in_table, f"{readme}: the last generated table has no <!-- end -->")
    return "".join(lines)


def parse(argv):
    parser = argument_parser(__doc__)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("logs", nargs="*", default=[], metavar="LOG")
    task.add_argument("--refresh", action="store_true", help="rewrite stale tables")
    task.add_argument("--stale", action="store_true", help="list READMEs with stale tables")
    parser.add_argument("--picture", help="PNG file to draw")
    return parser.parse_args(argv)


def main(argv):
    options = parse(argv)
    if options.logs:
        groups = collect(options.logs)
        print(f"{table(groups)}\n\n{summary(groups)}")
        if options.picture:
            draw(groups, options.picture)
        return 0
    stale = []
    for readme in [ROOT / "README.md", *sorted((ROOT / "records").rglob("README.md"))]:
        fresh = renewed(readme)
        if fresh != readme.read_text(encoding="utf-8"):
            stale.append(f"{readme}")
            if options.refresh:
                readme.write_text(fresh, encoding="utf-8")
    print("\n".join(stale) or "everything is up to date")
    return 1 if options.stale and stale else 0


if __name__ == "__main__":
    command(main)
