"""What an exchange is made of, one by one beside compute: flags, waits, events, copies of ranks that share its GPU."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_time import ms_a_call

from freescale.comm.rings.cuda_driver import CudaDriver
from freescale.comm.world.ranks import Ranks
from freescale.prove.beside import compute_jobs

ALONE = "nothing"
_COPY_BYTES = 12 << 20
_LASTS_S = 0.2
_COMPUTE_MS = 50.0
"""Of rank 0 alone: even three times slowed, it is done before its neighbours are."""
_HEAD_START_S = 0.004
_FLAGS, _WORDS = 8, 16


class Neighbour:
    """A rank that does one of these things, over and over, while another computes."""

    def __init__(self, device: torch.device) -> None:
        self._driver = CudaDriver(batched=True)
        self._driver.use(device.index or 0)
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in range(4)]
        self._flags = torch.zeros(_FLAGS, _WORDS, dtype=torch.int32).pin_memory()
        out, back = (torch.zeros(_COPY_BYTES, dtype=torch.uint8).pin_memory() for _ in range(2))
        on_gpu, there = (torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
        self._copies = [(out, on_gpu), (there, back)]

    def things(self) -> dict[str, Callable[[int], None]]:
        """By name; each is told how often it was done before."""
        return {
            ALONE: lambda turn: time.sleep(0.001),
            "one stream that waits": lambda turn: self.wait(turn, 1),
            "two streams that wait": lambda turn: self.wait(turn, 2),
            "four streams that wait": lambda turn: self.wait(turn, 4),
            "flags written": lambda turn: self.flags(),
            "flags written and found": lambda turn: self.flags(found=True),
            "events": lambda turn: self.events(),
            "copies": self.copy,
            "copies, flags written and found": self.copy_with_flags,
            "copies, two streams that wait": self.copy_while_two_wait,
        }

    def lasts(self, thing: Callable[[int], None]) -> int:
        """Do it until the time is over, then let streams that wait go on; how often it was done."""
        self._flags.zero_()
        ends, turn = time.perf_counter() + _LASTS_S, 0
        while time.perf_counter() < ends:
            thing(turn)
            turn += 1
        self.release()
        return turn

    def release(self) -> None:
        """Write the flags that streams wait for, and wait for the streams."""
        self._flags[:, 0] = 1
        torch.cuda.synchronize()

    def wait(self, turn: int, streams: int) -> None:
        """So many of the streams wait until the end."""
        if turn == 0:
            for number, stream in enumerate(self._streams[-streams:]):
                self._driver.flags(stream.cuda_stream, wait=[(self._place(number), 1)])
        time.sleep(0.001)

    def flags(self, *, found: bool = False) -> None:
        """Two streams write three flags each in one call, as an exchange of four ranks does, and find them written."""
        for number, stream in enumerate(self._streams[:2]):
            three = [(self._place(number + 4), 1)] * 3
            self._driver.flags(stream.cuda_stream, write=three, wait=three if found else ())

    def events(self) -> None:
        """Two streams wait for each other."""
        first, second = self._streams[:2]
        second.wait_event(first.record_event())
        first.wait_event(second.record_event())

    def copy(self, turn: int) -> None:
        """As many bytes as an exchange of 4 MiB a pair, both ways; at most four on the way."""
        for stream, (target, source) in zip(self._streams, self._copies):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        if turn % 4 == 3:
            for stream in self._streams[:2]:
                stream.synchronize()

    def copy_with_flags(self, turn: int) -> None:
        """Copies behind flags that are there."""
        self.flags(found=True)
        self.copy(turn)

    def copy_while_two_wait(self, turn: int) -> None:
        """Copies, while two other streams wait until the end."""
        if turn == 0:
            self.wait(turn, 2)
        self.copy(turn)

    def waits_as_long_as_it_should(self) -> bool:
        """A stream that waits for a flag stands until the flag is written."""
        self._flags.zero_()
        self.wait(0, 1)
        event = self._streams[-1].record_event()
        time.sleep(0.01)
        stood = not event.query()
        self.release()
        return stood and event.query()

    def _place(self, number: int) -> int:
        return self._flags[number].data_ptr()


def measure(ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of rank 0's compute beside each thing, medians of three, and how often the others queued it."""
    neighbour = Neighbour(ranks.device)
    if not neighbour.waits_as_long_as_it_should():
        raise SystemExit("FAILED: a stream did not wait for its flag")
    rows = []
    for job, compute in compute_jobs(ranks.device, options.gemm).items():
        count = how_many(compute) if ranks.is_first else 0
        for name, thing in neighbour.things().items():
            turns = [one_turn(ranks, compute, count, neighbour, thing) for _ in range(3)]
            taken, done = (statistics.median(each) for each in zip(*turns))
            rows.append({"compute": job, "beside": name, "ms": taken, "turns_a_ms": done})
    return {"results": rows}


def how_many(compute: Callable[[], Any]) -> int:
    """Computes that last for `_COMPUTE_MS` alone."""
    ms_a_call(compute, 3)
    return max(1, int(_COMPUTE_MS / ms_a_call(compute, 3)))


def one_turn(
    ranks: Ranks,
    compute: Callable[[], Any],
    count: int,
    neighbour: Neighbour,
    thing: Callable[[int], None],
) -> tuple[float, float]:
    """Milliseconds a compute of rank 0, and how often a millisecond each other rank queued its thing."""
    torch.cuda.synchronize()
    ranks.barrier()
    mine = torch.zeros(2, dtype=torch.float64)
    if ranks.is_first:
        time.sleep(_HEAD_START_S)
        mine[0] = ms_a_call(compute, count)
    else:
        mine[1] = neighbour.lasts(thing) / (1000 * _LASTS_S) / (ranks.num_ranks - 1)
    milliseconds, often = ranks.sum_on_cpu(mine).tolist()
    return milliseconds, often


def show(result: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """The table; nothing was asked of it."""
    print(f"  {'':<68}{'ms':>8}{'slowdown':>10}{'turns a ms':>12}")
    alone = {row["compute"]: row["ms"] for row in result["results"] if row["beside"] == ALONE}
    for row in result["results"]:
        slowdown = row["ms"] / alone[row["compute"]]
        name = f"{row['compute']} + {row['beside']}"
        print(f"  {name:<68}{row['ms']:8.3f}{slowdown:9.3f}x{row['turns_a_ms']:12.2f}")
    return []
