"""Plan a training step without a GPU: what it saves, computes again, moves, and takes.

    python records/tools/plan.py --device=H100 --world_size=8 [--field=value of Hyperparameters ...]

Forward and backward are the kernels of records/tools/fused.py, timed by the rates below, which are
stated and not measured, except a CPU's. For the rest train_gpt2.train_step runs on tensors without
storage and a device that only counts time. What a table of n-grams moves is counted by hand, and
its Adagrad gets a dense gradient, as it does from several processes. --record7 and --measure (of a
CPU) check the plan.
"""

import argparse
import contextlib
import dataclasses
import math
import sys
import time
import typing
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "records" / "tools")]
import fused  # noqa: E402
from check import gradient_values  # noqa: E402
from report import command, markdown  # noqa: E402
from step_profile import Phases  # noqa: E402

import train_gpt2  # noqa: E402

aten = torch.ops.aten
NO_WORK = fused.CONSTANTS | {aten.detach, aten.empty_like, aten._unsafe_view}


# ---- Rates: stated, not measured, but the CPU's --------------------------------------------------
class Rates(typing.NamedTuple):
    """A device: dense FLOP/s of products, float32 FLOP/s of the rest, bytes/s, s of a launch."""

    products: float
    vectors: float
    memory: float
    kernel: float  # between two compiled kernels
    eager: float  # to launch an operation from Python, which a GPU waits for
    measured: bool = False  # True: these are reached, and no share of them is guessed
    # attention's share of the peak, of the causal half, forward and backward: about 350 TFLOP/s on
    # H100; backward's five products share registers with the soft-max
    attention: tuple = (0.35, 0.3)


DEVICES = {  # bf16 without sparsity and memory, of the vendors' data sheets
    "H100": Rates(989e12, 67e12, 3.35e12, 3e-6, 5e-6),  # SXM
    "H200": Rates(989e12, 67e12, 4.8e12, 3e-6, 5e-6),  # seen: 770 to 800 TFLOP/s, copies 4.3 TB/s
    "A100": Rates(312e12, 19.5e12, 2.04e12, 3e-6, 5e-6),  # SXM, 80 GB
    "4090": Rates(165e12, 82.6e12, 1.01e12, 3e-6, 5e-6),  # products that add in float32
}
PRODUCT = 0.75  # of the peak, large products: seen on an H200: 0.78 to 0.81 at most
SPLIT_PRODUCT = 0.6  # few outputs, as weights' gradients: tiles split along the sum and added
TILES = {256: 1.0, 128: 0.9}  # columns of a tile of 128 rows: its speed; a guess
PROCESSORS = 132  # multiprocessors, each with a tile at a time: H100, H200; A100: 108, 4090: 128
SMALL_PRODUCT = 0.4  # Newton-Schulz: matrices of 768 do not fill a GPU
STREAM = 0.85  # of the memory's bandwidth, by fused kernels; 0.9 seen for copies
SCATTER = 0.4  # of the memory's bandwidth, by atomic additions of the embedding's gradient
BUS = 400e9  # bytes/s, NCCL's bus bandwidth in a node of 8 H100; PCIe and A100: lower
CALL = 40e-6  # s of a collective beside its transfer, in eager; 45 to 90 us are seen with it
PUBLIC_MS = 141.8  # of a step of record 7 on 8xH100, by its own log
# what a rank moves for each byte, over the bus bandwidth
COLLECTIVES = {
    "all_reduce": lambda W: 2 * (W - 1) / W,
    "reduce": lambda W: 1.0,
    "broadcast": lambda W: 1.0,
    "reduce_scatter_tensor": lambda W: (W - 1) / W,
    "all_gather_into_tensor": lambda W: (W - 1) / W,
}


def best_of(function, count=5):
    """Return the least seconds of so many calls."""
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measured_rates(groups, dtype):
    """Return this CPU's Rates: of the products and the attention among the groups, of a copy."""
    work, seconds = 0.0, 0.0
    operands = [g.nodes[0].all_input_nodes for g in groups if g.kind == "product"]
    for shapes in {tuple(tuple(n.meta["val"].shape) for n in nodes[-2:]) for nodes in operands}:
        a, b = (torch.ones([min(2**13, n) for n in shape], dtype=dtype) for shape in shapes)
        work += 2 * a.numel() * b.size(-1)
        seconds += best_of(lambda a=a, b=b: a @ b)
    peak = work / seconds
    x, y = torch.ones(2, 2**24)
    small = x[: 2**16]
    return Rates(
        products=peak,
        vectors=10 * len(small) / best_of(lambda: small.exp(), 50),  # exp: about 10 operations
        memory=2 * x.nbytes / best_of(lambda: y.copy_(x)),
        kernel=2e-6,
        eager=5e-6,
        measured=True,
        attention=measured_attention(groups, dtype, peak),
    )


