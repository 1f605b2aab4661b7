"""Tests on a CUDA device: kernels against float64, runs against the CPU. Skipped without one.

`bash run.sh test -m cuda tests/test_cuda.py` runs them. With --cuda_tests_on=cpu, they run on the
CPU, to try the tests themselves.
"""

import copy
import functools
import re
import subprocess
import sys

import muon
import pytest
import test_modern
import torch
import torch.distributed as dist
import torch.nn.functional as F
import train_modern
from conftest import MODERN, ROOT, both_dtypes, options, run_here, run_ranks
from plain import plain_newton_schulz
from test_model import make_batch, make_model
from test_muon import both_files, relative
from torch.nn.attention import SDPBackend, sdpa_kernel

import train_gpt2
from train_gpt2 import Hyperparameters, choose_dtype

pytestmark = pytest.mark.cuda
SMALL = {"vocab_size": 512, "n_embd": 128, "sequence_length": 128, "device_batch_size": 4}
KERNELS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


def error(found, exact):
    return relative(found.cpu() - exact, exact)


# ---- Kernels, against float64 on the CPU ---------------------------------------------------------
def test_the_model_gets_a_fused_kernel(device):
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        pytest.skip("this device has no fused kernels for bfloat16")
    heads = torch.randn(3, 2, 1024, 6, 128, device=device)  # q, k and v as in the model: BTHD
    q, k, v = heads.transpose(2, 3).to(getattr(torch, choose_dtype(Hyperparameters(), device)))
    y = F.scaled_dot_product_attention(q.requires_grad_(), k, v, is_causal=True)
    found = re.match(r"ScaledDotProduct(\w+)Attention", y.grad_fn.name())
    assert found, y.grad_fn.name()  # with the math kernel, it would be that of a matmul
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0):  # H100, H200
        assert found[1] in ("Cudnn", "Flash")


@both_files
@pytest.mark.parametrize("shape", [(768, 768), (3072, 768), (768, 3072), (4, 128, 128)])
def test_newton_schulz_is_the_plain_iteration(shape, orthogonalize, device):
    if len(shape) == 3 and orthogonalize is not muon.orthogonalize:
        pytest.skip("train_gpt2.py takes one matrix")
    torch.manual_seed(0)
    G = torch.randn(shape)
    exact = [plain_newton_schulz(M, dtype=torch.float64) for M in G.view(-1, *shape[-2:])]
    out = orthogonalize(G.to(device), torch.bfloat16)
    assert out.dtype == torch.bfloat16 and out.device == device and out.shape == shape
    assert error(out, torch.stack(exact).view(shape)) < 0.03  # rounding alone: 0.010 to 0.025
    S = torch.linalg.svdvals(out.double().cpu())
    # A square random matrix has a few singular values that are too small to reach 1.
    assert S.max() < 1.3 and S.quantile(0.1) > 0.6


# ---- The model and its training, against the CPU in float32 and against eager --------------------
def loss_and_gradients(gpt, args, dtype, device):
    gpt = copy.deepcopy(gpt).to(device)
    gpt.dtype = dtype
    batch = (tokens.to(device) for tokens in make_batch(args, rows=4))
    return test_modern.loss_and_gradients(gpt, *batch)


# In float32, the kernel must be the same as on the CPU; TF32 would exceed the bounds.
@pytest.mark.parametrize(
    "dtype, kernel", [("float32", "MATH"), *(("bfloat16", kernel) for kernel in KERNELS)]
)
def test_loss_and_gradients_equal_those_of_the_cpu_in_float32(dtype, kernel, device):
    """The bfloat16 cases cover each attention kernel."""
    gpt, args = make_model(**SMALL)
    exact, exact_grads = loss_and_gradients(gpt, args, torch.float32, torch.device("cpu"))
    try:
        with sdpa_kernel(getattr(SDPBackend, kernel)):
            loss, grads = loss_and_gradients(gpt, args, getattr(torch, dtype), device)
    except RuntimeError as refusal:
        if not re.search("[Nn]o (available kernel|viable backend)", str(refusal)):
            raise
        pytest.skip(f"{kernel}: {refusal}")
    # An error of 14% is a cosine similarity of 0.99.
    loss_bound, gradient_bound = (1e-5, 1e-4) if dtype == "float32" else (1e-2, 0.14)
    assert loss == pytest.approx(exact, rel=loss_bound)
    for name, grad in grads.items():
        assert error(grad, exact_grads[name].double()) < gradient_bound, name


def test_masked_attention_on_a_gpu_equals_that_of_the_cpu(device):
    """FlexAttention against the dense mask, in float32, over windows and documents."""
    model, args = test_modern.make_model()
    batch = test_modern.make_batch(args)
    on_device = [tokens.to(device) for tokens in batch]
    for window in (1, 2, 4):
        model.window_blocks.fill_(window)
        exact, exact_grads = test_modern.loss_and_gradients(model.to("cpu"), *batch)
        loss, grads = test_modern.loss_and_gradients(model.to(device), *on_device)
        assert loss == pytest.approx(exact, rel=1e-5)
        for name, grad in grads.items():
            assert error(grad, exact_grads[name].double()) < 1e-3, name


