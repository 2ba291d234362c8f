"""What a closed profiler tells of a device from memory, on every torch we run on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._autograd import DeviceType

from freescale.train.accounts.kernel_watch import in_memory

SEEN = [
    ("cudaLaunchKernel", "cuda_runtime", DeviceType.CPU, False),
    ("Memset (Device)", "gpu_memset", DeviceType.CUDA, False),
    ("few_kernel", "kernel", DeviceType.CUDA, False),
    ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", DeviceType.CUDA, False),
    ("copy_pieces_16", "kernel", DeviceType.CUDA, False),  # our own copies between ranks of one GPU
    ("sum_parts_kernel", "kernel", DeviceType.CUDA, False),  # the sum of an all-reduce of our own
    ("a user's range", "gpu_user_annotation", DeviceType.CUDA, True),
]


class Event:
    """Of torch 2.11, which does not say what kind of activity it is."""

    def __init__(self, place: int, name: str, device: DeviceType, annotated: bool) -> None:
        self.place, self.told = place, (name, device, annotated)

    def name(self) -> str:
        return self.told[0]

    def device_type(self) -> DeviceType:
        return self.told[1]

    def is_user_annotation(self) -> bool:
        return self.told[2]

    def start_ns(self) -> int:
        return 7_000_000 - 1_000_000 * self.place

    def end_ns(self) -> int:
        return self.start_ns() + 250_000


class NewerEvent(Event):
    """Of torch 2.13, which does."""

    def activity_type(self) -> str:
        return next(kind for name, kind, *_ in SEEN if name == self.name())


def closed(events: list[Any]) -> Any:
    results = SimpleNamespace(trace_start_ns=lambda: 1_000_000, events=lambda: events)
    return SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))


@pytest.mark.parametrize("kind", [Event, NewerEvent])
def test_kernels_and_copies_are_told_from_memory_in_order_of_their_start(kind: type[Event]) -> None:
    events = [kind(place, name, device, own) for place, (name, _, device, own) in enumerate(SEEN)]
    found = in_memory(closed(events))
    assert [(one.kind, one.name) for one in found] == [
        ("collective", "sum_parts_kernel"),
        ("memory", "copy_pieces_16"),
        ("memory", "Memcpy HtoD (Pinned -> Device)"),
        ("compute", "few_kernel"),
        ("memory", "Memset (Device)"),
    ]
    assert [one.start for one in found] == pytest.approx([0.001 * n for n in range(1, 6)])
    assert [one.end - one.start for one in found] == pytest.approx([0.00025] * 5)


def test_a_torch_that_tells_less_leaves_it_to_the_file() -> None:
    assert in_memory(closed([object()])) == []
