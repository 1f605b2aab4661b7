"""Shared by the tools: command lines, and a parser for the logs of the scripts."""

import argparse
import ast
import contextlib
import math
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TITLE = "Log of train_gpt2.py, run_id="
POINT = re.compile(
    r"step:(?P<step>\d+)/\d+ (?P<kind>train|val)_loss:(?P<loss>\S+) "
    r"train_time:(?P<ms>\d+)ms step_avg:(?P<average>\S+)ms"
)
FACT = re.compile(  # name:value before the first step; a value ends before the next name
    r"(?:^| )(torch|device|processes|matmul_dtype|train_tokens|train_data|val_data)"
    r":(\S.*?)(?= [\w/]+:|$)"
)
PARAMETERS = re.compile(r"^training .* (?P<parameters>[\d,]+) parameters$")
SUMMARY = re.compile(r"^(\w+): (.*)$")  # a line after the last step

# What makes runs comparable: the rules of all tools.
# Repetitions of an experiment may differ in these settings. The data must be the same, in any
# folder: COMPARABLE compares their checksums.
MAY_VARY = {
    "run_id", "log_dir", "resume", "seed", "device", "device_batch_size", "save_every",
    "keep_checkpoints", "comm_timeout", "train_files", "val_files", "allow_repeat",
}  # fmt: skip
LOSS_DEPENDS_ON = {  # losses are only averaged if these are equal
    "validation data": lambda run: run.facts.get("val_data"),
    "number of validation tokens": lambda run: run.settings.get("val_tokens"),
    "number of processes": lambda run: run.facts.get("processes"),
    "dtype of matmuls": lambda run: run.facts.get("matmul_dtype"),
}
COMPARABLE = {  # experiments are only compared if these are equal
    **LOSS_DEPENDS_ON,
    "training data": lambda run: run.facts.get("train_data"),
    "sequence_length": lambda run: run.settings["sequence_length"],
}


# ---- Command lines ------------------------------------------------------------------------------
@contextlib.contextmanager
def packages():
    """Report a failed import in one sentence and exit with status 1."""
    try:
        yield
    except ModuleNotFoundError as error:
        fix = f"{sys.executable} -m pip install {error.name}"
        sys.exit(f"{Path(sys.argv[0]).name}: {error.name} is not installed: {fix}")


