"""Interrupted runs and damaged files: a run loses nothing and says why it ended."""

import contextlib
import fcntl
import functools
import io
import math
import os
import pty
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import zipfile
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import (
    SCRIPT,
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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weights import load as load_weights

import train_gpt2
from train_gpt2 import Hyperparameters, UserError


# ---- What faults leave behind -------------------------------------------------------------------
def refused(sentence, fields, **changes):
    """Assert that a run raises UserError with this sentence and changes no file."""
    before = content(fields["log_dir"])
    with pytest.raises(UserError, match=sentence):
        run_here(fields, **changes)
    after = content(fields["log_dir"])
    assert {path: after.get(path) for path in before} == before


def content(folder):
    """Return {path: bytes} of all files below a folder."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in files}


LOST = "lost the connection to another rank; see its message or torchrun's summary ("
UNLIKE_WEIGHTS = "the weights of the ranks differ (checksums ["


def summary(done):
    """Return the one error message of a failed run, from the rank that failed.

    The other ranks may report that they lost the connection to it.
    """
    assert done.returncode != 0
    found = re.findall(r"^train_gpt2\.py: (.*)$", done.stderr, re.M)
    lost = [text for text in found if re.match(r"rank \d: " + re.escape(LOST), text)]
    others = [text for text in found if text not in lost]
    assert len(others) == 1 or (not others and lost), done.stderr
    return others[0] if others else lost[0].partition(": ")[2]


# ---- Signals and resuming -----------------------------------------------------------------------
LONGER = {"num_iterations": 12, "warmdown_iters": 8}
SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP


@pytest.mark.parametrize("processes, dtype", [(1, "bfloat16"), (2, "float32")])
def test_a_run_interrupted_many_times_gives_the_same_result(processes, dtype, tiny, tmp_path):
    """Four signals stop it, two steps apart, and a SIGKILL hits it while it saves."""
    fields = {**tiny, **LONGER, "dtype": dtype}
    whole = trained({**fields, "run_id": "whole", "save_every": 12}, processes)
    fields |= {"run_id": "part", "resume": "auto"}
    folder = tmp_path / "logs" / "part"
    for number, step in zip(SIGNALS, (2, 4, 6, 8)):
        fault = f"os.kill(os.getpid(), {int(number)})"  # of the last rank alone
        script = faulty_script(tmp_path, fault, "step == first_step + 2", processes - 1)
        stopped = trained(fields, processes, script)
        where = f"continuing after step {step - 2}" if step > 2 else "no checkpoint yet"
        assert f"resume=auto: {where}\n" in stopped
        assert stopped.endswith(f"\nstopped by a signal after step {step}\n")
        assert checkpoints(folder)[-1] == f"state_step{step:010d}.pt"
    kill = """
replace = os.replace

def kill_or_replace(partial, path):
    if path.name == "state_step0000000010.pt":
        os.kill(os.getpid(), signal.SIGKILL)
    replace(partial, path)

os.replace = kill_or_replace"""
    script = launcher(tmp_path, kill)
    killed = run_forked({**fields, "save_every": 1}, processes, script)
    assert killed.returncode == -signal.SIGKILL
    assert checkpoints(folder)[-1] == "state_step0000000009.pt"
    last_part = trained({**fields, "save_every": 12}, processes)
    assert "resume=auto: continuing after step 9\n" in last_part
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
    done = run_forked(
        {**tiny, "run_id": "two"}, 1, faulty_script(tmp_path, f"{kill}; {later}; {kill}")
    )
    assert done.returncode == -signal.SIGTERM
    assert "press Ctrl-C again to exit at once" in done.stderr
    assert checkpoints(tmp_path / "logs" / "two") == []


def test_simultaneous_signals_count_once_and_ignored_ones_never(tiny, tmp_path):
    """torchrun repeats signals that its workers also get directly; nohup ignores SIGHUP."""
    send = "os.kill(os.getpid(), signal.{})".format
    hang_up = faulty_script(tmp_path, send("SIGHUP"))
    ignore = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    hang_up.write_text(ignore + hang_up.read_text())
    assert "\nresult val_loss" in trained({**tiny, "run_id": "ignored"}, script=hang_up)
    fault = f"{send('SIGINT')}; {send('SIGTERM')}"
    trained({**tiny, "run_id": "one"}, script=faulty_script(tmp_path, fault))
    assert checkpoints(tmp_path / "logs" / "one") == ["state_step0000000004.pt"]


@both_dtypes
def test_one_process_stops_between_micro_batches_and_in_validations(dtype, tiny, tmp_path, capsys):
    """An unfinished step is discarded, and the resumed run ends with the same bits."""
    fields = {**tiny, "dtype": dtype, "save_every": 6}
    run_here(fields, run_id="whole")
    whole = last_bits(tmp_path / "logs" / "whole")
    validation = -(-tiny["val_tokens"] // 16 // 2)  # checks; a step has 1 + 6
    cases = (0, 0), (3, 0), (validation + 5, 0), (validation + 16, 2), (2 * validation + 45, 6)
    for checks, step in cases:
        part = {**fields, "run_id": f"p{checks}", "resume": "auto"}
        capsys.readouterr()
        assert run_here(part, checks=checks) is None
        assert capsys.readouterr().out.endswith(f"\nstopped by a signal after step {step}\n")
        folder = tmp_path / "logs" / part["run_id"]
        assert checkpoints(folder) == [f"state_step{step:010d}.pt"]
        state = train_gpt2.read_pt(folder / f"state_step{step:010d}.pt")
        assert (state["train_seconds"] > 0) == (step > 0), "an unfinished step counts no time"
        assert run_here(part) is not None
        resumed = last_bits(folder)
        for expected, optimizer in zip(whole["optimizers"], resumed["optimizers"]):
            if step == 6:  # no step has set the learning rates of the groups
                optimizer["param_groups"] = expected["param_groups"]
        assert resumed == whole


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_torchrun_saves_a_checkpoint(number, tiny, tmp_path):
    """torchrun forwards a SIGTERM. After a SIGKILL, its processes notice that it is gone."""
    fields = {**tiny, "num_iterations": 5000, "allow_repeat": True, "run_id": "t"}
    script = faulty_script(tmp_path, f"os.kill(os.getppid(), {int(number)})")
    done = run_subprocess(fields, 2, script)
    assert re.search("^saved .*; to continue: ", done.stdout, re.M), done.stderr
    assert len(checkpoints(tmp_path / "logs" / "t")) == 1
    if number == signal.SIGTERM:
        assert re.search("^stopped by a signal after step", done.stdout, re.M)
        assert not re.search(r"^train_gpt2.py:", done.stderr, re.M)


def test_a_killed_rank_is_restarted_by_torchrun(tiny, tmp_path):
    fields = {**tiny, **LONGER, "save_every": 4}
    trained({**fields, "run_id": "whole"}, 2)
    first_time = 'step == 9 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"'
    script = faulty_script(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", first_time)
    fields |= {"run_id": "again", "resume": "auto"}
    done = run_subprocess(fields, 2, script, ["--max-restarts=1"])
    assert done.returncode == 0, done.stderr
    assert "resume=auto: continuing after step 8\n" in done.stdout
    assert last_bits(tmp_path / "logs" / "again") == last_bits(tmp_path / "logs" / "whole")


def test_closing_the_terminal_saves_a_checkpoint(tiny, tmp_path):
    """SIGHUP arrives when the terminal no longer accepts output."""
    fields = {**tiny, "num_iterations": 500, "allow_repeat": True, "run_id": "p"}
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, str(SCRIPT), *options(fields)])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    shown = b""
    while b"tok/s" not in shown or b"loss=" not in shown:  # the progress bar moves
        shown += os.read(terminal, 1000)
    os.close(terminal)
    assert os.waitpid(process, 0)[1] == 0
    assert b"train_loss" not in shown, "step lines go only to the log"
    assert "\nstopped by a signal after step" in (tmp_path / "logs" / "p.txt").read_text()
    assert len(checkpoints(tmp_path / "logs" / "p")) == 1


def test_a_stopped_run_prints_its_checkpoint_and_how_to_continue(tiny, tmp_path, capsys):
    assert run_here({**tiny, "run_id": "t"}, 0) is None
    [said] = re.findall(r"^saved (.*); to continue: (.*)$", capsys.readouterr().out, re.M)
    path = tmp_path / "logs" / "t" / "state_step0000000000.pt"
    assert said == (str(path), "the same command with --run_id=t --resume=auto") and path.exists()


# ---- Ranks that are killed, stuck or different --------------------------------------------------
NOT_FINITE = "run.model.h[1].mlp.c_fc.weight.register_hook(lambda grad: grad * {})"
MISTAKE = "raise ValueError('my mistake')"
FAULTS = {  # what a rank does at step 4, number of processes, the rank, the message's two ends
    "a kill": ("os.kill(os.getpid(), 9)", 3, 1, LOST, ""),
    "a long sleep": ("time.sleep(8)", 2, 1, LOST, ""),
    "a mistake": (MISTAKE, 1, 0, "Traceback (most recent call last):", ""),
    "a mistake of a rank": (MISTAKE, 3, 1, "rank 1: Traceback (most recent call last):", ""),
    "nan": (NOT_FINITE.format("math.nan"), 1, 0, "train_loss is nan at step 6", "rates"),
    "infinity": (NOT_FINITE.format("math.inf"), 2, 1, "train_loss is nan at step 6", "rates"),
    "a flipped bit": ("run.model.h[1].mlp.c_fc.weight.data[3] += 2**-20", 2, 1, UNLIKE_WEIGHTS, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_one_rank_ends_all_ranks_with_one_message(name, tiny, tmp_path):
    """A bug shows its traceback, and a gradient that is not finite stops the run unsaved."""
    fault, processes, rank, sentence, end = FAULTS[name]
    fields = {**tiny, "run_id": "f", "save_every": 2, "val_loss_every": 5, "comm_timeout": 5}
    script = faulty_script(tmp_path, fault, rank=rank)
    done = run_forked(fields, processes, script)
    said = summary(done)
    assert said.startswith(sentence)
    assert done.stderr.count("Traceback") == done.stderr.count("ValueError: my mistake\n")
    assert said.endswith(end)
    assert checkpoints(tmp_path / "logs" / "f")[-1] == "state_step0000000004.pt"


UNLIKE = {  # how rank 1 differs, as on another node: Python that it runs first
    "seed": "args = dict(seed=1)",
    "compile": "args = dict(compile=True)",
    "source": 'train_gpt2.SOURCE = "another"',
    "matmul_dtype": "train_gpt2.choose_dtype = lambda *_: torch.float16",
    "torch": 'torch.__version__ = "another"',
    "val_hash": 'os.chdir("other_val")',
    "train_shards": 'os.chdir("other_train")',
    "the step of the checkpoint": 'os.chdir("without_logs")',
    "the state of the run": 'os.chdir("without_logs")',
}
RELATIVE = {"train_files": "train_*.bin", "val_files": "val_*.bin", "log_dir": "logs"}


@pytest.mark.parametrize("what", UNLIKE)
def test_a_rank_that_differs_is_rejected(what, tiny, tmp_path):
    finished = what == "the state of the run"
    run_here(tiny, math.inf if finished else 3, run_id="x")
    for name, path in {
        "other_val": "val_0.bin",
        "other_train": "train_1.bin",
        "without_logs": "unused.bin",
    }.items():
        shutil.copytree(
            tmp_path, tmp_path / name, ignore=shutil.ignore_patterns("o*", "w*", "logs")
        )
        tokens = (tmp_path / path).stat().st_size // 2 - 512 if (tmp_path / path).exists() else 9
        write_shard(tmp_path / name / path, [1] * tokens)
    before = content(tmp_path)
    code = f"""
import dataclasses
args = {{}}
os.chdir({str(tmp_path)!r})
if os.environ["RANK"] == "1":
    {UNLIKE[what]}
parse_args = train_gpt2.parse_args
train_gpt2.parse_args = lambda argv: dataclasses.replace(parse_args(argv), **args)"""
    fields = {**tiny, **RELATIVE, "comm_timeout": 20, "run_id": "x", "resume": "auto"}
    said = summary(run_forked(fields, 2, launcher(tmp_path, code)))
    assert said.startswith(f"the ranks differ in {what} (")
    after = content(tmp_path)
    assert {path: after.get(path) for path in before} == before


def test_three_machines_may_have_copies_of_the_shards(tiny, tmp_path):
    """Each rank has its own data folder and the environment of a machine of its own."""
    for rank in 0, 1, 2:
        for path in tmp_path.glob("*.bin"):
            (tmp_path / str(rank)).mkdir(exist_ok=True)
            shutil.copy(path, tmp_path / str(rank))
    code = f"""
os.chdir({str(tmp_path)!r} + "/" + os.environ["RANK"])
os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")"""
    fields = {**tiny, **RELATIVE, "log_dir": tiny["log_dir"], "save_every": 6}
    done = trained({**fields, "run_id": "three"}, 3, launcher(tmp_path, code))
    assert losses(done) == losses(trained({**tiny, "run_id": "one", "save_every": 6}, 3))
    assert last_bits(tmp_path / "logs" / "three") == last_bits(tmp_path / "logs" / "one")


def test_two_torchrun_agents_form_one_run(tiny, tmp_path):
    """As README starts two nodes, but on one machine."""
    fields = {**tiny, "save_every": 6}
    trained({**fields, "run_id": "one"}, 2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
    command += ["--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}", "--rdzv_id=test"]
    command += ["--local_addr=127.0.0.1", SCRIPT, *options({**fields, "run_id": "two"})]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    agents = [subprocess.Popen(command, env=environment) for _ in range(2)]
    try:
        assert [agent.wait(timeout=120) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.kill()
    assert last_bits(tmp_path / "logs" / "one") == last_bits(tmp_path / "logs" / "two")


# ---- Non-finite numbers, memory, disk and output ------------------------------------------------
@pytest.mark.parametrize(
    "poison",
    [
        "run.model.h[1].mlp.c_fc.weight.data[0, 0] = math.nan",
        "[s['momentum_buffer'].fill_(-math.inf) for s in run.optimizers[1].state.values()]",
    ],
)
def test_a_state_that_is_not_finite_is_never_saved(poison, tiny, tmp_path):
    code = f"""
save = train_gpt2.save_checkpoint

def poison_and_save(run):
    if run.step == 4:
        {poison}
    return save(run)

train_gpt2.save_checkpoint = poison_and_save"""
    fields = {**tiny, "run_id": "n", "save_every": 2, "keep_checkpoints": 1}
    said = summary(run_forked(fields, 2, launcher(tmp_path, code)))
    assert said.startswith("non-finite value in ") and "step0000000004.pt" in said
    assert checkpoints(tmp_path / "logs" / "n") == ["state_step0000000002.pt"]


def test_a_result_that_is_not_finite_is_an_error(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(train_gpt2, "evaluate", lambda run: float("nan"))
    with pytest.raises(UserError, match=r"the run diverged \(val_loss=nan\): lower"):
        run_here(tiny, run_id="n")
    assert not (tmp_path / "logs" / "n" / "model.pt").exists()
    assert "\nresult" not in (tmp_path / "logs" / "n.txt").read_text()


def test_out_of_memory_names_the_setting_to_lower(tiny, tmp_path):
    for error in torch.OutOfMemoryError("CUDA out of memory"), MemoryError():
        assert "--device_batch_size" in train_gpt2.describe_failure(error)
    fields = {**tiny, "batch_size": 512, "device_batch_size": 512, "num_iterations": 1}
    write_shard(tmp_path / "train_3.bin", np.arange(9000) % 64)
    limit = "resource.setrlimit(resource.RLIMIT_AS, (2**20, 2**20))"
    fault = f"{limit}; torch.empty(2**28)"  # the warm-up freed enough for a step
    done = run_forked(fields, script=faulty_script(tmp_path, fault, "step == 0"))
    assert "--device_batch_size" in summary(done) and done.stderr.count("\n") == 1


SECOND, THIRD, SIXTH = (f"state_step000000000{step}.pt" for step in (2, 3, 6))


def limited_files(when, unlimited_again):
    """Return code that limits the size of files from step 3 on, which a log stays below."""
    return (
        f"limit = 100000 if step < {unlimited_again} else -1; "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1)); {when}"
    )


WARNING = "\nwarning: state_step0000000004.pt was not written ([Errno 27] File too large)\n"


@pytest.mark.parametrize("unlimited_again, left", [(9, [SECOND, THIRD]), (5, [SIXTH])])
def test_a_full_disk_is_reported_and_costs_no_older_checkpoint(
    unlimited_again, left, tiny, tmp_path
):
    """Training continues. The final weights are lost only if the disk stays full."""
    fields = {**tiny, "run_id": "f", "save_every": 1, "keep_checkpoints": 2, "n_embd": 32}
    script = faulty_script(tmp_path, limited_files("pass", unlimited_again), "step >= 3")
    done = run_forked(fields, script=script)
    lost = unlimited_again > 6
    assert done.returncode == lost == ("so the final weights are lost" in done.stderr)
    assert done.stdout.count(WARNING) == 1
    assert checkpoints(tmp_path / "logs" / "f") == left
    assert ("\nresult val_loss" in done.stdout) == (not lost)
    assert not (tmp_path / "logs" / "f" / "partial").exists()


def test_a_full_disk_at_a_stop_is_an_error(tiny, tmp_path):
    fields = {**tiny, "run_id": "f", "save_every": 1, "keep_checkpoints": 2, "n_embd": 32}
    kill = "os.kill(os.getpid(), signal.SIGTERM) if step == 5 else None"
    script = faulty_script(tmp_path, limited_files(kill, 9), "step >= 3")
    said = summary(run_forked(fields, script=script))
    assert said.startswith("stopped after step 5 without saving a checkpoint: a signal")
    assert checkpoints(tmp_path / "logs" / "f") == [SECOND, THIRD]


def test_lines_that_a_full_disk_refuses_are_written_later(tmp_path):
    log = train_gpt2.Log(tmp_path / "log.txt", 0, 1)
    log("before", show=False)
    log.start_writing()
    file, log.file = log.file, Mock()
    log.file.write.side_effect = OSError
    log("one", show=False)
    log.file.write.side_effect = lambda data: file.write(data[:3])
    log("two", show=False)
    assert log.unwritten == b"\ntwo\n"
    log.file = file
    log("three", show=False)
    assert (tmp_path / "log.txt").read_text() == "before\none\ntwo\nthree\n"


def test_a_checkpoint_that_cannot_be_deleted_does_not_end_the_run(tiny, tmp_path, capsys):
    """It is deleted later, like any other."""
    fields = {**tiny, "run_id": "d", "save_every": 1, "keep_checkpoints": 2}
    unlink = Path.unlink
    refuse = [SECOND]

    def unlink_some(path, missing_ok=False):
        if path.name in refuse:
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, missing_ok)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", unlink_some)
        assert run_here(fields, 5) is None
        shown = capsys.readouterr().out
        assert f"was not deleted (cannot use {tmp_path}/logs/d/{SECOND}: Permission" in shown
        assert checkpoints(tmp_path / "logs" / "d")[0] == SECOND
    assert run_here(fields, resume="auto") is not None
    assert checkpoints(tmp_path / "logs" / "d") == [SIXTH]


@pytest.mark.parametrize("output", ["> /dev/full", ">&-"])
def test_output_that_cannot_be_written_does_not_end_training(output, tiny, tmp_path):
    command = shlex.join([sys.executable, str(SCRIPT), *options({**tiny, "run_id": "o"})])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        f"{command} {output}", shell=True, capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nresult val_loss" in (tmp_path / "logs" / "o.txt").read_text()


def test_output_works_on_an_ascii_terminal_and_without_one(tiny, tmp_path, monkeypatch, capsys):
    """An error is also printed if LOCAL_RANK is set without torchrun."""
    monkeypatch.setattr(train_gpt2.StopRequest, "catch_signals", lambda self: None)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    train_gpt2.cli(options({**tiny, "log_dir": tmp_path / "Jörg"}))
    assert b"J\\xf6rg" in sys.stdout.buffer.getvalue()
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit, match="1"):
        train_gpt2.cli(["--n_layer=0"])
    assert capsys.readouterr().err.startswith("train_gpt2.py: n_layer=0 must be a number between")


