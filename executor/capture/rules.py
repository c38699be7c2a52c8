"""From aten calls to operators: one short rule per call.

Here stand the calls that change nothing; the rest stands in `elementwise`, `shapes`, `layers` and `losses`, and a call
without a rule goes to `opaque`. Calls that change nothing (identity, a cast to the
same dtype, dropout that drops nothing) leave no operator. A transposed parameter exists only as the weight of a matrix
product, until something else reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

import executor.capture.elementwise
import executor.capture.functions
import executor.capture.layers
import executor.capture.library
import executor.capture.losses
import executor.capture.shapes  # noqa: F401  (each enters its rules)
from executor.capture.table import RULES, rule
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


@rule("broadcast_tensors.default")
def _broadcast(build: Translation, node: fx.Node, values: Sequence[Value]) -> Value:
    shapes = [build.tensors[str(value)].shape for value in values]
    if len(set(shapes)) != 1:
        raise build.refused(
            node,
            f"it repeats tensors of the shapes {', '.join(map(str, shapes))} to one shape. A loss that compares "
            f"{shapes[0]} with {shapes[-1]} would be another function for every micro-batch size: reshape the labels "
            f"to {shapes[0]} first (as executor.train.losscell.MAELoss does)",
        )
    return tuple(values)
