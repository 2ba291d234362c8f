"""Slots of features against dicts and loops: every id finds its row, whatever stands beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.data import NONE, SequenceBatch
from freescale.embedding import DirectMap, HashMap
from freescale.errors import DataError
from freescale.kernels.rows import unique
from freescale.pipeline import FeatureIds, IdColumn
from tests.effort import examples

CPU = torch.device("cpu")
PAD, NO_ID, FIRST = 0, 1, 2
ID = st.just(NONE) | st.integers(0, 19)
COLUMNS = (
    IdColumn("artist", "items", "artist"),
    IdColumn("similar", "tokens", "artist"),
    IdColumn("tags", "tokens", "artist", several=True),
    IdColumn("genres", "items", "genre", several=True),
    IdColumn("country", "samples", "country"),
)


@st.composite
def batches(draw: st.DrawFn) -> SequenceBatch:
    lengths = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    sizes = {"tokens": sum(lengths), "samples": len(lengths), "items": draw(st.integers(0, 5))}
    parts: dict[str, dict[str, torch.Tensor]] = {"tokens": {}, "samples": {}, "items": {}}
    for column in COLUMNS:
        size, longest = sizes[column.domain], draw(st.integers(1, 3))
        shape = (size, longest) if column.several else (size,)
        if column.several:
            rows = [draw(st.lists(st.integers(0, 19), max_size=longest)) for _ in range(size)]
            flat = [value for row in rows for value in row + [NONE] * (longest - len(row))]
        else:
            flat = draw(st.lists(ID, min_size=size, max_size=size))
        parts[column.domain][column.name] = torch.tensor(flat, dtype=torch.int64).view(shape)
    return SequenceBatch(offsets, **parts)


def slots_by_hand(batch: SequenceBatch, maps: dict[str, Any]) -> dict[str, Any]:
    """Every slot, and the rows it points to: table by table, with dicts."""
    found: dict[str, Any] = {}
    for table, id_map in maps.items():
        columns = [column for column in COLUMNS if column.table == table]
        values = {column.name: getattr(batch, column.domain)[column.name].tolist() for column in columns}
        cells = [cell for column in values.values() for cell in column]
        flat = [v for cell in cells for v in (cell if isinstance(cell, list) else [cell])]
        row_of = {v: int(id_map.rows(torch.tensor([v]))[0]) for v in flat if v != NONE}
        number = {row: n for n, row in enumerate(sorted(set(row_of.values())))}
        for column in columns:
            slots = []
            for cell in values[column.name]:
                if not column.several:
                    slots.append(NO_ID if cell == NONE else FIRST + number[row_of[cell]])
                    continue
                slot = [PAD if v == NONE else FIRST + number[row_of[v]] for v in cell]
                if all(v == NONE for v in cell):
                    slot[0] = NO_ID
                slots.append(slot)
            found[column.name] = slots
        found["rows of " + table] = sorted(number)
    return found


@examples(60, 1000)
@given(batches())
def test_slots_are_those_of_dicts(batch: SequenceBatch) -> None:
    maps: dict[str, Any] = {"artist": HashMap(7), "genre": DirectMap(20), "country": DirectMap(20)}
    ids = FeatureIds(COLUMNS, maps)
    assert ids.tables == ("artist", "genre", "country")
    asked = {name: unique(rows) for name, rows in ids.rows(batch).items()}
    slotted = ids.with_slots(batch, {name: inverse for name, (_, inverse) in asked.items()}, device=CPU)
    expected = slots_by_hand(batch, maps)
    for name, (rows, _) in asked.items():
        assert rows.tolist() == expected["rows of " + name]
    for column in COLUMNS:
        found = getattr(slotted, column.domain)[column.name + ".slot"]
        assert found.tolist() == expected[column.name], column.name
        assert found.shape == getattr(batch, column.domain)[column.name].shape


def test_some_domains_ask_their_tables_alone() -> None:
    maps: dict[str, Any] = {name: DirectMap(9) for name in ("item", "artist", "genre", "country")}
    ids = FeatureIds(COLUMNS, maps)
    assert ids.of("samples").tables == ("country",)
    assert ids.of("tokens", "samples").tables == ("artist", "country")
    assert ids.of("items").tables == ("artist", "genre")
    # A table that nothing asks is asked for no row: every rank names the same tables.
    empty = torch.zeros(0, dtype=torch.int64)
    nothing = SequenceBatch(
        torch.zeros(1, dtype=torch.int64),
        tokens={"similar": empty, "tags": empty.view(0, 2)},
        samples={"country": empty},
        items={"artist": empty, "genres": empty.view(0, 1)},
    )
    assert {name: len(rows) for name, rows in ids.rows(nothing).items()} == dict.fromkeys(maps, 0)


def test_an_id_outside_a_table_is_told_with_the_name_of_the_feature() -> None:
    ids = FeatureIds([IdColumn("country", "samples", "land")], {"land": DirectMap(9)})
    batch = SequenceBatch(torch.tensor([0, 0]), samples={"country": torch.tensor([42])})
    with pytest.raises(DataError) as caught:
        ids.rows(batch)
    told = str(caught.value)
    assert told.startswith("country: an id lies outside the table")
    assert "got:     id 42" in told
    assert "tables.land.rows" in told
    assert "embedding" not in told


def test_an_unknown_table_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        FeatureIds(COLUMNS, {"artist": DirectMap(9)})
