"""Train GPT-2 124M to a validation loss of 3.28 on FineWeb, in a single file.

    torchrun --standalone --nproc_per_node=8 train_gpt2.py      # 8 GPUs
    python train_gpt2.py                                        # one GPU (24 GB: --preset=24gb)
    python train_gpt2.py --preset=cpu                           # a small byte-level GPT, on a CPU
    python train_gpt2.py --help                                 # all settings and presets

The data must exist: `bash run.sh` first prepares the data and then starts this file.

This reimplements record 7 (October 2024, 12.0 minutes on 8xH100) of the public NanoGPT speedrun,
github.com/KellerJordan/modded-nanogpt. It has not been run on a GPU yet. Numerical differences: the
residual stream is bfloat16, QK-norm's epsilon is 2^-23 (2^-7 with the PyTorch of record 7), the
rotary tables are float32, the first batch is used once (record 7 trains on it twice), and a
sequence may continue in the next data file (record 7 skips the rest of a file). It needs Linux or
macOS, numpy, Python 3.10 or newer, and torch 2.5 or newer.

Everything from Settings to Main is the experiment: read it and edit it. Skip the Machinery at
first. Shapes: B sequences of T tokens, C = n_embd, V = vocab_size, H = n_head, D = C // H.
Functions marked "Collective" wait for all ranks (torchrun processes), so every rank must call them.
"""

import argparse
import contextlib
import dataclasses
import fcntl  # not on Windows: use WSL there
import functools
import glob
import hashlib
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
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Literal, NamedTuple, get_args, get_type_hints

# The log contains this source code. Read it now, in case it is edited during the slow imports.
SOURCE = Path(__file__).read_text(encoding="utf-8", errors="replace")
START = time.perf_counter()  # so that these imports count as setup

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves


# ---- Settings ------------------------------------------------------------------------------------
def setting(default, help):
    """Return a dataclass field with this default and help text."""
    return dataclasses.field(default=default, metadata={"help": help})


def changeable(default, help):
    """Return a setting that may have another value when a run is resumed."""
    return dataclasses.field(default=default, metadata={"help": help, "may_change": True})


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """All settings of a run. Edit the defaults in the file, or pass --name=value to override them.

    To add one, write a line such as `my_setting: float = setting(1.0, "what it does")`. Possible
    types are bool, int, float, str and Literal of strings.
    """

    # Model
    vocab_size: int = setting(50304, "vocabulary size; a manifest.json replaces this default")
    n_layer: int = setting(12, "transformer blocks")
    n_head: int = setting(6, "attention heads; GPT-2 has 12, record 7 has 6")
    n_embd: int = setting(768, "model width")
    dtype: Literal["auto", "bfloat16", "float32"] = setting("auto", "auto: bfloat16 if supported")

    # Training
    seed: int = setting(1337, "seed of the initial weights and of shuffling")
    batch_size: int = setting(512, "global batch size, in sequences")
    sequence_length: int = setting(1024, "tokens per sequence")
    num_iterations: int = setting(5100, "optimizer steps")
    learning_rate: float = setting(0.0036, "AdamW learning rate for the embedding and head")
    muon_learning_rate: float = setting(0.00036, "Muon learning rate for all other matrices")
    muon_momentum: float = setting(0.95, "Muon momentum")
    warmdown_fraction: float = setting(1450 / 5100, "final part, where learning rates decay to 0")
    shuffle: bool = setting(False, "read sequences in random order; False: in file order")
    init: str = setting("", "file with initial weights, such as model.pt")
    val_tokens: int = setting(10485760, "validation tokens; 0: about 2**18, or all if fewer")

    # Files and machine. A resumed run may change these; the data must be the same, in any folder.
    train_files: str = changeable("data/fineweb10B/fineweb_train_*.bin", "glob of training shards")
    val_files: str = changeable("data/fineweb10B/fineweb_val_*.bin", "glob of validation shards")
    allow_repeat: bool = changeable(False, "allow more than one epoch")
    val_loss_every: int = changeable(125, "steps between validations; 0: only at the end")
    target_val_loss: float = changeable(3.28, "only shown in the log; 0: no target")
    run_id: str = changeable("", "name of the log and of the checkpoint folder; default: the time")
    log_dir: str = changeable("logs", "folder of logs and checkpoints")
    save_every: int = changeable(0, "steps between checkpoints; 0: only if a signal stops the run")
    keep_checkpoints: int = changeable(2, "number of recent checkpoints to keep")
    resume: Literal["", "auto"] = changeable("", "auto: continue the run, if it has a checkpoint")
    device: Literal["auto", "cuda", "cpu"] = changeable("auto", "auto: cuda if there is a GPU")
    device_batch_size: int = changeable(64, "largest micro-batch (sequences); lower to save memory")
    compile: bool = changeable(True, "use torch.compile; False starts sooner but trains slower")
    comm_timeout: int = changeable(600, "timeout of collectives, in seconds")

    def __post_init__(self):
        check_settings(self)


# --preset=NAME replaces defaults; settings on the command line override the preset.
PRESETS = {
    "record7": dict(),  # GPT-2 124M on FineWeb, for eight 80 GB GPUs
    "24gb": dict(device_batch_size=32),  # the same run, for one 24 GB GPU
    "cpu": dict(  # a small byte-level GPT, trained on PyTorch's source code, for a CPU
        device="cpu", compile=False, vocab_size=257, n_layer=4, n_head=1, n_embd=128,
        train_files="data/torch_sources/train_*.bin", val_files="data/torch_sources/val_*.bin",
        batch_size=4, sequence_length=512, num_iterations=600, warmdown_fraction=0.5,
        learning_rate=0.004, muon_learning_rate=0.0015, shuffle=True,
        val_loss_every=0, val_tokens=0, target_val_loss=0.0,
    ),
}  # fmt: skip


# ---- Model: GPT-2 with rotary positions, RMSNorm, QK-norm, ReLU^2 and zero-initialized projections
def norm(x):
    """RMSNorm over the last dimension, without a gain."""
    return F.rms_norm(x, (x.size(-1),), eps=2**-23)  # float32's epsilon, also for bfloat16


