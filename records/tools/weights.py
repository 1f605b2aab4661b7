"""Load what train_gpt2.py has written: the weights of a run, and the encoding of its data.

The tools that use a trained model share this: sample.py, evaluate.py and export.py. A file of
weights is model.pt, best.pt or a checkpoint, state_step*.pt, in the folder of a run.
"""

import os
import sys
import textwrap
from pathlib import Path

import torch
from runlog import ROOT, argument_parser, require

sys.path[:0] = [str(ROOT), str(ROOT / "data")]
import pack  # noqa: E402

from train_gpt2 import GPT, Hyperparameters, UserError, choose_dtype, read_pt  # noqa: E402


def parser_for(description):
    """Return an argument parser with the options of all tools that use a trained model."""
    parser = argument_parser(description)
    add = parser.add_argument
    add("--weights", default="", help="file or run's folder (default: newest weights in logs)")
    add("--encoding", default="", help="default: that of the training data")
    return parser


def find(path):
    """Return the file of weights that `path` names: a file, a run's folder, or "" for the newest.

    A folder stands for its file with the most training steps. Raises ValueError if there is
    no such file.
    """
    if not path:
        newest = max(Path("logs").glob("*/*.pt"), key=os.path.getmtime, default=None)
        require(newest, "no weights in logs: train first (bash run.sh), or pass --weights")
        return newest
    path = Path(path)
    if not path.is_dir():
        require(path.is_file(), f"{path} is not a file: give weights such as logs/RUN/model.pt")
        return path
    paths = [path / "model.pt", *path.glob("state_step*[0-9].pt"), path / "best.pt"]
    files = [path for path in paths if path.is_file()]
    require(files, f"{path} holds no weights: give a run's folder or a file")
    return max(files, key=steps_of)  # on a tie the first, so model.pt before a checkpoint


def steps_of(path):
    """Return the steps that a file of weights was trained for, or -1 for best.pt."""
    if path.name == "model.pt":
        return settings_of(read_pt(path), path).num_iterations
    return -1 if path.name == "best.pt" else int(path.stem.removeprefix("state_step"))


def settings_of(state, path):
    """Return the Hyperparameters in `state`, the content of a file of weights."""
    known = Hyperparameters.__dataclass_fields__
    try:
        settings = state["hyperparameters"]
        return Hyperparameters(**{name: settings[name] for name in settings.keys() & known})
    except Exception as error:  # a foreign file may hold anything
        raise UserError(f"{path} holds no valid settings of train_gpt2.py: {error}") from None


def load(path, device="cpu", dtype=None):
    """Return (GPT in evaluation mode, its Hyperparameters, the content of the file).

    dtype: of matmuls; by default as in training on this device. Raises ValueError if it fails.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device=cuda, but PyTorch sees no GPU: pass --device=cpu")
    state = read_pt(path)
    args = settings_of(state, path)
    try:
        with torch.device("meta"):  # allocates nothing, because the settings may be far too large
            # A copy, because PyTorch stores assign=True in the dict, which is loaded again below.
            GPT(args).load_state_dict(dict(state["model"]), assign=True)
    except (RuntimeError, TypeError, KeyError, ValueError) as error:
        message = f"{path} does not fit this train_gpt2.py: use the one that wrote it ({error})"
        raise UserError(textwrap.shorten(message, 400)) from None
    device = torch.device(device)
    gpt = GPT(args, dtype or choose_dtype(args, device))
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
