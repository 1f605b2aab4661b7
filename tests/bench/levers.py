"""The levers of tests/bench_step.py: each turns one thing of the training step on or off.

A lever is a function of (train_gpt2, run): it changes the module before a model is made, or what
`run` says about the run: settings (a dict of Hyperparameters), compile(gpt), and whether the step
is `plain`. Its decorator says what it needs, of "cuda", "cpu", "bf16", "float32" (products of the
device); the number of processes; environment variables that must be there when a process starts.
"""

from types import SimpleNamespace

import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F

LEVERS = {}  # name: lever, in the order of the table
BYTES = 2**34  # more than any tensor here: freed memory is kept, not given back to the system


def lever(name, what, needs="", processes=1, **environment):
    """Return a decorator that adds a function to LEVERS; several processes share a CPU, by gloo."""

    def add(change):
        LEVERS[name] = SimpleNamespace(
            name=name, what=what, needs="cpu" if processes > 1 and not needs else needs,
            processes=processes, environment=environment,
            change=change,
        )  # fmt: skip
        return change

    return add


def setting(name, what, needs="", **settings):
    """Add a lever that is no more than other settings."""
    lever(name, what, needs)(lambda train_gpt2, run: run.settings.update(settings))


@lever("script", "train_gpt2.py as it is")
@lever("script x2", "the same in two processes", processes=2)
def unchanged(train_gpt2, run):
    pass


@lever("plain", "float32 residual and logits, per-matrix Muon, eager: tests/plain.py")
def plain_step(train_gpt2, run):
    run.plain = True


@lever("plain compiled", "the plain model under torch.compile")
def plain_compiled(train_gpt2, run):
    run.plain = run.plain_compiled = True


# ---------------------------------------------------------------------------
# attention

setting("cudnn attention", "attention=cudnn", "cuda", attention="cudnn")
setting("flash attention", "attention=flash", "cuda", attention="flash")
setting("efficient attention", "attention=efficient", "cuda", attention="efficient")
setting("math attention", "attention=math", attention="math")


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


# ---------------------------------------------------------------------------
# residual stream, head and loss


def replaces_loss(function):
    """Return a change that takes function(x, weight, low, targets) for the head's loss."""

    def change(train_gpt2, run):
        train_gpt2.LinearCrossEntropy = SimpleNamespace(
            apply=lambda x, weight, low, targets, with_grad: function(x, weight, targets)
        )

    return change


lever("full float32 logits", "cross_entropy of all logits in float32")(
    replaces_loss(
        lambda x, weight, targets: F.cross_entropy(
            (x @ weight.type_as(x).T).float(), targets, ignore_index=-1
        )
    )
)
lever("full bf16 logits", "cross_entropy of all logits in bf16", "bf16")(
    replaces_loss(
        lambda x, weight, targets: F.cross_entropy(
            x @ weight.type_as(x).T, targets, ignore_index=-1
        ).float()
    )
)
if hasattr(F, "linear_cross_entropy"):  # since torch 2.13
    lever("F.linear_cross_entropy", "torch's own fused head and loss")(
        replaces_loss(
            lambda x, weight, targets: F.linear_cross_entropy(
                x, weight.type_as(x), targets, ignore_index=-1
            ).float()
        )
    )


def chunks(count):
    """Add a lever that computes the loss in so many chunks of tokens."""

    def change(train_gpt2, run):
        train_gpt2.CHUNK_LOGITS, train_gpt2.MAX_CHUNKS = 1, count

    lever(f"{count} chunks", f"the head's logits in {count} chunks")(change)


for count in (1, 2, 4, 8, 16, 32):
    chunks(count)


@lever("float32 residual", "the residual stream in float32, as under autocast", "bf16")
def float32_residual(train_gpt2, run):
    cast_weights, apply = train_gpt2.cast_weights, train_gpt2.LinearCrossEntropy.apply

    def cast(gpt, dtype):
        cast_weights(gpt, dtype)
        gpt.dtype = torch.float32

    def forward(self, x):
        return F.linear(x.to(torch.bfloat16), self.cast(torch.bfloat16))

    train_gpt2.cast_weights, train_gpt2.Linear.forward = cast, forward
    train_gpt2.LinearCrossEntropy = SimpleNamespace(
        apply=lambda x, weight, low, *rest: apply(
            x.to(torch.bfloat16), weight, weight.detach().to(torch.bfloat16), *rest
        )
    )


@lever("weights cast in forward", "every micro-batch casts the weights again", "bf16")
def cast_in_forward(train_gpt2, run):
    def cast_weights(gpt, dtype):
        gpt.dtype = dtype

    train_gpt2.cast_weights = cast_weights
    train_gpt2.Linear.cast = lambda self, dtype: self.weight.to(dtype)


# ---------------------------------------------------------------------------
# torch.compile

setting("eager", "no torch.compile", compile=False)


def with_options(**options):
    def change(train_gpt2, run):
        def compile_whole(gpt):
            train_gpt2.compile_whole(gpt)  # for its memory budget
            gpt.compile(dynamic=False, fullgraph=True, **options)

        run.compile = compile_whole

    return change


lever("max-autotune", "mode max-autotune-no-cudagraphs")(
    with_options(mode="max-autotune-no-cudagraphs")
)
lever("reduce-overhead", "mode reduce-overhead: CUDA graphs", "cuda")(
    with_options(mode="reduce-overhead")
)


