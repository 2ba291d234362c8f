"""Pools against a loop over all events."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from freescale.data.pools import PoolIndex, PoolRule


def by_loop(kind: list[int], end: int, rule: PoolRule) -> list[int]:
    left = dict.fromkeys(rule.kinds, rule.each)
    kept = []
    for place in range(end - 1, max(0, end - rule.window) - 1, -1):
        if left.get(kind[place], 0):
            left[kind[place]] -= 1
            kept.append(place)
    return kept[::-1]


rules = st.builds(
    PoolRule,
    st.just("kind"),
    st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True).map(tuple),
    st.integers(1, 6),
    st.integers(1, 30),
)


@given(st.lists(st.lists(st.integers(0, 4), max_size=40), min_size=1, max_size=4), rules, st.data())
def test_the_last_of_each_kind(histories, rule, data):
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in histories])]).astype(np.int64)
    index = PoolIndex(np.array([kind for each in histories for kind in each], np.int64), offsets, rule)
    chosen = data.draw(st.lists(st.integers(0, len(histories) - 1), max_size=5))
    ends = np.array([data.draw(st.integers(0, len(histories[each]))) for each in chosen], np.int64)
    most = data.draw(st.none() | st.integers(1, 8))
    places, found = index.spans(np.array(chosen, np.int64), ends, most=most)
    counts = index.counts(np.array(chosen, np.int64), ends)
    for number, (history, end) in enumerate(zip(chosen, ends.tolist())):
        mine = places[found[number] : found[number + 1]] - offsets[history]
        wanted = by_loop(histories[history], end, rule)
        assert counts[number] == len(wanted)
        assert mine.tolist() == (wanted if most is None else wanted[-most:])
