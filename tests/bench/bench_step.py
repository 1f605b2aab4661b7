"""Time a training step of train_gpt2.py against other implementations, in alternating turns.

    python tests/bench/bench_step.py --preset=24gb                  # against tests/plain.py
    python tests/bench/bench_step.py "plain compiled" MY_COPY.py --n_layer=2
    python tests/bench/bench_step.py --script=records/modern/train_modern.py MY_COPY.py

An opponent is `plain` or `plain compiled`, both of record 7, or the path of another script that
defines a RECIPE, such as an edited copy. Each side runs in its own process. In every round both
take a few steps, in random order, so that drifting speed affects both. Other arguments are settings
of both scripts, whose data must be there. --rounds=9 and --steps=3 set the number of rounds, and of
steps in each.

A ratio compares the two sides within one round; the table shows its median, minimum and maximum.
Run nothing else meanwhile.
"""

import functools
import importlib.util
import multiprocessing
import random
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "records" / "tools")]
import plain  # noqa: E402
from runlog import argument_parser  # noqa: E402

import train_gpt2  # noqa: E402


# ---- Shared with bench_muon.py ------------------------------------------------------------------
def load_script(path):
    """Import a Python file and return the module."""
    spec = importlib.util.spec_from_file_location("side", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def wait_for_device():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(work, times=1):
    """Do some work a number of times; return the mean of its seconds."""
    wait_for_device()
    start = time.perf_counter()
    for _ in range(times):
        work()
    wait_for_device()
    return (time.perf_counter() - start) / times


def print_turns(seconds):
    """Print a row for each of {name: seconds of each turn}, with ratios to the first."""
    base = next(iter(seconds.values()))
    print("median ms    ratio (least..greatest)")
    for name, turns in seconds.items():
        ratios = [turn / other for turn, other in zip(turns, base)]
        spread = f"{statistics.median(ratios):5.3f} ({min(ratios):.3f}..{max(ratios):.3f})"
        print(f"{1000 * statistics.median(turns):9.1f}    {spread}    {name}", flush=True)


# ---- A side, in its own process -----------------------------------------------------------------
@functools.cache  # each process prepares only one side
def prepare(name, settings):
    """Return step(), which trains on the same batch each time."""
    is_plain = name in ("plain", "plain compiled")
    script = train_gpt2 if is_plain else load_script(name)
    core = getattr(script, "train_gpt2", script)  # a copy of train_gpt2.py is its own core
    args = core.parse_args(settings, script.RECIPE)
    run = core.set_up(args, script.RECIPE, core.StopRequest())
    batch = run.train_loader.batch(0)
    if not is_plain:
        if args.compile:
            core.compile_model(run)
        return functools.partial(core.train_step, run, *batch)
    model, dtype = plain.PlainGPT(args).to(run.device), run.model.dtype
    if name == "plain compiled":
        model.compile(dynamic=False)
    optimizers = plain.plain_optimizers(model, args, dtype)
    size = run.micro_batch_size
    return functools.partial(plain.plain_step, model, optimizers, *batch, dtype, size)


def take_turn(name, settings, steps):
    """Take some steps; return seconds per step."""
    step = prepare(name, settings)
    step()  # reclaims caches and memory that the other side has used
    seconds = timed(step, steps)
    torch.cuda.empty_cache()  # does nothing without a GPU
    return seconds


# ---- The table ----------------------------------------------------------------------------------
def compare(script, opponent, settings, rounds, steps):
    """Measure a script's step and an opponent's in turns, and print a table of the two."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as ours, ProcessPoolExecutor(1, spawn) as theirs:
        sides = {script: ours, opponent: theirs}
        seconds = {name: [] for name in sides}
        for name, process in sides.items():
            process.submit(take_turn, name, settings, 1).result()  # compiles
        for _ in range(rounds):
            for name in random.sample(list(sides), 2):
                turn = sides[name].submit(take_turn, name, settings, steps)
                seconds[name].append(turn.result())
    print_turns(seconds)


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("opponents", nargs="*", default=["plain"], metavar="OPPONENT")
    parser.add_argument("--script", default=str(ROOT / "train_gpt2.py"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3)
    options, settings = parser.parse_known_args()
    print(f"python {' '.join(sys.argv)}\ntorch {torch.__version__}", flush=True)
    for opponent in options.opponents:
        try:
            compare(options.script, opponent, tuple(settings), options.rounds, options.steps)
        except Exception as error:  # for example, a kernel that this device does not have
            print(f"{opponent} failed: {error!s:.200}", flush=True)


if __name__ == "__main__":
    main()
