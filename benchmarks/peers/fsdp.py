"""Sharded data parallelism by `fully_shard` (FSDP2), a group of parameters per block.

Level 2 keeps weights gathered from the first forward of a step to its last backward; level 3 gathers them for every
use. As in torchtitan, the head's weights stay gathered between its forward and its backward, which comes next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from benchmarks.peers.model import Decoder
from benchmarks.peers.single import Placed

__all__ = ["placed", "sharded"]


def sharded(model: Decoder, mesh: DeviceMesh, level: int) -> Any:
    """The model with its parameters split over `mesh`; everything is in the parameters' dtype."""
    gathers_again = level == 3
    if model.tok_embeddings is not None:
        fully_shard(model.tok_embeddings, mesh=mesh, reshard_after_forward=gathers_again)
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=gathers_again)
    if model.norm is not None and model.output is not None:
        fully_shard([model.norm, model.output], mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


def placed(model: Decoder, mesh: DeviceMesh, level: int, reduce_every: str) -> Placed:
    """Gradients are reduced after every backward, or, with `reduce_every` "step", whole ones after the last."""
    module = sharded(model, mesh, level)

    @contextlib.contextmanager
    def around(last: bool) -> Iterator[None]:
        module.set_requires_gradient_sync(last or reduce_every == "micro_batch")
        module.set_is_last_backward(last)
        module.set_reshard_after_backward(last or level == 3)
        yield

    return Placed(module=module, around=around)
