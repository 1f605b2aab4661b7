"""Muon on DTensors: bit-identical to Muon without them, on any mesh, and through checkpoints."""

import copy
import functools
import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import run_ranks
from test_file import ExampleModel, run_examples_of_readme
from test_muon import Muon, make_parameters
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

# On 3 or 4 ranks, some shards of the smallest are empty. Two are convolution kernels, and the last
# is a stack of matrices.
SHAPES = [(33, 20), (2, 33), (70, 2), (70, 70), (64, 17), (3, 1), (1, 5), (33, 20), (33, 20)]
SHAPES += [(5, 4, 3, 3), (1, 6, 2, 2), (3, 12, 10)]
OPTIONS = {
    "plain": dict(weight_decay=1.0),
    "NorMuon and cautious decay": dict(weight_decay=1.0, beta2=0.95, cautious=True),
    "float32 without momentum": dict(momentum=0.0, dtype=torch.float32),
}


def make_mesh(*shape):
    """Return a mesh of all ranks, with one or two dimensions."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])


def gradient(p, step, i):
    """Return the gradient of parameter number i in a step: some are missing, and some are 0."""
    if (step + i) % 5 == 0 and step > 0:
        return None
    generator = torch.Generator().manual_seed(1000 * step + i)
    return torch.randn(p.shape, generator=generator) * (step != 4)


def as_partial_sum(grad):
    """Return a gradient that the ranks still have to add up: one rank has all of it."""
    mesh, whole = grad.device_mesh, grad.full_tensor()
    local = whole if dist.get_rank() == 0 else torch.zeros_like(whole)
    return DTensor.from_local(local, mesh, [Partial()] * mesh.ndim)


def step_together(plain, plain_muon, sharded, muon, steps):
    """Take steps with equal gradients; change the learning rate, as a schedule does."""
    for step in steps:
        for optimizer in plain_muon, muon:
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
        for i, (p, q) in enumerate(zip(plain, sharded)):
            p.grad = gradient(p, step, i)
            q.grad = None
            if p.grad is not None:
                q.grad = distribute_tensor(p.grad, q.device_mesh, q.placements)
                if i == 3:
                    q.grad = as_partial_sum(q.grad)
        plain_muon.step()
        muon.step()


def check_equal(plain, plain_muon, sharded, muon):
    """Check that parameters and states are equal in every bit, and placed alike."""
    for p, q in zip(plain, sharded):
        assert torch.equal(p, q.full_tensor())
        assert muon.state[q]["momentum_buffer"].placements == q.placements
        assert muon.state[q].keys() == plain_muon.state[p].keys()
        for name, value in muon.state[q].items():
            assert torch.equal(plain_muon.state[p][name], value.full_tensor()), name


def train_on_mesh(rank, world_size, shape, where, options):
    """Take six steps with sharded and with plain parameters, and compare after each three."""
    mesh = make_mesh(*shape)
    plain = make_parameters(SHAPES)
    sharded = [nn.Parameter(distribute_tensor(p.detach(), mesh, where)) for p in plain]
    plain_muon, muon = Muon(plain, 0.01, **options), Muon(sharded, 0.01, **options)
    step_together(plain, plain_muon, sharded, muon, range(3))
    check_equal(plain, plain_muon, sharded, muon)
    other = Muon(sharded, 0.5, **options)
    other.load_state_dict(copy.deepcopy(muon.state_dict()))
    step_together(plain, plain_muon, sharded, other, range(3, 6))
    check_equal(plain, plain_muon, sharded, other)


def with_all_options(rank, world_size, function, *arguments):
    """Call a function once for each of OPTIONS, in the same processes."""
    for name, options in OPTIONS.items():
        print(f"Muon's options: {name}", flush=True)
        function(rank, world_size, *arguments, options)


@pytest.mark.parametrize(
    "shape, where",  # of the mesh, and placements on it
    [
        ((2,), [Shard(0)]), ((3,), [Shard(0)]), ((3,), [Shard(1)]),
        ((2,), [Replicate()]), ((2, 2), [Replicate(), Shard(0)]), ((2, 2), [Shard(0), Shard(1)]),
    ],
)  # fmt: skip
def test_sharded_parameters_get_the_bits_of_whole_ones(shape, where, tmp_path):
    ranks = math.prod(shape)
    run_ranks(with_all_options, ranks, tmp_path / "ranks", train_on_mesh, shape, where)


def steps_of_a_mixed_group(rank, world_size):
    """Sharded and whole parameters share a group; small matrices of one shape take turns."""
    mesh = make_mesh(world_size)
    plain = make_parameters(SHAPES[:4])
    plain += [nn.Parameter(torch.full((12, 6), 0.1 * i)) for i in range(5)]
    mixed = [nn.Parameter(p.detach().clone()) for p in plain]
    for i in 1, 2, 4, 5, 6, 7, 8:
        mixed[i] = nn.Parameter(distribute_tensor(plain[i].detach(), mesh, [Shard(0)]))
    muon = Muon(mixed, 0.01, process_group=dist.group.WORLD, beta2=0.9)
    plain_muon = Muon(plain, 0.01, beta2=0.9)
    for step in range(3):
        for i, (p, q) in enumerate(zip(plain, mixed)):
            p.grad = gradient(p, 0, 10 * step + i)
            whole = not hasattr(q, "placements")
            q.grad = p.grad if whole else distribute_tensor(p.grad, mesh, [Shard(0)])
        plain_muon.step()
        muon.step()
    for i, (p, q) in enumerate(zip(plain, mixed)):
        assert torch.equal(p, full(q)), i


def steps_with_tensor_parallelism(rank, world_size, options):
    """Split MLPs with tensor parallelism and then with FSDP2; no shard ends where a block ends."""
    mesh = make_mesh(2, 2)
    torch.manual_seed(0)
    linear = functools.partial(nn.Linear, bias=False)
    mlps = nn.Sequential(*[nn.Sequential(linear(20, 38), linear(38, 20)) for _ in range(3)])
    plain = [nn.Parameter(p.detach().clone()) for p in mlps.parameters()]
    for mlp in mlps:
        parallelize_module(mlp, mesh["b"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(mlp, mesh=mesh["a"])
    fully_shard(mlps, mesh=mesh["a"])
    sharded = [*mlps.parameters()]
    strided, shard = sharded[0].placements
    assert (type(strided).__name__, strided.dim, shard) == ("_StridedShard", 0, Shard(0))
    assert sharded[1].placements == (Shard(0), Shard(1))
    muons = []
    for params in plain, sharded:
        groups = [dict(params=params[::2], blocks=[7, 31]), dict(params=params[1::2], blocks=4)]
        muons.append(Muon(groups, 0.01, **options))
    for _ in range(3):
        inputs = torch.randn(2, 8, 20)[mesh.get_local_rank("a")]
        mlps(inputs).square().sum().backward()
        for p, q in zip(plain, sharded):
            p.grad = q.grad.full_tensor()
        for muon in muons:
            muon.step()
        mlps.zero_grad()
    check_equal(plain, muons[0], sharded, muons[1])


def test_fsdp_with_tensor_parallelism_gets_the_bits_of_whole_parameters(tmp_path):
    run_ranks(with_all_options, 4, tmp_path / "ranks", steps_with_tensor_parallelism)


def step_with_the_stack_of_an_older_torch(rank, world_size):
    mesh = make_mesh(2, 2)
    layer = nn.Sequential(nn.Linear(4, 8, bias=False))
    parallelize_module(layer, mesh["b"], {"0": ColwiseParallel()})
    fully_shard(layer, mesh=mesh["a"])
    p = layer[0].weight
    p.grad = torch.zeros_like(p)
    stack = torch.stack

    def stack_without_split_factor(tensors):
        local = stack([tensor.to_local() for tensor in tensors])
        return DTensor.from_local(local, mesh, [Shard(1), Shard(1)])

    muon = Muon([p], 0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "stack", stack_without_split_factor)
        with pytest.raises(RuntimeError, match=r"lost the order of shards: use torch 2\.13"):
            muon.step()


def test_rows_that_torch_would_mix_up_are_refused(tmp_path):
    """torch.stack of an older torch turned _StridedShard into Shard."""
    run_ranks(step_with_the_stack_of_an_older_torch, 4, tmp_path / "ranks")


def step_beside_a_mesh(rank, world_size):
    """Rank 2 holds no part of the parameter."""
    mesh = dist.device_mesh.DeviceMesh("cpu", [0, 1])
    (plain,) = make_parameters([(6, 4)])
    sharded = nn.Parameter(distribute_tensor(plain.detach(), mesh, [Shard(0)]))
    for p in plain, sharded:
        p.grad = p.detach().clone()
        Muon([p], lr=0.1, beta2=0.9).step()
    assert len(sharded.to_local()) == (3 if rank < 2 else 0)
    if rank < 2:
        assert torch.equal(plain, full(sharded))


def test_a_rank_outside_the_mesh_does_nothing(tmp_path):
    run_ranks(step_beside_a_mesh, 3, tmp_path / "ranks")


def test_sharded_and_whole_parameters_may_share_a_group(tmp_path):
    run_ranks(steps_of_a_mixed_group, 3, tmp_path / "ranks")


# ---- A transformer, as people train it -----------------------------------------------------------
def build(mesh=None, policy=None):
    """Return a transformer, sharded if there is a mesh, and its optimizers."""
    torch.manual_seed(0)
    block = functools.partial(nn.TransformerEncoderLayer, dropout=0.0, batch_first=True)
    blocks = [block(24, 3, 40) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(50, 24), *blocks, nn.Linear(24, 50))
    if mesh is not None:
        more = {} if policy is None else dict(mp_policy=policy)
        for block in model[1:-1]:
            fully_shard(block, mesh=mesh, **more)
        fully_shard(model, mesh=mesh, **more)
    matrices = [p for p in model[1:-1].parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not q for q in matrices)]
    muon = Muon(matrices, lr=0.005, weight_decay=0.1, beta2=0.95, cautious=True)
    return model, [muon, torch.optim.AdamW(others, lr=0.003)]


def train_transformer(model, optimizers, steps, ranks, world_size):
    """Train on the micro-batches of some ranks, two each, with clipped gradients.

    Return the mean loss of each step.
    """
    shape = 2, world_size, 4, 9
    tokens = torch.randint(50, shape, generator=torch.Generator().manual_seed(0))
    parts = tokens[:, ranks].flatten(0, 1)
    means = []
    for _ in steps:
        losses = []
        for i, part in enumerate(parts):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(i == len(parts) - 1)
            logits = model(part[:, :-1]).float()
            losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()))
            (losses[-1] / len(parts)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        means.append(torch.stack(losses).detach().mean())
    return torch.stack(means)


def full(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "placements") else tensor


def compare_transformers(rank, world_size, shape, mixed):
    """Train one copy with fully_shard, and one in this process on the parts of all ranks."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else None
    model, optimizers = build(make_mesh(*shape), policy)
    losses = train_transformer(model, optimizers, range(4), [rank], world_size)
    plain, plain_optimizers = build()
    ranks = list(range(world_size))
    expected = train_transformer(plain, plain_optimizers, range(4), ranks, world_size)
    rate = 0.005
    for (name, p), q in zip(plain.named_parameters(), model.parameters()):
        difference = (p - full(q)).detach().square().mean().sqrt()
        assert difference < (0.5 if mixed else 0.05) * rate * 4, name
    dist.all_reduce(losses)
    torch.testing.assert_close(losses / world_size, expected, rtol=0.02 if mixed else 1e-3, atol=0)
    assert expected[-1] < expected[0] - 0.1


