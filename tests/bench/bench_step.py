"""Time training steps in turn: python tests/bench/bench_step.py [LEVER ...] [--field=value ...]

Compares the script's step with the plain step of tests/plain.py, or with each named lever of
tests/bench/levers.py; `all` names those that can run here. Each side has a process of its own. In
every round both take a few steps, in random order, so that a drifting machine slows both. The
fields are Hyperparameters, and

    --rounds=9 --steps=3    number of rounds, and of steps in each
    --cold=False            True: start with an empty compiler cache

The tokens are random. A ratio is to the script's step of the same round: its median, minimum and
maximum. The loss is that of the last training step. Run nothing beside it.
"""

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

SETTINGS = {
    "n_layer": 4,
    "n_head": 2,
    "n_embd": 256,
    "vocab_size": 50304,
    "batch_size": 16,
    "device_batch_size": 16,
    "sequence_length": 256,
}
OPTIONS = {"rounds": 9, "steps": 3, "cold": False}


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
            given = (function, theirs, rank, world_size, self.folder.name, *arguments)
            process = context.Process(target=answer, args=given, daemon=True)
            with mock.patch.dict(os.environ, environment):
                process.start()
            theirs.close()  # so that the end of the process is noticed
            self.processes.append(process)
            self.pipes.append(ours)

    def hear(self):
        """Return the next answers of all ranks. Raises RuntimeError if one of them failed."""
        try:
            answers = [pipe.recv() for pipe in self.pipes]
        except EOFError:
            raise RuntimeError("its process was killed") from None
        for failure in answers:
            if isinstance(failure, RuntimeError):
                raise failure
        return answers

    def ask(self, request):
        for pipe in self.pipes:
            pipe.send(request)
        return self.hear()

    def end(self):
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def answer(function, pipe, *arguments):
    """Call a function of a Team in its process; send an error as a RuntimeError of one line."""
    try:
        function(pipe, *arguments)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        pipe.send(RuntimeError(text.splitlines()[0][:150]))


