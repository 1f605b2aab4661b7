"""Shared by the tools: command lines, and a parser for logs of all versions of train_gpt2.py."""

import argparse
import ast
import contextlib
import math
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
POINT = re.compile(
    r"step:(?P<step>\d+)/\d+ (?P<kind>train|val)_loss:(?P<loss>\S+) "
    r"train_time:(?P<ms>\d+)ms step_avg:(?P<average>\S+)ms"
)
FACT = re.compile(  # name:value in a line before the first step
    r"(?:^| )(torch|commit|device|processes|matmul_dtype|train_tokens|train_data|val_data)"
    r":(\S.*?)(?= [\w/]+:|$)",
    re.M,
)
SUMMARY = re.compile(r"^(\w+): (.*)$", re.M)  # a line after the last step
HEADER = re.compile(r"((?:^hyperparameter \w+=.*\n)+)", re.M)

# What makes runs comparable: the rules of all tools.
# Repetitions of an experiment may differ in these settings.
MAY_VARY = {
    "run_id", "log_dir", "resume", "seed", "device_batch_size", "save_every", "keep_checkpoints",
    "comm_timeout",
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
    "schedule": lambda run: f"continued, {run.schedule}" if run.continued else "in one go",
}


@contextlib.contextmanager
def packages():
    """Report a failed import in one sentence and exit with status 1."""
    try:
        yield
    except ModuleNotFoundError as error:
        fix = f"{sys.executable} -m pip install {error.name}"
        sys.exit(f"{Path(sys.argv[0]).name}: {error.name} is not installed: {fix}")


def launch_command(processes):
    """Return the command that starts a Python script in some processes, without the script."""
    if processes == 1:
        return [sys.executable]
    torchrun = ["-m", "torch.distributed.run", "--standalone"]
    return [sys.executable, *torchrun, f"--nproc_per_node={processes}"]


