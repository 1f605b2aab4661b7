"""Measure where the time of a step goes: `bash run.sh profile [--field=value ...]`, or by torchrun.

It initializes and compiles the model and takes a few training steps as any run would: some with
each part timed, then some under torch.profiler. Rank 0 prints the time of each part and the table
of torch.profiler. Every rank writes a trace for https://ui.perfetto.dev to log_dir/profile_<time>/.
There is no log and no checkpoint.
"""

import contextlib
import functools
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from runlog import ROOT, command
from torch._inductor import config as inductor_config
from torch.profiler import profile, record_function

sys.path.insert(0, str(ROOT))
import train_gpt2

WARM_UP, TIMED, TRACED = 2, 5, 3  # steps; the first one creates the optimizers' states


class Phases:
    """`with phases(part):` adds the duration of the block to that part, in seconds.

    Time in a nested part counts only for the nested part, so the parts add up. In the trace of
    torch.profiler, each part is a range. synchronize: called at both ends, to wait for a GPU.
    clock: returns the time in seconds.
    """

    def __init__(self, synchronize=lambda: None, clock=time.perf_counter):
        self.synchronize, self.clock = synchronize, clock
        self.seconds = Counter()  # of each part
        self.stack = []  # the current part and those around it, innermost last
        self.settled = 0.0  # the time up to which all time has been added to a part

    @contextlib.contextmanager
    def __call__(self, part):
        with record_function(part):
            self.settle()
            self.stack.append(part)
            yield
            self.settle()
            self.stack.pop()

    def settle(self):
        """Add the time since the last call to the innermost part."""
        self.synchronize()
        now = self.clock()
        if self.stack:
            self.seconds[self.stack[-1]] += now - self.settled
        self.settled = now

    def timed(self, part, function):
        """Wrap a function so that its time, and the wait for its collective, count for a part."""

        @functools.wraps(function)
        def wrapper(*arguments, **named):
            with self(part):
                result = function(*arguments, **named)
            if isinstance(result, dist.Work):
                return SimpleNamespace(wait=self.timed(part, result.wait))
            return result

        return wrapper

    @contextlib.contextmanager
    def in_steps(self, optimizers, *calls):
        """Time the parts of training steps, and further calls: (object, method, part)."""
        calls += (
            (train_gpt2.GPT, "__call__", "forward"),
            (torch.Tensor, "backward", "backward"),
            (train_gpt2, "zeropower_via_newtonschulz5", "Newton-Schulz"),
            (dist, "all_reduce", "communication"),
            *((optimizer, "step", type(optimizer).__name__) for optimizer in optimizers),
        )
        with contextlib.ExitStack() as patches:
            for owner, name, part in calls:
                function = self.timed(part, getattr(owner, name))
                patches.enter_context(mock.patch.object(owner, name, function))
            yield


class Run:
    """A run as train_gpt2.main sets it up, compiled and warm, before its first step."""

    def __init__(self, args):
        self.args = args
        self.rank, world_size, self.device = place = train_gpt2.join_processes(args)
        train_gpt2.configure_backend(args, self.device)
        self.loader, val_loader = train_gpt2.on_all_ranks(train_gpt2.open_data, args, *place)
        torch.manual_seed(args.seed)
        dtype = train_gpt2.product_dtype(args, self.device)
        self.gpt = train_gpt2.GPT(args, dtype).to(self.device)
        self.optimizers = train_gpt2.build_optimizers(self.gpt, args, self.rank, world_size)
        with inductor_config.patch({"cpp.enable_kernel_profile": True}):  # names fused CPU kernels
            train_gpt2.warm_up(self.gpt, args, val_loader)

    def steps(self, count, phases):
        """Take `count` steps as train_gpt2.train does, with each part timed."""
        with phases.in_steps(self.optimizers, (self.loader, "read_batch", "loader")):
            for _ in range(count):
                with record_function("step"), phases("other"):
                    batch = self.loader.next_batch()
                    arguments = self.gpt, self.optimizers, *batch, 1.0, self.args
                    train_gpt2.train_step(*arguments)[0].item()

    def measure(self):
        """Return ({part: seconds per step}, profiler)."""
        self.steps(WARM_UP, Phases())
        phases = Phases(torch.cuda.synchronize) if self.device.type == "cuda" else Phases()
        self.steps(TIMED, phases)
        with profile() as profiler:
            self.steps(TRACED, Phases())  # does not wait for the GPU, so the trace shows overlap
        return {part: total / TIMED for part, total in phases.seconds.items()}, profiler


def main(args, stop=None):
    """Profile steps of a run, in this process or in torchrun's."""
    run = Run(args)
    seconds, profiler = run.measure()
    name = train_gpt2.all_gather_objects(time.strftime("profile_%Y%m%d-%H%M%S"))[0]
    folder = Path(args.log_dir, name)
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"trace_rank{run.rank}.json.gz"))
    if run.rank == 0:
        total = sum(seconds.values())
        print(
            f"{1000 * total:.2f} ms per step of {run.loader.tokens_per_step:,} tokens, mean of "
            f"{TIMED} steps on rank 0. Each part waits for the GPU, so nothing overlaps.\n"
        )
        for part, part_seconds in sorted(seconds.items(), key=lambda item: -item[1]):
            print(f"{part:<16}{1000 * part_seconds:>10.2f} ms{part_seconds / total:>8.1%}")
        order = f"self_{run.device.type}_time_total"
        table = profiler.key_averages().table(order, row_limit=15, max_name_column_width=60)
        print(f"\ntorch.profiler's table of {TRACED} steps:\n\n{table}")
        print(f"traces, for https://ui.perfetto.dev: {folder}", flush=True)
    train_gpt2.leave_processes()


if __name__ == "__main__":
    # Failures are reported as those of training. A signal ends the profile, which saves nothing.
    no_handlers = mock.patch.object(train_gpt2.StopRequest, "catch_signals")
    with no_handlers, mock.patch.object(train_gpt2, "main", main):
        command(train_gpt2.cli)
