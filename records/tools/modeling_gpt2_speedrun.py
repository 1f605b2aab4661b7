"""The model of train_gpt2.py for transformers: GPT-2 with rotary positions, RMSNorm and ReLU^2.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

records/tools/export.py puts a copy of this file into each folder that it writes. It needs torch and
transformers, no other file, and computes what GPT in train_gpt2.py computes. Shapes: B sequences of
T new tokens, S = T plus the cached ones, C = n_embd, V = vocab_size, H = n_head, D = C // H.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class GPT2SpeedrunConfig(PretrainedConfig):
    model_type = "gpt2_speedrun"
    keys_to_ignore_at_inference = ("past_key_values",)
    attribute_map = {  # noqa: RUF012  # the names that transformers and its users look for
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "sequence_length",
    }

    def __init__(
        self,
        vocab_size=50304,
        n_layer=12,  # blocks
        n_head=6,  # attention heads
        n_embd=768,  # channels
        sequence_length=1024,  # tokens that the model sees at most: those of its training
        max_ngram=0,  # longest n-gram in the table of n-grams; 0: no table
        ngram_rows=2**18,  # rows of the n-gram table, shared by equal hashes
        key_shift=0,  # positions by which each key is shifted right
        logit_softcap=0.0,  # s: logits z are bounded by s tanh(z / s); 0: they are not
        use_cache=True,
        **others,
    ):
        self.vocab_size = vocab_size
        self.n_layer = n_layer
        self.n_head = n_head
        self.n_embd = n_embd
        self.sequence_length = sequence_length
        self.max_ngram = max_ngram
        self.ngram_rows = ngram_rows
        self.key_shift = key_shift
        self.logit_softcap = logit_softcap
        self.use_cache = use_cache and self.can_cache
        super().__init__(**others)

    @property
    def can_cache(self):
        """Whether keys and values are all that later positions need of the earlier ones."""
        return self.max_ngram < 2 and not self.key_shift


def norm(x):
    """RMSNorm over the last dimension, without gain; float32's eps whatever the dtype of x."""
    return F.rms_norm(x, (x.size(-1),), eps=2**-23)


def angles_of(positions, head_dim, base=10000.0):
    """Return (cos, sin), each (T, D/2) float32, of the rotations at positions (T,)."""
    channels = torch.arange(0, head_dim, 2, device=positions.device).float()
    angles = torch.outer(positions.float(), base ** -(channels / head_dim))
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    """Rotate channel i of each head with channel i + D/2. x: (B, H, T, D); cos, sin: (T, D/2)."""
    x1, x2 = x.chunk(2, dim=-1)
    y = torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1)
    return y.type_as(x)


def visible_keys(attention_mask, T, S, device):
    """Return which of S keys each of the last T positions sees, bool (T, S) or (B, 1, T, S).
    attention_mask: (B, S), 0 for padding, or None. Raises ValueError for another shape."""
    keys = torch.arange(S, device=device)
    queries = keys[S - T :, None]
    visible = keys <= queries
    if attention_mask is None:
        return visible
    if attention_mask.ndim != 2 or attention_mask.size(1) != S:
        shape = tuple(attention_mask.shape)
        raise ValueError(f"attention_mask has shape {shape}: it must be (B, {S})")
    itself = keys == queries  # padding sees itself: of no key at all, softmax would make NaN
    return visible & (attention_mask[:, None, None, :].bool() | itself)


