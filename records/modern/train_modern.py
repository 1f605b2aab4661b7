"""Train a modern GPT, with ideas from the public speedrun records 8 to 77 (2024-2026).

    torchrun --standalone --nproc_per_node=8 records/modern/train_modern.py
    python records/modern/train_modern.py --preset=small      # English, on a CPU
    python records/modern/train_modern.py --preset=text       # your own text, packed into data/mine

The data must exist: `bash run.sh modern --preset=small`, for example, first prepares the data and
then starts this file.

This file defines a model (by default as wide as GPT-2; 539M parameters, most of them in embedding
tables), its optimizers and their schedule. The data, the training loop, the log and the checkpoints
are those of train_gpt2.py, which also explains the shape letters (B, T, C, ...). "Record 62" is one
of https://github.com/KellerJordan/modded-nanogpt. No GPU has run this file yet.
"""

import dataclasses
import math
import sys
from pathlib import Path

# The log contains these sources. Read them now, in case one is edited during the slow imports.
HERE = Path(__file__).resolve().parent
NAME = Path(__file__).name
SOURCES = {file: (HERE / file).read_text(encoding="utf-8") for file in ("muon.py", NAME)}
sys.path[:0] = [str(HERE), str(HERE.parents[1])]  # the folders of muon.py and train_gpt2.py

import torch
import torch.nn.functional as F
from muon import Muon
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import train_gpt2
from train_gpt2 import (
    MLP,
    CastedLinear,
    CausalSelfAttention,
    Hyperparameters,
    Rotary,
    UserError,
    check_at_least,
    loss_or_logits,
    norm,
    setting,
)

# ---- Settings ------------------------------------------------------------------------------------
BLOCK = 128  # tokens; attention windows are made of blocks of this size
ATTENTION_SCALE = 0.12  # scale of q k^T, in place of 1 / sqrt(D)
GATE_CHANNELS = 12  # value gates read only the first 12 channels of attention's input
LOGIT_SOFTCAP = 15.0  # a logit x becomes 15 tanh(x / 15)
MIN_MOMENTUM = 0.85  # of Muon, at the start and at the end


@dataclasses.dataclass(frozen=True)
class ModernSettings(Hyperparameters):
    """All settings of a run: those of train_gpt2.py and of the modern model.

    Each preset sets the sizes. It also sets Muon's learning rate and weight decay, because they
    depend on the width. Pass --name=value to override a preset.
    """

    learning_rate: float = setting(0.008, "AdamW learning rate of the output head")
    # modern() replaces this default and that of muon_weight_decay in every preset.
    muon_learning_rate: float = setting(0.03 / 768**0.5, "RMS of a Muon update")
    warmdown_fraction: float = setting(0.55, "final part, where learning rates decay")
    attention_window: int = setting(
        1728,
        "final attention window of long layers, in tokens, rounded up to blocks of 128; "
        "0: full attention, also across documents",
    )
    document_token: int = setting(50256, "token that starts a document; manifest.json replaces it")
    ngram_rows: int = setting(5 * 50304, "rows of the hashed n-gram table; 0: no table")
    max_ngram: int = setting(2, "longest n-gram in the table, in tokens")
    embedding_learning_rate: float = setting(0.6, "AdamW learning rate of the embedding tables")
    muon_weight_decay: float = setting(0.0, "weight decay of Muon")
    momentum_warmup_fraction: float = setting(300 / 1950, "first part, where momentum rises")
    momentum_cooldown_fraction: float = setting(50 / 1950, "final part, where momentum falls")
    final_lr_fraction: float = setting(0.15, "final / initial learning rate")

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, 0, "attention_window document_token ngram_rows final_lr_fraction")
        check_at_least(self, 0, "embedding_learning_rate muon_weight_decay")
        check_at_least(self, 0, "momentum_warmup_fraction momentum_cooldown_fraction")
        check_at_least(self, GATE_CHANNELS, "n_embd")  # value gates read this many channels
        check_at_least(self, 2, "max_ngram")
        for name in "momentum_warmup_fraction", "momentum_cooldown_fraction":
            if getattr(self, name) > 1:
                raise UserError(f"{name}={getattr(self, name)} must be at most 1")
        if self.attention_window and self.sequence_length % BLOCK:
            multiple = f"a multiple of {BLOCK}, or pass --attention_window=0"
            raise UserError(f"sequence_length={self.sequence_length} must be {multiple}")
        if self.attention_window and self.document_token >= self.vocab_size:
            fix = "it is 256 for bytes, N for gpt2-N and 50256 for gpt2"
            raise UserError(f"document_token={self.document_token} is not in the vocabulary: {fix}")


