"""Shared helpers: shards and settings of a tiny run, runs in other processes, what runs leave."""

import gc
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch._functorch import config as functorch_config

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "train_gpt2.py"
SHARED_DATA = ROOT.parent / "shared" / "data"
for folder in "", "data", "records/tools", "tests/bench":
    sys.path.insert(0, str(ROOT / folder))

import train_gpt2  # noqa: E402

STEP = "        lr_scale = lr_multiplier(step, args)\n"  # the line of train() that begins a step
KILL = STEP + "        if step == 4 and first_step == 0:\n            os.kill(os.getpid(), 9)\n"
both_dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])

TINY = {
    "vocab_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 16, "batch_size": 12,
    "device_batch_size": 2, "sequence_length": 16, "num_iterations": 6, "warmdown_iters": 3,
    "learning_rate": 0.01, "muon_learning_rate": 0.005, "val_loss_every": 3, "val_tokens": 304,
    "device": "cpu", "compile": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def pytorchs_own_settings():
    """A test begins with PyTorch's own settings, whatever configure_backend has made of them."""
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    with functorch_config.patch(activation_memory_budget=1.0):
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
    """Settings of a tiny run on a text with structure: three shards and a validation shard."""
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
PIECES = dict(max_ngram=4, ngram_rows=997, key_shift=2, logit_softcap=15.0)


def train_on_bytes(folder, **pieces):
    """Train on the bytes of copies of DOCUMENT; return the run's folder."""
    tokens = [256, *DOCUMENT.encode()] * 20
    write_shard(folder / "train_0.bin", tokens)
    write_shard(folder / "val_0.bin", tokens[:200])
    write_shard(folder / "val_1.bin", tokens[200:1000])
    args = train_gpt2.Hyperparameters(
        vocab_size=257, n_layer=2, n_head=2, n_embd=32, batch_size=8, device_batch_size=4,
        sequence_length=32, num_iterations=60, warmdown_iters=30, learning_rate=0.02,
        muon_learning_rate=0.005, val_loss_every=30, val_tokens=13 * 32, save_every=20,
        keep_checkpoints=9, dtype="float32", device="cpu", compile=False, allow_repeat=True,
        train_files=f"{folder}/train_*.bin", val_files=f"{folder}/val_*.bin",
        log_dir=f"{folder}/logs", run_id="w", **pieces,
    )  # fmt: skip
    train_gpt2.main(args)
    return folder / "logs" / "w"


@pytest.fixture(scope="session")
def plain_run(tmp_path_factory):
    """Folder of a run on bytes, with checkpoints after every 20 of its 60 steps."""
    return train_on_bytes(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session")
def pieces_run(tmp_path_factory):
    """As plain_run, with n-grams, a key shift and a soft-cap."""
    return train_on_bytes(tmp_path_factory.mktemp("pieces"), **PIECES)


@pytest.fixture(params=["plain_run", "pieces_run"])
def trained_run(request):
    return request.getfixturevalue(request.param)


def small_state(**settings):
    """Return what a file of weights holds, of a small model that was not trained."""
    shape = dict(vocab_size=257, n_layer=1, n_head=1, n_embd=4, sequence_length=16)
    args = train_gpt2.Hyperparameters(**shape | settings)
    model = train_gpt2.GPT(args).state_dict()
    return dict(hyperparameters=vars(args), val_loss=1.0, model=model)


def write_weights(path, state):
    """Write a file of weights as a run does; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = train_gpt2.Log(train_gpt2.Hyperparameters(), "x", rank=1)  # which writes nothing
    assert train_gpt2.write_checkpoint(state, path, log)
    return path


@pytest.fixture
def gpt2_vocabulary(monkeypatch):
    """GPT-2's vocabulary, read from a folder beside this clone."""
    if not SHARED_DATA.is_dir():
        pytest.skip("GPT-2's vocabulary is not beside this clone")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED_DATA / "tiktoken_cache"))


def pytest_addoption(parser):
    parser.addoption(
        "--cuda_tests_on", default="cuda", choices=("cuda", "cpu"),
        help="cpu: try the tests of tests/test_cuda.py without a GPU",
    )  # fmt: skip


@pytest.fixture
def device(request):
    """The device of a CUDA test, free of the graphs and the memory of the tests before it."""
    kind = request.config.getoption("cuda_tests_on")
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here; --cuda_tests_on=cpu tries what can run without")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def _script_main(script, arguments, environment, output):
    """Run a script as python would, with its output in the files output.stdout and .stderr."""
    for stream, name in (sys.stdout, "stdout"), (sys.stderr, "stderr"):
        stream.flush()
        os.dup2(os.open(f"{output}.{name}", os.O_WRONLY | os.O_CREAT), stream.fileno())
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started the tests
    os.environ.update(environment)
    os.chdir(ROOT)
    torch.set_num_threads(1)
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


class StopAfter(train_gpt2.StopRequest):
    """Stops a run as a signal does that comes after so many of its steps or forward passes."""

    def __init__(self, steps=math.inf, passes=math.inf):
        super().__init__()
        self.steps, self.passes = steps, passes

    def check_ranks(self, failure=""):
        if self.steps == 0:
            self.time = time.monotonic()
        self.steps -= 1
        super().check_ranks(failure)

    def check(self):
        if self.passes == 0:
            self.time = time.monotonic()
        self.passes -= 1
        super().check()


