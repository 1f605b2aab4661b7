"""Tables and pictures from logs; the tables of every README under records/, made anew.

    python records/tools/report.py LOG...                  # a row a run, a row a group
    python records/tools/report.py muon='records/X/m*.txt' adamw=records/Y --picture curves.png
    python records/tools/report.py logs/RUN.txt --picture now.png      # as far as the run has come
    python records/tools/report.py --history               # the table of all records
    python records/tools/report.py --refresh               # write anew what READMEs show

LOG is a file, a folder or a quoted glob, of this repository or of the public speedrun of 2024.
`name=` before it puts its runs into a group of that name; otherwise the file names tell the group
(muon_seed3.txt: muon). n/a means that the log does not hold the value. n counts every log, and a
group has no mean if one of its runs is unfinished (stopped, or still running) or has diverged.

Runs in a group must share val_hash, world size, dtype and the planned number of steps, and so must
the starts of a resumed run, except that num_iterations may grow; otherwise the group is rejected.
Curves in one picture must share the val_hash. If a run was rewound to an older checkpoint, the
lines of the abandoned branch are ignored. A picture is written as .png and as .svg. It compares
losses against time only for interleaved runs of ab.py; a single run has its time above the curves.
Where validation losses coincide with those of the first group, a panel shows their differences.

A README holds the command between `<!-- ` and ` -->`, then what it prints, then `<!-- end -->`;
--refresh runs these commands, --stale names those whose output has changed, and exits with 1.
"""

import argparse
import contextlib
import glob
import html
import importlib
import io
import itertools
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from runlog import ROOT, fingerprint, logs_in, natural, packages, read, require

BLOCK = re.compile(
    r"(?P<start><!-- python records/tools/(?P<tool>\w+)\.py(?P<arguments>[^\n]*) -->\n)"
    r"(?P<text>(?:(?!<!-- ).)*)(?=<!-- end -->\n)",
    re.S,
)
FORMS = ".png", ".svg"  # of each picture
# Okabe and Ito's, which the colour-blind tell apart: https://jfly.uni-koeln.de/color/
COLORS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"
MARKERS = "os^Dv<P"
STYLES = {"train": ":", "val": "-"}  # of the lines
STRETCHES = 30  # of a run, over each of which its training loss is averaged
NAMED = 4  # groups that a title names, at most
SAME = {  # facts that runs must share, or their losses do not compare
    "validation tokens (val_hash)": "val_hash",
    "number of processes": "processes",
    "dtype of products": "products",
}


def shown(value, form="{}"):
    return "n/a" if value is None else form.format(value)


def progress(run):
    """Return how far a run came."""
    return f"{run.steps}" if run.finished else f"{run.reached} of {run.last}, {run.fault}"


def validation(run):
    """Return the loss of the last validation, and its step where that is no result."""
    return shown(run.val_loss, "{:.4f}" if run.finished else f"{{:.4f}} at step {run.steps}")


COLUMNS = {  # name: text of a run
    "seed": lambda run: shown(run.seed),
    "steps": lambda run: progress(run),
    "val loss": lambda run: validation(run),
    "tokens": lambda run: f"{run.reached * run.tokens_per_step:,}",
    "train time": lambda run: "n/a" if run.train_ms is None else f"{run.train_ms / 1000:.0f} s",
    "ms/step": lambda run: shown(run.ms_per_step, "{:.1f}"),
    "tokens/s": lambda run: shown(run.tokens_per_second, "{:,.0f}"),
    "MFU": lambda run: shown(run.mfu, "{:.1%}"),
    "peak memory": lambda run: shown(run.number("peak_memory"), "{:.0f} MiB"),
    "compile": lambda run: shown(run.number("compile"), "{:.1f} s"),
    "torch": lambda run: shown(run.facts.get("torch")),
    "device": lambda run: shown(run.facts.get("device")),
    "processes": lambda run: shown(run.facts.get("processes")),
    "commit": lambda run: re.sub(r"\b(\w{9})\w+", r"\1", shown(run.facts.get("commit"))),
    "data hash": lambda run: shown(run.data_hash),
    "val hash": lambda run: shown(run.facts.get("val_hash")),
}


