"""The run: settings, refusals, the training step, the log, and the same run on any world size."""

import dataclasses
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import (
    ROOT,
    STEP,
    TINY,
    both_dtypes,
    edited_script,
    finish,
    run_forked,
    run_ranks,
    start,
    validations,
)

import train_gpt2
from train_gpt2 import (
    GPT,
    PRESETS,
    DistributedDataLoader,
    Hyperparameters,
    UserError,
    build_optimizers,
    evaluate,
    lr_multiplier,
    main,
    micro_batch_size,
    parse_args,
    train_step,
    warm_up,
)

# ---------------------------------------------------------------------------
# settings


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


def test_learning_rate_stays_and_falls():
    args = Hyperparameters(num_iterations=20, warmdown_iters=10)
    scales = [lr_multiplier(step, args) for step in range(20)]
    assert scales == pytest.approx([1] * 10 + [1 - i / 10 for i in range(10)])
    assert lr_multiplier(4, Hyperparameters(num_iterations=5, warmdown_iters=0)) == 1


def test_any_field_can_be_given_on_the_command_line():
    values = {"n_layer": 3, "learning_rate": 0.5, "train_files": "a=b", "compile": False}
    args = parse_args([f"--{name}={value}" for name, value in values.items()])
    assert args == Hyperparameters(**values)
    apart = [text for name, value in values.items() for text in (f"--{name}", f"{value}")]
    assert parse_args(apart) == args
    assert parse_args(["--n_layer=3", "--n_layer=4"]).n_layer == 4
    defaults = dataclasses.asdict(Hyperparameters())
    assert (
        parse_args([f"--{name}={value}" for name, value in defaults.items()]) == Hyperparameters()
    )


def test_presets_are_settings_that_others_override(capsys):
    assert parse_args(["--preset=record7"]) == parse_args([]) == Hyperparameters()
    for name, (_, overrides) in PRESETS.items():
        assert parse_args([f"--preset={name}"]) == Hyperparameters(**overrides)
        assert parse_args(["--n_layer=3", f"--preset={name}"]).n_layer == 3
        assert parse_args([f"--preset={name}", "--n_layer=3"]).n_layer == 3
    assert parse_args(["--preset=text", "--preset=cpu"]) == parse_args(["--preset", "cpu"])
    with pytest.raises(UserError, match="--preset: invalid choice: 'gpu'"):
        parse_args(["--preset=gpu"])
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    for name, (text, _) in PRESETS.items():
        assert f"{name} {text}" in shown


@pytest.mark.parametrize(
    "manifest, given, expected",
    [
        ('{"vocab_size": 257}', [], 257),
        ('{"vocab_size": 50257}', [], 50304),
        ('{"vocab_size": 50257}', ["--preset=text"], 50304),
        ('{"vocab_size": 257}', ["--vocab_size=300"], 300),
        ("{}", ["--preset=text"], 257),
        (None, [], 50304),
    ],
)
def test_the_vocabulary_is_that_of_packed_data(manifest, given, expected, tmp_path):
    if manifest:
        (tmp_path / "manifest.json").write_text(manifest)
    assert parse_args([*given, f"--train_files={tmp_path}/train_*.bin"]).vocab_size == expected


@pytest.mark.parametrize("manifest", ["[]", "no json", '{"vocab_size": "x"}', '{"vocab_size": []}'])
def test_a_damaged_manifest_is_one_sentence(manifest, tmp_path):
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(UserError, match=r"manifest\.json is damaged: pack the data again"):
        parse_args([f"--train_files={tmp_path}/train_*.bin"])


def test_a_target_is_that_of_the_presets_own_data(tiny, capsys):
    for preset in "record7", "cpu":
        own = PRESETS[preset][1].get("target_val_loss", 3.28)
        assert parse_args([f"--preset={preset}"]).target_val_loss == own
        other = [f"--preset={preset}", "--val_files=other/*.bin"]
        assert parse_args(other).target_val_loss == 0
        assert parse_args([*other, "--target_val_loss=2"]).target_val_loss == 2
    assert parse_args(["--preset=text"]).target_val_loss == 0
    loss = main(Hyperparameters(**{**tiny, "target_val_loss": 0.0}))
    assert capsys.readouterr().out.endswith(f"\nresult val_loss:{loss:.4f}\n")


def test_val_tokens_0_validates_on_all_of_val_files_up_to_1m(tiny, tmp_path):
    losses = []
    for run_id, val_tokens in ("all", 0), ("named", 384):  # of 400, in sequences of 16
        fields = {**tiny, "run_id": run_id, "val_tokens": val_tokens, "num_iterations": 1}
        losses.append(main(Hyperparameters(**fields)))
    assert losses[0] == losses[1]
    log = (tmp_path / "logs" / "all.txt").read_text()
    assert "\nhyperparameter val_tokens=384\n" in log
    loader = SimpleNamespace(total_tokens=10**8, T=1000)
    assert train_gpt2.val_tokens_of(Hyperparameters(val_tokens=0), loader) == 1_048_000
    with pytest.raises(UserError, match="holds 400 tokens, but a sequence needs 513: add"):
        fields |= {"val_tokens": 0, "sequence_length": 512, "batch_size": 1}
        main(Hyperparameters(**fields))