@lever("regional", "one block compiled and reused, the head's loss compiled, the rest eager")
def regional(train_gpt2, run):
    def compile_parts(gpt):
        train_gpt2.compile_whole(gpt, enabled=False)  # for its memory budget
        for block in gpt.h:
            block.compile(dynamic=False, fullgraph=True)
        head = torch.compile(train_gpt2.LinearCrossEntropy.apply, dynamic=False, fullgraph=True)
        train_gpt2.LinearCrossEntropy = SimpleNamespace(apply=head)

    run.compile = compile_parts


@lever("compiled autograd", "the backward pass traced a second time, as one graph")
def compiled_autograd(train_gpt2, run):
    step = train_gpt2.train_step

    def train_step(*args):
        with torch._dynamo.compiled_autograd._enable(torch.compile):
            return step(*args)

    train_gpt2.train_step = train_step


def memory_budget(budget):
    """Return a change: this share of the activations at most is kept for backward."""

    def change(train_gpt2, run):
        def compile_whole(gpt):
            train_gpt2.functorch.activation_memory_budget = budget
            gpt.compile(dynamic=False, fullgraph=True)

        run.compile = compile_whole

    return change


@lever("q and k kept", "not turned again in backward: kept from before and after the turn")
def turned_once(train_gpt2, run):
    train_gpt2.checkpoint = lambda function, x, **options: function(x)


lever("all kept", "activation_memory_budget 1: nothing computed again")(memory_budget(1.0))
lever("half kept", "activation_memory_budget 0.5: attention computed again")(memory_budget(0.5))


# ---------------------------------------------------------------------------
# memory

lever(
    "expandable segments", "PYTORCH_ALLOC_CONF=expandable_segments:True", "cuda",
    PYTORCH_ALLOC_CONF="expandable_segments:True",  # the second for torch before 2.9
    PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
)(unchanged)  # fmt: skip
lever("huge pages", "THP_MEM_ALLOC_ENABLE=1", "cpu", THP_MEM_ALLOC_ENABLE="1")(unchanged)
lever(
    "kept memory", "malloc never gives memory back", "cpu",
    MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_=str(BYTES), MALLOC_TOP_PAD_="67108864",
)(unchanged)  # fmt: skip


def smaller(divisor):
    """Add a lever with a smaller device_batch_size, so with as many times the micro-batches."""

    def change(train_gpt2, run):
        run.settings["device_batch_size"] = max(1, run.settings["device_batch_size"] // divisor)

    lever(f"micro-batch / {divisor}", f"device_batch_size divided by {divisor}")(change)


for divisor in (2, 4, 8):
    smaller(divisor)


# ---------------------------------------------------------------------------
# optimizer


@lever("Muon compiled", "Newton-Schulz under torch.compile")
def muon_compiled(train_gpt2, run):
    # what mkldnn is asked there cannot be traced
    dtypes = {kind: train_gpt2.matmul_dtype(torch.device(kind)) for kind in ("cpu", "cuda")}
    train_gpt2.matmul_dtype = lambda device: dtypes[device.type]
    train_gpt2.zeropower_via_newtonschulz5 = torch.compile(
        train_gpt2.zeropower_via_newtonschulz5, dynamic=False, fullgraph=True
    )


@lever("Muon per matrix", "no batches of small matrices")
def muon_per_matrix(train_gpt2, run):
    train_gpt2.Muon.BATCH_NUMEL = 0


@lever("Muon batched", "batches of 4 whatever the matrices' size")
def muon_batched(train_gpt2, run):
    train_gpt2.Muon.BATCH_NUMEL = 2**40


@lever("foreach AdamW", "torch.optim.AdamW(foreach=True) instead of fused")
def foreach_adamw(train_gpt2, run):
    fused = torch.optim.AdamW
    torch.optim.AdamW = lambda params, **kw: fused(params, **kw | dict(fused=False, foreach=True))


# ---------------------------------------------------------------------------
# two processes


@lever("synchronous x2", "each collective waited for at once", processes=2)
def synchronous(train_gpt2, run):
    def waited(collective):
        def call(*args, async_op=False, **kw):
            collective(*args, **kw)
            return SimpleNamespace(wait=lambda: None) if async_op else None

        return call

    dist.all_reduce, dist.reduce = waited(dist.all_reduce), waited(dist.reduce)


@lever("one bucket x2", "all gradients in one flat all_reduce", processes=2)
def one_bucket(train_gpt2, run):
    def sync_gradients(optimizers):
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads])):
            grad.copy_(part.view_as(grad))

    train_gpt2.sync_gradients = sync_gradients


def in_ddp(optimize_ddp):
    """Return a change that lets DDP reduce the gradients, in buckets of 25 MB, during backward."""

    def change(train_gpt2, run):
        torch._dynamo.config.optimize_ddp = optimize_ddp
        run.compile = lambda gpt: gpt.compile(dynamic=False)
        train_step = train_gpt2.train_step

        def ddp_step(gpt, optimizers, inputs, targets, *rest):
            if run.ddp is None:
                run.ddp = torch.nn.parallel.DistributedDataParallel(gpt)
                train_gpt2.sync_gradients = scale
            return train_step(run.ddp, optimizers, inputs, targets, *rest)

        def scale(optimizers):  # DDP means over the ranks, train_step's losses are already shares
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        p.grad.mul_(dist.get_world_size())

        train_gpt2.train_step = ddp_step

    return change


lever("DDP whole x2", "DDP, buckets of 25 MB, optimize_ddp=False", "float32", 2)(in_ddp(False))
lever("DDP split x2", "the same, the graph split at the buckets", "float32", 2)(
    in_ddp("ddp_optimizer")
)
