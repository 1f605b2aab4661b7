"""Train GPT-2 124M to a validation loss of 3.28 on FineWeb: one file, one speedrun.

    torchrun --standalone --nproc_per_node=8 train_gpt2.py      # the record's settings, 8 GPUs
    python train_gpt2.py --num_iterations=100 --batch_size=64   # one process; any field below

The defaults are those of record 7 of the public NanoGPT speedrun (October 2024), which took 12.0
minutes on 8xH100 for loss 3.2755 (n=1, its own log); not run on a GPU here yet. On 2 CPU cores,
`bash run.sh` trains 0.8M parameters on bytes to a loss of 1.2935 (n=5) in 4 minutes: records/.

The file in order: Hyperparameters; model (GPT); optimizer (Muon, sharded over ranks); data
(DistributedDataLoader); training (one step, one evaluation); run (set-up, log, main).
Shapes: B sequences, T tokens in a sequence, C = n_embd, V = vocab_size, H = n_head, D = C // H.
"""

import contextlib
import dataclasses
import difflib
import functools
import glob
import hashlib
import math
import os
import platform
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def require(condition, sentence):
    """Raise ValueError(sentence) unless the condition holds."""
    if not condition:
        raise ValueError(sentence)


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
    checksum_every: int = 500  # steps between comparisons of the ranks' weights; 0: at the end
    save_every: int = 0  # steps between checkpoints; 0: none
    log_dir: str = "logs"
    run_id: str = ""  # names log and checkpoints; empty: date, time and a few random digits
    # execution
    device: str = "auto"  # cuda, cpu, or auto: cuda where there is one
    compile: bool = True  # torch.compile; False starts sooner and runs slower

    def __post_init__(self):
        for field in dataclasses.fields(self):
            name, kind, value = field.name, field.type, getattr(self, field.name)
            fits = isinstance(value, (int, float) if kind is float else kind)
            require(fits and (kind is bool or not isinstance(value, bool)),
                    f"{name}={value!r} must be of type {kind.__name__}")
            least = 1 if name in AT_LEAST_ONE else 0
            require(kind not in (int, float) or least <= value < math.inf,
                    f"{name}={value} must be a number of at least {least}")
        for name, legal in (("device", DEVICES), ("muon_coefficients", tuple(NS_COEFFICIENTS))):
            value = getattr(self, name)
            require(value in legal, f"{name}={value!r} must be one of {legal}")
        require(self.vocab_size <= 65536, f"vocab_size={self.vocab_size} must be at most 65536")
        require(self.n_embd % (2 * self.n_head) == 0,
                f"n_embd={self.n_embd} must be a multiple of 2 * n_head={2 * self.n_head}")
        require(self.seed < 2**63, f"seed={self.seed} must be below 2**63")
        require(self.muon_momentum < 1, f"muon_momentum={self.muon_momentum} must be below 1")
        require(self.warmup_iters <= self.num_iterations, f"warmup_iters={self.warmup_iters} must "
                f"be at most {self.num_iterations}, all steps")


DEVICES = ("auto", "cuda", "cpu")
AT_LEAST_ONE = ("vocab_size", "n_layer", "n_head", "n_embd", "batch_size", "device_batch_size",
                "sequence_length", "num_iterations", "val_tokens")

# -----------------------------------------------------------------------------
# Model: GPT-2 with rotary positions, RMSNorm, QK-norm, ReLU^2 and zero-initialised projections


