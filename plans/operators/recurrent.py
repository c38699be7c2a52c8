"""Recurrent layers: one layer of an LSTM, a GRU or a plain RNN over a full sequence, in one direction."""

from __future__ import annotations

from plans.operators.registry import Attrs, Shapes, declares
from plans.operators.spec import Dim, Gradient, OperatorSpec

__all__ = ["MOST_RECURRENT_INPUTS"]

MOST_RECURRENT_INPUTS = 7
"""A sequence, two weights, two biases, two states."""


@declares("recurrent")
def _recurrent(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """y[b, s, h] of x[b, s, i], weights [g h, i] and [g h, h], two biases [g h] and first states [b, h].

    The formulas are those of torch.nn.LSTM, GRU and RNN; attrs "mode" is LSTM, GRU, RNN_TANH or RNN_RELU, "bias":
    whether there are biases, "reverse": whether it runs from the end. Without first states they are zeros. With attrs
    "cell" the result is the last state of an LSTM's cells, [b, h]. Steps follow each other, so only the batch is split.
    """
    batch, length, width = inputs[0]
    hidden = inputs[2][1]
    sizes = {"b": batch, "_s": length, "_i": width, "_g": inputs[1][0], "_h": hidden}
    operands: list[tuple[Dim, ...]] = [("b", "_s", "_i"), ("_g", "_i"), ("_g", "_h")]
    operands += [("_g",), ("_g",)] if attrs["bias"] else []
    operands += [("b", "_h")] * (len(inputs) - len(operands))
    flops = 2 * batch * length * inputs[1][0] * (width + hidden)
    needs = tuple(f"x{index}" for index in range(len(inputs)))
    # one call of autograd makes all gradients, and the forward again: its work is counted once
    each = 2 * flops // len(inputs)
    return OperatorSpec(
        kind=kind, sizes=sizes, inputs=tuple(operands), splittable=frozenset(("b",)), flops=flops,
        outputs=(("b", "_h") if attrs.get("cell") else ("b", "_s", "_h"),), remade_flops=flops,
        gradients={index: Gradient(needs=needs, flops=each) for index in range(len(inputs))},
        joint=tuple(range(len(inputs))), joint_in_part=True,
    )  # fmt: skip
