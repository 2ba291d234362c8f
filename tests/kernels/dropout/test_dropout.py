"""Keyed dropout: loops and kernels find the bits of the reference, and the bits look drawn at random."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.kernels import SequenceLayout
from freescale.kernels.dropout import (
    dropout,
    key_of_step,
    masked,
    padded_keys,
    reference,
    sample_keys,
    token_keys,
)
from freescale.kernels.dropout.api import _by_kernel
from tests.effort import examples

LENGTHS = [5, 0, 65, 140, 1]
ROWS = torch.tensor([9, 4, 2**40, 0, 17])
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"
)


def make_layout(lengths=LENGTHS) -> SequenceLayout:
    return SequenceLayout(torch.tensor([0, *lengths]).cumsum(0))


def step_key(seed=1, step=0) -> torch.Tensor:
    return torch.tensor([key_of_step(seed, step)])


def drawn(*, seed=1, step=0, sample=0, positions=400, site=0, columns=256, p=0.3) -> torch.Tensor:
    """A mask of one sample, one row a position, with mean 0 and variance 1 if it is fair."""
    keys = reference.keys(step_key(seed, step), torch.tensor(sample), torch.arange(positions))
    kept = reference.mask(*masked(keys, p=p, site=site)[:3], width=columns).double()
    return (kept - (1 - p)) / (p * (1 - p)) ** 0.5


def z_score(values: torch.Tensor) -> float:
    """How many standard deviations the sum of independent values of variance 1 is from 0."""
    return float(values.sum().abs() / values.numel() ** 0.5)


def test_the_bits_are_these_for_ever():
    # Others would be another curve for every seed.
    assert key_of_step(1, 0) == -3457373125986889990
    keys = token_keys(step_key(), torch.tensor([7]), make_layout([2]))
    assert keys.tolist() == [-5831058881242105064, -857328087129955491]
    kept = reference.mask(*masked(keys, p=0.5, site=2)[:3], width=32)
    assert [int("".join(str(int(bit)) for bit in row), 2) for row in kept] == [2312527036, 608382200]


@given(seed=st.integers(0, 2**63 - 1), step=st.integers(0, 10**9))
def test_a_key_of_a_step_fits_an_int64(seed, step):
    assert -(2**63) <= key_of_step(seed, step) < 2**63
    assert key_of_step(seed, step) != key_of_step(seed, step + 1)


@given(lengths=st.lists(st.integers(0, 9), max_size=8), seed=st.integers(0, 99))
@examples(20, 300)
def test_keys_of_tokens_know_nothing_of_their_neighbours(lengths, seed):
    rows = torch.randperm(1000, generator=torch.Generator().manual_seed(seed))[: len(lengths)]
    layout, step = make_layout(lengths), step_key(seed)
    together = token_keys(step, rows, layout)
    own = torch.repeat_interleave(rows, torch.tensor(lengths, dtype=torch.int64))
    assert torch.equal(together, reference.keys(step, own, layout.positions))
    apart = [token_keys(step, row[None], make_layout([n])) for row, n in zip(rows, lengths)]
    assert torch.equal(together, torch.cat(apart)) if apart else len(together) == 0
    padded = padded_keys(step, rows, layout.longest)
    inside = torch.arange(layout.longest) < torch.tensor(lengths, dtype=torch.int64)[:, None]
    assert torch.equal(padded[inside], together)
    assert not set(sample_keys(step, rows).tolist()) & set(together.tolist())


@given(
    shape=st.tuples(st.integers(0, 9), st.integers(1, 40)),
    p=st.sampled_from([1e-4, 0.1, 0.5, 0.95]),
    site=st.integers(0, 2**31 - 1),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
@examples(30, 300)
def test_the_loops_are_the_reference(shape, p, site, dtype):
    torch.manual_seed(0)
    x, mask = torch.randn(shape).to(dtype), masked(torch.randint(-(2**62), 2**62, shape[:1]), p=p, site=site)
    assert torch.equal(dropout(x, mask), reference.dropout(x, *mask))
    across = x.t().contiguous().t()
    assert torch.equal(dropout(across, mask), reference.dropout(x, *mask))


@interpreted
@pytest.mark.parametrize(
    ("tokens", "width", "site", "dtype"),
    [
        (1, 1, 0, torch.float32),
        (37, 20, 16, torch.float64),
        (130, 64, 2**31 - 1, torch.float32),
        (5, 2050, 1, torch.float32),
    ],
)
def test_the_kernel_is_the_reference(tokens, width, site, dtype):
    pytest.importorskip("triton")
    torch.manual_seed(0)
    mask = masked(torch.randint(2**62, (tokens,)), p=0.3, site=site)
    x = torch.randn(tokens, width, dtype=dtype)
    assert torch.equal(_by_kernel(x, mask), reference.dropout(x, *mask))
    wide = torch.randn(tokens, width + 3, dtype=dtype)[:, :width]
    assert torch.equal(_by_kernel(wide, mask), reference.dropout(wide, *mask))


@interpreted
def test_the_kernel_of_keys_is_the_reference():
    pytest.importorskip("triton")
    from freescale.kernels.dropout.triton.masks import token_keys_kernel

    layout, step = make_layout(), step_key(2**63 - 1, 7)
    out, tiles = torch.empty(layout.num_tokens, dtype=torch.int64), layout.token_tiles(64)
    token_keys_kernel[(len(tiles),)](step, ROWS, tiles, layout.device_offsets, out, BLOCK=64)
    assert torch.equal(out, token_keys(step, ROWS, layout))


def test_gradients_of_any_order_are_masked_alike():
    x = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    mask = masked(torch.arange(6), p=0.4, site=1)
    assert torch.autograd.gradcheck(lambda x: dropout(x, mask), x)
    assert torch.autograd.gradgradcheck(lambda x: dropout(x, mask).sin(), x)


def test_what_is_dropped_is_zero_even_where_it_was_no_number():
    mask = masked(torch.arange(50), p=0.5, site=0)
    out = dropout(torch.full((50, 8), float("nan")), mask)
    kept = reference.mask(*mask[:3], width=8)
    assert torch.equal(out.isnan(), kept)
    assert (out[~kept] == 0).all()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_is_the_one_asked_for(p):
    masks = torch.stack([drawn(step=step, p=p) for step in range(20)])
    assert z_score(masks) < 4
    # As many kept in a row or in a column as independent draws would have: variance 1, a few percent of noise.
    for sums in (masks.sum(2) / 256**0.5, masks.sum(1) / 400**0.5):
        assert float(sums.var()) == pytest.approx(1, abs=5 * (2 / sums.numel()) ** 0.5)


@pytest.mark.parametrize("p", [0.2, 0.5])
def test_no_part_of_the_key_foretells_another(p):
    base = drawn(p=p)
    others = {
        "seed": drawn(seed=2, p=p),
        "step": drawn(step=1, p=p),
        "sample": drawn(sample=1, p=p),
        "site": drawn(site=1, p=p),
        "step for sample": drawn(step=1, sample=1, p=p),
    }
    for name, other in others.items():
        assert z_score(base * other) < 4, name
    for lag in (1, 2, 3, 7, 16, 64, 128):
        assert z_score(base[:, lag:] * base[:, :-lag]) < 4, f"columns {lag} apart"
        assert z_score(base[lag:] * base[:-lag]) < 4, f"positions {lag} apart"
    for matrix in (base.T @ base / 400**0.5, base @ base.T / 256**0.5):
        pairs = matrix[~torch.eye(len(matrix), dtype=torch.bool)]
        assert float(pairs.std()) == pytest.approx(1, abs=0.02)
        assert float(pairs.abs().max()) < 6.5


@pytest.mark.parametrize("axis", ["columns", "positions", "sites", "steps"])
def test_patterns_of_six_are_as_frequent_as_chance_has_it(axis):
    if axis == "columns":
        bits = drawn(p=0.5, columns=6 * 128).view(400, 128, 6)
    elif axis == "positions":
        bits = drawn(p=0.5, positions=6 * 200).view(200, 6, 256).transpose(1, 2)
    else:
        bits = torch.stack([drawn(p=0.5, **{axis[:-1]: n}) for n in range(6)], dim=-1)
    patterns = ((bits > 0).long() * 2 ** torch.arange(6)).sum(-1).flatten()
    counts = np.bincount(patterns.numpy(), minlength=64)
    expected = len(patterns) / 64
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    # 63 degrees of freedom: mean 63, deviation 11; one fair generator in 10,000 leaves this range.
    assert 29 < chi_square < 113