def test_the_learning_rate_is_logged_at_each_validation(tiny, capsys):
    main(Hyperparameters(**{**tiny, "val_loss_every": 2}))
    text = capsys.readouterr().out
    rates = [float(rate) for rate in re.findall(r" val_loss:.* lr:(\S+)$", text, re.M)]
    args = Hyperparameters(**tiny)
    expected = [0.01 * lr_multiplier(step, args) for step in (0, 2, 4, 6)]
    assert rates == pytest.approx(expected, rel=0.01)


def test_the_weights_of_the_best_validation_stay_where_the_text_repeats(tiny, tmp_path, capsys):
    """The losses of validations are made up: the second is the lowest."""
    fields = {**tiny, "num_iterations": 18, "val_loss_every": 6, "allow_repeat": True}
    made_up = iter([5.0, 3.0, 4.0, 3.5])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt2, "evaluate", lambda *arguments: next(made_up))
        main(Hyperparameters(**{**fields, "run_id": "again"}))
    folder = tmp_path / "logs" / "again"
    assert capsys.readouterr().out.splitlines()[-2] == (
        f"weights of the best validation, val_loss:3.0000: {folder}/best.pt"
    )
    best = torch.load(folder / "best.pt", weights_only=True)
    assert best["val_loss"] == 3.0
    assert best.keys() == torch.load(folder / "model.pt", weights_only=True).keys()

    # Started again without a checkpoint, as after a power cut, the run keeps the better weights.
    (folder / "model.pt").unlink()
    (tmp_path / "logs" / "again.txt").unlink()
    made_up = iter([5.0, 4.0, 4.0, 3.5])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt2, "evaluate", lambda *arguments: next(made_up))
        main(Hyperparameters(**{**fields, "run_id": "again", "resume": "auto"}))
    assert torch.load(folder / "best.pt", weights_only=True)["val_loss"] == 3.0

    main(Hyperparameters(**{**fields, "num_iterations": 6, "warmdown_iters": 0, "run_id": "once"}))
    assert not (tmp_path / "logs" / "once" / "best.pt").exists()


def test_a_plan_that_repeats_its_text_much_says_so(tiny, capsys):
    said = "this run reads the training text {} times, so expect overfitting"
    assert train_gpt2.epochs(Hyperparameters(**{**tiny, "num_iterations": 160}),
                             train_loader(Hyperparameters(**tiny))) == 160 * 192 / 3000  # fmt: skip
    fields = {**tiny, "batch_size": 186, "device_batch_size": 186, "allow_repeat": True}
    for steps, times in (11, 11), (9, 9):  # a step reads almost all of the 3,000 tokens
        main(Hyperparameters(**{**fields, "num_iterations": steps, "val_loss_every": 0}))
        assert (said.format(times) in capsys.readouterr().out) == (times > 10)


def test_the_preset_cpu_is_the_cpu_record():
    path = ROOT / "records" / "2026-11-22_Learn_Faster" / "seeds" / "B_round5.txt"
    logged = dict(re.findall(r"^hyperparameter (\w+)=(.*)$", path.read_text(), re.M))
    args = dataclasses.asdict(parse_args(["--preset=cpu"]))
    same = args.keys() & logged.keys() - {"run_id", "seed", "log_dir"}
    assert logged["device_batch_size"] == "16"  # of 16 sequences: any from there on does the same
    same -= {"device_batch_size"}
    assert {name: repr(args[name]) for name in same} == {name: logged[name] for name in same}
    assert len(same) > 20


