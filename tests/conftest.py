"""Shared helpers: tiny runs, in this process and in others, and what they leave behind."""

import dataclasses
import gc
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "train_gpt2.py"
MODERN_SCRIPT = ROOT / "records" / "modern" / "train_modern.py"
SHARED_DATA = ROOT.parent / "shared" / "data"
for folder in "", "data", "records/modern", "records/tools", "tests/bench":
    sys.path.insert(0, str(ROOT / folder))

import train_modern  # noqa: E402

import train_gpt2  # noqa: E402

# PyTorch collects its factory functions when a device is first used in this way. Loading a model,
# transformers replaces torch.linspace for a while, and must not be first.
with torch.device("meta"):
    torch.empty(1)

both_dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])

TINY = {
    "vocab_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 16, "batch_size": 12,
    "device_batch_size": 2, "sequence_length": 16, "num_iterations": 6, "warmdown_fraction": 0.5,
    "learning_rate": 0.01, "muon_learning_rate": 0.005, "val_loss_every": 3, "val_tokens": 304,
    "device": "cpu", "compile": False, "keep_checkpoints": 3,
}  # fmt: skip


@pytest.fixture(autouse=True)
def pytorchs_own_settings():
    """Restore the global options of PyTorch that configure_cpu sets."""
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    budget = functorch_config.patch(activation_memory_budget=1.0)
    with budget, inductor_config.patch({"cpp.vec_isa_ok": None}):
        yield


def write_shard(path, tokens):
    """Write tokens as a shard, straight from the format's description."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, len(tokens)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype="<u2").tobytes())
    return path


@pytest.fixture
def tiny(tmp_path):
    """Settings of a tiny run on predictable tokens: three shards and a validation shard."""
    generator = np.random.default_rng(0)
    steps = generator.integers(1, 4, size=4000)
    stream = np.cumsum(steps) % 64
    for i, part in enumerate(np.split(stream[:3000], [700, 1801])):
        write_shard(tmp_path / f"train_{i}.bin", part)
    write_shard(tmp_path / "val_0.bin", stream[3000:3400])
    return {
        **TINY,
        "train_files": str(tmp_path / "train_*.bin"),
        "val_files": str(tmp_path / "val_*.bin"),
        "log_dir": str(tmp_path / "logs"),
    }


# ---- Weights ------------------------------------------------------------------------------------
DOCUMENT = "for i in range(10):\n    print(i)\n" * 10
MODERN = dict(
    max_ngram=4, ngram_rows=997, embedding_learning_rate=0.1, attention_window=0,
    momentum_warmup_fraction=0.0, momentum_cooldown_fraction=0.0, final_lr_fraction=0.0,
)  # fmt: skip


def train_on_bytes(folder, recipe, **settings):
    """Train on the bytes of copies of DOCUMENT; return the run's folder."""
    tokens = [256, *DOCUMENT.encode()] * 20
    folder.joinpath("manifest.json").write_text('{"encoding": "bytes"}')
    write_shard(folder / "train_0.bin", tokens)
    write_shard(folder / "val_0.bin", tokens[:200])
    write_shard(folder / "val_1.bin", tokens[200:1000])
    args = recipe.settings(
        vocab_size=257, n_layer=2, n_head=2, n_embd=32, batch_size=8, device_batch_size=4,
        sequence_length=32, num_iterations=60, warmdown_fraction=0.5, learning_rate=0.02,
        muon_learning_rate=0.005, val_loss_every=30, val_tokens=13 * 32, save_every=20,
        keep_checkpoints=9, dtype="float32", device="cpu", compile=False, allow_repeat=True,
        train_files=f"{folder}/train_*.bin", val_files=f"{folder}/val_*.bin",
        log_dir=f"{folder}/logs", run_id="w", **settings,
    )  # fmt: skip
    train_gpt2.main(args, recipe)
    return folder / "logs" / "w"


@pytest.fixture(scope="session")
def plain_run(tmp_path_factory):
    """Folder of a run on bytes, with checkpoints after every 20 of its 60 steps."""
    return train_on_bytes(tmp_path_factory.mktemp("plain"), train_gpt2.RECIPE)


@pytest.fixture(scope="session")
def modern_run(tmp_path_factory):
    """Like plain_run, with the modern model and an n-gram table."""
    return train_on_bytes(tmp_path_factory.mktemp("modern"), train_modern.RECIPE, **MODERN)


@pytest.fixture(params=["plain_run", "modern_run"])
def trained_run(request):
    return request.getfixturevalue(request.param)


