"""Tables of rows: `embedding.*` are the defaults of all, `tables.NAME` overrides them for one."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from freescale.errors import ConfigError, nearest
from freescale.recipe.embedding import EmbeddingSection, map_problems
from freescale.recipe.reading.convert import checked, type_name
from freescale.recipe.reading.keys import extra_keys, key, nested_entries, own_fields

if TYPE_CHECKING:
    from freescale.data import BatchFeatures, Schema
    from freescale.recipe.config import Config

_MAP = "map"


@dataclass(frozen=True, kw_only=True)
class _OwnWords:
    """What a table can be told besides the keys of `embedding`."""

    dim: int | None = key(None, "width of a row; null: model.dim", at_least=1)


@dataclass(frozen=True, kw_only=True)
class TablesSection:
    """Tables by name, each with what differs from `embedding`; a table is called as its feature unless that says."""

    extra: Mapping[str, Any] = extra_keys()

    @classmethod
    def from_entries(cls, given: Mapping[str, Any], problems: list[str]) -> TablesSection:
        """The section with these entries, NAME or NAME.WORD; what is wrong with them is noted."""
        entries = nested_entries("tables", given, problems)
        fields, hints = _words()
        for table, words in entries.items():
            for word, value in words.items():
                path = f"tables.{table}.{word}"
                if word not in fields:
                    close = nearest(str(word), fields)
                    hint = f"did you mean {close}?" if close else f"allowed: {', '.join(fields)}"
                    problems.append(f"{path}: unknown word; {hint}")
                    continue
                try:
                    words[word] = checked(value, hints[word], fields[word])
                except ValueError as error:
                    problems.append(f"{path}: {error}")
        return cls(extra=entries)

    @staticmethod
    def describe() -> Iterator[tuple[str, str, str, str]]:
        """The words of a table, as other keys are listed."""
        fields, hints = _words()
        for word, item in fields.items():
            name = "id_map" if word == _MAP else word
            meaning = item.metadata["help"] if word == "dim" else f"as embedding.{name}, of this table"
            yield f"tables.NAME.{word}", type_name(hints[word], item), "null", meaning


@dataclass(frozen=True)
class TableOptions:
    """One table of a run.

    Args:
        name: of the table.
        features: that have rows in it.
        dim: width of a row.
        section: every key of `embedding`, with what this table overrides.
        num_values: how many different ids there can be, where the schema has a closed list of them.
    """

    name: str
    features: tuple[str, ...]
    dim: int
    section: EmbeddingSection
    num_values: int | None


def problems(config: Config) -> list[str]:
    """Tables that no feature has rows in, and tables of which two places say different things."""
    if not config.features.extra:
        return []  # which tables there are is known with the data set
    from freescale.data import read_schema

    ignored: list[str] = []
    return _problems(config, read_schema(config.features.extra, ignored))


def table_options(config: Config, schema: Schema) -> dict[str, TableOptions]:
    """All tables of a run, by name, in the order of the schema."""
    found = _problems(config, schema)
    if found:
        count = f"{len(found)} problem{'s' if len(found) > 1 else ''}"
        raise ConfigError(f"{count} with tables:\n  - " + "\n  - ".join(found))
    return {name: _options(config, schema, name) for name in schema.tables}


def _options(config: Config, schema: Schema, name: str) -> TableOptions:
    """What a table is: what its features say of it, before that tables.NAME, and for the rest embedding.*."""
    use, words = schema.tables[name], dict(config.tables.extra.get(name, {}))
    crossed = any(schema[each].cross for each in use.features)
    closed = use.num_values is not None
    usual = "direct" if closed else "hash" if crossed else config.embedding.id_map
    chosen = words.pop(_MAP, None) or use.map or usual
    rows = words.pop("rows", None) or use.rows or use.num_values
    if rows is None and name == "item":
        rows = config.embedding.rows
    dim = words.pop("dim", None) or use.dim or config.model.dim
    section = replace(config.embedding, id_map=chosen, rows=rows, **words)
    return TableOptions(name, use.features, dim, section, use.num_values)


def _problems(config: Config, schema: Schema) -> list[str]:
    found = []
    for name, words in config.tables.extra.items():
        use = schema.tables.get(name)
        if use is None:
            close = nearest(name, schema.tables)
            hint = f"did you mean {close}?" if close else f"there are: {', '.join(schema.tables)}"
            found.append(f"tables.{name}: no feature has rows in it; {hint}")
            continue
        if words.get("spread_hot") and name != "item":
            found.append(f"tables.{name}.spread_hot: only how popular items are is known before training")
        for word in (_MAP, "rows", "dim"):
            said, before = words.get(word), getattr(use, word)
            if said is not None and before is not None and said != before:
                found.append(
                    f"tables.{name}.{word}: a feature of it says {before}, got {said}; leave one out"
                )
            if said is not None and word != "dim" and use.num_values is not None:
                found.append(
                    f"tables.{name}.{word}: its ids are a closed list, which says how many rows there are"
                )
    if found:
        return found
    from freescale.recipe.features import uses_user

    # Of users there is a table only where something is said of it, or another feature has rows in it.
    unused = set() if uses_user(config, schema) else {("user",)}
    every = {
        name: _options(config, schema, name).section
        for name, use in schema.tables.items()
        if use.features not in unused
    }
    for name, section in every.items():
        said = config.tables.extra.get(name, {})
        if section.id_map == "hash" and section.rows is None:
            found.append(f"tables.{name}.rows: required with map: hash")
        found += [f"tables.{name}.{text}" for text in map_problems(config, section, said)]
        if said.get("lr") and not config.embedding.lr:
            found.append(
                f"tables.{name}.lr: is told as a multiple of embedding.lr, which is 0; raise that one"
            )
    return found


def table_widths(config: Config, features: BatchFeatures) -> dict[str, int]:
    """Width of the rows of every table that features have rows in."""
    return {name: options.dim for name, options in table_options(config, features.schema).items()}


def _words() -> tuple[dict[str, Any], dict[str, Any]]:
    """Every word of a table: its field and its type."""
    own, hints = own_fields(_OwnWords), typing.get_type_hints(_OwnWords)
    theirs, their_hints = own_fields(EmbeddingSection), typing.get_type_hints(EmbeddingSection)
    renamed = {(_MAP if name == "id_map" else name): item for name, item in theirs.items()}
    kinds = {(_MAP if name == "id_map" else name): their_hints[name] for name in theirs}
    return {**own, **renamed}, {**hints, **kinds}
