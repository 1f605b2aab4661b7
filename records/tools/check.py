"""Check whether a run can start here: `python train_gpt2.py --check [--field=value ...]`.

It takes seconds, and the time to read the shards once for which a sha256 is noted.

Under torchrun it also checks the processes and their network. Prints a line for each check, then
all is well and exit status 0, or a list of what to fix and 1. It trains nothing.
"""

import contextlib
import itertools
import json
import math
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data"), str(ROOT / "records")]
import describe  # noqa: E402
from shards import file_sha256  # noqa: E402

import train_gpt2  # noqa: E402


class Checks:
    """`check(name, function, ...)` prints what the function returns, or the fault it raises."""

    def __init__(self, rank):
        self.rank, self.faults = rank, []

    def __call__(self, name, function, *arguments):
        """Call function, which returns what to print and a result; return the result or None."""
        try:
            text, result = function(*arguments)
        except Exception as error:
            sentence = describe.explain(error).splitlines()[-1]
            self.faults.append(f"{name}: {sentence}")
            text, result = f"FAILED, {sentence}", None
        if self.rank == 0:
            print(f"{name}: {text}", flush=True)
        return result

    def gathered(self):
        """Return the faults of all ranks, each once, with the ranks if these are not all."""
        if not dist.is_initialized():
            if self.rank > 0:  # rank 0 may know nothing of them
                print(*self.faults, sep="\n", file=sys.stderr)
            return self.faults
        of_ranks, lines = [None] * dist.get_world_size(), []
        try:
            dist.all_gather_object(of_ranks, self.faults)
        except RuntimeError as error:
            return [*self.faults, f"processes: rank {self.rank} lost the others: {error}"]
        for fault in dict.fromkeys(itertools.chain(*of_ranks)):
            ranks = [rank for rank, faults in enumerate(of_ranks) if fault in faults]
            lines.append(fault if len(ranks) == len(of_ranks) else f"{fault} (ranks {ranks})")
        return lines


def check_place(args):
    rank, world_size, device = train_gpt2.place_in_world(args)
    versions, name = describe.environment(device)
    memory = free_memory(device)
    text = f"{name}, {world_size} processes, {memory / 2**30:.1f} GiB of memory free; {versions}"
    return text, (rank, world_size, device)


