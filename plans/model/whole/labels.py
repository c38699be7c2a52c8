"""Labels that the model shifts itself: the label of a token is the next token, and the last token has none.

Such a model pads the labels and drops the first one, or drops the last logits and the first label. Both equal the loss
of all logits with labels shifted by one in the data, where the last label is ignored (`Graph.later`).
"""

from __future__ import annotations

from msgspec import structs

from plans.model.graph import Graph, Operator, Tensor
from plans.reading import json_of

__all__ = ["with_later_labels"]

_IGNORED = -100


def with_later_labels(graph: Graph) -> Graph:
    """The graph with labels that are fed one place later, if the model shifts them; else the graph itself."""
    loss = graph.producers()[graph.loss]
    if loss.kind != "cross_entropy":
        return graph
    cut = _cut(graph, loss.inputs[1], first=1)
    if cut is None:
        return graph
    padded = graph.producers().get(cut.inputs[0])
    name = cut.inputs[0] if padded is None else padded.inputs[0] if _is_padded(padded) else ""
    labels = graph.tensors.get(name)
    if labels is None or labels.kind != "input" or len(labels.shape) != 2 or len(graph.consumers()[name]) > 1:
        return graph
    dropped = {cut.name, *(() if padded is None else (padded.name,))}
    logits = loss.inputs[0]
    if padded is None:
        chosen = _cut(graph, logits, first=0)
        if chosen is None or len(graph.consumers()[logits]) > 1 or len(loss.inputs) > 2:
            return graph
        logits = chosen.inputs[0]
        dropped.add(chosen.name)
    if len(loss.inputs) > 2 and graph.producers()[loss.inputs[2]].inputs != cut.outputs:
        return graph  # it counts other labels
    if graph.tensors[logits].shape[:2] != labels.shape or loss.attrs.get("ignore_index", _IGNORED) != _IGNORED:
        return graph
    return _rewired(graph, loss, logits, labels, dropped)


def _cut(graph: Graph, name: str, *, first: int) -> Operator | None:
    """The operators that leave out one element of dim 1: the one before `first`, or the last one."""
    cut = graph.producers().get(name)
    if cut is None or cut.kind != "narrow" or cut.attrs["dim"] != 1 or cut.attrs.get("step", 1) != 1:
        return None
    whole, part = graph.tensors[cut.inputs[0]].shape, graph.tensors[name].shape
    return cut if cut.attrs["start"] == first and part[1] == whole[1] - 1 else None


def _is_padded(operator: Operator) -> bool:
    """Whether an operator adds one ignored label behind the last."""
    if operator.kind != "opaque" or operator.attrs.get("target") != "aten.pad.default":
        return False
    read, named = json_of(str(operator.attrs["arguments"]).encode(), f"the arguments of {operator.name!r}")
    return read == [{"tensor": 0}, [0, 1], "constant", _IGNORED] and not named


def _rewired(graph: Graph, loss: Operator, logits: str, labels: Tensor, dropped: set[str]) -> Graph:
    tensors = dict(graph.tensors)
    operators = [operator for operator in graph.operators if operator.name not in dropped and operator is not loss]
    if len(loss.inputs) > 2:
        count = graph.producers()[loss.inputs[2]]
        at = operators.index(count)
        operators[at] = structs.replace(count, inputs=(labels.name,))
        counted = count.outputs[0]
    else:
        counted = f"{loss.name}.count.out"
        count = Operator(
            name=f"{loss.name}.count", kind="count_labels", inputs=(labels.name,), outputs=(counted,),
            attrs={"ignore_index": _IGNORED}, module=loss.module,
        )  # fmt: skip
        tensors[counted] = Tensor(name=counted, shape=(), dtype="float32")
        operators.append(count)
    attrs = {**loss.attrs, "ignore_index": _IGNORED}
    operators.append(structs.replace(loss, inputs=(logits, labels.name, counted), attrs=attrs))
    read = {name for operator in operators for name in (*operator.inputs, *operator.outputs)}
    kept = {name: tensor for name, tensor in tensors.items() if name in read or tensor.kind == "input"}
    later = {**graph.later, labels.name: _IGNORED}
    names = {operator.name for operator in operators}
    recompute = tuple(name for name in graph.recompute if name in names)
    return structs.replace(graph, tensors=kept, operators=tuple(operators), later=later, recompute=recompute)
