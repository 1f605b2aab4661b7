"""Train GPT-2 124M to a validation loss of 3.28 on FineWeb: one file, one speedrun.

    torchrun --standalone --nproc_per_node=8 train_gpt2.py      # or python train_gpt2.py --help

The defaults are record 7 of the public NanoGPT speedrun (October 2024): loss 3.2755 in 12.0 minutes
on 8xH100 (one run, its own log); no GPU has run this file yet. It needs torch and numpy.
Shapes: B sequences of T tokens, C = n_embd, V = vocab_size, H = n_head, D = C // H.
"""

import argparse
import contextlib
import copy
import dataclasses
import fcntl
import glob
import hashlib
import inspect
import math
import os
import re
import resource
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

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import _dynamo, nn
from torch._functorch import config as functorch_config

try:
    from tqdm import tqdm
except ImportError:  # a terminal then shows lines instead of a bar
    tqdm = None


# ---- Settings: edit them here, or give any of them as --name=value ------------------------------
class RunError(ValueError):
    """A mistake that the user can fix: shown as one sentence, without a traceback."""


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """Everything that defines a run. Raises RunError for values that no run can have."""

    # what defines the result: a resumed run must have the same, except a higher num_iterations
    vocab_size: int = 50304  # GPT-2's 50257, rounded up to a multiple of 128, which is faster
    n_layer: int = 12  # blocks
    n_head: int = 6  # attention heads
    n_embd: int = 768  # channels
    ngrams: int = 0  # a table adds a row to the embedding for each n-gram of 2 to so many tokens
    ngram_rows: int = 2**18  # of that table; n-grams share them by their hash
    key_offset: int = 0  # positions from a key to its value; 1: one layer continues what repeats
    logit_softcap: float = 0.0  # s: logits z become s tanh(z / s); 0: they stay
    batch_size: int = 512  # sequences a step, over all processes
    sequence_length: int = 1024  # tokens
    num_iterations: int = 5100  # steps
    learning_rate: float = 0.0036  # of AdamW, for all but the matrices of the blocks
    muon_learning_rate: float = 0.00036  # of Muon, for the matrices of the blocks
    muon_momentum: float = 0.95  # of Muon
    warmdown_iters: int = 1450  # last steps, in which they fall to 0; lower it for a short run
    seed: int = 1337  # of the initial weights; nothing else is random
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of matrix products; auto: the faster
    # a resumed run may change all from here on. Data: shards, by data/fineweb.py or data/pack.py
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"  # glob, read in the order of the names
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"  # glob
    allow_repeat: bool = False  # True: start over when the training tokens run out
    val_loss_every: int = 125  # steps between validations; 0: only after the last step
    val_tokens: int = 10485760  # validate on this many tokens, the first in val_files
    target_val_loss: float = 3.28  # the log's last line shows it beside the result
    save_every: int = 0  # steps between checkpoints; 0: none, unless a signal ends the run
    keep_checkpoints: int = 2  # the newest that stay
    resume: str = ""  # a checkpoint to continue from; auto: the newest of run_id, if any
    log_dir: str = "logs"  # folder of logs and checkpoints
    run_id: str = ""  # name of the log and of the checkpoints' folder; empty: made from the time
    device: Literal["auto", "cuda", "cpu"] = "auto"  # auto: cuda if there is a GPU
    device_batch_size: int = 64  # sequences a forward pass, at most; sets memory use and speed
    compile: bool = True  # with torch.compile; False starts sooner and runs slower
    comm_timeout: int = 600  # seconds that a rank waits for the others before the run fails

    def __post_init__(self):
        may_be_0 = "ngrams", "key_offset", "warmdown_iters", "seed", "val_loss_every", "save_every"
        for name, value in vars(self).items():
            kind = self.__dataclass_fields__[name].type
            least = 0 if name in may_be_0 or kind is float else 1
            if kind in (int, float) and not least <= value < 2**31:
                raise RunError(f"{name}={value} must be a number from {least} to 2**31 - 1")
        if self.n_embd % (2 * self.n_head):
            raise RunError(f"n_embd={self.n_embd} must be a multiple of 2 * n_head={self.n_head}")
        if not re.fullmatch(r"([\w-][\w.-]*)?", self.run_id):
            raise RunError(f"run_id={self.run_id!r} must be a file's name: letters, digits, - . _")
        if self.resume == "auto" and not self.run_id:
            raise RunError("--resume=auto needs the --run_id to look for")


PRESETS = {  # --preset=NAME: what it takes and its settings, which others override
    "record7": "the defaults: 12.0 minutes on 8xH100 by a public log, predicted: 28 GB a GPU",
    "24gb": "the same on one GPU of 24 GB, predicted: 15 GB --device_batch_size=32",
    "candidate": "record 7 with bigrams, key offset and soft-cap, for a GPU to try: no result yet"
    " --ngrams=2 --ngram_rows=251519 --key_offset=1 --logit_softcap=15 --num_iterations=4600",
    "cpu": "the CPU record, measured: 15 s on 2 cores, 0.8 GB; run.sh makes its data --device=cpu"
    " --train_files=data/torch_sources/train_*.bin --val_files=data/torch_sources/val_*.bin"
    " --vocab_size=257 --n_layer=2 --n_head=1 --n_embd=128 --sequence_length=256 --ngrams=6"
    " --key_offset=1 --batch_size=16 --num_iterations=220 --warmdown_iters=100 --val_loss_every=55"
    " --learning_rate=0.03 --muon_learning_rate=0.002 --val_tokens=420864 --target_val_loss=1.32",
    "laptop": "your own text, packed into data/mine: 6 minutes on 2 cores, 0.8 GB, measured"
    " --train_files=data/mine/train_*.bin --val_files=data/mine/val_*.bin --allow_repeat=True"
    " --n_layer=4 --n_head=1 --n_embd=128 --sequence_length=256 --batch_size=16"
    " --device_batch_size=16 --num_iterations=600 --warmdown_iters=300 --learning_rate=0.006"
    " --muon_learning_rate=0.0007 --val_loss_every=100 --val_tokens=8192 --target_val_loss=5.2",
}


