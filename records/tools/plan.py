"""Plan a training step on NVIDIA GPUs without one: time, launches, bytes and memory by part.

    python records/tools/plan.py --device=H100 --world_size=8 [--field=value of Hyperparameters ...]
    python records/tools/plan.py --record7    # the public record's own step, whose time is known

Forward and backward are the kernels that Inductor generates for the GPU (gpu_compiler.py). The rest
of the step is counted by running train_step on fake tensors: its operations and its collectives.
Times follow from the rates below, which are stated, not measured.
"""

import argparse
import contextlib
import dataclasses
import math
import sys
import typing
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "records" / "tools")]
import gpu_compiler  # noqa: E402  before torch
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from report import command, markdown  # noqa: E402
from step_profile import Phases  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.flop_counter import flop_registry  # noqa: E402

import train_gpt2  # noqa: E402


# ---- Rates: stated, not measured ----------------------------------------------------------------
class Rates(typing.NamedTuple):
    """Dense bf16 FLOP/s, bytes/s of memory, bytes/s of NCCL's bus bandwidth in a node of 8 GPUs."""

    products: float
    memory: float
    bus: float


DEVICES = {  # products and memory from the vendor's data sheets, without sparsity
    "H100": Rates(989e12, 3.35e12, 400e9),  # SXM
    "H200": Rates(989e12, 4.8e12, 400e9),  # seen on one: 770 to 800 TFLOP/s, copies at 4.3 TB/s
    "A100": Rates(312e12, 2.04e12, 230e9),  # SXM, 80 GB
    "4090": Rates(165e12, 1.01e12, 20e9),  # products that accumulate in float32; PCIe
}
PRODUCT = 0.75  # of the peak: large products; an H200 was seen to reach 0.78 to 0.81
SPLIT_PRODUCT = 0.6  # less than one wave of tiles: split along the sum
TILES = {256: 1.0, 128: 0.9}  # columns of a tile of 128 rows: its relative speed, a guess
SMALL_PRODUCT = 0.4  # of the peak: Newton-Schulz's matrices of 768 rows do not fill a GPU
ATTENTION = {"forward": 0.35, "backward": 0.3}  # of the peak: about 350 TFLOP/s on an H100
STREAM = 0.85  # of the memory's bandwidth: Triton kernels; copies were seen to reach 0.9
SCATTER = 0.4  # of the memory's bandwidth: atomic additions
COMPILED_LAUNCH = 3e-6  # s between two kernels of a graph
EAGER_LAUNCH = 5e-6  # s to launch an operation from Python
COLLECTIVE = 40e-6  # s to start a collective; 45 to 90 us are seen with small tensors
PUBLIC_MS = 141.8  # a step of record 7 on 8xH100, by its public log
TRAFFIC = {  # bytes that a rank sends for each byte of the largest tensor, by world size
    "all_reduce": lambda W: 2 * (W - 1) / W,
    "reduce_scatter_tensor": lambda W: (W - 1) / W,
    "all_gather_into_tensor": lambda W: (W - 1) / W,
}
NOT_KNOWN = """\
Not known without a GPU: which candidate configuration of a kernel is fastest (tuning runs on the
GPU), how fast cuBLAS and cuDNN are at these shapes, how well kernels use the L2 cache, whether
Python keeps ahead of the GPU, how collectives slow down kernels beside them, clocks and power,
fragmentation of memory, and the time that ranks wait for the slowest."""


def product_share(kernel):
    """Return the share of the peak that a product reaches: the last wave of tiles is not full."""
    rows, columns = kernel.sizes[-2:]
    processors = gpu_compiler.chosen.gpu.multi_processor_count
    tiles = {width: math.ceil(rows / 128) * math.ceil(columns / width) for width in TILES}
    if tiles[256] < processors:
        return SPLIT_PRODUCT
    waves = {width: count / processors for width, count in tiles.items()}
    return PRODUCT * max(TILES[width] * n / math.ceil(n) for width, n in waves.items())


def seconds_of(kernel, graph, rates):
    """Return the time of one launch: its operations or its bytes, whichever takes longer."""
    share = 1.0
    if kernel.kind == "attention":
        share = ATTENTION["backward" if graph.kind == "backward" else "forward"]
    elif kernel.kind == "product":
        share = product_share(kernel)
    stream = SCATTER if kernel.kind == "scatter" else STREAM
    compute = kernel.flops / rates.products / share
    return max(compute, kernel.bytes / rates.memory / stream) + COMPILED_LAUNCH


