"""Stopping, killing, damaging and going on: a run loses nothing and says why it ended."""

import errno
import fcntl
import hashlib
import os
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    SCRIPT,
    STEP,
    bits,
    bits_of,
    both_dtypes,
    checkpoints,
    edited_script,
    finish,
    losses,
    options,
    run_forked,
    run_here,
    start,
    trained,
    validations,
    wait_for,
    write_shard,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import train_gpt2
from train_gpt2 import Hyperparameters, UserError, main


# ---- Faults inside a run, put there by an edit of the script ------------------------------------
def faulty_script(folder, fault, when="step == 4", rank=0):
    """Return a copy of the script in which a rank does `fault` before a step, after saving."""
    condition = f'{when} and os.environ.get("RANK", "0") == "{rank}"'
    lines = f"        if {condition}:\n            {fault}\n"
    return edited_script(folder, (STEP, STEP + lines))


def refused(sentence, fields, **changes):
    """Run in this process; a UserError says the sentence. No file changes, but a log may grow."""
    before = content(fields["log_dir"])
    with pytest.raises(UserError, match=sentence):
        run_here(fields, **changes)
    after = content(fields["log_dir"])
    for path, old in before.items():
        new = after[path]
        assert new == old or (path.suffix == ".txt" and new.startswith(old))


