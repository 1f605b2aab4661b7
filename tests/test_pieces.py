"""What came after record 7, n-grams, key offset and soft-cap: exact, causal, off at 0."""

import re
import signal

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, STEP, TINY, bits, both_dtypes, run_forked, validations
from test_ideas import KILL

from train_gpt2 import GPT, Hyperparameters, Muon, NgramTable, build_optimizers, norm

PIECES = {"max_ngram": 4, "ngram_rows": 101, "key_shift": 1, "logit_softcap": 3.0}


def make_table(longest=4, rows=101, channels=8):
    torch.manual_seed(0)
    table = NgramTable(Hyperparameters(max_ngram=longest, ngram_rows=rows, n_embd=12))
    table.weight = torch.nn.Parameter(torch.randn(rows, channels))
    return table


def make_model(dtype="float32", **changes):
    """A tiny GPT of which every parameter, the tables' too, has a value that counts."""
    args = Hyperparameters(**{**TINY, **PIECES, **changes})
    torch.manual_seed(0)
    gpt = GPT(args, getattr(torch, dtype))
    with torch.no_grad():
        for p in gpt.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return gpt, args


def rows_by_python(tokens, place, longest, rows):
    """The rows of a place, by integers of any size: hash * 1000003 + earlier token + 1, from the
    token itself on, as 64 bits with a sign, modulo the rows; before the first token there are 0."""
    found, value = [], tokens[place]
    for distance in range(1, longest):
        earlier = tokens[place - distance] if place >= distance else 0
        value = value * 1000003 + earlier + 1
        value = (value + 2**63) % 2**64 - 2**63
        found.append(value % rows)
    return found


# ---- the table of n-grams ------------------------------------------------------------------------
@pytest.mark.parametrize("vocab_size", [5, 257, 50304])
@pytest.mark.parametrize("longest", [2, 3, 7])
def test_the_rows_of_a_place_are_those_of_its_last_tokens(longest, vocab_size):
    table = make_table(longest)
    inputs = torch.randint(vocab_size, (3, 11))
    out = table(inputs)
    assert out.shape == (3, 11, 8)
    for b, tokens in enumerate(inputs.tolist()):
        for place in range(11):
            rows = rows_by_python(tokens, place, longest, 101)
            torch.testing.assert_close(out[b, place], table.weight[rows].sum(0))


def test_few_of_the_n_grams_of_a_text_share_a_row():
    """By chance 4,096 of 2**18 rows share 32; a hash of the last letters alone would share most."""
    inputs = torch.randint(97, 123, (16, 256))
    for rows in (2**18, 251519):
        used = torch.stack([torch.tensor(rows_by_python(t, i, 5, rows)) for t in inputs.tolist()
                            for i in range(8, 256)])  # fmt: skip
        windows = [tuple(t[i - 3 : i + 1]) for t in inputs.tolist() for i in range(8, 256)]
        assert len(used[:, 2].unique()) > 0.97 * len(set(windows))


def test_its_gradient_is_sparse_and_that_of_a_dense_look_up():
    table = make_table()
    inputs = torch.randint(64, (3, 11))
    weights = torch.randn(3, 11, 8)
    for _ in range(2):  # micro-batches add up
        (table(inputs) * weights).sum().backward()
    gradient = table.weight.grad
    assert gradient.is_sparse
    dense = table.weight.detach().clone().requires_grad_()
    rows = [[rows_by_python(t, i, 4, 101) for i in range(11)] for t in inputs.tolist()]
    (2 * dense[torch.tensor(rows)].sum(2) * weights).sum().backward()
    torch.testing.assert_close(gradient.to_dense(), dense.grad)


