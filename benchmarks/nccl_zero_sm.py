r"""NCCL's own ways without SMs between ranks that share a GPU, called by ctypes.

torch before 2.12 reaches no puts, and where the driver has no multicast it gives no memory for windows.

    LD_PRELOAD=libnccl.so.2 PYTHONPATH=. python benchmarks/nccl_zero_sm.py --ranks 2          # NCCL 2.30 or later

Each way in processes of its own, since a try may hang: all-to-all with the CTA policy ZERO, the same with the default
(for comparison), and one-sided puts with signals. Of each it is told, in this order, whether windows can be registered,
whether every number of many exchanges is right when it is read at once, the time of one exchange by size, and whether
one ends while a kernel holds every SM (a tiny kernel must not).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from freescale.comm.transports.nccl_library import LibraryWindow, OwnCommunicator, all_to_all
from freescale.comm.world.shared_gpu.nccl import MAX_CTAS, loaded_nccl
from freescale.comm.world.shared_gpu.shares import virtual_gpus
from freescale.prove.hog import Hog

WAYS = ("all-to-all, zero CTAs", "all-to-all, default", "puts with signals")
SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)
"""Bytes from each rank to each other one."""

LIMIT_S = 60.0
_WAIT_S = 1.0


class World:
    """One rank: a communicator, and two windows."""

    def __init__(self, rank: int, num_ranks: int, folder: Path) -> None:
        self.rank, self.num_ranks, self.folder, self.met = rank, num_ranks, folder, 0
        communicator = OwnCommunicator(rank, num_ranks, share=self._share)
        self.stream = torch.cuda.Stream()
        room = SIZES[-1] * num_ranks
        self._sent, self._received = LibraryWindow(communicator, room), LibraryWindow(communicator, room)
        self.send, self.receive = self._sent.memory, self._received.memory

    def _share(self, name: bytes) -> bytes:
        place = self.folder / "id"
        if self.rank == 0:
            place.with_suffix(".part").write_bytes(name)
            place.with_suffix(".part").rename(place)
        while not place.exists():
            time.sleep(0.01)
        return place.read_bytes()

    def barrier(self) -> None:
        """All ranks have come so far, and their devices have nothing left to do."""
        torch.cuda.synchronize()
        self.met += 1
        (self.folder / f"{self.met}.{self.rank}").touch()
        while not all((self.folder / f"{self.met}.{rank}").exists() for rank in range(self.num_ranks)):
            pass  # to sleep would let one rank begin half a millisecond before another

    def all_to_all(self, size: int) -> None:
        """`size` bytes to every rank."""
        with torch.cuda.stream(self.stream):
            all_to_all(self._sent, self._received, size)

    def puts(self, size: int) -> None:
        """The same by one put and signal for every other rank."""
        others = [rank for rank in range(self.num_ranks) if rank != self.rank]
        mine = slice(self.rank * size, (self.rank + 1) * size)
        with torch.cuda.stream(self.stream):
            self.receive[mine].copy_(self.send[mine])
            for peer in others:
                self._sent.put_into(
                    self._received, peer * size, size, target=peer, target_byte=self.rank * size
                )
            for peer in others:
                self._received.wait_signal(peer)


def stamps(exchange: int, source: int, target: int, size: int) -> torch.Tensor:
    """What one rank sends another in an exchange."""
    return (torch.arange(size, device="cuda") * 7 + exchange * 31 + source * 11 + target * 3).to(torch.uint8)


def check(world: World, act: Callable[[int], None], *, exchanges: int) -> int:
    """Numbers that are wrong right behind an exchange, over many of them."""
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for exchange in range(exchanges):
        size = (1 << 10, 40_000, 1 << 20)[exchange % 3]
        ranks = range(world.num_ranks)
        with torch.cuda.stream(world.stream):
            world.send[: size * world.num_ranks] = torch.cat(
                [stamps(exchange, world.rank, to, size) for to in ranks]
            )
            wanted = torch.cat([stamps(exchange, source, world.rank, size) for source in ranks])
        world.barrier()  # nobody's rows are overwritten before they were read
        act(size)
        with torch.cuda.stream(world.stream):
            wrong += (world.receive[: len(wanted)] != wanted).sum()
        world.barrier()
    return int(wrong)


def timed(world: World, act: Callable[[int], None], size: int) -> float:
    """Microseconds of an exchange that is waited for."""
    taken = []
    for _ in range(14):
        world.barrier()
        began = time.perf_counter()
        act(size)
        world.stream.synchronize()
        taken.append(1e6 * (time.perf_counter() - began))
    return statistics.median(taken[4:])


def ends_beside(world: World, act: Callable[[], Any], hog: Hog | None) -> dict[str, Any]:
    """Whether it ends while every SM is held."""
    world.barrier()
    if hog is not None:
        hog.hold()
        (world.folder / f"held-{world.met}").touch()
    while not (world.folder / f"held-{world.met}").exists():
        time.sleep(0.001)
    with torch.cuda.stream(world.stream):
        act()
        event = torch.cuda.Event()
        event.record()
    deadline, began = time.monotonic() + _WAIT_S, time.perf_counter()
    while not event.query() and time.monotonic() < deadline:
        time.sleep(0.001)
    found = {"ends": event.query(), "ms": 1000 * (time.perf_counter() - began)}
    (world.folder / f"looked-{world.met}-{world.rank}").touch()
    while not all((world.folder / f"looked-{world.met}-{rank}").exists() for rank in range(world.num_ranks)):
        time.sleep(0.001)
    if hog is not None:
        found["held"] = hog.holds
        hog.release()
    return found


def try_way(way: str, rank: int, num_ranks: int, folder: Path, exchanges: int) -> None:
    """One rank; what was seen so far is left after every part of it."""
    found: dict[str, Any] = {"nccl": loaded_nccl()}
    place = folder / f"found-{rank}.json"

    def leave(**more: Any) -> None:
        found.update(more)
        place.with_suffix(".part").write_text(json.dumps(found))
        place.with_suffix(".part").rename(place)

    leave(at="registering windows")
    world = World(rank, num_ranks, folder)
    act = world.puts if way == WAYS[2] else world.all_to_all
    leave(at="checking rows")
    leave(wrong=check(world, act, exchanges=exchanges), at="timing")
    leave(us={size: timed(world, act, size) for size in SIZES}, at="beside a kernel that holds every SM")
    small = torch.zeros(64, device="cuda")
    hog = Hog(torch.device("cuda")) if rank == 0 else None
    act(1 << 20)
    small.add_(1)
    tiny = ends_beside(world, lambda: small.add_(1), hog)
    leave(tiny=tiny, beside=ends_beside(world, lambda: act(1 << 20), hog), at=None)
    world.barrier()
    os._exit(0)  # a communicator that hangs would hang its end


def measure(way: str, options: argparse.Namespace, environment: dict[str, str]) -> list[dict[str, Any]]:
    """All ranks of one way, to their end or to that of their time."""
    policy = {"NCCL_CTA_POLICY": "2"} if way == WAYS[0] else {}
    with ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory())
        command = [sys.executable, __file__, "--way", way, "--ranks", str(options.ranks), "--folder", folder]
        command += ["--exchanges", str(options.exchanges)]
        said = [
            opened.enter_context(open(Path(folder, f"said-{rank}"), "w+")) for rank in range(options.ranks)
        ]
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)], env={**environment, **policy}, stdout=out, stderr=out
            )
            for rank, out in enumerate(said)
        ]
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and any(each.poll() is None for each in ranks):
            if any(each.poll() for each in ranks):
                deadline = min(deadline, time.monotonic() + 3)
            time.sleep(0.1)
        found = []
        for rank, each in enumerate(ranks):
            ended = each.poll()
            if ended is None:
                each.kill()
            each.wait()
            place = Path(folder, f"found-{rank}.json")
            seen = json.loads(place.read_text()) if place.exists() else {"at": "starting"}
            if ended != 0:
                said[rank].seek(0)
                lines = [line for line in said[rank].read().splitlines() if "Error" in line]
                seen["error"] = lines[-1] if lines else "it hung" if ended is None else f"exit code {ended}"
            found.append(seen)
    return found


def told(found: list[dict[str, Any]]) -> list[str]:
    """A row of the table; what could not be found out has a dash."""
    failed = next((each for each in found if each.get("error")), None)
    # Of the rank that came last: the time of others has their wait for it.
    us = (
        [min(each["us"][str(size)] for each in found) for size in SIZES]
        if all("us" in e for e in found)
        else []
    )
    wrong = sum(each["wrong"] for each in found) if all("wrong" in each for each in found) else None
    beside = "-"
    if all("beside" in each for each in found):
        control = found[0]["tiny"]["ends"]
        ends = all(each["beside"]["ends"] for each in found)
        beside = "SMs were free" if control else "ends" if ends else "waits for the SMs"
    return [
        "-" if wrong is None else f"{wrong:,}",
        *(f"{each:,.0f}" for each in us or ()),
        *(() if us else ("-",) * len(SIZES)),
        beside,
        "" if failed is None else f"{failed['at']}: {failed['error']}",
    ]


def main() -> None:
    """Each way in turn; a table, and one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--exchanges", type=int, default=150)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way is not None:
        try_way(options.way, options.rank, options.ranks, options.folder, options.exchanges)
        return
    answer = {}
    with virtual_gpus(options.ranks) as shared:
        environment = {**os.environ, **shared.environment, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100"}
        environment.pop(MAX_CTAS, None)
        names = ("wrong", *(f"{size >> 10} KiB us" for size in SIZES), "every SM held", "ended")
        print(f"{'':24}" + "".join(f"{name:>15}" for name in names), flush=True)
        for way in options.ways:
            answer[way] = measure(way, options, environment)
            row = told(answer[way])
            print(f"{way:24}" + "".join(f"{cell:>15}" for cell in row[:-1]) + f"   {row[-1]}", flush=True)
    facts = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "date": str(datetime.date.today()),
        "ranks": options.ranks,
        "exchanges": options.exchanges,
    }
    print(json.dumps({"claim": "nccl_zero_sm", "ways": answer, **facts}))
    if any(each.get("wrong") for found in answer.values() for each in found):
        raise SystemExit("FAILED: rows arrived wrong")


if __name__ == "__main__":
    main()
