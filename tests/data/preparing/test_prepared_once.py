"""Raw input that training prepares on its way is prepared again when it is other input, or refused in words."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from freescale.data.preparing.prepared_once import INPUT_FILE, prepared_once, when_prepared
from freescale.data.source_kinds import open_source
from freescale.errors import DataError

SCHEMA = {"features": {"price": {"of": "event", "is": "number"}}}


def write(path: Path, *, users: int = 4, price: int = 1) -> Path:
    lines = [
        f"u{user},i{(user + event) % 5},{100 * event},{price}" for user in range(users) for event in range(6)
    ]
    path.write_text("user,item,time,price\n" + "\n".join(lines) + "\n")
    return path


def num_users(cache: Path) -> int:
    return len(open_source(cache).lengths)


def test_input_that_stays_is_prepared_once(tmp_path: Path) -> None:
    raw, cache = write(tmp_path / "a.csv"), tmp_path / "data"
    prepared_once(raw, cache, schema=None, on_change="refuse")
    first = when_prepared(cache)
    os.utime(raw, (1, 1))
    moved = shutil.copy(raw, tmp_path / "b.csv")
    for source in (raw, moved):
        for how in ("refuse", "renew", "keep"):
            prepared_once(source, cache, schema=None, on_change=how)  # type: ignore[arg-type]
            assert when_prepared(cache) == first


def test_other_input_is_refused_with_what_differs_kept_or_prepared(tmp_path: Path) -> None:
    raw, other, cache = write(tmp_path / "a.csv"), write(tmp_path / "b.csv", users=7), tmp_path / "data"
    prepared_once(raw, cache, schema=None, on_change="refuse")
    with pytest.raises(
        DataError, match=r"was prepared from .*a\.csv.*\n  - .*b\.csv: \d+ bytes then, \d+ now"
    ):
        prepared_once(other, cache, schema=None, on_change="refuse")
    prepared_once(other, cache, schema=None, on_change="keep")
    assert num_users(cache) == 4
    prepared_once(other, cache, schema=None, on_change="renew")
    assert num_users(cache) == 7


@pytest.mark.parametrize("change", ["contents", "schema", "one more", "one less"])
def test_every_change_is_seen(change: str, tmp_path: Path) -> None:
    folder, cache = tmp_path / "raw", tmp_path / "data"
    folder.mkdir()
    files = [write(folder / name) for name in ("a.csv", "b.csv")]
    prepared_once(folder, cache, schema=None, on_change="refuse")
    schema = None
    if change == "contents":
        write(files[1], price=2)
    elif change == "schema":
        schema = SCHEMA["features"]
    elif change == "one more":
        write(folder / "c.csv")
    else:
        files[0].unlink()
    words = {
        "contents": "other contents",
        "schema": "features",
        "one more": "c.csv: new",
        "one less": "a.csv: gone",
    }
    with pytest.raises(DataError, match=words[change]):
        prepared_once(folder, cache, schema=schema, on_change="refuse")


def test_a_folder_that_does_not_say_is_taken_by_who_goes_on_and_prepared_by_who_starts_over(
    tmp_path: Path,
) -> None:
    raw, other, cache = write(tmp_path / "a.csv"), write(tmp_path / "b.csv", users=7), tmp_path / "data"
    prepared_once(raw, cache, schema=None, on_change="refuse")
    for damaged in ("", "[]", "{}"):
        (cache / INPUT_FILE).write_text(damaged)
        prepared_once(other, cache, schema=None, on_change="refuse")
        assert num_users(cache) == 4
    (cache / INPUT_FILE).unlink()
    prepared_once(other, cache, schema=None, on_change="renew")
    assert num_users(cache) == 7


def test_who_looks_at_a_run_needs_no_input(tmp_path: Path) -> None:
    raw, cache = write(tmp_path / "a.csv"), tmp_path / "data"
    prepared_once(raw, cache, schema=None, on_change="refuse")
    raw.unlink()
    assert len(open_source(raw, cache=cache, on_change="keep").lengths) == 4
    with pytest.raises(DataError, match="does not exist"):
        open_source(raw, cache=cache)
