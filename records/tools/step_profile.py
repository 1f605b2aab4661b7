"""Measure where the time of a step goes: `bash run.sh profile [--field=value ...]`, or torchrun.

It initializes and compiles the model and takes a few training steps as any run would, under
torch.profiler. Rank 0 prints the time of each part of a step, and the operations and kernels that
take the most time. Every rank writes a trace for https://ui.perfetto.dev to
log_dir/profile_<run_id>/. There is no log and no checkpoint.
"""

import contextlib
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

WARM_UP, PROFILED = 2, 3  # steps; the first one creates the optimizers' states


@contextlib.contextmanager
def parts_in_ranges(model, optimizers, range_of):
    """Run each part of a training step in the context manager range_of(part); yield the parts."""
    calls = (
        (type(model), "__call__", "forward"),
        (torch.Tensor, "backward", "backward"),
        (train_gpt2, "zeropower_via_newtonschulz5", "Newton-Schulz"),
        (dist, "all_reduce", "communication"),
        *((optimizer, "step", type(optimizer).__name__) for optimizer in optimizers),
    )
    with contextlib.ExitStack() as patches:
        for owner, name, part in calls:
            in_range = range_of(part)(getattr(owner, name))  # context managers are decorators
            patches.enter_context(mock.patch.object(owner, name, in_range))
        yield [part for *_, part in calls]


@contextlib.contextmanager
def synchronized_range(part):
    """A range that contains all of a part's work on the GPU, and nothing else."""
    torch.cuda.synchronize()
    with record_function(part):
        yield
        torch.cuda.synchronize()


def take_steps(run, count, range_of=record_function):
    """Take `count` steps as train_gpt2.train does; return ({part: ms per step}, profiler)."""
    with profile() as profiler, parts_in_ranges(run.model, run.optimizers, range_of) as parts:
        for _ in range(count):
            with range_of("step"):
                with range_of("loader"):
                    inputs, targets, _ = train_gpt2.read_batch(run)
                arguments = run.model, run.optimizers, inputs, targets, run.args
                train_gpt2.train_step(*arguments, run.stop.check).item()
            run.step += 1
    parts = {"step", "loader", *parts}
    rows = [row for row in profiler.key_averages() if row.key in parts]
    # On a GPU, each range has a second row for the device, whose CPU time is 0.
    ms = {row.key: row.cpu_time_total / 1000 / count for row in rows if row.cpu_time_total}
    return ms, profiler


def main(args, stop):
    """Profile steps of a run, in this process or in torchrun's."""
    run = train_gpt2.set_up(args, stop)
    with inductor_config.patch({"cpp.enable_kernel_profile": True}):  # names fused CPU kernels
        train_gpt2.compile_model(run.model, args, *train_gpt2.validation_batch(run, 0))
    take_steps(run, WARM_UP)
    range_of = synchronized_range if run.device.type == "cuda" else record_function
    ms_per_step, _ = take_steps(run, PROFILED, range_of)
    _, profiler = take_steps(run, PROFILED)  # does not wait for the GPU, so the trace shows overlap
    folder = Path(args.log_dir, f"profile_{run.folder.name}")
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"trace_rank{run.rank}.json.gz"))
    if run.rank == 0:
        tokens = run.train_loader.tokens_per_step
        print(
            f"Mean time of {PROFILED} steps of {tokens:,} tokens on rank 0. A "
            f"part includes the parts that it calls, and waits for the GPU at both ends.\n"
        )
        for part, ms in sorted(ms_per_step.items(), key=lambda item: -item[1]):
            print(f"{part:<16}{ms:>10.2f} ms{ms / ms_per_step['step']:>8.1%}")
        order = f"self_{run.device.type}_time_total"
        table = profiler.key_averages().table(order, row_limit=15, max_name_column_width=60)
        print(f"\ntorch.profiler's table of {PROFILED} steps:\n\n{table}")
        print(f"traces, for https://ui.perfetto.dev: {folder}", flush=True)
    train_gpt2.leave_processes()


if __name__ == "__main__":
    # Failures are reported as in training. A signal ends the process, and no checkpoint is saved.
    no_handlers = mock.patch.object(train_gpt2.StopRequest, "catch_signals")
    with no_handlers, mock.patch.object(train_gpt2, "main", main):
        command(train_gpt2.cli)
