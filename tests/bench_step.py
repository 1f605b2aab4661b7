"""Time a training step against the plain one: python tests/bench_step.py [--n_layer=6 ...]

Two processes, one for each side, do a few steps in turn (A B A B ...) on the same random tokens,
so that a drifting machine hurts both. Prints medians, ratios and each process's peak memory.
Run it alone: another process on the same cores makes both figures worthless.
"""

import multiprocessing
import platform
import resource
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import plain

import train_gpt2

SETTINGS = {
    "n_layer": 4, "n_head": 2, "n_embd": 256, "vocab_size": 50304,
    "batch_size": 16, "device_batch_size": 16, "sequence_length": 256,
}  # fmt: skip
ROUNDS, STEPS = 9, 3


def worker(side, settings, pipe):
    """Answer each request with the seconds of STEPS steps; at the end with the peak memory."""
    args = train_gpt2.Hyperparameters(**settings)
    torch.manual_seed(0)
    gpt = train_gpt2.GPT(args)
    tokens = torch.randint(args.vocab_size, (args.batch_size * args.sequence_length + 1,))
    inputs = tokens[:-1].view(args.batch_size, -1)
    targets = tokens[1:].view(args.batch_size, -1)
    if side == "ours":
        optimizers = train_gpt2.build_optimizers(gpt, args, 0, 1)
        gpt.compile(dynamic=False, fullgraph=True)

        def step():
            return train_gpt2.train_step(gpt, optimizers, inputs, targets, 1.0, args)
    else:
        model = plain.PlainGPT(args)
        model.load_state_dict(gpt.state_dict())
        del gpt
        dtype = train_gpt2.matmul_dtype(torch.device("cpu"))  # of both sides: that of the machine
        optimizers = plain.plain_optimizers(model, args, dtype)

        def step():
            return plain.plain_step(model, optimizers, inputs, targets, dtype)

    losses = [step().item() for _ in range(3)]  # compiles, allocates
    pipe.send(losses)
    while pipe.recv():
        start = time.perf_counter()
        for _ in range(STEPS):
            step().item()
        pipe.send((time.perf_counter() - start) / STEPS)
    pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def start(side, settings, context):
    """Return the pipe to a new worker that has done its first steps."""
    near, far = context.Pipe()
    context.Process(target=worker, args=(side, settings, far), daemon=True).start()
    losses = near.recv()  # one side compiles after the other
    print(f"{side:5s} losses of the first steps: {' '.join(f'{x:.4f}' for x in losses)}")
    return near


def main():
    settings = dict(SETTINGS)
    for argument in sys.argv[1:]:
        name, _, value = argument.removeprefix("--").partition("=")
        settings[name] = int(value)
    context = multiprocessing.get_context("spawn")
    seconds, memory = {"ours": [], "plain": []}, {}
    pipes = {side: start(side, settings, context) for side in seconds}
    for _ in range(ROUNDS):
        for side, pipe in pipes.items():
            pipe.send(True)
            seconds[side].append(pipe.recv())
    for side, pipe in pipes.items():
        pipe.send(False)
        memory[side] = pipe.recv()
    tokens = settings["batch_size"] * settings["sequence_length"]
    products = train_gpt2.matmul_dtype(torch.device("cpu"))
    print(f"\ntorch {torch.__version__}, {torch.get_num_threads()} threads, "
          f"products in {products}, {platform.platform()}")  # fmt: skip
    print(f"{settings}\n{ROUNDS} rounds of {STEPS} steps a side, in turn\n")
    print("side   ms/step (median, min..max)    tokens/s   peak memory")
    for side, times in seconds.items():
        ms = [1000 * t for t in times]
        median = statistics.median(ms)
        spread = f"{median:8.1f} ({min(ms):.1f}..{max(ms):.1f})"
        print(f"{side:5s} {spread:30s} {1000 * tokens / median:9.0f} {memory[side]:9.0f} MiB")
    ratios = [b / a for a, b in zip(seconds["ours"], seconds["plain"])]
    print(f"\ntokens/s, ours / plain: {statistics.median(ratios):.2f} "
          f"({min(ratios):.2f}..{max(ratios):.2f}) round by round")  # fmt: skip
    print(f"peak memory, ours / plain: {memory['ours'] / memory['plain']:.2f}")


if __name__ == "__main__":
    main()
