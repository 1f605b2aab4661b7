"""The CUDA step, compiled without a GPU, and the plan made of its kernels."""

import importlib.metadata
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import train_modern
from conftest import ROOT, write_shard
from train_modern import BLOCK

from train_gpt2 import parse_args

VERSIONS = {"torch": "2.13.0", "triton": "3.7.1"}  # gpu_compiler.py changes parts of both
installed = {d.name: d.version.split("+")[0] for d in importlib.metadata.distributions()}
compiles = pytest.mark.skipif(not VERSIONS.items() <= installed.items(), reason=f"needs {VERSIONS}")

SMALL = [
    "modern", "--n_layer=1", "--n_embd=32", "--n_head=1", "--vocab_size=64", "--batch_size=12",
    "--sequence_length=16", "--device_batch_size=2", "--attention_window=0", "--max_ngram=3",
    "--ngram_rows=500",
]  # fmt: skip


def plan(*arguments, status=0, options=(), **environment):
    """Run plan.py in its own process; return (output, errors). options: of the interpreter."""
    done = subprocess.run(
        [sys.executable, *options, ROOT / "records" / "tools" / "plan.py", *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == status, done.stderr
    return done.stdout, done.stderr


def rows_of(page):
    """Return {part: (launches, GB, TFLOP, ms)}."""
    cells = re.findall(r"^\| (\D.*?) \| ([\d. |]+) \| [\d.]+% \|$", page, re.M)
    return {part: tuple(map(float, numbers.split(" | "))) for part, numbers in cells}


# A few layers at full width on 8 sequences of 1,024 tokens. Two of the four see far.
SIZES = "--batch_size=8", "--device_batch_size=8", "--sequence_length=1024"
KERNELS = {  # launches and GB, forward and backward
    "record7": ((43, 1.2), (40, 1.6)),
    "modern": ((60, 1.6), (67, 1.9)),
}


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("preset, device", [("record7", "H100"), ("modern", "4090")])
def test_the_compiled_steps_have_the_expected_kernels_and_flops(preset, device, tmp_path):
    """FlexAttention fits into a 4090's shared memory, 99 KiB for a block; an H100 has 227."""
    settings = [f"--preset={preset}", *SIZES, "--n_layer=4", "--num_iterations=63"]
    script = ["modern"] if preset == "modern" else []
    tokens = np.where(np.random.default_rng(0).integers(150, size=2000), 1, 50256)
    write_shard(tmp_path / "text.bin", tokens)
    page, _ = plan(*script, *settings, f"--tokens={tmp_path}/text.bin", f"--device={device}")
    rows = rows_of(page)
    for kind, expected in zip(("forward", "backward"), KERNELS[preset]):
        assert rows[f"element-wise of blocks, {kind}"][:2] == expected
    # 6 operations per weight and token; attention: 2 matmuls forward, 5 backward. Causal attention
    # takes half of the scores, FlexAttention the visible blocks.
    gates, keys = 0, 4 * 1024 / 2
    if preset == "modern":
        long, short = visible_blocks(parse_args(settings, train_modern.RECIPE), tokens)
        assert f"A query sees {long:.2f} blocks of {BLOCK} keys in the layers with the" in page
        assert f"long window, {short:.2f} in the others" in page
        gates, keys = 3 * 12 * 6, 2 * BLOCK * (long + short)
    products = 6 * (50304 * 768 + 4 * 12 * 768**2 + gates) * 8 * 1024
    attention = 7 * 2 * 8 * 1024 * keys * 768
    found = rows["step"][2] - rows["Newton-Schulz"][2]
    assert found == pytest.approx((products + attention) / 1e12, abs=0.011)


def visible_blocks(args, tokens):
    """Return how many blocks a block of queries sees in the long and short mask, from masks."""
    T = args.sequence_length
    # 64 steps and 64 sequences, as the plan samples them
    windows = [train_modern.window_blocks_at(step, args) for step in range(64)]
    starts = np.linspace(0, len(tokens) - T, 64, dtype=int)
    sequences = torch.tensor(np.stack([tokens[start : start + T] for start in starts]))
    documents = (sequences == args.document_token).cumsum(1)
    seen = {}
    for window in range(1, max(windows) + 1):
        mask = train_modern.attention_mask(documents, window)
        blocks = mask.view(64, T // BLOCK, BLOCK, T // BLOCK, BLOCK).any(4).any(2)
        seen[window] = blocks.sum(-1).float().mean().item()
    long = np.mean([seen[window] for window in windows])
    return long, np.mean([seen[max(1, window // 2)] for window in windows])


@compiles
@pytest.mark.slow
def test_a_plan_for_three_gpus_adds_up():
    # PyTorch compiles more strictly where CI is set.
    page, progress = plan("--world_size=3", "--device=B200", *SMALL, CI="1")
    assert "triton_" in progress and "Traceback" not in progress
    assert "on 3 x B200, 2 x 2 sequences on each" in page
    rows = rows_of(page)
    step = rows.pop("step")
    ms = {part: numbers[3] for part, numbers in rows.items()}
    assert sum(ms.values()) == pytest.approx(step[3], abs=0.005 * (len(ms) + 1))
    assert sum(numbers[0] for numbers in rows.values()) == step[0]
    wanted = {"products of head and loss", "attention, backward", "Newton-Schulz", "AdamW"}
    wanted |= {"embedding's gradient", "gradient accumulation", "communication"}
    assert wanted <= ms.keys()
    # Summed are the gradients of matrices, head, gate and four single weights, in an all-reduce of
    # their own because they are bfloat16 those of the embeddings of tokens, values and n-grams,
    # Muon's updates in bfloat16, and the loss with the wish to stop.
    matrices, head, ngrams = 12 * 32**2, 64 * 32, 500 * 32
    size = 4 * (matrices + head + 12 + 3 + 1) + 2 * (2 * head + ngrams) + 2 * matrices + 2 * 4
    collectives = rf"4 all_reduce, {size / 1e6:.1f} MB in total, in ([\d.]+) ms"
    [network] = re.search(collectives, page).groups()
    assert float(network) == pytest.approx(ms["communication"], abs=0.005)


def test_a_missing_package_is_named_in_one_sentence():
    """Option -S hides the packages."""
    _, error = plan("--help", status=1, options=["-S"])
    assert error == f"plan.py: torch is not installed: {sys.executable} -m pip install torch\n"
