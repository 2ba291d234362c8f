"""The schedules of the project as programs for the engine: what happens in which order, and what waits for what.

They follow `pipeline/schedule.py` (plain) and the drawings in `pipeline/prioritized/`: `pipeline.py`, `urgent_chain.py`
(split). The sum of the losses comes after the optimizer step, so it opens the next one; on GPUs it takes nothing. GPUs
send rows home while their dense gradients are summed (`train/compute/step.py`); sums on CPUs end with the backward.
"""

from __future__ import annotations

from dataclasses import replace

from freescale.sim.costs.durations import Durations
from freescale.sim.engine.stages import SIDE, URGENT, Exchange, Mark, Program, Ready, Start, Wait, Work


def plain(d: Durations, *, rows_first: bool = False) -> Program:
    """Look rows up, compute, send gradients home, one after the other."""
    return (
        Exchange("sum the loss", d.control, whole=True),
        Work("load and plan", d.host, kind="host"),
        Work("find distinct rows", d.find),
        Exchange("exchange counts", d.counts, whole=True),
        Exchange("exchange ids", d.ids, whole=True),
        Work("gather rows", d.gather),
        Exchange("exchange rows", d.rows),
        Work("forward and backward", d.compute),
        *_updates(
            d,
            (Exchange("send row gradients home", d.grads, whole=True), Work("update rows", d.update)),
            rows_first=rows_first,
        ),
    )


def prioritized(d: Durations, *, rows_first: bool = False) -> Program:
    """Only rows and gradients that the neighbouring batch shares travel while the rank stands still."""
    return (
        Exchange("sum the loss", d.control, whole=True),
        Work("load and plan", d.host, kind="host"),
        Wait("wait for NOL rows", "early rows"),
        Work("gather OL rows", d.gather_late),
        Exchange("fetch OL rows", d.late_rows),
        *_hidden(d),
        Work("forward and backward", d.compute),
        *_updates(
            d,
            (
                Wait("wait for the split", "split"),
                Exchange("send OL gradients", d.urgent_grads, whole=True),
                Work("apply OL gradients", d.update_urgent),
            ),
            rows_first=rows_first,
        ),
    )


def split(d: Durations) -> Program:
    """Gradients of weights after those of rows: what the next batch waits for travels beside them."""
    return (
        Exchange("sum the loss", d.control, whole=True),
        Work("load and plan", d.host, kind="host"),
        Wait("wait for OL rows", "late rows"),
        *_hidden(d),
        Work("forward and backward", d.compute),
        Start(URGENT),
        Wait("wait for the split", "split", lane=URGENT),
        Exchange("send OL gradients", d.urgent_grads, whole=True, lane=URGENT),
        Work("apply OL gradients", d.update_urgent, lane=URGENT),
        Wait("wait for NOL rows", "early rows", lane=URGENT, this_step=True),
        Work("gather OL rows", d.gather_late, lane=URGENT),
        Exchange("fetch OL rows", d.late_rows, lane=URGENT),
        Mark("late rows", lane=URGENT),
        Work("weight gradients", d.weights),
        Exchange("sum dense gradients", d.dense_last, whole=True, lead=d.lead, total=d.dense_total),
        Work("update weights", d.optimizer),
    )


def _hidden(d: Durations) -> Program:
    """What the side does under the compute of a step."""
    return (
        Start(),
        Exchange("send NOL gradients", d.parked_grads, whole=True, lane=SIDE),
        Work("apply NOL gradients", d.update_parked, lane=SIDE),
        Work("gather NOL rows", d.gather_early, lane=SIDE),
        Exchange("fetch NOL rows", d.early_rows, lane=SIDE),
        Mark("early rows"),
        Work("find distinct rows", d.find, lane=SIDE),
        Exchange("exchange counts", d.counts, whole=True, lane=SIDE),
        Exchange("exchange ids", d.ids, whole=True, lane=SIDE),
        Exchange("split into OL and NOL", d.masks, whole=True, lane=SIDE),
        Mark("split"),
    )


def _updates(d: Durations, rows: Program, *, rows_first: bool) -> Program:
    """What follows the backward: dense gradients and weights, then rows; or rows while dense gradients are added up."""
    weights = Work("update weights", d.optimizer)
    dense = Exchange("sum dense gradients", d.dense_last, whole=True, lead=d.lead, total=d.dense_total)
    if not rows_first:
        return (dense, weights, *rows)
    return (Ready("dense"), *rows, replace(dense, ready="dense"), weights)
