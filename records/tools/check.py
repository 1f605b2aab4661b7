"""Check whether a run can start here: `bash run.sh check [--name=value ...]`, also under torchrun.

Prints one line per check and a table of all parameters. If nothing has to be fixed, it compiles the
model and times three steps to predict how long the run takes. Ends with `all is well` and exit
status 0, or with a list of what to fix and exit status 1. Nothing is saved.
"""

import itertools
import json
import math
import os
import platform
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data")]
from shards import file_sha256  # noqa: E402

import train_gpt2  # noqa: E402
from train_gpt2 import UserError  # noqa: E402


class Checks:
    """`check(name, function, ...)` prints what the function finds and collects the faults."""

    def __init__(self, rank):
        self.rank = rank
        self.faults = []

    def __call__(self, name, function, *arguments):
        """Call function, which returns (text, result); print the text and return the result.

        If the function raises an exception, note it as a fault and return None.
        """
        try:
            text, result = function(*arguments)
        except Exception as error:
            sentence = str(error)
            if not isinstance(error, (UserError, OSError)):
                sentence = f"{type(error).__name__}: {error}".splitlines()[0]
            self.faults.append(f"{name}: {sentence}")
            text, result = f"FAILED, {sentence}", None
        if self.rank == 0:
            print(f"{name}: {text}", flush=True)
        return result

    def faults_of_all_ranks(self):
        """Collective: return each fault once, with its ranks unless all ranks have it."""
        faults_by_rank = train_gpt2.all_gather_objects(self.faults)
        lines = []
        for fault in dict.fromkeys(itertools.chain(*faults_by_rank)):
            ranks = [rank for rank, faults in enumerate(faults_by_rank) if fault in faults]
            on_all_ranks = len(ranks) == len(faults_by_rank)
            lines.append(fault if on_all_ranks else f"{fault} (ranks {ranks})")
        return lines


def timed(function, *arguments):
    """Return (seconds, result) of a call, which must wait for the device."""
    start = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - start, result


def free_memory(device, meminfo="/proc/meminfo"):
    """Return the free memory of the device in bytes, or all of it if meminfo does not exist."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if not Path(meminfo).exists():  # macOS
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 1024 * int(re.search(r"MemAvailable: +(\d+)", Path(meminfo).read_text())[1])


def check_device(args):
    """Join the other processes; the result is (rank, world_size, device)."""
    rank, world_size, device = train_gpt2.join_processes(args)
    text = (
        f"{train_gpt2.device_name(device)}, {free_memory(device) / 2**30:.1f} GiB of memory free; "
        f"processes {world_size}; products {train_gpt2.product_dtype(args, device)}; "
        f"python {platform.python_version()}, torch {torch.__version__}"
    )
    return text, (rank, world_size, device)


def check_network(device, world_size):
    """Time an all-reduce of 16 MiB, and check its sum."""
    if world_size == 1:
        return "one process, none needed", None
    buffer = torch.ones(2**22, device=device)
    dist.all_reduce(buffer)  # the first one connects the processes
    if not (buffer == world_size).all():
        raise UserError("an all_reduce of ones does not give the number of processes")
    seconds, _ = timed(lambda: dist.all_reduce(buffer) or buffer[-1].item())
    return f"{dist.get_backend()}, all_reduce of 16 MiB in {1000 * seconds:.1f} ms", None


def check_data(args, rank, world_size, device):
    """Open the shards; the result is (train_loader, val_loader)."""
    train_loader, val_loader = train_gpt2.open_data(args, rank, world_size, device)
    tokens = train_loader.total_tokens
    text = (
        f"{len(train_loader.paths)} + {len(val_loader.paths)} shards; the run reads {tokens:,} "
        f"tokens {train_gpt2.epochs(args, train_loader):.3f} times and validates on "
        f"{train_gpt2.val_tokens_of(args, val_loader):,} of {val_loader.total_tokens:,}"
    )
    return text, (train_loader, val_loader)


def check_shards(loaders, rank, world_size):
    """Compare the shards between ranks, and this rank's share of them with their known sha256."""
    facts = {"the shards": [loader.contents for loader in loaders]}
    train_gpt2.check_ranks_agree(facts, "give all machines the same data")
    paths = [Path(path) for loader in loaders for path in loader.paths]
    expected = dict(json.loads((ROOT / "data" / "fineweb.json").read_text())["sha256"])
    for folder in {path.parent for path in paths}:
        if (folder / "manifest.json").exists():
            manifest = json.loads((folder / "manifest.json").read_text())
            expected |= manifest["train"]["sha256"] | manifest["val"]["sha256"]
    known = [path for path in paths if path.name in expected]
    for path in known[rank::world_size]:
        if file_sha256(path) != expected[path.name]:
            raise UserError(f"{path} has another sha256 than expected: fetch or pack it again")
    return f"{len(known)} of {len(paths)} have a known sha256, and it is right", None


