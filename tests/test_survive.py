"""Interrupted runs and damaged files: a run loses nothing and says why it ended."""

import fcntl
import functools
import io
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
    STEP,
    both_dtypes,
    checkpoints,
    edited_script,
    last_bits,
    losses,
    options,
    run_forked,
    run_here,
    run_subprocess,
    trained,
    validations,
    write_shard,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import train_gpt2
from train_gpt2 import Hyperparameters, UserError, parse_args


# ---- Faults injected by editing the script ------------------------------------------------------
def faulty_script(folder, fault, when="step == 4", rank=0):
    """Return a copy of the script in which a rank runs `fault` before a step, after saving."""
    condition = f'{when} and os.environ.get("RANK", "0") == "{rank}"'
    lines = f"        if {condition}:\n            {fault}\n"
    return edited_script(folder, (STEP, STEP + lines))


def refused(sentence, fields, **changes):
    """Assert that a run raises UserError with this sentence and changes no file but its log."""
    before = content(fields["log_dir"])
    with pytest.raises(UserError, match=sentence):
        run_here(fields, **changes)
    after = content(fields["log_dir"])
    for path, old in before.items():
        new = after[path]
        assert new == old or (path.suffix == ".txt" and new.startswith(old))


def content(folder):
    """Return {path: bytes} of all files below a folder."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in files}


LOST = "lost the connection to another rank; see its message or torchrun's summary ("
UNLIKE_WEIGHTS = "the ranks differ in the checksum of their weights ("


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
        assert f"resume=auto: continuing after step {step - 2}\n" in stopped
        assert stopped.endswith(f"\nstopped by a signal after step {step}\n")
        assert checkpoints(folder)[-1] == f"state_step{step:010d}.pt"
    line = "        os.replace(partial, path)\n"
    kill = "        if state.get('step') == 10:\n            os.kill(os.getpid(), signal.SIGKILL)\n"
    script = edited_script(tmp_path, (line, kill + line))
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


def test_a_second_signal_after_two_seconds_exits_at_once(tiny, tmp_path):
    kill = "os.kill(os.getpid(), signal.SIGTERM)"
    script = faulty_script(tmp_path, f"{kill}; stop.time -= 2.1; {kill}")
    done = run_forked({**tiny, "run_id": "two"}, script=script)
    assert done.returncode == -signal.SIGTERM
    assert "another signal in 2 seconds or later exits at once" in done.stderr
    assert checkpoints(tmp_path / "logs" / "two") == []


def test_simultaneous_signals_count_once_and_ignored_ones_never(tiny, tmp_path):
    """torchrun repeats signals that its workers also get directly; nohup ignores SIGHUP."""
    send = "os.kill(os.getpid(), signal.{})".format
    ignore = "import signal\n\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    faults = f"        {send('SIGHUP')}\n        if step == 4:\n"
    faults += f"            {send('SIGINT')}; {send('SIGTERM')}\n"
    script = edited_script(tmp_path, ("import signal\n", ignore), (STEP, STEP + faults))
    trained({**tiny, "run_id": "one"}, script=script)
    assert checkpoints(tmp_path / "logs" / "one") == ["state_step0000000004.pt"]


@both_dtypes
def test_one_process_stops_between_micro_batches_and_in_validations(dtype, tiny, tmp_path, capsys):
    """An unfinished step is discarded, and the resumed run ends with the same bits."""
    fields = {**tiny, "dtype": dtype, "save_every": 6}
    run_here(fields, run_id="whole")
    whole = last_bits(tmp_path / "logs" / "whole")
    validation = -(-tiny["val_tokens"] // 16 // 2)  # forward passes; a step has 6
    cases = (0, 0), (3, 0), (validation + 5, 0), (validation + 12, 2), (2 * validation + 39, 6)
    for passes, step in cases:
        part = {**fields, "run_id": f"p{passes}", "resume": "auto"}
        capsys.readouterr()
        assert run_here(part, passes=passes) is None
        assert capsys.readouterr().out.endswith(f"\nstopped by a signal after step {step}\n")
        folder = tmp_path / "logs" / part["run_id"]
        assert checkpoints(folder) == [f"state_step{step:010d}.pt"]
        state = torch.load(folder / f"state_step{step:010d}.pt", weights_only=True)
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
    assert re.search("^stopped by a signal after step", done.stdout, re.M), done.stderr
    assert len(checkpoints(tmp_path / "logs" / "t")) == 1
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


def test_a_stopped_run_prints_its_checkpoint_and_the_command_to_continue(
    tiny, tmp_path, monkeypatch, capsys
):
    fields = {**tiny, "run_id": "t"}
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", *options(fields)])
    assert run_here(fields, 0) is None
    [said] = re.findall(r"^saved (.*); to continue: (.*)$", capsys.readouterr().out, re.M)
    path = tmp_path / "logs" / "t" / "state_step0000000000.pt"
    assert said[0] == str(path) and path.exists()
    command = shlex.split(said[1])
    assert command[:2] == ["python", "train_gpt2.py"] and said[1].count("run_id") == 1
    assert parse_args(command[2:]) == parse_args([*options(fields), "--resume=auto"])
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", "--train_files=my data/*"])
    said = "torchrun --standalone --nproc_per_node=4 train_gpt2.py '--train_files=my data/*'"
    assert train_gpt2.resume_command("x", 4) == f"{said} --run_id=x --resume=auto"
    monkeypatch.setenv("RUN_COMMAND", "NPROC=2 bash run.sh")
    assert train_gpt2.resume_command("x", 2) == "NPROC=2 bash run.sh --run_id=x --resume=auto"


# ---- Ranks that are killed, stuck or different --------------------------------------------------
NOT_FINITE = "gpt.h[1].mlp.c_fc.weight.register_hook(lambda grad: grad * {})"
MISTAKE = "raise ValueError('my mistake')"
FAULTS = {  # what a rank does at step 4, number of processes, the rank, how the run ends
    "a kill": ("os.kill(os.getpid(), 9)", 3, 1, LOST),
    "a long sleep": ("time.sleep(8)", 2, 1, LOST),
    "a mistake": (MISTAKE, 1, 0, "Traceback (most recent call last):"),
    "a mistake of a rank": (MISTAKE, 3, 1, "rank 1: Traceback (most recent call last):"),
    "nan": (NOT_FINITE.format("math.nan"), 1, 0, "train_loss is nan at step 5"),
    "infinity": (NOT_FINITE.format("math.inf"), 2, 1, "train_loss is nan at step 5"),
    "a flipped bit": ("gpt.h[1].mlp.c_fc.weight.data[3] += 2**-20", 2, 1, UNLIKE_WEIGHTS),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_one_rank_ends_all_ranks_with_one_message(name, tiny, tmp_path):
    """A bug shows its traceback; a non-finite gradient names the rank and the parameter."""
    fault, processes, rank, sentence = FAULTS[name]
    fields = {**tiny, "run_id": "f", "save_every": 2, "val_loss_every": 5, "comm_timeout": 5}
    script = faulty_script(tmp_path, fault, rank=rank)
    done = run_forked(fields, processes, script)
    said = summary(done)
    assert said.startswith(sentence)
    assert ("Timed out" in said) == (name == "a long sleep")
    assert done.stderr.count("Traceback") == ("mistake" in name)
    assert ("ValueError: my mistake\n" in done.stderr) == ("mistake" in name)
    if sentence.startswith("train_loss"):
        bad = [[]] * (processes - 1) + [["h.1.mlp.c_fc.weight"]]
        assert said.endswith(f"by rank: {bad}")
    assert checkpoints(tmp_path / "logs" / "f")[-1] == "state_step0000000004.pt"


UNLIKE = {  # how a second rank differs, as on another node
    "seed": lambda patch, fields: fields.update(seed=1),
    "compile": lambda patch, fields: fields.update(compile=True),
    "source": lambda patch, fields: patch(train_gpt2, "SOURCE", "another"),
    "dtype": lambda patch, fields: patch(train_gpt2, "product_dtype", lambda *_: torch.float16),
    "torch": lambda patch, fields: patch(torch, "__version__", "another"),
    "val_hash": lambda patch, fields: write_shard(
        Path(fields["val_files"][:-5] + "0.bin"), [0] * 400
    ),
    "the step of the checkpoint": lambda patch, fields: patch(
        train_gpt2, "find_checkpoint", lambda *_: (None, {"step": 3})
    ),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_a_rank_that_differs_is_rejected(what, tiny, tmp_path, monkeypatch):
    """Two ranks run one after the other; the second receives what the first has sent."""
    told = []
    monkeypatch.setattr(
        train_gpt2, "all_gather_objects", lambda value: told.append(value) or [value]
    )
    run_here(tiny)
    shutil.rmtree(tiny["log_dir"])
    UNLIKE[what](monkeypatch.setattr, tiny)
    first = iter(told)
    monkeypatch.setattr(train_gpt2, "all_gather_objects", lambda value: [next(first), value])
    refused(rf"the ranks differ in {what} \(", tiny)
    assert not list(tmp_path.glob("logs/*.txt")) or what == "the step of the checkpoint"


@pytest.mark.parametrize(
    "tokens, sentence",
    [
        (range(64), ""),
        ([*range(63), 1], "s_1.bin differs on the machine of rank 2: copy it again"),
        (range(63), "the ranks differ in the sizes of their shards ([3000, 64] on rank 0, "),
    ],
)
def test_three_machines_need_the_same_shards(tokens, sentence, tiny, tmp_path):
    """Each rank has its own data folder and the environment of a machine of its own."""
    for rank in 0, 1, 2:
        folder = tmp_path / str(rank)
        write_shard(folder / "s_0.bin", np.arange(3000) % 61)
        write_shard(folder / "s_1.bin", tokens if rank == 2 else range(64))
    join = "    rank, world_size, device = join_processes(args)\n"
    local = f"    os.chdir('{tmp_path}/' + os.environ['RANK'])\n"
    local += "    os.environ.update(LOCAL_RANK='0', LOCAL_WORLD_SIZE='1')\n"
    script = edited_script(tmp_path, (join, local + join))
    fields = {**tiny, "train_files": "s_*.bin", "comm_timeout": 20, "save_every": 6}
    done = run_forked({**fields, "run_id": "three"}, 3, script)
    if sentence:
        assert summary(done).startswith(sentence)
        assert not list(tmp_path.glob("logs/*.txt"))
    else:
        one = trained({**fields, "run_id": "one", "train_files": f"{tmp_path}/0/s_*.bin"}, 3)
        assert losses(done.stdout) == losses(one)
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
@pytest.mark.parametrize("part, value", [("weight", torch.nan), ("momentum", -torch.inf)])
def test_a_state_that_is_not_finite_is_never_saved(part, value, tiny, tmp_path, monkeypatch):
    save = train_gpt2.save_checkpoint

    def poison_and_save(gpt, optimizers, train_loader, *others):
        weight = gpt.h[1].mlp.c_fc.weight
        momentum = optimizers[1].state[weight]["momentum_buffer"]
        if train_loader.position == 4 * train_loader.tokens_per_step:
            {"weight": weight.data, "momentum": momentum}[part][0, 0] = value
        return save(gpt, optimizers, train_loader, *others)

    monkeypatch.setattr(train_gpt2, "save_checkpoint", poison_and_save)
    sentence = "non-finite value in the state after step 4: "
    refused(sentence, tiny, run_id="n", save_every=2, keep_checkpoints=1)
    assert checkpoints(tmp_path / "logs" / "n") == ["state_step0000000002.pt"]


def test_a_result_that_is_not_finite_is_an_error(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(train_gpt2, "evaluate", lambda *arguments: float("nan"))
    refused("the run diverged: val_loss is nan", tiny, run_id="n")
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
NO_UNLINK = "Path.unlink = lambda path, missing_ok=False: os.rmdir(path)"
FULL_DISKS = {  # what happens at step 5, how the run ends, which checkpoints are there
    "to the end": (
        "pass",
        "model.pt was not written, so the final weights are lost",
        [SECOND, THIRD],
    ),
    "at a stop": (
        f"{NO_UNLINK}; os.kill(os.getpid(), signal.SIGTERM)",
        f"stopped after step 5 without saving: progress since {THIRD} is lost",
        [SECOND, THIRD],
    ),
    "for a while": ("resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))", "", [THIRD, SIXTH]),
}


@pytest.mark.parametrize("case", FULL_DISKS)
def test_a_full_disk_is_reported_and_costs_no_older_checkpoint(case, tiny, tmp_path):
    """Training continues. Files are limited to a size that the log stays below."""
    fault, sentence, left = FULL_DISKS[case]
    fields = {**tiny, "run_id": "f", "save_every": 1, "n_embd": 32}
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (100000, -1)) if step == 3 else None"
    fault = f"{limit}\n            if step == 5:\n                {fault}"
    done = run_forked(fields, script=faulty_script(tmp_path, fault, "step in (3, 5)"))
    assert done.returncode == (sentence != "")
    assert not sentence or sentence in summary(done)
    warning = "\nwarning: state_step0000000004.pt was not written ([Errno 27] File too large)\n"
    assert done.stdout.count(warning) == 1
    assert checkpoints(tmp_path / "logs" / "f") == left
    assert ("\nresult val_loss" in done.stdout) == (case == "for a while")
    partial = tmp_path / "logs" / "f" / "partial"
    assert partial.exists() == (case == "at a stop"), "it is deleted if possible"


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
    loss = f"os.rename('{shard}', '{shard}.gone')"
    script = faulty_script(tmp_path, loss, "step == 3", rank=1)
    said = summary(run_forked(fields, 2, script))
    assert said.startswith("stopped after step 3 (checkpoint saved): ") and "train_1.bin" in said
    os.rename(f"{shard}.gone", shard)
    run_here(fields)
    assert "continuing after step 3\n" in capsys.readouterr().out


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
    ({**HALF, "run_id": "first"}, "first.txt already finished after 6 steps"),
    ({**FIRST, "num_iterations": 9}, "first.txt already finished after 6 steps"),
    ({"resume": INIT["init"]}, "holds only weights: start a new run with --init"),
    ({"run_id": "half"}, "half.txt exists: pass --resume=auto, or another --run_id"),
    ({"run_id": "half.txt"}, "cannot write .*: choose another --log_dir or --run_id"),
    ({"run_id": "folder"}, "cannot write .*: choose another --log_dir or --run_id"),
    ({**HALF, "run_id": "third"}, "third holds checkpoints: pass --resume, or another --run_id"),
    ({"run_id": "third"}, "third holds checkpoints: pass --resume, or another --run_id"),
    ({"run_id": "damaged", "resume": "auto"}, "no checkpoint is complete: .*another --run_id"),
    ({"run_id": "fourth"}, "fourth holds the weights of a finished run"),
    ({**INIT, "n_embd": 32, "n_layer": 1}, "another model: pass --n_layer=2 --n_embd=16"),
    ({**INIT, "n_head": 1, "key_shift": 1}, "another model: pass --n_head=2 --key_shift=0"),
    ({**INIT, "vocab_size": 96}, "was trained with vocab_size=64, not 96"),
    ({**INIT, "init": "nowhere.pt"}, "is not a complete file of weights"),
    ({**INIT, "init": __file__}, "is not a complete file of weights"),
]


@pytest.mark.parametrize("changes, sentence", REFUSALS)
def test_conflicts_with_earlier_runs_are_rejected(
    changes, sentence, tiny, half, weights, tmp_path, monkeypatch
):
    """The logs of third, with checkpoints, and fourth, with final weights, are lost."""
    monkeypatch.chdir(tmp_path)
    for copy in "third", "damaged":
        shutil.copytree("logs/half", f"logs/{copy}")
    os.truncate("logs/damaged/state_step0000000003.pt", 1000)
    shutil.copytree("logs/first", "logs/fourth", ignore=shutil.ignore_patterns("state*"))
    os.mkdir("logs/folder.txt")
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
    state = torch.load(half["resume"], weights_only=True)
    del state["hyperparameters"]["shuffle"]
    save_with_checksum(state, half["resume"])
    (tmp_path / "moved").mkdir()
    for path in tmp_path.glob("train_*.bin"):
        os.rename(path, tmp_path / "moved" / path.name)
    write_shard(tmp_path / "moved" / "train_9.bin", np.arange(1000) % 64)
    files = {"train_files": f"{tmp_path}/moved/*.bin"}
    before = train_gpt2.product_dtype(Hyperparameters(), torch.device("cpu"))
    other = torch.float32 if before == torch.bfloat16 else torch.bfloat16
    monkeypatch.setattr(train_gpt2, "product_dtype", lambda args, device: other)
    run_here(half, **files, num_iterations=9, val_loss_every=0, run_id="longer")
    shown = capsys.readouterr().out
    assert [step for step, _, _ in losses(shown)[-7:]] == list("4567899")
    assert f"was saved by a run in {before}; continuing in {other}\n" in shown
    os.rename(tmp_path / "moved" / "train_0.bin", tmp_path / "moved" / "train_8.bin")
    refused("no longer holds the tokens that were trained on", half, **files)


def test_a_finished_run_is_neither_trained_nor_changed_again(tiny, tmp_path, capsys):
    """This holds even without its weights and with only the checkpoint of an earlier stop."""
    fields = {**tiny, "run_id": "e", "resume": "auto"}
    run_here(fields, 3)
    loss = run_here(fields)
    (tmp_path / "logs" / "e" / "model.pt").unlink()
    before = content(tmp_path / "logs")
    done = run_forked(fields, 2)
    assert f"nothing to do: result val_loss:{loss:.4f}" in done.stdout and done.returncode == 0
    assert content(tmp_path / "logs") == before


def test_a_return_to_an_older_checkpoint_is_not_undone_by_auto(tiny, tmp_path, capsys):
    """The newer checkpoints are renamed, so auto continues the new branch."""
    fields = {**tiny, "run_id": "b", "save_every": 1, "keep_checkpoints": 3}
    run_here(fields, 5)
    folder = tmp_path / "logs" / "b"
    fields["save_every"] = 100
    run_here(fields, 1, resume=f"{folder}/state_step0000000003.pt")
    assert checkpoints(folder) == ["state_step0000000003.pt", "state_step0000000004.pt"]
    assert len(list(folder.glob("*.abandoned"))) == 2
    capsys.readouterr()
    run_here(fields, resume="auto")
    assert "\nresume=auto: continuing after step 4\n" in capsys.readouterr().out


def test_a_failed_start_does_not_use_up_its_run_id(tiny, tmp_path, monkeypatch):
    fields = {**tiny, "run_id": "s"}
    refused("no checkpoint is complete", fields, resume="none.pt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt2, "train_step", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
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
        refused(r"was saved with \['AdamW', 'Muon'\], not \['SGD'\]", half)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim, "AdamW", functools.partial(torch.optim.AdamW, eps=1e-10))
        refused("was saved with eps=1e-08 of AdamW, not 1e-10: restore the old value", half)
    assert content(tmp_path / "logs").keys() == before.keys()


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


def save_with_checksum(state, path):
    """Write a state with a valid checksum, as an attacker could."""
    torch.save(state, path)
    with open(path, "ab") as file:
        file.write(train_gpt2.crc32_of_file(path).to_bytes(4, "little"))


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
    refused("no checkpoint is complete", fields, resume=str(newest))
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
    save_with_checksum({"step": Hostile(tmp_path / "hostile")}, tmp_path / "a.pt")
    refused("a.pt is not a checkpoint of this run", tiny, resume=f"{tmp_path}/a.pt")
    refused("a.pt is not a checkpoint of this run", tiny, init=f"{tmp_path}/a.pt")
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
    changed = Path(half["log_dir"], "changed.pt")
    save_with_checksum(state, changed)
    try:
        assert run_here(half, 1, resume=str(changed)) is None
    except UserError as error:
        assert "\n" not in str(error)


def test_auto_takes_the_newest_by_its_step_and_only_what_the_run_wrote_is_deleted(
    tiny, tmp_path, capsys
):
    """File times do not matter. Other files stay even if a checkpoint lists them as its own."""
    fields = {**tiny, "run_id": "k", "save_every": 1, "keep_checkpoints": 2}
    run_here(fields, 3)
    folder = tmp_path / "logs" / "k"
    newest = folder / "state_step0000000003.pt"
    whole = newest.read_bytes()
    strangers = {"state_step0000000001.pt": whole, "state_step0000000009.pt": b"", "best.pt": b""}
    strangers["state_step0000000008_mine.pt"] = (folder / "state_step0000000002.pt").read_bytes()
    strangers["../../precious.txt"] = b"precious"
    for name, data in strangers.items():
        (folder / name).write_bytes(data)
    state = torch.load(newest, weights_only=True)
    assert state["files"] == ["state_step0000000002.pt", newest.name]
    state["files"] += ["best.pt", "../../precious.txt", str(tmp_path / "precious.txt")]
    save_with_checksum(state, newest)
    os.utime(newest, (1, 1))
    run_here(fields, resume="auto")
    assert "resume=auto: continuing after step 3\n" in capsys.readouterr().out
    expected = {"model.pt", "state_step0000000005.pt", "state_step0000000006.pt", *strangers}
    expected.remove("../../precious.txt")
    assert set(os.listdir(folder)) == expected
    for name, data in strangers.items():
        assert (folder / name).read_bytes() == data


def test_auto_sees_only_the_checkpoints_of_its_run(half, capsys):
    run_here(half, run_id="second", resume="auto")
    assert "resume=auto: continuing after step 0\n" in capsys.readouterr().out


def test_two_runs_never_write_one_log(half):
    with open(f"{half['log_dir']}/half.txt") as log:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        refused(r"another process is writing .*half\.txt", half, resume="auto", run_id="half")
