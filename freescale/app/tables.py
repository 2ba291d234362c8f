"""Table: what a program says of a table of rows, in the words that recipes and schemas use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from freescale.errors import ConfigError

ITEM = "item"
# What a table calls otherwise than the section `embedding` does.
_RENAMED = {"map": "embedding.id_map", "dim": "model.dim"}


class Table:
    """A table of rows; its words are those of `tables.NAME` in a recipe: dim, rows, map, optimizer, lr, ...

    Args:
        name: of the table; "item" holds the items.
        words: what differs from the section `embedding` of the recipe.

    Examples:
        >>> Table("item", dim=64, rows=100_000, map="zero_collision")
    """

    def __init__(self, name: str, **words: Any) -> None:
        self.name, self.words = name, words

    def __repr__(self) -> str:
        return f"Table({', '.join([repr(self.name), *(f'{k}={v!r}' for k, v in self.words.items())])})"


def recipe_keys(tables: Sequence[Table]) -> dict[str, Any]:
    """The recipe keys that say the same as these tables.

    Raises:
        ConfigError: another table than that of the items, or one of them twice.
    """
    keys: dict[str, Any] = {}
    names = [table.name for table in tables]
    others = [name for name in names if name != ITEM]
    if others:
        raise ConfigError(
            f"a Trainer builds the table of items so far, and no other: tables={', '.join(others)}",
            got=", ".join(map(repr, tables)),
            allowed=f"Table({ITEM!r}, ...)",
        )
    if len(names) > 1:
        raise ConfigError(f"table {ITEM!r} is given twice", got=", ".join(map(repr, tables)))
    for table in tables:
        keys |= {_RENAMED.get(word, f"embedding.{word}"): value for word, value in table.words.items()}
    return keys
