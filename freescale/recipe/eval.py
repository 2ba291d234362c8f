"""How a model is judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from freescale.errors import ConfigError, nearest
from freescale.recipe.keys import changed, key

if TYPE_CHECKING:
    from freescale.comm.world import Ranks
    from freescale.data import SequenceSource
    from freescale.model import Head, Recommender
    from freescale.recipe.config import Config
    from freescale.train import Evaluation, ItemEncoder


@dataclass(frozen=True, kw_only=True)
class EvalSection:
    """Leave-one-out evaluation by full ranking."""

    metric: str = key(
        "ndcg@10",
        "what decides the best checkpoint: hr@ or ndcg@ 10, 50, 200, mrr; ranking: auc; or one of the head's own",
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


def build_evaluation(
    config: Config, source: SequenceSource, *, model: Recommender, items: ItemEncoder, ranks: Ranks
) -> Evaluation:
    """How the run is judged, and what the most popular items would reach."""
    from freescale.model import retrieves
    from freescale.recipe.data import build_examples
    from freescale.train import Evaluation, Evaluator, popularity_quality

    options, ranked = config.eval, retrieves(model.head)
    valid, test = (build_examples(config, source, split, negatives=False) for split in ("valid", "test"))
    popularity = {}
    if ranked and ranks.is_first:
        popularity = {
            "valid": popularity_quality(valid, max_users=options.max_users),
            "test": popularity_quality(test),
        }
    ranking = f"full ranking, seen filtered, {len(source.items.ids):,} items"
    return Evaluation(
        evaluator=Evaluator(
            model=model, items=items, ranks=ranks, batch=options.batch, item_chunk=options.item_chunk
        ),
        valid=valid,
        test=test,
        metric=metric_of(config, model.head),
        protocol=ranking if ranked else "next event's label",
        popularity=popularity,
        max_users=options.max_users,
        patience=config.run.patience,
    )
