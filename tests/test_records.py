"""The evidence: logs read back, statistics against scipy, refusals, stale READMEs, reruns."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys

import ab
import compare
import describe
import numpy as np
import pytest
import report
import rerun
import runlog
import torch
from conftest import ROOT, TINY, write_shard
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from train_gpt2 import Hyperparameters, main

# ---------------------------------------------------------------------------
# logs to read

HEADER = {
    "num_iterations": 40, "batch_size": 4, "sequence_length": 8, "val_tokens": 64, "seed": 1,
    "target_val_loss": 1.5, "muon_coefficients": "quintic", "run_id": "x", "log_dir": "logs",
}  # fmt: skip


def write_log(path, loss=1.25, source="print('a script')", **changes):
    """Write a log in our grammar, without a training: 40 steps, validated at 0, 20 and 40."""
    facts = {"val_hash": "aa", "hash": "11", "device": "CPU one", "products": "torch.float32",
             "processes": 1, "torch": "2.13.0", "ms": 7, "memory": 500, "compile": 3.5,
             "commit": "abcdef0123456"}  # fmt: skip
    facts |= {name: changes.pop(name) for name in list(changes) if name in facts}
    stopped_at, curve = changes.pop("stopped_at", 40), changes.pop("curve", None)
    values = HEADER | changes
    last = values["num_iterations"]
    lines = [source, "source of data/shards.py:", "FORMAT = 1"]
    lines += [f"hyperparameter {name}={value!r}" for name, value in values.items()]
    lines += [
        f"python:3.11.7 torch:{facts['torch']} numpy:2.0 cuda:None "
        f"commit:{facts['commit']}",
        f"device:{facts['device']} processes:{facts['processes']} threads:2 "
        f"products:{facts['products']}",
        f"val data: 1 shards, 100 tokens; the first 64 count, val_hash:{facts['val_hash']}",
    ]
    for step in range(min(last, stopped_at) + 1):
        ms = facts["ms"] * step
        tail = f"train_time:{ms:.0f}ms step_avg:{ms / max(step, 1):.2f}ms"
        train_loss = 5 - step / 20 + (curve or values["seed"]) / 1e3
        lines += [f"step:{step}/{last} train_loss:{train_loss:.4f} {tail}"] * (step > 0)
        if step % 20 == 0:
            value = loss if step == last else 5 - step / 20
            lines.append(f"step:{step}/{last} val_loss:{value:.4f} {tail} "
                         f"data_hash:{facts['hash']}")
    lines += [f"setup:1.0s compile:{facts['compile']}s train:0.3s",
              "compile: graphs:2 graph_breaks:0 recompiles:0",
              f"tokens/s:4571 peak_memory:{facts['memory']}MiB mfu:41.5%"]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def write_group(folder, name, losses, **changes):
    return [str(write_log(folder / f"{name}_seed{seed}.txt", loss, seed=seed, **changes))
            for seed, loss in enumerate(losses, 1)]


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


def test_log_written_by_training_is_read(tiny):
    loss = main(Hyperparameters(**{**tiny, "run_id": "mine_seed7", "seed": 7}))
    run = runlog.read(f"{tiny['log_dir']}/mine_seed7.txt")
    assert run.val_loss == pytest.approx(loss, abs=5e-5)
    assert (run.label, run.seed, run.steps, run.last) == ("mine", 7, 6, 6)
    assert run.settings == {**vars(Hyperparameters()), **tiny, "run_id": "mine_seed7", "seed": 7}
    assert list(run.sources) == [
        "train_gpt2.py", "data/checkpoints.py", "data/processes.py", "data/shards.py",
        "records/describe.py",
    ]  # fmt: skip
    for path, text in run.sources.items():
        assert text == (ROOT / path).read_text()
    assert [step for step, _, _ in run.points["train"]] == [1, 2, 3, 4, 5, 6]
    assert run.tokens == 6 * TINY["batch_size"] * 16 and run.data_hash == run.hashes[run.tokens]
    assert run.facts["processes"] == "1" and run.number("peak_memory") > 50
    assert run.number("compile") >= 0 and len(run.facts["val_hash"]) == 16
    assert all(text(run) for text in report.COLUMNS.values())


def test_every_field_of_a_log(tmp_path):
    run = runlog.read(write_log(tmp_path / "a_seed3.txt", seed=3))
    assert {name: text(run) for name, text in report.COLUMNS.items()} == {
        "seed": "3", "steps": "40", "val loss": "1.2500", "tokens": "1,280", "train time": "0 s",
        "ms/step": "7.0", "tokens/s": "4,571", "MFU": "41.5%", "peak memory": "500 MiB",
        "compile": "3.5 s", "torch": "2.13.0", "device": "CPU one", "processes": "1",
        "commit": "abcdef012", "data hash": "11", "val hash": "aa",
    }  # fmt: skip


def test_resumed_log_counts_a_repeated_step_once(tmp_path):
    path = write_log(tmp_path / "a.txt", stopped_at=29)
    assert not runlog.read(path).finished and report.COLUMNS["steps"](runlog.read(path)) == (
        "20 of 40, cut")
    second = write_log(tmp_path / "b.txt").read_text()
    whole = path.read_text()
    path.write_text(whole + second)
    run = runlog.read(path)
    assert run.finished and [step for step, _, _ in run.points["train"]] == list(range(1, 41))
    path.write_text(whole + second.replace("device:CPU one", "device:CPU two"))
    assert runlog.read(path).facts["device"] == "CPU one then CPU two"
    for old, new in (("a script", "another"), ("FORMAT = 1", "FORMAT = 2"), ("=8\n", "=9\n")):
        path.write_text(whole + second.replace(old, new))
        with pytest.raises(ValueError, match="if resumed, the same source and settings again"):
            runlog.read(path)


def test_groups_take_each_run_once_and_no_unfinished_one(tmp_path, capsys):
    write_group(tmp_path / "X", "a", [1.2, 1.3])
    write_group(tmp_path / "Y", "a", [2.2, 2.3])
    write_log(tmp_path / "X" / "a_seed3.txt", seed=3, stopped_at=30, commit="f" * 40 + "-dirty")
    groups = report.collect([str(tmp_path / "X"), str(tmp_path / "Y")])
    assert {group: len(runs) for group, runs in groups.items()} == {"X/a": 3, "Y/a": 2}
    assert report.main([str(tmp_path / "X")]) == 0
    shown = capsys.readouterr().out
    assert "| a | 2 | 40 | 1.2500 (sd 0.0707)" in shown and "Left out: 1 unfinished runs." in shown
    assert "| 20 of 40, cut |" in shown and "fffffffff-dirty" in shown
    with pytest.raises(ValueError, match="is named twice"):
        report.collect([str(tmp_path / "X"), str(tmp_path / "X" / "a_seed1.txt")])
    with pytest.raises(ValueError, match="share no validation after step 0 to draw"):
        report.draw({"a": [runlog.read(write_log(tmp_path / "b.txt", stopped_at=3))]}, None)
    equals = write_log(tmp_path / "lr=0.1_seed1.txt")
    assert list(report.collect([str(equals)])) == ["lr=0.1"]


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
    text = random.choice([PUBLIC, write_log(folder / "a.txt").read_text()])
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
    a, b = write_group(folder, "a", x), write_group(folder, "b", y, muon_coefficients="other")
    with contextlib.redirect_stdout(printed):
        assert compare.main([*a, "--against", *b]) == 0
    known = stats.ttest_ind(x, y, equal_var=False)
    shown = figures(printed.getvalue())
    assert shown[0] == ("t", pytest.approx(known.statistic, abs=0.006))
    assert shown[1] == ("df", pytest.approx(known.df, abs=0.06))
    assert shown[2] == ("p", pytest.approx(known.pvalue, rel=0.06))
    low, high = known.confidence_interval(0.95)
    assert f"95% interval {low:+.4f} to {high:+.4f}" in printed.getvalue()
    assert "They differ in: muon_coefficients 'quintic' against 'other'." in printed.getvalue()
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


@pytest.mark.parametrize("case, sentence", {
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
    "hash": r"the training data differ: data_hash after 640 tokens is 22 in",
    "val_tokens": "the number of validation tokens of these runs differ",
    "device": "the hardware of these runs differ: CPU one in .*, CPU two in",
    "processes": "the number of processes of these runs differ",
    "products": "the dtype of products of these runs differ",
    "target_val_loss": "the target of these runs differ: 1.5 in .*, 1.6 in",
    "both": "a log stands on both sides",
    "target": r"--target=1.7 is not the target that the logs name, 1.5",
}.items())  # fmt: skip
def test_refusals(case, sentence, tmp_path, capsys):
    x = [1.2, 1.3, 1.25]
    a, b = write_group(tmp_path, "a", x), None
    arguments = ["--target=1.5"]
    other = {"val_hash": "bb", "hash": "22", "val_tokens": 72, "device": "CPU two", "processes": 2,
             "products": "torch.bfloat16", "target_val_loss": 1.6,
             "sequence_length": 4}  # fmt: skip
    if case in other:
        b = write_group(tmp_path, "b", x, **{case: other[case]})
    elif case == "both":
        b = a
    elif case in ("settings", "source", "torch"):
        change = {"settings": {"batch_size": 8}, "source": {"source": "another"},
                  "torch": {"torch": "2.5.1"}}[case]
        write_log(tmp_path / "a_seed3.txt", 1.25, seed=3, **change)
    elif case == "copy":
        write_log(tmp_path / "a_seed3.txt", 1.2, seed=3, curve=1)
    elif case == "equal":
        a = write_group(tmp_path, "a", [1.2, 1.2, 1.2])
    elif case == "more tokens":
        b = [str(write_log(tmp_path / f"b_seed{i}.txt", 1.3 + i / 10, seed=i, num_iterations=20))
             for i in (1, 2, 3)]
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


@pytest.mark.parametrize("arguments, said", [
    (["--target=1.5", "--n=9"], "compare.py: a has 2 runs, but n=9"),
    (["--target=x"], "invalid float value: 'x'"),
    ([], "give --target or --against"),
    (["--target=1", "--alpha=0.05"], "--alpha=0.05 must be above 0 and at most 0.01"),
])  # fmt: skip
def test_mistakes_are_one_sentence(arguments, said, tmp_path, monkeypatch, capsys):
    logs = write_group(tmp_path, "a", [1.2, 1.3])
    monkeypatch.setattr(sys, "argv", ["records/compare.py", *logs, *arguments])
    with pytest.raises(SystemExit) as exit_:
        report.command(compare.main)
    assert exit_.value.code not in (0, None)
    assert said in f"{exit_.value.code}{capsys.readouterr().err}"


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


def write_rounds(folder, **of_b):
    for round_ in (1, 2):
        write_log(folder / f"A_round{round_}.txt", ms=100 * round_, seed=round_)
        b = {"ms": 150 * round_, "memory": 250, "seed": round_} | of_b
        write_log(folder / f"B_round{round_}.txt", **b)


def test_framework_table(tmp_path, capsys):
    write_rounds(tmp_path, torch="2.5.1")
    picture = tmp_path / "ab.png"
    assert ab.main(["--logs", str(tmp_path), "--picture", str(picture), "--names", "x", "y"]) == 0
    shown = capsys.readouterr().out
    assert "B differs in: torch 2.13.0 against 2.5.1." in shown
    assert "| iteration, ms | 150.0 (100.0 to 200.0) | 225.0 (150.0 to 300.0) | 1.500 (1.500 to " \
           "1.500) |" in shown  # fmt: skip
    assert "| 0.500 (0.500 to 0.500) |" in shown and "+0.0000 (+0.0000 to +0.0000)" in shown
    assert "| GPU busy (NVML), % | n/a | n/a | n/a |" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")
    write_rounds(tmp_path, torch="2.5.1", seed=2)
    write_log(tmp_path / "A_round1.txt", seed=2)
    ab.main(["--logs", str(tmp_path)])
    assert "| +0.0000, one seed |" in capsys.readouterr().out
    (tmp_path / "busy.json").write_text(json.dumps(
        {"A_round1": 90, "B_round1": 45, "A_round2": 80, "B_round2": 40}))
    ab.main(["--logs", str(tmp_path)])
    assert "| 85 (80 to 90) | 42 (40 to 45) | 0.500" in capsys.readouterr().out


@pytest.mark.parametrize("of_b, sentence", [
    ({"torch": "2.5.1", "source": "other"}, "compared by one script with one set of settings, but "
                                            "these differ: source of train_gpt2.py"),
    ({"torch": "2.5.1", "batch_size": 8}, "one set of settings"),
    ({"torch": "2.5.1", "device_batch_size": 8}, "one set of settings"),
    ({"hash": "22"}, "the training data differ"),
    ({"val_hash": "bb"}, "the validation tokens"),
    ({"stopped_at": 30}, "must hold whole logs"),
])  # fmt: skip
def test_unlike_sides_are_refused(of_b, sentence, tmp_path):
    write_rounds(tmp_path, **of_b)
    with pytest.raises(ValueError, match=sentence):
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
out.write_text(text.replace("seed=1", "seed=" + fields["seed"]))
caches = [os.environ.get(name) for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR")]
said = dict(caches=caches, empty=os.listdir(caches[1] or "/") == [], first=sys.argv[0],
            python=os.environ["PYTHON"], mark=os.environ.get("MARK"), seed=fields["seed"])
out.with_suffix(".json").write_text(json.dumps(said))
"""


