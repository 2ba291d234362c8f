"""How long ids travel, their counts before them, and the bits that say which of them the next batch needs, too."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from freescale.balance import FloatArray
from freescale.sim.costs.moved_rows import ID_BYTES, MASK_BYTES
from freescale.sim.costs.traffic import Traffic


class IdTimes(NamedTuple):
    """[steps, ranks] seconds."""

    counts: FloatArray
    ids: FloatArray
    masks: FloatArray


def id_times(traffic: Traffic) -> IdTimes:
    """By which way ids go: as a profile has measured it, between hosts, or as rows do."""
    if traffic.own_links:
        moved, flat = traffic.rows.moved, np.ones_like(traffic.slow)
        return IdTimes(
            counts=flat * traffic.links.latency(),
            ids=traffic.travel(moved * ID_BYTES),
            masks=traffic.travel(moved * MASK_BYTES),
        )
    return _between_hosts(traffic) if traffic.features.prioritized else _between_devices(traffic)


def _between_hosts(traffic: Traffic) -> IdTimes:
    flat, links = np.ones_like(traffic.slow), traffic.links
    if traffic.hops is not None:
        counts, ids = (flat * seconds for seconds in traffic.hops.host_messages())
        return IdTimes(counts, ids, ids)
    ids = flat * links.host_messages()
    # In two stages counts are in the message of the ids.
    return IdTimes(np.zeros_like(flat) if links.ids_in_two_stages else ids, ids, ids)


def _between_devices(traffic: Traffic) -> IdTimes:
    """Where nothing is hidden ids travel as rows do."""
    rows, owners, hops, sm_free = traffic.rows, traffic.owners, traffic.hops, traffic.sm_free
    flat = np.ones_like(traffic.slow)
    if hops is None:
        counts, ids = (
            traffic.travel(flat * ID_BYTES * traffic.num_ranks),
            traffic.travel(rows.moved * ID_BYTES),
        )
    else:
        each = flat * ID_BYTES
        counts = hops.travel(each * hops.num_nodes, each * hops.local, sm_free=sm_free)
        ids = hops.travel(owners.moved * ID_BYTES, rows.moved * ID_BYTES, sm_free=sm_free)
    return IdTimes(counts, ids, np.zeros_like(flat))
