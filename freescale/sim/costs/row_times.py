"""How long rows of tables take: found, gathered by owners, sent out, and updated when their gradients are home."""

from __future__ import annotations

from typing import NamedTuple

from freescale.balance import FloatArray
from freescale.sim.costs.traffic import Traffic


class RowTimes(NamedTuple):
    """[steps, ranks] seconds.

    Without a word more: all rows. `late` and `urgent`: those that the next batch needs, too; `early` and `parked`: the
    others.
    """

    find: FloatArray
    gather: FloatArray
    gather_late: FloatArray
    gather_early: FloatArray
    rows: FloatArray
    late_rows: FloatArray
    early_rows: FloatArray
    grads: FloatArray
    urgent_grads: FloatArray
    parked_grads: FloatArray
    update: FloatArray
    update_urgent: FloatArray
    update_parked: FloatArray


def row_times(traffic: Traffic) -> RowTimes:
    """What is done with rows, and how long they travel."""
    owners, at_owner = traffic.owners, traffic.at_owner
    rows, grads = traffic.both_ways("moved")
    late_rows, urgent_grads = traffic.both_ways("shared")
    early_rows, parked_grads = traffic.both_ways("alone")
    return RowTimes(
        find=at_owner(traffic.rows.asked, "find"),
        gather=at_owner(owners.served, "gather"),
        gather_late=at_owner(owners.served_shared, "gather"),
        gather_early=at_owner(owners.served_alone, "gather"),
        rows=rows,
        late_rows=late_rows,
        early_rows=early_rows,
        grads=grads,
        urgent_grads=urgent_grads,
        parked_grads=parked_grads,
        update=at_owner(owners.served, "update"),
        update_urgent=at_owner(owners.served_shared, "update"),
        update_parked=at_owner(owners.served_alone, "update"),
    )
