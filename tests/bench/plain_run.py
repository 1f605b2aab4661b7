"""Train the plain model as train_gpt2.py does its own: python tests/bench/plain_run.py --name=value

train_gpt2.py itself runs it, eager and in one process, with the model, the optimizers and the step
of tests/plain.py in the place of its own: weights at the start, batches, schedule, validation, log
and checkpoints are the same. For the loss at equal steps and at equal time.
"""

import sys
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import plain  # noqa: E402

import train_gpt2  # noqa: E402

GPT = train_gpt2.GPT


def build_model(args, dtype):
    """Return the plain model with the weights of train_gpt2's. UserError: it lacks a part of it."""
    if args.max_ngram or args.key_shift or args.logit_softcap:
        raise train_gpt2.UserError("the plain model has no n-grams and no key shift: set both to 0")
    weights = GPT(args).state_dict()  # first, for the seed's values are the next
    model = plain.PlainGPT(args)
    model.load_state_dict(weights)
    model.dtype = dtype
    return model


def build_optimizers(model, args, rank, world_size):
    """Return the plain AdamW and Muon. Raises UserError for several processes."""
    if world_size > 1:
        raise train_gpt2.UserError("the plain step knows one process: start it without torchrun")
    return plain.plain_optimizers(model, args, model.dtype)


def train_step(model, optimizers, inputs, targets, lr_scale, args, check_stop=lambda: None):
    """Do what train_gpt2.train_step does, plainly; it looks at the loss, not at the gradients."""
    check_stop()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            initial_lr = group.setdefault("initial_lr", group["lr"])
            group["lr"] = initial_lr * lr_scale
    size = train_gpt2.micro_batch_size(len(inputs), args.device_batch_size)
    loss = plain.plain_step(model, optimizers, inputs, targets, model.dtype, size)
    return loss, torch.zeros(len(list(model.parameters())))


def main(argv):
    """Do what train_gpt2.py does with these arguments, with the plain model.

    The log begins with the source of this file.
    """
    with mock.patch.multiple(
        train_gpt2,
        GPT=build_model,
        build_optimizers=build_optimizers,
        train_step=train_step,
        SOURCE=Path(__file__).read_text(encoding="utf-8"),
    ):
        train_gpt2.cli([*argv, "--compile=False"])


if __name__ == "__main__":
    main(sys.argv[1:])
