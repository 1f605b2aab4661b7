"""evaluate.py: every token counts exactly once, and the loss is that of training."""

import contextlib
import json
import math
import re

import evaluate
import pytest
import torch
import weights
from conftest import small_state, write_run_on_own_tokens, write_shard, write_weights

import train_gpt2
from train_gpt2 import Hyperparameters, UserError

T = 32  # sequence_length of trained_run


def write_uniform_model(folder, **settings):
    """Write weights of zeros, with which all tokens are equally likely; return their path."""
    state = small_state(val_files=f"{folder}/val_*.bin", **settings)
    for tensor in state["model"].values():
        tensor.zero_()
    return write_weights(folder / "model.pt", state)


def run(capsys, path, *arguments):
    """Run the tool; return its table, {name of a row: its other cells}, and all its output."""
    evaluate.main([f"--weights={path}", "--device=cpu", *map(str, arguments)])
    output = capsys.readouterr().out
    rows = [line.split(" | ") for line in re.findall(r"^\| (.*) \|$", output, re.M)]
    return {name: cells for name, *cells in rows}, output


def test_validation_tokens_give_the_loss_of_the_run(trained_run, capsys):
    _, args, state = weights.load(trained_run / "model.pt")
    recipe = weights.recipe_of(state["script"])
    training = train_gpt2.set_up(args, recipe, train_gpt2.StopRequest())
    training.model.load_state_dict(state["model"])
    exact = train_gpt2.evaluate(training)
    assert exact == pytest.approx(state["val_loss"], abs=1e-6)
    for path in trained_run, trained_run / "state_step0000000060.pt":  # a folder means model.pt
        table, output = run(capsys, path)
        assert table[args.val_files][:2] == [f"{args.val_tokens}", f"{exact:.4f}"]
        assert (f"the run logged val_loss:{exact:.4f}" in output) == (path == trained_run)


@torch.no_grad()
@pytest.mark.parametrize("size", [1, T - 1, T, T + 1, 5 * T + 3])
def test_each_token_counts_once(trained_run, tmp_path, capsys, monkeypatch, size):
    """A text of several passes has the loss that is computed here token by token."""
    monkeypatch.setattr(evaluate, "TOKENS_PER_PASS", 3 * T)
    gpt, *_ = weights.load(trained_run / "model.pt")
    content = (b"larger than 7, def f(x): return x * 2\n" * size)[:size]
    (tmp_path / "a.txt").write_bytes(content)
    tokens, total = [256, *content], 0.0
    for i in range(1, len(tokens)):
        first = (i - 1) // T * T  # of its window
        logits = gpt(torch.tensor([tokens[first:i]]))[0, -1].double()
        total -= logits.log_softmax(-1)[tokens[i]].item()
    table, _ = run(capsys, trained_run, tmp_path / "a.txt")
    count, loss, _, bits = table[f"{tmp_path}/a.txt"]
    assert int(count) == size
    assert float(loss) == pytest.approx(total / size, abs=6e-5)
    assert float(bits) == pytest.approx(total / math.log(2) / size, abs=6e-5)


def test_a_uniform_model_has_the_loss_of_its_vocabulary_size(tmp_path, capsys):
    path = write_uniform_model(tmp_path)
    (tmp_path / "a.txt").write_text("größer", encoding="utf-8")  # 6 characters, 8 bytes
    write_shard(tmp_path / "b.bin", [68, 65, 256, 66, 67, 256])  # after the first, 3 bytes of text
    write_shard(tmp_path / "c.bin", [256, 256])
    names = [f"{tmp_path}/{name}" for name in ("a.txt", "b.bin", "c.bin")]
    table, _ = run(capsys, path, *names)
    for name, tokens, size in zip(names, (8, 5, 1), (8, 3, None)):
        bits = f"{tokens * math.log2(257) / size:.4f}" if size else "n/a"
        assert table[name] == [f"{tokens}", f"{math.log(257):.4f}", "257", bits]


