"""Which rank computes which sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from freescale import registry
from freescale.recipe.reading.keys import changed, extra_keys, key, section_options

if TYPE_CHECKING:
    from freescale.balance import BalancedSampler, Balancer, Decisions, SampleWork
    from freescale.comm.world import Ranks
    from freescale.data import BatchFeatures, Examples
    from freescale.recipe.config import Config
    from freescale.train import Rebalancer


@dataclass(frozen=True, kw_only=True)
class BalanceSection:
    """Which rank computes which sample."""

    enabled: bool = key(True, "balance predicted cost over the ranks", free=True)
    kind: str = key("lpt", "how samples are shared out over the ranks", free=True, family="balancer")
    max_tokens_ratio: float = key(1.10, "cap on a rank's tokens, times the mean", at_least=1, free=True)
    window: int = key(1, "steps planned together", at_least=1)
    cost_model: str | None = key(
        None, "JSON file of a measured cost model, e.g. RUN_DIR/cost_model.json of an earlier run", free=True
    )
    refit_every: int | None = key(
        50,
        "steps between agreements on measured costs and rank speeds; null: keep the defaults",
        at_least=1,
        free=True,
    )
    extra: Mapping[str, Any] = extra_keys()


def problems(config: Config) -> list[str]:
    """A way to balance that is switched off."""
    if not config.balance.enabled and changed(config.balance, "kind"):
        return ["balance.kind: does nothing with balance.enabled=false"]
    return []


def first_decisions(config: Config, ranks: Ranks) -> Decisions:
    """What is known of costs and speeds before the first step."""
    from freescale.balance import CostModel, Decisions

    known = config.balance.cost_model
    return Decisions(CostModel.load(known) if known else CostModel.default(), num_ranks=ranks.num_ranks)


def build_balancer(config: Config) -> Balancer:
    """What shares samples out over the ranks; without balance they are dealt in turn."""
    if not config.balance.enabled:
        return cast("Balancer", registry.find("balancer", "round_robin").make())
    kind, options = (
        registry.find("balancer", config.balance.kind),
        section_options(config.balance, "balancer"),
    )
    return cast("Balancer", kind.make() if options is None else kind.make(options))


def build_sampler(
    config: Config, train: Examples, ranks: Ranks, decisions: Decisions | None = None
) -> BalancedSampler:
    """Which samples make a step, and who computes them."""
    from freescale.balance import BalancedSampler
    from freescale.data import LogExamples
    from freescale.recipe.log import build_window_batches

    tokens = config.data.global_tokens
    return BalancedSampler(
        build_window_batches(config, train) if isinstance(train, LogExamples) else train.lengths(),
        global_batch=None if tokens else config.data.global_batch,
        global_tokens=tokens,
        num_ranks=ranks.num_ranks,
        rank=ranks.rank,
        seed=config.run.seed,
        balancer=build_balancer(config),
        max_tokens_ratio=config.balance.max_tokens_ratio,
        window=config.balance.window,
        groups=None if isinstance(train, LogExamples) else train.groups,
        shuffle_rows=config.data.shuffle_rows,
        shuffle=config.data.order == "shuffled",
        decisions=decisions,
        work=sample_work(config, getattr(train, "features", None)),
    )


def sample_work(config: Config, features: BatchFeatures | None) -> SampleWork:
    """What a history of a length has to compute: segments leave pairs out, features may have tokens of their own."""
    from freescale.balance import SampleWork
    from freescale.recipe.features import token_rule
    from freescale.recipe.requests import pair_rule

    return SampleWork(pair_rule(config, token_rule(config, features)))


def build_rebalancer(config: Config, ranks: Ranks, decisions: Decisions, *, most_workers: int) -> Rebalancer:
    """What agrees on costs and speeds measured in the run; no rank has more loader processes than `most_workers`."""
    from freescale.pipeline import LOOK_AHEAD
    from freescale.train import Rebalancer

    return Rebalancer(
        decisions=decisions,
        ranks=ranks,
        every=config.balance.refit_every if config.balance.enabled else None,
        # The loader has at most two batches a process under way, and the schedule those it looks ahead to.
        lookahead=2 * most_workers + 2 + LOOK_AHEAD,
    )
