"""Exports: transformers computes what train_gpt2.py does, the card says what the log says."""

import ast
import base64
import copy
import http.server
import json
import os
import re
import runpy
import subprocess
import sys
import threading

import export
import huggingface_hub
import modeling_gpt2_speedrun
import pytest
import report
import sample
import torch
import transformers
import weights
from conftest import ROOT, SHARED_DATA, write_shard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
)

import train_gpt2
from train_gpt2 import GPT, Hyperparameters, Log, main, write_checkpoint

TEXT = "for i in range(10):\n    print(i)\n" * 200
T = 32  # sequence_length
PIECES = dict(max_ngram=3, ngram_rows=997, key_shift=1, logit_softcap=15.0)
many = settings(deadline=None, max_examples=200)


@pytest.fixture(scope="module", autouse=True)
def no_traces(tmp_path_factory):
    """transformers keeps copies of a model's code: here in a folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        cache = str(tmp_path_factory.mktemp("modules"))
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", cache)
        patch.setattr(sys, "path", [*sys.path])
        patch.delenv("HF_TOKEN", raising=False)
        patch.setattr(huggingface_hub, "get_token", lambda: None)
        yield


def train(folder, **pieces):
    """Train on bytes; return a folder with w.txt, w/model.pt and w/state_step0000000040.pt."""
    tokens = [256, *TEXT.encode()]
    write_shard(folder / "train_0.bin", tokens)
    write_shard(folder / "val_0.bin", tokens[:1000])
    main(
        Hyperparameters(
            vocab_size=257, n_layer=2, n_head=2, n_embd=32, batch_size=8, sequence_length=T,
            num_iterations=60, warmdown_iters=30, learning_rate=0.02, muon_learning_rate=0.005,
            val_loss_every=30, val_tokens=320, save_every=40, keep_checkpoints=9, device="cpu",
            compile=False, allow_repeat=True, train_files=f"{folder}/train_*.bin",
            val_files=f"{folder}/val_*.bin", log_dir=f"{folder}/logs", run_id="w", **pieces,
        )
    )  # fmt: skip
    return folder / "logs"


def load_gpt(logs):
    return weights.load(logs / "w" / "model.pt", dtype=torch.float32)[0].requires_grad_(False)


def export_of(logs):
    export.export(logs / "w" / "model.pt", logs.parent / "exported")
    return logs.parent / "exported"


def load_model(folder):
    """Load an export as its users do."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return train(tmp_path_factory.mktemp("export"))


@pytest.fixture(scope="module")
def gpt(logs):
    return load_gpt(logs)


@pytest.fixture(scope="module")
def folder(logs):
    return export_of(logs)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def pieces_logs(tmp_path_factory):
    """As logs, of a run with n-grams and a key shift."""
    return train(tmp_path_factory.mktemp("pieces"), **PIECES)


@pytest.fixture(scope="module")
def pieces_gpt(pieces_logs):
    return load_gpt(pieces_logs)


@pytest.fixture(scope="module")
def pieces_folder(pieces_logs):
    return export_of(pieces_logs)


@pytest.fixture(scope="module")
def pieces_model(pieces_folder):
    return load_model(pieces_folder)


@pytest.fixture(params=["", "pieces_"], ids=["plain", "pieces"])
def pair(request):
    """Each of the two exports, loaded, and its GPT."""
    return tuple(request.getfixturevalue(request.param + name) for name in ("model", "gpt"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory):
    """The export of weights on GPT-2's tokens, which favour ids that no text has."""
    if not SHARED_DATA.is_dir():
        pytest.skip("GPT-2's vocabulary is not beside this clone")
    path = tmp_path_factory.mktemp("gpt2") / "logs" / "g" / "model.pt"
    gpt = GPT(Hyperparameters(n_layer=1, n_head=1, n_embd=4))
    with torch.no_grad():
        gpt.lm_head.weight[50257:] *= 100
    save(path, gpt, n_layer=1, n_head=1, n_embd=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED_DATA / "tiktoken_cache"))
        export.export(path, path.with_name("exported"))
        yield path.with_name("exported")


