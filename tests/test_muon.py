"""Muon: against the singular value decomposition, and bit-identical for every world size."""

import copy
import math
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import both_dtypes, run_ranks
from plain import PlainMuon, plain_newton_schulz
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import train_gpt2
from train_gpt2 import Muon, zeropower_via_newtonschulz5

# Six have the same shape. A parameter with four dimensions counts as a matrix.
SHAPES = [(16, 16), (64, 16), (16, 64), (8, 8), (4, 24), (3, 1), (1, 5), (6, 2, 3, 1)]
SHAPES = SHAPES + [(16, 16)] * 5


def polynomial(s, steps=5):
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


def exact_orthogonalization(G):
    """Return U p(S) V^T in float64, where p is the scalar polynomial applied five times."""
    U, S, Vh = torch.linalg.svd(G.double(), full_matrices=False)
    S = polynomial(S / S.norm(dim=-1, keepdim=True))
    return U @ torch.diag_embed(S) @ Vh


def relative(difference, whole):
    return (difference.double().norm() / whole.double().norm()).item()


# ---- The iteration -------------------------------------------------------------------------------
@both_dtypes
@pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(32, 32), (64, 16), (16, 64), (1, 7), (7, 1), (3, 24, 48)])
def test_singular_values_become_the_polynomial_of_themselves(shape, given, dtype):
    torch.manual_seed(0)
    G = torch.randn(shape).to(given)
    kept = G.clone()
    out = zeropower_via_newtonschulz5(G, getattr(torch, dtype))
    assert torch.equal(kept, G), "the input must not be changed"
    assert out.dtype == torch.bfloat16 and out.shape == G.shape
    expected = exact_orthogonalization(G)
    assert relative(out - expected, expected) < (0.05 if dtype == "bfloat16" else 0.005)


@both_dtypes
@pytest.mark.parametrize("shape", [(24, 40), (40, 8), (2, 8, 40)])
def test_the_scale_of_the_input_does_not_matter(shape, dtype):
    """Unless it is so small that the result may be smaller."""
    torch.manual_seed(0)
    products = getattr(torch, dtype)
    for given in (torch.float32, torch.bfloat16):
        G = torch.randn(shape).to(given)
        expected = zeropower_via_newtonschulz5(G, products)
        for scale in (1e-3, 1e10, 1e30):
            out = zeropower_via_newtonschulz5(G * scale, products)
            torch.testing.assert_close(out, expected, rtol=0.05, atol=0.02)
    assert not zeropower_via_newtonschulz5(torch.zeros(shape), products).any()
    for value in (1e-45, 1e-30, 3e38):
        out = zeropower_via_newtonschulz5(torch.full(shape, value), products)
        assert out.isfinite().all() and out.abs().max() < 1.3, value


def spectra(m, n):
    """Return difficult matrices: of low rank, or with quickly falling singular values."""
    torch.manual_seed(0)
    low = torch.randn(m, 8) @ torch.randn(8, n)
    U, V = (torch.linalg.qr(torch.randn(size, m))[0] for size in (m, n))
    falling = torch.arange(1.0, m + 1)
    return {
        "rank 1": torch.outer(torch.randn(m), torch.randn(n)),
        "rank 8": low,
        "rank 8 and noise": low + 0.01 * torch.randn(m, n),
        "1/k": U @ torch.diag(1 / falling) @ V.T,
        "1/k^2": U @ torch.diag(1 / falling**2) @ V.T,
    }


@both_dtypes
@pytest.mark.parametrize("shape", [(96, 96), (64, 256), (256, 64)])
def test_hard_spectra_are_no_worse_than_with_the_plain_iteration(shape, dtype):
    """Here, composing all five iterations on the Gram matrix has errors of 10^1 to 10^13."""
    products = getattr(torch, dtype)
    for name, G in spectra(min(shape), max(shape)).items():
        G = G.T if shape[0] > shape[1] else G
        exact = exact_orthogonalization(G)
        for out in (
            zeropower_via_newtonschulz5(G, products),
            zeropower_via_newtonschulz5(torch.stack([G] * 3), products)[1],
        ):
            plain = plain_newton_schulz(G, dtype=products)
            bound = max(1.25 * relative(plain - exact, exact), 0.08)
            assert relative(out - exact, exact) < bound, name
            assert torch.linalg.matrix_norm(out.double(), 2) < 1.4, name


