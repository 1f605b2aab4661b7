"""The modern model: against a plain implementation, and by its properties.

Each part of the plain implementation is also broken on purpose, to show that the tests see it.
"""

import dataclasses
import functools
import math
from pathlib import Path
from types import ModuleType

import plain26
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, take_step
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
    window_blocks_at,
)

# The modern model in small: packed documents of random lengths, windows of 1 to 4 blocks.
SMALL = {
    **TINY, "model": "modern", "n_layer": 9, "n_head": 2, "n_embd": 32, "ngram_rows": 997,
    "max_ngram": 3, "window": 480, "document_token": 3, "sequence_length": 512, "batch_size": 2,
    "device_batch_size": 1, "num_iterations": 12, "adamw_every": 2, "warmdown_fraction": 6 / 12,
    "final_lr": 0.15, "learning_rate": 0.01, "embedding_learning_rate": 0.1,
    "muon_learning_rate": 0.03 / 32**0.5, "muon_weight_decay": 32**0.5,
    "muon_warmup_fraction": 4 / 12, "muon_cooldown_fraction": 5 / 12,
}  # fmt: skip


def make_model(dtype="float32", **changes):
    """Return a small modern model and its settings. No weight is zero or equal to another."""
    args = Hyperparameters(**{**SMALL, "dtype": dtype, **changes})
    torch.manual_seed(0)
    model = build_model(args, getattr(torch, dtype))
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
    tokens[starts] = args.document_token if args.window else 3
    return tokens[:, :-1], tokens[:, 1:]


def faulty_plain(*changes):
    """Return a copy of the module plain26 in which texts are replaced: pairs (old, new)."""
    source = Path(plain26.__file__).read_text()
    for old, new in changes:
        assert source.count(old) == 1, f"{old!r} must occur once in plain26.py"
        source = source.replace(old, new)
    module = ModuleType("faulty26")
    exec(compile(source, "faulty26", "exec"), vars(module))
    return module


def plain_model(model, args, module=plain26):
    plain = module.PlainModern(args)
    plain.load_state_dict(model.state_dict())
    return plain


# ---- Loss and gradients --------------------------------------------------------------------------
def loss_and_gradients(model, *batch):
    model.zero_grad()
    loss = model(*batch)
    loss.backward()
    return loss.item(), gradients(model)


def largest_difference(ours, theirs):
    """Return the largest difference of losses and gradients, relative to values above 1."""
    (our_loss, our_gradients), (their_loss, their_gradients) = ours, theirs
    if our_gradients.keys() != their_gradients.keys():
        return math.inf
    differences = [abs(our_loss - their_loss)]
    for name, gradient in our_gradients.items():
        norm = their_gradients[name].norm()
        differences.append(((gradient - their_gradients[name]).norm() / norm.clamp(min=1)).item())
    return max(differences)


@pytest.mark.parametrize(
    "changes, window",  # in blocks
    [
        ({}, 1), ({}, 2), ({}, 3), ({}, 4), ({"n_layer": 8}, 3), ({"n_layer": 4}, 2),
        ({"n_layer": 3}, 3), ({"n_layer": 2}, 4), ({"n_layer": 1}, 2),
        ({"n_layer": 4, "ngram_rows": 0, "max_ngram": 2}, 2),
        ({"n_layer": 4, "window": 0, "document_token": 50256}, 8),  # all tokens before
    ],
)  # fmt: skip
def test_loss_and_gradients_are_those_of_the_plain_model(changes, window):
    model, args = make_model(**changes)
    model.window_blocks.fill_(window)
    inputs, targets = make_batch(args)
    ours = loss_and_gradients(model, inputs, targets)
    theirs = loss_and_gradients(plain_model(model, args), inputs, targets, window)
    assert largest_difference(ours, theirs) < 1e-5
    if args.n_layer > 1:  # the only layer is also the saved one, so that backout cancels
        assert min(gradient.norm() for gradient in ours[1].values()) > 1e-4, "an unused part"


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


