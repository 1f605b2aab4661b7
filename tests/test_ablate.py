"""ablate.py: arms that differ in one thing, over the same seeds, gone on with after a kill."""

import fcntl

import ablate
import numpy as np
import pytest
import runlog
from conftest import ROOT, run_forked


def flags(settings):
    return " ".join(f"--{name}={value}" for name, value in settings.items() if name != "log_dir")


@pytest.fixture
def arms(tmp_path):
    """Arguments for two arms beside the best; one is a diff that adds a comment."""
    first = (ROOT / "train_gpt2.py").read_text().splitlines()[0]
    diff = tmp_path / "nothing.diff"
    # the docstring's first line with a comment in it: the same program
    diff.write_text(
        f"--- a/train_gpt2.py\n+++ b/train_gpt2.py\n@@ -1,2 +1,3 @@\n {first}\n+more\n \n"
    )
    return ["--arm", "slow: --muon_learning_rate=0.0001", "--arm", f"no change: {diff}"]


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs the tool and returns what it prints."""

    def forked(script, argv):
        return run_forked(dict(flag[2:].split("=", 1) for flag in argv), 1, script).returncode

    def run(*arguments):
        ablate.main([str(argument) for argument in arguments])
        return capsys.readouterr().out

    monkeypatch.setattr(ablate, "train", forked)
    return run


def test_it_runs_goes_on_and_compares(tiny, tmp_path, arms, run):
    out, picture = tmp_path / "out", tmp_path / "picture.png"
    fields = {**tiny, "num_iterations": 4}
    arguments = ["--best", flags(fields), "--out", out, "--seeds", 3, *arms]
    run(*arguments)
    logs = sorted(path.name for path in out.iterdir())  # and no weights
    names = ("best", "no_change", "slow")
    assert logs == [f"{name}_seed{seed}.txt" for name in names for seed in (1, 2, 3)]
    # killed: the begun log of one run goes on, the others stay
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    begun = out / "slow_seed2.txt"
    whole = runlog.read(begun)
    kept = begun.read_text().partition("\nresult ")[0] + "\n"
    begun.write_text(kept)
    again = run(*arguments, "--picture", picture)
    assert again.startswith("slow_seed2: ") and not (out / "slow_seed2").exists()
    assert begun.read_text().startswith(kept) and runlog.read(begun).val_loss == whole.val_loss
    changed = [path for path in out.iterdir() if path.stat().st_mtime_ns != times[path]]
    assert changed == [begun]
    assert picture.exists() and picture.with_suffix(".svg").exists()
    table = run("--logs", out)
    assert again.endswith(table)
    rows = {line.split(" | ")[0].strip("| "): line for line in table.splitlines()}
    assert "+0.0000 (+0.0000 to +0.0000)" in rows["no change"] and "| n/a |" in rows["no change"]
    assert " | +" in rows["slow"]
    other = out / "best_seed3.txt"
    kept = other.read_text()
    other.write_text(kept.replace("\nhyperparameter n_head=2\n", "\nhyperparameter n_head=1\n"))
    with pytest.raises(ValueError, match=r"best_seed3.txt has another settings than"):
        run("--logs", out)
    other.write_text(kept)
    (out / "slow_seed3.txt").unlink()
    with pytest.raises(ValueError, match=r"slow has the seeds \[1, 2\], not \[1, 2, 3\]"):
        run("--logs", out)


def test_fault_1_runs_that_the_tool_did_not_write_stay(tiny, tmp_path, run):
    """A log and checkpoints of another run, a live run, files of others in a folder."""
    out = tmp_path / "out"
    best = {**tiny, "num_iterations": 4, "save_every": 2}
    arguments = ["--best", flags(best), "--out", out, "--seeds", 2, "--arm", "b: --n_head=1"]
    log, checkpoint = out / "best_seed2.txt", out / "best_seed2" / "state_step0000000002.pt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_text("mine")
    for other in "notes\n", "print()\nhyperparameter n_head=2\n":
        log.write_text(other)
        with pytest.raises(ValueError, match=r"best_seed2\.txt is no log of a training run"):
            run(*arguments)
        assert (log.read_text(), checkpoint.read_text()) == (other, "mine")
        assert sorted(out.iterdir()) == [log.with_suffix(""), log]  # nothing ran
    # the beginning of a run with other settings, and with another seed
    for name, value in ("learning_rate", 0.5), ("seed", 7):
        settings = {**best, "seed": 2, "run_id": "other", name: value}
        assert run_forked({**settings, "log_dir": tmp_path / name}).returncode == 0
        text = (tmp_path / name / "other.txt").read_text().partition("\nresult ")[0] + "\n"
        log.write_text(text)
        said = rf"best_seed2\.txt is of another run: it differs in {name} {value} against "
        with pytest.raises(ValueError, match=said):
            run(*arguments)
        assert (log.read_text(), checkpoint.read_text()) == (text, "mine")
        assert sorted(out.iterdir()) == [log.with_suffix(""), log]


def test_fault_1_a_live_run_is_left_alone(tiny, tmp_path, run):
    out = tmp_path / "out"
    best = {**tiny, "num_iterations": 4}
    arguments = ["--best", flags(best), "--out", out, "--seeds", 2, "--arm", "b: --n_head=1"]
    run(*arguments)
    log = out / "b_seed2.txt"
    text = log.read_text().partition("\nresult ")[0] + "\n"
    log.write_text(text)
    with open(log, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as the script does
        with pytest.raises(ValueError, match=r"b_seed2\.txt is being written by another process"):
            run(*arguments)
    assert log.read_text() == text


def test_fault_1_a_run_that_was_stopped_goes_on_from_its_checkpoint(tiny, tmp_path, run):
    """What the tool did not write stays in the run's folder."""
    out = tmp_path / "out"
    best = {**tiny, "num_iterations": 4, "save_every": 2}
    arguments = ["--best", flags(best), "--out", out, "--seeds", 2, "--arm", "b: --n_head=1"]
    run(*arguments)
    log, folder = out / "b_seed1.txt", out / "b_seed1"
    whole, names = runlog.read(log), sorted(path.name for path in folder.iterdir())
    assert names == ["state_step0000000002.pt", "state_step0000000004.pt"]  # as asked for
    (folder / names[1]).unlink()
    (folder / "notes.txt").write_text("mine")
    lines = log.read_text().splitlines(keepends=True)
    cut = next(i for i, line in enumerate(lines) if line.startswith("step:3/"))
    log.write_text("".join(lines[:cut]))
    assert run(*arguments).startswith(f"b_seed1: {whole.val_loss:.4f}\n")
    assert "\nresume=auto: continuing after step 2\n" in log.read_text()
    points = [point[:2] for point in runlog.read(log).points["train"]]
    assert points == [point[:2] for point in whole.points["train"]]
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", *names]


