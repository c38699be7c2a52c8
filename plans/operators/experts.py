"""A mixture of experts with a fixed capacity: dispatch of tokens to their experts, and back.

Shapes are static: every expert has `capacity` slots for each sample. A token takes a slot at each of its `top_k`
experts, in the order of its choices (all first choices before all second ones, as in Lepikhin et al. 2020, GShard,
arXiv 2006.16668, algorithm 1) and, within a choice, of its position. A token that finds no free slot is dropped by that
expert and continues on the residual. Samples share nothing, so any split of the batch gives the same result.

Between dispatch and combine there are plain matmuls over [experts, samples x capacity, features], with the experts as
batch dim. If the experts are split (expert parallelism) over an axis that split the samples before, the redistribution
in front of the matmuls is the all-to-all.
"""

from __future__ import annotations

from plans.errors import TwofoldError
from plans.operators.registry import Attrs, Shape, Shapes, declares
from plans.operators.spec import Dim, Gradient, OperatorSpec

__all__ = ["WEIGHTS", "expert_capacity"]

WEIGHTS = ("chosen", "all")
"""attrs "weights": a softmax over the chosen experts (Mixtral), or over all experts, where the chosen ones keep their
weights."""


def expert_capacity(seq: int, num_experts: int, top_k: int, factor: float) -> int:
    """Places of one sample at one expert: `factor` times an even share of its choices, at most its tokens.

    >>> expert_capacity(4096, 8, 2, 1.25), expert_capacity(16, 8, 2, 100.0)
    (1280, 16)
    """
    return max(1, min(seq, -int(-(top_k * seq * factor) // num_experts)))


def _sizes(tokens: Shape, logits: Shape, routed: Shape, attrs: Attrs) -> dict[str, int]:
    fits = len(tokens) == 3 and len(logits) == 3 and len(routed) == 3 and tokens[:2] == logits[:2]
    capacity = attrs.get("capacity", 0)
    if not fits or routed != (logits[2], tokens[0] * capacity, tokens[2]):
        raise TwofoldError(
            f"a mixture of experts takes tokens [b, s, h], logits [b, s, e] and routed tokens [e, b x capacity, h], "
            f"not {tokens}, {logits} and {routed} with a capacity of {capacity}"
        )
    if not 1 <= attrs.get("top_k", 0) <= logits[2]:
        raise TwofoldError(f"top_k is {attrs.get('top_k')!r}; there are {logits[2]} experts")
    if attrs.get("weights", "chosen") not in WEIGHTS:
        raise TwofoldError(f"weights are {attrs['weights']!r}; use one of {', '.join(WEIGHTS)}")
    return {"b": tokens[0], "_s": tokens[1], "h": tokens[2], "_e": logits[2], "_c": capacity}


_TOKENS: tuple[Dim, ...] = ("b", "_s", "h")
_LOGITS: tuple[Dim, ...] = ("b", "_s", "_e")
_ROUTED: tuple[Dim, ...] = ("_e", ("b", "_c"), "h")


@declares("dispatch")
def _dispatch(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """y[e, (b, c), h] of tokens x[b, s, h] and the router's logits[b, s, e]; unused places are zeros.

    attrs "top_k", "capacity". Of the logits only the order is read: no gradient goes to them.
    """
    return OperatorSpec(
        kind=kind, sizes=_sizes(inputs[0], inputs[1], outputs[0], attrs), inputs=(_TOKENS, _LOGITS), outputs=(_ROUTED,),
        splittable=frozenset(("b", "h")), gradients={0: Gradient(needs=("x1",))}, discrete=frozenset((1,)),
    )  # fmt: skip


@declares("combine")
def _combine(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """y[b, s, h]: the experts' outputs x[e, (b, c), h] for each token, weighted by its logits[b, s, e].

    attrs "top_k", "capacity", "weights" (see `WEIGHTS`).
    """
    sizes = _sizes(outputs[0], inputs[1], inputs[0], attrs)
    flops = 2 * attrs["top_k"] * sizes["b"] * sizes["_s"] * sizes["h"]
    return OperatorSpec(
        kind=kind, sizes=sizes, inputs=(_ROUTED, _LOGITS), outputs=(_TOKENS,), splittable=frozenset(("b", "h")),
        flops=flops, gradients={
            0: Gradient(needs=("x1",), flops=flops // 2), 1: Gradient(needs=("x0", "x1"), flops=flops)
        },
    )  # fmt: skip