SKIP = 'outputs[self.roles["skip"][0]]'
CALL = "block(x, x0, ngrams, saved, inputs, masks[block.is_long])"
LONG = "self.is_long = layer in"
MODEL_FAULTS = {
    "gates without their factor of 2": ("gate = 2 * ", "gate = "),
    "no gates": ('2 * torch.sigmoid(self.attn["value_gate"](x[:, :, :12]))', "torch.ones(B, T, 2)"),
    "gates read other channels": ("x[:, :, :12]", "x[:, :, -12:]"),
    "no value embeddings": ("v = v + gate", "gate"),
    "values in other layers": ('if layer in roles["values"]', "if layer in (0, 2, 6, 7, 8)"),
    "no key offset": ("if self.is_long:", "if False:"),
    "key offset in all layers": ("if self.is_long:", "if True:"),
    "key offset in the short layers": ("if self.is_long:", "if not self.is_long:"),
    "key offset in the channels with positions": ("in D // 4, 3 * D // 4:", "in 0, D // 2:"),
    "key offset in half of its channels": ("in D // 4, 3 * D // 4:", "in (D // 4,):"),
    "the first key is replaced, too": ("before[:, : T - 1,", "torch.zeros_like(before)[:, 1:,"),
    "the first key is that of the last token": (
        "k[:, 1:, :, channels] = before[:, : T - 1, :, channels]",
        "k[..., channels] = before.roll(1, 1)[..., channels]",
    ),
    "key offset from the next token": (
        "k[:, 1:, :, channels] = before[:, : T - 1",
        "k[:, :-1, :, channels] = before[:, 1:",
    ),
    "other frequencies": ("1024 **", "10000 **"),
    "positions in all channels": ("rates += [0.0] * (D // 4)", "rates += rates"),
    "another attention scale": ("0.12 *", "0.25 *"),
    "long window in other layers": ("long=[3, 8]", "long=[4, 8]"),
    "all windows are short": ("masks[block.is_long]", "masks[False]"),
    "all windows are long": ("masks[block.is_long]", "masks[True]"),
    "tokens see other documents": ("token == document_token", "False"),
    "attention reads the stream": ("x if saved is None else saved", "x"),
    "the MLP reads the saved output, too": (
        'self.mlp["c_fc"](norm(x))',
        'self.mlp["c_fc"](norm(x if saved is None else saved))',
    ),
    "another output is saved": ("saved=6", "saved=5"),
    "no gradient through the saved output": ("    saved = x\n", "    saved = x.detach()\n"),
    "no backout": ("x = x - self.backout_weight", "x = x - 0 * self.backout_weight"),
    "backout is added": ("x = x - self.backout_weight", "x = x + self.backout_weight"),
    "no skip": (f"x = x + self.skip_weight * {SKIP}", "x = x + 0 * self.skip_weight"),
    "skip from another layer": (SKIP, 'outputs[self.roles["skip"][0] - 1]'),
    "skip after the input weights": (
        f"x = x + self.skip_weight * {SKIP}\n            x = {CALL}",
        f"x = {CALL} + self.skip_weight * {SKIP}",
    ),
    "n-grams only in the first layer": ("(x, x0, ngrams,", "(x, x0, ngrams * (layer == 0),"),
    "no n-grams": ("(x, x0, ngrams,", "(x, x0, ngrams * 0,"),
    "n-grams of two tokens only": ("weight[rows].sum(2)", "weight[rows[..., 0]]"),
    "n-grams in another order": ("value * 1000003 + earlier", "earlier * 1000003 + value"),
    "n-grams with another weight": ("self.input_weights[2] *", "self.input_weights[1] *"),
    "no token embeddings": ("(x, x0, ngrams,", "(x, 0 * x0, ngrams,"),
    "the stream has no weight": ("self.input_weights[0] * x", "self.input_weights[0] * 0 + x"),
    "weights are applied to the sum": (
        "x = x + self.input_weights[1] * x0",
        "x = x + self.input_weights[0] * self.input_weights[1] * x0",
    ),
    "embeddings without norm": ("norm(self.wte(inputs))", "self.wte(inputs)"),
    "no norm of queries": ("half_rotated(norm(q)), ", "half_rotated(q), "),
    "no last norm": ("self.lm_head(norm(x))", "self.lm_head(x)"),
    "no square in the MLP": ("(norm(x))) ** 2", "(norm(x)))"),
    "no softcap": ("15 * torch.tanh(logits / 15)", "logits"),
    "another softcap": ("15 * torch.tanh(logits / 15)", "30 * torch.tanh(logits / 30)"),
}  # fmt: skip


