"""Sampling: the trained model itself writes, token by token."""

import io
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import sample
import torch
import weights
from conftest import ROOT, SHARED_DATA, write_shard
from hypothesis import given, settings
from hypothesis import strategies as st

import train_gpt2
from train_gpt2 import GPT, Hyperparameters, UserError, main

TEXT = "for i in range(10):\n    print(i)\n" * 200


def train(folder, **pieces):
    """Train on bytes; return the folder, with logs/w/model.pt."""
    tokens = [256, *TEXT.encode()]
    write_shard(folder / "train_0.bin", tokens)
    write_shard(folder / "val_0.bin", tokens[:1000])
    main(
        Hyperparameters(
            vocab_size=257, n_layer=1, n_head=1, n_embd=64, batch_size=8, sequence_length=32,
            num_iterations=60, warmdown_iters=30, learning_rate=0.02, muon_learning_rate=0.005,
            val_loss_every=0, val_tokens=320, device="cpu", compile=False, allow_repeat=True,
            train_files=f"{folder}/train_*.bin", val_files=f"{folder}/val_*.bin",
            log_dir=f"{folder}/logs", run_id="w", **pieces,
        )
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("sample"))


@pytest.fixture(scope="module")
def with_pieces(tmp_path_factory):
    """As trained, of a run with n-grams and a key shift."""
    pieces = dict(max_ngram=3, ngram_rows=997, key_shift=1)
    return train(tmp_path_factory.mktemp("pieces"), **pieces)


@pytest.fixture(params=["trained", "with_pieces"])
def either(request):
    return request.getfixturevalue(request.param)


def written(folder, *arguments):
    output = io.StringIO()
    sample.main([f"--log_dir={folder}/logs", *arguments], output)
    return output.getvalue()


def test_a_trained_model_writes_what_it_has_read(trained):
    text = written(trained, "for i", "--temperature=0", "--tokens=60")
    assert text.startswith("for i") and "(10):\n    print(i)\n" in text


@pytest.mark.parametrize("prompt", ["pri", ""])
def test_greedy_samples_are_the_argmax_of_the_whole_model(either, prompt):
    """Beyond sequence_length, too, where it sees the last tokens and no n-gram of others."""
    gpt, *_ = weights.load(weights.find(either / "logs" / "w"), dtype=torch.float32)
    tokens = [256, *prompt.encode()]
    for _ in range(50):
        with torch.no_grad():
            tokens.append(gpt(torch.tensor([tokens[-32:]]))[0, -1].argmax().item())
    text = written(either, prompt, "--temperature=0", "--tokens=50")
    assert text == bytes(tokens[1:]).decode() + "\n"


def test_a_seed_gives_the_same_samples_and_another_others(trained):
    arguments = ["", "--number=2", "--temperature=2", "--top_k=0", "--tokens=20"]
    first = written(trained, *arguments, "--seed=1")
    assert first == written(trained, *arguments, "--seed=1")
    assert first != written(trained, *arguments, "--seed=2")
    one, two = first.split("--- sample 2 of 2\n")
    assert one.removeprefix("--- sample 1 of 2\n") != two


@settings(deadline=None, max_examples=50)
@given(
    values=st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=30),
    temperature=st.floats(0.01, 5),
    top_k=st.integers(0, 40),
)
def test_a_pick_is_among_the_most_likely(values, temperature, top_k):
    logits = torch.tensor(values)
    token = sample.pick(logits, temperature, top_k, torch.Generator().manual_seed(0))
    assert (logits > logits[token]).sum() < (top_k or len(values))
    assert logits[sample.pick(logits, 0, 0, None)] == logits.max()


def test_picks_have_the_probabilities_of_the_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0, -9.0])
    generator = torch.Generator().manual_seed(0)
    picks = [sample.pick(logits, 1.5, 3, generator) for _ in range(4000)]
    expected = (logits[:3] / 1.5).softmax(0).tolist()
    seen = [picks.count(token) / 4000 for token in range(4)]
    assert seen == pytest.approx([*expected, 0], abs=0.03)


