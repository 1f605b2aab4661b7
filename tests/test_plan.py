"""The plan of a step: what its graphs must hold, bytes by hand, and a table that adds up."""

import dataclasses
import math
import re
import sys

import fused
import plain
import plan
import pytest
import torch
from conftest import TINY
from fused import Fusion, groups_of, kind_of, numel, traced
from report import command
from torch._inductor.fx_passes import post_grad
from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import train_gpt2
from train_gpt2 import Hyperparameters

# real sizes but two blocks: enough tokens for eight chunks of the loss
ARGS = Hyperparameters(n_layer=2, device_batch_size=16)
FIELDS = [f"--{name}={value}" for name, value in TINY.items() if name not in ("device", "compile")]
SMALL = train_gpt2.parse_args([*FIELDS, "--vocab_size=96", "--dtype=bfloat16"])


def model_of(args):
    return lambda: train_gpt2.GPT(args, torch.bfloat16)


@pytest.fixture(scope="module")
def graphs():
    """Return (forward, backward) of a micro-batch of ARGS."""
    return traced(model_of(ARGS), ARGS)


def nodes_of(graph, kind):
    return [node for node in graph.nodes if kind_of(node) == kind]


def has_vocabulary(node):
    """Return whether a size of a product's operands or of its result is the vocabulary's."""
    return any(ARGS.vocab_size in n.meta["val"].shape for n in [node, *node.all_input_nodes])


def kernels(function, *shapes, dtype=torch.float32, online=False):
    """Return {kind: [Groups]} of a function of tensors with these shapes."""
    tensors = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    groups = groups_of(make_fx(function, tracing_mode="fake")(*tensors).graph, online)
    return {kind: [g for g in groups if g.kind == kind] for kind in ("product", "fused")}


# ---- what the step's graphs must hold ------------------------------------------------------------
def test_no_product_and_no_attention_is_computed_twice(graphs):
    forward, backward = graphs
    again = fused.computed_again(forward, backward)
    assert again, "nothing is computed again: the names no longer tell"
    assert not [node for node in again if kind_of(node) in fused.BARRIERS]
    of_blocks = [n for n in nodes_of(forward, "product") if not has_vocabulary(n)]
    of_head = [n for n in nodes_of(forward, "product") if has_vocabulary(n)]
    assert len(of_blocks) >= 4 * ARGS.n_layer and len(of_head) % 3 == 0
    assert len(nodes_of(backward, "product")) == 2 * len(of_blocks)  # none of the head
    for graph in graphs:
        attention = nodes_of(graph, "attention")
        assert len(attention) == ARGS.n_layer
        assert {"backward" in str(n.target) for n in attention} == {graph is backward}


def largest_logits(graphs):
    """Return the most values of a tensor with a row of the vocabulary for each token."""
    found = [0]
    for node in (node for graph in graphs for node in graph.nodes):
        shape = node.meta["val"].shape if numel(node) else ()
        if ARGS.vocab_size in shape and ARGS.n_embd not in shape:
            found.append(numel(node))
    return max(found)


def test_the_logits_of_a_whole_batch_are_never_in_memory(graphs):
    tokens = ARGS.device_batch_size * ARGS.sequence_length
    assert 0 < largest_logits(graphs) <= tokens * ARGS.vocab_size / 2
    args = Hyperparameters(n_layer=1, device_batch_size=16)
    whole = traced(
        lambda: plain.PlainGPT(args), args
    )  # the plain step's are: the search finds them
    assert largest_logits(whole) == tokens * ARGS.vocab_size


def test_flops_are_those_of_the_formula(graphs):
    """6 operations a weight and token; attention: 2 products forward, 5 backward, causal."""
    tokens = ARGS.device_batch_size * ARGS.sequence_length
    with torch.device("meta"):
        weights = sum(p.numel() for p in train_gpt2.GPT(ARGS).parameters())
    sums = {"product": 0, "attention": 0}
    for group in (group for graph in graphs for group in groups_of(graph)):
        if group.kind in sums:
            sums[group.kind] += group.flops
    assert sums["product"] == 6 * weights * tokens
    assert sums["attention"] == 7 * ARGS.n_layer * tokens * ARGS.sequence_length * ARGS.n_embd


