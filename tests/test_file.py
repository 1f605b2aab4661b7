"""train_gpt2.py as a file: what importing it does, its help, and what README says of it."""

import re
import subprocess
import sys
from dataclasses import fields

import pytest
from conftest import ROOT

import train_gpt2

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


def test_every_setting_is_explained_in_the_help(capsys):
    with pytest.raises(SystemExit) as done:
        train_gpt2.parse_args(["--help"])
    assert done.value.code == 0
    printed = capsys.readouterr().out
    assert train_gpt2.__doc__.strip() in printed
    words = " ".join(printed.split())
    for field in fields(train_gpt2.Hyperparameters):
        text = field.metadata["help"]
        default = str(field.default) or "''"
        assert len(text) > 3 and f" --{field.name} {default} {text} " in f"{words} ", field.name


def test_the_readmes_example_of_muon_runs():
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    names["model"](names["torch"].arange(3)).sum().backward()
    for optimizer in names["optimizers"]:
        optimizer.step()
