"""Segments: where events and summaries stand, what they see, and how much work that is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.data.batches.segment_rule import SegmentRule, Segments
from freescale.data.batches.segments import insert_summaries
from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.errors import ConfigError
from freescale.kernels import AttentionMask
from tests.effort import examples

RULES = st.builds(
    SegmentRule, recent=st.integers(1, 7), length=st.integers(1, 9), summaries=st.integers(1, 4)
)
LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=5)


def make_batch(lengths):
    tokens = sum(lengths)
    time = torch.arange(tokens) * 10
    return SequenceBatch(
        offsets=torch.tensor([0, *lengths]).cumsum(0), tokens={"time": time, "target_time": time + 7}
    )


def written_out(length, rule):
    """The tokens of one sequence as (event or None, segment), one by one as the rule says."""
    tokens, history = [], max(0, length - rule.recent)
    segment = 0
    for start in range(0, history, rule.length):
        tokens += [(event, segment) for event in range(start, min(start + rule.length, history))]
        tokens += [(None, segment)] * rule.summaries
        segment += 1
    return tokens + [(event, segment) for event in range(history, length)]


@examples(50, thorough=200)
@given(LENGTHS, RULES)
def test_every_token_stands_where_the_rule_says(lengths, rule):
    batch = make_batch(lengths)
    cut = insert_summaries(batch, rule.cut(np.array(lengths)), summaries=rule.summaries, device="cpu")
    edges = cut.batch.offsets.tolist()
    assert np.diff(edges).tolist() == rule.tokens(np.array(lengths)).tolist()
    event_at = dict(zip(cut.events.tolist(), range(sum(lengths))))
    assert sorted([*event_at, *cut.summaries.tolist()]) == list(range(edges[-1]))
    for n, length in enumerate(lengths):
        first = int(batch.offsets[n])
        for place, (event, segment) in enumerate(written_out(length, rule)):
            flat = edges[n] + place
            assert cut.segment[flat] == segment
            assert cut.is_summary[flat] == (event is None)
            if event is not None:
                assert event_at[flat] == first + event
                last = first + event
                assert cut.batch.tokens["target_time"][flat] == batch.tokens["target_time"][last]
            else:
                assert cut.batch.tokens["target_time"][flat] == batch.tokens["time"][last]
            assert cut.batch.tokens["time"][flat] == batch.tokens["time"][last]


@examples(33, thorough=200)
@given(LENGTHS, RULES)
def test_a_token_sees_its_own_segment_and_earlier_summaries_and_the_rule_counts_the_pairs(lengths, rule):
    cut = insert_summaries(
        make_batch(lengths), rule.cut(np.array(lengths)), summaries=rule.summaries, device="cpu"
    )
    mask = AttentionMask(segments=cut.segment, summaries=cut.is_summary)
    edges = cut.batch.offsets.tolist()
    for n, length in enumerate(lengths):
        tokens = written_out(length, rule)
        wanted = [
            [j <= i and (own == other or event is None) for j, (event, other) in enumerate(tokens)]
            for i, (_, own) in enumerate(tokens)
        ]
        got = mask.allowed(edges[n], edges[n + 1], 0)
        assert got.tolist() == wanted
        assert int(got.sum()) == rule.pairs(np.array([length]))[0]


def test_short_sequences_get_no_summaries():
    rule = SegmentRule(recent=5, length=3, summaries=2)
    cut = insert_summaries(make_batch([5, 0, 2]), rule.cut(np.array([5, 0, 2])), summaries=2, device="cpu")
    assert len(cut.summaries) == 0
    assert cut.batch.offsets.tolist() == [0, 5, 5, 7]
    assert cut.events.tolist() == list(range(7))


def test_segments_of_any_size_can_be_asked_for():
    segments = Segments(np.array([0, 0, 1]), np.array([1, 3, 2]))
    cut = insert_summaries(make_batch([6, 2]), segments, summaries=1, device="cpu")
    assert cut.segment.tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 0, 0, 0]
    assert cut.summaries.tolist() == [1, 5, 10]


def test_batches_without_times_keep_none():
    batch = SequenceBatch(offsets=torch.tensor([0, 4]))
    rule = SegmentRule(recent=1, length=2, summaries=1)
    assert insert_summaries(batch, rule.cut(np.array([4])), summaries=1, device="cpu").batch.tokens == {}


def test_five_equal_segments_leave_a_fifth_of_the_pairs():
    rule = SegmentRule(recent=820, length=819, summaries=4)
    whole = 4096 * 4097 // 2
    assert 0.20 < rule.pairs(np.array([4096]))[0] / whole < 0.22


@pytest.mark.parametrize("name", ["recent", "length", "summaries"])
def test_nothing_may_be_zero(name):
    with pytest.raises(ConfigError, match=f"segments.{name} must be at least 1"):
        SegmentRule(**{"recent": 3, "length": 3, "summaries": 3, name: 0})
