"""How a model is judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from freescale.recipe.keys import key

if TYPE_CHECKING:
    from freescale.comm.world import Ranks
    from freescale.model import Recommender
    from freescale.recipe.config import Config
    from freescale.train import Evaluator, ItemEncoder


@dataclass(frozen=True, kw_only=True)
class EvalSection:
    """Leave-one-out evaluation by full ranking."""

    metric: Literal["hr@10", "hr@50", "hr@200", "ndcg@10", "ndcg@50", "ndcg@200", "mrr", "auc"] = key(
        "ndcg@10", "what decides the best checkpoint and early stopping"
    )
    batch: int = key(256, "histories evaluated at once on a rank", at_least=1, free=True)
    max_users: int | None = key(
        None, "evaluate during training on the first N users only", at_least=1, free=True
    )
    item_chunk: int = key(
        65_536, "items scored at once; bounds memory for large catalogues", at_least=1, free=True
    )


def problems(config: Config) -> list[str]:
    """A metric that the head does not give."""
    if config.head.kind == "retrieval" and config.eval.metric == "auc":
        return ["eval.metric: auc belongs to head.kind=ranking"]
    if config.head.kind == "ranking" and config.eval.metric != "auc":
        return [f"eval.metric: head.kind=ranking is judged by auc, got {config.eval.metric}"]
    return []


def build_evaluator(config: Config, *, model: Recommender, items: ItemEncoder, ranks: Ranks) -> Evaluator:
    """What ranks items for users."""
    from freescale.train import Evaluator

    return Evaluator(
        model=model, items=items, ranks=ranks, batch=config.eval.batch, item_chunk=config.eval.item_chunk
    )
