"""Measuring a trained model: every token once, the loss of training, HellaSwag by hand."""

import functools
import hashlib
import http.server
import itertools
import json
import math
import os
import re
import runpy
import subprocess
import sys
import threading
import zlib
from statistics import NormalDist

import evaluate
import pytest
import torch
import weights
from conftest import ROOT, SHARED_DATA, write_shard
from evaluate import UserError
from hypothesis import given, settings
from hypothesis import strategies as st

import train_gpt2
from train_gpt2 import GPT, Hyperparameters

SCRIPT = ROOT / "records" / "tools" / "evaluate.py"
T = 16
VAL_TOKENS = 19 * T  # no whole number of batches
DOCUMENTS = [f"def f{i}(x):\n    return {i} * x  # größer\n" for i in range(120)]
SHAPE = dict(vocab_size=257, n_layer=2, n_head=2, n_embd=16, sequence_length=T)
# as in the file of the validation split, in other words
ITEMS = [
    {"ind": 24, "activity_label": "Roofs", "ctx_a": "A man sits on a roof.", "ctx_b": "he",
     "ctx": "A man sits on a roof. he", "split": "val", "split_type": "indomain", "label": 3,
     "endings": ["wraps skis.", "rips off all of the tiles.", "holds a cube.", "stops."],
     "source_id": "activitynet~v_1"},
    {"ind": 92, "activity_label": "Tea", "ctx_a": "Boil water.", "ctx_b": "", "ctx": "Boil water.",
     "split": "val", "split_type": "zeroshot", "label": 0,
     "endings": ["Pour it on the leaves and wait.", "Go.", "Eat a cup, größer.", "It is red."],
     "source_id": "wikihow~2"},
    {"ind": 99, "activity_label": "Def", "ctx_a": "def f7(x):", "ctx_b": "", "ctx": "def f7(x):",
     "split": "val", "split_type": "zeroshot", "label": "1",  # the hub's labels are texts
     "endings": ["   return 7 * x", "return", "no no no no no no no no no no no no", "f(x)"],
     "source_id": "wikihow~3"},
]  # fmt: skip


def train(folder, **pieces):
    """Train on the bytes of DOCUMENTS in float32; return the folder of model.pt and checkpoints."""
    tokens = [token for text in DOCUMENTS for token in (256, *text.encode())]
    write_shard(folder / "train_0.bin", tokens[1000:])
    write_shard(folder / "val_0.bin", tokens[:200])
    write_shard(folder / "val_1.bin", tokens[200:900])
    train_gpt2.main(
        Hyperparameters(
            **SHAPE, batch_size=12, device_batch_size=4, num_iterations=8, warmdown_iters=3,
            learning_rate=0.02, muon_learning_rate=0.01, val_loss_every=0, val_tokens=VAL_TOKENS,
            save_every=8, device="cpu", compile=False, dtype="float32", allow_repeat=True,
            train_files=f"{folder}/train_*.bin", val_files=f"{folder}/val_*.bin",
            log_dir=f"{folder}/logs", run_id="r", **pieces,
        )
    )  # fmt: skip
    return folder / "logs" / "r"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train(tmp_path_factory.mktemp("evaluate"))


@pytest.fixture(scope="module")
def with_pieces(tmp_path_factory):
    """The folder of a run with n-grams and a key shift."""
    pieces = dict(max_ngram=3, ngram_rows=997, key_shift=1)
    return train(tmp_path_factory.mktemp("pieces"), **pieces)


