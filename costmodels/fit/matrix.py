"""Rates of matrix products from their device times, by the forms of `costmodels.price.compute` and `.tiled`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from costmodels.fit.forms import Floats, log_ratio, solve
from costmodels.fit.kernels import TOLERANCE, KernelFit, choose, describe_choice, folds, predicted_s, relative_clock
from costmodels.fit.points import Point
from costmodels.price.compute import FORMS, Compute
from costmodels.price.size_table import fit_size_table, knot_shapes
from costmodels.price.tiled import ProductTerms, Tiled, alignment_bytes, tiled_s
from plans.errors import TwofoldError
from plans.model.graph import itemsize

__all__ = ["density_weights", "fit_clock", "fit_dtypes", "fit_matrix", "fit_step_clock", "weighted_quantile"]

LEAST_TILED = 30
"""Points that the form with tiles needs."""

BY_SIZE = "tiles and factors by size"

LEAST_DTYPE = 4
"""Points that a separate dtype needs."""

OCTAVES = 0.7
"""Products whose sizes differ by less than about this many powers of two share their weight in the fit."""

TYPICAL_WEIGHT = 0.02
"""Parameters that the points do not determine stay near typical values; a factor of e counts as an error of 2 %."""

_TYPICAL: Mapping[str, tuple[float, float, float]] = {
    "matrix_efficiency": (0.78, 0.02, 1.0), "sharpness": (3.0, 1.0, 8.0), "kernel_s": (2e-6, 1e-9, 2e-5),
    "half_rows": (8.0, 1e-3, 256.0), "half_depth": (100.0, 0.1, 2e3),
    "start_s": (8e-7, 1e-9, 1e-5), "unaligned_start_s": (2e-6, 1e-9, 2e-5), "tile_s": (5e-7, 1e-9, 1e-5),
    "step_s": (3e-8, 1e-9, 1e-6), "hidden_s": (1.5e-7, 1e-9, 1e-6),
    "core_Bps": (1.4e11, 1e9, 1e13), "core_store_Bps": (4e10, 1e9, 1e13),
    "split_s": (4e-6, 1e-8, 2e-5), "quantisation": (0.2, 1e-3, 1.0),
}  # fmt: skip
"""Parameter -> typical value, least, most."""

MOST_FITTED = 600
"""Of more products with aligned rows the parameters are fitted to a sample, the rarer their sizes the more likely;
factors by size take all of them."""

LEAST_TABLE = 100
"""Points that factors by size need."""

FLAGGED = 2.0**0.5
"""Factor on the noise of a point whose repeats or clocks differed."""

_UNALIGNED = {8: (3.0, 1.5), 4: (4.0, 1.5), 2: (6.0, 1.5)}
"""Bytes that rows are aligned to -> typical factors on arithmetic and on loads."""

_UNALIGNED_NT = {2: 9.0}
"""Likewise on arithmetic of products "nt", where they differ: 90 TFLOP/s on H100 and H200, 110 to 140 of others."""


def fit_matrix(points: Sequence[Point], compute: Compute, *, kernel_s: float | None = None) -> KernelFit:
    """Efficiency of matrix products, smooth or by tiles, waves and cuts.

    A grid is dense where transformers have their shapes; every region of sizes weighs the same here. Arithmetic scales
    with the recorded clock of a point, if there is one.

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
    weights = density_weights(points)
    tiles, table = compute.num_cores > 1 and len(points) >= LEAST_TILED, len(points) >= LEAST_TABLE
    forms: dict[str, Callable[[Sequence[Point]], _Products]] = {
        "smooth": lambda chosen: _Products(chosen, compute, tiled=False, kernel_s=kernel_s),
        **({"tiles": lambda chosen: _Products(chosen, compute, tiled=True, kernel_s=kernel_s)} if tiles else {}),
    }
    rare = _Products(points, compute, tiled=False, kernel_s=kernel_s).aligned < 16
    still = [msgspec.structs.replace(point, clock_MHz=0.0) for point in points]
    left_out: dict[str, Floats] = {}  # at the clock recorded next to each, by which forms are compared
    forecast: dict[str, Floats] = {}
    for name, make in forms.items():
        for inside, outside in folds(points):
            others = make([points[at] for at in outside])
            some, share = _sample(inside, weights, rare)
            fitted = {name: make([points[at] for at in some]).fit(seconds[some], share)}
            if name == "tiles" and table:
                own = make([points[at] for at in inside])
                fitted[BY_SIZE] = own.with_table(fitted[name], seconds[inside])
            unknown = make([still[at] for at in outside])
            for each, compute_of in fitted.items():
                left_out.setdefault(each, np.empty(len(points)))[outside] = others.seconds(compute_of)
                forecast.setdefault(each, np.empty(len(points)))[outside] = unknown.seconds(compute_of)
    errors = {
        name: weighted_quantile(np.abs(log_ratio(each, seconds)), weights, 0.5) for name, each in left_out.items()
    }
    chosen = choose(errors)
    make = forms["tiles" if chosen == BY_SIZE else chosen]
    model = make(points)
    some, share = _sample(range(len(points)), weights, rare)
    best = make([points[at] for at in some]).fit(seconds[some], share)
    if chosen == BY_SIZE:
        best = model.with_table(best, seconds)
    return KernelFit(
        compute=best, form=describe_choice(chosen, errors), predicted_s=tuple(map(float, model.seconds(best))),
        left_out_s=tuple(map(float, forecast[chosen])),
    )  # fmt: skip


