"""ItemTowers: of every item two vectors, one that its events begin with and one that candidates are judged by.

    rows of item      ──MLP──┐
    rows of artist ┐         +──> first half: begins the token of an event
    rows of album  ┘──MLP────┘
    all of them    ──MLP────────> second half: meets the state of a candidate in the head (`head.towers=product`)

An item has one such vector however often it occurs, so the MLPs see each distinct item of a batch once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from freescale.data import FIRST, NO_ID, SLOT, Feature
from freescale.errors import ConfigError
from freescale.kernels.rows import take
from freescale.model.parts.normed_mlp import normed_mlp


class ItemTowers(nn.Module):
    """Vectors of items, [n, 2 dim].

    Args:
        features: ids of items, the item's own among them.
        widths: of the rows of every table.
        dim: width of a half.
        hidden: width inside the MLPs of tokens.
        judged: width inside the MLP of candidates.
    """

    def __init__(
        self, features: Sequence[Feature], *, widths: Mapping[str, int], dim: int, hidden: int, judged: int
    ) -> None:
        super().__init__()
        odd = [each.name for each in features if each.kind != "id"]
        if odd:
            raise ConfigError(
                "tokens.join=towers: what is known of items must be ids, one value each",
                got=", ".join(odd),
                next_step="leave them out of the section features, or set tokens.join=mlp",
            )
        self._own = next(each for each in features if each.name == "item")
        self._others = [each for each in features if each.name != "item"]
        sizes = {each.name: widths[each.lookup_table] for each in features}
        others = sum(sizes[each.name] for each in self._others)
        self.own = normed_mlp(sizes["item"], hidden, dim)
        self.others = normed_mlp(others, hidden, dim) if self._others else None
        self.judged = normed_mlp(sizes["item"] + others, judged, dim)
        self.none = nn.ParameterDict(
            {f"of_{each.name}": nn.Parameter(torch.zeros(sizes[each.name])) for each in self._others}
        )

    def tables(self) -> set[str]:
        """Whose rows are needed."""
        return {each.lookup_table for each in (self._own, *self._others)}

    def forward(self, values: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> Tensor:
        """[n, 2 dim] of each item: what its events begin with, and what it is judged by.

        Args:
            values: slots of the ids of every feature, [n].
            rows: the unique rows of every table, to which slots point.
        """
        own = _rows(self._own, values, rows, None)
        others = [_rows(each, values, rows, self.none[f"of_{each.name}"]) for each in self._others]
        vectors = self.own(own)
        if self.others is not None:
            vectors = vectors + self.others(torch.cat(others, dim=1))
        return torch.cat([vectors, self.judged(torch.cat([own, *others], dim=1))], dim=1)


def _rows(
    feature: Feature, values: Mapping[str, Tensor], rows: Mapping[str, Tensor], none: Tensor | None
) -> Tensor:
    """[n, width] the row of each value; a learnt vector where there is none."""
    found, slot = rows[feature.lookup_table], values[feature.name + SLOT]
    if none is None:
        return take(found, slot - FIRST)
    return take(torch.cat([none[None].to(found.dtype), found]), slot - NO_ID)
