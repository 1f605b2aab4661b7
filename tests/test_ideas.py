"""The ideas in records/README.md, edits and a script of its own: trained, killed and resumed."""

import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from conftest import (
    ROOT,
    SCRIPT,
    faulty_script,
    last_bits,
    run_forked,
    run_subprocess,
    trained,
    validations,
)
from test_survive import with_recipe

DIFFS = re.findall(r"```diff\n(.*?)```", (ROOT / "records" / "README.md").read_text(), re.S)
[SCRIPT_EXAMPLE] = re.findall(
    r"```python\n(.*?)```", (ROOT / "records" / "README.md").read_text(), re.S
)
IDEAS = ["activation", "optimizer", "clipping"]
KILL = "os.kill(os.getpid(), 9)"


def edited(folder, idea):
    """Return the path of a copy of train_gpt2.py with an idea's diff applied."""
    shutil.copy(SCRIPT, folder)
    patch = ["patch", "--batch", "-p1", "-d", folder]
    done = subprocess.run(patch, input=DIFFS[IDEAS.index(idea)], text=True, capture_output=True)
    assert done.returncode == 0 and "fuzz" not in done.stdout, done.stdout
    return folder / "train_gpt2.py"


def check_resumed(fields, script, faulty):
    """Kill a run on two ranks and resume it. Return the log of one that is not disturbed."""
    fields = {**fields, "save_every": 2}
    whole = trained({**fields, "run_id": "whole"}, 2, script)
    fields |= {"run_id": "part", "resume": "auto"}
    assert run_forked(fields, 2, faulty).returncode == -signal.SIGKILL
    assert "\ncontinuing after step 4 from " in trained(fields, 2, script)
    folder = Path(fields["log_dir"])
    assert last_bits(folder / "part") == last_bits(folder / "whole")
    return whole


@pytest.mark.parametrize("idea", IDEAS)
def test_an_edit_trains_and_resumes_bit_for_bit(idea, tiny, tmp_path):
    script = edited(tmp_path, idea)
    shown = trained(tiny, 1, script)
    one = validations(shown)
    two = validations(check_resumed(tiny, script, faulty_script(tmp_path, KILL, script=script)))
    assert one[-1][1] < one[0][1] - 0.1
    assert [row[1] for row in one] == pytest.approx([row[1] for row in two], abs=0.02)
    if idea == "clipping":
        assert len(re.findall(r" grad_norm:[\d.]+$", shown, re.M)) == 6
    else:
        assert one[-1] != validations(trained(tiny))[-1]


def test_a_script_of_its_own_trains_and_resumes_bit_for_bit(tiny, tmp_path):
    """The example in records/README.md adds dropout."""
    script = tmp_path / "my_idea.py"
    script.write_text(SCRIPT_EXAMPLE)
    shutil.copy(SCRIPT, tmp_path)
    fields = {**tiny, "dropout": 0.2}
    done = run_subprocess({**fields, "run_id": "alone"}, script=script)
    assert done.returncode == 0, done.stderr
    first, *_, last = validations(done.stdout)
    assert last[1] < first[1] - 0.1 and last != validations(trained(tiny))[-1]
    log = (tmp_path / "logs" / "alone.txt").read_text()
    assert SCRIPT_EXAMPLE in log and "\nhyperparameter dropout=0.2\n" in log
    check_resumed(fields, script, with_recipe(faulty_script(tmp_path, KILL), script))
    done = run_forked({**tiny, "run_id": "part", "resume": "auto"}, script=script)
    assert done.returncode == 1
    assert re.match(r"my_idea\.py: .*saved with dropout=0\.2 \(here 0\.1\)", done.stderr)
