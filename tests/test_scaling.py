"""Scaling on paper: what must hold for any inputs, and the bytes that the check prints."""

import dataclasses
import math
import re
import sys
from unittest import mock

import check
import pytest
import scaling
import torch
import torch.distributed as dist
from conftest import TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from report import command, made_from
from scaling import COUNTS, Setup
from step_profile import newton_schulz_flops

import train_gpt2

ms = st.floats(0.01, 1e4)
setups = st.builds(
    Setup,
    forward_backward_ms=ms,
    newton_schulz_ms=ms,
    adamw_ms=ms,
    other_ms=ms,
    node_gbytes=st.floats(1, 1e4),
    network_gbytes=st.floats(1, 1e4),
    latency_us=st.floats(0, 100),
    gloo_us=st.floats(0, 1000),
    gpus_a_node=st.sampled_from(COUNTS),
)
counts = st.sampled_from(COUNTS)
IDEAL = Setup(node_gbytes=math.inf, network_gbytes=math.inf, latency_us=0.0, gloo_us=0.0)
WORK = "forward and backward", "Newton-Schulz", "AdamW and the rest"


def matrices():
    return list(scaling.network().h.parameters())


def basis(name):
    return Setup.__dataclass_fields__[name].metadata["basis"]


@given(setups)
@settings(max_examples=30, deadline=None)
def test_one_gpu_takes_the_sum_of_its_times_and_sends_nothing(setup):
    step, efficiency, sent, tokens = scaling.measures(setup, 1, 512)
    times = setup.forward_backward_ms, setup.newton_schulz_ms, setup.adamw_ms, setup.other_ms
    assert step == pytest.approx(sum(times))
    assert (efficiency, sent) == (1, pytest.approx(0, abs=1e-12))
    assert tokens == pytest.approx(512 * 1024 / (step / 1000))


