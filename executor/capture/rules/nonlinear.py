"""Capture of losses that are functions of means over the samples: products, quotients, square roots and so on.

Micro-batches and ranks average the terms of samples, which is right for weighted sums of means only. A function f of a
mean m with terms t is captured as its expansion to first order around the value of m,

    f(m) = mean(f'(m) t + f(m) - f'(m) m),

where f(m), f'(m) and m are numbers without a gradient that all samples share. Its value and its gradient are those of
f: the gradient of the right side is f'(m) mean(dt). Means are taken over a micro-batch on all data-parallel ranks, like
the statistics of a batch norm, so the loss depends on the number of micro-batches. A warning reports this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx

from executor.capture.calls.decompose import BY_SAMPLES
from executor.capture.rules.means import combined, combined_means, count_of_samples
from executor.capture.rules.table import Number, mean_rule
from executor.capture.translation import Translation
from executor.capture.values import Mean, Value

__all__: list[str] = []

Slopes = Callable[..., Sequence[Value | Number]]
"""(value of the function, values of the means) -> its derivatives with respect to the means."""


class _Numbers:
    """Operators on numbers that all samples share, in the shape and dtype of a call's result."""

    def __init__(self, build: Translation, node: fx.Node) -> None:
        self.build, self.node = build, node

    def __call__(self, kind: str, x: Value | Number, y: Value | Number) -> str:
        return combined(self.build, self.node, kind, x, y, self.build.shape_dtype(self.node)[0])

    def holds(self, kind: str, x: str, number: Number) -> str:
        """1 where the comparison is true, otherwise 0."""
        shape, dtype = self.build.shape_dtype(self.node)
        holds = self.build.make(self.node, kind, (x,), shape=shape, dtype="bool", number=number)
        return self.build.cast(self.node, holds, dtype)


def _linearised(
    build: Translation, node: fx.Node, means: Sequence[Mean], value: Callable[..., str], slopes: Slopes
) -> Mean:
    """The first-order expansion of a function of means around their values."""
    build.warn_of_micro_batches(node)
    make = _Numbers(build, node)
    values = [_value(build, node, mean) for mean in means]
    whole = value(*values)
    result: Value | Number = whole
    for mean, at, slope in zip(means, values, slopes(whole, *values), strict=True):
        fixed = make("mul", slope, at)
        result = combined_means(build, node, "sub", result, fixed) if isinstance(result, Mean) else (
            make("sub", result, fixed)
        )  # fmt: skip
        by = make("mul", slope, count_of_samples(build, node)) if mean.is_sum else slope
        scaled = combined_means(build, node, "mul", replace(mean, is_sum=False), by)
        result = combined_means(build, node, "add", result, scaled)
    assert isinstance(result, Mean)
    return result


def _value(build: Translation, node: fx.Node, mean: Mean) -> str:
    """The value of a mean, without a gradient."""
    dtype = build.shape_dtype(node)[1]

    def terms() -> str:
        return build.cast(node, str(build.detached(node, mean.terms())), dtype)

    return build.of_batch(node, replace(mean, node=node, terms=terms, own=None))


# -- functions of one mean ---------------------------------------------------------------------------------------------


def _slope(make: _Numbers, called: str, whole: str, at: str, settings: Sequence[Any]) -> Value | Number:
    """The derivative of a function of one number, from its value and its argument."""
    if called == "sqrt":
        return make("div", 0.5, whole)
    if called == "rsqrt":
        return make("mul", make("div", whole, at), -0.5)
    if called == "exp":
        return whole
    if called in _LOGARITHMS:
        base, shift = _LOGARITHMS[called]
        return make("div", 1.0 / math.log(base), make("add", at, shift) if shift else at)
    if called == "tanh":
        return make("sub", 1.0, make("mul", whole, whole))
    if called == "sigmoid":
        return make("mul", whole, make("sub", 1.0, whole))
    if called == "reciprocal":
        return make("mul", make("mul", whole, whole), -1.0)
    if called in ("pow", "square"):
        exponent = settings[0] if settings else 2
        power = make.build.make(make.node, "pow", (at,), exponent=exponent - 1)
        return make("mul", power, float(exponent))
    if called == "abs":
        return make("sub", make.holds("gt", at, 0), make.holds("lt", at, 0))
    if called == "relu":
        return make.holds("gt", at, 0)
    least, most = (*settings, None, None)[:2] if called != "clamp_max" else (None, settings[0])
    above = 1.0 if least is None else make.holds("ge", at, least)
    return above if most is None else make("mul", make.holds("le", at, most), above)


_LOGARITHMS = {"log": (math.e, 0), "log2": (2, 0), "log10": (10, 0), "log1p": (math.e, 1)}
"""Function -> its base, and what it adds to its argument."""


def _logarithm(build: Translation, node: fx.Node, x: Value) -> Value:
    base, shift = _LOGARITHMS[str(node.target).split(".")[1]]
    make = _Numbers(build, node)
    dtype = build.shape_dtype(node)[1]
    at = make("add", x, shift) if shift else build.cast(node, build.plain(node, x), dtype)
    return make("mul", build.make(node, "log", (at,)), 1 / math.log(base))