def small_state(recipe=train_gpt2.RECIPE, **settings):
    """Return the contents of the model.pt of a small untrained model."""
    shape = dict(vocab_size=257, n_layer=1, n_head=1, n_embd=4, sequence_length=16)
    args = recipe.settings(**dict(dtype="float32") | shape | settings)
    encoding = "bytes" if args.vocab_size < 1024 else None
    return dict(
        script=recipe.script, source=train_gpt2.digest(recipe.sources), hyperparameters=vars(args),
        fixed=dict(train_data="0" * 12, val_data="1" * 12, encoding=encoding),
        threads=1, step=args.num_iterations, train_seconds=1.0, val_loss=1.0,
        model=recipe.build_model(args, torch.float32).state_dict(),
    )  # fmt: skip


def write_run_on_own_tokens(folder):
    """Write validation tokens without a manifest, and weights for them; return their path."""
    write_shard(folder / "val_0.bin", range(500))
    files = dict(train_files=f"{folder}/train_*.bin", val_files=f"{folder}/val_*.bin")
    state = small_state(vocab_size=512, val_tokens=496, **files)
    stream = train_gpt2.TokenStream(files["val_files"], 512)
    state["fixed"] |= dict(encoding=None, val_data=train_gpt2.digest(stream.checksums()))
    return write_weights(folder / "model.pt", state)


def write_weights(path, state):
    """Write a .pt file as a run does; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)
    return path


def random_run(folder, recipe=train_gpt2.RECIPE, **settings):
    """Write an untrained model with random weights; return its folder."""
    torch.manual_seed(0)
    state = small_state(recipe, **settings)
    for tensor in state["model"].values():
        tensor += 0.2 * torch.randn_like(tensor)
    write_weights(folder / "model.pt", state)
    return folder


@pytest.fixture
def gpt2_vocabulary(monkeypatch):
    """GPT-2's vocabulary, read from a folder beside this clone."""
    if not SHARED_DATA.is_dir():
        pytest.skip("GPT-2's vocabulary is not beside this clone")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED_DATA / "tiktoken_cache"))


@pytest.fixture(scope="session")
def modules_cache(tmp_path_factory):
    """Let transformers keep its copies of a model's code in a temporary folder."""
    import transformers

    folder = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_MODULES_CACHE", folder)  # for other processes
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", folder)
        patch.setattr(sys, "path", [*sys.path])
        yield


def pytest_configure():
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests send it, and nohup would ignore it
    os.environ.pop("PYTHONUNBUFFERED", None)  # few users set it, and it hides failures at exit


def pytest_addoption(parser):
    parser.addoption(
        "--cuda_tests_on", default="cuda", choices=("cuda", "cpu"),
        help="cpu: run tests/test_cuda.py without a GPU, as far as possible",
    )  # fmt: skip


@pytest.fixture
def device(request):
    """The device of a CUDA test, without compiled graphs or memory of earlier tests."""
    kind = request.config.getoption("cuda_tests_on")
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device; --cuda_tests_on=cpu runs some of these tests without one")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def _script_main(script, arguments, environment, output):
    """Run a script as `python script` does, redirecting to output.stdout and output.stderr."""
    for stream, name in (sys.stdout, "stdout"), (sys.stderr, "stderr"):
        stream.flush()
        os.dup2(os.open(f"{output}.{name}", os.O_WRONLY | os.O_CREAT), stream.fileno())
    signal.alarm(120)  # kills a process that hangs
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may ignore SIGINT
    os.environ.update(environment)
    os.chdir(ROOT)
    torch.set_num_threads(1)
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


def run_forked(settings, processes=1, script=SCRIPT):
    """Run a script in processes forked from one that has imported torch, which saves seconds.

    As under torchrun, the store outlives a rank that fails first. The environment is that of the
    first call of run_forked, plus the variables that torchrun sets. returncode is that of the first
    rank that failed, negative if a signal ended it.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{store.port}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": f"{processes}",
        "LOCAL_WORLD_SIZE": f"{processes}",
    }
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(processes):
            own = world | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} if processes > 1 else {}
            call = script, options(settings), own, f"{folder}/{rank}"
            runs.append(forkserver().Process(target=_script_main, args=call))
            runs[-1].start()
        for run in runs:
            run.join()
        stdout, stderr = (
            "".join(path.read_text() for path in sorted(Path(folder).glob(f"*.{name}")))
            for name in ("stdout", "stderr")
        )
    returncode = next((run.exitcode for run in runs if run.exitcode), 0)
    return SimpleNamespace(returncode=returncode, stdout=stdout, stderr=stderr)


def trained(settings, processes=1, script=SCRIPT):
    """Call run_forked, check that the run succeeds and return its output."""
    done = run_forked(settings, processes, script)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_here(settings, steps=math.inf, recipe=train_gpt2.RECIPE, fault=None, **changes):
    """Run in this process and act as if a signal arrived during step number `steps`.

    fault(run), if given, is called before each step. Return main's result.
    """
    args = recipe.settings(**{**settings, **changes})
    stop = train_gpt2.StopRequest()
    train_step = train_gpt2.train_step
    steps_left = steps

    def counted_step(run, inputs, targets):
        nonlocal steps_left
        steps_left -= 1
        if steps_left == 0:
            stop.received = True
        if fault is not None:
            fault(run)
        return train_step(run, inputs, targets)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt2, "train_step", counted_step)
        return train_gpt2.main(args, recipe, stop)


def take_step(model, optimizers, inputs, targets, args, step=0):
    """Call train_step as a run does on a single rank; return the mean loss."""
    args = dataclasses.replace(args, batch_size=len(inputs))
    size = math.gcd(len(inputs), args.device_batch_size)
    run = SimpleNamespace(model=model, optimizers=optimizers, micro_batch_size=size)
    run.args, run.step, run.stop_request = args, step, train_gpt2.StopRequest()
    return train_gpt2.train_step(run, inputs, targets)["loss"]


def options(settings):
    """Return settings as command-line arguments."""
    return [f"--{name}={value}" for name, value in settings.items()]


def launcher(folder, code, script=SCRIPT):
    """Write a script that imports train_gpt2.py or a copy, runs code to patch it, and trains."""
    path = folder / "launcher.py"
    path.write_text(
        f"""import contextlib, importlib.util, math, os, resource, signal, sys, time
