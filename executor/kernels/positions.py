"""Rotary position embedding: pairs of elements rotated by an angle that grows with the position.

On a GPU with Triton, one kernel reads and writes the tensor once. A kind of device may have its own kernel. Otherwise
plain torch computes the same in a few passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from executor.kernels.chips import has_triton
from executor.kernels.context import OpContext, Rule
from executor.kernels.place import offset

__all__ = ["POSITION_RULES", "position_rules", "turned_plainly"]

Attrs = Mapping[str, Any]


class Turn(Protocol):
    """A kernel with the operands of `turned_plainly`; the tables stay where they are from step to step."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, sign: int, *, interleaved: bool) -> Tensor:
        """The pairs of `x` turned."""


def _frequencies(attrs: Attrs, rotary: int) -> Tensor:
    """Radians per position of each pair, with the scaling of attrs."""
    found = attrs["base"] ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    scaling = attrs.get("scaling", "none")
    if scaling == "linear":
        found = found / attrs["factor"]
    elif scaling == "llama3":
        # between the two wavelengths the division sets in smoothly (Llama 3.1's reference code)
        low, high = attrs["low_factor"], attrs["high_factor"]
        kept = ((attrs["original_seq"] * found / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        found = (1 - kept) * found / attrs["factor"] + kept * found
    return found


@lru_cache(maxsize=32)
def _turns(
    key: tuple[tuple[str, Any], ...], rotary: int, first: int, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin [length, 1, rotary / 2] of the positions from `first` on, taken in double precision."""
    with torch.inference_mode(False):
        positions = torch.arange(first, first + length, dtype=torch.float64)
        angles = torch.outer(positions, _frequencies(dict(key), rotary)).unsqueeze(1)
        return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


@lru_cache(maxsize=32)
def _turns_of(frequencies: Tensor, first: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `_turns`, for given frequencies: a constant, which is the same tensor in every step."""
    with torch.inference_mode(False):
        positions = torch.arange(first, first + length, dtype=dtype, device=frequencies.device)
        angles = torch.outer(positions, frequencies.to(dtype)).unsqueeze(1)
        return angles.cos(), angles.sin()


def _turned(turn: Turn, context: OpContext, attrs: Attrs, x: Tensor, angles: tuple[Tensor, ...], sign: int) -> Tensor:
    rotary, length = attrs.get("rotary", x.shape[-1]), x.shape[-3]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32  # half precision is turned in single
    is_interleaved = attrs.get("interleaved", False)
    if len(angles) == 2:
        cos, sin = (table.to(wide).unsqueeze(1).contiguous() for table in angles)
        return _turned_by_torch(x, cos, sin, sign, interleaved=is_interleaved)
    first = offset(context, attrs, "s", length)
    if angles:
        cos, sin = _turns_of(angles[0], first, length, wide)
    else:
        key = tuple(sorted((name, value) for name, value in attrs.items() if name != "split"))
        cos, sin = _turns(key, rotary, first, length, wide, x.device)
    return turn(x, cos, sin, sign, interleaved=is_interleaved)


def _turned_by_torch(x: Tensor, cos: Tensor, sin: Tensor, sign: int, *, interleaved: bool) -> Tensor:
    if has_triton(x):
        from executor.kernels.triton_rope import turned

        return turned(x, cos, sin, sign, interleaved=interleaved)
    return turned_plainly(x, cos, sin, sign, interleaved=interleaved)


def turned_plainly(x: Tensor, cos: Tensor, sin: Tensor, sign: int, *, interleaved: bool) -> Tensor:
    """The pairs of `x` [.., length, heads, dim] turned by the angles of cos and sin [length, 1, pairs], in plain torch.

    `sign` -1 turns back; pairs are (2i, 2i + 1) where `interleaved`, else (i, i + pairs). Elements after the pairs are
    copied. Half precision is turned in single, which the tables are in, and rounded once.
    """
    rotary = 2 * cos.shape[-1]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if rotary < x.shape[-1]:
        y[..., rotary:] = x[..., rotary:]
    if interleaved:
        first, second = slice(0, rotary, 2), slice(1, rotary, 2)
    else:
        first, second = slice(0, rotary // 2), slice(rotary // 2, rotary)
    a, b = x[..., first], x[..., second]
    y[..., first] = (a * cos).addcmul_(b, sin, value=-sign)
    y[..., second] = (b * cos).addcmul_(a, sin, value=sign)
    return y


def rope(turn: Turn, context: OpContext, attrs: Attrs, x: Tensor, *angles: Tensor) -> Tensor:
    """(a cos - b sin, b cos + a sin) of each pair (a, b); `angles` where they are given, see `plans.operators`."""
    return _turned(turn, context, attrs, x, angles, 1)


def rope_grad(turn: Turn, context: OpContext, attrs: Attrs, g: Tensor, *angles: Tensor) -> Tensor:
    """Gradient of the rotation: g rotated by the opposite angles."""
    return _turned(turn, context, attrs, g, angles, -1)


def position_rules(turn: Turn) -> Mapping[str, Rule]:
    """The rules of rotary positions by this kernel."""
    return {"rope.forward": partial(rope, turn), "rope.grad0": partial(rope_grad, turn)}


POSITION_RULES = position_rules(_turned_by_torch)
