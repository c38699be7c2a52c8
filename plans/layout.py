"""Layouts: which rank holds which part of a tensor.

A `Layout` is a device mesh: a matrix of ranks with named axes. Calling it with one entry per tensor dim gives a
`TensorLayout`, which lists the mesh **axes** that split every **dim** of the tensor. Axes used by no dim replicate the
tensor, or hold **partial** sums that still have to be added.

**Uneven dims.** The axes of a dim split it one after the other, each into parts of ceil(size / axis size), so the last
parts may be smaller or empty (like torch.chunk, and DTensor on its mesh axes). A rank holds only its part; if a
collective needs equal chunks, they are padded to the largest (`local_shape`) and trimmed on arrival. Because axes split
in turn, the parts of ("a", "b") nest in the parts of ("a",): gathering or slicing the last axis never crosses a
boundary.

**Copies.** The last axis may be called "interleaved_parallel". It is not an axis of devices: it splits a dim into
slices that the same rank computes one after the other, so it counts in `sharding_strategy`, but not in `size`, `region`
or `rank_list`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from plans.errors import TwofoldError
from plans.mesh_checks import INTERLEAVED, check_matrix, check_names, checked_ranks
from plans.ranks import format_ranks
from plans.text_grid import grid_lines

__all__ = ["INTERLEAVED", "DimAxes", "Layout", "Region", "TensorLayout"]

DimAxes = tuple[str, ...]
"""The axes that split one dim, the first is the major (outer) split; empty when the dim is whole."""

Region = tuple[tuple[int, int], ...]
"""Half-open index ranges, one per dim."""


class Layout:
    """A device mesh with named axes.

    Args:
        device_matrix: sizes of the axes, the first is the outermost (slowest).
        alias_name: one name per axis; `name=` is accepted as the same argument.
        rank_list: the ranks in row-major order of the matrix, without the virtual axis; 0, 1, 2, ... by default.

    Raises:
        TwofoldError: sizes below 1, missing, repeated or reserved names, repeated or negative ranks, wrong counts.

    >>> mesh = Layout((2, 2, 2), ("dp", "sp", "mp"))
    >>> mesh("mp", ("sp", "dp")).split_counts
    (2, 4)
    """

    __slots__ = ("_hash", "_sizes", "alias_name", "device_matrix", "rank_list")

    device_matrix: tuple[int, ...]
    alias_name: tuple[str, ...]
    rank_list: tuple[int, ...]

    def __init__(
        self,
        device_matrix: Sequence[int],
        alias_name: Sequence[str] | None = None,
        rank_list: Sequence[int] | None = None,
        *,
        name: Sequence[str] | None = None,
    ) -> None:
        if alias_name is not None and name is not None:
            raise TwofoldError(f"Layout got both alias_name={alias_name!r} and name={name!r}; give only one of them")
        alias_name = name if alias_name is None else alias_name
        if alias_name is None:
            raise TwofoldError(
                f"Layout({device_matrix!r}) needs one name per axis, e.g. Layout({device_matrix!r}, ('dp', ...))"
            )
        check_matrix(device_matrix)
        check_names(device_matrix, alias_name)
        count = math.prod(_of_devices(device_matrix, alias_name))
        ranks = (
            tuple(range(count))
            if rank_list is None
            else checked_ranks(rank_list, count, _of_devices(device_matrix, alias_name))
        )
        self.device_matrix = tuple(device_matrix)
        self.alias_name = tuple(alias_name)
        self.rank_list = ranks
        self._sizes = dict(zip(self.alias_name, _of_devices(device_matrix, alias_name), strict=True))
        self._hash = hash((self.device_matrix, self.alias_name, self.rank_list))

    def __call__(self, *dims: str | Sequence[str] | None) -> TensorLayout:
        """The layout of a tensor with one entry per dim: an axis, a tuple of axes (first is major), or "None"."""
        return TensorLayout(mesh=self, dims=tuple(_dim_axes(entry) for entry in dims), written=dims)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Layout)
            and self._hash == other._hash
            and (self.device_matrix, self.alias_name, self.rank_list)
            == (other.device_matrix, other.alias_name, other.rank_list)
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        ranks = "" if self.rank_list == tuple(range(self.num_ranks)) else f", {list(self.rank_list)}"
        return f"Layout({self.device_matrix}, {self.alias_name}{ranks})"

    def __str__(self) -> str:
        """The ranks of the mesh: the last axis runs across, the one before down, the others block by block.

        >>> print(Layout((2, 2), ("dp", "mp"), [3, 2, 1, 0]))
        mesh dp=2, mp=2
              mp=0  mp=1
        dp=0     3     2
        dp=1     1     0
        """
        sizes = [self.size((name,)) for name in self.alias_name]
        cells = {self.coordinate(rank): str(rank) for rank in self.rank_list}
        labels = [[f"{name}={at}" for at in range(size)] for name, size in zip(self.alias_name, sizes, strict=True)]
        return "\n".join([f"mesh {self._axes()}", *grid_lines(labels, cells)])

    def _axes(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in zip(self.alias_name, self.device_matrix, strict=True))

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the mesh."""
        return len(self.rank_list)

    @property
    def num_copies(self) -> int:
        """Number of copies into which the virtual axis cuts a dim; 1 without such an axis."""
        return self.device_matrix[-1] if self.alias_name[-1] == INTERLEAVED else 1

    def size(self, axes: Iterable[str]) -> int:
        """The product of the sizes of `axes` in ranks; the virtual axis counts as 1."""
        axes = tuple(axes)
        try:
            return math.prod([self._sizes[axis] for axis in axes])
        except KeyError as error:
            raise TwofoldError(f"The axis {error.args[0]!r} is not found in {self.alias_name}") from None

    def axis_index(self, axis: str) -> int:
        """The position of `axis` in the device matrix."""
        try:
            return self.alias_name.index(axis)
        except ValueError:
            raise TwofoldError(f"The axis {axis!r} is not found in {self.alias_name}") from None

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """The coordinates of `rank` in the device matrix.

        Raises:
            TwofoldError: a rank that the mesh does not have.
        """
        found = _coordinates(self).get(rank)
        if found is None:
            raise TwofoldError(f"rank {rank!r} is not in {self!r}")
        return found

    def index(self, rank: int, axes: Sequence[str]) -> int:
        """The position of `rank` along `axes` taken together, the first axis is major."""
        coordinate, position = self.coordinate(rank), 0
        for axis in axes:
            if axis != INTERLEAVED:
                where = self.axis_index(axis)
                position = position * self.device_matrix[where] + coordinate[where]
        return position

    def groups(self, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that differ only along `axes`; inside a group the first axis is major.

        >>> Layout((2, 2), ("dp", "mp")).groups(("dp",))
        ((0, 2), (1, 3))
        """
        return _groups(self, tuple(axes))

    def group_of(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """The group of `groups(axes)` that holds `rank`.

        Raises:
            TwofoldError: a rank or an axis that the mesh does not have.
        """
        found = _group_by_rank(self, tuple(axes)).get(rank)
        if found is None:
            raise TwofoldError(f"rank {rank!r} is not in {self!r}")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """A tensor's place on a mesh: for each dim the axes that split it, and the axes that hold partial sums.

    Args:
        mesh: the device mesh.
        dims: per dim the splitting axes, the first is major.
        partial: axes along which ranks hold terms of a sum that is not taken yet.
        written: the dims as the user wrote them, for `tensor_map` only.
    """

    mesh: Layout
    dims: tuple[DimAxes, ...]
    partial: DimAxes = ()
    written: tuple[object, ...] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        seen: set[str] = set()
        if self.mesh.alias_name[-1] == INTERLEAVED:
            self._check_copies()
        for axis in [axis for axes in self.dims for axis in axes] + list(self.partial):
            self.mesh.axis_index(axis)
            if axis in seen:
                shown = tuple(self.dims) + ((f"partial{self.partial}",) if self.partial else ())
                raise TwofoldError(f"The axis {axis!r} has been set more than once in {shown}; use it for one dim only")
            seen.add(axis)

    def __str__(self) -> str:
        return self.table()

    def __format__(self, spec: str) -> str:
        """The one-line form: `(mp, (sp, dp)) + partial(tp)`; messages are f-strings and stay on one line."""
        dims = ", ".join(
            "None" if not axes else axes[0] if len(axes) == 1 else f"({', '.join(axes)})" for axes in self.dims
        )
        return format(f"({dims})" + (f" + partial({', '.join(self.partial)})" if self.partial else ""), spec)

    def table(self, shape: Sequence[int] | None = None) -> str:
        """Which ranks hold which part: the last split dim runs across, the one before down, the others block by block.

        Ranks with the same part are together (`0-3`, `0,4`); terms of a partial sum are joined by `+`.

        Args:
            shape: the global shape, to show index ranges; without it parts are numbered.

        >>> mesh = Layout((2, 2, 2), ("dp", "sp", "mp"))
        >>> print(mesh("mp", ("sp", "dp")).table((4, 16)))
        (mp, (sp, dp)) of shape (4, 16) on dp=2, sp=2, mp=2
                   dim1[0:4]  dim1[4:8]  dim1[8:12]  dim1[12:16]
        dim0[0:2]          0          4           2            6
        dim0[2:4]          1          5           3            7
        """
        mesh = self.mesh
        of_shape = "" if shape is None else f" of shape {tuple(shape)}"
        counts = self.split_counts
        split = [dim for dim, count in enumerate(counts) if count > 1]
        terms: dict[tuple[int, ...], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        ranges: dict[tuple[int, int], str] = {}
        for rank in mesh.rank_list:
            part = tuple(mesh.index(rank, self.dims[dim]) for dim in split)
            terms[part][mesh.index(rank, self.partial)].append(rank)
            if shape is not None:
                region = self.region(rank, shape)
                ranges.update(
                    {(dim, at): f"[{region[dim][0]}:{region[dim][1]}]" for dim, at in zip(split, part, strict=True)}
                )
        cells = {
            part: " + ".join(format_ranks(by_term[term], ",") for term in sorted(by_term))
            for part, by_term in terms.items()
        }
        labels = [
            [f"dim{dim}{ranges.get((dim, at), f' {at}/{counts[dim]}')}" for at in range(counts[dim])] for dim in split
        ]
        return "\n".join([f"{self}{of_shape} on {mesh._axes()}", *grid_lines(labels, cells)])

    @property
    def tensor_map(self) -> tuple[int | tuple[int, ...], ...]:
        """Per dim its axes as MindSpore numbers them: the last axis is 0, an unsplit dim is -1, several make a tuple.

        >>> Layout((2, 2, 2), ("dp", "sp", "mp"))(("sp", "dp"), "None").tensor_map
        ((1, 2), -1)
        """
        last = len(self.mesh.alias_name) - 1

        def number(axis: object) -> int:
            return -1 if axis == "None" else last - self.mesh.axis_index(str(axis))

        def entry(axes: DimAxes, as_written: object) -> int | tuple[int, ...]:
            if isinstance(as_written, tuple | list):
                return tuple(number(axis) for axis in as_written)
            return tuple(number(axis) for axis in axes) if len(axes) > 1 else number(axes[0] if axes else "None")

        # `written` goes stale when a copy of this value gets other dims
        fits = self.written is not None and self.dims == tuple(_dim_axes(each) for each in self.written)  # type: ignore[arg-type]
        shown = self.written if fits and self.written is not None else (None,) * len(self.dims)
        return tuple(entry(axes, as_written) for axes, as_written in zip(self.dims, shown, strict=True))

    @property
    def interleaved_parallel(self) -> bool:
        """Whether the mesh has the virtual last axis."""
        return self.mesh.alias_name[-1] == INTERLEAVED

    @property
    def sharding_strategy(self) -> tuple[int, ...]:
        """Number of parts that each dim is cut into, copies included."""
        return tuple(self.mesh.size(axes) * (self.mesh.num_copies if INTERLEAVED in axes else 1) for axes in self.dims)

    def to_dict(self) -> dict[str, object]:
        """The layout with the keys and numbers of MindSpore's `Layout.to_dict`.

        MindSpore counts the virtual axis in a default rank list (8 entries for 4 devices and 2 copies), so does this.
        """
        ranks = list(self.mesh.rank_list)
        if self.interleaved_parallel and ranks == list(range(len(ranks))):
            ranks = list(range(math.prod(self.mesh.device_matrix)))
        return {
            "device_matrix": self.mesh.device_matrix,
            "tensor_map": self.tensor_map,
            "interleaved_parallel": self.interleaved_parallel,
            "alias_name": self.mesh.alias_name,
            "rank_list": ranks,
        }

    @property
    def split_counts(self) -> tuple[int, ...]:
        """Number of parts that each dim is cut into over the ranks."""
        return tuple(self.mesh.size(axes) for axes in self.dims)

    @property
    def replicated(self) -> DimAxes:
        """The axes along which every rank holds the same values."""
        used = {axis for axes in self.dims for axis in axes} | set(self.partial)
        return tuple(axis for axis in self.mesh.alias_name if axis not in used)

    def without_partial(self) -> TensorLayout:
        """The same layout with all partial sums reduced."""
        return self if not self.partial else TensorLayout(mesh=self.mesh, dims=self.dims)

    def check(self, shape: Sequence[int], what: str = "tensor") -> None:
        """Refuse a shape that this layout cannot cut evenly."""
        if len(shape) != len(self.dims):
            raise TwofoldError(
                f"{what} has {len(shape)} dims {tuple(shape)}, but its layout {self} names {len(self.dims)}"
            )
        for position, (size, count) in enumerate(zip(shape, self.sharding_strategy, strict=True)):
            if size % count:
                raise TwofoldError(
                    f"dim {position} of {what} {tuple(shape)} has size {size}, which {self} cuts into {count}: "
                    f"{size} % {count} != 0"
                )

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one rank's part of a tensor of `shape`; of the largest part where a dim is cut unevenly.

        >>> Layout((2, 4), ("dp", "mp"))(("dp", "mp")).local_shape((10,))
        (2,)
        """
        parts = []
        for size, axes in zip(shape, self.dims, strict=True):
            for axis in axes:
                size = -(-size // self.mesh.size((axis,)))
            parts.append(size)
        return tuple(parts)

    def is_even(self, shape: Sequence[int]) -> bool:
        """Whether every rank's part of a tensor of `shape` has the same shape, copies not counted."""
        return all(size % count == 0 for size, count in zip(shape, self.split_counts, strict=True))

    def part_shape(self, rank: int, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of what `rank` holds of a tensor of `shape`; dims cut unevenly may be smaller, down to 0."""
        return tuple(stop - start for start, stop in self.region(rank, shape))

    def region(self, rank: int, shape: Sequence[int]) -> Region:
        """The index ranges that `rank` holds of a tensor of `shape`.

        >>> mesh = Layout((2, 2), ("dp", "mp"))
        >>> mesh("mp", "None").region(1, (4, 6))
        ((2, 4), (0, 6))
        >>> [mesh(("dp", "mp")).region(rank, (5,)) for rank in range(4)]
        [((0, 2),), ((2, 3),), ((3, 4),), ((4, 5),)]
        """
        coordinate = self.mesh.coordinate(rank)
        ranges = []
        for size, axes in zip(shape, self.dims, strict=True):
            start = 0
            for axis in axes:
                part = -(-size // self.mesh.size((axis,)))
                offset = min(part * coordinate[self.mesh.axis_index(axis)], size)
                start, size = start + offset, min(part, size - offset)
            ranges.append((start, start + size))
        return tuple(ranges)

    def same_placement(self, other: TensorLayout) -> bool:
        """Whether every rank holds the same indices and partial terms under both (names and meshes may differ).

        For shapes that both cut evenly; ("a", "b") may cut an uneven dim otherwise than one axis of their size does.
        """
        if self == other:
            return True
        if len(self.dims) != len(other.dims):
            return False
        if self.mesh is not other.mesh and set(self.mesh.rank_list) != set(other.mesh.rank_list):
            return False
        if bool(self.partial) != bool(other.partial) or self.split_counts != other.split_counts:
            return False
        if self.partial and {frozenset(group) for group in self.mesh.groups(self.partial)} != {
            frozenset(group) for group in other.mesh.groups(other.partial)
        }:
            return False
        return all(
            self.mesh.index(rank, mine) == other.mesh.index(rank, theirs)
            for mine, theirs in zip(self.dims, other.dims, strict=True)
            for rank in self.mesh.rank_list
        )

    def _check_copies(self) -> None:
        for axes in (*self.dims, self.partial):
            if INTERLEAVED in axes[:-1] or INTERLEAVED in self.partial:
                raise TwofoldError(
                    f"{INTERLEAVED!r} cuts what a rank holds into copies, so it must be the last axis of its dim and "
                    f"hold no partial sums; got dims {self.dims} and partial {self.partial}"
                )


def _of_devices(device_matrix: Sequence[int], names: Sequence[str]) -> tuple[int, ...]:
    """The sizes of the axes in ranks: the virtual last axis has 1."""
    return (*device_matrix[:-1], 1) if names[-1] == INTERLEAVED else tuple(device_matrix)


def _dim_axes(entry: str | Sequence[str] | None) -> DimAxes:
    if entry is None or entry == "None":
        return ()
    if isinstance(entry, str):
        return (entry,)
    if not isinstance(entry, Sequence) or not all(isinstance(axis, str) for axis in entry):
        raise TwofoldError(f"each dim takes an axis name, a tuple of axis names or 'None', not {entry!r}")
    return tuple(axis for axis in entry if axis != "None")


@lru_cache(maxsize=1024)
def _coordinates(mesh: Layout) -> dict[int, tuple[int, ...]]:
    return dict(zip(mesh.rank_list, np.ndindex(*_of_devices(mesh.device_matrix, mesh.alias_name)), strict=True))


@lru_cache(maxsize=4096)
def _groups(mesh: Layout, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    ranks = np.asarray(mesh.rank_list).reshape(_of_devices(mesh.device_matrix, mesh.alias_name))
    inner = [mesh.axis_index(axis) for axis in axes]
    outer = [where for where in range(ranks.ndim) if where not in inner]
    table = ranks.transpose(*outer, *inner).reshape(-1, mesh.size(axes))
    return tuple(tuple(int(rank) for rank in row) for row in table)


@lru_cache(maxsize=4096)
def _group_by_rank(mesh: Layout, axes: tuple[str, ...]) -> dict[int, tuple[int, ...]]:
    return {rank: group for group in _groups(mesh, axes) for rank in group}
