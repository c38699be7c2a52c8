"""Redistributions whose steps were chosen under a machine's price, as part of a plan's file.

Without an entry lowering takes the steps of least bytes. So only what differs from those is stored, once for a source,
a target, a shape and an element size, however many operators move a tensor that way; and lowering needs no machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from plans.errors import TwofoldError
from plans.layout import DimAxes, Layout, TensorLayout
from plans.redistribution import Step, StepKind

__all__ = ["ChosenStep", "Placement", "Redistribution"]


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A tensor's layout in a file; `mesh` is left out where it is that of the source."""

    dims: tuple[DimAxes, ...]
    partial: DimAxes = ()
    mesh: Layout | None = None

    def on(self, mesh: Layout) -> TensorLayout:
        """The placement as a layout; `mesh` is the mesh of the source, used where the placement names none."""
        return TensorLayout(mesh=self.mesh or mesh, dims=self.dims, partial=self.partial)


class ChosenStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One step: see `Step`; `after` is the layout it leaves."""

    kind: StepKind
    after: Placement
    axes: DimAxes = ()
    dim: int | None = None
    to_dim: int | None = None


class Redistribution(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The steps that bring a tensor from one layout to another.

    Args:
        mesh: mesh of the source.
        source, target: layouts of the tensor.
        shape: shape of the full tensor.
        itemsize: bytes per element.
        start: the source as the first step writes it; the same place, maybe with the axes of another mesh.
        steps: in order.

    Raises:
        TwofoldError: steps that do not lead from the source to the target, or through a layout that is uneven.

    >>> mesh = Layout((2, 2), ("dp", "mp"))
    >>> gather = Step(kind=StepKind.ALL_GATHER, axes=("mp",), dim=0, before=mesh("mp"), after=mesh("None"))
    >>> Redistribution.of(mesh("mp"), mesh("None"), (8,), 4, (gather,)).sequence == (gather,)
    True
    """

    mesh: Layout
    source: Placement
    target: Placement
    shape: tuple[int, ...]
    itemsize: int
    start: Placement
    steps: tuple[ChosenStep, ...]

    def __post_init__(self) -> None:
        what = f"the stored redistribution from {self.key[0]} to {self.key[1]} of a tensor of shape {self.shape}"
        if not self.steps:
            raise TwofoldError(f"{what} has no steps; omit it to use the one with the fewest bytes")
        layouts = [self.key[0], self.start.on(self.mesh), *(step.after for step in self.sequence), self.key[1]]
        for layout in layouts:
            layout.check(self.shape, f"{what}: the tensor")
        for number, step in enumerate(self.sequence):
            if not step.is_consistent():
                raise TwofoldError(f"{what}: step {number}, {step}, does not match its kind; plan again")
        for one, two in (layouts[:2], layouts[-2:]):
            if not one.same_placement(two):
                raise TwofoldError(f"{what}: its steps lead from {layouts[1]} to {layouts[-2]}; plan again")

    @classmethod
    def of(
        cls, source: TensorLayout, target: TensorLayout, shape: Sequence[int], itemsize: int, steps: Sequence[Step]
    ) -> Redistribution:
        """The entry of a plan for a sequence of steps."""
        assert all(one.after == two.before for one, two in itertools.pairwise(steps)), steps

        def placed(layout: TensorLayout) -> Placement:
            mesh = None if layout.mesh == source.mesh else layout.mesh
            return Placement(dims=layout.dims, partial=layout.partial, mesh=mesh)

        return cls(
            mesh=source.mesh, source=placed(source), target=placed(target), shape=tuple(shape), itemsize=itemsize,
            start=placed(steps[0].before),
            steps=tuple(
                ChosenStep(kind=step.kind, after=placed(step.after), axes=step.axes, dim=step.dim, to_dim=step.to_dim)
                for step in steps
            ),
        )  # fmt: skip

    @property
    def key(self) -> tuple[TensorLayout, TensorLayout, tuple[int, ...], int]:
        """The key of the entry: source, target, shape, itemsize."""
        return self.source.on(self.mesh), self.target.on(self.mesh), self.shape, self.itemsize

    @property
    def sequence(self) -> tuple[Step, ...]:
        """The steps with their layouts."""
        layouts = [self.start.on(self.mesh), *(step.after.on(self.mesh) for step in self.steps)]
        return tuple(
            Step(kind=step.kind, axes=step.axes, dim=step.dim, to_dim=step.to_dim, before=before, after=after)
            for step, (before, after) in zip(self.steps, itertools.pairwise(layouts), strict=True)
        )
