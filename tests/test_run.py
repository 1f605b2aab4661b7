"""Settings, error messages, the training step, the log, and results on any number of ranks."""

import dataclasses
import hashlib
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import (
    ROOT,
    SCRIPT,
    both_dtypes,
    checkpoints,
    faulty_script,
    last_bits,
    launcher,
    losses,
    options,
    run_forked,
    run_here,
    run_ranks,
    run_subprocess,
    trained,
    validations,
    write_shard,
)

import train_gpt2
from train_gpt2 import (
    GPT,
    PRESETS,
    Hyperparameters,
    UserError,
    build_optimizers,
    parse_args,
    schedule,
)

CPU = torch.device("cpu")
SPIN_VARIABLES = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"


# ---- Settings -----------------------------------------------------------------------------------
def test_defaults_are_those_of_record_7():
    args = Hyperparameters()
    assert (args.vocab_size, args.n_layer, args.n_head, args.n_embd) == (50304, 12, 6, 768)
    assert (args.batch_size, args.sequence_length, args.num_iterations) == (512, 1024, 5100)
    assert (args.learning_rate, args.muon_learning_rate) == (3.6e-3, 3.6e-4)
    assert (args.muon_momentum, args.warmdown_iters) == (0.95, 1450)
    assert (args.val_loss_every, args.val_tokens) == (125, 10485760)
    with torch.device("meta"):
        adamw, muon = build_optimizers(GPT(args), args, 0, 1)
    assert (adamw.defaults["betas"], adamw.defaults["weight_decay"]) == ((0.9, 0.95), 0)
    assert (muon.defaults["momentum"], muon.defaults["weight_decay"]) == (0.95, 0)


def test_the_preset_cpu_is_the_cpu_record():
    path = ROOT / "records" / "2026-11-25_Modern_Model" / "cpu" / "seed1.txt"
    logged = dict(re.findall(r"^hyperparameter (\w+)=(.*)$", path.read_text(), re.M))
    args = dataclasses.asdict(parse_args(["--preset=cpu"]))
    # The record was validated more often, which does not change the training.
    same = args.keys() & logged.keys() - {"run_id", "seed", "log_dir", "val_loss_every"}
    assert {name: repr(args[name]) for name in same} == {name: logged[name] for name in same}
    assert len(same) > 20


def test_the_learning_rate_is_constant_then_decays_linearly():
    args = Hyperparameters(num_iterations=20, warmdown_iters=10)
    scales = [schedule(step, args).lr_scale for step in range(20)]
    assert scales == pytest.approx([1] * 10 + [1 - i / 10 for i in range(10)])
    assert {schedule(step, args).momentum for step in range(20)} == {0.95}
    assert schedule(4, Hyperparameters(num_iterations=5, warmdown_iters=0)).lr_scale == 1


def test_any_field_can_be_given_on_the_command_line():
    values = {"n_layer": 3, "learning_rate": 0.5, "train_files": "a=b", "compile": False}
    assert parse_args(options(values)) == Hyperparameters(**values)
    assert parse_args(options(dataclasses.asdict(Hyperparameters()))) == Hyperparameters()


def test_presets_are_settings_that_others_override():
    assert parse_args(["--preset=record7"]) == parse_args([]) == Hyperparameters()
    for name, (_, overrides) in PRESETS.items():
        assert parse_args([f"--preset={name}"]) == Hyperparameters(**overrides)
        assert parse_args(["--n_layer=20", f"--preset={name}"]).n_layer == 20
    assert parse_args(["--preset=text", "--preset=cpu"]) == parse_args(["--preset", "cpu"])


@pytest.mark.parametrize(
    "manifest, given, expected",
    [
        ('{"vocab_size": 257}', [], 257),
        ('{"vocab_size": 50257}', ["--preset=text"], 50304),
        ('{"vocab_size": 257}', ["--vocab_size=300"], 300),
        ("{}", ["--preset=text"], 257),
        (None, [], 50304),
        ("[]", [], None),
        ("no json", [], None),
        ('{"vocab_size": "x"}', [], None),
        ('{"vocab_size": 1e999}', [], None),
    ],
)
def test_the_vocabulary_size_comes_from_the_manifest_of_packed_data(
    manifest, given, expected, tmp_path
):
    if manifest:
        (tmp_path / "manifest.json").write_text(manifest)
    argv = [*given, f"--train_files={tmp_path}/train_*.bin"]
    if expected is None:
        with pytest.raises(UserError, match=r"manifest\.json is damaged"):
            parse_args(argv)
    else:
        assert parse_args(argv).vocab_size == expected


