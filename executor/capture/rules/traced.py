"""Functions with a backward of their own as programs: their forward and backward traced with open sizes."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from executor.capture.rules.opaque import as_json
from executor.kernels.programs import NUMBER_CALLS, program
from plans.errors import TwofoldError
from plans.reading import json_of

__all__ = ["TENSOR", "Applied", "Traced", "as_list", "run_forward"]

TENSOR = object()


@dataclass(slots=True, eq=False)
class Applied:
    """A function and the arguments that it was applied to.

    Args:
        kind: the function.
        arguments: `TENSOR` is a placeholder for tensors.
        several: whether it returns a tuple; known once it has run.
    """

    kind: type[torch.autograd.Function]
    arguments: tuple[Any, ...]
    several: bool = False

    @property
    def name(self) -> str:
        """The class under the user's name."""
        return self.kind.__qualname__


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


def run_forward(given: Applied, tensors: Sequence[Tensor]) -> tuple[_Context, Any]:
    """The context that a function leaves, and its results."""
    waiting = list(tensors)
    arguments = [waiting.pop(0) if argument is TENSOR else argument for argument in given.arguments]
    context = _Context(arguments)
    kind: Any = given.kind
    if kind.setup_context is not torch.autograd.Function.setup_context:  # the form without ctx in the forward
        made = kind.forward(*arguments)
        kind.setup_context(context, tuple(arguments), made)
        return context, made
    return context, kind.forward(context, *arguments)


def as_list(made: Any) -> list[Any]:
    """The results of a function that may return one or several."""
    return list(made) if isinstance(made, tuple | list) else [made]


class Traced:
    """A function traced with open sizes.

    Args:
        given: the function.
        examples: tensors of the shapes and dtypes that it is applied to.
    """

    def __init__(self, given: Applied, examples: Sequence[Tensor]) -> None:
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
        return self._program(lambda *inputs: as_list(run_forward(self.given, inputs)[1]), self.inputs)

    def backward(self, which: int) -> str:
        """The backward for one result as a program: its gradient, inputs -> gradients of the inputs or None."""

        def run(g: Tensor, *inputs: Tensor) -> tuple[Any, ...]:
            return self._gradients({which: g}, inputs)

        return self._program(run, [self._like_result(which), *self.inputs])

    def alone(self, which: int, forward: str, backward: str) -> tuple[list[int], str, str] | None:
        """The inputs that one of several results depends on, and its forward and backward as programs of these; None
        where it depends on all."""
        every = list(range(len(self.inputs)))
        used = [at for at in every if at in _needed(forward, which, len(every))]
        if backward:
            g, *inputs = _drawn([self._like_result(which), *self.inputs])
            gradients = program(backward)(g.device, g, *inputs)
            used = [at for at in every if at in used or (gradients[at] is not None and bool(gradients[at].any()))]
        if used == every:
            return None

        def filled(given: Sequence[Tensor]) -> list[Tensor]:
            return [given[used.index(at)] if at in used else self.inputs[at] for at in every]

        own = [self.inputs[at] for at in used]
        try:
            forward = self._program(lambda *given: as_list(run_forward(self.given, filled(given))[1]), own, which)
            if backward:
                backward = self._program(
                    lambda g, *given: [self._gradients({which: g}, filled(given))[at] for at in used],
                    [self._like_result(which), *own],
                )
        except Exception:  # whatever reads an input that the result does not depend on, such as its shape
            return None
        return used, forward, backward

    def adds_up(self, backward: Mapping[int, str]) -> bool:
        """Whether the backward for several results is the sum of those for each, on random numbers."""
        inputs = _drawn(self.inputs)
        g = dict(zip(backward, _drawn([self._like_result(which) for which in backward]), strict=True))
        at_once = self._program(
            lambda *given: self._gradients(dict(zip(g, given, strict=False)), given[len(g) :]),
            [*(self._like_result(which) for which in g), *self.inputs],
        )
        device = inputs[0].device
        parts = [program(text)(device, g[which], *inputs) for which, text in backward.items()]
        whole = program(at_once)(device, *g.values(), *inputs)
        return all(
            torch.allclose(sum(each for each in own if each is not None), total, rtol=1e-9, atol=1e-12)
            for total, *own in zip(whole, *parts, strict=True) if total is not None
        )  # fmt: skip

    def _like_result(self, which: int) -> Tensor:
        with self.mode, torch.no_grad():
            return torch.empty_like(as_list(run_forward(self.given, self.inputs)[1])[which])

    def _gradients(self, g: Mapping[int, Tensor], inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        """The gradients of the inputs for those of some results."""
        context, made = run_forward(self.given, inputs)
        none = torch.zeros_like if context.materialize_grads else lambda _: None
        of_results = (g[at] if at in g else none(each) for at, each in enumerate(as_list(made)))
        found = as_list(self.given.kind.backward(context, *of_results))
        return tuple(each for each, of in zip(found, self.given.arguments, strict=False) if of is TENSOR)

    def _program(self, function: Callable[..., Any], inputs: Sequence[Tensor], only: int | None = None) -> str:
        """A function of tensors as a program of all its results or `only` one."""
        with self.mode, torch.no_grad():
            graph = make_fx(torch.func.functionalize(function, remove="mutations"))(*inputs).graph
        if only is not None:
            output = graph.output_node()
            output.args = ([as_list(output.args[0])[only]],)
        graph.eliminate_dead_code()
        return _written(graph)


def _drawn(likes: Sequence[Tensor]) -> list[Tensor]:
    """Random numbers in double precision, and ones in place of whole numbers."""
    generator = torch.Generator().manual_seed(3)
    shapes = [[int(size) for size in like.shape] for like in likes]
    return [
        torch.rand(shape, generator=generator, dtype=torch.float64)
        if like.is_floating_point()
        else torch.ones(shape, dtype=like.dtype)
        for like, shape in zip(likes, shapes, strict=True)
    ]


def _needed(text: str, which: int, first: int) -> set[int]:
    """The values of a program that one of its results depends on; those before `first` are its inputs."""
    written = json_of(text.encode(), "a program")
    waiting, needed = [written["results"][which]], set()
    while waiting:
        at = waiting.pop()
        if at is not None and at not in needed:
            needed.add(at)
            if at >= first:
                waiting += _tensors(written["calls"][at - first])
    return needed


def _tensors(argument: Any) -> Iterator[int]:
    if isinstance(argument, list):
        for each in argument:
            yield from _tensors(each)
    elif isinstance(argument, dict):
        if "tensor" in argument:
            yield argument["tensor"]
        for each in argument.values():
            yield from _tensors(each)


def _written(graph: fx.Graph) -> str:
    """A traced graph as JSON for `executor.kernels.programs`."""
    place: dict[fx.Node, int] = {}
    calls: list[Any] = []
    results: list[int | None] = []

    def written(argument: Any) -> Any:
        return {"tensor": place[argument]} if isinstance(argument, fx.Node) else as_json(argument, written)

    for node in graph.nodes:
        if node.op == "output":
            results = [None if each is None else place[each] for each in as_list(node.args[0])]
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
