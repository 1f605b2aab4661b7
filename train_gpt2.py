"""Single-file training of GPT-2 124M to a validation loss of 3.28 on FineWeb.

    torchrun --standalone --nproc_per_node=8 train_gpt2.py      # 8 GPUs
    python train_gpt2.py                                        # one GPU, or a CPU
    python train_gpt2.py --help                                 # all settings and presets

The defaults are those of record 7 of the public NanoGPT speedrun (October 2024), whose log reports
a validation loss of 3.2755 after 12.0 minutes on 8xH100 (one run). This file has not been run on a
GPU yet. It needs Python 3.10, torch 2.5 and numpy, or later versions.

Shapes: B sequences of T tokens, C = n_embd, V = vocab_size, H = n_head, D = C // H.
"""

import argparse
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
import shlex
import signal
import subprocess
import sys
import time
import traceback
import zlib
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Literal, get_args

# The log of a run contains the source of this file. It is read before the slow imports, so that the
# log shows the running code even if the file is edited right after launch.
SOURCE = Path(__file__).read_text(encoding="utf-8")

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

try:
    from tqdm import tqdm
except ImportError:  # without tqdm, the terminal shows a line per step instead of a progress bar
    tqdm = None


# ---- Settings -----------------------------------------------------------------------------------
class UserError(ValueError):
    """A mistake that the user can fix. It is shown on one line, without a traceback."""

    def __init__(self, message):
        super().__init__(" ".join(message.split()))


def setting(default, group, help, low=None, high=2**31 - 1):
    """Return a field of Hyperparameters, listed under `group` in --help.

    low, high: the allowed range of a number; low defaults to 1 for an int and 0 for a float.
    """
    metadata = dict(group=group, help=help, range=(low, high))
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """All settings of a run. Edit the defaults here, or pass --name=value on the command line.

    A new setting needs only a type and a default: `my_setting: float = 1.0`.
    Raises UserError if a value is not allowed.
    """

    # fmt: off
    vocab_size: int = setting(
        50304, "model", "GPT-2's 50257, rounded up; the manifest of packed data replaces this",
        high=2**16)
    n_layer: int = setting(12, "model", "transformer blocks", high=1000)
    n_head: int = setting(6, "model", "attention heads")
    n_embd: int = setting(768, "model", "channels")
    max_ngram: int = setting(
        0, "model", "longest n-gram hashed into the n-gram table; 0 or 1 disables it",
        low=0, high=32)
    ngram_rows: int = setting(
        2**18, "model", "rows of the n-gram table; n-grams with equal hashes share a row")
    ngram_dropout: float = setting(
        0.0, "model", "probability that training drops an n-gram; reduces overfitting", high=0.99)
    key_shift: int = setting(
        0, "model", "positions to shift keys right; 1 lets one layer be an induction head", low=0)
    logit_softcap: float = setting(
        0.0, "model", "s: bound logits z to (-s, s) by s * tanh(z / s); 0 disables it")
    dtype: Literal["auto", "bfloat16", "float32"] = setting(
        "auto", "model", "dtype of matmuls; auto picks bfloat16 if the device supports it natively")
    seed: int = setting(1337, "model", "seed of the initial weights and of --shuffle", low=0)

    batch_size: int = setting(512, "training", "sequences per step, summed over all processes")
    sequence_length: int = setting(1024, "training", "tokens per sequence")
    num_iterations: int = setting(5100, "training", "optimizer steps")
    learning_rate: float = setting(
        0.0036, "training", "learning rate of AdamW (embeddings, head) and Adagrad (n-gram table)")
    muon_learning_rate: float = setting(
        0.00036, "training", "learning rate of Muon (the matrices of the blocks)")
    muon_momentum: float = setting(0.95, "training", "Muon's momentum", high=0.9999)
    warmdown_iters: int = setting(
        1450, "training", "number of final steps over which learning rates decay to 0", low=0)

    train_files: str = setting(
        "data/fineweb10B/fineweb_train_*.bin", "data",
        "glob of the training shards, read in name order")
    val_files: str = setting(
        "data/fineweb10B/fineweb_val_*.bin", "data", "glob of the validation shards")
    allow_repeat: bool = setting(False, "data", "start over when the training tokens run out")
    shuffle: bool = setting(
        False, "data", "in each epoch, cut the tokens at new places and shuffle the pieces")

    val_loss_every: int = setting(
        125, "validation", "steps between validations; 0 validates only after the last step", low=0)
    val_tokens: int = setting(
        10485760, "validation",
        "tokens to validate on, from the start of val_files; 0 takes all, up to 1M", low=0)
    target_val_loss: float = setting(
        3.28, "validation", "printed next to the result unless 0; has no other effect")

    run_id: str = setting(
        "", "checkpoints", "name of the log and the checkpoint folder; default: a timestamp")
    log_dir: str = setting("logs", "checkpoints", "folder for logs and checkpoints")
    save_every: int = setting(
        0, "checkpoints", "steps between checkpoints; 0 saves only if interrupted", low=0)
    keep_checkpoints: int = setting(2, "checkpoints", "number of recent checkpoints to keep")
    resume: str = setting(
        "", "checkpoints", "checkpoint to resume from; auto picks the newest of run_id, if any")
    init: str = setting(
        "", "checkpoints", "model.pt, best.pt or checkpoint whose weights a new run starts from")

    device: Literal["auto", "cuda", "cpu"] = setting(
        "auto", "machine", "auto picks cuda if PyTorch sees a GPU")
    device_batch_size: int = setting(
        64, "machine", "maximum sequences per forward pass; lower it to save memory")
    compile: bool = setting(
        True, "machine", "use torch.compile; False starts sooner but trains more slowly")
    comm_timeout: int = setting(
        600, "machine", "seconds that a rank waits for the others before the run fails")
    # fmt: on

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            choices = get_args(field.type)  # the values of a Literal
            if field.type in (int, float):
                check_number(field, value)
            elif choices and value not in choices:
                raise UserError(
                    f"{field.name}={value!r} must be one of {', '.join(map(str, choices))}"
                )
        if self.n_embd % (2 * self.n_head):
            raise UserError(
                f"n_embd={self.n_embd} must be a multiple of 2 * n_head = {2 * self.n_head}"
            )
        if self.key_shift >= self.sequence_length:
            limit = f"sequence_length={self.sequence_length}"
            raise UserError(f"key_shift={self.key_shift} must be less than {limit}")
        if self.logit_softcap and not 1 <= self.logit_softcap <= 1000:
            raise UserError(f"logit_softcap={self.logit_softcap} must be 0 or between 1 and 1000")
        if not re.fullmatch(r"([\w-][\w.-]*)?", self.run_id):
            raise UserError(f"run_id={self.run_id!r} may contain only letters, digits and '-_.'")
        if self.resume == "auto" and not self.run_id:
            raise UserError("--resume=auto needs --run_id to know which run to resume")


def check_number(field, value):
    """Raise UserError unless value is a number within the range of its setting."""
    low, high = field.metadata.get("range", (None, 2**31 - 1))
    if low is None:
        low = 1 if field.type is int else 0
    types = int if field.type is int else (int, float)
    if not isinstance(value, types) or not low <= value <= high:
        limits = f"between {low} and {high}, of type {field.type.__name__}"
        raise UserError(f"{field.name}={value!r} must be a number {limits}")


# A resumed run may change these settings. All others must match the checkpoint, except that
# num_iterations may increase. The data may be moved to other files, but not change.
CHANGEABLE_ON_RESUME = (
    "train_files", "val_files", "allow_repeat", "val_loss_every", "target_val_loss",
    "run_id", "log_dir", "save_every", "keep_checkpoints", "resume", "init",
    "device", "device_batch_size", "compile", "comm_timeout",
)  # fmt: skip

# --preset=NAME replaces defaults; settings on the command line override the preset.
PRESETS = {
    "record7": ("the defaults: GPT-2 124M on FineWeb, for eight 80 GB GPUs", {}),
    "24gb": ("the same run on one 24 GB GPU", dict(device_batch_size=32)),
    "candidate": (
        "record 7 with bigrams, key shift and soft-cap in 4600 steps; untested",
        dict(
            max_ngram=2, ngram_rows=251519, key_shift=1, logit_softcap=15.0, num_iterations=4600
        ),
    ),
    "cpu": (
        "the CPU record: 15 s of training on 2 cores; `bash run.sh` prepares its data",
        dict(
            device="cpu",
            train_files="data/torch_sources/train_*.bin",
            val_files="data/torch_sources/val_*.bin",
            vocab_size=257, n_layer=2, n_head=1, n_embd=128, max_ngram=6, key_shift=1,
            batch_size=16, sequence_length=256, num_iterations=220, warmdown_iters=100,
            learning_rate=0.03, muon_learning_rate=0.002,
            val_loss_every=55, val_tokens=420864, target_val_loss=1.32,
        ),
    ),
    "text": (
        "for your own text, packed into data/mine; 3 minutes of training on 2 cores",
        dict(
            train_files="data/mine/train_*.bin",
            val_files="data/mine/val_*.bin",
            allow_repeat=True, shuffle=True,
            vocab_size=257, n_layer=4, n_head=2, n_embd=128,
            max_ngram=6, ngram_rows=2**18, ngram_dropout=0.6, key_shift=1, logit_softcap=15.0,
            batch_size=16, sequence_length=256,
            num_iterations=1040, warmdown_iters=840,
            learning_rate=0.004, muon_learning_rate=0.0015,
            val_loss_every=260, val_tokens=0, target_val_loss=0.0, save_every=260,
        ),
    ),
}  # fmt: skip


