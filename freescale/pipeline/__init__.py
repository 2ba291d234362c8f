"""One batch from load to update: prefetch, prioritized traffic, schedules."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.pipeline.ids.batch_ids import ids_of, with_indices
    from freescale.pipeline.ids.batch_rows import TABLE, find_rows, look_up
    from freescale.pipeline.ids.feature_ids import Domain, FeatureIds, IdColumn
    from freescale.pipeline.ids.row_finder import RowFinder
    from freescale.pipeline.loading.ahead import AHEAD
    from freescale.pipeline.loading.layouts import LayoutPlanner
    from freescale.pipeline.loading.loader import LoadedBatches, load_batches, naming_lost_workers
    from freescale.pipeline.loading.parcel_loader import ParcelLoader, ParcelMaker
    from freescale.pipeline.loading.stream_balance import BalancedBatch, StreamBalancer
    from freescale.pipeline.padding.padded_batch import PaddedBatch, PaddedViews
    from freescale.pipeline.padding.padder import RAW_IDS, Padder
    from freescale.pipeline.padding.sizes import MOST_SIZES, PaddingSizes, PairLimit, RowCounts, foresee_sizes
    from freescale.pipeline.padding.source import padded_size
    from freescale.pipeline.padding.step_numbers import pack_numbers
    from freescale.pipeline.prioritized.adaptive import Switch
    from freescale.pipeline.prioritized.in_flight import ReadyRows
    from freescale.pipeline.prioritized.pipeline import LOOK_AHEAD, PrioritizedPipeline
    from freescale.pipeline.prioritized.postpone_share import PostponeShare
    from freescale.pipeline.prioritized.schedule import PrioritizedSchedule
    from freescale.pipeline.schedule import PlainSchedule, ReadyBatch, Schedule
    from freescale.pipeline.traffic import TableTraffic, Traffic, busiest_owner
else:
    __getattr__, __dir__ = open_door(__name__)