def test_a_shard_lost_during_a_run_costs_no_step(tiny, tmp_path, capsys):
    """All ranks stop and save, although only the last one needs that shard."""
    fields = {**tiny, "run_id": "s", "val_loss_every": 0, "resume": "auto"}
    shard = tmp_path / "train_1.bin"
    script = faulty_script(tmp_path, f"os.rename('{shard}', '{shard}.gone')", "step == 3", rank=1)
    said = summary(run_forked(fields, 2, script))
    assert said.startswith("stopped after step 3 (checkpoint saved): ") and "train_1.bin" in said
    os.rename(f"{shard}.gone", shard)
    run_here(fields)
    assert "continuing after step 3\n" in capsys.readouterr().out


def test_a_run_stopped_by_changed_data_resumes_only_with_the_old(tiny, tmp_path):
    fields = {**tiny, "run_id": "s", "allow_repeat": True, "num_iterations": 20, "resume": "auto"}
    shard = tmp_path / "train_1.bin"
    before = shard.read_bytes()
    other = write_shard(tmp_path / "other.bin", [1] * 1101)
    script = faulty_script(tmp_path, f"Path('{shard}').write_bytes(Path('{other}').read_bytes())")
    said = summary(run_forked(fields, script=script))
    assert "train_1.bin changed while in use" in said
    refused("another train_shards: restore the data", fields)
    shard.write_bytes(before)
    assert run_here(fields) is not None


