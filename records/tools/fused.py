"""The kernels of a compiled training step, found without a GPU: what records/tools/plan.py times.

train_gpt2.warm_up compiles the model on tensors without storage; the graphs that would go to
inductor are kept instead and fused by a simple rule: element-wise operations and sums that are
connected, between products and attention, are one kernel. It reads each value from outside once,
and writes what is used outside. A value that can be made from no more bytes than it has is made
again instead. Sums over rows of more than LONG_ROW values read the rows anew for what depends on
the sum; Triton finds a soft-max's maximum and sum in one pass. A sum of everything ends a kernel.
"""

import contextlib
import dataclasses
import itertools
import operator
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch import fx, nn
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import flop_registry

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_gpt2

aten = torch.ops.aten
KERNELS = [kernel for kernel in SDPBackend.__members__.values() if kernel != SDPBackend.ERROR]
LONG_ROW = 8192  # values that a kernel cannot keep between two passes over a row


# ---- Graphs --------------------------------------------------------------------------------------
def without_storage(build, device):
    """Return a module as build() makes it, its tensors on the device: call in FakeTensorMode."""
    with torch.device("meta"):
        module = build()
    made = {}  # tied tensors stay tied
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, old in tensors.items():
                if old is not None and old not in made:
                    new = torch.empty(old.shape, dtype=old.dtype, device=device)
                    made[old] = nn.Parameter(new) if isinstance(old, nn.Parameter) else new
                tensors[name] = made.get(old)
    return module


class Given(nn.Module):
    """Stands for the table of n-grams, which is not compiled: its sum has a gradient."""

    def __init__(self, args):
        super().__init__()
        self.channels = args.n_embd

    @torch.compiler.disable
    def forward(self, inputs):
        return inputs.new_zeros(*inputs.shape, self.channels, dtype=torch.float32).requires_grad_()


@contextlib.contextmanager
def pytorchs_settings():
    """Undo train_gpt2.configure_backend while inside; what it sets inside ends here."""
    reduced = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        with functorch_config.patch(activation_memory_budget=1.0), sdpa_kernel(KERNELS):
            yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(reduced)
        torch.use_deterministic_algorithms(deterministic)


def traced(build, args, budget=None, gpu=True):
    """Return (forward, backward): the graphs of a micro-batch that inductor would compile.

    build: returns the model. budget: of activation memory; None: as configure_backend sets it.
    On a machine without a GPU the tensors are a CPU's: attention is another operation of the same
    size. is_cuda answers as on a GPU, if gpu is True; what asks for the device gets the CPU.
    """
    device = "cuda" if gpu and torch.cuda.is_available() else "cpu"
    graphs = []

    def keep(graph, inputs, **named):
        graphs.append((graph.graph, named))
        return make_boxed_func(graph.forward)

    def compile_model(**named):
        if budget is not None:
            functorch_config.activation_memory_budget = budget
        backend = lambda graph, inputs: compile_fx(graph, inputs, inner_compile=keep)  # noqa: E731
        nn.Module.compile(model, backend=backend, **{**named, "disable": False})

    def is_cuda(variable, compiler):
        return VariableTracker.build(compiler, gpu)

    torch._dynamo.reset()
    with (
        pytorchs_settings(),
        functorch_config.patch(enable_autograd_cache=False),
        FakeTensorMode(),
        mock.patch.object(FakeTensor, "is_cuda", gpu, create=True),
        mock.patch.object(TensorVariable, "method_attr_is_cuda", is_cuda),  # asked while compiling
        contextlib.suppress(DataDependentOutputException),  # warm_up reads the loss after a pass
    ):
        model = without_storage(build, device)
        if getattr(model, "ngrams", None):
            model.ngrams = Given(args)
        model.compile = compile_model
        tokens = torch.zeros(
            args.device_batch_size, args.sequence_length, dtype=torch.int64, device=device
        )
        batch = tokens, tokens.clone()
        train_gpt2.configure_backend(args, torch.device("cuda" if gpu else "cpu"))
        train_gpt2.warm_up(model, args, SimpleNamespace(next_batch=lambda: batch))
    torch._dynamo.reset()
    sides = {False: [], True: []}
    for graph, named in graphs:
        if not named.get("is_inference"):
            sides[named.get("is_backward", False)].append(graph)
    (forward,), (backward,) = sides.values()  # more: the model is not one graph
    return forward, backward


