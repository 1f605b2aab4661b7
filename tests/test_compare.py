"""The tools that compare runs: compare.py, ab.py and rerun.py."""

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import ab
import compare
import numpy as np
import pytest
import repeat
import rerun
import runlog
from conftest import ROOT, SCRIPT, TINY, options, run_tool, write_shard
from scipy import stats
from test_records import write_group, write_log

from train_gpt2 import Hyperparameters, main, parse_args


# ---- compare.py ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "arguments, status, sentence",
    [
        # By hand: the mean of x is 2, its variance 1, so t = (2 - 4) / sqrt(1 / 3).
        ("--target=4", 0, "t=-3.46 p=0.037; the mean's 95% interval -0.4841 to 4.4841"),
        ("--target=4 --n=3", 1, "No record: p=0.037 is not below 0.01"),
        ("--target=40 --n=3", 0, "Record: p=0.00012 is below 0.01, with n=3"),
        ("--target=-40 --n=3", 1, "No record: p=1"),
        # y: mean 4, variance 4. t = -2 / sqrt(1/3 + 4/3), df = (5/3)^2 / ((1/9 + 16/9) / 2).
        ("--against {}/y*", 0, "Welch's t=-1.55 df=2.9 p=0.22 (two-sided), p=0.11 (one-sided: x"),
        ("--against {}/y*", 0, "x minus y: -2.0000, 95% interval -6.1554 to +2.1554."),
        ("--against {}/y*", 0, "They differ in: learning_rate 0.01 against 0.02."),
        ("--against {}/y*", 0, "No verdict: pass --n"),
        ("--against {}/z* --n=3", 0, "Record: p="),
    ],
)
def test_statistics_match_values_computed_by_hand(arguments, status, sentence, tmp_path, capsys):
    write_group(tmp_path, "x", [1, 2, 3], target_val_loss=0)
    write_group(tmp_path, "y", [2, 4, 6], target_val_loss=0, learning_rate=0.02)
    write_group(tmp_path, "z", [21, 22, 23], target_val_loss=0)
    assert compare.main([f"{tmp_path}/x*", *arguments.format(tmp_path).split()]) == status
    assert sentence in capsys.readouterr().out


TARGET, AGAINST = "--target=1.5", "--n=3 --against {}/b*"


@pytest.mark.parametrize(
    "third, other, arguments, sentence",  # changes of the third run of a, and of all runs of b
    [
        ({"seed": 1}, {}, TARGET, "share a seed: [1, 1, 2]"),
        ({"stopped_at": 30}, {}, TARGET, "unfinished at step 30 of 40"),
        ({"loss": float("nan")}, {}, TARGET, "diverged at step 40"),
        ({"batch_size": 8}, {}, TARGET, "in: batch_size 8 against 4"),
        ({"source": "another"}, {}, TARGET, "in: source of train_gpt2.py"),
        ({"torch": "2.5.1"}, {}, TARGET, "in: torch 2.5.1 against 2.13.0"),
        ({"processes": 2}, {}, TARGET, "these runs differ in number of processes"),
        ({}, {"val_data": "cc"}, AGAINST, "these runs differ in validation data"),
        ({}, {"train_data": "cc"}, AGAINST, "these runs differ in training data"),
        ({}, {"val_tokens": 72}, AGAINST, "these runs differ in number of validation tokens"),
        ({}, {"sequence_length": 4}, AGAINST, "these runs differ in sequence_length"),
        ({}, {"device": "CPU two"}, AGAINST, "these runs differ in hardware"),
        ({}, {"matmul_dtype": "bfloat16"}, AGAINST, "these runs differ in dtype of matmuls"),
        ({}, {"first": 21}, AGAINST, "these runs differ in schedule"),
        ({}, {"num_iterations": 20}, AGAINST, "a read 1,280 tokens and b 640: the first side may"),
        ({}, {"loss": 1.2}, AGAINST, "all losses of b are {1.2}: a test needs some spread"),
        ({}, {}, "--target=1.5 --n=5", "a has 3 runs, but n=5 was fixed in advance"),
        ({}, {}, "--target=1.7", "not the target in the logs, 1.5"),
        ({}, {}, "--against {}/a*", "a log is on both sides"),
        ({}, {}, "--against {}/b_seed1.txt", "b has 1 run"),
        ({}, {}, "", "2"),  # argparse's exit status: neither side
    ],
)
def test_incomparable_runs_are_rejected(third, other, arguments, sentence, tmp_path):
    for seed, loss in enumerate([1.2, 1.3, 1.25], 1):
        write_log(
            tmp_path / f"a_seed{seed}.txt",
            **{"loss": loss, "seed": seed, **(third if seed == 3 else {})},
        )
        write_log(tmp_path / f"b_seed{seed}.txt", **{"loss": loss, "seed": seed, **other})
    with pytest.raises((ValueError, SystemExit), match=re.escape(sentence)):
        compare.main([f"{tmp_path}/a*", *arguments.format(tmp_path).split()])