class NgramTable(nn.Module):
    """Sum a table's rows of the last 2, 3, ... max_ngram tokens, found by hash."""

    def __init__(self, config):
        super().__init__()
        self.max_ngram = config.max_ngram
        self.weight = nn.Parameter(torch.zeros(config.ngram_rows, config.n_embd))

    def forward(self, input_ids, real):  # (B, T), bool (B, T) or None; to (B, T, C)
        hashes = input_ids = input_ids.long()
        if real is not None:
            input_ids = input_ids * real  # padding is 0, as is what comes before a sequence
        total = 0.0
        for distance in range(1, self.max_ngram):
            earlier = F.pad(input_ids, (distance, 0))[:, : input_ids.size(1)]
            hashes = hashes * 1000003 + earlier + 1  # modulo 2**64
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

    def heads(self, x):  # (B, T, C) to (B, H, T, D)
        return x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)

    def shift(self, k, real):  # (B, H, T, D), bool (B, T) or None
        """Give each position the key of key_shift positions before; zeros before the sequence."""
        if real is not None:
            k = k.masked_fill(~real[:, None, :, None], 0)
        return F.pad(k, (0, 0, self.key_shift, 0))[:, :, : k.size(2)]

    def forward(self, x, cos, sin, visible, real, cache):  # (B, T, C)
        q = rotate(norm(self.heads(self.c_q(x))), cos, sin)
        k = norm(self.heads(self.c_k(x)))
        if self.key_shift:
            k = self.shift(k, real)
        k = rotate(k, cos, sin)
        v = self.heads(self.c_v(x))
        if cache is not None:
            k, v = cache.update(k, v, self.layer)  # (B, H, S, D)
        causal = visible is None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=causal)
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

    def forward(self, x, cos, sin, visible, real, cache):  # (B, T, C)
        x = x + self.attn(norm(x), cos, sin, visible, real, cache)
        return x + self.mlp(norm(x))


class GPT2SpeedrunForCausalLM(PreTrainedModel, GenerationMixin):
    """The language model. Its head is its embedding: one weight, so nothing has to be tied."""

    config_class = GPT2SpeedrunConfig
    _no_split_modules = ("Block",)
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ngrams = NgramTable(config) if config.max_ngram > 1 else None
        self.post_init()

    def get_input_embeddings(self):
        return self.wte

    def set_input_embeddings(self, value):
        self.wte = value

    def generate(self, inputs=None, generation_config=None, *more, **others):
        """As in transformers; a model that cannot cache sees all tokens anew for each new one."""
        if not self.config.can_cache and generation_config is None:
            others["use_cache"] = False
        elif not self.config.can_cache:
            generation_config = copy.deepcopy(generation_config)
            generation_config.use_cache = False
            others.pop("use_cache", None)
        return super().generate(inputs, generation_config, *more, **others)

    def forward(
        self,
        input_ids,
        attention_mask=None,
        past_key_values=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        **for_loss,
    ):
        """Return CausalLMOutputWithPast: logits (B, T, V) in float32, loss and cache if asked for.

        input_ids: (B, T) int64. attention_mask: (B, S), 0 for padding; positions count padding,
        too, as rotary attention depends on distances alone. labels: (B, T), the input_ids that the
        tokens before them are to predict, -100 for those that do not count. logits_to_keep: only
        those of so many last tokens; 0: all. A model with n-grams or a key shift makes no cache.
        Raises ValueError where S is above sequence_length, or for a cache that such a model gets.
        """
        config = self.config
        use_cache = config.use_cache if use_cache is None else use_cache
        if past_key_values is not None and not config.can_cache:
            raise ValueError(
                "with n-grams or a key shift keys and values are not all that later tokens need: "
                "give all tokens each time, without past_key_values"
            )
        if use_cache and config.can_cache and past_key_values is None:
            past_key_values = DynamicCache()
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        T = input_ids.size(1)
        S = past + T
        if config.sequence_length < S:
            most = f"sequence_length={config.sequence_length}, the most that the model has learned"
            raise ValueError(f"{S} tokens are more than {most}: give fewer")
        device = input_ids.device
        cos, sin = angles_of(torch.arange(past, S, device=device), config.n_embd // config.n_head)
        visible = None
        if past or attention_mask is not None:
            visible = visible_keys(attention_mask, T, S, device)
        real = None if attention_mask is None else attention_mask.bool()  # (B, S)
        x = self.wte(input_ids)  # (B, T, C)
        if self.ngrams is not None:
            x = x + self.ngrams(input_ids, real)
        for block in self.h:
            x = block(x, cos, sin, visible, real, past_key_values)
        x = norm(x[:, -logits_to_keep:])
        logits = F.linear(x, self.wte.weight).float()
        if config.logit_softcap:
            logits = config.logit_softcap * torch.tanh(logits / config.logit_softcap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, config.vocab_size, **for_loss)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
