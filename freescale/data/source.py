"""What a data set is to the rest of the project: histories by row number, their lengths, and the items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from freescale.errors import DataError

IntArray = npt.NDArray[np.int64]
Split = Literal["train", "valid", "test"]


@dataclass(frozen=True)
class Histories:
    """Whole event histories of some users, oldest event first, jagged: values plus offsets.

    Args:
        users: [n] the users' raw ids.
        offsets: [n + 1] where each user's events start in every column.
        columns: one flat array a feature of events ("item" always; "time", "action" when the data has them).
        user_columns: [n, ...] one array a feature of users.
    """

    users: IntArray
    offsets: IntArray
    columns: dict[str, npt.NDArray[np.generic]]
    user_columns: dict[str, npt.NDArray[np.generic]] = field(default_factory=dict)

    @property
    def lengths(self) -> IntArray:
        """Number of events of each user."""
        return np.diff(self.offsets)


@dataclass(frozen=True)
class ItemCatalog:
    """Every item that occurs in the data, in ascending id order, and how often it occurs.

    Args:
        ids: [m] raw item ids, ascending.
        counts: [m] events of each item.
        train_counts: [m] events of each item in the training part: without the last two events of every user, or
            those before the moment of a temporal split. This is what the popularity baseline may look at.
    """

    ids: IntArray
    counts: IntArray
    train_counts: IntArray


class SequenceSource(Protocol):
    """A data set of user histories that can be read by row number.

    `lengths` is known without reading any history, so that batches can be planned before they are read.
    `groups` are the sizes of the runs of rows that are cheap to read together (row groups of a file).
    """

    name: str
    features: tuple[str, ...]

    @property
    def lengths(self) -> IntArray:
        """[rows] number of events of each history."""

    @property
    def groups(self) -> IntArray:
        """Sizes of the runs of rows stored together; they add up to the number of rows."""

    @property
    def items(self) -> ItemCatalog:
        """The items that occur."""

    def read(self, rows: Sequence[int] | IntArray) -> Histories:
        """The histories of these rows, in the order asked for."""


@runtime_checkable
class SplitSource(Protocol):
    """A source that says itself where the targets of a split stand; any other is split by leave-one-out."""

    def ends(self, split: Split) -> IntArray:
        """[rows] events of each history up to the target of a split, the target included; 0: it has none."""

    def missed(self, split: Split) -> npt.NDArray[np.bool_]:
        """[rows] whether the target of a split is an item that nothing was learnt of; then `ends` is 0."""

    def split_facts(self) -> dict[str, object]:
        """The name of the split ("split") and what else makes two such splits of the same data the same."""


def check_source(source: SequenceSource) -> None:
    """Refuse a data set that cannot be trained on, before anything is built from it."""
    if len(source.lengths) == 0:
        raise DataError("the data set holds no histories", got=source.name)
    if int(np.max(source.lengths)) < 4:
        raise DataError(
            "every history is too short to train on",
            got=f"longest history: {int(np.max(source.lengths))} events",
            allowed="at least one history of 4 events: two to learn from, one to validate, one to test",
        )