# ---- Operations ----------------------------------------------------------------------------------
REDUCTIONS = {aten.sum, aten.mean, aten.amax, aten.amin, aten.max, aten.any, aten.argmax, aten.prod}
REDUCTIONS |= {aten.var, aten.var_mean, aten.linalg_vector_norm}
SCATTERS = {aten.index_put, aten.scatter_add, aten.embedding_dense_backward, aten.scatter_reduce}
LOOKUPS = {aten.embedding, aten.gather, aten.index}
VIEWS = {aten.view, aten.permute, aten.expand, aten.slice, aten.select, aten.unsqueeze, aten.alias}
VIEWS |= {aten.squeeze, aten.split, aten.split_with_sizes, aten.t, aten.transpose, aten.reshape}
VIEWS |= {aten.as_strided, aten._unsafe_view, aten.view_as_complex, aten.view_as_real, aten.detach}
CONSTANTS = {aten.full, aten.scalar_tensor, aten.empty, torch.ops.prims.iota, aten.arange}
BARRIERS = {"product", "attention", "scatter"}  # kinds that nothing is fused with


def packet(node):
    """Return what a node calls, without the overload."""
    return getattr(node.target, "overloadpacket", node.target)


def same_layout(node):
    """Return whether a clone has its source's layout, so that inductor leaves it out."""
    if packet(node) is not aten.clone:
        return False
    return node.meta["val"].stride() == node.args[0].meta["val"].stride()


def kind_of(node):
    """Return source, constant, view, result (one of several), fused, or one of BARRIERS."""
    what = packet(node)
    if node.op != "call_function":
        return "source"
    if what is operator.getitem:
        return "view" if kind_of(node.args[0]) == "view" else "result"
    if "attention" in str(what):
        return "attention"
    if what in flop_registry:
        return "product"
    for kind, members in ("scatter", SCATTERS), ("constant", CONSTANTS), ("view", VIEWS):
        if what in members:
            return kind
    return "view" if same_layout(node) else "fused"


def base(node):
    """Return the node whose memory a view shows."""
    while kind_of(node) == "view":
        node = node.args[0]
    return node


def numel(node):
    """Return the values of a node's tensor; 0 where it has none, or several."""
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0


def size(node):
    """Return the bytes of a node's tensor; constants and tuples have none."""
    return 0 if kind_of(node) == "constant" or not numel(node) else node.meta["val"].nbytes


# ---- Kernels -------------------------------------------------------------------------------------
@dataclasses.dataclass
class Group:
    """A kernel, its operations and the bytes that it moves."""

    kind: str  # product, attention, scatter, fused
    nodes: list
    flops: float
    bytes: float
    name: str
    written: tuple = ()  # nodes
    read: tuple = ()  # (node, the node that reads it)


def attention_flops(node):
    """Return an attention's operations: 2 products forward, 5 backward; causal is half of them."""
    backward = "backward" in str(node.target)
    q, k, *_ = [a for a in node.args if isinstance(a, fx.Node)][backward:]
    B, H, T, D = q.meta["val"].shape
    causal = any(a is True for a in [*node.args, *node.kwargs.values()])
    return (10 if backward else 4) * B * H * T * k.meta["val"].size(2) * D / (1 + causal)


