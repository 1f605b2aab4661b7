"""What was added to record 7: n-grams, key shift, soft-cap. Exact, causal, and off by default."""

import re
import signal

import pytest
import torch
import torch.nn.functional as F
from conftest import STEP, TINY, bits, both_dtypes, edited_script, run_forked, validations

from train_gpt2 import GPT, Hyperparameters, Muon, NgramTable, build_optimizers, norm

KILL = "        if step == 4 and first_step == 0:\n            os.kill(os.getpid(), 9)\n"
PIECES = {"max_ngram": 4, "ngram_rows": 101, "key_shift": 1, "logit_softcap": 3.0}


def make_table(longest=4, rows=101, dropout=0.0):
    torch.manual_seed(0)
    args = Hyperparameters(max_ngram=longest, ngram_rows=rows, n_embd=12, ngram_dropout=dropout)
    table = NgramTable(args)
    torch.nn.init.normal_(table.weight)
    return table


def make_model(dtype="float32", **changes):
    """Return a tiny GPT, in which every parameter has a random value, and its settings."""
    args = Hyperparameters(**{**TINY, **PIECES, **changes})
    torch.manual_seed(0)
    gpt = GPT(args, getattr(torch, dtype))
    with torch.no_grad():
        for p in gpt.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return gpt, args


def rows_by_python(tokens, place, longest, rows):
    """Return the table rows of a position, in Python's integers, wrapped to 64 bits.

    The hash starts with the token itself and becomes hash * 1000003 + earlier token + 1 for each
    earlier token. Tokens before the first one count as 0.
    """
    found, value = [], tokens[place]
    for distance in range(1, longest):
        earlier = tokens[place - distance] if place >= distance else 0
        value = value * 1000003 + earlier + 1
        value = (value + 2**63) % 2**64 - 2**63
        found.append(value % rows)
    return found


# ---- The n-gram table ----------------------------------------------------------------------------
@pytest.mark.parametrize("longest, vocab_size", [(2, 5), (3, 257), (7, 50304)])
def test_a_position_gets_the_rows_of_its_last_tokens(longest, vocab_size):
    table = make_table(longest)
    inputs = torch.randint(vocab_size, (3, 11))
    out = table(inputs)
    assert out.shape == (3, 11, 12)
    for b, tokens in enumerate(inputs.tolist()):
        for place in range(11):
            rows = rows_by_python(tokens, place, longest, 101)
            torch.testing.assert_close(out[b, place], table.weight[rows].sum(0))


@pytest.mark.parametrize("rows", [2**18, 251519])
def test_few_ngrams_share_a_row(rows):
    """By chance, 32 of 4,096 would; a hash of the last letters alone would give most the same."""
    texts = torch.randint(97, 123, (16, 256)).tolist()
    used = {rows_by_python(text, i, 5, rows)[2] for text in texts for i in range(8, 256)}
    ngrams = {tuple(text[i - 3 : i + 1]) for text in texts for i in range(8, 256)}
    assert len(used) > 0.97 * len(ngrams)


def test_its_gradient_is_sparse_and_equals_that_of_a_dense_lookup():
    table = make_table()
    inputs = torch.randint(64, (3, 11))
    weights = torch.randn(3, 11, 12)
    for _ in range(2):  # micro-batches
        (table(inputs) * weights).sum().backward()
    gradient = table.weight.grad
    assert gradient.is_sparse
    dense = table.weight.detach().clone().requires_grad_()
    rows = [[rows_by_python(t, i, 4, 101) for i in range(11)] for t in inputs.tolist()]
    (2 * dense[torch.tensor(rows)].sum(2) * weights).sum().backward()
    torch.testing.assert_close(gradient.to_dense(), dense.grad)


def test_a_step_changes_only_the_rows_that_it_used():
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


# ---- Key shift and soft-cap ----------------------------------------------------------------------
def test_a_shifted_key_belongs_to_a_later_value():
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


