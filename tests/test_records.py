"""The evidence: logs read back, statistics against scipy, refusals, stale READMEs, reruns."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import ab
import compare
import lever_table
import numpy as np
import pytest
import report
import rerun
import runlog
import torch
from conftest import ROOT, TINY, StopAfter, both_dtypes, write_shard
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from train_gpt2 import CHANGEABLE_ON_RESUME, GPT, Hyperparameters, main

# ---------------------------------------------------------------------------
# logs to read

HEADER = {
    "num_iterations": 40,
    "batch_size": 4,
    "sequence_length": 8,
    "val_tokens": 64,
    "seed": 1,
    "target_val_loss": 1.5,
    "learning_rate": 0.01,
    "n_layer": 2,
    "n_embd": 16,
    "train_files": "data/train_*.bin",
    "run_id": "x",
    "log_dir": "logs",
}
FACTS = {
    "val_hash": "aa",
    "hash": "",  # ones, as many as the script's hash has
    "train_tokens": 12345,
    "device": "CPU one",
    "products": "torch.float32",
    "processes": 1,
    "torch": "2.13.0",
    "ms": 7,
    "memory": 500,
    "compile": 3.5,
    "commit": "abcdef0123456",
}
OLD_ONLY = {"muon_coefficients": "quintic", "attention": "auto", "checksum_every": 500}
OLD_ONLY |= {"bytes_per_token": 0.5}
both_formats = pytest.mark.parametrize("old", [False, True], ids=["new", "old"])


def old_header(facts):
    return [
        f"python:3.11.7 torch:{facts.torch} numpy:2.0 cuda:None commit:{facts.commit}",
        f"device:{facts.device} processes:{facts.processes} threads:2 products:{facts.products}",
        f"train data: 1 shards, {facts.train_tokens:,} tokens; 40 steps read 1,280 (0.1 epochs)",
        f"val data: 1 shards, 100 tokens; the first 64 count, val_hash:{facts.val_hash}",
    ]


def new_header(facts):
    return [
        f"torch:{facts.torch} commit:{facts.commit}",
        f"device:{facts.device} processes:{facts.processes} threads:2 products:{facts.products}",
        f"train_tokens:{facts.train_tokens} val_hash:{facts.val_hash} micro_batch:4",
        "AdamW parameters:1024",
        "Muon parameters:6144",
    ]


def old_summary(facts, loss):
    return [
        f"setup:1.0s compile:{facts.compile}s train:0.3s",
        "compile: graphs:2 graph_breaks:0 recompiles:0",
        f"tokens/s:4571 peak_memory:{facts.memory}MiB mfu:41.5%",
        f"result val_loss:{loss:.4f} bits_per_byte:2.0 target:1.5 reached",
    ]


def new_summary(facts, loss):
    return [
        f"compile:{facts.compile}s train:0.3s checkpoint:0.0s validation:0.1s",
        f"tokens/s:4571 peak_memory:{facts.memory}MiB graphs:2",
        f"result val_loss:{loss:.4f} target:1.5",
    ]


def write_log(path, loss=1.25, source="print('a script')", old=False, **changes):
    """Write a log as train_gpt2.py does, without a training: 40 steps, validated every 20.

    old: as the script of five files did. stopped_at: the last step; every: steps between
    validations; first: the first step, of a log that begins in a resume.
    """
    facts = FACTS | {name: changes.pop(name) for name in FACTS.keys() & changes.keys()}
    facts["hash"] = facts["hash"] or "1" * (16 if old else 12)
    facts = SimpleNamespace(**facts)
    stopped_at, curve = changes.pop("stopped_at", None), changes.pop("curve", None)
    every, first = changes.pop("every", 20), changes.pop("first", 0)
    values = HEADER | (OLD_ONLY if old else {"dtype": "auto"}) | changes
    last = values["num_iterations"]
    lines = [source] + ["source of data/shards.py:", "FORMAT = 1"] * old
    lines += [f"hyperparameter {name}={value!r}" for name, value in values.items()]
    lines += (old_header if old else new_header)(facts)
    stopped_at = last if stopped_at is None else stopped_at
    for step in range(first, stopped_at + 1):
        ms = facts.ms * step
        tail = f"train_time:{ms:.0f}ms step_avg:{ms / max(step, 1):.2f}ms"
        train_loss = 5 - step / 20 + (curve or values["seed"]) / 1e3
        lines += [f"step:{step}/{last} train_loss:{train_loss:.4f} {tail}"] * (step > 0)
        if step % every == 0:
            value = loss if step == last else 5 - step / 20
            line = f"step:{step}/{last} val_loss:{value:.4f} {tail} data_hash:{facts.hash}"
            lines.append(line)
    if stopped_at == last:
        lines += (old_summary if old else new_summary)(facts, loss)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def write_group(folder, name, losses, **changes):
    return [
        str(write_log(folder / f"{name}_seed{seed}.txt", loss, seed=seed, **changes))
        for seed, loss in enumerate(losses, 1)
    ]


def append_log(path, **changes):
    """Resume a log of write_log: append another start; `first` there is its first step."""
    before = path.read_text()
    path.write_text(before + write_log(path, **changes).read_text())
    return path


# Record 9 of the public speedrun, 2024-11-06: its step lines and GPU's row, retyped
PUBLIC = f"""{"=" * 100}
import torch
class Hyperparameters:
    batch_size : int = 8*64
    sequence_length : int = 1024
    num_iterations : int = 3200
    val_tokens : int = 10485760
    weight_decay : float = 0
{"=" * 100}
Running pytorch 2.5.1+cu124 compiled for CUDA 12.4
|   0  NVIDIA H100 80GB HBM3          Off |   00000000:18:00.0 Off |                    0 |
|   1  NVIDIA H100 80GB HBM3          Off |   00000000:2A:00.0 Off |                    0 |
|    0   N/A  N/A     37067      C   /usr/bin/python3                                0MiB |
{"=" * 100}
step:0/3200 val_loss:10.8258 train_time:500ms step_avg:nanms
step:1/3200 train_loss:10.8258 train_time:4005ms step_avg:nanms
step:10/3200 train_loss:6.7929 train_time:5329ms step_avg:nanms
step:11/3200 train_loss:6.7074 train_time:105ms step_avg:nanms
step:13/3200 train_loss:6.5110 train_time:409ms step_avg:136.37ms
step:3200/3200 train_loss:3.1888 train_time:493695ms step_avg:154.76ms
step:3200/3200 val_loss:3.2791 train_time:493742ms step_avg:154.78ms
"""


def test_public_log_of_2024_is_read(tmp_path, capsys):
    path = tmp_path / "Some_Record" / "dd7304a6-cc43-4d5e-adb8-c070111464a1.txt"
    path.parent.mkdir()
    path.write_text(PUBLIC)
    run = runlog.read(path)
    assert (run.steps, run.val_loss, run.train_ms) == (3200, 3.2791, 493742)
    assert run.ms_per_step == 154.78
    assert run.finished and run.label == "Some_Record" and run.seed is None
    assert run.tokens == 3200 * 512 * 1024
    assert run.tokens_per_second == pytest.approx(512 * 1024 / 0.15478)
    assert (run.facts["device"], run.facts["processes"]) == ("NVIDIA H100 80GB HBM3", "2")
    assert run.facts["torch"] == "2.5.1+cu124" and run.data_hash is None
    assert next(iter(run.sources.values())).startswith("import torch\nclass Hyper")
    ours = write_log(tmp_path / "ours_seed1.txt")
    picture = tmp_path / "both.png"
    assert report.main([str(path), str(ours), "--picture", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert "| 3.2791 | 1,677,721,600 | 494 s | 154.8 | 3,387,311 | n/a |" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")


@both_dtypes
def test_log_written_by_training_is_read(dtype, tiny):
    own = {**tiny, "run_id": "mine_seed7", "seed": 7, "dtype": dtype}
    loss = main(Hyperparameters(**own))
    run = runlog.read(f"{tiny['log_dir']}/mine_seed7.txt")
    assert run.val_loss == pytest.approx(loss, abs=5e-5) and run.finished
    assert (run.label, run.seed, run.steps, run.last) == ("mine", 7, 6, 6)
    assert run.settings == {**vars(Hyperparameters()), **own}
    assert run.sources == {"train_gpt2.py": (ROOT / "train_gpt2.py").read_text()}
    assert [step for step, _, _ in run.points["train"]] == [1, 2, 3, 4, 5, 6]
    assert run.tokens == 6 * TINY["batch_size"] * 16 and run.data_hash == run.hashes[run.tokens]
    assert (len(run.data_hash), len(run.facts["val_hash"]), run.planned) == (12, 16, (6,))
    assert run.facts["torch"] == torch.__version__ and run.facts["products"] == f"torch.{dtype}"
    assert (run.facts["processes"], run.facts["train_tokens"]) == ("1", "3000")
    assert run.number("threads") == torch.get_num_threads() and run.number("peak_memory") > 50
    assert run.number("parameters") == sum(
        p.numel() for p in GPT(Hyperparameters(**own)).parameters()
    )
    assert run.number("compile") >= 0 and run.number("train") > 0
    assert all(text(run) for text in report.COLUMNS.values())


@both_formats
def test_every_field_of_a_log(old, tmp_path):
    run = runlog.read(write_log(tmp_path / "a_seed3.txt", seed=3, old=old))
    assert {name: text(run) for name, text in report.COLUMNS.items()} == {
        "seed": "3",
        "steps": "40",
        "val loss": "1.2500",
        "tokens": "1,280",
        "train time": "0 s",
        "ms/step": "7.0",
        "tokens/s": "4,571",
        "MFU": "41.5%" if old else "n/a",
        "peak memory": "500 MiB",
        "compile": "3.5 s",
        "torch": "2.13.0",
        "device": "CPU one",
        "processes": "1",
        "commit": "abcdef012",
        "data hash": "1" * (16 if old else 12),
        "val hash": "aa",
    }
    assert (run.facts["train_tokens"], run.facts["threads"]) == ("12345", "2")
    assert (run.facts["products"], run.facts["graphs"]) == ("torch.float32", "2")
    assert list(run.sources) == ["train_gpt2.py"] + ["data/shards.py"] * old


def test_logs_of_the_records_are_all_read():
    runs = [run for folder in ROOT.glob("records/2026*") for run in runlog.logs_in(folder)]
    assert len(runs) >= 74 and all(run.finished for run in runs)
    assert {len(run.facts["val_hash"]) for run in runs} == {16}
    assert all(run.number("train_tokens") > 1e5 and run.facts["processes"] for run in runs)
    several = [list(run.sources) for run in runs if len(run.sources) == 5]
    files = ["checkpoints.py", "processes.py", "shards.py"]
    names = ["train_gpt2.py", *(f"data/{name}" for name in files), "records/describe.py"]
    assert several and several.count(names) == len(several)


def test_mfu_of_a_gpus_log(tmp_path):
    gpu = {"device": "NVIDIA H200", "products": "torch.bfloat16", "processes": 2}
    run = runlog.read(write_log(tmp_path / "a.txt", **gpu))
    args = SimpleNamespace(n_layer=2, n_embd=16, sequence_length=8)
    per_token = 6 * (1024 + 6144) + 12 * 2 * 16 * 8
    model = torch.nn.Linear(1024, 7, bias=False)
    assert runlog.flops_per_token(model, args) == per_token
    # 32 tokens in 7 ms, on two GPUs
    expected = per_token * 32 / 0.007 / (2 * runlog.PEAK_FLOPS["NVIDIA H200"])
    assert run.mfu == pytest.approx(expected)
    more = runlog.read(write_log(tmp_path / "c.txt", **gpu, max_ngram=3, ngram_rows=64))
    table = 6 * 64 * 16  # of the parameters above, only looked up
    assert more.mfu / run.mfu == pytest.approx(1 - table / per_token)
    for change in {"products": "torch.float32"}, {"device": "NVIDIA Unknown"}:
        assert runlog.read(write_log(tmp_path / "b.txt", **{**gpu, **change})).mfu is None


def test_a_table_of_ngrams_is_no_flops():
    settings = dict(vocab_size=64, n_layer=2, n_head=2, n_embd=16)
    args = [Hyperparameters(**settings, max_ngram=n, ngram_rows=1000) for n in (0, 3)]
    without, table = (runlog.flops_per_token(GPT(each), each) for each in args)
    assert without == table


@both_formats
def test_resumed_log_counts_a_repeated_step_once(old, tmp_path):
    path = write_log(tmp_path / "a.txt", stopped_at=29, old=old)
    cut = runlog.read(path)
    assert not cut.finished and report.COLUMNS["steps"](cut) == "29 of 40, unfinished"
    second = write_log(tmp_path / "b.txt", old=old).read_text()
    whole = path.read_text()
    path.write_text(whole + second)
    run = runlog.read(path)
    assert run.finished and [step for step, _, _ in run.points["train"]] == list(range(1, 41))
    path.write_text(whole + second.replace("device:CPU one", "device:CPU two"))
    assert runlog.read(path).facts["device"] == "CPU one then CPU two"
    assert run.facts["device"] == "CPU one" and run.number("compile") == 3.5
    path.write_text(f"logs/a/state_step0000000020.pt is not a whole checkpoint\n{whole}{second}")
    assert runlog.read(path).sources == run.sources
    changes = [("a script", "another"), ("=8\n", "=9\n")] + [("FORMAT = 1", "FORMAT = 2")] * old
    for before, after in changes:
        path.write_text(whole + second.replace(before, after))
        with pytest.raises(ValueError, match="if resumed, the same source and settings again"):
            runlog.read(path)


def test_what_a_resume_says_of_checkpoints_comes_before_its_header(tmp_path):
    """In the log of another run_id, which a resume from a file begins."""
    path = write_log(tmp_path / "a.txt")
    expected = runlog.read(path).sources
    said = "logs/a/state_step0000000020.pt was trained with products:torch.bfloat16, and goes on"
    said += (
        " with torch.float32\nrenamed logs/a/x.pt to x.pt.abandoned, because logs/a/y is older\n"
    )
    for line in said, "logs/a/state_step0000000020.pt is not a complete checkpoint\n" + said:
        path.write_text(line + write_log(tmp_path / "b.txt").read_text())
        assert runlog.read(path).sources == expected


def test_settings_that_have_other_names_today_are_read_by_these(tmp_path):
    pieces = {"max_ngram": 3, "key_shift": 1}
    new = runlog.read(write_log(tmp_path / "new.txt", **pieces))
    old = runlog.read(write_log(tmp_path / "old.txt", ngrams=3, key_offset=1))
    assert new.settings == old.settings and new.settings.items() >= pieces.items()
    assert {*runlog.RENAMED_SETTINGS.values()} <= Hyperparameters.__dataclass_fields__.keys()
    append_log(tmp_path / "old.txt", **pieces)
    assert runlog.read(tmp_path / "old.txt").settings == new.settings
    append_log(tmp_path / "old.txt", **{**pieces, "key_shift": 2})
    with pytest.raises(ValueError, match="if resumed, the same source and settings again"):
        runlog.read(tmp_path / "old.txt")


def test_defaults_of_a_script_are_read_from_its_text():
    expected = {name: f.default for name, f in Hyperparameters.__dataclass_fields__.items()}
    assert runlog.defaults((ROOT / "train_gpt2.py").read_text()) == expected
    old = runlog.read(ROOT / "records/2026-11-22_Learn_Faster/fresh_clone_seed1337.txt")
    found = runlog.defaults(next(iter(old.sources.values())))
    assert found["ngrams"] == found["key_offset"] == 0 and found["seed"] == 1337
    assert found["num_iterations"] == 5100 and found["batch_size"] == 512


def test_a_repetition_gives_settings_the_names_that_the_source_knows(tmp_path):
    old = runlog.read(ROOT / "records/2026-11-22_Learn_Faster/fresh_clone_seed1337.txt")
    assert {"--ngrams=6", "--key_offset=1"} <= {*rerun.arguments_of(old)}
    assert len(rerun.arguments_of(old)) == len(old.settings.keys() - rerun.OUR_OWN)
    source = (ROOT / "train_gpt2.py").read_text()
    new = runlog.read(write_log(tmp_path / "a.txt", source=source, max_ngram=6, key_shift=1))
    assert {"--max_ngram=6", "--key_shift=1"} <= {*rerun.arguments_of(new)}


def rewind(path, before, after, **changes):
    """Append a start that resumes a log of write_log at step `before` and logs up to `after`."""
    text = path.read_text()
    write_log(path, first=before + 1, stopped_at=after, **changes)
    header = re.match(r"(.*\n)*?(?=step:|\Z)", path.read_text())[0]
    resumed = f"resume=logs/a/state_step{before:010d}.pt: going on after step {before}\n"
    path.write_text(text + header + resumed + path.read_text().removeprefix(header))
    return runlog.read(path)


@both_formats
def test_fault_10_an_abandoned_branch_is_no_part_of_the_run(old, tmp_path, capsys):
    path = write_log(tmp_path / "a.txt", old=old)
    run = rewind(path, 25, 30, loss=9.0, old=old, hash="2" * 12)
    assert (run.steps, run.reached, run.val_loss) == (20, 30, 4.0)
    assert [step for step, *_ in run.points["val"]] == [0, 20]
    assert [step for step, *_ in run.points["train"]] == list(range(1, 31))
    assert list(run.hashes) == [20 * run.tokens_per_step] and run.data_hash[:3] == "111"
    assert run.fault == "unfinished" and run.last == 40
    report.main([str(path)])
    shown = capsys.readouterr().out
    assert "30 of 40, unfinished" in shown and "4.0000 at step 20" in shown
    with pytest.raises(ValueError, match=r"a\.txt ended at step 20 of 40"):
        compare.check_finished(run)
    assert rewind(path, 15, 15, old=old).reached == 15  # no step yet, by a header alone
    assert rewind(path, 10, 40, loss=2.5, old=old, hash="3" * 12).val_loss == 2.5
    run = runlog.read(path)
    assert run.finished and [step for step, *_ in run.points["val"]] == [0, 20, 40]
    assert set(run.hashes.values()) == {"3" * 12}


def test_fault_10_without_its_line_a_resume_shows_by_its_steps(tmp_path):
    path = append_log(write_log(tmp_path / "a.txt"), first=11, stopped_at=15)
    run = runlog.read(path)
    assert (run.steps, run.reached, len(run.points["train"])) == (0, 15, 15)


def test_fault_10_a_resumed_run_of_the_script_is_read(tiny):
    own = {**tiny, "run_id": "a", "save_every": 2, "keep_checkpoints": 9, "val_loss_every": 1}
    main(Hyperparameters(**own))
    path = f"{tiny['log_dir']}/a.txt"
    whole = runlog.read(path).points
    with open(path) as file:
        text = file.read().partition("\nresult ")[0] + "\n"
    with open(path, "w") as file:
        file.write(text)
    checkpoint = f"{tiny['log_dir']}/a/state_step{2:010d}.pt"
    main(Hyperparameters(**own, resume=checkpoint), StopAfter(1))
    run = runlog.read(path)
    assert run.reached == 3 and run.fault == "unfinished"
    for kind, last in ("val", 3), ("train", 3):
        expected = [point[:2] for point in whole[kind] if point[0] <= last]
        assert [point[:2] for point in run.points[kind]] == expected


LEGAL = {  # settings that a resumed run may have otherwise, and another value of each
    "train_files": "elsewhere/train_*.bin",
    "val_files": "elsewhere/val_*.bin",
    "allow_repeat": True,
    "val_loss_every": 5,
    "target_val_loss": 1.0,
    "save_every": 7,
    "keep_checkpoints": 9,
    "resume": "auto",
    "init": "logs/other/model.pt",
    "log_dir": "other",
    "run_id": "other",
    "device": "cuda",
    "device_batch_size": 2,
    "compile": False,
    "comm_timeout": 9,
}


def test_fault_14_the_settings_that_a_resume_may_change_are_the_scripts():
    assert set(LEGAL) == runlog.RESUMABLE == set(CHANGEABLE_ON_RESUME)


@pytest.mark.parametrize("name", LEGAL)
def test_fault_14_a_legal_change_in_a_resume_is_read(name, tmp_path, capsys):
    line, default = "hyperparameter seed=1\n", vars(Hyperparameters())[name]
    starts = []
    for log, value in (dict(stopped_at=25), default), (dict(first=21), LEGAL[name]):
        text = write_log(tmp_path / "a.txt", **log).read_text()
        text = re.sub(rf"hyperparameter {name}=.*\n", "", text)
        starts.append(text.replace(line, f"{line}hyperparameter {name}={value!r}\n"))
    path = tmp_path / "a.txt"
    path.write_text("".join(starts))
    run = runlog.read(path)
    assert run.finished and run.settings[name] == LEGAL[name]
    assert report.main([str(path)]) == 0
    for other in "learning_rate", "n_layer", "batch_size":
        write_log(path, stopped_at=25)
        append_log(path, first=21, **{other: 3})
        with pytest.raises(ValueError, match="if resumed, the same source and settings again"):
            runlog.read(path)


@pytest.mark.parametrize("literal", ["-" * 10**5 + "1", "1" + "+1" * 10**5, "1e999", "9" * 5000])
@pytest.mark.parametrize("name", ["num_iterations", "batch_size", "anything"])
def test_fault_14_a_literal_that_python_cannot_read_is_one_sentence(name, literal, tmp_path):
    path = write_log(tmp_path / "a.txt", anything=1)
    path.write_text(re.sub(rf"(hyperparameter {name})=.*", rf"\1={literal}", path.read_text()))
    try:
        report.main([str(path)])
    except ValueError as error:
        assert "a.txt is no log of a training run" in str(error) and "\n" not in str(error)
    else:
        assert (name, literal) == ("anything", "1e999")


@pytest.mark.parametrize(
    "before, after",
    [
        ("device:CPU one ", "device:CPU" + 60_000 * " " + "one "),
        ("device:CPU one processes:1", "device:CPU" + 60_000 * " "),
        ("tokens/s:4571 ", "tokens/s:4571 " + 60_000 * "a" + " "),
        ("torch:2.13.0 ", "torch:2.13.0 " + 60_000 * "a" + " "),
        ("commit:abcdef0123456", "commit:" + 60_000 * "a"),
    ],
)
def test_fault_14_long_lines_of_a_log_take_no_time(before, after, tmp_path):
    path = write_log(tmp_path / "a.txt")
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    start = time.perf_counter()
    run = runlog.read(path)
    assert time.perf_counter() - start < 0.5 and run.finished
    public = PUBLIC.replace("H100 80GB HBM3          Off", "H100" + 60_000 * " " + "x")
    path.write_text(public)
    start = time.perf_counter()
    assert "device" not in runlog.read(path).facts
    assert time.perf_counter() - start < 0.5


def test_fault_14_a_pipe_is_no_log(tmp_path):
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(ValueError, match=r"a\.txt is not a regular file"):
        report.main([str(tmp_path / "a.txt")])
    write_log(tmp_path / "b.txt")
    assert [run.path.name for run in runlog.logs_in(tmp_path)] == ["b.txt"]


def test_groups_take_each_run_once_and_count_every_run(tmp_path, capsys):
    write_group(tmp_path / "X", "a", [1.2, 1.3])
    write_group(tmp_path / "Y", "a", [2.2, 2.3])
    write_log(tmp_path / "X" / "a_seed3.txt", seed=3, stopped_at=30, commit="f" * 40 + "-dirty")
    groups = report.collect([str(tmp_path / "X"), str(tmp_path / "Y")])
    assert {group: len(runs) for group, runs in groups.items()} == {"X/a": 3, "Y/a": 2}
    assert report.main([str(tmp_path / "X")]) == 0
    shown = capsys.readouterr().out
    assert "| a | 3 | 40 | n/a | n/a | 7.0 |" in shown
    assert "no mean of their groups: a_seed3.txt (step 30 of 40, unfinished)." in shown
    assert "| 30 of 40, unfinished | 4.0000 at step 20 |" in shown and "fffffffff-dirty" in shown
    assert report.main([str(tmp_path / "Y")]) == 0
    assert "| a | 2 | 40 | 2.2500 (sd 0.0707) | 0 s | 7.0 |" in capsys.readouterr().out
    with pytest.raises(ValueError, match="is named twice"):
        report.collect([str(tmp_path / "X"), str(tmp_path / "X" / "a_seed1.txt")])
    with pytest.raises(ValueError, match="the runs of a hold no step after step 0 to draw"):
        report.draw({"a": [runlog.read(write_log(tmp_path / "b.txt", stopped_at=0))]}, None)
    equals = write_log(tmp_path / "lr=0.1_seed1.txt")
    assert list(report.collect([str(equals)])) == ["lr=0.1"]


def without_result(path, **changes):
    text = write_log(path, **changes).read_text()
    path.write_text(re.sub("^result .*\n", "", text, flags=re.M))


FAULTS = {  # of a third run: how it failed, what report says of its step
    "cut": (lambda path, **own: write_log(path, stopped_at=30, **own), "30 of 40, unf"),
    "no validation": (
        lambda path, **own: write_log(path, stopped_at=9, first=1, **own),
        "9 of 40, unf",
    ),
    "only a header": (lambda path, **own: write_log(path, stopped_at=0, first=1, **own), "0 of 40"),
    "diverged": (lambda path, **own: write_log(path, float("nan"), **own), "40 of 40, diverged"),
    "no result": (without_result, "40 of 40, unfinished"),
}


@both_formats
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_3_no_failed_run_is_left_out_unseen(fault, old, tmp_path, capsys):
    write, step = FAULTS[fault]
    folder = tmp_path / "a"
    write_group(folder, "a", [1.2, 1.3], old=old)
    write(folder / "a_seed3.txt", seed=3, old=old)
    assert report.main([str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "| a | 3 | 40 | n/a | n/a |" in shown and f"a_seed3.txt (step {step}" in shown
    for n in [], ["--n=3"]:
        with pytest.raises(ValueError, match=r"a_seed3.txt (ended|diverged) at step \d+ of 40"):
            compare.main([str(folder), "--target=1.5", *n])
    with pytest.raises(ValueError, match="a has 3 runs, but n=2"):
        compare.main([str(folder), "--target=1.5", "--n=2"])
    with pytest.raises(ValueError, match=r"a_seed3.txt (ended|diverged) at step"):
        rerun.choose(folder, None)
    write_rounds(tmp_path / "ab", old=old)
    write(tmp_path / "ab" / "B_round2.txt", seed=2, old=old)
    with pytest.raises(ValueError, match=r"B_round2.txt (ended|diverged) at step \d+ of 40"):
        ab.main(["--logs", str(tmp_path / "ab")])


@both_formats
def test_damaged_log_in_a_folder_is_named(old, tmp_path):
    folder = tmp_path / "a"
    write_group(folder, "a", [1.2, 1.3], old=old)
    write_rounds(tmp_path / "ab", old=old)
    for path in folder / "a_seed3.txt", tmp_path / "ab" / "B_round3.txt":
        text = write_log(path, old=old).read_text()
        path.write_text(text.replace("hyperparameter batch_size=4", "hyperparameter batch_size="))
    for tool, arguments in {
        report: [str(folder)],
        compare: [str(folder), "--target=1.5"],
        ab: ["--logs", str(tmp_path / "ab")],
    }.items():
        with pytest.raises(ValueError, match=r"(a_seed3|B_round3).txt is no log of a training run"):
            tool.main(arguments)


def test_round_without_a_side_is_named(tmp_path):
    write_rounds(tmp_path)
    for alone, missing in ("A_round3", "B_round3"), ("B_round4", "A_round4"):
        write_log(tmp_path / f"{alone}.txt", seed=3)
        with pytest.raises(ValueError, match=f"but {missing}.txt is missing"):
            ab.main(["--logs", str(tmp_path)])
        (tmp_path / f"{alone}.txt").unlink()


OTHER_FACTS = {"val_hash": "bb", "processes": 2, "products": "torch.bfloat16"}


@both_formats
@pytest.mark.parametrize("name", OTHER_FACTS)
def test_fault_2_other_headers_do_not_mix(name, old, tmp_path):
    other = {name: OTHER_FACTS[name]}
    write_group(tmp_path, "a", [1.2, 1.3, 1.25], old=old)
    # in a group
    write_log(tmp_path / "a_seed3.txt", 1.25, seed=3, old=old, **other)
    for tool, more in (report, []), (compare, ["--target=1.5"]):
        with pytest.raises(ValueError, match=f"of these runs differ: .*{other[name]} in"):
            tool.main([str(tmp_path), *more])
    # between two starts of one run
    path = write_log(tmp_path / "a_seed3.txt", seed=3, stopped_at=25, old=old)
    append_log(path, first=21, seed=3, old=old, **other)
    said = f"a_seed3.txt differ between its starts, {FACTS[name]} then {other[name]}"
    write_rounds(tmp_path / "ab", old=old)
    (tmp_path / "ab" / "B_round2.txt").write_text(path.read_text().replace("seed=3", "seed=2"))
    for tool, arguments in {
        report: [str(tmp_path)],
        compare: [str(tmp_path), "--target=1.5"],
        rerun: [str(tmp_path)],
        ab: ["--logs", str(tmp_path / "ab")],
    }.items():
        with pytest.raises(ValueError, match="differ between its starts" if tool is ab else said):
            if tool is rerun:
                rerun.choose(tmp_path, None)
            else:
                tool.main(arguments)


def test_groups_of_other_headers_stand_side_by_side_but_not_in_a_picture(tmp_path, capsys):
    write_group(tmp_path, "a", [1.2, 1.3])
    write_group(tmp_path, "b", [1.2, 1.3], processes=2)
    picture = ["--picture", str(tmp_path / "p.png")]
    assert report.main([str(tmp_path), *picture]) == 0
    write_group(tmp_path, "b", [1.2, 1.3], val_hash="bb")
    assert report.main([str(tmp_path)]) == 0 and "| val hash |" in capsys.readouterr().out
    with pytest.raises(
        ValueError, match=r"the validation tokens \(val_hash\) of these runs differ"
    ):
        report.main([str(tmp_path), *picture])


@both_formats
def test_fault_2_prolonged_runs_do_not_mix_with_others(old, tmp_path, capsys):
    groups = {"grown": [1.2, 1.3], "direct": [1.25, 1.35], "other": [1.2, 1.3]}
    for name, losses in groups.items():
        write_group(tmp_path / name, "a", losses, old=old)
    for seed, loss in enumerate(groups["grown"], 1):
        path = tmp_path / "grown" / f"a_seed{seed}.txt"
        write_log(path, num_iterations=20, seed=seed, old=old)
        append_log(path, first=21, loss=loss, seed=seed, old=old)
        # resumed under another name: its beginning is in another log
        path = tmp_path / "other" / f"a_seed{seed}.txt"
        write_log(path, loss, first=21, seed=seed, old=old)
    grown = runlog.read(tmp_path / "grown" / "a_seed1.txt")
    assert (grown.finished, grown.planned, grown.last, grown.val_loss) == (True, (20, 40), 40, 1.2)
    assert runlog.read(path).planned == (None, 40)
    for name in groups:
        assert report.main([str(tmp_path / name)]) == 0
        assert compare.main([str(tmp_path / name), "--target=1.5"]) == 0
    capsys.readouterr()
    mixed = [
        f"x={tmp_path}/{name}/a_seed{seed}.txt" for name, seed in (("grown", 1), ("direct", 2))
    ]
    with pytest.raises(ValueError, match=r"the plan .* differ: 20 then 40 in .*, 40 in"):
        report.main(mixed)
    with pytest.raises(ValueError, match="has another plan than"):
        compare.main([*mixed, "--target=1.5"])
    for name in "grown", "other":
        with pytest.raises(ValueError, match="the plans of these runs differ: prolonged in"):
            compare.main([str(tmp_path / name), "--against", str(tmp_path / "direct")])
        with pytest.raises(ValueError, match="was prolonged in a resume"):
            rerun.choose(tmp_path / name, None)


def test_fault_11_cells_are_escaped(tmp_path, capsys):
    bad = "a|b`c`<i>d\\<!-- end -->"
    assert report.markdown(["x"], [["a\nb"]]) == "| x |\n| --- |\n| a b |"
    shown = "a\\|b\\`c\\`&lt;i&gt;d\\\\&lt;!-- end --&gt;"
    assert report.markdown(["x"], [[bad]]).splitlines()[-1] == f"| {shown} |"
    for side, torch_version in ("A", "2.13.0|x"), ("B", "2.5.1"):
        for i in 1, 2:
            name, path = f"{side}_round{i}", tmp_path / f"{side}_round{i}.txt"
            write_log(path, 1 + i / 10, seed=i, device=bad, torch=torch_version, run_id=name)
    tables = {
        report: [str(tmp_path)],
        compare: [f"{bad}={tmp_path}/A*.txt", "--target=1.5"],
        ab: ["--logs", str(tmp_path)],
    }
    for tool, arguments in tables.items():
        tool.main(arguments)
        printed = capsys.readouterr().out
        assert shown in printed and not re.search(r"<[!\w]|[^\\]`", printed), tool
        rows = [line for line in printed.splitlines() if line.startswith("|")]
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows if "---" not in row}) < 3
    lever = "script|x    10.0   1.000 (1.00..1.00)   n/a   100 (1.00)   n/a   1.0  1.0  2  1.0"
    (tmp_path / "levers.out").write_text(lever + "\n")
    lever_table.main([str(tmp_path / "levers.out")])
    assert "| script\\|x | 10 to 10 ms |" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "soak: 30 cycles", "=" * 100 + "\n", "hyperparameter a=1\n"])
def test_other_files_are_no_logs(text, tmp_path):
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(ValueError, match=r"a\.txt is no log of a training run"):
        runlog.read(tmp_path / "a.txt")
    assert runlog.logs_in(tmp_path) == []


@given(st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_damaged_logs_are_read_or_refused(tmp_path_factory, random):
    folder = tmp_path_factory.mktemp("damaged")
    ours = [write_log(folder / "a.txt", old=old).read_text() for old in (False, True)]
    text = random.choice([PUBLIC, *ours])
    for _ in range(random.randint(1, 20)):
        i = random.randrange(len(text))
        text = text[:i] + random.choice(["", "x", "\n", ":", "\0", "é"]) + text[i + 1 :]
    (folder / "a.txt").write_text(text)
    try:
        run = runlog.read(folder / "a.txt")
        assert isinstance(report.table({"a": [run]}), str)
    except ValueError as error:
        assert "no log of a training run" in str(error)


# ---------------------------------------------------------------------------
# statistics


def figures(text):
    """Return [(name, value)] of what compare.py prints as name=value."""
    found = re.findall(r"(\w+)=(-?\d+(?:\.\d+)?(?:e-\d+)?)", text)
    return [(name, float(value)) for name, value in found]


losses = st.lists(st.integers(10000, 14000).map(lambda x: x / 10000), min_size=3, max_size=8)


@given(losses.filter(lambda x: len(set(x)) > 1))
@settings(max_examples=30, deadline=None)
def test_target_test_is_scipys(tmp_path_factory, x):
    logs = write_group(tmp_path_factory.mktemp("logs"), "a", x)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = compare.main([*logs, "--target=1.5", f"--n={len(x)}"])
    known = stats.ttest_1samp(x, 1.5, alternative="less")
    shown = dict(figures(printed.getvalue())[:2])
    assert shown["t"] == pytest.approx(known.statistic, abs=0.006)
    assert shown["p"] == pytest.approx(known.pvalue, rel=0.06)
    assert f"| {len(x)} | {np.mean(x):.4f} | {np.std(x, ddof=1):.4f} |" in printed.getvalue()
    assert (status == 0) == ("\nRecord: " in printed.getvalue()) == (known.pvalue < 0.01)


@given(losses.filter(lambda x: len(set(x)) > 1), losses.filter(lambda x: len(set(x)) > 1))
@settings(max_examples=30, deadline=None)
def test_welchs_test_is_scipys(tmp_path_factory, x, y):
    folder, printed = tmp_path_factory.mktemp("logs"), io.StringIO()
    a, b = write_group(folder, "a", x), write_group(folder, "b", y, learning_rate=0.02)
    with contextlib.redirect_stdout(printed):
        assert compare.main([*a, "--against", *b]) == 0
    known = stats.ttest_ind(x, y, equal_var=False)
    shown = figures(printed.getvalue())
    assert shown[0] == ("t", pytest.approx(known.statistic, abs=0.006))
    assert shown[1] == ("df", pytest.approx(known.df, abs=0.06))
    assert shown[2] == ("p", pytest.approx(known.pvalue, rel=0.06))
    low, high = known.confidence_interval(0.95)
    assert f"95% interval {low:+.4f} to {high:+.4f}" in printed.getvalue()
    assert "They differ in: learning_rate 0.01 against 0.02." in printed.getvalue()
    assert "No verdict" in printed.getvalue()


def test_welchs_test_of_a_published_example(tmp_path, capsys):
    # two samples with known sums: means 2 and 4, variances 1 and 4, n=3 each
    a, b = write_group(tmp_path, "a", [1, 2, 3]), write_group(tmp_path, "b", [2, 4, 6])
    picture = tmp_path / "dots.png"
    assert compare.main([*a, "--against", *b, "--n=3", "--picture", str(picture)]) == 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    # by hand: t = -2 / sqrt(1/3 + 4/3) = -1.549; df = (5/3)^2 / ((1/9 + 16/9) / 2) = 2.941
    assert "t=-1.55 df=2.9" in capsys.readouterr().out


@pytest.mark.parametrize("deviations", [[1.0], [1.0, 1.0], [0.5, 2.0]])
@pytest.mark.parametrize("effect", [0.8, 2.0])
def test_least_n_has_the_power_by_simulation(effect, deviations):
    n = compare.least_n(effect, deviations, alpha=0.01)
    generator = np.random.default_rng(0)

    def power(n):
        x = generator.normal(-effect, deviations[0], (n, 20000))
        if len(deviations) == 1:
            return (stats.ttest_1samp(x, 0, alternative="less").pvalue < 0.01).mean()
        y = generator.normal(0, deviations[1], (n, 20000))
        test = stats.ttest_ind(x, y, equal_var=False, alternative="less")
        return (test.pvalue < 0.01).mean()

    assert power(n) > 0.9 - 0.02
    assert n == compare.FEWEST or power(n - 1) < 0.9 + 0.02


@pytest.mark.parametrize(
    "case, sentence",
    {
        "too few": "a has 3 runs, but n=5 was fixed before them",
        "too many": "a has 3 runs, but n=2 was fixed before them",
        "one": "a has 1 run: a test needs at least 2",
        "cut": "ended at step 20 of 40: run it to its end",
        "a seed twice": r"a holds the seeds \[1\] more than once",
        "settings": "a group repeats one experiment",
        "source": "has another source than",
        "torch": "has another torch than",
        "copy": "a_seed1.txt and .*a_seed3.txt have the same losses at every step",
        "equal": "all losses of a are 1.2: no spread, no test",
        "sequence_length": r"the context \(sequence_length\) of these runs differ: 8 in .*, 4 in",
        "more tokens": "a read 1,280 tokens and b 640: the better side may read fewer",
        "val_hash": r"the validation tokens \(val_hash\) of these runs differ: aa in .*, bb in",
        "hash": r"the training data differ: data_hash after 640 tokens is 222222222222 in",
        "val_tokens": "the number of validation tokens of these runs differ",
        "device": "the hardware of these runs differ: CPU one in .*, CPU two in",
        "processes": "the number of processes of these runs differ",
        "products": "the dtype of products of these runs differ",
        "target_val_loss": "the target of these runs differ: 1.5 in .*, 1.6 in",
        "both": "a log stands on both sides",
        "target": r"--target=1.7 is not the target that the logs name, 1.5",
    }.items(),
)
def test_refusals(case, sentence, tmp_path, capsys):
    x = [1.2, 1.3, 1.25]
    a, b = write_group(tmp_path, "a", x), None
    arguments = ["--target=1.5"]
    other = {
        "val_hash": "bb",
        "hash": "2" * 12,
        "val_tokens": 72,
        "device": "CPU two",
        "processes": 2,
        "products": "torch.bfloat16",
        "target_val_loss": 1.6,
        "sequence_length": 4,
    }
    if case in other:
        b = write_group(tmp_path, "b", x, **{case: other[case]})
    elif case == "both":
        b = a
    elif case in ("settings", "source", "torch"):
        change = {
            "settings": {"batch_size": 8},
            "source": {"source": "another"},
            "torch": {"torch": "2.5.1"},
        }[case]
        write_log(tmp_path / "a_seed3.txt", 1.25, seed=3, **change)
    elif case == "copy":
        write_log(tmp_path / "a_seed3.txt", 1.2, seed=3, curve=1)
    elif case == "equal":
        a = write_group(tmp_path, "a", [1.2, 1.2, 1.2])
    elif case == "more tokens":
        b = [
            str(write_log(tmp_path / f"b_seed{i}.txt", 1.3 + i / 10, seed=i, num_iterations=20))
            for i in (1, 2, 3)
        ]
    elif case == "cut":
        write_log(tmp_path / "a_seed3.txt", seed=3, stopped_at=30)
    elif case == "a seed twice":
        write_log(tmp_path / "a_seed3.txt", seed=1)
    elif case == "one":
        a = a[:1]
    elif case == "target":
        arguments = ["--target=1.7"]
    else:
        arguments.append({"too few": "--n=5", "too many": "--n=2"}[case])
    if b:
        arguments = ["--against", *b, "--n=3"]
    with pytest.raises(ValueError, match=sentence):
        compare.main([*a, *arguments])
    assert "ecord" not in capsys.readouterr().out


def test_no_record_without_significance_or_hashes(tmp_path, capsys):
    weak = write_group(tmp_path, "weak", [1.4999, 1.4, 1.6])
    assert compare.main([*weak, "--target=1.5", "--n=3"]) == 1
    assert "No record: p=0.5 is not below 0.01" in capsys.readouterr().out
    for i in range(3):
        (tmp_path / f"public{i}").mkdir()
        text = PUBLIC.replace("3.2791", f"3.2{i}91")
        (tmp_path / f"public{i}" / "d7304a6-cc43.txt").write_text(text)
    assert compare.main([f"p={tmp_path}/public*", "--target=3.28", "--n=3"]) == 1
    assert "No record: the logs do not hold the validation tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--target=1.5", "--n=9"], "compare.py: a has 2 runs, but n=9"),
        (["--target=x"], "invalid float value: 'x'"),
        ([], "give --target or --against"),
        (["--target=1", "--alpha=0.05"], "--alpha=0.05 must be above 0 and at most 0.01"),
    ],
)
def test_mistakes_are_one_sentence(arguments, said, tmp_path, monkeypatch, capsys):
    logs = write_group(tmp_path, "a", [1.2, 1.3])
    monkeypatch.setattr(sys, "argv", ["records/tools/compare.py", *logs, *arguments])
    with pytest.raises(SystemExit) as exit_:
        report.command(compare.main)
    assert exit_.value.code not in (0, None)
    assert said in f"{exit_.value.code}{capsys.readouterr().err}"


def test_comparison_without_a_verdict_is_no_failure(tmp_path, capsys):
    a, b = write_group(tmp_path, "a", [1.2, 1.3]), write_group(tmp_path, "b", [1.25, 1.35])
    for arguments in ["--target=1.5"], ["--against", *b]:
        with pytest.raises(SystemExit) as exit_, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["compare.py", *a, *arguments])
            report.command(compare.main)
        assert exit_.value.code == 0 and "\nNo verdict: --n" in capsys.readouterr().out
    assert compare.main([*a, "--against", *b, "--n=2"]) == 1  # asked for, and not significant
    assert "\nNo record: p=" in capsys.readouterr().out


def test_sources_are_shown_where_they_differ(tmp_path, capsys):
    one, two = ("\n".join(f"{text} = {i}" for i in range(30)) for text in ("x", "y"))
    a = write_group(tmp_path, "a", [1.2, 1.3], source=f"same = 0\n{one[:11]}\nalso = 1")
    b = write_group(tmp_path, "b", [1.25, 1.35], source=f"same = 0\n{two[:11]}\nalso = 1")
    assert compare.main([*a, "--against", *b]) == 0
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert lines[:2] == [f"--- {b[0]}: train_gpt2.py", f"+++ {a[0]}: train_gpt2.py"]
    assert lines[3:] == ["-y = 0", "-y = 1", "+x = 0", "+x = 1"]
    assert "They differ in: source of train_gpt2.py." in printed.out
    assert "---" not in printed.out.replace("| --- ", "")  # a README's block holds no source
    b = write_group(tmp_path, "b", [1.25, 1.35], source=two, old=True)
    assert compare.main([*a, "--against", *b]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == compare.DIFF + 1 == 41
    assert re.fullmatch(r"\.\.\. and \d+ lines more", lines[-1])
    assert compare.main([*a, "--against", *write_group(tmp_path, "c", [1.4, 1.5])]) == 0


def test_old_and_new_logs_compare(tmp_path, capsys):
    a = write_group(tmp_path, "a", [1.2, 1.21, 1.22])
    b = write_group(tmp_path, "b", [1.3, 1.31, 1.32], old=True)
    assert compare.main([*a, "--against", *b, "--n=3"]) == 0
    shown = capsys.readouterr().out
    # no setting that only one script has counts where it has the value of the other's script
    assert "They differ in: source of data/shards.py." in shown and "\nRecord: p=" in shown
    said = "data_hash has 12 and 16 digits, two functions that do not compare"
    assert f"{said}; all training tokens: 12345 in both." in shown
    assert compare.main([*b, "--against", *a]) == 0
    # other data, as far as the logs tell: no refusal, and no record
    other = write_group(tmp_path, "c", [1.3, 1.31, 1.32], old=True, train_tokens=99)
    capsys.readouterr()
    assert compare.main([*a, "--against", *other, "--n=3"]) == 1
    shown = capsys.readouterr().out
    assert f"{said}; all training tokens: 12345 and 99." in shown
    assert "No record: the logs do not hold the training tokens (data_hash)." in shown
    # of equal length they are compared, on both sides
    for old in False, True:
        for name in "d", "e":
            write_group(tmp_path, name, [1.2, 1.3], old=old, hash="e" * (16 if old else 12))
        arguments = [*a[:2], "--against", f"{tmp_path}/d*"]
        if old:
            arguments = [*b[:2], "--against", f"{tmp_path}/d*"]
        with pytest.raises(ValueError, match="the training data differ"):
            compare.main(arguments)
    other = write_group(tmp_path, "f", [1.3, 1.31, 1.32], old=True, val_hash="bb")
    with pytest.raises(
        ValueError, match=r"the validation tokens \(val_hash\) of these runs differ"
    ):
        compare.main([*a, "--against", *other])


@pytest.mark.parametrize(
    "name, value, differs",
    [
        ("muon_coefficients", "quintic", False),
        ("muon_coefficients", "polar_express", True),
        ("attention", "auto", False),
        ("attention", "math", True),
        ("dtype", "auto", False),
        ("dtype", "float32", True),
        ("checksum_every", 7, False),
        ("bytes_per_token", 0.7, False),
        ("weight_decay", 0.1, True),
    ],
)
def test_settings_of_one_side_only(name, value, differs, tmp_path, capsys):
    with_it = runlog.read(write_log(tmp_path / "a.txt", **{name: value}))
    without = runlog.read(write_log(tmp_path / "b.txt"))
    without.settings.pop(name, None)
    for but in runlog.INCIDENTAL, runlog.NAMES:
        said = compare.differences(with_it, without, but)
        assert said.startswith(f"{name} {value!r} against") if differs else said == "nothing"


@pytest.mark.parametrize(
    "tool, arguments, missing",
    [
        ("compare", ["--target=1.5"], "scipy"),
        ("ab", [], "scipy"),
        ("rerun", [], "scipy"),
        ("report", ["--picture=p.png"], "matplotlib"),
    ],
)
def test_missing_packages_are_one_sentence(tool, arguments, missing, tmp_path):
    logs = write_group(tmp_path, "a", [1.2, 1.3])
    path = ROOT / "records" / "tools" / f"{tool}.py"
    code = f"""import runpy, sys