# ---- Files of earlier runs ----------------------------------------------------------------------
@pytest.fixture
def half(tiny):
    """Settings that resume a run of six steps, which a signal stopped after three."""
    assert run_here(tiny, 3, run_id="half") is None
    return {**tiny, "resume": f"{tiny['log_dir']}/half/state_step0000000003.pt"}


@pytest.fixture
def weights(tiny, tmp_path):
    """The path of the final weights of a tiny run."""
    run_here(tiny, run_id="first", save_every=6)
    return tmp_path / "logs" / "first" / "model.pt"


HALF = {"resume": "logs/half/state_step0000000003.pt", "save_every": 1, "keep_checkpoints": 1}
FIRST = {"resume": "auto", "run_id": "first"}
INIT = {"init": "logs/first/model.pt", "run_id": "second"}
REFUSALS = [
    (
        {**HALF, "learning_rate": 0.02, "num_iterations": 5},
        "3.pt was saved with other settings: pass --num_iterations=6 --learning_rate=0.01$",
    ),
    ({**HALF, "dtype": "float32", "n_embd": 32}, "pass --n_embd=16 --dtype=auto$"),
    ({**HALF, "val_tokens": 320}, "pass --val_tokens=304$"),
    ({**HALF, "resume": "auto", "run_id": "half", "seed": 1}, "pass --seed=1337$"),
    ({**HALF, "run_id": "first"}, "first exists: .*another --run_id"),
    ({**FIRST, "num_iterations": 9}, "first has finished with --num_iterations=6: to go on"),
    ({**FIRST, "seed": 1}, "first has finished with --seed=1337"),
    ({"resume": INIT["init"]}, "holds only weights: start a new run with --init"),
    ({"run_id": "half"}, "half exists: .*--resume=auto to continue it"),
    ({"run_id": "half.txt"}, "cannot use .*logs/half.txt: File exists"),
    ({"run_id": "folder"}, "folder exists: "),
    ({"run_id": "pipe"}, "pipe exists: "),
    ({"run_id": "notes"}, "notes exists: "),
    ({"run_id": "notes", "init": "none"}, "notes exists: "),
    ({"run_id": "notes", "resume": "auto"}, "notes.txt is not the log of a run"),
    ({**HALF, "run_id": "third"}, "third exists: .*another --run_id"),
    ({"run_id": "third"}, "third exists: "),
    ({"run_id": "damaged", "resume": "auto"}, "no checkpoint is complete: .*another --run_id"),
    ({"run_id": "fourth"}, "fourth exists: "),
    ({**INIT, "n_embd": 32, "n_layer": 1}, "another model: pass --n_layer=2 --n_embd=16"),
    ({**INIT, "n_head": 1, "model": "modern"}, "another model: pass --n_head=2 --model=gpt2"),
    ({**INIT, "vocab_size": 96}, "another model: pass --vocab_size=64"),
    ({**INIT, "init": "nowhere.pt"}, "nowhere.pt is not a complete file"),
    ({**INIT, "init": __file__}, "is not a complete file"),
    ({**INIT, "init": "logs/old.pt"}, "logs/old.pt has format 1, not 3"),
    ({"log_dir": "/dev/null/logs"}, "cannot use /dev/null/logs.*: Not a directory"),
]


