"""Time training steps in turn: python tests/bench/bench_step.py [LEVER ...] [--field=value ...]

Compares the script's step with the plain step of tests/plain.py, or with each named lever of
tests/bench/levers.py; `all` names those that can run here. Each side has a process of its own. In
every round both take a few steps, in random order, so that a drifting machine slows both. The
fields are Hyperparameters. --rounds=9 and --steps=3 set the number of rounds, and of steps in each.

The tokens are random. A ratio is to the script's step of the same round: its median, minimum and
maximum. The loss is that of the last training step. Run nothing beside it.
"""

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import platform
import random
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("", "records/tools", "tests", "tests/bench")]
import plain  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402
from levers import ENVIRONMENT, LEVERS, NEED_CUDA  # noqa: E402
from runlog import PEAK_FLOPS, flops_per_token  # noqa: E402

import train_gpt2  # noqa: E402

SETTINGS = [
    "--n_layer=4", "--n_head=2", "--n_embd=256", "--vocab_size=50304",
    "--batch_size=16", "--device_batch_size=16", "--sequence_length=256",
]  # fmt: skip


# ---- Processes that take turns ------------------------------------------------------------------
class Team:
    """Processes that call function(pipe, rank, world_size, folder, *arguments).

    The function answers every request it receives from the pipe. The ranks may meet in the folder.
    """

    def __init__(self, function, world_size, *arguments, **environment):
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        self.processes = []
        self.pipes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            given = theirs, rank, world_size, self.folder.name, *arguments
            process = context.Process(target=function, args=given, daemon=True)
            with mock.patch.dict(os.environ, environment):
                process.start()
            theirs.close()  # so that the end of the process is noticed
            self.processes.append(process)
            self.pipes.append(ours)

    def hear(self):
        """Return the next answers of all ranks. Raises EOFError if one of them failed."""
        return [pipe.recv() for pipe in self.pipes]

    def ask(self, request):
        for pipe in self.pipes:
            pipe.send(request)
        return self.hear()

    def end(self):
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


# ---- A side, in its own process -----------------------------------------------------------------
def tokens_of(args, device):
    """Return the inputs and targets of a step, the same random ones every time."""
    B, T = args.batch_size, args.sequence_length
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(args.vocab_size, (B * T + 1,), generator=generator).to(device)
    return tokens[:-1].view(B, T), tokens[1:].view(B, T)


def prepare_plain(run, gpt, args):
    """Return (warm_up, step) of tests/plain.py, with the weights of gpt."""
    if args.max_ngram or args.key_shift or args.logit_softcap:
        raise ValueError("the plain model has no n-grams, key shift or soft-cap: set them to 0")
    model = plain.PlainGPT(args).to(gpt.lm_head.weight.device)
    model.load_state_dict(gpt.state_dict())
    optimizers = plain.plain_optimizers(model, args, gpt.dtype)
    size = args.device_batch_size

    def warm_up(inputs, targets):
        if run.plain_compiled:
            model.compile(dynamic=False)

    def step(inputs, targets):
        return plain.plain_step(model, optimizers, inputs, targets, gpt.dtype, size)

    return warm_up, step


def prepare_script(script, gpt, args):
    """Return (warm_up, step) of a module train_gpt2, as a lever has left it.

    This sets PyTorch's global options as training does. The plain step keeps PyTorch's own.
    """
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


def prepare(script, lever, settings):
    """Apply a lever to a module train_gpt2; return (run, gpt, args, warm_up, step)."""
    run = SimpleNamespace(settings=settings, plain=False, plain_compiled=False)
    run.attention = contextlib.nullcontext()
    lever(script, run)
    args = script.Hyperparameters(**run.settings)
    _, _, device = script.join_processes(args)
    torch.manual_seed(args.seed)
    gpt = script.GPT(args, script.product_dtype(args, device)).to(device)
    if run.plain:
        return run, gpt, args, *prepare_plain(run, gpt, args)
    return run, gpt, args, *prepare_script(script, gpt, args)


def take_steps(pipe, rank, world_size, folder, name, settings):
    """Answer a number of steps with their mean seconds, and 0 with memory, graphs and loss."""
    run, gpt, args, warm_up, step = prepare(train_gpt2, LEVERS[name], settings)
    device = gpt.lm_head.weight.device
    batch = tokens_of(args, device)
    with run.attention:
        start = time.perf_counter()
        warm_up(*batch)
        step(*batch).item()
        seconds = time.perf_counter() - start
        torch.cuda.empty_cache()  # does nothing without a GPU
        device_name = train_gpt2.device_name(device)
        machine = f"{device} {device_name}, {torch.get_num_threads()} threads"
        flops, peak_flops = flops_per_token(gpt, args), PEAK_FLOPS.get(device_name)
        pipe.send(dict(start=seconds, machine=machine, flops=flops, peak_flops=peak_flops))
        while count := pipe.recv():
            if device.type == "cuda":
                step(*batch).item()  # takes back the memory that the other side used
            start = time.perf_counter()
            for _ in range(count):
                loss = step(*batch).item()
            pipe.send((time.perf_counter() - start) / count)
            torch.cuda.empty_cache()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    reserved = 0
    if device.type == "cuda":
        memory = torch.cuda.max_memory_allocated() / 2**20
        reserved = torch.cuda.max_memory_reserved() / 2**20
    pipe.send(dict(memory=memory, reserved=reserved, graphs=graphs, loss=loss))


# ---- The table ----------------------------------------------------------------------------------
def compare(lever, settings, rounds, steps):
    """Measure the script's step and a lever in turn, and print a table of the two."""
    sides = []
    try:
        for name in "script", lever:
            team = Team(take_steps, 1, name, settings, **ENVIRONMENT.get(name, {}))
            sides.append(SimpleNamespace(name=name, team=team, seconds=[]))
            sides[-1].figures = team.hear()[0]
        for _ in range(rounds):
            for side in random.sample(sides, 2):
                side.seconds.append(side.team.ask(steps)[0])
        for side in sides:
            side.figures |= side.team.ask(0)[0]
    except (EOFError, OSError):  # its own message is on stderr
        print(f"{lever:22s} failed", flush=True)
    else:
        print_table(sides, settings["batch_size"] * settings["sequence_length"])
    for side in sides:
        side.team.end()


def print_table(sides, tokens):
    """Print a row of figures for each side, and the seconds of its steps in each round."""
    script = sides[0]
    print(f"\n{script.figures['machine']}")
    columns = "lever                   ms/step ratio (least..greatest)   MFU   peak MiB (ratio)"
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
    parser.add_argument("levers", nargs="*", metavar="LEVER", help=", ".join(LEVERS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3)
    options, fields = parser.parse_known_args()
    levers = LEVERS if "all" in options.levers else options.levers or ["plain"]
    if unknown := set(levers) - set(LEVERS):
        parser.error(f"{unknown} are no levers")
    args = train_gpt2.parse_args([*SETTINGS, *fields])
    _, _, device = train_gpt2.join_processes(args)
    products = train_gpt2.product_dtype(args, device)
    print(f"command: python {' '.join(sys.argv)}\n{args}\n{options}", flush=True)
    print(f"torch {torch.__version__}, {platform.platform()}, products in {products}")
    for name in levers:
        if name in NEED_CUDA and device.type != "cuda":
            print(f"{name:22s} n/a: needs cuda", flush=True)
        elif name != "script":
            compare(name, dataclasses.asdict(args), options.rounds, options.steps)
    print("done")


if __name__ == "__main__":
    main()