sys.modules[{missing!r}] = None
sys.argv = [{str(path)!r}, *{[*logs, *arguments]!r}]
runpy.run_path(sys.argv[0], run_name="__main__")"""
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, timeout=99, cwd=tmp_path)
    fix = f"{sys.executable} -m pip install -r records/requirements.txt"
    assert done.returncode == 1
    assert re.fullmatch(
        rf"{tool}.py: {missing}\S* is not installed: {re.escape(fix)}\n", done.stderr
    )


# ---------------------------------------------------------------------------
# two commands in turn


def test_interval_of_known_ratios():
    a, b = np.array([10.0, 20.0, 40.0]), np.array([11.0, 22.0, 44.0])
    assert ab.interval(a, b, ratio=True) == pytest.approx([1.1, 1.1, 1.1])
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(1000):
        a = np.exp(generator.normal(0, 0.1, 5))
        b = 1.2 * a * np.exp(generator.normal(0, 0.05, 5))
        _, low, high = ab.interval(a, b, ratio=True)
        covered += low < 1.2 < high
    assert 930 < covered < 970
    difference = ab.interval([1.0, 2.0], [1.5, 2.7], ratio=False)
    known = stats.ttest_1samp([0.5, 0.7], 0).confidence_interval(0.95)
    assert difference == pytest.approx([0.6, *known])


def write_rounds(folder, old=False, **of_b):
    for round_ in (1, 2):
        write_log(folder / f"A_round{round_}.txt", ms=100 * round_, seed=round_, old=old)
        b = {"ms": 150 * round_, "memory": 250, "seed": round_, "old": old} | of_b
        write_log(folder / f"B_round{round_}.txt", **b)


def test_framework_table(tmp_path, capsys):
    write_rounds(tmp_path, torch="2.5.1")
    picture = tmp_path / "ab.png"
    assert ab.main(["--logs", str(tmp_path), "--picture", str(picture), "--names", "x", "y"]) == 0
    shown = capsys.readouterr().out
    assert "B differs in: torch 2.13.0 against 2.5.1." in shown
    assert (
        "| iteration, ms | 150.0 (100.0 to 200.0) | 225.0 (150.0 to 300.0) | 1.500 (1.500 to "
        "1.500) |" in shown
    )
    assert "| 0.500 (0.500 to 0.500) |" in shown and "+0.0000 (+0.0000 to +0.0000)" in shown
    assert "| GPU busy (NVML), % | n/a | n/a | n/a |" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")
    write_rounds(tmp_path, torch="2.5.1", seed=2)
    write_log(tmp_path / "A_round1.txt", seed=2)
    ab.main(["--logs", str(tmp_path)])
    assert "| +0.0000, one seed |" in capsys.readouterr().out
    (tmp_path / "busy.json").write_text(
        json.dumps({"A_round1": 90, "B_round1": 45, "A_round2": 80, "B_round2": 40})
    )
    ab.main(["--logs", str(tmp_path)])
    assert "| 85 (80 to 90) | 42 (40 to 45) | 0.500" in capsys.readouterr().out


@pytest.mark.parametrize(
    "of_b, sentence",
    [
        (
            {"torch": "2.5.1", "source": "other"},
            "compared by one script with one set of settings, but "
            "these differ: source of train_gpt2.py",
        ),
        ({"torch": "2.5.1", "batch_size": 8}, "one set of settings"),
        ({"torch": "2.5.1", "device_batch_size": 8}, "one set of settings"),
        ({"hash": "2" * 12}, "the training data differ"),
        ({"val_hash": "bb"}, "the validation tokens"),
        ({"stopped_at": 30}, r"B_round1.txt ended at step 20 of 40"),
    ],
)
def test_unlike_sides_are_refused(of_b, sentence, tmp_path):
    write_rounds(tmp_path, **of_b)
    with pytest.raises(ValueError, match=sentence):
        ab.main(["--logs", str(tmp_path)])


def test_old_script_against_new(tmp_path, capsys):
    write_rounds(tmp_path, old=True)
    for round_ in (1, 2):
        write_log(tmp_path / f"B_round{round_}.txt", ms=50 * round_, memory=250, seed=round_)
    assert ab.main(["--logs", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert (
        "A: torch 2.13.0, python 3.11.7, numpy 2.0, products torch.float32, threads 2. B: " in shown
    )
    assert "B differs in: source of data/shards.py." in shown
    assert "data_hash has 16 and 12 digits, two functions" in shown
    assert "| 0.500 (0.500 to 0.500) |" in shown
    write_log(tmp_path / "B_round1.txt", seed=1, train_tokens=99)
    with pytest.raises(ValueError, match="logged no data_hash after as many tokens"):
        ab.main(["--logs", str(tmp_path)])


def test_times_are_not_rounded_to_milliseconds(tmp_path):
    a, b = (runlog.read(write_log(tmp_path / f"{ms}.txt", ms=ms)) for ms in (141.8, 141.4))
    assert ab.step_ms(b) / ab.step_ms(a) == pytest.approx(141.4 / 141.8, abs=0.0012)


# stands for train_gpt2.py: leaves a log, and beside it which interpreter ran, with which caches
FAKE = """
import json, os, pathlib, sys
fields = dict(argument[2:].split("=", 1) for argument in sys.argv[1:])
if "fail" in fields:
    sys.exit("one sentence")
