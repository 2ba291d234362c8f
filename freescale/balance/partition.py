"""Splits one batch over the ranks so that all finish at the same time, under caps on tokens and samples.

Longest sample first to the rank that finishes it first, then exchanges between the most and the least loaded
ranks. On long-tailed lengths this leaves 0.01 % of the time idle where Karmarkar-Karp with equal counts
leaves 27 %, because that method must give every rank one sample of each size class.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from freescale.balance.arrays import FloatArray, IntArray
from freescale.balance.limits import (
    Limits,
    Problem,
    checked_problem,
    integer_costs,
    resolve_limits,
    soft_limits,
)
from freescale.errors import PlanError

# Exchanges stop once no rank is further than this above the bound: finer than any cost model predicts.
CLOSE_ENOUGH = 1e-4
# Best fit scans all ranks for each sample; beyond this much work its chance of a tighter fit is not worth it.
BEST_FIT_WORK = 50_000_000


@dataclass(frozen=True, eq=False)
class Partition:
    """Which rank computes which sample, and how even that is.

    Args:
        owner: [samples] rank of each sample.
        times: [ranks] predicted time of each rank: its costs divided by its speed.
        tokens: [ranks] tokens of each rank, zeros where no tokens were given.
        counts: [ranks] samples of each rank.
        imbalance: latest / mean finish; 1 is perfect, and 1 - 1 / imbalance is the bubble.
        bound: the imbalance that no assignment can beat.
        reason: why the bound is above 1, in words; None when it is not.
        max_tokens: the token cap that was kept, None for none.
    """

    owner: IntArray
    times: FloatArray
    tokens: IntArray
    counts: IntArray
    imbalance: float
    bound: float
    reason: str | None
    max_tokens: int | None

    @cached_property
    def ranks(self) -> list[IntArray]:
        """Sample numbers of each rank, ascending."""
        num_ranks = len(self.counts)
        keys = self.owner.astype(np.uint16) if num_ranks <= 1 << 16 else self.owner
        samples = np.argsort(keys, kind="stable").astype(np.int64, copy=False)
        bounds = [0, *np.cumsum(self.counts).tolist()]
        return [samples[start:stop] for start, stop in itertools.pairwise(bounds)]

    @property
    def bubble(self) -> float:
        """Share of the ranks' time spent waiting for the latest one."""
        return 1.0 - 1.0 / self.imbalance


def partition(
    costs: Sequence[float] | npt.NDArray[np.floating] | IntArray,
    num_ranks: int,
    *,
    tokens: Sequence[int] | npt.NDArray[np.integer] | None = None,
    max_tokens: int | None = None,
    max_count: int | None = None,
    speeds: Sequence[float] | FloatArray | None = None,
) -> list[IntArray]:
    """Sample numbers for each rank, so that the ranks' predicted times are as equal as possible.

    The same input gives the same result on every machine. `partition_report` also tells how even it is.

    Args:
        costs: [samples] predicted cost of each sample, in any unit of time.
        num_ranks: number of ranks.
        tokens: [samples] tokens of each sample, for the cap.
        max_tokens: most tokens a rank may hold; None with `tokens` takes 1.10 x the mean of a rank, or what
            is feasible where that is more.
        max_count: most samples a rank may hold; ceil(samples / ranks) gives equal counts.
        speeds: [ranks] relative speeds; a rank of speed 0.8 gets four fifths of the work.

    Raises:
        PlanError: an input is invalid, or no assignment keeps the caps; the message says what would.
    """
    report = partition_report(
        costs, num_ranks, tokens=tokens, max_tokens=max_tokens, max_count=max_count, speeds=speeds
    )
    return report.ranks


def partition_report(
    costs: Sequence[float] | npt.NDArray[np.floating] | IntArray,
    num_ranks: int,
    *,
    tokens: Sequence[int] | npt.NDArray[np.integer] | None = None,
    max_tokens: int | None = None,
    max_count: int | None = None,
    speeds: Sequence[float] | FloatArray | None = None,
    max_tokens_ratio: float | None = 1.10,
) -> Partition:
    """As `partition`, with loads, imbalance, bound and reason.

    Args:
        costs: see partition.
        num_ranks: see partition.
        tokens: see partition.
        max_tokens: see partition.
        max_count: see partition.
        speeds: see partition.
        max_tokens_ratio: token cap in means of a rank where `max_tokens` is None; None for no cap.
    """
    problem = checked_problem(costs, num_ranks, tokens=tokens, speeds=speeds)
    limits = resolve_limits(
        problem, max_tokens=max_tokens, max_count=max_count, max_tokens_ratio=max_tokens_ratio
    )
    if len(problem.costs) == 0:
        return _empty(num_ranks)
    return _solve(problem, limits)


