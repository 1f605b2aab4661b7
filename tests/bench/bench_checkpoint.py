"""What a checkpoint of GPT-2 124M costs: the pause of training, the write beside it, the bytes.

    python tests/bench_checkpoint.py --rounds 7     # about 5 minutes and 6 GB on 2 cores

A round steps once with a few sequences and saves once, as train_gpt2.py does. The pause is from the
call to the return of both; the writing then goes on in its thread during the next step.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt2
from train_gpt2 import checkpoints, describe


def spread(values):
    return f"{statistics.median(values):9.0f} ({min(values):.0f}..{max(values):.0f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sequences", type=int, default=2, help="of 1024 tokens, in a step")
    rounds, sequences = vars(parser.parse_args()).values()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        args = train_gpt2.Hyperparameters(
            batch_size=sequences, device_batch_size=1, log_dir=folder, device="cpu", compile=False
        )
        torch.manual_seed(args.seed)
        gpt = train_gpt2.GPT(args)
        optimizers = train_gpt2.build_optimizers(gpt, args, 0, 1)
        log = describe.Log(args, 0, "bench")
        saved = checkpoints.Checkpoints(log, args.keep_checkpoints)
        loader = argparse.Namespace(state_dict=lambda: dict(position=0, data_hash="0" * 16))
        tokens = torch.randint(50257, (sequences, 1025))

        def step():
            start = time.perf_counter()
            batch = tokens[:, :-1], tokens[:, 1:]
            train_gpt2.train_step(gpt, optimizers, *batch, 1.0, args).item()
            log.step += 1
            return 1000 * (time.perf_counter() - start)

        def save():
            start = time.perf_counter()
            saved.save(checkpoints.run_state(gpt, optimizers, loader, log, args))
            return 1000 * (time.perf_counter() - start)

        step()
        first = save()
        alone, beside, pauses = [], [], []
        for _ in range(rounds):
            saved.wait()
            alone.append(step())
            pauses.append(save())
            beside.append(step())  # while the thread writes
        saved.wait()
        size = os.path.getsize(saved.last)
    everything, head = sum(p.numel() for p in gpt.parameters()), gpt.lm_head.weight.numel()
    least = 4 * (everything + 2 * head + (everything - head))  # weights, AdamW's two, momentum
    _, name = describe.environment(torch.device("cpu"))
    print(f"GPT-2 124M, {name}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
          f"{rounds} rounds; ms: median (min..max)")  # fmt: skip
    print(f"pause of a save       {spread(pauses)}; the first, which takes memory: {first:.0f}")
    print(f"step of {sequences} sequences   {spread(alone)}")
    print(f"the step beside a write{spread(beside)}")
    share = statistics.median(p / s for p, s in zip(pauses, alone))
    print(f"pause / step: {share:.1%}")
    print(f"file: {size:,} bytes, least possible {least:,}: {size / least:.5f}")


if __name__ == "__main__":
    main()