# ---- ab.py: the table ---------------------------------------------------------------------------
def write_rounds(folder, **of_b):
    for round_ in (1, 2):
        write_log(folder / f"A_round{round_}.txt", 1.3 + round_ / 10, ms=100 * round_, seed=round_)
        b = {"loss": 1.2 + round_ / 5, "ms": 150 * round_, "seed": round_} | of_b
        write_log(folder / f"B_round{round_}.txt", **b)


def test_the_table_of_two_commands(tmp_path, capsys):
    write_rounds(tmp_path, torch="2.5.1")
    ab.main(["--logs", str(tmp_path)])
    printed = capsys.readouterr().out
    # The differences are 0.0 and 0.1: t = 1 with one degree of freedom, whose 97.5% is 12.7062.
    loss = "1.5000 | +0.0500 (-0.5853 to +0.6853) | 0.5"
    assert f"| B | {loss} | 225.0, 1.500 (1.500 to 1.500) |" in printed
    assert "| A | 1.4500 |  |  | 150.0 |" in printed
    assert "B differs from A in: torch 2.5.1 against 2.13.0." in printed


@pytest.mark.parametrize(
    "of_b, sentence",
    [
        ({"train_data": "cc"}, "these runs differ in training data"),
        ({"stopped_at": 30}, "B_round1.txt has no result, unfinished at step 30 of 40"),
    ],
)
def test_incomparable_arms_are_rejected(of_b, sentence, tmp_path):
    write_rounds(tmp_path, **of_b)
    with pytest.raises(ValueError, match=sentence):
        ab.main(["--logs", str(tmp_path)])
    write_rounds(tmp_path)
    (tmp_path / "B_round2.txt").unlink()
    with pytest.raises(ValueError, match=r"B has the rounds \[1\], not \[1, 2\]"):
        ab.main(["--logs", str(tmp_path)])


def test_holms_correction():
    """The smallest of k p-values is multiplied by k, the next by k - 1; none falls or exceeds 1."""
    np.testing.assert_allclose(ab.holm([0.04, 0.01, 0.5, 0.02]), [0.08, 0.04, 0.5, 0.06])
    np.testing.assert_allclose(ab.holm([0.02, 0.03]), [0.04, 0.04])
    np.testing.assert_allclose(ab.holm([0.9, np.nan, 0.8]), [1, np.nan, 1])


# ---- ab.py: the runs ----------------------------------------------------------------------------
# A stand-in for train_gpt2.py: writes a log and weights, and adds a line to the file "runs".
FAKE = """
import json, os, pathlib, sys
fields = dict(argument[2:].split("=", 1) for argument in sys.argv[1:])
if "fail" in fields:
    sys.exit("one sentence")
mark = os.environ.get("MARK")
out = pathlib.Path(fields["log_dir"], fields["run_id"])
text = pathlib.Path(fields["log"]).read_text().replace("seed=1", "seed=" + fields["seed"])
out.with_suffix(".txt").write_text(text[: text.index("step:30/")] if "cut" in fields else text)
out.mkdir(exist_ok=True)
(out / "model.pt").touch()
with open(out.parent / "runs", "a") as file:
    print(json.dumps([out.name, fields.get("resume"), mark]), file=file)
"""


