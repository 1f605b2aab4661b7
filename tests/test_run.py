"""The run: settings, refusals, the training step, the log, and the same run on any world size."""

import dataclasses
import os
import re
import subprocess
import sys

import describe
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, TINY, run_forked, run_ranks, run_script

import train_gpt2
from train_gpt2 import (
    GPT,
    DistributedDataLoader,
    Hyperparameters,
    build_optimizers,
    evaluate,
    lr_multiplier,
    main,
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
    assert (args.muon_momentum, args.weight_decay) == (0.95, 0)
    assert (args.warmup_iters, args.warmdown_iters) == (0, 1450)
    assert (args.val_loss_every, args.val_tokens) == (125, 10485760)
    with torch.device("meta"):
        adamw, muon = build_optimizers(GPT(args), args, 0, 1)
    assert adamw.defaults["betas"] == (0.9, 0.95)
    assert [muon.defaults[k] for k in ("momentum", "nesterov", "ns_steps")] == [0.95, True, 5]


def test_learning_rate_rises_stays_and_falls():
    args = Hyperparameters(num_iterations=20, warmup_iters=4, warmdown_iters=10)
    scales = [lr_multiplier(step, args) for step in range(20)]
    assert scales[:5] == [0.25, 0.5, 0.75, 1, 1]
    assert scales[10:] == pytest.approx([1 - i / 10 for i in range(10)])
    assert lr_multiplier(0, Hyperparameters(num_iterations=5, warmdown_iters=0)) == 1
    args = Hyperparameters(num_iterations=10, warmup_iters=6, warmdown_iters=10)
    assert lr_multiplier(6, args) == 0.4  # where rise and fall overlap, the smaller one holds


def test_any_field_can_be_given_on_the_command_line():
    values = {"n_layer": 3, "learning_rate": 0.5, "train_files": "a=b", "compile": False}
    args = parse_args([f"--{name}={value}" for name, value in values.items()])
    assert args == Hyperparameters(**values)
    assert parse_args(["--n_layer=3", "--n_layer=4"]).n_layer == 4


@pytest.mark.parametrize(
    "argument, sentence",
    [
        ("--batchsize=8", "did you mean --batch_size?"),
        ("--zzz=8", "did you mean --help?"),
        ("batch_size=8", "unknown argument"),
        ("--batch_size", "write --batch_size=a value of type int"),
        ("--batch_size=many", "write --batch_size=a value of type int"),
        ("--batch_size=1.5", "write --batch_size=a value of type int"),
        ("--compile=maybe", "write --compile=True or False"),
        ("--batch_size=0", "batch_size=0 must be a number of at least 1"),
        ("--learning_rate=-1", "learning_rate=-1.0 must be a number of at least 0"),
        ("--learning_rate=nan", "must be a number"),
        ("--learning_rate=inf", "must be a number"),
        ("--muon_momentum=1", "must be below 1"),
        ("--n_head=5", "n_embd=768 must be a multiple of 2 * n_head=10"),
        ("--n_head=256", "n_embd=768 must be a multiple of 2 * n_head"),
        ("--vocab_size=65537", "at most 65536"),
        ("--warmup_iters=9999", "warmup_iters=9999 must be at most 5100"),
        ("--seed=9999999999999999999", "must be below 2**63"),
        ("--device=tpu", "device='tpu' must be one of ('auto', 'cuda', 'cpu')"),
    ],
)
def test_impossible_settings_are_refused(argument, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        parse_args([argument])


def test_fields_of_the_wrong_type_are_refused():
    for wrong in ({"n_layer": 2.0}, {"n_layer": True}, {"compile": 1}, {"train_files": 3}):
        with pytest.raises(ValueError, match="must be of type"):
            Hyperparameters(**wrong)


def test_help_lists_every_field(capsys):
    with pytest.raises(SystemExit) as exit:
        parse_args(["--help"])
    text = capsys.readouterr().out
    assert exit.value.code == 0
    assert all(f"--{field.name}=" in text for field in dataclasses.fields(Hyperparameters))


REFUSALS = {
    "batch for 5 processes": ({}, {"RANK": "0", "WORLD_SIZE": "5"}, "multiple of 5"),
    "micro-batch": ({"device_batch_size": 5}, {}, "one of [1, 2, 3, 4, 6, 12]"),
    "val_tokens": ({"val_tokens": 100}, {}, "such as 96"),
    "too few train tokens": ({"num_iterations": 16}, {}, "--num_iterations of at most 15"),
    "too few val tokens": ({"val_tokens": 400}, {}, "--val_tokens of at most 384"),
    "missing data": ({"train_files": "nowhere/*.bin"}, {}, "data/fineweb.py"),
    "RANK alone": ({}, {"RANK": "0"}, "only one of RANK and WORLD_SIZE"),
    "same shards": ({"val_files": "TRAIN"}, {}, "is in train_files and in val_files"),
    "ids beyond the vocabulary": ({"vocab_size": 32}, {}, "vocab_size=32"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_an_impossible_plan_is_refused_before_it_starts(case, tiny, monkeypatch):
    changes, environment, sentence = REFUSALS[case]
    if case == "same shards":
        changes = {"val_files": tiny["train_files"]}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(sentence)):
        main(Hyperparameters(**{**tiny, **changes}))
    assert case.startswith("ids") or not os.path.exists(tiny["log_dir"])


@pytest.mark.parametrize("processes, gpus", [(8, 4), (1, 0)])
def test_more_processes_than_gpus_are_refused(processes, gpus, tiny, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ValueError, match=f"{processes} processes .* {gpus} GPUs visible"):
        main(Hyperparameters(**{**tiny, "device": "cuda"}))


def test_a_refusal_is_one_sentence_and_a_failure(tiny):
    done = run_forked({**tiny, "val_tokens": 100})
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("train_gpt2.py: val_tokens=100 is not a whole number")
    assert done.stderr.count("\n") == 1


def test_a_refusal_under_torchrun_is_said_once(tiny):
    done = run_script({**tiny, "device_batch_size": 4}, processes=2)
    assert done.returncode != 0
    assert done.stderr.count("train_gpt2.py: device_batch_size=4 does not divide the 6") == 1


def test_a_log_is_never_overwritten(tiny):
    args = Hyperparameters(**{**tiny, "run_id": "mine", "num_iterations": 1})
    main(args)
    with pytest.raises(ValueError, match=r"mine\.txt exists.*--run_id"):
        main(args)


# ---------------------------------------------------------------------------
# training


def tiny_model(tiny, **changes):
    args = Hyperparameters(**{**tiny, **changes})
    torch.manual_seed(args.seed)
    gpt = GPT(args)
    return gpt, build_optimizers(gpt, args, 0, 1), args


def test_accumulation_equals_the_large_batch(tiny):
    losses, gradients = [], []
    for size in (12, 5, 2, 1):  # 5: the last micro-batch is smaller
        gpt, _, args = tiny_model(tiny, device_batch_size=size)
        loader = DistributedDataLoader(args.train_files, 12, 16, 0, 1, "cpu")
        losses.append(train_step(gpt, [], *loader.next_batch(), 1.0, args))
        gradients.append([p.grad for p in gpt.parameters()])
    for loss, grads in zip(losses[1:], gradients[1:]):
        torch.testing.assert_close(loss, losses[0], rtol=0, atol=2e-3)
        for g, whole in zip(grads, gradients[0]):
            assert (g - whole).norm() <= 0.02 * whole.norm()  # bf16


def synchronizations(rank, world_size, settings):
    """Loss of one step of several micro-batches, sizes of the tensors synced, owned gradients."""
    args = Hyperparameters(**settings)
    torch.manual_seed(args.seed)
    gpt = GPT(args)
    optimizers = build_optimizers(gpt, args, rank, world_size)
    sizes, gradients = [], {}
    reduce, all_reduce = dist.reduce, dist.all_reduce

    def counted(collective):
        def call(tensor, *arguments, **options):
            sizes.append(tensor.numel())
            return collective(tensor, *arguments, **options)

        return call

    def keep(optimizer):
        for name, p in gpt.named_parameters():
            if optimizers[1].owner.get(p, rank) == rank:
                gradients[name] = p.grad.clone()

    dist.reduce, dist.all_reduce = counted(reduce), counted(all_reduce)
    try:
        train_gpt2.sync_gradients, original = (
            lambda optimizers: (original(optimizers), keep(optimizers)), train_gpt2.sync_gradients
        )  # fmt: skip
        loader = DistributedDataLoader(args.train_files, 12, 16, rank, world_size, "cpu")
        muon_step, optimizers[1].step = optimizers[1].step, lambda: None
        loss = train_step(gpt, optimizers, *loader.next_batch(), 1.0, args)
    finally:
        train_gpt2.sync_gradients, optimizers[1].step = original, muon_step
        dist.reduce, dist.all_reduce = reduce, all_reduce
    return loss, sizes, gradients


def test_gradients_are_synchronized_once_a_step(tiny, tmp_path):
    ranks = run_ranks(synchronizations, 2, tmp_path / "ranks", tiny)
    gpt, _, args = tiny_model(tiny)
    loader = DistributedDataLoader(args.train_files, 12, 16, 0, 1, "cpu")
    loss = train_step(gpt, [], *loader.next_batch(), 1.0, args)
    names = {name: p.grad for name, p in gpt.named_parameters()}
    for rank_loss, sizes, grads in ranks:
        # each gradient once, however many micro-batches; and the loss, one number
        assert sorted(sizes) == sorted([p.numel() for p in gpt.parameters()] + [1])
        torch.testing.assert_close(rank_loss, loss, rtol=0, atol=2e-3)
        for name, g in grads.items():
            assert (g - names[name]).norm() <= 0.02 * names[name].norm(), name
    owned = [set(grads) for _, _, grads in ranks]
    assert owned[0] | owned[1] == set(names) and owned[0] & owned[1] == {"wte.weight"}


def test_warm_up_leaves_no_trace(tiny):
    gpt, optimizers, args = tiny_model(tiny)
    before = {name: p.clone() for name, p in gpt.state_dict().items()}
    random_state = torch.get_rng_state()
    loader = DistributedDataLoader(args.train_files, 12, 16, 0, 1, "cpu")
    warm_up(gpt, optimizers, args, loader)
    assert loader.position == 0 and loader.data_hash() == "0" * 16
    assert all(torch.equal(p, before[name]) for name, p in gpt.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(optimizer.state for optimizer in optimizers)
    assert all(p.grad is None for p in gpt.parameters())


def test_validation_counts_exactly_val_tokens(tiny):
    gpt, _, args = tiny_model(tiny)
    loader = DistributedDataLoader(args.val_files, 1, 16, 0, 1, "cpu")
    tokens = torch.from_numpy(loader.read(0, args.val_tokens + 1)[0].astype("int64"))
    train_gpt2.cast_weights(gpt, train_gpt2.matmul_dtype(torch.device("cpu")))
    with torch.no_grad():
        expected = gpt(tokens[:-1].view(-1, 16), tokens[1:].view(-1, 16)).item()
    assert args.val_tokens // 16 == 19  # a prime number of sequences
    for batch_size in (1, 4, 19, 24):
        loader = DistributedDataLoader(
            args.val_files, batch_size, 16, 0, 1, "cpu", allow_repeat=True
        )
        for _ in range(2):  # starts over by itself
            assert evaluate(gpt, loader, args.val_tokens) == pytest.approx(expected, abs=2e-3)


def test_every_parameter_must_have_one_optimizer(tiny):
    gpt, _, args = tiny_model(tiny)
    gpt.extra = torch.nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="exactly one optimizer"):
        build_optimizers(gpt, args, 0, 1)


# ---------------------------------------------------------------------------
# the whole run and its log

TRAIN_LINE = r"step:(\d+)/6 train_loss:(\d+\.\d{4}) train_time:(\d+)ms step_avg:(\d+\.\d\d)ms"
VAL_LINE = (
    r"step:(\d+)/\d+ val_loss:(\d+\.\d{4}) train_time:(\d+)ms step_avg:(\d+\.\d\d)ms "
    r"data_hash:([0-9a-f]{16})"
)


def results(text):
    """[(step, loss, hash)] of the validation lines in a log."""
    lines = [line for line in text.splitlines() if line.startswith("step:") and " val_" in line]
    rows = [re.fullmatch(VAL_LINE, line) for line in lines]
    assert rows and all(rows), lines
    return [(int(m[1]), float(m[2]), m[5]) for m in rows]


def test_log_grammar_and_result(tiny, capsys):
    val_loss = main(Hyperparameters(**{**tiny, "run_id": "one", "bytes_per_token": 0.5}))
    text = open(f"{tiny['log_dir']}/one.txt").read()
    source = open(train_gpt2.__file__).read()
    assert text.startswith(source), "the log begins with the source"
    body = text[len(source) :]
    for path in describe.SIBLINGS:
        assert f"\nsource of {path}:\n{(describe.ROOT / path).read_text()}\n" in text
    lines = body.splitlines()
    shown = capsys.readouterr().out.splitlines()
    assert shown == [line for line in lines if line in shown] and len(shown) > 20
    steps = [re.fullmatch(TRAIN_LINE, line) for line in lines if " train_loss:" in line]
    assert [int(m[1]) for m in steps] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _, _ in results(body)] == [0, 3, 6]
    assert results(body)[-1][1] == pytest.approx(val_loss, abs=5e-5)
    assert not any("nan" in line for line in lines if line.startswith("step:"))
    for field in dataclasses.fields(Hyperparameters):
        assert f"hyperparameter {field.name}=" in body
    for part in ("python:", "torch:", "commit:", "val_hash:", "tokens/s:", "peak_memory:"):
        assert part in body
    assert re.search(r"2 x h\.\*\.mlp\.c_fc\.weight +\(64, 16\) +Muon +lr:0\.005", body)
    assert re.search(r"1 x wte\.weight +\(64, 16\) +AdamW +lr:0\.01", body)
    assert "muon: slowest rank/mean cost:1.000 momentum MiB of each rank:[0.0]" in body
    assert re.search(r"setup:[\d.]+s compile:[\d.]+s validation:[\d.]+s train:[\d.]+s", body)
    bits = val_loss / 0.6931472 / 0.5
    assert f"result val_loss:{val_loss:.4f} bits_per_byte:{bits:.4f} target:3.28" in lines[-1]


def test_attention_is_what_was_asked_for_and_named(tiny):
    losses = {}
    for asked, taken in (("auto", "flash"), ("flash", "flash"), ("math", "math")):
        losses[asked] = main(Hyperparameters(**{**tiny, "run_id": asked, "attention": asked}))
        assert f" attention:{taken}\n" in open(f"{tiny['log_dir']}/{asked}.txt").read()
    assert losses["math"] == pytest.approx(losses["auto"], abs=1e-3)


def test_an_attention_that_is_not_to_be_had_is_refused(tiny):
    done = run_forked({**tiny, "attention": "cudnn"})
    assert done.returncode == 1
    assert "attention='cudnn' is not to be had on this device: give --attention=auto" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_run_is_the_same_on_any_number_of_processes(tiny):
    logs = {}
    for processes in (1, 2, 3):
        done = run_forked({**tiny, "run_id": f"w{processes}"}, processes)
        assert done.returncode == 0, done.stderr
        logs[processes] = results(done.stdout)
    alone = logs[1]
    assert len(alone) == 3 and alone[0][2] == "0" * 16 and alone[1][2] != alone[2][2]
    for processes in (2, 3):
        assert len(logs[processes]) == 3
        for (step, loss, data_hash), (step_1, loss_1, data_hash_1) in zip(logs[processes], alone):
            assert (step, data_hash) == (step_1, data_hash_1)
            assert loss == pytest.approx(loss_1, abs=0.01)


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
    settings = [f"--{name}={value}" for name, value in tiny.items()]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, tmp_path / "threads.py", *settings],
        capture_output=True, text=True, timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_micro_batches_change_neither_stream_nor_loss(tiny):
    for size in (12, 1):
        main(Hyperparameters(**{**tiny, "device_batch_size": size, "run_id": f"b{size}"}))
    first, second = (results(open(f"{tiny['log_dir']}/b{b}.txt").read()) for b in (12, 1))
    assert len(first) == len(second) == 3
    for (step, loss, data_hash), (step_1, loss_1, data_hash_1) in zip(first, second):
        assert (step, data_hash) == (step_1, data_hash_1)
        assert loss == pytest.approx(loss_1, abs=0.01)


def test_repetition_needs_a_word(tiny):
    main(Hyperparameters(**{**tiny, "num_iterations": 17, "allow_repeat": True, "run_id": "r"}))
    assert "17 steps read 3,264 (1.088 epochs)" in open(f"{tiny['log_dir']}/r.txt").read()


def test_a_loss_that_is_no_number_ends_the_run(tiny, monkeypatch):
    rates = {"learning_rate": 1e38, "muon_learning_rate": 1e38}
    with pytest.raises(FloatingPointError, match=r"gradient of parameter wte\.weight"):
        main(Hyperparameters(**{**tiny, **rates, "run_id": "nan"}))
    log = open(f"{tiny['log_dir']}/nan.txt").read()
    last = r"failed: the gradient .* is not finite, seen on rank 0: lower .* \(at step 2; no .*\n$"
    assert re.search(last, log)
    monkeypatch.setattr(train_gpt2, "evaluate", lambda *arguments: float("nan"))
    with pytest.raises(FloatingPointError, match="val_loss is nan at step 0"):
        main(Hyperparameters(**tiny))


def test_checkpoints_are_whole_and_load(tiny):
    done = run_forked({**tiny, "run_id": "c", "save_every": 4}, processes=2)
    assert done.returncode == 0, done.stderr
    folder = f"{tiny['log_dir']}/c"
    assert sorted(os.listdir(folder)) == ["state_step000004.pt", "state_step000006.pt"]
    state = torch.load(f"{folder}/state_step000006.pt", weights_only=True)
    args = Hyperparameters(**state["hyperparameters"])
    gpt = GPT(args)
    gpt.load_state_dict(state["model"])
    loader = DistributedDataLoader(args.val_files, 1, 16, 0, 1, "cpu", allow_repeat=True)
    step, loss, data_hash = results(done.stdout)[-1]
    assert evaluate(gpt, loader, args.val_tokens) == pytest.approx(loss, abs=2e-3)
    assert (state["step"], state["train_loader"]["data_hash"]) == (step, data_hash)
    assert state["train_loader"]["position"] == 6 * 12 * 16
    momenta = state["optimizers"][1]["state"]
    assert len(momenta) == 12 and all(m["momentum_buffer"].any() for m in momenta.values())


def test_compiled_run_makes_two_graphs_and_never_again(tiny):
    done = run_forked({**tiny, "compile": True, "num_iterations": 4}, processes=2)
    assert done.returncode == 0, done.stderr
    assert "compile: graphs:2 graph_breaks:0 recompiles:0" in done.stdout


@pytest.mark.parametrize("processes", [1, 4])  # 2 and 3: in the test of any number, above
def test_books_give_one_stream_and_one_loss(processes, books):
    settings = {
        **TINY, "vocab_size": 50304, "batch_size": 24, "device_batch_size": 2,
        "sequence_length": 32, "num_iterations": 6, "val_tokens": 4096,
        "train_files": f"{books}/train_*.bin", "val_files": f"{books}/val_*.bin",
        "log_dir": f"{books}/logs",
    }  # fmt: skip
    done = run_forked(settings, processes)
    assert done.returncode == 0, done.stderr
    step, loss, data_hash = results(done.stdout)[-1]
    assert (step, data_hash) == (6, BOOKS_HASH)
    assert loss == pytest.approx(BOOKS_LOSS, abs=0.01)


BOOKS_HASH, BOOKS_LOSS = "2e4aa7824768a8e1", 10.3703  # one process; two, three and four agree


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
@pytest.mark.parametrize("processes", [1, 2])
def test_run_sh_trains_the_cpu_record(processes, tmp_path):
    short = {"num_iterations": 2, "val_tokens": 4096, "compile": False, "log_dir": tmp_path}
    done = subprocess.run(
        ["bash", ROOT / "run.sh", *(f"--{name}={value}" for name, value in short.items())],
        capture_output=True, text=True, timeout=240, cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable, "NPROC": str(processes)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    comparable = "data: the record's own" in done.stdout
    assert comparable == torch.__version__.startswith("2.13.0")
    assert f"{processes} processes" in done.stdout and "bits_per_byte:" in done.stdout
    step, _, data_hash = results(done.stdout)[-1]
    assert step == 2 and (data_hash == RECORD_HASH or not comparable)


RECORD_HASH = "0fba5f4fddcd79bc"
