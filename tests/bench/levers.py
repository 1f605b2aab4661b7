"""The levers of tests/bench/bench_step.py: each turns one thing of the training step on or off.

A lever is a function of (train_gpt2, run): it changes the module before a model is made, or what
`run` says about the run: settings (a dict of Hyperparameters), attention (the kernels allowed, None
for all), and whether the step is `plain`. Its decorator says what it needs, of "cuda", "cpu",
"bfloat16", "float32" (products of the device); the number of processes; environment variables that
must be there when a process starts.
"""

import inspect
from types import SimpleNamespace

import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend

LEVERS = {}  # name: lever, in the order of the table
BYTES = 2**34  # more than any tensor here: freed memory is kept, not given back to the system


def lever(name, what, needs="", processes=1, **environment):
    """Return a decorator that adds a function to LEVERS; several processes share a CPU, by gloo."""

    def add(change):
        LEVERS[name] = SimpleNamespace(
            name=name,
            what=what,
            needs="cpu" if processes > 1 and not needs else needs,
            processes=processes,
            environment=environment,
            change=change,
        )
        return change

    return add


def setting(name, what, needs="", **settings):
    """Add a lever that is no more than other settings."""
    lever(name, what, needs)(lambda train_gpt2, run: run.settings.update(settings))


def rewrite(train_gpt2, name, *replacements):
    """Define a class or function of the module again, with pieces of its source replaced."""
    source = inspect.getsource(getattr(train_gpt2, name))
    for old, new in replacements:
        assert source.count(old) == 1, f"{name} no longer holds {old!r} once"
        source = source.replace(old, new)
    exec(source, vars(train_gpt2))


@lever("script", "train_gpt2.py as it is")
@lever("script x2", "the same in two processes", processes=2)
def unchanged(train_gpt2, run):
    pass


@lever("plain", "float32 residual and logits, eager: tests/plain.py")
def plain_step(train_gpt2, run):
    run.plain = True


@lever("plain compiled", "the plain model under torch.compile")
def plain_compiled(train_gpt2, run):
    run.plain = run.plain_compiled = True


# ---- Attention ----------------------------------------------------------------------------------
def attention(name, backend, needs=""):
    """Add a lever that allows no other attention kernel than this one."""

    def change(train_gpt2, run):
        run.attention = backend

    lever(f"{name} attention", f"sdpa_kernel({backend.name})", needs)(change)


attention("cudnn", SDPBackend.CUDNN_ATTENTION, "cuda")
attention("flash", SDPBackend.FLASH_ATTENTION)
attention("efficient", SDPBackend.EFFICIENT_ATTENTION, "cuda")
attention("math", SDPBackend.MATH)


@lever("FlexAttention", "a causal block mask instead of is_causal", "cuda")  # CPU: no backward
def flex(train_gpt2, run):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    T = run.settings["sequence_length"]
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, T, T, device="cuda")

    class Functional:
        scaled_dot_product_attention = staticmethod(
            lambda q, k, v, is_causal: flex_attention(q, k, v, block_mask=mask)
        )

        def __getattr__(self, name):
            return getattr(F, name)

    train_gpt2.F = Functional()


@lever("one product", "q, k and v by one product, of their weights side by side")
def one_product(train_gpt2, run):
    weights = "torch.cat([self.c_q.weight, self.c_k.weight, self.c_v.weight]).type_as(x)"
    rewrite(
        train_gpt2,
        "CausalSelfAttention",
        ("self.c_q(x)", f"(qkv := F.linear(x, {weights}).chunk(3, -1))[0]"),
        ("self.c_k(x)", "qkv[1]"),
        ("self.c_v(x)", "qkv[2]"),
    )


