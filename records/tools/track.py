"""Send a training log to TensorBoard or Weights & Biases, even while the run is in progress.

    bash run.sh track logs/RUN.txt --tensorboard DIR     # then: tensorboard --logdir DIR
    bash run.sh track logs/RUN.txt --wandb PROJECT       # WANDB_MODE=offline needs no account

It sends the losses, the training time and the hyperparameters. It stops when the log contains the
result or is deleted, or on Ctrl-C. A step that a resumed run repeats is sent only once. If the tool
is started again, it sends the whole log again. TensorBoard shows each log as a run, under its name
and that of its folder.
"""

import contextlib
import time
from pathlib import Path

from runlog import argument_parser, command, packages, read, require


def new_points(run, pause=1.0):
    """Yield (step, {name: value}) from the log of a run as it grows, up to its result."""
    sent = {"train": -1, "val": -1}  # the last step of each kind
    while True:
        points = [(*point, kind) for kind in sent for point in run.points[kind]]
        for step, loss, ms, kind in sorted(points):
            if step > sent[kind]:  # a resumed run repeats steps
                sent[kind] = step
                yield step, {f"{kind}_loss": loss, "train_seconds": ms / 1000}
        if run.ended:
            return
        time.sleep(pause)
        if not run.path.exists():
            return
        with contextlib.suppress(ValueError):  # a resumed run is still writing its settings
            run = read(run.path)


def main(argv):
    parser = argument_parser(__doc__)
    parser.add_argument("log", type=Path, metavar="LOG")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--tensorboard", metavar="DIR", help="folder for TensorBoard's event files")
    where.add_argument("--wandb", metavar="PROJECT", help="Weights & Biases project")
    options = parser.parse_args(argv)
    require(options.tensorboard or options.wandb, "the name of DIR or PROJECT is empty: give one")
    run = read(options.log)
    points = new_points(run)
    if options.tensorboard:
        with packages():
            from torch.utils.tensorboard import SummaryWriter

        # A folder of its own for each log, where a new call hides what an earlier one has sent.
        path = options.log.resolve()
        folder = Path(options.tensorboard, path.parent.name, path.stem)
        with SummaryWriter(folder, purge_step=0, flush_secs=1) as writer:
            text = "\n".join(f"    {name}={value!r}" for name, value in run.settings.items())
            writer.add_text("hyperparameters", text)
            for step, values in points:
                for name, value in values.items():
                    writer.add_scalar(name, value, step)
    else:
        with packages():
            import wandb

        names = dict(project=options.wandb, name=options.log.stem)
        with wandb.init(**names, config=run.settings) as tracked:
            for step, values in points:
                tracked.log(values, step=step)


if __name__ == "__main__":
    command(main)
