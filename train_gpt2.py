"""Train GPT-2 124M to a validation loss of 3.28 on FineWeb, in a single file.

    torchrun --standalone --nproc_per_node=8 train_gpt2.py      # 8 GPUs
    python train_gpt2.py                                        # one GPU, or a CPU
    python train_gpt2.py --help                                 # all settings and presets

The defaults are those of record 7 of the public NanoGPT speedrun (October 2024), whose log reports
a validation loss of 3.2755 after 12.0 minutes on 8xH100 (one run). This file has not been run on a
GPU yet. It requires Python 3.10+, torch 2.5+ and numpy.

Shapes: B sequences of T tokens, C = n_embd, V = vocab_size, H = n_head, D = C // H.
"""

import argparse
import bisect
import contextlib
import dataclasses
import fcntl
import functools
import glob
import hashlib
import json
import math
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
import zlib
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Literal, NamedTuple, get_args, get_origin

if __name__ == "__main__":
    # Until cli() handles signals, Ctrl-C ends the process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Waiting threads of libgomp spin before they sleep. By default, they spin so long that training
    # and other programs slow each other down. libgomp reads this when torch is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# The log of a run contains the source of this file. It is read before the slow imports, so that the
# log shows the running code even if the file is edited right after launch.
SOURCE = Path(__file__).read_text(encoding="utf-8", errors="replace")

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils._pytree import tree_leaves

try:
    from tqdm import tqdm
except ImportError:  # without tqdm, the terminal shows lines of steps instead of a progress bar
    tqdm = None

# On a CPU, the first call of these functions may be inaccurate if several threads share it
# (https://github.com/pytorch/pytorch/issues/188792). So each is first called on a single number.
for function in torch.cos, torch.sin, torch.sqrt:
    function(torch.ones(1))


# ---- Settings -----------------------------------------------------------------------------------
BLOCK = 128  # tokens; the modern model's attention masks are made of blocks of this size


class UserError(ValueError):
    """An error that the user can fix. It is reported in one line, without a traceback."""


def require(condition, message):
    """Raise UserError with this message unless the condition holds."""
    if not condition:
        raise UserError(message)


def setting(group, default, help, low=0, high=2**31 - 1):
    """Return a field of Hyperparameters. group: its title in --help. low, high: its limits."""
    metadata = dict(group=group, help=help, low=low, high=high)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """All settings of a run. Edit the defaults here, or pass --name=value on the command line.

    A resumed run may increase num_iterations, but not change val_tokens or another setting of the
    groups "model", "modern model" and "training". A new setting needs only a type and a default:
    `my_setting: float = 1.0`. Raises UserError if a value is not allowed.
    """

    # fmt: off
    vocab_size: int = setting(
        "model", 50304, "token ids (GPT-2's 50257, rounded up); set by the manifest of packed data",
        low=1, high=2**16)
    n_layer: int = setting("model", 12, "transformer blocks", low=1, high=1000)
    n_head: int = setting("model", 6, "attention heads", low=1)
    n_embd: int = setting("model", 768, "channels", low=1)
    model: Literal["gpt2", "modern"] = setting(
        "model", "gpt2", "gpt2 is record 7's; modern adds what later records found, and n-grams")

    value_embeddings: int = setting(
        "modern model", 0, "N embedding tables, added to the attention values of the first N "
        "layers and, in the same order, of the last N")
    window: int = setting(
        "modern model", 0, "tokens that a token attends to within its document, at the end of "
        "training; grows from 128; some layers use half of it; 0: the whole sequence")
    document_token: int = setting(
        "modern model", 50256, "token that starts a document (256 in bytes); only used by a window")
    no_attention: int = setting(
        "modern model", -1, "index of a layer that has no attention, from 0; -1: none", low=-1)
    key_shift: int = setting(
        "modern model", 0, "positions to shift keys right; 1 lets a layer act as an induction head")
    max_ngram: int = setting(
        "modern model", 0, "longest n-gram that has an embedding, at least 2; 0: none", high=32)
    ngram_rows: int = setting(
        "modern model", 2**18, "rows of the n-gram table; n-grams with equal hashes share a row",
        low=1)

    seed: int = setting("training", 1337, "seed of the initial weights and of --shuffle")
    dtype: Literal["auto", "bfloat16", "float32"] = setting(
        "training", "auto", "dtype of matmuls, and of the modern model's token and value "
        "embeddings; auto picks bfloat16 if the device supports it natively")
    batch_size: int = setting("training", 512, "sequences per step, over all processes", low=1)
    sequence_length: int = setting("training", 1024, "tokens per sequence", low=1, high=2**20)
    num_iterations: int = setting("training", 5100, "optimizer steps", low=1)
    learning_rate: float = setting(
        "training", 0.0036, "rate of the head, and of gpt2's embedding, which is tied to it")
    embedding_learning_rate: float = setting(
        "training", 0.6, "rate of the modern model's token and value embeddings")
    scalar_learning_rate: float = setting(
        "training", 0.04, "rate of the modern model's scalars: stream, skip and value weights")
    ngram_learning_rate: float = setting("training", 0.03, "rate of the n-gram table")
    muon_learning_rate: float = setting(
        "training", 0.00036, "rate of Muon, which trains the matrices of the blocks")
    muon_momentum: float = setting("training", 0.95, "momentum of Muon", high=0.9999)
    muon_momentum_warmup: int = setting(
        "training", 0, "initial steps in which Muon's momentum grows linearly from 0.85")
    warmdown_iters: int = setting(
        "training", 1450, "final steps over which the learning rates decay linearly")
    final_lr: float = setting(
        "training", 0.0, "final learning rates, as a fraction of the initial ones", high=1)
    ngram_dropout: float = setting(
        "training", 0.0, "probability of dropping an n-gram; reduces overfitting", high=0.99)
    shuffle: bool = setting(
        "training", False, "re-split the tokens at a random offset and shuffle, in each epoch")

    train_files: str = setting(
        "data", "data/fineweb10B/fineweb_train_*.bin", "glob of the training shards")
    val_files: str = setting(
        "data", "data/fineweb10B/fineweb_val_*.bin", "glob of the validation shards")
    allow_repeat: bool = setting("data", False, "start over when the training tokens run out")

    val_loss_every: int = setting(
        "validation", 125, "steps between validations; 0 validates only after the last step")
    val_tokens: int = setting(
        "validation", 10485760, "tokens to validate on, from the start of val_files; 0 uses up to "
        "2**20, but at most what takes an eighth of the training time")
    target_val_loss: float = setting(
        "validation", 3.28, "printed next to the result unless 0; has no other effect")

    run_id: str = setting("checkpoints", "", "name of the log and the folder; default: the time")
    log_dir: str = setting("checkpoints", "logs", "folder for logs and checkpoints")
    save_every: int = setting("checkpoints", 0, "steps between checkpoints; 0: at a stop only")
    keep_checkpoints: int = setting(
        "checkpoints", 2, "recent checkpoints to keep; after the run one fewer, at least 1", low=1)
    resume: str = setting(
        "checkpoints", "", "auto continues run_id; a path continues that checkpoint as a new run")
    init: str = setting("checkpoints", "", "file with the initial weights, such as model.pt")

    device: Literal["auto", "cuda", "cpu"] = setting(
        "machine", "auto", "auto picks cuda if PyTorch sees a GPU")
    device_batch_size: int = setting(
        "machine", 64, "maximum sequences per forward pass; lower it to save memory", low=1)
    compile: bool = setting(
        "machine", True, "use torch.compile; False starts sooner but trains more slowly")
    print_every: float = setting(
        "machine", 1.0, "minimum seconds between printed steps without a progress bar; 0: all")
    comm_timeout: int = setting(
        "machine", 600, "seconds that a rank waits for the others before the run fails", low=1)
    # fmt: on

    def __post_init__(self):
        for field in dataclasses.fields(self):
            check_setting(field, getattr(self, field.name))
        pair = 2 * self.n_head
        divides = self.n_embd % pair == 0  # each head rotates pairs of channels
        require(divides, f"n_embd={self.n_embd} must be a multiple of 2 * n_head = {pair}")
        shift, T = self.key_shift, self.sequence_length
        require(shift < T, f"key_shift={shift} must be less than sequence_length={T}")
        self.check_modern_settings()
        is_name = re.fullmatch(r"([\w-][\w.-]*)?", self.run_id)
        require(is_name, f"run_id={self.run_id!r} may contain only letters, digits and '-_.'")
        if self.resume == "auto":
            require(self.run_id, "--resume=auto needs --run_id to know which run to resume")

    def check_modern_settings(self):
        """Raise UserError unless the settings of the modern model fit each other and the model."""
        modern_only = [*settings_in("modern model"), "ngram_dropout"]
        defaults = vars(Hyperparameters)
        extras = [name for name in modern_only if getattr(self, name) != defaults[name]]
        if self.model != "modern":
            require(not extras, f"{', '.join(extras)} can only be set with --model=modern")
        tables, pairs = self.value_embeddings, self.n_layer // 2
        fits = tables <= pairs
        require(fits, f"value_embeddings={tables} must be at most n_layer // 2 = {pairs}")
        layer, layers = self.no_attention, self.n_layer
        require(layer < layers, f"no_attention={layer} must be less than n_layer={layers}")
        if self.window:
            T, token, vocab_size = self.sequence_length, self.document_token, self.vocab_size
            divides = T % BLOCK == 0
            require(divides, f"sequence_length={T} must be a multiple of {BLOCK} with a window")
            known = token < vocab_size
            fix = "pass --document_token=256 if the data are bytes"
            require(known, f"document_token={token} must be less than {vocab_size=}: {fix}")


def check_setting(field, value):
    """Raise UserError unless `value` is allowed for a field of Hyperparameters."""
    name, kind = field.name, field.type
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        require(value in choices, f"{name}={value!r} must be one of {', '.join(choices)}")
        return
    supported = kind in (bool, int, float, str)
    require(supported, f"{name} has the type {kind}: use bool, int, float, str or Literal")
    matches = isinstance(value, (int, float) if kind is float else kind)
    require(matches, f"{name}={value!r} must be of type {kind.__name__}")
    if kind in (int, float):
        low = field.metadata.get("low", -math.inf)
        high = field.metadata.get("high", math.inf)
        require(low <= value <= high, f"{name}={value!r} must be a number between {low} and {high}")


def group_of(field):
    """Return the group of a setting; one without setting() counts as "training"."""
    return field.metadata.get("group", "training")


def settings_in(*groups):
    """Return the names of the settings in some groups."""
    return [f.name for f in dataclasses.fields(Hyperparameters) if group_of(f) in groups]


