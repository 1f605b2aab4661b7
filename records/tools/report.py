"""Print tables and draw pictures from logs, and renew the generated tables in the READMEs.

    python records/tools/report.py LOG...                   # a row per run, a row per group
    python records/tools/report.py muon='records/X/m*.txt' adamw=records/Y --picture curves.png
    python records/tools/report.py logs/RUN.txt --picture now.png       # also during training
    python records/tools/report.py --history                # the table of all records
    python records/tools/report.py --refresh                # renew what the READMEs show

LOG is a file, a folder or a quoted glob. `NAME=` before it puts its runs into a group of that name.
Otherwise the name of the file gives the group (muon_seed3.txt: muon). n/a means that the log does
not hold the value. n counts every run. A group has no mean if one of its runs is unfinished
(stopped, or still going) or has diverged.

Runs in a group must share val_hash, world size, dtype and the planned number of steps, and so must
the starts of a resumed run, except that num_iterations may grow; otherwise the group is rejected.
Curves in one picture must share the val_hash.

A README holds a command between `<!-- ` and ` -->`, then what it prints, then `<!-- end -->`.
--stale runs these commands, names those whose output has changed or whose picture is missing, and
exits with status 1 if there are any. --refresh renews them.
"""

import contextlib
import glob
import html
import importlib
import io
import re
import shlex
import statistics
from collections import Counter
from pathlib import Path

import numpy as np
from runlog import ROOT, argument_parser, command, logs_in, natural, packages, read, require

BLOCK = re.compile(
    r"(?P<start><!-- python records/tools/(?P<tool>\w+)\.py(?P<arguments>[^\n]*) -->\n)"
    r"(?P<text>(?:(?!<!-- ).)*)(?=<!-- end -->\n)",
    re.S,
)
PICTURE = re.compile(r"--picture[ =](\S+)")
# Okabe and Ito's, which colour-blind readers can tell apart: https://jfly.uni-koeln.de/color/
COLORS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"
MARKERS = "os^Dv<P"
STRETCHES = 30  # number of parts of a run over which a picture averages the training loss
VALIDATION = "validation tokens (val_hash)"
SAME = {  # what runs must share, or their losses are not comparable
    VALIDATION: lambda run: run.facts.get("val_hash"),
    "number of processes": lambda run: run.facts.get("processes"),
    "dtype of products": lambda run: run.facts.get("products"),
}


def shown(value, form="{}"):
    return "n/a" if value is None else form.format(value)


def progress(run):
    """Return how far a run got."""
    return f"{run.steps}" if run.finished else f"{run.reached} of {run.last}, {run.fault}"


def validation(run):
    """Return the last validation loss, and its step if it is not the result."""
    return shown(run.val_loss, "{:.4f}" if run.finished else f"{{:.4f}} at step {run.steps}")


COLUMNS = {  # name: text of a run
    "seed": lambda run: shown(run.seed),
    "steps": progress,
    "val loss": validation,
    "train time": lambda run: "n/a" if run.train_ms is None else f"{run.train_ms / 1000:.0f} s",
    "ms/step": lambda run: shown(run.ms_per_step, "{:.1f}"),
    "peak memory": lambda run: shown(run.number("peak_memory"), "{:.0f} MiB"),
    "compile": lambda run: shown(run.number("compile"), "{:.1f} s"),
    "torch": lambda run: shown(run.facts.get("torch")),
    "device": lambda run: shown(run.facts.get("device")),
    "processes": lambda run: shown(run.facts.get("processes")),
    "commit": lambda run: re.sub(r"\b(\w{9})\w+", r"\1", shown(run.facts.get("commit"))),
    "val hash": lambda run: shown(run.facts.get("val_hash")),
}


# ---- Groups of runs ------------------------------------------------------------------------------
def collect(arguments):
    """Return {group: [Run]} of LOG arguments. Raises ValueError for one that names no log."""
    found = {}  # {path: (group or None, Run)}
    for argument in arguments:
        name, _, pattern = argument.partition("=")
        if not pattern or "/" in name:
            name, pattern = None, argument
        paths = sorted(glob.glob(pattern) or glob.glob(str(ROOT / pattern)), key=natural)
        runs = []
        for path in map(Path, paths):
            runs += logs_in(path) if path.is_dir() else [read(path)]
        require(runs, f"no log at {pattern!r}: name a log, a folder or a glob of logs")
        for run in runs:
            require(run.path.resolve() not in found, f"{run.path} is named twice")
            found[run.path.resolve()] = name, run
    return grouped(found.values())


