"""Show where the time of a step goes.

    bash run.sh profile [--name=value ...]             # or start this file with torchrun
    bash run.sh profile modern --preset=small          # of records/modern/train_modern.py

It takes a few steps of the training loop under torch.profiler. Rank 0 prints how long the host is
in each part of a step, and the profiler's table of the operations and kernels that take the most
time. Every rank writes a trace for https://ui.perfetto.dev to log_dir/profile_<run_id>/. There is
no log and no checkpoint.
"""

import contextlib
import dataclasses
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from runlog import command
from torch._inductor import config as inductor_config
from torch.profiler import profile, record_function, schedule
from weights import recipe_and_settings, train_gpt2

WARM_UP, PROFILED = 2, 3  # steps; the first ones create the optimizers' states


def parts_of_step(run):
    """Return (owner, name, part) of the functions that make up train_gpt2.train_step."""
    modules = {sys.modules[type(optimizer).__module__] for optimizer in run.optimizers}
    return [
        (type(run.model), "__call__", "forward"),
        (torch.Tensor, "backward", "backward"),
        (train_gpt2, "sum_gradients", "gradient sums"),
        (dist.Work, "wait", "waits for ranks"),
        *((m, "orthogonalize", "Newton-Schulz") for m in modules if hasattr(m, "orthogonalize")),
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


def write_results(run, profiler, names, steps):
    """Write this rank's trace; rank 0 prints the parts of a step with these names, and a table."""
    folder = Path(run.args.log_dir, f"profile_{run.folder.name}")
    folder.mkdir(parents=True, exist_ok=True)
    rank = train_gpt2.get_rank()
    profiler.export_chrome_trace(str(folder / f"trace_rank{rank}.json.gz"))
    if rank == 0:
        rows = profiler.key_averages()
        print(f"Mean of {steps} steps; a part includes those that it calls:")
        for row in sorted(rows, key=lambda row: -row.cpu_time_total):
            if row.key in names and row.cpu_time_total:  # it is 0 in a second row for the GPU
                print(f"{row.key:<16}{row.cpu_time_total / 1000 / steps:>10.2f} ms")
        order = f"self_{run.device.type}_time_total"
        print(rows.table(order, row_limit=25, max_name_column_width=60))
        print(f"traces, for https://ui.perfetto.dev: {folder}", flush=True)


def profile_run(args, recipe, stop):
    """Profile steps of a run, in this process or in torchrun's. It takes the place of main()."""
    run = train_gpt2.set_up(args, recipe, stop)
    # Do not validate or save, and let even a short run take all steps.
    steps = max(args.num_iterations, 2 * (WARM_UP + PROFILED))  # finish() ends training earlier
    run.args = dataclasses.replace(run.args, num_iterations=steps, val_loss_every=0, save_every=0)
    if args.compile:
        with inductor_config.patch({"cpp.enable_kernel_profile": True}):  # names fused CPU kernels
            train_gpt2.compile_model(run)

    parts = [
        (type(run.train_loader), "batch", "batch"),
        (train_gpt2, "train_step", "train_step"),
        (torch.Tensor, "item", "waits for loss"),
        *parts_of_step(run),
    ]

    def finish(profiler):
        names = {"ProfilerStep*", *(part for *_, part in parts)}
        write_results(run, profiler, names, PROFILED)
        stop.received = True  # ends the training loop

    in_turn = schedule(wait=1, warmup=WARM_UP, active=PROFILED, repeat=1)
    with (
        profile(schedule=in_turn, on_trace_ready=finish) as profiler,
        in_ranges(parts, record_function),
    ):
        train_step = train_gpt2.train_step

        def next_step(run, *batch):
            profiler.step()
            return train_step(run, *batch)

        with mock.patch.object(train_gpt2, "train_step", next_step):
            train_gpt2.train(run)


def main(argv):
    recipe, settings = recipe_and_settings(argv)
    with mock.patch.object(train_gpt2, "main", profile_run):
        train_gpt2.cli(settings, recipe)


if __name__ == "__main__":
    command(main)
