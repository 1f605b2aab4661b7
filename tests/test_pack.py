"""data/pack.py packs text into complete sets of shards, which data/shards.py verifies."""

import contextlib
import errno
import fcntl
import gzip
import hashlib
import itertools
import json
import lzma
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pack
import pytest
import shards
import tiktoken
from conftest import ROOT, SHARED_DATA
from shards import shard_size, verify

import train_gpt2

BOOKS = SHARED_DATA / "books" / "books.jsonl.xz"
TEXTS = [f"{i}: naïve €\nprint('😀')\r\n" * (1 + i % 7) for i in range(300)]


@pytest.fixture(autouse=True)
def vocabulary(monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED_DATA / "tiktoken_cache"))


def packed(out, *arguments):
    """Pack into out; return the manifest."""
    pack.main([*map(str, arguments), "--out", str(out)])
    return verify(out)


def refusal(out, *arguments):
    """Return the one-line error message of a pack into out."""
    with pytest.raises(SystemExit) as error:
        pack.main([*map(str, arguments), "--out", str(out)])
    sentence = error.value.code
    assert sentence.startswith("data/pack.py: ") and "\n" not in sentence
    return sentence


def shard_tokens(folder, split):
    paths = sorted(folder.glob(f"{split}_*.bin"))
    return np.concatenate([np.fromfile(path, np.uint16, offset=1024) for path in paths])


def split_documents(folder, split):
    """Return the documents of a split in order, as bytes."""
    tokens = shard_tokens(folder, split)
    starts = [*np.flatnonzero(tokens == 256), len(tokens)]
    return [bytes(tokens[a + 1 : b].tolist()) for a, b in itertools.pairwise(starts)]


def is_held_out(name, fraction):
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) < fraction * 2**32


def all_files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


# ---- Tokens, splits and formats ------------------------------------------------------------------
def test_bytes_are_packed_in_path_order_and_held_out_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(pack, "SHARD_TOKENS", 1000)
    texts = {f"d{i % 3}/f{i}.py": f"{i} {text}" for i, text in enumerate(TEXTS[:40])}
    source, out = tmp_path / "source", tmp_path / "out"
    for name, text in {**texts, "version.py": "no", "note.txt": "no", "empty.py": ""}.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    choice = ["--pattern", "*.py", "--exclude", "version.py", "--val_fraction", 0.3, "--skip_bad"]
    manifest = packed(out, source, *choice)
    expected = {"train": [], "val": []}
    for name in sorted(texts):
        split = "val" if is_held_out(name, 0.3) else "train"
        expected[split].append(texts[name].encode())
    for split, documents in expected.items():
        assert split_documents(out, split) == documents and documents
        assert manifest[split]["tokens"] == len(shard_tokens(out, split))
    assert shard_size(out / "train_000001.bin") == 1000
    assert manifest["skipped"] == ["empty.py:1 is empty"] and manifest["vocab_size"] == 257
    assert {path.suffix for path in out.iterdir()} == {".bin", ".json"}


@pytest.mark.skipif(not BOOKS.exists(), reason="the corpus is not beside this clone")
def test_books_equal_an_independent_tokenization(tmp_path, monkeypatch):
    monkeypatch.setattr(pack, "SHARD_TOKENS", 1_000_000)
    packed(tmp_path / "out", BOOKS, "--encoding", "gpt2", "--val_fraction", 0)
    encoding, expected = tiktoken.get_encoding("gpt2"), []
    for line in lzma.open(BOOKS, "rt", encoding="utf-8"):
        text = json.loads(line)["text"]
        expected += [50256, *encoding.encode(text, disallowed_special=())]
    assert shard_tokens(tmp_path / "out", "train").tolist() == expected