@pytest.mark.parametrize(
    "argument, sentence",
    [
        ("--batchsize=8", "unrecognized arguments: --batchsize=8. --help lists all settings"),
        ("--batch_siz=8", "unrecognized arguments: --batch_siz=8"),  # no abbreviations
        ("batch_size=8", "unrecognized arguments: batch_size=8"),
        ("--batch_size", "--batch_size: expected one argument"),
        ("--batch_size=many", "--batch_size: invalid int value: 'many'"),
        ("--batch_size=1.5", "--batch_size: invalid int value: '1.5'"),
        ("--compile=maybe", "--compile: invalid boolean value: 'maybe'"),
        ("--batch_size=0", "batch_size=0 must be a number between 1 and"),
        ("--seed=-1", "seed=-1 must be a number between 0 and"),
        ("--seed=9999999999999999999", "seed=9999999999999999999 must be a number between 0 and"),
        ("--learning_rate=-1", "learning_rate=-1.0 must be a number between 0 and"),
        ("--learning_rate=nan", "learning_rate=nan must be a number"),
        ("--learning_rate=inf", "learning_rate=inf must be a number"),
        ("--muon_momentum=5", "muon_momentum=5.0 must be a number between 0 and 0.9999"),
        ("--muon_momentum=2e9", "muon_momentum=2000000000.0 must be a number between 0 and 0.9999"),
        ("--logit_softcap=2e9", "logit_softcap=2000000000.0 must be 0 or between 1 and 1000"),
        ("--logit_softcap=1e-40", "logit_softcap=1e-40 must be 0 or between 1 and 1000"),
        ("--max_ngram=1000000", "max_ngram=1000000 must be a number between 0 and 32"),
        ("--key_shift=1024", "key_shift=1024 must be less than sequence_length=1024"),
        ("--n_layer=1000000", "n_layer=1000000 must be a number between 1 and 1000"),
        ("--n_head=5", "n_embd=768 must be a multiple of 2 * n_head = 10"),
        ("--n_head=256", "n_embd=768 must be a multiple of 2 * n_head = 512"),
        ("--device=tpu", "--device: invalid choice: 'tpu'"),
        ("--dtype=float16", "--dtype: invalid choice: 'float16'"),
        ("--run_id=../other", "run_id='../other' may contain only letters"),
        ("--run_id=..", "run_id='..' may contain only letters"),
        ("--run_id=a/b", "run_id='a/b' may contain only letters"),
        ("--run_id", "--run_id: expected one argument"),
        ("--resume", "--resume: expected one argument"),
        ("--log_dir", "--log_dir: expected one argument"),
        ("--num_iterations=1e39", "--num_iterations: invalid int value: '1e39'"),
        (f"--n_layer={10**23}", f"n_layer={10**23} must be a number between 1 and"),
        ("--resume=auto", "--resume=auto needs --run_id to know"),
    ],
)
def test_fault_10_impossible_settings_are_refused(argument, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        parse_args([argument])


def test_help_lists_every_setting_with_its_default(capsys):
    with pytest.raises(SystemExit) as done:
        parse_args(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert done.value.code == 0 and len(lines) <= 90 and max(map(len, lines)) <= 100
    words = " ".join(" ".join(lines).split())
    for field in dataclasses.fields(Hyperparameters):
        default = str(field.default) or "''"
        assert f"--{field.name} {default} {train_gpt2.help_of(field)}" in words


AFTER_SETTINGS = "    def __post_init__(self):\n        for field in"


def test_a_new_setting_needs_only_a_type_and_a_default(tiny, tmp_path):
    """Without a comment or help it is read, listed, logged, saved and compared on resume."""
    script = edited_script(
        tmp_path, (AFTER_SETTINGS, "    my_knob: float = 1.0\n\n" + AFTER_SETTINGS)
    )
    fields = {**tiny, "run_id": "knob", "my_knob": 2.5, "save_every": 3}
    done = run_forked(fields, script=script)
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "logs" / "knob.txt").read_text()
    assert "\nhyperparameter my_knob=2.5\n" in log
    path = tmp_path / "logs" / "knob" / "state_step0000000003.pt"
    assert torch.load(path, weights_only=True)["hyperparameters"]["my_knob"] == 2.5
    done = run_forked({**tiny, "resume": path, "run_id": "other"}, script=script)
    assert done.returncode == 1 and "was saved with my_knob=2.5, not 1.0" in done.stderr
    help = run_forked({}, script=script, flags=["--help"])
    assert help.returncode == 0 and "--my_knob 1.0" in help.stdout
    assert "unrecognized arguments" in run_forked({"my_knob": 1}).stderr


def test_a_percent_sign_in_a_help_text_does_not_break_help(capsys, monkeypatch):
    field = Hyperparameters.__dataclass_fields__["n_layer"]
    monkeypatch.setattr(field, "metadata", {"help": "100% of blocks"})
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    assert "100% of blocks" in capsys.readouterr().out


REFUSALS = {
    "val_tokens": ({"val_tokens": 100}, "val_tokens=100 must be a multiple of 16 up to 384"),
    "too few val tokens": (
        {"val_tokens": 400},
        "val_tokens=400 must be a multiple of 16 up to 384",
    ),
    "too few train tokens": ({"num_iterations": 16}, "has enough tokens for 15 steps: add"),
    "a step beyond the data": (
        {"sequence_length": 10**9, "allow_repeat": True},
        "has enough tokens for 0 steps: add data, lower --num_iterations or --batch_size",
    ),
    "a model beyond the memory": ({"n_embd": 2**20}, " parameters, but the memory holds "),
    "a log_dir that cannot be": (
        {"log_dir": "/dev/null/logs"},
        "(Not a directory): choose another --log_dir",
    ),
    "missing data": ({"train_files": "nowhere/*.bin"}, "run data/fineweb.py or data/pack.py"),
    "same shards": ({"val_files": "TRAIN"}, "train_files and val_files both match the same shard"),
    "ids beyond the vocabulary": ({"vocab_size": 32}, "but vocab_size=32"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_fault_9_an_impossible_plan_is_refused_before_it_starts(case, tiny):
    changes, sentence = REFUSALS[case]
    if case == "same shards":
        changes = {"val_files": tiny["train_files"]}
    with pytest.raises((UserError, OSError), match=re.escape(sentence)):
        main(Hyperparameters(**{**tiny, **changes}))
    assert not os.path.exists(tiny["log_dir"])


def test_fault_10_a_rank_without_a_launcher_is_refused(tiny, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match=r"torchrun.*WORLD_SIZE"):
        main(Hyperparameters(**tiny))


def test_a_refusal_is_one_sentence_and_a_failure(tiny, tmp_path):
    done = run_forked({**tiny, "val_tokens": 100})
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("train_gpt2.py: val_tokens=100 must be a multiple of 16")
    assert done.stderr.count("\n") == 1
    (tmp_path / "file").touch()
    done = run_forked({**tiny, "log_dir": tmp_path / "file"})
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch(
        r"train_gpt2.py: cannot write .*/file/.*\.txt \(.*\): choose another .*\n", done.stderr
    )


def test_a_refusal_of_several_ranks_is_said_once(tiny):
    done = run_forked({**tiny, "batch_size": 13}, processes=2)
    assert done.returncode == 1 and done.stdout == ""
    sentence = "batch_size=13 must be a multiple of the 2 ranks"
    assert done.stderr == f"train_gpt2.py: {sentence}\n"


def test_a_refusal_under_torchrun_is_said_once(tiny):
    done = finish(start({**tiny, "val_tokens": 100}, processes=2))
    assert done.returncode == 1
    assert len(re.findall(r"^train_gpt2.py: val_tokens=100 must", done.stderr, re.M)) == 1
    assert "UserError" in done.stderr.split("Root Cause")[1], "torchrun's summary says why, too"


@pytest.mark.parametrize("processes", [1, 2])
def test_more_processes_than_gpus_are_refused(processes, tiny, tmp_path):
    """Also when the first of them would have its GPU."""
    count = "torch.cuda.device_count()", f"{processes - 1}"
    script = edited_script(tmp_path, count, ("torch.cuda.is_available()", "True"))
    done = run_forked({**tiny, "device": "cuda"}, processes, script)
    assert done.returncode == 1 and done.stdout == ""
    sentence = rf"train_gpt2.py: {processes} processes were started for {processes - 1} GPUs: .*\n"
    if processes == 1:
        sentence = r"train_gpt2.py: device=cuda, but PyTorch sees no GPU: pass --device=cpu.*\n"
    assert re.fullmatch(sentence, done.stderr)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver works")
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_gpus_whose_driver_is_unusable_are_no_silent_run_on_cpus(device, tiny, tmp_path):
    script = edited_script(tmp_path, ("torch.cuda.device_count()", "1"))
    done = run_forked({**tiny, "device": device}, 1, script)
    assert done.returncode == 1 and done.stdout == ""
    fix = "update their driver, or pass --device=cpu"
    assert done.stderr == f"train_gpt2.py: PyTorch cannot use the GPUs: {fix}\n"
    assert run_forked({**tiny, "num_iterations": 1}, 1, script).returncode == 0  # device=cpu


@pytest.mark.parametrize("device", ["cpu", "auto", "cuda"])
def test_a_process_group_knows_its_gpu(device, tiny, monkeypatch):
    """The ranks of a node, on a stand-in for CUDA and for the group."""
    asked = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.update(set=device))
    monkeypatch.setattr(dist, "rendezvous", lambda *a, **n: iter([(dist.HashStore(), 1, 2)]))
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda backend, device_id, **n: asked.update(backend=backend, device_id=device_id),
    )
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    *_, chosen = train_gpt2.join_processes(Hyperparameters(**{**tiny, "device": device}))
    if device == "cpu":
        assert chosen == torch.device("cpu")
        assert asked == {"backend": "gloo", "device_id": None}
    else:
        gpu = torch.device("cuda", 1)
        assert chosen == gpu
        assert asked == {"set": gpu, "backend": "cpu:gloo,cuda:nccl", "device_id": gpu}


def test_a_log_is_never_overwritten(tiny):
    args = Hyperparameters(**{**tiny, "run_id": "mine", "num_iterations": 1})
    main(args)
    path = Path(tiny["log_dir"], "mine.txt")
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"mine\.txt exists: pass .*--run_id"):
        main(args)
    assert path.read_bytes() == before


