"""Time two commands in turn on this machine, A B B A ..., and compare their logs.

    python records/ab.py "python train_gpt2.py --num_iterations=60" \\
        "python train_gpt2.py --num_iterations=60 --compile=False" --rounds 6 --out logs/ab
    python records/ab.py "bash run.sh --num_iterations=60" --python_a OLD/bin/python \\
        --python_b NEW/bin/python --rounds 6 --out logs/ab      # one command, two environments
    python records/ab.py --logs records/2026-11-21_Compile      # the table again, from the logs

Each command starts train_gpt2.py once and gets --run_id, --log_dir and --seed (the round's number)
added; `python` at its start, and PYTHON for run.sh, are the side's interpreter. --cold gives every
run empty compiler caches, so that compile seconds are those of a first start. A run's time is a
median over its steps; a ratio is the geometric mean over rounds of B / A with its 95% t-interval;
losses, of equal seeds, are subtracted.
Refused: sides that read other data; between two torch versions also other scripts or settings.
Close other programs first. A GPU's busy % is sampled each second by nvidia-smi while a run lasts.
"""

import argparse
import contextlib
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parent))
from compare import differences, require, unlike
from report import command, dots, markdown, percent, save
from runlog import NAMES, ROOT, logs_in, read

BUSY = "busy.json"  # {run: mean GPU utilization in %}, beside the logs


def step_ms(run):
    """Return a run's ms a step: the median over windows of sqrt(N) of its N steps.

    Windows, since logged times are whole milliseconds. Of few steps the mean, as logged.
    """
    times = [ms for _, _, ms in run.points["train"]]
    size = math.isqrt(len(times))
    return np.median(np.diff(times[::size])) / size if size > 2 else run.ms_per_step


def busy(run):
    path = run.path.parent / BUSY
    return json.loads(path.read_text()).get(run.path.stem) if path.exists() else None


METRICS = {  # name: (value of a run, its format, compared as a ratio)
    "iteration, ms": (step_ms, "{:.1f}", True),
    "tokens/s": (lambda run: 1000 * run.tokens_per_step / step_ms(run), "{:,.0f}", True),
    "peak memory, MiB": (lambda run: run.number("peak_memory"), "{:.0f}", True),
    "compile, s": (lambda run: run.number("compile"), "{:.1f}", True),
    "validation loss": (lambda run: run.val_loss, "{:.4f}", False),
    "MFU": (percent, "{:.1%}", True),
    "GPU busy (NVML), %": (busy, "{:.0f}", True),
}


def side_command(text, python, name, folder, seed):
    """Return (argv, environment) of one run; name and folder of its log and its seed are added."""
    argv = shlex.split(text)
    require(argv[:1] in (["python"], ["torchrun"]) or argv[:2] == ["bash", "run.sh"],
            f"{text!r} must start with python, torchrun or bash run.sh")
    if argv[0] == "torchrun":
        argv[:1] = ["python", "-m", "torch.distributed.run"]
    if argv[0] != "bash":
        argv[0] = python
    own = [f"--run_id={name}", f"--log_dir={folder}", f"--seed={seed}"]
    return [*argv, *own], os.environ | {"PYTHON": python}


def torch_of(python):
    """Return the version of torch that an interpreter imports."""
    done = subprocess.run([python, "-c", "import torch; print(torch.__version__)"],
                          capture_output=True, text=True)
    require(done.returncode == 0, f"{python} cannot import torch: {done.stderr.strip()[-200:]}")
    return done.stdout.split()[-1]


def sampled(process, interval=1.0):
    """Wait for a process; return the mean of nvidia-smi's GPU utilization until then, or None."""
    samples, query = [], "nvidia-smi --query-gpu=utilization.gpu --format=csv,noheader,nounits"
    while True:
        if shutil.which("nvidia-smi"):
            values = subprocess.getoutput(query).split()
            samples += [float(value) for value in values if value.isdigit()]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(interval)
            return statistics.mean(samples) if samples else None


def run_once(argv, environment, log, cold):
    """Run a command to its end; return its GPU's busy %. Raises ValueError if it fails."""
    output = log.with_suffix(".out")
    with tempfile.TemporaryDirectory() as cache, open(output, "w") as file:
        if cold:  # torch 2.13 keeps compiled headers in TMPDIR, outside its cache's folder
            names = "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
            environment = environment | dict.fromkeys(names, cache)
        process = subprocess.Popen(argv, stdout=file, stderr=subprocess.STDOUT, env=environment)
        utilization = sampled(process)
    said = output.read_text().strip().splitlines()
    require(process.returncode == 0, f"{shlex.join(argv)} ended with {process.returncode}: "
                                     f"{said[-1] if said else 'it printed nothing'}")
    output.unlink()
    return utilization