@functools.cache
def matmul_dtype(device):
    """Return bfloat16, or float32 for a CPU whose bf16 products would take 100 times as long."""
    mkldnn = torch.backends.mkldnn.is_available()
    slow = device.type == "cpu" and not (mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.float32 if slow else torch.bfloat16


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
        self.head_dim = args.n_embd // args.n_head
        # three matrices, not one, so that Muon orthogonalizes each by itself
        self.c_q = nn.Linear(args.n_embd, args.n_embd, bias=False)
        self.c_k = nn.Linear(args.n_embd, args.n_embd, bias=False)
        self.c_v = nn.Linear(args.n_embd, args.n_embd, bias=False)
        self.c_proj = nn.Linear(args.n_embd, args.n_embd, bias=False)
        nn.init.zeros_(self.c_proj.weight)  # every block starts as the identity
        self.rotary = Rotary(self.head_dim, args.sequence_length)

    def forward(self, x):  # (B, T, C)
        B, T, C = x.shape
        q = self.rotary(norm(self.c_q(x).view(B, T, self.n_head, self.head_dim)))
        k = self.rotary(norm(self.c_k(x).view(B, T, self.n_head, self.head_dim)))
        v = self.c_v(x).view(B, T, self.n_head, self.head_dim)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


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


CHUNK_LOGITS = 2**26  # 128 MB of bf16; more where that would make more than 8 chunks


class LinearCrossEntropy(torch.autograd.Function):
    """Mean of cross_entropy(x @ weight.T, targets) over the targets that are not -1.

    The logits, the largest tensor of a step, exist for one chunk of tokens at a time: gradients
    are computed along with the loss, so that no logits are kept for, or made again in, backward.
    x: (N, C), weight: (V, C), both float32 or bfloat16; targets: (N,) int64. Returns a float32
    scalar. Products are in dtype, the loss and the sum of weight gradients in float32.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, dtype, with_grad):
        x_low, weight_low = x.to(dtype), weight.to(dtype)
        chunk = max(math.ceil(x.size(0) / 8), min(x.size(0), CHUNK_LOGITS // weight.size(0)))
        count = (targets != -1).sum().clamp(min=1)
        vocabulary = torch.arange(weight.size(0), device=x.device)
        loss = torch.zeros((), device=x.device)
        grad_x, grad_weight = [], 0.0
        for x_i, targets_i in zip(x_low.split(chunk), targets.split(chunk)):
            logits = (x_i @ weight_low.T).float()  # (chunk, V)
            log_z = logits.logsumexp(dim=-1, keepdim=True)
            chosen = logits.gather(1, targets_i.clamp(min=0)[:, None])
            valid = (targets_i != -1)[:, None]
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
        """Return the mean cross-entropy (float32 scalar), or without targets the logits.

        inputs, targets: (B, T) int64, T at most sequence_length; a target of -1 does not count.
        Logits: (B, T, V) float32. Raises ValueError for a longer T.
        """
        longest, T = self.sequence_length, inputs.size(1)
        require(longest >= T, f"T={T} exceeds sequence_length={longest}")
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
    """Orthogonalize G: about U V^T for G = U S V^T.

    G: (M, N) or a batch (K, M, N), any float dtype, unmodified; coefficients: a name in
    NS_COEFFICIENTS. Returns bf16 of the same shape; singular values near 1, not exact. Raises
    ValueError for other shapes. Source: https://kellerjordan.github.io/posts/muon/
    """
    require(G.ndim in (2, 3), f"G of shape {tuple(G.shape)} must be a matrix or a batch of them")
    # the norm in float64: squares of 1e30 and of 1e-30 leave float32's range
    scale = torch.linalg.vector_norm(G, dim=(-2, -1), keepdim=True, dtype=torch.float64) + 1e-7
    X = (G.float() / scale.float()).to(matmul_dtype(G.device))
    tall = G.size(-2) > G.size(-1)
    X = X.mT if tall else X  # (m, n) with m <= n: A is then the smaller Gram matrix
    wide = X.size(-1) >= 2 * X.size(-2)
    eye = torch.eye(X.size(-2), dtype=X.dtype, device=X.device)
    multiply_add = torch.addmm if G.ndim == 2 else torch.baddbmm
    schedule, A = NS_COEFFICIENTS[coefficients], None
    for i in range(steps):
        a, b, c = schedule[min(i, len(schedule) - 1)]
        if A is None:
            A, Q = X @ X.mT, None
        B = multiply_add(A, A, A, beta=b, alpha=c)  # the iteration is X <- (a I + B) X
        Q = a * eye + B if Q is None else multiply_add(Q, B, Q, beta=a)
        # iterations on A alone spare products with a wide X, but rounding errors in A grow by
        # a^2 each: A is made anew from X after the second iteration, then after every third
        if wide and i % 3 != 1 and i < steps - 1:
            A = multiply_add(A, B, A, beta=a)
            A = multiply_add(A, A, B, beta=a)  # (a I + B) A (a I + B)
        else:
            X, A = Q @ X, None
    return (X.mT if tall else X).bfloat16()


def assign_by_cost(shapes, load):
    """Return the rank that owns each matrix: the dearest first, each to the rank with least load.

    shapes: (M, N) of each; load: the cost every rank already has, updated. The cost of M <= N is
    that of a plain iteration, M^3 + 2 M^2 N. Source: https://doi.org/10.1137/0117039
    """
    costs = [min(shape) ** 2 * (min(shape) + 2 * max(shape)) for shape in shapes]
    owners = [0] * len(shapes)
    for i in sorted(range(len(shapes)), key=lambda i: -costs[i]):
        owners[i] = load.index(min(load))
        load[owners[i]] += costs[i]
    return owners


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized by Newton-Schulz: for the matrices inside a network.

    Each parameter belongs to one rank, which alone keeps its momentum and computes its update, from
    its own gradient of it. Updates travel in buckets, one all_reduce each, while later ones are
    computed. Parameters are bit-identical on all ranks, and for every world_size.

    params: of at least 2 dimensions, (M, ...) taken as (M, N), else ValueError; groups may name
    them: "param_names". One whose gradient is None, on all ranks, is left as it is.
    Source: https://kellerjordan.github.io/posts/muon/
    """

    NUM_BUCKETS = 4  # of each group's flat buffer
    # Small matrices are orthogonalized 4 at a time, zeros filling up: products of one shape give
    # the same bits however many matrices a rank owns. Large ones gain nothing on a CPU.
    BATCH, BATCH_NUMEL = 4, 2**18

    def __init__(self, params, lr, momentum=0.95, nesterov=True, ns_steps=5, rank=0, world_size=1,
                 coefficients="quintic"):
        require(0 <= rank < world_size, f"rank={rank} must be in 0..{world_size - 1}")
        self.rank, self.world_size = rank, world_size
        self.load, self.owner = [0] * world_size, {}  # cost of each rank; parameter: its rank
        self.buckets = []  # of each group, a list of (updates, slots, batches)
        super().__init__(params, dict(lr=lr, momentum=momentum, nesterov=nesterov,
                                      ns_steps=ns_steps, coefficients=coefficients))

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        params = self.param_groups[-1]["params"]
        for p in params:
            require(p.ndim > 1, f"Muon takes matrices, not a parameter of shape {tuple(p.shape)}")
        owners = assign_by_cost([p.flatten(1).shape for p in params], self.load)
        self.owner |= dict(zip(params, owners))
        batches = [self.batches_of([p for p in params if self.owner[p] == rank])
                   for rank in range(self.world_size)]
        flat = torch.zeros(sum(p.numel() for p in params), dtype=torch.bfloat16,
                           device=params[0].device)
        self.buckets.append([])
        for k in range(self.NUM_BUCKETS):  # the k-th part of each rank's batches: filled together
            parts = [own[len(own) * k // self.NUM_BUCKETS : len(own) * (k + 1) // self.NUM_BUCKETS]
                     for own in batches]
            members = [p for part in parts for batch in part for p in batch]
            sizes = [p.numel() for p in members]
            updates, flat = flat[: sum(sizes)], flat[sum(sizes) :]
            slots = dict(zip(members, updates.split(sizes)))  # views
            self.buckets[-1].append((updates, slots, parts[self.rank]))

    def batches_of(self, params):
        """Return params in lists of one shape, the largest first: of BATCH if small, else of 1."""
        alike = defaultdict(list)
        for p in sorted(params, key=lambda p: -p.numel()):
            alike[p.flatten(1).shape].append(p)
        return [same[i : i + size] for shape, same in alike.items()
                for size in [self.BATCH if shape.numel() <= self.BATCH_NUMEL else 1]
                for i in range(0, len(same), size)]

    @torch.no_grad()
    def step(self):
        """Update all parameters in place; afterwards every rank holds the same values.

        Each rank computes the updates it owns and leaves the others zero, so that a SUM delivers
        every update exactly: each partial sum is x + 0. Raises FloatingPointError, on all ranks
        and before any change, if a gradient is not finite.
        """
        self.check_gradients()
        for group, buckets in zip(self.param_groups, self.buckets):
            works = []
            for updates, slots, batches in buckets:
                updates.zero_()
                for batch in batches:
                    self.orthogonalize([p for p in batch if p.grad is not None], slots, group)
                if self.world_size > 1:
                    works.append(dist.all_reduce(updates, async_op=True))
            for i, (_, slots, _) in enumerate(buckets):
                if works:
                    works[i].wait()
                for p, slot in slots.items():
                    if p.grad is not None:
                        p.add_(slot.view_as(p), alpha=-group["lr"])

    def orthogonalize(self, batch, slots, group):
        """Advance the momenta of a batch and fill its slots with updates of RMS near 1."""
        if not batch:
            return
        shape = batch[0].flatten(1).shape
        size = self.BATCH if shape.numel() <= self.BATCH_NUMEL else 1
        directions = torch.zeros(size, *shape, device=batch[0].device)
        for p, u in zip(batch, directions):
            if p not in self.state:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            momentum = self.state[p]["momentum_buffer"].mul_(group["momentum"]).add_(p.grad)
            u.copy_(momentum.flatten(1))
            if group["nesterov"]:
                u.mul_(group["momentum"]).add_(p.grad.flatten(1))
        u = zeropower_via_newtonschulz5(directions if size > 1 else directions[0],
                                        steps=group["ns_steps"], coefficients=group["coefficients"])
        for p, update in zip(batch, u.view(directions.shape)):
            torch.mul(update, max(shape) ** 0.5, out=slots[p].view(shape))

    def check_gradients(self):
        """Raise FloatingPointError, on all ranks, for the first gradient that is not finite."""
        named = [pair for group in self.param_groups for pair in zip(
            group.get("param_names", range(len(group["params"]))), group["params"])]
        # the largest magnitude: NaN and inf survive in it, and 1e30 does not overflow
        finite = torch.stack([p.new_zeros(()) if p.grad is None else torch.linalg.vector_norm(
            p.grad, math.inf, dtype=torch.float32) for _, p in named]).isfinite()
        ranks = torch.where(finite, 0, self.world_size - self.rank)  # so MAX finds the lowest
        if self.world_size > 1:
            dist.all_reduce(ranks, op=dist.ReduceOp.MAX)
        for (name, p), found in zip(named, ranks.tolist()):
            if found:
                raise FloatingPointError(
                    f"the gradient of parameter {name}, {tuple(p.shape)}, is not finite on rank "
                    f"{self.world_size - found}: lower the learning rates")

    def load_state_dict(self, state_dict):
        """Load this rank's state_dict, or a gathered one, keeping only this rank's momentum."""
        super().load_state_dict(state_dict)
        for p in self.owner:
            if self.owner[p] != self.rank:
                self.state.pop(p, None)

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
    try:
        header = np.fromfile(path, dtype=np.int32, count=SHARD_HEADER)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    require(
        len(header) == SHARD_HEADER and tuple(header[:2]) == (SHARD_MAGIC, SHARD_VERSION),
        f"{path} is not a shard of tokens (magic {SHARD_MAGIC}, version {SHARD_VERSION}): make "
        f"shards with data/fineweb.py or data/pack.py")
    found, tokens = os.path.getsize(path), int(header[2])
    expected = 4 * SHARD_HEADER + 2 * tokens
    require(
        tokens > 0 and found == expected,
        f"{path} is damaged: its header promises {tokens:,} tokens, {expected:,} bytes, the file "
        f"has {found:,} bytes; delete it and fetch or pack it again")
    return tokens


def read_shard(path, start, count):
    """Return tokens start .. start + count of a shard, (count,) uint16."""
    tokens = np.fromfile(path, np.uint16, count, offset=4 * SHARD_HEADER + 2 * start)
    require(len(tokens) == count, f"{path} became shorter in use: {len(tokens)} of {count} tokens")
    return tokens


class DistributedDataLoader:
    """The batches of a run: consecutive windows of all shards laid end to end.

    Step k reads tokens [k*B*T, (k+1)*B*T], however many ranks share them: rank r takes the r-th
    equal part. The last token is only a target here, and the next window's first input.

    pattern: glob of shards, in the order of their names; batch_size: sequences a step, all ranks.
    Raises FileNotFoundError without shards, ValueError for damaged ones, a batch_size world_size
    does not divide, ids >= vocab_size, and tokens that run out (unless allow_repeat).
    """

    def __init__(
        self, pattern, batch_size, sequence_length, rank, world_size, device,
        allow_repeat=False, vocab_size=65536):
        require(
            batch_size % world_size == 0,
            f"batch_size={batch_size} cannot be shared by {world_size} processes: give a "
            f"multiple of {world_size}, or a number of processes out of {divisors(batch_size)}")
        self.paths = sorted(glob.glob(pattern))
        if not self.paths:
            raise FileNotFoundError(
                f"no data at {pattern!r}: fetch FineWeb with `python data/fineweb.py` or pack "
                f"your own text with `python data/pack.py`, or name other shards")
        self.pattern, self.allow_repeat, self.vocab_size = pattern, allow_repeat, vocab_size
        self.batch_size, self.sequence_length = batch_size, sequence_length
        self.rank, self.world_size, self.device = rank, world_size, torch.device(device)
        self.sizes = [shard_size(path) for path in self.paths]
        self.ends = np.cumsum(self.sizes).tolist()  # of the shards, in tokens of the stream
        self.total_tokens = self.ends[-1]
        self.position = 0  # in tokens of the stream, the same on all ranks
        self.hash_sum = 0  # of the sequences this rank has delivered

    def read(self, start, count):
        """Return tokens start .. start + count of the stream, (count,) uint16."""
        require(
            start + count <= self.total_tokens or self.allow_repeat,
            f"{self.pattern!r} holds {self.total_tokens:,} tokens, but token {start + count:,} "
            f"is wanted: add shards or pass --allow_repeat=True")
        parts = []
        while count:
            start %= self.total_tokens
            i = int(np.searchsorted(self.ends, start, side="right"))
            part = min(count, self.ends[i] - start)
            parts.append(read_shard(self.paths[i], start - self.ends[i] + self.sizes[i], part))
            start, count = start + part, count - part
        tokens = np.concatenate(parts)
        require(
            tokens.max() < self.vocab_size, f"{self.pattern!r} holds the token id {tokens.max()}, "
            f"but vocab_size={self.vocab_size}: take the one the shards were made with")
        return tokens

    def next_batch(self):
        """Return (inputs, targets), each (batch_size // world_size, T) int64 on `device`."""
        T = self.sequence_length
        window = self.batch_size * T  # tokens a step, all ranks
        local = window // self.world_size
        start = self.position + self.rank * local
        tokens = self.read(start, local + 1)
        self.position += window
        for i in range(0, local, T):
            index = (start + i) // T  # of the sequence in the stream: order counts
            row = tokens[i : i + T + 1].tobytes()
            digest = hashlib.blake2b(row, digest_size=8, key=index.to_bytes(8, "little")).digest()
            self.hash_sum += int.from_bytes(digest, "little")
        tokens = torch.from_numpy(tokens.astype(np.int64))
        if self.device.type == "cuda":
            tokens = tokens.pin_memory().to(self.device, non_blocking=True)
        return tokens[:-1].view(-1, T), tokens[1:].view(-1, T)

    def data_hash(self):
        """Return 16 hex digits for all sequences so far, of all ranks: a sum, however shared."""
        high, low = divmod(self.hash_sum % 2**64, 2**32)  # halves: an int64 sum cannot overflow
        high, low = sum_over_ranks(torch.tensor([high, low], device=self.device)).tolist()
        return f"{(high * 2**32 + low) % 2**64:016x}"


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
    muon = Muon([dict(params=matrices, param_names=names)], lr=args.muon_learning_rate,
                momentum=args.muon_momentum, rank=rank, world_size=world_size,
                coefficients=args.muon_coefficients)
    groups = adamw.param_groups + muon.param_groups
    optimized = sorted(id(p) for group in groups for p in group["params"])
    require(optimized == sorted(id(p) for p in gpt.parameters()),
            "every parameter of the model must be in exactly one optimizer")
    for group in groups:
        group["initial_lr"] = group["lr"]  # train_step scales it
    return [adamw, muon]


def sum_over_ranks(tensor):
    """Return the sum of `tensor` over all ranks, in place; one process needs no group for it."""
    if dist.is_initialized():
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor


def bf16_autocast(device):
    """Return the context of every forward pass: products in bf16, weights and sums in float32."""
    device = torch.device(device)
    fast = matmul_dtype(device) == torch.bfloat16
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=fast)


def sync_gradients(optimizers):
    """Sum gradients over the ranks: Muon's for their owner alone, which needs them, others for all.

    On other ranks a gradient of Muon's holds no meaning afterwards.
    """
    works = []
    for optimizer in optimizers if dist.is_initialized() else ():
        owner = getattr(optimizer, "owner", {})
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            works.append(dist.reduce(p.grad, dst=owner[p], async_op=True) if p in owner
                         else dist.all_reduce(p.grad, async_op=True))
    for work in works:
        work.wait()


def train_step(model, optimizers, inputs, targets, lr_scale, args):
    """Do one optimizer step; return the loss, the mean over the global batch (float32 scalar).

    inputs, targets: (B, T) int64, this rank's part of the batch, taken device_batch_size sequences
    at a time. Gradients are summed locally, and over the ranks once.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    train_loss = torch.zeros((), device=inputs.device)
    for x, y in zip(inputs.split(args.device_batch_size), targets.split(args.device_batch_size)):
        with bf16_autocast(inputs.device):
            loss = model(x, y) * (len(x) / (len(inputs) * world_size))
        loss.backward()
        train_loss += loss.detach()
    sync_gradients(optimizers)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lr_scale
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return sum_over_ranks(train_loss)


@torch.no_grad()
def evaluate(model, val_loader, val_tokens):
    """Return the mean loss over exactly the first val_tokens tokens, the same for all ranks.

    val_loader's batch need not divide val_tokens: sequences beyond them get the target -1, which
    does not count, so that every forward pass has the same shape.
    """
    val_loader.position = 0
    num_sequences = val_tokens // val_loader.sequence_length
    local = val_loader.batch_size // val_loader.world_size
    rows = val_loader.rank * local + torch.arange(local, device=val_loader.device)
    total = torch.zeros((), dtype=torch.float64, device=val_loader.device)
    for first in range(0, num_sequences, val_loader.batch_size):
        inputs, targets = val_loader.next_batch()
        targets = targets.masked_fill((first + rows >= num_sequences)[:, None], -1)
        with bf16_autocast(val_loader.device):
            total += model(inputs, targets).double() * (targets != -1).sum()
    return float(sum_over_ranks(total)) / val_tokens


# -----------------------------------------------------------------------------
# Run: processes, data plan, log, checkpoint, main


def divisors(n):
    """Return the divisors of n in rising order, for messages that list legal values."""
    return [i for i in range(1, n + 1) if n % i == 0]


def planned_tokens(args):
    """Return the number of training tokens the whole run reads."""
    return args.num_iterations * args.batch_size * args.sequence_length


def place_in_world(args):
    """Return torchrun's (rank, world_size, device). ValueError for more processes than GPUs."""
    require(("RANK" in os.environ) == ("WORLD_SIZE" in os.environ),
            "only one of RANK and WORLD_SIZE is set: start with torchrun or unset it")
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if args.device == "cpu" or (args.device == "auto" and not torch.cuda.is_available()):
        return rank, world_size, torch.device("cpu")
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    require(processes <= gpus,
            f"{processes} processes on this machine but {gpus} GPUs visible: give torchrun "
            f"--nproc_per_node={gpus or 'N for N GPUs'}, or pass --device=cpu")
    return rank, world_size, torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def open_data(args, rank, world_size, device):
    """Return (train_loader, val_loader). Raises ValueError for an impossible plan."""
    T = args.sequence_length
    place = dict(rank=rank, world_size=world_size, device=device, vocab_size=args.vocab_size)
    train_loader = DistributedDataLoader(
        args.train_files, args.batch_size, T, allow_repeat=args.allow_repeat, **place)
    local = args.batch_size // world_size  # sequences a step and process
    micro = min(args.device_batch_size, local)
    require(
        local % micro == 0,
        f"device_batch_size={micro} does not divide the {local} sequences of each process "
        f"(batch_size={args.batch_size} / {world_size} processes): give one of {divisors(local)}; "
        f"the result stays the same")
    require(
        args.val_tokens % T == 0,
        f"val_tokens={args.val_tokens} is not a whole number of sequences: give a multiple of "
        f"sequence_length={T}, such as {max(1, args.val_tokens // T) * T}")
    needed, held = planned_tokens(args) + 1, train_loader.total_tokens
    require(
        held >= needed or args.allow_repeat,
        f"{args.num_iterations} steps need {needed:,} training tokens, but {args.train_files!r} "
        f"holds {held:,}: add shards (FineWeb's: `python data/fineweb.py "
        f"{math.ceil(needed / 1e8)}`), pass --allow_repeat=True, or --num_iterations of at most "
        f"{(held - 1) // (args.batch_size * T)}")
    # validation repeats only to fill its last batch, with sequences that do not count
    val_loader = DistributedDataLoader(
        args.val_files, micro * world_size, T, allow_repeat=True, **place)
    held = val_loader.total_tokens
    require(
        held > args.val_tokens,
        f"val_tokens={args.val_tokens} needs {args.val_tokens + 1:,} tokens, but "
        f"{args.val_files!r} holds {held:,}: add shards, or pass --val_tokens of at most "
        f"{(held - 1) // T * T}")
    both = set(train_loader.paths) & set(val_loader.paths)
    require(not both, f"{both} is in train_files and in val_files: keep them apart")
    return train_loader, val_loader


class Log:
    """`log(line)`: rank 0 prints the line and writes it to log_dir/run_id.txt, a new file."""

    def __init__(self, args, rank):
        run_id = args.run_id or time.strftime("%Y%m%d-%H%M%S-") + os.urandom(3).hex()
        self.path, self.file = Path(args.log_dir) / f"{run_id}.txt", None
        if rank == 0:
            require(not self.path.exists(),
                    f"{self.path} exists: move it away or pass another --run_id")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "x", buffering=1)

    def __call__(self, line, show=True):
        if self.file:
            print(line, file=self.file)
            if show:
                print(line, flush=True)


