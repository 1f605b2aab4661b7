"""Interrupted runs and damaged files: a run loses nothing and says why it ended."""

import errno
import fcntl
import io
import os
import pty
import re
import shutil
import signal
import sys
import zipfile
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import (
    MODERN,
    MODERN_SCRIPT,
    SCRIPT,
    bits,
    both_dtypes,
    checkpoints,
    faulty_script,
    last_bits,
    launcher,
    losses,
    options,
    run_forked,
    run_here,
    run_subprocess,
    trained,
    validations,
    write_shard,
    write_weights,
)

import train_gpt2
from train_gpt2 import UserError


# ---- What faults leave behind -------------------------------------------------------------------
def refused(sentence, fields, **changes):
    """Assert that a run fails with this sentence and changes no file, except to append to a log."""
    before = content(fields["log_dir"])
    with pytest.raises((UserError, OSError), match=sentence):
        run_here(fields, **changes)
    after = content(fields["log_dir"])
    for path, data in before.items():
        is_log = data.startswith(b"Log of train_gpt2.py")
        assert after[path][: len(data) if is_log else None] == data


def content(folder):
    """Return {path: bytes} of all files below a folder."""
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in files}


LOST = "lost the connection to another rank; see its message or torchrun's summary"


def error_of(done):
    """Return the error message of a failed run, without the number of the rank.

    All ranks report the same error, except that some may report that they lost the connection.
    """
    assert done.returncode != 0
    messages = set(re.findall(r"^train_gpt2\.py: (?:rank \d: )?(.*)$", done.stderr, re.M))
    errors = messages - {LOST} or messages
    assert len(errors) == 1, done.stderr
    return errors.pop()


# ---- Signals and resuming -----------------------------------------------------------------------
LONGER = {"num_iterations": 12, "warmdown_fraction": 0.6}
GROWING = {**MODERN, "momentum_warmup_fraction": 0.75}  # the momentum differs from step to step
SIGNALS = {  # of a run with 1 process, and of one with 2
    1: (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP),
    2: (signal.SIGUSR2, signal.SIGXCPU, signal.SIGTERM, signal.SIGUSR1),
}


def with_recipe(path, script):
    """Let a launcher train with the RECIPE of another script; return its path."""
    arguments = f"sys.argv[1:], __import__('runpy').run_path({str(script)!r})['RECIPE']"
    path.write_text(path.read_text().replace("cli(sys.argv[1:]", f"cli({arguments}"))
    return path


@pytest.mark.parametrize(
    "processes, dtype, recipe, changes",
    [(1, "bfloat16", SCRIPT, {}), (2, "float32", MODERN_SCRIPT, GROWING)],
)
def test_a_run_interrupted_many_times_gives_the_same_result(
    processes, dtype, recipe, changes, tiny, tmp_path
):
    """Four signals stop it, two steps apart, and a SIGKILL hits it before a rename."""
    fields = {**tiny, **LONGER, **changes, "dtype": dtype}
    whole = trained({**fields, "run_id": "whole", "save_every": 12}, processes, recipe)
    fields |= {"run_id": "part", "resume": "auto"}
    folder = tmp_path / "logs" / "part"
    for number, step in zip(SIGNALS[processes], (2, 4, 6, 8)):
        fault = f"os.kill(os.getpid(), {int(number)})"  # of the last rank alone
        script = faulty_script(tmp_path, fault, "step == first_step + 1", processes - 1)
        stopped = trained(fields, processes, with_recipe(script, recipe))
        assert (f"continuing after step {step - 2} from " in stopped) == (step > 2)
        advice = "repeat the command with --run_id=part --resume=auto"
        end = f"\nstopped by a signal after step {step}; to continue from the checkpoint in "
        end += f"{folder}, {advice}\n"
        assert stopped.endswith(end)
    kill = """
replace = os.replace

def kill_or_replace(partial, path):
    if path.name == "state_step0000000010.pt":
        os.kill(os.getpid(), signal.SIGKILL)
    replace(partial, path)

os.replace = kill_or_replace"""
    script = with_recipe(launcher(tmp_path, kill), recipe)
    killed = run_forked({**fields, "save_every": 1}, processes, script)
    assert killed.returncode == -signal.SIGKILL
    assert checkpoints(folder)[-1] == "state_step0000000009.pt"
    last_part = trained({**fields, "save_every": 12}, processes, recipe)
    assert "continuing after step 9 from " in last_part
    assert last_bits(folder) == last_bits(folder.parent / "whole")
    assert not (folder / "partial").exists()
    assert validations(whole)[-1] == validations(last_part)[-1]
    log = (tmp_path / "logs" / "part.txt").read_text()  # a resumed run appends to its log
    rows = [row for row in losses(log) if row[1] == "train_loss"]
    del rows[9]  # step 10 was trained twice, because it was not saved
    assert rows == [row for row in losses(whole) if row[1] == "train_loss"]


