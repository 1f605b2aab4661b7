"""The edits in records/README.md: each applies, trains on one and two ranks, and resumes."""

import re
import shutil
import signal
import subprocess

import pytest
from conftest import ROOT, SCRIPT, bits, faulty_script, run_forked, trained, validations
from test_modern import SMALL

DIFFS = re.findall(r"```diff\n(.*?)```", (ROOT / "records" / "README.md").read_text(), re.S)
IDEAS = ["activation", "optimizer", "clipping"]


def edited(folder, idea):
    """Return the path of a copy of train_gpt2.py with an idea's diff applied."""
    shutil.copy(SCRIPT, folder)
    patch = ["patch", "--batch", "-p1", "-d", folder]
    done = subprocess.run(patch, input=DIFFS[IDEAS.index(idea)], text=True, capture_output=True)
    assert done.returncode == 0 and "fuzz" not in done.stdout, done.stdout
    return folder / "train_gpt2.py"


@pytest.mark.parametrize("idea", IDEAS)
def test_an_idea_trains_and_resumes_bit_for_bit(idea, tiny, tmp_path):
    script = edited(tmp_path, idea)
    modern = {name: SMALL[name] for name in ("model", "ngram_rows", "embedding_learning_rate")}
    modern |= {"ngram_learning_rate": 0.1}  # Adagrad's gradients are sparse on one rank
    fields = {**tiny, **modern, "adamw_every": 2, "learning_rate": 0.01, "save_every": 2}
    logs = [trained({**fields, "run_id": f"w{n}"}, n, script) for n in (1, 2)]
    one, two = map(validations, logs)
    assert one[-1][1] < one[0][1] - 0.1
    assert [row[1] for row in one] == pytest.approx([row[1] for row in two], abs=0.02)
    if idea == "clipping":
        assert len(re.findall(r" grad_norm:[\d.]+$", logs[0], re.M)) == 6
    else:
        assert one[-1] != validations(trained({**fields, "run_id": "unedited"}))[-1]
    fields |= {"run_id": "part", "resume": "auto"}
    kill = faulty_script(tmp_path, "os.kill(os.getpid(), 9)", script=script)
    assert run_forked(fields, 2, kill).returncode == -signal.SIGKILL
    assert "\ncontinuing after step 4 from " in trained(fields, 2, script)
    last = "state_step0000000006.pt"
    assert bits(tmp_path / "logs" / "part" / last) == bits(tmp_path / "logs" / "w2" / last)
