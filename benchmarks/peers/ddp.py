"""Data parallelism by DistributedDataParallel: replicas, gradients reduced in buckets of 25 MiB next to the
backward."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.single import Placed

__all__ = ["placed", "replicated"]


def replicated(model: nn.Module, group: Any) -> DistributedDataParallel:
    """The module, its gradients views of the buckets, so that nothing is copied in or out."""
    return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)


def placed(model: nn.Module, group: Any) -> Placed:
    """Gradients are accumulated over micro-batches and reduced with the last one."""
    module = replicated(model, group)
    return Placed(module=module, around=lambda last: contextlib.nullcontext() if last else module.no_sync())