@pytest.fixture(scope="module")
def nine_layers():
    """A model, its settings, a batch, and its loss and gradients."""
    model, args = make_model(sequence_length=256)
    model.window_blocks.fill_(2)
    batch = make_batch(args)
    return model, args, batch, loss_and_gradients(model, *batch)


@pytest.mark.parametrize("fault", MODEL_FAULTS)
def test_a_fault_of_the_model_is_seen(fault, nine_layers):
    model, args, batch, ours = nine_layers
    plain = faulty_plain(MODEL_FAULTS[fault]).PlainModern(args)
    plain.load_state_dict(model.state_dict(), strict=False)
    for p in plain.parameters():
        p.grad = torch.zeros_like(p)  # a fault may leave a parameter unused
    theirs = plain(*batch, 2)
    theirs.backward()
    assert largest_difference(ours, (theirs.item(), gradients(plain))) > 1e-3


# ---- Training ------------------------------------------------------------------------------------
@functools.cache
def our_run(n_layer, length):
    """Train as a run does; return the loss and the parameters of each step."""
    model, args = make_model(n_layer=n_layer, sequence_length=length, window=length)
    optimizers = build_optimizers(model, args)
    history = []
    for step in range(args.num_iterations):
        batch = make_batch(args, seed=step)
        apply_schedule(model, optimizers, step, args)
        loss = take_step(model, optimizers, *batch, args, step).item()
        history.append((loss, [p.detach().clone() for p in model.parameters()]))
    return history


def first_departure(history, module, n_layer, length):
    """Return the first step after which plain training differs, or None if it never does."""
    model, args = make_model(n_layer=n_layer, sequence_length=length, window=length)
    plain = plain_model(model, args, module)
    training = module.PlainTraining(plain, args)
    for step, (our_loss, ours) in enumerate(history):
        inputs, targets = make_batch(args, seed=step)
        loss = plain(inputs, targets, training.window())
        loss.backward()
        training.update()
        # Rounding of bfloat16 updates alone makes differences of up to 7e-5 and 3e-3.
        changes = [(p - q).norm() / q.norm() for p, q in zip(ours, plain.parameters())]
        if abs(loss.item() - our_loss) > 1e-4 or max(changes) > 1e-2:
            return step
    return None


@pytest.mark.parametrize("n_layer, length", [(8, 384), (4, 256)])
def test_a_run_follows_the_plain_training_step_by_step(n_layer, length):
    """Through momentum's warm-up and cooldown, the growing window and the decay of the rates."""
    assert first_departure(our_run(n_layer, length), plain26, n_layer, length) is None


