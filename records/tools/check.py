"""Check whether a run can start here: `bash run.sh check [--field=value ...]`, or by torchrun.

It takes seconds, and the time to read the shards once for which a sha256 is noted. Under torchrun
it also checks the processes and their network. Prints a line for each check and the table of all
parameters, then `all is well` and exit status 0, or a list of what to fix and 1. If nothing is to
fix, it compiles the model and times three steps, to predict how long the run takes. It saves
nothing.
"""

import contextlib
import dataclasses
import glob
import itertools
import json
import math
import os
import platform
import re
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data")]
from shards import file_sha256  # noqa: E402

import train_gpt2  # noqa: E402
from train_gpt2 import UserError  # noqa: E402

FINEWEB = json.loads((ROOT / "data" / "fineweb.json").read_text())


class Checks:
    """`check(name, function, ...)` prints what the function returns, or the fault it raises."""

    def __init__(self, rank):
        self.rank = rank
        self.faults = []

    def __call__(self, name, function, *arguments):
        """Call function, which returns what to print and a result; return the result or None."""
        try:
            text, result = function(*arguments)
        except Exception as error:
            sentence = str(error)
            if not isinstance(error, (UserError, OSError)):
                sentence = f"{type(error).__name__}: {error}".splitlines()[0]
            self.faults.append(f"{name}: {sentence}")
            text, result = f"FAILED, {sentence}", None
        if self.rank == 0:
            print(f"{name}: {text}", flush=True)
        return result

    def of_all_ranks(self):
        """Return the faults of all ranks, which all call it, each once; of some, with the ranks."""
        if not dist.is_initialized():
            if self.rank > 0:  # rank 0 may know nothing of them
                print(*self.faults, sep="\n", file=sys.stderr)
            return self.faults
        try:
            of_ranks = train_gpt2.all_gather_objects(self.faults)
        except RuntimeError as error:
            return [*self.faults, f"processes: rank {self.rank} lost the others: {error}"]
        lines = []
        for fault in dict.fromkeys(itertools.chain(*of_ranks)):
            ranks = [rank for rank, faults in enumerate(of_ranks) if fault in faults]
            lines.append(fault if len(ranks) == len(of_ranks) else f"{fault} (ranks {ranks})")
        return lines


# ---- The machine ---------------------------------------------------------------------------------
def free_memory(device, meminfo="/proc/meminfo"):
    """Return the bytes that a process may still take on the device; all memory where none says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if not Path(meminfo).exists():  # macOS
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 1024 * int(re.search(r"MemAvailable: +(\d+)", Path(meminfo).read_text())[1])


def check_device(args):
    """Join the processes, too; the result is (rank, world_size, device)."""
    place = train_gpt2.join_processes(args)
    _, world_size, device = place
    joined = f", {dist.get_backend()}" if world_size > 1 else ""
    text = (
        f"{train_gpt2.device_name(device)}, {free_memory(device) / 2**30:.1f} GiB of memory free; "
        f"processes {world_size}{joined}; python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )
    return text, place


def check_products(args, device):
    """Time products in the dtype that training takes; the result is the dtype."""
    dtype = train_gpt2.product_dtype(args, device)
    x = torch.randn(1024, 1024, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        y = (x @ x)[0, 0].item()
        best = min(best, time.perf_counter() - start)
    if not abs(y) < 1e6:
        raise UserError(f"a product of random matrices is {y}: this device errs")
    slow = args.dtype == "auto" and dtype == torch.float32
    why = ", for this CPU has no bf16 instructions" if slow else ""
    return f"{dtype}, {2 * 1024**3 / best / 1e9:,.0f} GFLOP/s{why}", dtype


def check_compiler(args, device):
    if not args.compile:
        return "off", None
    start = time.perf_counter()
    x = torch.arange(100.0, device=device)
    try:
        function = torch.compile(lambda x: (x * 2 + 1).relu().sum(), fullgraph=True)
        result = function(x).item()
    except Exception as error:
        cause = str(error).splitlines()[0]
        fix = "install g++ and Python.h, or pass --compile=False"
        raise UserError(f"torch.compile fails ({cause}): {fix}") from None
    if result != 10000:
        raise UserError(f"torch.compile computes {result} instead of 10000")
    return f"works, {time.perf_counter() - start:.1f} s for a small graph", None


def all_reduce_ms(ones, world_size):
    """Sum a tensor of ones over the ranks; return the time that it takes."""
    seconds = []
    for _ in range(4):
        buffer = ones.clone()
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(buffer)
        found = buffer[0].item()
        seconds.append(time.perf_counter() - start)
        if not (buffer == world_size).all():
            raise UserError(f"an all_reduce of ones gives {found} instead of {world_size}")
    return 1000 * min(seconds[1:])


def check_network(device, world_size):
    """Sum a buffer as large as a step's updates, and one number on the CPUs, as for signals."""
    if world_size == 1:
        return "one process, none needed", None
    ms = all_reduce_ms(torch.ones(2**22, device=device), world_size)
    rate = 2 * (world_size - 1) / world_size * 16 / ms * 1000
    number = all_reduce_ms(torch.ones(1), world_size)
    text = f"all_reduce of 16 MiB in {ms:.1f} ms, {rate:.0f} MiB/s a rank"
    return f"{text}; of a number on the CPUs in {number:.2f} ms", None


