"""Anchors in files are those found in memory; made once, whole or not at all, and anew for other data."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.balance import BalancedSampler
from freescale.data import AnchorRule, PoolRule, RequestExamples
from freescale.data.requests import stored_anchors
from freescale.data.scan import row_blocks
from freescale.data.source import Histories
from freescale.data.sources.columns import ColumnSource
from freescale.errors import DataError
from tests.effort import examples
from tests.list_source import ListSource

DAY_S = 86_400
SPLITS = ("train", "valid", "test")


class LabelledSource(ListSource):
    """Histories of (hours since the event before, label or None, kind)."""

    name = "labelled"

    def __init__(self, histories):
        super().__init__(
            [[n for n, _ in enumerate(h)] for h in histories], ("item", "time", "action", "label")
        )
        self.rows = histories

    def read(self, rows):
        chosen = [self.rows[r] for r in rows]
        offsets = np.cumsum([0, *(len(h) for h in chosen)]).astype(np.int64)
        hours = [np.cumsum([gap for gap, _, _ in h]) for h in chosen]
        label = [np.nan if one is None else one for h in chosen for _, one, _ in h]
        columns = {
            "item": np.array([n for h in chosen for n, _ in enumerate(h)], np.int64),
            "time": np.concatenate([np.zeros(0), *hours]).astype(np.int64) * 3600,
            "action": np.array([kind for h in chosen for _, _, kind in h], np.int64),
            "label": np.array(label, np.float32),
        }
        return Histories(users=np.asarray(rows, np.int64), offsets=offsets, columns=columns)


RULE = AnchorRule("label", 2, 1)


def made(source, split="train", *, rule=RULE, pools=None, max_length=6):
    return RequestExamples(
        source=source, split=split, outcomes=("label",), anchors=rule, pools=pools, max_length=max_length
    )


events = st.tuples(st.integers(0, 30), st.none() | st.sampled_from([0.0, 1.0]), st.integers(0, 3))
logs = st.lists(st.lists(events, max_size=25), min_size=1, max_size=6)


def _told(examples):
    """Why there are no requests; nothing where there are some."""
    try:
        examples.index  # noqa: B018
    except DataError as error:
        return str(error)
    return ""


def same(stored, plain):
    """Whether two kinds of examples hold the same requests."""
    told = [_told(each) for each in (stored, plain)]
    assert told[0] == told[1]
    if told[0]:
        return
    wanted = plain.index
    for name in ("user", "start", "stop", "groups"):
        assert getattr(stored.index, name).tolist() == getattr(wanted, name).tolist(), name
    assert stored.lengths().tolist() == plain.lengths().tolist()
    assert stored.index.num_candidates == wanted.num_candidates
    rows = np.arange(len(wanted.user))[::-2]
    one, other = stored.batch(rows), plain.batch(rows)
    assert one.offsets.tolist() == other.offsets.tolist()
    for name, values in other.tokens.items():
        np.testing.assert_array_equal(one.tokens[name].numpy(), values.numpy())
    np.testing.assert_array_equal(one.samples["request_user"], other.samples["request_user"])


@given(logs, st.integers(1, 4), st.integers(1, 3), st.none() | st.integers(1, 3), st.integers(2, 9))
@examples(20, 200)
def test_files_hold_what_is_found_in_memory(histories, history, days, each, max_length):
    pools = None if each is None else PoolRule("action", (1, 3), each, 10)
    options = {"rule": AnchorRule("label", history, days), "pools": pools, "max_length": max_length}
    inner = LabelledSource(histories)
    if not inner.lengths.sum():
        return
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_anchors, "row_blocks", partial(row_blocks, max_events=16))
        patch.setattr(stored_anchors, "_PART", 3)
        columns = ColumnSource(inner, folder)
        for split in SPLITS:
            same(made(columns, split, **options), made(inner, split, **options))


@pytest.fixture
def log():
    draws = np.random.default_rng(2)
    return LabelledSource(
        [[(int(draws.integers(9)), float(draws.integers(2)), 1) for _ in range(40)] for _ in range(8)]
    )


def test_a_loader_process_opens_the_files_again(log, tmp_path):
    stored = made(ColumnSource(log, tmp_path))
    assert stored.index.user.base is not None  # a part of a file
    sent = pickle.dumps(stored)
    assert len(sent) < len(pickle.dumps(made(log))) + 2000
    same(pickle.loads(sent), made(log))


def test_batches_are_planned_from_the_files(log, tmp_path):
    stored, plain = made(ColumnSource(log, tmp_path)), made(log)
    options = {"global_batch": 7, "num_ranks": 2, "rank": 1, "window": 3}
    for shuffle in (False, True):
        one, other = (
            BalancedSampler(each.lengths(), groups=each.groups, shuffle=shuffle, **options)
            for each in (stored, plain)
        )
        assert one.batches.recipe() == other.batches.recipe()
        assert [one.plan(step).plan_hash for step in range(5)] == [
            other.plan(step).plan_hash for step in range(5)
        ]
    assert np.shares_memory(one.batches.lengths, stored.lengths())


def test_other_data_and_other_rules_are_made_anew(log, tmp_path):
    stored = made(ColumnSource(log, tmp_path))
    before = stored.index.start.copy()
    folder = tmp_path / stored_anchors.FOLDER
    (first,) = [each for each in folder.iterdir() if each.is_dir()]
    assert len(made(ColumnSource(log, tmp_path), rule=AnchorRule("label", 9, 1)).index.start) < len(before)
    assert first.exists()
    changed = LabelledSource(
        [[(gap, None if n % 2 else one, kind) for n, (gap, one, kind) in enumerate(h)] for h in log.rows]
    )
    for path in tmp_path.iterdir():
        if path.is_file():
            path.unlink()  # columns of other data are refused or removed by hand; the index is told by its digest
    other = made(ColumnSource(changed, tmp_path))
    same(other, made(changed))
    assert not first.exists()
    assert stored.index.start.tolist() == before.tolist()  # who has it open still reads it


def test_what_is_not_whole_is_not_there(log, tmp_path, monkeypatch):
    columns = ColumnSource(log, tmp_path)
    monkeypatch.setattr(stored_anchors, "sync_tree", lambda folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made(columns).index  # noqa: B018
    assert [each.name for each in (tmp_path / stored_anchors.FOLDER).iterdir()] == [".lock"]
    monkeypatch.undo()
    same(made(columns), made(log))


def _open(folder: str, log: LabelledSource, counts: object) -> None:
    make = stored_anchors._make

    def counted(*args: object) -> None:
        counts.put(1)
        make(*args)

    stored_anchors._make = counted
    same(made(ColumnSource(log, folder)), made(log))


def test_of_several_processes_one_makes_it(log, tmp_path):
    ColumnSource(log, tmp_path)
    fork = multiprocessing.get_context("fork")
    counts = fork.Queue()
    workers = [fork.Process(target=_open, args=(str(tmp_path), log, counts)) for _ in range(4)]
    for each in workers:
        each.start()
    for each in workers:
        each.join(60)
        assert each.exitcode == 0
    assert counts.get(timeout=60) == 1
    assert counts.empty()


def test_a_folder_that_cannot_be_written_is_named(log, tmp_path):
    columns = ColumnSource(log, tmp_path)
    (Path(tmp_path) / stored_anchors.FOLDER).write_text("in the way")
    with pytest.raises(DataError, match="cannot be written beside the data"):
        made(columns).index  # noqa: B018


def test_columns_of_other_histories_are_refused(log, tmp_path):
    log.digests = lambda: {"histories": "one"}
    ColumnSource(log, tmp_path)
    log.digests = lambda: {"histories": "another"}
    with pytest.raises(DataError, match="belongs to another data set"):
        ColumnSource(log, tmp_path)
