"""The data's way: text to shards, shards to batches, and the hub to shards."""

import hashlib
import http.server
import json
import lzma
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import tiktoken
from conftest import ROOT, SHARED_DATA, write_shard
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from train_gpt2 import DistributedDataLoader, read_shard, shard_size


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    batch_size=st.sampled_from([6, 12]),
    T=st.integers(1, 7),
    repeat=st.booleans(),
)
def test_the_ranks_slices_laid_together_are_the_stream(tmp_path, sizes, batch_size, T, repeat):
    for old in tmp_path.glob("*.bin"):
        old.unlink()
    stream = np.arange(sum(sizes)) % 50000
    for i, part in enumerate(np.split(stream, np.cumsum(sizes)[:-1])):
        write_shard(tmp_path / f"s_{i}.bin", part)
    window = batch_size * T
    steps = (len(stream) - 1) // window + (2 if repeat else 0)
    assume(steps)
    endless = np.tile(stream, 1 + (steps * window + 1) // len(stream))
    hashes, pattern = set(), str(tmp_path / "s_*.bin")
    for world_size in (1, 2, 3, 6):
        loaders = [
            DistributedDataLoader(pattern, batch_size, T, rank, world_size, "cpu", repeat)
            for rank in range(world_size)
        ]
        for step in range(steps):
            batches = [loader.next_batch() for loader in loaders]
            inputs = np.concatenate([x.numpy().ravel() for x, _ in batches])
            targets = np.concatenate([y.numpy().ravel() for _, y in batches])
            assert batches[0][0].shape == (batch_size // world_size, T)
            expected = endless[step * window : (step + 1) * window + 1]
            assert (inputs == expected[:-1]).all() and (targets == expected[1:]).all()
        hashes.add(sum(loader.hash_sum for loader in loaders))
        if not repeat:
            with pytest.raises(ValueError, match="allow_repeat"):
                loaders[-1].next_batch()
    assert len(hashes) == 1


def test_the_hash_depends_on_every_token_and_on_the_order(tmp_path):
    def data_hash(tokens):
        write_shard(tmp_path / "s_0.bin", tokens)
        loader = DistributedDataLoader(str(tmp_path / "s_*.bin"), 4, 5, 0, 1, "cpu")
        loader.next_batch(), loader.next_batch()
        return loader.data_hash()

    stream = np.arange(41)
    swapped = np.concatenate([stream[20:40], stream[:20], stream[40:]])
    others = [data_hash(np.where(np.arange(41) == i, 99, stream)) for i in range(41)]
    assert len({data_hash(stream), data_hash(swapped), *others}) == 43
    assert len(data_hash(stream)) == 16


DAMAGES = {
    "empty": lambda content: b"",
    "half a header": lambda content: content[:500],
    "magic": lambda content: b"\0" + content[1:],
    "version": lambda content: content[:4] + b"\2" + content[5:],
    "cut": lambda content: content[:-1],
    "too long": lambda content: content + b"\0\0",
    "no tokens": lambda content: content[:8] + bytes(4) + content[12:1024],
    "negative count": lambda content: content[:8] + b"\xff\xff\xff\xff" + content[12:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_refused_by_name(tmp_path, damage):
    path = write_shard(tmp_path / "s_0.bin", range(100))
    assert shard_size(path) == 100
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(ValueError, match=r"s_0\.bin.*(fetch|make shards)"):
        DistributedDataLoader(str(tmp_path / "*.bin"), 1, 4, 0, 1, "cpu")


def test_other_impossible_data_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data/fineweb\.py"):
        DistributedDataLoader(str(tmp_path / "*.bin"), 1, 4, 0, 1, "cpu")
    (tmp_path / "s_1.bin").mkdir()
    with pytest.raises(ValueError, match="cannot read"):
        DistributedDataLoader(str(tmp_path / "*.bin"), 1, 4, 0, 1, "cpu")
    (tmp_path / "s_1.bin").rmdir()
    path = write_shard(tmp_path / "s_0.bin", range(100))
    with pytest.raises(ValueError, match=r"multiple of 3.*\[1, 2, 4, 8\]"):
        DistributedDataLoader(str(path), 8, 4, 0, 3, "cpu")
    loader = DistributedDataLoader(str(path), 1, 70, 0, 1, "cpu", vocab_size=70)
    with pytest.raises(ValueError, match="token id 70"):
        loader.next_batch()
    loader = DistributedDataLoader(str(path), 1, 70, 0, 1, "cpu")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="shorter"):
        loader.next_batch()


def run_pack(*arguments, env=None):
    command = [sys.executable, str(ROOT / "data" / "pack.py"), *map(str, arguments)]
    environment = {**os.environ, **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)


def shard_tokens(folder, split):
    paths = sorted(folder.glob(f"{split}_*.bin"))
    return np.concatenate([read_shard(path, 0, shard_size(path)) for path in paths])


def test_bytes_are_packed_in_path_order_and_held_out_by_name(tmp_path):
    text = "# naïve €\nprint('😀')\r\n"
    texts = {f"d{i % 3}/f{i}.py": f"{i} {text}" * (i + 1) for i in range(40)}
    source = tmp_path / "source"
    for name, text in {**texts, "version.py": "no", "note.txt": "no", "empty.py": ""}.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    out = tmp_path / "out"
    choice = ("--pattern", "*.py", "--exclude", "version.py", "--val_fraction", 0.3)
    done = run_pack(source, "--out", out, "--encoding", "bytes", "--shard_tokens", 1000, *choice)
    assert done.returncode == 0, done.stderr
    expected = {"train": [], "val": []}
    for name in sorted(texts):
        held = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) < 0.3 * 2**32
        expected["val" if held else "train"] += [256, *texts[name].encode()]
    manifest = json.loads((out / "manifest.json").read_text())
    for split, tokens in expected.items():
        assert shard_tokens(out, split).tolist() == tokens and tokens
        assert manifest[split]["tokens"] == len(tokens)
        for name, digest in manifest[split]["sha256"].items():
            assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    assert shard_size(out / "train_000001.bin") == 1000
    assert manifest["data_hash"] in done.stdout and not list(out.glob("*.partial"))


def test_books_packed_equal_an_independent_tokenization(tmp_path, monkeypatch):
    source = SHARED_DATA / "books" / "books.jsonl.xz"
    if not source.exists():
        pytest.skip("the book corpus is not beside this clone")
    lines = lzma.open(source, "rt", encoding="utf-8").read().splitlines()[:200]
    (tmp_path / "books.jsonl").write_text("\n".join(lines), encoding="utf-8")
    cache = {"TIKTOKEN_CACHE_DIR": str(SHARED_DATA / "tiktoken_cache")}
    done = run_pack(tmp_path / "books.jsonl", "--out", tmp_path, "--val_fraction", 0, env=cache)
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv(*next(iter(cache.items())))
    encoding = tiktoken.get_encoding("gpt2")
    expected = []
    for line in lines:
        expected += [50256, *encoding.encode(json.loads(line)["text"], disallowed_special=())]
    assert shard_tokens(tmp_path, "train").tolist() == expected


def test_bad_text_is_refused_by_file_and_line(tmp_path):
    def refusal(name, content, *arguments):
        path = tmp_path / name
        path.write_bytes(content)
        done = run_pack(path, "--out", tmp_path / "out", "--encoding", "bytes", *arguments)
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    assert "a.txt is not UTF-8" in refusal("a.txt", b"good \xff bad")
    good = b'{"text": "x"}\n'
    for bad in (b"{oops\n", b'{"text": 5}\n', b'["text"]\n', b'{"text": "\\ud800"}\n', b"\xff\n"):
        assert "b.jsonl:3 is not" in refusal("b.jsonl", good + b"\n" + bad)
    assert "'body'" in refusal("c.jsonl", good, "--text_field", "body")
    assert "--shard_tokens=0" in refusal("e.txt", b"x", "--shard_tokens", "0")
    assert "--val_fraction=2.0" in refusal("d.txt", b"x", "--val_fraction", "2")
    done = run_pack(tmp_path / "nothing", "--out", tmp_path / "out", "--encoding", "bytes")
    assert done.returncode == 1 and "neither a file nor a folder" in done.stderr


def test_packing_again_leaves_no_shard_of_before(tmp_path):
    (tmp_path / "long.txt").write_text("x" * 500)
    (tmp_path / "short.txt").write_text("x" * 50)
    for name, fraction, shards in (("long.txt", 0, 6), ("short.txt", 0, 1)):
        done = run_pack(tmp_path / name, "--out", tmp_path / "out", "--encoding", "bytes",
                        "--shard_tokens", 100, "--val_fraction", fraction)  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert len(list((tmp_path / "out").glob("*.bin"))) == shards


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub's file service as huggingface_hub needs; keeps a list of downloads."""

    protocol_version = "HTTP/1.1"
    files, downloads = {}, []

    def do_HEAD(self):
        content = self.files.get(self.path.rpartition("/")[2])
        if content is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        return content

    def do_GET(self):
        content = self.do_HEAD()
        if content is not None:
            self.downloads.append(self.path)
            self.wfile.write(content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(tmp_path):
    for name in ("fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"):
        Hub.files[name] = write_shard(tmp_path / "hub" / name, range(1000)).read_bytes()
    Hub.downloads.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def run_fineweb(hub, folder, shards):
    command = [sys.executable, str(ROOT / "data" / "fineweb.py"), str(shards), "--out", str(folder)]
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(folder / "home"),
                   "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_fineweb_shards_come_from_the_hub_once(hub, tmp_path):
    out = tmp_path / "fineweb"
    first = run_fineweb(hub, out, 2)
    assert first.returncode == 0, first.stderr
    assert sorted(path.name for path in out.glob("*.bin")) == sorted(Hub.files)
    assert len(Hub.downloads) == 3 and all("/kjj0/fineweb10B-gpt2/" in d for d in Hub.downloads)
    assert run_fineweb(hub, out, 2).returncode == 0 and len(Hub.downloads) == 3
    missing = run_fineweb(hub, out, 3)
    assert missing.returncode == 1 and "fineweb_train_000003.bin" in missing.stderr
    assert "must be in 0..103" in run_fineweb(hub, out, 104).stderr


def test_a_damaged_fineweb_shard_is_put_aside(hub, tmp_path):
    out = tmp_path / "fineweb"
    Hub.files["fineweb_train_000001.bin"] = Hub.files["fineweb_train_000001.bin"][:-2]
    damaged = run_fineweb(hub, out, 1)
    assert damaged.returncode == 1 and "is damaged" in damaged.stderr
    assert not (out / "fineweb_train_000001.bin").exists()
    Hub.files["fineweb_train_000001.bin"] = Hub.files["fineweb_val_000000.bin"]
    assert run_fineweb(hub, out, 1).returncode == 0
