"""A claim: what is said of this library, how ranks show it, and what the evidence of all of them proves.

A kind of claim is one file of `claims/`, or registered from outside (`--plugin`):

    @register("claim", "mine")
    class Mine:
        title = "Rows arrive in the order of their ids"
        order = 90                                     # where it stands in the report
        limit_s = 60.0                                 # ranks that take longer are ended; the claim is not proven
        patience_s = 60.0                              # so long ranks wait for each other; may be left out
        environment = {}                               # further variables of its processes; may be left out

        @staticmethod
        def why_not(facts): return None                # or one sentence: why it is not tried here

        @staticmethod
        def cases(facts): return [""]                  # each is tried by processes of its own

        @staticmethod
        def measure(ranks, setting): return {...}      # on every rank; numbers and texts

        @staticmethod
        def judge(reports, setting): return [Finding(...)]     # once, from what all ranks have seen

Every case runs in fresh processes, so one that hangs or dies costs its own verdict and no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from freescale.comm.world import place_met
from freescale.errors import EXIT_PEER

if TYPE_CHECKING:
    from freescale.comm.world import Ranks

Status = Literal["proven", "not proven", "not tried"]
Evidence = dict[str, Any]
"""What one rank has seen: values that JSON knows."""

PROVEN: Status = "proven"
NOT_PROVEN: Status = "not proven"
NOT_TRIED: Status = "not tried"

NOT_USABLE = "not_usable"
"""Evidence of ranks that cannot try a case: why."""


@dataclass(frozen=True)
class Table:
    """Figures that need more than a sentence."""

    names: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Finding:
    """What was found of one claim, or of one case of it.

    Args:
        what: what was looked at, in a few words.
        status: proven, not proven or not tried.
        says: one sentence with its figures; why not, where it is not proven.
        figures: the same for programs.
        table: more of them.
    """

    what: str
    status: Status
    says: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    table: Table | None = None


@dataclass(frozen=True)
class Facts:
    """The ranks that are there, for claims that need some kind of them.

    Args:
        device: cpu or cuda.
        num_ranks: of all machines.
        num_machines: how many those are.
        quick: whether only what takes seconds is wanted.
    """

    device: str
    num_ranks: int
    num_machines: int
    quick: bool


@dataclass(frozen=True)
class Setting:
    """What ranks are told that try a claim.

    Args:
        out: a folder of this proof, which all machines should share.
        quick: whether to take seconds or minutes.
        case: which case of the claim.
        device: cpu or cuda.
    """

    out: Path
    quick: bool
    case: str
    device: str


@dataclass(frozen=True)
class Report:
    """What became of one rank.

    Args:
        rank: which.
        evidence: what it has seen; None if it did not come to its end.
        error: what it said instead.
        exit_code: how its process ended; negative: by a signal.
        timed_out: it was ended because it took too long.
        seconds: how long it took.
    """

    rank: int
    evidence: Evidence | None
    error: str = ""
    exit_code: int | None = None
    timed_out: bool = False
    seconds: float = 0.0


class Claim(Protocol):
    """What is registered as a claim; all of it static."""

    title: str
    order: int
    limit_s: float

    def why_not(self, facts: Facts) -> str | None:
        """Why it is not tried on these ranks; None if it is."""

    def cases(self, facts: Facts) -> Sequence[str]:
        """What is tried one after the other, each by processes of its own."""

    def measure(self, ranks: Ranks, setting: Setting) -> Evidence:
        """What one rank sees; every rank calls it at the same moment."""

    def judge(self, reports: Sequence[Report], setting: Setting) -> list[Finding]:
        """What the evidence of all ranks proves."""


def needs_two(facts: Facts) -> str | None:
    """For `why_not` of claims about several ranks."""
    return "there is one rank only" if facts.num_ranks == 1 else None


def one_case(facts: Facts) -> Sequence[str]:
    """For `cases` of claims that have one."""
    return [""]


def evidence_of(reports: Sequence[Report], what: str) -> list[Evidence] | Finding:
    """What every rank has seen; or the finding that says why some rank saw nothing."""
    seen = [report.evidence for report in reports if report.evidence is not None]
    if len(seen) == len(reports):
        return Finding(what, NOT_TRIED, seen[0][NOT_USABLE]) if NOT_USABLE in seen[0] else seen
    return Finding(what, NOT_PROVEN, cause_of(reports))


def cause_of(reports: Sequence[Report]) -> str:
    """Why ranks have nothing to show: an error of their own, a signal, what others heard of it, or too long a time."""
    missing = [report for report in reports if report.evidence is None]
    late = [report for report in missing if report.timed_out]
    killed = [report for report in missing if (report.exit_code or 0) < 0 and not report.timed_out]
    spoke = [report for report in missing if report.error and not report.timed_out and report not in killed]
    own = [report for report in spoke if report.exit_code != EXIT_PEER]
    if killed and not own:
        where = place_met(killed[0].error)
        return f"rank {killed[0].rank} was ended by signal {-(killed[0].exit_code or 0)} {where}".rstrip()
    if spoke:
        first = (own or spoke)[0]
        return f"rank {first.rank}: {_short(first.error)}"
    if late:
        numbers = ", ".join(str(report.rank) for report in late)
        return f"ranks {numbers} did not come to an end within {late[0].seconds:.0f} s"
    return f"rank {missing[0].rank} ended with exit code {missing[0].exit_code} and no word"


def _short(text: str, *, most: int = 600) -> str:
    """The end of what somebody said: tracebacks have their reason there."""
    lines = [line.rstrip() for line in text.strip().splitlines() if line.strip()]
    said = " ".join(line.strip() for line in lines[-4:])
    return said if len(said) <= most else f"... {said[-most:]}"