def test_two_commands_in_turn(tmp_path):
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
    command = [sys.executable, ROOT / "records" / "ab.py", script, f"{script} --more=2",
               f"--python_a={python_a}", "--rounds=2", "--cold",
               f"--out={tmp_path}/{out}"]  # fmt: skip
    environment = {**os.environ, "PATH": f"{smi.parent}:{os.environ['PATH']}"}

    def run():
        return subprocess.run(command, capture_output=True, text=True, timeout=99, env=environment)

    done = run()
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
    again = run()
    assert again.returncode == 1 and "holds logs already" in again.stderr
    command[2:4] = [script, f"{script} --fail=1"]
    command[-1] += "2"
    failing = run()
    assert failing.returncode == 1 and "ended with 1: one sentence" in failing.stderr
    with pytest.raises(ValueError, match="must start with python, torchrun or bash run"):
        ab.side_command("nice python train_gpt2.py", "p", "x", tmp_path, 1)
    assert ab.side_command("torchrun --standalone x.py", "p", "n", "f", 1)[0] == [
        "p", "-m", "torch.distributed.run", "--standalone", "x.py", "--run_id=n", "--log_dir=f",
        "--seed=1"]  # fmt: skip
    environment = ab.side_command("bash run.sh", "p", "n", "f", 1)[1]
    assert environment["PYTHON"] == "p"


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
        main(Hyperparameters(**{
            **TINY, "train_files": f"{folder}/data/train_*.bin", "log_dir": str(folder),
            "val_files": f"{folder}/data/val_*.bin", "run_id": f"tiny_seed{seed}", "seed": seed,
        }))  # fmt: skip
    return folder