def test_a_step_changes_the_rows_that_it_used_alone():
    gpt, args = make_model(device_batch_size=12)
    optimizers = build_optimizers(gpt, args, 0, 1)
    assert [type(o) for o in optimizers] == [torch.optim.AdamW, Muon, torch.optim.Adagrad]
    inputs = torch.randint(64, (1, 16))
    rows = {row for i in range(16) for row in rows_by_python(inputs[0].tolist(), i, 4, 101)}
    before = gpt.ngrams.weight.detach().clone()
    gpt(inputs, inputs.roll(-1, 1)).backward()
    optimizers[2].step()
    changed = (gpt.ngrams.weight != before).any(1).nonzero().flatten().tolist()
    assert set(changed) == rows
    # Adagrad's first step moves each value by the learning rate
    moved = (gpt.ngrams.weight - before)[changed].abs()
    torch.testing.assert_close(moved, torch.full_like(moved, args.learning_rate), rtol=0.01, atol=0)


# ---- the key offset ------------------------------------------------------------------------------
def test_a_key_meets_the_value_after_it():
    gpt, _ = make_model(key_shift=2)
    attn = gpt.h[0].attn
    x = torch.randn(3, 16, 16)
    q = attn.rotary(norm(attn.split_heads(attn.c_q(x))))
    k = norm(attn.split_heads(attn.c_k(x)))
    k = torch.cat([torch.zeros_like(k[:, :2]), k[:, :-2]], dim=1)
    v = attn.split_heads(attn.c_v(x))
    q, k, v = (x.transpose(1, 2) for x in (q, attn.rotary(k), v))
    scores = q @ k.mT / q.size(-1) ** 0.5
    scores = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf)
    expected = attn.c_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attn(x), expected)


# ---- the soft-cap --------------------------------------------------------------------------------
def test_logits_stay_below_the_cap_and_small_ones_stay():
    gpt, _ = make_model(logit_softcap=3.0)
    inputs = torch.randint(64, (2, 16))
    capped = gpt(inputs)
    gpt.logit_softcap = 0.0
    logits = gpt(inputs)
    assert logits.abs().max() > 3 > capped.abs().max()
    torch.testing.assert_close(capped, 3 * torch.tanh(logits / 3))


# ---- all in the model ---------------------------------------------------------------------------
@both_dtypes
def test_no_place_sees_a_later_token(dtype):
    gpt, _ = make_model(dtype)
    inputs = torch.randint(64, (2, 16))
    for place in (0, 7, 15):
        changed = inputs.clone()
        changed[:, place] = (changed[:, place] + 1) % 64
        differs = (gpt(inputs) != gpt(changed)).any(-1)
        assert not differs[:, :place].any() and differs[:, place].all()


@both_dtypes
def test_the_gradient_is_that_of_the_logits(dtype):
    gpt, _ = make_model(dtype)
    inputs = torch.randint(64, (4, 16))
    loss = gpt(inputs, inputs.roll(-1, 1))
    loss.backward()
    ours = [p.grad.to_dense() for p in gpt.parameters()]
    gpt.zero_grad()
    expected = F.cross_entropy(gpt(inputs).flatten(0, 1), inputs.roll(-1, 1).flatten())
    expected.backward()
    exact = dtype == "float32"
    torch.testing.assert_close(loss, expected, rtol=1e-5 if exact else 0.02, atol=0)
    for p, gradient in zip(gpt.parameters(), ours):
        difference = (p.grad.to_dense() - gradient).norm() / p.grad.to_dense().norm()
        assert difference < (1e-4 if exact else 0.05)


def test_dropout_keeps_its_fraction_of_the_ngrams_and_scales_them_up():
    args = Hyperparameters(max_ngram=3, ngram_rows=997, n_embd=12, ngram_dropout=0.6)
    table = NgramTable(args)
    torch.nn.init.ones_(table.weight)
    inputs = torch.randint(256, (64, 128))
    kept = table(inputs)[..., 0] * (1 - 0.6)  # the number of kept n-grams, out of 2
    assert {round(n, 4) for n in kept.unique().tolist()} == {0, 1, 2}
    for n, probability in enumerate([0.6**2, 2 * 0.6 * 0.4, 0.4**2]):
        assert kept.round().eq(n).float().mean().item() == pytest.approx(probability, abs=0.03)
    with torch.no_grad():  # validation
        assert (table(inputs) == 2).all()