# ---- Residual stream, head and loss -------------------------------------------------------------
def loss_of_head(name, what, function, needs=""):
    """Add a lever that takes function(x, weight, targets) for the head's loss; weight as x."""

    def apply(x, weight, targets, softcap, needs_grad):
        assert softcap == 0, "the other heads have no soft-cap"
        return function(x, weight.type_as(x), targets).float()

    def change(train_gpt2, run):
        train_gpt2.ChunkedCrossEntropy = SimpleNamespace(apply=apply)

    lever(name, what, needs)(change)


def float32_logits(x, weight, targets):
    return F.cross_entropy(F.linear(x, weight).float(), targets, ignore_index=-1)


def bf16_logits(x, weight, targets):
    return F.cross_entropy(F.linear(x, weight), targets, ignore_index=-1)


def fused(x, weight, targets):
    return F.linear_cross_entropy(x, weight, targets, ignore_index=-1)


loss_of_head("full float32 logits", "cross_entropy of all logits in float32", float32_logits)
loss_of_head("full bf16 logits", "cross_entropy of all logits in bf16", bf16_logits, "bfloat16")
if hasattr(F, "linear_cross_entropy"):  # since torch 2.13
    loss_of_head("F.linear_cross_entropy", "torch's own fused head and loss", fused)


def chunks(count):
    """Add a lever that computes the loss in so many chunks of tokens."""
    number = "min(max_chunks, max(1, len(x) // min_chunk_size))", f"{count}"

    def change(train_gpt2, run):
        rewrite(train_gpt2, "ChunkedCrossEntropy", number)

    lever(f"{count} chunks", f"the head's logits in {count} chunks")(change)


for count in (1, 2, 4, 8, 16, 32):
    chunks(count)


@lever("float32 residual", "the residual stream in float32, as under autocast", "bfloat16")
def float32_residual(train_gpt2, run):
    embedding = "(self.wte(inputs) + ngrams).to(self.dtype)", "self.wte(inputs) + ngrams"
    head = "x = norm(x)", "x = norm(x).to(self.dtype)"
    rewrite(train_gpt2, "GPT", embedding, head)
    train_gpt2.CastedLinear.forward = lambda self, x: F.linear(x.bfloat16(), self.weight.bfloat16())


# ---- torch.compile ------------------------------------------------------------------------------
setting("eager", "no torch.compile", compile=False)


def compiling(name, what, function, needs=""):
    """Add a lever that takes function(train_gpt2, gpt, **options) for the model's compile()."""

    def change(train_gpt2, run):
        train_gpt2.GPT.compile = lambda gpt, **options: function(train_gpt2, gpt, **options)

    lever(name, what, needs)(change)


def in_mode(mode):
    return lambda _, gpt, **options: nn.Module.compile(gpt, mode=mode, **options)


def regional(train_gpt2, gpt, **options):
    for block in gpt.h:
        block.compile(**options)
    loss = train_gpt2.ChunkedCrossEntropy
    head = torch.compile(loss.apply, **options)
    train_gpt2.ChunkedCrossEntropy = SimpleNamespace(apply=head, chunk_loss=loss.chunk_loss)


def with_budget(budget):
    def compile_model(train_gpt2, gpt, **options):
        functorch_config.activation_memory_budget = budget
        nn.Module.compile(gpt, **options)

    return compile_model


compiling("max-autotune", "mode max-autotune-no-cudagraphs", in_mode("max-autotune-no-cudagraphs"))
compiling(
    "reduce-overhead", "mode reduce-overhead: CUDA graphs", in_mode("reduce-overhead"), "cuda"
)
compiling(
    "regional", "one block compiled and reused, the head's loss too, the rest eager", regional
)


@lever("compiled autograd", "the backward pass traced a second time, as one graph")
def compiled_autograd(train_gpt2, run):
    step = train_gpt2.train_step

    def train_step(*args):
        with torch._dynamo.compiled_autograd._enable(torch.compile):
            return step(*args)

    train_gpt2.train_step = train_step


def tuned(train_gpt2, gpt, **options):
    torch._inductor.config.coordinate_descent_tuning = True
    nn.Module.compile(gpt, **options)


