"""Time a step against others: python tests/bench/bench_step.py [LEVER ...] [--field=value ...]

Without names against the plain step; `all`: every lever of tests/bench/levers.py that exists here.
Each side has a process of its own (two for those named x2): it compiles with an empty cache (cold),
once more with a full one (warm), and then does a few steps whenever it is its turn, in an order
drawn anew each round, so that a drifting machine hurts all. The fields are Hyperparameters, and

    --rounds=9 --steps=3    so many rounds of so many steps
    --together=5            sides in memory at a time; each group has the script's step again
    --loss_steps=0          afterwards train on to this step, without the clock, and validate
    --cold=True             False: one start, with the cache that is there

Without train_files the tokens are random. Ratios are to the script's step of the same round: the
median, and the least and greatest. Run it alone: another process makes the figures worthless.
"""

import contextlib
import dataclasses
import json
import os
import platform
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

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
    "val_tokens": 4096,
    "train_files": "",
}
OPTIONS = {"rounds": 9, "steps": 3, "together": 5, "loss_steps": 0, "cold": True}
COLUMNS = (
    "lever              ms/step ratio (least..greatest)   MFU   peak MiB (ratio) reserved"
    "   cold s  warm s graphs    loss"
)


# ---- A side, in its own process: reads a command a line from stdin, answers with a line of JSON -
def tokens_of(args, rank, world_size, device):
    """Yield (inputs, targets) of this rank for ever: of train_files, or always the same, random."""
    import torch

    import train_gpt2

    B, T = args.batch_size, args.sequence_length
    if args.train_files:
        loader = train_gpt2.DistributedDataLoader(
            args.train_files, B, T, rank, world_size, device, args.vocab_size
        )
        while True:
            yield loader.next_batch()
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
        raise ValueError("the plain model has no n-grams and no key shift: set both to 0")
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


