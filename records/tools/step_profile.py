"""Where a step's time goes: `python train_gpt2.py --profile [--field=value ...]`, or by torchrun.

From fresh weights, compiled and warm, it trains 13 steps as any run would: 5 as they are, 5 with
each part timed, 3 under torch.profiler. Rank 0 prints the timed parts as a table; every rank writes
its profiled steps to log_dir/profile_<time>/. There is no log and no checkpoint.
"""

import contextlib
import functools
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.profiler import ProfilerActivity, profile, record_function

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data"), str(ROOT / "records")]
import describe  # noqa: E402

import train_gpt2  # noqa: E402

PARTS = "forward", "backward", "AdamW", "Newton-Schulz", "communication", "loader", "other"
PLAIN, TIMED, TRACED = 5, 5, 3  # steps; the first also makes the optimizers' states


class Phases:
    """`with phases(part):` gives the time in it to the part, unless a part inside it takes it.

    So nothing counts twice, and the parts add up. In torch.profiler's trace each is a range.
    synchronize: called at both ends, to wait for a device that works behind; clock: in seconds.
    """

    def __init__(self, synchronize=lambda: None, clock=time.perf_counter):
        self.synchronize, self.clock = synchronize, clock
        self.seconds, self.stack, self.settled = dict.fromkeys(PARTS, 0.0), [], 0.0

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
            if isinstance(result, dist.Work):  # describe.failure looks for .wait() in a line
                return SimpleNamespace(wait=self.timed(part, lambda: result.wait()))
            return result

        return wrapper

    @contextlib.contextmanager
    def in_steps(self, run):
        """Time the parts of a run's steps meanwhile."""
        with contextlib.ExitStack() as patches:
            for owner, name, part in (
                (train_gpt2.GPT, "__call__", "forward"),
                (torch.Tensor, "backward", "backward"),
                (run.optimizers[0], "step", "AdamW"),
                (train_gpt2, "zeropower_via_newtonschulz5", "Newton-Schulz"),
                (dist, "all_reduce", "communication"),
                (dist, "reduce", "communication"),
                (run.train_loader, "next_batch", "loader"),
            ):
                function = self.timed(part, getattr(owner, name))
                patches.enter_context(mock.patch.object(owner, name, function))
            yield


def set_up(args):
    """Return a run as train_gpt2.main makes it, compiled and warm, before its first step."""
    steps = PLAIN + TIMED + TRACED
    train_gpt2.require(args.num_iterations >= steps, f"num_iterations={args.num_iterations} must "
                       f"be at least {steps}, the steps of a profile")  # fmt: skip
    rank, world_size, device = train_gpt2.place_in_world(args)
    train_loader, _ = train_gpt2.open_data(args, rank, world_size, device)
    if world_size > 1 and not dist.is_initialized():
        train_gpt2.processes.connect(device, args.comm_timeout)
    torch.manual_seed(args.seed)
    gpt = train_gpt2.GPT(args).to(device)
    optimizers = train_gpt2.build_optimizers(gpt, args, rank, world_size)
    train_gpt2.compile_whole(gpt, args.compile)
    train_gpt2.warm_up(gpt, optimizers, args, train_loader)
    return SimpleNamespace(args=args, gpt=gpt, optimizers=optimizers, train_loader=train_loader)


