"""Train the small GPT of preset `cpu` and show what it has learned: `bash run.sh` without a GPU."""

import os
import sys
import time

import numpy as np
from runlog import MAY_VARY, ROOT, argument_parser, command, read, run_child

RECORDED = "records/2026-11-28_First_run/cpu_seed*.txt"
NEXT = """
Next, train the modern model on English, or on a text of your own:

    bash run.sh modern --preset=small
    bash run.sh pack YOUR_TEXT.txt --out data/mine && bash run.sh modern --preset=text"""


def chart(losses, width=64, height=12):
    """Return a text chart of the losses. Each column is the mean of one of `width` parts."""
    means = [part.mean() for part in np.array_split(losses, min(width, len(losses)))]
    top, bottom = max(means), min(means)
    per_row = (top - bottom) / (height - 1) or 1.0
    row_of_column = [round((top - mean) / per_row) for mean in means]
    lines = []
    for row in range(height):
        stars = "".join("*" if row == own_row else " " for own_row in row_of_column)
        lines.append(f"{top - row * per_row:6.2f} |{stars}")
    lines.append(" " * 7 + "+" + "-" * len(means))
    lines.append(" " * 8 + "0" + f"{len(losses)} steps".rjust(len(means) - 1))
    return "\n".join(lines)


def expectation(run):
    """Return the losses of recorded runs with the same settings and data, as text."""
    recorded = [read(path) for path in sorted(ROOT.glob(RECORDED))]
    losses = [each.val_loss for each in recorded if experiment(each) == experiment(run)]
    if not losses:
        return "no recorded run has these settings and this validation data"
    reached = f"{len(losses)} seeds reached {min(losses):.3f} to {max(losses):.3f}"
    return f"expected: about {np.mean(losses):.3f}; {reached}"


def experiment(run):
    """Return what identifies an experiment: settings that may not vary, and the validation data.

    Without dtype, because it changes the loss by rounding errors only.
    """
    names = run.settings.keys() - MAY_VARY - {"dtype"}
    return {name: run.settings[name] for name in names}, run.facts.get("val_data")


def main(argv):
    argument_parser(__doc__).parse_args(argv)  # it has no options
    run_id = time.strftime("cpu-%Y%m%d-%H%M%S-") + os.urandom(3).hex()
    script = ROOT / "train_gpt2.py"
    status = run_child(
        [sys.executable, script, "--preset=cpu", "--log_dir=logs", f"--run_id={run_id}"]
    )
    run = read(f"logs/{run_id}.txt") if status == 0 else None
    if run is None or not run.finished:  # it has said why
        return status
    losses = [loss for _, loss in run.points["train"]]
    print(f"\nTraining loss in nats per byte:\n\n{chart(losses)}")
    print(f"\nValidation loss: {run.val_loss:.4f} ({expectation(run)})")
    print("\nWhat the model writes after `def `:\n", flush=True)
    options = ["--temperature=0.6", "--tokens=400", "--seed=1", f"--weights=logs/{run_id}"]
    status = run_child([sys.executable, ROOT / "records/tools/sample.py", "def ", *options])
    print(NEXT)
    return status


if __name__ == "__main__":
    command(main)
