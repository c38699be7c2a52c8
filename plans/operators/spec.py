"""Declarations of operators: an operator names its dims once, and everything else follows.

An operator names the dims of its inputs and outputs. A **strategy** gives mesh axes to dims. From that alone follow

- the layout of every input and output: each dim is split by the axes given to it;
- the partial sums of the outputs: a dim that is in an input but in no output is summed over, so the axes given to
  it leave partial sums behind;
- the layout of the gradient of input i: split as input i is, and partial over the axes of every dim that input i lacks
  (the gradient sums over them), except that an *additive* input (a bias) is outside the forward sum.

**Merged dims.** A tensor's dim may be a product of named dims, written as a tuple with the major one first: the rows of
(B, S, H) flattened to (B * S, H) are ("b", "s"). A part of such a dim is one run of indices only where every dim before
a split one is split to single elements, and `check` asks for that.

**Statistics.** An operator that sums over a split dim in a way that partial sums cannot express (the softmax inside a
cross-entropy) names a `Statistic`: a small tensor that every shard makes of its part, gathered over the shards, and
read by the forward and by gradients that need "s0".

**Kept values.** What a forward finds on its way and its gradients would have to recompute (the logarithms of the sums
of a softmax, the scale of a norm) is `Kept`: further outputs of the forward's call, read by gradients that need "k0".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from plans.errors import TwofoldError
from plans.layout import DimAxes, Layout, TensorLayout

__all__ = ["Assignment", "Dim", "Gradient", "Kept", "OperatorSpec", "Statistic", "factors"]

Dim = str | tuple[str, ...]
"""The meaning of one dim of a tensor: a named dim, or a product of named dims, first is major."""

Assignment = Mapping[str, DimAxes]
"""dim name -> the axes that split it (first is major); dims that are absent stay whole."""


def factors(dim: Dim) -> tuple[str, ...]:
    """The named dims that a dim of a tensor is the product of.

    >>> factors("b"), factors(("b", "s"))
    (('b',), ('b', 's'))
    """
    return (dim,) if isinstance(dim, str) else dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """The gradient of one input: which saved operands it reads besides the output's gradient, and its whole FLOPs.

    `remade_flops` of them compute values of the forward again.

    `needs` holds "x0", "x1", ... for inputs, "y0" for the output, "s0" for the statistic (left out where its dim is
    whole) and "k0", "k1", ... for kept values (left out where none are kept).
    """

    needs: tuple[str, ...] = ()
    flops: int = 0
    remade_flops: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistic:
    """A result that every shard of dim `over` computes from its part of the inputs, and that all shards need.

    Its tensor has the shape [shards, width, *dims]: the call "<kind>.statistic" makes one row of it, an all-gather
    brings the others.
    """

    over: str
    width: int
    dims: tuple[Dim, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A further output of the forward that only gradients read.

    It is in float32, or in the dtype of the first input where that has more digits.

    Args:
        dims: dims of its tensor; none of them is summed over.
        whole: a dim that stays whole where it is kept; "" for none. If it is split, a statistic has the same content.
    """

    dims: tuple[Dim, ...]
    whole: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorSpec:
    """The declaration of one operator for given shapes.

    Args:
        kind: the operator's kind, such as "linear".
        sizes: dim name -> size.
        inputs: dim names of every input.
        outputs: dim names of every output.
        splittable: the dims that a strategy may split.
        flops: floating-point operations of the full forward.
        gradients: input index -> its gradient; inputs that are absent have none.
        additive: inputs added outside the sum over the contracted dims (a bias).
        aliases: whether the output shares the input's memory (a reshape): it costs no bytes and no time.
        located: dims of which a rank must know where its part lies (a causal mask, a table of embeddings): the axes
            that split them are handed to the call as attrs "split".
        statistic: see the module; its dim counts as summed within the operator, it leaves no partial sums.
        kept: see the module.
        passed: inputs whose gradient is that of the output as it is (a sum's terms that are not repeated), so that both
            can share one memory.
        updated: inputs that the forward changes in place (running statistics); what reads them is never recomputed.
        joint: inputs whose gradients come out of one call, "<kind>.grad012", where all of them are needed.
        joint_in_part: whether such a call also makes the gradients of some of them, "<kind>.grad12".
        blind: whether no gradient goes through it: only the shape of its inputs matters, or it is a detach.
        of_the_batch: whether it makes one value of all samples of a micro-batch on purpose (how many labels count).
        discrete: inputs that only make a choice (for example the largest), and therefore get no gradient.
    """

    kind: str
    sizes: Mapping[str, int]
    inputs: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]
    splittable: frozenset[str]
    flops: int = 0
    gradients: Mapping[int, Gradient] = field(default_factory=dict)
    additive: frozenset[int] = frozenset()
    aliases: bool = False
    located: tuple[str, ...] = ()
    statistic: Statistic | None = None
    kept: tuple[Kept, ...] = ()
    joint: tuple[int, ...] = ()
    joint_in_part: bool = False
    blind: bool = False
    of_the_batch: bool = False
    discrete: frozenset[int] = frozenset()
    passed: frozenset[int] = frozenset()
    updated: tuple[int, ...] = ()

    @property
    def contracted(self) -> tuple[str, ...]:
        """The dims that are summed over: in an input, in no output, and not summed within the operator."""
        return _contracted(self)

    def output_shape(self, index: int) -> tuple[int, ...]:
        """The full shape of output `index`."""
        return self._shape(self.outputs[index])

    def input_layout(self, index: int, mesh: Layout, assignment: Assignment) -> TensorLayout:
        """The layout in which input `index` must arrive."""
        return _input_layout(self, index, mesh, tuple(assignment.items()))

    def output_layout(self, index: int, mesh: Layout, assignment: Assignment) -> TensorLayout:
        """The layout in which output `index` is made, with its partial axes."""
        return _output_layout(self, index, mesh, tuple(assignment.items()))

    def gradient_layout(self, index: int, mesh: Layout, assignment: Assignment) -> TensorLayout:
        """The layout in which the gradient of input `index` is made, with its partial axes."""
        return _gradient_layout(self, index, mesh, tuple(assignment.items()))

    def gradient_sums(self, index: int) -> tuple[str, ...]:
        """The dims that the gradient of input `index` is summed over."""
        own = set(_names(self.inputs[index]))
        outside = set(self.contracted) if index in self.additive else set()
        return tuple(dim for dim in self.sizes if dim not in own and dim not in outside)

    def statistic_layout(self, mesh: Layout, assignment: Assignment) -> TensorLayout | None:
        """The layout in which the shards make the statistic, a row each; None where there is nothing to gather."""
        if self.statistic is None or mesh.size(assignment.get(self.statistic.over, ())) == 1:
            return None
        own = assignment[self.statistic.over]
        return TensorLayout(mesh=mesh, dims=(own, (), *_axes(self.statistic.dims, assignment)))

    def statistic_shape(self, mesh: Layout, assignment: Assignment) -> tuple[int, ...]:
        """The full shape of the statistic: [shards, width, *dims]."""
        assert self.statistic is not None
        shards = mesh.size(assignment.get(self.statistic.over, ()))
        return (shards, self.statistic.width, *self._shape(self.statistic.dims))

    def kept_layouts(self, mesh: Layout, assignment: Assignment) -> tuple[tuple[TensorLayout, tuple[int, ...]], ...]:
        """The layout and the full shape of every kept value; () under a strategy that keeps none."""
        if any(kept.whole and mesh.size(assignment.get(kept.whole, ())) > 1 for kept in self.kept):
            return ()
        return tuple(
            (TensorLayout(mesh=mesh, dims=_axes(kept.dims, assignment)), self._shape(kept.dims)) for kept in self.kept
        )

    def _shape(self, dims: Iterable[Dim]) -> tuple[int, ...]:
        return tuple(math.prod(self.sizes[name] for name in factors(dim)) for dim in dims)

    def local_attrs(self, assignment: Assignment) -> dict[str, object]:
        """Attrs of the operator's calls that depend on the strategy.

        "bias_axes": a contracted dim is split over them, so that only index 0 along them adds the bias. "split": the
        axes of `located` dims, by dim.
        """
        attrs: dict[str, object] = {}
        if self.additive and (axes := tuple(axis for dim in self.contracted for axis in assignment.get(dim, ()))):
            attrs["bias_axes"] = axes
        if split := {dim: axes for dim in self.located if (axes := assignment.get(dim, ()))}:
            attrs["split"] = split
        return attrs

    def gradient_groups(self, wanted: Iterable[int]) -> list[tuple[int, ...]]:
        """The wanted gradients, those that one call makes together."""
        order = sorted(wanted)
        together = tuple(index for index in self.joint if index in order)
        if len(together) < 2 or (together != self.joint and not self.joint_in_part):
            return [(index,) for index in order]
        return [together, *((index,) for index in order if index not in together)]

    def gradient_needs(self, group: Sequence[int]) -> tuple[str, ...]:
        """The saved operands that the call for a group of gradients reads, each once."""
        return tuple(dict.fromkeys(need for index in group for need in self.gradients[index].needs))

    def fits(self, mesh: Layout, assignment: Assignment) -> bool:
        """Whether `check` accepts a strategy."""
        try:
            self.check(mesh, assignment, self.kind)
        except TwofoldError:
            return False
        return True

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
        self._check_merged(mesh, assignment, name)

    def _check_merged(self, mesh: Layout, assignment: Assignment, name: str) -> None:
        for dim in {dim for dims in (*self.inputs, *self.outputs) for dim in dims if not isinstance(dim, str)}:
            for position, minor in enumerate(dim):
                if mesh.size(assignment.get(minor, ())) == 1:
                    continue
                for major in dim[:position]:
                    if mesh.size(assignment.get(major, ())) != self.sizes[major]:
                        raise TwofoldError(
                            f"operator {name!r} ({self.kind}) merges the dims {list(dim)} into one: {minor!r} can be "
                            f"split only if {major!r} of size {self.sizes[major]} is split into single elements"
                        )

    def local_fraction(self, mesh: Layout, assignment: Assignment) -> int:
        """Number of equal parts that the work is cut into."""
        return math.prod(mesh.size(axes) for axes in assignment.values())


