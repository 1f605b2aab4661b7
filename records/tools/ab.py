"""Compare commands, settings or edits of train_gpt2.py by interleaved runs on this machine.

    bash run.sh ab "bash run.sh" "bash run.sh --compile=False" --out logs/compile   # arms A and B
    bash run.sh ab "bash run.sh" --python_b NEW/bin/python --out logs/torch
    bash run.sh ab "bash run.sh" --arm "no key shift: --key_shift=0" \\
        --arm "softcap: softcap.diff" --out logs/arms     # arms that are changes of A
    bash run.sh ab --logs logs/arms                       # only the table, from the logs

Each arm runs once per round, with the number of the round as its seed. The order of the arms is
reversed from round to round, so that a drift of the machine's speed cancels out. Close other
programs first.

Called again with the same commands, the tool keeps finished runs and resumes unfinished ones. It
rejects a folder that holds other logs. It deletes nothing but the final weights of its own runs.

Arms are compared by round. Losses: the mean difference from A with its 95% t-interval, and a
two-sided p that is corrected for the number of arms (Holm). Times and memory: the geometric mean of
the ratio to A with its 95% t-interval. The time of a run is the median over its steps. Times and
memory are omitted if a round was interrupted, because its runs were not interleaved.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from compare import check_comparable, check_finished, check_repetitions, differences
from report import escaped, markdown
from runlog import argument_parser, command, packages, read, require

with packages():
    from scipy import stats

STATE = "ab.json"  # beside the logs: the arms, and whether a round was interrupted
OWN_SETTINGS = {"seed", "run_id", "log_dir", "resume"}  # the runs of an arm may differ in these


# ---- The runs -----------------------------------------------------------------------------------
@dataclass
class Arm:
    """One side of the comparison."""

    name: str
    argv: list
    environment: dict  # variables to set
    home: Path  # where the training script runs
    identity: list  # must not change in a continued comparison: command, interpreter, source hash

    def log(self, folder, round_):
        return folder / f"{self.name.replace(' ', '_')}_round{round_}.txt"


def make_arm(name, text, python, diff=None, folder=None):
    """Return the Arm of a command. A diff is applied to a copy of its script, in this folder."""
    argv, environment = shlex.split(text), {"PYTHON": python}
    if argv[:1] == ["bash"] and Path("".join(argv[1:2])).name == "run.sh":
        home = Path(argv[1]).resolve().parent
        script = home / "train_gpt2.py"
    else:
        rule = "must be `bash run.sh ...` or `python train_gpt2.py ...`"
        is_script = argv[:1] == ["python"] and "".join(argv[1:2]).endswith(".py")
        require(is_script, f"{text!r} {rule}")
        home, script = Path.cwd(), Path(argv[1])
        argv[0] = python
    if diff:
        copy = patched(script, diff, folder)
        argv = [str(copy) if Path(word) == script else word for word in argv]
        environment["SCRIPT"], script = str(copy), copy  # run.sh reads SCRIPT
    source = hashlib.sha256(script.read_bytes()).hexdigest()[:16]
    return Arm(name, argv, environment, home, [text, python, source])


def patched(script, diff, folder):
    """Return the path of an edited copy of the script, in a new folder.

    Each hunk is found by its context, so a line `@@` without numbers is enough.
    """
    text = script.read_text()
    _, *hunks = re.split(r"^@@.*\n", diff.read_text(), flags=re.M)
    require(hunks, f"{diff} holds no hunk: each begins with a line `@@`")
    for hunk in hunks:
        lines = hunk.splitlines()
        old = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
        new = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
        places = text.count(old)
        require(places == 1, f"{diff} does not apply: {places} places in {script} fit {hunk!r}")
        text = text.replace(old, new)
    copy = Path(tempfile.mkdtemp(dir=folder), "train_gpt2.py")
    copy.write_text(text)
    return copy


def parse_arm(text):
    """Return (name, settings, diff) of `name: settings` or `name: file.diff`."""
    name, _, change = (part.strip() for part in text.partition(":"))
    is_diff = change.endswith(".diff") and Path(change).is_file()
    settings = shlex.split(change)
    require(
        re.fullmatch(r"[\w .+-]+", name)
        and (is_diff or (settings and all(word.startswith("--") for word in settings))),
        f"arm {text!r} must be `NAME: --setting=value ...` or `NAME: FILE.diff`, an existing file",
    )
    return (name, "", Path(change)) if is_diff else (name, change, None)


def run_all(arms, rounds, folder):
    """Run each arm in each round, unless its run is finished.

    Raises ValueError if a run fails, or if the folder holds logs of other arms.
    """
    names = [arm.name for arm in arms]
    require(len(set(names)) == len(names), f"the arms {names} must have different names")
    folder.mkdir(parents=True, exist_ok=True)
    fix = "pass another --out, because ab.py never continues or changes other runs"
    path, state = folder / STATE, {"arms": {}, "interrupted": False}
    if path.exists():
        state = json.loads(path.read_text())
    else:
        require(not any(folder.glob("*.txt")), f"{folder} holds other logs: {fix}")
    for arm in arms:
        known = state["arms"].setdefault(arm.name, arm.identity)
        require(known == arm.identity, f"{arm.name} in {folder} was started as {known}: {fix}")
    for round_ in range(1, rounds + 1):
        in_turn = arms if round_ % 2 else arms[::-1]
        missing = [arm for arm in in_turn if not is_finished(arm.log(folder, round_))]
        begun = any(arm.log(folder, round_).exists() for arm in arms)
        state["interrupted"] |= begun and len(missing) > 0
        path.write_text(json.dumps(state, indent=1))
        for arm in missing:
            run_once(arm, round_, folder)
        check_comparable([read(arm.log(folder, round_)) for arm in arms])


def is_finished(log):
    with contextlib.suppress(ValueError):  # there is no log, or it does not yet hold the settings
        return read(log).finished
    return False


def run_once(arm, round_, folder):
    """Run one arm to its end and remove its final weights. Raises ValueError if it fails."""
    log = arm.log(folder, round_)
    log_dir = os.path.relpath(folder.resolve(), arm.home)  # keeps absolute paths out of the logs
    argv = [*arm.argv, f"--run_id={log.stem}", f"--log_dir={log_dir}", f"--seed={round_}"]
    if log.exists():
        argv.append("--resume=auto")
    pipes = dict(stdin=subprocess.DEVNULL, capture_output=True, text=True)
    done = subprocess.run(argv, env=os.environ | arm.environment, **pipes)
    *_, last_line = ["it printed nothing", *(done.stdout + done.stderr).strip().splitlines()]
    require(done.returncode == 0, f"{shlex.join(argv)} ended with {done.returncode}: {last_line}")
    run = read(log)
    check_finished(run)
    print(f"{log.stem}: loss {run.val_loss:.4f}", file=sys.stderr, flush=True)
    (log.with_suffix("") / "model.pt").unlink(missing_ok=True)


# ---- The table ----------------------------------------------------------------------------------
def collect(folder):
    """Return {arm: {round: Run}}, A first. Raises ValueError if they are not comparable."""
    arms = {"A": {}}
    for path in sorted(folder.glob("*.txt")):
        if found := re.fullmatch(r"(.+)_round(\d+)", path.stem):
            arms.setdefault(found[1].replace("_", " "), {})[int(found[2])] = read(path)
    rounds = arms["A"].keys()
    rule = (
        "must hold at least two arms and two rounds: A_round1.txt, B_round1.txt, A_round2.txt, ..."
    )
    require(len(rounds) > 1 and len(arms) > 1, f"{folder} {rule}")
    for name, runs in arms.items():
        mismatch = f"{name} has the rounds {sorted(runs)}, not {sorted(rounds)}: run ab.py again"
        require(runs.keys() == rounds, mismatch)
        check_repetitions([*runs.values()], OWN_SETTINGS)
    unknown = check_comparable([run for runs in arms.values() for run in runs.values()])
    require(
        not any("data_hash" in what for what in unknown),
        "no data_hash in common: train all arms on the same data for the same number of steps",
    )
    return arms


def step_ms(run):
    """Return the ms per step of a run: the median over windows of sqrt(N) of its N steps.

    Windows reduce the rounding error, because logged times are whole milliseconds. A run of few
    steps is too short for windows: its logged mean is returned.
    """
    times = [ms for _, _, ms in run.points["train"]]
    size = math.isqrt(len(times))
    return np.median(np.diff(times[::size])) / size if size > 2 else run.ms_per_step


def paired(values):
    """Return (mean, low, high, p) of paired differences: 95% t-interval and two-sided t-test."""
    mean = np.mean(values)
    if not np.ptp(values):
        return mean, mean, mean, math.nan
    test = stats.ttest_1samp(values, 0)
    return mean, *test.confidence_interval(0.95), test.pvalue


def holm(values):
    """Return p-values with Holm's correction, in the order given. NaN stays NaN, but counts."""
    values = np.array(values)
    order = np.argsort(values)  # NaN comes last
    factors = np.arange(len(values), 0, -1)
    corrected = np.empty(len(values))
    corrected[order] = np.minimum(1, np.maximum.accumulate(values[order] * factors))
    return corrected


