"""How a model is judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from freescale.errors import ConfigError, nearest
from freescale.recipe.reading.keys import changed, key

if TYPE_CHECKING:
    from freescale.comm.world import Ranks
    from freescale.data import Examples, SequenceSource, Split
    from freescale.model import Head, Recommender
    from freescale.recipe.config import Config
    from freescale.train import EvalProtocol, Evaluation, ItemEncoder

REPEATS_MATTER = 0.05
"""From this share of repeated training targets on, `eval.filter_seen=auto` recommends seen items again."""


@dataclass(frozen=True, kw_only=True)
class EvalSection:
    """How a model is judged: each user's target ranked among all items, as serving would."""

    metric: str = key(
        "ndcg@10",
        "what decides the best checkpoint: hr@ or ndcg@ a cutoff, mrr; ranking: auc; or one of the head's own",
    )
    cutoffs: tuple[int, ...] = key(
        (10, 50, 200), "lengths of the lists that are judged, ascending", free=True
    )
    filter_seen: Literal["auto", "true", "false"] = key(
        "auto",
        "leave items of the history out, in metrics and by the export, so that a target among them is a miss; "
        "auto: unless 5% or more of the training targets repeat an earlier item",
    )
    protocol: Literal["full", "sampled", "next_window"] = key(
        "full",
        "the target ranked among all items, or among a few random ones as some papers do; with a log always "
        "next_window: every window is evaluated, among all items known so far, before it is learnt",
    )
    sampled: int = key(100, "protocol=sampled: random items the target is ranked among", at_least=1)
    batch: int | None = key(
        None,
        "histories evaluated at once on a rank; null: 256, on a GPU up to 1,024 of short ones against few items",
        at_least=1,
        free=True,
    )
    max_users: int | None = key(
        None,
        "evaluate during training on the first N users or requests only; with a log, on N targets of a window",
        at_least=1,
        free=True,
    )
    item_chunk: int = key(
        65_536, "items scored at once; bounds memory for large catalogues", at_least=1, free=True
    )


def problems(config: Config) -> list[str]:
    """Cutoffs that are none, keys that do nothing, a metric that the head does not give.

    Heads from outside are asked when they are built.
    """
    options, found = config.eval, []
    cutoffs = options.cutoffs
    if not cutoffs or cutoffs[0] < 1 or list(cutoffs) != sorted(set(cutoffs)):
        found.append(f"eval.cutoffs: ascending whole numbers from 1 on, e.g. 10,50,200; got {list(cutoffs)}")
    if options.protocol != "sampled" and changed(options, "sampled"):
        found.append("eval.sampled: only for eval.protocol=sampled")
    return found + _metric_problems(config)


def _metric_problems(config: Config) -> list[str]:
    kind, metric = config.head.kind, config.eval.metric
    if kind == "ranking":
        right = metric == "auc"
        return [] if right else [f"eval.metric: head.kind=ranking is judged by auc, got {metric}"]
    if kind != "retrieval" or not changed(config.eval, "metric"):
        return []
    if metric == "auc":
        return ["eval.metric: auc belongs to head.kind=ranking"]
    allowed = ranking_names(config.eval.cutoffs)
    if metric in allowed:
        return []
    close = nearest(metric, allowed)
    hint = f" (did you mean {close}?)" if close else ""
    name, _, cutoff = metric.partition("@")
    if name in ("hr", "ndcg") and cutoff.isdigit():
        wanted = sorted({*config.eval.cutoffs, int(cutoff)})
        hint = f"; eval.cutoffs={','.join(map(str, wanted))} gives it"
    return [f"eval.metric: allowed: {', '.join(allowed)}; got {metric!r}{hint}"]


def ranking_names(cutoffs: Sequence[int]) -> tuple[str, ...]:
    """Metrics of full ranking; as `freescale.model.full_ranking`, without torch."""
    return (*(f"{name}@{k}" for name in ("hr", "ndcg") for k in cutoffs), "mrr")


def metric_of(config: Config, head: Head) -> str:
    """The metric that decides; that of a recipe which names none is the head's first.

    Raises:
        ConfigError: the head does not give the one that was named.
    """
    wanted, allowed = config.eval.metric, _names_of(config, head)
    if wanted in allowed:
        return wanted
    if not changed(config.eval, "metric"):
        return allowed[0]
    raise ConfigError(
        f"eval.metric: head.kind={config.head.kind} does not give it",
        got=wanted,
        allowed=", ".join(allowed),
    )