def train_steps(run, count, phases):
    """Do so many steps as train_gpt2.train does, results read; return of each {part: seconds}."""
    loader, args, steps = run.train_loader, run.args, []
    largest = torch.zeros(len(list(run.gpt.parameters())), device=loader.device)
    for _ in range(count):
        phases.seconds = dict.fromkeys(PARTS, 0.0)
        scale = train_gpt2.lr_multiplier(loader.position // loader.window, args)
        with record_function("step"), phases("other"):
            batch = loader.next_batch()
            loss = train_gpt2.train_step(run.gpt, run.optimizers, *batch, scale, args, largest)
            stop = train_gpt2.sum_over_ranks(torch.zeros((), device=loader.device))  # signals' sum
            torch.stack([loss, stop]).tolist()
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


def newton_schulz_flops(shape):
    """Return the floating-point operations of Muon's five iterations on an (M, N) matrix."""
    m, n = sorted(shape)
    if n < 2 * m:
        return 5 * (4 * m * m * n + 2 * m**3)  # 2 products with X and 1 of (m, m), each time
    return 8 * m * m * n + 28 * m**3  # on the Gram matrix: 4 and 14 in all


def flops(run):
    """Return {part: floating-point operations of this rank in a step}.

    Forward and backward sum to those of describe.summary's mfu. Backward does twice the products of
    forward, but LinearCrossEntropy does all of the head's in forward.
    """
    args, muon, tokens = run.args, run.optimizers[1], run.train_loader.local
    everything = 6 * sum(p.numel() for p in run.gpt.parameters())  # a token
    everything += 12 * args.n_layer * args.n_embd * args.sequence_length
    head = 6 * run.gpt.lm_head.weight.numel()
    owned = [p.flatten(1).shape for p, rank in muon.owner.items() if rank == muon.rank]
    return {"forward": tokens * (head + (everything - head) / 3),
            "backward": tokens * (everything - head) * 2 / 3,
            "Newton-Schulz": sum(map(newton_schulz_flops, owned))}  # fmt: skip


def table(means, work, peak):
    """Return Markdown lines of {part: seconds}; work: {part: FLOP}; peak: FLOP/s, None: unknown."""
    total, work = sum(means.values()), {**work, "step": sum(work.values())}
    lines = ["| part | ms | % | % of peak |", "|---|---:|---:|---:|"]
    for part, seconds in {**means, "step": total}.items():
        known = peak and seconds and part in work
        of_peak = f"{100 * work[part] / seconds / peak:.1f}" if known else "n/a"
        lines.append(f"| {part} | {1000 * seconds:.2f} | {100 * seconds / total:.1f} | {of_peak} |")
    return lines


def compare_ranks(means):
    """Return a line on the steps of all ranks, which all call it; means: {part: seconds}."""
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, means)
    own = [1000 * (sum(each.values()) - each["communication"]) for each in of_ranks]
    slowest = own.index(max(own))
    return (f"without communication: {min(own):.2f} to {max(own):.2f} ms a step, "
            f"the most on rank {slowest}")  # fmt: skip


def trace_folder(args):
    """Make and return log_dir/profile_<time>, with rank 0's time."""
    box = [Path(args.log_dir) / time.strftime("profile_%Y%m%d-%H%M%S")]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    box[0].mkdir(parents=True, exist_ok=True)
    return box[0]


def main(args):
    """Profile steps of a run as args say, here or in torchrun's processes; rank 0 prints."""
    with train_gpt2.attention_kernel(args, train_gpt2.place_in_world(args)[2]):
        run = set_up(args)
        *groups, profiler = measure(run)
    loader = run.train_loader
    trace = trace_folder(args) / f"trace_rank{loader.rank}.json.gz"
    profiler.export_chrome_trace(str(trace))
    means = {part: statistics.mean(step[part] for step in groups[1]) for part in PARTS}
    ranks = [compare_ranks(means)] if dist.is_initialized() else []
    if loader.rank == 0:
        name = describe.environment(loader.device)[1]
        peak = describe.PEAK_FLOPS.get(name)
        medians = [1000 * statistics.median(sum(s.values()) for s in group) for group in groups]
        print(
            f"device:{name} processes:{loader.world_size} threads:{torch.get_num_threads()} "
            f"peak:{f'{peak / 1e12:.0f} TFLOP/s' if peak else 'unknown'}",
            "median step: {:.2f} ms in training, {:.2f} with parts timed, {:.2f} under "
            "torch.profiler".format(*medians),
            f"rank 0, mean of {TIMED} steps of {loader.window:,} tokens; a GPU is awaited at both "
            f"ends of a part, so that overlap shows in the trace alone:\n",
            *table(means, flops(run), peak), "", *ranks,
            f"trace of each rank, for https://ui.perfetto.dev: {trace}",
            sep="\n", flush=True,
        )  # fmt: skip
    if dist.is_initialized():
        dist.destroy_process_group()


def command(argv):
    """Do what the command line says; where that fails, say why once for all ranks; exit with 1."""
    args = None
    try:
        args = train_gpt2.parse_args(argv)
        record(main)(args)
    except Exception as error:
        describe.failure(error, args)
        sys.exit(1)


if __name__ == "__main__":
    command(sys.argv[1:])
