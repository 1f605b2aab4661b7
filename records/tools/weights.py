"""Load a trained model: its weights, its settings, and the encoding of its data.

The tools sample.py, evaluate.py and export.py share this. A file of weights is model.pt, best.pt or
a checkpoint, state_step*.pt, in the folder of a run.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from runlog import ROOT, argument_parser

sys.path[:0] = [str(ROOT), str(ROOT / "data")]
import pack  # noqa: E402

import train_gpt2  # noqa: E402
from train_gpt2 import Hyperparameters, UserError, build_model  # noqa: E402


def parser_for(description):
    """Return an argument parser with the options of all tools that use a trained model."""
    parser = argument_parser(description)
    add = parser.add_argument
    add("--weights", default="", help="file or run's folder (default: newest weights in logs)")
    add("--encoding", default="", help="default: that of the training data")
    return parser


def find(path):
    """Return the file of weights that `path` names: a file, a run's folder, or "" for the newest.

    A folder stands for model.pt, which only a finished run has, else for its last checkpoint, else
    for best.pt. Raises UserError if there is no such file.
    """
    if not path:
        newest = max(Path("logs").glob("*/*.pt"), key=os.path.getmtime, default=None)
        if newest is None:
            raise UserError("no weights in logs: train first (bash run.sh), or pass --weights")
        return newest
    path = Path(path)
    checkpoints = reversed(train_gpt2.checkpoints_in(path))
    for file in [path, path / "model.pt", *checkpoints, path / "best.pt"]:
        if file.is_file():
            return file
    raise UserError(f"{path} holds no weights: give a file or folder such as logs/RUN")


def load(path, device="cpu", dtype=None):
    """Return (the model in evaluation mode, its Hyperparameters, the content of the file).

    device: "cpu", "cuda" or "auto". dtype: of matmuls; by default that of training. Raises
    UserError if the file or the device is not usable.
    """
    state = train_gpt2.read_pt(path)
    try:
        args = Hyperparameters(**state["hyperparameters"])
        gpt = build_model(args, dtype or getattr(torch, args.dtype))
        gpt.load_state_dict(state["model"])
    except (TypeError, RuntimeError) as error:  # an unknown setting, or other parameters
        reason = " ".join(str(error).split())
        raise UserError(f"{path} does not fit this train_gpt2.py ({reason:.200})") from None
    device = train_gpt2.choose_device(replace(args, device=device))
    return gpt.to(device).eval(), args, state


def encoding_of(state, args, name=""):
    """Return the encoding `name`, by default that of a run's data.

    state, args: the content and the Hyperparameters of a file of weights. Raises ValueError if the
    encoding is unknown, unavailable or has too many ids for the model.
    """
    if not name:
        # Data without a manifest, such as FineWeb's, do not tell.
        name = state["facts"]["encoding"] or ("bytes" if args.vocab_size < 1024 else "gpt2")
    encoding = pack.get_encoding(name)
    if encoding.n_vocab > args.vocab_size:
        raise UserError(
            f"the encoding {name} has {encoding.n_vocab} ids, but the model has "
            f"vocab_size={args.vocab_size}: pass the --encoding of its data"
        )
    return encoding
