"""data/pack.py packs text into complete sets of shards."""

import contextlib
import errno
import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import tracemalloc
from unittest.mock import Mock

import numpy as np
import pack
import pytest
import regex  # tiktoken needs it, too
import tiktoken
from conftest import ROOT

TEXTS = [f"{i}: naïve €\nprint('😀')\r\n" * (1 + i % 7) for i in range(300)]


def packed(out, *arguments):
    """Pack into out; return the manifest, whose shards are those in out."""
    pack.main([*map(str, arguments), "--out", str(out)])
    manifest = json.loads((out / "manifest.json").read_text())
    sums = manifest["train"]["sha256"] | manifest["val"]["sha256"]
    shards = {path.name: path.read_bytes() for path in out.glob("*.bin")}
    assert sums == {name: hashlib.sha256(shard).hexdigest() for name, shard in shards.items()}
    return manifest


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
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


# ---- Tokens, splits and formats ------------------------------------------------------------------
@pytest.mark.parametrize("by_name", [False, True])
def test_a_folder_is_packed_in_path_order_and_held_out(by_name, tmp_path, monkeypatch):
    """Without hidden files, excluded ones, empty ones, links to folders, and its own output."""
    monkeypatch.setattr(pack, "SHARD_TOKENS", 1000)
    texts = {f"d{i % 3}/f{i}.py": f"{i} {text}" for i, text in enumerate(TEXTS[:40])}
    source, out = tmp_path / "[v1]", tmp_path / "[v1]" / "out"
    others = ["version.py", "note.txt", ".hidden.py", ".git/a.py", "d1/.b/c.py", "out/z.py"]
    others += ["drafts/a.py", "drafts/new/b.py"]
    for name, text in {**texts, **dict.fromkeys(others, "no"), "empty.py": ""}.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "linked.py").write_text("no")
    (source / "link").symlink_to(tmp_path / "target")
    choice = ["--pattern", "*.py", "--exclude", "version.py", "drafts", "--val_fraction", 0.3]
    choice += ["--by_name"] * by_name
    manifest = packed(out, source, *choice)
    expected = {"train": [], "val": []}
    for name in sorted(texts):
        split = "val" if is_held_out(name if by_name else texts[name], 0.3) else "train"
        expected[split].append(texts[name].encode())
    for split, documents in expected.items():
        assert split_documents(out, split) == documents and documents
        assert manifest[split]["tokens"] == len(shard_tokens(out, split))
    assert (out / "train_000001.bin").stat().st_size == 1024 + 2 * 1000
    assert (manifest["encoding"], manifest["vocab_size"]) == ("bytes", 257)


@pytest.mark.parametrize("texts, fraction", [(1, 0.25), (2, 0.1), (10, 0.1), (11, 0.3)])
def test_the_end_of_few_documents_is_held_out(tmp_path, monkeypatch, texts, fraction):
    """Of 11 documents, whole ones are held out, among them 0.txt and its copy, 10.txt."""
    monkeypatch.setattr(pack, "SHARD_TOKENS", 7001)
    names = [tmp_path / f"{i}.txt" for i in range(texts)]
    for i, name in enumerate(names):
        name.write_text(f"{i % 10} is a text, " * 2000)
    packed(tmp_path / "out", *names, "--val_fraction", fraction)
    train, val = (shard_tokens(tmp_path / "out", split) for split in ("train", "val"))
    stream = [token for name in names for token in [256, *name.read_bytes()]]
    assert ([*train, *val] == stream) == (texts <= 10)
    assert len(val) == (fraction * 26_000 * texts if texts <= 10 else 26_001 * 4)


@pytest.mark.parametrize("form", [".gz", ".xz", ".parquet"])
def test_every_format_gives_the_same_documents(tmp_path, form):
    """The text of a line or row decides whether it is held out."""
    lines = write_lines(tmp_path / "a.jsonl", TEXTS)
    expected = packed(tmp_path / "out", lines)
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
    assert packed(tmp_path / "again", path)["train"] == expected["train"]