# ---------------------------------------------------------------------------
# training


def tiny_model(settings, **changes):
    args = Hyperparameters(**{**settings, **changes})
    torch.manual_seed(args.seed)
    gpt = GPT(args, train_gpt2.product_dtype(args, torch.device("cpu")))
    return gpt, build_optimizers(gpt, args, 0, 1), args


def train_loader(args, rank=0, world_size=1):
    return DistributedDataLoader(args.train_files, args.batch_size, 16, rank, world_size, "cpu")


def close(one, other, dtype):
    """Tell whether gradients are the same but for rounding."""
    return (one - other).norm() <= {"float32": 1e-5, "bfloat16": 0.02}[dtype] * other.norm()


def test_micro_batches_are_the_largest_of_one_shape():
    assert [micro_batch_size(12, most) for most in (1, 2, 5, 6, 11, 12, 64)] == [
        1, 2, 4, 6, 6, 12, 12
    ]  # fmt: skip
    assert micro_batch_size(7, 6) == 1
    for sequences in range(1, 30):
        for most in range(1, 35):
            size = micro_batch_size(sequences, most)
            assert sequences % size == 0 and size <= most
            assert all(sequences % n for n in range(size + 1, min(sequences, most) + 1))


@both_dtypes
def test_accumulation_equals_the_large_batch(dtype, tiny):
    results, gradients = [], []
    for size in (12, 5, 2, 1):
        gpt, _, args = tiny_model(tiny, device_batch_size=size, dtype=dtype)
        loss, norms = train_step(gpt, [], *train_loader(args).next_batch(), 1.0, args)
        results.append(loss)
        gradients.append([p.grad for p in gpt.parameters()])
        torch.testing.assert_close(norms, torch.stack([p.grad.norm() for p in gpt.parameters()]))
    for loss, grads in zip(results[1:], gradients[1:]):
        torch.testing.assert_close(loss, results[0], rtol=0, atol=2e-3)
        for g, whole in zip(grads, gradients[0]):
            assert close(g, whole, dtype)