METRICS = {  # name: (value of a run, format)
    "ms a step": (step_ms, "{:.1f}"),
    "peak memory, MiB": (lambda run: run.peak_memory, "{:.0f}"),
}


def metric_cell(metric, runs, base):
    """Return the median of a metric and, except for the base, its ratio to the base's."""
    value, form = METRICS[metric]
    pairs = [(value(run), value(base[round_])) for round_, run in runs.items()]
    if any(None in pair for pair in pairs):
        return "n/a"
    median = form.format(statistics.median(mine for mine, _ in pairs))
    if runs is base or any(min(pair) <= 0 for pair in pairs):
        return median
    mean, low, high, _ = paired([math.log(mine / other) for mine, other in pairs])
    return f"{median}, {math.exp(mean):.3f} ({math.exp(low):.3f} to {math.exp(high):.3f})"


def table(arms, timed):
    """Return the table of all arms, A first, then by decreasing loss, and their differences."""
    base = arms["A"]
    first = min(base)
    losses = {name: np.array([runs[i].val_loss for i in base]) for name, runs in arms.items()}
    tests = {name: paired(losses[name] - losses["A"]) for name in arms if name != "A"}
    corrected = dict(zip(tests, holm([p for *_, p in tests.values()])))
    rows, lines = [["A", f"{losses['A'].mean():.4f}", "", ""]], []
    for name, (mean, low, high, _) in sorted(tests.items(), key=lambda item: -item[1][0]):
        p = "n/a" if math.isnan(corrected[name]) else f"{corrected[name]:.2g}"
        difference = f"{mean:+.4f} ({low:+.4f} to {high:+.4f})"
        rows.append([name, f"{losses[name].mean():.4f}", difference, p])
        found = differences(arms[name][first], base[first], OWN_SETTINGS)
        lines.append(f"{escaped(name)} differs from A in: {escaped(found)}.")
    metrics = list(METRICS) if timed else []
    for row in rows:
        row += [metric_cell(metric, arms[row[0]], base) for metric in metrics]
    head = ["arm", "val loss", "minus A (95%)", "p, corrected"]
    head += [f"{metric}, ratio (95%)" for metric in metrics]
    run = base[first]
    size = f"{len(base)} rounds of {run.num_iterations} steps of {run.tokens_per_step:,} tokens"
    lines = [f"{size} on {escaped(str(run.facts.get('device')))}.", *lines]
    return "\n".join([markdown(head, rows), "", *lines])


