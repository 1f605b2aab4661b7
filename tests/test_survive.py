"""Stopping, killing, damaging and going on: a run loses nothing and says why it ended."""

import dataclasses
import errno
import fcntl
import hashlib
import os
import pickle
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
    ROOT,
    STEP,
    TINY,
    StopAfter,
    bits,
    bits_of,
    both_dtypes,
    checkpoints,
    edited_script,
    finish,
    losses,
    run_forked,
    run_ranks,
    start,
    validations,
    wait_for,
    write_shard,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import train_gpt2
from train_gpt2 import Hyperparameters, UserError, main

# ---------------------------------------------------------------------------
# faults inside a run, put there by an edit of the script


def faulty_script(folder, fault, when="step == 4", rank=0):
    """Return a copy of the script in which a rank does `fault` before a step, after saving."""
    condition = f'{when} and os.environ.get("RANK", "0") == "{rank}"'
    lines = f"        if {condition}:\n            {fault}\n"
    return edited_script(folder, (STEP, STEP + lines))


def run_with_fault(fault, fields, folder, processes=1, rank=0):
    return run_forked(fields, processes, faulty_script(folder, fault, rank=rank))


def content(folder):
    """Return all files of a folder and what is in them."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in files}


# ---------------------------------------------------------------------------
# signals and going on

LONGER = {"num_iterations": 12, "warmdown_iters": 8}
SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP


@both_dtypes
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_is_stopped_and_killed_again_and_again_is_the_same(
    processes, dtype, tiny, tmp_path
):
    """Each run but the last ends two steps later: four by a signal, one while it saves."""
    fields = {**tiny, **LONGER, "dtype": dtype}
    whole = run_forked({**fields, "run_id": "whole", "save_every": 12}, processes)
    assert whole.returncode == 0, whole.stderr
    fields |= {"run_id": "part", "resume": "auto"}
    folder = tmp_path / "logs" / "part"
    for number, step in zip(SIGNALS, (2, 4, 6, 8)):
        fault = f"os.kill(os.getpid(), {int(number)})"  # of the last rank alone
        script = faulty_script(tmp_path, fault, "step == first_step + 2", processes - 1)
        done = run_forked(fields, processes, script)
        assert done.returncode == 0, done.stderr
        assert f"resume=auto: continuing after step {step - 2}\n" in done.stdout
        assert done.stdout.endswith(f"\nstopped by a signal after step {step}\n")
        assert checkpoints(folder)[-1] == f"state_step{step:010d}.pt"
    line = "        os.replace(partial, path)\n"
    kill = "        if state.get('step') == 10:\n            os.kill(os.getpid(), signal.SIGKILL)\n"
    script = edited_script(tmp_path, (line, kill + line))
    done = run_forked({**fields, "save_every": 1}, processes, script)
    assert done.returncode == -signal.SIGKILL
    assert checkpoints(folder)[-1] == "state_step0000000009.pt"
    done = run_forked({**fields, "save_every": 12}, processes)
    assert done.returncode == 0, done.stderr
    assert "resume=auto: continuing after step 9\n" in done.stdout
    last = "state_step0000000012.pt"
    assert bits(folder / last) == bits(folder.parent / "whole" / last)
    assert validations(whole.stdout)[-1] == validations(done.stdout)[-1]
    log = (tmp_path / "logs" / "part.txt").read_text()  # auto goes on in the run's own log
    trained = [row for row in losses(log) if row[1] == "train_loss"]
    del trained[9]  # step 10 was trained twice, for it was not saved
    assert trained == [row for row in losses(whole.stdout) if row[1] == "train_loss"]


def test_fault_6_a_second_signal_ends_the_run_at_once_if_two_seconds_later(tiny, tmp_path):
    """Before, it is the same stop: torchrun passes on a signal that its processes got, too."""
    kill = "os.kill(os.getpid(), signal.SIGTERM)"
    done = run_with_fault(f"{kill}; time.sleep(2.1); {kill}", {**tiny, "run_id": "two"}, tmp_path)
    assert done.returncode == -signal.SIGTERM
    assert "another signal in 2 seconds or later exits at once" in done.stderr
    assert checkpoints(tmp_path / "logs" / "two") == []
    for name, other in ("same", "SIGTERM"), ("other", "SIGINT"):
        again = f"os.kill(os.getpid(), signal.{other}); {kill}"
        done = run_with_fault(again, {**tiny, "run_id": name}, tmp_path)
        assert done.returncode == 0, done.stderr
        assert checkpoints(tmp_path / "logs" / name) == ["state_step0000000004.pt"]


def test_a_signal_that_is_ignored_at_the_start_stays_ignored(tiny, tmp_path):
    """As under nohup, which ignores SIGHUP."""
    script = faulty_script(tmp_path, "os.kill(os.getpid(), signal.SIGHUP)")
    command = [sys.executable, str(script)]
    command += [f"--{name}={value}" for name, value in tiny.items()]
    done = subprocess.run(
        ["nohup", *command], capture_output=True, text=True, timeout=120, cwd=tmp_path,
        stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "step:6/6 val_loss" in done.stdout and "stopped" not in done.stdout


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
    main(Hyperparameters(**{**fields, "run_id": "whole"}))
    whole = bits(tmp_path / "logs" / "whole" / "state_step0000000006.pt")
    validation = -(-tiny["val_tokens"] // 16 // 2)  # forward passes; a step has 6
    for passes, step in (0, 0), (3, 0), (validation + 5, 0), (validation + 12, 2), (
        2 * validation + 6 * 6 + 3, 6,
    ):  # fmt: skip
        args = Hyperparameters(**{**fields, "run_id": f"p{passes}", "resume": "auto"})
        capsys.readouterr()
        assert main(args, StopAtForwardPass(passes)) is None
        assert capsys.readouterr().out.endswith(f"\nstopped by a signal after step {step}\n")
        folder = tmp_path / "logs" / args.run_id
        assert checkpoints(folder) == [f"state_step{step:010d}.pt"]
        state = torch.load(folder / f"state_step{step:010d}.pt", weights_only=True)
        assert (state["train_seconds"] > 0) == (step > 0), "half a step is not training time"
        assert main(args) is not None
        resumed = bits(folder / "state_step0000000006.pt")
        for expected, optimizer in zip(whole["optimizers"], resumed["optimizers"]):
            if step == 6:  # no step has set the learning rates of the groups
                optimizer["param_groups"] = expected["param_groups"]
        assert resumed == whole


def test_a_signal_before_the_first_step_is_kept(tiny, tmp_path):
    line = '    with log.timed("compile"):\n'
    script = edited_script(tmp_path, (line, f"    os.kill(os.getpid(), signal.SIGTERM)\n{line}"))
    fields = {**tiny, "run_id": "early"}
    done = run_forked(fields, script=script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\nstopped by a signal after step 0\n")
    done = run_forked({**fields, "resume": "auto"})
    assert "continuing after step 0\n" in done.stdout and "step:6/6 val_loss" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_fault_12_a_signal_to_torchrun_saves(number, tiny, tmp_path):
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
    whole = run_forked({**fields, "run_id": "whole"}, 2)
    assert whole.returncode == 0, whole.stderr
    first_time = 'step == 9 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"'
    script = faulty_script(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", first_time)
    fields |= {"run_id": "again", "resume": "auto"}
    done = finish(start(fields, 2, script, ["--standalone", "--max-restarts=1"]))
    assert done.returncode == 0, done.stderr
    assert "resume=auto: continuing after step 8\n" in done.stdout
    last = "state_step0000000012.pt"
    assert bits(tmp_path / "logs" / "again" / last) == bits(tmp_path / "logs" / "whole" / last)


# ---------------------------------------------------------------------------
# ranks that are killed, stuck or of another mind


def summaries(done):
    """Return the one sentence (or traceback) that a failed run ends with.

    Beside the rank that fails, the others may say that they lost it.
    """
    assert done.returncode != 0
    found = re.findall(r"^train_gpt2\.py: (.*)$", done.stderr, re.M)
    lost = [text for text in found if re.match(r"rank \d: " + re.escape(LOST), text)]
    others = [text for text in found if text not in lost]
    assert len(others) == 1 or (not others and lost), done.stderr
    return others[0] if others else lost[0].partition(": ")[2]


LOST = "lost the connection to another rank; see its message or torchrun's summary ("


def test_fault_13_a_killed_rank_ends_the_others_with_one_summary(tiny, tmp_path):
    kill = "os.kill(os.getpid(), signal.SIGKILL)"
    for rank in (1, 2):
        done = run_with_fault(kill, {**tiny, "run_id": f"k{rank}"}, tmp_path, 3, rank)
        assert summaries(done).startswith(LOST)
    script = faulty_script(tmp_path, kill, rank=1)
    done = finish(start({**tiny, "run_id": "t"}, 2, script))
    assert re.search(r"Root Cause.*rank +: 1 .*exitcode +: -9 ", done.stderr, re.S), done.stderr


def test_a_stuck_rank_is_told_of_after_the_timeout(tiny, tmp_path):
    wait = f"os.system('while [ ! -e {tmp_path}/said ]; do sleep 0.01; done')"
    script = faulty_script(tmp_path, wait, "step == 2", rank=1)
    line = '            print(f"train_gpt2.py: {text}", file=sys.stderr, flush=True)\n'
    said = f"{line}            open('{tmp_path}/said', 'w')\n"
    script.write_text(script.read_text().replace(line, said))
    done = run_forked({**tiny, "run_id": "s", "comm_timeout": 8}, 2, script)
    text = summaries(done)
    assert text.startswith(LOST) and "Timed out" in text


def test_a_flipped_weight_is_found_at_the_next_validation(tiny, tmp_path):
    for weight in ("lm_head.weight", "h[1].mlp.c_fc.weight"):
        fault = f"gpt.{weight}.data[3, 3] += 2**-20"
        done = run_with_fault(fault, {**tiny, "val_loss_every": 5}, tmp_path, 2, rank=1)
        assert summaries(done).startswith("the ranks differ in the checksum of their weights (")
        assert losses(done.stdout)[-1][:2] == ("5", "train_loss")


def test_ranks_that_see_other_checkpoints_are_refused(half, tmp_path):
    line = "    path, state = on_all_ranks(find_checkpoint, args, log) or (None, None)\n"
    script = edited_script(
        tmp_path, (line, line + "    state = None if dist.get_rank() else state\n")
    )
    done = run_forked({**half, "comm_timeout": 20}, 2, script)
    assert summaries(done).startswith(
        "the ranks differ in the step of the checkpoint (3 on rank 0, None on rank 1)"
    )


OTHER_VALUES = {int: 7, float: 0.5, bool: True, str: "other"}
DIFFERENT = {
    "n_head": 1, "n_embd": 32, "num_iterations": 5, "val_tokens": 288, "dtype": "float32",
    "device": "auto", "logit_softcap": 3.0, "resume": "other.pt", "compile": True, "key_shift": 3,
}  # fmt: skip


def ranks_of_unlike_settings(rank, world_size, settings):
    """The error of main() on each rank, for each setting that differs on the last rank."""
    errors = {}
    for field in dataclasses.fields(Hyperparameters):
        fields = {**settings, "dtype": "bfloat16"}
        if rank == world_size - 1:
            fields[field.name] = DIFFERENT.get(field.name, OTHER_VALUES.get(field.type))
        try:
            main(Hyperparameters(**fields))
        except UserError as error:
            errors[field.name] = str(error)
    return errors


def test_fault_2_ranks_that_differ_in_any_setting_are_refused(tiny, tmp_path):
    """Before anything is read or written; the error names the setting and its two values."""
    ranks = run_ranks(ranks_of_unlike_settings, 2, tmp_path / "ranks", tiny)
    assert ranks[0] == ranks[1]
    for field in dataclasses.fields(Hyperparameters):
        sentence = rf"the ranks differ in {field.name} \(.* on rank 0, .* on rank 1\): "
        assert re.match(sentence, ranks[0][field.name]), field.name
    assert not Path(tiny["log_dir"]).exists()


@pytest.mark.parametrize("what", ["source", "dtype", "torch", "val_hash", "a shard"])
def test_fault_2_ranks_that_differ_otherwise_are_refused(what, tiny, tmp_path):
    """As on two nodes with another script, CPU, environment or data. All end without a log."""
    join = "    rank, world_size, device = join_processes(args)\n"
    dtype = "    dtype = product_dtype(args, device)\n"
    change = {
        "source": (dtype, dtype + "    global SOURCE\n    SOURCE += str(rank)\n"),
        "dtype": (dtype, dtype + "    dtype = dtype if rank else torch.float16\n"),
        "torch": (dtype, dtype + "    torch.__version__ += str(rank)\n"),
    }.get(what)
    if change is None:  # the folder of a rank's machine
        for source in tmp_path.glob("*.bin"):
            write_shard(tmp_path / "0" / source.name, np.fromfile(source, np.uint16)[512:])
            other = np.fromfile(source, np.uint16)[512:]
            if source.name == {"val_hash": "val_0.bin", "a shard": "train_2.bin"}[what]:
                other[-20 if what == "val_hash" else 600] ^= 1
            write_shard(tmp_path / "1" / source.name, other)
        tiny |= {"train_files": "train_*.bin", "val_files": "val_*.bin", "num_iterations": 15,
                 "val_tokens": 384}  # fmt: skip
        local = f"    os.chdir('{tmp_path}/' + str(rank))\n"
        local += "    os.environ.update(LOCAL_RANK='0', LOCAL_WORLD_SIZE='1')\n"
        change = join, join + local
    done = run_forked({**tiny, "comm_timeout": 20}, 2, edited_script(tmp_path, change))
    sentence = summaries(done)
    if what == "a shard":
        assert sentence == "train_2.bin differs on the machine of rank 1: copy it again"
    else:
        assert sentence.startswith(f"the ranks differ in {what} (")
    assert not (tmp_path / "logs").exists()


# ---------------------------------------------------------------------------
# mistakes, numbers that are not finite, memory and disk


@pytest.mark.parametrize("processes, rank", [(1, 0), (3, 1)])
def test_fault_8_a_programming_mistake_shows_its_traceback_once(processes, rank, tiny, tmp_path):
    fields = {**tiny, "run_id": "e", "save_every": 2}
    done = run_with_fault("raise ValueError('my mistake')", fields, tmp_path, processes, rank)
    beginning = f"rank {rank}: Traceback" if processes > 1 else "Traceback"
    assert summaries(done) == f"{beginning} (most recent call last):"
    assert done.stderr.count("Traceback") == 1
    assert re.search(r"edited\.py.*\nValueError: my mistake\n", done.stderr, re.S)
    assert checkpoints(tmp_path / "logs" / "e") == [
        "state_step0000000002.pt",
        "state_step0000000004.pt",
    ]


@both_dtypes
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_fault_13_a_gradient_that_is_not_finite_names_step_rank_and_parameter(
    value, processes, dtype, tiny, tmp_path
):
    fault = f"gpt.h[1].mlp.c_fc.weight.register_hook(lambda grad: grad * float('{value}'))"
    fields = {**tiny, "run_id": "n", "save_every": 2, "dtype": dtype}
    text = summaries(run_with_fault(fault, fields, tmp_path, processes, rank=processes - 1))
    bad = [[]] * (processes - 1) + [["h.1.mlp.c_fc.weight"]]
    sentence = "train_loss is nan at step 5: lower the learning rates; parameters with non-finite"
    assert text == f"{sentence} gradients, by rank: {bad}"
    assert checkpoints(tmp_path / "logs" / "n") == [
        "state_step0000000002.pt",
        "state_step0000000004.pt",
    ]


OUT_OF_MEMORY = "out of memory: pass .*--device_batch_size.*"


@pytest.mark.parametrize(
    "fault",
    ["torch.OutOfMemoryError('CUDA out of memory')", "MemoryError()"],
)
def test_out_of_memory_names_the_setting_to_lower(fault, tiny, tmp_path):
    done = run_with_fault(f"raise {fault}", {**tiny, "device_batch_size": 4}, tmp_path)
    assert done.returncode == 1
    assert re.fullmatch(OUT_OF_MEMORY, summaries(done)) and done.stderr.count("\n") == 1


def test_memory_that_is_really_out(tiny, tmp_path):
    fields = {**tiny, "batch_size": 512, "device_batch_size": 512, "num_iterations": 1}
    write_shard(tmp_path / "train_3.bin", np.arange(9000) % 64)
    limit = "resource.setrlimit(resource.RLIMIT_AS, (2**20, 2**20))"
    fault = f"{limit}; torch.empty(2**28)"  # memory that the warm-up has freed would suffice a step
    done = run_forked(fields, script=faulty_script(tmp_path, fault, "step == 0"))
    assert re.fullmatch(OUT_OF_MEMORY, summaries(done))


def test_fault_8_a_full_disk_is_told_and_training_goes_on_but_ends_with_status_1(tiny, tmp_path):
    """A file may not grow beyond what the log needs; what is left of the checkpoint goes away."""
    fields = {**tiny, "run_id": "f", "save_every": 2, "n_embd": 32}
    fault = "resource.setrlimit(resource.RLIMIT_FSIZE, (90000, 90000))"
    done = run_with_fault(fault, fields, tmp_path)
    assert done.returncode == 1
    assert re.fullmatch(
        r".*f/model\.pt was not written, so the final weights are lost: .*", summaries(done)
    )
    warning = "\nwarning: state_step0000000006.pt was not written ([Errno 27] File too large)\n"
    assert done.stdout.count(warning) == 1
    assert done.stdout.count("warning: ") == 2 == 1 + done.stdout.count("warning: model.pt was ")
    assert "step:6/6 val_loss" in done.stdout and "\nresult val_loss" not in done.stdout
    expected = ["state_step0000000002.pt", "state_step0000000004.pt"]
    assert sorted(os.listdir(tmp_path / "logs" / "f")) == expected


def test_fault_8_a_disk_that_is_full_for_a_while(tiny, tmp_path, monkeypatch, capsys):
    """Older checkpoints stay, the next is written; a stop that saves nothing is an error."""
    save, steps = torch.save, []

    def full_at_step_3(state, file):
        steps.append(state.get("step", "model"))
        if steps[-1] in (3, 4):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(state, file)

    monkeypatch.setattr(torch, "save", full_at_step_3)
    lost = "stopped after step 4 without saving: progress since state_step0000000002.pt is lost"
    with pytest.raises(UserError, match=lost):
        main(Hyperparameters(**{**tiny, "run_id": "w", "save_every": 1}), StopAfter(4))
    assert steps == [1, 2, 3, 4, 4]  # the last when the run was stopped
    assert capsys.readouterr().out.count("was not written ([Errno 28] No space left on dev") == 3
    folder = tmp_path / "logs" / "w"
    assert checkpoints(folder) == ["state_step0000000001.pt", "state_step0000000002.pt"]
    main(Hyperparameters(**{**tiny, "run_id": "w", "save_every": 5, "resume": "auto"}))
    assert checkpoints(folder) == ["state_step0000000005.pt", "state_step0000000006.pt"]


def test_fault_8_a_read_only_folder_is_one_sentence(tiny, tmp_path, monkeypatch):
    """The removal of what is left of a checkpoint fails there, too."""

    def refuse(*arguments, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(torch, "save", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(
        UserError, match=r"model\.pt was not written, so the final weights are lost"
    ):
        main(Hyperparameters(**{**tiny, "run_id": "ro"}))


def test_fault_6_a_log_on_a_full_disk_does_not_end_training(tiny, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "full.txt").symlink_to("/dev/full")
    done = run_forked({**tiny, "run_id": "full", "resume": "auto"})
    assert done.returncode == 0 and done.stderr == ""
    assert "\nresult val_loss" in done.stdout


@pytest.mark.parametrize("output", ["| head -1", "> /dev/full", ">&-"])
def test_fault_6_output_that_cannot_be_written_does_not_end_training(output, tiny, tmp_path):
    command = [sys.executable, ROOT / "train_gpt2.py"]
    command += [f"--{name}={value}" for name, value in {**tiny, "run_id": "o"}.items()]
    done = subprocess.run(
        ["bash", "-c", f'"$@" {output}; exit "${{PIPESTATUS[0]}}"', "bash", *command],
        capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.count("\n") == ("head" in output)
    assert "\nresult val_loss" in (tmp_path / "logs" / "o.txt").read_text()


# ---------------------------------------------------------------------------
# weights of another run


@pytest.fixture
def weights(tiny, tmp_path):
    """The weights that a tiny run ended with."""
    main(Hyperparameters(**{**tiny, "run_id": "first", "save_every": 6}))
    return tmp_path / "logs" / "first" / "model.pt"


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_starts_from_the_weights_of_another(processes, tiny, weights, capsys):
    """At step 0, with new optimizers; from model.pt and from a checkpoint alike."""
    text = (weights.parents[1] / "first.txt").read_text()
    last = validations(text)[-1][1]
    for path in weights, weights.with_name("state_step0000000006.pt"):
        fields = {**tiny, "init": path, "run_id": f"{path.stem}{processes}", "save_every": 6}
        done = run_forked(fields, processes)
        assert done.returncode == 0, done.stderr
        rows = validations(done.stdout)
        assert rows[0][:2] == (0, pytest.approx(last, abs=2e-4)) and rows[-1][1] < last
        assert f"starting from the weights in {path}\n" in done.stdout
        assert "a high first loss" not in done.stdout
        assert "already finished" in run_forked({**fields, "resume": "auto"}, processes).stdout
    folders = [
        weights.parents[1] / f"{stem}{processes}" for stem in ("model", "state_step0000000006")
    ]
    one, two = (bits(folder / "state_step0000000006.pt") for folder in folders)
    assert one == two


def test_a_stopped_run_that_started_from_weights_goes_on_without_them(tiny, weights):
    fields = {**tiny, "init": str(weights), "run_id": "second"}
    assert main(Hyperparameters(**fields), StopAfter(3)) is None
    weights.unlink()
    for changes in {}, {"init": ""}:
        args = Hyperparameters(**{**fields, **changes, "resume": "auto"})
        assert main(args, StopAfter(1 if not changes else 9)) is None or changes


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"n_embd": 32, "n_layer": 1}, "holds another model: pass --n_layer=2 --n_embd=16"),
        (
            {"vocab_size": 96},
            "was trained with vocab_size=64, not 96: pack the data with",
        ),
        ({"n_head": 1, "key_shift": 1}, "another model: pass --n_head=2 --key_shift=0"),
        ({"init": "nowhere.pt"}, "--init=nowhere.pt is not a complete file of weights, such as"),
        ({"init": __file__}, "is not a complete file of weights, such as model.pt"),
    ],
)
def test_weights_that_do_not_fit_are_one_sentence(changes, sentence, tiny, weights):
    before = content(weights.parent)
    fields = {**tiny, "init": str(weights), "run_id": "second", **changes}
    with pytest.raises(UserError, match=re.escape(sentence)) as caught:
        main(Hyperparameters(**fields))
    assert "\n" not in str(caught.value)
    assert content(weights.parent) == before


def test_a_stopped_run_says_its_file_and_the_command_that_continues_it(tiny, tmp_path, monkeypatch):
    script = faulty_script(
        tmp_path, "os.kill(os.getpid(), signal.SIGTERM)", "step == first_step + 2"
    )
    first = run_forked({**tiny, "run_id": "t"}, script=script)
    path = tmp_path / "logs" / "t" / "state_step0000000002.pt"
    [line] = re.findall(r"^saved .*", first.stdout, re.M)
    said, command = line.split("; to continue: ")
    assert said == f"saved {path}" and path.exists()
    assert command.startswith(f"python {script} --vocab_size=64 ")
    assert command.endswith(" --run_id=t --resume=auto") and command.count("run_id") == 1
    words = shlex.split(command)[2:]
    second = run_forked({}, script=script, flags=words)
    assert "resume=auto: continuing after step 2\n" in second.stdout
    assert second.stdout.count(command) == 1
    monkeypatch.setenv("RUN_COMMAND", "NPROC=2 bash run.sh --preset=text")
    assert train_gpt2.resume_command("x", 2) == (
        "NPROC=2 bash run.sh --preset=text --run_id=x --resume=auto"
    )
    monkeypatch.delenv("RUN_COMMAND")
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", "--train_files=my data/*"])
    assert train_gpt2.resume_command("x", 4) == (
        "torchrun --standalone --nproc_per_node=4 train_gpt2.py '--train_files=my data/*' "
        "--run_id=x --resume=auto"
    )


# ---------------------------------------------------------------------------
# other processes, other settings, other data


@pytest.fixture
def half(tiny):
    """Settings that go on with a run of six steps, which a signal has ended after three."""
    assert main(Hyperparameters(**{**tiny, "run_id": "half"}), StopAfter(3)) is None
    return {**tiny, "resume": f"{tiny['log_dir']}/half/state_step0000000003.pt"}


@both_dtypes
def test_a_run_goes_on_with_other_processes_and_micro_batches(dtype, tiny, capsys):
    fields = {**tiny, "dtype": dtype}
    main(Hyperparameters(**fields))
    whole = capsys.readouterr().out
    main(Hyperparameters(**{**fields, "run_id": "half"}), StopAfter(3))
    fields["resume"] = f"{tiny['log_dir']}/half/state_step0000000003.pt"
    for processes, size in (1, 12), (2, 3), (3, 2):
        done = run_forked({**fields, "device_batch_size": size}, processes)
        assert done.returncode == 0, done.stderr
        rows, expected = losses(done.stdout), losses(whole)[-5:]
        assert [row[:2] for row in rows] == [row[:2] for row in expected]
        values = [float(loss) for _, _, loss in rows]
        tolerance = {"float32": 0.002, "bfloat16": 0.02}[dtype]
        assert values == pytest.approx([float(row[2]) for row in expected], abs=tolerance)
        hashes = [[row[2] for row in validations(text)[-2:]] for text in (done.stdout, whole)]
        assert hashes[0] == hashes[1]


def test_a_run_may_grow(half, capsys):
    main(Hyperparameters(**{**half, "num_iterations": 9, "val_loss_every": 0, "run_id": "longer"}))
    assert [step for step, _, _ in losses(capsys.readouterr().out)[-7:]] == list("4567899")


def test_fault_11_a_finished_run_is_neither_trained_nor_changed_again(tiny, tmp_path, capsys):
    """Also when its weights were removed, or when only a checkpoint of a stop is there."""
    fields = {**tiny, "run_id": "e"}
    main(Hyperparameters(**fields), StopAfter(3))
    fields["resume"] = "auto"
    loss = main(Hyperparameters(**fields))
    (tmp_path / "logs" / "e" / "model.pt").unlink()
    before = content(tmp_path / "logs")
    capsys.readouterr()
    assert run_forked(fields).returncode == 0
    assert main(Hyperparameters(**fields)) is None
    said = f"e.txt is already finished; nothing to do: result val_loss:{loss:.4f} target:3.28\n"
    assert capsys.readouterr().out.endswith(said)
    assert content(tmp_path / "logs") == before
    longer = r"e\.txt already finished after 6 steps: to go on, pass --resume=CHECKPOINT with anot"
    for changes in {"num_iterations": 9}, {"resume": f"{tmp_path}/logs/e/state_step0000000003.pt"}:
        with pytest.raises(UserError, match=longer):
            main(Hyperparameters(**{**fields, **changes}))
    assert content(tmp_path / "logs") == before


def test_final_weights_are_neither_overwritten_nor_a_checkpoint(tiny, tmp_path):
    main(Hyperparameters(**{**tiny, "run_id": "e"}))
    before = content(tmp_path / "logs" / "e")
    (tmp_path / "logs" / "e.txt").unlink()
    with pytest.raises(UserError, match="logs/e holds the weights of a finished run: pass another"):
        main(Hyperparameters(**{**tiny, "run_id": "e"}))
    weights = f"{tmp_path}/logs/e/model.pt"
    with pytest.raises(
        UserError, match=r"model\.pt holds only weights: start a new run with --init=.*model\.pt"
    ):
        main(Hyperparameters(**{**tiny, "run_id": "f", "resume": weights}))
    assert content(tmp_path / "logs" / "e") == before


def test_fault_10_a_return_to_an_older_checkpoint_is_not_undone_by_auto(tiny, tmp_path, capsys):
    """The newer checkpoints are renamed; auto then goes on with the new branch."""
    fields = {**tiny, "run_id": "b", "save_every": 1, "keep_checkpoints": 3}
    main(Hyperparameters(**fields), StopAfter(5))
    folder = tmp_path / "logs" / "b"
    fields |= {"resume": f"{folder}/state_step0000000003.pt", "save_every": 100}
    main(Hyperparameters(**fields), StopAfter(1))
    assert checkpoints(folder) == ["state_step0000000003.pt", "state_step0000000004.pt"]
    assert len(list(folder.glob("*.abandoned"))) == 2
    capsys.readouterr()
    main(Hyperparameters(**{**fields, "resume": "auto"}))
    assert "\nresume=auto: continuing after step 4\n" in capsys.readouterr().out


@pytest.mark.parametrize("failure", ["a bad checkpoint", "the first step"])
def test_a_failed_start_does_not_use_up_its_run_id(failure, tiny, tmp_path):
    fields = {**tiny, "run_id": "s"}
    if failure == "a bad checkpoint":
        assert run_forked({**fields, "resume": "none.pt"}).returncode == 1
    else:
        script = faulty_script(tmp_path, "raise MemoryError", "step == 0")
        assert run_forked(fields, script=script).returncode == 1
    done = run_forked(fields)
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "logs" / "s.txt").read_text()
    assert log.count("\nhyperparameter run_id=") == 1 and "none.pt" not in log


@pytest.mark.parametrize("first, second", [("a", "a.txt"), ("a.txt", "a")])
def test_fault_9_run_ids_whose_files_collide_are_refused_at_the_start(
    first, second, tiny, tmp_path
):
    main(Hyperparameters(**{**tiny, "run_id": first}))
    before = content(tmp_path / "logs")
    with pytest.raises(UserError, match=r"cannot write .*: choose another --log_dir or --run_id"):
        main(Hyperparameters(**{**tiny, "run_id": second}))
    assert content(tmp_path / "logs") == before


def test_fault_3_the_log_holds_the_source_that_runs(tiny, tmp_path):
    """Although the file is edited before the header of the log is written."""
    edit = "    Path(__file__).write_text('# edited')\n"
    line = "    log.header(args, gpt, optimizers, train_loader, val_loader)\n"
    script = edited_script(tmp_path, (line, edit + line))
    source = script.read_text()
    assert run_forked({**tiny, "run_id": "src"}, script=script).returncode == 0
    assert script.read_text() == "# edited"
    assert (tmp_path / "logs" / "src.txt").read_text().startswith(source)


NOT_FINITE = {
    "parameter": "gpt.h[1].mlp.c_fc.weight.data[0, 0] = {}",
    "momentum": "optimizers[1].state[gpt.h[0].attn.c_k.weight]['momentum_buffer'][0] = {}",
    "moment": "optimizers[0].state[gpt.lm_head.weight]['exp_avg'][3] = {}",
}


@pytest.mark.parametrize("value", ["math.nan", "-math.inf"])
@pytest.mark.parametrize("place", NOT_FINITE)
@pytest.mark.parametrize("processes", [1, 2])
def test_fault_5_a_state_that_is_not_finite_is_never_saved(place, value, processes, tiny, tmp_path):
    """Put there after a step, before the next checkpoint: the one before stays."""
    fault = NOT_FINITE[place].format(value)
    if place == "momentum":  # its owner alone has it
        fault = f"if gpt.h[0].attn.c_k.weight in optimizers[1].state: {fault}"
    line = "        if args.save_every and step % args.save_every == 0 and step > first_step:\n"
    poison = f"        if step == 4:\n            {fault}\n"
    fields = {**tiny, "run_id": "n", "save_every": 2, "keep_checkpoints": 1, "val_loss_every": 0}
    done = run_forked(fields, processes, edited_script(tmp_path, (line, poison + line)))
    assert re.search(
        "non-finite value in the state after step 4: .*, which is not used: lower the lear",
        summaries(done),
    )
    assert checkpoints(tmp_path / "logs" / "n") == ["state_step0000000002.pt"]


@pytest.mark.parametrize("value", ["math.nan", "math.inf"])
def test_fault_5_a_result_that_is_not_finite_is_an_error(value, tiny, tmp_path):
    """Good weights of an earlier run are not overwritten by such ones."""
    line = "    if not math.isfinite(val_loss):\n"
    script = edited_script(tmp_path, (line, f"    val_loss = {value}\n{line}"))
    done = run_forked({**tiny, "run_id": "n"}, 1, script)
    assert re.match(
        "the run diverged: val_loss is (nan|inf). Lower the learning ra", summaries(done)
    )
    assert "result" not in done.stdout and not (tmp_path / "logs" / "n" / "model.pt").exists()


def test_fault_4_a_foreign_checkpoint_deletes_no_file(tiny, tmp_path):
    """Its list of files may name any; only the run's own checkpoints are deleted."""
    fields = {**tiny, "run_id": "f", "save_every": 1, "keep_checkpoints": 1}
    main(Hyperparameters(**fields), StopAfter(3))
    path = tmp_path / "logs" / "f" / "state_step0000000003.pt"
    precious = [tmp_path / "precious.txt", tmp_path / "logs" / "f" / "best.pt"]
    state = torch.load(path, weights_only=True)
    state["files"] = [str(precious[0]), "../../precious.txt", "best.pt", path.name]
    torch.save(state, path)
    with open(path, "ab") as file:
        file.write(train_gpt2.crc32_of_file(path).to_bytes(4, "little"))
    for file in precious:
        file.write_text("precious")
    main(Hyperparameters(**{**fields, "resume": "auto"}))
    assert [file.read_text() for file in precious] == ["precious"] * 2
    assert checkpoints(path.parent) == ["state_step0000000006.pt"]


