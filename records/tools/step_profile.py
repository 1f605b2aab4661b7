"""Where a step's time goes: `bash run.sh profile [--field=value ...]`, or by torchrun.

From fresh weights, compiled and warm, it trains 13 steps as any run would: 5 as they are, 5 with
each part timed, 3 under torch.profiler. Rank 0 prints tables of the timed parts and of the most
expensive kernels; every rank writes its profiled steps to log_dir/profile_<time>/. There is no log
and no checkpoint.
"""

import contextlib
import functools
import re
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch._inductor import config as inductor_config
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

TOOLS = Path(__file__).resolve().parent
sys.path[:0] = [str(TOOLS.parent.parent), str(TOOLS)]
from runlog import PEAK_FLOPS, flops_per_token  # noqa: E402

import train_gpt2  # noqa: E402
from train_gpt2 import UserError, device_name  # noqa: E402

PLAIN, TIMED, TRACED = 5, 5, 3  # steps; the first also makes the optimizers' states


def parts_of(optimizers):
    """Return the parts of a step; an optimizer's is its step without the parts inside it."""
    names = dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers)
    return ["forward", "backward", *names, "Newton-Schulz", "communication", "loader", "other"]


class Phases:
    """`with phases(part):` gives the time in it to the part, unless a part inside it takes it.

    So nothing counts twice, and the parts add up. In torch.profiler's trace each is a range.
    synchronize: called at both ends, to wait for a device that works behind; clock: in seconds.
    """

    def __init__(self, synchronize=lambda: None, clock=time.perf_counter):
        self.synchronize, self.clock = synchronize, clock
        self.seconds = Counter()  # of each part
        self.stack = []  # of parts, the innermost last
        self.settled = 0.0  # time until which all is given to a part

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
        """Give the time since the last call to the innermost part."""
        self.synchronize()
        now = self.clock()
        if self.stack:
            self.seconds[self.stack[-1]] += now - self.settled
        self.settled = now

    def timed(self, part, function):
        """Return function, its time given to the part, as is the wait for a work it returns."""

        @functools.wraps(function)
        def wrapper(*arguments, **named):
            with self(part):
                result = function(*arguments, **named)
            if isinstance(result, dist.Work):
                return SimpleNamespace(wait=self.timed(part, result.wait))
            return result

        return wrapper

    @contextlib.contextmanager
    def in_steps(self, run):
        """Time the parts of a run's steps meanwhile."""
        calls = [
            (train_gpt2.GPT, "__call__", "forward"),
            (torch.Tensor, "backward", "backward"),
            (train_gpt2, "zeropower_via_newtonschulz5", "Newton-Schulz"),
            (dist, "all_reduce", "communication"),
            (run.train_loader, "read_batch", "loader"),
        ]
        calls += [(optimizer, "step", type(optimizer).__name__) for optimizer in run.optimizers]
        with contextlib.ExitStack() as patches:
            for owner, name, part in calls:
                function = self.timed(part, getattr(owner, name))
                patches.enter_context(mock.patch.object(owner, name, function))
            yield


def set_up(args, stop=None):
    """Return a run as train_gpt2.main makes it, compiled and warm, before its first step."""
    stop = stop or train_gpt2.StopRequest()
    steps = PLAIN + TIMED + TRACED
    if args.num_iterations < steps:
        raise UserError(f"num_iterations={args.num_iterations}: a profile takes {steps} steps")
    rank, world_size, device = train_gpt2.join_processes(args)
    train_gpt2.configure_backend(args, device)
    place = rank, world_size, device
    train_loader, val_loader = train_gpt2.on_all_ranks(train_gpt2.open_data, args, *place)
    torch.manual_seed(args.seed)
    gpt = train_gpt2.GPT(args, train_gpt2.product_dtype(args, device)).to(device)
    optimizers = train_gpt2.build_optimizers(gpt, args, rank, world_size)
    with inductor_config.patch({"cpp.enable_kernel_profile": True}):  # names fused kernels of CPUs
        train_gpt2.warm_up(gpt, args, val_loader)
    return SimpleNamespace(
        args=args,
        stop=stop,
        gpt=gpt,
        optimizers=optimizers,
        parts=parts_of(optimizers),
        train_loader=train_loader,
    )


