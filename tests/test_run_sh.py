"""run.sh: which command it starts, what it asks, and what it refuses before it starts anything."""

import os
import pty
import shutil
import signal
import subprocess

import pytest
from conftest import ROOT

from train_gpt2 import parse_args

# A stand-in for Python, which prints its arguments. As the training, it also runs $STOP, which
# sends a signal, and then waits for the signal to arrive.
STUB = """#!/bin/sh
case "$*" in
*device_count*) echo $GPUS ;;
*-c*) ;;
*train_gpt2.py*)
    trap 'echo saved; sleep 0.3; kill $!; exit ${STATUS:-0}' TERM INT
    echo "$*"
    [ -z "$STOP" ] || { sleep 30 >/dev/null 2>&1 & eval "$STOP"; wait; }
    exit ${STATUS:-0} ;;
*) echo "$*" ;;
esac
"""


def default_signals():
    """Undo what pytest or an earlier test ignores, because a shell cannot trap what it inherits."""
    for number in signal.SIGINT, signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)


def run_sh(folder, *arguments, gpus=0, stdin=subprocess.DEVNULL, cwd=None, **changes):
    """Run a copy of run.sh with stand-ins for Python and the tools.

    Returns (exit status, lines of stdout without the path of the folder, stderr). cwd: the current
    folder, by default the one of run.sh. changes: environment variables.
    """
    shutil.copy(ROOT / "run.sh", folder)
    requirements = ROOT / "requirements.txt", *ROOT.glob("*/requirements.txt")
    shutil.copytree(ROOT / "records/tools", folder / "records/tools", dirs_exist_ok=True)
    for path in requirements:
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.touch()
    (folder / "python").write_text(STUB)
    (folder / "python").chmod(0o755)
    done = subprocess.run(
        ["bash", folder / "run.sh", *arguments],
        env={**os.environ, "PYTHON": f"{folder}/python", "GPUS": str(gpus), **changes},
        stdin=stdin,
        cwd=cwd or folder,
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
        preexec_fn=default_signals,
    )
    return done.returncode, done.stdout.replace(f"{folder}/", "").splitlines(), done.stderr


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
def test_run_sh_starts_the_tools(given, command, tmp_path):
    status, lines, _ = run_sh(tmp_path, *given.split())
    assert (status, lines[-1]) == (0, command)


def test_paths_are_relative_to_where_the_user_stands(tmp_path):
    """run.sh finds its own files from any folder, even if the path contains a space."""
    folder, elsewhere = tmp_path / "a copy", tmp_path / "elsewhere"
    folder.mkdir()
    (elsewhere / "data" / "fineweb10B").mkdir(parents=True)
    pack = run_sh(folder, "pack", "a.txt", "--out", "b", cwd=elsewhere)
    assert (pack[0], pack[1][-1]) == (0, "data/pack.py a.txt --out b")
    rerun = run_sh(folder, "../a copy/records/x", cwd=elsewhere)
    assert (rerun[0], rerun[1][-1]) == (0, "records/tools/rerun.py ../a copy/records/x")
    for i in range(1, 28):  # these are found, so nothing is downloaded
        (elsewhere / "data" / "fineweb10B" / f"fineweb_train_{i:06d}.bin").touch()
    train = run_sh(folder, "--seed=1", gpus=1, cwd=elsewhere)
    assert (train[0], train[1][-1]) == (0, "train_gpt2.py --seed=1")


def test_run_sh_data_packs_the_sources_of_torch(tmp_path):
    """As rerun.py needs it."""
    status, lines, _ = run_sh(tmp_path, "data")
    assert status == 0 and lines[0].startswith("data/pack.py ")
    assert "differs from the record's data" in lines[-1]


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
    """--preset=cpu stays on the CPU."""
    status, lines, _ = run_sh(tmp_path, *given.split(), gpus=gpus, NPROC=nproc)
    launcher = f"-m torch.distributed.run --standalone --nproc_per_node={processes} "
    assert (status, lines[-1]) == (0, launcher * (processes > 1) + "train_gpt2.py " + command)
    parse_args(command.split())


def test_run_sh_does_not_pack_the_records_data_for_a_users_own(tmp_path):
    for command in "check", "profile", "":
        assert len(run_sh(tmp_path, *command.split(), "--train_files=mine.bin")[1]) <= 2


@pytest.mark.parametrize("answer", [None, "n\n", "y\n"])
def test_a_download_needs_consent_on_a_terminal_or_yes(answer, tmp_path):
    options = {}
    if answer is not None:
        terminal, options["stdin"] = pty.openpty()
        os.write(terminal, answer.encode())
    status, lines, stderr = run_sh(tmp_path, "--seed=1", gpus=8, **options)
    assert ("Download 5.6 GB" in stderr) == (answer is not None)
    fetched = "data/fineweb.py --out data/fineweb10B" in lines
    assert (status == 0) == fetched == (answer == "y\n")
    assert ("pass --yes" in stderr) == (answer != "y\n")


def test_existing_shards_need_no_consent(tmp_path):
    (tmp_path / "data" / "fineweb10B").mkdir(parents=True)
    for i in range(1, 28):
        (tmp_path / "data" / "fineweb10B" / f"fineweb_train_{i:06d}.bin").touch()
    assert run_sh(tmp_path, gpus=1)[0] == 0


@pytest.mark.parametrize(
    "stop", ["", "kill -TERM $PPID", "kill -INT 0"], ids=["", "SIGTERM to run.sh", "Ctrl-C"]
)
@pytest.mark.parametrize("status", [0, 3])
def test_run_sh_ends_the_cpu_record_with_a_sample(status, stop, tmp_path):
    """There is none if the training fails or is stopped; run.sh then passes on its status."""
    done, lines, stderr = run_sh(tmp_path, STATUS=str(status), STOP=stop)
    assert done == status, stderr
    assert ("saved" in lines) == (stop != "")
    assert (lines[-1] == "records/tools/sample.py def ") == (status == 0 and not stop)


@pytest.mark.parametrize("word", ["weights", "runlog", "trian"])
def test_what_is_no_tool_is_rejected(word, tmp_path):
    """Nor are the modules of the tools."""
    status, lines, stderr = run_sh(tmp_path, word)
    assert (status, lines, stderr.count("\n")) == (1, [], 1)
    assert f"{word} is neither a setting" in stderr


@pytest.mark.parametrize("nproc", ["abc", "0", "1.5", " 2", "99999"])
def test_an_invalid_number_of_processes_is_rejected(nproc, tmp_path):
    status, lines, stderr = run_sh(tmp_path, NPROC=nproc)
    assert (status, lines, stderr.count("\n")) == (1, [], 1)
    assert f"NPROC={nproc} must be a number of processes" in stderr
