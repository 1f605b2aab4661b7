"""Train GPT-2 124M to a validation loss of 3.28 on FineWeb: one file, one speedrun.

    torchrun --standalone --nproc_per_node=8 train_gpt2.py      # the record's settings, 8 GPUs
    python train_gpt2.py --num_iterations=100 --batch_size=64   # one process; any field below
    python train_gpt2.py --check    # can it run here?   --profile: where a step's time goes

The defaults are those of record 7 of the public NanoGPT speedrun (October 2024): 12.0 minutes on
8xH100, loss 3.2755 (n=1, its own log); not run on a GPU here yet. On 2 CPU cores, `bash run.sh`
trains 0.8M parameters on bytes to a loss of 1.2912 (n=10) in 4 to 9 minutes: records/.
In order: Hyperparameters, model, optimizer, data, training (a step, an evaluation), run (main).
Shapes: B sequences, T tokens in a sequence, C = n_embd, V = vocab_size, H = n_head, D = C // H.
"""

import bisect
import contextlib
import dataclasses
import difflib
import glob
import inspect
import itertools
import math
import os
import runpy
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._functorch import config as functorch
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parent
sys.path[:0] = f"{ROOT}/data", f"{ROOT}/records"
import checkpoints  # noqa: E402  a run's state on the disk
import describe  # noqa: E402  a run's words: log, header, summary, failure
import processes  # noqa: E402  how those of torchrun find each other
from shards import SHARD_HEADER, shard_size  # noqa: E402  the format of the data


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
    save_every: int = 0  # steps between checkpoints; 0: none but when a signal ends the run
    keep_checkpoints: int = 2  # the newest of the run
    resume: str = ""  # a checkpoint to go on from; auto: the newest in log_dir that fits, if any
    log_dir: str = "logs"
    run_id: str = ""  # names log and checkpoints; empty: date, time and a few random digits
    # execution
    device: str = "auto"  # cuda, cpu, or auto: cuda where there is one
    compile: bool = True  # torch.compile; False starts sooner and runs slower
    attention: str = "auto"  # kernel: cudnn, flash, efficient, math; auto: the first that can
    comm_timeout: int = 600  # seconds that a rank waits for the others before the run fails

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

SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}  # fastest first
AT_LEAST_ONE = ("vocab_size", "n_layer", "n_head", "n_embd", "batch_size", "device_batch_size",
                "sequence_length", "num_iterations", "val_tokens", "keep_checkpoints",
                "comm_timeout")
LEGAL = {"device": ("auto", "cuda", "cpu"), "muon_coefficients": ("quintic", "polar_express"),
         "attention": ("auto", *SDPA)}
# of the head's chunks: 516 tokens of GPT-2's vocabulary (CPUs are slower with fewer), or an 8th
CHUNK_LOGITS, MAX_CHUNKS = 26_000_000, 8

# -----------------------------------------------------------------------------
# Model: GPT-2 with rotary positions, RMSNorm, QK-norm, ReLU^2 and zero-initialised projections
def matmul_dtype(device):
    """Return bfloat16, or float32 for a CPU without bf16 instructions, far faster there."""
    bf16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if bf16 or device.type != "cpu" else torch.float32

def norm(x):
    """RMSNorm over the last dimension, without gain; float32's eps whatever the dtype of x."""
    return F.rms_norm(x, (x.size(-1),), eps=torch.finfo(torch.float32).eps)

class Linear(nn.Linear):
    """A product with a matrix that is trained in float32; x may be bf16 after cast_weights."""

    low = None  # the weight in bf16

    def cast(self, dtype):
        return self.weight if dtype == self.weight.dtype else self.low

    def forward(self, x):
        return F.linear(x, self.cast(x.dtype))

    def add_gradient(self, low):
        """Add the gradient of low, of one micro-batch, to the weight's, in float32."""
        grad, low.grad = low.grad, None
        if grad is not None:  # LinearCrossEntropy gives the head's to its weight itself
            total = self.weight.grad
            self.weight.grad = grad.float() if total is None else total.add_(grad)

