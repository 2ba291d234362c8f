"""What a report says of every table: what it is, how full it is, and what its rows cost to move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from freescale import units
from freescale.pages.drawing import page
from freescale.trace import Event, MetricsLog, column

_FIELDS: dict[str, tuple[str, Callable[[float], str]]] = {
    "rows": ("unique rows", lambda value: f"{value:,.0f}"),
    "overlap": ("overlap", units.percent),
    "exposed_bytes": ("exposed", lambda value: f"{value / 1e6:,.2f} MB"),
    "hidden_bytes": ("hidden", lambda value: f"{value / 1e6:,.2f} MB"),
}
_BYTES = ("exposed_bytes", "hidden_bytes")
_NOTE = (
    "A step, all ranks together, means over the logged steps; the table that moves most comes first. Exposed bytes are "
    "sent and received while ranks stand still, hidden ones under compute; overlap is the share of rows that the step "
    "before used, too. Tables that every rank holds move no rows."
)


def table_panel(log: MetricsLog) -> str:
    """A row a table, where a run has several; nothing where there is one."""
    described = log.facts().get("tables", {})
    moved = _moved(log.steps)
    names = [*described, *(name for name in moved if name not in described)]
    if len(names) < 2:
        return ""
    names.sort(key=lambda name: -sum(moved.get(name, {}).get(each, 0.0) for each in _BYTES))
    full = {name: _occupancy(log, name) for name in names}
    heads, cells = ["table"], [[name] for name in names]
    for field, (title, write) in _FIELDS.items():
        # In a plain run nothing overlaps or is hidden.
        if not any(of_table.get(field) for of_table in moved.values()):
            continue
        heads.append(title)
        for name, row in zip(names, cells):
            value = moved.get(name, {}).get(field)
            row.append("-" if value is None else write(value))
    if any(full.values()):
        heads.append("rows taken")
        for name, row in zip(names, cells):
            row.append(full[name] or "-")
    heads.append("what it is")
    for name, row in zip(names, cells):
        row.append(str(described.get(name, "")))
    table = page.table(heads, [page.Row(row) for row in cells], ends_in_words=True)
    return table + (f'<p class="note">{_NOTE}</p>' if moved else "")


def _moved(steps: Sequence[Event]) -> dict[str, dict[str, float]]:
    """Of every table, the mean of each field over the steps that have it."""
    found: dict[str, dict[str, list[float]]] = {}
    for event in steps:
        tables = event.get("tables")
        for name, fields in tables.items() if isinstance(tables, Mapping) else ():
            for field, value in fields.items() if isinstance(fields, Mapping) else ():
                if (number := units.number(value)) is not None:
                    found.setdefault(str(name), {}).setdefault(str(field), []).append(number)
    return {name: {field: fmean(values) for field, values in each.items()} for name, each in found.items()}


def _occupancy(log: MetricsLog, table: str) -> str:
    """How many rows of a learnt map are taken, as last seen."""
    pictures = log.ids if table == "item" else log.ids_of.get(table, [])
    share = column(pictures[-1:], "occupancy")
    return units.percent(share[0]) if share and share[0] is not None else ""
