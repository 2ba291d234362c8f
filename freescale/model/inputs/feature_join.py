"""FeatureJoin: the features of some events, items or users as one vector each.

    ids       a row of a table, projected to the model's width where it has another; a learnt vector where there is none
    lists     the mean of their rows
    numbers   a learnt vector times the number, another where it is missing; vectors and bits alike

All of them are added up ("sum"), or put behind each other and sent through one hidden layer ("mlp").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from freescale.data import MISSING, NO_ID, SLOT, Feature
from freescale.kernels.rows import take_sums

How = Literal["sum", "mlp"]
_STD = 0.02
"""Of the vectors that numbers are multiplied with: that of fresh rows."""


class FeatureJoin(nn.Module):
    """Vectors of features.

    Args:
        features: in the order of the schema, at least one.
        widths: of the rows of every table.
        dim: width of the vectors.
        how: how features are put together.
    """

    def __init__(
        self, features: Sequence[Feature], *, widths: Mapping[str, int], dim: int, how: How = "sum"
    ) -> None:
        super().__init__()
        self.dim, self.how = dim, how
        self._ids = [each for each in features if each.is_id]
        self._numbers = [each for each in features if not each.is_id]
        wide = {
            each.name: widths[each.lookup_table] for each in self._ids if widths[each.lookup_table] != dim
        }
        # A name may be that of a method of a dict of modules, so none is used as it is.
        self.projection = nn.ModuleDict(
            {f"of_{name}": _projection(width, dim) for name, width in wide.items()}
        )
        self.none = nn.ParameterDict(
            {f"of_{each.name}": nn.Parameter(torch.zeros(dim)) for each in self._ids if each.name != "item"}
        )
        inputs = sum(map(num_inputs, self._numbers))
        self.numbers = nn.Parameter(torch.empty(inputs, dim).normal_(std=_STD)) if inputs else None
        self.mlp = _mlp(len(self._ids) + bool(inputs), dim) if how == "mlp" else None

    def tables(self) -> set[str]:
        """Whose rows are needed."""
        return {each.lookup_table for each in self._ids}

    def forward(self, values: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> Tensor:
        """[n, dim] one vector for each.

        Args:
            values: of every feature, [n, ...]: slots of ids, and the rest as batches have it.
            rows: the unique rows of every table, to which slots point.
        """
        numbers = self._of_numbers(values)
        if not self._ids:
            assert numbers is not None
            return numbers if self.mlp is None else self.mlp(numbers)
        stacked, places = self._stacked(values, rows)
        if self.mlp is not None:
            parts = [
                take_sums(stacked, place, _shares(each, place, stacked))
                for each, place in zip(self._ids, places)
            ]
            return self.mlp(torch.cat([*parts, *([] if numbers is None else [numbers])], dim=1))
        shares = [_shares(each, place, stacked) for each, place in zip(self._ids, places)]
        weights = None
        if any(share is not None for share in shares):
            one = torch.ones((), dtype=stacked.dtype, device=stacked.device)
            filled = [
                one.expand_as(place) if share is None else share for share, place in zip(shares, places)
            ]
            weights = torch.cat(filled, dim=1)
        joined = take_sums(stacked, torch.cat(places, dim=1), weights)
        return joined if numbers is None else joined + numbers

    def _of_numbers(self, values: Mapping[str, Tensor]) -> Tensor | None:
        """[n, dim] of all features without rows."""
        if self.numbers is None:
            return None
        inputs = [number_inputs(each, values, self.numbers.dtype) for each in self._numbers]
        return torch.cat(inputs, dim=1) @ self.numbers

    def _stacked(
        self, values: Mapping[str, Tensor], rows: Mapping[str, Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """All vectors of all features as one matrix, and of every feature [n, values] where its vectors stand in it."""
        some = next(iter(rows.values()))
        stacked, places, begin = [some.new_zeros(1, self.dim)], [], 1
        for each in self._ids:
            found = rows[each.lookup_table]
            name = f"of_{each.name}"
            if name in self.projection:
                found = self.projection[name](found).to(some.dtype)
            none = self.none[name][None] if name in self.none else some.new_zeros(1, self.dim)
            stacked += [none.to(some.dtype), found]
            slot = values[each.name + SLOT]
            slot = slot if slot.ndim > 1 else slot[:, None]
            # What fills up a list points to the zeros in front.
            places.append(torch.where(slot >= NO_ID, slot + (begin - NO_ID), 0))
            begin += 1 + len(found)
        return torch.cat(stacked), places


def _shares(feature: Feature, place: Tensor, stacked: Tensor) -> Tensor | None:
    """[n, values] what each value of a list counts in its mean; None where there is one value."""
    if feature.kind != "ids":
        return None
    count = (place > 0).sum(1, keepdim=True).clamp(min=1)
    return count.to(stacked.dtype).reciprocal().expand_as(place).contiguous()


def num_inputs(feature: Feature) -> int:
    """Numbers that a feature without rows is: its values, and whether they are missing."""
    if feature.kind == "bits":
        return len(feature.names)
    return 1 + (feature.width or 1 if feature.kind == "vector" else 1)


def number_inputs(feature: Feature, values: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """[n, num_inputs] a feature without rows as numbers."""
    value = values[feature.name]
    if feature.kind == "bits":
        shifts = torch.arange(len(feature.names), device=value.device)
        return ((value[:, None] >> shifts) & 1).to(dtype)
    missing = values[feature.name + MISSING][:, None]
    return torch.cat([(value if value.ndim > 1 else value[:, None]).to(dtype), missing.to(dtype)], dim=1)


def _projection(width: int, dim: int) -> nn.Linear:
    layer = nn.Linear(width, dim, bias=False)
    nn.init.normal_(layer.weight, std=width**-0.5)  # vectors keep their length
    return layer


def _mlp(num_parts: int, dim: int) -> nn.Module:
    return nn.Sequential(nn.Linear(num_parts * dim, dim), nn.SiLU(), nn.Linear(dim, dim))