class CastedLinear(nn.Linear):
    """A linear layer without bias: its weight is float32, but it multiplies in the dtype of x."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x):
        return F.linear(x, self.weight.type_as(x))


class Rotary(nn.Module):
    """Rotary position embedding: rotates (x[i], x[i + D/2]) by -position * frequencies[i] radians.

    Source, which rotates in the other direction: https://arxiv.org/abs/2104.09864
    """

    def __init__(self, frequencies, sequence_length):
        super().__init__()
        angles = torch.outer(torch.arange(sequence_length).float(), frequencies)[:, None]
        self.register_buffer("cos", angles.cos(), persistent=False)  # (T, 1, D/2)
        self.register_buffer("sin", angles.sin(), persistent=False)  # (T, 1, D/2)

    def forward(self, x):  # (B, T, H, D)
        cos, sin = self.cos[: x.size(1)], self.sin[: x.size(1)]
        x1, x2 = x.chunk(2, dim=-1)
        y1 = x1 * cos + x2 * sin
        y2 = x2 * cos - x1 * sin
        return torch.cat([y1, y2], dim=-1).type_as(x)


class CausalSelfAttention(nn.Module):
    """Causal self-attention with rotary positions and normalized queries and keys."""

    def __init__(self, args):
        super().__init__()
        C = args.n_embd
        D = C // args.n_head
        self.head_dim = D
        # Separate matrices, so that Muon orthogonalizes each one separately.
        self.c_q = CastedLinear(C, C)
        self.c_k = CastedLinear(C, C)
        self.c_v = CastedLinear(C, C)
        self.c_proj = CastedLinear(C, C)
        nn.init.zeros_(self.c_proj.weight)  # every block starts as the identity
        frequencies = 10000.0 ** -(torch.arange(0, D, 2).float() / D)  # (D/2,)
        self.rotary = Rotary(frequencies, args.sequence_length)

    def split_heads(self, x):  # (B, T, C) to (B, T, H, D)
        return x.unflatten(-1, (-1, self.head_dim))

    def forward(self, x):  # (B, T, C)
        q = self.rotary(norm(self.split_heads(self.c_q(x))))
        k = self.rotary(norm(self.split_heads(self.c_k(x))))
        v = self.split_heads(self.c_v(x))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, args):
        super().__init__()
        C = args.n_embd
        self.c_fc = CastedLinear(C, 4 * C)
        self.c_proj = CastedLinear(4 * C, C)
        nn.init.zeros_(self.c_proj.weight)

    def forward(self, x):  # (B, T, C)
        return self.c_proj(F.relu(self.c_fc(x)).square())  # ReLU^2: arxiv.org/abs/2109.08668


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

    Weights are float32; activations and matmuls use the given dtype. Modules have GPT-2's names,
    but its c_attn is split into c_q, c_k and c_v. OpenAI's weights do not fit: this model has no
    biases, no learned scales in its norms and no learned positions.
    """

    def __init__(self, args, dtype=torch.float32):
        super().__init__()
        self.dtype = dtype
        self.wte = nn.Embedding(args.vocab_size, args.n_embd)
        self.h = nn.ModuleList(Block(args) for _ in range(args.n_layer))
        self.lm_head = CastedLinear(args.n_embd, args.vocab_size)
        # Tied, with nn.Linear's initialization. That of nn.Embedding is sqrt(3 C) times as large.
        self.wte.weight = self.lm_head.weight

    def forward(self, inputs, targets=None):
        """Return the mean cross-entropy in nats, or the logits (B, T, V) if targets is None.

        The result is float32. inputs: (B, T) int64, T at most sequence_length. targets: the same
        shape; entries of -1 are ignored.
        """
        x = self.wte(inputs).to(self.dtype)  # (B, T, C)
        for block in self.h:
            x = block(x)
        return loss_or_logits(norm(x), self.lm_head, targets)


def loss_or_logits(x, head, targets=None, softcap=0.0):
    """Return the logits head(x) or, if there are targets, their mean cross-entropy in nats.

    The result is float32. x: (B, T, C). head: a CastedLinear. targets: (B, T), where -1 is
    ignored. Only train_modern.py sets softcap.
    """
    if targets is None:
        return soft_capped(head(x), softcap)
    # Even under no_grad, needs_input_grad is True for a parameter. Detach it to skip gradients.
    weight = head.weight if torch.is_grad_enabled() else head.weight.detach()
    return LinearCrossEntropy.apply(x.flatten(0, 1), weight, targets.flatten(), softcap)


def soft_capped(logits, softcap):
    """Return the logits in float32, as softcap * tanh(logits / softcap) if softcap > 0."""
    logits = logits.float()
    if softcap:  # written with tanh(z) = 2 sigmoid(2 z) - 1, because Inductor fuses it better
        logits = 2 * softcap * (2 * logits / softcap).sigmoid() - softcap
    return logits


class LinearCrossEntropy(torch.autograd.Function):
    """The mean cross-entropy of the logits x @ weight.T, like F.cross_entropy, with less memory.

    In float32, all logits of 64 x 1024 tokens of GPT-2 would take 13.2 GB, so a large input is
    handled in chunks of tokens. forward() also computes the gradients of a chunk, while it has the
    logits; backward() only multiplies them by grad_loss. The gradient of the logits is softmax
    minus one-hot; autograd does not see it, so a new term of the loss needs its gradient here, too.
    x: (N, C), weight: (V, C), targets: (N,), -1 is ignored. No second derivatives.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, softcap):
        needs_gradient = any(ctx.needs_input_grad)
        cast_weight = weight.type_as(x)
        count = (targets != -1).sum().clamp(min=1)  # avoids 0 / 0 if all are ignored
        # More chunks save more memory, but chunks below 512 x 50304 logits are slow on CPUs.
        max_chunks = 2 if x.is_cuda else 8  # neither value is tuned
        worthwhile_chunks = len(x) * len(weight) // (512 * 50304)
        chunks = min(max_chunks, max(1, worthwhile_chunks))
        loss = 0.0
        grad_weight = 0.0
        grad_x = []
        for x_i, targets_i in zip(x.chunk(chunks), targets.chunk(chunks)):
            logits = soft_capped(F.linear(x_i, cast_weight), softcap)
            log_p = logits.log_softmax(-1)
            loss += F.nll_loss(log_p, targets_i, ignore_index=-1, reduction="sum") / count
            if needs_gradient:
                is_counted = (targets_i != -1)[:, None]
                one_hot = torch.arange(len(weight), device=x.device) == targets_i[:, None]
                grad_logits = (log_p.exp() - one_hot.float()) * is_counted / count
                if softcap:  # the derivative of tanh is 1 - tanh^2
                    grad_logits *= 1 - (logits / softcap).square()
                grad_logits = grad_logits.type_as(x)
                grad_x.append(grad_logits @ cast_weight)
                grad_weight += (grad_logits.T @ x_i).float()
        if needs_gradient:
            ctx.save_for_backward(torch.cat(grad_x), grad_weight)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * grad_loss, grad_weight * grad_loss, None, None


# ---- Muon ----------------------------------------------------------------------------------------
def orthogonalize(G):
    """Return approximately U V^T for a matrix G = U S V^T, by five Newton-Schulz iterations.

    G: (M, N), float32 or bfloat16; matmuls and the result have its dtype. X starts as G divided by
    its Frobenius norm. With R = X X^T, an iteration sets X = a*X + b*R X + c*R R X, which maps each
    singular value s of X to a*s + b*s^3 + c*s^5. After five iterations, most of them lie between
    0.7 and 1.2. Source: https://kellerjordan.github.io/posts/muon/
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    # Makes all singular values at most 1; 1e-7 avoids 0 / 0. In float32, the squares of entries
    # above 1e19 would overflow. Dividing by a 0-D float64 tensor keeps the dtype of G.
    X = G / (G.norm(dtype=torch.float64) + 1e-7)
    is_tall = X.size(0) > X.size(1)
    X = X.T if is_tall else X  # so that R is as small as possible
    for _ in range(5):
        R = X @ X.T
        Z = torch.addmm(R, R, R, beta=b, alpha=c)  # b*R + c*R R
        X = torch.addmm(X, Z, X, beta=a)  # a*X + Z X
    return X.T if is_tall else X