def synchronizations(rank, world_size, settings):
    """Loss of one step, sizes of the float32 tensors synced in it, owned gradients."""
    gpt, _, args = tiny_model(settings)
    optimizers = build_optimizers(gpt, args, rank, world_size)
    sizes, gradients = [], {}

    def counted(collective):
        def call(tensor, *arguments, **options):
            if tensor.dtype == torch.float32:  # Muon's updates are bfloat16
                sizes.append(tensor.numel())
            return collective(tensor, *arguments, **options)

        return call

    def keep(model):
        sync_gradients(model)
        gradients.update((name, p.grad.clone()) for name, p in model.named_parameters())

    all_reduce, sync_gradients = dist.all_reduce, train_gpt2.sync_gradients
    dist.all_reduce = counted(all_reduce)
    train_gpt2.sync_gradients = keep
    try:
        batch = train_loader(args, rank, world_size).next_batch()
        loss, _ = train_step(gpt, optimizers, *batch, 1.0, args)
    finally:
        train_gpt2.sync_gradients = sync_gradients
        dist.all_reduce = all_reduce
    return loss, sizes, gradients


def synchronizations_of_sizes(rank, world_size, settings):
    results = []
    for dtype in ("float32", "bfloat16"):
        for size in (1, 2, 6):
            changes = {"dtype": dtype, "device_batch_size": size}
            results.append((dtype, synchronizations(rank, world_size, {**settings, **changes})))
    return results


def test_gradients_are_synchronized_once_a_step(tiny, tmp_path):
    ranks = run_ranks(synchronizations_of_sizes, 2, tmp_path / "ranks", tiny)
    expected = {}
    for dtype in ("float32", "bfloat16"):
        gpt, _, args = tiny_model(tiny, dtype=dtype)
        loss, _ = train_step(gpt, [], *train_loader(args).next_batch(), 1.0, args)
        expected[dtype] = loss, {name: p.grad for name, p in gpt.named_parameters()}
    values = sum(p.numel() for p in gpt.parameters())
    for rank in ranks:
        for dtype, (loss, sizes, gradients) in rank:
            # all gradients at once, however many micro-batches; and the loss with what is finite
            assert sizes == [2, values]
            loss_alone, alone = expected[dtype]
            torch.testing.assert_close(loss, loss_alone, rtol=0, atol=2e-3)
            assert gradients.keys() == alone.keys()
            for name, g in gradients.items():
                assert close(g, alone[name], dtype), name


@pytest.mark.parametrize("length, fused", [(512, False), (513, True)])
def test_a_cpu_takes_plain_attention_for_short_sequences(length, fused):
    args = Hyperparameters(sequence_length=length)
    train_gpt2.configure_backend(args, torch.device("cpu"))
    assert torch.backends.cuda.flash_sdp_enabled() == fused
    assert torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    assert torch._functorch.config.activation_memory_budget == 0.7
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory


def test_a_gpu_keeps_pytorchs_own_settings():
    train_gpt2.configure_backend(Hyperparameters(), torch.device("cuda"))
    assert torch.backends.cuda.flash_sdp_enabled()
    assert not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    assert torch._functorch.config.activation_memory_budget == 1.0
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_gpu_that_only_emulates_bfloat16_trains_in_float32(has_bf16, monkeypatch):
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: including_emulation or has_bf16,
    )
    expected = torch.bfloat16 if has_bf16 else torch.float32
    assert train_gpt2.product_dtype(Hyperparameters(), torch.device("cuda")) == expected


