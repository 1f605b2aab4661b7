"""Settings, error messages, the training step, the log, and results on any number of ranks."""

import dataclasses
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import train_modern
from conftest import (
    ROOT,
    SCRIPT,
    both_dtypes,
    last_bits,
    launcher,
    options,
    run_forked,
    run_here,
    trained,
    validations,
    write_shard,
)

import train_gpt2
from train_gpt2 import GPT, RECIPE, Hyperparameters, UserError, build_optimizers, parse_args

PRESETS = [(recipe, name) for recipe in (RECIPE, train_modern.RECIPE) for name in recipe.presets]
each_preset = pytest.mark.parametrize("recipe, preset", PRESETS, ids=[name for _, name in PRESETS])


# ---- Settings -----------------------------------------------------------------------------------
def test_defaults_are_those_of_record_7():
    args = Hyperparameters()
    assert (args.vocab_size, args.n_layer, args.n_head, args.n_embd) == (50304, 12, 6, 768)
    assert (args.batch_size, args.sequence_length, args.num_iterations) == (512, 1024, 5100)
    assert (args.learning_rate, args.muon_learning_rate) == (3.6e-3, 3.6e-4)
    assert (args.muon_momentum, args.warmdown_fraction * args.num_iterations) == (0.95, 1450)
    assert (args.val_loss_every, args.val_tokens) == (125, 10485760)
    with torch.device("meta"):
        muon, adamw = build_optimizers(GPT(args), args)
    assert (adamw.defaults["betas"], adamw.defaults["weight_decay"]) == ((0.9, 0.95), 0)
    assert muon.defaults["momentum"] == 0.95


def test_the_learning_rate_is_constant_then_decays_linearly():
    def scales(steps, fraction):
        args = Hyperparameters(num_iterations=steps, warmdown_fraction=fraction)
        optimizer = SimpleNamespace(param_groups=[{"initial_lr": 1.0}, {"initial_lr": 3.0}])
        for step in range(steps + 1):
            train_gpt2.apply_schedule(None, [optimizer], step, args)
            one, three = (group["lr"] for group in optimizer.param_groups)
            assert three == 3 * one
            yield one

    assert list(scales(20, 0.5)) == pytest.approx([1] * 10 + [1 - i / 10 for i in range(11)])
    assert list(scales(5, 0.0)) == [1] * 5 + [0]


@each_preset
def test_a_preset_is_settings_that_others_override(recipe, preset):
    assert parse_args([f"--preset={preset}"], recipe) == recipe.settings(**recipe.presets[preset])
    assert parse_args(["--n_layer=20", f"--preset={preset}"], recipe).n_layer == 20


def test_the_default_preset_is_the_first_and_the_last_that_is_given_counts():
    assert parse_args([]) == parse_args(["--preset=record7"]) == Hyperparameters()
    modern = train_modern.RECIPE
    assert parse_args([], modern) == parse_args(["--preset=modern"], modern)
    assert parse_args(["--preset=24gb", "--preset=cpu"]) == parse_args(["--preset", "cpu"])


@pytest.mark.parametrize(
    "manifest, given, expected",
    [
        ('{"vocab_size": 257}', [], 257),
        ('{"vocab_size": 50257}', ["--preset=cpu"], 50304),
        ('{"vocab_size": 257}', ["--vocab_size=300"], 300),
        (None, [], 50304),
    ],
)
def test_the_vocabulary_size_comes_from_the_manifest_of_packed_data(
    manifest, given, expected, tmp_path
):
    if manifest:
        (tmp_path / "manifest.json").write_text(manifest)
    argv = [*given, f"--train_files={tmp_path}/train_*.bin"]
    assert parse_args(argv).vocab_size == expected


