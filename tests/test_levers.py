"""The levers of tests/bench/bench_step.py: each computes the same step, in another way."""

import functools
import importlib.util
import sys
from itertools import islice
from types import SimpleNamespace

import bench_step
import lever_table
import pytest
import runlog
import torch
from conftest import ROOT, TINY, both_dtypes, run_forked, run_ranks
from levers import LEVERS

DTYPES = "float32", "bfloat16"
CASES = [
    (name, dtype)
    for name, lever in LEVERS.items()
    for dtype in DTYPES
    if lever.processes == 1 and lever.needs in ("", "cpu", dtype)
    if name != "compiled autograd"  # it would trace for a minute
]
# their loss of a micro-batch is rounded to bf16: between 4 and 8 by up to half of 2**-5
ROUNDED = {"full bf16 logits": 2**-6, "F.linear_cross_entropy": 2**-6}
OF_TWO = [name for name, lever in LEVERS.items() if lever.processes == 2]


def fresh_module():
    """Return train_gpt2 loaded once more, so that a lever changes only this one."""
    spec = importlib.util.spec_from_file_location("train_gpt2_of_a_lever", ROOT / "train_gpt2.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and inspect look there
    spec.loader.exec_module(module)
    return module


def losses(name, dtype, rank=0, world_size=1):
    """Return the eager losses of a tiny model's first steps with a lever."""
    module = fresh_module()
    settings = {**TINY, "dtype": dtype, "train_files": ""}
    run = SimpleNamespace(settings=settings, attention=None, plain=False, plain_compiled=False)
    LEVERS[name].change(module, run)
    args = module.Hyperparameters(**run.settings)
    dtype, device = getattr(torch, dtype), torch.device("cpu")
    torch.manual_seed(0)
    gpt = module.GPT(args, dtype)
    if run.plain:
        _, warm_up, step = bench_step.prepare_plain(run, gpt, args, dtype)
    else:
        _, warm_up, step = bench_step.prepare_script(module, gpt, args, rank, world_size)
    batches = bench_step.tokens_of(args, rank, world_size, device)
    with bench_step.attention_of(run):
        warm_up(batches)
        return [step(*batch).item() for batch in islice(batches, 3)]


@functools.cache
def expected(dtype, rounding=0.0):
    """Return about the losses of the script itself."""
    tolerance = 1e-3 if dtype == "float32" else 0.01 + rounding
    return pytest.approx(losses("script", dtype), abs=tolerance)


@pytest.mark.parametrize("name, dtype", CASES)
def test_a_lever_changes_how_a_step_is_computed_but_not_what(name, dtype, monkeypatch):
    """What it compiles is traced, but by no compiler."""
    monkeypatch.setattr(torch.optim, "AdamW", torch.optim.AdamW)  # undoes a lever's change of it
    compile_eagerly = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", compile_eagerly)
    assert losses(name, dtype) == expected(dtype, ROUNDED.get(name, 0.0))


def losses_of_ranks(rank, world_size, dtype):
    # the synchronous last, since it changes torch.distributed itself
    names = sorted(OF_TWO, key=lambda name: "synchronous" in name)
    return {name: losses(name, dtype, rank, world_size) for name in names}


@both_dtypes
def test_levers_of_two_processes_do_not_change_what_a_step_computes(dtype, tmp_path):
    for found in run_ranks(losses_of_ranks, 2, tmp_path / "ranks", dtype):
        assert len(found) == 4
        for name in OF_TWO:
            assert found[name] == expected(dtype), name


def test_unknown_levers_are_named():
    with pytest.raises(SystemExit, match=r"\['plian'\] are no levers: give all, or some of"):
        bench_step.main(["plian"])


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


def test_a_run_of_the_plain_model_leaves_a_log_that_is_read_like_any_other(tiny):
    """In float32, where it and the script's own model learn the same."""
    tiny["dtype"] = "float32"
    runs = []
    for run_id, script in ("ours", "train_gpt2.py"), ("plain", "tests/bench/plain_run.py"):
        done = run_forked({**tiny, "run_id": run_id}, script=ROOT / script)
        assert done.returncode == 0, done.stderr
        runs.append(runlog.read(f"{tiny['log_dir']}/{run_id}.txt"))
    ours, plain = runs
    assert plain.hashes == ours.hashes and len(ours.hashes) == 2
    for kind in "train", "val":
        of_ours, of_plain = ([loss for _, loss, _ in run.points[kind]] for run in runs)
        assert of_plain == pytest.approx(of_ours, abs=1e-3)
    assert (ROOT / "tests/bench/plain_run.py").read_text() in plain.sources.values()