@pytest.fixture(params=["plain", "with_pieces"])
def trained(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def gpt(trained):
    return weights.load(trained / "model.pt")[0]


def save(state, path):
    """Write a file of weights as train_gpt2.py does: its last 4 bytes are a checksum."""
    torch.save(state, path)
    content = path.read_bytes()
    path.write_bytes(content + zlib.crc32(content).to_bytes(4, "little"))
    return path


def blank(folder, **shape):
    """Write the weights of a model of zeros, to which all tokens are equally likely."""
    args = Hyperparameters(**{**SHAPE, "dtype": "float32", "val_files": f"{folder}/*.bin", **shape})
    model = {name: torch.zeros_like(value) for name, value in GPT(args).state_dict().items()}
    state = dict(hyperparameters=vars(args), val_loss=1.0, model=model)
    return save(state, folder / "model.pt")


def run(capsys, path, *arguments):
    """Run the tool; return {name of a row: its other cells}, with all that was printed as ""."""
    evaluate.main([f"--weights={path}", "--device=cpu", *map(str, arguments)])
    output = capsys.readouterr().out
    table = {"": output}
    for line in re.findall(r"^\| (.*) \|$", output, re.M):
        name, *cells = line.split(" | ")
        table[name] = cells
    return table


def loss_of(row):
    tokens, loss, *_ = row
    return int(tokens.replace(",", "")), float(loss)


@torch.no_grad()
def nats(gpt, context, token):
    """Return the cross-entropy of a token after its context, a list of ids, all by itself."""
    logits = gpt(torch.tensor([context]))[0, -1].double()
    return -logits.log_softmax(-1)[token].item()


def text_of_length(size):
    return (b"larger than 7, def f(x): return x * 2\n" * size)[:size]


# ---- Windows ------------------------------------------------------------------------------------
@given(st.integers(1, 200), st.integers(1, 40), st.data())
@settings(deadline=None)
def test_every_token_counts_once_with_the_context_that_was_promised(count, length, data):
    stride = data.draw(st.integers(1, length))
    counted = []
    for first, begin, end in evaluate.windows(count, length, stride):
        assert first <= begin < end <= first + length
        counted += range(begin, end)
        for i in range(begin, end):
            assert i + 1 - first >= min(i + 1, length - stride + 1 if stride < length else 1)
    assert counted == list(range(count))


@given(st.integers(2, 70), st.integers(1, 20), st.data())
@settings(deadline=None)
def test_targets_follow_their_inputs_and_only_those_asked_for_count(size, length, data):
    stride, start = data.draw(st.integers(1, length)), data.draw(st.integers(1, size - 1))
    tokens = torch.arange(100, 100 + size, dtype=torch.int32)
    counted = []
    for inputs, targets in evaluate.pieces(tokens, length, stride, start):
        assert len(inputs) == len(targets) <= length
        chosen = targets != -1
        assert (targets == inputs + 1)[chosen].all()
        counted += targets[chosen].tolist()
    assert counted == tokens[start:].tolist()


# ---- Texts --------------------------------------------------------------------------------------
def test_validation_is_that_of_the_run(trained, gpt, capsys):
    state = weights.read(trained / "model.pt")
    args = Hyperparameters(**state["hyperparameters"])
    loader = train_gpt2.DistributedDataLoader(args.val_files, 4, T, 0, 1, torch.device("cpu"))
    exact = train_gpt2.evaluate(gpt, loader, VAL_TOKENS)
    assert exact == pytest.approx(state["val_loss"], abs=1e-6)
    tokens = torch.from_numpy(loader.read(0, VAL_TOKENS + 1).astype("int32"))
    assert evaluate.nats_of(gpt, tokens, T, T) / VAL_TOKENS == pytest.approx(exact, abs=1e-6)
    for path in trained, trained / "state_step0000000008.pt":  # of a folder, model.pt
        table = run(capsys, path)
        assert loss_of(table[args.val_files]) == (VAL_TOKENS, round(state["val_loss"], 4))
        val_loss = re.findall(r"run's own val_loss:(\S+)", table[""])
        assert val_loss == ([f"{state['val_loss']:.4f}"] if path == trained else [])
    text = bytes(token for token in tokens[1:].tolist() if token < 256)
    bits = exact * VAL_TOKENS / math.log(2) / len(text)  # end-of-text is no byte
    perplexity, printed = map(float, table[args.val_files][2:])
    assert printed == pytest.approx(bits, abs=5e-5)
    assert perplexity == pytest.approx(math.exp(exact), abs=5e-3)


@pytest.mark.parametrize("size", [1, T - 1, T, T + 1, 53])
@pytest.mark.parametrize("stride", [None, 5, 1])
def test_a_text_token_by_token(gpt, trained, tmp_path, capsys, size, stride):
    content = text_of_length(size)
    (tmp_path / "a.txt").write_bytes(content)
    tokens, step, total = [256, *content], stride or T, 0.0
    for i in range(1, len(tokens)):
        first = max(0, math.ceil((i - T) / step)) * step  # the first window that reaches it
        total += nats(gpt, tokens[first:i], tokens[i])
    table = run(capsys, trained, tmp_path / "a.txt", *[f"--stride={stride}"] * bool(stride))
    count, loss = loss_of(table[f"{tmp_path}/a.txt"])
    assert count == len(content)
    assert loss == pytest.approx(total / count, abs=6e-5)
    bits = float(table[f"{tmp_path}/a.txt"][3])
    assert bits == pytest.approx(total / math.log(2) / len(content), abs=6e-5)


def test_batches_of_windows_change_nothing(gpt, monkeypatch):
    tokens = torch.tensor([256, *text_of_length(200)], dtype=torch.int32)
    losses = []
    for size in 1, 3 * T, 2**14:
        monkeypatch.setattr(evaluate, "PASS_TOKENS", size)
        losses.append(evaluate.nats_of(gpt, tokens, T, 6))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_a_model_of_zeros_finds_all_tokens_equally_likely(tmp_path, capsys):
    path = blank(tmp_path)
    (tmp_path / "a.txt").write_text("größer", encoding="utf-8")  # 6 characters, 8 bytes
    write_shard(tmp_path / "b.bin", [68, 65, 256, 66, 67, 256])  # after the first, 3 bytes of text
    write_shard(tmp_path / "c.bin", [256, 256])
    names = [f"{tmp_path}/{name}" for name in ("a.txt", "b.bin", "c.bin")]
    table = run(capsys, path, *names, "--stride=3")
    for name, tokens, size in zip(names, (8, 5, 1), (8, 3, None)):
        bits = f"{tokens * math.log2(257) / size:.4f}" if size else "n/a"
        assert table[name] == [f"{tokens}", f"{math.log(257):.4f}", "257", bits]


def test_only_the_first_tokens(gpt, trained, tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(text_of_length(90))
    (tmp_path / "b.txt").write_bytes(text_of_length(25))
    shard = trained.parent.parent / "val_1.bin"
    files = [tmp_path / "a.txt", "--tokens=25", shard, tmp_path / "b.txt"]  # in any order
    table = run(capsys, trained, *files)
    assert table[f"{tmp_path}/a.txt"] == table[f"{tmp_path}/b.txt"]
    assert loss_of(table[str(shard)])[0] == 25


def test_gpt2_tokens_have_the_bytes_of_their_text(tmp_path, capsys, monkeypatch):
    if not SHARED_DATA.is_dir():
        pytest.skip("the vocabulary is not beside this clone")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED_DATA / "tiktoken_cache"))
    path = blank(tmp_path, vocab_size=50304, n_embd=4, n_layer=1)
    text = "The größte 🎈 <|endoftext|> said:\n\n    def  f(x)…" * 3
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    encoding = weights.encoding_of(Hyperparameters())
    tokens = encoding.encode_ordinary(text)
    write_shard(tmp_path / "b.bin", [50256, *tokens, 50256])
    table = run(capsys, path, tmp_path / "a.txt", tmp_path / "b.bin")
    for name, count in ("a.txt", len(tokens)), ("b.bin", len(tokens) + 1):
        bits = count * math.log2(50304) / len(text.encode())
        expected = [f"{count}", f"{math.log(50304):.4f}", "50304", f"{bits:.4f}"]
        assert table[f"{tmp_path}/{name}"] == expected
    rows = evaluate.rows_of([evaluate.Item("A man", ["sits.", "is"], 1)], encoding, 50304)
    assert [(encoding.decode(row.tolist()), start) for row, start in rows] == [
        ("A man sits.", 2), ("A man is", 2)]  # fmt: skip
    write_shard(tmp_path / "b.bin", [50256, 50300])  # padding of the vocabulary
    with pytest.raises(UserError, match="holds id 50300, which the encoding gpt2 has not"):
        run(capsys, path, tmp_path / "b.bin")


