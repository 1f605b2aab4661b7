"""The check before a run: its results, its list of what to fix, and its prediction."""

import hashlib
import itertools
import json
import re
from pathlib import Path
from unittest import mock

import check
import minutes
import pytest
from conftest import ROOT, options, run_forked, trained, write_shard
from torch._dynamo.exc import BackendCompilerFailed

import train_gpt2
from train_gpt2 import Hyperparameters

CHECK = ROOT / "records" / "tools" / "check.py"
NAMES = ["setup", "network", "optimizers", "disk", "data", "shards", "start", "time"]


@pytest.fixture
def manifest(tmp_path):
    """A manifest with the sha256 of one shard."""
    digest = hashlib.sha256((tmp_path / "train_1.bin").read_bytes()).hexdigest()
    entry = {"encoding": "bytes", "train": {"sha256": {"train_1.bin": digest}}}
    (tmp_path / "manifest.json").write_text(json.dumps({**entry, "val": {"sha256": {}}}))


@pytest.mark.parametrize(
    "processes, network", [(1, "not needed"), (2, r"gloo, all_reduce of 16 MiB in [\d.]+ ms")]
)
def test_a_check_without_faults_describes_the_run(processes, network, tiny, manifest):
    modern = {"model": "modern", "ngram_rows": 100, "ngram_learning_rate": 0.03}
    text = trained({**tiny, **modern}, processes, CHECK)
    assert re.findall(r"^(\w+): ", text, re.M) == NAMES  # rank 0 alone prints
    assert text.endswith("\nall is well\n")
    assert not Path(tiny["log_dir"]).exists()  # nothing was trained or left behind
    assert f"processes {processes}; " in text
    assert re.search(f"^network: {network}", text, re.M)
    assert "shards: 1 of 4 shards have a known sha256, and all of these match" in text
    rows = re.findall(r"^ +(\d+) x (\S+) +\(([\d, ]*)\) +(\w+) +lr:(\S+)$", text, re.M)
    for row in [
        ("1", "wte.weight", "64, 16", "AdamW", "0.6"),
        ("1", "lm_head.weight", "64, 16", "AdamW", "0.01"),
        ("2", "h.*.attn.value_table.weight", "64, 16", "AdamW", "0.6"),
        ("1", "backout_weight", "", "AdamW", "0.04"),
        ("2", "h.*.attn.c_q.weight", "16, 16", "Muon", "0.005"),
        ("2", "h.*.mlp.c_proj.weight", "16, 64", "Muon", "0.005"),
        ("1", "ngrams.weight", "100, 16", "Adagrad", "0.03"),
    ]:
        assert row in rows
    assert len(rows) == 13


cause = RuntimeError("no g++\nand more lines")
breaks = mock.Mock(side_effect=BackendCompilerFailed("inductor", cause, None))
FAULTS = [  # settings, a replaced function, the sentence
    ({"batchsize": 3}, {}, "unrecognized arguments: --batchsize=3"),
    ({"num_iterations": 99}, {}, "15 steps"),
    ({"val_files": "bad_*.bin"}, {}, "bad_0.bin holds token 64"),
    ({}, {"check.file_sha256": str}, "train_1.bin has an unexpected sha256"),
    ({"n_embd": 2**16}, {}, "103,.* parameters need more memory than this machine"),
    ({"init": "nowhere.pt"}, {}, "nowhere.pt is not a file"),
    ({"run_id": "finished"}, {}, "finished exists"),
    ({"keep_checkpoints": 10**9, "save_every": 1}, {}, "pass another --log_dir or --keep"),
    (
        {"compile": True},
        {"train_gpt2.GPT.compile": lambda gpt, **_: setattr(gpt, "_compiled_call_impl", breaks)},
        r"no g\+\+ and more lines.*\): pass --compile=False, install g\+\+ and",
    ),
]


@pytest.mark.parametrize("changes, replaced, sentence", FAULTS)
def test_a_fault_is_one_sentence(
    changes, replaced, sentence, tiny, manifest, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_shard(tmp_path / "bad_0.bin", [64] * 400)
    train_gpt2.main(Hyperparameters(**tiny, run_id="finished"))
    for name, function in replaced.items():
        monkeypatch.setattr(name, function)
    with pytest.raises((ValueError, OSError), match=sentence) as fault:
        check.main(options({**tiny, **changes}))
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_fault_is_printed_by_each_rank_and_gives_exit_status_1(processes, tiny):
    done = run_forked({**tiny, "num_iterations": 99}, processes, script=CHECK)
    assert done.returncode == 1
    ranks = re.findall(
        r"^FAILED: (?:rank (\d): )?'.*' is enough for only 15 steps", done.stdout, re.M
    )
    assert sorted(ranks) == ["0", "1"][:processes] if processes > 1 else ranks == [""]
    assert "Traceback" not in done.stdout + done.stderr and "all is well" not in done.stdout


@pytest.mark.parametrize(
    "changes, total, step",
    [({}, "0:11:10", "1000.0"), ({"model": "modern", "adamw_every": 2}, "0:06:10", "500.0")],
)
def test_the_time_of_a_run_is_predicted_from_three_steps(changes, total, step, tiny, monkeypatch):
    """Each look at the clock takes a second. With adamw_every=2, two steps are timed together."""
    settings = {**tiny, "num_iterations": 600, "val_loss_every": 100, "allow_repeat": True}
    settings |= changes
    run = train_gpt2.set_up(Hyperparameters(**settings), train_gpt2.StopRequest())
    seconds = itertools.count()
    monkeypatch.setattr(minutes.time, "perf_counter", lambda: next(seconds))
    # There are 7 validations of 304 tokens, in 10 micro-batches of 1 s each.
    parts = r"10.0 s per validation, 0.0 s of compiling; peak memory [\d.]+ GiB"
    expected = rf"about {total} in all: {step} ms per step, {parts}"
    assert re.fullmatch(expected, check.check_time(run))
    assert all(optimizer.state for optimizer in run.optimizers)
    monkeypatch.setattr(check, "timed", lambda *arguments: 10)
    assert check.check_time(run) == (
        "about 20:00:00 of training: 120 s per step, judging by one sequence"
    )


def test_the_size_of_a_checkpoint_is_that_of_the_file(tiny):
    fields = {**tiny, "model": "modern", "vocab_size": 4096, "n_embd": 128, "dtype": "bfloat16"}
    args = Hyperparameters(**fields, ngram_rows=5000, ngram_learning_rate=0.03, save_every=6)
    train_gpt2.main(args)
    [path] = Path(tiny["log_dir"]).glob("*/state_step*.pt")
    _, weights, states = check.check_optimizers(args, train_gpt2.torch.device("cpu"))
    assert weights + states == pytest.approx(path.stat().st_size, rel=0.02)