def grouped(named):
    """Return {group: [Run]} of (name or None, Run). Equal labels get the names of their folders."""
    places = {(run.label, run.path.parent) for _, run in named}
    folders = Counter(label for label, _ in places)
    groups = {}
    for name, run in named:
        own = run.label if folders[run.label] == 1 else f"{run.path.parent.name}/{run.label}"
        groups.setdefault(name or own, []).append(run)
    return groups


def check(groups):
    """Raise ValueError unless all runs of a group had one plan and, at each start, one header."""
    for runs in groups.values():
        check_starts(runs)
        for what, value in SAME.items():
            one_value(what, value, runs)
        one_value("plan (num_iterations of each start)", plan, runs)


def check_starts(runs):
    """Raise ValueError for a run whose starts differ in what defines a loss."""
    for run in runs:
        for what, value in SAME.items():
            sentence = f"the {what} of {run.path} differ between its starts, {value(run)}"
            compares = " then " not in (value(run) or "")
            require(compares, f"{sentence}: its loss is not comparable with others")


def one_value(what, of, runs):
    """Raise ValueError if runs differ in a value. Return whether all of them hold it."""
    values = {str(of(run)): run.path for run in runs if of(run) is not None}
    listed = ", ".join(f"{value} in {path}" for value, path in values.items())
    require(len(values) < 2, f"the {what} of these runs differ: {listed}; compare like with like")
    return all(of(run) is not None for run in runs)


def plan(run):
    """Return the steps that the starts of a run were planned for, as far as its log holds them."""
    return " then ".join(f"{steps}" for steps in run.planned if steps is not None)


# ---- Tables --------------------------------------------------------------------------------------
def escaped(text):
    """Return text as one line of Markdown that cannot end a cell, begin code or hold HTML."""
    text = html.escape(" ".join(text.splitlines()), quote=False)
    return re.sub(r"([\\`|])", r"\\\1", text)


def markdown(head, rows):
    """Return a table. Cells are escaped."""
    rows = [[escaped(cell) for cell in row] for row in [head, ["---"] * len(head), *rows]]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def all_finished(runs):
    return all(run.finished for run in runs)


def loss_of(runs):
    """Return mean and standard deviation of a group's losses as text; n/a if a run has none."""
    losses = [run.val_loss for run in runs]
    if not all_finished(runs):
        return "n/a"
    if len(runs) == 1:
        return f"{losses[0]:.4f}"
    return f"{statistics.mean(losses):.4f} (sd {statistics.stdev(losses):.4f})"


def middle(values, form):
    """Return the median as text; n/a if a value is unknown."""
    return "n/a" if None in values else form.format(statistics.median(values))


def table(groups):
    """Return a row per run, below one line of what all runs share."""
    rows = []
    for group, runs in groups.items():
        rows += [{"group": group} | {name: of(run) for name, of in COLUMNS.items()} for run in runs]
    shared = {}
    if len(rows) > 1:
        shared = {name: rows[0][name] for name in COLUMNS if len({row[name] for row in rows}) == 1}
    head = [name for name in rows[0] if name not in shared]
    text = markdown(head, [[row[name] for name in head] for row in rows])
    said = ", ".join(f"{name} {escaped(value)}" for name, value in shared.items())
    return f"All runs: {said}.\n\n{text}" if shared else text


def summary(groups):
    """Return a row per group: n, steps, loss, median times."""
    rows, faulty = [], []
    for group, runs in groups.items():
        times = [run.train_ms / 1000 if run.finished else None for run in runs]
        per_step = middle([run.ms_per_step for run in runs], "{:.1f}")
        n, steps = f"{len(runs)}", f"{runs[0].last}"
        rows.append([group, n, steps, loss_of(runs), middle(times, "{:.0f} s"), per_step])
        faulty += [run for run in runs if not run.finished]
    head = ["group", "n", "steps", "val loss", "train time, median", "ms/step, median"]
    named = ", ".join(f"{escaped(run.path.name)} (step {progress(run)})" for run in faulty)
    note = f"\n\nWithout a result: {named}." if faulty else ""
    return markdown(head, rows) + note


