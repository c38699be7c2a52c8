"""Dispatch of tokens to experts and back in one pass over the rows, in Triton: imported only where a GPU runs it.

One kernel chooses the experts of every token, and one counts for every expert and sample which choices find a place. It
writes both the row of each choice and the choice of each row, so that copies in either direction read what they need
and write every result once: nothing is filled with zeros before, and nothing is added by atomics. Weights and sums are
in single precision (double for double), and every result is rounded once at the end.

On H200 a call for 4 x 2048 tokens of 2048 bfloat16, 8 experts and 2 choices takes 31 to 42 us, plain torch 230 to 500
(benchmarks/data/h200-expert-rows-x1.jsonl.gz and h200-rules-again-x1.jsonl.gz).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["RoutingInOnePass"]

_LOGITS = 512
"""Logits of one program that chooses experts."""

_CHOICES = 4096
"""Choices that a program which counts them holds at once."""

_WIDTH = 2048
"""Elements of a row that a program holds at once."""


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    tensors, sizes, OF_ALL: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK_CHOICES: tl.constexpr,
):  # fmt: skip
    """chosen[b, k, s] and weight[b, s, k]; of two experts with equal logits the first is chosen first."""
    logits, chosen, weight = tensors[0], tensors[1], tensors[2]
    num_tokens, length, num_experts = sizes[0], sizes[1], sizes[2]
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[:, None]
    expert = tl.arange(0, BLOCK_EXPERTS)[None, :]
    number = tl.arange(0, BLOCK_CHOICES)[None, :]
    read = logits + tl.minimum(token, num_tokens - 1).to(tl.int64) * num_experts + expert
    x = tl.load(read, mask=expert < num_experts, other=float("-inf")).to(weight.dtype.element_ty)
    order = tl.where(x == x, x, float("inf"))  # what is not a number comes first, as in torch.topk
    free = (expert < num_experts) & (token >= 0)
    index = tl.zeros([BLOCK_TOKENS, BLOCK_CHOICES], tl.int32)
    value = tl.full([BLOCK_TOKENS, BLOCK_CHOICES], float("-inf"), weight.dtype.element_ty)
    for each in tl.static_range(TOP_K):
        best = tl.max(tl.where(free, order, float("-inf")), 1)[:, None]
        first = tl.min(tl.where(free & (order == best), expert, BLOCK_EXPERTS), 1)[:, None]
        picked = tl.sum(tl.where(expert == first, x, 0.0), 1)[:, None]
        free = free & (expert != first)
        index = tl.where(number == each, first, index)
        value = tl.where(number == each, picked, value)
    highest = tl.max(order, 1)[:, None]
    total = tl.sum(tl.exp((x if OF_ALL else value) - highest), 1)[:, None]
    mask = (token < num_tokens) & (number < TOP_K)
    tl.store(chosen + (token // length * TOP_K + number) * length + token % length, index, mask=mask)
    tl.store(weight + token * TOP_K + number, tl.exp(value - highest) / total, mask=mask)


@triton.jit
def _place(  # type: ignore[no-untyped-def]
    tensors, num_experts, length, capacity, TOP_K: tl.constexpr,
    CHOICES: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """row[b, s, k] of each choice, and choice[experts, b, capacity] of each row; -1 where there is none.

    Each program counts the choices of one expert in one sample, all first choices before all second ones.
    """
    chosen, row, choice = tensors[0], tensors[1], tensors[2]
    expert, sample = tl.program_id(0) % num_experts, tl.program_id(0) // num_experts
    begin = (expert * (tl.num_programs(0) // num_experts) + sample) * capacity
    count = tl.full((), 0, tl.int32)
    for first in range(0, CHOICES, BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_own = tl.load(chosen + sample * TOP_K * length + at, mask=at < TOP_K * length, other=-1) == expert
        place = count + tl.cumsum(is_own.to(tl.int32), 0) - 1
        which = (sample * length + at % length) * TOP_K + at // length
        tl.store(row + which, tl.where(place < capacity, begin + place, -1), mask=is_own)
        tl.store(choice + begin + place, which, mask=is_own & (place < capacity))
        count += tl.sum(is_own.to(tl.int32), 0)
    for first in range(0, PLACES, BLOCK):
        place = first + tl.arange(0, BLOCK)
        tl.store(choice + begin + place, tl.full([BLOCK], -1, tl.int32), mask=(place >= count) & (place < capacity))


@triton.jit
def _spread(  # type: ignore[no-untyped-def]
    tensors, width, stride, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """y[row] = x[token of its choice], times the choice's weight if `WEIGHTED`; zeros where no choice has the row."""
    x, y, choice, weight = tensors[0], tensors[1], tensors[2], tensors[3]
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    column = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    which = tl.load(choice + row)
    token = (which // TOP_K).to(tl.int64)
    value = tl.load(x + token * stride + column, mask=(column < width) & (which >= 0), other=0.0)
    if WEIGHTED:
        factor = tl.load(weight + which, mask=which >= 0, other=0.0)
        value = (value.to(factor.dtype) * factor).to(y.dtype.element_ty)
    tl.store(y + row * width + column, value, mask=column < width)


@triton.jit
def _collect(  # type: ignore[no-untyped-def]
    tensors, width, stride, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """y[token] = the sum of x[row] over the rows of its choices, times their weights if `WEIGHTED`."""
    x, y, row, weight = tensors[0], tensors[1], tensors[2], tensors[3]
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    column = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], weight.dtype.element_ty)
    for number in tl.static_range(TOP_K):
        at = tl.load(row + token * TOP_K + number).to(tl.int64)
        value = tl.load(x + at * stride + column, mask=(column < width) & (at >= 0), other=0.0).to(total.dtype)
        total += value * tl.load(weight + token * TOP_K + number) if WEIGHTED else value
    tl.store(y + token * width + column, total.to(y.dtype.element_ty), mask=column < width)


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    tensors, sizes, strides, TOP_K: tl.constexpr, OF_ALL: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_EXPERTS: tl.constexpr,
):  # fmt: skip
    """Of the logits of a token: share (d - sum of share d), where d is g times the row of each chosen expert."""
    g, routed, logits, y, row, chosen = tensors[0], tensors[1], tensors[2], tensors[3], tensors[4], tensors[5]
    wide = tensors[6].dtype.element_ty
    length, num_experts, width = sizes[0], sizes[1], sizes[2]
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_EXPERTS)
    products = tl.zeros([BLOCK_EXPERTS], wide)
    counted = (expert < num_experts) if OF_ALL else (expert < 0)
    for number in tl.static_range(TOP_K):
        at = tl.load(row + token * TOP_K + number).to(tl.int64)
        is_chosen = expert == tl.load(chosen + (token // length * TOP_K + number) * length + token % length)
        sums = tl.zeros([BLOCK], wide)
        for first in range(0, WIDTH, BLOCK):
            column = first + tl.arange(0, BLOCK)
            mask = (column < width) & (at >= 0)
            value = tl.load(g + token * strides[0] + column, mask=mask, other=0.0).to(wide)
            sums += value * tl.load(routed + at * strides[1] + column, mask=mask, other=0.0).to(wide)
        products += tl.where(is_chosen, tl.sum(sums, 0), 0.0)
        counted = counted | is_chosen
    x = tl.load(logits + token * num_experts + expert, mask=counted, other=float("-inf")).to(wide)
    share = tl.exp(x - tl.max(x, 0))
    share = share / tl.sum(share, 0)
    made = share * (products - tl.sum(share * products, 0))
    tl.store(y + token * num_experts + expert, made.to(y.dtype.element_ty), mask=expert < num_experts)


def _rows(x: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _block(width: int) -> int:
    return min(_WIDTH, triton.next_power_of_2(width))


class RoutingInOnePass:
    """`executor.kernels.expert_rows.Routing` by these kernels.

    Args:
        attrs: "top_k", "capacity" and "weights" as `plans.operators.experts` declares them.
        logits: of the router, [b, s, experts].
    """

    def __init__(self, attrs: Mapping[str, Any], logits: Tensor) -> None:
        self._logits, self._of_all = logits.contiguous(), attrs.get("weights", "chosen") == "all"
        (batch, length, num_experts), top_k, capacity = logits.shape, attrs["top_k"], attrs["capacity"]
        self._top_k, self._num_tokens = top_k, batch * length
        self._experts_block = triton.next_power_of_2(num_experts)
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        self._chosen = logits.new_empty(batch, top_k, length, dtype=torch.int32)
        self._weight = logits.new_empty(batch, length, top_k, dtype=wide)
        self._row = torch.empty_like(self._weight, dtype=torch.int32)
        self._choice = logits.new_empty(num_experts, batch * capacity, dtype=torch.int32)
        if not logits.numel():
            return
        tokens = max(1, _LOGITS // self._experts_block)
        _choose[(triton.cdiv(self._num_tokens, tokens),)](
            (self._logits, self._chosen, self._weight), (self._num_tokens, length, num_experts), OF_ALL=self._of_all,
            TOP_K=top_k, BLOCK_TOKENS=tokens, BLOCK_EXPERTS=self._experts_block,
            BLOCK_CHOICES=triton.next_power_of_2(top_k),
        )  # fmt: skip
        _place[(num_experts * batch,)](
            (self._chosen, self._row, self._choice), num_experts, length, capacity, TOP_K=top_k,
            CHOICES=top_k * length, PLACES=capacity, BLOCK=min(_CHOICES, triton.next_power_of_2(top_k * length)),
            num_warps=8,
        )  # fmt: skip

    def spread(self, source: Tensor, *, weighted: bool) -> Tensor:
        """Routed rows: each is written once."""
        return self._moved(_spread, source, self._choice, weighted=weighted)

    def collected(self, routed: Tensor, *, weighted: bool) -> Tensor:
        """Tokens: each is written once."""
        return self._moved(_collect, routed, self._row, weighted=weighted)

    def _moved(self, kernel: Any, source: Tensor, index: Tensor, *, weighted: bool) -> Tensor:
        x, width = _rows(source), source.shape[-1]
        y = x.new_empty(*index.shape[:2], width)
        block = _block(width)
        parts = triton.cdiv(width, block)
        if y.numel():
            kernel[(y.numel() // width * parts,)](
                (x, y, index, self._weight), width, x.stride(0), TOP_K=self._top_k, WEIGHTED=weighted, PARTS=parts,
                BLOCK=block,
            )  # fmt: skip
        return y

    def logits_gradient(self, g: Tensor, routed: Tensor) -> Tensor:
        """The products, and the gradient of the softmax of each token with them."""
        y, g, routed = torch.empty_like(self._logits), _rows(g), _rows(routed)
        width = g.shape[-1]
        if y.numel():
            _gradient[(self._num_tokens,)](
                (g, routed, self._logits, y, self._row, self._chosen, self._weight),
                (self._logits.shape[1], self._logits.shape[2], width), (g.stride(0), routed.stride(0)),
                TOP_K=self._top_k, OF_ALL=self._of_all, WIDTH=width,
                BLOCK=_block(width), BLOCK_EXPERTS=self._experts_block,
            )  # fmt: skip
        return y