def measured_attention(groups, dtype, peak):
    """Return its shares of the peak, forward and backward; 1 where products stand for it."""
    attention = next((g for g in groups if g.kind == "attention"), None)
    if attention is None:
        return 1.0, 1.0
    query, *_ = attention.nodes[0].all_input_nodes
    q = torch.ones(query.meta["val"].shape, dtype=dtype)[:1].requires_grad_()
    flops = attention.flops / len(query.meta["val"])  # of one sequence
    forward = best_of(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    both = best_of(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward())
    return flops / forward / peak, 2.5 * flops / max(both - forward, forward) / peak


def product_share(rows, columns):
    """Return the share of the peak that a product of so many outputs reaches.

    With the better tile: the last of the waves of tiles does not fill the device. Products with
    less than one wave are split along their sum.
    """
    tiles = {tile: math.ceil(rows / 128) * math.ceil(columns / tile) for tile in TILES}
    if tiles[256] < PROCESSORS:
        return SPLIT_PRODUCT
    waves = {tile: count / PROCESSORS for tile, count in tiles.items()}
    return PRODUCT * max(TILES[tile] * n / math.ceil(n) for tile, n in waves.items())


def seconds_of(group, rates):
    """Return the time of its operations or of its bytes, whichever is longer, and of a launch."""
    share, stream = 1.0, STREAM
    if group.kind == "attention":
        share = rates.attention["backward" in group.name]
    elif group.kind == "product" and not rates.measured:
        share = product_share(*group.written[0].meta["val"].shape[-2:])
    elif group.kind == "scatter":
        stream = SCATTER
    peak = rates.vectors if group.kind == "fused" else rates.products * share
    stream = 1.0 if rates.measured else stream
    return max(group.flops / peak, group.bytes / rates.memory / stream) + rates.kernel


# ---- The rest of a step, on a device that only counts time ---------------------------------------
class Counting(TorchDispatchMode):
    """Counts the seconds, bytes and calls of what PyTorch does in it, and of collectives.

    An operation of its own takes a launch, its products or its bytes, whichever is longest. A
    collective runs beside the rest until it is awaited, after those that were called before it.
    """

    def __init__(self, rates, world_size):
        super().__init__()
        self.rates, self.world_size = rates, world_size
        self.start()

    def start(self):
        """Set the clock to 0."""
        self.seconds = self.free = 0.0  # until now; until the links are free
        self.sent = {}  # name of a collective: [calls, bytes]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        returns = func._schema.returns
        view = any(r.alias_info and not r.alias_info.is_write for r in returns)
        work = func.namespace == "aten" and func.overloadpacket not in NO_WORK  # not the profiler's
        if work and not view:
            self.seconds += self.cost(func, args, kwargs, out)
        return out

    def cost(self, func, args, kwargs, out):
        """Return the seconds of an operation that is launched from Python."""
        tensors = tree_leaves((args, kwargs, out))
        if not func._schema.returns:  # it writes some of its arguments
            named = zip(func._schema.arguments, args)
            tensors += tree_leaves([v for a, v in named if a.alias_info and a.alias_info.is_write])
        moved = sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        flops = 0
        if func.overloadpacket in flop_registry:
            flops = flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
        share, stream = (1.0, 1.0) if self.rates.measured else (SMALL_PRODUCT, STREAM)
        compute = flops / self.rates.products / share
        return max(self.rates.eager, compute, moved / self.rates.memory / stream)

    def collective(self, name, factor):
        """Return a stand-in for torch.distributed's function of this name."""

        def call(*tensors, async_op=False, **named):
            values = [t for t in tree_leaves((tensors, named)) if isinstance(t, torch.Tensor)]
            count = max(t.nbytes for t in values)
            calls = self.sent.setdefault(name, [0, 0])
            calls[0] += 1
            calls[1] += count
            self.free = max(self.free, self.seconds) + CALL + factor * count / BUS
            work = Sent(self, self.free)
            return work if async_op else work.wait()

        return call

    @contextlib.contextmanager
    def in_place_of_nccl(self):
        """Let torch.distributed speak of world_size ranks, of which this is rank 0."""
        W = self.world_size
        stand_ins = dict(is_initialized=lambda: W > 1, get_world_size=lambda: W)
        stand_ins |= {name: self.collective(name, f(W)) for name, f in COLLECTIVES.items()}
        with mock.patch.multiple(dist, **stand_ins):
            yield


class Sent(dist.Work):
    """What an asynchronous collective returns."""

    def __init__(self, device, end):
        super().__init__()
        self.device, self.end = device, end

    def wait(self):
        """Let the clock go on to the end of the transfer."""
        self.device.seconds = max(self.device.seconds, self.end)


class Model:
    """Stands for a model whose forward and backward are planned elsewhere: it has gradients."""

    def __init__(self, gpt):
        self.parameters = gpt.parameters
        self.loss = torch.zeros((), requires_grad=True)
        for p in gpt.parameters():
            p.grad = torch.empty_like(p)

    def __call__(self, inputs, targets):
        return self.loss


def rest_of_step(args, rates, world_size, dtype):
    """Return what train_gpt2.train_step does beside forward and backward, on rank 0.

    ({part: seconds}, {collective: [calls, bytes]}, {what is in memory all the time: bytes}). Muon
    deals its matrices so that no rank has more to do than rank 0.
    """
    counting = Counting(rates, world_size)
    phases = Phases(clock=lambda: counting.seconds)
    with counting.in_place_of_nccl(), FakeTensorMode():
        gpt = fused.without_storage(lambda: train_gpt2.GPT(args, dtype), "cpu")
        optimizers = train_gpt2.build_optimizers(gpt, args, 0, world_size)
        inputs = torch.zeros(args.batch_size // world_size, args.sequence_length, dtype=torch.int64)
        loader = SimpleNamespace(read_batch=None)
        run = SimpleNamespace(train_loader=loader, optimizers=optimizers)
        for _ in range(2):  # the first step makes the optimizers' states
            model = Model(gpt)
            counting.start()
            phases.seconds, phases.settled = Counter(), 0.0
            with phases.in_steps(run), counting, phases("other"):
                train_gpt2.train_step(model, optimizers, inputs, inputs, 1.0, args)
        weights = sum(p.nbytes for p in gpt.parameters())
        states = [t for o in optimizers for state in o.state.values() for t in state.values()]
        gradients, summed = (4 * count for count in gradient_values(args, gpt, world_size))
    parts = phases.seconds
    for part in "forward", "backward", "loader":  # scalars of a micro-batch
        parts["other"] += parts.pop(part, 0.0)
    memory = dict(weights=weights, gradients=gradients, states=sum(t.nbytes for t in states))
    memory["activations, then a buffer"] = summed  # of all gradients
    return parts, counting.sent, memory


def table_seconds(args, rates, tokens, micro_batches):
    """Return the time that a table of n-grams takes in a step of so many tokens, but Adagrad's.

    Rows are read and summed a token, in backward written as a gradient, and read to be added up.
    """
    if args.max_ngram < 2:
        return 0.0
    summed = 4 * tokens * args.n_embd
    rows = summed * (args.max_ngram - 1)
    moved = (rows + summed) + (summed + rows) + rows
    launches = micro_batches * (6 * (args.max_ngram - 1) + 6)  # 6 a hash; 6 for all, backward too
    stream = 1.0 if rates.measured else STREAM
    return moved / rates.memory / stream + launches * rates.eager


# ---- The plan ------------------------------------------------------------------------------------
@dataclasses.dataclass
class Plan:
    """A step, planned. parts: {name: seconds a step}; they add up to it."""

    args: train_gpt2.Hyperparameters
    graphs: tuple
    kernels: list  # (part, Group), of a micro-batch
    rates: Rates
    micro_batches: int
    parts: dict
    sent: dict
    memory: dict

    @property
    def seconds(self):
        """Return the time of the step."""
        return sum(self.parts.values())


def part_of(group, side, vocab_size):
    """Return the part of a step that a group belongs to; the head: with a size of vocab_size."""
    touched = [*group.nodes, *group.written, *(node for node, _ in group.read)]
    if any(fused.packet(node) in fused.SCATTERS | {aten.embedding} for node in group.nodes):
        return "embedding"
    head = any(vocab_size in n.meta["val"].shape for n in touched if fused.numel(n))
    if group.kind == "attention":
        return f"attention, {side}"
    what = "products" if group.kind == "product" else "element-wise"
    return f"{what} of head and loss" if head else f"{what} of blocks, {side}"


def planned(args, device="H100", world_size=1, budget=None, build=None, dtype=None):
    """Return the Plan of a step. build: returns another model, planned as PyTorch 2.5 compiles it,
    without an online soft-max. UserError: sizes that do not divide."""
    if args.batch_size % world_size:
        raise train_gpt2.UserError(f"world_size={world_size} must divide {args.batch_size}")
    where = torch.device("cpu" if device == "cpu" else "cuda")
    dtype = dtype or train_gpt2.product_dtype(args, where)
    local = args.batch_size // world_size
    micro = train_gpt2.micro_batch_size(local, args.device_batch_size)
    args = dataclasses.replace(args, device_batch_size=micro)
    online = device != "cpu" and not build
    build = build or (lambda: train_gpt2.GPT(args, dtype))
    graphs = fused.traced(build, args, budget, gpu=device != "cpu")
    groups = [fused.groups_of(graph, online) for graph in graphs]
    rates = DEVICES.get(device) or measured_rates(groups[0], dtype)
    kernels = [
        (part_of(group, side, args.vocab_size), group)
        for side, members in zip(("forward", "backward"), groups)
        for group in members
    ]
    parts = Counter()
    for part, group in kernels:
        parts[part] += seconds_of(group, rates) * (local // micro)
    rest, sent, memory = rest_of_step(args, rates, world_size, dtype)
    # a table's gradients of further micro-batches are not added, but put beside the first
    table = 4 * args.ngram_rows * args.n_embd if args.max_ngram > 1 else 0
    added = (local // micro - 1) * 3 * (memory["weights"] - table)  # of further micro-batches
    parts["gradient accumulation"] = added / rates.memory / STREAM
    parts["n-grams"] = table_seconds(args, rates, local * args.sequence_length, local // micro)
    parts.update(rest)
    peak = fused.peak_of(*graphs, *groups)
    memory["activations, then a buffer"] = max(peak, memory["activations, then a buffer"])
    parts = {name: seconds for name, seconds in parts.items() if seconds}
    return Plan(args, graphs, kernels, rates, local // micro, parts, sent, memory)


def record7(args):
    """Return the Plan of the public record's own step on 8xH100: tests/plain.py, compiled.

    Its logits are float32, as is the stream between blocks; DDP sums the gradients during
    backward, except the embedding's, which is ready last. Its Muon is taken to be ours.
    """
    sys.path.insert(0, str(ROOT / "tests"))
    import plain

    def build():
        model = plain.PlainGPT(args)
        model.dtype = torch.bfloat16
        return model

    with mock.patch.object(train_gpt2, "sync_gradients", lambda model: None):
        plan = planned(args, "H100", 8, 1.0, build, torch.bfloat16)
    last = 4 * args.vocab_size * args.n_embd
    plan.parts["communication"] += CALL + COLLECTIVES["all_reduce"](8) * last / BUS
    return plan


def tally(title, nodes, most):
    """Return what nodes hold as Markdown, alike ones together, the largest first."""
    alike = {}
    for node in filter(fused.numel, nodes):
        source = node.args[0] if fused.kind_of(node) == "result" else node
        alike.setdefault((str(fused.packet(source)), fused.text_of(node)), []).append(node)
    rows = [(*key, len(n), sum(map(fused.size, n)) / 1e6) for key, n in alike.items()]
    rows.sort(key=lambda row: -row[-1])
    total = sum(row[-1] for row in rows) / 1000
    shown = [[what, tensor, f"{count}", f"{mb:.0f}"] for what, tensor, count, mb in rows[:most]]
    head = ["operation", "tensor", "count", "MB"]
    return f"{title}, {total:.2f} GB a micro-batch:\n\n{markdown(head, shown)}"


def kernel_table(plan, most):
    """Return the kernels that take most time as Markdown, equal ones together."""
    alike = {}
    for part, group in plan.kernels:
        alike.setdefault((part, group.name, group.flops, group.bytes), []).append(group)
    rows = []
    for (part, name, flops, moved), groups in alike.items():
        ms = 1000 * sum(seconds_of(group, plan.rates) for group in groups)
        sizes = f"{flops / 1e9:.1f}", f"{moved / 1e6:.0f}", f"{ms:.2f}"
        rows.append((ms, [part, name, f"{len(groups)}", *sizes]))
    rows.sort(reverse=True)
    head = ["part", "kernel", "count", "GFLOP each", "MB each", "ms together"]
    title = f"What takes most of the {len(plan.kernels)} kernels of a micro-batch:"
    return f"{title}\n\n{markdown(head, [row for _, row in rows[:most]])}"


def page(plan, device, world_size, most):
    """Return the plan as Markdown; most: rows of a table."""
    saved, again = fused.saved_by(plan.graphs[0]), fused.computed_again(*plan.graphs)
    twice = [node for node in again if fused.kind_of(node) in fused.BARRIERS]
    sections = [
        tally("Saved for backward", saved, most),
        tally("Computed again in backward", again, most),
        "Products and attention among it: " + (", ".join(map(str, twice)) or "none"),
        kernel_table(plan, most),
    ]
    sent = [[n, f"{calls}", f"{count / 1e6:.1f}"] for n, (calls, count) in plan.sent.items()]
    if sent:
        sections += ["Collectives of a step:", markdown(["call", "count", "MB"], sent)]
    memory = ", ".join(f"{name} {count / 1e9:.2f}" for name, count in plan.memory.items())
    batches = f"{plan.micro_batches} x {plan.args.device_batch_size} sequences each"
    rows = [[n, f"{1000 * s:.2f}", f"{s / plan.seconds:.1%}"] for n, s in plan.parts.items()]
    rows += [["step", f"{1000 * plan.seconds:.2f}", "100.0%"]]
    sections += [
        f"Peak memory: {sum(plan.memory.values()) / 1e9:.1f} GB: {memory}",
        f"Planned, not measured: a step on {world_size} x {device}, {batches}:",
        markdown(["part", "ms", "share"], rows),
    ]
    return "\n\n".join(sections)


def measured(args):
    """Return the least seconds of forward and backward of a micro-batch, compiled, on this CPU."""
    device = torch.device("cpu")
    train_gpt2.configure_backend(args, device)
    gpt = train_gpt2.GPT(args, train_gpt2.product_dtype(args, device))
    inputs = torch.randint(args.vocab_size, (args.device_batch_size, args.sequence_length))
    batch = inputs, inputs.roll(-1, 1)
    train_gpt2.warm_up(gpt, args, SimpleNamespace(next_batch=lambda: batch))

    def once():
        gpt(*batch).backward()
        gpt.zero_grad()

    return best_of(once, 10)


def parse(argv):
    """Return (options of this tool, Hyperparameters). Raises UserError for what cannot be."""

    def refuse(message):
        raise train_gpt2.UserError(message)

    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.error = refuse
    parser.add_argument("--device", choices=[*DEVICES, "cpu"], default="H100")
    parser.add_argument("--world_size", type=int, default=1, help="GPUs")
    parser.add_argument("--activation_memory_budget", type=float, help="default: training's")
    parser.add_argument("--rows", type=int, default=15, help="of each table, at most")
    parser.add_argument("--record7", action="store_true", help="its own step, on 8xH100")
    parser.add_argument("--measure", action="store_true", help="time it, too; --device=cpu alone")
    own, rest = parser.parse_known_args(argv)
    if own.world_size < 1:
        refuse(f"world_size={own.world_size} must be at least 1")
    budget = own.activation_memory_budget
    if budget is not None and not 0 <= budget <= 1:
        refuse(f"activation_memory_budget={budget} must be from 0 to 1")
    if own.measure and own.device != "cpu":
        refuse("--measure needs --device=cpu")
    args = train_gpt2.parse_args(rest)
    if own.record7 and (args.max_ngram or args.key_shift or args.logit_softcap):
        refuse("--record7 has no n-grams, key shift or soft-cap: set them to 0")
    return own, args


def main(argv):
    """Print the plan that argv asks for, and what checks it."""
    own, args = parse(argv)
    if own.record7:
        plan = record7(args)
        print(page(plan, "H100, record 7", 8, own.rows))
        error = 1000 * plan.seconds / PUBLIC_MS - 1
        print(f"\nits log: {PUBLIC_MS} ms; the plan's error: {error:+.1%}")
        return 0
    plan = planned(args, own.device, own.world_size, own.activation_memory_budget)
    print(page(plan, own.device, own.world_size, own.rows))
    if own.measure:
        seconds = measured(plan.args)
        predicted = sum(seconds_of(g, plan.rates) for _, g in plan.kernels)
        error = f"{predicted / seconds - 1:+.1%}"
        print(f"\nforward and backward: {1000 * seconds:.1f} ms measured, the least of 10;")
        print(f"{1000 * predicted:.1f} ms planned, error {error}")
    return 0


if __name__ == "__main__":
    command(main)
