"""Stopping, killing, damaging and going on: a run loses nothing and says why it ended."""

import dataclasses
import fcntl
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import checkpoints
import describe
import numpy as np
import preflight
import pytest
import torch
from conftest import ROOT, run_forked, run_script, write_shard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import train_gpt2
from train_gpt2 import Hyperparameters, main

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def options(fields):
    return [f"--{name}={value}" for name, value in fields.items()]


def torchrun(processes, *flags):
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc_per_node={processes}", *flags,
    ]  # fmt: skip


def start(fields, processes=1, flags=(), script=ROOT / "train_gpt2.py"):
    """Start a run in its own session; its output is a pipe of text lines."""
    command = torchrun(processes, *flags) if processes > 1 else [sys.executable]
    return subprocess.Popen(
        [*command, str(script), *options(fields)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=ROOT,
        start_new_session=True,
    )  # fmt: skip


def wait_for_step(run, step):
    """Read a run's output until it has done a step."""
    for line in run.stdout:
        if line.startswith(f"step:{step}/") and "train_loss" in line:
            return
    pytest.fail(f"step {step} never came: {run.stderr.read()}")


def workers(pid):
    """Return the processes that torchrun has started, in the order of their ranks."""
    children = open(f"/proc/{pid}/task/{pid}/children").read().split()
    ranks = {}
    for child in children:
        environment = open(f"/proc/{child}/environ").read().split("\0")
        ranks |= {int(v[5:]): int(child) for v in environment if v.startswith("RANK=")}
    return [ranks[rank] for rank in sorted(ranks)]


def finish(run, seconds=90):
    """Wait for a run; return (exit status, stdout, stderr)."""
    try:
        stdout, stderr = run.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        pytest.fail(f"still running after {seconds} s: {run.communicate()}")
    return run.returncode, stdout, stderr


def last_checkpoint(fields, run_id):
    folder = f"{fields['log_dir']}/{run_id}"
    return f"{folder}/{max(os.listdir(folder))}"


def same_state(one, other):
    """Tell whether two checkpoints hold the same bits, but for times and the log's place."""
    one, other = (torch.load(path, weights_only=True) for path in (one, other))
    assert one.keys() == other.keys()
    for state in one, other:
        del state["train_seconds"]
        for name in ("resume", "run_id", "save_every", "log_dir", "train_files", "val_files"):
            del state["hyperparameters"][name]
    return repr_bits(one) == repr_bits(other)


def repr_bits(value):
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return {key: repr_bits(part) for key, part in value.items()}
    return [repr_bits(part) for part in value] if isinstance(value, (list, tuple)) else value


@pytest.fixture
def long(tiny):
    """Settings of a run of some seconds."""
    return {**tiny, "num_iterations": 60, "warmdown_iters": 40, "allow_repeat": True,
            "val_loss_every": 20}  # fmt: skip


WHOLE = {}  # processes: the last checkpoint of a run that nobody interrupted


def whole(long, processes, tmp_path_factory):
    """Return the last checkpoint of an uninterrupted run; the data are the same in every test."""
    if processes not in WHOLE:
        folder = tmp_path_factory.mktemp("whole")
        fields = {**long, "run_id": "whole", "save_every": 60, "log_dir": folder}
        assert run_forked(fields, processes).returncode == 0
        WHOLE[processes] = last_checkpoint(fields, "whole")
    return WHOLE[processes]


# ---------------------------------------------------------------------------
# signals and going on


@pytest.mark.parametrize(
    "processes, number",
    [(1, signal.SIGINT), (2, signal.SIGUSR1), (3, signal.SIGTERM)],
)
def test_a_signal_saves_and_the_resumed_run_is_the_same(processes, number, long, tmp_path_factory):
    expected = whole(long, processes, tmp_path_factory)
    run = start({**long, "run_id": "part"}, processes)
    wait_for_step(run, 10)
    pids = workers(run.pid) if processes > 1 else [run.pid]
    os.kill(pids[-1], number)  # the last rank alone
    code, stdout, stderr = finish(run)
    assert code == 0, stderr
    assert re.search(r"ended by a signal, saved in \S+/part/state_step0000\d\d\.pt: --res", stdout)
    assert "result" not in stdout
    done = run_forked({**long, "resume": "auto", "save_every": 60}, processes)
    assert done.returncode == 0, done.stderr
    assert "resumed: " in done.stdout and "/part/state_step" in done.stdout
    log = open(f"{long['log_dir']}/part.txt").read()  # auto goes on in the run's own log
    steps = [int(step) for step in re.findall(r"^step:(\d+)/60 train_loss", log, re.M)]
    assert steps == list(range(1, 61))
    assert same_state(expected, last_checkpoint(long, "part"))


def test_torchrun_passes_a_signal_on(long):
    run = start({**long, "run_id": "t"}, 2)
    wait_for_step(run, 10)
    os.kill(run.pid, signal.SIGTERM)
    _, stdout, stderr = finish(run)
    assert "ended by a signal, saved in" in stdout, stderr
    assert os.listdir(f"{long['log_dir']}/t")


def test_a_killed_rank_ends_the_others_with_one_summary(long):
    run = start({**long, "num_iterations": 5000, "run_id": "k", "save_every": 10}, 3)
    wait_for_step(run, 25)
    os.kill(workers(run.pid)[1], signal.SIGKILL)
    began = time.monotonic()
    code, _, stderr = finish(run)
    assert code != 0 and time.monotonic() - began < 30
    assert stderr.count("train_gpt2.py: rank ") == 1, stderr
    assert re.search(
        r"train_gpt2.py: rank [02]: ranks \[1\] are killed or stuck: rank [02] waited in vain in "
        r"collective \d+, gloo:\w+ of .*, trace in \S+/k/flight_recorder_rank[02]\.json \[.+\] "
        r"\(at step \d+; \S+/k/state_step0000\d0\.pt is whole, --resume=auto goes on\)", stderr
    ), stderr


def test_a_killed_rank_is_restarted_by_torchrun(long, tmp_path_factory):
    expected = whole(long, 2, tmp_path_factory)
    fields = {**long, "run_id": "again", "save_every": 10, "resume": "auto"}
    run = start(fields, 2, ["--max-restarts=1"])
    wait_for_step(run, 25)
    os.kill(workers(run.pid)[0], signal.SIGKILL)
    code, stdout, stderr = finish(run)
    assert code == 0, stderr
    assert "resumed: " in stdout
    assert same_state(expected, last_checkpoint(fields, "again"))


def test_a_stuck_rank_is_named_after_the_timeout(long):
    run = start({**long, "num_iterations": 5000, "run_id": "s", "comm_timeout": 5}, 2)
    wait_for_step(run, 15)
    stuck = workers(run.pid)[1]
    os.kill(stuck, signal.SIGSTOP)
    for line in run.stderr:
        if line.startswith("train_gpt2.py: "):
            break
    os.kill(stuck, signal.SIGKILL)  # torchrun would do so after 30 s
    code, _, stderr = finish(run)
    assert code != 0
    expected = r"rank 0: ranks \[1\] are killed or stuck: rank 0 waited in vain in collective \d+, "
    assert re.search(expected, line), line + stderr
    assert re.search(r"\(at step 1\d; no checkpoint yet\)", line)
    assert os.path.getsize(f"{long['log_dir']}/s/flight_recorder_rank0.json") > 1000


# ---------------------------------------------------------------------------
# faults inside a run, put there by a script that wraps the real one

FAULTS = """
import os, sys
import torch
sys.path.insert(0, ROOT)
import train_gpt2

train_step = train_gpt2.train_step
rank, steps = int(os.environ.get("RANK", 0)), 0

def faulty_step(gpt, *arguments):
    global steps
    steps += 1  # the first is the warm-up
    if steps == 6 and rank == RANK:
        FAULT
    return train_step(gpt, *arguments)

train_gpt2.train_step = faulty_step
train_gpt2.command(sys.argv[1:])
"""


def run_with_fault(fault, fields, folder, processes=1, rank=0):
    script = folder / "faulty.py"
    replaced = FAULTS.replace("ROOT", repr(str(ROOT)))
    replaced = replaced.replace("rank == RANK", f"rank == {rank}").replace("FAULT", fault)
    script.write_text(replaced)
    if processes == 1:
        done = run_forked(fields, script=script)
        return done.returncode, done.stdout, done.stderr
    return finish(start(fields, processes, script=script))


def test_an_exception_is_told_once_with_its_cause_step_and_checkpoint(tiny, tmp_path):
    fields = {**tiny, "run_id": "e", "save_every": 2}
    code, _, stderr = run_with_fault("steps / 0", fields, tmp_path, 3, rank=1)
    ours = re.findall(r"train_gpt2.py: (rank .*?) \(at (step \d); (\S+) is whole", stderr, re.S)
    assert code != 0 and len(ours) == 1, stderr
    assert ours[0][0].startswith("rank 1: Traceback") and "ZeroDivisionError" in ours[0][0]
    assert ours[0][1] == "step 4"
    assert re.fullmatch(r".*/e/state_step00000[24]\.pt", ours[0][2])  # the last may be on its way
    assert "rank 1: Traceback" in open(f"{tiny['log_dir']}/e.txt").read()  # rank 0 logs it


def test_a_gradient_that_is_not_finite_names_step_rank_and_parameter(tiny, tmp_path):
    fault = "gpt.h[1].mlp.c_fc.weight.register_hook(lambda grad: grad * float('nan'))"
    fields = {**tiny, "run_id": "n", "save_every": 2}
    code, _, stderr = run_with_fault(fault, fields, tmp_path, 2, rank=1)
    expected = (
        r"train_gpt2.py: rank [01]: the gradient of parameter h.1.mlp.c_fc.weight, \(64, 16\), is "
        r"not finite, seen on rank 1: lower the learning rates \(at step 5; \S+/n/state_step00000"
        r"[24].pt is whole, --resume=auto goes on\)"
    )
    assert code != 0 and len(re.findall(expected, stderr)) == 1, stderr
    assert sorted(os.listdir(f"{tiny['log_dir']}/n")) == [f"state_step00000{i}.pt" for i in (2, 4)]


@pytest.mark.parametrize(
    "fault",
    ["torch.OutOfMemoryError('CUDA out of memory')", "MemoryError()",
     "RuntimeError('CUDA error: out of memory')"],
)
def test_out_of_memory_names_the_size_to_give(fault, tiny, tmp_path):
    fields = {**tiny, "device_batch_size": 4}
    code, _, stderr = run_with_fault(f"raise {fault}", fields, tmp_path)
    assert code == 1 and stderr == (
        "train_gpt2.py: out of memory: pass --device_batch_size=3, the result stays the same "
        "(at step 4; no checkpoint yet)\n"
    )


def test_memory_that_is_really_out(tiny, tmp_path):
    fields = {**tiny, "batch_size": 512, "device_batch_size": 512, "allow_repeat": True}
    fault = "resource.setrlimit(resource.RLIMIT_AS, (2**20, 2**20))"
    code, _, stderr = run_with_fault("import resource; " + fault, fields, tmp_path)
    assert code == 1, stderr
    assert "out of memory: pass --device_batch_size=256, the result" in stderr, stderr


def test_a_new_graph_is_warned_of(tiny, tmp_path):
    fault = "gpt(torch.zeros(1, 7, dtype=torch.int64), torch.zeros(1, 7, dtype=torch.int64))"
    code, stdout, stderr = run_with_fault(fault, {**tiny, "compile": True}, tmp_path)
    assert code == 0, stderr
    assert re.search(r"step:5/6 train_loss.*\nwarning: compiled anew after the warm-up", stdout)
    assert stdout.count("warning: compiled") == 1 and "recompiles:1" in stdout


def test_a_full_disk_is_told_and_training_goes_on(tiny, tmp_path):
    fields = {**tiny, "run_id": "f", "save_every": 2, "n_embd": 32}
    fault = (  # when the checkpoint of step 4 is on the disk
        "import resource, time; time.sleep(2); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (90000, 90000))"
    )
    code, stdout, stderr = run_with_fault(fault, fields, tmp_path)
    assert code == 0, stderr
    assert stdout.count("warning: a checkpoint was not written ([Errno 27] File too la") == 1
    assert f"the newest whole one: {tiny['log_dir']}/f/state_step000004.pt" in stdout
    assert sorted(os.listdir(f"{tiny['log_dir']}/f")) == [f"state_step00000{i}.pt" for i in (2, 4)]
    assert "step:6/6 val_loss" in stdout and "result" in stdout


# ---------------------------------------------------------------------------
# other processes, other settings, other data


class After(list):
    """Signals that are empty until they have been asked for a number of times, once a step."""

    def __init__(self, steps):
        self.left = steps

    def __len__(self):
        self.left -= 1
        return int(self.left <= 0)


@pytest.fixture
def half(tiny):
    """Settings that go on with a run of six steps, which a signal has ended after three."""
    assert main(Hyperparameters(**{**tiny, "run_id": "half"}), lambda: After(3)) is None
    return {**tiny, "resume": f"{tiny['log_dir']}/half/state_step000003.pt"}


def losses(text):
    """[(step, name, loss, hash or "")] of the lines of steps."""
    pattern = r"^step:(\d+)/\d+ (\w+):([\d.]+) \S+ \S+?(?: data_hash:(\w+))?$"
    return re.findall(pattern, text, re.M)


def test_a_run_goes_on_with_other_processes_and_micro_batches(half, capsys):
    main(Hyperparameters(**{**half, "resume": ""}))
    whole = losses(capsys.readouterr().out)[-5:]  # the validation after step 3, and all later
    for processes, size in (1, 12), (2, 3), (3, 2):
        done = run_forked({**half, "device_batch_size": size}, processes)
        assert done.returncode == 0, done.stderr
        part = losses(done.stdout)
        for (step, name, loss, data_hash), expected in zip(part, whole, strict=True):
            assert (step, name, data_hash) == (*expected[:2], expected[3])
            assert float(loss) == pytest.approx(float(expected[2]), abs=0.01)


def test_a_run_may_grow(half, capsys):
    main(Hyperparameters(**{**half, "num_iterations": 9, "val_loss_every": 0, "run_id": "longer"}))
    assert [row[0] for row in losses(capsys.readouterr().out)[-7:]] == list("4567899")


def test_a_finished_run_only_says_its_result_again(tiny, capsys):
    first = main(Hyperparameters(**{**tiny, "run_id": "r", "save_every": 100}))
    assert main(Hyperparameters(**{**tiny, "resume": "auto", "save_every": 100})) == first
    log = open(f"{tiny['log_dir']}/r.txt").read()
    assert re.findall(r"^step:(\d)/6 train_loss", log, re.M) == list("123456")
    assert len(re.findall(r"^step:6/6 val_loss", log, re.M)) == 2
    assert len(re.findall(r"^step:6/6 train_loss", log, re.M)) == 1


def test_auto_without_a_checkpoint_starts_afresh_and_says_so(tiny, capsys):
    assert main(Hyperparameters(**{**tiny, "resume": "auto", "num_iterations": 1}))
    sentence = f"resume: no checkpoint in {tiny['log_dir']} fits: a fresh start"
    assert sentence in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"learning_rate": 0.02}, "learning_rate=0.02 instead of 0.01"),
        ({"seed": 1, "muon_momentum": 0.9}, "muon_momentum=0.9 instead of 0.95, seed=1 instead of"),
        ({"num_iterations": 5}, "num_iterations=5 instead of 6"),
        ({"batch_size": 6}, "batch_size=6 instead of 12"),
        ({"n_embd": 32}, "n_embd=32 instead of 16"),
    ],
)
def test_other_settings_are_refused_by_name(changes, sentence, half, capsys):
    with pytest.raises(ValueError, match=re.escape(sentence) + ".*start anew without --resume"):
        main(Hyperparameters(**{**half, **changes}))
    if "num_iterations" not in changes:
        main(Hyperparameters(**{**half, **changes, "resume": "auto", "val_loss_every": 0}))
        assert "fits: a fresh start" in capsys.readouterr().out  # auto passes it over


