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
        return {rank: each.numpy() for rank, each in result._local_tensors.items()}  # type: ignore[attr-defined]


def received_elements(
    source: TensorLayout, target: TensorLayout, shape: tuple[int, ...], mesh: DeviceMesh
) -> tuple[int, list[str]]:
    """Elements each rank receives in DTensor's sequence, and the names of its communicating steps (even splits)."""
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), torch.float32)
    specs = [
        DTensorSpec(mesh, tuple(placements(layout)), tensor_meta=meta, use_strided_shard_as_shard_order=True)
        for layout in (source, target)
    ]
    local = math.prod(source.local_shape(shape))
    received, names = 0, []
    for info in _gen_transform_infos_non_cached(*specs):
        size = mesh.size(info.mesh_dim)
        old, new = info.src_dst_placements
        split_before, split_after = isinstance(old, Shard | _StridedShard), isinstance(new, Shard | _StridedShard)
        if isinstance(old, Partial) and split_after:
            received, local, name = received + (size - 1) * (local // size), local // size, "reduce_scatter"
        elif isinstance(old, Partial):
            received, name = received + 2 * (size - 1) * -(-local // size), "all_reduce"
        elif split_before and split_after:
            received, name = received + (size - 1) * local // size, "all_to_all"
        elif split_before:
            received, local, name = received + (size - 1) * local, local * size, "all_gather"
        else:
            local, name = local // size, "slice"
        if size > 1 and name != "slice":
            names.append(name)
    return received, names