def barrier_group(node):
    """Return the Group of a product, an attention or a scatter: operands read, results written."""
    kind, inputs = kind_of(node), node.all_input_nodes
    results = [node] if numel(node) else [user for user in node.users if numel(user)]
    flops = 0
    moved = sum(min(n.meta["val"].nbytes, size(base(n))) for n in inputs if numel(n))
    moved += sum(map(size, results))
    if kind == "attention":
        flops = attention_flops(node)
    elif kind == "product":
        values = [n.meta["val"] if isinstance(n, fx.Node) else n for n in node.args]
        flops = flop_registry[packet(node)](*values, out_val=node.meta["val"])
    else:  # each added value is read, and its place read and written
        moved += 2 * max(size(base(n)) for n in inputs)
    shown = results or [node]
    name = f"{packet(node)} {tuple(inputs[0].meta['val'].shape)} to {text_of(shown[0])}"
    read = tuple((base(n), node) for n in inputs)
    return Group(kind, [node], flops, moved, name, tuple(results), read)


def text_of(node):
    """Return shape and dtype."""
    value = node.meta["val"]
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def ends_kernel(node):
    """Return whether what reads a node needs another kernel: a sum of everything counts."""
    return kind_of(node) in BARRIERS or (packet(node) in REDUCTIONS and numel(node) == 1)


def begins_soft_max(node):
    """Return whether a node is a = amax(x), and sum(exp(x - a)) follows: one pass then finds both.

    Inductor's post_grad.prepare_softmax_pattern, for Triton alone; tests hold that it matches.
    """
    found = [node] if packet(node) is aten.amax else []
    for operation in aten.sub, aten.exp, aten.sum:
        found = [user for n in found for user in n.users if packet(user) is operation]
    return bool(found)


class Fusion:
    """The fused groups of a graph, by the rule on top of this file."""

    def __init__(self, graph, online=False):
        self.depth, self.made, self.known = {}, {}, {}
        self.online = online
        wanted = []  # what must be in memory
        for node in graph.nodes:
            before = [self.depth[i] + ends_kernel(i) for i in node.all_input_nodes]
            self.depth[node] = max(before, default=0)
            if kind_of(node) in BARRIERS or node.op == "output":
                wanted += node.all_input_nodes
        wanted = [base(node) for node in wanted]
        while wanted:
            node = wanted.pop()
            if node not in self.made and kind_of(node) == "fused":
                self.made[node] = self.walk(node)
                wanted += {leaf for leaf, *_ in self.made[node][1]}

    def below(self, node):
        """Return what is read to make a value again; of one that takes more than that: itself."""
        if kind_of(node) != "fused" or packet(node) in REDUCTIONS | LOOKUPS:
            return {node}
        return set().union(*(self.leaves(base(i)) for i in node.all_input_nodes))

    def leaves(self, node):
        """Return what is read to have a value: itself, or no more bytes that make it."""
        if node not in self.known:
            below = self.below(node)
            self.known[node] = below if sum(map(size, below)) <= size(node) else {node}
        return self.known[node]

    def walk(self, node):
        """Return (nodes, {(leaf, consumer, input, bytes)}) of the kernel that computes a node."""
        inside, edges, stack = {node}, set(), [node]
        while stack:
            consumer = stack.pop()
            for i in consumer.all_input_nodes:
                source = base(i)
                if kind_of(source) == "fused" and self.depth[source] == self.depth[node]:
                    stack += {source} - inside
                    inside.add(source)
                    continue
                for leaf in self.leaves(source):
                    count = numel(i) if leaf is source else numel(leaf)
                    if packet(consumer) in LOOKUPS:
                        count = min(count, numel(consumer))
                    edges.add((leaf, consumer, i, count * leaf.meta["val"].itemsize))
        have = {leaf for leaf, *_ in edges}
        again = {leaf for leaf in have if self.below(leaf) <= have - {leaf}}
        return inside, {edge for edge in edges if edge[0] not in again}

    def passes(self, inside):
        """Return how often long rows are read: once more after each sum that others wait for."""
        rank, row = {}, 0
        for node in sorted(inside):
            before = []
            for i in map(base, node.all_input_nodes):
                if i in inside:
                    ratio = max(map(numel, i.all_input_nodes), default=0) / max(1, numel(i))
                    long = packet(i) in REDUCTIONS and ratio > LONG_ROW
                    row = max(row, numel(i) * ratio if long else 0)
                    together = self.online and begins_soft_max(i)
                    before.append(rank[i] + (long and not together))
            rank[node] = max(before, default=0)
        return 1 + max(rank.values()), row

    def groups(self):
        """Return the Groups: kernels of one depth that share nodes or large inputs are one."""
        merged = []  # [depth, shared, written]
        for node, (inside, edges) in self.made.items():
            shared = inside | {leaf for leaf, *_ in edges if size(leaf) > 2**20}
            same = [m for m in merged if m[0] == self.depth[node] and m[1] & shared]
            merged = [m for m in merged if m not in same]
            together = shared.union(*(m[1] for m in same))
            merged.append((self.depth[node], together, sum((m[2] for m in same), [node])))
        return [self.group(sorted(written)) for _, _, written in merged]

    def group(self, written):
        """Return the Group of the kernel that writes these nodes."""
        inside = set().union(*(self.made[node][0] for node in written))
        edges = set().union(*(self.made[node][1] for node in written))
        passes, row = self.passes(inside)
        reads = Counter()
        for leaf, *_, count in edges:
            reads[leaf] = min(reads[leaf] + count, size(leaf))
        moved = sum(n * (passes if row and numel(leaf) >= row else 1) for leaf, n in reads.items())
        moved += sum(map(size, written))
        flops = sum(max(numel(node), *map(numel, node.all_input_nodes), 0) for node in inside)
        name = f"{len(inside)} operations to {text_of(max(written, key=size))}"
        name += f" and {len(written) - 1} more" * (len(written) > 1)
        read = tuple(edge[:2] for edge in edges)
        return Group("fused", sorted(inside), flops, moved, name, tuple(written), read)


