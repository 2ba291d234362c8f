"""Content vectors of items, computed elsewhere: one row an item in a memory-mapped .npy file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from freescale.data.source import IntArray
from freescale.data.stored.digest import FileStamp, sample_file
from freescale.errors import DataError

CONTENT_FILE = "content.npy"

_LOOKED_THROUGH = 256 << 20
"""Bytes of a file that is looked through for numbers that are none when it is opened; of larger ones rows are looked at
when they are read."""
# Files up to 64 MiB are hashed whole.
_SAMPLED_BLOCKS = 1024
_KINDS = (np.float16, np.float32, np.float64)


class ContentFile:
    """Vectors of all items; only the rows asked for are read from disk.

    May be pickled: the receiver maps the file itself.

    Args:
        path: a .npy file, float16, float32 or float64, [items, width]; row n belongs to the n-th item of
            items.parquet (ascending ids).
        num_items: items of the data set.
        rows: where the items of the catalogue stand in the file, if they are not all items of the data set.
    """

    def __init__(self, path: str | Path, *, num_items: int, rows: IntArray | None = None) -> None:
        self.path = Path(path)
        self._chosen = rows
        self._mapped: npt.NDArray[Any] | None = None
        self._stamp: FileStamp | None = None
        self._digest: str | None = None
        shape, dtype = self._rows.shape, self._rows.dtype
        if dtype not in _KINDS or len(shape) != 2 or shape[1] < 1:
            raise DataError(
                "the file holds no content vectors",
                got=f"{path}: {dtype} of shape {shape}",
                allowed="float16, float32 or float64 of shape [items, width]",
            )
        if shape[0] != num_items:
            raise DataError(
                "the content vectors are not those of the data set",
                got=f"{path}: {shape[0]} rows",
                allowed=f"{num_items} rows, one for each item of items.parquet in its order",
            )
        self.width = int(shape[1])
        if self._rows.nbytes <= _LOOKED_THROUGH:
            self._check_finite(self._rows)

    def read(self, numbers: IntArray) -> npt.NDArray[np.float32]:
        """[n, width] vectors of the items with these numbers in the catalogue."""
        where = numbers if self._chosen is None else self._chosen[numbers]
        rows: npt.NDArray[np.float32] = self._rows[where].astype(np.float32)
        self._check_unchanged()
        self._check_finite(rows, where)
        return rows

    def _check_finite(self, rows: npt.NDArray[Any], where: IntArray | None = None) -> None:
        finite = np.isfinite(rows).all(1)
        if not finite.all():
            first = int(np.argmin(finite))
            raise DataError(
                "a content vector is not finite",
                got=f"{self.path}: row {first if where is None else int(where[first])}",
                next_step="write a vector of numbers there; zeros for an item of which nothing is known",
            )

    @property
    def digest(self) -> str:
        """Of the whole file, or of blocks spread over a large one; taken once."""
        if self._digest is None:
            self._stamp = FileStamp.of(self.path)
            self._digest = sample_file(self.path, num_blocks=_SAMPLED_BLOCKS)
        return self._digest

    def _check_unchanged(self) -> None:
        """Vectors exchanged in the middle of a run end it; asked only where a digest was taken before."""
        if self._digest is None:
            return
        try:
            stamp = FileStamp.of(self.path)
            same = stamp == self._stamp or sample_file(self.path, num_blocks=_SAMPLED_BLOCKS) == self._digest
        except OSError:
            same = False
        if not same:
            raise DataError(
                "the content vectors have changed since this run opened them",
                got=self.path,
                next_step="put the file back as it was and run the same command again: it resumes",
            )
        self._stamp = stamp

    @property
    def _rows(self) -> npt.NDArray[Any]:
        if self._mapped is None:
            try:
                self._mapped = np.load(self.path, mmap_mode="r", allow_pickle=False)
            except FileNotFoundError:
                raise DataError(
                    "the data set has no content vectors of its items",
                    got=f"{self.path} does not exist",
                    next_step=f"write them as {CONTENT_FILE} into the data folder, or set items.file",
                ) from None
            except (OSError, ValueError, EOFError) as error:
                raise DataError("the content vectors cannot be read", got=f"{self.path}: {error}") from error
        return self._mapped

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": None}
