"""The levers of tests/bench_step.py: each computes the same step, in another way."""

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import lever_table
import pytest
import torch
from conftest import ROOT, TINY
from levers import LEVERS

# these change torch itself, for as long as the process lives, or need several of them
LASTING = {"compiled autograd", "foreach AdamW"}
HERE = [
    name for name, lever in LEVERS.items()
    if lever.processes == 1 and lever.needs in ("", "cpu", "bf16") and name not in LASTING
]  # fmt: skip


def fresh_module():
    """Return train_gpt2 loaded once more, so that a lever changes only this one."""
    spec = importlib.util.spec_from_file_location("train_gpt2_of_a_lever", ROOT / "train_gpt2.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def losses(name, dtype, steps=3):
    """Return the eager losses of a tiny model's first steps with a lever."""
    from plain import PlainGPT, plain_optimizers, plain_step

    module = fresh_module()
    module.matmul_dtype = lambda device: dtype
    run = SimpleNamespace(settings=dict(TINY), plain=False, plain_compiled=False, compile=None)
    LEVERS[name].change(module, run)
    args = module.Hyperparameters(**run.settings)
    torch.manual_seed(0)
    gpt = module.GPT(args)
    tokens = torch.randint(args.vocab_size, (args.batch_size * args.sequence_length + 1,))
    x, y = tokens[:-1].view(args.batch_size, -1), tokens[1:].view(args.batch_size, -1)
    if run.plain:
        model = PlainGPT(args)
        model.load_state_dict(gpt.state_dict())
        optimizers = plain_optimizers(model, args, dtype)
        return [plain_step(model, optimizers, x, y, dtype, 2).item() for _ in range(steps)]
    optimizers = module.build_optimizers(gpt, args, 0, 1)
    with module.attention_kernel(args, torch.device("cpu")):
        return [module.train_step(gpt, optimizers, x, y, 1.0, args).item() for _ in range(steps)]


@pytest.mark.parametrize("name", HERE)
def test_a_lever_changes_how_a_step_is_computed_but_not_what(name):
    bf16 = LEVERS[name].needs == "bf16"
    dtype, tolerance = (torch.bfloat16, 0.01) if bf16 else (torch.float32, 1e-3)
    assert losses(name, dtype) == pytest.approx(losses("script", dtype), abs=tolerance)


def test_unknown_levers_are_named():
    command = [sys.executable, "tests/bench_step.py", "plian"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1 and "['plian'] are no levers: give all, or some of" in run.stderr


TIMED = """
cudnn attention        n/a: needs cuda
script            1000.0 1.000 (1.000..1.000)  n/a  600 (1.00)  n/a  n/a  9.0  1  n/a
seconds script: 1.0 1.0
16 chunks         1100.0 1.100 (1.050..1.200)  n/a  300 (0.50)  n/a  n/a  8.0  1  n/a

script            1200.0 1.000 (1.000..1.000)  n/a  600 (1.00)  n/a  n/a  9.0  1  n/a
micro-batch / 2   1300.0 1.083 (1.000..1.100)  n/a  450 (0.75)  n/a  n/a  7.0  1  n/a
"""
VALIDATED = "script       80.0 1.000 (1.000..1.000)  n/a  7 (1.00)  8  30.1  2.0  2  6.1234\n"
VALIDATED += "16 chunks   90.0 0.900 (0.900..0.900) 51.0%  9 (1.00)  8  30.1  2.0  2  6.1234\n"


def test_a_table_takes_each_figure_from_the_first_file_that_has_it(tmp_path, capsys):
    paths = [tmp_path / "timed.txt", tmp_path / "validated.txt"]
    for path, text in zip(paths, (TIMED, VALIDATED)):
        path.write_text(text)
    lever_table.main([str(path) for path in paths])
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| script | 1000 to 1200 ms | 600 MiB | 8 | n/a | 30.1 | 9.0 | 1 | 6.1234 |",
        "| cudnn attention | n/a: needs cuda | n/a | n/a | n/a | n/a | n/a | n/a | n/a |",
        "| 16 chunks | 1.100 (1.050 to 1.200) | 0.50 | 8 | 51.0% | 30.1 | 8.0 | 1 | 6.1234 |",
        "| micro-batch / 2 | 1.083 (1.000 to 1.100) | 0.75 | n/a | n/a | n/a | 7.0 | 1 | n/a |",
    ]
    with pytest.raises(ValueError, match="none of"):
        lever_table.main([str(paths[0]), "--only=absent"])
