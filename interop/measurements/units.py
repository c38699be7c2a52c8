"""Units next to numbers: in the cell of a figure, or in a column of their own."""

from __future__ import annotations

import re

from interop.measurements.headers import METRICS, Figure, figure_named

__all__ = ["figure_of_unit", "figure_with_unit"]

_WORDS = re.compile(
    r"s|sec\w*|ms|msec\w*|milli\w*|us|min\w*|h|hrs?|hours?|days?|weeks?|[kmb]?tok\w*|tks|t|tps|tgs|wps|words?|samples?|images?|imgs?|seqs?|sequences?"
    r"|examples?|ex|[gtp]|[gtp]f|[gtp]?flops?|tera\w*|peta\w*|[mh]fu|percent\w*|pct|%|fraction|share|ratio|[gm]i?b|k|m|b|thousand|million"
    r"|gpus?|npus?|devices?|chips?|cards?|accelerators?|dies?|ranks?|procs?|p|nodes?|[ahbv]\d+\w*|g[bh]\d+\w*|mi\d+x?|910\w*"
    r"|its?|iter\w*|steps?|batch\w*|per|of|in|all|total|aggregate\w*|avg|average|mean|median|peak|model|hardware|reserved|alloc\w*|bf|fp"
)
"""Words that units consist of."""

_NAMES = {
    "iteration_time_s": "step time", "tokens_per_s_per_gpu": "tokens/s/gpu", "samples_per_s_per_gpu": "samples/s/gpu",
    "tflops_per_gpu": "tflops/gpu", "mfu_percent": "mfu", "peak_memory_gib": "peak memory",
    "peak_memory_gb": "peak memory",
}  # fmt: skip
"""Metric in lower case -> a header without its unit."""

_FAMILIES = {
    **dict.fromkeys(METRICS, "a rate"), "iteration_time_s": "a time", "peak_memory_GiB": "memory",
    "peak_memory_GB": "memory",
}  # fmt: skip
"""Metric -> what it is; a unit of another one contradicts the header."""


def figure_of_unit(unit: str, header: str) -> Figure | None:
    """The figure of the unit in a cell, which may differ from its header's; None if the unit states none.

    Args:
        unit: what is behind the number.
        header: of the cell.

    Raises:
        ValueError: the unit is unknown.

    >>> figure_of_unit("GiB", "Peak memory").metric, figure_of_unit("ms", "Step time").factor
    ('peak_memory_GiB', 0.001)
    >>> figure_of_unit("bananas", "Step time")
    Traceback (most recent call last):
    ValueError: the unit 'bananas' is not known
    """
    _check_words(unit)
    plain = unit.strip(" %")
    if re.fullmatch(r"s|secs?|seconds?|ms|min|minutes?", plain):
        found = figure_named(f"step time ({'min' if plain.startswith('min') else plain})")
    elif re.fullmatch(r"[GM]i?B", plain):
        found = figure_named(f"memory ({plain})")
    else:
        bare = re.sub(r"[(\[].*", "", header)
        found = figure_named(plain) or figure_named(f"{bare} ({plain})")
    return None if found is None or found.tokens is not None else found


def figure_with_unit(metric: str, unit: str) -> Figure | None:
    """The figure of a metric with its unit in a column of its own; None if the metric is unknown.

    Raises:
        ValueError: the unit is unknown, or it measures something else than the metric.

    >>> figure_with_unit("iteration_time_s", "ms").factor, figure_with_unit("throughput", "tokens/s").of_all
    (0.001, True)
    """
    figure = figure_named(metric)
    if not unit:
        return figure
    _check_words(unit)
    if figure is None or metric.strip().lower() not in _NAMES:
        return figure_named(f"{metric} ({unit})") or figure or figure_named(unit)
    own = figure_of_unit(unit, _NAMES[metric.strip().lower()])
    if own is not None and _FAMILIES[own.metric] != _FAMILIES[figure.metric]:
        raise ValueError(f"the unit {unit!r} does not measure {_FAMILIES[figure.metric]}")
    return own if own is not None and _FAMILIES[figure.metric] != "a rate" else figure


def _check_words(unit: str) -> None:
    if any(_WORDS.fullmatch(word) is None for word in re.findall(r"[a-z]+\d*[a-z]*", unit.lower())):
        raise ValueError(f"the unit {unit.strip()!r} is not known")