from pathlib import Path
import torch
spec = importlib.util.spec_from_file_location("train_gpt2", {str(script)!r})
train_gpt2 = importlib.util.module_from_spec(spec)
sys.modules["train_gpt2"] = train_gpt2
spec.loader.exec_module(train_gpt2)
{code}
train_gpt2.cli(sys.argv[1:])
"""
    )
    return path


def faulty_script(folder, fault, when="step == 4", rank=0, script=SCRIPT):
    """Write a script that trains, in which one rank executes `fault` before a step, after saving.

    `fault` and `when` are lines of Python, which know step, first_step and run.
    """
    condition = f'({when}) and os.environ.get("RANK", "0") == "{rank}"'
    code = f"""
train_step = train_gpt2.train_step
first_step = None

def faulty(run, inputs, targets):
    global first_step
    step = run.step
    first_step = step if first_step is None else first_step
    if {condition}:
        {fault}
    return train_step(run, inputs, targets)

train_gpt2.train_step = faulty"""
    return launcher(folder, code, script)


def run_subprocess(settings, processes=1, script=SCRIPT, flags=()):
    """Run in a subprocess, by torchrun if there are several processes, in the parent of log_dir."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={processes}", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        [*command, str(script), *options(settings)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd=Path(settings["log_dir"]).parent,
    )


def run_tool(name, *arguments, **options):
    """Run a tool of records/tools as its users do; return the CompletedProcess."""
    command = [sys.executable, ROOT / "records" / "tools" / name, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def validations(text):
    """Return [(step, loss)] of the validation lines in a log."""
    line = r"^step:(\d+)/\d+ val_loss:(\d+\.\d{4}) train_time:\d+ms step_avg:\d+\.\d\dms$"
    rows = re.findall(line, text, re.M)
    assert len(rows) == len(re.findall(r"^step:.* val_loss:", text, re.M)), text
    return [(int(step), float(loss)) for step, loss in rows]


def losses(text):
    """Return [(step, name, loss)] of all step lines in a log, as strings."""
    return re.findall(r"^step:(\d+)/\d+ (\w+):([\d.]+) ", text, re.M)


def checkpoints(folder):
    """Return the names of the checkpoints in a run's folder, oldest first."""
    return sorted(path.name for path in Path(folder).glob("state_step*.pt"))


def bits(path):
    """Return a bit-exact copy of a checkpoint, less its time and its settings.

    The settings that decide the result remain, in `fixed`.
    """
    state = torch.load(path, weights_only=True)
    del state["train_seconds"], state["hyperparameters"]
    return bits_of(state)


def last_bits(folder):
    """Return bits() of the newest checkpoint in a run's folder."""
    return bits(folder / checkpoints(folder)[-1])


def bits_of(value):
    """Return a value with its tensors as bytes, so that == compares bit by bit."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.double().numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits_of(part) for key, part in value.items()}
    return [bits_of(part) for part in value] if isinstance(value, (list, tuple)) else value


def forkserver():
    """Return the context for processes forked from a server that has imported torch."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "torch", "torch._dynamo", "train_gpt2"])
    return context


def _rank_main(rank, function, world_size, folder, arguments):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    result = function(rank, world_size, *arguments)
    dist.barrier()
    torch.save(result, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def run_ranks(function, world_size, folder, *arguments):
    """Run function(rank, world_size, *arguments) on gloo ranks; return their results in order.

    world_size 1 runs in this process and without a process group, as training does.
    """
    if world_size == 1:
        return [function(0, 1, *arguments)]
    folder.mkdir(parents=True)
    forkserver()
    torch.multiprocessing.start_processes(
        _rank_main, (function, world_size, folder, arguments), nprocs=world_size,
        start_method="forkserver",
    )  # fmt: skip
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]
