"""LayoutWishes: what the kernels of a run have asked layouts for, so that it can be made before they ask.

Which lists a batch needs follows from the model, in ways that are spread over many kernels. So nobody says it: layouts
of the first steps note what they are asked for, and those of later steps are made with all of it, by the thread that
makes batches ready. What was never asked for before is made when it is asked for, as ever.
"""

from __future__ import annotations

from typing import Any

Wish = tuple[Any, ...]


class LayoutWishes:
    """Names and arguments of lists, in the order they were first asked for; any thread may note and read."""

    def __init__(self) -> None:
        self._noted: dict[Wish, None] = {}
        self.parcel_bytes = 1 << 20
        """Room for the tables of a batch; grows with what batches take."""

    def note(self, *wish: Any) -> None:
        """A layout was asked for this."""
        self._noted.setdefault(wish, None)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._noted)

    def noted(self) -> list[Wish]:
        """All of it, in a fixed order."""
        return list(self._noted)

    def took(self, num_bytes: int) -> None:
        """The tables of a batch have taken so much."""
        self.parcel_bytes = max(self.parcel_bytes, -(-(num_bytes * 5 // 4) // 4096) * 4096)