@pytest.mark.parametrize("texts, fraction", [(1, 0.25), (2, 0.1), (10, 0.1), (11, 0.3)])
def test_the_end_of_few_documents_is_held_out(tmp_path, monkeypatch, texts, fraction):
    """Of 11 documents, whole ones are held out."""
    monkeypatch.setattr(pack, "SHARD_TOKENS", 7001)
    names = [tmp_path / f"{i}.txt" for i in range(texts)]
    for i, name in enumerate(names):
        name.write_text(f"{i % 10} is a text, " * 2000)
    packed(tmp_path / "out", *names, "--val_fraction", fraction)
    train, val = (shard_tokens(tmp_path / "out", split) for split in ("train", "val"))
    stream = [token for name in names for token in [256, *name.read_bytes()]]
    assert ([*train, *val] == stream) == (texts <= 10)
    assert len(val) == (fraction * 26_000 * texts if texts <= 10 else 26_001 * 2)


@pytest.mark.parametrize("form", [".gz", ".xz", ".parquet"])
def test_every_format_gives_the_same_documents(tmp_path, form):
    """The text of a line or row decides whether it is held out."""
    lines = write_lines(tmp_path / "a.jsonl", TEXTS)
    expected = packed(tmp_path / "out", tmp_path)
    assert packed(tmp_path / "out", tmp_path) == expected  # it does not read its own output
    for split, held_out in ("train", False), ("val", True):
        texts = [text.encode() for text in TEXTS if is_held_out(text, 0.1) == held_out]
        assert split_documents(tmp_path / "out", split) == texts
    path = tmp_path / f"b.jsonl{form}"
    if form == ".parquet":
        pyarrow, parquet = (pytest.importorskip(f"pyarrow{name}") for name in ("", ".parquet"))
        path = tmp_path / "b.parquet"
        parquet.write_table(pyarrow.table({"id": range(300), "text": TEXTS}), path)
    else:
        compress = {".gz": gzip.compress, ".xz": lzma.compress}[form]
        path.write_bytes(compress(lines.read_bytes()))
    assert packed(tmp_path / "again", path)["shards"] == expected["shards"]


def test_a_folder_is_read_without_hidden_files_and_files_of_runs(tmp_path, capsys):
    """Named explicitly, they are read. Folders may have characters of a glob in their names."""
    assert train_gpt2.LOG_TITLE.encode() == pack.LOG_TITLE
    source, out = tmp_path / "[v1]", tmp_path / "[v2]"
    log = f"{train_gpt2.LOG_TITLE}, run_id=a"
    others = {".env": "", ".git/config": "", "logs/a.txt": log, "logs/a/model.pt": "PK\3\4"}
    for name, text in {"a.txt": "text", "b/c.txt": "code", **others}.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    manifest = packed(out, source, "--val_fraction", 0)
    assert split_documents(out, "train") == [b"text", b"code"]
    left_out = {str(source / name) for name in (".env", ".git", "logs/a.txt", "logs/a/model.pt")}
    assert set(manifest["left_out"]) == left_out and "left out: 4 " in capsys.readouterr().out
    packed(out, source / "logs" / "a.txt", "--val_fraction", 0)
    assert split_documents(out, "train") == [log.encode()]
    assert "(left out: [" in refusal(out, source / "logs")


