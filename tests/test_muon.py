"""Both Muons: against the singular value decomposition, and bit-identical for every world size.

Where nothing else is said, Muon is that of records/modern/muon.py, with the learning rates of
train_gpt2.py.
"""

import copy
import functools
import inspect
import io
import math
import pickle
from types import SimpleNamespace

import muon as muon_file
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import both_dtypes, run_ranks
from muon import orthogonalize
from plain import plain_newton_schulz
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import train_gpt2

Muon = functools.partial(muon_file.Muon, weight_decay=0, adjust_lr_fn="unit_rms")

# Six have the same shape. A parameter with four dimensions counts as a matrix.
SHAPES = [(16, 16), (64, 16), (16, 64), (8, 8), (4, 24), (3, 1), (1, 5), (6, 2, 3, 1)]
SHAPES = SHAPES + [(16, 16)] * 5
MATRIX_SHAPES = [(shape[0], math.prod(shape[1:])) for shape in SHAPES]


def exact_orthogonalization(G, coefficients=5 * [(3.4445, -4.7750, 2.0315)]):
    """Return U p(S) V^T in float64, where p is a composition of scalar polynomials."""
    U, S, Vh = torch.linalg.svd(G.double(), full_matrices=False)
    S = S / S.norm(dim=-1, keepdim=True)
    for a, b, c in coefficients:
        S = a * S + b * S**3 + c * S**5
    return U @ torch.diag_embed(S) @ Vh


def relative(difference, whole):
    return (difference.double().norm() / whole.double().norm()).item()


# ---- The iteration -------------------------------------------------------------------------------
def orthogonalize_in_core(G, dtype):
    """Call the function of train_gpt2.py like that of muon.py."""
    return train_gpt2.orthogonalize(G.to(dtype)).bfloat16()


both_files = pytest.mark.parametrize(
    "orthogonalize", [orthogonalize, orthogonalize_in_core], ids=["muon.py", "train_gpt2.py"]
)


@both_files
@pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(32, 32), (32, 48), (32, 64), (16, 80), (80, 16)])
def test_in_float32_it_is_the_plain_iteration(shape, given, orthogonalize, monkeypatch):
    """Up to rounding, although muon.py iterates on the Gram matrix if a side is twice the other."""
    torch.manual_seed(0)
    G = torch.randn(shape).to(given)
    kept = G.clone()
    assert orthogonalize(G, torch.float32).dtype == torch.bfloat16
    assert torch.equal(kept, G), "the input must not be changed"
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor)  # do not round the result
    out = orthogonalize(G, torch.float32)
    plain = plain_newton_schulz(G, dtype=torch.float32)
    torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-5)


@both_files
@both_dtypes
@pytest.mark.parametrize("shape", [(24, 24), (24, 40), (40, 8), (8, 40)])
def test_the_scale_of_the_input_does_not_matter(shape, dtype, orthogonalize):
    """Unless it is so small that the result may be smaller."""
    torch.manual_seed(0)
    products = getattr(torch, dtype)
    for given in (torch.float32, torch.bfloat16):
        G = torch.randn(shape).to(given)
        expected = orthogonalize(G, products)
        for scale in (1e-3, 1e10, 1e30):
            out = orthogonalize(G * scale, products)
            torch.testing.assert_close(out, expected, rtol=0.05, atol=0.02)
    assert not orthogonalize(torch.zeros(shape), products).any()
    for value in (1e-45, 1e-30, 3e38):
        out = orthogonalize(torch.full(shape, value), products)
        assert out.isfinite().all() and out.abs().max() < 1.3, value


def spectra(m, n):
    """Return a random matrix and difficult ones: of low rank, or with falling singular values."""
    torch.manual_seed(0)
    low = torch.randn(m, 8) @ torch.randn(8, n)
    U, V = (torch.linalg.qr(torch.randn(size, m))[0] for size in (m, n))
    falling = torch.arange(1.0, m + 1)
    return {
        "random": torch.randn(m, n),
        "rank 1": torch.outer(torch.randn(m), torch.randn(n)),
        "rank 8": low,
        "rank 8 and noise": low + 0.01 * torch.randn(m, n),
        "1/k": U @ torch.diag(1 / falling) @ V.T,
        "1/k^2": U @ torch.diag(1 / falling**2) @ V.T,
    }


