"""The format is found from names and first lines; what cannot be input is said to be so."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from freescale.data.preparing.preparation import prepare
from freescale.data.preparing.reading.raw_input import check_input
from freescale.errors import DataError
from tests.data.raw_forms import BY_FILE, BY_TIME, EVENTS, TEXT_FORMS, histories, write
from tests.prepared_data import made_up, write_dataset


@pytest.mark.parametrize("asked", ["auto", "by name"])
@pytest.mark.parametrize("form", TEXT_FORMS)
def test_every_text_form_is_found_and_sorted(tmp_path: Path, form: str, asked: str) -> None:
    name, text, expected = TEXT_FORMS[form]
    source = write(tmp_path / name, text)
    summary = prepare(source, tmp_path / "out", format="auto" if asked == "auto" else form)
    assert histories(tmp_path / "out") == expected
    assert (summary.source_format, summary.num_users, summary.num_events) == (form, 2, 6)
    assert (summary.num_items, summary.max_item, summary.dropped_users) == (4, 40, 0)
    assert summary.decided
    if expected is BY_TIME:
        assert summary.features == ("item", "time", "action")
        assert histories(tmp_path / "out", "time") == {3: [40, 50, 60], 7: [90, 100, 100]}
        assert histories(tmp_path / "out", "action") == {3: [5, 4, 2], 7: [3, 5, 1]}


def test_folders_are_read_in_name_order(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number, (user, item, _, _) in reversed(list(enumerate(EVENTS))):
        write(tmp_path / "in" / f"part-{number}.csv", f"user,item\n{user},{item}\n")
    write(tmp_path / "in" / "_SUCCESS", "")
    prepare(tmp_path / "in", tmp_path / "out")
    assert histories(tmp_path / "out") == BY_FILE


def test_garbage_damaged_gzip_and_missing_input(tmp_path: Path) -> None:
    garbage = tmp_path / "x.bin"
    garbage.write_bytes(np.random.default_rng(0).bytes(100_000))
    for form in ("auto", "csv", "pairs", "movielens"):
        with pytest.raises(DataError, match="not text"):
            prepare(garbage, tmp_path / "out", format=form)
    with pytest.raises(DataError, match="as Parquet"):
        prepare(garbage, tmp_path / "out", format="parquet")
    packed = tmp_path / "x.txt.gz"
    packed.write_bytes(gzip.compress(os.urandom(5000).hex("\n").encode())[:-100])
    with pytest.raises(DataError, match=r"x\.txt\.gz"):
        prepare(packed, tmp_path / "out", format="pairs")
    with pytest.raises(DataError, match="There is no input"):
        prepare(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(DataError, match="did you mean 'movielens'"):
        prepare(garbage, tmp_path / "out", format="movielense")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="Cannot tell"):
        prepare(tmp_path / "folder", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_data_set_without_its_manifest_is_not_taken_for_raw_data(tmp_path):
    folder = write_dataset(tmp_path / "a", made_up())
    (folder / "dataset.json").write_text('{"format": "free')
    with pytest.raises(DataError, match=r"dataset\.json is missing or damaged"):
        check_input(folder)
