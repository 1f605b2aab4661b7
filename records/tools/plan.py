"""Predict a training step on NVIDIA GPUs without one: time, launches, bytes and memory by part.

    python records/tools/plan.py --device=H100 --world_size=8 [--name=value ...]
    python records/tools/plan.py modern [--tokens=GLOB] ...   # of records/modern/train_modern.py

Forward and backward consist of the kernels that Inductor generates for the GPU (gpu_compiler.py).
The other operations and the all-reduces are counted by running train_step on fake tensors. Times
follow from data sheets and the constants below; nothing is measured. For the public record 7, the
predicted step was 11.9% shorter than in its log; `--record7` of commit 61fbced reproduces this.

A plan takes some minutes; the names of compiled kernels are printed to stderr.
"""

import contextlib
import functools
import math
import sys
from collections import Counter, defaultdict
from unittest import mock

from runlog import ROOT, argument_parser, command, packages, require

sys.path[:0] = [str(ROOT), str(ROOT / "records" / "modern")]
with packages():
    import gpu_compiler  # before torch
    import numpy as np
    import torch
    import torch.distributed as dist
    from report import markdown
    from step_profile import in_ranges, parts_of_step
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.flop_counter import flop_registry
    from train_modern import BLOCK, window_blocks_at
    from weights import recipe_and_settings, train_gpt2

FLOPS_SHARES = {  # of the peak FLOP/s
    "product": 0.7,
    "attention": 0.31,  # about 300 TFLOP/s on an H100
    "small product": 0.4,  # Newton-Schulz's matrices of 768 rows do not fill a GPU
}
STREAM_SHARE = 0.85  # of the memory's bandwidth
SCATTER_SHARE = 0.4  # of the memory's bandwidth, for atomic additions
COMPILED_LAUNCH = 3e-6  # s between two kernels of a graph
EAGER_LAUNCH = 5e-6  # s to launch an operation from Python
COLLECTIVE_LAUNCH = 40e-6  # s to start an all-reduce
SAMPLED = 64  # sequences and steps, to count visible blocks


