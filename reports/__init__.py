"""Tables, charts and HTML reports (floor 6).

A report is a `Page` of sections (`page.py`, with templates in `templates/`). A section contains `Table`s (shown by rich
in a terminal and by a template in a page, exported as CSV or through pandas), `Chart`s drawn by matplotlib, and a
`LiveTimeline`, whose spans are packed by `live.py` and drawn by `templates/timeline.js`. `step_page` is the report of a
step. Only this package imports matplotlib and pandas, inside functions.

It may import every package except `interop` and `twofold`.
"""

from reports.graph_picture import save_graph
from reports.html import Report, step_page
from reports.live import LiveTimeline
from reports.memory import memory_table
from reports.pipeline_picture import pipeline_picture
from reports.plan_tables import parameter_table, plan_table, plan_text
from reports.search_report import trade_picture
from reports.tables import Check, Table, verification_table
from reports.time_tables import comparison_table, composition_table, timeline_table
from reports.whatif_tables import sensitivity_table, tornado_picture, what_if_table

__all__ = [
    "Check",
    "LiveTimeline",
    "Report",
    "Table",
    "comparison_table",
    "composition_table",
    "memory_table",
    "parameter_table",
    "pipeline_picture",
    "plan_table",
    "plan_text",
    "save_graph",
    "sensitivity_table",
    "step_page",
    "timeline_table",
    "tornado_picture",
    "trade_picture",
    "verification_table",
    "what_if_table",
]