class Stopwatch:
    """`with stopwatch("train"):` adds the seconds until the device is done to seconds["train"]."""

    def __init__(self, device):
        self.device, self.seconds = device, defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, phase):
        self.seconds[phase] -= self.now()
        yield
        self.seconds[phase] += self.now()

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def output_of(*command):
    """Return what a command prints, or 'unknown' where it is missing or fails."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    return "unknown"


def device_name(device):
    """Return the model name of the GPU or of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    names = cpuinfo.read_text().split("model name\t: ")[1:] if cpuinfo.exists() else []
    return names[0].splitlines()[0] if names else platform.machine()


def log_header(log, args, gpt, optimizers, train_loader, val_loader):
    """Log what defines the run: source, settings, environment, batch, data, optimizers."""
    device, world_size = train_loader.device, train_loader.world_size
    log(Path(__file__).read_text(), show=False)
    for name, value in dataclasses.asdict(args).items():
        log(f"hyperparameter {name}={value!r}", show=False)
    git = ("git", "-C", str(Path(__file__).resolve().parent))
    changes = output_of(*git, "diff", "--shortstat", "HEAD") or None
    log(f"log:{log.path} command:{' '.join(sys.argv)}")
    log(f"commit:{output_of(*git, 'rev-parse', 'HEAD')} uncommitted:{changes}")
    log(f"python:{platform.python_version()} torch:{torch.__version__} numpy:{np.__version__} "
        f"cuda:{torch.version.cuda} system:{platform.platform()}")
    log(f"device:{device_name(device)} processes:{world_size} threads:{torch.get_num_threads()} "
        f"products:{matmul_dtype(device)}")
    together = val_loader.batch_size  # sequences that all processes take at a time
    log(f"batch: {args.batch_size} x {args.sequence_length} tokens = {args.batch_size // together} "
        f"micro-batches x {world_size} processes x {together // world_size} sequences")
    planned, held = planned_tokens(args), train_loader.total_tokens
    log(f"train data: {len(train_loader.paths)} shards, {held:,} tokens; {args.num_iterations} "
        f"steps read {planned:,} ({planned / held:.3f} epochs)")
    counted = hashlib.sha256(val_loader.read(0, args.val_tokens + 1)).hexdigest()
    log(f"val data: {len(val_loader.paths)} shards, {val_loader.total_tokens:,} tokens; the first "
        f"{args.val_tokens:,} count, val_hash:{counted[:16]}")
    log_optimizers(log, gpt, optimizers, world_size)
    if args.warmdown_iters > args.num_iterations:
        log(f"warning: warmdown_iters={args.warmdown_iters} exceeds num_iterations="
            f"{args.num_iterations}: learning rates start at {lr_multiplier(0, args):.3f} of that")


