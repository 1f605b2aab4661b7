"""Compare commands, settings or edits of train_gpt2.py by interleaved runs on this machine.

    bash run.sh ab "python train_gpt2.py --preset=cpu" --arm "eager: --compile=False" \\
        --arm "softcap: softcap.diff" --out logs/arms     # arms that are changes to A
    bash run.sh ab "python train_gpt2.py" "NEW/bin/python train_gpt2.py" --out logs/torch  # A and B
    bash run.sh ab --logs logs/arms                       # only the table, from the logs

A command runs a script in the current folder, directly or by `python -m torch.distributed.run`.
`python` is the interpreter that runs this tool.

Each arm runs once per round, with the number of the round as its seed. The order of the arms is
reversed from round to round, so that a drift in the machine's speed cancels out. Close other
programs first.

Called again with the same commands, the tool keeps finished runs and resumes unfinished ones. It
rejects a folder that holds logs, but no ab.json that names these commands. When a run has finished,
its model.pt is deleted.

Arms are compared by round. Losses: the mean difference from A with its 95% t-interval, and a
two-sided p that is corrected for the number of arms (Holm). Times: the geometric mean of the ratio
to A with its 95% t-interval. Times are omitted if a round was interrupted, because its runs were
not interleaved.
"""

import hashlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import report
from compare import check_comparable, check_finished, check_repetitions, differences
from report import escaped, markdown
from runlog import MAY_VARY_IN_ARM, argument_parser, command, logs_in, packages, read, require

with packages():
    from scipy import stats

STATE = "ab.json"  # beside the logs: the arms, and whether a round was interrupted


# ---- The runs -----------------------------------------------------------------------------------
@dataclass
class Arm:
    """One side of the comparison."""

    name: str
    argv: list
    identity: list  # must not change in a continued comparison: command, interpreter, source hash

    def log(self, folder, round_):
        return folder / f"{self.name.replace(' ', '_')}_round{round_}.txt"


def make_arm(name, text, diff=None, folder=None):
    """Return the Arm of a command. A diff is applied to a copy of the script in the folder."""
    argv = [sys.executable if word == "python" else word for word in shlex.split(text)]
    scripts = [i for i, word in enumerate(argv) if word.endswith(".py")]
    require(scripts, f"{text!r} names no script: give `python train_gpt2.py ...`")
    if diff:
        argv[scripts[0]] = str(patched(Path(argv[scripts[0]]), diff, folder))
    source = hashlib.sha256(Path(argv[scripts[0]]).read_bytes()).hexdigest()[:16]
    return Arm(name, argv, [text, sys.executable, source])


def patched(script, diff, folder):
    """Return the path of an edited copy of the script, in a new folder.

    Each hunk is found by its context, so a line `@@` without numbers is enough.
    """
    text = script.read_text()
    _, *hunks = re.split(r"^@@.*\n", diff.read_text(errors="replace"), flags=re.M)
    require(hunks, f"{diff} holds no hunk: each begins with a line `@@`")
    for hunk in hunks:
        lines = hunk.splitlines()
        old = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
        new = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
        places = text.count(old)
        require(places == 1, f"{diff} does not apply: {places} places in {script} match {hunk!r}")
        text = text.replace(old, new)
    copy = Path(tempfile.mkdtemp(dir=folder), "train_gpt2.py")
    copy.write_text(text)
    return copy


def changed_arm(text, base, folder):
    """Return the Arm of `name: settings` or `name: file.diff`, a change to the base command."""
    name, _, change = (part.strip() for part in text.partition(":"))
    diff = Path(change) if change.endswith(".diff") and Path(change).is_file() else None
    require(
        re.fullmatch(r"[\w .+-]+", name) and (diff or change.startswith("--")),
        f"arm {text!r} must be `NAME: --setting=value ...` or `NAME: FILE.diff`, an existing file",
    )
    name = name.replace("_", " ")  # a space and _ are both written as _ in the names of logs
    return make_arm(name, base if diff else f"{base} {change}", diff, folder)


