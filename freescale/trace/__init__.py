"""What was recorded: spans, bubbles, the metrics log. No torch."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.trace.bubbles import (
        CAUSES,
        Interval,
        Lengths,
        Parts,
        lengths_of,
        missing_of,
        overlap,
        slowest,
        split_step,
        total,
        union,
        without,
    )
    from freescale.trace.ideal import IdealClocks, Paths, ideal_times
    from freescale.trace.metrics_log import (
        BASELINES,
        IDS_OF,
        POPULARITY,
        REPEAT,
        Event,
        MetricsLog,
        column,
        decode,
        is_better,
        numeric_fields,
        read_metrics,
        step_of,
    )
    from freescale.trace.perfetto import write_trace
    from freescale.trace.profiler_trace import (
        Activity,
        ProfilerTrace,
        activity_of,
        clock_offsets,
        collective_keys,
        read_profiler_traces,
    )
    from freescale.trace.published import PUBLISHED_FILE, note_published, read_published
    from freescale.trace.replacement import whole_file
    from freescale.trace.span_file import (
        BLOCK,
        KeptStep,
        RankSpans,
        RunSpans,
        SpanWriter,
        common_steps,
        is_kept,
        read_spans,
        remove,
    )
    from freescale.trace.spans import MAIN, WORK, Arrival, Clock, Mark, Recorder, Span, StepNotes
    from freescale.trace.stages import (
        add,
        arrive,
        compute,
        current_stage,
        describe,
        exchange,
        have_ready,
        lag_of,
        mark,
        record_into,
        stage,
        stage_of_main_thread,
        took_over,
        waited,
    )
    from freescale.trace.time_account import (
        PARTS,
        WORDS,
        Account,
        account_of,
        busy_is_known,
        device_sentence,
        histogram,
        host_bound,
        lateness,
        rank_parts,
        slowest_of_steps,
    )
else:
    __getattr__, __dir__ = open_door(__name__)