def test_record_runs_again_from_its_log(record, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", "")
    logs = f"--log_dir={tmp_path}"
    assert rerun.main([str(record), "tiny_seed2", logs]) == 0
    shown = capfd.readouterr().out
    first, again = re.search(r"seed 2, loss (\S+); again: seed 2, loss (\S+),", shown).groups()
    assert float(first) == pytest.approx(float(again), abs=0.002) and "Within the spread" in shown
    logged = next(tmp_path.glob("rerun_tiny_seed2_*.txt")).read_text()
    assert "commit:none" in logged, "it ran the logged sources, outside the repository"


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
    with pytest.raises(ValueError, match="holds no log of a whole training run"):
        rerun.choose(tmp_path, None)
    with pytest.raises(ValueError, match="is no record: give one of records/2026"):
        rerun.choose(tmp_path / "none", None)
    with pytest.raises(ValueError, match="--n_layer=9 would make it another experiment"):
        rerun.main([str(record), "--n_layer=9"])
    run.sources["../evil.py"] = ""
    with pytest.raises(ValueError, match="source outside its folder"):
        rerun.unpack(run, tmp_path / "unpacked")


def test_run_sh_repeats_records():
    done = subprocess.run(["bash", ROOT / "run.sh", "records/2026-11-21_Data", "x"], timeout=120,
                          env={**os.environ, "PYTHON": sys.executable}, capture_output=True,
                          text=True)  # fmt: skip
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
    assert status == 0, f"run `python records/report.py --refresh`: {capsys.readouterr().out}"


def test_stale_text_and_pictures_are_noticed_and_renewed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    write_group(tmp_path / "records" / "X", "a", [1.2, 1.3])
    (tmp_path / "README.md").write_text("nothing made here\n")
    readme = tmp_path / "records" / "X" / "README.md"
    start = "<!-- python records/report.py records/X --picture records/X/p.png -->\n"
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
    picture.unlink()
    assert report.main(["--stale"]) == 1
    assert "records/X/README.md" in capsys.readouterr().out
    for broken in (fresh.replace("<!-- end -->\n", ""), fresh.replace(" -->\n", " --> \n", 1)):
        readme.write_text(broken)
        with pytest.raises(ValueError, match="give each `<!-- python records/TOOL"):
            report.main(["--refresh"])
        assert readme.read_text() == broken


def test_training_imports_neither_matplotlib_nor_scipy():
    for path in ("train_gpt2.py", *describe.SIBLINGS):
        assert not re.search("matplotlib|scipy", (ROOT / path).read_text()), path