def _sample(numbers: Sequence[int], weights: Floats, rare: npt.NDArray[np.bool_]) -> tuple[list[int], Floats]:
    """The `rare` points, at most `MOST_FITTED` of the others, and their weights.

    The others are drawn in proportion to their weights and weigh the same: weighted sampling without replacement by
    Efraimidis and Spirakis (2006, Information Processing Letters 97).
    """
    kept = [number for number in numbers if rare[number]]
    common = [number for number in numbers if not rare[number]]
    own = weights[common]
    if len(common) <= MOST_FITTED:
        return list(numbers), weights[list(numbers)]
    keys = np.random.default_rng(0).random(len(own)) ** (1 / own)
    chosen = np.sort(np.argsort(keys)[-MOST_FITTED:])
    share = np.minimum(1.0, weights[kept] * MOST_FITTED / own.sum())
    return [*kept, *(common[at] for at in chosen)], np.concatenate([share, np.ones(MOST_FITTED)])


def fit_clock(points: Sequence[Point], compute: Compute) -> Compute:
    """`compute` with the clock of a chip at work and how far it falls with the load; as it is where none was recorded.

    Args:
        points: kind "matrix", each measured after other products.
        compute: peaks.
    """
    clocked = [point for point in points if point.clock_MHz]
    if len(clocked) < LEAST_TILED:
        return compute
    clocks = np.array([point.clock_MHz for point in clocked])
    load = np.array([
        2 * point.batch * float(np.prod(point.shape)) / (compute.matrix_flops_per_s[point.dtype] * point.seconds)
        for point in clocked
    ])  # fmt: skip
    start = np.array([np.log(float(np.median(clocks))), 0.1])
    solution = solve(
        lambda q: np.asarray(q[0] + np.log(1 - q[1] * np.minimum(1.0, load)) - np.log(clocks)), start,
        start - np.array([1.0, 0.1]), start + np.array([1.0, 0.4]),
    )  # fmt: skip
    return msgspec.structs.replace(
        compute, clock_MHz=round(float(np.exp(solution[0])), 1), clock_drop=max(0.0, round(float(solution[1]), 4))
    )


def fit_step_clock(mixed: Sequence[Point], copies: Sequence[Point], compute: Compute) -> Compute:
    """`compute` with the clock in a training step: of a chip at work that makes no products, and how far it falls.

    A chip at its power limit has the less power for a product the more of the time it makes products. Copies alone give
    the clock without products; products that take part of the time, as in a training step, show how far it falls.

    Args:
        mixed: kind "clock", call "sustained": products with copies between them, at a clock that has settled.
        copies: likewise, call "sustained_memory": copies alone.
        compute: peaks.
    """
    highest_MHz = float(np.median([point.clock_MHz for point in copies]))
    clock_MHz, seconds = (
        float(np.median([getattr(point, name) for point in mixed])) for name in ("clock_MHz", "seconds")
    )
    load = 2 * float(np.prod(mixed[0].shape)) / (compute.matrix_flops_per_s[mixed[0].dtype] * seconds)
    drop = max(0.0, highest_MHz / clock_MHz - 1) / min(1.0, load * highest_MHz / clock_MHz)
    return msgspec.structs.replace(compute, step_clock_MHz=round(highest_MHz, 1), step_clock_drop=round(drop, 4))


