"""Muon: against the singular value decomposition, and bit-identical for every world size."""

from functools import partial

import pytest
import torch
from conftest import run_ranks
from plain import PlainMuon

import train_gpt2
from train_gpt2 import Muon, zeropower_via_newtonschulz5

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
