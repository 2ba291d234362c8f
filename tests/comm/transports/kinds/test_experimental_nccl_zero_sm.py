"""NCCL's transfers without SMs, against stand-ins: what is missing is said, calls are those torch takes."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from freescale.comm.transports.kinds import experimental_nccl_zero_sm as nccl_zero_sm
from freescale.comm.world.facts import GroupFacts, RankFacts
from freescale.errors import TrainingError


def facts_of(*, backend: str = "nccl", shared: bool = False, machines: int = 1) -> GroupFacts:
    ranks = [
        RankFacts(machine=f"m{n % machines}", pid=n, processes="p", gpu="g" if shared else f"g{n}")
        for n in range(4)
    ]
    return GroupFacts(ranks, 0, torch.device("cuda", 0), backend)


def test_the_transport_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(nccl_zero_sm.torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(nccl_zero_sm, "nccl_version", lambda: (2, 28, 9))
    monkeypatch.delenv("NCCL_CTA_POLICY", raising=False)
    assert nccl_zero_sm.NcclZeroSmRoute.why_not(facts_of()) is None
    monkeypatch.setattr("freescale.comm.world.shared_gpu.nccl.loaded_nccl", lambda: (2, 28, 9))
    assert "one rank a GPU" in (nccl_zero_sm.NcclZeroSmRoute.why_not(facts_of(shared=True)) or "")
    assert "gloo" in (nccl_zero_sm.NcclZeroSmRoute.why_not(facts_of(backend="gloo")) or "")
    assert "several machines" in (nccl_zero_sm.NcclZeroSmRoute.why_not(facts_of(machines=2)) or "")
    monkeypatch.setenv("NCCL_CTA_POLICY", "1")
    assert "NCCL_CTA_POLICY" in (nccl_zero_sm.NcclZeroSmRoute.why_not(facts_of()) or "")


@pytest.mark.parametrize(
    ("version", "asked", "route"),
    [
        ("2.14.1", None, "put_signal"),
        ("2.14.1", "1", "window"),
        ("2.15.0", None, "window"),
        ("2.15.0", "0", "put_signal"),
    ],
)
def test_the_newer_backend_is_asked_for_or_the_default(monkeypatch, version, asked, route):
    monkeypatch.setattr(nccl_zero_sm.torch, "__version__", version)
    monkeypatch.setattr(nccl_zero_sm, "nccl_version", lambda: (2, 30, 7))
    if asked is None:
        monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    else:
        monkeypatch.setenv("TORCH_DIST_USE_NCCL2", asked)
    assert nccl_zero_sm.route_of(facts_of(machines=2)).name == route


def test_windows_of_torch_are_called_with_what_they_take():
    calls: list[Any] = []
    window = nccl_zero_sm.C10dWindow.__new__(nccl_zero_sm.C10dWindow)
    window.memory = torch.arange(10, dtype=torch.uint8)
    window._window = types.SimpleNamespace(
        put=lambda rows, target, place, later: calls.append((rows.tolist(), target, place, later)),
        wait_signal=lambda source, later: calls.append((source, later)),
    )
    window.put(3, 2, target=1, target_byte=7)
    window.wait_signal(2)
    symmetric = nccl_zero_sm.SymmetricWindow.__new__(nccl_zero_sm.SymmetricWindow)
    symmetric.memory, symmetric._whole, symmetric._places = window.memory, "whole", {7: "handle of 7"}
    symmetric._calls = types.SimpleNamespace(
        put_signal=lambda rows, handle, target: calls.append((rows.tolist(), handle, target)),
        wait_signal=lambda handle, source: calls.append((handle, source)),
    )
    symmetric.put(3, 2, target=1, target_byte=7)
    symmetric.wait_signal(2)
    assert calls == [([3, 4], 1, 7, False), (2, False), ([3, 4], "handle of 7", 1), ("whole", 2)]


def test_a_handle_is_made_for_its_place_in_the_window(monkeypatch):
    """As torch makes them: from where the storage of a tensor begins, whatever the view."""
    import torch.distributed._symmetric_memory as real

    memory = torch.zeros(64, dtype=torch.uint8)

    def rendezvous(tensor: torch.Tensor, group: object) -> Any:
        return types.SimpleNamespace(offset=tensor.untyped_storage().data_ptr() - memory.data_ptr())

    monkeypatch.setattr(real, "set_backend", lambda name: None)
    monkeypatch.setattr(real, "empty", lambda *_, **__: memory)
    monkeypatch.setattr(real, "rendezvous", rendezvous)
    window = nccl_zero_sm.SymmetricWindow(None, 64, [0, 16, 48], torch.device("cpu"))  # type: ignore[arg-type]
    assert {place: handle.offset for place, handle in window._places.items()} == {0: 0, 16: 16, 48: 48}
    monkeypatch.setattr(real, "rendezvous", lambda *_: types.SimpleNamespace(offset=0))
    with pytest.raises(TrainingError, match="no handle for a place"):
        nccl_zero_sm.SymmetricWindow(None, 64, [16], torch.device("cpu"))  # type: ignore[arg-type]