@torch.no_grad()
def cast_weights(gpt, dtype):
    """Let gpt compute in dtype, with its weights of now: cast once a step, not a micro-batch."""
    gpt.dtype = dtype
    if linears := [c for c in gpt.modules() if isinstance(c, Linear) and c.weight.dtype != dtype]:
        for c in (c for c in linears if c.low is None):
            c.low = torch.empty_like(c.weight, dtype=dtype).requires_grad_()
            c.low.register_post_accumulate_grad_hook(c.add_gradient)
        torch._foreach_copy_([c.low for c in linears], [c.weight for c in linears])

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
        self.c_q = Linear(args.n_embd, args.n_embd, bias=False)
        self.c_k = Linear(args.n_embd, args.n_embd, bias=False)
        self.c_v = Linear(args.n_embd, args.n_embd, bias=False)
        self.c_proj = Linear(args.n_embd, args.n_embd, bias=False)
        nn.init.zeros_(self.c_proj.weight)  # every block starts as the identity
        self.rotary = Rotary(args.n_embd // args.n_head, args.sequence_length)

    def turn(self, x):  # (B, T, H, D)
        return self.rotary(norm(x))

    def forward(self, x):  # (B, T, C)
        q, k, v = (c(x).unflatten(-1, (self.n_head, -1)) for c in (self.c_q, self.c_k, self.c_v))
        # backward needs q and k from before and after the turn: compiled, it turns them again
        q, k = (checkpoint(self.turn, x, use_reentrant=False, preserve_rng_state=False)
                for x in (q, k))
        heads = (x.transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(*heads, is_causal=True)  # (B, H, T, D)
        return self.c_proj(y.transpose(1, 2).flatten(2))

class MLP(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.c_fc = Linear(args.n_embd, 4 * args.n_embd, bias=False)
        self.c_proj = Linear(4 * args.n_embd, args.n_embd, bias=False)
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
    computed along with the loss, and none kept for backward. x: (N, C) float32 or bfloat16;
    weight: (V, C) float32, whose gradient is summed in float32; low: weight in the dtype of x,
    that of all products; targets: (N,) int64. Returns a float32 scalar.
    """

    @staticmethod
    def forward(ctx, x, weight, low, targets, with_grad):
        N = x.size(0)
        chunk = math.ceil(N / min(MAX_CHUNKS, math.ceil(N * low.size(0) / CHUNK_LOGITS)))
        count = (targets != -1).sum().clamp(min=1)
        vocabulary = torch.arange(low.size(0), device=x.device)
        loss, grad_x, grad_weight = torch.zeros((), device=x.device), [], 0.0
        for x_i, targets_i in zip(x.split(chunk), targets.split(chunk)):
            logits, valid = (x_i @ low.T).float(), (targets_i != -1)[:, None]  # (chunk, V)
            log_z = logits.logsumexp(dim=-1, keepdim=True)
            chosen = logits.gather(1, targets_i.clamp(min=0)[:, None])
            loss += torch.where(valid, log_z - chosen, 0.0).sum()
            if with_grad:
                error = (logits - log_z).exp() - (vocabulary == targets_i[:, None]).float()
                grad_logits = torch.where(valid, error / count, 0.0).type_as(x)
                grad_x.append(grad_logits @ low)
                grad_weight = grad_weight + (grad_logits.T @ x_i).float()
        if with_grad:
            ctx.save_for_backward(torch.cat(grad_x), grad_weight)
        return loss / count

    @staticmethod
    def backward(ctx, grad_loss):
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * grad_loss, grad_weight * grad_loss, None, None, None

class GPT(nn.Module):
    """GPT-2 with tied embedding and head. Weights are float32, products as cast_weights says."""

    dtype = torch.float32  # of the residual stream

    def __init__(self, args):
        super().__init__()
        self.sequence_length = args.sequence_length
        self.wte = nn.Embedding(args.vocab_size, args.n_embd)
        self.h = nn.ModuleList(Block(args) for _ in range(args.n_layer))
        self.lm_head = Linear(args.n_embd, args.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight  # tied: one tensor, with the head's initial values

    def forward(self, inputs, targets=None):
        """Return the mean cross-entropy (float32 scalar), or without targets logits (B, T, V).

        inputs, targets: (B, T) int64, T at most sequence_length, else ValueError; -1: not counted.
        """
        require(inputs.size(1) <= self.sequence_length,
                f"T={inputs.size(1)} exceeds sequence_length={self.sequence_length}")
        x = self.wte(inputs).to(self.dtype)  # (B, T, C)
        for block in self.h:
            x = block(x)
        x = norm(x)
        if targets is None:
            return self.lm_head(x).float()
        head = self.lm_head
        return LinearCrossEntropy.apply(x.flatten(0, 1), head.weight, head.cast(x.dtype).detach(),
                                        targets.flatten(), torch.is_grad_enabled())

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

def largest_gradients(params):
    """Return (P,): the largest |gradient| of each of P parameters; not finite where one is not."""
    grads = [p.new_zeros(1) if p.grad is None else p.grad for p in params]
    return torch.stack(torch._foreach_norm(grads, math.inf))

def check_finite(largest, names):
    """Raise FloatingPointError, on all ranks, for the first value of largest that is not finite.

    largest: (P,), as from largest_gradients; names: {parameter: name} in the same order.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    ranks = torch.where(largest.isfinite(), 0, world_size - rank)  # so that MAX finds the lowest
    if world_size > 1:
        dist.all_reduce(ranks, op=dist.ReduceOp.MAX)
    for (p, name), found in zip(names.items(), ranks.tolist()):
        require(not found, f"the gradient of parameter {name}, {tuple(p.shape)}, is not finite, "
                f"seen on rank {world_size - found}: lower the learning rates", FloatingPointError)

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
                 coefficients="quintic", check=True):
        require(0 <= rank < world_size, f"rank={rank} must be in 0..{world_size - 1}")
        self.rank, self.world_size, self.check = rank, world_size, check
        self.load, self.owner = [0] * world_size, {}  # cost of each rank; parameter: its rank
        self.rounds = []  # of each group, a list of (updates, slots, batch of this rank)
        self.names = {}  # of the parameters; numbers where none are given
        super().__init__(params, dict(lr=lr, momentum=momentum, nesterov=nesterov,
                                      ns_steps=ns_steps, coefficients=coefficients))

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        params = self.param_groups[-1]["params"]
        for p in params:
            require(p.ndim > 1, f"Muon takes matrices, not a parameter of shape {tuple(p.shape)}")
        count = itertools.count(len(self.names))
        self.names |= dict(zip(params, self.param_groups[-1].get("param_names", count)))
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

        An update is summed with the zeros of other ranks, so exactly. With check, which waits for
        the device, a gradient that is not finite raises FloatingPointError on all ranks first.
        """
        if self.check:
            check_finite(largest_gradients(self.names), self.names)
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
        mapped = self.mapped
        if mapped[0] != i:
            tokens = np.memmap(self.paths[i], np.uint16, "r", offset=4 * SHARD_HEADER)
            mapped = self.mapped = i, tokens.view(np.ndarray)
        return mapped[1]

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
                coefficients=args.muon_coefficients, check=False)  # train_step sees to it
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

def train_step(model, optimizers, inputs, targets, lr_scale, args, largest=None):
    """Do one optimizer step; return the loss, the mean over the global batch (float32 scalar).

    inputs, targets: (B, T) int64, this rank's part, taken device_batch_size sequences at a time.
    A gradient that is not finite, on any rank, makes the loss NaN: to be seen where that is read.
    largest: (P,), filled with this rank's largest |gradient| of each parameter.
    """
    total = len(inputs) * (dist.get_world_size() if dist.is_initialized() else 1)  # sequences
    train_loss = torch.zeros((), device=inputs.device)
    cast_weights(model, matmul_dtype(inputs.device))
    for x, y in zip(inputs.split(args.device_batch_size), targets.split(args.device_batch_size)):
        loss = model(x, y) * (len(x) / total)
        loss.backward()
        train_loss += loss.detach()
    found = largest_gradients(model.parameters())  # before they are mixed with other ranks'
    train_loss += 0 * found.max()
    if largest is not None:
        largest.copy_(found)
    sync_gradients(optimizers)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lr_scale
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return sum_over_ranks(train_loss)

@torch.no_grad()
def evaluate(model, val_loader, val_tokens):
    """Return the mean loss over exactly the first val_tokens tokens, the same for all ranks."""
    val_loader.position, num_sequences = 0, val_tokens // val_loader.sequence_length
    cast_weights(model, matmul_dtype(val_loader.device))
    total = torch.zeros((), dtype=torch.float64, device=val_loader.device)
    for first in range(0, num_sequences, val_loader.batch_size):
        inputs, targets = val_loader.next_batch()
        left = max(0, num_sequences - first - val_loader.rank * len(inputs))  # to be counted
        targets = torch.cat([targets[:left], torch.full_like(targets[left:], -1)])
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
    local, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    require(local <= gpus,
            f"{local} processes on this machine but {gpus} GPUs visible: give torchrun "
            f"--nproc_per_node={gpus or 'N for N GPUs'}, or pass --device=cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    return rank, world_size, torch.device("cuda", torch.cuda.current_device())

@contextlib.contextmanager
def attention_kernel(args, device):
    """Let attention take args.attention, or the first kernel that can; yield which; ValueError."""
    can = SDPA if args.attention == "auto" else {args.attention: SDPA[args.attention]}
    ordered = "set_priority" in inspect.signature(sdpa_kernel).parameters  # since torch 2.6
    shape = 1, args.sequence_length, args.n_head, args.n_embd // args.n_head
    q = torch.ones(shape, dtype=matmul_dtype(device), device=device, requires_grad=True)
    q = q.transpose(1, 2)
    with sdpa_kernel([*can.values()], **{"set_priority": True} if ordered else {}):
        try:
            node = F.scaled_dot_product_attention(q, q, q, is_causal=True).grad_fn.name().lower()
        except RuntimeError as error:
            raise ValueError(f"attention={args.attention!r} is not to be had on this device: give "
                             f"--attention=auto") from error
        yield next((name for name in can if name in node), "math")

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

def compile_whole(gpt, enabled=True):
    """Let torch.compile make one graph of gpt; in backward it computes cheap activations again."""
    functorch.activation_memory_budget = 0.8  # norms and squares are cheap, attention is not
    gpt.compile(dynamic=False, fullgraph=True, disable=not enabled)

def warm_up(gpt, optimizers, args, train_loader):
    """Compile all by a training and a validation step on the first tokens; leave no trace."""
    T, device = args.sequence_length, train_loader.device
    rows = min(args.batch_size // train_loader.world_size, 2 * args.device_batch_size)
    tokens = torch.from_numpy(train_loader.read(0, rows * T + 1)[0].astype(np.int64)).to(device)
    inputs, targets = tokens[:-1].view(rows, T), tokens[1:].view(rows, T)
    states = [optimizer.state for optimizer in optimizers]
    try:
        for optimizer in optimizers:
            optimizer.state = defaultdict(dict)
        train_step(gpt, optimizers, inputs, targets, 0.0, args)  # at learning rates of 0
        with torch.no_grad():
            gpt(inputs[: args.device_batch_size], targets[: args.device_batch_size]).item()
    except torch._dynamo.exc.TorchDynamoException as error:
        raise RuntimeError("torch.compile failed: install what the error above asks for (g++, "
                           "Python.h), or pass --compile=False") from error
    for optimizer, state in zip(optimizers, states):
        optimizer.state = state

def train(args, log, gpt, optimizers, train_loader, val_loader, saved, signals):
    """Compile, then train and validate by turns; return the last validation loss.

    A signal on any rank ends all of them after their step: saved, and None returned.
    """
    device, first_step = train_loader.device, log.step
    names = {p: name for name, p in gpt.named_parameters()}
    largest = torch.zeros(len(names), device=device)  # gradient of each parameter, on this rank
    compile_whole(gpt, args.compile)
    with log.timed("compile"):
        warm_up(gpt, optimizers, args, train_loader)
    first_graphs = graphs = describe.count_graphs()
    def validate():
        with log.timed("validation"):
            loss = evaluate(gpt, val_loader, args.val_tokens)
        log(f"{log.progress('val_loss', loss)} data_hash:{train_loader.data_hash()}")
        return loss
    while log.step < args.num_iterations:
        if args.val_loss_every and log.step % args.val_loss_every == 0:
            validate()
        with log.timed("train"):
            with log.timed("loading"):
                batch = train_loader.next_batch()
            loss = train_step(gpt, optimizers, *batch, lr_multiplier(log.step, args), args, largest)
            stop = sum_over_ranks(torch.full((), float(len(signals)), device=device))
            loss, stop = torch.stack([loss, stop]).tolist()
        log.step += 1
        if not math.isfinite(loss):
            check_finite(largest, names)
        log(log.progress("train_loss", loss))
        if graphs < (graphs := describe.count_graphs()):
            log("warning: compiled anew after the warm-up; TORCH_LOGS=recompiles says why")
        last = log.step == args.num_iterations
        if dist.is_initialized() and (log.step == first_step + 1 or last or
                                      log.step % (args.checksum_every or math.inf) == 0):
            with log.timed("checksum"):
                check_ranks_agree(weight_sums(gpt), "the run is void, for a device erred, or only "
                                                    "some ranks ran a line")
        if stop or (args.save_every and (last or log.step % args.save_every == 0)):
            with log.timed("checkpoint"):
                saved.save(checkpoints.run_state(gpt, optimizers, train_loader, log, args))
        if stop:
            require(saved.wait(), "ended by a signal, but could not save", OSError)
            log(f"ended by a signal, saved in {saved.last}: --resume=auto goes on")
            return None
    val_loss = validate()
    saved.wait()
    describe.summary(log, args, gpt, train_loader, graphs - first_graphs, val_loss)
    return val_loss

def main(args, catch=list):
    """Train a GPT as args say, here or in torchrun's processes; return the last validation loss.

    catch() returns a list; when it is not empty any more, on any rank, all save and return None.
    """
    start = time.perf_counter()
    rank, world_size, device = place_in_world(args)
    train_loader, val_loader = open_data(args, rank, world_size, device)
    if world_size > 1:
        if not dist.is_initialized():
            processes.connect(device, args.comm_timeout)
        check_ranks_agree(train_loader.last_tokens() | val_loader.last_tokens(),
                          "give every machine the same files")
    signals = catch()
    torch.manual_seed(args.seed)
    gpt = GPT(args).to(device)
    optimizers = build_optimizers(gpt, args, rank, world_size)
    path, step, seconds, run_id, lines = checkpoints.resume(args, gpt, optimizers, train_loader)
    log = describe.Log(args, rank, run_id, step, seconds)
    saved = checkpoints.Checkpoints(log, args.keep_checkpoints, path)
    try:
        with attention_kernel(args, device) as kernel:
            if rank == 0:
                describe.header(log, __file__, args, gpt, optimizers, train_loader, val_loader,
                                f"products:{matmul_dtype(device)} attention:{kernel}")
            for line in lines:
                log(line)
            log.seconds["setup"] = time.perf_counter() - start
            val_loss = train(args, log, gpt, optimizers, train_loader, val_loader, saved, signals)
    except Exception as error:
        describe.failure(error, args, log, saved.last)
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

def command(argv):
    """Do what the command line says; where that fails, say why once for all ranks; exit with 1."""
    try:
        record(main)(parse_args(argv), checkpoints.catch_signals)
    except Exception as error:
        describe.failure(error)
        sys.exit(1)

if __name__ == "__main__":
    tools = {"--check": "tests/preflight.py", "--profile": "records/step_profile.py"}
    if flag := next((flag for flag in tools if flag in sys.argv), None):
        sys.argv.remove(flag)
        sys.modules["train_gpt2"] = sys.modules[__name__]  # which may be a copy with another name
        runpy.run_path(f"{describe.ROOT}/{tools[flag]}", run_name="__main__")
    else:
        command(sys.argv[1:])
