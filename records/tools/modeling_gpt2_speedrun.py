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
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple
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


def places_of(is_token, position_ids, T):
    """Return (places, documents), both (B, S): each token's place, counted from 0 in its document.

    is_token: (B, S), False for padding, which does not count. position_ids: None, which is one
    document per row, or (B, T) for the last T of S positions: 0, 1, 2, ... from the start of each
    document. Documents are numbered in order. Raises ValueError for other position_ids.
    """
    counts = is_token.cumsum(1) - 1
    starts = torch.zeros_like(is_token)
    if position_ids is None:
        return counts, starts.long()
    position_ids = position_ids.expand(len(is_token), T)
    if is_token.size(1) == T:  # cached tokens belong to one document
        starts = is_token & (position_ids == 0)
    places = counts - counts.where(starts, 0).cummax(1).values
    if not (position_ids == places[:, -T:])[is_token[:, -T:]].all():
        raise ValueError(
            "position_ids must be 0, 1, 2, ... from the first token of each document, without "
            "counting padding; after cached tokens, they must go on"
        )
    return places, starts.cumsum(1)


def visible_keys(is_token, documents, T):
    """Return which of S keys each of the last T positions sees, bool (B, 1, T, S).

    is_token: (B, S), False for padding. Padding sees itself, because softmax over no key is NaN.
    documents: (B, S), the number of each token's document; others are not seen.
    """
    keys = torch.arange(is_token.size(1), device=is_token.device)
    queries = keys[-T:, None]
    is_visible = is_token[:, None] & (documents[:, -T:, None] == documents[:, None])
    return ((keys < queries) & is_visible | (keys == queries))[:, None]


def nearby_keys(input_ids, places, document_token, window):
    """Return which keys are in the same document and near enough for a window, bool (B, 1, T, T).

    A document_token starts a document. places: (B, T), see places_of. window: in blocks of 128
    places.
    """
    documents = (input_ids == document_token).cumsum(1)
    blocks = places // 128
    same_document = documents[:, :, None] == documents[:, None]
    near = blocks[:, :, None] - blocks[:, None] < window
    return (same_document & near)[:, None]


def ngram_hashes(input_ids, is_token, documents, max_ngram):
    """Return hashes of the last 2, 3, ... max_ngram tokens, int64 (B, T, max_ngram - 1).

    input_ids, is_token, documents: (B, T), see places_of. Padding and the tokens of earlier
    documents count as 0, like what precedes a sequence.
    """
    hashes = input_ids.long()
    tokens = hashes * is_token
    result = []
    for distance in range(1, max_ngram):
        earlier, document = (F.pad(x, (distance, 0))[:, : x.size(1)] for x in (tokens, documents))
        hashes = hashes * 1000003 + earlier * (document == documents) + 1  # int64 wraps around
        result.append(hashes)
    return torch.stack(result, dim=-1)


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


