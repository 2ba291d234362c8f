"""Index tensors of a mixture of experts: loop, kernels and sort agree; every choice has its place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.errors import FreeScaleError
from freescale.kernels.moe import routing as moe_routing
from freescale.kernels.moe.routing import TILE_ROWS, num_tiles, route, tile_list


def choose(tokens, per_token, num_experts, *, seed=0, among=None):
    """Distinct experts for every token, drawn among the first `among`."""
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, among or num_experts, generator=draw).topk(per_token).indices


def ways(experts, num_experts):
    """The same index tensors by every way that can run here."""
    yield route(experts, num_experts, kernels=False)
    yield moe_routing._by_sort(experts, num_experts)
    if not torch.cuda.is_available():
        pytest.importorskip("triton")
        yield route(experts, num_experts, kernels=True)


def check(experts, num_experts):
    flat = experts.flatten()
    order = torch.sort(flat, stable=True).indices
    for made in ways(experts, num_experts):
        assert made.offsets.tolist() == [int((flat < e).sum()) for e in range(num_experts + 1)]
        assert torch.equal(made.tokens.long(), order // experts.shape[1])
        assert torch.equal(made.places.flatten()[order].long(), torch.arange(len(order)))
        assert {x.dtype for x in made} == {torch.int32}


def test_the_example_of_the_documentation():
    for made in ways(torch.tensor([[2, 0], [0, 1], [2, 1]]), 3):
        assert made.offsets.tolist() == [0, 2, 4, 6]
        assert made.tokens.tolist() == [0, 1, 1, 2, 0, 2]
        assert made.places.tolist() == [[4, 0], [1, 2], [5, 3]]


@pytest.mark.parametrize(
    ("tokens", "per_token", "num_experts", "among"),
    [(1, 1, 1, 1), (1, 3, 8, 8), (300, 1, 4, 1), (300, 2, 5, 2), (60, 4, 256, 256), (129, 8, 8, 8)],
)
def test_edges(tokens, per_token, num_experts, among):
    check(choose(tokens, per_token, num_experts, among=among), num_experts)


@settings(max_examples=6, deadline=None)
@given(
    tokens=st.integers(1, 150), per_token=st.integers(1, 4), more=st.integers(0, 90), seed=st.integers(0, 99)
)
def test_any_routing(tokens, per_token, more, seed):
    check(choose(tokens, per_token, per_token + more, seed=seed), per_token + more)


@settings(max_examples=8, deadline=None)
@given(counts=st.lists(st.integers(0, 300), min_size=1, max_size=20))
def test_tiles_cover_every_row_once_and_never_two_experts(counts):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    offsets = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(torch.int32)
    tiles = tile_list(offsets, sum(counts)).tolist()
    assert len(tiles) == num_tiles(sum(counts), len(counts))
    used = [tile for tile in tiles if tile[0] >= 0]
    wanted = [
        [e, first, int(offsets[e + 1])]
        for e in range(len(counts))
        for first in range(int(offsets[e]), int(offsets[e + 1]), TILE_ROWS)
    ]
    assert used == wanted
    assert tiles[: len(used)] == used


def test_int32_and_int64_choices_are_the_same():
    experts = choose(70, 2, 6)
    for a, b in zip(ways(experts, 6), ways(experts.to(torch.int32), 6)):
        assert all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("bad", [-1, 3])
def test_experts_that_do_not_exist_are_refused(bad):
    with pytest.raises(FreeScaleError, match="does not exist"):
        route(torch.tensor([[0, 1], [2, bad]]), 3)


def test_more_rows_than_int32_counts_are_refused():
    with pytest.raises(FreeScaleError, match="too many rows"):
        route(torch.zeros(1, 1, dtype=torch.int64).expand(2**16, 2**15), 4)
