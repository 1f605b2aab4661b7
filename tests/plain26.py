"""A plain implementation of the modern model and its training: their reference in the tests.

It is eager and follows the published facts: dense masks, rows of tables looked up one by one, and
explicit AdamW, NorMuon and cautious decay. Parameters have the names and shapes of
train_modern.ModernGPT, so its state_dict can be loaded.
"""

import math

import torch
import torch.nn.functional as F
from plain import norm, plain_newton_schulz
from torch import nn

# What the layers of a model do, by their number. That of the public records has 11.
# values: have value embeddings. long: have the long window and offset keys. saved: later attention
# reads its output. skip: (from, to); the second one has no attention.
ROLES = {
    1: dict(values=[0], long=[0], saved=0, skip=None),
    2: dict(values=[0, 1], long=[0, 1], saved=0, skip=None),
    3: dict(values=[0, 1, 2], long=[1, 2], saved=1, skip=None),
    4: dict(values=[1, 2, 3], long=[1, 3], saved=2, skip=None),
    8: dict(values=[1, 2, 5, 6, 7], long=[2, 7], saved=5, skip=(2, 4)),
    9: dict(values=[1, 2, 6, 7, 8], long=[3, 8], saved=6, skip=(3, 5)),
    11: dict(values=[1, 2, 8, 9, 10], long=[3, 10], saved=7, skip=(3, 6)),
}


