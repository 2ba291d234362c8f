"""Lookup: the unique rows of one batch as a leaf of the model's graph, and how their gradients go home."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from freescale.comm.traffic import OwnedKeys, Relay, Route
from freescale.embedding.tables.table import as_compute
from freescale.errors import TrainingError
from freescale.kernels.rows import RowPlan, take


@dataclass(frozen=True)
class UniqueRows:
    """The unique rows of one batch, of which nothing has been read yet.

    Args:
        unique: [U] row numbers, ascending.
        inverse: where each id asked for stands among them; same shape as the ids.
    """

    unique: Tensor
    inverse: Tensor

    def to(self, device: torch.device) -> UniqueRows:
        """The same on a device; the copies only queue."""
        unique, inverse = (x.to(device, non_blocking=True) for x in (self.unique, self.inverse))
        return UniqueRows(unique, inverse)


@dataclass
class Lookup:
    """The unique rows of one batch, ready for a forward pass.

    Args:
        table: name of the table.
        rows: [U, dim] leaf with requires_grad; its `.grad` after backward is what goes home.
        inverse: where each id asked for stands in `rows`; same shape as the ids.
        unique: [U] row numbers, ascending.
        route: how they came, and how their gradients go home; None where every rank holds the table.
        owned: the local rows that all ranks asked from this one, which it will update.
        relay: what the ranks of this node ask this one to fetch; None where every rank asks the owners itself.
    """

    table: str
    rows: Tensor
    inverse: Tensor
    unique: Tensor
    route: Route | None = None
    owned: OwnedKeys | RowPlan | None = None
    relay: Relay | None = None

    def vectors(self) -> Tensor:
        """[..., dim] the vector of each id asked for; gradients of equal ids add up in a fixed order."""
        return take(self.rows, self.inverse)

    def gradient(self) -> Tensor:
        """[U, dim] what goes home after the backward; zeros where nothing depended on the rows."""
        return self.rows.grad if self.rows.grad is not None else torch.zeros_like(self.rows)

    def close(self) -> None:
        """The update was made: a gradient that still comes would be lost, and is an error."""
        self.rows.register_post_accumulate_grad_hook(partial(refuse_gradient, self.table))


def refuse_gradient(table: str, rows: Tensor | None = None) -> NoReturn:
    """What a backward is told whose update has been made without it."""
    raise TrainingError(
        f"a gradient of table {table!r} comes after the `step` that was to use it",
        next_step="call backward before `step`; after it, look the rows up again",
    )


def as_leaf(rows: Tensor) -> Tensor:
    """Rows as the leaf of a graph."""
    return as_compute(rows).detach().requires_grad_()