@pytest.mark.parametrize("given, document_token", [([], 50256), (["--document_token=7"], 7)])
def test_documents_start_with_the_last_token_of_packed_data(given, document_token, tmp_path):
    """The preset's token is one of another encoding, and would be an ordinary token here."""
    (tmp_path / "manifest.json").write_text('{"vocab_size": 50257}')
    argv = ["--preset=small", *given, f"--train_files={tmp_path}/train_*.bin"]
    args = parse_args(argv, train_modern.RECIPE)
    assert (args.vocab_size, args.document_token) == (50304, document_token)


@pytest.mark.parametrize(
    "argument, sentence",
    [
        ("--batch_siz=8", "unrecognized arguments: --batch_siz=8"),  # no abbreviations
        ("--batch_size=1.5", "argument --batch_size: invalid int value: '1.5'"),
        ("--compile=maybe", "argument --compile: invalid boolean value: 'maybe'"),
        ("--resume=model.pt", "argument --resume: invalid choice: 'model.pt'"),
        ("--preset=small", "argument --preset: invalid choice: 'small'"),
    ],
)
def test_what_cannot_be_parsed_is_rejected(argument, sentence, capsys):
    """The usage says what to do about a pattern that the shell has expanded."""
    with pytest.raises(SystemExit, match="2"):
        train_gpt2.cli([argument])
    shown = capsys.readouterr().err
    assert f"error: {sentence}" in shown.splitlines()[-1]
    assert "[--name=value ...] (put wildcards in quotes)" in shown


def test_one_process_of_a_larger_slurm_job_may_train(tiny, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert set_up(tiny).step == 0


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("--batch_size=0", "batch_size=0 must be at least 1 and below 2**63"),
        ("--save_every=-1", "save_every=-1 must be at least 0 and below 2**63"),
        ("--learning_rate=nan", "learning_rate=nan must be at least 0 and below 2**63"),
        (f"--seed={2**63}", f"seed={2**63} must be at least 0 and below 2**63"),
        ("--muon_momentum=1", "muon_momentum=1.0 must be less than 1"),
        ("--warmdown_fraction=2", "warmdown_fraction=2.0 must be at most 1"),
        ("--n_head=5", "n_embd=768 must be divisible by 2 * n_head = 10"),
        ("--run_id=..", "run_id='..' may contain only letters, digits, '-', '_' and, except"),
        ("--resume=auto", "--resume=auto needs --run_id"),
        ("--preset=small --n_embd=8", "n_embd=8 must be at least 12 and below 2**63"),
        ("--preset=small --max_ngram=1", "max_ngram=1 must be at least 2 and below 2**63"),
        ("--preset=small --momentum_warmup_fraction=300", "momentum_warmup_fraction=300.0 must be"),
        ("--preset=small --document_token=2176", "document_token=2176 is not in the vocabulary"),
        ("--preset=small --sequence_length=500", "sequence_length=500 must be a multiple of 128"),
    ],
)
def test_invalid_settings_are_rejected(arguments, sentence):
    recipe = train_modern.RECIPE if "--preset=small" in arguments else RECIPE
    with pytest.raises(UserError, match=re.escape(sentence)):
        parse_args(arguments.split(), recipe)


@pytest.mark.parametrize(
    "size", ['"257"', str(10**23), "NaN", "-1", "{}", "[" * 100_000, "no json"]
)
def test_an_odd_manifest_is_refused_in_one_sentence(size, tmp_path):
    (tmp_path / "manifest.json").write_text(f'{{"vocab_size": {size}}}')
    with pytest.raises(UserError, match=r"vocab_size|manifest\.json is damaged"):
        parse_args([f"--train_files={tmp_path}/train_*.bin"])


