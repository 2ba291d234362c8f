"""Batches of a log hold what lists and loops say: inputs, targets, negatives, and the next window as a test."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from freescale.data import LogExamples, LogSource, NextExamples, NextWindow, SequenceBatch, append_log
from freescale.errors import DataError
from freescale.kernels import SequenceLayout
from freescale.model import Recommender
from freescale.model.encoders.sasrec import SASRec
from freescale.model.heads.retrieval import RetrievalHead
from tests.data.log.reference import ReferenceLog, write_csv
from tests.grown_log import events_of_day

MAX_LENGTH = 5


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> tuple[LogSource, ReferenceLog]:
    folder = tmp_path_factory.mktemp("log")
    reference = ReferenceLog(MAX_LENGTH)
    for day in range(3):
        events = events_of_day(day, users=8, events=40)
        append_log(folder / "log", write_csv(folder / f"{day}.csv", events), max_length=MAX_LENGTH)
        reference.append(events)
    return LogSource(folder / "log"), reference


def test_a_batch_has_losses_at_new_events_and_negatives_of_its_window(
    grown: tuple[LogSource, ReferenceLog],
) -> None:
    source, reference = grown
    examples = LogExamples(source=source, max_length=MAX_LENGTH, num_negatives=50, seed=3)
    base = 0
    for window, rows in enumerate(reference.windows):
        numbers = base + np.arange(len(rows))[::-1]
        batch = examples.batch(numbers, step=window)
        assert batch.learnt is not None
        for place, (_, items, targets) in enumerate(reversed(rows)):
            part = batch.select([place])
            assert part.tokens["item"].tolist() == list(items[:-1])
            assert part.tokens["target"].tolist() == list(items[1:])
            assert part.learnt.tolist() == [targets]  # type: ignore[union-attr]
            _, learnt = part.learnt_part()
            assert learnt.tokens["target"].tolist() == list(items[len(items) - targets :])
        known = set(reference.catalogues[window])
        assert set(batch.samples["negatives"].flatten().tolist()) <= known
        base += len(rows)
    with pytest.raises(DataError, match="lie in one window"):
        examples.batch([0, len(reference.windows[0])])


def test_the_next_window_asks_for_every_target_that_is_known(
    grown: tuple[LogSource, ReferenceLog],
) -> None:
    source, reference = grown
    for window in (1, 2):
        known = set(reference.catalogues[window - 1])
        wanted = [
            (items[: place + 1], items[place + 1])
            for _, items, targets in reference.windows[window]
            for place in range(len(items) - 1 - targets, len(items) - 1)
        ]
        examples = NextExamples(source=NextWindow(source, window), split="test", max_length=MAX_LENGTH)
        assert examples.source.items.ids.tolist() == sorted(known)
        assert examples.source.unknown.tolist() == [target not in known for _, target in wanted]
        asked = np.flatnonzero(examples.lengths())
        assert asked.tolist() == [n for n, (_, target) in enumerate(wanted) if target in known]
        few = NextExamples(source=NextWindow(source, window, most=4), split="test", max_length=MAX_LENGTH)
        chosen = np.flatnonzero(few.lengths())
        assert len(chosen) == 4
        assert {asked[0], asked[-1], *chosen} <= {*asked}
        batch = examples.batch(asked)
        offsets, seen = examples.seen(asked)
        for place, number in enumerate(asked):
            inputs, target = wanted[number]
            part = batch.select([place])
            assert part.tokens["item"].tolist() == list(inputs)
            assert part.tokens["target"].tolist()[-1] == target
            mine = seen[offsets[place] : offsets[place + 1]].tolist()
            assert mine == [item for item in inputs if item in known]


def test_the_loss_is_that_of_the_learnt_tokens_alone() -> None:
    torch.manual_seed(0)
    rows = torch.randn(9, 6, dtype=torch.float64)
    model = Recommender(
        encoder=SASRec(dim=6, heads=2, layers=1, max_length=8, dropout=0.0).double(),
        head=RetrievalHead(),
    ).eval()
    batch = SequenceBatch(
        offsets=torch.tensor([0, 4, 6, 7]),
        tokens={"item_index": torch.randint(9, (7,)), "target_index": torch.randint(9, (7,))},
        samples={"negative_index": torch.randint(9, (3, 4)), "row": torch.arange(3)},
    )
    counts = torch.tensor([2, 2, 0])
    layout = SequenceLayout(batch.offsets)
    whole = model(rows, batch, layout)
    torch.testing.assert_close(model(rows, batch.with_learnt(batch.lengths), layout), whole)
    states = model.states(rows, batch, layout)
    wanted = torch.zeros((), dtype=torch.float64)
    for token, sample in ((2, 0), (3, 0), (4, 1), (5, 1)):
        single = SequenceBatch(
            offsets=torch.tensor([0, 1]),
            tokens={"target_index": batch.tokens["target_index"][token : token + 1]},
            samples={"negative_index": batch.samples["negative_index"][sample : sample + 1]},
        )
        wanted += model.head.loss(states[token : token + 1], rows, single, SequenceLayout(single.offsets))
    torch.testing.assert_close(model(rows, batch.with_learnt(counts), layout), wanted)
    nothing = model(rows, batch.with_learnt(torch.zeros(3, dtype=torch.int64)), layout)
    assert float(nothing.detach()) == 0


def test_counts_travel_with_a_batch() -> None:
    import pickle

    batch = SequenceBatch(
        offsets=torch.tensor([0, 3, 6]), tokens={"item": torch.arange(6)}, learnt=torch.tensor([1, 3])
    )
    for other in (pickle.loads(pickle.dumps(batch)), batch.to("cpu"), batch.select([0, 1])):
        assert other.learnt.tolist() == [1, 3]
    assert [part.learnt.tolist() for part in batch.split(2)] == [[1], [3]]
    with pytest.raises(ValueError, match="learnt must be between 0 and the length"):
        batch.with_learnt(torch.tensor([4, 3]))
