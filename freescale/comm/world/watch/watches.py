"""What a rank knows of the others, and how it tells them of its own failures."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from freescale.comm.world.watch.failures import LINE, end_process, report_failure, tell_launcher
from freescale.comm.world.watch.liveness import BEAT_S, Pulse
from freescale.comm.world.watch.stacks import show_stacks_when_asked
from freescale.errors import EXIT_PEER, Preempted


class Watch:
    """What a rank knows of the others; one of these in every process that has joined a run."""

    def failed(self, error: BaseException) -> BaseException:
        """Tell of an error on its way out of this rank; returns what to raise: the cause, if that is elsewhere."""
        report_failure(error)
        return error

    def leave(self) -> None:
        """This rank is done, and everything is well."""

    @contextmanager
    def telling_failures(self) -> Iterator[None]:
        """Around what may fail: the others hear of it, the user reads it, and only then is anything torn down."""
        try:
            yield
        except (Preempted, SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            cause = self.failed(error)
            if cause is error:
                raise
            raise cause from error


class LaunchedWatch(Watch):
    """Of a rank whose launcher has started all others, too: it sees them end itself.

    Args:
        pulse: of this rank.
    """

    def __init__(self, pulse: Pulse) -> None:
        self._pulse, self._done = pulse, threading.Event()
        show_stacks_when_asked()
        threading.Thread(target=self._beat, name="signs of life", daemon=True).start()

    def leave(self) -> None:
        """No more signs, and nobody misses them."""
        self._done.set()
        tell_launcher({"bye": True})

    def _beat(self) -> None:
        with socket.socket(fileno=os.dup(int(os.environ[LINE]))) as line:
            while not self._done.is_set():
                tell_launcher({"sign": asdict(self._pulse.take())})
                heard, _, _ = select.select([line], [], [], BEAT_S)
                if heard and not self._done.is_set():
                    end_process(EXIT_PEER)  # the launcher has said why
