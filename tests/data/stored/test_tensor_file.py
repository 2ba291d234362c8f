"""Files of tensors have the mode and the errors of any other file, and hold what was written."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freescale.data import read_arrays, read_tensors, write_arrays, write_tensors

TENSORS = {"half": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T, "none": torch.zeros(0, 4)}
ARRAYS = {
    "rows": np.arange(12, dtype=np.float32)[::2],
    "ids": np.array([3, 9]),
    "small": np.zeros((0, 2), np.int8),
}


@pytest.fixture(params=[0o022, 0o007], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize(("write", "content"), [(write_tensors, TENSORS), (write_arrays, ARRAYS)])
def test_the_umask_says_who_may_read(
    tmp_path: Path, umask: int, write: Callable[..., None], content: Any
) -> None:
    for _ in range(2):  # also in place of one that is there
        write(tmp_path / "file", content)
        assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~umask
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_tensors(tmp_path / "tensors", TENSORS)
    found = read_tensors(tmp_path / "tensors")
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], each) for name, each in TENSORS.items())
    write_arrays(tmp_path / "arrays", ARRAYS)
    arrays = read_arrays(tmp_path / "arrays")
    assert {name: (each.dtype, each.tolist()) for name, each in arrays.items()} == {
        name: (each.dtype, each.tolist()) for name, each in ARRAYS.items()
    }


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_what_the_system_refuses_is_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    from safetensors import SafetensorError

    def refused(*_: Any) -> None:
        raise SafetensorError(
            f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})"
        )

    monkeypatch.setattr("safetensors.torch.save_file", refused)
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        write_tensors(tmp_path / "file", TENSORS)
    assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path / "file"))


def test_what_is_no_refusal_stays_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import SafetensorError

    def broken(*_: Any) -> None:
        raise SafetensorError("a bug")

    monkeypatch.setattr("safetensors.torch.save_file", broken)
    with pytest.raises(SafetensorError, match="a bug"):
        write_tensors(tmp_path / "file", TENSORS)
