"""What the driver refuses about a recording is said, once a run; the recording stands."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from freescale.train.compute import recorder as recorder_module
from freescale.train.compute.recorder import Recorder


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a recorder remarks whose driver refuses the second graph of every recording."""
    finished: list[Any] = []

    def finish(graph: Any) -> str | None:
        finished.append(graph)
        return None if len(finished) % 2 else "this driver has no cuGraphGetNodes"

    monkeypatch.setattr(recorder_module, "finish_graph", finish)
    monkeypatch.setattr(recorder_module, "recording", lambda graph, **options: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda **options: object())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    heard: list[str] = []
    recorder = Recorder(torch.device("cuda", 0), remark=heard.append)
    for _ in range(2):
        assert len(recorder.record_in_pieces(lambda cut: cut(1)) or ()) == 2
    assert recorder.on
    return heard


def test_memsets_that_stay_are_told_once(heard: list[str]) -> None:
    assert heard == [
        "small memsets stay in recordings, some microseconds each: this driver has no cuGraphGetNodes"
    ]
