"""What every test process needs."""

import dataclasses
import functools
import gc
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from freescale import registry
from tests.compiled_loops import load_compiled_loops
from tests.effort import THOROUGH, slow
from tests.machine import Calm, Stolen
from tests.warm_python import warm_python

# How long an example takes says how busy the machine is.
settings.register_profile("ci", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(THOROUGH, settings.get_profile("ci"), max_examples=1000)  # `make test-slow`
settings.load_profile("ci")

# Several test processes share few cores: one thread each, also in the commands they start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# Tests fork ranks, also after they have computed themselves. On Arm, oneDNN's thread pool does not survive a fork
# (a forked rank would hang in its first float32 product), so tests do without oneDNN.
torch.backends.mkldnn.enabled = False

# Nobody pulls the plug here, and a disk that others use takes up to half a second for each of a checkpoint's files.
# What is flushed, and in which order, is watched in tests/train/state/test_checkpoint.py.
os.fsync = lambda descriptor: None

# Without a GPU, Triton kernels run in Triton's interpreter; it must know before they are first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _interpret_faster() -> None:
    """Spare Triton's interpreter what it does again in every call: a third of the time of the tests of kernels.

    A device function patches the language that its kernel has patched already, and a table of types is made for every
    value. Versions of Triton that do neither under these names are left as they are.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    if not hasattr(interpreter, "_LangPatchScope") or not hasattr(interpreter, "_get_np_dtype"):
        return
    patch, language = interpreter._patch_lang, interpreter.tl

    @functools.cache
    def knows_only_the_language(function: Any) -> bool:
        return not any(value is language.core for value in function.__globals__.values())

    def is_patched(module: Any) -> bool:
        return not language.core.is_builtin(module.load)

    def patch_once(function: Any) -> Any:
        if is_patched(language) and (knows_only_the_language(function) or is_patched(language.core)):
            return interpreter._LangPatchScope()
        return patch(function)

    numpy_type = interpreter._get_np_dtype
    numpy_type_of_numbers = functools.cache(numpy_type)

    def numpy_type_once(type_: Any) -> Any:
        scalar = type_.scalar
        is_pointer = isinstance(scalar, language.pointer_type)
        return numpy_type(scalar) if is_pointer else numpy_type_of_numbers(scalar)

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, numpy_type_once


if os.environ.get("TRITON_INTERPRET") == "1":
    _interpret_faster()


def _trust_small_integers() -> None:
    """Spare Triton's interpreter to compute every sum of integers again in 64 bits: no batch of CI comes near 32."""
    try:
        from triton.runtime import interpreter

        options = interpreter.interpreter_builder.options
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    except (ImportError, AttributeError, TypeError):
        return  # another version, which takes its time


def pytest_configure(config: pytest.Config) -> None:
    """Loops are compiled once, before test processes start: each of them and their ranks would compile its own."""
    if config.getoption("hypothesis_profile", None) != THOROUGH and os.environ.get("TRITON_INTERPRET") == "1":
        _trust_small_integers()
    if not config.getoption("numprocesses", None):
        return
    from freescale.kernels import hstu_attention

    load_compiled_loops()
    for dtype in (torch.float32, torch.float64):
        q, k, v = (torch.rand(3, 1, 2, dtype=dtype).requires_grad_() for _ in range(3))
        hstu_attention(q, k, v, torch.tensor([0, 3]), scale=1.0).sum().backward()


# What takes longest begins first, or one test process would be left with it while the others are done.
LONGEST = (
    *("kernels/attention/test_fused", "test_one_curve", "comm/world/test_watch", "comm/world/test_launcher"),
    *(
        "pipeline",
        "chaos",
        "extend",
        "train/test_stop",
        "test_examples",
        "test_own_models",
        "comm/world",
        "test_readme",
        "end_to_end",
    ),
    *("kernels", "train", "comm", "pages"),
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Modules in the order of LONGEST, the others behind them, as they are written; which of them are tried again.

    Nothing is where pytest-rerunfailures is missing, as it may be on a machine with a GPU.
    """
    root = Path(__file__).parent

    @functools.cache
    def place(path: Path) -> int:
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else ""
        return next((n for n, start in enumerate(LONGEST) if name.startswith(start)), len(LONGEST))

    items.sort(key=lambda item: place(item.path))
    if not config.pluginmanager.hasplugin("rerunfailures"):
        return
    for item in items:
        timed = item.get_closest_marker("timed") is not None
        again = {"reruns": 3} if timed else {"reruns": 1, "condition": without_cores}
        item.add_marker(pytest.mark.flaky(reruns_delay=3, **again))


def pytest_collection_finish() -> None:
    """What is loaded is set aside: each run collects garbage twice, in a forked rank through a copy of every page."""
    gc.collect()
    gc.freeze()
    # Every run that ends would put all of it back.
    gc.unfreeze = lambda: None


TRUE_UNFREEZE = gc.unfreeze


@pytest.fixture
def true_unfreeze(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what is set aside."""
    monkeypatch.setattr(gc, "unfreeze", TRUE_UNFREEZE)


def pytest_unconfigure() -> None:
    """Extension modules count what nobody has collected when the process ends."""
    TRUE_UNFREEZE()


@pytest.fixture(scope="session", autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs that are given no folder leave theirs where pytest cleans up."""
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.mktemp("runs"))
    yield
    tempfile.tempdir = before


@pytest.fixture(scope="module", params=["imported once", slow("fresh processes")])
def python(request: pytest.FixtureRequest) -> Iterator[str]:
    """What starts Python in tests of commands: with torch imported already, and, where minutes are given, without."""
    if request.param == "fresh processes":
        yield sys.executable
        return
    with warm_python() as command:
        yield str(command)


@pytest.fixture
def own_kinds() -> Iterator[None]:
    """Only kinds that ship at first; those a test registers are gone after it, those of other modules are back."""
    others = {key: kind for key, kind in registry._kinds.items() if not kind.ships}
    for key in others:
        del registry._kinds[key]
    yield
    for key in [key for key, kind in registry._kinds.items() if not kind.ships]:
        del registry._kinds[key]
    registry._kinds.update(others)


CALM = Calm()
STOLEN = Stolen()


def without_cores() -> bool:
    """Whether the host has taken more than a tenth of the cores since the test began: asked when it has failed."""
    return STOLEN.share() > 0.1


@pytest.fixture(autouse=True)
def calm_machine(request: pytest.FixtureRequest) -> None:
    """Tests held against the clock begin when the host of a virtual machine lends its cores."""
    global STOLEN
    if request.node.get_closest_marker("timed") and STOLEN.share() > 1 / 3:
        CALM.wait()
    STOLEN = Stolen()


@pytest.fixture(autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Ranks and loader processes of a test end with it: they would take the time of others, and be counted by them."""
    before = set(multiprocessing.active_children())
    yield
    for process in set(multiprocessing.active_children()) - before:
        process.join(10)
        assert process.exitcode is not None, f"{process} lives on after the test that started it"


@pytest.fixture(autouse=True)
def no_failure_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage in which a thread failed first is what a failing process tells; tests go on in the same process."""
    monkeypatch.setattr("freescale.trace.stages._failure", None)