@both_files
@both_dtypes
@pytest.mark.parametrize("shape", [(96, 96), (64, 256), (256, 64)])
def test_singular_values_become_their_polynomial(shape, dtype, orthogonalize):
    """As well as in the plain iteration.

    Without a restart, iterating on the Gram matrix has errors of 10^1 to 10^13 here.
    """
    products = getattr(torch, dtype)
    for name, G in spectra(min(shape), max(shape)).items():
        G = G.T if shape[0] > shape[1] else G
        exact = exact_orthogonalization(G)
        out = orthogonalize(G, products)
        plain = plain_newton_schulz(G, dtype=products)
        bound = max(1.25 * relative(plain - exact, exact), 0.08)
        assert relative(out - exact, exact) < bound, name
        assert torch.linalg.matrix_norm(out.double(), 2) < 1.4, name


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1}, {"lr": math.nan}, {"momentum": 1.0}, {"weight_decay": -1},
        {"beta2": 1.0}, {"beta2": -0.1}, {"beta2": math.nan},
        {"adjust_lr_fn": "rms"}, {"dtype": torch.float16}, {"eps": 0}, {"ns_steps": 0},
    ],
)  # fmt: skip
def test_invalid_values_are_refused(options):
    """The message contains the value."""
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"{name}={value}.* must be"):
        Muon(make_parameters(), **{"lr": 0.02, **options})


@pytest.mark.parametrize(
    "shape, dtype",
    [
        ((), torch.float32),
        ((5,), torch.float32),
        ((2,) * 5, torch.float32),
        ((2, 3), torch.cfloat),
        ((5, 0), torch.float32),
    ],
)
def test_parameters_that_are_not_matrices_are_refused(shape, dtype):
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype))]
    with pytest.raises(ValueError, match=r"Muon takes non-empty float parameters of 2 to 4 dim"):
        Muon(params, lr=0.02)
    muon = Muon(make_parameters(), lr=0.02)
    with pytest.raises(ValueError, match=r"Muon takes non-empty float parameters of 2 to 4 dim"):
        muon.add_param_group(dict(params=params))
    assert len(muon.param_groups) == 1


@pytest.mark.parametrize("blocks", [0, 3, -2, [4, 8], [16, 16], []])
def test_blocks_that_do_not_fit_are_refused(blocks):
    with pytest.raises(ValueError, match=r"must divide, or sum to, 16 rows of \(16, 4\)"):
        Muon(make_parameters([(16, 4)]), blocks=blocks)


@pytest.mark.parametrize("name", ["process_group", "dtype"])
def test_options_of_the_whole_optimizer_are_refused_in_groups(name):
    """A process group that is ignored would give each rank the updates of other ranks' experts."""
    with pytest.raises(ValueError, match=f"{name} is not an option of a group"):
        Muon([{"params": make_parameters(), name: None}])


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_the_state_of_another_optimizer_is_refused(name):
    """SGD uses the same name for other momenta."""
    params = make_parameters([(6, 4)])
    muon, before = Muon(params, lr=0.02), make_parameters([(6, 4)])
    other = getattr(torch.optim, name)(params, lr=0.5)
    set_gradients(params, 0)
    other.step()
    with pytest.raises(ValueError, match="this is the state of another optimizer"):
        muon.load_state_dict(other.state_dict())
    assert not muon.state and muon.param_groups[0]["lr"] == 0.02
    muon.step()
    assert not torch.equal(params[0], before[0])


