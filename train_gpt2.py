"""Train GPT-2 124M to a validation loss of 3.28 on FineWeb, in a single file.

    torchrun --standalone --nproc_per_node=8 train_gpt2.py      # 8 GPUs
    python train_gpt2.py                                        # one GPU, or a CPU
    python train_gpt2.py --help                                 # all settings and presets

The defaults are those of record 7 of the public NanoGPT speedrun (October 2024). The log of that
record reports a validation loss of 3.2755 after 12.0 minutes on 8xH100. This file has not been run
on a GPU yet. It requires Linux or macOS, Python 3.10+, torch 2.5+ and numpy.

The sections from settings to main define a run: read them to understand it, and edit them to change
it. The sections titled "Machinery" hold the rest, such as the command line and checkpoints.

Shapes: B sequences of T tokens, C = n_embd, V = vocab_size, H = n_head, D = C // H. "Collective"
marks a function that all ranks, the processes of torchrun, must call together.
"""

import argparse
import bisect
import contextlib
import dataclasses
import fcntl
import functools
import glob
import hashlib
import io
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
import zipfile
import zlib
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Literal, NamedTuple, get_args

# By default, libgomp's idle threads spin long enough to slow down training and other programs.
# GOMP_SPINCOUNT shortens this. It must be set before torch is imported, and has no effect if
# OMP_WAIT_POLICY is set.
if __name__ == "__main__" and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Every log contains the source of this file. It is read before the slow imports, so that the log
# shows the running code even if the file is edited right after launch.
SOURCE = Path(__file__).read_text(encoding="utf-8", errors="replace")
START = time.perf_counter()  # here, so that setup_seconds includes the imports

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils._pytree import tree_leaves


# ---- Settings ------------------------------------------------------------------------------------
def setting(default, help, role, low=0, high=2**31 - 1, needs=""):
    """Return a field of Hyperparameters.

    low, high: the smallest and largest number allowed. needs: another setting that must be on, that
    is, neither 0 nor "gpt2". Otherwise, this setting has no effect.
    """
    if needs:
        help += " (needs --model=modern)" if needs == "model" else f" (needs --{needs})"
    metadata = dict(help=help, role=role, low=low, high=high, needs=needs)
    return dataclasses.field(default=default, metadata=metadata)


# The role of a setting says what may change when a run loads a checkpoint or weights.
architecture = functools.partial(setting, role="architecture")  # fixed on --resume and --init
training = functools.partial(setting, role="training")  # fixed on --resume
growing = functools.partial(setting, role="growing")  # may only grow on --resume
free = functools.partial(setting, role="free")  # may always change


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """All settings of a run. Edit the defaults here, or pass --name=value on the command line.

    A new setting needs only a default and a type (bool, int, float, str or a Literal), as in
    `my_setting: float = 1.0`. It may not change on --resume. Raises UserError if a value is not
    allowed.
    """

    model: Literal["gpt2", "modern"] = architecture("gpt2", "gpt2: record 7; modern: later ideas")
    vocab_size: int = architecture(50304, "number of token ids; the data's manifest wins", low=1)
    n_layer: int = architecture(12, "transformer blocks", low=1)
    n_head: int = architecture(6, "attention heads", low=1)
    n_embd: int = architecture(768, "channels", low=1)
    window: int = architecture(0, "final window in tokens; half in short layers", needs="model")
    document_token: int = architecture(50256, "token that starts a document", needs="window")
    ngram_rows: int = architecture(0, "rows of the table of hashed n-grams", needs="model")
    max_ngram: int = architecture(2, "longest n-gram in tokens", low=2, needs="ngram_rows")

    seed: int = training(1337, "seed for weights, shuffling and dropout", high=2**63 - 1)
    equal_keys: bool = training(False, "c_k starts equal to c_q in the last layer", needs="model")
    dtype: Literal["auto", "bfloat16", "float32"] = training("auto", "dtype of matmuls")
    batch_size: int = training(512, "sequences per step, over all processes", low=1)
    sequence_length: int = training(1024, "tokens per sequence", low=1)
    num_iterations: int = growing(5100, "optimizer steps", low=1)
    adamw_every: int = training(1, "steps between updates, except Muon's", low=1, needs="model")
    learning_rate: float = training(0.0036, "AdamW's rate for lm_head, and for wte in gpt2")
    embedding_learning_rate: float = training(0.6, "AdamW's rate for embeddings", needs="model")
    ngram_learning_rate: float = training(
        0.0, "Adagrad's rate for the n-gram table; 0: AdamW trains it", needs="ngram_rows"
    )
    muon_learning_rate: float = training(0.00036, "Muon's rate for the matrices of the blocks")
    muon_weight_decay: float = training(0.0, "weight decay of Muon", needs="model")
    muon_momentum: float = training(0.95, "momentum of Muon", high=0.999)
    muon_warmup_fraction: float = training(0.0, "momentum warm-up, fraction of steps", high=1)
    muon_cooldown_fraction: float = training(0.0, "momentum cool-down, fraction of steps", high=1)
    warmdown_fraction: float = training(1450 / 5100, "decay of rates, fraction of steps", high=1)
    final_lr: float = training(0.0, "rates at the end, as a fraction of the first", high=1)
    ngram_dropout: float = training(0.0, "share of n-grams dropped", high=0.99, needs="ngram_rows")
    shuffle: bool = training(False, "shuffle the sequences; each epoch cuts them at a new offset")
    val_tokens: int = training(10485760, "tokens of val_files to validate on; 0: up to 2**18")

    train_files: str = free("data/fineweb10B/fineweb_train_*.bin", "glob of the training shards")
    val_files: str = free("data/fineweb10B/fineweb_val_*.bin", "glob of the validation shards")
    allow_repeat: bool = free(False, "start over when the training tokens run out")
    val_loss_every: int = free(125, "steps between validations; 0: only after the last step")
    target_val_loss: float = free(3.28, "loss to print with the result; 0: none")
    run_id: str = free("", "name of the log and of the run's folder; default: the time")
    log_dir: str = free("logs", "folder of logs and checkpoints")
    save_every: int = free(0, "steps between checkpoints; 0: only if a signal stops the run")
    keep_checkpoints: int = free(2, "number of recent checkpoints to keep", low=1)
    resume: str = free("", "auto: continue run_id; a path: continue that checkpoint as a new run")
    init: str = free("", "file with the initial weights, such as model.pt")
    device: Literal["auto", "cuda", "cpu"] = free("auto", "auto: cuda if there is a GPU")
    device_batch_size: int = free(64, "maximum sequences per forward pass, to save memory", low=1)
    compile: bool = free(True, "use torch.compile; False starts sooner but trains more slowly")
    comm_timeout: int = free(600, "seconds that a rank waits for the others", low=1)

    def __post_init__(self):
        check_settings(self)


def modern_recipe(width, **settings):
    """Return a preset of the modern model. n_head and Muon's rates follow from width (n_embd).

    Sources: records/2026-11-26_Modern_2026. The public learning rate of Muon is 0.03, and 0.06 for
    both matrices of the MLP. Muon's update is scaled by sqrt(max(M, N)) here, so 0.03 / sqrt(width)
    gives 0.03 for (width, width) and 0.06 for the MLP, where max(M, N) = 4 * width. In a step, the
    public code decays weights by 1.2 * 0.03 times this rate. Here, all matrices decay by
    1.2 * 0.03 * 0.03, which is half of the public decay of the MLP.
    """
    return dict(
        model="modern", n_layer=11, n_head=width // 128, n_embd=width, window=1728,
        ngram_rows=5 * 50304, device_batch_size=1, num_iterations=1950, adamw_every=2,
        warmdown_fraction=0.55, final_lr=0.15, learning_rate=0.008,
        muon_learning_rate=0.03 / width**0.5, muon_weight_decay=1.2 * 0.03 * width**0.5,
        muon_warmup_fraction=300 / 1950, muon_cooldown_fraction=50 / 1950,
    ) | settings  # fmt: skip


# --preset=NAME replaces defaults; settings on the command line override the preset.
PRESETS = {
    "record7": ("the defaults: GPT-2 124M on FineWeb, for eight 80 GB GPUs", {}),
    "24gb": ("the same run on one 24 GB GPU", dict(device_batch_size=32)),
    "modern": (
        "the modern model on FineWeb, for eight 80 GB GPUs",
        modern_recipe(768, batch_size=8, sequence_length=32768),
    ),
    "modern_24gb": (
        "the modern model on one 24 GB GPU",
        modern_recipe(768, batch_size=16, sequence_length=16384),
    ),
    "small": (
        "a small English model for trying out ideas; trains in minutes on 2 CPU cores",
        modern_recipe(
            128, train_files="data/small/train_*.bin", val_files="data/small/val_*.bin",
            # GPT-2's first 2,048 tokens and a document token, rounded up to a multiple of 128
            vocab_size=2176, document_token=2048, ngram_rows=5 * 2048,
            n_layer=8, batch_size=8, sequence_length=512, device_batch_size=8,
            # Long layers see the whole sequence after 1/8 of the run, others after 7/24.
            window=6 * 512,
            num_iterations=600, val_loss_every=0, val_tokens=0, target_val_loss=0.0,
        ),
    ),
    "cpu": (
        "the CPU benchmark: trains in seconds on 2 cores; `bash run.sh` prepares its data",
        dict(
            device="cpu", compile=False,  # compiling takes longer than the training
            train_files="data/torch_sources/train_*.bin",
            val_files="data/torch_sources/val_*.bin",
            vocab_size=257,  # bytes, and a token that begins a document
            n_layer=2, n_head=1, n_embd=128,
            model="modern", ngram_rows=2**18, max_ngram=6,
            batch_size=8, sequence_length=512, shuffle=True,
            num_iterations=34, warmdown_fraction=0.5, final_lr=0.3,
            learning_rate=0.02, embedding_learning_rate=0.3, ngram_learning_rate=0.6,
            muon_learning_rate=0.005, muon_momentum=0.85, equal_keys=True,
            val_loss_every=0, val_tokens=822 * 512,  # all complete sequences
            target_val_loss=1.32,
        ),
    ),
    "text": (
        "for your own text, packed into data/mine; trains in minutes on 2 CPU cores",
        dict(
            compile=False, allow_repeat=True, shuffle=True,
            train_files="data/mine/train_*.bin",
            val_files="data/mine/val_*.bin",
            vocab_size=257, n_layer=4, n_head=2, n_embd=128,
            model="modern", ngram_rows=2**18, max_ngram=6, ngram_dropout=0.7,
            batch_size=8, sequence_length=512,
            num_iterations=960, warmdown_fraction=0.8, muon_warmup_fraction=0.15,
            learning_rate=0.004, embedding_learning_rate=0.1, ngram_learning_rate=0.12,
            muon_learning_rate=0.0015, equal_keys=True,
            val_loss_every=240, val_tokens=0, target_val_loss=0.0, save_every=240,
        ),
    ),
}  # fmt: skip


class UserError(ValueError):
    """An error that the user can fix. It is reported in one line, without a traceback."""


# ---- Model: GPT-2 with rotary positions, RMSNorm, QK-norm, ReLU^2 and zero-initialized projections
def norm(x):
    """RMSNorm over the last dimension, without a gain."""
    return F.rms_norm(x, (x.size(-1),), eps=2**-23)  # float32's epsilon, even if x is bfloat16


class CastedLinear(nn.Linear):
    """A linear layer that keeps its weight in float32 and multiplies in the dtype of x."""

    def forward(self, x):
        return F.linear(x, self.weight.type_as(x))


class Rotary(nn.Module):
    """Rotary position embedding: rotates the channels (i, i + D/2) by -position * frequencies[i].

    frequencies: (D/2,), in radians per position; pairs with frequency 0 are not rotated. Source:
    https://arxiv.org/abs/2104.09864, with the opposite sign, which is equivalent.
    """

    def __init__(self, frequencies, sequence_length):
        super().__init__()
        angles = torch.outer(torch.arange(sequence_length).float(), frequencies)  # (T, D/2)
        cos_sin = torch.stack([angles.cos(), angles.sin()])
        self.register_buffer("cos_sin", cos_sin, persistent=False)  # (2, T, D/2)

    def forward(self, x):  # (B, T, H, D)
        cos, sin = self.cos_sin[:, : x.size(1), None]  # each (T, 1, D/2)
        x1, x2 = x.chunk(2, dim=-1)
        y1 = x1 * cos + x2 * sin
        y2 = x2 * cos - x1 * sin
        return torch.cat([y1, y2], dim=-1).type_as(x)


