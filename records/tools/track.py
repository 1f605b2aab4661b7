"""Send a training log to TensorBoard or Weights & Biases, also while the run is going on.

    bash run.sh track logs/RUN.txt --tensorboard DIR     # then: tensorboard --logdir DIR
    bash run.sh track logs/RUN.txt --wandb PROJECT       # WANDB_MODE=offline needs no account

It stops when the log contains the result, or at Ctrl-C. A step that a resumed run repeats is sent
only once. If the tool is started again, it sends the whole log again.
"""

import ast
import re
import sys
import time
from pathlib import Path

from runlog import POINT, argument_parser, command, require


def follow(path, pause=1.0):
    """Yield the lines of a log as they are written, up to the line with the result."""
    line = b""
    with open(path, "rb") as file:
        while not line.startswith(b"result "):
            line += file.readline()
            if line.endswith(b"\n"):
                yield line.decode(errors="replace").rstrip()
                line = line if line.startswith(b"result ") else b""
            else:  # the run has written nothing new, or half a line
                time.sleep(pause)
                if path.stat().st_size < file.tell():  # the log was overwritten
                    file.seek(0)
                    line = b""


def points_of(lines):
    """Yield (step, {name: value}) for the lines of a log; first (None, its hyperparameters)."""
    settings, latest = {}, {}
    for line in lines:
        if found := re.fullmatch(r"hyperparameter (\w+)=(.*)", line):
            settings[found[1]] = ast.literal_eval(found[2])
        elif found := POINT.match(line):
            step, kind = int(found["step"]), found["kind"]
            if not latest:
                yield None, settings
            if step <= latest.get(kind, -1):  # a resumed run repeats steps
                continue
            latest[kind] = step
            values = {f"{kind}_loss": float(found["loss"])}
            values["train_seconds"] = int(found["ms"]) / 1000
            if found["lr"]:
                values["learning_rate"] = float(found["lr"])
            yield step, values


def to_tensorboard(points, folder):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder, purge_step=0) as writer:
        for step, values in points:
            if step is None:
                text = "\n".join(f"    {name}={value!r}" for name, value in values.items())
                writer.add_text("hyperparameters", text)
                continue
            for name, value in values.items():
                writer.add_scalar(name, value, step)
            writer.flush()


def to_wandb(points, project, name):
    import wandb

    with wandb.init(project=project, name=name) as run:
        for step, values in points:
            if step is None:
                run.config.update(values)
            else:
                run.log(values, step=step)


def main(argv):
    parser = argument_parser(__doc__)
    parser.add_argument("log", type=Path, metavar="LOG")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--tensorboard", metavar="DIR", help="folder for TensorBoard's event files")
    where.add_argument("--wandb", metavar="PROJECT", help="project of Weights & Biases")
    options = parser.parse_args(argv)
    require(options.log.is_file(), f"{options.log} is not a file: name a log, logs/RUN.txt")
    points = points_of(follow(options.log))
    try:
        if options.tensorboard:
            to_tensorboard(points, options.tensorboard)
        else:
            to_wandb(points, options.wandb, options.log.stem)
    except ImportError as error:
        sys.exit(f"track.py: {error.name} is not installed: pip install {error.name}")


if __name__ == "__main__":
    command(main)
