"""The one file by itself: no other file, no package but torch and numpy, another optimizer."""

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import venv

import pytest
import torch
from conftest import (
    KILL,
    SCRIPT,
    STEP,
    bits,
    checkpoints,
    edited_script,
    finish,
    losses,
    run_forked,
    start,
    trained,
    validations,
    wait_for,
)


# ---- A copy in an empty folder, an interpreter with torch and numpy -----------------------------
def needed(name, found):
    """Add the distribution of that name, and what it needs of what is installed, to `found`."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:  # of another system or version of Python
        return
    if distribution.metadata["Name"] in found:
        return
    found[distribution.metadata["Name"]] = distribution
    for requirement in distribution.requires or []:
        if "extra ==" not in requirement:
            needed(re.match(r"[\w.-]+", requirement)[0], found)


@pytest.fixture
def bare_python(tmp_path_factory):
    """An interpreter that can import torch, what torch itself needs, numpy, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/python3*/site-packages")
    found = {}
    needed("torch", found)
    needed("numpy", found)
    for distribution in found.values():
        tops = {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}
        for top in tops:
            if not (packages / top).exists():
                (packages / top).symlink_to(distribution.locate_file(top))
    python = folder / "bin" / "python"
    others = "huggingface_hub", "matplotlib", "pip", "pytest", "scipy", "tiktoken", "tqdm"
    code = f"import importlib.util as u; print([n for n in {others} if u.find_spec(n)])"
    done = subprocess.run([python, "-c", code], cwd=folder, timeout=60, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"[]\n"), done.stderr
    return python


def test_the_file_alone_trains_is_killed_and_goes_on(tiny, tmp_path, bare_python):
    """It ends with the losses, the data hash and the weights of a run from the repository."""
    fields = {**tiny, "num_iterations": 100, "allow_repeat": True, "val_loss_every": 50}
    fields |= {"run_id": "run", "save_every": 40}
    whole = trained(fields)
    alone = tmp_path / "alone"
    alone.mkdir()
    script = shutil.copy(SCRIPT, alone)
    fields |= {"resume": "auto", "log_dir": alone / "logs"}
    run = start(fields, script=script, python=bare_python)
    wait_for(run, "step:41/100 train_loss")  # its output holds it up before the end
    run.kill()
    assert finish(run).returncode == -signal.SIGKILL
    step = int(re.search(r"\d+", checkpoints(alone / "logs" / "run")[-1])[0])
    done = finish(start(fields, script=script, python=bare_python))
    assert done.returncode == 0, done.stderr
    assert f"\nresume=auto: continuing after step {step}\n" in done.stdout
    rows = losses(done.stdout)
    assert rows == losses(whole)[-len(rows) :]
    assert validations(done.stdout)[-1] == validations(whole)[-1]
    last = "state_step0000000100.pt"
    assert bits(alone / "logs" / "run" / last) == bits(tmp_path / "logs" / "run" / last)
    assert sorted(os.listdir(alone)) == sorted(["logs", "train_gpt2.py"])


# ---- Other optimizers, by an edit of the one line that makes Muon -------------------------------
MUON = "Muon(matrices, rate, momentum, rank=rank, world_size=world_size, dtype=gpt.dtype)"
COUNTING = '''class CountingSGD(torch.optim.SGD):
    """Keeps a counter in its groups, as Prodigy and schedule-free optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] /= group["count"]
        super().step(closure)


def build_optimizers('''
CHANGES = {
    "Adam": [(MUON, "torch.optim.Adam(matrices, rate)")],
    "CountingSGD": [
        ("def build_optimizers(", COUNTING),
        (MUON, "CountingSGD(matrices, rate, momentum)"),
    ],
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_optimizer_trains_and_goes_on_to_the_bit(name, tiny, tmp_path):
    """On one rank and on two. What it keeps in its groups is resumed, but for learning rates."""
    fields = {**tiny, "save_every": 2}
    script = edited_script(tmp_path, *CHANGES[name])
    logs = [trained({**fields, "run_id": f"w{n}"}, n, script) for n in (1, 2)]
    assert all(f"\n{name} parameters:6144\n" in log for log in logs)
    one, two = (validations(log) for log in logs)
    assert [row[2] for row in one] == [row[2] for row in two]
    assert [row[1] for row in one] == pytest.approx([row[1] for row in two], abs=0.02)
    assert one[-1][1] < one[0][1] - 0.2
    fields |= {"run_id": "part", "resume": "auto"}
    script = edited_script(tmp_path, *CHANGES[name], (STEP, KILL))
    assert run_forked(fields, 2, script).returncode == -signal.SIGKILL
    assert "\nresume=auto: continuing after step 4\n" in trained(fields, 2, script)
    paths = [tmp_path / "logs" / run_id / "state_step0000000006.pt" for run_id in ("part", "w2")]
    assert bits(paths[0]) == bits(paths[1])
    group = torch.load(paths[0], weights_only=True)["optimizers"][1]["param_groups"][0]
    assert group.get("count") == (6 if name == "CountingSGD" else None)