def test_literal_end_of_text_tokens_are_counted_or_split_documents(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("\ufeffOne.\n<|endoftext|>\n Two.\r\n<|endoftext|>\n")
    assert packed(tmp_path / "out", tmp_path / "a.txt")["documents"] == 1
    assert "<|endoftext|> 2 times" in capsys.readouterr().out
    choice = ["--split_at", "<|endoftext|>", "--val_fraction", 0]
    packed(tmp_path / "out", tmp_path / "a.txt", *choice)
    assert split_documents(tmp_path / "out", "train") == [b"One.", b"Two."]
    assert "<|endoftext|>" not in capsys.readouterr().out


def test_standard_input_is_packed_as_one_document(tmp_path):
    command = [sys.executable, ROOT / "data" / "pack.py", "-", "--out", tmp_path / "out"]
    done = subprocess.run(command, input=b"some text", capture_output=True)
    assert done.returncode == 0 and b"10.0% of all" in done.stdout, done
    assert split_documents(tmp_path / "out", "train") == [b"some tex"]


def test_what_is_left_out_of_a_folder_is_counted(tmp_path, capsys):
    """Reading a named pipe would hang."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("text")
    (tmp_path / "in" / "link").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "in" / "pipe")
    assert packed(tmp_path / "out", tmp_path / "in")["documents"] == 1
    sentence = "left out 2 links to folders or special files, such as "
    assert f"{sentence}{tmp_path}/in/link\n" in capsys.readouterr().out


def test_a_large_document_takes_the_memory_that_the_docstring_says(tmp_path):
    (tmp_path / "a.txt").write_text("a large text\n" * 300_000)
    tracemalloc.start()
    manifest = packed(tmp_path / "out", tmp_path / "a.txt")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5 * (manifest["train"]["tokens"] + manifest["val"]["tokens"])


# ---- Mistakes ------------------------------------------------------------------------------------
GOOD = b'{"text": "x"}\n'
BAD = {  # name of the file, its content, the place of the fault
    "invalid UTF-8": ("a.txt", b"two \xff three", "a.txt"),
    "invalid UTF-8 in a line": ("b.jsonl", GOOD + b'\n"\xff"\n', "b.jsonl:3"),
    "broken JSON": ("b.jsonl", GOOD * 3 + b"{oops\n" + GOOD, "b.jsonl:4"),
    "no object": ("b.jsonl", GOOD + b'["text"]\n', "b.jsonl:2"),
    "missing field": ("b.jsonl", GOOD + b'{"body": "x"}\n', "b.jsonl:2"),
    "no text": ("b.jsonl", GOOD + b'{"text": 5}\n', "b.jsonl:2"),
    "surrogate": ("b.jsonl", b'{"text": "\\ud800"}\n', "b.jsonl:1"),
    "cut off gzip": ("b.jsonl.gz", gzip.compress(GOOD * 9, mtime=0)[:-9], "b.jsonl.gz:10"),
    "cut off xz": ("a.txt.xz", lzma.compress(b"x" * 999)[:-9], "a.txt.xz"),
    "not parquet": ("a.parquet", b"version https://git-lfs", "a.parquet:1"),
    "not a shard": ("a.bin", b"version https://git-lfs", "a.bin:1"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_text_that_cannot_be_read_is_named_and_fatal(tmp_path, bad):
    name, content, place = BAD[bad]
    (tmp_path / name).write_bytes(content)
    sentence = refusal(tmp_path / "out", tmp_path)
    assert f"{place} cannot be read (" in sentence
    names_field = bad in ("invalid UTF-8 in a line", "no object", "missing field", "no text")
    assert ("--text_field" in sentence) == (names_field or bad == "surrogate")
    assert not (tmp_path / "out").exists()


def tar_archive():
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.add(__file__)
    return content.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.tar", tar_archive(), "it has a zero byte"),
        ("a.tar.gz", gzip.compress(tar_archive(), mtime=0), "it has a zero byte"),
        ("a.txt", "UTF-16 without a mark".encode("utf-16-le"), "it has a zero byte"),
        ("a.jsonl.gz", gzip.compress(tar_archive(), mtime=0), "JSONDecodeError"),
        (
            "a.json.gz",
            gzip.compress(GOOD * 2, mtime=0),
            "it has JSON lines: read them from a file whose name ends",
        ),
        *((f"a{ending}", POINTER, "git lfs pull") for ending in (".parquet", ".xz", ".txt")),
        ("a.bin", np.array([20240801, 7, 9], "<i4").tobytes(), "but begins with [20240801, 7, 9]"),
        ("a.bin", np.array([20240520, 1, 0], "<i4").tobytes().ljust(1024, b"\0"), "is unknown"),
    ],
)
def test_what_is_no_text_is_not_packed_as_text(name, content, reason, tmp_path):
    (tmp_path / name).write_bytes(content)
    assert reason in refusal(tmp_path / "out", tmp_path / name)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("a.txt", "--encoding", "cl100k_base"), "no encoding cl100k_base: give bytes, gpt2, or"),
        (("a.txt", "--encoding", "gpt2-256"), "gpt2-N with N from 257 to 50256"),
        (("a.txt", "--encoding", "gpt2-50257"), "gpt2-N with N from 257 to 50256"),
        (("nothing",), "nothing is neither a file nor a folder"),
        (("two\nlines",), "two lines is neither a file nor a folder"),
        ((".", "--pattern", "*.py"), "that do not match '*.py'"),
        (("a.jsonl",), "no text in a.jsonl"),
        (("a.txt", "empty"), "no files to read in empty: "),
        (("a.txt", "--pattern", "*.txt"), "--pattern=*.txt selects files in folders"),
        ((".", "--exclude", "a.txt", "b.txt"), "--exclude ['b.txt']: give relative paths"),
        (("",), "an INPUT is empty: give a file"),
        (("a.txt", "--split_at", ""), "--split_at is empty: give a text"),
        (("a.txt", "--text_field", "body"), "--text_field is for .jsonl and .parquet files"),
        (("a.txt", "b.jsonl", "--by_name"), "--by_name holds out whole files: omit it"),
        (("a.txt", "--split_at", "x", "--by_name"), "--by_name holds out whole files: omit it"),
        (("a.txt", "--split_at", r"\n\n"), r"--split_at '\\n\\n' does not occur: give"),
    ],
)
def test_mistakes_are_refused(tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("text\n\ntext")
    (tmp_path / "a.jsonl").write_text("\n")
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n')
    assert sentence in refusal("out", *arguments)


def test_a_limit_of_processes_is_one_sentence(tmp_path, monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(threading.Thread, "start", fail)
    assert refusal(tmp_path / "out", tmp_path / "a.txt").endswith("can't start new thread")


@pytest.mark.parametrize("fraction", ["1", "-0.1"])
def test_a_fraction_is_less_than_one(fraction, tmp_path, capsys):
    with pytest.raises(SystemExit):
        pack.main(["a.txt", "--out", str(tmp_path), "--val_fraction", fraction])
    assert "must be at least 0 and less than 1" in capsys.readouterr().err


# ---- The fraction that is held out ---------------------------------------------------------------
def held_out_fraction(lengths, fraction, names, **options):
    """Return (held-out fraction of the tokens, names of the held-out documents).

    The tokens of a document are its number. Each is in one of the two splits.
    """
    hashes = np.array([pack.hash_of(name) for name in names], np.uint64)
    documents = [np.full(length, i, np.uint16) for i, length in enumerate(lengths)]
    train, val = pack.split(documents, hashes, fraction, **options)
    stream = np.concatenate(documents)
    assert np.array_equal(np.sort(np.concatenate([train, val])), stream)
    assert (np.diff(train.astype(int)) >= 0).all() and (np.diff(val.astype(int)) >= 0).all()
    return len(val) / len(stream), {names[i] for i in set(val.tolist())}


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", ["equal", "lognormal", "one large", "few"])
def test_close_to_the_fraction_of_the_tokens_is_held_out(kind, seed, fraction):
    """Also if there is a large document, whose name may hash to either split."""
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


def test_by_name_sizes_do_not_count():
    """Then added documents never move others; the data of the CPU benchmark are packed so."""
    names = [f"{i}" for i in range(100)]
    expected = {name for name in names if is_held_out(name, 0.1)}
    lengths = [100_000 if name == min(expected) else 10 for name in names]
    found, held_out = held_out_fraction(lengths, 0.1, names, any_size=True)
    assert found > 0.9 and held_out == expected
    found, _ = held_out_fraction(lengths, 0.1, names)
    assert found == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize("sizes", ["similar", "one large"])
def test_copies_are_on_one_side_in_any_order_of_the_documents(sizes):
    generator = np.random.default_rng(0)
    lengths = generator.integers(50, 150, 40)
    lengths[0] = 20_000 if sizes == "one large" else 100
    copies = np.repeat(np.arange(40), 3)
    expected = None
    for _ in range(5):
        names = [f"{i}" for i in copies]
        _, held_out = held_out_fraction(lengths[copies], 0.1, names)
        assert sum(name in held_out for name in names) == 3 * len(held_out)
        assert expected is None or held_out == expected
        expected = held_out
        copies = generator.permutation(copies)


def test_copies_are_counted_and_never_in_both_splits(tmp_path, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(20):
        for name in f"ch{i:02}.txt", f"ch{i:02} (1).txt":
            (folder / name).write_text(TEXTS[i])
    assert packed(tmp_path / "out", folder)["copies"] == 20
    assert "40 documents in bytes, 20 copies" in capsys.readouterr().out
    train, val = (set(split_documents(tmp_path / "out", split)) for split in ("train", "val"))
    assert train and val and not train & val
    packed(tmp_path / "few", folder, "--pattern", "ch00*")
    assert "the end of the text is held out, which may be a copy" in capsys.readouterr().out


# ---- What is in the folder already ---------------------------------------------------------------
def test_a_pack_that_fails_changes_nothing(tmp_path):
    lines, out = write_lines(tmp_path / "a.jsonl", TEXTS), tmp_path / "out"
    packed(out, lines)
    (tmp_path / "b.txt").write_bytes(b"\xff")
    before = all_files(out)
    assert "b.txt cannot be read" in refusal(out, lines, tmp_path / "b.txt")
    assert all_files(out) == before and not (out / ".pack").exists()
    stranger = out / "train_000009.bin"
    stranger.write_bytes(b"mine")
    refused = f"holds shards that pack.py did not write, such as {stranger.name}"
    assert refused in refusal(out, lines) and stranger.read_bytes() == b"mine"
    stranger.unlink()
    for manifest in '{"encoding": "bytes"}', "[]", "{":  # a user may write the first by hand
        (out / "manifest.json").write_text(manifest)
        assert "holds shards that pack.py did not write" in refusal(out, lines)
    (out / "manifest.json").unlink()
    assert "holds shards that pack.py did not write" in refusal(out, lines)
    assert all_files(out).items() < before.items()


def test_a_manifest_of_another_program_is_kept(tmp_path):
    (tmp_path / "manifest.json").write_text('{"name": "app"}')
    lines = write_lines(tmp_path / "a.jsonl", TEXTS)
    assert "manifest.json was not written by pack.py: change --out" in refusal(tmp_path, lines)
    assert (tmp_path / "manifest.json").read_text() == '{"name": "app"}'


def test_a_full_disk_is_named_and_changes_nothing(tmp_path, monkeypatch):
    lines, out = write_lines(tmp_path / "a.jsonl", TEXTS), tmp_path / "out"
    packed(out, lines)
    before = all_files(out)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(pack, "write_shard", Mock(side_effect=full))
    assert "out cannot be written ([Errno 28] No space left" in refusal(out, lines)
    assert all_files(out) == before


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
def test_after_a_kill_a_folder_is_complete_or_marked(tmp_path, monkeypatch, replaces):
    old = write_lines(tmp_path / "old.jsonl", [f"{i}, an old text" for i in range(300)])
    (tmp_path / "bad").write_bytes(b"\xff")
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
        else:
            assert all_files(out) in (before, expected)
            complete += 1
        killed = all_files(out), (out / ".pack").exists()
        refusal(out, tmp_path / "bad")  # changes nothing, so an incomplete folder stays marked
        assert killed == (all_files(out), (out / ".pack").exists())
        packed(out, new)
        assert all_files(out) == expected
        assert {path.name for path in out.iterdir()} == expected.keys()
        shutil.rmtree(out)
    assert incomplete >= len(expected) and complete > 0


# ---- GPT-2's encoding cut to its first tokens, and shards as input -------------------------------
needs_gpt2 = pytest.mark.usefixtures("gpt2_vocabulary")


@needs_gpt2
@pytest.mark.parametrize("size", [257, 300, 2048, 50256])
def test_a_cut_encoding_merges_like_gpt2s_up_to_its_size(size):
    """It is a byte-pair encoding: applying GPT-2's first merges in order gives the same tokens."""
    encoding, gpt2 = pack.get_encoding(f"gpt2-{size}"), tiktoken.get_encoding("gpt2")
    assert (encoding.n_vocab, encoding.eot_token) == (size + 1, size)
    ranks = gpt2._mergeable_ranks
    for text in " The theory of 1905, naïve €😀", "in\n\n  there", TEXTS[5]:
        expected = []
        for word in regex.findall(gpt2._pat_str, text):
            parts = [bytes([byte]) for byte in word.encode()]
            while True:
                pairs = [ranks.get(a + b, size) for a, b in itertools.pairwise(parts)]
                if not pairs or min(pairs) >= size:
                    break
                at = pairs.index(min(pairs))
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
            expected += [ranks[part] for part in parts]
        assert encoding.encode_ordinary(text) == expected
        assert encoding.decode(expected) == text


@needs_gpt2
@pytest.mark.parametrize("before, compressed", [("gpt2", False), ("gpt2", True), ("bytes", False)])
def test_a_shard_is_packed_as_its_texts(tmp_path, before, compressed):
    """Without a manifest beside it, one of FineWeb's holds GPT-2's tokens."""
    source = write_lines(tmp_path / "a.jsonl", TEXTS)
    packed(tmp_path / "first", source, "--encoding", before, "--val_fraction", 0)
    shard = tmp_path / "first" / "train_000001.bin"
    if compressed:
        content = lzma.compress(shard.read_bytes())
        shard = tmp_path / "fineweb_train_000001.bin.xz"
        shard.write_bytes(content)
    choice = ["--encoding", "gpt2-2048", "--val_fraction", 0.2]
    manifest = packed(tmp_path / "again", shard, *choice)
    assert (manifest["encoding"], manifest["vocab_size"]) == ("gpt2-2048", 2049)
    assert manifest == packed(tmp_path / "direct", source, *choice) | {"source": [str(shard)]}


@needs_gpt2
def test_a_shard_that_is_incomplete_or_of_another_encoding_is_refused(tmp_path):
    packed(tmp_path / "first", write_lines(tmp_path / "a.jsonl", TEXTS), "--encoding", "gpt2")
    content = (tmp_path / "first" / "train_000001.bin").read_bytes()[:-2]
    for last, wanted in (b"", "complete shard"), (b"\xff\xff", "65535"):
        (tmp_path / "fineweb_bad.bin").write_bytes(content + last)
        assert wanted in refusal(tmp_path / "out", tmp_path / "fineweb_bad.bin")
