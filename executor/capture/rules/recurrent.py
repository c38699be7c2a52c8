"""Capture of torch's recurrent layers, also of packed sequences.

torch runs all layers of an `nn.LSTM`, `nn.GRU` or `nn.RNN` in one call and stacks their states, so that the batch is
not dim 0. Here every layer and direction is one operator, "recurrent".

A packed sequence has a shape that depends on the lengths of the samples. It stays padded here. A state does not depend
on later inputs, so the layer runs over the padding as well, and the states there are set to 0. The backward direction
begins at each sample's end: its inputs are turned around within the sample's length.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence

from executor.capture.rules.table import rule
from executor.capture.translation import Translation
from executor.capture.values import Unreadable, Value
from executor.instead import called_instead
from plans.errors import TwofoldError

__all__ = ["recurrent_layers_one_by_one"]

_LIBRARY = torch.library.Library("twofold", "DEF")
_LIBRARY.define(
    "recurrent(Tensor x, Tensor[] weights, Tensor[] states, Tensor? lengths, str mode, bool bias, bool reverse) -> "
    "(Tensor, Tensor)"
)


@torch.library.impl(_LIBRARY, "recurrent", "CompositeExplicitAutograd")
def _shapes_of_recurrent(
    x: Tensor, weights: Sequence[Tensor], states: Sequence[Tensor], lengths: Tensor | None, mode: str, bias: bool,
    reverse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    gates, hidden = weights[1].shape
    return x.new_empty(x.shape[0], x.shape[1], hidden), x.new_empty(
        x.shape[0], gates // 4 if mode == "LSTM" else hidden
    )


@contextlib.contextmanager
def recurrent_layers_one_by_one() -> Iterator[None]:
    """Within this context recurrent layers and the packing of sequences run in the form described above."""
    with contextlib.ExitStack() as stack:
        for kind in (nn.LSTM, nn.GRU, nn.RNN):
            stack.enter_context(mock.patch.object(kind, "forward", _recurrent))
        stack.enter_context(called_instead({rnn.pack_padded_sequence: _pack, rnn.pad_packed_sequence: _unpack}))
        yield


# -- packed sequences --------------------------------------------------------------------------------------------------


class _Padded(PackedSequence):
    """A packed sequence that is still padded: rows [batch, time, width] and the length of each sample."""

    rows: Tensor
    lengths: Tensor

    def __new__(cls, rows: Tensor, lengths: Tensor) -> _Padded:
        made = tuple.__new__(cls, (None,) * 4)
        made.rows, made.lengths = rows, lengths
        return made

    def _refuse(self, *_: Any) -> NoReturn:
        raise TwofoldError(
            "the rows of a packed sequence have a shape that depends on values; unpack it with pad_packed_sequence and "
            "mask what is padding"
        )

    data = batch_sizes = sorted_indices = unsorted_indices = property(_refuse)
    __getitem__ = __iter__ = _refuse


def _pack(input: Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> _Padded:
    rows = input if batch_first else input.transpose(0, 1)
    counts = lengths if isinstance(lengths, Tensor) else torch.tensor(lengths, dtype=torch.int64)
    return _Padded(rows, counts.to(rows.device))


def _unpack(
    sequence: Any, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> tuple[Tensor, Tensor]:
    if not isinstance(sequence, _Padded):
        raise TwofoldError("pad_packed_sequence is supported for what pack_padded_sequence or a recurrent layer made")
    length = sequence.rows.shape[1]
    if total_length != length:
        raise TwofoldError(
            f"pad_packed_sequence makes a tensor whose shape depends on the lengths; give it total_length={length}, "
            f"the length of the padded sequence"
        )
    rows = sequence.rows
    if padding_value:
        rows = rows.masked_fill(~_inside(rows, sequence.lengths), padding_value)
    return rows if batch_first else rows.transpose(0, 1), sequence.lengths


def _inside(rows: Tensor, lengths: Tensor) -> Tensor:
    """Whether a time step is one of the sample, [batch, time, 1]."""
    steps = torch.arange(rows.shape[1], device=rows.device)
    return (steps.unsqueeze(0) < lengths.unsqueeze(1)).unsqueeze(-1)


def _turned(rows: Tensor, lengths: Tensor) -> Tensor:
    """The time steps of every sample in reverse order; values in the padding have no meaning."""
    steps = torch.arange(1, rows.shape[1] + 1, device=rows.device)
    places = (lengths.unsqueeze(1) - steps.unsqueeze(0)).clamp(min=0)
    return rows.gather(1, places.unsqueeze(-1).expand(-1, -1, rows.shape[2]))


# -- layers ------------------------------------------------------------------------------------------------------------


def _recurrent(self: nn.RNNBase, input: Any, hx: Any = None) -> tuple[Any, Any]:
    """Every layer and direction as a separate operator; dim 0 of all tensors is the batch."""
    kind = type(self).__name__
    lengths = input.lengths if isinstance(input, _Padded) else None
    if lengths is None and isinstance(input, PackedSequence):
        raise TwofoldError(f"nn.{kind} is given a packed sequence that pack_padded_sequence did not make; make it so")
    rows = input.rows if isinstance(input, _Padded) else input
    if rows.dim() != 3:
        raise TwofoldError(f"nn.{kind} needs an input of three dims, one of them the batch, to be planned")
    if lengths is None and not self.batch_first:
        rows = rows.transpose(0, 1)
    given = [] if hx is None else list(hx) if isinstance(hx, tuple) else [hx]
    directions = 2 if self.bidirectional else 1
    made: list[list[Tensor]] = [[], []]
    for layer in range(self.num_layers):
        outputs = []
        for reverse in range(directions):
            at = layer * directions + reverse
            output, last, cell = _layer(self, rows, lengths, at, [each[at] for each in given])
            outputs.append(output)
            made[0].append(last)
            made[1].append(cell)
        rows = torch.cat(outputs, -1) if directions > 1 else outputs[0]
        if self.dropout and self.training and layer < self.num_layers - 1:
            # torch keeps time in dim 0 there, and a position decides what is dropped
            rows = F.dropout(rows.transpose(0, 1), self.dropout).transpose(0, 1)
    last = torch.stack(made[0])
    result: Any = rows if self.batch_first else rows.transpose(0, 1)
    if lengths is not None:
        result = _Padded(rows, lengths)
    return result, (last, torch.stack(made[1])) if self.mode == "LSTM" else last


def _layer(
    self: nn.RNNBase, rows: Tensor, lengths: Tensor | None, at: int, states: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One layer in one direction: all states, the last one and the last of the cells."""
    reverse = bool(self.bidirectional and at % 2)
    weights, settings = list(self.all_weights[at]), (self.mode, self.bias)
    if lengths is None:
        output, cell = torch.ops.twofold.recurrent(rows, weights, states, None, *settings, reverse)
        return output, output[:, 0 if reverse else -1], cell
    rows = _turned(rows, lengths) if reverse else rows
    output, cell = torch.ops.twofold.recurrent(rows, weights, states, lengths, *settings, False)
    place = (lengths - 1).view(-1, 1, 1).expand(-1, 1, output.shape[2])
    last = output.gather(1, place).squeeze(1)
    output = _turned(output, lengths) if reverse else output
    return output.masked_fill(~_inside(output, lengths), 0), last, cell


@rule("twofold.recurrent.default")
def _recurrent_operators(
    build: Translation, node: fx.Node, x: Value, weights: Sequence[Value], states: Sequence[Value], lengths: Value,
    *settings: Any,
) -> Value:  # fmt: skip
    """One operator for each result that is read: all states, and the last of the cells."""
    mode, bias, reverse = settings
    read = {user.args[1] for user in node.users if user.users}
    attrs: dict[str, Any] = {"mode": mode, "bias": bias} | ({"reverse": True} if reverse else {})
    if len(weights) % 2:  # w_ih, w_hh, b_ih, b_hh, w_hr
        attrs["projected"] = True
    results: list[Value] = []
    for index in range(2):
        if index not in read or (index and mode != "LSTM"):
            results.append(Unreadable(reason=f"a state of {mode} that it does not have"))
            continue
        inputs, more = (x, *weights, *states), {"cell": True} if index else {}
        if index and lengths is not None:
            inputs, more = (*inputs, lengths), {"cell": True, "lengths": True}
        shape, dtype = build.shape_dtype_of(node, node.meta["val"][index])
        results.append(build.make(node, "recurrent", inputs, shape=shape, dtype=dtype, **attrs, **more))
    return tuple(results)
