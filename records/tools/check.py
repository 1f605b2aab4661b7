"""Check whether a run can start here: `bash run.sh check [--name=value ...]`, also under torchrun.

Prints one line per check and a table of all parameters. If nothing has to be fixed, it compiles the
model and takes three steps to predict the time and the memory of the run. Ends with `all is well`
and exit status 0, or with a list of what to fix and exit status 1. Saves nothing.

With --preset=text, --minutes=N chooses the settings and prints the command of a run that trains and
validates for about N minutes on this machine, and saves a checkpoint at least every 15 minutes.
Settings that it chooses must not be given.
"""

import argparse
import glob
import json
import math
import os
import platform
import re
import shlex
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
from minutes import MAX_EPOCHS, SIZES, VALIDATIONS, Rule, arguments  # noqa: E402
from shards import file_sha256, read_manifest  # noqa: E402

import train_gpt2  # noqa: E402
from train_gpt2 import UserError, require  # noqa: E402


def timed(function, *arguments):
    """Return the seconds that a call takes. The function must wait for the device."""
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


class Checks:
    """The checks of a run. Each check_ method returns its result as text, or raises an exception.

    They store in attributes what later checks need.
    """

    def __init__(self, argv):
        self.argv = argv
        self.minutes = None
        self.faults = []

    def run(self, name):
        """Run a check, print its result or its fault on rank 0, return whether it succeeded."""
        fault = ""
        try:
            text = getattr(self, f"check_{name}")()
        except Exception as error:
            kind = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
            fault = f"{kind}{error}".splitlines()[0]
            self.faults.append(f"{name}: {fault}")
        if os.environ.get("RANK", "0") == "0":
            print(f"{name}: {f'FAILED, {fault}' if fault else text}", flush=True)
        return not fault

    def faults_of_all_ranks(self):
        """Collective: return the faults of all ranks, each once."""
        faults_of_ranks = train_gpt2.all_gather_objects(self.faults)
        return list(dict.fromkeys(fault for faults in faults_of_ranks for fault in faults))

    def check_setup(self):
        """Parse the settings and join the other processes."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--minutes", nargs="?", const="")
        parser.add_argument("--preset")  # run.sh may give another one first
        options, self.argv = parser.parse_known_args(self.argv)
        if options.preset:
            self.argv.insert(0, f"--preset={options.preset}")
        self.args = train_gpt2.parse_args(self.argv)
        if options.minutes is not None:
            self.minutes = minutes_from(options.minutes)
            require(options.preset == "text", "--minutes needs --preset=text: pass both")
        self.rank, self.world_size, self.device = train_gpt2.join_processes(self.args)
        self.dtype = train_gpt2.choose_dtype(self.args, self.device)
        return (
            f"{train_gpt2.device_name(self.device)}; processes {self.world_size}; matmuls in "
            f"{self.dtype}; python {platform.python_version()}, torch {torch.__version__}"
        )

    def check_settings(self):
        """Choose the settings for self.minutes. check_command corrects the number of steps."""
        args = self.args
        with train_gpt2.agreement():
            stream = train_gpt2.TokenStream(args.train_files, args.vocab_size)
        self.rule = Rule(stream.total_tokens, args.vocab_size, self.world_size)
        given = {argument.partition("=")[0].removeprefix("--") for argument in self.argv}
        conflicts = sorted(given & {*self.rule.settings(SIZES[0], 1), "resume", "init"})
        fix = "leave them out, or change the printed command"
        require(not conflicts, f"--minutes does not go with the settings {conflicts}: {fix}")
        self.size, steps = self.rule.choose(self.minutes, self.argv)
        chosen = arguments(self.rule.settings(self.size, steps))
        self.args = train_gpt2.parse_args([*self.argv, *chosen])
        layers, channels = self.size
        return f"{layers} layers with {channels} channels, {steps:,} steps without torch.compile"

    def check_network(self):
        """Time an all-reduce of 16 MiB, and check its sum."""
        if not dist.is_initialized():
            return "not needed by a single process"
        buffer = torch.ones(2**22, device=self.device)
        dist.all_reduce(buffer)  # the first one connects the processes
        if not (buffer == self.world_size).all():
            raise UserError("an all_reduce of ones does not give the number of processes")
        seconds = timed(lambda: dist.all_reduce(buffer) or buffer[-1].item())
        return f"{dist.get_backend()}, all_reduce of 16 MiB in {1000 * seconds:.1f} ms"

    def check_optimizers(self):
        """List all parameters with optimizer and learning rate, without allocating them."""
        with torch.device("meta"):
            model = train_gpt2.build_model(self.args, self.dtype)
            optimizers = train_gpt2.build_optimizers(model, self.args, self.rank, self.world_size)
        self.weights = self.states = 0  # float32 values
        optimizer_of = {}
        for optimizer in optimizers:
            name = type(optimizer).__name__
            for group in optimizer.param_groups:
                for p in group["params"]:
                    optimizer_of[p] = f"{name:7s} lr:{group['lr']:g}"
                    self.weights += p.numel()
                    self.states += p.numel() * (2 if name == "AdamW" else 1)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4  # float32 values
        if 2 * self.weights + self.states > memory:  # weights, gradients and states
            raise UserError(f"{self.weights:,} parameters need more memory than this machine has")
        rows = Counter()
        for name, p in model.named_parameters():
            name = re.sub("[.][0-9]+", ".*", name)  # merges equal rows of different blocks
            rows[f"{name:24s} {tuple(p.shape)!s:16s} {optimizer_of[p]}"] += 1
        lines = [f"  {count:3d} x {row}" for row, count in rows.items()]
        return "\n".join([f"{self.weights:,} parameters", *lines])

    def check_data(self):
        """Set up the run, which opens the shards and reads the validation tokens."""
        self.training = run = train_gpt2.set_up(self.args, train_gpt2.StopRequest())
        return (
            f"the run reads {run.train_loader.stream.total_tokens:,} tokens {run.epochs:.3f} times "
            f"and validates on {run.args.val_tokens:,}"
        )

    def check_shards(self):
        """Compare this rank's part of the shards with their known checksums."""
        paths = [Path(path) for path in self.training.train_loader.stream.paths]
        paths += [Path(path) for path in sorted(glob.glob(self.args.val_files))]
        known = json.loads((ROOT / "data" / "fineweb.json").read_text())["sha256"]
        for folder in {path.parent for path in paths}:
            known |= read_manifest(folder / "manifest.json")["shards"]
        listed = [path for path in paths if path.name in known]
        for path in listed[self.rank :: self.world_size]:
            if file_sha256(path) != known[path.name]:
                raise UserError(f"{path} has an unexpected sha256: fetch or pack it again")
        return f"{len(listed)} of {len(paths)} shards have a known sha256, and all of these match"

    def check_start(self):
        """Check run_id, and load what the run would start from."""
        run = self.training
        with train_gpt2.agreement() as facts:
            train_gpt2.check_run_id(run)
            start = train_gpt2.restore(run)
            facts["the step of the checkpoint"] = run.step
            facts["the state of the run"] = start
        if start == "finished":
            raise UserError(f"{run.folder} holds a finished run: pass another --run_id")
        return f"{start}, at step {run.step} of {run.args.num_iterations}"

    def check_disk(self):
        """Check that log_dir is writable and has space for the kept checkpoints and one more."""
        folder = Path(self.args.log_dir).absolute()
        while not folder.exists():  # it will be created
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
        weights = 4 * self.weights  # bytes of model.pt or best.pt
        size = weights + 4 * self.states
        text = f"{free / 2**30:.1f} GiB free in {folder}, a checkpoint takes {size / 2**30:.2f}"
        if (self.args.keep_checkpoints + 1) * size > free:
            raise UserError(f"{text}: free some, or pass another --log_dir or --keep_checkpoints")
        kept = max(1, self.args.keep_checkpoints - 1)
        return f"{text}, the finished run up to {(2 * weights + kept * size) / 2**30:.2f}"

    def check_time(self):
        """Predict the time and the memory of the run from three steps and part of a validation."""
        run, args = self.training, self.training.args
        steps_left = args.num_iterations - run.step
        inputs, targets, _ = run.train_loader.batch(run.step)

        def pass_one_sequence():
            run.model(inputs[:1], targets[:1]).backward()

        pass_one_sequence()  # the first one also initializes libraries
        # A step can take minutes on a slow CPU. This does not wait for a GPU: none is that slow.
        seconds_of_ranks = train_gpt2.all_gather_objects(timed(pass_one_sequence))
        step = len(inputs) * max(seconds_of_ranks)
        run.model.zero_grad()
        if step > 60:
            total = timedelta(seconds=round(step * steps_left))
            self.seconds_per_step = step
            # A forward pass takes about a third of the time of a training step.
            tokens_per_step = args.batch_size * args.sequence_length
            self.seconds_per_validation = step / 3 * args.val_tokens / tokens_per_step
            return f"about {total} of training: {step:.0f} s per step, judging by one sequence"
        micro_batch = train_gpt2.validation_batch(run, 0)
        with train_gpt2.agreement():
            try:
                compiling = timed(train_gpt2.compile_model, run.model, args, *micro_batch)
            except Exception as error:
                cause = str(error).splitlines()[0]
                fix = "lower --device_batch_size, install g++ and Python.h, or pass --compile=False"
                raise UserError(f"a micro-batch fails ({cause}): {fix}") from None

        def train_step():
            inputs, targets, _ = run.train_loader.batch(run.step)
            train_gpt2.train_step(run.model, run.optimizers, inputs, targets, args).item()

        def validate_micro_batch():
            with torch.no_grad():
                run.model(*train_gpt2.validation_batch(run, 0)).item()

        train_step()  # the first one creates the optimizers' states
        step = statistics.median(timed(train_step) for _ in range(3))
        tokens_at_once = run.micro_batch * run.world_size * args.sequence_length
        validate_micro_batch()
        validation = args.val_tokens / tokens_at_once * timed(validate_micro_batch)
        # With val_loss_every=0, the only validation is the one after the last step.
        validations = 1 + math.ceil(steps_left / (args.val_loss_every or math.inf))
        seconds = step * steps_left + validation * validations + compiling
        memory = train_gpt2.peak_memory(self.device) / 2**10
        self.seconds_per_step, self.seconds_per_validation = step, validation
        return (
            f"about {timedelta(seconds=round(seconds))} in all: {1000 * step:.1f} ms per step, "
            f"{validation:.1f} s per validation, {compiling:.1f} s of compiling; peak memory "
            f"{memory:.1f} GiB"
        )

    def check_command(self):
        """Choose the number of steps again, from the measured times, and return the command."""
        rule = self.rule
        validating = (1 + VALIDATIONS) * self.seconds_per_validation
        steps = rule.clamp((60 * self.minutes - validating) / self.seconds_per_step)
        minutes = (steps * self.seconds_per_step + validating) / 60
        times_read = steps * rule.tokens_per_step / rule.tokens
        text = (
            f"{steps:,} steps and {1 + VALIDATIONS} validations in about {minutes:.1f} minutes, "
            f"without compiling and saving; the run reads the text {times_read:.2f} times"
        )
        if steps == rule.max_steps:
            text += f", and no run should read it more than {MAX_EPOCHS} times"
        script = os.path.relpath(ROOT / "run.sh")
        settings = rule.settings(self.size, steps)
        quarter_hour = math.ceil(900 / self.seconds_per_step)  # in steps
        settings["save_every"] = min(settings["save_every"], quarter_hour)
        command = shlex.join(["bash", script, *self.argv, *arguments(settings)])
        processes = f"NPROC={self.world_size} " if self.world_size > 1 else ""
        return f"{text}\n\n{processes}{command}"


def minutes_from(text):
    """Return the number in --minutes. Raises UserError if it is not a positive number."""
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    require(0 < minutes < math.inf, f"--minutes={text} must be a number above 0, such as 15")
    return minutes


def main(argv):
    """Run all checks; return the faults of all ranks."""
    checks = Checks(argv)
    if not checks.run("setup"):
        return checks.faults
    checks.run("network")
    if checks.minutes and not checks.run("settings"):
        return checks.faults_of_all_ranks()
    if checks.run("optimizers"):
        checks.run("disk")
    if not checks.faults_of_all_ranks() and checks.run("data"):
        checks.run("shards")
        checks.run("start")
    if not checks.faults_of_all_ranks():
        checks.run("time")
    if checks.minutes and not checks.faults_of_all_ranks():
        checks.run("command")
    return checks.faults_of_all_ranks()


if __name__ == "__main__":
    faults = main(sys.argv[1:])
    if os.environ.get("RANK", "0") == "0" or not dist.is_initialized():
        print("\nto fix:\n  " + "\n  ".join(faults) if faults else "\nall is well")
    train_gpt2.leave_processes()
    sys.exit(1 if faults else 0)