def test_every_setting_that_may_change_is_one():
    fields = {field.name for field in dataclasses.fields(Hyperparameters)}
    assert fields > checkpoints.MAY_CHANGE


@pytest.mark.parametrize("change", ["one token", "the order of shards"])
def test_other_data_are_refused(change, half, tmp_path):
    """One changed token among those that were trained on, or another shard first."""
    tokens = np.fromfile(tmp_path / "train_0.bin", np.uint16)[512:].copy()
    tokens[5] ^= 1
    if change == "one token":
        write_shard(tmp_path / "train_0.bin", tokens)
    else:
        os.rename(tmp_path / "train_0.bin", tmp_path / "train_9.bin")
    with pytest.raises(ValueError, match=r"no longer holds the tokens that .* was trained on"):
        main(Hyperparameters(**half))


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
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def rewrite(change):
    def damage(path):
        state = torch.load(path, weights_only=True)
        change(state)
        torch.save(state, path)

    return damage


DAMAGES = {
    "truncated": truncate,
    "one bit flipped": flip,
    "empty": lambda path: os.truncate(path, 0),
    "text": lambda path: path.write_text("step: 3\n"),
    "another archive": lambda path: zipfile.ZipFile(path, "w").writestr("a", "b"),
    "no state": lambda path: torch.save([1, 2], path),
    "a hostile pickle": lambda path: torch.save({"step": Hostile()}, path),
    "a bare hostile pickle": lambda path: path.write_bytes(pickle.dumps(Hostile())),
    "no weights": rewrite(lambda state: state.pop("model")),
    "other weights": rewrite(lambda state: state["model"].pop("wte.weight")),
    "a momentum is missing": rewrite(lambda state: state["optimizers"][1]["state"].pop(3)),
    "a wrong shape": rewrite(
        lambda state: state["optimizers"][0]["state"][0].update(exp_avg=torch.zeros(2, 2))
    ),
    "a step that is no number": rewrite(lambda state: state.update(step="3")),
    "another step": rewrite(lambda state: state.update(step=3)),
    "another position": rewrite(lambda state: state["train_loader"].update(position=2**60)),
    "no random state": rewrite(lambda state: state.pop("rng")),
    "gone": os.unlink,
    "a folder": lambda path: (os.unlink(path), os.mkdir(path)),
    "a pipe": lambda path: (os.unlink(path), os.mkfifo(path)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_no_whole_checkpoint_is_refused(damage, tiny, tmp_path, monkeypatch, capsys):
    """By name with a sentence; by auto passed over for the one before. Nothing in it is run."""
    monkeypatch.setenv("HOSTILE_FOLDER", str(tmp_path / "hostile"))
    main(Hyperparameters(**{**tiny, "run_id": "d", "save_every": 2}), lambda: After(4))
    newest = tmp_path / "logs" / "d" / "state_step000004.pt"
    DAMAGES[damage](newest)
    with pytest.raises(ValueError, match=r"step000004.pt is no whole checkpoint \(.+\): name an"):
        main(Hyperparameters(**{**tiny, "resume": str(newest)}))
    capsys.readouterr()
    assert main(Hyperparameters(**{**tiny, "resume": "auto"})) is not None
    text = capsys.readouterr().out
    assert f"resumed: {newest.parent}/state_step000002.pt after step 2" in text
    assert damage == "gone" or f"passed over: {newest} is no whole checkpoint" in text
    assert not (tmp_path / "hostile").exists()


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # fmt: skip
@given(data=st.data())
def test_any_flipped_byte_is_refused_or_harmless(data, half, tmp_path):
    whole = torch.load(half["resume"], weights_only=True)
    content = bytearray(open(half["resume"], "rb").read())
    where = data.draw(st.integers(0, len(content) - 1))
    content[where] ^= data.draw(st.integers(1, 255))
    damaged = tmp_path / "damaged.pt"
    damaged.write_bytes(content)
    args = Hyperparameters(**{**half, "resume": str(damaged)})
    gpt = train_gpt2.GPT(args)
    optimizers = train_gpt2.build_optimizers(gpt, args, 0, 1)
    try:
        _, state, _ = checkpoints.find(args, gpt, optimizers)
    except ValueError as error:
        assert "is no whole checkpoint" in str(error) or "belongs to another run" in str(error)
    else:
        assert repr_bits(state) == repr_bits(whole)


def test_a_refused_checkpoint_is_told_once_by_many_ranks(tiny):
    done = run_script({**tiny, "resume": "none.pt"}, 2)
    assert done.returncode != 0 and not os.path.exists(tiny["log_dir"])
    assert done.stderr.count("train_gpt2.py: rank 0: none.pt is no whole checkpoint") == 1
    assert done.stderr.count("train_gpt2.py: rank") == 1


def test_old_checkpoints_are_deleted_and_left_overs_too(tiny):
    folder = f"{tiny['log_dir']}/o"
    os.makedirs(folder)
    open(f"{folder}/state_step000001.partial", "w").close()  # as a killed process leaves it
    main(Hyperparameters(**{**tiny, "run_id": "o", "save_every": 1, "keep_checkpoints": 3}))
    assert sorted(os.listdir(folder)) == [f"state_step00000{i}.pt" for i in (4, 5, 6)]


def test_a_run_id_keeps_runs_apart(half, capsys):
    """auto with a run_id sees only that run; another run's checkpoints are not taken over."""
    fields = {**half, "resume": "auto", "num_iterations": 6}
    main(Hyperparameters(**{**fields, "run_id": "second"}))
    assert f"no checkpoint in {half['log_dir']} fits: a fresh start" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"half/\S+ belongs to another run: seed=7 instead of"):
        main(Hyperparameters(**{**fields, "run_id": "half", "seed": 7}))
    main(Hyperparameters(**{**fields, "run_id": "third", "resume": "", "save_every": 3}))
    with pytest.raises(ValueError, match="third holds the checkpoints of another run: pass"):
        main(Hyperparameters(**{**half, "run_id": "third"}))


def test_weights_that_are_not_finite_are_not_saved(tmp_path, capsys):
    log = describe.Log(Hyperparameters(log_dir=str(tmp_path)), 0, "x")
    saved = checkpoints.Checkpoints(log, 2)
    saved.save(dict(step=1, model=dict(w=torch.tensor([1.0, float("inf")]))))
    assert not saved.wait() and saved.last is None
    assert "was not written (a weight is not finite)" in capsys.readouterr().out


def test_two_runs_never_write_one_log(half):
    args = Hyperparameters(**{**half, "resume": "auto"})
    with open(f"{half['log_dir']}/half.txt") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=r"another process is writing .*half\.txt"):
            main(args)


