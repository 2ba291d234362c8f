"""Examples: the split table of the module, the cut, targets and seen items, against plain lists."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.data.batches.examples import Examples, input_lengths
from freescale.data.negatives import draw_negatives
from tests.list_source import ListSource

# What the module promises: how many of the n events are known before the target of each split.
KNOWN = {"train": lambda n: n - 3, "valid": lambda n: n - 2, "test": lambda n: n - 1}
HISTORIES = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=9), min_size=1, max_size=8)


def expected(history, split, max_length):
    """(inputs, targets) of one history as lists of (position, item), by the table in the module."""
    known = max(0, KNOWN[split](len(history)))
    events = list(enumerate(history))
    return events[:known][-max_length:], events[1 : known + 1][-max_length:] if known else []


def of_row(batch, name, n):
    return batch.tokens[name][int(batch.offsets[n]) : int(batch.offsets[n + 1])].tolist()


@settings(deadline=None)
@given(HISTORIES, st.sampled_from(["train", "valid", "test"]), st.integers(1, 5), st.data())
def test_batches_follow_the_split_table(histories, split, max_length, data):
    rows = data.draw(st.lists(st.integers(0, len(histories) - 1), max_size=6))
    examples = Examples(source=ListSource(histories), split=split, max_length=max_length)
    batch = examples.batch(rows)
    assert batch.samples["row"].tolist() == rows
    for n, row in enumerate(rows):
        inputs, targets = expected(histories[row], split, max_length)
        for prefix, events in (("", inputs), ("target_", targets)):
            assert of_row(batch, prefix.rstrip("_") or "item", n) == [item for _, item in events]
            assert of_row(batch, f"{prefix}time", n) == [100 * place + item for place, item in events]
            assert of_row(batch, f"{prefix}action", n) == [item / 2 for _, item in events]


@settings(deadline=None)
@given(HISTORIES, st.sampled_from(["train", "valid", "test"]), st.integers(1, 5))
def test_lengths_are_known_without_reading(histories, split, max_length):
    source = ListSource(histories)
    source.read = None
    examples = Examples(source=source, split=split, max_length=max_length)
    assert examples.lengths().tolist() == [len(expected(h, split, max_length)[0]) for h in histories]


@pytest.mark.parametrize(
    ("events", "train", "valid", "test"),
    [
        (1, ([], []), ([], []), ([], [])),
        (2, ([], []), ([], []), ([1], [2])),
        (3, ([], []), ([1], [2]), ([1, 2], [2, 3])),
        (4, ([1], [2]), ([1, 2], [2, 3]), ([1, 2, 3], [2, 3, 4])),
    ],
)
def test_short_histories_written_out(events, train, valid, test):
    source = ListSource([list(range(1, events + 1))])
    for split, (inputs, targets) in {"train": train, "valid": valid, "test": test}.items():
        batch = Examples(source=source, split=split).batch([0])
        assert (batch.tokens["item"].tolist(), batch.tokens["target"].tolist()) == (inputs, targets)


def test_no_split_ever_sees_its_target_or_a_later_event():
    source = ListSource([list(range(1, 11))])
    last = {"train": 8, "valid": 9, "test": 10}
    for split, target in last.items():
        batch = Examples(source=source, split=split).batch([0])
        assert int(batch.tokens["target"][-1]) == target
        assert int(batch.tokens["item"].max()) == target - 1


@settings(deadline=None)
@given(HISTORIES, st.sampled_from(["train", "valid", "test"]), st.data())
def test_seen_is_everything_before_the_target_uncut(histories, split, data):
    rows = data.draw(st.lists(st.integers(0, len(histories) - 1), max_size=6))
    offsets, items = Examples(source=ListSource(histories), split=split, max_length=2).seen(rows)
    for n, row in enumerate(rows):
        known = max(0, KNOWN[split](len(histories[row])))
        assert items[offsets[n] : offsets[n + 1]].tolist() == histories[row][:known]


def test_negatives_are_catalogue_ids_drawn_from_seed_step_and_row():
    source = ListSource([[5, 70, 900, 12]] * 20)
    examples = Examples(source=source, num_negatives=7, seed=3)
    rows = [4, 11, 2]
    drawn = draw_negatives(np.array(rows), num_negatives=7, num_items=4, seed=3, step=9)
    wanted = np.array([5, 12, 70, 900])[drawn]
    assert examples.batch(rows, step=9).samples["negatives"].tolist() == wanted.tolist()
    assert examples.batch([11], step=9).samples["negatives"].tolist() == [wanted[1].tolist()]
    assert "negatives" not in Examples(source=source).batch(rows).samples


def test_features_that_are_absent_or_unwanted_are_left_out():
    histories = [[1, 2, 3, 4, 5]]
    items_only = Examples(source=ListSource(histories, features=("item",))).batch([0])
    assert set(items_only.tokens) == {"item", "target"}
    no_time = Examples(source=ListSource(histories), use_time=False).batch([0])
    assert set(no_time.tokens) == {"item", "target", "action", "target_action"}


def test_the_batch_does_not_share_memory_with_the_source():
    source = ListSource([[1, 2, 3, 4, 5]])
    histories = source.read([0])
    source.read = lambda rows: histories
    Examples(source=source, split="test").batch([0]).tokens["item"].zero_()
    assert histories.columns["item"].tolist() == [1, 2, 3, 4, 5]


def test_an_empty_batch_has_all_features():
    batch = Examples(source=ListSource([[1, 2, 3, 4]]), num_negatives=2).batch([])
    assert len(batch) == 0
    assert all(len(values) == 0 for values in batch.tokens.values())
    assert batch.samples["negatives"].shape == (0, 2)


def test_examples_can_be_pickled_for_loader_processes():
    examples = Examples(source=ListSource([[1, 2, 3, 4, 5]]), num_negatives=3, seed=5)
    again = pickle.loads(pickle.dumps(examples))
    assert torch.equal(
        again.batch([0], step=2).samples["negatives"], examples.batch([0], step=2).samples["negatives"]
    )


def test_input_lengths_are_cut_and_never_negative():
    lengths = np.arange(8)
    assert input_lengths(lengths, split="train", max_length=3).tolist() == [0, 0, 0, 0, 1, 2, 3, 3]
    assert input_lengths(lengths, split="test", max_length=3).tolist() == [0, 0, 1, 2, 3, 3, 3, 3]
