"""ChainModel: a model that follows a chain; requests keep the version they began with."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from freescale.errors import CheckpointError
from freescale.exports.chains.chain import Current, follow, load_version, read_current
from freescale.exports.chains.version import Version
from freescale.exports.export_reader import exported_version
from freescale.exports.exported_model import ExportedModel
from freescale.model import retrieves


class Served(NamedTuple):
    """One version, ready to answer."""

    current: Current
    version: Version
    model: ExportedModel


class ChainModel:
    """A model that recommends, and becomes a newer one by `refresh`; threads may ask meanwhile.

    Examples:
        >>> model = load_export("chain/")
        >>> model.recommend([31, 7, 12], k=5)
        >>> model.refresh()      # True if there was something new
    """

    def __init__(self, chain: str | Path) -> None:
        self.chain = Path(chain)
        self._lock = threading.Lock()
        self._served = self._made(*load_version(self.chain))

    @property
    def served(self) -> Served:
        """The version that answers now; hold it to ask the same one again."""
        return self._served

    @property
    def seq(self) -> int:
        """Number of the version that answers now."""
        return self._served.current.seq

    def refresh(self) -> bool:
        """Take over the last version of the chain; False where that is the one that answers.

        Deltas are applied to copies, and one reference is replaced at the end: a request is answered by one version.

        Raises:
            CheckpointError: a delta is missing, damaged or of another chain; the version before goes on answering.
        """
        with self._lock:
            mine, current = self._served, read_current(self.chain)
            if current.seq == mine.current.seq:
                if current.fingerprint != mine.current.fingerprint:
                    raise CheckpointError("the chain was published anew", got=self.chain)
                return False
            if current.seq < mine.current.seq:
                raise CheckpointError(
                    "the chain goes back, which none does",
                    got=f"version {current.seq} after {mine.current.seq}",
                    next_step="load_export(chain) again, if this is meant",
                )
            if current.base > mine.current.seq:
                # What lies between was compacted.
                current, version = load_version(self.chain)
            else:
                version = follow(self.chain, mine.version, mine.current.seq, current)
            self._served = self._made(current, version)
            return True

    def recommend(self, history: Sequence[Any], **options: Any) -> list[Any]:
        """As that of `ExportedModel`, by the version that answers now."""
        return self._served.model.recommend(history, **options)

    def score(self, history: Sequence[Any], candidates: Sequence[Any], **options: Any) -> list[Any]:
        """As that of `ExportedModel`, by the version that answers now."""
        return self._served.model.score(history, candidates, **options)

    def __getattr__(self, name: str) -> Any:
        """Whatever else an `ExportedModel` has."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._served.model, name)

    @staticmethod
    def _made(current: Current, version: Version) -> Served:
        model = exported_version(version)
        _warm_up(model)
        return Served(current, version, model)


def _warm_up(model: ExportedModel) -> None:
    """Whatever is made once for a version is made before the first request meets it."""
    if len(model.items) and retrieves(model.model.head) and model.features is None:
        times = [0] if model.manifest["encoder"]["time_bias"] else None
        model.recommend([model.names[0]], times=times, k=1)
