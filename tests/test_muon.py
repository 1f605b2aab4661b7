"""Both Muons: against the singular value decomposition, and bit-identical for every world size.

Where nothing else is said, Muon is that of records/modern/muon.py.
"""

import ast
import copy
import io
import math
import pickle
from pathlib import Path
from types import SimpleNamespace

import muon as muon_file
import pytest
import torch
import torch.distributed as dist
from conftest import both_dtypes, run_ranks
from muon import Muon, matrix_cost, orthogonalize
from plain import plain_newton_schulz
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import train_gpt2

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


@both_dtypes
@pytest.mark.parametrize("shape", [(24, 24), (24, 40), (40, 8), (8, 40)])
def test_a_stack_is_orthogonalized_like_its_matrices(shape, dtype):
    torch.manual_seed(0)
    stack = torch.randn(2, 3, *shape)
    products = getattr(torch, dtype)
    alone = [orthogonalize(G, products) for G in stack.flatten(0, 1)]
    together = orthogonalize(stack, products)
    torch.testing.assert_close(together, torch.stack(alone).view_as(stack), rtol=0.02, atol=0.01)


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
        {"rank": 2, "world_size": 2}, {"dtype": torch.float16},
    ],
)  # fmt: skip
def test_invalid_values_are_refused(options):
    """The message contains the value."""
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"{name}={value}.* must be"):
        Muon(make_parameters(), **{"lr": 0.02, **options})


@pytest.mark.parametrize("shape", [(), (5,), (4, 6, 6), (2, 2, 2, 2, 2)])
def test_parameters_that_are_not_matrices_are_refused(shape):
    params = [nn.Parameter(torch.zeros(shape))]
    with pytest.raises(ValueError, match="takes 2-D and 4-D parameters, not"):
        Muon(params, lr=0.02)
    with pytest.raises(ValueError, match="takes 2-D and 4-D parameters, not"):
        Muon(make_parameters(), lr=0.02).add_param_group(dict(params=params))


def test_a_group_on_two_devices_is_refused():
    params = [nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4, 4, device="meta"))]
    with pytest.raises(ValueError, match="on meta and another device: use one group per device"):
        Muon(params, lr=0.02)
    Muon([dict(params=[p]) for p in params], lr=0.02)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Muon"])
def test_the_state_of_another_optimizer_is_an_error(name):
    """SGD and torch.optim.Muon, since torch 2.9, use the same name for other momenta."""
    if not hasattr(torch.optim, name):
        pytest.skip("torch is older than 2.9")
    params = make_parameters([(6, 4)])
    muon = Muon(params, lr=0.02)
    muon.load_state_dict(getattr(torch.optim, name)(params, lr=0.5).state_dict())
    set_gradients(params, 0)
    with pytest.raises(KeyError):
        muon.step()


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


def three_steps(rank, world_size, file, dtype, skip=(), more=(), group=None, reload=True):
    """Take three steps without the gradients numbered `skip`; return what the rank then holds.

    file: the module with Muon. more: pairs of options. reload: whether another optimizer, which
    loads the state of rank 0 of the group, takes the last step. orthogonalized: number of matrices
    that this rank computed.
    """
    params = make_parameters(SHAPES if file is muon_file else MATRIX_SHAPES)
    part = dict(rank=rank, world_size=world_size, dtype=dtype)
    part |= {} if group is None else dict(process_group=group)
    muon = file.Muon(params, 0.02, **dict(more), **part)
    orthogonalized, orthogonalize = 0, file.orthogonalize

    def counting(G, *dtype):
        nonlocal orthogonalized
        orthogonalized += len(G) if G.ndim == 3 else 1
        return orthogonalize(G, *dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file, "orthogonalize", counting)
        for step in range(3):
            if reload and step == 2:
                state = [copy.deepcopy(muon.state_dict())]
                if world_size > 1:
                    first = dist.get_global_rank(group or dist.group.WORLD, 0)
                    dist.broadcast_object_list(state, src=first, group=group)
                muon = file.Muon(params, 0.5, **part)
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


