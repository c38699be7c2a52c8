"""Random redistributions for tests: mesh, tensor, source and target layout."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from plans.layout import Layout, TensorLayout

MESHES = [
    (2,),
    (3,),
    (4,),
    (6,),
    (2, 2),
    (2, 3),
    (4, 2),
    (8,),
    (2, 2, 2),
    (3, 2, 2),
    (4, 4),
    (2, 4, 2),
    (2, 8),
    (3, 2, 4),
]
MESHES += [(4, 2, 4), (2, 2, 8), (2, 2, 2, 2), (4, 4, 4), (2, 2, 2, 4), (2, 3, 2, 2), (8, 8), (64,), (5,), (2, 5, 2)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One redistribution; `relation` says how the two meshes are related."""

    source: TensorLayout
    target: TensorLayout
    shape: tuple[int, ...]
    relation: str


def random_case(
    rng: np.random.Generator,
    *,
    relation: str | None = None,
    uneven: bool | None = None,
    partial: bool = True,
    max_ranks: int = 64,
) -> Case:
    """A random case; relation is "same", "regrouped", "shuffled" or "elsewhere" (another set of ranks)."""
    if relation is None:
        relation = str(rng.choice(["same", "regrouped", "shuffled", "elsewhere"], p=[0.6, 0.24, 0.08, 0.08]))
    choices = [matrix for matrix in MESHES if math.prod(matrix) <= max_ranks]
    matrix = choices[int(rng.integers(len(choices)))]
    num_ranks = math.prod(matrix)
    ranks = np.arange(num_ranks) + int(rng.choice([0, 0, 0, 8]))
    if rng.random() < 0.2:
        ranks = rng.permutation(ranks)
    mesh = Layout(matrix, [f"a{at}" for at in range(len(matrix))], [int(rank) for rank in ranks])
    other = mesh
    if relation == "regrouped":
        order = rng.permutation(len(matrix))
        turned = ranks.reshape(matrix).transpose(order).reshape(-1)
        same_size = [choice for choice in choices if math.prod(choice) == num_ranks]
        new = same_size[int(rng.integers(len(same_size)))]
        other = Layout(new, [f"b{at}" for at in range(len(new))], [int(rank) for rank in turned])
    elif relation == "shuffled":
        other = Layout(matrix, mesh.alias_name, [int(rank) for rank in rng.permutation(ranks)])
    elif relation == "elsewhere":
        new = choices[int(rng.integers(len(choices)))]
        first = int(rng.choice([0, num_ranks // 2, 100]))
        other = Layout(new, [f"b{at}" for at in range(len(new))], list(range(first, first + math.prod(new))))
    num_dims = int(rng.integers(1, 5 if num_ranks <= 16 else 4))
    source = random_layout(rng, mesh, num_dims, 0.25 if partial else 0.0)
    target = random_layout(rng, other, num_dims, 0.0)
    if relation == "same" and source.partial and rng.random() < 0.3:
        keep = source.partial[:1]
        dims = tuple(tuple(axis for axis in axes if axis not in keep) for axes in target.dims)
        target = TensorLayout(mesh=other, dims=dims, partial=keep)
    counts = [math.lcm(a, b) for a, b in zip(source.split_counts, target.split_counts, strict=True)]
    if uneven if uneven is not None else rng.random() < 0.25:
        shape = tuple(int(rng.integers(1, 2 * count + 2)) for count in counts)
    else:
        shape = tuple(count * int(rng.integers(1, 3)) for count in counts)
    return Case(source=source, target=target, shape=shape, relation=relation)


def random_layout(rng: np.random.Generator, mesh: Layout, num_dims: int, partial: float) -> TensorLayout:
    """A random layout; each axis is partial with probability `partial`, replicated or put on a random dim."""
    dims: list[tuple[str, ...]] = [()] * num_dims
    summed: list[str] = []
    for axis in rng.permutation(mesh.alias_name):
        if rng.random() < partial:
            summed.append(str(axis))
        elif rng.random() < 0.75:
            dim = int(rng.integers(num_dims))
            dims[dim] = (*dims[dim], str(axis))
    return TensorLayout(mesh=mesh, dims=tuple(dims), partial=tuple(summed))


def order_case(rng: np.random.Generator, max_ranks: int = 64) -> Case:
    """A case in which the same axes split the same dims, in another order."""
    while True:
        case = random_case(rng, relation="same", uneven=False, partial=False, max_ranks=max_ranks)
        dims = tuple(tuple(str(axis) for axis in rng.permutation(axes)) if axes else () for axes in case.source.dims)
        if dims != case.source.dims:
            target = TensorLayout(mesh=case.source.mesh, dims=dims)
            return Case(source=case.source, target=target, shape=case.shape, relation="order")
