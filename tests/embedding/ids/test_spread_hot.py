"""Popular rows dealt evenly: one-to-one, the same for any number of ranks, exact, and even."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.embedding import SGD, DirectMap, EmbeddingTable, HashMap, NumberedMap, SpreadMap
from freescale.embedding.ids.spread_hot import even_places
from freescale.errors import ConfigError
from freescale.exports.served.served_tables import kept_rows
from freescale.pipeline.traffic import busiest_owner
from freescale.recipe import load_config
from tests.ranks import run_on_ranks
from tests.small_run import train_small


@settings(max_examples=60, deadline=None)
@given(num_rows=st.integers(1, 5000), most=st.integers(1, 600), seed=st.integers(0, 99))
def test_rows_only_change_places(num_rows: int, most: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = np.flatnonzero(rng.random(num_rows) < 0.5)
    spread = SpreadMap(DirectMap(num_rows), ids=ids, counts=rng.integers(0, 9, len(ids)), most=most)
    rows = spread.rows(torch.arange(num_rows))
    assert rows.sort().values.tolist() == list(range(num_rows))


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 48, 256])
@pytest.mark.parametrize("kind", ["direct", "hash"])
def test_no_owner_serves_more_than_five_percent_above_the_mean(kind: str, num_ranks: int) -> None:
    """Zipf 1.0: 26,700 draws a rank; every rank asks for each row once."""
    rng = np.random.default_rng(3)
    num_items, rows = 200_000, 400_000
    popularity = 1 / np.arange(1, num_items + 1)
    popularity /= popularity.sum()
    ids = np.arange(num_items)
    names = rng.permutation(num_items)  # which item is how popular has nothing to do with its number
    asked = 1 - np.exp(-26_700 * popularity)  # expected ranks that ask for an item, over all ranks
    inner = DirectMap(rows) if kind == "direct" else HashMap(rows)
    counts = np.empty(num_items, dtype=np.int64)
    counts[names] = rng.poisson(1e7 * popularity)
    spread = SpreadMap(inner, ids=ids, counts=counts, most=65_536)

    def busiest(id_map: Any) -> float:
        block = -(-rows // num_ranks)
        owner = id_map.rows(torch.from_numpy(names)).numpy() // block
        return busiest_owner(np.bincount(owner, weights=asked, minlength=num_ranks).tolist())

    assert busiest(spread) < 1.05
    if num_ranks == 256:
        assert busiest(inner) > 1.1


def test_places_are_even_for_every_number_of_ranks() -> None:
    places = even_places(4096, 1_000_000)
    assert len(set(places.tolist())) == 4096
    for num_ranks in (2, 3, 5, 7, 100, 384):
        counts = np.bincount(places // -(-1_000_000 // num_ranks), minlength=num_ranks)
        assert counts.max() - counts.min() <= max(3, 0.02 * counts.mean())


def test_moved_rows_take_their_first_values_along() -> None:
    inner = HashMap(1000)
    spread = SpreadMap(inner, ids=np.arange(300), counts=np.arange(300), most=64)
    plain = EmbeddingTable(1000, 4, optimizer=SGD())
    ids = torch.arange(300)
    for first in (0, 400):
        block = EmbeddingTable(600 if first else 1000, 4, optimizer=SGD(), first_row=first)
        spread.move_first_values(block)
        rows = spread.rows(ids)
        here = rows >= first
        torch.testing.assert_close(
            block.weight[rows[here] - first], plain.weight[inner.rows(ids[here])], rtol=0, atol=0
        )


def test_where_rows_lie_is_kept_and_exported() -> None:
    ids = np.array([-5, 3, 1 << 40])
    first = SpreadMap(NumberedMap(ids, DirectMap(3)), ids=ids, counts=np.array([1, 5, 3]), most=4)
    other = SpreadMap(NumberedMap(ids, DirectMap(3)), ids=ids, counts=np.array([9, 5, 30]), most=4)
    for name, tensor in first.state_dict().items():
        other.state_dict()[name].copy_(tensor)
    other.restored()
    assert other.rows(torch.from_numpy(ids)).tolist() == first.rows(torch.from_numpy(ids)).tolist()
    kept = kept_rows("item", first)
    assert kept.ids is not None
    assert kept.rows.tolist() == first.rows(kept.ids).tolist()
    hashed = SpreadMap(HashMap(50), ids=ids, counts=np.array([1, 5, 3]), most=4)
    kept = kept_rows("item", hashed)
    assert (
        kept.rows[HashMap(50).rows(torch.from_numpy(ids))].tolist()
        == hashed.rows(torch.from_numpy(ids)).tolist()
    )


def test_a_map_that_learns_places_its_rows_itself() -> None:
    with pytest.raises(ConfigError, match="spread_hot: map zero_collision gives rows itself"):
        load_config(None, ["embedding.id_map=zero_collision", "embedding.spread_hot=10"])


def both(rank: int, keys: tuple[str, ...], folder: Any) -> Any:
    recipe = ("run.steps=6", "run.eval_every=0", "model.dtype=float64", *keys)
    spread = train_small((*recipe, "embedding.spread_hot=32"), folder / "spread")
    plain = train_small(recipe, folder / "plain")
    return spread["losses"], plain["losses"]


@pytest.mark.parametrize("keys", [(), ("embedding.id_map=hash", "embedding.rows=97")], ids=["direct", "hash"])
def test_the_curve_is_the_same_with_and_without(keys: tuple[str, ...], tmp_path: Any) -> None:
    [(spread, plain), _] = run_on_ranks(both, 2, keys, tmp_path, timeout=110)
    np.testing.assert_allclose(spread, plain, rtol=1e-9, atol=0)
    alone, _ = both(0, keys, tmp_path / "alone")
    np.testing.assert_allclose(alone, plain, rtol=1e-9, atol=0)
