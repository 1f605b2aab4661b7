"""On a CUDA device: kernels against float64, runs against the CPU's; skipped where there is none.

`bash run.sh test -m cuda tests/test_cuda.py`. With --cuda_tests_on=cpu the CPU stands in for the
device, which tries the tests, not the device.
"""

import copy
import re
import subprocess
import sys

import describe
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, run_ranks
from plain import plain_newton_schulz
from test_model import make_batch, make_model

from train_gpt2 import (
    GPT,
    NS_COEFFICIENTS,
    SDPA,
    DistributedDataLoader,
    Hyperparameters,
    Muon,
    attention_kernel,
    build_optimizers,
    cast_weights,
    check_finite,
    compile_whole,
    evaluate,
    largest_gradients,
    main,
    matmul_dtype,
    open_data,
    train_step,
    zeropower_via_newtonschulz5,
)

pytestmark = pytest.mark.cuda
SMALL = {"vocab_size": 512, "n_embd": 128, "sequence_length": 128, "device_batch_size": 4}


def error(found, exact):
    """The relative error in the Frobenius norm."""
    return ((found.double().cpu() - exact).norm() / exact.norm()).item()


# ---------------------------------------------------------------------------
# kernels, against float64 on the CPU


def attend(leaves, weights):
    """Causal attention as the model calls it: the output, and the gradients of output * weights."""
    leaves = [x.detach().requires_grad_() for x in leaves]  # (B, T, H, D)
    y = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves), is_causal=True)
    return [y.detach(), *torch.autograd.grad(y, leaves, weights.transpose(1, 2))]


@pytest.mark.parametrize("kernel", SDPA)
def test_attention_and_its_gradients_are_those_of_the_formula(kernel, device):
    args = Hyperparameters(attention=kernel, device_batch_size=2)  # (2, 1024, 6, 128)
    dtype = matmul_dtype(device)
    torch.manual_seed(0)
    *leaves, weights = torch.randn(4, 2, 1024, 6, 128).to(dtype)
    try:
        with attention_kernel(args, device) as granted:
            ours = attend([x.to(device) for x in leaves], weights.to(device))
    except ValueError as refusal:
        pytest.skip(str(refusal))
    assert granted == kernel
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5  # a few roundings, of 2^-9 or of 2^-24
    exact = attend([x.double() for x in leaves], weights.double())
    for name, found, expected in zip(("y", "q", "k", "v"), ours, exact):
        assert found.dtype == dtype and error(found, expected) < bound, name


def test_auto_grants_a_fused_kernel(device):
    if device.type == "cpu" or torch.cuda.get_device_capability(device) < (8, 0):
        pytest.skip("a device without fused kernels for bf16")
    with attention_kernel(Hyperparameters(), device) as kernel:
        assert kernel != "math"
        if torch.cuda.get_device_capability(device) == (9, 0):  # H100, H200
            assert kernel in ("cudnn", "flash")


@pytest.mark.parametrize("coefficients", NS_COEFFICIENTS)
@pytest.mark.parametrize("shape", [(768, 768), (3072, 768), (768, 3072), (4, 128, 128)])
def test_newton_schulz_is_the_plain_iteration(shape, coefficients, device):
    torch.manual_seed(0)
    G = torch.randn(shape)
    matrices = G if G.ndim == 3 else G[None]
    options = {"dtype": torch.float64, "coefficients": coefficients}
    exact = torch.stack([plain_newton_schulz(M, **options) for M in matrices]).view(shape)
    out = zeropower_via_newtonschulz5(G.to(device), coefficients=coefficients)
    assert out.dtype == torch.bfloat16 and out.device == device and out.shape == shape
    # roundings to bf16, imitated on a CPU: 0.010 to 0.025; the smallest, polar_express: 0.046
    assert error(out, exact) < (0.06 if G.ndim == 3 else 0.03)
    S = torch.linalg.svdvals(out.double().cpu())
    # a square random matrix has a few singular values too small to be raised to 1
    assert S.max() < 1.3 and S.quantile(0.1) > 0.6