def test_macos_has_no_proc_and_counts_memory_in_bytes(monkeypatch):
    def no_file(path):
        raise FileNotFoundError(path)

    usage = SimpleNamespace(ru_maxrss=3 * 2**30)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(Path, "read_text", no_file)
    monkeypatch.setattr(train_gpt2.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(train_gpt2.resource, "getrusage", lambda who: usage)
    assert train_gpt2.device_name(torch.device("cpu")) == "arm64"
    assert train_gpt2.peak_memory(torch.device("cpu")) == 3072


def test_plain_srun_is_refused(tiny, monkeypatch):
    """It starts every task alone, so each would train the whole run."""
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with pytest.raises(
        UserError, match="SLURM_NTASKS > 1, but torchrun did not start the run: use "
    ):
        main(Hyperparameters(**tiny))
    monkeypatch.setenv("SLURM_NTASKS", "1")
    main(Hyperparameters(**{**tiny, "num_iterations": 1}))


def test_warm_up_leaves_no_trace(tiny):
    gpt, optimizers, args = tiny_model(tiny)
    before = {name: p.clone() for name, p in gpt.state_dict().items()}
    random_state = torch.get_rng_state()
    warm_up(gpt, args, DistributedDataLoader(args.val_files, 2, 16, 0, 1, "cpu"))
    assert all(torch.equal(p, before[name]) for name, p in gpt.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(optimizer.state for optimizer in optimizers)
    assert all(p.grad is None for p in gpt.parameters())


@both_dtypes
def test_validation_counts_exactly_val_tokens(dtype, tiny):
    gpt, _, args = tiny_model(tiny, dtype=dtype)
    loader = DistributedDataLoader(args.val_files, 1, 16, 0, 1, "cpu")
    tokens = torch.from_numpy(loader.read(0, args.val_tokens + 1).astype("int64"))
    with torch.no_grad():
        expected = gpt(tokens[:-1].view(-1, 16), tokens[1:].view(-1, 16)).item()
    assert args.val_tokens // 16 == 19  # a prime number of sequences
    for batch_size in (1, 4, 19, 24):
        loader = DistributedDataLoader(args.val_files, batch_size, 16, 0, 1, "cpu")
        for _ in range(2):  # starts over by itself
            assert evaluate(gpt, loader, args.val_tokens) == pytest.approx(expected, abs=2e-3)


def test_every_parameter_must_have_one_optimizer(tiny):
    gpt, _, args = tiny_model(tiny)
    gpt.h[0].attn.c_q.weight = gpt.h[1].attn.c_q.weight  # it is in two blocks, but one parameter
    build_optimizers(gpt, args, 0, 1)
    gpt, _, args = tiny_model(tiny)
    gpt.h.parameters = lambda: [*gpt.h[0].parameters(), gpt.lm_head.weight.detach()]
    with pytest.raises(UserError, match="exactly one optimizer"):
        build_optimizers(gpt, args, 0, 1)


# ---------------------------------------------------------------------------
# the whole run and its log

TRAIN_LINE = r"step:(\d+)/6 train_loss:(\d+\.\d{4}) train_time:(\d+)ms step_avg:(\d+\.\d\d)ms"

# of the settings `tiny`, on any number of processes and with any micro-batches: a CPU may round
# otherwise, but not hash otherwise
GOLDEN_HASHES = ["000000000000", "02a3a7c71f8e", "09dd09b6dfb8"]
GOLDEN_LOSSES = {"float32": [4.5422, 3.8337, 3.4781], "bfloat16": [4.5417, 3.8354, 3.4821]}
TOLERANCE = {"float32": 0.002, "bfloat16": 0.02}


def check_golden(text, dtype):
    rows = validations(text)
    assert [(step, data_hash) for step, _, data_hash in rows] == list(zip((0, 3, 6), GOLDEN_HASHES))
    values = [loss for _, loss, _ in rows]
    assert values == pytest.approx(GOLDEN_LOSSES[dtype], abs=TOLERANCE[dtype])


@both_dtypes
def test_log_grammar_and_result(dtype, tiny, tmp_path, capsys):
    val_loss = main(Hyperparameters(**{**tiny, "run_id": "one", "dtype": dtype, "save_every": 6}))
    text = Path(tiny["log_dir"], "one.txt").read_text()
    source = Path(train_gpt2.__file__).read_text()
    assert text.startswith(source + "\n"), "the log begins with the source"
    lines = text[len(source) + 1 :].splitlines()
    settings = Hyperparameters(**{**tiny, "run_id": "one", "dtype": dtype, "save_every": 6})
    for name, value in dataclasses.asdict(settings).items():
        assert lines.pop(0) == f"hyperparameter {name}={value!r}"
    assert capsys.readouterr().out.splitlines() == lines  # all but source and settings is shown
    assert re.fullmatch(r"torch:\S+ commit:([0-9a-f]{40}(-dirty)?)?", lines[0])
    device = rf"device:.* processes:1 threads:\d+ products:torch\.{dtype}"
    assert re.fullmatch(device, lines[1])
    tokens = np.fromfile(tmp_path / "val_0.bin", np.uint16)[512:][: tiny["val_tokens"] + 1]
    val_hash = hashlib.sha256(tokens).hexdigest()[:16]
    assert lines[2] == f"train_tokens:3000 val_hash:{val_hash} micro_batch:2"
    assert lines[3:5] == ["AdamW parameters:1024", "Muon parameters:6144"]
    assert lines[5].startswith("compiling (up to")
    assert lines[6].startswith("a high first loss is expected")
    assert re.fullmatch(r"about \S+ s per step, \d:\d\d:\d\d remaining", lines[7])
    steps = [re.fullmatch(TRAIN_LINE, line) for line in lines[8:-4] if " train_loss:" in line]
    assert [int(step[1]) for step in steps] == [1, 2, 3, 4, 5, 6]
    times = [int(step[3]) for step in steps]
    assert times == sorted(times)
    for step in steps:
        assert float(step[4]) == pytest.approx(int(step[3]) / int(step[1]), abs=1)
    assert len(lines) == 8 + 6 + 3 + 4
    assert lines[-2].startswith(f"weights: {tiny['log_dir']}/one/model.pt; ")
    check_golden(text, dtype)
    assert validations(text)[-1][1] == pytest.approx(val_loss, abs=5e-5)
    phases = dict(part.split(":") for part in lines[-4].split())
    assert set(phases) == {"compile", "train", "validation", "checkpoint"}
    assert all(re.fullmatch(r"\d+\.\d+s", seconds) for seconds in phases.values())
    assert re.fullmatch(r"tokens/s:\d+ peak_memory:\d+MiB graphs:\d+", lines[-3])
    assert lines[-1] == f"result val_loss:{val_loss:.4f} target:3.28"


@both_dtypes
def test_the_run_is_the_same_on_any_number_of_processes(dtype, tiny):
    for processes in (1, 2, 3):
        done = run_forked({**tiny, "dtype": dtype}, processes)
        assert done.returncode == 0, done.stderr
        assert f" processes:{processes} " in done.stdout and " micro_batch:2\n" in done.stdout
        check_golden(done.stdout, dtype)


@both_dtypes
def test_micro_batches_change_neither_stream_nor_loss(dtype, tiny, capsys):
    for size, taken in (12, 12), (5, 4), (1, 1):
        main(Hyperparameters(**{**tiny, "device_batch_size": size, "dtype": dtype}))
        text = capsys.readouterr().out
        assert f" micro_batch:{taken}\n" in text
        check_golden(text, dtype)


THREADS = """
import os, sys
import train_gpt2

train_gpt2.main(train_gpt2.parse_args(sys.argv[1:]))
for task in os.listdir("/proc/self/task"):
    try:
        name = open(f"/proc/self/task/{task}/comm").read()
    except OSError:  # it has just ended
        continue
    if "gloo" in name:
        sys.exit(1)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="no /proc here")
def test_the_process_group_ends_with_the_run(tiny, tmp_path):
    """Its threads, still there at exit, now and then abort a process that has done its work."""
    (tmp_path / "threads.py").write_text(THREADS)
    done = run_forked(tiny, 2, script=tmp_path / "threads.py")
    assert done.returncode == 0, done.stderr


def test_repetition_needs_a_word(tiny, tmp_path):
    """Without it a run of one step more is refused, above; with it the stream begins again."""
    settings = {**tiny, "num_iterations": 17, "val_loss_every": 0, "allow_repeat": True}
    main(Hyperparameters(**{**settings, "run_id": "r", "save_every": 17}))
    state = torch.load(tmp_path / "logs" / "r" / "state_step0000000017.pt", weights_only=True)
    assert state["train_loader"]["position"] == 17 * 12 * 16 > 3000


@both_dtypes
def test_checkpoints_are_whole_and_load(dtype, tiny):
    settings = {**tiny, "run_id": "c", "save_every": 4, "dtype": dtype}
    done = run_forked(settings, processes=2)
    assert done.returncode == 0, done.stderr
    folder = Path(tiny["log_dir"], "c")
    assert sorted(os.listdir(folder)) == [
        "model.pt",
        "state_step0000000004.pt",
        "state_step0000000006.pt",
    ]
    state = torch.load(folder / "state_step0000000006.pt", weights_only=True)
    args = Hyperparameters(**state["hyperparameters"])
    gpt = GPT(args, getattr(torch, dtype))
    gpt.load_state_dict(state["model"])
    loader = DistributedDataLoader(args.val_files, 1, 16, 0, 1, "cpu")
    step, loss, data_hash = validations(done.stdout)[-1]
    assert evaluate(gpt, loader, args.val_tokens) == pytest.approx(loss, abs=2e-3)
    assert (state["step"], state["train_loader"]["data_hash"]) == (step, data_hash)
    assert state["train_loader"]["position"] == 6 * 12 * 16
    momenta = state["optimizers"][1]["state"]
    assert len(momenta) == 12 and all(m["momentum_buffer"].any() for m in momenta.values())
    assert all(p.dtype == torch.float32 for p in state["model"].values())


def test_a_compiled_run_makes_two_graphs_and_never_again(tiny, tmp_path):
    """One for training and one for validation; what needs another one is counted, too.
    How many there are does not depend on the backend, and that of the second run is faster."""
    fields = {**tiny, "compile": True, "dtype": "float32"}
    compile = "gpt.compile(dynamic=False"
    fast = compile, compile.replace("dynamic", 'backend="eager", dynamic')
    tokens = "torch.zeros(1, 7, dtype=torch.int64)"
    other_shape = STEP, f"{STEP}        gpt({tokens}, {tokens})\n"
    for processes, changes, graphs in (1, [], 2), (2, [fast, other_shape], 3):
        done = run_forked(fields, processes, edited_script(tmp_path, *changes))
        assert done.returncode == 0, done.stderr
        assert f" graphs:{graphs}\n" in done.stdout
        check_golden(done.stdout, "float32")


# ---------------------------------------------------------------------------
# books, and the script that starts everything

BOOKS_HASH = "26e32390d795"
BOOKS_LOSSES = {"float32": 10.3703, "bfloat16": 10.3695}


@pytest.mark.parametrize("processes, dtype", [(1, "float32"), (4, "bfloat16")])
def test_books_give_one_stream_and_one_loss(processes, dtype, books):
    settings = {
        **TINY, "vocab_size": 50304, "batch_size": 24, "sequence_length": 32, "val_loss_every": 0,
        "val_tokens": 4096, "dtype": dtype, "train_files": f"{books}/train_*.bin",
        "val_files": f"{books}/val_*.bin", "log_dir": f"{books}/logs",
    }  # fmt: skip
    done = run_forked(settings, processes)
    assert done.returncode == 0, done.stderr
    [(step, loss, data_hash)] = validations(done.stdout)
    assert (step, data_hash) == (6, BOOKS_HASH)
    assert loss == pytest.approx(BOOKS_LOSSES[dtype], abs=TOLERANCE[dtype])


STUB = """#!/bin/sh
case "$*" in
*-c*) exit 0 ;;
*--ignore*) exit $REST ;;
*) exit $RUNS ;;
esac
"""


@pytest.mark.parametrize("runs, rest, expected", [(0, 0, 0), (1, 0, 1), (0, 2, 2)])
def test_run_sh_fails_when_a_half_of_the_suite_fails(runs, rest, expected, tmp_path):
    (tmp_path / "python").write_text(STUB)
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "tmp").mkdir()
    changes = {"PYTHON": f"{tmp_path}/python", "TMPDIR": f"{tmp_path}/tmp"}
    done = subprocess.run(
        ["bash", ROOT / "run.sh", "test"], timeout=60, capture_output=True,
        env={**os.environ, **changes, "RUNS": str(runs), "REST": str(rest)},
    )  # fmt: skip
    assert done.returncode == expected, done.stderr
    assert not os.listdir(tmp_path / "tmp")


@pytest.mark.skipif(torch.cuda.is_available(), reason="run.sh would train the 124M record here")
def test_run_sh_trains_the_cpu_record(tmp_path):
    short = {"num_iterations": 2, "val_tokens": 4096, "compile": False, "log_dir": tmp_path}
    done = subprocess.run(
        ["bash", ROOT / "run.sh", *(f"--{name}={value}" for name, value in short.items())],
        capture_output=True, text=True, timeout=240, cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    comparable = "data: the record's own" in done.stdout
    assert comparable == torch.__version__.startswith("2.13.0")
    assert " processes:1 " in done.stdout and "result val_loss:" in done.stdout
    step, _, data_hash = validations(done.stdout)[-1]
    assert step == 2 and (data_hash == RECORD_HASH or not comparable)


RECORD_HASH = "026fe16faec6"


PRINT = """#!/bin/sh
case "$*" in
*device_count*) echo $GPUS ;;
*-c*) ;;
*) echo "$*" ;;
esac
"""


@pytest.mark.parametrize("gpus, nproc, processes", [(0, 0, 1), (0, 2, 2), (8, 0, 8), (8, 1, 1)])
def test_run_sh_starts_a_process_for_each_gpu(gpus, nproc, processes, tmp_path):
    (tmp_path / "python").write_text(PRINT)
    (tmp_path / "python").chmod(0o755)
    changes = {"PYTHON": f"{tmp_path}/python", "GPUS": str(gpus)}
    if nproc:
        changes["NPROC"] = str(nproc)
    done = subprocess.run(
        ["bash", ROOT / "run.sh", "--seed=1", "--yes"], timeout=60, capture_output=True, text=True,
        env={**os.environ, **changes},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    command = done.stdout.splitlines()[-1]
    launcher = f"-m torch.distributed.run --standalone --nproc_per_node={processes} "
    assert command.startswith(launcher * (processes > 1) + "train_gpt2.py ")
    assert command.endswith(" --seed=1")
    assert ("--preset=cpu" in command) == (gpus == 0)


@pytest.mark.parametrize("given", [["--preset=cpu"], ["--preset", "cpu"]])
def test_the_cpu_record_stays_on_the_cpu_beside_gpus(given, tmp_path):
    (tmp_path / "python").write_text(PRINT)
    (tmp_path / "python").chmod(0o755)
    changes = {"PYTHON": f"{tmp_path}/python", "GPUS": "8"}
    done = subprocess.run(
        ["bash", ROOT / "run.sh", *given], timeout=60, capture_output=True, text=True,
        env={**os.environ, **changes},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    launcher, script, rest = done.stdout.splitlines()[-1].partition("train_gpt2.py ")
    assert script and not launcher  # of several processes
    assert parse_args(rest.split()) == parse_args(["--preset=cpu"])


RECORD_STUB = """#!/bin/sh
case "$*" in
*device_count*) echo 0 ;;
*-c*) ;;
*train_gpt2.py*)
    trap 'echo saved; kill $!; exit 0' TERM
    echo started
    sleep $SECONDS_OF_TRAINING & wait
    exit $STATUS ;;