def log_optimizers(log, gpt, optimizers, world_size):
    """Log a table of count, name, shape, optimizer, learning rate; then Muon's share and bytes."""
    _, muon = optimizers
    rows, owned, sizes = defaultdict(int), [0] * world_size, [0, 0]
    rates = {p: f"{type(optimizer).__name__:6s} lr:{group['initial_lr']:g}"
             for optimizer in optimizers for group in optimizer.param_groups
             for p in group["params"]}
    for name, p in gpt.named_parameters():
        name = ".".join("*" if part.isdigit() else part for part in name.split("."))
        rows[f"{name:24s} {tuple(p.shape)!s:16s} {rates[p]}"] += 1
        sizes[p in muon.owner] += p.numel()
        if p in muon.owner:
            owned[muon.owner[p]] += p.numel()
    log(f"parameters: {sum(sizes):,}")
    for row, count in rows.items():
        log(f"  {count:3d} x {row}")
    log(f"muon: slowest/mean cost of the ranks:{max(muon.load) * world_size / sum(muon.load):.3f} "
        f"momentum MiB of each rank:{[round(n / 2**18, 1) for n in owned]}")
    if world_size > 1:  # a ring sends (W-1)/W of a buffer to reduce it, as much again to spread it
        ring = (world_size - 1) / world_size / 2**20
        log(f"sent MiB a step and rank: gradients:{ring * 4 * (2 * sizes[0] + sizes[1]):.1f} "
            f"updates:{ring * 4 * sizes[1]:.1f} (bf16; the least for an all_reduce)")