def collect(arguments):
    """Return {group: [Run]} of the command line's logs. ValueError for one that is none."""
    found = {}  # {path: (group or None, Run)}
    for argument in arguments:
        name, _, pattern = argument.partition("=")
        if not pattern or "/" in name:
            name, pattern = None, argument
        paths = sorted(glob.glob(pattern) or glob.glob(str(ROOT / pattern)), key=natural)
        runs = [
            run
            for path in map(Path, paths)
            for run in (logs_in(path) if path.is_dir() else [read(path)])
        ]
        if not runs:
            raise ValueError(f"no log at {pattern!r}: name a log, a folder or a glob of logs")
        for run in runs:
            if found.setdefault(run.path.resolve(), (name, run))[1] is not run:
                raise ValueError(f"{run.path} is named twice")
    return grouped(found.values())


def grouped(named):
    """Return {group: [Run]} of (name or None, Run); a label in two folders gets a folder's name."""
    folders = {}
    for name, run in named:
        if name is None:
            folders.setdefault(run.label, set()).add(run.path.parent)
    groups = {}
    for name, run in named:
        own = run.label
        if len(folders.get(own, ())) > 1:
            own = f"{run.path.parent.name}/{own}"
        groups.setdefault(name or own, []).append(run)
    return groups


def check(groups):
    """Raise ValueError unless all runs of a group had one plan and, at each start, one header."""
    for runs in groups.values():
        check_starts(runs)
        for what, name in SAME.items():
            one_value(what, fact(name), runs)
        one_value("plan (num_iterations of each start)", plan, runs)


def check_starts(runs):
    """Raise ValueError for a run whose starts differ in what defines a loss."""
    for run in runs:
        for what, name in SAME.items():
            value = run.facts.get(name) or ""
            require(
                " then " not in value,
                f"the {what} of {run.path} differ between its starts, {value}: its loss compares "
                f"with none",
            )


def fact(name):
    """Return what gives this fact of a run, or None."""
    return lambda run: run.facts.get(name)


def one_value(what, of, runs):
    """Raise ValueError if runs differ in a value; return whether all of them hold it."""
    values = {str(of(run)): run.path for run in runs if of(run) is not None}
    listed = ", ".join(f"{value} in {path}" for value, path in values.items())
    require(len(values) < 2, f"the {what} of these runs differ: {listed}; compare like with like")
    return all(of(run) is not None for run in runs)


def plan(run):
    """Return the steps that a run was started for; a log that is no whole run's says so."""
    return " then ".join("another log's" if n is None else f"{n}" for n in run.planned) or None


def escaped(text):
    """Return text that is one line of Markdown and neither a cell's end, code nor HTML."""
    text = html.escape(" ".join(text.splitlines()), quote=False)
    return re.sub(r"([\\`|])", r"\\\1", text)


def markdown(head, rows):
    """Return a table; whatever the cells hold, they stay cells."""
    rows = [[escaped(cell) for cell in row] for row in [head, ["---"] * len(head), *rows]]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def spread(values, form="{:.4f}"):
    """Return mean and standard deviation as text; of one value, that value."""
    if len(values) == 1:
        return f"{form.format(values[0])} (n=1)"
    return f"{form.format(statistics.mean(values))} (sd {form.format(statistics.stdev(values))})"


def middle(values, form):
    """Return the median as text, n/a where a value is unknown."""
    return "n/a" if None in values else form.format(statistics.median(values))


def table(groups):
    """Return the text of all runs: what they share in one line, the rest as a row a run."""
    cells = {
        group: [{n: c(run) for n, c in COLUMNS.items()} for run in runs]
        for group, runs in groups.items()
    }
    rows = [row for of_group in cells.values() for row in of_group]
    varying = [name for name in COLUMNS if len({row[name] for row in rows}) > 1]
    same = [f"{name} {escaped(rows[0][name])}" for name in COLUMNS if name not in varying]
    body = [
        [group, *(row[name] for name in varying)]
        for group, of_group in cells.items()
        for row in of_group
    ]
    lines = [f"All runs: {', '.join(same)}.", ""] if len(rows) > 1 else []
    varying = varying if len(rows) > 1 else list(COLUMNS)
    if len(rows) == 1:
        body = [[next(iter(groups)), *rows[0].values()]]
    return "\n".join([*lines, markdown(["group", *varying], body)])


