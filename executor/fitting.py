"""Checks of a strategy against the module alone: number of operands, sizes of parameters, possible outputs.

The shapes of inputs are not known before the network is planned (`plans.user_strategy` checks them then). Strategies
that are wrong for any input are refused here, when `shard` is called.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto

from torch import nn

from plans.errors import TwofoldError
from plans.layout import TensorLayout
from plans.user_strategy import Entry, GivenStrategy

__all__ = ["Form", "check_fit"]


class Form(Enum):
    """The operands that an operator reads and the output that it computes.

    A class of `executor.ops` states the form of its `forward` in its class attribute `form`.
    """

    ELEMENTWISE = auto()
    """x [..] -> [..]"""
    LAST_DIM = auto()
    """x [.., k] -> [.., k]; a softmax"""
    FLATTEN = auto()
    """x [n, ..] -> [n, product of the others]"""
    BROADCAST = auto()
    """x [..], y [..] -> their common shape"""
    PRODUCT = auto()
    """x [.., k], w [k, n] -> [.., n]"""
    LINEAR = auto()
    """x [.., k], weight [n, k], bias [n] -> [.., n]"""
    NORM = auto()
    """x [.., *normalized], weight, bias [*normalized] -> [.., *normalized]"""
    EMBEDDING = auto()
    """x [..], weight [v, h] -> [.., h]"""
    CONVOLUTION = auto()
    """x [n, c, h, w], weight, bias -> [n, channels, h', w']"""


_TORCH_FORMS: dict[type, Form] = {
    **dict.fromkeys((nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Dropout), Form.ELEMENTWISE),
    nn.Softmax: Form.LAST_DIM,
    nn.Linear: Form.LINEAR,
    nn.LayerNorm: Form.NORM,
    nn.RMSNorm: Form.NORM,
    nn.Embedding: Form.EMBEDDING,
    nn.Conv2d: Form.CONVOLUTION,
}

_Sizes = tuple[int | None, ...]
"""Sizes of dims, None if they depend on the input."""

_Parts = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operand:
    """A tensor that an operator reads.

    Args:
        name: the module's name for it.
        sizes: sizes of its dims; of the last ones if `is_open`.
        is_open: whether more dims may come before.
    """

    name: str
    sizes: _Sizes
    is_open: bool = False

    def __str__(self) -> str:
        shown = [".."] * self.is_open + ["?" if size is None else str(size) for size in self.sizes]
        return f"{self.name!r} [{', '.join(shown)}]"


def check_fit(module: nn.Module, given: GivenStrategy) -> None:
    """Refuse a strategy that no input of `module` can fit. Unknown modules are checked when a plan is made.

    Raises:
        TwofoldError: too many entries, another number of dims, parts that do not divide a parameter, an output of
            another rank or split than the operator can make; it names the tensor and what would be allowed.

    >>> check_fit(nn.Linear(16, 8), GivenStrategy(inputs=((4, 1), (2, 1))))
    """
    operands, asked = _operands(module), f"{type(module).__name__} was given {given}"
    if not operands:
        return
    reads = " x ".join(map(str, operands))
    if len(given.inputs) > len(operands):
        raise TwofoldError(f"{asked}, {len(given.inputs)} entries; it reads {len(operands)}: {reads}")
    entries = [_parts(entry) for entry in given.inputs]
    for position, (parts, operand) in enumerate(zip(entries, operands, strict=False)):
        known = len(operand.sizes)
        if len(parts) < known or (len(parts) > known and not operand.is_open):
            least = "at least " if operand.is_open else ""
            raise TwofoldError(f"{asked}: entry {position} names {len(parts)} dims, input {operand} has {least}{known}")
        for dim, (count, size) in enumerate(zip(parts[len(parts) - known :], operand.sizes, strict=True)):
            if size is not None and size % count:
                raise TwofoldError(
                    f"{asked}: entry {position} cuts dim {len(parts) - known + dim} of input {operand} into {count} "
                    f"parts: {size} % {count} != 0; the number of parts must divide {size}"
                )
    if given.output is None or (made := _outputs(module, entries)) is None:
        return
    out = _parts(given.output)
    if len(out) != len(made[0]):
        raise TwofoldError(f"{asked}: out_strategy names {len(out)} dims, the output has {len(made[0])}; {_ways(made)}")
    if out not in made:
        raise TwofoldError(f"{asked}: out_strategy cuts the output into {out} parts; {_ways(made)}")


def _parts(entry: Entry) -> _Parts:
    return entry.split_counts if isinstance(entry, TensorLayout) else entry


def _ways(made: list[_Parts]) -> str:
    """The splits of the output that the operator supports, as text."""
    if len(made) == 1:
        return f"it can be {made[0]}"
    return f"it can be {made[0]} (reduced) or {made[1]} (reduce-scattered)"


def _form(module: nn.Module) -> Form | None:
    """The form of the operator that a module computes; None for a class, also a subclass, with a separate forward."""
    owner = next(each for each in type(module).__mro__ if "forward" in vars(each))
    form = _TORCH_FORMS.get(owner) or vars(owner).get("form")
    return form if isinstance(form, Form) else None


def _operands(module: nn.Module) -> tuple[_Operand, ...]:
    """The tensors that the operator of a known module reads, in order."""
    form = _form(module)
    if form is Form.ELEMENTWISE:
        return (_Operand(name="x", sizes=(), is_open=True),)
    if form in (Form.LAST_DIM, Form.FLATTEN):
        return (_Operand(name="x", sizes=(None,), is_open=True),)
    if form is Form.BROADCAST:
        return _Operand(name="x", sizes=(), is_open=True), _Operand(name="y", sizes=(), is_open=True)
    if form is Form.PRODUCT:
        return _Operand(name="x", sizes=(None,), is_open=True), _Operand(name="w", sizes=(None, None), is_open=True)
    parameters = tuple(
        _Operand(name=name, sizes=tuple(value.shape))
        for name in ("weight", "bias")
        if isinstance(value := getattr(module, name, None), nn.Parameter)
    )

    def first(*sizes: int | None) -> _Operand:
        return _Operand(name="x", sizes=sizes, is_open=True)

    if form is Form.LINEAR and isinstance(module, nn.Linear):
        return first(module.in_features), *parameters
    if form is Form.NORM and isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return first(*module.normalized_shape), *parameters
    if form is Form.EMBEDDING:
        return first(), *parameters
    if form is Form.CONVOLUTION and isinstance(module, nn.Conv2d):
        return _Operand(name="x", sizes=(None, module.in_channels, None, None)), *parameters
    return ()


def _outputs(module: nn.Module, entries: list[_Parts]) -> list[_Parts] | None:
    """The possible splits of the output; None if they depend on more than the entries."""
    form, x = _form(module), entries[0]
    if form in (Form.LINEAR, Form.PRODUCT):
        if form is Form.PRODUCT and len(entries) > 1 and len(entries[1]) != 2:
            return None  # batches of matrices
        columns = 1 if len(entries) < 2 else entries[1][0 if form is Form.LINEAR else 1]
        made, summed = (*x[:-1], columns), x[-1]
        if summed == 1 or len(made) < 2:
            return [made]
        return [made, (*made[:-2], made[-2] * summed, columns)]
    if form is Form.EMBEDDING:
        return None if len(entries) > 1 and entries[1][0] > 1 else [(*x, 1 if len(entries) < 2 else entries[1][1])]
    if form is Form.FLATTEN:
        return [(x[0], math.prod(x[1:]))]
    if form is Form.BROADCAST:
        if len(entries) < 2:
            return None
        rank = max(map(len, entries))
        aligned = [(1,) * (rank - len(entry)) + entry for entry in entries]
        return [tuple(max(pair) for pair in zip(*aligned, strict=True))]
    return None if form is Form.CONVOLUTION else [x]
