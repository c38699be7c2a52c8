"""Tables, charts and HTML reports (floor 6).

A report is a `Page` of sections (`page.py`, the templates in `templates/`). What is in a section is a `Table`
(rich in a terminal, a template in a page, pandas and CSV to take away), a `Chart` that matplotlib draws, or a
`LiveTimeline`, whose spans `live.py` packs and `templates/timeline.js` draws. `step_page` is the report of a
step. matplotlib and pandas are imported here only, in functions.

It may import every package but `twofold`.
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