def test_literal_end_of_text_tokens_are_counted_or_split_documents(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("\ufeffOne.\n<|endoftext|>\n Two.\r\n<|endoftext|>\n")
    assert packed(tmp_path / "out", tmp_path / "a.txt")["documents"] == 1
    assert "<|endoftext|> 2 times" in capsys.readouterr().out
    choice = ["--split_at", "<|endoftext|>", "--val_fraction", 0]
    packed(tmp_path / "out", tmp_path / "a.txt", *choice)
    assert split_documents(tmp_path / "out", "train") == [b"One.", b"Two."]
    assert "<|endoftext|>" not in capsys.readouterr().out


@pytest.mark.parametrize("missing", ["", "tqdm", "tiktoken"])
def test_the_command_needs_no_search_path_and_names_missing_packages(tmp_path, missing):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules['{missing}'] = None\n")
    command = [sys.executable, ROOT / "data" / "pack.py", tmp_path / "a.txt", "--out", tmp_path]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    fix = f"{missing} is not installed: {sys.executable} -m pip install {missing}\n"
    assert done.stderr == (f"data/pack.py: {fix}" if missing else "")


# ---- Bad input -----------------------------------------------------------------------------------
GOOD = b'{"text": "x"}\n'
NOT_JSON = "has no string field 'text' (see --text_field), or is not JSON in UTF-8"
LINES = "Größe — Wörter\n" * 20
UNREADABLE = "cannot be read further"
BAD = {  # name of the file, its content, the message
    "invalid UTF-8": ("a.txt", b"two \xff three", "a.txt:1 is not text in UTF-8 (it begin"),
    "UTF-16": ("a.txt", LINES.encode("utf-16"), "a.txt:1 is not text in UTF-8"),
    "an image": ("a.gz", gzip.compress(b"\x89PNG"), "a.gz:1 is not text in UTF-8"),
    "NUL": ("a.txt", b"text\0text", "a.txt:1 contains a NUL character"),
    "NUL in a line": ("b.jsonl", b'{"text": "\\u0000"}\n', "b.jsonl:1 contains a NUL character"),
    "JSON": ("a.json.xz", lzma.compress(b"{}"), "a.json.xz:1 is .json: convert it to .jsonl, or"),
    "CSV": ("a.CSV", b"text\n", "a.CSV:1 is .csv: convert it to .jsonl, or rename it to .txt"),
    "invalid UTF-8 in a line": ("b.jsonl", GOOD + b'\n"\xff"\n', f"b.jsonl:3 {NOT_JSON}"),
    "broken JSON": ("b.jsonl", GOOD * 3 + b"{oops\n" + GOOD, f"b.jsonl:4 {NOT_JSON}"),
    "JSON too deep": ("b.jsonl", GOOD + b"[" * 100000 + b"\n", f"b.jsonl:2 {NOT_JSON}"),
    "no object": ("b.jsonl", GOOD + b'["text"]\n', f"b.jsonl:2 {NOT_JSON}"),
    "missing field": ("b.jsonl", GOOD + b'{"body": "x"}\n', f"b.jsonl:2 {NOT_JSON}"),
    "no text": ("b.jsonl", GOOD + b'{"text": 5}\n', f"b.jsonl:2 {NOT_JSON}"),
    "surrogate": ("b.jsonl", b'{"text": "\\ud800"}\n', "b.jsonl:1 contains an unpaired surrogate"),
    "empty document": ("b.jsonl", GOOD + b'{"text": ""}\n', "b.jsonl:2 is empty"),
    "empty file": ("a.txt", b"", "a.txt:1 is empty"),
    "cut off gzip": ("b.jsonl.gz", gzip.compress(GOOD * 9)[:-9], f"b.jsonl.gz:10 {UNREADABLE}"),
    "cut off xz": ("a.txt.xz", lzma.compress(b"x" * 999)[:-9], f"a.txt.xz:1 {UNREADABLE}"),
    "broken link": ("a.txt", None, f"a.txt:1 {UNREADABLE}"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_named_and_fatal_or_skipped(tmp_path, bad):
    name, content, sentence = BAD[bad]
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    if content is None:
        (source / name).symlink_to("nowhere")
    else:
        (source / name).write_bytes(content)
    (source / "z.txt").write_bytes(b"good")
    refused = refusal(out, source, "--val_fraction", 0)
    assert sentence in refused and "--skip_bad, or for a folder --pattern" in refused
    assert ("--text_field" in refused) == (NOT_JSON in sentence)
    assert not all_files(out)
    manifest = packed(out, source, "--val_fraction", 0, "--skip_bad")
    assert manifest["skipped"][0].startswith(sentence)
    documents = split_documents(out, "train")
    assert documents[-1] == b"good" and set(documents[:-1]) <= {b"x"}
    if name == "b.jsonl" and content.startswith(GOOD):
        assert len(documents) == 1 + content.count(GOOD)


def test_a_text_that_tiktoken_cannot_encode_is_a_fault(tmp_path, monkeypatch):
    class Panic(BaseException):
        """Like a PanicException of Rust, this is no Exception."""

    def encode(text, **_):
        if "bad" in text:
            raise Panic("Regex error\nin detail")
        return np.array([65])

    monkeypatch.setattr(
        pack,
        "get_encoding",
        lambda _: SimpleNamespace(encode_to_numpy=encode, eot_token=256, n_vocab=257),
    )
    for name in "a", "bad", "c":
        (tmp_path / name).write_text(name)
    fault = "bad:1 cannot be tokenized (Regex error)"
    assert fault in refusal(tmp_path / "out", tmp_path)
    manifest = packed(tmp_path / "out", tmp_path, "--skip_bad")
    assert manifest["documents"] == 2 and manifest["skipped"][0].startswith(fault)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("a.txt", "--val_fraction", 2), "--val_fraction=2.0 must be at least 0 and less"),
        (("a.txt", "--val_fraction", 1), "--val_fraction=1.0 must be at least 0 and less"),
        (
            ("a.txt", "--encoding", "klingon"),
            "tiktoken has no encoding klingon: give bytes, gpt2 or gpt2-2048",
        ),
        (
            ("a.txt", "--encoding", "cl100k_base"),
            "100277 ids, but shards only hold 65536: give bytes",
        ),
        (("nothing",), "nothing is neither a file nor a folder"),
        ((".", "--pattern", "*.py"), "no file matches '*.py'"),
        (("out",), "is an input, too"),
        (("a.jsonl",), "no text in a.jsonl"),
        (("a.parquet",), f"{sys.executable} -m pip install pyarrow"),
        (("a.txt", "--split_at", ""), "--split_at is empty: give a separator"),
        (("pipe",), "pipe is not a regular file"),
    ],
)
def test_mistakes_are_refused(tmp_path, monkeypatch, arguments, sentence):
    if "cl100k_base" in arguments:  # its vocabulary may not be on this machine
        large = SimpleNamespace(n_vocab=100277)
        monkeypatch.setattr(tiktoken, "get_encoding", lambda name: large)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    for name, content in ("a.txt", "text"), ("a.jsonl", "\n"), ("a.parquet", "x"), ("out/b", "b"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert sentence in refusal("out", *arguments)
    assert all_files(tmp_path / "out") == {"b": b"b"}


def test_links_to_folders_and_pipes_are_counted_as_left_out(tmp_path, capsys):
    """Also if the pattern would not match the name of the link, since it may match files in it."""
    source = tmp_path / "source"
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "b.txt").write_text("b")
    source.mkdir()
    (source / "a.txt").write_text("a")
    (source / "link").symlink_to(tmp_path / "target")
    (source / "file.txt").symlink_to(tmp_path / "target" / "b.txt")  # is read
    os.mkfifo(source / "pipe.txt")
    manifest = packed(tmp_path / "out", source, "--pattern", "*.txt")
    assert manifest["documents"] == 2
    assert manifest["left_out"] == [str(source / "link"), str(source / "pipe.txt")]
    assert "left out: 2 (hidden, a link to a folder," in capsys.readouterr().out


