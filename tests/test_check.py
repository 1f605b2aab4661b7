"""The check before a run: its results, its list of what to fix, and its prediction."""

import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import check
import pytest
import torch
from conftest import ROOT, options, run_forked

import train_gpt2
from train_gpt2 import Hyperparameters

CHECK = ROOT / "records" / "tools" / "check.py"
CPU = torch.device("cpu")
NAMES = ["settings", "device", "network", "data", "shards", "optimizers", "memory", "disk", "time"]


def all_is_well(stdout, fields):
    assert re.findall(r"^(\w+): ", stdout, re.M) == NAMES
    assert "FAILED" not in stdout
    assert not list(Path(fields["log_dir"]).iterdir())  # nothing was trained


def write_manifest(folder):
    """Write a manifest with the sha256 of one shard."""
    digest = hashlib.sha256((folder / "train_1.bin").read_bytes()).hexdigest()
    sums = {"train": {"sha256": {"train_1.bin": digest}}, "val": {"sha256": {}}}
    (folder / "manifest.json").write_text(json.dumps(sums))


def test_a_check_without_faults_lists_every_parameter(tiny, tmp_path, capsys):
    write_manifest(tmp_path)
    assert check.main(options({**tiny, "max_ngram": 3, "ngram_rows": 100})) == []
    text = capsys.readouterr().out
    all_is_well(text, tiny)
    assert "shards: 1 of 4 have a known sha256" in text
    rows = re.findall(r"^ +(\d+) x (\S+) +\(([\d, ]+)\) +(\w+) +lr:(\S+)$", text, re.M)
    names = ["attn.c_q", "attn.c_k", "attn.c_v", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    shapes = ["16, 16"] * 4 + ["64, 16", "16, 64"]
    expected = [("1", "wte.weight", "64, 16", "AdamW", "0.01")]
    expected += [("2", f"h.*.{n}.weight", s, "Muon", "0.005") for n, s in zip(names, shapes)]
    assert rows == [*expected, ("1", "ngrams.weight", "100, 16", "Adagrad", "0.01")]


def test_run_sh_checks_two_processes_and_their_network(tiny):
    command = ["bash", str(ROOT / "run.sh"), "check", *options(tiny)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "NPROC": "2", "PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = done.stdout.index("settings: ")  # the record's data may have been packed first
    all_is_well(done.stdout[checks:], tiny)
    assert done.stdout.endswith("\nall is well\n")
    assert done.stdout.count("processes 2; ") == 1  # rank 0 alone prints
    assert re.search(r"network: gloo, all_reduce of 16 MiB in [\d.]+ ms", done.stdout)


breaks = mock.Mock(side_effect=RuntimeError("no g++\nand more lines"))
FAULTS = [  # settings, a replaced function, the sentence
    ({"batchsize": 3}, {}, "settings: unrecognized arguments: --batchsize=3"),
    ({"device": "cuda"}, {"torch.cuda.device_count": int}, "device: .* PyTorch sees no GPU"),
    ({}, {"check.free_memory": breaks}, r"device: RuntimeError: no g\+\+$"),
    ({"num_iterations": 99}, {}, "data: .* has enough tokens for 15 steps"),
    ({}, {"check.file_sha256": str}, "shards: .*train_1.bin has an unexpected sha256"),
    ({}, {"check.free_memory": lambda device: 1e4}, "memory: .* are free: take a smaller model"),
    ({"keep_checkpoints": 10**9}, {}, "disk: .*: free some, or pass another --log_dir"),
    ({}, {"train_gpt2.warm_up": breaks}, r"time: .* \(no g\+\+\): install g\+\+"),
]


@pytest.mark.parametrize("changes, replaced, sentence", FAULTS)
def test_the_check_lists_what_to_fix(
    changes, replaced, sentence, tiny, tmp_path, monkeypatch, capsys
):
    write_manifest(tmp_path)
    for name, function in replaced.items():
        monkeypatch.setattr(name, function)
    [found] = check.main(options({**tiny, **changes}))
    assert re.match(sentence, found)
    name, _, rest = found.partition(": ")
    assert f"{name}: FAILED, {rest}\n" in capsys.readouterr().out


@pytest.mark.parametrize("processes", [1, 2])
def test_a_fault_is_listed_and_gives_exit_status_1(processes, tiny):
    done = run_forked({**tiny, "num_iterations": 99}, processes, script=CHECK)
    assert done.returncode == 1
    assert done.stdout.count("\nto fix:\n  data: ") == 1
    assert "(ranks " not in done.stdout  # because all ranks found it
    assert "optimizers: " in done.stdout  # checks that do not need the data still run
    assert "Traceback" not in done.stdout + done.stderr


def test_a_fault_of_some_ranks_names_them(monkeypatch, capsys):
    others = [["data: b", "all: a"], ["all: a"], ["all: a", "data: b"]]
    monkeypatch.setattr(train_gpt2, "all_gather_objects", lambda faults: others)
    assert check.Checks([]).faults_of_all_ranks() == ["data: b (ranks [0, 2])", "all: a"]


def test_the_time_of_a_run_is_predicted_from_three_steps(tiny, monkeypatch):
    seconds = itertools.count()  # each look at the clock takes a second
    monkeypatch.setattr(check.time, "perf_counter", lambda: next(seconds))
    checks = check.Checks(options({**tiny, "num_iterations": 600, "val_loss_every": 100}))
    assert checks.run("settings") and checks.run("device")
    checks.loaders = train_gpt2.open_data(Hyperparameters(**tiny), 0, 1, CPU)
    text = checks.check_time()
    # Each step takes 1 s. 304 tokens are 9.5 micro-batches of 1 s, and are validated 7 times.
    assert re.fullmatch(
        r"about 0:11:1\d in all: training 0:10:00 \(600 steps of 1000.0 ms\), 7 validations "
        r"0:01:06, compiling 0:00:0\d",
        text,
    )
    monkeypatch.setattr(check, "timed", lambda *arguments: 10)
    assert checks.check_time().startswith("about 20:00:00 of training: 120 s per step")


def test_without_proc_all_memory_counts_as_free(tmp_path):
    """macOS is such a system."""
    free = check.free_memory(CPU, tmp_path / "meminfo")
    assert free > check.free_memory(CPU) > 0


def test_the_size_of_a_checkpoint_is_that_of_the_file(tiny):
    fields = {**tiny, "vocab_size": 4096, "n_embd": 128, "max_ngram": 3, "ngram_rows": 5000}
    train_gpt2.main(Hyperparameters(**fields, save_every=6))
    [path] = Path(tiny["log_dir"]).glob("*/state_step*.pt")
    checks = check.Checks(options(fields))
    assert all(map(checks.run, ("settings", "device", "optimizers")))
    size = 4 * (checks.weights + checks.states)
    assert size == pytest.approx(path.stat().st_size, rel=0.02)