def save(path, gpt, **fields):
    """Write weights as a run without a log does."""
    args = Hyperparameters(**fields)
    write(path, dict(hyperparameters=vars(args), val_loss=9.0, model=gpt.state_dict()))


def write(path, state):
    """Write what a file of weights holds, as a run does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = Log(Hyperparameters(), "x", rank=1)  # which writes nothing
    assert write_checkpoint(state, path, log)


def tokens_of(*shape, vocab_size=257):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(1))


def close(a, b):
    return torch.allclose(a, b, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------
# the model


@pytest.mark.parametrize("length", [1, 5, T])
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
def test_the_cache_changes_nothing(sizes, model, gpt):
    inputs, cache, parts = tokens_of(2, T), None, []
    for part in inputs.split(sizes, dim=1):
        output = model(part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits)
    assert close(torch.cat(parts, dim=1), gpt(inputs))


@pytest.mark.parametrize("left", [True, False])
def test_padding_changes_nothing(left, pair):
    """Neither does what stands there, nor a whole row of it; each position sees some key."""
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


def test_what_the_model_cannot_do_is_refused(model):
    with pytest.raises(ValueError, match=r"^33 tokens are more than sequence_length=32, .*fewer$"):
        model(tokens_of(1, T + 1))
    with pytest.raises(ValueError, match=r"attention_mask has shape \(1, 4\): it must be \(B, 5\)"):
        model(tokens_of(1, 5), attention_mask=torch.ones(1, 4))
    with pytest.raises(ValueError, match="33 tokens are more"):
        model.generate(tokens_of(1, 3), max_new_tokens=40, do_sample=False, eos_token_id=None)


def greedy(gpt, text, count):
    """Return the text with what the most likely tokens add."""
    tokens = [256, *text.encode()]
    for _ in range(count):
        tokens.append(gpt(torch.tensor([tokens]))[0, -1].argmax().item())
    return bytes(tokens[1:]).decode()


@pytest.mark.parametrize("use_cache", [True, False])
def test_generated_text_is_that_of_the_argmax(use_cache, pair, tokenizer):
    """Also of several prompts at once, which are padded at the left; and it is sample.py's."""
    model, gpt = pair
    prompts = ["for i in range(10", "pri", "ß (1"]
    for group in [prompts, *([prompt] for prompt in prompts)]:
        leading = [tokenizer.bos_token + prompt for prompt in group]
        inputs = tokenizer(leading, return_tensors="pt", padding=True)
        ids = model.generate(**inputs, max_new_tokens=14, do_sample=False, use_cache=use_cache)
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        assert texts == [greedy(gpt, prompt, 14) for prompt in group]
    assert greedy(gpt, prompts[0], 14) == "for i in range(10):\n    print(i"
    for prompt in "", *prompts:
        tokens = [256, *prompt.encode()]
        more = sample.generate(gpt, tokens, 14, lambda logits: logits.argmax().item(), T, 257)
        assert prompt + bytes(more).decode() == greedy(gpt, prompt, 14)


def test_beams_are_the_same_with_and_without_padding_and_cache(pair, tokenizer):
    model, _ = pair
    inputs = tokenizer(
        ["<|endoftext|>for i in", "<|endoftext|>p"], return_tensors="pt", padding=True
    )
    options = dict(max_new_tokens=14, num_beams=3, do_sample=False)
    together = model.generate(**inputs, **options)
    assert torch.equal(model.generate(**inputs, **options, use_cache=False), together)
    configured = GenerationConfig(**options, use_cache=True)
    assert torch.equal(model.generate(**inputs, generation_config=configured), together)
    assert configured.use_cache
    for ids, mask, expected in zip(inputs["input_ids"], inputs["attention_mask"], together):
        alone = model.generate(ids[mask > 0][None], **options)
        assert alone[0].tolist() == expected[(mask == 0).sum() :].tolist()


