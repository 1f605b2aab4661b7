"""data/pack.py: any text to shards, the same for any number of workers, and never half a shard."""

import gzip
import hashlib
import importlib.util
import itertools
import json
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from conftest import ROOT, SHARED_DATA
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shards import lock, shard_size, verify

BOOKS = SHARED_DATA / "books" / "books.jsonl.xz"
VOCABULARY = {"TIKTOKEN_CACHE_DIR": str(SHARED_DATA / "tiktoken_cache")}
needs_books = pytest.mark.skipif(not BOOKS.exists(), reason="the corpus is not beside this clone")
spec = importlib.util.spec_from_file_location("pack", ROOT / "data" / "pack.py")
pack = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pack)


def command(*arguments):
    return [sys.executable, str(ROOT / "data" / "pack.py"), *map(str, arguments)]


def run_pack(*arguments, stdin=b""):
    """Pack; return the finished process, its output as text."""
    done = subprocess.run(
        command(*arguments),
        capture_output=True,
        input=stdin,
        timeout=240,
        env={**os.environ, **VOCABULARY},
    )
    done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()
    return done


def packed(out, *arguments, **options):
    """Pack into out in bytes; return the manifest."""
    done = run_pack(*arguments, "--out", out, "--encoding", "bytes", **options)
    assert done.returncode == 0, done.stderr
    return json.loads((out / "manifest.json").read_text())


def shard_tokens(folder, split):
    paths = sorted(folder.glob(f"{split}_*.bin"))
    assert all(shard_size(path) for path in paths)
    arrays = [np.fromfile(path, np.uint16, offset=1024) for path in paths]
    return np.concatenate([np.empty(0, np.uint16), *arrays])


def split_documents(folder, split, end_of_text=256):
    """Return the documents of a split in order, as bytes."""
    tokens = shard_tokens(folder, split)
    starts = [*np.flatnonzero(tokens == end_of_text), len(tokens)]
    return [bytes(tokens[a + 1 : b].tolist()) for a, b in itertools.pairwise(starts)]


def all_files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


TEXTS = [f"{i}: naïve €\nprint('😀')\r\n" * (1 + i % 7) for i in range(300)]


def test_bytes_are_packed_in_path_order_and_held_out_by_name(tmp_path):
    texts = {f"d{i % 3}/f{i}.py": f"{i} {text}" for i, text in enumerate(TEXTS[:40])}
    source, out = tmp_path / "source", tmp_path / "out"
    for name, text in {**texts, "version.py": "no", "note.txt": "no", "empty.py": ""}.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    manifest = packed(
        out,
        source,
        "--shard_tokens",
        1000,
        "--pattern",
        "*.py",
        "--exclude",
        "version.py",
        "--val_fraction",
        0.3,
        "--skip_bad",
    )
    expected = {"train": [], "val": []}
    for name in sorted(texts):
        held = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) < 0.3 * 2**32
        expected["val" if held else "train"].append(texts[name].encode())
    for split, documents in expected.items():
        assert split_documents(out, split) == documents and documents
        assert manifest[split]["documents"] == len(documents)
        assert manifest[split]["tokens"] == len(shard_tokens(out, split))
        for name, digest in manifest[split]["sha256"].items():
            assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    assert shard_size(out / "train_000001.bin") == 1000
    assert manifest["skipped"] == {"is empty": 1}
    assert {path.suffix for path in out.iterdir()} == {".bin", ".json", ".txt"}  # nothing half


@needs_books
def test_books_equal_an_independent_tokenization_for_any_number_of_workers(tmp_path, monkeypatch):
    for workers in (1, 2):
        choice = ("--val_fraction", 0, "--shard_tokens", 1_000_000, "--workers", workers)
        done = run_pack(BOOKS, "--out", tmp_path / str(workers), "--encoding", "gpt2", *choice)
        assert done.returncode == 0, done.stderr
    assert all_files(tmp_path / "1") == all_files(tmp_path / "2")
    monkeypatch.setenv(*next(iter(VOCABULARY.items())))
    encoding, expected = tiktoken.get_encoding("gpt2"), []
    for line in lzma.open(BOOKS, "rt", encoding="utf-8"):
        expected += [50256, *encoding.encode(json.loads(line)["text"], disallowed_special=())]
    assert shard_tokens(tmp_path / "1", "train").tolist() == expected