def test_a_state_that_is_refused_changes_nothing():
    params = make_parameters([(6, 4), (6, 4)])
    muon = Muon([dict(params=[p]) for p in params], lr=0.02)
    set_gradients(params, 0)
    muon.step()
    state = copy.deepcopy(muon.state_dict())
    state["state"][0]["momentum_buffer"].zero_()
    state["param_groups"][0]["lr"] = 0.5
    state["param_groups"][1]["blocks"] = 4
    with pytest.raises(ValueError, match="blocks=4 must divide"):
        muon.load_state_dict(state)
    assert muon.param_groups[0]["lr"] == 0.02 and muon.param_groups[1]["blocks"] == 1
    assert muon.state[params[0]]["momentum_buffer"].any()


# ---- Steps, on any number of ranks ---------------------------------------------------------------
def make_parameters(shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(params, step, skip=()):
    generator = torch.Generator().manual_seed(100 + step)
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = None if i in skip else grad


def flat(params):
    return torch.cat([p.detach().flatten() for p in params])


NORMUON = {"beta2": 0.9, "cautious": True}


def three_steps(
    rank, world_size, file, dtype, skip=(), more=(), group=None, reload=True, alone=False
):
    """Take three steps without the gradients numbered `skip`; return what the rank then holds.

    file: the module with Muon. more: pairs of options. reload: whether another optimizer, which
    loads the state of rank 0 of the group, takes the last step. orthogonalized: number of matrices
    that this rank computed.
    """
    if file is muon_file:
        params, kind = make_parameters(SHAPES), Muon
        part = dict(process_group=None if alone else group or dist.group.WORLD)
    else:
        params, kind = make_parameters(MATRIX_SHAPES), train_gpt2.Muon
        part = dict(rank=rank, world_size=world_size)
    muon = kind(params, 0.02, dtype=dtype, **dict(more), **part)
    orthogonalized, orthogonalize = 0, file.orthogonalize

    def counting(G, *others):
        nonlocal orthogonalized
        orthogonalized += len(G) if G.ndim == 3 else 1
        return orthogonalize(G, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file, "orthogonalize", counting)
        for step in range(3):
            if reload and step == 2:
                state = [copy.deepcopy(muon.state_dict())]
                if world_size > 1:
                    first = dist.get_global_rank(group or dist.group.WORLD, 0)
                    dist.broadcast_object_list(state, src=first, group=group)
                muon = kind(params, 0.5, dtype=dtype, **part)
                muon.load_state_dict(state[0])
            set_gradients(params, step, skip)
            muon.step()
    return SimpleNamespace(
        values=[p.detach() for p in params],
        state=[tensor for p in params for tensor in muon.state[p].values()],
        orthogonalized=orthogonalized,
    )


# Gradients that are missing: none, some of several buckets, whole buckets, all but one, all
SKIPS = [(), (0, 4), (8, 9, 10, 0, 3), tuple(range(1, len(SHAPES))), tuple(range(len(SHAPES)))]


def cases(rank, world_size, name, reload=True):
    """Return the result of each case with the Muon of a file, "muon" or "train_gpt2"."""
    file = {"muon": muon_file, "train_gpt2": train_gpt2}[name]
    options = [{"weight_decay": 0.1}, {"weight_decay": 0.1, **NORMUON}] if name == "muon" else [{}]
    return {
        (dtype, skip, more): three_steps(rank, world_size, file, dtype, skip, more, reload=reload)
        for dtype in (torch.float32, torch.bfloat16)
        for skip in SKIPS
        for more in [tuple(option.items()) for option in options]
    }


@functools.cache
def cases_alone(name):
    return cases(0, 1, name, reload=False)


@pytest.mark.parametrize("name", ["muon", "train_gpt2"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_every_world_size_gives_the_same_bits(world_size, name, tmp_path):
    """And all ranks hold the whole state, although each matrix is orthogonalized by one of them."""
    ranks = run_ranks(cases, world_size, tmp_path / "ranks", name)
    for case, alone in cases_alone(name).items():
        skip, more = case[1:]
        for i, (value, initial) in enumerate(zip(alone.values, make_parameters())):
            assert torch.equal(value, initial.view_as(value)) == (i in skip), case
        of_ranks = [results[case] for results in ranks]
        with_gradient = len(SHAPES) - len(skip)
        for result in of_ranks:
            assert all(map(torch.equal, result.values, alone.values)), case
            assert all(map(torch.equal, result.state, alone.state)), case
            assert len(result.state) == (2 if "beta2" in dict(more) else 1) * with_gradient
        counts = [result.orthogonalized for result in of_ranks]
        assert sum(counts) == 3 * with_gradient, case
        if name == "train_gpt2":
            assert max(counts) - min(counts) <= 3, case


def warnings_of_a_step(rank, world_size):
    with pytest.warns(UserWarning, match="do not share the work of Muon: .* pass process_group"):
        alone = three_steps(rank, world_size, muon_file, torch.float32, alone=True)
    return alone


def test_repeating_the_work_on_every_rank_is_a_warning(tmp_path):
    for result in run_ranks(warnings_of_a_step, 2, tmp_path / "ranks"):
        assert result.orthogonalized == 3 * len(SHAPES)


def steps_in_a_subgroup(rank, world_size):
    group = dist.new_group([2, 1])
    if rank > 0:
        return three_steps(dist.get_rank(group), 2, muon_file, torch.float32, group=group)


def test_a_subgroup_of_ranks_gives_the_same_bits(tmp_path):
    alone = three_steps(0, 1, muon_file, torch.float32)
    for result in run_ranks(steps_in_a_subgroup, 3, tmp_path / "ranks")[1:]:
        assert all(map(torch.equal, result.values, alone.values))
        assert all(map(torch.equal, result.state, alone.state))
        assert 0 < result.orthogonalized < 3 * len(SHAPES)


# ---- Steps, against the formulas -----------------------------------------------------------------
@pytest.mark.parametrize("beta2, cautious", [(0.0, False), (0.9, False), (0.0, True), (0.9, True)])
@pytest.mark.parametrize("shape", [(16, 16), (24, 16), (16, 24), (40, 8), (8, 40), (24, 4, 2, 1)])
def test_twelve_steps_follow_the_formulas(shape, beta2, cautious):
    """With another momentum in each step, and with gradients that are missing in one.

    Rows of tall and square matrices, columns of wide ones, are divided by their usual sizes.
    """
    params = make_parameters([shape] * 3)
    muon = Muon(
        params, lr=0.02, weight_decay=1.0, beta2=beta2, cautious=cautious, dtype=torch.float32
    )
    averages, squares = [torch.zeros(shape)] * 3, [torch.zeros(())] * 3
    for step in range(12):
        before = [p.detach().double() for p in params]
        mu = (0.85, 0.9, 0.95, 0.5)[step % 4]
        muon.param_groups[0]["momentum"] = mu
        missing = (1, 2) if step == 6 else ()
        set_gradients(params, step, missing)
        muon.step()
        for i, p in enumerate(params):
            state = muon.state[p]
            if i not in missing:
                averages[i] = mu * averages[i] + (1 - mu) * p.grad
                ahead = (1 - mu) * p.grad + mu * averages[i]
                update = plain_newton_schulz(ahead.flatten(1), dtype=torch.float32)
                update = update.bfloat16().double()
                if beta2:
                    rows, columns = update.shape
                    size = update.square().mean(1 if rows >= columns else 0, keepdim=True)
                    squares[i] = beta2 * squares[i] + (1 - beta2) * size
                    equalized = update / squares[i].sqrt()
                    update = equalized * (update.norm() / equalized.norm())
                update = update.view(shape)
                change = 0.02 * max(shape[0], math.prod(shape[1:])) ** 0.5 * update
                change += 0.02 * 1.0 * before[i] * ((update * before[i] > 0) if cautious else 1)
                assert relative(before[i] - p - change, change) < 0.01, step
            else:
                assert torch.equal(p.double(), before[i])
            torch.testing.assert_close(state["momentum_buffer"], averages[i])
            if beta2:
                found = state["row_squares"]
                assert found.dtype == torch.float32
                expected = squares[i].flatten()
                torch.testing.assert_close(found.double(), expected, rtol=0.01, atol=0)


def test_the_default_dtype_does_not_matter():
    """In bfloat16, the factor of weight decay, 0.999, would become 1."""
    ends = []
    for dtype in torch.float32, torch.bfloat16:
        params = make_parameters()
        muon = Muon(params, lr=0.01, weight_decay=0.1, **NORMUON)
        set_gradients(params, 0)
        torch.set_default_dtype(dtype)
        try:
            muon.step()
        finally:
            torch.set_default_dtype(torch.float32)
        ends.append(params)
    assert all(map(torch.equal, *ends))


def test_parameters_of_one_group_may_be_on_several_devices():
    alone, params = make_parameters([(8, 4)]), make_parameters([(8, 4), (8, 4)])
    params[1] = nn.Parameter(params[1].to("meta"))
    for some in alone, params:
        for p in some:
            p.grad = torch.ones_like(p)
        Muon(some, **NORMUON).step()
    assert torch.equal(alone[0], params[0])


@pytest.mark.parametrize("options", [{}, NORMUON, {"cautious": True}, {"beta2": 0.9}])
def test_zeros_in_a_gradient_change_nothing(options):
    """torch.distributed.checkpoint takes a step with gradients of zeros to create the state."""
    params, before = make_parameters(), make_parameters()
    muon = Muon(params, lr=0.02, weight_decay=0.5 if "cautious" in options else 0.0, **options)
    for p in params:
        p.grad = torch.zeros_like(p)
    muon.step()
    assert all(map(torch.equal, params, before))
    assert not any(tensor.any() for p in params for tensor in muon.state[p].values())
    tall = params[1]
    tall.grad = torch.randn(tall.shape)
    tall.grad[3] = 0
    for _ in range(3):
        muon.step()
    is_equal = [torch.equal(*rows) for rows in zip(tall, before[1])]
    assert tall.isfinite().all() and is_equal == [row == 3 for row in range(len(tall))]


# ---- Against torch.optim.Muon --------------------------------------------------------------------
needs_torchs_muon = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="torch is older than 2.9"
)


@needs_torchs_muon
def test_arguments_and_defaults_are_those_of_torch():
    theirs = inspect.signature(torch.optim.Muon).parameters
    ours = inspect.signature(muon_file.Muon).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(ours[name].default == value.default for name, value in theirs.items())
    group = muon_file.Muon(make_parameters()).param_groups[0]
    torchs = torch.optim.Muon(make_parameters([(2, 2)])).param_groups[0]
    assert group.keys() - torchs.keys() == {"blocks", "beta2", "cautious"}


# torch.optim.Muon accepts "spectral_unclamped" since a later version.
@needs_torchs_muon
@pytest.mark.parametrize("shape", [shape for shape in sorted(set(SHAPES)) if len(shape) == 2])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"adjust_lr_fn": "original"}, {"adjust_lr_fn": "match_rms_adamw"}, {"nesterov": False},
        {"momentum": 0.5, "weight_decay": 0.0}, {"ns_coefficients": (2, -1.5, 0.5), "ns_steps": 9},
        {"ns_steps": 1}, {"ns_steps": 2}, {"eps": 1e-3}, {"lr": torch.tensor(0.1)},
    ],
    ids=str,
)  # fmt: skip
def test_steps_equal_torchs_own_muon(options, shape):
    """Up to rounding, and also after loading the other's state."""
    (p,), (q,) = make_parameters([shape]), make_parameters([shape])
    options = {"lr": 0.1, **options}
    muon, torchs = muon_file.Muon([p], **options), torch.optim.Muon([q], **options)
    bound = 0.1 if 1 in shape else 0.05  # a vector is only scaled, by a rounded number
    for step in range(3):
        if step == 2:
            muon = muon_file.Muon([p], lr=1.0, weight_decay=0.0)
            muon.load_state_dict(copy.deepcopy(torchs.state_dict()))
        before = q.detach().clone()
        p.data.copy_(q)
        set_gradients([p, q], step)
        q.grad = p.grad.clone()
        muon.step()
        torchs.step()
        assert relative(p - q, q - before) < bound


