"""Train GPT-2 124M to a validation loss of 3.28 on FineWeb: one file, one speedrun.

    torchrun --standalone --nproc_per_node=8 train_gpt2.py      # the record's settings, 8 GPUs
    python train_gpt2.py --num_iterations=100 --batch_size=64   # one process; any field below

The defaults are those of record 7 of the public NanoGPT speedrun (October 2024): 12.0 minutes on
8xH100, loss 3.2755 (n=1, its own log); not run on a GPU here yet. On 2 CPU cores, `bash run.sh`
trains 0.8M parameters on bytes to a loss of 1.2935 (n=5) in 4 minutes: records/.
In order: Hyperparameters, model, optimizer, data, training (a step, an evaluation), run (main).
Shapes: B sequences, T tokens in a sequence, C = n_embd, V = vocab_size, H = n_head, D = C // H.
"""

import bisect
import contextlib
import dataclasses
import difflib
import glob
import hashlib
import itertools
import math
import os
import platform
import re
import resource
import subprocess
import sys
import time
import traceback
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm


def require(condition, sentence, error=ValueError):
    """Raise error(sentence) unless the condition holds."""
    if not condition:
        raise error(sentence)

# -----------------------------------------------------------------------------
# Hyperparameters: edit here, or give any of them as --field=value
@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """Everything that defines a run. Raises ValueError for values no run could have."""

    # data: shards as written by data/fineweb.py and data/pack.py
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"  # glob; sorted by name
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"
    allow_repeat: bool = False  # True: start over when the training tokens run out
    bytes_per_token: float = 0.0  # mean over the validation text; > 0: bits per byte are logged
    # model
    vocab_size: int = 50304  # GPT-2's 50257 padded to a multiple of 128, which GPUs multiply faster
    n_layer: int = 12
    n_head: int = 6
    n_embd: int = 768
    # batch: device_batch_size only fits it to the device's memory, the others define the run
    batch_size: int = 512  # sequences a step, over all processes
    device_batch_size: int = 64  # sequences a forward pass, at most; accumulation fills the rest
    sequence_length: int = 1024  # tokens
    # optimization
    num_iterations: int = 5100  # steps
    learning_rate: float = 0.0036  # AdamW: the embedding, which is also the head
    weight_decay: float = 0.0  # AdamW
    muon_learning_rate: float = 0.00036  # Muon: every matrix of the blocks
    muon_momentum: float = 0.95
    muon_coefficients: str = "quintic"  # or polar_express: of the Newton-Schulz iterations
    warmup_iters: int = 0  # steps of linear rise from 0
    warmdown_iters: int = 1450  # last steps, of linear fall to 0
    seed: int = 1337  # of the initial weights; nothing else is random
    # evaluation and output
    val_loss_every: int = 125  # steps; 0: only after the last step
    val_tokens: int = 10485760  # the first so many of val_files, at every evaluation
    target_val_loss: float = 3.28  # the last line says whether it was reached
    checksum_every: int = 500  # steps between comparisons of the ranks' weights; 0: first and last
    save_every: int = 0  # steps between checkpoints; 0: none
    log_dir: str = "logs"
    run_id: str = ""  # names log and checkpoints; empty: date, time and a few random digits
    # execution
    device: str = "auto"  # cuda, cpu, or auto: cuda where there is one
    compile: bool = True  # torch.compile; False starts sooner and runs slower

    def __post_init__(self):
        for field in dataclasses.fields(self):
            name, kind, value = field.name, field.type, getattr(self, field.name)
            least, legal = int(name in AT_LEAST_ONE), LEGAL.get(name, [value])
            require(type(value) is kind or (type(value), kind) == (int, float),
                    f"{name}={value!r} must be of type {kind.__name__}")
            require(kind not in (int, float) or least <= value < math.inf,
                    f"{name}={value} must be a number of at least {least}")
            require(value in legal, f"{name}={value!r} must be one of {legal}")
        require(self.vocab_size <= 65536, f"vocab_size={self.vocab_size} must be at most 65536")
        require(self.seed < 2**63, f"seed={self.seed} must be below 2**63")
        require(self.muon_momentum < 1, f"muon_momentum={self.muon_momentum} must be below 1")
        require(self.n_embd % (2 * self.n_head) == 0,
                f"n_embd={self.n_embd} must be a multiple of 2 * n_head={2 * self.n_head}")
        require(self.warmup_iters <= self.num_iterations,
                f"warmup_iters={self.warmup_iters} must be at most {self.num_iterations} steps")

AT_LEAST_ONE = ("vocab_size", "n_layer", "n_head", "n_embd", "batch_size", "device_batch_size",
                "sequence_length", "num_iterations", "val_tokens")
LEGAL = {"device": ("auto", "cuda", "cpu"), "muon_coefficients": ("quintic", "polar_express")}
# dense bf16 FLOP/s by the device's name; source: the vendor's data sheets
PEAK_FLOPS = {"NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA A100-SXM4-80GB": 312e12,
              "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}
CHUNK_LOGITS = 2**26  # made at a time: 128 MB of bf16; more where that would be over 8 chunks

# -----------------------------------------------------------------------------
# Model: GPT-2 with rotary positions, RMSNorm, QK-norm, ReLU^2 and zero-initialised projections
def matmul_dtype(device):
    """Return bfloat16, or float32 for a CPU without bf16 instructions, far faster there."""
    bf16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if bf16 or device.type != "cpu" else torch.float32

def norm(x):
    """RMSNorm over the last dimension, without gain; float32's eps whatever the dtype of x."""
    return F.rms_norm(x, (x.size(-1),), eps=torch.finfo(torch.float32).eps)

class Rotary(nn.Module):
    """Rotary positions, half-split: i turns with i + D/2. https://arxiv.org/abs/2104.09864"""

    def __init__(self, head_dim, sequence_length, base=10000.0):
        super().__init__()
        frequencies = base ** -(torch.arange(0, head_dim, 2).float() / head_dim)
        angles = torch.outer(torch.arange(sequence_length).float(), frequencies)  # (T, D/2)
        # buffers, made once: a cache filled in forward would compile the model twice
        self.register_buffer("cos", angles.cos()[:, None, :], persistent=False)  # (T, 1, D/2)
        self.register_buffer("sin", angles.sin()[:, None, :], persistent=False)

    def forward(self, x):  # (B, T, H, D)
        cos, sin = self.cos[: x.size(1)], self.sin[: x.size(1)]
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1).type_as(x)

