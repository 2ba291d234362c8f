"""Ranks watch each other: who has failed, who is gone, who is silent; all hear of it within seconds.

Every rank keeps one connection to rank 0, over which it sends a sign of life a second. The kernel closes it when the
process ends, however it ends; a machine that is cut off sends nothing. Rank 0 waits a moment for the best explanation
and tells everybody. Ranks that the launcher of one machine has started send their signs to it: it sees them end itself.
"""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.comm.world.watch.failures import (
        LINE,
        FailureNote,
        end_process,
        first_cause,
        in_words,
        keep_failures_in,
        mark_own,
        report_failure,
        say,
        was_reported,
    )
    from freescale.comm.world.watch.liveness import BEAT_S, Liveness, SignOfLife, silence
    from freescale.comm.world.watch.opening import open_watch
    from freescale.comm.world.watch.stacks import (
        ask_for_stacks,
        place_met,
        show_stacks_of_errors,
        show_stacks_when_asked,
        thread_met,
    )
    from freescale.comm.world.watch.watches import Watch
else:
    __getattr__, __dir__ = open_door(__name__)
