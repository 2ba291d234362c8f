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
        name: of the table; "item" holds the items, "user" the users, any other is called as the feature that has
            rows in it, or as its `table` in the schema.
        words: what differs from the section `embedding` of the recipe.

    Examples:
        >>> Table("item", dim=64, rows=100_000, map="zero_collision")
        >>> Table("artist", dim=16, rows=20_000, map="hash", optimizer="rowwise_adagrad")
    """

    def __init__(self, name: str, **words: Any) -> None:
        self.name, self.words = name, words

    def __repr__(self) -> str:
        return f"Table({', '.join([repr(self.name), *(f'{k}={v!r}' for k, v in self.words.items())])})"


def recipe_keys(tables: Sequence[Table]) -> dict[str, Any]:
    """The recipe keys that say the same as these tables.

    What is said of items alone is said of the section `embedding`, whose keys are the defaults of all tables; beside
    other tables it is said of `tables.item`. The width of items is that of the model.

    Raises:
        ConfigError: a table is given twice.
    """
    names = [table.name for table in tables]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise ConfigError(f"table {twice[0]!r} is given twice", got=", ".join(map(repr, tables)))
    if names == [ITEM]:
        return {_RENAMED.get(word, f"embedding.{word}"): value for word, value in tables[0].words.items()}
    keys: dict[str, Any] = {}
    for table in tables:
        words = dict(table.words)
        if table.name == ITEM and "dim" in words:
            keys["model.dim"] = words.pop("dim")
        if words or table.name != ITEM:
            keys[f"tables.{table.name}"] = words
    return keys
