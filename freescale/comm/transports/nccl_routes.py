"""Which of NCCL's own ways without SMs the installed versions have. Versions in, route and reason out; no torch.

    one-sided puts        any splits    torch >= 2.14 with its nccl2 backend (c10d windows), NCCL >= 2.30.7
                                        torch >= 2.12 (symmetric memory, put_signal), NCCL >= 2.29
                                        any torch, NCCL >= 2.30.7 called as a library (`nccl_library`)
    padded all-to-all     equal splits  NCCL >= 2.28 in one machine, >= 2.30.7 across machines, CTA policy ZERO
    send and receive      any splits    everywhere, as kernels on SMs

NCCL takes the way over SMs silently when a condition of its own is not met, so conditions are checked here first.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_PUTS = 200
"""Outstanding: with more than 256, NCCL has lost one and hung."""

MOST_UNEVEN = 1.2
"""Largest message over the mean: beyond it padding costs more than the SMs it spares."""

_IN_FLIGHT = 2


@dataclass(frozen=True)
class NcclFacts:
    """What decides.

    Args:
        torch: version, as (2, 13).
        nccl: version, as (2, 29, 7).
        num_nodes: machines.
        num_ranks: GPUs.
        nccl2: whether "nccl" is torch's newer backend: by default since 2.15, in 2.14 when asked for.
        zero_cta: whether the CTA policy may be set to ZERO; False where the user has set another one.
        missing: a function of NCCL that puts by the library need and that is not in it.
    """

    torch: tuple[int, int]
    nccl: tuple[int, int, int]
    num_nodes: int
    num_ranks: int
    nccl2: bool = False
    zero_cta: bool = True
    missing: str | None = None


@dataclass(frozen=True)
class NcclRoute:
    """A way rows can take.

    Args:
        name: window, put_signal, library, padded or collective.
        sm_free: whether the transfer holds no SM.
        reason: why this one, and why not those before it.
    """

    name: str
    sm_free: bool
    reason: str


def choose_route(facts: NcclFacts, *, uneven: float = 1.0) -> NcclRoute:
    """The best way for exchanges whose largest message is so many times the mean."""
    refused: list[str] = []
    for name, problem, reason in (
        ("window", no_window(facts), "one-sided puts through c10d windows"),
        ("put_signal", no_put_signal(facts), "one-sided puts through symmetric memory"),
        ("library", no_library(facts), "one-sided puts by NCCL's own functions"),
        ("padded", no_padded(facts, uneven=uneven), "all-to-all of padded messages by copy engines"),
    ):
        if problem is None:
            return NcclRoute(name, True, "; ".join([reason, *refused]))
        refused.append(f"no {name}: {problem}")
    return NcclRoute("collective", False, "; ".join(["send and receive kernels", *refused]))


def no_window(facts: NcclFacts) -> str | None:
    """What keeps c10d windows from being used."""
    if facts.torch < (2, 14):
        return f"torch {_dotted(facts.torch)} has none, 2.14 does"
    if not facts.nccl2:
        return "the nccl2 backend is off (TORCH_DIST_USE_NCCL2)"
    if facts.nccl < (2, 30, 7):
        return f"NCCL {_dotted(facts.nccl)}, 2.30.7 is needed"
    return _too_many(facts)


def no_put_signal(facts: NcclFacts) -> str | None:
    """What keeps put_signal of symmetric memory from being used."""
    if facts.torch < (2, 12):
        return f"torch {_dotted(facts.torch)} cannot reach it, 2.12 can"
    if facts.nccl < (2, 29, 0):
        return f"NCCL {_dotted(facts.nccl)} has no one-sided puts, 2.29 does"
    return _too_many(facts)


def no_library(facts: NcclFacts) -> str | None:
    """What keeps NCCL's puts from being called without torch."""
    if facts.nccl < (2, 30, 7):
        return f"NCCL {_dotted(facts.nccl)}, 2.30.7 is needed: before it puts were lost"
    if facts.missing is not None:
        return f"the loaded NCCL has no {facts.missing}"
    return _too_many(facts)


def no_padded(facts: NcclFacts, *, uneven: float = 1.0) -> str | None:
    """What keeps the padded all-to-all from being used."""
    needed = (2, 28, 0) if facts.num_nodes == 1 else (2, 30, 7)
    if facts.nccl < needed:
        where = "one machine" if facts.num_nodes == 1 else "several machines"
        return f"NCCL {_dotted(facts.nccl)}, {_dotted(needed)} is needed on {where}"
    if not facts.zero_cta:
        return "NCCL_CTA_POLICY is set to something else"
    if facts.num_ranks == 2 and facts.nccl < (2, 31, 2):
        return "NCCL before 2.31.2 hangs at the first such exchange of two ranks"
    if uneven > MOST_UNEVEN:
        return f"the largest message is {uneven:.2f} times the mean, {MOST_UNEVEN} at most"
    return None


def parse_version(text: str) -> tuple[int, ...]:
    """Numbers of a version; what follows them (+cu130, rc1) is left out."""
    numbers = []
    for part in text.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def _too_many(facts: NcclFacts) -> str | None:
    puts = _IN_FLIGHT * (facts.num_ranks - 1)
    return None if puts < MOST_PUTS else f"{puts} puts would be outstanding, fewer than {MOST_PUTS} may be"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
