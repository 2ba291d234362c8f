"""Whether attention of a run is computed in plain PyTorch on a GPU, because its heads are too wide for the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freescale.model import Recommender
    from freescale.recipe.config import Config


def plain_attention(config: Config, model: Recommender, *, kind: str) -> str | None:
    """Why attention runs without the fused kernels on a device of this kind, and what to change; None: it does not."""
    from freescale.kernels.attention import MAX_WIDTH
    from freescale.model import is_ours

    dim, heads = config.model.dim, config.model.heads
    width = dim // heads
    if kind != "cuda" or width <= MAX_WIDTH or not is_ours(model.encoder):
        return None
    enough = next(count for count in range(heads, dim + 1) if dim % count == 0 and dim // count <= MAX_WIDTH)
    return (
        f"attention is computed in plain PyTorch, which takes several times as long: model.heads={heads} makes heads "
        f"{width} wide, and the kernels take at most {MAX_WIDTH}; model.heads={enough} would do"
    )
