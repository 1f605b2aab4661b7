"""The levers of tests/bench/bench_step.py: each computes the same step, in another way."""

import functools
import importlib.util
import sys

import bench_step
import pytest
import torch
from conftest import ROOT, TINY, both_dtypes
from levers import LEVERS, NEED_CUDA


def losses(name, dtype):
    """Return the losses of a tiny model's first steps with a lever."""
    spec = importlib.util.spec_from_file_location("train_gpt2_of_a_lever", ROOT / "train_gpt2.py")
    module = importlib.util.module_from_spec(spec)  # of its own, which a lever may change
    sys.modules[spec.name] = module  # dataclasses and inspect look there
    spec.loader.exec_module(module)
    settings = TINY | {"dtype": dtype}
    run, _, args, warm_up, step = bench_step.prepare(module, LEVERS[name], settings)
    batch = bench_step.tokens_of(args, "cpu")
    with run.attention:
        warm_up(*batch)
        return [step(*batch).item() for _ in range(3)]


@both_dtypes
@pytest.mark.parametrize("name", [name for name in LEVERS if name not in NEED_CUDA])
def test_a_lever_changes_how_a_step_is_computed_but_not_what(name, dtype, monkeypatch):
    """What a lever compiles is traced, but not by a compiler."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    # The loss of F.linear_cross_entropy is rounded to bf16: between 4 and 8 by up to 2**-6.
    tolerance = 1e-3 if dtype == "float32" else 0.01 + 2**-6
    assert losses(name, dtype) == pytest.approx(losses("script", dtype), abs=tolerance)