def parse_args(argv):
    """Return the Hyperparameters specified by arguments such as --n_layer=6.

    Raises UserError for an unknown name or a value that is not allowed.
    """

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
        allow_abbrev=False,
    )
    parser.error = refuse
    parser.add_argument("--preset", choices=PRESETS, default="record7", help=argparse.SUPPRESS)
    converters = {bool: boolean, int: int, float: float}
    groups = {}
    for field in dataclasses.fields(Hyperparameters):
        title = field.metadata.get("group", "other")
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        choices = get_args(field.type)  # the values of a Literal
        help = field.metadata.get("help", "") + (f" ({', '.join(choices)})" if choices else "")
        groups[title].add_argument(
            f"--{field.name}",
            type=converters.get(field.type, str),
            choices=choices or None,
            default=field.default,
            metavar=str(field.default) or "''",  # --help shows the default here
            help=help.replace("%", "%%"),
        )
    # Each pass may change the defaults of the next one: first to those of the preset, then to those
    # that fit the data. Values on the command line take precedence in all of them.
    preset = parser.parse_known_args(argv)[0].preset
    parser.set_defaults(**PRESETS[preset][1])
    args = parser.parse_args(argv)
    parser.set_defaults(vocab_size=vocab_size_of(args.train_files, args.vocab_size))
    if args.val_files != parser.get_default("val_files"):
        parser.set_defaults(target_val_loss=0.0)  # the default target is for other data
    values = vars(parser.parse_args(argv))
    del values["preset"]
    return Hyperparameters(**values)


def vocab_size_of(train_files, default):
    """Return the vocabulary size of shards that data/pack.py wrote, or the default for others."""
    path = Path(train_files).parent / "manifest.json"
    if not path.is_file():
        return default
    try:
        size = int(json.loads(path.read_text(encoding="utf-8")).get("vocab_size", default))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path} is damaged: pack the data again, or move it away") from None
    return size if size < 1024 else (size + 127) // 128 * 128  # rounded up for speed


def boolean(text):
    """Parse "true" or "false", case-insensitively. Raises ValueError for anything else."""
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


# ---- Model: GPT-2 with rotary positions, RMSNorm, QK-norm, ReLU^2 and zero-initialized projections
def norm(x):
    """RMSNorm over the last dimension, without a gain."""
    return F.rms_norm(x, (x.size(-1),), eps=2**-23)  # float32's epsilon, even if x is bfloat16


class CastedLinear(nn.Linear):
    """A linear layer that keeps its weight in float32 and multiplies in the dtype of x."""

    def forward(self, x):
        return F.linear(x, self.weight.type_as(x))


