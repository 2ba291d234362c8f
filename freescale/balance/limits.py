"""What a partition is asked for: checked costs, tokens, speeds and caps; errors say what is feasible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from freescale.balance.arrays import FloatArray, IntArray
from freescale.errors import PlanError

# Tokens and ranks share the bits of one 64-bit heap key.
MOST_TOKENS, MOST_RANKS = 1 << 40, 1 << 20
# The slowest rank is at least this share of the fastest; a slower one is broken, not slow.
SLOWEST = 1e-3


@dataclass(frozen=True)
class Problem:
    """Costs and tokens of the samples; speeds of the ranks with the slowest as 1, their sum, and as given."""

    costs: FloatArray
    tokens: IntArray
    has_tokens: bool
    speeds: FloatArray
    total_speed: float
    given_speeds: FloatArray


@dataclass(frozen=True)
class Limits:
    """Caps of one rank; `soft` marks a default token cap that gives way where it cannot be met."""

    max_tokens: int
    max_count: int
    capped: bool
    soft: bool

    def with_max_tokens(self, max_tokens: int) -> Limits:
        """The same with another token cap."""
        return replace(self, max_tokens=max_tokens)


def checked_problem(
    costs: Sequence[float] | npt.NDArray[np.floating] | IntArray,
    num_ranks: int,
    *,
    tokens: Sequence[int] | npt.NDArray[np.integer] | None,
    speeds: Sequence[float] | FloatArray | None,
) -> Problem:
    """The input as arrays, or an error that names the first thing wrong with it."""
    if not 1 <= num_ranks <= MOST_RANKS:
        raise PlanError(
            "The number of ranks must be at least 1.", got=num_ranks, allowed=f"1 to {MOST_RANKS}"
        )
    cost_array = np.ascontiguousarray(costs, dtype=np.float64)
    if cost_array.ndim != 1:
        raise PlanError("Costs must be one number a sample.", got=f"an array of shape {cost_array.shape}")
    valid = np.isfinite(cost_array) & (cost_array >= 0)
    if not valid.all():
        sample = int(np.argmin(valid))
        raise PlanError(
            "Costs must be finite and not negative.",
            got=f"{cost_array[sample]} for sample {sample}",
            next_step="check the lengths and the cost model they come from",
        )
    given_speeds = checked_speeds(speeds, num_ranks)
    relative = given_speeds / given_speeds.min()
    return Problem(
        costs=cost_array,
        tokens=_checked_tokens(tokens, len(cost_array)),
        has_tokens=tokens is not None,
        speeds=relative,
        # Exactly rounded: plain sums may differ in the last bit from machine to machine, and the plans with
        # them.
        total_speed=math.fsum(relative.tolist()),
        given_speeds=given_speeds,
    )


def _checked_tokens(tokens: Sequence[int] | npt.NDArray[np.integer] | None, num_samples: int) -> IntArray:
    if tokens is None:
        return np.zeros(num_samples, dtype=np.int64)
    array = np.asarray(tokens)
    if array.shape != (num_samples,):
        raise PlanError(
            "Tokens must be one number for each cost.", got=f"{array.shape} tokens for {num_samples} costs"
        )
    if num_samples and not np.issubdtype(array.dtype, np.integer):
        raise PlanError("Tokens must be whole numbers.", got=f"dtype {array.dtype}")
    array = array.astype(np.int64)
    if num_samples and (int(array.min()) < 0 or int(array.sum()) >= MOST_TOKENS):
        raise PlanError(
            "Tokens must not be negative or absurdly many.",
            got=f"{array.min()} to {array.max()} a sample, {array.sum()} in all",
            allowed=f"0 or more, less than {MOST_TOKENS} in all",
        )
    return array


def checked_speeds(speeds: Sequence[float] | FloatArray | None, num_ranks: int) -> FloatArray:
    """Speeds as an array, all 1 for None."""
    if speeds is None:
        return np.ones(num_ranks)
    array = np.ascontiguousarray(speeds, dtype=np.float64)
    if array.shape != (num_ranks,):
        raise PlanError(
            "Speeds must be one number a rank.", got=f"{array.shape} speeds for {num_ranks} ranks"
        )
    if not np.isfinite(array).all() or array.min() <= 0 or array.min() < SLOWEST * array.max():
        raise PlanError(
            "Speeds must be positive and of one order of magnitude.",
            got=f"{array.min()} to {array.max()}",
            allowed=f"the slowest at least {SLOWEST:g} of the fastest",
        )
    return array


def resolve_limits(
    problem: Problem, *, max_tokens: int | None, max_count: int | None, max_tokens_ratio: float | None
) -> Limits:
    """The caps that hold; whether samples fit under one on tokens shows when they are placed."""
    num_samples, num_ranks = len(problem.costs), len(problem.speeds)
    if max_count is not None and max_count * num_ranks < num_samples:
        raise PlanError(
            f"{num_samples} samples do not fit on {num_ranks} ranks of at most {max_count} samples.",
            allowed=f"max_count >= {math.ceil(num_samples / num_ranks)}",
        )
    count = num_samples if max_count is None else min(max_count, num_samples)
    if max_tokens is not None:
        if not problem.has_tokens:
            raise PlanError("max_tokens needs the tokens of each sample.", next_step="pass tokens=lengths")
        most = min(int(max_tokens), int(problem.tokens.sum()))
        return Limits(max_tokens=most, max_count=count, capped=True, soft=False)
    return soft_limits(problem, token_cap(problem, max_tokens_ratio), max_count=count)


def soft_limits(problem: Problem, max_tokens: int | None, *, max_count: int | None = None) -> Limits:
    """Caps that give way where they cannot be kept; None for no cap."""
    total = int(problem.tokens.sum())
    return Limits(
        max_tokens=total if max_tokens is None else min(max_tokens, total),
        max_count=len(problem.costs) if max_count is None else max_count,
        capped=max_tokens is not None,
        soft=True,
    )


def token_cap(problem: Problem, max_tokens_ratio: float | None) -> int | None:
    """The most tokens of a rank, from the mean of a rank; None where there are no tokens or no cap is wanted."""
    if not problem.has_tokens or max_tokens_ratio is None:
        return None
    if not max_tokens_ratio >= 1:
        raise PlanError(
            "The token cap must be at least the mean of a rank.", got=max_tokens_ratio, allowed=">= 1"
        )
    num_ranks, total = len(problem.speeds), int(problem.tokens.sum())
    # A rank that is given more work for being fast needs the room for it.
    fastest = float(problem.speeds.max()) * num_ranks / problem.total_speed
    cap = max(int(problem.tokens.max(initial=0)), math.ceil(max_tokens_ratio * fastest * total / num_ranks))
    return min(cap, total)


def integer_costs(costs: FloatArray, num_ranks: int) -> IntArray:
    """Costs as integers of at least 1, so that samples that cost nothing are still spread out.

    Scaled to as many bits as leave room for a rank's load and number in one 64-bit key. Sums of integers are
    the same on every machine, sums of floats are not.
    """
    index_bits = max(1, (len(costs) - 1).bit_length())
    cost_bits = min(40, 62 - index_bits - max(1, (num_ranks - 1).bit_length()))
    largest = float(costs.max()) or 1.0
    scaled = np.rint(costs / largest * float(1 << cost_bits - 1)).astype(np.int64)
    return np.maximum(scaled, 1)
