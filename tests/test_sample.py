"""sample.py generates text token by token; weights.py finds and loads the weights of a run."""

import io
import os
import re
import sys
from pathlib import Path

import pytest
import sample
import torch
import train_modern
import weights
from conftest import run_tool, small_state, write_run_on_own_tokens, write_weights

import train_gpt2
from train_gpt2 import UserError


def run(capsys, path, *arguments):
    """Run sample.py; return what it prints."""
    sample.main([f"--weights={path}", *arguments])
    return capsys.readouterr().out


@pytest.mark.parametrize("prompt", ["pri", ""])
def test_greedy_samples_are_the_argmax_of_the_whole_model(trained_run, capsys, prompt):
    """This includes tokens beyond sequence_length, for which the model sees the last 32 only."""
    gpt, *_ = weights.load(trained_run / "model.pt", dtype=torch.float32)
    tokens = [256, *prompt.encode()]
    for _ in range(50):
        with torch.no_grad():
            tokens.append(gpt(torch.tensor([tokens[-32:]]))[0, -1].argmax().item())
    text = run(capsys, trained_run, prompt, "--temperature=0", "--tokens=50")
    assert text == bytes(tokens[1:]).decode() + "\n"
    assert "range(10):\n    print(i)\n" in text


def test_the_same_seed_gives_the_same_text_and_another_seed_another(plain_run, capsys):
    arguments = ["", "--temperature=2", "--top_k=999", "--tokens=20"]
    first, again, other = (run(capsys, plain_run, *arguments, f"--seed={i}") for i in (1, 1, 2))
    assert first == again != other


def test_picks_have_the_probabilities_of_the_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0, -9.0])
    generator = torch.Generator().manual_seed(0)
    picks = [sample.pick(logits, 1.5, 3, generator) for _ in range(4000)]
    expected = (logits[:3] / 1.5).softmax(0).tolist()
    seen = [picks.count(token) / 4000 for token in range(4)]
    assert seen == pytest.approx([*expected, 0], abs=0.03)


@pytest.mark.parametrize(
    "ids, left, text",
    [([*"aß€".encode(), 256, *b"never"], 5, "aß€\n"), ("€".encode()[:2], 0, "\ufffd\n")],
)
def test_text_is_decoded_up_to_an_end_of_text_token(ids, left, text, capsys):
    ids = iter(ids)
    sample.write(ids, weights.pack.get_encoding("bytes"))
    assert capsys.readouterr().out == text and len(list(ids)) == left


def test_ids_that_only_pad_the_vocabulary_are_never_sampled(gpt2_vocabulary, tmp_path, capsys):
    path = write_weights(tmp_path / "model.pt", small_state())
    with pytest.raises(ValueError, match="50257 ids"):
        run(capsys, path, "--encoding=gpt2")
    state = small_state(vocab_size=50304)
    state["model"]["lm_head.weight"][50257:] *= 1e4
    write_weights(path, state)
    text = run(capsys, path, "Hello", "--temperature=3", "--top_k=0", "--tokens=5")
    assert text.startswith("Hello")


def test_without_a_known_encoding_no_text_is_printed(tmp_path, capsys):
    path = write_run_on_own_tokens(tmp_path)
    with pytest.raises(ValueError, match="the encoding of the training data is unknown"):
        run(capsys, path, "Hello")
    assert run(capsys, path, "Hello", "--encoding=bytes", "--tokens=0") == "Hello\n"


@pytest.mark.parametrize("content", ["[]", '{"enc'])
def test_a_damaged_manifest_is_one_sentence(content, tmp_path):
    path = write_run_on_own_tokens(tmp_path)
    _, args, state = weights.load(path)
    Path(args.train_files).with_name("manifest.json").write_text(content)
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        weights.encoding_of(state, args)


