"""Tables from TorchRec checkpoints for runs to start from, and tables of runs as TorchRec checkpoints."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from freescale.app.run.opened_run import open_run
from freescale.bridge import (
    RowsById,
    SavedTable,
    as_saved,
    choose_tables,
    names_of_table,
    read_rows,
    rows_by_id,
    save_tensors,
    write_row_folder,
)
from freescale.errors import ConfigError
from freescale.recipe import Config, start_names

_HOUR_S = 3600


def import_torchrec(
    checkpoint: Path, out: Path, *, tables: Mapping[str, str] | None = None, state: bool = True
) -> list[str]:
    """Write the tables of a TorchRec checkpoint as a folder of rows; neither TorchRec nor fbgemm is needed.

    Args:
        checkpoint: folder that torch.distributed.checkpoint wrote, on any number of ranks.
        out: new folder.
        tables: our name of a table -> name of its weight there; all there are unless given.
        state: also the sums of row-wise Adagrad.

    Returns:
        A line for each table.
    """
    found = choose_tables(checkpoint, tables or {})
    if not state:
        found = {name: dataclasses.replace(table, momentum=None) for name, table in found.items()}
    rows = {name: read_rows(checkpoint, table) for name, table in found.items()}
    details = {
        name: {
            "names": dataclasses.asdict(found[name]),
            "num_rows": rows[name].num_rows,
            "num_buckets": rows[name].num_buckets,
        }
        for name in found
    }
    origin = {"torchrec": str(checkpoint.resolve())}
    write_row_folder(out, rows, origin=origin, details=details)
    return [_line(found[name], rows[name]) for name in found]


def _line(table: SavedTable, rows: RowsById) -> str:
    owned = (
        "a row is the id" if table.identities is None else "rows have owners: embedding.id_map=zero_collision"
    )
    state = "without optimizer state" if rows.square_sum is None else "with the sums of row-wise Adagrad"
    return f"{table.name}: {len(rows.ids):,} of {rows.num_rows:,} rows, width {rows.weight.shape[1]}, {state}; {owned}"


def export_torchrec(
    run_dir: Path,
    out: Path,
    *,
    names: Mapping[str, str] | None = None,
    collision: Mapping[str, str] | None = None,
    rows: Mapping[str, str] | None = None,
    buckets: int | None = None,
) -> list[str]:
    """Write tables of the best checkpoint of a run under TorchRec's names, for any number of its ranks to load.

    Args:
        run_dir: of the run.
        out: new folder.
        names: table -> name of its weight in the model; those it was imported with unless given.
        collision: table -> name of its ManagedCollisionCollection in the model, where rows have owners there.
        rows: table -> rows of their table; as imported, or as many as ours has.
        buckets: parts of a zero-collision table there, a multiple of the ranks; as imported, or 1.

    Returns:
        A line for each table.
    """
    config, run, _ = open_run(run_dir, device="cpu")
    known = start_names(config)
    wanted = _wanted(names or {}, collision or {}, known, list(run.state.id_maps))
    tensors: dict[str, torch.Tensor] = {}
    lines = []
    for name, saved in wanted.items():
        id_map = run.state.id_maps[name]
        own = rows_by_id(run.state.embedding, name, id_map)
        there = known.get(name, {})
        parts = buckets or there.get("num_buckets") or 1
        count = int((rows or {}).get(name) or there.get("num_rows") or _whole(id_map.num_rows, parts))
        own = dataclasses.replace(own, seen=_now(own))
        tensors |= as_saved(saved, own, num_rows=count, num_buckets=parts, max_probe=_max_probe(config, name))
        lines.append(_line(saved, dataclasses.replace(own, num_rows=count)))
    save_tensors(out, tensors)
    return lines


def _wanted(
    names: Mapping[str, str], collision: Mapping[str, str], known: Mapping[str, Any], tables: Sequence[str]
) -> dict[str, SavedTable]:
    """Where each table is to stand."""
    strange = [name for name in {**names, **collision} if name not in tables]
    if strange:
        raise ConfigError("the run has no such table", got=", ".join(strange), allowed=", ".join(tables))
    found = {
        name: SavedTable(**facts["names"])
        for name, facts in known.items()
        if name in tables and "names" in facts
    }
    found |= {
        name: names_of_table(name, weight, collision=collision.get(name)) for name, weight in names.items()
    }
    if not found:
        raise ConfigError(
            "it must be told what the tables are called in the model that will load them",
            got=f"tables: {', '.join(tables)}",
            next_step=f"--name {tables[0] if tables else 'item'}=ec.embeddings.item.weight",
        )
    return found


def _now(rows: RowsById) -> torch.Tensor:
    """Steps say nothing to a table that counts hours: every id was seen just now."""
    return torch.full_like(rows.ids, int(time.time()) // _HOUR_S)


def _whole(num_rows: int, parts: int) -> int:
    return -(-num_rows // parts) * parts


def _max_probe(config: Config, table: str) -> int:
    found: int = config.tables.extra.get(table, {}).get("max_probe", config.embedding.max_probe)
    return found