def test_a_new_setting_needs_only_a_type_and_a_default(tiny, tmp_path):
    """It is parsed, logged, saved and compared on resume, even without a help text.

    The script may import annotations from __future__, which turns the types into strings.
    """
    copy = tmp_path / "edited.py"
    check = "\n    def __post_init__(self):\n        check_settings(self)"
    source = SCRIPT.read_text().replace(check, "    my_knob: float = 1.0\n" + check)
    source = source.replace(
        "import argparse", "from __future__ import annotations\n\nimport argparse"
    )
    copy.write_text(source)
    fields = {**tiny, "run_id": "knob", "my_knob": -2.5}
    help_text = subprocess.run([sys.executable, copy, "--help"], capture_output=True, text=True)
    assert "--my_knob 1.0" in help_text.stdout
    trained(fields, script=copy)
    log = (tmp_path / "logs" / "knob.txt").read_text()
    assert source in log and "\nhyperparameter my_knob=-2.5\n" in log
    done = run_forked({**tiny, "run_id": "knob", "resume": "auto"}, script=copy)
    assert done.returncode == 1 and "was saved with my_knob=-2.5 (here 1.0)" in done.stderr


def test_a_recipe_may_add_a_setting_that_may_change(tiny):
    fields = [("my_knob", int, train_gpt2.changeable(1, "what it does"))]
    extended = dataclasses.make_dataclass("Extended", fields, bases=(Hyperparameters,), frozen=True)
    recipe = RECIPE._replace(settings=extended)
    settings = {**tiny, "run_id": "knob"}
    run_here(settings, 2, recipe, my_knob=2)
    assert run_here(settings, recipe=recipe, my_knob=3, resume="auto") is not None