@pytest.mark.parametrize("name", ["muon", "train_gpt2"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_every_world_size_gives_the_same_bits(world_size, name, tmp_path):
    """And all ranks hold the whole state, although each matrix is orthogonalized by one of them."""
    ranks = run_ranks(cases, world_size, tmp_path / "ranks", name)
    for case, alone in cases(0, 1, name, reload=False).items():
        skip, more = case[1:]
        for i, (value, initial) in enumerate(zip(alone.values, make_parameters())):
            assert torch.equal(value, initial.view_as(value)) == (i in skip), case
        of_ranks = [results[case] for results in ranks]
        with_gradient = len(SHAPES) - len(skip)
        for result in of_ranks:
            assert all(map(torch.equal, result.values, alone.values)), case
            assert all(map(torch.equal, result.state, alone.state)), case
            states = with_gradient if name == "train_gpt2" else len(SHAPES)
            assert len(result.state) == (2 if "beta2" in dict(more) else 1) * states
        assert sum(result.orthogonalized for result in of_ranks) == 3 * with_gradient, case


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
@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e6])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 0.02), (torch.bfloat16, 0.05)])
def test_a_first_step_is_the_orthogonalized_gradient_of_any_size(dtype, bound, scale):
    (p,) = make_parameters([(16, 24)])
    muon = Muon([p], lr=1.0, dtype=dtype)
    before, p.grad = p.detach().clone(), scale * torch.randn(16, 24)
    expected = 24**0.5 * exact_orthogonalization(p.grad)
    muon.step()
    assert relative(before - p - expected, expected) < bound


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
                assert found.dtype == torch.float32 and found.shape == squares[i].shape
                torch.testing.assert_close(found.double(), squares[i], rtol=0.01, atol=0)


@pytest.mark.parametrize("options", [{}, NORMUON, {"cautious": True}, {"beta2": 0.9}])
def test_zeros_in_a_gradient_change_nothing(options):
    """torch.distributed.checkpoint takes a step with gradients of zeros to create the state."""
    params, before = make_parameters(), make_parameters()
    muon = Muon(params, lr=0.02, weight_decay=0.5, **options)
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


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("shape", [shape for shape in sorted(set(SHAPES)) if len(shape) == 2])
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_steps_equal_torchs_own_muon(adjust, shape):
    """Converted as the docstring of Muon says."""
    (p,), (q,), (initial,) = (make_parameters([shape]) for _ in range(3))
    lr, weight_decay = 0.1, 0.1
    factor = 0.2 if adjust == "match_rms_adamw" else shape[1] ** -0.5
    muon = Muon([p], lr=factor * lr, weight_decay=weight_decay / factor)
    torchs = torch.optim.Muon([q], lr, weight_decay=weight_decay, adjust_lr_fn=adjust)
    for step in range(2):
        set_gradients([p, q], step)
        q.grad = p.grad.clone()
        muon.step()
        torchs.step()
    bound = 0.1 if 1 in shape else 0.05  # a vector is only scaled, by a rounded number
    assert relative(p - q, q - initial) < bound


# ---- Groups and the distribution of work ---------------------------------------------------------
def test_groups_have_their_own_settings():
    before, params, expected = (make_parameters() for _ in range(3))
    muon = Muon([{"params": params[:2], "lr": 0.0}, {"params": params[2:7]}], lr=0.1)
    muon.add_param_group({"params": params[7:], "lr": 0.02, "momentum": 0.5})
    separate = [Muon(expected[2:7], lr=0.1), Muon(expected[7:], lr=0.02, momentum=0.5)]
    for step in range(2):
        set_gradients(params, step)
        set_gradients(expected, step)
        for optimizer in (muon, *separate):
            optimizer.step()
    assert all(map(torch.equal, params, before[:2] + expected[2:]))


def gpt_matrices(n_layer, C):
    """Return the matrices of a GPT's blocks, without values."""
    shapes = ([(C, C)] * 4 + [(4 * C, C), (C, 4 * C)]) * n_layer
    return [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]


@pytest.mark.parametrize("n_layer, C", [(12, 768), (48, 1600), (13, 768)])
def test_ranks_share_the_cost_as_well_as_possible(n_layer, C):
    params = gpt_matrices(n_layer, C)
    for ranks in range(2, 17):
        costs = [0] * ranks
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", lambda *arguments, **options: None)
            muon = Muon(params, lr=0.1, world_size=ranks)
            with torch.no_grad():
                muon.update_replicated(muon.param_groups[0], costs)
        # A square matrix costs three units of C^3, a rectangular one six.
        assert sum(costs) == 24 * n_layer * C**3
        assert max(costs) <= 3 * C**3 * max(2, math.ceil(8 * n_layer / ranks))