def places_in(value, path=()):
    """Yield the path of each part of nested dicts and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in items:
        yield (*path, key)
        if isinstance(part, (dict, list)):
            yield from places_in(part, (*path, key))


OTHERS = [None, True, -1, 10**30, 1.5, float("nan"), "../../x", b"x", [], {}, (), torch.zeros(3),
          torch.full((2, 2), float("inf")), torch.zeros(0, dtype=torch.int8)]  # fmt: skip


@settings(max_examples=500, deadline=None, print_blob=False)
@given(data=st.data())
def test_fault_4_any_changed_part_of_a_checkpoint_is_refused_or_harmless(data, two):
    """With a good checksum, as somebody else may write it. A part is removed or replaced."""
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
    torch.save(state, newest)
    with open(newest, "ab") as file:
        file.write(train_gpt2.crc32_of_file(newest).to_bytes(4, "little"))
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


def test_a_terminal_that_is_closed_saves(tiny, tmp_path):
    """Its SIGHUP comes when nothing can be written to it any more."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    fields = {**tiny, "num_iterations": 500, "allow_repeat": True, "run_id": "p"}
    command = [sys.executable, str(ROOT / "train_gpt2.py")]
    command += [f"--{name}={value}" for name, value in fields.items()]
    run = subprocess.Popen(
        ["setsid", "-c", "-w", *command], stdin=slave, stdout=slave, stderr=slave,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
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


def test_auto_without_a_checkpoint_starts_anew_and_says_so(tiny, capsys):
    fields = {**tiny, "resume": "auto", "run_id": "a", "num_iterations": 1}
    assert main(Hyperparameters(**fields)) is not None
    assert "\nresume=auto: continuing after step 0\n" in capsys.readouterr().out


@pytest.mark.parametrize("resume", ["path", "auto"])
@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"learning_rate": 0.02}, "learning_rate=0.01, not 0.02"),
        ({"seed": 1}, "seed=1337, not 1"),
        ({"num_iterations": 5}, "num_iterations=6, not 5"),
        ({"batch_size": 6}, "batch_size=12, not 6"),
        ({"n_embd": 32}, "n_embd=16, not 32"),
        ({"dtype": "float32"}, "dtype=auto, not float32"),
    ],
)
def test_other_settings_are_refused_by_name(changes, sentence, resume, half):
    before = content(half["log_dir"])
    fields = {**half, **changes, "save_every": 1, "keep_checkpoints": 1}
    if resume == "auto":
        fields |= {"resume": "auto", "run_id": "half"}
    with pytest.raises(UserError, match="step0000000003.pt was saved with " + re.escape(sentence)):
        main(Hyperparameters(**fields))
    assert before.items() <= content(half["log_dir"]).items()