def soft_partition_report(
    costs: Sequence[float] | npt.NDArray[np.floating] | IntArray,
    num_ranks: int,
    *,
    tokens: Sequence[int] | npt.NDArray[np.integer],
    max_tokens: int | None,
    speeds: Sequence[float] | FloatArray | None = None,
) -> Partition:
    """As `partition_report`, but a cap that no assignment was found for gives way to the tightest that was."""
    problem = checked_problem(costs, num_ranks, tokens=tokens, speeds=speeds)
    if len(problem.costs) == 0:
        return _empty(num_ranks)
    return _solve(problem, soft_limits(problem, max_tokens))


def assignment_report(
    costs: Sequence[float] | npt.NDArray[np.floating] | IntArray,
    owner: IntArray,
    num_ranks: int,
    *,
    tokens: Sequence[int] | npt.NDArray[np.integer] | None = None,
    speeds: Sequence[float] | FloatArray | None = None,
) -> Partition:
    """How even a given assignment is: the report of `partition_report` for any `owner` of each sample."""
    problem = checked_problem(costs, num_ranks, tokens=tokens, speeds=speeds)
    limits = resolve_limits(problem, max_tokens=None, max_count=None, max_tokens_ratio=None)
    if len(problem.costs) == 0:
        return _empty(num_ranks)
    weights = integer_costs(problem.costs, num_ranks)
    return _report(problem, limits, owner, weights=weights, bound=_lower_bound(problem, -np.sort(-weights)))


def _empty(num_ranks: int) -> Partition:
    none = np.zeros(num_ranks, dtype=np.int64)
    return Partition(none[:0], none.astype(np.float64), none, none, 1.0, 1.0, None, None)


def _solve(problem: Problem, limits: Limits) -> Partition:
    from freescale.balance.loops.partition_kernels import largest_first

    weights = integer_costs(problem.costs, len(problem.speeds))
    order = largest_first(weights)
    costs, tokens = weights[order], problem.tokens[order]
    # Faster ranks come first, so that an empty fast rank wins the tie against an empty slow one.
    rank_order = np.argsort(-problem.speeds, kind="stable")
    speeds = problem.speeds[rank_order]
    owner, limits = _first_assignment(costs, tokens, speeds, limits)
    bound = _lower_bound(problem, costs)
    _improve(costs, tokens, speeds, limits, bound * (1 + CLOSE_ENOUGH), owner)
    placed = np.empty_like(owner)
    placed[order] = rank_order[owner]
    return _report(problem, limits, placed, weights=weights, bound=bound)


def _first_assignment(
    costs: IntArray, tokens: IntArray, speeds: FloatArray, limits: Limits
) -> tuple[IntArray, Limits]:
    """Longest first under the caps; by tokens instead where costly samples leave no room for the rest."""
    from freescale.balance.loops import partition_kernels

    owner = np.empty(len(costs), dtype=np.int64)
    rank_bits = max(1, (len(speeds) - 1).bit_length())
    even = bool(speeds[0] == speeds[-1])
    num_placed = partition_kernels.longest_first(
        costs, tokens, speeds, limits.max_tokens, limits.max_count, rank_bits, even, owner
    )
    if num_placed == len(costs):
        return owner, limits
    return _by_tokens(tokens, num_ranks=len(speeds), limits=limits)


def _improve(
    costs: IntArray, tokens: IntArray, speeds: FloatArray, limits: Limits, enough: float, owner: IntArray
) -> None:
    """Exchange samples between ranks until no rank finishes after `enough` or nothing helps."""
    from freescale.balance.loops import improve_kernels

    caps = (limits.max_tokens, limits.max_count)
    if not improve_kernels.exchange(costs, tokens, speeds, *caps, enough, 8 * len(speeds) + 64, owner):
        improve_kernels.resplit(costs, tokens, speeds, *caps, enough, 2 * len(speeds) + 64, owner)


