"""Recurrent layers by torch's own kernels, and their gradients by autograd of one call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

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
    is_lstm = attrs["mode"] == "LSTM"
    num_weights = 4 if attrs["bias"] else 2
    weights, given = list(rest[:num_weights]), [tensor.unsqueeze(0) for tensor in rest[num_weights:]]
    zeros = x.new_zeros(1, x.shape[0], weights[1].shape[1])
    states = [*given, *[zeros] * (1 + is_lstm - len(given))]
    sequence = x.flip(1) if attrs.get("reverse") else x
    made = _CALLS[attrs["mode"]](
        sequence, states if is_lstm else states[0], weights, bool(attrs["bias"]), 1, 0.0, True, False, True
    )
    if attrs.get("cell"):
        return made[2].squeeze(0)
    return made[0].flip(1) if attrs.get("reverse") else made[0]


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
