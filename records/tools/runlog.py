"""Shared by the tools: command lines, and a parser for logs of all versions of train_gpt2.py."""

import argparse
import ast
import contextlib
import math
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# dense bf16 FLOP/s by the device's name; source: the vendor's data sheets
PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}
POINT = re.compile(
    r"step:(?P<step>\d+)/(?P<last>\d+) (?P<kind>train|val)_loss:(?P<loss>\S+) "
    r"train_time:(?P<ms>\d+)ms step_avg:(?P<average>\S+)ms"
    r"(?: data_hash:(?P<hash>\w+))?(?: lr:(?P<lr>\S+))?"
)
FACT = re.compile(  # of the lines before the first step and after the last one
    r"(?:^| )(torch|commit|device|processes|threads|products|train_tokens|val_hash|compile|train|"
    r"peak_memory):(\S.*?)(?= [\w/]+:|$)",
    re.M,
)
NAMES = {"seed", "run_id", "log_dir"}  # settings that tell repetitions apart
CHECKS = {"checksum_every", "bytes_per_token"}  # settings of old scripts, without effect
# Settings in which repetitions of an experiment may differ.
INCIDENTAL = NAMES | {"device_batch_size", "save_every", "keep_checkpoints", "resume"}
INCIDENTAL |= CHECKS | {"comm_timeout"}
# train_gpt2.CHANGEABLE_ON_RESUME, without importing torch
RESUMABLE = {"train_files", "val_files", "allow_repeat", "val_loss_every"}
RESUMABLE |= {"target_val_loss", "save_every", "keep_checkpoints", "resume", "log_dir", "run_id"}
RESUMABLE |= {"init", "device", "device_batch_size", "compile", "comm_timeout"}
RENAMED_SETTINGS = {"ngrams": "max_ngram", "key_offset": "key_shift"}  # old name: new name
# the value that a setting has in scripts that do not know it
IMPLIED = {"muon_coefficients": "quintic", "attention": "auto", "dtype": "auto"}
IMPLIED |= {"max_ngram": 0, "ngram_rows": 2**18, "key_shift": 0, "logit_softcap": 0.0}
IMPLIED |= {"init": "", "ngram_dropout": 0.0, "shuffle": False}


def flops_per_token(gpt, args):
    """Return the floating-point operations of a training step per token: 6N + 12LCT.

    Embedding tables that are only looked up do not count.
    """
    factors = {module.weight for module in gpt.modules() if hasattr(module, "in_features")}
    parameters = sum(p.numel() for p in factors)
    attention = (
        12 * args.n_layer * args.n_embd * args.sequence_length
    )  # not halved for causal masking
    return 6 * parameters + attention


@contextlib.contextmanager
def packages():
    """Turn a failed import into one sentence and status 1."""
    try:
        yield
    except ModuleNotFoundError as error:
        fix = f"{sys.executable} -m pip install -r records/requirements.txt"
        sys.exit(f"{Path(sys.argv[0]).name}: {error.name} is not installed: {fix}")


