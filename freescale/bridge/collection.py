"""BridgedCollection: shaped like TorchRec's EmbeddingCollection, over our tables and our pipeline.

    tables = BridgedCollection(configs, optimizer=RowwiseAdagrad(), group=dist.group.WORLD)
    model = TheirModel(tables)                                        # unchanged; it calls tables(kjt)
    with tables.pipeline(batches, kjt_of=lambda batch: batch.kjt) as pipe:
        for ready in pipe:
            model(ready.batch).backward(); optimizer.step(); pipe.update(ready, lr=0.05)

Features of a table are joined, each id travels once a step, and rows that two batches share go first. Inside the
pipeline the collection is given rows that have come already, and only cuts them apart. A row is the id, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from freescale.bridge.dcp_files import load_tensors, save_tensors, tensors_in
from freescale.bridge.jagged import Jagged, JaggedFeature, Keyed
from freescale.bridge.saved_tables import SavedTable, choose_tables
from freescale.bridge.written_tables import names_of_table
from freescale.comm.world import whole_tensor
from freescale.embedding import ShardedEmbedding, SparseOptimizer, TableSpec
from freescale.errors import CheckpointError, DataError
from freescale.pipeline import PrioritizedPipeline, ReadyRows

B = TypeVar("B")


class TableConfig(Protocol):
    """What is read of an EmbeddingConfig."""

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: Sequence[str]


class BridgedCollection(nn.Module):
    """Looks features up in our tables and returns what an EmbeddingCollection returns.

    Args:
        configs: TorchRec's EmbeddingConfigs, or anything with the same four names.
        optimizer: of the rows, e.g. RowwiseAdagrad().
        group: the ranks; "world": all of torch.distributed, where that is set up. None: this process alone.
        device: where the rows live.
        divide: row gradients are divided by the number of ranks, as TorchRec does on their way home.
        jagged: makes a feature of (values, lengths); torchrec's JaggedTensor, or our stand-in unless given.
        seed: of the first rows.
    """

    def __init__(
        self,
        configs: Sequence[TableConfig],
        *,
        optimizer: SparseOptimizer,
        group: dist.ProcessGroup | Literal["world"] | None = "world",
        device: torch.device | str = "cpu",
        divide: bool = True,
        jagged: Callable[[Tensor, Tensor], Any] = JaggedFeature,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._features = {config.name: list(config.feature_names) for config in configs}
        named = [feature for features in self._features.values() for feature in features]
        self._twice = {feature for feature in named if named.count(feature) > 1}
        self._jagged = jagged
        self.embedding = ShardedEmbedding(
            [
                TableSpec(
                    name=config.name,
                    num_rows=config.num_embeddings,
                    dim=config.embedding_dim,
                    optimizer=optimizer,
                    seed=seed,
                )
                for config in configs
            ],
            group=group,
            device=device,
        )
        self._share = 1 / self.embedding.num_ranks if divide else 1.0
        self._here: Mapping[str, Tensor] | None = None

    def forward(self, features: Keyed) -> dict[str, Any]:
        """Vectors of every feature, by its name; of a feature in two tables by `feature@table`."""
        vectors = self._here
        if vectors is None:
            vectors = self.embedding(self.rows_of(features))
        found = {}
        for table, names in self._features.items():
            joined = vectors[table]
            if joined.requires_grad and self._share != 1:
                joined.register_hook(self._divided)
            parts: list[Jagged] = [features[name] for name in names]
            cut = joined.split([len(part.values()) for part in parts])
            for name, part, mine in zip(names, parts, cut, strict=True):
                shown = f"{name}@{table}" if name in self._twice else name
                found[shown] = self._jagged(mine, part.lengths())
        return found

    def _divided(self, grad: Tensor) -> Tensor:
        return grad * self._share

    def rows_of(self, features: Keyed) -> dict[str, Tensor]:
        """The rows a batch needs, by table: its features one after the other."""
        missing = {name for names in self._features.values() for name in names} - set(features.keys())
        if missing:
            raise DataError(
                "a batch lacks features of the tables", got=", ".join(features.keys()), allowed=missing
            )
        return {
            table: torch.cat([features[name].values().long() for name in names])
            for table, names in self._features.items()
        }

    def step(self, *, lr: float) -> None:
        """Outside of a pipeline: send gradients home and update; every rank must call it."""
        self.embedding.step(lr=lr)

    def pipeline(
        self, batches: Iterable[B], *, kjt_of: Callable[[B], Keyed], **options: Any
    ) -> BridgedPipeline[B]:
        """Batches whose rows are here when the model asks for them; options as of `PrioritizedPipeline`."""
        return BridgedPipeline(self, batches, kjt_of=kjt_of, **options)

    def load_tables(self, tables: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Fill tables from whole tensors: "weight" [rows, dim] and, of row-wise Adagrad, "momentum1" [rows]."""
        for name, parts in tables.items():
            table = self.embedding.tables[name]
            mine = slice(table.first_row, table.first_row + len(table.weight))
            with torch.no_grad():
                table.weight.copy_(parts["weight"][mine])
                if "momentum1" in parts:
                    if "square_sum" not in table.state:
                        raise DataError(
                            f"table {name!r} keeps no sums of row-wise Adagrad",
                            got="momentum1",
                            next_step="BridgedCollection(optimizer=RowwiseAdagrad()), or leave momentum1 out",
                        )
                    table.state["square_sum"].copy_(parts["momentum1"][mine, None])

    def load_checkpoint(
        self, folder: str | Path, *, names: Mapping[str, str] | None = None, state: bool = True
    ) -> None:
        """Fill the tables from a checkpoint that TorchRec wrote, on any number of ranks; every rank must call it.

        Args:
            folder: that torch.distributed.checkpoint wrote.
            names: table -> name of its weight there; found by the names of the tables unless given.
            state: also the optimizer's sums.
        """
        found = choose_tables(Path(folder), names or {})
        missing = [name for name in self._features if name not in found]
        if missing:
            raise CheckpointError(
                f"the checkpoint has no table {missing[0]!r}", got=", ".join(found), next_step="names={...}"
            )
        wanted = {name: found[name] for name in self._features}
        for name, table in wanted.items():
            self._check_fits(name, table, tensors_in(Path(folder)), state=state)
        load_tensors(Path(folder), self._as_theirs(wanted, state=state), group=self.embedding.group)

    def save_checkpoint(self, folder: str | Path, *, names: Mapping[str, str]) -> None:
        """Write the tables for TorchRec to load; every rank must call it.

        Args:
            folder: new, on a file system that all ranks share.
            names: table -> name of its weight in the model, e.g. ec.embeddings.item.weight.
        """
        wanted = {name: names_of_table(name, weight) for name, weight in names.items()}
        save_tensors(Path(folder), self._as_theirs(wanted, state=True), group=self.embedding.group)

    def _check_fits(self, name: str, table: SavedTable, tensors: Mapping[str, Any], *, state: bool) -> None:
        spec = self.embedding.plans[name].spec
        there = tuple(tensors[table.weight].size)
        if there != (spec.num_rows, spec.dim):
            raise CheckpointError(
                f"{table.weight} has another shape", got=there, allowed=(spec.num_rows, spec.dim)
            )
        if table.identities is not None:
            raise CheckpointError(
                f"rows of {table.weight} have owners, and a row is the id here",
                got=table.identities,
                next_step="freescale import torchrec ..., and train with embedding.id_map=zero_collision",
            )
        if state and self.embedding.tables[name].state and table.momentum is None:
            raise CheckpointError(
                f"the checkpoint has no sums of row-wise Adagrad for {table.weight}",
                next_step="load_checkpoint(..., state=False) starts them at zero",
            )

    def _as_theirs(self, tables: Mapping[str, SavedTable], *, state: bool) -> dict[str, Tensor]:
        """The tables where they lie, by the names TorchRec has for them."""
        own = self.embedding.state_dict()
        found = {}
        for name, table in tables.items():
            found[table.weight] = own[f"{name}.weight"]
            sums = own.get(f"{name}.square_sum")
            if state and sums is not None and table.momentum is not None:
                found[table.momentum] = _flat(sums)
        return found

    def whole_tables(self) -> dict[str, dict[str, Tensor]]:
        """The same back, on every rank; every rank must call it."""
        found: dict[str, dict[str, Tensor]] = {}
        for path, values in self.embedding.state_dict().items():
            name, _, part = path.rpartition(".")
            whole = whole_tensor(values)
            theirs = whole[:, 0] if part == "square_sum" else whole
            found.setdefault(name, {})["momentum1" if part == "square_sum" else part] = theirs.clone()
        return found


