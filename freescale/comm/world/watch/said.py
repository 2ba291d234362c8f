"""What every word of a rank begins with: who says it, where, and what it was doing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class Said:
    """A word of one rank.

    Args:
        rank: who.
        host: where.
        stage: what it does, or was doing.
        step: at which step, if at one.
    """

    rank: int
    host: str
    stage: str
    step: int | None

    @property
    def where(self) -> str:
        """Stage and step in words."""
        return f"in stage '{self.stage}'" + ("" if self.step is None else f" at step {self.step}")

    @classmethod
    def made_of(cls, values: Mapping[str, Any]) -> Self | None:
        """From what came over a wire or out of a file; None if it is none."""
        try:
            return cls(**values)
        except TypeError:
            return None