def test_tied_weights_are_stored_once(half):
    size = os.path.getsize(half["resume"])
    state = torch.load(half["resume"], weights_only=True)
    weights = 4 * sum(t.numel() for n, t in state["model"].items() if n != "wte.weight")
    assert state["model"]["wte.weight"].data_ptr() == state["model"]["lm_head.weight"].data_ptr()
    moments = 4 * (2 * 64 * 16 + 2 * 12 * 16 * 16)
    assert weights + moments < size < weights + moments + 40000  # of names and padding
    assert not any("_orig_mod" in name for name in state["model"])


# ---------------------------------------------------------------------------
# more than one node, and the check before a run


def test_two_nodes_of_two_are_one_of_four(tiny):
    """Two torchrun agents on loopback, as the README starts them, against four processes of one."""
    tiny = {**tiny, "device_batch_size": 3, "save_every": 6}
    one = run_forked({**tiny, "run_id": "one"}, 4)
    assert one.returncode == 0, one.stderr
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2",
        "--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}", "--rdzv_id=test",
        "--local_addr=127.0.0.1", str(ROOT / "train_gpt2.py"),
        *options({**tiny, "run_id": "two"}),
    ]  # fmt: skip
    agents = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
            start_new_session=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    ended = [finish(agent, 120) for agent in agents]
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert losses("".join(stdout for _, stdout, _ in ended)) == losses(one.stdout)
    assert same_state(last_checkpoint(tiny, "one"), last_checkpoint(tiny, "two"))


