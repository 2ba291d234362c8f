"""Masks: what a token sees, which tiles that leaves, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.kernels import AttentionMask, hstu_attention, softmax_attention
from freescale.kernels.attention import reference
from freescale.kernels.attention.plan.schedule import AttentionSchedule
from freescale.kernels.attention.plan.tile_pairs import TilePlanner
from tests.effort import examples


def segments_in_a_row(draw, lengths):
    """Segments one after the other with summaries at their ends, planned without looking at all pairs."""
    size, summaries = draw(st.integers(1, 25)), draw(st.integers(0, 4))
    places = torch.cat([torch.arange(length) for length in lengths])
    return AttentionMask(
        window=draw(st.none() | st.integers(0, 40)),
        segments=places // size,
        summaries=places % size >= size - summaries,
    )


@st.composite
def masked_batches(draw):
    lengths = draw(st.lists(st.integers(0, 60), min_size=1, max_size=4))
    tokens = sum(lengths)
    segments = draw(st.booleans())
    if draw(st.booleans()):
        return lengths, segments_in_a_row(draw, lengths)
    mask = AttentionMask(
        window=draw(st.none() | st.integers(0, 40)),
        prefix=draw(st.integers(0, 20)),
        targets=draw(st.none() | st.tuples(*(st.integers(0, n) for n in lengths)).map(torch.tensor)),
        segments=torch.tensor(draw(st.lists(st.integers(0, 5), min_size=tokens, max_size=tokens)))
        if segments
        else None,
        summaries=torch.tensor(draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)))
        if segments
        else None,
    )
    return lengths, mask


@examples(50, thorough=200)
@given(masked_batches(), st.sampled_from([(4, 4), (8, 4), (4, 16)]))
def test_listed_tiles_hold_everything_seen_and_full_ones_nothing_hidden(batch, blocks):
    lengths, mask = batch
    starts = np.concatenate([[0], np.cumsum(lengths)])
    targets = mask.target_counts(len(lengths))
    pairs = TilePlanner(mask, starts).pairs(rows=blocks[0], columns=blocks[1])
    listed = set(zip(pairs.sequence.tolist(), pairs.row.tolist(), pairs.column.tolist()))
    full = {
        pair for pair, is_full in zip(zip(pairs.sequence, pairs.row, pairs.column), pairs.full) if is_full
    }
    for n, length in enumerate(lengths):
        allowed = mask.allowed(int(starts[n]), int(starts[n + 1]), int(targets[n]))
        for i, j in allowed.nonzero().tolist():
            assert (n, i // blocks[0], j // blocks[1]) in listed
        for sequence, row, column in full:
            if sequence == n:
                tile = allowed[row * blocks[0] :, column * blocks[1] :][: blocks[0], : blocks[1]]
                assert tile.shape == blocks
                assert tile.all()
        assert length == 0 or allowed.diagonal().all()


@examples(50, thorough=200)
@given(masked_batches())
def test_tokens_that_see_a_token_are_counted_from_itself_on(batch):
    """Everything but what a prefix sees ahead of it; or the numbers of segments, where one comes back after another."""
    lengths, mask = batch
    starts = np.concatenate([[0], np.cumsum(lengths)])
    sight = AttentionSchedule(torch.from_numpy(starts), device=torch.device("cpu")).visibility(mask)
    if sight.kind == "codes":
        runs = mask.runs.within(starts)
        firsts = np.isin(runs.starts[1:], starts)
        assert (np.diff(runs.segment)[~firsts] < 0).any()
        return
    assert sight.kind == "counts"
    targets = mask.target_counts(len(lengths))
    for n, length in enumerate(lengths):
        allowed = mask.allowed(int(starts[n]), int(starts[n + 1]), int(targets[n]))
        counts = sight.tokens[starts[n] : starts[n + 1]].long()
        behind = torch.arange(length)[:, None] - torch.arange(length)
        seen = (behind >= 0) & (behind < counts)
        place = torch.arange(length)
        events = length - int(targets[n])
        seen |= (place[:, None] < min(mask.prefix, events)) & (place < events)
        assert torch.equal(seen, allowed)


@examples(33, thorough=200)
@given(masked_batches(), st.sampled_from([(4, 4), (8, 4), (4, 16)]))
def test_pairs_are_listed_once_in_order_and_the_work_lists_hold_the_same(batch, blocks):
    lengths, mask = batch
    starts = np.concatenate([[0], np.cumsum(lengths)])
    pairs = TilePlanner(mask, starts).pairs(rows=blocks[0], columns=blocks[1])
    listed = list(zip(pairs.sequence.tolist(), pairs.row.tolist(), pairs.column.tolist()))
    assert listed == sorted(set(listed))
    wanted = {pair: bool(full) for pair, full in zip(listed, pairs.full)}
    work = AttentionSchedule(torch.from_numpy(starts), device=torch.device("cpu"))
    for side in ("queries", "keys"):
        block, other = blocks if side == "queries" else blocks[::-1]
        plan = work.tiles(side, block=block, other=other, mask=mask)
        found = {}
        for start, _, own, begin, middle, end, *_ in plan.tiles.tolist():
            # Sequences without tokens start where the next one does, and have no tiles.
            sequence = int(np.flatnonzero((starts[:-1] == start) & (np.diff(starts) > 0))[0])
            for place in range(begin, end):
                met = int(plan.pairs[place])
                pair = (own, met) if side == "queries" else (met, own)
                found[(sequence, *pair)] = place < middle
        assert found == wanted


def test_far_tiles_are_not_computed():
    mask = AttentionMask(segments=torch.arange(1024) // 128, summaries=torch.arange(1024) % 128 >= 124)
    starts = np.array([0, 1024])
    pairs = TilePlanner(mask, starts).pairs(rows=64, columns=64)
    # Of 136 causal tiles remain 3 in each segment, and for each row tile the earlier tiles with summaries.
    assert len(pairs.row) == 8 * 3 + sum(2 * s for s in range(8))


def test_work_lists_hold_every_tile_once_longest_sequence_first():
    work = AttentionSchedule(torch.tensor([0, 70, 70, 300]), device=torch.device("cpu"))
    for side in ("queries", "keys"):
        tiles = work.tiles(side, block=64, other=64, mask=None).tiles
        assert sorted(tiles[:, :3].tolist()) == sorted(
            [[0, 70, n] for n in range(2)] + [[70, 230, n] for n in range(4)]
        )
        assert tiles[0, 1] == 230
    assert work.tiles("queries", block=64, other=64, mask=None).tiles[0, 2] == 3
    assert work.tiles("keys", block=64, other=64, mask=None).tiles[0, 2] == 0


def test_targets_do_not_see_each_other_and_a_prefix_sees_all():
    mask = AttentionMask(prefix=1, targets=torch.tensor([2]))
    wanted = [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]
    assert mask.allowed(0, 5, 2).int().tolist() == wanted


def test_summaries_are_seen_by_later_segments():
    mask = AttentionMask(
        segments=torch.tensor([0, 0, 1, 1]), summaries=torch.tensor([False, True, False, False])
    )
    assert mask.allowed(0, 4, 0).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]


@pytest.mark.parametrize("attend", [hstu_attention, softmax_attention])
def test_masks_work_on_the_cpu(attend):
    q, k, v = (torch.randn(12, 2, 4, dtype=torch.float64) for _ in range(3))
    offsets = torch.tensor([0, 8, 12])
    mask = AttentionMask(window=2)
    truth = getattr(reference, attend.__name__)
    torch.testing.assert_close(
        attend(q, k, v, offsets, scale=0.5, mask=mask), truth(q, k, v, offsets, scale=0.5, mask=mask)
    )
    assert not torch.allclose(
        attend(q, k, v, offsets, scale=0.5, mask=mask), attend(q, k, v, offsets, scale=0.5)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": -1}, "window"),
        ({"prefix": -1}, "prefix"),
        ({"summaries": torch.ones(8)}, "segments"),
    ],
)
def test_nonsense_is_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        AttentionMask(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": torch.tensor([1, 1])}, "targets has 2 entries, the batch needs 1"),
        ({"targets": torch.tensor([9])}, "between 0 and the length"),
        ({"segments": torch.zeros(7)}, "segments has 7 entries, the batch needs 8"),
    ],
)
def test_a_mask_of_another_batch_is_refused(options, message):
    q = torch.randn(8, 1, 4)
    with pytest.raises(ValueError, match=message):
        hstu_attention(q, q, q, torch.tensor([0, 8]), scale=1.0, mask=AttentionMask(**options))


def test_loops_know_no_masks_but_segments_and_say_so():
    q = torch.randn(8, 1, 4)
    with pytest.raises(ValueError, match="knows no masks but segments"):
        hstu_attention(
            q, q, q, torch.tensor([0, 8]), scale=1.0, mask=AttentionMask(window=1), backend="loops"
        )


@pytest.mark.parametrize("name", ["targets", "segments", "summaries"])
@pytest.mark.parametrize(
    ("given", "message"),
    [(3, "got: *int"), ([3], "got: *list"), (torch.tensor(3), r"got: *Tensor of shape \(\)")],
)
def test_what_a_mask_counts_must_be_a_tensor(name, given, message):
    others = {"segments": torch.zeros(8)} if name == "summaries" else {}
    with pytest.raises(ValueError, match=f"{name} must be a tensor with one number for each .*\n *{message}"):
        AttentionMask(**others, **{name: given})