GATE_OPTIONS = "return 0.008, 0.9, 0.99"
SCALAR_OPTIONS = "return 0.04, 0.9, 0.99"
TABLE_OPTIONS = "return self.args.embedding_learning_rate, 0.75, 0.95"
TRAINING_FAULTS = {
    "AdamW in every step": ("is_due = self.step % self.args.adamw_every == 0", "is_due = True"),
    "AdamW in the first of two steps": ("adamw_every == 0", "adamw_every == 1"),
    "AdamW sees only the last gradient": (
        "elif is_due:\n                self.adamw_update(name, p, scale)",
        "else:\n                self.adamw_update(name, p, scale) if is_due else None",
    ),
    "AdamW's bias is corrected by all steps": ("adamw_steps += is_due", "adamw_steps += 1"),
    "the rate of the gates": (GATE_OPTIONS, GATE_OPTIONS.replace("return", "return 5 *")),
    "the rate of the scalars": (SCALAR_OPTIONS, SCALAR_OPTIONS.replace("0.04", "0.03")),
    "the rate of the tables": ("return self.args.embedding_learning_rate", "return 0.05"),
    "beta1 of the head": ("0.5, 0.95", "0.75, 0.95"),
    "beta2 of the head": ("0.5, 0.95", "0.5, 0.99"),
    "token embeddings in the group of the head": (
        'if name == "lm_head.weight"', 'if name in ("wte.weight", "lm_head.weight")'
    ),
    "beta1 of the tables": ("0.75, 0.95", "0.9, 0.95"),
    "beta2 of the tables": ("0.75, 0.95", "0.75, 0.99"),
    "the betas of the gates": (GATE_OPTIONS, GATE_OPTIONS.replace("0.9, 0.99", "0.0, 0.5")),
    "the betas of the scalars": (SCALAR_OPTIONS, SCALAR_OPTIONS.replace("0.9, 0.99", "0.8, 0.95")),
    "no warm-up": ("min(rise, fall, 1)", "min(fall, 1)"),
    "no cooldown": ("min(rise, fall, 1)", "min(rise, 1)"),
    "no Nesterov momentum": ("p.grad.lerp(average, momentum)", "average"),
    "one rate for all shapes": ('2 if "mlp" in name', '1 if "mlp" in name'),
    "mlp.c_proj is not rescaled": ('2 if "mlp" in name', '2 if "mlp.c_fc" in name'),
    "rows of any size": ("update = update / squares.clamp(min=1e-10).sqrt()", ""),
    "beta2 of NorMuon": ("0.95 * squares + 0.05 * size", "0.9 * squares + 0.1 * size"),
    "columns in place of rows": ("1 if p.size(0) >= p.size(1) else 0", "0"),
    "rows of wide matrices": ("1 if p.size(0) >= p.size(1) else 0", "1"),
    "NorMuon changes the norm": ("update = update * length / update.norm()", ""),
    "no weight decay": ("rate * decay * p * same_sign", "0"),
    "decay that is not cautious": ("p * same_sign", "p"),
    "decay where the update has the other sign": ("p * same_sign", "p * ~same_sign"),
    "decay that ignores the schedule": ("decay = scale *", "decay ="),
    "decay that depends on the shape": ("+ rate * decay", "+ rate * shape_factor * decay"),
    "rates that do not fall": ("return 1.0 if left >= 1", "return 1.0 if left >= 0"),
    "rates that fall to zero": ("(1 - left) * self.args.final_lr", "0"),
    "AdamW's rates do not fall": ("p -= scale * rate", "p -= rate"),
    "a window that does not grow": ("self.args.window * progress", "self.args.window"),
}  # fmt: skip


@pytest.mark.parametrize("fault", TRAINING_FAULTS)
def test_a_fault_of_the_training_is_seen(fault):
    module = faulty_plain(TRAINING_FAULTS[fault])
    assert first_departure(our_run(4, 256), module, 4, 256) is not None


# ---- Presets and schedules -----------------------------------------------------------------------
@pytest.mark.parametrize("preset", ["modern", "modern_24gb"])
def test_the_presets_have_the_values_of_the_public_records(preset):
    args = train_gpt2.parse_args([f"--preset={preset}"])
    assert args.batch_size * args.sequence_length == 262_144
    assert args.val_tokens == 10_485_760
    with torch.device("meta"):
        model = build_model(args, torch.bfloat16)
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


def test_11_layers_are_those_of_the_public_records():
    layers = train_gpt2.modern_layers(11)
    found = {name: [i for i in range(11) if getattr(layers[i], name)] for name in layers[0]._fields}
    assert found == dict(
        has_attention=[0, 1, 2, 3, 4, 5, 7, 8, 9, 10], has_value_table=[1, 2, 8, 9, 10],
        is_long=[3, 10], starts_skip=[3], ends_skip=[6], is_saved=[7], reads_saved=[8, 9, 10],
    )  # fmt: skip


def test_new_weights_have_the_distributions_of_the_public_records():
    args = Hyperparameters(model="modern", n_layer=11, n_embd=384, vocab_size=512, ngram_rows=99)
    model = build_model(args, torch.float32)
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


