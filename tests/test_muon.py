"""Muon: against the singular value decomposition, and bit-identical for every world size."""

import copy
from functools import partial

import pytest
import torch
from conftest import TINY, run_ranks
from plain import PlainMuon, plain_newton_schulz

import train_gpt2
from train_gpt2 import (
    GPT,
    NS_COEFFICIENTS,
    Hyperparameters,
    Muon,
    assign_by_cost,
    zeropower_via_newtonschulz5,
)

SHAPES = [(16, 16), (64, 16), (16, 64), (8, 8), (4, 24), (3, 1), (1, 5)]


def polynomial(s, steps=5):
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


@pytest.mark.parametrize("shape", [(32, 32), (64, 16), (16, 64), (1, 7), (7, 1), (3, 24, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_singular_values_become_the_polynomial_of_themselves(shape, dtype):
    torch.manual_seed(0)
    G = torch.randn(shape).to(dtype)
    U, S, Vh = torch.linalg.svd(G.double(), full_matrices=False)
    S = polynomial(S / S.norm(dim=-1, keepdim=True))
    expected = U @ torch.diag_embed(S) @ Vh
    out = zeropower_via_newtonschulz5(G)
    assert out.dtype == torch.bfloat16 and out.shape == G.shape
    assert (out.double() - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e10, 1e30])
def test_the_scale_of_the_input_does_not_matter(scale):
    torch.manual_seed(0)
    G = torch.randn(24, 40)
    for dtype in (torch.float32, torch.bfloat16):
        given = (G * scale).to(dtype)
        kept = given.clone()
        out = zeropower_via_newtonschulz5(given)
        assert torch.equal(kept, given), "the input must not be changed"
    torch.testing.assert_close(out, zeropower_via_newtonschulz5(G), rtol=0.05, atol=0.02)


def test_extreme_inputs_stay_finite():
    assert not zeropower_via_newtonschulz5(torch.zeros(8, 12)).any()
    assert zeropower_via_newtonschulz5(torch.full((8, 12), 1e-30)).isfinite().all()
    rank_one = torch.outer(torch.arange(1.0, 9), torch.arange(1.0, 13))
    S = torch.linalg.svdvals(zeropower_via_newtonschulz5(rank_one).float())
    # bf16's rounding is itself raised by 3.4445^5 = 485: other directions appear, none runs away
    assert 0.6 < S[0] < 1.3 and S[1:].max() < 1.3


def test_only_matrices_are_taken():
    with pytest.raises(ValueError, match="matrix"):
        zeropower_via_newtonschulz5(torch.zeros(5))
    with pytest.raises(ValueError, match="matrices"):
        Muon([torch.nn.Parameter(torch.zeros(5))], lr=0.1)
    with pytest.raises(ValueError, match="rank=2"):
        Muon([torch.nn.Parameter(torch.zeros(5, 5))], lr=0.1, rank=2, world_size=2)


def make_parameters():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def set_gradients(params, step, skip=()):
    generator = torch.Generator().manual_seed(100 + step)
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=generator)
        p.grad = None if i in skip else grad


def three_steps(rank, world_size, skip=()):
    """Parameters after three steps, the Newton-Schulz calls of this rank, its momentum buffers."""
    params = make_parameters()
    muon = Muon(params, lr=0.02, rank=rank, world_size=world_size)
    calls, original = [], train_gpt2.zeropower_via_newtonschulz5

    def counted(G, **options):
        matrices = G if G.ndim == 3 else G[None]
        calls.extend(tuple(matrix.shape) for matrix in matrices if matrix.any())
        return original(G, **options)

    train_gpt2.zeropower_via_newtonschulz5 = counted
    try:
        for step in range(3):
            set_gradients(params, step, skip)
            muon.step()
    finally:
        train_gpt2.zeropower_via_newtonschulz5 = original
    buffers = [i for i, p in enumerate(params) if "momentum_buffer" in muon.state.get(p, {})]
    gathered = muon.gathered_state_dict()["state"]
    return [p.detach() for p in params], calls, buffers, gathered


@pytest.mark.parametrize("skip", [(), (0, 4)])
@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_every_world_size_gives_the_same_bits(world_size, skip, tmp_path):
    alone, _, _, momentum = three_steps(0, 1, skip)
    ranks = run_ranks(three_steps, world_size, tmp_path / "ranks", skip)
    for params, _, _, gathered in ranks:
        for i, (p, q) in enumerate(zip(params, alone)):
            assert torch.equal(p, q), f"parameter {i}"
        for i in range(len(alone)):
            assert torch.equal(
                gathered[i]["momentum_buffer"], momentum[i]["momentum_buffer"]
            ), f"momentum {i}"
    # no redundant work: three calls for each matrix, by the one rank that holds its momentum
    owned = [i for _, _, buffers, _ in ranks for i in buffers]
    assert sorted(owned) == [i for i in range(len(SHAPES)) if i not in skip]
    assert sum(len(calls) for _, calls, _, _ in ranks) == 3 * len(owned)


def test_a_missing_gradient_leaves_the_parameter_alone():
    params, _, _, _ = three_steps(0, 1, skip=(0, 4))
    for i, (p, initial) in enumerate(zip(params, make_parameters())):
        assert torch.equal(p, initial) == (i in (0, 4))


def test_steps_equal_the_plain_optimizer():
    """Against the plain optimizer in float64: an error like that of the plain one in bf16."""
    results = []
    for optimizer_class in (Muon, PlainMuon, partial(PlainMuon, dtype=torch.float64)):
        params = make_parameters()
        optimizer = optimizer_class(params, lr=0.02)
        for step in range(3):
            set_gradients(params, step)
            optimizer.step()
        results.append(torch.cat([p.detach().flatten() for p in params]))
    ours, plain, exact = results
    moved = exact - torch.cat([p.detach().flatten() for p in make_parameters()])
    assert (ours - exact).norm() < 0.05 * moved.norm()
    assert (ours - exact).norm() < 1.5 * (plain - exact).norm()


def test_groups_have_their_own_settings():
    first, second = make_parameters()[:2]
    muon = Muon([{"params": [first], "lr": 0.0}, {"params": [second]}], lr=0.1)
    before = first.detach().clone(), second.detach().clone()
    set_gradients([first, second], 0)
    muon.step()
    assert torch.equal(first, before[0]) and not torch.equal(second, before[1])


# ---------------------------------------------------------------------------
# the iteration itself


def exact_orthogonalization(G, coefficients):
    """U p(S) V^T in float64, p the scalar polynomials of the schedule one after the other."""
    U, S, Vh = torch.linalg.svd(G.double(), full_matrices=False)
    S = S / S.norm()
    schedule = NS_COEFFICIENTS[coefficients]
    for i in range(5):
        a, b, c = schedule[min(i, len(schedule) - 1)]
        S = a * S + b * S**3 + c * S**5
    return U @ torch.diag(S) @ Vh


def spectra(m, n):
    """Matrices that strain the iteration: full rank, low rank, fast falling singular values."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    low = randn(m, 8) @ randn(8, n)
    U, V = torch.linalg.qr(randn(m, m))[0], torch.linalg.qr(randn(n, m))[0]
    falling = torch.arange(1.0, m + 1)
    return {
        "random": randn(m, n),
        "rank 8": low,
        "rank 8 and noise": low + 0.01 * randn(m, n),
        "1/k": U @ torch.diag(1 / falling) @ V.T,
        "1/k^2": U @ torch.diag(1 / falling**2) @ V.T,
        "rank 1": torch.outer(randn(m), randn(n)),
    }


@pytest.mark.parametrize("products", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("coefficients", NS_COEFFICIENTS)
@pytest.mark.parametrize("shape", [(96, 96), (64, 256), (256, 64)])
def test_hard_spectra_are_no_worse_than_with_the_plain_iteration(
    shape, coefficients, products, monkeypatch
):
    """Iterating on the Gram matrix alone, without a restart, errs by 10^1 to 10^13 here."""
    monkeypatch.setattr(train_gpt2, "matmul_dtype", lambda device: products)
    tall = shape[0] > shape[1]
    for name, G in spectra(min(shape), max(shape)).items():
        G = G.T if tall else G
        exact = exact_orthogonalization(G, coefficients)

        def error(out, exact=exact):
            return ((out.double() - exact).norm() / exact.norm()).item()

        out = zeropower_via_newtonschulz5(G, coefficients=coefficients)
        plain = plain_newton_schulz(G, dtype=products, coefficients=coefficients)
        assert error(out) < max(1.25 * error(plain), 0.08), name
        assert torch.linalg.matrix_norm(out.double(), 2) < 1.4, name


def test_a_batch_gives_the_bits_of_its_matrices_in_any_company():
    """What makes all world sizes equal: place and neighbours in a batch of 4 change nothing."""
    torch.manual_seed(0)
    for shape in [(16, 16), (16, 64), (128, 128), (128, 512)]:
        G = torch.randn(7, *shape)
        alone = torch.zeros(7, *shape, dtype=torch.bfloat16)
        for i in range(7):
            batch = torch.zeros(4, *shape)
            batch[0] = G[i]
            alone[i] = zeropower_via_newtonschulz5(batch)[0]
        for order in torch.randperm(7), torch.arange(7).flip(0):
            for chosen in order.unfold(0, 4, 1):
                assert torch.equal(zeropower_via_newtonschulz5(G[chosen]), alone[chosen]), shape


# ---------------------------------------------------------------------------
# assignment


def least_possible(squares, wides, square_cost, wide_cost, ranks):
    """Smallest possible cost of the busiest rank, for two kinds of matrices."""
    costs = sorted(
        a * wide_cost + b * square_cost for a in range(wides + 1) for b in range(squares + 1)
    )
    least = (squares * square_cost + wides * wide_cost) / ranks

    def fits(limit):
        most = [-1] * (wides + 1)  # squares placed, for the number of wides placed
        most[0] = 0
        for _ in range(ranks):
            after = [-1] * (wides + 1)
            for done, placed in enumerate(most):
                if placed >= 0:
                    for a in range(min(wides - done, limit // wide_cost) + 1):
                        more = placed + (limit - a * wide_cost) // square_cost
                        after[done + a] = max(after[done + a], more)
            most = after
        return most[wides] >= squares

    return next(cost for cost in costs if cost >= least and fits(cost))


@pytest.mark.parametrize(
    "n_layer, n_embd", [(12, 768), (24, 1024), (36, 1280), (48, 1600), (10, 768), (13, 768)]
)
def test_ranks_share_the_cost_as_well_as_possible(n_layer, n_embd):
    C = n_embd
    shapes = ([(C, C)] * 4 + [(4 * C, C), (C, 4 * C)]) * n_layer
    for ranks in range(2, 17):
        load = [0] * ranks
        owners = assign_by_cost(shapes, load)
        assert owners == assign_by_cost(shapes, [0] * ranks)  # deterministic
        costs = [0] * ranks
        for (m, n), owner in zip(shapes, owners):
            costs[owner] += C * C * (C + 2 * max(m, n))
        assert costs == load
        best = least_possible(4 * n_layer, 2 * n_layer, 3 * C**3, 9 * C**3, ranks)
        assert max(load) <= 1.02 * best


def test_more_ranks_than_matrices():
    assert sorted(assign_by_cost([(4, 4)] * 3, [0] * 8)) == [0, 1, 2]


# ---------------------------------------------------------------------------
# failures, and state


def spoiled_gradient(rank, world_size):
    """The error of a step with a gradient that one rank holds spoiled, and what it changed."""
    params = make_parameters()
    muon = Muon(params, lr=0.02, rank=rank, world_size=world_size)
    set_gradients(params, 0)
    muon.step()
    before = [p.detach().clone() for p in params]
    momentum = {p: state["momentum_buffer"].clone() for p, state in muon.state.items()}
    set_gradients(params, 1)
    if rank == world_size - 1:
        params[5].grad[0, 0], params[2].grad[0, 0] = float("nan"), float("inf")
    try:
        muon.step()
        error = None
    except FloatingPointError as raised:
        error = str(raised)
    same = all(torch.equal(p, b) for p, b in zip(params, before))
    kept = all(torch.equal(muon.state[p]["momentum_buffer"], m) for p, m in momentum.items())
    return error, same and kept


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_gradient_that_is_not_finite_stops_all_ranks_unchanged(world_size, tmp_path):
    for error, unchanged in run_ranks(spoiled_gradient, world_size, tmp_path / "ranks"):
        assert error.startswith(
            f"the gradient of parameter 2, (16, 64), is not finite, seen on rank {world_size - 1}"
        )
        assert unchanged


def test_huge_and_tiny_gradients_are_finite():
    params = make_parameters()
    for scale in (1e30, 1e-30, 0.0):
        muon = Muon(params, lr=0.02)
        set_gradients(params, 0)
        for p in params:
            p.grad.mul_(scale)
        muon.step()
    assert all(p.isfinite().all() for p in params)


def weights_differ(rank, world_size, spoiled):
    gpt = GPT(Hyperparameters(**TINY))
    torch.manual_seed(0)
    for p in gpt.parameters():
        torch.nn.init.normal_(p)
    if rank in spoiled:
        gpt.h[1].mlp.c_fc.weight.data[3, 3] *= 1 + 2**-20
    try:
        train_gpt2.check_ranks_agree(train_gpt2.weight_sums(gpt), "void")
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("spoiled", [(), (2,)])
def test_one_weight_of_one_rank_is_noticed(spoiled, tmp_path):
    for error in run_ranks(weights_differ, 3, tmp_path / "ranks", spoiled):
        if spoiled:
            assert error == "the ranks [2] hold another h.1.mlp.c_fc.weight than the others: void"
        else:
            assert error is None


def two_halves(rank, world_size, saved=None):
    """Two steps, or one step from a saved state; parameters and the gathered state."""
    params = make_parameters()
    muon = Muon(params, lr=0.02, rank=rank, world_size=world_size)
    if saved:
        for p, value in zip(params, saved[0]):
            p.data.copy_(value)
        muon.load_state_dict(copy.deepcopy(saved[1]))
    set_gradients(params, int(bool(saved)))
    muon.step()
    owned = {p for p, owner in muon.owner.items() if owner == rank}
    assert set(muon.state) == owned, "momentum is only on its owner"
    return [p.detach().clone() for p in params], muon.gathered_state_dict()


def test_state_continues_at_any_world_size(tmp_path):
    first = {w: run_ranks(two_halves, w, tmp_path / f"a{w}")[0] for w in (1, 3)}
    for before in (1, 3):
        for after in (1, 3):
            folder = tmp_path / f"b{before}{after}"
            for params, state in run_ranks(two_halves, after, folder, first[before]):
                if (before, after) == (1, 1):
                    expected = params, state
                assert all(map(torch.equal, params, expected[0]))
                momenta, kept = state["state"], expected[1]["state"]
                for i in kept:
                    assert torch.equal(momenta[i]["momentum_buffer"], kept[i]["momentum_buffer"])


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_steps_equal_torchs_own_muon():
    """Its momentum is 0.05 times ours; its factor of 0.2 asks for five times the learning rate."""
    ours, theirs = make_parameters(), make_parameters()
    muon = Muon(ours, lr=0.02)
    torchs = torch.optim.Muon(
        theirs, lr=0.1, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(2):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        muon.step()
        torchs.step()
    for p, q, initial in zip(ours, theirs, make_parameters()):
        bound = 0.1 if 1 in p.shape else 0.05  # of a vector one number counts, rounded to bf16
        assert (p - q).norm() < bound * (q - initial).norm(), p.shape