# --preset=NAME replaces defaults; settings on the command line override the preset.
PRESETS = {
    "record7": ("the defaults: GPT-2 124M on FineWeb, for eight 80 GB GPUs", {}),
    "24gb": ("the same run on one 24 GB GPU", dict(device_batch_size=32)),
    "record21": (
        "record 21 (2.93 minutes on 8xH100 with FP8), here without FP8; not run yet",
        dict(
            model="modern", value_embeddings=3, window=1728, no_attention=7,
            batch_size=8, sequence_length=49152, device_batch_size=1,
            num_iterations=1770, warmdown_iters=708, final_lr=0.1,
            learning_rate=0.008, embedding_learning_rate=0.6, scalar_learning_rate=0.04,
            muon_learning_rate=0.05 / 768**0.5, muon_momentum_warmup=300,
            val_tokens=213 * 49152,
        ),
    ),
    "cpu": (
        "the CPU record: seconds of training on 2 cores; `bash run.sh` prepares its data",
        dict(
            device="cpu",
            train_files="data/torch_sources/train_*.bin",
            val_files="data/torch_sources/val_*.bin",
            shuffle=True,
            vocab_size=257, n_layer=2, n_head=1, n_embd=128,
            model="modern", value_embeddings=1, max_ngram=6, key_shift=1,
            batch_size=16, sequence_length=256,
            num_iterations=64, warmdown_iters=48, final_lr=0.1,
            learning_rate=0.02, embedding_learning_rate=0.3, ngram_learning_rate=0.3,
            muon_learning_rate=0.004,
            val_loss_every=32, val_tokens=420864,  # 1,644 sequences
            target_val_loss=1.32,
        ),
    ),
    "text": (
        "for your own text, packed into data/mine; 11 minutes of training on 2 slow CPU cores",
        dict(
            train_files="data/mine/train_*.bin",
            val_files="data/mine/val_*.bin",
            allow_repeat=True, shuffle=True,
            vocab_size=257, n_layer=4, n_head=2, n_embd=128,
            model="modern", value_embeddings=1, key_shift=1,
            max_ngram=6, ngram_rows=2**18, ngram_dropout=0.6,
            batch_size=16, sequence_length=256,
            num_iterations=1040, warmdown_iters=840, muon_momentum_warmup=150,
            learning_rate=0.004, embedding_learning_rate=0.1, ngram_learning_rate=0.04,
            scalar_learning_rate=0.02, muon_learning_rate=0.0015,
            val_loss_every=260, val_tokens=0, target_val_loss=0.0, save_every=260,
        ),
    ),
}  # fmt: skip


def parse_args(argv):
    """Return the Hyperparameters specified by arguments such as --n_layer=6.

    Raises UserError for an unknown name or a value that is not allowed.
    """
    defaults = vars(Hyperparameters())
    given = vars(build_parser(defaults).parse_args(argv))
    preset_name = given.pop("preset")
    preset = PRESETS[preset_name][1]
    unknown = preset.keys() - defaults.keys()
    require(not unknown, f"the preset {preset_name} sets {unknown}, which are not settings")
    settings = defaults | preset | given
    if "vocab_size" not in given:
        manifest = read_manifest(settings["train_files"])
        size = manifest.get("vocab_size", settings["vocab_size"])
        if size >= 1024:  # a vocabulary of bytes stays as it is
            size = (size + 127) // 128 * 128  # rounded up, for speed
        settings["vocab_size"] = size
    if "val_files" in given and "target_val_loss" not in given:
        settings["target_val_loss"] = 0.0  # the preset's target applies only to its own data
    return Hyperparameters(**settings)


def build_parser(defaults):
    """Return a parser whose result holds only the settings that are given, and the preset."""

    def refuse(message):
        raise UserError(f"{message}. --help lists all settings")

    presets = "\n".join(f"  {name:<12}{text}" for name, (text, _) in PRESETS.items())
    parser = argparse.ArgumentParser(
        usage="train_gpt2.py [--preset=NAME] [--name=value ...]",
        description=__doc__ + "\nEvery setting is listed with its default.",
        epilog=f"presets (--preset=NAME), which individual settings override:\n{presets}",
        formatter_class=functools.partial(
            argparse.RawDescriptionHelpFormatter, width=100, max_help_position=30
        ),
        argument_default=argparse.SUPPRESS,  # leaves out settings that are not given
        allow_abbrev=False,
    )
    parser.error = refuse
    parser.add_argument("--preset", choices=PRESETS, default="record7", help=argparse.SUPPRESS)
    converters = {bool: boolean, int: int, float: float}
    groups = {}
    for field in dataclasses.fields(Hyperparameters):
        title = group_of(field)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        choices = get_args(field.type)  # the values of a Literal
        help = field.metadata.get("help", "") + (f" ({', '.join(choices)})" if choices else "")
        groups[title].add_argument(
            f"--{field.name}",
            type=converters.get(field.type, str),
            choices=choices or None,
            metavar=str(defaults[field.name]) or "''",  # --help shows the default here
            help=help.replace("%", "%%"),
        )
    return parser


def boolean(text):
    """Parse "true" or "false", case-insensitively. Raises ValueError for anything else."""
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def read_manifest(files):
    """Return the manifest that data/pack.py wrote beside its shards, or {} for other shards.

    It holds the vocab_size and the name of the encoding. files: glob of the shards.
    """
    path = Path(files).parent / "manifest.json"
    if not path.is_file():
        return {}
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        valid = isinstance(manifest.get("vocab_size", 1), int)
    except (OSError, ValueError, AttributeError, RecursionError):
        valid = False
    require(valid, f"{path} is damaged: repack the data, or remove this file")
    return manifest


# ---- Ranks: the processes that torchrun starts, one per GPU, or a single process ----------------
def join_processes(args):
    """Join the process group of torchrun, if there is one; return (rank, world_size, device).

    Raises UserError if the environment or the device is unusable.
    """
    has_launcher = "RANK" in os.environ
    alone = number_in_environment("SLURM_STEP_NUM_TASKS", 1) == 1
    fix = "start them with the Slurm file in the README"
    require(has_launcher or alone, f"srun started several tasks, but RANK is not set: {fix}")
    device = choose_device(args)
    gpu = device if device.type == "cuda" else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    if has_launcher and not dist.is_initialized():
        timeout = timedelta(seconds=args.comm_timeout)
        try:
            store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        except (ValueError, RuntimeError) as error:  # no MASTER_ADDR, or nothing answers there
            raise UserError(f"cannot join the processes of torchrun ({error})") from None
        # After a restart by torchrun, the store still holds the keys of the earlier attempts.
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        backend = "cpu:gloo,cuda:nccl" if gpu is not None else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=gpu
        )
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size(), device
    return 0, 1, device


def number_in_environment(name, default):
    """Return an environment variable as an int, or default if it is not set."""
    text = os.environ.get(name, str(default))
    require(text.isdecimal(), f"the environment variable {name}={text} must be a number: unset it")
    return int(text)


def leave_processes():
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
        # gloo's threads outlive the group. Let them release the tensors of the last collective, or
        # they may abort the process when the interpreter exits (seen with torch 2.13).
        time.sleep(0.2)


def choose_device(args):
    """Return the torch.device of this process. Raises UserError if args.device is not usable."""
    gpus = torch.cuda.device_count()
    if args.device == "cpu" or (args.device == "auto" and gpus == 0):
        return torch.device("cpu")
    processes = number_in_environment("LOCAL_WORLD_SIZE", 1)
    usable = processes <= gpus and torch.cuda.is_available()
    fix = "start fewer processes, check the driver, or pass --device=cpu"
    require(usable, f"PyTorch cannot give each of {processes} processes one of {gpus} GPUs: {fix}")
    return torch.device("cuda", number_in_environment("LOCAL_RANK", 0))


def sum_over_ranks(tensor):
    """Collective: sum a tensor over all ranks in place and return it."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def all_gather_objects(value):
    """Collective: return the values of all ranks, in rank order."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def agreement():
    """Collective: run a block on all ranks, and raise UserError on all unless they agree.

    The block fills the dict that this yields with facts that must be equal on all ranks. If it
    raises UserError or OSError on one rank, all ranks raise UserError with that message. The block
    must not call a collective.
    """
    facts = {}
    failure = ""
    try:
        yield facts
    except (UserError, OSError) as error:
        failure = one_line(error)
    reports = all_gather_objects((facts, failure))
    failures = [failure for _, failure in reports]
    for rank, failure in enumerate(failures):
        where = "" if all(failures) else f"rank {rank}: "  # only if some ranks succeeded
        require(not failure, f"{where}{failure}")
    first_facts, _ = reports[0]
    fix = "start all of them with the same settings, source, versions, data and log_dir"
    for rank, (rank_facts, _) in enumerate(reports):
        for name, value in rank_facts.items():
            values = f"{first_facts.get(name)} on rank 0, {value} on rank {rank}"
            equal = value == first_facts.get(name)
            require(equal, f"the ranks differ in {name} ({values}): {fix}")


def one_line(error):
    """Return the message of an error on one line."""
    if isinstance(error, OSError) and error.filename:
        return f"cannot use {error.filename}: {error.strerror}"
    return " ".join(str(error).split())


class StopTraining(Exception):
    """Raised on all ranks when training must stop. Its text is the reason."""


