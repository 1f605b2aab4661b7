"""The profile: parts that add up, a trace that names them, a training that does not notice."""

import gzip
import itertools
import json
import re
from pathlib import Path

import pytest
import step_profile
import torch
import torch.distributed as dist
from conftest import ROOT, run_forked, trained
from step_profile import TIMED, TRACED, WARM_UP, Phases

import train_gpt2
from train_gpt2 import GPT, Hyperparameters

SCRIPT = ROOT / "records" / "tools" / "step_profile.py"
STEPS = WARM_UP + TIMED + TRACED


def test_the_device_is_awaited_before_every_look_at_the_clock():
    calls = []
    phases = Phases(lambda: calls.append("wait"), lambda: calls.append("clock") or 0.0)
    with phases("other"), phases("AdamW"):
        pass
    assert calls == ["wait", "clock"] * 4


def test_the_parts_of_a_step_add_up_to_it(tiny):
    """By a clock that ticks when it is looked at. Afterwards every function is as before."""
    run = step_profile.set_up(Hyperparameters(**tiny))
    owners = GPT, torch.Tensor, run.optimizers[0], train_gpt2, dist
    before = [dict(vars(owner)) for owner in owners]
    ticks = itertools.count()
    phases = Phases(clock=ticks.__next__)
    with phases.in_steps(run):
        step_profile.train_steps(run, 1, phases)
    assert sum(phases.seconds.values()) == next(ticks) - 1  # from its first tick to its last
    stacks, micro_batches = 3, 6  # of 8 square matrices, 2 wide and 2 tall ones
    other = phases.seconds.pop("other")
    assert other > 0 and phases.seconds == {
        "forward": micro_batches, "backward": micro_batches, "Newton-Schulz": stacks,
        "AdamW": 1, "Muon": 1 + stacks, "loader": 1,
    }  # fmt: skip
    position = run.train_loader.position
    assert position == run.train_loader.tokens_per_step
    assert "read_batch" not in vars(run.train_loader)
    for owner, names in zip(owners, before):
        assert vars(owner).keys() == names.keys()
        assert all(vars(owner)[name] is value for name, value in names.items())


def test_a_profile_does_not_change_the_training(tiny, monkeypatch):
    """Its times are those of one step, here in ticks of the clock."""
    ticks = itertools.count()
    monkeypatch.setattr(step_profile, "Phases", lambda: Phases(clock=ticks.__next__))
    args = Hyperparameters(**tiny)
    profiled, plain = step_profile.set_up(args), step_profile.set_up(args)
    seconds, _ = step_profile.measure(profiled)
    assert seconds["forward"] == seconds["backward"] == 6 and seconds["loader"] == 1
    for _ in range(STEPS):
        batch = plain.train_loader.next_batch()
        train_gpt2.train_step(plain.gpt, plain.optimizers, *batch, 1.0, args)
    assert plain.train_loader.position == profiled.train_loader.position
    for name, p in profiled.gpt.state_dict().items():
        assert torch.equal(p, plain.gpt.state_dict()[name]), name


def test_a_signal_ends_the_profile(tiny):
    run = step_profile.set_up(Hyperparameters(**tiny))
    run.stop.on_signal(15, None)
    with pytest.raises(train_gpt2.UserError, match="stopped by a signal"):
        step_profile.train_steps(run, 1, Phases())


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


def test_a_mistake_is_one_sentence_and_exit_status_1(tiny):
    done = run_forked({**tiny, "n_head": 5}, script=SCRIPT)
    assert done.returncode == 1 and done.stderr.startswith("train_gpt2.py: n_embd=16 must be")
    assert done.stderr.count("\n") == 1
