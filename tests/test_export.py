"""Exports: transformers computes what train_gpt2.py does, with the tokens of its encoding."""

import copy
import os
import re
import sys

import export
import modeling_gpt2_speedrun
import pytest
import sample
import tiktoken
import torch
import transformers
import weights
from conftest import PIECES, ROOT, run_tool, small_state, write_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig

import train_gpt2
from train_gpt2 import Hyperparameters

T = 32  # sequence_length
many = settings(deadline=None, max_examples=200)


@pytest.fixture(scope="module", autouse=True)
def no_traces(tmp_path_factory):
    """transformers keeps copies of a model's code: here in a folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        cache = str(tmp_path_factory.mktemp("modules"))
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", cache)
        patch.setattr(sys, "path", [*sys.path])
        yield


def exported(path, out):
    """Export weights; return (the new folder, their GPT, the model as users load it)."""
    export.export(path, out)
    gpt = weights.load(path, dtype=torch.float32)[0].requires_grad_(False)
    return out, gpt, load_model(out)


def load_model(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def plain(plain_run, tmp_path_factory):
    return exported(plain_run / "model.pt", tmp_path_factory.mktemp("plain") / "exported")


@pytest.fixture(scope="module")
def pieces(pieces_run, tmp_path_factory):
    return exported(pieces_run / "model.pt", tmp_path_factory.mktemp("pieces") / "exported")


@pytest.fixture(params=["plain", "pieces"])
def pair(request):
    """Each of the two exports, loaded, and its GPT."""
    _, gpt, model = request.getfixturevalue(request.param)
    return model, gpt


@pytest.fixture(scope="module")
def tokenizer(plain):
    return AutoTokenizer.from_pretrained(plain[0], trust_remote_code=True)


def tokens_of(*shape):
    return torch.randint(257, shape, generator=torch.Generator().manual_seed(1))


def close(a, b):
    return torch.allclose(a, b, rtol=0, atol=1e-5)


# ---- The model ----------------------------------------------------------------------------------
@pytest.mark.parametrize("length", [1, 2, 3, 4, T])  # also below max_ngram and key_shift
def test_logits_are_those_of_gpt(length, pair):
    model, gpt = pair
    inputs = tokens_of(3, length)
    logits = model(inputs).logits
    assert logits.dtype == torch.float32 and close(logits, gpt(inputs))
    assert close(model(inputs, logits_to_keep=1).logits, logits[:, -1:])


def test_labels_give_gpts_loss(pair):
    """The labels are the inputs: the model itself takes the next token for each."""
    model, gpt = pair
    tokens = tokens_of(3, T)
    targets = tokens[:, 1:].clone()
    targets[0, :9] = -1
    labels = tokens.clone()
    labels[0, 1:10] = -100
    assert close(model(tokens, labels=labels).loss, gpt(tokens[:, :-1], targets))


@pytest.mark.parametrize("sizes", [[1] * T, [5, 1, 20, 6]])
def test_the_cache_changes_nothing(sizes, plain):
    _, gpt, model = plain
    inputs, cache, parts = tokens_of(2, T), None, []
    for part in inputs.split(sizes, dim=1):
        output = model(part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits)
    assert close(torch.cat(parts, dim=1), gpt(inputs))


@pytest.mark.parametrize("left", [True, False])
def test_padding_changes_nothing(left, pair):
    """Neither does what stands there, nor a whole row of it."""
    model, gpt = pair
    tokens, padding = tokens_of(1, 9), [20, 0, 3]
    rows, masks = [], []
    for count in padding:
        row, mask = tokens[:, count % 9 :], torch.ones(1, 9 - count % 9)
        ends = (T - row.size(1), 0) if left else (0, T - row.size(1))
        rows.append(torch.nn.functional.pad(row, ends, value=count))
        masks.append(torch.nn.functional.pad(mask, ends))
    masks.append(torch.zeros(1, T))
    logits = model(torch.cat([*rows, rows[0]]), attention_mask=torch.cat(masks)).logits
    visible = modeling_gpt2_speedrun.visible_keys(torch.cat(masks), T, T, "cpu")
    assert logits.isfinite().all() and visible.any(-1).all()
    for count, row, mask in zip(padding, logits, masks):
        assert close(row[mask[0] > 0], gpt(tokens[:, count % 9 :])[0])


def test_bfloat16_weights_give_float32_logits_nearby(pair):
    model, _ = pair
    inputs = tokens_of(2, T)
    low = copy.deepcopy(model).to(torch.bfloat16)
    logits = low(inputs).logits
    assert low.dtype == torch.bfloat16 and logits.dtype == torch.float32
    assert torch.allclose(logits, model(inputs).logits, atol=0.5)


def greedy(gpt, text, count):
    """Return the text with the most likely tokens appended."""
    tokens = [256, *text.encode()]
    for _ in range(count):
        tokens.append(gpt(torch.tensor([tokens]))[0, -1].argmax().item())
    return bytes(tokens[1:]).decode()


@pytest.mark.parametrize("use_cache", [True, False])
def test_generated_text_is_that_of_the_argmax(use_cache, pair, tokenizer):
    """Also of several prompts at once, which are padded on the left. sample.py agrees."""
    model, gpt = pair
    prompts = ["for i in range(10", "pri", "ß (1"]
    configured = GenerationConfig(max_new_tokens=14, do_sample=False, use_cache=use_cache)
    for group in [prompts, *([prompt] for prompt in prompts)]:
        leading = [tokenizer.bos_token + prompt for prompt in group]
        inputs = tokenizer(leading, return_tensors="pt", padding=True)
        ids = model.generate(**inputs, generation_config=configured)
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        assert texts == [greedy(gpt, prompt, 14) for prompt in group]
    assert greedy(gpt, prompts[0], 14) == "for i in range(10):\n    print(i"
    for prompt in "", *prompts:
        tokens = [256, *prompt.encode()]
        more = sample.generate(gpt, tokens, 14, lambda logits: logits.argmax().item(), T, 257)
        assert prompt + bytes(more).decode() == greedy(gpt, prompt, 14)


def test_what_the_model_cannot_do_is_refused(plain, pieces):
    tokens, model, with_pieces = tokens_of(1, 5), plain[2], pieces[2]
    with pytest.raises(ValueError, match="33 tokens are more than sequence_length=32"):
        model(tokens_of(1, T + 1))
    with pytest.raises(ValueError, match="33 tokens are more"):
        model.generate(tokens, max_new_tokens=40, do_sample=False, eos_token_id=None)
    assert model(tokens).past_key_values.get_seq_length() == 5
    assert with_pieces(tokens, use_cache=True).past_key_values is None
    with pytest.raises(ValueError, match="cannot use past_key_values"):
        with_pieces(tokens, past_key_values=DynamicCache())


def test_it_can_be_trained_and_saved_again(pair, tmp_path):
    model, tokens = copy.deepcopy(pair[0]).requires_grad_(True).train(), tokens_of(2, T)
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert model(tokens, labels=tokens).loss < loss
    model.save_pretrained(tmp_path)
    again = load_model(tmp_path)
    assert torch.equal(again(tokens).logits, model.eval()(tokens).logits)


# ---- The files ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["plain", "pieces"])
def test_the_weights_are_there_once_and_in_float32(name, request):
    folder, gpt, model = request.getfixturevalue(name)
    tensors, expected = load_file(folder / "model.safetensors"), gpt.state_dict()
    assert tensors.keys() == expected.keys() - {"lm_head.weight"}
    for key, tensor in tensors.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected[key])
    assert not list(folder.parent.glob("*.partial"))
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    config = model.config
    assert all(getattr(config, key) == PIECES[key] for key in PIECES) == (name == "pieces")
    assert config.max_position_embeddings == T and config.hidden_size == 32
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (256, 256, 256)


def test_the_code_of_the_export_needs_torch_and_transformers_alone(plain):
    code = (plain[0] / "modeling_gpt2_speedrun.py").read_text()
    names = re.findall(r"^(?:from|import) (\w+)", code, flags=re.M)
    assert {*names} == {"torch", "transformers"}


@pytest.mark.parametrize(
    "edited, forward",
    [
        (train_gpt2.MLP, lambda self, x: self.c_proj(torch.nn.functional.gelu(self.c_fc(x)))),
        (train_gpt2.MLP, lambda self, x: x * torch.nan),
        (train_gpt2.NgramTable, lambda *_: 0.0),
    ],
)
def test_an_edited_model_is_not_exported(edited, forward, pieces_run, tmp_path, monkeypatch):
    monkeypatch.setattr(edited, "forward", forward)
    with pytest.raises(ValueError, match=r"differ from those of train_gpt2\.py's GPT by"):
        export.export(pieces_run / "model.pt", tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_the_card_says_how_the_model_was_trained_and_its_example_runs(
    plain, plain_run, tmp_path, monkeypatch, capsys
):
    folder = plain[0]
    card = (folder / "README.md").read_text()
    log = plain_run.with_suffix(".txt").read_text()
    loss = re.search(r"^result val_loss:(\S+)", log, re.M)[1]
    for part in "32,800 parameters", "60 of 60 planned steps, 15,360 tokens", f"loss: {loss} nats":
        assert part in card
    assert '"num_iterations": 60' in card and "log_dir" not in card
    [code] = re.findall(r"```python\n(.*?)```", card, re.S)
    monkeypatch.chdir(folder.parent)
    exec(code, {})
    assert capsys.readouterr().out.startswith("The")
    export.export(plain_run / "state_step0000000040.pt", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "40 of 60 planned steps, 10,240 tokens" in card and "loss: unknown" in card


# ---- The tokenizer ------------------------------------------------------------------------------
@many
@given(text=st.text())
def test_ids_of_bytes_are_the_bytes(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_end_of_text_is_one_token_that_the_encoding_knows(tokenizer):
    assert tokenizer("a<|endoftext|>é")["input_ids"] == [97, 256, 195, 169]
    assert tokenizer.decode([97, 256, 98], skip_special_tokens=True) == "ab"
    assert len(tokenizer) == 257 and tokenizer.bos_token_id == tokenizer.eos_token_id == 256
    assert tokenizer.model_max_length == T
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"ab": 257}  # ids after end-of-text
    encoding = tiktoken.Encoding(
        "odd", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256}
    )
    assert export.tokenizer_of(encoding, T)("abc<|endoftext|>")["input_ids"] == [257, 99, 256]


def test_gpt2s_tokens(gpt2_vocabulary, tmp_path):
    """Ids are tiktoken's, on any text and on real text; those that no text has are not written."""
    state = small_state(vocab_size=50304, max_ngram=1)
    state["model"]["lm_head.weight"][50257:] *= 100
    path = write_weights(tmp_path / "model.pt", state)
    folder, _, model = exported(path, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    encoding = weights.encoding_of(Hyperparameters())

    def same(text):
        ids = tokenizer(text, verbose=False)["input_ids"]
        assert ids == encoding.encode_ordinary(text)
        assert tokenizer.decode(ids) == text

    pieces = st.sampled_from([*" \t\n\r\x0b\xa0\u2003a7.'_é日٣🙂ﬀ", "'ll", "'S", "  ", " the"])
    many(given(st.text())(same))()
    many(given(st.lists(pieces, max_size=30).map("".join))(same))()
    for path in ROOT / "README.md", ROOT / "train_gpt2.py":
        same(path.read_text())
    assert tokenizer("a<|endoftext|>")["input_ids"] == [64, 50256] and len(tokenizer) == 50257
    inputs = tokens_of(4, 8)
    assert model(inputs).logits[:, -1].argmax(-1).max() > 50256
    ids = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=5)
    assert ids.max() <= 50256


# ---- The command --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--out=out"], "no weights in logs"),
        (["--weights=RUN", "--out=notes"], "notes exists: give a new or an empty folder"),
        (["--weights=RUN", "--out=notes/n.txt"], "n.txt exists"),
        (["--weights=RUN", "--out=out", "--encoding=x"], "encoding '?x"),
    ],
)
def test_mistakes_are_one_sentence_and_write_nothing(
    arguments, sentence, plain_run, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "n.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=sentence) as refused:
        export.main([argument.replace("RUN", str(plain_run)) for argument in arguments])
    assert "\n" not in str(refused.value) and sorted(tmp_path.rglob("*")) == before


def test_the_command_line(plain, plain_run, tmp_path):
    """A missing package is named with the command that installs it."""
    arguments = "export.py", "--weights", plain_run, "--out=out"
    done = run_tool(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.count("\n") == 1
    names = [sorted(path.name for path in out.iterdir()) for out in (plain[0], tmp_path / "out")]
    assert names[0] == names[1]
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError(name='transformers')")
    done = run_tool(*arguments, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1 and "transformers is not installed: " in done.stderr
    assert done.stderr.count("\n") == 1
