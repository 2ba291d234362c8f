"""Which samples make a step, and which rank computes which sample. Plain numpy and numba: no torch."""

from __future__ import annotations

from freescale.balance.cost_fit import CostFit, MeasuredStep, OnlineCostModel, fit_cost_model
from freescale.balance.cost_model import CostModel
from freescale.balance.global_batches import GlobalBatches
from freescale.balance.partition import Partition, assignment_report, partition, partition_report
from freescale.balance.sampler import BalancedSampler
from freescale.balance.step_plan import StepPlan

__all__ = [
    "BalancedSampler",
    "CostFit",
    "CostModel",
    "GlobalBatches",
    "MeasuredStep",
    "OnlineCostModel",
    "Partition",
    "StepPlan",
    "assignment_report",
    "fit_cost_model",
    "partition",
    "partition_report",
]
