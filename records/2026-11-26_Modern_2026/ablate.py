"""Train the modern model without one of its parts.

    python ablate.py PART [--name=value ...]    # settings of train_gpt2.py; PART may be "nothing"

Parts that are settings need no name here: --ngram_rows=0, --muon_cooldown_fraction=0,
--muon_weight_decay=0, --adamw_every=1.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_gpt2


class OpenGate(train_gpt2.CastedLinear):
    """A gate that has a factor of 1 for every token."""

    def forward(self, x):
        return x.new_zeros(*x.shape[:-1], self.out_features)


def fix(weight, index, value):
    """Set an entry of a weight to a value, and keep it there."""
    keep = torch.ones_like(weight)
    keep[index] = 0
    with torch.no_grad():
        weight[index] = value
    weight.register_hook(lambda gradient: gradient * keep)


def remove(part, model):
    """Take a part out of a new model."""
    attention = [block.attn for block in model.h if block.attn is not None]
    if part == "value gates":
        for attn in attention:
            if attn.value_table is not None:
                attn.value_gate.__class__ = OpenGate
    elif part == "key offset":
        for attn in attention:
            attn.offset_keys = False
    elif part == "n-grams after layer 0":
        for block in model.h[1:]:
            fix(block.input_weights, 2, 0.0)
    elif part == "token embeddings in layers":
        for block in model.h[1:]:
            fix(block.input_weights, 1, 0.0)
    elif part == "backout":
        fix(model.backout_weight, ..., 0.0)
    elif part == "saved input":
        for block in model.h:
            block.forward = without_saved_input(block.forward)
    elif part == "skip":
        fix(model.skip_weight, ..., 0.0)
    elif part == "equal weights of queries and keys":
        train_gpt2.init_uniform(model.h[-1].attn.c_k)


def without_saved_input(forward):
    return lambda x, x0, ngrams, saved, tokens, mask: forward(x, x0, ngrams, None, tokens, mask)


def change_optimizers(part, optimizers):
    """Take a part out of new optimizers."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if part == "NorMuon" and "beta2" in group:
                group["beta2"] = 0.0
            if part == "cautious decay" and "cautious" in group:
                group["cautious"] = False
            if part == "betas" and "betas" in group:
                group["betas"] = (0.8, 0.95)  # record 21's


def main(part, argv):

    class LayerRoles(train_gpt2.LayerRoles):
        def __init__(self, n):
            super().__init__(n)
            if part == "value embeddings":
                self.values = set()
            if part == "skip and layer without attention":
                self.skip_to = None

    train_gpt2.LayerRoles = LayerRoles
    build_model, build_optimizers = train_gpt2.build_model, train_gpt2.build_optimizers

    def build_changed_model(*arguments):
        model = build_model(*arguments)
        remove(part, model)
        return model

    def build_changed_optimizers(*arguments):
        optimizers = build_optimizers(*arguments)
        change_optimizers(part, optimizers)
        return optimizers

    train_gpt2.build_model = build_changed_model
    train_gpt2.build_optimizers = build_changed_optimizers
    train_gpt2.main(train_gpt2.parse_args(argv))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
