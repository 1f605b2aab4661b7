"""Logs of training runs, read back: ours since 2026-11-20, and the public speedrun's of 2024."""

import ast
import contextlib
import hashlib
import inspect
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
RESUMED = re.compile(r"resume=.*: (?:going on|continuing) after step (?P<step>\d+)")
NAMES = {"seed", "run_id", "log_dir"}  # settings that tell repetitions apart
CHECKS = {"checksum_every", "bytes_per_token"}  # settings that only older scripts had, of no effect
# and those that fit a run to its machine: they do not change its result
INCIDENTAL = NAMES | CHECKS
INCIDENTAL |= {"device_batch_size", "save_every", "keep_checkpoints", "resume", "comm_timeout"}
# settings that train_gpt2.py lets a resumed run change, besides num_iterations
RESUMABLE = {"train_files", "val_files", "allow_repeat", "val_loss_every"}
RESUMABLE |= {"target_val_loss", "save_every", "keep_checkpoints", "resume", "log_dir", "run_id"}
RESUMABLE |= {"init"}
RESUMABLE |= {"device", "device_batch_size", "compile", "comm_timeout"}
RENAMED_SETTINGS = {"ngrams": "max_ngram", "key_offset": "key_shift"}  # old name: new name
# what a script does that lacks a setting: these once could be chosen, or can be since
IMPLIED = {"muon_coefficients": "quintic", "attention": "auto", "dtype": "auto"}
IMPLIED |= {"max_ngram": 0, "ngram_rows": 2**18, "key_shift": 0, "logit_softcap": 0.0}
IMPLIED |= {"init": "", "ngram_dropout": 0.0, "shuffle": False}


def flops(parameters, n_layer, n_embd, sequence_length):
    """Return the floating-point operations of a training step for a token: 6N + 12LCT."""
    return 6 * parameters + 12 * n_layer * n_embd * sequence_length  # attention: to all positions


def flops_per_token(gpt, args):
    """Return flops() of a model with these settings; tables that are only looked up cost none."""
    modules = list(gpt.modules())
    tables = {m.weight for m in modules if hasattr(m, "num_embeddings")}
    tables -= {m.weight for m in modules if hasattr(m, "in_features")}  # a tied head's
    if getattr(gpt, "ngrams", None):
        tables.add(gpt.ngrams.weight)
    parameters = sum(p.numel() for p in gpt.parameters() if p not in tables)
    return flops(parameters, args.n_layer, args.n_embd, args.sequence_length)


@contextlib.contextmanager
def packages():
    """Turn a failed import of a tool's package into one sentence and status 1."""
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
    """One run. Losses in nats a token, times in ms; what a log does not hold is None."""

    path: Path
    sources: dict  # {path: text} as logged; the first is the training script
    settings: dict  # the hyperparameters
    facts: dict  # {name: text} of the header and the summary
    planned: tuple = ()  # num_iterations of each start that changed it; None: of another log
    ended: bool = True  # whether the log says the result; public logs never do
    points: dict = field(default_factory=lambda: {"train": [], "val": []})  # (step, loss, ms)
    hashes: dict = field(default_factory=dict)  # {tokens read: data_hash}
    last: int = 0  # steps planned
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
        """Return the last (step, loss, ms) that is logged, of its validation if there is one."""
        ends = [points[-1] for points in (self.points["val"], self.points["train"]) if points]
        return max(ends, key=lambda point: point[0], default=(0, None, None))

    @property
    def fault(self):
        """Return why there is no result: diverged, or unfinished, be it cut or still running."""
        losses = [points[-1][1] for points in self.points.values() if points]
        if not all(map(math.isfinite, losses)):
            return "diverged"
        return None if self.ended and losses and self.steps == self.last else "unfinished"

    @property
    def tokens_per_step(self):
        return self.settings["batch_size"] * self.settings["sequence_length"]

    @property
    def tokens_per_second(self):
        return self.ms_per_step and 1000 * self.tokens_per_step / self.ms_per_step

    @property
    def mfu(self):
        """Return the share of the GPUs' peak, as logged or from the logged speed; or None."""
        if self.number("mfu") is not None:
            return self.number("mfu") / 100
        peak = PEAK_FLOPS.get(self.facts.get("device"))
        parameters, processes = self.number("parameters"), self.number("processes")
        bf16 = self.facts.get("products") == "torch.bfloat16"
        if not (bf16 and peak and parameters and processes and self.tokens_per_second):
            return None
        if self.settings.get("max_ngram", 0) > 1:  # the table is only looked up
            parameters -= self.settings["ngram_rows"] * self.settings["n_embd"]
        shape = (self.settings[name] for name in ("n_layer", "n_embd", "sequence_length"))
        return flops(parameters, *shape) * self.tokens_per_second / (peak * processes)

    @property
    def label(self):
        """The group of runs: the file's name without its seed or round; the folder's for a uuid."""
        name = re.sub(r"_?(seed|round)\d+$", "", self.path.stem)
        return self.path.parent.name if re.fullmatch(r"[0-9a-f-]{36}|", name) else name

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


