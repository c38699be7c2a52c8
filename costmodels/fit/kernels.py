"""Rates of an accelerator from device times of its kernels: matrix products, memory-bound kernels, attention.

Each fit chooses between a plain form and richer ones by cross-validation: a form with more parameters is used only if
it predicts held-out points better. The forms are those of `costmodels.price.compute`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from costmodels.fit.forms import Floats, log_ratio, solve
from costmodels.fit.points import Point
from costmodels.fit.torch_kernels import TORCH_KERNELS, fit_torch_kernels, is_torch_kernel, torch_kernel_s
from costmodels.price.compute import Attention, Compute, attention_s, matrix_rate, matrix_s, memory_s
from plans.errors import TwofoldError
from plans.model.graph import itemsize

__all__ = [
    "KernelFit",
    "choose",
    "describe_choice",
    "fit_attention",
    "fit_memory",
    "folds",
    "predicted_s",
    "relative_clock",
]

FOLDS = 5

GAIN = 0.97
"""A richer form must bring the cross-validated error below this share of the plainer one's."""

STREAMING = ("add.forward", "add_.forward", "mul.forward", "relu.forward", "silu.forward", "slice")
"""Kernels that only stream their bytes: their cost is 1."""

TOLERANCE = 1e-4
"""Relative change of the loss at which the fit of a larger form ends."""

TYPICAL_WEIGHT = 0.02
"""Parameters that the points do not determine stay near typical values; a factor of e counts as an error of 2 %."""

