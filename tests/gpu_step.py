"""Compile a training step for an H100 without one; print JSON for tests/test_plan.py.

    python tests/gpu_step.py compile [--field=value ...]      # what was compiled
    python tests/gpu_step.py compile_for_all ...              # for sm_80, sm_89 and sm_100, too
    python tests/gpu_step.py interpret [--field=value ...]    # loss and gradients against eager

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

MODE, *OPTIONS = sys.argv[1:]
if MODE == "interpret":
    os.environ["TRITON_INTERPRET"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "records" / "tools")]
import gpu_compiler  # noqa: E402  before torch
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import train_gpt2  # noqa: E402


def compile_step(args, dtype):
    """Return the Graphs of a training step."""
    with gpu_compiler.on_gpu(lambda: train_gpt2.GPT(args, dtype)) as (model, graphs):
        if model.ngrams is not None:
            width = model.ngrams.weight.size(1)

            def forward(inputs):  # stands for the table, which is not compiled
                return torch.empty(*inputs.shape, width, device="cuda", requires_grad=True)

            model.ngrams.forward = forward
        shape = args.device_batch_size, args.sequence_length
        tokens = torch.zeros(shape, dtype=torch.int64, device="cuda")
        loader = SimpleNamespace(next_batch=lambda: (tokens, tokens.clone()))
        # warm_up ends where it reads the loss of the first training pass.
        with contextlib.suppress(gpu_compiler.fake_tensor.DataDependentOutputException):
            train_gpt2.warm_up(model, args, loader)
    return graphs


def summary(graphs):
    """Return what the tests check; compile_for_all also compiles the kernels for other GPUs."""
    if MODE == "compile_for_all":
        for capability in (80, 89, 100):
            for graph in graphs[1:]:
                kernels = [kernel for kernel in graph.kernels if kernel.candidates]
                gpu_compiler.compile_for(kernels, capability)
    return [
        dict(
            kind=graph.kind,
            external=sorted(graph.external),
            bytes=sum(k.launches * k.bytes for k in graph.kernels if k.candidates),
            launches=sum(k.launches for k in graph.kernels if k.candidates),
            products=sum(k.flops for k in graph.kernels if k.kind == "product"),
            attention=sum(k.flops for k in graph.kernels if k.kind == "attention"),
            spilling=[
                k.name for k in graph.kernels if k.candidates and min(s for _, s in k.candidates)
            ],
            int64=[k.name for k in graph.kernels if k.int64],
        )
        for graph in graphs
    ]


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


def attention(query, key, value, bias, compute_log_sum, *rest):
    scores = query @ key.mT / query.size(-1) ** 0.5
    later = torch.ones(scores.shape[-2:]).triu(1).bool()
    scores = scores.masked_fill(later, -torch.inf)
    out = torch.empty_like(query)
    out.copy_(scores.softmax(-1) @ value)
    zero = torch.zeros((), dtype=torch.int64)
    return out, scores.logsumexp(-1, keepdim=True), None, None, 0, 0, zero, zero, None


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
    path = Path(gpu_compiler.FOLDER.name, f"{graph.kind}_on_cpu.py")
    path.write_text(code)  # Triton reads the source of kernels
    scope = dict(__name__=graph.kind, __file__=str(path), nullcontext=contextlib.nullcontext)
    scope |= dict(attention=attention, attention_backward=attention_backward)
    exec(compile(code, path, "exec"), scope)
    return scope["call"]


def relative_difference(found, exact):
    return ((found - exact).norm() / exact.norm()).item()


def compare_with_eager(graphs, args):
    """Return {name: relative difference} of the losses and of all gradients."""
    mend_interpreter()
    torch.default_generator.manual_seed(0)
    model = train_gpt2.GPT(args)
    for name, p in model.named_parameters():
        if "c_proj" in name:
            torch.nn.init.normal_(p, std=0.02)  # it begins as zeros, which would hide faults
    given = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        *modules, leaf = name.split(".")
        kind = "parameters" if isinstance(tensor, torch.nn.Parameter) else "buffers"
        key = "l_self_" + "".join(f"modules_{m}_" for m in modules) + f"{kind}_{leaf}_"
        given[key] = tensor
    shape = args.device_batch_size, args.sequence_length
    inputs, targets = (torch.randint(args.vocab_size, shape) for _ in range(2))
    targets[0, :3] = -1
    given |= dict(l_inputs_=inputs, l_targets_=targets)
    ngrams = None
    if model.ngrams is not None:
        ngrams = torch.randn(*shape, args.n_embd, requires_grad=True)
        model.ngrams.forward = lambda inputs: ngrams
    validation, forward, backward = graphs
    tensors = [given.get(name, ngrams) for name in forward.inputs]
    values = [tensor.detach() for tensor in tensors]
    [validation_loss] = runnable(validation)(list(values))
    loss, *saved = runnable(forward)(list(values))
    gradients = runnable(backward)([*saved, torch.ones(())])
    exact = model(inputs, targets)
    exact.backward()
    differences = dict(
        validation=abs(validation_loss / exact - 1).item(), loss=abs(loss / exact - 1).item()
    )
    for name, tensor, gradient in zip(forward.inputs, tensors, gradients):
        if tensor.requires_grad:
            differences[name] = relative_difference(gradient, tensor.grad)
    return differences


def main():
    args = train_gpt2.parse_args(OPTIONS)
    if MODE == "interpret":
        print(json.dumps(compare_with_eager(compile_step(args, torch.float32), args)))
    else:
        print(json.dumps(summary(compile_step(args, torch.bfloat16))))


if __name__ == "__main__":
    main()