def test_newton_schulz_minds_no_scale(device):
    torch.manual_seed(0)
    G = torch.randn(768, 1024).to(device)
    out = zeropower_via_newtonschulz5(G)
    for scale in (1e-3, 1e30):  # other roundings of a few elements
        assert error(zeropower_via_newtonschulz5(scale * G), out.double().cpu()) < 0.02
    assert not zeropower_via_newtonschulz5(0 * G).any()
    tiny = zeropower_via_newtonschulz5(1e-30 * G)  # far below the 1e-7 that its norm is raised by
    assert tiny.isfinite().all() and tiny.abs().max() <= out.abs().max()


def test_a_gradient_that_is_not_finite_is_named(device):
    params = [torch.nn.Parameter(torch.ones(3, n, device=device)) for n in (1, 5, 300, 7)]
    names = dict(zip(params, "abcd"))
    params[0].grad, params[1].grad = torch.full_like(params[0], -2), torch.ones_like(params[1])
    params[2].grad = torch.ones(300, 3, device=device).T  # and d has none
    assert largest_gradients(params).tolist() == [2, 1, 1, 0]
    check_finite(largest_gradients(params), names)
    for value in (float("nan"), float("inf"), -float("inf")):
        params[2].grad[2, 299] = value
        with pytest.raises(FloatingPointError, match=r"parameter c, \(3, 300\), is not finite"):
            check_finite(largest_gradients(params), names)


# ---------------------------------------------------------------------------
# the model and its training, against the CPU's in float32 and against eager


def loss_and_gradients(gpt, args, dtype, device):
    gpt = copy.deepcopy(gpt).to(device)
    inputs, targets = (tokens.to(device) for tokens in make_batch(args, rows=4))
    cast_weights(gpt, dtype)
    loss = gpt(inputs, targets)
    loss.backward()
    return loss.item(), {name: p.grad.double().cpu() for name, p in gpt.named_parameters()}


def test_loss_and_gradients_in_float32_are_the_cpus(device):
    gpt, args = make_model(**SMALL, attention="math")
    exact, exact_grads = loss_and_gradients(gpt, args, torch.float32, torch.device("cpu"))
    with attention_kernel(args, device):
        loss, grads = loss_and_gradients(gpt, args, torch.float32, device)
    assert loss == pytest.approx(exact, rel=1e-5)
    for name, grad in grads.items():  # TF32, of 10 bits, would err by more
        assert error(grad, exact_grads[name]) < 1e-4, name


def test_loss_and_gradients_in_bf16_are_near_the_cpus_in_float32(device):
    gpt, args = make_model(**SMALL)
    exact, exact_grads = loss_and_gradients(gpt, args, torch.float32, torch.device("cpu"))
    with attention_kernel(args, device):
        loss, grads = loss_and_gradients(gpt, args, torch.bfloat16, device)
    assert loss == pytest.approx(exact, rel=1e-2)
    for name, grad in grads.items():
        similarity = F.cosine_similarity(grad.flatten(), exact_grads[name].flatten(), dim=0)
        assert similarity > 0.99, name


def test_batches_are_those_of_the_cpu(tiny, device):
    """40 steps ahead of the device: pinned memory must not be used again before it is copied."""
    given = tiny["train_files"], 12, 16, 0, 1
    there, here = (DistributedDataLoader(*given, d, allow_repeat=True) for d in (device, "cpu"))
    batches = [there.next_batch() for _ in range(40)]
    for batch in batches:
        for tokens, expected in zip(batch, here.next_batch()):
            assert tokens.device == device and torch.equal(tokens.cpu(), expected)
    assert there.data_hash() == here.data_hash()


def five_steps(settings, device):
    """Losses of five steps and evaluations, and the number of graphs after each."""
    args = Hyperparameters(**{**settings, "device": device.type})
    torch.manual_seed(args.seed)
    gpt = GPT(args).to(device)
    compile_whole(gpt, args.compile)
    optimizers = build_optimizers(gpt, args, 0, 1)
    train_loader, val_loader = open_data(args, 0, 1, device)
    losses, graphs = [], []
    with attention_kernel(args, device):
        for _ in range(5):
            batch = train_loader.next_batch()
            losses += [train_step(gpt, optimizers, *batch, 1.0, args).item()]
            losses += [evaluate(gpt, val_loader, args.val_tokens)]
            graphs += [torch._dynamo.utils.counters["stats"]["unique_graphs"]]
    return losses, graphs