def interleave(options, folder):
    """Run both sides in turn, each round in the other order than the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    require(not logs_in(folder), f"{folder} holds logs already: pass another --out")
    pythons = {"A": options.python_a, "B": options.python_b}
    versions, used = {side: torch_of(python) for side, python in pythons.items()}, {}
    for round_ in range(1, options.rounds + 1):
        for side in "AB" if round_ % 2 else "BA":
            name, text = f"{side}_round{round_}", options.commands[0 if side == "A" else -1]
            argv, environment = side_command(text, pythons[side], name, folder, round_)
            used[name] = run_once(argv, environment, folder / f"{name}.txt", options.cold)
            run = read(folder / f"{name}.txt")
            require(run.facts["torch"] == versions[side], f"{side} ran torch {run.facts['torch']}, "
                    f"but {pythons[side]} has {versions[side]}: install the requirements there")
            print(f"{name}: {step_ms(run):.1f} ms a step", file=sys.stderr, flush=True)
        if round_ == 1:
            check(paired(folder, least=1))
    if any(value is not None for value in used.values()):
        (folder / BUSY).write_text(json.dumps(used, indent=1))


def check(rounds):
    """Raise ValueError for rounds, [(run of A, run of B)], that cannot be compared."""
    unknown = unlike([run for pair in rounds for run in pair])
    require(not any("data_hash" in what for what in unknown),
            "the sides logged no data_hash after as many tokens: give both as many steps")
    for a, b in rounds:
        for run, first in zip((a, b), rounds[0]):
            require(differences(run, first, NAMES) == "nothing",
                    f"{run.path} differs from {first.path} in: {differences(run, first, NAMES)}")
        require(a.facts.get("torch") == b.facts.get("torch") or
                (a.sources == b.sources and a.definition(NAMES) == b.definition(NAMES)),
                f"two versions of torch are compared by one script with one set of settings, but "
                f"these differ: {differences(a, b, NAMES)}")


def paired(folder, least=2):
    """Return the rounds of a folder, [(run of A, run of B)]."""
    runs = {run.path.stem: run for run in logs_in(folder)}
    rounds = [(run, runs.get(name.replace("A_", "B_", 1))) for name, run in runs.items()
              if name.startswith("A_round")]
    whole = all(b and a.finished and b.finished for a, b in rounds)
    require(whole and len(rounds) >= least, f"{folder} must hold whole logs A_round1.txt, "
            f"B_round1.txt, A_round2.txt ... of at least {least} rounds: run ab.py with --out")
    return rounds


def interval(a, b, ratio):
    """Return (middle, low, high) of B / A (geometric) or B - A over rounds, 95% by Student's t."""
    values = np.log(b) - np.log(a) if ratio else np.subtract(b, a)
    middle, n = values.mean(), len(values)
    half = stats.t.isf(0.025, n - 1) * values.std(ddof=1) / np.sqrt(n)
    found = np.array([middle, middle - half, middle + half])
    return np.exp(found) if ratio else found


def row(name, rounds):
    """Return one metric's cells: medians of A and B with ranges, and B against A."""
    value, form, ratio = METRICS[name]
    a, b = ([value(pair[i]) for pair in rounds] for i in (0, 1))

    def side(x):
        return (f"{form.format(statistics.median(x))} ({form.format(min(x))} to "
                f"{form.format(max(x))})" if None not in x else "n/a")

    if None in a + b or (ratio and min(a + b) <= 0):
        return [name, side(a), side(b), "n/a"]
    if not ratio and len({run.seed for pair in rounds for run in pair}) == 1:
        return [name, side(a), side(b), f"{statistics.mean(b) - statistics.mean(a):+.4f}, one seed"]
    against = "{:.3f} ({:.3f} to {:.3f})" if ratio else "{:+.4f} ({:+.4f} to {:+.4f})"
    return [name, side(a), side(b), against.format(*interval(a, b, ratio))]


def versions(run):
    names = "torch", "python", "numpy", "products", "threads"
    return ", ".join(f"{name} {run.facts[name]}" for name in names if name in run.facts)


def table(rounds):
    """Return the text on a folder's rounds."""
    a, b = rounds[0]
    return "\n".join([
        f"A: {versions(a)}. B: {versions(b)}. {a.facts.get('device')}, {a.steps} steps of "
        f"{a.tokens_per_step:,} tokens, {len(rounds)} rounds in turn. B differs in: "
        f"{differences(a, b, NAMES)}.",
        "",
        markdown(["median (range)", "A", "B", "B / A, loss B - A (95%)"],
                 [row(name, rounds) for name in METRICS]),
    ])  # fmt: skip


def draw(rounds, path, names):
    """Draw time, memory, compilation and loss of both sides, a dot a round."""
    from matplotlib.figure import Figure

    wanted = "iteration, ms", "peak memory, MiB", "compile, s", "validation loss"
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    for axes, metric in zip(figure.subplots(1, len(wanted)), wanted):
        sides = [[METRICS[metric][0](pair[i]) for pair in rounds] for i in (0, 1)]
        require(None not in sides[0] + sides[1], f"a log lacks its {metric}: nothing to draw")
        dots(axes, dict(zip(names, sides)), metric)
    save(figure, path, draw, dots, *names, *(run.path for pair in rounds for run in pair))


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help="A and B, or one for both")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--python_a", default=sys.executable, help="A's interpreter")
    parser.add_argument("--python_b", default=sys.executable, help="B's interpreter")
    parser.add_argument("--cold", action="store_true", help="compile anew in every run")
    parser.add_argument("--out", type=Path, help="a new folder for the logs")
    parser.add_argument("--logs", type=Path, help="a folder of such logs: only print the table")
    parser.add_argument("--names", nargs=2, default=["A", "B"], help="of the sides, in the picture")
    parser.add_argument("--picture", help="a .png to draw")
    options = parser.parse_args(argv)
    if options.logs is None and not (options.commands and len(options.commands) <= 2):
        parser.error("give two commands, or one with --python_a and --python_b, or --logs")
    if options.logs is None and options.out is None:
        parser.error("give --out, a folder for the logs")
    if options.rounds < 2 or options.rounds % 2:
        parser.error(f"--rounds={options.rounds} must be 2, 4, ..., so that drift cancels out")
    return options


def main(argv):
    options = parse(argv)
    if options.logs is None:
        interleave(options, options.out)
    folder = options.logs or options.out
    rounds = paired(folder if folder.is_absolute() or folder.exists() else ROOT / folder)
    check(rounds)
    print(table(rounds))
    if options.picture:
        draw(rounds, options.picture, options.names)
    return 0


if __name__ == "__main__":
    command(main)