def visible_blocks(args, sequences):
    """Return how many blocks of keys a block of queries sees in the long and the short mask.

    They are means over sequences of tokens, (N, T), and over steps, because the window grows.
    """
    documents = (sequences == args.document_token).cumsum(1)
    first, last = documents[:, ::BLOCK], documents[:, BLOCK - 1 :: BLOCK]  # of each block
    # The first block that holds a token of the document in which a block starts.
    oldest = [np.searchsorted(ends, starts) for ends, starts in zip(last, first)]
    limits = np.arange(first.shape[1]) - oldest + 1  # by documents and causality
    steps = np.linspace(0, args.num_iterations, SAMPLED, dtype=int)
    windows = [window_blocks_at(step, args) for step in steps]
    pairs = [(window, max(1, window // 2)) for window in windows]
    return [np.mean([np.minimum(limits, window) for window in each]) for each in zip(*pairs)]


def read_sequences(args, files):
    """Return (N, T) tokens, evenly spaced in the shards; without files, one document."""
    T = args.sequence_length
    if not files:
        return np.full((1, T), -1)
    stream = train_gpt2.TokenStream(files, args.vocab_size)
    starts = np.linspace(0, stream.total_tokens - T, SAMPLED, dtype=int)
    return np.stack([stream.read(int(start), T) for start in starts])


def part_of(kind, graph, sizes, vocab_size):
    """Return a kernel's part of the step. A kernel of size vocab_size is the head's."""
    if kind in ("scatter", "embedding"):
        return "embedding's gradient"
    if kind == "attention":
        return f"attention, {graph.kind}"
    what = "products" if kind == "product" else "element-wise"
    if any(size % vocab_size == 0 for size in sizes):
        return f"{what} of head and loss"
    return f"{what} of blocks, {graph.kind}"


class Clock(TorchDispatchMode):
    """Adds up the predicted time of compiled graphs, single operations and all-reduces.

    All-reduces overlap with nothing else.
    """

    supports_higher_order_operators = True  # such as flex_attention

    def __init__(self, gpu, args, world_size, visible):
        super().__init__()
        self.gpu, self.vocab_size, self.world_size = gpu, args.vocab_size, world_size
        self.visible = visible  # see visible_blocks; None without windows
        self.first_is_long = True  # whether the first layer has the long mask
        self.seconds = 0.0
        self.graph = None  # the compiled graph that is running, if any
        self.masks = {}  # its block masks, numbered in the order of their first use
        self.parts = ["other"]  # the current part and those around it, innermost last
        # Launches, bytes, flops and seconds of each part; "other" is the first row of the table.
        self.usage = defaultdict(Counter, other=Counter())
        self.network = Counter()  # collectives, their bytes, and the seconds that they take

    @classmethod
    def is_infra_mode(cls):
        return True  # torch.compile ignores this mode

    @contextlib.contextmanager
    def within(self, part):
        """Charge operations outside of graphs to this part."""
        self.parts.append(part)
        yield
        self.parts.pop()

    def spend(self, part, seconds, **amounts):
        """Let time pass and add it to a part, together with other amounts."""
        self.seconds += seconds
        self.usage[part].update(seconds=seconds, **amounts)

    def launch(self, part, kind, moved, flops, launches=1):
        """Charge launches to a part. moved, flops: bytes and FLOPs per launch."""
        bandwidth = self.gpu.bandwidth * (SCATTER_SHARE if kind == "scatter" else STREAM_SHARE)
        seconds = max(flops / self.gpu.flops / FLOPS_SHARES.get(kind, 1), moved / bandwidth)
        if self.graph:
            seconds += COMPILED_LAUNCH
        else:  # Python launches the next operation while the GPU still runs this one
            seconds = max(seconds, EAGER_LAUNCH)
        amounts = dict(launches=launches, bytes=launches * moved, flops=launches * flops)
        self.spend(part, launches * seconds, **amounts)

    @contextlib.contextmanager
    def running(self, graph):
        """Charge a graph: its products and attention as it runs, then its other kernels."""
        self.graph, self.masks = graph, {}
        yield
        for kernel in graph.kernels:
            if kernel.kind != "attention":
                part = part_of(kernel.kind, graph, kernel.sizes, self.vocab_size)
                self.launch(part, kernel.kind, kernel.bytes, 0, kernel.launches)
        self.graph = None

    def flex_attention(self, backward, args, out):
        """Charge flex_attention."""
        B, H, T, D = args[0].shape
        block_mask = args[9 if backward else 4]
        mask = self.masks.setdefault(block_mask[3], len(self.masks))  # its indices identify it
        # Forward begins with the first layer; backward, with the last, which has the long mask.
        long, short = self.visible
        visible = (long, short) if backward or self.first_is_long else (short, long)
        tensors = [x for x in (*args, *out) if isinstance(x, torch.Tensor)]
        flops = (5 if backward else 2) * 2 * B * H * T * D * BLOCK * visible[mask]
        part = f"attention, {self.graph.kind}"
        self.launch(part, "attention", sum(tensor.nbytes for tensor in tensors), flops)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.__name__.startswith("flex_attention"):
            self.flex_attention("backward" in func.__name__, args, out)
            return out
        flops_of = flop_registry.get(func.overloadpacket)
        if self.graph and not flops_of:
            return out  # part of a Triton kernel
        free = ("empty", "_unsafe_view", "scalar_tensor")
        if func.is_view or func.namespace != "aten" or func.__name__.startswith(free):
            return out
        values = tree_leaves((args, kwargs, out))
        if out is None:  # the operation writes to some of its arguments
            values += tree_leaves([a for s, a in zip(func._schema.arguments, args) if s.alias_info])
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        flops = flops_of(*args, **kwargs, out_val=out) if flops_of else 0
        if self.graph:
            kind = "product"
            if "attention" in func.__name__:
                flops, kind = flops / 2, "attention"  # half of the scores are masked
            sizes = [size for tensor in tensors for size in tensor.shape]
            part = part_of(kind, self.graph, sizes, self.vocab_size)
        else:
            kind = "small product" if flops else "triton"
            part = self.parts[-1]
            part = "gradient accumulation" if part == "backward" else part
        self.launch(part, kind, sum(tensor.nbytes for tensor in tensors), flops)
        return out

    def all_reduce(self, tensor, group=None):
        """A replacement for torch.distributed.all_reduce."""
        traffic = 2 * (self.world_size - 1) / self.world_size * tensor.nbytes
        seconds = COLLECTIVE_LAUNCH + traffic / self.gpu.bus
        self.network.update(collectives=1, bytes=tensor.nbytes, seconds=seconds)
        self.spend("communication", seconds)

    def time_step(self, run, inputs, targets):
        """Run train_step on rank 0 of world_size."""
        self.first_is_long = 0 in getattr(run.model, "long_layers", ())
        with (
            mock.patch.object(dist, "all_reduce", self.all_reduce),
            in_ranges(parts_of_step(run), self.within),
            self,
        ):
            train_gpt2.train_step(run, inputs, targets)


@contextlib.contextmanager
def ranks_in_name_only(world_size):
    """Make this process rank 0 of world_size, with collectives that do nothing."""
    if world_size > 1:
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        if world_size > 1:
            dist.destroy_process_group()


def planned(args, recipe, gpu, world_size, token_files=""):
    """Return (clock, memory, run) of a step on rank 0. memory: {use: bytes} at the peak."""
    gpu_compiler.chosen.gpu = gpu
    visible = None
    if getattr(args, "attention_window", 0):
        visible = visible_blocks(args, read_sequences(args, token_files))
    new_clock = functools.partial(Clock, gpu, args, world_size, visible)
    clock = new_clock()
    on_gpu = gpu_compiler.on_gpu(args, recipe, world_size, lambda graph: clock.running(graph))
    with ranks_in_name_only(world_size), on_gpu as (run, graphs):
        sequences = args.batch_size // world_size
        inputs = torch.zeros(sequences, args.sequence_length, dtype=torch.int64, device="cuda")
        for _ in range(2):  # the first update creates the optimizers' states
            clock = new_clock()
            clock.time_step(run, inputs, inputs.clone())
    weights = sum(p.nbytes for p in run.model.parameters())
    muon = run.optimizers[0]
    matrices = sum(p.numel() for group in muon.param_groups for p in group["params"])
    states = tree_leaves([optimizer.state_dict()["state"] for optimizer in run.optimizers])
    training = [graph for graph in graphs if graph.kind != "validation"]
    peak = max(graph.peak_bytes for graph in training)  # includes new gradients
    if sequences > run.micro_batch_size:
        peak += weights  # gradients of earlier micro-batches
    updates = 2 * matrices  # Muon holds all of them in bfloat16
    memory = {"weights": weights, "optimizer states": sum(state.nbytes for state in states)}
    memory["activations and gradients"] = max(peak, weights + updates)
    return clock, memory, run


def page(run, device, clock, memory):
    """Return a plan as Markdown."""
    step = sum(clock.usage.values(), Counter())
    rows = []
    for part, used in [*clock.usage.items(), ("step", step)]:
        row = [part, f"{used['launches']:g}", f"{used['bytes'] / 1e9:.1f}"]
        row += [f"{used['flops'] / 1e12:.2f}", f"{1000 * used['seconds']:.2f}"]
        rows.append([*row, f"{used['seconds'] / step['seconds']:.1%}"])
    args = run.args
    micro_batches = math.ceil(args.batch_size / clock.world_size / run.micro_batch_size)
    model_flops = step["flops"] - clock.usage["Newton-Schulz"]["flops"]
    uses = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in memory.items())
    gpu, network = clock.gpu, clock.network
    windows = ""
    if clock.visible:
        long, short = clock.visible
        windows = f"A query sees {long:.2f} blocks of {BLOCK} keys in the layers with the long "
        windows += f"window, {short:.2f} in the others.\n"
    return f"""\
Planned, not measured: a step on {clock.world_size} x {device}, \
{micro_batches} x {run.micro_batch_size} sequences on each.
{device}: {gpu.flops / 1e12:g} TFLOP/s in bfloat16, memory {gpu.bandwidth / 1e9:g} GB/s, \
bus {gpu.bus / 1e9:g} GB/s ({gpu.source}).

{markdown(["part", "launches", "GB", "TFLOP", "ms", "share"], rows)}

Training: {args.num_iterations} steps in {step["seconds"] * args.num_iterations / 60:.1f} minutes. \
MFU: {model_flops / step["seconds"] / gpu.flops:.1%}.
Peak memory: {sum(memory.values()) / 1e9:.1f} GB ({uses}).
{windows}\
Collectives of a step: {network["collectives"]:g} all_reduce, {network["bytes"] / 1e6:.1f} MB in \
total, in {1000 * network["seconds"]:.2f} ms, during which the GPU waits.

Not modelled: which kernel configurations autotuning picks, the speed of cuBLAS and cuDNN at these
shapes, L2 cache hits, a GPU that waits for Python, collectives that slow down concurrent kernels,
clock and power limits, memory fragmentation, and waiting for the slowest rank."""


def main(argv):
    """Print the plan that the command line asks for."""
    parser = argument_parser(__doc__)
    parser.add_argument("--device", choices=gpu_compiler.GPUS, default="H100")
    parser.add_argument("--world_size", type=int, default=1, help="number of GPUs")
    help = "shards whose documents limit attention; default: a document is as long as a sequence"
    parser.add_argument("--tokens", default="", help=help)
    own, rest = parser.parse_known_args(argv)
    recipe, settings = recipe_and_settings(rest)
    args, gpu = train_gpt2.parse_args(settings, recipe), gpu_compiler.GPUS[own.device]
    require(args.dtype != "float32", "plans are for bfloat16: leave out --dtype=float32")
    divides = own.world_size > 0 and args.batch_size % own.world_size == 0
    require(divides, f"world_size={own.world_size} must divide batch_size={args.batch_size}")
    clock, memory, run = planned(args, recipe, gpu, own.world_size, own.tokens)
    print(page(run, own.device, clock, memory))


if __name__ == "__main__":
    command(main)