def test_logits_are_capped():
    gpt, _ = make_model(logit_softcap=3.0)
    inputs = torch.randint(64, (2, 16))
    capped = gpt(inputs)
    gpt.logit_softcap = 0.0
    logits = gpt(inputs)
    assert logits.abs().max() > 3 > capped.abs().max()
    torch.testing.assert_close(capped, 3 * torch.tanh(logits / 3))


# ---- All in one model ----------------------------------------------------------------------------
@both_dtypes
@pytest.mark.parametrize("pieces", [PIECES, dict.fromkeys(("max_ngram", "key_shift"), 0)])
def test_a_position_depends_on_all_earlier_tokens_and_no_later_one(pieces, dtype):
    gpt, _ = make_model(dtype, **pieces)
    inputs = torch.randint(64, (2, 16))
    for place in (0, 7, 15):
        changed = inputs.clone()
        changed[:, place] = (changed[:, place] + 1) % 64
        differs = (gpt(inputs) != gpt(changed)).any(-1)
        assert not differs[:, :place].any() and differs[:, place:].all()


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
    table = make_table(3, 997, dropout=0.6)
    torch.nn.init.ones_(table.weight)
    inputs = torch.randint(256, (64, 128))
    kept = table(inputs)[..., 0] * (1 - 0.6)  # the number of kept n-grams, out of 2
    assert {round(n, 4) for n in kept.unique().tolist()} == {0, 1, 2}
    for n, probability in enumerate([0.6**2, 2 * 0.6 * 0.4, 0.4**2]):
        assert kept.round().eq(n).float().mean().item() == pytest.approx(probability, abs=0.03)
    with torch.no_grad():  # validation
        assert (table(inputs) == 2).all()


def test_dropout_depends_on_the_sequence_alone():
    table = make_table(3, 997, dropout=0.5)
    inputs = torch.randint(256, (8, 64))
    one_by_one = torch.cat([table(sequence) for sequence in inputs.split(1)])
    assert torch.equal(table(inputs), one_by_one)
    other = inputs.clone()
    other[:, -1] += 1
    changed = (table(inputs) != table(other)).any(-1)[:, :-1]  # only the mask can differ there
    assert 0.6 < changed.float().mean() < 0.9  # 3/4 if the two masks are independent


def test_by_default_the_model_is_that_of_record_7():
    args = Hyperparameters()
    assert (args.max_ngram, args.key_shift, args.logit_softcap, args.ngram_dropout) == (0, 0, 0, 0)
    with torch.device("meta"):
        gpt = GPT(args)
    assert sum(p.numel() for p in gpt.parameters()) == 123_568_128  # 50304 x 768, 12 x 12 x 768^2
    tiny = Hyperparameters(**TINY)
    adamw, muon = build_optimizers(GPT(tiny), tiny, 0, 1)
    assert (type(adamw), type(muon)) == (torch.optim.AdamW, Muon)


# ---- Runs ----------------------------------------------------------------------------------------
@both_dtypes
def test_ranks_train_alike_and_resume_to_the_bit(dtype, tiny, tmp_path):
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
    script = edited_script(tmp_path, (STEP, STEP + KILL))
    for n in (1, 2):
        part = {**fields, "run_id": f"part{n}", "resume": "auto"}
        assert run_forked(part, n, script).returncode == -signal.SIGKILL
        done = run_forked(part, n, script)
        assert done.returncode == 0, done.stderr
        assert "\nresume=auto: continuing after step 4\n" in done.stdout
        whole, part = (tmp_path / "logs" / f"{name}{n}" for name in ("w", "part"))
        assert bits(part / "state_step0000000006.pt") == bits(whole / "state_step0000000006.pt")


def test_compiled_it_has_two_graphs(tiny):
    fields = {**tiny, **PIECES, "compile": True, "n_layer": 1, "num_iterations": 3}
    done = run_forked(fields, 1, timeout=240)
    assert done.returncode == 0, done.stderr
    assert re.search(r" graphs:2$", done.stdout, re.M)
    assert "Warning" not in done.stderr
