"""Requests with candidates, where the head is one of tasks: their batches, their work, and what is told of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freescale.recipe.reading.keys import section_options

if TYPE_CHECKING:
    from freescale.balance import PairRule
    from freescale.data import RequestExamples, SequenceSource, Split, TokenRule
    from freescale.model import TasksOptions
    from freescale.recipe.config import Config

KIND = "tasks"


def problems(config: Config) -> list[str]:
    """What does not go with requests."""
    if config.head.kind != KIND:
        return []
    found = []
    if config.segments.recent is not None:
        found.append(
            "segments.recent: does not go with head.kind=tasks, whose candidates know no summaries yet"
        )
    if config.data.max_length < 2:
        found.append(f"data.max_length: requests need at least 2, got {config.data.max_length}")
    return found


def request_options(config: Config) -> TasksOptions | None:
    """The options of a head of tasks; None for other heads."""
    return section_options(config.head, "head") if config.head.kind == KIND else None


def build_requests(config: Config, source: SequenceSource, split: Split) -> RequestExamples | None:
    """One split of the data as requests, where the head wants them."""
    from freescale.data import RequestExamples
    from freescale.recipe.features import build_features

    rules = request_rules(config)
    if rules is None:
        return None
    return RequestExamples(
        source=source,
        split=split,
        max_length=config.data.max_length,
        use_time=config.data.use_time,
        features=build_features(config, source),
        **rules,
    )


def request_rules(config: Config) -> dict[str, Any] | None:
    """What a request is and what is predicted of its candidates, as `RequestExamples` takes it; None: no requests."""
    from freescale.data import AnchorRule, PoolRule, parse_tasks

    options = request_options(config)
    if options is None:
        return None
    rules = parse_tasks(options.tasks)
    return {
        "outcomes": tuple(dict.fromkeys(rule.column for rule in rules)),
        "candidates": options.candidates,
        "by": options.by,
        "weights": options.weights,
        "window": options.window,
        "logs": tuple(dict.fromkeys(rule.column for rule in rules if rule.log)),
        "pools": None
        if options.pools is None
        else PoolRule(options.pools, options.pool_kinds, options.pool_events, options.pool_window),
        "anchors": None
        if options.anchors is None
        else AnchorRule(options.anchors, options.anchor_history, options.anchor_days),
    }


def pair_rule(config: Config, tokens: TokenRule | None = None) -> PairRule | None:
    """What attention has to compute of a sample, of its length alone; None: all of a causal sequence.

    Where a column decides what a request is, numbers of candidates differ; `head.candidates` is then what is assumed.
    """
    from freescale.data import RequestRule
    from freescale.recipe.segments import segment_rule

    options = request_options(config)
    return (
        (segment_rule(config) or tokens)
        if options is None
        else RequestRule(1 if options.anchors else options.candidates, tokens)
    )