@pytest.mark.parametrize("shape, mixed", [((2,), True), ((2, 2), False)])
def test_a_transformer_trains_with_fully_shard_as_without(shape, mixed, tmp_path):
    run_ranks(compare_transformers, math.prod(shape), tmp_path / "ranks", shape, mixed)


# ---- Checkpoints ---------------------------------------------------------------------------------
def state_of(model, optimizers):
    optimizers_state = get_optimizer_state_dict(model, optimizers)
    return {"model": get_model_state_dict(model), "optimizers": optimizers_state}


def tensors_of(model, optimizers):
    """Return the weights and the state of Muon, whole."""
    states = [optimizers[0].state[p] for p in optimizers[0].param_groups[0]["params"]]
    tensors = [*model.parameters(), *(value for state in states for value in state.values())]
    return [full(tensor) for tensor in tensors]


def save_transformer(rank, world_size, folder):
    """Train for two steps, save, and train on; return what was saved, and the end."""
    model, optimizers = build(make_mesh(world_size))
    train_transformer(model, optimizers, range(2), [rank], world_size)
    dcp.save(state_of(model, optimizers), checkpoint_id=folder)
    saved = copy.deepcopy(tensors_of(model, optimizers))
    full_state = StateDictOptions(full_state_dict=True)
    whole = get_optimizer_state_dict(model, optimizers, options=full_state)
    assert len(whole["state"]) == len([*model.parameters()])
    train_transformer(model, optimizers, range(2), [rank], world_size)
    return saved, tensors_of(model, optimizers)