def test_a_model_with_pieces_has_no_cache(model, pieces_model):
    """Whatever asks for one: tokens would be wrong without those before."""
    tokens = tokens_of(1, 5)
    assert model(tokens).past_key_values.get_seq_length() == 5
    assert model.config.use_cache and model.generation_config.use_cache is None
    assert not pieces_model.config.use_cache and pieces_model.generation_config.use_cache is False
    assert pieces_model(tokens, use_cache=True).past_key_values is None
    cache = DynamicCache()
    with pytest.raises(ValueError, match=r"give all tokens each time, without past_key_values$"):
        pieces_model(tokens, past_key_values=cache)
    for option in (
        dict(past_key_values=cache),
        dict(prefill_chunk_size=2),
        {"use_cache": True, "prompt_lookup_num_tokens": 2},
    ):
        with pytest.raises(ValueError, match=r"all tokens|cache"):
            pieces_model.generate(tokens, max_new_tokens=4, **option)


@torch.no_grad()
@pytest.mark.parametrize("max_ngram, key_shift", [(1, 0), (2, 0), (0, 1), (6, 3)])
def test_pieces_of_any_size_at_any_length(max_ngram, key_shift, tmp_path):
    """Also of sequences that are shorter than an n-gram or the shift, with and without padding."""
    shape = dict(vocab_size=257, n_layer=2, n_head=2, n_embd=8, sequence_length=9, ngram_rows=61)
    shape.update(max_ngram=max_ngram, key_shift=key_shift)
    gpt = GPT(Hyperparameters(**shape))
    for p in gpt.parameters():
        torch.nn.init.normal_(p, std=0.5, generator=torch.Generator().manual_seed(p.numel()))
    save(tmp_path / "logs" / "x" / "model.pt", gpt, **shape)
    export.export(tmp_path / "logs" / "x" / "model.pt", tmp_path / "out")
    model = load_model(tmp_path / "out")
    assert (model.ngrams is None) == (max_ngram < 2)
    for length in range(1, 10):
        tokens = tokens_of(3, length)
        expected = gpt(tokens)
        assert torch.allclose(model(tokens).logits, expected, atol=1e-4)
        padded = torch.nn.functional.pad(tokens, (9 - length, 0), value=7)
        mask = torch.ones_like(padded)
        mask[:, : 9 - length] = 0
        logits = model(padded, attention_mask=mask).logits[:, 9 - length :]
        assert torch.allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize("name", ["folder", "pieces_folder"])
def test_it_can_be_trained_and_saved_again(name, request, tmp_path):
    folder = request.getfixturevalue(name)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).train()
    tokens = tokens_of(2, T)
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert model(tokens, labels=tokens).loss < loss
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert torch.equal(again(tokens).logits, model.eval()(tokens).logits)


# ---------------------------------------------------------------------------
# the files


def test_the_tied_weights_are_there_once_and_all_are_float32(folder, gpt):
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    expected = gpt.state_dict()
    assert torch.equal(tensors["wte.weight"], expected["lm_head.weight"])
    assert tensors.keys() == expected.keys() - {"lm_head.weight"}
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected[name])
    values = sum(p.numel() for p in gpt.parameters())
    assert 4 * values < (folder / "model.safetensors").stat().st_size < 4 * values + 2000


def test_an_export_has_just_its_files_readable_by_all(folder):
    assert set(os.listdir(folder)) == export.FILES
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    assert not [*folder.parent.glob("*.partial")]


def test_the_configuration_is_the_runs(folder):
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert (config.n_layer, config.n_head, config.n_embd, config.vocab_size) == (2, 2, 32, 257)
    assert config.max_position_embeddings == T and config.hidden_size == 32
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (256, 256, 256)
    defaults = modeling_gpt2_speedrun.GPT2SpeedrunConfig()
    shape = "vocab_size", "n_layer", "n_head", "n_embd", "sequence_length"
    for name in *shape, *PIECES:
        assert getattr(defaults, name) == getattr(Hyperparameters(), name)