@pytest.mark.parametrize("changes, sentence", REFUSALS)
def test_conflicts_with_earlier_runs_are_rejected(
    changes, sentence, tiny, half, weights, tmp_path, monkeypatch
):
    """The logs of third, with checkpoints, and fourth, with final weights, are lost.

    A user's own file that has the name of a log is neither continued nor emptied.
    """
    monkeypatch.chdir(tmp_path)
    for copy in "third", "damaged":
        shutil.copytree("logs/half", f"logs/{copy}")
    os.truncate("logs/damaged/state_step0000000003.pt", 1000)
    shutil.copytree("logs/first", "logs/fourth", ignore=shutil.ignore_patterns("state*"))
    os.mkdir("logs/folder.txt")
    os.mkfifo("logs/pipe.txt")
    Path("logs/notes.txt").write_text("torch==2.13.0\n")
    write_weights(tmp_path / "logs" / "old.pt", train_gpt2.read_pt(weights) | {"format": 1})
    refused(sentence, tiny, **changes)


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
        assert f"starting from the weights in {path}\n" in text
    # If it is stopped, it resumes without that file and ends with the same bits.
    third = {**tiny, "run_id": "third", "save_every": 6, "resume": "auto", "init": str(checkpoint)}
    assert run_here(third, 3) is None
    checkpoint.unlink()
    assert run_here(third, 1) is None
    assert run_here(third, init="") is not None
    assert last_bits(weights.parents[1] / "third") == last_bits(weights.parents[1] / "second")


