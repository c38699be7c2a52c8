"""Autograd functions with their own backward: each becomes one operator with the user's forward and gradient.

During export, `torch.autograd.Function.apply` leaves one call in the graph. Its forward and backward are then traced to
aten calls with symbolic sizes, so that a plan file contains all that a rank needs and no user code is imported. The
dims that can be split are found by experiment (`executor.capture.independence`).
"""

from __future__ import annotations

import contextlib
import json
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from executor.capture.independence import Call, Read, dims_of, samples_meet
from executor.capture.opaque import as_json
from executor.capture.table import rule
from executor.capture.translation import Translation
from executor.capture.values import Unreadable, Value
from executor.kernels.programs import NUMBER_CALLS
from plans.errors import TwofoldError
from plans.operators.sources import MAX_OPAQUE_INPUTS

__all__ = ["functions_as_calls"]

_LIBRARY = torch.library.Library("twofold", "FRAGMENT")
_LIBRARY.define("function(Tensor[] inputs, int number) -> Tensor[]")


_TENSOR = object()


@dataclass(slots=True, eq=False)
class _Applied:
    """A function and the arguments that it was applied to.

    Args:
        kind: the function.
        arguments: `_TENSOR` is a placeholder for tensors.
        several: whether it returns a tuple; known once it has run.
    """

    kind: type[torch.autograd.Function]
    arguments: tuple[Any, ...]
    several: bool = False

    @property
    def name(self) -> str:
        """The class under the user's name."""
        return self.kind.__qualname__


_APPLIED: list[_Applied] = []
"""What calls of `twofold::function` mean, by their number; equal ones share one."""


