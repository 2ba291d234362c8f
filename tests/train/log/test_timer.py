"""The compute time of a step leaves out what it stood still for in its middle."""

from __future__ import annotations

import pytest
import torch

from freescale.data.sequence_batch import SequenceBatch
from freescale.train.log import timer as timer_module
from freescale.train.log.timer import StepTimer


def test_exchanges_inside_a_step_are_not_its_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(timer_module.time, "perf_counter", lambda: now[0])
    timer = StepTimer(torch.device("cpu"))
    batch = SequenceBatch.from_sequences([{"item": torch.zeros(5)}])
    for stood in (0.0, 3.0):
        rows = torch.ones(2, requires_grad=True)
        timer.start(rows)
        now[0] += 1
        with timer.standing_still():
            now[0] += stood
        now[0] += 0.5
        rows.sum().backward()
        now[0] += 10  # waiting for the dense gradients of others
        timer.finish(batch)
    assert [step.ms for step in timer.take()] == pytest.approx([1500.0, 1500.0])
    assert timer.take() == []