def check_optimizers(args, rank, world_size, dtype):
    """List count, name, shape, optimizer and rate of all parameters; allocate none of them.

    The result is the number of float32 values of (weights, optimizer states).
    """
    with torch.device("meta"):
        gpt = train_gpt2.GPT(args, dtype)
        optimizers = train_gpt2.build_optimizers(gpt, args, rank, world_size)
    settings, states = {}, 0
    for optimizer in optimizers:
        name = type(optimizer).__name__
        values = sum(p.numel() for p in train_gpt2.params_of(optimizer))
        states += values * {"Muon": 1, "Adagrad": 1}.get(name, 2)  # AdamW keeps two moments
        for group in optimizer.param_groups:
            settings.update(dict.fromkeys(group["params"], f"{name:7s} lr:{group['lr']:g}"))
    rows = Counter()
    for name, p in gpt.named_parameters():
        name = re.sub("[.][0-9]+", ".*", name)
        rows[f"{name:24s} {tuple(p.shape)!s:16s} {settings[p]}"] += 1
    weights = sum(p.numel() for p in settings)
    lines = [f"{weights:,} parameters"] + [f"  {count:3d} x {row}" for row, count in rows.items()]
    return "\n".join(lines), (weights, states)


def check_memory(weights, states, device):
    """Compare weights, gradients and optimizer states with the free memory."""
    need = 4 * (2 * weights + states)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if device.type == "cpu" else 1
    free = free_memory(device) / processes
    text = (
        f"weights, gradients and optimizer states take up to {need / 2**30:.1f} GiB, activations "
        f"come on top; {free / 2**30:.1f} GiB are free"
    )
    if need > free:
        raise UserError(f"{text}: take a smaller model")
    return text, None


def check_disk(args, weights, states):
    """Check that log_dir is writable and has space for the checkpoints and one being written."""
    Path(args.log_dir).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=args.log_dir):
        free = shutil.disk_usage(args.log_dir).free
    size = 4 * (weights + states)
    text = f"{free / 2**30:.1f} GiB free in {args.log_dir}, a checkpoint takes {size / 2**30:.2f}"
    if (args.keep_checkpoints + 1) * size > free:
        raise UserError(f"{text}: free some, or pass another --log_dir or --keep_checkpoints")
    return text, None


def check_time(args, loaders, rank, world_size, device):
    """Predict the time of the run from three steps, or of a slow run from a single sequence."""
    train_loader, val_loader = loaders
    train_gpt2.configure_backend(args, device)
    gpt = train_gpt2.GPT(args, train_gpt2.product_dtype(args, device)).to(device)
    optimizers = train_gpt2.build_optimizers(gpt, args, rank, world_size)
    inputs, targets = train_loader.next_batch()

    def one_sequence():
        loss = gpt(inputs[:1], targets[:1])
        loss.backward()
        loss.item()  # waits for the device

    seconds, _ = timed(one_sequence)
    gpt.zero_grad()
    step = seconds * len(inputs)
    if step > 60:
        total = timedelta(seconds=round(step * args.num_iterations))
        return (
            f"about {total} of training: {step:.0f} s per step, judging by one sequence",
            None,
        )
    try:
        compiling, _ = timed(train_gpt2.warm_up, gpt, args, val_loader)
    except Exception as error:
        cause = str(error).splitlines()[0]
        fix = "install g++ and Python.h, or pass --compile=False"
        raise UserError(f"the model cannot be compiled ({cause}): {fix}") from None

    def train_step():
        batch = train_loader.next_batch()
        train_gpt2.train_step(gpt, optimizers, *batch, 1.0, args)[0].item()

    step = statistics.median(timed(train_step)[0] for _ in range(3))
    batch, _ = timed(train_gpt2.evaluate, gpt, val_loader, val_loader.tokens_per_step)
    batches = train_gpt2.val_tokens_of(args, val_loader) / val_loader.tokens_per_step
    validations = 1  # at the end
    if args.val_loss_every:
        validations += math.ceil(args.num_iterations / args.val_loss_every)
    parts = step * args.num_iterations, batch * batches * validations, compiling
    training, validation, compiling, total = (
        timedelta(seconds=round(part)) for part in (*parts, sum(parts))
    )
    return (
        f"about {total} in all: training {training} ({args.num_iterations} steps of "
        f"{1000 * step:.1f} ms), {validations} validations {validation}, compiling {compiling}"
    ), None


def main(argv):
    """Run all checks; return the faults of all ranks."""
    check = Checks(int(os.environ.get("RANK", 0)))
    args = check("settings", lambda: ("all valid", train_gpt2.parse_args(argv)))
    place = args and check("device", check_device, args)
    if not place:
        return check.faults
    rank, world_size, device = place
    check("network", check_network, device, world_size)
    loaders = check("data", check_data, args, rank, world_size, device)
    if not check.faults_of_all_ranks():
        check("shards", check_shards, loaders, rank, world_size)
    dtype = train_gpt2.product_dtype(args, device)
    sizes = check("optimizers", check_optimizers, args, rank, world_size, dtype)
    if sizes:
        check("memory", check_memory, *sizes, device)
        check("disk", check_disk, args, *sizes)
    if not check.faults_of_all_ranks():
        check("time", check_time, args, loaders, *place)
    return check.faults_of_all_ranks()


if __name__ == "__main__":
    faults = main(sys.argv[1:])
    if os.environ.get("RANK", "0") == "0" or not dist.is_initialized():
        print("\nto fix:\n  " + "\n  ".join(faults) if faults else "\nall is well")
    train_gpt2.leave_processes()
    sys.exit(1 if faults else 0)
