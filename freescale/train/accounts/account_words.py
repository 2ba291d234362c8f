"""What the accounts of a run have to say in words: each reason once, and at the end what whoever started it can do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from freescale.trace import Parts, host_bound, total

_WORTH_A_WORD = 0.01
"""Of a run's time: what the watches took."""


@dataclass
class AccountWords:
    """Says every reason once.

    Args:
        say: told what whoever started the run should know.
    """

    say: Callable[[str], None]
    _told: set[str] = field(default_factory=set)

    def tell_stale(self, reason: str) -> None:
        """The work of the GPU is told by steps that were seen long ago."""
        if reason and reason not in self._told:
            self._told.add(reason)
            self.say(f"{reason}; its work is still told by steps that were seen before")

    def tell_unknown(self, ranks: tuple[int, ...], problem: str) -> None:
        """Gaps between kernels of these ranks count as compute; why, as far as this rank knows it."""
        if not ranks:
            return
        reason = problem or "not enough steps were seen, or only on other ranks"
        if reason not in self._told:
            self._told.add(reason)
            self.say(
                f"busy time of the GPU unknown on rank {', '.join(map(str, ranks))} ({reason}): gaps between kernels "
                "count as compute, not as host"
            )


def host_advice(totals: Sequence[Parts], *, device: str) -> str:
    """One sentence where devices wait for their hosts; empty elsewhere."""
    if device != "cuda" or not totals:
        return ""
    return host_bound(total(totals).share("host"))


def watch_story(took_s: float, run_s: float) -> str | None:
    """What it took to see the device work, where that is worth a word of so long a run."""
    if not took_s or took_s < _WORTH_A_WORD * run_s:
        return None
    return (
        f"{took_s:.1f} s went into seeing some steps kernel by kernel, so that idle time is told truthfully; "
        "the longer a run, the smaller the part of it"
    )