REFUSALS = {
    "val_tokens": ({"val_tokens": 100}, "must be a multiple of sequence_length=16 up to 384"),
    "too few val tokens": ({"val_tokens": 400}, "val_tokens=400 must be a multiple of"),
    "no val tokens": (
        {"val_tokens": 0, "sequence_length": 512, "allow_repeat": True, "batch_size": 1},
        "has only 400 tokens, but needs 513: lower --sequence_length, or add",
    ),
    "too few train tokens": ({"num_iterations": 16}, "has tokens for only 15 steps: add data"),
    "no step": ({"sequence_length": 2**20, "allow_repeat": True}, "has tokens for only 0 steps"),
    "missing data": ({"train_files": "nowhere/*.bin"}, "prepare the data with data/prepare.py"),
    "ids beyond the vocabulary": ({"vocab_size": 32}, "but vocab_size=32"),
    "no launcher": ({"RANK": "0"}, "WORLD_SIZE"),
    "srun without torchrun": ({"SLURM_STEP_NUM_TASKS": "4"}, "srun or mpirun started several"),
    "mpirun without torchrun": ({"OMPI_COMM_WORLD_SIZE": "2"}, "separate processes: use torchrun"),
    "MPICH without torchrun": ({"PMI_SIZE": "2"}, "separate processes: use torchrun"),
    "a timeout of many years": ({"RANK": "0", "comm_timeout": 10**17}, "cannot join the other"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_an_impossible_run_is_rejected_before_it_starts(case, tiny, monkeypatch):
    changes, sentence = REFUSALS[case]
    for name, value in changes.items():
        if name.isupper():
            monkeypatch.setenv(name, value)
        else:
            tiny[name] = value
    with pytest.raises(UserError, match=re.escape(sentence)):
        train_gpt2.main(Hyperparameters(**tiny))
    assert not os.path.exists(tiny["log_dir"])


def test_a_copy_of_a_training_shard_is_no_validation_data(tiny, tmp_path):
    shutil.copy(tmp_path / "train_1.bin", tmp_path / "val_9.bin")
    with pytest.raises(UserError, match="a shard of train_files is a copy of one of val_files"):
        run_here(tiny)


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
    with pytest.raises(UserError, match="encoded as bytes, but val_files as other"):
        run_here(tiny)
    (tmp_path / "val" / "manifest.json").unlink()
    (tmp_path / "train" / "manifest.json").write_text('{"encoding": "other"}')
    with pytest.raises(UserError, match=r"model\.pt was saved with encoding=bytes \(here other\)"):
        run_here(tiny, init=f"{tiny['log_dir']}/bytes/model.pt")


def test_a_rank_that_fails_prints_its_number_and_the_error(tiny):
    done = run_forked({**tiny, "init": "none.pt"}, 2)
    assert done.returncode == 1
    messages = sorted(re.findall("^train_gpt2.py: (rank [01]: .*)", done.stderr, re.M))
    assert messages and len(set(messages)) == len(messages)
    assert all(message[8:].startswith("none.pt cannot be used") for message in messages)


@pytest.mark.parametrize(
    "device, gpus, usable, expected",
    [
        ("cpu", 2, False, torch.device("cpu")),
        ("auto", 0, False, torch.device("cpu")),
        ("auto", 2, True, torch.device("cuda", 1)),
        ("cuda", 2, True, torch.device("cuda", 1)),
        ("auto", 1, True, torch.device("cuda", 0)),  # the launcher shows each process its own GPU
        ("cuda", 0, False, "GPU 0 is not available"),
        ("auto", 1, False, r"GPU 0 is not available \(1 found\): .*check the driver"),
    ],
)
def test_each_process_picks_its_gpu(device, gpus, usable, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    monkeypatch.setenv("LOCAL_RANK", "1")
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
    chosen = train_gpt2.join_ranks(Hyperparameters(**tiny))
    assert chosen == asked["set"] == asked["device_id"] == gpu
    assert asked["backend"] == "nccl"


def test_an_error_of_nccl_says_to_start_one_process_per_gpu(tiny, monkeypatch):
    def init_process_group(*args, **options):
        raise dist.DistBackendError("Duplicate GPU detected")

    monkeypatch.setattr(dist, "rendezvous", lambda *a, **n: iter([(dist.HashStore(), 1, 2)]))
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UserError, match=r"Duplicate GPU detected.*one process per GPU"):
        train_gpt2.join_ranks(Hyperparameters(**tiny))


# ---- Training -----------------------------------------------------------------------------------
def set_up(settings, **changes):
    args = Hyperparameters(**{**settings, **changes})
    return train_gpt2.set_up(args, RECIPE, train_gpt2.StopRequest())


def test_a_gpu_keeps_the_settings_of_pytorch(tiny, monkeypatch):
    def stop(args, device):
        raise InterruptedError

    monkeypatch.setattr(train_gpt2, "join_ranks", lambda args: torch.device("cuda"))
    monkeypatch.setattr(train_gpt2, "open_data", stop)  # comes next
    with pytest.raises(InterruptedError):
        set_up(tiny)
    assert torch.backends.cuda.flash_sdp_enabled()
    assert not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    assert torch._functorch.config.activation_memory_budget == 1.0
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_gpu_that_only_emulates_bfloat16_trains_in_float32(has_bf16, monkeypatch):
    def supported(including_emulation=True):
        return including_emulation or has_bf16

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    expected = "bfloat16" if has_bf16 else "float32"
    assert train_gpt2.choose_dtype(Hyperparameters(), torch.device("cuda")) == expected


@pytest.mark.parametrize("version, compile", [("2.5.1", True), ("2.5.1", False), ("2.6.0", True)])
def test_torch_2_5_compiles_only_float32_on_cpus(version, compile, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    expected = "float32" if version == "2.5.1" and compile else "bfloat16"
    args = Hyperparameters(compile=compile)
    assert train_gpt2.choose_dtype(args, torch.device("cpu")) == expected


def test_macos_has_no_proc_and_counts_memory_in_bytes(monkeypatch):
    usage = SimpleNamespace(ru_maxrss=3 * 2**30)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(Path, "exists", Mock(return_value=False))
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="arm64"))
    monkeypatch.setattr(train_gpt2.resource, "getrusage", lambda who: usage)
    assert train_gpt2.device_name(torch.device("cpu")) == "arm64"
    assert train_gpt2.peak_memory(torch.device("cpu")) == 3072


@both_dtypes
@pytest.mark.parametrize("T", [16, 1])
def test_validation_counts_exactly_val_tokens(T, dtype, tiny, tmp_path):
    run = set_up(tiny, sequence_length=T, dtype=dtype)
    tokens = np.fromfile(tmp_path / "val_0.bin", np.uint16)[512:][: tiny["val_tokens"] + 1]
    tokens = torch.from_numpy(tokens.astype("int64"))
    with torch.no_grad():
        expected = run.model(tokens[:-1].view(-1, T), tokens[1:].view(-1, T)).item()
    assert run.args.val_tokens == 16 * 19  # with T = 16, a prime number of sequences
    for micro_batch in 1, 4, 19, 24, 50:
        run.micro_batch_size = micro_batch
        assert train_gpt2.evaluate(run) == pytest.approx(expected, abs=2e-3)


def test_randomness_depends_on_seed_step_and_rank_alone(tiny, monkeypatch):
    """So dropout continues in the same way after a resume, and differs between ranks."""

    def drawn(seed, step, rank):
        monkeypatch.setattr(train_gpt2, "get_rank", lambda: rank)
        run = set_up(tiny, seed=seed)
        run.step = step
        run.model.register_forward_hook(lambda *_: numbers.append(torch.rand(()).item()))
        numbers = []
        train_gpt2.train_step(run, *run.train_loader.batch(0))
        return tuple(numbers)

    cases = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)]
    results = [drawn(*case) for case in cases]
    assert results[0] == results[-1] and len(set(results)) == 4
    assert len(set(results[0])) == 6  # micro-batches


