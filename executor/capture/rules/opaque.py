"""Capture of operators that twofold does not declare, with dims found by experiment.

An aten call without in-place changes and random numbers becomes one "opaque" operator for each result that is read.
`executor.capture.rules.independence` finds its named dims. If it finds none, every rank computes the full operator, and
a warning is printed.
"""

from __future__ import annotations

import json
import math
import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from executor.capture.building import NUMBER_OF_A_TENSOR
from executor.capture.calls.masks import calls_of, value_of
from executor.capture.rules.independence import Call, Read, dims_of, samples_meet
from executor.capture.translation import Translation
from executor.capture.values import Complex, Unreadable, Value
from executor.kernels.sources import computed_value
from plans.operators.sources import MAX_OPAQUE_INPUTS

__all__ = ["UnwritableError", "as_json", "aten_operators", "computed", "opaque"]


class UnwritableError(ValueError):
    """An argument of a call that cannot be written as JSON."""


def opaque(build: Translation, node: fx.Node) -> Value:
    """Make opaque operators of a call.

    Raises:
        TwofoldError: no aten operator, or one that changes its inputs, draws random numbers or mixes samples.

    Warns:
        UserWarning: none of its dims can be split; with the operator and where it is called.
    """
    target = node.target
    if node in build.shape_only:
        raise build.refused(node, "what follows from shapes alone is `computed` where it is read")
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        raise build.unknown(node)
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        raise build.unknown(node)
    return aten_operators(build, node, tuple(node.args), dict(node.kwargs), node.meta["val"])


def aten_operators(
    build: Translation, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any, target: str = "",
    place: int | None = None,
) -> Value:  # fmt: skip
    """The opaque operators of the aten operator that a node calls, given these arguments.

    Args:
        results: its result or results, on the meta device.
        target, place: another operator than the one that the node calls, and the dim of its result that is the batch.
    """
    read, arguments = _written(build, node, args, kwargs)
    if len(read) > MAX_OPAQUE_INPUTS:
        raise build.refused(node, f"it reads {len(read)} tensors; opaque operators read at most {MAX_OPAQUE_INPUTS}")
    several = isinstance(results, tuple | list)
    tensors = tuple(
        Read(shape=build.tensors[name].shape, dtype=build.tensors[name].dtype,
             batch=build.batched.get(name) if build.tensors[name].shape else None)
        for name in read
    )  # fmt: skip
    call = Call(target=target or str(node.target), arguments=arguments, inputs=tensors)
    places = [place] if target else _places(build, node, len(results) if several else 0)
    if samples_meet(call, places):
        raise build.refused(
            node,
            "it combines samples of a batch, so micro-batches would change the result; work along other dims than "
            "the batch, or pass what a sample is compared with as a separate input, such as negatives of [batch, "
            "negatives, ...]",
        )
    wanted = {user.args[1] for user in node.users} if several else {-1}
    made: list[Value] = []
    for index, result in enumerate(results if several else [results]):
        which = index if several else -1
        if which not in wanted:
            made.append(Unreadable(reason=f"result {index} of {node.target}"))
            continue
        if not isinstance(result, torch.Tensor):
            raise build.refused(node, NUMBER_OF_A_TENSOR)
        shape, dtype = build.shape_dtype_of(node, result)
        shape = (*shape, 2) if result.is_complex() else shape
        dims = dims_of(call, which, shape, place=places[index])
        is_small = not any(tensor.batch is not None or len(tensor.shape) > 1 for tensor in tensors)
        if not is_small and not any(dim.islower() for dim in dims):
            warnings.warn(
                f"{node.target} {build.where(node)} cannot be split: every rank computes all of it, and its "
                f"gradient with autograd",
                stacklevel=2,
            )
        attrs: dict[str, Any] = {"target": call.target, "arguments": arguments, "result": which, "dims": dims}
        if not target and (depth := _depth(node, args, kwargs, result)):
            attrs["depth"] = depth
        name = build.make(node, "opaque", read, shape=shape, dtype=dtype, **attrs)
        made.append(build.as_complex(node, name) if result.is_complex() else name)
    return tuple(made) if several else made[0]