# ---- The data ------------------------------------------------------------------------------------
def check_data(args, rank, world_size, device):
    """Open the shards and read the first tokens; the result is (train_loader, val_loader)."""
    loaders = train_gpt2.open_data(args, rank, world_size, device)
    highest = 0
    for loader in loaders:
        tokens = loader.read(0, min(loader.total_tokens, 10**7))
        highest = max(highest, tokens.max())
    train_loader, val_loader = loaders
    validated = train_gpt2.val_tokens_of(args, val_loader)
    planned, held = args.num_iterations * train_loader.tokens_per_step, train_loader.total_tokens
    text = (
        f"{len(train_loader.paths)} + {len(val_loader.paths)} shards, {held:,} + "
        f"{val_loader.total_tokens:,} tokens; the run reads {planned:,} ({planned / held:.3f} "
        f"epochs) and validates on {validated:,}; highest id seen {highest}"
    )
    return text, loaders


def check_hub():
    """Ask for a shard as data/fineweb.py does, without fetching it."""
    import huggingface_hub as hub

    name = "fineweb_val_000000.bin"
    revision = FINEWEB["revision"]
    url = hub.hf_hub_url(FINEWEB["repository"], name, repo_type="dataset", revision=revision)
    try:
        size = hub.get_hf_file_metadata(url).size
    except Exception as error:
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        fix = "set HTTPS_PROXY, or HF_ENDPOINT to a mirror, or copy the shards from elsewhere"
        raise UserError(f"{url} does not answer ({cause}): {fix}") from None
    return f"{url} has {size / 1e6:.0f} MB, data/fineweb.py can fetch it", None


def known_sha256(path):
    """Return the sha256 that a shard should have, or None where nobody noted it."""
    path = Path(path)
    listed = dict(FINEWEB["sha256"])
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        manifest = json.loads((path.parent / "manifest.json").read_text())
        listed |= manifest["train"]["sha256"] | manifest["val"]["sha256"]
    return listed.get(path.name)


def check_shards(loaders, rank, world_size):
    """Compare this rank's share of the shards with data/fineweb.json or the packer's manifest."""
    paths = [path for loader in loaders for path in loader.paths]
    expected = {path: known_sha256(path) for path in paths}
    noted = [path for path in paths if expected[path]]
    mine = noted[rank::world_size]
    with ThreadPoolExecutor() as pool:
        for path, sha256 in zip(mine, pool.map(file_sha256, mine)):
            if sha256 != expected[path]:
                raise UserError(f"{path} has another sha256 than noted: fetch or pack it again")
    return f"{len(noted)} as noted, {len(paths) - len(noted)} nowhere noted", None


def check_ranks(loaders):
    """Compare the sizes and first tokens of all shards, by a checksum that is short to print."""
    parts = zip(("train_files", "val_files"), loaders)
    facts = {name: zlib.crc32(repr(loader.contents).encode()) for name, loader in parts}
    train_gpt2.check_ranks_agree(facts, "give all machines the same data")
    return "the same data on all" if dist.is_initialized() else "one process", None


# ---- The model and its optimizers ----------------------------------------------------------------
def owned_values(optimizer, world_size):
    """Return how many values of its parameters each rank owns: none, if they have no owner."""
    values = [0] * world_size
    for p, rank in getattr(optimizer, "owner", {}).items():
        values[rank] += p.numel()
    return values


