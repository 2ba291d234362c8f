"""Runs over a log of sealed windows: what they refuse, and how their parts are built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from freescale.errors import ConfigError
from freescale.recipe.reading.keys import changed

if TYPE_CHECKING:
    from freescale.balance import BalancedSampler, WindowBatches, WindowIndex
    from freescale.comm.world import Ranks
    from freescale.data import DataDigest, Examples, LogExamples, LogSource
    from freescale.model import Recommender
    from freescale.recipe.building.run_tables import RunTables
    from freescale.recipe.config import Config
    from freescale.train import (
        GrowingLog,
        ItemEncoder,
        NextWindowEvaluation,
        NextWindowProtocol,
        WindowTimetable,
    )


def check_log(config: Config, source: LogSource, ranks: Ranks) -> None:
    """Know as many windows as rank 0 does, and refuse what would make old steps depend on new windows."""
    from freescale.comm.world import from_first

    source.use(from_first(lambda: source.num_windows, ranks=ranks, what="look at the log"))
    found = problems(config, source)
    if found:
        raise ConfigError(
            f"{source.name} is a log of windows:\n  - " + "\n  - ".join(found), next_step="change these keys"
        )


def problems(config: Config, source: LogSource) -> list[str]:
    """What does not go with a log, all of it."""
    from freescale.recipe.requests import request_options

    requests = request_options(config)
    refused = {
        "embedding.id_map: direct has a row for each id of a catalogue that grows; use zero_collision or hash": (
            config.embedding.id_map == "direct"
        ),
        "embedding.rows: the size of the table is not known from a log; set it": config.embedding.rows
        is None,
        "optim.schedule: cosine needs the last step, which a log does not have; use constant": (
            config.optim.schedule == "cosine"
        ),
        "data.global_tokens: steps of a log are counted by samples; set data.global_batch": (
            config.data.global_tokens is not None
        ),
        "data.split: a log is split by its windows": config.data.split != "leave_one_out",
        "eval.protocol: a log is evaluated by next_window": config.eval.protocol == "sampled",
        "items.kind: vectors from content or texts need all items before the first step; use ids": (
            config.items.kind != "ids"
        ),
        "head.kind: how many requests of tasks a deleted window had is not known; append the inputs to a new log": (
            config.head.kind == "tasks" and any(entry.deleted for entry in source.log.windows)
        ),
        "head.anchors: requests of a log are the new events of its windows; leave it out": (
            requests is not None and requests.anchors is not None
        ),
        "run.epochs: windows are gone through data.passes times each": bool(changed(config.run, "epochs")),
        "run.patience: the latest state of a run over a log is the one that counts": (
            config.run.patience is not None
        ),
        "run.first_eval, run.stop_at, run.mllog: windows of a log have a timetable of their own": (
            config.run.first_eval is not None or config.run.stop_at is not None or config.run.mllog
        ),
        "data.order: windows of a log come in their own order; leave it out": config.data.order != "shuffled",
        "run.eval_every: every window is evaluated before it is learnt; null, or 0 for never": (
            config.run.eval_every not in (None, 0)
        ),
        f"data.max_length: rows of this log have up to {source.max_length} inputs; got {config.data.max_length}": (
            config.data.max_length < source.max_length
        ),
    }
    return [text for text, holds in refused.items() if holds]


def digest_log(source: LogSource) -> DataDigest:
    """Which log it is: what was there first. How far a run has come is kept beside it, see GrowingLog."""
    from freescale.data import DataDigest

    return DataDigest(
        name=source.name,
        histories=0,
        events=0,
        items=0,
        features=source.features,
        lengths="",
        groups="",
        catalogue="",
        parts={"window-000000": f"sealed:{source.entry(0).fingerprint}"},
    )


def build_log_examples(config: Config, source: LogSource, *, negatives: bool) -> LogExamples:
    """Rows of the log to learn from, or its requests."""
    from freescale.data import LogExamples, LogRequests
    from freescale.recipe.features import build_features
    from freescale.recipe.requests import request_rules

    rules = request_rules(config)
    if rules is not None:
        return LogRequests(
            source=source,
            max_length=config.data.max_length,
            use_time=config.data.use_time,
            features=build_features(config, source),
            options=rules,
        )
    return LogExamples(
        source=source,
        max_length=config.data.max_length,
        use_time=config.data.use_time,
        num_negatives=config.head.num_negatives if negatives else 0,
        seed=config.run.seed,
        features=build_features(config, source),
    )


def build_window_batches(config: Config, train: LogExamples) -> WindowBatches:
    """Which rows make a step."""
    from freescale.balance import WindowBatches

    return WindowBatches(
        [train.num_rows(window) for window in range(train.source.num_windows)],
        _IndexOf(train),
        global_batch=config.data.global_batch,
        seed=config.run.seed,
        passes=config.data.passes,
        shuffle_rows=config.data.shuffle_rows,
        window=config.balance.window,
    )


class _IndexOf:
    """(window) -> what is known of it without reading its histories; loader processes hold it, too."""

    def __init__(self, train: LogExamples) -> None:
        self._train = train

    def __call__(self, window: int) -> WindowIndex:
        from freescale.balance import WindowIndex

        return WindowIndex(*self._train.facts_of(window))


def build_log(
    config: Config, sampler: BalancedSampler, train: Examples, tables: RunTables, ranks: Ranks
) -> GrowingLog | None:
    """The log of a run; ids age by its clock. None where the data does not grow."""
    from freescale.balance import WindowBatches
    from freescale.data import LogExamples
    from freescale.embedding import ShardedIdMap
    from freescale.train import GrowingLog

    if not isinstance(train, LogExamples):
        of_logs = (config.run.follow, config.eval.protocol == "next_window", config.data.recent_windows)
        if any(of_logs):
            raise ConfigError(
                "run.follow, data.recent_windows and eval.protocol=next_window are for logs",
                got=f"data.path={config.data.path}",
                next_step="`freescale log append LOG INPUT` makes a log; set data.path=LOG",
            )
        return None
    assert isinstance(sampler.batches, WindowBatches)
    log = GrowingLog(
        source=train.source,
        batches=sampler.batches,
        ranks=ranks,
        follow=config.run.follow,
        num_rows=train.num_rows,
    )
    for id_map in tables.id_maps.values():
        if isinstance(id_map, ShardedIdMap) and config.embedding.eviction == "ttl":
            id_map.clock = log.clock
    return log


def window_timetable(config: Config, log: GrowingLog) -> WindowTimetable:
    """How long the run is, and what is due when."""
    from freescale.train import WindowTimetable

    return WindowTimetable(
        batches=log.batches,
        most_steps=config.run.steps,
        evaluates=config.run.eval_every != 0,
        checkpoint_every=config.run.checkpoint_every,
    )


def build_log_evaluation(
    config: Config,
    log: GrowingLog,
    *,
    model: Recommender,
    items: ItemEncoder,
    judged: Mapping[str, Any] | None = None,
) -> NextWindowEvaluation:
    """How the run is judged: by every window, before it is learnt.

    `judged` is how it was judged before: the first window, which decided that, may have been deleted since.
    """
    from freescale.data import LogRequests, NextExamples, NextRequests, NextWindow
    from freescale.recipe.eval import metric_of
    from freescale.recipe.features import build_features
    from freescale.train import Evaluator, NextWindowEvaluation, Rule

    source, options = log.source, config.eval
    shown = build_log_examples(config, source, negatives=False)

    def examples_of(window: int) -> NextExamples | NextRequests:
        if isinstance(shown, LogRequests):
            return shown.next_window(window, most=options.max_users)
        return NextExamples(
            source=NextWindow(source, window, most=options.max_users),
            split="test",
            max_length=config.data.max_length,
            use_time=config.data.use_time,
            features=build_features(config, source),
        )

    protocol = _protocol(config, source, model, shown, judged or {})
    return NextWindowEvaluation(
        evaluator=Evaluator(
            model=model,
            items=items,
            ranks=log.ranks,
            rule=protocol.rule or Rule(),
            cutoffs=options.cutoffs,
            batch=options.batch,
            item_chunk=options.item_chunk,
        ),
        valid=shown,
        test=shown,
        metric=metric_of(config, model.head),
        protocol=protocol,
        popularity={},
        repeat={},
        patience=None,
        begins_at=log.begins_at,
        examples_of=examples_of,
    )


def _protocol(
    config: Config, source: LogSource, model: Recommender, shown: LogExamples, judged: Mapping[str, Any]
) -> NextWindowProtocol:
    """By full ranking; whether seen items are filtered is decided by the first window, not by what comes later."""
    from freescale.data import Examples, LogRequests, measure_repeats
    from freescale.model import retrieves
    from freescale.recipe.eval import REPEATS_MATTER
    from freescale.recipe.head import labels_in_words
    from freescale.train import NextWindowProtocol, Rule

    rule = repeats = kept_share = None
    if retrieves(model.head):
        asked = config.eval.filter_seen
        decided = asked == "true" if asked != "auto" else judged.get("filter_seen")
        if not source.entry(0).deleted:
            first = Examples(source=source.window(0), split="test", max_length=config.data.max_length)
            repeats = measure_repeats(first)
            decided = repeats.share < REPEATS_MATTER if asked == "auto" else decided
        elif decided is None:
            raise ConfigError(
                "eval.filter_seen: auto looks at the first window, and that was deleted",
                next_step="go on with a run that has learnt it (--resume RUN_DIR), or train on a new log of the inputs "
                "that are left",
            )
        else:
            kept_share = judged.get("repeat_share")
        rule = Rule(filter_seen=bool(decided))
    labels = "next event's label"
    if isinstance(shown, LogRequests):
        labels = labels_in_words(model.head, shown.of_window(0))
    return NextWindowProtocol(
        rule=rule,
        num_items=0,
        users={"valid": 0, "test": 0},
        split={"split": "next_window"},
        split_words="each window before it is learnt",
        repeats=repeats,
        kept_share=kept_share,
        max_users=config.eval.max_users,
        labels=labels,
    )
