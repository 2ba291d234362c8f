"""How long exchanges take on a cluster: latency, and bytes over the slower of the two ways a rank sends at once.

Small messages do not reach the rate of a network: one of `half_message_kb` takes twice as long as its bytes. A rank of
256 sends 255 messages, so the more ranks there are the less of the rate is reached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from freescale.balance import FloatArray
from freescale.sim.inputs.cluster import Cluster


@dataclass(frozen=True)
class Links:
    """Exchanges between so many ranks of a cluster.

    Args:
        cluster: its rates.
        num_ranks: all ranks, spread evenly over full nodes.
    """

    cluster: Cluster
    num_ranks: int

    @property
    def _local(self) -> int:
        return min(self.cluster.gpus_per_node, self.num_ranks)

    def latency(self, *, per_peer: bool = True) -> float:
        """Seconds of an exchange of nothing."""
        if self.num_ranks == 1:
            return 0.0
        microseconds = self.cluster.latency_us
        if self.num_ranks > self._local:
            microseconds += self.cluster.node_latency_us
        if per_peer:
            microseconds += self.cluster.per_peer_us * (self.num_ranks - 1)
        return 1e-6 * microseconds

    @property
    def _peers_outside(self) -> int:
        return self.num_ranks - self._local

    @property
    def ids_in_two_stages(self) -> bool:
        """Whether ids go by nodes: where there are several, and they are not told to go rank by rank."""
        return self._peers_outside > 0 and self.cluster.id_stages == 2

    def host_messages(self) -> float:
        """Seconds of an exchange between hosts, of next to nothing for each rank: ids, their counts, bits about them.

        In a node over sockets; between nodes gloo has a message for every rank of another one, or in two stages for
        every other node, and sockets one for every rank of this one.
        """
        cluster = self.cluster
        if not self.ids_in_two_stages:
            return self.latency() + 1e-6 * cluster.gloo_message_us * self._peers_outside
        messages = cluster.gloo_message_us * (math.ceil(self.num_ranks / self._local) - 1)
        messages += cluster.inside_message_us * (self._local - 1)
        work = cluster.ids_exchange_us + cluster.ids_rank_us * self.num_ranks
        # The second stage begins when the first is through.
        trips = self.latency(per_peer=False) + 1e-6 * cluster.latency_us
        return trips + 1e-6 * (messages + work)

    def all_to_all(self, nbytes: FloatArray | float, *, sm_free: bool = False) -> FloatArray:
        """Seconds to move each rank's `nbytes`, its own share of 1 / ranks included, which does not travel.

        SM-free exchanges inside a node go by copy engines at the full rate; between nodes through host memory.
        """
        peers = self.num_ranks - 1
        away = np.asarray(nbytes, dtype=np.float64) * peers / self.num_ranks
        if peers == 0:
            return np.zeros_like(away)
        inside = (self._local - 1) / peers
        efficiency = 1e9 * self.cluster.link_efficiency
        outside_rate = self.cluster.inter_gb_per_s()
        if sm_free:
            outside_rate = min(outside_rate, self.cluster.host_staged_gb_per_s)
        ways = (
            away * inside / (efficiency * self.cluster.nvlink_gb_per_s),
            (away * (1 - inside) + self._filler(away)) / (efficiency * outside_rate),
        )
        return np.asarray(self.latency() + np.maximum(*ways), dtype=np.float64)

    def _filler(self, away: FloatArray) -> FloatArray:
        """Bytes that could have travelled in the time messages to other nodes cost beside their own bytes."""
        return np.where(away > 0, 1e3 * self.cluster.half_message_kb * self._peers_outside, 0.0)

    def sum_of(self, nbytes: float) -> float:
        """Seconds to add values up over all ranks: inside nodes, between them with every adapter, inside again."""
        if self.num_ranks == 1 or nbytes == 0:
            return 0.0
        local, nodes = self._local, math.ceil(self.num_ranks / self._local)
        efficiency = 1e9 * self.cluster.link_efficiency
        inside = 2 * (local - 1) / local * nbytes / (efficiency * self.cluster.nvlink_gb_per_s)
        outside = 2 * (nodes - 1) / nodes * nbytes / local / (efficiency * self.cluster.inter_gb_per_s())
        # A tree over the nodes: every doubling of them adds a hop.
        hops = self.cluster.sum_hop_us * math.ceil(math.log2(max(1, nodes)))
        return 1e-6 * (self.cluster.latency_us + hops) + inside + outside
