"""The words of a run: its log, the header and the summary there, and what it says when it fails."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
# dense bf16 FLOP/s by the device's name; source: the vendor's data sheets
PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}
SIBLINGS = (  # that the script imports
    "data/checkpoints.py", "data/processes.py", "data/shards.py", "records/describe.py",
)  # fmt: skip
PHASES = "setup", "compile", "validation", "train", "loading", "checksum", "checkpoint"


class Log:
    """`log(line)`: rank 0 prints the line and adds it to log_dir/run_id.txt.

    step: steps done; seconds: those of each phase, see timed. Raises ValueError for a file that
    exists, unless a run is resumed.
    """

    def __init__(self, args, rank, run_id, step=0, train_seconds=0.0):
        self.path, self.file = Path(args.log_dir) / f"{run_id}.txt", None
        self.step, self.last_step = step, args.num_iterations
        self.seconds = defaultdict(float, train=train_seconds)
        if rank == 0:
            if self.path.exists() and not args.resume:
                raise ValueError(f"{self.path} exists: pass another --run_id")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "a", buffering=1)

    def __call__(self, line, show=True):
        if self.file:
            try:
                print(line, file=self.file)
            except OSError as error:  # a full disk does not end a training
                line += f" (not in {self.path}: {error.strerror})"
            if show:
                print(line, flush=True)

    @contextlib.contextmanager
    def timed(self, phase):
        """Add to a phase's seconds; it must end by reading a result, so that the device is done."""
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def progress(self, name, loss):
        """Return the line of a step. Raises FloatingPointError if its loss is not finite."""
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"{name} is {loss} at step {self.step}: lower the learning rates"
            )
        train_ms = 1000 * self.seconds["train"]
        return (
            f"step:{self.step}/{self.last_step} {name}:{loss:.4f} train_time:{train_ms:.0f}ms "
            f"step_avg:{train_ms / max(self.step, 1):.2f}ms"
        )


def environment(device):
    """Return (a line on versions and the commit, the device's name)."""
    run = subprocess.getoutput
    commit = run(f"git -C '{ROOT}' describe --always --dirty --abbrev=40 2>/dev/null || echo none")
    name, driver = run("grep -m1 'model name' /proc/cpuinfo"), None
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        driver = run("nvidia-smi -i 0 --query-gpu=driver_version --format=csv,noheader")
    line = (
        f"python:{platform.python_version()} torch:{torch.__version__} numpy:{np.__version__} "
        f"cuda:{torch.version.cuda} driver:{driver} system:{platform.platform()} commit:{commit}"
    )
    return line, name.split(": ")[-1]


def header(log, script, args, gpt, optimizers, train_loader, val_loader, kernels):
    """Log what defines a run: source, settings, environment, batch, data, optimizers.

    script: the path of the training script; kernels: how products and attention are computed.
    """
    device, world_size = train_loader.device, train_loader.world_size
    log(Path(script).read_text(), show=False)
    for path in SIBLINGS:
        log(f"source of {path}:\n{(ROOT / path).read_text()}", show=False)
    for name, value in dataclasses.asdict(args).items():
        log(f"hyperparameter {name}={value!r}", show=False)
    versions, name = environment(device)
    taken = val_loader.batch_size  # sequences, by all processes at a time
    planned, held = args.num_iterations * train_loader.window, train_loader.total_tokens
    counted = hashlib.sha256(val_loader.read(0, args.val_tokens + 1)[0]).hexdigest()
    for line in (
        f"log:{log.path} command:{' '.join(sys.argv)}",
        versions,
        f"device:{name} processes:{world_size} threads:{torch.get_num_threads()} {kernels}",
        f"batch: {args.batch_size} x {args.sequence_length} tokens = {args.batch_size // taken} "
        f"micro-batches x {world_size} processes x {taken // world_size} sequences",
        f"train data: {len(train_loader.paths)} shards, {held:,} tokens; {args.num_iterations} "
        f"steps read {planned:,} ({planned / held:.3f} epochs)",
        f"val data: {len(val_loader.paths)} shards, {val_loader.total_tokens:,} tokens; the first "
        f"{args.val_tokens:,} count, val_hash:{counted[:16]}",
        *optimizer_table(gpt, optimizers, world_size),
    ):
        log(line)


def owned_values(muon):
    """Return how many values each rank owns, which is its momentum."""
    owner = muon.owner
    return [sum(p.numel() for p in owner if owner[p] == r) for r in range(muon.world_size)]


def optimizer_table(gpt, optimizers, world_size):
    """Return lines: count, name, shape, optimizer, learning rate; then Muon's work and bytes."""
    rates = {
        p: f"{type(optimizer).__name__:6s} lr:{group['initial_lr']:g}"
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    }
    rows = Counter(
        f"{re.sub('[.][0-9]+', '.*', name):24s} {tuple(p.shape)!s:16s} {rates[p]}"
        for name, p in gpt.named_parameters()
    )
    load = optimizers[1].load
    owned = owned_values(optimizers[1])
    # in float32 and bf16; a ring sends (W-1)/W of a buffer to reduce it, and again to spread it
    ring, head = 4 * (world_size - 1) / world_size / 2**20, gpt.lm_head.weight.numel()
    return [
        f"parameters: {sum(p.numel() for p in rates):,}",
        *(f"  {count:3d} x {row}" for row, count in rows.items()),
        f"muon: slowest rank/mean cost:{max(load) * world_size / sum(load):.3f} "
        f"momentum MiB of each rank:{[round(n / 2**18, 1) for n in owned]}",
        f"sent MiB a step and rank, in rings: gradients:{ring * (2 * head + sum(owned)):.1f} "
        f"updates:{ring * sum(owned):.1f}",
    ]