class StopRequest:
    """Why training has to stop, if it has to. The ranks stop together, at the next check."""

    def __init__(self):
        self.reason = ""
        self.signal_time = None  # when the first signal arrived
        self.parent = os.getppid()

    def catch_signals(self):
        """Handle SIGTERM, SIGINT, SIGUSR1 and SIGHUP unless ignored already, e.g. by nohup."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.on_signal)

    def on_signal(self, number, frame):
        """Request a stop. A second signal ends the process at once.

        Signals within a second count as one, because Ctrl-C may arrive twice: from the terminal,
        and from torchrun or run.sh.
        """
        if self.signal_time is None:
            self.signal_time = time.monotonic()
            self.reason = self.reason or "a signal"
            with contextlib.suppress(OSError):  # the terminal may be closed
                os.write(2, b"saving a checkpoint; press Ctrl-C again to exit at once\n")
        elif time.monotonic() - self.signal_time > 1:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def check(self):
        """Collective: raise StopTraining on all ranks if one of them has a reason to stop."""
        if dist.is_initialized() and os.getppid() != self.parent:
            self.reason = self.reason or "the launcher was killed"
        must_stop = sum_over_ranks(torch.tensor(int(self.reason != "")))
        if must_stop > 0:
            reasons = all_gather_objects(self.reason)
            raise StopTraining(", ".join(sorted({reason for reason in reasons if reason})))


# ---- Model: GPT-2 with rotary positions, RMSNorm, QK-norm, ReLU^2 and zero-initialized projections
def norm(x):
    """RMSNorm over the last dimension, without a gain."""
    return F.rms_norm(x, (x.size(-1),), eps=2**-23)  # float32's epsilon, even if x is bfloat16


class CastedLinear(nn.Linear):
    """A linear layer that keeps its weight in float32 and multiplies in the dtype of x."""

    def forward(self, x):
        return F.linear(x, self.weight.type_as(x))


class Rotary(nn.Module):
    """Rotary position embedding: rotates each pair of channels (i, i + D/2) by a position's angle.

    frequencies: (D/2,), in radians per position; pairs with frequency 0 are not rotated. Source:
    https://arxiv.org/abs/2104.09864. The paper's angles have the opposite sign: equivalent.
    """

    def __init__(self, frequencies, sequence_length):
        super().__init__()
        angles = torch.outer(torch.arange(sequence_length).float(), frequencies)  # (T, D/2)
        cos_sin = torch.stack([angles.cos(), angles.sin()])
        self.register_buffer("cos_sin", cos_sin, persistent=False)  # (2, T, D/2)

    def forward(self, x):  # (B, T, H, D)
        cos, sin = self.cos_sin[:, : x.size(1), None]  # (T, 1, D/2)
        x1, x2 = x.chunk(2, dim=-1)
        y1 = x1 * cos + x2 * sin
        y2 = x2 * cos - x1 * sin
        return torch.cat([y1, y2], dim=-1).type_as(x)


class CausalSelfAttention(nn.Module):
    def __init__(self, args):
        super().__init__()
        C = args.n_embd
        D = C // args.n_head
        self.n_head = args.n_head
        # Separate matrices, so that Muon orthogonalizes each one.
        self.c_q = CastedLinear(C, C, bias=False)
        self.c_k = CastedLinear(C, C, bias=False)
        self.c_v = CastedLinear(C, C, bias=False)
        self.c_proj = CastedLinear(C, C, bias=False)
        nn.init.zeros_(self.c_proj.weight)  # every block starts as the identity
        self.rotary = Rotary(10000.0 ** -(torch.arange(0, D, 2).float() / D), args.sequence_length)

    def split_heads(self, x):  # (B, T, C) to (B, T, H, D)
        return x.unflatten(-1, (self.n_head, -1))

    def forward(self, x):  # (B, T, C)
        q = norm(self.split_heads(self.c_q(x)))
        k = norm(self.split_heads(self.c_k(x)))
        v = self.split_heads(self.c_v(x))
        # Attention takes (B, H, T, D), and its result has the memory layout of q. Transposing after
        # the rotation avoids the copy that flatten would otherwise make on GPUs.
        q = self.rotary(q).transpose(1, 2)
        k = self.rotary(k).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, args):
        super().__init__()
        C = args.n_embd
        self.c_fc = CastedLinear(C, 4 * C, bias=False)
        self.c_proj = CastedLinear(4 * C, C, bias=False)
        nn.init.zeros_(self.c_proj.weight)

    def forward(self, x):  # (B, T, C)
        return self.c_proj(F.relu(self.c_fc(x)).square())  # https://arxiv.org/abs/2109.08668


class Block(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.attn = CausalSelfAttention(args)
        self.mlp = MLP(args)

    def forward(self, x):  # (B, T, C)
        x = x + self.attn(norm(x))
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """GPT-2 as in record 7, with tied embedding and output head.

    Weights are float32; activations and matmuls have the given dtype.
    """

    def __init__(self, args, dtype=torch.float32):
        super().__init__()
        self.dtype = dtype
        self.wte = nn.Embedding(args.vocab_size, args.n_embd)
        self.h = nn.ModuleList(Block(args) for _ in range(args.n_layer))
        self.lm_head = CastedLinear(args.n_embd, args.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight  # tied, with nn.Linear's initialization

    def forward(self, inputs, targets=None):
        """Return the mean cross-entropy (float32, in nats), or float32 logits of shape (B, T, V).

        inputs: (B, T) int64, T at most sequence_length. targets: the same shape; entries of -1
        are ignored. Without targets, the logits are returned.
        """
        x = self.wte(inputs).to(self.dtype)  # (B, T, C)
        for block in self.h:
            x = block(x)
        return loss_or_logits(norm(x), self.lm_head.weight, targets)


def loss_or_logits(x, weight, targets=None, softcap=0.0):
    """Return the mean cross-entropy of targets, (B, T), or without targets the logits, (B, T, V).

    x: (B, T, C). weight: (V, C), of the output head. softcap: see compute_logits.
    """
    if targets is None:
        return compute_logits(x, weight.type_as(x), softcap)
    x, targets = x.flatten(0, 1), targets.flatten()
    needs_grad = torch.is_grad_enabled()  # inside apply, grad mode is always off
    return ChunkedCrossEntropy.apply(x, weight, targets, softcap, needs_grad)


def compute_logits(x, weight, softcap):
    """Return float32 logits (..., V) of hidden states x (..., C), for training and inference.

    softcap: s bounds the logits z to (-s, s) by s * tanh(z / s); 0 leaves them as they are.
    """
    logits = F.linear(x, weight).float()
    if softcap:
        # The tanh is written with a sigmoid, because inductor fuses it better.
        logits = 2 * softcap * (2 * logits / softcap).sigmoid() - softcap
    return logits


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy, computed one chunk of tokens at a time, together with its gradients.

    The gradients are computed in forward, while a chunk's logits are in memory; backward only
    scales them. A large batch is split, because the logits of 64 x 1024 tokens of GPT-2 would take
    13.2 GB. Targets of -1 are ignored.
    """

    @staticmethod
    def chunk_loss(x, weight, targets, softcap, count):
        logits = compute_logits(x, weight, softcap)
        return F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum") / count

    @staticmethod
    def forward(ctx, x, weight, targets, softcap, needs_grad):  # (N, C), (V, C), (N,)
        # Small chunks are slow, so each holds at least as many logits as 512 GPT-2 tokens.
        min_chunk_size = 512 * 50304 // len(weight)
        max_chunks = 2 if x.is_cuda else 8  # an estimate for GPUs, not measured
        chunks = min(max_chunks, max(1, len(x) // min_chunk_size))
        count = (targets != -1).sum().clamp(min=1)
        cast_weight = weight.type_as(x)
        chunk_loss = ChunkedCrossEntropy.chunk_loss
        grad_and_value = torch.func.grad_and_value(chunk_loss, argnums=(0, 1))
        loss = grad_weight = 0.0
        grad_x = []
        for x_i, targets_i in zip(x.chunk(chunks), targets.chunk(chunks)):
            if needs_grad:
                grads, loss_i = grad_and_value(x_i, cast_weight, targets_i, softcap, count)
                grad_x.append(grads[0])
                grad_weight = grad_weight + grads[1].float()
            else:
                loss_i = chunk_loss(x_i, cast_weight, targets_i, softcap, count)
            loss = loss + loss_i
        if needs_grad:
            ctx.save_for_backward(torch.cat(grad_x), grad_weight)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * grad_loss, grad_weight * grad_loss, None, None, None


# ---- The modern model: what records 8 to 21 added to record 7; n-grams and key shift are our own
class ModernAttention(CausalSelfAttention):
    """Attention with rotary embedding on half of the channels, value embeddings and key shift."""

    def __init__(self, args):
        super().__init__(args)
        D = args.n_embd // args.n_head
        frequencies = 1024.0 ** -torch.linspace(0, 1, D // 4)
        frequencies = F.pad(frequencies, (0, D // 2 - D // 4))  # the others carry no position
        self.rotary = Rotary(frequencies, args.sequence_length)
        self.key_shift = args.key_shift
        self.value_weights = nn.Parameter(torch.tensor([0.5, 0.5]))
        for layer in self.c_q, self.c_k, self.c_v:
            init_uniform(layer)

    def forward(self, x, value, mask):  # x and value: (B, T, C); value and mask may be None
        q = norm(self.split_heads(self.c_q(x)))
        k = norm(self.split_heads(self.c_k(x)))
        # Scaling the weight is cheaper than scaling the values.
        weight = self.value_weights[0] * self.c_v.weight
        v = self.split_heads(F.linear(x, weight.type_as(x)))
        if value is not None:
            v = v + self.value_weights[1] * self.split_heads(value)
        # Shift keys key_shift positions to the right before the rotary embedding, so that they are
        # rotated for their new positions. Zeros fill the gap.
        k = F.pad(k, (0, 0, 0, 0, self.key_shift, 0))[:, : k.size(1)]
        q = self.rotary(q).transpose(1, 2)
        k = self.rotary(k).transpose(1, 2)
        y = attend(q, k, v.transpose(1, 2), mask)
        return self.c_proj(y.transpose(1, 2).flatten(2))


def init_uniform(layer):
    """Fill a linear layer with uniform values of standard deviation 0.5 / sqrt(columns)."""
    bound = (3 * 0.5**2 / layer.in_features) ** 0.5
    nn.init.uniform_(layer.weight, -bound, bound)


def attend(q, k, v, mask, scale=0.12):
    """Return attention (B, H, T, D) of queries to keys, all (B, H, T, D).

    mask: None to attend to the whole sequence, or a result of attention_mask.
    """
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    if isinstance(mask, torch.Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return flex_attention(q, k, v, block_mask=mask, scale=scale)


def attention_mask(documents, window):
    """Return a mask: each token sees itself and the earlier tokens of its document in a window.

    documents: (B, T), the number of each token's document, ascending. window: scalar tensor; a
    token sees its own block of BLOCK tokens and the window - 1 blocks before it. Returns a
    BlockMask on a GPU, if T is a multiple of BLOCK, and otherwise a bool tensor (B, 1, T, T).
    """

    def visible(b, h, query, key):
        near = query // BLOCK < key // BLOCK + window
        return (key <= query) & near & (documents[b, query] == documents[b, key])

    B, T = documents.shape
    device = documents.device
    if device.type == "cpu" or T % BLOCK != 0:
        sequence = torch.arange(B, device=device)[:, None, None]
        position = torch.arange(T, device=device)
        return visible(sequence, 0, position[:, None], position)[:, None]
    block = torch.arange(T // BLOCK, device=device)
    distance = block[:, None] - block
    first_document, last_document = documents[:, ::BLOCK], documents[:, BLOCK - 1 :: BLOCK]
    shared = first_document[:, :, None] <= last_document[:, None]  # (B, queries, keys)
    seen = shared & (distance >= 0) & (distance < window)
    counts = seen.sum(-1, dtype=torch.int32)
    indices = seen.int().argsort(dim=-1, descending=True, stable=True).int()  # seen ones first
    return BlockMask.from_kv_blocks(
        counts[:, None], indices[:, None], BLOCK_SIZE=BLOCK, mask_mod=visible
    )


class ModernBlock(nn.Module):
    def __init__(self, args, layer):
        super().__init__()
        self.attn = ModernAttention(args) if layer != args.no_attention else None
        self.mlp = MLP(args)
        init_uniform(self.mlp.c_fc)
        self.stream_weights = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x, x0, value, mask):  # x, x0, value: (B, T, C); value, mask may be None
        x = self.stream_weights[0] * x + self.stream_weights[1] * x0
        if self.attn is not None:
            x = x + self.attn(norm(x), value, mask)
        return x + self.mlp(norm(x))


class NgramTable(nn.Module):
    """An embedding table of n-grams, indexed by hashes of the last 2, 3, ... max_ngram tokens.

    The rows found for a position are summed. The gradient is sparse. While gradients are enabled,
    n-grams are dropped with probability `dropout`, and the others are scaled up to compensate.
    """

    def __init__(self, args):
        super().__init__()
        self.max_ngram = args.max_ngram
        self.dropout = args.ngram_dropout
        self.weight = nn.Parameter(torch.zeros(args.ngram_rows, args.n_embd))
        # torch.compile does not support sparse gradients.
        self.forward = torch.compiler.disable(self.forward)

    def __getstate__(self):  # the wrapped method is bound to this table, so a copy gets its own
        state = super().__getstate__()
        del state["forward"]
        return state

    def __setstate__(self, state):
        super().__setstate__(state)
        self.forward = torch.compiler.disable(self.forward)

    def forward(self, inputs):  # (B, T) to (B, T, C)
        hashes = inputs
        ngrams = []
        for distance in range(1, self.max_ngram):
            # The tokens `distance` positions earlier; sequences are padded on the left with zeros.
            earlier = F.pad(inputs, (distance, 0))[:, : inputs.size(1)]
            hashes = hashes * 1000003 + earlier + 1  # int64 wraps around
            ngrams.append(hashes)
        ngrams = torch.stack(ngrams, dim=-1)  # (B, T, max_ngram - 1)
        rows = (ngrams % len(self.weight)).flatten(0, 1)
        scale = None
        if self.dropout and torch.is_grad_enabled():
            kept = self.survives_dropout(ngrams, inputs).flatten(0, 1)
            scale = kept / (1 - self.dropout)
        total = F.embedding_bag(
            rows, self.weight, mode="sum", sparse=True, per_sample_weights=scale
        )
        return total.unflatten(0, inputs.shape)

    def survives_dropout(self, ngrams, inputs):
        """Return a mask of the n-grams that dropout keeps, shaped like `ngrams`.

        ngrams: (B, T, max_ngram - 1) hashes. The mask is a hash of the n-gram and of a salt, the
        sum of its sequence's tokens. Unlike random numbers, it depends on neither the number of
        ranks nor earlier batches. All copies of an n-gram in a sequence are kept, or all are
        dropped. The salt also depends on later tokens, but the model cannot recover them from the
        mask.
        """
        salt = 2 * inputs.sum(1)[:, None, None] + 1  # odd, so that no bits of the n-gram are lost
        # Multiplicative hashing: an int64 product wraps around, and its highest bits are mixed
        # best. The multiplier is that of Knuth's MMIX generator.
        product = ngrams * salt * 6364136223846793005
        random = product >> 44  # the highest 20 of 64 bits, as a number in [-2**19, 2**19)
        # The lowest of these numbers are dropped; `dropout` is their fraction.
        return random >= (self.dropout - 0.5) * 2**20


class ModernGPT(nn.Module):
    """A GPT with what records 8 to 21 added: other embeddings, skips, masks, and an untied head.

    Every layer mixes the embedding, x0, into its input. Each layer in the second half also adds the
    output of its mirror image in the first half, so the last layer adds that of the first.
    wte, value_tables, activations and matmuls have the given dtype; other weights are float32.
    Source: record 21 (January 2025) of https://github.com/KellerJordan/modded-nanogpt
    """

    LOGIT_SOFTCAP = 15.0

    def __init__(self, args, dtype=torch.float32):
        super().__init__()
        V, C, layers = args.vocab_size, args.n_embd, args.n_layer
        self.dtype = dtype
        self.wte = nn.Embedding(V, C, dtype=dtype)  # normal(0, 1)
        self.ngrams = NgramTable(args) if args.max_ngram > 1 else None
        self.value_tables = nn.ModuleList(
            nn.Embedding(V, C, dtype=dtype) for _ in range(args.value_embeddings)
        )
        self.h = nn.ModuleList(ModernBlock(args, layer) for layer in range(layers))
        self.skip_weights = nn.Parameter(torch.ones(layers // 2))
        self.lm_head = CastedLinear(C, V, bias=False)
        nn.init.zeros_(self.lm_head.weight)
        self.document_token = args.document_token
        self.has_window = args.window > 0
        window = torch.tensor(window_at(1.0, args) // BLOCK)
        self.register_buffer("window", window, persistent=False)  # in blocks; the schedule sets it

    def forward(self, inputs, targets=None):
        """Return the loss or logits, with arguments and results as in GPT."""
        # The n-gram table is not compiled. Looking it up first leaves the rest in one graph.
        ngrams = 0.0 if self.ngrams is None else self.ngrams(inputs)
        x0 = (norm(self.wte(inputs)) + ngrams).to(self.dtype)  # (B, T, C)
        layers = len(self.h)
        tables = [table(inputs).to(self.dtype) for table in self.value_tables]
        values = tables + [None] * (layers - 2 * len(tables)) + tables
        long = short = None
        if self.has_window:
            documents = (inputs == self.document_token).cumsum(1)
            long = attention_mask(documents, self.window)
            short = attention_mask(documents, (self.window // 2).clamp(min=1))
        x, outputs = x0, []
        for layer, block in enumerate(self.h):
            mirror = layers - 1 - layer
            if layer > mirror:
                x = x + self.skip_weights[mirror] * outputs[mirror]
            # Layers 0, 4, 8, ... have the long window, counted from the first or the last layer.
            mask = long if min(layer, mirror) % 4 == 0 else short
            x = block(x, x0, values[layer], mask)
            outputs.append(x)
        return loss_or_logits(norm(x), self.lm_head.weight, targets, self.LOGIT_SOFTCAP)


def build_model(args, dtype):
    """Return the model that args.model names, with new weights."""
    return GPT(args, dtype) if args.model == "gpt2" else ModernGPT(args, dtype)


# ---- Muon. To use it elsewhere, copy this section: it needs torch and torch.distributed as dist -
def zeropower_via_newtonschulz5(G, dtype=torch.bfloat16):
    """Orthogonalize G = U S V^T with five Newton-Schulz iterations: return approximately U V^T.

    G: (M, N) or (K, M, N), of any float dtype; it is not modified. For norms below 1e-6, the
    result's singular values fall short of 1. dtype: dtype of the matmuls. Returns a bfloat16
    tensor of the same shape, because Muon sends it to other ranks. Raises ValueError if G is not
    2-D or 3-D. Source: https://kellerjordan.github.io/posts/muon/

    With A = X X^T and B = bA + cA^2, an iteration is

        next X = aX + BX = (aI + B) X
        next A = (aI + B) A (aI + B)

    It maps each singular value s to as + bs^3 + cs^5, so that small ones grow quickly. After five
    iterations, all but the smallest lie between 0.7 and 1.2. For a tall G, read X^T for X.

    The second formula makes it possible to compose iterations: with P, the product of their factors
    aI + B, X is multiplied only once, by P. All other products are of size (m, m), where m is the
    shorter side. Composing pays if the longer side is at least 2m. Composing all five iterations
    would lose too much precision in bfloat16, so the first two are composed, and the last three.
    """
    if G.ndim not in (2, 3):
        raise ValueError(f"G has shape {tuple(G.shape)}: expected a matrix or a stack of matrices")
    a, b, c = 3.4445, -4.7750, 2.0315
    # multiply_add(Z, X, Y, beta, alpha) returns beta Z + alpha X Y.
    multiply_add = torch.addmm if G.ndim == 2 else torch.baddbmm
    # The Frobenius norm is computed in float64, because squaring 1e30 overflows float32. It is
    # faster to take the norms of the rows first.
    row_norms = torch.linalg.vector_norm(G, dim=-1, keepdim=True, dtype=torch.float64)
    frobenius = torch.linalg.vector_norm(row_norms, dim=-2, keepdim=True)
    # Without this cast, the division would be done in float64.
    wider_dtype = torch.promote_types(G.dtype, dtype)
    X = (G / (frobenius + 1e-7).to(wider_dtype)).to(dtype)
    tall = G.size(-2) > G.size(-1)
    m, n = sorted(G.shape[-2:])
    identity = torch.eye(m, dtype=dtype, device=G.device)
    for iterations in (2, 3) if n >= 2 * m else (1, 1, 1, 1, 1):
        A = X.mT @ X if tall else X @ X.mT  # (m, m)
        B = multiply_add(A, A, A, beta=b, alpha=c)
        if iterations == 1:
            X = multiply_add(X, X, B, beta=a) if tall else multiply_add(X, B, X, beta=a)
            continue
        P = torch.add(B, identity, alpha=a)
        for _ in range(iterations - 1):
            A = multiply_add(A, B, A, beta=a)  # (aI + B) A
            A = multiply_add(A, A, B, beta=a)  # (aI + B) A (aI + B)
            B = multiply_add(A, A, A, beta=b, alpha=c)
            P = multiply_add(P, B, P, beta=a)  # (aI + B) P
        X = X @ P.mT if tall else P @ X
    return X.bfloat16()


class Muon(torch.optim.Optimizer):
    """MomentUm Orthogonalized by Newton-Schulz: replaces Nesterov momentum U S V^T with U V^T.

    Every direction in weight space is learned at the same rate. Each matrix belongs to one rank,
    which alone keeps its momentum and computes its update. All ranks apply the update. Small
    matrices of the same shape are processed together (see stacks_of).

    params: parameters with at least two dimensions; shape (M, ...) is flattened to (M, N). Their
    gradients must already be summed or averaged over the ranks. Each parameter must have a gradient
    on all ranks or on none. lr: RMS change of an entry per step. momentum: if it changes, all
    parameters need gradients in the next step, since a buffer is rescaled only then. dtype: used
    for the matmuls. Raises ValueError if a parameter or a value is invalid.

    Updates are scaled by sqrt(max(M, N)). torch.optim.Muon scales them differently:

        adjust_lr_fn of torch.optim.Muon    the same lr here
        "match_rms_adamw"                   0.2 * lr
        "original"                          lr / sqrt(N)

    Both optimizers shrink weights by lr * weight_decay per step, so also multiply weight_decay by
    old lr / new lr.
    """

    def __init__(
        self, params, lr, momentum=0.95, weight_decay=0, rank=0, world_size=1, dtype=torch.bfloat16
    ):
        if not (lr >= 0 and 0 <= momentum < 1 and weight_decay >= 0):
            raise ValueError(
                f"lr={lr}, momentum={momentum} and weight_decay={weight_decay} must be at least 0, "
                f"and momentum less than 1"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} must be between 0 and world_size - 1 = {world_size - 1}")
        self.rank = rank
        self.world_size = world_size
        self.dtype = dtype
        self.owner = {}  # the rank that owns each parameter
        self.loads = [0] * world_size  # cost of each rank's matrices
        # This calls add_param_group, which fills owner and loads.
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    def add_param_group(self, param_group):
        """Add a group; assign its stacks of matrices, largest first, to the least loaded ranks."""
        super().add_param_group(param_group)
        for p in param_group["params"]:
            if p.ndim < 2:
                raise ValueError(f"Muon takes matrices, not a parameter of shape {tuple(p.shape)}")
        for stack in stacks_of(param_group["params"]):
            rank = self.loads.index(min(self.loads))
            for p in stack:
                self.owner[p] = rank
                self.loads[rank] += matrix_cost(p)

    @torch.no_grad()
    def step(self, closure=None):
        """Collective: update all parameters in place; return the closure's loss, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            stacks = []
            # Stacks are formed from all parameters, as they were when the owners were assigned.
            for stack in stacks_of(group["params"]):
                stack = [p for p in stack if p.grad is not None]
                if stack:
                    stacks.append(stack)
            # The momentum buffer m is a sum of gradients g: m = decay * m + g. The average that
            # corresponds to it is a = (1 - momentum) * m. When the momentum has changed, m is
            # rescaled, so that a = momentum * a + (1 - momentum) * g still holds.
            last_momentum = group.get("last_momentum", group["momentum"])
            rescale = (1 - last_momentum) / (1 - group["momentum"])  # exactly 1 if it is constant
            group["decay"] = group["momentum"] * rescale
            group["last_momentum"] = group["momentum"]
            pending = []
            # A bucket holds about one stack of each rank, since ownership balances the load.
            for first in range(0, len(stacks), self.world_size):
                bucket = stacks[first : first + self.world_size]
                pending.append(self.start_updates(bucket, group))
                if self.world_size == 1 or len(pending) > 2:  # two all-reduces stay in flight
                    self.finish_updates(pending.pop(0), group)
            for updates in pending:
                self.finish_updates(updates, group)
        return loss

    def start_updates(self, bucket, group):
        """Compute this rank's updates for a bucket of stacks and start sending them to all ranks.

        Return (bucket, slots, work). slots: a bfloat16 tensor per stack, valid once work is done.
        """
        sizes = [sum(p.numel() for p in stack) for stack in bucket]
        buffer = torch.zeros(sum(sizes), dtype=torch.bfloat16, device=bucket[0][0].device)
        slots = buffer.split(sizes)  # slots of other ranks stay 0, so the sum over ranks is exact
        for stack, slot in zip(bucket, slots):
            if self.owner[stack[0]] == self.rank:
                slot.copy_(self.orthogonalized_momenta(stack, group).flatten())
        work = None
        if self.world_size > 1:
            work = dist.all_reduce(buffer, async_op=True)
        return bucket, slots, work

    def finish_updates(self, updates, group):
        """Wait for what start_updates returned and apply it to the parameters."""
        bucket, slots, work = updates
        if work is not None:
            work.wait()
        for stack, slot in zip(bucket, slots):
            for p, update in zip(stack, slot.chunk(len(stack))):
                if group["weight_decay"]:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                scale = max(p.flatten(1).shape) ** 0.5  # gives the update an RMS of 1
                p.add_(update.view_as(p), alpha=-group["lr"] * scale)

    def orthogonalized_momenta(self, stack, group):
        """Update the momenta of a stack; return orthogonalized directions, (K, M, N) or (M, N)."""
        M, N = stack[0].flatten(1).shape
        directions = torch.empty(len(stack), M, N, dtype=self.dtype, device=stack[0].device)
        for p, direction in zip(stack, directions):
            if p not in self.state:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            momentum = self.state[p]["momentum_buffer"]
            torch.add(p.grad, momentum, alpha=group["decay"], out=momentum)
            # Nesterov: the direction looks one momentum step ahead.
            torch.add(p.grad, momentum, alpha=group["momentum"], out=direction.view_as(p))
        if len(stack) == 1:
            directions = directions[0]  # a plain matmul is faster than a batched one
        return zeropower_via_newtonschulz5(directions, self.dtype)

    def load_state_dict(self, state_dict):
        """Load this rank's state_dict, or this rank's part of a full one."""
        super().load_state_dict(state_dict)
        for p, owner in self.owner.items():
            if owner != self.rank:
                self.state.pop(p, None)

    def full_state_dict(self):
        """Collective: return state_dict() with the momenta of all ranks."""
        full = self.state_dict()
        for i, p in enumerate(params_of(self)):
            momentum = torch.zeros_like(p)
            if p in self.state:
                momentum.copy_(self.state[p]["momentum_buffer"])
            if self.world_size > 1:
                dist.broadcast(momentum, src=self.owner[p])
            full["state"][i] = {"momentum_buffer": momentum}
        return full

    def __getstate__(self):
        """Return what pickle and copy.deepcopy need, including the attributes of this class."""
        own = ("rank", "world_size", "dtype", "owner", "loads")
        return super().__getstate__() | {name: getattr(self, name) for name in own}


def matrix_cost(p):
    """Return the number of multiplications that zeropower_via_newtonschulz5 needs for a matrix."""
    m, n = sorted(p.flatten(1).shape)
    if n >= 2 * m:  # composed: two products of X with itself and two with P; A, B and P 14 times
        return m * m * (4 * n + 14 * m)
    # in each of five iterations: a product of X with itself, one of A, and one of B with X
    return 5 * m * m * (n + m + n)


def stacks_of(params):
    """Split params into stacks, sorted by the cost of one matrix, the most expensive first.

    Up to eight matrices of the same shape, with at most 2**20 entries together, form a stack and
    share batched matmuls. Stacks must not depend on the number of ranks, because the size of a
    batched matmul can change the last bits of its result.
    """
    stacks = []
    # Sorting by shape as well brings matrices of one shape together. The sort is stable, so
    # matrices of the same shape keep the order of params.
    for p in sorted(params, key=lambda p: (matrix_cost(p), p.shape), reverse=True):
        max_size = min(8, 2**20 // p.numel())
        if stacks and stacks[-1][0].shape == p.shape and len(stacks[-1]) < max_size:
            stacks[-1].append(p)
        else:
            stacks.append([p])
    return stacks


def params_of(optimizer):
    """Return the parameters of all groups, in the order in which state_dict numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


# ---- Data: shards of tokens, read as one stream -------------------------------------------------
# A shard is a header of 256 int32 values (magic number 20240520, version 1, number of tokens,
# zeros), then the tokens as uint16.
HEADER_BYTES = 1024


def shard_size(path):
    """Return the number of tokens in a shard. Raises UserError unless it is a complete shard."""
    is_file = os.path.isfile(path)  # a named pipe is not, and reading it would block
    require(is_file, f"{path} is not a file: download or pack the data again")
    header = np.fromfile(path, "<i4", HEADER_BYTES // 4).tolist()
    tokens, odd_bytes = divmod(os.path.getsize(path) - HEADER_BYTES, 2)
    expected = [20240520, 1, tokens] + [0] * (HEADER_BYTES // 4 - 3)
    complete = tokens > 0 and odd_bytes == 0 and header == expected
    require(complete, f"{path} is not a complete shard of tokens: download or pack it again")
    return tokens


def file_version(path):
    """Return values that change when a file is replaced or modified."""
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class TokenStream:
    """The tokens of all shards that match a glob, laid end to end in name order, and repeated.

    contents identifies the tokens: it holds the size and a checksum of each shard. Raises UserError
    if a shard is missing, incomplete, listed twice or changed, or if it holds a token outside the
    vocabulary, and OSError if a shard cannot be read.
    """

    def __init__(self, pattern, vocab_size):
        self.pattern = pattern
        self.vocab_size = vocab_size
        self.encoding = read_manifest(pattern).get("encoding")  # None if there is no manifest
        self.paths = sorted(glob.glob(pattern))
        require(self.paths, f"no file matches {pattern!r}: run data/fineweb.py or data/pack.py")
        for folder in {Path(path).parent for path in self.paths}:
            packing = (folder / ".pack").exists()  # there while data/pack.py replaces shards
            require(not packing, f"{folder} is being packed, or packing stopped: pack it again")
        self.sizes = [shard_size(path) for path in self.paths]
        self.ends = np.cumsum(self.sizes).tolist()  # positions in the stream
        self.total_tokens = self.ends[-1]
        self.versions = [file_version(path) for path in self.paths]
        self.contents = [(size, self.checksum(i)) for i, size in enumerate(self.sizes)]
        distinct = len(set(self.contents)) == len(self.contents)
        require(distinct, f"{pattern!r} matches a shard and a copy of it: remove one")

    def checksum(self, shard):
        """Return the crc32 of a shard's tokens; of a large shard, only of 128 parts of it."""
        part_size = 2**16
        size = self.sizes[shard]
        start = self.ends[shard] - size
        checksum = 0
        for offset in range(0, size, max(part_size, size // 128)):
            part = self.read(start + offset, min(part_size, size - offset))
            checksum = zlib.crc32(part, checksum)
        return checksum

    def read(self, start, count):
        """Return `count` tokens (uint16) from position `start` of the repeated stream."""
        parts = []
        while count > 0:
            start %= self.total_tokens
            shard = bisect.bisect_right(self.ends, start)
            path = self.paths[shard]
            unchanged = file_version(path) == self.versions[shard]
            require(unchanged, f"{path} changed while in use: restore it and start again")
            tokens_left = self.ends[shard] - start
            offset = HEADER_BYTES + 2 * (self.sizes[shard] - tokens_left)
            part = np.fromfile(path, "<u2", min(count, tokens_left), offset=offset)
            highest = part.max()
            fix = "use train_files and val_files of the same encoding, or raise --vocab_size"
            known = highest < self.vocab_size
            require(known, f"{path} holds token {highest}, but vocab_size={self.vocab_size}: {fix}")
            parts.append(part)
            start += len(part)
            count -= len(part)
        return np.concatenate(parts)


@functools.lru_cache(2)
def shuffled_starts(seed, epoch, total_tokens, T):
    """Return the positions at which the sequences of an epoch start, in random order.

    The sequences follow each other without gaps, from a random position below T on. The last one
    may wrap around to the start of the stream. total_tokens % T tokens are left out.
    """
    generator = np.random.default_rng((seed, epoch))
    return generator.integers(T) + T * generator.permutation(total_tokens // T)


@dataclasses.dataclass
class DistributedDataLoader:
    """The training batches. A batch depends only on the step.

    The global batch of a step is split into world_size equal parts, and rank r takes part r. The
    tokens of a step therefore depend on neither the number of ranks nor the size of micro-batches.
    """

    stream: TokenStream
    batch_size: int  # sequences per step, summed over all ranks
    T: int  # tokens per sequence
    rank: int
    world_size: int
    device: torch.device
    shuffle_seed: int | None = None  # None reads the stream in order

    def __post_init__(self):
        size, ranks = self.batch_size, self.world_size
        require(size % ranks == 0, f"batch_size={size} must be a multiple of the {ranks} ranks")
        self.tokens_per_step = self.batch_size * self.T

    def batch(self, step):
        """Return (inputs, targets, hash) of this rank in a step.

        inputs and targets: int64 of shape (batch_size // world_size, T), on device. The sum of the
        hashes of all ranks and steps, modulo 2**48, identifies the tokens that were trained on.
        """
        count = self.batch_size // self.world_size
        first = step * self.batch_size + self.rank * count
        sequences = self.read_sequences(first, count)
        batch_hash = 0
        for number, sequence in enumerate(sequences, first):
            # A different odd weight per sequence makes the hash depend on their order.
            batch_hash += (2 * number + 1) * zlib.crc32(sequence)
        inputs, targets = inputs_and_targets(sequences, self.device)
        return inputs, targets, batch_hash % 2**48

    def read_sequences(self, first, count):
        """Return sequences `first` to `first + count - 1` of the run: uint16, (count, T + 1)."""
        if self.shuffle_seed is None:
            tokens = self.stream.read(first * self.T, count * self.T + 1)
            return np.stack([tokens[self.T * i : self.T * i + self.T + 1] for i in range(count)])
        sequences = []
        total_tokens = self.stream.total_tokens
        for number in range(first, first + count):
            epoch, index = divmod(number, total_tokens // self.T)
            starts = shuffled_starts(self.shuffle_seed, epoch, total_tokens, self.T)
            sequences.append(self.stream.read(starts[index], self.T + 1))
        return np.stack(sequences)


def inputs_and_targets(sequences, device):
    """Split tokens of shape (B, T + 1) into two int64 tensors of shape (B, T) on a device."""
    inputs = torch.from_numpy(sequences[:, :-1].astype(np.int64, order="C"))
    targets = torch.from_numpy(sequences[:, 1:].astype(np.int64, order="C"))
    return inputs.to(device), targets.to(device)


def open_data(args, rank, world_size, device):
    """Return (train_loader, validation_tokens), or raise UserError if the data do not fit args.

    validation_tokens: a uint16 array. Its last token is only a target.
    """
    stream = TokenStream(args.train_files, args.vocab_size)
    T, seed = args.sequence_length, args.seed if args.shuffle else None
    loader = DistributedDataLoader(stream, args.batch_size, T, rank, world_size, device, seed)
    max_steps = (stream.total_tokens - 1) // loader.tokens_per_step
    enough = max_steps >= (1 if args.allow_repeat else args.num_iterations)
    fix = "add data, or lower --batch_size"
    if not args.allow_repeat:
        fix += " or --num_iterations, or pass --allow_repeat=True"
    require(enough, f"{args.train_files!r} has enough tokens for {max_steps} steps: {fix}")
    val_stream = TokenStream(args.val_files, args.vocab_size)
    separate = not set(stream.contents) & set(val_stream.contents)
    require(separate, "train_files and val_files both match the same shard: they must not overlap")
    check_encodings(stream.encoding, val_stream.encoding, "val_files")
    return loader, val_stream.read(0, count_val_tokens(args, val_stream) + 1)


def check_encodings(encoding, other, name):
    """Raise UserError if the encoding of the training data and another one are known and differ."""
    same = None in (encoding, other) or encoding == other
    require(same, f"train_files have the encoding {encoding}, but {name} {other}: use the same one")


def count_val_tokens(args, val_stream):
    """Return the number of tokens to validate on, a multiple of sequence_length."""
    T = args.sequence_length
    usable = (val_stream.total_tokens - 1) // T * T
    where = f"{args.val_files!r}, which holds {val_stream.total_tokens} tokens"
    require(usable > 0, f"a sequence of {T} tokens and a target do not fit into {where}: add text")
    if args.val_tokens > 0:
        fits = args.val_tokens % T == 0 and args.val_tokens <= usable
        limits = f"a multiple of {T} up to {usable}, for {where}"
        require(fits, f"val_tokens={args.val_tokens} must be {limits}")
        return args.val_tokens
    max_tokens = 2**20
    if args.val_loss_every:
        # Validating on n tokens takes as long as training on about n / 3. So 3/8 of the tokens
        # trained between validations take an eighth of the training time.
        trained = args.val_loss_every * args.batch_size * T
        max_tokens = min(max_tokens, 3 * trained // 8)
    return min(max(T, max_tokens // T * T), usable)


# ---- Training: optimizers, one step, one evaluation, the loop -----------------------------------
class Schedule(NamedTuple):
    """What changes during training."""

    lr_scale: float  # factor of all learning rates
    momentum: float  # of Muon
    window: int  # tokens, a multiple of BLOCK


def schedule(step, args):
    """Return the Schedule of a step.

    Learning rates are constant, then decay linearly to final_lr of their full values. The momentum
    warms up linearly, and the window grows linearly.
    """
    remaining = min(1.0, (args.num_iterations - step) / max(1, args.warmdown_iters))
    warmup = args.muon_momentum_warmup
    warmth = step / warmup if step < warmup else 1.0
    return Schedule(
        lr_scale=args.final_lr + (1 - args.final_lr) * remaining,
        momentum=args.muon_momentum - (1 - warmth) * (args.muon_momentum - 0.85),
        window=window_at(step / args.num_iterations, args),
    )


def window_at(progress, args):
    """Return the window in tokens when this fraction of the run is done."""
    return BLOCK * max(1, math.ceil(progress * args.window / BLOCK))


def apply_schedule(model, optimizers, step, args):
    """Set learning rates, Muon's momentum and the model's window for a step."""
    now = schedule(step, args)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            full_lr = group.setdefault("initial_lr", group["lr"])  # set in the first step
            group["lr"] = full_lr * now.lr_scale
            if isinstance(optimizer, Muon):
                group["momentum"] = now.momentum
    if args.model == "modern":
        model.window.fill_(now.window // BLOCK)


def build_optimizers(model, args, rank, world_size):
    """Return the optimizers of a model: AdamW, Muon, and Adagrad if there is an n-gram table.

    Raises UserError unless every parameter is in exactly one optimizer.
    """
    build = gpt2_optimizers if args.model == "gpt2" else modern_optimizers
    optimizers = build(model, args, rank, world_size)
    each_once = Counter(p for o in optimizers for p in params_of(o)) == Counter(model.parameters())
    require(each_once, "every parameter of the model must be in exactly one optimizer")
    return optimizers


def gpt2_optimizers(model, args, rank, world_size):
    """Return record 7's optimizers: Muon for the matrices of the blocks, AdamW for the rest."""
    matrices = [p for p in model.h.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p not in set(matrices)]
    adamw = torch.optim.AdamW(others, args.learning_rate, (0.9, 0.95), weight_decay=0, fused=True)
    rate, momentum = args.muon_learning_rate, args.muon_momentum
    muon = Muon(matrices, rate, momentum, rank=rank, world_size=world_size, dtype=model.dtype)
    return [adamw, muon]


def modern_optimizers(model, args, rank, world_size):
    """Return the optimizers of the modern model: record 21's, and Adagrad for the n-gram table."""
    embeddings = [*model.wte.parameters(), *model.value_tables.parameters()]
    scalars = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        dict(params=[model.lm_head.weight], lr=args.learning_rate),
        dict(params=embeddings, lr=args.embedding_learning_rate),
        dict(params=scalars, lr=args.scalar_learning_rate),
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-10, weight_decay=0, fused=True)
    # Record 21 scales the update of an (M, N) matrix by sqrt(max(1, M / N)), and Muon here by
    # sqrt(max(M, N)). So the rate that corresponds is proportional to 1 / sqrt(N): mlp.c_proj, with
    # N = 4C, has half of muon_learning_rate.
    matrices = [p for p in model.h.parameters() if p.ndim == 2]
    muon_groups = []
    for columns in sorted({p.size(1) for p in matrices}):
        rate = args.muon_learning_rate * (args.n_embd / columns) ** 0.5
        muon_groups.append(dict(params=[p for p in matrices if p.size(1) == columns], lr=rate))
    rate, momentum = args.muon_learning_rate, args.muon_momentum
    muon = Muon(muon_groups, rate, momentum, rank=rank, world_size=world_size, dtype=model.dtype)
    if model.ngrams is None:
        return [adamw, muon]
    return [adamw, muon, torch.optim.Adagrad([model.ngrams.weight], args.ngram_learning_rate)]


def choose_dtype(args, device):
    """Return the dtype of matmuls: for "auto", bfloat16 if the device supports it natively."""
    if args.dtype != "auto":
        return getattr(torch, args.dtype)
    if device.type == "cuda":
        # T4 and V100 only emulate bfloat16, slowly.
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_mkldnn = torch.backends.mkldnn.is_available()
        has_bf16 = has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if has_bf16 else torch.float32


def configure_backend(args, device):
    """Set PyTorch's global options for this device."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # Adagrad warns unless this is set
    if device.type == "cuda":
        return
    from torch._functorch import config as functorch_config  # slow to import
    from torch._inductor import config as inductor_config

    # On CPUs, short sequences were measured to train faster without the fused attention kernel.
    # Despite their names, these options also affect CPUs; the second keeps the scores in bfloat16.
    torch.backends.cuda.enable_flash_sdp(args.sequence_length > 512)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    # Recompute some activations in the backward pass: cheaper on a CPU than loading them.
    functorch_config.activation_memory_budget = 0.7
    # Skip inductor's test compilations of each vector instruction set.
    inductor_config.cpp.vec_isa_ok = True
    # Otherwise, threads would add the gradients of repeated tokens in arbitrary order, and runs
    # would not be bit-reproducible.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # saves filling each new tensor


def compile_model(model, args, inputs, targets):
    """Compile a model by running one validation and one training pass on a micro-batch."""
    whole_graph = args.max_ngram < 2  # the n-gram table is not compiled, which splits the graph
    model.compile(dynamic=False, fullgraph=whole_graph, disable=not args.compile)
    with torch.no_grad():
        model(inputs, targets)
    loss = model(inputs, targets)
    loss.backward()
    model.zero_grad()
    loss.item()  # waits for the device


def micro_batch_size(sequences, max_size):
    """Return the largest divisor of `sequences` up to max_size, for equal micro-batches."""
    return next(n for n in range(min(sequences, max_size), 0, -1) if sequences % n == 0)


def sync_gradients(model):
    """Collective: sum all gradients over the ranks; sparse ones become dense.

    There is one all-reduce for each dtype.
    """
    for dtype in (torch.float32, torch.bfloat16):
        used = [p for p in model.parameters() if p.grad is not None and p.dtype == dtype]
        if used:
            flat = torch.cat([p.grad.to_dense().flatten() for p in used])
            dist.all_reduce(flat)
            for p, total in zip(used, flat.split([p.numel() for p in used])):
                p.grad = total.view_as(p)


def train_step(model, optimizers, inputs, targets, args, check_stop=lambda: None):
    """Collective: do one optimizer step and return the mean loss of all ranks, a scalar tensor.

    inputs, targets: (B, T) int64, this rank's part of the batch. check_stop is called before each
    micro-batch. If it raises StopTraining, weights and optimizers are unchanged.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    size = micro_batch_size(len(inputs), args.device_batch_size)
    loss = 0.0
    for x, y in zip(inputs.split(size), targets.split(size)):
        check_stop()
        # With this scaling, sums over micro-batches and ranks are means.
        micro_loss = model(x, y) * (size / len(inputs) / world_size)
        micro_loss.backward()
        loss += micro_loss.detach()
    if world_size > 1:
        sync_gradients(model)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return sum_over_ranks(loss)


def validation_batch(run, first):
    """Return inputs and targets of a micro-batch of validation sequences, from number `first` on.

    All micro-batches have the same shape. Past the last sequence, the targets are -1.
    """
    tokens, T = run.validation_tokens, run.args.sequence_length
    total = (len(tokens) - 1) // T  # sequences
    numbers = np.arange(first, first + run.micro_batch)
    sequences = [tokens[T * number : T * number + T + 1] for number in numbers % total]
    inputs, targets = inputs_and_targets(np.stack(sequences), run.device)
    targets[max(0, total - first) :] = -1
    return inputs, targets


@torch.no_grad()
def evaluate(run):
    """Collective: return the mean loss on the validation tokens, the same on all ranks."""
    count = len(run.validation_tokens) - 1
    total = 0.0
    for first in range(0, count // run.args.sequence_length, run.micro_batch * run.world_size):
        run.stop.check()
        inputs, targets = validation_batch(run, first + run.rank * run.micro_batch)
        total += run.model(inputs, targets).double() * (targets != -1).sum()
    return sum_over_ranks(total).item() / count


def validate(run):
    """Collective: log the validation loss, set run.val_loss, and keep the weights if they are best.

    Raises UserError if the weights of the ranks differ.
    """
    args, log = run.args, run.log
    with log.timed("validation"), log.heartbeat("validating"):
        loss = evaluate(run)
        bits = [p.float().view(torch.int32) for p in run.model.parameters()]
        sums = [values.sum(dtype=torch.int32) for values in bits]
        checksums = all_gather_objects(sum(sums).item())  # of the weights' bits, modulo 2**32
        fix = "resume from a checkpoint as old as the previous validation, and check the hardware"
        equal = len(set(checksums)) == 1
        require(equal, f"the weights of the ranks differ (checksums {checksums}): {fix}")
    lr = args.learning_rate * schedule(run.step, args).lr_scale  # the others decay in proportion
    log.progress(run.step, f"val_loss:{loss:.4f}", f" data_hash:{run.data_hash:012x} lr:{lr:.3g}")
    run.val_loss = loss
    # A run that repeats its text may overfit, so it also keeps its best weights.
    is_best = args.val_loss_every and run.epochs > 1 and loss < run.best_loss
    if is_best and save(run, "best.pt", val_loss=loss):
        run.best_loss = loss


def read_batch(run):
    """Collective: return (inputs, targets, hash of the global batch) of the next step.

    Raises StopTraining if one of the ranks cannot read its part, or must stop for another reason.
    """
    batch = None
    try:
        batch = run.train_loader.batch(run.step)
    except (UserError, OSError) as error:
        run.stop.reason = one_line(error)
    run.stop.check()
    inputs, targets, rank_hash = batch
    batch_hash = sum_over_ranks(torch.tensor(rank_hash)).item()
    return inputs, targets, batch_hash


def train(run):
    """Collective: train up to the last step, and validate periodically and at the end.

    Raises StopTraining if a rank must stop. The run is then in the state after its last complete
    step. Raises UserError if a loss is not finite.
    """
    args, log = run.args, run.log
    first_step = run.step
    steps = range(first_step, args.num_iterations)
    if log.live:
        scale, total = run.train_loader.tokens_per_step, args.num_iterations
        steps = tqdm(steps, initial=first_step, total=total, unit="tok", unit_scale=scale)
    next_line = -math.inf  # earliest time at which a step is printed again
    for step in steps:
        apply_schedule(run.model, run.optimizers, step, args)
        if args.val_loss_every and step % args.val_loss_every == 0:
            validate(run)
        if args.save_every and step % args.save_every == 0 and step > first_step:
            save_checkpoint(run)
        with log.timed("train"):
            inputs, targets, batch_hash = read_batch(run)
            loss = train_step(run.model, run.optimizers, inputs, targets, args, run.stop.check)
            loss = loss.item()
        run.step = step + 1
        run.data_hash = (run.data_hash + batch_hash) % 2**48
        show = not log.live and time.monotonic() >= next_line
        if show:
            next_line = time.monotonic() + args.print_every
        log.progress(run.step, f"train_loss:{loss:.4f}", show=show)
        # A gradient that is not finite was applied, too. A later loss shows it, usually the next.
        finite = math.isfinite(loss)
        require(finite, f"train_loss is {loss} at step {run.step}: lower the learning rates")
        if log.live:
            steps.set_postfix(step=run.step, loss=loss, val=run.val_loss)
    apply_schedule(run.model, run.optimizers, args.num_iterations, args)
    validate(run)
    diverged = f"the run diverged (val_loss={run.val_loss}): lower the learning rates"
    require(math.isfinite(run.val_loss), diverged)
    if args.save_every:
        save_checkpoint(run)


# ---- Log and checkpoints: what a run knows, writes and restores ---------------------------------
class Log:
    """Prints lines and appends them to a file, on rank 0 only. Measures the time of each phase.

    Lines are kept in memory until start_writing() is called, and while the disk is full.
    """

    def __init__(self, path, rank, num_iterations):
        self.path = path
        self.rank = rank
        self.num_iterations = num_iterations
        self.seconds = Counter()  # spent in each phase
        self.file = None
        self.unwritten = b""
        # whether a progress bar replaces the line of each step
        self.live = rank == 0 and tqdm is not None and os.isatty(1) and os.isatty(2)

    def start_writing(self):
        """Open the file, which may raise OSError, and write what has been logged so far."""
        self.file = open(self.path, "ab", buffering=0)
        self.write()

    def write(self):
        """Write as much as possible. If the disk is full, training continues."""
        with contextlib.suppress(OSError):
            written = self.file.write(self.unwritten)
            self.unwritten = self.unwritten[written:]

    def __call__(self, line, show=True):
        """Log a line and, if show, print it on the terminal."""
        if self.rank != 0:
            return
        self.unwritten += f"{line}\n".encode()
        if self.file is not None:
            self.write()
        if show:
            self.print_line(line)

    def print_line(self, line):
        """Print a line on the terminal only."""
        if self.rank != 0 or sys.stdout is None:
            return
        with contextlib.suppress(OSError):  # the terminal may be closed
            if self.live:
                tqdm.write(line)  # above the progress bar
            else:
                print(line, flush=True)

    @contextlib.contextmanager
    def timed(self, phase):
        """Add the duration of a with block to the total of a phase, unless the block raises.

        The block must end by synchronizing with the device, for example with .item().
        """
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    @contextlib.contextmanager
    def heartbeat(self, activity, interval=10):
        """While a with block runs, print every `interval` seconds what it does and for how long."""
        start = time.monotonic()
        done = threading.Event()

        def report():
            while not done.wait(interval):
                self.print_line(f"still {activity} after {time.monotonic() - start:.0f} s")

        thread = threading.Thread(target=report, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(timeout=1)

    def progress(self, step, result, more="", show=True):
        """Log a result after `step` steps, with the training time so far."""
        ms = 1000 * self.seconds["train"]
        times = f"train_time:{ms:.0f}ms step_avg:{ms / max(step, 1):.2f}ms"
        self(f"step:{step}/{self.num_iterations} {result} {times}{more}", show)


@dataclasses.dataclass
class Run:
    """A run: what it trains, and how far it has come."""

    args: Hyperparameters
    rank: int
    world_size: int
    device: torch.device
    model: nn.Module  # GPT or ModernGPT
    optimizers: list
    train_loader: DistributedDataLoader
    validation_tokens: np.ndarray  # uint16; the last one is only a target
    log: Log
    stop: StopRequest
    step: int = 0  # number of complete steps
    data_hash: int = 0  # of all tokens that these steps have trained on
    val_loss: float = math.nan  # of the last validation
    best_loss: float = math.inf  # validation loss of the weights in best.pt
    lock: object = None  # an open file, which keeps other processes out of the folder

    def __post_init__(self):
        stream = self.train_loader.stream
        sequences = self.args.batch_size // self.world_size
        self.micro_batch = micro_batch_size(sequences, self.args.device_batch_size)
        self.tokens = self.args.num_iterations * self.train_loader.tokens_per_step
        self.epochs = self.tokens / stream.total_tokens  # times that the run reads its text
        self.folder = self.log.path.with_suffix("")
        # All ranks must have the same facts and environment, and every file of the run stores both.
        # A resumed run must have the same facts. If its environment differs, this is only logged.
        self.facts = dict(
            val_hash=hashlib.sha256(self.validation_tokens).hexdigest()[:16],
            train_shards=stream.contents,
            encoding=stream.encoding,
            optimizer_names=[type(optimizer).__name__ for optimizer in self.optimizers],
        )
        self.environment = dict(
            matmul_dtype=str(self.model.dtype),
            torch=str(torch.__version__),
            source=hashlib.sha256(SOURCE.encode()).hexdigest()[:16],
        )


def log_header(run):
    """Log what defines a run: source, settings, environment, data, optimizers."""
    args, log = run.args, run.log
    log(SOURCE, show=False)
    for name, value in vars(args).items():
        log(f"hyperparameter {name}={value!r}", show=False)
    git = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty", "--abbrev=40"]
    commit = ""
    with contextlib.suppress(OSError):  # git is not installed
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    log(f"torch:{torch.__version__} commit:{commit}")
    device, threads, dtype = device_name(run.device), torch.get_num_threads(), run.model.dtype
    log(f"device:{device} processes:{run.world_size} threads:{threads} products:{dtype}")
    tokens, val_hash = run.train_loader.stream.total_tokens, run.facts["val_hash"]
    log(f"train_tokens:{tokens} val_hash:{val_hash} micro_batch:{run.micro_batch}")
    for optimizer in run.optimizers:
        values = sum(p.numel() for p in params_of(optimizer))
        log(f"{type(optimizer).__name__} parameters:{values}")
    if args.dtype == "auto" and dtype == torch.float32:
        log("dtype=auto picked float32, because this device has no native bfloat16")
    with contextlib.suppress(OSError):  # the load is unknown
        load, cores = os.getloadavg()[0], os.cpu_count()
        if run.device.type == "cpu" and load + threads > cores + 0.5:
            busy = f"the load average of the last minute is {load:.1f} on {cores} cores"
            log(f"{busy}: if other programs still run, steps may be much slower")
    if run.epochs > 10:
        fix = "expect overfitting: add text, or lower --num_iterations"
        log(f"this run reads the training text {run.epochs:.0f} times, so {fix}")


def device_name(device):
    """Return the name of the GPU, or of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(": ")[2]
    return platform.machine()


def peak_memory(device):
    """Return peak memory in MiB: allocated by PyTorch on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # macOS reports bytes


FORMAT = 3  # version of the .pt files
CRC32_OF_COMPLETE_FILES = 0x2144DF1C  # of any bytes followed by their own crc32


def crc32_of_file(path):
    """Return the crc32 of a whole file."""
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(2**24):
            checksum = zlib.crc32(block, checksum)
    return checksum


def is_complete(path):
    """Return whether a file that save() wrote is there and undamaged."""
    return path.is_file() and crc32_of_file(path) == CRC32_OF_COMPLETE_FILES


@contextlib.contextmanager
def reporting_malformed(path):
    """Turn any exception that a malformed file causes into a UserError that names the file."""
    try:
        yield
    except (UserError, OSError, MemoryError):
        raise
    except Exception as error:
        reason = repr(error)[:300]  # PyTorch may list all parameters
        raise UserError(f"{path} does not fit this train_gpt2.py ({reason})") from error


def read_pt(path):
    """Return the dict in a file that save() wrote. Raises UserError for any other file."""
    require(is_complete(path), f"{path} is not a complete file of train_gpt2.py")
    with reporting_malformed(path):
        state = torch.load(path, map_location="cpu", weights_only=True)  # executes no code
        version = int(state["format"])
    fix = "use the version of train_gpt2.py that wrote it"
    require(version == FORMAT, f"{path} has format {version}, not {FORMAT}: {fix}")
    require_finite(state, path)
    return state


def require_finite(state, path):
    """Raise UserError if a tensor within nested dicts and lists is not finite."""
    for value in tree_leaves(state):
        finite = not isinstance(value, torch.Tensor) or value.isfinite().all()
        require(finite, f"non-finite value in {path}: lower the learning rates")


def save(run, name, **more):
    """Write the weights, settings and facts of a run, and more; return whether it succeeded.

    Only rank 0 writes, atomically; the others return True. A failure, such as a full disk, is
    logged. All ranks raise UserError if a tensor is not finite.
    """
    path, partial = run.folder / name, run.folder / "partial"
    state = dict(format=FORMAT, run_id=run.folder.name, step=run.step)
    state |= dict(hyperparameters=vars(run.args), model=run.model.state_dict())
    state |= run.facts | run.environment | more
    require_finite(state, path)
    if run.rank != 0:
        return True
    try:
        with run.log.timed("checkpoint"), open(partial, "wb") as file:
            torch.save(state, file)
            file.flush()
            # torch.load ignores these four bytes.
            file.write(crc32_of_file(partial).to_bytes(4, "little"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        return True
    except (OSError, RuntimeError) as error:  # torch.save turns an OSError into a RuntimeError
        run.log(f"warning: {name} was not written ({error.__context__ or error})")
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)  # frees the space of the partial file
        return False


def checkpoints_in(folder):
    """Return the paths of a run's checkpoints, oldest first."""
    return sorted(folder.glob("state_step" + 10 * "[0-9]" + ".pt"))


def save_checkpoint(run):
    """Collective: save what a run needs to resume, and delete old checkpoints.

    Return the path of the checkpoint, or None on rank 0 if it could not be written. All ranks raise
    UserError if a value is not finite.
    """
    optimizer_states = []
    for optimizer in run.optimizers:
        get_state = getattr(optimizer, "full_state_dict", optimizer.state_dict)
        optimizer_states.append(get_state())
    path = run.folder / f"state_step{run.step:010d}.pt"
    seconds = run.log.seconds["train"]
    losses = dict(last_val_loss=run.val_loss, best_loss=run.best_loss)
    progress = dict(data_hash=run.data_hash, train_seconds=seconds, **losses)
    if not save(run, path.name, optimizers=optimizer_states, **progress):
        return None
    delete_old_checkpoints(run, run.args.keep_checkpoints)
    return path


def delete_old_checkpoints(run, keep):
    """Delete all but the last `keep` checkpoints up to the run's step. Only rank 0 does so."""
    if run.rank != 0:
        return
    # Later ones do not count. They are damaged, or the run would have continued from them.
    newest = run.folder / f"state_step{run.step:010d}.pt"
    up_to_now = [path for path in checkpoints_in(run.folder) if path <= newest]
    for old in up_to_now[:-keep]:
        try:
            old.unlink()
        except OSError as error:
            run.log(f"warning: an old checkpoint was not deleted ({one_line(error)})")


def check_run_id(run):
    """Raise UserError if the run_id belongs to another run, or its log is some other file."""
    log, folder = run.log.path, run.folder
    has_log = log.exists() and (not log.is_file() or log.stat().st_size > 0)
    has_run = has_log or any(folder.glob("*.pt"))
    fix = "pass another --run_id"
    if run.args.resume != "auto":
        require(not has_run, f"{folder} exists: {fix}, or --resume=auto to continue it")
    require(not has_log or folder.exists(), f"{log} is not the log of a run in {folder}: {fix}")


def claim_run_id(run):
    """Make this process the only one that writes the files of the run. Only rank 0 calls it."""
    check_run_id(run)
    run.folder.mkdir(parents=True, exist_ok=True)
    run.lock = open(run.folder / "lock", "w")
    try:
        fcntl.flock(run.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another process is training {run.folder}: stop it first") from None


def restore(run):
    """Load what a run starts from. Return "new", "continued" or "finished".

    resume=auto loads the run's newest complete checkpoint, if there is one. Raises UserError if
    there are checkpoints but none is complete, or if the file belongs to another experiment.
    """
    args, result = run.args, run.folder / "model.pt"
    paths = [Path(args.resume)] if args.resume else []
    if args.resume == "auto":
        if result.exists():
            state = read_pt(result)
            with reporting_malformed(result):
                settings = different_settings(
                    state, args, settings_in("model", "modern model", "training")
                )
            fix = f"pass another --run_id with --resume=CHECKPOINT or --init={result}"
            require(not settings, f"{run.folder} has finished with {settings}: to go on, {fix}")
            return "finished"
        paths = checkpoints_in(run.folder)
    for path in reversed(paths):
        if is_complete(path):
            with reporting_malformed(path):
                load_checkpoint(run, path)
            return "continued"
        run.log(f"{path} is not a complete checkpoint")
    require(not paths, "no checkpoint is complete: check --resume, or pass another --run_id")
    if args.init:
        with reporting_malformed(args.init):
            load_init(run, Path(args.init))
    return "new"


def different_settings(state, args, names):
    """Return the saved values that differ from args, as arguments: "--n_layer=2 --seed=1"."""
    # A setting missing from an older file counts as its default.
    saved = vars(Hyperparameters()) | state["hyperparameters"]
    changed = [name for name in names if saved[name] != getattr(args, name)]
    return " ".join(f"--{name}={saved[name]}" for name in changed)


def load_checkpoint(run, path):
    """Restore a run from a checkpoint. Raises UserError if it belongs to another experiment."""
    args, log = run.args, run.log
    state = read_pt(path)
    require("optimizers" in state, f"{path} holds only weights: start a new run with --init={path}")
    names = [*settings_in("model", "modern model", "training"), "val_tokens"]
    if state["hyperparameters"]["num_iterations"] < args.num_iterations:
        names.remove("num_iterations")  # a resumed run may be longer
    settings = different_settings(state, args, names)
    require(not settings, f"{path} was saved with other settings: pass {settings}")
    check_facts(run, state, path)
    run.model.load_state_dict(state["model"])
    for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
        load_optimizer(optimizer, saved, log)
    run.step, run.data_hash = int(state["step"]), int(state["data_hash"])
    run.val_loss = float(state.get("last_val_loss", math.nan))  # older files lack it
    if args.resume == "auto":  # a new run has no best.pt yet
        run.best_loss = float(state["best_loss"])
    log.seconds["train"] = float(state["train_seconds"])


def check_facts(run, state, path):
    """Raise UserError if a checkpoint is of other data or optimizers; log what else has changed."""
    facts, saved_shards = dict(run.facts), state["train_shards"]
    tokens_read = state["step"] * run.train_loader.tokens_per_step
    # Shards may be added, unless the run is shuffled or has already come to the end of its data.
    if not run.args.shuffle and tokens_read < sum(size for size, _ in saved_shards):
        facts["train_shards"] = facts["train_shards"][: len(saved_shards)]
    for name, value in facts.items():
        fix = "restore the data and the optimizers that this run was started with"
        require(value == state[name], f"{path} was saved with another {name}: {fix}")
    for name, value in run.environment.items():
        if value != state[name]:
            run.log(f"{path} was saved with {name}={state[name]}, and this run has {value}")


def load_init(run, path):
    """Load the weights of --init. Raises UserError unless they fit the model and the data."""
    state = read_pt(path)
    settings = different_settings(state, run.args, settings_in("model", "modern model"))
    require(not settings, f"--init={path} holds another model: pass {settings}")
    check_encodings(run.facts["encoding"], state["encoding"], f"--init={path}")
    run.model.load_state_dict(state["model"])


def load_optimizer(optimizer, saved, log):
    """Restore an optimizer as it was saved, except for what this script's schedule decides."""
    groups = optimizer.param_groups
    scheduled = {"params", "lr", "initial_lr", "momentum"}
    for group, saved_group in zip(groups, saved["param_groups"], strict=True):
        for name in group.keys() & saved_group.keys() - scheduled:
            if group[name] != saved_group[name]:
                log(f"{type(optimizer).__name__} continues with {name}={saved_group[name]}")
    full_rates = [group["lr"] for group in groups]
    optimizer.load_state_dict(saved)
    for p, state in optimizer.state.items():
        # A fused optimizer does not check the shapes, and could crash the process.
        shapes = {value.shape for value in state.values() if isinstance(value, torch.Tensor)}
        require(shapes <= {p.shape, torch.Size()}, f"states of shapes {shapes} for {p.shape}")
    for group, full_lr in zip(optimizer.param_groups, full_rates):
        group["lr"] = group["initial_lr"] = full_lr


def save_and_stop(run, reason):
    """Collective: save a checkpoint after the last complete step and log why the run stops.

    Raises UserError if that fails, or if it was not a signal that stopped the run.
    """
    path = save_checkpoint(run)
    require(path, f"stopped after step {run.step} without saving a checkpoint: {reason}")
    run_id = run.folder.name
    run.log(f"saved {path}; to continue: the same command with --run_id={run_id} --resume=auto")
    by_signal = reason == "a signal"
    require(by_signal, f"stopped after step {run.step} (checkpoint saved): {reason}")
    run.log(f"stopped by a signal after step {run.step}")


def finish(run):
    """Save the weights; log times, speed, memory and the result; delete a checkpoint.

    Raises UserError if the weights cannot be saved.
    """
    log, val_loss = run.log, run.val_loss
    log(" ".join(f"{phase}:{seconds:.1f}s" for phase, seconds in log.seconds.items()))
    speed = run.tokens / log.seconds["train"]
    memory = peak_memory(run.device)
    # Training and validation compile one graph each. More graphs mean recompilation.
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    log(f"tokens/s:{speed:.0f} peak_memory:{memory:.0f}MiB graphs:{graphs}")
    path = run.folder / "model.pt"
    saved = save(run, path.name, val_loss=val_loss)
    require(saved, f"{path} was not written, so the final weights are lost: free space")
    # The last checkpoint stays, because num_iterations may be raised.
    delete_old_checkpoints(run, max(1, run.args.keep_checkpoints - 1))
    log(f"weights: {path}; `bash run.sh sample` generates text from them")
    if run.best_loss < val_loss:
        best = run.folder / "best.pt"
        log(f"weights of the best validation, val_loss:{run.best_loss:.4f}: {best}")
    if log.unwritten:
        log(f"warning: the disk is full, so {log.path} lacks the last lines")
    target = f" target:{run.args.target_val_loss}" if run.args.target_val_loss else ""
    log(f"result val_loss:{val_loss:.4f}{target}")


# ---- Main ---------------------------------------------------------------------------------------
def set_up(args, stop):
    """Collective: return the Run that args describe, at step 0. It changes no file.

    Raises UserError if the run is impossible, or if the ranks differ.
    """
    rank, world_size, device = join_processes(args)
    configure_backend(args, device)
    run_id = [args.run_id or time.strftime("%Y%m%d-%H%M%S-") + os.urandom(3).hex()]
    if dist.is_initialized():
        dist.broadcast_object_list(run_id, src=0)
    with agreement() as facts:
        loader, validation_tokens = open_data(args, rank, world_size, device)
        args = dataclasses.replace(args, val_tokens=len(validation_tokens) - 1)
        torch.manual_seed(args.seed)
        model = build_model(args, choose_dtype(args, device)).to(device)
        optimizers = build_optimizers(model, args, rank, world_size)
        log = Log(Path(args.log_dir, f"{run_id[0]}.txt"), rank, args.num_iterations)
        run = Run(
            args, rank, world_size, device, model, optimizers, loader, validation_tokens, log, stop
        )
        facts.update(vars(args) | run.facts | run.environment)
    return run


def main(args, stop=None):
    """Train a GPT as configured by args; return the last validation loss.

    stop: a StopRequest, checked before every micro-batch. Returns None if it stopped the run, or if
    the run had already finished.
    """
    run = set_up(args, stop or StopRequest())
    args, log = run.args, run.log
    log_header(run)
    with agreement() as facts:
        if run.rank == 0:
            claim_run_id(run)
        start = restore(run)
        facts["the step of the checkpoint"] = run.step
        facts["the state of the run"] = start
    if start == "finished":
        log(f"{run.folder} holds the result of this run; nothing to do")
        leave_processes()
        return None
    if args.resume:
        where = f"continuing after step {run.step}" if start == "continued" else "no checkpoint yet"
        log(f"resume={args.resume}: {where}")
    if start == "new" and args.init:
        log(f"starting from the weights in {args.init}")
    elif start == "new" and args.model == "gpt2":
        log("a high first loss is expected: an untrained tied head predicts the input token")
    if args.compile:
        log("compiling (up to a minute; --compile=false starts at once, but trains more slowly)")
    with log.timed("compile"), log.heartbeat("preparing the first step"):
        compile_model(run.model, args, *validation_batch(run, 0))
    with agreement():
        if run.rank == 0:
            log.start_writing()  # not earlier, so that a run that cannot start leaves no log
    try:
        train(run)
        finish(run)
        result = run.val_loss
    except StopTraining as stopped:
        result = None
        save_and_stop(run, reason=str(stopped))
    leave_processes()
    return result


def describe_failure(error):
    """Return a message for the user: one line, or a traceback for a bug."""
    if isinstance(error, (UserError, OSError)):
        return one_line(error)
    out_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    # PyTorch has no exception class for running out of CPU memory.
    if out_of_memory or "DefaultCPUAllocator" in str(error):
        return "out of memory: set --device_batch_size lower than the log's micro_batch"
    if dist.is_initialized() and isinstance(error, RuntimeError) and "gloo" in str(error):
        lost = "lost the connection to another rank; see its message or torchrun's summary"
        return f"{lost} ({error})"
    return "".join(traceback.format_exception(error)).rstrip()


def cli(argv):
    """Train as configured on the command line. On failure, print why and exit with status 1."""
    from torch.distributed.elastic.multiprocessing.errors import record  # only needed here

    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="backslashreplace")  # for an ASCII-only terminal
    stop = StopRequest()
    stop.catch_signals()
    try:
        record(main)(parse_args(argv), stop)  # reports a failed rank's message to torchrun
    except Exception as error:
        # torchrun sends SIGTERM to the other ranks when one has failed. It must not stop this rank
        # from printing its message.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        text = describe_failure(error)
        connected = dist.is_initialized()
        rank = os.environ.get("RANK" if connected else "LOCAL_RANK", "0")
        # All ranks raise the same UserError, so one of them prints it: rank 0, or before they are
        # connected, the first rank of each machine.
        is_user_error = isinstance(error, UserError)
        if "RANK" not in os.environ or rank == "0" or not is_user_error:
            where = f"rank {rank}: " if connected and not is_user_error else ""
            print(f"train_gpt2.py: {where}{text}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    cli(sys.argv[1:])
