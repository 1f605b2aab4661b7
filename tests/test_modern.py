"""The modern model: against a plain implementation, and by its properties."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import train_modern
from conftest import TINY, take_step
from plain26 import PlainModern, PlainTraining
from test_model import gradients
from torch import nn
from train_modern import (
    RECIPE,
    ModernGPT,
    ModernSettings,
    apply_schedule,
    attention_mask,
    build_optimizers,
)

import train_gpt2

# The modern model in small: packed documents of random lengths, windows of 1 to 4 blocks.
SMALL = {
    **TINY, "n_layer": 9, "n_head": 2, "n_embd": 32, "ngram_rows": 997, "max_ngram": 3,
    "attention_window": 480, "document_token": 3, "sequence_length": 512, "batch_size": 2,
    "device_batch_size": 1, "num_iterations": 12, "warmdown_fraction": 6 / 12,
    "final_lr_fraction": 0.15, "learning_rate": 0.01, "embedding_learning_rate": 0.1,
    "muon_learning_rate": 0.03 / 32**0.5, "muon_weight_decay": 32**0.5,
    "momentum_warmup_fraction": 4 / 12, "momentum_cooldown_fraction": 5 / 12,
}  # fmt: skip


def make_model(dtype="float32", **changes):
    """Return a small modern model and its settings. No weight is zero or equal to another."""
    args = ModernSettings(**{**SMALL, "dtype": dtype, **changes})
    torch.manual_seed(0)
    model = ModernGPT(args, getattr(torch, dtype))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim < 2:
                p.add_(0.2 * torch.randn_like(p))
            elif name in ("lm_head.weight", "ngrams.weight") or "value" in name:
                nn.init.normal_(p, std=0.3)
            elif "c_proj" in name:
                nn.init.normal_(p, std=0.1)
    return model, args


def make_batch(args, rows=2, seed=1):
    """Return inputs and targets. The documents begin at random places."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, args.sequence_length + 1)
    tokens = torch.randint(4, args.vocab_size, shape, generator=generator)
    starts = torch.rand(shape, generator=generator) < 1 / 90
    tokens[starts] = args.document_token if args.attention_window else 3
    return tokens[:, :-1], tokens[:, 1:]


def plain_model(model, args):
    plain = PlainModern(args)
    plain.load_state_dict(model.state_dict())
    return plain


# ---- Loss and gradients --------------------------------------------------------------------------
def loss_and_gradients(model, *batch):
    model.zero_grad()
    loss = model(*batch)
    loss.backward()
    return loss.item(), gradients(model)


@pytest.mark.parametrize(
    "changes, window",  # in blocks
    [
        ({}, 1), ({}, 2), ({}, 3), ({}, 4), ({"n_layer": 11}, 3), ({"n_layer": 8}, 3),
        ({"n_layer": 4}, 2), ({"n_layer": 3}, 3), ({"n_layer": 2}, 4), ({"n_layer": 1}, 2),
        ({"n_layer": 2, "max_ngram": 7}, 2),
        ({"n_layer": 4, "ngram_rows": 0, "max_ngram": 2}, 2),
        ({"n_layer": 4, "attention_window": 0, "document_token": 50256}, 8),  # all earlier tokens
    ],
)  # fmt: skip
def test_loss_and_gradients_are_those_of_the_plain_model(changes, window):
    model, args = make_model(**changes)
    model.window_blocks.fill_(window)
    inputs, targets = make_batch(args)
    loss, ours = loss_and_gradients(model, inputs, targets)
    exact_loss, exact = loss_and_gradients(plain_model(model, args), inputs, targets, window)
    assert abs(loss - exact_loss) < 1e-5 and ours.keys() == exact.keys()
    for name, gradient in ours.items():
        size = exact[name].norm()
        assert (gradient - exact[name]).norm() < 1e-5 * size.clamp(min=1), name
        # The only layer is also the saved one, so that backout cancels.
        assert size > 1e-4 or args.n_layer == 1, f"{name} has no effect"


