"""Where a signal met a rank, from what it has written."""

from __future__ import annotations

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
