"""The levers of tests/bench/bench_step.py. Each turns one thing of the training step on or off.

A lever is a function of (train_gpt2, run). It changes the module before a model is made, or the
run: run.settings (a dict of Hyperparameters), run.attention (a context for its kernels), run.plain
and run.plain_compiled (the step of tests/plain.py). A lever that needs a GPU is not measured
without one. Levers that were measured once and brought nothing are gone: see
records/2026-11-21_Step.
"""

import inspect
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel


def rewrite(train_gpt2, name, *replacements):
    """Define a class or function of the module again, with pieces of its source replaced."""
    source = inspect.getsource(getattr(train_gpt2, name))
    for old, new in replacements:
        assert source.count(old) == 1, f"{name} no longer holds {old!r} once"
        source = source.replace(old, new)
    exec(source, vars(train_gpt2))


def unchanged(train_gpt2, run):
    pass


def plain(train_gpt2, run, compiled=False):
    run.plain = True
    run.plain_compiled = compiled


def eager(train_gpt2, run):
    run.settings["compile"] = False


def attention(train_gpt2, run, backend):
    """Allow only this attention kernel."""
    run.attention = sdpa_kernel(backend)


def one_product(train_gpt2, run):
    """Compute q, k and v by one product, with their weights side by side."""
    weights = "torch.cat([self.c_q.weight, self.c_k.weight, self.c_v.weight]).type_as(x)"
    rewrite(
        train_gpt2,
        "CausalSelfAttention",
        ("self.c_q(x)", f"(qkv := F.linear(x, {weights}).chunk(3, -1))[0]"),
        ("self.c_k(x)", "qkv[1]"),
        ("self.c_v(x)", "qkv[2]"),
    )


def chunks(train_gpt2, run, count):
    """Compute the head's loss in so many chunks of tokens."""
    number = "min(max_chunks, max(1, len(x) // min_chunk_size))"
    rewrite(train_gpt2, "ChunkedCrossEntropy", (number, f"{count}"))


def fused_loss(train_gpt2, run):
    def apply(x, weight, targets, softcap, needs_grad):
        assert softcap == 0, "this loss has no soft-cap"
        return F.linear_cross_entropy(x, weight.type_as(x), targets, ignore_index=-1).float()

    train_gpt2.ChunkedCrossEntropy = SimpleNamespace(apply=apply)


def half_micro_batch(train_gpt2, run):
    run.settings["device_batch_size"] = max(1, run.settings["device_batch_size"] // 2)


def compiling(train_gpt2, run, mode=None, budget=None, option=None):
    """Compile the model with a mode, or with an option of Inductor turned on."""

    def compile_model(gpt, **options):
        if budget is not None:
            functorch_config.activation_memory_budget = budget
        if option is not None:
            setattr(torch._inductor.config, option, True)
        nn.Module.compile(gpt, mode=mode, **options)

    train_gpt2.GPT.compile = compile_model


def muon_compiled(train_gpt2, run):
    train_gpt2.zeropower_via_newtonschulz5 = torch.compile(
        train_gpt2.zeropower_via_newtonschulz5, dynamic=False, fullgraph=True
    )


LEVERS = {  # in the order of the table
    "script": unchanged,
    "expandable segments": unchanged,
    "plain": plain,
    "plain compiled": partial(plain, compiled=True),
    "eager": eager,
    "cudnn attention": partial(attention, backend=SDPBackend.CUDNN_ATTENTION),
    "flash attention": partial(attention, backend=SDPBackend.FLASH_ATTENTION),
    "efficient attention": partial(attention, backend=SDPBackend.EFFICIENT_ATTENTION),
    "one product": one_product,
    "1 chunks": partial(chunks, count=1),
    "4 chunks": partial(chunks, count=4),
    "8 chunks": partial(chunks, count=8),
    "micro-batch / 2": half_micro_batch,
    "max-autotune": partial(compiling, mode="max-autotune-no-cudagraphs"),
    "reduce-overhead": partial(compiling, mode="reduce-overhead"),  # CUDA graphs
    "coordinate descent": partial(compiling, option="coordinate_descent_tuning"),
    "combo kernels": partial(compiling, option="combo_kernels"),  # casts in fewer launches
    "most kept": partial(compiling, budget=0.7),  # of the activations, as on CPUs
    "Muon compiled": muon_compiled,
}
if hasattr(F, "linear_cross_entropy"):  # since torch 2.13
    LEVERS["F.linear_cross_entropy"] = fused_loss

NEED_CUDA = (
    "expandable segments", "cudnn attention", "efficient attention", "reduce-overhead",
    "coordinate descent", "combo kernels", "most kept",
)  # fmt: skip
# Environment variables of a lever's process
ENVIRONMENT = {"expandable segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