class CausalSelfAttention(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.n_head = args.n_head
        # three matrices, not one, so that Muon orthogonalizes each by itself
        self.c_q = nn.Linear(args.n_embd, args.n_embd, bias=False)
        self.c_k = nn.Linear(args.n_embd, args.n_embd, bias=False)
        self.c_v = nn.Linear(args.n_embd, args.n_embd, bias=False)
        self.c_proj = nn.Linear(args.n_embd, args.n_embd, bias=False)
        nn.init.zeros_(self.c_proj.weight)  # every block starts as the identity
        self.rotary = Rotary(args.n_embd // args.n_head, args.sequence_length)

    def forward(self, x):  # (B, T, C)
        q, k, v = (c(x).unflatten(-1, (self.n_head, -1)) for c in (self.c_q, self.c_k, self.c_v))
        heads = (x.transpose(1, 2) for x in (self.rotary(norm(q)), self.rotary(norm(k)), v))
        y = F.scaled_dot_product_attention(*heads, is_causal=True)  # (B, H, T, D)
        return self.c_proj(y.transpose(1, 2).flatten(2))

class MLP(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.c_fc = nn.Linear(args.n_embd, 4 * args.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * args.n_embd, args.n_embd, bias=False)
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

class LinearCrossEntropy(torch.autograd.Function):
    """Mean of cross_entropy(x @ weight.T, targets) over the targets that are not -1.

    Logits, the largest tensor of a step, exist for one chunk of tokens at a time: gradients are
    computed along with the loss, and none kept for backward.
    x: (N, C), weight: (V, C), both float32 or bfloat16; targets: (N,) int64. Returns a float32
    scalar. Products are in dtype, the loss and the sum of weight gradients in float32.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, dtype, with_grad):
        x_low, weight_low, N = x.to(dtype), weight.to(dtype), x.size(0)
        chunk = max(math.ceil(N / 8), min(N, CHUNK_LOGITS // weight.size(0)))
        count = (targets != -1).sum().clamp(min=1)
        vocabulary = torch.arange(weight.size(0), device=x.device)
        loss, grad_x, grad_weight = torch.zeros((), device=x.device), [], 0.0
        for x_i, targets_i in zip(x_low.split(chunk), targets.split(chunk)):
            logits, valid = (x_i @ weight_low.T).float(), (targets_i != -1)[:, None]  # (chunk, V)
            log_z = logits.logsumexp(dim=-1, keepdim=True)
            chosen = logits.gather(1, targets_i.clamp(min=0)[:, None])
            loss += torch.where(valid, log_z - chosen, 0.0).sum()
            if with_grad:
                error = (logits - log_z).exp() - (vocabulary == targets_i[:, None]).float()
                grad_logits = torch.where(valid, error / count, 0.0).to(dtype)
                grad_x.append(grad_logits @ weight_low)
                grad_weight = grad_weight + (grad_logits.T @ x_i).float()
        if with_grad:
            ctx.save_for_backward(torch.cat(grad_x).to(x.dtype), grad_weight.to(weight.dtype))
        return loss / count

    @staticmethod
    def backward(ctx, grad_loss):
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * grad_loss, grad_weight * grad_loss, None, None, None

class GPT(nn.Module):
    """GPT-2 with tied embedding and head. Weights are float32; run it under autocast for bf16."""

    def __init__(self, args):
        super().__init__()
        self.sequence_length = args.sequence_length
        self.wte = nn.Embedding(args.vocab_size, args.n_embd)
        self.h = nn.ModuleList(Block(args) for _ in range(args.n_layer))
        self.lm_head = nn.Linear(args.n_embd, args.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight  # tied: one tensor, with the head's initial values

    def forward(self, inputs, targets=None):
        """Return the mean cross-entropy (float32 scalar), or without targets logits (B, T, V).

        inputs, targets: (B, T) int64, T at most sequence_length, else ValueError; -1: not counted.
        """
        require(inputs.size(1) <= self.sequence_length,
                f"T={inputs.size(1)} exceeds sequence_length={self.sequence_length}")
        x = self.wte(inputs)  # (B, T, C)
        for block in self.h:
            x = block(x)
        x = norm(x)
        if targets is None:
            return self.lm_head(x).float()
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return LinearCrossEntropy.apply(x.flatten(0, 1), self.lm_head.weight, targets.flatten(),
                                        dtype, torch.is_grad_enabled())

# -----------------------------------------------------------------------------
# Optimizer: Muon, its Newton-Schulz work sharded over the ranks
NS_COEFFICIENTS = {  # (a, b, c) of X <- a X + b A X + c A^2 X, A = X X^T; the last is repeated
    # slope at 0 as steep as a stable quintic allows: https://kellerjordan.github.io/posts/muon/
    "quintic": ((3.4445, -4.7750, 2.0315),),
    # each the best for what the one before left, of X / 1.02: https://arxiv.org/abs/2505.16932
    "polar_express": (
        (8.156555 / 1.02, -22.483293 / 1.02**3, 15.878770 / 1.02**5),
        (4.042930, -2.808917, 0.500018), (3.891668, -2.772484, 0.506065),
        (3.285754, -2.368129, 0.464490), (2.346541, -1.709783, 0.423236))}

def zeropower_via_newtonschulz5(G, steps=5, coefficients="quintic"):
    """Orthogonalize G = U S V^T: return about U V^T, bf16; singular values near 1, not exact.

    G: (M, N) or a batch (K, M, N), any float dtype, unmodified; else ValueError. coefficients: a
    name in NS_COEFFICIENTS. Source: https://kellerjordan.github.io/posts/muon/
    """
    require(G.ndim in (2, 3), f"G of shape {tuple(G.shape)} must be a matrix or a batch of them")
    # the norm in float64: squares of 1e30 and of 1e-30 leave float32's range
    scale = torch.linalg.vector_norm(G, dim=(-2, -1), keepdim=True, dtype=torch.float64) + 1e-7
    X = (G.float() / scale.float()).to(matmul_dtype(G.device))
    X = X.mT if (tall := G.size(-2) > G.size(-1)) else X  # (m, n), m <= n: A is the smaller Gram
    wide = X.size(-1) >= 2 * X.size(-2)
    eye = torch.eye(X.size(-2), dtype=X.dtype, device=X.device)
    multiply_add = torch.addmm if G.ndim == 2 else torch.baddbmm
    schedule, A, Q = NS_COEFFICIENTS[coefficients], None, None  # Q: what X is yet to be given
    for i in range(steps):
        a, b, c = schedule[min(i, len(schedule) - 1)]
        A = X @ X.mT if Q is None else A
        B = multiply_add(A, A, A, beta=b, alpha=c)  # the iteration is X <- (a I + B) X
        Q = a * eye + B if Q is None else multiply_add(Q, B, Q, beta=a)
        # iterations on A alone spare products with a wide X, but rounding errors in A grow by
        # a^2 each: A is made anew from X after the second iteration, then after every third
        if wide and i % 3 != 1 and i < steps - 1:
            A = multiply_add(A, B, A, beta=a)
            A = multiply_add(A, A, B, beta=a)  # (a I + B) A (a I + B)
        else:
            X, Q = Q @ X, None
    return (X.mT if tall else X).bfloat16()

def assign_by_cost(shapes, load):
    """Return the rank that owns each (M, N) matrix: the dearest first, each to the least loaded.

    load: the cost of each rank, updated; an iteration on M <= N costs M^3 + 2 M^2 N. Source:
    longest processing time first, https://doi.org/10.1137/0117039
    """
    costs = [min(shape) ** 2 * (min(shape) + 2 * max(shape)) for shape in shapes]
    owners = [0] * len(shapes)
    for i in sorted(range(len(shapes)), key=lambda i: -costs[i]):
        owners[i] = load.index(min(load))
        load[owners[i]] += costs[i]
    return owners

class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized by Newton-Schulz: for the matrices inside a network.

    Each parameter belongs to one rank, which alone keeps its momentum and computes its update from
    its own p.grad. In a round every rank computes a batch of updates; a round's all_reduce travels
    during the next. All ranks end with the same bits, for every world_size if gradients are equal.
    params: of at least 2 dimensions, (M, ...) taken as (M, N), else ValueError; "param_names" in a
    group names them. One without gradient, on all ranks, is left as it is.
    """
    # Small matrices are orthogonalized 4 at a time, zeros filling up: products of one shape give
    # the same bits however many matrices a rank owns. Large ones gain nothing (measured on CPUs).
    BATCH, BATCH_NUMEL = 4, 2**18

    def __init__(self, params, lr, momentum=0.95, nesterov=True, ns_steps=5, rank=0, world_size=1,
                 coefficients="quintic"):
        require(0 <= rank < world_size, f"rank={rank} must be in 0..{world_size - 1}")
        self.rank, self.world_size = rank, world_size
        self.load, self.owner = [0] * world_size, {}  # cost of each rank; parameter: its rank
        self.rounds = []  # of each group, a list of (updates, slots, batch of this rank)
        super().__init__(params, dict(lr=lr, momentum=momentum, nesterov=nesterov,
                                      ns_steps=ns_steps, coefficients=coefficients))

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        params = self.param_groups[-1]["params"]
        for p in params:
            require(p.ndim > 1, f"Muon takes matrices, not a parameter of shape {tuple(p.shape)}")
        owners = assign_by_cost([p.flatten(1).shape for p in params], self.load)
        self.owner |= dict(zip(params, owners))
        batches = [[] for _ in range(self.world_size)]  # [rank][round]: parameters of one shape
        for p in sorted(params, key=lambda p: (-p.numel(), p.flatten(1).shape)):
            own = batches[self.owner[p]]
            if not own or own[-1][0].shape != p.shape or len(own[-1]) == self.batch_size(p):
                own.append([])
            own[-1].append(p)
        flat = params[0].new_zeros(sum(p.numel() for p in params), dtype=torch.bfloat16)
        self.rounds.append([])
        for round_ in itertools.zip_longest(*batches, fillvalue=()):
            members = [p for batch in round_ for p in batch]
            sizes = [p.numel() for p in members]
            updates, flat = flat[: sum(sizes)], flat[sum(sizes) :]
            slots = dict(zip(members, updates.split(sizes)))  # views of updates
            self.rounds[-1].append((updates, slots, round_[self.rank]))

    def batch_size(self, p):
        return self.BATCH if p.numel() <= self.BATCH_NUMEL else 1

    @torch.no_grad()
    def step(self):
        """Update all parameters in place, to the same values on every rank.

        An update is summed with the zeros of other ranks, so exactly. Raises FloatingPointError,
        on all ranks and before any change, for a gradient that is not finite.
        """
        self.check_gradients()
        for group, rounds in zip(self.param_groups, self.rounds):
            works = []
            for updates, slots, batch in rounds:
                updates.zero_()
                if batch := [p for p in batch if p.grad is not None]:
                    self.orthogonalize(batch, slots, group)
                if self.world_size > 1:
                    works.append(dist.all_reduce(updates, async_op=True))
            for (_, slots, _), work in itertools.zip_longest(rounds, works):
                if work:
                    work.wait()
                for p in (p for p in slots if p.grad is not None):
                    p.add_(slots[p].view_as(p), alpha=-group["lr"])

    def orthogonalize(self, batch, slots, group):
        """Advance the momenta of a batch and fill its slots with updates of RMS near 1."""
        shape = batch[0].flatten(1).shape
        directions = torch.zeros(self.batch_size(batch[0]), *shape, device=batch[0].device)
        for p, u in zip(batch, directions):
            if p not in self.state:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            momentum = self.state[p]["momentum_buffer"].mul_(group["momentum"]).add_(p.grad)
            nesterov = p.grad.add(momentum, alpha=group["momentum"])
            u.copy_((nesterov if group["nesterov"] else momentum).flatten(1))
        u = zeropower_via_newtonschulz5(directions.squeeze(0), steps=group["ns_steps"],
                                        coefficients=group["coefficients"])
        for p, update in zip(batch, u.view(directions.shape)):
            torch.mul(update, max(shape) ** 0.5, out=slots[p].view(shape))

    def check_gradients(self):
        """Raise FloatingPointError, on all ranks, for the first gradient that is not finite."""
        count = itertools.count()  # stands for names that were not given
        named = [pair for group in self.param_groups
                 for pair in zip(group["params"], group.get("param_names", count))]
        finite = torch.stack([p.new_ones((), dtype=torch.bool) if p.grad is None
                              else p.grad.isfinite().all() for p, _ in named])
        ranks = torch.where(finite, 0, self.world_size - self.rank)  # so that MAX finds the lowest
        if self.world_size > 1:
            dist.all_reduce(ranks, op=dist.ReduceOp.MAX)
        for (p, name), found in zip(named, ranks.tolist()):
            require(not found, f"the gradient of parameter {name}, {tuple(p.shape)}, is not "
                    f"finite, seen on rank {self.world_size - found}: lower the learning rates",
                    FloatingPointError)

    def load_state_dict(self, state_dict):
        """Load this rank's state_dict, or of a gathered one this rank's part."""
        super().load_state_dict(state_dict)
        for p in [p for p in self.state if self.owner[p] != self.rank]:
            del self.state[p]

    def gathered_state_dict(self):
        """Return state_dict() with the momentum of all ranks; every rank must call it."""
        gathered = self.state_dict()
        for i, p in enumerate(p for group in self.param_groups for p in group["params"]):
            momentum = self.state.get(p, {}).get("momentum_buffer", torch.zeros_like(p)).clone()
            if self.world_size > 1:
                dist.broadcast(momentum, src=self.owner[p])
            gathered["state"][i] = {"momentum_buffer": momentum}
        return gathered

# -----------------------------------------------------------------------------
# Data: shards of tokens, read as one stream
SHARD_MAGIC, SHARD_VERSION = 20240520, 1
SHARD_HEADER = 256  # int32 values: magic, version, token count, zeros; then uint16 tokens

def shard_size(path):
    """Return the number of tokens in a shard. Raises ValueError if it is not a whole shard."""
    require(os.path.isfile(path) and os.access(path, os.R_OK),  # opening a pipe would hang
            f"cannot read {path}: give the names of readable files")
    header, found = np.fromfile(path, np.int32, SHARD_HEADER), os.path.getsize(path)
    require(len(header) == SHARD_HEADER and tuple(header[:2]) == (SHARD_MAGIC, SHARD_VERSION)
            and not header[3:].any(),
            f"{path} is no shard of tokens: make one with data/fineweb.py or data/pack.py")
    tokens, expected = int(header[2]), 4 * SHARD_HEADER + 2 * int(header[2])
    require(tokens > 0 and found == expected,
            f"{path} is damaged: {found:,} bytes instead of {expected:,}; fetch or pack it again")
    return tokens

class DistributedDataLoader:
    """The batches of a run: consecutive windows of all shards laid end to end, made in a thread.

    Step k reads tokens [k*B*T, (k+1)*B*T], of which rank r takes the r-th equal part: the stream
    does not depend on world_size. The last token is a target only, and the next first input.
    pattern: glob of shards, sorted by name; batch_size: sequences a step, all ranks. Raises
    FileNotFoundError without shards, ValueError for damaged or changed ones, a batch_size
    world_size does not divide, ids >= vocab_size, and tokens that run out (unless allow_repeat).
    """

    def __init__(self, pattern, batch_size, sequence_length, rank, world_size, device,
                 allow_repeat=False, vocab_size=65536):
        require(batch_size % world_size == 0,
                f"batch_size={batch_size} cannot be shared by {world_size} processes: give a "
                f"multiple of {world_size}, or one of {divisors(batch_size)} processes")
        self.paths = sorted(glob.glob(pattern))
        require(self.paths, f"no data at {pattern!r}: fetch FineWeb with `python data/fineweb.py`, "
                f"pack your own text with `python data/pack.py`, or name other shards",
                FileNotFoundError)
        self.pattern, self.allow_repeat, self.vocab_size = pattern, allow_repeat, vocab_size
        self.batch_size, self.sequence_length = batch_size, sequence_length
        self.window = batch_size * sequence_length  # tokens a step, of all ranks
        self.rank, self.world_size, self.device = rank, world_size, torch.device(device)
        self.sizes = [shard_size(path) for path in self.paths]
        self.times = [os.stat(path).st_ctime_ns for path in self.paths]  # of the last change
        self.ends = np.cumsum(self.sizes).tolist()  # of the shards, in tokens of the stream
        self.total_tokens = self.ends[-1]
        self.position, self.hash_sum = 0, 0  # next token of the stream; of this rank's sequences
        self.mapped = None, None  # a shard and its tokens
        self.ready, self.coming = [], (None, None)  # batches; where the next start, their future
        self.thread = ThreadPoolExecutor(1)
        self.local = self.window // world_size  # tokens a step, of this rank
        self.buffers = [np.empty((16, self.local + 4), np.uint16) for _ in range(2)]  # aligned rows
        odd = np.random.RandomState(0).randint(2**63, size=sequence_length + 1, dtype=np.uint64)
        self.odd = 2 * odd + 1  # the hash's factors: odd, so that no single change is missed

    def shard(self, i):
        """Return shard i's tokens in mapped memory, of one shard at a time."""
        require(os.stat(self.paths[i]).st_ctime_ns == self.times[i],  # reading a cut one kills
                f"{self.paths[i]} changed while in use: restore it and start again")
        if self.mapped[0] != i:
            tokens = np.memmap(self.paths[i], np.uint16, "r", offset=4 * SHARD_HEADER)
            self.mapped = i, tokens.view(np.ndarray)
        return self.mapped[1]

    def read(self, start, count, most=1):
        """Return (rows, count) uint16: tokens from start on, and of up to `most` windows there."""
        parts = []
        while count:
            start %= self.total_tokens
            i = bisect.bisect_right(self.ends, start)
            rest = self.shard(i)[start - self.ends[i] :]  # of the shard; windows only inside it
            rows = 1 if parts else max(1, min(most, 1 + (rest.size - count) // self.window))
            shape = rows, min(count, rest.size)
            parts.append(np.lib.stride_tricks.as_strided(rest, shape, (2 * self.window, 2)))
            require((token := parts[-1].max()) < self.vocab_size, f"{self.paths[i]} holds the "
                    f"token id {token}, but vocab_size={self.vocab_size}: take its encoding's")
            start, count = start + shape[1], count - shape[1]
        return parts[0] if len(parts) == 1 else np.hstack(parts)

    def prepare(self, start):
        """Return (start, ids, hash) of up to 16 batches, in the buffer of the last but one call."""
        left = 16 if self.allow_repeat else (self.total_tokens - 1 - start) // self.window
        require(left > 0, f"{self.pattern!r} ends after {self.total_tokens:,} tokens: add shards, "
                f"or pass --allow_repeat=True")
        rows = self.read(start + self.rank * self.local, self.local + 1, min(16, left))
        self.buffers.reverse()
        tokens = self.buffers[0][: len(rows), : self.local + 1]
        tokens[:] = rows
        starts = range(start, start + len(rows) * self.window, self.window)
        ids = torch.from_numpy(tokens)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread; pinning needs it
            ids = ids.long().pin_memory()
        return list(zip(starts, ids, self.hash_sequences(tokens, starts).tolist()))

    def hash_sequences(self, tokens, starts):
        """Return a hash of each row of tokens, this rank's of the windows at starts; uint64."""
        T, size = self.sequence_length, math.gcd(self.sequence_length, 4)  # tokens taken as one
        words = tokens[:, :-1].view(f"u{2 * size}").reshape(len(tokens), -1, T // size)
        sums = words @ self.odd[: T // size] + (1 + tokens[:, T::T].astype("u8")) * self.odd[-1]
        place = (np.array(starts) + self.rank * self.local)[:, None] // T + np.arange(sums.shape[1])
        return (sums * (2 * place.astype(np.uint64) + 1)).sum(axis=1)

    def next_batch(self):
        """Return (inputs, targets), each (batch_size // world_size, T) int64 on `device`."""
        if not self.ready or self.ready[0][0] != self.position:
            if self.coming[0] != self.position:  # the first, or moved by load_state_dict
                self.coming = self.position, self.thread.submit(self.prepare, self.position)
            self.ready = self.coming[1].result()
            start = self.ready[-1][0] + self.window
            self.coming = start, self.thread.submit(self.prepare, start)
        _, ids, hash_sum = self.ready.pop(0)
        self.position, self.hash_sum = self.position + self.window, self.hash_sum + hash_sum
        ids = ids.to(self.device, torch.int64, non_blocking=True)
        return ids[:-1].view(-1, self.sequence_length), ids[1:].view(-1, self.sequence_length)

    def data_hash(self):
        """Return 16 hex digits for all sequences so far, of all ranks: a sum, however shared."""
        high, low = divmod(self.hash_sum % 2**64, 2**32)  # halves: an int64 sum cannot overflow
        high, low = sum_over_ranks(torch.tensor([high, low], device=self.device)).tolist()
        return f"{(high * 2**32 + low) % 2**64:016x}"

    def last_tokens(self):
        """Return {path: the shard's size and last tokens}, to compare what other ranks see."""
        return {path: (size, self.read(end - min(size, 999), min(size, 999)).tobytes())
                for path, size, end in zip(self.paths, self.sizes, self.ends)}

    def state_dict(self):
        """Return position and data_hash, for any later world and batch size; all ranks call."""
        return dict(position=self.position, data_hash=self.data_hash())

    def load_state_dict(self, state):
        self.position = state["position"]
        self.hash_sum = int(state["data_hash"], 16) if self.rank == 0 else 0

# -----------------------------------------------------------------------------
# Training: the learning rate, one step, one evaluation
def lr_multiplier(step, args):
    """Return the factor on all learning rates at `step`: linear rise, constant, linear fall."""
    rise = (step + 1) / max(1, args.warmup_iters)
    return min(rise, 1.0, (args.num_iterations - step) / max(1, args.warmdown_iters))

def build_optimizers(gpt, args, rank, world_size):
    """Return [AdamW, Muon]; every parameter is in exactly one. Raises ValueError otherwise."""
    adamw = torch.optim.AdamW(gpt.lm_head.parameters(), lr=args.learning_rate, betas=(0.9, 0.95),
                              weight_decay=args.weight_decay, fused=True)
    names, matrices = zip(*gpt.h.named_parameters(prefix="h"))
    muon = Muon([dict(params=matrices, param_names=names)], args.muon_learning_rate,
                args.muon_momentum, rank=rank, world_size=world_size,
                coefficients=args.muon_coefficients)
    optimized = []
    for group in adamw.param_groups + muon.param_groups:
        group["initial_lr"] = group["lr"]  # train_step scales it
        optimized += map(id, group["params"])
    require(sorted(optimized) == sorted(map(id, gpt.parameters())),
            "every parameter of the model must be in exactly one optimizer")
    return [adamw, muon]

def sum_over_ranks(tensor):
    """Return the sum of `tensor` over all ranks, in place; one process needs no group for it."""
    if dist.is_initialized():
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor

def bf16_autocast(device):
    """Return the context of every forward pass: products in bf16, weights and sums in float32."""
    return torch.autocast(device.type, torch.bfloat16, matmul_dtype(device) == torch.bfloat16)

def sync_gradients(optimizers):
    """Sum gradients over the ranks, Muon's for the owner alone: the others' are then undefined."""
    works = []
    for optimizer in optimizers if dist.is_initialized() else ():
        params = (p for group in optimizer.param_groups for p in group["params"])
        for p in (p for p in params if p.grad is not None):
            owner = getattr(optimizer, "owner", {}).get(p)
            works.append(dist.all_reduce(p.grad, async_op=True) if owner is None
                         else dist.reduce(p.grad, dst=owner, async_op=True))
    for work in works:
        work.wait()

def train_step(model, optimizers, inputs, targets, lr_scale, args):
    """Do one optimizer step; return the loss, the mean over the global batch (float32 scalar).

    inputs, targets: (B, T) int64, this rank's part, taken device_batch_size sequences at a time.
    """
    total = len(inputs) * (dist.get_world_size() if dist.is_initialized() else 1)  # sequences
    train_loss = torch.zeros((), device=inputs.device)
    for x, y in zip(inputs.split(args.device_batch_size), targets.split(args.device_batch_size)):
        with bf16_autocast(inputs.device):
            loss = model(x, y) * (len(x) / total)
        loss.backward()
        train_loss += loss.detach()
    sync_gradients(optimizers)
    for optimizer in reversed(optimizers):  # Muon first: it refuses gradients before any change
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lr_scale
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return sum_over_ranks(train_loss)

@torch.no_grad()
def evaluate(model, val_loader, val_tokens):
    """Return the mean loss over exactly the first val_tokens tokens, the same for all ranks."""
    val_loader.position, num_sequences = 0, val_tokens // val_loader.sequence_length
    total = torch.zeros((), dtype=torch.float64, device=val_loader.device)
    for first in range(0, num_sequences, val_loader.batch_size):
        inputs, targets = val_loader.next_batch()
        left = max(0, num_sequences - first - val_loader.rank * len(inputs))  # to be counted
        targets = torch.cat([targets[:left], torch.full_like(targets[left:], -1)])
        with bf16_autocast(val_loader.device):
            total += model(inputs, targets).double() * (targets != -1).sum()
    return float(sum_over_ranks(total)) / val_tokens

# -----------------------------------------------------------------------------
# Run: processes, data plan, log, checkpoint, main
def divisors(n):
    """Return the divisors of n in rising order, for messages that list legal values."""
    return [i for i in range(1, n + 1) if n % i == 0]

def place_in_world(args):
    """Return torchrun's (rank, world_size, device), set as the current one; ValueError: no GPU."""
    require(("RANK" in os.environ) == ("WORLD_SIZE" in os.environ),
            "only one of RANK and WORLD_SIZE is set: start with torchrun or unset it")
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if args.device == "cpu" or (args.device == "auto" and not torch.cuda.is_available()):
        return rank, world_size, torch.device("cpu")
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    require(processes <= gpus,
            f"{processes} processes on this machine but {gpus} GPUs visible: give torchrun "
            f"--nproc_per_node={gpus or 'N for N GPUs'}, or pass --device=cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    return rank, world_size, torch.device("cuda", torch.cuda.current_device())

def open_data(args, rank, world_size, device):
    """Return (train_loader, val_loader). Raises ValueError for an impossible plan."""
    T = args.sequence_length
    place = dict(rank=rank, world_size=world_size, device=device, vocab_size=args.vocab_size)
    train_loader = DistributedDataLoader(
        args.train_files, args.batch_size, T, allow_repeat=args.allow_repeat, **place)
    local = args.batch_size // world_size  # sequences a step and process
    micro = min(args.device_batch_size, local)
    require(local % micro == 0,
            f"device_batch_size={micro} does not divide the {local} sequences of each process: "
            f"give one of {divisors(local)}; the result stays the same")
    require(args.val_tokens % T == 0,
            f"val_tokens={args.val_tokens} is not a whole number of sequences of {T} tokens: give "
            f"a multiple, such as {max(1, args.val_tokens // T) * T}")
    step, held = train_loader.window, train_loader.total_tokens
    needed = args.num_iterations * step + 1
    require(held >= needed or args.allow_repeat,
            f"{args.num_iterations} steps need {needed:,} tokens, but {args.train_files!r} holds "
            f"{held:,}: add shards (`python data/fineweb.py {math.ceil(needed / 1e8)}`), pass "
            f"--allow_repeat=True, or --num_iterations of at most {(held - 1) // step}")
    # validation repeats only to fill its last batch, with sequences that do not count
    val_loader = DistributedDataLoader(args.val_files, micro * world_size, T, allow_repeat=True,
                                       **place)
    held = val_loader.total_tokens
    require(held > args.val_tokens,
            f"val_tokens={args.val_tokens} needs one token more, but {args.val_files!r} holds "
            f"{held:,}: add shards, or pass --val_tokens of at most {(held - 1) // T * T}")
    both = {*map(os.path.realpath, train_loader.paths)} & {*map(os.path.realpath, val_loader.paths)}
    require(not both, f"{both} is in train_files and in val_files: keep them apart")
    return train_loader, val_loader

class Log:
    """`log(line)`: rank 0 prints the line and writes it to log_dir/run_id.txt, a new file."""

    def __init__(self, args, rank):
        run_id = args.run_id or time.strftime("%Y%m%d-%H%M%S-") + os.urandom(3).hex()
        self.path, self.file = Path(args.log_dir) / f"{run_id}.txt", None
        if rank == 0:
            require(not self.path.exists(), f"{self.path} exists: pass another --run_id")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "x", buffering=1)
        self.bar = tqdm(total=args.num_iterations, disable=rank > 0 or not sys.stderr.isatty())

    def __call__(self, line, show=True):
        if self.file:
            print(line, file=self.file)
            if show:
                tqdm.write(line)  # above the progress bar, where there is one
                sys.stdout.flush()

def log_header(log, args, gpt, optimizers, train_loader, val_loader):
    """Log what defines the run: source, settings, environment, batch, data, optimizers."""
    device, world_size = train_loader.device, train_loader.world_size
    log(Path(__file__).read_text(), show=False)
    for name, value in dataclasses.asdict(args).items():
        log(f"hyperparameter {name}={value!r}", show=False)
    folder, run = Path(__file__).resolve().parent, subprocess.getoutput
    commit = run(f"git -C '{folder}' describe --always --dirty --abbrev=40")
    name, driver = run("grep -m1 'model name' /proc/cpuinfo"), None
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        driver = run("nvidia-smi -i 0 --query-gpu=driver_version --format=csv,noheader")
    log(f"log:{log.path} command:{' '.join(sys.argv)}")
    log(f"python:{platform.python_version()} torch:{torch.__version__} numpy:{np.__version__} "
        f"cuda:{torch.version.cuda} driver:{driver} system:{platform.platform()} commit:{commit}")
    log(f"device:{name.split(': ')[-1]} processes:{world_size} threads:{torch.get_num_threads()} "
        f"products:{matmul_dtype(device)}")
    taken = val_loader.batch_size  # sequences, by all processes at a time
    log(f"batch: {args.batch_size} x {args.sequence_length} tokens = {args.batch_size // taken} "
        f"micro-batches x {world_size} processes x {taken // world_size} sequences")
    planned, held = args.num_iterations * train_loader.window, train_loader.total_tokens
    log(f"train data: {len(train_loader.paths)} shards, {held:,} tokens; {args.num_iterations} "
        f"steps read {planned:,} ({planned / held:.3f} epochs)")
    counted = hashlib.sha256(val_loader.read(0, args.val_tokens + 1)[0]).hexdigest()
    log(f"val data: {len(val_loader.paths)} shards, {val_loader.total_tokens:,} tokens; the first "
        f"{args.val_tokens:,} count, val_hash:{counted[:16]}")
    log_optimizers(log, gpt, optimizers, world_size)

def log_optimizers(log, gpt, optimizers, world_size):
    """Log a table of count, name, shape, optimizer, learning rate; then Muon's work and bytes."""
    rates = {p: f"{type(optimizer).__name__:6s} lr:{group['initial_lr']:g}" for optimizer in
             optimizers for group in optimizer.param_groups for p in group["params"]}
    log(f"parameters: {sum(p.numel() for p in rates):,}")
    rows = Counter(f"{re.sub('[.][0-9]+', '.*', name):24s} {tuple(p.shape)!s:16s} {rates[p]}"
                   for name, p in gpt.named_parameters())
    for row, count in rows.items():
        log(f"  {count:3d} x {row}")
    load, owner = optimizers[1].load, optimizers[1].owner
    owned = [sum(p.numel() for p in owner if owner[p] == rank) for rank in range(world_size)]
    log(f"muon: slowest rank/mean cost:{max(load) * world_size / sum(load):.3f} "
        f"momentum MiB of each rank:{[round(n / 2**18, 1) for n in owned]}")
    # in float32 and bf16; a ring sends (W-1)/W of a buffer to reduce it, and again to spread it
    ring, head = 4 * (world_size - 1) / world_size / 2**20, gpt.lm_head.weight.numel()
    log(f"sent MiB a step and rank, in rings: gradients:{ring * (2 * head + sum(owned)):.1f} "
        f"updates:{ring * sum(owned):.1f}")

def weight_sums(gpt):
    """Return {name: sum of the weights' bits}, which any change of one weight changes."""
    return {name: p.detach().view(torch.int32).sum(dtype=torch.int64).item()
            for name, p in gpt.named_parameters()}

def check_ranks_agree(values, sentence):
    """Raise ValueError on all ranks, naming ranks and key, unless their dicts are equal."""
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, values)
    for key in dict.fromkeys(itertools.chain(*of_ranks)):
        held = [of_rank.get(key) for of_rank in of_ranks]
        differ = [rank for rank, value in enumerate(held) if value != max(held, key=held.count)]
        require(not differ, f"the ranks {differ} hold another {key} than the others: {sentence}")

def warm_up(gpt, optimizers, args, train_loader):
    """Compile all by a training and a validation step on the first tokens; leave no trace."""
    T, device = args.sequence_length, train_loader.device
    rows = min(args.batch_size // train_loader.world_size, 2 * args.device_batch_size)
    tokens = torch.from_numpy(train_loader.read(0, rows * T + 1)[0].astype(np.int64)).to(device)
    inputs, targets = tokens[:-1].view(rows, T), tokens[1:].view(rows, T)
    try:
        train_step(gpt, optimizers, inputs, targets, 0.0, args)  # at learning rates of 0
        with torch.no_grad(), bf16_autocast(device):
            gpt(inputs[: args.device_batch_size], targets[: args.device_batch_size]).item()
    except torch._dynamo.exc.TorchDynamoException as error:
        raise RuntimeError("torch.compile failed: install what the error above asks for (g++, "
                           "Python.h), or pass --compile=False") from error
    for optimizer in optimizers:
        optimizer.state.clear()

def save_checkpoint(path, step, gpt, optimizers, train_loader, args):
    """Write weights, both optimizers with all ranks' momentum, and the position; all ranks call."""
    state = dict(
        step=step, hyperparameters=dataclasses.asdict(args), model=gpt.state_dict(),
        optimizers=[optimizers[0].state_dict(), optimizers[1].gathered_state_dict()],
        train_loader=train_loader.state_dict())
    if train_loader.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path.with_suffix(".partial"))
        os.replace(path.with_suffix(".partial"), path)  # whole under its final name

def log_summary(log, args, gpt, train_loader, seconds, first_graphs, val_loss):
    """Log seconds of each phase, compilations, speed, this process's peak memory, the result."""
    log(" ".join(f"{phase}:{spent:.1f}s" for phase, spent in seconds.items()))
    counters = torch._dynamo.utils.counters
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    log(f"compile: graphs:{graphs} graph_breaks:{breaks} recompiles:{graphs - first_graphs}")
    peak = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_initialized() else (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)
    rate, device = train_loader.position / seconds["train"], train_loader.device
    line = f"tokens/s:{rate:.0f} peak_memory:{peak:.0f}MiB"
    if device.type == "cuda" and (most := PEAK_FLOPS.get(torch.cuda.get_device_name(device))):
        flops = 6 * sum(p.numel() for p in gpt.parameters())  # a token; attention: all T positions
        flops += 12 * args.n_layer * args.n_embd * args.sequence_length
        line += f" mfu:{flops * rate / (most * train_loader.world_size):.1%}"
    log(line)
    bits = val_loss / math.log(2) / (args.bytes_per_token or math.inf)
    log(f"result val_loss:{val_loss:.4f} {f'bits_per_byte:{bits:.4f} ' if bits else ''}target:"
        f"{args.target_val_loss} {'reached' if val_loss <= args.target_val_loss else 'missed'}")

def train(args, log, train_loader, val_loader):
    """Set up, compile, then train and validate by turns; return the final validation loss."""
    rank, world_size, device = train_loader.rank, train_loader.world_size, train_loader.device
    seconds = defaultdict(float)  # of each phase
    @contextlib.contextmanager
    def timed(phase):  # each phase ends by reading a result, so that the device is done
        start = time.perf_counter()
        yield
        seconds[phase] += time.perf_counter() - start
    with timed("setup"):
        torch.manual_seed(args.seed)
        gpt = GPT(args).to(device)
        optimizers = build_optimizers(gpt, args, rank, world_size)
        if rank == 0:
            log_header(log, args, gpt, optimizers, train_loader, val_loader)
        gpt.compile(dynamic=False, fullgraph=True, disable=not args.compile)
    with timed("compile"):
        warm_up(gpt, optimizers, args, train_loader)
    first_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    def progress(step, name, loss):
        require(math.isfinite(loss), f"{name} is {loss} at step {step}: lower the learning rates",
                FloatingPointError)
        train_ms = 1000 * seconds["train"]
        return (f"step:{step}/{args.num_iterations} {name}:{loss:.4f} train_time:{train_ms:.0f}ms "
                f"step_avg:{train_ms / max(step, 1):.2f}ms")
    def validate(step):
        with timed("validation"):
            loss = evaluate(gpt, val_loader, args.val_tokens)
        log(f"{progress(step, 'val_loss', loss)} data_hash:{train_loader.data_hash()}")
        return loss
    for step in range(args.num_iterations):
        if args.val_loss_every and step % args.val_loss_every == 0:
            validate(step)
        with timed("train"):
            with timed("loading"):
                batch = train_loader.next_batch()
            loss = train_step(gpt, optimizers, *batch, lr_multiplier(step, args), args).item()
        step += 1  # steps done
        log(progress(step, "train_loss", loss), show=log.bar.disable)
        log.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        log.bar.update()
        last = step == args.num_iterations
        if world_size > 1 and (step == 1 or last or step % (args.checksum_every or math.inf) == 0):
            with timed("checksum"):
                check_ranks_agree(weight_sums(gpt), f"at step {step} the run is void, for a device "
                                                    f"erred, or only some ranks ran a line")
        if args.save_every and (last or step % args.save_every == 0):
            with timed("checkpoint"):
                path = log.path.with_suffix("") / f"state_step{step:06d}.pt"
                save_checkpoint(path, step, gpt, optimizers, train_loader, args)
    val_loss = validate(args.num_iterations)
    log_summary(log, args, gpt, train_loader, seconds, first_graphs, val_loss)
    return val_loss

def main(args):
    """Train a GPT as args say, here or in torchrun's processes; return the last validation loss."""
    rank, world_size, device = place_in_world(args)
    train_loader, val_loader = open_data(args, rank, world_size, device)
    if world_size > 1 and not dist.is_initialized():
        from torch import _dynamo  # noqa: F401  imported later, it would hold the group past its end
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if world_size > 1:
        check_ranks_agree(train_loader.last_tokens() | val_loader.last_tokens(),
                          "give every machine the same files")
    log = Log(args, rank)
    try:
        val_loss = train(args, log, train_loader, val_loader)
    except Exception as error:
        log(f"failed: {error}", show=False)
        raise
    if world_size > 1:
        dist.destroy_process_group()
    return val_loss

def parse_args(argv):
    """Return Hyperparameters from `--field=value` arguments. ValueError for any other argument."""
    fields = {field.name: field for field in dataclasses.fields(Hyperparameters)}
    if "--help" in argv or "-h" in argv:
        print(__doc__, *(f"  --{name}={f.default!r}" for name, f in fields.items()), sep="\n")
        sys.exit(0)
    values = {}
    for argument in argv:
        name, _, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or name not in fields:
            close = difflib.get_close_matches(name, fields, n=1) or ["help"]
            raise ValueError(f"unknown argument {argument!r}: did you mean --{close[0]}?")
        kind = fields[name].type
        try:
            values[name] = {"True": True, "False": False}[text] if kind is bool else kind(text)
        except (ValueError, KeyError):
            legal = "True or False" if kind is bool else f"a value of type {kind.__name__}"
            raise ValueError(f"{argument!r}: write --{name}={legal}") from None
    return Hyperparameters(**values)

if __name__ == "__main__":
    try:
        main(parse_args(sys.argv[1:]))
    except (ValueError, OSError, FloatingPointError) as error:
        if traceback.extract_tb(error.__traceback__)[-1].filename != __file__:
            raise  # not one of this file's own sentences
        time.sleep(3 if int(os.environ.get("RANK", 0)) else 0)  # torchrun ends it: rank 0 says it
        sys.exit(f"train_gpt2.py: {error}")  # to stderr, exit status 1
