"""Who waits for a compiler hears of it, once; who waits for anything else does not."""

from __future__ import annotations

import gc
import threading
import weakref
from types import FunctionType

import pytest

from freescale.train.log.compile_notice import telling_of_compilation


def waiting_in(filename: str) -> FunctionType:
    """A function of this file that waits until an event is set, for as long as it is told."""
    made: dict[str, FunctionType] = {}
    exec(compile("def wait(event, seconds): return event.wait(seconds)", filename, "exec"), made)
    return made["wait"]


@pytest.mark.parametrize(
    ("filename", "seconds", "times"),
    [
        ("/somewhere/site-packages/triton/compiler/compiler.py", 5.0, 1),
        ("/somewhere/site-packages/triton/backends/nvidia/compiler.py", 5.0, 1),
        ("/somewhere/site-packages/numba/core/dispatcher.py", 5.0, 1),
        ("/somewhere/site-packages/triton/runtime/jit.py", 0.2, 0),
        ("/somewhere/site-packages/torch/nn/linear.py", 0.2, 0),
    ],
    ids=["compiler", "backend", "loops", "launch", "other"],
)
def test_compilers_are_told_of(filename, seconds, times, monkeypatch):
    for name in ("TRITON_CACHE_DIR", "NUMBA_CACHE_DIR"):
        monkeypatch.setenv(name, "/fast/disk")
    heard, texts = threading.Event(), []

    def tell(text: str) -> None:
        texts.append(text)
        heard.set()

    with telling_of_compilation(tell, look_s=0.01):
        waiting_in(filename)(heard, seconds)
        waiting_in(filename)(threading.Event(), 0.05)
    assert len(texts) == times
    what = "loops for this CPU" if "numba" in filename else "kernels for this GPU"
    assert all(text.startswith(f"compiling {what}") and "/fast/disk" in text for text in texts)
    assert not any(thread.name == "compile notice" for thread in threading.enumerate())


def test_a_look_holds_on_to_nothing():
    """Frames of a step that were looked at kept its activations, gigabytes of a GPU, until the next collection."""

    class Activations:
        pass

    def step(looked: threading.Event) -> weakref.ref[Activations]:
        held = Activations()
        looked.wait(0.1)
        return weakref.ref(held)

    gc.collect()
    gc.disable()
    try:
        with telling_of_compilation(lambda text: None, look_s=0.005):
            left = [each for each in (step(threading.Event()) for _ in range(5)) if each() is not None]
    finally:
        gc.enable()
    assert left == []