def loss_of(runs):
    """Return mean and deviation of a group; n/a if a run has no result: the others are biased."""
    whole = all(run.finished for run in runs)
    return spread([run.val_loss for run in runs]) if whole else "n/a"


def seconds_of(runs):
    """Return the median training time of a group, likewise."""
    times = [run.train_ms / 1000 if run.finished else None for run in runs]
    return middle(times, "{:.0f} s")


def summary(groups):
    """Return a table of the groups: n, which counts every run, loss, median times."""
    rows = []
    for group, runs in groups.items():
        per_step = middle([run.ms_per_step for run in runs], "{:.1f}")
        n, steps = f"{len(runs)}", f"{runs[0].last}"
        rows.append([group, n, steps, loss_of(runs), seconds_of(runs), per_step])
    head = ["group", "n", "steps", "val loss", "train time, median", "ms/step, median"]
    faulty = [run for runs in groups.values() for run in runs if not run.finished]
    named = ", ".join(f"{escaped(run.path.name)} (step {progress(run)})" for run in faulty)
    note = f"\n\nNo result, so no mean of their groups: {named}." if faulty else ""
    return markdown(head, rows) + note


def history():
    """Return the table of all records: a row a group of runs, newest record last."""
    rows = []
    for folder in sorted(path.parent for path in (ROOT / "records").glob("*/README.md")):
        date, title = folder.name[:10], (folder / "README.md").read_text().partition("\n")[0][2:]
        groups = grouped([(None, run) for run in logs_in(folder)])
        check(groups)
        first = [date, f"[{title}]({folder.name})"]
        if not groups:
            rows.append([*first, "benchmarks", *[""] * 6])
        for group, runs in groups.items():
            steps, size = runs[0].last, runs[0].tokens_per_step
            hardware = f"{COLUMNS['device'](runs[0])}, torch {COLUMNS['torch'](runs[0])}"
            per_step = middle([run.ms_per_step for run in runs], "{:.1f}")
            cells = [group, f"{len(runs)}", f"{steps:,}", f"{steps * size:,}"]
            rows.append([*first, *cells, loss_of(runs), per_step, hardware])
            first = ["", ""]
    head = ["date", "record", "runs", "n", "steps", "tokens", "val loss", "ms/step", "hardware"]
    return markdown(head, rows)


