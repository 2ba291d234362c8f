"""Rows asked for once a node: one hop between nodes, of what a node wants, and one inside it, of what a rank wants.

    a rank   ──inside──>   a relay: its share of what the node wants   ──between──>   the owner, asked once a node
             7 messages                                                31 messages    for 32 nodes of 8

Assumed, since no cluster has run it: ids of the ranks of a node are drawn independently; a relay copies rows out, and
sums gradients, in the time an owner would gather as many; the hops follow each other and share nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from freescale.balance import FloatArray
from freescale.sim.costs.links import Links
from freescale.sim.inputs.cluster import Cluster


@dataclass(frozen=True)
class NodeHops:
    """Both hops between so many ranks of a cluster.

    Args:
        cluster: its rates.
        num_ranks: all ranks; several full nodes.
    """

    cluster: Cluster
    num_ranks: int

    @property
    def local(self) -> int:
        """Ranks of a node."""
        return self.cluster.gpus_per_node

    @property
    def num_nodes(self) -> int:
        """Nodes."""
        return self.num_ranks // self.local

    @property
    def inside(self) -> Links:
        """Between the ranks of a node."""
        return Links(self.cluster, self.local)

    @property
    def between(self) -> Links:
        """Between ranks at the same place of their nodes."""
        return Links(replace(self.cluster, gpus_per_node=1), self.num_nodes)

    def travel(self, between: FloatArray, inside: FloatArray, *, sm_free: bool = False) -> FloatArray:
        """Seconds of an exchange in both hops: each rank's bytes between nodes and inside, its own share included."""
        return self.between.all_to_all(between, sm_free=sm_free) + self.inside.all_to_all(
            inside, sm_free=sm_free
        )

    def host_messages(self) -> tuple[float, float]:
        """Seconds of counts, and of ids or bits, between hosts; between many nodes counts go with the ids."""
        inside = self.inside.latency(per_peer=False) + 1e-6 * self.cluster.inside_message_us * (
            self.local - 1
        )
        between = self.between.host_messages()
        return inside + (0.0 if self.between.ids_in_two_stages else between), inside + between

    def busiest_relay(self, served: FloatArray) -> FloatArray:
        """[steps, 1] what the busiest relay of a node hands on: rows of the owners at its place, of all nodes."""
        by_place = served.reshape(len(served), self.num_nodes, self.local).mean(axis=1)
        return np.asarray(by_place.max(axis=1, keepdims=True))


def can_hop(cluster: Cluster, num_ranks: int) -> bool:
    """Whether there are several full nodes with several ranks each."""
    local = cluster.gpus_per_node
    return local > 1 and num_ranks > local and num_ranks % local == 0