@needs_books
@settings(deadline=None, max_examples=150, suppress_health_check=[*HealthCheck])
@given(
    words=st.lists(
        st.sampled_from(
            [
                "the",
                "can't",
                " ",
                "  ",
                "\n",
                "\n\n",
                "\t",
                "\r\n",
                "\u3000",
                "\xa0",
                "\x1c",
                "!",
                "1",
                "é",
                "漢字",
                "<|endoftext|>",
                "😀",
                "'s",
            ]
        ),
        max_size=60,
    ),
    chunk=st.integers(1, 40),
)
def test_a_long_text_in_pieces_has_the_tokens_of_the_whole(tmp_path, monkeypatch, words, chunk):
    monkeypatch.setenv(*next(iter(VOCABULARY.items())))
    monkeypatch.setattr(pack, "CHUNK", chunk)
    encoding, text = pack.get_encoding("gpt2"), "".join(words)
    (tmp_path / "a.txt").write_bytes(text.encode())
    blocks = [block for block, _ in pack.read_blocks("a.txt", tmp_path / "a.txt", "auto", "text")]
    assert [block.first for block in blocks] == [True] + [False] * (len(blocks) - 1)
    assert all(
        text.count("\n", 0, sum(len(b.content) for b in blocks[:i])) + 1 == block.line
        for i, block in enumerate(blocks)
    )
    tokens = [token for block in blocks for token in encoding.encode_ordinary(block.content)]
    assert tokens == encoding.encode_ordinary(text)


SHAKESPEARE = SHARED_DATA / "shakespeare" / "input.txt.xz"


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="the text is not beside this clone")
def test_tiny_shakespeare_is_split_as_nanogpt_splits_it(tmp_path):
    """Without any option: nanoGPT trains on the first int(0.9 * n) characters."""
    text = lzma.open(SHAKESPEARE).read()
    (tmp_path / "input.txt").write_bytes(text)
    done = run_pack(tmp_path / "input.txt", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "held out: the end of the text, 111,540 tokens\n" in done.stdout
    cut = int(0.9 * len(text))
    assert shard_tokens(tmp_path / "out", "train").tolist() == [256, *text[:cut]]
    assert shard_tokens(tmp_path / "out", "val").tolist() == list(text[cut:])
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["vocab_size"] == 257
    sizes = [[manifest[split][name] for name in ("documents", "tokens", "bytes")]
             for split in ("train", "val")]  # fmt: skip
    assert sizes == [[1, cut + 1, cut], [1, len(text) - cut, len(text) - cut]]


@pytest.mark.parametrize(
    "texts, size",
    [(1, ("--val_tokens", 99)), (1, ("--val_fraction", 0.25)), (2, ("--val_fraction", 0.1))],
)
def test_the_end_of_few_documents_is_held_out(texts, size, tmp_path):
    """By tokens, for any size of shards, although the hash of 1.txt would hold it out."""
    for i in range(texts):
        (tmp_path / f"{i}.txt").write_text(f"{i} is a text, " * 20_000)
    names = [tmp_path / f"{i}.txt" for i in range(texts)]
    manifest = packed(tmp_path / "out", *names, *size, "--shard_tokens", 70_001)
    train, val = (shard_tokens(tmp_path / "out", split) for split in ("train", "val"))
    stream = [token for i in range(texts) for token in [256, *f"{i} is a text, ".encode() * 20_000]]
    assert [*train, *val] == stream
    assert len(val) == (100 if size[0] == "--val_tokens" else size[1] * 260_000 * texts)
    assert int(hashlib.sha256(b"1.txt").hexdigest()[:8], 16) < 0.1 * 2**32
    for split, tokens in ("train", train), ("val", val):
        assert manifest[split]["tokens"] == len(tokens)
        assert manifest[split]["bytes"] == np.count_nonzero(tokens != 256)
    assert manifest["val_below"] == 0
    verify(tmp_path / "out")


@needs_books
def test_the_bytes_of_a_cut_text_are_those_of_its_tokens(tmp_path):
    text = "naïve € 😀 <|endoftext|> words " * 300
    (tmp_path / "a.txt").write_text(text)
    done = run_pack(tmp_path / "a.txt", "--out", tmp_path / "out", "--encoding", "gpt2")
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    sizes = [manifest[split]["bytes"] for split in ("train", "val")]
    assert sum(sizes) == len(text.encode()) and sizes[1] == pytest.approx(sum(sizes) / 10, rel=0.02)


def test_every_format_gives_the_same_documents(tmp_path):
    lines = write_lines(tmp_path / "a.jsonl", TEXTS)
    content, folder = lines.read_bytes(), tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(content))
    (folder / "b.jsonl.xz").write_bytes(lzma.compress(content))
    (folder / "c.data").write_bytes(content)
    if importlib.util.find_spec("zstandard"):
        import zstandard

        half = len(content) // 2  # two frames
        frames = [zstandard.compress(part) for part in (content[:half], content[half:])]
        (folder / "d.jsonl.zst").write_bytes(b"".join(frames))
    if importlib.util.find_spec("pyarrow"):
        from pyarrow import parquet, table

        parquet.write_table(table({"id": range(300), "text": TEXTS}), folder / "e.parquet")
    packed(tmp_path / "out", lines)
    expected = [split_documents(tmp_path / "out", split) for split in ("train", "val")]
    assert sum(map(len, expected)) == 300
    for i, path in enumerate(sorted(folder.iterdir())):
        form = ("--format", "jsonl") if path.suffix == ".data" else ()
        packed(tmp_path / str(i), path, *form)
        assert [split_documents(tmp_path / str(i), split) for split in ("train", "val")] == expected
    packed(tmp_path / "stdin", "-", "--format", "jsonl", stdin=content)
    assert split_documents(tmp_path / "stdin", "train") == expected[0]
    packed(tmp_path / "text", "-", "--val_fraction", 0, stdin=b"one\ntext")
    assert split_documents(tmp_path / "text", "train") == [b"one\ntext"]


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    for name, package in (("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")):
        (tmp_path / name).write_bytes(b"x")
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ValueError, match=f"pip install {package}"):
            list(pack.read_blocks(name, tmp_path / name, "auto", "text"))


