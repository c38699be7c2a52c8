"""Additional results of an operator: a statistic that is gathered over shards, and values kept for gradients.

They are computed in float32 for half-precision inputs, because sums of exponentials and of squares need it.
"""

from __future__ import annotations

from collections.abc import Sequence

from plans.layout import Layout, TensorLayout
from plans.lower.emit import Emitter, value_name
from plans.model.graph import Operator, itemsize
from plans.operators import Assignment, OperatorSpec
from plans.program import Value

__all__ = ["gather_statistic", "kept_values"]


def _wide(dtype: str) -> str:
    return "float32" if itemsize(dtype) < 4 else dtype


def kept_values(
    emitter: Emitter, operator: Operator, spec: OperatorSpec, mesh: Layout, assignment: Assignment, dtype: str
) -> tuple[str, ...]:
    """Enter the values that the forward keeps for the gradients; `dtype` is that of the first input."""
    return tuple(
        emitter.table.add(
            Value(
                name=value_name(f"{operator.name}.kept{index}", layout, emitter.mesh), shape=layout.local_shape(shape),
                dtype=_wide(dtype),
            )
        )
        for index, (layout, shape) in enumerate(spec.kept_layouts(mesh, assignment))
    )  # fmt: skip


def gather_statistic(
    emitter: Emitter,
    operator: Operator,
    spec: OperatorSpec,
    mesh: Layout,
    assignment: Assignment,
    inputs: Sequence[str],
) -> str | None:
    """Write the instructions that gather the rows of a statistic on every shard, and return the value that holds them.

    None where the operator has no statistic or its dim is whole.
    """
    source = spec.statistic_layout(mesh, assignment)
    if source is None:
        return None
    shape = spec.statistic_shape(mesh, assignment)
    target = TensorLayout(mesh=mesh, dims=((), *source.dims[1:]))
    dtype = emitter.table[inputs[0]].dtype
    name = f"{operator.name}.statistic"
    own = emitter.table.add(
        Value(
            name=value_name(name, source, emitter.mesh),
            shape=source.local_shape(shape),
            dtype=_wide(dtype),
        )
    )
    emitter.compute(
        name, f"{operator.kind}.statistic", "F", tuple(inputs), (own,), operator=operator.name, mesh=mesh,
        attrs=dict(operator.attrs) | spec.local_attrs(assignment),
        flops=spec.flops // spec.local_fraction(mesh, assignment),
    )  # fmt: skip
    return emitter.move(own, name, source, target, shape, operator=operator.name)