@pytest.mark.parametrize(
    "options",
    [{"lr": -1}, {"lr": float("nan")}, {"momentum": 1.0}, {"weight_decay": -1}, {"rank": 2}],
)
def test_invalid_arguments_are_rejected(options):
    with pytest.raises(ValueError, match="must be"):
        Muon(make_parameters(), **{"lr": 0.02, "world_size": 2, **options})
    for shape in [(), (5,), (2, 2, 5, 5)]:
        with pytest.raises(ValueError, match="a matrix or a stack of matrices"):
            zeropower_via_newtonschulz5(torch.zeros(shape))
    with pytest.raises(ValueError, match="takes matrices"):
        Muon([nn.Parameter(torch.zeros(5))], lr=0.1)


# ---- Steps, on any number of ranks ---------------------------------------------------------------
def make_parameters(shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(params, step, skip=()):
    generator = torch.Generator().manual_seed(100 + step)
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=generator)
        p.grad = None if i in skip else grad


def flat(params):
    return torch.cat([p.detach().flatten() for p in params])


def spoil_gradients_of_others(muon):
    """Overwrite the gradients of other ranks' matrices: only the owner may use them."""
    for p, owner in muon.owner.items():
        if owner != muon.rank and p.grad is not None:
            p.grad.fill_(float("nan"))


def three_steps(rank, world_size, dtype, skip=()):
    """Take three steps without the gradients numbered `skip`; return what the rank then holds."""
    params = make_parameters()
    muon = Muon(params, 0.02, weight_decay=0.1, dtype=dtype, rank=rank, world_size=world_size)
    for step in range(3):
        set_gradients(params, step, skip)
        spoil_gradients_of_others(muon)
        muon.step()
    gathered = muon.full_state_dict()["state"]
    return SimpleNamespace(
        values=[p.detach() for p in params],
        gathered=[gathered[i]["momentum_buffer"] for i in range(len(params))],
        momenta=[i for i, p in enumerate(params) if p in muon.state],
        owned=[i for i, p in enumerate(params) if muon.owner[p] == rank and i not in skip],
    )


# Gradients that are missing: none, some of several buckets, whole buckets, all but one, all
SKIPS = [(), (0, 4), (8, 9, 10, 0, 3), tuple(range(1, len(SHAPES))), tuple(range(len(SHAPES)))]


def cases(rank, world_size):
    return {
        (dtype, skip): three_steps(rank, world_size, dtype, skip)
        for dtype in (torch.float32, torch.bfloat16)
        for skip in SKIPS
    }


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_every_world_size_gives_the_same_bits(world_size, tmp_path):
    ranks = run_ranks(cases, world_size, tmp_path / "ranks")
    for case, alone in cases(0, 1).items():
        for i, (value, initial) in enumerate(zip(alone.values, make_parameters())):
            assert torch.equal(value, initial) == (i in case[1]), case
        of_ranks = [results[case] for results in ranks]
        for result in of_ranks:
            assert all(map(torch.equal, result.values, alone.values)), case
            assert all(map(torch.equal, result.gathered, alone.gathered)), case
            assert result.momenta == result.owned, "momentum is only on its owner"
        owned = [i for result in of_ranks for i in result.owned]
        assert sorted(owned) == [i for i in range(len(SHAPES)) if i not in case[1]]


def test_a_gradient_may_come_and_go():
    """Matrices without a gradient keep their momentum for a step, and the others continue."""
    params, separate = make_parameters([(16, 16)] * 4), make_parameters([(16, 16)] * 4)
    muon = Muon(params, lr=0.02)
    alone = [Muon([p], lr=0.02) for p in separate]
    for step, skip in enumerate([(), (1, 2), ()]):
        set_gradients(params, step, skip)
        set_gradients(separate, step)
        muon.step()
        for i, optimizer in enumerate(alone):
            if i not in skip:
                optimizer.step()
    torch.testing.assert_close(flat(params), flat(separate), rtol=0, atol=1e-3)


