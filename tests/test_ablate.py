"""ablate.py: arms that differ in one thing, over the same seeds, gone on with after a kill."""

import ablate
import numpy as np
import pytest
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


def test_it_runs_goes_on_and_compares(tiny, tmp_path, arms, monkeypatch, capsys):
    def forked(script, argv):
        return run_forked(dict(flag[2:].split("=", 1) for flag in argv), 1, script).returncode

    def run(*arguments):
        ablate.main([str(argument) for argument in arguments])
        return capsys.readouterr().out

    monkeypatch.setattr(ablate, "train", forked)
    out, picture = tmp_path / "out", tmp_path / "picture.png"
    fields = {**tiny, "num_iterations": 4}
    arguments = ["--best", flags(fields), "--out", out, "--seeds", 3, *arms]
    run(*arguments)
    logs = sorted(path.name for path in out.iterdir())  # and no weights
    names = ("best", "no_change", "slow")
    assert logs == [f"{name}_seed{seed}.txt" for name in names for seed in (1, 2, 3)]
    # killed: the begun log of one run goes, the others stay
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    begun = out / "slow_seed2.txt"
    begun.write_text(begun.read_text().partition("\nresult ")[0])
    (out / "slow_seed2").mkdir()
    (out / "slow_seed2" / "state_step0000000002.pt").write_text("half")
    again = run(*arguments, "--picture", picture)
    assert again.startswith("slow_seed2: ") and not (out / "slow_seed2").exists()
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


def test_holms_rule():
    """The least p times their number, the next times one less, never falling, at most 1."""
    np.testing.assert_allclose(ablate.holm([0.04, 0.01, 0.5, 0.02]), [0.08, 0.04, 0.5, 0.06])
    np.testing.assert_allclose(ablate.holm([0.02, 0.03]), [0.04, 0.04])
    assert ablate.holm([0.9, 0.8]) == [1.0, 1.0]


@pytest.mark.parametrize(
    "arm, sentence",
    [
        ("--ngrams=0", "must be `name: settings or a .diff`"),
        ("best: --ngrams=0", "the name best is taken"),
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
