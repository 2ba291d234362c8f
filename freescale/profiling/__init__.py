"""Measures one device for the simulator."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.profiling.measure import doubts, measure_profile, measure_sharing_ranks
    from freescale.profiling.profile_file import check_place
    from freescale.profiling.stopwatch import Stopwatch
else:
    __getattr__, __dir__ = open_door(__name__)
