"""What a fault is, and where all of them are listed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.chaos.trial import Trial

Story = Callable[[Trial], None]


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Args:
        name: how it is asked for.
        story: what happens, and what must hold.
        isolated: it needs namespaces of its own (mounts, links, ports).
        quick: it takes a few seconds and is right on any machine: part of what CI runs.
    """

    name: str
    story: Story
    isolated: bool = False
    quick: bool = False

    @property
    def about(self) -> str:
        """The first line of its description."""
        return (self.story.__doc__ or "").partition("\n")[0]


FAULTS: dict[str, Fault] = {}


def fault(*, isolated: bool = False, quick: bool = False) -> Callable[[Story], Story]:
    """List a fault under the name of its function."""

    def listed(story: Story) -> Story:
        name = story.__name__.replace("_", "-")
        assert name not in FAULTS, name
        FAULTS[name] = Fault(name, story, isolated=isolated, quick=quick)
        return story

    return listed