def test_every_parameter_must_have_one_optimizer(tiny):
    def check(*parameters):
        train_gpt2.check_optimizers(gpt, [torch.optim.SGD([p]) for p in parameters])

    gpt = GPT(Hyperparameters(**tiny))
    gpt.h[0].attn.c_q.weight = gpt.h[1].attn.c_q.weight  # a shared parameter counts once
    every = list(gpt.parameters())
    check(*every)
    name = r"h\.1\.mlp\.c_proj\.weight"
    with pytest.raises(UserError, match=f"^{name} must be in exactly one optimizer"):
        check(*every[:-1])
    with pytest.raises(UserError, match=f"^{name} must be in exactly one optimizer"):
        check(*every, every[-1])


# ---- The whole run and its log ------------------------------------------------------------------
# Results of the settings `tiny` with any number of processes and any micro-batches.
GOLDEN_LOSSES = {"float32": [4.5422, 3.8337, 3.4781], "bfloat16": [4.5417, 3.8354, 3.4821]}
TOLERANCE = {"float32": 0.002, "bfloat16": 0.02}
SUMMARY = {
    "val_loss", "target_val_loss", "weights", "steps", "tokens", "seed", "setup_seconds",
    "train_seconds", "validation_seconds", "tokens_per_second", "peak_memory_mib",
}  # fmt: skip


def check_golden(text, dtype):
    steps, values = zip(*validations(text))
    assert steps == (0, 3, 6)
    assert values == pytest.approx(GOLDEN_LOSSES[dtype], abs=TOLERANCE[dtype])