def test_standard_input_is_packed_as_one_document(tmp_path):
    command = [sys.executable, ROOT / "data" / "pack.py", "-", "--out", tmp_path / "out"]
    done = subprocess.run(command, input=b"some text", capture_output=True)
    assert done.returncode == 0 and b"10.0% of all" in done.stdout, done
    assert split_documents(tmp_path / "out", "train") == [b"some tex"]


def test_a_message_has_one_line_even_if_a_name_has_two(tmp_path):
    (tmp_path / "a\nb.jsonl").write_text("{}\n")
    assert "a b.jsonl:1 has no string field" in refusal(tmp_path / "out", tmp_path / "a\nb.jsonl")


# ---- The fraction that is held out ---------------------------------------------------------------
def held_out_fraction(lengths, fraction, names=None):
    """Return (held-out fraction of the tokens, the held-out documents, the two splits)."""
    lengths = np.array(lengths)
    names = names or [f"{i}" for i in range(len(lengths))]
    hashes = [int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) for name in names]
    train, val = pack.choose(lengths, np.array(hashes), fraction)
    tokens = sum(end - start for start, end in val)
    assert tokens + sum(end - start for start, end in train) == lengths.sum()
    starts = dict(zip(np.cumsum(lengths) - lengths, names))
    return tokens / lengths.sum(), {starts.get(start) for start, _ in val}


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", ["equal", "lognormal", "one large", "few"])
def test_close_to_the_fraction_of_the_tokens_is_held_out(kind, seed, fraction):
    generator = np.random.default_rng(seed)
    lengths = {
        "equal": np.full(400, 50),
        "lognormal": np.exp(generator.normal(5, 2, 300)).astype(int) + 1,
        "one large": np.append(generator.integers(1, 1000, 200), 200_000),
        "few": generator.integers(1, 10_000, 11),
    }[kind]
    names = [f"{seed}/{i}" for i in range(len(lengths))]
    found, _ = held_out_fraction(lengths, fraction, names)
    assert fraction / 2 <= found <= 2 * fraction or abs(found - fraction) * lengths.sum() <= 400