def test_without_the_vocabulary_shards_have_no_bits_per_byte(tmp_path, capsys, monkeypatch):
    def absent(args, name):
        raise ValueError("the vocabulary of gpt2 cannot be downloaded")

    monkeypatch.setattr(weights, "encoding_of", absent)
    path = blank(tmp_path)
    write_shard(tmp_path / "b.bin", range(9))
    assert run(capsys, path, tmp_path / "b.bin")[f"{tmp_path}/b.bin"][3] == "n/a"
    (tmp_path / "a.txt").write_text("a")
    for arguments in [tmp_path / "a.txt"], [tmp_path / "b.bin", "--encoding=gpt2"], ["--hellaswag"]:
        with pytest.raises(ValueError, match="cannot be downloaded"):
            run(capsys, path, *arguments)


def test_fault_13_the_runs_val_loss_is_compared_on_equal_tokens_only(plain, tmp_path, capsys):
    state = weights.read(plain / "model.pt")
    args = Hyperparameters(**state["hyperparameters"])
    loader = train_gpt2.DistributedDataLoader(args.val_files, 4, T, 0, 1, torch.device("cpu"))
    val_hash = hashlib.sha256(loader.read(0, VAL_TOKENS + 1)).hexdigest()[:16]
    assert f" val_hash:{val_hash} " in plain.with_suffix(".txt").read_text()
    own = f"the run's own val_loss:{state['val_loss']:.4f}"
    path = save({**state, "val_hash": val_hash, "dtype": "torch.float32"}, tmp_path / "model.pt")
    shown = run(capsys, path)[""]
    assert f"{own} on the same {VAL_TOKENS} tokens, computed in torch.float32\n" in shown
    state.pop("val_hash", None)
    shown = run(capsys, save(state, tmp_path / "model.pt"))[""]
    assert own in shown and "holds no val_hash" in shown and val_hash in shown
    assert "on the same" not in shown
    # the same number of other tokens under the same names
    state["hyperparameters"]["val_files"] = f"{tmp_path}/val_*.bin"
    write_shard(tmp_path / "val_0.bin", [256, *text_of_length(VAL_TOKENS)])
    shown = run(capsys, save({**state, "val_hash": val_hash}, tmp_path / "model.pt"))[""]
    assert own not in shown and "on the same" not in shown
    there, here = re.findall(r"val_hash ([0-9a-f]{16})", shown)
    assert there == val_hash != here
    # a checkpoint has a val_hash and no val_loss
    checkpoint = weights.read(plain / "state_step0000000008.pt")
    checkpoint["hyperparameters"]["val_files"] = f"{tmp_path}/val_*.bin"
    shown = run(capsys, save(checkpoint, tmp_path / "state_step0000000008.pt"))[""]
    assert [there, here] == re.findall(r"val_hash ([0-9a-f]{16})", shown)
    assert "val_hash" not in run(capsys, plain / "state_step0000000008.pt")[""]


