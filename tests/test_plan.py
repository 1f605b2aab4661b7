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


def installed(package):
    try:
        return importlib.metadata.version(package).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "none"


found = {package: installed(package) for package in VERSIONS}
compiles = pytest.mark.skipif(found != VERSIONS, reason=f"needs {VERSIONS}, found {found}")

# Two layers at full width.
STEP = ["--n_layer=2", "--device_batch_size=8"]
SMALL = [
    "--n_layer=1", "--n_embd=32", "--n_head=1", "--vocab_size=64", "--sequence_length=16",
    "--device_batch_size=2", "--batch_size=12", "--val_tokens=16",
]  # fmt: skip
PIECES = ["--max_ngram=3", "--ngram_rows=500", "--key_shift=1", "--logit_softcap=15"]

# Triton kernels of STEP: launches, GB that they read and write.
KERNELS = {
    "record7": {"validation": (27, 1.721), "forward": (26, 3.346), "backward": (23, 1.356)},
    "candidate": {"validation": (29, 1.798), "forward": (28, 3.397), "backward": (25, 1.406)},
}


def run_tool(path, *arguments):
    """Return what a tool prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(ROOT / path), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=KERNELS)
def step(request):
    """Return (preset, what tests/gpu_step.py says of each graph)."""
    preset = request.param
    mode = "compile_for_all" if preset == "record7" else "compile"
    return preset, json.loads(run_tool("tests/gpu_step.py", mode, f"--preset={preset}", *STEP))


@compiles
def test_the_step_is_one_graph_forward_and_one_backward(step):
    _, graphs = step
    assert [graph["kind"] for graph in graphs] == ["validation", "forward", "backward"]


@compiles
def test_only_products_and_attention_are_not_triton_kernels(step):
    _, graphs = step
    attention = "aten._scaled_dot_product_cudnn_attention"
    external = [set(graph["external"]) for graph in graphs]
    forward = {"extern_kernels.mm", attention}
    assert external == [forward, forward, {"extern_kernels.mm", f"{attention}_backward"}]


@compiles
def test_every_kernel_has_a_configuration_without_spills(step):
    _, graphs = step
    assert [graph["spilling"] for graph in graphs] == [[], [], []]


@compiles
def test_no_kernel_needs_int64_indices(step):
    _, graphs = step
    assert [graph["int64"] for graph in graphs] == [[], [], []]


@compiles
def test_launches_and_bytes_do_not_grow(step):
    preset, graphs = step
    for graph in graphs:
        launches, gigabytes = KERNELS[preset][graph["kind"]]
        assert graph["launches"] == launches, graph["kind"]
        assert graph["bytes"] / 1e9 == pytest.approx(gigabytes, rel=0.02), graph["kind"]


@compiles
def test_flops_are_those_of_the_formula(step):
    """6 operations per weight and token; attention: 2 products forward, 5 backward, causal."""
    _, (_, forward, backward) = step
    tokens = 8 * 1024
    weights = 50304 * 768 + 2 * 12 * 768**2
    assert forward["products"] + backward["products"] == 6 * weights * tokens
    assert forward["attention"] + backward["attention"] == 7 * 2 * tokens * 1024 * 768


@compiles
@pytest.mark.parametrize("pieces", [[], PIECES], ids=["record7", "all pieces"])
def test_the_generated_kernels_compute_the_eager_loss_and_gradients(pieces):
    differences = json.loads(run_tool("tests/gpu_step.py", "interpret", *SMALL, *pieces))
    assert len(differences) == 2 + 7 + bool(pieces)  # losses, parameters, sum of n-grams
    assert all(difference < 1e-5 for difference in differences.values()), differences


# ---- The plan -----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def page():
    """Return the plan of a small step of three ranks with an n-gram table."""
    return run_tool("records/tools/plan.py", "--world_size=3", "--device=4090", *SMALL, *PIECES)


@compiles
def test_the_parts_add_up_to_the_step(page):
    rows = re.findall(r"^\| (.+?) \| (\d+) \| [\d.]+ \| [\d.]+ \| ([\d.]+) \|", page, re.M)
    ms = {part: float(value) for part, _, value in rows}
    launches = {part: int(value) for part, value, _ in rows}
    step, all_launches = ms.pop("step"), launches.pop("step")
    assert sum(ms.values()) == pytest.approx(step, abs=0.005 * (len(ms) + 1))
    assert sum(launches.values()) == all_launches
    wanted = {"products of head and loss", "attention, backward", "Newton-Schulz", "AdamW"}
    wanted |= {"Adagrad", "n-grams", "gradient accumulation", "communication"}
    assert wanted <= ms.keys()


@compiles
def test_the_collectives_are_those_of_train_step(page):
    """Gradients in float32, updates of Muon in bfloat16, the loss and the sum of norms."""
    matrices, tables = 12 * 32**2, (64 + 500) * 32
    size = 4 * (matrices + tables) + 2 * matrices + 8
    rounds = 1  # of stacks of Muon: four square matrices, c_fc, c_proj
    assert f"{2 + rounds} all_reduce of {size / 1e6:.1f} MB" in page
    assert "on 3 x 4090, 2 x 2 sequences on each" in page


@compiles
def test_an_impossible_number_of_gpus_is_refused_in_one_sentence():
    command = [sys.executable, str(ROOT / "records/tools/plan.py"), "--world_size=7"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "plan.py: world_size=7 must divide 512\n"


# ---- Figures of the READMEs ---------------------------------------------------------------------
RECORD = ROOT / "records" / "2026-11-23_Plan"


def figures(path):
    """Return (ms a step, minutes, GB at the peak) of a plan's output."""
    text = path.read_text()
    [step] = re.findall(r"^\| step \|.* ([\d.]+) \| 100.0% \|$", text, re.M)
    [minutes] = re.findall(r"steps in ([\d.]+) minutes", text)
    [memory] = re.findall(r"^Peak memory: ([\d.]+) GB", text, re.M)
    return step, minutes, memory


def test_the_record_shows_the_figures_of_its_logs():
    page = (RECORD / "README.md").read_text()
    logs = sorted(path.name for path in (RECORD / "before").iterdir())
    for name in logs:
        cells = zip(figures(RECORD / "before" / name), figures(RECORD / "after" / name))
        row = [name.removesuffix(".txt"), *(value for pair in cells for value in pair)]
        assert f"| {' | '.join(row)} |" in page, row


def test_estimates_of_the_main_readme_are_those_of_the_record():
    allowed = set()
    for path in (RECORD / "after").iterdir():
        _, minutes, memory = map(float, figures(path))
        allowed |= {f"{minutes:.1f} min", f"{minutes / 60:.0f} hours", f"{memory:.0f} GB"}
    page = (ROOT / "README.md").read_text()
    shown = re.findall(r"([\d.]+ (?:min|hours|GB))(?=[^|;\n]*estimated)", page)
    assert len(shown) >= 5 and set(shown) <= allowed


def test_older_records_say_which_tool_made_their_estimates():
    for path in sorted((ROOT / "records").glob("*/README.md")):
        text = path.read_text()
        if re.search(r"\b(plan|scaling|fused)\.py", text) and path.parent != RECORD:
            assert "2b24965" in text or "../2026-11-22_Plan" in text, path
