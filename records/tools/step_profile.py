"""Measure where the time of a step goes: `bash run.sh profile [--field=value ...]`, or by torchrun.

From fresh weights, compiled and warm, it trains a few steps as any run would: some with each part
timed, then some under torch.profiler. Rank 0 prints the time of each part and torch.profiler's
table. Every rank writes its trace, which https://ui.perfetto.dev shows, to log_dir/profile_<time>/.
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
from torch._inductor import config as inductor_config
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_gpt2

WARM_UP, TIMED, TRACED = 2, 5, 3  # steps; the first makes the optimizers' states


class Phases:
    """`with phases(part):` adds the time in it to that part, except the time of parts inside it.

    So no time counts twice, and the parts add up. In torch.profiler's trace, each part is a range.
    synchronize: called at both ends, to wait for a GPU. clock: returns the time in seconds.
    """

    def __init__(self, synchronize=lambda: None, clock=time.perf_counter):
        self.synchronize, self.clock = synchronize, clock
        self.seconds = Counter()  # of each part
        self.stack = []  # of the parts, the innermost last
        self.settled = 0.0  # the time up to which all time has been added to a part

    @contextlib.contextmanager
    def __call__(self, part):
        with record_function(part):
            self.settle()
            self.stack.append(part)
            try:
                yield
            finally:
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
        """Return the function with its time, and the wait for its collective, added to a part."""

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


def set_up(args, stop=None):
    """Return a run as train_gpt2.main makes it, compiled and warm, before its first step."""
    rank, world_size, device = train_gpt2.join_processes(args)
    train_gpt2.configure_backend(args, device)
    place = rank, world_size, device
    train_loader, val_loader = train_gpt2.on_all_ranks(train_gpt2.open_data, args, *place)
    torch.manual_seed(args.seed)
    gpt = train_gpt2.GPT(args, train_gpt2.product_dtype(args, device)).to(device)
    optimizers = train_gpt2.build_optimizers(gpt, args, rank, world_size)
    with inductor_config.patch({"cpp.enable_kernel_profile": True}):  # names fused CPU kernels
        train_gpt2.warm_up(gpt, args, val_loader)
    stop = stop or train_gpt2.StopRequest()
    return SimpleNamespace(
        args=args, stop=stop, gpt=gpt, optimizers=optimizers, train_loader=train_loader
    )


def train_steps(run, count, phases):
    """Do `count` steps as train_gpt2.train does. Raises UserError if a signal came."""
    for _ in range(count):
        with record_function("step"), phases("other"):
            batch = run.train_loader.next_batch()
            loss, _ = train_gpt2.train_step(run.gpt, run.optimizers, *batch, 1.0, run.args)
            loss.item()
        if run.stop.time is not None:
            raise train_gpt2.UserError("stopped by a signal")


def measure(run):
    """Return ({part: seconds in a step}, profiler)."""
    cuda = run.train_loader.device.type == "cuda"
    train_steps(run, WARM_UP, Phases())
    phases = Phases(torch.cuda.synchronize) if cuda else Phases()
    with phases.in_steps(run):
        train_steps(run, TIMED, phases)
    seconds = {part: total / TIMED for part, total in phases.seconds.items()}
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    untimed = Phases()  # does not wait for the GPU, so the trace shows what overlaps
    with untimed.in_steps(run), profile(activities=activities) as profiler:
        train_steps(run, TRACED, untimed)
    return seconds, profiler


def report(run, seconds, profiler):
    """Print the two tables."""
    loader = run.train_loader
    total = sum(seconds.values())
    print(
        f"{train_gpt2.device_name(loader.device)}, {loader.world_size} processes, {run.gpt.dtype}; "
        f"{1000 * total:.2f} ms per step of {loader.tokens_per_step:,} tokens, mean of {TIMED} "
        f"steps on rank 0. Each part waits for the GPU, so nothing overlaps.\n"
    )
    for part, time_of_part in sorted(seconds.items(), key=lambda item: -item[1]):
        print(f"{part:<16}{1000 * time_of_part:>10.2f} ms{time_of_part / total:>8.1%}")
    print(f"\ntorch.profiler's table of {TRACED} steps:\n")
    device = "cuda" if loader.device.type == "cuda" else "cpu"
    averages = profiler.key_averages()
    print(averages.table(f"self_{device}_time_total", row_limit=15, max_name_column_width=60))


def main(args, stop=None):
    """Profile steps of a run, in this process or in torchrun's."""
    run = set_up(args, stop)
    seconds, profiler = measure(run)
    rank = run.train_loader.rank
    name = train_gpt2.all_gather_objects(time.strftime("profile_%Y%m%d-%H%M%S"))[0]
    folder = Path(args.log_dir, name)
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"trace_rank{rank}.json.gz"))
    if rank == 0:
        report(run, seconds, profiler)
        print(f"traces, for https://ui.perfetto.dev: {folder}", flush=True)
    train_gpt2.leave_processes()


if __name__ == "__main__":
    with mock.patch.object(train_gpt2, "main", main):  # failures are reported as those of training
        train_gpt2.cli(sys.argv[1:])