_Frozen = tuple[tuple[str, DimAxes], ...]
"""The items of an assignment: equal blocks have equal specs and assignments, so layouts are made once for all."""


@lru_cache(maxsize=65_536)
def _contracted(spec: OperatorSpec) -> tuple[str, ...]:
    kept = {name for dims in spec.outputs for name in _names(dims)}
    if spec.statistic is not None:
        kept.add(spec.statistic.over)
    return tuple(dict.fromkeys(name for dims in spec.inputs for name in _names(dims) if name not in kept))


@lru_cache(maxsize=65_536)
def _input_layout(spec: OperatorSpec, index: int, mesh: Layout, assignment: _Frozen) -> TensorLayout:
    return TensorLayout(mesh=mesh, dims=_axes(spec.inputs[index], dict(assignment)))


@lru_cache(maxsize=65_536)
def _output_layout(spec: OperatorSpec, index: int, mesh: Layout, assignment: _Frozen) -> TensorLayout:
    split = dict(assignment)
    partial = tuple(axis for dim in spec.contracted for axis in split.get(dim, ()))
    return TensorLayout(mesh=mesh, dims=_axes(spec.outputs[index], split), partial=partial)


@lru_cache(maxsize=65_536)
def _gradient_layout(spec: OperatorSpec, index: int, mesh: Layout, assignment: _Frozen) -> TensorLayout:
    split = dict(assignment)
    partial = tuple(axis for dim in spec.gradient_sums(index) for axis in split.get(dim, ()))
    return TensorLayout(mesh=mesh, dims=_axes(spec.inputs[index], split), partial=partial)


def _names(dims: Iterable[Dim]) -> list[str]:
    return [name for dim in dims for name in factors(dim)]


def _axes(dims: Iterable[Dim], assignment: Assignment) -> tuple[DimAxes, ...]:
    return tuple(tuple(axis for name in factors(dim) for axis in assignment.get(name, ())) for dim in dims)