def constant(node):
    """Return the value of a literal, or of `8*64`, `1+2` or `2**18` of literals; else None."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        pass
    if not isinstance(node, ast.BinOp):
        return None
    left, right = constant(node.left), constant(node.right)
    if isinstance(left, int) and isinstance(right, int):
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Add):
            return left + right
        # A foreign log must not make this compute for minutes.
        if isinstance(node.op, ast.Pow) and abs(left) <= 2**16 and 0 <= right <= 64:
            return left**right
    return None


def defaults(source):
    """Return {name: default} of the class Hyperparameters in a script.

    A field is `name: type = default`, or `name: type = setting(default, ...)` since 2026-11-23.
    """
    classes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef)]
    nodes = [n for c in classes if c.name == "Hyperparameters" for n in c.body]
    values = {}
    for node in nodes:
        if isinstance(node, ast.AnnAssign):
            value = node.value
            if isinstance(value, ast.Call) and ast.unparse(value.func) == "setting":
                value = value.args[0]
            values[node.target.id] = constant(value)
    return values


def read_ours(path, text):
    """Return the Run, without its steps, of a log of train_gpt2.py.

    A header is the source of the script, until 2026-11-21 also of the files that it imports, and
    the settings. A resumed run has one a start. Raises ValueError if they differ in source or in
    settings that define a run, which would be two runs in one log.
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
    but = INCIDENTAL | RESUMABLE | {"num_iterations"}
    for block, later in zip(blocks, settings):
        same = all(later.get(name) == settings[0][name] for name in settings[0].keys() - but)
        if not same or not text[: block.start()].endswith(head):
            raise ValueError("resumed as another run")
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
    return Run(path, sources, settings[-1], facts_of(bodies), tuple(planned), ended)


def facts_of(bodies):
    """Return {name: text} of what follows each header; where starts differ, `one then other`."""
    starts = [header_facts(body) for body in bodies]
    facts = {}
    for name in dict.fromkeys(name for start in starts for name in start):
        values = dict.fromkeys(start[name] for start in starts if name in start)
        facts[name] = " then ".join(values)
    return facts | summary_facts(bodies[-1])


def header_facts(body):
    """Return {name: text} of the lines above the first step."""
    facts, values = {}, 0
    for line in body.splitlines():
        if line.startswith("step:"):
            break
        if line.startswith("device:") and "processes:" in line:
            device, _, line = line.partition("processes:")  # the name of a device has blanks
            facts["device"] = device.removeprefix("device:").strip()
            line = f"processes:{line}"
        if found := re.match(r"train data: \d+ shards, ([\d,]+) tokens", line):
            facts["train_tokens"] = found[1].replace(",", "")
        elif re.match("python:|torch:|commit:|processes:|val data:|train_tokens:", line):
            facts |= named_values(line.replace(",", " "))
        elif found := re.fullmatch(r"\w+(?: lr:\S+)? parameters:(\d+)", line):
            values += int(found[1])
            facts["parameters"] = f"{values}"
    return {name: text for name, text in facts.items() if text}


def named_values(line):
    """Return {name: value} of the words `name:value` of a line; other words are ignored."""
    pairs = (word.partition(":") for word in line.split())
    return {name: value for name, _, value in pairs if value}


