"""The plan of one step as one rank sees it, made from a global batch without asking any other rank."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from freescale.balance.arrays import FloatArray, IntArray
from freescale.balance.partition import Partition, assignment_report, partition_report


class Cost(Protocol):
    """Predicts what a sample of a given length costs; milliseconds, or any unit proportional to time."""

    def cost(self, lengths: IntArray) -> FloatArray:
        """[n] cost of each sample."""


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


def assign(
    costs: FloatArray,
    *,
    tokens: IntArray,
    num_ranks: int,
    balanced: bool,
    max_tokens_ratio: float | None,
    speeds: FloatArray | None,
) -> Partition:
    """Which rank computes which sample of a global batch; unbalanced, they are dealt out in turn."""
    if not balanced or num_ranks == 1:
        in_turn = np.arange(len(costs), dtype=np.int64) % num_ranks
        return assignment_report(costs, in_turn, num_ranks, tokens=tokens, speeds=speeds)
    return partition_report(costs, num_ranks, tokens=tokens, max_tokens_ratio=max_tokens_ratio, speeds=speeds)


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
