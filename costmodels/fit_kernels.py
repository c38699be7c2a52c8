"""Rates of an accelerator from device times of its kernels: matrix products, memory-bound kernels, attention.

Each fit chooses between a plain form and richer ones by cross-validation: a form with more parameters is taken only if
it predicts points it has not seen better. The forms are those of `costmodels.compute`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from costmodels.compute import SPLITS, Attention, Compute, attention_s, matrix_s, memory_s
from costmodels.fit import Floats, log_ratio, solve
from costmodels.points import Point
from plans.errors import TwofoldError
from plans.graph import itemsize

__all__ = ["KernelFit", "fit_attention", "fit_matrix", "fit_memory", "predicted_s"]

FOLDS = 5

GAIN = 0.97
"""A richer form must bring the cross-validated error below this share of the plainer one's."""

TILES = ((128, 256), (128, 128), (64, 256), (64, 128), (64, 64), (64, 32))
"""Result tiles of cuBLAS and CUTLASS kernels for 16-bit products (CUTLASS documentation, efficient_gemm)."""

TYPICAL_WEIGHT = 0.02
"""Parameters that the points say nothing about stay near typical ones; a typical distance counts as an error of 2 %."""

FREE_COST = 0.02
"""Kernels whose bytes cost within this of 1 have no entry of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFit:
    """A fitted form.

    Args:
        compute: the rates, with what was fitted replaced.
        form: which form was chosen, with the cross-validated errors of all.
        predicted_s: of the points, by the chosen form fitted to all.
    """

    compute: Compute
    form: str
    predicted_s: tuple[float, ...]


def fit_matrix(points: Sequence[Point], compute: Compute, *, kernel_s: float | None = None) -> KernelFit:
    """Efficiency of matrix products: tiles and waves, depth, and the clock of a chip that gets warm.

    Args:
        points: kind "matrix", device times, none of them held out.
        compute: peaks, `num_cores`, memory efficiency; where to start from.
        kernel_s: least time of a kernel where it is known; fitted otherwise.

    Raises:
        TwofoldError: fewer than 6 points.
    """
    if len(points) < 6:
        raise TwofoldError(f"{len(points)} matrix products were measured; the fit needs at least 6: measure again")
    seconds = np.array([point.seconds for point in points])
    forms: dict[str, Callable[[Sequence[Point]], _Matrix]] = {
        "smooth": lambda chosen: _Matrix(chosen, compute, tiled=False, warms=False, kernel_s=kernel_s),
        "tiles": lambda chosen: _Matrix(chosen, compute, tiled=True, warms=False, kernel_s=kernel_s),
        "tiles and warming": lambda chosen: _Matrix(chosen, compute, tiled=True, warms=True, kernel_s=kernel_s),
    }
    errors = {}
    for name, make in forms.items():
        left_out = np.empty(len(points))
        for inside, outside in _folds(points):
            model = make([points[at] for at in inside])
            fitted = model.fit(seconds[inside])
            left_out[outside] = make([points[at] for at in outside]).seconds(fitted)
        errors[name] = float(np.median(np.abs(log_ratio(left_out, seconds))))
    chosen = _choose(errors)
    model = forms[chosen](points)
    fitted = model.fit(seconds)
    return KernelFit(
        compute=model.compute_of(fitted),
        form=_said(chosen, errors),
        predicted_s=tuple(map(float, model.seconds(fitted))),
    )


class _Matrix:
    """The matrix form over all points at once; what does not depend on parameters is made once."""

    names = (
        "rate",
        "half_depth",
        "sharpness",
        "kernel_s",
        "half_rows",
        "half_tile",
        "quantisation",
        "warm_share",
        "warm_s",
    )

    def __init__(
        self, points: Sequence[Point], compute: Compute, *, tiled: bool, warms: bool, kernel_s: float | None
    ) -> None:
        self.compute, self.tiled, self.warms, self.kernel_s = compute, tiled, warms, kernel_s
        shapes = np.array([point.shape for point in points], dtype=float)
        self.m, self.n, self.k = shapes.T
        self.batch = np.array([point.batch for point in points], dtype=float)
        self.peak = np.array([compute.matrix_flops_per_s[point.dtype] for point in points])
        sizes = np.array([itemsize("float32" if point.dtype == "tf32" else point.dtype) for point in points])
        touched = self.batch * sizes * (self.m * self.k + self.n * self.k + self.m * self.n)
        self.memory_s = touched / (compute.memory_Bps * compute.memory_efficiency)
        self.dtypes = sorted({point.dtype for point in points})
        self.forms = [point.form for point in points]
        self.base = max(1 / rows + 1 / columns for rows, columns in TILES[:1])
        turned = {(columns, rows) for rows, columns in TILES}
        self.cuts = []
        for rows, columns in sorted({*TILES, *turned}):
            count = self.batch * np.ceil(self.m / rows) * np.ceil(self.n / columns)
            open_ = np.ones(len(points), dtype=bool)
            for parts in SPLITS:
                self.cuts.append((rows, columns, parts, np.where(open_, count * parts / compute.num_cores, np.inf)))
                open_ &= ~((count * parts >= compute.num_cores) | (self.k / parts < 4 * rows))
        lower = [1e-2, 1e-1, 2.0, 0.0 if kernel_s is None else kernel_s * 0.999999, 0.0, 0.0, 0.0, 0.0, 1e-5]
        upper = [1.0, 2e3, 8.0, 8e-6 if kernel_s is None else kernel_s * 1.000001, 256, 128.0, 1.0, 0.6, 2e-2]
        start = [0.8, 100.0, 3.0, 2e-6 if kernel_s is None else kernel_s, 8.0, 16.0, 0.7, 0.1, 1e-3]
        self.present = [
            form for form in ("nn", "tn") if form in self.forms and ("nt" in self.forms or form != self.forms[0])
        ]
        self.lower = np.array([*lower, *[0.5] * len(self.present)])
        self.upper = np.array([*upper, *[2.0] * len(self.present)])
        self.start = np.array([*start, *[1.0] * len(self.present)])
        free = np.ones(len(self.start), dtype=bool)
        free[4] = not tiled
        free[5:7] = tiled
        free[7:9] = warms
        self.free = free

    def seconds(self, q: Floats) -> Floats:
        rate, half_depth, sharpness, kernel_s, half_rows, half_tile, quantisation, warm_share, warm_s = q[:9]
        if self.tiled:
            base = 1 + half_tile * self.base
            work = np.full(len(self.m), np.inf)
            for rows, columns, parts, waves in self.cuts:
                each = 2 * rows * columns * (1 + half_tile * (1 / rows + 1 / columns)) / base
                depth = self.k / parts + half_depth * (1 if parts == 1 else 2)
                filled = (1 - quantisation) * waves + quantisation * np.ceil(waves)
                work = np.minimum(work, filled * self.compute.num_cores * each * depth)
        else:
            work = 2 * self.batch * self.m * self.n * self.k
            work = work * (1 + half_rows / np.minimum(self.m, self.n)) * (1 + half_depth / self.k)
        arithmetic_s = work / (self.peak * rate)
        alone_s = (arithmetic_s**sharpness + self.memory_s**sharpness) ** (1 / sharpness)
        cost: dict[str, float] = {form: float(q[9 + at]) for at, form in enumerate(self.present)}
        alone_s = alone_s * np.array([cost.get(form, 1.0) for form in self.forms])
        if self.warms:
            alone_s = alone_s * (1 + warm_share * alone_s / (alone_s + warm_s))
        return np.asarray(kernel_s + alone_s)

    def fit(self, measured: Floats) -> Floats:
        def whole(free: Floats) -> Floats:
            q = self.start.copy()
            q[self.free] = free
            return q

        scale = np.maximum(np.abs(self.start), 1e-12)[self.free]
        typical = np.array([np.inf, 100.0, 1.0, 2e-6, 8.0, 16.0, 0.3, 0.1, 2e-3, *[0.1] * len(self.present)])
        best, least = self.start, np.inf
        for tilt in (1.0, 0.5, 2.0):
            first = np.clip(self.start[self.free] * tilt, self.lower[self.free], self.upper[self.free])
            found = solve(
                lambda u: np.concatenate([
                    log_ratio(self.seconds(whole(u * scale)), measured),
                    TYPICAL_WEIGHT * ((whole(u * scale) - self.start) / typical)[self.free],
                ]),
                first / scale, self.lower[self.free] / scale, self.upper[self.free] / scale,
            )  # fmt: skip
            error = float(np.sum(np.abs(log_ratio(self.seconds(whole(found * scale)), measured))))
            if error < least:
                best, least = whole(found * scale), error
        return best

    def compute_of(self, q: Floats) -> Compute:
        rate, half_depth, sharpness, kernel_s, half_rows, half_tile, quantisation, warm_share, warm_s = map(
            float, q[:9]
        )
        return msgspec.structs.replace(
            self.compute, matrix_efficiency=rate, half_depth=half_depth, sharpness=max(1.0, sharpness),
            kernel_s=kernel_s, tiles=TILES if self.tiled else (), half_tile=half_tile if self.tiled else 0.0,
            quantisation=min(1.0, quantisation) if self.tiled else 1.0, half_rows=0.0 if self.tiled else half_rows,
            warm_share=warm_share if self.warms else 0.0, warm_s=warm_s if self.warms else 1e-3,
            form_cost={form: float(q[9 + at]) for at, form in enumerate(self.present)},
        )  # fmt: skip


def fit_memory(points: Sequence[Point], compute: Compute) -> KernelFit:
    """Memory bandwidth, the least time of a kernel, and what each kind of kernel needs beyond its bytes.

    Args:
        points: kind "memory", device times, none of them held out.
        compute: peaks.

    Raises:
        TwofoldError: fewer than 3 points.
    """
    if len(points) < 3:
        raise TwofoldError(f"{len(points)} memory-bound kernels were measured; the fit needs at least 3: measure again")
    seconds = np.array([point.seconds for point in points])
    forms = {"one bandwidth": False, "a cost for each kernel": True}
    errors = {}
    for name, each in forms.items():
        left_out = np.empty(len(points))
        for inside, outside in _folds(points):
            fitted = _memory_parameters([points[at] for at in inside], compute, each=each)
            left_out[outside] = [predicted_s(points[at], fitted) for at in outside]
        errors[name] = float(np.median(np.abs(log_ratio(left_out, seconds))))
    chosen = _choose(errors)
    fitted = _memory_parameters(points, compute, each=forms[chosen])
    return KernelFit(
        compute=fitted, form=_said(chosen, errors), predicted_s=tuple(predicted_s(point, fitted) for point in points)
    )


def _memory_parameters(points: Sequence[Point], compute: Compute, *, each: bool) -> Compute:
    calls = sorted({memory_call(point) for point in points}) if each else []
    which = np.array([calls.index(memory_call(point)) if each else 0 for point in points])
    sizes = np.array([point.size_bytes for point in points], dtype=float)
    kernels = np.array([max(1.0, point.figures.get("kernels", 1.0)) for point in points])
    seconds = np.array([point.seconds for point in points])

    def parts(q: Floats) -> tuple[Floats, Floats]:
        cost = np.exp(q[2:][which]) if each else 1.0
        return kernels * np.exp(q[0]), sizes * cost / (compute.memory_Bps * np.exp(q[1]))

    def misfit(q: Floats) -> Floats:
        start_s, moved_s = parts(q)
        # costs are near 1 unless their own points say otherwise
        return np.concatenate([log_ratio(start_s + moved_s, seconds), 0.1 * q[2:]])

    start = np.array([np.log(2e-6), np.log(0.85), *np.zeros(len(calls))])
    lower = np.array([np.log(1e-7), np.log(0.05), *np.full(len(calls), -2.0)])
    upper = np.array([np.log(2e-5), 0.0, *np.full(len(calls), 3.0)])
    q = solve(misfit, start, lower, upper)
    costs = {call: float(np.exp(value)) for call, value in zip(calls, q[2:], strict=True)}
    return msgspec.structs.replace(
        compute, kernel_s=float(np.exp(q[0])), memory_efficiency=float(np.exp(q[1])),
        kernel_cost={call: cost for call, cost in costs.items() if abs(cost - 1) > FREE_COST},
    )  # fmt: skip


def fit_attention(points: Sequence[Point], compute: Compute) -> KernelFit:
    """Efficiency of the fused attention kernel forward and backward.

    Args:
        points: kind "attention", device times, none of them held out.
        compute: peaks, cores and memory efficiency.

    Raises:
        TwofoldError: fewer than 3 forward points.
    """
    seconds = np.array([point.seconds for point in points])
    forward = np.array([not is_backward(point) for point in points])
    if forward.sum() < 3:
        raise TwofoldError(f"{forward.sum()} attention forwards were measured; the fit needs at least 3: measure again")
    dims = len({point.shape[5] for point in points}) > 1
    names = ("forward_efficiency", "half_keys", "start_s")
    back = ("backward_efficiency", "backward_half_keys", "backward_start_s")

    def model_of(q: Floats, each_backward: bool) -> Attention:
        values = dict(zip((*names, *back, "half_dim"), map(float, q), strict=True))
        if not each_backward:
            values["backward_efficiency"] = values["forward_efficiency"] * 0.8
        return msgspec.structs.replace(Attention(forward_efficiency=1.0, backward_efficiency=1.0), **values)

    def run(chosen: Sequence[int]) -> Compute:
        some_back = bool((~forward[list(chosen)]).any())
        free = np.array([True] * 3 + [some_back] * 3 + [dims])
        fixed = np.array([0.6, 100.0, 1e-6, 0.5, 100.0, 1e-6, 0.0])
        lower = np.array([0.02, 0.0, 0.0, 0.02, 0.0, 0.0, 0.0])
        upper = np.array([1.0, 4000.0, 5e-5, 1.0, 4000.0, 1e-4, 400.0])
        scale = np.array([0.5, 100.0, 1e-6, 0.5, 100.0, 1e-6, 20.0])

        def whole(u: Floats) -> Floats:
            q = fixed.copy()
            q[free] = u * scale[free]
            return q

        def misfit(u: Floats) -> Floats:
            fitted = msgspec.structs.replace(compute, attention=model_of(whole(u), some_back))
            return log_ratio(np.array([predicted_s(points[at], fitted) for at in chosen]), seconds[list(chosen)])

        start = np.maximum(fixed, lower)[free] / scale[free]
        found = solve(misfit, start, lower[free] / scale[free], upper[free] / scale[free])
        return msgspec.structs.replace(compute, attention=model_of(whole(found), some_back))

    fitted = run(range(len(points)))
    return KernelFit(
        compute=fitted, form="fused kernel", predicted_s=tuple(predicted_s(point, fitted) for point in points)
    )


def predicted_s(point: Point, compute: Compute) -> float:
    """The device time of a measured kernel by the forms (kinds matrix, memory and attention).

    Raises:
        TwofoldError: another kind of point.
    """
    if point.kind == "matrix":
        m, n, k = point.shape
        size = itemsize("float32" if point.dtype == "tf32" else point.dtype)
        touched = point.batch * size * (m * k + n * k + m * n)
        return matrix_s(
            compute, (m, n, k), compute.matrix_flops_per_s[point.dtype], touched, point.batch, point.form or "nt"
        )
    if point.kind == "memory":
        kernels = max(1, round(point.figures.get("kernels", 1)))
        return memory_s(compute, point.size_bytes, 0.0, memory_call(point), kernels)
    if point.kind == "attention":
        batch, heads, kv_heads, queries, keys, dim = point.shape
        backward, size = is_backward(point), itemsize(point.dtype)
        touched = size * dim * batch * (2 * heads * queries + 2 * kv_heads * keys) * (2 if backward else 1)
        return attention_s(
            compute, (batch * heads, queries, dim), keys, dim, compute.matrix_flops_per_s[point.dtype], touched,
            causal=bool(point.options.get("causal", 0)), backward=backward,
        )  # fmt: skip
    raise TwofoldError(f"a point of the kind {point.kind!r} is no kernel")


_MEMORY_CALLS: Mapping[str, str] = {
    "adamw_fused": "adamw.fused",
    "adamw_foreach": "adamw.foreach",
    "copy": "slice",
    "zero": "zero",
}


def memory_call(point: Point) -> str:
    """The call of an instruction that a measured kernel stands for: softmax_backward is "softmax.grad0"."""
    if point.call in _MEMORY_CALLS:
        return _MEMORY_CALLS[point.call]
    kind, is_back = point.call.removesuffix("_backward"), point.call.endswith("_backward")
    return f"{kind}.{'grad0' if is_back else 'forward'}"


def is_backward(point: Point) -> bool:
    """Whether an attention point is of the backward kernel."""
    return point.call.endswith("backward")


def _folds(points: Sequence[Point]) -> list[tuple[list[int], list[int]]]:
    order = np.random.default_rng(0).permutation(len(points))
    parts = [part for part in np.array_split(order, min(FOLDS, len(points))) if len(part)]
    return [([int(at) for at in order if at not in set(part.tolist())], [int(at) for at in part]) for part in parts]


def _choose(errors: Mapping[str, float]) -> str:
    names = list(errors)
    chosen = names[0]
    for name in names[1:]:
        if errors[name] < GAIN * errors[chosen]:
            chosen = name
    return chosen


def _said(chosen: str, errors: Mapping[str, float]) -> str:
    others = ", ".join(f"{name} {error:.1%}" for name, error in errors.items())
    return f"{chosen} (median error on points left out: {others})"


Array = npt.NDArray[np.float64]