def test_equal_keys_find_the_token_after_an_earlier_copy(monkeypatch):
    args = Hyperparameters(
        model="modern", n_layer=2, n_head=1, n_embd=128, vocab_size=512, equal_keys=True
    )
    torch.manual_seed(0)
    model = build_model(args, torch.float32)
    best_keys = []

    def attend(q, k, v, mask):
        scores = (q @ k.transpose(-2, -1))[0, 0].tril(-1)  # of earlier tokens
        best_keys.append(scores.argmax(1))
        return v

    monkeypatch.setattr(train_gpt2, "attend", attend)
    model(torch.randperm(512)[:64].repeat(2)[None])
    copies = torch.arange(65, 128)  # without the first, because the first key is not offset
    found = [(keys[copies] == copies - 64 + 1).float().mean() for keys in best_keys]
    assert found[0] < 0.1 and found[1] > 0.9


@pytest.mark.parametrize("preset", ["modern", "modern_24gb"])
def test_the_schedule_is_that_of_the_public_records(preset):
    args = train_gpt2.parse_args([f"--preset={preset}"])
    last = args.num_iterations
    steps = [0, 1, 150, 300, 301, last // 2, last - 50, last - 25, last]
    momenta = [0.85, 0.85 + 0.1 / 300, 0.9, 0.95, 0.95, 0.95, 0.95, 0.9, 0.85]
    assert [momentum_at(step, args) for step in steps] == pytest.approx(momenta)
    decay = round(0.55 * last)
    steps = [0, last - decay, last - decay // 2, last]
    scales = [1, 1, 0.15 + 0.85 / 2, 0.15]
    assert [lr_scale_at(step, args) for step in steps] == pytest.approx(scales, abs=1e-3)
    steps = [0, 1, last // 2, last - 1, last]
    blocks = [1, 1, 7, 14, 14]  # of 128 tokens
    assert [window_blocks_at(step, args) for step in steps] == blocks


@pytest.mark.parametrize("preset", train_gpt2.PRESETS)
def test_a_longer_run_stretches_the_schedule(preset):
    args = train_gpt2.parse_args([f"--preset={preset}"])
    longer = dataclasses.replace(args, num_iterations=3 * args.num_iterations)
    # The parts of a schedule are rounded to steps. Half a step of the momentum's fall by 0.1:
    cooldown_steps = args.muon_cooldown_fraction * args.num_iterations
    tolerance = max(1e-3, 0.5 * 0.1 / cooldown_steps) if cooldown_steps else 1e-3
    for step in range(args.num_iterations + 1):
        assert window_blocks_at(step, args) == window_blocks_at(3 * step, longer)
        for value_at in lr_scale_at, momentum_at:
            assert value_at(step, args) == pytest.approx(value_at(3 * step, longer), abs=tolerance)


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
    on_gpu = documents.as_subclass(OnGPU)
    uncompiled = attention_mask(on_gpu, torch.tensor(window))
    assert torch.equal(uncompiled[:, 0], cpu)  # FlexAttention would store all scores
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(dense(attention_mask(on_gpu, torch.tensor(window))), cpu)


def test_windows_and_documents_do_not_recompile():
    """One graph for training and one for validation, whatever the window and the documents."""
    model, args = make_model(n_layer=2, window=2048)
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
        ({"window": 0}, "document_token has no effect with window=0"),
        ({"n_embd": 8}, "n_embd=8 must be at least 12"),
        ({"max_ngram": 1}, "max_ngram=1 must be at least 2 and at most 2147483647"),
        ({"num_iterations": 11}, "num_iterations must be a multiple of adamw_every=2"),
        ({"save_every": 3}, "save_every must be a multiple of adamw_every=2"),
        ({"document_token": 64}, "document_token=64 is not in the vocabulary"),
        ({"sequence_length": 500}, "sequence_length=500 must be a multiple of 128 with --window"),
    ],
)
def test_unsuitable_settings_are_rejected(changes, phrase):
    with pytest.raises(train_gpt2.UserError, match=phrase):
        Hyperparameters(**{**SMALL, **changes})
