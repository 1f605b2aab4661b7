"""The CUDA step compiled without a GPU: its kernels, their values, and the plan made of them."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT

VERSIONS = {"torch": "2.13.0", "triton": "3.7.1"}  # gpu_compiler.py changes parts of both
installed = {d.name: d.version.split("+")[0] for d in importlib.metadata.distributions()}
compiles = pytest.mark.skipif(not VERSIONS.items() <= installed.items(), reason=f"needs {VERSIONS}")

# Triton kernels of two or four layers at full width: launches, GB that they read and write.
KERNELS = {
    "record7": {"validation": (27, 1.721), "forward": (26, 3.346), "backward": (22, 1.356)},
    "modern": {"validation": (62, 2.816), "forward": (67, 4.544), "backward": (76, 2.791)},
}
SMALL = [
    "--model=modern", "--n_layer=1", "--n_embd=32", "--n_head=1", "--vocab_size=64",
    "--sequence_length=16", "--device_batch_size=2", "--batch_size=12", "--max_ngram=3",
    "--ngram_rows=500", "--ngram_learning_rate=0.1", "--adamw_every=2",
]  # fmt: skip


def run_tool(path, *arguments, status=0, options=(), **environment):
    """Run a tool in its own process; return (output, errors). options: of the interpreter."""
    done = subprocess.run(
        [sys.executable, *options, str(ROOT / path), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == status, done.stderr
    return done.stdout, done.stderr


@compiles
def test_the_compiled_steps_have_the_expected_kernels_bytes_and_flops():
    """Each preset compiles to one graph forward and one backward, without spills."""
    steps = json.loads(run_tool("tests/gpu_step.py", "compile")[0])
    attention = "_scaled_dot_product_cudnn_attention"
    embedding = "embedding_dense_backward"
    external = {
        "forward": [attention, "mm"],
        "backward": [f"{attention}_backward", embedding, "mm"],
    }
    external = {
        "record7": {**external, "validation": external["forward"]},
        "modern": {
            "validation": ["bmm", "mm"],
            "forward": ["mm", "sort"],
            "backward": [embedding, "mm"],
        },
    }
    for preset, expected in KERNELS.items():
        graphs = steps[preset]["graphs"]
        assert [graph["kind"] for graph in graphs] == list(expected)
        for graph in graphs:
            kind = graph["kind"]
            case = f"{preset}, {kind}"
            launches, gigabytes = expected[kind]
            assert graph["launches"] == launches, case
            assert graph["bytes"] == pytest.approx(1e9 * gigabytes, rel=0.02), case
            assert graph["external"] == external[preset][kind], case
            assert graph["64-bit indices"] == [], case
            # The only configuration of FlexAttention's backward spills some words.
            flex_backward = (preset, kind) == ("modern", "backward")
            assert graph["spilling"] == (["attention"] if flex_backward else []), case
    # 6 operations per weight and token; attention: 2 matmuls forward, 5 backward. Causal attention
    # takes half of the scores, FlexAttention the visible blocks. Two of four layers see far.
    tokens = 8 * 1024
    long, short = steps["modern"]["visible blocks"]
    keys = {"record7": 2 * [1024 / 2], "modern": 2 * [128 * short, 128 * long]}
    gates = {"record7": 0, "modern": 3 * 12 * 6}
    for preset in KERNELS:
        layers = len(keys[preset])
        products = 6 * (50304 * 768 + layers * 12 * 768**2 + gates[preset]) * tokens
        attention = 7 * 2 * tokens * sum(keys[preset]) * 768
        assert steps[preset]["flops"] == pytest.approx(products + attention), preset
    planned, exact = steps["visible blocks"]
    assert planned == pytest.approx(exact)


@compiles
def test_the_generated_kernels_compute_the_eager_loss_and_gradients():
    results = json.loads(run_tool("tests/gpu_step.py", "interpret")[0])
    # two losses, and the gradients of 7 or 67 parameters
    assert {name: len(each) for name, each in results.items()} == {"record7": 9, "modern": 69}
    single_weights = "_input_weights_", "_skip_weight_", "_backout_weight_"
    for differences in results.values():
        for name, difference in differences.items():
            # The gradient of a single weight is a sum of large terms that nearly cancel.
            limit = 1e-3 if name.endswith(single_weights) else 1e-5
            assert difference < limit, (name, difference)


# ---- The plan -----------------------------------------------------------------------------------
@compiles
def test_a_plan_for_three_gpus_adds_up():
    # PyTorch compiles more strictly where CI is set.
    arguments = "--world_size=3", "--device=4090", *SMALL
    page, progress = run_tool("records/tools/plan.py", *arguments, CI="1")
    assert all(re.match(r"plan.py: \d+ s: \w", line) for line in progress.splitlines()), progress
    for stage in "tracing the model", "the forward pass", "counting":
        assert stage in progress
    assert "on 3 x 4090, 2 x 2 sequences on each" in page
    rows = re.findall(r"^\| (.+?) \| ([\d.]+) \| [\d.]+ \| [\d.]+ \| ([\d.]+) \|", page, re.M)
    ms = {part: float(value) for part, _, value in rows}
    launches = {part: float(value) for part, value, _ in rows}
    step, all_launches = ms.pop("step"), launches.pop("step")
    assert sum(ms.values()) == pytest.approx(step, abs=0.005 * (len(ms) + 1))
    assert sum(launches.values()) == all_launches
    wanted = {"products of head and loss", "attention, backward", "Newton-Schulz", "AdamW"}
    wanted |= {"Adagrad", "embedding's gradient", "gradient accumulation", "communication"}
    assert wanted <= ms.keys()
    # In each step, the gradients of the matrices are summed, Muon's updates in bfloat16, NorMuon's
    # averages, and the loss with the wish to stop. In every second step, others are summed, too:
    # head, gate, three and one single weights, n-grams and, in an all-reduce of their own because
    # they are bfloat16, the embeddings of tokens and values.
    matrices, averages, head, ngrams = 12 * 32**2, 4 * 32 + 2 * 128, 64 * 32, 500 * 32
    size = 4 * matrices + 2 * matrices + 4 * averages + 2 * 4
    size += (4 * (head + 12 + 3 + 1 + ngrams) + 2 * 2 * head) / 2
    collectives = rf"{4 + 1 / 2:g} all_reduce, {size / 1e6:.1f} MB in total."
    pattern = collectives + r" They take ([\d.]+) ms. The GPU waits for ([\d.]+) ms"
    [network, waited] = map(float, re.search(pattern, page).groups())
    assert waited == pytest.approx(ms["communication"], abs=0.005)
    assert 0 < waited <= network


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("device", ["T4", "B200"])
def test_a_step_compiles_for_other_architectures(device):
    page, _ = run_tool("records/tools/plan.py", f"--device={device}", *SMALL)
    assert f"on 1 x {device}" in page
    assert ("TFLOP/s in float32" in page) == (device == "T4")


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("device", ["4090", "A10G"])
def test_flex_attention_fits_the_shared_memory_of_smaller_gpus(device):
    """Compiling fails if no configuration of a kernel fits. Their size depends on the heads."""
    settings = ["--preset=modern_24gb", "--n_layer=4", "--n_head=1", "--n_embd=128"]
    settings += ["--vocab_size=512", "--document_token=0", "--ngram_rows=512"]
    page, _ = run_tool("records/tools/plan.py", *settings, f"--device={device}")
    assert f"on 1 x {device}, 16 x 1 sequences" in page and "| attention, backward |" in page


def test_a_missing_package_is_named_in_one_sentence():
    """Option -S hides the packages."""
    _, error = run_tool("records/tools/plan.py", "--help", status=1, options=["-S"])
    fix = f"{sys.executable} -m pip install torch==2.13.0"
    assert error == f"plan.py: torch==2.13.0 is not installed: {fix}\n"
