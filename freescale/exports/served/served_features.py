"""Features in an export: what is kept of them, and how a request's become what the model looks at.

manifest.json            "features": schema, statistics, names of those the model looks at, tables and kinds of ids
model.safetensors        what turns them into tokens, with the other weights
table-NAME.parquet       rows of each table that features of events and users have
items.parquet            features of items are in the vectors; columns feature.NAME for crosses with them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from freescale.data import (
    NONE,
    BatchFeatures,
    Feature,
    FeatureRequest,
    FeatureSource,
    IntArray,
    RequestFeatures,
    Schema,
    SequenceBatch,
    ServedItems,
    asked_features,
    checked_schema,
    describe_request,
    has_fronts,
    of_candidates_alone,
    served_schema,
    table_kinds,
    table_words,
)
from freescale.embedding import IdMap, ShardedEmbedding
from freescale.exports.served.served_tables import ServedTable, kept_rows, write_table
from freescale.kernels.rows import unique
from freescale.model import ContextTokens, FeatureTokens, target_index
from freescale.pipeline import Domain, FeatureIds, IdColumn

NOTHING: Mapping[str, Any] = MappingProxyType({})
ITEM_COLUMN = "feature."
"""What the names of features of items begin with in items.parquet."""


@dataclass(frozen=True, kw_only=True)
class ExportFeatures:
    """What an export keeps of the features of a run.

    Args:
        features: of the run.
        tokens: names of features of events and users, in the order the model was made with.
        widths: of the rows of every table.
        join: how joined features are put together.
        hidden: join="towers": width inside the MLPs of tokens.
        embedding: the tables, all held by this process.
        id_maps: of every table.
        map_kinds: what makes them again: the "kind" of each, and its "options".
    """

    features: BatchFeatures
    tokens: Sequence[str]
    widths: Mapping[str, int]
    join: str
    embedding: ShardedEmbedding
    id_maps: Mapping[str, IdMap]
    map_kinds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    hidden: int = 0

    def write(self, folder: Path) -> tuple[dict[str, Any], list[Path]]:
        """Write the tables; gives what the manifest says, and the files."""
        schema, source = self.features.schema, self.features.source
        served = served_schema(schema, self.tokens)
        used = [served[name].table_name for name in self.tokens]
        tables, files = {}, []
        for name in dict.fromkeys(name for name in used if name is not None):
            kept = kept_rows(name, self.id_maps[name], kind=self.map_kinds.get(name))
            files.append(folder / table_file(name))
            words = None if kept.ids is None else self._words(name, kept.ids.numpy())
            write_table(files[-1], self.embedding.tables[name], kept, words)
            tables[name] = {**kept.facts, "width": self.widths[name]}
        kinds = {name: kind for name, kind in table_kinds(source).items() if kind != "int64"}
        facts = {
            "schema": schema.words(),
            "statistics": {name: dict(each) for name, each in self.features.statistics.items()},
            "tokens": list(self.tokens),
            "join": self.join,
            **({"hidden": self.hidden} if self.join == "towers" else {}),
            "tables": tables,
            "table_ids": kinds,
        }
        return facts, files

    def item_columns(self) -> dict[str, npt.NDArray[Any]]:
        """Columns of items.parquet for crosses that have features of items in them, for all items of the data."""
        source = self.features.source
        names = [each.name for each in served_schema(self.features.schema, self.tokens).stored("item")]
        if not names or not isinstance(source, FeatureSource):
            return {}
        columns = source.item_features().take(np.arange(len(source.items.ids)), names)
        return {ITEM_COLUMN + name: values for name, values in columns.items()}

    def asked(self) -> tuple[Feature, ...]:
        """What requests will have to say."""
        return asked_features(self.features.schema, self.tokens)

    def _words(self, table: str, ids: IntArray) -> Any:
        closed = next((each.values for each in self._of(table) if each.values), None)
        if closed is not None:
            return pa.array(closed)
        return table_words(self.features.source, table, ids)

    def _of(self, table: str) -> list[Feature]:
        return [each for each in self.features.schema if each.table_name == table]


@dataclass(frozen=True)
class ServedFeatures:
    """Turns the features of requests into what a model looks at.

    Args:
        reader: reads them.
        ids: those that have rows.
        columns: the same, by name.
        tables: where the rows are.
        fronts: crosses of a candidate stand in front of its history: each candidate has a sequence of its own.
    """

    reader: RequestFeatures
    ids: FeatureIds
    columns: Sequence[IdColumn]
    tables: Mapping[str, ServedTable]
    fronts: bool = False

    @classmethod
    def read(cls, folder: Path, facts: Mapping[str, Any], items: Any, dtype: torch.dtype) -> ServedFeatures:
        """What `ExportFeatures` has written; `items` is the table of items.parquet."""
        tables = {
            name: ServedTable.read(folder / table_file(name), each, dtype)
            for name, each in facts["tables"].items()
        }
        known = {
            name.removeprefix(ITEM_COLUMN): items.column(name).to_numpy()
            for name in items.column_names
            if name.startswith(ITEM_COLUMN)
        }
        return cls.made(facts, items.column("item").to_numpy(), tables, known)

    @classmethod
    def made(
        cls,
        facts: Mapping[str, Any],
        items: IntArray,
        tables: Mapping[str, ServedTable],
        known: Mapping[str, Any] = NOTHING,
    ) -> ServedFeatures:
        """From what the manifest says of features, ids of items, the tables, and features of items in crosses."""
        schema, names = _schema(facts), facts["tokens"]
        catalogue = ServedItems(
            items,
            schema=served_schema(schema, names),
            statistics=facts["statistics"],
            columns=known,
        )
        columns = [_column(schema[name]) for name in names if schema[name].is_id]
        reader = RequestFeatures(catalogue, names, facts["table_ids"])
        return cls(reader, FeatureIds(columns, tables), columns, tables, has_fronts(schema, names))

    def look_up(
        self, batch: SequenceBatch, requests: Sequence[FeatureRequest], items: IntArray, device: torch.device
    ) -> tuple[SequenceBatch, dict[str, Tensor]]:
        """The batch with the features of its requests, and the rows they point to.

        Where `fronts`, there is a sequence for every candidate, in their order, and it is its only one.

        Args:
            batch: the events that are kept, with "item_index" and times.
            requests: one a user of the batch.
            items: ids of the items of the events.
            device: where the model is.
        """
        shown = target_index(batch).numpy() if self.fronts else None
        found = self.reader.read(requests, items, shown)
        batch = batch.with_tokens(**_tensors(found.tokens)).with_samples(**_tensors(found.samples))
        if self.fronts:
            batch = batch.one_target_each().with_samples(**_tensors(found.fronts))
        batch = batch.with_samples(row=torch.arange(len(batch)))
        batch = self._known(batch)
        rows, inverse = {}, {}
        for name, asked in self.ids.rows(batch).items():
            wanted, inverse[name] = unique(asked)
            rows[name] = self.tables[name].vectors[wanted].to(device)
        return self.ids.with_slots(batch, inverse, device=device), rows

    def _known(self, batch: SequenceBatch) -> SequenceBatch:
        """Ids that no table has a row for are none."""
        changed: dict[Domain, dict[str, Tensor]] = {"tokens": {}, "samples": {}}
        for column in self.columns:
            ids = getattr(batch, column.domain)[column.name]
            known = self.tables[column.table].knows(ids)
            changed[column.domain][column.name] = torch.where(known, ids, NONE)
        return batch.with_tokens(**changed["tokens"]).with_samples(**changed["samples"])


def make_tokens(manifest: Mapping[str, Any]) -> FeatureTokens | ContextTokens | None:
    """What puts features into sequences, its weights not filled in yet; None where a model looks at none."""
    facts = manifest.get("features")
    if facts is None:
        return None
    schema = _schema(facts)
    widths = {name: each["width"] for name, each in facts["tables"].items()}
    features = [schema[name] for name in facts["tokens"]]
    shape = {"widths": widths, "dim": manifest["encoder"]["dim"]}
    if facts["join"] == "towers":
        return ContextTokens(features, **shape, hidden=facts["hidden"])
    return FeatureTokens(features, **shape, how=facts["join"])


def request_needs(manifest: Mapping[str, Any]) -> list[str]:
    """What a request to an exported model must say of features, a line each."""
    facts = manifest.get("features")
    if facts is None:
        return []
    schema, names = _schema(facts), facts["tokens"]
    alone = of_candidates_alone(schema, names)
    return [
        describe_request(each, of_candidates=each.name in alone) for each in asked_features(schema, names)
    ]


def _schema(facts: Mapping[str, Any]) -> Schema:
    return checked_schema(facts["schema"], where="the export")


def table_file(name: str) -> str:
    """Where an export keeps the rows of a table."""
    return f"table-{name}.parquet"


def _column(feature: Feature) -> IdColumn:
    domain: Domain = "samples" if feature.of == "user" or feature.place == "front" else "tokens"
    return IdColumn(feature.name, domain, feature.lookup_table, several=feature.kind == "ids")


def _tensors(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
    return {
        name: torch.from_numpy(np.require(values, requirements=["C", "W"])) for name, values in arrays.items()
    }
