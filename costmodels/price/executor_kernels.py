"""The cost of the executor's instructions on a device: several kernels, several passes over their operands.

A norm's gradient, rotary positions or a loss written in a few torch calls read and write more than their operands and
results once. A rule has the extra cost, fitted to every distinct instruction measured alone on the device. It holds for
this executor only: other stacks run other kernels.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from costmodels.fit.forms import Residuals, log_ratio, residuals, solve
from costmodels.fit.points import Point
from costmodels.price.compute import SUMS_ROWS, Compute, Rule, fused_name, rule_name, rule_s
from costmodels.price.embedding_gradient import EMBEDDING_GRADIENTS
from plans.model.graph import itemsize

__all__ = ["RuleFit", "fit_rules", "rule_points"]

LEAST_POINTS = 1
"""The passes of an instruction; at least one kernel."""

COMPUTE_CLASSES = ("matrix", "attention", "memory", "view", "update")
IN_PLACE = ("accumulate", "store")
CLASSES = ("memory", "update")
"""Products and attention have separate forms."""

LOOKUPS = ("embedding.forward",)
"""Their bytes are those they find, which `price` knows better than the sum of operands and results."""

LEAST_S = 5e-7
"""Below that an instruction ran no kernel: its result is a view of its operand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleFit:
    """The rules and how well they explain the points: those fitted, and those held out."""

    rules: Mapping[str, Rule]
    fitted: Residuals
    held_out: Residuals | None


def rule_points(points: Sequence[Point]) -> list[Point]:
    """The points that rules are fitted to or judged by."""
    return [
        point for point in points
        if point.kind == "rule" and point.options.get("class") in CLASSES and point.seconds > LEAST_S
        and not point.options.get("shares") and point.call not in LOOKUPS
    ]  # fmt: skip


def _of_the_last_code(points: Sequence[Point]) -> list[Point]:
    """Without what was measured of code that has changed since: of every call the code of its last point counts."""
    last = {(point.kind, point.call): point.options["code"] for point in points if "code" in point.options}
    return [
        point for point in points if point.options.get("code") == last.get((point.kind, point.call))
    ]  # fmt: skip


def fit_rules(points: Sequence[Point], compute: Compute) -> RuleFit:
    """Rules of all calls that were measured.

    Args:
        points: kind "rule", device times of single instructions, those held out only reported on; kind "dispatch" of
            the stack "twofold", host times of the same.
        compute: the device's peaks and the least time of its kernels; rules without points stay unchanged. A gradient
            of an embedding for which it has a form is torch's own kernels, and has no passes.

    Raises:
        TwofoldError: no points.
    """
    by_call: dict[str, list[Point]] = defaultdict(list)
    points = _of_the_last_code(points)
    formed = EMBEDDING_GRADIENTS if compute.embedding_gradient is not None else ()
    measured = [point for point in rule_points(points) if point.call not in formed]
    for point in measured:
        if not point.held_out:
            by_call[_name(point)].append(point)
    rules = {call: _fit(some, compute) for call, some in sorted(by_call.items()) if len(some) >= LEAST_POINTS}
    judged_calls = frozenset(rules)
    rules |= {
        call: msgspec.structs.replace(rule, kernels=1.0, passes=None)
        for call, rule in compute.rules.items() if call in formed
    }  # fmt: skip
    known = {**compute.rules, **rules}
    for call, dispatch_s in _dispatches(points).items():
        for name in [name for name in known if name.partition(":")[0] == call] or [call]:
            rules[name] = msgspec.structs.replace(known.get(name, Rule()), dispatch_s=dispatch_s)

    def judged(held_out: bool) -> Residuals | None:
        some = [point for point in measured if _name(point) in judged_calls and point.held_out is held_out]
        predicted_s = [rule_s(compute, rules[_name(point)], touched_bytes(point), rows=_rows(point)) for point in some]
        return residuals("rule", predicted_s, [point.seconds for point in some]) if some else None

    fitted = judged(False) or residuals("rule", [1.0], [1.0])
    return RuleFit(rules=rules, fitted=fitted, held_out=judged(True))


def _num_inputs(point: Point) -> int:
    return len(str(point.options.get("inputs", "")).split(";"))


def _rows(point: Point) -> int:
    """The rows that it sums over."""
    if point.call not in SUMS_ROWS:
        return 0
    first = str(point.options.get("inputs", "1")).partition(";")[0]
    return math.prod(int(size) for size in first.split("x")[:-1])


def _name(point: Point) -> str:
    """The key of its rule; of fused instructions by their steps, as points of earlier files have other keys."""
    if "steps" in point.options:
        calls = str(point.options["steps"]).split("+")
        picks = "cross_entropy.forward" in calls and _num_inputs(point) == 3
        return fused_name(calls, picks=picks)
    return rule_name(point.call, _num_inputs(point))


def _dispatches(points: Sequence[Point]) -> dict[str, float]:
    """Call -> host seconds of one instruction of the executor, the median over runs of one and of several devices."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for point in points:
        compute = point.options.get("class") in COMPUTE_CLASSES
        if point.kind == "dispatch" and point.stack == "twofold" and compute and not point.held_out:
            ratios[point.call].append(point.seconds)
    return {call: float(np.median(seconds)) for call, seconds in sorted(ratios.items())}


def touched_bytes(point: Point) -> int:
    """Bytes as `price` counts them: of the inputs and of the outputs; measuring counts an accumulator both ways.

    >>> add = Point(kind="rule", call="accumulate", shape=(4,), dtype="bfloat16", size_bytes=24, seconds=1e-6)
    >>> touched_bytes(add)
    16
    """
    twice = math.prod(point.shape) * itemsize(point.dtype) if point.call in IN_PLACE else 0
    return point.size_bytes - twice


def _fit(points: Sequence[Point], compute: Compute) -> Rule:
    sizes = np.array([touched_bytes(point) for point in points], dtype=float)
    rows = np.array([_rows(point) for point in points], dtype=float)
    seconds = np.array([point.seconds for point in points])

    def misfit(q: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        predicted_s = np.exp(q[0]) * compute.kernel_s + np.exp(q[1]) * sizes / compute.memory_Bps
        predicted_s = predicted_s + np.exp(q[2]) * rows if len(q) > 2 else predicted_s
        return np.concatenate(
            [log_ratio(predicted_s, seconds), 0.05 * q[:1]]
        )  # one kernel unless small ones say otherwise

    start = np.array([0.0, np.log(np.median(seconds * compute.memory_Bps / sizes))])
    least, most = np.array([-3.0, -4.0]), np.array([5.0, 6.0])
    if len(set(rows)) > 1 and len(points) > len(start) + 1:
        each = np.log(np.array([1e-9, 1e-13, 1e-6]))
        start, least, most = (np.append(ends, end) for ends, end in zip((start, least, most), each, strict=True))
    solved = np.exp(solve(misfit, start, least, most))
    return Rule(kernels=float(solved[0]), passes=float(solved[1]), row_s=float(solved[2]) if len(solved) > 2 else 0.0)