def count_graphs():
    """Return the number of graphs that torch.compile has made in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def flops_per_token(gpt, args):
    """Return the floating-point operations of a training step for a token: 6N + 12LCT."""
    attention = 12 * args.n_layer * args.n_embd * args.sequence_length  # to all T positions
    return 6 * sum(p.numel() for p in gpt.parameters()) + attention


def summary(log, args, gpt, train_loader, recompiles, val_loss):
    """Log each phase's seconds, compilations, speed, this process's peak memory, the result.

    recompiles: graphs made after the warm-up.
    """
    graphs, breaks = count_graphs(), sum(torch._dynamo.utils.counters["graph_break"].values())
    rate, device = train_loader.position / log.seconds["train"], train_loader.device
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 2**20
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    speed = f"tokens/s:{rate:.0f} peak_memory:{peak:.0f}MiB"
    if device.type == "cuda" and (most := PEAK_FLOPS.get(torch.cuda.get_device_name(device))):
        speed += f" mfu:{flops_per_token(gpt, args) * rate / (most * train_loader.world_size):.1%}"
    bits = val_loss / math.log(2) / (args.bytes_per_token or math.inf)
    log(" ".join(f"{phase}:{log.seconds[phase]:.1f}s" for phase in PHASES if phase in log.seconds))
    log(f"compile: graphs:{graphs} graph_breaks:{breaks} recompiles:{recompiles}")
    log(speed)
    log(
        f"result val_loss:{val_loss:.4f} {f'bits_per_byte:{bits:.4f} ' if bits else ''}target:"
        f"{args.target_val_loss} {'reached' if val_loss <= args.target_val_loss else 'missed'}"
    )


def explain(error, args=None):
    """Return what a user needs of an error: one sentence where it is ours, else the traceback."""
    full = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or re.search(
        "CUDA error: out of memory|(can't|Cannot) allocate memory", str(error)
    )
    if args and full:
        share = args.batch_size // int(os.environ.get("WORLD_SIZE", 1))  # sequences, of a process
        micro = min(share, args.device_batch_size)
        smaller = [n for n in range(1, micro) if share % n == 0]
        if not smaller:
            return "out of memory with one sequence at a time: shorten sequence_length or the model"
        return f"out of memory: pass --device_batch_size={smaller[-1]}, the result stays the same"
    last = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
    ours = last.parent in (ROOT, *(ROOT / folder for folder in ("data", "records", "tests")))
    if ours and isinstance(error, (ValueError, OSError, FloatingPointError)):
        return str(error)
    return "".join(traceback.format_exception(error)).rstrip()


def silent_ranks(store, folder):
    """Return who is missing after a failed collective; keep the flight recorder's trace.

    store: what the ranks share; each that got so far says there that it is alive. folder: of the
    trace, or None for none.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store.set(f"alive/{rank}", "")
    trace = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", lambda: b"{}")()
    entries, where = json.loads(trace).get("entries"), ""  # older torch has none for gloo
    if entries:
        last = entries[-1]
        where = f" {last['collective_seq_id']}, {last['profiling_name']} of {last['input_sizes']}"
    if entries and folder:
        with contextlib.suppress(OSError):  # such as a full disk
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"flight_recorder_rank{rank}.json"
            path.write_bytes(trace)
            where += f", trace in {path}"
    time.sleep(3)  # for the others to notice as well
    silent = [other for other in range(world_size) if not store.check([f"alive/{other}"])]
    missing = f"ranks {silent} are killed or stuck" if silent else "a connection broke"
    return f"{missing}: rank {rank} waited in vain in collective{where}"


def failure(error, args=None, log=None, checkpoint=None):
    """Print one summary of a failed run, that of the rank which failed first; log it, too.

    log: the run's Log, with its step; checkpoint: the path of the last whole one, or None.
    """
    if getattr(error, "reported", False):
        return
    text, first, error.reported = explain(error, args), None, True
    if dist.is_initialized():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, to all when one has failed
        folder = log and log.path.with_suffix("")
        try:
            store = dist.distributed_c10d._get_default_store()
            last = traceback.extract_tb(error.__traceback__)[-1]
            waited = "/torch/distributed/" in last.filename or ".wait()" in last.line
            if isinstance(error, RuntimeError) and waited:
                cause = re.sub(r"^\[\S+\] ", "", f"{error}".partition("\n")[0])
                text = f"{silent_ranks(store, folder)} [{cause}]"
            text = f"rank {dist.get_rank()}: {text}{situation(log, checkpoint)}"
            first = store.compare_set("failure", "", text).decode()
        except (RuntimeError, OSError, ValueError):  # such as the store's end with its process
            pass
    else:
        text += situation(log, checkpoint)
        if os.environ.get("RANK", "0") != "0":  # rank 0 says the same, and torchrun ends this one
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(3)
    if log:
        log(f"failed: {first or text}", show=False)
    if first in (None, text):
        print(f"train_gpt2.py: {text}", file=sys.stderr, flush=True)


def situation(log, checkpoint):
    """Return in brackets at which step a run failed and how to go on."""
    if log is None:
        return ""
    go_on = f"{checkpoint} is whole, --resume=auto goes on" if checkpoint else "no checkpoint yet"
    return f" (at step {log.step}; {go_on})"
