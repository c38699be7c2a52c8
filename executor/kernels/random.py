"""Dropout and random tensors that do not depend on the layout: a number is a function of its element's position.

The bits are those of splitmix64 (Steele, Lea and Flood 2014) for the counter "position in the full batch", started from
the operator's seed and the step. There is no generator state, so every part, micro-batch and recomputation gets the
same numbers without communication.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from executor.kernels.chips import has_triton
from executor.kernels.context import OpContext, Rule, StepCounter
from executor.kernels.place import num_parts, offset

__all__ = ["RANDOM_RULES", "drawn_elements", "kept_elements", "kept_now", "seed_of"]

Attrs = Mapping[str, Any]

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BITS = 53


def kept_elements(
    region: Sequence[tuple[int, int]],
    shape: Sequence[int],
    p: float,
    seed: int,
    step: int,
    micro_batch: int = 0,
    device: torch.device | None = None,
) -> Tensor:
    """The elements of a part of a tensor that a dropout keeps, as a boolean mask.

    Args:
        region: half-open index ranges of the part, one per dim.
        shape: shape of the full tensor for one micro-batch; dim 0 is the batch.
        p: the probability of dropping an element.
        seed: seed of the operator.
        step: of training, from 1.
        micro_batch: number of the micro-batch.

    >>> whole = kept_elements([(0, 4), (0, 6)], (4, 6), 0.5, seed=7, step=1)
    >>> part = kept_elements([(0, 2), (2, 4)], (2, 6), 0.5, seed=7, step=1, micro_batch=1)
    >>> torch.equal(part, whole[2:, 2:4])
    True
    """
    return _kept(region, shape, p, torch.tensor(_base(seed, step), device=device), micro_batch)


def kept_now(
    context: OpContext, attrs: Attrs, region: Sequence[tuple[int, int]], shape: Sequence[int], device: torch.device
) -> Tensor:
    """`kept_elements` of attrs "p" and "seed" in the step and the micro-batch of an instruction."""
    base = context.counter.number(_base_now, (attrs["seed"],), torch.int64, device)
    return _kept(region, shape, attrs["p"], base, context.micro_batch)


def _kept(region: Sequence[tuple[int, int]], shape: Sequence[int], p: float, base: Tensor, micro_batch: int) -> Tensor:
    return _bits(region, shape, base, micro_batch) >= int(p * 2**_BITS)


def _bits(region: Sequence[tuple[int, int]], shape: Sequence[int], base: Tensor, micro_batch: int) -> Tensor:
    """Whole numbers below 2 ** 53, one for each element."""
    counter = (base + _signed(micro_batch * math.prod(shape) * _GOLDEN)).view((1,) * len(shape))
    for dim, (low, high) in enumerate(region):
        stride = math.prod(shape[dim + 1 :])
        own = torch.arange(low, high, dtype=torch.int64, device=base.device).mul_(_signed(stride * _GOLDEN))
        counter = counter + own.view([-1 if at == dim else 1 for at in range(len(shape))])
    return _shifted(_mix(counter), 64 - _BITS)


def drawn_elements(
    kind: str, region: Sequence[tuple[int, int]], shape: Sequence[int], dtype: torch.dtype, seed: int, step: int,
    micro_batch: int = 0, device: torch.device | None = None,
) -> Tensor:  # fmt: skip
    """A part of a random tensor; arguments as those of `kept_elements`.

    Args:
        kind: "uniform", from 0 to below 1, or "normal", by the formula of Box and Muller (1958).

    >>> whole = drawn_elements("normal", [(0, 4), (0, 6)], (4, 6), torch.float32, seed=7, step=1)
    >>> part = drawn_elements("normal", [(2, 4), (1, 3)], (4, 6), torch.float32, seed=7, step=1)
    >>> torch.equal(part, whole[2:, 1:3])
    True
    """
    bases = [torch.tensor(_base(seed + more, step), device=device) for more in range(_STREAMS[kind])]
    return _drawn(region, shape, dtype, bases, micro_batch)


_STREAMS = {"uniform": 1, "normal": 2}
"""Kind of random tensor -> how many uniform numbers one of its elements is made of."""


def _drawn(
    region: Sequence[tuple[int, int]], shape: Sequence[int], dtype: torch.dtype, bases: Sequence[Tensor],
    micro_batch: int,
) -> Tensor:  # fmt: skip
    # rounding must not make a 1: a float32 holds 24 bits, narrower dtypes are rounded from it
    kept, wide = (_BITS, torch.float64) if dtype == torch.float64 else (24, torch.float32)
    uniform = [
        _shifted(_bits(region, shape, base, micro_batch), _BITS - kept).to(wide).mul_(2.0**-kept) for base in bases
    ]
    if len(uniform) == 1:
        return uniform[0].to(dtype)
    radius = torch.log1p(-uniform[0]).mul_(-2).sqrt_()
    return radius.mul_(torch.cos(2 * math.pi * uniform[1])).to(dtype)


def _base(seed: int, step: int) -> int:
    """The start of an operator's random numbers in a step."""
    return _signed(_mixed(_mixed(seed) + step))


