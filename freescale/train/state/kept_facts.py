"""What the checkpoints of a run say of it: how it has been judged, and which run it is."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from freescale.errors import CheckpointError
from freescale.train.state.saved import read_meta


def kept_facts(paths: Iterable[Path]) -> dict[str, Any]:
    """The facts of the first of these checkpoints that can be read; empty where none can."""
    for path in paths:
        try:
            return read_meta(path)
        except CheckpointError:  # damaged, or removed meanwhile: the one before it says the same
            continue
    return {}