def part_of(kernel, graph, vocab_size):
    """Return the part of the step that a kernel belongs to; the head has sizes of vocab_size."""
    if kernel.kind == "scatter":
        return "embedding's gradient"
    if kernel.kind == "attention":
        return f"attention, {graph.kind}"
    what = "products" if kernel.kind == "product" else "element-wise"
    if any(size % vocab_size == 0 for size in kernel.sizes):
        return f"{what} of head and loss"
    return f"{what} of blocks, {graph.kind}"


# ---- A step on fake tensors ---------------------------------------------------------------------
class Clock(TorchDispatchMode):
    """Counts the time of what runs in it: compiled graphs, single operations, collectives.

    A collective runs beside the rest until it is awaited, after those that were called before it.
    """

    def __init__(self, args, rates, world_size):
        super().__init__()
        self.args, self.rates, self.world_size = args, rates, world_size
        self.seconds = self.network_free = 0.0
        self.paused = False
        self.phases = Phases(clock=lambda: self.seconds)
        self.usage = {}  # part: Counter of launches, bytes, flops
        self.sent = {}  # name of a collective: [calls, bytes]

    @classmethod
    def is_infra_mode(cls):
        return True  # torch.compile ignores this mode

    def spend(self, part, seconds, **usage):
        """Let a part take time; usage: launches, bytes, flops."""
        with self.phases(part):
            self.seconds += seconds
        self.usage.setdefault(part, Counter()).update(usage)

    @contextlib.contextmanager
    def running(self, graph):
        """Spend the time of all kernels of a graph, and none for running it on fake tensors."""
        for kernel in graph.kernels:
            seconds = kernel.launches * seconds_of(kernel, graph, self.rates)
            usage = dict(launches=1, bytes=kernel.bytes, flops=kernel.flops)
            usage = {name: kernel.launches * value for name, value in usage.items()}
            self.spend(part_of(kernel, graph, self.args.vocab_size), seconds, **usage)
        self.paused = True
        yield
        self.paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        view = any(r.alias_info and not r.alias_info.is_write for r in returns)
        free = ("empty", "detach", "_unsafe_view", "scalar_tensor")
        counted = func.namespace == "aten" and not func.__name__.startswith(free)
        if counted and not view and not self.paused:
            flops = 0
            if func.overloadpacket in flop_registry:
                flops = flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
            tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
            if not returns:  # it writes the tensors that it is given
                writes = [a for s, a in zip(func._schema.arguments, args) if s.alias_info]
                tensors += [t for t in tree_leaves(writes) if isinstance(t, torch.Tensor)]
            self.operation(sum(t.nbytes for t in tensors), flops)
        return out

    def operation(self, moved, flops=0):
        """Spend the time of an operation that is launched from Python, in the current part."""
        compute = flops / self.rates.products / SMALL_PRODUCT
        seconds = max(EAGER_LAUNCH, compute, moved / self.rates.memory / STREAM)
        part = {"backward": "gradient accumulation"}.get(self.phases.stack[-1])
        part = part or self.phases.stack[-1].replace("forward", "n-grams")
        self.spend(part, seconds, launches=1, bytes=moved, flops=flops)

    def collective(self, name):
        """Return what replaces torch.distributed's function of this name."""

        def call(*tensors, async_op=False, **named):
            values = [t for t in tree_leaves((tensors, named)) if isinstance(t, torch.Tensor)]
            size = max(t.nbytes for t in values)
            calls = self.sent.setdefault(name, [0, 0])
            calls[0] += 1
            calls[1] += size
            self.network_free = max(self.network_free, self.seconds) + COLLECTIVE
            self.network_free += TRAFFIC[name](self.world_size) * size / self.rates.bus
            work = Sent(self, self.network_free)
            return work if async_op else work.wait()

        return call

    @contextlib.contextmanager
    def timing(self, optimizers):
        """Time a step of train_gpt2.train_step, on rank 0 of world_size."""
        run = SimpleNamespace(train_loader=SimpleNamespace(read_batch=None), optimizers=optimizers)
        collectives = {name: self.collective(name) for name in TRAFFIC}
        patches = mock.patch.multiple(dist, **collectives)
        with patches, self.phases.in_steps(run), self.phases("other"), self:
            yield