class Rotary(nn.Module):
    """Rotary position embedding: rotates channels i and i + D/2. https://arxiv.org/abs/2104.09864"""

    def __init__(self, head_dim, sequence_length):
        super().__init__()
        frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2).float() / head_dim)
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
        self.n_head = args.n_head
        self.key_shift = args.key_shift
        self.c_q = CastedLinear(C, C, bias=False)  # separate: Muon orthogonalizes each on its own
        self.c_k = CastedLinear(C, C, bias=False)
        self.c_v = CastedLinear(C, C, bias=False)
        self.c_proj = CastedLinear(C, C, bias=False)
        nn.init.zeros_(self.c_proj.weight)  # every block starts as the identity
        self.rotary = Rotary(C // args.n_head, args.sequence_length)

    def split_heads(self, x):  # (B, T, C) to (B, T, H, D)
        return x.unflatten(-1, (self.n_head, -1))

    def forward(self, x):  # (B, T, C)
        q = norm(self.split_heads(self.c_q(x)))
        k = norm(self.split_heads(self.c_k(x)))
        v = self.split_heads(self.c_v(x))
        # Shift keys key_shift positions to the right before the rotary embedding, so that they are
        # rotated for their new positions. Zeros fill the gap.
        k = F.pad(k, (0, 0, 0, 0, self.key_shift, 0))[:, : k.size(1)]
        # Attention takes (B, H, T, D), and its result has the memory layout of q. Rotating before
        # transposing saves a copy on GPUs, which flatten would need otherwise.
        q, k, v = (z.transpose(1, 2) for z in (self.rotary(q), self.rotary(k), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
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


class NgramTable(nn.Module):
    """A second embedding table, indexed by hashes of the last 2, 3, ... max_ngram tokens.

    The rows found for a position are summed. The gradient is sparse. While gradients are enabled
    (nothing here calls eval()), n-grams are dropped with probability `dropout`, and the others are
    scaled up to compensate.
    """

    def __init__(self, args):
        super().__init__()
        self.max_ngram = args.max_ngram
        self.dropout = args.ngram_dropout
        self.weight = nn.Parameter(torch.zeros(args.ngram_rows, args.n_embd))

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

        The mask is a hash of the n-gram and of the sum of its sequence's tokens. Unlike random
        numbers, it depends on neither the number of ranks nor earlier batches. All copies of an
        n-gram in a sequence are kept, or all are dropped. The sum includes later tokens, but a hash
        is too irregular to reveal them to the model.
        """
        salt = 2 * inputs.sum(1)[:, None, None] + 1  # odd, so that no bits of the n-gram are lost
        # Multiplicative hashing: the highest 20 bits of the product are mixed best. The multiplier
        # is that of Knuth's MMIX generator.
        random = ngrams * salt * 6364136223846793005 >> 44  # uniform in [-2**19, 2**19)
        return random >= (self.dropout - 0.5) * 2**20


class GPT(nn.Module):
    """GPT-2 whose embedding and output head share their weights.

    Weights are float32; activations and matmuls have the given dtype.
    """

    def __init__(self, args, dtype=torch.float32):
        super().__init__()
        self.dtype = dtype
        self.wte = nn.Embedding(args.vocab_size, args.n_embd)
        self.h = nn.ModuleList(Block(args) for _ in range(args.n_layer))
        self.lm_head = CastedLinear(args.n_embd, args.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight  # tied, with nn.Linear's initialization
        self.ngrams = NgramTable(args) if args.max_ngram > 1 else None
        self.logit_softcap = args.logit_softcap

    def forward(self, inputs, targets=None):
        """Return the mean cross-entropy (float32, in nats), or float32 logits of shape (B, T, V).

        inputs: (B, T) int64, T at most sequence_length. targets: the same shape; entries of -1
        are ignored. Without targets, the logits are returned.
        """
        # The table lookup is not compiled. Doing it first keeps the rest in one compiled graph.
        ngrams = 0.0 if self.ngrams is None else self.ngrams(inputs)
        x = (self.wte(inputs) + ngrams).to(self.dtype)  # (B, T, C)
        for block in self.h:
            x = block(x)
        x = norm(x)
        weight = self.lm_head.weight
        if targets is None:
            return compute_logits(x, weight.type_as(x), self.logit_softcap)
        x, targets = x.flatten(0, 1), targets.flatten()
        needs_grad = torch.is_grad_enabled()  # inside apply, grad mode is always off
        return ChunkedCrossEntropy.apply(x, weight, targets, self.logit_softcap, needs_grad)


def compute_logits(x, weight, softcap):
    """Return float32 logits (..., V) of hidden states x (..., C), for training and inference."""
    logits = F.linear(x, weight).float()
    if softcap:
        # softcap * tanh(logits / softcap), written with a sigmoid because inductor fuses it better
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
        # Small chunks are slow: one has at least as many logits as 512 tokens of GPT-2.
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


# ---- Muon. To use it elsewhere, copy this section: it needs torch and torch.distributed as dist -
def gram(X):
    """Return X X^T for X of shape (M, N) or (K, M, N)."""
    M, N = X.shape[-2:]
    if X.is_cuda or M < 512 or N < 2 * M:
        return X @ X.mT
    # The result is symmetric. For a large matrix a CPU is faster if it computes three of the four
    # blocks and copies the fourth. On a GPU, the additional kernel launches would probably cost
    # more.
    half = M // 2
    top = X[..., :half, :]
    bottom = X[..., half:, :]
    A = X.new_empty(*X.shape[:-1], M)
    torch.matmul(top, top.mT, out=A[..., :half, :half])
    torch.matmul(top, bottom.mT, out=A[..., :half, half:])
    torch.matmul(bottom, bottom.mT, out=A[..., half:, half:])
    A[..., half:, :half] = A[..., :half, half:].mT
    return A


def zeropower_via_newtonschulz5(G, dtype=torch.bfloat16):
    """Orthogonalize G = U S V^T with five Newton-Schulz iterations: return approximately U V^T.

    G: (M, N) or (K, M, N), of any float dtype; it is not modified. If its norm is below 1e-6, the
    result is smaller. dtype: dtype of the matmuls. Returns a bfloat16 tensor of the same shape.
    Raises ValueError if G is not 2-D or 3-D.

    An iteration replaces X with a X + B X, where B = b A + c A A and A = X X^T. It turns a singular
    value s into a s + b s^3 + c s^5, so that small ones grow quickly. After five iterations, all
    but the smallest lie between 0.7 and 1.2.
    Source: https://kellerjordan.github.io/posts/muon/
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
    wider_dtype = torch.promote_types(G.dtype, dtype)
    X = (G / (frobenius + 1e-7).to(wider_dtype)).to(dtype)
    tall = G.size(-2) > G.size(-1)  # then the iteration is X = a X + X B with A = X^T X
    m, n = sorted(G.shape[-2:])
    # If one side is at least twice the other, it is cheaper to compose iterations: multiply the
    # (m, m) factors of the first two together, and then of the last three, so that X is
    # multiplied only twice. Composing all five loses too much precision in bfloat16.
    schedule = (2, 3) if n >= 2 * m else (1, 1, 1, 1, 1)
    if n >= 2 * m:
        identity = torch.eye(m, dtype=dtype, device=G.device)
    for iterations in schedule:
        A = gram(X.mT if tall else X)  # (m, m)
        B = multiply_add(A, A, A, beta=b, alpha=c)
        if iterations == 1:
            X = multiply_add(X, X, B, beta=a) if tall else multiply_add(X, B, X, beta=a)
            continue
        P = torch.add(B, identity, alpha=a)  # a I + B
        for _ in range(iterations - 1):
            A = multiply_add(A, B, A, beta=a)
            A = multiply_add(A, A, B, beta=a)  # (a I + B) A (a I + B), the next iteration's A
            B = multiply_add(A, A, A, beta=b, alpha=c)
            P = multiply_add(P, B, P, beta=a)  # (a I + B) P
        X = X @ P.mT if tall else P @ X
    return X.bfloat16()


class Muon(torch.optim.Optimizer):
    """MomentUm Orthogonalized by Newton-Schulz: replaces Nesterov momentum U S V^T with U V^T.

    Every direction in weight space is learned at the same rate. Each matrix belongs to one rank,
    which alone keeps its momentum and computes its update. All ranks apply the update. Small
    matrices of the same shape are processed together (see stacks_of).

    params: parameters with at least two dimensions; shape (M, ...) is flattened to (M, N). Their
    gradients must already be summed or averaged over the ranks; either all ranks have the gradient
    of a parameter, or none. lr: RMS change of an entry per step. dtype: used for the matmuls.
    Raises ValueError if a parameter or a value is invalid.

    Unlike torch.optim.Muon, it scales updates by sqrt(max(M, N)). To convert an lr from there,
    multiply it by 0.2 if adjust_lr_fn is "match_rms_adamw", or divide it by sqrt(N) if it is
    "original". Both optimizers shrink weights by lr * weight_decay per step, so also multiply
    weight_decay by old lr / new lr.
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
            for stack in stacks_of(group["params"]):
                stack = [p for p in stack if p.grad is not None]
                if stack:
                    stacks.append(stack)
            pending = []
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
            torch.add(p.grad, momentum, alpha=group["momentum"], out=momentum)
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
    if n >= 2 * m:
        return m * m * (14 * m + 4 * n)
    return m * m * (5 * m + 10 * n)


def stacks_of(params):
    """Split params into stacks, sorted by the cost of one matrix, the most expensive first.

    Up to eight matrices of the same shape, with at most 2**20 entries together, form a stack and
    share batched matmuls. Stacks must not depend on the number of ranks, because the size of a
    batched matmul can change the last bits of its result.
    """
    stacks = []
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
# A shard is a header of int32 values (magic number 20240520, version 1, number of tokens, zeros),
# then the tokens as uint16.
HEADER_SIZE = 256


class DataError(UserError):
    """A shard is unusable. Other machines may have a good copy, so each rank reports its own."""


def check_shard(path):
    """Return (number of tokens, an identity that changes when the file is replaced or modified).

    Raises DataError if path is not a complete shard.
    """
    if not os.path.isfile(path):  # also rejects a named pipe, which would block
        raise DataError(f"{path} is not a file: fetch data with data/fineweb.py or data/pack.py")
    header = np.fromfile(path, "<i4", HEADER_SIZE).tolist()
    status = os.stat(path)
    tokens, odd_bytes = divmod(status.st_size - 4 * HEADER_SIZE, 2)
    if tokens < 1 or odd_bytes or header != [20240520, 1, tokens] + [0] * (HEADER_SIZE - 3):
        raise DataError(f"{path} is not a complete shard of tokens: download or pack it again")
    return tokens, (status.st_dev, status.st_ino, status.st_mtime_ns)


def crc32_of_file(path):
    """Return the crc32 of a whole file."""
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(2**24):
            checksum = zlib.crc32(block, checksum)
    return checksum


@functools.lru_cache(2)
def shuffled_starts(seed, epoch, total_tokens, T):
    """Return the positions at which the sequences of an epoch start, in random order.

    The first sequence of T tokens starts at a random position below T, the next one where it ends,
    and so on. The last one may wrap around to the start of the stream. An epoch leaves out
    total_tokens % T tokens.
    """
    generator = np.random.default_rng((seed, epoch))
    return generator.integers(T) + T * generator.permutation(total_tokens // T)


@dataclasses.dataclass
class DistributedDataLoader:
    """Reads batches of tokens from all shards, laid end to end and repeated.

    The sequences are consecutive, unless shuffle_seed is given.

    At each step, rank r takes the r-th of world_size equal parts of the global batch, so the tokens
    of a step depend on neither the number of ranks nor the size of micro-batches. Raises DataError
    if a shard is missing, incomplete or changed, or holds a token outside the vocabulary.
    """

    pattern: str  # glob of the shards, which are sorted by name
    batch_size: int  # sequences per step, summed over all ranks
    T: int  # tokens per sequence
    rank: int
    world_size: int
    device: torch.device
    vocab_size: int = 65536
    shuffle_seed: int | None = None  # None reads the tokens in order
    position: int = 0  # where the next batch starts in the stream, in tokens
    hash_sum: int = 0  # hash of the sequences that this rank has trained on
    batch_hash: int = 0  # hash of this rank's sequences in the latest batch

    def __post_init__(self):
        self.paths = sorted(glob.glob(self.pattern))
        if not self.paths:
            raise DataError(
                f"no file matches {self.pattern!r}: run data/fineweb.py or data/pack.py"
            )
        for folder in {Path(path).parent for path in self.paths}:
            if (folder / ".pack").exists():
                raise DataError(
                    f"{folder} is being packed, or packing was interrupted: run data/pack.py"
                )
        if self.batch_size % self.world_size:
            raise UserError(
                f"batch_size={self.batch_size} must be a multiple of the {self.world_size} ranks"
            )
        self.tokens_per_step = self.batch_size * self.T
        self.shards = [check_shard(path) for path in self.paths]
        self.ends = np.cumsum([size for size, _ in self.shards]).tolist()  # positions in the stream
        self.total_tokens = self.ends[-1]
        self.contents = []  # for each shard: its size and a crc32 of its first tokens
        for (size, _), end in zip(self.shards, self.ends):
            beginning = self.read(end - size, min(size, 100_000))
            self.contents.append((size, zlib.crc32(beginning)))
        if len(set(self.contents)) < len(self.paths):
            raise DataError(f"{self.pattern!r} matches a shard and a copy of it: remove one")

    def read(self, start, count):
        """Return `count` tokens (uint16) from position `start` of the repeated stream.

        Raises DataError if a shard has changed or holds a token outside the vocabulary.
        """
        parts = []
        while count > 0:
            start %= self.total_tokens
            shard = np.searchsorted(self.ends, start, side="right")
            path = self.paths[shard]
            if check_shard(path) != self.shards[shard]:
                raise DataError(f"{path} changed while in use: restore it and start again")
            tokens_left = self.ends[shard] - start
            tokens_before = self.shards[shard][0] - tokens_left
            offset = 4 * HEADER_SIZE + 2 * tokens_before  # bytes
            part = np.fromfile(path, "<u2", min(count, tokens_left), offset=offset)
            if part.max() >= self.vocab_size:
                raise DataError(
                    f"{path} holds token {part.max()}, but vocab_size={self.vocab_size}: use "
                    f"train_files and val_files of the same encoding, or raise --vocab_size"
                )
            parts.append(part)
            start += len(part)
            count -= len(part)
        return np.concatenate(parts)

    def read_batch(self):
        """Return (inputs, targets), int64 of shape (batch_size // world_size, T), on device.

        The position does not move until advance() is called, so a failed step can be repeated.
        """
        count = self.batch_size // self.world_size
        first = self.position // self.T + self.rank * count
        sequences = self.read_sequences(first, count)
        self.batch_hash = 0
        for i, sequence in enumerate(sequences, first):
            # A different odd weight per position makes the hash depend on the order of sequences.
            self.batch_hash += (2 * i + 1) * zlib.crc32(sequence)
        # Two tensors that share no memory, because evaluate masks some of the targets.
        inputs = torch.from_numpy(sequences[:, :-1].astype(np.int64, order="C"))
        targets = torch.from_numpy(sequences[:, 1:].astype(np.int64, order="C"))
        return inputs.to(self.device), targets.to(self.device)

    def read_sequences(self, first, count):
        """Return the sequences number `first` to `first + count - 1` of the run.

        They are a uint16 array of shape (count, T + 1). The last token of a sequence is only a
        target.
        """
        if self.shuffle_seed is None:
            tokens = self.read(first * self.T, count * self.T + 1)
            return np.lib.stride_tricks.sliding_window_view(tokens, self.T + 1)[:: self.T]
        sequences = []
        for number in range(first, first + count):
            epoch, index = divmod(number, self.total_tokens // self.T)
            starts = shuffled_starts(self.shuffle_seed, epoch, self.total_tokens, self.T)
            sequences.append(self.read(starts[index], self.T + 1))
        return np.stack(sequences)

    def advance(self):
        """Move past the batch that read_batch returned."""
        self.position += self.tokens_per_step
        self.hash_sum += self.batch_hash

    def next_batch(self):
        """Read a batch and move past it."""
        batch = self.read_batch()
        self.advance()
        return batch

    def data_hash(self):
        """Collective: return a hash (12 hex digits) of the tokens all ranks have trained on."""
        total = sum_over_ranks(torch.tensor(self.hash_sum % 2**48)).item()
        return f"{total % 2**48:012x}"

    def fingerprint(self):
        """Return a checksum of the last sequences read and of the next token or sequence.

        Returns None if a shard has changed, so that a checkpoint can still be saved.
        """
        try:
            if self.shuffle_seed is not None:
                last = self.position // self.T
                first = max(0, last - 100_000 // self.T)
                return zlib.crc32(self.read_sequences(first, last + 1 - first).tobytes())
            start = max(0, self.position - 100_000)
            return zlib.crc32(self.read(start, self.position + 1 - start))
        except (DataError, OSError):
            return None

    def state_dict(self):
        """Collective: return the position, from which any number of ranks can continue."""
        data_hash = self.data_hash()
        return dict(position=self.position, data_hash=data_hash, fingerprint=self.fingerprint())

    def load_state_dict(self, state):
        """Move to a saved position. Raises DataError unless the same tokens precede it."""
        self.position = state["position"]
        # data_hash sums over the ranks, so only rank 0 starts from the saved total.
        self.hash_sum = int(state["data_hash"], 16) if self.rank == 0 else 0
        saved = state["fingerprint"]
        if saved is not None and self.fingerprint() != saved:
            raise DataError(f"{self.pattern!r} no longer holds the tokens that were trained on")


# ---- Training: optimizers, one step, one evaluation ---------------------------------------------
class StopTraining(Exception):
    """Raised to make training save a checkpoint and exit. failure: why, or empty after a signal."""

    def __init__(self, failure=""):
        super().__init__(failure)
        self.failure = failure


class StopRequest:
    """Remembers a signal until training can stop at a safe point."""

    def __init__(self):
        self.time = None  # when the first signal arrived
        self.parent = os.getppid()

    def catch_signals(self):
        """Handle SIGTERM, SIGINT, SIGUSR1 and SIGHUP unless ignored already, e.g. by nohup."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.on_signal)

    def on_signal(self, number, frame):
        """Remember a signal; if another arrives more than two seconds later, exit immediately.

        Signals within two seconds count as one: after Ctrl-C, for example, workers receive a signal
        from the terminal and another one from torchrun.
        """
        if self.time is None:
            self.time = time.monotonic()
            with contextlib.suppress(OSError):  # the terminal may be closed
                os.write(
                    2,
                    b"saving a checkpoint; another signal in 2 seconds or later exits at once\n",
                )
        elif time.monotonic() - self.time > 2:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def check(self):
        """In a single process, raise StopTraining if a signal came. See check_ranks for several."""
        one_process = not dist.is_initialized() or dist.get_world_size() == 1
        if self.time is not None and one_process:
            raise StopTraining

    def check_ranks(self, failure=""):
        """Collective: raise StopTraining on all ranks if one of them must stop.

        failure: why this rank cannot continue, or empty if it can. A rank must
        also stop if its parent, torchrun, was killed.
        """
        orphaned = dist.is_initialized() and os.getppid() != self.parent
        must_stop = self.time is not None or orphaned
        stops = sum_over_ranks(torch.tensor([int(must_stop), int(failure != "")]))
        if stops[1] > 0:
            failures = all_gather_objects(failure)
            raise StopTraining(", ".join(text for text in failures if text))
        if stops[0] > 0:
            raise StopTraining


def lr_multiplier(step, args):
    """Return the factor applied to all learning rates: 1, then a linear decay to 0."""
    return min(1.0, (args.num_iterations - step) / max(1, args.warmdown_iters))


def build_optimizers(gpt, args, rank, world_size):
    """Return [AdamW, Muon], and Adagrad if there is an n-gram table.

    Raises UserError unless every parameter is in exactly one optimizer.
    """
    matrices = [p for p in gpt.h.parameters() if p.ndim == 2]
    tables = [gpt.ngrams.weight] if gpt.ngrams is not None else []
    others = [p for p in gpt.parameters() if p not in {*matrices, *tables}]
    adamw = torch.optim.AdamW(others, args.learning_rate, (0.9, 0.95), weight_decay=0, fused=True)
    rate, momentum = args.muon_learning_rate, args.muon_momentum
    muon = Muon(matrices, rate, momentum, rank=rank, world_size=world_size, dtype=gpt.dtype)
    optimizers = [adamw, muon]
    if tables:
        optimizers.append(torch.optim.Adagrad(tables, args.learning_rate))
    if Counter(p for o in optimizers for p in params_of(o)) != Counter(gpt.parameters()):
        raise UserError("every parameter of the model must be in exactly one optimizer")
    return optimizers


def sum_over_ranks(tensor):
    """Collective: sum a tensor over all ranks in place and return it."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def sync_gradients(model):
    """Collective: sum all gradients over the ranks in one all-reduce; sparse ones become dense."""
    used = [p for p in model.parameters() if p.grad is not None]
    flat = torch.cat([p.grad.to_dense().flatten() for p in used])
    dist.all_reduce(flat)
    for p, total in zip(used, flat.split([p.numel() for p in used])):
        p.grad = total.view_as(p)


def micro_batch_size(sequences, max_size):
    """Return the largest divisor of `sequences` up to max_size, for equal micro-batches."""
    return next(n for n in range(min(sequences, max_size), 0, -1) if sequences % n == 0)


def train_step(model, optimizers, inputs, targets, lr_scale, args, check_stop=lambda: None):
    """Collective: do one optimizer step and return (loss, norms).

    inputs, targets: (B, T) int64, this rank's part of the batch. loss: mean over all ranks, NaN if
    a gradient is not finite. norms: one per parameter, only for reporting which gradients of this
    rank are not finite. check_stop is called before each micro-batch; if it raises
    StopTraining, the model and the optimizers are unchanged.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    size = micro_batch_size(len(inputs), args.device_batch_size)
    loss = 0.0
    try:
        for x, y in zip(inputs.split(size), targets.split(size)):
            check_stop()
            # With this scaling, sums over micro-batches and ranks are means.
            micro_loss = model(x, y) * (size / len(inputs) / world_size)
            micro_loss.backward()
            loss += micro_loss.detach()
    except StopTraining:
        model.zero_grad()
        raise
    gradients = [p.new_zeros(1) if p.grad is None else p.grad for p in model.parameters()]
    gradients = [g._values() if g.is_sparse else g for g in gradients]
    # The norms are taken before the all-reduce, which would hide which rank is at fault.
    norms = torch.stack(torch._foreach_norm(gradients))
    loss, norms_sum = sum_over_ranks(torch.stack([loss, norms.sum()]))
    if world_size > 1:
        sync_gradients(model)
    # A gradient that is not finite is applied, too, but the caller then ends the run unsaved.
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            full_lr = group.setdefault("initial_lr", group["lr"])  # stored at the first step
            group["lr"] = full_lr * lr_scale
        optimizer.step()
        optimizer.zero_grad()
    return torch.where(norms_sum.isfinite(), loss, torch.nan), norms


@torch.no_grad()
def evaluate(model, val_loader, val_tokens, check_stop=lambda: None):
    """Collective: return the mean loss over exactly the first val_tokens tokens.

    The result is the same on all ranks. check_stop is called before each batch.
    """
    val_loader.position = 0
    sequences = val_tokens // val_loader.T
    total = 0.0
    for first in range(0, sequences, val_loader.batch_size):
        check_stop()
        inputs, targets = val_loader.next_batch()
        sequences_left = max(0, sequences - first - val_loader.rank * len(inputs))
        targets[sequences_left:] = -1  # the last batch may be larger than needed
        total += model(inputs, targets).double() * (targets != -1).sum()
    return sum_over_ranks(total).item() / val_tokens


# ---- Log and checkpoints ------------------------------------------------------------------------
class Log:
    """The log, log_dir/run_id.txt, and the folder of checkpoints, log_dir/run_id/.

    `log(line)` prints a line and appends it to the log, on rank 0 only. Raises UserError if the
    files belong to another run, are in use or cannot be written.
    """

    def __init__(self, args, run_id, rank):
        self.path = Path(args.log_dir, f"{run_id}.txt")
        self.folder = Path(args.log_dir, run_id)
        self.num_iterations = args.num_iterations
        self.seconds = Counter()  # spent in each phase
        self.checkpoints = []  # file names of this run's checkpoints that still exist
        self.val_hash = ""  # hash of the validation tokens
        self.best_loss = None  # validation loss of the weights in best.pt, if there are any
        self.result = ""  # the last line of a finished log
        self.file = None
        self.live = False  # whether a progress bar replaces the per-step lines
        if rank == 0:
            self.open(args)

    def open(self, args):
        """Open the log and lock it. A log without a training step is overwritten."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "a", buffering=1, encoding="utf-8")
        except OSError as error:
            fix = "choose another --log_dir or --run_id"
            raise UserError(f"cannot write {self.path} ({error.strerror}): {fix}") from None
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is writing {self.path}: stop it first") from None
        # The log may be a symlink to a device, such as /dev/null.
        lines = self.path.read_text("utf-8").splitlines() if self.path.is_file() else []
        steps = [line for line in lines if line.startswith("step:")]
        results = [line for line in lines if line.startswith("result ")]
        trained = any(not line.startswith("step:0/") for line in steps)
        if trained and not args.resume:
            raise UserError(f"{self.path} exists: pass --resume=auto, or another --run_id")
        if results:
            self.result = results[-1]
            # The line begins with "step:220/220 val_loss:".
            finished_steps = int(steps[-1].split("/")[1].split()[0])
            if args.resume != "auto" or args.num_iterations > finished_steps:
                raise UserError(
                    f"{self.path} already finished after {finished_steps} steps: to go on, pass "
                    f"--resume=CHECKPOINT with another --run_id, or --init={self.folder}/model.pt"
                )
        elif not trained and self.path.is_file():
            self.file.truncate(0)
        self.live = tqdm is not None and os.isatty(1) and os.isatty(2)

    def __call__(self, line, show=True):
        """Write a line to the log and, if show, to the terminal. Ranks other than 0 do nothing."""
        if self.file is None:
            return
        outputs = [self.file]
        if show and sys.stdout is not None:
            outputs.append(sys.stdout)
        for output in outputs:
            # Keep training if the disk is full or the terminal is gone.
            with contextlib.suppress(OSError):
                if self.live:
                    tqdm.write(line, file=output)
                else:
                    print(line, file=output)
                output.flush()

    @contextlib.contextmanager
    def timed(self, phase):
        """Add the duration of a with block to the total of a phase, unless the block raises.

        The block must end by synchronizing with the device, for example with .item().
        """
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def progress(self, step, result, more="", show=True):
        """Log a result after `step` steps, with the training time so far."""
        ms = 1000 * self.seconds["train"]
        average = ms / max(step, 1)
        times = f"train_time:{ms:.0f}ms step_avg:{average:.2f}ms"
        self(f"step:{step}/{self.num_iterations} {result} {times}{more}", show)

    def header(self, args, gpt, optimizers, train_loader, val_loader):
        """Log what defines a run: source, settings, environment, data, optimizers."""
        self(SOURCE, show=False)
        for name, value in vars(args).items():
            self(f"hyperparameter {name}={value!r}", show=False)
        self(f"torch:{torch.__version__} commit:{commit_of(Path(__file__).parent)}")
        ranks = val_loader.world_size
        threads = torch.get_num_threads()
        device = device_name(train_loader.device)
        self(f"device:{device} processes:{ranks} threads:{threads} products:{gpt.dtype}")
        micro_batch = val_loader.batch_size // ranks
        tokens = train_loader.total_tokens
        self(f"train_tokens:{tokens} val_hash:{self.val_hash} micro_batch:{micro_batch}")
        for optimizer in optimizers:
            values = sum(p.numel() for p in params_of(optimizer))
            self(f"{type(optimizer).__name__} parameters:{values}")
        if args.dtype == "auto" and gpt.dtype == torch.float32:
            self("dtype=auto picked float32, because this device has no native bfloat16")

    def summary(self, args, train_loader, gpt, val_loss):
        """Log the time of each phase, speed, memory and the result; save the weights.

        Raises UserError if the result or a weight is not finite, or the weights cannot be saved.
        """
        self(" ".join(f"{phase}:{seconds:.1f}s" for phase, seconds in self.seconds.items()))
        speed = train_loader.position / self.seconds["train"]
        # Training and validation compile one graph each. More graphs mean recompilation.
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        memory = peak_memory(train_loader.device)
        self(f"tokens/s:{speed:.0f} peak_memory:{memory:.0f}MiB graphs:{graphs}")
        path = self.folder / "model.pt"
        if not save_weights(gpt, args.num_iterations, val_loss, path, self, args):
            raise UserError(f"{path} was not written, so the final weights are lost: free space")
        self(f"weights: {path}; `bash run.sh sample` generates text from them")
        path = self.folder / "best.pt"
        if self.best_loss is not None and self.best_loss < val_loss and path.exists():
            self(f"weights of the best validation, val_loss:{self.best_loss:.4f}: {path}")
        target = f" target:{args.target_val_loss}" if args.target_val_loss else ""
        self(f"result val_loss:{val_loss:.4f}{target}")


def commit_of(folder):
    """Return the git commit of a folder, -dirty if it has uncommitted changes, "" without git."""
    command = ["git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


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


def check_finite(value, name):
    """Raise UserError if a number or tensor within nested dicts and lists is not finite."""
    if isinstance(value, dict):
        for key, part in value.items():
            check_finite(part, f"{name}: {key}")
    elif isinstance(value, (list, tuple)):
        for part in value:
            check_finite(part, name)
    elif isinstance(value, (float, torch.Tensor)) and not torch.as_tensor(value).isfinite().all():
        raise UserError(
            f"non-finite value in {name}: nothing is saved or loaded; lower the learning rates"
        )


def write_checkpoint(state, path, log):
    """Write a state atomically, by renaming a temporary file. Return whether this succeeded.

    The file ends with the crc32 of all bytes before it, which torch.load ignores. A failure is
    logged, for example a full disk.
    """
    partial = path.with_name("partial")
    try:
        with log.timed("checkpoint"), open(partial, "wb") as file:
            torch.save(state, file)
            file.flush()
            file.write(crc32_of_file(partial).to_bytes(4, "little"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        return True
    except (OSError, RuntimeError) as error:  # torch.save turns an OSError into a RuntimeError
        log(f"warning: {path.name} was not written ({error.__context__ or error})")
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)  # frees the space of the partial file
        return False


def save_weights(gpt, step, val_loss, path, log, args):
    """Write the weights after `step` steps (rank 0 does it); return whether this succeeded.

    Raises UserError if a weight is not finite.
    """
    weights = dict(
        step=step,
        hyperparameters=vars(args),
        dtype=str(gpt.dtype),
        val_loss=val_loss,
        val_hash=log.val_hash,
        model=gpt.state_dict(),
    )
    check_finite(weights, f"the weights for {path}")
    return log.file is None or write_checkpoint(weights, path, log)


def checkpoint_name(step):
    """Return the file name of the checkpoint after `step` steps; names sort by step."""
    return f"state_step{step:010d}.pt"


def save_checkpoint(gpt, optimizers, train_loader, log, args):
    """Collective: save what a run needs to resume, and delete old checkpoints.

    Only rank 0 writes; it returns False if that fails. The others return True. All ranks
    raise UserError if a value is not finite.
    """
    step = train_loader.position // train_loader.tokens_per_step
    name = checkpoint_name(step)
    checkpoints = [other for other in log.checkpoints if other != name] + [name]
    kept = checkpoints[-args.keep_checkpoints :]
    optimizer_states = []
    for optimizer in optimizers:
        get_state = getattr(optimizer, "full_state_dict", optimizer.state_dict)
        optimizer_states.append(get_state())
    state = dict(
        step=step,
        hyperparameters=vars(args),
        dtype=str(gpt.dtype),
        val_hash=log.val_hash,
        train_seconds=log.seconds["train"],
        files=kept,
        model=gpt.state_dict(),
        optimizer_names=[type(optimizer).__name__ for optimizer in optimizers],
        optimizers=optimizer_states,
        train_loader=train_loader.state_dict(),
    )
    check_finite(state, f"the state after step {step}")
    if log.file is None:
        return True
    if not write_checkpoint(state, log.folder / name, log):
        return False
    for old in checkpoints[: -args.keep_checkpoints]:
        (log.folder / old).unlink(missing_ok=True)
    log.checkpoints = kept
    return True


def checkpoints_in(folder):
    """Return the paths of a run's checkpoints, oldest first."""
    return sorted(folder.glob("state_step*[0-9].pt"))  # excludes state_step0000000001_copy.pt


def find_checkpoint(args, log):
    """Return (path, state) of the checkpoint to resume, or None to start from scratch.

    With resume=auto it is the run's newest complete one. Raises UserError if there are checkpoints
    but none is complete, or if the selected one belongs to another run.
    """
    paths = checkpoints_in(log.folder)
    if args.resume != "auto":
        same_folder = args.resume and Path(args.resume).parent.resolve() == log.folder.resolve()
        if paths and not same_folder:
            raise UserError(f"{log.folder} holds checkpoints: pass --resume, or another --run_id")
        paths = [Path(args.resume)] if args.resume else []
    for path in reversed(paths):
        if not is_complete(path):
            log(f"{path} is not a complete checkpoint")
            continue
        with reporting_bad_checkpoint(path):
            state = torch.load(path, map_location="cpu", weights_only=True)  # executes no code
            if "optimizers" not in state:
                raise UserError(f"{path} holds only weights: start a new run with --init={path}")
            check_state(state, path, args, log)
        return path, state
    if paths:
        raise UserError("no checkpoint is complete: check --resume, or pass another --run_id")
    if (log.folder / "model.pt").exists():
        raise UserError(f"{log.folder} holds the weights of a finished run: pass another --run_id")
    return None


def find_best_loss(log):
    """Set log.best_loss to the loss of best.pt, so that only a lower one replaces it."""
    path = log.folder / "best.pt"
    if is_complete(path):
        with reporting_bad_checkpoint(path):
            state = torch.load(path, map_location="cpu", weights_only=True)
            if state["val_hash"] == log.val_hash:
                log.best_loss = state.get("val_loss")


def is_complete(path):
    """Return whether a file that write_checkpoint wrote is there and undamaged."""
    # If a file ends with the crc32 of the bytes before it, its own crc32 is this constant.
    return path.is_file() and crc32_of_file(path) == 0x2144DF1C


@contextlib.contextmanager
def reporting_bad_checkpoint(path):
    """Convert any exception caused by a malformed file into a UserError that names the file."""
    try:
        yield
    except (UserError, OSError, MemoryError):
        raise
    except Exception as error:
        raise UserError(f"{path} is not a checkpoint of this run: {error!r}") from error


def different_settings(saved, args, names):
    """Return the saved values that differ from args, as arguments: "--n_layer=2 --seed=1"."""
    arguments = []
    for field in dataclasses.fields(args):
        # A setting that did not exist yet had the effect of its default.
        value = saved.get(field.name, field.default)
        if field.name in names and value != getattr(args, field.name):
            arguments.append(f"--{field.name}={value}")
    return " ".join(arguments)


def check_state(state, path, args, log):
    """Raise UserError unless a checkpoint was saved by a run with these settings and data."""
    saved = state["hyperparameters"]
    names = set(vars(args)) - set(CHANGEABLE_ON_RESUME)
    if saved["num_iterations"] <= args.num_iterations:  # a resumed run may be longer
        names.remove("num_iterations")
    different = different_settings(saved, args, names)
    if different:
        raise UserError(f"{path} was saved with other settings: pass {different}")
    if state["val_hash"] != log.val_hash:
        raise UserError(f"{path} was saved with different validation tokens: restore val_files")
    position = args.batch_size * args.sequence_length * state["step"]
    if state["train_loader"]["position"] != position:
        raise UserError(f"{path} is damaged: its step and its position in the data disagree")


def load_run_state(path, state, gpt, optimizers, train_loader, log):
    """Restore a run from a checkpoint. Raises UserError if its optimizers or data differ."""
    names = [type(optimizer).__name__ for optimizer in optimizers]
    with reporting_bad_checkpoint(path):
        if names != state["optimizer_names"]:
            raise UserError(f"{path} was saved with {state['optimizer_names']}, not {names}")
        check_finite(state, str(path))
        gpt.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            load_optimizer(optimizer, saved, path)
        train_loader.load_state_dict(state["train_loader"])
        log.seconds["train"] = float(state["train_seconds"])
        # A run deletes only checkpoints that it wrote, listed in "files". A foreign checkpoint may
        # list any name, so names that are not checkpoints in this folder are ignored.
        existing = {checkpoint.name for checkpoint in checkpoints_in(log.folder)}
        log.checkpoints = [name for name in state["files"] if name in existing]


def load_init(args, gpt):
    """Load the weights in args.init. Raises UserError unless they fit the settings of the model."""
    path = Path(args.init)
    if not is_complete(path):
        raise UserError(f"--init={path} is not a complete file of weights, such as model.pt")
    with reporting_bad_checkpoint(path):
        state = torch.load(path, map_location="cpu", weights_only=True)
        saved = state["hyperparameters"]
        if saved["vocab_size"] != args.vocab_size:
            raise UserError(
                f"--init={path} was trained with vocab_size={saved['vocab_size']}, not "
                f"{args.vocab_size}: pack the data with the encoding of that run"
            )
        fields = dataclasses.fields(args)
        names = {field.name for field in fields if field.metadata.get("group") == "model"}
        different = different_settings(saved, args, names - {"seed", "dtype", "ngram_dropout"})
        if different:
            raise UserError(f"--init={path} holds another model: pass {different}")
        check_finite(state["model"], str(path))
        gpt.load_state_dict(state["model"])


def load_optimizer(optimizer, saved, path):
    """Load the state of an optimizer that was saved in a checkpoint at path.

    Raises UserError if an option differs, except for learning rates, or ValueError if the shape of
    a tensor does.
    """
    names = {
        "AdamW": ("step", "exp_avg", "exp_avg_sq"),
        "Muon": ("momentum_buffer",),
        "Adagrad": ("step", "sum"),
    }.get(type(optimizer).__name__, ())
    params = params_of(optimizer)
    for i, state in saved["state"].items():
        for name in names:
            shape = () if name == "step" else params[i].shape
            if state[name].shape != shape:
                raise ValueError(f"{name} has shape {tuple(state[name].shape)}")
    groups = optimizer.state_dict()["param_groups"]
    for group, saved_group in zip(groups, saved["param_groups"], strict=True):
        for name, value in group.items():
            # Older versions of PyTorch have fewer options.
            saved_value = saved_group.setdefault(name, value)
            # Optimizers of others may count their steps in an option. Such numbers are restored.
            may_differ = not names and type(value) in (int, float)
            if name != "lr" and saved_value != value and not may_differ:
                option = f"{name}={saved_value} of {type(optimizer).__name__}"
                raise UserError(
                    f"{path} was saved with {option}, not {value}: restore the old value"
                )
        saved_group["lr"] = group["lr"]
        saved_group.pop("initial_lr", None)  # train_step sets it again from lr
    optimizer.load_state_dict(saved)


def resume(args, gpt, optimizers, train_loader, log):
    """Collective: load the checkpoint selected by args.resume; return its step, or 0.

    If args.resume names a file, newer checkpoints in its folder are renamed, so that resume=auto
    skips them.
    """
    on_all_ranks(find_best_loss, log)
    path, state = on_all_ranks(find_checkpoint, args, log) or (None, None)
    step = None if state is None else state["step"]
    check_ranks_agree({"the step of the checkpoint": step}, "put log_dir on a shared filesystem")
    if state is None:
        if args.init:
            on_all_ranks(load_init, args, gpt)
        return 0
    on_all_ranks(load_run_state, path, state, gpt, optimizers, train_loader, log)
    if state.get("dtype") != str(gpt.dtype):
        log(f"{path} was saved by a run in {state.get('dtype')}; continuing in {gpt.dtype}")
    if args.resume != "auto" and log.file is not None:
        for newer in checkpoints_in(log.folder):
            same_folder = newer.parent.resolve() == path.parent.resolve()
            if same_folder and newer.name > checkpoint_name(step):
                newer.rename(newer.with_name(f"{newer.name}.abandoned"))
                log(f"renamed {newer} to {newer.name}.abandoned: the run resumes from {path}")
    return step


# ---- Processes ----------------------------------------------------------------------------------
def join_processes(args):
    """Join the process group of torchrun, if there is one; return (rank, world_size, device).

    Raises UserError if the environment or the device is unusable.
    """
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and "RANK" not in os.environ:
        raise UserError("srun started several tasks without torchrun: use srun torchrun")
    device = choose_device(args)
    gpu = device if device.type == "cuda" else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    if "RANK" in os.environ and not dist.is_initialized():
        timeout = timedelta(seconds=args.comm_timeout)
        try:
            store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        except (ValueError, RuntimeError) as error:  # no MASTER_ADDR, or nothing answers there
            raise UserError(f"cannot join the processes of torchrun ({error})") from None
        # After a restart by torchrun, the store still holds the keys of the earlier attempts.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(attempt, store)
        backend = "cpu:gloo,cuda:nccl" if gpu is not None else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=gpu
        )
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size(), device
    return 0, 1, device


def leave_processes():
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
        # gloo's threads outlive the group. Let them release the tensors of the last collective, or
        # they may abort the process when the interpreter exits (seen with torch 2.13).
        time.sleep(0.2)


def choose_device(args):
    """Return the torch.device of this process. Raises UserError if args.device is not usable."""
    if args.device == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus == 0 and args.device == "auto":
        return torch.device("cpu")
    if gpus == 0:
        raise UserError(
            "device=cuda, but PyTorch sees no GPU: pass --device=cpu, or check the driver"
        )
    if not torch.cuda.is_available():
        raise UserError("PyTorch cannot use the GPUs: update their driver, or pass --device=cpu")
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if processes > gpus:
        raise UserError(
            f"{processes} processes were started for {gpus} GPUs: start at most {gpus}, or pass "
            f"--device=cpu"
        )
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def product_dtype(args, device):
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
    """Set PyTorch's global options for this device. This is the only place that does."""
    from torch._functorch import config as functorch_config  # slow to import

    torch.sparse.check_sparse_tensor_invariants.disable()  # Adagrad warns unless this is set
    if device.type == "cuda":
        return
    # On CPUs, short sequences were measured to train faster without the fused attention kernel.
    # Despite their names, these options also affect CPUs; the second keeps the scores in bfloat16.
    torch.backends.cuda.enable_flash_sdp(args.sequence_length > 512)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    # Recompute some activations in the backward pass: cheaper on a CPU than loading them.
    functorch_config.activation_memory_budget = 0.7
    # Otherwise, threads would add the gradients of repeated tokens in arbitrary order, and runs
    # would not be bit-reproducible.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # saves filling each new tensor


def all_gather_objects(value):
    """Collective: return the values of all ranks, in rank order."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_all_ranks(function, *arguments):
    """Collective: return function(*arguments); if one rank raises UserError, all do.

    The function must not call a collective.
    """
    result = None
    failure = ""
    try:
        result = function(*arguments)
    except UserError as error:
        failure = str(error)
    failures = all_gather_objects(failure)
    for rank, failure in enumerate(failures):
        if failure:
            where = "" if all(failures) else f"rank {rank}: "  # only if some ranks succeeded
            raise UserError(where + failure)
    return result


def check_ranks_agree(facts, advice):
    """Collective: raise UserError unless the dict `facts` is the same on all ranks.

    The error names the first fact that differs, two of its values, and the advice.
    """
    facts_of_ranks = all_gather_objects(facts)
    for name, value in facts_of_ranks[0].items():
        for rank, rank_facts in enumerate(facts_of_ranks):
            if rank_facts.get(name) != value:
                values = f"{value} on rank 0, {rank_facts.get(name)} on rank {rank}"
                raise UserError(f"the ranks differ in {name} ({values}): {advice}")


def check_ranks_read_the_same(loader):
    """Collective: raise UserError if shards differ between machines.

    Ranks on the same machine share its files, so each reads only some of them.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", loader.rank))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", loader.world_size))
    if local_size == loader.world_size:  # there is only one machine
        return
    sizes = [size for size, _ in loader.contents]
    check_ranks_agree({"the sizes of their shards": sizes}, "give all machines the same data")
    checksums = {}
    for i in range(local_rank, len(loader.paths), local_size):
        checksums[i] = crc32_of_file(loader.paths[i])
    seen = {}
    for rank, rank_checksums in enumerate(all_gather_objects(checksums)):
        for i, checksum in rank_checksums.items():
            if seen.setdefault(i, checksum) != checksum:
                path = loader.paths[i]
                raise UserError(f"{path} differs on the machine of rank {rank}: copy it again")


# ---- Main ---------------------------------------------------------------------------------------
def check_memory(args):
    """Raise UserError if the model and its optimizers exceed the memory of this machine."""
    # Count rows of n_embd parameters; a block has 12 * n_embd of them.
    rows = args.vocab_size + 12 * args.n_layer * args.n_embd
    if args.max_ngram > 1:
        rows += args.ngram_rows
    params = args.n_embd * rows
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    max_params = memory // 12  # at least float32 weight, gradient and one moment per parameter
    if params > max_params:
        raise UserError(f"the model has {params} parameters, but the memory holds {max_params}")


def open_data(args, rank, world_size, device):
    """Return (train_loader, val_loader). Raises UserError if the data do not fit the settings."""
    shared = (args.sequence_length, rank, world_size, device, args.vocab_size)
    train_loader = DistributedDataLoader(
        args.train_files,
        args.batch_size,
        *shared,
        shuffle_seed=args.seed if args.shuffle else None,
    )
    max_steps = (train_loader.total_tokens - 1) // train_loader.tokens_per_step
    if max_steps < (1 if args.allow_repeat else args.num_iterations):
        raise UserError(
            f"{args.train_files!r} has enough tokens for {max_steps} steps: add data, lower "
            f"--num_iterations or --batch_size (see --preset=text), or pass --allow_repeat=True"
        )
    micro_batch = micro_batch_size(args.batch_size // world_size, args.device_batch_size)
    val_loader = DistributedDataLoader(args.val_files, micro_batch * world_size, *shared)
    T = args.sequence_length
    max_val_tokens = (val_loader.total_tokens - 1) // T * T
    if max_val_tokens == 0:
        raise UserError(
            f"{args.val_files!r} holds {val_loader.total_tokens} tokens, but a sequence needs "
            f"{T + 1}: add validation text, or lower --sequence_length"
        )
    val_tokens = val_tokens_of(args, val_loader)
    if val_tokens % T or not 0 < val_tokens <= max_val_tokens:
        raise UserError(
            f"val_tokens={args.val_tokens} must be a multiple of {T} up to {max_val_tokens}, the "
            f"number of usable tokens in {args.val_files!r}"
        )
    if set(train_loader.contents) & set(val_loader.contents):
        raise UserError(
            "train_files and val_files both match the same shard: they must not overlap"
        )
    return train_loader, val_loader


def epochs(args, train_loader):
    """Return how many times the whole run reads the training tokens."""
    return args.num_iterations * train_loader.tokens_per_step / train_loader.total_tokens


def val_tokens_of(args, val_loader):
    """Return val_tokens; if it is 0, the number of usable tokens in val_files, up to 2**20."""
    usable = min(val_loader.total_tokens - 1, 2**20)
    return args.val_tokens or usable // val_loader.T * val_loader.T


def warm_up(gpt, args, val_loader):
    """Compile by a validation and a training pass; return the seconds of a second training pass."""
    if args.max_ngram > 1:  # torch.compile does not support the sparse gradients of the table
        gpt.ngrams.forward = torch.compiler.disable(gpt.ngrams.forward)
    gpt.compile(dynamic=False, fullgraph=args.max_ngram < 2, disable=not args.compile)
    inputs, targets = val_loader.next_batch()
    with torch.no_grad():
        gpt(inputs, targets)
    for _ in range(2):  # the first compiles, the second is timed
        start = time.perf_counter()
        loss = gpt(inputs, targets)
        loss.backward()
        gpt.zero_grad()
        loss.item()  # waits for the device
    return time.perf_counter() - start


def validate(step, args, log, gpt, train_loader, val_loader, check_stop):
    """Collective: log and return the validation loss after `step` steps.

    Raises UserError if the weights of the ranks differ.
    """
    with log.timed("validation"):
        loss = evaluate(gpt, val_loader, args.val_tokens, check_stop)
        sums = [p.view(torch.int32).sum(dtype=torch.int32) for p in gpt.parameters()]
        checksum = sum(sums).item()  # of the weights' bits, modulo 2**32
        check_ranks_agree({"the checksum of their weights": checksum}, "resume from a checkpoint")
        data_hash = train_loader.data_hash()
    lr = args.learning_rate * lr_multiplier(step, args)  # Muon's decays in proportion
    log.progress(step, f"val_loss:{loss:.4f}", f" data_hash:{data_hash} lr:{lr:.3g}")
    # A run that repeats its text may overfit, so it also keeps its best weights.
    if args.val_loss_every and epochs(args, train_loader) > 1:
        is_best = log.best_loss is None or loss < log.best_loss
        if is_best and save_weights(gpt, step, loss, log.folder / "best.pt", log, args):
            log.best_loss = loss
    return loss


def read_batch_or_stop(train_loader, stop):
    """Collective: return this rank's next batch; raise StopTraining if any rank must stop."""
    batch, failure = None, ""
    try:
        batch = train_loader.read_batch()
    except UserError as error:
        failure = str(error)
    stop.check_ranks(failure)
    return batch


def train(args, log, gpt, optimizers, train_loader, val_loader, first_step, stop):
    """Collective: train, validating periodically; return the last validation loss.

    Raises StopTraining if a rank must stop. The model and train_loader are then in the state
    after the last complete step. Raises UserError if a loss is not finite.
    """
    steps = range(first_step, args.num_iterations)
    if log.live:
        steps = tqdm(
            steps,
            initial=first_step,
            total=args.num_iterations,
            unit="tok",
            unit_scale=train_loader.tokens_per_step,
        )
    smooth_loss = val_loss = math.nan
    for step in steps:
        if args.val_loss_every and step % args.val_loss_every == 0:
            val_loss = validate(step, args, log, gpt, train_loader, val_loader, stop.check)
        if args.save_every and step % args.save_every == 0 and step > first_step:
            save_checkpoint(gpt, optimizers, train_loader, log, args)
        lr_scale = lr_multiplier(step, args)
        with log.timed("train"):
            inputs, targets = read_batch_or_stop(train_loader, stop)
            loss, norms = train_step(gpt, optimizers, inputs, targets, lr_scale, args, stop.check)
            loss = loss.item()
            train_loader.advance()
        log.progress(step + 1, f"train_loss:{loss:.4f}", show=not log.live)
        if not math.isfinite(loss):
            named_norms = zip(gpt.named_parameters(), norms.tolist())
            bad = [name for (name, _), norm in named_norms if not math.isfinite(norm)]
            bad_of_ranks = all_gather_objects(bad)
            raise UserError(
                f"train_loss is {loss} at step {step + 1}: lower the learning rates; parameters "
                f"with non-finite gradients, by rank: {bad_of_ranks}"
            )
        smooth_loss = loss if step == first_step else 0.9 * smooth_loss + 0.1 * loss
        if log.live:
            steps.set_postfix(step=step + 1, loss=smooth_loss, lr=f"{lr_scale:.0%}", val=val_loss)
    val_loss = validate(args.num_iterations, args, log, gpt, train_loader, val_loader, stop.check)
    if not math.isfinite(val_loss):
        raise UserError(f"the run diverged: val_loss is {val_loss}; lower the learning rates")
    if args.save_every:
        save_checkpoint(gpt, optimizers, train_loader, log, args)
    return val_loss


def resume_command(run_id, world_size):
    """Return the command that continues a run.

    run.sh exports RUN_COMMAND, the command as the user typed it.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) != world_size:  # several machines
        return f"the same command with --run_id={run_id} --resume=auto"
    torchrun = f"torchrun --standalone --nproc_per_node={world_size}"
    launcher = "python" if world_size == 1 else torchrun
    command = os.environ.get("RUN_COMMAND", f"{launcher} {shlex.join(sys.argv)}")
    for argument in f"--run_id={run_id}", "--resume=auto":
        if argument not in command.split():
            command += f" {argument}"
    return command


def save_and_stop(failure, gpt, optimizers, train_loader, log, args):
    """Collective: save a checkpoint after the last complete step and report why the run stops.

    Raises UserError if the checkpoint cannot be written, or if a failure stopped the run.
    """
    step = train_loader.position // train_loader.tokens_per_step
    if not save_checkpoint(gpt, optimizers, train_loader, log, args):
        last = log.checkpoints[-1] if log.checkpoints else "the last checkpoint"
        raise UserError(f"stopped after step {step} without saving: progress since {last} is lost")
    command = resume_command(log.folder.name, train_loader.world_size)
    log(f"saved {log.folder}/{checkpoint_name(step)}; to continue: {command}")
    if failure:
        raise UserError(f"stopped after step {step} (checkpoint saved): {failure}")
    log(f"stopped by a signal after step {step}")


def run(args, log, gpt, optimizers, train_loader, val_loader, stop):
    """Collective: resume or start, compile, train; return what main returns."""
    first_step = resume(args, gpt, optimizers, train_loader, log)
    log.header(args, gpt, optimizers, train_loader, val_loader)
    if args.resume:
        log(f"resume={args.resume}: continuing after step {first_step}")
    times_read = epochs(args, train_loader)
    if times_read > 10:
        log(
            f"this run reads the training text {times_read:.0f} times, so expect overfitting: add "
            f"text, or lower --num_iterations"
        )
    if first_step == 0 and args.init:
        log(f"starting from the weights in {args.init}")
    elif first_step == 0:
        log("a high first loss is expected: an untrained tied head predicts the input token")
    if args.compile:
        log("compiling (up to a minute)")
    with log.timed("compile"):
        seconds_per_micro_batch = warm_up(gpt, args, val_loader)
    micro_batches = train_loader.tokens_per_step / val_loader.tokens_per_step
    seconds = seconds_per_micro_batch * micro_batches
    seconds_left = timedelta(seconds=round(seconds * (args.num_iterations - first_step)))
    log(f"about {seconds:.2g} s per step, {seconds_left} remaining")
    failure = None
    try:
        val_loss = train(args, log, gpt, optimizers, train_loader, val_loader, first_step, stop)
    except StopTraining as reason:
        failure = reason.failure
    if failure is not None:
        save_and_stop(failure, gpt, optimizers, train_loader, log, args)
        return None
    log.summary(args, train_loader, gpt, val_loss)
    return val_loss


def main(args, stop=None):
    """Train a GPT as configured by args; return the last validation loss.

    stop: a StopRequest, polled at every step and, in a single-process run, at every micro-batch.
    Returns None if the run was stopped or had already finished.
    """
    stop = stop or StopRequest()
    rank, world_size, device = join_processes(args)
    configure_backend(args, device)
    dtype = product_dtype(args, device)
    source_hash = hashlib.sha256(SOURCE.encode()).hexdigest()[:16]
    facts = {**vars(args), "source": source_hash, "dtype": dtype, "torch": torch.__version__}
    check_ranks_agree(facts, "start all ranks with the same settings, source and versions")
    on_all_ranks(check_memory, args)
    train_loader, val_loader = on_all_ranks(open_data, args, rank, world_size, device)
    args = dataclasses.replace(args, val_tokens=val_tokens_of(args, val_loader))
    val_tokens = on_all_ranks(val_loader.read, 0, args.val_tokens + 1)
    val_hash = hashlib.sha256(val_tokens).hexdigest()[:16]
    check_ranks_agree({"val_hash": val_hash}, "give all machines the same val_files")
    check_ranks_read_the_same(train_loader)

    torch.manual_seed(args.seed)
    gpt = GPT(args, dtype).to(device)
    optimizers = build_optimizers(gpt, args, rank, world_size)
    new_run_id = time.strftime("%Y%m%d-%H%M%S-") + os.urandom(3).hex()
    run_id = all_gather_objects(args.run_id or new_run_id)[0]
    log = on_all_ranks(Log, args, run_id, rank)
    log.val_hash = val_hash
    result = all_gather_objects(log.result)[0]
    val_loss = None
    if not result:
        val_loss = run(args, log, gpt, optimizers, train_loader, val_loader, stop)
    elif rank == 0:
        print(f"{log.path} is already finished; nothing to do: {result}")
    leave_processes()
    return val_loss


def describe_failure(error):
    """Return a message for the user: one line, or a traceback for a bug."""
    if isinstance(error, UserError):
        return str(error)
    out_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    # PyTorch has no exception class for running out of CPU memory.
    if out_of_memory or "DefaultCPUAllocator" in str(error):
        return "out of memory: pass a --device_batch_size below the micro_batch in the log"
    if dist.is_initialized() and isinstance(error, RuntimeError) and "gloo" in str(error):
        return (
            f"lost the connection to another rank; see its message or torchrun's summary ({error})"
        )
    return "".join(traceback.format_exception(error)).rstrip()


def cli(argv):
    """Train as configured on the command line. On failure, print why and exit with status 1.

    A UserError that every rank raises is printed only by rank 0.
    """
    from torch.distributed.elastic.multiprocessing.errors import record  # only needed here

    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="backslashreplace")  # for an ASCII-only terminal
    stop = StopRequest()
    stop.catch_signals()
    try:
        record(main)(parse_args(argv), stop)  # reports a failed rank's message to torchrun
    except Exception as error:
        text = describe_failure(error)
        on_every_rank = isinstance(error, UserError) and not isinstance(error, DataError)
        if dist.is_initialized():
            # torchrun sends SIGTERM to the other ranks when one has failed. It must not stop this
            # rank from printing its message.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            first = dist.get_rank() == 0
            if not on_every_rank:
                text = f"rank {dist.get_rank()}: {text}"
        else:
            first = "RANK" not in os.environ or os.environ.get("LOCAL_RANK", "0") == "0"
        if first or not on_every_rank:
            print(f"train_gpt2.py: {text}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    cli(sys.argv[1:])