class Muon(torch.optim.Optimizer):
    """MomentUm Orthogonalized by Newton-Schulz, for matrices. The ranks divide the work.

    lr: learning rate, about the RMS of an update. momentum: decay of the moving average of
    gradients. dtype: dtype of the matmuls. Every rank must hold all parameters and their
    gradients, summed over the ranks.

    Each matrix has a slot in a flat bfloat16 buffer of zeros. Each rank orthogonalizes some of the
    matrices and writes the updates into their slots. An all-reduce then gives all updates to every
    rank; the sum is exact, because a slot is nonzero on only one rank. A single rank also rounds
    its updates to bfloat16, so that the result does not depend on the number of ranks.
    """

    def __init__(self, params, lr, momentum=0.95, rank=0, world_size=1, dtype=torch.bfloat16):
        super().__init__(params, dict(lr=lr, momentum=momentum))
        self.rank, self.world_size, self.dtype = rank, world_size, dtype

    @torch.no_grad()
    def step(self):
        """Collective: update all parameters in place."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            # Each rank takes every world_size-th matrix. Sorting makes their work about equal.
            params.sort(key=torch.numel, reverse=True)
            sizes = [p.numel() for p in params]
            device = group["params"][0].device
            buffer = torch.zeros(sum(sizes), dtype=torch.bfloat16, device=device)
            updates = [slot.view_as(p) for p, slot in zip(params, buffer.split(sizes))]
            for i, (p, update) in enumerate(zip(params, updates)):
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                momentum_buffer = state["momentum_buffer"]
                # Every rank updates all momentum buffers, so that rank 0 can save them.
                momentum_buffer.lerp_(p.grad, 1 - group["momentum"])
                if i % self.world_size == self.rank:
                    # Nesterov momentum. It is an average of gradients rather than a sum, but
                    # orthogonalize() does not depend on the scale.
                    direction = torch.lerp(p.grad, momentum_buffer, group["momentum"])
                    update.copy_(orthogonalize(direction.to(self.dtype)))
            if self.world_size > 1:
                dist.all_reduce(buffer)
            for p, update in zip(params, updates):
                # U V^T has an RMS of 1 / sqrt(max(p.shape)), so lr is about the RMS of the update.
                scale = max(p.shape) ** 0.5
                p.add_(update, alpha=-group["lr"] * scale)


# ---- Data: shards of tokens, read as one stream --------------------------------------------------
# A shard is 256 int32 (magic number 20240520, version 1, token count, zeros), then uint16 tokens.
HEADER_BYTES = 1024


def shard_size(path):
    """Return the number of tokens in a shard. Raises UserError unless it is a complete shard."""
    if not os.path.isfile(path):  # a folder, for example
        raise UserError(f"{path} is not a file: give a pattern such as data/mine/train_*.bin")
    header = np.fromfile(path, "<i4", HEADER_BYTES // 4)
    tokens, odd_bytes = divmod(os.path.getsize(path) - HEADER_BYTES, 2)
    expected = [20240520, 1, tokens] + [0] * (HEADER_BYTES // 4 - 3)
    if tokens <= 0 or odd_bytes or header.tolist() != expected:
        raise UserError(
            f"{path} is not a complete shard (it begins with {header.tobytes()[:30]}): download it "
            "again (if it is a Git LFS pointer, run `git lfs pull`), or repack it with data/pack.py"
        )
    return tokens


class TokenStream:
    """The tokens of all shards that match a glob, in the order of file names, repeated endlessly.

    The files stay open, so replacing one does not affect the run. Raises UserError if no file
    matches, if a file is not a complete shard or, in read(), if a token is not in the vocabulary.
    Another class with read(), checksums() and total_tokens can take its place in open_data(), which
    compares the checksums with those of the validation data.
    """

    def __init__(self, pattern, vocab_size):
        self.vocab_size = vocab_size
        folder, name = os.path.split(pattern)
        # The folder is taken literally, because its manifest.json must describe all shards.
        self.paths = sorted(glob.glob(os.path.join(glob.escape(folder), name)))
        if not self.paths:
            fix = "prepare the data with data/prepare.py or, from your own text, with data/pack.py"
            raise UserError(f"no file matches {pattern!r} (folders take no wildcards): {fix}")
        self.sizes = [shard_size(path) for path in self.paths]
        self.files = [open(path, "rb") for path in self.paths]
        self.total_tokens = sum(self.sizes)
        self.starts = np.cumsum([0, *self.sizes[:-1]])  # position of each shard

    def read(self, start, count):
        """Return `count` tokens (uint16) from position `start` of the repeated stream."""
        parts = []
        while count > 0:
            start %= self.total_tokens
            shard = np.searchsorted(self.starts, start, side="right") - 1
            offset = start - self.starts[shard]  # in tokens
            wanted = min(count, self.sizes[shard] - offset)
            self.files[shard].seek(HEADER_BYTES + 2 * offset)
            part = np.fromfile(self.files[shard], "<u2", wanted)  # fewer if the disk fails
            if len(part) < wanted:
                raise UserError(f"{self.paths[shard]} is truncated or unreadable: check the disk")
            if part.max() >= self.vocab_size:
                raise UserError(
                    f"{self.paths[shard]} holds token {part.max()}, but vocab_size="
                    f"{self.vocab_size}: pack all files with one encoding, or raise --vocab_size"
                )
            parts.append(part)
            start += len(part)
            count -= len(part)
        return np.concatenate(parts)

    def checksums(self):
        """Return (size, crc32) of each shard. Large shards are sampled at about 128 places."""
        part_size = 2**16
        checksums = []
        for start, size in zip(self.starts, self.sizes):
            checksum = 0
            for offset in range(0, size, max(part_size, size // 128)):
                part = self.read(start + offset, min(part_size, size - offset))
                checksum = zlib.crc32(part, checksum)
            checksums.append((size, checksum))
        return checksums


@dataclasses.dataclass
class DistributedDataLoader:
    """The training batches. A global batch depends only on the data, the seed and the step.

    The ranks split it into consecutive equal parts, so a step trains on the same tokens
    with any number of ranks.
    """

    stream: TokenStream
    batch_size: int  # global batch size, in sequences
    sequence_length: int
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
        """Return the T + 1 tokens of a sequence; the last one is only a target."""
        T = self.sequence_length
        if self.shuffle_seed is None:
            return self.stream.read(number * T, T + 1)
        epoch, index = divmod(number, self.stream.total_tokens // T)
        starts = shuffled_starts(self.shuffle_seed, epoch, self.stream.total_tokens, T)
        return self.stream.read(starts[index], T + 1)


@functools.lru_cache(2)  # a batch may span two epochs
def shuffled_starts(seed, epoch, total_tokens, T):
    """Return the int64 positions at which an epoch's sequences start, in random order.

    The stream is treated as a ring, which is cut into total_tokens // T sequences, starting at a
    random offset in [0, T). The remaining total_tokens % T tokens are skipped in this epoch.
    """
    generator = np.random.default_rng((seed, epoch))
    return generator.integers(T) + T * generator.permutation(total_tokens // T)


def inputs_and_targets(sequences, device):
    """Split tokens of shape (B, T + 1) into two int64 tensors of shape (B, T) on a device."""
    inputs = torch.from_numpy(sequences[:, :-1].astype(np.int64))
    targets = torch.from_numpy(sequences[:, 1:].astype(np.int64))
    if device.type == "cuda":
        inputs, targets = inputs.pin_memory(), targets.pin_memory()
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


# ---- Training: optimizers, schedule, one step, one validation, the loop --------------------------
def build_optimizers(model, args):
    """Return record 7's optimizers: Muon for the matrices of the blocks, AdamW for the rest."""
    matrices = [p for p in model.h.parameters() if p.ndim == 2]
    matrix_set = set(matrices)  # in a list, `in` would compare values
    others = [p for p in model.parameters() if p not in matrix_set]
    muon = Muon(
        matrices,
        lr=args.muon_learning_rate,
        momentum=args.muon_momentum,
        rank=get_rank(),
        world_size=get_world_size(),
        dtype=model.dtype,
    )
    adamw = torch.optim.AdamW(
        others, lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0, fused=True
    )
    return [muon, adamw]


def apply_schedule(model, optimizers, step, args):
    """Set the learning rates: constant, then a linear decay to 0. model is unused here.

    step: 0 for the first step. train_modern.py has a schedule of its own.
    """
    warmdown_steps = round(args.warmdown_fraction * args.num_iterations)
    scale = min(1.0, (args.num_iterations - step) / max(1, warmdown_steps))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * scale  # initial_lr is what build_optimizers chose