def compile_counts():
    """Return (graphs, graph breaks) of torch.compile in this process so far."""
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def check_ranks_agree(gpt, step):
    """Raise RuntimeError unless all ranks hold the same bits in every parameter; all ranks call."""
    if not dist.is_initialized():
        return
    names, params = zip(*gpt.named_parameters())
    bits = torch.stack([p.detach().view(torch.int32).sum(dtype=torch.int64) for p in params])
    of_ranks = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, bits)
    table = torch.stack(of_ranks, dim=1).cpu()  # (parameters, ranks)
    for name, row in zip(names, table):
        differ = (row != row.mode().values).nonzero().flatten().tolist()
        if differ:
            raise RuntimeError(
                f"at step {step} the ranks {differ} hold other values of {name} than the other "
                f"ranks: a device erred, or only some ranks ran a line; nothing since counts")


def warm_up(gpt, optimizers, args, world_size, device):
    """Run one training and one validation step on random tokens, so that all is compiled.

    Leaves no trace: learning rates are 0, the tokens have their own generator, and the optimizers'
    state is dropped. Raises RuntimeError where torch.compile cannot work.
    """
    rows = min(args.batch_size // world_size, 2 * args.device_batch_size)
    count = rows * args.sequence_length + 1
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(args.vocab_size, (count,), generator=generator).to(device)
    inputs, targets = tokens[:-1].view(rows, -1), tokens[1:].view(rows, -1)
    try:
        train_step(gpt, optimizers, inputs, targets, 0.0, args)
        with torch.no_grad(), bf16_autocast(device):
            gpt(inputs[: args.device_batch_size], targets[: args.device_batch_size])
    except torch._dynamo.exc.TorchDynamoException as error:
        raise RuntimeError(
            "torch.compile failed: install what the error above asks for (g++, Python.h), or pass "
            "--compile=False") from error
    for optimizer in optimizers:
        optimizer.state.clear()


def save_checkpoint(path, step, gpt, optimizers, train_loader, args):
    """Write weights, both optimizers with all ranks' momentum, and the position; all ranks call."""
    adamw, muon = optimizers
    state = dict(
        step=step, hyperparameters=dataclasses.asdict(args), model=gpt.state_dict(),
        optimizers=[adamw.state_dict(), muon.gathered_state_dict()],
        position=train_loader.position, data_hash=train_loader.data_hash())
    if train_loader.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, path)  # a checkpoint under its final name is whole