def only_sgd(gpt, args, rank, world_size):
    return [torch.optim.SGD(gpt.parameters(), lr=args.learning_rate)]


class Wider(train_gpt2.GPT):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.extra = torch.nn.Parameter(torch.zeros(3, 3))


class Renamed(train_gpt2.GPT):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.blocks = self.h[:1]  # the same parameters under two names


def no_memory(*arguments, **options):
    raise MemoryError


def no_memory_for_a_tensor(*arguments, **options):
    raise RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 4096 bytes. Error code 12 (Cannot allocate memory)"
    )


def not_permitted(*arguments, **options):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


NOT_ITS_FAULT = {
    "another optimizer": (train_gpt2, "build_optimizers", only_sgd, r"Muon'\], not \['SGD'\]"),
    "a wider model": (train_gpt2, "GPT", Wider, "extra"),
    "another model": (train_gpt2, "GPT", Renamed, "blocks"),
    "no memory": (torch, "load", no_memory, None),
    "no memory for a tensor": (torch, "load", no_memory_for_a_tensor, "allocate memory"),
    "no permission": (torch, "load", not_permitted, "Permission denied"),
}


@pytest.mark.parametrize("case", NOT_ITS_FAULT)
def test_fault_1_a_good_checkpoint_that_cannot_be_loaded_is_an_error(case, tiny, monkeypatch):
    """auto does not pass it over, starts nothing anew and deletes nothing."""
    fields = {**tiny, "run_id": "d", "save_every": 1}
    main(Hyperparameters(**fields), StopAfter(4))
    before = content(tiny["log_dir"])
    place, name, replacement, sentence = NOT_ITS_FAULT[case]
    monkeypatch.setattr(place, name, replacement)
    fields |= {"resume": "auto", "keep_checkpoints": 1}
    with pytest.raises((UserError, RuntimeError, MemoryError, OSError), match=sentence):
        main(Hyperparameters(**fields))
    log = Path(tiny["log_dir"], "d.txt")
    after = content(tiny["log_dir"])
    assert after.pop(log) == before.pop(log) and after == before