def check(fields, processes=1):
    command = torchrun(processes) if processes > 1 else [sys.executable]
    return subprocess.run(
        [*command, str(ROOT / "train_gpt2.py"), "--check", *options(fields)],
        capture_output=True, text=True, timeout=120, env=ENVIRONMENT, cwd=ROOT,
    )  # fmt: skip


@pytest.mark.parametrize("processes", [1, 2])
def test_the_check_finds_all_well(processes, tiny):
    done = check({**tiny, "compile": processes == 1}, processes)
    assert done.returncode == 0, done.stdout + done.stderr
    names = re.findall(r"^(\w+): ", done.stdout, re.M)
    for name in (
        "settings", "device", "products", "compiler", "network", "data", "shards", "ranks",
        "optimizers", "memory", "disk", "muon",
    ):  # fmt: skip
        assert name in names
    assert done.stdout.endswith("\nall is well\n") and "FAILED" not in done.stdout
    assert ("all_reduce of 16 MiB in" in done.stdout) == (processes == 2)
    assert not list(Path(tiny["log_dir"]).iterdir())  # nothing was trained


def note_other_hash(folder):
    sums = {"train": {"sha256": {"train_1.bin": "0" * 64}}, "val": {"sha256": {}}}
    (folder / "manifest.json").write_text(json.dumps(sums))