def argument_parser(description):
    """Return a parser that prints the description with its own line breaks."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def command(main):
    """Run a tool's main with sys.argv. Errors that are no bugs print one line; the status is 1.

    Characters that stdout cannot encode are escaped. If its reader has closed it, as head does, the
    tool ends silently.
    """
    if hasattr(sys.stdout, "reconfigure"):  # not if stdout was closed at the start
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            sys.exit(main(sys.argv[1:]))
        finally:
            print(end="", flush=True)
    except (ValueError, OSError, subprocess.SubprocessError) as error:
        sys.stdout = None  # Python must not write the rest at exit
        if isinstance(error, BrokenPipeError):
            sys.exit(128 + signal.SIGPIPE)
        sys.exit(f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        sys.exit(130)


def require(condition, sentence):
    """Raise ValueError with this sentence unless the condition holds."""
    if not condition:
        raise ValueError(sentence)


@dataclass
class Run:
    """One run. Losses are in nats per token. Values missing from the log are None."""

    path: Path
    source: str  # of the script; its sha256 in a shortened log
    settings: dict
    facts: dict  # {name: text} of the header and the summary
    schedule: list  # num_iterations, once, and again for each resume that raised it
    ended: bool  # whether the log contains the result
    edited: bool  # whether the script was edited between two starts of the run
    points: dict = field(default_factory=lambda: {"train": [], "val": []})  # (step, loss, ms)
    last_step: int = 0  # of the last point
    train_seconds: float = None  # at the last point
    ms_per_step: float = None  # mean, as logged

    seed = property(lambda self: self.settings.get("seed"))
    num_iterations = property(lambda self: self.schedule[-1])
    last_val_step = property(lambda self: self.points["val"][-1][0] if self.points["val"] else 0)
    val_loss = property(lambda self: self.points["val"][-1][1] if self.points["val"] else None)
    tokens = property(lambda self: self.last_val_step * self.tokens_per_step)
    finished = property(lambda self: self.fault is None)

    @property
    def fault(self):
        """Why there is no result ("diverged" or "unfinished"), or None if there is one."""
        losses = [points[-1][1] for points in self.points.values() if points]
        if not all(map(math.isfinite, losses)):
            return "diverged"
        complete = self.ended and losses and self.last_val_step == self.num_iterations
        return None if complete else "unfinished"

    @property
    def continued(self):
        """Whether num_iterations was raised in a resume, or the run began in another log."""
        return len(self.schedule) > 1 or any(step > 1 for step, *_ in self.points["train"][:1])

    @property
    def tokens_per_step(self):
        return self.settings["batch_size"] * self.settings["sequence_length"]

    @property
    def label(self):
        """The group of a run: the file's name without seed or round, else the folder's name."""
        return re.sub(r"_?(seed|round)\d+$", "", self.path.stem) or self.path.parent.name

    @property
    def peak_memory(self):
        """MiB, of the last start, or None."""
        found = self.facts.get("peak_memory_mib")
        return None if found is None else int(found)


def without_lost_starts(text):
    """Return a log from the last start at step 0, unless an earlier start has given a result.

    A run that dies before its first checkpoint begins anew, perhaps with another seed or script.
    """
    parts = re.split(r"^(?=Log of train_gpt2\.py, run_id=)", text, flags=re.M)
    for number in reversed(range(len(parts))):
        earlier = "".join(parts[:number])
        first = POINT.search(parts[number])
        if first and int(first["step"]) <= 1 and not re.search("^val_loss: ", earlier, re.M):
            return "".join(parts[number:])
    return text


def starts_in(text):
    """Return [(source, settings, body)] of the starts in a log, without those cut by a kill.

    A start is a title, the script's source, its settings, then facts and points, and at the end a
    summary: the body.
    """
    starts = []
    for part in re.split(r"^Log of train_gpt2\.py, run_id=.*\n", text, flags=re.M):
        source, *pieces = HEADER.split(part)
        for header, body in zip(pieces[::2], pieces[1::2]):
            pairs = re.findall(r"^hyperparameter (\w+)=(.*)$", header, flags=re.M)
            settings = {name: ast.literal_eval(value) for name, value in pairs}
            starts.append((source, settings, body))
    needed = {"seed", "num_iterations", "batch_size", "sequence_length"}
    return [start for start in starts if needed <= start[1].keys()]


def read_starts(path, text):
    """Return the Run of a log, without its points.

    The source, the settings and the facts of the last start count. Raises ValueError if the starts
    differ in the seed, because the log would hold two different runs.
    """
    starts = starts_in(text)
    source, settings, last = starts[-1]
    require(len({settings.get("seed") for _, settings, _ in starts}) == 1, "another seed")
    facts = dict(FACT.findall(last)) | dict(SUMMARY.findall(last))
    return Run(
        path=path,
        source=source[:-1],  # without the log's newline
        settings=settings,
        facts=facts,
        schedule=list(dict.fromkeys(settings["num_iterations"] for _, settings, _ in starts)),
        ended="val_loss" in facts,
        edited=len({source for source, _, _ in starts}) > 1,
    )


def add_point(run, found):
    """Add a match of POINT. If a resumed run repeats steps, its new lines replace the old ones."""
    step, kind, loss = int(found["step"]), found["kind"], float(found["loss"])
    points = run.points[kind]
    if points and points[-1][0] >= step:
        last_train = step if kind == "val" else step - 1
        run.points["train"] = [p for p in run.points["train"] if p[0] <= last_train]
        run.points["val"] = [p for p in run.points["val"] if p[0] < step]
    ms, average = float(found["ms"]), float(found["average"])
    run.last_step, run.train_seconds = step, ms / 1000
    run.points[kind].append((step, loss, ms))
    run.ms_per_step = None if math.isnan(average) else average


def read(path):
    """Return the Run of a log, finished or not. Raises ValueError for a file that is not a log."""
    path = Path(path)
    # opening a pipe would hang
    require(path.is_file(), f"{path} is not a regular file: name the log of a run, logs/RUN.txt")
    text = path.read_text(errors="replace")
    text = text[: text.rfind("\n") + 1]  # a run that is still going may have written half a line
    text = without_lost_starts(text)
    try:
        run = read_starts(path, text)
        for line in text.splitlines():
            if found := POINT.match(line):
                add_point(run, found)
        total = run.tokens_per_step + run.num_iterations + run.seed
        require(isinstance(total, int), "a setting is not an integer")
    except Exception:  # a damaged log can raise almost any type
        raise ValueError(
            f"{path} is not the log of a training run: it must hold the script's source and its "
            f"hyperparameters, and if resumed, the same seed again"
        ) from None
    return run


def logs_in(folder):
    """Return the Runs of all logs in a folder and its subfolders. Other files are skipped.

    Raises ValueError for a damaged log: silently omitting a run would bias the result.
    """
    paths = [path for path in sorted(Path(folder).rglob("*.txt")) if path.is_file()]
    return [read(path) for path in paths if "\nhyperparameter " in path.read_text(errors="replace")]
