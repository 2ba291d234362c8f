"""Collections between steps look at what steps have made, and at nothing else; garbage of steps still goes."""

from __future__ import annotations

import gc
import weakref

from freescale.train.garbage import set_aside, short_collections


class Node:
    """Refers to itself: only a collection ends it."""

    def __init__(self) -> None:
        self.me = self


def test_what_was_there_is_passed_over_and_given_back() -> None:
    held = [[n] for n in range(50_000)]
    with short_collections():
        assert gc.get_freeze_count() >= len(held)
        assert len(gc.get_objects()) < 10_000
        young = [[n] for n in range(20_000)]
        assert len(gc.get_objects()) >= len(young)
        set_aside()
        assert len(gc.get_objects()) < 10_000
    assert gc.get_freeze_count() == 0
    assert len(gc.get_objects()) > len(held) + len(young)


def test_garbage_of_steps_is_still_found() -> None:
    with short_collections():
        node = Node()
        gone = weakref.ref(node)
        del node
        gc.collect()
        assert gone() is None


def test_an_error_gives_everything_back() -> None:
    try:
        with short_collections():
            raise ValueError
    except ValueError:
        pass
    assert gc.get_freeze_count() == 0