def free_memory(device):
    """Return the bytes that a process may still take on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in open("/proc/meminfo") if os.path.exists("/proc/meminfo") else ():
        if line.startswith("MemAvailable"):
            pages = int(line.split()[1]) * 1024
    return pages


def check_products(device):
    """Time products in the dtype that training takes."""
    dtype = train_gpt2.matmul_dtype(device)
    x = torch.randn(1024, 1024, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        y = (x @ x)[0, 0].item()
        best = min(best, time.perf_counter() - start)
    if not abs(y) < 1e6:
        raise ValueError(f"a product of random matrices is {y}: this device errs")
    slow = "" if dtype == torch.bfloat16 else ", for this CPU has no bf16 instructions"
    return f"{dtype}, {2 * 1024**3 / best / 1e9:,.0f} GFLOP/s{slow}", None


def check_compiler(args, device):
    if not args.compile:
        return "off", None
    start = time.perf_counter()
    function = torch.compile(lambda x: (x * 2 + 1).relu().sum(), fullgraph=True)
    x = torch.arange(100.0, device=device)
    try:
        result = function(x).item()
    except Exception as error:
        raise ValueError(
            f"torch.compile fails ({str(error).splitlines()[0]}): install g++ and Python.h, or "
            f"pass --compile=False"
        ) from None
    if result != 10000:
        raise ValueError(f"torch.compile computes {result} instead of 10000")
    return f"works, {time.perf_counter() - start:.1f} s for a small graph", None


def check_network(args, device, world_size):
    """Sum a buffer of the size of a step's updates; return its bytes a second on the wire."""
    if world_size == 1:
        return "one process, none needed", None
    buffer = torch.empty(2**24 // 2, dtype=torch.bfloat16, device=device)  # 16 MiB
    seconds = []
    for _ in range(4):
        buffer.fill_(1)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(buffer)
        found = buffer[0].item()
        seconds.append(time.perf_counter() - start)
    if not (buffer == found).all() or (found != world_size and world_size <= 256):  # exact in bf16
        raise ValueError(f"an all_reduce of ones gives {found} instead of {world_size}")
    best = min(seconds[1:])
    sent = 2 * (world_size - 1) / world_size * 16 / best
    return f"all_reduce of 16 MiB in {best * 1000:.1f} ms, {sent:.0f} MiB/s a rank", None


def check_data(args, rank, world_size, device):
    loaders = train_gpt2.open_data(args, rank, world_size, device)
    train_loader, val_loader = loaders
    highest = max(int(loader.read(0, min(loader.total_tokens, 10**7)).max()) for loader in loaders)
    planned, held = args.num_iterations * train_loader.window, train_loader.total_tokens
    return (
        f"{len(train_loader.paths)} + {len(val_loader.paths)} shards, {held:,} + "
        f"{val_loader.total_tokens:,} tokens; the run reads {planned:,} ({planned / held:.3f} "
        f"epochs) and validates on {args.val_tokens:,}; highest id seen {highest}"
    ), loaders


def known_hashes(path):
    """Return the sha256 that a shard should have, or None where nobody noted it."""
    path = Path(path)
    listed = json.loads((ROOT / "data" / "fineweb.json").read_text())["sha256"]
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        manifest = json.loads((path.parent / "manifest.json").read_text())
        listed = listed | manifest["train"]["sha256"] | manifest["val"]["sha256"]
    return listed.get(path.name)


def check_hashes(loaders, rank, world_size):
    """Compare this rank's share of the shards with data/fineweb.json or the packer's manifest."""
    paths = [path for loader in loaders for path in loader.paths]
    expected = {path: sha256 for path in paths if (sha256 := known_hashes(path))}
    mine = list(expected)[rank::world_size]
    with ThreadPoolExecutor() as pool:
        for path, sha256 in zip(mine, pool.map(file_sha256, mine)):
            if sha256 != expected[path]:
                raise ValueError(f"{path} has another sha256 than noted: fetch or pack it again")
    unknown = len(paths) - len(expected)
    return f"{len(expected)} shards as noted" + (f", {unknown} nowhere noted" * (unknown > 0)), None


def check_ranks(loaders):
    if not dist.is_initialized():
        return "one process", None
    seen = loaders[0].last_tokens() | loaders[1].last_tokens()
    train_gpt2.check_ranks_agree(seen, "give every machine the same files")
    return "the same shards on all", None


def check_optimizers(args, rank, world_size):
    """Build the model without its memory; print its table of optimizers and Muon's balance."""
    with torch.device("meta"):
        gpt = train_gpt2.GPT(args)
        optimizers = train_gpt2.build_optimizers(gpt, args, rank, world_size)
    lines = describe.optimizer_table(gpt, optimizers, world_size)
    return "\n".join(lines), (gpt, optimizers[1])


def estimate_memory(args, gpt, muon, dtype, micro):
    """Return about how many bytes a process needs at its peak, with micro sequences at a time.

    Weights, gradients, updates and optimizers' states are exact; activations count the tensors of
    a block that backward needs. Within 20% of the compiled float32 runs that it was held against.
    """
    everything, head = sum(p.numel() for p in gpt.parameters()), gpt.lm_head.weight.numel()
    low = dtype.itemsize  # bytes of a product's result
    momentum = max(describe.owned_values(muon))
    fixed = 8 * everything + 8 * head + 2 * (everything - head) + 4 * momentum
    if low < 4:  # weights, and the gradients of a micro-batch, in it too
        fixed += 2 * low * everything
    tokens = micro * args.sequence_length
    # of width C: residual and its norm twice; q, k, v, normed and turned q and k, attention's
    # result; of width 4 C: before and after the square
    block = tokens * args.n_embd * (4 + 6 + 2 * 4) * low
    chunks = math.ceil(tokens * args.vocab_size / train_gpt2.CHUNK_LOGITS)
    chunk = math.ceil(tokens / min(train_gpt2.MAX_CHUNKS, chunks))
    logits = chunk * args.vocab_size * 2 * low + head * (4 + low)
    torch_itself = 0 if gpt.lm_head.weight.is_cuda else 2**28
    return torch_itself + fixed + args.n_layer * block + logits


def check_memory(args, gpt, muon, device, world_size):
    dtype = train_gpt2.matmul_dtype(device)
    local = args.batch_size // world_size
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if device.type == "cpu" else 1
    free = free_memory(device) / here
    sizes = [n for n in train_gpt2.divisors(local) if n <= args.device_batch_size]
    needs = {n: estimate_memory(args, gpt, muon, dtype, n) for n in sizes}
    need, fitting = needs[sizes[-1]], [n for n in sizes if needs[n] < free]
    text = f"a process needs about {need / 2**30:.1f} GiB of {free / 2**30:.1f} free"
    if need > free:
        fix = f"--device_batch_size={fitting[-1]}" if fitting else "a smaller model"
        raise ValueError(f"{text}: take {fix}")
    return text, None


def check_disk(args, gpt):
    """Check that checkpoints fit into log_dir: those that are kept and the one being written."""
    folder, head = Path(args.log_dir), gpt.lm_head.weight.numel()
    size = 4 * (2 * sum(p.numel() for p in gpt.parameters()) + head)  # weights, momentum, moments
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass  # it can be written
    free, needed = shutil.disk_usage(folder).free, (args.keep_checkpoints + 1) * size
    text = f"{free / 2**30:.1f} GiB free in {folder}, a checkpoint takes {size / 2**30:.2f}"
    if needed > free:
        raise ValueError(f"{text}, {needed / 2**30:.1f} are needed: free some or pass --log_dir")
    return text, None


def main(argv):
    """Run all checks; return the faults of all ranks."""
    check = Checks(int(os.environ.get("RANK", 0)))
    args = check("settings", lambda: ("all legal", train_gpt2.parse_args(argv)))
    place = args and check("device", check_place, args)
    if not place:
        return check.gathered()
    rank, world_size, device = place
    if world_size > 1 and not check("processes", connect, args, device):
        return check.gathered()
    check("products", check_products, device)
    check("compiler", check_compiler, args, device)
    check("network", check_network, args, device, world_size)
    loaders = check("data", check_data, args, rank, world_size, device)
    if not check.gathered():
        check("shards", check_hashes, loaders, rank, world_size)
        check("ranks", check_ranks, loaders)
    models = check("optimizers", check_optimizers, args, rank, world_size)
    if models:
        check("memory", check_memory, args, *models, device, world_size)
        check("disk", check_disk, args, models[0])
    return check.gathered()


def connect(args, device):
    train_gpt2.processes.connect(device, args.comm_timeout)
    return f"{dist.get_world_size()} joined by {dist.get_backend()}", True


if __name__ == "__main__":
    faults = main(sys.argv[1:])
    if int(os.environ.get("RANK", 0)) == 0:
        print("\nto fix:\n  " + "\n  ".join(faults) if faults else "\nall is well")
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(1 if faults else 0)
