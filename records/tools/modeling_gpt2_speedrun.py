"""The model of train_gpt2.py for transformers: GPT-2 with rotary positions, RMSNorm and ReLU^2.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

records/tools/export.py copies this file into each folder that it writes. The file needs only torch
and transformers, and it computes what GPT in train_gpt2.py computes. Shapes: B sequences of T new
tokens, S = T plus the cached ones, C = n_embd, V = vocab_size, H = n_head, D = C // H.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


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
    max_ngram: int = 0  # longest n-gram that is hashed into the n-gram table; 0 or 1 disables it
    ngram_rows: int = 2**18  # rows of the n-gram table; n-grams with equal hashes share a row
    key_shift: int = 0  # positions by which keys are shifted right
    logit_softcap: float = 0.0  # s: bounds logits z by s * tanh(z / s); 0 disables it
    use_cache: bool = True

    @property
    def can_cache(self):
        """Whether the keys and values of earlier tokens suffice to continue."""
        return self.max_ngram < 2 and not self.key_shift


def norm(x):
    """RMSNorm over the last dimension, without a gain."""
    return F.rms_norm(x, (x.size(-1),), eps=2**-23)  # float32's epsilon, even if x is bfloat16


def rotate(x, positions):
    """Rotate channels i and i + D/2 of x, (B, H, T, D), by the angles of positions, (T,)."""
    channels = torch.arange(0, x.size(-1), 2, device=x.device).float()
    angles = torch.outer(positions.float(), 10000.0 ** -(channels / x.size(-1)))  # (T, D/2)
    cos, sin = angles.cos(), angles.sin()
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1).type_as(x)


def visible_keys(is_token, T):
    """Return which of S keys each of the last T positions sees, bool (B, 1, T, S).

    is_token: (B, S), False for padding. Padding sees itself, because softmax over no key is NaN.
    """
    keys = torch.arange(is_token.size(1), device=is_token.device)
    queries = keys[-T:, None]
    return (keys < queries) & is_token[:, None, None, :] | (keys == queries)


class NgramTable(nn.Module):
    """A second embedding table, indexed by hashes of the last 2, 3, ... max_ngram tokens."""

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
        self.n_head, self.layer, self.key_shift = config.n_head, layer, config.key_shift
        self.c_q = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.c_k = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.c_v = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def split_heads(self, x):  # (B, T, C) to (B, H, T, D)
        return x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)

    def forward(self, x, positions, visible, is_token, cache):  # (B, T, C)
        q = rotate(norm(self.split_heads(self.c_q(x))), positions)
        k = norm(self.split_heads(self.c_k(x)))
        if self.key_shift:  # shift keys to the right: zeros fill the gap and replace padding
            k = k * is_token[:, None, :, None]
            k = F.pad(k, (0, 0, self.key_shift, 0))[:, :, : k.size(2)]
        k = rotate(k, positions)
        v = self.split_heads(self.c_v(x))
        if cache is not None:
            k, v = cache.update(k, v, self.layer)  # (B, H, S, D)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
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
        self.attn = Attention(config, layer)
        self.mlp = MLP(config)

    def forward(self, x, *attention):  # (B, T, C)
        x = x + self.attn(norm(x), *attention)
        return x + self.mlp(norm(x))


class GPT2SpeedrunForCausalLM(PreTrainedModel, GenerationMixin):
    """The language model. Its embedding is also its output head, so there is nothing to tie."""

    config_class = GPT2SpeedrunConfig
    _input_embed_layer = "wte"
    _no_split_modules = ("Block",)
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ngrams = NgramTable(config) if config.max_ngram > 1 else None
        self.post_init()

    def generate(self, *arguments, **options):
        """Generate as in transformers, but without a cache if the model cannot use one."""
        if not self.config.can_cache:
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
        which is harmless, because rotary attention depends only on distances. labels: (B, T),
        equal to input_ids, or -100 to ignore a token. logits_to_keep: return only the logits of
        this many last positions; 0 returns all. past_key_values: the name of cache in transformers
        before 5.24. Raises ValueError if S exceeds sequence_length, or if a model with n-grams or a
        key shift gets a cache.
        """
        config = self.config
        use_cache = config.use_cache if use_cache is None else use_cache
        cache = past_key_values if cache is None else cache
        if cache is not None and not config.can_cache:
            raise ValueError("a model with n-grams or a key shift cannot use a cache")
        if use_cache and config.can_cache and cache is None:
            cache = DynamicCache()
        past = 0 if cache is None else cache.get_seq_length()
        S = past + input_ids.size(1)
        if config.sequence_length < S:
            raise ValueError(f"{S} tokens are more than sequence_length={config.sequence_length}")
        positions = torch.arange(past, S, device=input_ids.device)
        if attention_mask is None:
            attention_mask = input_ids.new_ones(len(input_ids), S)
        is_token = attention_mask.bool()  # (B, S)
        visible = visible_keys(is_token, len(positions))
        x = self.wte(input_ids)  # (B, T, C)
        if self.ngrams is not None:
            x = x + self.ngrams(input_ids, is_token)
        for block in self.h:
            x = block(x, positions, visible, is_token, cache)
        x = norm(x[:, -logits_to_keep:])
        logits = F.linear(x, self.wte.weight).float()
        if config.logit_softcap:
            logits = config.logit_softcap * torch.tanh(logits / config.logit_softcap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, config.vocab_size, **for_loss)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