def test_a_larger_budget_keeps_more_and_computes_less_again(graphs):
    before = torch._functorch.config.activation_memory_budget
    kept = [traced(model_of(SMALL), SMALL, budget) for budget in (0.5, 1.0)]
    saved = [sum(map(fused.size, fused.saved_by(forward))) for forward, _ in kept]
    again = [len(fused.computed_again(*pair)) for pair in kept]
    assert saved[0] < saved[1] and again[0] > again[1]
    assert torch._functorch.config.activation_memory_budget == before, "the trace left its setting"


def test_the_trace_of_a_cpus_step_has_plain_attention_and_leaves_no_setting():
    forward, _ = traced(model_of(SMALL), SMALL, gpu=False)
    kinds = {group.kind for group in groups_of(forward)}
    assert SMALL.sequence_length <= 512 and "attention" not in kinds
    assert torch.backends.cuda.flash_sdp_enabled()
    assert not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    assert not torch.are_deterministic_algorithms_enabled()


class Branching(torch.nn.Module):
    """Asks whether it is on a GPU."""

    def __init__(self):
        super().__init__()
        self.wte = torch.nn.Embedding(SMALL.vocab_size, SMALL.n_embd)

    def forward(self, inputs, targets):
        x = self.wte(inputs)
        return (x.exp() if x.is_cuda else x).sum()


@pytest.mark.parametrize("gpu", [True, False])
def test_the_branch_of_a_gpu_is_planned_without_one(gpu):
    forward, _ = traced(Branching, SMALL, gpu=gpu)
    assert gpu == any(fused.packet(node) is torch.ops.aten.exp for node in forward.nodes)


# ---- bytes by hand -------------------------------------------------------------------------------
def test_bytes_of_a_product_and_of_the_kernel_after_it():
    of = kernels(lambda a, b, c: ((a @ b).relu() * c).sum(1).exp(), (8, 16), (16, 32), (8, 32))
    [product], [kernel] = of["product"], of["fused"]
    assert product.flops == 2 * 8 * 16 * 32
    assert product.bytes == 4 * (8 * 16 + 16 * 32 + 8 * 32)
    assert len(kernel.nodes) == 4
    assert kernel.bytes == 4 * (8 * 32 + 8 * 32 + 8)


def test_a_value_that_is_cheaply_made_again_is_not_read():
    def step(x, w):
        wide = x.float()
        return wide + wide @ w.float()

    of = kernels(step, (8, 8), (8, 8), dtype=torch.bfloat16)
    assert sorted(g.bytes for g in of["fused"]) == [64 * (2 + 4), 64 * (2 + 4), 64 * (2 + 4 + 4)]


def test_long_rows_are_read_for_each_sum_that_others_wait_for():
    def soft_max(x):
        x = (x - x.amax(1, keepdim=True)).exp()
        return x / x.sum(1, keepdim=True)

    long = 2 * fused.LONG_ROW
    for length, online, reads in (fused.LONG_ROW, False, 1), (long, False, 3), (long, True, 2):
        [kernel] = kernels(soft_max, (4, length), online=online)["fused"]
        assert kernel.bytes == 4 * 4 * length * (reads + 1)


@pytest.mark.skipif(not hasattr(post_grad, "prepare_softmax_pattern"), reason="an older torch")
@pytest.mark.parametrize("softcap", [0.0, 15.0])
def test_inductor_finds_its_online_soft_max_in_every_chunk_of_the_loss(softcap):
    args = dataclasses.replace(SMALL, logit_softcap=softcap)
    forward, _ = traced(model_of(args), args)
    chunks = sum(map(fused.begins_soft_max, forward.nodes))
    matcher = PatternMatcherPass()
    register_replacement(
        post_grad.prepare_softmax_pattern, post_grad.prepare_softmax_replacement,
        [torch.empty(4, 8)], trace_fn=fwd_only, pass_dicts=matcher, scalar_workaround={"dim": -1},
    )  # fmt: skip
    assert matcher.apply(forward) == chunks > 0