@mean_rule(
    "sqrt.default", "rsqrt.default", "exp.default", "log.default", "reciprocal.default", "pow.Tensor_Scalar",
    "square.default", "abs.default", "relu.default", "clamp.default", "clamp_min.default", "clamp_max.default",
    "log2.default", "log10.default", "log1p.default", "tanh.default", "sigmoid.default",
)  # fmt: skip
def _function(build: Translation, node: fx.Node, x: Mean, *settings: Any, **named: Any) -> Value:
    rule = build.rules.get(str(node.target), _logarithm)
    if not build.is_trained(x.terms()):
        return rule(build, node, build.of_batch(node, x), *settings, **named)
    if x.is_sum:
        raise build.samples_meet(node)
    called, given = str(node.target).split(".")[1], (*settings, *named.values())
    if called == "clamp" and named:
        given = (*settings, named.get("min"), named.get("max"))[:2] if not settings else (*settings, named.get("max"))
    make = _Numbers(build, node)
    return _linearised(
        build, node, [x], lambda at: str(rule(build, node, at, *settings, **named)),
        lambda whole, at: [_slope(make, called, whole, at, given)],
    )  # fmt: skip


# -- the larger or smaller of two means --------------------------------------------------------------------------------


@mean_rule("maximum.default", "minimum.default", "max.other", "min.other")
def _extreme(build: Translation, node: fx.Node, x: Value, y: Value) -> Value:
    """Its gradient goes to the larger (smaller) one, and in halves to both if they are equal, as torch's does."""
    means = [each for each in (x, y) if isinstance(each, Mean)]
    if any(mean.is_sum for mean in means) or any(
        isinstance(each, str) and (each in build.batched or build.is_trained(each)) for each in (x, y)
    ):
        raise build.samples_meet(node)
    make, sign = _Numbers(build, node), 1.0 if "max" in str(node.target) else -1.0

    def both(values: Sequence[str]) -> list[str]:
        left = iter(values)
        return [next(left) if isinstance(each, Mean) else str(each) for each in (x, y)]

    def shares(*values: str) -> tuple[str, str]:
        apart = make("mul", make("sub", *both(values)), sign)
        first = make("mul", make("add", make.holds("gt", apart, 0), make.holds("ge", apart, 0)), 0.5)
        return first, make("sub", 1.0, first)

    def value(*values: str) -> str:
        one, two = map(partial(make, "mul"), shares(*values), both(values))
        return make("add", one, two)

    def slopes(_: str, *values: str) -> list[Value | Number]:
        pairs = zip(shares(*values), (x, y), strict=True)
        return [share for share, each in pairs if isinstance(each, Mean)]

    if not any(build.is_trained(mean.terms()) for mean in means):
        return build.fallback(build, node)
    return _linearised(build, node, means, value, slopes)


# -- products and quotients --------------------------------------------------------------------------------------------


@mean_rule("mul.Tensor", "mul.Scalar")
def _product(build: Translation, node: fx.Node, x: Value | Number, y: Value | Number) -> Value:
    if isinstance(x, Mean) and isinstance(y, Mean):
        trained = [build.is_trained(mean.terms()) for mean in (x, y)]
        if all(trained) and not x.is_sum and not y.is_sum:
            make = _Numbers(build, node)
            return _linearised(build, node, [x, y], lambda one, two: make("mul", one, two), lambda _, *at: at[::-1])
        # one of them is a number that all samples share
        x, y = (build.of_batch(node, x), y) if trained[1] else (x, build.of_batch(node, y))
        return combined_means(build, node, "mul", x, y)
    return combined_means(build, node, "mul", x, y)


@mean_rule("div.Tensor", "div.Scalar")
def _quotient(build: Translation, node: fx.Node, x: Value | Number, y: Value | Number) -> Value:
    if isinstance(y, Mean):
        are_sums = isinstance(x, Mean) and x.is_sum and y.is_sum  # such as a mean over tokens that are no padding
        if build.is_trained(y.terms()) and (are_sums or not (y.is_sum or (isinstance(x, Mean) and x.is_sum))):
            return _by_trained(build, node, x, y)
        if are_sums:
            x, y = replace(x, is_sum=False), replace(y, is_sum=False)  # type: ignore[type-var]
        dtype, terms = build.shape_dtype(node)[1], y.terms
        y = build.of_batch(node, replace(y, node=node, terms=lambda: build.cast(node, terms(), dtype)))
    if not isinstance(x, Mean):
        return combined(build, node, "div", x, y, build.shape_dtype(node)[0])
    if x.is_sum and y in build.shared:
        x = replace(x, is_sum=False)
        y = combined(build, node, "div", y, count_of_samples(build, node), build.tensors[y].shape)
    if x.is_sum and BY_SAMPLES in node.meta:
        return replace(x, is_sum=False)
    return combined_means(build, node, "div", x, y)


def _by_trained(build: Translation, node: fx.Node, x: Value | Number, y: Mean) -> Value:
    """A quotient whose denominator is a mean of what is trained."""
    make = _Numbers(build, node)

    def by_denominator(whole: str, under: str) -> Value:
        return make("mul", make("div", whole, under), -1.0)

    if not isinstance(x, Mean):
        return _linearised(
            build, node, [y], lambda under: make("div", x, under),
            lambda whole, under: [by_denominator(whole, under)],
        )  # fmt: skip
    return _linearised(
        build, node, [x, y], lambda over, under: make("div", over, under),
        lambda whole, _, under: [make("div", 1.0, under), by_denominator(whole, under)],
    )  # fmt: skip