FREE_COST = 0.02
"""Kernels whose bytes cost within this of 1 have no entry of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFit:
    """The form that was fitted to kernels, with its errors.

    Args:
        compute: the rates, with what was fitted replaced.
        form: which form was chosen, with the cross-validated errors of all.
        predicted_s: of the points, by the chosen form fitted to all.
        left_out_s: of the points, each by the chosen form fitted to others, at the usual clock, as a forecast has it.
    """

    compute: Compute
    form: str
    predicted_s: tuple[float, ...]
    left_out_s: tuple[float, ...]


def fit_memory(points: Sequence[Point], compute: Compute) -> KernelFit:
    """Memory bandwidth, the least time of a kernel, and the extra cost of each kind of kernel.

    Args:
        points: kind "memory", device times, none of them held out.
        compute: peaks.

    Raises:
        TwofoldError: fewer than 3 points.
    """
    if len(points) < 3:
        raise TwofoldError(f"{len(points)} memory-bound kernels were measured; the fit needs at least 3: measure again")
    seconds = np.array([point.seconds for point in points])
    forms = {
        "one bandwidth": 0, "a cost for each kernel": 1, "a cost and a start for each kernel": 2,
        "and a root of bytes": 3,
    }  # fmt: skip
    left_out = {name: np.empty(len(points)) for name in forms}
    for name, form in forms.items():
        for inside, outside in folds(points):
            fitted = _memory_parameters([points[at] for at in inside], compute, form)
            left_out[name][outside] = [predicted_s(points[at], fitted) for at in outside]
    errors = {name: float(np.median(np.abs(log_ratio(each_s, seconds)))) for name, each_s in left_out.items()}
    chosen = choose(errors)
    fitted = _memory_parameters(points, compute, forms[chosen])
    return KernelFit(
        compute=fitted, form=describe_choice(chosen, errors),
        predicted_s=tuple(predicted_s(point, fitted) for point in points),
        left_out_s=tuple(map(float, left_out[chosen])),
    )  # fmt: skip


def _memory_parameters(points: Sequence[Point], compute: Compute, each: int) -> Compute:
    """The rates of `_byte_costs`, and the figures of kernels that have forms of their own."""
    plain = [point for point in points if not is_torch_kernel(point)]
    return fit_torch_kernels(points, _byte_costs(plain, compute, each))


def _byte_costs(points: Sequence[Point], compute: Compute, each: int) -> Compute:
    """Rates with costs of each call (`each` 1), and starts (2), and a root of what is moved (3)."""
    root, each = each == 3, min(each, 2)
    named = _names(points)
    calls = sorted(set(named)) if each else []
    which = np.array([calls.index(name) if each else 0 for name in named])
    sizes = np.array([point.size_bytes for point in points], dtype=float)
    kernels = np.array([max(1.0, point.figures.get("kernels", 1.0)) for point in points])
    seconds = np.array([point.seconds for point in points])
    costs, starts = slice(2, 2 + len(calls)), slice(2 + len(calls), 2 + each * len(calls))

    def misfit(q: Floats) -> Floats:
        cost = np.exp(q[costs][which]) if each else 1.0
        begin = np.exp(q[starts][which]) if each == 2 else 1.0
        moved = sizes * cost / (compute.memory_Bps * np.exp(q[1]))
        predicted = kernels * np.exp(q[0]) * begin + moved + (np.sqrt(np.exp(q[-1]) * moved) if root else 0.0)
        # costs and starts are near 1 unless their own points say otherwise
        return np.concatenate([log_ratio(predicted, seconds), 0.1 * q[costs], 0.05 * q[starts]])

    count = each * len(calls)
    chunk = [np.log([1e-7, 1e-10, 1e-5])] if root else []
    start = np.array([np.log(2e-6), np.log(0.85), *np.zeros(count), *(edge[0] for edge in chunk)])
    lower = np.array([np.log(1e-7), np.log(0.05), *np.full(count, -2.0), *(edge[1] for edge in chunk)])
    upper = np.array([np.log(2e-5), 0.0, *np.full(count, 4.0), *(edge[2] for edge in chunk)])
    q = solve(misfit, start, lower, upper)
    if each:  # only the product of a cost and the bandwidth is known: what only streams has cost 1
        streams = [number for number, call in enumerate(calls) if call in STREAMING]
        plain = max(float(np.median(q[costs][streams])) if streams else float(np.min(q[costs])), q[1])
        q[1], q[costs] = q[1] - plain, q[costs] - plain
        if each == 2:
            plain = float(np.median(q[starts][streams])) if streams else float(np.min(q[starts]))
            q[0], q[starts] = q[0] + plain, q[starts] - plain

    def table(logs: Floats) -> dict[str, float]:
        factors = zip(calls, map(float, np.exp(logs)), strict=True)
        return {call: factor for call, factor in factors if abs(factor - 1) > FREE_COST}

    return msgspec.structs.replace(
        compute, kernel_s=float(np.exp(q[0])), memory_efficiency=float(np.exp(q[1])), kernel_cost=table(q[costs]),
        kernel_start=table(q[starts]) if each == 2 else {}, memory_chunk_s=float(np.exp(q[-1])) if root else 0.0,
    )  # fmt: skip


def _names(points: Sequence[Point]) -> list[str]:
    """The name under which the cost of each point is stored: its call, with its dtype if most points have another."""
    dtypes: dict[str, Counter[str]] = defaultdict(Counter)
    for point in points:
        dtypes[memory_call(point)][point.dtype] += 1
    return [
        memory_call(point) if dtypes[memory_call(point)].most_common(1)[0][0] == point.dtype
        else f"{memory_call(point)}:{point.dtype}"
        for point in points
    ]  # fmt: skip


def fit_attention(points: Sequence[Point], compute: Compute) -> KernelFit:
    """Efficiency of the fused attention kernel forward and backward.

    Args:
        points: kind "attention", device times, none of them held out.
        compute: peaks, cores and memory efficiency.

    Raises:
        TwofoldError: fewer than 3 forward points.
    """
    forward = sum(not is_backward(point) for point in points)
    if forward < 3:
        raise TwofoldError(f"{forward} attention forwards were measured; the fit needs at least 3: measure again")
    left_out = np.empty(len(points))
    for inside, outside in folds(points):
        some = _attention_parameters([points[at] for at in inside], compute)
        left_out[outside] = [predicted_s(points[at], some) for at in outside]
    fitted = _attention_parameters(points, compute)
    return KernelFit(
        compute=fitted, form="fused kernel", predicted_s=tuple(predicted_s(point, fitted) for point in points),
        left_out_s=tuple(map(float, left_out)),
    )  # fmt: skip


def _attention_parameters(points: Sequence[Point], compute: Compute) -> Compute:
    seconds = np.array([point.seconds for point in points])
    backs, dims = any(is_backward(point) for point in points), len({point.shape[5] for point in points}) > 1
    causal = len({point.options.get("causal", 0) for point in points}) > 1
    split = any(point.shape[3] < point.shape[4] for point in points)
    typical = {
        name: value for name, value in _ATTENTION.items()
        if (backs or "backward" not in name) and (dims or name != "half_dim")
        and (causal or not name.endswith("causal_cost")) and (split or not name.endswith("split_cost"))
    }  # fmt: skip
    start, lower, upper = np.log(np.array(list(typical.values()))).T
    clocks = [point.clock_MHz for point in points if point.clock_MHz]
    clock_MHz = round(float(np.median(clocks)), 1) if clocks else None
    # A section checks all its figures whenever one is replaced: the fit leaves out those that attention does not read.
    bare = msgspec.structs.replace(compute, form_cost={}, kernel_cost={}, kernel_start={}, rules={}, tiled=None)

    def model_of(q: Floats, compute: Compute) -> Compute:
        values = {name: float(value) for name, value in zip(typical, np.exp(q), strict=True)}
        values.setdefault("backward_efficiency", 0.8 * values["forward_efficiency"])
        for name in values:
            if name.endswith(("efficiency", "quantisation", "tail")):
                values[name] = min(1.0, values[name])
        return msgspec.structs.replace(compute, attention=Attention(clock_MHz=clock_MHz, **values))  # type: ignore[arg-type]

    def misfit(q: Floats) -> Floats:
        fitted = model_of(q, bare)
        errors = log_ratio(np.array([predicted_s(point, fitted, at_clock=True) for point in points]), seconds)
        return np.concatenate([errors, TYPICAL_WEIGHT * (q - start)])

    return model_of(solve(misfit, start, lower, upper, tolerance=TOLERANCE), compute)


_ATTENTION: Mapping[str, tuple[float, float, float]] = {
    "forward_efficiency": (0.6, 0.02, 1.0), "backward_efficiency": (0.5, 0.02, 1.0),
    "half_keys": (100.0, 1e-1, 4e3), "backward_half_keys": (200.0, 1e-1, 4e3), "half_dim": (30.0, 1e-1, 400.0),
    "causal_cost": (1.1, 0.5, 3.0), "backward_causal_cost": (1.1, 0.5, 3.0),
    "split_cost": (1.3, 0.5, 5.0), "backward_split_cost": (1.3, 0.5, 5.0), "quantisation": (0.5, 1e-2, 1.0),
    "tail": (0.5, 1e-2, 1.0), "backward_tail": (0.5, 1e-2, 1.0),
    "start_s": (3e-6, 1e-8, 5e-5), "backward_start_s": (6e-6, 1e-8, 1e-4),
}  # fmt: skip
"""Parameter of `Attention` -> typical value, least, most."""


def relative_clock(point: Point, compute: Compute) -> float:
    """The recorded clock of a point, relative to that of the rates; 1 if either is unknown."""
    rates = compute.attention if point.kind == "attention" else compute
    usual = rates.clock_MHz if rates is not None else None
    return point.clock_MHz / usual if point.clock_MHz and usual else 1.0


def predicted_s(point: Point, compute: Compute, *, at_clock: bool = False) -> float:
    """The device time of a measured kernel by the forms (kinds matrix, memory and attention).

    Args:
        point: measured.
        compute: rates.
        at_clock: at the clock that was recorded next to the point, rather than at that of the rates; memory-bound
            kernels do not depend on it.

    Raises:
        TwofoldError: another kind of point.
    """
    changed: dict[str, float | None] = {}
    if at_clock and point.kind != "memory":
        drop = 0.0 if point.clock_MHz else compute.clock_drop
        changed = {"sustained_clock": compute.sustained_clock * relative_clock(point, compute), "clock_drop": drop}
    if point.kind == "matrix" and compute.step_clock_MHz is not None:  # measured with no other kernels around it
        changed |= {"step_clock_MHz": None, "step_clock_drop": None}
    if changed:
        compute = msgspec.structs.replace(compute, **changed)
    if point.kind == "matrix":
        m, n, k = point.shape
        size = itemsize("float32" if point.dtype == "tf32" else point.dtype)
        made = itemsize("bfloat16") if point.dtype.startswith("float8") else size
        touched = point.batch * (size * (m * k + n * k) + made * m * n)
        return matrix_s(
            compute, (m, n, k), matrix_rate(compute, point.dtype), touched, point.batch, point.form or "nt", size
        )
    if point.kind == "memory":
        if (formed_s := torch_kernel_s(point, compute)) is not None:
            return formed_s
        kernels = max(1, round(point.figures.get("kernels", 1)))
        return memory_s(compute, point.size_bytes, 0.0, memory_call(point), kernels, point.dtype)
    if point.kind == "attention":
        batch, heads, kv_heads, queries, keys, dim = point.shape
        backward, size = is_backward(point), itemsize(point.dtype)
        touched = size * dim * batch * (2 * heads * queries + 2 * kv_heads * keys) * (2 if backward else 1)
        return attention_s(
            compute, (batch * heads, queries, dim), keys, dim, compute.matrix_flops_per_s[point.dtype], touched,
            causal=bool(point.options.get("causal", 0)), backward=backward,
        )  # fmt: skip
    raise TwofoldError(f"a point of the kind {point.kind!r} is not a kernel")


_MEMORY_CALLS: Mapping[str, str] = {**TORCH_KERNELS, "copy": "slice", "zero": "zero"}


def memory_call(point: Point) -> str:
    """The call of an instruction that a measured kernel represents: softmax_backward is "softmax.grad0"."""
    if point.call in _MEMORY_CALLS:
        return _MEMORY_CALLS[point.call]
    kind, is_back = point.call.removesuffix("_backward"), point.call.endswith("_backward")
    return f"{kind}.{'grad0' if is_back else 'forward'}"


def is_backward(point: Point) -> bool:
    """Whether an attention point is of the backward kernel."""
    return point.call.endswith("backward")


def folds(points: Sequence[Point]) -> list[tuple[list[int], list[int]]]:
    """Indices of the points to fit and of those left out, such that each point is left out once, with all of its
    measurements.
    """
    same: dict[object, list[int]] = {}
    for number, point in enumerate(points):
        same.setdefault(point.key, []).append(number)
    groups = list(same.values())
    order = np.random.default_rng(0).permutation(len(groups))
    parts = [part.tolist() for part in np.array_split(order, min(FOLDS, len(groups))) if len(part)]
    splits = []
    for part in parts:
        outside = sorted(number for group in part for number in groups[group])
        out = set(outside)
        splits.append(([number for number in range(len(points)) if number not in out], outside))
    return splits


def choose(errors: Mapping[str, float]) -> str:
    """The simplest form, unless a richer one predicts left-out points clearly better."""
    names = list(errors)
    chosen = names[0]
    for name in names[1:]:
        if errors[name] < GAIN * errors[chosen]:
            chosen = name
    return chosen


def describe_choice(chosen: str, errors: Mapping[str, float]) -> str:
    """The form that was chosen, and the errors of all of them."""
    others = ", ".join(f"{name} {error:.1%}" for name, error in errors.items())
    return f"{chosen} (median error on points left out: {others})"


Array = npt.NDArray[np.float64]