def test_gpt2_tokens_have_the_bytes_of_their_text(gpt2_vocabulary, tmp_path, capsys):
    path = write_uniform_model(tmp_path, vocab_size=50304)
    text = "The größte 🎈 <|endoftext|> said:\n\n    def  f(x)…" * 3
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    encoding = weights.encoding_of({"fixed": {"encoding": None}}, Hyperparameters())
    tokens = encoding.encode_ordinary(text)
    write_shard(tmp_path / "b.bin", [50256, *tokens, 50256])
    table, _ = run(capsys, path, tmp_path / "a.txt", tmp_path / "b.bin")
    for name, count in ("a.txt", len(tokens)), ("b.bin", len(tokens) + 1):
        bits = count * math.log2(50304) / len(text.encode())
        expected = [f"{count}", f"{math.log(50304):.4f}", "50304", f"{bits:.4f}"]
        assert table[f"{tmp_path}/{name}"] == expected


def test_shards_of_another_encoding_are_rejected(tmp_path, capsys):
    """Their manifest or FineWeb's name tells. The model's encoding, bytes, has as many ids."""
    path = write_uniform_model(tmp_path)
    write_shard(tmp_path / "a.bin", range(9))
    for name, allowed in ("bytes", True), ("letters", False):
        (tmp_path / "manifest.json").write_text(json.dumps({"encoding": name}))
        expected = contextlib.nullcontext() if allowed else pytest.raises(ValueError, match=name)
        with expected:
            run(capsys, path, tmp_path / "a.bin")
    shard = write_shard(tmp_path / "shards" / "fineweb_val_0.bin", range(9))
    with pytest.raises(ValueError, match="has the encoding gpt2, and the model bytes"):
        run(capsys, path, shard)


def test_without_a_known_encoding_only_tokens_are_measured(tmp_path, capsys):
    path = write_run_on_own_tokens(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    table, _ = run(capsys, path, tmp_path / "val_0.bin")
    table |= run(capsys, path)[0]
    for name, count in ("val_0.bin", "499"), ("val_*.bin", "496"):
        assert table[f"{tmp_path}/{name}"][::3] == [count, "n/a"]
    with pytest.raises(ValueError, match="the encoding of the training data is unknown"):
        run(capsys, path, tmp_path / "a.txt")
    with pytest.raises(ValueError, match=r"val_0\.bin holds token 499, but vocab_size=257"):
        run(capsys, path, tmp_path / "val_0.bin", "--encoding=bytes")


def test_other_validation_data_under_the_same_name_are_refused(tmp_path, capsys):
    path = write_run_on_own_tokens(tmp_path)
    write_shard(tmp_path / "val_0.bin", range(499, -1, -1))
    with pytest.raises(ValueError, match="no longer holds the validation data of the run"):
        run(capsys, path)


def test_a_text_is_read_as_pack_reads_it(tmp_path, capsys):
    """Ends of lines remain, and each line of a .jsonl file is a document."""
    path = write_uniform_model(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    (tmp_path / "b.jsonl").write_text('{"body": "one"}\n{"body": "two"}\n')
    names = [f"{tmp_path}/{name}" for name in ("a.txt", "b.jsonl")]
    table, _ = run(capsys, path, *names, "--text_field=body")
    assert [table[name][0] for name in names] == ["10", "7"]
    with pytest.raises(ValueError, match=r"b\.jsonl:1 cannot be read \(KeyError"):
        run(capsys, path, names[1])


@pytest.mark.parametrize(
    "name, error, sentence",
    [
        ("empty.txt", ValueError, "empty.txt has too few tokens"),
        ("none.txt", ValueError, "none.txt is no file"),
        ("large.bin", UserError, "large.bin holds token 300"),
    ],
)
def test_mistakes_are_found_before_the_first_row(
    name, error, sentence, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = write_uniform_model(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "a.txt").write_bytes(b"a")
    write_shard(tmp_path / "large.bin", [65, 300])
    with pytest.raises(error, match=sentence):
        run(capsys, path, "a.txt", name)
    assert "| a.txt" not in capsys.readouterr().out