def half_rotated(x):
    """Rotate the first half of each half of the channels. x: (B, T, H, D)."""
    T, D = x.size(1), x.size(-1)
    rates = [1024 ** -(i / (D // 4 - 1)) if D > 4 else 1.0 for i in range(D // 4)]
    rates += [0.0] * (D // 4)
    angles = torch.arange(T)[:, None] * torch.tensor(rates)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    x1, x2 = x[..., : D // 2].float(), x[..., D // 2 :].float()
    return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1).type_as(x)


def offset(k):
    """Take the channels that half_rotated leaves alone from the key before. k: (B, T, H, D)."""
    T, D = k.size(1), k.size(-1)
    k = k.clone()
    before = k.clone()
    for first in D // 4, 3 * D // 4:
        channels = slice(first, first + D // 4)
        k[:, 1:, :, channels] = before[:, : T - 1, :, channels]
    return k


def dense_mask(tokens, blocks, document_token):
    """Return (T, T): whether each token (row) sees each other, row by row."""
    mask = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    document_start = 0
    for query, token in enumerate(tokens):
        if token == document_token:
            document_start = query
        window_start = 128 * (query // 128 - blocks + 1)
        mask[query, max(document_start, window_start) : query + 1] = True
    return mask


def ngram_rows(tokens, place, longest, rows):
    """Return the table rows of a position, in Python's integers, wrapped to 64 bits.

    The hash starts with the token itself and becomes hash * 1000003 + earlier token + 1 for each
    earlier token. Tokens before the first one count as 0.
    """
    found, value = [], tokens[place]
    for distance in range(1, longest):
        earlier = tokens[place - distance] if place >= distance else 0
        value = value * 1000003 + earlier + 1
        value = (value + 2**63) % 2**64 - 2**63
        found.append(value % rows)
    return found


class PlainLayer(nn.Module):
    def __init__(self, args, layer):
        super().__init__()
        C, self.n_head = args.n_embd, args.n_head
        roles = ROLES[args.n_layer]
        self.is_long = layer in roles["long"]
        self.attn = None
        if roles["skip"] is None or layer != roles["skip"][1]:
            names = ("c_q", "c_k", "c_v", "c_proj")
            self.attn = nn.ModuleDict({name: nn.Linear(C, C, bias=False) for name in names})
            if layer in roles["values"]:
                self.attn["value_table"] = nn.Embedding(args.vocab_size, C)
                self.attn["value_gate"] = nn.Linear(12, self.n_head, bias=False)
        wide, tall = nn.Linear(C, 4 * C, bias=False), nn.Linear(4 * C, C, bias=False)
        self.mlp = nn.ModuleDict({"c_fc": wide, "c_proj": tall})
        self.input_weights = nn.Parameter(torch.zeros(3))

    def attention(self, x, tokens, mask):
        B, T, C = x.shape
        q, k, v = (self.attn[name](x).view(B, T, self.n_head, -1) for name in ("c_q", "c_k", "c_v"))
        q, k = half_rotated(norm(q)), half_rotated(norm(k))
        if self.is_long:
            k = offset(k)
        if "value_table" in self.attn:
            gate = 2 * torch.sigmoid(self.attn["value_gate"](x[:, :, :12]))
            v = v + gate.view(B, T, self.n_head, 1) * self.attn["value_table"](tokens).view(v.shape)
        scores = 0.12 * torch.einsum("bqhd,bkhd->bhqk", q, k)
        weights = scores.masked_fill(~mask[:, None], -math.inf).softmax(-1)
        return self.attn["c_proj"](torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(B, T, C))

    def forward(self, x, x0, ngrams, saved, tokens, mask):
        x = self.input_weights[0] * x
        x = x + self.input_weights[1] * x0
        x = x + self.input_weights[2] * ngrams
        if self.attn is not None:
            read = x if saved is None else saved
            x = x + self.attention(norm(read), tokens, mask)
        return x + self.mlp["c_proj"](F.relu(self.mlp["c_fc"](norm(x))) ** 2)


class PlainModern(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args, self.roles = args, ROLES[args.n_layer]
        self.wte = nn.Embedding(args.vocab_size, args.n_embd)
        if args.ngram_rows:
            self.ngrams = nn.Module()
            self.ngrams.weight = nn.Parameter(torch.zeros(args.ngram_rows, args.n_embd))
        self.h = nn.ModuleList(PlainLayer(args, layer) for layer in range(args.n_layer))
        if self.roles["skip"] is not None:
            self.skip_weight = nn.Parameter(torch.zeros(()))
        self.backout_weight = nn.Parameter(torch.zeros(()))
        self.lm_head = nn.Linear(args.n_embd, args.vocab_size, bias=False)

    def ngram_embeddings(self, inputs):
        args, sums = self.args, []
        for tokens in inputs.tolist():
            for place in range(len(tokens)):
                sums.append(ngram_rows(tokens, place, args.max_ngram, args.ngram_rows))
        rows = torch.tensor(sums).view(*inputs.shape, args.max_ngram - 1)
        return self.ngrams.weight[rows].sum(2)

    def forward(self, inputs, targets, window):
        """Return the mean cross-entropy. window: of the long layers, in blocks of 128 tokens."""
        document_token = self.args.document_token
        masks = {}
        for is_long, blocks in ((True, window), (False, max(1, window // 2))):
            rows = [dense_mask(row, blocks, document_token) for row in inputs.tolist()]
            masks[is_long] = torch.stack(rows)
        x0 = x = norm(self.wte(inputs))
        ngrams = self.ngram_embeddings(inputs) if self.args.ngram_rows else torch.zeros_like(x0)
        outputs, saved = [], None
        for layer, block in enumerate(self.h):
            if self.roles["skip"] is not None and layer == self.roles["skip"][1]:
                x = x + self.skip_weight * outputs[self.roles["skip"][0]]
            x = block(x, x0, ngrams, saved, inputs, masks[block.is_long])
            outputs.append(x)
            if layer == self.roles["saved"]:
                saved = x
        x = x - self.backout_weight * saved
        logits = self.lm_head(norm(x)).float()
        logits = 15 * torch.tanh(logits / 15)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class PlainTraining:
    """The optimizers and schedules of the modern model, as the public records describe them."""

    def __init__(self, model, args):
        self.model, self.args, self.step = model, args, 0
        self.state = {p: [torch.zeros_like(p), torch.zeros(())] for p in model.parameters()}

    def window(self):
        """Return the window of the long layers for the next step, in blocks."""
        progress = self.step / self.args.num_iterations
        return max(1, math.ceil(self.args.attention_window * progress / 128))

    def momentum(self):
        """Return Muon's momentum for the next step."""
        total = self.args.num_iterations
        rise = self.step / (self.args.momentum_warmup_fraction * total)
        fall = (total - self.step) / (self.args.momentum_cooldown_fraction * total)
        return 0.85 + (0.95 - 0.85) * min(rise, fall, 1)

    def rate_scale(self):
        """Return the factor of all learning rates for the next step."""
        left = (1 - self.step / self.args.num_iterations) / self.args.warmdown_fraction
        return 1.0 if left >= 1 else left + (1 - left) * self.args.final_lr_fraction

    def adamw_options(self, name, p):
        """Return the learning rate and both betas of a parameter."""
        if name == "lm_head.weight":
            return self.args.learning_rate, 0.5, 0.95
        if name in ("wte.weight", "ngrams.weight") or "value_table" in name:
            return self.args.embedding_learning_rate, 0.75, 0.95
        if "value_gate" in name:
            return 0.008, 0.9, 0.99
        assert p.ndim < 2, name
        return 0.04, 0.9, 0.99

    @torch.no_grad()
    def update(self):
        """Take one step with the gradients of the model."""
        scale, momentum = self.rate_scale(), self.momentum()
        self.step += 1
        for name, p in self.model.named_parameters():
            if ".c_" in name:
                self.muon_update(name, p, scale, momentum)
            else:
                self.adamw_update(name, p, scale)
            p.grad = None

    def muon_update(self, name, p, scale, momentum):
        """Apply NorMuon with cautious weight decay."""
        root = self.args.n_embd**0.5
        rate = scale * self.args.muon_learning_rate * root  # 0.03 in the public code, or 0.023
        decay = scale * self.args.muon_weight_decay / root  # 1.2 times that rate
        shape_factor = 2 if "mlp" in name else 1
        average, squares = self.state[p]
        average += (1 - momentum) * (p.grad - average)
        update = plain_newton_schulz(p.grad.lerp(average, momentum), dtype=torch.float32)
        update = update.bfloat16().float()  # as orthogonalize returns it
        length = update.norm()
        size = (update**2).mean(1 if p.size(0) >= p.size(1) else 0, keepdim=True)
        squares = 0.95 * squares + 0.05 * size
        self.state[p][1] = squares
        update = update / squares.clamp(min=1e-10).sqrt()
        update = update * length / update.norm()
        update = update.bfloat16().float()  # as it is sent to other ranks
        same_sign = (update > 0) & (p > 0) | (update < 0) & (p < 0)
        p -= rate * shape_factor * update + rate * decay * p * same_sign

    def adamw_update(self, name, p, scale):
        """Apply AdamW without decay."""
        rate, beta1, beta2 = self.adamw_options(name, p)
        first, second = self.state[p]
        first = beta1 * first + (1 - beta1) * p.grad
        second = beta2 * second + (1 - beta2) * p.grad**2
        self.state[p] = [first, second]
        mean = first / (1 - beta1**self.step)
        deviation = (second / (1 - beta2**self.step)).sqrt() + 1e-10
        p -= scale * rate * mean / deviation
