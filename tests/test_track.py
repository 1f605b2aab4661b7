"""track.py: what a log says arrives in TensorBoard and Weights & Biases, also while it grows."""

import importlib.util
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import track
from conftest import ROOT, losses

from train_gpt2 import Hyperparameters, main

TRACK = ROOT / "records" / "tools" / "track.py"


STEPS = [("val", 0), ("train", 1), ("train", 2), ("val", 2), ("train", 3), ("train", 4), ("val", 4)]


def line_of(kind, step):
    tail = f" data_hash:0123456789ab lr:{0.01 if step < 4 else 0}" if kind == "val" else ""
    times = f"train_time:{9 * step}ms step_avg:9.00ms"
    return f"step:{step}/4 {kind}_loss:{5 - step / 7:.4f} {times}{tail}"


@pytest.fixture
def log(tmp_path):
    """A log in the format of train_gpt2.py."""
    head = [
        "    log('step:1/4')  # the source",
        "hyperparameter n_embd=16",
        "hyperparameter lr=[1]",
    ]
    lines = [*head, "torch:2", *(line_of(*step) for step in STEPS), "result val_loss:4.4286"]
    path = tmp_path / "run.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_log_of_a_run_is_read(tiny):
    main(Hyperparameters(**{**tiny, "run_id": "run"}))
    text = Path(tiny["log_dir"], "run.txt").read_text()
    (step, settings), *points = track.points_of(text.splitlines())
    assert step is None and settings["n_embd"] == 16
    found = [
        (str(step), name, f"{value:.4f}")
        for step, values in points
        for name, value in values.items()
        if name.endswith("_loss")
    ]
    assert found == losses(text) and len(found) == 9
    rates = [values["learning_rate"] for _, values in points if "learning_rate" in values]
    assert rates == [0.01, 0.01, 0]


def grow(path, text):
    """Write a text to a file in small parts, cut anywhere, from another thread."""

    def write():
        with open(path, "a", encoding="utf-8") as file:
            for i in range(0, len(text), 997):
                file.write(text[i : i + 997])
                file.flush()
                time.sleep(0.001)

    path.write_text("")
    threading.Thread(target=write).start()


def test_tensorboard_reads_back_the_points_of_a_growing_log(log, tmp_path, monkeypatch):
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    text = log.read_text()
    grow(tmp_path / "growing.txt", text)
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
    assert rates == [pytest.approx(0.01), pytest.approx(0.01), 0]
    assert "hyperparameters/text_summary" in events.Tags()["tensors"]


def test_repeated_steps_are_sent_once(log):
    lines = log.read_text().splitlines()
    resumed = [*lines[:-3], *lines]  # as of a run that was killed and went on
    assert list(track.points_of(resumed)) == list(track.points_of(lines))


def test_a_log_that_is_begun_anew_is_read_from_its_start(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("step:1/9\nhalf of a li")
    lines = track.follow(path, pause=0.01)
    assert next(lines) == "step:1/9"
    path.write_text("anew\nresult x\n")
    assert list(lines) == ["anew", "result x"]


def test_wandb_gets_the_settings_and_the_points(log, tmp_path, monkeypatch):
    """By a stand-in with wandb's interface."""
    sent = {"steps": []}

    class Run:
        config = type("Config", (), {"update": lambda self, values: sent.update(config=values)})()

        def log(self, values, step):
            sent["steps"].append((step, values))

        def __enter__(self):
            return self

        def __exit__(self, *error):
            sent["finished"] = True

    def init(project, name):
        assert (project, name) == ("mine", "run")
        return Run()

    stand_in = type(sys)("wandb")
    stand_in.init = init
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    track.main([str(log), "--wandb", "mine"])
    assert sent["finished"] and sent["config"] == {"n_embd": 16, "lr": [1]}
    assert [step for step, _ in sent["steps"]] == [step for _, step in STEPS]


@pytest.mark.skipif(not importlib.util.find_spec("wandb"), reason="wandb is not installed")
def test_wandb_writes_a_run_offline(log, tmp_path):
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path),
                   "WANDB_SILENT": "true", "HOME": str(tmp_path)}  # fmt: skip
    done = subprocess.run(
        [sys.executable, TRACK, log, "--wandb", "mine"],
        capture_output=True, text=True, timeout=200, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [run] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = run.read_bytes()
    assert b"train_loss" in content and b"learning_rate" in content and b"n_embd" in content


@pytest.mark.parametrize(
    "arguments, missing, sentence",
    [
        (
            ["nowhere.txt", "--tensorboard=x"],
            [],
            "nowhere.txt is not a file: name a log",
        ),
        (["LOG", "--tensorboard=x"], ["tensorboard"], "pip install tensorboard"),
        (["LOG", "--wandb=x"], ["wandb"], "pip install wandb"),
    ],
)
def test_mistakes_are_one_sentence(arguments, missing, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.txt").write_text("result\n")
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setitem(sys.modules, f"torch.utils.{name}", None)
    with pytest.raises(ValueError, match=sentence):
        track.main([word.replace("LOG", "log.txt") for word in arguments])
    assert os.listdir() == ["log.txt"]