def optimizer_table(gpt, optimizers, world_size):
    """Return lines: count, name, shape, optimizer, learning rate; then the owners' work; bytes."""
    settings = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            text = f"{type(optimizer).__name__:7s} lr:{group['lr']:g}"
            settings.update(dict.fromkeys(group["params"], text))
    rows = Counter()
    for name, p in gpt.named_parameters():
        name = re.sub("[.][0-9]+", ".*", name)
        rows[f"{name:24s} {tuple(p.shape)!s:16s} {settings[p]}"] += 1
    total = sum(p.numel() for p in settings)
    lines = [f"parameters: {total:,}"]
    lines += [f"  {count:3d} x {row}" for row, count in rows.items()]
    owned = 0
    for optimizer in optimizers:
        values = owned_values(optimizer, world_size)
        owned += sum(values)
        if any(values):
            loads = getattr(optimizer, "loads", values)
            most = max(loads) * world_size / sum(loads)
            mib = [round(n / 2**18, 1) for n in values]
            name = type(optimizer).__name__
            lines.append(f"{name}: cost of the busiest rank/mean:{most:.3f} momentum MiB:{mib}")
    # in a ring a rank sends (W-1)/W of a buffer to reduce it, and as much again to spread it
    trip = (world_size - 1) / world_size / 2**20
    gradients = 4 * trip * 2 * total  # float32
    updates = 2 * trip * 2 * owned  # bf16
    lines.append(f"sent MiB a step and rank: gradients:{gradients:.1f} updates:{updates:.1f}")
    return lines


def check_optimizers(args, rank, world_size, dtype):
    """Build the model without its memory; the result is (model, optimizers)."""
    with torch.device("meta"):
        gpt = train_gpt2.GPT(args, dtype)
        optimizers = train_gpt2.build_optimizers(gpt, args, rank, world_size)
    return "\n".join(optimizer_table(gpt, optimizers, world_size)), (gpt, optimizers)


def check_attention(args, device, dtype):
    """Name the kernel of the model's own call, which the graph of a loss tells.

    Of one block, two sequences and a small vocabulary, for none of these decides.
    """
    args = dataclasses.replace(args, n_layer=1, vocab_size=64)
    gpt = train_gpt2.GPT(args, dtype).to(device)
    inputs = torch.zeros(2, args.sequence_length, dtype=torch.int64, device=device)
    train_gpt2.configure_backend(args, device)  # decides which kernels are allowed
    graph, found = [gpt(inputs, inputs).grad_fn], set()
    while graph:
        node = graph.pop()
        if node and node not in found:
            found.add(node)
            graph += [before for before, _ in node.next_functions]
    kernels = {node.name() for node in found if "Attention" in node.name()}
    kernels = [re.sub(r"ScaledDotProduct|Backward\d*$", "", name) for name in sorted(kernels)]
    return ", ".join(kernels) or "math: products and a softmax", None


# ---- Room ----------------------------------------------------------------------------------------
def state_values(gpt, optimizers, world_size):
    """Return the float32 values of the optimizers' states: (of the busiest rank, of all).

    One for a parameter with an owner, as momentum; on every rank one for Adagrad's, as a sum of
    squares, and two for any other, as AdamW's moments.
    """
    busiest = everything = 2 * sum(p.numel() for p in gpt.parameters())
    for optimizer in optimizers:
        values = owned_values(optimizer, world_size)
        busiest -= 2 * sum(values) - max(values)
        everything -= sum(values)
        if isinstance(optimizer, torch.optim.Adagrad):
            sums = sum(p.numel() for p in train_gpt2.params_of(optimizer))
            busiest -= sums
            everything -= sums
    return busiest, everything


def check_memory(args, gpt, optimizers, device, world_size):
    """Compare what a process keeps between steps with what is free.

    Activations come on top: records/tools/plan.py knows those of a GPU.
    """
    weights = sum(p.numel() for p in gpt.parameters())
    states, _ = state_values(gpt, optimizers, world_size)
    need = 4 * (2 * weights + states)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if device.type == "cpu" else 1
    free = free_memory(device) / processes
    text = (
        f"weights, gradients and optimizer states take {need / 2**30:.1f} GiB, activations come on "
        f"top; {free / 2**30:.1f} GiB are free"
    )
    if need > free:
        raise UserError(f"{text}: take a smaller model")
    return text, None


