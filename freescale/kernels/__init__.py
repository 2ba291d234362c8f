"""Attention over jagged sequences. `reference` is the plain truth; `hstu_attention` is what models call."""

from freescale.kernels.attention import hstu_attention, softmax_attention
from freescale.kernels.tile_layout import TileLayout

__all__ = ["TileLayout", "hstu_attention", "softmax_attention"]
