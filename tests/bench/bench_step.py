"""Time a training step of train_gpt2.py against other implementations of it, in turns.

    python tests/bench/bench_step.py                            # against tests/plain.py
    python tests/bench/bench_step.py "plain compiled" MY_COPY.py --n_layer=2

An opponent is `plain`, `plain compiled`, or the path of an edited copy of train_gpt2.py. Each side
runs in its own process. In every round both take a few steps, in random order, so that a drifting
machine slows both. Other arguments are settings of train_gpt2.py. --rounds=9 and --steps=3 set the
number of rounds, and the number of steps in each.

The tokens are random. A ratio compares the two sides within one round; the table shows its median,
minimum and maximum. The loss is that of the last training step. Run nothing else meanwhile.
"""

import argparse
import importlib.util
import multiprocessing
import platform
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
import torch._dynamo  # noqa: E402
from runlog import PEAK_FLOPS, flops_per_token  # noqa: E402

import train_gpt2  # noqa: E402

SCRIPT = ROOT / "train_gpt2.py"
PLAIN = "plain", "plain compiled"
SETTINGS = [
    "--n_layer=4", "--n_head=2", "--n_embd=256", "--vocab_size=50304",
    "--batch_size=16", "--device_batch_size=16", "--sequence_length=256",
]  # fmt: skip


# ---- A side, in its own process -----------------------------------------------------------------
def tokens_of(args, device):
    """Return the inputs and targets of a step, the same random ones every time."""
    B, T = args.batch_size, args.sequence_length
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(args.vocab_size, (B * T + 1,), generator=generator).to(device)
    return tokens[:-1].view(B, T), tokens[1:].view(B, T)