def modern(width, **changes):
    """Return a preset for n_embd=width.

    Passing --n_embd alone would keep n_head, Muon's learning rate and Muon's weight decay, which
    are those of the preset's width.
    """
    return dict(
        n_layer=11, n_head=width // 128, n_embd=width, device_batch_size=1,
        num_iterations=1950,
        # The public records multiply U V^T, whose RMS is 1 / sqrt(C), by 0.03. In the MLP, its RMS
        # is half of that, and they multiply it by 0.06. So the RMS of every update is this:
        muon_learning_rate=0.03 / width**0.5,
        # Where an update moves a weight towards zero, the step also subtracts lr * weight_decay =
        # 0.03 * 1.2 * 0.03 of it. The public decay is the same for C x C matrices, and twice as
        # large for those of the MLP.
        muon_weight_decay=1.2 * 0.03 * width**0.5,
    ) | changes  # fmt: skip


PRESETS = {
    "modern": modern(768, batch_size=8, sequence_length=32768),  # for eight 80 GB GPUs
    # For one 24 GB GPU. Its sequences are shorter, so its losses are not those of "modern".
    "modern_24gb": modern(768, batch_size=16, sequence_length=16384),
    "small": modern(  # a small English model, for a CPU
        128, train_files="data/small/train_*.bin", val_files="data/small/val_*.bin",
        # GPT-2's first 2,048 tokens and the document token, rounded up to a multiple of 128
        vocab_size=2176, document_token=2048, ngram_rows=5 * 2048,
        n_layer=8, batch_size=8, sequence_length=512, device_batch_size=8,
        # 24 blocks, although a sequence has 4. The window grows linearly, so it covers the sequence
        # after 1/8 of the run in long layers, and after 7/24 in the others, which have half.
        attention_window=6 * 512,
        num_iterations=600, val_loss_every=0, val_tokens=0, target_val_loss=0.0,
    ),
    "text": modern(  # your own text, on a CPU; tuned in records/2026-11-28_First_run
        128, train_files="data/mine/train_*.bin", val_files="data/mine/val_*.bin",
        vocab_size=257, ngram_rows=65536, max_ngram=3, n_layer=4, n_head=2, attention_window=0,
        batch_size=8, sequence_length=512, device_batch_size=8, num_iterations=960,
        embedding_learning_rate=0.1, final_lr_fraction=0.0, shuffle=True, allow_repeat=True,
        val_loss_every=240, save_every=240, val_tokens=0, target_val_loss=0.0,
    ),
}  # fmt: skip