def fit_dtypes(points: Sequence[Point], compute: Compute) -> Compute:
    """`compute` with the share of the matrix efficiency that products of other dtypes reach.

    Args:
        points: kind "matrix", of the dtypes that `fit_matrix` was not given, none of them held out.
        compute: as `fit_matrix` left it.
    """
    shares = dict(compute.dtype_efficiency)
    for dtype in sorted({point.dtype for point in points}):
        of_dtype = [point for point in points if point.dtype == dtype]
        if len(of_dtype) >= LEAST_DTYPE:
            seconds = np.array([point.seconds for point in of_dtype])

            def misfit(q: Floats) -> Floats:
                tried = msgspec.structs.replace(compute, dtype_efficiency={dtype: float(np.exp(q[0]))})  # noqa: B023
                return log_ratio(np.array([predicted_s(point, tried) for point in of_dtype]), seconds)  # noqa: B023

            solution = solve(misfit, np.zeros(1), np.array([-3.0]), np.array([0.5]))
            shares[dtype] = float(np.exp(solution[0]))
    return msgspec.structs.replace(compute, dtype_efficiency=shares)


def density_weights(points: Sequence[Point]) -> Floats:
    """Weights with mean 1 of products, in inverse proportion to how many of the same form have sizes nearby."""
    forms = sorted({point.form for point in points})
    what = np.log2([[*point.shape, point.batch, 2.0 ** forms.index(point.form)] for point in points])
    different, which, count = np.unique(what, axis=0, return_inverse=True, return_counts=True)
    near = np.empty(len(different))
    for at, (*sizes, form) in enumerate(different):
        same = different[:, -1] == form
        apart = np.sum((different[same, :-1] - sizes) ** 2, axis=1)
        near[at] = np.exp(-apart / (2 * OCTAVES**2)) @ count[same]
    weights = 1 / near[which.ravel()]
    return np.asarray(weights / weights.mean())


def weighted_quantile(values: Floats, weights: Floats, share: float) -> float:
    """The value below which `share` of the weight lies.

    >>> weighted_quantile(np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.0, 8.0]), 0.5)
    2.0
    """
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][min(len(values) - 1, np.searchsorted(reached, share * reached[-1]))])


