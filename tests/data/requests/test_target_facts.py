"""Shares of training targets against counting them one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.data.batches.examples import Examples
from freescale.data.requests.target_facts import label_shares, measure_repeats
from freescale.data.scan import row_blocks, spread_rows
from tests.list_source import ListSource

HISTORIES = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=9), min_size=1, max_size=8)


def targets(history, max_length):
    """(position, item) of what training predicts of a history."""
    return list(enumerate(history[:-2]))[1:][-max_length:]


@settings(deadline=None)
@given(HISTORIES, st.integers(1, 5))
def test_repeats_are_targets_met_before_in_their_whole_history(histories, max_length):
    found = measure_repeats(Examples(source=ListSource(histories), max_length=max_length))
    asked = [(h, n, item) for h in histories for n, item in targets(h, max_length)]
    assert found.targets == len(asked)
    assert found.repeated == sum(item in h[:n] for h, n, item in asked)
    assert found.whole
    assert found.share == (found.repeated / len(asked) if asked else 0.0)


def test_of_a_large_data_set_a_part_is_looked_at_always_the_same():
    source = ListSource([[1, 2, 1, 3, 1, 9, 9]] * 200)
    examples = Examples(source=source)
    found = measure_repeats(examples, max_events=140)
    assert not found.whole
    assert 60 <= found.targets <= 100
    assert found.share == 0.5
    assert found == measure_repeats(examples, max_events=140)


class Grouped(ListSource):
    groups = np.full(40, 5)


def test_the_part_is_made_of_whole_groups_spread_over_the_data():
    source = Grouped([[1] * 7] * 200)
    rows = spread_rows(source, max_events=140)
    assert rows.tolist() == [row for group in (0, 13, 26, 39) for row in range(5 * group, 5 * group + 5)]
    assert spread_rows(source, max_events=1400).tolist() == list(range(200))


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(1, 12))
def test_blocks_hold_every_row_once(lengths, max_events):
    blocks = list(row_blocks(ListSource([[1] * n for n in lengths]), max_events=max_events))
    assert np.concatenate(blocks).tolist() == list(range(len(lengths)))
    assert all(len(b) == 1 or sum(lengths[r] for r in b) <= max_events for b in blocks)


@settings(deadline=None)
@given(HISTORIES)
def test_labels_are_counted_over_training_targets(histories):
    shares, values = label_shares(Examples(source=ListSource(histories)), (1.0, 2.5))
    actions = [item / 2 for h in histories for _, item in targets(h, 200)]
    assert shares == [
        pytest.approx(np.mean([a > x for a in actions]) if actions else 0.0) for x in (1.0, 2.5)
    ]
    assert values.tolist() == sorted(set(actions))


def test_a_rare_label_is_looked_for_in_all_of_the_data():
    histories = [[2, 2, 2, 2, 2]] * 300
    histories[151] = [2, 40, 2, 2, 2]
    shares, values = label_shares(Examples(source=ListSource(histories)), (3.5,), max_events=50)
    assert shares == [pytest.approx(1 / 600)]
    assert values.tolist() == [1.0, 20.0]