@pytest.fixture
def fake(tmp_path):
    """Return a command that starts FAKE in the place of train_gpt2.py."""
    (tmp_path / "train_gpt2.py").write_text(FAKE)
    return f"python {tmp_path}/train_gpt2.py --log={write_log(tmp_path / 'log.txt')}"


def test_arms_are_interleaved_and_continued(fake, tmp_path, capsys):
    out, python_b = tmp_path / "out", tmp_path / "python_b"
    python_b.write_text(f'#!/bin/sh\nMARK=b exec {sys.executable} "$@"\n')
    python_b.chmod(0o755)
    diff = tmp_path / "mark.diff"
    diff.write_text('--- a\n+++ b\n@@\n-mark = os.environ.get("MARK")\n+mark = "diff"\n')
    command = [fake, fake.replace("python", str(python_b), 1), f"--arm=c d: {diff}"]
    command += [f"--out={out}"]
    ab.main([*command, "--rounds=2"])
    printed = capsys.readouterr()
    runs = [json.loads(line) for line in (out / "runs").read_text().splitlines()]
    in_turn = ["A_round1", "B_round1", "c_d_round1", "c_d_round2", "B_round2", "A_round2"]
    assert [name for name, *_ in runs] == in_turn
    for name, resume, mark in runs:
        assert (resume, mark) == (None, {"A": None, "B": "b", "c": "diff"}[name[0]])
        assert runlog.read(out / f"{name}.txt").seed == int(name[-1])
    assert "| c d | 1.2500 | +0.0000" in printed.out and "| ms a step, ratio" in printed.out
    assert not list(out.glob("*/model.pt"))
    ab.main([*command, "--rounds=4"])  # two rounds more
    assert "4 rounds of" in (more := capsys.readouterr().out) and "ms a step" in more
    times = {path: path.stat().st_mtime_ns for path in out.glob("*.txt")}
    # Killed in the middle of a round: finished runs stay, and the begun one is resumed.
    begun = out / "B_round2.txt"
    begun.write_text(begun.read_text().partition("\nval_loss: ")[0] + "\n")
    ab.main([*command, "--rounds=4"])
    name, resume, _ = json.loads((out / "runs").read_text().splitlines()[-1])
    assert (name, resume) == ("B_round2", "auto")
    assert {path for path in times if path.stat().st_mtime_ns != times[path]} == {begun}
    assert "ms a step" not in capsys.readouterr().out  # its runs were not interleaved
    (tmp_path / "train_gpt2.py").write_text(FAKE + "# edited")
    with pytest.raises(ValueError, match="pass another --out"):
        ab.main([*command, "--rounds=4"])
    assert len((out / "runs").read_text().splitlines()) == 13


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["{fake}", "--arm=b: --fail=1"], "ended with 1: one sentence"),
        (["{fake}", "{fake}", "--out={tmp_path}/other"], "other holds logs of other runs"),
        (["{fake}", "{fake} --cut=1"], "unfinished at step 29 of 40"),
        (["bash run.sh", "{fake}"], "'bash run.sh' names no script"),
        (["{fake}", "{fake}", "--arm=B: --x=1"], "must have different names"),
        (["{fake}", "--arm=--max_ngram=0"], "must be `NAME: --setting=value"),
        (["{fake}", "--arm=b: no.diff"], "an existing file"),
        (["{fake}", "--arm=b: {tmp_path}/old.diff"], "does not apply: 0 places in"),
        (["{fake}", "--arm=b: {tmp_path}/twice.diff"], "does not apply: 2 places in"),
        (["{fake}", "{fake}", "--rounds=3"], "must be 2, 4, ..."),
        (["{fake}"], "give two commands, or one with --arm"),
        (["{fake}", "{fake}", "--logs=x"], "--logs: not allowed with argument --out"),
    ],
)
def test_invalid_commands_are_rejected(arguments, sentence, fake, tmp_path, capsys):
    (tmp_path / "old.diff").write_text("--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-nothing\n+more\n")
    (tmp_path / "twice.diff").write_text("@@\n-# line\n+more\n")
    write_log(tmp_path / "other" / "B_round2.txt")
    with open(tmp_path / "train_gpt2.py", "a") as script:
        script.write("# line\n" * 2)
    arguments = [text.format(fake=fake, tmp_path=tmp_path) for text in arguments]
    with pytest.raises((ValueError, SystemExit)) as refused:
        ab.main(["--rounds=2", f"--out={tmp_path}/out", *arguments])
    assert sentence in f"{refused.value}{capsys.readouterr().err}"
    assert len([*(tmp_path / "other").iterdir()]) == 1


