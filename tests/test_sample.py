"""Sampling: the trained model itself writes, token by token. Weights: only those that fit."""

import io
import os
import subprocess
import sys

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


@pytest.fixture(scope="module", params=["plain", "pieces"])
def trained(request, tmp_path_factory):
    """Folder of a run on bytes, without and with n-grams and a key shift."""
    pieces = dict(max_ngram=3, ngram_rows=997, key_shift=1) if request.param == "pieces" else {}
    folder = tmp_path_factory.mktemp(request.param)
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
    return folder / "logs" / "w"


def written(path, *arguments):
    output = io.StringIO()
    sample.main([f"--weights={path}", *arguments], output)
    return output.getvalue()


def saved(state, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    log = train_gpt2.Log(Hyperparameters(log_dir=str(path.parent)), "unused", 1)
    assert train_gpt2.write_checkpoint(state, path, log)
    return path


@pytest.fixture
def state():
    """Content of a small file of weights."""
    args = Hyperparameters(vocab_size=257, n_layer=1, n_head=1, n_embd=4, sequence_length=8)
    return dict(hyperparameters=vars(args), val_loss=1.0, model=GPT(args).state_dict())


@pytest.mark.parametrize("prompt", ["pri", ""])
def test_greedy_samples_are_the_argmax_of_the_whole_model(trained, prompt):
    """Also beyond sequence_length, where it sees the last tokens and no n-gram of others."""
    gpt, *_ = weights.load(weights.find(trained), dtype=torch.float32)
    tokens = [256, *prompt.encode()]
    for _ in range(50):
        with torch.no_grad():
            tokens.append(gpt(torch.tensor([tokens[-32:]]))[0, -1].argmax().item())
    text = written(trained, prompt, "--temperature=0", "--tokens=50")
    assert text == bytes(tokens[1:]).decode() + "\n"
    assert "range(10):\n    print(i)\n" in text


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


@pytest.mark.parametrize(
    "ids, count, text",
    [([*"aß€".encode(), 256, *b"never"], 7, "aß€\n"), ("€".encode()[:2], 2, "\ufffd\n")],
)
def test_cut_characters_and_end_of_text(ids, count, text):
    output = io.StringIO()
    assert sample.write(iter(ids), weights.pack.BytesEncoding, output) == count
    assert output.getvalue() == text


def test_gpt2_tokens_are_sampled_below_the_padding(tmp_path, state, monkeypatch):
    """Ids from 50257 on are never taken. Other encodings than the model's are refused."""
    if not SHARED_DATA.is_dir():
        pytest.skip("GPT-2's vocabulary is not beside this clone")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED_DATA / "tiktoken_cache"))
    with pytest.raises(UserError, match="the encoding gpt2 has 50257 ids"):
        written(saved(state, tmp_path / "bytes" / "model.pt"), "--encoding=gpt2")
    args = Hyperparameters(n_layer=1, n_head=1, n_embd=4)
    gpt = GPT(args)
    with torch.no_grad():
        gpt.lm_head.weight[50257:] *= 1e4
    state = dict(hyperparameters=vars(args), model=gpt.state_dict())
    path = saved(state, tmp_path / "gpt2" / "model.pt")
    text = written(path, "Hello", "--temperature=3", "--top_k=0", "--tokens=5")
    assert text.startswith("Hello")


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ([], "no weights in logs: train first"),
        (["--weights=nowhere.pt"], "nowhere.pt is not a file"),
        (["--weights=text.pt"], "text.pt is damaged"),
        (["--weights=."], "holds no weights"),
        (["--tokens=0"], "--tokens=0 must be a number from 1 to"),
        (["--temperature=nan"], "--temperature=nan must be a number from 0 to"),
    ],
)
def test_mistakes_are_one_sentence(arguments, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.pt").write_text("mine")
    with pytest.raises(UserError, match=sentence):
        sample.main(arguments)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"n_layer": 10**6}, "n_layer=1000000 "),
        ({"n_layer": 1000}, "does not fit this train_gpt2.py"),
        ({"n_embd": 2**30}, "does not fit this train_gpt2.py"),
        ({"n_embd": 2**20}, "does not fit this train_gpt2.py"),
        ({"max_ngram": 2, "ngram_rows": 2**30}, "does not fit this train_gpt2.py"),
        ({"n_layer": "1"}, "n_layer='1' must be a number"),
    ],
)
def test_fault_14_foreign_weights_are_refused_at_once(changes, sentence, state, tmp_path):
    """Also those of huge models, which would not fit into memory."""
    state["hyperparameters"] = {**state["hyperparameters"], **changes}
    path = saved(state, tmp_path / "model.pt")
    with pytest.raises(UserError, match=sentence) as refused:
        weights.load(path)
    assert "\n" not in str(refused.value)