def parse_args(argv):
    """Return Hyperparameters from argv, else RunError. A field's comment is its help: keep one."""

    def refuse(message):
        raise RunError(f"{message}; --help lists all settings")

    def boolean(text):
        return ("false", "true").index(text.lower()) == 1

    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.error = refuse
    presets = "; ".join(map(": ".join, PRESETS.items()))
    parser.add_argument("--preset", choices=PRESETS, default="record7", help=presets)
    kinds = {bool: boolean, int: int, float: float}
    source = inspect.getsource(Hyperparameters)
    for name, text in re.findall(r"^    (\w+): .*  # (.*)$", source, re.M):
        field = Hyperparameters.__dataclass_fields__[name]
        kind = kinds.get(field.type, str)
        choices = get_args(field.type) or None
        default = field.default
        text = f"{text} (default: {default!r})"
        parser.add_argument(f"--{name}", type=kind, choices=choices, help=text, default=default)
    preset = parser.parse_known_args(argv)[0].preset
    values = vars(parser.parse_args(re.findall(r"--\S+", PRESETS[preset]) + argv))
    del values["preset"]
    return Hyperparameters(**values)


# ---- Model: GPT-2 with rotary positions, RMSNorm, QK-norm, ReLU^2 and zero-initialised projections
def norm(x):
    """RMSNorm over the last dimension, without gain; float32's eps whatever the dtype of x."""
    return F.rms_norm(x, (x.size(-1),), eps=2**-23)


class Linear(nn.Linear):
    """A linear layer whose weight is float32 and whose product has the dtype of x."""

    def forward(self, x):
        return F.linear(x, self.weight.type_as(x))


class Rotary(nn.Module):
    """Rotary positions: channel i is rotated with i + D/2. https://arxiv.org/abs/2104.09864"""

    def __init__(self, head_dim, sequence_length):
        super().__init__()
        frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2).float() / head_dim)
        angles = torch.outer(torch.arange(sequence_length).float(), frequencies)  # (T, D/2)
        cos_sin = torch.stack([angles.cos(), angles.sin()])
        self.register_buffer("cos_sin", cos_sin, persistent=False)  # (2, T, D/2)

    def forward(self, x):  # (B, H, T, D)
        cos, sin = self.cos_sin[:, : x.size(2)]
        x1, x2 = x.chunk(2, dim=-1)
        y1 = x1 * cos + x2 * sin
        y2 = x2 * cos - x1 * sin
        return torch.cat([y1, y2], dim=-1).type_as(x)