@needs_torchs_muon
def test_own_options_of_groups_stay_when_a_state_of_torchs_muon_is_loaded():
    params = make_parameters([(16, 4), (8, 8)])
    groups = [dict(params=params[:1], blocks=4, beta2=0.9), dict(params=params[1:], cautious=True)]
    muon = Muon(groups)
    muon.load_state_dict(torch.optim.Muon([dict(params=[p]) for p in params], lr=0.5).state_dict())
    options = [(group["blocks"], group["beta2"], group["cautious"]) for group in muon.param_groups]
    assert options == [(4, 0.9, False), (1, 0.0, True)] and muon.param_groups[0]["lr"] == 0.5


@needs_torchs_muon
def test_a_distributed_checkpoint_of_torchs_muon_can_be_loaded(tmp_path):
    """With the planner that the record's README names; the default one misses our options."""
    model = nn.Linear(8, 16, bias=False)
    torchs = torch.optim.Muon(model.parameters(), lr=0.5)
    model.weight.grad = torch.ones(16, 8)
    torchs.step()
    torchs.zero_grad()
    dcp.save({"muon": get_optimizer_state_dict(model, torchs)}, checkpoint_id=tmp_path)
    muon = Muon(model.parameters(), blocks=4, **NORMUON)
    state = {"muon": get_optimizer_state_dict(model, muon)}
    dcp.load(state, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(allow_partial_load=True))
    set_optimizer_state_dict(model, muon, state["muon"])
    group = muon.param_groups[0]
    assert (group["lr"], group["blocks"], group["beta2"]) == (0.5, 4, 0.9)
    momentum = muon.state[model.weight]["momentum_buffer"]
    torch.testing.assert_close(momentum, torch.full((16, 8), 0.05))


