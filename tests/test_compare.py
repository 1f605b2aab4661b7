"""compare.py, which tests whether losses differ, and repeat.py, which trains several seeds."""

import re
import sys
from pathlib import Path

import compare
import numpy as np
import pytest
import repeat
import runlog
import train_modern
from conftest import MODERN, MODERN_SCRIPT, SCRIPT, options
from scipy import stats
from test_records import write_group, write_log

from train_gpt2 import RECIPE, main, parse_args


# ---- compare.py ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "arguments, status, sentence",
    [
        # By hand: the mean of x is 2, its variance 1, so t = (2 - 4) / sqrt(1 / 3).
        ("--target=4", 0, "t=-3.46 p=0.037; the mean's 95% interval -0.4841 to 4.4841"),
        ("--target=4 --n=3", 1, "Not significant: p=0.037 is not below 0.01"),
        ("--target=40 --n=3", 0, "Significant: p=0.00012 is below 0.01, with n=3"),
        ("--target=-40 --n=3", 1, "Not significant: p=1"),
        # y: mean 4, variance 4. t = -2 / sqrt(1/3 + 4/3), df = (5/3)^2 / ((1/9 + 16/9) / 2).
        ("--against {}/y*", 0, "Welch's t=-1.55 df=2.9 p=0.22 (two-sided), p=0.11 (one-sided: x"),
        ("--against {}/y*", 0, "x minus y: -2.0000, 95% interval -6.1554 to +2.1554."),
        ("--against {}/y*", 0, "They differ in: learning_rate 0.01 against 0.02."),
        ("--against {}/y*", 0, "No seed is on both sides, so the runs are not paired."),
        ("--against {}/y*", 0, "No verdict: pass --n"),
        ("--against {}/z* --n=3", 0, "Significant: p="),
        # Pairs with p: differences -1, -2, -3, so t = -2 / sqrt(1/3), with 2 degrees of freedom.
        ("--against {}/p*", 0, "3 pairs of runs with equal seeds; standard deviation 1.0000."),
        ("--against {}/p*", 0, "x minus p: -2.0000, 95% interval -4.4841 to +0.4841."),
        ("--against {}/p*", 0, "Student's t=-3.46 df=2.0 p=0.074 (two-sided), p=0.037 (one-sided"),
        ("--against {}/p*", 0, "| 2 | 2.0000 | 4.0000 | -2.0000 |"),
        ("--against {}/p*", 0, "1,234 and 999 parameters, so the runs of a pair start from"),
        ("--against {}/p* --n=3", 1, "Not significant: p=0.037"),
        ("--against {}/other/x*", 0, "first minus second: -2.0000"),
        (
            "--against {}/p* --nats_per_percent=0.5",
            0,
            "In per cent of the steps (minus: x saves steps): -3.9%, -8.5% to +1.0%.",
        ),
    ],
)
def test_statistics_match_values_computed_by_hand(arguments, status, sentence, tmp_path, capsys):
    write_group(tmp_path, "x", [1, 2, 3], target_val_loss=0)
    write_group(tmp_path, "y", [2, 4, 6], first_seed=4, target_val_loss=0, learning_rate=0.02)
    write_group(tmp_path, "z", [21, 22, 23], first_seed=4, target_val_loss=0)
    write_group(tmp_path, "p", [2, 4, 6], target_val_loss=0, parameters=999)
    write_group(tmp_path / "other", "x", [2, 4, 6], target_val_loss=0)
    assert compare.main([f"{tmp_path}/x*", *arguments.format(tmp_path).split()]) == status
    assert sentence in capsys.readouterr().out


@pytest.mark.parametrize("first_seed", [1, 6])
def test_the_tests_are_those_of_scipy(first_seed, tmp_path):
    """Paired with equal seeds, Welch's with different ones."""
    x, y = np.random.default_rng(0).normal([[3.6], [3.61]], 0.005, size=(2, 5)).round(4)
    runs = [runlog.read(path) for path in write_group(tmp_path, "x", x)]
    others = [runlog.read(path) for path in write_group(tmp_path, "y", y, first_seed)]
    pairs = compare.pairs_of(runs, others[::-1])
    if first_seed == 1:
        expected = stats.ttest_rel(x, y, alternative="less")
        p = compare.in_pairs("x", "y", pairs)
    else:
        assert pairs == []
        expected = stats.ttest_ind(x, y, equal_var=False, alternative="less")
        p = compare.against_group("x", x, "y", y)
    assert p == pytest.approx(expected.pvalue)