def run_all(arms, rounds, folder):
    """Run each arm in each round, unless its run is finished.

    Raises ValueError if a run fails, or if the folder holds other logs.
    """
    names = [arm.name for arm in arms]
    require(len(set(names)) == len(names), f"the arms {names} must have different names")
    folder.mkdir(parents=True, exist_ok=True)
    fix = "pass another --out, because ab.py never continues or changes other runs"
    path, state = folder / STATE, {"arms": {}, "interrupted": False}
    runs = logs_in(folder)
    if path.exists():
        state = read_state(path)
    else:
        require(not runs, f"{folder} holds logs of other runs: {fix}")
    for arm in arms:
        known = state["arms"].setdefault(arm.name, arm.identity)
        require(known == arm.identity, f"{arm.name} in {folder} was started as {known}: {fix}")
    finished = {run.path for run in runs if run.finished}
    for round_ in range(1, rounds + 1):
        in_turn = arms if round_ % 2 else arms[::-1]
        missing = [arm for arm in in_turn if arm.log(folder, round_) not in finished]
        begun = any(arm.log(folder, round_).exists() for arm in arms)
        state["interrupted"] |= begun and len(missing) > 0
        path.write_text(json.dumps(state, indent=1))
        for arm in missing:
            run_once(arm, round_, folder)
        check_comparable([read(arm.log(folder, round_)) for arm in arms])


def read_state(path):
    """Return the content of ab.json. Raises ValueError if it is damaged."""
    try:
        state = json.loads(path.read_text())
        return {"arms": dict(state["arms"]), "interrupted": bool(state["interrupted"])}
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is damaged: give another folder") from None


def run_once(arm, round_, folder):
    """Run one arm to its end and remove its final weights. Raises ValueError if it fails."""
    log = arm.log(folder, round_)
    log_dir = os.path.relpath(folder)  # keeps absolute paths out of the logs
    argv = [*arm.argv, f"--run_id={log.stem}", f"--log_dir={log_dir}", f"--seed={round_}"]
    if log.exists():
        argv.append("--resume=auto")
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    *_, last_line = ["it printed nothing", *(done.stdout + done.stderr).strip().splitlines()]
    require(done.returncode == 0, f"{shlex.join(argv)} ended with {done.returncode}: {last_line}")
    run = read(log)
    check_finished(run)
    print(f"{log.stem}: loss {run.val_loss:.4f}", file=sys.stderr, flush=True)
    (log.with_suffix("") / "model.pt").unlink(missing_ok=True)


# ---- The table ----------------------------------------------------------------------------------
def collect(folder):
    """Return {arm: its runs by round}, A first. Raises ValueError if they are not comparable."""
    groups = report.collect([str(folder)])
    base = groups.get("A", [])
    rule = "must hold at least two arms and two rounds: A_round1.txt, B_round1.txt, A_round2.txt"
    require(len(base) > 1 and len(groups) > 1, f"{folder} {rule}, ...")
    rounds = [run.seed for run in base]
    for name, runs in groups.items():
        check_repetitions(runs, MAY_VARY_IN_ARM)
        own = [run.seed for run in runs]
        require(own == rounds, f"{name} has the rounds {own}, not {rounds}: run ab.py again")
    check_comparable([run for runs in groups.values() for run in runs])
    return {name.replace("_", " "): runs for name, runs in [("A", base), *groups.items()]}


def paired(values):
    """Return (mean, low, high, p) of paired differences: 95% t-interval and two-sided t-test."""
    mean = np.mean(values)
    if not np.ptp(values):
        return mean, mean, mean, math.nan
    test = stats.ttest_1samp(values, 0)
    return mean, *test.confidence_interval(0.95), test.pvalue