def check_disk(args, gpt, optimizers, world_size):
    """Check that checkpoints fit into log_dir: those that are kept and the one being written."""
    folder = Path(args.log_dir)
    weights = sum(p.numel() for p in gpt.parameters())
    size = 4 * (weights + state_values(gpt, optimizers, world_size)[1])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass  # it can be written
    free = shutil.disk_usage(folder).free
    needed = (args.keep_checkpoints + 1) * size
    text = f"{free / 2**30:.1f} GiB free in {folder}, a checkpoint takes {size / 2**30:.2f}"
    if needed > free:
        fix = "free some or pass another --log_dir"
        raise UserError(f"{text}, {needed / 2**30:.1f} are needed: {fix}")
    return text, None


# ---- Time ----------------------------------------------------------------------------------------
def timed(function, *arguments):
    """Return (seconds that a call takes, its result), which must wait for the device."""
    start = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - start, result


def check_time(args, loaders, rank, world_size, device, dtype):
    """Predict the time of the run from three steps; of a slow one, from a single sequence."""
    train_loader, val_loader = loaders
    train_gpt2.configure_backend(args, device)
    gpt = train_gpt2.GPT(args, dtype).to(device)
    optimizers = train_gpt2.build_optimizers(gpt, args, rank, world_size)
    batch = train_loader.next_batch()
    alone, _ = timed(lambda: gpt(batch[0][:1], batch[1][:1]).backward())
    alone *= args.batch_size // world_size
    gpt.zero_grad()
    if alone > 60:
        total = timedelta(seconds=round(alone * args.num_iterations))
        return (
            f"about {total} of training, if a step takes {alone:.0f} s as one sequence says",
            None,
        )
    compiling, _ = timed(train_gpt2.warm_up, gpt, args, val_loader)

    def step():
        loss, _ = train_gpt2.train_step(gpt, optimizers, *train_loader.next_batch(), 1.0, args)
        loss.item()

    ms = 1000 * statistics.median(timed(step)[0] for _ in range(3))
    some = val_loader.tokens_per_step
    validated = train_gpt2.val_tokens_of(args, val_loader)
    seconds, _ = timed(train_gpt2.evaluate, gpt, val_loader, some)
    validations = 1  # at the end
    if args.val_loss_every:
        validations += math.ceil(args.num_iterations / args.val_loss_every)
    parts = [ms / 1000 * args.num_iterations, seconds * validated / some * validations, compiling]
    training, validation, compiling, total = (
        timedelta(seconds=round(part)) for part in [*parts, sum(parts)]
    )
    return (
        f"about {total} in all: training {training} ({args.num_iterations} steps of {ms:.1f} ms), "
        f"{validations} validations {validation}, compiling {compiling}"
    ), None


# ---- All of them --------------------------------------------------------------------------------
def main(argv):
    """Run all checks; return the faults of all ranks."""
    check = Checks(int(os.environ.get("RANK", 0)))
    args = check("settings", lambda: ("all legal", train_gpt2.parse_args(argv)))
    place = args and check("device", check_device, args)
    if not place:
        return check.of_all_ranks()
    rank, world_size, device = place
    dtype = check("products", check_products, args, device)
    check("compiler", check_compiler, args, device)
    check("network", check_network, device, world_size)
    loaders = check("data", check_data, args, rank, world_size, device)
    missing = [p for p in (args.train_files, args.val_files) if not glob.glob(p)]
    if any("fineweb_" in pattern for pattern in missing):
        check("hub", check_hub)
    if not check.of_all_ranks():
        check("shards", check_shards, loaders, rank, world_size)
        check("ranks", check_ranks, loaders)
    if dtype:
        model = check("optimizers", check_optimizers, args, rank, world_size, dtype)
        check("attention", check_attention, args, device, dtype)
        if model:
            check("memory", check_memory, args, *model, device, world_size)
            check("disk", check_disk, args, *model, world_size)
    if not check.of_all_ranks():
        check("time", check_time, args, loaders, *place, dtype)
    return check.of_all_ranks()


if __name__ == "__main__":
    faults = main(sys.argv[1:])
    if os.environ.get("RANK", "0") == "0":
        print("\nto fix:\n  " + "\n  ".join(faults) if faults else "\nall is well")
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(1 if faults else 0)