class CausalSelfAttention(nn.Module):
    def __init__(self, args):
        super().__init__()
        C = args.n_embd
        self.n_head = args.n_head
        self.key_offset = args.key_offset
        self.c_q = Linear(C, C, bias=False)  # three matrices: Muon takes each by itself
        self.c_k = Linear(C, C, bias=False)
        self.c_v = Linear(C, C, bias=False)
        self.c_proj = Linear(C, C, bias=False)
        nn.init.zeros_(self.c_proj.weight)  # every block starts as the identity
        self.rotary = Rotary(C // args.n_head, args.sequence_length)

    def heads(self, x):  # (B, T, C) to (B, H, T, D)
        return x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)

    def forward(self, x):  # (B, T, C)
        q = self.rotary(norm(self.heads(self.c_q(x))))
        k = norm(self.heads(self.c_k(x)))
        k = self.rotary(F.pad(k, (0, 0, self.key_offset, 0))[:, :, : k.size(2)])  # zeros first
        v = self.heads(self.c_v(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, args):
        super().__init__()
        C = args.n_embd
        self.c_fc = Linear(C, 4 * C, bias=False)
        self.c_proj = Linear(4 * C, C, bias=False)
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
    """Sum a table's rows of the last 2, 3, ... `longest` tokens, by hash; gradients are sparse."""

    def __init__(self, args):
        super().__init__()
        self.longest = args.ngrams
        self.weight = nn.Parameter(torch.zeros(args.ngram_rows, args.n_embd))

    @torch.compiler.disable  # which has no sparse gradients
    def forward(self, inputs):  # (B, T) to (B, T, C)
        hashes = inputs
        rows = []
        for distance in range(1, self.longest):
            earlier = F.pad(inputs, (distance, 0))[:, : inputs.size(1)]  # zeros come first
            hashes = hashes * 1000003 + earlier + 1  # modulo 2**64
            rows.append(hashes % len(self.weight))
        rows = torch.stack(rows, dim=-1).flatten(0, 1)  # (B * T, longest - 1)
        total = F.embedding_bag(rows, self.weight, mode="sum", sparse=True)
        return total.unflatten(0, inputs.shape)


class GPT(nn.Module):
    """GPT-2 with tied embedding and head: float32 weights; activations and products in dtype."""

    def __init__(self, args, dtype=torch.float32):
        super().__init__()
        self.dtype = dtype
        self.wte = nn.Embedding(args.vocab_size, args.n_embd)
        self.h = nn.ModuleList(Block(args) for _ in range(args.n_layer))
        self.lm_head = Linear(args.n_embd, args.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight  # tied: one tensor, with the head's initial values
        self.ngrams = NgramTable(args) if args.ngrams > 1 else None
        self.softcap = args.logit_softcap

    def forward(self, inputs, targets=None):
        """Return the mean cross-entropy (float32 scalar), or without targets logits (B, T, V).
        inputs, targets: (B, T) int64, T at most sequence_length; targets of -1 do not count."""
        ngrams = self.ngrams(inputs) if self.ngrams else 0.0
        x = (self.wte(inputs) + ngrams).to(self.dtype)  # (B, T, C)
        for block in self.h:
            x = block(x)
        x = norm(x)
        weight = self.lm_head.weight
        if targets is None:
            return logits_of(x, weight.type_as(x), self.softcap)
        return ChunkedCrossEntropy.apply(x.flatten(0, 1), weight, targets.flatten(), self.softcap)


def logits_of(x, weight, softcap):
    """Return the logits, float32 (..., V), of hidden states x (..., C); training uses them, too."""
    logits = F.linear(x, weight).float()
    if softcap:
        logits = 2 * softcap * (2 * logits / softcap).sigmoid() - softcap  # s tanh(z / s), faster
    return logits


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy over targets but -1, and its gradients, of a chunk of tokens at a time."""

    @staticmethod
    def of_chunk(x, weight, targets, softcap, count):
        logits = logits_of(x, weight, softcap)
        return F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum") / count

    @staticmethod
    def forward(ctx, x, weight, targets, softcap):  # (N, C), (V, C), (N,)
        chunks = 2 if x.is_cuda else 8  # at most; by a plan a GPU is faster with fewer
        size = max(512 * 50304 // len(weight), len(x) // chunks)
        count = (targets != -1).sum().clamp(min=1)
        low = weight.type_as(x)
        of_chunk = ChunkedCrossEntropy.of_chunk
        loss = grad_weight = 0.0
        grad_x = []
        for x_i, targets_i in zip(x.split(size), targets.split(size)):
            if ctx.needs_input_grad[0]:  # of x; of weight it is True in evaluation, too
                grad_and_value = torch.func.grad_and_value(of_chunk, argnums=(0, 1))
                grads, loss_i = grad_and_value(x_i, low, targets_i, softcap, count)
                grad_x.append(grads[0])
                grad_weight = grad_weight + grads[1].float()
            else:
                loss_i = of_chunk(x_i, low, targets_i, softcap, count)
            loss = loss + loss_i
        if grad_x:
            ctx.save_for_backward(torch.cat(grad_x), grad_weight)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * grad_loss, grad_weight * grad_loss, None, None


# ---- Muon. To use it elsewhere, copy this section: it needs torch and torch.distributed as dist -
def zeropower_via_newtonschulz5(G, dtype=torch.bfloat16):
    """Orthogonalize G = U S V^T: about U V^T, bf16. https://kellerjordan.github.io/posts/muon/
    G: (M, N) or (K, M, N) of any float dtype, unmodified; else ValueError. dtype: of products."""
    if G.ndim not in (2, 3):
        raise ValueError(f"G of shape {tuple(G.shape)} must be a matrix or a batch of them")
    length = torch.linalg.matrix_norm(G, keepdim=True, dtype=torch.float64)
    X = (G / (length + 1e-7).float()).to(dtype)  # float64 also holds the square of 1e30
    tall = G.size(-2) > G.size(-1)
    X = X.mT if tall else X  # (m, n), m <= n: A is the smaller
    a, b, c = 3.4445, -4.7750, 2.0315
    multiply_add = torch.addmm if G.ndim == 2 else torch.baddbmm
    for _ in range(5):
        A = X @ X.mT
        B = multiply_add(A, A, A, beta=b, alpha=c)  # b A + c A A
        X = multiply_add(X, B, X, beta=a)  # a s + b s^3 + c s^5 for its singular values s
    return (X.mT if tall else X).bfloat16()


class Muon(torch.optim.Optimizer):
    """MomentUm (Nesterov's) Orthogonalized by Newton-Schulz, for matrices: U V^T, not U S V^T.
    All directions are learnt at one speed. Entries move by about lr a step, root mean square; for
    Keller Jordan's 0.02 give 0.02 / sqrt(columns). params: (M, ...), seen as matrices (M, N), else
    ValueError. dtype: of products. One rank owns a matrix and its momentum; p.grad: all or none."""

    def __init__(
        self, params, lr, momentum=0.95, weight_decay=0, rank=0, world_size=1, dtype=torch.bfloat16
    ):
        self.rank = rank
        self.world_size = world_size
        self.dtype = dtype
        self.owner = {}  # parameter: its rank; super().__init__ fills both by add_param_group
        self.loads = [0] * world_size  # multiplications of each rank in a Newton-Schulz iteration
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    def add_param_group(self, param_group):
        """Deal the group's matrices to the ranks, the most expensive first."""
        super().add_param_group(param_group)
        params = param_group["params"]
        for p in params:
            if p.ndim < 2:
                raise ValueError(f"Muon takes matrices, not a parameter of shape {tuple(p.shape)}")
        for p in sorted(params, key=matrix_cost, reverse=True):
            self.owner[p] = self.loads.index(min(self.loads))
            self.loads[self.owner[p]] += matrix_cost(p)

    @torch.no_grad()
    def step(self, closure=None):
        """Update all parameters in place; return the loss of closure, if there is one."""
        loss = closure and torch.enable_grad()(closure)()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            params.sort(key=matrix_cost, reverse=True)
            sent = []
            for first in range(0, len(params), self.world_size):
                together = params[first : first + self.world_size]
                sizes = [p.numel() for p in together]
                flat = torch.zeros(sum(sizes), dtype=torch.bfloat16, device=params[0].device)
                slots = flat.split(sizes)  # those of other ranks stay 0: the sum is exact
                for p, slot in zip(together, slots):
                    if self.owner[p] == self.rank:
                        slot.copy_(self.orthogonalized_momentum(p, group).flatten())
                work = self.world_size > 1 and dist.all_reduce(flat, async_op=True)
                sent.append((work, together, slots))
            for work, together, slots in sent:
                if work:
                    work.wait()
                for p, slot in zip(together, slots):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    scale = max(p.flatten(1).shape) ** 0.5  # makes the update's mean square 1
                    p.add_(slot.view_as(p), alpha=-group["lr"] * scale)
        return loss

    def orthogonalized_momentum(self, p, group):
        """Advance the momentum of p; return it orthogonalized, (M, N) bf16."""
        if p not in self.state:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momentum = self.state[p]["momentum_buffer"]
        momentum.mul_(group["momentum"]).add_(p.grad)
        nesterov = p.grad.add(momentum, alpha=group["momentum"])
        return zeropower_via_newtonschulz5(nesterov.flatten(1), self.dtype)

    def load_state_dict(self, state_dict):
        """Load this rank's state_dict, or this rank's part of a gathered one."""
        super().load_state_dict(state_dict)
        for p, owner in self.owner.items():
            if owner != self.rank:
                self.state.pop(p, None)

    def gathered_state_dict(self):
        """Return state_dict() with the momenta of all ranks; every rank must call it."""
        gathered = self.state_dict()
        for i, p in enumerate(params_of(self)):
            momentum = torch.zeros_like(p)
            if p in self.state:
                momentum.copy_(self.state[p]["momentum_buffer"])
            if self.world_size > 1:
                dist.broadcast(momentum, src=self.owner[p])
            gathered["state"][i] = {"momentum_buffer": momentum}
        return gathered


def matrix_cost(p):
    """Return the multiplications of an iteration on a matrix."""
    m, n = sorted(p.flatten(1).shape)
    return m * m * (m + 2 * n)


def params_of(optimizer):
    """Return the parameters of all groups, in the order in which state_dict numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


# ---- Data: shards of tokens, read as one stream -------------------------------------------------
HEADER = 256  # int32 values: 20240520, 1, number of tokens, zeros; then uint16 tokens


def check_shard(path):
    """Return (number of tokens, what tells this file from others). RunError: no whole shard."""
    if not os.path.isfile(path):  # opening a pipe would hang
        raise RunError(f"cannot read {path}: it is not a file")
    header = np.fromfile(path, "<i4", HEADER).tolist()
    status = os.stat(path)
    tokens = (status.st_size - 4 * HEADER) / 2
    if tokens < 1 or header != [20240520, 1, tokens] + [0] * 253:
        raise RunError(f"{path} is not a whole shard of tokens: fetch it or pack it again")
    return header[2], (status.st_dev, status.st_ino, status.st_mtime_ns)


@dataclasses.dataclass
class DistributedDataLoader:
    """The batches of a run: consecutive windows of all shards laid end to end, again and again.
    Rank r takes the r-th equal part of a step; one token more is a target. RunError: bad input."""

    pattern: str  # glob of the shards, sorted by name
    batch_size: int  # sequences a step, of all ranks
    T: int
    rank: int
    world_size: int
    device: torch.device
    vocab_size: int = 65536
    position: int = 0  # of the next step in the stream
    hash_sum: int = 0  # of this rank's sequences so far

    def __post_init__(self):
        self.paths = sorted(glob.glob(self.pattern))
        if not self.paths:
            raise RunError(f"no data at {self.pattern!r}: run data/fineweb.py or data/pack.py")
        if self.batch_size % self.world_size:
            raise RunError(f"batch_size={self.batch_size}: give a multiple of {self.world_size}")
        self.window = self.batch_size * self.T  # tokens a step, of all ranks
        self.shards = [check_shard(path) for path in self.paths]
        self.ends = np.cumsum([size for size, _ in self.shards]).tolist()  # in the stream
        self.total_tokens = self.ends[-1]
        self.contents = []  # of each shard: its size and a checksum of its first tokens
        for (size, _), end in zip(self.shards, self.ends):
            beginning = self.read(end - size, min(size, 100_000))
            self.contents.append((size, zlib.crc32(beginning)))
        if len(set(self.contents)) < len(self.paths):
            raise RunError(f"{self.pattern!r} names a shard and a copy of it: remove one")

    def read(self, start, count):
        """Return count tokens, uint16, from start on; after its end the stream begins again."""
        parts = []
        while count > 0:
            start %= self.total_tokens
            shard = np.searchsorted(self.ends, start, side="right")
            path = self.paths[shard]
            left = self.ends[shard] - start
            if check_shard(path) != self.shards[shard]:
                raise RunError(f"{path} changed while in use: restore it and start again")
            offset = os.path.getsize(path) - 2 * left
            part = np.fromfile(path, "<u2", min(count, left), offset=offset)
            if part.max() >= self.vocab_size:
                raise RunError(f"{path} holds id {part.max()}, but vocab_size={self.vocab_size}")
            parts.append(part)
            start += len(part)
            count -= len(part)
        return np.concatenate(parts)

    def next_batch(self):
        """Return (inputs, targets), each (batch_size // world_size, T) int64 on `device`."""
        local = self.window // self.world_size
        first = self.position + self.rank * local
        tokens = self.read(first, local + 1)
        for i in range(0, local, self.T):
            odd = 2 * ((first + i) // self.T) + 1  # the hash knows each sequence's place
            sequence = tokens[i : i + self.T + 1]
            self.hash_sum += odd * zlib.crc32(sequence)
        self.position += self.window
        tokens = torch.from_numpy(tokens.astype(np.int64)).to(self.device)
        targets = tokens[1:].clone()  # evaluate changes them
        return tokens[:-1].view(-1, self.T), targets.view(-1, self.T)

    def data_hash(self):
        """Return 12 hex digits for all sequences so far, of all ranks; all ranks must call it."""
        total = sum_over_ranks(torch.tensor(self.hash_sum % 2**48)).item()
        return f"{total % 2**48:012x}"

    def state_dict(self):
        """Return the place in the stream, for any number of ranks; all ranks must call it."""
        start = max(0, self.position - 100_000)
        latest = zlib.crc32(self.read(start, self.position + 1 - start))  # and the next token
        return dict(position=self.position, data_hash=self.data_hash(), fingerprint=latest)

    def load_state_dict(self, state):
        """Go to a saved place. Raises RunError unless the tokens just before it are the same."""
        self.position = state["position"]
        self.hash_sum = int(state["data_hash"], 16) if self.rank == 0 else 0
        if self.state_dict() != state:
            raise RunError(f"{self.pattern!r} no longer holds the tokens that were trained on")


# ---- Training: the optimizers, one step, one evaluation -----------------------------------------
def lr_multiplier(step, args):
    """Return the factor on all learning rates at `step`: 1, in the last steps falling to 0."""
    return min(1.0, (args.num_iterations - step) / max(1, args.warmdown_iters))


def build_optimizers(gpt, args, rank, world_size):
    """Return [AdamW, Muon], and Adagrad for a table. RunError: not every parameter is in one."""
    matrices = [p for p in gpt.h.parameters() if p.ndim == 2]
    tables = [gpt.ngrams.weight] if gpt.ngrams else []
    others = [p for p in gpt.parameters() if p not in {*matrices, *tables}]
    adamw = torch.optim.AdamW(others, args.learning_rate, (0.9, 0.95), weight_decay=0, fused=True)
    rate, momentum = args.muon_learning_rate, args.muon_momentum
    muon = Muon(matrices, rate, momentum, rank=rank, world_size=world_size, dtype=gpt.dtype)
    optimizers = [adamw, muon]
    if tables:
        torch.sparse.check_sparse_tensor_invariants.disable()  # Adagrad warns without a choice
        optimizers.append(torch.optim.Adagrad(tables, args.learning_rate))
    if Counter(p for o in optimizers for p in params_of(o)) != Counter(gpt.parameters()):
        raise RunError("every parameter of the model must be in exactly one optimizer")
    return optimizers


def sum_over_ranks(tensor):
    """Return the sum of `tensor` over all ranks, in place; one process needs no group for it."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def sync_gradients(model):
    """Sum all gradients over the ranks in one all_reduce; a sparse one becomes dense."""
    used = [p for p in model.parameters() if p.grad is not None]
    flat = torch.cat([p.grad.to_dense().flatten() for p in used])
    dist.all_reduce(flat)
    for p, total in zip(used, flat.split([p.numel() for p in used])):
        p.grad = total.view_as(p)


def micro_batch_size(sequences, most):
    """Return the largest divisor of `sequences` up to `most`: all micro-batches have one shape."""
    return next(n for n in range(min(sequences, most), 0, -1) if sequences % n == 0)


def train_step(model, optimizers, inputs, targets, lr_scale, args, stop=lambda: False):
    """Do one optimizer step; return (loss, norm of each parameter's gradient), None if stop().
    inputs, targets: (B, T) int64 of this rank. loss: global mean, NaN if a norm is not finite."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    size = micro_batch_size(len(inputs), args.device_batch_size)
    loss = 0.0
    for x, y in zip(inputs.split(size), targets.split(size)):
        if stop():
            model.zero_grad()
            return None
        micro_loss = model(x, y) * (size / len(inputs) / world_size)
        micro_loss.backward()
        loss += micro_loss.detach()
    gradients = [p.new_zeros(1) if p.grad is None else p.grad for p in model.parameters()]
    gradients = [g._values() if g.is_sparse else g for g in gradients]
    norms = torch.stack(torch._foreach_norm(gradients))  # before ranks are mixed
    loss, norms_sum = sum_over_ranks(torch.stack([loss, norms.sum()]))
    if world_size > 1:
        sync_gradients(model)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * lr_scale
        optimizer.step()
        optimizer.zero_grad()
    return torch.where(norms_sum.isfinite(), loss, torch.nan), norms


@torch.no_grad()
def evaluate(model, val_loader, val_tokens):
    """Return the mean loss over exactly the first val_tokens tokens, the same for all ranks."""
    val_loader.position = 0
    sequences = val_tokens // val_loader.T
    total = 0.0
    for first in range(0, sequences, val_loader.batch_size):
        inputs, targets = val_loader.next_batch()
        left = max(0, sequences - first - val_loader.rank * len(inputs))  # sequences that count
        targets[left:] = -1
        total += model(inputs, targets).double() * (targets != -1).sum()
    return sum_over_ranks(total).item() / val_tokens


# ---- Log, log_dir/run_id.txt, and checkpoints, log_dir/run_id/state_step*.pt --------------------
class Log:
    """`log(line)`: rank 0 prints and logs the line. RunError: another run's log, or one in use."""

    def __init__(self, args, run_id, rank):
        self.path = Path(args.log_dir, f"{run_id}.txt")
        self.folder = self.path.with_suffix("")  # of the checkpoints
        self.num_iterations = args.num_iterations
        self.seconds = Counter()  # of each phase
        self.files = []  # names of the checkpoints that the run wrote, oldest first
        self.val_hash = ""  # of the validation tokens
        self.outputs = []
        if rank == 0:
            if self.path.exists() and not args.resume:
                raise RunError(f"{self.path} exists: pass --resume=auto or another --run_id")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            terminal = sys.stdout or open(os.devnull, "w")
            self.outputs = [open(self.path, "a", buffering=1), terminal]
            try:
                fcntl.flock(self.outputs[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(f"another process is writing {self.path}: stop it") from None
        self.live = tqdm and self.outputs and os.isatty(1) and os.isatty(2)  # a bar, not lines

    def __call__(self, line, show=True):
        write = tqdm.write if self.live else print
        for output in self.outputs[: 1 + show]:  # show=False: the log alone
            with contextlib.suppress(OSError):  # a full disk, a closed terminal: training goes on
                write(line, file=output)
                output.flush()

    @contextlib.contextmanager
    def timed(self, phase):
        """Add the seconds of a with block, which must end by reading a result off the device."""
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def progress(self, step, result, more="", show=True):
        """Log a result after so many steps, with the training time until then."""
        ms = 1000 * self.seconds["train"]
        average = ms / max(step, 1)
        times = f"train_time:{ms:.0f}ms step_avg:{average:.2f}ms"
        self(f"step:{step}/{self.num_iterations} {result} {times}{more}", show)

    def header(self, args, gpt, optimizers, train_loader, val_loader):
        """Log what defines a run: source, settings, environment, data, optimizers."""
        self(Path(__file__).read_text(), show=False)
        for name, value in vars(args).items():
            self(f"hyperparameter {name}={value!r}", show=False)
        git = f"git -C '{Path(__file__).parent}' describe --always --dirty --abbrev=40 2>/dev/null"
        self(f"torch:{torch.__version__} commit:{subprocess.getoutput(git)}")
        cpu = "sed -n 's/^model name.*: //p' /proc/cpuinfo 2>/dev/null | head -n 1"
        machine = subprocess.getoutput(cpu) or os.uname().machine
        if train_loader.device.type == "cuda":
            machine = torch.cuda.get_device_name(train_loader.device)
        ranks = val_loader.world_size
        threads = torch.get_num_threads()
        self(f"device:{machine} processes:{ranks} threads:{threads} products:{gpt.dtype}")
        micro = val_loader.batch_size // ranks
        tokens = train_loader.total_tokens
        self(f"train_tokens:{tokens} val_hash:{self.val_hash} micro_batch:{micro}")
        for optimizer in optimizers:
            values = sum(p.numel() for p in params_of(optimizer))
            self(f"{type(optimizer).__name__} parameters:{values}")

    def summary(self, args, train_loader, gpt, val_loss):
        """Log each phase's seconds, compilations, speed, memory, the weights' place, the result."""
        self(" ".join(f"{phase}:{seconds:.1f}s" for phase, seconds in self.seconds.items()))
        speed = train_loader.position / self.seconds["train"]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # KiB on Linux
        if train_loader.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(train_loader.device) / 2**20
        graphs = _dynamo.utils.counters["stats"]["unique_graphs"]  # more than 2: recompiled
        self(f"tokens/s:{speed:.0f} peak_memory:{peak:.0f}MiB graphs:{graphs}")
        path = self.folder / "model.pt"
        weights = dict(hyperparameters=vars(args), val_loss=val_loss, model=gpt.state_dict())
        if self.outputs and write_checkpoint(weights, path, self):
            self(f"weights: {path}; `bash run.sh sample` lets them write")
        self(f"result val_loss:{val_loss:.4f} target:{args.target_val_loss}")


def write_checkpoint(state, path, log):
    """Write a state; its file has its name only when it is whole. Return False after a warning."""
    partial = path.with_name("partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with log.timed("checkpoint"), open(partial, "wb") as file:
            torch.save(state, file)
            file.flush()
            file.write(zlib.crc32(partial.read_bytes()).to_bytes(4, "little"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        return True
    except (OSError, RuntimeError) as error:  # such as a full disk
        log(f"warning: {path.name} was not written ({error.__context__ or error})")
        partial.unlink(missing_ok=True)  # a full disk has room again
        return False


def save_checkpoint(step, gpt, optimizers, train_loader, log, args):
    """Write what a run needs to go on; keep its newest. All ranks must call it; rank 0 writes."""
    name = f"state_step{step:010d}.pt"
    files = list(dict.fromkeys([*log.files, name]))
    state = dict(step=step, files=files[-args.keep_checkpoints :], model=gpt.state_dict())
    state.update(hyperparameters=vars(args), train_loader=train_loader.state_dict())
    state.update(val_hash=log.val_hash, train_seconds=log.seconds["train"])
    state["optimizers"] = [getattr(o, "gathered_state_dict", o.state_dict)() for o in optimizers]
    state["optimizer_names"] = [type(optimizer).__name__ for optimizer in optimizers]
    if log.outputs and write_checkpoint(state, log.folder / name, log):  # rank 0 has outputs
        log.files = state["files"]
        for old in files[: -args.keep_checkpoints]:
            (log.folder / old).unlink(missing_ok=True)


def load_run_state(state, gpt, optimizers, train_loader, log):
    """Put back what a checkpoint holds; return its step. RunError: other optimizers or data."""
    names = [type(optimizer).__name__ for optimizer in optimizers]
    if names != state.get("optimizer_names"):  # final weights, model.pt, have none
        raise RunError(f"the checkpoint has {state.get('optimizer_names')}, not {names}")
    if log.val_hash != state["val_hash"]:
        raise RunError("val_files or val_tokens are not those of the checkpoint: restore them")
    gpt.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"]):
        saved["param_groups"] = optimizer.state_dict()["param_groups"]  # args define them
        optimizer.load_state_dict(saved)
    train_loader.load_state_dict(state["train_loader"])
    log.seconds["train"] = state["train_seconds"]
    log.files = state["files"]
    return state["step"]


def find_checkpoint(args, log):
    """Return the state that args.resume asks for; auto: the run's newest whole one; None: start."""
    paths = sorted(log.folder.glob("state_step*[0-9].pt"))
    if args.resume != "auto":
        if paths and Path(args.resume).parent.resolve() != log.folder.resolve():
            raise RunError(f"{log.folder} holds checkpoints: pass --resume or another --run_id")
        paths = [Path(args.resume)] if args.resume else []
    for path in reversed(paths):
        if not path.is_file() or zlib.crc32(path.read_bytes()) != 0x2144DF1C:
            log(f"{path} is not a whole checkpoint")  # it must end with its own crc32
            continue
        state = torch.load(path, map_location="cpu", weights_only=True)  # executes nothing
        for name, value in vars(args).items():
            if name == "train_files":  # the first of the settings that a resumed run may change
                return state
            saved = state["hyperparameters"].get(name)
            if saved != value and (name != "num_iterations" or saved > value):
                raise RunError(f"{path} is of a run with {name}={saved}, not {value}")
    if paths:
        raise RunError("no checkpoint is whole: check --resume, or give another --run_id")
    if (log.folder / "model.pt").exists():
        raise RunError(f"{log.folder} is of a run that has ended: give another --run_id")
    return None


# ---- The run: processes, plan, loop, failures ---------------------------------------------------
def join_processes(args):
    """Join torchrun's processes, if there are any; return (rank, world_size, device)."""
    device, gpu = torch.device("cpu"), None
    gpus = 0 if args.device == "cpu" else torch.cuda.device_count()
    if gpus or args.device == "cuda":
        if gpus and not torch.cuda.is_available():
            raise RunError("PyTorch cannot use the GPUs: update their driver, or pass --device=cpu")
        if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > gpus:
            raise RunError(f"{gpus} GPUs are visible: start as many processes, or --device=cpu")
        device = gpu = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(gpu)
    if "RANK" in os.environ and not dist.is_initialized():
        timeout = timedelta(seconds=args.comm_timeout)
        try:
            store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        except (ValueError, RuntimeError) as error:  # no MASTER_ADDR, or nobody there
            raise RunError(f"cannot join torchrun's processes: {error}".splitlines()[0]) from None
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(restarts, store)  # without what processes before a restart left
        backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
        dist.init_process_group(backend, None, timeout, world_size, rank, store, device_id=gpu)
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size(), device
    return 0, 1, device


def product_dtype(args, device):
    """Return the dtype of products; a CPU without bf16 instructions is far faster in float32."""
    if args.dtype != "auto":
        return getattr(torch, args.dtype)
    mkldnn = torch.backends.mkldnn.is_available()
    fast = device.type == "cuda" or (mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.bfloat16 if fast else torch.float32


def open_data(args, rank, world_size, device):
    """Return (train_loader, val_loader). Raises RunError for a plan that cannot work."""
    rows = args.vocab_size + 12 * args.n_layer * args.n_embd
    rows += args.ngram_rows if args.ngrams > 1 else 0
    parameters = args.n_embd * rows
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 12  # with optimizers
    if parameters > room or args.n_layer > 1000:
        raise RunError(f"more than 1000 layers, or {parameters} parameters: {room} fit in memory")
    shared = args.sequence_length, rank, world_size, device, args.vocab_size
    train_loader = DistributedDataLoader(args.train_files, args.batch_size, *shared)
    most = (train_loader.total_tokens - 1) // train_loader.window
    if most < (1 if args.allow_repeat else args.num_iterations):
        fix = "add data, lower --batch_size (--preset=laptop) or --num_iterations, or allow_repeat"
        raise RunError(f"{args.train_files!r} holds tokens for {most} steps: {fix}")
    micro = micro_batch_size(args.batch_size // world_size, args.device_batch_size)
    val_loader = DistributedDataLoader(args.val_files, micro * world_size, *shared)
    most = (val_loader.total_tokens - 1) // val_loader.T * val_loader.T
    if args.val_tokens % val_loader.T or args.val_tokens > most:
        fix = f"give a multiple of {val_loader.T} up to {most}, which {args.val_files!r} holds"
        raise RunError(f"val_tokens={args.val_tokens}: {fix}")
    if set(train_loader.contents) & set(val_loader.contents):
        raise RunError("train_files and val_files hold the same shard: keep them apart")
    return train_loader, val_loader


def gathered(value):
    """Return the values of all ranks; all ranks must call it."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_ranks_agree(what, value):
    """Raise RunError on all ranks unless all hold the same value."""
    values = gathered(value)
    if values.count(values[0]) < len(values):
        raise RunError(f"the ranks differ in their {what}: {values}")


def warm_up(gpt, args, val_loader):
    """Compile by a validation and a training pass; return the seconds of a second training pass."""
    inputs, targets = val_loader.next_batch()
    if not inputs.is_cuda:  # there, as measured, plain attention of short sequences is faster
        torch.backends.cuda.enable_flash_sdp(args.sequence_length > 512)  # also that of CPUs
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # its scores in bf16
        functorch_config.activation_memory_budget = 0.7  # some are computed again; GPUs keep all
        torch.use_deterministic_algorithms(True)  # else threads sum tokens' gradients in any order
    gpt.compile(dynamic=False, fullgraph=args.ngrams < 2, disable=not args.compile)
    with torch.no_grad():
        gpt(inputs, targets)
    for _ in range(2):
        start = time.perf_counter()
        loss = gpt(inputs, targets)
        loss.backward()
        gpt.zero_grad()
        loss.item()  # waits for the device
    return time.perf_counter() - start


def catch_signals():
    """Return stop(): whether any rank was signalled or lost torchrun; all must ask together."""
    caught = []
    parent = os.getppid()

    def note(number, frame):
        caught.append(number)
        signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError):  # a closed terminal
            os.write(2, b"saving before the next micro-batch; the same signal again ends at once\n")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, note)

    def stop():
        orphaned = dist.is_initialized() and os.getppid() != parent  # torchrun was killed
        return sum_over_ranks(torch.tensor(len(caught) + orphaned)).item() > 0

    return stop


def train(args, log, gpt, optimizers, train_loader, val_loader, first_step, stop):
    """Train and validate in turn; return the last validation loss, or None when stopped."""

    def validate(step):
        with log.timed("validation"):
            loss = evaluate(gpt, val_loader, args.val_tokens)
            weights = sum(p.view(torch.int32).sum(dtype=torch.int32) for p in gpt.parameters())
            check_ranks_agree("weights", weights.item())
            data_hash = train_loader.data_hash()
        log.progress(step, f"val_loss:{loss:.4f}", f" data_hash:{data_hash}")
        return loss

    steps = range(first_step, args.num_iterations)
    if log.live:
        steps = tqdm(steps, unit="tok", unit_scale=train_loader.window)
    smooth_loss = val_loss = math.nan
    for step in steps:
        if args.val_loss_every and step % args.val_loss_every == 0:
            val_loss = validate(step)
        if args.save_every and step % args.save_every == 0 and step > first_step:
            save_checkpoint(step, gpt, optimizers, train_loader, log, args)
        before = copy.copy(train_loader)
        with log.timed("train"):
            inputs, targets = train_loader.next_batch()
            scale = lr_multiplier(step, args)
            result = train_step(gpt, optimizers, inputs, targets, scale, args, stop)
            loss = result and result[0].item()
        if result is None:
            save_checkpoint(step, gpt, optimizers, before, log, args)
            log(f"stopped by a signal after step {step}")
            return None
        log.progress(step + 1, f"train_loss:{loss:.4f}", show=not log.live)
        if not math.isfinite(loss):
            values = zip(gpt.named_parameters(), result[1].tolist())
            bad = [name for (name, _), value in values if not math.isfinite(value)]
            fix = f"lower the learning rates; bad gradients, by rank: {gathered(bad)}"
            raise RunError(f"train_loss is {loss} at step {step + 1}: {fix}")
        smooth_loss = loss if step == first_step else 0.9 * smooth_loss + 0.1 * loss
        if log.live:
            steps.set_postfix(step=step + 1, loss=smooth_loss, lr=f"{scale:.0%}", val=val_loss)
    val_loss = validate(args.num_iterations)
    if args.save_every:
        save_checkpoint(args.num_iterations, gpt, optimizers, train_loader, log, args)
    return val_loss


def main(args, stop=lambda: False):
    """Train a GPT as args say; return the last validation loss, None if stop() said to save."""
    rank, world_size, device = join_processes(args)
    loaders = open_data(args, rank, world_size, device)
    check_ranks_agree("data", [loader.contents for loader in loaders])
    torch.manual_seed(args.seed)
    gpt = GPT(args, product_dtype(args, device)).to(device)
    optimizers = build_optimizers(gpt, args, rank, world_size)
    default_id = time.strftime("%Y%m%d-%H%M%S-") + os.urandom(3).hex()
    log = Log(args, gathered(args.run_id or default_id)[0], rank)
    tokens = loaders[1].read(0, args.val_tokens + 1)
    log.val_hash = hashlib.sha256(tokens).hexdigest()[:16]
    state = find_checkpoint(args, log)
    check_ranks_agree("checkpoints", state and state.get("step"))
    first_step = load_run_state(state, gpt, optimizers, loaders[0], log) if state else 0
    log.header(args, gpt, optimizers, *loaders)
    if args.resume:
        log(f"resume={args.resume}: going on after step {first_step}")
    log("warming up, up to a minute; at step 0 the loss is high: tied weights predict the input")
    with log.timed("compile"):
        seconds = warm_up(gpt, args, loaders[1])
    seconds *= loaders[0].window / loaders[1].window  # of a step
    left = timedelta(seconds=round(seconds * (args.num_iterations - first_step)))
    log(f"about {seconds:.2g} s a step, {left} in all")
    val_loss = train(args, log, gpt, optimizers, *loaders, first_step, stop)
    if val_loss is not None:
        log.summary(args, loaders[0], gpt, val_loss)
    if dist.is_initialized():
        dist.destroy_process_group()
    return val_loss


def command(argv):
    """Do what the command line says; where that fails, say why once for all ranks; exit with 1."""
    try:
        main(parse_args(argv), catch_signals())
    except Exception as error:
        text = "".join(traceback.format_exception(error)).rstrip()
        if isinstance(error, (RunError, OSError)):
            text = str(error)
        elif re.search("MemoryError|out of memory|allocate memory", repr(error)):
            text = "out of memory: pass a --device_batch_size below the micro_batch in the log"
        elif dist.is_initialized() and "gloo" in str(error):
            text = f"another rank was killed or is stuck: see torchrun's summary [{error}]"
        first = os.environ.get("LOCAL_RANK", "0") == "0"
        if dist.is_initialized():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, when one rank has failed
            text = f"rank {dist.get_rank()}: {text}"
            with contextlib.suppress(RuntimeError):  # the store is gone
                store = dist.distributed_c10d._get_default_store()
                first = store.compare_set("failure", "", text).decode() == text
        if first:
            print(f"train_gpt2.py: {text}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    command(sys.argv[1:])