def test_a_compiled_step_is_the_eager_one_in_two_graphs(tiny, device):
    settings = {**tiny, "n_embd": 64}
    eager, none = five_steps(settings, device)
    compiled, graphs = five_steps({**settings, "compile": True}, device)
    assert compiled == pytest.approx(eager, rel=1e-2) and eager[-1] < 0.9 * eager[0]
    assert (none, graphs) == ([0] * 5, [2] * 5)  # training and validation, in the first turn
    assert not torch._dynamo.utils.counters["graph_break"]


MATRICES = [(128, 128)] * 5 + [(512, 128)] * 2 + [(128, 512), (640, 640)]  # batches of 4 and alone


def muon_steps(rank, world_size, device):
    """The parameters after three steps of Muon, on the CPU; all ranks share the device."""
    generator = torch.Generator().manual_seed(0)

    def values():
        return [torch.randn(shape, generator=generator).to(device) for shape in MATRICES]

    params = [torch.nn.Parameter(p) for p in values()]
    muon = Muon(params, lr=0.02, rank=rank, world_size=world_size)
    for _ in range(3):
        for p, grad in zip(params, values()):
            p.grad = grad
        muon.step()
    return [p.detach().cpu() for p in params]


def test_two_ranks_on_one_device_give_the_bits_of_one(device, tmp_path):
    """With gloo, as NCCL gives a device to one rank only; by all_reduce alone, which it can."""
    (alone,) = run_ranks(muon_steps, 1, tmp_path / "alone", device)
    for params in run_ranks(muon_steps, 2, tmp_path / "ranks", device):
        for i, (p, q) in enumerate(zip(params, alone)):
            assert torch.equal(p, q), f"parameter {i}"


# ---------------------------------------------------------------------------
# whole runs


@pytest.mark.parametrize("before", ["device", "cpu"])
@pytest.mark.parametrize("after", ["device", "cpu"])
def test_a_run_goes_on_on_any_device(before, after, tiny, device):
    kinds = {"device": device.type, "cpu": "cpu"}
    # math: the backward passes of other kernels may add in any order, and so give other bits
    settings = {**tiny, "save_every": 3, "attention": "math"}
    whole = main(Hyperparameters(**{**settings, "device": kinds[before], "run_id": "whole"}))
    settings["resume"] = f"{tiny['log_dir']}/whole/state_step000003.pt"
    resumed = main(Hyperparameters(**{**settings, "device": kinds[after], "run_id": "resumed"}))
    assert resumed == (whole if before == after else pytest.approx(whole, abs=1e-2))


LITTLE_MEMORY = """
import sys
import torch
import train_gpt2

share = 2**30 / torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(share, 0)
train_gpt2.command(sys.argv[1:])
"""


def test_memory_that_does_not_suffice_names_the_size_to_give(tiny, device):
    """4 GiB of activations in 1 GiB: 2^18 tokens, 2 layers of 128."""
    if device.type == "cpu":
        pytest.skip("host memory: tests/test_survive.py")
    changes = {"n_embd": 128, "batch_size": 2**14, "device_batch_size": 2**14, "device": "cuda"}
    settings = {**tiny, **changes, "allow_repeat": True}
    command = [sys.executable, "-c", LITTLE_MEMORY, *(f"--{k}={v}" for k, v in settings.items())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    sentence = f"train_gpt2.py: out of memory: pass --device_batch_size={2**13}, the result stays"
    assert done.stderr.count(sentence) == 1 and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("attention", ["auto", "math"])
def test_the_log_names_device_and_kernel(attention, tiny, device):
    changes = {"n_embd": 128, "compile": True, "attention": attention, "run_id": "one"}
    args = Hyperparameters(**{**tiny, **changes, "device": device.type})
    with attention_kernel(args, device) as kernel:
        assert kernel == "math" or attention == "auto"
    val_loss = main(args)
    text = open(f"{tiny['log_dir']}/one.txt").read()
    name = describe.environment(device)[1]
    assert device.type == "cpu" or name == torch.cuda.get_device_name(device)
    line = f"device:{name} processes:1 threads:{torch.get_num_threads()} "
    assert f"\n{line}products:{matmul_dtype(device)} attention:{kernel}\n" in text
    assert "\ncompile: graphs:2 graph_breaks:0 recompiles:0\n" in text
    assert int(re.search(r"\ntokens/s:\d+ peak_memory:(\d+)MiB", text)[1]) > 0
    assert f"\nresult val_loss:{val_loss:.4f} " in text and val_loss < 4.1  # ln 64 = 4.16