def test_cut_characters_and_end_of_text():
    output = io.StringIO()
    ids = [*"aß€".encode(), 256, *b"never"]
    assert sample.write(iter(ids), weights.pack.BytesEncoding, output) == 7
    assert output.getvalue() == "aß€\n"
    output = io.StringIO()
    sample.write(iter("€".encode()[:2]), weights.pack.BytesEncoding, output)
    assert output.getvalue() == "\ufffd\n"


def test_gpt2_tokens_are_sampled_below_the_padding(tmp_path, monkeypatch):
    """By the data's manifest; ids from 50257 on are never taken."""
    if not SHARED_DATA.is_dir():
        pytest.skip("GPT-2's vocabulary is not beside this clone")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED_DATA / "tiktoken_cache"))
    args = Hyperparameters(n_layer=1, n_head=1, n_embd=4, train_files=f"{tmp_path}/train_*.bin")
    gpt = GPT(args)
    with torch.no_grad():
        gpt.lm_head.weight[50257:] *= 1e4
    (tmp_path / "logs" / "g").mkdir(parents=True)
    log = train_gpt2.Log(Hyperparameters(log_dir=str(tmp_path / "logs")), "g", 0)
    state = dict(hyperparameters=vars(args), model=gpt.state_dict())
    assert train_gpt2.write_checkpoint(state, tmp_path / "logs" / "g" / "model.pt", log)
    split = {"sha256": {}, "bytes": 9, "tokens": 2}
    manifest = {"encoding": "gpt2", "val_below": 0, "train": split, "val": split}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert weights.encoding_of(args).name == "gpt2" and weights.bytes_per_token(args) == 4.5
    text = written(tmp_path, "Hello", "--temperature=3", "--top_k=0", "--tokens=5")
    assert text.startswith("Hello")


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--log_dir=nowhere"], "no weights in nowhere: train first"),
        (["--weights=nowhere.pt"], "nowhere.pt is not a file: give the weights of a run"),
        (["--weights=README.md"], "README.md is damaged, or no file that train_gpt2.py wrote"),
        (["--weights=tests"], "tests holds no weights"),
        (["--tokens=0"], "--tokens=0 must be a number from 1 to"),
        (["--temperature=-1"], "--temperature=-1.0 must be a number from 0 to"),
        (["--temperature=nan"], "--temperature=nan must be a number from 0 to"),
    ],
)
def test_refusals(arguments, sentence, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=sentence):
        sample.main(arguments)


def test_other_encodings_are_refused(trained):
    if not SHARED_DATA.is_dir():
        pytest.skip("GPT-2's vocabulary is not beside this clone")
    os.environ["TIKTOKEN_CACHE_DIR"] = str(SHARED_DATA / "tiktoken_cache")
    with pytest.raises(UserError, match="the encoding gpt2 does not fit"):
        written(trained, "--encoding=gpt2")


def test_weights_of_another_model_are_refused_in_a_sentence(trained, monkeypatch):
    class Wider(GPT):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.extra = torch.nn.Parameter(torch.zeros(3))

    monkeypatch.setattr(weights, "GPT", Wider)
    with pytest.raises(UserError, match="is of another model than this"):
        written(trained)


def saved(state, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    log = train_gpt2.Log(Hyperparameters(log_dir=str(path.parent)), "unused", 1)
    assert train_gpt2.write_checkpoint(state, path, log)
    return path


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"n_layer": 10**6}, "n_layer=1000000 "),
        ({"n_layer": 1000}, "is of another model than this"),
        ({"n_embd": 2**30}, "has settings that no model can have"),
        ({"n_embd": 2**20}, "is of another model than this"),
        ({"vocab_size": 2**30}, "vocab_size=1073741824 must be a number"),
        ({"max_ngram": 2, "ngram_rows": 2**30}, "is of another model than this"),
        ({"n_layer": "1"}, "n_layer='1' must be a number"),
        ({"n_head": -1}, "n_head=-1 must be a number"),
        (None, "holds no settings of a run"),
    ],
)
def test_fault_14_foreign_weights_are_refused_at_once(changes, sentence, trained, tmp_path):
    state = weights.read(trained / "logs" / "w" / "model.pt")
    settings = None if changes is None else {**state["hyperparameters"], **changes}
    path = saved({**state, "hyperparameters": settings}, tmp_path / "model.pt")
    start = time.perf_counter()
    with pytest.raises(UserError, match=sentence) as refused:
        written(trained, f"--weights={path}")
    assert time.perf_counter() - start < 10 and "\n" not in str(refused.value)