def test_a_second_signal_exits_at_once(tiny, tmp_path):
    kill = "os.kill(os.getpid(), signal.SIGTERM)"
    later = "time.monotonic = lambda clock=time.monotonic: clock() + 1.1"
    script = faulty_script(tmp_path, f"{kill}; {later}; {kill}")
    done = run_forked({**tiny, "run_id": "two"}, script=script)
    assert done.returncode == -signal.SIGTERM
    assert "press Ctrl-C again to exit at once" in done.stderr
    assert checkpoints(tmp_path / "logs" / "two") == []


def test_the_kernel_may_repeat_the_signal_of_a_cpu_limit():
    stop = train_gpt2.StopRequest()
    stop.on_signal(signal.SIGXCPU, None)
    stop.first_time -= 5
    stop.on_signal(signal.SIGXCPU, None)  # would end this process
    assert stop.received


def test_simultaneous_signals_count_once_and_ignored_ones_never(tiny, tmp_path):
    """torchrun repeats signals that its workers also get directly; nohup ignores SIGHUP."""
    send = "os.kill(os.getpid(), signal.{})".format
    hang_up = faulty_script(tmp_path, send("SIGHUP"))
    ignore = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    hang_up.write_text(ignore + hang_up.read_text())
    assert "\nval_loss: " in trained({**tiny, "run_id": "ignored"}, script=hang_up)
    fault = f"{send('SIGINT')}; {send('SIGTERM')}"
    trained({**tiny, "run_id": "one"}, script=faulty_script(tmp_path, fault))
    assert checkpoints(tmp_path / "logs" / "one") == ["state_step0000000005.pt"]


def test_a_signal_to_torchrun_saves_a_checkpoint(tiny, tmp_path):
    fields = {**tiny, "num_iterations": 5000, "allow_repeat": True, "run_id": "t"}
    script = faulty_script(tmp_path, "os.kill(os.getppid(), signal.SIGTERM)")
    done = run_subprocess(fields, 2, script)
    assert re.search("^stopped by a signal after step", done.stdout, re.M), done.stderr
    assert not re.search(r"^train_gpt2.py:", done.stderr, re.M)
    assert len(checkpoints(tmp_path / "logs" / "t")) == 1


