"""MaskRule: what a mask is, once: a predicate over positions and attributes of tokens; yours can be one, too.

    class EveryThird:
        looks_ahead = False
        per_token: Mapping[str, Tensor] = {}
        per_sequence: Mapping[str, Tensor] = {}

        def sees(self, i, j, *, length, query, key, sequence):
            return (i - j) % 3 == 0

Everything that computes attention asks `visible`, or is tested against it: `AttentionMask` is such a rule, and its
kernels are faster ways to the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freescale.kernels.attention.inputs import AttentionInputError

Attributes = Mapping[str, Tensor]


class MaskRule(Protocol):
    """What tokens of a sequence see of each other; made for one batch, shared by all layers.

    A token that sees nothing gets zeros.
    """

    @property
    def looks_ahead(self) -> bool:
        """Whether tokens may see later ones. Where not, those are hidden whatever `sees` says, and never asked for."""

    @property
    def per_token(self) -> Attributes:
        """[T] attributes of the tokens of the batch, by name; on any device."""

    @property
    def per_sequence(self) -> Attributes:
        """[B] attributes of its sequences, by name."""

    def sees(
        self,
        i: Tensor,
        j: Tensor,
        *,
        length: Tensor,
        query: Attributes,
        key: Attributes,
        sequence: Attributes,
    ) -> Tensor:
        """True where token i of a sequence sees token j of it. All tensors broadcast against each other.

        Asked for a tile at a time, anew in every layer and backward, also for positions beyond a sequence's end (with
        zeros for attributes), whose answer does not matter. It must depend on nothing but its arguments.

        Args:
            i: positions of queries in their sequences, [..., rows, 1].
            j: positions of keys, [..., 1, columns].
            length: of the sequences.
            query: `per_token` of the queries.
            key: `per_token` of the keys.
            sequence: `per_sequence` of the sequences.
        """


def visible(
    rule: MaskRule,
    i: Tensor,
    j: Tensor,
    *,
    length: Tensor,
    query: Attributes,
    key: Attributes,
    sequence: Attributes,
) -> Tensor:
    """What a rule shows, and nothing beyond a sequence's end; later tokens only where it says that it looks ahead."""
    seen = rule.sees(i, j, length=length, query=query, key=key, sequence=sequence)
    if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
        raise AttentionInputError(
            "a mask must say what is seen as a tensor of bool",
            got=f"{seen.dtype if isinstance(seen, Tensor) else type(seen).__name__} from {type(rule).__name__}.sees",
            next_step="return a comparison of i, j and the attributes",
        )
    if not rule.looks_ahead:
        seen = seen & (j <= i)
    return seen & (i < length) & (j < length)


def visible_in_sequence(rule: MaskRule, number: int, start: int, stop: int, device: torch.device) -> Tensor:
    """[length, length] of one sequence of the batch, true where row sees column."""
    index = torch.arange(stop - start, device=device)
    tokens = {name: values[start:stop].to(device) for name, values in rule.per_token.items()}
    return visible(
        rule,
        index[:, None],
        index[None, :],
        length=torch.tensor(stop - start, device=device),
        query={name: values[:, None] for name, values in tokens.items()},
        key={name: values[None, :] for name, values in tokens.items()},
        sequence={name: values[number].to(device) for name, values in rule.per_sequence.items()},
    )


def check_attributes(rule: MaskRule, lengths: npt.NDArray[np.int64]) -> None:
    """Refuse attributes of another batch, and things that are no rules."""
    counted: list[tuple[Any, str, int]] = [
        (getattr(rule, "per_token", None), "token", int(lengths.sum())),
        (getattr(rule, "per_sequence", None), "sequence", len(lengths)),
    ]
    for attributes, each, wanted in counted:
        if not isinstance(attributes, Mapping) or not callable(getattr(rule, "sees", None)):
            raise AttentionInputError(
                "a mask must have sees(), looks_ahead, per_token and per_sequence",
                got=type(rule).__name__,
                allowed="an AttentionMask, or a MaskRule of your own",
            )
        for name, values in attributes.items():
            check_attribute(name, values, each=each)
            if len(values) != wanted:
                raise AttentionInputError(f"{name} has {len(values)} entries, the batch needs {wanted}")


def check_attribute(name: str, values: object, *, each: str) -> None:
    """Refuse what is not one number for each token or sequence."""
    if isinstance(values, Tensor) and values.ndim == 1:
        return
    shape = f" of shape {tuple(values.shape)}" if isinstance(values, Tensor) else ""
    raise AttentionInputError(
        f"{name} must be a tensor with one number for each {each}",
        got=f"{type(values).__name__}{shape}",
        next_step=f"{name}=torch.tensor([...])",
    )
