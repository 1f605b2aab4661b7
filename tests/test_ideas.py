"""The edits in records/README.md: each applies, trains, resumes and has the right gradient."""

import re
import runpy
import signal
from types import SimpleNamespace

import ab
import export
import pytest
import torch
import torch.nn.functional as F
import weights
from conftest import (
    ROOT,
    SCRIPT,
    bits,
    both_dtypes,
    faulty_script,
    run_forked,
    trained,
    validations,
)

PAGE = (ROOT / "records" / "README.md").read_text()
DIFFS = re.findall(r"```diff\n(.*?)```", PAGE, re.S)
IDEAS = ["softcap", "value embeddings", "window", "optimizer"]


def edited(folder, idea):
    """Return the path of a copy of train_gpt2.py with an idea's diff applied."""
    diff = folder / "idea.diff"
    diff.write_text(DIFFS[IDEAS.index(idea)])
    return ab.patched(SCRIPT, diff, folder)


def load(folder, idea):
    """Return the names that the edited script defines."""
    return SimpleNamespace(**runpy.run_path(str(edited(folder, idea))))


@pytest.mark.parametrize("idea", IDEAS)
def test_an_idea_trains_and_resumes_bit_for_bit(idea, tiny, tmp_path):
    script = edited(tmp_path, idea)
    fields = {**tiny, "save_every": 2}
    one, two = (validations(trained({**fields, "run_id": f"w{n}"}, n, script)) for n in (1, 2))
    assert one[-1][1] < one[0][1] - 0.2
    assert [row[1] for row in one] == pytest.approx([row[1] for row in two], abs=0.02)
    fields |= {"run_id": "part", "resume": "auto"}
    kill = faulty_script(tmp_path, "os.kill(os.getpid(), 9)", script=script)
    assert run_forked(fields, 2, kill).returncode == -signal.SIGKILL
    assert "\ncontinuing after step 4 from " in trained(fields, 2, script)
    last = "state_step0000000006.pt"
    assert bits(tmp_path / "logs" / "part" / last) == bits(tmp_path / "logs" / "w2" / last)


@both_dtypes
@pytest.mark.parametrize("idea", IDEAS)
def test_an_ideas_training_loss_matches_its_logits(idea, dtype, tmp_path):
    """The training loss and its gradients equal those of the cross-entropy of the logits."""
    module = load(tmp_path, idea)
    args = module.Hyperparameters(
        vocab_size=64, n_layer=2, n_head=2, n_embd=16, batch_size=2, sequence_length=128
    )
    torch.manual_seed(0)
    gpt = module.GPT(args, getattr(torch, dtype))
    with torch.no_grad():
        for p in gpt.parameters():
            p.add_(0.3 * torch.randn_like(p))
    inputs = torch.randint(64, (2, 128))
    targets = inputs.roll(-1, 1)
    loss = gpt(inputs, targets)
    expected = F.cross_entropy(gpt(inputs).flatten(0, 1), targets.flatten())
    exact = dtype == "float32"
    torch.testing.assert_close(loss, expected, rtol=1e-5 if exact else 0.02, atol=0)
    ours, theirs = (torch.autograd.grad(each, [*gpt.parameters()]) for each in (loss, expected))
    for gradient, reference in zip(ours, theirs):
        difference = (gradient - reference).norm() / reference.norm()
        assert difference < (1e-4 if exact else 0.05)


def test_value_embeddings_have_their_own_rate_and_are_not_exported(tmp_path):
    module = load(tmp_path, "value embeddings")
    args = module.Hyperparameters(vocab_size=257, n_layer=1, n_head=1, n_embd=8, sequence_length=16)
    gpt = module.GPT(args)
    _, adamw = module.build_optimizers(gpt, args)
    rates = {p: group["lr"] for group in adamw.param_groups for p in group["params"]}
    assert rates[gpt.value_embed.weight] == 2 * args.learning_rate
    assert rates[gpt.lm_head.weight] == args.learning_rate
    with pytest.raises(ValueError, match=r"lacks value_embed\.weight \(257, 8\): add"):
        export.model_of(gpt, args, weights.pack.get_encoding("bytes"))


def test_a_window_sees_64_tokens_back(tmp_path):
    module = load(tmp_path, "window")
    args = module.Hyperparameters(vocab_size=64, n_layer=1, n_head=1, n_embd=8, sequence_length=128)
    gpt = module.GPT(args)
    torch.nn.init.normal_(gpt.h[0].attn.c_proj.weight)
    inputs = torch.randint(64, (1, 128))
    changed = inputs.clone()
    changed[0, 10] += 1 - 2 * (changed[0, 10] == 63)
    differs = (gpt(inputs) != gpt(changed)).any(-1)[0].nonzero().flatten().tolist()
    assert differs[0] == 10 and differs[-1] == 10 + 63
