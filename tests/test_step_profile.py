"""The profile: parts that add up, a trace that names them, a training that does not notice."""

import gzip
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import describe
import pytest
import step_profile
import torch
import torch.distributed as dist
from conftest import ROOT
from step_profile import PARTS, PLAIN, TIMED, TRACED, Phases
from torch.utils.flop_counter import FlopCounterMode

import train_gpt2
from train_gpt2 import GPT, Hyperparameters

STEPS = PLAIN + TIMED + TRACED


@pytest.fixture
def fields(tiny):
    return {**tiny, "num_iterations": STEPS}


def options(fields):
    return [f"--{name}={value}" for name, value in fields.items()]


def run_profile(fields, processes=1):
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return subprocess.run(
        [*command, str(ROOT / "train_gpt2.py"), "--profile", *options(fields)],
        capture_output=True, text=True, timeout=120, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def printed_table(text):
    """Return {part: (ms, %, % of peak)}, floats or None for n/a, from what was printed."""
    rows = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \| ([\d.]+) \| (\S+) \|$", text, re.M)
    return {part: (float(ms), float(share), None if of_peak == "n/a" else float(of_peak))
            for part, ms, share, of_peak in rows}  # fmt: skip


def traced_ranges(path):
    """Return the names of the trace's ranges, each as often as it occurs."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation"]


# ---------------------------------------------------------------------------
# the clock


def test_time_goes_to_the_innermost_part_alone():
    phases = Phases(clock=iter([0, 1, 3, 6, 10, 11, 12, 17]).__next__)
    with phases("other"):  # from 0 to 17
        with phases("forward"), phases("communication"):  # from 1 to 10, from 3 to 6
            pass
        with phases("forward"):  # from 11 to 12
            pass
    assert {part: s for part, s in phases.seconds.items() if s} == {
        "other": 1 + (11 - 10) + (17 - 12), "forward": 2 + 4 + 1, "communication": 3,
    }  # fmt: skip


def test_time_before_an_exception_counts_and_the_part_ends():
    phases = Phases(clock=itertools.count().__next__)
    with pytest.raises(KeyError), phases("other"), phases("loader"):
        raise KeyError
    assert phases.seconds["loader"] == 1 and phases.seconds["other"] == 2 and not phases.stack


def test_the_device_is_awaited_before_every_look_at_the_clock():
    calls = []
    phases = Phases(lambda: calls.append("wait"), lambda: calls.append("clock") or 0.0)
    with phases("other"), phases("AdamW"):
        pass
    assert calls == ["wait", "clock"] * 4


# ---------------------------------------------------------------------------
# a profile of the tiny run


def test_the_parts_of_a_step_add_up_to_it(fields):
    run = step_profile.set_up(Hyperparameters(**fields))
    ticks = itertools.count()
    phases = Phases(clock=ticks.__next__)
    with phases.in_steps(run):
        [seconds] = step_profile.train_steps(run, 1, phases)
    assert sum(seconds.values()) == next(ticks) - 1  # of the clock, from its first tick to its last
    assert list(seconds) == list(PARTS)
    assert {part for part in PARTS if not seconds[part]} == {"communication"}
    micro_batches, batches = 6, len(run.optimizers[1].rounds[0])
    for part, times in (("forward", micro_batches), ("backward", micro_batches), ("AdamW", 1),
                        ("Newton-Schulz", batches), ("loader", 1)):  # fmt: skip
        assert seconds[part] == times, part


def test_a_profile_does_not_change_the_training(fields):
    args = Hyperparameters(**fields)
    profiled, plain = step_profile.set_up(args), step_profile.set_up(args)
    step_profile.measure(profiled)
    for step in range(STEPS):
        batch = plain.train_loader.next_batch()
        scale = train_gpt2.lr_multiplier(step, args)
        train_gpt2.train_step(plain.gpt, plain.optimizers, *batch, scale, args)
    assert plain.train_loader.position == profiled.train_loader.position
    for name, p in profiled.gpt.state_dict().items():
        assert torch.equal(p, plain.gpt.state_dict()[name]), name


def test_every_clock_is_taken_out_again(fields):
    run = step_profile.set_up(Hyperparameters(**fields))
    owners = GPT, torch.Tensor, run.optimizers[0], train_gpt2, dist, run.train_loader
    before = [dict(vars(owner)) for owner in owners]
    with pytest.raises(ZeroDivisionError), Phases().in_steps(run):
        now = [dict(vars(owner)) for owner in owners]
        assert all(a.keys() != b.keys() or any(a[k] is not b[k] for k in a)
                   for a, b in zip(before, now))  # fmt: skip
        raise ZeroDivisionError
    for owner, names in zip(owners, before):
        assert vars(owner).keys() == names.keys()
        assert all(vars(owner)[name] is value for name, value in names.items())


def test_the_clocks_compile_nothing_anew(fields, monkeypatch):
    def without_a_compiler(self, **settings):
        torch.nn.Module.compile(self, **settings, backend="eager")

    monkeypatch.setattr(GPT, "compile", without_a_compiler)
    torch._dynamo.reset()
    start = train_gpt2.describe.count_graphs()
    run = step_profile.set_up(Hyperparameters(**{**fields, "compile": True, "n_layer": 1}))
    graphs = train_gpt2.describe.count_graphs()
    assert graphs == start + 2  # of training and of validation
    step_profile.measure(run)
    assert train_gpt2.describe.count_graphs() == graphs


def test_no_figure_where_the_peak_is_unknown_and_the_right_one_where_it_is(
    fields, monkeypatch, capfd
):
    step_profile.command(options(fields))
    printed = capfd.readouterr().out
    assert "peak:unknown" in printed
    assert all(of_peak is None for _, _, of_peak in printed_table(printed).values())
    name = describe.environment(torch.device("cpu"))[1]
    monkeypatch.setitem(describe.PEAK_FLOPS, name, 1e12)
    work = step_profile.flops(step_profile.set_up(Hyperparameters(**fields)))
    work["step"] = sum(work.values())
    monkeypatch.setattr(time, "strftime", lambda form: "profile_again")  # not in the same second
    step_profile.command(options(fields))
    printed = capfd.readouterr().out
    assert "peak:1 TFLOP/s" in printed
    for part, (ms, _, of_peak) in printed_table(printed).items():
        if part in work:
            expected = 100 * work[part] / (ms / 1000) / 1e12
            assert of_peak == pytest.approx(expected, rel=0.02, abs=0.05)
        else:
            assert of_peak is None


@pytest.mark.parametrize("shape", [(16, 16), (16, 24), (64, 16), (16, 32)])
def test_the_operations_of_newton_schulz_are_those_it_does(shape):
    with FlopCounterMode(display=False) as counter:
        train_gpt2.zeropower_via_newtonschulz5(torch.randn(shape))
    assert step_profile.newton_schulz_flops(shape) == counter.get_total_flops()


def test_the_operations_of_forward_and_backward_are_those_they_do(fields):
    run = step_profile.set_up(Hyperparameters(**fields))
    args, work, tokens = run.args, step_profile.flops(run), run.train_loader.local
    inputs, targets = run.train_loader.next_batch()
    # the counter leaves out attention on the CPU: two products of T by D for each token and head
    attention = tokens * 4 * args.n_layer * args.n_embd * args.sequence_length
    with FlopCounterMode(display=False) as counter:
        loss = run.gpt(inputs, targets)
    assert work["forward"] == counter.get_total_flops() + attention
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert work["backward"] == counter.get_total_flops() + 2 * attention


# ---------------------------------------------------------------------------
# the command


@pytest.mark.parametrize("processes", [1, 2])
def test_the_command_prints_a_table_and_writes_traces(processes, fields):
    done = run_profile(fields, processes)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = printed_table(done.stdout)
    assert list(rows) == [*PARTS, "step"]
    for column in (0, 1):
        total = sum(rows[part][column] for part in PARTS)
        assert total == pytest.approx(rows["step"][column], abs=0.05 * len(PARTS))
    assert (rows["communication"][0] > 0) == (processes == 2)
    assert ("without communication: " in done.stdout) == (processes == 2)
    assert all(rows[part][0] > 0 for part in PARTS if part != "communication")
    assert re.search(r"^median step: [\d.]+ ms in training, [\d.]+ with parts timed, [\d.]+ under",
                     done.stdout, re.M)  # fmt: skip
    first = Path(re.search(r"perfetto.dev: (\S+)$", done.stdout, re.M)[1])
    assert list(Path(fields["log_dir"]).iterdir()) == [first.parent]  # no log, no checkpoint
    traces = sorted(first.parent.iterdir())
    assert [path.name for path in traces] == [f"trace_rank{r}.json.gz" for r in range(processes)]
    for path in traces:
        names = traced_ranges(path)
        assert names.count("step") == names.count("loader") == TRACED
        assert {part for part in PARTS if part not in names} == (
            {"communication"} if processes == 1 else set()
        )


FAULTS = {
    "an unknown argument": ({"batchsize": 3}, "unknown argument '--batchsize=3': did you mean"),
    "too few steps": ({"num_iterations": 12}, "num_iterations=12 must be at least 13, the steps"),
    "too little data": ({"num_iterations": 99}, "99 steps need 19,009 tokens, but"),
    "a bad value": ({"n_head": 5}, "n_embd=16 must be a multiple of 2 * n_head=10"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_is_a_sentence_and_exit_status_1(fault, fields, capfd):
    changes, sentence = FAULTS[fault]
    with pytest.raises(SystemExit) as exit:
        step_profile.command(options({**fields, **changes}))
    printed = capfd.readouterr()
    assert exit.value.code == 1 and not printed.out and not Path(fields["log_dir"]).exists()
    assert printed.err.startswith(f"train_gpt2.py: {sentence}") and printed.err.count("\n") == 1


def test_the_command_fails_as_training_does(fields):
    done = run_profile({**fields, "batchsize": 3})
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith("train_gpt2.py: unknown argument '--batchsize=3': did you mean")