def _base_now(now: StepCounter, seed: int) -> int:
    return _base(seed, now.step)


def seed_of(number: int) -> int:
    """The seed of the `number`-th random operator of a forward, counted from 1."""
    return zlib.crc32(f"dropout {number}".encode())


def _mix(z: Tensor) -> Tensor:
    """The output function of splitmix64, in place."""
    z.bitwise_xor_(_shifted(z, 30)).mul_(_signed(_FIRST))
    z.bitwise_xor_(_shifted(z, 27)).mul_(_signed(_SECOND))
    return z.bitwise_xor_(_shifted(z, 31))


def _shifted(z: Tensor, count: int) -> Tensor:
    """Shifted right with zeros moving in; torch's shift of signed numbers moves the sign in."""
    return (z >> count).bitwise_and_((1 << (64 - count)) - 1)


def _mixed(number: int) -> int:
    z = (number + 1) * _GOLDEN % 2**64
    z = (z ^ (z >> 30)) * _FIRST % 2**64
    z = (z ^ (z >> 27)) * _SECOND % 2**64
    return z ^ (z >> 31)


def _signed(number: int) -> int:
    number %= 2**64
    return number - 2**64 if number >= 2**63 else number


def _random_tensor(kind: str) -> Rule:
    def draw(context: OpContext, attrs: Attrs, *like: Tensor) -> Tensor:
        """This rank's part of a random tensor; the input is ignored."""
        region, shape = _located(context, attrs, context.shape)
        bases = [
            context.counter.number(_base_now, (attrs["seed"] + more,), torch.int64, context.device)
            for more in range(_STREAMS[kind])
        ]
        return _drawn(region, shape, context.torch_dtype, bases, context.micro_batch)

    return draw


def _located(context: OpContext, attrs: Attrs, sizes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """The position of a part in the full tensor, and the shape of the full tensor."""
    region, shape = [], []
    for dim, size in enumerate(sizes):
        low = offset(context, attrs, f"d{dim}", size)
        region.append((low, low + size))
        shape.append(size * num_parts(context, attrs, f"d{dim}"))
    return region, shape


def dropout(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """x / (1 - p) where it is kept, else 0; the gradient is the same rule."""
    p = attrs["p"]
    if p >= 1:
        return torch.zeros_like(x)
    region, shape = _located(context, attrs, x.shape)
    if has_triton(x) and x.dtype != torch.float64:
        from executor.kernels.triton_dropout import MOST_RUNS, dropped

        if len(runs := _runs(region, shape)) <= MOST_RUNS:
            base = context.counter.number(_base_now, (attrs["seed"],), torch.int64, x.device)
            first = context.micro_batch * math.prod(shape)
            first += sum(low * math.prod(shape[dim + 1 :]) for dim, (low, _) in enumerate(region))
            return dropped(x, base, runs, first, least=int(p * 2**_BITS), shift=64 - _BITS, scale=1 / (1 - p))
    kept = kept_now(context, attrs, region, shape, x.device)
    return (x * kept).mul_(1 / (1 - p))


def _runs(region: Sequence[tuple[int, int]], shape: Sequence[int]) -> list[tuple[int, int]]:
    """The dims of a part as (elements, distance between elements in the full tensor), with dims joined where possible.

    >>> _runs([(2, 4), (0, 3), (0, 5)], [4, 3, 5]), _runs([(0, 4), (5, 10)], [4, 10])
    ([(30, 1)], [(4, 10), (5, 1)])
    """
    found: list[tuple[int, int]] = []
    for dim in reversed(range(len(shape))):
        (low, high), stride = region[dim], math.prod(shape[dim + 1 :])
        if found and stride == found[0][0] * found[0][1]:
            found[0] = (found[0][0] * (high - low), found[0][1])
        else:
            found.insert(0, (high - low, stride))
    return found or [(1, 1)]


RANDOM_RULES: Mapping[str, Rule] = {
    "dropout.forward": dropout,
    "dropout.grad0": dropout,
    **{f"{kind}.forward": _random_tensor(kind) for kind in _STREAMS},
}
