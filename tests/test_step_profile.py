"""The profile: parts that add up, a trace that names them, a training that does not notice."""

import gzip
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import step_profile
import torch
import torch.distributed as dist
from conftest import ROOT, both_dtypes, run_forked
from runlog import PEAK_FLOPS
from step_profile import PLAIN, TIMED, TRACED, Phases
from torch.utils.flop_counter import FlopCounterMode

import train_gpt2
from train_gpt2 import GPT, Hyperparameters

SCRIPT = ROOT / "records" / "tools" / "step_profile.py"
STEPS = PLAIN + TIMED + TRACED
RANGES = ["forward", "backward", "AdamW", "Muon", "Newton-Schulz", "communication", "loader"]
PARTS = [*RANGES, "other"]


@pytest.fixture
def fields(tiny):
    return {**tiny, "num_iterations": STEPS}


def options(fields):
    return [f"--{name}={value}" for name, value in fields.items()]


def printed_table(text):
    """Return {part: (ms, %, % of peak)}, floats or None for n/a, from what was printed."""
    rows = {}
    for part, ms, share, of_peak in re.findall(
        r"^\| ([\w-]+) \| ([\d.]+) \| ([\d.]+) \| (\S+) \|$", text, re.M
    ):
        rows[part] = float(ms), float(share), None if of_peak == "n/a" else float(of_peak)
    return rows


