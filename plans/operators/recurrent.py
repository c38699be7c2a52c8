"""Recurrent layers: one layer of an LSTM, a GRU or a plain RNN over a full sequence, in one direction."""

from __future__ import annotations

from plans.operators.registry import Attrs, Shapes, declares
from plans.operators.spec import Dim, Gradient, OperatorSpec

__all__ = ["MOST_RECURRENT_INPUTS"]

MOST_RECURRENT_INPUTS = 8
"""A sequence, two weights, two biases, a projection, two states: inputs with gradients."""


@declares("recurrent")
def _recurrent(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """y[b, s, h] of x[b, s, i], weights [g c, i] and [g c, h], two biases [g c] and first states [b, h] and [b, c].

    The formulas are those of torch.nn.LSTM, GRU and RNN; attrs "mode" is LSTM, GRU, RNN_TANH or RNN_RELU, "bias":
    whether there are biases, "reverse": whether it runs from the end. h equals c, unless attrs "projected" is set (the
    `proj_size` of an LSTM): then a weight [h, c] after the biases makes the states of the cells. Without first states
    they are zeros. With attrs "cell" the result is the last state of an LSTM's cells, [b, c]. Steps follow each other,
    so only the batch is split.
    """
    batch, length, width = inputs[0]
    gates, hidden = inputs[2]
    is_projected = bool(attrs.get("projected"))
    cells = inputs[5 if attrs["bias"] else 3][1] if is_projected else hidden
    cell: Dim = "_c" if is_projected else "_h"
    sizes = {"b": batch, "_s": length, "_i": width, "_g": gates, "_h": hidden} | ({"_c": cells} if is_projected else {})
    operands: list[tuple[Dim, ...]] = [("b", "_s", "_i"), ("_g", "_i"), ("_g", "_h")]
    operands += [("_g",), ("_g",)] if attrs["bias"] else []
    operands += [("_h", cell)] if is_projected else []
    num_trained = len(inputs) - bool(attrs.get("lengths"))
    operands += [("b", "_h"), ("b", cell)][: num_trained - len(operands)]
    operands += [("b",)] * (len(inputs) - num_trained)
    flops = 2 * batch * length * (gates * (width + hidden) + (hidden * cells if is_projected else 0))
    needs = tuple(f"x{index}" for index in range(len(inputs)))
    # one call of autograd makes all gradients, and the forward again: its work is counted once
    each = 2 * flops // num_trained
    return OperatorSpec(
        kind=kind, sizes=sizes, inputs=tuple(operands), splittable=frozenset(("b",)), flops=flops,
        outputs=(("b", cell) if attrs.get("cell") else ("b", "_s", "_h"),),
        gradients=dict.fromkeys(
            range(num_trained), Gradient(needs=needs, flops=each, remade_flops=flops // num_trained)
        ),
        joint=tuple(range(num_trained)), joint_in_part=True,
    )  # fmt: skip
