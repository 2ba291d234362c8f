"""The id model against drawn ids, and against bytes that real ranks have moved."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.sim.costs.id_traffic import IdModel
from tests.effort import examples


@pytest.mark.parametrize(("rows", "zipf"), [(500, 0.0), (2_000, 1.0), (20_000, 0.8), (5_000, 1.3)])
def test_expected_values_are_those_of_drawn_ids(rows: int, zipf: float) -> None:
    rng = np.random.default_rng(1)
    weights = np.arange(1, rows + 1) ** -zipf
    batches = [rng.choice(rows, 3_000, p=weights / weights.sum()) for _ in range(40)]
    draws, other = 1_000, 3_000
    distinct = np.mean([len(np.unique(batch[:draws])) for batch in batches])
    pairs = list(itertools.pairwise(batches))
    shared = np.mean([len(np.intersect1d(one[:draws], two)) for one, two in pairs])
    occurrences = np.mean([np.isin(one, two).mean() for one, two in pairs])
    model = IdModel(rows, zipf)
    assert model.distinct(np.array([draws]))[0] == pytest.approx(distinct, rel=0.02)
    assert model.shared(np.array([draws]), other)[0] == pytest.approx(shared, rel=0.02)
    assert model.shared_occurrences(other) == pytest.approx(occurrences, rel=0.02)


@pytest.mark.parametrize(
    ("rows", "zipf", "ranks", "dedup", "hidden", "both"),
    [
        (10_000_000, 1.0, 2, 0.374, 0.716, 0.112),
        (10_000_000, 1.0, 4, 0.415, 0.716, 0.147),
        (10_000_000, 0.8, 2, 0.715, 0.431, 0.175),
        (10_000_000, 0.8, 4, 0.766, 0.431, 0.214),
        (1_000_000, 1.0, 2, 0.264, 0.837, 0.126),
        (1_000_000, 0.8, 2, 0.485, 0.738, 0.263),
    ],
)
def test_bytes_are_those_that_ranks_have_moved(
    rows: int, zipf: float, ranks: int, dedup: float, hidden: float, both: float
) -> None:
    """Shares of the plain bytes as `benchmarks/prioritized_overlap.py` measured them (docs/results.md)."""
    model, events = IdModel(rows, zipf), 1_000_000
    draws = np.array([events / ranks])
    plain = events * (2 * 256 + 8)
    assert ranks * model.distinct(draws)[0] * (2 * 256 + 8) / plain == pytest.approx(dedup, abs=0.002)
    assert events * model.shared_occurrences(events) * 2 * 256 / plain == pytest.approx(hidden, abs=0.002)
    assert ranks * model.shared(draws, events)[0] * 2 * 256 / plain == pytest.approx(both, abs=0.002)


@examples(13, thorough=200)
@given(
    rows=st.integers(1, 10**9),
    zipf=st.floats(0, 3),
    draws=st.lists(st.integers(0, 10**7), min_size=1, max_size=9),
)
def test_rows_grow_with_draws_and_stay_within_them(rows: int, zipf: float, draws: list[int]) -> None:
    model, asked = IdModel(rows, zipf), np.sort(np.array(draws, dtype=np.float64))
    distinct, shared = model.distinct(asked), model.shared(asked, 1e6)
    assert (np.diff(distinct) >= -1e-6 * rows).all()
    assert (distinct <= np.minimum(asked, rows) * (1 + 1e-3) + 1e-6).all()
    assert (shared <= distinct * (1 + 1e-9) + 1e-9).all()
    assert 0 <= model.shared_occurrences(1e6) <= 1 + 1e-9
