"""run.sh: which command it starts, and what it refuses before it starts anything."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

from train_gpt2 import parse_args

# A stand-in for Python, which prints its arguments.
STUB = f"""#!/bin/sh
case "$*" in
*device_count*) echo $GPUS ;;
*/train_gpt2.py*--run_id=cpu-*) exec {sys.executable} "$@" ;;
*-c*) ;;
*repeat.py*) echo "NPROC=$NPROC $*" ;;
*fineweb.py*) echo "$*"; exit ${{FINEWEB_STATUS:-0}} ;;
*) echo "$*" ;;
esac
"""

# A stand-in for train_gpt2.py, whose run finishes, is stopped by a signal, or fails.
TRAINING = """
import os, sys
from pathlib import Path

print("train_gpt2.py", sys.argv[1])
if os.environ["OUTCOME"] == "finished":
    weights = Path("logs", sys.argv[2].removeprefix("--run_id="), "model.pt")
    weights.parent.mkdir(parents=True)
    weights.touch()
sys.exit(3 * (os.environ["OUTCOME"] == "failed"))
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


@pytest.mark.parametrize(
    "given, command",
    [
        ("sample Hello --tokens=3", "records/tools/sample.py Hello --tokens=3"),
        ("pack a --out b", "data/pack.py a --out b"),
        ("profile --seed=1", "records/tools/step_profile.py --preset=cpu --seed=1"),
        ("--help", "train_gpt2.py --preset=cpu --help"),
    ],
)
def test_run_sh_starts_the_tools_from_any_folder(given, command, clone, tmp_path):
    status, lines, _ = run_sh(clone, *given.split(), cwd=tmp_path)
    assert (status, lines[-1]) == (0, command)


def test_run_sh_data_packs_the_sources_of_torch(clone):
    status, lines, _ = run_sh(clone, "data")
    assert status == 0 and lines[0].startswith("data/pack.py ")
    assert "differs from the record's" in lines[-1]


@pytest.mark.parametrize(
    "gpus, nproc, given, processes, command",
    [
        (0, "", "--seed=1", 1, "--preset=cpu --seed=1"),
        (0, "2", "", 2, "--preset=cpu"),
        (0, "", "--preset=text", 1, "--preset=cpu --preset=text"),
        (0, "", "--preset=small", 1, "--preset=cpu --preset=small"),
        (8, "", "--yes --seed=1", 8, "--seed=1"),
        (8, "1", "--seed=1 --yes", 1, "--seed=1"),
        (8, "", "--preset cpu", 1, "--preset=cpu --preset cpu"),
        (8, "", "--preset=cpu --seed=1", 1, "--preset=cpu --preset=cpu --seed=1"),
    ],
)
def test_run_sh_starts_a_process_for_each_gpu(gpus, nproc, given, processes, command, clone):
    """--preset=cpu stays on the CPU."""
    status, lines, _ = run_sh(clone, *given.split(), gpus=gpus, NPROC=nproc)
    launcher = f"-m torch.distributed.run --standalone --nproc_per_node={processes} "
    assert (status, lines[-1]) == (0, launcher * (processes > 1) + "train_gpt2.py " + command)
    parse_args(command.split())


@pytest.mark.parametrize(
    "gpus, nproc, given, command",
    [
        (0, "", "", "NPROC=1 records/tools/repeat.py 5 --preset=cpu"),
        (0, "2", "--seed=1", "NPROC=2 records/tools/repeat.py 5 --preset=cpu --seed=1"),
        (8, "", "--seed=1 --yes", "NPROC=8 records/tools/repeat.py 5 --seed=1"),
    ],
)
def test_run_sh_repeats_a_run_with_its_data(gpus, nproc, given, command, clone):
    status, lines, _ = run_sh(clone, "repeat", "5", *given.split(), gpus=gpus, NPROC=nproc)
    assert (status, lines[-1]) == (0, command)
    data = f"data/fineweb.py {given}" if gpus else "data/pack.py  --pattern"
    assert lines[0].startswith(data)


def test_run_sh_prepares_no_data_for_a_users_own(clone):
    for command in "profile", "repeat 5", "":
        lines = run_sh(clone, *command.split(), "--train_files=mine.bin", gpus=1)[1]
        assert not any("fineweb.py" in line or "pack.py" in line for line in lines)


def test_run_sh_does_not_train_without_its_data(clone):
    status, lines, _ = run_sh(clone, "--preset=modern", gpus=8, FINEWEB_STATUS="3")
    assert (status, lines[-1]) == (3, "data/fineweb.py --preset=modern")


@pytest.mark.parametrize("outcome, status", [("finished", 0), ("stopped", 0), ("failed", 3)])
def test_run_sh_ends_the_cpu_record_with_a_sample(outcome, status, clone):
    """There is none if the training fails or is stopped."""
    (clone / "train_gpt2.py").write_text(TRAINING)
    done, lines, stderr = run_sh(clone, OUTCOME=outcome)
    assert done == status, stderr
    assert "train_gpt2.py --preset=cpu" in lines
    assert ("records/tools/sample.py def " in lines[-1]) == (outcome == "finished")


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


@pytest.mark.parametrize("given", ["", "x", "--seed=1", "*"])
def test_repeat_needs_a_number_before_it_prepares_data(given, clone):
    status, lines, stderr = run_sh(clone, "repeat", *given.split())
    assert (status, lines) == (1, []) and "number of runs first" in stderr


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
        ["bash", ROOT / "records/2026-11-25_Slurm/train.sbatch"],
        env=environment | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SRUN": srun_status},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stderr
    assert ("requeue" in done.stdout) == requeued


def test_the_data_of_preset_small_are_prepared_once(clone):
    """They are a part of FineWeb; --yes downloads it without asking."""
    part = "data/fineweb.py --part=20000000 --out data/fineweb_part"
    for yes in "", "--yes":
        _, lines, _ = run_sh(clone, "--preset=small", *yes.split())
        assert f"{part} {yes}".strip() in lines
        assert any(line.startswith("data/pack.py ") and "gpt2-2048" in line for line in lines)
        assert lines[-1] == "train_gpt2.py --preset=cpu --preset=small"
    manifest = clone / "data" / "small" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.touch()
    _, lines, _ = run_sh(clone, "repeat", "5", "--preset=small")
    assert not any("fineweb.py" in line or "pack.py" in line for line in lines)