@pytest.mark.parametrize(
    "shape", [(48, 48), (48, 60), (48, 95), (48, 96), (48, 200), (200, 48), (8, 512)]
)
def test_the_cost_of_a_matrix_is_proportional_to_what_newton_schulz_multiplies(shape):
    """Within 25%. The shapes of a GPT have the same factor, so its ranks are balanced exactly."""
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.randn(shape), torch.float32)
    products = counter.get_total_flops() / 2
    assert 4 <= products / matrix_cost(torch.empty(shape)) <= 6.25
    if shape in [(48, 48), (48, 192)]:
        assert products / matrix_cost(torch.empty(shape)) == 5


# The five iterations of https://arxiv.org/abs/2505.16932, and a shorter list
POLAR_EXPRESS = [
    (8.156555, -22.483293, 15.878770), (4.042930, -2.808917, 0.500018),
    (3.891668, -2.772484, 0.506065), (3.285754, -2.368129, 0.464490),
    (2.346541, -1.709783, 0.423236),
]  # fmt: skip


@pytest.mark.parametrize("coefficients", [POLAR_EXPRESS, POLAR_EXPRESS[1:]])
@pytest.mark.parametrize("shape", [(32, 32), (16, 80)])
def test_other_coefficients_are_one_edit(shape, coefficients, monkeypatch):
    """Both forms of the iteration use them."""
    monkeypatch.setattr(muon_file, "NEWTON_SCHULZ", coefficients)
    torch.manual_seed(0)
    G = torch.randn(shape)
    exact = exact_orthogonalization(G, coefficients)
    assert relative(orthogonalize(G, torch.float32) - exact, exact) < 0.005


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


@pytest.mark.parametrize(
    "world_size, bound", [(2, 1), (3, 1), (4, 1), (5, 1.042), (6, 1), (7, 1.108), (8, 1)]
)
def test_the_ranks_of_the_core_have_about_the_same_work(world_size, bound, monkeypatch):
    """For the matrices of GPT-2 124M. The work of a rank is what its Newton-Schulz multiplies."""
    monkeypatch.setattr(dist, "all_reduce", lambda buffer: None)
    params = gpt_matrices(12, 768)
    for p in params:
        p.grad = torch.empty_like(p)
    costs = []
    for rank in range(world_size):
        with FlopCounterMode(display=False) as counter:
            train_gpt2.Muon(params, lr=0.1, rank=rank, world_size=world_size).step()
        costs.append(counter.get_total_flops())
    assert round(max(costs) * world_size / sum(costs), 3) <= bound


# ---- Use in other projects -----------------------------------------------------------------------
def test_the_file_needs_only_torch():
    tree = ast.parse(Path(muon_file.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert [ast.unparse(node) for node in imports] == [
        "import torch", "import torch.distributed as dist",
    ]  # fmt: skip


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


@pytest.mark.parametrize("options", [{}, NORMUON])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_goes_on_like_the_original(copied, options):
    """Also if a scheduler has replaced the original's step by a function of its own."""
    params = make_parameters()
    muon = Muon(params, lr=0.02, **options)
    torch.optim.lr_scheduler.ConstantLR(muon)
    set_gradients(params, 0)
    muon.step()
    others, other = copied((params, muon))
    for some, optimizer in (params, muon), (others, other):
        set_gradients(some, 1)
        optimizer.step()
    assert torch.equal(flat(params), flat(others))
    assert (other.rank, other.world_size, other.dtype) == (0, 1, torch.bfloat16)


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
    resumed = pickle.loads(pickle.dumps(resumed))
    copies = resumed.param_groups[0]["params"]
    resumed.load_state_dict(saved_and_loaded(resumed.state_dict()))
    for step in 2, 3:
        set_gradients(copies, step)
        resumed.step()
    assert torch.equal(flat(copies), flat(params))
    group = resumed.param_groups[0]
    assert (group["lr"], group["initial_lr"]) == (0.02, 0.02)
