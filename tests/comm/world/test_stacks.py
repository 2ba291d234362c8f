"""Where a signal met a rank, from what it has written."""

from __future__ import annotations

import pytest

from freescale.comm.world import place_met

WRAPPED = '  File "/lib/torch/wrapper.py", line 7 in wrapped\n'
MAIN = 'Thread 0x7f36 (most recent call first):\n%s  File "/me/freescale/train/loop.py", line 30 in train\n\nmore'


def test_the_last_call_of_ours_is_told_however_deep_a_library_went():
    assert place_met(MAIN % (2 * WRAPPED)).endswith(
        "wrapper.py:7 wrapped < wrapper.py:7 wrapped < loop.py:30 train"
    )
    deep = place_met(MAIN % (40 * WRAPPED))
    assert deep.endswith("wrapper.py:7 wrapped < ... < loop.py:30 train")
    assert deep.count("wrapped") == 6


@pytest.mark.parametrize("home", ["/me", "/me/freescale", "/me/.venv/lib/python3.12/site-packages"])
def test_libraries_inside_a_clone_are_not_ours(home):
    library = f'  File "{home}/.venv/lib/python3.12/site-packages/torch/wrapper.py", line 7 in wrapped\n'
    own = f'  File "{home}/freescale/train/loop.py", line 30 in train\n'
    said = "Thread 0x7f36 (most recent call first):\n" + 9 * library + own
    assert place_met(said).endswith("wrapped < ... < loop.py:30 train")


def test_threads_shown_before_the_error_do_not_count():
    """A rank that gave no sign of life was asked where it stood, and a library ended it afterwards."""
    asked = (
        'Current thread 0x7f35 (most recent call first):\n  File "/lib/selectors.py", line 9 in select\n\n'
    )
    ended = "Fatal Python error: Segmentation fault\n\n" + MAIN % WRAPPED
    assert place_met(asked) == "in selectors.py:9 select"
    assert place_met(asked + ended).startswith("in a library's thread, while Python was in wrapper.py:7")
