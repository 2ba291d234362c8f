"""RowRoom: where recorded steps find the rows of their batches, and leave the gradients of these."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from freescale.embedding import as_compute

Rows = Mapping[str, Tensor]
"""Unique rows, or their gradients, by table."""


class RowRoom:
    """Where the rows of batches and their gradients lie, for all batches with room for as many.

    Args:
        places: by table, how many rows.
        like: by table, what rows look like.
        clean: keep zeros behind the rows of a batch. Pads read the last row and nothing the others, so what stands
            there does not matter; but where rows are multiplied, all of them are.
    """

    def __init__(self, places: Mapping[str, int], like: Rows, *, clean: bool) -> None:
        self._plain = {name: like[name].new_zeros(num, like[name].shape[1]) for name, num in places.items()}
        self.rows = {name: each.detach().requires_grad_() for name, each in self._plain.items()}
        self.grad = {name: torch.zeros_like(each) for name, each in self._plain.items()}
        self._clean, self._filled = clean, dict.fromkeys(places, 0)
        if clean:
            some = next(iter(self._plain.values()))
            self._zero = some.new_zeros(())
            self._number = torch.arange(max(places.values()), device=some.device)[:, None]

    @torch.no_grad()
    def fill(self, rows: Rows) -> None:
        """Copy the rows of a batch to where they are read."""
        places = [self._plain[name][: len(each)] for name, each in rows.items()]
        torch._foreach_copy_(places, [each.detach() for each in rows.values()])
        for name, each in rows.items():
            if self._clean and len(each) < self._filled[name]:
                self._plain[name][len(each) : self._filled[name]].zero_()
            self._filled[name] = len(each)

    @torch.no_grad()
    def read(self, name: str, rows: Tensor, count: Tensor) -> None:
        """The same of a table's rows, of which the device knows how many are real."""
        if self._clean:
            real = self._number[: len(rows)] < count
            torch.where(real, as_compute(rows), self._zero, out=self._plain[name])
        else:
            self._plain[name].copy_(rows)