def load_transformer(rank, world_size, folder):
    """Load what save_transformer saved, and train on; return what was loaded, and the end."""
    model, optimizers = build(make_mesh(world_size))
    state = state_of(model, optimizers)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizers, state["optimizers"])
    loaded = copy.deepcopy(tensors_of(model, optimizers))
    train_transformer(model, optimizers, range(2), [rank], world_size)
    return loaded, tensors_of(model, optimizers)


@pytest.mark.parametrize("saving, loading", [(2, 2), (2, 3)])
def test_a_distributed_checkpoint_continues_on_any_number_of_ranks(saving, loading, tmp_path):
    """With the same number of ranks, it goes on to the same bits as without an interruption."""
    folder = str(tmp_path / "checkpoint")
    saved, end = run_ranks(save_transformer, saving, tmp_path / "saving", folder)[0]
    for loaded, end_here in run_ranks(load_transformer, loading, tmp_path / "loading", folder):
        assert all(map(torch.equal, loaded, saved))
        assert all(map(torch.equal, end_here, end)) == (saving == loading)


def save_and_load_replicated(rank, world_size, folder):
    """Whole parameters, on ranks that each compute a part: get_ and set_optimizer_state_dict."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    muon = Muon(model.parameters(), 0.1, process_group=dist.group.WORLD)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.size(0)))
    muon.step()
    muon.zero_grad()
    dcp.save({"muon": get_optimizer_state_dict(model, muon)}, checkpoint_id=folder)
    fresh = Muon(model.parameters(), 0.1, process_group=dist.group.WORLD)
    state = {"muon": get_optimizer_state_dict(model, fresh)}
    assert not any(tensor.any() for p in model.parameters() for tensor in fresh.state[p].values())
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(model, fresh, state["muon"])
    for p in model.parameters():
        assert torch.equal(fresh.state[p]["momentum_buffer"], muon.state[p]["momentum_buffer"])


def test_whole_parameters_too_go_through_a_distributed_checkpoint(tmp_path):
    """One of three ranks has no matrix to orthogonalize. It hung there, or lost momenta."""
    folder = str(tmp_path / "checkpoint")
    run_ranks(save_and_load_replicated, 3, tmp_path / "ranks", folder)


# ---- README and one rank -------------------------------------------------------------------------
def run_the_ddp_example_of_readme(rank, world_size):
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(ExampleModel())
    build_optimizers = run_examples_of_readme()["build_optimizers"]
    muon, adamw = build_optimizers(model.module, dist.group.WORLD)
    model(torch.arange(8) + rank).square().sum().backward()
    muon.step()
    adamw.step()
    return model.module.blocks[0].weight.detach(), muon.state_dict()["state"][0]["momentum_buffer"]


def test_the_ddp_example_in_readme_runs(tmp_path):
    results = run_ranks(run_the_ddp_example_of_readme, 2, tmp_path / "ranks")
    assert all(map(torch.equal, *results))


def run_the_fsdp_example_of_readme(rank, world_size):
    model, mesh = ExampleModel(), make_mesh(world_size)
    for module in *model.blocks, model:
        fully_shard(module, mesh=mesh)
    optimizers = run_examples_of_readme()["build_optimizers"](model)
    before = [full(p).clone() for p in model.parameters()]
    model(torch.arange(8)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert not any(torch.equal(full(p), old) for p, old in zip(model.parameters(), before))


def test_the_fsdp_example_in_readme_runs(tmp_path):
    run_ranks(run_the_fsdp_example_of_readme, 2, tmp_path / "ranks")


def test_a_mesh_of_one_rank_works_too(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    try:
        with_all_options(0, 1, train_on_mesh, (1,), [Shard(0)])
    finally:
        dist.destroy_process_group()