@both_dtypes
def test_a_run_resumes_with_other_processes_and_micro_batches(dtype, tiny, capsys):
    fields = {**tiny, "dtype": dtype}
    run_here(fields)
    whole = capsys.readouterr().out
    run_here(fields, 3, run_id="half")
    fields["resume"] = f"{tiny['log_dir']}/half/state_step0000000003.pt"
    for processes, size in (1, 12), (2, 3), (3, 2):
        done = trained({**fields, "device_batch_size": size}, processes)
        rows, expected = losses(done), losses(whole)[-5:]
        assert [row[:2] for row in rows] == [row[:2] for row in expected]
        values = [float(loss) for _, _, loss in rows]
        tolerance = {"float32": 0.002, "bfloat16": 0.02}[dtype]
        assert values == pytest.approx([float(row[2]) for row in expected], abs=tolerance)
        hashes = [[row[2] for row in validations(text)[-2:]] for text in (done, whole)]
        assert hashes[0] == hashes[1]


def test_a_resumed_run_may_be_longer_and_its_data_extended(half, tmp_path, monkeypatch, capsys):
    """The data may also be moved, the dtype of the machine may differ and the script be newer."""
    state = train_gpt2.read_pt(Path(half["resume"]))
    del state["hyperparameters"]["shuffle"]
    write_weights(Path(half["resume"]), state)
    (tmp_path / "moved").mkdir()
    for path in tmp_path.glob("train_*.bin"):
        os.rename(path, tmp_path / "moved" / path.name)
    write_shard(tmp_path / "moved" / "train_9.bin", np.arange(1000) % 64)
    files = {"train_files": f"{tmp_path}/moved/*.bin"}
    before = train_gpt2.choose_dtype(Hyperparameters(), torch.device("cpu"))
    other = torch.float32 if before == torch.bfloat16 else torch.bfloat16
    monkeypatch.setattr(train_gpt2, "choose_dtype", lambda args, device: other)
    run_here(half, **files, num_iterations=9, val_loss_every=0, run_id="longer")
    shown = capsys.readouterr().out
    assert [step for step, _, _ in losses(shown)[-7:]] == list("4567899")
    assert f"was saved with matmul_dtype={before}, and this run has {other}\n" in shown
    os.rename(tmp_path / "moved" / "train_0.bin", tmp_path / "moved" / "train_8.bin")
    refused("was saved with another train_shards: restore the data", half, **files)


