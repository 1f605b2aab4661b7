"""Load what train_gpt2.py has written: the weights of a run, and the encoding of its data.

The tools that use a trained model share this: sample.py, evaluate.py and export.py. A file of
weights is model.pt, best.pt or a checkpoint, state_step*.pt, in the folder of a run.
"""

import pickle
import sys
import textwrap
import zlib
from pathlib import Path

import torch
from runlog import ROOT, argument_parser, with_new_names

sys.path[:0] = [str(ROOT), str(ROOT / "data")]
import pack  # noqa: E402
from shards import read_manifest  # noqa: E402

from train_gpt2 import GPT, Hyperparameters, UserError, product_dtype  # noqa: E402


def parser_for(description):
    """Return an argument parser with the options of all tools that use a trained model."""
    parser = argument_parser(description)
    where = "a file of weights or a run's folder (default: the newest weights in logs)"
    parser.add_argument("--weights", default="", help=where)
    parser.add_argument("--encoding", default="", help="default: that of the training data")
    return parser


def find(path):
    """Return the file of weights that `path` names: a file, a run's folder, or "" for the newest.

    Raises UserError if there is none.
    """
    if not path:
        paths = [*Path("logs").glob("*/model.pt"), *Path("logs").glob("*/state_step*.pt")]
        if not paths:
            raise UserError("no weights in logs: train first (bash run.sh), or pass --weights")
        return max(paths, key=lambda path: path.stat().st_mtime)
    path = Path(path)
    if path.is_dir():
        return of_most_steps(path)
    if not path.is_file():
        raise UserError(f"{path} is not a file: give the weights of a run, logs/RUN/model.pt")
    return path


def of_most_steps(folder):
    """Return the weights in a run's folder that were trained for the most steps.

    model.pt is preferred to a checkpoint after the same step, and best.pt is the last resort.
    """
    steps = {}  # of each file
    final, best = folder / "model.pt", folder / "best.pt"
    if final.is_file():
        steps[final] = settings_of(read(final), final).num_iterations
    for path in folder.glob("state_step*[0-9].pt"):
        steps[path] = int(path.stem.removeprefix("state_step"))
    if best.is_file():
        steps[best] = -1
    if not steps:
        raise UserError(f"{folder} holds no weights: give a run's folder or a file")
    return max(steps, key=steps.get)  # on a tie, the first


def read(path):
    """Return the content of a file of weights, on the CPU. Raises UserError for any other file."""
    fault = f"{path} is damaged, or train_gpt2.py did not write it"
    # The file ends with the crc32 of the bytes before, so the crc32 of the whole is this constant.
    if zlib.crc32(Path(path).read_bytes()) != 0x2144DF1C:
        raise UserError(fault)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError):
        raise UserError(fault) from None


def settings_of(state, path):
    """Return the Hyperparameters in the content of a file of weights. Raises UserError."""
    known = Hyperparameters.__dataclass_fields__
    try:
        settings = with_new_names(state["hyperparameters"])
        return Hyperparameters(**{name: settings[name] for name in settings.keys() & known})
    except UserError as error:
        raise UserError(f"{path} holds settings that are not allowed: {error}") from None
    except (KeyError, TypeError, AttributeError, IndexError):
        raise UserError(f"{path} holds no settings of a run of train_gpt2.py") from None


def load(path, device="cpu", dtype=None):
    """Return (GPT in evaluation mode, its Hyperparameters, the content of the file).

    dtype: of matmuls; by default the one that training uses on this device. Raises UserError.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device=cuda, but PyTorch sees no GPU: pass --device=cpu")
    state = read(path)
    args = settings_of(state, path)
    try:
        with torch.device("meta"):  # without memory, as the settings may be of a huge model
            # A copy, because assign=True would also apply to the next use of this state dict.
            GPT(args).load_state_dict(dict(state["model"]), assign=True)
    except (RuntimeError, TypeError, KeyError, ValueError) as error:
        reason = textwrap.shorten(str(error), 300)
        fix = "use the train_gpt2.py of its run"
        raise UserError(f"{path} does not fit this train_gpt2.py: {fix} ({reason})") from None
    device = torch.device(device)
    gpt = GPT(args, dtype or product_dtype(args, device))
    gpt.load_state_dict(state["model"])
    return gpt.to(device).eval(), args, state


def encoding_of(args, name=""):
    """Return the encoding `name`, by default that of a run's data.

    Raises ValueError if the encoding is unknown, unavailable or has too many ids for the model.
    """
    if not name and args.vocab_size < 1024:
        name = "bytes"
    if not name:
        manifest = read_manifest(ROOT / Path(args.train_files).parent / "manifest.json")
        name = manifest.get("encoding", "gpt2")
        # The folder may have been packed again, as bytes, after this run.
        name = name.replace("bytes", "gpt2")
    encoding = pack.get_encoding(name)
    if encoding.n_vocab > args.vocab_size:
        raise UserError(
            f"the encoding {name} has {encoding.n_vocab} ids, but the model has "
            f"vocab_size={args.vocab_size}: pass the --encoding of its data"
        )
    return encoding