class _Products:
    """The form over all points at once; what does not depend on parameters is made once."""

    def __init__(self, points: Sequence[Point], compute: Compute, *, tiled: bool, kernel_s: float | None) -> None:
        self.compute, self.tiled, self.kernel_s = compute, tiled, kernel_s
        self.shapes = np.array([point.shape for point in points], dtype=float)
        self.batch = np.array([point.batch for point in points], dtype=float)
        self.peak = np.array([compute.matrix_flops_per_s[point.dtype] for point in points])
        self.items = np.array([
            itemsize("float32" if point.dtype == "tf32" else point.dtype) for point in points
        ])  # fmt: skip
        self.clock = np.array([relative_clock(point, compute) for point in points])
        self.clocked = np.array([bool(point.clock_MHz) for point in points])
        self.flagged = np.array([bool(point.flag) for point in points])
        m, n, k = self.shapes.T
        self.touched = self.batch * self.items * (m * k + n * k + m * n)
        self.forms = np.array([point.form or "nt" for point in points])
        self.aligned = np.array([
            alignment_bytes(point.shape, point.form or "nt", int(size))  # type: ignore[arg-type]
            for point, size in zip(points, self.items, strict=True)
        ])  # fmt: skip

    def seconds(self, compute: Compute) -> Floats:
        """The values of `matrix_s` for all points."""
        per_s = self.peak * compute.matrix_efficiency * compute.sustained_clock * self.clock
        memory_s = self.touched / (compute.memory_Bps * compute.memory_efficiency)
        cost = np.ones(len(self.shapes))
        for form, factor in compute.form_cost.items():
            cost[self.forms == form] = factor
        start_s, model = compute.kernel_s, compute.tiled
        if model is None:
            m, n, k = self.shapes.T
            work = 2 * self.batch * m * n * k * (1 + compute.half_rows / np.minimum(m, n))
            return np.asarray(start_s + cost * _join(work * (1 + compute.half_depth / k) / per_s, memory_s, compute))
        steps, loads = np.ones((2, len(self.shapes)))
        for each in _UNALIGNED:
            here = self.aligned == each
            for form in FORMS:
                steps[here & (self.forms == form)] = model.arithmetic_factor(str(each), form)
            loads[here] = model.memory_cost.get(str(each), 1.0)
        terms = ProductTerms(
            per_s / compute.num_cores, compute.num_cores, self.batch, self.items, cost, steps, loads,
            compute.sustained_clock * self.clock,
        )  # fmt: skip
        made_s = tiled_s(self.shapes, terms, model)
        late_s = start_s + model.start_s + np.where(self.aligned < 16, model.unaligned_start_s, 0.0)
        late_s = late_s / (compute.sustained_clock * self.clock)
        full_s = late_s + _join(made_s, memory_s * loads, compute)
        load = np.minimum(1.0, 2 * self.batch * np.prod(self.shapes, axis=1) / (self.peak * full_s))
        made_s = made_s * np.where(self.clocked, 1.0, 1 + compute.clock_drop * load)  # lower_clock
        factors = np.ones(len(self.shapes))
        if model.table is not None:
            own = self.by_size
            factors[own] = [model.table.factor(*map(int, shape)) for shape in self.shapes[own]]
        return np.asarray(factors * (late_s + _join(made_s, memory_s * loads, compute)))

    @property
    def by_size(self) -> npt.NDArray[np.bool_]:
        """Which of the products the factors by size are for."""
        return np.asarray((self.batch == 1) & (self.aligned == 16))

    def with_table(self, compute: Compute, measured: Floats) -> Compute:
        """`compute`, fitted to these products, with factors by size for the residuals."""
        own = self.by_size
        if compute.tiled is None or own.sum() < LEAST_TABLE / 2:
            return compute
        knots = [
            Point(kind="matrix", call="mm", shape=tuple(map(int, shape)), dtype="bfloat16", form="nt", seconds=1.0)
            for shape in knot_shapes()
        ]  # fmt: skip
        plain = np.array([predicted_s(knot, compute) for knot in knots])
        missed = -log_ratio(self.seconds(compute), measured)
        table = fit_size_table(self.shapes[own], missed[own], np.where(self.flagged[own], FLAGGED, 1.0), plain)
        return msgspec.structs.replace(compute, tiled=msgspec.structs.replace(compute.tiled, table=table))

    def fit(self, measured: Floats, weights: Floats) -> Compute:
        """The rates with the least weighted misfit."""
        typical = {name: _TYPICAL[name] for name in ("matrix_efficiency", "sharpness")}
        if self.kernel_s is None:
            typical["kernel_s"] = _TYPICAL["kernel_s"]
        if self.tiled:
            skipped = () if (self.aligned < 16).any() else ("unaligned_start_s",)
            names = [name for name in _TYPICAL if name in Tiled.__struct_fields__ and name not in skipped]
            typical |= {name: _TYPICAL[name] for name in names}
            for each in [each for each in _UNALIGNED if (self.aligned == each).any()]:
                arithmetic, loads = _UNALIGNED[each]
                typical |= {f"arithmetic {each}": (arithmetic, 1.0, 30.0), f"memory {each}": (loads, 1.0, 10.0)}
            for each, arithmetic in _UNALIGNED_NT.items():
                if ((self.aligned == each) & (self.forms == "nt")).any():
                    typical[f"arithmetic {each} nt"] = (arithmetic, 1.0, 30.0)
        else:
            typical |= {name: _TYPICAL[name] for name in ("half_rows", "half_depth")}
        present = [form for form in FORMS if form in self.forms]
        typical |= {f"form {form}": (1.0, 0.5, 2.0) for form in present if form != present[0]}
        start, lower, upper = np.log(np.array(list(typical.values()))).T

        def model(q: Floats) -> Compute:
            return self._compute(dict(zip(typical, map(float, np.exp(q)), strict=True)))

        def misfit(q: Floats) -> Floats:
            errors = np.sqrt(weights) * log_ratio(self.seconds(model(q)), measured)
            return np.concatenate([errors, TYPICAL_WEIGHT * (q - start)])

        return model(solve(misfit, start, lower, upper, tolerance=TOLERANCE))

    def _compute(self, values: Mapping[str, float]) -> Compute:
        costs: dict[str, dict[str, float]] = {"form": {}, "arithmetic": {}, "memory": {}}
        for name, value in values.items():
            table, _, key = name.partition(" ")
            if key:
                costs[table][key] = value
        compute = msgspec.structs.replace(
            self.compute, matrix_efficiency=min(1.0, values["matrix_efficiency"]), form_cost=costs["form"],
            sharpness=max(1.0, values["sharpness"]), tiled=None, half_rows=values.get("half_rows", 0.0),
            half_depth=values.get("half_depth", 0.0), kernel_s=values.get("kernel_s", self.kernel_s or 0.0),
        )  # fmt: skip
        if not self.tiled:
            return compute
        own = {name: value for name, value in values.items() if name in Tiled.__struct_fields__}
        own["quantisation"] = min(1.0, own["quantisation"])
        model = Tiled(arithmetic_cost=costs["arithmetic"], memory_cost=costs["memory"], **own)  # type: ignore[arg-type]
        return msgspec.structs.replace(compute, tiled=model)


def _join(first_s: Floats, second_s: Floats, compute: Compute) -> Floats:
    longer, shorter = np.maximum(first_s, second_s), np.minimum(first_s, second_s)
    return np.asarray(longer * (1 + (shorter / longer) ** compute.sharpness) ** (1 / compute.sharpness))