def summary_facts(body):
    """Return {name: text} of the lines below the last step: seconds, compilations, speed."""
    facts = {}
    for line in body.splitlines():
        phases = re.fullmatch(r"([a-z]+:[\d.]+s ?)+", line)
        if phases or line.startswith(("tokens/s:", "compile: ")):
            facts |= named_values(line)
    return facts


def read_public(path, text):
    """Return the Run, without its steps, of a log of the public speedrun, 2024."""
    parts = text.split("=" * 100 + "\n")  # the first ruler is missing in some logs
    source, machine = parts[1:3] if not parts[0] else parts[:2]
    facts = {"commit": None}
    if found := re.search(r"pytorch (\S+)", machine):
        facts["torch"] = found[1]
    if gpus := re.findall(r"^\|\s+\d+\s+(NVIDIA(?: \S+)+)\s+(?:On|Off) ", machine, flags=re.M):
        facts |= {"device": gpus[0], "processes": str(len(gpus))}
    return Run(path, {"train_gpt2.py": source}, defaults(source), facts)


def is_ours(text):
    return "\nhyperparameter " in text


def is_public(text):
    return "=" * 100 in text and re.search(r"^step:\d+/\d+ ", text, flags=re.M) is not None


def read(path):
    """Return the Run of a log, be it finished or not. Raises ValueError for a file that is none."""
    path = Path(path)
    # opening a pipe would hang
    require(path.is_file(), f"{path} is not a regular file: name the log of a run, logs/RUN.txt")
    text = path.read_text(errors="replace")
    if is_ours(text):  # a run that is going on may have written half of its last line
        text = text[: text.rfind("\n") + 1]
    try:
        run = (read_ours if is_ours(text) else read_public)(path, text)
        for line in text.splitlines():
            if found := POINT.match(line):
                add_point(run, found)
            elif found := RESUMED.fullmatch(line):
                rewind(run, int(found["step"]))
        if is_ours(text):
            run.last = run.settings["num_iterations"]
        elif not run.points["val"]:
            raise ValueError("no validation")
        require(isinstance(run.tokens_per_step + run.last, int), "not a number of steps")
    # Python's parser raises the last two for expressions that are nested too deeply
    except (ValueError, KeyError, IndexError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise ValueError(
            f"{path} is no log of a training run: it must hold the script's source, its "
            f"hyperparameters and, in a public one, a line `step:N/M val_loss:...`, and if "
            f"resumed, the same source and settings again"
        ) from None
    return run


def rewind(run, step):
    """Drop what was logged after `step`, where the run was resumed: it left that branch."""
    for kind, points in run.points.items():
        run.points[kind] = [point for point in points if point[0] <= step]
    limit = step * run.tokens_per_step
    run.hashes = {tokens: value for tokens, value in run.hashes.items() if tokens <= limit}
    run.ms_per_step = None


def add_point(run, found):
    """Add one step's line. A resumed run repeats steps: the later line counts."""
    step = int(found["step"])
    if step < run.reached:  # of a log without a line on the resume
        rewind(run, step)
    points = run.points[found["kind"]]
    if points and points[-1][0] == step:
        points.pop()
    points.append((step, float(found["loss"]), float(found["ms"])))
    average = float(found["average"])
    run.ms_per_step = None if math.isnan(average) else average
    if found["kind"] == "val":
        run.last = int(found["last"])
        if found["hash"] and step:
            run.hashes[step * run.tokens_per_step] = found["hash"]


def logs_in(folder):
    """Return the Runs whose logs lie in a folder, sorted by name; other text files are no logs.
    Raises ValueError for a damaged log: a run that is left out unseen would bias what is said."""
    runs = []
    for path in sorted(Path(folder).glob("*.txt"), key=natural):
        text = path.read_text(errors="replace") if path.is_file() else ""
        if is_ours(text) or is_public(text):
            runs.append(read(path))
    return runs


def natural(path):
    """Return a sort key by which seed2 comes before seed10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]


def fingerprint(*parts):
    """Return 16 hex digits that any change of the parts changes: texts, files, functions."""
    total = hashlib.sha256()
    for part in parts:
        part = inspect.getsource(part) if callable(part) else part
        total.update(part.read_bytes() if isinstance(part, Path) else str(part).encode())
        total.update(b"\0")
    return total.hexdigest()[:16]
