"""NCCL called by ctypes: what is handed over, and what becomes of complaints. The calls themselves need a GPU."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from freescale.comm.transports import nccl_library
from freescale.comm.transports.nccl_library import LibraryWindow, NcclLibrary, missing_functions
from freescale.errors import TrainingError


class Functions:
    """A library whose every function ends with the same code, and keeps what it was given."""

    def __init__(self, code: int = 0) -> None:
        self._code, self.given = code, {}
        self.ncclGetErrorString = lambda code: b"invalid usage"
        self.ncclGetLastError = lambda comm: b"window of another size"

    def __getattr__(self, name: str):
        def function(*given):
            self.given[name] = [each.value if hasattr(each, "value") else each for each in given]
            return self._code

        return function


def test_a_complaint_names_the_function():
    with pytest.raises(
        TrainingError, match=r"ncclMemAlloc failed: invalid usage(.|\n)*window of another size"
    ):
        NcclLibrary(Functions(5)).call("ncclMemAlloc")


def test_the_first_function_that_is_missing_is_named(monkeypatch):
    older = SimpleNamespace(ncclMemAlloc=0, ncclCommWindowRegister=0)
    for there, missing in (
        (SimpleNamespace(), "ncclMemAlloc"),
        (older, "ncclPutSignal"),
        (Functions(), None),
    ):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, there=there: there)
        assert missing_functions() == missing


def test_a_put_says_where_from_where_to_and_on_which_stream(monkeypatch):
    monkeypatch.setattr(nccl_library, "current_stream", lambda: ctypes.c_void_p(77))
    functions = Functions()
    window = LibraryWindow.__new__(LibraryWindow)
    window._call = NcclLibrary(functions).call
    window._communicator = type("Communicator", (), {"handle": ctypes.c_void_p(5)})()
    window.memory, window.handle = torch.zeros(64, dtype=torch.uint8), ctypes.c_void_p(9)
    window.put(16, 8, target=3, target_byte=24)
    uint8 = 1
    assert functions.given["ncclPutSignal"] == [
        window.memory.data_ptr() + 16,
        8,
        uint8,
        3,
        9,
        24,
        0,
        0,
        0,
        5,
        77,
    ]
    window.wait_signal(2)
    count, wanted, communicator, stream = functions.given["ncclWaitSignal"]
    assert (count, communicator, stream) == (1, 5, 77)
    assert (wanted[0].count, wanted[0].rank) == (1, 2)
