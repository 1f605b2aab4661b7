"""track.py sends the points of a log to TensorBoard and Weights & Biases, also while it grows."""

import re
import sys
import threading
import time
from pathlib import Path

import pytest
import track
from conftest import losses, run_here


@pytest.fixture
def log(tiny):
    """The log of a run."""
    run_here(tiny, run_id="run")
    return Path(tiny["log_dir"], "run.txt")


def grow(path, text):
    """Write a text to a file in small parts, from another thread. Parts may end within a line."""

    def write():
        with open(path, "a", encoding="utf-8") as file:
            for i in range(0, len(text), 997):
                file.write(text[i : i + 997])
                file.flush()
                time.sleep(0.001)

    path.write_text("")
    threading.Thread(target=write).start()


def test_tensorboard_reads_back_the_points_of_a_growing_log(log, tmp_path, monkeypatch):
    """Steps that a killed and resumed run has logged twice are sent once."""
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    text = log.read_text()
    grow(tmp_path / "growing.txt", text.partition("step:5/")[0] + text)
    follow = track.follow
    monkeypatch.setattr(track, "follow", lambda path: follow(path, pause=0.01))
    track.main([str(tmp_path / "growing.txt"), "--tensorboard", str(tmp_path / "board")])
    events = event_accumulator.EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    for name in "train_loss", "val_loss":
        logged = [(int(step), float(loss)) for step, kind, loss in losses(text) if kind == name]
        read = [(event.step, event.value) for event in events.Scalars(name)]
        assert read == [(step, pytest.approx(loss)) for step, loss in logged] and read
    rates = [event.value for event in events.Scalars("learning_rate")]
    assert rates == pytest.approx([0.01, 0.01, 0])
    ms = re.findall(r"^step:.* train_time:(\d+)ms", text, re.M)
    seconds = [event.value for event in events.Scalars("train_seconds")]
    assert seconds == pytest.approx([int(time) / 1000 for time in ms])
    assert "hyperparameters/text_summary" in events.Tags()["tensors"]


def test_a_log_that_is_started_over_is_read_from_its_start(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("step:1/9\nhalf of a li")
    lines = track.follow(path, pause=0.01)
    assert next(lines) == "step:1/9"
    path.write_text("anew\nresult x\n")
    assert list(lines) == ["anew", "result x"]


def test_wandb_writes_a_run_offline(log, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name, value in dict(MODE="offline", DIR=tmp_path, SILENT="true").items():
        monkeypatch.setenv(f"WANDB_{name}", str(value))
    monkeypatch.setenv("HOME", str(tmp_path))
    track.main([str(log), "--wandb", "mine"])
    wandb.teardown()  # waits for its service, as the end of a process does
    [run] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = run.read_bytes()
    assert b"train_loss" in content and b"learning_rate" in content and b"n_embd" in content


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["nowhere.txt", "--tensorboard=x"], "nowhere.txt is not a file"),
        (["log.txt", "--tensorboard=x"], "pip install tensorboard"),
        (["log.txt", "--wandb=x"], "pip install wandb"),
    ],
)
def test_mistakes_are_one_sentence(arguments, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.txt").write_text("result\n")
    for name in "tensorboard", "wandb":
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises((SystemExit, ValueError), match=sentence):
        track.main(arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["log.txt"]
