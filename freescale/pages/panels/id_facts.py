"""What a report says of a map that learns ids: how full it is, and what happened to ids in the run."""

from __future__ import annotations

from collections.abc import Sequence

from freescale import units
from freescale.trace import Event, MetricsLog, column, step_of

ID_COUNTS = {
    "asked": "asked for, a step at a time",
    "hits": "had a row",
    "inserts": "got a row",
    "evictions": "lost theirs",
    "collisions": "shared a row: window full",
    "not_admitted": "shared a row: not admitted yet",
}


def id_facts(log: MetricsLog) -> dict[str, dict[str, object]]:
    """Id maps as they were last seen, and what happened to ids over the whole run; nothing if ids are not learnt."""
    sections = _facts_of(log.ids)
    for table, pictures in log.ids_of.items():
        sections |= {f"{table}, {title}": facts for title, facts in _facts_of(pictures).items()}
    return sections


def _facts_of(pictures: Sequence[Event]) -> dict[str, dict[str, object]]:
    """Of one table."""
    if not pictures:
        return {}
    last = pictures[-1]
    totals = {name: sum(value or 0 for value in column(pictures, name)) for name in ID_COUNTS}
    table: dict[str, object] = {
        "slots": last.get("slots"),
        "taken": units.percent(column([last], "occupancy")[0] or 0.0),
        **{meaning: f"{totals[name]:,.0f}" for name, meaning in ID_COUNTS.items()},
    }
    sections = {f"at step {step_of(last):,}": table}
    for name, title in {
        "probe_histogram": "slots from home",
        "age_histogram": "steps since last use",
    }.items():
        counts = last.get(name)
        if isinstance(counts, dict) and counts:
            sections[title] = {f"{span}": f"{count:,} ids" for span, count in counts.items()}
    return sections