def test_a_damaged_file_is_refused(state, tmp_path):
    path = saved(state, tmp_path / "model.pt")
    content = bytearray(path.read_bytes())
    place = content.find(state["model"]["lm_head.weight"].numpy().tobytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="is damaged"):
        weights.load(path)


@pytest.mark.parametrize("content", [{"a": 1}, [1], "x", {"hyperparameters": None}])
def test_fault_14_another_file_with_a_checksum_is_refused(content, tmp_path):
    with pytest.raises(UserError, match="holds no settings of a run"):
        weights.load(saved(content, tmp_path / "model.pt"))


def test_weights_saved_under_other_names_of_settings_are_loaded(state, tmp_path):
    args = Hyperparameters(**state["hyperparameters"] | {"max_ngram": 3, "key_shift": 1})
    old = {**vars(args), "ngrams": args.max_ngram, "key_offset": args.key_shift}
    del old["max_ngram"], old["key_shift"]
    state.update(hyperparameters=old, model=GPT(args).state_dict())
    _, loaded, _ = weights.load(saved(state, tmp_path / "model.pt"))
    assert loaded == args


def test_fault_14_a_folder_gives_the_weights_of_the_most_steps(state, tmp_path, monkeypatch):
    """Of as many steps the final weights, which have a loss. No name gives the newest file."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "logs" / "w"
    saved(state, folder / "best.pt")
    assert weights.find(folder).name == "best.pt"
    state["hyperparameters"] = {**state["hyperparameters"], "num_iterations": 60}
    saved(state, folder / "model.pt")
    for step, name in (40, "model.pt"), (60, "model.pt"), (80, "state_step0000000080.pt"):
        path = saved(state, folder / f"state_step{step:010d}.pt")
        os.utime(path, (0, 0))  # times tell when a file was copied
        assert weights.find(folder).name == name
    assert weights.find("").name == "model.pt"
    (folder / "model.pt").unlink()
    assert weights.find(folder).name == "state_step0000000080.pt"


def test_weights_are_those_of_the_training(trained):
    """model.pt holds the last weights: their loss is the run's. The head stays tied."""
    gpt, args, state = weights.load(weights.find(trained))
    assert gpt.wte.weight is gpt.lm_head.weight
    torch.backends.cuda.enable_flash_sdp(False)  # the attention of a run on a CPU
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    loader = train_gpt2.DistributedDataLoader(args.val_files, 8, 32, 0, 1, torch.device("cpu"))
    assert train_gpt2.evaluate(gpt, loader, 320) == pytest.approx(state["val_loss"], rel=1e-6)


def test_the_command_line_streams_and_ends_in_a_sentence(trained):
    command = [sys.executable, str(ROOT / "records" / "tools" / "sample.py"), "for", "--tokens=5"]
    for path, status, said in (trained, 0, "ms each"), ("nowhere", 1, "sample.py: nowhere is not"):
        done = subprocess.run(
            [*command, f"--weights={path}"], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == status and said in done.stderr
        assert done.stdout.startswith("for") == (status == 0)
    assert done.stderr.count("\n") == 1
