"""What ranks send each other in a step, and over which links: what the times of rows, ids and compute are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from freescale.balance import FloatArray
from freescale.sim.costs.links import Links
from freescale.sim.costs.moved_rows import MovedRows, moved_rows
from freescale.sim.costs.node_hops import NodeHops, can_hop
from freescale.sim.costs.plans import Loads
from freescale.sim.costs.rank_links import links_of, measured_sum
from freescale.sim.costs.setting import Features, Setting


class SentBytes(NamedTuple):
    """Means of a rank and step; `network_bytes` are those to and from other nodes."""

    exposed_bytes: float
    hidden_bytes: float
    network_bytes: float


@dataclass(frozen=True, eq=False)
class Traffic:
    """Rows of planned steps on their links.

    Args:
        setting: workload, profile, cluster.
        features: what is on.
        num_ranks: all ranks.
        slow: [steps, ranks] what a profiled time is multiplied with.
        rows: as ranks ask for them.
        owners: as they are asked for: the same, or with node hops what relays want.
        hops: where a node asks once.
        links: between all ranks.
        relay_work: what a relay does with rows that pass: it copies them out, or sums their gradients.
    """

    setting: Setting
    features: Features
    num_ranks: int
    slow: FloatArray
    rows: MovedRows
    owners: MovedRows
    hops: NodeHops | None
    links: Links
    relay_work: Mapping[str, FloatArray] = field(default_factory=dict)

    @property
    def own_links(self) -> bool:
        """Whether ranks talk at the speed of their profile."""
        return self.setting.profile.has_links

    @property
    def sm_free(self) -> bool:
        """Whether exchanges hold no SM."""
        return self.setting.is_sm_free(self.features, self.num_ranks)

    def at_owner(self, counts: FloatArray, name: str) -> FloatArray:
        """Seconds in which owners handle so many rows, by a line of the profile."""
        return self.setting.profile.times[name].seconds(tokens=counts) * self.slow

    def travel(self, num_bytes: FloatArray, served: FloatArray | None = None) -> FloatArray:
        """Everybody asks everybody: nobody has all before the busiest owner is through."""
        busiest = num_bytes if served is None else np.maximum(num_bytes, served.max(axis=1, keepdims=True))
        return self.links.all_to_all(busiest, sm_free=self.sm_free)

    def both_ways(self, which: str) -> tuple[FloatArray, FloatArray]:
        """Rows on their way out, as they are stored, and their gradients on their way home."""
        share = self.setting.workload.stored_share
        num_bytes, served = _bytes_of(self.rows, which)
        if self.hops is None:
            return self.travel(share * num_bytes, share * served), self.travel(num_bytes, served)
        asked, at_owners = _bytes_of(self.owners, which)
        between = np.maximum(asked, at_owners.max(axis=1, keepdims=True))
        inside = np.maximum(num_bytes, self.hops.busiest_relay(served))
        out, home = (
            self.hops.travel(part * between, part * inside, sm_free=self.sm_free) + self.relay_work[which]
            for part in (share, 1.0)
        )
        return out, home

    def sum_of(self, nbytes: float) -> float:
        """Seconds to add up so many bytes of dense gradients."""
        if self.own_links:
            return measured_sum(self.setting, nbytes, self.num_ranks)
        return self.links.sum_of(nbytes)

    def sent_bytes(self) -> SentBytes:
        """Of rows, gradients and ids."""
        how: dict[str, Any] = {
            "prioritized": self.features.prioritized,
            "splits": self.features.splits,
            "stored_share": self.setting.workload.stored_share,
        }
        asking = self.num_ranks if self.hops is None else self.hops.local
        exposed, hidden = self.rows.bytes_of_a_rank(asking, **how)
        if self.hops is None:
            network = _away_from_node(exposed + hidden, self.setting, self.num_ranks)
            return SentBytes(exposed, hidden, network)
        more = self.owners.bytes_of_a_rank(self.hops.num_nodes, **how)
        return SentBytes(exposed + more[0], hidden + more[1], sum(more))


def traffic_of(setting: Setting, loads: Loads, features: Features, *, num_ranks: int) -> Traffic:
    """What ranks with these loads have to send each other."""
    slow = setting.noise(loads.tokens.shape) * setting.scale() / setting.speeds(num_ranks)
    placed: dict[str, Any] = {"even": features.even_owners, "num_ranks": num_ranks, "seed": setting.seed}
    rows = owners = moved_rows(setting.workload, loads, dedup=features.dedup, **placed)
    hops, relay_work = None, {}
    if features.node_dedup and can_hop(setting.cluster, num_ranks):
        hops = NodeHops(setting.cluster, num_ranks)
        owners = moved_rows(setting.workload, loads, dedup=True, **placed, local=hops.local)
        handed_on = {"moved": rows.moved, "shared": rows.shared, "alone": rows.alone}
        gather = setting.profile.times["gather"]
        relay_work = {name: gather.seconds(tokens=each) * slow for name, each in handed_on.items()}
    links = Links(links_of(setting, num_ranks), num_ranks)
    return Traffic(setting, features, num_ranks, slow, rows, owners, hops, links, relay_work)


def _bytes_of(rows: MovedRows, which: str) -> tuple[FloatArray, FloatArray]:
    """Bytes asked for, and served by owners: all, those `shared` with the next batch, or those `alone`."""
    if which == "moved":
        return rows.moved_bytes, rows.served_bytes
    if which == "shared":
        return rows.shared_bytes, rows.served_shared_bytes
    return rows.alone_bytes, rows.served_alone_bytes


def _away_from_node(num_bytes: float, setting: Setting, num_ranks: int) -> float:
    """Of bytes that go to and come from all other ranks alike, those of other nodes."""
    local = min(setting.cluster.gpus_per_node, num_ranks)
    return num_bytes * (num_ranks - local) / max(1, num_ranks - 1)
