"""The modern model: against a plain implementation of record 21, and by its properties."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, both_dtypes, take_step
from plain21 import PlainRecord21, PlainTraining
from test_model import gradients
from torch import nn

import train_gpt2
from train_gpt2 import (
    Hyperparameters,
    apply_schedule,
    attention_mask,
    build_model,
    build_optimizers,
    lr_scale_at,
    momentum_at,
    window_at,
)

# Record 21 in small: packed documents of random lengths, windows of 1 to 4 blocks.
SMALL = {
    **TINY, "model": "modern", "n_layer": 6, "n_head": 2, "n_embd": 32, "value_embeddings": 2,
    "window": 480, "document_token": 3, "no_attention": 4, "sequence_length": 512, "batch_size": 2,
    "device_batch_size": 1, "num_iterations": 12, "warmdown_fraction": 5 / 12, "final_lr": 0.1,
    "learning_rate": 0.008, "embedding_learning_rate": 0.6, "scalar_learning_rate": 0.04,
    "muon_learning_rate": 0.05 / 32**0.5, "muon_warmup_fraction": 8 / 12,
}  # fmt: skip


def make_model(dtype="float32", **changes):
    """Return a small modern model and its settings. No weight is zero or equal to another."""
    args = Hyperparameters(**{**SMALL, "dtype": dtype, **changes})
    torch.manual_seed(0)
    model = build_model(args, getattr(torch, dtype))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "c_proj" in name or "lm_head" in name or "ngrams" in name:
                nn.init.normal_(p, std=0.1)
            elif p.ndim < 2:
                p.add_(0.3 * torch.randn_like(p))
    return model, args


def make_batch(args, rows=2, seed=1):
    """Return inputs and targets. The documents begin at random places."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, args.sequence_length + 1)
    tokens = torch.randint(4, args.vocab_size, shape, generator=generator)
    starts = torch.rand(shape, generator=generator) < 1 / 60
    tokens[starts] = args.document_token
    return tokens[:, :-1], tokens[:, 1:]


def compare(model, args, window):
    """Return the losses of both implementations, and their gradients."""
    plain = PlainRecord21(args)
    plain.load_state_dict(model.state_dict())
    model.window_blocks.fill_(window)
    inputs, targets = make_batch(args)
    model.zero_grad()
    ours, theirs = model(inputs, targets), plain(inputs, targets, window)
    ours.backward()
    theirs.backward()
    return ours.item(), theirs.item(), gradients(model), gradients(plain)


# ---- Record 21 ----------------------------------------------------------------------------------
@pytest.mark.parametrize("window", [1, 2, 3, 4])  # blocks
def test_loss_and_gradients_are_those_of_record_21(window):
    ours, theirs, our_grads, their_grads = compare(*make_model(), window)
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert our_grads.keys() == their_grads.keys()
    for name, gradient in our_grads.items():
        difference = (gradient - their_grads[name]).norm()
        assert difference < 1e-5 * max(1, their_grads[name].norm()), name


def test_in_bfloat16_they_agree_up_to_rounding():
    ours, theirs, our_grads, their_grads = compare(*make_model("bfloat16"), 3)
    assert ours == pytest.approx(theirs, rel=5e-3)
    for name, gradient in our_grads.items():
        similarity = F.cosine_similarity(
            gradient.float().flatten(), their_grads[name].flatten(), dim=0
        )
        assert similarity > 0.97, name


def test_a_run_follows_record_21_step_by_step():
    """Through the momentum's warm-up, the growing window and the decay of the rates."""
    model, args = make_model()
    optimizers = build_optimizers(model, args)
    plain = PlainRecord21(args)
    plain.load_state_dict(model.state_dict())
    training = PlainTraining(plain, args)
    for step in range(args.num_iterations):
        inputs, targets = make_batch(args, seed=step)
        apply_schedule(model, optimizers, step, args)
        loss = take_step(model, optimizers, inputs, targets, args)
        expected = plain(inputs, targets, training.window())
        expected.backward()
        training.update()
        assert loss.item() == pytest.approx(expected.item(), abs=5e-5), step
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        assert (p - q).norm() < 1e-3 * q.norm(), name


def test_the_preset_is_record_21():
    """The number of its parameters is that of the public script, but for its padded tables."""
    args = train_gpt2.parse_args(["--preset=record21"])
    with torch.device("meta"):
        model = build_model(args, torch.bfloat16)
    matrices = 11 * 4 * 768**2 + 12 * 8 * 768**2
    scalars = 12 * 2 + 11 * 2 + 6
    assert sum(p.numel() for p in model.parameters()) == 5 * 50304 * 768 + matrices + scalars
    muon, adamw = build_optimizers(model, args)
    assert [group["lr"] for group in adamw.param_groups] == [0.008, 0.6, 0.04]
    # 0.05, and 0.05 times 2 for matrices of 4 x 768 rows, is what the public code applies
    steps = {}
    for group in muon.param_groups:
        for p in group["params"]:
            steps[tuple(p.shape)] = group["lr"] * max(p.shape) ** 0.5
    expected = {(768, 768): 0.05, (3072, 768): 0.1, (768, 3072): 0.05}
    assert steps == pytest.approx(expected)
    assert args.batch_size * args.sequence_length * args.num_iterations == 695_992_320


