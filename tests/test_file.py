"""train_gpt2.py as a text to read: its imports, its help and docstrings, README's map of it."""

import ast
import inspect
import re
import subprocess
import sys
from dataclasses import fields

import pytest
from conftest import ROOT
from readme_map import file_map, readme_is_true

SOURCE = (ROOT / "train_gpt2.py").read_text()
TREE = ast.parse(SOURCE)
NODES = list(ast.walk(TREE))
FUNCTIONS = [node for node in NODES if isinstance(node, ast.FunctionDef)]


def lines_of(node):
    return node.end_lineno - node.lineno + 1


def test_no_function_is_longer_than_60_lines():
    assert {node.name: lines_of(node) for node in FUNCTIONS if lines_of(node) > 60} == {}


# -----------------------------------------------------------------------------
# Imports, and what importing does


def imported_modules(tree):
    """Yield the top-level name of each module that a tree imports, and whether in a try."""
    inside = {child for node in ast.walk(tree) if isinstance(node, ast.Try)
              for child in ast.walk(node)}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split(".")[0], node in inside
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            yield node.module.split(".")[0], node in inside


def test_it_needs_only_torch_and_numpy():
    needed = {"torch", "numpy", *sys.stdlib_module_names}
    for name, in_try in imported_modules(TREE):
        assert name in needed or (name == "tqdm" and in_try), name
    assert not re.search(r"sys\.path|importlib|__import__|\bexec\(|\beval\(", SOURCE)


# What train_gpt2.py imports comes first: what those modules do is not its doing.
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


# -----------------------------------------------------------------------------
# Help and docstrings


def test_every_setting_is_explained_in_the_help(capsys):
    import train_gpt2

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


def public_objects(module):
    """Yield (name, object, base classes) of the functions and classes of a module, and methods."""
    for node in ast.parse(inspect.getsource(module)).body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        value = getattr(module, node.name)
        yield node, value, ()
        for method in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                yield method, inspect.getattr_static(value, method.name), value.__mro__[1:]


def test_every_public_function_and_class_has_a_docstring():
    """Except short ones, modules of torch, and methods whose meaning a base class defines."""
    import train_gpt2

    module_class = train_gpt2.nn.Module
    seen, missing = 0, []
    for node, value, bases in public_objects(train_gpt2):
        is_module = isinstance(value, type) and issubclass(value, module_class)
        overrides = module_class in bases or any(node.name in vars(base) for base in bases)
        documented = ast.get_docstring(node) is not None
        if lines_of(node) > 5 and not (is_module or overrides or documented):
            missing.append(node.name)
        seen += documented
    assert not missing and seen > 50


# -----------------------------------------------------------------------------
# README's map


def test_a_map_names_the_sections_and_their_lines():
    source = (
        '"""Text."""\n\n# ---- One: a, b ---\nx = 1\n\n\n# ---- Two-fold. To use\ny = 2\nz = 3\n'
    )
    expected = "| lines | section |\n|---|---|\n| 3-4 | One: a, b |\n| 7-9 | Two-fold. To use |\n"
    assert file_map(source) == expected
    titles = re.findall(r"\| \d+-\d+ \| (\w+)", file_map(SOURCE))
    assert titles == [
        "Settings", "Model", "Muon", "Data", "Training", "Log", "Processes", "Main",
    ]  # fmt: skip


def test_the_map_in_the_readme_is_that_of_the_file():
    assert readme_is_true(), "run python records/tools/readme_map.py"


def test_the_readmes_example_of_muon_runs():
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    names["model"](names["torch"].arange(3)).sum().backward()
    for optimizer in names["optimizers"]:
        optimizer.step()


def test_the_readme_is_at_most_180_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180
