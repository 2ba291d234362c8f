"""MaskKind: a mask that a recipe can name (`model.mask`); a kind makes the mask of every batch.

A kind that ships is a file in `masks/`; yours is registered by a plugin:

    @dataclass(frozen=True, kw_only=True)
    class Options:
        every: int = 3                                            # keys of the recipe's section `model`

    @register("mask", "dilated", options=Options)
    class Dilated:
        def __init__(self, options: Options) -> None: ...
        def for_batch(self, columns, layout): return DilatedMask(...)     # a MaskRule
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

from torch import Tensor

from freescale import registry
from freescale.kernels.attention.layout import SequenceLayout
from freescale.kernels.attention.mask_rule import MaskRule


class MaskKind(Protocol):
    """Makes masks; made once a run."""

    def for_batch(self, columns: Mapping[str, Tensor], layout: SequenceLayout) -> MaskRule | None:
        """The mask of a batch; None for plain causal attention.

        Args:
            columns: [T] or [T, ...] features of the batch's tokens ("time", "action", ...), on its device.
            layout: where its sequences stand.
        """


def make_mask_kind(
    name: str, options: Mapping[str, Any] | None = None, *, key: str = "model.mask"
) -> MaskKind | None:
    """The kind a recipe or an export names, with these options; None for "causal", which needs no mask.

    Raises:
        ConfigError: there is none, or it has no such options.
    """
    kind = registry.find("mask", name, key=key)
    return cast(MaskKind | None, kind.make(registry.options_of(kind, options)))
