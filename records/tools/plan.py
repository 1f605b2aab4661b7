"""Plan a training step on NVIDIA GPUs without one: time, launches, bytes and memory by part.

    python records/tools/plan.py --device=H100 --world_size=8 [--field=value of Hyperparameters ...]
    python records/tools/plan.py --record7    # the public record's own step, whose time is known

Forward and backward are the kernels that Inductor generates for the GPU (gpu_compiler.py). The rest
of the step is counted by running train_step on fake tensors: its operations and its all-reduces.
Times follow from data sheets and from the constants below. Nothing was measured on a GPU here.
"""

import argparse
import contextlib
import dataclasses
import functools
import sys
from collections import Counter, defaultdict
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
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.flop_counter import flop_registry  # noqa: E402

import train_gpt2  # noqa: E402

FLOPS_SHARES = {  # of the peak FLOP/s
    "product": 0.7,  # an H200 was seen to reach 0.78 to 0.81 with large ones; others reach less
    "attention": 0.31,  # about 300 TFLOP/s on an H100
    "small product": 0.4,  # Newton-Schulz's matrices of 768 rows do not fill a GPU
}
STREAM = 0.85  # of the memory's bandwidth; copies were seen to reach 0.9
SCATTER = 0.4  # of the memory's bandwidth: atomic additions
COMPILED_LAUNCH = 3e-6  # s between two kernels of a graph
EAGER_LAUNCH = 5e-6  # s to launch an operation from Python
COLLECTIVE = 40e-6  # s to start an all-reduce; 45 to 90 us are seen with small tensors
PUBLIC_MS = 141.8  # a step of record 7 on 8xH100, by its public log
NOT_KNOWN = """\
Not known without a GPU: which candidate configuration of a kernel is fastest (tuning runs on the
GPU), how fast cuBLAS and cuDNN are at these shapes, how well kernels use the L2 cache, whether
Python keeps ahead of the GPU, how collectives slow down kernels beside them, clocks and power,
fragmentation of memory, and the time that ranks wait for the slowest."""


def part_of(kernel, graph, vocab_size):
    """Return the part of the step that a kernel belongs to. The head's have size vocab_size."""
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
    """Adds up the predicted time of compiled graphs, single operations and all-reduces.

    All-reduces run one after another, concurrently with other work, until they are awaited.
    """

    def __init__(self, gpu, vocab_size, world_size):
        super().__init__()
        self.gpu, self.vocab_size, self.world_size = gpu, vocab_size, world_size
        self.seconds = self.network_free = 0.0
        self.graph_runs = False
        self.phases = Phases(clock=lambda: self.seconds)
        self.usage = defaultdict(Counter)  # of each part: launches, bytes, flops
        self.sent = []  # bytes of each all-reduce

    @classmethod
    def is_infra_mode(cls):
        return True  # torch.compile ignores this mode

    def spend(self, part, kind, moved, flops, launches=1):
        """Charge launches to a part. moved: bytes per launch; flops: also per launch."""
        bandwidth = self.gpu.bandwidth * (SCATTER if kind == "scatter" else STREAM)
        seconds = max(flops / self.gpu.flops / FLOPS_SHARES.get(kind, 1), moved / bandwidth)
        if self.graph_runs:
            seconds += COMPILED_LAUNCH
        else:
            seconds = max(seconds, EAGER_LAUNCH)  # Python runs ahead of the GPU
        with self.phases(part):
            self.seconds += launches * seconds
        self.usage[part].update(launches=launches, bytes=launches * moved, flops=launches * flops)

    @contextlib.contextmanager
    def running(self, graph):
        """Charge the time of the graph's kernels, but not that of its run on fake tensors."""
        self.graph_runs = True
        for kernel in graph.kernels:
            part = part_of(kernel, graph, self.vocab_size)
            self.spend(part, kernel.kind, kernel.bytes, kernel.flops, kernel.launches)
        yield
        self.graph_runs = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        returns = func._schema.returns
        view = any(r.alias_info and not r.alias_info.is_write for r in returns)
        free = ("empty", "detach", "_unsafe_view", "scalar_tensor")
        if self.graph_runs or view or func.namespace != "aten" or func.__name__.startswith(free):
            return out
        values = tree_leaves((args, kwargs, out))
        if not returns:  # it writes some of its arguments
            values += tree_leaves([a for s, a in zip(func._schema.arguments, args) if s.alias_info])
        moved = sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
        part = self.phases.stack[-1]
        part = {"forward": "n-grams", "backward": "gradient accumulation"}.get(part, part)
        flops, kind = 0, "triton"
        if func.overloadpacket in flop_registry:
            kind = "small product"
            flops = flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
        self.spend(part, kind, moved, flops)
        return out

    def all_reduce(self, tensor, async_op=False):
        """A replacement for torch.distributed.all_reduce."""
        self.sent.append(tensor.nbytes)
        traffic = 2 * (self.world_size - 1) / self.world_size * tensor.nbytes
        start = max(self.network_free, self.seconds)
        end = self.network_free = start + COLLECTIVE + traffic / self.gpu.bus

        def wait():
            with self.phases("communication"):
                self.seconds = max(self.seconds, end)

        return SimpleNamespace(wait=wait) if async_op else wait()

    def time_step(self, model, optimizers, *batch):
        """Run train_gpt2.train_step on rank 0 of world_size."""
        run = SimpleNamespace(train_loader=SimpleNamespace(read_batch=None), optimizers=optimizers)
        ranks = dict(is_initialized=lambda: self.world_size > 1, all_reduce=self.all_reduce)
        patch = mock.patch.multiple(dist, get_world_size=lambda: self.world_size, **ranks)
        with patch, self.phases.in_steps(run), self.phases("other"), self:
            train_gpt2.train_step(model, optimizers, *batch)