def argument_parser(description):
    """Return a parser that shows a tool's description as it is written."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=form)


def command(main):
    """Run a tool's main on the command line. A mistake prints one line, with exit status 1."""
    try:
        sys.exit(main(sys.argv[1:]))
    except (ValueError, OSError, subprocess.SubprocessError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def require(condition, sentence):
    if not condition:
        raise ValueError(sentence)


@dataclass
class Run:
    """One run. Losses are in nats per token, times in ms. What a log does not hold is None."""

    path: Path
    sources: dict  # {path: text} as logged; the first is the training script
    arguments: dict  # the hyperparameters, named as its own script does
    settings: dict  # the hyperparameters, named as today
    facts: dict  # {name: text} of the header and the summary
    planned: tuple  # num_iterations of each start that changed it; None: started in another log
    ended: bool  # whether the log holds the result
    last: int  # steps planned
    points: dict = field(default_factory=lambda: {"train": [], "val": []})  # (step, loss, ms)
    hashes: dict = field(default_factory=dict)  # {tokens read: data_hash}
    ms_per_step: float = None  # mean, as logged

    seed = property(lambda self: self.settings.get("seed"))
    finished = property(lambda self: self.fault is None)
    tokens = property(lambda self: self.steps * self.tokens_per_step)
    steps = property(lambda self: self.points["val"][-1][0] if self.points["val"] else 0)
    data_hash = property(lambda self: self.hashes.get(self.tokens))
    val_loss = property(lambda self: self.points["val"][-1][1] if self.points["val"] else None)
    reached = property(lambda self: self.latest[0])  # steps, validated or not
    train_ms = property(lambda self: self.latest[2])

    @property
    def latest(self):
        """Return the last (step, loss, ms), of the validation if there is one at that step."""
        ends = [points[-1] for points in (self.points["val"], self.points["train"]) if points]
        return max(ends, key=lambda point: point[0], default=(0, None, None))

    @property
    def fault(self):
        """Return why there is no result: "diverged" or "unfinished". None if there is one."""
        losses = [points[-1][1] for points in self.points.values() if points]
        if not all(map(math.isfinite, losses)):
            return "diverged"
        return None if self.ended and losses and self.steps == self.last else "unfinished"

    @property
    def tokens_per_step(self):
        return self.settings["batch_size"] * self.settings["sequence_length"]

    @property
    def label(self):
        """The group of a run: the file's name without seed or round, else the folder's name."""
        return re.sub(r"_?(seed|round)\d+$", "", self.path.stem) or self.path.parent.name

    def definition(self, but=INCIDENTAL):
        """Return the settings that define the run: all but these."""
        settings = IMPLIED | self.settings
        return {name: settings[name] for name in settings.keys() - but - CHECKS}

    def number(self, name):
        """Return a fact as a float, without its unit, or None. The last start counts."""
        *_, last = self.facts.get(name, "").split(" then ")
        found = re.match(r"\d+(\.\d+)?", last)
        return float(found[0]) if found else None


def with_new_names(settings):
    """Return settings, a dict, under the names that train_gpt2.py gives them today."""
    return {RENAMED_SETTINGS.get(name, name): value for name, value in settings.items()}


def read_header(path, text):
    """Return the Run of a log without its steps.

    A header is the source of the script, in old logs also of the files that it imports, and the
    settings. A resumed run has one header for each start. Raises ValueError if they differ in
    source or in settings that define a run: that would be two runs in one log.
    """
    # A resumed run logs these lines about checkpoints before its header.
    said = "is not a (whole|complete) checkpoint$|^renamed "
    said += "|was trained with products:|was saved by a run in "
    text = re.sub(rf"\A(?:(?=.*(?:{said})).*\n)+", "", text, flags=re.M)
    blocks = list(re.finditer(r"(?:^hyperparameter \w+=.*\n)+", text, flags=re.M))
    head = text[: blocks[0].start()]  # the sources
    starts = []  # the settings of each
    for block in blocks:
        pairs = re.findall(r"^hyperparameter (\w+)=(.*)$", block[0], flags=re.M)
        starts.append({name: ast.literal_eval(value) for name, value in pairs})
        require(text[: block.start()].endswith(head), "another source")
        for name in starts[0].keys() - RESUMABLE - CHECKS - {"num_iterations"}:
            require(starts[-1].get(name) == starts[0][name], "another setting")
    parts = re.split(r"^source of (\S+):\n", head, flags=re.M)
    texts = [part[:-1] for part in parts[::2]]  # without the end of the log's line
    sources = dict(zip(["train_gpt2.py", *parts[1::2]], texts))
    ends = [block.start() - len(head) for block in blocks[1:]] + [len(text)]
    bodies = [text[block.end() : end] for block, end in zip(blocks, ends)]
    planned = list(dict.fromkeys(start["num_iterations"] for start in starts))
    begin = re.search(r"^step:(\d+)/", bodies[0], flags=re.M)
    if begin and int(begin[1]) > 1:
        planned.insert(0, None)
    ended = re.search(r"^result ", bodies[-1], flags=re.M) is not None
    return Run(
        path, sources, starts[-1], with_new_names(starts[-1]), facts_of(bodies), tuple(planned),
        ended, planned[-1],
    )  # fmt: skip


def facts_of(bodies):
    """Return {name: text} of what follows each header. Where starts differ: "one then other"."""
    values = {}  # {name: its values, each once, in order}
    for body in bodies:
        for name, value in FACT.findall(body):
            values.setdefault(name, {})[value] = None
    return {name: " then ".join(texts) for name, texts in values.items()}


def read(path):
    """Return the Run of a log, finished or not. Raises ValueError for a file that is no log."""
    path = Path(path)
    # opening a pipe would hang
    require(path.is_file(), f"{path} is not a regular file: name the log of a run, logs/RUN.txt")
    text = path.read_text(errors="replace")
    text = text[: text.rfind("\n") + 1]  # a run that is still going may have written half a line
    try:
        run = read_header(path, text)
        for line in text.splitlines():
            if found := POINT.match(line):
                add_point(run, found)
        require(isinstance(run.tokens_per_step + run.last, int), "not a number of steps")
    # Python's parser raises the last two for expressions that are nested too deeply
    except (ValueError, KeyError, IndexError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise ValueError(
            f"{path} is no log of a training run: it must hold the script's source and its "
            f"hyperparameters, and if resumed, the same source and settings again"
        ) from None
    return run


def add_point(run, found):
    """Add one step's line. A resumed run may repeat steps: then the newer lines count."""
    step, kind, loss = int(found["step"]), found["kind"], float(found["loss"])
    points = run.points[kind]
    if points and points[-1][0] >= step:
        last_train = step if kind == "val" else step - 1
        run.points["train"] = [p for p in run.points["train"] if p[0] <= last_train]
        run.points["val"] = [p for p in run.points["val"] if p[0] < step]
        run.hashes = {n: value for n, value in run.hashes.items() if n < step * run.tokens_per_step}
    run.points[kind].append((step, loss, float(found["ms"])))
    average = float(found["average"])
    run.ms_per_step = None if math.isnan(average) else average
    if found["hash"] and step:
        run.hashes[step * run.tokens_per_step] = found["hash"]


def logs_in(folder):
    """Return the Runs whose logs lie in a folder or below, in order. Other files are skipped.

    Raises ValueError for a damaged log: silently omitting a run would bias the result.
    """
    paths = sorted(Path(folder).rglob("*.txt"), key=natural)
    files = [path for path in paths if path.is_file()]
    return [read(path) for path in files if "\nhyperparameter " in path.read_text(errors="replace")]


def natural(path):
    """Return a sort key by which seed2 comes before seed10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]
