"""Load what train_gpt2.py has written: the weights of a run, and the encoding of its data.

The tools that use a trained model share this: sample.py, evaluate.py and export.py. A file of
weights is model.pt, best.pt or a checkpoint, state_step*.pt, in the folder of a run.
"""

import os
import sys
from pathlib import Path

import torch
from runlog import ROOT, argument_parser, require

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
    for best.pt. Raises ValueError if there is no such file.
    """
    if not path:
        newest = max(Path("logs").glob("*/*.pt"), key=os.path.getmtime, default=None)
        require(newest, "no weights in logs: train first (bash run.sh), or pass --weights")
        return newest
    path = Path(path)
    if not path.is_dir():
        require(path.is_file(), f"{path} is not a file: give weights such as logs/RUN/model.pt")
        return path
    paths = [path / "model.pt", *reversed(train_gpt2.checkpoints_in(path)), path / "best.pt"]
    files = [path for path in paths if path.is_file()]
    require(files, f"{path} holds no weights: give a run's folder or a file")
    return files[0]


def load(path, device="cpu", dtype=None):
    """Return (the model in evaluation mode, its Hyperparameters, the content of the file).

    dtype: of matmuls; by default as in training on this device. Raises ValueError if it fails.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device=cuda, but PyTorch sees no GPU: pass --device=cpu")
    state = train_gpt2.read_pt(path)
    with train_gpt2.reporting_malformed(path):
        known = state["hyperparameters"].keys() & Hyperparameters.__dataclass_fields__
        args = Hyperparameters(**{name: state["hyperparameters"][name] for name in known})
        require(isinstance(state["encoding"], str | None), "encoding is not a name")
        require(isinstance(state["step"], int), "step is not an integer")
        # A checkpoint has no val_loss.
        require(isinstance(state.get("val_loss", 0.0), float), "val_loss is not a number")
        with torch.device("meta"):  # allocates nothing, because the settings may be far too large
            # A copy, because PyTorch stores assign=True in the dict, which is loaded again below.
            build_model(args, torch.float32).load_state_dict(dict(state["model"]), assign=True)
    device = torch.device(device)
    gpt = build_model(args, dtype or train_gpt2.choose_dtype(args, device))
    gpt.load_state_dict(state["model"])
    return gpt.to(device).eval(), args, state


def encoding_of(state, args, name=""):
    """Return the encoding `name`, by default that of a run's data.

    state, args: the content and the Hyperparameters of a file of weights. Raises ValueError if the
    encoding is unknown, unavailable or has too many ids for the model.
    """
    if not name:
        # Data without a manifest, such as FineWeb's, do not tell.
        name = state["encoding"] or ("bytes" if args.vocab_size < 1024 else "gpt2")
    encoding = pack.get_encoding(name)
    require(
        encoding.n_vocab <= args.vocab_size,
        f"the encoding {name} has {encoding.n_vocab} ids, but the model has "
        f"vocab_size={args.vocab_size}: pass the --encoding of its data",
    )
    return encoding
