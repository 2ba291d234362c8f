"""In a recorded graph, kernels take the place of memsets of a few words.

Products and sums of the libraries clear a counter of 4 or 16 bytes first, as a memset, six times a layer. In a graph it
is a job for another unit of the GPU: 5 us go by from the end of the kernel before it to the begin of the one behind it,
and 35 us where four ranks share a GPU. A kernel of one block takes 3 us.
"""

from __future__ import annotations

import torch

from freescale.kernels.runtime.graph_driver import GraphDriver, GraphError, driver_of


def finish_graph(graph: torch.cuda.CUDAGraph) -> None:
    """Make a graph that was recorded with `keep_graph=True` ready to be replayed."""
    nodes = driver_of(torch.cuda.current_device())
    if nodes is not None:
        fill_by_kernels(graph.raw_cuda_graph(), nodes)
    graph.instantiate()


def fill_by_kernels(graph: int, nodes: GraphDriver) -> int:
    """How many memsets kernels stand for now; where the driver refuses to look or to add, they stay what they are."""
    count = 0
    try:
        found = nodes.nodes(graph)
    except GraphError:
        return count
    for node in found:
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