# ---- A side, in its own process -----------------------------------------------------------------
def tokens_of(args, rank, world_size, device):
    """Yield this rank's inputs and targets, the same random ones every time."""
    import torch

    B, T = args.batch_size, args.sequence_length
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(args.vocab_size, (B * T + 1,), generator=generator).to(device)
    inputs, targets = tokens[:-1].view(B, T), tokens[1:].view(B, T)
    part = slice(rank * B // world_size, (rank + 1) * B // world_size)
    while True:
        yield inputs[part], targets[part]


def attention_of(run):
    """Return a context in which only the attention kernel of a lever may run."""
    from torch.nn.attention import sdpa_kernel

    return sdpa_kernel(run.attention) if run.attention else contextlib.nullcontext()


def prepare_plain(run, gpt, args, dtype):
    """Return (model, warm_up, step) of tests/plain.py, with the weights of gpt."""
    import plain

    if args.max_ngram or args.key_shift or args.logit_softcap:
        raise ValueError("the plain model has no n-grams, key shift or soft-cap: set them to 0")
    model = plain.PlainGPT(args).to(gpt.lm_head.weight.device)
    model.load_state_dict(gpt.state_dict())
    optimizers = plain.plain_optimizers(model, args, dtype)

    def warm_up(batches):
        if run.plain_compiled:
            model.compile(dynamic=False)

    def step(inputs, targets):
        return plain.plain_step(model, optimizers, inputs, targets, dtype, args.device_batch_size)

    return model, warm_up, step


def prepare_script(train_gpt2, gpt, args, rank, world_size):
    """Return (model, warm_up, step) of train_gpt2.py, as a lever has left the module.

    This sets PyTorch's global options as training does. The plain step keeps PyTorch's own.
    """
    train_gpt2.configure_backend(args, gpt.lm_head.weight.device)
    optimizers = train_gpt2.build_optimizers(gpt, args, rank, world_size)

    def warm_up(batches):
        inputs, targets = next(batches)
        size = train_gpt2.micro_batch_size(len(inputs), args.device_batch_size)
        batch = inputs[:size], targets[:size]
        train_gpt2.warm_up(gpt, args, SimpleNamespace(next_batch=lambda: batch))

    def step(inputs, targets):
        loss, _ = train_gpt2.train_step(gpt, optimizers, inputs, targets, 1.0, args)
        return loss

    return gpt, warm_up, step


def take_steps(pipe, rank, world_size, folder, name, settings):
    """Answer a number of steps with their mean seconds, and 0 with memory, graphs and loss."""
    import torch
    import torch._dynamo
    from levers import LEVERS
    from runlog import PEAK_FLOPS, flops_per_token

    import train_gpt2

    run = SimpleNamespace(settings=settings, attention=None, plain=False, plain_compiled=False)
    LEVERS[name].change(train_gpt2, run)
    args = train_gpt2.Hyperparameters(**run.settings)
    _, _, device = train_gpt2.join_processes(args)
    dtype = train_gpt2.product_dtype(args, device)
    torch.manual_seed(args.seed)
    gpt = train_gpt2.GPT(args, dtype).to(device)
    if run.plain:
        _, warm_up, step = prepare_plain(run, gpt, args, dtype)
    else:
        _, warm_up, step = prepare_script(train_gpt2, gpt, args, rank, world_size)
    batches = tokens_of(args, rank, world_size, device)
    with attention_of(run):
        start = time.perf_counter()
        warm_up(tokens_of(args, rank, world_size, device))
        step(*next(batches)).item()
        seconds = time.perf_counter() - start
        torch.cuda.empty_cache()  # does nothing without a GPU
        device_name = train_gpt2.device_name(device)
        machine = f"{device} {device_name}, {torch.get_num_threads()} threads"
        flops, peak_flops = flops_per_token(gpt, args), PEAK_FLOPS.get(device_name)
        pipe.send(dict(start=seconds, machine=machine, flops=flops, peak_flops=peak_flops))
        while count := pipe.recv():
            if device.type == "cuda":
                step(*next(batches)).item()  # takes back the memory that the other sides used
            start = time.perf_counter()
            for _ in range(count):
                loss = step(*next(batches)).item()
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
def compare(lever, settings, options):
    """Measure the script's step and a lever in turn, and print a table of the two."""
    from levers import LEVERS

    sides = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        try:
            for each in LEVERS["script"], lever:
                environment = dict(each.environment)
                if options["cold"]:
                    environment["TORCHINDUCTOR_CACHE_DIR"] = f"{cache}/{each.name}"
                team = Team(take_steps, 1, each.name, settings, **environment)
                sides.append(SimpleNamespace(name=each.name, team=team, seconds=[]))
                sides[-1].figures = team.hear()[0]
            for _ in range(options["rounds"]):
                for side in random.sample(sides, 2):
                    side.seconds.append(side.team.ask(options["steps"])[0])
            for side in sides:
                side.figures |= side.team.ask(0)[0]
        except (RuntimeError, OSError) as error:
            print(f"{lever.name:22s} failed: {error}", flush=True)
        else:
            print_table(sides, settings["batch_size"] * settings["sequence_length"])
        for side in sides:
            side.team.end()


def print_table(sides, tokens):
    """Print a row of figures for each side, and the seconds of its steps in each round."""
    script = sides[0]
    print(f"\n{script.figures['machine']}")
    print(
        "lever                   ms/step ratio (least..greatest)   MFU   peak MiB (ratio) reserved"
        "  start s graphs    loss"
    )
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


def main(argv):
    import torch
    from levers import LEVERS

    import train_gpt2

    fields = [f"--{name}={value}" for name, value in SETTINGS.items()]
    options, names = dict(OPTIONS), []
    for argument in argv:
        name, _, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--"):
            names += LEVERS if argument == "all" else [argument]
        elif name in OPTIONS:
            options[name] = text == "True" if name == "cold" else int(text)
        else:
            fields.append(argument)
    if unknown := [name for name in names if name not in LEVERS]:
        sys.exit(f"{unknown} are no levers: give all, or some of {list(LEVERS)}")
    args = train_gpt2.parse_args(fields)
    _, _, device = train_gpt2.join_processes(args)
    products = str(train_gpt2.product_dtype(args, device))
    print(f"command: python {' '.join(sys.argv)}\n{args}\n{options}", flush=True)
    print(f"torch {torch.__version__}, {platform.platform()}, products in {products}")
    for lever in [LEVERS[name] for name in names or ["plain"]]:
        if lever.needs not in ("", device.type, products.removeprefix("torch.")):
            print(f"{lever.name:22s} n/a: needs {lever.needs}", flush=True)
        elif lever.name != "script":
            compare(lever, dataclasses.asdict(args), options)
    print("done")


if __name__ == "__main__":
    main(sys.argv[1:])
