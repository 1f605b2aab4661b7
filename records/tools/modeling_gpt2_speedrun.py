"""The models of train_gpt2.py for transformers.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

records/tools/export.py copies this file into each folder that it writes. The file needs only torch
and transformers, and it computes what GPT and ModernGPT in train_gpt2.py compute, at the end of
training. Shapes: B sequences of T new tokens, S = T plus the cached ones, C = n_embd,
V = vocab_size, H = n_head, D = C // H.
"""

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.versions import require_version

GATE_CHANNELS = 12  # a gate reads only the first channels of a layer's input
LOWEST_VERSION = "4.57.1"
require_version(f"transformers>={LOWEST_VERSION}", "Upgrade with: pip install -U transformers")


class GPT2SpeedrunConfig(PretrainedConfig):
    model_type = "gpt2_speedrun"
    keys_to_ignore_at_inference = ("cache", "past_key_values")
    attribute_map = {  # noqa: RUF012  # the names that transformers and its users look for
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "sequence_length",
    }

    vocab_size: int = 50304
    n_layer: int = 12  # blocks
    n_head: int = 6  # attention heads
    n_embd: int = 768  # channels
    sequence_length: int = 1024  # largest number of tokens, as in training
    model: str = "gpt2"  # or "modern", to which the following fields belong
    window: int = 0  # tokens that the layers in LayerRoles.long attend to; 0: the whole sequence
    document_token: int = 50256  # starts a document; with a window, others are not seen
    ngram_rows: int = 0  # rows of the n-gram table; 0: there is none
    max_ngram: int = 2  # longest n-gram that is hashed into the n-gram table
    use_cache: bool = True  # False if the model is modern

    @property
    def is_modern(self):
        return self.model == "modern"


