"""Ways to a false result, each of which an earlier version took: the log, other runs, edits."""

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import runlog
from conftest import (
    SCRIPT,
    faulty_script,
    launcher,
    run_forked,
    run_here,
    trained,
)

import train_gpt2

KILL = "os.kill(os.getpid(), signal.SIGKILL)"
REPLACE = "data = path.read_bytes(); path.unlink(); path.write_bytes(data)"
LIMIT = "resource.setrlimit(resource.RLIMIT_FSIZE, ({}, -1))"


@pytest.fixture
def fields(tiny):
    return {**tiny, "run_id": "r", "resume": "auto", "dtype": "float32"}


def results(fields):
    """Return the losses after val_loss: in the log of a run, as text."""
    text = Path(fields["log_dir"], "r.txt").read_text()
    return re.findall(r"^val_loss: ?(.*)$", text, re.M)


def check_log(fields, loss):
    """Check that the log holds this result alone, and that the tools can read it."""
    assert set(results(fields)) == {f"{loss:.4f}"}
    run = runlog.read(f"{fields['log_dir']}/r.txt")
    assert run.finished and run.val_loss == round(loss, 4)


def check_resumed(fields, loss):
    """Resume a run, and check its log."""
    run_here(fields)
    check_log(fields, loss)


@pytest.fixture
def loss(tiny):
    """The loss of the undisturbed run."""
    return run_here(tiny, dtype="float32", run_id="undisturbed")


# ---- The log is whole ----------------------------------------------------------------------------
def test_a_file_limit_never_cuts_a_result(fields, loss, tmp_path):
    """A full disk or a quota wrote `val_loss: 4` for 4.5333."""
    run_here(fields)
    log = (tmp_path / "logs" / "r.txt").read_bytes()
    statuses = set()
    for limit in len(log) - 700, log.index(b"\nval_loss: ") + 12, len(log) + 100:
        shutil.rmtree(tmp_path / "logs" / "r")
        os.remove(tmp_path / "logs" / "r.txt")
        done = run_forked(fields, script=launcher(tmp_path, LIMIT.format(limit)))
        statuses.add(done.returncode)
        if done.returncode == 0:
            check_log(fields, loss)
        else:
            assert "free disk space" in done.stderr
            assert set(results(fields)) <= {f"{loss:.4f}"}
        check_resumed(fields, loss)
    assert statuses == {0, 1}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_when_the_run_is_marked_as_finished_loses_no_result(when, fields, loss, tmp_path):
    """The result was logged after model.pt had appeared, or never."""
    code = f"""
replace = os.replace

def kill(partial, path):
    if path.name == "model.pt" and {when == "before"}:
        {KILL}
    replace(partial, path)
    if path.name == "model.pt":
        {KILL}

os.replace = kill"""
    done = run_forked(fields, script=launcher(tmp_path, code))
    assert done.returncode == -signal.SIGKILL
    check_resumed(fields, loss)


def test_a_log_that_is_replaced_gets_the_result(fields, loss, tmp_path):
    """As by an editor or `sed -i`. The result was in no log."""
    path = tmp_path / "logs" / "r.txt"
    fault = f"path = Path({str(path)!r}); {REPLACE}"
    shown = trained(fields, script=faulty_script(tmp_path, fault))
    assert f"\nval_loss: {loss:.4f}\n" in shown
    check_log(fields, loss)


# ---- Other runs ----------------------------------------------------------------------------------
def test_a_slow_start_does_not_overwrite_a_finished_run(tiny, tmp_path, monkeypatch):
    """It had looked for results before it waited for its lock."""
    fields = {**tiny, "run_id": "r"}
    flock = train_gpt2.fcntl.flock

    def lock_after_another_run(file, operation):
        monkeypatch.undo()
        run_here(fields, seed=1)
        flock(file, operation)

    monkeypatch.setattr(train_gpt2.fcntl, "flock", lock_after_another_run)
    with pytest.raises(train_gpt2.UserError, match="r exists: pass another --run_id"):
        run_here(fields, seed=2)
    assert train_gpt2.read_pt(tmp_path / "logs" / "r" / "model.pt")["fixed"]["seed"] == 1


# ---- Edits of the script -------------------------------------------------------------------------
def test_an_edit_of_the_script_is_said_and_marked(fields, tmp_path):
    """A finished run was taken for one of the edited script, and a log had two sources."""
    edited = tmp_path / "train_gpt2.py"
    edited.write_text(SCRIPT.read_text() + "# an edit\n")
    warning = "warning: the script has changed since it saved "
    run_here(fields, 2)
    shown = trained(fields, script=edited)
    assert f"{warning}{tmp_path}/logs/r/state_step0000000002.pt\n" in shown
    assert runlog.read(tmp_path / "logs" / "r.txt").edited
    shown = trained(fields)
    assert f"{warning}{tmp_path}/logs/r/model.pt\n" in shown and "nothing to do" in shown
