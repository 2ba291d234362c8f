"""One batch from load to update: prefetch, prioritized traffic, schedules."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.pipeline.adaptive import Switch
    from freescale.pipeline.ahead import AHEAD
    from freescale.pipeline.batch_ids import ids_of, unique_rows, with_indices
    from freescale.pipeline.batch_rows import TABLE, find_rows, look_up
    from freescale.pipeline.feature_ids import Domain, FeatureIds, IdColumn
    from freescale.pipeline.in_flight import ReadyRows
    from freescale.pipeline.layouts import LayoutPlanner
    from freescale.pipeline.loader import load_batches, naming_lost_workers
    from freescale.pipeline.padding import PaddedBatch, PaddedViews, Padder
    from freescale.pipeline.padding_sizes import PaddingSizes, foresee_sizes
    from freescale.pipeline.padding_source import padded_size
    from freescale.pipeline.parcel_loader import ParcelLoader, ParcelMaker
    from freescale.pipeline.postpone_share import PostponeShare
    from freescale.pipeline.prioritized import LOOK_AHEAD, PrioritizedPipeline
    from freescale.pipeline.prioritized_schedule import PrioritizedSchedule
    from freescale.pipeline.schedule import PlainSchedule, ReadyBatch, Schedule
    from freescale.pipeline.step_numbers import StepNumbers, pack_numbers
    from freescale.pipeline.stream_balance import BalancedBatch, StreamBalancer
    from freescale.pipeline.traffic import TableTraffic, Traffic, busiest_owner
else:
    __getattr__, __dir__ = open_door(__name__)
