"""Feature and Schema: what is known of every value that comes with an event, an item or a user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from freescale.data.schema.vocabulary import Kind, Owner, Place, Scale
from freescale.errors import DataError

STRUCTURAL = ("user", "item", "time")
"""Features that a data set is built from: their names are theirs alone."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One feature; see `vocabulary.WORDS` for the words.

    Args:
        name: unique in its schema.
        of: its owner; of a cross the owner that all its members have a value for.
        kind: what it is; a cross is an id.
        cross: names of its members, in the order they are hashed in.
        table: where its rows live, None unless the schema says.
        rows: of that table, None unless the schema says.
        map: of that table, None unless the schema says.
        dim: of that table, None unless the schema says.
        values: closed list of an id.
        names: of bits.
        width: of a vector; the most values of a list.
        scale: of a number.
        edges: of a number.
        outcome: known only after the event.
        place: `as`, with its default filled in.
        column: name in the input, None unless the schema says.
    """

    name: str
    of: Owner
    kind: Kind
    cross: tuple[str, ...] = ()
    table: str | None = None
    rows: int | None = None
    map: str | None = None
    dim: int | None = None
    values: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    width: int | None = None
    scale: Scale = "none"
    edges: tuple[float, ...] = ()
    outcome: bool = False
    place: Place = "join"
    column: str | None = None

    @property
    def is_id(self) -> bool:
        """Whether it is looked up in a table: an id, several, a cross, or a number in buckets."""
        return self.kind in ("id", "ids") or bool(self.edges)

    @property
    def table_name(self) -> str | None:
        """The table of its rows; None where it touches none."""
        return (self.table or self.name) if self.is_id else None

    @property
    def lookup_table(self) -> str:
        """The table of its rows, where it has some.

        Raises:
            DataError: it touches no table.
        """
        if self.table_name is None:
            raise DataError(
                f"feature {self.name!r} is looked up in no table",
                got=self.kind,
                allowed="id, ids, a cross, or a number with edges",
            )
        return self.table_name

    @property
    def num_values(self) -> int | None:
        """How many different ids there can be, where that is known from the schema."""
        if self.edges:
            return len(self.edges) + 1
        return len(self.values) or None

    @property
    def raw_ids(self) -> bool:
        """Whether its values are ids as the input has them, of whatever kind: neither numbered nor made here."""
        return self.kind in ("id", "ids") and not self.values and not self.cross

    @property
    def input_name(self) -> str:
        """Its column in the input."""
        return self.column or self.name

    def words(self) -> dict[str, Any]:
        """As a schema says it: only what is not the default, in plain lists and texts."""
        said: dict[str, Any] = {"cross": list(self.cross)} if self.cross else {"of": self.of, "is": self.kind}
        for word in ("table", "rows", "map", "dim", "width", "column"):
            if getattr(self, word) is not None:
                said[word] = getattr(self, word)
        for word in ("values", "names", "edges"):
            if getattr(self, word):
                said[word] = list(getattr(self, word))
        if self.scale != "none":
            said["scale"] = self.scale
        if self.outcome:
            said["outcome"] = True
        if self.place != usual_place(self.of):
            said["as"] = self.place
        return said


def usual_place(owner: Owner) -> Place:
    """Where a feature goes unless the schema says."""
    return "front" if owner == "user" else "join"


@dataclass(frozen=True)
class TableUse:
    """A table and what features say of it; None where none of them says anything.

    Args:
        name: of the table.
        features: that have their rows in it, in the order of the schema.
        rows: how many.
        map: from ids to rows.
        dim: width of a row.
        num_values: how many different ids there can be, where the list is closed.
    """

    name: str
    features: tuple[str, ...]
    rows: int | None = None
    map: str | None = None
    dim: int | None = None
    num_values: int | None = None


@dataclass(frozen=True)
class Schema:
    """All features of a data set, by name, in their order."""

    features: Mapping[str, Feature] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Feature]:
        return iter(self.features.values())

    def __contains__(self, name: object) -> bool:
        return name in self.features

    def __getitem__(self, name: str) -> Feature:
        return self.features[name]

    def __len__(self) -> int:
        return len(self.features)

    def __bool__(self) -> bool:
        return bool(self.features)

    def stored(self, owner: Owner) -> tuple[Feature, ...]:
        """Features of an owner that have a column of their own: no crosses, and not what a data set is built from."""
        return tuple(
            each for each in self if each.of == owner and not each.cross and each.name not in STRUCTURAL
        )

    def columns(self) -> tuple[Feature, ...]:
        """Features with one value a row of events: those of events, and those of requests."""
        return tuple(each for each in self if each in (*self.stored("event"), *self.stored("request")))

    @cached_property
    def crosses(self) -> tuple[Feature, ...]:
        """Ids made of other ids."""
        return tuple(each for each in self if each.cross)

    @cached_property
    def outcomes(self) -> tuple[Feature, ...]:
        """What is known only after the event."""
        return tuple(each for each in self if each.outcome)

    @cached_property
    def tables(self) -> dict[str, TableUse]:
        """Every table by name, with the features that have rows in it."""
        found: dict[str, list[Feature]] = {}
        for each in self:
            if each.table_name is not None:
                found.setdefault(each.table_name, []).append(each)
        return {name: _table_use(name, users) for name, users in found.items()}

    def members(self, cross: Feature) -> tuple[Feature, ...]:
        """What a cross is made of."""
        return tuple(self.features[name] for name in cross.cross)

    def words(self) -> dict[str, dict[str, Any]]:
        """As plain words that `read_schema` reads back to an equal schema."""
        return {each.name: each.words() for each in self}

    def without(self, *names: str) -> Schema:
        """The same without some features."""
        return Schema({each.name: each for each in self if each.name not in names})

    def with_feature(self, feature: Feature) -> Schema:
        """The same with one more feature, or another in its place."""
        return Schema({**self.features, feature.name: feature})


def _table_use(name: str, users: list[Feature]) -> TableUse:
    def said(word: str) -> Any:
        return next((getattr(each, word) for each in users if getattr(each, word) is not None), None)

    return TableUse(
        name=name,
        features=tuple(each.name for each in users),
        rows=said("rows"),
        map=said("map"),
        dim=said("dim"),
        num_values=said("num_values"),
    )


def legacy_schema(columns: tuple[str, ...] | list[str]) -> Schema:
    """What a data set without a schema holds: items, and where it has them times and numbers of actions."""
    known = {
        "item": Feature(name="item", of="event", kind="id"),
        "time": Feature(name="time", of="event", kind="time"),
        "action": Feature(name="action", of="event", kind="number", outcome=True),
    }
    return Schema({name: known[name] for name in known if name in columns})


def renamed_columns(schema: Schema) -> Schema:
    """The same without the names of columns in the input: once stored, a feature goes by its own name."""
    return Schema({each.name: replace(each, column=None) for each in schema})