def test_dropout_depends_on_the_sequence_alone():
    args = Hyperparameters(max_ngram=3, ngram_rows=997, n_embd=12, ngram_dropout=0.5)
    table = NgramTable(args)
    torch.nn.init.normal_(table.weight)
    inputs = torch.randint(256, (8, 64))
    one_by_one = torch.cat([table(sequence) for sequence in inputs.split(1)])
    assert torch.equal(table(inputs), one_by_one)
    other = inputs.clone()
    other[:, -1] += 1
    changed = (table(inputs) != table(other)).any(-1)[:, :-1]  # only the mask can differ there
    assert 0.6 < changed.float().mean() < 0.9  # 3/4 if the two masks are independent


def test_at_0_the_model_and_its_optimizers_are_record_7s():
    args = Hyperparameters()
    assert (args.max_ngram, args.key_shift, args.logit_softcap, args.ngram_dropout) == (0, 0, 0, 0)
    tiny = Hyperparameters(**TINY)
    with torch.device("meta"):
        gpt = GPT(args)
    small = GPT(tiny)
    assert sum(p.numel() for p in gpt.parameters()) == 123_568_128  # 50304 x 768, 12 x 12 x 768^2
    assert "ngrams" not in " ".join(small.state_dict())
    adamw, muon = build_optimizers(small, tiny, 0, 1)
    assert (type(adamw), type(muon)) == (torch.optim.AdamW, Muon)


@pytest.mark.parametrize(
    "value, least", [("max_ngram=-1", 0), ("key_shift=-1", 0), ("ngram_rows=0", 1)]
)
def test_a_size_that_no_table_has_is_refused(value, least):
    name, number = value.split("=")
    with pytest.raises(ValueError, match=f"{value} must be a number between {least} and"):
        Hyperparameters(**{name: int(number)})


# ---- runs ----------------------------------------------------------------------------------------
@both_dtypes
def test_any_number_of_processes_trains_alike_and_goes_on_to_the_bit(dtype, tiny, tmp_path):
    fields = {**tiny, **PIECES, "dtype": dtype, "save_every": 2}
    runs = [run_forked({**fields, "run_id": f"w{n}"}, n) for n in (1, 2, 3)]
    rows = []
    for done in runs:
        assert done.returncode == 0, done.stderr
        rows.append(validations(done.stdout))
    alone = rows[0]
    assert alone[-1][1] < alone[0][1] - 0.2
    for other in rows[1:]:
        assert [row[2] for row in other] == [row[2] for row in alone]  # data_hash
        assert [row[1] for row in other] == pytest.approx([row[1] for row in alone], abs=0.01)
    script = tmp_path / "killed.py"
    script.write_text((ROOT / "train_gpt2.py").read_text().replace(STEP, KILL))
    for n in (1, 2):
        part = {**fields, "run_id": f"part{n}", "resume": "auto"}
        assert run_forked(part, n, script).returncode == -signal.SIGKILL
        done = run_forked(part, n, script)
        assert done.returncode == 0, done.stderr
        assert "\nresume=auto: continuing after step 4\n" in done.stdout
        last = "state_step0000000006.pt"
        assert bits(tmp_path / "logs" / f"part{n}" / last) == bits(
            tmp_path / "logs" / f"w{n}" / last
        )


def test_compiled_it_has_two_graphs(tiny):
    fields = {**tiny, **PIECES, "compile": True, "n_layer": 1, "num_iterations": 3}
    done = run_forked(fields, 1, timeout=240)
    assert done.returncode == 0, done.stderr
    assert re.search(r" graphs:2$", done.stdout, re.M)
    assert "Warning" not in done.stderr
