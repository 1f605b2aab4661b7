"""Check whether a run can start here: `bash run.sh check [--name=value ...]`, also under torchrun.

Prints one line per check and a table of all parameters, and predicts the time and the memory of the
run from three steps. Ends with `all is well`, or with the first fault and exit status 1. Saves
nothing.

With --preset=text, --minutes=N chooses the settings and prints the command of a run that trains and
validates for about N minutes on this machine, and saves a checkpoint at least every 15 minutes.
Settings that it chooses must not be given.
"""

import argparse
import json
import math
import os
import platform
import re
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data")]
from minutes import SIZES, Rule, arguments, measure, timed  # noqa: E402
from shards import file_sha256, read_manifest  # noqa: E402

import train_gpt2  # noqa: E402
from train_gpt2 import UserError  # noqa: E402


def report(name, text):
    """Print the result of a check."""
    if train_gpt2.get_rank() == 0:
        print(f"{name}: {text}", flush=True)


def check_network(device):
    """Time an all-reduce of 16 MiB."""
    if not dist.is_initialized():
        return "not needed by a single process"
    buffer = torch.ones(2**22, device=device)
    dist.all_reduce(buffer)  # the first one connects the processes
    seconds = timed(lambda: dist.all_reduce(buffer) or buffer[-1].item())
    return f"{dist.get_backend()}, all_reduce of 16 MiB in {1000 * seconds:.1f} ms"


def choose_settings(argv, args, minutes):
    """Return settings for a run of some minutes, as arguments."""
    stream = train_gpt2.TokenStream(args.train_files, args.vocab_size)
    rule = Rule(stream.total_tokens, args.vocab_size)
    given = {argument.partition("=")[0].removeprefix("--") for argument in argv}
    chosen = {*rule.settings(SIZES[0], 1, 1), "compile", "resume", "init"}
    if conflicts := sorted(given & chosen):
        fix = "leave them out, or change the printed command"
        raise UserError(f"--minutes does not go with the settings {conflicts}: {fix}")
    return arguments(rule.choose(minutes, argv))


def check_optimizers(args, device):
    """List all parameters with optimizer and learning rate, without allocating them.

    Return (the list, bytes of the weights, bytes of the optimizers' states).
    """
    with torch.device("meta"):
        dtype = getattr(torch, train_gpt2.choose_dtype(args, device))
        model = train_gpt2.build_model(args, dtype)
        optimizers = train_gpt2.build_optimizers(model, args)
    weights = states = 0
    optimizer_of = {}
    for optimizer in optimizers:
        name = type(optimizer).__name__
        for group in optimizer.param_groups:
            for p in group["params"]:
                optimizer_of[p] = f"{name:7s} lr:{group['lr']:g}"
                weights += p.nbytes
                states += p.nbytes * (2 if name == "AdamW" else 1)
    rows = Counter()
    for name, p in model.named_parameters():
        name = re.sub("[.][0-9]+", ".*", name)  # merges equal rows of different blocks
        rows[f"{name:28s} {tuple(p.shape)!s:16s} {optimizer_of[p]}"] += 1
    parameters = sum(p.numel() for p in model.parameters())
    if 2 * weights + states > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        raise UserError(f"{parameters:,} parameters need more memory than this machine has")
    lines = [f"  {count:3d} x {row}" for row, count in rows.items()]
    return "\n".join([f"{parameters:,} parameters", *lines]), weights, states


def check_disk(args, weights, states):
    """Check that log_dir is writable and has space for what the run keeps."""
    folder = Path(args.log_dir).absolute()
    while not folder.exists():  # it will be created
        folder = folder.parent
    with tempfile.TemporaryFile(dir=folder):
        free = shutil.disk_usage(folder).free
    # The run writes a checkpoint before it removes an old one; model.pt and best.pt come on top.
    checkpoints = args.keep_checkpoints + 1 if args.save_every else 1
    needed = checkpoints * (weights + states) + 2 * weights
    text = f"{free / 2**30:.1f} GiB free in {folder}, the run takes up to {needed / 2**30:.2f}"
    if needed > free:
        raise UserError(f"{text}: free some, or pass another --log_dir or --keep_checkpoints")
    return text