@pytest.mark.parametrize("changes", [{"shuffle": True}, {"batch_size": 186}])
def test_data_cannot_be_extended_if_that_would_change_the_tokens_so_far(changes, tiny, tmp_path):
    """Those of a shuffled run, and of one that has read its data to the end: here, in one step."""
    fields = {**tiny, **changes, "device_batch_size": 186, "allow_repeat": True, "run_id": "x"}
    assert run_here(fields, 2) is None
    path = write_shard(tmp_path / "train_9.bin", np.arange(1000) % 64)
    refused("was saved with another train_shards: restore the data", fields, resume="auto")
    path.unlink()
    assert run_here(fields, resume="auto") is not None


def test_any_token_that_differs_is_noticed_on_resume(half, tmp_path):
    """Also before those that were trained on last, because another epoch may read it again."""
    for shard, tokens in ("train_0.bin", 700), ("train_2.bin", 1199):
        path = tmp_path / shard
        whole = path.read_bytes()
        for token in 0, tokens - 1:
            edited = bytearray(whole)
            edited[1024 + 2 * token] ^= 1
            path.write_bytes(edited)
            refused("another train_shards: restore the data", half)
        path.write_bytes(whole)
    assert run_here(half) is not None


def test_a_finished_run_is_neither_trained_nor_changed_again(tiny, tmp_path):
    """Its log is not read: it also holds the source, whose lines may look like a result."""
    fields = {**tiny, "run_id": "e", "resume": "auto"}
    run_here(fields, 3)
    with open(tmp_path / "logs" / "e.txt", "a") as log:
        log.write("result val_loss:1.0000\n")
    assert run_here(fields) is not None
    (tmp_path / "logs" / "e.txt").unlink()
    before = content(tmp_path / "logs")
    done = run_forked(fields, 2)
    assert "holds the result of this run; nothing to do" in done.stdout and done.returncode == 0
    assert content(tmp_path / "logs") == before


