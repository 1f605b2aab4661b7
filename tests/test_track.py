"""track.py sends the points of a log to TensorBoard and Weights & Biases, also while it grows."""

import re
import sys
from types import SimpleNamespace

import pytest
import runlog
import track
from test_records import write_log


def test_tensorboard_reads_back_the_points_of_a_growing_log(tmp_path, monkeypatch):
    """Steps that a killed and resumed run has logged twice are sent once."""
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    whole = write_log(tmp_path / "whole.txt")
    expected, text = runlog.read(whole), whole.read_text()
    growing = write_log(tmp_path / "growing.txt", stopped_at=25)
    parts = (text[i : i + 97] for i in range(0, len(text), 97))  # which may end within a line

    def write_a_part(_):
        with open(growing, "a") as file:
            file.write(next(parts))

    monkeypatch.setattr(track, "time", SimpleNamespace(sleep=write_a_part))
    track.main([str(growing), "--tensorboard", str(tmp_path / "board")])
    folder = tmp_path / "board" / tmp_path.name / "growing"
    events = event_accumulator.EventAccumulator(str(folder))
    events.Reload()
    for kind, points in expected.points.items():
        sent = [(event.step, event.value) for event in events.Scalars(f"{kind}_loss")]
        assert sent == [(step, pytest.approx(loss)) for step, loss, _ in points]
    seconds = [(event.step, event.value) for event in events.Scalars("train_seconds")]
    assert dict(seconds) == {step: pytest.approx(0.007 * step) for step in range(41)}
    assert [step for step, _ in seconds] == sorted(step for step, _ in seconds)
    assert "hyperparameters/text_summary" in events.Tags()["tensors"]


def test_a_tensorboard_folder_that_is_used_again_keeps_the_earlier_runs(tmp_path):
    """Logs of one name in two folders are two runs. Sending a log again replaces what was sent."""
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    logs = [
        tmp_path / "a" / "seed1.txt",
        tmp_path / "a" / "seed2.txt",
        tmp_path / "b" / "seed1.txt",
    ]
    for log in [*logs, logs[0]]:
        log.parent.mkdir(exist_ok=True)
        if not log.exists():
            write_log(log)
        track.main([str(log), "--tensorboard", str(tmp_path / "board")])
    for log in logs:
        folder = tmp_path / "board" / log.parent.name / log.stem
        events = event_accumulator.EventAccumulator(str(folder))
        events.Reload()
        points = runlog.read(log).points["train"]
        assert len(events.Scalars("train_loss")) == len(points)


def test_wandb_writes_a_run_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name, value in dict(MODE="offline", DIR=tmp_path, SILENT="true").items():
        monkeypatch.setenv(f"WANDB_{name}", str(value))
    monkeypatch.setenv("HOME", str(tmp_path))
    track.main([str(write_log(tmp_path / "a.txt")), "--wandb", "mine"])
    wandb.teardown()  # waits for its service, as the end of a process does
    [run] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = run.read_bytes()
    assert b"train_loss" in content and b"val_loss" in content and b"n_embd" in content


def test_track_ends_when_the_log_is_deleted(tmp_path, monkeypatch):
    log = write_log(tmp_path / "log.txt", stopped_at=25)
    monkeypatch.setattr(track, "time", SimpleNamespace(sleep=lambda _: log.unlink()))
    steps = [step for step, _ in track.new_points(runlog.read(log))]
    assert max(steps) == 25


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["nowhere.txt", "--tensorboard=x"], "nowhere.txt is not a regular file"),
        (["log.txt", "--tensorboard=x"], "tensorboard is not installed: PYTHON tensorboard$"),
        (["log.txt", "--tensorboard="], "name of DIR or PROJECT is empty"),
        (["log.txt", "--wandb=x"], "wandb is not installed: PYTHON wandb$"),
    ],
)
def test_mistakes_are_one_sentence(arguments, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "log.txt")
    for name in "tensorboard", "wandb":
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    sentence = sentence.replace("PYTHON", f"{re.escape(sys.executable)} -m pip install")
    with pytest.raises((SystemExit, ValueError), match=sentence):
        track.main(arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["log.txt"]
