"""The levers of tests/bench/bench_step.py. Each turns one thing of the training step on or off.

A lever is a function of (train_gpt2, run). It changes the module before a model is made, or the
run: run.settings (a dict of Hyperparameters), run.attention (the kernel allowed; None for all),
run.plain and run.plain_compiled (the step of tests/plain.py). Without the device or the dtype that
a lever needs, it is not measured. Levers that only concern CPUs or several processes were measured
once and are gone: see records/2026-11-21_Step.
"""

import inspect
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend

LEVERS = {}  # name: lever, in the order of the table


def lever(name, needs="", **environment):
    """Return a decorator that adds a function to LEVERS, with variables for its process."""

    def add(change):
        LEVERS[name] = SimpleNamespace(
            name=name, needs=needs, processes=1, environment=environment, change=change
        )
        return change

    return add


def rewrite(train_gpt2, name, *replacements):
    """Define a class or function of the module again, with pieces of its source replaced."""
    source = inspect.getsource(getattr(train_gpt2, name))
    for old, new in replacements:
        assert source.count(old) == 1, f"{name} no longer holds {old!r} once"
        source = source.replace(old, new)
    exec(source, vars(train_gpt2))


@lever("script")
@lever("expandable segments", "cuda", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
def unchanged(train_gpt2, run):
    pass


@lever("plain")
def plain_step(train_gpt2, run):
    run.plain = True


@lever("plain compiled")
def plain_compiled(train_gpt2, run):
    run.plain = run.plain_compiled = True


@lever("eager")
def eager(train_gpt2, run):
    run.settings["compile"] = False


# ---- Model --------------------------------------------------------------------------------------
def attention(name, backend, needs=""):
    """Add a lever that allows only this attention kernel."""

    def change(train_gpt2, run):
        run.attention = backend

    lever(f"{name} attention", needs)(change)


attention("cudnn", SDPBackend.CUDNN_ATTENTION, "cuda")
attention("flash", SDPBackend.FLASH_ATTENTION)
attention("efficient", SDPBackend.EFFICIENT_ATTENTION, "cuda")


@lever("one product")
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


def chunks(count):
    """Add a lever that computes the head's loss in so many chunks of tokens."""
    number = "min(max_chunks, max(1, len(x) // min_chunk_size))", f"{count}"

    def change(train_gpt2, run):
        rewrite(train_gpt2, "ChunkedCrossEntropy", number)

    lever(f"{count} chunks")(change)


for count in (1, 2, 4, 8, 16):
    chunks(count)


if hasattr(F, "linear_cross_entropy"):  # since torch 2.13

    @lever("F.linear_cross_entropy")
    def fused_loss(train_gpt2, run):
        def apply(x, weight, targets, softcap, needs_grad):
            assert softcap == 0, "this loss has no soft-cap"
            return F.linear_cross_entropy(x, weight.type_as(x), targets, ignore_index=-1).float()

        train_gpt2.ChunkedCrossEntropy = SimpleNamespace(apply=apply)


def smaller(divisor):
    """Add a lever with a smaller device_batch_size, so with as many times the micro-batches."""

    def change(train_gpt2, run):
        run.settings["device_batch_size"] = max(1, run.settings["device_batch_size"] // divisor)

    lever(f"micro-batch / {divisor}")(change)


smaller(2)
smaller(4)


# ---- Compiler -----------------------------------------------------------------------------------
def compiling(name, needs="", mode=None, budget=None, tuning=False):
    """Add a lever that compiles the model with a mode, or another option of the compiler."""

    def compile_model(gpt, **options):
        if budget is not None:
            functorch_config.activation_memory_budget = budget
        if tuning:
            torch._inductor.config.coordinate_descent_tuning = True
        nn.Module.compile(gpt, mode=mode, **options)

    def change(train_gpt2, run):
        train_gpt2.GPT.compile = compile_model

    lever(name, needs)(change)


compiling("max-autotune", mode="max-autotune-no-cudagraphs")
compiling("reduce-overhead", "cuda", mode="reduce-overhead")  # CUDA graphs
compiling("coordinate descent", "cuda", tuning=True)
compiling("most kept", "cuda", budget=0.7)  # of the activations, as on CPUs
compiling("half kept", budget=0.5)


@lever("Muon compiled")
def muon_compiled(train_gpt2, run):
    train_gpt2.zeropower_via_newtonschulz5 = torch.compile(
        train_gpt2.zeropower_via_newtonschulz5, dynamic=False, fullgraph=True
    )
