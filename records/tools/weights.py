"""Shared by the tools: find a script, and load the weights, the settings and the encoding of a run.

A file of weights is model.pt, best.pt or a checkpoint, state_step*.pt, in the folder of a run.
"""

import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from runlog import ROOT, argument_parser

sys.path[:0] = [str(ROOT), str(ROOT / "data")]
import pack  # noqa: E402

import train_gpt2  # noqa: E402
from train_gpt2 import UserError  # noqa: E402


# ---- Scripts -------------------------------------------------------------------------------------
def recipe_of(script):
    """Return the RECIPE of a script, given by its path relative to the folder of train_gpt2.py.

    The script is imported unless it already is. Raises UserError if there is none.
    """
    path, name = ROOT / script, Path(script).stem
    is_inside = not Path(script).is_absolute() and ".." not in Path(script).parts
    if not (is_inside and path.is_file() and path.suffix == ".py"):
        raise UserError(f"there is no script {script} in {ROOT}: put it there, or name another")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    if not hasattr(sys.modules[name], "RECIPE"):
        raise UserError(f"{path} defines no RECIPE, or another module has its name")
    return sys.modules[name].RECIPE


def recipe_and_settings(argv):
    """Return the RECIPE that a tool's arguments ask for, and the settings that follow.

    The first of argv may be `modern`, or the path of a script as for recipe_of.
    """
    if argv and not argv[0].startswith("-"):
        script = "records/modern/train_modern.py" if argv[0] == "modern" else argv[0]
        return recipe_of(script), argv[1:]
    return train_gpt2.RECIPE, argv


# ---- Weights -------------------------------------------------------------------------------------
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
    """Return (the model in evaluation mode, its settings, the content of the file).

    device: "cpu", "cuda" or "auto". dtype: of matmuls; by default that of training. Raises
    UserError if the file or the device is not usable.
    """
    state = train_gpt2.read_pt(path)
    try:
        recipe = recipe_of(state["script"])
        args = recipe.settings(**state["hyperparameters"])
        gpt = recipe.build_model(args, dtype or getattr(torch, args.dtype))
        gpt.load_state_dict(state["model"])
        if state["source"] != train_gpt2.digest(recipe.sources):
            warning = f"warning: {state['script']} has changed since it saved {path}"
            print(f"{warning}; this is the model as it is defined now", file=sys.stderr)
    except (TypeError, RuntimeError) as error:  # an unknown setting, or other parameters
        reason = " ".join(str(error).split())
        script = state["script"]
        raise UserError(f"{path} does not fit {script} as it is now ({reason:.200})") from None
    device = train_gpt2.choose_device(replace(args, device=device))
    return gpt.to(device).eval(), args, state


UNKNOWN_ENCODING = (
    "the encoding of the training data is unknown, because no manifest.json named it: pass "
    "--encoding=bytes, gpt2 or gpt2-N if it is one of these"
)


def known_encoding(pattern):
    """Return the name of the encoding of the shards matching a glob, or None if it is unknown."""
    train_gpt2.read_manifest(pattern)  # raises UserError if it is damaged or incomplete
    folder, files = os.path.split(pattern)
    return pack.encoding_beside(Path(folder), files)


def encoding_of(state, args, name=""):
    """Return the encoding `name`, by default that of a run's data; None if it is unknown.

    state, args: the content and the settings of a file of weights. Raises ValueError if the
    encoding does not exist, is unavailable or has too many ids for the model.
    """
    name = name or state["fixed"]["encoding"] or known_encoding(args.train_files)
    if name is None:
        return None
    encoding = pack.get_encoding(name)
    if encoding.n_vocab > args.vocab_size:
        raise UserError(
            f"the encoding {name} has {encoding.n_vocab} ids, but the model has "
            f"vocab_size={args.vocab_size}: pass the --encoding of its data"
        )
    return encoding
