"""Recurrent layers by torch's own kernels, and their gradients by autograd of one call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from executor.kernels.context import OpContext, Rule
from executor.kernels.place import by_autograd
from plans.operators.recurrent import MOST_RECURRENT_INPUTS

__all__ = ["RECURRENT_RULES"]

Attrs = Mapping[str, Any]

_CALLS: Mapping[str, Callable[..., tuple[Tensor, ...]]] = {
    "LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu
}  # fmt: skip


def _layer(attrs: Attrs, x: Tensor, *rest: Tensor) -> Tensor:
    """One layer in one direction: all states, or the last one of the cells."""
    if attrs.get("lengths"):
        return _cell_after(rest[-1], attrs, x, *rest[:-1])
    is_lstm = attrs["mode"] == "LSTM"
    num_weights = (4 if attrs["bias"] else 2) + bool(attrs.get("projected"))
    weights, given = list(rest[:num_weights]), [tensor.unsqueeze(0) for tensor in rest[num_weights:]]
    gates, hidden = weights[1].shape
    zeros = [x.new_zeros(1, x.shape[0], width) for width in ((hidden, gates // 4) if is_lstm else (hidden,))]
    states = [*given, *zeros[len(given) :]]
    sequence = x.flip(1) if attrs.get("reverse") else x
    made = _CALLS[attrs["mode"]](
        sequence, states if is_lstm else states[0], weights, bool(attrs["bias"]), 1, 0.0, True, False, True
    )
    if attrs.get("cell"):
        return made[2].squeeze(0)
    return made[0].flip(1) if attrs.get("reverse") else made[0]


def _cell_after(lengths: Tensor, attrs: Attrs, x: Tensor, *rest: Tensor) -> Tensor:
    """The state of an LSTM's cells after as many steps as each sample has: that of torch's layer is after all."""
    num_weights = (4 if attrs["bias"] else 2) + bool(attrs.get("projected"))
    weights, states = rest[:num_weights], rest[num_weights:]
    gates, hidden = weights[1].shape
    biases = weights[2:4] if attrs["bias"] else (None, None)
    state, cell = states or (x.new_zeros(x.shape[0], hidden), x.new_zeros(x.shape[0], gates // 4))
    inputs = functional.linear(x, weights[0], biases[0])
    for step in range(x.shape[1]):
        made = inputs[:, step] + functional.linear(state, weights[1], biases[1])
        let_in, forget, new, let_out = made.chunk(4, 1)
        after = forget.sigmoid() * cell + let_in.sigmoid() * new.tanh()
        state = let_out.sigmoid() * after.tanh()
        state = functional.linear(state, weights[-1]) if attrs.get("projected") else state
        cell = torch.where((step < lengths).unsqueeze(1), after, cell)
    return cell


def recurrent(context: OpContext, attrs: Attrs, *inputs: Tensor) -> Tensor:
    """See `plans.operators.recurrent`."""
    with torch.no_grad():
        return _layer(attrs, *inputs).clone(memory_format=torch.contiguous_format)


def _gradients(*wanted: int) -> Rule:
    def made(context: OpContext, attrs: Attrs, g: Tensor, *inputs: Tensor) -> Any:
        found = by_autograd(lambda *fresh: _layer(attrs, *fresh), inputs, wanted, g)
        return found if len(wanted) > 1 else found[0]

    return made


RECURRENT_RULES: Mapping[str, Rule] = {
    "recurrent.forward": recurrent,
    **{
        "recurrent.grad" + "".join(map(str, wanted)): _gradients(*wanted)
        for count in range(1, MOST_RECURRENT_INPUTS + 1)
        for wanted in itertools.combinations(range(MOST_RECURRENT_INPUTS), count)
    },
}
