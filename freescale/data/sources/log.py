"""A log of sealed windows as a source: what a recipe names by `data.source=log`, or by a data.path that is one."""

from __future__ import annotations

from dataclasses import dataclass

from freescale.data.log.log_source import LogSource
from freescale.registry import register


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """Keys of a recipe's data.

    Args:
        cache_mb: memory a process keeps recently read row groups in.
        recent_windows: windows whose items are the catalogue; none: all so far.
    """

    cache_mb: float = 256
    recent_windows: int | None = None


@register("source", "log", options=LogOptions)
def make_log(path: str, options: LogOptions, *, seed: int) -> LogSource:
    """The log in this folder."""
    return LogSource(path, cache_mb=options.cache_mb, recent=options.recent_windows)
