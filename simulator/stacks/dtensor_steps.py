"""The kernels and messages of tensor parallelism with DTensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from plans.model.graph import itemsize
from simulator.stacks.kernels import elementwise
from simulator.stacks.steps import Kernel, Message, Step

__all__ = [
    "SPLIT_PASSES",
    "along_sequence",
    "beside_products",
    "is_loss",
    "loss_as_logits",
    "own_reductions",
    "split_loss",
    "whole_loss",
]


def beside_products(steps: Sequence[Step], ways: int) -> list[Step]:
    """A gather next to the products that read it, a scatter next to the product that it takes: cut into as many pieces
    as ranks, each piece's product runs while the next piece is copied (torch/_inductor/fx_passes/micro_pipeline_tp.py).
    A scatter of a sum of products stays behind them. What is cut is not concatenated again; a rank first copies its own
    piece to where others read it, and sums the pieces that it was sent behind the product
    (torch/distributed/_symmetric_memory/__init__.py, _pipelined_multi_all_gather_and_consume and
    _fused_matmul_reduce_scatter_impl)."""
    result: list[Step] = []
    dtype = _dtype_of(steps)
    places = iter(range(len(steps)))
    for place in places:
        step, after = steps[place], place + 2
        if not isinstance(step, Message) or step.operator or step.call not in ("all_gather", "reduce_scatter"):
            result.append(step)
            continue
        wait = steps[place + 1]
        fits = isinstance(wait, Message) and wait.call == "wait" and wait.token == step.token
        own = replace(step, operator=_PIECES)
        if fits and step.call == "reduce_scatter" and result and _is_product(result[-1]):
            product, each = result.pop(), step.size_bytes // itemsize(dtype) // ways
            result += [own, product, wait, elementwise("add.forward", each, dtype, ways, 1)]
            next(places)
        elif fits and step.call == "all_gather" and after < len(steps) and _is_product(steps[after]):
            readers = _last_reader(steps, after) + 1 - after
            each = step.size_bytes // itemsize(dtype) // ways
            result += [elementwise("add.forward", each, dtype, 1, 1), own, *steps[after : after + readers], wait]
            for _ in range(1 + readers):
                next(places)
        else:
            result.append(step)
    return result


def _last_reader(steps: Sequence[Step], first: int) -> int:
    """The place of the last product that reads what the one at `first` does; of a gradient one alone is taken."""
    product, last = steps[first], first
    for place in range(first + 1, len(steps)):
        step = steps[place]
        if not isinstance(step, Kernel) or not isinstance(product, Kernel):
            break
        if step.call == product.call == "linear.forward" and step.shapes[0] == product.shapes[0]:
            last = place
    return last


def _is_product(step: Step) -> bool:
    return _is_call(step, "linear.forward") or _is_call(step, "linear.grad0")


_PIECES = "pieces"
"""Placeholder for the operator of a message that continues in pieces."""


def _dtype_of(steps: Sequence[Step]) -> str:
    """The dtype of a step: that of the body, except for losses, which are always computed in float32."""
    return next((step.dtype for step in steps if isinstance(step, Kernel) and not is_loss(step)), "bfloat16")


def is_loss(step: Step) -> bool:
    """Whether a step is a kernel of the loss."""
    return isinstance(step, Kernel) and step.call.startswith("cross_entropy.")


def loss_as_logits(steps: Sequence[Step]) -> Sequence[Step]:
    """The kernels of the loss if it reads and writes logits in the dtype of the body."""
    dtype = _dtype_of(steps)
    return [
        replace(step, dtype=dtype, touched_bytes=step.touched_bytes // itemsize(step.dtype) * itemsize(dtype))
        if isinstance(step, Kernel) and is_loss(step) and step.dtype != dtype else step for step in steps
    ]  # fmt: skip


def along_sequence(steps: Sequence[Step]) -> list[Step]:
    """Gathers and scatters along the sequence, which is not the first dim: gathered parts are concatenated, and
    scattered tensors are cut and concatenated first (torch/distributed/_functional_collectives.py)."""
    result: list[Step] = []
    dtype = _dtype_of(steps)
    gathered: dict[int, Step] = {}
    for step in steps:
        if not isinstance(step, Message) or step.operator:
            result.append(step)
        elif step.call == "wait":
            result += [step, gathered.pop(step.token)] if step.token in gathered else [step]
        elif step.call in ("all_gather", "reduce_scatter"):
            copy = elementwise("add.forward", step.size_bytes // itemsize(dtype), dtype, 1, 1)
            if step.call == "all_gather":
                gathered[step.token] = copy
                result.append(step)
            else:
                result += [copy, step]
        else:
            result.append(step)
    return result


def whole_loss(steps: list[Step], ways: int) -> list[Step]:
    """The loss on gathered logits: they are gathered by rows and concatenated, every rank has all of the loss."""
    result: list[Step] = []
    logits, dtype = 0, _dtype_of(steps)
    for step in steps:
        if isinstance(step, Message):
            if step.operator == "loss" and logits:
                size = logits * ways * itemsize(dtype)
                result.append(replace(step, size_bytes=size, item_bytes=itemsize(dtype)))
                continue
            if step.call == "wait" and result and _is_loss_gather(result[-1]):
                whole = elementwise("add.forward", logits * ways, dtype, 1, 1)
                result += [step, whole]
                continue
        elif step.call == "linear.forward":
            logits = math.prod(step.shapes[-1])
        elif step.call.startswith("cross_entropy."):
            step = replace(step, touched_bytes=step.touched_bytes * ways)
        result.append(step)
    return result


SPLIT_PASSES = {"cross_entropy.forward": (4, 2), "cross_entropy.grad0": (2, 2)}
"""Float tensors of logits that the loss on split ones reads and writes beyond the loss of one device, forward and
backward: the largest, the difference to it, exponentials, their sum and one more difference in place of one kernel;
zeros, exponentials, a sum and a product in place of zeros and one kernel (torch/distributed/tensor/parallel/loss.py,
_log_softmax and _nll_loss_and_log_softmax_backward)."""


def split_loss(steps: Sequence[Step]) -> list[Step]:
    """The loss on logits that stay split, written out in passes over a rank's part."""
    result: list[Step] = []
    for step in steps:
        result.append(step)
        if isinstance(step, Kernel) and step.call in SPLIT_PASSES:
            reads, writes = SPLIT_PASSES[step.call]
            result.append(elementwise("add.forward", math.prod(step.shapes[0]), "float32", reads, writes))
    return result


def _is_loss_gather(step: Step) -> bool:
    return isinstance(step, Message) and step.operator == "loss"


def own_reductions(steps: list[Step]) -> list[Step]:
    """Gradients of an input that several products share, each reduced when it is made."""
    after: dict[int, Message] = {}
    for number, step in enumerate(steps):
        if not isinstance(step, Message) or step.call != "all_reduce":
            continue
        sums = 0
        while number > sums and _is_call(steps[number - 1 - sums], "add.forward"):
            sums += 1
        makers = [place for place in range(number) if _is_call(steps[place], "linear.grad0")]
        for place in makers[len(makers) - 1 - sums : -1]:
            after[place] = replace(step, token=_OWN_TOKEN + place)
    return [each for place, step in enumerate(steps) for each in (step, *([after[place]] if place in after else []))]


def _is_call(step: Step, call: str) -> bool:
    return isinstance(step, Kernel) and step.call == call


_OWN_TOKEN = 2**16
"""Tokens that nothing waits for: channels keep their order, so who waits for the last waits for all."""
