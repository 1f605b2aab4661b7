"""Compile training steps for an H100 without one; print JSON for tests/test_plan.py.

    python tests/gpu_step.py compile      # what was compiled, by preset
    python tests/gpu_step.py interpret    # losses and gradients against eager, by model

interpret runs the generated kernels in Triton's interpreter on the CPU. It does so in float32,
because the interpreter truncates where a GPU rounds to bfloat16.
"""

import contextlib
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

if "interpret" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "records" / "tools"))
import plan  # before torch
import torch
import torch.nn.functional as F
from gpu_compiler import FOLDER, GPUS, on_gpu

import train_gpt2
from train_gpt2 import BLOCK

# Few layers at full width, on 8 sequences of 1,024 tokens. In the modern model, their windows are
# short and long in turn, and the last attention reads a saved input.
SIZES = ["--batch_size=8", "--device_batch_size=8", "--sequence_length=1024"]
PRESETS = {"record7": ["--n_layer=2"], "modern": ["--n_layer=4"]}
SMALL = dict(n_embd=32, n_head=1, vocab_size=64, device_batch_size=2)
MODELS = {
    "record7": dict(n_layer=1, sequence_length=16),
    "modern": dict(
        model="modern", n_layer=8, sequence_length=8, max_ngram=3, ngram_rows=500,
        ngram_dropout=0.5,
    ),
}  # fmt: skip


def summary(preset):
    """Compile and plan a step of a preset, with SIZES; return what the tests check."""
    args = train_gpt2.parse_args([f"--preset={preset}", *SIZES, *PRESETS[preset]])
    clock, _, _, graphs = plan.planned(args, GPUS["H100"], world_size=1)
    calls = re.compile(r"^ .*(?:extern_kernels|torch\.ops\.aten)\.(\w+)[.\w]*\(", re.M)
    flops = sum(used["flops"] for part, used in clock.usage.items() if part != "Newton-Schulz")
    step = {"flops": flops, "visible blocks": clock.visible, "graphs": []}
    for graph in graphs:
        row = dict(kind=graph.kind, external=sorted(set(calls.findall(graph.code))))
        row["launches"] = sum(kernel.launches for kernel in graph.kernels)
        row["bytes"] = sum(kernel.launches * kernel.bytes for kernel in graph.kernels)
        row["spilling"] = [kernel.kind for kernel in graph.kernels if min(kernel.spills)]
        row["64-bit indices"] = re.findall(r"numel': 'i64'", graph.code)
        step["graphs"].append(row)
    return step


def visible_blocks_twice():
    """Return (planned, exact): visible blocks of random documents, exact ones from the masks."""
    steps = plan.SAMPLED - 1  # so that the plan samples each step
    args = train_gpt2.Hyperparameters(
        model="modern", window=480, document_token=0, sequence_length=1024, num_iterations=steps
    )
    sequences = torch.randint(150, (2, args.sequence_length))
    documents = (sequences == args.document_token).cumsum(1)
    exact = []
    for divisor in 1, 2:
        counts = []
        for step in range(steps + 1):
            window = train_gpt2.window_blocks_at(step, args) // divisor
            mask = train_gpt2.attention_mask(documents, max(1, window))
            counts.append(F.max_pool2d(mask.float(), BLOCK).sum(-1).mean())
        exact.append(torch.stack(counts).mean().item())
    return plan.visible_blocks(args, sequences.numpy()), exact


# ---- The interpreter ----------------------------------------------------------------------------
def mend_interpreter():
    """Work around two bugs in the interpreter of Triton 3.7.1."""
    import numpy as np
    import triton.language as tl
    from torch._inductor.runtime import triton_helpers
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    # The interpreter replaces tl's functions while a kernel runs, so they are looked up then.
    triton_helpers.libdevice = SimpleNamespace(
        rsqrt=lambda x: tl.rsqrt(x), exp=lambda x: tl.exp(x), log=lambda x: tl.log(x)
    )
    atomic = InterpreterBuilder.create_atomic_rmw

    def create_atomic_rmw(self, operation, pointer, value, mask, *rest):
        # The interpreter misreads a one-row mask that was broadcast, so pass a copy.
        mask = TensorHandle(np.array(mask.data, order="C", copy=True), mask.dtype)
        return atomic(self, operation, pointer, value, mask, *rest)

    InterpreterBuilder.create_atomic_rmw = create_atomic_rmw