# ---- Command line -------------------------------------------------------------------------------
def parse(argv):
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("commands", nargs="*", metavar="COMMAND", help="A, and B if it has a command of its own")
    forms = "NAME: SETTINGS, or NAME: FILE.diff; may be repeated"
    add("--arm", action="append", default=[], help=forms)
    add("--rounds", type=int, default=6, help="default: 6")
    add("--python_b", help="interpreter of B, which is otherwise that of A")
    folder = parser.add_mutually_exclusive_group(required=True)
    folder.add_argument("--out", type=Path, help="folder for the logs of the runs")
    folder.add_argument("--logs", type=Path, help="only print the table of the logs in this folder")
    options = parser.parse_args(argv)
    if options.out:
        arms = len(options.commands) + len(options.arm) + bool(options.python_b)
        if len(options.commands) not in (1, 2) or arms < 2:
            parser.error("give two commands, or one with --arm or --python_b")
        if options.rounds < 2 or options.rounds % 2:
            parser.error(f"--rounds={options.rounds} must be 2, 4, ..., so that drift cancels out")
    return options


def main(argv):
    options = parse(argv)
    folder = options.out or options.logs
    if options.out:
        first, last = options.commands[0], options.commands[-1]
        arms = [make_arm("A", first, sys.executable)]
        if options.python_b or len(options.commands) == 2:
            arms.append(make_arm("B", last, options.python_b or sys.executable))
        with tempfile.TemporaryDirectory() as copies:
            for name, settings, diff in map(parse_arm, options.arm):
                text = f"{first} {settings}".strip()
                arms.append(make_arm(name, text, sys.executable, diff, copies))
            run_all(arms, options.rounds, folder)
    state = folder / STATE  # missing beside older logs, which were never continued
    timed = not (state.exists() and json.loads(state.read_text())["interrupted"])
    print(table(collect(folder), timed))


if __name__ == "__main__":
    command(main)
