"""Tables and pictures from logs; the tables of every README under records/, made anew.

    python records/report.py LOG...                        # a row a run, a row a group
    python records/report.py muon='records/X/m*.txt' adamw=records/Y --picture curves.png
    python records/report.py --history                     # the table of all records
    python records/report.py --refresh                     # write anew what READMEs show

LOG: a file, a folder or a quoted glob, ours or a public one of 2024; `name=` before it puts its
runs into a group of that name, else file names do (muon_seed3.txt: muon). n/a: not in the log.

A README holds the command between `<!-- ` and ` -->`, then what it prints, then `<!-- end -->`;
--refresh runs these commands, --stale names those whose output has changed, and exits with 1.
"""

import argparse
import contextlib
import glob
import importlib
import io
import itertools
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from runlog import ROOT, fingerprint, logs_in, natural, read

BLOCK = re.compile(
    r"(?P<start><!-- python records/(?P<tool>\w+)\.py(?P<arguments>[^\n]*) -->\n)"
    r"(?P<text>(?:(?!<!-- ).)*)(?=<!-- end -->\n)", re.S
)  # fmt: skip


def shown(value, form="{}"):
    return "n/a" if value is None else form.format(value)


def percent(run):
    return run.number("mfu") and run.number("mfu") / 100


COLUMNS = {  # name: text of a run
    "seed": lambda run: shown(run.seed),
    "steps": lambda run: f"{run.steps}" if run.finished else f"{run.steps} of {run.last}, cut",
    "val loss": lambda run: f"{run.val_loss:.4f}",
    "tokens": lambda run: f"{run.tokens:,}",
    "train time": lambda run: f"{run.train_ms / 1000:.0f} s",
    "ms/step": lambda run: shown(run.ms_per_step, "{:.1f}"),
    "tokens/s": lambda run: shown(run.tokens_per_second, "{:,.0f}"),
    "MFU": lambda run: shown(percent(run), "{:.1%}"),
    "peak memory": lambda run: shown(run.number("peak_memory"), "{:.0f} MiB"),
    "compile": lambda run: shown(run.number("compile"), "{:.1f} s"),
    "torch": lambda run: shown(run.facts.get("torch")),
    "device": lambda run: shown(run.facts.get("device")),
    "processes": lambda run: shown(run.facts.get("processes")),
    "commit": lambda run: re.sub(r"(?<=^\w{9})\w+", "", shown(run.facts.get("commit"))),
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
        runs = [run for path in map(Path, paths)
                for run in (logs_in(path) if path.is_dir() else [read(path)])]
        if not runs:
            raise ValueError(f"no log at {pattern!r}: name a log, a folder or a glob of logs")
        for run in runs:
            if found.setdefault(run.path.resolve(), (name, run))[1] is not run:
                raise ValueError(f"{run.path} is named twice")
    return grouped(found.values())


def grouped(named):
    """Return {group: [Run]} of (name or None, Run); a label in two folders gets the folder's name.
    """
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


def markdown(head, rows):
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


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
    cells = {group: [{n: c(run) for n, c in COLUMNS.items()} for run in runs]
             for group, runs in groups.items()}
    rows = [row for of_group in cells.values() for row in of_group]
    varying = [name for name in COLUMNS if len({row[name] for row in rows}) > 1]
    same = [f"{name} {rows[0][name]}" for name in COLUMNS if name not in varying]
    body = [[group, *(row[name] for name in varying)]
            for group, of_group in cells.items() for row in of_group]
    lines = [f"All runs: {', '.join(same)}.", ""] if len(rows) > 1 else []
    varying = varying if len(rows) > 1 else list(COLUMNS)
    if len(rows) == 1:
        body = [[next(iter(groups)), *rows[0].values()]]
    return "\n".join([*lines, markdown(["group", *varying], body)])


def finished(groups):
    """Return the groups without their unfinished runs, whose last loss is not the result."""
    whole = {group: [run for run in runs if run.finished] for group, runs in groups.items()}
    return {group: runs for group, runs in whole.items() if runs}


def summary(groups):
    """Return a table of the groups' finished runs: n, loss, median times."""
    rows = [[group, f"{len(runs)}", f"{runs[0].steps}", spread([run.val_loss for run in runs]),
             middle([run.train_ms / 1000 for run in runs], "{:.0f} s"),
             middle([run.ms_per_step for run in runs], "{:.1f}")]
            for group, runs in finished(groups).items()]
    cut = sum(not run.finished for runs in groups.values() for run in runs)
    head = ["group", "n", "steps", "val loss", "train time, median", "ms/step, median"]
    return markdown(head, rows) + (f"\n\nLeft out: {cut} unfinished runs." if cut else "")


def history():
    """Return the table of all records: a row a group of finished runs, newest record last."""
    rows = []
    for folder in sorted(path.parent for path in (ROOT / "records").glob("*/README.md")):
        date, title = folder.name[:10], (folder / "README.md").read_text().partition("\n")[0][2:]
        groups = finished(grouped([(None, run) for run in logs_in(folder)]))
        first = [date, f"[{title}]({folder.name})"]
        if not groups:
            rows.append([*first, "benchmarks", *[""] * 6])
        for group, runs in groups.items():
            rows.append([
                *first, group, f"{len(runs)}", f"{runs[0].steps:,}", f"{runs[0].tokens:,}",
                spread([run.val_loss for run in runs]),
                middle([run.ms_per_step for run in runs], "{:.1f}"),
                f"{COLUMNS['device'](runs[0])}, torch {COLUMNS['torch'](runs[0])}",
            ])  # fmt: skip
            first = ["", ""]
    head = ["date", "record", "runs", "n", "steps", "tokens", "val loss", "ms/step", "hardware"]
    return markdown(head, rows)


def curve(runs, axis):
    """Return (x, losses) of a group: x (P,), losses (n, P), validations that all runs have."""
    of_runs = [{step: (loss, ms) for step, loss, ms in run.points["val"] if step} for run in runs]
    steps = np.array(sorted(set.intersection(*map(set, of_runs))))
    losses, times = (np.array([[of_run[step][i] for step in steps] for of_run in of_runs])
                     for i in (0, 1))
    return {"steps": steps, "tokens": steps * runs[0].tokens_per_step,
            "train time, s": np.median(times, axis=0) / 1000}[axis], losses


def draw(groups, path):
    """Draw validation loss against steps, tokens and time: means, with bands over the seeds."""
    from matplotlib.figure import Figure

    for group, runs in groups.items():
        if not curve(runs, "steps")[0].size:
            raise ValueError(f"the runs of {group} share no validation after step 0 to draw")
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    for axes, axis in zip(figure.subplots(1, 3, sharey=True), ("steps", "tokens", "train time, s")):
        for group, runs in groups.items():
            x, losses = curve(runs, axis)
            axes.plot(x, losses.mean(axis=0), marker="o", markersize=3,
                      label=f"{group} (n={len(runs)})")
            axes.fill_between(x, losses.min(axis=0), losses.max(axis=0), alpha=0.3, linewidth=0)
        axes.set(xlabel=axis, xlim=(0, None))
        axes.grid(alpha=0.3)
    axes.legend(title="mean; band: least to greatest")
    late = [losses[:, x >= x[-1] / 10].max() for x, losses in
            (curve(runs, "steps") for runs in groups.values())]  # the first steps fall too far
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
    from PIL import Image

    return Image.open(path).text.get("Description") if path.exists() else None


def run_block(tool, arguments):
    """Return what a command of a README prints; its status says no more than that."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
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
    if len(BLOCK.findall(before)) != len(re.findall("^<!-- python", before, re.M)):
        raise ValueError(f"{readme}: give each `<!-- python records/TOOL.py ... -->` a line, and "
                         "`<!-- end -->` one below")
    after = BLOCK.sub(renew, before)
    if write and after != before:
        readme.write_text(after)
    return [f"{readme.relative_to(ROOT)}: {command}" for command in stale]


def readmes():
    return [ROOT / "README.md", *sorted((ROOT / "records").rglob("README.md"))]


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
