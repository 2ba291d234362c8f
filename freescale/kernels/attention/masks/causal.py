"""causal: a token sees itself and everything before it, which every way to compute does by itself."""

from __future__ import annotations

from freescale.registry import register


@register("mask", "causal")
def causal(options: None) -> None:
    """No kind at all: where there is none, attention is causal."""
    del options