def holm(values):
    """Return Holm-corrected p-values, in the order given. NaN stays NaN, but counts as a test."""
    values = np.array(values)
    order = np.argsort(values)  # NaN comes last
    factors = np.arange(len(values), 0, -1)
    corrected = np.empty(len(values))
    corrected[order] = np.minimum(1, np.maximum.accumulate(values[order] * factors))
    return corrected


def time_cell(runs, base):
    """Return the median time per step in ms and, except for the base, its ratio to the base's."""
    times = [[run.ms_per_step for run in side] for side in (runs, base)]
    if not all(map(all, times)):  # unknown, or 0
        return "n/a"
    median = f"{np.median(times[0]):.1f}"
    if runs is base:
        return median
    mean, low, high, _ = np.exp(paired(np.log(np.divide(*times))))
    return f"{median}, {mean:.3f} ({low:.3f} to {high:.3f})"


def table(arms, timed):
    """Return the table of all arms (A, then by decreasing loss) and how they differ from A."""
    base = arms["A"]
    losses = {name: np.array([run.val_loss for run in runs]) for name, runs in arms.items()}
    tests = {name: paired(losses[name] - losses["A"]) for name in arms if name != "A"}
    corrected = dict(zip(tests, holm([p for *_, p in tests.values()])))
    rows, lines = [["A", f"{losses['A'].mean():.4f}", "", ""]], []
    for name, (mean, low, high, _) in sorted(tests.items(), key=lambda item: -item[1][0]):
        p = "n/a" if np.isnan(corrected[name]) else f"{corrected[name]:.2g}"
        difference = f"{mean:+.4f} ({low:+.4f} to {high:+.4f})"
        rows.append([name, f"{losses[name].mean():.4f}", difference, p])
        found = differences(arms[name][0], base[0], MAY_VARY_IN_ARM)
        lines.append(f"{escaped(name)} differs from A in: {escaped(found)}.")
    head = ["arm", "val loss", "minus A (95%)", "p, corrected"]
    if timed:
        head.append("ms a step, ratio (95%)")
        rows = [[*row, time_cell(arms[row[0]], base)] for row in rows]
    run = base[0]
    size = f"{len(base)} rounds of {run.num_iterations} steps of {run.tokens_per_step:,} tokens"
    lines = [f"{size} on {escaped(str(run.facts.get('device')))}.", *lines]
    return "\n".join([markdown(head, rows), "", *lines])


# ---- Command line -------------------------------------------------------------------------------
def parse(argv):
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("commands", nargs="*", metavar="COMMAND", help="arms A, B, ..., in this order")
    forms = "a change to A, as NAME: SETTINGS or NAME: FILE.diff; may be repeated"
    add("--arm", action="append", default=[], help=forms)
    add("--rounds", type=int, default=6, help="default: 6")
    folder = parser.add_mutually_exclusive_group(required=True)
    folder.add_argument("--out", type=Path, help="folder for the logs of the runs")
    folder.add_argument("--logs", type=Path, help="only print the table of the logs in this folder")
    options = parser.parse_args(argv)
    if options.out:
        if not options.commands or len(options.commands + options.arm) < 2:
            parser.error("give two commands, or one with --arm")
        if options.rounds < 2 or options.rounds % 2:
            parser.error(f"--rounds={options.rounds} must be 2, 4, ..., so that drift cancels out")
    return options


def main(argv):
    options = parse(argv)
    folder = options.out or options.logs
    if options.out:
        arms = [make_arm(chr(ord("A") + i), text) for i, text in enumerate(options.commands)]
        with tempfile.TemporaryDirectory() as copies:
            arms += [changed_arm(text, options.commands[0], copies) for text in options.arm]
            run_all(arms, options.rounds, folder)
    state = folder / STATE  # missing in older folders, which were never continued
    timed = not (state.exists() and read_state(state)["interrupted"])
    print(table(collect(folder), timed))


if __name__ == "__main__":
    command(main)