# ---- repeat.py ----------------------------------------------------------------------------------
def test_a_series_of_seeds_is_trained_and_extended(tiny, monkeypatch, capsys):
    def run_here(command):
        assert command[:2] == [sys.executable, SCRIPT]
        main(parse_args(command[2:]))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(repeat, "subprocess", SimpleNamespace(run=run_here))
    monkeypatch.setattr(repeat, "signal", SimpleNamespace(SIGINT=0, signal=lambda *_: None))
    settings = ["--run_id=mine", "--target_val_loss=4", *options(tiny)]
    repeat.main(["2", *settings])
    repeat.main(["3", *settings])
    logs = [Path(tiny["log_dir"], f"mine_seed{seed}.txt") for seed in (1, 2, 3)]
    x = [runlog.read(log).val_loss for log in logs]
    assert logs[0].read_text().count("\nval_loss: ") == 1, "it was trained twice"
    t, p = stats.ttest_1samp(x, 4, alternative="less")
    printed = capsys.readouterr().out
    assert f"| mine | 3 | {np.mean(x):.4f} | {np.std(x, ddof=1):.4f} |" in printed
    assert f"t={t:.2f} p={p:.2g}; the mean's 95% interval" in printed
    with pytest.raises(ValueError, match=r"n_layer=2 \(here 1\)"):
        repeat.main(["3", *settings, "--n_layer=1"])
    logs[1].write_text(logs[1].read_text().replace("Train GPT-2", "Train", 1))
    with pytest.raises(ValueError, match="is of another version"):
        repeat.main(["3", *settings])


# ---- rerun.py -----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """A folder with the logs of a tiny record: an experiment in two subfolders, and another."""
    folder = tmp_path_factory.mktemp("record")
    stream = np.cumsum(np.random.default_rng(0).integers(1, 4, size=4000)) % 64
    write_shard(folder / "data" / "train_0.bin", stream[:3000])
    write_shard(folder / "data" / "val_0.bin", stream[3000:])
    data = {"train_files": f"{folder}/data/train_*.bin", "val_files": f"{folder}/data/val_*.bin"}
    runs = ("ab", "A_round1", 1, 6), ("ab", "B_round1", 1, 5), ("seeds", "B_round2", 2, 5)
    for place, name, seed, steps in runs:
        own = {"log_dir": str(folder / place), "run_id": name, "seed": seed}
        main(Hyperparameters(**{**TINY, **data, **own, "num_iterations": steps}))
    return folder