def groups_of(graph, online=False):
    """Return all Groups of a graph: products, attention, scatters, fused. online: whether a
    soft-max finds its maximum and its sum in one pass."""
    alone = [barrier_group(node) for node in graph.nodes if kind_of(node) in BARRIERS]
    return alone + Fusion(graph, online).groups()


def saved_by(graph):
    """Return the nodes that a forward graph leaves for backward, and its loss."""
    return [n for n in next(reversed(graph.nodes)).all_input_nodes if n.op != "placeholder"]


def computed_again(forward, backward):
    """Return the nodes of backward that forward computes, too: the partitioner keeps names."""
    names = {node.name for node in forward.nodes if node.op == "call_function"}
    again = [n for n in backward.nodes if n.name in names and n.op == "call_function"]
    return [n for n in again if kind_of(n) not in ("view", "constant")]


def live_bytes(graph, groups, given):
    """Return the most bytes that live at a time: what a graph makes, and is given to use up."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    first = {node: order[node] for group in groups for node in group.written}
    first |= dict.fromkeys(given, 0)
    last = dict(first)
    results = [(base(node), next(reversed(graph.nodes))) for node in saved_by(graph)]
    for node, reader in results + [edge for group in groups for edge in group.read]:
        last[node] = max(last.get(node, 0), order[reader])
    change = Counter()
    for node, start in first.items():
        change[start] += size(node)
        change[last[node] + 1] -= size(node)
    return max(itertools.accumulate(change[i] for i in sorted(change)))


def peak_of(forward, backward, forward_groups, backward_groups):
    """Return the most bytes that a micro-batch needs beside weights and gradients."""
    names = {node.name for node in saved_by(forward)}
    saved = [node for node in backward.nodes if node.name in names and kind_of(node) == "source"]
    before = live_bytes(forward, forward_groups, [])
    return max(before, live_bytes(backward, backward_groups, saved))
