"""Content vectors: read by row from a mapped file, refused where they are not those of the data."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from freescale.data.stored import item_content
from freescale.data.stored.item_content import ContentFile
from freescale.errors import DataError


def save(path, values):
    np.save(path, values)
    return path


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_the_rows_asked_for_are_read_in_order(tmp_path, kind):
    values = np.arange(12).reshape(4, 3).astype(kind)
    file = ContentFile(save(tmp_path / "c.npy", values), num_items=4)
    assert file.width == 3
    rows = file.read(np.array([2, 0]))
    assert rows.dtype == np.float32
    assert rows.tolist() == [[6, 7, 8], [0, 1, 2]]
    assert file.read(np.zeros(0, np.int64)).shape == (0, 3)


def test_the_file_is_mapped_and_not_pickled(tmp_path):
    file = ContentFile(save(tmp_path / "c.npy", np.ones((1000, 100), np.float32)), num_items=1000)
    assert isinstance(file._rows, np.memmap)
    message = pickle.dumps(file)
    assert len(message) < 2000
    assert pickle.loads(message).read(np.array([999])).sum() == 100


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.ones((3, 2), np.float32), "3 rows"),
        (np.ones((5, 2), np.float32), "5 rows"),
        (np.ones((4, 2), np.int64), "int64"),
        (np.ones(4, np.float32), r"shape \(4,\)"),
        (np.ones((4, 0), np.float32), r"shape \(4, 0\)"),
    ],
)
def test_other_shapes_are_refused(tmp_path, values, message):
    with pytest.raises(DataError, match=message):
        ContentFile(save(tmp_path / "c.npy", values), num_items=4)


def test_missing_and_damaged_files_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"set items\.file"):
        ContentFile(tmp_path / "nowhere.npy", num_items=4)
    (tmp_path / "bad.npy").write_bytes(b"no numpy file")
    with pytest.raises(DataError, match="cannot be read"):
        ContentFile(tmp_path / "bad.npy", num_items=4)
    np.save(tmp_path / "objects.npy", np.array([[{}]]), allow_pickle=True)
    with pytest.raises(DataError, match="cannot be read"):
        ContentFile(tmp_path / "objects.npy", num_items=1)


def test_a_vector_that_is_not_finite_is_named(tmp_path, monkeypatch):
    """When the file is opened; of a large one when it is read."""
    values = np.ones((4, 2), np.float32)
    values[3, 1] = np.nan
    path = save(tmp_path / "c.npy", values)
    with pytest.raises(DataError, match="row 3"):
        ContentFile(path, num_items=4)
    monkeypatch.setattr(item_content, "_LOOKED_THROUGH", values.nbytes - 1)
    file = ContentFile(path, num_items=4)
    file.read(np.array([0, 2]))
    with pytest.raises(DataError, match="row 3"):
        file.read(np.array([0, 3]))


def test_a_catalogue_of_some_items_finds_their_rows(tmp_path):
    np.save(tmp_path / "content.npy", np.arange(12, dtype=np.float32).reshape(6, 2))
    file = ContentFile(tmp_path / "content.npy", num_items=6, rows=np.array([1, 4, 5]))
    assert file.read(np.array([0, 2, 1])).tolist() == [[2, 3], [10, 11], [8, 9]]
