"""Train the plain model as train_gpt2.py does its own: python tests/plain_run.py [--field=value]

train_gpt2.train itself runs it, eager and in one process, so weights at the start, batches,
schedule, validation and log are the same. For the loss at equal steps and at equal time.
"""

import dataclasses
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import plain
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt2
from train_gpt2 import describe

SOURCES = ("tests/plain.py", "train_gpt2.py", *describe.SIBLINGS)  # what the log holds


def train_step(model, optimizers, inputs, targets, lr_scale, args, largest=None):
    """Do what train_gpt2.train_step does, plainly; `largest` stays as it is."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * lr_scale
    dtype = train_gpt2.matmul_dtype(inputs.device)
    return plain.plain_step(model, optimizers, inputs, targets, dtype, args.device_batch_size)


def main(args):
    """Train as args say; return the last validation loss."""
    args = dataclasses.replace(args, compile=False)
    rank, world_size, device = train_gpt2.place_in_world(args)
    train_loader, val_loader = train_gpt2.open_data(args, rank, world_size, device)
    torch.manual_seed(args.seed)
    gpt = train_gpt2.GPT(args).to(device)
    model, dtype = plain.PlainGPT(args).to(device), train_gpt2.matmul_dtype(device)
    model.load_state_dict(gpt.state_dict())
    described = train_gpt2.build_optimizers(gpt, args, rank, world_size)  # for the log's table
    log = describe.Log(args, rank, args.run_id or time.strftime("plain-%Y%m%d-%H%M%S"))
    kernels = f"products:{dtype} attention:torch's own choice"
    with mock.patch.object(describe, "SIBLINGS", SOURCES):
        describe.header(log, __file__, args, gpt, described, train_loader, val_loader, kernels)
    del gpt, described  # or their memory would count
    optimizers = plain.plain_optimizers(model, args, dtype)
    no_checkpoints = SimpleNamespace(wait=lambda: True)
    with mock.patch.object(train_gpt2, "train_step", train_step):
        return train_gpt2.train(
            args, log, model, optimizers, train_loader, val_loader, no_checkpoints, []
        )


if __name__ == "__main__":
    main(train_gpt2.parse_args(sys.argv[1:]))
