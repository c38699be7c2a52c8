"""Capture of operators without a kind of their own: replicated, with a warning that names them.

An aten call that changes nothing in place and draws no random numbers is kept as it is, one "opaque" operator per
result that is read. A step cuts the batch into micro-batches, so the samples of a batch must not meet in it; nothing
about an unknown operator says so, hence it is tried out: when the first or the last sample changes, the results of the
others must not.
"""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import torch
from torch import fx

from executor.capture.translation import Translation, Unreadable, Value
from plans.operators.sources import MAX_OPAQUE_INPUTS

__all__ = ["opaque"]

_MOST_TRIED = 2**22
"""Elements; larger operators are not tried out."""


def opaque(build: Translation, node: fx.Node) -> Value:
    """Make opaque operators of a call.

    Raises:
        TwofoldError: no aten operator, or one that changes its inputs, draws random numbers or mixes samples.

    Warns:
        UserWarning: always, with the operator and where it is called.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        raise build.unknown(node)
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        raise build.unknown(node)
    read, arguments = _written(build, node)
    if len(read) > MAX_OPAQUE_INPUTS:
        raise build.refused(node, f"it reads {len(read)} tensors; opaque operators read at most {MAX_OPAQUE_INPUTS}")
    results = node.meta["val"]
    several = isinstance(results, tuple | list)
    _try_out(build, node, read, arguments)
    warnings.warn(
        f"{node.target} {build.where(node)} has no layouts of its own: every rank computes all of it, and its gradient "
        f"by autograd",
        stacklevel=2,
    )
    wanted = {user.args[1] for user in node.users} if several else {-1}
    attrs = {"target": str(target), "arguments": arguments}
    made: list[Value] = []
    for index, result in enumerate(results if several else [results]):
        which = index if several else -1
        if which not in wanted:
            made.append(Unreadable(reason=f"result {index} of {target}"))
            continue
        made.append(_make(build, node, read, result, attrs | {"result": which}))
    return tuple(made) if several else made[0]


def _written(build: Translation, node: fx.Node) -> tuple[list[str], str]:
    """The tensors that a call reads, and its arguments as JSON in which they are numbers of that list."""
    read: list[str] = []

    def written(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            name = build.plain(node, build.held(node, argument))
            if name not in read:
                read.append(name)
            return {"tensor": read.index(name)}
        if isinstance(argument, tuple | list):
            return [written(each) for each in argument]
        if isinstance(argument, torch.dtype | torch.layout | torch.memory_format):
            return {"torch": str(argument).removeprefix("torch.")}
        if isinstance(argument, torch.device):
            return {"device": True}
        if argument is None or isinstance(argument, bool | int | float | str):
            return argument
        raise build.refused(node, f"its argument {argument!r} cannot be written down")

    arguments = json.dumps([written(node.args), {key: written(value) for key, value in node.kwargs.items()}])
    return read, arguments


def _make(build: Translation, node: fx.Node, read: list[str], result: Any, attrs: dict[str, Any]) -> Value:
    """The opaque operator of one result of a call."""
    if not isinstance(result, torch.Tensor):
        raise build.refused(node, f"it makes {result!r}; operators make tensors")
    shape, dtype = build.shape_dtype_of(node, result)
    along = tuple(
        at for at, name in enumerate(read)
        if name in build.batched and shape and build.tensors[name].shape[:1] == shape[:1]
    )  # fmt: skip
    return build.make(
        node, "opaque", read, shape=shape, dtype=dtype, **attrs, batched=bool(along), batched_inputs=along
    )


def _try_out(build: Translation, node: fx.Node, read: list[str], arguments: str) -> None:
    """Refuse an operator in which samples meet, as far as random numbers show it."""
    from executor.kernels.sources import aten_call

    tensors = [build.tensors[name] for name in read]
    batched = [name in build.batched and len(tensor.shape) > 0 for name, tensor in zip(read, tensors, strict=True)]
    if not any(batched) or sum(math.prod(tensor.shape) for tensor in tensors) > _MOST_TRIED:
        return
    generator = torch.Generator().manual_seed(0)

    def random(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        numbers = torch.randn(shape, generator=generator)
        return numbers.to(getattr(torch, dtype)) if dtype.startswith(("float", "bfloat")) else numbers > 0

    inputs = [random(tensor.shape, tensor.dtype).to(getattr(torch, tensor.dtype)) for tensor in tensors]
    run = aten_call(str(node.target), arguments)
    for changed, others in ((0, slice(1, None)), (-1, slice(None, -1))):
        altered = [each.clone() for each in inputs]
        for each, tensor, varies in zip(altered, tensors, batched, strict=True):
            if varies:
                each[changed] = random(tensor.shape[1:], tensor.dtype).to(each.dtype)
        try:
            with torch.no_grad():
                made = [run(torch.device("cpu"), *given) for given in (inputs, altered)]
        except (RuntimeError, IndexError, ValueError, NotImplementedError):
            return  # made for other numbers than random ones
        before, after = (each if isinstance(each, tuple | list) else (each,) for each in made)
        for one, two in zip(before, after, strict=True):
            if one.dim() and not torch.equal(one[others].nan_to_num(), two[others].nan_to_num()):
                raise build.refused(
                    node,
                    "the samples of a batch meet in it, so that micro-batches would change the result; "
                    "work along other dims than the batch",
                )