@pytest.mark.parametrize("large", range(30))
def test_a_large_file_among_small_ones_does_not_decide_the_fraction(large):
    """Its name may hash to either split."""
    lengths = [100 + i for i in range(60)] + [200_000]
    names = [f"{i}" for i in range(60)] + [f"large{large}"]
    found, held_out = held_out_fraction(lengths, 0.1, names)
    assert 0.05 <= found <= 0.2
    again = held_out_fraction(lengths, 0.1, names)
    assert again == (found, held_out)


def test_with_hash_only_sizes_do_not_count():
    """Then added documents never move others; the data of the CPU record are packed so."""
    hashes = np.arange(100) * (2**32 // 100 + 1)
    lengths = np.full(100, 10)
    lengths[0] = 100_000
    train, val = pack.choose(lengths, hashes, 0.1, hash_only=True)
    assert len(val) == 10 and val[0].tolist() == [0, 100_000] and len(train) == 90
    train, val = pack.choose(lengths, hashes, 0.1)
    [[start, end]] = val.tolist()  # all other documents together are too few
    assert end == 100_990 and (end - start) / end == pytest.approx(0.1, abs=1e-3)


def test_added_documents_do_not_move_others_where_sizes_are_similar():
    lengths = np.random.default_rng(0).integers(500, 1500, 2000).tolist()
    names = [f"{i}" for i in range(2000)]
    _, before = held_out_fraction(lengths[:1000], 0.1, names[:1000])
    _, after = held_out_fraction(lengths, 0.1, names)
    assert before == {name for name in after if int(name) < 1000}


# ---- What is in the folder already --------------------------------------------------------------
def test_a_file_system_without_locks_or_space_is_explained(tmp_path, monkeypatch, capsys):
    lines = write_lines(tmp_path / "a.jsonl", TEXTS)
    error = OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=error))
    packed(tmp_path / "out", lines)
    assert "out is not locked (No locks available): start only one" in capsys.readouterr().out
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(pack, "write_split", Mock(side_effect=full))
    assert "out has no space for the tokens" in refusal(tmp_path / "out", lines)


def test_fault_4_and_7_a_pack_that_fails_changes_nothing(tmp_path):
    lines = write_lines(tmp_path / "a.jsonl", TEXTS)
    packed(tmp_path / "out", lines)
    (tmp_path / "b.txt").write_bytes(b"\xff")
    before = all_files(tmp_path / "out")
    assert "b.txt:1" in refusal(tmp_path / "out", lines, tmp_path / "b.txt")
    with pack.locked(tmp_path / "out"):
        assert "another pack.py is writing to" in refusal(tmp_path / "out", lines)
    assert all_files(tmp_path / "out") == before
    (tmp_path / "out" / "train_000007.bin").write_bytes(b"somebody's")
    assert "['train_000007.bin'], not from pack.py" in refusal(tmp_path / "out", lines)
    assert all_files(tmp_path / "out") == before | {"train_000007.bin": b"somebody's"}


class Kill(BaseException):
    """Simulates SIGKILL: after `calls` changes of a folder, every further one raises this."""

    def __init__(self, calls):
        self.calls = calls

    def before(self, function):
        def call(*args, **kwargs):
            if self.calls == 0:
                raise self
            self.calls -= 1
            return function(*args, **kwargs)

        return call


