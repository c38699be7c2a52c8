"""Translation of aten calls to operators: one short rule per call.

This file has the calls that change nothing; the other rules are in `elementwise`, `shapes`, `layers` and `losses`. A
call without a rule goes to `opaque`. Calls that change nothing (identity, a cast to the same dtype, dropout with
probability 0) produce no operator. A transposed parameter exists only as the weight of a matrix product, unless
something else reads it.
"""

from __future__ import annotations

from typing import Any

from torch import fx

import executor.capture.rules.assigned
import executor.capture.rules.elementwise
import executor.capture.rules.functions
import executor.capture.rules.layers
import executor.capture.rules.losses
import executor.capture.rules.means
import executor.capture.rules.nonlinear
import executor.capture.rules.random
import executor.capture.rules.recurrent
import executor.capture.rules.shapes
import executor.capture.rules.spread  # noqa: F401  (each enters its rules)
from executor.capture.rules.table import RULES, rule
from executor.capture.translation import Translation
from executor.capture.values import Value

__all__ = ["RULES"]


@rule("alias.default", "clone.default", "contiguous.default", "lift_fresh_copy.default", "positive.default")
def _same(build: Translation, node: fx.Node, x: Value, **_: Any) -> Value:
    return x


@rule("_assert_tensor_metadata.default")
def _nothing(build: Translation, node: fx.Node, x: Value, *_: Any, **__: Any) -> Value:
    return None


@rule("getitem")
def _getitem(build: Translation, node: fx.Node, values: tuple[Value, ...], index: int) -> Value:
    return values[index]


@rule("detach.default")
def _detach(build: Translation, node: fx.Node, x: Value) -> Value:
    return build.detached(node, x)
