"""Capture of random numbers that a forward draws: one operator for each draw, the rest in ordinary operators.

The k-th random operator of a forward has the k-th seed, in a plan and in the reference (`executor.reference.random`),
which both make these formulas of uniform and normal numbers.
"""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from executor.capture.rules.table import Number, rule
from executor.capture.translation import Translation
from executor.capture.values import Value

__all__: list[str] = []


def _drawn(build: Translation, node: fx.Node, kind: str, dtype: str = "") -> str:
    """Random numbers in the shape of a call's result."""
    shape, own = build.shape_dtype(node)
    return build.random(node, kind, shape, dtype or own, build.grown.get(node.name))


def _scaled(build: Translation, node: fx.Node, x: str, scale: Number, shift: Number) -> str:
    if scale != 1:
        x = build.make_as(node, "mul", x, number=scale)
    return build.make_as(node, "add", x, number=shift) if shift else x


@rule("rand.default", "rand_like.default")
def _rand(build: Translation, node: fx.Node, *_: Any, **__: Any) -> Value:
    return _drawn(build, node, "uniform")


@rule("randn.default", "randn_like.default")
def _randn(build: Translation, node: fx.Node, *_: Any, **__: Any) -> Value:
    return _drawn(build, node, "normal")


@rule("uniform.default")
def _uniform(build: Translation, node: fx.Node, x: Value, low: Number = 0, high: Number = 1, **_: Any) -> Value:
    return _scaled(build, node, _drawn(build, node, "uniform"), high - low, low)


@rule("normal_functional.default")
def _normal(build: Translation, node: fx.Node, x: Value, mean: Number = 0, std: Number = 1, **_: Any) -> Value:
    return _scaled(build, node, _drawn(build, node, "normal"), std, mean)


@rule("normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor")
def _normal_around(build: Translation, node: fx.Node, mean: Value | Number, std: Value | Number = 1, **_: Any) -> Value:
    if any(isinstance(each, str) and build.is_trained(each) for each in (mean, std)):
        raise build.refused(
            node, "no gradient goes through torch.normal; draw with torch.randn_like and write mean + std * noise"
        )
    made = _drawn(build, node, "normal")
    for kind, each in (("mul", std), ("add", mean)):
        if isinstance(each, bool | int | float):
            made = build.make_as(node, kind, made, number=each)
        else:
            made = build.make_as(node, kind, made, build.cast(node, build.plain(node, each), build.tensors[made].dtype))
    return made


@rule("exponential.default")
def _exponential(build: Translation, node: fx.Node, x: Value, rate: Number = 1, **_: Any) -> Value:
    rest = build.make_as(node, "sub", _drawn(build, node, "uniform"), number=1, reverse=True)
    return build.make_as(node, "mul", build.make_as(node, "log", rest), number=-1 / rate)


@rule("randint.default", "randint.low", "randint_like.default", "randint_like.low_dtype")
def _randint(build: Translation, node: fx.Node, *given: Any, **_: Any) -> Value:
    called = str(node.target)
    ends = given[1:] if "_like" in called else given[:-1]
    low, high = (0, *ends)[-2:]
    if high - low > 2**24:
        raise build.refused(node, f"random whole numbers are supported in ranges up to {2**24}, not {high - low}")
    made = _drawn(build, node, "uniform", "float32")  # 24 bits: times the range it never rounds up to `high`
    whole = build.cast(node, build.make_as(node, "mul", made, number=high - low), "int64")
    return build.cast(node, _scaled(build, node, whole, 1, low), build.shape_dtype(node)[1])


@rule("bernoulli.default")
def _bernoulli(build: Translation, node: fx.Node, chance: Value, **_: Any) -> Value:
    shape, dtype = build.shape_dtype(node)
    drawn = _drawn(build, node, "uniform")
    return build.cast(node, build.make(node, "lt", (drawn, chance), shape=shape, dtype="bool"), dtype)


# -- dropout -----------------------------------------------------------------------------------------------------------


@rule("dropout.default")
def _dropout(build: Translation, node: fx.Node, x: Value, p: float, train: bool) -> Value:
    if not train or p == 0:
        return x
    return build.make(node, "dropout", (x,), p=p, seed=build.next_seed())


@rule("feature_dropout.default")
def _feature_dropout(build: Translation, node: fx.Node, x: Value, p: float, train: bool) -> Value:
    """Whole channels are dropped: x times a dropout of ones [batch, channels, 1, ...]."""
    return build.make(node, "mul", (x, _kept_features(build, node, p))) if train and p > 0 else x


@rule("alpha_dropout.default")
def _alpha_dropout(build: Translation, node: fx.Node, x: Value, p: float, train: bool) -> Value:
    return _with_saturated(build, node, x, p, features=False) if train and p > 0 else x


@rule("feature_alpha_dropout.default")
def _feature_alpha_dropout(build: Translation, node: fx.Node, x: Value, p: float, train: bool) -> Value:
    return _with_saturated(build, node, x, p, features=True) if train and p > 0 else x


def _kept_features(build: Translation, node: fx.Node, p: float) -> str:
    """1 / (1 - p) for channels that stay, else 0."""
    shape, dtype = build.shape_dtype(node)
    ones = build.like_batch(node, (*shape[:2], *(1,) * (len(shape) - 2)), dtype, 1)
    return build.make_as(node, "dropout", ones, p=p, seed=build.next_seed())


_ALPHA = 1.7580993408473766
"""scale x alpha of SELU (Klambauer et al., 2017), the value that dropped elements get, as in aten."""


def _with_saturated(build: Translation, node: fx.Node, x: Value, p: float, *, features: bool) -> str:
    """aten's alpha dropout: a x where it is kept, else -a alpha, plus a alpha p; a = ((1 + p alpha^2) (1 - p))^-1/2."""
    a = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p)) if p < 1 else 0.0
    shape, dtype = build.shape_dtype(node)
    if features:
        kept = _kept_features(build, node, p)
    else:
        ones = build.like_batch(node, shape, dtype, 1, build.grown.get(node.name, 0))
        kept = build.make_as(node, "dropout", ones, p=p, seed=build.next_seed())
    share = build.make_as(node, "mul", kept, number=1 - p)
    missing = build.make_as(node, "sub", share, number=1)
    shift = _scaled(build, node, missing, _ALPHA * a, _ALPHA * a * p)
    scaled = build.make(node, "mul", (x, build.make_as(node, "mul", share, number=a)))
    return build.make(node, "add", (scaled, shift))