@both_dtypes
def test_log_and_weights(dtype, tiny, tmp_path, capsys):
    settings = Hyperparameters(**{**tiny, "run_id": "one", "dtype": dtype})
    val_loss = train_gpt2.main(settings)
    text = Path(tiny["log_dir"], "one.txt").read_text()
    header = f"Log of train_gpt2.py, run_id=one\n{train_gpt2.SOURCE}\n"
    for name, value in dataclasses.asdict(settings).items():
        header += f"hyperparameter {name}={value!r}\n"
    assert text.startswith(header)
    shown = text.removeprefix(header)
    assert capsys.readouterr().out == shown  # all but source and settings
    for pattern in (
        "training GPT with Muon, AdamW, 7,168 parameters",
        r"torch:\S+ commit:(\w{40}(-dirty)?)? device:.* processes:1 threads:\d+",
        f"matmul_dtype:{dtype} micro_batch:2",
        "val_tokens:304 train_tokens:3000 train_data:[0-9a-f]{12} val_data:[0-9a-f]{12}",
    ):
        assert re.search(f"^{pattern}$", shown, re.M), pattern
    check_golden(shown, dtype)
    line = r"^step:(\d+)/6 train_loss:\d+\.\d{4} train_time:(\d+)ms step_avg:(\d+\.\d\d)ms$"
    steps = [(int(step), int(ms), float(avg)) for step, ms, avg in re.findall(line, shown, re.M)]
    assert [step for step, _, _ in steps] == [1, 2, 3, 4, 5, 6]
    assert [ms for _, ms, _ in steps] == sorted(ms for _, ms, _ in steps)
    for step, ms, average in steps:
        assert average == pytest.approx(ms / step, abs=1)
    summary = re.findall(r"^(\w+): (.*)\n", shown, re.M)
    assert shown.endswith("".join(f"{key}: {value}\n" for key, value in summary))
    values = dict(summary)
    assert values.keys() == SUMMARY and len(summary) == len(SUMMARY)
    assert values["val_loss"] == f"{val_loss:.4f}"
    assert (values["target_val_loss"], values["steps"]) == ("3.28", "6")
    assert (values["tokens"], values["seed"]) == (f"{6 * 12 * 16}", "1337")
    assert values["weights"] == f"{tiny['log_dir']}/one/model.pt"
    weights = train_gpt2.read_pt(tmp_path / "logs" / "one" / "model.pt")
    assert (weights["step"], weights["val_loss"]) == (6, val_loss)
    assert (weights["script"], weights["hyperparameters"]) == ("train_gpt2.py", vars(settings))
    fixed = weights["fixed"]
    assert f"val_data:{fixed['val_data']}\n" in shown
    assert (fixed["dtype"], fixed["encoding"]) == (dtype, None)
    assert all(p.dtype == torch.float32 for p in weights["model"].values())
    run = set_up(tiny, dtype=dtype)
    run.model.load_state_dict(weights["model"])
    assert train_gpt2.evaluate(run) == pytest.approx(val_loss, abs=2e-3)
    run.validation = run.validation[:1]  # the loss is that of the sequences, whatever their number
    expected = run.model(*train_gpt2.inputs_and_targets(run.validation, run.device)).item()
    assert train_gpt2.evaluate(run) == pytest.approx(expected, abs=2e-3)


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


# ---- The best weights of a run that repeats its text --------------------------------------------
@pytest.fixture
def repeating(tiny):
    return {**tiny, "num_iterations": 18, "val_loss_every": 6, "allow_repeat": True}


def mock_validations(monkeypatch, *values):
    losses = iter(values)
    monkeypatch.setattr(train_gpt2, "evaluate", lambda run: next(losses))


def best_weights(folder, shown):
    """Return (step, loss) of best.pt; check that the summary names it and that it is complete."""
    best = train_gpt2.read_pt(folder / "best.pt")
    loss = f"{best['val_loss']:.4f}"
    assert f"\nbest_val_loss: {loss}\nbest_weights: {folder}/best.pt\n" in shown
    assert best.keys() == train_gpt2.read_pt(folder / "model.pt").keys()
    return best["step"], best["val_loss"]


def test_a_run_that_repeats_its_text_keeps_the_best_weights(
    repeating, tmp_path, monkeypatch, capsys
):
    """A run that starts over, because it had no checkpoint yet, keeps nothing from before."""
    folder = tmp_path / "logs" / "again"
    for loss in 3.0, 4.0:
        mock_validations(monkeypatch, 5.0, loss, 4.5, 4.2)
        run_here(repeating, run_id="again", resume="auto")
        assert best_weights(folder, capsys.readouterr().out) == (6, loss)
        (folder / "model.pt").unlink()
    mock_validations(monkeypatch, 5.0, 3.0)
    run_here(repeating, num_iterations=6, run_id="once")
    assert not (tmp_path / "logs" / "once" / "best.pt").exists()