@pytest.mark.parametrize("replaces", [False, True])
def test_fault_7_after_a_kill_a_folder_is_complete_or_marked(tmp_path, monkeypatch, replaces):
    old = write_lines(tmp_path / "old.jsonl", [f"{i}, an old text" for i in range(300)])
    new = write_lines(tmp_path / "new.jsonl", [f"{i}, a new text" for i in range(200)])
    monkeypatch.setattr(pack, "SHARD_TOKENS", 1000)
    whole, out, incomplete, complete = tmp_path / "whole", tmp_path / "out", 0, 0
    packed(whole, old)
    before = all_files(whole) if replaces else {}
    packed(whole, new)
    expected = all_files(whole)
    for calls in itertools.count():
        out.mkdir()
        for name, content in before.items():
            (out / name).write_bytes(content)
        kill = Kill(calls)
        with monkeypatch.context() as patch, contextlib.suppress(Kill):
            for name in "mkdir", "rename", "replace", "rmdir", "unlink":
                patch.setattr(os, name, kill.before(getattr(os, name)))
            pack.main([str(new), "--out", str(out)])
            break
        if (out / ".pack").exists():
            incomplete += 1
        elif list(out.glob("*.bin")):
            complete += 1
            verify(out)
        packed(out, new)
        assert all_files(out) == expected  # also: no .pack
        shutil.rmtree(out)
    assert incomplete > len(expected) and complete > 0