# ---- Model ---------------------------------------------------------------------------------------
class ModernAttention(CausalSelfAttention):
    """Attention with rotary positions on half of the channels, and two optional extensions.

    Offset keys: the channels of key j that have no position come from token j - 1, even across a
    document boundary. If token j - 1 equals the query's own token, the query can match key j and
    read the value of token j, which followed it. So a single layer can act as an induction head,
    which normally takes two layers.

    Value table: a learned embedding of the token, scaled by a gate for each head, is added to the
    values.
    """

    def __init__(self, args, has_offset_keys, has_value_table, dtype):
        super().__init__(args)
        D = args.n_embd // args.n_head
        # Half of the channel pairs rotate by 1 to 1/1024 radians per token; the others have no
        # position.
        rotating = 1024.0 ** -torch.linspace(0, 1, D // 4)
        frequencies = torch.cat([rotating, torch.zeros(D // 2 - D // 4)])
        self.rotary = Rotary(frequencies, args.sequence_length)  # replaces that of the base class
        # Rotary pairs the channels i and i + D/2, so the mask repeats.
        self.register_buffer("has_position", (frequencies > 0).repeat(2), persistent=False)  # (D,)
        self.has_offset_keys = has_offset_keys
        self.value_table = self.value_gate = None
        if has_value_table:
            self.value_table = nn.Embedding(args.vocab_size, args.n_embd, dtype=dtype)
            self.value_gate = CastedLinear(GATE_CHANNELS, args.n_head)

    def forward(self, x, tokens, mask):
        """Return (B, T, C), like x. tokens: (B, T) int64. mask: see attend."""
        q = self.rotary(norm(self.split_heads(self.c_q(x))))
        k = self.rotary(norm(self.split_heads(self.c_k(x))))
        v = self.split_heads(self.c_v(x))
        if self.has_offset_keys:
            previous_k = torch.cat([k[:, :1], k[:, :-1]], dim=1)  # the first key stays as it is
            k = torch.where(self.has_position, k, previous_k)
        if self.value_table is not None:
            gate = 2 * self.value_gate(x[..., :GATE_CHANNELS]).sigmoid()  # (B, T, H), initially 1
            v = v + gate[..., None] * self.split_heads(self.value_table(tokens))
        y = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.c_proj(y.transpose(1, 2).flatten(2))


def attend(q, k, v, mask):
    """Return the output of attention, (B, H, T, D), like q, k and v.

    mask: from attention_mask, or None for causal attention within the whole sequence.
    """
    if isinstance(mask, BlockMask):
        return flex_attention(q, k, v, block_mask=mask, scale=ATTENTION_SCALE)
    causal = mask is None
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=ATTENTION_SCALE)


def attention_mask(documents, window_blocks):
    """Return a mask for causal attention within a document and a sliding window.

    documents: (B, T) int64, the index of each token's document, non-decreasing. window_blocks: 0-D
    int64; a token sees its own block and the window_blocks - 1 blocks before it.
    """
    # On a GPU, use FlexAttention, which skips invisible blocks. It needs complete blocks, and it
    # would store all scores if it were not compiled. Otherwise, use a dense mask, which takes
    # O(T^2) memory.
    use_flex = documents.is_cuda and torch.compiler.is_compiling()
    if use_flex and documents.size(1) % BLOCK == 0:
        return block_mask(documents, window_blocks)
    return dense_mask(documents, window_blocks)


def dense_mask(documents, window_blocks):
    """Return a mask for F.scaled_dot_product_attention: bool, (B, 1, T, T)."""
    position = torch.arange(documents.size(1), device=documents.device)
    query, key = position[:, None], position
    # This is the condition of block_mask. A difference would need an int64 (T, T) tensor.
    near = query // BLOCK < key // BLOCK + window_blocks
    same_document = documents[:, :, None] == documents[:, None, :]
    return ((key <= query) & near & same_document)[:, None]


def block_mask(documents, window_blocks):
    """Return a BlockMask for flex_attention."""

    def visible(b, h, query, key):
        near = query // BLOCK - key // BLOCK < window_blocks
        return (key <= query) & near & (documents[b, query] == documents[b, key])

    # Query block i sees key blocks first[i] to i. A block before them is outside the window, or it
    # ends in an earlier document than the one in which block i starts. Document indices never
    # decrease, so if n blocks end in an earlier document, these are the blocks 0 to n - 1.
    block = torch.arange(documents.size(1) // BLOCK, device=documents.device)
    start_document = documents[:, ::BLOCK]  # (B, blocks)
    end_document = documents[:, BLOCK - 1 :: BLOCK]  # (B, blocks)
    ends_earlier = end_document[:, None, :] < start_document[:, :, None]  # (B, query, key blocks)
    first = torch.maximum(ends_earlier.sum(-1), block - window_blocks + 1)  # (B, blocks)
    counts = block - first + 1
    # A row lists first, first + 1, ... Entries beyond `counts` are ignored, but must be valid.
    indices = (first[:, :, None] + block).clamp(max=len(block) - 1)
    return BlockMask.from_kv_blocks(
        counts.int()[:, None], indices.int()[:, None], BLOCK_SIZE=BLOCK, mask_mod=visible
    )


class ModernBlock(nn.Module):
    """Mixes embeddings into the residual stream, then applies attention (if any) and an MLP."""

    def __init__(self, args, attention):
        super().__init__()
        self.attn = attention  # a ModernAttention, or None
        self.mlp = MLP(args)
        # Weights of the residual stream, token embeddings and n-gram embeddings: records 45 and 62.
        self.input_weights = nn.Parameter(torch.tensor([1.1, 0.0, 0.1]))

    def forward(self, x, x0, ngram_embeddings, saved, tokens, mask):
        """Return the residual stream after this block, (B, T, C).

        x, x0 and ngram_embeddings are (B, T, C): the residual stream, the normalized token
        embeddings and the n-gram embeddings, which are 0.0 without a table. saved: None, or the
        output of an earlier block, which attention then reads. tokens: (B, T). mask: see attend.
        """
        stream_weight, token_weight, ngram_weight = self.input_weights
        x = stream_weight * x + token_weight * x0 + ngram_weight * ngram_embeddings
        if self.attn is not None:
            x = x + self.attn(norm(x if saved is None else saved), tokens, mask)
        return x + self.mlp(norm(x))


class NgramTable(nn.Module):
    """An embedding table of n-grams: a hash of the last n tokens selects a row.

    The embedding of a position is the sum of its rows for n = 2, 3, ... max_ngram, which share the
    table. An n-gram may begin in an earlier document.
    """

    def __init__(self, args, dtype):
        super().__init__()
        self.max_ngram = args.max_ngram
        # The table starts at 0, as in record 62.
        self.weight = nn.Parameter(torch.zeros(args.ngram_rows, args.n_embd, dtype=dtype))

    def forward(self, tokens):  # (B, T) to (B, T, C)
        hashes = tokens  # of the n-gram that ends at each position; n grows in the loop
        rows = []
        for distance in range(1, self.max_ngram):
            # The tokens `distance` positions earlier, with zeros before the sequence.
            earlier = F.pad(tokens, (distance, 0))[:, : tokens.size(1)]
            # Without + 1, the n-grams 00, 000, ... would all hash to 0. Integers may wrap around.
            hashes = hashes * 1000003 + earlier + 1
            rows.append(hashes % len(self.weight))
        return F.embedding(torch.stack(rows, dim=2), self.weight).sum(2)


class ModernGPT(nn.Module):
    """A GPT with ideas from later public records, for any number of layers.

    Activations and embedding tables have the given dtype; other weights are float32.
    records/2026-11-26_Modern_model names the record that each part comes from.
    """

    def __init__(self, args, dtype=torch.float32):
        super().__init__()
        self.dtype = dtype
        # The role of each layer. Comments give the indices for the 11 layers of the public records.
        n = args.n_layer
        self.long_layers = {n // 3, n - 1}  # 3, 10: the long window, and offset keys
        self.table_layers = {1, 2, n - 3, n - 2, n - 1}  # 1, 2, 8, 9, 10: a value table
        # Layer 6 adds the output of layer 3 to its input, and has no attention and so no value
        # table. We leave this out of models of fewer than 8 layers, without having measured it.
        self.skip_start, self.skip_end = (n // 3, (n + 1) // 2) if n >= 8 else (None, None)
        # In later layers, attention reads the output of layer 7 instead of the residual stream
        # (records 73 and 77). Backout subtracts a part of it at the end.
        self.saved_layer = max(0, min(2 * n // 3, n - 2))
        self.wte = nn.Embedding(args.vocab_size, args.n_embd, dtype=dtype)
        self.ngrams = NgramTable(args, dtype) if args.ngram_rows else None
        self.h = nn.ModuleList()
        for i in range(n):
            attention = None
            if i != self.skip_end:
                has_offset_keys = i in self.long_layers
                has_value_table = i in self.table_layers
                attention = ModernAttention(args, has_offset_keys, has_value_table, dtype)
            self.h.append(ModernBlock(args, attention))
        if self.skip_end is not None:
            self.skip_weight = nn.Parameter(torch.tensor(0.18))  # about sigmoid(-1.5), record 45
        self.backout_weight = nn.Parameter(torch.tensor(0.5))  # record 40
        self.lm_head = CastedLinear(args.n_embd, args.vocab_size)
        self.init_matrices()
        self.document_token = args.document_token
        self.has_window = args.attention_window > 0
        # A buffer, so that changing it does not recompile the model. apply_schedule sets it before
        # each step and each validation. Inference has the final window, even with weights from the
        # middle of a run, where the window was smaller.
        window_blocks = torch.tensor(window_blocks_at(args.num_iterations, args))
        self.register_buffer("window_blocks", window_blocks, persistent=False)

    def init_matrices(self):
        """Set the initial values of tables and matrices, except those that are zero already."""
        nn.init.normal_(self.wte.weight)
        nn.init.zeros_(self.lm_head.weight)  # record 8
        for block in self.h:
            attn = block.attn
            linears = [m for m in block.mlp.modules() if isinstance(m, nn.Linear)]
            linears.remove(block.mlp.c_proj)  # it starts at zero
            if attn is not None:
                linears += [attn.c_q, attn.c_k, attn.c_v]
            for linear in linears:  # a standard deviation of 0.5 / sqrt(C): records 62 and 77
                bound = 0.5 * (3 / linear.in_features) ** 0.5
                nn.init.uniform_(linear.weight, -bound, bound)
            if attn is not None and attn.value_table is not None:
                nn.init.normal_(attn.value_table.weight, std=0.01)  # record 70
                nn.init.zeros_(attn.value_gate.weight)  # record 62

    def forward(self, inputs, targets=None):
        """Return the loss or the logits, as GPT.forward does."""
        ngram_embeddings = 0.0 if self.ngrams is None else self.ngrams(inputs)
        x = x0 = norm(self.wte(inputs))  # (B, T, C)
        long_mask = short_mask = None
        if self.has_window:
            documents = (inputs == self.document_token).cumsum(1)
            long_mask = attention_mask(documents, self.window_blocks)
            short_mask = attention_mask(documents, (self.window_blocks // 2).clamp(min=1))
        outputs = []  # of the blocks
        for i, block in enumerate(self.h):
            if i == self.skip_end:
                x = x + self.skip_weight * outputs[self.skip_start]
            saved = outputs[self.saved_layer] if i > self.saved_layer else None
            mask = long_mask if i in self.long_layers else short_mask
            x = block(x, x0, ngram_embeddings, saved, inputs, mask)
            outputs.append(x)
        # Backout (record 40): remove a part of what the earlier layers wrote.
        x = x - self.backout_weight * outputs[self.saved_layer]
        return loss_or_logits(norm(x), self.lm_head, targets, LOGIT_SOFTCAP)


# ---- Training ------------------------------------------------------------------------------------
def build_optimizers(model, args):
    """Return Muon for the matrices of attention and the MLP, and AdamW for the rest.

    Muon must come first, because apply_schedule also sets its momentum and weight decay.
    """
    tables = [m.weight for m in model.modules() if isinstance(m, (nn.Embedding, NgramTable))]
    gates = [p for name, p in model.named_parameters() if "value_gate" in name]
    not_for_muon = {*gates, *tables}
    matrices = [p for p in model.h.parameters() if p.ndim == 2 and p not in not_for_muon]
    scalars = [p for p in model.parameters() if p.ndim < 2]
    muon = Muon(
        matrices,
        lr=args.muon_learning_rate,
        momentum=args.muon_momentum,
        weight_decay=args.muon_weight_decay,
        adjust_lr_fn="unit_rms",  # lr is about the RMS of an update
        beta2=0.95,
        cautious=True,
        process_group=torch.distributed.group.WORLD,  # None without torchrun
        dtype=model.dtype,
    )
    # The betas, and the learning rates of gates and scalars, are those of record 62.
    groups = [
        dict(params=[model.lm_head.weight], lr=args.learning_rate, betas=(0.5, 0.95)),
        dict(params=tables, lr=args.embedding_learning_rate, betas=(0.75, 0.95)),
        dict(params=gates, lr=0.008, betas=(0.9, 0.99)),
        dict(params=scalars, lr=0.04, betas=(0.9, 0.99)),
    ]
    return [muon, torch.optim.AdamW(groups, eps=1e-10, weight_decay=0, fused=True)]


def apply_schedule(model, optimizers, step, args):
    """Set the learning rates, Muon's momentum and weight decay, and the attention window."""
    warmdown_steps = round(args.warmdown_fraction * args.num_iterations)
    remaining = min(1.0, (args.num_iterations - step) / max(1, warmdown_steps))
    lr_scale = args.final_lr_fraction + (1 - args.final_lr_fraction) * remaining
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lr_scale
    muon = optimizers[0]
    for group in muon.param_groups:
        group["momentum"] = momentum_at(step, args)
        # lr is scaled, too, so lr * weight_decay falls with lr_scale^2, as in the public records.
        group["weight_decay"] = args.muon_weight_decay * lr_scale
    model.window_blocks.fill_(window_blocks_at(step, args))


def momentum_at(step, args):
    """Return Muon's momentum: it rises from MIN_MOMENTUM, and falls back to it at the end."""
    warmup_steps = round(args.momentum_warmup_fraction * args.num_iterations)
    cooldown_steps = round(args.momentum_cooldown_fraction * args.num_iterations)
    rise = step / warmup_steps if step < warmup_steps else 1.0
    remaining = args.num_iterations - step
    fall = remaining / cooldown_steps if remaining < cooldown_steps else 1.0
    floor = min(MIN_MOMENTUM, args.muon_momentum)  # a lower muon_momentum stays constant
    return floor + min(rise, fall) * (args.muon_momentum - floor)


def window_blocks_at(step, args):
    """Return the window of long layers in blocks, rounded up. It grows linearly, from one block."""
    return max(1, math.ceil(step / args.num_iterations * args.attention_window / BLOCK))


RECIPE = train_gpt2.Recipe(
    script=f"records/modern/{NAME}",
    sources=train_gpt2.RECIPE.sources | SOURCES,
    settings=ModernSettings,
    presets=PRESETS,
    build_model=ModernGPT,
    build_optimizers=build_optimizers,
    apply_schedule=apply_schedule,
)

if __name__ == "__main__":
    train_gpt2.cli(sys.argv[1:], RECIPE)
