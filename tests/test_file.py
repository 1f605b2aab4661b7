"""train_gpt2.py as a file: alone, imported, its help, and what README says of it."""

import dataclasses
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import (
    ROOT,
    SCRIPT,
    finish,
    last_bits,
    losses,
    run_here,
    start,
    validations,
)

import train_gpt2
from train_gpt2 import PRESETS, Hyperparameters


# ---- A copy in an empty folder, with torch and numpy --------------------------------------------
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


def test_the_file_alone_goes_on_with_a_run_and_ends_it(tiny, tmp_path, capsys):
    """It ends with the losses, the data hash and the weights of a run from the repository.

    Nothing can be imported but torch, what torch itself needs, and numpy.
    """
    fields = {**tiny, "run_id": "run", "save_every": 6}
    run_here(fields)
    whole = capsys.readouterr().out
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(SCRIPT, alone)
    fields |= {"resume": "auto", "log_dir": str(alone / "logs")}
    run_here(fields, 2)
    found = {}
    needed("torch", found)
    needed("numpy", found)
    packages = importlib.metadata.packages_distributions()
    others = [name for name, sources in packages.items() if not found.keys() & set(sources)]
    assert {"pytest", "tqdm"} <= set(others)
    bare = tmp_path / "bare.py"
    bare.write_text(
        f"import runpy, sys\nsys.modules.update(dict.fromkeys({others}))\n"
        "runpy.run_path('train_gpt2.py', run_name='__main__')\n"
    )
    done = finish(start(fields, script=bare))
    assert done.returncode == 0, done.stderr
    assert "\nresume=auto: continuing after step 2\n" in done.stdout
    rows = losses(done.stdout)
    assert len(rows) == 6 and rows == losses(whole)[-6:]
    assert validations(done.stdout)[-1] == validations(whole)[-1]
    assert last_bits(alone / "logs" / "run") == last_bits(tmp_path / "logs" / "run")
    assert sorted(os.listdir(alone)) == sorted(["logs", "train_gpt2.py"])


# ---- Import, help, README -----------------------------------------------------------------------
# The modules that train_gpt2.py imports come first, so that only its own effects are compared.
IMPORT = """
import json, os, signal, sys
import numpy, torch
from torch._functorch import config
def seen():
    handlers = [repr(signal.getsignal(number)) for number in signal.valid_signals()]
    state = dict(path=sys.path, environ=dict(os.environ), handlers=handlers)
    state.update(seed=torch.initial_seed(), threads=torch.get_num_threads(),
                 dtype=str(torch.get_default_dtype()), random=torch.get_rng_state().tolist(),
                 budget=config.activation_memory_budget, files=os.listdir())
    return json.dumps(state)
before = seen()
import train_gpt2
assert seen() == before, (before, seen())
assert "torch._dynamo" not in sys.modules, "it is slow to import and sets an environment variable"
assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
"""


def test_importing_it_does_nothing_else(tmp_path):
    command = [sys.executable, "-B", "-W", "error::SyntaxWarning", "-c", IMPORT]
    environment = {"PYTHONPATH": str(ROOT), "RANK": "3", "WORLD_SIZE": "8", "PATH": "/usr/bin:/bin"}
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_the_help_explains_every_setting_and_preset(capsys, monkeypatch):
    n_layer = Hyperparameters.__dataclass_fields__["n_layer"]
    monkeypatch.setattr(n_layer, "metadata", {**n_layer.metadata, "help": "100% of blocks"})
    with pytest.raises(SystemExit) as done:
        train_gpt2.parse_args(["--help"])
    assert done.value.code == 0
    printed = capsys.readouterr().out
    assert train_gpt2.__doc__.strip() in printed
    words = " ".join(printed.split())
    for field in dataclasses.fields(Hyperparameters):
        text = field.metadata["help"]
        default = str(field.default) or "''"
        assert len(text) > 3 and f" --{field.name} {default} {text} " in f"{words} ", field.name
    for name, (text, _) in PRESETS.items():
        assert f"{name} {text}" in words


def test_the_readmes_example_of_muon_runs():
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    names["model"](names["torch"].arange(3)).sum().backward()
    for optimizer in names["optimizers"]:
        optimizer.step()