def _names_of(config: Config, head: Head) -> tuple[str, ...]:
    """What a head is judged by, those of full ranking at the cutoffs of the recipe."""
    from freescale.model import FULL_RANKING, full_ranking, retrieves

    if not retrieves(head):
        return head.metric_names
    own = tuple(name for name in head.metric_names if name not in FULL_RANKING)
    ranked = full_ranking(config.eval.cutoffs)
    return (*own, *ranked) if head.metric_names[0] in own else (*ranked, *own)


def build_evaluation(
    config: Config, source: SequenceSource, *, model: Recommender, items: ItemEncoder, ranks: Ranks
) -> Evaluation:
    """How the run is judged, and what no training at all would reach."""
    from freescale.recipe.data import build_examples
    from freescale.train import Evaluation, Evaluator, Rule, popularity_quality, repeat_quality

    options = config.eval
    splits: tuple[Split, ...] = ("train", "valid", "test")
    train, valid, test = (build_examples(config, source, split, negatives=False) for split in splits)
    protocol = build_protocol(config, model.head, train=train, valid=valid, test=test)
    baselines: dict[str, dict[str, dict[str, float]]] = {"popularity": {}, "repeat": {}}
    if protocol.rule is not None and ranks.is_first:
        kinds = {"popularity": popularity_quality} | (
            {} if protocol.rule.filter_seen else {"repeat": repeat_quality}
        )
        for examples, max_users in ((valid, options.max_users), (test, None)):
            for name, quality in kinds.items():
                baselines[name][examples.split] = quality(
                    examples, rule=protocol.rule, cutoffs=options.cutoffs, max_users=max_users
                )
    return Evaluation(
        evaluator=Evaluator(
            model=model,
            items=items,
            ranks=ranks,
            rule=protocol.rule or Rule(),
            cutoffs=options.cutoffs,
            batch=options.batch,
            item_chunk=options.item_chunk,
        ),
        valid=valid,
        test=test,
        metric=metric_of(config, model.head),
        protocol=protocol,
        popularity=baselines["popularity"],
        repeat=baselines["repeat"],
        patience=config.run.patience,
        stop_at=config.run.stop_at,
        notices=protocol.warnings(limit=REPEATS_MATTER),
    )


def build_protocol(
    config: Config, head: Head, *, train: Examples, valid: Examples, test: Examples
) -> EvalProtocol:
    """How the run is judged, as the recipe asks for it and the data allow it."""
    from freescale.data import SplitSource, TemporalSource, measure_repeats, written
    from freescale.model import retrieves
    from freescale.recipe.head import labels_in_words
    from freescale.recipe.requests import request_options
    from freescale.train import EvalProtocol, Rule, asked_users

    source, ranked = train.source, retrieves(head)
    repeats = measure_repeats(train) if ranked else None
    rule = None
    if repeats is not None:
        asked = config.eval.filter_seen
        filter_seen = repeats.share < REPEATS_MATTER if asked == "auto" else asked == "true"
        sampled = config.eval.sampled if config.eval.protocol == "sampled" else None
        rule = Rule(filter_seen=filter_seen, sampled=sampled, seed=config.run.seed)
        _check_sampled(sampled, num_items=len(source.items.ids))
    users = {examples.split: asked_users(examples) for examples in (valid, test)}
    split: dict[str, object] = {"split": "leave_one_out"}
    words = "leave-one-out"
    requests = request_options(config)
    if requests is not None and requests.anchors is not None:
        days = requests.anchor_days
        split = {"split": "anchors", "days": days}
        words = (
            f"all anchors of the last {days} day{'s' if days > 1 else ''}, of as many before for validation"
        )
    elif isinstance(source, SplitSource):
        split = source.split_facts()
        words = f"split {split['split']}"
    if isinstance(source, TemporalSource) and split["split"] != "anchors":
        words = (
            f"temporal, trained before {written(source.valid_from)}, test from {written(source.test_from)}"
        )
    return EvalProtocol(
        rule=rule,
        num_items=len(source.items.ids),
        users={name: len(rows) + missed for name, (rows, missed) in users.items()},
        missed={name: missed for name, (_, missed) in users.items()},
        split=split,
        split_words=words,
        repeats=repeats,
        max_users=config.eval.max_users,
        labels=labels_in_words(head, train),
        judged="users" if requests is None else "requests",
    )


def _check_sampled(sampled: int | None, *, num_items: int) -> None:
    """Random items must be fewer than there are."""
    if sampled is not None and 2 * sampled > num_items:
        raise ConfigError(
            "eval.sampled: too many for this catalogue",
            got=f"{sampled:,} of {num_items:,} items",
            allowed=f"at most {num_items // 2:,}",
            next_step="use eval.protocol=full",
        )
