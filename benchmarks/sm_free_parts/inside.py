"""What copies inside a GPU wait for, and what several of them cost beside products."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from freescale.comm.rings.copies_inside import DriverInside
from freescale.comm.rings.cuda_driver import Copy, CudaDriver
from freescale.comm.world.ranks import Ranks
from freescale.prove.stamped_rows import synchronize_all

HOLD_MS = 29
LATEST_S = 0.1
PIECES, SIZES = 7, (64 << 10, 512 << 10, 4 << 20)
_REGISTERS = 200

_HOLDER = r"""
extern "C" __global__ void __launch_bounds__(THREADS) holder(volatile int* up, volatile float* data, int hold_us) {
    BEFORE
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned long long start, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
        *up = 1;
        do {
            __nanosleep(2000);
            asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        } while (now - start < 1000ull * hold_us);
    }
    __syncthreads();
    AFTER
}
"""
_READ = 'float r[COUNT]; _Pragma("unroll") for (int i = 0; i < COUNT; i++) r[i] = data[i * THREADS + threadIdx.x];'
_WRITE = '_Pragma("unroll") for (int i = 0; i < COUNT; i++) data[i * THREADS + threadIdx.x] = r[i];'


class Holder:
    """A kernel whose blocks are all resident and hold one thing of every SM."""

    def __init__(
        self, device: torch.device, *, blocks_an_sm: int, threads: int, shared: int = 0, registers: int = 0
    ) -> None:
        from gpu_kernels import compile_kernel

        facts: Any = torch.cuda.get_device_properties(device)
        parts = {"BEFORE": _READ, "AFTER": _WRITE} if registers else {"BEFORE": "", "AFTER": ""}
        source = _HOLDER
        for name, value in {**parts, "COUNT": str(registers), "THREADS": str(threads)}.items():
            source = source.replace(name, value)
        self._kernel: Any = compile_kernel(source, "holder")
        if shared:
            self._kernel.set_shared_memory_config(shared)
        self._up = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._data = torch.zeros(max(1, registers * threads), device=device)
        self._start: dict[str, Any] = {
            "grid": (blocks_an_sm * facts.multi_processor_count, 1, 1),
            "block": (threads, 1, 1),
            "shared_mem": shared,
        }

    def __call__(self, stream: torch.cuda.Stream) -> None:
        """Until its first block runs, and a moment longer."""
        self._up.zero_()
        self._kernel(args=[self._up, self._data, 1000 * HOLD_MS], stream=stream, **self._start)
        deadline = time.monotonic() + 1
        while not int(self._up) and time.monotonic() < deadline:
            pass
        time.sleep(0.001)


def measure(ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """By the first rank; the others stand still meanwhile."""
    found = _measure(ranks.device) if ranks.is_first else {}
    synchronize_all(ranks)
    return found


def _measure(device: torch.device) -> dict[str, Any]:
    facts: Any = torch.cuda.get_device_properties(device)
    index = torch.cuda.current_device()
    drivers: dict[str, Any] = {"one by one": CudaDriver(), "by one call": CudaDriver(batched=True)}
    drivers["by one kernel"] = DriverInside(index)
    for driver in drivers.values():
        driver.use(index)
    source, target = (torch.zeros(PIECES * SIZES[-1], dtype=torch.uint8, device=device) for _ in range(2))
    host = torch.zeros(SIZES[-1], dtype=torch.uint8, pin_memory=True)
    word, small = torch.zeros(1, dtype=torch.int32, pin_memory=True), torch.zeros(64, device=device)
    urgent, beside = torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device)
    plain, handle = drivers["one by one"], urgent.cuda_stream
    turns = iter(range(1, 1 << 20))

    def tiny() -> None:
        with torch.cuda.stream(urgent):
            small.add_(1)

    def flags() -> None:
        wanted = [(word.data_ptr(), next(turns))]
        plain.flags(handle, write=wanted, wait=wanted)

    def copies(count: int, size: int) -> list[Copy]:
        return [(target.data_ptr() + n * size, source.data_ptr() + n * size, size) for n in range(count)]

    acts: dict[str, Callable[[], None]] = {
        "a tiny kernel": tiny,
        "64 KiB inside": lambda: plain.copy(copies(1, 64 << 10), handle),
        "4 MiB inside": lambda: plain.copy(copies(1, 4 << 20), handle),
        "64 KiB to the host": lambda: plain.copy([(host.data_ptr(), source.data_ptr(), 64 << 10)], handle),
        "flags": flags,
    }
    matrix = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    smaller = matrix[:4096, :4096].contiguous()
    results = {len(each): torch.empty_like(each) for each in (matrix, smaller)}

    def products(times: int, of: torch.Tensor) -> None:
        with torch.cuda.stream(beside):
            for _ in range(times):
                torch.mm(of, of, out=results[len(of)])

    half = facts.max_threads_per_multi_processor // 2
    everything = facts.shared_memory_per_block_optin
    kinds = {
        "all shared memory": Holder(device, blocks_an_sm=1, threads=128, shared=everything),
        "all threads": Holder(device, blocks_an_sm=2, threads=half),
        "most registers": Holder(device, blocks_an_sm=1, threads=256, registers=_REGISTERS),
    }
    holders: dict[str, Callable[[], None]] = {name: partial(each, beside) for name, each in kinds.items()}
    holders["products"] = partial(products, 6, matrix)
    waits = {}
    for _ in range(2):  # the first time every kernel is loaded
        for name, hold in holders.items():
            waits[name] = {act: _through(hold, do, urgent) for act, do in acts.items()}

    def beside_products() -> None:
        products(14, smaller)
        time.sleep(0.002)

    def several_of(size: int, driver: Any) -> float:
        act = partial(driver.copy, copies(PIECES, size), handle)
        return statistics.median(_through(beside_products, act, urgent) for _ in range(7))

    several = {size: {name: several_of(size, driver) for name, driver in drivers.items()} for size in SIZES}
    return {"sms": facts.multi_processor_count, "waits": waits, "several": several}


def _through(hold: Callable[[], None], act: Callable[[], None], stream: torch.cuda.Stream) -> float:
    """Milliseconds until a stream has done something that it was given beside what holds the GPU."""
    torch.cuda.synchronize()
    hold()
    began = time.perf_counter()
    act()
    event = torch.cuda.Event()
    event.record(stream)
    while not event.query() and time.perf_counter() - began < LATEST_S:
        pass
    ms = 1000 * (time.perf_counter() - began)
    torch.cuda.synchronize()
    return ms


def show(result: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """Two tables."""
    _print(f"ms beside ({result['sms']} SMs)", result["waits"])
    named = {f"{PIECES} of {int(size) >> 10} KiB": row for size, row in result["several"].items()}
    _print("ms beside products", named)
    waits = result["waits"]["all threads"]
    missed = [f"{name} ended while all threads were held" for name in ("64 KiB inside", "4 MiB inside")]
    return [each for each in missed if waits[each.partition(" ended")[0]] < HOLD_MS / 2]


def _print(title: str, rows: dict[str, dict[str, float]]) -> None:
    columns: Sequence[str] = list(next(iter(rows.values())))
    print(f"  {title:<22}" + "".join(f"{name:>20}" for name in columns))
    for name, row in rows.items():
        print(f"  {name:<22}" + "".join(f"{row[column]:>20.2f}" for column in columns))