def content(folder):
    """Return all files of a folder and what is in them."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in files}


LOST = "lost the connection to another rank; see its message or torchrun's summary ("
UNLIKE_WEIGHTS = "the ranks differ in the checksum of their weights ("


def summary(done):
    """Return the one sentence (or traceback) that a failed run ends with.

    Beside the rank that fails, the others may say that they lost it.
    """
    assert done.returncode != 0
    found = re.findall(r"^train_gpt2\.py: (.*)$", done.stderr, re.M)
    lost = [text for text in found if re.match(r"rank \d: " + re.escape(LOST), text)]
    others = [text for text in found if text not in lost]
    assert len(others) == 1 or (not others and lost), done.stderr
    return others[0] if others else lost[0].partition(": ")[2]


# ---- Signals and going on -----------------------------------------------------------------------
LONGER = {"num_iterations": 12, "warmdown_iters": 8}
SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP


@both_dtypes
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_is_stopped_and_killed_again_and_again_is_the_same(
    processes, dtype, tiny, tmp_path
):
    """Each run but the last ends two steps later: four by a signal, one while it saves."""
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
    last = "state_step0000000012.pt"
    assert bits(folder / last) == bits(folder.parent / "whole" / last)
    assert not (folder / "partial").exists()
    assert validations(whole)[-1] == validations(last_part)[-1]
    log = (tmp_path / "logs" / "part.txt").read_text()  # auto goes on in the run's own log
    rows = [row for row in losses(log) if row[1] == "train_loss"]
    del rows[9]  # step 10 was trained twice, for it was not saved
    assert rows == [row for row in losses(whole) if row[1] == "train_loss"]


def test_a_second_signal_ends_the_run_at_once_if_two_seconds_later(tiny, tmp_path):
    """Before, it is the same stop: torchrun passes on a signal that its processes got, too."""
    kill = "os.kill(os.getpid(), signal.SIGTERM)"
    script = faulty_script(tmp_path, f"{kill}; time.sleep(2.1); {kill}")
    done = run_forked({**tiny, "run_id": "two"}, script=script)
    assert done.returncode == -signal.SIGTERM
    assert "another signal in 2 seconds or later exits at once" in done.stderr
    assert checkpoints(tmp_path / "logs" / "two") == []
    script = faulty_script(tmp_path, f"os.kill(os.getpid(), signal.SIGINT); {kill}")
    done = run_forked({**tiny, "run_id": "other"}, script=script)
    assert done.returncode == 0, done.stderr
    assert checkpoints(tmp_path / "logs" / "other") == ["state_step0000000004.pt"]


def test_a_signal_that_is_ignored_at_the_start_stays_ignored(tiny, tmp_path):
    """As under nohup, which ignores SIGHUP."""
    script = faulty_script(tmp_path, "os.kill(os.getpid(), signal.SIGHUP)")
    ignore = "import signal\n\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    script.write_text(script.read_text().replace("import signal\n", ignore, 1))
    done = trained(tiny, script=script)
    assert "step:6/6 val_loss" in done and "stopped" not in done


class StopAtForwardPass(train_gpt2.StopRequest):
    """Stops a run as a signal does that comes before a forward pass, counted without warm-up."""

    def __init__(self, passes):
        super().__init__()
        self.passes = passes

    def check(self):
        if self.passes == 0:
            self.time = time.monotonic()
        self.passes -= 1
        super().check()


@both_dtypes
def test_one_process_stops_between_micro_batches_and_in_validations(dtype, tiny, tmp_path, capsys):
    """What was done of an unfinished step is forgotten: the resumed run is the same to the bit."""
    fields = {**tiny, "dtype": dtype, "save_every": 6}
    run_here(fields, run_id="whole")
    last = "state_step0000000006.pt"
    whole = bits(tmp_path / "logs" / "whole" / last)
    validation = -(-tiny["val_tokens"] // 16 // 2)  # forward passes; a step has 6
    cases = (0, 0), (3, 0), (validation + 5, 0), (validation + 12, 2), (2 * validation + 39, 6)
    for passes, step in cases:
        args = Hyperparameters(**{**fields, "run_id": f"p{passes}", "resume": "auto"})
        capsys.readouterr()
        assert main(args, StopAtForwardPass(passes)) is None
        assert capsys.readouterr().out.endswith(f"\nstopped by a signal after step {step}\n")
        folder = tmp_path / "logs" / args.run_id
        assert checkpoints(folder) == [f"state_step{step:010d}.pt"]
        state = torch.load(folder / f"state_step{step:010d}.pt", weights_only=True)
        assert (state["train_seconds"] > 0) == (step > 0), "half a step is not training time"
        assert main(args) is not None
        resumed = bits(folder / last)
        for expected, optimizer in zip(whole["optimizers"], resumed["optimizers"]):
            if step == 6:  # no step has set the learning rates of the groups
                optimizer["param_groups"] = expected["param_groups"]
        assert resumed == whole


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_torchrun_saves(number, tiny, tmp_path):
    """It passes a SIGTERM on; a SIGKILL it cannot, but its processes see that it is gone."""
    run = start({**tiny, "num_iterations": 500, "allow_repeat": True, "run_id": "t"}, 2)
    wait_for(run, "step:4/500 train_loss")  # its output holds it up soon after
    run.send_signal(number)
    done = finish(run)
    assert re.search("^stopped by a signal after step", done.stdout, re.M), done.stderr
    assert len(checkpoints(tmp_path / "logs" / "t")) == 1
    assert not re.search(r"^train_gpt2.py:", done.stderr, re.M)


def test_a_killed_rank_is_restarted_by_torchrun(tiny, tmp_path):
    fields = {**tiny, **LONGER, "save_every": 4}
    trained({**fields, "run_id": "whole"}, 2)
    first_time = 'step == 9 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"'
    script = faulty_script(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", first_time)
    fields |= {"run_id": "again", "resume": "auto"}
    done = finish(start(fields, 2, script, ["--standalone", "--max-restarts=1"]))
    assert done.returncode == 0, done.stderr
    assert "resume=auto: continuing after step 8\n" in done.stdout
    last = "state_step0000000012.pt"
    assert bits(tmp_path / "logs" / "again" / last) == bits(tmp_path / "logs" / "whole" / last)


def test_a_terminal_that_is_closed_saves(tiny, tmp_path):
    """Its SIGHUP comes when nothing can be written to it any more."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    fields = {**tiny, "num_iterations": 500, "allow_repeat": True, "run_id": "p"}
    run = subprocess.Popen(
        ["setsid", "-c", "-w", sys.executable, SCRIPT, *options(fields)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    os.close(slave)
    shown = b""
    while b"tok/s" not in shown or b"loss=" not in shown:  # the bar moves
        try:
            shown += os.read(master, 1000)
        except OSError:
            pytest.fail(shown.decode())
    os.close(master)
    assert run.wait(timeout=120) == 0
    assert b"train_loss" not in shown, "lines of steps go to the log alone"
    assert "\nstopped by a signal after step" in (tmp_path / "logs" / "p.txt").read_text()
    assert len(checkpoints(tmp_path / "logs" / "p")) == 1


def test_a_stopped_run_says_its_file_and_the_command_that_continues_it(tiny, tmp_path, monkeypatch):
    """The signal comes before the first step."""
    line = '    with log.timed("compile"):\n'
    script = edited_script(tmp_path, (line, f"    os.kill(os.getpid(), signal.SIGTERM)\n{line}"))
    first = run_forked({**tiny, "run_id": "t"}, script=script)
    path = tmp_path / "logs" / "t" / "state_step0000000000.pt"
    [said] = re.findall(r"^saved (.*); to continue: (.*)$", first.stdout, re.M)
    assert said[0] == str(path) and path.exists()
    assert said[1].startswith(f"python {script} --vocab_size=64 ")
    assert said[1].endswith(" --run_id=t --resume=auto") and said[1].count("run_id") == 1
    second = run_forked({}, flags=shlex.split(said[1])[2:])
    assert "resume=auto: continuing after step 0\n" in second.stdout
    assert "step:6/6 val_loss" in second.stdout
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", "--train_files=my data/*"])
    said = "torchrun --standalone --nproc_per_node=4 train_gpt2.py '--train_files=my data/*'"
    assert train_gpt2.resume_command("x", 4) == f"{said} --run_id=x --resume=auto"
    monkeypatch.setenv("RUN_COMMAND", "NPROC=2 bash run.sh")
    assert train_gpt2.resume_command("x", 2) == "NPROC=2 bash run.sh --run_id=x --resume=auto"


# ---- Ranks that are killed, stuck or of another mind --------------------------------------------
NOT_FINITE = "gpt.h[1].mlp.c_fc.weight.register_hook(lambda grad: grad * {})"
MISTAKE = "raise ValueError('my mistake')"
FAULTS = {  # what a rank does at step 4, number of processes, the rank, how the run ends
    "a kill": ("os.kill(os.getpid(), 9)", 3, 1, LOST),
    "a kill of the last rank": ("os.kill(os.getpid(), 9)", 3, 2, LOST),
    "a mistake": (MISTAKE, 1, 0, "Traceback (most recent call last):"),
    "a mistake of a rank": (MISTAKE, 3, 1, "rank 1: Traceback (most recent call last):"),
    "nan": (NOT_FINITE.format("math.nan"), 1, 0, "train_loss is nan at step 5"),
    "infinity": (NOT_FINITE.format("math.inf"), 2, 1, "train_loss is nan at step 5"),
    "a flipped bit": ("gpt.lm_head.weight.data[3, 3] += 2**-20", 2, 1, UNLIKE_WEIGHTS),
    "a flipped bit of Muon's": ("gpt.h[1].mlp.c_fc.weight.data[3] += 2**-20", 2, 1, UNLIKE_WEIGHTS),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_rank_ends_all_with_one_summary(name, tiny, tmp_path):
    """A mistake shows its traceback; a gradient that is not finite names rank and parameter."""
    fault, processes, rank, sentence = FAULTS[name]
    fields = {**tiny, "run_id": "f", "save_every": 2, "val_loss_every": 5}
    script = faulty_script(tmp_path, fault, rank=rank)
    done = run_forked(fields, processes, script)
    said = summary(done)
    assert said.startswith(sentence)
    assert done.stderr.count("Traceback") == ("mistake" in name)
    assert ("ValueError: my mistake\n" in done.stderr) == ("mistake" in name)
    if sentence.startswith("train_loss"):
        bad = [[]] * (processes - 1) + [["h.1.mlp.c_fc.weight"]]
        assert said.endswith(f"by rank: {bad}")
    assert checkpoints(tmp_path / "logs" / "f")[-1] == "state_step0000000004.pt"


def test_a_stuck_rank_is_told_of_after_the_timeout(tiny, tmp_path):
    wait = f"os.system('while [ ! -e {tmp_path}/said ]; do sleep 0.01; done')"
    script = faulty_script(tmp_path, wait, "step == 2", rank=1)
    line = '            print(f"train_gpt2.py: {text}", file=sys.stderr, flush=True)\n'
    assert line in script.read_text()
    said = f"{line}            open('{tmp_path}/said', 'w')\n"
    script.write_text(script.read_text().replace(line, said))
    text = summary(run_forked({**tiny, "comm_timeout": 8}, 2, script))
    assert text.startswith(LOST) and "Timed out" in text


JOIN = "    rank, world_size, device = join_processes(args)\n"
DTYPE = "    dtype = product_dtype(args, device)\n"
FIND = "    path, state = on_all_ranks(find_checkpoint, args, log) or (None, None)\n"
OTHER = "    args = dataclasses.replace(args, {})\n"
UNLIKE = {
    "seed": (JOIN, JOIN + OTHER.format("seed=rank")),
    "resume": (JOIN, JOIN + OTHER.format("resume='ab'[rank]")),
    "compile": (JOIN, JOIN + OTHER.format("compile=rank > 0")),
    "source": (DTYPE, DTYPE + "    global SOURCE\n    SOURCE += str(rank)\n"),
    "dtype": (DTYPE, DTYPE + "    dtype = dtype if rank else torch.float16\n"),
    "torch": (DTYPE, DTYPE + "    torch.__version__ += str(rank)\n"),
    "the step of the checkpoint": (FIND, FIND + "    state = {'step': dist.get_rank()}\n"),
    "val_hash": None,
    "a shard": None,
}


@pytest.mark.parametrize("what", UNLIKE)
def test_ranks_that_differ_otherwise_are_refused(what, tiny, tmp_path):
    """As on two nodes with another script, CPU, environment or data."""
    change = UNLIKE[what]
    if change is None:  # each rank has the files of a folder of its own
        for source in tmp_path.glob("*.bin"):
            tokens = np.fromfile(source, np.uint16)[512:]
            write_shard(tmp_path / "0" / source.name, tokens)
            if source.name == {"val_hash": "val_0.bin", "a shard": "train_2.bin"}[what]:
                tokens[-20 if what == "val_hash" else 600] ^= 1
            write_shard(tmp_path / "1" / source.name, tokens)
        tiny |= {"train_files": "train_*.bin", "val_files": "val_*.bin", "num_iterations": 15,
                 "val_tokens": 384}  # fmt: skip
        local = f"    os.chdir('{tmp_path}/' + str(rank))\n"
        local += "    os.environ.update(LOCAL_RANK='0', LOCAL_WORLD_SIZE='1')\n"
        change = JOIN, JOIN + local
    done = run_forked({**tiny, "comm_timeout": 20}, 2, edited_script(tmp_path, change))
    expected = f"the ranks differ in {what} ("
    if what == "a shard":
        expected = "train_2.bin differs on the machine of rank 1"
    assert summary(done).startswith(expected)
    assert not list(tmp_path.glob("logs/*.txt")) or what == "the step of the checkpoint"


# ---- Mistakes, numbers that are not finite, memory and disk -------------------------------------
STATES = {
    "weight": lambda gpt, optimizers: gpt.h[1].mlp.c_fc.weight.data,
    "momentum": lambda gpt, optimizers: next(iter(optimizers[1].state.values()))["momentum_buffer"],
    "moment": lambda gpt, optimizers: optimizers[0].state[gpt.lm_head.weight]["exp_avg"],
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_is_not_finite_is_never_saved(name, tiny, tmp_path, monkeypatch):
    save = train_gpt2.save_checkpoint

    def poison_and_save(gpt, optimizers, train_loader, *others):
        if train_loader.position == 4 * train_loader.tokens_per_step:
            STATES[name](gpt, optimizers)[0, 0] = -torch.inf if name == "moment" else torch.nan
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


def test_memory_that_is_out_names_the_setting_to_lower(tiny, tmp_path):
    for error in torch.OutOfMemoryError("CUDA out of memory"), MemoryError():
        assert "--device_batch_size" in train_gpt2.describe_failure(error)
    fields = {**tiny, "batch_size": 512, "device_batch_size": 512, "num_iterations": 1}
    write_shard(tmp_path / "train_3.bin", np.arange(9000) % 64)
    limit = "resource.setrlimit(resource.RLIMIT_AS, (2**20, 2**20))"
    fault = f"{limit}; torch.empty(2**28)"  # memory that the warm-up has freed would suffice a step
    done = run_forked(fields, script=faulty_script(tmp_path, fault, "step == 0"))
    assert "--device_batch_size" in summary(done) and done.stderr.count("\n") == 1


def test_a_full_disk_is_told_and_training_goes_on_but_ends_with_status_1(tiny, tmp_path):
    """A file may not grow beyond what the log needs; what is left of the checkpoint goes away."""
    fields = {**tiny, "run_id": "f", "save_every": 2, "n_embd": 32}
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))"
    done = run_forked(fields, script=faulty_script(tmp_path, limit))
    assert done.returncode == 1
    assert "model.pt was not written, so the final weights are lost" in summary(done)
    warning = "\nwarning: state_step0000000006.pt was not written ([Errno 27] File too large)\n"
    assert done.stdout.count(warning) == 1
    assert "step:6/6 val_loss" in done.stdout and "\nresult val_loss" not in done.stdout
    expected = ["state_step0000000002.pt", "state_step0000000004.pt"]
    assert sorted(os.listdir(tmp_path / "logs" / "f")) == expected


def test_a_disk_that_is_full_for_a_while(tiny, tmp_path, monkeypatch, capsys):
    """Older checkpoints stay, the next is written; a stop that saves nothing is an error."""
    save, unlink, steps = torch.save, Path.unlink, []

    def full_at_step_3(state, file):
        steps.append(state.get("step", "model"))
        if steps[-1] in (3, 4):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(state, file)

    def read_only(path, missing_ok=False):
        if path.name == "partial":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        unlink(path, missing_ok)

    monkeypatch.setattr(torch, "save", full_at_step_3)
    monkeypatch.setattr(Path, "unlink", read_only)
    with pytest.raises(UserError, match=r"step 4 without saving: .*002\.pt is lost"):
        run_here(tiny, 4, run_id="w", save_every=1)
    assert steps == [1, 2, 3, 4, 4]  # the last when the run was stopped
    assert capsys.readouterr().out.count("was not written ([Errno 28] No space left on dev") == 3
    folder = tmp_path / "logs" / "w"
    assert checkpoints(folder) == ["state_step0000000001.pt", "state_step0000000002.pt"]
    run_here(tiny, run_id="w", save_every=5, resume="auto")
    assert checkpoints(folder) == ["state_step0000000005.pt", "state_step0000000006.pt"]


@pytest.mark.parametrize("output", ["", "> /dev/full", ">&-"])
def test_output_that_cannot_be_written_does_not_end_training(output, tiny, tmp_path):
    """Nor does a letter that a terminal of ASCII cannot show."""
    fields = {**tiny, "run_id": "o", "num_iterations": 1, "log_dir": tmp_path / "Jörg"}
    command = shlex.join([sys.executable, str(SCRIPT), *options(fields)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        f"{command} {output}", shell=True, capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert ("J\\xf6rg" in done.stdout) == (output == "")
    assert "\nresult val_loss" in (tmp_path / "Jörg" / "o.txt").read_text()


def test_a_local_rank_without_torchrun_is_no_silence(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(train_gpt2.StopRequest, "catch_signals", lambda self: None)
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit, match="1"):
        train_gpt2.cli(["--n_layer=0"])
    assert capsys.readouterr().err.startswith("train_gpt2.py: n_layer=0 must be a number between")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_shard_that_is_lost_in_mid_run_costs_no_step(processes, tiny, tmp_path):
    """All ranks save the steps before, although only the last one needs that shard."""
    fields = {**tiny, "run_id": "s", "val_loss_every": 0, "resume": "auto"}
    shard = tmp_path / "train_1.bin"
    loss = f"os.rename('{shard}', '{shard}.gone')"
    script = faulty_script(tmp_path, loss, "step == 3", rank=processes - 1)
    said = summary(run_forked(fields, processes, script))
    assert said.startswith("stopped after step 3 (checkpoint saved): ") and "train_1.bin" in said
    os.rename(f"{shard}.gone", shard)
    assert "continuing after step 3\n" in trained(fields, processes)


def test_the_log_holds_the_source_that_runs(tiny, tmp_path):
    """Although the file is edited before the header of the log is written."""
    edit = "    Path(__file__).write_text('# edited')\n"
    line = "    log.header(args, gpt, optimizers, train_loader, val_loader)\n"
    script = edited_script(tmp_path, (line, edit + line))
    source = script.read_text()
    assert run_forked({**tiny, "run_id": "src"}, script=script).returncode == 0
    assert script.read_text() == "# edited"
    assert (tmp_path / "logs" / "src.txt").read_text().startswith(source)


# ---- Weights of another run ---------------------------------------------------------------------
@pytest.fixture
def weights(tiny, tmp_path):
    """The weights that a tiny run ended with."""
    run_here(tiny, run_id="first", save_every=6)
    return tmp_path / "logs" / "first" / "model.pt"


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_starts_from_the_weights_of_another(processes, tiny, weights):
    """At step 0, with new optimizers; from model.pt and from a checkpoint alike."""
    last = validations((weights.parents[1] / "first.txt").read_text())[-1][1]
    states = []
    for path in weights, weights.with_name("state_step0000000006.pt"):
        fields = {**tiny, "init": path, "run_id": path.stem, "save_every": 6}
        done = trained(fields, processes)
        rows = validations(done)
        assert rows[0][:2] == (0, pytest.approx(last, abs=2e-4)) and rows[-1][1] < last
        assert f"starting from the weights in {path}\n" in done
        states.append(bits(weights.parents[1] / path.stem / "state_step0000000006.pt"))
    assert states[0] == states[1]


def test_a_stopped_run_that_started_from_weights_goes_on_without_them(tiny, weights):
    fields = {**tiny, "init": str(weights), "run_id": "second"}
    assert run_here(fields, 3) is None
    weights.unlink()
    assert run_here(fields, 1, resume="auto") is None
    assert run_here(fields, resume="auto", init="") is not None


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"n_embd": 32, "n_layer": 1}, "another model: pass --n_layer=2 --n_embd=16"),
        ({"n_head": 1, "key_shift": 1}, "another model: pass --n_head=2 --key_shift=0"),
        ({"vocab_size": 96}, "was trained with vocab_size=64, not 96"),
        ({"init": "nowhere.pt"}, "is not a complete file of weights"),
        ({"init": __file__}, "is not a complete file of weights"),
    ],
)
def test_weights_that_do_not_fit_are_one_sentence(changes, sentence, tiny, weights):
    refused(sentence, tiny, **{"init": str(weights), "run_id": "second", **changes})


# ---- Other processes, other settings, other data ------------------------------------------------
@pytest.fixture
def half(tiny):
    """Settings that go on with a run of six steps, which a signal has ended after three."""
    assert run_here(tiny, 3, run_id="half") is None
    return {**tiny, "resume": f"{tiny['log_dir']}/half/state_step0000000003.pt"}


@both_dtypes
def test_a_run_goes_on_with_other_processes_and_micro_batches(dtype, tiny, capsys):
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


def test_a_run_may_grow_and_its_data_be_added_and_moved(half, tmp_path, capsys):
    (tmp_path / "moved").mkdir()
    for path in tmp_path.glob("train_*.bin"):
        os.rename(path, tmp_path / "moved" / path.name)
    write_shard(tmp_path / "moved" / "train_9.bin", np.arange(1000) % 64)
    files = {"train_files": f"{tmp_path}/moved/*.bin"}
    run_here(half, **files, num_iterations=9, val_loss_every=0, run_id="longer")
    assert [step for step, _, _ in losses(capsys.readouterr().out)[-7:]] == list("4567899")


def test_a_finished_run_is_neither_trained_nor_changed_again(tiny, tmp_path, capsys):
    """Also when its weights were removed, or when only a checkpoint of a stop is there."""
    fields = {**tiny, "run_id": "e"}
    run_here(fields, 3)
    loss = run_here(fields, resume="auto")
    (tmp_path / "logs" / "e" / "model.pt").unlink()
    before = content(tmp_path / "logs")
    assert run_forked({**fields, "resume": "auto"}, 2).returncode == 0
    capsys.readouterr()
    assert run_here(fields, resume="auto") is None
    assert f"nothing to do: result val_loss:{loss:.4f}" in capsys.readouterr().out
    assert content(tmp_path / "logs") == before
    refused("already finished after 6 steps", fields, num_iterations=9, resume="auto")
    refused("already finished", fields, resume=f"{tmp_path}/logs/e/state_step0000000003.pt")
    assert content(tmp_path / "logs") == before


def test_final_weights_are_neither_overwritten_nor_a_checkpoint(tiny, weights):
    (weights.parent / "state_step0000000006.pt").unlink()
    (weights.parents[1] / "first.txt").unlink()
    refused("first holds the weights of a finished run", tiny, run_id="first")
    refused("holds only weights: start a new run with --init", tiny, resume=str(weights))


def test_a_return_to_an_older_checkpoint_is_not_undone_by_auto(tiny, tmp_path, capsys):
    """The newer checkpoints are renamed; auto then goes on with the new branch."""
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


@pytest.mark.parametrize("first, second", [("a", "a.txt"), ("a.txt", "a")])
def test_run_ids_whose_files_collide_are_refused_at_the_start(first, second, tiny):
    run_here(tiny, run_id=first, num_iterations=1)
    refused("cannot write .*: choose another --log_dir or --run_id", tiny, run_id=second)


@pytest.mark.parametrize("resume", ["path", "auto"])
@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"learning_rate": 0.02}, "learning_rate=0.01, not 0.02"),
        ({"num_iterations": 5}, "num_iterations=6, not 5"),
        ({"n_embd": 32}, "n_embd=16, not 32"),
        ({"dtype": "float32"}, "dtype=auto, not float32"),
        ({"val_tokens": 320}, "val_tokens=304, not 320"),
    ],
)
def test_other_settings_are_refused_by_name(changes, sentence, resume, half):
    fields = {**half, **changes, "save_every": 1, "keep_checkpoints": 1}
    if resume == "auto":
        fields |= {"resume": "auto", "run_id": "half"}
    refused("step0000000003.pt was saved with " + sentence, fields)


@pytest.mark.parametrize("change", ["one token", "the order of shards"])
def test_other_data_are_refused(change, half, tmp_path):
    """One changed token among those that were trained on, or another shard first."""
    if change == "one token":
        tokens = np.fromfile(tmp_path / "train_0.bin", np.uint16)[512:].copy()
        tokens[5] ^= 1
        write_shard(tmp_path / "train_0.bin", tokens)
    else:
        os.rename(tmp_path / "train_0.bin", tmp_path / "train_9.bin")
    refused("no longer holds the tokens that were trained on", half)


def test_another_dtype_on_resume_is_said(tiny, monkeypatch, capsys):
    """auto may choose another one, on another machine."""
    run_here(tiny, 2, run_id="d")
    before = train_gpt2.product_dtype(Hyperparameters(), torch.device("cpu"))
    other = torch.float32 if before == torch.bfloat16 else torch.bfloat16
    monkeypatch.setattr(train_gpt2, "product_dtype", lambda args, device: other)
    run_here(tiny, run_id="d", resume="auto")
    assert f"was saved by a run in {before}; continuing in {other}\n" in capsys.readouterr().out


def only_sgd(gpt, args, rank, world_size):
    return [torch.optim.SGD(gpt.parameters(), lr=args.learning_rate)]


def no_memory(*arguments, **options):
    raise MemoryError


@pytest.mark.parametrize(
    "place, name, replacement, sentence",
    [
        (train_gpt2, "build_optimizers", only_sgd, r"Muon'\], not \['SGD'\]"),
        (torch, "load", no_memory, None),
    ],
)
def test_a_good_checkpoint_that_cannot_be_loaded_is_an_error(
    place, name, replacement, sentence, tiny, monkeypatch
):
    """auto does not pass it over, starts nothing anew and deletes nothing."""
    fields = {**tiny, "run_id": "d", "save_every": 1}
    run_here(fields, 4)
    before = content(tiny["log_dir"])
    monkeypatch.setattr(place, name, replacement)
    with pytest.raises((UserError, MemoryError), match=sentence):
        run_here(fields, resume="auto", keep_checkpoints=1)
    assert content(tiny["log_dir"]) == before


# ---- Files: damaged, foreign, hostile -----------------------------------------------------------
class Hostile:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def truncate(path):
    os.truncate(path, os.path.getsize(path) // 2)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def save_with_checksum(state, path):
    """Write a state as somebody else may, with a good checksum."""
    torch.save(state, path)
    with open(path, "ab") as file:
        file.write(train_gpt2.crc32_of_file(path).to_bytes(4, "little"))


DAMAGES = {
    "truncated": truncate,
    "one bit flipped": flip,
    "empty": lambda path: os.truncate(path, 0),
    "another archive": lambda path: zipfile.ZipFile(path, "w").writestr("a", "b"),
    "another state": lambda path: torch.save({"step": 4}, path),
    "gone": os.unlink,
    "a folder": lambda path: (os.unlink(path), os.mkdir(path)),
    "a pipe": lambda path: (os.unlink(path), os.mkfifo(path)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_no_whole_checkpoint_is_refused(damage, tiny, tmp_path, capsys):
    """By name with a sentence; by auto passed over for the one before."""
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


def test_a_hostile_pickle_is_not_run(tiny, tmp_path):
    save_with_checksum({"step": Hostile(tmp_path / "hostile")}, tmp_path / "a.pt")
    refused("a.pt is not a checkpoint of this run", tiny, resume=f"{tmp_path}/a.pt")
    refused("a.pt is not a checkpoint of this run", tiny, init=f"{tmp_path}/a.pt")
    assert not (tmp_path / "hostile").exists()


def test_auto_among_damaged_checkpoints_alone_is_refused(tiny, tmp_path):
    """Starting anew would be a loss of what they may still hold."""
    fields = {**tiny, "run_id": "d", "save_every": 1, "keep_checkpoints": 3}
    run_here(fields, 3)
    for name in checkpoints(tmp_path / "logs" / "d"):
        truncate(tmp_path / "logs" / "d" / name)
    refused(r"no checkpoint is complete: .*another --run_id", fields, resume="auto")


def find(args):
    """Return (step, bits, val_hash) of the checkpoint that a run would resume from."""
    log = train_gpt2.Log(args, args.run_id, rank=1)  # of a rank that writes no log
    _, val_loader = train_gpt2.open_data(args, 0, 1, torch.device("cpu"))
    tokens = val_loader.read(0, args.val_tokens + 1)
    log.val_hash = hashlib.sha256(tokens).hexdigest()[:16]
    _, state = train_gpt2.find_checkpoint(args, log)
    return state["step"], bits_of(state), log.val_hash


@pytest.fixture
def two(tiny):
    """Settings that go on with a run, its newest checkpoint's path and bytes, what both hold."""
    fields = {**tiny, "n_layer": 1, "n_embd": 4, "num_iterations": 2, "warmdown_iters": 0}
    fields |= {"save_every": 1, "val_loss_every": 0, "run_id": "two"}
    run_here(fields)
    args = Hyperparameters(**{**fields, "resume": "auto"})
    newest = Path(args.log_dir) / "two" / "state_step0000000002.pt"
    second = find(args)
    whole = newest.read_bytes()
    newest.unlink()
    first = find(args)
    return args, newest, whole, first, second


many_examples = settings(
    max_examples=200,
    deadline=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@many_examples
@given(data=st.data())
def test_a_flipped_byte_or_a_cut_is_passed_over_or_harmless(data, two):
    """No checksum of the archive covers its table of contents, which is in the last 700 bytes."""
    args, newest, whole, first, second = two
    damaged = bytearray(whole)
    last = len(whole) - 1
    place = data.draw(st.integers(0, last) | st.integers(last - 700, last))
    if data.draw(st.booleans()):
        damaged[place] ^= data.draw(st.integers(1, 255))
        newest.write_bytes(damaged)
        assert find(args) in (first, second)
    else:
        newest.write_bytes(damaged[:place])
        assert find(args) == first


def places_in(value, path=()):
    """Yield the path of each part of nested dicts and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in items:
        yield (*path, key)
        if isinstance(part, (dict, list)):
            yield from places_in(part, (*path, key))


OTHERS = [None, True, -1, 10**30, 1.5, float("nan"), "../../x", b"x", [], {}, (), torch.zeros(3),
          torch.full((2, 2), float("inf")), torch.zeros(0, dtype=torch.int8)]  # fmt: skip


@many_examples
@given(data=st.data())
def test_any_changed_part_of_a_checkpoint_is_refused_or_harmless(data, two):
    """With a good checksum. A part is removed or replaced."""
    args, newest, whole, _, expected = two
    newest.write_bytes(whole)
    state = torch.load(newest, weights_only=True)
    path = data.draw(st.sampled_from(list(places_in(state))))
    parent = state
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = data.draw(st.sampled_from(OTHERS))
    if isinstance(parent, dict) and data.draw(st.booleans()):
        del parent[path[-1]]
    save_with_checksum(state, newest)
    log = train_gpt2.Log(args, args.run_id, rank=1)  # of a rank that writes no log
    log.val_hash = expected[2]
    train_loader, _ = train_gpt2.open_data(args, 0, 1, torch.device("cpu"))
    gpt = train_gpt2.GPT(args, train_gpt2.product_dtype(args, torch.device("cpu")))
    optimizers = train_gpt2.build_optimizers(gpt, args, 0, 1)
    try:
        assert train_gpt2.resume(args, gpt, optimizers, train_loader, log) in (1, 2)
        train_gpt2.train_step(gpt, optimizers, *train_loader.next_batch(), 1.0, args)
    except UserError as error:
        assert "\n" not in str(error)
    finally:
        newest.unlink()


def test_auto_takes_the_newest_by_its_step(two):
    """Not by the time of the file, nor by the letters of its name."""
    args, newest, whole, first, second = two
    oldest = newest.with_name("state_step0000000001.pt").read_bytes()
    newest.write_bytes(whole)
    os.utime(newest, (1, 1))
    copy = newest.with_name("state_step0000000009_mine.pt")  # not a name that a run gives
    copy.write_bytes(oldest)
    assert find(args) == second
    newest.rename(newest.with_name("state_step0001000000.pt"))
    newest.with_name("state_step0000999999.pt").write_bytes(oldest)
    assert find(args) == second != first


def test_a_refused_checkpoint_is_told_once_by_many_ranks(tiny):
    done = run_forked({**tiny, "resume": "none.pt"}, 2)
    assert summary(done).startswith("no checkpoint is complete")
    assert re.fullmatch(r"none\.pt is not a complete checkpoint.*\n", done.stdout)


def test_only_what_the_run_wrote_is_deleted(tiny, tmp_path):
    """Of files beside its checkpoints none, whatever a checkpoint lists as its files."""
    fields = {**tiny, "run_id": "k", "save_every": 1, "keep_checkpoints": 2}
    run_here(fields, 3)
    folder = tmp_path / "logs" / "k"
    newest = folder / "state_step0000000003.pt"
    whole = newest.read_bytes()
    strangers = {"state_step0000000001.pt": whole, "state_step0000000009.pt": b"", "best.pt": b""}
    strangers["../../precious.txt"] = b"precious"
    for name, data in strangers.items():
        (folder / name).write_bytes(data)
    state = torch.load(newest, weights_only=True)
    assert state["files"] == ["state_step0000000002.pt", newest.name]
    state["files"] += ["best.pt", "../../precious.txt", str(tmp_path / "precious.txt")]
    save_with_checksum(state, newest)
    run_here(fields, resume="auto")
    expected = {"model.pt", "state_step0000000005.pt", "state_step0000000006.pt", *strangers}
    expected.remove("../../precious.txt")
    assert set(os.listdir(folder)) == expected
    for name, data in strangers.items():
        assert (folder / name).read_bytes() == data


def test_runs_keep_apart(half, tmp_path, capsys):
    """auto sees only the checkpoints of its run_id, and no run writes among those of another."""
    run_here(half, run_id="second", resume="auto")
    assert "resume=auto: continuing after step 0\n" in capsys.readouterr().out
    run_here(half, run_id="third", resume="", save_every=3)
    (tmp_path / "logs" / "third.txt").unlink()
    for resume in "", half["resume"]:
        sentence = "third holds checkpoints: pass --resume, or another --run_id"
        refused(sentence, half, run_id="third", resume=resume, save_every=1)


def test_two_runs_never_write_one_log(half):
    with open(f"{half['log_dir']}/half.txt") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        refused(r"another process is writing .*half\.txt", half, resume="auto", run_id="half")


# ---- More than one node -------------------------------------------------------------------------
def test_two_nodes_of_two_are_one_of_four(tiny, tmp_path):
    """Two torchrun agents on loopback, as the README starts them, against four processes of one."""
    fields = {**tiny, "device_batch_size": 3, "save_every": 6}
    one = trained({**fields, "run_id": "one"}, 4)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    flags = [
        "--nnodes=2", "--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}", "--rdzv_id=test",
        "--local_addr=127.0.0.1",
    ]  # fmt: skip
    agents = [start({**fields, "run_id": "two"}, 2, flags=flags) for _ in range(2)]
    ended = [finish(agent) for agent in agents]
    assert [done.returncode for done in ended] == [0, 0], ended
    assert losses("".join(done.stdout for done in ended)) == losses(one)
    last = "state_step0000000006.pt"
    assert bits(tmp_path / "logs" / "one" / last) == bits(tmp_path / "logs" / "two" / last)
