"""In a recorded graph, kernels take the place of memsets of a few words.

Products and sums of the libraries clear a counter of 4 or 16 bytes first, as a memset, six times a layer. In a graph it
is a job for another unit of the GPU: 5 us go by from the end of the kernel before it to the begin of the one behind it,
and 35 us where four ranks share a GPU. A kernel of one block takes 3 us.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from freescale.kernels.runtime.graph_driver import Fill, GraphError, driver_of


class Nodes(Protocol):
    """What is asked of the driver; tests have graphs of their own."""

    def nodes(self, graph: int) -> list[int]:
        """All of them."""

    def fill_of(self, node: int) -> Fill | None:
        """What a node fills, if it is a memset of a few words."""

    def before(self, node: int) -> list[int]:
        """The nodes that it waits for."""

    def behind(self, node: int) -> list[int]:
        """The nodes that wait for it."""

    def add(self, graph: int, fill: Fill, *, before: Sequence[int]) -> int:
        """A kernel that fills, behind these nodes."""

    def connect(self, graph: int, node: int, *, behind: Sequence[int]) -> None:
        """Let these nodes wait for it."""

    def remove(self, node: int) -> None:
        """And whatever connects it."""


def finish_graph(graph: torch.cuda.CUDAGraph) -> None:
    """Make a graph that was recorded with `keep_graph=True` ready to be replayed."""
    nodes = driver_of(torch.cuda.current_device())
    if nodes is not None:
        fill_by_kernels(graph.raw_cuda_graph(), nodes)
    graph.instantiate()


def fill_by_kernels(graph: int, nodes: Nodes) -> int:
    """How many memsets kernels stand for now; where the driver refuses, they stay what they are."""
    count = 0
    for node in nodes.nodes(graph):
        try:
            fill = nodes.fill_of(node)
            if fill is None:
                continue
            before, behind = nodes.before(node), nodes.behind(node)
            made = nodes.add(graph, fill, before=before)
        except GraphError:
            continue
        try:
            nodes.connect(graph, made, behind=behind)
        except GraphError:
            nodes.remove(made)
            continue
        nodes.remove(node)
        count += 1
    return count
