"""Load what train_gpt2.py has written: the weights of a run, and the encoding of its data.

The tools that use a trained model share this: sample.py, evaluate.py, export.py. A file of weights
is model.pt, which a run writes at its end, or one of its checkpoints, state_step*.pt.
"""

import pickle
import sys
import zlib
from pathlib import Path

import torch

HELP = "file of weights, or a run's folder: its weights of the most steps (default: the newest)"
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "data"), str(ROOT / "records" / "tools")]
import pack  # noqa: E402
from runlog import with_new_names  # noqa: E402

from train_gpt2 import GPT, Hyperparameters, UserError, product_dtype  # noqa: E402


def newest(log_dir="logs"):
    """Return the weights that were written last in a folder of logs. Raises UserError for none."""
    paths = [*Path(log_dir).glob("*/model.pt"), *Path(log_dir).glob("*/state_step*.pt")]
    if not paths:
        raise UserError(f"no weights in {log_dir}: train first (bash run.sh), or name a file")
    return max(paths, key=lambda path: path.stat().st_mtime)


def find(path, log_dir="logs"):
    """Return the file of weights that `path` names: a file, a run's folder, or "" for the newest.
    Raises UserError if there is none."""
    if not path:
        return newest(log_dir)
    path = Path(path)
    if path.is_dir():
        return of_most_steps(path)
    if not path.is_file():
        raise UserError(f"{path} is not a file: give the weights of a run, logs/RUN/model.pt")
    return path


def of_most_steps(folder):
    """Return the weights in a run's folder that were trained for the most steps.
    Of a checkpoint and model.pt after equally many steps, return model.pt, which has a val_loss.
    best.pt is returned if there is nothing else."""
    checkpoints = sorted(folder.glob("state_step*[0-9].pt"))  # the numbers are padded with zeros
    final = folder / "model.pt"
    best = folder / "best.pt"
    if not checkpoints and not final.is_file() and best.is_file():
        return best
    if not (checkpoints or final.is_file()):
        raise UserError(f"{folder} holds no weights: give a run's folder or a file")
    if not checkpoints:
        return final
    steps = int(checkpoints[-1].stem.removeprefix("state_step"))
    if final.is_file() and settings_of(read(final), final).num_iterations >= steps:
        return final
    return checkpoints[-1]


def read(path):
    """Return what a file of weights holds, on the CPU. Raises UserError for any other file."""
    fault = f"{path} is damaged, or no file that train_gpt2.py wrote"
    # bytes that end with the crc32 of those before always have this crc32
    if zlib.crc32(Path(path).read_bytes()) != 0x2144DF1C:
        raise UserError(fault)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError):
        raise UserError(fault) from None


def settings_of(state, path):
    """Return the Hyperparameters of what a file of weights holds.

    Raises UserError if there are none, or if this train_gpt2.py does not allow them.
    """
    known = Hyperparameters.__dataclass_fields__
    try:
        settings = with_new_names(state["hyperparameters"]).items()
        return Hyperparameters(**{name: value for name, value in settings if name in known})
    except (KeyError, TypeError, AttributeError, IndexError):
        raise UserError(f"{path} holds no settings of a run of train_gpt2.py") from None
    except UserError as error:
        raise UserError(f"{path} holds settings that are not allowed: {error}") from None


def check_shapes(state, args, path):
    """Raise UserError unless the file holds the weights of GPT(args), built here without memory."""
    try:
        with torch.device("meta"):
            expected = {name: value.shape for name, value in GPT(args).state_dict().items()}
    except RuntimeError as error:  # a size overflows
        raise UserError(f"{path} has settings that no model can have: {error}") from None
    found = {name: getattr(value, "shape", None) for name, value in state["model"].items()}
    for name in [*expected, *found]:
        if found.get(name) != expected.get(name):
            shapes = [shape and tuple(shape) for shape in (found.get(name), expected.get(name))]
            raise UserError(
                f"{path} is of another model than this train_gpt2.py's: {name} has the shape "
                f"{shapes[0]} instead of {shapes[1]}; use the train_gpt2.py of its run"
            )


def load(path, device="cpu", dtype=None):
    """Return (GPT in evaluation mode, its Hyperparameters, all that the file holds).

    dtype: of products; without it what training takes on this device. The hyperparameters that an
    older script saved get the names that train_gpt2.py gives them today.
    """
    state = read(path)
    args = settings_of(state, path)
    state["hyperparameters"] = with_new_names(state["hyperparameters"])
    check_shapes(state, args, path)
    device = torch.device(device)
    gpt = GPT(args, dtype or product_dtype(args, device))
    gpt.load_state_dict(state["model"])
    return gpt.to(device).eval(), args, state


def manifest_of(args):
    """Return the manifest that data/pack.py wrote beside a run's training data, a dict.

    Without a manifest it says nothing of the encoding and of the splits.
    """
    manifest = pack.read_manifest(ROOT / Path(args.train_files).parent / "manifest.json")
    # The folder may have been packed again, with another encoding, after this run.
    if manifest.get("vocab_size", 0) > args.vocab_size or (
        manifest.get("encoding") == "bytes" and args.vocab_size > 1024
    ):
        return {}
    return manifest


def encoding_of(args, name=""):
    """Return the encoding of a run's data: by name, by the data's manifest, or by vocab_size.
    Its mistakes are sentences."""
    guess = "bytes" if args.vocab_size == 257 else "gpt2"
    return pack.get_encoding(name or manifest_of(args).get("encoding") or guess)


def bytes_per_token(args, split="val"):
    """Return the bytes of text a token of a run's data, by its manifest; None if it has none."""
    part = manifest_of(args).get(split, {"tokens": 0})
    return part["bytes"] / part["tokens"] if part["tokens"] else None
