"""Logs of training runs, read back: ours, and the public speedrun's of 2024 (same grammar)."""

import ast
import contextlib
import hashlib
import inspect
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
POINT = re.compile(
    r"step:(?P<step>\d+)/(?P<last>\d+) (?P<kind>train|val)_loss:(?P<loss>\S+) "
    r"train_time:(?P<ms>\d+)ms step_avg:(?P<average>\S+)ms(?: data_hash:(?P<hash>\w+))?"
)
NAMES = {"seed", "run_id", "log_dir"}  # settings that tell repetitions apart
# and those that fit a run to its machine: they do not change its result
INCIDENTAL = NAMES | {"device_batch_size", "save_every", "keep_checkpoints", "resume",
                      "comm_timeout", "checksum_every"}


@dataclass
class Run:
    """One run. Losses in nats a token, times in ms; what a log does not hold is None."""

    path: Path
    sources: dict  # {path: text} as logged; the first is the training script
    settings: dict  # the hyperparameters
    facts: dict  # {name: text} of the header and the summary
    points: dict = field(default_factory=lambda: {"train": [], "val": []})  # (step, loss, ms)
    hashes: dict = field(default_factory=dict)  # {tokens read: data_hash}
    steps: int = 0  # of the last validation
    last: int = 0  # steps planned
    ms_per_step: float = None  # mean, as logged

    seed = property(lambda self: self.settings.get("seed"))
    finished = property(lambda self: self.steps == self.last and bool(self.points["val"]))
    val_loss = property(lambda self: self.points["val"][-1][1])
    train_ms = property(lambda self: self.points["val"][-1][2])
    tokens = property(lambda self: self.steps * self.tokens_per_step)
    data_hash = property(lambda self: self.hashes.get(self.tokens))

    @property
    def tokens_per_step(self):
        return self.settings["batch_size"] * self.settings["sequence_length"]

    @property
    def tokens_per_second(self):
        return self.ms_per_step and 1000 * self.tokens_per_step / self.ms_per_step

    @property
    def label(self):
        """The group of runs: the file's name without its seed or round; the folder's for a uuid."""
        name = re.sub(r"_?(seed|round)\d+$", "", self.path.stem)
        return self.path.parent.name if re.fullmatch(r"[0-9a-f-]{36}|", name) else name

    def definition(self, but=INCIDENTAL):
        """Return the settings that define the run: all but these."""
        return {name: value for name, value in self.settings.items() if name not in but}

    def number(self, name):
        """Return a fact as a float, without its unit, or None."""
        found = re.match(r"[\d.]+", self.facts.get(name) or "")
        return float(found[0]) if found else None


def constant(node):
    """Return the value of a literal or of arithmetic on literals, as in `8*64`; else None."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        pass
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Add)):
        left, right = constant(node.left), constant(node.right)
        if isinstance(left, int) and isinstance(right, int):
            return left * right if isinstance(node.op, ast.Mult) else left + right
    return None


def defaults(source):
    """Return {name: default} of the class Hyperparameters in a script."""
    classes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef)]
    fields = [n for c in classes if c.name == "Hyperparameters" for n in c.body]
    return {n.target.id: constant(n.value) for n in fields if isinstance(n, ast.AnnAssign)}


def our_header(text):
    """Return (sources, settings, facts) of a log of train_gpt2.py.

    A resumed run has a header a start. Raises ValueError if they differ in source or in settings
    that define a run, which would be two runs in one log.
    """
    blocks = list(re.finditer(r"(?:^hyperparameter \w+=.*\n)+", text, flags=re.M))
    head = text[: blocks[0].start()]  # the sources
    settings = [dict(re.findall(r"^hyperparameter (\w+)=(.*)$", block[0], flags=re.M))
                for block in blocks]
    for block, later in zip(blocks, settings):
        same = all(later.get(name) == value for name, value in settings[0].items()
                   if name not in INCIDENTAL | {"num_iterations"})
        if not same or not text[: block.start()].endswith(head):
            raise ValueError("resumed as another run")
    parts = re.split(r"^source of (\S+):\n", head, flags=re.M)
    texts = [part[:-1] for part in parts[::2]]  # without the end of the log's line
    ends = [block.start() - len(head) for block in blocks[1:]] + [len(text)]
    bodies = [text[block.end() : end] for block, end in zip(blocks, ends)]
    return (dict(zip(["train_gpt2.py", *parts[1::2]], texts)),
            {name: ast.literal_eval(value) for name, value in settings[-1].items()},
            our_facts(bodies))


def our_facts(bodies):
    """Return {name: text} of what follows each header; of several devices or versions, all."""
    facts = {}
    for line in bodies[0].splitlines():
        if line.startswith(("python:", "commit:", "device:", "val data:", "setup:", "compile:")):
            facts |= re.findall(r"([a-z_]+):([^\s,]+)", line)
    for name, pattern in (("torch", r"^python:\S+ torch:(\S+)"), ("device", r"^device:(.+) proc")):
        found = re.findall(pattern, "\n".join(bodies), flags=re.M)
        facts[name] = " then ".join(dict.fromkeys(found)) or None
    for speed in re.findall(r"^tokens/s:.*", bodies[-1], flags=re.M):  # of the whole run
        facts |= re.findall(r"(\S+?):(\S+)", speed)
    return facts


def public_header(text):
    """Return (sources, settings, facts) of a log of the public speedrun, 2024."""
    parts = text.split("=" * 100 + "\n")  # the first ruler is missing in some logs
    source, machine = parts[1:3] if not parts[0] else parts[:2]
    facts = {"commit": None}
    if found := re.search(r"pytorch (\S+)", machine):
        facts["torch"] = found[1]
    if gpus := re.findall(r"^\|\s+\d+\s+(NVIDIA \S.*?)\s+(?:On|Off) ", machine, flags=re.M):
        facts |= {"device": gpus[0], "processes": str(len(gpus))}
    return {"train_gpt2.py": source}, defaults(source), facts


def read(path):
    """Return the Run of a log. Raises ValueError for a file that is none."""
    text = Path(path).read_text(errors="replace")
    try:
        header = our_header if "\nhyperparameter " in text else public_header
        sources, settings, facts = header(text)
        run = Run(Path(path), sources, settings, facts)
        for found in map(POINT.match, text.splitlines()):
            if found:
                add_point(run, found)
        run.tokens_per_step, run.val_loss  # noqa: B018  both must be there
    except (ValueError, KeyError, IndexError, SyntaxError, TypeError):
        raise ValueError(f"{path} is no log of a training run: it must hold the script's source, "
                         "its hyperparameters and a line `step:N/M val_loss:...`, and if resumed, "
                         "the same source and settings again") from None
    return run


def add_point(run, found):
    """Add one step's line. A resumed run repeats steps: the later line counts."""
    step, points = int(found["step"]), run.points[found["kind"]]
    while points and points[-1][0] >= step:
        points.pop()
    points.append((step, float(found["loss"]), float(found["ms"])))
    if found["kind"] == "val":
        run.steps, run.last = step, int(found["last"])
        average = float(found["average"])
        run.ms_per_step = None if math.isnan(average) else average
        if found["hash"] and step:
            run.hashes[step * run.tokens_per_step] = found["hash"]


def logs_in(folder):
    """Return the Runs whose logs lie in a folder, sorted by name; other text files are no logs."""
    runs = []
    for path in sorted(Path(folder).glob("*.txt"), key=natural):
        with contextlib.suppress(ValueError):
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
