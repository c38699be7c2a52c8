"""Degrees as text, for tables and messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from plans.degrees.groups import ORDER
from plans.degrees.value import DEGREES, Degrees, even_layers

__all__ = ["blocks_per_chunk", "describe", "layout_words"]

_AXES = ("dp", "ep", "cp", "tp", "pp")


def describe(degrees: Degrees) -> str:
    """Degrees on one line; rarely changed degrees are listed only if they differ from their default.

    >>> describe(Degrees(dp=2, tp=4, pp=2, micro_batch=1, global_batch=16))
    'dp 2 tp 4 pp 2, micro-batch 1 x 8, 1f1b, recompute none, optimizer level 0'
    """
    parts = [_axes(degrees, _AXES) or "one device"]
    for name, degree in DEGREES.items():
        if name in _AXES:
            continue
        value = degrees.values[name]
        if name in _WORDS:
            parts.append(_WORDS[name](degrees))
        elif value != degree.default:
            parts.append(f"{degree.word or name} {value}")
    return ", ".join(part for part in parts if part)


def layout_words(degrees: Degrees) -> str:
    """The degrees that decide how operators are split and how often they run.

    >>> layout_words(Degrees(dp=2, tp=4, global_batch=8, sequence_parallel=True))
    'tp 4 with sequence parallel, micro-batch 1, recompute none'
    """
    split = _axes(degrees, ("ep", "cp", "tp")) + (" with sequence parallel" if degrees.sequence_parallel else "")
    return f"{split or 'not split'}, micro-batch {degrees.micro_batch}, {_recompute(degrees)}"


def blocks_per_chunk(count: int) -> str:
    """A number of blocks of every pipeline chunk.

    >>> blocks_per_chunk(1), blocks_per_chunk(2)
    ('1 block per chunk', '2 blocks per chunk')
    """
    return f"{count} block{'' if count == 1 else 's'} per chunk"


def _axes(degrees: Degrees, names: Iterable[str]) -> str:
    return " ".join(f"{name} {value}" for name in names if (value := getattr(degrees, name)) > 1)


def _micro_batch(degrees: Degrees) -> str:
    return f"micro-batch {degrees.micro_batch} x {degrees.num_micro_batches}"


def _schedule(degrees: Degrees) -> str:
    return degrees.schedule if degrees.virtual == 1 else f"{degrees.schedule} x {degrees.virtual}"


def _recompute(degrees: Degrees) -> str:
    some = "" if degrees.recompute_layers is None else f" in {blocks_per_chunk(degrees.recompute_layers)}"
    return f"recompute {degrees.recompute}{some}"


def _order(degrees: Degrees) -> str:
    if degrees.order == ORDER:
        return ""
    return f"order {'-'.join(axis for axis in degrees.order if getattr(degrees, axis) > 1)}"


def _layers(degrees: Degrees) -> str:
    layers = degrees.layers
    if layers is None or layers == even_layers(sum(layers), len(layers)):
        return ""
    return f"layers {_runs(layers)}"


_WORDS: dict[str, Callable[[Degrees], str]] = {
    "micro_batch": _micro_batch,
    "schedule": _schedule,
    "virtual": lambda degrees: "",
    "recompute": _recompute,
    "recompute_layers": lambda degrees: "",
    "zero": lambda degrees: f"optimizer level {degrees.optimizer.parallel_level}",
    "sequence_parallel": lambda degrees: "sequence parallel" if degrees.sequence_parallel else "",
    "interleave": lambda degrees: f"{degrees.interleave} slices" if degrees.interleave > 1 else "",
    "overlap_pairs": lambda degrees: "overlapped pairs" if degrees.overlap_pairs else "",
    "order": _order,
    "layers": _layers,
}
"""Degrees that are always written, written with others, or in a separate form; the rest only if not the default."""


def _runs(layers: Sequence[int]) -> str:
    """Counts with repetitions joined: 3, 4, 4, 4, 1 is "3 4x3 1"."""
    parts: list[list[int]] = []
    for count in layers:
        if parts and parts[-1][0] == count:
            parts[-1][1] += 1
        else:
            parts.append([count, 1])
    return " ".join(f"{value}x{count}" if count > 1 else str(value) for value, count in parts)
