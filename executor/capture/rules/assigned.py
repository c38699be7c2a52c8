"""Capture of buffers that the forward changes, such as running means, counters and codebooks of moving averages."""

from __future__ import annotations

from torch import fx

from executor.capture.rules.table import rule
from executor.capture.translation import Translation
from executor.capture.values import Value

__all__: list[str] = []


@rule("twofold.assign.default")
def _assign(build: Translation, node: fx.Node, state: Value, value: Value) -> Value:
    name = str(build.values[node.all_input_nodes[0]])  # under no_grad, `state` is a detached parameter
    if build.is_counted_by_norm(name):
        return name
    if name not in build.changed:
        raise build.refused(
            node, f"the forward changes the parameter {name!r}, which the optimizer trains; change a buffer instead "
            "(self.register_buffer), or change the parameter between steps"
        )  # fmt: skip
    made = build.plain(node, value)
    if made in build.batched:
        raise build.refused(
            node, f"the forward keeps values of single samples in the buffer {build.changed[name]!r}; keep a mean or a "
            "sum over the samples, since every rank holds the whole buffer and only a part of the samples"
        )  # fmt: skip
    made = build.cast(node, made, build.tensors[name].dtype)
    shape = build.tensors[name].shape
    if build.is_trained(made):
        made = build.make_as(node, "detach", made)
    result = build.make(node, "assign", (build.changed[name], made), shape=shape, dtype=build.tensors[name].dtype)
    build.shared.discard(result)  # as statistics of a batch norm, it is of the micro-batch on purpose
    return result
