"""shared_folder: the folder of a run is one folder for all machines, which checkpoints rest on."""

from __future__ import annotations

from collections.abc import Sequence

from freescale.comm.world import Ranks
from freescale.errors import FreeScaleError
from freescale.prove.claim import (
    NOT_PROVEN,
    PROVEN,
    Evidence,
    Finding,
    Report,
    Setting,
    evidence_of,
    needs_two,
    one_case,
)
from freescale.registry import register
from freescale.train import check_shared


@register("claim", "shared_folder")
class SharedFolder:
    """Rank 0 leaves a file for the others to find, and each of them one for rank 0."""

    title = "The run folder (--out) is one folder for all ranks"
    order = 20
    limit_s = 60.0

    why_not = staticmethod(needs_two)
    cases = staticmethod(one_case)

    @staticmethod
    def measure(ranks: Ranks, setting: Setting) -> Evidence:
        """What a training does before its first step."""
        try:
            setting.out.mkdir(parents=True, exist_ok=True)
            check_shared(setting.out, ranks=ranks)
        except FreeScaleError as error:
            return {"problem": error.what, "got": str(error.got or "")}
        return {"problem": ""}

    @staticmethod
    def judge(reports: Sequence[Report], setting: Setting) -> list[Finding]:
        """One that is not shared is found by every rank alike."""
        seen = evidence_of(reports, "files of other ranks")
        if isinstance(seen, Finding):
            return [seen]
        for each in seen:
            if each["problem"]:
                says = f"{each['problem']} ({each['got']}); choose a folder on a file system that all machines mount"
                return [Finding("files of other ranks", NOT_PROVEN, says)]
        says = f"each of {len(seen)} ranks saw what rank 0 wrote there, and rank 0 what each of them wrote"
        return [Finding("files of other ranks", PROVEN, says)]
