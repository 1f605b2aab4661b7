"""train_gpt2.py as a single file: its imports, its help, and the Python examples in README."""

import ast
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import muon
import pytest
import torch
import train_modern
from conftest import ROOT, SCRIPT, last_bits, losses, run_here, run_subprocess, validations
from torch import nn

import train_gpt2


@pytest.mark.parametrize(
    "script, packages", [(SCRIPT, {"torch", "numpy"}), (muon.__file__, {"torch"})]
)
def test_a_script_that_is_copied_imports_few_packages(script, packages):
    imported = set()
    for node in ast.walk(ast.parse(Path(script).read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
    assert imported - sys.stdlib_module_names == packages


def test_a_copy_in_an_empty_folder_finishes_a_run_of_the_repository(tiny, tmp_path, capsys):
    """The losses and the weights are those of a run without an interruption."""
    fields = {**tiny, "run_id": "run", "save_every": 6}
    run_here(fields)
    whole = capsys.readouterr().out
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(SCRIPT, alone)
    fields |= {"resume": "auto", "log_dir": str(alone / "logs")}
    run_here(fields, 2)
    done = run_subprocess(fields, script=alone / "train_gpt2.py")
    assert done.returncode == 0, done.stderr
    assert "\ncontinuing after step 2 from " in done.stdout
    rows = losses(done.stdout)
    assert len(rows) == 6 and rows == losses(whole)[-6:]
    assert validations(done.stdout)[-1] == validations(whole)[-1]
    assert last_bits(alone / "logs" / "run") == last_bits(tmp_path / "logs" / "run")
    assert sorted(os.listdir(alone)) == ["logs", "train_gpt2.py"]


def test_text_files_are_read_and_written_as_utf_8_whatever_the_locale():
    for path in SCRIPT, *ROOT.glob("data/*.py"), *ROOT.glob("records/*/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if getattr(getattr(node, "func", None), "attr", "") in ("read_text", "write_text"):
                known = "encoding" in [keyword.arg for keyword in node.keywords]
                assert known or ast.unparse(node).startswith("cpu_info."), (path, node.lineno)


# Imports what train_gpt2.py imports first, so that only the effects of the file itself show.
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


def test_importing_it_has_no_side_effects(tmp_path):
    command = [sys.executable, "-B", "-W", "error::SyntaxWarning", "-c", IMPORT]
    environment = {"PYTHONPATH": str(ROOT), "RANK": "3", "WORLD_SIZE": "8", "PATH": "/usr/bin:/bin"}
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


@pytest.mark.parametrize("recipe", [train_gpt2.RECIPE, train_modern.RECIPE], ids=["7", "modern"])
def test_the_help_explains_every_setting_and_lists_the_presets(recipe, capsys, monkeypatch):
    n_layer = recipe.settings.__dataclass_fields__["n_layer"]
    monkeypatch.setattr(n_layer, "metadata", {"help": "100% of blocks"})
    with pytest.raises(SystemExit, match="0"):
        train_gpt2.parse_args(["--help"], recipe)
    words = " ".join(capsys.readouterr().out.split())
    assert " ".join(recipe.settings.__doc__.split()) in words
    assert f" --preset {{{','.join(recipe.presets)}}} settings to start from " in words
    first_preset = next(iter(recipe.presets.values()))
    for field in dataclasses.fields(recipe.settings):
        default = str(first_preset.get(field.name, field.default)) or "''"
        shown = " ".join(f"--{field.name} {default} {field.metadata.get('help', '')}".split())
        assert f" {shown} " in f"{words} ", field.name


def run_examples_of_readme():
    """Run README's Python examples of Muon in order; return the names they define."""
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    names = {}
    for example in (example for example in examples if "muon" in example.lower()):
        exec(compile(example, "README.md", "exec"), names)
    return names


class ExampleModel(nn.Module):
    """A model for README's examples."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.blocks = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
        self.head = nn.Linear(64, 100)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("shape", [(24, 24), (16, 64), (64, 16)])
def test_the_short_muon_in_readme_equals_the_real_one(shape):
    """Up to the rounding of updates to bfloat16, over several steps."""
    torch.manual_seed(0)
    muon_step = run_examples_of_readme()["muon_step"]
    weight, momentum = torch.randn(shape), torch.zeros(shape)
    parameter = torch.nn.Parameter(weight.clone())
    options = dict(weight_decay=0, momentum=0.9, adjust_lr_fn="unit_rms", dtype=torch.float32)
    optimizer = muon.Muon([parameter], lr=0.01, **options)
    for _ in range(5):
        parameter.grad = torch.randn(shape)
        optimizer.step()
        muon_step(weight, parameter.grad, momentum, lr=0.01, mu=0.9)
    torch.testing.assert_close(parameter.detach(), weight, rtol=0, atol=1e-3)