@pytest.mark.parametrize("change", ["one token", "the order of shards", "validation"])
def test_fault_2_other_data_are_refused(change, half, tmp_path):
    """One changed token among those that were trained on, another shard first, other losses."""
    sentence = "no longer holds the tokens that were trained on"
    if change == "one token":
        tokens = np.fromfile(tmp_path / "train_0.bin", np.uint16)[512:].copy()
        tokens[5] ^= 1
        write_shard(tmp_path / "train_0.bin", tokens)
    elif change == "the order of shards":
        os.rename(tmp_path / "train_0.bin", tmp_path / "train_9.bin")
    else:
        half["val_tokens"], sentence = 320, "was saved with val_tokens=304, not 320"
    before = content(tmp_path / "logs" / "half")
    with pytest.raises(UserError, match=sentence):
        main(Hyperparameters(**half))
    assert content(tmp_path / "logs" / "half") == before


def test_data_may_be_added_and_moved(half, tmp_path, capsys):
    (tmp_path / "moved").mkdir()
    for path in tmp_path.glob("train_*.bin"):
        os.rename(path, tmp_path / "moved" / path.name)
    write_shard(tmp_path / "moved" / "train_9.bin", np.arange(1000) % 64)
    main(Hyperparameters(**{**half, "train_files": f"{tmp_path}/moved/*.bin"}))
    assert "step:6/6 val_loss" in capsys.readouterr().out


