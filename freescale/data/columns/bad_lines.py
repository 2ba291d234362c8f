"""What happens to lines that cannot be used: the first one stops `prepare`, or they are skipped and counted."""

from __future__ import annotations

from collections.abc import Callable

from freescale.errors import DataError

STOP, SKIP = "stop", "skip"
BAD_LINES = (STOP, SKIP)

_NUM_EXAMPLES = 5
# Fewer than this many are skipped whatever their share.
_FEW = 1000


class BadLines:
    """Lines that were skipped, and some of them as examples.

    Args:
        policy: "stop" or "skip".
    """

    def __init__(self, policy: str = STOP) -> None:
        if policy not in BAD_LINES:
            raise DataError("bad_lines is neither", got=policy, allowed=", ".join(BAD_LINES))
        self.skips = policy == SKIP
        self.num_skipped = 0
        self.examples: list[DataError] = []

    def take(self, error_of: Callable[[], DataError]) -> None:
        """One line that cannot be used; its error is raised unless such lines are skipped."""
        if not self.skips:
            raise error_of()
        self.num_skipped += 1
        if len(self.examples) < _NUM_EXAMPLES:
            self.examples.append(error_of())

    def check_few(self, num_read: int) -> None:
        """Skipping is for a few lines: if most are bad, something else is wrong."""
        if self.num_skipped > max(_FEW, num_read):
            first = self.examples[0]
            raise DataError(
                "More than half of the lines cannot be used",
                got=f"{self.num_skipped:,} of {self.num_skipped + num_read:,}, such as {first.what} ({first.got})",
                allowed=first.allowed,
                next_step="name other columns, another format or separator; skipping is for a few bad lines",
            )

    def describe(self) -> list[str]:
        """What was skipped, for the user: a count, and examples with their places."""
        if not self.num_skipped:
            return []
        said = [f"skipped {self.num_skipped:,} bad line" + ("s" if self.num_skipped > 1 else "")]
        return said + [f"  {example.what}: {example.got}" for example in self.examples]