def _depth(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> int:
    """The products that a call sums for an element of its result, in the matrix products that torch counts."""
    read = fx.map_arg((args, kwargs), lambda each: torch.empty_like(each.meta["val"], device="meta"))
    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        node.target(*read[0], **read[1])  # type: ignore[operator]
    return counter.get_total_flops() // (2 * result.numel())


def _places(build: Translation, node: fx.Node, count: int) -> list[int | None]:
    """The dim of each result of a call that is the batch, where that is known; a count of 0 is one that is no tuple."""
    if not count:
        return [build.grown.get(node.name)]
    named = {user.args[1]: user.name for user in node.users}
    return [build.grown.get(named.get(which, "")) for which in range(count)]


def computed(build: Translation, node: fx.Node) -> Value:
    """Make the operator of a value that follows from shapes alone; where it follows the batch, all samples share it.

    Raises:
        TwofoldError: it is no such value: it differs between samples.
    """
    calls, arguments = calls_of(node)
    place = {call: index for index, call in enumerate(calls)}

    def written(argument: Any) -> Any:
        return {"tensor": place[argument]} if isinstance(argument, fx.Node) else as_json(argument, written)

    entries = [["getitem" if call.target is operator.getitem else str(call.target), written(list(arguments[call]))]
            for call in calls]  # fmt: skip
    attrs = {"calls": json.dumps(entries)}
    shape, dtype = build.shape_dtype(node)
    whole, one = value_of(node), computed_value(attrs["calls"], torch.device("cpu"))
    if whole is not None and one.shape[:1] != (1,) and one.shape != whole.shape and _is_tiled(one, whole):
        return _over_samples(build, node, one, attrs)
    if whole is None or not _is_repeated(one, whole):
        raise build.refused(
            node, "it depends on the position of a sample in the batch, which micro-batches change; a loss that "
            "compares samples, such as a contrastive one, needs what each is compared with as a separate input, such "
            "as negatives of [batch, negatives, ...]"
        )  # fmt: skip
    if one.is_complex():
        if one.shape != whole.shape:
            raise build.refused(node, "it makes complex numbers for every sample; make real ones")
        attrs["calls"] = json.dumps([*entries, ["aten.view_as_real.default", [[{"tensor": len(entries) - 1}], {}]]])
        return build.as_complex(node, build.make(node, "computed", (), shape=(*one.shape, 2), dtype=dtype, **attrs))
    shared = _counted(build, node, one, dtype)
    if shared is None:
        shared = build.make(node, "computed", (), shape=tuple(one.shape), dtype=dtype, **attrs)
    if one.shape == whole.shape:
        return shared
    zeros = build.like_batch(node, (shape[0], *(1,) * (len(shape) - 1)), dtype, False if dtype == "bool" else 0)
    return build.make(node, "logical_or" if dtype == "bool" else "add", (zeros, shared))


def _is_tiled(one: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a value repeats that of one sample for every sample along dim 0."""
    fits = one.dim() == whole.dim() > 0 and one.shape[1:] == whole.shape[1:] and whole.shape[0] % one.shape[0] == 0
    return fits and torch.equal(whole, one.repeat(whole.shape[0] // one.shape[0], *(1,) * (one.dim() - 1)))


def _over_samples(build: Translation, node: fx.Node, one: torch.Tensor, attrs: dict[str, Any]) -> str:
    """The rows of one sample repeated for every sample, flattened: a bias [batch x heads, queries, keys]."""
    shape, dtype = build.shape_dtype(node)
    shared = build.make(node, "computed", (), shape=tuple(one.shape), dtype=dtype, **attrs)
    zeros = build.like_batch(node, (build.batch_size, *(1,) * one.dim()), dtype, False if dtype == "bool" else 0)
    kind = "logical_or" if dtype == "bool" else "add"
    every = build.make(node, kind, (zeros, shared), shape=(build.batch_size, *one.shape), dtype=dtype)
    return build.reshaped(node, every, shape)


def _is_repeated(one: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a value consists of repetitions of another one."""
    pairs = zip(reversed(one.shape), reversed(whole.shape), strict=False)
    fits = one.dim() <= whole.dim() and all(own in (1, size) for own, size in pairs)
    return fits and torch.equal(one.expand(whole.shape), whole)


def _counted(build: Translation, node: fx.Node, value: torch.Tensor, dtype: str) -> str | None:
    """An operator that computes the value if it is start, start + step, start + 2 step, ..."""
    flat = value.flatten()
    if dtype != "int64" or flat.numel() < 2 or value.shape[-1] != flat.numel():
        return None
    start, step = int(flat[0]), int(flat[1] - flat[0])
    if step < 1 or not torch.equal(flat, torch.arange(flat.numel()) * step + start):
        return None
    count = build.make(node, "arange", (), shape=tuple(flat.shape), dtype=dtype, start=start, step=step)
    return build.reshaped(node, count, tuple(value.shape))


def _written(build: Translation, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[str], str]:
    """The tensors that a call reads, and its arguments as JSON in which they are numbers of that list."""
    read: list[str] = []

    def written(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            value = build.held(node, argument)
            is_complex = isinstance(value, Complex)
            name = build.as_real(node, value) if isinstance(value, Complex) else build.plain(node, value)
            if name not in read:
                read.append(name)
            return {"tensor": read.index(name)} | ({"complex": True} if is_complex else {})
        return as_json(argument, written)

    try:
        return read, json.dumps([written(args), as_json(kwargs, written)])
    except UnwritableError as error:
        raise build.refused(node, str(error)) from None


def as_json(argument: Any, written: Callable[[Any], Any]) -> Any:
    """An argument that is not a tensor, in the form that `executor.kernels.programs` reads.

    Args:
        argument: of a call.
        written: writes its elements.

    Raises:
        UnwritableError: an argument of another kind.
    """
    if isinstance(argument, tuple | list):
        return [written(each) for each in argument]
    if isinstance(argument, dict):
        return {key: written(value) for key, value in argument.items()}
    if isinstance(argument, torch.dtype | torch.layout | torch.memory_format):
        return {"torch": str(argument).removeprefix("torch.")}
    if isinstance(argument, torch.device):
        return {"device": True}
    if isinstance(argument, complex) or (isinstance(argument, float) and not math.isfinite(argument)):
        return {"number": str(argument)}  # JSON has no complex and no infinite numbers
    if argument is None or isinstance(argument, bool | int | float | str):
        return argument
    raise UnwritableError(f"the argument {argument!r} cannot be written into a plan")
