"""An id map from outside the package: a formula."""

from __future__ import annotations

from dataclasses import dataclass

from freescale import register
from freescale.embedding import TableRows


@dataclass(frozen=True, kw_only=True)
class ModuloOptions:
    """Keys of a recipe."""

    rows: int | None = None
    stride: int = 3


@register("id_map", "modulo", options=ModuloOptions)
class Modulo:
    """Every id to a row by a formula of two lines."""

    learns = False

    def __init__(self, num_rows, stride):
        self.num_rows, self._stride = num_rows, stride

    @staticmethod
    def plan(*, num_items, largest_id, options):
        return TableRows(options.rows or num_items + 1)

    @staticmethod
    def build(*, embedding, table, channel, options):
        return Modulo(embedding.plan_of(table).spec.num_rows, options.stride)

    def rows(self, ids, *, step=None):
        return ids * self._stride % self.num_rows

    def state_dict(self):
        return {}

    def restored(self):
        pass
