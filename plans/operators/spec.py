"""How an operator declares itself: named dims once, everything else follows.

An operator names the dims of its inputs and outputs. A **strategy** gives mesh axes to dims. From that alone follow

- the layout of every input and output: each dim is split by the axes given to it;
- the partial sums of the outputs: a dim that stands in an input but in no output is summed over, so the axes given to
  it leave partial sums behind;
- the layout of the gradient of input i: split as input i is, and partial over the axes of every dim that input i lacks
  (the gradient sums over them), except that an *additive* input (a bias) is outside the forward sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from plans.errors import TwofoldError
from plans.layout import DimAxes, Layout, TensorLayout

__all__ = ["Assignment", "Gradient", "OperatorSpec"]

Assignment = Mapping[str, DimAxes]
"""dim name -> the axes that split it (first is major); dims that are absent stay whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """The gradient of one input: which saved operands it reads besides the output's gradient, and its whole FLOPs.

    `needs` holds "x0", "x1", ... for inputs and "y0" for the output.
    """

    needs: tuple[str, ...] = ()
    flops: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSpec:
    """The declaration of one operator for given shapes.

    Args:
        kind: the operator's kind, such as "linear".
        sizes: dim name -> size.
        inputs: dim names of every input.
        outputs: dim names of every output.
        splittable: the dims that a strategy may split.
        flops: floating-point operations of the whole forward.
        gradients: input index -> its gradient; inputs that are absent have none.
        additive: inputs added outside the sum over the contracted dims (a bias).
        aliases: whether the output shares the input's memory (a reshape): it costs no bytes and no time.
    """

    kind: str
    sizes: Mapping[str, int]
    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]
    splittable: frozenset[str]
    flops: int = 0
    gradients: Mapping[int, Gradient] = field(default_factory=dict)
    additive: frozenset[int] = frozenset()
    aliases: bool = False

    @property
    def contracted(self) -> tuple[str, ...]:
        """The dims that are summed over: in an input, in no output."""
        kept = {dim for dims in self.outputs for dim in dims}
        return tuple(dict.fromkeys(dim for dims in self.inputs for dim in dims if dim not in kept))

    def input_layout(self, index: int, mesh: Layout, assignment: Assignment) -> TensorLayout:
        """The layout in which input `index` must arrive."""
        return TensorLayout(mesh=mesh, dims=tuple(assignment.get(dim, ()) for dim in self.inputs[index]))

    def output_layout(self, index: int, mesh: Layout, assignment: Assignment) -> TensorLayout:
        """The layout in which output `index` is made, with its partial axes."""
        partial = tuple(axis for dim in self.contracted for axis in assignment.get(dim, ()))
        return TensorLayout(
            mesh=mesh, dims=tuple(assignment.get(dim, ()) for dim in self.outputs[index]), partial=partial
        )

    def gradient_layout(self, index: int, mesh: Layout, assignment: Assignment) -> TensorLayout:
        """The layout in which the gradient of input `index` is made, with its partial axes."""
        own = set(self.inputs[index])
        outside = set(self.contracted) if index in self.additive else set()
        missing = [dim for dim in self.sizes if dim not in own and dim not in outside]
        partial = tuple(axis for dim in missing for axis in assignment.get(dim, ()))
        return TensorLayout(
            mesh=mesh, dims=tuple(assignment.get(dim, ()) for dim in self.inputs[index]), partial=partial
        )

    def check(self, mesh: Layout, assignment: Assignment, name: str) -> None:
        """Refuse a strategy that this operator cannot carry out.

        Raises:
            TwofoldError: an unknown dim, a dim that cannot be split, an axis used twice, a size that does not divide.
        """
        used: dict[str, str] = {}
        for dim, axes in assignment.items():
            if dim not in self.sizes:
                raise TwofoldError(
                    f"operator {name!r} ({self.kind}) has no dim {dim!r}; its dims are {list(self.sizes)}"
                )
            if axes and dim not in self.splittable:
                able = sorted(self.splittable) or "none"
                raise TwofoldError(f"dim {dim!r} of operator {name!r} ({self.kind}) cannot be split; these can: {able}")
            for axis in axes:
                if axis in used:
                    raise TwofoldError(f"operator {name!r}: the axis {axis!r} splits both {used[axis]!r} and {dim!r}")
                used[axis] = dim
            count = mesh.size(axes)
            if self.sizes[dim] % count:
                raise TwofoldError(
                    f"operator {name!r}: dim {dim!r} has size {self.sizes[dim]}, which axes {list(axes)} cut into "
                    f"{count}: {self.sizes[dim]} % {count} != 0"
                )

    def local_fraction(self, mesh: Layout, assignment: Assignment) -> int:
        """Into how many equal parts the whole work is cut."""
        return math.prod(mesh.size(axes) for axes in assignment.values())
