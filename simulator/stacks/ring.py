"""Context-parallel attention as other software runs it: in pieces, with equal work on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from simulator.stacks.base import PieceSizes
from simulator.stacks.footprint import Footprint
from simulator.stacks.kernels import elementwise
from simulator.stacks.steps import Kernel, Message, Shape, Step

__all__ = ["ring_attention", "without_foreign_keys"]


def ring_attention(steps: Sequence[Step]) -> list[Step]:
    """The steps of a body in which every causal attention over a split sequence is made of pieces.

    Twofold's ranks have consecutive parts of a sequence, so that the last one sees most keys and the others wait for
    it. Others give each of n ranks the chunks i and 2n - 1 - i of 2n chunks, so that all have the same work: its own
    keys under the mask, and half of those of each other rank (Megatron-LM, megatron/core/utils.py,
    get_batch_on_this_cp_rank; torch/distributed/tensor/experimental/_attention.py, the head-tail load balancer). Keys
    and values of the others arrive during the pieces before (ring attention, Liu et al. 2023, arXiv 2310.01889), their
    gradients leave during the last one; outputs are added up.
    """
    found: list[Step] = []
    waiting: list[Step] = []
    for step in steps:
        if isinstance(step, Message):
            if step.call == "wait":
                waiting.append(step)
                continue
            if step.call == "reduce_scatter" and step.axes == ("cp",) and (last := _last_piece(found)):
                found.insert(last, step)
                continue
        elif (parts := _parts(step)) > 1:
            own, other = _piece(step, 1, parts), replace(_piece(step, 2, parts), causal=False)
            found += [own, *((replace(other, times=(parts - 2) * step.times),) if parts > 2 else ()), *waiting]
            waiting = []
            found += [other, _sums(step, parts)]
            continue
        found += [*waiting, step]
        waiting = []
    return [*found, *waiting]


def without_foreign_keys(found: Footprint, sizes: PieceSizes, parts: int) -> Footprint:
    """The bytes of a block that keeps its own keys and values for its backward, and has those of one other rank at a
    time; in twofold's programs the gathered ones stay. Under full recomputation none stay.
    """
    gone = 0 if sizes.recompute == "full" else sizes.foreign_bytes
    if not gone:
        return found
    passing = gone // (parts - 1)
    kept = found.kept - gone
    return replace(found, kept=kept, forward=max(kept, found.forward - gone + passing))


def _last_piece(steps: Sequence[Step]) -> int:
    """Where the last piece of a split attention stands; 0 if there is none."""
    kernels = (place for place, step in enumerate(steps) if isinstance(step, Kernel) and _is_attention(step))
    return max((place for place in kernels if not steps[place].causal), default=0)  # type: ignore[union-attr]


def _is_attention(step: Kernel) -> bool:
    return step.call.startswith("attention.")


def _first_operand(call: str) -> int:
    """Where queries, keys and values begin in the shapes of a call: a gradient has that of the output before them."""
    return 0 if call == "attention.forward" else 1


def _parts(step: Kernel) -> int:
    """Over how many ranks the keys of a causal attention are split; 1 for other kernels."""
    if not (step.causal and _is_attention(step)):
        return 1
    queries, keys = step.shapes[_first_operand(step.call) :][:2]
    return keys[-2] // queries[-2]


def _piece(step: Kernel, share: int, parts: int) -> Kernel:
    """The attention to one `share`-th of the keys of one of `parts` ranks."""
    first = _first_operand(step.call)

    def of_keys(shape: Shape) -> Shape:
        return (*shape[:-2], max(1, shape[-2] // (share * parts)), shape[-1])

    places = (first + 1, first + 2)
    shapes = tuple(of_keys(shape) if place in places else shape for place, shape in enumerate(step.shapes))
    return replace(step, shapes=shapes, touched_bytes=step.touched_bytes // parts)


def _sums(step: Kernel, parts: int) -> Kernel:
    """The additions of the pieces' outputs, or of the gradients of queries, keys and values."""
    first = _first_operand(step.call)
    queries, keys, values = (math.prod(shape) for shape in step.shapes[first : first + 3])
    elements = queries if step.call == "attention.forward" else queries + (keys + values) // parts
    return replace(elementwise("add.forward", elements, step.dtype, 2, 1), times=(parts - 1) * step.times)
