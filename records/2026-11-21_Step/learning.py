"""Train with bf16 as a GPU has it, on a CPU without it: python learning.py ours|plain SEED DATA

A bf16 product on a GPU multiplies rounded values, adds in float32 and rounds the result; so it is
done here, forward and backward, in products, attention and Newton-Schulz. `ours`: train_gpt2.py, a
bf16 residual stream and weights cast once a step. `plain`: tests/plain.py, float32 weights and
residual stream under autocast. 300 steps on the data of the CPU record, `bash run.sh data`.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "records")]
import plain  # noqa: E402
import plain_run  # noqa: E402

import train_gpt2  # noqa: E402

matmul, linear, attention = torch.Tensor.__matmul__, F.linear, F.scaled_dot_product_attention
addmm, baddbmm = torch.addmm, torch.baddbmm


def emulated(function):
    """Return function of bf16 tensors, computed in float32 of the rounded values, and rounded."""

    def call(*tensors, **options):
        tensors = [t for t in tensors if t is not None]  # nn.Linear's bias
        if torch.is_autocast_enabled("cpu"):
            tensors = [t.to(torch.bfloat16) for t in tensors]
        if tensors[0].dtype != torch.bfloat16:
            return function(*tensors, **options)
        with torch.autocast("cpu", enabled=False):
            return function(*(t.float() for t in tensors), **options).to(torch.bfloat16)

    return call


def main(side, seed, data):
    torch.Tensor.__matmul__ = emulated(matmul)
    F.linear, F.scaled_dot_product_attention = emulated(linear), emulated(attention)
    torch.addmm, torch.baddbmm = emulated(addmm), emulated(baddbmm)
    train_gpt2.matmul_dtype = lambda device: torch.bfloat16
    args = train_gpt2.Hyperparameters(
        train_files=f"{data}/train_*.bin", val_files=f"{data}/val_*.bin", vocab_size=257,
        n_layer=4, n_head=1, n_embd=128, batch_size=8, device_batch_size=4, sequence_length=256,
        num_iterations=300, warmdown_iters=150, learning_rate=0.01, muon_learning_rate=0.0005,
        val_loss_every=0, val_tokens=204800, bytes_per_token=0.99991, target_val_loss=2.0,
        seed=int(seed), device="cpu", compile=False, run_id=f"{side}_seed{seed}",
    )  # fmt: skip
    (train_gpt2.main if side == "ours" else plain_run.main)(args)


assert plain.F is F  # both modules look their functions up there
main(*sys.argv[1:])