def test_an_older_checkpoint_is_continued_as_a_new_run(tiny, tmp_path, capsys):
    """The old run stays as it is, and resume=auto continues each of them."""
    fields = {**tiny, "run_id": "old", "save_every": 1, "keep_checkpoints": 3}
    run_here(fields, 5)
    old = tmp_path / "logs" / "old"
    before = content(old)
    refused("old exists", fields, resume=f"{old}/state_step0000000003.pt")
    run_here(fields, 1, resume=f"{old}/state_step0000000003.pt", run_id="new")
    assert content(old) == before
    for run_id, step in ("new", 4), ("old", 5):
        capsys.readouterr()
        run_here(fields, run_id=run_id, resume="auto")
        assert f"\nresume=auto: continuing after step {step}\n" in capsys.readouterr().out
    assert last_bits(old) == last_bits(tmp_path / "logs" / "new")


def test_a_failed_start_does_not_use_up_its_run_id(tiny, tmp_path):
    fields = {**tiny, "run_id": "s"}
    refused("no checkpoint is complete", fields, resume="none.pt")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(train_gpt2, "compile_model", lambda *arguments: 1 / 0)
        run_here(fields)
    assert run_here(fields) is not None
    log = (tmp_path / "logs" / "s.txt").read_text()
    assert log.count("\nhyperparameter run_id=") == 1 and "none.pt" not in log


def test_a_good_checkpoint_that_cannot_be_loaded_is_an_error(half, tmp_path):
    """auto neither skips it nor starts over, and deletes nothing."""
    half |= {"run_id": "half", "resume": "auto", "save_every": 1, "keep_checkpoints": 1}
    before = content(tmp_path / "logs")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(torch, "load", Mock(side_effect=MemoryError))
        run_here(half)
    with pytest.MonkeyPatch.context() as patch:
        sgd = [torch.optim.SGD([torch.zeros(1)])]
        patch.setattr(train_gpt2, "build_optimizers", lambda *arguments: sgd)
        refused("was saved with another optimizer_names: restore", half)
    with pytest.MonkeyPatch.context() as patch:
        block = train_gpt2.Block
        patch.setattr(train_gpt2, "Block", lambda args: torch.nn.Sequential(block(args)))
        refused("does not fit this train_gpt2.py .*Missing key", half)
    assert content(tmp_path / "logs").keys() == before.keys()


def test_an_edited_option_of_an_optimizer_is_named(half, monkeypatch, capsys):
    monkeypatch.setattr(torch.optim, "AdamW", functools.partial(torch.optim.AdamW, eps=1e-10))
    assert run_here(half) is not None
    assert "\nAdamW continues with eps=1e-08\n" in capsys.readouterr().out


