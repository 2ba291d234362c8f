"""One batch from load to update: prefetch, prioritized traffic, schedules."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.pipeline.adaptive import Switch
    from freescale.pipeline.ahead import AHEAD
    from freescale.pipeline.in_flight import ReadyRows, Traffic
    from freescale.pipeline.layouts import LayoutPlanner
    from freescale.pipeline.loader import load_batches, naming_lost_workers
    from freescale.pipeline.padding import PaddedBatch, PaddedViews, Padder, padded_size
    from freescale.pipeline.prioritized import LOOK_AHEAD, PrioritizedPipeline
    from freescale.pipeline.schedule import (
        TABLE,
        PlainSchedule,
        PrioritizedSchedule,
        ReadyBatch,
        Schedule,
        ids_of,
        look_up,
        with_indices,
    )
else:
    __getattr__, __dir__ = open_door(__name__)
