"""Sums of dense gradients on streams: what they are, with several under way, and that everybody who is told to waits.

Streams are threads, and a transport of the package moves what they are given; additions are given to them, too.
"""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from freescale.comm.traffic import Gate, deterministic_all_reduce
from freescale.kernels.runtime.part_sums import sum_parts_reference
from freescale.train.compute import dense_gradients
from freescale.train.compute.dense_gradients import FlatSum, QueuedSums, Sums, _choose_hook
from tests.comm.fake_cuda import FakeStream, _OnStream
from tests.comm.rings.test_stream_engine import CUDA, open_fake
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.timed

copy_at_once = torch.Tensor.copy_


def open_transport(kind: str, *, one_queue: bool = False) -> tuple[Any, FakeStream]:
    """A transport whose sums are added up when their stream comes to it, and the stream that computes."""
    transport, main, _ = open_fake(kind, slow_s=0.0005, one_queue=one_queue)

    def current(device: Any = None) -> FakeStream:
        return _OnStream.current[-1] if _OnStream.current else main

    def add_later(parts: torch.Tensor, *, copies: int = 1) -> torch.Tensor:
        out = torch.full((copies * parts.shape[1],), float("nan"))
        current().give(lambda: copy_at_once(out, sum_parts_reference(parts, copies=copies)))
        return out

    torch.cuda.current_stream = current  # type: ignore[assignment]
    deterministic_all_reduce.sum_parts = add_later
    return transport, main


def parts_of(step: int, piece: int, size: int) -> list[torch.Tensor]:
    """What each rank adds."""
    seeds = (1000 * step + 10 * piece + rank for rank in range(dist.get_world_size()))
    return [torch.randn(size, generator=torch.Generator().manual_seed(seed)) for seed in seeds]


def add_many(rank: int, kind: str, one_queue: bool) -> None:
    """Steps of several sums of all sizes, whose values are there when the device comes to them, sooner or later."""
    transport, main = open_transport(kind, one_queue=one_queue)
    sums, draw = QueuedSums(transport, Gate(), CUDA), random.Random(5)
    for step in range(8):
        under_way = []
        for piece in range(draw.randint(1, 5)):
            parts = parts_of(step, piece, draw.choice([3, 1000, 20_000, 70_001]))
            mine = torch.empty_like(parts[rank])
            in_parts = len(parts) > 2 and mine.nbytes > 64 << 10
            late = 0.004 * random.Random(100 * rank + step).random()
            if in_parts:  # smaller ones are laid out for the other ranks where they are handed over
                main.give(lambda to=mine, own=parts[rank], s=late: (time.sleep(s), copy_at_once(to, own)))
            else:
                copy_at_once(mine, parts[rank])
                main.give(lambda s=late: time.sleep(s))
            under_way.append((sums.start(mine), mine, sum_parts_reference(torch.stack(parts))))
        if draw.random() < 0.7:
            sums.finish()
        for wait, mine, wanted in under_way:
            wait()
            main.synchronize()
            assert torch.equal(mine, wanted), (step, rank)


@pytest.mark.parametrize("kind", ["host_staged", "copy_engine"])
@pytest.mark.parametrize(("num_ranks", "one_queue"), [(2, False), (3, False), (3, True)])
def test_sums_are_right_with_several_under_way(kind: str, num_ranks: int, one_queue: bool) -> None:
    run_on_ranks(add_many, num_ranks, kind, one_queue)


def flat_sum(transport: Any) -> FlatSum:
    """Of this transport."""
    dense_gradients.open_channel = lambda *_, **__: transport
    dense_gradients.sums_itself = lambda *_: False
    return FlatSum(dist.group.WORLD, CUDA, kind="copy_engine", gate=None, timeout_s=60)  # type: ignore[arg-type]


def told_to(rank: int, how: str) -> list[bool]:
    """Whether the stream that computes has the sums of two pieces once it was told to wait, in each of three steps."""
    transport, main = open_transport("copy_engine")
    total, found = flat_sum(transport), []
    assert total.only_starts
    for step in range(3):
        pieces = [parts_of(step, piece, 1000) for piece in range(2)]
        mine = [parts[rank].clone() for parts in pieces]
        waits = [total.start(each) for each in mine]
        if how == "wait for all":
            total.wait()
        else:
            total.forget()
            for wait in waits:
                wait()
        main.synchronize()
        wanted = [sum_parts_reference(torch.stack(parts)) for parts in pieces]
        found.append(all(map(torch.equal, mine, wanted)))
    return found


@pytest.mark.parametrize("how", ["wait for all", "wait for each"])
def test_whoever_is_told_to_waits_for_sums(how: str) -> None:
    for found in run_on_ranks(told_to, 2, how):
        assert found == [True] * 3


class Bucket:
    """Gradients that DDP hands over."""

    def __init__(self, values: torch.Tensor, *, last: bool) -> None:
        self._values, self._last = values, last

    def buffer(self) -> torch.Tensor:
        return self._values

    def is_last(self) -> bool:
        return self._last


def hand_over(rank: int) -> list[bool]:
    """The same of buckets of DDP."""
    transport, main = open_transport("host_staged")
    dense_gradients.open_channel = lambda *_, **__: transport
    dense_gradients.sums_itself = lambda *_: False
    # Futures of torch know no stream that is a thread.
    dense_gradients._done = lambda values: None  # type: ignore[assignment, return-value]
    hook: Callable[..., Any]
    way = {"kind": "host_staged", "sums": "auto"}
    hook, sums = _choose_hook(dist.group.WORLD, CUDA, Gate(), timeout_s=60, **way)  # type: ignore[arg-type]
    assert isinstance(sums, Sums)
    assert sums.outlast_backward
    found = []
    for step in range(3):
        pieces = [parts_of(step, piece, 1000) for piece in range(3)]
        mine = [parts[rank].clone() for parts in pieces]
        for number, each in enumerate(mine):
            hook(None, Bucket(each, last=number == 2))
        sums.wait()
        main.synchronize()
        found.append(all(torch.equal(a, sum_parts_reference(torch.stack(b))) for a, b in zip(mine, pieces)))
    return found


def test_buckets_of_a_backward_are_waited_for() -> None:
    for found in run_on_ranks(hand_over, 2):
        assert found == [True] * 3


def kept_by_who_waits(rank: int) -> bool:
    """Whether what came from other ranks is let go of before somebody waits for the sum."""
    transport, main = open_transport("copy_engine")
    sums, received = QueuedSums(transport, Gate(), CUDA), []
    start = transport.start

    def keep_track(*args: Any, **kwargs: Any) -> Any:
        pending = start(*args, **kwargs)
        received.append(weakref.ref(pending._received))
        return pending

    transport.start = keep_track
    wait = sums.start(torch.ones(1000))
    sums.finish()
    main.synchronize()
    torch.cuda.current_stream().synchronize()
    time.sleep(0.3)  # streams that are threads let go of their work when they come to the next
    sums.start(torch.ones(10))
    sums.finish()
    time.sleep(0.3)
    gc.collect()
    gone = received[0]() is None
    wait()
    sums.wait()
    main.synchronize()
    return gone


def test_a_sum_that_nobody_waits_for_yet_keeps_no_memory() -> None:
    """With layers updated beside the next forward it was as much as all gradients, until the last layer was reached."""
    assert all(run_on_ranks(kept_by_who_waits, 2))