def test_best_weights_that_are_newer_than_the_last_checkpoint_stay(
    repeating, tmp_path, monkeypatch, capsys
):
    """A resumed run may validate at other steps."""

    def die_in_step_7(run):
        if run.step == 6:
            raise KeyboardInterrupt

    mock_validations(monkeypatch, 5.0, 3.0)
    with pytest.raises(KeyboardInterrupt):
        run_here(repeating, run_id="old", save_every=4, fault=die_in_step_7)
    mock_validations(monkeypatch, 4.0)
    run_here(repeating, val_loss_every=0, run_id="old", resume="auto")
    assert best_weights(tmp_path / "logs" / "old", capsys.readouterr().out) == (6, 3.0)


# ---- Presets, compiled runs, the record ---------------------------------------------------------
SIZES = {"n_head": 1, "n_embd": 16, "batch_size": 2, "vocab_size": 512}
SMALLER = {"record7": {"n_layer": 1, "sequence_length": 64}, "cpu": {}}
MODERN_SIZES = {"sequence_length": 128, "ngram_rows": 1000, "document_token": 256}
SMALLER |= dict.fromkeys(("modern", "small", "text"), MODERN_SIZES)


@pytest.mark.parametrize("preset", SMALLER)
def test_each_preset_starts(preset, tmp_path):
    """Train a smaller model for two steps. The presets for 24 GB are left out."""
    recipe = RECIPE if preset in RECIPE.presets else train_modern.RECIPE
    generator = np.random.default_rng(0)
    write_shard(tmp_path / "train_0.bin", generator.integers(0, 257, 10_000))
    write_shard(tmp_path / "val_0.bin", generator.integers(0, 257, 1000))
    changes = {
        **SIZES, **SMALLER[preset], "num_iterations": 2, "val_tokens": 512, "device": "cpu",
        "compile": False,
        "train_files": f"{tmp_path}/train_*.bin", "val_files": f"{tmp_path}/val_*.bin",
        "log_dir": f"{tmp_path}/logs",
    }  # fmt: skip
    args = parse_args([f"--preset={preset}", *options(changes)], recipe)
    assert train_gpt2.main(args, recipe) == pytest.approx(np.log(args.vocab_size), rel=0.3)


def run_compiled(fields):
    """Run in this process, without the compiled graphs of earlier runs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run_here(fields, compile=True, dtype="float32")


# With "eager", this tests the number of graphs; with Inductor, that compiled code resumes exactly.
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_run_resumes_bit_for_bit(backend, tiny, tmp_path, monkeypatch, capsys):
    """It compiles one graph for training, one for validation, and no others."""
    compile_graphs = functools.partialmethod(torch.nn.Module.compile, backend=backend)
    monkeypatch.setattr(train_gpt2.GPT, "compile", compile_graphs)
    fields = {**tiny, "run_id": "r", "resume": "auto", "save_every": 2}
    run_compiled(fields)
    text = capsys.readouterr().out
    check_golden(text, "float32")
    folder = tmp_path / "logs" / "r"
    whole = last_bits(folder)
    for name in "model.pt", "state_step0000000006.pt":
        (folder / name).unlink()
    run_compiled(fields)
    resumed = capsys.readouterr().out
    assert "continuing after step 4 from " in resumed and last_bits(folder) == whole
    assert "\ngraphs: 2\n" in text and "\ngraphs: 2\n" in resumed


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="run.sh would train the 124M record here")
def test_run_sh_trains_the_cpu_preset(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(
        ["bash", ROOT / "run.sh", f"--log_dir={tmp_path}", "--run_id=record"],
        capture_output=True,
        text=True,
        timeout=900,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    step, loss = validations(done.stdout)[-1]
    assert step == 600 and loss < 1.40