def _by_tokens(tokens: IntArray, *, num_ranks: int, limits: Limits) -> tuple[IntArray, Limits]:
    """An assignment with tokens as even as possible; a cap that was only a default gives way to it."""
    from freescale.balance.loops import partition_kernels

    order = np.argsort(-tokens, kind="stable")
    sizes = tokens[order]
    even_speeds = np.ones(num_ranks)
    owner = np.empty(len(tokens), dtype=np.int64)
    rank_bits = max(1, (num_ranks - 1).bit_length())
    no_cap = int(sizes.sum())
    partition_kernels.longest_first(
        sizes, sizes, even_speeds, no_cap, limits.max_count, rank_bits, True, owner
    )
    fair = max(float(sizes[0]), no_cap / num_ranks)
    _improve(sizes, sizes, even_speeds, limits.with_max_tokens(no_cap), fair, owner)
    reached = int(np.bincount(owner, weights=sizes, minlength=num_ranks).max())
    if reached > limits.max_tokens:
        if limits.soft:
            limits = limits.with_max_tokens(reached)
        else:
            _pack(sizes, num_ranks=num_ranks, limits=limits, owner=owner, reached=reached)
    placed = np.empty_like(owner)
    placed[order] = owner
    return placed, limits


def _pack(sizes: IntArray, *, num_ranks: int, limits: Limits, owner: IntArray, reached: int) -> None:
    """Best fit into the given cap, the last resort before an error that names a feasible one."""
    from freescale.balance.loops import partition_kernels

    num_placed = 0
    if len(sizes) * num_ranks <= BEST_FIT_WORK:
        num_placed = partition_kernels.best_fit(sizes, num_ranks, limits.max_tokens, limits.max_count, owner)
    if num_placed < len(sizes):
        longest, cap = int(sizes[0]), limits.max_tokens
        raise PlanError(
            f"The longest sample has {longest} tokens and fits on no rank of {cap}."
            if longest > cap
            else "No assignment was found that keeps max_tokens on every rank.",
            got=f"max_tokens={limits.max_tokens} for {int(sizes.sum())} tokens on {num_ranks} ranks",
            allowed=f"max_tokens >= {reached} is feasible",
            next_step="raise max_tokens, use more ranks or a smaller global batch",
        )


def _lower_bound(problem: Problem, costs: IntArray) -> float:
    """The earliest time by which any assignment can finish; costs sorted from the largest.

    The fair share, the largest sample on the fastest rank, and the pigeonhole: of the k*W + 1 largest samples
    some rank gets k + 1, which cost at least as much as the k + 1 smallest of them.
    """
    num_ranks = len(problem.speeds)
    sums = np.concatenate(([0], np.cumsum(costs)))
    crowded = np.arange(1, (len(costs) - 1) // num_ranks + 1, dtype=np.int64) * num_ranks + 1
    shared = sums[crowded] - sums[crowded - crowded // num_ranks - 1]
    alone = max(int(costs[0]), int(shared.max(initial=0)))
    return max(float(sums[-1]) / problem.total_speed, alone / float(problem.speeds.max()))


def _report(
    problem: Problem, limits: Limits, owner: IntArray, *, weights: IntArray, bound: float
) -> Partition:
    num_ranks = len(problem.speeds)
    mean = float(weights.sum()) / problem.total_speed
    latest = float((np.bincount(owner, weights=weights, minlength=num_ranks) / problem.speeds).max())
    loads = np.bincount(owner, weights=problem.costs, minlength=num_ranks)
    return Partition(
        owner=owner,
        times=loads / problem.given_speeds,
        tokens=np.bincount(owner, weights=problem.tokens, minlength=num_ranks).astype(np.int64),
        counts=np.bincount(owner, minlength=num_ranks).astype(np.int64, copy=False),
        imbalance=latest / mean,
        bound=bound / mean,
        reason=_reason(problem, weights=weights, bound_ratio=bound / mean),
        max_tokens=limits.max_tokens if limits.capped else None,
    )


def _reason(problem: Problem, *, weights: IntArray, bound_ratio: float) -> str | None:
    """Why no assignment can be even, or None."""
    if bound_ratio <= 1 + CLOSE_ENOUGH:
        return None
    num_samples, num_ranks = len(problem.costs), len(problem.speeds)
    bubble = f"at least {100 * (1 - 1 / bound_ratio):.0f} % of the ranks' time is idle"
    if num_samples < num_ranks:
        return f"{num_samples} samples cannot occupy {num_ranks} ranks: {bubble}"
    giant = int(weights.argmax())
    fair = float(weights.sum()) / problem.total_speed * float(problem.speeds.max())
    share = float(weights[giant]) / fair
    if share > bound_ratio * (1 - CLOSE_ENOUGH):
        return f"sample {giant} alone costs {share:.1f} times a rank's fair share: {bubble}"
    return f"the longest samples are too few and too long to share out over {num_ranks} ranks: {bubble}"