def groups_of_record(folder):
    """Return the groups that the README of a record reports, and the logs that are in none.

    If the README reports groups, other logs in subfolders are ignored.
    """
    groups = {}
    for block in BLOCK.finditer((folder / "README.md").read_text()):
        if block["tool"] == "report":
            groups |= collect(parse(shlex.split(block["arguments"])).logs)
    known = {run.path.resolve() for runs in groups.values() for run in runs}
    others = [run for run in logs_in(folder) if run.path.resolve() not in known]
    if groups:
        others = [run for run in others if run.path.parent == folder]
    return groups | grouped([(None, run) for run in others])


def history():
    """Return the table of all records: a row per group of runs, the newest record last."""
    rows = []
    for folder in sorted(path.parent for path in (ROOT / "records").glob("*/README.md")):
        date, title = folder.name[:10], (folder / "README.md").read_text().partition("\n")[0][2:]
        first = [date, f"[{title}]({folder.name})"]
        groups = groups_of_record(folder)
        check(groups)
        if not groups:
            rows.append([*first, "no training runs", *[""] * 5])
        for group, runs in groups.items():
            steps, size = runs[0].last, runs[0].tokens_per_step
            hardware = f"{COLUMNS['device'](runs[0])}, torch {COLUMNS['torch'](runs[0])}"
            cells = [group, f"{len(runs)}", f"{steps:,}", f"{steps * size:,}"]
            rows.append([*first, *cells, loss_of(runs), hardware])
            first = ["", ""]
    head = ["date", "record", "runs", "n", "steps", "tokens", "val loss", "hardware"]
    return markdown(head, rows)


# ---- Pictures ------------------------------------------------------------------------------------
def curve(run, kind):
    """Return the points to draw of a run, (P, 2): step and loss.

    val: the validations after step 0. train: means over stretches of steps, each at the mean of
    its steps; the last stretch may be shorter.
    """
    points = np.array(run.points[kind], dtype=float).reshape(-1, 3)[:, :2]
    points = points[points[:, 0] > 0]
    if kind == "val":
        return points
    which = (points[:, 0] - 1) // max(1, run.last // STRETCHES)
    means = [points[which == i].mean(axis=0) for i in np.unique(which)]
    return np.array(means).reshape(-1, 2)


def mean_curve(curves):
    """Return the mean of (P, 2) curves at the steps that all of them have."""
    shared = sorted(set.intersection(*(set(points[:, 0]) for points in curves)))
    return np.mean([points[np.isin(points[:, 0], shared)] for points in curves], axis=0)


def loss_limits(runs):
    """Return (low, high) of the losses after the first tenth of each run, with a margin."""
    losses = []
    for run in runs:
        for points in curve(run, "train"), curve(run, "val"):
            losses += [loss for step, loss in points if step >= run.reached / 10]
    losses = np.array(losses)[np.isfinite(losses)]
    if not len(losses):
        return None, None
    margin = 0.05 * np.ptp(losses) + 1e-3
    return losses.min() - margin, losses.max() + margin


def draw_group(axes, runs, label, look):
    """Draw losses against tokens: each run thin, the mean of a group thick."""
    for kind, style in ("train", {"linestyle": ":", "marker": ""}), ("val", {}):
        curves = [curve(run, kind) for run in runs]
        thin = curves if len(runs) > 1 else []
        for points, width in [(points, 0.5) for points in thin] + [(mean_curve(curves), 1.8)]:
            tokens = points[:, 0] * runs[0].tokens_per_step
            axes.plot(tokens, points[:, 1], linewidth=width, markersize=4 * width, **look | style)
    axes.plot([], [], label=label, **look)


def draw_targets(panels, runs):
    """Draw the runs' target as a line, in each panel whose limits hold it."""
    for target in {run.settings.get("target_val_loss") for run in runs} - {None, 0}:
        for axes in panels:
            low, high = axes.get_ylim()
            if low < target < high:
                axes.axhline(target, linestyle="--", color="black", label=f"target {target:g}")


def draw_results(axes, place, runs, look):
    """Draw the results of a group's runs as dots side by side, and their mean as a line."""
    losses = [run.val_loss for run in runs]
    x = place + 0.03 * (np.arange(len(runs)) - (len(runs) - 1) / 2)
    axes.plot(x, losses, linestyle="", markeredgecolor="white", **look)
    axes.hlines(np.mean(losses), place - 0.3, place + 0.3, color=look["color"])


