"""The check before a run: what it finds well, what it lists to fix, and what its table says."""

import dataclasses
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import check
import huggingface_hub
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, both_dtypes, run_forked

import train_gpt2
from train_gpt2 import GPT, Hyperparameters

CHECK = ROOT / "records" / "tools" / "check.py"
CPU = torch.device("cpu")
NAMES = [
    "settings",
    "device",
    "products",
    "compiler",
    "network",
    "data",
    "shards",
    "ranks",
    "optimizers",
    "attention",
    "memory",
    "disk",
    "time",
]


def options(fields):
    return [f"--{name}={value}" for name, value in fields.items()]


# ---- The whole check ----------------------------------------------------------------------------
def all_is_well(done, fields):
    assert done.returncode == 0, done.stdout + done.stderr
    names = re.findall(r"^(\w+): ", done.stdout, re.M)
    assert [name for name in names if name != "Muon"] == NAMES
    assert done.stdout.endswith("\nall is well\n") and "FAILED" not in done.stdout
    assert not list(Path(fields["log_dir"]).iterdir())  # nothing was trained


@both_dtypes
def test_the_check_finds_all_well(dtype, tiny):
    tiny = {**tiny, "dtype": dtype, "compile": dtype == "float32"}
    done = run_forked(tiny, script=CHECK)
    all_is_well(done, tiny)
    assert f"products: torch.{dtype}, " in done.stdout
    assert ("compiler: works, " in done.stdout) == tiny["compile"]
    assert "network: one process, none needed" in done.stdout


