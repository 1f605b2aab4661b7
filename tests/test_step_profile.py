"""The profile: its table and its traces name all parts, and it trains like any other run."""

import gzip
import json
import re
import runpy
import signal
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import step_profile
import torch
import torch.distributed as dist
from conftest import MODERN, ROOT, options, trained
from step_profile import PROFILED

import train_gpt2
from train_gpt2 import GPT, DistributedDataLoader, Hyperparameters

SCRIPT = ROOT / "records" / "tools" / "step_profile.py"


def test_a_range_waits_for_the_gpu_at_both_ends(monkeypatch):
    calls = mock.MagicMock()
    monkeypatch.setattr(step_profile, "record_function", calls.range)
    monkeypatch.setattr(torch.cuda, "synchronize", calls.wait)
    with step_profile.synchronized_range("step"):
        calls.launch()
    names = [name for name, *_ in calls.mock_calls]
    assert names == ["wait", "range", "range().__enter__", "launch", "wait", "range().__exit__"]


def test_profiled_steps_train_as_others_do(tiny):
    """Afterwards, every patched function is restored."""
    args = Hyperparameters(**tiny | {"val_loss_every": 0})
    profiled, plain = (train_gpt2.set_up(args, train_gpt2.StopRequest()) for _ in range(2))
    owners = GPT, DistributedDataLoader, torch.Tensor, profiled.optimizers[0], train_gpt2, dist.Work
    before = [dict(vars(owner)) for owner in owners]
    step_profile.take_steps(profiled, 2)
    for owner, names in zip(owners, before):
        assert vars(owner).keys() == names.keys()
        assert all(vars(owner)[name] is value for name, value in names.items())
    for step in range(2):
        train_gpt2.apply_schedule(plain.model, plain.optimizers, step, args)
        train_gpt2.train_step(plain, *plain.train_loader.batch(step))
    for name, p in profiled.model.state_dict().items():
        assert torch.equal(p, plain.model.state_dict()[name]), name


def test_ctrl_c_ends_the_profile_at_once(tiny, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options(tiny)])
    interrupt = lambda args: signal.raise_signal(signal.SIGINT)  # noqa: E731
    monkeypatch.setattr(train_gpt2, "join_ranks", interrupt)
    # A parent that ignores SIGINT, such as a script's background job, passes this on to the tests.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit, match="130"):
            runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        signal.signal(signal.SIGINT, handler)


def test_half_of_the_profiled_steps_update_with_adamw(tiny, capsys):
    settings = {**tiny, **MODERN, "adamw_every": 2}
    step_profile.main(Hyperparameters(**settings), train_gpt2.StopRequest())
    printed = capsys.readouterr().out
    assert "Mean time of 4 steps" in printed
    folder = Path(re.search(r"perfetto.dev: (\S+)$", printed, re.M)[1])
    [trace] = folder.iterdir()
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    counts = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
    assert [counts[part] for part in ("train_step", "Muon", "AdamW", "Adagrad")] == [4, 4, 2, 2]


@pytest.mark.parametrize("processes", [1, 2])
def test_the_command_prints_tables_and_writes_traces(processes, tiny, capsys):
    if processes == 1:
        step_profile.main(Hyperparameters(**tiny), train_gpt2.StopRequest())
        printed = capsys.readouterr().out
    else:
        printed = trained(tiny, processes, SCRIPT)
    assert f"Mean time of {PROFILED} steps of 192 tokens on rank 0" in printed
    # Calls per step on all ranks. Three stacks: 8 square matrices, 2 wide ones and 2 tall ones.
    calls = {"forward": 6, "backward": 6, "Newton-Schulz": 3}
    each_rank = ["step", "train_step", "batch", "reports", "gradient sums", "AdamW", "Muon"]
    calls |= dict.fromkeys(each_rank, processes)
    # The sum of all gradients, two buckets of Muon, and the loss.
    collectives = 1 + 2 + 1 if processes == 2 else 0
    if processes == 2:
        calls["waits for ranks"] = 2 * collectives
    assert f"\n{collectives:>6} collectives\n     1 reads of device" in printed
    rows = re.findall(r"^(\S.*?) +([\d.]+) ms +([\d.]+)%$", printed, re.M)
    ms = {part: float(value) for part, value, _ in rows}
    assert ms.keys() == calls.keys() and len(rows) == len(ms)  # rank 0 alone prints
    assert list(ms.values()) == sorted(ms.values(), reverse=True)
    for part, value, share in rows:
        assert float(share) == pytest.approx(100 * float(value) / ms["step"], abs=1), part
    in_turn = [ms[part] for part in ("forward", "backward", "AdamW", "Muon")]
    assert ms["Newton-Schulz"] < ms["Muon"] < sum(in_turn) < ms["train_step"]
    between = float(re.search(r"the host works for ([\d.]+) ms", printed)[1])
    assert between == pytest.approx(ms["step"] - ms["train_step"], abs=0.02)
    assert ms["batch"] + ms["reports"] <= between + 0.02
    assert "Self CPU time total" in printed
    folder = Path(re.search(r"perfetto.dev: (\S+)$", printed, re.M)[1])
    assert list(Path(tiny["log_dir"]).iterdir()) == [folder]  # no log, no checkpoint
    traces = sorted(folder.iterdir())
    assert [path.name for path in traces] == [f"trace_rank{r}.json.gz" for r in range(processes)]
    counts = Counter()
    for path in traces:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        counts.update(event["name"] for event in events if event.get("cat") == "user_annotation")
    assert {part: counts[part] / PROFILED for part in calls} == calls