def test_an_interrupt_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch, capfd):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(pack, "choose", interrupt)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(SystemExit) as error:
        pack.main([str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")])
    assert error.value.code == 130 and not all_files(tmp_path / "out")
    assert capfd.readouterr().err == "data/pack.py: stopped; run the same command to start over\n"


# ---- data/shards.py ------------------------------------------------------------------------------
def manifest_of(sums):
    splits = {"train": {"sha256": sums}, "val": {"sha256": {}}}
    return json.dumps({"encoding": "bytes", **splits})


SUMS = [None, "abc", {"../a.bin": "0" * 64}]
MANIFESTS = ["[]", "{}", "null", "no json", "[" * 100_000, *map(manifest_of, SUMS)]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=range(len(MANIFESTS)))
def test_fault_14_a_damaged_manifest_is_refused(tmp_path, manifest):
    out = tmp_path / "out"
    out.mkdir()
    (out / "manifest.json").write_text(manifest)
    (tmp_path / "a.txt").write_text("some text")
    assert "manifest.json is damaged" in refusal(out, tmp_path / "a.txt")
    assert (out / "manifest.json").read_text() == manifest


def flip(shard):
    """Return a shard with one bit of a token flipped."""
    return shard[:1030] + bytes([shard[1030] ^ 1]) + shard[1031:]


CHANGES = {  # the file to change, a function from a shard to its new content, the message
    "a token": ("train_000001.bin", flip, "has sha256 .* instead of"),
    "cut off": ("val_000000.bin", lambda shard: shard[:-2], "val_000000.bin is damaged, or"),
    "missing": ("train_000002.bin", lambda shard: None, "cannot read .*train_000002.bin"),
    "unlisted": ("train_000009.bin", flip, "is not listed in "),
    "no manifest": ("manifest.json", lambda shard: None, "manifest.json does not exist"),
    "unfinished": (".pack", lambda shard: b"", "is incomplete"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_fault_14_the_command_finds_damage_in_a_packed_folder(tmp_path, monkeypatch, change):
    monkeypatch.setattr(pack, "SHARD_TOKENS", 20_000)
    out = tmp_path / "out"
    packed(out, write_lines(tmp_path / "a.jsonl", TEXTS))
    name, content_from, sentence = CHANGES[change]
    source = out / name if (out / name).exists() else out / "train_000001.bin"
    content = content_from(source.read_bytes())
    (out / name).unlink(missing_ok=True)
    if content is not None:
        (out / name).write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["shards.py", str(out)])
    with pytest.raises(SystemExit, match=f"data/shards.py: .*{sentence}"):
        shards.main()


# ---- GPT-2's encoding cut to its first tokens, and shards as input ------------------------------
needs_gpt2 = pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="GPT-2's vocabulary is missing")


@needs_gpt2
@pytest.mark.parametrize("size", [257, 300, 2048, 50256])
def test_a_cut_encoding_merges_like_gpt2s_up_to_its_size(size):
    """It is a byte-pair encoding: applying GPT-2's first merges in order gives the same tokens."""
    encoding, gpt2 = pack.get_encoding(f"gpt2-{size}"), tiktoken.get_encoding("gpt2")
    assert (encoding.n_vocab, encoding.eot_token) == (size + 1, size)
    ranks = gpt2._mergeable_ranks
    for text in " The theory of 1905, naïve €😀", "in\n\n  there", TEXTS[5]:
        tokens = encoding.encode_ordinary(text)
        assert encoding.decode(tokens) == text and max(tokens) < size
        expected = []
        for token in gpt2.encode_ordinary(text):
            parts = [bytes([byte]) for byte in gpt2.decode_single_token_bytes(token)]
            while True:
                pairs = [ranks.get(a + b, size) for a, b in itertools.pairwise(parts)]
                if not pairs or min(pairs) >= size:
                    break
                at = pairs.index(min(pairs))
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
            expected += [ranks[part] for part in parts]
        # A merge may also join parts of two of GPT-2's tokens, so the cut encoding has no more.
        assert len(tokens) <= len(expected)
        assert b"".join(map(encoding.decode_single_token_bytes, expected)) == text.encode()


@needs_gpt2
@pytest.mark.parametrize("name", ["gpt2-256", "gpt2-50257", "gpt2-0", "gpt2-x"])
def test_a_size_without_an_encoding_is_refused(name, tmp_path):
    (tmp_path / "a.txt").write_text("a text")
    sentence = refusal(tmp_path / "out", tmp_path / "a.txt", "--encoding", name)
    wanted = "tiktoken has no encoding" if name == "gpt2-x" else "between 257 and 50256"
    assert wanted in sentence and name in sentence


@needs_gpt2
def test_a_shard_of_gpt2s_tokens_is_packed_as_its_texts(tmp_path):
    """Such as FineWeb's, plain or compressed."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i, text in enumerate(TEXTS[:40]):
        (folder / f"{i:03d}.txt").write_bytes(text.encode())
    packed(tmp_path / "gpt2", folder, "--encoding", "gpt2", "--val_fraction", "0.2")
    shard = tmp_path / "gpt2" / "train_000001.bin"
    compressed = tmp_path / "shard.bin.xz"
    compressed.write_bytes(lzma.compress(shard.read_bytes()))
    for number, path in enumerate((shard, compressed)):
        out = tmp_path / f"again{number}"
        manifest = packed(out, path, "--encoding", "gpt2-2048", "--val_fraction", "0.2")
        assert (manifest["encoding"], manifest["vocab_size"]) == ("gpt2-2048", 2049)
        encoding = pack.get_encoding("gpt2-2048")
        tokens = np.concatenate([shard_tokens(out, "train"), shard_tokens(out, "val")])
        texts = encoding.decode(tokens.tolist()).split("<|endoftext|>")
        gpt2 = tiktoken.get_encoding("gpt2")
        expected = gpt2.decode(shard_tokens(tmp_path / "gpt2", "train").tolist())
        assert sorted(texts) == sorted(expected.split("<|endoftext|>"))
    data = shard.read_bytes()
    for content, wanted in (data[:-2], "complete shard"), (data[:-2] + b"\xff\xff", "token 65535"):
        (tmp_path / "bad.bin").write_bytes(content)
        sentence = refusal(tmp_path / "out", tmp_path / "bad.bin", "--encoding", "bytes")
        assert wanted in sentence


def test_a_shard_of_bytes_is_read_by_the_manifest_beside_it(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("One text.\n" * 50)
    packed(tmp_path / "bytes", text)
    packed(tmp_path / "again", tmp_path / "bytes" / "train_000001.bin")
    parts = [shard_tokens(tmp_path / "again", split) for split in ("train", "val")]
    found, expected = np.concatenate(parts), shard_tokens(tmp_path / "bytes", "train")
    assert np.array_equal(found[found < 256], expected[expected < 256])
