"""Rows from elsewhere that the tables of a run start with: `embedding.start_from`, `tables.NAME.start_from`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from freescale.errors import ConfigError

if TYPE_CHECKING:
    from freescale.bridge import RowFolder
    from freescale.recipe.config import Config
    from freescale.train import Run


def start_digests(config: Config) -> dict[str, str]:
    """What ranks must see alike: digests of the folders that tables start from."""
    folders = {config.embedding.start_from, *(_own(config, name) for name in config.tables.extra)}
    return {
        f"rows to start from, {path}": _open(path).digest()
        for path in sorted(path for path in folders if path is not None)
    }


def start_tables(config: Config, run: Run) -> list[str]:
    """Fill the tables of a run that begins; every rank must call it. Returns what should be known of it."""
    from freescale.bridge import fill_table

    told = []
    for name, id_map in run.state.id_maps.items():
        own = _own(config, name)
        path = own or config.embedding.start_from
        if path is None:
            continue
        folder = _open(path)
        if name not in folder.tables:
            if own is not None:
                raise ConfigError(
                    f"tables.{name}.start_from: the folder has no rows of that table",
                    got=path,
                    allowed=", ".join(folder.tables),
                )
            told.append(f"table {name} has no rows in {path}: it starts with random ones")
            continue
        admit = config.tables.extra.get(name, {}).get("admit_after", config.embedding.admit_after)
        told += fill_table(run.state.embedding, name, id_map, folder.rows(name), admit_after=admit)
    return told


def start_names(config: Config) -> dict[str, Any]:
    """What the folder a run started from says of its tables, by name; nothing where it started from none."""
    path = config.embedding.start_from
    return {} if path is None or not Path(path).exists() else dict(_open(path).tables)


def _own(config: Config, table: str) -> str | None:
    found: str | None = config.tables.extra.get(table, {}).get("start_from")
    return found


def _open(path: str) -> RowFolder:
    from freescale.bridge import RowFolder

    return RowFolder.open(Path(path))