def test_halves_of_a_tensor_are_read_once():
    [kernel] = kernels(lambda x: x[:, :4] + x[:, 4:], (16, 8))["fused"]
    assert kernel.bytes == 4 * (16 * 8 + 16 * 4)


def test_a_sum_of_everything_ends_a_kernel():
    assert len(kernels(lambda x: x / x.sum(), (16, 8))["fused"]) == 2


def test_every_value_that_a_kernel_reads_is_given_or_written(graphs):
    for graph in graphs:
        groups = groups_of(graph)
        written = [node for group in groups for node in group.written]
        assert len(written) == len(set(written)), "a value is written by two kernels"
        read = {node for group in groups for node, _ in group.read}
        made = {n for n in read if kind_of(n) not in ("source", "constant")}
        assert made <= set(written)
        assert {fused.base(n) for n in fused.saved_by(graph)} - {*written} <= {
            n for n in graph.nodes if kind_of(n) in ("source", "constant")
        }
        assert Fusion(graph).made.keys() == {n for n in written if kind_of(n) == "fused"}


# ---- the rest of a step --------------------------------------------------------------------------
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_collectives_are_those_of_a_step(world_size):
    rates = plan.DEVICES["H100"]
    parts, sent, memory = plan.rest_of_step(SMALL, rates, world_size, torch.bfloat16)
    with torch.device("meta"):
        gpt = train_gpt2.GPT(SMALL)
    matrices = [p.numel() for p in gpt.h.parameters()]
    stacks = train_gpt2.stacks_of(gpt.h.parameters())
    head = gpt.lm_head.weight.numel()
    if world_size == 1:
        assert not sent and not parts.get("communication")
        assert memory["states"] == pytest.approx(4 * sum(matrices) + 8 * head, abs=8)
    else:
        moved = sum(size for _, size in sent.values())
        # gradients in float32, updates in bfloat16, the loss and the sum of norms
        assert moved == 4 * (sum(matrices) + head) + 2 * sum(matrices) + 8
        # of gradients, of scalars, and a round for as many stacks of matrices as ranks
        assert sent.keys() == {"all_reduce"}
        assert sent["all_reduce"][0] == 2 + math.ceil(len(stacks) / world_size)
        takes = [plan.CALL + plan.COLLECTIVES["all_reduce"](world_size) * size / plan.BUS
                 for size in (4 * (sum(matrices) + head), 8)]  # fmt: skip
        assert parts["communication"] >= sum(takes) * (1 - 1e-9)
        assert memory["activations, then a buffer"] == memory["weights"]  # the buffer
    assert memory["weights"] == memory["gradients"] == 4 * (sum(matrices) + head)


def test_a_table_of_ngrams_moves_its_rows():
    """Forward reads rows and writes sums; backward the reverse; the rows' gradients are added."""
    rates = plan.Rates(1e99, 1e99, 1.0 / plan.STREAM, 0.0, 0.0)  # 1 byte/s
    args = dataclasses.replace(SMALL, max_ngram=4)
    sums, rows = 4 * 100 * args.n_embd, 4 * 3 * 100 * args.n_embd
    assert plan.table_seconds(args, rates, 100, 1) == pytest.approx(3 * rows + 2 * sums)
    assert plan.table_seconds(SMALL, rates, 100, 1) == 0


