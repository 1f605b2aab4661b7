"""run.sh: what it refuses before it starts anything."""

import os
import subprocess

import pytest
from conftest import ROOT


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