def test_run_sh_checks_two_processes_and_their_network(tiny):
    done = subprocess.run(
        ["bash", str(ROOT / "run.sh"), "check", *options(tiny)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NPROC": "2", "PYTHON": sys.executable},
    )
    all_is_well(done, tiny)
    assert done.stdout.count("processes 2, gloo") == 1  # rank 0 alone prints
    assert re.search(r"all_reduce of 16 MiB in [\d.]+ ms, [1-9]\d* MiB/s a rank", done.stdout)
    assert re.search(r"of a number on the CPUs in [\d.]+ ms", done.stdout)
    assert "ranks: the same data on all" in done.stdout


def note_other_hash(folder):
    sums = {"train": {"sha256": {"train_1.bin": "0" * 64}}, "val": {"sha256": {}}}
    (folder / "manifest.json").write_text(json.dumps(sums))


def no_compiler(function, disable=False, **named):
    if disable:
        return function
    raise RuntimeError("no g++\nand more lines")


FAULTS = {
    "settings": ({"batchsize": 3}, "settings: unrecognized arguments: --batchsize=3. --help lists"),
    "a bad value": ({"n_head": 5}, "settings: n_embd=16 must be a multiple of 2 * n_head = 10"),
    "no GPU": ({"device": "cuda"}, "device: device=cuda, but PyTorch sees no GPU: pass --dev"),
    "no data": ({"train_files": "none*.bin"}, "data: no file matches 'none*.bin': run data/finewe"),
    "too little data": ({"num_iterations": 99}, "has enough tokens for 15 steps: add data, "),
    "a changed shard": ({}, "shards: {folder}/train_1.bin has another sha256 than noted: fetch or"),
    "memory": ({}, "GiB are free: take a smaller model"),
    "disk": ({"keep_checkpoints": 10**9}, " are needed: free some or pass another --log_dir"),
    "no compiler": ({"compile": True}, "compiler: torch.compile fails (no g++): install g++ and"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_lists_what_to_fix(fault, tiny, tmp_path, monkeypatch, capsys):
    if fault == "no GPU" and torch.cuda.is_available():
        pytest.skip("there is one")
    changes, sentence = FAULTS[fault]
    if fault == "a changed shard":
        note_other_hash(tmp_path)
    if fault == "no compiler":
        monkeypatch.setattr(torch, "compile", no_compiler)
    if fault == "memory":
        monkeypatch.setattr(check, "free_memory", lambda device: 1e4)
    [found] = check.main(options({**tiny, **changes}))
    assert sentence.format(folder=tmp_path) in found
    name, _, rest = found.partition(": ")
    assert f"{name}: FAILED, {rest}\n" in capsys.readouterr().out


@pytest.mark.parametrize("processes", [1, 2])
def test_a_failed_check_is_a_list_and_a_failure(processes, tiny):
    done = run_forked({**tiny, "num_iterations": 99}, processes, script=CHECK)
    fault = f"{tiny['train_files']!r} has enough tokens for 15 steps"
    assert done.returncode == 1 and f"data: FAILED, {fault}" in done.stdout
    assert done.stdout.count(f"\nto fix:\n  data: {fault}") == 1
    assert "(ranks " not in done.stdout  # all found it
    assert "attention: " in done.stdout  # what can be checked still is
    assert "Traceback" not in done.stdout + done.stderr


def test_a_fault_of_some_ranks_names_them(monkeypatch, capsys):
    monkeypatch.setattr(check.dist, "is_initialized", lambda: True)
    others = [["data: b", "all: a"], ["all: a"], ["all: a", "data: b"]]
    monkeypatch.setattr(train_gpt2, "all_gather_objects", lambda faults: others)
    assert check.Checks(1).of_all_ranks() == ["data: b (ranks [0, 2])", "all: a"]


def test_an_error_of_another_kind_is_named_in_one_line(capsys):
    checks = check.Checks(0)
    assert checks("part", lambda: {}["gone"]) is None
    assert checks.faults == ["part: KeyError: 'gone'"]
    assert capsys.readouterr().out == "part: FAILED, KeyError: 'gone'\n"


def test_the_time_of_a_plan_is_predicted_from_three_steps(tiny, monkeypatch):
    clock = iter(range(10**6))  # each look at the clock takes a second
    monkeypatch.setattr(check.time, "perf_counter", lambda: next(clock))
    args = Hyperparameters(**{**tiny, "num_iterations": 600, "val_loss_every": 100})
    loaders = train_gpt2.open_data(dataclasses.replace(args, num_iterations=6), 0, 1, CPU)
    text, _ = check.check_time(args, loaders, 0, 1, CPU, torch.float32)
    # training: 600 s; 304 tokens are 9.5 micro-batches of 32, each 1 s, validated 7 times
    assert re.fullmatch(
        r"about 0:11:1\d in all: training 0:10:00 \(600 steps of 1000.0 ms\), 7 validations "
        r"0:01:06, compiling 0:00:0\d",
        text,
    )
    monkeypatch.setattr(check, "timed", lambda *arguments: (10, None))
    text, _ = check.check_time(args, loaders, 0, 1, CPU, torch.float32)
    assert text.startswith("about 20:00:00 of training, if a step takes 120 s")


def test_without_proc_all_memory_counts_as_free(tmp_path):
    """As on macOS."""
    free = check.free_memory(CPU, tmp_path / "meminfo")
    assert free > check.free_memory(CPU) > 0


# ---- Shards -------------------------------------------------------------------------------------
class Hub(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_response(200)
        self.send_header("ETag", '"0"')
        self.send_header("Content-Length", "200001024")
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(monkeypatch):
    """A hub on this machine; where the client then looks for a file."""
    server = http.server.HTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def url(repository, name, repo_type, revision):
        assert (repo_type, len(revision)) == ("dataset", 40)
        return f"http://127.0.0.1:{server.server_port}/{repository}/{name}"

    monkeypatch.setattr(huggingface_hub, "hf_hub_url", url)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_hub_is_asked_only_where_its_shards_are_missing(hub, tiny, capsys):
    gone = {**tiny, "train_files": "gone/fineweb_train_*.bin"}
    assert len(check.main(options(gone))) == 1  # no data; the hub is there
    found = r"^hub: http://127\S+/fineweb_val_000000.bin has 200 MB, data/fineweb.py can fetch it$"
    assert re.search(found, capsys.readouterr().out, re.M)
    check.main(options({**tiny, "train_files": "gone/own_*.bin"}))
    assert "\nhub: " not in capsys.readouterr().out


def test_a_hub_that_does_not_answer_is_a_fault(hub, tiny):
    hub.shutdown()
    hub.socket.close()
    with pytest.raises(train_gpt2.UserError, match=r"00.bin does not answer \(Con.+: set HTTPS"):
        check.check_hub()


def test_each_rank_reads_its_share_of_the_noted_shards(tiny, tmp_path, monkeypatch):
    args = Hyperparameters(**tiny)
    loaders = train_gpt2.open_data(args, 0, 1, CPU)
    paths = [path for loader in loaders for path in loader.paths]
    sums = {Path(path).name: check.file_sha256(path) for path in paths[1:]}
    noted = {"train": {"sha256": sums}, "val": {"sha256": {}}}
    (tmp_path / "manifest.json").write_text(json.dumps(noted))
    read = []
    monkeypatch.setattr(
        check, "file_sha256", lambda path: read.append(path) or sums[Path(path).name]
    )
    for rank in range(2):
        assert check.check_shards(loaders, rank, 2)[0] == "3 as noted, 1 nowhere noted"
    assert sorted(read) == sorted(paths[1:])


# ---- The table ----------------------------------------------------------------------------------
def printed(gpt, optimizers, world_size):
    """Return (rows, other lines) of the table; a row: (count, name, shape, optimizer, rate)."""
    rows, others = [], []
    for line in check.optimizer_table(gpt, optimizers, world_size):
        row = re.fullmatch(r" +(\d+) x (\S+) +\(([\d, ]+)\) +(\w+) +lr:(\S+)", line)
        if row:
            shape = tuple(int(size) for size in row[3].split(","))
            rows.append((int(row[1]), row[2], shape, row[4], float(row[5])))
        else:
            others.append(line)
    return rows, others


@pytest.mark.parametrize("max_ngram", [0, 3])
def test_the_table_has_every_parameter_once_with_its_optimizer(max_ngram, tiny):
    args = Hyperparameters(**tiny, max_ngram=max_ngram, ngram_rows=100)
    gpt = GPT(args)
    rows, others = printed(gpt, train_gpt2.build_optimizers(gpt, args, 0, 2), 2)
    matrices = [("attn.c_q", (16, 16)), ("attn.c_k", (16, 16)), ("attn.c_v", (16, 16))]
    matrices += [("attn.c_proj", (16, 16)), ("mlp.c_fc", (64, 16)), ("mlp.c_proj", (16, 64))]
    muon = [(2, f"h.*.{name}.weight", shape, "Muon", 0.005) for name, shape in matrices]
    table = [(1, "ngrams.weight", (100, 16), "Adagrad", 0.01)] * (max_ngram > 1)
    assert rows == [(1, "wte.weight", (64, 16), "AdamW", 0.01), *muon, *table]
    assert others[0] == f"parameters: {64 * 16 + 2 * 12 * 256 + 100 * 16 * len(table):,}"


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_the_table_tells_muons_load_and_the_bytes_sent(world_size):
    args = Hyperparameters()
    with torch.device("meta"):
        gpt = GPT(args)
        optimizers = train_gpt2.build_optimizers(gpt, args, 0, world_size)
    _, [_, load, sent] = printed(gpt, optimizers, world_size)
    muon = optimizers[1]
    most = max(muon.loads) / (sum(muon.loads) / world_size)
    assert f"Muon: cost of the busiest rank/mean:{most:.3f} momentum MiB:[" in load
    mib = [float(text) for text in re.findall(r"[\d.]+(?=[],])", load)]
    assert len(mib) == world_size and sum(mib) == pytest.approx(324, abs=0.05 * world_size)
    gradients, updates = (float(text) for text in re.findall(r":([\d.]+)", sent))
    head, matrices = 50304 * 768, 12 * 12 * 768**2
    passed_on = (world_size - 1) / world_size / 2**20
    assert gradients == pytest.approx(2 * 4 * (head + matrices) * passed_on, abs=0.06)
    assert updates == pytest.approx(2 * 2 * matrices * passed_on, abs=0.06)


class Owning(torch.optim.SGD):
    """Another optimizer whose parameters have owners."""

    def __init__(self, params, rank, world_size):
        super().__init__(params, lr=0.5)
        self.owner = {p: i % world_size for i, p in enumerate(train_gpt2.params_of(self))}


def test_any_optimizers_are_checked(tiny, monkeypatch, capsys):
    def build_optimizers(gpt, args, rank, world_size):
        blocks = list(gpt.h.parameters())
        sgd = torch.optim.SGD(gpt.lm_head.parameters(), lr=0.25)
        return [sgd, torch.optim.Adagrad(blocks[:2]), Owning(blocks[2:], rank, world_size)]

    monkeypatch.setattr(train_gpt2, "build_optimizers", build_optimizers)
    assert check.main(options(tiny)) == []
    text = capsys.readouterr().out
    for line in (
        r"  1 x wte.weight +\(64, 16\) +SGD +lr:0.25",
        r"  1 x h.\*.attn.c_q.weight +\(16, 16\) +Adagrad +lr:0.01",
        r"  2 x h.\*.mlp.c_fc.weight +\(64, 16\) +Owning +lr:0.5",
        r"Owning: cost of the busiest rank/mean:1.000 momentum MiB:\[0.0\]",
    ):
        assert re.search(rf"^ *{line}$", text, re.M), line
    gpt = GPT(Hyperparameters(**tiny))
    _, others = printed(gpt, build_optimizers(gpt, None, 0, 2), 2)
    assert len(others) == 3  # the sum, the one that has owners, the bytes


# ---- Attention ----------------------------------------------------------------------------------
@both_dtypes
def test_the_kernel_is_that_of_the_models_own_call(dtype, tiny, monkeypatch):
    dtype = getattr(torch, dtype)
    args = Hyperparameters(**{**tiny, "sequence_length": 513})
    assert check.check_attention(args, CPU, dtype)[0] == "FlashAttentionForCpu"
    short = Hyperparameters(**{**tiny, "sequence_length": 512})
    assert check.check_attention(short, CPU, dtype)[0].startswith("math")

    def plain(q, k, v, is_causal):
        scores = (q @ k.mT).masked_fill(torch.ones(513, 513).triu(1).bool(), -torch.inf)
        return scores.softmax(-1) @ v

    monkeypatch.setattr(F, "scaled_dot_product_attention", plain)
    assert check.check_attention(args, CPU, dtype)[0].startswith("math")


# ---- Memory and disk ----------------------------------------------------------------------------
@pytest.mark.parametrize("max_ngram", [0, 3])
def test_the_size_of_a_checkpoint_is_that_of_the_file(max_ngram, tiny, capsys):
    fields = {**tiny, "n_embd": 128, "num_iterations": 1, "save_every": 1, "run_id": "a"}
    fields |= {"max_ngram": max_ngram, "ngram_rows": 5000}
    train_gpt2.main(Hyperparameters(**fields))
    [path] = Path(tiny["log_dir"], "a").glob("state_step*.pt")
    args = Hyperparameters(**fields)
    _, (gpt, optimizers) = check.check_optimizers(args, 0, 1, torch.float32)
    weights = sum(p.numel() for p in gpt.parameters())
    size = 4 * (weights + check.state_values(gpt, optimizers, 1)[1])
    assert size == pytest.approx(path.stat().st_size, rel=0.02)