*) echo "$*" ;;
esac
"""


@pytest.mark.parametrize("status, stopped", [(0, False), (3, False), (0, True)])
def test_run_sh_ends_the_cpu_record_with_a_sample(status, stopped, tmp_path):
    """Unless the training fails, whose status it has; a SIGTERM reaches the training."""
    (tmp_path / "python").write_text(RECORD_STUB)
    (tmp_path / "python").chmod(0o755)
    changes = {"PYTHON": f"{tmp_path}/python", "STATUS": str(status)}
    changes["SECONDS_OF_TRAINING"] = "60" if stopped else "0"
    run = subprocess.Popen(
        ["bash", ROOT / "run.sh"], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, **changes}, start_new_session=True,
    )  # fmt: skip
    lines = []
    for line in run.stdout:
        lines.append(line)
        if line == "started\n" and stopped:
            run.terminate()
    assert run.wait(timeout=60) == status, run.stderr.read()
    assert ("saved\n" in lines) == stopped
    assert (lines[-1] == "records/tools/sample.py def \n") == (status == 0 and not stopped)


def test_run_sh_leads_to_the_tools(tmp_path):
    (tmp_path / "python").write_text(PRINT)
    (tmp_path / "python").chmod(0o755)
    for given, expected in {
        "sample Hello --tokens=3": "records/tools/sample.py Hello --tokens=3",
        "evaluate": "records/tools/evaluate.py",
        "export --out=x": "records/tools/export.py --out=x",
        "pack a --out b": "data/pack.py a --out b",
        "--preset=text": "train_gpt2.py --preset=cpu --preset=text",
        "--preset text": "train_gpt2.py --preset=cpu --preset text",
        "--help": "train_gpt2.py --preset=cpu --help",
    }.items():
        done = subprocess.run(
            ["bash", ROOT / "run.sh", *given.split()], timeout=60, capture_output=True, text=True,
            env={**os.environ, "PYTHON": f"{tmp_path}/python", "GPUS": "0"},
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, expected + "\n"), done.stderr