def train_steps(run, count, phases):
    """Do so many steps as train_gpt2.train does, results read; return of each {part: seconds}.

    Raises UserError if a signal came.
    """
    loader, steps = run.train_loader, []
    for _ in range(count):
        phases.seconds = Counter()
        scale = train_gpt2.lr_multiplier(loader.position // loader.tokens_per_step, run.args)
        with record_function("step"), phases("other"):
            try:
                batch = train_gpt2.read_batch_or_stop(loader, run.stop)
                loss, _ = train_gpt2.train_step(
                    run.gpt, run.optimizers, *batch, scale, run.args, run.stop.check
                )
            except train_gpt2.StopTraining as request:
                raise UserError(request.failure or "stopped by a signal") from None
            loss.item()
            loader.advance()
        steps.append(phases.seconds)
    return steps


def measure(run):
    """Return (plain steps, timed steps, traced steps, profiler); steps as from train_steps."""
    cuda = run.train_loader.device.type == "cuda"
    plain = train_steps(run, PLAIN, Phases())
    phases = Phases(torch.cuda.synchronize) if cuda else Phases()
    with phases.in_steps(run):
        timed = train_steps(run, TIMED, phases)
    phases = Phases()  # awaits no device: the trace shows what overlaps
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    with phases.in_steps(run), profile(activities=activities) as profiler:
        traced = train_steps(run, TRACED, phases)
    return plain, timed, traced, profiler


# ---- What is printed ----------------------------------------------------------------------------
def flops(run):
    """Return {part: floating-point operations of this rank in a step}.

    Forward and backward sum to flops_per_token. Backward does twice the products of forward, but
    ChunkedCrossEntropy does all of the head's in forward.
    """
    loader = run.train_loader
    tokens = loader.tokens_per_step // loader.world_size
    everything = flops_per_token(run.gpt, run.args)
    head = 6 * run.gpt.lm_head.weight.numel()
    newton_schulz = 0
    for optimizer in run.optimizers:
        for p, rank in getattr(optimizer, "owner", {}).items():
            if rank == loader.rank:
                newton_schulz += 2 * train_gpt2.matrix_cost(p)
    return {
        "forward": tokens * (head + (everything - head) / 3),
        "backward": tokens * (everything - head) * 2 / 3,
        "Newton-Schulz": newton_schulz,
    }


def markdown(head, rows):
    rows = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def part_table(means, work, peak):
    """Return Markdown of {part: seconds}; work: {part: FLOP}; peak: FLOP/s, None: unknown."""
    total = sum(means.values())
    work = {**work, "step": sum(work.values())}
    rows = []
    for part, seconds in {**means, "step": total}.items():
        known = peak and seconds and part in work
        of_peak = f"{100 * work[part] / seconds / peak:.1f}" if known else "n/a"
        rows.append([part, f"{1000 * seconds:.2f}", f"{100 * seconds / total:.1f}", of_peak])
    return markdown(["part", "ms", "%", "% of peak"], rows)


def kernel_table(profiler, device, ranges):
    """Return Markdown of the ten kernels, of a CPU operators, that take most time themselves.

    ranges: names of ours in the trace, which are no operators.
    """
    cuda = device.type == "cuda"
    found = []
    for event in profiler.key_averages():
        ours = event.key in ranges or getattr(event, "is_user_annotation", False)
        if not ours and event.device_type == (DeviceType.CUDA if cuda else DeviceType.CPU):
            us = event.self_device_time_total if cuda else event.self_cpu_time_total
            found.append((us, event.count, event.key.replace("|", "/")[:60]))
    total = sum(us for us, _, _ in found)
    rows = []
    classes = Counter()
    for us, _, name in found:
        classes[kernel_class(name)] += us
    for us, count, name in sorted(found, reverse=True)[:10]:
        calls, ms = count / TRACED, us / 1000 / TRACED
        rows.append([f"`{name}`", f"{calls:.1f}", f"{ms:.2f}", f"{100 * us / total:.1f}"])
    for kind, us in classes.most_common() if cuda else ():
        rows.append([f"all of {kind}", "", f"{us / 1000 / TRACED:.2f}", f"{100 * us / total:.1f}"])
    return markdown(["kernel" if cuda else "operator", "calls a step", "ms a step", "%"], rows)


KERNEL_CLASSES = {  # parts of the names of CUDA kernels
    "element-wise": "triton",
    "attention": "flash|fmha|sdpa|attention",
    "products": "gemm|nvjet|cutlass|cublas|xmma",
    "collectives": "nccl",
}


def kernel_class(name):
    """Return the class of a CUDA kernel, as records/tools/plan.py names parts of a step."""
    found = [kind for kind, names in KERNEL_CLASSES.items() if re.search(names, name.lower())]
    return found[0] if found else "other"


def compare_ranks(means):
    """Return a line on the steps of all ranks, which all call it; means: {part: seconds}."""
    own = []
    for each in train_gpt2.all_gather_objects(means):
        own.append(1000 * (sum(each.values()) - each["communication"]))
    slowest = own.index(max(own))
    return (
        f"without communication: {min(own):.2f} to {max(own):.2f} ms a step, "
        f"the most on rank {slowest}"
    )


def trace_folder(args):
    """Make and return log_dir/profile_<time>, with rank 0's time."""
    name = train_gpt2.all_gather_objects(time.strftime("profile_%Y%m%d-%H%M%S"))[0]
    folder = Path(args.log_dir, name)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def report(run, groups, means, profiler):
    """Print what rank 0 measured; groups: plain, timed and traced steps."""
    loader = run.train_loader
    name = device_name(loader.device)
    peak = PEAK_FLOPS.get(name) if run.gpt.dtype == torch.bfloat16 else None
    medians = [1000 * statistics.median(sum(s.values()) for s in group) for group in groups]
    print(
        f"device:{name} processes:{loader.world_size} threads:{torch.get_num_threads()} "
        f"products:{run.gpt.dtype} peak:{f'{peak / 1e12:.0f} TFLOP/s' if peak else 'unknown'}\n"
        "median step: {:.2f} ms in training, {:.2f} with parts timed, {:.2f} under "
        "torch.profiler\n".format(*medians)
        + f"rank 0, mean of {TIMED} steps of {loader.tokens_per_step:,} tokens; a GPU is awaited "
        f"at both ends of a part, so that overlap shows in the trace alone:\n"
    )
    print(part_table(means, flops(run), peak))
    print(f"\nthe most expensive of {TRACED} steps under torch.profiler:\n")
    print(kernel_table(profiler, loader.device, {"step", *run.parts}))
    print()


def main(args, stop=None):
    """Profile steps of a run as args say, here or in torchrun's processes; rank 0 prints."""
    run = set_up(args, stop)
    *groups, profiler = measure(run)
    rank = run.train_loader.rank
    trace = trace_folder(args) / f"trace_rank{rank}.json.gz"
    profiler.export_chrome_trace(str(trace))
    means = {part: statistics.mean(step[part] for step in groups[1]) for part in run.parts}
    ranks = compare_ranks(means)  # all must take part
    if rank == 0:
        report(run, groups, means, profiler)
        if dist.is_initialized():
            print(ranks)
        print(f"trace of each rank, for https://ui.perfetto.dev: {trace}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def command(argv):
    """Do what the command line says; signals and failures are those of a training."""
    with mock.patch.object(train_gpt2, "main", main):
        train_gpt2.cli(argv)


if __name__ == "__main__":
    command(sys.argv[1:])