# ---------------------------------------------------------------------------
# files: damaged, foreign, hostile


class Hostile:
    def __reduce__(self):
        return os.mkdir, (os.environ["HOSTILE_FOLDER"],)


def truncate(path):
    os.truncate(path, os.path.getsize(path) // 2)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "truncated": truncate,
    "one bit flipped": flip,
    "empty": lambda path: os.truncate(path, 0),
    "text": lambda path: path.write_text("step: 3\n"),
    "another archive": lambda path: zipfile.ZipFile(path, "w").writestr("a", "b"),
    "no state": lambda path: torch.save([1, 2], path),
    "another state": lambda path: torch.save({"step": 4}, path),
    "a hostile pickle": lambda path: torch.save({"step": Hostile()}, path),
    "a bare hostile pickle": lambda path: path.write_bytes(pickle.dumps(Hostile())),
    "gone": os.unlink,
    "a folder": lambda path: (os.unlink(path), os.mkdir(path)),
    "a pipe": lambda path: (os.unlink(path), os.mkfifo(path)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_no_whole_checkpoint_is_refused(damage, tiny, tmp_path, monkeypatch, capsys):
    """By name with a sentence; by auto passed over for the one before. Nothing in it is run."""
    monkeypatch.setenv("HOSTILE_FOLDER", str(tmp_path / "hostile"))
    fields = {**tiny, "run_id": "d", "save_every": 2}
    main(Hyperparameters(**fields), StopAfter(4))
    newest = tmp_path / "logs" / "d" / "state_step0000000004.pt"
    DAMAGES[damage](newest)
    before = content(newest.parent)
    with pytest.raises(UserError, match=r"no checkpoint is complete|of this run"):
        main(Hyperparameters(**{**fields, "resume": str(newest)}))
    with pytest.raises(UserError, match=r"no checkpoint is complete|of this run"):
        main(Hyperparameters(**{**tiny, "resume": str(newest)}))
    assert content(newest.parent) == before
    passed_over = f"{newest} is not a complete checkpoint"
    assert passed_over in capsys.readouterr().out
    fields |= {"resume": "auto", "save_every": 0}
    assert main(Hyperparameters(**fields)) is not None
    text = capsys.readouterr().out
    assert (passed_over in text) == (damage != "gone")
    assert "\nresume=auto: continuing after step 2\n" in text
    assert not (tmp_path / "hostile").exists()
    (newest.parent / "model.pt").unlink()
    assert content(newest.parent) == before


def test_fault_1_auto_among_damaged_checkpoints_alone_is_refused(tiny, tmp_path):
    """Starting anew would be a loss of what they may still hold."""
    fields = {**tiny, "run_id": "d", "save_every": 1, "keep_checkpoints": 3}
    main(Hyperparameters(**fields), StopAfter(3))
    folder = tmp_path / "logs" / "d"
    for name in checkpoints(folder):
        truncate(folder / name)
    before = content(folder)
    assert len(before) == 3
    with pytest.raises(UserError, match=r"no checkpoint is complete: .*another --run_id"):
        main(Hyperparameters(**{**fields, "resume": "auto"}))
    assert content(folder) == before


def val_hash_of(args):
    _, val_loader = train_gpt2.open_data(args, 0, 1, torch.device("cpu"))
    return hashlib.sha256(val_loader.read(0, args.val_tokens + 1)).hexdigest()[:16]


def find(args):
    log = train_gpt2.Log(args, args.run_id, rank=1)  # of a rank that writes no log
    log.val_hash = val_hash_of(args)
    _, state = train_gpt2.find_checkpoint(args, log)
    return state["step"], bits_of(state), log.val_hash


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Settings that go on with a run, its folder and what is in its two checkpoints."""
    folder = tmp_path_factory.mktemp("two")
    stream = np.cumsum(np.random.default_rng(0).integers(1, 4, size=4000)) % 64
    write_shard(folder / "train_0.bin", stream[:3000])
    write_shard(folder / "val_0.bin", stream[3000:])

    fields = {
        **TINY, "n_layer": 1, "n_embd": 4, "num_iterations": 2, "warmdown_iters": 0,
        "save_every": 1, "val_loss_every": 0, "run_id": "two", "log_dir": str(folder / "logs"),
        "train_files": f"{folder}/train_*.bin", "val_files": f"{folder}/val_*.bin",
    }  # fmt: skip
    main(Hyperparameters(**fields))
    args = Hyperparameters(**{**fields, "resume": "auto"})
    newest = folder / "logs" / "two" / "state_step0000000002.pt"
    second = find(args)
    whole = newest.read_bytes()
    newest.unlink()
    first = find(args)
    return args, newest, whole, first, second


def check_damaged(damaged, two):
    """Check that a damaged file is passed over, or that it holds the same as before."""
    args, newest, _, first, second = two
    newest.write_bytes(damaged)
    assert find(args) in (first, second)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_flipped_byte_is_passed_over_or_harmless(data, two):
    whole = two[2]
    damaged = bytearray(whole)
    damaged[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    check_damaged(damaged, two)


@pytest.mark.parametrize("bit", [0, 4])
def test_a_flipped_bit_of_the_table_of_contents_is_passed_over_or_harmless(bit, two):
    """No checksum of the archive covers it: names, places, sizes, flags, and what is no file."""
    whole = two[2]
    for place in range(1, 700):
        damaged = bytearray(whole)
        damaged[-place] ^= 1 << bit
        check_damaged(damaged, two)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_checkpoint_that_is_cut_anywhere_is_passed_over(data, two):
    args, newest, whole, first, _ = two
    newest.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    assert find(args) == first


def test_fault_5_auto_takes_the_newest_by_its_step(two):
    """Not by the time of the file, nor by the letters of its name."""
    args, newest, whole, first, second = two
    newest.write_bytes(whole)
    os.utime(newest, (1, 1))
    assert find(args) == second
    oldest = newest.with_name("state_step0000000001.pt").read_bytes()
    later = {"state_step0000999999.pt": oldest, "state_step0001000000.pt": whole}
    for name, data in later.items():
        newest.with_name(name).write_bytes(data)
    newest.unlink()
    found = find(args)
    for name in later:
        newest.with_name(name).unlink()
    assert found == second != first
    copy = newest.with_name("state_step0000000001_mine.pt")  # not a name that a run gives
    copy.write_bytes(oldest)
    newest.write_bytes(whole)
    found = find(args)
    copy.unlink()
    newest.unlink()
    assert found == second


def test_a_refused_checkpoint_is_told_once_by_many_ranks(tiny):
    done = run_forked({**tiny, "resume": "none.pt"}, 2)
    assert summaries(done).startswith("no checkpoint is complete")
    assert re.fullmatch(r"none\.pt is not a complete checkpoint.*\n", done.stdout)


def test_old_checkpoints_and_left_overs_go_away(tiny, tmp_path):
    folder = tmp_path / "logs" / "o"
    folder.mkdir(parents=True)
    (folder / "partial").write_text("as a killed process leaves it")
    main(Hyperparameters(**{**tiny, "run_id": "o", "save_every": 1, "keep_checkpoints": 3}))
    names = [f"state_step000000000{i}.pt" for i in (4, 5, 6)]
    assert sorted(os.listdir(folder)) == ["model.pt", *names]


def test_fault_1_what_the_run_did_not_write_is_never_deleted(tiny, tmp_path):
    fields = {**tiny, "run_id": "k", "save_every": 1, "keep_checkpoints": 1}
    main(Hyperparameters(**fields), StopAfter(3))
    folder = tmp_path / "logs" / "k"
    whole = (folder / "state_step0000000003.pt").read_bytes()
    strangers = {"state_step0000000001.pt": whole, "state_step0000000009.pt": b"", "best.pt": whole}
    for name, data in strangers.items():
        (folder / name).write_bytes(data)
    main(Hyperparameters(**{**fields, "resume": "auto"}))
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(files) == {"model.pt", "state_step0000000006.pt", *strangers}
    assert strangers.items() <= files.items()


def test_fault_1_runs_keep_apart(half, tmp_path, capsys):
    """auto sees only the checkpoints of its run_id, and no run writes among those of another."""
    fields = {**half, "resume": "auto"}
    main(Hyperparameters(**{**fields, "run_id": "second"}))
    assert "resume=auto: continuing after step 0\n" in capsys.readouterr().out
    main(Hyperparameters(**{**fields, "run_id": "third", "resume": "", "save_every": 3}))
    before = content(tmp_path / "logs" / "third")
    (tmp_path / "logs" / "third.txt").unlink()
    for resume in "", half["resume"]:
        with pytest.raises(
            UserError, match=r"third holds checkpoints: pass --resume, or another --run_id"
        ):
            main(Hyperparameters(**{**half, "run_id": "third", "resume": resume, "save_every": 1}))
    assert content(tmp_path / "logs" / "third") == before


def test_two_runs_never_write_one_log(half):
    args = Hyperparameters(**{**half, "resume": "auto", "run_id": "half"})
    before = content(half["log_dir"])
    with open(f"{half['log_dir']}/half.txt") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"another process is writing .*half\.txt: stop it"):
            main(args)
    assert content(half["log_dir"]) == before


def test_tied_weights_are_stored_once(half):
    size = os.path.getsize(half["resume"])
    state = torch.load(half["resume"], weights_only=True)
    weights = 4 * sum(t.numel() for n, t in state["model"].items() if n != "wte.weight")
    assert state["model"]["wte.weight"].data_ptr() == state["model"]["lm_head.weight"].data_ptr()
    moments = 4 * (2 * 64 * 16 + 2 * 12 * 16 * 16)
    assert weights + moments < size < weights + moments + 40000  # of names and padding
    assert not any("_orig_mod" in name for name in state["model"])


# ---------------------------------------------------------------------------
# more than one node


def test_two_nodes_of_two_are_one_of_four(tiny, tmp_path):
    """Two torchrun agents on loopback, as the README starts them, against four processes of one."""
    fields = {**tiny, "device_batch_size": 3, "save_every": 6}
    one = run_forked({**fields, "run_id": "one"}, 4)
    assert one.returncode == 0, one.stderr
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    flags = [
        "--nnodes=2", "--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}", "--rdzv_id=test",
        "--local_addr=127.0.0.1",
    ]  # fmt: skip
    (tmp_path / "logs").mkdir(exist_ok=True)
    agents = [start({**fields, "run_id": "two"}, 2, flags=flags) for _ in range(2)]
    ended = [finish(agent) for agent in agents]
    assert [done.returncode for done in ended] == [0, 0], ended
    assert losses("".join(done.stdout for done in ended)) == losses(one.stdout)
    last = "state_step0000000006.pt"
    assert bits(tmp_path / "logs" / "one" / last) == bits(tmp_path / "logs" / "two" / last)


# ---------------------------------------------------------------------------
# the small faults of number 14


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("fault", ["touched", "a token outside the vocabulary"])
def test_fault_14_a_shard_that_fails_in_mid_run_costs_no_step(fault, processes, tiny, tmp_path):
    """The steps before are saved, by all ranks, although only one of them may read that shard."""
    fields = {**tiny, "run_id": "s", "val_loss_every": 0, "num_iterations": 15}
    if fault == "touched":
        script = faulty_script(tmp_path, f"os.utime('{tmp_path}/train_0.bin', (1, 1))", "step == 2")
    else:
        script = ROOT / "train_gpt2.py"
        tokens = np.fromfile(tmp_path / "train_2.bin", np.uint16)[512:]
        tokens[-1200 + 700] = 99
        tokens[:100] = 1  # what the check of its beginning reads
        write_shard(tmp_path / "train_2.bin", tokens)
        fields |= {"vocab_size": 64}
        script = edited_script(tmp_path, ("min(size, 100_000)", "min(size, 100)"))
    done = run_forked(fields, processes, script)
    sentence = summaries(done)
    step = int(re.match(r"stopped after step (\d+) \(checkpoint saved\): ", sentence)[1])
    assert ("changed while in use" in sentence) == (fault == "touched")
    assert ("holds token 99" in sentence) == (fault != "touched")
    assert checkpoints(tmp_path / "logs" / "s") == [f"state_step{step:010d}.pt"]
    assert losses(done.stdout)[-1][0] == str(step)


def test_fault_14_a_run_that_lost_a_shard_goes_on_when_it_is_restored(tiny, tmp_path):
    shard = tmp_path / "train_0.bin"
    fields = {**tiny, "run_id": "s", "val_loss_every": 0}
    script = faulty_script(tmp_path, f"os.rename('{shard}', '{shard}.gone')", "step == 2")
    assert "stopped after step 2 (checkpoint saved)" in summaries(run_forked(fields, 1, script))
    os.rename(f"{shard}.gone", shard)
    done = run_forked({**fields, "resume": "auto"})
    assert done.returncode == 0 and "continuing after step 2\n" in done.stdout, done.stderr


def test_fault_14_a_folder_with_a_shells_characters_executes_nothing(tiny, tmp_path):
    folder = tmp_path / "a'; touch X; echo '"
    folder.mkdir()
    script = edited_script(folder)
    done = run_forked({**tiny, "num_iterations": 1}, script=script)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("X")) and not (ROOT / "X").exists()


def test_fault_14_a_terminal_of_ascii_ends_no_run(tiny, tmp_path):
    fields = {**tiny, "num_iterations": 1, "log_dir": tmp_path / "Jörg"}
    command = [sys.executable, ROOT / "train_gpt2.py"]
    command += [f"--{name}={value}" for name, value in fields.items()]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0 and "J\\xf6rg" in done.stdout, done.stderr


def test_fault_14_a_local_rank_without_torchrun_is_no_silence(tiny, monkeypatch):
    command = [sys.executable, ROOT / "train_gpt2.py", "--n_layer=0"]
    environment = {**os.environ, "LOCAL_RANK": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 1
    assert done.stderr == "train_gpt2.py: n_layer=0 must be a number between 1 and 1000\n"


def test_fault_14_another_dtype_on_resume_is_said(tiny, tmp_path, monkeypatch, capsys):
    """auto may choose another one, on another machine."""
    main(Hyperparameters(**{**tiny, "run_id": "d"}), StopAfter(2))
    before = train_gpt2.product_dtype(Hyperparameters(), torch.device("cpu"))
    other = torch.float32 if before == torch.bfloat16 else torch.bfloat16
    monkeypatch.setattr(train_gpt2, "product_dtype", lambda args, device: other)
    main(Hyperparameters(**{**tiny, "run_id": "d", "resume": "auto"}))
    assert f"was saved by a run in {before}; continuing in {other}\n" in capsys.readouterr().out