def test_weights_saved_under_other_names_of_settings_are_loaded(trained, tmp_path):
    state = weights.read(trained / "logs" / "w" / "model.pt")
    args = Hyperparameters(**state["hyperparameters"] | {"max_ngram": 3, "key_shift": 1})
    old = {**vars(args), "ngrams": args.max_ngram, "key_offset": args.key_shift}
    del old["max_ngram"], old["key_shift"]
    state.update(hyperparameters=old, model=weights.GPT(args).state_dict())
    _, loaded, content = weights.load(saved(state, tmp_path / "model.pt"))
    assert loaded == args and content["hyperparameters"] == vars(args)


@pytest.mark.parametrize("content", [{"a": 1}, [1], "x"])
def test_fault_14_another_file_with_a_checksum_is_refused(content, tmp_path):
    path = saved(content, tmp_path / "model.pt")
    with pytest.raises(UserError, match="holds no settings of a run"):
        weights.load(path)


def test_fault_14_a_manifest_of_infinity_is_one_sentence(trained, tmp_path, monkeypatch):
    split = '{"sha256": {}, "bytes": 9, "tokens": 2}'
    manifest = f'{{"encoding": "bytes", "val_below": 1e999, "train": {split}, "val": {split}}}'
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(ValueError, match=r"manifest.json is damaged: val_below is Inf"):
        weights.encoding_of(Hyperparameters(train_files=f"{tmp_path}/train_*.bin"))


def test_fault_14_a_folder_gives_the_weights_of_the_most_steps(trained, tmp_path, capsys):
    """Of as many steps the final weights, which have a loss; the tool says what it has taken."""
    final = weights.read(trained / "logs" / "w" / "model.pt")  # of 60 steps
    folder = tmp_path / "logs" / "w"
    saved(final, folder / "model.pt")
    for step, name in (40, "model.pt"), (60, "model.pt"), (80, "state_step0000000080.pt"):
        path = saved({**final, "step": step}, folder / f"state_step{step:010d}.pt")
        os.utime(path, (0, 0))  # times tell when a file was copied
        assert weights.find(folder).name == name
        sample.main([f"--weights={folder}", "--tokens=1"])
        assert f"{folder / name}, seed 0\n" in capsys.readouterr().err
    (folder / "model.pt").unlink()
    assert weights.find(folder).name == "state_step0000000080.pt"


def test_the_command_line_streams_and_ends_in_a_sentence(trained):
    command = [sys.executable, str(ROOT / "records" / "tools" / "sample.py"), "for"]
    done = subprocess.run(
        [*command, f"--weights={trained}/logs/w/model.pt", "--tokens=5"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.startswith("for") and "ms each" in done.stderr
    done = subprocess.run(
        [*command, "--weights=nowhere"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1


def test_weights_are_those_of_the_training(either):
    """model.pt holds the last weights: their loss is the run's."""
    gpt, args, state = weights.load(weights.find(either / "logs" / "w"))
    torch.backends.cuda.enable_flash_sdp(False)  # the attention of a run on a CPU
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    loader = train_gpt2.DistributedDataLoader(args.val_files, 8, 32, 0, 1, torch.device("cpu"))
    assert train_gpt2.evaluate(gpt, loader, 320) == pytest.approx(state["val_loss"], rel=1e-6)
    assert np.isfinite(state["val_loss"])