def test_the_target_loss_applies_only_to_the_data_of_the_preset(tiny, capsys):
    for preset, target in ("record7", 3.28), ("cpu", 1.32):
        assert parse_args([f"--preset={preset}"]).target_val_loss == target
        other = [f"--preset={preset}", "--val_files=other/*.bin"]
        assert parse_args(other).target_val_loss == 0
        assert parse_args([*other, "--target_val_loss=2"]).target_val_loss == 2
    loss = run_here(tiny, target_val_loss=0.0)
    assert capsys.readouterr().out.endswith(f"\nresult val_loss:{loss:.4f}\n")


@pytest.mark.parametrize(
    "argument, sentence",
    [
        ("--batch_siz=8", "unrecognized arguments: --batch_siz=8"),  # no abbreviations
        ("batch_size=8", "unrecognized arguments: batch_size=8"),
        ("--batch_size=1.5", "invalid int value: '1.5'"),
        ("--compile=maybe", "invalid boolean value: 'maybe'"),
        ("--device=tpu", "invalid choice: 'tpu'"),
        ("--batch_size=0", "batch_size=0 must be a number between 1 and"),
        ("--seed=9999999999999999999", "must be a number between 0 and"),
        ("--learning_rate=nan", "learning_rate=nan must be a number"),
        ("--muon_momentum=5", "must be a number between 0 and 0.9999"),
        ("--key_shift=1", "key_shift can only be set with --model=modern"),
        ("--final_lr=2", "final_lr=2.0 must be a number between 0 and 1"),
        ("--key_shift=1024", "key_shift=1024 must be less than sequence_length=1024"),
        ("--n_head=5", "n_embd=768 must be a multiple of 2 * n_head = 10"),
        ("--run_id=..", "run_id='..' may contain only letters"),
        ("--run_id=a/b", "run_id='a/b' may contain only letters"),
        ("--resume=auto", "--resume=auto needs --run_id"),
    ],
)
def test_invalid_settings_are_rejected(argument, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        parse_args([argument])


def test_a_setting_of_an_unsupported_type_or_unknown_name_is_named(monkeypatch):
    """As a user would add it, also if only the help is wanted."""
    n_layer = Hyperparameters.__dataclass_fields__["n_layer"]
    for kind in list, int | None:
        monkeypatch.setattr(n_layer, "type", kind)
        with pytest.raises(UserError, match="n_layer has the type"):
            train_gpt2.parse_args(["--help"])
    monkeypatch.undo()
    monkeypatch.setitem(train_gpt2.PRESETS, "mine", ("", {"n_layers": 2}))
    with pytest.raises(UserError, match=r"the preset mine sets .*n_layers"):
        parse_args(["--preset=mine"])


def test_a_new_setting_needs_only_a_type_and_a_default(tiny, tmp_path):
    """It is parsed, logged, saved and compared on resume, even without a help text.

    The log holds the running source even if the file is edited before the log is opened.
    """
    copy = tmp_path / "copy.py"
    source = SCRIPT.read_text().replace(
        "    # fmt: on\n", "    my_knob: float = 1.0\n    # fmt: on\n"
    )
    copy.write_text(source)
    edit = f"""
log_header = train_gpt2.log_header

def edit_and_log(run):
    Path({str(copy)!r}).write_text("# edited")
    log_header(run)

train_gpt2.log_header = edit_and_log"""
    fields = {**tiny, "run_id": "knob", "my_knob": 2.5, "save_every": 3}
    trained(fields, script=launcher(tmp_path, edit, copy))
    assert copy.read_text() == "# edited"
    log = (tmp_path / "logs" / "knob.txt").read_text()
    assert log.startswith(source) and "\nhyperparameter my_knob=2.5\n" in log
    copy.write_text(source)
    path = tmp_path / "logs" / "knob" / "state_step0000000003.pt"
    done = run_forked({**tiny, "resume": path, "run_id": "other"}, script=copy)
    assert done.returncode == 1 and "pass --my_knob=2.5" in done.stderr


REFUSALS = {
    "val_tokens": ({"val_tokens": 100}, "val_tokens=100 must be a multiple of 16 up to 384"),
    "too few val tokens": ({"val_tokens": 400}, "must be a multiple of 16 up to 384"),
    "no val tokens": (
        {"sequence_length": 512, "batch_size": 1, "num_iterations": 1},
        "do not fit into",
    ),
    "too few train tokens": ({"num_iterations": 16}, "has enough tokens for 15 steps: add"),
    "no step": ({"sequence_length": 2**20, "allow_repeat": True}, "has enough tokens for 0 steps"),
    "missing data": ({"train_files": "nowhere/*.bin"}, "run data/fineweb.py or data/pack.py"),
    "same shards": ({"val_files": "TRAIN"}, "train_files and val_files both match the same shard"),
    "ids beyond the vocabulary": ({"vocab_size": 32}, "but vocab_size=32"),
    "no launcher": ({"RANK": "0"}, "WORLD_SIZE"),
    "srun without torchrun": ({"SLURM_STEP_NUM_TASKS": "4"}, "RANK is not set: start them with"),
    "not a number": ({"SLURM_STEP_NUM_TASKS": "4x"}, "SLURM_STEP_NUM_TASKS=4x must be a number"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_an_impossible_run_is_rejected_before_it_starts(case, tiny, monkeypatch):
    changes, sentence = REFUSALS[case]
    for name, value in changes.items():
        if name.isupper():
            monkeypatch.setenv(name, value)
        else:
            tiny[name] = tiny["train_files"] if value == "TRAIN" else value
    with pytest.raises(UserError, match=re.escape(sentence)):
        train_gpt2.main(Hyperparameters(**tiny))
    assert not os.path.exists(tiny["log_dir"])


def test_shards_of_different_encodings_are_rejected(tiny, tmp_path):
    """Their manifests tell, even if both encodings have as many ids."""
    for kind in "train", "val":
        (tmp_path / kind).mkdir()
        for path in tmp_path.glob(f"{kind}_*.bin"):
            path.rename(tmp_path / kind / path.name)
        tiny[f"{kind}_files"] = str(tmp_path / kind / "*.bin")
    (tmp_path / "train" / "manifest.json").write_text('{"encoding": "bytes"}')
    run_here(tiny, run_id="bytes")
    (tmp_path / "val" / "manifest.json").write_text('{"encoding": "other"}')
    with pytest.raises(UserError, match="the encoding bytes, but val_files other"):
        run_here(tiny)
    (tmp_path / "val" / "manifest.json").unlink()
    (tmp_path / "train" / "manifest.json").write_text('{"encoding": "other"}')
    with pytest.raises(UserError, match=r"encoding other, but --init=.*model\.pt bytes"):
        run_here(tiny, init=f"{tiny['log_dir']}/bytes/model.pt")


def test_several_ranks_print_an_error_only_once(tiny):
    done = run_forked({**tiny, "resume": "none.pt"}, 2)
    assert done.returncode == 1
    assert done.stdout.count("none.pt is not a complete checkpoint\n") == 1
    assert re.fullmatch(r"train_gpt2\.py: no checkpoint is complete.*\n", done.stderr)
    done = run_subprocess({**tiny, "val_tokens": 100}, 2)
    assert done.returncode == 1 and done.stdout == ""
    assert len(re.findall(r"^train_gpt2.py: val_tokens=100 must", done.stderr, re.M)) == 1
    assert "UserError" in done.stderr.split("Root Cause")[1], "torchrun's summary says why, too"


@pytest.mark.parametrize(
    "device, gpus, usable, processes, expected",
    [
        ("cpu", 2, False, 4, torch.device("cpu")),
        ("auto", 0, False, 1, torch.device("cpu")),
        ("auto", 2, True, 2, torch.device("cuda", 1)),
        ("cuda", 2, True, 2, torch.device("cuda", 1)),
        ("cuda", 0, False, 1, "each of 1 processes one of 0 GPUs"),
        ("auto", 1, False, 1, "check the driver"),
        ("cuda", 1, True, 2, "each of 2 processes one of 1 GPUs"),
    ],
)
def test_each_process_picks_its_gpu(device, gpus, usable, processes, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", f"{processes}")
    args = Hyperparameters(device=device)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            train_gpt2.choose_device(args)
    else:
        assert train_gpt2.choose_device(args) == expected


def test_the_process_group_is_bound_to_the_gpu(tiny, monkeypatch):
    """CUDA and the process group are mocked."""
    asked = {}
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(train_gpt2, "choose_device", lambda args: gpu)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.update(set=device))
    monkeypatch.setattr(dist, "rendezvous", lambda *a, **n: iter([(dist.HashStore(), 1, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **n: asked.update(n, backend=a[0]))
    monkeypatch.setenv("RANK", "1")
    *_, chosen = train_gpt2.join_processes(Hyperparameters(**tiny))
    assert chosen == asked["set"] == asked["device_id"] == gpu
    assert asked["backend"] == "cpu:gloo,cuda:nccl"


# ---- Training -----------------------------------------------------------------------------------
def tiny_run(settings, rank=0, world_size=1, **changes):
    """Return a Run, without a process group."""
    args = Hyperparameters(**{**settings, **changes})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt2, "join_processes", lambda _: (rank, world_size, CPU))
        patch.setattr(train_gpt2, "all_gather_objects", lambda value: [value])
        return train_gpt2.set_up(args, train_gpt2.StopRequest())


def gradients_of_a_step(rank, world_size, settings):
    """Return the loss, the all-reduced gradients and the sizes of all all-reduced tensors."""
    sizes = []
    all_reduce = dist.all_reduce

    def counted(tensor, *arguments, **options):
        sizes.append(tensor.numel())
        return all_reduce(tensor, *arguments, **options)

    run = tiny_run(settings, rank, world_size)
    inputs, targets, _ = run.train_loader.batch(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counted)
        loss = train_gpt2.train_step(run.model, [], inputs, targets, run.args)
    return loss, {name: p.grad for name, p in run.model.named_parameters()}, sizes


@both_dtypes
@pytest.mark.parametrize("micro_batch", [1, 6])
def test_gradients_are_synchronized_once_a_step(micro_batch, dtype, tiny, tmp_path):
    settings = {**tiny, "dtype": dtype, "device_batch_size": micro_batch}
    loss_alone, alone, _ = gradients_of_a_step(0, 1, settings)
    for loss, gradients, sizes in run_ranks(gradients_of_a_step, 2, tmp_path / "ranks", settings):
        # one all-reduce for all gradients, one for the loss
        assert sizes == [sum(g.numel() for g in gradients.values()), 1]
        torch.testing.assert_close(loss, loss_alone, rtol=0, atol=2e-3)
        for name, g in gradients.items():
            tolerance = {"float32": 1e-5, "bfloat16": 0.02}[dtype]
            assert (g - alone[name]).norm() <= tolerance * alone[name].norm(), name


@pytest.mark.parametrize("kind, length, fused", [("cpu", 512, 0), ("cpu", 513, 1), ("cuda", 9, 1)])
def test_backends_are_configured_only_on_a_cpu(kind, length, fused):
    """A CPU uses unfused attention for short sequences; a GPU keeps PyTorch's settings."""
    train_gpt2.configure_backend(Hyperparameters(sequence_length=length), torch.device(kind))
    on_cpu = kind == "cpu"
    assert torch.backends.cuda.flash_sdp_enabled() == fused
    assert torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed() == on_cpu
    assert torch._functorch.config.activation_memory_budget == (0.7 if on_cpu else 1.0)
    assert torch.are_deterministic_algorithms_enabled() == on_cpu
    assert torch.utils.deterministic.fill_uninitialized_memory != on_cpu


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_gpu_that_only_emulates_bfloat16_trains_in_float32(has_bf16, monkeypatch):
    def supported(including_emulation=True):
        return including_emulation or has_bf16

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    expected = torch.bfloat16 if has_bf16 else torch.float32
    assert train_gpt2.choose_dtype(Hyperparameters(), torch.device("cuda")) == expected


def test_macos_has_no_proc_and_counts_memory_in_bytes(monkeypatch):
    usage = SimpleNamespace(ru_maxrss=3 * 2**30)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=FileNotFoundError))
    monkeypatch.setattr(train_gpt2.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(train_gpt2.resource, "getrusage", lambda who: usage)
    assert train_gpt2.device_name(torch.device("cpu")) == "arm64"
    assert train_gpt2.peak_memory(torch.device("cpu")) == 3072


def test_compiling_and_an_unfinished_step_leave_no_trace(tiny):
    run = tiny_run(tiny)
    before = {name: p.clone() for name, p in run.model.state_dict().items()}
    random_state = torch.get_rng_state()
    train_gpt2.compile_model(run.model, run.args, *train_gpt2.validation_batch(run, 0))
    assert all(p.grad is None for p in run.model.parameters())
    inputs, targets, _ = run.train_loader.batch(0)
    check = Mock(side_effect=[None, None, None, train_gpt2.StopTraining])
    with pytest.raises(train_gpt2.StopTraining):
        train_gpt2.train_step(run.model, run.optimizers, inputs, targets, run.args, check)
    assert all(torch.equal(p, before[name]) for name, p in run.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(optimizer.state for optimizer in run.optimizers)


@both_dtypes
@pytest.mark.parametrize("T", [16, 1])
def test_validation_counts_exactly_val_tokens(T, dtype, tiny):
    run = tiny_run({**tiny, "sequence_length": T}, dtype=dtype)
    tokens = torch.from_numpy(run.validation_tokens.astype("int64"))
    with torch.no_grad():
        expected = run.model(tokens[:-1].view(-1, T), tokens[1:].view(-1, T)).item()
    assert run.args.val_tokens == 16 * 19  # with T = 16, a prime number of sequences
    for micro_batch in 1, 4, 19, 24, 50:
        run.micro_batch = micro_batch
        assert train_gpt2.evaluate(run) == pytest.approx(expected, abs=2e-3)


def test_every_parameter_must_have_one_optimizer(tiny):
    args = Hyperparameters(**tiny)
    gpt = GPT(args)
    gpt.h[0].attn.c_q.weight = gpt.h[1].attn.c_q.weight  # a shared parameter counts once
    build_optimizers(gpt, args, 0, 1)
    gpt = GPT(args)
    gpt.h.parameters = lambda: [*gpt.h[0].parameters(), gpt.lm_head.weight.detach()]
    with pytest.raises(UserError, match="exactly one optimizer"):
        build_optimizers(gpt, args, 0, 1)


# ---- The whole run and its log ------------------------------------------------------------------
# Results of the settings `tiny` with any number of processes and any micro-batches. CPUs may round
# losses differently, but all compute the same hashes.
GOLDEN_HASHES = ["000000000000", "02a3a7c71f8e", "09dd09b6dfb8"]
GOLDEN_LOSSES = {"float32": [4.5422, 3.8337, 3.4781], "bfloat16": [4.5417, 3.8354, 3.4821]}
TOLERANCE = {"float32": 0.002, "bfloat16": 0.02}


def check_golden(text, dtype):
    rows = validations(text)
    assert [(step, data_hash) for step, _, data_hash in rows] == list(zip((0, 3, 6), GOLDEN_HASHES))
    values = [loss for _, loss, _ in rows]
    assert values == pytest.approx(GOLDEN_LOSSES[dtype], abs=TOLERANCE[dtype])


@both_dtypes
def test_log_and_weights(dtype, tiny, tmp_path, capsys):
    settings = Hyperparameters(**{**tiny, "run_id": "one", "dtype": dtype})
    val_loss = train_gpt2.main(settings)
    text = Path(tiny["log_dir"], "one.txt").read_text()
    header = train_gpt2.SOURCE + "\n"
    for name, value in dataclasses.asdict(settings).items():
        header += f"hyperparameter {name}={value!r}\n"
    assert text.startswith(header)
    shown = text.removeprefix(header)
    assert capsys.readouterr().out == shown  # all but source and settings
    tokens = np.fromfile(tmp_path / "val_0.bin", np.uint16)[512:][: tiny["val_tokens"] + 1]
    val_hash = hashlib.sha256(tokens).hexdigest()[:16]
    for pattern in (
        r"torch:\S+ commit:([0-9a-f]{40}(-dirty)?)?",
        rf"device:.* processes:1 threads:\d+ products:torch\.{dtype}",
        f"train_tokens:3000 val_hash:{val_hash} micro_batch:2",
        "AdamW parameters:1024\nMuon parameters:6144",
        r"compile:[\d.]+s validation:[\d.]+s train:[\d.]+s",
        r"tokens/s:\d+ peak_memory:\d+MiB graphs:\d+",
        rf"weights: {tiny['log_dir']}/one/model\.pt; .*",
        f"result val_loss:{val_loss:.4f} target:3.28\n\\Z",
    ):
        assert re.search(f"^{pattern}$", shown, re.M), pattern
    check_golden(shown, dtype)
    line = r"^step:(\d+)/6 train_loss:\d+\.\d{4} train_time:(\d+)ms step_avg:(\d+\.\d\d)ms$"
    steps = [(int(step), int(ms), float(avg)) for step, ms, avg in re.findall(line, shown, re.M)]
    assert [step for step, _, _ in steps] == [1, 2, 3, 4, 5, 6]
    assert [ms for _, ms, _ in steps] == sorted(ms for _, ms, _ in steps)
    for step, ms, average in steps:
        assert average == pytest.approx(ms / step, abs=1)
    rates = [float(rate) for rate in re.findall(r" val_loss:.* lr:(\S+)$", shown, re.M)]
    expected = [0.01 * schedule(step, settings).lr_scale for step in (0, 3, 6)]
    assert rates == pytest.approx(expected, rel=0.01)
    weights = train_gpt2.read_pt(tmp_path / "logs" / "one" / "model.pt")
    assert (weights["run_id"], weights["step"], weights["val_loss"]) == ("one", 6, val_loss)
    assert (weights["val_hash"], weights["matmul_dtype"]) == (val_hash, f"torch.{dtype}")
    assert all(p.dtype == torch.float32 for p in weights["model"].values())
    run = tiny_run(tiny, dtype=dtype)
    run.model.load_state_dict(weights["model"])
    assert train_gpt2.evaluate(run) == pytest.approx(val_loss, abs=2e-3)


def test_print_every_limits_the_terminal_but_not_the_log(tiny, tmp_path, capsys):
    """The log has all steps, and the terminal all validations."""
    run_here(tiny, print_every=1000.0, run_id="quiet")
    shown, log = capsys.readouterr().out, (tmp_path / "logs" / "quiet.txt").read_text()
    assert [(step, name) for step, name, _ in losses(shown)] == [
        ("0", "val_loss"), ("1", "train_loss"), ("3", "val_loss"), ("6", "val_loss")
    ]  # fmt: skip
    assert [step for step, name, _ in losses(log) if name == "train_loss"] == list("123456")
    assert len(re.findall("^result ", log, re.M)) == 1  # as README greps for it


def test_a_long_phase_says_that_it_goes_on(tmp_path, capsys):
    log = train_gpt2.Log(tmp_path / "log.txt", 0, 1)
    with pytest.raises(ZeroDivisionError), log.heartbeat("dividing", interval=0.01):
        time.sleep(0.5)
        raise ZeroDivisionError
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 1 and all(re.fullmatch("still dividing after [0-9] s", x) for x in lines)
    assert not log.unwritten
    with train_gpt2.Log(tmp_path / "log.txt", 1, 1).heartbeat("dividing", interval=0.01):
        time.sleep(0.1)
    assert not capsys.readouterr().out  # only rank 0 prints


def test_a_busy_machine_is_reported(tiny, capsys, monkeypatch):
    cores = os.cpu_count()
    monkeypatch.setattr(os, "getloadavg", lambda: (cores, 0.0, 0.0))
    run_here(tiny)
    assert f"the last minute is {cores}.0 on {cores} cores: if other" in capsys.readouterr().out
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 9.0, 9.0))
    run_here(tiny)
    assert "the last minute" not in capsys.readouterr().out


def test_gomp_spincount_is_set_unless_the_user_sets_a_policy(tmp_path):
    code = "import os; print(os.environ.get('GOMP_SPINCOUNT')); os._exit(0)"
    (tmp_path / "numpy.py").write_text(code)  # the script imports it after the variable is set
    for given, expected in (
        ({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "None"),
    ):  # fmt: skip
        environment = {k: v for k, v in os.environ.items() if k not in SPIN_VARIABLES} | given
        environment["PYTHONPATH"] = str(tmp_path)
        command = [sys.executable, SCRIPT]
        done = subprocess.run(command, env=environment, stdout=-1, text=True, timeout=60)
        assert done.stdout.split() == [expected]


# Threads of gloo that are still running at exit sometimes abort a process after its work is done.
THREADS = """
cli = train_gpt2.cli

def cli_without_threads(argv):
    cli(argv)
    for task in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            assert "gloo" not in task.read_text()

train_gpt2.cli = cli_without_threads"""


@both_dtypes
def test_results_do_not_depend_on_the_number_of_processes(dtype, tiny, tmp_path, capsys):
    script = launcher(tmp_path, THREADS)
    for processes in 2, 3:
        text = trained({**tiny, "dtype": dtype}, processes, script)
        assert f" processes:{processes} " in text and " micro_batch:2\n" in text
        check_golden(text, dtype)
    for size, taken in (12, 12), (5, 4), (1, 1):
        run_here(tiny, device_batch_size=size, dtype=dtype)
        text = capsys.readouterr().out
        assert f" micro_batch:{taken}\n" in text
        check_golden(text, dtype)


@pytest.mark.parametrize(
    "val_loss_every, total_tokens, expected",
    [
        (0, 400, 384),  # all that fill sequences
        (0, 10**8, 2**20),
        (2, 10**8, 144),  # 3/8 of the tokens between two validations
        (1, 10**8, 64),
        (10**6, 10**8, 2**20),
    ],
)
def test_val_tokens_0_is_up_to_1m_and_an_eighth_of_the_time(
    val_loss_every, total_tokens, expected, tiny
):
    args = Hyperparameters(**{**tiny, "val_tokens": 0, "val_loss_every": val_loss_every})
    stream = SimpleNamespace(total_tokens=total_tokens)
    assert train_gpt2.count_val_tokens(args, stream) == expected


def test_a_run_that_repeats_its_text_keeps_the_best_weights(tiny, tmp_path, capsys):
    """Validation is mocked, and the second loss is the lowest.

    A run that starts over without a checkpoint, as after a power cut, has nothing from before.
    """
    fields = {**tiny, "num_iterations": 18, "val_loss_every": 6, "allow_repeat": True}
    folder = tmp_path / "logs" / "again"
    for made_up in [5.0, 3.0, 4.0, 3.5], [5.0, 4.0, 4.5, 4.2]:
        losses = iter(made_up)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_gpt2, "evaluate", lambda run, losses=losses: next(losses))
            run_here(fields, run_id="again", resume="auto")
        assert f"val_loss:{made_up[1]:.4f}: {folder}/best.pt\nresult" in capsys.readouterr().out
        best = train_gpt2.read_pt(folder / "best.pt")
        assert (best["run_id"], best["step"], best["val_loss"]) == ("again", 6, made_up[1])
        assert best.keys() == train_gpt2.read_pt(folder / "model.pt").keys()
        (folder / "model.pt").unlink()
    run_here(fields, num_iterations=6, warmdown_iters=0, run_id="once")
    assert not (tmp_path / "logs" / "once" / "best.pt").exists()


def test_a_finished_run_keeps_its_last_checkpoint(tiny, tmp_path):
    """With a larger keep_checkpoints, it keeps one fewer."""
    for keep, steps in (1, [6]), (2, [6]), (4, [4, 5, 6]):
        run_here(tiny, save_every=1, keep_checkpoints=keep, run_id=f"keep{keep}")
        names = [f"state_step{step:010d}.pt" for step in steps]
        assert checkpoints(tmp_path / "logs" / f"keep{keep}") == names


def test_a_resumed_run_knows_its_last_validation(tiny, tmp_path):
    run_here(tiny, 4, run_id="half")
    args = Hyperparameters(**tiny, run_id="half", resume="auto")
    run = train_gpt2.set_up(args, train_gpt2.StopRequest())
    assert math.isnan(run.val_loss)
    assert train_gpt2.restore(run) == "continued"
    log = (tmp_path / "logs" / "half.txt").read_text()
    assert f"{run.val_loss:.4f}" == f"{validations(log)[-1][1]:.4f}"


def test_a_resumed_run_knows_its_best_loss(tiny, tmp_path, capsys):
    fields = {**tiny, "num_iterations": 18, "val_loss_every": 6, "allow_repeat": True}
    losses = iter([5.0, 3.0, 4.0, 4.0, 3.5])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt2, "evaluate", lambda run: next(losses))
        run_here(fields, 13, run_id="best")
        run_here(fields, run_id="best", resume="auto")
    assert "weights of the best validation, val_loss:3.0000" in capsys.readouterr().out
    assert train_gpt2.read_pt(tmp_path / "logs" / "best" / "best.pt")["step"] == 6


def test_a_new_run_from_a_checkpoint_keeps_its_own_best_weights(tiny, tmp_path):
    """The old run's loss of 3.0 does not count, because its best.pt stays with the old run."""
    fields = {**tiny, "num_iterations": 18, "val_loss_every": 6, "allow_repeat": True}
    losses = iter([5.0, 3.0, 4.0, 3.5, 3.8])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt2, "evaluate", lambda run: next(losses))
        run_here(fields, 13, run_id="old")
        checkpoint = tmp_path / "logs" / "old" / "state_step0000000013.pt"
        run_here(fields, run_id="new", resume=str(checkpoint))
    assert train_gpt2.read_pt(tmp_path / "logs" / "new" / "best.pt")["val_loss"] == 3.5


@pytest.mark.parametrize("steps, warned", [(9, False), (11, True)])
def test_a_run_that_repeats_its_text_often_warns(steps, warned, tiny, capsys):
    fields = {**tiny, "batch_size": 186, "device_batch_size": 186, "allow_repeat": True}
    run_here(fields, num_iterations=steps, val_loss_every=0)
    assert (f"training text {steps} times" in capsys.readouterr().out) == warned


# ---- Presets, compiled runs, the record ---------------------------------------------------------
SMALL = {
    "record7": {"n_layer": 1, "n_head": 1, "n_embd": 16, "sequence_length": 64, "batch_size": 4},
    "cpu": {"ngram_rows": 1000},
    "text": {"ngram_rows": 1000},
}
SMALL["24gb"] = SMALL["record7"]
SMALL["record21"] = {"n_layer": 8, "n_head": 1, "n_embd": 16, "sequence_length": 128}


@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_starts(preset, tmp_path, capsys):
    """Train for one step on tiny data, without compiling, and with a smaller model if needed.

    `cpu` and `text` keep their model except for a smaller n-gram table.
    """
    generator = np.random.default_rng(0)
    write_shard(tmp_path / "train_0.bin", generator.integers(0, 257, 10_000))
    write_shard(tmp_path / "val_0.bin", generator.integers(0, 257, 1000))
    changes = {
        **SMALL[preset], "num_iterations": 1, "val_tokens": 512, "device": "cpu", "compile": False,
        "train_files": f"{tmp_path}/train_*.bin", "val_files": f"{tmp_path}/val_*.bin",
        "log_dir": f"{tmp_path}/logs",
    }  # fmt: skip
    args = parse_args([f"--preset={preset}", *options(changes)])
    changes["target_val_loss"] = 0.0  # the preset's is for its own data
    for name, value in PRESETS[preset][1].items():
        assert getattr(args, name) == changes.get(name, value)
    assert train_gpt2.main(args) == pytest.approx(np.log(args.vocab_size), rel=0.3)


def run_compiled(fields):
    """Run in this process, without the compiled graphs of earlier runs; return last_bits()."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run_here(fields, compile=True, dtype="float32")
    return last_bits(Path(fields["log_dir"], fields["run_id"]))


def test_a_compiled_run_resumes_bit_for_bit(tiny, tmp_path, capsys):
    """It compiles one graph for training, one for validation, and no others."""
    whole = run_compiled({**tiny, "run_id": "whole", "save_every": 2})
    text = capsys.readouterr().out
    check_golden(text, "float32")
    resume = str(tmp_path / "logs" / "whole" / "state_step0000000004.pt")
    part = run_compiled({**tiny, "run_id": "part", "save_every": 2, "resume": resume})
    resumed = capsys.readouterr().out
    assert "continuing after step 4\n" in resumed and part == whole
    assert " graphs:2\n" in text and " graphs:2\n" in resumed


def test_a_recompilation_is_counted(tiny, tmp_path):
    tokens = "torch.zeros(1, 7, dtype=torch.int64)"
    script = faulty_script(tmp_path, f"run.model({tokens}, {tokens})")
    assert " graphs:3\n" in run_forked({**tiny, "compile": True}, script=script).stdout


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="run.sh would train the 124M record here")
def test_run_sh_trains_the_cpu_record_to_its_target(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(
        ["bash", ROOT / "run.sh", f"--log_dir={tmp_path}", "--run_id=record"],
        capture_output=True,
        text=True,
        timeout=540,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    step, loss, _ = validations(done.stdout)[-1]
    assert step == 64 and loss < 1.32
    if torch.__version__.startswith("2.13.0"):
        assert "val_hash:adf5bff0f226dee9" in done.stdout