def train_step(run, inputs, targets):
    """Collective: take one optimizer step. Return a dict of 0-D tensors.

    run: a Run (see Main). inputs, targets: (B, T) int64, this rank's part of the global batch.
    train() needs "loss" and "stop_count" (the number of ranks that got a signal), and logs any
    entries that you add, such as grad_norm. Does not wait for the GPU.
    """
    seed_step(run)  # for models with dropout; this one has no randomness
    loss = 0.0
    for x, y in zip(inputs.split(run.micro_batch_size), targets.split(run.micro_batch_size)):
        # Scaled so that the sum over micro-batches and ranks is the mean over the global batch (of
        # batch_size sequences, without ignored targets).
        micro_loss = run.model(x, y) * (len(x) / run.args.batch_size)
        micro_loss.backward()
        loss += micro_loss.detach()
    sum_gradients(run.model)
    # This is the place to clip the gradients or to compute their norm. The log counts steps from 1:
    # it calls this one run.step + 1.
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    # One all-reduce sums the loss and tells all ranks how many of them got a signal.
    sums = torch.stack([loss, torch.full_like(loss, run.stop_request.received)])
    if get_world_size() > 1:
        dist.all_reduce(sums)
    return dict(loss=sums[0], stop_count=sums[1])


def sum_gradients(model):
    """Collective: sum the gradients over the ranks, in one flat buffer for each dtype.

    The sum is already the mean over the global batch, because train_step scales the losses. This is
    simpler than DDP, which record 7 uses, but it does not overlap with the backward pass.
    """
    if get_world_size() == 1:
        return
    params = [p for p in model.parameters() if p.grad is not None]
    # fromkeys keeps each dtype once, in an order that all ranks share; train_modern.py has two.
    for dtype in dict.fromkeys(p.dtype for p in params):
        members = [p for p in params if p.dtype == dtype]
        buffer = torch.cat([p.grad.flatten() for p in members])
        dist.all_reduce(buffer)
        for p, gradient in zip(members, buffer.split([p.numel() for p in members])):
            p.grad = gradient.view(p.shape)


@torch.no_grad()
def evaluate(run):
    """Collective: return the mean loss on the validation tokens, the same on all ranks."""
    run.model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=run.device)  # summed losses, sequences
    inputs, targets = inputs_and_targets(run.validation, run.device)
    micro_batch_size = run.micro_batch_size
    for x, y in zip(inputs.split(micro_batch_size), targets.split(micro_batch_size)):
        count = len(x)
        # Pad the last micro-batch with ignored rows: another shape would need another compilation.
        padding = (0, 0, 0, micro_batch_size - count)
        x, y = F.pad(x, padding), F.pad(y, padding, value=-1)
        total[0] += run.model(x, y).double() * count
        total[1] += count
    run.model.train()
    if get_world_size() > 1:
        dist.all_reduce(total)
    return (total[0] / total[1]).item()


def validate(run):
    """Collective: set run.val_loss and log it. Stop with an error if the ranks' weights differ.

    If the data repeat, save the best weights.
    """
    with run.log.timed("validation"):
        run.val_loss = evaluate(run)
        check_weights_agree(run.model)
    run.log.progress(run.step, "val_loss", run.val_loss)
    check_finite(run.step, "val_loss", run.val_loss)
    repeats_data = run.tokens_to_train > run.train_loader.stream.total_tokens
    if repeats_data and run.val_loss < run.best_loss:  # the model may overfit later
        run.best_loss = run.val_loss
        save(run, "best.pt")


def train(run):
    """Collective: train until the last step or a stop request, validating along the way."""
    args = run.args
    batch = next_batch(run)
    while run.step < args.num_iterations and not run.stopped:
        # This precedes a validation: train_modern.py's schedule also sets the attention window.
        run.recipe.apply_schedule(run.model, run.optimizers, run.step, args)
        if args.val_loss_every and run.step % args.val_loss_every == 0:
            validate(run)
        with run.log.timed("train"):
            results = train_step(run, *batch)
            run.step += 1
            batch = next_batch(run)  # read while the GPU is busy
            values = {name: tensor.item() for name, tensor in results.items()}  # waits for the GPU
        loss = values.pop("loss")
        run.stopped = values.pop("stop_count") > 0
        run.log.progress(run.step, "train_loss", loss, values)
        check_finite(run.step, "train_loss", loss)
        if args.save_every and run.step % args.save_every == 0:
            save_checkpoint(run)
    if not run.stopped:
        run.recipe.apply_schedule(run.model, run.optimizers, run.step, args)
        validate(run)


# ---- Main: from settings to a result -------------------------------------------------------------
class Recipe(NamedTuple):
    """The parts that another script, such as records/modern/train_modern.py, can replace."""

    script: str  # path from the folder of train_gpt2.py, saved in .pt files for the tools
    sources: dict  # {file name: text} of the script's files, for the log
    settings: type  # Hyperparameters, or a subclass with more settings
    presets: dict
    build_model: Callable  # (args, dtype) -> model; train_step calls model(inputs, targets)
    build_optimizers: Callable  # (model, args) -> list of optimizers
    apply_schedule: Callable  # (model, optimizers, step, args); before each step and validation


RECIPE = Recipe(
    script=Path(__file__).name,
    sources={"train_gpt2.py": SOURCE},
    settings=Hyperparameters,
    presets=PRESETS,
    build_model=GPT,
    build_optimizers=build_optimizers,
    apply_schedule=apply_schedule,
)


@dataclasses.dataclass
class Run:
    """The state of a run. __post_init__ adds `folder`, for checkpoints, and `tokens_to_train`."""

    recipe: Recipe
    args: Hyperparameters
    device: torch.device
    model: nn.Module
    optimizers: list
    train_loader: DistributedDataLoader
    validation: np.ndarray  # this rank's sequences, (sequences, T + 1) uint16
    micro_batch_size: int  # sequences per forward pass: a divisor of the rank's batch
    fixed: dict  # settings and facts about the data that must be the same in a resumed run
    log: "Log"
    stop_request: "StopRequest"  # tells whether this rank got a signal
    lock: object = None  # rank 0's run.lock, kept open because closing it would unlock it
    step: int = 0  # optimizer steps taken
    stopped: bool = False  # some rank got a signal, so all ranks stop
    finished: bool = False  # nothing is left to do, because model.pt exists
    val_loss: float = math.nan  # of the last validation
    best_loss: float = math.inf  # validation loss of the weights in best.pt

    def __post_init__(self):
        args = self.args
        self.folder = Path(args.log_dir, args.run_id)
        self.tokens_to_train = args.num_iterations * args.batch_size * args.sequence_length


def set_up(args, recipe, stop_request):
    """Collective: build the Run that args describe, at step 0. Writes no files."""
    device = join_ranks(args)
    warm_up_mkl()
    if device.type == "cpu":
        configure_cpu(args)
    train_loader, validation, val_tokens, data_facts = open_data(args, device)
    run_id = args.run_id or time.strftime("%Y%m%d-%H%M%S-") + os.urandom(3).hex()
    dtype = choose_dtype(args, device)
    # Fill in the values that this run uses, for its log and for resuming it.
    args = dataclasses.replace(args, dtype=dtype, run_id=from_rank_0(run_id), val_tokens=val_tokens)
    versions = dict(torch=torch.__version__, source=digest(recipe.sources))
    check_ranks_agree(vars(args) | data_facts | versions, fix="start all ranks in the same way")
    torch.manual_seed(args.seed)
    model = recipe.build_model(args, getattr(torch, dtype)).to(device)
    optimizers = recipe.build_optimizers(model, args)
    check_optimizers(model, optimizers)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]  # apply_schedule scales this
    may_change = changeable_names(args)
    fixed = {name: value for name, value in vars(args).items() if name not in may_change}
    fixed |= data_facts
    fixed["optimizers"] = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    rank_batch_size = args.batch_size // get_world_size()
    sizes = range(1, min(rank_batch_size, args.device_batch_size) + 1)
    # The largest divisor, so that all micro-batches have the same shape.
    micro_batch_size = max(n for n in sizes if rank_batch_size % n == 0)
    return Run(
        recipe=recipe,
        args=args,
        device=device,
        model=model,
        optimizers=optimizers,
        train_loader=train_loader,
        validation=validation,
        micro_batch_size=micro_batch_size,
        fixed=fixed,
        log=Log(args),
        stop_request=stop_request,
    )


