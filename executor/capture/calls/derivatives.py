"""Derivatives that a forward computes itself, as in gradient penalties, energies and physics-informed networks.

While a module is exported, `torch.autograd.grad` leaves one call in the graph. The calls between its inputs and its
outputs are then differentiated, and the aten calls of their backward take its place, so that they have gradients too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx

from executor.capture.calls.functional import called_as, copied, on_meta
from executor.capture.calls.straight import NO_GRADIENT
from plans.errors import TwofoldError

__all__ = ["derivatives_as_calls", "write_derivatives"]

_LIBRARY = torch.library.Library("twofold", "FRAGMENT")
_LIBRARY.define("grad(Tensor[] outputs, Tensor[] inputs, Tensor[] seeds, bool create) -> Tensor[]")

aten = torch.ops.aten


@torch.library.impl(_LIBRARY, "grad", "CompositeExplicitAutograd")
def _shapes_of_grad(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], seeds: Sequence[Tensor], create: bool
) -> list[Tensor]:
    return [torch.empty_like(each) for each in inputs]


@contextlib.contextmanager
def derivatives_as_calls() -> Iterator[None]:
    """Within this context, `torch.autograd.grad` is one call of `twofold::grad`."""

    def grad(
        outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: bool | None = None,
        create_graph: bool = False, allow_unused: bool | None = None, is_grads_batched: bool = False,
        materialize_grads: bool = False,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        if is_grads_batched or torch._C._functorch.maybe_current_level() is not None:
            raise TwofoldError(
                "the forward uses torch.func or batched derivatives; use torch.autograd.grad, one at a time"
            )
        made = _listed(outputs)
        given = [None] * len(made) if grad_outputs is None else _listed(grad_outputs)
        seeds = [torch.ones_like(one) if seed is None else seed for one, seed in zip(made, given, strict=True)]
        return tuple(torch.ops.twofold.grad(made, _listed(inputs), seeds, create_graph))

    with mock.patch.object(torch.autograd, "grad", grad):
        yield


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, tuple | list) else [given]


def write_derivatives(exported: ExportedProgram) -> None:
    """Replace calls of `twofold::grad` by the calls of the backward, in place.

    Raises:
        TwofoldError: an output that does not depend on an input, or a call on the way that has no derivative.
    """
    graph = exported.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.twofold.grad.default):
        results = _written(graph, node)
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)


def _written(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """Insert the derivatives that a call represents before the call."""
    outputs, inputs, seeds, create = node.args
    assert isinstance(outputs, list) and isinstance(inputs, list) and isinstance(seeds, list)
    between = _between(graph, inputs, outputs)
    outside = {read: None for each in between for read in each.all_input_nodes}
    others = [each for each in outside if each not in between and each not in inputs]

    def backward(seeds: list[Tensor], values: list[Tensor], held: list[Any]) -> Any:
        def forward(*given: Tensor) -> list[Tensor]:
            known = dict(zip((*inputs, *others), (*given, *held), strict=True))
            for each in between:
                args, kwargs = fx.map_arg((each.args, each.kwargs), lambda read: known[read])
                call: Any = _IN_PARTS.get(each.target, each.target)
                known[each] = call(*args, **kwargs)
            return [known[each] for each in outputs]

        return torch.func.vjp(forward, *values)[1](seeds)

    read = [*seeds, *inputs, *others]
    try:
        with torch.device("meta"):
            traced = make_fx(torch.func.functionalize(backward))(*(on_meta(nodes) for nodes in (seeds, inputs, others)))
    except Exception as error:  # whatever torch raises
        raise TwofoldError(
            f"the derivative that the forward takes with torch.autograd.grad cannot be written with operators: "
            f"{type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error
    for each in traced.graph.find_nodes(op="call_function", target=aten.detach.default):
        each.replace_all_uses_with(each.args[0])  # autograd's own, of what it keeps: derivatives go through it
    traced.graph.eliminate_dead_code()
    with graph.inserting_before(node):
        results = copied(graph, node, traced.graph, read)
        return results if create else [called_as(graph, node, aten.detach.default, (each,)) for each in results]


def _cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """The cross entropy in operators whose derivatives keep the samples apart, for labels without weights; torch's
    counts the labels of all samples in one number."""
    if weight is not None or label_smoothing or target.is_floating_point() or x.dim() < 2:
        return F.cross_entropy(
            x, target, weight, ignore_index=ignore_index, reduction=("none", "mean", "sum")[reduction],
            label_smoothing=label_smoothing,
        )  # fmt: skip
    counts = target != ignore_index
    chosen = target.masked_fill(~counts, 0).unsqueeze(1)
    losses = -x.log_softmax(1).gather(1, chosen).squeeze(1) * counts
    if reduction == 1:
        return losses.mean() if ignore_index == -100 else losses.sum() / counts.sum()
    return losses.sum() if reduction == 2 else losses


_IN_PARTS: dict[Any, Any] = {aten.cross_entropy_loss.default: _cross_entropy}


def _between(graph: fx.Graph, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> list[fx.Node]:
    """The calls that depend on the inputs, and that the outputs depend on, in order."""
    below = set(inputs)
    for each in graph.nodes:
        stops = each.target is aten.detach.default or NO_GRADIENT in each.meta
        if not stops and any(read in below for read in each.all_input_nodes):
            below.add(each)
    above, waiting = set(outputs), list(outputs)
    while waiting:
        new = [read for read in waiting.pop().all_input_nodes if read in below and read not in above]
        above.update(new)
        waiting += [each for each in new if each not in inputs]
    if not all(each in above for each in inputs) or not all(each in below for each in outputs):
        raise TwofoldError(
            "the forward calls torch.autograd.grad for an output that does not depend on the input; remove the call"
        )
    return [each for each in graph.nodes if each in above and each in below and each not in inputs]
