"""Which samples make a step, and which rank computes which sample. Plain numpy and numba: no torch."""

from __future__ import annotations

from freescale.balance.arrays import FloatArray, IntArray
from freescale.balance.balancers.karmarkar_karp import karmarkar_karp_equal
from freescale.balance.bucket_size import bucket_bytes
from freescale.balance.costs.cost_fit import CostFit, MeasuredStep, OnlineCostModel, fit_cost_model, table_of
from freescale.balance.costs.cost_model import COEFFICIENTS, CostModel
from freescale.balance.costs.decisions import Decisions
from freescale.balance.costs.rank_speed import at_equal_speed, measured_speeds, next_speeds, speed_errors
from freescale.balance.fewest_moves import min_moves
from freescale.balance.global_batches import GlobalBatches
from freescale.balance.partition import Partition, assignment_report, partition, partition_report
from freescale.balance.replayed_steps import MOST_REPLAYED_TOKENS
from freescale.balance.sampler import BalancedSampler, StepPlan
from freescale.balance.step_plan import Balancer, assign, named_balancer
from freescale.balance.window_batches import WindowBatches, WindowIndex
from freescale.balance.work import WHOLE, PairRule, SampleWork

__all__ = [
    "COEFFICIENTS",
    "MOST_REPLAYED_TOKENS",
    "WHOLE",
    "BalancedSampler",
    "Balancer",
    "CostFit",
    "CostModel",
    "Decisions",
    "FloatArray",
    "GlobalBatches",
    "IntArray",
    "MeasuredStep",
    "OnlineCostModel",
    "PairRule",
    "Partition",
    "SampleWork",
    "StepPlan",
    "WindowBatches",
    "WindowIndex",
    "assign",
    "assignment_report",
    "at_equal_speed",
    "bucket_bytes",
    "fit_cost_model",
    "karmarkar_karp_equal",
    "measured_speeds",
    "min_moves",
    "named_balancer",
    "next_speeds",
    "partition",
    "partition_report",
    "speed_errors",
    "table_of",
]
