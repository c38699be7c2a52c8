"""Results in notebooks: a picture or table for each kind of result, and its rows."""

from __future__ import annotations

import base64
from functools import singledispatch
from html import escape
from typing import TYPE_CHECKING, Any

from plans.figures import figures_of, figures_text
from plans.plan import Plan
from plans.timeline import PS_PER_S, STREAMS, Timeline
from reports.charts import Chart
from reports.pipeline_picture import pipeline_picture
from reports.plan_tables import plan_table
from reports.prediction import stages_chart
from reports.tables import Table
from simulator.forecast import Forecast

if TYPE_CHECKING:
    import pandas

__all__ = ["frame_of", "html_of"]

_MOST_ROWS = 50


@singledispatch
def frame_of(result: Any) -> pandas.DataFrame:
    """The rows of a result: of anything else than below, its `rows`.

    >>> from types import SimpleNamespace
    >>> frame_of(SimpleNamespace(rows=[{"tp": 1}, {"tp": 2}])).shape
    (2, 1)
    """
    import pandas

    return pandas.DataFrame(list(result.rows))


@frame_of.register(Plan)
def _(plan: Plan) -> pandas.DataFrame:
    """A row for every operator."""
    return plan_table(plan).to_pandas()


@frame_of.register(Timeline)
def _(timeline: Timeline) -> pandas.DataFrame:
    """A row for every span, in seconds."""
    import pandas

    ids, calls, parts = (list(each) for each in zip(*timeline.names, strict=True)) if timeline.names else ([], [], [])
    spans = pandas.DataFrame({
        "rank": timeline.rank, "step": timeline.step, "stream": [STREAMS[number] for number in timeline.stream],
        "id": [ids[number] for number in timeline.name_index],
        "call": [calls[number] for number in timeline.name_index],
        "part": [parts[number] for number in timeline.name_index],
        "start_s": timeline.start_ps / PS_PER_S, "end_s": timeline.end_ps / PS_PER_S,
    })  # fmt: skip
    spans.attrs.update(figures_of(timeline))
    return spans


@frame_of.register(Forecast)
def _(forecast: Forecast) -> pandas.DataFrame:
    """One row: the figures, the interval, and the memory of the fullest rank by role."""
    import pandas

    memory = {f"{role}_bytes": size for role, size in forecast.memory.items()}
    row = {**figures_of(forecast), "step_low_s": forecast.low_s, "step_high_s": forecast.high_s, **memory}
    return pandas.DataFrame([row])


@singledispatch
def html_of(result: Any) -> str:
    """A result as HTML: of anything else than below, its first rows as a table."""
    rows = list(result.rows)
    columns = tuple(dict.fromkeys(name for row in rows[:_MOST_ROWS] for name in row))
    body = tuple(tuple(str(row.get(name, "")) for name in columns) for row in rows)
    return Table(title=repr(result), columns=columns, rows=body).html(max_rows=_MOST_ROWS)


@html_of.register(Plan)
def _(plan: Plan) -> str:
    return f"<p>{escape(repr(plan))}</p>{plan_table(plan).joined('operator').html(max_rows=_MOST_ROWS)}"


@html_of.register(Timeline)
def _(timeline: Timeline) -> str:
    return _image(pipeline_picture([timeline], title=repr(timeline).strip("<>")))


@html_of.register(Forecast)
def _(forecast: Forecast) -> str:
    caption = figures_text(figures_of(forecast), low_s=forecast.low_s, high_s=forecast.high_s)
    return f"<p>{escape(caption)}</p>{_image(stages_chart(forecast))}"


def _image(picture: Chart) -> str:
    """A picture whose styles are its own."""
    data = base64.b64encode(picture.alone().encode()).decode()
    return f'<img alt="{escape(picture.title)}" style="max-width:100%" src="data:image/svg+xml;base64,{data}">'