# ---- pictures ------------------------------------------------------------------------------------
def stretch(run):
    """Return over how many steps the training loss is averaged in a picture."""
    return max(1, run.last // STRETCHES)


def curve(run, kind):
    """Return (P, 3): step, loss, ms of what is drawn of a run.

    val: the validations after step 0. train: means over stretches of steps, each at the mean of
    its steps; the last stretch may be shorter.
    """
    points = np.array(run.points[kind], dtype=float).reshape(-1, 3)
    points = points[points[:, 0] > 0]
    if kind == "val":
        return points
    which = (points[:, 0] - 1) // stretch(run)
    means = [points[which == i].mean(axis=0) for i in np.unique(which)]
    return np.array(means).reshape(-1, 3)


def mean_curve(curves):
    """Return the mean of (P, 3) curves at the steps that all of them have."""
    shared = sorted(set.intersection(*(set(points[:, 0]) for points in curves)))
    return np.mean([points[np.isin(points[:, 0], shared)] for points in curves], axis=0)


def loss_axis(curves, targets):
    """Return (low, high) of what lies behind the first tenth of each curve, and of near targets."""
    late = [points[points[:, 0] >= points[-1, 0] / 10, 1] for points in curves if len(points)]
    values = np.concatenate(late)
    values = values[np.isfinite(values)]
    if len(values) < 2 or not np.ptp(values):
        return None, None
    values = [*values, *(x for x in targets if np.abs(values - x).min() < np.ptp(values) / 2)]
    margin = 0.05 * np.ptp(values)
    return min(values) - margin, max(values) + margin


def count(number, position=None):
    """Return a number of tokens as text, such as 7.37M."""
    for size, letter in (1e9, "B"), (1e6, "M"), (1e3, "k"):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def listed(items):
    *first, last = map(str, items)
    return f"{', '.join(first)} and {last}" if first else last


def repeats(groups):
    """Return of how many runs the results of these groups are means."""
    numbers = [len(runs) for runs in groups.values()]
    if max(numbers) == 1:
        return "one run each" if len(numbers) > 1 else "one run"
    seeds = all(len({run.seed for run in runs} - {None}) == len(runs) for runs in groups.values())
    kind = "seeds" if seeds else "runs"
    if len(set(numbers)) > 1:
        return f"means of {listed(numbers)} {kind}"
    return f"mean{'s' * (len(numbers) > 1)} of {numbers[0]} {kind}{' each' * (len(numbers) > 1)}"


def results(groups):
    """Return which losses groups reach after how many tokens; of many, the best and the worst."""
    means = {name: statistics.mean(run.val_loss for run in runs) for name, runs in groups.items()}
    names, before = list(groups), ""
    if len(names) > NAMED:
        before = f"best and worst of {len(names)}: "
        names = [min(means, key=means.get), max(means, key=means.get)]
    tokens = [groups[name][0].tokens for name in names]
    after = [f" after {count(number)} tokens" for number in tokens]
    if len(set(tokens)) == 1:  # said once, of all
        after[:-1] = [""] * (len(names) - 1)
    reaches = [" reaches"] + [""] * (len(names) - 1)
    said = [f"{n}{r} {means[n]:.3f}{a}" for n, r, a in zip(names, reaches, after)]
    return f"{before}{', '.join(said)} ({repeats({name: groups[name] for name in names})})"


def state(run):
    return f"{run.fault} at step {run.reached:,} of {run.last:,}"


def no_result(group, runs):
    """Return why a group has no mean, and what one run that is going on has come to."""
    faulty = [run for run in runs if not run.finished]
    if len(runs) > 1:
        return f"no mean of {group}: {len(faulty)} of its {len(runs)} runs have no result"
    loss, step = runs[0].val_loss, runs[0].steps
    seen = f", validation loss {loss:.3f} at step {step:,}" if step else ""
    return f"{group}: {state(runs[0])}{seen}"


def finding(groups):
    """Return what a picture of these groups shows: their results, and which have none."""
    whole = {name: runs for name, runs in groups.items() if all(run.finished for run in runs)}
    said = [results(whole)] if whole else []
    said += [no_result(name, runs) for name, runs in groups.items() if name not in whole]
    return "; ".join(said)


def interleaved(groups):
    """Return whether these are rounds of ab.py, in turn on one machine: only then times compare."""
    every = list(itertools.chain(*groups.values()))
    names = [re.fullmatch(r"([AB])_round(\d+)", run.path.stem) for run in every]
    places = {(run.path.resolve().parent, run.facts.get("device")) for run in every}
    rounds = {side: {name[2] for name in names if name and name[1] == side} for side in "AB"}
    return all(names) and len(places) == 1 and rounds["A"] == rounds["B"] and len(names) > 2


def new_figure(width, height):
    """Return an empty figure of matplotlib's, which only pictures need."""
    with packages():
        from matplotlib.figure import Figure
    return Figure(figsize=(width, height), layout="constrained")


def plain(text, width=1000):
    """Return text, broken into lines, in which matplotlib sees no formula."""
    whole = dict(break_long_words=False, break_on_hyphens=False)
    return textwrap.fill(text, width, **whole).replace("$", r"\$")


def headed(figure, title, remark=""):
    """Give a figure its title, which says what it shows, and a remark below."""
    letters = figure.get_figwidth() * 11  # that fit in a line
    figure.suptitle(plain(title, letters), fontsize=11)
    figure.supxlabel(plain(remark, 1.2 * letters), fontsize=9, color="0.3")


def draw_group(axes, runs, x_of, i, label):
    """Draw the i-th group: its runs thin and small, their means thick and large."""
    color, marker = COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]
    for kind, point in ("train", ""), ("val", marker):
        line = dict(color=color, linestyle=STYLES[kind])
        thin = dict(linewidth=0.5, alpha=0.6, markersize=3, **line)
        thick = dict(linewidth=1.8, markersize=7, markeredgecolor="white", **line)
        curves = [curve(run, kind) for run in runs]
        for run, points in zip(runs, curves):
            x, y = x_of(run, points), points[:, 1]
            if len(runs) > 1:
                axes.plot(x, y, marker=point, **thin)
            if kind == "train" and not run.finished:
                axes.plot(x[-1:], y[-1:], "x", color="black", markersize=8, zorder=4)
        mean = mean_curve(curves)
        axes.plot(x_of(runs[0], mean), mean[:, 1], marker=point, **thick)
    axes.plot([], [], marker=marker, label=plain(label), **thick)