def test_fault_14_the_perplexity_of_nan_is_nan(tmp_path, capsys):
    path = blank(tmp_path)
    state = weights.read(path)
    state["model"]["lm_head.weight"][:] = math.nan
    (tmp_path / "a.txt").write_text("a text")
    row = run(capsys, save(state, path), tmp_path / "a.txt")[f"{tmp_path}/a.txt"]
    assert row == ["6", "nan", "nan", "nan"]


# ---- HellaSwag ----------------------------------------------------------------------------------
def write_items(path, items):
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def by_hand(gpt, item):
    """Return the choices (by sum, by mean) for one item, token by token; if all fits a window."""
    sums, means = [], []
    for ending in item["endings"]:
        context, ending = list(item["ctx"].encode()), list(f" {ending}".encode())
        row = context + ending
        total = -sum(nats(gpt, row[:i], row[i]) for i in range(len(context), len(row)))
        sums.append(total)
        means.append(total / len(ending))
    return sums, means


@pytest.fixture
def wide(tmp_path_factory, trained):
    """The trained weights in a model with room for a whole item; (path, GPT)."""
    state = weights.read(trained / "model.pt")
    state["hyperparameters"]["sequence_length"] = 80
    path = save(state, tmp_path_factory.mktemp("wide") / "model.pt")
    return path, weights.load(path)[0]


