"""What people look at: report, comparison, charts, timelines."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.pages.charts import Chart, Series, draw
    from freescale.pages.compare import comparison_lines, write_comparison
    from freescale.pages.live import LivePage
    from freescale.pages.page import Card, Row, cards, document, folded, heading, missing, section, table
    from freescale.pages.profiler_report import write_trace_report
    from freescale.pages.report import replace_file, write_report
    from freescale.pages.run_header import made_here
    from freescale.pages.ticks import percent_labels
    from freescale.pages.time_panels import named_bars
    from freescale.pages.timeline import draw_timeline
else:
    __getattr__, __dir__ = open_door(__name__)