def run_forked(settings, processes=1, script=SCRIPT, timeout=120, flags=()):
    """Run a script with these settings in processes forked from one that has imported torch.

    This saves seconds. As under torchrun, the store outlives a rank that fails first. The
    environment is that of the first call of run_forked, and the variables that torchrun sets.
    returncode is that of the first rank that failed; that of a signal is negative.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{store.port}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": f"{processes}",
        "LOCAL_WORLD_SIZE": f"{processes}",
    }
    arguments = [*flags, *options(settings)]
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(processes):
            own = world | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} if processes > 1 else {}
            call = script, arguments, own, f"{folder}/{rank}"
            runs.append(forkserver().Process(target=_script_main, args=call))
            runs[-1].start()
        deadline = time.monotonic() + timeout
        for run in runs:
            run.join(max(0, deadline - time.monotonic()))
        late = [run for run in runs if run.exitcode is None]
        for run in late:
            run.kill()
            run.join()
        stdout, stderr = (
            "".join(path.read_text() for path in sorted(Path(folder).glob(f"*.{name}")))
            for name in ("stdout", "stderr")
        )
    if late:
        pytest.fail(f"still running after {timeout} s: {stdout}{stderr}")
    returncode = next((run.exitcode for run in runs if run.exitcode), 0)
    return SimpleNamespace(returncode=returncode, stdout=stdout, stderr=stderr)


def trained(settings, processes=1, script=SCRIPT):
    """Do what run_forked does, check that the run succeeds, and return its output."""
    done = run_forked(settings, processes, script)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_here(settings, steps=math.inf, passes=math.inf, **changes):
    """Run in this process; stop after so many steps or passes. Return what main returns."""
    args = train_gpt2.Hyperparameters(**{**settings, **changes})
    return train_gpt2.main(args, StopAfter(steps, passes))


def options(settings):
    """Return settings as arguments of the command line."""
    return [f"--{name}={value}" for name, value in settings.items()]


def edited_script(folder, *changes):
    """Write a copy of train_gpt2.py with texts replaced, each of which it holds once."""
    text = SCRIPT.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / "edited.py"
    path.write_text(text)
    return path


def start(settings, processes=1, script=SCRIPT, flags=()):
    """Start a run in subprocesses beside its log_dir, several or with flags by torchrun.

    Its output are small pipes: unless they are read, a run stops after some 50 lines.
    """
    command = [sys.executable]
    if processes > 1 or flags:
        command += ["-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
        command += flags or ["--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    run = subprocess.Popen(
        [*command, str(script), *options(settings)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pipesize=4096,
        env=environment,
        cwd=Path(settings["log_dir"]).parent,
    )
    run.time_out = threading.Timer(120, run.kill)
    run.time_out.daemon = True
    run.time_out.start()
    return run


def run_tool(name, *arguments, **options):
    """Run a tool of records/tools as its users do; return the CompletedProcess."""
    command = [sys.executable, ROOT / "records" / "tools" / name, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def wait_for(run, beginning):
    """Read the output of a run until a line begins so; return all of it."""
    lines = []
    for line in run.stdout:
        lines.append(line)
        if line.startswith(beginning):
            return "".join(lines)
    pytest.fail(f"{beginning!r} never came: {''.join(lines)}{run.stderr.read()}")


def ranks_of(run):
    """Return the processes that torchrun has started, in the order of their ranks."""
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    ranks = {}
    for child in children:
        for variable in Path(f"/proc/{child}/environ").read_text().split("\0"):
            if variable.startswith("RANK="):
                ranks[int(variable[5:])] = int(child)
    return [ranks[rank] for rank in sorted(ranks)]


def finish(run):
    """Wait for a run that was started; return it as run_forked does."""
    stdout, stderr = run.communicate(timeout=130)
    run.time_out.cancel()
    return SimpleNamespace(returncode=run.returncode, stdout=stdout, stderr=stderr)


def validations(text):
    """Return [(step, loss, data hash)] of the validation lines in a log."""
    line = r"^step:(\d+)/\d+ val_loss:(\d+\.\d{4}) train_time:\d+ms step_avg:\d+\.\d\dms "
    rows = re.findall(line + r"data_hash:([0-9a-f]{12}) lr:[\d.e-]+$", text, re.M)
    assert len(rows) == len(re.findall(r"^step:.* val_loss:", text, re.M)), text
    return [(int(step), float(loss), data_hash) for step, loss, data_hash in rows]


def losses(text):
    """Return [(step, name, loss)] of all lines of steps in a log, as they stand there."""
    return re.findall(r"^step:(\d+)/\d+ (\w+):([\d.]+) ", text, re.M)


def checkpoints(folder):
    """Return the names of the checkpoints in a run's folder, oldest first."""
    return sorted(path.name for path in Path(folder).glob("state_step*.pt"))


def bits(path):
    """Return what a checkpoint holds, to the bit, but for times, files and what may change."""
    state = torch.load(path, weights_only=True)
    for name in train_gpt2.CHANGEABLE_ON_RESUME:
        del state["hyperparameters"][name]
    del state["train_seconds"], state["files"]
    return bits_of(state)


def last_bits(folder):
    """Return what the newest checkpoint in a run's folder holds, to the bit."""
    return bits(folder / checkpoints(folder)[-1])


def bits_of(value):
    """Return a value with its tensors as bytes, so that == compares it to the bit."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits_of(part) for key, part in value.items()}
    return [bits_of(part) for part in value] if isinstance(value, (list, tuple)) else value


def forkserver():
    """Return the context of processes that are forked from one which has imported torch once."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "train_gpt2"])
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
    context = torch.multiprocessing.start_processes(
        _rank_main, (function, world_size, folder, arguments), nprocs=world_size, join=False,
        start_method="forkserver",
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not context.join(timeout=max(0, deadline - time.monotonic())):  # True: all have ended
        if time.monotonic() >= deadline:
            for process in context.processes:
                process.kill()
            pytest.fail("the ranks did not finish within 120 s")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]
