"""The levers of tests/bench_step.py: each computes the same step, in another way."""

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

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
