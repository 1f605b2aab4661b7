"""run.sh and data/prepare.py: which commands they start, and what they refuse; signals to tools."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import prepare
import pytest
import torch
from conftest import ROOT, write_shard

# A stand-in for Python, which prints its arguments.
STUB = """#!/bin/sh
case "$*" in
*device_count*) echo $GPUS ;;
*-c*) ;;
*prepare.py*) echo "$*"; exit ${PREPARE_STATUS:-0} ;;
*) echo "GOMP_SPINCOUNT=$GOMP_SPINCOUNT NPROC=$NPROC $*" ;;
esac
"""


@pytest.fixture
def clone(tmp_path):
    """A folder with run.sh, the tools and the stand-in for Python. Its path contains a space."""
    folder = tmp_path / "a clone"
    shutil.copytree(ROOT / "records/tools", folder / "records/tools")
    shutil.copy(ROOT / "run.sh", folder)
    for path in ROOT / "requirements.txt", *ROOT.glob("*/requirements.txt"):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        copy.touch()
    (folder / "python").write_text(STUB)
    (folder / "python").chmod(0o755)
    return folder


def run_sh(clone, *arguments, gpus=0, cwd=None, **changes):
    """Start the run.sh of a clone, in cwd, by default the clone.

    Returns (exit status, lines of stdout without the path of the clone, stderr). changes:
    environment variables.
    """
    done = subprocess.run(
        ["bash", clone / "run.sh", *arguments],
        env={**os.environ, "PYTHON": f"{clone}/python", "GPUS": str(gpus), **changes},
        stdin=subprocess.DEVNULL,
        cwd=cwd or clone,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout.replace(f"{clone}/", "").splitlines(), done.stderr


def commands(lines):
    """Return the printed commands, without the environment."""
    return [line.partition("NPROC=")[2].partition(" ")[2] or line for line in lines]


@pytest.mark.parametrize(
    "given, command",
    [
        ("sample Hello --tokens=3", "records/tools/sample.py Hello --tokens=3"),
        ("pack a --out b", "data/pack.py a --out b"),
        ("profile --seed=1", "records/tools/step_profile.py --preset=cpu --seed=1"),
        ("profile modern --seed=1", "records/tools/step_profile.py modern --seed=1"),
        ("--help", "train_gpt2.py --preset=cpu --help"),
        ("modern --help", "records/modern/train_modern.py --help"),
        ("", "records/tools/first_run.py"),
    ],
)
def test_run_sh_starts_the_tools_from_any_folder(given, command, clone, tmp_path):
    status, lines, _ = run_sh(clone, *given.split(), cwd=tmp_path)
    assert (status, commands(lines)[-1]) == (0, command)


def test_python_may_be_a_relative_path(clone, tmp_path):
    """`run.sh test` changes the folder before it uses it."""
    status, lines, _ = run_sh(clone, "test", cwd=tmp_path, PYTHON="a clone/python")
    assert (status, commands(lines)) == (0, ["-m pytest -n 2 --dist worksteal"])


@pytest.mark.parametrize(
    "gpus, nproc, given, processes, command",
    [
        (0, "", "--seed=1", 1, "train_gpt2.py --preset=cpu --seed=1"),
        (0, "2", "", 2, "train_gpt2.py --preset=cpu"),
        (0, "", "modern --preset=text", 1, "records/modern/train_modern.py --preset=text"),
        (8, "", "--yes --seed=1", 8, "train_gpt2.py --seed=1"),
        (8, "1", "--seed=1 --yes", 1, "train_gpt2.py --seed=1"),
        (8, "", "", 8, "train_gpt2.py"),
        (8, "", "modern --yes", 8, "records/modern/train_modern.py"),
        (8, "", "modern --device=cpu", 1, "records/modern/train_modern.py --device=cpu"),
        (8, "", "--preset=cpu --seed=1", 1, "train_gpt2.py --preset=cpu --preset=cpu --seed=1"),
    ],
)
def test_run_sh_starts_a_process_for_each_gpu(gpus, nproc, given, processes, command, clone):
    """On the CPU, there is one process. The data are prepared for the same settings."""
    status, lines, _ = run_sh(clone, *given.split(), gpus=gpus, NPROC=nproc)
    launcher = f"-m torch.distributed.run --standalone --nproc_per_node={processes} "
    prepare, start = commands(lines)
    assert (status, start) == (0, (launcher * (processes > 1) + command).strip())
    settings = command.split()[1:]
    word = ["modern"] * given.startswith("modern")
    assert prepare.split() == ["data/prepare.py", *word, *settings, *["--yes"] * ("yes" in given)]


@pytest.mark.parametrize(
    "gpus, nproc, given, command",
    [
        (0, "", "", "1 records/tools/repeat.py 5 --preset=cpu"),
        (0, "2", "--seed=1", "2 records/tools/repeat.py 5 --preset=cpu --seed=1"),
        (0, "", "modern --preset=small", "1 records/tools/repeat.py 5 modern --preset=small"),
        (8, "", "--seed=1 --yes", "8 records/tools/repeat.py 5 --seed=1"),
    ],
)
def test_run_sh_repeats_a_run_with_its_data(gpus, nproc, given, command, clone):
    status, lines, _ = run_sh(clone, "repeat", "5", *given.split(), gpus=gpus, NPROC=nproc)
    assert status == 0 and lines[-1].endswith(f"NPROC={command}")
    assert lines[0].startswith("data/prepare.py")


def test_run_sh_does_not_train_without_its_data(clone):
    status, lines, _ = run_sh(clone, "modern", gpus=8, PREPARE_STATUS="3")
    assert (status, lines) == (3, ["data/prepare.py modern"])


def test_the_spinning_of_openmp_is_limited_unless_the_user_sets_a_policy(clone):
    for given, expected in (
        ({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, ""),
    ):  # fmt: skip
        # The suite's own run.sh has set a count already.
        lines = run_sh(clone, "--seed=1", **{"GOMP_SPINCOUNT": "", **given})[1]
        assert lines[-1].startswith(f"GOMP_SPINCOUNT={expected} ")


@pytest.mark.parametrize(
    "files, given, expected",
    [
        ({"cpu.max": "150000 100000"}, {"NPROC": "2"}, ""),
        ({"cpu.max": "150000 100000"}, {"GPUS": "2"}, ""),
        ({"cpu.max": "150000 100000"}, {}, "1"),
        ({"cpu.max": "50000 100000"}, {}, "1"),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, {}, "1"),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, {}, ""),
        ({"cpu.max": "max 100000"}, {}, ""),
        ({"cpu.max": "99900000 100000"}, {}, ""),
        ({"cpu.max": "100000 100000"}, {"OMP_NUM_THREADS": "7"}, "7"),
        ({}, {}, ""),
    ],
)
def test_a_cpu_quota_limits_the_threads(files, given, expected, clone, tmp_path):
    for name, content in files.items():
        path = tmp_path / "group" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    script = (clone / "run.sh").read_text().replace("/sys/fs/cgroup", f"{tmp_path}/group")
    (clone / "run.sh").write_text(script)
    (clone / "python").write_text(STUB.replace("GOMP_SPINCOUNT=$GOMP", "$OMP_NUM_THREADS; $GOMP"))
    (clone / "getconf").write_text("#!/bin/sh\necho 2\n")
    (clone / "getconf").chmod(0o755)
    changes = {"OMP_NUM_THREADS": "", "PATH": f"{clone}:{os.environ['PATH']}", **given}
    for command in (), ("repeat", "5"):
        lines = run_sh(clone, *command, "--seed=1", **changes)[1]
        assert lines[-1].startswith(f"{expected}; ")


def test_an_old_python_is_refused_and_its_environment_is_kept(clone):
    old, venv = clone / "old", clone / ".venv/bin/python"
    venv.parent.mkdir(parents=True)
    for path in old, venv:
        path.write_text("#!/bin/sh\nexit 1\n")  # what it says when asked for its version
        path.chmod(0o755)
    status, lines, stderr = run_sh(clone, PYTHON=str(old))
    assert (status, lines) == (1, [])
    assert f"{old} is not Python 3.10 or newer: install a newer Python" in stderr
    lacks_torch = STUB.replace("*-c*) ;;", "*version_info*) ;;\n*importlib*) echo torch ;;")
    (clone / "python").write_text(lacks_torch)
    status, lines, stderr = run_sh(clone)
    assert (status, lines) == (1, [])
    assert ".venv has no working Python 3.10 or newer: delete it, and start again" in stderr
    (clone / ".venv/bin/python").unlink()
    (clone / ".venv/bin").rmdir()
    (clone / ".venv").rmdir()
    _, lines, _ = run_sh(clone)
    assert commands(lines)[0] == "-m venv .venv"


def test_a_missing_package_is_named(clone):
    """By the real Python. Its installation fails, because pip may not use the network."""
    (clone / "requirements.txt").write_text("no-such-package>=1\n")
    (clone / ".venv/bin").mkdir(parents=True)
    (clone / ".venv/bin/python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (clone / ".venv/bin/python").chmod(0o755)
    status, lines, _ = run_sh(clone, PYTHON=sys.executable, PIP_NO_INDEX="1")
    assert status != 0
    assert f"{sys.executable}: no-such-package is missing; installing" in lines[0]


def test_help_lists_the_commands(clone):
    """And, once, the settings."""
    status, lines, _ = run_sh(clone, "--help", gpus=8)
    assert commands(lines)[-1] == "train_gpt2.py --help"
    assert status == 0 and lines[0].startswith("bash run.sh [--name=value ...]  ")
    assert any(line.startswith("bash run.sh test [...]") for line in lines)


def test_an_environment_without_pip_is_kept_and_named(clone):
    """An interrupted `python -m venv` leaves one behind, and so does a system without ensurepip."""
    without_pip = STUB.replace("*-c*) ;;", "*importlib*) echo torch ;;\n*-c*) ;;\n*pip*) exit 1 ;;")
    (clone / ".venv/bin").mkdir(parents=True)
    for path in clone / "python", clone / ".venv/bin/python":
        path.write_text(without_pip)
        path.chmod(0o755)
    status, lines, stderr = run_sh(clone)
    assert (status, commands(lines)) == (1, [])
    assert ".venv has no pip" in stderr and "delete it, and start again" in stderr
    assert (clone / ".venv/bin/python").read_text() == without_pip


@pytest.mark.parametrize("word", ["weights", "runlog", "trian"])
def test_what_is_no_tool_is_rejected(word, clone):
    """Nor are the modules of the tools."""
    status, lines, stderr = run_sh(clone, word)
    assert (status, lines, stderr.count("\n")) == (1, [], 1)
    assert f"{word} is neither a setting" in stderr


@pytest.mark.parametrize("nproc", ["abc", "0", "1.5", " 2", "99999"])
def test_an_invalid_number_of_processes_is_rejected(nproc, clone):
    status, lines, stderr = run_sh(clone, NPROC=nproc)
    assert (status, lines, stderr.count("\n")) == (1, [], 1)
    assert f"NPROC={nproc} must be a number of processes" in stderr


def test_another_shell_is_one_sentence(clone):
    """sh is dash on Debian and Ubuntu."""
    sh = shutil.which("dash") or pytest.skip("dash is not installed")
    done = subprocess.run([sh, clone / "run.sh"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "run.sh: start it with: bash run.sh\n")


@pytest.mark.parametrize("given", ["", "x", "1", "--seed=1", "*"])
def test_repeat_needs_a_number_before_it_prepares_data(given, clone):
    status, lines, stderr = run_sh(clone, "repeat", *given.split())
    assert (status, lines) == (1, []) and "repeat needs the number of runs" in stderr


@pytest.mark.parametrize(
    "ranks, finished, status, requeued",
    [
        ("exit 0", False, 0, True),
        ("exit 0", True, 0, False),
        ("kill -TERM $$", False, 0, True),
        ("kill -TERM 0", False, 0, True),
        ("kill -KILL $$", False, 137, False),
        ("exit 1", False, 1, False),
    ],
)
@pytest.mark.parametrize("srun_status", ["", "143", "15"])
def test_a_slurm_job_is_requeued_if_a_signal_has_stopped_it(
    ranks, finished, status, requeued, srun_status, tmp_path
):
    """Also while Python imports; `kill -TERM 0` is the signal to all processes of a rank."""
    stubs = dict(
        python=ranks,
        scontrol='echo "$1"',
        srun='while [ "$1" != bash ]; do shift; done; setsid -w "$@" || exit; exit $SRUN',
    )
    for name, script in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    if finished:
        (tmp_path / "logs/mine").mkdir(parents=True)
        (tmp_path / "logs/mine/model.pt").touch()
    names = ["JOB_ID", "CPUS_PER_TASK", "PROCID", "NTASKS", "LOCALID", "NTASKS_PER_NODE"]
    environment = {f"SLURM_{name}": "1" for name in names} | {"SLURM_JOB_NAME": "mine"}
    done = subprocess.run(
        ["bash", ROOT / "records/2026-11-25_Slurm_requeue/train.sbatch"],
        env=environment | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SRUN": srun_status},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stderr
    assert ("requeue" in done.stdout) == requeued


# ---- Data ----------------------------------------------------------------------------------------
@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """Calls that would pack or download, and now do nothing but write a manifest."""
    calls = []

    def pack_data(arguments):
        calls.append(["pack", *arguments])
        folder = Path(arguments[-1])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest.json").write_text("{}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare.pack, "main", pack_data)
    for name in "fetch_shards", "fetch_part":
        monkeypatch.setattr(
            prepare.fineweb, name, lambda folder, *options: calls.append([str(folder), *options])
        )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return calls


def test_each_preset_gets_its_data_once(prepared):
    for settings, count in (["--preset=cpu"], 1), (["modern", "--preset=small"], 2):
        prepare.main([*settings, "--yes"])
        assert len(prepared) == count
        prepare.main(settings)
        assert len(prepared) == count
        prepared.clear()
    prepare.main(["modern"])
    assert prepared == [["data/fineweb10B", 6, False]]


def test_a_users_own_data_are_left_alone(prepared):
    prepare.main(["modern", "--preset=text"])
    prepare.main(["--train_files=mine.bin"])
    assert prepared == []


def test_packing_that_was_interrupted_is_repeated(prepared):
    Path("data/torch_sources/.pack").mkdir(parents=True)
    Path("data/torch_sources/manifest.json").write_text("{}")
    for _ in range(2):
        prepare.main(["--preset=cpu"])
        assert len(prepared) == 1


@pytest.mark.parametrize("settings", [[], ["modern"], ["modern", "--preset=modern_24gb"]])
def test_without_a_gpu_no_124m_model_is_trained_by_accident(settings, prepared, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match="no GPU was found"):
        prepare.main(settings)
    assert prepared == []
    prepare.main([*settings, "--device=cpu"])
    assert len(prepared) == 1


# ---- Signals -------------------------------------------------------------------------------------
@pytest.mark.parametrize("tool, number", [("first_run", signal.SIGINT), ("repeat", signal.SIGHUP)])
def test_a_signal_to_a_tool_ends_its_run_with_a_checkpoint(tool, number, tmp_path):
    """No process goes on alone, and the status is that of the run or, of a series, 1."""
    write_shard(tmp_path / "data/torch_sources/train_0.bin", np.arange(40_000) % 256)
    write_shard(tmp_path / "data/torch_sources/val_0.bin", np.arange(9000) % 250)
    command = [sys.executable, ROOT / f"records/tools/{tool}.py"]
    if tool == "repeat":
        command += ["2", "--preset=cpu", "--allow_repeat=True"]
    else:  # it trains the preset as it is
        write_shard(tmp_path / "data/torch_sources/train_1.bin", np.arange(1_300_000) % 256)
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    for line in process.stdout:
        if line.startswith("step:2/"):
            process.send_signal(number)
            break
    output, errors = process.communicate(timeout=60)
    assert "stopped by a signal after step" in output, errors
    assert process.returncode == (0 if tool == "first_run" else 1)
    assert len(list(tmp_path.glob("logs/*/state_step*.pt"))) == 1
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