@pytest.mark.parametrize("size", [("--val_tokens", 1500), ("--val_fraction", 0.1)])
def test_added_documents_move_no_other_between_the_splits(tmp_path, size):
    texts = [f"{i} " * 10 for i in range(400)]
    out, before = tmp_path / "out", {}
    for count in (200, 400):
        manifest = packed(out, write_lines(tmp_path / "a.jsonl", texts[:count]), *size)
        splits = {split: set(split_documents(out, split)) for split in ("train", "val")}
        assert all(before.get(split, set()) <= splits[split] for split in splits)
        assert not splits["train"] & splits["val"] and all(splits.values())
        before = splits
        if count == 200 and size[0] == "--val_tokens":
            assert 1500 < manifest["val"]["tokens"] < 1600
    again = packed(
        tmp_path / "again", tmp_path / "a.jsonl", "--val_fraction", manifest["val_below"] / 2**32
    )
    assert again["data_hash"] == manifest["data_hash"]


def test_a_seed_deals_the_documents_out_anew_and_duplicates_go(tmp_path):
    texts = [f"document {i % 250}" for i in range(300)]
    lines, orders = write_lines(tmp_path / "a.jsonl", texts), []
    for seed in (None, 1, 1, 2):
        out = tmp_path / str(len(orders))
        shuffle = () if seed is None else ("--shuffle_seed", seed)
        packed(out, lines, "--val_fraction", 0, *shuffle)
        orders.append(split_documents(out, "train"))
    assert orders[0] == [text.encode() for text in texts] and orders[1] == orders[2]
    assert orders[1] not in (orders[0], orders[3])
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    manifest = packed(tmp_path / "out", lines, "--val_fraction", 0, "--drop_duplicates")
    assert split_documents(tmp_path / "out", "train") == orders[0][:250]
    assert manifest["dropped_duplicates"] == 50


