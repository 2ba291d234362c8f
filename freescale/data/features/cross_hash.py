"""Crosses: one 64-bit id of several, the same on every machine and in every version that says CROSS_HASH = "mix64".

    h = hash of the name of the cross (words/word_hash.py)
    h = mix64(h + GOLDEN ^ id), for each member in the order the cross names them

So (user, artist) and (artist, user) differ, as two crosses of the same members do. Where a member has no value, the
cross has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pyarrow as pa

from freescale.data.schema.vocabulary import NONE
from freescale.data.source import IntArray
from freescale.data.words.word_hash import hash_words
from freescale.kernels.rows import crossed_ids


@cache
def _key_of(name: str) -> int:
    return int(hash_words(pa.array([name])).view(np.uint64)[0])


def cross_ids(name: str, members: Sequence[IntArray]) -> IntArray:
    """[n] the ids of a cross of these ids.

    Args:
        name: of the cross.
        members: [n] ids of each member, in the order of the cross.
    """
    # One hash in 2^64 would say that there is nothing; it is the next number then.
    return crossed_ids(_key_of(name), members, NONE)
