"""Compare two ways to train a large n-gram table: dense gradients, and gathered rows.

    python gathered_rows.py [--name=value ...]                   # settings of train_modern.py
    torchrun --nproc_per_node=2 gathered_rows.py [--name=value ...]

Dense: the compiled model looks the rows up, and the table's gradient, which is as large as the
table, is all-reduced. Gathered: the looked-up rows are an input of the compiled model. Their
gradients, a row for each token, are all-gathered and added up in the table's gradient afterwards.
Both train the same model on the same batches. Prints losses and seconds of each step.
"""

import dataclasses
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "records" / "modern")]
import train_modern  # noqa: E402

import train_gpt2  # noqa: E402

STEPS = 12


class GatheredTable(nn.Module):
    """A train_modern.NgramTable of pairs of tokens that is read before the model runs."""

    def __init__(self, table):
        super().__init__()
        self.weight = table.weight

    def look_up(self, tokens):
        """Look up the rows of tokens, (B, T), for the next call of the model."""
        previous = F.pad(tokens, (1, 0))[:, :-1]
        self.keys = (tokens * 1000003 + previous + 1) % len(self.weight)  # as in NgramTable
        self.rows = self.weight.detach()[self.keys].requires_grad_()

    def forward(self, tokens):
        """Return the rows that look_up has read for these tokens, (B, T, C)."""
        return self.rows

    def add_up_gradients(self):
        """Collective: set weight.grad to the sum of the gradients of all rows on all ranks."""
        keys, gradients = self.keys.flatten(), self.rows.grad.flatten(0, 1)
        if train_gpt2.get_world_size() > 1:
            keys, gradients = all_gather(keys), all_gather(gradients)
        self.weight.grad = torch.zeros_like(self.weight).index_add_(0, keys, gradients)


def all_gather(x):
    """Collective: return the x of all ranks, of equal shape, concatenated."""
    parts = [torch.empty_like(x) for _ in range(train_gpt2.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def train_step(run, inputs, targets):
    """Collective: train_gpt2.train_step for one micro-batch, with or without gathered rows."""
    table = run.model.ngrams
    is_gathered = isinstance(table, GatheredTable)
    if is_gathered:
        table.look_up(inputs)
    loss = run.model(inputs, targets) / train_gpt2.get_world_size()
    loss.backward()
    train_gpt2.sum_gradients(run.model)  # not of a GatheredTable, which has none yet
    if is_gathered:
        table.add_up_gradients()
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    loss = loss.detach()
    if train_gpt2.get_world_size() > 1:
        dist.all_reduce(loss)
    return float(loss)


def with_gathered_rows(run):
    """Return a second run with the same weights, whose table is a GatheredTable."""
    model = train_modern.ModernGPT(run.args, run.model.dtype).to(run.device)
    optimizers = train_modern.build_optimizers(model, run.args)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]  # as in train_gpt2.set_up
    model.load_state_dict(run.model.state_dict())
    model.ngrams = GatheredTable(model.ngrams)
    # The compiler runs the model once before the first step.
    shape = run.micro_batch_size, run.args.sequence_length
    model.ngrams.look_up(torch.zeros(shape, dtype=torch.int64, device=run.device))
    return dataclasses.replace(run, model=model, optimizers=optimizers)


def main():
    settings = ["--preset=small", "--ngram_rows=200000", *sys.argv[1:]]
    args = train_gpt2.parse_args(settings, train_modern.RECIPE)
    dense = train_gpt2.set_up(args, train_modern.RECIPE, train_gpt2.StopRequest())
    runs = {"dense": dense, "gathered": with_gathered_rows(dense)}
    for run in runs.values():
        if args.compile:
            train_gpt2.compile_model(run)
    if train_gpt2.get_rank() == 0:
        print(f"{train_gpt2.get_world_size()} rank(s), {torch.get_num_threads()} thread(s) each")
    for step in range(STEPS):
        row = [f"step {step}"]
        for name, run in runs.items():
            train_modern.apply_schedule(run.model, run.optimizers, step, run.args)
            inputs, targets = run.train_loader.batch(step)
            start = time.perf_counter()
            loss = train_step(run, inputs, targets)
            seconds = time.perf_counter() - start
            row.append(f"{name}: loss {loss:.6f}, {seconds:.2f} s")
        if train_gpt2.get_rank() == 0:
            print("; ".join(row), flush=True)
    difference = (runs["dense"].model.ngrams.weight - runs["gathered"].model.ngrams.weight).abs()
    if train_gpt2.get_rank() == 0:
        print(f"largest difference of the tables: {difference.max():.2e}")
    train_gpt2.leave_ranks()


if __name__ == "__main__":
    main()