out = pathlib.Path(fields["log_dir"]) / (fields["run_id"] + ".txt")
text = pathlib.Path(fields["log"]).read_text().replace("torch:2.13.0", "torch:" + fields["torch"])
text = text.replace("seed=1", "seed=" + fields["seed"])
out.write_text(text[: text.index("step:30/")] if "cut" in fields else text)
caches = [os.environ.get(name) for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR")]
said = dict(caches=caches, empty=os.listdir(caches[1] or "/") == [], first=sys.argv[0],
            python=os.environ["PYTHON"], mark=os.environ.get("MARK"), seed=fields["seed"])
out.with_suffix(".json").write_text(json.dumps(said))
"""


def test_two_commands_in_turn(tmp_path, monkeypatch):
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\nprintf '40\\n60\\n'\n")
    smi.chmod(0o755)
    (tmp_path / "fake.py").write_text(FAKE)
    log, out = write_log(tmp_path / "log.txt"), "out"
    script = f"python {tmp_path}/fake.py --log={log} --torch={torch.__version__}"
    python_a = tmp_path / "bin" / "python_a"  # another interpreter, which marks what it runs
    python_a.write_text(f'#!/bin/sh\nMARK=a exec {sys.executable} "$@"\n')
    python_a.chmod(0o755)
    command = [
        sys.executable,
        ROOT / "records" / "tools" / "ab.py",
        script,
        f"{script} --more=2",
        f"--python_a={python_a}",
        "--rounds=2",
        "--cold",
        f"--out={tmp_path}/{out}",
    ]
    environment = {**os.environ, "PATH": f"{smi.parent}:{os.environ['PATH']}"}

    done = subprocess.run(command, capture_output=True, text=True, timeout=99, env=environment)
    assert done.returncode == 0, done.stderr
    order = [line.partition(":")[0] for line in done.stderr.splitlines()]
    assert order == ["A_round1", "B_round1", "B_round2", "A_round2"]
    said = {path.stem: json.loads(path.read_text()) for path in (tmp_path / out).glob("?_*.json")}
    for name, of_run in said.items():
        mine = (str(python_a), "a") if name[0] == "A" else (sys.executable, None)
        assert ((of_run["python"], of_run["mark"]), of_run["seed"]) == (mine, name[-1])
        assert of_run["caches"][0] == of_run["caches"][1] and of_run["empty"]
    assert len({of_run["caches"][0] for of_run in said.values()}) == 4
    assert "| iteration, ms |" in done.stdout and "| 1.000 (1.000 to 1.000) |" in done.stdout
    assert "| 50 (50 to 50) | 50 (50 to 50) | 1.000" in done.stdout
    assert not list((tmp_path / out).glob("*.out"))
    with pytest.raises(ValueError, match="holds logs already"):
        ab.main(list(map(str, command[2:])))
    monkeypatch.setattr(ab, "torch_of", lambda python: torch.__version__)
    monkeypatch.setenv("PYTHON", sys.executable)
    for field, said in (
        ("--fail=1", "ended with 1: one sentence"),
        ("--cut=1", "ended at step 20 of"),
    ):
        out += "2"
        with pytest.raises(ValueError, match=said):
            ab.main([script, f"{script} {field}", "--rounds=2", f"--out={tmp_path}/{out}"])
    with pytest.raises(ValueError, match="must start with python, torchrun or bash run"):
        ab.side_command("nice python train_gpt2.py", "p", "x", tmp_path, 1)
    assert ab.side_command("torchrun --standalone x.py", "p", "n", "f", 1)[0] == [
        "p",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "x.py",
        "--run_id=n",
        "--log_dir=f",
        "--seed=1",
    ]
    argv, environment = ab.side_command("bash run.sh", "p", "n", "f", 1)
    assert environment["PYTHON"] == "p" and argv[:3] == ["bash", "run.sh", "--run_id=n"]
    assert argv[3:] == ["--log_dir=f", "--seed=1"]
    # run.sh goes to its own folder, so that of the log is named from there
    clone = tmp_path / "clone"
    argv, _ = ab.side_command(f"bash {clone}/run.sh", "p", "n", tmp_path / "f", 1)
    assert argv[:2] == ["bash", f"{clone}/run.sh"] and argv[3] == "--log_dir=../f"
    assert ab.side_command(f"python {clone}/train_gpt2.py", "p", "n", "f", 1)[0][:2] == [
        "p",
        f"{clone}/train_gpt2.py",
    ]


# ---------------------------------------------------------------------------
# a record run again


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """A folder with the logs of a tiny record, two seeds."""
    folder = tmp_path_factory.mktemp("record")
    stream = np.cumsum(np.random.default_rng(0).integers(1, 4, size=4000)) % 64
    write_shard(folder / "data" / "train_0.bin", stream[:3000])
    write_shard(folder / "data" / "val_0.bin", stream[3000:])
    for seed in (1, 2):
        main(
            Hyperparameters(
                **{
                    **TINY,
                    "train_files": f"{folder}/data/train_*.bin",
                    "log_dir": str(folder),
                    "val_files": f"{folder}/data/val_*.bin",
                    "run_id": f"tiny_seed{seed}",
                    "seed": seed,
                }
            )
        )
    return folder


def test_fault_11_record_runs_again_from_its_log(record, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", "")
    logs = f"--log_dir={tmp_path}"
    assert rerun.main([str(record), "tiny_seed2", logs]) == 0
    shown = capfd.readouterr().out
    first, again = re.search(r"seed 2, loss (\S+); again: seed 2, loss (\S+),", shown).groups()
    assert float(first) == pytest.approx(float(again), abs=0.002) and "Within the spread" in shown
    warning, _, later = shown.partition(f"executing the code in {record}/tiny_seed2.txt: only do")
    assert later and "step:" not in warning and "step:1/6 train_loss" in later
    run = runlog.read(next(tmp_path.glob("rerun_tiny_seed2_*.txt")))
    assert run.sources == runlog.read(record / "tiny_seed2.txt").sources
    assert "commit" not in run.facts, "it ran the logged sources, outside the repository"


@pytest.mark.parametrize(
    "name, files",
    [("2026-11-21_CPU_Record/muon_seed1", 4), ("2026-11-21_Step/fresh_clone_seed1337", 5)],
)
def test_old_record_runs_its_own_files(name, files, record, tmp_path, monkeypatch, capfd):
    """With old flags; its log compares with that of today's script."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/data")  # as other programs may leave it
    run = runlog.read(ROOT / "records" / f"{name}.txt")
    new = [runlog.read(record / f"tiny_seed{seed}.txt") for seed in (1, 2)]
    shared = run.settings.keys() & new[0].settings.keys() - rerun.OUR_OWN
    run.settings |= {setting: new[0].settings[setting] for setting in shared}
    again = runlog.read(rerun.repeat(run, [], tmp_path))
    assert len(again.sources) == files and again.sources == run.sources
    assert again.settings["checksum_every"] == 500 and len(again.data_hash) == 16
    assert again.finished and again.facts["train_tokens"] == new[0].facts["train_tokens"]
    assert again.val_loss == pytest.approx(new[0].val_loss, abs=0.02)
    assert again.facts["val_hash"] == new[0].facts["val_hash"]
    assert rerun.judge(again, run=again, group=[again]) == 0
    for i in 1, 2:
        (tmp_path / f"A_round{i}.txt").write_text(again.path.read_text())
        (tmp_path / f"B_round{i}.txt").write_text(new[0].path.read_text())
    capfd.readouterr()
    assert ab.main(["--logs", str(tmp_path)]) == 0
    shown = capfd.readouterr().out
    assert "two functions that do not compare; all training tokens: 3000 in both." in shown
    assert "| iteration, ms |" in shown and "one seed |" in shown


def test_other_loss_data_or_folder_is_said(record, tmp_path, capsys):
    run, group = rerun.choose(record, None)
    assert (run.path.stem, len(group)) == ("tiny_seed1", 2)
    far = runlog.read(record / "tiny_seed1.txt")
    far.points["val"][-1] = (6, 9.0, 1.0)
    assert rerun.judge(far, run, group) == 1
    assert "NOT within the spread of tiny" in capsys.readouterr().out
    for other in group:
        other.points["val"][-1] = (6, 1.1, 1.0)
    run.points["val"][-1] = far.points["val"][-1] = (6, 1.1, 1.0)
    assert rerun.judge(far, run, [*group, run]) == 0  # whose mean is 1.1 and a rounding error
    far.points["val"][-1] = (6, 9.0, 1.0)
    assert rerun.judge(far, run, [run]) == 0
    assert "One run has no spread" in capsys.readouterr().out
    far.facts["products"] = "torch.int8"
    assert rerun.judge(far, run, [run]) == 0
    assert f"torch.int8 here, {run.facts['products']} in the log" in capsys.readouterr().out
    far.settings["n_layer"] = 9
    with pytest.raises(ValueError, match="another experiment, and not a repetition: n_layer 9 ag"):
        rerun.judge(far, run, group)
    far.settings["n_layer"] = 2
    far.hashes[far.tokens] = "0"
    with pytest.raises(ValueError, match="the training data differ"):
        rerun.judge(far, run, group)
    far.facts["val_hash"] = "0"
    with pytest.raises(ValueError, match="val_hash is 0 here"):
        rerun.judge(far, run, group)
    with pytest.raises(ValueError, match=r"has no run 'x': give one of \['tiny', 'tiny_seed1'"):
        rerun.choose(record, "x")
    with pytest.raises(ValueError, match="holds no log of a training run"):
        rerun.choose(tmp_path, None)
    with pytest.raises(ValueError, match="is no record: give one of records/2026"):
        rerun.choose(tmp_path / "none", None)
    with pytest.raises(ValueError, match="--n_layer=9 would make it another experiment"):
        rerun.main([str(record), "--n_layer=9"])
    run.sources["../evil.py"] = ""
    with pytest.raises(ValueError, match="source outside its folder"):
        rerun.unpack(run, tmp_path / "unpacked")


def test_run_sh_repeats_records():
    done = subprocess.run(
        ["bash", ROOT / "run.sh", "records/2026-11-21_Data", "x"],
        timeout=120,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "has no run 'x': give one of ['fresh_clone', 'fresh_clone_seed1337']" in done.stderr


def test_prediction_interval_covers_as_it_says():
    generator = np.random.default_rng(0)
    inside = 0
    for x in generator.normal(1.3, 0.01, (20000, 6)):
        low, high = rerun.spread(x[:5])
        inside += low <= x[5] <= high
    assert inside / 20000 == pytest.approx(0.99, abs=0.002)


# ---------------------------------------------------------------------------
# what the READMEs show


def test_readmes_show_what_their_logs_say(capsys):
    status = report.main(["--stale"])
    assert status == 0, f"run `python records/tools/report.py --refresh`: {capsys.readouterr().out}"


def test_stale_text_and_pictures_are_noticed_and_renewed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    write_group(tmp_path / "records" / "X", "a", [1.2, 1.3])
    (tmp_path / "README.md").write_text("nothing made here\n")
    readme = tmp_path / "records" / "X" / "README.md"
    start = "<!-- python records/tools/report.py records/X --picture records/X/p.png -->\n"
    readme.write_text(f"# A\n{start}<!-- end -->\ntext\n")
    assert report.main(["--stale"]) == 1
    assert report.main(["--refresh"]) == 0 and report.main(["--stale"]) == 0
    fresh = readme.read_text()
    assert "| a | 2 | 40 | 1.2500 (sd 0.0707) |" in fresh and fresh.endswith("<!-- end -->\ntext\n")
    readme.write_text(fresh.replace("1.2500", "1.2400"))
    assert report.main(["--stale"]) == 1 and report.main(["--refresh"]) == 0
    assert readme.read_text() == fresh
    write_log(tmp_path / "records" / "X" / "a_seed3.txt", 1.4, seed=3)
    assert report.main(["--stale"]) == 1
    picture = tmp_path / "records" / "X" / "p.png"
    before = picture.read_bytes()
    assert report.main(["--refresh"]) == 0 and picture.read_bytes() != before
    for form in ".png", ".svg":
        picture.with_suffix(form).unlink()
        assert report.main(["--stale"]) == 1 and report.main(["--refresh"]) == 0
        assert report.main(["--stale"]) == 0
    other = picture.with_suffix(".svg")
    other.write_text(other.read_text().replace(report.made_from(other), "0" * 16))
    assert report.main(["--stale"]) == 1
    assert "records/X/README.md" in capsys.readouterr().out
    for broken in (fresh.replace("<!-- end -->\n", ""), fresh.replace(" -->\n", " --> \n", 1)):
        readme.write_text(broken)
        with pytest.raises(ValueError, match="give each `<!-- python records/tools/TOOL"):
            report.main(["--refresh"])
        assert readme.read_text() == broken


# ---------------------------------------------------------------------------
# pictures


@pytest.fixture
def saved(monkeypatch):
    """The figures that report.py and ab.py would write, in turn."""
    figures = []
    for tool in report, ab:
        monkeypatch.setattr(tool, "save", lambda figure, *_: figures.append(figure))
    return figures


def drawn_lines(axes):
    """Return [(linewidth, marker, x, y)] of the curves in a panel."""
    lines = [line for line in axes.lines if len(line.get_xdata()) and line.get_color()[0] == "#"]
    return [
        (line.get_linewidth(), line.get_marker(), *map(list, line.get_data())) for line in lines
    ]


@given(losses, losses)
@settings(max_examples=20, deadline=None)
def test_a_title_says_the_means_of_its_runs(tmp_path_factory, x, y):
    folder = tmp_path_factory.mktemp("logs")
    groups = {"a b": write_group(folder, "a", x), "c": write_group(folder, "c", y)}
    groups = {name: list(map(runlog.read, paths)) for name, paths in groups.items()}
    numbers = f"{len(x)} and {len(y)} seeds" if len(x) != len(y) else f"{len(x)} seeds each"
    title = report.finding(groups)
    found = re.fullmatch(
        rf"a b reaches (.*), c (.*) after 1.28k tokens \(means of {numbers}\)", title
    )
    for mean, of in zip(found.groups(), (x, y)):
        assert re.fullmatch(r"1\.\d{3}", mean)
        assert float(mean) == pytest.approx(np.mean(of), abs=0.00051)
    alone = report.finding({"c": groups["c"]})
    assert alone == f"c reaches {found[2]} after 1.28k tokens (mean of {len(y)} seeds)"


def test_titles_of_unlike_groups(tmp_path):
    names = "abcdefg"
    groups = {
        name: [runlog.read(write_log(tmp_path / f"{name}.txt", 1.2 + i / 10))]
        for i, name in enumerate(names)
    }
    said = "best and worst of 7: a reaches 1.200, g 1.800 after 1.28k tokens (one run each)"
    assert report.finding(groups) == said
    short = write_log(tmp_path / "short.txt", 1.7, num_iterations=20)
    twice = [*groups["b"], runlog.read(write_log(tmp_path / "b2.txt", 1.4))]
    mixed = {"b": twice, "short": [runlog.read(short)]}  # seed 1 both times
    said = (
        "b reaches 1.350 after 1.28k tokens, short 1.700 after 640 tokens (means of 2 and 1 runs)"
    )
    assert report.finding(mixed) == said
    texts = [report.count(x) for x in (0, 640, 999.9, 153_600, 7_372_800, 1.25e6, 999_999, 1.7e9)]
    assert texts == ["0", "640", "1k", "154k", "7.37M", "1.25M", "1M", "1.7B"]


@given(st.integers(1, 400), st.integers(1, 400))
@settings(max_examples=60, deadline=None)
def test_smoothing_keeps_the_mean_of_all_steps(last, reached):
    steps = np.arange(1, min(last, reached) + 1)
    values = np.random.default_rng(0).normal(size=len(steps))
    run = SimpleNamespace(last=last, points={"train": list(zip(steps, values, 7.0 * steps))})
    size, points = report.stretch(run), report.curve(run, "train")
    counts = np.diff([*range(0, len(steps), size), len(steps)])
    assert len(points) == len(counts) <= 2 * report.STRETCHES
    assert counts @ points == pytest.approx([steps.sum(), values.sum(), 7 * steps.sum()], abs=1e-8)
    alike = [points, points[:-1], points[1:]]  # at the steps that all of them have
    assert report.mean_curve(alike) == pytest.approx(points[1:-1])


def test_a_picture_of_groups(tmp_path, saved):
    for name, of_group in {"a": [1.2, 1.3, 1.25], "b": [1.6, 1.7]}.items():
        write_group(tmp_path, name, of_group, num_iterations=90, every=30)
    assert report.main([str(tmp_path), "--picture", "p.png"]) == 0
    curves, ends = saved[0].axes  # and no panel of times
    assert (curves.get_xlabel(), curves.get_xlim()[0]) == ("tokens read", 0)
    shown = drawn_lines(curves)
    for runs, marker, own in ([1.2, 1.3, 1.25], "o", shown[:8]), ([1.6, 1.7], "s", shown[8:]):
        thin = [line for line in own if line[0] < 1]
        train, val = (line for line in own if line[0] > 1)  # the means
        assert len(thin) == 2 * len(runs) and [train[1], val[1]] == ["", marker]
        assert (val[2], val[3][-1]) == ([960, 1920, 2880], pytest.approx(np.mean(runs)))
        assert len(train[2]) == 30 and train[2][0] == 2 * 32 and train[2][-1] == 89 * 32
        for mean, each in (train, thin[: len(runs)]), (val, thin[len(runs) :]):
            assert mean[3] == pytest.approx(np.mean([line[3] for line in each], axis=0))
    low, high = curves.get_ylim()
    late = [y for _, _, x, line in shown for x, y in zip(x, line) if x >= 288]
    assert low < min(late) and max(late) < high < max(y for line in shown for y in line[3])
    assert "mean over each 3 steps" in saved[0].get_supxlabel()
    for axes in curves, ends:
        assert [1.5, 1.5] in [list(line.get_ydata()) for line in axes.lines], "no target"
    assert [text.get_text() for text in curves.get_legend().get_texts()] == [
        "a (n=3)",
        "b (n=2)",
        "validation",
        "training",
        "target 1.5",
    ]
    styles = [line.get_linestyle() for line in curves.lines if line.get_color()[0] == "#"]
    assert {":": styles.count(":"), "-": styles.count("-")} == {":": 5 + 2, "-": 5 + 2 + 2}
    assert ends.get_xlabel() == "" and [tick.get_text() for tick in ends.get_xticklabels()] == [
        "a",
        "b",
    ]
    dots = [line for line in drawn_lines(ends) if line[1] in ("o", "s")]
    assert [line[3] for line in dots] == [[1.2, 1.3, 1.25], [1.6, 1.7]]
    assert saved[0].get_suptitle() == report.finding(report.collect([str(tmp_path)]))


@pytest.mark.parametrize("target", [1.0, 9.0])
def test_a_far_target_does_not_squeeze_the_curves_and_is_not_drawn(target, tmp_path, saved):
    logs = write_group(tmp_path, "a", [2.9, 2.95], target_val_loss=target, every=5)
    assert report.main([*logs, "--picture=p.png"]) == 0
    curves = saved[0].axes[0]
    low, high = curves.get_ylim()
    assert not low < target < high
    for axes in saved[0].axes:
        assert [target, target] not in [list(line.get_ydata()) for line in axes.lines]
    texts = [text.get_text() for text in curves.get_legend().get_texts()]
    assert texts == ["a (n=2)", "validation", "training"]


def test_a_single_run_has_its_time_above_and_no_panel_of_one_dot(tmp_path, saved):
    report.main([str(write_log(tmp_path / "a.txt")), "--picture=p.png"])
    report.main([str(write_log(tmp_path / "b.txt")), str(tmp_path / "a.txt"), "--picture=p.png"])
    [curves] = saved[0].axes
    [above] = curves.child_axes
    assert above.get_xlabel() == "training time, s"
    saved[0].draw_without_rendering()
    run = runlog.read(tmp_path / "a.txt")
    scale = np.divide(above.get_xlim(), curves.get_xlim(), where=[False, True], out=np.zeros(2))
    assert scale[1] == pytest.approx(run.train_ms / 1000 / run.tokens)
    assert not saved[1].axes[0].child_axes  # times of two runs do not compare


def test_losses_that_coincide_are_shown_as_differences(tmp_path, saved):
    for name, loss in {"base": 1.5, "near": 1.501, "far": 2.0}.items():
        write_log(tmp_path / f"{name}.txt", loss, every=10)
    logs = [str(tmp_path / f"{name}.txt") for name in ("base", "near", "far")]
    report.main([*logs, "--picture=p.png"])
    _, panel = saved[0].axes
    assert panel.get_ylabel() == "validation loss - that of base"
    lines = [line for line in panel.lines if line.get_marker() in "os^"]
    assert [line.get_ydata()[-1] for line in lines] == [pytest.approx(0.001), pytest.approx(0.5)]
    report.main([logs[0], logs[2], "--picture=p.png"])
    assert len(saved[1].axes) == 1


@pytest.mark.parametrize("names", [["a", "b", "a name of twenty letters"], ["A" * 18, "b"], "abc"])
def test_names_of_the_results_do_not_overlap(names, tmp_path, saved):
    for i, name in enumerate(names):
        write_group(tmp_path, name, [1.2 + i, 1.3 + i])
    report.main([str(tmp_path), "--picture=p.png"])
    saved[0].draw_without_rendering()
    ticks = saved[0].axes[-1].get_xticklabels()
    assert len(ticks) == len(names)
    if ticks[0].get_rotation() == 0:
        assert not overlapping([tick.get_window_extent() for tick in ticks])


@both_formats
@given(st.data())
@settings(max_examples=25, deadline=None)
def test_a_running_log_is_drawn_wherever_it_ends(tmp_path_factory, old, data):
    path = tmp_path_factory.mktemp("logs") / "a_seed1.txt"
    text = write_log(path, old=old).read_text()
    end = data.draw(st.integers(text.index("step:0/"), text.index("result ")))
    path.write_text(text[:end])  # also in the middle of a line
    whole = text[: text[:end].rfind("\n") + 1]
    reached = int(re.findall(r"^step:(\d+)/", "step:0/\n" + whole, flags=re.M)[-1])
    printed, figures = io.StringIO(), []
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(report, "save", lambda figure, *_: figures.append(figure))
        if not reached:
            with pytest.raises(ValueError, match="hold no step after step 0 to draw"):
                report.main([str(path), "--picture=p.png"])
            return
        assert report.main([str(path), "--picture=p.png"]) == 0
    assert f"| {reached} of 40, unfinished |" in printed.getvalue()
    assert "| a | 1 | 40 | n/a | n/a |" in printed.getvalue()
    assert f"a: unfinished at step {reached} of 40" in figures[0].get_suptitle()
    [curves] = figures[0].axes
    assert f"a_seed1: unfinished at step {reached} of 40" in curves.texts[0].get_text()
    assert max(x for _, _, xs, _ in drawn_lines(curves) for x in xs) == 32 * reached
    with pytest.raises(ValueError, match=r"a has 1 run|ended at step \d+ of 40"):
        compare.main([str(path), "--target=1.5"])


def test_a_group_with_a_running_log_has_no_mean_in_its_picture(tmp_path, saved, capsys):
    write_group(tmp_path / "x", "a", [1.2, 1.3])
    write_log(tmp_path / "x" / "a_seed3.txt", seed=3, stopped_at=30)
    whole = write_group(tmp_path / "y", "b", [1.4, 1.5])
    assert report.main([str(tmp_path / "x"), *whole, "--picture=p.png"]) == 0
    assert "| a | 3 | 40 | n/a | n/a |" in capsys.readouterr().out
    assert saved[0].get_suptitle().replace("\n", " ") == (
        "b reaches 1.450 after 1.28k tokens (mean of 2 seeds); no mean of a: 1 of its 3 runs have "
        "no result"
    )
    curves, ends = saved[0].axes
    assert curves.get_legend().get_texts()[0].get_text() == "a (n=3)"
    assert [tick.get_text() for tick in ends.get_xticklabels()] == ["a", "b"]
    assert [line[3] for line in drawn_lines(ends) if line[1] != "None"] == [[1.4, 1.5]]
    means = [line for line in drawn_lines(curves) if line[0] > 1]
    assert [max(line[2]) for line in means] == [960, 640, 1280, 1280]  # to where all of a came
    diverged = runlog.read(write_log(tmp_path / "c.txt", float("nan")))
    report.draw({"c": [diverged]}, "p.png")
    assert "c: diverged at step 40 of 40" in saved[1].get_suptitle()


def test_only_rounds_in_turn_are_drawn_against_time(tmp_path, saved):
    def labels(*logs):
        report.main([*map(str, logs), "--picture=p.png"])
        of_losses = [axes for axes in saved[-1].axes if axes.get_ylabel() == "loss, nats a token"]
        return [axes.get_xlabel() for axes in of_losses]

    in_turn = ["tokens read", "train time, s (rounds in turn)"]
    write_rounds(tmp_path / "ab")
    assert labels(tmp_path / "ab") == in_turn
    assert labels(f"x={tmp_path}/ab/A*", f"y={tmp_path}/ab/B*") == in_turn
    times = saved[-1].axes[1]
    ends = [max(line[2]) for line in drawn_lines(times) if line[0] > 1]
    # steps of 100 and 200 ms, 150 and 300
    assert ends == pytest.approx([6, 6, 9, 9]) and times.get_xlim()[0] == 0
    assert times.get_ylim() == saved[-1].axes[0].get_ylim()
    (tmp_path / "ab" / "B_round2.txt").rename(tmp_path / "B_round2.txt")
    write_rounds(tmp_path / "other", device="CPU two")
    write_group(tmp_path / "seeds", "a", [1.2, 1.3])
    for logs in (
        [tmp_path / "ab"],  # a side is missing
        [tmp_path / "ab", tmp_path / "B_round2.txt"],  # from elsewhere
        [tmp_path / "other"],  # on two machines
        [tmp_path / "seeds"],
        [tmp_path / "ab" / "A_round1.txt", tmp_path / "ab" / "B_round1.txt"],  # one round
    ):
        assert labels(*logs) == in_turn[:1], logs


def test_pictures_are_written_twice_and_alike_each_time(tmp_path, capsys):
    logs = write_group(tmp_path, "a$b$<&", [1.2, 1.3])
    contents = []
    for name in "p", "q":
        report.main([*logs, f"--picture={tmp_path}/{name}.png"])
        contents.append([(tmp_path / f"{name}{form}").read_bytes() for form in report.FORMS])
    assert contents[0] == contents[1]
    png, svg = (report.made_from(tmp_path / f"p{form}") for form in report.FORMS)
    assert png == svg and re.fullmatch("[0-9a-f]{16}", svg)
    text = contents[0][1].decode()
    said = "a$b$&lt;&amp; reaches 1.250 after 1.28k tokens (mean of 2 seeds)"
    assert f"<dc:title>{said}</dc:title>" in text and f">{said}</text>" in text
    assert "<dc:date>" not in text
    with pytest.raises(ValueError, match=r"--picture=p.pdf must end in .png"):
        report.main([*logs, "--picture=p.pdf"])


def test_pictures_of_the_records_are_small_and_shown():
    blocks = [
        (readme, block["arguments"])
        for readme in report.readmes()
        for block in report.BLOCK.finditer(readme.read_text())
    ]
    pictures = [
        (readme, ROOT / name)
        for readme, arguments in blocks
        for name in re.findall(r"--picture[ =](\S+)", arguments)
    ]
    assert len(pictures) >= 7
    for readme, path in pictures:
        for form in report.FORMS:
            assert path.with_suffix(form).stat().st_size < 150_000, path
        assert f"]({path.relative_to(readme.parent)})" in readme.read_text(), f"{path}: not shown"


def overlapping(boxes):
    return [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]


def test_words_of_the_records_picture_do_not_overlap(saved):
    report.main(
        [
            "Muon=records/2026-11-21_CPU_Record",
            "AdamW=records/2026-11-21_AdamW/adamw_seed*.txt",
            "Muon (2026-11-20)=records/2026-11-20_CPU_Baseline/muon_seed*.txt",
            "--picture=p.png",
        ]
    )
    figure = saved[0]
    figure.draw_without_rendering()
    curves = figure.axes[0]
    legend = curves.get_legend().get_window_extent()
    for width, marker, x, y in drawn_lines(curves):
        if marker:
            points = curves.transData.transform(list(zip(x, y)))
            assert not any(legend.contains(*point) for point in points), (width, marker)
    for axes in figure.axes:
        for ticks in axes.get_xticklabels(), axes.get_yticklabels():
            assert not overlapping([tick.get_window_extent() for tick in ticks])
    around = figure.bbox
    for text in figure.texts:
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= around.x1, "a line is longer than the picture"
    assert not overlapping([text.get_window_extent() for text in figure.texts])


@pytest.mark.parametrize("ms, shown", [(300, True), (310, True), (240, False)])
def test_ab_picture_says_its_table(ms, shown, tmp_path, saved, capsys):
    write_rounds(tmp_path)  # 150 against 100 ms, and 300 against 200
    write_log(tmp_path / "B_round2.txt", ms=ms, memory=250, seed=2)
    ab.main(["--logs", str(tmp_path), "--picture=p.png", "--names", "x", "y"])
    cells = re.findall(r"^\| (.*?) \|.*\| (.*?) \|$", capsys.readouterr().out, flags=re.M)
    table = dict(cells)
    [figure] = saved
    assert len(figure.axes) == 4
    for axes in figure.axes:
        metric = axes.get_ylabel()
        said = axes.get_title().replace("\n", " ").replace("95%: ", "")
        against = "B - A" if metric == "validation loss" else "B / A"
        assert said == f"{against}: {table[metric]}"
        assert (axes.get_ylim()[0] == 0) == (against == "B / A"), metric
    ratio, low, high = re.findall(r"[\d.]+", table["iteration, ms"])
    said = (
        f"an iteration of y takes {ratio} times that of x (95%: {low} to {high}; 2 rounds in turn)"
    )
    assert figure.get_suptitle().endswith(said)
    assert shown == (float(low) > 1) == ("no difference shown" not in figure.get_suptitle())


def test_training_imports_neither_matplotlib_nor_scipy():
    assert not re.search("matplotlib|scipy", (ROOT / "train_gpt2.py").read_text())