def test_a_killed_rank_is_restarted_by_torchrun(tiny, tmp_path):
    fields = {**tiny, **LONGER, "save_every": 4}
    trained({**fields, "run_id": "whole"}, 2)
    first_time = 'step == 9 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"'
    script = faulty_script(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", first_time)
    # The new rank 1 is late, so rank 0 could find the address of the dead one in torchrun's store.
    late = """late = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
time.sleep(3 if late == ("1", "1") else 0)
train_gpt2.cli("""
    script.write_text(script.read_text().replace("train_gpt2.cli(", late))
    fields |= {"run_id": "again", "resume": "auto"}
    done = run_subprocess(fields, 2, script, ["--max-restarts=1"])
    assert done.returncode == 0, done.stderr
    assert "continuing after step 8 from " in done.stdout
    assert last_bits(tmp_path / "logs" / "again") == last_bits(tmp_path / "logs" / "whole")


def test_closing_the_terminal_saves_a_checkpoint(tiny, tmp_path):
    """SIGHUP arrives when the terminal no longer accepts output."""
    fields = {**tiny, "num_iterations": 500, "allow_repeat": True, "run_id": "p"}
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, str(SCRIPT), *options(fields)])
    shown = b""
    while b"step:3/" not in shown:
        shown += os.read(terminal, 1000)
    os.close(terminal)
    assert os.waitpid(process, 0)[1] == 0
    assert "\nstopped by a signal after step" in (tmp_path / "logs" / "p.txt").read_text()
    assert len(checkpoints(tmp_path / "logs" / "p")) == 1