class CountingSGD(torch.optim.SGD):
    """Keeps a counter in its param_groups, as Prodigy and schedule-free optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] /= group["count"]
        super().step(closure)


def test_counters_in_param_groups_are_restored(tiny, tmp_path, monkeypatch):
    """Learning rates are not, because they may be edited in the script."""
    rates = [0.01]
    monkeypatch.setattr(
        train_gpt2, "build_optimizers", lambda gpt, *_: [CountingSGD(gpt.parameters(), rates[-1])]
    )
    run_here(tiny, run_id="whole", save_every=6)
    run_here(tiny, 3, run_id="part")
    run_here(tiny, run_id="part", save_every=6, resume="auto")
    state = last_bits(tmp_path / "logs" / "part")
    assert state == last_bits(tmp_path / "logs" / "whole")
    assert state["optimizers"][0]["param_groups"][0]["count"] == 6
    rates.append(0.02)
    whole = str(tmp_path / "logs" / "whole" / "state_step0000000006.pt")
    run_here(tiny, run_id="edited", save_every=7, num_iterations=7, resume=whole)
    state = last_bits(tmp_path / "logs" / "edited")
    assert state["optimizers"][0]["param_groups"][0]["initial_lr"] == 0.02


# ---- Damaged, foreign and hostile files ---------------------------------------------------------
class Hostile:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


DAMAGES = {
    "empty": lambda path: os.truncate(path, 0),
    "another archive": lambda path: zipfile.ZipFile(path, "w").writestr("a", "b"),
    "gone": os.unlink,
    "a folder": lambda path: (os.unlink(path), os.mkdir(path)),
    "a pipe": lambda path: (os.unlink(path), os.mkfifo(path)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_incomplete_checkpoint_is_rejected(damage, tiny, tmp_path, capsys):
    """If named, it is an error; auto reports it and takes the one before."""
    fields = {**tiny, "run_id": "d", "save_every": 2}
    run_here(fields, 4)
    newest = tmp_path / "logs" / "d" / "state_step0000000004.pt"
    DAMAGES[damage](newest)
    before = content(newest.parent)
    refused("no checkpoint is complete", tiny, resume=str(newest))
    passed_over = f"{newest} is not a complete checkpoint"
    assert passed_over in capsys.readouterr().out
    assert run_here(fields, resume="auto", save_every=0) is not None
    text = capsys.readouterr().out
    assert (passed_over in text) == (damage != "gone")
    assert "\nresume=auto: continuing after step 2\n" in text
    (newest.parent / "model.pt").unlink()
    assert content(newest.parent) == before


def test_a_hostile_pickle_is_not_executed(tiny, tmp_path):
    write_weights(tmp_path / "a.pt", {"format": Hostile(tmp_path / "hostile")})
    refused("a.pt does not fit", tiny, resume=f"{tmp_path}/a.pt")
    refused("a.pt does not fit", tiny, init=f"{tmp_path}/a.pt")
    assert not (tmp_path / "hostile").exists()


many_examples = settings(
    max_examples=100,
    deadline=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@many_examples
@given(data=st.data())
def test_a_flipped_byte_or_a_cut_is_noticed(data, half):
    """The archive's own checksums omit its table of contents, in the last 700 bytes."""
    damaged = bytearray(Path(half["resume"]).read_bytes())
    last = len(damaged) - 1
    place = data.draw(st.integers(0, last) | st.integers(last - 700, last))
    if data.draw(st.booleans()):
        damaged[place] ^= data.draw(st.integers(1, 255))
    else:
        del damaged[place:]
    path = Path(half["log_dir"], "damaged.pt")
    path.write_bytes(damaged)
    assert not train_gpt2.is_complete(path)


def places_in(value, path=()):
    """Yield the path to each part of nested dicts and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in items:
        yield (*path, key)
        if isinstance(part, (dict, list)):
            yield from places_in(part, (*path, key))


OTHERS = [None, True, -1, 10**30, 1.5, float("nan"), "../../x", b"x", [], {}, (), torch.zeros(3),
          torch.full((2, 2), float("inf")), torch.zeros(0, dtype=torch.int8)]  # fmt: skip


@many_examples
@given(data=st.data())
def test_any_changed_part_of_a_checkpoint_is_refused_or_harmless(data, half):
    """A part is removed or replaced, and the checksum is valid."""
    state = torch.load(half["resume"], weights_only=True)
    path = data.draw(st.sampled_from(list(places_in(state))))
    parent = state
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = data.draw(st.sampled_from(OTHERS))
    if isinstance(parent, dict) and data.draw(st.booleans()):
        del parent[path[-1]]
    changed = write_weights(Path(half["log_dir"], "changed.pt"), state)
    before = content(changed.parent / "half")
    with contextlib.suppress(UserError):
        _, _, state = load_weights(changed)  # as the tools do
        assert isinstance(state["encoding"], str | None) and state["step"] >= -1
    try:
        assert run_here(half, 1, resume=str(changed)) is None
    except UserError as error:
        assert "\n" not in train_gpt2.describe_failure(error)
    except Exception:  # PyTorch's optimizers do not check the shapes of their state
        assert path[0] == "optimizers"
    assert content(changed.parent / "half") == before


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
    assert "resume=auto: continuing after step 3\n" in capsys.readouterr().out
    expected = {"model.pt", "lock", "state_step0000000006.pt"}
    assert set(os.listdir(folder)) == expected | strangers.keys()
    for name, data in strangers.items():
        assert (folder / name).read_bytes() == data


def test_auto_sees_only_the_checkpoints_of_its_run(half, capsys):
    run_here(half, run_id="second", resume="auto")
    assert "resume=auto: no checkpoint yet\n" in capsys.readouterr().out


def test_two_processes_never_train_one_run(half):
    """The folder is locked, not the log, which may be deleted."""
    fields = half | {"run_id": "half", "resume": "auto"}
    os.remove(f"{half['log_dir']}/half.txt")
    with open(f"{half['log_dir']}/half/lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        refused("another process is training .*half: stop it first", fields)
    assert run_here(fields) is not None