class CausalSelfAttention(nn.Module):
    """Causal self-attention with rotary positions and normalized queries and keys."""

    def __init__(self, args):
        super().__init__()
        C = args.n_embd
        self.n_head = args.n_head
        # Separate matrices, so that Muon orthogonalizes each one.
        self.c_q = CastedLinear(C, C, bias=False)
        self.c_k = CastedLinear(C, C, bias=False)
        self.c_v = CastedLinear(C, C, bias=False)
        self.c_proj = CastedLinear(C, C, bias=False)
        nn.init.zeros_(self.c_proj.weight)  # every block starts as the identity
        self.rotary = Rotary(self.rotary_frequencies(C // args.n_head), args.sequence_length)

    def rotary_frequencies(self, D):
        """Return the D/2 frequencies of the rotary embedding."""
        return 10000.0 ** -(torch.arange(0, D, 2).float() / D)

    def split_heads(self, x):  # (B, T, C) to (B, T, H, D)
        return x.unflatten(-1, (self.n_head, -1))

    def forward(self, x):  # (B, T, C)
        q = self.rotary(norm(self.split_heads(self.c_q(x))))
        k = self.rotary(norm(self.split_heads(self.c_k(x))))
        v = self.split_heads(self.c_v(x))
        # Attention takes (B, H, T, D). Its output inherits the strides of q, a transposed view of
        # (B, T, H, D), so flatten needs no copy.
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
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
        return loss_or_logits(norm(x), self.lm_head, targets)


def loss_or_logits(x, head, targets=None, softcap=0.0):
    """Return the mean cross-entropy, or the logits, (B, T, V), if targets is None.

    x: (B, T, C). head: a CastedLinear, C to V. targets: (B, T). softcap: see capped.
    """
    if targets is None:
        return capped(head(x), softcap)
    x, targets = x.flatten(0, 1), targets.flatten()
    needs_grad = torch.is_grad_enabled()  # read here, because grad mode is off inside forward
    return ChunkedCrossEntropy.apply(x, head.weight, targets, softcap, needs_grad)


def capped(logits, softcap):
    """Return logits, (..., V), in float32; if softcap > 0, softcap * tanh(logits / softcap)."""
    logits = logits.float()
    if softcap:
        # Equals softcap * tanh(logits / softcap), but inductor fuses this form better.
        logits = 2 * softcap * (2 * logits / softcap).sigmoid() - softcap
    return logits


def chunk_loss(x, weight, targets, softcap, count):
    """Return the summed cross-entropy of some tokens, divided by count."""
    logits = capped(F.linear(x, weight), softcap)
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum") / count


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy, computed one chunk of tokens at a time, together with its gradients.

    The gradients are computed in forward, while a chunk's logits are in memory; backward only
    scales them. This saves memory: the logits of 64 x 1024 tokens of GPT-2 take 13.2 GB. Targets of
    -1 are ignored.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, softcap, needs_grad):  # (N, C), (V, C), (N,)
        count = (targets != -1).sum().clamp(min=1)
        cast_weight = weight.type_as(x)
        min_logits = 512 * 50304  # in a chunk, because small chunks are slow (tuned on CPUs)
        max_chunks = 2 if x.is_cuda else 8  # 8 was tuned on CPUs; 2 is a guess for GPUs
        chunks = max(1, min(max_chunks, len(x) * len(weight) // min_logits))
        pairs = list(zip(x.chunk(chunks), targets.chunk(chunks)))
        if not needs_grad:
            return sum(chunk_loss(x_i, cast_weight, y_i, softcap, count) for x_i, y_i in pairs)
        loss = grad_weight = 0.0
        grad_x = []
        # Autograd is off inside forward, so torch.func differentiates each chunk.
        grad_and_value = torch.func.grad_and_value(chunk_loss, argnums=(0, 1))
        for x_i, y_i in pairs:
            (grad_x_i, grad_weight_i), loss_i = grad_and_value(
                x_i, cast_weight, y_i, softcap, count
            )
            grad_x.append(grad_x_i)
            grad_weight = grad_weight + grad_weight_i.float()
            loss = loss + loss_i
        ctx.save_for_backward(torch.cat(grad_x), grad_weight)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * grad_loss, grad_weight * grad_loss, None, None, None


# ---- Modern model: GPT with ideas from public records 8 to 77, and a table of hashed n-grams -----
BLOCK = 128  # tokens; attention windows are made of blocks of this size
ATTENTION_SCALE = 0.12  # scale of q k^T, in place of 1 / sqrt(D)
GATE_CHANNELS = 12  # a value gate reads the first 12 channels of its attention's input
LOGIT_SOFTCAP = 15.0


class Layer(NamedTuple):
    """The roles of one layer of the modern model. Every layer has an MLP."""

    has_attention: bool
    has_value_table: bool  # a learned embedding of the token is added to attention's values
    is_long: bool  # attention has the long window and offset keys (see ModernAttention)
    starts_skip: bool  # its output is added to the input of the layer with ends_skip, if any
    ends_skip: bool
    is_saved: bool  # layers with reads_saved attend to its output; backout subtracts it at the end
    reads_saved: bool  # attention reads the saved output instead of the residual stream


def modern_layers(n):
    """Return a Layer for each of n layers.

    The comments show the indices of the layers for n = 11, as in the public records. In a small
    model, most layers have several roles, and with n < 8, there is no skip.
    """
    saved = max(0, min(2 * n // 3, n - 2))  # 7; never the last layer, unless it is the only one
    skip_end = (n + 1) // 2 if n >= 8 else None  # 6
    return [
        Layer(
            has_attention=i != skip_end,
            has_value_table=i in (1, 2, n - 3, n - 2, n - 1),  # 1, 2, 8, 9, 10
            is_long=i in (n // 3, n - 1),  # 3, 10
            starts_skip=i == n // 3,  # 3
            ends_skip=i == skip_end,
            is_saved=i == saved,
            reads_saved=i > saved,  # 8, 9, 10
        )
        for i in range(n)
    ]


class ModernAttention(CausalSelfAttention):
    """Attention with rotary positions on half of the channels.

    A value table adds a learned embedding of the token to each value. With offset keys, the half
    of each key that is not rotated is copied from the previous token's key, even across a document
    boundary. The key at j then describes token j - 1, while the value at j describes token j. A
    query can therefore find what followed an earlier copy of its own token. One layer can thus do
    what normally takes an induction head of two layers.
    """

    def __init__(self, args, layer, dtype):
        super().__init__(args)
        self.offset_keys = layer.is_long
        D = args.n_embd // args.n_head
        has_position = torch.arange(D) % (D // 2) < D // 4  # the pairs (i, i + D/2) with i < D/4
        self.register_buffer("has_position", has_position, persistent=False)
        self.value_table = self.value_gate = None
        if layer.has_value_table:
            self.value_table = nn.Embedding(args.vocab_size, args.n_embd, dtype=dtype)
            self.value_gate = CastedLinear(GATE_CHANNELS, args.n_head, bias=False)

    def rotary_frequencies(self, D):
        """Return D/4 frequencies from 1 to 1/1024, and D/4 zeros for channels without position."""
        return F.pad(1024.0 ** -torch.linspace(0, 1, D // 4), (0, D // 2 - D // 4))

    def forward(self, x, tokens, mask):  # x: (B, T, C); tokens: (B, T); mask: see attend
        q = self.rotary(norm(self.split_heads(self.c_q(x))))
        k = self.rotary(norm(self.split_heads(self.c_k(x))))
        v = self.split_heads(self.c_v(x))
        if self.offset_keys:
            previous_k = torch.cat([k[:, :1], k[:, :-1]], dim=1)  # the first key stays as it is
            k = torch.where(self.has_position, k, previous_k)
        if self.value_table is not None:
            gate = 2 * self.value_gate(x[..., :GATE_CHANNELS]).sigmoid()  # (B, T, H); 1 at first
            v = v + gate[..., None] * self.split_heads(self.value_table(tokens))
        y = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.c_proj(y.transpose(1, 2).flatten(2))


def attend(q, k, v, mask):
    """Return the output of attention, (B, H, T, D), like q, k and v.

    mask: a result of attention_mask, or None for causal attention within the whole sequence.
    """
    if isinstance(mask, BlockMask):
        return flex_attention(q, k, v, block_mask=mask, scale=ATTENTION_SCALE)
    causal = mask is None
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=ATTENTION_SCALE)


def attention_mask(documents, window_blocks):
    """Return a mask for causal attention within a document and a sliding window.

    documents: (B, T), the index of each token's document, which never decreases. window_blocks:
    scalar tensor; a token sees its own block and the window_blocks - 1 blocks before it. Returns a
    BlockMask if the model is compiled for a GPU and T is a multiple of BLOCK, else a bool tensor,
    (B, 1, T, T).
    """

    def visible(b, h, query, key):
        near = query // BLOCK - key // BLOCK < window_blocks
        return (key <= query) & near & (documents[b, query] == documents[b, key])

    B, T = documents.shape
    device = documents.device
    # Without compiling, FlexAttention would store all scores in float32.
    if device.type == "cpu" or not torch.compiler.is_compiling() or T % BLOCK != 0:
        sequence = torch.arange(B, device=device)[:, None, None]  # (B, 1, 1)
        query = torch.arange(T, device=device)[:, None]  # (T, 1)
        key = torch.arange(T, device=device)
        return visible(sequence, 0, query, key)[:, None]  # broadcast to (B, 1, T, T)
    # Which blocks of keys each block of queries sees: (B, queries, keys). The index of the document
    # never decreases, so an earlier block of keys shares a document with the queries if and only if
    # key_last >= query_first.
    query_first = documents[:, ::BLOCK].unsqueeze(2)
    key_last = documents[:, BLOCK - 1 :: BLOCK].unsqueeze(1)
    block = torch.arange(T // BLOCK, device=device)
    distance = block[:, None] - block
    seen = (query_first <= key_last) & (distance >= 0) & (distance < window_blocks)
    counts = seen.sum(-1, dtype=torch.int32)  # how many blocks of keys a block of queries sees
    # A block of queries sees consecutive blocks of keys, which end with its own. Its row lists the
    # first of them, the next one, and so on. FlexAttention reads only the first `counts` entries;
    # clamp keeps the others in range. torch.argsort would do this in one line, but takes about a
    # minute to compile.
    first_seen = block - counts + 1
    indices = (first_seen[:, :, None] + block).clamp(max=len(block) - 1).int()
    return BlockMask.from_kv_blocks(
        counts[:, None], indices[:, None], BLOCK_SIZE=BLOCK, mask_mod=visible
    )


class ModernBlock(nn.Module):
    def __init__(self, args, layer, dtype):
        super().__init__()
        self.attn = ModernAttention(args, layer, dtype) if layer.has_attention else None
        self.mlp = MLP(args)
        # Weights of the residual stream, of the token embeddings and of the n-gram embeddings.
        self.input_weights = nn.Parameter(torch.empty(3))

    def forward(self, x, x0, ngram_embeddings, attention_input, tokens, mask):
        """Return the residual stream after this block, (B, T, C).

        x, x0: the stream and the token embeddings, (B, T, C). ngram_embeddings: (B, T, C), or 0.0
        without a table. attention_input: None, or an earlier layer's output, (B, T, C), which
        attention reads instead of x. tokens: (B, T).
        """
        stream_weight, token_weight, ngram_weight = self.input_weights
        x = stream_weight * x + token_weight * x0 + ngram_weight * ngram_embeddings
        if self.attn is not None:
            attention_input = x if attention_input is None else attention_input
            x = x + self.attn(norm(attention_input), tokens, mask)
        return x + self.mlp(norm(x))


class NgramTable(nn.Module):
    """An embedding table of n-grams, indexed by hashes of the last 2, 3, ... max_ngram tokens.

    The rows found for a position are summed; n-grams may share a row. In training mode, n-grams are
    dropped with probability `dropout`, and the others are scaled up to compensate.
    With Adagrad, the weight is float32, and its gradient is sparse unless the model is compiled.
    With AdamW, the weight has the given dtype, and its gradient is dense.
    """

    def __init__(self, args, dtype):
        super().__init__()
        self.max_ngram = args.max_ngram
        self.dropout = args.ngram_dropout
        # A Python number would be a part of the graph, and a new seed would miss the compile cache.
        self.register_buffer("seed", torch.tensor(args.seed), persistent=False)
        self.adagrad = args.ngram_learning_rate > 0
        dtype = torch.float32 if self.adagrad else dtype
        self.weight = nn.Parameter(torch.empty(args.ngram_rows, args.n_embd, dtype=dtype))

    def forward(self, inputs):  # (B, T) to (B, T, C)
        hash_of_ngram = inputs
        hashes = []
        for distance in range(1, self.max_ngram):
            # The tokens `distance` positions earlier, with zeros before the sequence.
            earlier = F.pad(inputs, (distance, 0))[:, : inputs.size(1)]
            # Without + 1, n-grams of zeros of any length would have the hash 0. int64 may overflow.
            hash_of_ngram = hash_of_ngram * 1000003 + earlier + 1
            hashes.append(hash_of_ngram)
        hashes = torch.stack(hashes, dim=-1)  # (B, T, max_ngram - 1)
        # torch.compile does not support sparse gradients.
        sparse = self.adagrad and not torch.compiler.is_compiling()
        rows = F.embedding(hashes % len(self.weight), self.weight, sparse=sparse)
        if self.dropout and self.training:
            scale = self.survives_dropout(hashes, inputs) / (1 - self.dropout)
            rows = rows * scale[..., None].type_as(rows)
        return rows.sum(2)

    def survives_dropout(self, hashes, inputs):
        """Return a mask of the n-grams that dropout keeps: bool, (B, T, max_ngram - 1).

        hashes: (B, T, max_ngram - 1), one for each n-gram. Whether an n-gram is kept depends only
        on its hash, on the seed and on the sum of the sequence's tokens, and therefore not on the
        number of ranks or on earlier batches. All its copies in a sequence are kept or dropped
        together.
        """
        # Multiplicative hashing with an odd salt and the multiplier of Knuth's MMIX generator. The
        # int64 product wraps around, and its highest bits are mixed best.
        salt = 2 * (inputs.sum(1)[:, None, None] + 1000003 * self.seed) + 1
        product = hashes * salt * 6364136223846793005
        highest_bits = product >> 44  # 20 bits, from -2**19 to 2**19 - 1
        uniform = highest_bits / 2**20 + 0.5  # in [0, 1)
        return uniform >= self.dropout


class ModernGPT(nn.Module):
    """A GPT with ideas from later public records. It supports any number of layers.

    The input of every layer is a learned weighted sum of the residual stream, the token embeddings
    (x0) and the n-gram embeddings. Activations and embedding tables have the given dtype, except a
    table that Adagrad trains (see NgramTable); other weights are float32.
    Source: records 8 to 77 (2024 to 2026) of https://github.com/KellerJordan/modded-nanogpt.
    records/2026-11-26_Modern_2026 lists each part with its source. N-grams of more than two tokens,
    and the dropout of n-grams, are our own.
    """

    def __init__(self, args, dtype=torch.float32):
        super().__init__()
        self.dtype = dtype
        self.layers = modern_layers(args.n_layer)
        self.wte = nn.Embedding(args.vocab_size, args.n_embd, dtype=dtype)
        self.ngrams = NgramTable(args, dtype) if args.ngram_rows else None
        self.h = nn.ModuleList(ModernBlock(args, layer, dtype) for layer in self.layers)
        self.has_skip = any(layer.ends_skip for layer in self.layers)
        if self.has_skip:
            self.skip_weight = nn.Parameter(torch.empty(()))
        self.backout_weight = nn.Parameter(torch.empty(()))
        self.lm_head = CastedLinear(args.n_embd, args.vocab_size, bias=False)
        self.init_weights(args)
        self.document_token = args.document_token
        self.has_window = args.window > 0
        # A buffer, because changing a Python number would recompile the model. It holds the final
        # window, for inference. During training, apply_schedule sets it for each step.
        window_blocks = torch.tensor(window_blocks_at(args.num_iterations, args))
        self.register_buffer("window_blocks", window_blocks, persistent=False)

    def init_weights(self, args):
        """Fill all weights with their initial values.

        weights                   initial values                           public records
        wte                       normal, std 1
        c_q, c_k, c_v             uniform, std 0.5 / sqrt(columns)         77
        mlp.c_fc                  uniform, std 0.5 / sqrt(columns)         62
        c_proj                    zeros, set in CausalSelfAttention, MLP   62
        value_gate                zeros                                    62
        value_table               normal, std 0.01                         70
        ngrams                    zeros                                    62
        lm_head                   zeros                                    8
        input_weights             1.1 stream, 0 tokens, 0.1 n-grams        45, 62
        skip_weight               0.18, about sigmoid(-1.5)                45
        backout_weight            0.5                                      40
        c_k of the last layer     equal to its c_q, if equal_keys is set   none, our own
        """
        nn.init.normal_(self.wte.weight)
        nn.init.zeros_(self.lm_head.weight)
        if self.ngrams is not None:
            nn.init.zeros_(self.ngrams.weight)
        if self.has_skip:
            nn.init.constant_(self.skip_weight, 0.18)
        nn.init.constant_(self.backout_weight, 0.5)
        for layer, block in zip(self.layers, self.h):
            block.input_weights.data.copy_(torch.tensor([1.1, 0.0, 0.1]))
            uniform = [block.mlp.c_fc]
            if layer.has_attention:
                uniform += [block.attn.c_q, block.attn.c_k, block.attn.c_v]
            for linear in uniform:
                bound = 0.5 * (3 / linear.in_features) ** 0.5  # sqrt(3) standard deviations
                nn.init.uniform_(linear.weight, -bound, bound)
            if layer.has_value_table:
                nn.init.normal_(block.attn.value_table.weight, std=0.01)
                nn.init.zeros_(block.attn.value_gate.weight)
        if args.equal_keys:
            # From the first step on, the last layer's offset keys find what followed earlier copies
            # of a token. Related: https://arxiv.org/abs/2305.09828
            self.h[-1].attn.c_k.weight.data.copy_(self.h[-1].attn.c_q.weight)

    def forward(self, inputs, targets=None):
        """Return the loss or logits, with arguments and results as in GPT."""
        ngram_embeddings = 0.0 if self.ngrams is None else self.ngrams(inputs).to(self.dtype)
        x = x0 = norm(self.wte(inputs)).to(self.dtype)  # (B, T, C)
        long = short = None
        if self.has_window:  # without a window, attention is causal across documents
            documents = (inputs == self.document_token).cumsum(1)
            long = attention_mask(documents, self.window_blocks)
            short = attention_mask(documents, (self.window_blocks // 2).clamp(min=1))
        skip = saved = None
        for layer, block in zip(self.layers, self.h):
            if layer.ends_skip:
                x = x + self.skip_weight * skip
            mask = long if layer.is_long else short
            attention_input = saved if layer.reads_saved else None
            x = block(x, x0, ngram_embeddings, attention_input, inputs, mask)
            if layer.starts_skip:
                skip = x
            if layer.is_saved:
                saved = x
        x = x - self.backout_weight * saved  # backout: subtracts a learned share
        return loss_or_logits(norm(x), self.lm_head, targets, LOGIT_SOFTCAP)


def build_model(args, dtype):
    """Return the model that args.model names, with new weights."""
    return GPT(args, dtype) if args.model == "gpt2" else ModernGPT(args, dtype)


# ---- Muon. To use it elsewhere, copy this section: it needs torch and torch.distributed as dist --
# Coefficients (a, b, c) of the Newton-Schulz iterations. Edit them to try others. Three or more are
# needed, because gram_newton_schulz restarts after the second.
NEWTON_SCHULZ = [(3.4445, -4.7750, 2.0315)] * 5


def zeropower_via_newtonschulz5(G, dtype=torch.bfloat16):
    """Orthogonalize G = U S V^T by Newton-Schulz iterations: return approximately U V^T.

    G: (M, N), of any float dtype; it is not modified. dtype: dtype of the matmuls. Returns
    bfloat16, the dtype in which Muon sends updates to other ranks. If the norm of G is below 1e-6,
    the 1e-7 that is added to it makes the result smaller. Raises ValueError if G is not a matrix.
    Source: https://kellerjordan.github.io/posts/muon/
    """
    if G.ndim != 2:
        raise ValueError(f"G has shape {tuple(G.shape)}: expected a matrix")
    # In float32, the squares of entries above 1.8e19 overflow. MPS has no float64.
    norm_dtype = torch.float32 if G.is_mps else torch.float64
    # Two reductions are faster than one over the whole matrix.
    row_norms = torch.linalg.vector_norm(G, dim=1, dtype=norm_dtype)
    frobenius_norm = (torch.linalg.vector_norm(row_norms) + 1e-7).float()  # 0-D
    # Division by a 0-D tensor keeps the dtype: bfloat16 is divided in bfloat16, which is faster.
    X = (G.to(torch.promote_types(G.dtype, dtype)) / frobenius_norm).to(dtype)
    is_tall = G.size(0) > G.size(1)
    X = X.T if is_tall else X  # (m, n) with m <= n
    m, n = X.shape  # for n >= 2 m, the Gram variant is faster
    X = newton_schulz(X) if n < 2 * m else gram_newton_schulz(X)
    return (X.T if is_tall else X).bfloat16()


def newton_schulz(X):
    """Iterate on X, (m, n) with m <= n.

    With R = X X^T and Z = b R + c R^2, an iteration replaces X by (a I + Z) X. It maps each
    singular value s to a s + b s^3 + c s^5, which quickly raises small ones. After five iterations,
    all but the smallest lie between 0.7 and 1.2.
    """
    for a, b, c in NEWTON_SCHULZ:
        R = X @ X.T
        Z = torch.addmm(R, R, R, beta=b, alpha=c)  # b R + c R R
        X = torch.addmm(X, Z, X, beta=a)  # a X + Z X
    return X


def gram_newton_schulz(X):
    """Return the result of newton_schulz, in less time if n >= 2 m.

    The next R is (a I + Z) R (a I + Z). It is therefore enough to iterate on the small matrix R, to
    accumulate the factors a I + Z in Q, and to multiply X only once, by Q. In bfloat16, R drifts
    away from X X^T, so after two iterations, X is multiplied and R is computed anew.
    Source: https://dao-lab.ai/blog/2026/gram-newton-schulz
    """
    identity = torch.eye(len(X), dtype=X.dtype, device=X.device)
    for coefficients in NEWTON_SCHULZ[:2], NEWTON_SCHULZ[2:]:
        R, Q = X @ X.T, None
        for i, (a, b, c) in enumerate(coefficients):
            Z = torch.addmm(R, R, R, beta=b, alpha=c)  # b R + c R R
            Q = Z + a * identity if Q is None else torch.addmm(Q, Z, Q, beta=a)  # (a I + Z) Q
            if i < len(coefficients) - 1:  # the last R is not needed
                R = torch.addmm(R, R, Z, beta=a)  # R (a I + Z)
                R = torch.addmm(R, Z, R, beta=a)  # (a I + Z) R (a I + Z)
        X = Q @ X
    return X


class Muon(torch.optim.Optimizer):
    """MomentUm Orthogonalized by Newton-Schulz: replaces Nesterov momentum U S V^T with U V^T.

    All singular directions of an update get the same size. Leave embeddings, the output head and
    all parameters that are not matrices to another optimizer, such as AdamW.

    params: matrices (M, N), or 4-D convolution kernels, which are flattened to (M, N).
    lr: RMS change of an entry per step.
    momentum: decay of the moving average of gradients.
    weight_decay: decoupled, as in AdamW: a step multiplies entries by 1 - lr * weight_decay. An
      entry whose update is exactly 0, for example for lack of a gradient, does not decay.
    rank, world_size: the rank of this process in process_group, and the size of the group.
    process_group: the ranks that share the work; None is the default group.
    dtype: dtype of the matmuls, torch.bfloat16 or torch.float32.
    beta2: decay of NorMuon's moving averages, which even out the sizes of an update's rows
      (columns, if M < N). 0 disables NorMuon. Source: https://arxiv.org/abs/2510.05491
    cautious: decay only entries that the update moves towards zero.
    Raises ValueError if a parameter or a value is invalid.

    With several ranks, gradients must already be summed or averaged over the ranks, and a parameter
    needs a gradient on all ranks or on none. Each matrix is orthogonalized by one rank, which sends
    the update to the others. Parameters may be DTensors with any placements, such as those created
    by fully_shard; rank and world_size are ignored for them. The momentum of a parameter is placed
    like the parameter. Without DTensors, the state_dict() of every rank is complete. With them,
    save it with torch.distributed.checkpoint.

    Updates of a matrix with M rows and N columns are scaled by sqrt(max(M, N)). To convert values:

        from                                              lr here        weight_decay here
        AdamW; torch.optim.Muon with "match_rms_adamw"    0.2 * lr       weight_decay / 0.2
        torch.optim.Muon by default; Keller Jordan's      lr / sqrt(N)   weight_decay * sqrt(N)

    With N = 768, an lr of 0.02 becomes 0.0007. A converted lr depends on N: use a param group for
    each N, if the original had one lr for all shapes.
    """

    def __init__(
        self,
        params,
        lr,
        momentum=0.95,
        weight_decay=0,
        rank=0,
        world_size=1,
        process_group=None,
        dtype=torch.bfloat16,
        beta2=0.0,
        cautious=False,
    ):
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} must be between 0 and world_size - 1 = {world_size - 1}")
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"dtype={dtype} must be torch.bfloat16 or torch.float32")
        self.rank = rank
        self.world_size = world_size
        self.process_group = process_group
        self.dtype = dtype
        defaults = dict(lr=lr, momentum=momentum, weight_decay=weight_decay)
        super().__init__(params, defaults | dict(beta2=beta2, cautious=cautious))

    def add_param_group(self, param_group):
        """Add a group of parameters. Raises ValueError if Muon cannot handle it."""
        super().add_param_group(param_group)
        check_muon_group(self.param_groups[-1])

    def __getstate__(self):
        """Return what pickle and copy.deepcopy need, including the attributes of this class."""
        own = ("rank", "world_size", "process_group", "dtype")
        return super().__getstate__() | {name: getattr(self, name) for name in own}

    @torch.no_grad()
    def step(self, closure=None):
        """Collective: update all parameters in place; return the closure's loss, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rank_costs = [0] * self.world_size  # cost of the matrices that each rank orthogonalizes
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                if group["beta2"] and "row_squares" not in state:
                    M, N = matrix_shape(p)
                    # For a DTensor p, this is a replicated DTensor.
                    state["row_squares"] = p.new_zeros((M, 1) if M >= N else (1, N))
            self.update_replicated(group, rank_costs)
            self.update_dtensors(group)
        return loss

    def update_replicated(self, group, rank_costs):
        """Collective: update the parameters of a group that every rank holds in full.

        Each rank orthogonalizes some of the matrices and writes the updates into a buffer. The
        other parts of its buffer are 0, so a sum over the ranks gives every rank the exact updates.
        The update of a parameter without a gradient is 0.
        """
        params = [p for p in group["params"] if not is_dtensor(p)]
        if not params:
            return
        sizes = [p.numel() for p in params]
        buffer = torch.zeros(sum(sizes), dtype=torch.bfloat16, device=params[0].device)
        updates = {p: slot.view(matrix_shape(p)) for p, slot in zip(params, buffer.split(sizes))}
        mine = set()  # the parameters whose updates this rank computes
        for p in sorted(params, key=matrix_cost, reverse=True):
            owner = rank_costs.index(min(rank_costs))  # the same on all ranks
            rank_costs[owner] += matrix_cost(p)
            if owner == self.rank:
                mine.add(p)
            if p.grad is None:
                continue
            self.update_momentum(p, group)  # on every rank, so that its state is complete
            if owner == self.rank:
                direction = self.nesterov_direction(p, group).flatten(1).to(self.dtype)
                updates[p].copy_(zeropower_via_newtonschulz5(direction, self.dtype))
                if group["beta2"]:
                    equalize_rows(updates[p], self.state[p]["row_squares"], group["beta2"])
        if self.world_size > 1:
            dist.all_reduce(buffer, group=self.process_group)
        for p, update in updates.items():
            self.apply_update(p, update.view(p.shape), group)
        if group["beta2"] and self.world_size > 1:
            self.share_averages(params, mine)

    def share_averages(self, params, mine):
        """Collective: send NorMuon's averages to all ranks.

        Only the owner of a matrix updates its average, which saves the other ranks many small
        kernels.
        """
        averages = [self.state[p]["row_squares"] for p in params]
        for p, average in zip(params, averages):
            if p not in mine:
                average.zero_()  # so that the sum over ranks is exact
        buffer = torch.cat([average.flatten() for average in averages])
        dist.all_reduce(buffer, group=self.process_group)
        slots = buffer.split([average.numel() for average in averages])
        for average, slot in zip(averages, slots):
            average.copy_(slot.view_as(average))

    def update_dtensors(self, group):
        """Collective: update the DTensors of a group.

        In each round, every rank of the mesh gathers at most one whole matrix, orthogonalizes it,
        and sends the shards of the update back.
        """
        params = [p for p in group["params"] if is_dtensor(p) and p.grad is not None]
        for members in rounds_of(params):
            for p in members:
                self.update_momentum(p, group)
            directions = torch.stack(
                [self.nesterov_direction(p, group).to(self.dtype) for p in members]
            )  # (matrices, *p.shape), with the shards of the parameters
            # Redistribute so that each rank holds at most one whole matrix. dist.tensor is imported
            # already if DTensors exist.
            one_per_rank = [dist.tensor.Shard(0)] * directions.device_mesh.ndim
            whole = directions.redistribute(placements=one_per_rank)
            updates = torch.empty_like(whole, dtype=torch.bfloat16)
            for direction, update in zip(whole.to_local(), updates.to_local()):
                result = zeropower_via_newtonschulz5(direction.flatten(1), self.dtype)
                update.copy_(result.view(update.shape))
            if group["beta2"]:
                # Each rank updates the averages of its matrix, and then all ranks receive them.
                averages = torch.stack([self.state[p]["row_squares"] for p in members])
                my_averages = averages.redistribute(placements=one_per_rank)
                for update, average in zip(updates.to_local(), my_averages.to_local()):
                    equalize_rows(update.flatten(1), average, group["beta2"])
                averages = my_averages.redistribute(placements=averages.placements)
                for p, average in zip(members, averages):
                    self.state[p]["row_squares"].copy_(average)
            for p, update in zip(members, updates.redistribute(placements=directions.placements)):
                self.apply_update(p, update, group)

    def update_momentum(self, p, group):
        """Add the gradient of p to its momentum, a moving average of gradients."""
        self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])

    def nesterov_direction(self, p, group):
        """Return the momentum of p after one step of lookahead, with the placement of p."""
        return torch.lerp(p.grad, self.state[p]["momentum_buffer"], group["momentum"])

    def apply_update(self, p, update, group):
        """Apply weight decay to p, then subtract the scaled update.

        update: with the shape and placement of p.
        """
        if group["weight_decay"]:
            # Where the update is 0, for example without a gradient, nothing decays.
            decay_mask = p * update > 0 if group["cautious"] else update != 0
            p.mul_(torch.where(decay_mask, 1 - group["lr"] * group["weight_decay"], 1.0))
        scale = max(matrix_shape(p)) ** 0.5  # gives the update an RMS of 1
        p.add_(update, alpha=-group["lr"] * scale)


def check_muon_group(group):
    """Raise ValueError unless Muon can handle the parameters and the options of a group."""
    for p in group["params"]:
        if p.ndim not in (2, 4):
            fix = "split stacks into matrices, and give other parameters to AdamW"
            raise ValueError(f"Muon takes 2-D and 4-D parameters, not {tuple(p.shape)}: {fix}")
        if p.device != group["params"][0].device:
            raise ValueError(
                f"a param group is on {p.device} and another device: use one group per device"
            )
        if is_dtensor(p) and p.device_mesh.get_coordinate() is None:
            fix = "on each rank, pass only DTensors whose mesh includes it"
            raise ValueError(f"this rank is not in {p.device_mesh} of a DTensor: {fix}")
    lr, momentum, weight_decay = group["lr"], group["momentum"], group["weight_decay"]
    beta2 = group["beta2"]
    if not (lr >= 0 and 0 <= momentum < 1 and weight_decay >= 0 and 0 <= beta2 < 1):
        values = f"{lr=}, {momentum=}, {weight_decay=}, {beta2=}"
        raise ValueError(f"{values} must be >= 0, and momentum and beta2 < 1")


def is_dtensor(p):
    """Return whether p is a DTensor, without importing DTensor, which takes a second."""
    return hasattr(p, "placements")


def matrix_shape(p):
    """Return (M, N), the shape of a parameter as a matrix."""
    return p.size(0), p.shape[1:].numel()


def matrix_cost(p):
    """Return a number that is proportional to the FLOPs of orthogonalizing a matrix, within 25%."""
    m, n = sorted(matrix_shape(p))
    return m * m * (2 * m + n)


def equalize_rows(update, average, beta2):
    """Divide each row of an update by a moving average of its RMS, and restore the update's norm.

    update: (M, N), changed in place. If M < N, its columns take the place of its rows. average:
    moving average of each row's mean square, (M, 1), or (1, N); updated in place. It starts at 0,
    so it is too small at first, by the same factor for all rows. Keeping the norm of the update
    cancels this factor.
    """
    dim = 1 if update.size(0) >= update.size(1) else 0
    squares = update.float().square().mean(dim, keepdim=True)
    average.lerp_(squares.type_as(average), 1 - beta2)
    scale = average.float().clamp(min=1e-10).rsqrt()
    norm2_before = squares.sum()
    norm2_after = (squares * scale.square()).sum().clamp(min=1e-20)
    update.mul_(scale * (norm2_before / norm2_after).sqrt())


def rounds_of(params):
    """Split DTensors into lists of equal shape and placement, with one matrix for each rank."""
    alike = {}
    for p in params:
        alike.setdefault((p.shape, p.device_mesh, p.placements), []).append(p)
    rounds = []
    for (_, mesh, _), members in alike.items():
        rounds += [members[i : i + mesh.size()] for i in range(0, len(members), mesh.size())]
    return rounds


# ---- Data: shards of tokens, read as one stream --------------------------------------------------
# A shard is a header of 256 int32 values (magic number 20240520, version 1, number of tokens,
# zeros), then the tokens as uint16.
HEADER_BYTES = 1024


def shard_size(path):
    """Return the number of tokens in a shard. Raises UserError unless it is a complete shard."""
    if not os.path.isfile(path):  # a named pipe, for example, would block
        raise UserError(f"{path} is not a file: give a pattern such as data/mine/train_*.bin")
    header = np.fromfile(path, "<i4", HEADER_BYTES // 4)
    tokens, odd_bytes = divmod(os.path.getsize(path) - HEADER_BYTES, 2)
    expected = [20240520, 1, tokens] + [0] * (HEADER_BYTES // 4 - 3)
    if tokens <= 0 or odd_bytes or header.tolist() != expected:
        found = f"{path} is not a complete shard (it begins with {header.tobytes()[:30]})"
        fix = "download it again (if it is a Git LFS pointer, run `git lfs pull`), or repack it "
        fix += "with data/pack.py"
        raise UserError(f"{found}: {fix}")
    return tokens


class TokenStream:
    """The tokens of all shards that match a glob, laid end to end in name order, and repeated.

    Only the file's name may be a pattern. The files stay open, so replacing one does not affect the
    run. Raises UserError if no file matches, or if a file is incomplete. read() also raises it if a
    token is outside the vocabulary.
    """

    def __init__(self, pattern, vocab_size):
        self.vocab_size = vocab_size
        folder, name = os.path.split(pattern)
        self.paths = sorted(glob.glob(os.path.join(glob.escape(folder), name)))
        if not self.paths:
            fix = "check the path (*, ? and [] work only in a file's name), or make the data with "
            fix += "data/fineweb.py or data/pack.py"
            raise UserError(f"no file matches {pattern!r}: {fix}")
        self.sizes = [shard_size(path) for path in self.paths]
        self.files = [open(path, "rb") for path in self.paths]
        self.ends = np.cumsum(self.sizes).tolist()  # positions in the stream
        self.total_tokens = self.ends[-1]

    def read(self, start, count):
        """Return `count` tokens (uint16) from position `start` of the repeated stream."""
        parts = []
        while count > 0:
            start %= self.total_tokens
            shard = bisect.bisect_right(self.ends, start)
            path, file = self.paths[shard], self.files[shard]
            tokens_left = self.ends[shard] - start
            offset = HEADER_BYTES + 2 * (self.sizes[shard] - tokens_left)
            file.seek(offset)
            part = np.fromfile(file, "<u2", min(count, tokens_left))
            if part.max() >= self.vocab_size:
                fix = "pack all files with one encoding, or raise --vocab_size"
                found = f"token {part.max()}, but vocab_size={self.vocab_size}"
                raise UserError(f"{path} holds {found}: {fix}")
            parts.append(part)
            start += len(part)
            count -= len(part)
        return np.concatenate(parts)

    def checksums(self):
        """Return (size, crc32) of each shard. Large shards are sampled at about 128 places."""
        part_size = 2**16
        checksums = []
        for size, end in zip(self.sizes, self.ends):
            checksum = 0
            for offset in range(0, size, max(part_size, size // 128)):
                part = self.read(end - size + offset, min(part_size, size - offset))
                checksum = zlib.crc32(part, checksum)
            checksums.append((size, checksum))
        return checksums


@dataclasses.dataclass
class DistributedDataLoader:
    """The training batches. A batch depends only on the data, the seed and the step.

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

    def batch(self, step):
        """Return this rank's (inputs, targets): (batch_size // world_size, T) int64 on device."""
        count = self.batch_size // self.world_size
        first = step * self.batch_size + self.rank * count
        sequences = [self.sequence(number) for number in range(first, first + count)]
        return inputs_and_targets(np.stack(sequences), self.device)

    def sequence(self, number):
        """Return the T + 1 tokens of a sequence; the last token serves only as a target."""
        if self.shuffle_seed is None:
            return self.stream.read(number * self.T, self.T + 1)
        epoch, index = divmod(number, self.stream.total_tokens // self.T)
        starts = shuffled_starts(self.shuffle_seed, epoch, self.stream.total_tokens, self.T)
        return self.stream.read(starts[index], self.T + 1)


@functools.lru_cache(2)  # a batch may span two epochs
def shuffled_starts(seed, epoch, total_tokens, T):
    """Return the positions at which the sequences of an epoch start, in random order.

    The stream is cut into adjacent sequences, beginning at a random offset below T. The last one
    may wrap around to the start of the stream. total_tokens % T tokens are left out.
    """
    generator = np.random.default_rng((seed, epoch))
    return generator.integers(T) + T * generator.permutation(total_tokens // T)


def inputs_and_targets(sequences, device):
    """Split tokens of shape (B, T + 1) into two int64 tensors of shape (B, T) on a device.

    A copy to a GPU is asynchronous, but work launched later on the CUDA stream sees the tokens.
    """
    inputs = torch.from_numpy(sequences[:, :-1].astype(np.int64, order="C"))
    targets = torch.from_numpy(sequences[:, 1:].astype(np.int64, order="C"))
    if device.type == "cuda":
        inputs, targets = inputs.pin_memory(), targets.pin_memory()
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


# ---- Training: schedule, optimizers, one step, one validation, the loop --------------------------
def params_of(optimizer):
    """Return the parameters of all groups, in the order in which state_dict numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def lr_scale_at(step, args):
    """Return the factor that multiplies all learning rates: 1, then a linear decay to final_lr."""
    warmdown_steps = round(args.warmdown_fraction * args.num_iterations)
    fraction = min(1.0, (args.num_iterations - step) / max(1, warmdown_steps))
    return args.final_lr + (1 - args.final_lr) * fraction


def momentum_at(step, args):
    """Return Muon's momentum. It rises from 0.85 in the warm-up, and falls to 0.85 at the end.

    If muon_warmup_fraction and muon_cooldown_fraction are 0, it is constant.
    """
    warmup_steps = round(args.muon_warmup_fraction * args.num_iterations)
    cooldown_steps = round(args.muon_cooldown_fraction * args.num_iterations)
    remaining = args.num_iterations - step
    rise = step / warmup_steps if step < warmup_steps else 1.0
    fall = remaining / cooldown_steps if remaining < cooldown_steps else 1.0
    floor = min(0.85, args.muon_momentum)  # never above the setting
    return floor + min(rise, fall) * (args.muon_momentum - floor)


def window_blocks_at(step, args):
    """Return the attention window in blocks. It grows linearly, from one block."""
    return max(1, math.ceil(step / args.num_iterations * args.window / BLOCK))


def apply_schedule(model, optimizers, step, args):
    """Set the learning rates, Muon's momentum and weight decay, and the window for a step."""
    lr_scale = lr_scale_at(step, args)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lr_scale
            if getattr(optimizer, "is_scheduled", False):
                group["momentum"] = momentum_at(step, args)
                # As in the public records, lr * weight_decay falls with the square of lr_scale.
                group["weight_decay"] = group["initial_weight_decay"] * lr_scale
    if args.model == "modern":
        model.window_blocks.fill_(window_blocks_at(step, args))


def build_optimizers(model, args):
    """Return the optimizers of a model. Two extra attributes may be set on them.

    is_scheduled: whether momentum and weight decay follow Muon's schedules. every: the optimizer
    updates every so many training steps; gradients accumulate in between.
    """
    build = gpt2_optimizers if args.model == "gpt2" else modern_optimizers
    muon_options = dict(momentum=args.muon_momentum, dtype=model.dtype)
    muon_options |= dict(rank=get_rank(), world_size=get_world_size())
    optimizers = build(model, args, muon_options)
    counts = Counter(p for optimizer in optimizers for p in params_of(optimizer))
    names = {p: name for name, p in model.named_parameters()}
    for p, name in names.items():
        if counts[p] != 1:
            raise UserError(f"{name} is in {counts[p]} optimizers, not 1: see {build.__name__}")
    if counts.keys() - names.keys():
        raise UserError(f"an optimizer has a parameter that the model lacks: see {build.__name__}")
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
            group["initial_weight_decay"] = group.get("weight_decay", 0.0)
    return optimizers


def gpt2_optimizers(model, args, muon_options):
    """Return record 7's optimizers: Muon for the matrices of the blocks, AdamW for the rest."""
    matrices = [p for p in model.h.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p not in set(matrices)]
    muon = Muon(matrices, args.muon_learning_rate, **muon_options)
    muon.is_scheduled = True
    adamw = torch.optim.AdamW(others, args.learning_rate, (0.9, 0.95), weight_decay=0, fused=True)
    return [muon, adamw]


def modern_optimizers(model, args, muon_options):
    """Return Muon and AdamW and, with ngram_learning_rate above 0, Adagrad for the n-gram table.

    The constants are those of record 62.
    """
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    gates = [p for name, p in model.named_parameters() if "value_gate" in name]
    matrices = [p for p in model.h.parameters() if p.ndim == 2 and p not in {*gates, *tables}]
    scalars = [p for p in model.parameters() if p.ndim < 2]
    ngrams = [] if model.ngrams is None else [model.ngrams.weight]
    if args.ngram_learning_rate == 0:
        tables += ngrams
        ngrams = []
    adamw_groups = [
        dict(params=[model.lm_head.weight], lr=args.learning_rate, betas=(0.5, 0.95)),
        dict(params=tables, lr=args.embedding_learning_rate, betas=(0.75, 0.95)),
        dict(params=gates, lr=0.008, betas=(0.9, 0.99)),
        dict(params=scalars, lr=0.04, betas=(0.9, 0.99)),
    ]
    muon_options = muon_options | dict(
        weight_decay=args.muon_weight_decay, beta2=0.95, cautious=True
    )
    muon = Muon(matrices, args.muon_learning_rate, **muon_options)
    muon.is_scheduled = True
    others = [torch.optim.AdamW(adamw_groups, eps=1e-10, weight_decay=0, fused=True)]
    if ngrams:
        others.append(torch.optim.Adagrad(ngrams, args.ngram_learning_rate))
    for optimizer in others:
        optimizer.every = args.adamw_every
    return [muon, *others]


def micro_batches(inputs, targets, size):
    """Yield (inputs, targets, rows): `size` sequences, of which only the first `rows` are real.

    inputs, targets: (B, T) int64. Another shape would recompile the model, so the last micro-batch
    is padded with sequences whose targets are ignored.
    """
    for x, y in zip(inputs.split(size), targets.split(size)):
        padding = (0, 0, 0, size - len(x))  # F.pad lists the last dimension, T, first
        yield F.pad(x, padding), F.pad(y, padding, value=-1), len(x)


def train_step(run, inputs, targets):
    """Collective: do one optimizer step. Return a dict of 0-D tensors.

    inputs, targets: (B, T) int64, this rank's part of the batch, which is split into micro-batches
    of at most device_batch_size sequences. The result holds loss, stops (how many ranks were asked
    to stop the run) and anything else to log. On a GPU, this only launches work: nothing here waits
    for the device.
    """
    sequences = len(inputs) * get_world_size()
    loss = 0.0
    for x, y, rows in micro_batches(inputs, targets, run.micro_batch_size):
        # With this scaling, sums over micro-batches and ranks are means.
        micro_loss = run.model(x, y) * (rows / sequences)
        micro_loss.backward()
        loss += micro_loss.detach()
    due = [o for o in run.optimizers if (run.step + 1) % getattr(o, "every", 1) == 0]
    sum_gradients(due)
    # This is the place to clip gradients or take their norm: those of `due` are complete now.
    for optimizer in due:
        optimizer.step()
        optimizer.zero_grad()
    stops = torch.full_like(loss, run.stop.requested)  # without a copy from the host
    loss, stops = sum_over_ranks(torch.stack([loss, stops]))
    return dict(loss=loss, stops=stops)  # add others, such as grad_norm=norm, to log them


def sum_gradients(optimizers):
    """Collective: sum all gradients over the ranks, in one buffer for each dtype."""
    if get_world_size() == 1:
        return
    params = [p for optimizer in optimizers for p in params_of(optimizer) if p.grad is not None]
    for dtype in dict.fromkeys(p.dtype for p in params):  # each once, in the same order everywhere
        members = [p for p in params if p.dtype == dtype]
        buffer = torch.cat([p.grad.to_dense().flatten() for p in members])
        dist.all_reduce(buffer)
        for p, gradient in zip(members, buffer.split([p.numel() for p in members])):
            p.grad = gradient.view(p.shape)


@torch.no_grad()
def evaluate(run):
    """Collective: return the mean loss on the validation tokens, the same on all ranks."""
    run.model.eval()  # without dropout of n-grams
    total = torch.zeros((), dtype=torch.float64, device=run.device)
    inputs, targets = inputs_and_targets(run.validation, run.device)
    for x, y, rows in micro_batches(inputs, targets, run.micro_batch_size):
        total += run.model(x, y).double() * rows
    run.model.train()
    return sum_over_ranks(total).item() / (run.args.val_tokens // run.args.sequence_length)


def validate(run):
    """Collective: set run.val_loss and log it. If the run repeats its data, keep best.pt."""
    with run.log.timed("validation"):
        run.val_loss = evaluate(run)
        check_weights_agree(run.model)
    lr = run.args.learning_rate * lr_scale_at(run.step, run.args)
    run.log.progress(run.step, "val_loss", run.val_loss, dict(lr=lr))
    is_best = run.val_loss < run.best_loss
    if run.repeats_data and is_best and save(run, "best.pt"):  # later weights may overfit
        run.best_loss = run.val_loss


def train(run):
    """Collective: train up to the last step, or until a rank must stop; validate on the way.

    While a GPU computes a step, the host reads the next batch. Then it waits for the GPU.
    """
    args, first_step = run.args, run.step
    batch = run.train_loader.batch(run.step)
    while run.step < args.num_iterations:
        # Stop only after an update of AdamW: checkpoints do not hold accumulated gradients.
        if run.stopped and run.step % args.adamw_every == 0:
            break
        apply_schedule(run.model, run.optimizers, run.step, args)
        if args.val_loss_every and run.step % args.val_loss_every == 0:
            validate(run)
        if args.save_every and run.step % args.save_every == 0 and run.step > first_step:
            save_checkpoint(run)
        results = train_step(run, *batch)
        run.step += 1
        if run.step < args.num_iterations:
            batch = run.train_loader.batch(run.step)
        log_step(run, results)
    if not run.stopped:  # otherwise, the resumed run validates
        apply_schedule(run.model, run.optimizers, run.step, args)
        validate(run)


def log_step(run, results):
    """Wait for the results of train_step and log them. Set run.stopped if a rank must stop."""
    values = {name: tensor.item() for name, tensor in results.items()}
    loss = values.pop("loss")
    run.stopped |= values.pop("stops") > 0
    run.log.progress(run.step, "train_loss", loss, values)
    if not math.isfinite(loss):
        raise UserError(f"train_loss is {loss} at step {run.step}: lower the learning rates")


# ---- Main: from settings to a result -------------------------------------------------------------
@dataclasses.dataclass
class Run:
    """A run: what it trains, and how far it has come."""

    args: Hyperparameters
    device: torch.device
    model: nn.Module  # GPT or ModernGPT
    optimizers: list
    train_loader: DistributedDataLoader
    validation: np.ndarray  # this rank's sequences, (sequences, T + 1) uint16
    facts: dict  # what must be the same when the run is resumed
    log: "Log"
    stop: "StopRequest"
    lock: object = None  # the open file that reserves the folder, on rank 0
    loaded_file: str = ""  # where its weights came from; empty if they are new
    step: int = 0  # number of optimizer steps done
    stopped: bool = False  # a rank has asked all ranks to stop
    val_loss: float = math.nan  # of the last validation
    best_loss: float = math.inf  # validation loss of the weights in best.pt

    def __post_init__(self):
        self.folder = Path(self.args.log_dir, self.args.run_id)
        # As few micro-batches as device_batch_size allows, with sizes as equal as possible.
        sequences = self.args.batch_size // get_world_size()
        passes = math.ceil(sequences / self.args.device_batch_size)
        self.micro_batch_size = math.ceil(sequences / passes)
        tokens_per_step = self.args.batch_size * self.args.sequence_length
        self.tokens_to_train = self.args.num_iterations * tokens_per_step
        self.repeats_data = self.tokens_to_train > self.train_loader.stream.total_tokens


def set_up(args, stop):
    """Collective: return the Run that args describe, at step 0. Writes no files."""
    device = join_ranks(args)
    configure_backend(args, device)
    train_loader, validation, val_tokens, data_facts = open_data(args, device)
    run_id = args.run_id or time.strftime("%Y%m%d-%H%M%S-") + os.urandom(3).hex()
    run_id = from_rank_0(run_id)
    dtype = choose_dtype(args, device)
    args = dataclasses.replace(args, dtype=dtype, run_id=run_id, val_tokens=val_tokens)
    versions = dict(torch=torch.__version__, source=digest(SOURCE))
    check_ranks_agree(vars(args) | data_facts | versions, "start all ranks in the same way")
    torch.manual_seed(args.seed)
    model = build_model(args, getattr(torch, dtype)).to(device)
    optimizers = build_optimizers(model, args)
    facts = settings_with_role(args, "architecture", "training", "growing") | data_facts
    facts["optimizers"] = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    facts["initial_weights"] = args.init or "new"
    return Run(args, device, model, optimizers, train_loader, validation, facts, Log(args), stop)


def main(args, stop=None):
    """Collective: train a GPT as configured by args; return the last validation loss.

    stop: a StopRequest, obeyed after a step. Returns None if it stopped the run, or if the run
    had already finished.
    """
    run = set_up(args, stop or StopRequest())
    claim_folder(run)
    if is_finished(run):
        run.log(f"{run.folder} holds the result of this run; nothing to do")
        leave_ranks()
        return None
    restore(run)
    log_header(run)
    # Save at once: after an early crash, --resume=auto must not fall back to new weights, even if
    # the command no longer names the file.
    starts_elsewhere = run.loaded_file and not is_own(run, run.loaded_file)
    if starts_elsewhere and not save_checkpoint(run):
        raise UserError("the first checkpoint was not written: free disk space, then start again")
    if args.compile:
        run.log("compiling (up to a minute; --compile=False starts sooner but trains more slowly)")
        with run.log.timed("compile"):
            compile_model(run)
    with run.log.timed("train"):
        train(run)
    if run.stopped:
        save_and_stop(run)
    else:
        finish(run)
    leave_ranks()
    return None if run.stopped else run.val_loss


def finish(run):
    """Save the weights and, if save_every is set, a checkpoint; log the summary.

    The file model.pt marks the run as finished. It is renamed last, when the log is complete.
    """
    if not math.isfinite(run.val_loss):
        raise UserError(f"the run diverged (val_loss={run.val_loss}): lower the learning rates")
    if run.args.save_every:
        save_checkpoint(run)  # to continue with a larger num_iterations
    if not save(run, "model.unfinished"):
        raise UserError("the weights were not written: free disk space, then resume or start again")
    log_summary(run)
    if get_rank() == 0:
        os.replace(run.folder / "model.unfinished", run.folder / "model.pt")


def save_and_stop(run):
    """Save a checkpoint and log how to continue."""
    if not save_checkpoint(run):
        fix = "free disk space, then resume from an older one"
        raise UserError(f"stopped after step {run.step}, but no checkpoint was written: {fix}")
    advice = f"to continue, repeat the command with --run_id={run.args.run_id} --resume=auto"
    run.log(f"saved a checkpoint in {run.folder}; {advice}")
    run.log(f"stopped by a signal after step {run.step}")


# ---- Machinery: command line ---------------------------------------------------------------------
def check_settings(args):
    """Raise UserError unless the settings have the right types and ranges and are consistent."""
    for field in dataclasses.fields(args):
        name, value = field.name, getattr(args, field.name)
        choices = get_args(field.type)  # the values of a Literal
        if choices and value not in choices:
            raise UserError(f"{name}={value!r} must be one of {', '.join(choices)}")
        types = (int, float) if field.type is float else field.type
        if not choices and not isinstance(value, types):
            raise UserError(f"{name}={value!r} must be of type {field.type.__name__}")
        if not field.metadata:
            continue  # declared with a plain default, without a range
        low, high, needed = (field.metadata[key] for key in ("low", "high", "needs"))
        if field.type in (int, float) and not low <= value <= high:
            raise UserError(f"{name}={value!r} must be at least {low} and at most {high}")
        if needed and is_off(getattr(args, needed)) and value != field.default:
            raise UserError(f"{name} has no effect with {needed}={getattr(args, needed)}")
    if args.n_embd % (2 * args.n_head):
        raise UserError(f"n_embd={args.n_embd} must be divisible by 2 * n_head = {2 * args.n_head}")
    for name in ("num_iterations", "save_every"):
        if getattr(args, name) % args.adamw_every:
            raise UserError(f"{name} must be a multiple of adamw_every={args.adamw_every}")
    if args.model == "modern" and args.n_embd < GATE_CHANNELS:
        raise UserError(f"n_embd={args.n_embd} must be at least {GATE_CHANNELS}")
    if args.window and args.sequence_length % BLOCK:
        fix = f"must be a multiple of {BLOCK} with --window"
        raise UserError(f"sequence_length={args.sequence_length} {fix}")
    if args.window and args.document_token >= args.vocab_size:
        fix = "pass --document_token=256 if the data are bytes"
        raise UserError(f"document_token={args.document_token} is not in the vocabulary: {fix}")
    if not re.fullmatch(r"([\w-][\w.-]*)?", args.run_id):
        allowed = "may contain only letters, digits, '-', '_' and '.', and not begin with '.'"
        raise UserError(f"run_id={args.run_id!r} {allowed}")
    if args.init and args.resume not in ("", "auto"):
        raise UserError("pass either --init or --resume=PATH: both say where the weights come from")
    if args.resume == "auto" and not args.run_id:
        raise UserError("--resume=auto needs --run_id to know which run to resume")


def is_off(value):
    """Return whether this value of a setting switches off others that need it."""
    return value == "gpt2" or not value


def settings_with_role(args, *roles):
    """Return a dict of the settings that have one of these roles."""
    fields = [f for f in dataclasses.fields(args) if f.metadata.get("role", "training") in roles]
    return {field.name: getattr(args, field.name) for field in fields}


def parse_args(argv):
    """Return the Hyperparameters specified by arguments such as --n_layer=6."""
    given = vars(build_parser().parse_args(argv))  # only what was passed
    preset = PRESETS[given.pop("preset")][1]
    settings = vars(Hyperparameters()) | preset | given
    # Reset settings of the preset that have no effect. check_settings refuses any that was given.
    # One pass is enough, because each setting is declared after the one that it needs.
    for field in dataclasses.fields(Hyperparameters):
        needed = field.metadata.get("needs")
        if needed and is_off(settings[needed]) and field.name not in given:
            settings[field.name] = field.default
    packed_size = read_manifest(settings["train_files"]).get("vocab_size")
    if packed_size is not None and "vocab_size" not in given:
        # Padding is for speed. A small vocabulary, such as that of bytes, is not padded.
        if isinstance(packed_size, int) and packed_size > 1024:
            packed_size = math.ceil(packed_size / 128) * 128
        settings["vocab_size"] = packed_size
    return Hyperparameters(**settings)


def build_parser():
    """Return a parser whose namespace holds only the flags that were passed, and the preset."""

    def refuse(message):
        raise UserError(f"{message}. --help lists all settings")

    def boolean(text):
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"

    presets = "\n".join(f"  {name:<12}{text}" for name, (text, _) in PRESETS.items())
    parser = argparse.ArgumentParser(
        usage="train_gpt2.py [--preset=NAME] [--name=value ...]",
        description=__doc__ + "\nEvery setting is listed with its default.",
        epilog=f"presets (--preset=NAME); individual settings override them:\n{presets}",
        formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, width=100),
        argument_default=argparse.SUPPRESS,  # leaves out flags that were not passed
        allow_abbrev=False,
    )
    parser.error = refuse
    parser.add_argument("--preset", choices=PRESETS, default="record7", help=argparse.SUPPRESS)
    groups = dict(
        architecture=parser.add_argument_group("architecture, fixed on --resume and --init"),
        training=parser.add_argument_group("training, fixed on --resume"),
        growing=parser.add_argument_group("training, may grow on --resume"),
        free=parser.add_argument_group("files and machine, which a resumed run may change"),
    )
    for field in dataclasses.fields(Hyperparameters):
        choices = get_args(field.type)  # the values of a Literal
        text = field.metadata.get("help", "").replace("%", "%%")
        text += f" ({', '.join(choices)})" if choices else ""
        groups[field.metadata.get("role", "training")].add_argument(
            f"--{field.name}",
            type={bool: boolean, int: int, float: float}.get(field.type, str),
            choices=choices or None,
            metavar=str(field.default) or "''",  # --help shows the default here
            help=text,
        )
    return parser


# ---- Machinery: data files -----------------------------------------------------------------------
def read_manifest(files):
    """Return the manifest.json beside the shards, a dict with vocab_size and encoding, or {}."""
    path = Path(files).parent / "manifest.json"
    if (path.parent / ".pack").exists():  # exists while data/pack.py replaces shards
        raise UserError(f"{path.parent} is being packed, or packing was interrupted: pack it again")
    if not path.is_file():
        return {}
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(manifest, dict):
            raise ValueError("it is not an object")
        return manifest
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}): repack the data, or remove it") from None


def digest(value):
    """Return 12 hexadecimal digits that identify a value."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def open_data(args, device):
    """Return (train_loader, validation, val_tokens, facts).

    validation: this rank's sequences, (sequences, T + 1) uint16. val_tokens: total over all ranks.
    facts: what identifies the data, regardless of where the files are.
    """
    batch_size, T, world_size = args.batch_size, args.sequence_length, get_world_size()
    if batch_size % world_size:
        raise UserError(f"batch_size={batch_size} must be a multiple of the {world_size} ranks")
    stream = TokenStream(args.train_files, args.vocab_size)
    max_steps = (stream.total_tokens - 1) // (batch_size * T)
    needed_steps = 1 if args.allow_repeat else args.num_iterations
    if max_steps < needed_steps:
        fix = "add data, or lower --batch_size"
        if not args.allow_repeat:
            fix += " or --num_iterations, or pass --allow_repeat=True"
        raise UserError(f"{args.train_files!r} has tokens for only {max_steps} steps: {fix}")
    seed = args.seed if args.shuffle else None
    loader = DistributedDataLoader(stream, batch_size, T, get_rank(), world_size, device, seed)

    val_stream = TokenStream(args.val_files, args.vocab_size)
    usable = (val_stream.total_tokens - 1) // T * T
    if usable == 0:
        raise UserError(f"{args.val_files!r} has at most {T} tokens: lower --sequence_length")
    default = max(T, 2**18 // T * T)  # about 2**18 tokens, in complete sequences
    val_tokens = args.val_tokens or min(usable, default)
    if val_tokens % T or val_tokens > usable:
        limits = f"a multiple of sequence_length={T} up to {usable} for {args.val_files!r}"
        raise UserError(f"val_tokens={val_tokens} must be {limits}")
    # Neighbouring sequences share a token: the last target of one is the first input of the next.
    tokens = val_stream.read(0, val_tokens + 1)
    sequences = np.lib.stride_tricks.sliding_window_view(tokens, T + 1)[::T]

    train_data, val_data = stream.checksums(), val_stream.checksums()
    if len({*train_data, *val_data}) < len(train_data) + len(val_data):
        fix = "remove the copy, and keep train and val apart"
        raise UserError(f"two shards of train_files and val_files have equal checksums: {fix}")
    encoding = read_manifest(args.train_files).get("encoding")  # None without a manifest
    val_encoding = read_manifest(args.val_files).get("encoding")
    if None not in (encoding, val_encoding) and encoding != val_encoding:
        raise UserError(f"train_files are encoded as {encoding}, but val_files as {val_encoding}")
    facts = dict(train_data=digest(train_data), val_data=digest(val_data), encoding=encoding)
    return loader, sequences[get_rank() :: world_size], val_tokens, facts


# ---- Machinery: device and compiler --------------------------------------------------------------
def choose_device(args):
    """Return the torch.device of this process."""
    gpus = torch.cuda.device_count()
    if args.device == "cpu" or (args.device == "auto" and gpus == 0):
        return torch.device("cpu")
    # A launcher may show each process only its own GPU, which is then number 0.
    index = int(os.environ.get("LOCAL_RANK", "0")) if gpus > 1 else 0
    if index >= gpus or not torch.cuda.is_available():
        fix = "start fewer processes, check the driver, or pass --device=cpu"
        raise UserError(f"GPU {index} is not available ({gpus} found): {fix}")
    return torch.device("cuda", index)


def choose_dtype(args, device):
    """Return the dtype of matmuls: for "auto", bfloat16 if the device supports it natively."""
    if args.dtype != "auto":
        return args.dtype
    if device.type == "cuda":
        # T4 and V100 only emulate bfloat16, slowly.
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_mkldnn = torch.backends.mkldnn.is_available()
        has_bf16 = has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if torch.__version__.startswith("2.5.") and args.compile:
            has_bf16 = False  # torch 2.5 cannot compile bfloat16 for CPUs
    return "bfloat16" if has_bf16 else "float32"


def configure_backend(args, device):
    """Set PyTorch's global options. Nearly all of them are for CPUs."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, but Adagrad warns if unset
    if device.type == "cuda":
        return
    # The first call of each of these functions can return wrong values if it is multithreaded, so
    # the first call is on one element (https://github.com/pytorch/pytorch/issues/188792).
    for function in torch.cos, torch.sin, torch.sqrt:
        function(torch.ones(1))
    # Despite their names, the next two options also affect CPUs. Short sequences train faster
    # without the fused attention kernel (measured).
    torch.backends.cuda.enable_flash_sdp(args.sequence_length > 512)
    # Without the fused kernel, keep attention scores in bfloat16.
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    # Sum the gradients of repeated tokens in a fixed order, so that runs are bit-reproducible.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # filling new tensors takes time
    if args.compile:
        from torch._functorch import config as functorch_config  # slow to import
        from torch._inductor import config as inductor_config

        # Recompute some activations in the backward pass: cheaper on a CPU than loading them.
        functorch_config.activation_memory_budget = 0.7
        inductor_config.cpp.vec_isa_ok = True  # skips test compilations of vector instructions


def compile_model(run):
    """Compile the model by running one validation and one training pass on a micro-batch."""
    from torch._dynamo.exc import BackendCompilerFailed  # slow to import

    run.model.compile(dynamic=False, fullgraph=True)
    shape = (run.micro_batch_size, run.args.sequence_length)
    inputs = torch.zeros(shape, dtype=torch.int64, device=run.device)
    # Passing one tensor twice would make the compiler assume that both are always the same.
    targets = torch.zeros_like(inputs)
    try:
        with torch.no_grad():
            run.model.eval()(inputs, targets)
        loss = run.model.train()(inputs, targets)
        loss.backward()
    except BackendCompilerFailed as error:
        cause = " ".join(str(error).split())
        fix = "pass --compile=False, install g++ and Python's headers if they are missing, or set "
        fix += "TORCHINDUCTOR_CACHE_DIR to a folder where programs can be written and run"
        raise UserError(f"the model cannot be compiled ({cause:.200}): {fix}") from None
    run.model.zero_grad()
    loss.item()  # waits for the device


def device_name(device):
    """Return the name of the GPU, or of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu_info = Path("/proc/cpuinfo")
    found = cpu_info.exists() and re.search("model name\\s*: (.*)", cpu_info.read_text())
    return found[1] if found else os.uname().machine


def peak_memory(device):
    """Return peak memory in MiB: allocated by PyTorch on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # macOS reports bytes


# ---- Machinery: ranks, the processes of torchrun, one per GPU ------------------------------------
def get_rank():
    """Return the rank of this process, 0 without torchrun."""
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size():
    """Return the number of ranks, 1 without torchrun."""
    return dist.get_world_size() if dist.is_initialized() else 1


def join_ranks(args):
    """Collective: join torchrun's process group, if any. Return this rank's torch.device."""
    device = choose_device(args)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ and not dist.is_initialized():
        backend, gpu = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        timeout = timedelta(seconds=args.comm_timeout)
        try:
            store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
            # After a restart by torchrun, the store still holds the keys of the earlier attempts.
            store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
            where = dict(store=store, rank=rank, world_size=world_size)
            dist.init_process_group(backend, timeout=timeout, device_id=gpu, **where)
        except (ValueError, RuntimeError) as error:
            # MASTER_ADDR is missing, nothing answers there, or two ranks have the same GPU.
            fix = "use torchrun with one process per GPU, and check the network's settings"
            raise UserError(f"cannot join the other ranks ({error}): {fix}") from None
    return device


def leave_ranks():
    """Collective: leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
        # gloo's threads outlive the group. Let them release the tensors of the last collective, or
        # they may abort the process when the interpreter exits (seen with torch 2.13).
        time.sleep(0.2)


def sum_over_ranks(tensor):
    """Collective: sum a tensor over all ranks in place and return it."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def from_rank_0(value):
    """Collective: return the value that rank 0 passes."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    return values[0]


def check_ranks_agree(facts, fix):
    """Collective: raise UserError on a rank whose facts differ from those of rank 0."""
    for name, value in from_rank_0(facts).items():
        if facts[name] != value:
            here = f"{facts[name]} on rank {get_rank()}"
            raise UserError(f"the ranks differ in {name} ({value} on rank 0, {here}): {fix}")


def check_weights_agree(model):
    """Collective: raise UserError on a rank whose weights differ from those of rank 0."""
    checksum = 0  # the sum of the bit patterns, modulo 2**32
    for p in model.parameters():
        checksum = checksum + p.detach().float().view(torch.int32).sum(dtype=torch.int32)
    fix = "check the hardware, and resume from a checkpoint"
    check_ranks_agree(dict(weights=checksum.item()), fix)


class StopRequest:
    """Records whether a signal has asked this process to stop the run."""

    def __init__(self):
        self.requested = False
        self.signal_time = None  # when the first signal arrived

    def catch_signals(self):
        """Handle the signals of users and batch systems, except those already ignored (nohup)."""
        for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
            number = getattr(signal, name)
            if signal.getsignal(number) != signal.SIG_IGN:
                with contextlib.suppress(ValueError):  # only the main thread may do this
                    signal.signal(number, self.on_signal)

    def on_signal(self, number, frame):
        """Request a stop. A second signal, at least a second later, ends the process at once."""
        if not self.requested:
            self.requested, self.signal_time = True, time.monotonic()
            if os.environ.get("RANK", "0") == "0":
                with contextlib.suppress(OSError):  # the terminal may be closed
                    os.write(
                        2, b"stopping soon, with a checkpoint; press Ctrl-C again to exit at once\n"
                    )
        elif time.monotonic() - self.signal_time > 1:  # torchrun forwards a Ctrl-C once more
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


# ---- Machinery: log ------------------------------------------------------------------------------
LOG_TITLE = "Log of train_gpt2.py"  # begins the header of every log


class Log:
    """Prints lines and appends them to a file, on rank 0 only. Measures the time of each phase."""

    def __init__(self, args):
        self.path = Path(args.log_dir, f"{args.run_id}.txt")
        self.args = args
        self.is_open = False  # claim_folder opens it on rank 0
        self.header = b""  # what log_header wrote
        self.seconds = Counter()  # spent in each phase
        self.phase = "setup"  # everything outside of `timed` counts as setup
        self.last_update = START

    def __call__(self, line):
        """Log a line and print it on the terminal."""
        self.write(f"{line}\n".encode(errors="backslashreplace"))
        self.show(line)

    def show(self, line):
        """Print a line on the terminal, which may be closed."""
        if get_rank() == 0:
            with contextlib.suppress(OSError):
                print(line, flush=True)

    def start_file(self):
        """Start writing to the file. Drops an incomplete last line."""
        with open(self.path, "ab") as file:
            file.truncate(self.path.read_bytes().rfind(b"\n") + 1)
        self.is_open = True

    def write(self, data):
        """Append bytes to the file, all or nothing. Raises UserError if they cannot be written.

        The file is opened each time, because it may have been replaced by an editor. If it was
        deleted, the new one gets the header again.
        """
        if not self.is_open:
            return
        with open(self.path, "ab", buffering=0) as file:
            size = file.tell()
            data = data if size > 0 else self.header + data
            try:
                is_complete = file.write(data) == len(data)
            except OSError:
                is_complete = False
            if not is_complete:
                file.truncate(size)  # a truncated number could look like a result
                fix = "free disk space, then resume the run or start it again"
                raise UserError(f"{self.path} cannot be written: {fix}")

    def progress(self, step, name, loss, others):
        """Log a loss after `step` steps, with the training time so far.

        others: further results, as {name: value}.
        """
        self.update_seconds()
        ms = 1000 * self.seconds["train"]
        times = f"train_time:{ms:.0f}ms step_avg:{ms / max(step, 1):.2f}ms"
        more = "".join(f" {name}:{value:.4g}" for name, value in others.items())
        self(f"step:{step}/{self.args.num_iterations} {name}:{loss:.4f} {times}{more}")

    def update_seconds(self):
        """Add the time since the last call to the current phase."""
        now = time.perf_counter()
        self.seconds[self.phase] += now - self.last_update
        self.last_update = now

    @contextlib.contextmanager
    def timed(self, phase):
        """Time a `with` block as a separate phase, and pause the enclosing one.

        The block must end by synchronizing with the device, for example with .item().
        """
        self.update_seconds()
        outer_phase, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.update_seconds()
            self.phase = outer_phase


def log_header(run):
    """Log what defines a run: source, settings, environment, data, optimizers, start."""
    args, log = run.args, run.log
    hidden = [f"{LOG_TITLE}, run_id={args.run_id}", SOURCE]
    hidden += [f"hyperparameter {name}={value!r}" for name, value in vars(args).items()]
    git = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty", "--abbrev=40"]
    commit = ""
    with contextlib.suppress(OSError):  # git is not installed
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    workers = f"processes:{get_world_size()} threads:{torch.get_num_threads()}"
    data = f"train_data:{run.facts['train_data']} val_data:{run.facts['val_data']}"
    shown = [
        f"training {type(run.model).__name__} with {run.facts['optimizers']}",
        f"torch:{torch.__version__} commit:{commit} device:{device_name(run.device)} {workers}",
        f"matmul_dtype:{args.dtype} micro_batch:{run.micro_batch_size}",
        f"val_tokens:{args.val_tokens} train_tokens:{run.train_loader.stream.total_tokens} {data}",
    ]
    for optimizer in run.optimizers:
        values = sum(p.numel() for p in params_of(optimizer))
        shown.append(f"{type(optimizer).__name__} parameters:{values}")
    verb = f"continuing after step {run.step}" if run.step else "starting"
    shown.append(f"{verb} from {run.loaded_file or 'new weights'}")
    header = "".join(f"{line}\n" for line in hidden + shown).encode(errors="backslashreplace")
    log.write(header)  # in one write, so that it is never partial
    log.header = header
    log.show("\n".join(shown))


def log_summary(run):
    """Log the result as `key: value` lines."""
    args, log = run.args, run.log
    log(f"val_loss: {run.val_loss:.4f}")
    if args.target_val_loss:
        log(f"target_val_loss: {args.target_val_loss}")
    if run.best_loss < run.val_loss:
        log(f"best_val_loss: {run.best_loss:.4f}\nbest_weights: {run.folder / 'best.pt'}")
    log(f"weights: {run.folder / 'model.pt'}")
    log(f"steps: {args.num_iterations}\ntokens: {run.tokens_to_train}\nseed: {args.seed}")
    for phase, seconds in log.seconds.items():
        log(f"{phase}_seconds: {seconds:.1f}")
    log(f"tokens_per_second: {run.tokens_to_train / log.seconds['train']:.0f}")
    log(f"peak_memory_mib: {peak_memory(run.device):.0f}")
    if args.compile:  # one for training, one for validation; more indicate recompilation
        log(f"graphs: {torch._dynamo.utils.counters['stats']['unique_graphs']}")


# ---- Machinery: checkpoints ----------------------------------------------------------------------
FORMAT = 4  # version of the .pt files


def save(run, name, **more):
    """Write weights, settings, facts and `more` atomically. Return whether this succeeded.

    Only rank 0 writes; other ranks return True. A failure, for example because the disk is full, is
    logged. If a tensor is not finite, all ranks raise UserError.
    """
    path, partial = run.folder / name, run.folder / "partial"
    state = dict(format=FORMAT, run_id=run.args.run_id, step=run.step, val_loss=run.val_loss)
    state |= dict(hyperparameters=vars(run.args), facts=run.facts, source=digest(SOURCE))
    state |= dict(threads=torch.get_num_threads())
    state |= dict(model=run.model.state_dict()) | more
    for value in tree_leaves(state):  # on all ranks, so that all of them raise
        if isinstance(value, torch.Tensor) and not value.isfinite().all():
            fix = "lower the learning rates"
            raise UserError(f"{path} was not written, because a value is not finite: {fix}")
    if get_rank() != 0:
        return True
    lock_path = run.folder / "run.lock"  # the folder may have been replaced
    if not lock_path.exists() or not os.path.samefile(lock_path, run.lock.fileno()):
        raise UserError(f"{run.folder} was deleted or replaced during the run: start again")
    try:
        with run.log.timed("checkpoint"), open(partial, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        return True
    except (OSError, RuntimeError) as error:  # torch.save turns an OSError into a RuntimeError
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)  # makes room for the warning in the log
        run.log(f"warning: {name} was not written ({error.__context__ or error})")
        return False


def save_checkpoint(run):
    """Save what a run needs to resume, and prune old checkpoints. Return whether it worked."""
    states = [optimizer.state_dict()["state"] for optimizer in run.optimizers]
    path = run.folder / f"state_step{run.step:010d}.pt"
    if not save(run, path.name, optimizers=states, train_seconds=run.log.seconds["train"]):
        return False
    if get_rank() == 0:
        # Newer checkpoints were damaged when the run was resumed, so they do not count.
        usable = [old for old in checkpoints_in(run.folder) if old <= path]
        for old in usable[: -run.args.keep_checkpoints]:
            with contextlib.suppress(OSError):
                old.unlink()
    return True


def checkpoints_in(folder):
    """Return the paths of a run's checkpoints, oldest first."""
    return sorted(folder.glob("state_step" + 10 * "[0-9]" + ".pt"))


def read_pt(path):
    """Return the dict in a file that save() wrote."""
    if not os.path.isfile(path):
        raise UserError(f"{path} is not a file")
    data = Path(path).read_bytes()  # so any error below means bad contents, not a failed read
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:  # a .pt file is a zip file
            damaged_part = archive.testzip()  # compares checksums
            attributes = [info.external_attr for info in archive.infolist()]
        if damaged_part is not None:
            raise ValueError(f"{damaged_part} does not match its checksum")
        if any(attributes):  # one bit, without a checksum, would turn a tensor into a folder
            raise ValueError("an entry has file attributes")
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)  # runs no code
        version = state["format"]
    except MemoryError:
        raise
    except Exception as error:  # both modules raise many types of exceptions
        start = data[:30]  # reveals a web page or a Git LFS pointer
        cause = f"{error!r:.200}; it begins with {start}"
        raise UserError(f"{path} is damaged or not from train_gpt2.py ({cause})") from None
    if version != FORMAT:
        fix = "use the version of train_gpt2.py that wrote it"
        raise UserError(f"{path} has format {version}, not {FORMAT}: {fix}")
    return state


def claim_folder(run):
    """On rank 0, create and lock the run's folder, and open the log.

    The lock is on the file run.lock and lasts until run.lock is closed. Raises UserError if the
    folder was not created by a run, is in use, or holds weights that this run would replace.
    """
    if get_rank() != 0:
        return
    folder, lock_path = run.folder, run.folder / "run.lock"
    if not lock_path.is_file() and (run.log.path.exists() or any(folder.glob("*"))):
        fix = "move it with its log, or pass another --run_id"
        raise UserError(f"{folder} was not created by a run of this script: {fix}")
    folder.mkdir(parents=True, exist_ok=True)
    run.lock = open(lock_path, "a")
    try:
        fcntl.flock(run.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another process is using {folder}: stop it first") from None
    except OSError as error:  # some network file systems have no locks
        run.log(f"warning: {folder} is not locked ({error.strerror}): start only one run there")
    # Check this only while holding the lock: until then, another process could finish this run.
    if run.args.resume != "auto" and any(folder.glob("*.pt")):
        raise UserError(f"{folder} exists: pass another --run_id, or --resume=auto to continue it")
    run.log.start_file()


def is_finished(run):
    """Collective: return whether the folder holds weights of this run after num_iterations."""
    result, steps = run.folder / "model.pt", 0
    if get_rank() == 0 and result.exists():
        state = read_pt(result)
        check_same(run, run.facts, state, result)
        steps = state["step"]
    return from_rank_0(steps) >= run.args.num_iterations


def restore(run):
    """Collective: load the file from which the run starts, if any; set run.loaded_file to its path.

    --resume=auto means the newest checkpoint of the run, else --init, else new weights.
    """
    args, checkpoint = run.args, run.args.resume
    if checkpoint == "auto":
        checkpoint = from_rank_0(newest_checkpoint(run) if get_rank() == 0 else None)
    run.loaded_file = checkpoint or args.init
    if checkpoint:
        load_checkpoint(run, checkpoint)
    elif args.init:
        state = read_pt(args.init)
        facts = settings_with_role(args, "architecture") | {"encoding": run.facts["encoding"]}
        check_same(run, facts, state, args.init)
        load_weights(run.model, state["model"], args.init)


def newest_checkpoint(run):
    """Return the path of the run's newest undamaged checkpoint, or "" if it never had one."""
    checkpoints, result = checkpoints_in(run.folder), run.folder / "model.pt"
    for path in reversed(checkpoints):
        try:
            read_pt(path)
            return str(path)
        except UserError as error:
            run.log(f"skipping a checkpoint: {error}")
    if checkpoints or result.exists():
        fix = "pass another --run_id" + (f", and --init={result}" if result.exists() else "")
        raise UserError(f"{run.folder} has no undamaged checkpoint to continue from: {fix}")
    return ""


def load_checkpoint(run, path):
    """Load the weights, the optimizers' states and the progress of a run."""
    state = read_pt(path)
    if "optimizers" not in state:
        raise UserError(f"{path} holds only weights: start a new run with --init={path}")
    facts = dict(run.facts)
    if not is_own(run, path):
        del facts["initial_weights"]  # another run may have begun from other weights
    check_same(run, facts, state, path)
    threads = state.get("threads", torch.get_num_threads())
    if threads != torch.get_num_threads():
        run.log(f"warning: the last bits will differ: {path} was saved with {threads} threads")
    load_weights(run.model, state["model"], path)
    for optimizer, optimizer_state in zip(run.optimizers, state["optimizers"], strict=True):
        # The options in param_groups are those of this script, not of the checkpoint.
        optimizer.load_state_dict(optimizer.state_dict() | dict(state=optimizer_state))
    run.step, run.val_loss = state["step"], state["val_loss"]
    run.log.seconds["train"] = state["train_seconds"]
    if is_own(run, path):
        with contextlib.suppress(UserError):  # there is no best.pt, or it is damaged
            run.best_loss = read_pt(run.folder / "best.pt")["val_loss"]


def is_own(run, path):
    """Return whether a file is in the folder of the run."""
    return Path(path).resolve().parent == run.folder.resolve()


def load_weights(model, weights, path):
    """Load weights from a file. Raises UserError if they do not fit the model."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"{path} holds weights of another model ({error})") from None


def check_same(run, facts, state, path):
    """Raise UserError unless a file was saved with these facts; warn if the script has changed.

    num_iterations may be larger than in the file. None means unknown and matches anything.
    """
    if state.get("source", digest(SOURCE)) != digest(SOURCE):
        run.log(f"warning: the script has changed since it saved {path}")
    defaults = vars(Hyperparameters())
    may_grow = settings_with_role(run.args, "growing")
    different = []
    for name, value in facts.items():
        # If the file is older than a setting, assume the setting's default.
        saved = state["facts"].get(name, defaults.get(name))
        is_same = value == saved or None in (value, saved)
        has_grown = name in may_grow and value > saved
        if not is_same and not has_grown:
            different.append(f"{name}={saved} (here {value})")
    if different:
        differences = ", ".join(different)
        raise UserError(f"{path} was saved with {differences}: use the same settings and data")


# ---- Machinery: errors and start -----------------------------------------------------------------
def describe_failure(error):
    """Return a message for the user: one line, or a traceback for a bug."""
    if isinstance(error, OSError) and error.filename:
        return f"cannot use {error.filename}: {error.strerror}"
    if isinstance(error, (UserError, OSError)):
        return " ".join(str(error).split())
    # PyTorch has no exception class for running out of CPU memory.
    out_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    if out_of_memory or "DefaultCPUAllocator" in str(error):
        return "out of memory: lower --device_batch_size or, if it is 1, --sequence_length"
    # gloo raises a plain RuntimeError when a connection is lost.
    is_lost = isinstance(error, RuntimeError) and re.search("gloo|pair closure", str(error))
    if dist.is_initialized() and is_lost:
        return "lost the connection to another rank; see its message or torchrun's summary"
    return "".join(traceback.format_exception(error)).rstrip()


def cli(argv):
    """Train as configured on the command line. On failure, print why and exit with status 1."""
    if hasattr(sys.stdout, "reconfigure"):  # Jupyter's stdout lacks it
        sys.stdout.reconfigure(errors="backslashreplace")  # for an ASCII-only terminal
    stop = StopRequest()
    stop.catch_signals()
    try:
        main(parse_args(argv), stop)
    except Exception as error:
        where = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        print(f"train_gpt2.py: {where}{describe_failure(error)}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    cli(sys.argv[1:])