@pytest.mark.parametrize("shape, factor", [((16, 4), 2.0), ((4, 16), 0.5), ((8, 8), 1.0)])
def test_spectral_unclamped_is_the_root_of_rows_by_columns(shape, factor):
    """As in torch.optim.Muon since https://github.com/pytorch/pytorch/pull/187402."""
    (p,), (q,) = make_parameters([shape]), make_parameters([shape])
    set_gradients([p], 0)
    q.grad = p.grad
    Muon([p], lr=0.1, adjust_lr_fn="spectral_unclamped").step()
    Muon([q], lr=0.1 * factor / max(shape) ** 0.5).step()
    torch.testing.assert_close(p, q)


# ---- Stacks and blocks ---------------------------------------------------------------------------
def split(tensor, blocks):
    """Return the matrices of a parameter one by one."""
    matrices = tensor if tensor.ndim == 3 else tensor.flatten(1)[None]
    rows = matrices.size(1)
    sizes = [rows // blocks] * blocks if isinstance(blocks, int) else blocks
    return [block for matrix in matrices for block in matrix.split(sizes)]


@both_dtypes
@pytest.mark.parametrize("options", [{}, NORMUON | {"weight_decay": 0.5}], ids=["", "NorMuon"])
@pytest.mark.parametrize(
    "shape, blocks",
    [
        ((5, 16, 24), 1), ((3, 40, 8), 1), ((1, 8, 8), 1), ((48, 16), 3), ((64, 16), 4),
        ((48, 16), [24, 24]), ((40, 24), [8, 8, 24]), ((3, 40, 24), [16, 24]), ((2, 48, 16), 2),
        ((12, 2, 3, 3), 2),
    ],
)  # fmt: skip
def test_stacks_and_blocks_get_the_bits_of_separate_matrices(shape, blocks, options, dtype):
    """Experts, heads of a projection, fused q, k and v, and both together."""
    whole = make_parameters([shape])[0]
    parts = [nn.Parameter(part.clone()) for part in split(whole.detach(), blocks)]
    options = {**options, "lr": 0.02, "dtype": getattr(torch, dtype)}
    muon, muon_of_parts = Muon([whole], blocks=blocks, **options), Muon(parts, **options)
    for step in range(3):
        set_gradients([whole], step)
        with torch.no_grad():
            for part, grad in zip(parts, split(whole.grad, blocks)):
                part.grad = grad.clone()
        muon.step()
        muon_of_parts.step()
        assert all(map(torch.equal, parts, split(whole.detach(), blocks)))


def test_large_stacks_are_multiplied_in_parts(monkeypatch):
    """Which changes no bit: parts of 1, of 2 and of all matrices."""
    results = []
    for entries in (1, 2 * 16 * 24, 2**19):
        monkeypatch.setattr(muon_file, "stack_entries", lambda device, limit=entries: limit)
        params = make_parameters([(5, 16, 24), (16, 24), (16, 24), (48, 24)])
        muon = Muon([dict(params=params[:3]), dict(params=params[3:], blocks=3)], lr=0.02)
        set_gradients(params, 0)
        muon.step()
        results.append(flat(params))
    assert torch.equal(results[0], results[1]) and torch.equal(results[1], results[2])


@pytest.mark.parametrize("adjust", ["original", "spectral_unclamped"])
def test_the_learning_rate_of_a_block_is_that_of_its_own_shape(adjust):
    """Up to rounding, if blocks of one parameter have different factors."""
    whole = make_parameters([(60, 8)])[0]
    before = [part.clone() for part in split(whole.detach(), [4, 48, 8])]
    parts = [nn.Parameter(part.clone()) for part in before]
    set_gradients([whole], 0)
    for part, grad in zip(parts, split(whole.grad, [4, 48, 8])):
        part.grad = grad
    Muon([whole], lr=0.1, blocks=[4, 48, 8], adjust_lr_fn=adjust).step()
    Muon(parts, lr=0.1, adjust_lr_fn=adjust).step()
    for found, part, old in zip(split(whole.detach(), [4, 48, 8]), parts, before):
        assert relative(found - part, part - old) < 0.003


# ---- Groups and the distribution of work ---------------------------------------------------------
@pytest.mark.parametrize("options", [{}, NORMUON], ids=["", "NorMuon"])
def test_parameters_of_one_group_may_have_several_dtypes(options):
    mixed, alone = make_parameters([(16, 16)] * 3), make_parameters([(16, 16)] * 3)
    for params in mixed, alone:
        params[1].data = params[1].data.bfloat16()
    muons = [Muon(params, lr=0.02, **options) for params in (mixed, *([p] for p in alone))]
    for step in range(2):
        set_gradients(mixed, step)
        set_gradients(alone, step)
        for muon in muons:
            muon.step()
    assert all(map(torch.equal, mixed, alone))
    momenta = [muons[0].state[p]["momentum_buffer"].dtype for p in mixed]
    assert momenta == [torch.float32, torch.bfloat16, torch.float32]


def gpt_matrices(n_layer, C):
    """Return the matrices of a GPT's blocks, without values."""
    shapes = ([(C, C)] * 4 + [(4 * C, C), (C, 4 * C)]) * n_layer
    return [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]


@pytest.mark.parametrize("n_layer, C", [(12, 768), (48, 1600), (13, 768)])
def test_ranks_share_the_cost_as_well_as_possible(n_layer, C):
    params = gpt_matrices(n_layer, C)
    for ranks in range(2, 17):
        costs = [0] * ranks
        muon_file.assign_owners(params, {"blocks": 1}, costs)
        # A square matrix costs three units of C^3, a rectangular one six.
        assert sum(costs) == 24 * n_layer * C**3
        assert max(costs) <= 3 * C**3 * max(2, math.ceil(8 * n_layer / ranks))


# The five iterations of https://arxiv.org/abs/2505.16932, and a shorter list
POLAR_EXPRESS = [
    (8.156555, -22.483293, 15.878770), (4.042930, -2.808917, 0.500018),
    (3.891668, -2.772484, 0.506065), (3.285754, -2.368129, 0.464490),
    (2.346541, -1.709783, 0.423236),
]  # fmt: skip


@pytest.mark.parametrize("coefficients", [POLAR_EXPRESS, POLAR_EXPRESS[1:]])
@pytest.mark.parametrize("shape", [(32, 32), (16, 80)])
def test_each_iteration_may_have_its_own_coefficients(shape, coefficients):
    """In both forms of the iteration."""
    (p,) = make_parameters([shape])
    before, p.grad = p.detach().clone(), torch.randn(shape)
    exact = exact_orthogonalization(p.grad, coefficients)
    out = orthogonalize(p.grad, torch.float32, coefficients)
    assert relative(out - exact, exact) < 0.005
    Muon([p], lr=1.0, ns_coefficients=coefficients, dtype=torch.float32).step()
    change = max(shape) ** 0.5 * out
    assert relative(before - p - change, change) < 0.005


# ---- The Muon of train_gpt2.py -------------------------------------------------------------------
@both_dtypes
@pytest.mark.parametrize("shape", [(16, 16), (33, 33), (24, 40), (64, 16), (16, 64), (1, 5)])
def test_the_muon_of_the_core_is_that_of_muon_py(shape, dtype):
    """To the bit, unless a side is at least twice the other. Then muon.py uses the Gram variant."""
    (p,), (q,), (initial,) = (make_parameters([shape]) for _ in range(3))
    options = dict(lr=0.02, momentum=0.9, dtype=getattr(torch, dtype))
    optimizers = train_gpt2.Muon([p], **options), Muon([q], **options)
    for step in range(6):
        for optimizer, parameter in zip(optimizers, (p, q)):
            set_gradients([parameter], step)
            optimizer.step()
    if max(shape) < 2 * min(shape):
        assert torch.equal(p, q)
    assert relative(p - q, q - initial) < (0.005 if dtype == "float32" else 0.05)


# ---- Use in other projects -----------------------------------------------------------------------
def test_a_closure_computes_the_gradients():
    params = make_parameters()
    muon = Muon(params, lr=0.02, weight_decay=0.1, **NORMUON)

    def loss_with_gradients():
        muon.zero_grad()
        loss = sum(p.square().sum() for p in params)
        loss.backward()
        return loss

    losses = [muon.step(loss_with_gradients).item() for _ in range(3)]
    assert losses[0] > losses[1] > losses[2] and muon.step() is None


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, NORMUON])
def test_a_state_can_be_loaded_again_and_again(options, dtype):
    """As accelerate and the Trainer of transformers do: accelerator.prepare() loads the optimizer's
    own state_dict, and load_state() a saved one, with the options of a scheduler that the fresh
    optimizer lacks; afterwards, the loaded optimizer is saved."""
    params = [nn.Parameter(p.detach().to(dtype)) for p in make_parameters()]
    muon = Muon(params, lr=0.02, weight_decay=0.1, **options)
    torch.optim.lr_scheduler.ConstantLR(muon, factor=1)
    for step in range(4):
        set_gradients(params, step)
        muon.step()
        if step == 1:
            copies = copy.deepcopy(params)
            saved = saved_and_loaded(muon.state_dict())
    resumed = Muon(copies, lr=0.5, **options)
    resumed.load_state_dict(resumed.state_dict())
    resumed.load_state_dict(copy.deepcopy(saved))
    torch.optim.lr_scheduler.ConstantLR(resumed, factor=1)  # replaces step by its own function
    resumed = pickle.loads(pickle.dumps(resumed))
    assert (resumed.process_group, resumed.dtype) == (None, torch.bfloat16)
    copies = resumed.param_groups[0]["params"]
    resumed.load_state_dict(saved_and_loaded(resumed.state_dict()))
    for step in 2, 3:
        set_gradients(copies, step)
        resumed.step()
    assert torch.equal(flat(copies), flat(params))
    group = resumed.param_groups[0]
    assert (group["lr"], group["initial_lr"]) == (0.02, 0.02)
