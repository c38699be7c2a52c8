"""Linears whose products multiply float8 numbers: the products, and the kernels that make their operands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from plans.model.graph import itemsize
from simulator.stacks.base import Kernel, Message, Step

__all__ = ["FLOAT8_RECIPES", "Float8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8:
    """How a software scales float8 operands.

    Args:
        words: for lists of assumptions.
        forward, backward: dtype of the products, as points of calibration name them.
        input_passes: of an operand of the forward, over its bytes in 16 bit, until it is float8.
        weight_passes: likewise, of a weight, in the forward.
        gradient_passes: likewise, of the gradient of an output.
        turned_passes: of an operand that a gradient's product reads along its other dim.
        gathers_float8: whether tensor parallelism gathers what is cast already.
    """

    words: str
    forward: str
    backward: str
    input_passes: float
    weight_passes: float
    gradient_passes: float
    turned_passes: float
    gathers_float8: bool = False

    def steps(self, steps: Sequence[Step]) -> list[Step]:
        """The kernels and messages of a block with its linears in float8. An embedding, a head or a loss stays as it
        is: so do torchao's filters and Transformer Engine."""
        if not any(isinstance(step, Kernel) and step.call.startswith("attention") for step in steps):
            return list(steps)
        result: list[Step] = []
        cast: set[tuple[str, tuple[int, ...]]] = set()
        for step in steps:
            if isinstance(step, Message):
                if self.gathers_float8 and step.call == "all_gather" and step.size_bytes:
                    step = replace(step, size_bytes=step.size_bytes // 2, item_bytes=1)
                result.append(step)
            elif step.call in _PRODUCTS:
                result += [*self._operands(step, cast), self._product(step)]
            else:
                if step.call.startswith("attention"):
                    cast.clear()
                result.append(step)
        return result

    def _product(self, step: Kernel) -> Kernel:
        size = itemsize(step.dtype)
        first, second, made = step.shapes[0], step.shapes[1], step.shapes[-1]
        touched = math.prod(first) + math.prod(second) + size * math.prod(made)
        dtype = self.forward if step.call == "linear.forward" else self.backward
        return replace(step, dtype=dtype, touched_bytes=touched)

    def _operands(self, step: Kernel, cast: set[tuple[str, tuple[int, ...]]]) -> list[Kernel]:
        """What is read to make a product's operands; one that several products share is made once."""
        first, second = step.shapes[:2]
        if step.call == "linear.forward":
            passes = {("input", first): self.input_passes, ("weight", second): self.weight_passes}
        elif step.call == "linear.grad0":
            passes = {("gradient", first): self.gradient_passes, ("turned weight", second): self.turned_passes}
        else:
            passes = {("turned gradient", first): self.turned_passes, ("turned input", second): self.turned_passes}
        result = []
        for (role, shape), times in passes.items():
            if role.endswith("input") and (role, shape) in cast:  # of queries, keys and values, or gate and up
                continue
            cast.add((role, shape))
            touched = round(times * itemsize(step.dtype) * math.prod(shape))
            if touched:
                result.append(Kernel(call="add.forward", shapes=(shape,), dtype=step.dtype, touched_bytes=touched))
        return result


_PRODUCTS = ("linear.forward", "linear.grad0", "linear.grad1")

FLOAT8_RECIPES = {
    "tensorwise": Float8(
        words="float8 linears with a scale a tensor (torchao, tensorwise): one pass finds the largest value, another "
        "casts, gradients' products read transposed copies, weights are scaled as shards",
        forward="float8", backward="float8_precise", input_passes=2.5, weight_passes=0.0, gradient_passes=2.5,
        turned_passes=1.0, gathers_float8=True,
    ),
    "rowwise": Float8(
        words="float8 linears with a scale a row (torchao, rowwise): a pass for each operand of each product",
        forward="float8_rowwise", backward="float8_rowwise", input_passes=1.5, weight_passes=1.5, gradient_passes=1.5,
        turned_passes=1.5,
    ),
    "engine": Float8(
        words="float8 linears of Transformer Engine: one pass casts and transposes, with the scales of earlier steps",
        forward="float8", backward="float8_precise", input_passes=2.0, weight_passes=2.0, gradient_passes=2.0,
        turned_passes=0.0,
    ),
}  # fmt: skip
"""torchao/float8/config.py (recipes, use_fast_accum), float8_ops.py (operands of `_scaled_mm` are made contiguous);
Transformer Engine, pytorch/module/linear.py (cast_transpose, fprop fast, gradients with split accumulators). In passes
over 16-bit bytes: a pass that finds the largest value reads 1, one that casts reads 1 and writes 1/2, a transposed copy
of float8 numbers moves 1."""