@contextlib.contextmanager
def compiled(args, build, running=contextlib.nullcontext):
    """Yield (model, graphs) as gpu_compiler.on_gpu does, compiled as a training run does it."""

    def dense_embedding_bag(rows, weight, embedding_bag=F.embedding_bag, **named):
        if weight.grad is not None:  # sparse gradients of further micro-batches are not added
            weight = weight.detach().requires_grad_()
        return embedding_bag(rows, weight, mode="sum")  # fake tensors cannot be sparse

    patch = mock.patch.object(F, "embedding_bag", dense_embedding_bag)
    with patch, gpu_compiler.on_gpu(build, running) as (model, graphs):
        shape = args.device_batch_size, args.sequence_length
        tokens = torch.zeros(shape, dtype=torch.int64, device="cuda")
        loader = SimpleNamespace(next_batch=lambda: (tokens, tokens.clone()))
        # warm_up ends where it reads the loss of the first training pass.
        with contextlib.suppress(gpu_compiler.fake_tensor.DataDependentOutputException):
            train_gpt2.warm_up(model, args, loader)
        yield model, graphs


# ---- The plan -----------------------------------------------------------------------------------
def planned(args, gpu, world_size):
    """Return (clock, graphs, memory) of a step on rank 0; memory: {use: bytes} at the peak."""
    gpu_compiler.chosen.gpu = gpu
    clock = Clock(gpu, args.vocab_size, world_size)
    build = functools.partial(train_gpt2.GPT, args, torch.bfloat16)
    with compiled(args, build, lambda graph: clock.running(graph)) as (model, graphs):
        shape = args.batch_size // world_size, args.sequence_length
        inputs = torch.zeros(shape, dtype=torch.int64, device="cuda")
        optimizers = train_gpt2.build_optimizers(model, args, 0, world_size)
        for _ in range(2):  # the first step makes the optimizers' states
            clock = Clock(gpu, args.vocab_size, world_size)
            clock.time_step(model, optimizers, inputs, inputs.clone(), 1.0, args)
    weights = sum(p.nbytes for p in model.parameters())
    states = [t for o in optimizers for state in o.state.values() for t in state.values()]
    peak = max(graph.peak_bytes for graph in graphs[1:])  # backward's includes new gradients
    if len(inputs) > args.device_batch_size:
        peak += weights  # gradients of earlier micro-batches
    exchange = 2 * weights if world_size > 1 else weights  # gradients and their buffer
    memory = {"weights": weights, "optimizer states": sum(t.nbytes for t in states)}
    memory["activations and gradients"] = max(peak, exchange)
    return clock, graphs, memory


