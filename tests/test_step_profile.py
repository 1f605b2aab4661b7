"""The profile: parts that add up, a trace that names them, a training that does not notice."""

import gzip
import itertools
import json
import re
import runpy
import signal
import sys
from pathlib import Path

import pytest
import step_profile
import torch
import torch.distributed as dist
from conftest import ROOT, options, trained
from step_profile import TIMED, TRACED, WARM_UP, Phases

import train_gpt2
from train_gpt2 import GPT, Hyperparameters

SCRIPT = ROOT / "records" / "tools" / "step_profile.py"


def test_the_device_is_awaited_before_every_look_at_the_clock():
    calls = []
    phases = Phases(lambda: calls.append("wait"), lambda: calls.append("clock") or 0.0)
    with phases("other"), phases("AdamW"):
        pass
    assert calls == ["wait", "clock"] * 4


def test_the_parts_add_up_and_the_training_is_unchanged(tiny, monkeypatch):
    """The clock ticks at every look. Afterwards every patched function is restored."""
    ticks = itertools.count()
    monkeypatch.setattr(step_profile, "Phases", lambda: Phases(clock=ticks.__next__))
    args = Hyperparameters(**tiny)
    profiled, plain = step_profile.Run(args), step_profile.Run(args)
    owners = GPT, torch.Tensor, profiled.optimizers[0], train_gpt2, dist
    before = [dict(vars(owner)) for owner in owners]
    seconds, _ = profiled.measure()
    for owner, names in zip(owners, before):
        assert vars(owner).keys() == names.keys()
        assert all(vars(owner)[name] is value for name, value in names.items())
    assert "read_batch" not in vars(profiled.loader)
    stacks, micro_batches = 3, 6  # of 8 square matrices, 2 wide and 2 tall ones
    assert seconds == {
        "forward": micro_batches, "backward": micro_batches, "Newton-Schulz": stacks,
        "AdamW": 1, "Muon": 1 + stacks, "loader": 1, "other": 16,
    }  # fmt: skip
    # 19 blocks look at the clock at both ends, so a step takes 37 ticks.
    assert sum(seconds.values()) == 2 * 19 - 1
    for _ in range(WARM_UP + TIMED + TRACED):
        batch = plain.loader.next_batch()
        train_gpt2.train_step(plain.gpt, plain.optimizers, *batch, 1.0, args)
    assert plain.loader.position == profiled.loader.position
    for name, p in profiled.gpt.state_dict().items():
        assert torch.equal(p, plain.gpt.state_dict()[name]), name


def test_ctrl_c_ends_the_profile_at_once(tiny, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options(tiny)])
    interrupt = lambda args: signal.raise_signal(signal.SIGINT)  # noqa: E731
    monkeypatch.setattr(train_gpt2, "join_processes", interrupt)
    with pytest.raises(SystemExit, match="130"):
        runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.mark.parametrize("processes", [1, 2])
def test_the_command_prints_tables_and_writes_traces(processes, tiny, capsys):
    if processes == 1:
        step_profile.main(Hyperparameters(**tiny))
        printed = capsys.readouterr().out
    else:
        printed = trained(tiny, processes, SCRIPT)
    rows = re.findall(r"^(\S+) +([\d.]+) ms +([\d.]+)%$", printed, re.M)
    parts = {"forward", "backward", "AdamW", "Muon", "Newton-Schulz", "loader", "other"}
    parts |= {"communication"} if processes == 2 else set()
    assert {part for part, *_ in rows} == parts and len(rows) == len(parts)  # rank 0 alone prints
    assert sum(float(share) for *_, share in rows) == pytest.approx(100, abs=0.5)
    total = float(re.search(r"([\d.]+) ms per step of 192 tokens", printed)[1])
    assert sum(float(ms) for _, ms, _ in rows) == pytest.approx(total, abs=0.1)
    assert "Self CPU time total" in printed
    folder = Path(re.search(r"perfetto.dev: (\S+)$", printed, re.M)[1])
    assert list(Path(tiny["log_dir"]).iterdir()) == [folder]  # no log, no checkpoint
    traces = sorted(folder.iterdir())
    assert [path.name for path in traces] == [f"trace_rank{r}.json.gz" for r in range(processes)]
    for path in traces:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        ranges = [event["name"] for event in events if event.get("cat") == "user_annotation"]
        assert ranges.count("step") == ranges.count("loader") == TRACED
        assert parts <= {*ranges}
