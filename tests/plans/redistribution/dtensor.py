"""torch's DTensor as a second opinion on a redistribution, in one process: its values and the bytes it moves.

Needs torch. Values come from `LocalTensorMode` (every rank's tensor in one process); bytes from the sequence that
DTensor's own planner returns, priced as the collectives it emits on NCCL (all-to-all between dims; on gloo it gathers
and slices instead, which is dearer).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensorMode, rank_map
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import _gen_transform_infos_non_cached
from torch.distributed.tensor.placement_types import _StridedShard

from plans.layout import Layout, TensorLayout
from plans.redistribution import StepKind
from tests.plans.redistribution.mindspore import Done


@contextmanager
def pretend_world(num_ranks: int) -> Iterator[None]:
    """A process group of ranks that do not exist."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    dist.init_process_group("fake", rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def placements(layout: TensorLayout) -> list[Any]:
    """One placement per mesh axis; an axis listed after one to its right in the mesh is a strided shard."""
    mesh = layout.mesh
    found: list[Any] = [Partial() if axis in layout.partial else Replicate() for axis in mesh.alias_name]
    for dim, axes in enumerate(layout.dims):
        for at, axis in enumerate(axes):
            where = mesh.axis_index(axis)
            factor = math.prod(mesh.size((other,)) for other in axes[:at] if mesh.axis_index(other) > where)
            found[where] = Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
    return found


def device_mesh(mesh: Layout) -> DeviceMesh:
    """The mesh of a Layout; made under LocalTensorMode or in a pretend world."""
    ranks = torch.tensor(mesh.rank_list).reshape(mesh.device_matrix)
    return DeviceMesh("cpu", ranks, mesh_dim_names=mesh.alias_name)


def redistributed(
    source: TensorLayout, target: TensorLayout, parts: Mapping[int, npt.NDArray[np.float64]], shape: tuple[int, ...]
) -> dict[int, npt.NDArray[np.float64]]:
    """What every rank holds after DTensor redistributes `parts`."""
    with LocalTensorMode(source.mesh.num_ranks):
        mesh = device_mesh(source.mesh)
        local = rank_map(lambda rank: torch.from_numpy(np.ascontiguousarray(parts[rank])))
        stride = torch.empty(shape, device="meta").stride()
        tensor = DTensor.from_local(
            local, mesh, placements(source), run_check=False, shape=torch.Size(shape), stride=stride
        )
        result = tensor.redistribute(mesh, placements(target)).to_local()
        return {rank: local_tensor.numpy() for rank, local_tensor in result._local_tensors.items()}  # type: ignore[attr-defined]


def dtensor_steps(source: TensorLayout, target: TensorLayout, shape: tuple[int, ...], mesh: DeviceMesh) -> list[Done]:
    """The sequence of DTensor's own planner (even splits)."""
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), torch.float32)
    specs = [
        DTensorSpec(mesh, tuple(placements(layout)), tensor_meta=meta, use_strided_shard_as_shard_order=True)
        for layout in (source, target)
    ]
    local = math.prod(source.local_shape(shape))
    found = []
    for info in _gen_transform_infos_non_cached(*specs):
        axis = source.mesh.alias_name[info.mesh_dim]
        size = source.mesh.size((axis,))
        old, new = info.src_dst_placements
        split_before, split_after = isinstance(old, Shard | _StridedShard), isinstance(new, Shard | _StridedShard)
        before = local
        if isinstance(old, Partial):
            kind = StepKind.REDUCE_SCATTER if split_after else StepKind.ALL_REDUCE
        elif split_before:
            kind = StepKind.ALL_TO_ALL if split_after else StepKind.ALL_GATHER
        else:
            kind = StepKind.SLICE
        if kind in (StepKind.REDUCE_SCATTER, StepKind.SLICE):
            local //= size
        elif kind is StepKind.ALL_GATHER:
            local *= size
        if size > 1:
            found.append(Done(kind, source.mesh, frozenset({axis}), before, local))
    return found
