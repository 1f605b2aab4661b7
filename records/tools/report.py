"""Tables and pictures from logs; the tables of every README under records/, made anew.

    python records/tools/report.py LOG...                  # a row a run, a row a group
    python records/tools/report.py muon='records/X/m*.txt' adamw=records/Y --picture curves.png
    python records/tools/report.py --history               # the table of all records
    python records/tools/report.py --refresh               # write anew what READMEs show

LOG: a file, a folder or a quoted glob, ours or a public one of 2024; `name=` before it puts its
runs into a group of that name, else file names do (muon_seed3.txt: muon). n/a: not in the log.
n counts every log; a group with a run that was cut or diverged has no mean. Refused: groups, and
resumed runs, of several val_hashes, numbers of processes or dtypes of products; groups of runs
that were planned for other numbers of steps; curves of several val_hashes in one picture.

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
from runlog import ROOT, fingerprint, logs_in, natural, packages, read, require

BLOCK = re.compile(
    r"(?P<start><!-- python records/tools/(?P<tool>\w+)\.py(?P<arguments>[^\n]*) -->\n)"
    r"(?P<text>(?:(?!<!-- ).)*)(?=<!-- end -->\n)",
    re.S,
)
SAME = {  # facts that runs must share, or their losses do not compare
    "validation tokens (val_hash)": "val_hash",
    "number of processes": "processes",
    "dtype of products": "products",
}


def shown(value, form="{}"):
    return "n/a" if value is None else form.format(value)


def progress(run):
    """Return how far a run came."""
    return f"{run.steps}" if run.finished else f"{run.steps} of {run.last}, {run.fault}"


COLUMNS = {  # name: text of a run
    "seed": lambda run: shown(run.seed),
    "steps": lambda run: progress(run),
    "val loss": lambda run: shown(run.val_loss, "{:.4f}"),
    "tokens": lambda run: f"{run.tokens:,}",
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


def curve(runs, axis):
    """Return (x, losses) of a group: x (P,), losses (n, P), validations that all runs have."""
    of_runs = [
        {step: (loss, ms) for step, loss, ms in run.points["val"] if step and math.isfinite(loss)}
        for run in runs
    ]
    steps = np.array(sorted(set.intersection(*map(set, of_runs))))
    losses, times = (
        np.array([[of_run[step][i] for step in steps] for of_run in of_runs]) for i in (0, 1)
    )
    x = {
        "steps": steps,
        "tokens": steps * runs[0].tokens_per_step,
        "train time, s": np.median(times, axis=0) / 1000,
    }
    return x[axis], losses


def new_figure(width, height):
    """Return an empty figure of matplotlib's, which only pictures need."""
    with packages():
        from matplotlib.figure import Figure
    return Figure(figsize=(width, height), layout="constrained")


def draw(groups, path):
    """Draw validation loss against steps, tokens and time: means, with bands over the seeds."""
    for group, runs in groups.items():
        shared = curve(runs, "steps")[0].size
        require(shared, f"the runs of {group} share no validation after step 0 to draw")
    every = list(itertools.chain(*groups.values()))
    one_value("validation tokens (val_hash)", fact("val_hash"), every)
    figure = new_figure(13, 4.5)
    for axes, axis in zip(figure.subplots(1, 3, sharey=True), ("steps", "tokens", "train time, s")):
        for group, runs in groups.items():
            x, losses = curve(runs, axis)
            label = f"{group} (n={len(runs)})"
            axes.plot(x, losses.mean(axis=0), marker="o", markersize=3, label=label)
            axes.fill_between(x, losses.min(axis=0), losses.max(axis=0), alpha=0.3, linewidth=0)
        axes.set(xlabel=axis, xlim=(0, None))
        axes.grid(alpha=0.3)
    axes.legend(title="mean; band: least to greatest")
    curves = [curve(runs, "steps") for runs in groups.values()]
    late = [
        losses[:, x >= x[-1] / 10].max() for x, losses in curves
    ]  # the first steps fall too far
    figure.axes[0].set(ylabel="validation loss, nats a token", ylim=(None, max(late) + 0.02))
    members = ((group, run.path) for group, runs in groups.items() for run in runs)
    save(figure, path, draw, curve, *itertools.chain(*members))


def dots(axes, groups, title):
    """Draw {group: values} as a dot a run, in their order, and a line at the mean."""
    for i, values in enumerate(groups.values()):
        axes.plot(i + np.linspace(-0.15, 0.15, len(values)), values, "o", markersize=4)
        axes.hlines(np.mean(values), i - 0.3, i + 0.3, color=f"C{i}")
    axes.set(title=title, xlim=(-0.6, len(groups) - 0.4))
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(axis="y", alpha=0.3)


def save(figure, path, *parts):
    """Write a picture that carries the fingerprint of what made it: functions, texts, logs."""
    figure.savefig(path, dpi=80, metadata={"Description": fingerprint(*parts)})


def made_from(path):
    """Return the fingerprint in a picture, or None."""
    with packages():
        from PIL import Image
    return Image.open(path).text.get("Description") if path.exists() else None


def run_block(tool, arguments):
    """Return what a command of a README prints, remarks on stderr apart."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        importlib.import_module(tool).main(shlex.split(arguments))
    return printed.getvalue()


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
            for picture, new in zip((ROOT / picture for picture in pictures), drawn):
                if made_from(new) != made_from(picture):
                    changed = True
                    if write:
                        picture.write_bytes(new.read_bytes())
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
    parser.add_argument("--picture", help="a .png to draw")
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
