"""The record's budget with AdamW on every parameter, instead of Muon on the blocks' matrices.

    SCRIPT=records/2026-11-20_CPU_Baseline/adamw.py bash run.sh --muon_learning_rate=...

muon_learning_rate is here AdamW's learning rate for the blocks' matrices.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_gpt2


def build_adamw(gpt, args, rank, world_size):
    """Return [AdamW] with the embedding and the matrices as two groups."""
    groups = [
        {"params": gpt.lm_head.parameters(), "lr": args.learning_rate},
        {"params": gpt.h.parameters(), "lr": args.muon_learning_rate},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True)
    for group in adamw.param_groups:
        group["initial_lr"] = group["lr"]
    return [adamw]


if __name__ == "__main__":
    train_gpt2.build_optimizers = build_adamw
    train_gpt2.main(train_gpt2.parse_args(sys.argv[1:]))
