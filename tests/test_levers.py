"""The levers of tests/bench/bench_step.py: each computes the same step, in another way."""

import functools
import importlib.util
import sys
from itertools import islice
from types import SimpleNamespace

import bench_step
import pytest
import runlog
import torch
from conftest import ROOT, TINY, run_forked
from levers import LEVERS

CASES = [
    (name, dtype)
    for name, lever in LEVERS.items()
    for dtype in ("float32", "bfloat16")
    if lever.needs in ("", dtype)
]


def losses(name, dtype):
    """Return the eager losses of a tiny model's first steps with a lever."""
    spec = importlib.util.spec_from_file_location("train_gpt2_of_a_lever", ROOT / "train_gpt2.py")
    module = importlib.util.module_from_spec(spec)  # of its own, which a lever may change
    sys.modules[spec.name] = module  # dataclasses and inspect look there
    spec.loader.exec_module(module)
    run = SimpleNamespace(settings=TINY | {"dtype": dtype, "train_files": ""}, attention=None)
    run.plain = run.plain_compiled = False
    LEVERS[name].change(module, run)
    args = module.Hyperparameters(**run.settings)
    dtype = getattr(torch, dtype)
    torch.manual_seed(0)
    gpt = module.GPT(args, dtype)
    if run.plain:
        _, warm_up, step = bench_step.prepare_plain(run, gpt, args, dtype)
    else:
        _, warm_up, step = bench_step.prepare_script(module, gpt, args, 0, 1)
    batches = bench_step.tokens_of(args, 0, 1, torch.device("cpu"))
    with bench_step.attention_of(run):
        warm_up(batches)
        return [step(*batch).item() for batch in islice(batches, 3)]


@pytest.mark.parametrize("name, dtype", CASES)
def test_a_lever_changes_how_a_step_is_computed_but_not_what(name, dtype, monkeypatch):
    """What a lever compiles is traced, but not by a compiler."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    # The loss of F.linear_cross_entropy is rounded to bf16: between 4 and 8 by up to 2**-6.
    tolerance = 1e-3 if dtype == "float32" else 0.01 + 2**-6
    assert losses(name, dtype) == pytest.approx(losses("script", dtype), abs=tolerance)


def test_a_run_of_the_plain_model_leaves_a_log_that_is_read_like_any_other(tiny):
    """In float32, where it and the script's own model learn the same."""
    runs = []
    for run_id, script in ("ours", "train_gpt2.py"), ("plain", "tests/bench/plain_run.py"):
        done = run_forked({**tiny, "dtype": "float32", "run_id": run_id}, script=ROOT / script)
        assert done.returncode == 0, done.stderr
        runs.append(runlog.read(f"{tiny['log_dir']}/{run_id}.txt"))
    ours, plain = runs
    assert plain.hashes == ours.hashes and len(ours.hashes) == 2
    for kind in "train", "val":
        of_ours, of_plain = ([loss for _, loss, _ in run.points[kind]] for run in runs)
        assert of_plain == pytest.approx(of_ours, abs=1e-3)
    assert (ROOT / "tests/bench/plain_run.py").read_text() in plain.sources.values()