def test_what_moves_nothing_takes_no_time():
    counting = plan.Counting(plan.Rates(1e99, 1e99, 1e99, 0.0, 1.0), 1)  # a launch: 1 s
    with FakeTensorMode(), counting:
        x = torch.empty(8, 8)
        assert x.view(64)[:8].unsqueeze(0).mT.device == x.device and counting.seconds == 0
        x.add_(x @ x)
        assert counting.seconds == 2


def test_bytes_of_adamw_are_by_hand():
    """Weight, gradient and two momenta are read and written: the operation may scale gradients."""
    counting = plan.Counting(plan.Rates(1e99, 1e99, 1.0 / plan.STREAM, 0.0, 0.0), 1)  # 1 byte/s
    with FakeTensorMode(), counting:
        weight = torch.zeros(8, 8, requires_grad=True)
        optimizer = torch.optim.AdamW([weight], fused=True)
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        counting.start()
        optimizer.step()
    assert counting.seconds == pytest.approx(2 * 4 * 4 * 64, abs=32)  # and the count of steps


def test_a_collective_that_nobody_awaits_takes_no_time():
    counting = plan.Counting(plan.DEVICES["H100"], 2)
    send = counting.collective("all_reduce", 1.0)
    data = torch.zeros(10**6)
    takes = plan.CALL + 4e6 / plan.BUS
    first, second = (send(data, async_op=True) for _ in range(2))
    assert counting.seconds == 0
    counting.seconds = takes / 2
    first.wait()
    assert counting.seconds == pytest.approx(takes)
    second.wait()  # it began when the links were free
    assert counting.seconds == pytest.approx(2 * takes)
    send(data)
    assert counting.seconds == pytest.approx(3 * takes)
    assert counting.sent == {"all_reduce": [3, 12 * 10**6]}


# ---- the page ------------------------------------------------------------------------------------
@pytest.mark.parametrize("ngrams", [0, 3])
def test_the_parts_add_up_to_the_step(ngrams, capsys):
    more = [f"--max_ngram={ngrams}", "--ngram_rows=1000", f"--key_shift={ngrams // 3}"]
    place = ["--device=H200", "--world_size=3"]
    assert plan.main([*FIELDS, "--vocab_size=96", *more, *place]) == 0
    printed = capsys.readouterr().out
    table = printed[printed.index("Planned, not measured") :]
    ms = {name: float(value) for name, value in re.findall(r"\| (.+?) \| ([\d.]+) \|", table)}
    step = ms.pop("step")
    assert sum(ms.values()) == pytest.approx(step, abs=0.005 * (len(ms) + 1))
    wanted = {"products of head and loss", "attention, backward", "Newton-Schulz", "AdamW"}
    assert wanted | {"embedding", "communication", "gradient accumulation"} <= ms.keys()
    assert {"n-grams", "Adagrad"} & ms.keys() == ({"n-grams", "Adagrad"} if ngrams else set())
    assert "3 x H200, 2 x 2 sequences each" in printed
    assert "Peak memory" in printed and "Computed again" in printed


def test_twice_the_speed_takes_half_the_time(graphs):
    slow = plan.Rates(1e14, 1e13, 1e12, 0, 0)
    fast = plan.Rates(2e14, 2e13, 2e12, 0, 0)
    for group in groups_of(graphs[0]):
        assert plan.seconds_of(group, slow) == pytest.approx(2 * plan.seconds_of(group, fast))


BAD = [
    "--device=H1000",
    "--world_size=0",
    "--world_size=3",
    "--activation_memory_budget=1.5",
    "--activation_memory_budget=much",
    "--measure",
    "--batch=64",
    "--n_layer=0",
    "--record7 --max_ngram=2",
]


@pytest.mark.parametrize("argument", BAD)
def test_a_bad_value_is_refused_in_a_sentence(argument, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["plan.py", *argument.split()])
    with pytest.raises(SystemExit) as refusal:
        command(plan.main)
    sentence = refusal.value.code  # a text: status 1
    name, _, value = argument.split()[0].removeprefix("--").partition("=")
    assert name in sentence and value in sentence and "\n" not in sentence