def main(args, recipe=RECIPE, stop_request=None):
    """Collective: train; return the validation loss, or None if stopped or already finished."""
    run = set_up(args, recipe, stop_request or StopRequest())
    claim_folder(run)
    start_message = restore(run)  # sets run.step and run.finished
    if run.finished:
        run.log(start_message)
        return None
    args = run.args
    log_header(run, start_message)
    run.log.seconds["setup"] = time.perf_counter() - START
    if args.compile:
        with run.log.timed("compile"):
            compile_model(run)
    train(run)
    if run.stopped:
        save_checkpoint(run)
        run.log(
            f"stopped by a signal after step {run.step}; to continue from the checkpoint in "
            f"{run.folder}, repeat the command with --run_id={args.run_id} --resume=auto"
        )
        return None
    log_summary(run)
    save(run, "model.pt")  # last, because it marks the run, with its log, as complete
    return run.val_loss


# ---- Machinery: errors, checks and command line --------------------------------------------------
class UserError(ValueError):
    """An error that the user can fix. It is reported in one line, without a traceback."""


def check_settings(args):
    """Raise UserError unless the settings are in range and consistent."""
    check_at_least(args, 1, "vocab_size n_layer n_head n_embd batch_size sequence_length")
    check_at_least(args, 1, "num_iterations keep_checkpoints device_batch_size comm_timeout")
    check_at_least(args, 0, "seed learning_rate muon_learning_rate muon_momentum val_tokens")
    check_at_least(args, 0, "warmdown_fraction val_loss_every target_val_loss save_every")
    if args.muon_momentum >= 1:
        raise UserError(f"muon_momentum={args.muon_momentum} must be less than 1")
    if args.warmdown_fraction > 1:
        raise UserError(f"warmdown_fraction={args.warmdown_fraction} must be at most 1")
    if args.n_embd % (2 * args.n_head):
        raise UserError(f"n_embd={args.n_embd} must be divisible by 2 * n_head = {2 * args.n_head}")
    if not re.fullmatch(r"([\w-][\w.-]*)?", args.run_id):
        allowed = "letters, digits, '-', '_' and, except at the start, '.'"
        raise UserError(f"run_id={args.run_id!r} may contain only {allowed}")
    if args.resume and not args.run_id:
        raise UserError("--resume=auto needs --run_id to know which run to resume")


def check_at_least(args, low, names):
    """Raise UserError unless low <= setting < 2**63. names: separated by spaces."""
    for name in names.split():
        if not low <= getattr(args, name) < 2**63:  # False for NaN
            raise UserError(f"{name}={getattr(args, name)} must be at least {low} and below 2**63")


def changeable_names(settings):
    """Return the names of the settings that may have other values when a run is resumed."""
    return {f.name for f in dataclasses.fields(settings) if f.metadata.get("may_change")}


def check_finite(step, name, loss):
    """Raise UserError if a loss is NaN or infinite."""
    if not math.isfinite(loss):
        raise UserError(f"{name} is {loss} at step {step}: lower the learning rates")


def check_optimizers(model, optimizers):
    """Raise UserError unless every parameter of the model is in exactly one optimizer."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    counts = Counter(p for group in groups for p in group["params"])
    for name, p in model.named_parameters():
        if counts[p] != 1:
            raise UserError(f"{name} must be in exactly one optimizer: see build_optimizers")


def parse_args(argv, recipe=RECIPE):
    """Return the settings specified by a preset and by arguments such as --n_layer=6."""

    def boolean(text):
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"

    parser = argparse.ArgumentParser(
        prog=Path(recipe.script).name,
        usage=f"{recipe.script} [--preset=NAME] [--name=value ...] (put wildcards in quotes)",
        description=recipe.settings.__doc__,
        formatter_class=functools.partial(argparse.HelpFormatter, width=100, max_help_position=40),
        argument_default=argparse.SUPPRESS,  # leaves out settings that were not passed
        allow_abbrev=False,
    )
    names = list(recipe.presets)
    types = get_type_hints(recipe.settings)
    preset_help = f"settings to start from (the values below are those of {names[0]})"
    parser.add_argument("--preset", choices=names, default=names[0], help=preset_help)
    for field in dataclasses.fields(recipe.settings):
        shown_default = recipe.presets[names[0]].get(field.name, field.default)
        parser.add_argument(
            f"--{field.name}",
            type={bool: boolean, int: int, float: float}.get(types[field.name], str),
            choices=get_args(types[field.name]) or None,  # the values of a Literal
            metavar=str(shown_default) or "''",  # --help prints it after the name
            help=field.metadata.get("help", "").replace("%", "%%"),
        )
    given = vars(parser.parse_args(argv))
    preset = given.pop("preset")
    settings = recipe.presets[preset] | given
    train_files = settings.get("train_files", recipe.settings.train_files)
    packed_size = read_manifest(train_files).get("vocab_size")
    if packed_size is not None:
        multiple = 128 if packed_size > 1024 else 1  # large vocabularies are padded, for speed
        padded_size = math.ceil(packed_size / multiple) * multiple
        # The last token starts a document. train_modern.py has a setting for it.
        packed = dict(vocab_size=padded_size, document_token=packed_size - 1)
        # The manifest overrides the default and the preset, but not the command line.
        settings |= {k: v for k, v in packed.items() if k in types and k not in given}
    return recipe.settings(**settings)


# ---- Machinery: data files -----------------------------------------------------------------------
def read_manifest(pattern):
    """Return the content of manifest.json in the folder of the shards, or {} if there is none."""
    path = Path(pattern).parent / "manifest.json"
    if (path.parent / ".pack").exists():  # exists while data/pack.py replaces shards
        raise UserError(f"data/pack.py has not finished writing {path.parent}: run it again")
    if not path.is_file():
        return {}
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(manifest, dict) or not isinstance(manifest.get("vocab_size", 1), int):
            raise ValueError("it must be an object, and vocab_size an integer")
        return manifest
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}): repack the data, or remove it") from None


def digest(value):
    """Return a short hash of repr(value), 12 hexadecimal digits."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def next_batch(run):
    """Return this rank's part of the batch for run.step, or None after the last step.

    Raises UserError if it cannot be read. Rank 0 saves a checkpoint before, if run.step > 0.
    """
    if run.step == run.args.num_iterations:
        return None
    try:
        return run.train_loader.batch(run.step)
    except UserError:
        if run.step > 0:
            save_checkpoint(run)
        raise