def draw(groups, path):
    """Draw losses against tokens and, if a group has several runs, the result of each run."""
    with packages():
        from matplotlib.figure import Figure
    require(Path(path).suffix == ".png", f"--picture={path} must end in .png")
    runs = [run for own in groups.values() for run in own]
    for run in runs:
        require(run.reached, f"{run.path} holds no step after step 0 to draw")
    one_value(VALIDATION, SAME[VALIDATION], runs)
    widths = [8]
    if any(len(own) > 1 and all_finished(own) for own in groups.values()):
        widths.append(2 + 0.8 * len(groups))
    figure = Figure(figsize=(sum(widths), 5), layout="constrained")
    curves, *ends = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    names = [name.replace("$", r"\$") for name in groups]
    for axes in ends:
        axes.set(ylabel="validation loss at the end", xlim=(-0.6, len(groups) - 0.4))
        axes.set_xticks(range(len(groups)), names, rotation=30, ha="right")
        axes.margins(y=0.1)
        axes.grid(axis="y", alpha=0.3)
    for i, (name, own) in enumerate(zip(names, groups.values())):
        look = dict(color=COLORS[i % len(COLORS)], marker=MARKERS[i % len(MARKERS)])
        result = loss_of(own) if all_finished(own) else progress(own[0])
        draw_group(curves, own, f"{name}: {result}, n={len(own)}", look)
        if ends and all_finished(own):
            draw_results(ends[0], i, own, look)
    curves.set(xlabel="tokens read", ylabel="loss, nats per token")
    curves.set(xlim=(0, None), ylim=loss_limits(runs))
    curves.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g}M")
    curves.grid(alpha=0.3)
    draw_targets([curves, *ends], runs)
    curves.legend(fontsize=9, loc="upper right")
    figure.suptitle("Validation loss (solid) and training loss (dotted, averaged)", fontsize=11)
    figure.savefig(path, dpi=90, metadata={"Software": None})


# ---- READMEs -------------------------------------------------------------------------------------
def run_block(tool, arguments):
    """Return what a command of a README prints, without remarks on stderr."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        importlib.import_module(tool).main(shlex.split(arguments))
    return printed.getvalue()


def outdated(readme, write):
    """Return the commands of a README whose output has changed or whose picture is missing.

    With write, renew them. Pictures are drawn again where the output changed or they are missing.
    """
    stale = []

    def renew(block):
        arguments = block["arguments"]
        picture = PICTURE.search(arguments)
        text = run_block(block["tool"], PICTURE.sub("", arguments))
        if text != block["text"] or (picture and not (ROOT / picture[1]).exists()):
            stale.append(f"{readme.relative_to(ROOT)}: {block['start'].strip()}")
            if write and picture:
                path = shlex.quote(str(ROOT / picture[1]))
                run_block(block["tool"], PICTURE.sub(f"--picture={path}", arguments))
        return block["start"] + text

    before = readme.read_text()
    require(
        len(BLOCK.findall(before)) == len(re.findall("^<!-- python", before, re.M)),
        f"{readme}: give each `<!-- python records/tools/TOOL.py ... -->` a line, and "
        f"`<!-- end -->` one below",
    )
    after = BLOCK.sub(renew, before)
    if write and after != before:
        readme.write_text(after)
    return stale


def parse(argv):
    parser = argument_parser(__doc__)
    parser.add_argument("logs", nargs="*", metavar="LOG")
    parser.add_argument("--picture", help="PNG file to draw")
    parser.add_argument("--summary", action="store_true", help="print only the table of groups")
    for name in ("history", "refresh", "stale"):
        parser.add_argument(f"--{name}", action="store_true", help="see above")
    options = parser.parse_args(argv)
    if not (options.logs or options.history or options.refresh or options.stale):
        parser.error("name logs, or --history, --refresh or --stale")
    return options


def main(argv):
    options = parse(argv)
    if options.history:
        print(history())
    if options.refresh or options.stale:
        readmes = [ROOT / "README.md", *sorted((ROOT / "records").rglob("README.md"))]
        stale = [line for path in readmes for line in outdated(path, options.refresh)]
        print("\n".join(stale) or "everything is up to date")
        return int(options.stale and bool(stale))
    if options.logs:
        groups = collect(options.logs)
        check(groups)
        if not options.summary:
            print(table(groups) + "\n")
        print(summary(groups))
        if options.picture:
            draw(groups, options.picture)
    return 0


if __name__ == "__main__":
    command(main)
