"""Whether steps are recorded as CUDA graphs (run.capture), and what does it; why not, in words, where they are not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freescale.comm.world import Ranks
    from freescale.embedding import IdMap, ShardedEmbedding
    from freescale.model import Recommender
    from freescale.pipeline import Padder
    from freescale.recipe.config import Config
    from freescale.train import Progress, Recorder


def build_capture(
    config: Config,
    ranks: Ranks,
    progress: Progress,
    *,
    model: Recommender,
    embedding: ShardedEmbedding,
    id_map: IdMap,
) -> tuple[Padder | None, Recorder | None]:
    """What pads batches and what records their steps; neither where steps cannot be recorded, which is told once."""
    from freescale.pipeline import TABLE, Padder
    from freescale.train import Recorder

    def tell(reason: str) -> None:
        progress.notice(0, f"steps computed as usual, not replayed as CUDA graphs: {reason}")

    if config.run.capture == "off" or ranks.device.type != "cuda":
        return None, None
    reason = why_not(config, ranks, model, id_map)
    if reason is not None:
        tell(reason)
        return None, None
    rows = embedding.plans[TABLE].spec.num_rows
    padder = Padder(ranks.device, longest=config.data.max_length, table_rows=rows)
    return padder, Recorder(ranks.device, tell=tell)


def why_not(config: Config, ranks: Ranks, model: Recommender, id_map: IdMap) -> str | None:
    """The first reason why steps of a run cannot be recorded; None: they can."""
    from freescale.model import drawn_by_rank, takes_pads

    reasons = {
        "there are several ranks": ranks.num_ranks > 1,
        "optim.accumulate cuts batches into parts": config.optim.accumulate > 1,
        "model.dtype=float64 is computed without fused kernels": config.model.dtype == "float64",
        "item vectors are computed (items.kind)": config.items.kind != "ids",
        "rows are found on the GPU by a map that learns": id_map.learns,
        f"model.kind={config.model.kind} as it is built here takes no padded batches": not takes_pads(
            model.encoder
        ),
        f"head.kind={config.head.kind} takes no padded batches": not takes_pads(model.head),
        "a module draws from torch's random numbers; freescale.Dropout does not": bool(drawn_by_rank(model)),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