class Block(GradientCheckpointingLayer):
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
    accepts_loss_kwargs = True  # Trainer passes num_items_in_batch
    _input_embed_layer = "wte"
    _tied_weights_keys = {"lm_head.weight": "wte.weight"}  # noqa: RUF012  # if the config ties them
    _no_split_modules = ("Block",)
    _supports_sdpa = True
    supports_gradient_checkpointing = True

    def __init__(self, config):
        super().__init__(config)
        V, C, self.roles = config.vocab_size, config.n_embd, LayerRoles(config)
        self.wte = nn.Embedding(V, C)
        self.ngrams = nn.Embedding(config.ngram_rows, C) if config.ngram_rows else None
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        if self.roles.skip_to is not None:
            self.skip_weight = nn.Parameter(torch.ones(()))
        if self.roles.backout is not None:
            self.backout_weight = nn.Parameter(torch.ones(()))
        self.lm_head = nn.Linear(C, V, bias=False)
        self.post_init()

    def logits(self, x):
        """Return float32 logits (B, T, V) of the last block's normalized output, (B, T, C)."""
        logits = self.lm_head(x).float()
        return 15 * torch.tanh(logits / 15) if self.config.is_modern else logits

    def generate(self, *arguments, **options):
        """Generate as in transformers, but without a cache if the model is modern."""
        if self.config.is_modern:
            options["use_cache"] = False
        return super().generate(*arguments, **options)

    def resize_token_embeddings(self, *arguments, **options):
        """Resize as in transformers. Raises ValueError for a modern model."""
        if self.config.is_modern and arguments != (None,):
            raise ValueError(
                "the vocabulary of a modern model cannot be resized, because several layers have "
                "value embeddings of their own: use the tokens of the exported tokenizer"
            )
        return super().resize_token_embeddings(*arguments, **options)

    @can_return_tuple  # handles return_dict=False
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        logits_to_keep=0,
        num_items_in_batch=None,
        **others,
    ):
        """Return CausalLMOutputWithPast: float32 logits (B, T, V), and what else is requested.

        input_ids: (B, T) int64. attention_mask: (B, S), 0 for padding. Padding takes up positions,
        which is harmless, because rotary attention depends only on distances, and windows do not
        count it. position_ids: (B, T), see places_of; several documents in a row do not see each
        other. labels: (B, T), equal to input_ids, or -100 to ignore a token; num_items_in_batch:
        what the loss is divided by, default: the number of labels. logits_to_keep: return only the
        logits of this many last positions, or of these positions; 0 returns all. past_key_values:
        the name of cache in transformers before 5.24. hidden_states, if requested, are the
        embeddings and each block's output, of which the last one is normalized.
        Raises ValueError if S exceeds sequence_length, if a modern model gets a cache, or for what
        the model cannot do, and TypeError for an unknown argument.
        """
        config = self.config
        unknown = [name for name, value in others.items() if value is not None]
        if set(unknown) - {"cache_position"}:  # which transformers 4 passes, and the cache knows
            raise TypeError(f"forward() does not know the arguments {sorted(unknown)}")
        if input_ids is None or inputs_embeds is not None:
            raise ValueError(
                "pass input_ids: n-grams and value embeddings need ids, not embeddings"
            )
        if output_attentions or config.output_attentions:
            raise ValueError("attentions cannot be returned, because fused attention has none")
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        use_cache = config.use_cache if use_cache is None else use_cache
        cache = past_key_values if cache is None else cache
        if cache is not None and config.is_modern:
            raise ValueError("a modern model cannot use a cache")
        past = 0 if cache is None else cache.get_seq_length()
        B, T = input_ids.shape
        S = past + T
        if config.sequence_length < S:
            raise ValueError(f"{S} tokens are more than sequence_length={config.sequence_length}")
        if attention_mask is None:
            attention_mask = input_ids.new_ones(B, S)
        if getattr(attention_mask, "shape", None) != (B, S):
            raise ValueError(f"attention_mask must have the shape {(B, S)}, with 0 for padding")
        is_token = attention_mask.bool()
        places, documents = places_of(is_token, position_ids, T)
        # A cache does not know where documents start, and blocks that are computed again for their
        # gradients would fill it twice.
        is_packed = position_ids is not None and (documents > 1).any()
        is_recomputed = self.training and self.h[0].gradient_checkpointing
        can_cache = not (config.is_modern or is_packed or is_recomputed)
        if use_cache and cache is None and can_cache:
            cache = transformers.DynamicCache()
        rates = frequencies(config).to(input_ids.device)
        positions = torch.arange(past, S, device=input_ids.device)
        angles = torch.outer(positions.float(), rates)
        long = short = visible_keys(is_token, documents, T)
        if config.window:
            blocks = (config.window + 127) // 128
            long = long & nearby_keys(input_ids, places, config.document_token, blocks)
            blocks = max(1, blocks // 2)
            short = short & nearby_keys(input_ids, places, config.document_token, blocks)
        own_channels = (places == 0)[:, :, None, None] | (rates > 0).repeat(2)  # (B, S, 1, D)
        x = self.wte(input_ids)  # (B, T, C)
        x = norm(x) if config.is_modern else x
        ngrams = 0.0
        if self.ngrams is not None:
            hashes = ngram_hashes(input_ids, is_token, documents, config.max_ngram)
            ngrams = self.ngrams(hashes % config.ngram_rows).sum(2)
        x0, skipped, saved = x, None, None
        hidden_states = [x]
        for layer, block in enumerate(self.h):
            if layer == self.roles.skip_to:
                x = x + self.skip_weight * skipped.to(x.device)
            kept, visible = (own_channels, long) if layer in self.roles.long else (None, short)
            x = block(x, x0, ngrams, saved, input_ids, angles, kept, visible, cache)
            if layer == self.roles.skip_from:
                skipped = x
            if layer == self.roles.backout:
                saved = x
            if output_hidden_states:
                hidden_states.append(x)
        if saved is not None:
            x = x - self.backout_weight * saved.to(x.device)
        x = norm(x)
        if not isinstance(logits_to_keep, torch.Tensor):
            logits_to_keep = slice(-logits_to_keep, None)
        logits = self.logits(x[:, logits_to_keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits, labels, config.vocab_size, num_items_in_batch=num_items_in_batch
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=cache,
            hidden_states=(*hidden_states[:-1], x) if output_hidden_states else None,
        )