@pytest.mark.parametrize("logits", [1, 2**26])
def test_scores_of_endings_token_by_token(wide, monkeypatch, logits):
    """One ending at a time, or together and filled up."""
    monkeypatch.setattr(evaluate, "PASS_LOGITS", logits)
    items = [evaluate.Item(row["ctx"], row["endings"], row["label"]) for row in ITEMS]
    rows = evaluate.rows_of(items, weights.pack.BytesEncoding, 257)
    expected = [score for item in ITEMS for score in by_hand(wide[1], item)[0]]
    assert evaluate.log_probabilities(wide[1], rows, 80).tolist() == pytest.approx(
        expected, rel=1e-5
    )


def test_accuracies_by_hand(wide, tmp_path, capsys):
    """Labels are set so that 5 of 6 are right by the sum; by the mean, as many as agree."""
    items, agree = [], 0
    for i, item in enumerate(ITEMS * 2):
        sums, means = by_hand(wide[1], item)
        best = max(range(4), key=sums.__getitem__)
        label = best if i < 5 else (best + 1) % 4
        agree += max(range(4), key=means.__getitem__) == label
        items.append({**item, "label": label})
    assert agree != 5  # both kinds are told apart
    path = write_items(tmp_path / "h.jsonl", items)
    table = run(capsys, wide[0], f"--hellaswag_file={path}")
    low, high = 0.4365, 0.9699  # Wilson's interval of 5 in 6, by hand
    assert table["sum of log-probabilities"] == ["6", "0.8333", f"{low:.4f} to {high:.4f}"]
    assert table["mean a token"][:2] == ["6", f"{agree / 6:.4f}"]
    table = run(capsys, wide[0], f"--hellaswag_file={path}", "--hellaswag", 2)
    both = [f"{x:.4f}" for x in evaluate.interval(2, 2)]
    assert table["sum of log-probabilities"] == ["2", "1.0000", " to ".join(both)]


def test_a_long_item_is_scored_in_windows(gpt):
    """Longer than sequence_length: each token of the ending once, after half a window or more."""
    item = evaluate.Item("x" * 30, ["y" * 25, "z"], 0)
    rows = evaluate.rows_of([item], weights.pack.BytesEncoding, 257)
    expected = []
    for row, start in rows:
        total = 0.0
        for i in range(start, len(row)):
            first = max(0, math.ceil((i - T) / 8)) * 8
            assert first < i - T // 2
            total -= nats(gpt, row[first:i].tolist(), row[i])
        expected.append(total)
    found = evaluate.log_probabilities(gpt, rows, T).tolist()
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_interval_is_wilsons():
    """It holds the shares from which what was seen is within 1.96 standard errors."""
    for right, n in (0, 5), (3, 10), (1000, 4000), (7, 7):
        for share in evaluate.interval(right, n):
            error = math.sqrt(share * (1 - share) / n)
            distance = abs(right / n - share)
            assert distance == pytest.approx(NormalDist().inv_cdf(0.975) * error, abs=1e-7)


@given(st.integers(1, 300), st.data())
@settings(deadline=None)
def test_fewer_items_are_spread_evenly(size, data):
    count = data.draw(st.integers(0, size))
    chosen = evaluate.evenly(range(size), count)
    assert len(set(chosen)) == len(chosen) == (count or size)
    gaps = {after - before for before, after in itertools.pairwise(chosen)}
    assert gaps <= {size // (count or size), -(-size // (count or size))}


class Handler(http.server.BaseHTTPRequestHandler):
    """As much of the hub as one file needs."""

    def do_GET(self):
        if "resolve" in self.path:  # and not a request of the client's own
            self.server.requests.append(self.command)
        content = self.server.files.get(self.path)
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(content or b"")))
        if content is not None:
            self.send_header("X-Repo-Commit", self.path.split("/")[-2])
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content or b"")

    do_HEAD = do_GET

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on this machine with files {path: content}; it counts requests."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.files, server.requests = {}, []
        server.endpoint = f"http://127.0.0.1:{server.server_port}"
        server.home = tmp_path / "home"
        download = functools.partial(
            evaluate.hf_hub_download, endpoint=server.endpoint, cache_dir=server.home / "hub"
        )
        monkeypatch.setattr(evaluate, "hf_hub_download", download)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize("trained", ["plain"], indirect=True)