class Sent(dist.Work):
    """What an asynchronous collective returns."""

    def __init__(self, clock, end):
        super().__init__()
        self.clock, self.end = clock, end

    def wait(self):
        """Let the clock go on to the end of the transfer."""
        self.clock.seconds = max(self.clock.seconds, self.end)


class Lookup(torch.autograd.Function):
    """Stands for the n-gram table, which is not compiled. Its gradient is dense, as for ranks."""

    @staticmethod
    def forward(ctx, weight, inputs, max_ngram, clock):
        ctx.weight, ctx.rows, ctx.clock = weight, inputs.numel() * (max_ngram - 1), clock
        row = weight.nbytes / len(weight)
        for _ in range(7 * (max_ngram - 1)):  # the hashes
            clock.operation(inputs.nbytes)
        clock.operation(row * (ctx.rows + inputs.numel()))
        return weight.new_empty(*inputs.shape, weight.size(1))

    @staticmethod
    def backward(ctx, gradient):
        # Sparse gradients of further micro-batches are not added, but appended.
        ctx.clock.operation(gradient.nbytes + 4 * ctx.rows * gradient.size(-1))
        grad = torch.empty_like(ctx.weight) if ctx.weight.grad is None else None
        return grad, None, None, None


def replace_table(model, args, clock):
    """Let Lookup stand for the model's n-gram table."""

    @torch.compiler.disable
    def forward(inputs):
        return Lookup.apply(model.ngrams.weight, inputs, args.max_ngram, clock())

    if model.ngrams is not None:
        model.ngrams.forward = forward


# ---- The plan -----------------------------------------------------------------------------------
@dataclasses.dataclass
class Plan:
    """A planned step. seconds: by part. memory: bytes by use, whose sum is the peak."""

    args: train_gpt2.Hyperparameters
    graphs: list
    clock: Clock
    memory: dict
    micro_batches: int

    @property
    def seconds(self):
        """Return the time of a step, by part."""
        return {part: s for part, s in self.clock.phases.seconds.items() if s}

    @property
    def mfu(self):
        """Return the model FLOPs of a step over those that the GPU could do meanwhile."""
        flops = sum(k.launches * k.flops for g in self.graphs[1:] for k in g.kernels)
        return self.micro_batches * flops / sum(self.seconds.values()) / self.clock.rates.products


