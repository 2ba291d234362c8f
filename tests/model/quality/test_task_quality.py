"""Metrics of tasks against brute force over all pairs, with ties, weights and groups, and on any number of ranks."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.model.quality.task_quality import TaskQuality
from tests.effort import examples

ROWS = st.lists(
    st.tuples(
        st.integers(-6, 6).map(lambda x: x / 2),  # ties
        st.booleans(),
        st.sampled_from([0.0, 1.0, 1.0, 0.25, 3.1]),
        st.integers(0, 3),
        st.integers(0, 1),
    ),
    max_size=25,
)
NUMBERS = st.lists(
    st.tuples(st.integers(-3, 3).map(float), st.integers(0, 3).map(float), st.sampled_from([0.0, 1.0, 0.3])),
    max_size=20,
)


def collected(rows, *, kind="binary", limit=1 << 20):
    quality = TaskQuality(kind, limit=limit)
    for part in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        columns = [torch.tensor([float(row[n]) for row in part], dtype=torch.float64) for n in range(3)]
        keys = {}
        if kind == "binary":
            users = torch.tensor([row[3] for row in part], dtype=torch.int64)
            keys = {
                "users": users,
                "requests": users * 2 + torch.tensor([row[4] for row in part], dtype=torch.int64),
            }
        quality.update(columns[0], columns[1], weights=columns[2], **keys)
    return quality


class Together:
    """Ranks in one process: what each of them says in turn is known from a first round."""

    def __init__(self, qualities):
        self.qualities = qualities

    def merged(self):
        """Merge all at once, collective by collective."""
        import threading

        size, barrier = len(self.qualities), threading.Barrier(len(self.qualities), timeout=20)
        slots = [None] * size

        class Rank:
            def __init__(self, number):
                self.number = number

            def _all(self, value):
                slots[self.number] = value.clone()
                barrier.wait()
                found = [x.clone() for x in slots]
                barrier.wait()
                return found

            def sum(self, values):
                return torch.stack(self._all(values)).sum(0)

            def gather(self, rows):
                return torch.cat(self._all(rows))

        threads = [
            threading.Thread(target=quality.merge, args=(Rank(n),))
            for n, quality in enumerate(self.qualities)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return [quality.values() for quality in self.qualities]


def auc_of(rows):
    pairs = [(a, b, a[2] * b[2]) for a in rows for b in rows if a[1] and not b[1]]
    total = sum(w for *_, w in pairs)
    return sum(((a[0] > b[0]) + (a[0] == b[0]) / 2) * w for a, b, w in pairs) / total if total else None


def near(value):
    return None if value is None else pytest.approx(value, rel=1e-11, abs=1e-12)


@examples(60, thorough=1000)
@given(ROWS)
def test_binary_metrics_by_their_definitions(rows):
    got = collected(rows).values()
    rows = [row for row in rows if row[2]]
    assert got["auc"] == near(auc_of(rows))
    for name, key in (("user", lambda row: row[3]), ("request", lambda row: (row[3], row[4]))):
        groups = [[row for row in rows if key(row) == one] for one in {key(row) for row in rows}]
        judged = [(auc_of(group), sum(row[2] for row in group)) for group in groups]
        judged = [(value, weight) for value, weight in judged if value is not None]
        if not rows:
            assert f"gauc_{name}" not in got
            continue
        even = sum(v for v, _ in judged) / len(judged) if judged else None
        weighted = sum(v * w for v, w in judged) / sum(w for _, w in judged) if judged else None
        assert got[f"gauc_{name}_even"] == near(even)
        assert got[f"gauc_{name}"] == near(weighted)
        assert got[f"gauc_{name}_share"] == near(sum(w for _, w in judged) / sum(row[2] for row in rows))
    weight = sum(row[2] for row in rows)
    chance = [1 / (1 + math.exp(-row[0])) for row in rows]
    loss = sum(-row[2] * math.log(p if row[1] else 1 - p) for row, p in zip(rows, chance))
    positive = sum(row[2] * row[1] for row in rows)
    assert got["logloss"] == near(loss / weight if weight else None)
    if 0 < positive < weight:
        constant = -positive * math.log(positive / weight) - (weight - positive) * math.log(
            1 - positive / weight
        )
        assert got["ne"] == near(loss / constant)
    expected = sum(row[2] * p for row, p in zip(rows, chance))
    assert got["calibration"] == near(expected / positive if positive else None)


@examples(60, thorough=1000)
@given(NUMBERS)
def test_metrics_of_numbers_by_their_definitions(rows):
    got = collected(rows, kind="number").values()
    rows = [row for row in rows if row[2]]
    weight = sum(row[2] for row in rows)
    assert got["mse"] == near(sum(w * (y - p) ** 2 for p, y, w in rows) / weight if weight else None)
    assert got["mae"] == near(sum(w * abs(y - p) for p, y, w in rows) / weight if weight else None)
    pairs = [(max(a, b, key=lambda r: r[1]), min(a, b, key=lambda r: r[1])) for a, b in combinations(rows, 2)]
    pairs = [(a, b) for a, b in pairs if a[1] != b[1]]
    wins = sum(((a[0] > b[0]) + (a[0] == b[0]) / 2) * a[2] * b[2] for a, b in pairs)
    assert got["xauc"] == near(wins / sum(a[2] * b[2] for a, b in pairs) if pairs else None)


@examples(25, thorough=300)
@given(ROWS, st.sampled_from([2, 3, 4]), st.sampled_from([1 << 20, 6]), st.randoms())
def test_ranks_give_the_same_numbers_as_one(rows, num_ranks, limit, random):
    shares = [[] for _ in range(num_ranks)]
    for row in rows:
        shares[random.randrange(num_ranks)].append(row)
    (alone,) = Together([collected(rows, limit=limit)]).merged()
    for found in Together([collected(share, limit=limit) for share in shares]).merged():
        if limit > len(rows):
            assert found == alone  # to the bit
        else:
            assert found == {name: near(value) for name, value in alone.items()}


def test_beyond_the_limit_auc_is_binned_within_its_error_and_users_are_sampled():
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(20_000, generator=draw, dtype=torch.float64) * 2
    labels = (torch.rand(20_000, generator=draw) < torch.sigmoid(logits)).double()
    users = torch.randint(0, 500, (20_000,), generator=draw)
    exact, binned = TaskQuality("binary"), TaskQuality("binary", limit=3000)
    for quality in (exact, binned):
        for part in range(0, 20_000, 4000):
            rows = slice(part, part + 4000)
            quality.update(logits[rows], labels[rows], users=users[rows], requests=users[rows])
        (values,) = Together([quality]).merged()
        quality.found = values
    wanted, got = exact.found, binned.found
    assert "sampled" not in wanted
    assert "auc_error" not in wanted
    assert got["sampled"] == 1 / 8
    assert 0 < got["auc_error"] < 1e-4
    assert abs(got["auc"] - wanted["auc"]) <= got["auc_error"]
    assert got["gauc_user"] == pytest.approx(wanted["gauc_user"], abs=0.05)
    for name in ("ne", "calibration", "logloss"):
        assert got[name] == near(wanted[name])
    for number in range(1, 11):
        assert got[f"calibration_{number}"] == pytest.approx(wanted[f"calibration_{number}"], rel=1e-3)
        assert wanted[f"calibration_{number}"] == pytest.approx(1.0, abs=0.12)


def test_equal_predictions_lie_in_one_tenth():
    quality = TaskQuality("binary")
    quality.update(torch.tensor([0.0] * 8 + [1.0] * 2), torch.tensor([1.0, 0.0] * 5))
    got = quality.values()
    seen = {
        name: value for name, value in got.items() if name.startswith("calibration_") and value is not None
    }
    assert seen == {
        "calibration_5": pytest.approx(1.0),
        "calibration_10": pytest.approx(2 / (1 + math.exp(-1))),
    }


def test_a_tie_is_half_a_win_where_sorting_alone_would_decide():
    """A stable sort by score puts what came first first: it would give 0 or 1 here, by the order of the rows."""
    for labels in ([1.0, 0.0], [0.0, 1.0]):
        quality = TaskQuality("binary")
        quality.update(torch.zeros(2), torch.tensor(labels))
        assert quality.values()["auc"] == 0.5


def test_a_nan_prediction_counts_against_the_model():
    for label in (0.0, 1.0):
        quality = TaskQuality("binary")
        quality.update(torch.tensor([5.0, -5.0, math.nan]), torch.tensor([1.0, 0.0, label]))
        got = quality.values()
        assert got["auc"] == 0.5
        assert math.isnan(got["logloss"])
    quality = TaskQuality("number")
    quality.update(torch.tensor([5.0, math.nan]), torch.tensor([1.0, 0.0]))
    assert all(math.isnan(value) for value in quality.values().values())


def test_one_class_and_no_rows_define_no_ranking():
    empty, one = TaskQuality("binary"), TaskQuality("binary")
    one.update(torch.tensor([1.0, 2.0]), torch.ones(2), users=torch.tensor([1, 2]))
    assert {value for name, value in empty.values().items()} == {None}
    got = one.values()
    assert got["auc"] is None
    assert got["ne"] is None
    assert got["gauc_user"] is None
    assert got["gauc_user_share"] == 0.0
    assert got["logloss"] == pytest.approx((math.log1p(math.exp(-1)) + math.log1p(math.exp(-2))) / 2)
    assert set(TaskQuality("number").values().values()) == {None}
