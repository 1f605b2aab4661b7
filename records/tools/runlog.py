"""Logs of training runs, read back. They are those of train_gpt2.py, also of its old versions."""

import ast
import contextlib
import math
import re
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
NAMES = {"seed", "run_id", "log_dir"}  # settings that tell repetitions apart
CHECKS = {"checksum_every", "bytes_per_token"}  # settings of old scripts, without effect
# Settings that do not change the result; most of them fit a run to its machine.
INCIDENTAL = NAMES | CHECKS
INCIDENTAL |= {"device_batch_size", "save_every", "keep_checkpoints", "resume", "comm_timeout"}
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
    modules = list(gpt.modules())
    tables = {m.weight for m in modules if hasattr(m, "num_embeddings")}
    tables -= {m.weight for m in modules if hasattr(m, "in_features")}  # tied to the head
    if getattr(gpt, "ngrams", None):
        tables.add(gpt.ngrams.weight)
    parameters = sum(p.numel() for p in gpt.parameters() if p not in tables)
    attention = 12 * args.n_layer * args.n_embd * args.sequence_length  # to all positions
    return 6 * parameters + attention


@contextlib.contextmanager
def packages():
    """Turn a failed import into one sentence and status 1."""
    try:
        yield
    except ModuleNotFoundError as error:
        fix = f"{sys.executable} -m pip install -r records/requirements.txt"
        sys.exit(f"{Path(sys.argv[0]).name}: {error.name} is not installed: {fix}")


def require(condition, sentence):
    if not condition:
        raise ValueError(sentence)


@dataclass
class Run:
    """One run. Losses are in nats per token, times in ms. What a log does not hold is None."""

    path: Path
    sources: dict  # {path: text} as logged; the first is the training script
    settings: dict  # the hyperparameters
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
        """Return a fact as a float, without its unit, or None."""
        found = re.match(r"\d+(\.\d+)?", self.facts.get(name) or "")
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
    # What a resume says of checkpoints comes before its header.
    said = "is not a (whole|complete) checkpoint$|was trained with products:|^renamed "
    text = re.sub(rf"\A(?:(?=.*(?:{said})).*\n)+", "", text, flags=re.M)
    blocks = list(re.finditer(r"(?:^hyperparameter \w+=.*\n)+", text, flags=re.M))
    head = text[: blocks[0].start()]  # the sources
    settings = []
    for block in blocks:
        pairs = re.findall(r"^hyperparameter (\w+)=(.*)$", block[0], flags=re.M)
        settings.append(with_new_names({name: ast.literal_eval(value) for name, value in pairs}))
        require(text[: block.start()].endswith(head), "another source")
        for name in settings[0].keys() - INCIDENTAL - RESUMABLE - {"num_iterations"}:
            require(settings[-1].get(name) == settings[0][name], "another setting")
    parts = re.split(r"^source of (\S+):\n", head, flags=re.M)
    texts = [part[:-1] for part in parts[::2]]  # without the end of the log's line
    sources = dict(zip(["train_gpt2.py", *parts[1::2]], texts))
    ends = [block.start() - len(head) for block in blocks[1:]] + [len(text)]
    bodies = [text[block.end() : end] for block, end in zip(blocks, ends)]
    planned = list(dict.fromkeys(later["num_iterations"] for later in settings))
    begin = re.search(r"^step:(\d+)/", bodies[0], flags=re.M)
    if begin and int(begin[1]) > 1:
        planned.insert(0, None)
    ended = re.search(r"^result ", bodies[-1], flags=re.M) is not None
    return Run(path, sources, settings[-1], facts_of(bodies), tuple(planned), ended, planned[-1])


def facts_of(bodies):
    """Return {name: text} of what follows each header. Where starts differ: "one then other"."""
    facts = {}
    for body in bodies:
        for name, value in header_facts(body).items():
            values = facts.setdefault(name, [])
            if value not in values:
                values.append(value)
    facts = {name: " then ".join(values) for name, values in facts.items()}
    for line in bodies[-1].splitlines():
        if re.match(r"[a-z]+:[\d.]+s|tokens/s:|compile: ", line):  # the summary
            facts |= named_values(line)
    return facts


def header_facts(body):
    """Return {name: text} of the lines above the first step."""
    facts, parameters = {}, 0
    for line in body.partition("\nstep:")[0].splitlines():
        if re.match("python:|torch:|commit:|device:|train_tokens:|val data:", line):
            facts |= named_values(line)
        elif found := re.fullmatch(r"\w+(?: lr:\S+)? parameters:(\d+)", line):
            parameters += int(found[1])
            facts["parameters"] = f"{parameters}"
    return facts


def named_values(line):
    """Return {name: value} of a line of `name:value`. A value may hold spaces, or be missing."""
    parts = re.split(r"(?:^| )([\w/]+):", line)
    return {name: value.strip() for name, value in zip(parts[1::2], parts[2::2]) if value.strip()}


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
    """Add one step's line. A resumed run repeats steps or leaves a branch: later lines count."""
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
    """Return the Runs whose logs lie in a folder or below, in order. Other files are no logs.

    Raises ValueError for a damaged log: a run that is left out unseen would bias what is said.
    """
    paths = sorted(Path(folder).rglob("*.txt"), key=natural)
    return [read(path) for path in paths if path.is_file() and is_log(path)]


def is_log(path):
    return "\nhyperparameter " in path.read_text(errors="replace")


def natural(path):
    """Return a sort key by which seed2 comes before seed10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]