# ---- Ranks that are killed, stuck or different --------------------------------------------------
NAN = "run.model.h[1].mlp.c_fc.weight.register_hook(lambda grad: grad * math.nan)"
INFINITY = "run.model.wte.weight.data[3] = math.inf"
FLIP = "run.model.h[1].mlp.c_fc.weight.data[3] += 2**-20"
MISTAKE = "raise ValueError('my mistake')"
BUG = "Traceback (most recent call last):"
FAULTS = {  # what a rank does at step 4, the number of processes, the rank, its message
    "a kill": ("os.kill(os.getpid(), 9)", 3, 1, LOST),
    "a long sleep": ("time.sleep(8)", 2, 1, LOST),
    "a mistake": (MISTAKE, 3, 1, BUG),
    "nan": (NAN, 1, 0, "val_loss is nan at step 5: lower the learning rates"),
    "infinity": (INFINITY, 2, 1, "train_loss is nan at step 5: lower the learning rates"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_one_rank_ends_all_ranks_with_one_message(name, tiny, tmp_path):
    """A bug shows its traceback, and a gradient that is not finite stops the run unsaved."""
    fault, processes, rank, sentence = FAULTS[name]
    fields = {**tiny, "run_id": "f", "save_every": 2, "val_loss_every": 5, "comm_timeout": 5}
    script = faulty_script(tmp_path, fault, rank=rank)
    done = run_forked(fields, processes, script)
    assert error_of(done).startswith(sentence)
    assert done.stderr.count("Traceback") == done.stderr.count("ValueError: my mistake\n")
    assert checkpoints(tmp_path / "logs" / "f")[-1] == "state_step0000000004.pt"


def test_a_result_of_weights_that_differ_is_never_published(tiny, tmp_path):
    """Rank 0 did so, if its own weights were the wrong ones."""
    done = run_forked({**tiny, "val_loss_every": 0}, 2, faulty_script(tmp_path, FLIP))
    assert error_of(done).startswith("the ranks differ in weights (")
    assert "\nval_loss: " not in done.stdout and not list(tmp_path.glob("logs/*/model.pt"))


UNLIKE = {  # how rank 1 differs, as on another node: Python that it runs first
    "seed": 'sys.argv.append("--seed=1")',
    "source": "train_gpt2.cli.__defaults__ = (train_gpt2.RECIPE._replace(sources={}),)",
    "dtype": 'train_gpt2.choose_dtype = lambda *_: "float32"',
    "torch": 'torch.__version__ = "another"',
    "val_data": 'os.chdir("other_val")',
    "train_data": 'os.chdir("other_train")',
}
RELATIVE = {"train_files": "train_*.bin", "val_files": "val_*.bin"}


@pytest.mark.parametrize("what", UNLIKE)
def test_a_rank_that_differs_is_rejected(what, tiny, tmp_path):
    """An existing run remains as it is."""
    run_here(tiny, 3, run_id="x", dtype="bfloat16")
    before = content(tmp_path / "logs" / "x")
    for name, shard in ("other_val", "val_0.bin"), ("other_train", "train_1.bin"):
        shutil.copytree(tmp_path, tmp_path / name, ignore=shutil.ignore_patterns("other*"))
        tokens = (tmp_path / shard).stat().st_size // 2 - 512
        write_shard(tmp_path / name / shard, [1] * tokens)
    code = f"""
os.chdir({str(tmp_path)!r})
if os.environ["RANK"] == "1":
    {UNLIKE[what]}"""
    fields = {**tiny, **RELATIVE, "dtype": "bfloat16", "run_id": "x", "resume": "auto"}
    error = error_of(run_forked(fields, 2, launcher(tmp_path, code)))
    assert error.startswith(f"the ranks differ in {what} (")
    assert content(tmp_path / "logs" / "x") == before


# ---- Non-finite numbers, memory, disk and output ------------------------------------------------
def test_a_state_that_is_not_finite_is_never_saved(tiny, tmp_path):
    code = """
save = train_gpt2.save_checkpoint

def poison_and_save(run):
    if run.step == 4:
        next(iter(run.optimizers[0].state.values()))["momentum_buffer"][0, 0] = -math.inf
    return save(run)

train_gpt2.save_checkpoint = poison_and_save"""
    fields = {**tiny, "run_id": "n", "save_every": 2, "keep_checkpoints": 1}
    said = error_of(run_forked(fields, 2, launcher(tmp_path, code)))
    assert said.endswith("4.pt was not written (NaN or infinity): lower the learning rates")
    assert checkpoints(tmp_path / "logs" / "n") == ["state_step0000000002.pt"]


def test_out_of_memory_names_the_setting_to_lower(tiny, tmp_path):
    for error in torch.OutOfMemoryError("CUDA out of memory"), MemoryError():
        assert "--device_batch_size" in train_gpt2.describe_failure(error)
    fields = {**tiny, "batch_size": 512, "device_batch_size": 512, "num_iterations": 1}
    write_shard(tmp_path / "train_3.bin", np.arange(9000) % 64)
    limit = "resource.setrlimit(resource.RLIMIT_AS, (2**20, 2**20))"
    fault = f"{limit}; torch.empty(2**28)"  # the warm-up freed enough for a step
    done = run_forked(fields, script=faulty_script(tmp_path, fault, "step == 0"))
    assert "--device_batch_size" in error_of(done) and done.stderr.count("\n") == 1


def test_a_missing_file_of_an_edit_is_named_with_the_line_that_opens_it(tiny, tmp_path):
    script = faulty_script(tmp_path, "open('my_table.txt')")
    (line,) = [i for i, text in enumerate(script.read_text().split("\n"), 1) if "my_ta" in text]
    where = f"(in launcher.py, line {line})"
    said = error_of(run_forked(tiny, script=script))
    assert said == f"[Errno 2] No such file or directory: 'my_table.txt' {where}"


FOURTH = "state_step0000000004.pt"
REPEATED = {"num_iterations": 18, "allow_repeat": True}
STOP = "os.kill(os.getpid(), signal.SIGTERM)"


@pytest.mark.parametrize(
    "name, changes, step, fault",
    [
        (FOURTH, {"save_every": 1}, 3, "pass"),
        (FOURTH, {"save_every": 3}, 3, STOP),
        ("best.pt", {"save_every": 4, **REPEATED}, 4, "pass"),
        ("model.pt", {}, 3, "pass"),
    ],
)
def test_a_full_disk_ends_a_run_which_then_resumes(name, changes, step, fault, tiny, tmp_path):
    """From a step on, no file may be larger than a log. Older checkpoints stay."""
    fields = {**tiny, "run_id": "f", "resume": "auto", "n_embd": 64, **changes}
    trained({**fields, "run_id": "whole"})
    fault = f"resource.setrlimit(resource.RLIMIT_FSIZE, (120000, -1)); {fault}"
    done = run_forked(fields, script=faulty_script(tmp_path, fault, f"step == {step}"))
    folder = tmp_path / "logs" / "f"
    cause = "was not written ([Errno 27] File too large)"
    assert error_of(done) == f"{folder}/{name} {cause}: free disk space, then resume"
    assert ("\nval_loss: " in done.stdout) == (name == "model.pt")
    assert not (folder / "partial").exists()
    start = f"continuing after step {step} " if "save_every" in changes else "starting from new"
    assert f"\n{start}" in trained(fields)
    assert bits(folder / "model.pt") == bits(folder.parent / "whole" / "model.pt")


def test_a_run_needs_no_standard_output(tiny, tmp_path):
    """It may be closed from the start."""
    script = launcher(tmp_path, "os.close(1); sys.stdout = None")
    done = run_forked({**tiny, "run_id": "o"}, script=script)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nval_loss: " in (tmp_path / "logs" / "o.txt").read_text()


def test_output_works_on_an_ascii_terminal(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(train_gpt2.StopRequest, "catch_signals", lambda self: None)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    train_gpt2.cli(options({**tiny, "log_dir": tmp_path / "Jörg"}))
    assert b"J\\xf6rg" in sys.stdout.buffer.getvalue()


def test_a_shard_that_is_deleted_while_in_use_is_still_read(tiny, tmp_path):
    fields = {**tiny, "run_id": "s", "seed": 3}
    expected = run_here(fields)
    fault = f"os.remove('{tmp_path / 'train_1.bin'}')"
    fields["run_id"] = "again"
    trained(fields, script=faulty_script(tmp_path, fault, "step == 2"))
    assert torch.load(tmp_path / "logs" / "again" / "model.pt")["val_loss"] == expected


def test_a_shard_that_is_truncated_while_in_use_is_named_and_the_steps_are_saved(tiny, tmp_path):
    """np.fromfile returns fewer tokens in the same way if the disk or the network fails."""
    fields = {**tiny, "run_id": "s", "resume": "auto"}
    path = tmp_path / "train_1.bin"
    whole = path.read_bytes()

    def truncate(run):
        if run.step == 2:
            os.truncate(path, 1100)

    with pytest.raises(UserError, match=r"train_1\.bin is truncated or unreadable: check"):
        run_here(fields, fault=truncate)
    (saved,) = checkpoints(tmp_path / "logs" / "s")
    path.write_bytes(whole)
    resumed = run_here(fields)
    assert saved >= "state_step0000000003.pt" and resumed == run_here({**tiny, "run_id": "whole"})


def test_a_run_ends_if_its_folder_is_deleted(tiny, tmp_path):
    folder = tmp_path / "logs" / "r"

    def lose_folder(run):
        if run.step == 4:
            folder.rename(tmp_path / "moved")

    with pytest.raises(UserError, match=r"was not written .*No such file"):
        run_here(tiny, run_id="r", save_every=2, fault=lose_folder)
    assert not folder.exists()


HALF = {"run_id": "half", "resume": "auto"}
CHECKPOINT = "half/state_step0000000003.pt"


@pytest.fixture
def half(tiny):
    """Settings that resume a run of six steps, which a signal stopped after three."""
    assert run_here(tiny, 3, run_id="half") is None
    return {**tiny, **HALF}


@pytest.fixture
def weights(tiny, tmp_path):
    """The path of the final weights of a tiny run."""
    run_here(tiny, run_id="first", save_every=6)
    return tmp_path / "logs" / "first" / "model.pt"


FIRST = {"run_id": "first", "resume": "auto"}
INIT = {"run_id": "second", "init": "logs/first/model.pt"}
FROM = {"run_id": "from", "resume": "auto"}
FOREIGN = "not created by this script: move them away, or pass another --run_id"
ANOTHER_MODEL = "holds weights of another model"
REFUSALS = [
    (
        {**HALF, "learning_rate": 0.02, "num_iterations": 5},
        r"3.pt was saved with num_iterations=6 \(here 5\), learning_rate=0.01 \(here 0.02\): use",
    ),
    ({**HALF, "seed": 1}, "half/state_step0000000003.pt was saved with seed=1337"),
    ({**FIRST, "seed": 1}, "first/model.pt was saved with seed=1337"),
    ({**FIRST, "num_iterations": 9}, "first/model.pt was saved with num_iterations=6"),
    ({**FIRST, "train_files": "other/*.bin"}, "first/model.pt was saved with train_data="),
    ({**FIRST, "init": f"logs/{CHECKPOINT}"}, "first/model.pt was saved with init= "),
    ({**HALF, "init": "logs/first/model.pt"}, "3.pt was saved with init= "),
    (FROM, r"2.pt was saved with init=logs/first/model.pt \(here \)"),
    ({**FROM, "init": f"logs/{CHECKPOINT}"}, "2.pt was saved with init=logs/first/model.pt "),
    ({"run_id": "half"}, "half exists: .*--resume=auto to continue it"),
    ({"run_id": "half.txt"}, "File exists: .*logs/half.txt"),
    ({"run_id": "folder"}, FOREIGN),
    ({"run_id": "pipe"}, FOREIGN),
    ({"run_id": "notes"}, FOREIGN),
    ({"run_id": "damaged", "resume": "auto"}, "no checkpoint in .*damaged can be used"),
    ({**INIT, "n_head": 1}, r"first/model.pt was saved with n_head=2 \(here 1\): use the same"),
    ({**INIT, "n_layer": 1}, ANOTHER_MODEL),
    ({**INIT, "init": "nowhere.pt"}, r"nowhere.pt cannot be used \(FileNotFoundError"),
    ({**INIT, "init": "logs/old.pt"}, "logs/old.pt cannot be used .*another version of the script"),
    ({**INIT, "init": "logs/edited.pt"}, f"edited.pt {ANOTHER_MODEL}"),
    ({"log_dir": "/dev/null/logs"}, "Not a directory: ./dev/null/logs"),
]


def test_conflicts_with_earlier_runs_are_rejected(tiny, half, weights, tmp_path, monkeypatch):
    """A user's own folders and files that have the name of a run or of its log stay as they are."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree("logs/half", "logs/damaged")
    os.truncate("logs/damaged/state_step0000000003.pt", 1000)
    write_shard(Path("logs/folder/notes.pt"), [1])
    os.mkfifo("logs/pipe.txt")
    Path("logs/notes.txt").write_text("torch==2.13.0\n")
    write_shard(Path("other/train_0.bin"), np.arange(3000) % 64)
    state = train_gpt2.read_pt(weights)
    write_weights(tmp_path / "logs" / "edited.pt", state | {"model": {"new": torch.zeros(1)}})
    del state["script"]
    write_weights(tmp_path / "logs" / "old.pt", state)
    run_here(tiny, 2, run_id="from", init="logs/first/model.pt")
    for changes, sentence in REFUSALS:
        refused(sentence, tiny, **changes)


def test_a_checkpoint_needs_the_optimizers_of_its_run(half):
    """States of another optimizer would be dropped without a word."""

    def with_sgd(model, args):
        muon, adamw = train_gpt2.build_optimizers(model, args)
        return [muon, torch.optim.SGD(adamw.param_groups)]

    recipe = train_gpt2.RECIPE._replace(build_optimizers=with_sgd)
    refused(r"saved with optimizers=Muon, AdamW \(here Muon, SGD\)", half, recipe=recipe)


def test_a_run_starts_from_the_weights_of_another(tiny, weights, capsys):
    """It starts at step 0 with new optimizers, from model.pt or from a checkpoint."""
    tiny["seed"] = 1  # may differ
    last = validations((weights.parents[1] / "first.txt").read_text())[-1][1]
    checkpoint = weights.with_name("state_step0000000006.pt")
    capsys.readouterr()
    run_here(tiny, init=str(weights), run_id="second", save_every=6)
    shown = capsys.readouterr().out
    for path, text in (weights, shown), (checkpoint, trained({**tiny, "init": checkpoint}, 2)):
        rows = validations(text)
        assert rows[0][:2] == (0, pytest.approx(last, abs=2e-4)) and rows[-1][1] < last
        assert f"starting from {path}\n" in text


@both_dtypes
def test_a_run_resumes_with_other_processes_and_micro_batches(dtype, tiny, tmp_path, capsys):
    fields = {**tiny, "dtype": dtype}
    run_here(fields)
    whole = capsys.readouterr().out
    run_here(fields, 3, run_id="half")
    for processes, size in (1, 12), (2, 3), (3, 2):
        copy = shutil.copytree(tiny["log_dir"], tmp_path / f"copy{processes}")
        done = trained({**fields, **HALF, "log_dir": copy, "device_batch_size": size}, processes)
        rows, expected = losses(done), losses(whole)[-5:]
        assert [row[:2] for row in rows] == [row[:2] for row in expected]
        values = [float(loss) for _, _, loss in rows]
        tolerance = {"float32": 0.002, "bfloat16": 0.02}[dtype]
        assert values == pytest.approx([float(row[2]) for row in expected], abs=tolerance)


def test_the_data_of_a_resumed_run_may_be_moved(half, tmp_path, capsys):
    """A setting that the script did not have at that time has its default."""
    checkpoint = tmp_path / "logs" / CHECKPOINT
    state = train_gpt2.read_pt(checkpoint)
    del state["fixed"]["shuffle"]
    write_weights(checkpoint, state)
    refused(r"saved with shuffle=False \(here True\)", half, shuffle=True)
    (tmp_path / "moved").mkdir()
    for path in tmp_path.glob("train_*.bin"):
        os.rename(path, tmp_path / "moved" / path.name)
    run_here(half, train_files=f"{tmp_path}/moved/*.bin", val_loss_every=0)
    assert [step for step, _, _ in losses(capsys.readouterr().out)[-4:]] == list("4566")


def test_a_finished_run_is_neither_trained_nor_changed_again(tiny, tmp_path):
    fields = {**tiny, "run_id": "e", "resume": "auto"}
    run_here(fields, 3)
    assert run_here(fields) is not None
    before = content(tmp_path / "logs" / "e")
    (tmp_path / "logs" / "e.txt").unlink()
    shown = trained(fields, 2)
    assert shown.endswith("e/model.pt is the result of this run; nothing to do\n")
    assert content(tmp_path / "logs" / "e") == before


def test_auto_means_checkpoint_else_init_else_new_weights(tiny, weights, tmp_path, capsys):
    """A command that is repeated, as torchrun and Slurm do, always means the same."""
    fields = {**tiny, "seed": 1, "save_every": 6, "init": str(weights)}
    run_here(fields, run_id="whole")
    fields |= {"run_id": "part", "resume": "auto"}
    died = run_forked(fields, script=faulty_script(tmp_path, "os._exit(9)"))
    assert died.returncode == 9 and checkpoints(tmp_path / "logs" / "part") == []
    for steps, start in (2, f"starting from {weights}\n"), (9, "continuing after step 2 from "):
        run_here(fields, steps)
        assert f"\n{start}" in capsys.readouterr().out
    assert last_bits(tmp_path / "logs" / "part") == last_bits(tmp_path / "logs" / "whole")
    run_here({**fields, "run_id": "new", "init": ""}, 2)
    assert "\nstarting from new weights\n" in capsys.readouterr().out


# ---- Damaged, foreign and hostile files ---------------------------------------------------------
class Hostile:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def mark_a_tensor_as_a_folder(path):
    """PyTorch would return uninitialized memory for it."""
    with zipfile.ZipFile(path) as archive:
        start = archive.start_dir
    content = bytearray(path.read_bytes())
    entry = content.rindex(b"PK\1\2", start, content.rindex(b"/data/0", start))
    content[entry + 38] |= 0x10
    path.write_bytes(content)


DAMAGES = {
    "empty": lambda path: os.truncate(path, 0),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "one bit flipped": flip_a_bit,
    "a tensor marked as a folder": mark_a_tensor_as_a_folder,
    "another archive": lambda path: zipfile.ZipFile(path, "w").writestr("a", "b"),
    "a folder": lambda path: (os.unlink(path), os.mkdir(path)),
    "hostile": lambda path: write_weights(path, {"format": Hostile(path.with_name("hostile"))}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_rejected(damage, tiny, tmp_path, capsys):
    """For --init, it is an error; auto takes the one before, and says so. No code is executed."""
    fields = {**tiny, "run_id": "d", "save_every": 2}
    run_here(fields, 4)
    newest = tmp_path / "logs" / "d" / "state_step0000000004.pt"
    DAMAGES[damage](newest)
    refused("4.pt cannot be used", tiny, init=str(newest))
    assert run_here(fields, resume="auto", save_every=0) is not None
    text = capsys.readouterr().out
    assert f"\nskipping a file: {newest} cannot be used (" in text
    assert "\ncontinuing after step 2 from " in text
    assert not (newest.parent / "hostile").exists()


def test_a_damaged_result_is_computed_again(tiny, tmp_path, capsys):
    fields = {**tiny, "run_id": "d", "save_every": 2, "resume": "auto"}
    run_here(fields)
    result = tmp_path / "logs" / "d" / "model.pt"
    expected = bits(result)
    flip_a_bit(result)
    assert run_here(fields) is not None and bits(result) == expected
    shown = capsys.readouterr().out
    assert f"\nskipping a file: {result} cannot be used (" in shown
    assert "\ncontinuing after step 6 from " in shown


def test_auto_takes_the_newest_by_its_step_and_deletes_only_old_checkpoints(tiny, tmp_path, capsys):
    """File times do not matter. Files with other names stay."""
    fields = {**tiny, "run_id": "k", "save_every": 1, "keep_checkpoints": 2}
    run_here(fields, 3)
    folder = tmp_path / "logs" / "k"
    newest = folder / "state_step0000000003.pt"
    strangers = {"best.pt": b"", "state_step3.pt": b"", "notes.txt": b"precious"}
    strangers["state_step0000000001_mine.pt"] = newest.read_bytes()
    for name, data in strangers.items():
        (folder / name).write_bytes(data)
    os.utime(newest, (1, 1))
    run_here(fields, resume="auto")
    assert "continuing after step 3 from " in capsys.readouterr().out
    expected = {"model.pt", "run.lock", "state_step0000000005.pt", "state_step0000000006.pt"}
    assert set(os.listdir(folder)) == expected | strangers.keys()
    for name, data in strangers.items():
        assert (folder / name).read_bytes() == data


def test_two_processes_never_train_one_run(half):
    """The folder is locked, not the log, which may be deleted.

    The lock of an earlier version held a path as plain text.
    """
    Path(half["log_dir"], "half", "run.lock").write_text("logs/another/state_step0000000001.pt")
    os.remove(f"{half['log_dir']}/half.txt")
    with open(f"{half['log_dir']}/half/run.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        refused("another process is using .*half: stop it first", half)
    assert run_here(half) is not None


def test_a_file_system_without_locks_is_only_warned_about(half, monkeypatch, capsys):
    """The warning follows an incomplete last line, which must not become `val_loss: 4warning`."""
    log = Path(half["log_dir"], "half.txt")
    log.write_text(log.read_text() + "val_loss: 4")
    error = OSError(errno.ENOSYS, "Function not implemented")
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=error))
    assert run_here(half) is not None
    assert "is not locked (Function not implemented): start only" in capsys.readouterr().out
    assert "val_loss: 4w" not in log.read_text()


def test_another_number_of_threads_is_a_warning(half, monkeypatch, capsys):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    run_here(half)
    assert "warning: saved with 1 threads" in capsys.readouterr().out