def check_shards(args):
    """Compare this rank's part of the shards with their known checksums."""
    streams = [
        train_gpt2.TokenStream(f, args.vocab_size) for f in (args.train_files, args.val_files)
    ]
    paths = [Path(path) for stream in streams for path in stream.paths]
    known = json.loads((ROOT / "data" / "fineweb.json").read_text())["sha256"]
    for folder in {path.parent for path in paths}:
        known |= read_manifest(folder / "manifest.json")["shards"]
    listed = sorted(path for path in paths if path.name in known)
    for path in listed[train_gpt2.get_rank() :: train_gpt2.get_world_size()]:
        if file_sha256(path) != known[path.name]:
            raise UserError(f"{path} has an unexpected sha256: fetch or pack it again")
    return f"{len(listed)} of {len(paths)} shards have a known sha256, and all of these match"


def check_start(run):
    """Check run_id, and load what the run would start from, with the functions that it uses."""
    train_gpt2.check_owner(run)
    if train_gpt2.is_finished(run):
        return f"{run.folder} holds the result of this run; nothing to do"
    train_gpt2.restore(run)
    return f"at step {run.step} of {run.args.num_iterations}, from {run.start or 'new weights'}"


def check_time(run):
    """Predict the time and the memory of the run from three steps and part of a validation."""
    args = run.args
    steps_left = args.num_iterations - run.step
    inputs, targets = run.train_loader.batch(run.step)

    def pass_one_sequence():
        run.model(inputs[:1], targets[:1]).backward()

    pass_one_sequence()  # the first one also initializes libraries
    # A step can take minutes on a slow CPU. This does not wait for a GPU: none is that slow.
    step = train_gpt2.from_rank_0(len(inputs) * timed(pass_one_sequence))
    run.model.zero_grad()
    if step > 60:
        total = timedelta(seconds=round(step * steps_left))
        return f"about {total} of training: {step:.0f} s per step, judging by one sequence"
    compiling = timed(train_gpt2.compile_model, run) if args.compile else 0.0
    step, validation = measure(run)
    # With val_loss_every=0, the only validation is the one after the last step.
    validations = 1 + math.ceil(steps_left / (args.val_loss_every or math.inf))
    seconds = step * steps_left + validation * validations + compiling
    memory = train_gpt2.peak_memory(run.device) / 2**10
    return (
        f"about {timedelta(seconds=round(seconds))} in all: {1000 * step:.1f} ms per step, "
        f"{validation:.1f} s per validation, {compiling:.1f} s of compiling; peak memory "
        f"{memory:.1f} GiB"
    )


def main(argv):
    """Collective: run all checks. Raises an exception for the first one that fails."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--preset", default="record7")  # run.sh may give another one first
    options, argv = parser.parse_known_args(argv)
    argv.insert(0, f"--preset={options.preset}")
    args = train_gpt2.parse_args(argv)
    device = train_gpt2.join_ranks(args)
    versions = f"python {platform.python_version()}, torch {torch.__version__}"
    processes = train_gpt2.get_world_size()
    report("setup", f"{train_gpt2.device_name(device)}; processes {processes}; {versions}")
    report("network", check_network(device))
    if options.minutes is not None:
        if options.preset != "text" or not 0 < options.minutes < math.inf:
            raise UserError("--minutes needs a number above 0, such as 15, and --preset=text")
        argv += choose_settings(argv, args, options.minutes)
        args = train_gpt2.parse_args(argv)
    table, weights, states = check_optimizers(args, device)
    report("optimizers", table)
    report("disk", check_disk(args, weights, states))
    run = train_gpt2.set_up(args, train_gpt2.StopRequest())
    read, total = run.total_tokens, run.train_loader.stream.total_tokens
    report("data", f"the run reads {total:,} tokens {read / total:.3g} times")
    report("shards", check_shards(args))
    report("start", check_start(run))
    report("time", check_time(run))
    if train_gpt2.get_rank() == 0:
        print("\nall is well")
        if options.minutes is not None:
            command = shlex.join(["bash", os.path.relpath(ROOT / "run.sh"), *argv])
            print("\n" + (f"NPROC={processes} " if processes > 1 else "") + command)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Exception as error:
        where = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        print(f"FAILED: {where}{train_gpt2.describe_failure(error)}", flush=True)
        sys.exit(1)
    train_gpt2.leave_ranks()