def test_a_record_runs_again_from_its_log(record, tmp_path):
    environment = {**os.environ, "PYTHONPATH": ""}
    done = run_tool("rerun.py", record, "seeds/B_round2", f"--log_dir={tmp_path}", env=environment)
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"seed 2, loss (\S+),", done.stdout)
    assert float(losses[0]) == pytest.approx(float(losses[1]), abs=0.002)
    assert "Within the spread" in done.stdout and "n=2" in done.stdout
    warning, _, later = done.stdout.partition(f"executing the code in {record}/seeds/B_round2.txt")
    assert later and "step:" not in warning and "step:1/5 train_loss" in later
    run = runlog.read(next(tmp_path.glob("rerun_B_round2_*.txt")))
    assert run.sources == runlog.read(record / "seeds" / "B_round2.txt").sources
    assert "commit" not in run.facts, "it ran the logged sources, outside the repository"


def test_the_experiment_with_the_most_seeds_is_chosen(record):
    run, group = rerun.choose(record, None)
    assert (run.path.stem, [other.seed for other in group]) == ("B_round1", [1, 2])
    run, group = rerun.choose(record, "ab/A_round1")
    assert (run.path.stem, [other.seed for other in group]) == ("A_round1", [1])
    run, group = rerun.choose(ROOT / "records" / "2026-11-25_Modern_Model", None)
    losses = [other.val_loss for other in group]
    assert f"n={len(losses)}: {np.mean(losses):.4f}" == "n=5: 1.2494"  # as README says


def test_an_old_script_runs_with_its_own_files_and_flags(record, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/data")  # as other programs may leave it
    text = (ROOT / "records" / "2026-11-21_CPU_Record" / "muon_seed1.txt").read_text()
    for setting, value in runlog.read(record / "ab" / "A_round1.txt").settings.items():
        line = f"hyperparameter {setting}="
        text = re.sub(f"^{line}.*$", f"{line}{value!r}", text, flags=re.M)
    (tmp_path / "old.txt").write_text(text)
    run = runlog.read(tmp_path / "old.txt")
    again = runlog.read(rerun.repeat(run, [], tmp_path))
    assert again.finished and again.sources == run.sources
    assert rerun.judge(again, run=again, group=[again]) == 0


def test_the_verdict_on_a_repetition(tmp_path, capsys):
    group = [runlog.read(path) for path in write_group(tmp_path, "a", [1.2, 1.25, 1.3])]

    def judge(group, **changes):
        again = runlog.read(write_log(tmp_path / "again.txt", seed=9, **changes))
        status = rerun.judge(again, group[0], group)
        return status, capsys.readouterr().out

    status, printed = judge(group, loss=1.25, matmul_dtype="int8")
    assert status == 0 and "Within the spread of the record" in printed
    assert "matmul_dtype is int8 here, float32 in the record" in printed
    status, printed = judge(group, loss=9.0)
    assert status == 1 and "NOT within" in printed
    status, printed = judge(group[:1], loss=9.0)
    assert status == 0 and "only one seed" in printed
    for name in "train_data", "val_data":
        with pytest.raises(ValueError, match="these runs differ in"):
            judge(group, **{name: "cc"})


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["{record}", "x"], "has no run 'x': give one of ['ab/A_round1', 'ab/B_round1'"),
        (["{record}/data"], "holds no log of a training run"),
        (["{tmp_path}"], "holds no log of a training run"),  # only of one that was continued
        (["{record}/none"], "is not a folder"),
        (["{record}", "--n_layer=9"], "--n_layer=9 would change the experiment"),
    ],
)
def test_invalid_reruns_are_rejected(arguments, sentence, record, tmp_path):
    write_log(tmp_path / "continued.txt", first=21)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        rerun.main([text.format(record=record, tmp_path=tmp_path) for text in arguments])


def test_prediction_interval_covers_as_it_says():
    generator = np.random.default_rng(0)
    inside = 0
    for x in generator.normal(1.3, 0.01, (20000, 6)):
        low, high = rerun.prediction_interval(x[:5])
        inside += low <= x[5] <= high
    assert inside / 20000 == pytest.approx(0.99, abs=0.002)
    low, high = rerun.prediction_interval([1.2, 1.2])  # logged losses are rounded
    assert low < 1.2 < high
