"""Batches of an evaluation are made once, as far as there is room, and never for other users or another rule."""

from __future__ import annotations

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.data import SequenceBatch
from freescale.train.quality.eval_batches import EvalBatch, EvalBatches
from freescale.train.quality.full_ranking import AskedNumbers, Rule
from tests.small_run import make_run

NOBODY = np.zeros(0, np.int64)


class Split:
    """Stands in for examples."""


class Maker:
    """Makes batches of a kilobyte a user, and knows for whom."""

    def __init__(self) -> None:
        self.made: list[list[int]] = []

    def __call__(self, rows) -> EvalBatch:
        self.made.append(rows.tolist())
        tokens = {"item": torch.zeros(128 * len(rows), dtype=torch.int64)}
        batch = SequenceBatch(
            offsets=torch.arange(len(rows) + 1) * 128, tokens=tokens, samples={"row": torch.from_numpy(rows)}
        )
        asked = AskedNumbers(rows, (NOBODY, NOBODY)).on(torch.device("cpu"))
        return EvalBatch(rows, batch, asked)


def parts_of(*sizes: int) -> list[np.ndarray]:
    ends = np.cumsum(sizes)
    return [np.arange(end - size, end) for size, end in zip(sizes, ends)]


@given(st.lists(st.integers(1, 5), max_size=8), st.integers(0, 20_000))
def test_the_first_that_fit_are_kept_and_all_come_in_order(sizes, room):
    batches, make, parts = EvalBatches(room=room), Maker(), parts_of(*sizes)
    examples = Split()
    for _ in range(4):
        found = list(batches.of(examples, parts, make))
        assert [one.rows.tolist() for one in found] == [part.tolist() for part in parts]
    kept, total = 0, 0
    for one in found:
        total += one.nbytes
        if total > room:
            break
        kept += 1
    assert len(make.made) == 2 * len(parts) + 2 * (len(parts) - kept)
    assert sum(one.nbytes for one in batches._kept) <= room


def test_other_examples_or_users_are_made_anew():
    batches, make = EvalBatches(), Maker()
    first, second = Split(), Split()
    for examples, parts in (
        *[(first, parts_of(2, 3))] * 3,
        *[(first, parts_of(3, 2))] * 3,
        (second, parts_of(3, 2)),
        (first, parts_of(2)),
    ):
        assert [one.rows.tolist() for one in batches.of(examples, parts, make)] == [x.tolist() for x in parts]
    assert len(make.made) == 2 * (2 + 2) + 2 + 1


def test_what_is_asked_once_leaves_nothing():
    batches, examples = EvalBatches(), Split()
    list(batches.of(examples, parts_of(2, 3), Maker()))
    assert batches._kept == []
    gone = weakref.ref(examples)
    del examples
    assert gone() is None


def test_an_evaluation_that_is_given_up_leaves_what_it_made():
    batches, make, parts, examples = EvalBatches(), Maker(), parts_of(1, 1, 1), Split()
    list(batches.of(examples, parts, make))
    next(iter(batches.of(examples, parts, make)))
    list(batches.of(examples, parts, make))
    assert make.made == [[0], [1], [2], [0], [1], [2]]


@pytest.mark.parametrize("sampled", [None, 20])
def test_later_evaluations_make_nothing_and_say_the_same(tmp_path, monkeypatch, sampled):
    run, _ = make_run(["eval.max_users=100"], str(tmp_path))
    rule = Rule(filter_seen=True, sampled=sampled)
    evaluator = replace(run.evaluation.evaluator, rule=rule, batch=32)
    valid = run.evaluation.valid
    made = []
    original = AskedNumbers.of
    monkeypatch.setattr(AskedNumbers, "of", lambda *args: made.append(args) or original(*args))
    first = evaluator.run(valid, max_users=100)
    assert [evaluator.run(valid, max_users=100) for _ in range(3)] == [first] * 3
    assert len(made) == 8
    other = replace(evaluator, rule=replace(rule, filter_seen=False)).run(valid, max_users=100)
    assert len(made) == 12
    assert other != first


@pytest.mark.parametrize("id_map", ["direct", "zero_collision"])
def test_rows_that_ids_keep_are_found_twice_and_never_again(tmp_path, monkeypatch, id_map):
    """The first evaluation keeps nothing; where ids learn, rows may change between two evaluations."""
    run, _ = make_run(["eval.max_users=100", f"embedding.id_map={id_map}", "run.steps=6"], str(tmp_path))
    evaluator, valid = replace(run.evaluation.evaluator, batch=32), run.evaluation.valid
    asked, embedding, found = [], run.state.embedding, []
    original = embedding.find_all
    monkeypatch.setattr(embedding, "find_all", lambda rows: asked.append(rows) or original(rows))
    for _ in range(4):
        before = len(asked)
        told = evaluator.run(valid, max_users=100)
        found.append(len(asked) - before)
        assert told == replace(evaluator).run(valid, max_users=100), "as one that has kept nothing"
        with torch.no_grad():  # rows are what they are when they are looked up
            embedding.tables["item"].weight.copy_(embedding.tables["item"].weight.roll(7, 0))
    assert found == ([4, 4, 0, 0] if id_map == "direct" else [4, 4, 4, 4])
