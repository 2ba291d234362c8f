"""Copy rates of a GPU; what exchanges cost the compute beside them, by kernels and by copy engines; gaps of graphs."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from freescale.profiling.stopwatch import Stopwatch

_COPY_BYTES = 256 << 20
_PIECE_BYTES = 32 << 20
# A copy by a kernel must take longer than to start it, or only few are under way beside the products.
_LONG_PIECE_BYTES = 512 << 20
# What it takes to fill NVLink 4 in one direction (545 GB/s on an H200).
_BLOCKS = 16
_PRODUCTS = 20
_SIZE = 8192
_CUTS, _KERNELS = 16, 4
_KERNEL_NUMBERS = 1 << 22


def measure_gpu(device: torch.device) -> dict[str, float]:
    """Rates in 10^9 bytes a second, slowdowns as times the time alone."""
    return {**_copy_rates(device), **_slowdowns(device), "graph_cut_us": graph_cut_us(device)}


def _copy_rates(device: torch.device) -> dict[str, float]:
    on_gpu, other = (torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    on_host = torch.zeros(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)

    def rate(copy: Callable[[], object]) -> float:
        copy()
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(8):
            copy()
        torch.cuda.synchronize(device)
        return 8 * _COPY_BYTES / (time.perf_counter() - began) / 1e9

    return {
        "host_to_device_gb_per_s": rate(lambda: on_gpu.copy_(on_host, non_blocking=True)),
        "device_to_host_gb_per_s": rate(lambda: on_host.copy_(on_gpu, non_blocking=True)),
        "device_to_device_gb_per_s": rate(lambda: other.copy_(on_gpu)),
    }


def _slowdowns(device: torch.device) -> dict[str, float]:
    """Matrix products alone, then beside copies that go on for as long as they do."""
    from freescale.kernels.runtime import copy_with_blocks

    left, right = (torch.randn(_SIZE, _SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    source, target = (torch.zeros(_PIECE_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    long_source, long_target = (
        torch.zeros(_LONG_PIECE_BYTES, dtype=torch.uint8, device=device) for _ in range(2)
    )
    leaving, coming = (torch.zeros(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    streams = [torch.cuda.Stream(device, priority=-1) for _ in range(2)]

    def products_ms(beside: Callable[[], None] | None, copies: int) -> float:
        torch.cuda.synchronize(device)
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(copies):
            if beside is not None:
                beside()
        begun.record()
        for _ in range(_PRODUCTS):
            torch.mm(left, right, out=product)
        ended.record()
        torch.cuda.synchronize(device)
        return float(begun.elapsed_time(ended))

    def by_kernels() -> None:
        with torch.cuda.stream(streams[0]):
            copy_with_blocks(long_target, long_source, blocks=_BLOCKS)

    def by_engines() -> None:
        with torch.cuda.stream(streams[0]):
            leaving.copy_(source, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            target.copy_(coming, non_blocking=True)

    products_ms(by_kernels, 1)
    products_ms(by_engines, 1)
    alone: list[float] = []
    kernels: list[float] = []
    engines: list[float] = []
    for _ in range(5):
        alone.append(products_ms(None, 0))
        # Enough pieces to last for all products, at the rate each way has.
        kernels.append(products_ms(by_kernels, 80))
        engines.append(products_ms(by_engines, 120))
    base = sorted(alone)[2]
    return {
        "sm_kernel_slowdown": max(1.0, sorted(kernels)[2] / base),
        "sm_free_slowdown": max(1.0, sorted(engines)[2] / base),
    }


def graph_cut_us(device: torch.device) -> float:
    """Microseconds by which a GPU stands still longer between two CUDA graphs than between two kernels of one."""
    with torch.cuda.device(device):
        return _graph_cut_us(device)


def _graph_cut_us(device: torch.device) -> float:
    numbers = torch.zeros(_KERNEL_NUMBERS, device=device)

    def graph_of(num_kernels: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may use the GPU meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(num_kernels):
                numbers.add_(1.0)
        return graph

    numbers.add_(1.0)  # loads the kernel
    whole, parts = [graph_of(_CUTS * _KERNELS)], [graph_of(_KERNELS) for _ in range(_CUTS)]
    watch = Stopwatch(device)

    def ms_of(graphs: list[torch.cuda.CUDAGraph]) -> float:
        def replay() -> None:
            for graph in graphs:
                graph.replay()

        found = []
        for _ in range(9):
            watch.run(replay)
            found.append(watch.ms)
        return sorted(found)[len(found) // 2]

    return 1000 * max(0.0, ms_of(parts) - ms_of(whole)) / (_CUTS - 1)
