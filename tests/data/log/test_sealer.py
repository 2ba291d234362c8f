"""Sealing events into a log: each once, whole windows or none, whatever happens meanwhile."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.data import ColumnNames, LogSource, ParquetSource, append_log, drop_windows, load_log
from freescale.errors import DataError
from tests.data.log.reference import Event, ReferenceLog, check, window_rows, write_csv
from tests.effort import examples, slow
from tests.killed import dies

DAY = 86_400
FIRST = [(1, 10, 5), (1, 11, 6), (2, 10, 7), (2, 12, 9), (3, 10, 9)]
SECOND = [(1, 13, 20), (2, 14, 21), (3, 11, 22), (4, 10, 23), (4, 15, 24)]


def _events(start: int, stop: int) -> st.SearchStrategy[list[Event]]:
    event = st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(start, stop))
    return st.lists(event, min_size=6, max_size=25)


@examples(12, 200)
@given(
    st.lists(_events(0, 300), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from([None, 20, 100]),
    st.sampled_from([None, 0, 60]),
)
def test_a_log_is_what_lists_and_loops_make_of_it(
    tmp_path_factory: pytest.TempPathFactory,
    inputs: list[list[Event]],
    max_length: int,
    every: int | None,
    max_late: int | None,
) -> None:
    folder = tmp_path_factory.mktemp("log")
    reference = ReferenceLog(max_length, max_late, every)
    for number, events in enumerate(inputs):
        # A user with two events at the end of the day: there is always something to learn.
        last = 400 * (number + 1)
        events = [*events, (100 + number, 1, last), (100 + number, 2, last + 1)]
        log = append_log(
            folder / "log",
            write_csv(folder / f"{number}.csv", events),
            max_length=max_length,
            max_late=max_late,
            every=every,
        ).log
        reference.append(events)
    check(log, reference)
    assert load_log(folder / "log") == log


def test_a_folder_of_files_is_sealed_file_by_file_as_they_come(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    write_csv(raw / "a.csv", FIRST)
    append_log(tmp_path / "log", raw)
    write_csv(raw / "b.csv", SECOND)
    log = append_log(tmp_path / "log", raw).log
    reference = ReferenceLog(200)
    reference.append(FIRST)
    reference.append(SECOND)
    check(log, reference)
    with pytest.raises(DataError, match="in the log already"):
        append_log(tmp_path / "log", raw)
    with pytest.raises(DataError, match="in the log already"):
        append_log(tmp_path / "log", shutil.copy(raw / "a.csv", tmp_path / "other_name.csv"))
    write_csv(raw / "a.csv", [*FIRST, (9, 9, 99)])
    with pytest.raises(DataError, match=r"a\.csv was changed after it was sealed in window 0"):
        append_log(tmp_path / "log", raw)
    assert load_log(tmp_path / "log") == log


def test_events_that_are_too_late_are_dropped_and_counted(tmp_path: Path) -> None:
    append_log(tmp_path / "log", write_csv(tmp_path / "a.csv", SECOND), max_late=10)
    late = [(1, 50, 3), (1, 51, 15), (2, 52, 30)]
    log = append_log(tmp_path / "log", write_csv(tmp_path / "b.csv", late)).log
    assert (log.windows[1].dropped, log.windows[1].late, log.windows[1].events) == (1, 1, 2)
    assert window_rows(log, 1)[0] == (1, (13, 51), 1)
    with pytest.raises(DataError, match="made with another max_late"):
        append_log(tmp_path / "log", write_csv(tmp_path / "c.csv", FIRST), max_late=11)


def test_words_and_actions_keep_their_numbers_from_window_to_window(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("user,item,time,action\nu,x,1,view\nu,y,2,buy\nu,y,3,view\n")
    (tmp_path / "b.csv").write_text("user,item,time,action\nu,z,4,buy\nv,x,5,buy\nv,y,6,buy\n")
    append_log(tmp_path / "log", tmp_path / "a.csv")
    log = append_log(tmp_path / "log", tmp_path / "b.csv").log
    source = ParquetSource(log.window_path(1))
    read = source.read(np.arange(2))
    assert sorted(source.item_names(source.items.ids).words.to_pylist()) == ["x", "y", "z"]
    words = source.item_names(read.columns["item"].astype(np.int64)).words.to_pylist()
    actions = dict(zip(zip(np.repeat(read.users, read.lengths).tolist(), words), read.columns["action"]))
    # The most frequent of the first input is 0, whatever comes later.
    assert log.rules.actions == {"view": 0.0, "buy": 1.0}
    assert sorted(float(number) for number in actions.values()) == [0.0, 0.0, 1.0, 1.0, 1.0]
    (tmp_path / "c.csv").write_text("user,item,time,action\nu,z,7,steal\nu,z,8,buy\n")
    with pytest.raises(DataError, match="steal"):
        append_log(tmp_path / "log", tmp_path / "c.csv")
    (tmp_path / "d.csv").write_text("user,item,time\nu,z,7\nu,z,8\n")
    with pytest.raises(DataError, match="other columns than the log"):
        append_log(tmp_path / "log", tmp_path / "d.csv")
    assert load_log(tmp_path / "log") == log


@pytest.mark.parametrize(("every", "deep"), [(3, False), slow(3, True), slow(None, True)])
def test_killed_before_any_write_the_same_call_ends_in_the_same_log(
    tmp_path: Path, every: int | None, deep: bool
) -> None:
    first, second = write_csv(tmp_path / "a.csv", FIRST), write_csv(tmp_path / "b.csv", SECOND)
    started = tmp_path / "started"
    append_log(started, first, every=every)
    wanted = append_log(_copy(started, tmp_path / "wanted"), second, every=every).log
    number, died = 0, True
    while died:
        place = _copy(started, tmp_path / f"killed-{number}")
        died = _append_and_die(place, second, every=every, at=number, deep=deep)
        sealed = len(load_log(place).windows)
        if sealed == len(wanted.windows):
            with pytest.raises(DataError, match="in the log already"):
                append_log(place, second, every=every)
        else:
            append_log(place, second, every=every)
        found = load_log(place)
        assert found.fingerprint == wanted.fingerprint
        assert _names(place) == _names(wanted.path)
        assert [window_rows(found, n) for n in range(len(found.windows))] == [
            window_rows(wanted, n) for n in range(len(wanted.windows))
        ]
        shutil.rmtree(place)
        number += 1
    assert number > (20 if deep else 10)  # so often it was killed


def test_killed_in_its_first_window_a_log_begins_anew(tmp_path: Path) -> None:
    source = write_csv(tmp_path / "a.csv", FIRST)
    wanted = append_log(tmp_path / "wanted", source).log
    number, died = 0, True
    while died:
        place = tmp_path / f"killed-{number}"
        died = _append_and_die(place, source, every=None, at=number)
        if not (place / "log.json").exists():
            append_log(place, source)
        assert load_log(place).fingerprint == wanted.fingerprint
        shutil.rmtree(place)
        number += 1


def test_another_input_waits_until_one_that_was_killed_is_finished(tmp_path: Path) -> None:
    three = [(1, 1, 1), (1, 2, 2), (1, 3, 3)]
    first, second = write_csv(tmp_path / "a.csv", three), write_csv(tmp_path / "b.csv", FIRST)
    number = 0
    while True:
        place = tmp_path / f"{number}"
        _append_and_die(place, first, every=1, at=number)
        if (place / "log.json").exists():
            break
        number += 1
    with pytest.raises(DataError, match="its input comes first"):
        append_log(place, second)
    append_log(place, first, every=1)
    append_log(place, second)


def test_windows_that_are_not_as_they_were_are_refused_by_name(tmp_path: Path) -> None:
    append_log(tmp_path / "log", write_csv(tmp_path / "a.csv", FIRST))
    append_log(tmp_path / "log", write_csv(tmp_path / "b.csv", SECOND))
    text = (tmp_path / "log" / "log.json").read_text()
    for old, new, message in (
        ('"events": 5', '"events": 6', "the entry of window-000000 was changed"),
        ('"number": 1', '"number": 2', "the entry of window-000002 was changed"),
    ):
        (tmp_path / "log" / "log.json").write_text(text.replace(old, new, 1))
        with pytest.raises(DataError, match=message):
            load_log(tmp_path / "log")
    (tmp_path / "log" / "log.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        append_log(tmp_path / "log", write_csv(tmp_path / "c.csv", SECOND))


@pytest.mark.parametrize("name", ["lengths.npy", "targets.npy", "dataset.json", "shard-00000.parquet"])
@pytest.mark.parametrize("left", [None, b"", b"{}"])
def test_a_damaged_window_is_named_with_a_way_that_logs_have(
    tmp_path: Path, name: str, left: bytes | None
) -> None:
    """Windows are prepared by nobody: who follows the advice of a data set has another log."""
    append_log(tmp_path / "log", write_csv(tmp_path / "a.csv", FIRST))
    file = tmp_path / "log" / "window-000000" / name
    file.unlink() if left is None else file.write_bytes(left)
    with pytest.raises(DataError) as caught:
        LogSource(tmp_path / "log").read([0])
    told = str(caught.value)
    assert "prepare" not in told
    assert "make the log anew" in told
    assert name in told or "window-000000" in told


def test_old_windows_may_be_deleted_and_the_chain_holds(tmp_path: Path) -> None:
    append_log(tmp_path / "log", write_csv(tmp_path / "a.csv", FIRST))
    whole = append_log(tmp_path / "log", write_csv(tmp_path / "b.csv", SECOND)).log
    log = drop_windows(tmp_path / "log", before=1)
    assert not log.window_path(0).exists()
    assert log.fingerprint == whole.fingerprint
    with pytest.raises(DataError, match="The last window of a log stays"):
        drop_windows(tmp_path / "log", before=2)
    third = [(1, 16, 40), (4, 16, 41)]
    log = append_log(tmp_path / "log", write_csv(tmp_path / "c.csv", third)).log
    assert window_rows(log, 2) == [(1, (10, 11, 13, 16), 1), (4, (10, 15, 16), 1)]


def test_bad_input_is_refused_and_leaves_the_log_alone(tmp_path: Path) -> None:
    log = append_log(tmp_path / "log", write_csv(tmp_path / "a.csv", FIRST)).log
    with pytest.raises(DataError, match="nothing to learn"):
        append_log(tmp_path / "log", write_csv(tmp_path / "b.csv", [(8, 1, 50), (9, 1, 51)]))
    (tmp_path / "c.csv").write_text("user,item\n1,2\n")
    with pytest.raises(DataError, match="A log needs times"):
        append_log(tmp_path / "log", tmp_path / "c.csv", columns=ColumnNames(time=""))
    with pytest.raises(DataError, match="There is no input"):
        append_log(tmp_path / "log", tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    with pytest.raises(DataError, match="not empty and not a log"):
        append_log(tmp_path / "other", tmp_path / "a.csv")
    assert load_log(tmp_path / "log") == log
    assert _names(tmp_path / "log") == {".lock", "log.json", "tail-000000", "window-000000"}


def _copy(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _append_and_die(place: Path, source: Path, *, every: int | None, at: int, deep: bool = False) -> bool:
    """Append in a process that is gone, without any cleaning up, just before change `at` of files of the log.

    Without `deep` only names in its own folder count, not those of the folder in which windows are made.
    """
    return dies(lambda: append_log(place, source, every=every), place, at=at, deep=deep)