@both_dtypes
def test_steps_equal_the_plain_optimizer(dtype):
    """The reference is the plain optimizer in float64. Its own error in `dtype` is the measure."""
    dtype = getattr(torch, dtype)
    results = []
    for optimizer_class, products in (Muon, dtype), (PlainMuon, dtype), (PlainMuon, torch.float64):
        params = make_parameters()
        if optimizer_class is PlainMuon:
            params = [nn.Parameter(p.detach().flatten(1)) for p in params]
        optimizer = optimizer_class(params, lr=0.02, dtype=products)
        for step in range(3):
            set_gradients(params, step)
            optimizer.step()
        results.append(flat(params))
    ours, plain, exact = results
    moved = exact - flat(make_parameters())
    if dtype == torch.bfloat16:
        assert (ours - exact).norm() < 1.5 * (plain - exact).norm()
        assert relative(ours - exact, moved) < 0.05
    else:
        assert relative(ours - exact, moved) < 0.005


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_steps_equal_torchs_own_muon():
    """Converted as the docstring of Muon says: its factor of 0.2 needs five times the lr."""
    shapes = [shape for shape in SHAPES if len(shape) == 2]
    ours, theirs = make_parameters(shapes), make_parameters(shapes)
    muon = Muon(ours, lr=0.02, weight_decay=0.5)
    torchs = torch.optim.Muon(
        theirs, lr=0.1, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(2):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        muon.step()
        torchs.step()
    for p, q, initial in zip(ours, theirs, make_parameters(shapes)):
        bound = 0.1 if 1 in p.shape else 0.05  # a vector is only scaled, by a rounded number
        assert (p - q).norm() < bound * (q - initial).norm(), p.shape


@pytest.mark.parametrize("shape", [(48, 48), (96, 24), (24, 96), (512, 2), (2, 512)])
def test_the_docstrings_learning_rate_makes_it_keller_jordans_muon(shape):
    """His lr of 0.02 is 0.02 / sqrt(N) here, and an entry changes by about lr."""
    (p,), (q,) = make_parameters([shape]), make_parameters([shape])
    initial, lr = q.detach().clone(), 0.02 / shape[1] ** 0.5
    set_gradients([p], 0)
    set_gradients([q], 0)
    Muon([p], lr=lr, dtype=torch.float32).step()
    with torch.no_grad():  # https://github.com/KellerJordan/Muon: its first step
        update = plain_newton_schulz(q.grad.add(q.grad, alpha=0.95), dtype=torch.float32)
        q.add_(update * max(1, shape[0] / shape[1]) ** 0.5, alpha=-0.02)
    assert relative(p.detach() - q.detach(), q.detach() - initial) < 0.005
    change = (p.detach() - initial).square().mean().sqrt().item()
    assert 0.7 * lr < change < 1.25 * lr


# ---- Groups and the distribution of work ---------------------------------------------------------
def steps_in_groups(rank, world_size):
    """Three groups, the last one added later, each with its own learning rate."""
    params = make_parameters()
    groups = [{"params": params[:2], "lr": 0.0}, {"params": params[2:7]}]
    muon = Muon(groups, lr=0.1, rank=rank, world_size=world_size)
    muon.add_param_group({"params": params[7:], "lr": 0.02, "momentum": 0.5})
    for step in range(2):
        set_gradients(params, step)
        spoil_gradients_of_others(muon)
        muon.step()
    return [p.detach() for p in params], muon.loads


@pytest.mark.parametrize("world_size", [1, 3])
def test_groups_have_their_own_settings(world_size, tmp_path):
    before = make_parameters()
    expected = make_parameters()
    for part, lr, momentum in [(slice(2, 7), 0.1, 0.95), (slice(7, None), 0.02, 0.5)]:
        muon = Muon(expected[part], lr=lr, momentum=momentum)
        for step in range(2):
            set_gradients(expected, step)
            muon.step()
    for after, loads in run_ranks(steps_in_groups, world_size, tmp_path / "ranks"):
        assert all(map(torch.equal, after[:2], before[:2]))
        assert all(map(torch.equal, after[2:], expected[2:]))
        assert min(loads) > 0


@pytest.mark.parametrize("n_layer, C", [(12, 768), (48, 1600), (13, 768)])
def test_ranks_share_the_cost_as_well_as_possible(n_layer, C):
    shapes = ([(C, C)] * 4 + [(4 * C, C), (C, 4 * C)]) * n_layer
    params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    for ranks in range(2, 17):
        muons = [Muon(params, lr=0.1, rank=rank, world_size=ranks) for rank in (0, ranks - 1)]
        assert muons[0].owner == muons[1].owner and set(muons[0].owner) == set(params)
        costs = [0] * ranks
        for p, owner in muons[0].owner.items():
            costs[owner] += train_gpt2.matrix_cost(p)
        assert costs == muons[0].loads
        # A square matrix costs one unit, a rectangular one two.
        assert max(costs) <= 15 * C**3 * max(2, math.ceil(8 * n_layer / ranks))


@pytest.mark.parametrize("shape", [(48, 48), (48, 60), (48, 200), (200, 48), (96, 48)])
def test_the_cost_of_a_matrix_is_what_newton_schulz_multiplies(shape):
    with FlopCounterMode(display=False) as counter:
        zeropower_via_newtonschulz5(torch.randn(shape), torch.float32)
    assert counter.get_total_flops() == 2 * train_gpt2.matrix_cost(torch.empty(shape))


# ---- State ---------------------------------------------------------------------------------------
def two_halves(rank, world_size, saved=None):
    """Take two steps, or two more from a saved state; return the parameters and the full state."""
    params = make_parameters()
    muon = Muon(params, lr=0.02, rank=rank, world_size=world_size)
    if saved:
        for p, value in zip(params, saved[0]):
            p.data.copy_(value)
        muon.load_state_dict(copy.deepcopy(saved[1]))
    for step in range(2):
        set_gradients(params, 2 * bool(saved) + step, skip=(2,))
        muon.step()
    assert all(muon.owner[p] == rank for p in muon.state), "momentum is only on its owner"
    return [p.detach().clone() for p in params], muon.full_state_dict()


def test_state_continues_at_any_world_size(tmp_path):
    first = {w: run_ranks(two_halves, w, tmp_path / f"a{w}")[0] for w in (1, 3, 8)}
    params, state = two_halves(0, 1, first[1])
    momenta = {i: momentum["momentum_buffer"] for i, momentum in state["state"].items()}
    assert [i for i, momentum in momenta.items() if not momentum.any()] == [2]
    for before, after in [(1, 1), (1, 3), (3, 8), (8, 1)]:
        folder = tmp_path / f"b{before}{after}"
        for values, gathered in run_ranks(two_halves, after, folder, first[before]):
            assert all(map(torch.equal, values, params))
            assert gathered["param_groups"] == state["param_groups"]
            for i, momentum in momenta.items():
                assert torch.equal(gathered["state"][i]["momentum_buffer"], momentum)


# ---- Use in other projects -----------------------------------------------------------------------
@both_dtypes
def test_the_section_alone_trains_another_network(dtype):
    """As README says, the section can be copied. It needs torch and torch.distributed as dist."""
    sections = Path(train_gpt2.__file__).read_text().split("\n# ---- ")
    (section,) = [section for section in sections if section.startswith("Muon")]
    names = {"torch": torch, "dist": dist}
    exec(compile("# " + section, "muon.py", "exec"), names)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 32), nn.ReLU(), nn.Linear(32, 4)
    )
    matrices = [model[0].weight, model[3].weight]
    others = [p for p in model.parameters() if all(p is not q for q in matrices)]
    muon = names["Muon"](matrices, lr=0.005, dtype=getattr(torch, dtype))
    adamw = torch.optim.AdamW(others, lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(muon, 1.0, 0.1, 40)
    images, labels = torch.randn(64, 1, 6, 6), torch.randint(4, (64,))

    def closure():
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        return loss

    losses = []
    for _ in range(40):
        losses.append(muon.step(closure).item())
        adamw.step()
        schedule.step()
    assert muon.step() is None
    assert losses[0] > 1.2 and losses[-1] < 0.1
    assert muon.param_groups[0]["lr"] == pytest.approx(0.0005)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_goes_on_like_the_original(copied):
    params = make_parameters()
    muon = Muon(params, lr=0.02)
    set_gradients(params, 0)
    muon.step()
    others, other = copied((params, muon))
    for step, (some, optimizer) in enumerate(((params, muon), (others, other))):
        set_gradients(some, 1)
        optimizer.step()
        assert flat(some).isfinite().all(), step
    assert torch.equal(flat(params), flat(others))
    assert (other.rank, other.world_size, other.loads) == (0, 1, muon.loads)