TARGET, AGAINST = "--target=1.5", "--n=3 --against {}/b*"


@pytest.mark.parametrize(
    "third, other, arguments, sentence",  # changes of the third run of a, and of all runs of b
    [
        ({"seed": 1}, {}, TARGET, "share a seed: [1, 1, 2]"),
        ({"stopped_at": 30}, {}, TARGET, "unfinished at step 30 of 40"),
        ({"loss": float("nan")}, {}, TARGET, "a_seed3.txt diverged by step 40"),
        ({"batch_size": 8}, {}, TARGET, "in: batch_size 8 against 4"),
        ({"train_data": "cc"}, {}, TARGET, "these runs differ in training data"),
        ({}, {}, "--target=nan", "--target must be a finite number"),
        ({}, {}, "--target=1.5 --nats_per_percent=1", "--nats_per_percent needs --against"),
        ({"source": "another"}, {}, TARGET, "in: source of the script"),
        ({"torch": "2.5.1"}, {}, TARGET, "in: torch 2.5.1 against 2.13.0"),
        ({"processes": 2}, {}, TARGET, "these runs differ in number of processes"),
        ({}, {"val_data": "cc"}, AGAINST, "these runs differ in validation data"),
        ({}, {"train_data": "cc"}, AGAINST, "these runs differ in training data"),
        ({}, {"val_tokens": 72}, AGAINST, "these runs differ in number of validation tokens"),
        ({}, {"sequence_length": 4}, AGAINST, "these runs differ in sequence_length"),
        ({}, {"matmul_dtype": "bfloat16"}, AGAINST, "these runs differ in dtype of matmuls"),
        ({"seed": 4}, {}, AGAINST, "the seeds [3, 4] are on one side only"),
        ({}, {"num_iterations": 20}, AGAINST, "a read 1,280 tokens and b 640: the first side may"),
        ({}, {}, AGAINST, "all differences of the pairs are 0.0: a test needs some spread"),
        ({}, {}, "--target=1.5 --n=5", "a has 3 runs, but n=5 was fixed in advance"),
        ({}, {}, "--target=1.7", "not the target of these runs: pass --target=1.5"),
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


def test_the_same_data_may_be_in_another_folder(tmp_path):
    write_log(tmp_path / "a_seed1.txt", 1.2, train_files="data/*.bin")
    write_log(tmp_path / "a_seed2.txt", 1.3, seed=2, train_files="elsewhere/*.bin")
    assert compare.main([f"{tmp_path}/a*", "--target=1.5"]) == 0


# ---- repeat.py ----------------------------------------------------------------------------------
@pytest.mark.parametrize("word", ["", "modern"])
def test_a_series_of_seeds_is_trained_and_extended(word, tiny, monkeypatch, capsys):
    script, recipe = (MODERN_SCRIPT, train_modern.RECIPE) if word else (SCRIPT, RECIPE)

    def run_here(command):
        assert command[:2] == [sys.executable, script]
        main(parse_args(command[2:], recipe), recipe)
        return 0

    monkeypatch.setattr(repeat, "run_child", run_here)
    settings = [*filter(None, [word]), "--run_id=mine", "--target_val_loss=4"]
    settings += options(tiny | (MODERN if word else {}))
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
    with pytest.raises(ValueError, match=r"mine_seed1.txt has target_val_loss=4.0 \(here 5.0\)"):
        repeat.main(["4", *settings, "--target_val_loss=5"])
    assert not Path(tiny["log_dir"], "mine_seed4.txt").exists()
    logs[1].write_text(logs[1].read_text().replace("Train GPT-2", "Train", 1))
    with pytest.raises(ValueError, match="is of another version"):
        repeat.main(["3", *settings])


def test_an_unfinished_run_is_not_continued_by_another_version(tmp_path, monkeypatch):
    """It would be spoiled, because its log would hold both versions."""
    write_log(tmp_path / "mine_seed1.txt", stopped_at=30, source="an earlier version")
    (tmp_path / "mine_seed1").mkdir()
    (tmp_path / "mine_seed1" / "state_step0000000030.pt").touch()
    monkeypatch.setattr(repeat, "run_child", lambda command: pytest.fail("it was started"))
    with pytest.raises(ValueError, match=r"is of another version of train_gpt2\.py"):
        repeat.main(["2", "--run_id=mine", f"--log_dir={tmp_path}"])
