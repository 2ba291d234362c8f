"""Keys that were set and do nothing in this run: told at its start.

What can never do anything beside another key of the recipe is refused when it is read, by the `problems` of its
section. Here stand those that people keep for another run, or for which one must look at data and ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from freescale.recipe.reading.keys import changed, options_from_outside

if TYPE_CHECKING:
    from freescale.comm.world import Ranks
    from freescale.data import BatchFeatures
    from freescale.recipe.config import Config
    from freescale.train import Progress

_WITH_BETA2 = ("adam",)
_WITH_EPS = ("adam", "rowwise_adagrad")


def tell_idle(
    config: Config,
    features: BatchFeatures | None,
    ranks: Ranks,
    progress: Progress,
) -> None:
    """Say what was set and does nothing here."""
    for key, why in _idle(config, features, ranks):
        progress.notice(0, f"{key} changes nothing {why}")


def _idle(config: Config, features: BatchFeatures | None, ranks: Ranks) -> Iterator[tuple[str, str]]:
    if ranks.num_ranks == 1:
        yield from _on_one_rank(config)
    yield from _beside_kinds(config)
    for name in changed(config.tokens) if features is None else ():
        yield f"tokens.{name}", "where there are no features"
    yield from _beside_data(config)


def _beside_data(config: Config) -> Iterator[tuple[str, str]]:
    from freescale.data import source_kind

    kind = source_kind(config.data.path, config.data.source)
    if changed(config.data, "passes") and kind.name != "log":
        yield "data.passes", "where data.path is no log: run.epochs says how often data is gone through"
    taken = {each.name for each in dataclasses.fields(kind.options)} if kind.ships and kind.options else set()
    for name in sorted(set(changed(config.synthetic)) - taken):
        yield f"synthetic.{name}", f"where data.path is {config.data.path}"


def _on_one_rank(config: Config) -> Iterator[tuple[str, str]]:
    if config.comm.dedup == "node":
        yield "comm.dedup=node", "on one rank: no row travels"
    if config.comm.sums != "auto":
        yield f"comm.sums={config.comm.sums}", "on one rank: nothing is added up"


def _beside_kinds(config: Config) -> Iterator[tuple[str, str]]:
    """Options of a kind that another section, or another key, does not name."""
    model, head, table = config.model, config.head, config.embedding
    if config.ffn.kind == "none":
        for name in changed(config.ffn, "hidden", "activation"):
            yield f"ffn.{name}", "with ffn.kind=none"
    if model.kind != "hstu":
        yield from _unless_own(model, "model", "encoder", "position_bias", "time_bias")
    if head.kind != "ranking":
        yield from _unless_own(head, "head", "head", "label_thresholds")
    if head.kind != "retrieval":
        yield from _unless_own(head, "head", "head", "temperature", "normalize")
    if not config.tables.extra:
        if table.id_map == "zero_collision" and table.admit_after == 1 and changed(table, "admission"):
            yield "embedding.admission", "with embedding.admit_after=1: every id is admitted at once"
        if table.optimizer not in _WITH_BETA2:
            yield from _unless_own(table, "embedding", "optimizer", "beta2")
        if table.optimizer not in _WITH_EPS:
            yield from _unless_own(table, "embedding", "optimizer", "eps")


def _unless_own(section: Any, word: str, family: str, *names: str) -> Iterator[tuple[str, str]]:
    """Keys that were set, unless a kind from outside has options of their names."""
    kind = getattr(section, "optimizer" if family == "optimizer" else "kind")
    for name in sorted(set(changed(section, *names)) - options_from_outside(section, family)):
        yield f"{word}.{name}", f"with {family} {kind}"
