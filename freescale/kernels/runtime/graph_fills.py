"""In a recorded graph, kernels take the place of memsets of a few words.

Products and sums of the libraries clear a counter of 4 or 16 bytes first, as a memset, six times a layer. In a graph it
is a job for another unit of the GPU: 5 us go by from the end of the kernel before it to the begin of the one behind it,
and 35 us where four ranks share a GPU. A kernel of one block takes 3 us.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from freescale.kernels.runtime.graph_driver import GraphDriver, GraphError, driver_of


class Filled(NamedTuple):
    """How many memsets kernels stand for now, and what the driver refused of the others."""

    kernels: int
    refused: str | None = None


def finish_graph(graph: torch.cuda.CUDAGraph) -> str | None:
    """Make a graph that was recorded with `keep_graph=True` ready to be replayed; why memsets stay in it, if so."""
    nodes = driver_of(torch.cuda.current_device())
    refused = nodes if isinstance(nodes, str) else fill_by_kernels(graph.raw_cuda_graph(), nodes).refused
    graph.instantiate()
    return refused


def fill_by_kernels(graph: int, nodes: GraphDriver) -> Filled:
    """Where the driver refuses to look or to add, memsets stay what they are."""
    count, refused = 0, None
    try:
        found = nodes.nodes(graph)
    except GraphError as error:
        return Filled(0, str(error))
    for node in found:
        try:
            fill = nodes.fill_of(node)
            if fill is None:
                continue
            before, behind = nodes.before(node), nodes.behind(node)
            made = nodes.add(graph, fill, before=before)
        except GraphError as error:
            refused = str(error)
            continue
        try:
            nodes.connect(graph, made, behind=behind)
        except GraphError as error:
            refused = str(error)
            nodes.remove(made)
            continue
        nodes.remove(node)
        count += 1
    return Filled(count, refused)
