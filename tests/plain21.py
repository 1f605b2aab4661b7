"""A plain implementation of record 21 of the public speedrun: the reference of the modern model.

It is eager and follows the published facts: dense masks, explicit AdamW, and Muon whose momentum is
an average. Parameters have the names and shapes of train_gpt2.ModernGPT, so its state_dict can be
loaded.
"""

import math

import torch
import torch.nn.functional as F
from plain import norm, plain_newton_schulz
from torch import nn


def rotate_half(x):
    """Rotate the first half of each half of the channels, as in record 21. x: (B, T, H, D)."""
    T, D = x.size(1), x.size(-1)
    rates = [1024 ** -(i / (D // 4 - 1)) if D > 4 else 1.0 for i in range(D // 4)]
    rates += [0.0] * (D // 4)
    angles = torch.arange(T)[:, None] * torch.tensor(rates)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    x1, x2 = x[..., : D // 2].float(), x[..., D // 2 :].float()
    return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1).type_as(x)


def dense_mask(tokens, blocks, document_token):
    """Return (T, T): whether each token (row) sees each other, by Python's loops over pairs."""
    mask = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for query in range(len(tokens)):
        for key in range(query, -1, -1):
            if query // 128 - key // 128 < blocks:
                mask[query, key] = True
            if tokens[key] == document_token:
                break  # this key starts the document
    return mask


class PlainLayer(nn.Module):
    def __init__(self, args, layer):
        super().__init__()
        C, self.n_head = args.n_embd, args.n_head
        self.attn = None
        if layer != args.no_attention:
            names = ("c_q", "c_k", "c_v", "c_proj")
            self.attn = nn.ModuleDict({name: nn.Linear(C, C, bias=False) for name in names})
            self.attn.register_parameter("value_weights", nn.Parameter(torch.ones(2)))
        wide, tall = nn.Linear(C, 4 * C, bias=False), nn.Linear(4 * C, C, bias=False)
        self.mlp = nn.ModuleDict({"c_fc": wide, "c_proj": tall})
        self.stream_weights = nn.Parameter(torch.ones(2))

    def attention(self, x, value, mask):
        B, T, C = x.shape
        q, k, v = (self.attn[name](x).view(B, T, self.n_head, -1) for name in ("c_q", "c_k", "c_v"))
        q, k = rotate_half(norm(q)), rotate_half(norm(k))
        v = self.attn.value_weights[0] * v
        if value is not None:
            v = v + self.attn.value_weights[1] * value.view(v.shape)
        scores = 0.12 * torch.einsum("bqhd,bkhd->bhqk", q, k)
        weights = scores.masked_fill(~mask[:, None], -math.inf).softmax(-1)
        return self.attn["c_proj"](torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(B, T, C))

    def forward(self, x, x0, value, mask):
        x = self.stream_weights[0] * x + self.stream_weights[1] * x0
        if self.attn is not None:
            x = x + self.attention(norm(x), value, mask)
        return x + self.mlp["c_proj"](F.relu(self.mlp["c_fc"](norm(x))) ** 2)


class PlainRecord21(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.wte = nn.Embedding(args.vocab_size, args.n_embd)
        tables = [nn.Embedding(args.vocab_size, args.n_embd) for _ in range(args.value_embeddings)]
        self.value_tables = nn.ModuleList(tables)
        self.h = nn.ModuleList(PlainLayer(args, layer) for layer in range(args.n_layer))
        self.skip_weights = nn.Parameter(torch.ones(args.n_layer // 2))
        self.lm_head = nn.Linear(args.n_embd, args.vocab_size, bias=False)

    def forward(self, inputs, targets, window):
        """Return the mean cross-entropy. window: of the long layers, in blocks of 128 tokens."""
        n, document_token = self.args.n_layer, self.args.document_token
        masks = {}
        for name, blocks in (("long", window), ("short", max(1, window // 2))):
            rows = [dense_mask(row, blocks, document_token) for row in inputs.tolist()]
            masks[name] = torch.stack(rows)
        x0 = x = norm(self.wte(inputs))
        outputs = {}
        for layer, block in enumerate(self.h):
            mirror = n - 1 - layer
            if layer >= n // 2:
                x = x + self.skip_weights[mirror] * outputs[mirror]
            table = min(layer, mirror) if layer < n // 2 else len(self.value_tables) - 1 - mirror
            has_table = min(layer, mirror) < len(self.value_tables)
            value = self.value_tables[table](inputs) if has_table else None
            kind = "long" if min(layer, mirror) % 4 == 0 else "short"
            x = outputs[layer] = block(x, x0, value, masks[kind])
        logits = self.lm_head(norm(x)).float()
        logits = 30 * torch.sigmoid(logits / 7.5)  # those of 15 * tanh(logits / 15), plus 15
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class PlainTraining:
    """Record 21's optimizers and schedules, with the rates of its log."""

    def __init__(self, model, args):
        self.model, self.args, self.step = model, args, 0
        self.state = {p: [torch.zeros_like(p), torch.zeros_like(p)] for p in model.parameters()}
        self.matrices = {p for p in model.h.parameters() if p.ndim == 2}

    def window(self):
        """Return the window of the long layers for the next step, in blocks."""
        progress = self.step / self.args.num_iterations
        return max(1, math.ceil(self.args.window * progress / 128))

    def adam_rate(self, p):
        if p.ndim < 2:
            return self.args.scalar_learning_rate
        is_head = p is self.model.lm_head.weight
        return self.args.learning_rate if is_head else self.args.embedding_learning_rate

    @torch.no_grad()
    def update(self):
        """Take one step with the gradients of the model."""
        args = self.args
        left = (1 - self.step / args.num_iterations) / args.warmdown_fraction
        scale = 1.0 if left >= 1 else left + (1 - left) * 0.1
        warmth = min(self.step / args.num_iterations / args.muon_warmup_fraction, 1)
        momentum = (1 - warmth) * 0.85 + warmth * 0.95
        self.step += 1
        for p in self.model.parameters():
            first, second = self.state[p]
            if p in self.matrices:
                first.lerp_(p.grad, 1 - momentum)
                update = plain_newton_schulz(p.grad.lerp(first, momentum), dtype=torch.float32)
                spectral = args.muon_learning_rate * args.n_embd**0.5  # 0.05 in the public code
                p -= scale * spectral * max(1, p.size(0) / p.size(1)) ** 0.5 * update
            else:
                first.lerp_(p.grad, 0.2)
                second.lerp_(p.grad**2, 0.05)
                mean = first / (1 - 0.8**self.step)
                deviation = (second / (1 - 0.95**self.step)).sqrt() + 1e-10
                p -= scale * self.adam_rate(p) * mean / deviation
            p.grad = None