def open_data(args, device):
    """Return (train_loader, validation, val_tokens, data_facts).

    validation: this rank's sequences, (sequences, T + 1) uint16. val_tokens: total over all ranks.
    data_facts: the encoding, and checksums of the data, which do not depend on the file names.
    """
    batch_size, T = args.batch_size, args.sequence_length
    rank, world_size = get_rank(), get_world_size()
    if batch_size % world_size:
        fix = "start another number of ranks (with run.sh, set NPROC), or change --batch_size"
        raise UserError(
            f"batch_size={batch_size} must be a multiple of the {world_size} ranks: {fix}"
        )
    stream = TokenStream(args.train_files, args.vocab_size)
    max_steps = (stream.total_tokens - 1) // (batch_size * T)
    needed_steps = 1 if args.allow_repeat else args.num_iterations  # repeated data must hold one
    if max_steps < needed_steps:
        fix = "add data or lower --batch_size"
        if not args.allow_repeat:
            fix = "add data, lower --num_iterations or --batch_size, or pass --allow_repeat=True"
        raise UserError(f"{args.train_files!r} has tokens for only {max_steps} steps: {fix}")
    seed = args.seed if args.shuffle else None
    loader = DistributedDataLoader(stream, batch_size, T, rank, world_size, device, seed)

    val_stream = TokenStream(args.val_files, args.vocab_size)
    usable = (val_stream.total_tokens - 1) // T * T
    if usable == 0:
        fix = f"needs {T + 1}: lower --sequence_length, or add validation data"
        raise UserError(f"{args.val_files!r} has only {val_stream.total_tokens} tokens, but {fix}")
    val_tokens = args.val_tokens
    if val_tokens == 0:  # about 2**18, but at least one sequence and at most all
        val_tokens = min(usable, max(T, 2**18 // T * T))
    if val_tokens % T or val_tokens > usable:
        limit = f"a multiple of sequence_length={T} up to {usable} for {args.val_files!r}"
        raise UserError(f"val_tokens={val_tokens} must be {limit}, or 0")
    tokens = val_stream.read(0, val_tokens + 1)
    # Adjacent sequences share a token: the last target of one is the first input of the next.
    sequences = np.stack([tokens[start : start + T + 1] for start in range(0, val_tokens, T)])

    train_data, val_data = stream.checksums(), val_stream.checksums()
    if set(train_data) & set(val_data):
        raise UserError("a shard of train_files is a copy of one of val_files: remove it")
    encoding = read_manifest(args.train_files).get("encoding")  # None without a manifest
    val_encoding = read_manifest(args.val_files).get("encoding")
    if encoding != val_encoding and None not in (encoding, val_encoding):
        raise UserError(f"train_files are encoded as {encoding}, but val_files as {val_encoding}")
    data_facts = dict(train_data=digest(train_data), val_data=digest(val_data), encoding=encoding)
    return loader, sequences[rank::world_size], val_tokens, data_facts


# ---- Machinery: device and compiler --------------------------------------------------------------
def choose_device(args):
    """Return the torch.device of this process."""
    gpus = torch.cuda.device_count()
    if args.device == "cpu" or (args.device == "auto" and gpus == 0):
        return torch.device("cpu")
    # If one GPU is visible, use it on every rank: some launchers show each process just its own.
    index = int(os.environ.get("LOCAL_RANK", "0")) if gpus > 1 else 0
    if index >= gpus or not torch.cuda.is_available():
        fix = "start fewer processes, check the driver, or pass --device=cpu"
        raise UserError(f"GPU {index} is not available ({gpus} found): {fix}")
    return torch.device("cuda", index)


def choose_dtype(args, device):
    """Return the dtype of matmuls: for "auto", bfloat16 if the device supports it."""
    if args.dtype != "auto":
        return args.dtype
    if device.type == "cuda":  # T4 and V100 only emulate bfloat16, slowly
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    elif torch.__version__.startswith("2.5.") and args.compile:
        has_bf16 = False  # torch 2.5 cannot compile bfloat16 for CPUs
    else:
        # On x86, mkldnn supports bfloat16 only with AVX-512.
        has_mkldnn = torch.backends.mkldnn.is_available()
        has_bf16 = has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "bfloat16" if has_bf16 else "float32"


def configure_cpu(args):
    """Set PyTorch's global options for training on a CPU."""
    # Despite their names, the next two options affect CPUs. For sequences of up to 512 tokens in
    # bfloat16, unfused attention is faster than flash attention (measured), if its scores stay in
    # bfloat16.
    torch.backends.cuda.enable_flash_sdp(args.sequence_length > 512)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    # Sum an embedding's gradients in a fixed order, so that runs are bit-reproducible.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # filling takes time
    if args.compile:
        from torch._functorch import config as functorch_config  # slow to import
        from torch._inductor import config as inductor_config

        # Recompute some activations in the backward pass: cheaper on a CPU than loading them.
        functorch_config.activation_memory_budget = 0.7
        inductor_config.cpp.vec_isa_ok = True  # do not test first whether the compiler works


def warm_up_mkl():
    """Call functions of MKL once on one thread, before the rotary tables are computed on the CPU.

    A first call by several threads may be inexact: https://github.com/pytorch/pytorch/issues/188792
    """
    for function in torch.cos, torch.exp, torch.sin, torch.sqrt:
        function(torch.ones(1))


def seed_step(run):
    """Make random numbers, such as those of dropout, depend on the seed, the step and the rank."""
    seed = np.random.SeedSequence((run.args.seed, run.step, get_rank()))
    torch.manual_seed(int(seed.generate_state(1)[0]))


def compile_model(run):
    """Compile the model by running one validation and one training pass on a micro-batch."""
    from torch._dynamo.exc import BackendCompilerFailed  # slow to import

    run.log("compiling (up to a few minutes; --compile=False starts sooner but trains more slowly)")
    run.model.compile(dynamic=False, fullgraph=True)
    shape = (run.micro_batch_size, run.args.sequence_length)
    inputs = torch.zeros(shape, dtype=torch.int64, device=run.device)
    targets = torch.zeros_like(inputs)  # not the same tensor, or training would recompile
    try:
        with torch.no_grad():
            run.model.eval()
            run.model(inputs, targets)
        run.model.train()
        loss = run.model(inputs, targets)
        loss.backward()
    except BackendCompilerFailed as error:
        cause = " ".join(str(error).split())
        fix = "pass --compile=False, install g++ and python3-dev, or set TORCHINDUCTOR_CACHE_DIR"
        raise UserError(f"the model cannot be compiled ({cause:.200}): {fix}") from None
    run.model.zero_grad()
    loss.item()  # waits for the device


def device_name(device):
    """Return the name of the GPU, or of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu_info = Path("/proc/cpuinfo")
    text = cpu_info.read_text() if cpu_info.exists() else ""
    found = re.search(r"model name\s*: (.*)", text)
    return found[1] if found else os.uname().machine


def peak_memory(device):
    """Return the peak memory in MiB: of PyTorch on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # macOS reports bytes


# ---- Machinery: ranks, the processes of torchrun -------------------------------------------------
def get_rank():
    """Return the rank of this process, 0 without torchrun."""
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size():
    """Return the number of ranks, 1 without torchrun."""
    return dist.get_world_size() if dist.is_initialized() else 1


def join_ranks(args):
    """Collective: join torchrun's process group, if any. Return this rank's torch.device."""
    device = choose_device(args)
    backend, gpu = "gloo", None
    if device.type == "cuda":
        backend, gpu = "nccl", device
        torch.cuda.set_device(device)
    variables = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # of srun and mpirun
    if "RANK" not in os.environ and any(os.environ.get(name, "1") != "1" for name in variables):
        raise UserError("srun or mpirun started several separate processes: use torchrun instead")
    if "RANK" in os.environ and not dist.is_initialized():
        try:
            timeout = timedelta(seconds=args.comm_timeout)
            # After a restart by torchrun --max-restarts, init_process_group() would find the
            # addresses of the dead ranks in the store, so give each attempt its own prefix. This
            # works on one node only, because each node counts its own attempts.
            store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
            store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
            group = dict(store=store, rank=rank, world_size=world_size)
            dist.init_process_group(backend, timeout=timeout, device_id=gpu, **group)
        except (ValueError, RuntimeError, OverflowError) as error:  # MASTER_ADDR is missing, ...
            fix = "use torchrun with one process per GPU, and check the network settings"
            raise UserError(f"cannot join the other ranks ({error}): {fix}") from None
    return device


def leave_ranks():
    """Collective: leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(0.2)  # gloo's threads need time to end, or they may abort the process


def from_rank_0(value):
    """Collective: return rank 0's value on every rank."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    return values[0]


def check_ranks_agree(values, fix):
    """Collective: raise UserError on all ranks unless their dicts of values are equal."""
    by_rank = [values] * get_world_size()
    if dist.is_initialized():
        dist.all_gather_object(by_rank, values)
    for name, value in values.items():
        found = [others.get(name) for others in by_rank]
        if found != [value] * len(found):
            raise UserError(f"the ranks differ in {name} (on ranks 0, 1, ...: {found}): {fix}")


def check_weights_agree(model):
    """Collective: raise UserError on all ranks unless they have the same weights."""
    checksum = 0
    for p in model.parameters():
        bits = p.detach().float().view(torch.int32)
        checksum += bits.sum(dtype=torch.int32)  # modulo 2**32
    fix = "check the hardware and, if you edited it, the optimizer; then resume"
    check_ranks_agree(dict(weights=checksum.item()), fix)


class StopRequest:
    """Notes whether this process has received a signal to stop."""

    def __init__(self):
        self.received = False
        self.first_time = 0.0  # when the first signal came

    def catch_signals(self):
        """Catch the signals of users and batch systems, unless they are ignored, as under nohup."""
        for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"):
            number = getattr(signal, name)
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.on_signal)

    def on_signal(self, number, frame):
        """Note the signal. A second one, at least a second later, ends the process at once."""
        if not self.received:
            self.received, self.first_time = True, time.monotonic()
            if os.environ.get("RANK", "0") == "0":
                with contextlib.suppress(OSError):  # the terminal may be closed
                    os.write(2, b"stopping after a step; press Ctrl-C again to exit at once\n")
        # torchrun repeats a Ctrl-C within a second, and the kernel repeats SIGXCPU every second.
        elif number != signal.SIGXCPU and time.monotonic() - self.first_time > 1:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


# ---- Machinery: log ------------------------------------------------------------------------------
class Log:
    """Prints lines and appends them to a file, on rank 0 only. Adds up the time of each phase."""

    def __init__(self, args):
        self.path = Path(args.log_dir, f"{args.run_id}.txt")
        self.num_iterations = args.num_iterations
        self.may_write = False  # claim_folder sets this, on rank 0
        self.seconds = Counter()  # {phase: seconds}

    def __call__(self, text):
        """Print one or more lines and append them to the log."""
        self.write(text)
        if get_rank() == 0:
            try:
                print(text, flush=True)
            except OSError:  # the terminal is closed, or the disk is full: only the log goes on
                sys.stdout = None  # at exit, Python would fail to write again

    def write(self, text):
        """Append the lines to the file, all or nothing. Raises UserError if that fails."""
        if not self.may_write:
            return
        data = f"{text}\n".encode(errors="backslashreplace")
        with open(self.path, "ab", buffering=0) as file:  # reopened, in case an editor replaced it
            size = file.tell()
            try:
                written = file.write(data)
            except OSError:
                written = 0
            if written < len(data):  # the disk is full
                file.truncate(size)  # a number that is cut off could look like a result
                raise UserError(f"{self.path} cannot be written: free disk space, then resume")

    def progress(self, step, name, loss, others=None):
        """Log a loss, the time so far and other values."""
        ms = 1000 * self.seconds["train"]
        times = f"train_time:{ms:.0f}ms step_avg:{ms / max(step, 1):.2f}ms"
        more = "".join(f" {other}:{value:.4g}" for other, value in (others or {}).items())
        self(f"step:{step}/{self.num_iterations} {name}:{loss:.4f} {times}{more}")

    @contextlib.contextmanager
    def timed(self, phase):
        """Time a `with` block as part of a phase. The block must end by waiting for the GPU."""
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start


def log_header(run, start_message):
    """Log what is needed to reproduce the run. start_message: where its weights come from."""
    args, log = run.args, run.log
    settings = "\n".join(f"hyperparameter {name}={value!r}" for name, value in vars(args).items())
    source = "\n".join(run.recipe.sources.values())
    log.write(f"Log of train_gpt2.py, run_id={args.run_id}\n{source}\n{settings}")
    git = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty", "--abbrev=40"]
    commit = ""
    with contextlib.suppress(OSError):  # git is not installed
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    workers = f"processes:{get_world_size()} threads:{torch.get_num_threads()}"
    data = f"train_data:{run.fixed['train_data']} val_data:{run.fixed['val_data']}"
    size = sum(p.numel() for p in run.model.parameters())
    lines = [
        f"training {type(run.model).__name__} with {run.fixed['optimizers']}, {size:,} parameters",
        f"torch:{torch.__version__} commit:{commit} device:{device_name(run.device)} {workers}",
        f"matmul_dtype:{args.dtype} micro_batch:{run.micro_batch_size}",
        f"val_tokens:{args.val_tokens} train_tokens:{run.train_loader.stream.total_tokens} {data}",
    ]
    log("\n".join([*lines, start_message]))


def log_summary(run):
    """Log the result as `key: value` lines.

    train_seconds covers the whole run. After a resume, peak_memory_mib, graphs and the seconds of
    other phases are those of the last process.
    """
    args, log = run.args, run.log
    log(f"val_loss: {run.val_loss:.4f}\nweights: {run.folder / 'model.pt'}")
    if args.target_val_loss:
        log(f"target_val_loss: {args.target_val_loss}")
    if run.best_loss < run.val_loss:
        log(f"best_val_loss: {run.best_loss:.4f}\nbest_weights: {run.folder / 'best.pt'}")
    tokens = run.step * args.batch_size * args.sequence_length
    log(f"steps: {run.step}\ntokens: {tokens}\nseed: {args.seed}")
    for phase, seconds in log.seconds.items():
        log(f"{phase}_seconds: {seconds:.1f}")
    log(f"tokens_per_second: {tokens / log.seconds['train']:.0f}")
    log(f"peak_memory_mib: {peak_memory(run.device):.0f}")
    if args.compile:  # one each for training and validation; more if recompiled
        log(f"graphs: {torch._dynamo.utils.counters['stats']['unique_graphs']}")


# ---- Machinery: checkpoints ----------------------------------------------------------------------
def save(run, name, **more):
    """Write weights, settings and `more` to a file in the run's folder, atomically, on rank 0.

    Every rank should call it, but none waits. Raises UserError on failure, NaN or infinity.
    """
    path, partial = run.folder / name, run.folder / "partial"
    state = dict(
        script=run.recipe.script,
        source=digest(run.recipe.sources),
        hyperparameters=vars(run.args),
        fixed=run.fixed,
        threads=torch.get_num_threads(),
        step=run.step,
        train_seconds=run.log.seconds["train"],
        val_loss=run.val_loss,
        model=run.model.state_dict(),
        **more,
    )
    for value in tree_leaves(state):  # checked on all ranks, so that all of them stop
        if isinstance(value, torch.Tensor) and not value.isfinite().all():
            raise UserError(f"{path} was not written (NaN or infinity): lower the learning rates")
    if get_rank() != 0:
        return
    try:
        with run.log.timed("checkpoint"), open(partial, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:  # torch.save turns an OSError into a RuntimeError
        partial.unlink(missing_ok=True)
        cause = error if isinstance(error, OSError) else error.__context__ or error
        raise UserError(f"{path} was not written ({cause}): free disk space, then resume") from None


def save_checkpoint(run):
    """On rank 0, save what a run needs to resume, and delete old checkpoints. No rank waits."""
    path = run.folder / f"state_step{run.step:010d}.pt"
    save(run, path.name, optimizers=[o.state_dict()["state"] for o in run.optimizers])
    if get_rank() == 0:
        # Do not count checkpoints of later steps: they are damaged, and restore() skipped them.
        earlier = [old for old in checkpoints_in(run.folder) if old <= path]
        for old in earlier[: -run.args.keep_checkpoints]:
            old.unlink()


def checkpoints_in(folder):
    """Return the paths of a run's checkpoints, oldest first."""
    return sorted(folder.glob("state_step" + 10 * "[0-9]" + ".pt"))


def read_pt(path):
    """Return the dict that save() wrote to a file. Raises UserError if the file is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:  # a .pt file is a zip file
            damaged_part = archive.testzip()  # compares checksums
            attributes = [info.external_attr for info in archive.infolist()]
        # Checksums do not cover attributes. torch.save writes 0; torch.load misreads other values.
        if damaged_part is not None or any(attributes):
            raise ValueError("it is damaged")
        state = torch.load(path, map_location="cpu", weights_only=True)  # runs no code in the file
        if not {"script", "source", "fixed", "threads", "step", "model"} <= state.keys():
            raise ValueError("another version of the script saved it")
        return state
    except Exception as error:  # both modules raise many types of exceptions
        fix = "use an undamaged .pt file that this version of the script has saved"
        raise UserError(f"{path} cannot be used ({error!r:.200}): {fix}") from None


def claim_folder(run):
    """On rank 0, create the run's folder, lock it until the process ends, and open the log.

    Raises UserError if it is not a run's, is in use, or has weights that would be overwritten.
    """
    if get_rank() != 0:
        return
    folder, lock_path = run.folder, run.folder / "run.lock"
    exists = run.log.path.exists() or any(folder.glob("*"))
    if exists and not lock_path.is_file():  # every run creates this file
        fix = "move them away, or pass another --run_id"
        raise UserError(f"{folder} or {run.log.path} was not created by this script: {fix}")
    folder.mkdir(parents=True, exist_ok=True)
    run.lock = open(lock_path, "a")
    warning = ""
    try:
        fcntl.flock(run.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise UserError(f"another process is using {folder}: stop it first") from None
    except OSError as error:  # some network file systems have no locks
        warning = f"warning: {folder} is not locked ({error.strerror}): start only one run there"
    # Checked only after locking, because another process may have just finished this run.
    if not run.args.resume and any(folder.glob("*.pt")):
        raise UserError(f"{folder} exists: pass another --run_id, or --resume=auto to continue it")
    with open(run.log.path, "ab") as file:
        text = run.log.path.read_bytes()
        file.truncate(text.rfind(b"\n") + 1)  # drop an incomplete last line
    run.log.may_write = True
    if warning:
        run.log(warning)


def restore(run):
    """Collective: load the run's newest file if --resume=auto finds one, else --init, if given.

    Return a line for the log that says where the weights come from.
    """
    path = None
    if run.args.resume and get_rank() == 0:
        path = newest_file(run)
    path = from_rank_0(path)
    if path is None:
        if run.args.init:
            # These two change what the weights of a GPT mean, but not their shapes.
            expected = {name: run.fixed[name] for name in ("n_head", "encoding")}
            load_weights(run, run.args.init, expected)
        return f"starting from {run.args.init or 'new weights'}"
    state = load_weights(run, path, run.fixed)
    run.step, run.val_loss = state["step"], state["val_loss"]
    with contextlib.suppress(UserError):  # there is no best.pt, or it is damaged
        # Read from best.pt, because it may be newer than the checkpoint.
        run.best_loss = read_pt(run.folder / "best.pt")["val_loss"]
    run.log.seconds["train"] = state["train_seconds"]
    run.finished = path.name == "model.pt"
    if run.finished:
        return f"{path} is the result of this run; nothing to do"
    if run.device.type == "cpu" and state["threads"] != torch.get_num_threads():
        run.log(f"warning: saved with {state['threads']} threads; losses may differ slightly")
    for optimizer, optimizer_state in zip(run.optimizers, state["optimizers"], strict=True):
        # Param groups are not saved: use those that build_optimizers has just made.
        state_dict = optimizer.state_dict()
        state_dict["state"] = optimizer_state
        optimizer.load_state_dict(state_dict)
    return f"continuing after step {run.step} from {path}"


def newest_file(run):
    """Return the path of model.pt or of the newest undamaged checkpoint, or None."""
    candidates = [*checkpoints_in(run.folder), *run.folder.glob("model.pt")]
    for path in reversed(candidates):  # model.pt first
        try:
            read_pt(path)  # fails if it is damaged
            return path
        except UserError as error:
            run.log(f"skipping a file: {error}")
    if candidates:
        fix = "see the log for the reasons, or pass another --run_id"
        raise UserError(f"no checkpoint in {run.folder} can be used: {fix}")
    return None


def load_weights(run, path, expected):
    """Load the weights from a file and return its dict. Raises UserError if they do not fit.

    expected: what the file must have been saved with; None means unknown and matches anything.
    """
    state = read_pt(path)
    if state["source"] != digest(run.recipe.sources):
        run.log(f"warning: the script has changed since it saved {path}")
    differences = []
    for name, value in expected.items():
        default = getattr(run.recipe.settings, name, None)  # for a setting that was added later
        saved = state["fixed"].get(name, default)
        if value != saved and None not in (value, saved):
            differences.append(f"{name}={saved} (here {value})")
    if differences:
        raise UserError(f"{path} was saved with {', '.join(differences)}: use the same values")
    try:
        run.model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise UserError(f"{path} holds weights of another model ({error})") from None
    return state


# ---- Machinery: start ----------------------------------------------------------------------------
def describe_failure(error):
    """Return a message for the user: one line, or a traceback for a bug."""
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    if isinstance(error, OSError):
        line = traceback.extract_tb(error.__traceback__)[-1]
        return f"{error} (in {Path(line.filename).name}, line {line.lineno})"
    out_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    # On a CPU, PyTorch raises a plain RuntimeError that names its allocator.
    if out_of_memory or "DefaultCPUAllocator" in str(error):
        fix = "lower --device_batch_size below the log's micro_batch, or lower --sequence_length"
        return f"out of memory: {fix}"
    is_lost = isinstance(error, RuntimeError) and re.search("gloo|pair closure", str(error))
    if dist.is_initialized() and is_lost:
        return "lost the connection to another rank; see its message or torchrun's summary"
    return "".join(traceback.format_exception(error)).rstrip()


def cli(argv, recipe=RECIPE):
    """Train as configured on the command line. On failure, print why and exit with status 1."""
    if hasattr(sys.stdout, "reconfigure"):  # Jupyter's stdout lacks it
        sys.stdout.reconfigure(errors="backslashreplace")  # for an ASCII-only terminal
    stop_request = StopRequest()
    stop_request.catch_signals()
    try:
        main(parse_args(argv, recipe), recipe, stop_request)
        leave_ranks()
    except Exception as error:
        where = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        script = Path(recipe.script).name
        print(f"{script}: {where}{describe_failure(error)}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    cli(sys.argv[1:])
