"""Compile training steps for an H100 without one; print JSON for tests/test_plan.py.

    python tests/gpu_step.py compile      # what was compiled, by preset
    python tests/gpu_step.py interpret    # losses and gradients against eager, by pieces

interpret runs the generated kernels in Triton's interpreter on the CPU, in float32: it truncates
where a GPU rounds to bfloat16.
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
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "records" / "tools")]
import gpu_compiler  # noqa: E402  before torch
import plan  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import train_gpt2  # noqa: E402

FULL_WIDTH = dict(n_layer=2, device_batch_size=8)
SMALL = dict(
    n_layer=1, n_embd=32, n_head=1, vocab_size=64, sequence_length=16,
    device_batch_size=2, batch_size=12, val_tokens=16,
)  # fmt: skip
PIECES = dict(max_ngram=3, ngram_rows=500, key_shift=1, logit_softcap=15.0)


def compile_step(args, dtype):
    """Return the Graphs of a training step."""
    torch._dynamo.reset()
    with plan.compiled(args, lambda: train_gpt2.GPT(args, dtype)) as (_, graphs):
        return graphs


def summary(graph):
    """Return what the tests check."""
    triton = [kernel for kernel in graph.kernels if kernel.spills]
    return dict(
        kind=graph.kind,
        external=sorted(graph.external),
        launches=sum(kernel.launches for kernel in triton),
        gigabytes=sum(kernel.launches * kernel.bytes for kernel in triton) / 1e9,
        flops=sum(kernel.flops for kernel in graph.kernels),
        spilling=[kernel.name for kernel in triton if min(kernel.spills)],
        int64=[kernel.name for kernel in triton if kernel.int64],
    )


def compile_for_others(graphs):
    """Compile the two kernels that move most bytes for sm_80, sm_89 and sm_100, too."""
    kernels = [kernel for graph in graphs for kernel in graph.kernels if kernel.source]
    kernels.sort(key=lambda kernel: kernel.bytes)
    for capability in (80, 89, 100):
        for kernel in kernels[-2:]:
            target = gpu_compiler.GPUTarget("cuda", capability, 32)
            gpu_compiler.triton.compile(kernel.source, target=target)


# ---- The interpreter ----------------------------------------------------------------------------
def mend_interpreter():
    """Work around two faults of Triton 3.7.1's interpreter."""
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
        """It misreads a mask of one row that was broadcast."""
        mask = TensorHandle(np.array(mask.data, order="C", copy=True), mask.dtype)
        return atomic(self, operation, pointer, value, mask, *rest)

    InterpreterBuilder.create_atomic_rmw = create_atomic_rmw


def attention(query, key, value, *rest):
    out = torch.empty_like(query)
    out.copy_(F.scaled_dot_product_attention(query, key, value, is_causal=True))
    zero = torch.zeros((), dtype=torch.int64)
    log_sums = torch.zeros(*query.shape[:-1], 1)  # attention_backward needs none
    return out, log_sums, None, None, 0, 0, zero, zero, None


def attention_backward(gradient, query, key, value, *rest):
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    with torch.enable_grad():
        out = F.scaled_dot_product_attention(*leaves, is_causal=True)
    gradients = torch.autograd.grad(out, leaves, gradient)
    return [torch.empty_like(x).copy_(g) for x, g in zip(leaves, gradients)]


def runnable(graph):
    """Return a function that runs a graph's code on CPU tensors."""
    code = graph.code.replace("_empty_strided_cuda", "_empty_strided_cpu")
    code = code.replace("torch.cuda._DeviceGuard(0)", "nullcontext()")
    call = r"torch\.ops\.aten\._scaled_dot_product_cudnn_(attention\w*)\.default\("
    code = re.sub(call, r"\1(", code)
    path = Path(gpu_compiler.FOLDER.name, f"{graph.kind}_{id(graph)}.py")
    path.write_text(code)  # Triton reads the source of kernels
    scope = dict(__name__=path.stem, __file__=str(path), nullcontext=contextlib.nullcontext)
    scope |= dict(attention=attention, attention_backward=attention_backward)
    exec(compile(code, path, "exec"), scope)
    return scope["call"]


def compare_with_eager(args):
    """Return {name: relative difference} of the losses and of all gradients."""
    validation, forward, backward = compile_step(args, torch.float32)
    model = train_gpt2.GPT(args)
    given = {}  # by the names that torch.compile gives
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "c_proj" in name:
            torch.nn.init.normal_(tensor, std=0.02)  # it begins as zeros, which would hide faults
        *modules, leaf = name.split(".")
        kind = "parameters" if isinstance(tensor, torch.nn.Parameter) else "buffers"
        key = "l_self_" + "".join(f"modules_{module}_" for module in modules)
        given[f"{key}{kind}_{leaf}_"] = tensor
    shape = args.device_batch_size, args.sequence_length
    inputs, targets = (torch.randint(args.vocab_size, shape) for _ in range(2))
    targets[0, :3] = -1
    given |= dict(l_inputs_=inputs, l_targets_=targets)
    ngrams = torch.randn(*shape, args.n_embd, requires_grad=True)  # stands for sums of the table
    if model.ngrams is not None:
        model.ngrams.forward = lambda inputs: ngrams
    tensors = [given.get(name, ngrams) for name in forward.inputs]
    values = [tensor.detach() for tensor in tensors]
    [validation_loss] = runnable(validation)(list(values))
    loss, *saved = runnable(forward)(list(values))
    gradients = runnable(backward)([*saved, torch.ones(())])
    exact = model(inputs, targets)
    exact.backward()
    pairs = {"validation": (validation_loss, exact), "loss": (loss, exact)}
    for name, tensor, gradient in zip(forward.inputs, tensors, gradients):
        if tensor.requires_grad:
            pairs[name] = gradient, tensor.grad
    return {name: ((a - b).norm() / b.norm()).item() for name, (a, b) in pairs.items()}


def main(mode):
    result = {}
    if mode == "interpret":
        mend_interpreter()
        torch.default_generator.manual_seed(0)
        for name, pieces in {"record7": {}, "all pieces": PIECES}.items():
            result[name] = compare_with_eager(train_gpt2.Hyperparameters(**SMALL, **pieces))
    else:
        for preset in "record7", "candidate":
            options = [f"--{name}={value}" for name, value in FULL_WIDTH.items()]
            args = train_gpt2.parse_args([f"--preset={preset}", *options])
            graphs = compile_step(args, torch.bfloat16)
            result[preset] = [summary(graph) for graph in graphs]
        compile_for_others(graphs)
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