def test_settings_that_cannot_be_are_refused_before_anything_runs(tiny, tmp_path, run):
    arguments = ["--best", flags(tiny), "--out", tmp_path / "out", "--arm", "b: --n_heads=1"]
    with pytest.raises(ValueError, match="unrecognized arguments: --n_heads=1"):
        run(*arguments)
    assert not list((tmp_path / "out").iterdir())


def test_holms_rule():
    """The least p times their number, the next times one less, never falling, at most 1."""
    np.testing.assert_allclose(ablate.holm([0.04, 0.01, 0.5, 0.02]), [0.08, 0.04, 0.5, 0.06])
    np.testing.assert_allclose(ablate.holm([0.02, 0.03]), [0.04, 0.04])
    assert ablate.holm([0.9, 0.8]) == [1.0, 1.0]


@pytest.mark.parametrize(
    "arm, sentence",
    [
        ("--max_ngram=0", "must be `name: settings or a .diff`"),
        ("best: --max_ngram=0", "the name best is taken"),
        ("empty:", "must name settings, --name=value, or a file that ends in .diff"),
        ("gone: no.diff", "no.diff is not a file"),
    ],
)
def test_an_arm_that_cannot_be(arm, sentence):
    with pytest.raises(ValueError) as error:
        ablate.parse_arm(arm)
    assert sentence in str(error.value)


def test_a_diff_of_another_source_is_refused(tmp_path):
    diff = tmp_path / "old.diff"
    diff.write_text("--- a/train_gpt2.py\n+++ b/train_gpt2.py\n@@ -1 +1 @@\n-nothing\n+more\n")
    with pytest.raises(ValueError, match="does not apply to train_gpt2"):
        ablate.script_of(diff, tmp_path)
