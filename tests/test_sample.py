"""Sampling: the trained model itself writes, token by token. Weights: only those that fit."""

import io
import os

import pytest
import sample
import torch
import weights
from conftest import run_tool, small_state, write_weights

from train_gpt2 import Hyperparameters, UserError


def written(path, *arguments):
    output = io.StringIO()
    sample.main([f"--weights={path}", *arguments], output)
    return output.getvalue()


@pytest.mark.parametrize("prompt", ["pri", ""])
def test_greedy_samples_are_the_argmax_of_the_whole_model(trained_run, prompt):
    """Also beyond sequence_length, where it sees the last tokens and no n-gram of others."""
    gpt, *_ = weights.load(trained_run / "model.pt", dtype=torch.float32)
    tokens = [256, *prompt.encode()]
    for _ in range(50):
        with torch.no_grad():
            tokens.append(gpt(torch.tensor([tokens[-32:]]))[0, -1].argmax().item())
    text = written(trained_run, prompt, "--temperature=0", "--tokens=50")
    assert text == bytes(tokens[1:]).decode() + "\n"
    assert "range(10):\n    print(i)\n" in text


def test_a_seed_gives_the_same_samples_and_another_others(plain_run):
    arguments = ["", "--number=2", "--temperature=2", "--top_k=999", "--tokens=20"]
    first = written(plain_run, *arguments, "--seed=1")
    assert first == written(plain_run, *arguments, "--seed=1")
    assert first != written(plain_run, *arguments, "--seed=2")
    one, two = first.split("--- sample 2 of 2\n")
    assert one.removeprefix("--- sample 1 of 2\n") != two


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


def test_gpt2_tokens_are_sampled_below_the_padding(gpt2_vocabulary, tmp_path):
    """Ids from 50257 on are never taken. Other encodings than the model's are refused."""
    path = write_weights(tmp_path / "model.pt", small_state())
    with pytest.raises(UserError, match="50257 ids"):
        written(path, "--encoding=gpt2")
    state = small_state(vocab_size=50304)
    state["model"]["lm_head.weight"][50257:] *= 1e4
    write_weights(path, state)
    text = written(path, "Hello", "--temperature=3", "--top_k=0", "--tokens=5")
    assert text.startswith("Hello")


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ([], "no weights in logs"),
        (["--weights=nowhere.pt"], "nowhere.pt is not a file"),
        (["--weights=text.pt"], "text.pt is damaged"),
        (["--weights=."], "holds no weights"),
        (["--tokens=0"], "--tokens=0"),
        (["--temperature=nan"], "--temperature=nan"),
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
        ({"n_layer": 100}, "does not fit this train_gpt2.py"),
        ({"n_embd": 2**30}, "does not fit this train_gpt2.py"),
        ({"n_embd": 2**20}, "does not fit this train_gpt2.py"),
        ({"max_ngram": 2, "ngram_rows": 2**30}, "does not fit this train_gpt2.py"),
        ({"n_layer": "1"}, "n_layer='1' must be a number"),
    ],
)
def test_fault_14_foreign_weights_are_refused_at_once(changes, sentence, tmp_path):
    """Also those of huge models, which would not fit into memory."""
    state = small_state()
    state["hyperparameters"] = {**state["hyperparameters"], **changes}
    path = write_weights(tmp_path / "model.pt", state)
    with pytest.raises(UserError, match=sentence) as refused:
        weights.load(path)
    assert "\n" not in str(refused.value)


def test_a_damaged_file_is_refused(tmp_path):
    state = small_state()
    path = write_weights(tmp_path / "model.pt", state)
    content = bytearray(path.read_bytes())
    place = content.find(state["model"]["lm_head.weight"].numpy().tobytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="is damaged"):
        weights.load(path)


@pytest.mark.parametrize("content", [{"a": 1}, [1], "x", {"hyperparameters": None}])
def test_fault_14_another_file_with_a_checksum_is_refused(content, tmp_path):
    with pytest.raises(UserError, match="holds no settings of a run"):
        weights.load(write_weights(tmp_path / "model.pt", content))


def test_weights_saved_under_other_names_of_settings_are_loaded(tmp_path):
    state = small_state(max_ngram=3, key_shift=1)
    args = Hyperparameters(**state["hyperparameters"])
    old = {**vars(args), "ngrams": args.max_ngram, "key_offset": args.key_shift}
    del old["max_ngram"], old["key_shift"]
    path = write_weights(tmp_path / "model.pt", {**state, "hyperparameters": old})
    assert weights.load(path)[1] == args


def test_fault_14_a_folder_gives_the_weights_of_the_most_steps(tmp_path, monkeypatch):
    """Of as many steps the final weights, which have a loss. No name gives the newest file."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "logs" / "w"
    state = small_state(num_iterations=60)
    write_weights(folder / "best.pt", state)
    assert weights.find(folder).name == "best.pt"
    write_weights(folder / "model.pt", state)
    for step, name in (40, "model.pt"), (60, "model.pt"), (80, "state_step0000000080.pt"):
        path = write_weights(folder / f"state_step{step:010d}.pt", state)
        os.utime(path, (0, 0))  # times tell when a file was copied
        assert weights.find(folder).name == name
    assert weights.find("").name == "model.pt"
    (folder / "model.pt").unlink()
    assert weights.find(folder).name == "state_step0000000080.pt"


def test_the_command_line_streams_and_ends_in_a_sentence(plain_run):
    for path, status, said in (plain_run, 0, "ms each"), ("nowhere", 1, "sample.py: nowhere is"):
        done = run_tool("sample.py", "for", "--tokens=5", f"--weights={path}")
        assert done.returncode == status and said in done.stderr
        assert done.stdout.startswith("for") == (status == 0)
    assert done.stderr.count("\n") == 1
