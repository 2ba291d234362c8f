"""SequenceBatch against plain Python lists of lists."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.data.batches.sequence_batch import SequenceBatch

SEQUENCES = st.lists(st.lists(st.integers(-5, 5), max_size=6), max_size=8)


def make_batch(sequences: list[list[int]]) -> SequenceBatch:
    """Token feature "item" = the numbers, "pair" = [n, -n]; sample feature "row" = the place of the sequence."""
    flat = torch.tensor([n for sequence in sequences for n in sequence], dtype=torch.int64)
    offsets = torch.tensor([0, *(len(s) for s in sequences)]).cumsum(0)
    return SequenceBatch(
        offsets=offsets,
        tokens={"item": flat, "pair": torch.stack([flat, -flat], dim=-1)},
        samples={"row": torch.arange(len(sequences))},
    )


def as_lists(batch: SequenceBatch) -> list[list[int]]:
    edges = batch.offsets.tolist()
    assert edges[0] == 0
    assert torch.equal(
        batch.tokens["pair"], torch.stack([batch.tokens["item"], -batch.tokens["item"]], dim=-1)
    )
    return [batch.tokens["item"][a:b].tolist() for a, b in itertools.pairwise(edges)]


@settings(deadline=None)
@given(SEQUENCES)
def test_sizes_are_those_of_the_lists(sequences):
    batch = make_batch(sequences)
    assert len(batch) == len(sequences)
    assert batch.lengths.tolist() == [len(s) for s in sequences]
    assert batch.num_tokens == sum(len(s) for s in sequences)
    assert as_lists(batch) == sequences


@settings(deadline=None)
@given(SEQUENCES.filter(len), st.data())
def test_select_takes_sequences_in_the_order_asked_for(sequences, data):
    index = data.draw(st.lists(st.integers(0, len(sequences) - 1), max_size=10))
    chosen = make_batch(sequences).select(index)
    assert as_lists(chosen) == [sequences[i] for i in index]
    assert chosen.samples["row"].tolist() == index


@settings(deadline=None)
@given(SEQUENCES, st.data())
def test_a_part_holds_the_same_tokens_of_every_sequence(sequences, data):
    batch = make_batch(sequences)
    ends = [data.draw(st.integers(0, len(s))) for s in sequences]
    firsts = [data.draw(st.integers(0, end)) for end in ends]
    first, end = (torch.tensor(each, dtype=torch.int64) for each in (firsts, ends))
    where, part = batch.part(first, end - first)
    assert as_lists(part) == [s[a:b] for s, a, b in zip(sequences, firsts, ends)]
    assert torch.equal(part.tokens["item"], batch.tokens["item"][where])
    assert torch.equal(part.samples["row"], batch.samples["row"])


@settings(deadline=None)
@given(SEQUENCES, st.data())
def test_candidates_are_the_last_tokens(sequences, data):
    counts = [data.draw(st.integers(0, len(s))) for s in sequences]
    batch = replace(make_batch(sequences), targets=torch.tensor(counts, dtype=torch.int64))
    index = batch.candidate_index(batch.device)
    assert batch.tokens["item"][index].tolist() == [
        n for s, k in zip(sequences, counts) for n in s[len(s) - k :]
    ]


@settings(deadline=None)
@given(SEQUENCES, st.integers(1, 6))
def test_split_keeps_every_sequence_in_order(sequences, num_parts):
    parts = make_batch(sequences).split(num_parts)
    assert len(parts) == num_parts
    assert [s for part in parts for s in as_lists(part)] == sequences
    rows = torch.cat([part.samples["row"] for part in parts])
    assert rows.tolist() == list(range(len(sequences)))


@settings(deadline=None)
@given(SEQUENCES, st.integers(1, 6))
def test_split_parts_differ_from_the_even_share_by_less_than_one_sequence(sequences, num_parts):
    longest = max((len(s) for s in sequences), default=0)
    share = sum(len(s) for s in sequences) / num_parts
    for part in make_batch(sequences).split(num_parts):
        assert abs(part.num_tokens - share) <= longest


def test_split_gives_views():
    batch = make_batch([[1, 2], [3]])
    for part in batch.split(2):
        part.tokens["item"].zero_()
    assert batch.tokens["item"].tolist() == [0, 0, 0]


@settings(deadline=None)
@given(SEQUENCES)
def test_from_sequences_keeps_every_feature_of_every_sequence(sequences):
    batch = SequenceBatch.from_sequences(
        [{"a": torch.tensor(s, dtype=torch.int64), "b": torch.tensor(s) * 0.5} for s in sequences]
    )
    assert batch.lengths.tolist() == [len(s) for s in sequences]
    if sequences:
        flat = [n for s in sequences for n in s]
        assert batch.tokens["a"].tolist() == flat
        assert batch.tokens["b"].tolist() == [n * 0.5 for n in flat]


def test_with_tokens_and_samples_add_and_replace_without_touching_the_original():
    batch = make_batch([[1], [2, 3]])
    more = batch.with_tokens(extra=torch.ones(3), item=torch.zeros(3)).with_samples(row=torch.tensor([7, 8]))
    assert set(more.tokens) == {"item", "pair", "extra"}
    assert more.tokens["item"].tolist() == [0, 0, 0]
    assert more.samples["row"].tolist() == [7, 8]
    assert batch.tokens["item"].tolist() == [1, 2, 3]
    assert "extra" not in batch.tokens


def test_to_moves_features_and_leaves_offsets_on_the_cpu():
    moved = make_batch([[1, 2], []]).to("meta")
    assert moved.device.type == "meta"
    assert {v.device.type for v in (*moved.tokens.values(), *moved.samples.values())} == {"meta"}
    assert moved.offsets.device.type == "cpu"


def test_a_batch_can_be_pickled_for_loader_processes():
    batch = pickle.loads(pickle.dumps(make_batch([[1, 2], [3]])))
    assert as_lists(batch) == [[1, 2], [3]]


@pytest.mark.parametrize(
    "offsets",
    [
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(1, 2, dtype=torch.int64),
        torch.tensor([1, 3]),
        torch.tensor([0, 3, 2, 3]),
    ],
    ids=["empty", "two dimensions", "does not start at 0", "falls"],
)
def test_bad_offsets_are_refused(offsets):
    with pytest.raises(ValueError, match="offsets"):
        SequenceBatch(offsets=offsets)


def test_features_of_a_wrong_size_are_refused_by_name():
    offsets = torch.tensor([0, 2, 3])
    with pytest.raises(ValueError, match="token feature 'item' has 2 values, expected 3"):
        SequenceBatch(offsets=offsets, tokens={"item": torch.zeros(2)})
    with pytest.raises(ValueError, match="sample feature 'row' has 3 values, expected 2"):
        SequenceBatch(offsets=offsets, samples={"row": torch.zeros(3)})


def test_sequences_whose_features_disagree_in_length_are_refused():
    crossed = [{"a": torch.zeros(2), "b": torch.zeros(3)}, {"a": torch.zeros(3), "b": torch.zeros(2)}]
    with pytest.raises(ValueError, match="'b'"):
        SequenceBatch.from_sequences(crossed)


def test_a_number_outside_the_batch_is_refused():
    with pytest.raises(IndexError):
        make_batch([[1], [2]]).select([2])


@settings(deadline=None)
@given(SEQUENCES)
def test_a_batch_travels_between_processes_as_one_tensor(sequences):
    batch = make_batch(sequences).with_samples(
        odd=torch.zeros(len(sequences), 3, dtype=torch.bool),
        half=torch.ones(len(sequences), dtype=torch.bfloat16),
    )
    make, (block, *facts) = batch.__reduce__()
    assert block.dtype == torch.uint8
    assert not any(isinstance(fact, torch.Tensor) for fact in facts)
    for copy in (make(block, *facts), pickle.loads(pickle.dumps(batch))):
        assert torch.equal(copy.offsets, batch.offsets)
        for mine, theirs in ((copy.tokens, batch.tokens), (copy.samples, batch.samples)):
            assert list(mine) == list(theirs)
            for name, values in theirs.items():
                assert mine[name].dtype == values.dtype
                assert torch.equal(mine[name], values)


def test_a_batch_that_learns_stays_on_its_device_when_pickled():
    batch = make_batch([[1, 2], [3]]).with_tokens(rows=torch.ones(3, 2, requires_grad=True))
    copy = pickle.loads(pickle.dumps(batch))
    assert copy.tokens["rows"].requires_grad
    assert as_lists(copy) == [[1, 2], [3]]


def test_features_that_are_added_must_fit_too():
    batch = make_batch([[1, 2], [3]])
    with pytest.raises(ValueError, match="token feature 'x' has 2 values, expected 3"):
        batch.with_tokens(x=torch.zeros(2))
    with pytest.raises(ValueError, match="sample feature 'x' has 3 values, expected 2"):
        batch.with_samples(x=torch.zeros(3))
    assert batch.with_samples(x=torch.zeros(2)).num_tokens == 3
    assert "x" not in batch.samples


@settings(deadline=None)
@given(SEQUENCES.filter(len), st.integers(0, 4), st.data())
def test_items_go_along_wherever_a_batch_goes(sequences, num_items, data):
    items = {
        "artist": torch.arange(num_items),
        "cover": torch.rand(num_items, 3),
        "new": torch.ones(num_items) > 0,
    }
    plain = make_batch(sequences)
    batch = plain.with_items(**items)
    assert plain.items == {}
    index = data.draw(st.lists(st.integers(0, len(sequences) - 1), max_size=4))
    tokens = batch.with_tokens(more=batch.tokens["item"])
    copies = [
        batch.to("cpu"), batch.select(index), *batch.split(3), tokens, batch.with_samples(x=batch.samples["row"]),
        pickle.loads(pickle.dumps(batch)),
    ]  # fmt: skip
    for copy in copies:
        assert list(copy.items) == list(items)
        for name, values in items.items():
            assert torch.equal(copy.items[name], values)
            assert copy.items[name].dtype == values.dtype
    again = copies[-1]
    assert as_lists(again) == sequences
    assert torch.equal(again.samples["row"], batch.samples["row"])
    assert len(list(batch.features())) == len(list(plain.features())) + 3
    assert torch.equal(batch.with_items(artist=items["artist"] + 1).items["artist"], items["artist"] + 1)


def test_items_are_pinned_with_the_rest(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda values: pinned.append(values) or values)
    batch = make_batch([[1, 2]]).with_items(artist=torch.arange(3))
    batch.pin()
    assert len(pinned) == 4
    assert any(values is batch.items["artist"] for values in pinned)


def test_every_candidate_has_a_sequence_of_its_own():
    batch = SequenceBatch(
        offsets=torch.tensor([0, 4, 4, 6, 7]),
        tokens={"item": torch.tensor([1, 2, 8, 9, 3, 7, 5])},
        samples={"row": torch.tensor([10, 11, 12, 13])},
        targets=torch.tensor([2, 0, 1, 1]),
    )
    alone = batch.one_target_each()
    assert alone.offsets.tolist() == [0, 3, 6, 8, 9]
    assert alone.tokens["item"].tolist() == [1, 2, 8, 1, 2, 9, 3, 7, 5]
    assert alone.samples["row"].tolist() == [10, 10, 12, 13]
    assert alone.targets.tolist() == [1, 1, 1, 1]