def test_hellaswag_comes_from_the_hub_once(hub, wide, tmp_path):
    """The whole command, as on a command line: a text from standard input, too."""
    revision = "f" * 40
    lines = write_items(tmp_path / "h.jsonl", ITEMS).read_bytes()
    hub.files[f"/datasets/me/mine/resolve/{revision}/val.jsonl"] = lines
    done = subprocess.run(
        [sys.executable, SCRIPT, "-", f"--weights={wide[0]}", "--device=cpu", "--hellaswag",
         "--encoding=bytes", f"--hellaswag_source=me/mine@{revision}:val.jsonl"],
        input=b"def f7(x):", capture_output=True, timeout=120,
        env={**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(hub.home),
             "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    output = done.stdout.decode()
    assert re.search(r"^\| - \| 10 \| \d\.\d{4} \| ", output, re.M)
    assert re.search(r"^\| mean a token \| 3 \| [01]\.\d{4} \| ", output, re.M)
    assert hub.requests == ["HEAD", "GET"]
    assert evaluate.fetch(f"me/mine@{revision}:val.jsonl").read_bytes() == lines
    assert hub.requests == ["HEAD", "GET"]  # the cache has it


def test_a_hub_without_the_right_file_is_one_sentence(hub, wide, capsys):
    repository, revision, name = re.fullmatch(r"(.+)@([0-9a-f]{40}):(.+)", evaluate.SOURCE).groups()
    with pytest.raises(UserError, match=r"does not come from .*404.*127.*--hellaswag_file"):
        run(capsys, wide[0], "--hellaswag")
    hub.files[f"/datasets/{repository}/resolve/{revision}/{name}"] = b"PAR1 of something else"
    with pytest.raises(UserError, match=f"has not sha256 {evaluate.SHA256}: delete it"):
        run(capsys, wide[0], "--hellaswag")


def test_parquet_rows_are_items_too(tmp_path, monkeypatch):
    path = tmp_path / "validation.parquet"
    try:
        from pyarrow import Table, parquet
    except ImportError:
        path.write_bytes(b"PAR1")
    else:
        parquet.write_table(
            Table.from_pylist([{**i, "label": str(i["label"])} for i in ITEMS]), path
        )
        write_items(tmp_path / "h.jsonl", ITEMS)
        assert evaluate.read_items(path) == evaluate.read_items(tmp_path / "h.jsonl")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"validation.parquet needs a package: .* pip install pya"):
        evaluate.read_items(path)


# ---- What cannot be measured --------------------------------------------------------------------
def test_what_cannot_be_measured_is_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = blank(tmp_path)
    for name, content in {
        "empty.txt": b"",
        "latin.txt": "größer".encode("latin-1"),
        "cut.txt": "größe".encode()[:3],
        "a.txt": b"a",
        "cut.bin": (20240520).to_bytes(4, "little") + bytes(900),
    }.items():
        (tmp_path / name).write_bytes(content)
    write_shard(tmp_path / "large.bin", [65, 300])
    write_shard(tmp_path / "one.bin", [65])
    write_shard(tmp_path / "good.bin", [65, 66])
    for name, sentence in {
        "empty.txt": r"empty\.txt is empty",
        "latin.txt": r"latin\.txt is not UTF-8 \(at byte 2\)",
        "cut.txt": r"cut\.txt is not UTF-8 \(at byte 2\)",
        "none.txt": r"none\.txt is not a file: name texts, shards, or -",
        ".": r"is not a file",
        "cut.bin": r"cut\.bin is not a complete shard of tokens",
        "large.bin": r"large\.bin holds token 300, but vocab_size=257",
        "one.bin": r"one\.bin holds one token: nothing is left to predict",
    }.items():
        with pytest.raises(UserError, match=sentence):
            run(capsys, path, tmp_path / "a.txt", tmp_path / name)
        assert capsys.readouterr().out == ""  # before anything is measured
    for argument, sentence in {
        "--stride=0": "--stride=0 must be a number from 1",
        "--stride=17": "--stride=17 must be at most the model's sequence_length=16",
        "--tokens=0": "--tokens=0 must be a number from 1",
        "--hellaswag=-1": "--hellaswag=-1 must be a number from 0",
        "--hellaswag_source=Rowan/hellaswag": "must be REPOSITORY@REVISION:FILE",
        "--encoding=gpt7": "unknown encoding 'gpt7'",
        "--device=cuda": "no GPU is visible",
    }.items():
        asked = ["--hellaswag"] * ("source" in argument)
        with pytest.raises(ValueError, match=re.escape(sentence)):
            run(capsys, path, tmp_path / "a.txt", argument, *asked)
    small = blank(tmp_path, vocab_size=128)
    with pytest.raises(UserError, match="bytes does not fit vocab_size=128: give the --encoding"):
        run(capsys, small, tmp_path / "a.txt", "--encoding=bytes")
    (tmp_path / "a.pt").write_bytes(b"a")
    with pytest.raises(UserError, match="damaged, or no file"):
        run(capsys, tmp_path / "a.pt", tmp_path / "a.txt")


def test_validation_data_that_are_gone_or_fewer_are_one_sentence(tmp_path, capsys):
    path = blank(tmp_path, val_files=f"{tmp_path}/val_*.bin", val_tokens=32)
    with pytest.raises(UserError, match="no file matches"):
        run(capsys, path)
    write_shard(tmp_path / "val_0.bin", range(32))
    with pytest.raises(UserError, match="holds 32 tokens, too few for the run's val_tokens=32"):
        run(capsys, path)
    write_shard(tmp_path / "val_1.bin", [7])
    assert loss_of(run(capsys, path)[f"{tmp_path}/val_*.bin"]) == (32, round(math.log(257), 4))


@pytest.mark.parametrize(
    "line",
    [b"{", b"[]", b"\xff", b'{"ctx": "a", "endings": ["b", "c"]}']
    + [
        json.dumps({**ITEMS[0], **other}).encode()
        for other in (
            {"label": ""},  # of the test split
            {"label": 4},
            {"label": -1},
            {"label": None},
            {"ctx": ""},
            {"ctx": None},
            {"endings": "abcd"},
            {"endings": ["a", 7]},
        )
    ],
)
def test_what_is_no_item_is_one_sentence(line, tmp_path):
    path = write_items(tmp_path / "h.jsonl", ITEMS)
    path.write_bytes(path.read_bytes() + b"\n" + line)
    with pytest.raises(UserError, match=r"h\.jsonl:5 is no item of HellaSwag"):
        evaluate.read_items(path)


def test_items_that_are_too_few_or_of_another_vocabulary_are_one_sentence(tmp_path, capsys):
    path = write_items(tmp_path / "h.jsonl", ITEMS)
    arguments = f"--hellaswag_file={path}", "--encoding=bytes"
    with pytest.raises(UserError, match="--hellaswag=4: there are 3 items"):
        run(capsys, blank(tmp_path), *arguments, "--hellaswag=4")
    with pytest.raises(UserError, match=r"HellaSwag holds id \d+ in the encoding bytes, but the"):
        run(capsys, blank(tmp_path, vocab_size=100), *arguments)
    path.write_text("")
    with pytest.raises(UserError, match="is empty: give HellaSwag's validation split"):
        run(capsys, blank(tmp_path), *arguments)


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("numpy", f"numpy is not installed: {sys.executable} -m pip install -r records/"),
        (None, "no weights in logs: train first"),
    ],
)
def test_the_command_ends_with_one_sentence(missing, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    monkeypatch.setattr(sys, "path", sys.path[:])
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code.startswith(f"evaluate.py: {sentence}")  # a text: status 1
