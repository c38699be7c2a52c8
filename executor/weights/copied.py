"""Copies the weights of one program into another program of the same model, in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from executor.kernels.context import torch_dtype
from executor.step.interpreter import Interpreter
from executor.weights.parts import WEIGHT, Part, common_region, kept, part_of, within
from plans.layout import Region
from plans.program import Program

__all__ = ["copy_weights"]


@torch.inference_mode()
def copy_weights(program: Program, source: Interpreter, target: Interpreter) -> None:
    """Copy everything that training changes, however each program splits it. Every rank of both programs must call it.

    One region of a tensor after the other is sent to all ranks by those that keep its parts, so no rank ever holds
    more than a region next to its own.

    Args:
        program: of `source`, of all ranks.
        source: this rank of it.
        target: this rank of the other program; what it holds constant is filled, in its own dtypes.
    """
    homes: dict[str, list[tuple[Region, Tensor]]] = {}
    for constant in target.group.constants:
        region = constant.layout.region(target.rank, constant.shape)
        homes.setdefault(constant.name, []).append((region, target.value(constant.value)))
    mine = {part: source.value(value) for _, part, value in kept(source) if part.role == WEIGHT}
    for owners, dtype in _cut(program):
        sent = []
        for part, owner in owners.items():
            shape, where = (part.size,), source.device.torch_device
            flat = mine[part].reshape(-1) if source.rank == owner else torch.empty(shape, dtype=dtype, device=where)
            if program.num_ranks > 1:
                flat = flat.contiguous()
                dist.broadcast(flat, owner)
            sent.append(flat)
        sizes = [last - first for first, last in part.region]
        box = torch.cat(sent)[: math.prod(sizes)].view(sizes)
        for held, home in homes.get(part.name, ()):
            if (common := common_region(held, part.region)) is not None:
                home[within(common, held)] = box[within(common, part.region)].to(home.dtype)


def _cut(program: Program) -> Iterator[tuple[dict[Part, int], torch.dtype]]:
    """The parts of every region that some rank keeps of a tensor, each with its lowest rank, in order; and its dtype.

    A tied weight may be there twice, cut in two ways.
    """
    found: dict[tuple[str, Region, int], dict[int, tuple[Part, int]]] = {}
    dtypes: dict[tuple[str, Region, int], torch.dtype] = {}
    for group in program.groups:
        for placement in group.changed:
            for rank in sorted(placement.layout.mesh.rank_list):
                part = part_of(group, placement, rank, WEIGHT, placement.kept)
                key = part.name, part.region, part.size
                found.setdefault(key, {}).setdefault(part.number, (part, rank))
                dtypes[key] = torch_dtype(group.values[placement.kept].dtype)
    for key, parts in found.items():
        yield {parts[number][0]: parts[number][1] for number in sorted(parts)}, dtypes[key]
