"""Kernels take the places of small memsets in a graph: whatever waited for one waits for its kernel, and no less."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.kernels.runtime.graph_driver import Fill, GraphDriver, GraphError, driver_of
from freescale.kernels.runtime.graph_fills import fill_by_kernels, finish_graph


class Graph:
    """Nodes by number, and which ones each waits for; the driver refuses what is asked of some."""

    def __init__(self, before: Sequence[set[int]], fills: set[int], *, refused: set[int]) -> None:
        self.waits = dict(enumerate(map(set, before)))
        self.fills, self.refused = fills, refused
        self.stands_for: dict[int, int] = {}

    def nodes(self, graph: int) -> list[int]:
        return list(self.waits)

    def fill_of(self, node: int) -> Fill | None:
        return Fill(node, 1, 0) if node in self.fills else None

    def before(self, node: int) -> list[int]:
        if node in self.refused and node % 2:
            raise GraphError("edges of another kind")
        return sorted(self.waits[node])

    def behind(self, node: int) -> list[int]:
        return [other for other, before in self.waits.items() if node in before]

    def add(self, graph: int, fill: Fill, *, before: Sequence[int]) -> int:
        made = max(self.waits) + 1
        self.waits[made] = set(before)
        self.stands_for[made] = fill.address
        return made

    def connect(self, graph: int, node: int, *, behind: Sequence[int]) -> None:
        if self.stands_for[node] in self.refused:
            raise GraphError("no")
        for other in behind:
            self.waits[other].add(node)

    def remove(self, node: int) -> None:
        del self.waits[node]
        for before in self.waits.values():
            before.discard(node)

    def order(self) -> set[tuple[int, int]]:
        """Who waits for whom, directly or not; a kernel counts as what it stands for."""
        name = {node: self.stands_for.get(node, node) for node in self.waits}
        found: set[tuple[int, int]] = set()
        for node in self.waits:
            todo, seen = [node], {node}
            while todo:
                for each in self.waits[todo.pop()] - seen:
                    seen.add(each)
                    todo.append(each)
                    found.add((name[node], name[each]))
        return found


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[set[int]], set[int], set[int]]:
    count = draw(st.integers(1, 12))
    before = [draw(st.sets(st.integers(0, node - 1), max_size=3)) if node else set() for node in range(count)]
    some = st.sets(st.integers(0, count - 1))
    return before, draw(some), draw(some)


@given(graphs())
def test_the_order_of_all_work_is_kept(drawn: tuple[list[set[int]], set[int], set[int]]) -> None:
    before, fills, refused = drawn
    graph = Graph(before, fills, refused=refused)
    wanted = graph.order()
    filled = fill_by_kernels(0, graph)  # type: ignore[arg-type]
    assert graph.order() == wanted
    assert filled.kernels == len(fills - refused)
    assert (filled.refused is not None) == bool(fills & refused)
    kernels = [graph.stands_for[node] for node in graph.waits if node in graph.stands_for]
    assert sorted(kernels) == sorted(fills - refused)
    assert fills & set(graph.waits) == fills & refused


class Library:
    """A driver with one memset."""

    def __init__(self, **memset: int) -> None:
        self._memset = memset

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:  # noqa: N802
        kind._obj.value = 2
        return 0

    def cuGraphMemsetNodeGetParams(self, node: Any, params: Any) -> int:  # noqa: N802
        for name, value in self._memset.items():
            setattr(params._obj, name, value)
        return 0


@pytest.mark.parametrize(
    ("memset", "fill"),
    [
        ({"element_bytes": 1, "width": 8, "value": 0xAB}, Fill(64, 2, 0xABABABAB)),
        ({"element_bytes": 1, "width": 4, "value": 0xFFFFFFFF}, Fill(64, 1, 0xFFFFFFFF)),
        ({"element_bytes": 2, "width": 2, "value": 0x1234}, Fill(64, 1, 0x12341234)),
        ({"element_bytes": 4, "width": 3, "value": 0x12345678}, Fill(64, 3, 0x12345678)),
        ({"element_bytes": 1, "width": 6, "value": 0}, None),
        ({"element_bytes": 4, "width": 1025, "value": 0}, None),
        ({"element_bytes": 4, "width": 1, "value": 0, "height": 2}, None),
        ({"element_bytes": 4, "width": 1, "value": 0, "address": 66}, None),
    ],
)
def test_a_memset_is_told_by_words(memset: dict[str, int], fill: Fill | None) -> None:
    driver = GraphDriver(Library(**{"address": 64, "height": 1, **memset}))
    assert driver.fill_of(1) == fill


def test_a_driver_without_these_calls_refuses() -> None:
    driver: Any = GraphDriver(object())
    with pytest.raises(GraphError, match="no cuModuleLoadData"):
        driver.load()
    assert fill_by_kernels(0, driver) == (0, "this driver has no cuGraphGetNodes")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_recorded_graph_has_no_small_memset_and_the_same_results() -> None:
    words = torch.full((3,), 7, dtype=torch.int32, device="cuda")
    # So many are added up by several blocks, which count each other.
    numbers = torch.ones(1 << 24, device="cuda")
    large = torch.ones(4096, device="cuda")
    a = torch.randn(2048, 512, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    expected = a @ b
    library, graph = ctypes.CDLL("libcuda.so.1"), torch.cuda.CUDAGraph(keep_graph=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        words.add_(1)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        size = ctypes.c_size_t(8)
        assert not library.cuMemsetD8Async(ctypes.c_uint64(words.data_ptr()), 0x12, size, stream)
        words.add_(1)
        large.zero_()
        product = a @ b
        total = numbers.sum()
    driver = driver_of(torch.cuda.current_device())
    assert not isinstance(driver, str), driver
    raw = graph.raw_cuda_graph()
    memsets = [node for node in driver.nodes(raw) if driver.fill_of(node) is not None]
    assert memsets, "nothing to do: the test says nothing"
    assert finish_graph(graph) is None
    assert not [node for node in driver.nodes(raw) if driver.fill_of(node) is not None]
    for turn in range(1, 4):
        large.fill_(1)
        graph.replay()
        torch.cuda.synchronize()
        assert words.tolist() == [0x12121213, 0x12121213, 7 + 2 * turn]
        assert not large.any()
        assert torch.equal(product, expected)
        assert float(total) == 1 << 24
