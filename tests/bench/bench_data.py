"""Tables of the data's way: text to tokens, and tokens to batches.

    python tests/bench/bench_data.py --loader                 # ours against the plain loader
    python tests/bench/bench_data.py --pack BOOKS.jsonl.xz    # data/pack.py against a plain loop

--loader: one rank of --world_size reads one shard after the other, shard changes included. The
plain loader reads a whole shard, then slices and converts (as record 7 of the public speedrun
does). The goal is 5M tokens/s, ten times what one of eight H100s trains on, and no pause over 5 ms
at a change of shard.
--pack: the text, --copies times over, by data/pack.py with all cores, by a plain loop (read,
encode, append, save) and by tiktoken alone, which neither reads nor writes. The sides take turns;
medians of --rounds.
"""

import argparse
import json
import lzma
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "data")]
import shards  # noqa: E402

from train_gpt2 import DistributedDataLoader  # noqa: E402


class PlainLoader:
    """Reads whole shards into memory, one after the other; slices and converts."""

    def __init__(self, paths, batch_size, T, rank, world_size):
        self.paths, self.T, self.shard = paths, T, -1
        self.local, self.tokens_per_step = batch_size // world_size * T, batch_size * T
        self.first = rank * self.local
        self.advance()

    def advance(self):
        self.shard = (self.shard + 1) % len(self.paths)
        with open(self.paths[self.shard], "rb") as file:
            file.read(1024)
            self.tokens = np.frombuffer(file.read(), dtype=np.uint16)
        self.position = self.first

    def next_batch(self):
        tokens = self.tokens[self.position : self.position + self.local + 1]
        tokens = torch.tensor(tokens.astype(np.int32), dtype=torch.long)
        self.position += self.tokens_per_step
        if self.position + self.tokens_per_step >= len(self.tokens):
            self.advance()
        return tokens[:-1].view(-1, self.T), tokens[1:].view(-1, self.T)


def read_one_shard(loader, steps):
    """Return (tokens per second, ms of the slowest batch) over the batches of one shard."""
    times, tokens = [], 0
    for _ in range(steps):
        start = time.perf_counter()
        inputs, _ = loader.next_batch()
        times.append(time.perf_counter() - start)
        tokens += inputs.numel()
    return tokens / sum(times), 1e3 * max(times)


def bench_loader(args, folder):
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    paths = [folder / f"s_{i}.bin" for i in range(2)]
    for path in paths:
        tokens = generator.integers(0, 50257, args.shard_tokens, dtype=np.uint16)
        shards.write_shard(path, len(tokens), [tokens])
    steps = args.shard_tokens // (512 * 1024)
    place = 512, 1024, 0, args.world_size
    ours = DistributedDataLoader(str(folder / "s_*.bin"), *place, torch.device("cpu"), 50304)
    sides = {"ours": ours, "plain": PlainLoader(paths, *place)}
    rows = {name: [] for name in sides}
    for loader in sides.values():  # both shards once: from the disk, and into the page cache
        read_one_shard(loader, 2 * steps)
    for turn in range(args.rounds):
        for name in sorted(sides, reverse=turn % 2):
            rows[name].append(read_one_shard(sides[name], steps))
    print(
        f"one rank of {args.world_size}, shards of {args.shard_tokens:,} tokens, steps of 512 x "
        f"1024; {args.rounds} rounds of one shard a side, in turn"
    )
    print("side       M tokens/s (median, min..max)   slowest batch of a round, ms (median, max)")
    for name, results in rows.items():
        rates = [rate / 1e6 for rate, _ in results]
        pauses = [pause for _, pause in results]
        print(
            f"{name:8s} {median(rates):8.1f} ({min(rates):.1f}..{max(rates):.1f})"
            f"{'':8s}{median(pauses):10.2f} {max(pauses):10.2f}"
        )
    ratios = [a / b for (a, _), (b, _) in zip(rows["ours"], rows["plain"])]
    spread = f"{median(ratios):.1f} ({min(ratios):.1f}..{max(ratios):.1f})"
    print(f"tokens/s, ours / plain: {spread} round by round")
    slowest_rate = min(rate for rate, _ in rows["ours"])
    longest_pause = max(pause for _, pause in rows["ours"])
    print(f"5M tokens/s in every round: {'met' if slowest_rate >= 5e6 else 'missed'}")
    print(f"no batch of any round over 5 ms: {'met' if longest_pause <= 5 else 'missed'}")


def plain_pack(source, out):
    """The usual loop: one document after the other, in one process."""
    import tiktoken

    encoding, tokens = tiktoken.get_encoding("gpt2"), []
    with open(source) as lines:
        for line in lines:
            tokens.append(encoding.eot_token)
            tokens.extend(encoding.encode_ordinary(json.loads(line)["text"]))
    tokens = np.array(tokens, dtype=np.uint16)
    shards.write_shard(out, len(tokens), [tokens])


def bench_pack(args, folder):
    import tiktoken

    lines = lzma.open(args.pack, "rt", encoding="utf-8").read().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    source, size = folder / "source.jsonl", sum(len(text.encode()) for text in texts)
    with open(source, "w") as file:
        for copy in range(args.copies):  # each another text: parts of equal text are encoded once
            file.writelines(json.dumps({"text": f"{copy} {text}"}) + "\n" for text in texts)
    encoding, cores = tiktoken.get_encoding("gpt2"), len(os.sched_getaffinity(0))
    command = [sys.executable, ROOT / "data" / "pack.py", source, "--val_fraction", "0", "--out"]

    def alone():
        for text in texts:
            encoding.encode_ordinary(text)

    def ours():
        subprocess.run([*command, folder / "out"], check=True, capture_output=True)

    sides = {
        "tiktoken alone, 1 thread": (alone, size),
        f"data/pack.py, {cores} workers": (ours, size * args.copies),
        "plain loop, 1 thread": (lambda: plain_pack(source, folder / "p.bin"), size * args.copies),
    }
    rates = {name: [] for name in sides}
    for turn in range(args.rounds):
        for name in sorted(sides, reverse=turn % 2):
            start = time.perf_counter()
            sides[name][0]()
            rates[name].append(sides[name][1] / (time.perf_counter() - start) / 1e6)
    same = (folder / "out" / "train_000001.bin").read_bytes() == (folder / "p.bin").read_bytes()
    print(
        f"{size * args.copies / 1e6:.0f} MB of text, {args.copies * len(texts):,} documents; "
        f"{args.rounds} rounds in turn; start of the processes and writing included; same "
        f"tokens: {same}"
    )
    print("side                        MB/s (median, min..max)")
    for name, values in rates.items():
        print(f"{name:26s} {median(values):6.2f} ({min(values):.2f}..{max(values):.2f})")
    alone, ours, plain = rates.values()
    bases = {
        f"tiktoken alone x {cores} cores": [cores * rate for rate in alone],
        "the plain loop": plain,
    }
    for name, base in bases.items():
        ratios = [a / b for a, b in zip(ours, base)]
        print(f"data/pack.py / {name}: {median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--loader", action="store_true")
    parser.add_argument("--pack", type=Path, metavar="BOOKS.jsonl.xz")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--copies", type=int, default=10, help="of the text")
    parser.add_argument("--world_size", type=int, default=8)
    parser.add_argument("--shard_tokens", type=int, default=100_000_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.loader:
            bench_loader(args, Path(folder))
        if args.pack:
            bench_pack(args, Path(folder))


if __name__ == "__main__":
    main()