def test_the_schedule_is_that_of_record_21():
    args = train_gpt2.parse_args(["--preset=record21"])
    steps = (0, 1, 150, 300, 885, 1062, 1416, 1769, 1770)
    windows = [window_at(step, args) for step in steps]
    assert windows == [1, 1, 2, 3, 7, 9, 11, 14, 14]  # blocks of 128 tokens
    momenta = [0.85, 0.85 + 0.1 / 300, 0.9, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95]
    assert [momentum_at(step, args) for step in steps] == pytest.approx(momenta)
    scales = [1, 1, 1, 1, 1, 1, 0.55, 0.1 + 0.9 / 708, 0.1]
    assert [lr_scale_at(step, args) for step in steps] == pytest.approx(scales)


@pytest.mark.parametrize("preset", train_gpt2.PRESETS)
def test_a_longer_run_stretches_the_schedule(preset):
    args = train_gpt2.parse_args([f"--preset={preset}"])
    longer = dataclasses.replace(args, num_iterations=3 * args.num_iterations)
    for step in range(args.num_iterations + 1):
        for value_at in lr_scale_at, momentum_at, window_at:
            assert value_at(step, args) == pytest.approx(value_at(3 * step, longer))


def test_by_default_the_rates_decay_during_the_last_1450_of_5100_steps():
    scales = [lr_scale_at(step, Hyperparameters()) for step in range(5101)]
    assert scales[: 5100 - 1450 + 1] == [1.0] * 3651
    assert scales[5100 - 1450 :] == pytest.approx([k / 1450 for k in range(1450, -1, -1)])


# ---- Masks --------------------------------------------------------------------------------------
def dense(mask):
    """Return a BlockMask as a bool tensor (B, T, T)."""
    counts, indices = mask.kv_num_blocks[:, 0], mask.kv_indices[:, 0]
    B, blocks = counts.shape
    T = blocks * train_gpt2.BLOCK
    seen = torch.zeros(B, blocks, blocks, dtype=torch.bool)
    for b in range(B):
        for query in range(blocks):
            seen[b, query, indices[b, query, : counts[b, query]]] = True
    position = torch.arange(T)
    sequence = torch.arange(B)[:, None, None]
    pairs = mask.mask_mod(sequence, 0, position[:, None], position)
    return pairs & seen.repeat_interleave(128, 1).repeat_interleave(128, 2)


@pytest.mark.parametrize("window", [1, 2, 5])
def test_the_masks_of_a_gpu_and_of_a_cpu_are_equal(window, monkeypatch):
    _, args = make_model()
    documents = (make_batch(args)[0] == args.document_token).cumsum(1)
    cpu = attention_mask(documents, torch.tensor(window))[:, 0]

    class OnGPU(torch.Tensor):
        device = torch.device("meta")

    monkeypatch.setattr(torch, "arange", lambda *a, arange=torch.arange, **k: arange(*a))
    gpu = attention_mask(documents.as_subclass(OnGPU), torch.tensor(window))
    assert torch.equal(dense(gpu), cpu)


@both_dtypes
def test_a_token_sees_its_document_within_the_window_and_nothing_else(dtype):
    """One layer, so that the reach is that of one attention."""
    model, args = make_model(dtype, n_layer=1, value_embeddings=0, no_attention=-1)
    inputs, _ = make_batch(args)
    model.window_blocks.fill_(2)
    seen = attention_mask((inputs == args.document_token).cumsum(1), model.window_blocks)[:, 0]
    for place in (0, 200, 300):
        changed = inputs.clone()
        changed[:, place] = torch.where(inputs[:, place] == 3, 3, inputs[:, place] % 60 + 4)
        differs = (model(inputs) != model(changed)).any(-1)
        assert not (differs & ~seen[:, :, place]).any()
        token_differs = inputs[:, place] != changed[:, place]
        assert (differs.sum(1) > 0.8 * seen[:, :, place].sum(1))[token_differs].all()


def test_windows_and_documents_do_not_recompile():
    """One graph for training and one for validation, whatever the window and the documents."""
    model, args = make_model(n_layer=2, value_embeddings=1, no_attention=-1, window=2048)
    model.compile(dynamic=False, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for window in 1, 2, 12:
        model.window_blocks.fill_(window)
        inputs, targets = make_batch(args, seed=window)
        model(inputs, targets).backward()
        with torch.no_grad():
            model(inputs, targets)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize(
    "changes, phrase",
    [
        ({"model": "gpt2"}, "value_embeddings can only be set with --model=modern"),
        ({"value_embeddings": 4}, "value_embeddings must be at most n_layer // 2 = 3"),
        ({"sequence_length": 500}, "with a window, sequence_length must be a multiple of 128"),
    ],
)
def test_unsuitable_settings_are_rejected(changes, phrase):
    with pytest.raises(train_gpt2.UserError, match=phrase):
        Hyperparameters(**{**SMALL, **changes})