def five_steps(recipe, settings, device):
    """Return the losses of five steps and evaluations, and the number of graphs at each step."""
    args = recipe.settings(**{**settings, "device": device.type})
    run = train_gpt2.set_up(args, recipe, train_gpt2.StopRequest())
    if args.compile:
        train_gpt2.compile_model(run)
    losses, graphs = [], []
    for step in range(5):
        graphs += [torch._dynamo.utils.counters["stats"]["unique_graphs"]]
        loss = train_gpt2.train_step(run, *run.train_loader.batch(step))["loss"].item()
        losses += [loss, train_gpt2.evaluate(run)]
    return losses, graphs


@pytest.mark.parametrize(
    "recipe, more",
    [(train_gpt2.RECIPE, {}), (train_modern.RECIPE, MODERN)],
    ids=["gpt2", "modern"],
)
def test_a_compiled_step_is_the_eager_one_in_two_graphs(recipe, more, tiny, device):
    settings = {**tiny, "n_embd": 64, **more}
    eager, none = five_steps(recipe, settings, device)
    compiled, graphs = five_steps(recipe, {**settings, "compile": True}, device)
    assert compiled == pytest.approx(eager, rel=1e-2) and eager[-1] < 0.9 * eager[0]
    assert (none, graphs) == ([0] * 5, [2] * 5)  # compile_model compiles training and validation
    assert not torch._dynamo.utils.counters["graph_break"]


# Matrices of equal shape are stacked; the last two are processed alone.
MATRICES = [(128, 128)] * 5 + [(512, 128)] * 2 + [(128, 512), (640, 640)]


def muon_steps(rank, world_size, make_muon, device):
    """Return the parameters after three steps of a Muon. All ranks share the device."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape).to(device)) for shape in MATRICES]
    ranks = dict(rank=rank, world_size=world_size)
    if make_muon is not train_gpt2.Muon:
        ranks = dict(process_group=dist.group.WORLD)  # None in a single process
    optimizer = make_muon(params, lr=0.02, **ranks)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape).to(device)
        optimizer.step()
    return [p.detach().cpu() for p in params]


@pytest.mark.parametrize(
    "make_muon",
    [
        train_gpt2.Muon,
        functools.partial(muon.Muon, weight_decay=0.1, beta2=0.95, cautious=True),
    ],
    ids=["train_gpt2.py", "muon.py"],
)
def test_two_ranks_on_one_device_equal_one_rank_to_the_bit(make_muon, device, tmp_path):
    """The ranks use gloo, because NCCL allows only one rank per device."""
    (alone,) = run_ranks(muon_steps, 1, tmp_path / "alone", make_muon, device)
    for params in run_ranks(muon_steps, 2, tmp_path / "ranks", make_muon, device):
        assert [torch.equal(p, q) for p, q in zip(params, alone)] == [True] * len(alone)


# ---- Whole runs ----------------------------------------------------------------------------------
@both_dtypes
@pytest.mark.parametrize("before", ["device", "cpu"])
@pytest.mark.parametrize("after", ["device", "cpu"])
def test_a_run_resumes_on_any_device(before, after, dtype, tiny, device):
    kinds = {"device": device.type, "cpu": "cpu"}
    settings = {**tiny, "dtype": dtype}
    with sdpa_kernel(SDPBackend.MATH):  # the other kernels are not bit-reproducible
        whole = run_here(settings, device=kinds[before], run_id="whole")
        settings |= {"run_id": "part", "resume": "auto"}
        assert run_here(settings, 3, device=kinds[before]) is None
        resumed = run_here(settings, device=kinds[after])
    assert resumed == (whole if kinds[before] == kinds[after] else pytest.approx(whole, abs=1e-2))


LITTLE_MEMORY = """
import sys
import torch
import train_gpt2

torch.cuda.set_per_process_memory_fraction(2**30 / torch.cuda.mem_get_info()[1])
train_gpt2.cli(sys.argv[1:])
"""


def test_too_little_memory_is_a_clear_error(tiny, device):
    """4 GiB of activations (2^18 tokens, 2 layers of 128) do not fit into 1 GiB."""
    if device.type == "cpu":
        pytest.skip("tests/test_survive.py tests running out of memory on the CPU")
    settings = {**tiny, "n_embd": 128, "device": "cuda", "allow_repeat": True}
    settings |= {"batch_size": 2**14, "device_batch_size": 2**14}
    command = [sys.executable, "-c", LITTLE_MEMORY, *options(settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("out of memory: lower --device_batch_size") == 1
    assert "Traceback" not in done.stderr, done.stderr


def test_the_log_names_the_device(tiny, device):
    run_here(tiny, n_embd=128, compile=True, run_id="one", device=device.type)
    text = open(f"{tiny['log_dir']}/one.txt").read()
    assert f" device:{train_gpt2.device_name(device)} processes:1 " in text
    assert f"\nmatmul_dtype:{choose_dtype(Hyperparameters(), device)} " in text
    assert "\ngraphs: 2\n" in text
    assert float(re.search(r"^peak_memory_mib: (\d+)$", text, re.M)[1]) > 0
    assert float(re.search(r"^val_loss: ([\d.]+)$", text, re.M)[1]) < 4.1  # ln 64 = 4.16