# dense bf16 FLOP/s by the device's name; source: the vendor's data sheets
PEAK_FLOPS = {"NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA A100-SXM4-80GB": 312e12,
              "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}


def log_summary(log, args, gpt, stopwatch, val_loss, device, world_size):
    """Log the seconds of each phase, speed, peak memory of this process, and the result."""
    log(" ".join(f"{phase}:{seconds:.1f}s" for phase, seconds in stopwatch.seconds.items()))
    if device.type == "cuda":
        peak_memory = torch.cuda.max_memory_allocated(device)
    else:
        import resource  # not on Windows
        peak_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    rate = planned_tokens(args) / stopwatch.seconds["train"]
    line = f"tokens/s:{rate:.0f} peak_memory:{peak_memory / 2**20:.0f}MiB"
    if peak := PEAK_FLOPS.get(device_name(device)):
        # per token: 6 for each parameter, and attention's products with all T positions
        attention = 12 * args.n_layer * args.n_embd * args.sequence_length
        flops = 6 * sum(p.numel() for p in gpt.parameters()) + attention
        line += f" mfu:{flops * rate / (peak * world_size):.1%}"
    log(line)
    result = f"result val_loss:{val_loss:.4f}"
    if args.bytes_per_token:
        result += f" bits_per_byte:{val_loss / math.log(2) / args.bytes_per_token:.4f}"
    met = val_loss <= args.target_val_loss
    log(f"{result} target:{args.target_val_loss} {'reached' if met else 'missed'}")


def train(args, log, train_loader, val_loader):
    """Set up, compile, then train and validate by turns; return the final validation loss."""
    rank, world_size, device = train_loader.rank, train_loader.world_size, train_loader.device
    stopwatch = Stopwatch(device)
    with stopwatch("setup"):
        torch.manual_seed(args.seed)
        gpt = GPT(args).to(device)
        optimizers = build_optimizers(gpt, args, rank, world_size)
        if rank == 0:
            log_header(log, args, gpt, optimizers, train_loader, val_loader)
        if args.compile:
            gpt.compile(dynamic=False, fullgraph=True)
    with stopwatch("compile"):
        warm_up(gpt, optimizers, args, world_size, device)
    graphs_before, _ = compile_counts()

    def progress(step, name, loss):
        if not math.isfinite(loss):
            raise FloatingPointError(f"{name} is {loss} at step {step}: lower the learning rates")
        train_ms = 1000 * stopwatch.seconds["train"]
        return (f"step:{step}/{args.num_iterations} {name}:{loss:.4f} train_time:{train_ms:.0f}ms "
                f"step_avg:{train_ms / max(step, 1):.2f}ms")

    def validate(step):
        with stopwatch("validation"):
            loss = evaluate(gpt, val_loader, args.val_tokens)
        log(f"{progress(step, 'val_loss', loss)} data_hash:{train_loader.data_hash()}")
        return loss

    for step in range(args.num_iterations):
        if args.val_loss_every and step % args.val_loss_every == 0:
            validate(step)
        with stopwatch("train"):
            inputs, targets = train_loader.next_batch()
            lr_scale = lr_multiplier(step, args)
            loss = train_step(gpt, optimizers, inputs, targets, lr_scale, args).item()
        step += 1  # steps done
        log(progress(step, "train_loss", loss))
        last = step == args.num_iterations
        if last or (args.checksum_every and step % args.checksum_every == 0):
            with stopwatch("checksum"):
                check_ranks_agree(gpt, step)
        if args.save_every and (last or step % args.save_every == 0):
            with stopwatch("checkpoint"):
                path = log.path.with_suffix("") / f"state_step{step:06d}.pt"
                save_checkpoint(path, step, gpt, optimizers, train_loader, args)
    val_loss = validate(args.num_iterations)
    graphs, breaks = compile_counts()
    log(f"compile: graphs:{graphs} graph_breaks:{breaks} recompiles:{graphs - graphs_before}")
    log_summary(log, args, gpt, stopwatch, val_loss, device, world_size)
    return val_loss


def main(args):
    """Train a GPT as args say, in this process or in those torchrun started.

    Returns the final validation loss. Raises ValueError or FileNotFoundError for a run that
    cannot be, before it starts; FloatingPointError when the loss is no number any more.
    """
    rank, world_size, device = place_in_world(args)
    train_loader, val_loader = open_data(args, rank, world_size, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size > 1 and not dist.is_initialized():
        from torch import _dynamo  # noqa: F401  imported later, it would hold the group past its end
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
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
        print(__doc__)
        for name, field in fields.items():
            print(f"  --{name}={field.default!r} ({field.type.__name__})")
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
    except (ValueError, FileNotFoundError, FloatingPointError) as error:
        if traceback.extract_tb(error.__traceback__)[-1].filename != __file__:
            raise  # not one of this file's own sentences
        if int(os.environ.get("RANK", 0)) > 0:
            time.sleep(3)  # rank 0 says it; torchrun then ends this process
        print(f"train_gpt2.py: {error}", file=sys.stderr)
        sys.exit(1)
