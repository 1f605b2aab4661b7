"""Train the modern model, and print the validation loss of averages of its last weights.

    python tail_average.py --preset=small --device=cpu --dtype=float32 --seed=1

The averages do not change the training. That of the last 0% is the weights of the last step, so its
loss is that of the run. It takes the settings of train_modern.py for one process on a CPU, but a
run cannot be resumed, and the number of validation sequences must be a multiple of 8.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "modern"))
import train_modern  # adds the folder of train_gpt2.py to sys.path

import train_gpt2

PERCENT = (0, 2, 5, 10, 20)  # of the steps; 0 is the last step alone
AVERAGES = dict.fromkeys(PERCENT)  # a list of tensors for each


@torch.no_grad()
def update_averages(model, step, args):
    """Add the weights after `step` steps to each average whose part of the run has begun."""
    for percent in PERCENT:
        first_step = args.num_iterations - args.num_iterations * percent // 100
        count = step - first_step + 1
        if count == 1:
            AVERAGES[percent] = [p.clone() for p in model.parameters()]
        elif count > 1:
            for average, p in zip(AVERAGES[percent], model.parameters()):
                average.lerp_(p, 1 / count)


@torch.no_grad()
def print_losses(model, args):
    """Print the validation loss of each average, and leave the model as it was."""
    last = [p.clone() for p in model.parameters()]
    _, validation, _, _ = train_gpt2.open_data(args, torch.device("cpu"))
    inputs, targets = train_gpt2.inputs_and_targets(validation, torch.device("cpu"))
    for percent, averages in AVERAGES.items():
        for p, average in zip(model.parameters(), averages):
            p.copy_(average)
        losses = [model(x, y) for x, y in zip(inputs.split(8), targets.split(8))]
        loss = torch.stack(losses).double().mean().item()
        print(f"{args.run_id}: average of the last {percent}%: {loss:.4f}", flush=True)
    for p, weight in zip(model.parameters(), last):
        p.copy_(weight)


def apply_schedule(model, optimizers, step, args):
    """Set the schedule, and update the averages.

    train() calls this before each step and after the last, so the model has taken `step` steps.
    """
    train_modern.apply_schedule(model, optimizers, step, args)
    update_averages(model, step, args)
    if step == args.num_iterations:
        print_losses(model, args)


SOURCES = train_modern.RECIPE.sources | {
    "tail_average.py": Path(__file__).read_text(encoding="utf-8")
}
RECIPE = train_modern.RECIPE._replace(sources=SOURCES, apply_schedule=apply_schedule)

if __name__ == "__main__":
    train_gpt2.cli(sys.argv[1:], RECIPE)
