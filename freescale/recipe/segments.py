"""Long histories compressed into summary tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from freescale.recipe.reading.keys import changed, key

if TYPE_CHECKING:
    from freescale.data import SegmentRule
    from freescale.recipe.config import Config


@dataclass(frozen=True, kw_only=True)
class SegmentsSection:
    """Long histories compressed into summary tokens; off unless `recent` is set."""

    recent: int | None = key(
        None, "latest events that stay as they are, older ones are compressed; null: nothing is", at_least=1
    )
    length: int = key(350, "events of a segment; the last one of a history may be shorter", at_least=1)
    summaries: int = key(4, "learnt summary tokens behind each segment", at_least=1)


def problems(config: Config) -> list[str]:
    """Segments that would never be made, or keys of segments without them."""
    options = config.segments
    if options.recent is None:
        unused = changed(options, "length", "summaries")
        return [f"segments.{name}: does nothing without segments.recent" for name in unused]
    if config.model.mask != "causal":
        return [
            f"segments.recent: does not go with model.mask={config.model.mask}, since summaries bring a mask of their "
            "own; leave out one of the two"
        ]
    if options.recent >= config.data.max_length:
        return [
            f"segments.recent: must be below data.max_length = {config.data.max_length}, or there is no history to "
            f"compress; got {options.recent}"
        ]
    return []


def segment_rule(config: Config) -> SegmentRule | None:
    """How histories are cut, where they are."""
    from freescale.data import SegmentRule

    options = config.segments
    if options.recent is None:
        return None
    return SegmentRule(recent=options.recent, length=options.length, summaries=options.summaries)