def _flat(sums: Tensor) -> Tensor:
    """[rows, 1] as [rows], in the same memory."""
    if not isinstance(sums, DTensor):
        return sums[:, 0]
    local, shape = sums.to_local()[:, 0], sums.shape[:1]
    return DTensor.from_local(
        local, sums.device_mesh, sums.placements, run_check=False, shape=shape, stride=(1,)
    )


class BridgedPipeline(Generic[B]):
    """A `PrioritizedPipeline` that hands the rows of a batch to its collection.

    Args:
        collection: whose tables.
        batches: this rank's, in step order; every rank has equally many.
        kjt_of: a batch's features.
        options: of `PrioritizedPipeline`.
    """

    def __init__(
        self,
        collection: BridgedCollection,
        batches: Iterable[B],
        *,
        kjt_of: Callable[[B], Keyed],
        **options: Any,
    ) -> None:
        self._collection = collection
        self.inner: PrioritizedPipeline[B] = PrioritizedPipeline(
            batches,
            embedding=collection.embedding,
            rows_of=lambda batch: collection.rows_of(kjt_of(batch)),
            **options,
        )

    def __enter__(self) -> Self:
        self.inner.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._collection._here = None
        self.inner.__exit__(kind, error, where)

    def __iter__(self) -> Iterator[ReadyRows[B]]:
        for ready in self.inner:
            self._collection._here = ready.vectors
            yield ready

    def update(self, ready: ReadyRows[B], *, lr: float) -> None:
        """Gradients the next batch needs go home now, the others under it."""
        self._collection._here = None
        self.inner.update(ready, lr=lr)