class _Context:
    """The `ctx` of a function."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self.saved_tensors: tuple[Any, ...] = ()
        self.needs_input_grad = tuple(
            isinstance(argument, Tensor) and argument.is_floating_point() for argument in arguments
        )
        self.materialize_grads = True

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep tensors for the backward."""
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """What is marked gets zeros as its gradient."""

    def set_materialize_grads(self, value: bool) -> None:
        """Whether results without a gradient get zeros."""
        self.materialize_grads = value

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Refuse a function that changes its inputs."""
        raise TwofoldError("an autograd function that changes its inputs in place is not supported; return new tensors")


@contextlib.contextmanager
def functions_as_calls() -> Iterator[None]:
    """Within this context, to apply an autograd function is one call of `twofold::function`."""

    def apply(kind: type[torch.autograd.Function], *arguments: Any) -> Any:
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        number = _number(
            _Applied(kind, tuple(_TENSOR if isinstance(argument, Tensor) else argument for argument in arguments))
        )
        results = torch.ops.twofold.function(tensors, number)
        return tuple(results) if _APPLIED[number].several else results[0]

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield


def _number(given: _Applied) -> int:
    for number, known in enumerate(_APPLIED):
        if known.kind is given.kind and repr(known.arguments) == repr(given.arguments):
            return number
    _APPLIED.append(given)
    return len(_APPLIED) - 1


def _forward(given: _Applied, tensors: Sequence[Tensor]) -> tuple[_Context, Any]:
    """The context that a function leaves, and its results."""
    waiting = list(tensors)
    arguments = [waiting.pop(0) if argument is _TENSOR else argument for argument in given.arguments]
    context = _Context(arguments)
    kind: Any = given.kind
    if kind.setup_context is not torch.autograd.Function.setup_context:  # the form without ctx in the forward
        made = kind.forward(*arguments)
        kind.setup_context(context, tuple(arguments), made)
        return context, made
    return context, kind.forward(context, *arguments)


def _as_list(made: Any) -> list[Any]:
    return list(made) if isinstance(made, tuple | list) else [made]


@torch.library.impl(_LIBRARY, "function", "CompositeExplicitAutograd")
def _shapes_of_function(inputs: Sequence[Tensor], number: int) -> list[Tensor]:
    with torch.no_grad():
        made = _forward(_APPLIED[number], inputs)[1]
    _APPLIED[number].several = isinstance(made, tuple)
    return [torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in _as_list(made)]


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
        traced = _Traced(given, [each.meta["val"] for each in node.args[0]])  # type: ignore[union-attr]
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
    wanted = {user.args[1] for user in node.users if user.users}
    made: list[Value] = []
    for which, result in enumerate(node.meta["val"]):
        if which not in wanted:
            made.append(Unreadable(reason=f"result {which} of {given.name}"))
            continue
        made.append(_operator(build, node, traced, call, read, which, result, alone=len(wanted) == 1))
    return tuple(made)


def _operator(
    build: Translation, node: fx.Node, traced: _Traced, call: Call, read: Sequence[str], which: int, result: Tensor,
    *, alone: bool,
) -> str:  # fmt: skip
    shape, dtype = build.shape_dtype_of(node, result)
    name = traced.given.name
    backward = ""
    if result.is_floating_point() and any(build.is_trained(each) for each in read):
        if not alone:
            raise build.refused(node, f"several results of the autograd function {name} are read; return one of them")
        try:
            backward = traced.backward(which)
        except Exception as error:  # whatever the user's backward or torch raises
            raise build.refused(
                node, f"the backward of {name} cannot be traced ({type(error).__name__}: {error}); write it with "
                f"torch's operators"
            ) from error  # fmt: skip
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


class _Traced:
    """A function traced with open sizes.

    Args:
        given: the function.
        examples: tensors of the shapes and dtypes that it is applied to.
    """

    def __init__(self, given: _Applied, examples: Sequence[Tensor]) -> None:
        self.given = given
        self.mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False))
        self.inputs = [self._open(example.shape, example.dtype) for example in examples]

    def _open(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        count = len(shape)
        sizes: Any = StatelessSymbolicContext(
            dynamic_sizes=[DimDynamic.DYNAMIC] * count, constraint_sizes=[None] * count
        )
        return self.mode.from_tensor(torch.empty(shape, dtype=dtype, device="cpu"), symbolic_context=sizes)

    def forward(self) -> str:
        """The forward as a program: inputs -> results."""
        return self._program(lambda *inputs: _as_list(_forward(self.given, inputs)[1]), self.inputs)

    def backward(self, which: int) -> str:
        """The backward for one result as a program: its gradient, inputs -> gradients of the inputs or None."""
        with self.mode, torch.no_grad():
            gradient = torch.empty_like(_as_list(_forward(self.given, self.inputs)[1])[which])

        def run(g: Tensor, *inputs: Tensor) -> tuple[Any, ...]:
            context, made = _forward(self.given, inputs)
            none = torch.zeros_like if context.materialize_grads else lambda _: None
            found = self.given.kind.backward(
                context, *(g if at == which else none(each) for at, each in enumerate(_as_list(made)))
            )
            kept = _as_list(found)
            return tuple(each for each, of in zip(kept, self.given.arguments, strict=False) if of is _TENSOR)

        return self._program(run, [gradient, *self.inputs])

    def _program(self, function: Callable[..., Any], inputs: Sequence[Tensor]) -> str:
        with self.mode, torch.no_grad():
            graph = make_fx(torch.func.functionalize(function, remove="mutations"))(*inputs).graph
        graph.eliminate_dead_code()
        return _written(graph)


def _written(graph: fx.Graph) -> str:
    """A traced graph as JSON for `executor.kernels.programs`."""
    place: dict[fx.Node, int] = {}
    calls: list[Any] = []
    results: list[int | None] = []

    def written(argument: Any) -> Any:
        return {"tensor": place[argument]} if isinstance(argument, fx.Node) else as_json(argument, written)

    for node in graph.nodes:
        if node.op == "output":
            results = [None if each is None else place[each] for each in _as_list(node.args[0])]
            continue
        place[node] = len(place)
        if node.op == "placeholder":
            continue
        if node.op != "call_function":
            raise TwofoldError("it reads a tensor that is not given to it; pass it as an argument")
        if isinstance(node.target, torch._ops.OpOverload):
            if node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags:
                raise TwofoldError(f"{node.target} changes its input or draws random numbers")
            name = str(node.target)
        elif node.target is operator.getitem:
            name = "getitem"
        else:
            name = f"number.{getattr(node.target, '__name__', node.target)}"
            if name.removeprefix("number.") not in NUMBER_CALLS:
                raise TwofoldError(f"{node.target} is not supported in an autograd function")
        calls.append([name, [written(list(node.args)), written(dict(node.kwargs))]])
    return json.dumps({"calls": calls, "results": results})