class Record7(train_gpt2.GPT):
    """The public record 7's own step: autocast, float32 residual stream, all logits at once."""

    def forward(self, inputs, targets):
        with torch.autocast("cuda", torch.bfloat16):
            x = self.wte(inputs)
            for block in self.h:
                x = block(x)
            logits = self.lm_head(train_gpt2.norm(x)).float()
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def become_record7():
    """Give train_gpt2 the step of record 7, compiled as by PyTorch 2.5. Muon is not replaced.

    DDP sums its gradients during backward, except the embedding's, which is ready last.
    """
    train_gpt2.GPT = Record7
    train_gpt2.sync_gradients = lambda model: dist.all_reduce(model.wte.weight.grad)
    gpu_compiler.config.online_softmax = False


def page(clock, graphs, memory, title, args):
    """Return a plan as Markdown."""
    parts = {part: seconds for part, seconds in clock.phases.seconds.items() if seconds}
    clock.usage["step"] = sum((clock.usage[part] for part in parts), Counter())
    total = parts["step"] = sum(parts.values())
    rows = []
    for part, seconds in parts.items():
        used = clock.usage[part]
        row = [part, f"{used['launches']}", f"{used['bytes'] / 1e9:.1f}"]
        row += [f"{used['flops'] / 1e12:.2f}", f"{1000 * seconds:.2f}", f"{seconds / total:.1%}"]
        rows.append(row)
    micro_batches = args.batch_size // clock.world_size // args.device_batch_size
    flops = sum(k.launches * k.flops for graph in graphs[1:] for k in graph.kernels)
    mfu = micro_batches * flops / total / clock.gpu.flops
    spills = [kernel.spills for graph in graphs for kernel in graph.kernels if kernel.spills]
    configurations = [words for kernel in spills for words in kernel]
    spilling = sum(map(bool, configurations))
    uses = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in memory.items())
    batches = f"{micro_batches} x {args.device_batch_size} sequences on each"
    minutes = total * args.num_iterations / 60
    return f"""\
Planned, not measured: a step on {title}, {batches}.

{markdown(["part", "launches", "GB", "TFLOP", "ms", "share"], rows)}

Training: {args.num_iterations} steps in {minutes:.1f} minutes. MFU: {mfu:.1%}.
Peak memory: {sum(memory.values()) / 1e9:.1f} GB ({uses}).
Collectives of a step: {len(clock.sent)} all_reduce of {sum(clock.sent) / 1e6:.1f} MB.
Triton kernels: {len(spills)}, in {len(configurations)} configurations; {spilling} spill registers.

{NOT_KNOWN}"""


def main(argv):
    """Print the plan that argv asks for."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--device", choices=gpu_compiler.GPUS, default="H100")
    parser.add_argument("--world_size", type=int, default=1, help="GPUs")
    parser.add_argument("--record7", action="store_true", help="record 7's own step on 8xH100")
    own, rest = parser.parse_known_args(argv)
    args = train_gpt2.parse_args(rest)
    title, world_size = f"{own.world_size} x {own.device}", own.world_size
    if own.record7:
        become_record7()
        title, world_size = "8 x H100, record 7's own step", 8
    if world_size < 1 or args.batch_size % world_size:
        raise train_gpt2.UserError(
            f"world_size={world_size} must divide batch_size={args.batch_size}"
        )
    micro = train_gpt2.micro_batch_size(args.batch_size // world_size, args.device_batch_size)
    args = dataclasses.replace(args, device_batch_size=micro)
    plan = planned(args, gpu_compiler.GPUS[own.device], world_size)
    print(page(*plan, title, args))
    if own.record7:
        error = 1000 * plan[0].seconds / PUBLIC_MS - 1
        print(f"\nIts public log: {PUBLIC_MS} ms; the plan's error: {error:+.1%}.")


if __name__ == "__main__":
    command(main)
