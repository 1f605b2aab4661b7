"""What a checkpoint of GPT-2 124M costs: how long training waits for it, and its bytes.

    python tests/bench/bench_checkpoint.py --rounds 7     # minutes on 2 cores

A round steps once with a few sequences and saves once, as train_gpt2.py does, into the folder in
which it is started: that decides which disk is timed. Training waits until the file is on the disk.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "records" / "tools")]
import train_gpt2  # noqa: E402
from train_gpt2 import device_name  # noqa: E402


def spread(values):
    return f"{statistics.median(values):9.0f} ({min(values):.0f}..{max(values):.0f})"


def ms_of(function, *arguments):
    start = time.perf_counter()
    function(*arguments)
    return 1000 * (time.perf_counter() - start)


def bench(args, rounds):
    """Print the table of a model that args define; args.log_dir takes the checkpoints."""
    _, _, device = train_gpt2.join_processes(args)
    train_gpt2.configure_backend(args, device)
    torch.manual_seed(args.seed)
    gpt = train_gpt2.GPT(args, train_gpt2.product_dtype(args, device)).to(device)
    optimizers = train_gpt2.build_optimizers(gpt, args, 0, 1)
    log = train_gpt2.Log(args, "bench", 0)
    state = dict(position=0, data_hash="0" * 12, fingerprint=0)
    loader = argparse.Namespace(state_dict=lambda: state, tokens_per_step=1)
    shape = args.batch_size, args.sequence_length + 1
    tokens = torch.randint(args.vocab_size, shape).to(device)

    def step():
        batch = tokens[:, :-1], tokens[:, 1:]
        loss, _ = train_gpt2.train_step(gpt, optimizers, *batch, 1.0, args)
        loss.item()

    def save(number):
        loader.position = number
        if not train_gpt2.save_checkpoint(gpt, optimizers, loader, log, args):
            sys.exit("a checkpoint could not be written")

    step()
    first = ms_of(save, 0)
    steps, saves = [], []
    for number in range(1, rounds + 1):
        steps.append(ms_of(step))
        saves.append(ms_of(save, number))
    size = (log.folder / log.checkpoints[-1]).stat().st_size
    everything, head = sum(p.numel() for p in gpt.parameters()), gpt.lm_head.weight.numel()
    least = 4 * (everything + 2 * head + (everything - head))  # weights, AdamW's two, momentum
    share = statistics.median(a / b for a, b in zip(saves, steps))
    print(
        f"{everything / 1e6:.1f}M parameters, {device_name(device)}, {torch.get_num_threads()} "
        f"threads, torch {torch.__version__}, {rounds} rounds; ms: median (min..max)"
    )
    print(f"a save, during which training waits {spread(saves)}; the first {first:.0f}")
    print(f"a step of {args.batch_size} sequences of {args.sequence_length} {spread(steps)}")
    print(f"save / step: {share:.2f}, round by round")
    print(f"rate: {size / statistics.median(saves) / 1000:.0f} MB/s")
    print(f"file: {size:,} bytes, least possible {least:,}: {size / least:.5f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sequences", type=int, default=2, help="of 1024 tokens, in a step")
    parser.add_argument("--layers", type=int, default=12, help="fewer: to try this script")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        args = train_gpt2.Hyperparameters(
            n_layer=given.layers,
            batch_size=given.sequences,
            device_batch_size=1,
            log_dir=folder,
            compile=False,
        )
        bench(args, given.rounds)


if __name__ == "__main__":
    main()