@pytest.mark.parametrize("n_layer", [9, 4])
def test_in_bfloat16_they_agree_up_to_rounding(n_layer):
    model, args = make_model("bfloat16", n_layer=n_layer)
    model.window_blocks.fill_(3)
    inputs, targets = make_batch(args)
    loss, ours = loss_and_gradients(model, inputs, targets)
    plain = plain_model(model, args)  # in float32
    exact_loss, exact = loss_and_gradients(plain, inputs, targets, 3)
    assert loss == pytest.approx(exact_loss, rel=5e-3)
    for name, gradient in ours.items():
        similarity = F.cosine_similarity(gradient.float().flatten(), exact[name].flatten(), dim=0)
        assert similarity > 0.97, name


# ---- Training ------------------------------------------------------------------------------------
@pytest.mark.parametrize("n_layer, length", [(8, 384), (4, 256)])
def test_a_run_follows_the_plain_training_step_by_step(n_layer, length):
    """Through momentum's warm-up and cooldown, the growing window and the decay of the rates."""
    model, args = make_model(n_layer=n_layer, sequence_length=length, attention_window=length)
    plain = plain_model(model, args)
    optimizers, training = build_optimizers(model, args), PlainTraining(plain, args)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["initial_lr"] = group["lr"]  # as set_up does
    for step in range(args.num_iterations):
        inputs, targets = make_batch(args, seed=step)
        apply_schedule(model, optimizers, step, args)
        loss = take_step(model, optimizers, inputs, targets, args, step).item()
        plain_loss = plain(inputs, targets, training.window())
        plain_loss.backward()
        training.update()
        # Rounding of bfloat16 updates alone makes differences of up to 7e-5 and 3e-3.
        assert abs(plain_loss.item() - loss) < 1e-4
        for (name, p), q in zip(model.named_parameters(), plain.parameters()):
            assert (p - q).norm() < 1e-2 * q.norm(), (step, name)


# ---- Presets and schedules -----------------------------------------------------------------------
@pytest.mark.parametrize("preset", ["modern", "modern_24gb"])
def test_the_presets_have_the_values_of_the_public_records(preset):
    args = train_gpt2.parse_args([f"--preset={preset}"], RECIPE)
    assert args.batch_size * args.sequence_length == 262_144
    assert args.val_tokens == 10_485_760
    with torch.device("meta"):
        model = ModernGPT(args, torch.bfloat16)
    C, V = 768, 50304
    matrices = 10 * 4 * C**2 + 11 * 8 * C**2  # attention, MLP
    tables = 2 * V * C + 5 * V * C + 5 * V * C  # tokens and head, values, n-grams
    small = 5 * 12 * 6 + 11 * 3 + 1 + 1  # gates, input weights, skip, backout
    assert sum(p.numel() for p in model.parameters()) == matrices + tables + small
    muon, adamw = build_optimizers(model, args)
    assert [(group["lr"], group["betas"]) for group in adamw.param_groups] == [
        (pytest.approx(0.008), (0.5, 0.95)),
        (pytest.approx(0.6), (0.75, 0.95)),
        (pytest.approx(0.008), (0.9, 0.99)),
        (pytest.approx(0.04), (0.9, 0.99)),
    ]
    sizes = [sum(p.numel() for p in group["params"]) for group in adamw.param_groups]
    assert sizes == [V * C, 11 * V * C, 5 * 12 * 6, 11 * 3 + 2]
    for group in adamw.param_groups:
        assert group["eps"] == 1e-10 and group["weight_decay"] == 0
    (group,) = muon.param_groups
    assert group["beta2"] == 0.95 and group["cautious"]
    # What the public code multiplies updates and weights by, with its rate of 0.03
    assert group["lr"] * C**0.5 == pytest.approx(0.03)
    assert group["lr"] * group["weight_decay"] == pytest.approx(1.2 * 0.03**2)


def test_new_weights_have_the_distributions_of_the_public_records():
    shape = dict(n_layer=11, n_embd=384, vocab_size=512, ngram_rows=99)
    model = ModernGPT(ModernSettings(**shape, attention_window=0))
    for name, p in model.named_parameters():
        if name == "wte.weight":
            assert p.std().item() == pytest.approx(1, rel=0.02), name
        elif "value_table" in name:
            assert p.std().item() == pytest.approx(0.01, rel=0.02), name
        elif "c_proj" in name or name.endswith(
            ("value_gate.weight", "ngrams.weight", "lm_head.weight")
        ):
            assert not p.any(), name
        elif p.ndim == 2:
            assert p.std().item() == pytest.approx(0.5 * 384**-0.5, rel=0.02), name
            assert p.abs().max().item() == pytest.approx(0.5 * (3 / 384) ** 0.5, rel=0.02), name
    weights = torch.stack([block.input_weights for block in model.h])
    assert torch.equal(weights, torch.tensor([1.1, 0.0, 0.1]).expand(11, 3))
    assert model.backout_weight == 0.5
    assert model.skip_weight.item() == pytest.approx(1 / (1 + math.exp(1.5)), abs=0.003)


