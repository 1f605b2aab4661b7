"""evaluate.py: every token counts exactly once, and the loss is that of training."""

import contextlib
import gzip
import json
import math
import re

import evaluate
import pack
import pytest
import torch
import weights
from conftest import run_tool, small_state, write_shard, write_weights

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
    training = train_gpt2.set_up(args, train_gpt2.StopRequest())
    training.model.load_state_dict(state["model"])
    exact = train_gpt2.evaluate(training)
    assert exact == pytest.approx(state["val_loss"], abs=1e-6)
    for path in trained_run, trained_run / "state_step0000000060.pt":  # a folder means model.pt
        table, output = run(capsys, path)
        assert table[args.val_files][:2] == [f"{args.val_tokens}", f"{exact:.4f}"]
        assert (f"the run logged val_loss:{exact:.4f}" in output) == (path == trained_run)


@torch.no_grad()
@pytest.mark.parametrize("size", [1, T - 1, T, T + 1, 5 * T + 3])
@pytest.mark.parametrize("stride", [T, 11, 1])
def test_each_token_counts_once_with_the_promised_context(
    trained_run, tmp_path, capsys, monkeypatch, size, stride
):
    """A text of several passes has the loss that is computed here token by token."""
    monkeypatch.setattr(evaluate, "TOKENS_PER_PASS", 3 * T)
    gpt, *_ = weights.load(trained_run / "model.pt")
    content = (b"larger than 7, def f(x): return x * 2\n" * size)[:size]
    (tmp_path / "a.txt").write_bytes(content)
    tokens, total = [256, *content], 0.0
    for i in range(1, len(tokens)):
        first = max(0, math.ceil((i - T) / stride)) * stride  # the first window that reaches it
        logits = gpt(torch.tensor([tokens[first:i]]))[0, -1].double()
        total -= logits.log_softmax(-1)[tokens[i]].item()
    table, _ = run(capsys, trained_run, tmp_path / "a.txt", f"--stride={stride}")
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
    table, _ = run(capsys, path, *names, "--stride=3")
    for name, tokens, size in zip(names, (8, 5, 1), (8, 3, None)):
        bits = f"{tokens * math.log2(257) / size:.4f}" if size else "n/a"
        assert table[name] == [f"{tokens}", f"{math.log(257):.4f}", "257", bits]


def test_gpt2_tokens_have_the_bytes_of_their_text(gpt2_vocabulary, tmp_path, capsys):
    path = write_uniform_model(tmp_path, vocab_size=50304)
    text = "The größte 🎈 <|endoftext|> said:\n\n    def  f(x)…" * 3
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    tokens = weights.encoding_of({"facts": {"encoding": None}}, Hyperparameters()).encode_ordinary(
        text
    )
    write_shard(tmp_path / "b.bin", [50256, *tokens, 50256])
    table, _ = run(capsys, path, tmp_path / "a.txt", tmp_path / "b.bin")
    for name, count in ("a.txt", len(tokens)), ("b.bin", len(tokens) + 1):
        bits = count * math.log2(50304) / len(text.encode())
        expected = [f"{count}", f"{math.log(50304):.4f}", "50304", f"{bits:.4f}"]
        assert table[f"{tmp_path}/{name}"] == expected


def test_texts_are_read_as_by_pack(tmp_path, capsys):
    """The documents of a folder count as in the shard that pack.py writes."""
    path = write_uniform_model(tmp_path)
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"body": "One;two"}\n{"body": "three"}\n')
    (folder / "b.txt.gz").write_bytes(gzip.compress(b"\xef\xbb\xbffour; five"))
    options = ["--text_field=body", "--split_at=;"]
    pack.main([str(folder), "--out", str(tmp_path / "out"), "--val_fraction=0", *options])
    shard = tmp_path / "out" / "train_000001.bin"
    table, _ = run(capsys, path, folder, shard, *options)
    assert table[str(folder)] == table[str(shard)] and table[str(shard)][0] == "23"


def test_shards_of_another_encoding_are_rejected(tmp_path, capsys):
    """Their manifest tells. The model's encoding, bytes, has as many ids."""
    tmp_path /= "[v1]"
    path = write_uniform_model(tmp_path)
    write_shard(tmp_path / "a.bin", range(9))
    for name, allowed in ("bytes", True), ("letters", False):
        (tmp_path / "manifest.json").write_text(json.dumps({"encoding": name}))
        expected = contextlib.nullcontext() if allowed else pytest.raises(UserError, match=name)
        with expected:
            run(capsys, path, tmp_path / "a.bin")


def test_other_validation_tokens_than_those_of_the_run_are_refused(plain_run, tmp_path, capsys):
    state = train_gpt2.read_pt(plain_run / "model.pt")
    state["hyperparameters"]["val_files"] = f"{tmp_path}/val_*.bin"
    path = write_weights(tmp_path / "model.pt", state)
    for shard in plain_run.parents[1].glob("val_*.bin"):
        (tmp_path / shard.name).write_bytes(shard.read_bytes())
    run(capsys, path)
    write_shard(tmp_path / "val_1.bin", range(200))
    with pytest.raises(UserError, match="differs from the data that the run was validated on"):
        run(capsys, path)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["empty.txt"], "empty.txt has too few tokens"),
        (["latin.txt"], r"latin\.txt:1 cannot be read .* give text in UTF-8"),
        (["none.txt"], r"none\.txt is neither a file nor a folder"),
        (["cut.bin"], r"cut\.bin is not a complete shard"),
        (["large.bin"], r"large\.bin holds token 300"),
        (["--stride=0"], "--stride=0"),
        (["--stride=17"], "--stride=17"),
        (["--encoding=gpt7"], "gpt7"),
        (["--device=cuda"], "GPU 0 is not available"),
    ],
)
def test_mistakes_are_one_sentence(arguments, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    path = write_uniform_model(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes("größer".encode("latin-1"))
    (tmp_path / "a.txt").write_bytes(b"a")
    (tmp_path / "cut.bin").write_bytes((20240520).to_bytes(4, "little") + bytes(900))
    write_shard(tmp_path / "large.bin", [65, 300])
    with pytest.raises(ValueError, match=sentence) as refused:
        run(capsys, path, "a.txt", *arguments)
    assert "\n" not in str(refused.value) and "| a.txt" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--split_at=x"], "--split_at has no effect without a TEXT"),
        (["--text_field=x"], "--text_field has no effect without a TEXT"),
    ],
)
def test_options_without_effect_are_refused(arguments, sentence, plain_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(ValueError, match=sentence):
        evaluate.main([*arguments, f"--weights={plain_run}"])


def test_a_shard_may_lie_in_a_folder_with_the_characters_of_a_pattern(plain_run, tmp_path, capsys):
    shard = write_shard(tmp_path / "[v1]*" / "s[0].bin", [256, 97, 98, 99])
    evaluate.main([str(shard), f"--weights={plain_run}"])
    assert f"| {shard} | 3 |" in capsys.readouterr().out


def test_the_command_reads_standard_input(plain_run):
    arguments = "-", "--device=cpu", f"--weights={plain_run}"
    done = run_tool("evaluate.py", *arguments, input="def f7(x):")
    assert done.returncode == 0 and "| - | 10 | " in done.stdout
