"""A time limit for calls of libraries that have none: some wait inside, for ever, for a rank that does not come."""

from __future__ import annotations

from collections.abc import Callable

from freescale.kernels.runtime import start_thread


def within(seconds: float, work: Callable[[], None], *, name: str) -> bool:
    """Whether work that may never come back has ended in time; what it raises is raised here."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = start_thread(run, name=name)
    thread.join(seconds)
    if errors:
        raise errors[0]
    return not thread.is_alive()
