"""window: a token sees itself and so many tokens before it; cost grows with the length, not with its square."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from freescale.errors import ConfigError
from freescale.kernels.attention.layout import SequenceLayout
from freescale.kernels.attention.mask import AttentionMask
from freescale.registry import option, register


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """How far back a token sees."""

    window: int = option(help="earlier tokens that a token sees, besides itself; at least 1")

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ConfigError("model.window must be at least 1", got=self.window)


@register("mask", "window", options=WindowOptions)
class Window:
    """An `AttentionMask` with a window; the same one for all batches, since it knows nothing of them.

    Args:
        options: its size.
    """

    def __init__(self, options: WindowOptions) -> None:
        self._mask = AttentionMask(window=options.window)

    def for_batch(self, columns: Mapping[str, Tensor], layout: SequenceLayout) -> AttentionMask:
        """The mask."""
        return self._mask