FAULTS_FOUND = {
    "settings": ({"batchsize": 3}, None, "settings: unknown argument '--batchsize=3': did you"),
    "no data": ({"train_files": "none*.bin"}, None, "data: no data at 'none*.bin': fetch"),
    "too little data": ({"num_iterations": 99}, None, "data: 99 steps need 19,009 tokens"),
    "a changed shard": ({}, note_other_hash, "train_1.bin has another sha256 than noted: fetch"),
    "no GPU": ({"device": "cuda"}, None, "device: 1 processes on this machine but 0 GPUs visible"),
    "memory": (
        {"batch_size": 2**20, "device_batch_size": 2**20, "sequence_length": 64, "n_embd": 2048,
         "allow_repeat": True, "val_tokens": 320},
        None, "GiB of",
    ),
    "disk": (
        {"keep_checkpoints": 10**9}, None, "are needed: free some or pass --log_dir"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS_FOUND)
def test_the_check_lists_what_to_fix(fault, tiny, tmp_path):
    if fault == "no GPU" and torch.cuda.is_available():
        pytest.skip("there is one")
    changes, prepare, sentence = FAULTS_FOUND[fault]
    if prepare:
        prepare(tmp_path)
    [found] = preflight.main(options({**tiny, **changes}))
    assert sentence in found


def test_a_failed_check_is_a_list_and_a_failure(tiny):
    done = check({**tiny, "num_iterations": 99, "device_batch_size": 12})
    assert done.returncode == 1 and "data: FAILED, 99 steps need 19,009 tokens" in done.stdout
    assert "\nto fix:\n  data: 99 steps need 19,009 tokens" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
