"""Time a training step of train_gpt2.py against other implementations, in alternating turns.

    python tests/bench/bench_step.py                            # against tests/plain.py
    python tests/bench/bench_step.py "plain compiled" MY_COPY.py --n_layer=2

An opponent is `plain`, `plain compiled`, or the path of an edited copy of the current
train_gpt2.py. Each side runs in its own process. In every round both take a few steps, in random
order, so that drifting speed affects both. Other arguments are settings of train_gpt2.py.
--rounds=9 and --steps=3 set the number of rounds, and the number of steps in each.

The tokens are random. A ratio compares the two sides within one round; the table shows its median,
minimum and maximum. The loss is that of the last training step. Run nothing else meanwhile.
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
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("", "records/tools", "tests")]
import plain  # noqa: E402
import torch  # noqa: E402
from runlog import argument_parser  # noqa: E402

import train_gpt2  # noqa: E402

PLAIN = "plain", "plain compiled"
SETTINGS = [
    "--n_layer=4", "--n_head=2", "--n_embd=256", "--vocab_size=50304",
    "--batch_size=16", "--device_batch_size=16", "--sequence_length=256",
]  # fmt: skip


# ---- A side, in its own process -----------------------------------------------------------------
def load_script(path):
    """Import train_gpt2.py or a copy of it and return the module."""
    spec = importlib.util.spec_from_file_location("side", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def plain_step_of(name, run):
    """Return the step of tests/plain.py, with the weights of run and PyTorch's own settings."""
    args, dtype = run.args, run.model.dtype
    if args.model != "gpt2":
        raise ValueError(f"the plain model is gpt2, not {args.model}: pass --model=gpt2")
    model = plain.PlainGPT(args).to(run.device)
    model.load_state_dict(run.model.state_dict())
    if name == "plain compiled":
        model.compile(dynamic=False)
    optimizers = plain.plain_optimizers(model, args, dtype)
    options = dict(dtype=dtype, device_batch_size=run.micro_batch_size)
    return lambda *batch: plain.plain_step(model, optimizers, *batch, **options)


def script_step_of(script, run):
    """Return the step of train_gpt2.py or a copy, configured and compiled as in training."""
    script.configure_backend(run.args, run.device)
    run.optimizers = script.build_optimizers(run.model, run.args)
    if run.args.compile:
        script.compile_model(run)

    def step(*batch):
        report = script.train_step(run, *batch)
        return report["loss"] if isinstance(report, dict) else report[0]  # a tensor in old copies

    return step


@functools.cache  # each process prepares only one side
def prepare(name, args):
    """Return (step, device). step() trains on the same random tokens and returns the loss."""
    script = train_gpt2 if name in PLAIN else load_script(name)
    device = script.join_ranks(args)
    B, T = args.batch_size, args.sequence_length
    torch.manual_seed(args.seed)
    tokens = torch.randint(args.vocab_size, (B * T + 1,)).to(device)
    batch = tokens[:-1].view(B, T), tokens[1:].view(B, T)
    dtype = getattr(torch, script.choose_dtype(args, device))
    run = SimpleNamespace(
        args=args,
        device=device,
        model=script.build_model(args, dtype).to(device),
        micro_batch=min(B, args.device_batch_size),
        stop=script.StopRequest(),
    )
    step = plain_step_of(name, run) if name in PLAIN else script_step_of(script, run)
    return lambda: step(*batch).item(), device


def take_turn(name, args, steps):
    """Take some steps; return (seconds per step, loss, machine, peak MiB)."""
    step, device = prepare(name, args)
    step()  # reclaims caches and memory that the other side has used
    start = time.perf_counter()
    for _ in range(steps):
        loss = step()
    seconds = (time.perf_counter() - start) / steps
    torch.cuda.empty_cache()  # does nothing without a GPU
    machine = f"{device} {train_gpt2.device_name(device)}, {torch.get_num_threads()} threads"
    return seconds, loss, machine, train_gpt2.peak_memory(device)


# ---- The table ----------------------------------------------------------------------------------
def compare(opponent, args, rounds, steps):
    """Measure the script's step and an opponent's in turns, and print a table of the two."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as ours, ProcessPoolExecutor(1, spawn) as theirs:
        sides = (str(ROOT / "train_gpt2.py"), ours, []), (opponent, theirs, [])
        for name, process, _ in sides:
            process.submit(take_turn, name, args, 1).result()  # compiles
        for _ in range(rounds):
            for name, process, turns in random.sample(sides, 2):
                turns.append(process.submit(take_turn, name, args, steps).result())
    script_turns = sides[0][2]
    print(f"\n{script_turns[0][2]}")
    print("step                    ms/step ratio (least..greatest) peak MiB    loss")
    for name, _, turns in sides:
        seconds = [turn[0] for turn in turns]
        ratios = [turn[0] / base[0] for turn, base in zip(turns, script_turns)]
        spread = f"{statistics.median(ratios):5.3f} ({min(ratios):.3f}..{max(ratios):.3f})"
        _, loss, _, memory = turns[-1]
        ms = 1000 * statistics.median(seconds)
        print(f"{Path(name).stem:22s} {ms:8.1f} {spread:23s} {memory:8.0f} {loss:7.4f}", flush=True)


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("opponents", nargs="*", default=["plain"], metavar="OPPONENT")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3)
    options, settings = parser.parse_known_args()
    args = train_gpt2.parse_args([*SETTINGS, *settings])
    print(f"command: python {' '.join(sys.argv)}\n{args}\ntorch {torch.__version__}", flush=True)
    for opponent in options.opponents:
        try:
            compare(opponent, args, options.rounds, options.steps)
        except Exception as error:  # for example, a kernel that this device does not have
            print(f"{opponent} failed: {str(error).splitlines()[0]}", flush=True)


if __name__ == "__main__":
    main()
