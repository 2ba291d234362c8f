"""The schedules of the project as programs for the engine: what happens in which order, and what waits for what.

They follow `pipeline/schedule.py` (plain) and the drawings in `pipeline/prioritized/`: `pipeline.py`, `urgent_chain.py`
(split). The sum of the losses comes after the optimizer step, so it opens the next one; on GPUs it takes nothing. GPUs
send rows home while their dense gradients are summed (`train/compute/step.py`); sums on CPUs end with the backward.
Those of a split backward travel on beside the next forward (`train/compute/late_update.py`), and on CPUs do not.
"""

from __future__ import annotations

from dataclasses import replace

from freescale.sim.costs.durations import Durations
from freescale.sim.engine.stages import (
    LAST,
    LATER,
    SIDE,
    URGENT,
    Exchange,
    Mark,
    Program,
    Ready,
    Start,
    Wait,
    Work,
)


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


def split(d: Durations, *, late: bool = False) -> Program:
    """Gradients of weights after those of rows: what the next batch waits for travels beside them.

    Args:
        d: seconds of every part.
        late: sums of dense gradients are waited for, and weights updated, where the next forward needs them; else at
            the end of the step.

    Weight gradients are made, their sums begun, and weights needed in one order, from the lowest layer up. A run waits
    and updates piece by piece; here it waits twice, for the first piece when the forward begins and for the last when
    it gets to the layers of that one. The forward ends at the same moment if pieces, their gradients and their layers
    take equally long, which is the simplification: all that can hold it up is then the first piece, the last, or all of
    them in turn. Idle time before layers in between is counted at the last. The head's share of the forward is spread
    over the layers, and weights that belong to none are in the first piece, as they are in a run. The last step of a
    run waits for its own sums. Nobody waits for the sum of the losses: hosts that run ahead of their GPUs look at it a
    step later, and no sum of gradients at the end of a step brings ranks together before it.
    """
    begin: Program = (
        Work("load and plan", d.host, kind="host"),
        Wait("wait for OL rows", "late rows"),
        *_hidden(d),
    )
    chain: Program = (
        Start(URGENT),
        Wait("wait for the split", "split", lane=URGENT),
        Exchange("send OL gradients", d.urgent_grads, whole=True, lane=URGENT),
        Work("apply OL gradients", d.update_urgent, lane=URGENT),
        Wait("wait for NOL rows", "early rows", lane=URGENT, this_step=True),
        Work("gather OL rows", d.gather_late, lane=URGENT),
        Exchange("fetch OL rows", d.late_rows, lane=URGENT),
        Mark("late rows", lane=URGENT),
    )
    update = Work("update weights", d.optimizer)
    if not late:
        compute = Work("forward and backward", d.compute)
        dense = Exchange("sum dense gradients", d.dense_last, whole=True, lead=d.lead, total=d.dense_total)
        losses = Exchange("sum the loss", d.control, whole=True)
        return (losses, *begin, compute, *chain, Work("weight gradients", d.weights), dense, update)
    piece, others = d.bucket_share, 1 - d.bucket_share
    lower, first_gradients = others * d.forward, piece * d.weights
    first = Exchange("sum dense gradients", d.dense_last, whole=True, ready="first piece")
    last = replace(first, lead=d.weights - first_gradients, total=d.dense_total, ready="last piece")
    return (
        *begin,
        first,
        Work("update weights", others * d.optimizer, when=LATER),
        Work("forward and backward", lower),
        last,
        Work("update weights", piece * d.optimizer, when=LATER),
        Work("forward and backward", d.compute - lower),
        *chain,
        Work("weight gradients", first_gradients),
        Ready("first piece"),
        Work("weight gradients", d.weights - first_gradients),
        Ready("last piece"),
        replace(last, when=LAST),
        replace(update, when=LAST),
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
