"""train_gpt2.py as a text to read: its size, its imports, its comments, and README's map of it.

`python tests/test_file.py` writes the map into README.md, between `<!-- map -->` and
`<!-- end -->`.
"""

import ast
import inspect
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "train_gpt2.py"
SOURCE = SCRIPT.read_text()
TREE = ast.parse(SOURCE)
NODES = list(ast.walk(TREE))
FUNCTIONS = [node for node in NODES if isinstance(node, ast.FunctionDef)]
CLASSES = [node for node in NODES if isinstance(node, ast.ClassDef)]
RULER = re.compile(r"# ---- (.+?)[ -]*")
MARKED = re.compile(r"(?<=<!-- map -->\n).*?(?=<!-- end -->)", re.S)


def file_map(source):
    """Return a table of the sections that the rulers of a file make: their lines and titles."""
    lines = source.splitlines()
    rulers = [(number, RULER.fullmatch(line)) for number, line in enumerate(lines, 1)]
    sections = [(number, match[1]) for number, match in rulers if match]
    ends = [number - 1 for number, _ in sections[1:]] + [len(lines)]
    rows = ["| lines | section |", "|---|---|"]
    for (first, title), end in zip(sections, ends):
        while not lines[end - 1].strip():
            end -= 1
        rows.append(f"| {first}-{end} | {title} |")
    return "\n".join(rows) + "\n"


def lines_of(node):
    return node.end_lineno - node.lineno + 1


def is_docstring(node):
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)


# -----------------------------------------------------------------------------
# Size and density


def test_it_is_at_most_a_thousand_lines_of_100_columns():
    lines = SOURCE.splitlines()
    assert len(lines) <= 1000
    assert max(map(len, lines)) <= 100


def test_a_line_of_code_holds_at_most_11_and_a_half_nodes():
    lines = [line.strip() for line in SOURCE.splitlines()]
    code = [line for line in lines if line and not line.startswith("#")]
    docstrings = sum(lines_of(node) for node in NODES if is_docstring(node))
    density = len(NODES) / (len(code) - docstrings)
    assert round(density, 1) <= 11.5


def test_no_function_is_longer_than_45_lines():
    assert {node.name: lines_of(node) for node in FUNCTIONS if lines_of(node) > 45} == {}


def test_no_expression_assigns():
    assert not [node.lineno for node in NODES if isinstance(node, ast.NamedExpr)]


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


# the modules that train_gpt2.py imports come first: what they do is theirs
IMPORT = """
import json, os, signal, sys
import numpy, torch
from torch import _dynamo
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
# Comments and docstrings


def setting_comments():
    """Return {name: comment} of the settings, as they stand in the file."""
    (settings,) = [node for node in CLASSES if node.name == "Hyperparameters"]
    lines, comments = SOURCE.splitlines(), {}
    for node in settings.body:
        if isinstance(node, ast.AnnAssign):
            _, _, comment = lines[node.end_lineno - 1].partition("  # ")
            comments[node.target.id] = comment
    return comments


def test_every_setting_is_explained_beside_it_and_in_the_help(capsys, monkeypatch):
    import train_gpt2

    monkeypatch.setenv("COLUMNS", "1000")  # breaks no line
    with pytest.raises(SystemExit) as done:
        train_gpt2.parse_args(["--help"])
    assert done.value.code == 0
    printed = capsys.readouterr().out
    assert train_gpt2.__doc__.strip() in printed
    comments, words = setting_comments(), " ".join(printed.split())
    settings = fields(train_gpt2.Hyperparameters)
    assert list(comments) == [field.name for field in settings]
    for field in settings:
        comment = comments[field.name]
        assert len(comment) > 3 and f"{comment} (default: {field.default!r})" in words, field.name
        assert f" --{field.name} " in words


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
    assert titles == ["Settings", "Model", "Muon", "Data", "Training", "Log", "The"]


def test_the_readmes_map_is_the_files():
    found = MARKED.findall((ROOT / "README.md").read_text())
    assert found == [file_map(SOURCE)], "run python tests/test_file.py"


def write_map():
    """Put the map into README.md, between its markers."""
    readme = ROOT / "README.md"
    text, found = MARKED.subn(lambda match: file_map(SOURCE), readme.read_text())
    if found != 1:
        sys.exit("README.md has no <!-- map --> ... <!-- end -->, each on a line of its own")
    readme.write_text(text)


if __name__ == "__main__":
    write_map()