def printed_kernels(text):
    """Return [(name, calls a step, ms a step, %)] of the second table."""
    rows = re.findall(r"^\| `(.+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.M)
    return [(name, *map(float, numbers)) for name, *numbers in rows]


def traced_ranges(path):
    """Return the names of the trace's ranges, each as often as it occurs."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation"]


class Plain(torch.optim.SGD):
    """Another optimizer in the place of Muon."""


@pytest.fixture
def other_optimizers(monkeypatch):
    def build_optimizers(gpt, args, rank, world_size):
        return [
            Plain(gpt.lm_head.parameters(), lr=0.01),
            torch.optim.AdamW(list(gpt.h[0].parameters()), lr=0.001),
            torch.optim.AdamW(list(gpt.h[1:].parameters()), lr=0.001),
        ]

    monkeypatch.setattr(train_gpt2, "build_optimizers", build_optimizers)


# ---- the clock -----------------------------------------------------------------------------------
def test_time_goes_to_the_innermost_part_alone():
    phases = Phases(clock=iter([0, 1, 3, 6, 10, 11, 12, 17]).__next__)
    with phases("other"):  # from 0 to 17
        with phases("forward"), phases("communication"):  # from 1 to 10, from 3 to 6
            pass
        with phases("forward"):  # from 11 to 12
            pass
    other = 1 + (11 - 10) + (17 - 12)
    assert phases.seconds == {"other": other, "forward": 2 + 4 + 1, "communication": 3}


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


# ---- a profile of the tiny run -------------------------------------------------------------------
def ticks_of_a_step(run):
    """Return {part: ticks} of a step by a clock that ticks when it is looked at, and their sum."""
    ticks = itertools.count()
    phases = Phases(clock=ticks.__next__)
    with phases.in_steps(run):
        [seconds] = step_profile.train_steps(run, 1, phases)
    return seconds, next(ticks) - 1  # from its first tick to its last


@both_dtypes
def test_the_parts_of_a_step_add_up_to_it(dtype, fields):
    run = step_profile.set_up(Hyperparameters(**{**fields, "dtype": dtype}))
    seconds, ticks = ticks_of_a_step(run)
    assert sum(seconds.values()) == ticks
    assert run.parts == PARTS and set(PARTS) - set(seconds) == {"communication"}
    micro_batches, stacks = 6, len(train_gpt2.stacks_of(train_gpt2.params_of(run.optimizers[1])))
    assert seconds["forward"] == seconds["backward"] == micro_batches
    assert seconds["Newton-Schulz"] == stacks == 3  # of 8 square matrices, 2 wide, 2 tall ones
    assert seconds["AdamW"] == seconds["loader"] == 1
    assert seconds["Muon"] == 1 + stacks  # before, between and after Newton-Schulz


def test_any_optimizers_have_parts_of_their_own(other_optimizers, fields):
    run = step_profile.set_up(Hyperparameters(**fields))
    seconds, ticks = ticks_of_a_step(run)
    assert run.parts[2:5] == ["Plain", "AdamW", "Newton-Schulz"]
    assert sum(seconds.values()) == ticks
    assert (seconds["Plain"], seconds["AdamW"], seconds["Newton-Schulz"]) == (1, 2, 0)
    assert step_profile.flops(run)["Newton-Schulz"] == 0


def test_a_step_asks_for_signals_as_training_does(fields):
    asked = []

    class Stop(train_gpt2.StopRequest):
        def check(self):
            asked.append("micro-batch")
            super().check()

        def check_ranks(self, failure=""):
            asked.append("step")
            super().check_ranks(failure)

    run = step_profile.set_up(Hyperparameters(**fields), Stop())
    step_profile.train_steps(run, 1, Phases())
    assert asked == ["step"] + ["micro-batch"] * 6
    run.stop.on_signal(signal.SIGTERM, None)
    with pytest.raises(train_gpt2.UserError, match="stopped by a signal"):
        step_profile.train_steps(run, 1, Phases())


@both_dtypes
def test_a_profile_does_not_change_the_training(dtype, fields):
    args = Hyperparameters(**{**fields, "dtype": dtype})
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
        for a, b in zip(before, now):
            assert a.keys() != b.keys() or any(a[k] is not b[k] for k in a)
        raise ZeroDivisionError
    for owner, names in zip(owners, before):
        assert vars(owner).keys() == names.keys()
        assert all(vars(owner)[name] is value for name, value in names.items())


def test_the_clocks_compile_nothing_anew(fields, monkeypatch):
    def without_a_compiler(self, **settings):
        torch.nn.Module.compile(self, **settings, backend="eager")

    monkeypatch.setattr(GPT, "compile", without_a_compiler)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    start = counters["unique_graphs"]
    run = step_profile.set_up(Hyperparameters(**{**fields, "compile": True, "n_layer": 1}))
    assert counters["unique_graphs"] == start + 2  # of training and of validation
    step_profile.measure(run)
    assert counters["unique_graphs"] == start + 2


@both_dtypes
def test_the_right_figure_where_the_peak_is_known(dtype, fields, monkeypatch, capfd):
    """It is that of bf16 products; of float32 ones none is known."""
    args = Hyperparameters(**{**fields, "dtype": dtype})
    monkeypatch.setitem(PEAK_FLOPS, train_gpt2.device_name(torch.device("cpu")), 1e12)
    work = step_profile.flops(step_profile.set_up(args))
    work["step"] = sum(work.values())
    step_profile.main(args)
    printed = capfd.readouterr().out
    assert ("peak:1 TFLOP/s" in printed) == (dtype == "bfloat16")
    for part, (ms, _, of_peak) in printed_table(printed).items():
        if part in work and dtype == "bfloat16":
            expected = 100 * work[part] / (ms / 1000) / 1e12
            assert of_peak == pytest.approx(expected, rel=0.02, abs=0.05)
        else:
            assert of_peak is None


def test_the_operations_of_forward_and_backward_are_those_they_do(fields):
    run = step_profile.set_up(Hyperparameters(**fields))
    work = step_profile.flops(run)
    inputs, targets = run.train_loader.read_batch()
    with FlopCounterMode(display=False) as counter:
        loss = run.gpt(inputs, targets)
    assert work["forward"] == counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert work["backward"] == counter.get_total_flops()


def test_fused_kernels_of_a_cpu_are_compiled_with_names(fields, monkeypatch):
    seen = []

    def warm_up(gpt, args, val_loader):
        seen.append(step_profile.inductor_config.cpp.enable_kernel_profile)

    monkeypatch.setattr(train_gpt2, "warm_up", warm_up)
    step_profile.set_up(Hyperparameters(**fields))
    assert seen == [True] and not step_profile.inductor_config.cpp.enable_kernel_profile


# ---- the command --------------------------------------------------------------------------------
def run_sh(fields):
    return subprocess.run(
        ["bash", str(ROOT / "run.sh"), "profile", *options(fields)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NPROC": "1", "PYTHON": sys.executable},
    )


@pytest.mark.parametrize("processes", [1, 2])
def test_the_command_prints_tables_and_writes_traces(processes, fields):
    done = run_sh(fields) if processes == 1 else run_forked(fields, processes, script=SCRIPT)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = printed_table(done.stdout)
    parts = list(PARTS)
    if processes == 1:  # of run.sh, whose preset has a table of n-grams
        parts.insert(PARTS.index("Muon") + 1, "Adagrad")
    assert list(rows) == [*parts, "step"]
    for column in (0, 1):
        total = sum(rows[part][column] for part in parts)
        assert total == pytest.approx(rows["step"][column], abs=0.05 * len(parts))
    assert (rows["communication"][0] > 0) == (processes == 2)
    assert ("without communication: " in done.stdout) == (processes == 2)
    assert all(rows[part][0] > 0 for part in parts if part != "communication")
    assert "peak:unknown" in done.stdout  # of a CPU
    assert all(of_peak is None for _, _, of_peak in rows.values())
    times = r"^median step: [\d.]+ ms in training, [\d.]+ with parts timed, [\d.]+ under"
    assert len(re.findall(times, done.stdout, re.M)) == 1  # rank 0 alone prints
    kernels = printed_kernels(done.stdout)
    assert_most_expensive(kernels)
    names = [name for name, *_ in kernels]
    assert "c10d::allreduce_" in names or processes == 1
    first = Path(re.search(r"perfetto.dev: (\S+)$", done.stdout, re.M)[1])
    assert list(Path(fields["log_dir"]).iterdir()) == [first.parent]  # no log, no checkpoint
    traces = sorted(first.parent.iterdir())
    assert [path.name for path in traces] == [f"trace_rank{r}.json.gz" for r in range(processes)]
    for path in traces:
        ranges = traced_ranges(path)
        assert ranges.count("step") == ranges.count("loader") == TRACED
        missing = {part for part in parts if part not in ranges}
        assert missing == ({"communication"} if processes == 1 else set())


def assert_most_expensive(kernels):
    """Ten operators, no ranges of ours, by the time that they take themselves."""
    assert len(kernels) == 10
    times = [ms for _, _, ms, _ in kernels]
    assert times == sorted(times, reverse=True)
    assert sum(share for *_, share in kernels) <= 100.5
    names = {name for name, *_ in kernels}
    assert len(names) == 10 and not names & {*PARTS, "step"}
    assert not any("Optimizer." in name for name in names)


FAULTS = {
    "an unknown argument": ({"batchsize": 3}, "unrecognized arguments: --batchsize=3. --help"),
    "too few steps": ({"num_iterations": 12}, "num_iterations=12: a profile takes 13 steps"),
    "too little data": ({"num_iterations": 99}, "{train_files!r} has enough tokens for 15 steps"),
    "a bad value": ({"n_head": 5}, "n_embd=16 must be a multiple of 2 * n_head = 10"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_is_a_sentence_and_exit_status_1(fault, fields, monkeypatch, capfd):
    monkeypatch.setattr(train_gpt2.StopRequest, "catch_signals", lambda self: None)
    changes, sentence = FAULTS[fault]
    with pytest.raises(SystemExit) as exit:
        step_profile.command(options({**fields, **changes}))
    printed = capfd.readouterr()
    assert exit.value.code == 1 and not printed.out and not Path(fields["log_dir"]).exists()
    said = f"train_gpt2.py: {sentence.format(**fields)}"
    assert printed.err.startswith(said) and printed.err.count("\n") == 1


def test_many_processes_tell_a_mistake_once(fields):
    done = run_forked({**fields, "num_iterations": 12}, 2, script=SCRIPT)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.count("num_iterations=12: a profile takes 13 steps") == 1


def test_kernels_of_a_gpu_are_classed_as_the_plan_does():
    names = {
        "triton_red_fused_0": "element-wise",
        "nvjet_hsh_128x256": "products",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop": "attention",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL": "collectives",
        "vectorized_elementwise_kernel": "other",
    }
    for name, kind in names.items():
        assert step_profile.kernel_class(name) == kind