def attention(query, key, value, *rest, scale=None):
    out = torch.empty_like(query)
    out.copy_(F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale))
    zero = torch.zeros((), dtype=torch.int64)
    log_sums = torch.zeros(*query.shape[:-1], 1)  # attention_backward needs none
    return out, log_sums, None, None, 0, 0, zero, zero, None


def attention_backward(gradient, query, key, value, *rest, scale=None):
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    with torch.enable_grad():
        out = F.scaled_dot_product_attention(*leaves, is_causal=True, scale=scale)
    gradients = torch.autograd.grad(out, leaves, gradient)
    return [torch.empty_like(x).copy_(g) for x, g in zip(leaves, gradients)]


def runnable(graph):
    """Return a function that runs a graph's code on CPU tensors."""
    code = graph.code.replace("_empty_strided_cuda", "_empty_strided_cpu")
    code = code.replace("torch.cuda._DeviceGuard(0)", "nullcontext()")
    call = r"torch\.ops\.aten\._scaled_dot_product_cudnn_(attention\w*)\.default\("
    code = re.sub(call, r"\1(", code)
    path = Path(FOLDER.name, f"{graph.kind}_{id(graph)}.py")
    path.write_text(code)  # Triton reads the source of kernels
    scope = dict(__name__=path.stem, __file__=str(path), nullcontext=contextlib.nullcontext)
    scope |= dict(attention=attention, attention_backward=attention_backward)
    exec(compile(code, path, "exec"), scope)
    return scope["call"]


def compare_with_eager(args):
    """Return {name: relative difference} of the losses and of all gradients."""
    with on_gpu(args, torch.float32) as (_, graphs):
        validation, forward, backward = graphs
    model = train_gpt2.build_model(args, torch.float32)
    for p in model.parameters():
        if not p.all():  # weights that start as zeros would hide faults
            p.data += 0.02 * torch.randn_like(p)
    shape = args.device_batch_size, args.sequence_length
    inputs, targets = (torch.randint(args.vocab_size, shape) for _ in range(2))
    targets[0, :3] = -1
    given = {"l_inputs_": inputs, "l_targets_": targets}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        given[f"l_self_{name.replace('.', '_')}_"] = tensor

    def names_of(graph):
        # An input is called l_self_modules_h_modules_0_..._parameters_weight_, for example.
        return [re.sub("(modules|parameters|buffers)_", "", name) for name in graph.inputs]

    def values_of(graph):  # a validation has no seed of dropout
        return [given[name].detach() for name in names_of(graph)]

    names = names_of(forward)
    [validation_loss] = runnable(validation)(values_of(validation))
    loss, *saved = runnable(forward)(values_of(forward))
    gradients = runnable(backward)([*saved, torch.ones(())])
    with torch.no_grad():
        pairs = {"validation": (validation_loss, model.eval()(inputs, targets))}
    exact = model.train()(inputs, targets)
    exact.backward()
    pairs["loss"] = loss, exact
    for name, gradient in zip(names, gradients):
        if given[name].requires_grad:
            pairs[name] = gradient, given[name].grad.to_dense()
    return {name: ((a - b).norm() / b.norm()).item() for name, (a, b) in pairs.items()}


def main(mode):
    """Print the result of a mode."""
    if mode == "compile":
        result = {preset: summary(preset) for preset in PRESETS}
        result["visible blocks"] = visible_blocks_twice()
    else:
        mend_interpreter()
        torch.default_generator.manual_seed(0)
        result = {}
        for name, settings in MODELS.items():
            result[name] = compare_with_eager(train_gpt2.Hyperparameters(**SMALL, **settings))
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