def test_a_prompt_may_come_from_standard_input(plain_run, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("for i"))
    assert run(capsys, plain_run, "-", "--tokens=0") == "for i\n"


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ([], "no weights in logs"),
        (["--temperature=-1"], "--temperature must be 0 or more"),
        (["--temperature=nan"], "--temperature must be 0 or more"),
        (["--top_k=-5"], "--top_k must be 0 or more"),
        (["--weights=nowhere.pt"], "nowhere.pt holds no weights"),
        (["--weights=text.pt"], "text.pt cannot be used"),
    ],
)
def test_mistakes_are_one_sentence(arguments, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.pt").write_text("mine")
    with pytest.raises(ValueError, match=sentence):
        sample.main(arguments)


@pytest.mark.parametrize(
    "changes, reason",
    [
        (dict(n_layer="1"), "does not fit train_gpt2.py as it is now .*'int' and 'str'"),
        (dict(n_layer=2), "does not fit train_gpt2.py as it is now .*Missing key"),
        (dict(n_embd=8), "does not fit train_gpt2.py as it is now .*size mismatch"),
        (dict(stranger=1), "does not fit train_gpt2.py as it is now .*'stranger'"),
    ],
)
def test_weights_of_another_model_are_refused(changes, reason, tmp_path):
    state = small_state()
    state["hyperparameters"] |= changes
    path = write_weights(tmp_path / "model.pt", state)
    with pytest.raises(UserError, match=reason) as refused:
        weights.load(path)
    assert "\n" not in str(refused.value)


IDEA = """
import train_gpt2
class Mine(train_gpt2.GPT):
    def forward(self, inputs, targets=None):
        return 2 * super().forward(inputs, targets)
RECIPE = train_gpt2.RECIPE._replace(script="my_idea.py", build_model=Mine)
"""


def test_the_script_that_wrote_the_weights_defines_the_model(tmp_path, monkeypatch):
    state = small_state()
    tokens = torch.arange(5)[None]
    plain, *_ = weights.load(write_weights(tmp_path / "model.pt", state))
    monkeypatch.setattr(weights, "ROOT", tmp_path)
    monkeypatch.setitem(sys.modules, "my_idea", None)  # is removed after the test
    del sys.modules["my_idea"]
    (tmp_path / "my_idea.py").write_text(IDEA)
    (tmp_path / "sys.py").touch()
    path = write_weights(tmp_path / "mine.pt", {**state, "script": "my_idea.py"})
    mine, *_ = weights.load(path)
    assert torch.equal(mine(tokens), 2 * plain(tokens))
    for script, sentence in (
        ("sys.py", "sys.py defines no RECIPE, or another module has its name"),
        *((name, f"there is no script {name} in") for name in ("no.py", "mine.pt", "a/../sys.py")),
        (str(tmp_path / "my_idea.py"), f"there is no script {tmp_path}/my_idea.py"),
    ):
        with pytest.raises(UserError, match=re.escape(sentence)):
            weights.load(write_weights(path, {**state, "script": script}))


def test_a_tool_takes_the_script_that_comes_before_its_settings():
    settings = ["--n_layer=3"]
    for first, recipe in ((), train_gpt2.RECIPE), (("modern",), train_modern.RECIPE):
        assert weights.recipe_and_settings([*first, *settings]) == (recipe, settings)
    with pytest.raises(UserError, match="there is no script moderne in"):
        weights.recipe_and_settings(["moderne"])


def test_a_folder_gives_the_weights_of_its_end_and_no_name_the_newest_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "logs" / "w"
    names = "best.pt", "state_step0000000080.pt", "state_step0000000100.pt", "model.pt"
    for age, name in enumerate(names):
        path = write_weights(folder / name, small_state())
        os.utime(path, (1000 - age, 1000 - age))  # a time may only tell when a file was copied
        assert weights.find(folder).name == name
    assert weights.find("").name == "best.pt"


def test_the_command_prints_samples(plain_run):
    """Importing the compiler would take seconds. PYTHONPROFILEIMPORTTIME prints all imports."""
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    arguments = "for", "--tokens=5", f"--weights={plain_run}"
    done = run_tool("sample.py", *arguments, env=environment)
    assert done.returncode == 0 and done.stdout.startswith("for")
    assert "torch.nn" in done.stderr and "torch._dynamo" not in done.stderr
