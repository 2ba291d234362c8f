"""TokenRule, and the places of tokens, against loops."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.data import TokenRule
from freescale.model.inputs.feature_tokens import _Places, _Reordered
from tests.effort import examples

LENGTHS = st.lists(st.integers(0, 5), max_size=6)
RULE = st.builds(TokenRule, st.integers(0, 3), st.integers(0, 2))


@examples(50, 500)
@given(LENGTHS, RULE)
def test_tokens_and_pairs_are_counted(lengths: list[int], rule: TokenRule) -> None:
    tokens = [rule.front + n + n * rule.after if n else 0 for n in lengths]
    assert rule.tokens(np.array(lengths, dtype=np.int64)).tolist() == tokens
    pairs = [sum(1 for seen in range(n) for _ in range(seen + 1)) for n in tokens]
    assert rule.pairs(np.array(lengths, dtype=np.int64)).tolist() == pairs


@examples(80, 1000)
@given(LENGTHS, RULE)
def test_places_are_those_of_loops(lengths: list[int], rule: TokenRule) -> None:
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    places = _Places.of(offsets, rule)
    # Tokens by name: what an encoder sees, one sequence after the other.
    sequence, event_of, borders, last = [], [], [0], []
    for sample, length in enumerate(lengths):
        first = int(offsets[sample])
        for n in range(rule.front if length else 0):
            sequence.append(("front", n, sample))
            event_of.append(first)
        for event in range(first, first + length):
            sequence.append(("event", event))
            event_of.append(event)
            for n in range(rule.after):
                sequence.append(("after", n, event))
                event_of.append(event)
            last.append(len(sequence) - 1)
        borders.append(len(sequence))
    used = [sample for sample, length in enumerate(lengths) if length]
    # The order in which vectors are stacked.
    stacked = [("front", n, sample) for n in range(rule.front) for sample in used]
    stacked += [("event", event) for event in range(offsets[-1])]
    stacked += [("after", n, event) for n in range(rule.after) for event in range(offsets[-1])]
    order, back = places.order
    assert [stacked[n] for n in order] == sequence
    assert [sequence[n] for n in back] == stacked
    assert places.offsets.tolist() == borders
    assert places.event.tolist() == event_of
    assert places.last.tolist() == last
    assert places.samples.tolist() == used


def test_the_gradient_of_another_order_is_its_way_back() -> None:
    values = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    order = torch.tensor([3, 0, 4, 1, 2])
    moved = _Reordered.apply(values, order, order.argsort())
    assert torch.equal(moved, values[order])
    assert torch.autograd.gradcheck(lambda x: _Reordered.apply(x, order, order.argsort()), values)