def planned(args, device="H100", world_size=1, build=None):
    """Return the Plan of a step on rank 0. build: makes another model than train_gpt2.GPT.

    Raises UserError if batch_size is not a multiple of world_size.
    """
    if args.batch_size % world_size:
        raise train_gpt2.UserError(f"world_size={world_size} must divide {args.batch_size}")
    gpu_compiler.chosen.gpu = gpu_compiler.GPUS[device]
    local = args.batch_size // world_size
    micro = train_gpt2.micro_batch_size(local, args.device_batch_size)
    args = dataclasses.replace(args, device_batch_size=micro)
    clocks = [Clock(args, DEVICES[device], world_size) for _ in range(3)]
    build = build or (lambda: train_gpt2.GPT(args, torch.bfloat16))
    if world_size > 1:
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    with gpu_compiler.on_gpu(build, lambda graph: clocks[0].running(graph)) as (model, graphs):
        replace_table(model, args, lambda: clocks[0])
        shape = local, args.sequence_length
        inputs = torch.zeros(shape, dtype=torch.int64, device="cuda")
        targets = torch.zeros_like(inputs)
        batch = inputs[:micro], targets[:micro]
        reads_the_loss = gpu_compiler.fake_tensor.DataDependentOutputException  # which ends warm_up
        with contextlib.suppress(reads_the_loss), clocks[0].phases("warm-up"):
            train_gpt2.warm_up(model, args, SimpleNamespace(next_batch=lambda: batch))
        model.zero_grad()
        optimizers = train_gpt2.build_optimizers(model, args, 0, world_size)
        for _ in range(2):  # the first step makes the optimizers' states
            clock = clocks.pop(0) and clocks[0]
            with clock.timing(optimizers):
                train_gpt2.train_step(model, optimizers, inputs, targets, 1.0, args)
        weights = sum(p.nbytes for p in model.parameters())
        states = [t for o in optimizers for state in o.state.values() for t in state.values()]
    if world_size > 1:
        dist.destroy_process_group()
    _, forward, backward = graphs
    memory = {"weights": weights, "optimizer states": sum(t.nbytes for t in states)}
    compiled = max(forward.peak_bytes, backward.peak_bytes)  # backward's includes new gradients
    kept = weights if local > micro else 0  # gradients of earlier micro-batches
    exchange = 2 * weights if world_size > 1 else weights  # gradients and their buffer
    memory["activations and gradients"] = max(compiled + kept, exchange)
    return Plan(args, graphs, clock, memory, local // micro)


class Record7(train_gpt2.GPT):
    """The public record 7's own step: autocast, float32 residual stream, all logits at once."""

    def forward(self, inputs, targets):
        with torch.autocast("cuda", torch.bfloat16):
            x = self.wte(inputs)
            for block in self.h:
                x = block(x)
            logits = self.lm_head(train_gpt2.norm(x)).float()
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def planned_record7():
    """Return the Plan of record 7's own step on 8xH100, as its PyTorch 2.5 compiled it.

    DDP sums its gradients during backward, except the embedding's, which is ready last. Its Muon
    is taken to be ours.
    """
    args = train_gpt2.Hyperparameters()
    with (
        mock.patch.object(train_gpt2, "sync_gradients", lambda model: None),
        gpu_compiler.inductor_config.patch(online_softmax=False),
    ):
        plan = planned(args, "H100", 8, lambda: Record7(args))
    last_bytes = 4 * args.vocab_size * args.n_embd
    seconds = COLLECTIVE + TRAFFIC["all_reduce"](8) * last_bytes / plan.clock.rates.bus
    plan.clock.spend("communication", seconds)
    return plan


def page(plan, device, world_size):
    """Return the plan as Markdown."""
    total = sum(plan.seconds.values())
    rows, totals = [], Counter()
    for part, seconds in plan.seconds.items():
        used = plan.clock.usage.get(part, Counter())
        totals += used
        rows.append([part, used, seconds])
    rows.append(["step", totals, total])
    table = [
        [part, f"{used['launches']}", f"{used['bytes'] / 1e9:.1f}", f"{used['flops'] / 1e12:.2f}",
         f"{1000 * seconds:.2f}", f"{seconds / total:.1%}"]
        for part, used, seconds in rows
    ]  # fmt: skip
    kernels = [kernel for graph in plan.graphs for kernel in graph.kernels if kernel.candidates]
    candidates = [candidate for kernel in kernels for candidate in kernel.candidates]
    spilling = sum(spills > 0 for _, spills in candidates)
    sent = [f"{n} {name} of {size / 1e6:.1f} MB" for name, (n, size) in plan.clock.sent.items()]
    uses = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in plan.memory.items())
    args = plan.args
    batches = f"{plan.micro_batches} x {args.device_batch_size} sequences on each"
    minutes = total * args.num_iterations / 60
    return f"""\
Planned, not measured: a step on {world_size} x {device}, {batches}.

{markdown(["part", "launches", "GB", "TFLOP", "ms", "share"], table)}

Training: {args.num_iterations} steps in {minutes:.1f} minutes. MFU: {plan.mfu:.1%}.
Peak memory: {sum(plan.memory.values()) / 1e9:.1f} GB ({uses}).
Collectives of a step: {", ".join(sent) or "none"}.
Triton kernels: {len(kernels)}, in {len(candidates)} configurations; {spilling} spill registers.

{NOT_KNOWN}"""


def main(argv):
    """Print the plan that argv asks for."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--device", choices=DEVICES, default="H100")
    parser.add_argument("--world_size", type=int, default=1, help="GPUs")
    parser.add_argument("--record7", action="store_true", help="record 7's own step on 8xH100")
    own, rest = parser.parse_known_args(argv)
    if own.record7:
        plan = planned_record7()
        print(page(plan, "H100, record 7's own step", 8))
        error = 1000 * sum(plan.seconds.values()) / PUBLIC_MS - 1
        print(f"\nIts public log: {PUBLIC_MS} ms; the plan's error: {error:+.1%}.")
        return 0
    plan = planned(train_gpt2.parse_args(rest), own.device, max(own.world_size, 1))
    print(page(plan, own.device, own.world_size))
    return 0


if __name__ == "__main__":
    command(main)
