"""A plain implementation of the training step: the reference of tests and benchmarks.

It is eager, computes all logits at once in float32, and orthogonalizes one matrix at a time. The
parameters have the names and shapes of train_gpt2.GPT, so its state_dict can be loaded.
"""

import torch
import torch.nn.functional as F
from torch import nn

EPS = torch.finfo(torch.float32).eps


def norm(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def rotate(x):  # (B, T, H, D)
    D = x.size(-1)
    frequencies = 10000.0 ** -(torch.arange(0, D, 2, device=x.device) / D)
    angles = torch.outer(torch.arange(x.size(1), device=x.device), frequencies)
    turn = torch.polar(torch.ones_like(angles), -angles)[:, None, :]  # complex: x1 + i x2
    turned = torch.complex(x[..., : D // 2].float(), x[..., D // 2 :].float()) * turn
    return torch.cat([turned.real, turned.imag], dim=-1).type_as(x)


class PlainBlock(nn.Module):
    def __init__(self, args):
        super().__init__()
        C, self.n_head = args.n_embd, args.n_head
        names = ("c_q", "c_k", "c_v", "c_proj")
        self.attn = nn.ModuleDict({name: nn.Linear(C, C, bias=False) for name in names})
        wide, tall = nn.Linear(C, 4 * C, bias=False), nn.Linear(4 * C, C, bias=False)
        self.mlp = nn.ModuleDict({"c_fc": wide, "c_proj": tall})

    def forward(self, x):
        B, T, C = x.shape
        n = norm(x)
        q, k, v = (self.attn[name](n).view(B, T, self.n_head, -1) for name in ("c_q", "c_k", "c_v"))
        q, k = rotate(norm(q)), rotate(norm(k))
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.attn["c_proj"](y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp["c_proj"](F.relu(self.mlp["c_fc"](norm(x))) ** 2)


class PlainGPT(nn.Module):
    dtype = torch.float32  # bfloat16 runs under autocast

    def __init__(self, args):
        super().__init__()
        self.wte = nn.Embedding(args.vocab_size, args.n_embd)
        self.h = nn.ModuleList(PlainBlock(args) for _ in range(args.n_layer))
        self.lm_head = nn.Linear(args.n_embd, args.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, inputs, targets):
        with torch.autocast(inputs.device.type, torch.bfloat16, self.dtype == torch.bfloat16):
            x = self.wte(inputs)
            for block in self.h:
                x = block(x)
            logits = self.lm_head(norm(x)).float()
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def plain_newton_schulz(G, dtype=torch.bfloat16):
    X = G.to(dtype)
    X = X / (X.norm() + 1e-7)
    if G.size(0) > G.size(1):
        X = X.T
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X - 4.7750 * A @ X + 2.0315 * A @ (A @ X)
    return X.T if G.size(0) > G.size(1) else X


class PlainMuon(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.95, dtype=torch.bfloat16):
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.dtype = dtype

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                momentum.mul_(group["momentum"]).add_(p.grad)
                update = p.grad + group["momentum"] * momentum
                update = plain_newton_schulz(update, dtype=self.dtype)
                p.sub_(group["lr"] * max(p.shape) ** 0.5 * update)


def plain_optimizers(model, args, dtype=torch.bfloat16):
    """Return AdamW for the embedding and Muon for the blocks, with the learning rates of args."""
    weight = model.lm_head.weight
    adamw = torch.optim.AdamW([weight], args.learning_rate, betas=(0.9, 0.95), weight_decay=0)
    muon = PlainMuon(model.h.parameters(), args.muon_learning_rate, args.muon_momentum, dtype)
    return [adamw, muon]


def plain_step(model, optimizers, inputs, targets, dtype=torch.bfloat16, device_batch_size=None):
    """Take one step and return the mean loss. device_batch_size: micro-batch, default all."""
    size, total = device_batch_size or len(inputs), torch.zeros((), device=inputs.device)
    model.dtype = dtype
    for x, y in zip(inputs.split(size), targets.split(size)):
        loss = model(x, y) * (len(x) / len(inputs))
        loss.backward()
        total += loss.detach()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return total