def argument_parser(description):
    """Return a parser that prints the description with its own line breaks."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def command(main):
    """Run a tool's main with sys.argv. Expected errors print one line and exit with status 1."""
    try:
        sys.exit(main(sys.argv[1:]))
    except (ValueError, OSError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        sys.exit(130)


def run_child(arguments):
    """Run a command, pass signals on to it, and return its exit status."""
    child = subprocess.Popen(arguments)

    def pass_on(number, frame):
        child.send_signal(number)

    previous = {}  # {signal: handler}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) != signal.SIG_IGN:
            previous[number] = signal.signal(number, pass_on)
    status = child.wait()
    for number, handler in previous.items():
        signal.signal(number, handler or signal.SIG_DFL)  # None: not set from Python
    return status if status >= 0 else 128 - status  # as a shell reports a signal


def require(condition, sentence):
    """Raise ValueError with this sentence unless the condition holds."""
    if not condition:
        raise ValueError(sentence)


# ---- Logs ---------------------------------------------------------------------------------------
@dataclass
class Run:
    """One run. Losses are in nats per token. Values missing from the log are None."""

    path: Path
    source: str  # of the script and its modules; its sha256 in a shortened log
    settings: dict
    facts: dict  # {name: text} of the header and the summary
    edited: bool  # whether the script was edited between two starts of the run
    points: dict  # {"train" or "val": [(step, loss)]}
    last_step: int = 0  # of the last point
    train_seconds: float = None  # at the last point
    ms_per_step: float = None  # mean, as logged

    seed = property(lambda self: self.settings["seed"])
    num_iterations = property(lambda self: self.settings["num_iterations"])
    # A script may stop early; its summary says after which step.
    steps = property(lambda self: int(self.facts.get("steps", self.num_iterations)))
    last_val_step = property(lambda self: self.points["val"][-1][0] if self.points["val"] else 0)
    val_loss = property(lambda self: self.points["val"][-1][1] if self.points["val"] else None)
    finished = property(lambda self: self.fault is None)

    @property
    def fault(self):
        """Why there is no result ("diverged" or "unfinished"), or None if there is one."""
        losses = [points[-1][1] for points in self.points.values() if points]
        if not all(map(math.isfinite, losses)):
            return "diverged"
        complete = self.last_val_step == self.steps
        return None if complete and "val_loss" in self.facts else "unfinished"

    @property
    def tokens(self):
        """The tokens read: those of the summary, or those before the last validation."""
        return int(self.facts.get("tokens", self.last_val_step * self.tokens_per_step))

    @property
    def tokens_per_step(self):
        return self.settings["batch_size"] * self.settings["sequence_length"]

    @property
    def label(self):
        """The group of a run: the file's name without the seed, else the folder's name."""
        return re.sub(r"_?seed\d+$", "", self.path.stem) or self.path.resolve().parent.name


@dataclass
class Start:
    """What a process has logged: the source, the settings, facts, then points and a summary."""

    source: str
    settings: dict
    facts: dict
    points: list  # matches of POINT

    @property
    def from_scratch(self):
        return bool(self.points) and int(self.points[0]["step"]) <= 1


def read_start(text):
    """Return the Start in a part of a log."""
    _, _, text = text.partition("\n")  # the title
    # A line of the source may begin with "hyperparameter ", too.
    first = re.search(r"^(hyperparameter .*\n)+(training .*\n)?torch:", text, re.M).start()
    start = Start(text[: first - 1], settings={}, facts={}, points=[])
    for line in text[first:].splitlines():
        if line.startswith("hyperparameter "):
            name, _, value = line.removeprefix("hyperparameter ").partition("=")
            is_float = value in ("inf", "-inf", "nan")
            start.settings[name] = float(value) if is_float else ast.literal_eval(value)
        elif point := POINT.match(line):
            start.points.append(point)
        elif size := PARAMETERS.match(line):
            start.facts.update(size.groupdict())
        else:
            start.facts.update(FACT.findall(line) + SUMMARY.findall(line))
    return start


def read_starts(text):
    """Return the Starts that belong to the result.

    A start that was killed in its header is dropped. A run that dies before its first checkpoint
    starts from scratch, perhaps with another seed or script, so earlier starts are dropped, unless
    one of them has a result.
    """
    starts = []
    for part in f"\n{text}".split(f"\n{TITLE}")[1:]:
        if "\ntorch:" not in part:  # the line after the settings
            continue
        start = read_start(part)
        if start.from_scratch and not any("val_loss" in earlier.facts for earlier in starts):
            starts = []
        starts.append(start)
    return starts


def add_point(run, point):
    """Add a match of POINT. If a resumed run repeats steps, its new lines replace the old ones."""
    step, kind = int(point["step"]), point["kind"]
    if run.points[kind] and run.points[kind][-1][0] >= step:  # the train_loss of a step comes first
        last_train = step if kind == "val" else step - 1
        run.points["train"] = [p for p in run.points["train"] if p[0] <= last_train]
        run.points["val"] = [p for p in run.points["val"] if p[0] < step]
    run.points[kind].append((step, float(point["loss"])))
    average = float(point["average"])
    run.last_step, run.train_seconds = step, float(point["ms"]) / 1000
    run.ms_per_step = None if math.isnan(average) else average


def read(path):
    """Return the Run of a log, finished or not. Raises ValueError for a file that is not a log.

    The source, the settings and the facts of the last start count, except that torch, processes and
    matmul_dtype list the values of all starts. Starts with different seeds are different runs.
    """
    path = Path(path)
    text = path.read_text(encoding="utf-8", errors="replace")
    text = text[: text.rfind("\n") + 1]  # a run that is still going may have written half a line
    if f"\n{TITLE}" in f"\n{text}" and "\ntorch:" not in text:
        raise ValueError(f"{path} ends before its first step: start the run again, or delete it")
    try:
        starts = read_starts(text)
        last = starts[-1]
        for name in "torch", "processes", "matmul_dtype":
            values = [start.facts[name] for start in starts if name in start.facts]
            if values:
                last.facts[name] = ", ".join(dict.fromkeys(values))
        seeds = sorted({start.settings["seed"] for start in starts})
        run = Run(
            path=path,
            source=last.source,
            settings=last.settings,
            facts=last.facts,
            edited=len({start.source for start in starts}) > 1,
            points={"train": [], "val": []},
        )
        for start in starts:
            for point in start.points:
                add_point(run, point)
    except Exception as error:  # a damaged log can raise almost any type
        raise ValueError(
            f"{path} is not the log of a training run, or an old version wrote it: a log holds the "
            f"script's source and its hyperparameters ({error!r:.100})"
        ) from None
    require(len(seeds) == 1, f"{path} holds runs with the seeds {seeds}: a log has one run")
    return run


def logs_in(folder):
    """Return the Runs of all logs in a folder and its subfolders. Other files are skipped.

    Raises ValueError for a damaged log: silently omitting a run would bias the result.
    """
    paths = sorted(Path(folder).rglob("*.txt"))
    return [read(path) for path in paths if b"\nhyperparameter " in path.read_bytes()]