def validation_loss(model, args, rank, world_size, device):
    """Return the loss of the first val_tokens tokens of val_files."""
    import train_gpt2

    size = train_gpt2.micro_batch_size(args.batch_size // world_size, args.device_batch_size)
    loader = train_gpt2.DistributedDataLoader(
        args.val_files,
        size * world_size,
        args.sequence_length,
        rank,
        world_size,
        device,
        args.vocab_size,
    )
    return train_gpt2.evaluate(model, loader, args.val_tokens)


def work(name, settings, rank, world_size, rendezvous):
    """Be the side `name`: answer each line of stdin until the line `end`."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints goes to stderr
    import torch
    import torch._dynamo
    import torch.distributed as dist
    from levers import LEVERS
    from runlog import PEAK_FLOPS, flops_per_token

    import train_gpt2
    from train_gpt2 import device_name

    def say(**values):
        print(json.dumps(values), file=answer, flush=True)

    run = SimpleNamespace(settings=settings, attention=None, plain=False, plain_compiled=False)
    LEVERS[name].change(train_gpt2, run)
    args = train_gpt2.Hyperparameters(**run.settings)
    if world_size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=300),
        )
    rank, world_size, device = train_gpt2.join_processes(args)
    dtype = train_gpt2.product_dtype(args, device)
    torch.manual_seed(args.seed)
    gpt = train_gpt2.GPT(args, dtype).to(device)
    if run.plain:
        model, warm_up, step = prepare_plain(run, gpt, args, dtype)
    else:
        model, warm_up, step = prepare_script(train_gpt2, gpt, args, rank, world_size)
    batches, done = tokens_of(args, rank, world_size, device), 0

    def steps(count):
        nonlocal done
        start = time.perf_counter()
        for _ in range(count):
            loss = step(*next(batches)).item()
        done += count
        return time.perf_counter() - start, loss

    def turn(count):
        """Time steps; a GPU's memory is lent from side to side, and got back in a step before."""
        if device.type == "cuda":
            steps(1)
        seconds, loss = steps(count)
        torch.cuda.empty_cache()  # does nothing without one
        return seconds, loss

    with attention_of(run):
        start = time.perf_counter()
        warm_up(tokens_of(args, rank, world_size, device))
        _, loss = steps(1)
        seconds = time.perf_counter() - start
        torch.cuda.empty_cache()  # others start beside this side
        name = device_name(device)
        say(
            compile=seconds,
            loss=loss,
            device=str(device),
            name=name,
            threads=torch.get_num_threads(),
            flops=flops_per_token(gpt, args),
            peak=PEAK_FLOPS.get(name),
        )
        for line in sys.stdin:
            command, *rest = line.split()
            if command == "end":
                break
            if command == "steps":
                seconds, loss = turn(int(rest[0]))
                say(seconds=seconds, loss=loss)
            elif command == "loss":
                steps(max(0, int(rest[0]) - done))
                say(loss=validation_loss(model, args, rank, world_size, device), steps=done)
            elif command == "memory":
                mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
                reserved = None
                if device.type == "cuda":
                    mib = torch.cuda.max_memory_allocated() / 2**20
                    reserved = torch.cuda.max_memory_reserved() / 2**20
                graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
                say(memory=mib, reserved=reserved, graphs=graphs)
    if world_size > 1:
        dist.destroy_process_group()


# ---- The table ----------------------------------------------------------------------------------
class Side:
    """A lever's processes; raises RuntimeError with the error's first line when one ends."""

    def __init__(self, lever, settings, cache=None):
        self.lever, self.cache, self.errors = lever, None, tempfile.TemporaryFile("w+")
        self.seconds, self.figures = [], {}
        self.folder = tempfile.TemporaryDirectory()  # where its processes meet
        environment = os.environ | lever.environment
        if cache:
            environment["TORCHINDUCTOR_CACHE_DIR"] = cache.name
        if lever.processes > 1:
            environment["OMP_NUM_THREADS"] = "1"
        self.processes = []
        for rank in range(lever.processes):
            given = lever.name, settings, rank, lever.processes, f"{self.folder.name}/meet"
            process = subprocess.Popen(
                [sys.executable, __file__, "--worker", json.dumps(given)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                text=True,
                env=environment,
            )
            self.processes.append(process)
        try:
            self.hear()
        except RuntimeError:
            self.end()
            raise

    def hear(self):
        answers = [process.stdout.readline() for process in self.processes]
        if not all(answers):
            self.errors.seek(0)
            lines = [line for line in self.errors.read().splitlines() if line.strip()] or ["?"]
            named = [x for x in lines if re.match(r"[\w.]*(Error|Exception|Unsupported)\b", x)]
            raise RuntimeError((named or lines)[-1][:150])
        self.figures |= json.loads(answers[0])
        return self.figures

    def ask(self, command):
        for process in self.processes:
            print(command, file=process.stdin, flush=True)
        return self.hear()

    def end(self):
        for process in self.processes:
            process.kill()
            process.wait()
        self.folder.cleanup()
        if self.cache:
            self.cache.cleanup()


def start(lever, settings, cold):
    """Return a Side after its first step; if cold, its figures have cold and warm seconds."""
    if not cold:
        return Side(lever, settings)
    cache = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    side = Side(lever, settings, cache)
    seconds = side.figures["compile"]
    side.end()
    side = Side(lever, settings, cache)
    side.cache = cache  # in use until the side ends
    side.figures |= {"cold": seconds, "warm": side.figures["compile"]}
    return side


def measure(sides, options):
    """Let all sides do their rounds; fill in their figures. One that fails leaves its error."""

    def ask(side, command):
        try:
            return side.ask(command)
        except (RuntimeError, OSError) as error:
            side.figures["failed"] = str(error)

    for _ in range(options["rounds"]):
        for side in random.sample(sides, len(sides)):
            if "failed" not in side.figures and ask(side, f"steps {options['steps']}"):
                side.seconds.append(side.figures["seconds"] / options["steps"])
    for side in sides:
        side.figures.pop("loss", None)
        for command in ["memory"] + [f"loss {options['loss_steps']}"] * bool(options["loss_steps"]):
            "failed" in side.figures or ask(side, command)
        side.end()


def row(side, base, tokens):
    """Return a line of the table."""
    now, name = side.figures, f"{side.lever.name:22s}"
    if "failed" in now or not side.seconds:
        return f"{name} failed: {now.get('failed')}"
    ms = 1000 * statistics.median(side.seconds)
    ratios = [b / a for a, b in zip(base.seconds, side.seconds)]
    spread = f"{statistics.median(ratios):5.3f} ({min(ratios):.3f}..{max(ratios):.3f})"
    mfu = "n/a"
    if now["peak"]:
        mfu = f"{now['flops'] * tokens / ms * 1000 / now['peak']:.1%}"
    reserved = f"{now['reserved']:.0f}" if now["reserved"] else "n/a"
    loss = f"{now['loss']:.4f}" if "loss" in now else "n/a"
    cold, warm = (f"{now[key]:.1f}" if key in now else "n/a" for key in ("cold", "warm"))
    memory = f"{now['memory']:.0f} ({now['memory'] / base.figures['memory']:.2f})"
    return (
        f"{name} {ms:8.1f} {spread:22s} {mfu:>6s} {memory:>14s} {reserved:>8s} "
        f"{cold:>8s} {warm:>7s} {now['graphs']:6d} {loss:>7s}"
    )


def available(lever, device, products):
    """Return why a lever cannot be measured here, or an empty string."""
    have = {device, products.removeprefix("torch.")}
    if lever.needs and lever.needs not in have:
        return f"needs {lever.needs}"
    return ""


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
    settings = dataclasses.asdict(args)
    if options["loss_steps"] and not args.train_files:
        sys.exit("--loss_steps needs real text: give --train_files and --val_files")
    _, _, device = train_gpt2.join_processes(args)
    products = str(train_gpt2.product_dtype(args, device))
    print(f"command: python {' '.join(sys.argv)}\n{args}\n{options}", flush=True)
    print(f"torch {torch.__version__}, {platform.platform()}, products in {products}")
    names = names or ["plain"]
    for processes in (1, 2):
        wanted = [LEVERS[name] for name in names if LEVERS[name].processes == processes]
        for lever in wanted:
            if reason := available(lever, device.type, products):
                print(f"{lever.name:22s} n/a: {reason}", flush=True)
        wanted = [x for x in wanted if not available(x, device.type, products)]
        script = LEVERS["script" if processes == 1 else "script x2"]
        wanted = [lever for lever in wanted if lever is not script]
        size = max(1, options["together"] - 1)
        for i in range(0, len(wanted), size):
            compare([script, *wanted[i : i + size]], settings, options, args)
    print("done")


def compare(levers, settings, options, args):
    """Measure a group of levers, the script's step first, and print its table."""
    sides = []
    for lever in levers:
        try:
            sides.append(start(lever, settings, options["cold"]))
            seconds = sides[-1].figures["compile"]
            print(f"{lever.name:22s} has done its first step, in {seconds:.1f} s", flush=True)
        except RuntimeError as error:
            print(f"{lever.name:22s} failed: {error}", flush=True)
            if not sides:
                return
    measure(sides, options)
    now = sides[0].figures
    tokens = args.batch_size * args.sequence_length
    print(f"\n{now['device']} {now['name']}, {now['threads']} threads")
    print(COLUMNS)
    for side in sides:
        print(row(side, sides[0], tokens), flush=True)
    for side in sides:
        if side.seconds:
            speed = tokens / statistics.median(side.seconds)
            print(f"tokens/s {side.lever.name}: {speed:.0f}")
            print(f"seconds {side.lever.name}: {' '.join(f'{s:.4f}' for s in side.seconds)}")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(*json.loads(sys.argv[2]))
    else:
        main(sys.argv[1:])
