"""What was loaded before training is not looked at while it goes on, and is again afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from freescale.train.gc_freeze import _LOADED, GcFreeze


@pytest.fixture(autouse=True)
def nothing_is_set_aside(true_unfreeze: None) -> Iterator[None]:
    """As in a process of its own; other tests do without what is loaded (see conftest)."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


class Ring:
    """Holds on to itself: only a collection lets go of it."""

    def __init__(self) -> None:
        self.itself = self


def test_only_what_comes_later_is_looked_at():
    before, loaded = weakref.ref(Ring()), [Ring()]
    with GcFreeze() as aside:
        assert before() is None
        count = len(gc.get_objects())
        assert all(each is not loaded[0] for each in gc.get_objects())
        late = [Ring()]
        assert any(each is late[0] for each in gc.get_objects())
        for _ in range(_LOADED):
            aside.step_done()
        assert all(each is not late[0] for each in gc.get_objects())
        dropped = weakref.ref(Ring())
        gc.collect()
        assert dropped() is None
        assert len(gc.get_objects()) < count + 1000
    assert any(each is loaded[0] for each in gc.get_objects())


def test_collections_are_as_they_were_after_an_error():
    with pytest.raises(RuntimeError), GcFreeze():
        raise RuntimeError
    assert gc.get_freeze_count() == 0
    assert gc.isenabled()


@pytest.mark.parametrize("set_aside_before", [False, True])
def test_a_run_that_has_ended_leaves_no_memory_behind(set_aside_before):
    """Python 3.12 has set things aside when it starts: runs of one process kept their tables, until a GPU was full."""
    if set_aside_before:
        gc.freeze()
    kept = Ring()
    seen = weakref.ref(kept)
    with GcFreeze() as aside:
        for _ in range(_LOADED):
            aside.step_done()
    del kept
    gc.collect()
    assert seen() is None
