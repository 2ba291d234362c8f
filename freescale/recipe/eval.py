"""How a model is judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from freescale.errors import ConfigError, nearest
from freescale.recipe.keys import changed, key

if TYPE_CHECKING:
    from freescale.comm.world import Ranks
    from freescale.model import Head, Recommender
    from freescale.recipe.config import Config
    from freescale.train import Evaluator, ItemEncoder


@dataclass(frozen=True, kw_only=True)
class EvalSection:
    """Leave-one-out evaluation by full ranking."""

    metric: str = key(
        "ndcg@10",
        "what decides the best checkpoint and early stopping: hr@, ndcg@ 10, 50, 200, mrr; ranking: auc; or the head's own",
    )
    batch: int = key(256, "histories evaluated at once on a rank", at_least=1, free=True)
    max_users: int | None = key(
        None, "evaluate during training on the first N users only", at_least=1, free=True
    )
    item_chunk: int = key(
        65_536, "items scored at once; bounds memory for large catalogues", at_least=1, free=True
    )


_METRICS = {
    "retrieval": ("hr@10", "hr@50", "hr@200", "ndcg@10", "ndcg@50", "ndcg@200", "mrr"),
    "ranking": ("auc",),
}


def problems(config: Config) -> list[str]:
    """A metric that the head does not give; heads from outside are asked when they are built."""
    kind, metric = config.head.kind, config.eval.metric
    if metric in _METRICS.get(kind, (metric,)):
        return []
    if kind == "retrieval" and metric == "auc":
        return ["eval.metric: auc belongs to head.kind=ranking"]
    if kind == "ranking":
        return [f"eval.metric: head.kind=ranking is judged by auc, got {metric}"]
    close = nearest(metric, _METRICS[kind])
    hint = f" (did you mean {close}?)" if close else ""
    return [f"eval.metric: allowed: {', '.join(_METRICS[kind])}; got {metric!r}{hint}"]


def metric_of(config: Config, head: Head) -> str:
    """The metric that decides; that of a recipe which names none is the head's first.

    Raises:
        ConfigError: the head does not give the one that was named.
    """
    wanted = config.eval.metric
    if wanted in head.metric_names:
        return wanted
    if not changed(config.eval, "metric"):
        return head.metric_names[0]
    raise ConfigError(
        f"eval.metric: head.kind={config.head.kind} does not give it",
        got=wanted,
        allowed=", ".join(head.metric_names),
    )


def build_evaluator(config: Config, *, model: Recommender, items: ItemEncoder, ranks: Ranks) -> Evaluator:
    """What ranks items for users."""
    from freescale.train import Evaluator

    return Evaluator(
        model=model, items=items, ranks=ranks, batch=config.eval.batch, item_chunk=config.eval.item_chunk
    )