compiling(
    "coordinate descent", "kernels' sizes tried out: coordinate_descent_tuning", tuned, "cuda"
)
compiling("all kept", "activation_memory_budget 1, as on GPUs: all kept", with_budget(1.0), "cpu")
compiling("most kept", "activation_memory_budget 0.7, as on CPUs", with_budget(0.7), "cuda")
compiling("half kept", "activation_memory_budget 0.5: attention computed again", with_budget(0.5))


# ---- Memory -------------------------------------------------------------------------------------
lever(
    "expandable segments",
    "PYTORCH_ALLOC_CONF=expandable_segments:True",
    "cuda",
    PYTORCH_ALLOC_CONF="expandable_segments:True",
    PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",  # for torch before 2.9
)(unchanged)
lever("huge pages", "THP_MEM_ALLOC_ENABLE=1", "cpu", THP_MEM_ALLOC_ENABLE="1")(unchanged)
lever(
    "kept memory",
    "malloc never gives memory back",
    "cpu",
    MALLOC_MMAP_MAX_="0",
    MALLOC_TRIM_THRESHOLD_=str(BYTES),
    MALLOC_TOP_PAD_="67108864",
)(unchanged)


def smaller(divisor):
    """Add a lever with a smaller device_batch_size, so with as many times the micro-batches."""

    def change(train_gpt2, run):
        run.settings["device_batch_size"] = max(1, run.settings["device_batch_size"] // divisor)

    lever(f"micro-batch / {divisor}", f"device_batch_size divided by {divisor}")(change)


for divisor in (2, 4, 8):
    smaller(divisor)


# ---- Optimizer ----------------------------------------------------------------------------------
@lever("Muon compiled", "Newton-Schulz under torch.compile")
def muon_compiled(train_gpt2, run):
    train_gpt2.zeropower_via_newtonschulz5 = torch.compile(
        train_gpt2.zeropower_via_newtonschulz5, dynamic=False, fullgraph=True
    )


@lever("foreach AdamW", "torch.optim.AdamW(foreach=True) instead of fused")
def foreach_adamw(train_gpt2, run):
    adamw = torch.optim.AdamW

    def build(*given, **named):
        return adamw(*given, **{**named, "fused": False, "foreach": True})

    torch.optim.AdamW = build


# ---- Two processes ------------------------------------------------------------------------------
@lever("synchronous x2", "Muon's collectives waited for at once", processes=2)
def synchronous(train_gpt2, run):
    all_reduce = dist.all_reduce

    def waited(tensor, async_op=False):
        all_reduce(tensor)
        return SimpleNamespace(wait=lambda: None)

    dist.all_reduce = waited


def in_ddp(optimize_ddp):
    """Return a change that lets DDP reduce the gradients, in buckets of 25 MB, during backward."""

    def change(train_gpt2, run):
        torch._dynamo.config.optimize_ddp = optimize_ddp
        warm_up, train_step = train_gpt2.warm_up, train_gpt2.train_step

        def ddp_warm_up(gpt, *rest):
            run.ddp = nn.parallel.DistributedDataParallel(gpt, broadcast_buffers=False)
            # of the model inside; the split graph cannot be a full one
            run.ddp.compile = lambda **options: gpt.compile(**{**options, "fullgraph": False})
            warm_up(run.ddp, *rest)

        def ddp_step(gpt, *rest):
            return train_step(run.ddp, *rest)

        def scale(model):  # DDP means over the ranks, train_step's losses are already shares
            for p in model.parameters():
                p.grad.mul_(dist.get_world_size())

        train_gpt2.warm_up, train_gpt2.train_step = ddp_warm_up, ddp_step
        train_gpt2.sync_gradients = scale

    return change


lever("DDP whole x2", "DDP, buckets of 25 MB, optimize_ddp=False", processes=2)(in_ddp(False))
lever("DDP split x2", "the same, the graph split at the buckets", processes=2)(
    in_ddp("ddp_optimizer")
)