class LayerRoles:
    """Which layers, counted from 0, do more than the others. In GPT, none does."""

    def __init__(self, config):
        n = config.n_layer
        self.values = self.long = ()
        self.backout = self.skip_from = self.skip_to = None
        if config.is_modern:
            self.values = {1, 2, n - 3, n - 2, n - 1}  # have value embeddings
            self.long = {n // 3, n - 1}  # have the long window, and offset keys
            # Later attention reads its output, which is subtracted at the end.
            self.backout = max(0, min(2 * n // 3, n - 2))
            if n >= 8:
                self.skip_from = n // 3  # its output is added to the input of skip_to
                self.skip_to = (n + 1) // 2  # has no attention


def norm(x):
    """RMSNorm over the last dimension, without a gain."""
    return F.rms_norm(x, (x.size(-1),), eps=2**-23)  # float32's epsilon, even if x is bfloat16


def frequencies(config):
    """Return the angles (D/2,) by which channels i and i + D/2 are rotated per position."""
    D = config.n_embd // config.n_head
    if config.is_modern:
        rotated = 1024.0 ** -torch.linspace(0, 1, D // 4)
        return F.pad(rotated, (0, D // 2 - D // 4))  # the others carry no position
    return 10000.0 ** -(torch.arange(0, D, 2).float() / D)


def rotate(x, angles):
    """Rotate channels i and i + D/2 of x, (B, T, H, D), by angles, (T, D/2)."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1).type_as(x)


def visible_keys(is_token, T):
    """Return which of S keys each of the last T positions sees, bool (B, 1, T, S).

    is_token: (B, S), False for padding. Padding sees itself, because softmax over no key is NaN.
    """
    keys = torch.arange(is_token.size(1), device=is_token.device)
    queries = keys[-T:, None]
    return (keys < queries) & is_token[:, None, None, :] | (keys == queries)


def nearby_keys(input_ids, places, document_token, window):
    """Return which keys are in the same document and near enough for a window, bool (B, 1, T, T).

    places: (B, T), positions counted from the first token. window: in blocks of 128 places.
    """
    documents = (input_ids == document_token).cumsum(1)
    blocks = places // 128
    same_document = documents[:, :, None] == documents[:, None]
    near = blocks[:, :, None] - blocks[:, None] < window
    return (same_document & near)[:, None]


class NgramTable(nn.Module):
    """An embedding table of n-grams, indexed by hashes of the last 2, 3, ... max_ngram tokens."""

    def __init__(self, config):
        super().__init__()
        self.max_ngram = config.max_ngram
        self.weight = nn.Parameter(torch.zeros(config.ngram_rows, config.n_embd))

    def forward(self, input_ids, is_token):  # (B, T), bool (B, T), to (B, T, C)
        hashes = input_ids.long()
        input_ids = hashes * is_token  # padding becomes 0, like what precedes a sequence
        total = 0.0
        for distance in range(1, self.max_ngram):
            earlier = F.pad(input_ids, (distance, 0))[:, : input_ids.size(1)]
            hashes = hashes * 1000003 + earlier + 1  # int64 wraps around
            total = total + F.embedding(hashes % len(self.weight), self.weight)
        return total


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        C, self.n_head, self.layer = config.n_embd, config.n_head, layer
        self.c_q = nn.Linear(C, C, bias=False)
        self.c_k = nn.Linear(C, C, bias=False)
        self.c_v = nn.Linear(C, C, bias=False)
        self.c_proj = nn.Linear(C, C, bias=False)
        self.value_table = self.value_gate = None
        if layer in LayerRoles(config).values:
            self.value_table = nn.Embedding(config.vocab_size, C)
            self.value_gate = nn.Linear(GATE_CHANNELS, config.n_head, bias=False)
        self.scale = 0.12 if config.is_modern else None  # None is 1 / sqrt(D)

    def split_heads(self, x):  # (B, T, C) to (B, T, H, D)
        return x.unflatten(-1, (self.n_head, -1))

    def forward(self, x, input_ids, angles, kept, visible, cache):
        """Return the output, (B, T, C).

        x: (B, T, C). kept: which channels of a key are its own, bool (B, T, 1, D), while the others
        come from the token before; or None. visible: bool (B, 1, T, S). cache: None, or that of
        transformers.
        """
        q = rotate(norm(self.split_heads(self.c_q(x))), angles)
        k = rotate(norm(self.split_heads(self.c_k(x))), angles)
        v = self.split_heads(self.c_v(x))
        if kept is not None:
            k = torch.where(kept, k, k.roll(1, dims=1))
        if self.value_table is not None:
            gate = 2 * self.value_gate(x[..., :GATE_CHANNELS]).sigmoid()  # (B, T, H)
            v = v + gate[..., None] * self.split_heads(self.value_table(input_ids))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)  # (B, H, S, D)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=self.scale)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):  # (B, T, C)
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        has_attention = layer != LayerRoles(config).skip_to
        self.attn = Attention(config, layer) if has_attention else None
        self.mlp = MLP(config)
        self.input_weights = nn.Parameter(torch.ones(3)) if config.is_modern else None

    def forward(self, x, x0, ngrams, saved, *attention):
        """Return the next stream, (B, T, C). saved: what attention reads in place of x, or None."""
        if self.input_weights is not None:
            stream_weight, token_weight, ngram_weight = self.input_weights
            x = stream_weight * x + token_weight * x0 + ngram_weight * ngrams
        if self.attn is not None:
            x = x + self.attn(norm(x if saved is None else saved), *attention)
        return x + self.mlp(norm(x))


class GPT2SpeedrunForCausalLM(PreTrainedModel, GenerationMixin):
    """GPT or ModernGPT of train_gpt2.py. The embedding of GPT is also its output head."""

    config_class = GPT2SpeedrunConfig
    _input_embed_layer = "wte"
    _no_split_modules = ("Block",)
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        V, C, self.roles = config.vocab_size, config.n_embd, LayerRoles(config)
        self.wte = nn.Embedding(V, C)
        self.ngrams = NgramTable(config) if config.ngram_rows else None
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        if self.roles.skip_to is not None:
            self.skip_weight = nn.Parameter(torch.ones(()))
        if self.roles.backout is not None:
            self.backout_weight = nn.Parameter(torch.ones(()))
        self.lm_head = nn.Linear(C, V, bias=False) if config.is_modern else None
        self.post_init()

    def logits(self, x):
        """Return float32 logits (B, T, V) of the last block's normalized output, (B, T, C)."""
        head = self.lm_head if self.config.is_modern else self.wte
        logits = F.linear(x, head.weight).float()
        return 15 * torch.tanh(logits / 15) if self.config.is_modern else logits

    def generate(self, *arguments, **options):
        """Generate as in transformers, but without a cache if the model is modern."""
        if self.config.is_modern:
            options["use_cache"] = False
        return super().generate(*arguments, **options)

    def forward(
        self,
        input_ids,
        attention_mask=None,
        cache=None,
        past_key_values=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        **for_loss,
    ):
        """Return CausalLMOutputWithPast: float32 logits (B, T, V), and loss and cache if requested.

        input_ids: (B, T) int64. attention_mask: (B, S), 0 for padding. Padding takes up positions,
        which is harmless, because rotary attention depends only on distances, and windows do not
        count it. labels: (B, T), equal to input_ids, or -100 to ignore a token. logits_to_keep:
        return only the logits of this many last positions; 0 returns all. past_key_values: the name
        of cache in transformers before 5.24. Raises ValueError if S exceeds sequence_length, or if
        a modern model gets a cache.
        """
        config = self.config
        use_cache = config.use_cache if use_cache is None else use_cache
        cache = past_key_values if cache is None else cache
        if cache is not None and config.is_modern:
            raise ValueError("a modern model cannot use a cache")
        if use_cache and cache is None and not config.is_modern:
            cache = transformers.DynamicCache()
        past = 0 if cache is None else cache.get_seq_length()
        S = past + input_ids.size(1)
        if config.sequence_length < S:
            raise ValueError(f"{S} tokens are more than sequence_length={config.sequence_length}")
        positions = torch.arange(past, S, device=input_ids.device)
        rates = frequencies(config).to(positions.device)
        angles = torch.outer(positions.float(), rates)
        if attention_mask is None:
            attention_mask = input_ids.new_ones(len(input_ids), S)
        is_token = attention_mask.bool()  # (B, S)
        long = short = visible_keys(is_token, len(positions))
        places = is_token.cumsum(1) - 1  # the first token has place 0
        if config.window:
            blocks = (config.window + 127) // 128
            long = long & nearby_keys(input_ids, places, config.document_token, blocks)
            blocks = max(1, blocks // 2)
            short = short & nearby_keys(input_ids, places, config.document_token, blocks)
        own_channels = (places == 0)[:, :, None, None] | (rates > 0).repeat(2)  # (B, S, 1, D)
        x = self.wte(input_ids)  # (B, T, C)
        x = norm(x) if config.is_modern else x
        ngrams = 0.0 if self.ngrams is None else self.ngrams(input_ids, is_token)
        x0, skipped, saved = x, None, None
        for layer, block in enumerate(self.h):
            if layer == self.roles.skip_to:
                x = x + self.skip_weight * skipped
            kept, visible = (own_channels, long) if layer in self.roles.long else (None, short)
            x = block(x, x0, ngrams, saved, input_ids, angles, kept, visible, cache)
            if layer == self.roles.skip_from:
                skipped = x
            if layer == self.roles.backout:
                saved = x
        if saved is not None:
            x = x - self.backout_weight * saved
        logits = self.logits(norm(x[:, -logits_to_keep:]))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, config.vocab_size, **for_loss)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
