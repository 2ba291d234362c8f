"""The plan of one step as one rank sees it, made from a global batch without asking any other rank."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from freescale.balance.arrays import FloatArray, IntArray
from freescale.balance.least_counts import with_least_counts
from freescale.balance.limits import checked_problem, token_cap
from freescale.balance.partition import Partition, assignment_report
from freescale.errors import PlanError
from freescale.registry import find, options_of


class Cost(Protocol):
    """Predicts what a sample of a given length costs; milliseconds, or any unit proportional to time."""

    def cost(self, lengths: IntArray) -> FloatArray:
        """[n] cost of each sample."""


class Balancer(Protocol):
    """A way to share a batch out; `@register("balancer", NAME)` on a class of this shape gives it a name.

    Every rank asks for the whole assignment and nobody compares: the same input must give the same answer on all
    machines. What it decides moves work from rank to rank and never changes what is learned.
    """

    def assign(
        self,
        costs: FloatArray,
        num_ranks: int,
        *,
        tokens: IntArray,
        max_tokens: int | None,
        speeds: FloatArray,
    ) -> Sequence[IntArray]:
        """Sample numbers for each rank, in any order, every sample once; asked only where there are several ranks.

        Args:
            costs: [samples] predicted cost of each sample, in any unit of time.
            num_ranks: number of ranks.
            tokens: [samples] tokens of each sample.
            max_tokens: tokens a rank should not exceed, to keep memory even; None for no cap.
            speeds: [ranks] relative speeds; a rank of speed 0.8 needs a quarter more time.
        """


@runtime_checkable
class ReportingBalancer(Balancer, Protocol):
    """A balancer that knows how even its assignment is: working it out again would take a third of the planning."""

    def report(
        self,
        costs: FloatArray,
        num_ranks: int,
        *,
        tokens: IntArray,
        max_tokens: int | None,
        speeds: FloatArray,
    ) -> Partition:
        """The same assignment with its numbers; trusted, unlike the lists of `assign`."""


@dataclass(frozen=True, eq=False)
class StepPlan:
    """What one rank does in one step, and how well the step is balanced over all ranks.

    Args:
        step: counted from 0 over all epochs.
        epoch: the epoch the step lies in.
        rows: row numbers of this rank's samples; may be empty when there are more ranks than samples.
        global_samples: samples of the whole global batch; divide the summed loss by it, not by len(rows).
        global_tokens: sum of the lengths of the whole global batch.
        imbalance: latest / mean predicted finish of a rank; 1 is perfect.
        bound: the imbalance no assignment can beat, above 1 when one sample outweighs a rank's fair share.
        plan_hash: short hash of the whole assignment, equal on all ranks.
        imbalance_in_turn: what the imbalance would be with the samples dealt out in turn.
        global_targets: tokens of the whole global batch that have a loss; None: all.
    """

    step: int
    epoch: int
    rows: IntArray
    global_samples: int
    global_tokens: int
    imbalance: float
    bound: float
    plan_hash: str
    imbalance_in_turn: float = 1.0
    global_targets: int | None = None

    @property
    def divisor(self) -> int:
        """What the summed loss of a step is divided by."""
        return max(1, self.global_tokens if self.global_targets is None else self.global_targets)


def named_balancer(balancer: str | Balancer, options: object = None) -> Balancer:
    """The balancer of this name, made with its options, or the one given; refused if it cannot assign."""
    made: object = balancer
    if isinstance(balancer, str):
        kind = find("balancer", balancer, key="balancer")
        filled = options_of(kind, options)
        made = kind.make() if filled is None else kind.make(filled)
    elif options is not None:
        raise PlanError("options belong to a balancer named by its name", got=f"{balancer!r}, {options!r}")
    if not callable(getattr(made, "assign", None)):
        raise PlanError(
            "A balancer needs a method `assign`.",
            got=repr(made),
            next_step="see `Balancer` in freescale/balance/step_plan.py",
        )
    return cast(Balancer, made)


def assign(
    costs: FloatArray,
    *,
    tokens: IntArray,
    num_ranks: int,
    balancer: Balancer,
    max_tokens_ratio: float | None,
    speeds: FloatArray | None,
    min_count: int = 0,
) -> Partition:
    """Which rank computes which sample of a global batch; one rank computes all of them, whoever balances."""
    problem = checked_problem(costs, num_ranks, tokens=tokens, speeds=speeds)
    if num_ranks == 1 or len(costs) == 0:
        owner = np.zeros(len(costs), dtype=np.int64)
        return assignment_report(costs, owner, num_ranks, tokens=tokens, speeds=speeds)
    cap = token_cap(problem, max_tokens_ratio)
    given: dict[str, Any] = {"tokens": problem.tokens, "max_tokens": cap, "speeds": problem.given_speeds}
    if isinstance(balancer, ReportingBalancer):
        found = balancer.report(problem.costs, num_ranks, **given)
        if np.bincount(found.owner, minlength=num_ranks).min() >= min_count:
            return found
        owner = found.owner
    else:
        owner = _owner_of(balancer.assign(problem.costs, num_ranks, **given), len(costs), num_ranks)
    owner = with_least_counts(owner, problem.costs, num_ranks, least=min_count)
    return assignment_report(costs, owner, num_ranks, tokens=tokens, speeds=speeds)


def _owner_of(parts: Sequence[IntArray], num_samples: int, num_ranks: int) -> IntArray:
    """[samples] rank of each sample; every sample must be on exactly one rank."""
    if len(parts) != num_ranks:
        raise PlanError("A balancer gives one list of samples a rank.", got=len(parts), allowed=num_ranks)
    samples = np.concatenate([np.asarray(part) for part in parts])
    whole = samples.ndim == 1 and samples.dtype.kind in "iuf" and len(samples) == num_samples
    if whole and samples.dtype.kind == "f":  # an empty plain list is an array of floats
        samples = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
    if not whole or not np.array_equal(np.sort(samples), np.arange(num_samples)):
        raise PlanError(
            "A balancer must give every sample to exactly one rank.",
            got=f"{len(samples)} numbers for {num_samples} samples",
            allowed=f"0 to {num_samples - 1}, each once",
        )
    owner = np.empty(num_samples, dtype=np.int64)
    owner[samples] = np.repeat(np.arange(num_ranks), [len(part) for part in parts])
    return owner


def imbalance_in_turn(costs: FloatArray, *, num_ranks: int, speeds: FloatArray | None) -> float:
    """Latest / mean predicted finish of a rank if nothing were balanced: what balancing is held against."""
    in_turn = np.arange(len(costs), dtype=np.int64) % num_ranks
    loads = np.bincount(in_turn, weights=costs, minlength=num_ranks)
    speeds = np.ones(num_ranks) if speeds is None else speeds
    mean = float(loads.sum() / speeds.sum())
    return float((loads / speeds).max()) / mean if mean > 0 else 1.0


def plan_hash(rows: IntArray, owner: IntArray) -> str:
    """Hash of a whole assignment, for logs: ranks that differ here would train different batches."""
    digest = hashlib.blake2b(rows.tobytes(), digest_size=8)
    digest.update(owner.tobytes())
    return digest.hexdigest()