def draw_targets(axes, targets, low, high):
    """Draw each target that lies within the frame as a line."""
    for target, dashes in zip(targets, itertools.cycle(["--", "-."])):
        if low is None or low < target < high:
            label = f"target {target:g}"
            axes.axhline(target, linestyle=dashes, linewidth=1.2, color="black", label=label)


def draw_faults(axes, runs):
    """Name the runs that have no result."""
    faulty = [f"{run.path.stem}: {state(run)}" for run in runs if not run.finished]
    if faulty:
        more = [f"and {len(faulty) - NAMED} more"] * (len(faulty) > NAMED)
        text = "\n".join(plain(line) for line in ["x  no result yet", *faulty[:NAMED], *more])
        box = dict(facecolor="white", edgecolor="black", boxstyle="round")
        axes.text(0.02, 0.03, text, transform=axes.transAxes, fontsize=9, bbox=box, zorder=5)


def draw_curves(panels, groups, targets):
    """Draw losses against tokens and, in a second panel, against time."""
    runs = list(itertools.chain(*groups.values()))
    curves = [curve(run, kind) for run in runs for kind in run.points]
    low, high = loss_axis(curves, targets)
    scales = {
        "tokens read": lambda run, points: points[:, 0] * run.tokens_per_step,
        "train time, s (rounds in turn)": lambda run, points: points[:, 2] / 1000,
    }
    for axes, (xlabel, x_of) in zip(panels, scales.items()):
        for i, (group, own) in enumerate(groups.items()):
            draw_group(axes, own, x_of, i, f"{group} (n={len(own)})")
        for kind, name in ("val", "validation"), ("train", "training"):
            axes.plot([], [], color="0.3", linestyle=STYLES[kind], label=name)
        draw_targets(axes, targets, low, high)
        axes.set(xlabel=xlabel, xlim=(0, None), ylabel="loss, nats a token", ylim=(low, high))
        axes.grid(alpha=0.3)
    panels[0].xaxis.set_major_formatter(count)
    if len(runs) == 1 and runs[0].train_ms:
        draw_time(panels[0], runs[0])
    many = len(groups) + len(targets) > 2  # they would cover the curves
    below = dict(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    panels[0].legend(fontsize=9, **(below if many else dict(loc="upper right")))
    draw_faults(panels[0], runs)


def draw_time(axes, run):
    """Draw the training time of a run above its axis of tokens."""
    size, unit = (60, "min") if run.train_ms > 600_000 else (1, "s")
    rate = run.train_ms / 1000 / size / (run.reached * run.tokens_per_step)
    above = axes.secondary_xaxis("top", functions=(lambda x: x * rate, lambda x: x / rate))
    above.set_xlabel(f"training time, {unit}")


def differences(groups):
    """Return {group: (P, 2): tokens, validation loss minus that of the first group}, of means.

    Empty, unless a group is so close to the first that its curve covers it.
    """
    curves = {}
    for name, runs in groups.items():
        points = mean_curve([curve(run, "val") for run in runs])
        curves[name] = dict(zip(points[:, 0] * runs[0].tokens_per_step, points[:, 1]))
    base = next(iter(curves.values()))
    found = {}
    for name, points in list(curves.items())[1:]:
        shared = sorted(base.keys() & points.keys())
        found[name] = np.array([(x, points[x] - base[x]) for x in shared]).reshape(-1, 2)
    every = [run for runs in groups.values() for run in runs]
    low, high = loss_axis([curve(run, kind) for run in every for kind in run.points], [])
    late = [points[len(points) // 2 :, 1] for points in found.values() if len(points) > 1]
    close = low is not None and any(np.abs(part).max() < 0.05 * (high - low) for part in late)
    return found if close else {}


def draw_differences(axes, groups, found):
    """Draw the differences to the first group, in the colors and with the marks of the curves."""
    base = next(iter(groups))
    axes.axhline(0, color=COLORS[0], linewidth=1.8)
    for i, name in enumerate(groups):
        if name in found:
            look = dict(color=COLORS[i % len(COLORS)], marker=MARKERS[i % len(MARKERS)])
            axes.plot(*found[name].T, markersize=7, markeredgecolor="white", **look)
    late = np.concatenate([points[len(points) // 2 :, 1] for points in found.values()])
    size = 2 * np.abs(late[np.isfinite(late)]).max(initial=1e-4)
    axes.set(xlabel="tokens read", xlim=(0, None), ylim=(-size, size))
    axes.set_ylabel(plain(f"validation loss - that of {base}", 40))
    axes.xaxis.set_major_formatter(count)
    axes.grid(alpha=0.3)


def draw_ends(axes, groups, targets):
    """Draw the result of each run, and their means, close by; none of a group that has no mean."""
    losses = {
        name: [run.val_loss for run in runs] if all(run.finished for run in runs) else []
        for name, runs in groups.items()
    }
    dots(axes, losses, "validation loss at the end")
    axes.set_title("")
    low, high = axes.get_ylim()
    size, margin = high - low, 0.1 * (high - low)
    near = [target for target in targets if low - size < target < high + size]
    axes.set_ylim(min([low, *(x - margin for x in near)]), max([high, *(x + margin for x in near)]))
    draw_targets(axes, near, *axes.get_ylim())


def remark(groups):
    """Return what the marks of a picture mean, and how the training loss is smoothed."""
    runs = list(itertools.chain(*groups.values()))
    sizes = {f"{stretch(run)} steps" for run in runs}
    each = sizes.pop() if len(sizes) == 1 else f"{1 / STRETCHES:.1%} of a run"
    smoothed = "of each step" if each == "1 steps" else f"mean over each {each}"
    said = f"Dotted: training loss, {smoothed}. Solid: validation loss."
    many = " Thick, large: mean of the runs; thin, small: each run."
    return said + many * (len(runs) > len(groups))


def draw(groups, path):
    """Draw the losses of groups: on their way, and where several runs came there, at the end."""
    runs = list(itertools.chain(*groups.values()))
    for group, own in groups.items():
        begun = any(run.reached for run in own)
        require(begun, f"the runs of {group} hold no step after step 0 to draw")
    one_value("validation tokens (val_hash)", fact("val_hash"), runs)
    targets = sorted({run.settings.get("target_val_loss") for run in runs} - {None, 0})
    ended = [len(own) for own in groups.values() if all(run.finished for run in own)]
    ends = max(ended, default=0) > 1
    found = differences(groups)
    of_curves = 1 + interleaved(groups)
    widths = [6] * of_curves + [4] * bool(found) + [2 + 0.5 * len(groups)] * ends
    figure = new_figure(2 + sum(widths), 5)
    panels = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    draw_curves(panels[:of_curves], groups, targets)
    if found:
        draw_differences(panels[of_curves], groups, found)
    if ends:
        draw_ends(panels[-1], groups, targets)
    headed(figure, finding(groups), remark(groups))
    makers = draw, draw_group, draw_curves, draw_targets, draw_ends, draw_faults, dots, headed
    makers += draw_time, draw_differences
    shapes = curve, mean_curve, stretch, loss_axis, interleaved, COLORS, MARKERS, STRETCHES, NAMED
    shapes += differences, STYLES
    words = finding, results, repeats, no_result, state, remark, count
    members = ((group, run.path) for group, own in groups.items() for run in own)
    save(figure, path, *makers, *shapes, *words, *itertools.chain(*members))


def dots(axes, groups, what, form="{:.4f}"):
    """Draw {group: values} as a dot a run, in their order, and a line at the mean.

    A group without values keeps its place and its look.
    """
    known = {name: values for name, values in groups.items() if len(values)}
    for i, values in enumerate(groups.values()):
        n, color = len(values), COLORS[i % len(COLORS)]
        look = dict(marker=MARKERS[i % len(MARKERS)], markersize=6, markeredgecolor="white")
        x = i + 0.3 * (np.arange(n) - (n - 1) / 2) / max(1, n - 1)
        axes.plot(x, values, linestyle="", color=color, **look)
        if n:
            axes.hlines(np.mean(values), i - 0.3, i + 0.3, color=color)
    means = (f"{name} {form.format(np.mean(values))}" for name, values in known.items())
    numbers = listed(dict.fromkeys(len(values) for values in known.values()))
    axes.set_title(plain(f"{', '.join(means)} (means of {numbers})", 56), fontsize=10)
    axes.set_ylabel(what)
    every = np.concatenate(list(known.values()))
    margin = max(0.1 * np.ptp(every), 0.002 * np.abs(every).max())  # equal values stay in line
    axes.set(xlim=(-0.6, len(groups) - 0.4), ylim=(every.min() - margin, every.max() + margin))
    room = int(6 + 23 / len(groups))  # letters a name, in a panel as wide as draw makes it
    names = [plain(name, room) for name in groups]
    longest = max(len(line) for name in names for line in name.split("\n"))
    slant = dict(rotation=30, ha="right") if longest > room else {}
    axes.set_xticks(range(len(groups)), names, **slant)
    axes.grid(axis="y", alpha=0.3)


def save(figure, path, *parts):
    """Write a picture as .png and .svg, with the fingerprint of what made it: functions, texts,
    logs. Neither holds a date or a version; the .svg holds its words as words."""
    path = Path(path)
    require(path.suffix == FORMS[0], f"--picture={path} must end in {FORMS[0]}")
    with packages():
        import matplotlib
    title = figure.get_suptitle() or figure.axes[0].get_title()
    made_of = fingerprint(save, new_figure, plain, *parts)
    title = " ".join(title.split()).replace(r"\$", "$")
    about = {"Title": title, "Description": made_of}
    unsaid = {".png": ["Software"], ".svg": ["Date", "Creator"]}
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "records"}):
        for form in FORMS:
            metadata = about | dict.fromkeys(unsaid[form])
            figure.savefig(path.with_suffix(form), dpi=90, metadata=metadata)


def made_from(path):
    """Return the fingerprint in a picture, or None."""
    if not path.exists():
        return None
    if path.suffix == ".svg":
        found = re.search("<dc:description>(.*)</dc:description>", path.read_text())
        return found and found[1]
    with packages():
        from PIL import Image
    return Image.open(path).text.get("Description")


def run_block(tool, arguments):
    """Return what a command of a README prints, remarks on stderr apart."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        importlib.import_module(tool).main(shlex.split(arguments))
    return printed.getvalue()


def twice(drawn, pictures):
    """Return (path of the new file, path in the repository) of both forms of each picture."""
    pairs = itertools.product(zip(drawn, pictures), FORMS)
    return [(new.with_suffix(form), (ROOT / old).with_suffix(form)) for (new, old), form in pairs]


def outdated(readme, write):
    """Return which commands of a README no longer give what stands there; write it anew or not."""
    stale = []

    def renew(block):
        arguments = block["arguments"]
        pictures = re.findall(r"--picture[ =](\S+)", arguments)
        with tempfile.TemporaryDirectory() as folder:
            drawn = [Path(folder) / Path(picture).name for picture in pictures]
            for picture, new in zip(pictures, drawn):
                arguments = arguments.replace(picture, str(new))
            text = run_block(block["tool"], arguments)
            changed = text != block["text"]
            for new, old in twice(drawn, pictures):
                if made_from(new) != made_from(old):
                    changed = True
                    if write:
                        old.write_bytes(new.read_bytes())
        if changed:
            stale.append(block["start"].strip())
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
    return [f"{readme.relative_to(ROOT)}: {command}" for command in stale]


def readmes():
    return [ROOT / "README.md", *sorted((ROOT / "records").rglob("README.md"))]


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logs", nargs="*", metavar="LOG")
    parser.add_argument("--picture", help="a .png to draw; an .svg is written beside it")
    parser.add_argument("--summary", action="store_true", help="only the row a group")
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
        changed = [line for path in readmes() for line in outdated(path, options.refresh)]
        print("\n".join(changed) or "all is up to date")
        return int(options.stale and bool(changed))
    if options.logs:
        groups = collect(options.logs)
        check(groups)
        print("\n\n".join([*([] if options.summary else [table(groups)]), summary(groups)]))
        if options.picture:
            draw(groups, options.picture)
    return 0


def command(main):
    """Run a tool's main on the command line; a mistake is one sentence and status 1."""
    try:
        sys.exit(main(sys.argv[1:]))
    except (ValueError, OSError, subprocess.SubprocessError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


if __name__ == "__main__":
    command(main)
