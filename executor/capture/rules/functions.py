"""Autograd functions with their own backward: each becomes one operator with the user's forward and gradient.

During export, `torch.autograd.Function.apply` leaves one call in the graph. Its forward and backward are then traced to
aten calls with symbolic sizes, so that a plan file contains all that a rank needs and no user code is imported. The
dims that can be split are found by experiment (`executor.capture.rules.independence`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

from executor.capture.rules.independence import Call, Read, dims_of, samples_meet
from executor.capture.rules.table import rule
from executor.capture.rules.traced import TENSOR, Applied, Traced, as_list, run_forward
from executor.capture.translation import Translation
from executor.capture.values import Unreadable, Value
from plans.errors import TwofoldError
from plans.operators.sources import MAX_OPAQUE_INPUTS

__all__ = ["functions_as_calls"]

_LIBRARY = torch.library.Library("twofold", "FRAGMENT")
_LIBRARY.define("function(Tensor[] inputs, int number) -> Tensor[]")


_APPLIED: list[Applied] = []
"""What calls of `twofold::function` mean, by their number; equal ones share one."""


@contextlib.contextmanager
def functions_as_calls() -> Iterator[None]:
    """Within this context, to apply an autograd function is one call of `twofold::function`."""

    def apply(kind: type[torch.autograd.Function], *arguments: Any) -> Any:
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        number = _number(
            Applied(kind, tuple(TENSOR if isinstance(argument, Tensor) else argument for argument in arguments))
        )
        results = torch.ops.twofold.function(tensors, number)
        return tuple(results) if _APPLIED[number].several else results[0]

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield


def _number(given: Applied) -> int:
    for number, known in enumerate(_APPLIED):
        if known.kind is given.kind and repr(known.arguments) == repr(given.arguments):
            return number
    _APPLIED.append(given)
    return len(_APPLIED) - 1


@torch.library.impl(_LIBRARY, "function", "CompositeExplicitAutograd")
def _shapes_of_function(inputs: Sequence[Tensor], number: int) -> list[Tensor]:
    with torch.no_grad():
        made = run_forward(_APPLIED[number], inputs)[1]
    _APPLIED[number].several = isinstance(made, tuple)
    return [torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in as_list(made)]


# -- the operators -----------------------------------------------------------------------------------------------------


@rule("twofold.function.default")
def _function(build: Translation, node: fx.Node, inputs: Sequence[Value], number: int) -> Value:
    """One operator for each result that is read."""
    given, read = _APPLIED[number], [build.plain(node, each) for each in inputs]
    if len(read) > MAX_OPAQUE_INPUTS:
        raise build.refused(node, f"{given.name} reads {len(read)} tensors; at most {MAX_OPAQUE_INPUTS} are supported")
    reads = tuple(
        Read(shape=build.tensors[name].shape, dtype=build.tensors[name].dtype, batch=build.batched.get(name))
        for name in read
    )
    try:
        traced = Traced(given, [each.meta["val"] for each in node.args[0]])  # type: ignore[union-attr]
        forward = traced.forward()
    except TwofoldError as error:
        raise build.refused(node, f"{given.name}: {error}") from None
    except Exception as error:  # whatever the user's function or torch raises
        raise build.refused(
            node, f"the autograd function {given.name} cannot be traced ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no message'}); write it with torch's operators"
        ) from error  # fmt: skip
    call = Call(target="", arguments=forward, inputs=reads)
    if samples_meet(call):
        raise build.refused(node, f"the samples of a batch meet in {given.name}; compute each sample by itself")
    results = node.meta["val"]
    wanted: set[Any] = {user.args[1] for user in node.users if user.users}
    backward = {}
    if any(build.is_trained(each) for each in read):
        backward = _backward(build, node, traced, [which for which in wanted if results[which].is_floating_point()])
    return tuple(
        _operator(build, node, traced, call, read, which, result, backward.get(which, ""))
        if which in wanted
        else Unreadable(reason=f"result {which} of {given.name}")
        for which, result in enumerate(results)
    )


def _backward(build: Translation, node: fx.Node, traced: Traced, wanted: Sequence[int]) -> dict[int, str]:
    """The backward of every result that is read, as a program."""
    try:
        backward = {which: traced.backward(which) for which in wanted}
        is_sum = len(wanted) < 2 or traced.adds_up(backward)
    except Exception as error:  # whatever the user's backward or torch raises
        raise build.refused(
            node, f"the backward of {traced.given.name} cannot be traced ({type(error).__name__}: {error}); write it "
            f"with torch's operators"
        ) from error  # fmt: skip
    if not is_sum:
        raise build.refused(
            node, f"{len(wanted)} results of the autograd function {traced.given.name} are read, and its gradients are "
            f"not sums of a gradient for each result; return one result"
        )  # fmt: skip
    return backward


def _operator(
    build: Translation, node: fx.Node, traced: Traced, call: Call, read: Sequence[str], which: int, result: Tensor,
    backward: str,
) -> str:  # fmt: skip
    shape, dtype = build.shape_dtype_of(node, result)
    name = traced.given.name
    if (alone := traced.alone(which, call.arguments, backward)) is not None:
        used, forward, backward = alone
        read, which = [read[at] for at in used], 0
        call = Call(target="", arguments=forward, inputs=tuple(call.inputs[at] for at in used))
    dims = dims_of(call, which, shape, backward)
    if backward and not _splits_batch(call, dims):
        raise build.refused(
            node, f"the samples of a batch meet in the backward of {name}, so that micro-batches would change it"
        )
    if not any(dim.islower() for dim in dims):
        warnings.warn(
            f"the autograd function {name} {build.where(node)} cannot be split: every rank computes all of it",
            stacklevel=2,
        )
    attrs: dict[str, Any] = {"name": name, "forward": call.arguments, "result": which, "dims": dims}
    if backward:
        attrs["backward"] = backward
    return build.make(node, "function", read, shape=shape, dtype=dtype, **attrs)


def _splits_batch(call: Call, dims: str) -> bool:
    """Whether the batch is a dim that can be split, in every input that has it."""
    letters = dims.partition("->")[0].split(",")
    pairs = zip(letters, call.inputs, strict=True)
    return all(pair.batch is None or own[pair.batch].islower() for own, pair in pairs)