def test_all_matrices_of_another_mlp_are_initialized(monkeypatch):
    class Gated(train_modern.MLP):
        def __init__(self, args):
            super().__init__(args)
            self.gate = nn.Sequential(nn.Linear(args.n_embd, 512, bias=False), nn.GELU())

    monkeypatch.setattr(train_modern, "MLP", Gated)
    for block in ModernGPT(ModernSettings(**SMALL)).h:
        weight = block.mlp.gate[0].weight.detach()
        assert weight.std() * weight.shape[1] ** 0.5 == pytest.approx(0.5, rel=0.05)


def schedule_at(step, args):
    """Return the factor of learning rates, Muon's momentum and decay, and the window in blocks."""
    group = dict(initial_lr=1.0, momentum=args.muon_momentum)
    model = SimpleNamespace(window_blocks=torch.tensor(0))
    RECIPE.apply_schedule(model, [SimpleNamespace(param_groups=[group])], step, args)
    return group["lr"], group["momentum"], group["weight_decay"], model.window_blocks.item()


@pytest.mark.parametrize("preset", ["modern", "modern_24gb"])
def test_the_schedule_is_that_of_the_public_records(preset):
    args = train_gpt2.parse_args([f"--preset={preset}"], RECIPE)
    last = args.num_iterations
    scales, momenta, decays, windows = zip(*[schedule_at(step, args) for step in range(last + 1)])
    steps = [0, 1, 150, 300, 301, last // 2, last - 50, last - 25, last]
    expected = [0.85, 0.85 + 0.1 / 300, 0.9, 0.95, 0.95, 0.95, 0.95, 0.9, 0.85]
    assert [momenta[step] for step in steps] == pytest.approx(expected)
    decay = round(0.55 * last)
    steps = [0, last - decay, last - decay // 2, last]
    expected = [1, 1, 0.15 + 0.85 / 2, 0.15]
    assert [scales[step] for step in steps] == pytest.approx(expected, abs=1e-3)
    assert decays == pytest.approx([args.muon_weight_decay * scale for scale in scales])
    steps = [0, 1, last // 2, last - 1, last]
    assert [windows[step] for step in steps] == [1, 1, 7, 14, 14]  # blocks of 128 tokens


# ---- Masks --------------------------------------------------------------------------------------
def dense(mask):
    """Return a BlockMask as a bool tensor (B, T, T)."""
    blocks = mask.to_dense()[:, 0].bool()  # (B, T / 128, T / 128)
    sequence = torch.arange(len(blocks))[:, None, None]
    position = torch.arange(128 * blocks.size(1))
    pairs = mask.mask_mod(sequence, 0, position[:, None], position)
    return pairs & blocks.repeat_interleave(128, 1).repeat_interleave(128, 2)


@pytest.mark.parametrize("window", [1, 2, 5])
def test_the_masks_of_a_gpu_and_of_a_cpu_are_equal(window, monkeypatch):
    _, args = make_model()
    documents = (make_batch(args)[0] == args.document_token).cumsum(1)
    cpu = attention_mask(documents, torch.tensor(window))[:, 0]

    class OnGPU(torch.Tensor):
        is_cuda = True

    on_gpu = documents.as_subclass(OnGPU)
    uncompiled = attention_mask(on_gpu, torch.tensor(window))
    assert torch.equal(uncompiled[:, 0], cpu)  # FlexAttention would store all scores
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(dense(attention_mask(on_gpu, torch.tensor(window))), cpu)


def test_windows_and_documents_do_not_recompile():
    """One graph for training and one for validation, whatever the window and the documents."""
    model, args = make_model(n_layer=2, attention_window=2048)
    model.compile(dynamic=False, fullgraph=True, backend="eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for window in 1, 2, 12:
        model.window_blocks.fill_(window)
        inputs, targets = make_batch(args, seed=window)
        model(inputs, targets).backward()
        with torch.no_grad():
            model(inputs, targets)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
