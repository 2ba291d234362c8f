"""Which NCCL this process really calls, and whether it lets several ranks share a GPU.

`torch.cuda.nccl.version()` is a number torch was compiled with. The library that answers may be another one: wheels of
torch find theirs by a path that is written into them, so LD_LIBRARY_PATH changes nothing, but LD_PRELOAD does.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

from freescale.errors import TrainingError

SHARES_GPU = (2, 30, 0)
"""The first version that takes several ranks on one GPU, when told so by the variable below."""

ENABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
MAX_CTAS = "NCCL_MAX_CTAS"
PROMISED = 2
"""Ranks a GPU that NVIDIA promises. Four and eight hung: a rank's own work stood still while the kernels of others
waited for it (docs/results.md, "NCCL between ranks of one GPU")."""

SHARED = "FREESCALE_SHARED_NCCL"
"""Set to 0, ranks that share a GPU use no NCCL, whatever its version; set to 1, more than two of them try it."""


@functools.cache
def loaded_nccl() -> tuple[int, int, int] | None:
    """The version of the library whose functions this process calls; None without one.

    Functions are looked up in libraries that were preloaded first. So is the one that tells its version; where nothing
    was preloaded, the library torch has loaded is asked by its file.
    """
    import torch  # noqa: F401  loads what it links

    places: list[str | None] = [None]
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
        places += sorted({line.split()[-1] for line in maps if "libnccl.so" in line})
    except OSError:
        pass
    for place in places:
        version = _version_of(place)
        if version is not None:
            return version
    return None


def _version_of(place: str | None) -> tuple[int, int, int] | None:
    number = ctypes.c_int()
    try:
        ask = ctypes.CDLL(place).ncclGetVersion
        if ask(ctypes.byref(number)) != 0:
            return None
    except (AttributeError, OSError):
        return None
    return decode_version(number.value)


def decode_version(number: int) -> tuple[int, int, int]:
    """23102 is 2.31.2; before 2.9 the second part had one digit less."""
    base = 10_000 if number >= 10_000 else 1000
    return number // base, number % base // 100, number % 100


def no_shared_nccl(num_ranks: int = PROMISED) -> str | None:
    """Why so many ranks that share a GPU have no NCCL here, by its version and their number; None if they can try.

    Raises:
        TrainingError: the environment asks for something else.
    """
    asked = os.environ.get(SHARED, "")
    if asked not in ("", "0", "1"):
        raise TrainingError(
            f"{SHARED} is neither 0 nor 1", got=asked, allowed="0: no NCCL; 1: any number of ranks"
        )
    if asked == "0":
        return f"{SHARED}=0"
    version = loaded_nccl()
    if version is None:
        return "torch has no NCCL here"
    if version < SHARES_GPU:
        dotted, needed = (".".join(map(str, each)) for each in (version, SHARES_GPU))
        return f"NCCL {dotted} takes one rank a GPU, {needed} and later take several"
    if num_ranks > PROMISED and asked != "1":
        return f"NCCL between {num_ranks} ranks of one GPU may hang beside compute; {SHARED}=1 tries it"
    return None


def sharing_variables(num_sms: int) -> dict[str, str]:
    """What NCCL needs where ranks with so many SMs each share a GPU.

    Each communicator holds its blocks on the SMs of its rank while it waits for others, and three may wait at a time:
    together they take at most half of them. Without a bound NCCL takes memory for 64 channels, too: 1.6 GiB a rank and
    communicator on an H200, instead of 0.1 GiB for four.
    """
    return {ENABLE: "1", MAX_CTAS: str(max(1, min(8, num_sms // 6)))}
