"""Linear layers with products in a narrower dtype than the block: the products, and the kernels that cast operands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plans.model.graph import itemsize
from simulator.stacks.steps import Kernel, Message, Step

__all__ = ["RECIPES", "Recipe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The recipe by which a software makes narrow operands.

    Args:
        words: for lists of assumptions.
        forward, backward: dtype of the products, as points of calibration name them.
        input_passes: of an operand of the forward, over its bytes as it is, until it is narrow.
        weight_passes: likewise, of a weight, in the forward.
        gradient_passes: likewise, of the gradient of an output.
        turned_passes: of an operand that a gradient's product reads along its other dim.
        gathers_float8: whether tensor parallelism gathers what is cast already.
        item_bytes: of an element of an operand.
        times: how many times as long its products take as those of the machine's file.
        everywhere: whether all products of a model are of it, as with a switch of the library, not those of the linears
            of blocks only.
        includes_experts: whether the grouped products of experts are narrow too.
        spread: standard deviation of the logarithm of the products' times, beyond that of the products that were
            measured; assumed but of torchao's, whose compiled steps of own models are up to 8 % off.
    """

    words: str
    forward: str
    backward: str
    input_passes: float
    weight_passes: float
    gradient_passes: float
    turned_passes: float
    gathers_float8: bool = False
    item_bytes: float = 1.0
    times: float = 1.0
    everywhere: bool = False
    includes_experts: bool = False
    spread: float = 0.0

    def steps(self, steps: Sequence[Step]) -> list[Step]:
        """The kernels and messages of a block with its linears narrow. Embeddings, heads and losses are unchanged: so
        do torchao's filters and Transformer Engine."""
        if not self.everywhere and not any(
            isinstance(step, Kernel) and step.call.startswith("attention") for step in steps
        ):
            return list(steps)
        result: list[Step] = []
        cast: set[tuple[str, tuple[int, ...]]] = set()
        for step in steps:
            if isinstance(step, Message):
                if self.gathers_float8 and step.call == "all_gather" and step.size_bytes:
                    step = replace(step, size_bytes=step.size_bytes // 2, item_bytes=1)
                result.append(step)
            elif self.everywhere and step.call.startswith("matmul."):
                result.append(replace(step, dtype=self.forward))
            elif step.call in _PRODUCTS or (self.includes_experts and _is_of_experts(step)):
                result += [*self._operands(step, cast), self._product(step)]
            else:
                if step.call.startswith("attention"):
                    cast.clear()
                result.append(step)
        return result

    def _product(self, step: Kernel) -> Kernel:
        size = itemsize(step.dtype)
        first, second, made = step.shapes[0], step.shapes[1], step.shapes[-1]
        touched = round(self.item_bytes * (math.prod(first) + math.prod(second))) + size * math.prod(made)
        dtype = self.forward if step.call.endswith(".forward") else self.backward
        return replace(step, dtype=dtype, touched_bytes=touched, times=step.times * self.times)

    def _operands(self, step: Kernel, cast: set[tuple[str, tuple[int, ...]]]) -> list[Kernel]:
        """The bytes read to make a product's operands; an operand that several products share is made once."""
        first, second = step.shapes[:2]
        part = step.call.partition(".")[2]
        if part == "forward":
            passes = {("input", first): self.input_passes, ("weight", second): self.weight_passes}
        elif part == "grad0":
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


def _is_of_experts(step: Kernel) -> bool:
    """Whether a product has one matrix for every expert; those of attention's scores have a batch and heads."""
    return step.call.startswith("matmul.") and len(step.shapes[0]) == 3


_TENSOR = Recipe(
    words="float8 linears with a scale a tensor (torchao, tensorwise): one pass finds the largest value, another "
    "casts, gradients' products read transposed copies, weights are scaled as shards",
    forward="float8", backward="float8_precise", input_passes=2.5, weight_passes=0.0, gradient_passes=2.5,
    turned_passes=1.0, gathers_float8=True, spread=0.08,
)  # fmt: skip
_ROW = Recipe(
    words="float8 linears with a scale a row (torchao, rowwise): a pass for each operand of each product, many for "
    "those that are written along their other dim",
    forward="float8_rowwise", backward="float8_rowwise", input_passes=1.9, weight_passes=1.9, gradient_passes=1.9,
    turned_passes=14.4, spread=0.08,
)  # fmt: skip
"""Rows: medians of `python -m benchmarks.devices.float8_kernels` on an H100, which has 2.7 passes for columns alone. In
steps Inductor makes columns' scales and transposed copies beside what precedes them, and writes single bytes far apart:
in 7x3200 on an H200 (benchmarks/results/float8_steps_h200.json) weights took 14.0 and 15.6 passes, and all operands
14.4 beyond the rows' 1.9 and the kernels of the same step in bfloat16."""
_COLUMNS = 2.7
"""Passes of an operand along its other dim by kernels made for it: those of the isolated kernels (assumed)."""
_DELAYED = Recipe(
    words="float8 linears of Transformer Engine: one pass casts and transposes, with the scales of earlier steps",
    forward="float8", backward="float8_precise", input_passes=2.0, weight_passes=2.0, gradient_passes=2.0,
    turned_passes=0.0, includes_experts=True,
)  # fmt: skip
_TF32 = Recipe(
    words="float32 products as TF32", forward="tf32", backward="tf32", input_passes=0.0, weight_passes=0.0,
    gradient_passes=0.0, turned_passes=0.0, item_bytes=4.0, everywhere=True,
)  # fmt: skip
_BLOCKS: Any = {"forward": "float8_precise", "backward": "float8_precise", "spread": 0.1}
_MX: Any = {"forward": "float8", "backward": "float8", "item_bytes": 1 + 1 / 32, "spread": 0.1}
_FP4: Any = {"forward": "float4", "backward": "float4", "item_bytes": 0.5 + 1 / 16, "spread": 0.2}

RECIPES: Mapping[str, Mapping[str, Recipe]] = {
    "torchao": {
        "float8": _TENSOR,
        "float8-rowwise": _ROW,
        "float8-block": replace(
            _ROW, words="float8 linears with a scale a block of 128: a pass for each operand", turned_passes=_COLUMNS,
            **_BLOCKS,
        ),
        "mxfp8": replace(
            _ROW, words="MXFP8 linears, a scale for 32 numbers: a pass for each operand", turned_passes=_COLUMNS, **_MX
        ),
        "nvfp4": replace(
            _ROW, words="NVFP4 linears: a pass finds the largest value, another casts", input_passes=2.3,
            weight_passes=2.3, gradient_passes=2.3, turned_passes=1.3, **_FP4,
        ),
        "tf32": _TF32,
    },
    "engine": {
        "float8": _DELAYED,
        "float8-current": replace(
            _DELAYED, words="float8 linears of Transformer Engine with scales of the step: one pass finds the largest "
            "value, another casts and transposes", input_passes=3.0, weight_passes=3.0, gradient_passes=3.0,
        ),
        "float8-block": replace(
            _DELAYED, words="float8 linears of Transformer Engine with a scale a block of 128: one pass casts both "
            "ways", **_BLOCKS,
        ),
        "mxfp8": replace(
            _DELAYED, words="MXFP8 linears of Transformer Engine, a scale for 32 numbers: one pass casts both ways",
            **_MX,
        ),
        "nvfp4": replace(
            _DELAYED, words="NVFP4 linears of Transformer Engine: one pass finds the largest value, another rotates "
            "and casts both ways", input_passes=2.6, weight_passes=2.6, gradient_passes=2.6, **_FP4,
        ),
        "tf32": _TF32,
    },
}  # fmt: skip
"""Library -> name of a precision -> its recipe. Transformer Engine multiplies experts in the same precision
(pytorch/module/grouped_linear.py); torchao's converters replace torch.nn.Linear, which experts are not.
torchao/float8/config.py (recipes, use_fast_accum), float8_ops.py
(operands of `_scaled_mm` are made contiguous); Transformer Engine, pytorch/module/linear.py (cast_transpose, fprop
fast, gradients with split accumulators), common/recipe (delayed, current, block, MXFP8 and NVFP4 scaling). In passes
over 16-bit bytes: a pass that finds the largest value reads 1, one that casts reads 1 and writes 1/2 (float4: 1/4 and a
scale), a transposed copy of float8 numbers moves 1. Products with a scale a tensor or a row and TF32 were measured on
an H200; those with a scale a block go at the rate of float8 with precise sums, since both add in the vector units
(DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.2), MXFP8 and NVFP4 at the share of the peak that float8 reaches:
assumed. Before torch 2.9 CUTLASS multiplied with a scale a row, 6.5 % off cuBLAS on an H100 (root mean square of 14
shapes): priced alike."""