def test_a_configuration_from_before_the_pieces_has_none(folder, model, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    for name in PIECES:
        del config[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    earlier = load_model(tmp_path)
    tokens = tokens_of(2, T)
    assert torch.equal(earlier(tokens).logits, model(tokens).logits) and earlier.config.use_cache


def test_the_files_of_a_model_with_pieces(pieces_folder, pieces_gpt):
    config = AutoConfig.from_pretrained(pieces_folder, trust_remote_code=True)
    assert {name: getattr(config, name) for name in PIECES} == PIECES
    with safe_open(pieces_folder / "model.safetensors", "pt") as file:
        table = file.get_tensor("ngrams.weight")
    assert torch.equal(table, pieces_gpt.ngrams.weight) and table.any()
    card = (pieces_folder / "README.md").read_text()
    parts = (
        f"of {32_800 + 997 * 32:,} parameters",
        "of 997 rows",
        "n-gram of 2 to 3 tokens",
        ("\n- The key of each position is that of 1 position before;"),
        "\n- So it keeps no cache",
    )
    for part in parts:
        assert part in card


@pytest.mark.parametrize("name", ["NgramTable.forward", "Attention.shift"])
def test_another_piece_is_not_exported(name, pieces_logs, tmp_path, monkeypatch):
    change = {"NgramTable.forward": lambda *_: 0.0, "Attention.shift": lambda self, k, real: k}
    owner, _, method = name.partition(".")
    monkeypatch.setattr(getattr(modeling_gpt2_speedrun, owner), method, change[name])
    with pytest.raises(ValueError, match=r"differ from those of train_gpt2\.py's GPT by"):
        export.export(pieces_logs / "w" / "model.pt", tmp_path / "out")


def test_the_code_of_the_export_needs_torch_and_transformers_alone(folder):
    tree = ast.parse((folder / export.MODELING).read_text())
    nodes = [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
    names = {getattr(node, "module", None) or node.names[0].name for node in nodes}
    assert {name.split(".")[0] for name in names} == {"copy", "torch", "transformers"}
    assert not any(getattr(node, "level", 0) for node in nodes)


def test_a_later_export_replaces_an_earlier_one_and_a_failed_one_does_not(logs, folder, tmp_path):
    out = tmp_path / "new" / "folder"
    said = export.export(logs / "w" / "state_step0000000040.pt", out)
    assert "32,800 parameters after step 40, its log\n" in said and str(out) in said
    first = {path.name: path.read_bytes() for path in out.iterdir()}
    export.export(logs / "w" / "model.pt", out)
    second = {path.name: path.read_bytes() for path in out.iterdir()}
    assert first["model.safetensors"] != second["model.safetensors"]
    assert second["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    args = dict(vocab_size=257, n_layer=1, n_head=1, n_embd=4)
    gpt = GPT(Hyperparameters(**args))
    with torch.no_grad():
        gpt.lm_head.weight[3] = torch.nan
    save(tmp_path / "x" / "model.pt", gpt, **args)
    for target in out, tmp_path / "other" / "out":
        with pytest.raises(ValueError, match=r"logits of .* differ .* by nan: .*not diverge"):
            export.export(tmp_path / "x" / "model.pt", target)
    assert sorted(os.listdir(tmp_path)) == ["new", "x"]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == second
    assert os.listdir(out.parent) == ["folder"]


def test_an_export_appears_whole(logs, tmp_path, monkeypatch):
    """It is checked in another folder, which then gets its name: a kill leaves no half of it."""
    seen, check = [], export.check

    def watched(folder, *others):
        [beside] = os.listdir(tmp_path)
        seen.append((beside, set(os.listdir(folder)), folder.stat().st_ino))
        return check(folder, *others)

    monkeypatch.setattr(export, "check", watched)
    export.export(logs / "w" / "model.pt", tmp_path / "out")
    [(beside, files, inode)] = seen
    assert re.fullmatch(r"out\..+\.partial", beside) and files == export.FILES
    assert inode == (tmp_path / "out").stat().st_ino


def test_an_edited_model_is_not_exported_as_what_it_was(logs, tmp_path, monkeypatch):
    monkeypatch.setattr(train_gpt2.F, "relu", torch.nn.functional.gelu)
    monkeypatch.setattr(modeling_gpt2_speedrun, "F", ReLU())
    with pytest.raises(ValueError, match=r"differ from those of train_gpt2\.py's GPT by"):
        export.export(logs / "w" / "model.pt", tmp_path / "out")
    assert os.listdir(tmp_path) == []


class ReLU:
    """torch.nn.functional as it was before the edit."""

    relu = staticmethod(torch.relu)

    def __getattr__(self, name):
        return getattr(torch.nn.functional, name)


# ---------------------------------------------------------------------------
# the tokenizer


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


def test_ids_of_gpt2_are_tiktokens(gpt2_folder):
    """On any text, on text of what its pattern tells apart, on real text; and with its ends."""
    tokenizer = AutoTokenizer.from_pretrained(gpt2_folder, trust_remote_code=True)
    encoding = weights.encoding_of(Hyperparameters())

    def same(text):
        ids = tokenizer(text, verbose=False)["input_ids"]
        assert ids == encoding.encode_ordinary(text)
        assert tokenizer.decode(ids) == text

    pieces = st.sampled_from([*" \t\n\r\x0b\xa0\u2003a7.'_é日٣🙂ﬀ", "'ll", "'S", "  ", " the"])
    many(given(st.text())(same))()
    many(given(st.lists(pieces, max_size=30).map("".join))(same))()
    same((ROOT / "README.md").read_text())
    assert tokenizer("a<|endoftext|>")["input_ids"] == [64, 50256] and len(tokenizer) == 50257


def test_merges_are_those_that_gpt2_was_published_with(gpt2_folder):
    merges = json.loads((gpt2_folder / "tokenizer.json").read_text())["model"]["merges"]
    published = [
        path.read_text()
        for path in (SHARED_DATA / "tiktoken_cache").iterdir()
        if path.read_bytes().startswith(b"#version")
    ]
    assert [" ".join(pair) for pair in merges] == published[0].splitlines()[1:]


def test_ids_that_no_text_has_are_not_generated(gpt2_folder):
    model = AutoModelForCausalLM.from_pretrained(gpt2_folder, trust_remote_code=True)
    inputs = tokens_of(4, 8, vocab_size=50257)
    assert model(inputs).logits[:, -1].argmax(-1).max() > 50256
    ids = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=5)
    assert ids.max() <= 50256


# ---------------------------------------------------------------------------
# the card


def test_the_card_says_what_the_log_says(logs, folder):
    log, card = (logs / "w.txt").read_text(), (folder / "README.md").read_text()
    facts = dict(re.findall(r"^(torch|device):(.*?) +(?:commit|processes):", log, re.M))
    loss = re.search(r"^result val_loss:(\S+)", log, re.M)[1]
    ms = int(re.search(r"^step:60/60 val_loss.* train_time:(\d+)ms", log, re.M)[1])
    commit = re.search(r"^torch:.* commit:(\S*)$", log, re.M)[1]
    products = re.search(r"^device:.* products:(\S+)", log, re.M)[1]
    for sentence in (
        "A language model of 32,800 parameters",
        "has made this card, from the weights and the log of the run.\n",
        "- Steps: 60 of 60 planned.\n",
        "the model has seen 15,360 tokens of it, which holds 6,601 (2.33 epochs).\n",
        f"- Validation loss: {loss} nats a token, on the first 320 tokens of `{logs.parent}/val_",
        f"- Hardware: {facts['device']}; processes: 1.\n",
        f"- Training time: {ms / 1000:.1f} s,",
        f"- torch: {facts['torch']}; products in training: {products}; commit: "
        f"{commit or 'not recorded'}.\n",
        "The encoding is `bytes`, with 257 ids",
        'name = "exported"',
    ):
        assert sentence in card
    shown = card.rpartition("```\n")[0].rpartition("```\n")[2].splitlines()
    not_shown = "log_dir", "resume", "run_id"
    logged = re.findall(r"^hyperparameter (\w+)(=.*)$", log, re.M)
    assert shown == [name + value for name, value in logged if name not in not_shown]
    assert "no result" not in card and "n-gram" not in card and "cache" not in card
    data = huggingface_hub.ModelCard(card).data
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")


def test_the_cards_own_example_runs(folder, monkeypatch, capsys):
    [code] = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    monkeypatch.chdir(folder.parent)
    exec(code, {})
    assert capsys.readouterr().out.startswith("The")


def test_the_card_of_a_checkpoint_is_of_its_step(logs):
    path = logs / "w" / "state_step0000000040.pt"
    state = weights.read(path)
    lines = " ".join(export.training_lines(state, export.log_of(path, state)))
    assert "Steps: 40 of 60 planned. " in lines and " seen 10,240 tokens " in lines
    assert "Validation loss: not known, as the run did not validate after this step." in lines
    assert "Training time" not in lines and "Hardware: " in lines
    assert "Validation loss" not in " ".join(export.training_lines(state, None))


def test_fault_14_the_card_of_a_run_with_hostile_names_is_text(logs, tmp_path):
    """No HTML, no end of a code block, no other element of Markdown comes from settings or log."""
    bad = "a`<script>alert(1)</script>`\n```\n# b"
    path = tmp_path / "logs" / "w" / "model.pt"
    path.parent.mkdir(parents=True)
    state = weights.read(logs / "w" / "model.pt")
    old = state["hyperparameters"]
    state["hyperparameters"] = {**old, "train_files": bad, "val_files": f"{bad}c"}
    write(path, state)
    log = (logs / "w.txt").read_text()
    for name in "train_files", "val_files":
        log = log.replace(f"{name}={old[name]!r}", f"{name}={state['hyperparameters'][name]!r}")
    log = re.sub(r"^device:.* (?=processes:)", "device:<script>`x` ", log, flags=re.M)
    log = re.sub(r"^torch:.*", "torch:<i> commit:<script>", log, flags=re.M)
    path.with_name("w.txt").parent.with_suffix(".txt").write_text(log)
    card = export.card_of(
        "me/<b>", state, export.log_of(path, state), weights.pack.BytesEncoding, 1
    )
    text = re.sub(r"```.*?\n```\n", "", card, flags=re.S)
    assert "alert(1)" in text and not re.search(r"<[a-z/]", text.replace("`<|endoftext|>`", ""))
    assert "<script" not in card and "\n# b" not in card
    shown = card.rpartition("```\n")[0].rpartition("```\n")[2]
    values = dict(re.findall(r"^(\w+)=(.*)$", shown, re.M))
    assert ast.literal_eval(values["train_files"]) == bad


def test_fault_14_the_card_of_a_checkpoint_before_a_legal_change(logs, tmp_path):
    log = (logs / "w.txt").read_text()
    path = tmp_path / "w" / "state_step0000000040.pt"
    path.parent.mkdir()
    path.write_bytes((logs / "w" / path.name).read_bytes())
    changed = log.replace(
        "\nhyperparameter val_loss_every=30\n", "\nhyperparameter val_loss_every=20\n"
    )
    assert changed != log
    (tmp_path / "w.txt").write_text(changed)
    assert export.log_of(path, weights.read(path)).settings["val_loss_every"] == 20


def test_without_a_log_the_card_says_so(logs, tmp_path):
    path = tmp_path / "logs" / "w" / "model.pt"
    path.parent.mkdir(parents=True)
    path.write_bytes((logs / "w" / "model.pt").read_bytes())
    assert ", no log beside it\n" in export.export(path, tmp_path / "out", name="me/mine")
    card = (tmp_path / "out" / "README.md").read_text()
    loss = weights.read(path)["val_loss"]
    assert f"Validation loss: {loss:.4f} nats" in card and "seen 15,360 tokens of it.\n" in card
    assert "The log of the run was not beside the weights, so hardware, time, version" in card
    assert "has made this card, from the weights alone." in card
    assert "Hardware:" not in card and "epochs" not in card
    assert "\n# mine\n" in card and 'name = "me/mine"' in card


def test_the_card_of_a_run_that_was_cut_says_so(logs, tmp_path):
    """Its log holds the validation before the cut."""
    log = (logs / "w.txt").read_text()
    end = re.search(r"^step:31/60 .*\n", log, re.M).end()
    path = tmp_path / "w" / "state_step0000000030.pt"
    state = weights.read(logs / "w" / "state_step0000000040.pt") | {"step": 30}
    write(path, state)
    (tmp_path / "w.txt").write_text(log[:end])
    run = export.log_of(path, state)
    lines = [*export.training_lines(state, run)]
    loss = re.search(r"^step:30/60 val_loss:(\S+)", log, re.M)[1]
    assert f"Validation loss: {loss} nats" in " ".join(lines)
    assert run.fault and lines[-1] == f"The run has no result, by its log: {run.fault}."


# ---------------------------------------------------------------------------
# refusals


def command(monkeypatch, *arguments):
    """Run the tool here as on the command line; return its sentence, None without one."""
    monkeypatch.setattr(sys, "argv", ["export.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        report.command(export.main)
    return ended.value.code or None


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--log_dir=nowhere", "--out=out"], "no weights in nowhere: train first"),
        (["nowhere.pt", "--out=out"], "nowhere.pt is not a file: give the weights of a run"),
        (["notes", "--out=out"], "notes holds no weights: give a run's folder or a file"),
        (["notes/n.txt", "--out=out"], "notes/n.txt is damaged, or no file that train_gpt2"),
        (["{run}"], "the following arguments are required: --out; see --help"),
        (["{run}", "--out=out", "--to=x"], "unrecognized arguments: --to=x; see --help"),
        (["{run}", "--out=notes"], r".*/notes holds \['n.txt'\], which no export has: give a new"),
        (["{run}", "--out=notes/n.txt"], ".*/notes/n.txt is no folder: give a new one"),
        (["{run}", "--out=readme"], r".*/readme holds \['README.md'\], but not of an export: "),
        (["{run}", "--out=out", "--encoding=x"], "unknown encoding 'x': give bytes or one of"),
        (["{run}", "--out=out", "--encoding=gpt2"], "vocab_size=257 of .* is less than the 50257"),
        (["{run}", "--out=out", "--push=mine"], "--push=mine must be USER/NAME"),
        (["{run}", "--out=out", "--push=me/.."], "Repo id "),
        (["{run}", "--out=out", "--push=me/mine"], "--push needs a token of the Hub: `hf auth"),
    ],
)
def test_refusals_are_one_sentence_and_write_nothing(
    arguments, sentence, logs, tmp_path, monkeypatch
):
    if "--encoding=gpt2" in arguments and not SHARED_DATA.is_dir():
        pytest.skip("GPT-2's vocabulary is not beside this clone")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED_DATA / "tiktoken_cache"))
    monkeypatch.chdir(tmp_path)
    for path in tmp_path / "notes" / "n.txt", tmp_path / "readme" / "README.md":
        path.parent.mkdir()
        path.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    given = [argument.replace("{run}", str(logs / "w")) for argument in arguments]
    said = command(monkeypatch, *given)
    assert re.match(f"export.py: {sentence}", said) and "\n" not in said
    assert sorted(tmp_path.rglob("*")) == before


def test_a_log_of_another_run_is_refused(logs, tmp_path):
    path = tmp_path / "w" / "model.pt"
    path.parent.mkdir()
    path.write_bytes((logs / "w" / "model.pt").read_bytes())
    log = (logs / "w.txt").read_text()
    for old, new, sentence in (
        ("\nhyperparameter n_layer=2\n", "\nhyperparameter n_layer=3\n", r"\(n_layer differ\)"),
        ("\nstep:60/60 val_loss:", "\nstep:60/60 val_loss:1", "does not hold the validation loss"),
        ("\nhyperparameter ", "\n", "is no log of a training run.*; move it away to export"),
    ):
        assert old in log
        (tmp_path / "w.txt").write_text(log.replace(old, new))
        with pytest.raises(ValueError, match=sentence):
            export.export(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("missing", ["transformers", "safetensors.torch", "tokenizers"])
def test_a_missing_package_is_one_sentence(missing, monkeypatch):
    path = ROOT / "records" / "tools" / "export.py"
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(sys, "argv", [str(path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    fix = f"{sys.executable} -m pip install -r records/requirements.txt"
    assert ended.value.code == f"export.py: {missing} is not installed: {fix}"


# ---------------------------------------------------------------------------
# the Hub


class Handler(http.server.BaseHTTPRequestHandler):
    """As much of the Hub as the upload of a folder needs: regular files and large ones."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        hub, body = self.server, self.body()
        address = f"http://127.0.0.1:{hub.server_port}"
        hub.tokens.add(self.headers.get("Authorization"))
        if self.path == hub.refused:
            self.answer({"error": "You do not have the right"}, 403)
        elif self.path == "/api/repos/create":
            hub.created.append(json.loads(body))
            self.answer({"url": f"{address}/me/mine"})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif self.path == "/api/models/me/mine/preupload/main":
            large = {True: "lfs", False: "regular"}
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = [large[name.endswith(".safetensors")] for name in names]
            files = [
                {"path": name, "uploadMode": mode, "shouldIgnore": False}
                for name, mode in zip(names, modes)
            ]
            self.answer({"files": files})
        elif self.path == "/me/mine.git/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            for each in objects:
                each["actions"] = {"upload": {"href": f"{address}/lfs/{each['oid']}"}}
            self.answer({"objects": objects, "transfer": "basic"})
        elif self.path == "/api/models/me/mine/commit/main":
            for line in body.splitlines():
                hub.commit(**json.loads(line))
            commit = {"commitUrl": f"{address}/me/mine/commit/1", "commitOid": "1", "success": True}
            self.answer(commit)
        else:
            self.answer({"error": f"unknown: {self.path}"}, 404)

    def do_PUT(self):
        if self.server.refused == "upload":
            self.body()
            return self.answer({"error": "You do not have the right"}, 403)
        self.server.large[self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def body(self):
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def answer(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status >= 400:
            self.send_header("X-Error-Message", " ".join(content["error"].split()))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


class Hub(http.server.ThreadingHTTPServer):
    """A Hub with one model, me/mine: its files, and what was asked."""

    refused = None  # path of a request that is refused, or upload

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.created, self.large, self.files, self.tokens = [], {}, {}, set()

    def commit(self, key, value):
        if key == "file":
            assert value["encoding"] == "base64"
            self.files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            self.files[value["path"]] = self.large[value["oid"]]
        else:
            assert key == "header", key


@pytest.fixture
def hub():
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def to_hub(hub, monkeypatch):
    """Make the client of this process take that Hub for the Hub."""
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "secret")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return hub


def test_the_command_line_pushes_just_the_files(hub, logs, tmp_path):
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": "secret",
        "NO_PROXY": "127.0.0.1",
    }
    path = ROOT / "records" / "tools" / "export.py"
    done = subprocess.run(
        [sys.executable, path, "--log_dir", logs, "--out=out", "--push=me/mine"],
        env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    out = tmp_path / "out"
    assert hub.files == {path.name: path.read_bytes() for path in out.iterdir()}
    assert hub.files.keys() == export.FILES and len(hub.large) == 1
    assert hub.tokens == {"Bearer secret"} and hub.created[0]["name"] == "mine"
    expected = rf"{logs}/w/model.pt: 32,800 parameters after step 60, its log\n{out}: .*\n"
    assert re.fullmatch(rf"{expected}pushed: http://127.0.0.1:\d+/me/mine\n", done.stdout)
    assert 'name = "me/mine"' in (out / "README.md").read_text()


@pytest.mark.filterwarnings("ignore:Use 'content=")  # the client's own
@pytest.mark.parametrize(
    "refused", ["/api/repos/create", "/api/models/me/mine/preupload/main", "upload"]
)
def test_a_refused_push_is_one_sentence_and_the_export_stays(
    refused, to_hub, logs, tmp_path, monkeypatch
):
    to_hub.refused = refused
    said = command(monkeypatch, logs / "w", "--out", tmp_path / "out", "--push=me/mine")
    start = f"export.py: {tmp_path}/out is written, but not pushed to me/mine: "
    assert said.startswith(start) and "You do not have the right" in said and "\n" not in said
    assert set(os.listdir(tmp_path / "out")) == export.FILES and not to_hub.files


def test_a_push_without_network_is_one_sentence(to_hub, logs, folder):
    to_hub.shutdown()
    to_hub.server_close()
    with pytest.raises(
        ValueError, match=r"^.* is written, but not pushed to me/mine: .*refused.*$"
    ):
        export.push(folder, "me/mine")
