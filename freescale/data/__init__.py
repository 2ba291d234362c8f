"""Jagged batches, data sets, raw formats, and `prepare`."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.data.batches.examples import Examples
    from freescale.data.batches.log_examples import LogExamples, NextExamples, NextWindow
    from freescale.data.batches.segment_rule import Ints, SegmentRule, Segments, cut_history
    from freescale.data.batches.segments import SegmentedBatch, insert_summaries
    from freescale.data.batches.sequence_batch import SequenceBatch
    from freescale.data.batches.slots import FIRST, NO_ID, PAD, SLOT
    from freescale.data.batches.vocabulary import NumberedTexts, Vocabulary
    from freescale.data.columns.ids import IdKinds
    from freescale.data.features.feature_batch import MISSING, BatchFeatures
    from freescale.data.features.feature_source import FeatureSource, ItemFeatures, schema_of
    from freescale.data.features.request_features import (
        FeatureRequest,
        RequestFeatures,
        asked_features,
        has_fronts,
        of_candidates_alone,
        served_schema,
    )
    from freescale.data.features.request_features import describe as describe_request
    from freescale.data.features.served_items import ServedItems
    from freescale.data.listed_histories import ListedHistories
    from freescale.data.log.log_file import Log, WindowEntry, is_log, load_log
    from freescale.data.log.log_source import LogSource
    from freescale.data.log.sealer import append as append_log
    from freescale.data.log.sealer import drop as drop_windows
    from freescale.data.negatives import draw_negatives
    from freescale.data.pools import PoolIndex, PoolRule
    from freescale.data.preparing.preparation import ColumnNames, prepare
    from freescale.data.preparing.prepared_once import OnChange, when_prepared
    from freescale.data.preparing.reading.raw_format import RawFormat, RawSample, Reading
    from freescale.data.requests.anchors import AnchorRule
    from freescale.data.requests.log_requests import LogRequests, NextRequests
    from freescale.data.requests.request_examples import RequestExamples, outcome_columns
    from freescale.data.requests.request_rule import RequestRule
    from freescale.data.requests.target_facts import RepeatShare, label_shares, measure_repeats, task_facts
    from freescale.data.requests.task_rule import TaskRule, parse_tasks
    from freescale.data.requests.token_rule import TokenRule
    from freescale.data.schema.choosing import choose_features
    from freescale.data.schema.feature import Feature, Schema, legacy_schema
    from freescale.data.schema.reading import checked_schema, load_schema, read_schema
    from freescale.data.schema.reading import refuse as refuse_problems
    from freescale.data.schema.vocabulary import NONE
    from freescale.data.schema.vocabulary import WORDS as SCHEMA_WORDS
    from freescale.data.source import IntArray, SequenceSource, Split, SplitSource, check_source
    from freescale.data.source_kinds import open_source, source_kind
    from freescale.data.sources.parquet import ParquetSource
    from freescale.data.sources.synthetic import SyntheticOptions, SyntheticSource
    from freescale.data.stored.digest import DataDigest, differences, digest_data
    from freescale.data.stored.durable import sync_folder, sync_tree, write_durably
    from freescale.data.stored.item_content import CONTENT_FILE, ContentFile
    from freescale.data.stored.item_texts import TEXTS_FILE, item_numbers, load_texts
    from freescale.data.stored.manifest import LENGTHS_FILE, damaged, is_dataset, load_manifest
    from freescale.data.stored.tensor_file import read_arrays, read_tensors, write_arrays, write_tensors
    from freescale.data.temporal import TemporalSource, read_moment, written
    from freescale.data.words.item_names import ItemId, ItemNames, names_of_items
    from freescale.data.words.table_words import table_kinds, table_words
else:
    __getattr__, __dir__ = open_door(__name__)
