"""What a GPU was given long before it runs leaves in the order of deadlines all the same."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from freescale.comm.traffic import Deadline, Gate
from freescale.pipeline.streams import SideStream
from freescale.train.compute import dense_gradients
from freescale.train.compute.dense_gradients import FlatSum
from tests.comm.fake_cuda import FakeStream, _OnStream, install
from tests.ranks import run_on_ranks

GPU = torch.device("cuda", 0)


def leave_by_deadline(rank: int, urgent_first: bool) -> list[str]:
    """Streams that are each free to begin at once; what they did, in order."""
    main, gate, let_go = install(), Gate(), threading.Event()
    done: list[str] = []

    def job(name: str, *, slow: bool = False) -> Any:
        def do() -> None:
            if slow:
                let_go.wait()
            done.append(name)

        return lambda: _OnStream.current[-1].give(do)

    total = FlatSum.__new__(FlatSum)
    total._gate, total._itself, total._waits = gate, False, []
    total._stream, total._transport = FakeStream(), SimpleNamespace()  # type: ignore[assignment]

    def add_up(transport: Any, values: torch.Tensor) -> Any:
        job("dense gradients")()
        return SimpleNamespace(wait=lambda: values)

    dense_gradients.start_all_reduce = add_up
    urgent, bulk = SideStream(GPU, gate=gate, urgent=True), SideStream(GPU, gate=gate)
    rows = job("OL rows", slow=True)
    if urgent_first:
        urgent.submit(rows)
    wait = total.start(torch.zeros(3))
    sent = bulk.submit(job("NOL gradients"))
    if not urgent_first:
        urgent.submit(rows)
    main.give(lambda: done.append("compute"))
    main.synchronize()
    time.sleep(0.05)
    let_go.set()
    wait()
    sent.wait()
    main.synchronize()
    bulk._stream.synchronize(), urgent._stream.synchronize()
    return done


@pytest.mark.parametrize(
    ("urgent_first", "order"),
    [
        (True, ["dense gradients", "OL rows", "NOL gradients"]),
        (False, ["dense gradients", "NOL gradients", "OL rows"]),
    ],
    ids=["urgent traffic passes", "nobody waits for what comes later"],
)
def test_streams_let_more_urgent_traffic_pass(urgent_first: bool, order: list[str]) -> None:
    """Dense sums of a postponed step shared their link with gradients that had a whole step's time.

    They and overlapped rows are both needed where the next forward begins: one behind the other took 1 ms longer.
    """
    ((*done,),) = run_on_ranks(leave_by_deadline, 1, urgent_first)
    assert [one for one in done if one in order] == order
    assert "compute" in done


def test_only_what_is_more_urgent_is_waited_for() -> None:
    gate, waited = Gate(), []
    stream: Any = SimpleNamespace(wait_event=waited.append)
    for deadline in Deadline:
        gate.queued(deadline, deadline.name)  # type: ignore[arg-type]
    gate.queued(Deadline.OL_ROWS, "those of the next step")  # type: ignore[arg-type]
    gate.hold(Deadline.OL_GRADIENTS, stream)
    assert waited == []
    gate.hold(Deadline.DENSE_GRADIENTS, stream)
    assert waited == ["OL_GRADIENTS", "those of the next step"]