def load_script(path):
    """Import a copy of train_gpt2.py and return the module."""
    spec = importlib.util.spec_from_file_location("opponent", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def prepare_plain(gpt, args, is_compiled):
    """Return (warm_up, step) of tests/plain.py, with the weights of gpt."""
    if args.max_ngram or args.key_shift or args.logit_softcap:
        raise ValueError("the plain model has no n-grams, key shift or soft-cap: set them to 0")
    model = plain.PlainGPT(args).to(gpt.lm_head.weight.device)
    model.load_state_dict(gpt.state_dict())
    optimizers = plain.plain_optimizers(model, args, gpt.dtype)
    size = args.device_batch_size

    def warm_up(inputs, targets):
        if is_compiled:
            model.compile(dynamic=False)

    def step(inputs, targets):
        return plain.plain_step(model, optimizers, inputs, targets, gpt.dtype, size)

    return warm_up, step


def prepare_script(script, gpt, args):
    """Return (warm_up, step) of train_gpt2.py or of a copy, with PyTorch configured as there."""
    script.configure_backend(args, gpt.lm_head.weight.device)
    optimizers = script.build_optimizers(gpt, args, 0, 1)

    def warm_up(inputs, targets):
        size = script.micro_batch_size(len(inputs), args.device_batch_size)
        batch = inputs[:size], targets[:size]
        script.warm_up(gpt, args, SimpleNamespace(next_batch=lambda: batch))

    def step(inputs, targets):
        loss, _ = script.train_step(gpt, optimizers, inputs, targets, 1.0, args)
        return loss

    return warm_up, step


class Side:
    """An implementation of the training step, ready to be timed in this process."""

    current = None  # the only one of a process; the functions below use it

    def __init__(self, name, args):
        script = load_script(name) if name.endswith(".py") else train_gpt2
        _, _, self.device = script.join_processes(args)
        torch.manual_seed(args.seed)
        gpt = script.GPT(args, script.product_dtype(args, self.device)).to(self.device)
        if name in PLAIN:
            warm_up, self.step = prepare_plain(gpt, args, name == "plain compiled")
        else:
            warm_up, self.step = prepare_script(script, gpt, args)
        self.batch = tokens_of(args, self.device)
        start = time.perf_counter()
        warm_up(*self.batch)
        self.step(*self.batch).item()
        self.start_seconds = time.perf_counter() - start
        self.flops = flops_per_token(gpt, args)
        torch.cuda.empty_cache()  # does nothing without a GPU


def start(name, args):
    Side.current = Side(name, args)


def seconds_per_step(steps):
    side = Side.current
    if side.device.type == "cuda":
        side.step(*side.batch).item()  # takes back the memory that the other side used
    start = time.perf_counter()
    for _ in range(steps):
        side.loss = side.step(*side.batch).item()
    seconds = (time.perf_counter() - start) / steps
    torch.cuda.empty_cache()
    return seconds


def figures():
    side = Side.current
    device_name = train_gpt2.device_name(side.device)
    on_gpu = side.device.type == "cuda"
    return dict(
        machine=f"{side.device} {device_name}, {torch.get_num_threads()} threads",
        start=side.start_seconds,
        flops=side.flops,
        peak_flops=PEAK_FLOPS.get(device_name),
        memory=train_gpt2.peak_memory(side.device),
        reserved=torch.cuda.max_memory_reserved() / 2**20 if on_gpu else 0,
        graphs=torch._dynamo.utils.counters["stats"]["unique_graphs"],
        loss=side.loss,
    )


# ---- The table ----------------------------------------------------------------------------------
def compare(opponent, args, rounds, steps):
    """Measure the script's step and an opponent's in turns, and print a table of the two."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as ours, ProcessPoolExecutor(1, spawn) as theirs:
        sides = []
        for name, process in (str(SCRIPT), ours), (opponent, theirs):
            process.submit(start, name, args).result()
            sides.append(SimpleNamespace(name=Path(name).stem, process=process, seconds=[]))
        for _ in range(rounds):
            for side in random.sample(sides, 2):
                side.seconds.append(side.process.submit(seconds_per_step, steps).result())
        for side in sides:
            side.figures = side.process.submit(figures).result()
    print_table(sides, args.batch_size * args.sequence_length)


def print_table(sides, tokens):
    """Print a row of figures for each side, and the seconds of its steps in each round."""
    script = sides[0]
    print(f"\n{script.figures['machine']}")
    columns = "step                    ms/step ratio (least..greatest)   MFU   peak MiB (ratio)"
    print(f"{columns} reserved  start s graphs    loss")
    for side in sides:
        ms = 1000 * statistics.median(side.seconds)
        ratios = [b / a for a, b in zip(script.seconds, side.seconds)]
        spread = f"{statistics.median(ratios):5.3f} ({min(ratios):.3f}..{max(ratios):.3f})"
        mfu = "n/a"
        if side.figures["peak_flops"]:
            mfu = f"{side.figures['flops'] * tokens / ms * 1000 / side.figures['peak_flops']:.1%}"
        memory, reserved = side.figures["memory"], side.figures["reserved"]
        memory_cell = f"{memory:.0f} ({memory / script.figures['memory']:.2f})"
        print(
            f"{side.name:22s} {ms:8.1f} {spread:22s} {mfu:>6s} {memory_cell:>14s} {reserved:8.0f} "
            f"{side.figures['start']:8.1f} {side.figures['graphs']:6d} {side.figures['loss']:7.4f}"
        )
    for side in sides:
        print(f"tokens/s {side.name}: {tokens / statistics.median(side.seconds):.0f}")
        print(f"seconds {side.name}: {' '.join(f'{s:.4f}' for s in side.seconds)}", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("opponents", nargs="*", default=["plain"], metavar="OPPONENT")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3)
    options, settings = parser.parse_known_args()
    args = train_gpt2.parse_args([*SETTINGS, *settings])
    print(f"command: python {' '.join(sys.argv)}\n{args}", flush=True)
    print(f"torch {torch.__version__}, {platform.platform()}")
    for opponent in options.opponents:
        if opponent not in PLAIN and not Path(opponent).is_file():
            parser.error(f"{opponent} is neither a script nor one of {', '.join(PLAIN)}")
    for opponent in options.opponents:
        try:
            compare(opponent, args, options.rounds, options.steps)
        except Exception as error:  # for example, a kernel that this device does not have
            print(f"{opponent} failed: {str(error).splitlines()[0]}", flush=True)
    print("done")


if __name__ == "__main__":
    main()
