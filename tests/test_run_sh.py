"""run.sh: what it says and asks, and what it refuses before it starts anything."""

import os
import pty
import shlex
import shutil
import subprocess

import pytest
from conftest import ROOT

STUB = """#!/bin/sh
case "$*" in
*device_count*) echo $GPUS ;;
*-c*) ;;
*) echo "$*"; echo "$RUN_COMMAND" ;;
esac
"""


def run_sh(folder, *arguments, gpus=0, **changes):
    """Run a copy of run.sh with a stand-in for Python, which prints what it is called with."""
    shutil.copy(ROOT / "run.sh", folder)
    (folder / "python").write_text(STUB)
    (folder / "python").chmod(0o755)
    options = dict(stdin=subprocess.DEVNULL) | changes.pop("options", {})
    environment = {**os.environ, "PYTHON": f"{folder}/python", "GPUS": str(gpus), **changes}
    return subprocess.run(
        ["bash", folder / "run.sh", *arguments], timeout=60, env=environment,
        capture_output=True, text=True, **options,
    )  # fmt: skip


STOP = "; Ctrl-C saves a checkpoint and exits"


@pytest.mark.parametrize(
    "gpus, arguments, sentence",
    [
        (0, ["--preset=text"], "training on your own data" + STOP),
        (
            0,
            ["--seed=1"],
            "training the CPU record, two minutes on two cores, with --seed=1" + STOP,
        ),
        (8, ["--yes"], "training GPT-2 124M on FineWeb, on 8 GPU(s)" + STOP),
        (8, ["--preset=text"], "training on your own data" + STOP),
        (0, ["--help"], None),
        (0, ["sample"], None),
    ],
)
def test_one_sentence_says_what_it_is_about_to_do(gpus, arguments, sentence, tmp_path):
    done = run_sh(tmp_path, *arguments, gpus=gpus)
    assert done.returncode == 0
    said = done.stderr.partition("\n")[0]
    assert said == (f"run.sh: {sentence}" if sentence else "")
    assert "--yes" not in done.stdout.replace("bash run.sh --yes", "")


@pytest.mark.parametrize("answer", [None, "n\n", "\n", "y\n"])
def test_a_download_is_asked_for_on_a_terminal_and_refused_without(answer, tmp_path):
    options = {}
    if answer is not None:
        terminal, options["stdin"] = pty.openpty()
        os.write(terminal, answer.encode())
    done = run_sh(tmp_path, "--seed=1", gpus=8, options=options)
    asked = "Download 5.6 GB of FineWeb into data/fineweb10B? [y/N] " in done.stderr
    assert asked == (answer is not None)
    if answer == "y\n":
        assert done.returncode == 0 and "data/fineweb.py\n" in done.stdout
    else:
        assert done.returncode == 1 and done.stdout == ""
        assert "were not downloaded: pass --yes to download them, or --preset=text" in done.stderr


def test_shards_that_are_there_need_no_question(tmp_path):
    (tmp_path / "data" / "fineweb10B").mkdir(parents=True)
    for i in range(1, 28):
        (tmp_path / "data" / "fineweb10B" / f"fineweb_train_{i:06d}.bin").touch()
    assert run_sh(tmp_path, gpus=1).returncode == 0


def test_the_script_learns_the_command_that_continues_it(tmp_path):
    words = "--preset=text", "--train_files=my data/*.bin"
    done = run_sh(tmp_path, *words, NPROC="2")
    command = done.stdout.splitlines()[-1]
    assert shlex.split(command) == [
        f"PYTHON={tmp_path}/python", "NPROC=2", "bash", "run.sh", *words
    ]  # fmt: skip
    assert run_sh(tmp_path).stdout.splitlines()[1].endswith("/python bash run.sh")


def test_macos_has_shasum_instead_of_sha256sum(tmp_path):
    """The right shards are recognized by either; on macOS there is no sha256sum."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in "bash", "sh", "dirname":
        (tools / name).symlink_to(shutil.which(name))
    (tools / "shasum").write_text('#!/bin/sh\necho "$*" >&2\n')
    (tools / "shasum").chmod(0o755)
    done = run_sh(tmp_path, "data", PATH=str(tools))
    assert (done.returncode, done.stderr) == (0, "")  # the output of the check is hidden
    assert done.stdout == "data: the record's own (torch 2.13.0)\n"
    (tools / "shasum").write_text('#!/bin/sh\n[ "$*" != "-a 256 --check --status" ]\n')
    assert run_sh(tmp_path, "data", PATH=str(tools)).stdout != done.stdout


@pytest.mark.parametrize("nproc", ["abc", "0", "-1", "2x", "1.5", " 2", "1e3", "99999"])
def test_fault_14_a_number_of_processes_that_is_none_is_refused(nproc, tmp_path):
    (tmp_path / "python").write_text(
        '#!/bin/sh\ncase "$*" in *-c*) echo 0 ;; *) echo ran ;; esac\n'
    )
    (tmp_path / "python").chmod(0o755)
    for arguments in [], ["--seed=1"], ["check"]:
        done = subprocess.run(
            ["bash", ROOT / "run.sh", *arguments], timeout=60, capture_output=True, text=True,
            env={**os.environ, "PYTHON": f"{tmp_path}/python", "NPROC": nproc},
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert done.stderr.startswith(
            f"run.sh: NPROC={nproc} must be a whole number from 1 to 9999: "
        )