GOOD = b'{"text": "x"}\n'
BAD = {  # name, content, what is said
    "invalid UTF-8 in a text": ("a.txt", b"one\ntwo \xff three", "a.txt:2 is not UTF-8"),
    "a text cut inside a character": ("a.txt", "€".encode()[:-1], "a.txt:1 is not UTF-8"),
    "invalid UTF-8 in a line": ("b.jsonl", GOOD + b'\n"\xff"\n', "b.jsonl:3 is not UTF-8"),
    "broken JSON": ("b.jsonl", GOOD * 3 + b"{oops\n" + GOOD, "b.jsonl:4 is not JSON"),
    "JSON too deep": ("b.jsonl", GOOD + b"[" * 100000 + b"\n", "b.jsonl:2 is not JSON"),
    "no object": ("b.jsonl", GOOD + b'["text"]\n', "b.jsonl:2 has no text 'text'"),
    "missing field": ("b.jsonl", GOOD + b'{"body": "x"}\n', "b.jsonl:2 has no text 'text'"),
    "no text": ("b.jsonl", GOOD + b'{"text": 5}\n', "b.jsonl:2 has no text 'text'"),
    "half a surrogate pair": ("b.jsonl", b'{"text": "\\ud800"}\n', "b.jsonl:1 is not Unicode"),
    "empty document": ("b.jsonl", GOOD + b'{"text": ""}\n', "b.jsonl:2 is empty"),
    "empty file": ("a.txt", b"", "a.txt:1 is empty"),
    "cut off gzip": ("b.jsonl.gz", gzip.compress(GOOD * 9)[:-9], "b.jsonl.gz:10 cannot be read on"),
    "no gzip": ("b.jsonl.gz", GOOD, "b.jsonl.gz:1 cannot be read on"),
    "cut off xz": ("a.txt.xz", lzma.compress(b"x" * 999)[:-9], "a.txt.xz:1 cannot be read on"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_named_and_fatal_or_skipped(tmp_path, bad):
    name, content, sentence = BAD[bad]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(content)
    (tmp_path / "in" / "z.txt").write_bytes(b"good")
    arguments = (tmp_path / "in", "--encoding", "bytes", "--val_fraction", 0, "--out")
    refused = run_pack(*arguments, tmp_path / "out")
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1, refused.stderr
    assert refused.stderr.startswith(f"data/pack.py: {sentence}") and "--skip_bad" in refused.stderr
    assert not list((tmp_path / "out").glob("*.bin"))
    skipped = run_pack(*arguments, tmp_path / "out", "--skip_bad")
    assert skipped.returncode == 0 and "skipped: 1 x " in skipped.stdout, skipped.stderr
    assert (tmp_path / "out" / "skipped.txt").read_text().startswith(sentence)
    documents = split_documents(tmp_path / "out", "train")
    assert documents[-1] == b"good" and set(documents[:-1]) <= {b"x"}


def test_a_zst_file_that_is_cut_off_is_bad(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    whole = zstandard.compress(os.urandom(300_000).hex().encode())
    for size in (len(whole) // 2, 5):
        (tmp_path / "a.txt.zst").write_bytes(whole[:size])
        done = run_pack(tmp_path / "a.txt.zst", "--out", tmp_path / "out", "--encoding", "bytes")
        assert done.returncode == 1
        assert "a.txt.zst:1 cannot be read on (the file is cut off)" in done.stderr


def test_lines_before_the_damage_count(tmp_path):
    lines = [json.dumps({"text": os.urandom(20).hex()}).encode() for _ in range(60_000)]
    content = b"\n".join(lines) + b"\n"
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content)[:-5000])
    packed(tmp_path / "out", tmp_path / "a.jsonl.gz", "--skip_bad", "--val_fraction", 0)
    documents = split_documents(tmp_path / "out", "train")
    assert len(documents) > 59_000
    assert documents == [json.loads(line)["text"].encode() for line in lines[: len(documents)]]
    skipped = (tmp_path / "out" / "skipped.txt").read_text()
    assert skipped.startswith(f"a.jsonl.gz:{len(documents) + 1} cannot be read on")


def test_packing_again_changes_nothing_and_reads_none_of_its_own_output(tmp_path):
    source = tmp_path / "in"
    (source / "parts").mkdir(parents=True)
    (source / "parts" / "a.txt").write_text("text " * 200)
    times = []
    for _ in range(2):
        packed(source / "out", source, "--shard_tokens", 300, "--val_fraction", 0)
        times.append([path.stat().st_mtime_ns for path in sorted((source / "out").glob("*.bin"))])
    assert len(times[0]) == 4 and times[0] == times[1]  # a run that reads them goes on
    assert (source / "parts" / "a.txt").exists()
    assert split_documents(source / "out", "train") == [b"text " * 200]


def test_a_second_pack_into_a_folder_in_use_is_refused(tmp_path):
    (tmp_path / "out" / ".pack").mkdir(parents=True)
    (tmp_path / "a.txt").write_text("text")
    with open(tmp_path / "out" / ".pack" / "lock", "w") as file:
        lock(file, "nobody does")
        done = run_pack(tmp_path / "a.txt", "--out", tmp_path / "out", "--encoding", "bytes")
    assert done.returncode == 1 and "another pack writes into" in done.stderr


def test_a_text_that_breaks_off_is_dropped_whole(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"word " * 500_000 + b"\xff")  # several pieces
    (tmp_path / "b.txt").write_bytes(b"good")
    manifest = packed(
        tmp_path / "out", tmp_path / "a.txt", tmp_path / "b.txt", "--skip_bad", "--val_fraction", 0
    )
    assert split_documents(tmp_path / "out", "train") == [b"good"]
    assert manifest["skipped"] == {"is not UTF-8": 1}


def test_a_file_that_vanishes_is_bad(tmp_path):
    blocks = [block for block, _ in pack.read_blocks("a.txt", tmp_path / "a.txt", "auto", "text")]
    assert [block.form for block in blocks] == ["bad"] and "No such file" in blocks[0].content


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("a.txt", "--val_fraction", 2), "--val_fraction=2.0 must be in 0..1"),
        (("a.txt", "--shard_tokens", 0), "--shard_tokens=0 must be in 1.."),
        (("a.txt", "--val_tokens", 100), "--val_tokens=100 must be below 5, all there are"),
        (("a.txt", "--encoding", "klingon"), "unknown encoding 'klingon': give bytes or one of"),
        (("a.txt", "--encoding", "cl100k_base"), "cl100k_base"),
        (("a.txt", "--val_fraction", 1), "all documents are held out"),
        (("nothing",), "nothing is neither a file nor a folder"),
        ((".", "--pattern", "*.py"), "no file matches '*.py'"),
    ],
)
def test_impossible_wishes_are_refused(tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    done = run_pack("--out", "out", "--encoding", "bytes", *arguments)
    assert done.returncode == 1 and sentence in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("data/pack.py: ")


def test_an_encoding_beyond_uint16_is_refused(monkeypatch):
    class Large:
        n_vocab = 100277

    monkeypatch.setattr(pack.tiktoken, "get_encoding", lambda name: Large)
    with pytest.raises(ValueError, match="100277 ids, but a shard's uint16 has room for 65536"):
        pack.get_encoding("cl100k_base")


def test_killed_at_any_moment_it_leaves_whole_shards_and_a_rerun_finishes(tmp_path):
    lines = write_lines(tmp_path / "a.jsonl", [f"{i} " * 2000 for i in range(2000)])
    choice = (lines, "--encoding", "bytes", "--shard_tokens", 700_000, "--workers", 2, "--out")
    assert run_pack(*choice, tmp_path / "whole").returncode == 0
    expected, out, kills = all_files(tmp_path / "whole"), tmp_path / "out", 0
    for delay in itertools.chain(np.linspace(0.1, 1.5, 12), itertools.repeat(60)):
        process = subprocess.Popen(command(*choice, out), stdout=subprocess.DEVNULL)
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
        for path in out.glob("*.bin"):
            assert path.read_bytes() == expected[path.name]
        if process.returncode == 0:
            break
    assert kills and (out / "manifest.json").exists()
    assert {name: all_files(out)[name] for name in expected} == expected


def test_what_is_encoded_already_is_not_encoded_again(tmp_path, monkeypatch):
    lines = write_lines(tmp_path / "a.jsonl", [f"{i} " * 9000 for i in range(60)])
    chunks = list(pack.read_chunks([("a.jsonl", lines)], "auto", "text"))
    calls = []

    class Counting(pack.BytesEncoding):
        @staticmethod
        def encode_to_numpy(text, disallowed_special=()):
            calls.append(text)
            return np.frombuffer(text.encode(), np.uint8)

    for name, value in (("encoding", Counting), ("parts", tmp_path), ("text_field", "text")):
        monkeypatch.setattr(pack, name, value, raising=False)
    first = [pack.encode_chunk(blocks) for blocks, _ in chunks]
    assert len(chunks) > 1 and len(calls) == 60
    assert [pack.encode_chunk(blocks) for blocks, _ in chunks] == first and len(calls) == 60
    damaged = Path(f"{first[0][0]}.tokens")
    damaged.write_bytes(b"xx" + damaged.read_bytes()[2:])
    assert [pack.encode_chunk(blocks) for blocks, _ in chunks] == first and len(calls) > 60


def test_an_interrupt_is_one_sentence_and_leaves_no_process(tmp_path):
    process = subprocess.Popen(
        command("-", "--out", tmp_path / "out", "--encoding", "bytes"),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    process.stdin.write(b"word " * 2_000_000)  # and no end of it
    process.stdin.flush()
    while not list((tmp_path / "out").glob(".pack/*.rows")):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    error = process.stderr.read()  # ends only when the workers, too, closed it
    assert process.wait(30) == 130
    assert error == b"data/pack.py: stopped; the same command goes on from here\n"
    assert not list((tmp_path / "out").glob("*.bin"))


def test_packing_again_leaves_no_shard_of_before(tmp_path):
    for text, shards in (("x" * 500, 6), ("x" * 50, 1)):
        (tmp_path / "a.txt").write_text(text)
        packed(tmp_path / "out", tmp_path / "a.txt", "--shard_tokens", 100, "--val_fraction", 0)
        assert len(list((tmp_path / "out").glob("*.bin"))) == shards


def test_fault_4_shards_that_no_pack_wrote_are_never_deleted(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "train_000007.bin").write_bytes(b"somebody's")
    (tmp_path / "text.txt").write_text("some text")
    done = run_pack(tmp_path / "text.txt", "--out", out, "--encoding", "bytes")
    assert done.returncode == 1
    assert "train_000007.bin, which no pack wrote" in done.stderr
    assert all_files(out) == {"train_000007.bin": b"somebody's"}


def test_fault_4_an_output_folder_that_is_an_input_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text("some text")
    done = run_pack(tmp_path, "--out", tmp_path, "--encoding", "bytes")
    assert done.returncode == 1
    assert "is an input, too" in done.stderr
    assert all_files(tmp_path) == {"text.txt": b"some text"}


def test_fault_4_a_file_name_that_is_not_utf8_is_named(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.txt")).write_text("some text")
    done = run_pack(folder, "--out", tmp_path / "out", "--encoding", "bytes")
    assert done.returncode == 1
    assert "xff.txt' is not UTF-8: rename it" in done.stderr


@pytest.mark.parametrize(
    "manifest", ["[]", "{}", '{"train": 3}', '{"train": {}, "val": {}}', "null", "no json"]
)
def test_fault_4_a_manifest_of_something_else_is_refused(tmp_path, manifest):
    out = tmp_path / "out"
    out.mkdir()
    (out / "manifest.json").write_text(manifest)
    (tmp_path / "text.txt").write_text("some text")
    done = run_pack(tmp_path / "text.txt", "--out", out, "--encoding", "bytes")
    assert done.returncode == 1
    assert "manifest.json is damaged: " in done.stderr
    assert "; move it away and run data/pack.py again" in done.stderr
    assert (out / "manifest.json").read_text() == manifest


def flip(content, position):
    """Return the content with one bit flipped."""
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]


PIECE_BYTES = pack.PIECE.itemsize
DAMAGE = {  # of the two files of a part, given their contents
    "the last documents are missing": (".rows", lambda rows: rows[: -3 * PIECE_BYTES]),
    "cut off in a document": (".rows", lambda rows: rows[:-1]),
    "cut off after the checksum": (".rows", lambda rows: rows[:4]),
    "empty": (".rows", lambda rows: b""),
    "zeros": (".rows", lambda rows: bytes(len(rows))),
    "another number of tokens": (".rows", lambda rows: flip(rows, 4)),
    "another hash": (".rows", lambda rows: flip(rows, 4 + 8)),
    "a document marked as bad": (".rows", lambda rows: flip(rows, len(rows) - 1)),
    "another token": (".tokens", lambda tokens: flip(tokens, 100)),
    "tokens cut off": (".tokens", lambda tokens: tokens[:-2]),
}


@pytest.fixture
def unfinished(tmp_path):
    """An output folder with the parts of a pack that failed at its last input, and the input."""
    source = tmp_path / "in"
    source.mkdir()
    write_lines(source / "a.jsonl", [f"{i} " * 9000 for i in range(60)])
    (source / "b.txt").write_bytes(b"\xff")
    assert run_pack(source, "--out", tmp_path / "out", "--encoding", "bytes").returncode == 1
    (source / "b.txt").write_text("good")
    return tmp_path / "out", source


@pytest.mark.parametrize("damage", DAMAGE)
def test_fault_7_a_damaged_part_is_encoded_again(unfinished, damage):
    out, source = unfinished
    suffix, change = DAMAGE[damage]
    paths = list(out.glob(f".pack/*{suffix}"))
    assert paths
    for path in paths:
        path.write_bytes(change(path.read_bytes()))
    manifest = packed(out, source)
    assert manifest["train"]["documents"] + manifest["val"]["documents"] == 61
    packed(out.parent / "whole", source)
    assert all_files(out) == all_files(out.parent / "whole")


def test_fault_7_a_part_under_the_name_of_another_is_encoded_again(unfinished):
    out, source = unfinished
    first, second, *_ = sorted(path.with_suffix("") for path in out.glob(".pack/*.rows"))
    for suffix in ".rows", ".tokens":
        second.with_suffix(suffix).write_bytes(first.with_suffix(suffix).read_bytes())
    packed(out, source)
    packed(out.parent / "whole", source)
    assert all_files(out) == all_files(out.parent / "whole")


# Runs data/pack.py, and kills it just before call number argv[1] that changes a folder.
KILLED_AT_A_CALL = """
import os, signal, sys
import pack

left, process = int(sys.argv.pop(1)), os.getpid()

def counted(function):
    def call(*args, **kwargs):
        global left
        left -= os.getpid() == process
        if left < 0:
            os.kill(process, signal.SIGKILL)
        return function(*args, **kwargs)
    return call

for name in "mkdir", "rename", "replace", "rmdir", "unlink":
    setattr(os, name, counted(getattr(os, name)))
pack.main()
"""


@pytest.mark.parametrize("replaces", [False, True])
def test_fault_7_a_folder_without_dot_pack_is_complete_whenever_a_pack_is_killed(
    tmp_path, replaces
):
    old = write_lines(tmp_path / "old.jsonl", [f"{i}, an old text" for i in range(200)])
    new = write_lines(tmp_path / "new.jsonl", [f"{i}, a new text" for i in range(200)])
    choice = ["--encoding", "bytes", "--shard_tokens", 1000, "--workers", 1, "--out"]
    whole, out, incomplete, complete = tmp_path / "whole", tmp_path / "out", 0, 0
    before = {}
    if replaces:
        assert run_pack(old, *choice, whole).returncode == 0
        before = all_files(whole)
    assert run_pack(new, *choice, whole).returncode == 0
    for number in itertools.count():
        out.mkdir()
        for name, content in before.items():
            (out / name).write_bytes(content)
        killed = subprocess.run(
            [sys.executable, "-c", KILLED_AT_A_CALL, *map(str, [number, new, *choice, out])],
            env={**os.environ, "PYTHONPATH": str(ROOT / "data")},
            stdout=subprocess.DEVNULL,
        )
        if killed.returncode == 0:
            break
        assert killed.returncode == -signal.SIGKILL
        if (out / ".pack").exists():
            incomplete += 1
        elif list(out.glob("*.bin")):
            complete += 1
            verify(out)
        assert run_pack(new, *choice, out).returncode == 0
        assert all_files(out) == all_files(whole)  # also: no .pack
        shutil.rmtree(out)
    assert incomplete > len(all_files(whole)) and complete > 0


def test_fault_7_a_pack_that_fails_leaves_the_complete_set_of_before(tmp_path):
    lines = write_lines(tmp_path / "a.jsonl", TEXTS)
    packed(tmp_path / "out", lines)
    before = all_files(tmp_path / "out")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    done = run_pack(lines, tmp_path / "b.txt", "--out", tmp_path / "out", "--encoding", "bytes")
    assert done.returncode == 1 and not (tmp_path / "out" / ".pack").exists()
    verify(tmp_path / "out")
    packed(tmp_path / "out", lines)
    assert all_files(tmp_path / "out") == before


def test_fault_7_a_pack_that_meets_another_as_it_publishes_is_refused(tmp_path, monkeypatch):
    """The other pack renames .pack_next to .pack just before this one creates its lock."""
    out = tmp_path / "out"
    (tmp_path / "a.txt").write_text("text")
    packed(out, tmp_path / "a.txt", "--val_fraction", 0)
    arguments = ["pack.py", str(tmp_path / "a.txt"), "--out", str(out), "--encoding", "bytes"]
    monkeypatch.setattr(sys, "argv", arguments)

    def lock_a_new_file(file, sentence):
        (out / ".pack").mkdir()

    monkeypatch.setattr(pack, "lock", lock_a_new_file)
    with pytest.raises(ValueError, match="another pack writes into"):
        pack.pack(pack.parse_args())


SPLIT = {"tokens": 5, "bytes": 4, "sha256": {}}


@pytest.mark.parametrize(
    ("train", "sentence"),
    [
        ({**SPLIT, "sha256": None}, "sha256 is null, but must be an object"),
        ({**SPLIT, "sha256": "abc"}, 'sha256 is "abc", but must be an object'),
        ({**SPLIT, "sha256": {"train_1.bin": None}}, "the sha256 of train_1.bin is null, but must"),
        ({**SPLIT, "sha256": {"train_1.bin": "5b"}}, 'is "5b", but must be 64 hex digits'),
        ({**SPLIT, "sha256": {"../a.bin": "0" * 64}}, "it lists '../a.bin'"),
        ({**SPLIT, "tokens": "5"}, 'tokens is "5", but must be an integer'),
        ([], "train is [], but must be an object"),
    ],
)
def test_fault_14_damage_to_a_manifest_is_one_sentence(tmp_path, train, sentence):
    out = tmp_path / "out"
    out.mkdir()
    manifest = {"encoding": "bytes", "val_below": 0, "train": train, "val": SPLIT}
    (out / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "a.txt").write_text("some text")
    for done in run_pack(tmp_path / "a.txt", "--out", out, "--encoding", "bytes"), run_verify(out):
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        assert sentence in done.stderr


def test_fault_14_a_manifest_nested_too_deep_is_one_sentence(tmp_path):
    (tmp_path / "manifest.json").write_text("[" * 100_000)
    done = run_verify(tmp_path)
    assert done.returncode == 1 and "is not JSON" in done.stderr and done.stderr.count("\n") == 1


def run_verify(folder):
    command = [sys.executable, ROOT / "data" / "shards.py", folder]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


UNLISTED = "train_000009.bin"
CHANGES = {  # of a packed folder: name of the shard, its new content from the old, what is said
    "a token": ("train_000001.bin", lambda shard: flip(shard, 1030), "has sha256 .*lists"),
    "cut off": ("val_000000.bin", lambda shard: shard[:-2], "val_000000.bin is damaged: "),
    "missing": ("train_000002.bin", lambda shard: None, "cannot read .*train_000002.bin"),
    "a copy but for a token": (UNLISTED, lambda shard: flip(shard, 1030), "is not listed in "),
    "no manifest": ("manifest.json", lambda shard: None, "manifest.json does not exist"),
    "damaged manifest": ("manifest.json", lambda shard: b"{", "it is not JSON .*run data/pack.py"),
    "unfinished": (
        ".pack",
        lambda shard: b"",
        r"out is incomplete: .*\.pack exists.* run the same",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_fault_14_a_packed_folder_is_verified_by_one_command(tmp_path, change):
    out = tmp_path / "out"
    packed(out, write_lines(tmp_path / "a.jsonl", TEXTS), "--shard_tokens", 20_000)
    done = run_verify(out)
    assert done.returncode == 0 and "shards are as listed in manifest.json" in done.stdout
    name, content_from, sentence = CHANGES[change]
    source = out / name if (out / name).exists() else out / "train_000001.bin"
    content = content_from(source.read_bytes())
    (out / name).unlink(missing_ok=True)
    if content is not None:
        (out / name).write_bytes(content)
    done = run_verify(out)
    assert done.returncode == 1 and re.search(sentence, done.stderr), done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("data/shards.py: ")


def test_fault_14_shards_of_equal_content_are_named(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 200)
    choice = ("--encoding", "bytes", "--val_fraction", 0, "--shard_tokens")
    done = run_pack(tmp_path / "a.txt", "--out", tmp_path / "out", *choice, 300)
    assert done.returncode == 0
    assert re.fullmatch(
        r"data/pack\.py: warning: train_000002\.bin, train_000003\.bin have equal content.*\n",
        done.stderr,
    )
    done = run_pack(tmp_path / "a.txt", "--out", tmp_path / "out", *choice, 299)
    assert done.returncode == 0 and not done.stderr
