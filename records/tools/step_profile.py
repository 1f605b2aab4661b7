"""Measure where the time of a step goes: `bash run.sh profile [--name=value ...]`, or torchrun.

It initializes and compiles the model and takes a few steps of the training loop under
torch.profiler. Rank 0 prints the time of each part of a step, the work of the host between two
steps, what makes ranks or the host wait, and the operations and kernels that take the most time.
Every rank writes a trace for https://ui.perfetto.dev to log_dir/profile_<run_id>/. There is no log
and no checkpoint.
"""

import contextlib
import dataclasses
import math
import re
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from runlog import ROOT, command
from torch._inductor import config as inductor_config
from torch.profiler import profile, record_function

sys.path.insert(0, str(ROOT))
import train_gpt2

# Steps, rounded up to a multiple of adamw_every. The first ones create the optimizers' states.
WARM_UP, PROFILED = 2, 3
COUNTED = {  # patterns of the profiler's events
    "collectives": "c10d::",
    "reads of device tensors by Python": "host read$",
    "copies between host and GPU": "Memcpy (HtoD|DtoH)",
}


def parts_of_step(run):
    """Return (owner, name, part) of the functions that make up train_gpt2.train_step."""
    return [
        (type(run.model), "__call__", "forward"),
        (torch.Tensor, "backward", "backward"),
        (train_gpt2, "sum_gradients", "gradient sums"),
        (dist.Work, "wait", "waits for ranks"),
        (train_gpt2, "zeropower_via_newtonschulz5", "Newton-Schulz"),
        *((optimizer, "step", type(optimizer).__name__) for optimizer in run.optimizers),
    ]


@contextlib.contextmanager
def in_ranges(parts, range_of):
    """Run each of some functions in the context manager range_of(part)."""
    with contextlib.ExitStack() as patches:
        for owner, name, part in parts:
            in_range = range_of(part)(getattr(owner, name))  # context managers are decorators
            patches.enter_context(mock.patch.object(owner, name, in_range))
        yield


def in_read_range(read, device):
    """Wrap a method of tensors, such as item: mark its calls on the device as "host read"."""

    def marked(tensor):
        on_device = tensor.device.type == device.type
        with record_function("host read") if on_device else contextlib.nullcontext():
            return read(tensor)

    return marked


@contextlib.contextmanager
def synchronized_range(part):
    """A range that contains all of a part's work on the GPU, and nothing else."""
    torch.cuda.synchronize()
    with record_function(part):
        yield
        torch.cuda.synchronize()


class EnoughSteps(Exception):
    """Ends the training loop."""


def take_steps(run, count, range_of=record_function):
    """Profile `count` steps of train_gpt2.train; return ({part: ms per step}, profiler).

    A step lasts from the start of train_step to its next start, so it includes the work of the
    host between the two.
    """
    profiler = profile()
    parts = [
        (type(run.train_loader), "batch", "batch"),
        (train_gpt2, "read_reports", "reports"),
        (train_gpt2, "train_step", "train_step"),
        *parts_of_step(run),
    ]
    first_step = run.step
    reads = {
        name: in_read_range(getattr(torch.Tensor, name), run.device)
        for name in ("item", "tolist", "__bool__", "__float__", "__int__")
    }
    with (
        in_ranges(parts, range_of),
        mock.patch.multiple(torch.Tensor, **reads),
        contextlib.ExitStack() as step_range,
    ):
        train_step = train_gpt2.train_step

        def step_in_range(run, *batch):
            step_range.close()  # of the step before
            if run.step == first_step:
                profiler.start()
            if run.step == first_step + count:
                raise EnoughSteps
            step_range.enter_context(range_of("step"))
            return train_step(run, *batch)

        loop = mock.patch.object(train_gpt2, "train_step", step_in_range)
        with loop, contextlib.suppress(EnoughSteps):
            train_gpt2.train(run)
        profiler.stop()
    names = {"step", *(part for *_, part in parts)}
    rows = [row for row in profiler.key_averages() if row.key in names]
    # On a GPU, each range has a second row for the device, whose CPU time is 0.
    ms = {row.key: row.cpu_time_total / 1000 / count for row in rows if row.cpu_time_total}
    return ms, profiler


def main(args, stop):
    """Profile steps of a run, in this process or in torchrun's."""
    run = train_gpt2.set_up(args, stop)
    every = args.adamw_every
    warm_up, profiled = (math.ceil(steps / every) * every for steps in (WARM_UP, PROFILED))
    # Do not validate or save, and let even a short run take all steps.
    steps = max(args.num_iterations, warm_up + 2 * profiled + every)
    changes = dict(num_iterations=steps, val_loss_every=0, save_every=0)
    run.args = dataclasses.replace(args, **changes)
    if args.compile:
        with inductor_config.patch({"cpp.enable_kernel_profile": True}):  # names fused CPU kernels
            train_gpt2.compile_model(run)
    take_steps(run, warm_up)
    range_of = synchronized_range if run.device.type == "cuda" else record_function
    ms_per_step, _ = take_steps(run, profiled, range_of)
    _, profiler = take_steps(run, profiled)  # does not wait for the GPU, so the trace shows overlap
    folder = Path(args.log_dir, f"profile_{run.folder.name}")
    folder.mkdir(parents=True, exist_ok=True)
    rank = train_gpt2.get_rank()
    profiler.export_chrome_trace(str(folder / f"trace_rank{rank}.json.gz"))
    if rank == 0:
        print(
            f"\nMean time of {profiled} steps of {args.batch_size * args.sequence_length:,} tokens "
            "on rank 0. A part includes the parts that it calls, and waits for the GPU at both "
            "ends.\n"
        )
        for part, ms in sorted(ms_per_step.items(), key=lambda item: -item[1]):
            print(f"{part:<16}{ms:>10.2f} ms{ms / ms_per_step['step']:>8.1%}")
        between = ms_per_step["step"] - ms_per_step["train_step"]
        print(
            f"\nBetween two calls of train_step, the host works for {between:.2f} ms: it reads the "
            "next batch, reads and logs the loss, and sets the learning rates. In each step:\n"
        )
        rows = profiler.key_averages()
        for name, pattern in COUNTED.items():
            count = sum(row.count for row in rows if re.match(pattern, row.key))
            print(f"{count / profiled:>6.3g} {name}")
        order = f"self_{run.device.type}_time_total"
        table = rows.table(order, row_limit=15, max_name_column_width=60)
        print(f"\ntorch.profiler's table of {profiled} steps:\n\n{table}")
        print(f"traces, for https://ui.perfetto.dev: {folder}", flush=True)
    train_gpt2.leave_ranks()


if __name__ == "__main__":
    # Failures are reported as in training. A signal ends the process, and no checkpoint is saved.
    no_handlers = mock.patch.object(train_gpt2.StopRequest, "catch_signals")
    with no_handlers, mock.patch.object(train_gpt2, "main", main):
        command(train_gpt2.cli)
