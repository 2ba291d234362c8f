"""What people look at: report, comparison, charts, timelines."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.pages.comparison.compare import comparison_lines, write_comparison
    from freescale.pages.drawing.charts import Chart, Series, draw
    from freescale.pages.drawing.page import (
        Card,
        Row,
        cards,
        document,
        folded,
        heading,
        missing,
        section,
        table,
    )
    from freescale.pages.drawing.ticks import percent_labels
    from freescale.pages.drawing.timeline import draw_timeline
    from freescale.pages.live import LivePage
    from freescale.pages.panels.run_header import made_here
    from freescale.pages.panels.time_panels import named_bars
    from freescale.pages.profiler_report import write_trace_report
    from freescale.pages.report import replace_file, write_report
else:
    __getattr__, __dir__ = open_door(__name__)