@given(setups, counts, st.sampled_from([64, 512, 4096]))
@settings(max_examples=60, deadline=None)
def test_more_gpus_compute_no_slower_and_never_beyond_their_number(setup, W, sequences):
    few, many = (scaling.parts(setup, count, sequences) for count in (max(1, W // 2), W))
    for part in WORK:
        assert many[part] <= few[part] * (1 + 1e-9), part
    assert all(time >= 0 for time in many.values())
    step, efficiency, sent, _ = scaling.measures(setup, W, sequences)
    assert 0 < efficiency <= 1 + 1e-9 and 0 <= sent < 1
    assert step == pytest.approx(sum(many.values()))


@pytest.mark.parametrize("W", COUNTS)
def test_on_perfect_links_only_the_largest_share_of_newton_schulz_stays(W):
    of, loads = scaling.parts(IDEAL, W), scaling.muon(W).loads
    assert of["gradients"] == of["signals"] == 0
    assert of["updates"] == pytest.approx(0, abs=1e-12)
    assert of["forward and backward"] == pytest.approx(IDEAL.forward_backward_ms / W)
    part = of["Newton-Schulz"] / IDEAL.newton_schulz_ms
    assert part == pytest.approx(max(loads) / sum(loads))
    largest = max(scaling.share(p.shape) for p in matrices())
    assert max(1 / W, largest) <= part + 1e-12 and part <= 1 / W + largest  # any greedy dealing
    assert sum(scaling.share(p.shape) for p in matrices()) == pytest.approx(1)


@given(st.integers(0, 2**40), counts, counts)
def test_a_trip_sends_what_a_ring_does_however_the_gpus_are_grouped(size, W, gpus_a_node):
    inside, between = scaling.trip(size, W, gpus_a_node)
    assert inside + between == pytest.approx((W - 1) / W * size)
    assert (between == 0) == (gpus_a_node >= W or size == 0)


def printed_mib(W):
    """Return (gradients, updates): MiB a rank sends in a step, as the check prints them."""
    gpt = scaling.network()
    optimizers = torch.optim.AdamW(gpt.lm_head.parameters()), scaling.muon(W)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = 0.0
    [line] = [line for line in check.optimizer_table(gpt, optimizers, W) if "sent" in line]
    return [float(number) for number in re.findall(r":([\d.]+)", line)]


@pytest.mark.parametrize("W", [2, 4, 8])
def test_bytes_are_those_that_the_check_prints(W):
    slow = Setup(newton_schulz_ms=0.0, node_gbytes=1.0, latency_us=0.0)  # 10^6 bytes a ms
    of, (gradients, updates) = scaling.parts(slow, W), printed_mib(W)
    scalars = 2 * 8 * (W - 1) / W  # bytes
    assert of["gradients"] * 1e6 - scalars == pytest.approx(gradients * 2**20, abs=0.06 * 2**20)
    assert of["updates"] * 1e6 == pytest.approx(updates * 2**20, abs=0.06 * 2**20)


def test_the_rounds_are_those_that_muon_sends(monkeypatch):
    """Muon itself, as one rank of three, with a small model's matrices and nobody to send to.

    In rounds of three stacks, of its own order: the most expensive first.
    """
    fields = dict(vocab_size=64, n_layer=5, n_head=2, n_embd=16)
    with torch.device("meta"):
        gpt = train_gpt2.GPT(train_gpt2.Hyperparameters(**fields))
    monkeypatch.setattr(scaling, "network", lambda: gpt)
    monkeypatch.setattr(scaling, "muon", scaling.muon.__wrapped__)
    sent = []

    def all_reduce(tensor, async_op):
        sent.append((tensor.dtype, tensor.numel()))
        return mock.Mock()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    params = [torch.zeros(p.shape, requires_grad=True) for p in gpt.h.parameters()]
    for p in params:
        p.grad = torch.ones_like(p)
    train_gpt2.Muon(params, lr=0.1, world_size=3).step()
    expected = [sum(p.numel() for p in matrices) for matrices in scaling.rounds(3)]
    assert sent == [(torch.bfloat16, values) for values in expected]
    stacks = 5 + 2 + 2  # of at most four: 20 square matrices, 5 wide and 5 tall ones
    assert len(sent) == stacks / 3 and sent == sorted(sent, key=lambda of: -of[1])


@given(setups, counts)
@settings(max_examples=60, deadline=None)
def test_updates_hide_behind_newton_schulz_but_the_last_round(setup, W):
    values = [sum(p.numel() for p in matrices) for matrices in scaling.rounds(W)]
    rounds = [scaling.all_reduce_ms(2 * count, W, setup) for count in values]
    work, wait = scaling.muon_ms(setup, W)
    assert rounds[-1] - 1e-9 * (1 + work) <= wait <= sum(rounds) + 1e-9 * (1 + work)
    assert sum(values) == sum(p.numel() for p in matrices())


@pytest.mark.parametrize("W", COUNTS)
def test_latency_of_the_gradients_is_that_of_two_sums_whatever_the_number_of_matrices(W):
    late = dataclasses.replace(IDEAL, latency_us=1000.0)  # a hop a ms
    assert scaling.gradients_ms(late, W) == pytest.approx(2 * 2 * math.log2(W))


def test_the_sums_of_gradients_are_those_that_a_step_makes(monkeypatch):
    """train_step itself, as one rank of two, with a small model and nobody to send to."""
    args = train_gpt2.Hyperparameters(**TINY)
    gpt = train_gpt2.GPT(args)
    sent = []

    def all_reduce(tensor):
        sent.append(tensor.nbytes)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    inputs = torch.zeros(2, args.sequence_length, dtype=torch.int64)
    train_gpt2.train_step(gpt, [], inputs, inputs, 1.0, args)
    summed = []
    monkeypatch.setattr(scaling, "network", lambda: gpt)
    monkeypatch.setattr(scaling, "all_reduce_ms", lambda size, W, _: summed.append(size) or 0.0)
    scaling.gradients_ms(Setup(), 2)
    assert sorted(sent) == sorted(summed) and len(sent) == 2


def test_the_stated_times_follow_from_the_operations_and_bytes_they_name():
    """2 operations a multiplication, five iterations; AdamW: weight, two momenta, gradient.

    Muon does five full iterations on square matrices, and 20% less on all matrices together.
    """
    setup = Setup()
    operations = 2 * 5 * sum(scaling.muon(1).loads)
    for p in matrices():
        in_full = 2 * 5 * train_gpt2.matrix_cost(p)
        done = newton_schulz_flops(p.shape)
        assert done == in_full if p.size(0) == p.size(1) else done < in_full
    done = sum(newton_schulz_flops(p.shape) for p in matrices())
    assert done == pytest.approx(0.8 * operations)
    assert setup.newton_schulz_ms == pytest.approx(operations / 200e12 * 1000, abs=0.05)
    assert f"{operations / 1e12:.2f} TFLOP" in basis("newton_schulz_ms")
    values = scaling.network().lm_head.weight.numel()
    assert setup.adamw_ms == pytest.approx(28 * values / 2.7e12 * 1000, abs=0.05)
    assert f"{values / 1e6:.1f}M" in basis("adamw_ms")


def test_signals_are_asked_for_in_a_ring_of_cpus():
    slow = dataclasses.replace(IDEAL, gloo_us=1000.0)  # a hop a ms
    assert [scaling.parts(slow, W)["signals"] for W in (1, 2, 8)] == [0, 2, 14]


def test_public_figures_are_met_within_the_printed_errors(capsys):
    scaling.main([])
    printed = re.findall(
        r"\| ([\d.]+) (ms|min) \| ([\d.]+) \2 \| ([+-][\d.]+)% \|", capsys.readouterr().out
    )
    rows = scaling.checks()
    assert len(printed) == len(rows) >= 6
    for check_, line in zip(rows, printed):
        unit, error = check_.unit, 100 * (check_.predicted / check_.seen - 1)
        assert abs(error) < 20, "a change of the model that leaves the public figures behind"
        assert line[1] == unit and float(line[3]) == pytest.approx(error, abs=0.051)
        assert float(line[2]) / float(line[0]) - 1 == pytest.approx(error / 100, abs=0.002)


def test_a_figure_rescaled_to_its_own_number_of_gpus_is_itself():
    for W in COUNTS:
        assert scaling.rescaled(500.0, W, W) == pytest.approx(500.0)


BAD = [
    "--node_gbytes=0",
    "--network_gbytes=-5",
    "--adamw_ms=-1",
    "--other_ms=nan",
    "--forward_backward_ms=0",
    "--newton_schulz_ms=inf",
    "--latency_us=-0.1",
    "--gloo_us=-1",
    "--gpus_a_node=0",
    "--gpus_a_node=6",
    "--gpus_a_node=2.5",
    "--adamw_ms=fast",
    "--speed=1",
]


@pytest.mark.parametrize("argument", BAD)
def test_a_bad_value_is_refused_in_a_sentence(argument, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scaling.py", argument])
    with pytest.raises(SystemExit) as refusal:
        command(scaling.main)
    # argparse prints its sentence and exits with 2; ours leaves with it, which means 1
    said = capsys.readouterr().err if refusal.value.code == 2 else refusal.value.code
    name, _, value = argument.removeprefix("--").partition("=")
    sentence = said.strip().splitlines()[-1]
    assert name in sentence and value in sentence and "Traceback" not in said


def test_the_page_says_what_is_given_and_is_the_same_each_time(capsys):
    arguments = ["--forward_backward_ms=900", "--network_gbytes=25"]
    assert scaling.main(arguments) == 0
    page = capsys.readouterr().out
    scaling.main(arguments)
    assert page == capsys.readouterr().out
    assert "| forward_backward_ms | 900 | given |" in page and "| 25 | given |" in page
    assert page.count("stated, not measured") == len(dataclasses.fields(Setup)) - 2
    assert [line.startswith("| 1024 |") for line in page.splitlines() if "n/a |" in line] == [True]
    assert len(page.splitlines()) <= 60


def test_the_picture_carries_what_it_was_made_from(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    prints = []
    for name, argument in [("a", "--adamw_ms=1"), ("b", "--adamw_ms=1"), ("c", "--adamw_ms=2")]:
        scaling.main([argument, "--picture", f"{tmp_path / name}.png"])
        prints.append(made_from(tmp_path / f"{name}.png"))
        assert made_from(tmp_path / f"{name}.svg") == prints[-1]
    assert prints[0] == prints[1] != prints[2] and None not in prints


def test_public_figures_stand_beside_the_predicted_curves(monkeypatch):
    pytest.importorskip("matplotlib")
    saved = []
    monkeypatch.setattr(scaling, "save", lambda figure, *_: saved.append(figure))
    scaling.draw(Setup(), "", "p.png")
    steps, errors = saved[0].axes
    points = {(*line.get_xdata(), *line.get_ydata()) for line in steps.lines}
    rows = scaling.checks()
    seen = {(c.W, c.seen) for c in rows if c.unit == "ms"}
    assert len(seen) >= 4 and seen <= points
    assert {(c.on, c.measured) for c in rows if c.unit == "ms"} <= points
    assert {note.get_text() for note in steps.texts} <= {f"{i}" for i in range(1, len(rows) + 1)}
    drawn = [(*line.get_ydata(), *line.get_xdata()) for line in errors.lines[: len(rows)]]
    assert drawn == [(i, pytest.approx(100 * c.error)) for i, c in enumerate(rows, 1)]
    low, high = errors.get_xlim()
    assert all(low < 100 * c.error < high for c in rows)
    names = [label.get_text() for label in errors.get_yticklabels()]
    assert all(f"{c.seen:.4g} {c.unit}" in name for c, name in zip(rows, names))
    curve = {(*x.get_xdata(),): x.get_ydata() for x in steps.lines if "512" in x.get_label()}
    assert list(curve) == [tuple(COUNTS[:-1])]
    times = curve[tuple(COUNTS[:-1])]
    assert times == pytest.approx([scaling.measures(Setup(), W, 512)[0] for W in COUNTS[:-1]])
    fastest = COUNTS[min(range(len(times)), key=lambda i: times[i])]
    assert f"shortest on {fastest} GPUs, {min(times):.1f} ms" in saved[0].get_suptitle()
    ends = f"{min(c.error for c in rows):+.1%} to {max(c.error for c in rows):+.1%}"
    assert ends in saved[0].get_suptitle()
