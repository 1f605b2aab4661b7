"""run.sh: which command it starts, what it asks, and what it refuses before it starts anything."""

import os
import pty
import shlex
import shutil
import subprocess

import pytest
from conftest import ROOT

from train_gpt2 import parse_args

# A stand-in for Python, which prints what it is called with.
STUB = """#!/bin/sh
case "$*" in
*device_count*) echo $GPUS ;;
*-c*) ;;
*train_gpt2.py*)
    trap 'echo saved; kill $!; exit 0' TERM
    sleep ${SECONDS_OF_TRAINING:-0} >/dev/null 2>&1 & # if it is left behind, it holds no pipe open
    echo "$*"; echo "$RUN_COMMAND"
    wait
    exit ${STATUS:-0} ;;
*) echo "$*" ;;
esac
"""


def start_run_sh(folder, *arguments, gpus=0, **changes):
    """Start a copy of run.sh, with a stand-in for Python and the tools."""
    shutil.copy(ROOT / "run.sh", folder)
    for path in *ROOT.glob("records/tools/*.py"), *ROOT.glob("*requirements.txt"):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.touch()
    (folder / "records" / "requirements.txt").touch()
    (folder / "python").write_text(STUB)
    (folder / "python").chmod(0o755)
    stdin = changes.pop("stdin", subprocess.DEVNULL)
    environment = {**os.environ, "PYTHON": f"{folder}/python", "GPUS": str(gpus), **changes}
    return subprocess.Popen(
        ["bash", folder / "run.sh", *arguments],
        env=environment,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run_sh(folder, *arguments, **options):
    """Do what start_run_sh does; return (exit status, lines of stdout, stderr)."""
    run = start_run_sh(folder, *arguments, **options)
    stdout, stderr = run.communicate(timeout=60)
    return run.returncode, stdout.splitlines(), stderr


@pytest.mark.parametrize(
    "given, command",
    [
        ("sample Hello --tokens=3", "records/tools/sample.py Hello --tokens=3"),
        ("export --out=x", "records/tools/export.py --out=x"),
        ("report logs/a.txt", "records/tools/report.py logs/a.txt"),
        ("records/2026-11-22_CPU_Step", "records/tools/rerun.py records/2026-11-22_CPU_Step"),
        ("pack a --out b", "data/pack.py a --out b"),
        ("check --preset text", "records/tools/check.py --preset=cpu --preset text"),
        ("profile --seed=1", "records/tools/step_profile.py --preset=cpu --seed=1"),
    ],
)
def test_run_sh_leads_to_the_tools(given, command, tmp_path):
    status, lines, _ = run_sh(tmp_path, *given.split())
    assert (status, lines[-1]) == (0, command)


@pytest.mark.parametrize(
    "gpus, nproc, given, processes, command",
    [
        (0, "", "--seed=1", 1, "--preset=cpu --seed=1"),
        (0, "2", "--seed=1", 2, "--preset=cpu --seed=1"),
        (0, "", "--preset=text", 1, "--preset=cpu --preset=text"),
        (8, "", "--yes --seed=1", 8, "--seed=1"),
        (8, "1", "--seed=1 --yes", 1, "--seed=1"),
        (8, "", "--preset cpu", 1, "--preset=cpu --preset cpu"),
        (8, "", "--preset=cpu --seed=1", 1, "--preset=cpu --preset=cpu --seed=1"),
    ],
)
def test_run_sh_starts_a_process_for_each_gpu(gpus, nproc, given, processes, command, tmp_path):
    """The CPU record stays on the CPU; the script learns the command that continues it."""
    status, lines, _ = run_sh(tmp_path, *given.split(), gpus=gpus, NPROC=nproc)
    launcher = f"-m torch.distributed.run --standalone --nproc_per_node={processes} "
    assert (status, lines[-2]) == (0, launcher * (processes > 1) + "train_gpt2.py " + command)
    environment = [f"PYTHON={tmp_path}/python", f"NPROC={nproc}"][: 2 if nproc else 1]
    assert shlex.split(lines[-1]) == [*environment, "bash", "run.sh", *given.split()]
    parse_args(command.split())


@pytest.mark.parametrize("answer", [None, "n\n", "y\n"])
def test_a_download_is_asked_for_on_a_terminal_and_refused_without(answer, tmp_path):
    options = {}
    if answer is not None:
        terminal, options["stdin"] = pty.openpty()
        os.write(terminal, answer.encode())
    status, lines, stderr = run_sh(tmp_path, "--seed=1", gpus=8, **options)
    assert ("Download 5.6 GB" in stderr) == (answer is not None)
    assert (status == 0) == ("data/fineweb.py" in lines) == (answer == "y\n")
    assert ("pass --yes" in stderr) == (answer != "y\n")


def test_shards_that_are_there_need_no_question(tmp_path):
    (tmp_path / "data" / "fineweb10B").mkdir(parents=True)
    for i in range(1, 28):
        (tmp_path / "data" / "fineweb10B" / f"fineweb_train_{i:06d}.bin").touch()
    assert run_sh(tmp_path, gpus=1)[0] == 0


@pytest.mark.parametrize("status, stopped", [(0, False), (3, False), (0, True)])
def test_run_sh_ends_the_cpu_record_with_a_sample(status, stopped, tmp_path):
    """Unless the training fails, whose status it has; a SIGTERM reaches the training."""
    seconds = "60" if stopped else "0"
    run = start_run_sh(tmp_path, STATUS=str(status), SECONDS_OF_TRAINING=seconds)
    lines = []
    for line in run.stdout:
        lines.append(line)
        if line.endswith("bash run.sh\n") and stopped:
            run.terminate()
    assert run.wait(timeout=60) == status, run.stderr.read()
    assert ("saved\n" in lines) == stopped
    assert (lines[-1] == "records/tools/sample.py def \n") == (status == 0 and not stopped)


@pytest.mark.parametrize("nproc", ["abc", "0", "1.5", " 2", "99999"])
def test_a_number_of_processes_that_is_none_is_refused(nproc, tmp_path):
    for arguments in [], ["check"]:
        status, lines, stderr = run_sh(tmp_path, *arguments, NPROC=nproc)
        assert (status, lines, stderr.count("\n")) == (1, [], 1)
        assert f"NPROC={nproc} must be a number of processes" in stderr
