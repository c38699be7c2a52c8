"""Two halves of a batch on two streams, written by hand: a stack of tensor-parallel decoder blocks in plain torch.

Forward and backward of all blocks, without rotary positions, embedding, head and optimizer. Each half runs block after
block on a separate stream, issued in turns, so that one computes while the other's sum over ranks is under way.
Weight gradients of the second half are added to those of the first. With one slice it is the usual tensor-parallel
stack.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers.model import Block
from executor.device import Device
from plans.model.transformer import TransformerConfig

__all__ = ["TwoStreams"]


class _SumBackward(torch.autograd.Function):
    """The same forward; the gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _summed(gradient.contiguous())


class _SumForward(torch.autograd.Function):
    """Summed over ranks; the same gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _summed(x.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _summed(x: Tensor) -> Tensor:
    """In place."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


class _SplitBlock(Block):
    """A block whose heads and inner columns are split over ranks; the weights here are this rank's."""

    def forward(self, x: Tensor, turns: Tensor | None) -> Tensor:
        x = x + _SumForward.apply(self.attention(_SumBackward.apply(self.attention_norm(x)), turns))
        made: Tensor = x + _SumForward.apply(self.feed_forward(_SumBackward.apply(self.ffn_norm(x))))
        return made


class TwoStreams:
    """The stack on one rank.

    Args:
        config: of the complete model; `num_layers` blocks.
        micro_batch: sequences of a step.
        slices: 1 or 2.
        device: device of this rank.
        ranks: over which blocks are split.

    Attributes:
        gradients: of all weights, block by block, after a step.
    """

    def __init__(self, config: TransformerConfig, micro_batch: int, slices: int, device: Device, ranks: int) -> None:
        local = replace(
            config, num_heads=config.num_heads // ranks, num_kv_heads=None, head_dim=config.head_size,
            ffn=config.inner // ranks,
        )  # fmt: skip
        where, dtype = device.torch_device, getattr(torch, config.dtype)
        torch.manual_seed(0)  # the same part on every rank: only time counts, and that the slices agree
        with torch.device(where):
            self._blocks = [_SplitBlock(local).to(dtype) for _ in range(config.num_layers)]
            self._x = torch.randn(micro_batch, config.seq, config.hidden).to(dtype)
            self._gradient = torch.randn(micro_batch, config.seq, config.hidden).to(dtype) / config.hidden
        self._weights = [list(block.parameters()) for block in self._blocks]
        self._device = device
        self._streams = [None, *(device.stream() for _ in range(slices - 1))]
        self.gradients: list[list[Tensor]] = []

    def step(self) -> None:
        """Forward and backward of the full micro-batch."""
        device, slices = self._device, range(len(self._streams))
        self._meet(first=True)
        xs, gradients = list(self._x.chunk(len(slices))), list(self._gradient.chunk(len(slices)))
        kept: list[list[tuple[Tensor, Tensor]]] = []
        for block in self._blocks:
            kept.append([])
            for at in slices:
                with device.on(self._streams[at]), torch.enable_grad():
                    x = xs[at].detach().requires_grad_()
                    y = block(x, None)
                    kept[-1].append((x, y))
                    xs[at] = y
        self.gradients = []
        for block_kept, weights in zip(reversed(kept), reversed(self._weights), strict=True):
            whole: list[Tensor] = []
            made = None
            for at in slices:
                with device.on(self._streams[at]):
                    x, y = block_kept[at]
                    gradients[at], *own = torch.autograd.grad(y, [x, *weights], gradients[at])
                    if whole:
                        device.wait_for(made)
                        torch._foreach_add_(whole, own)
                    else:
                        whole, made = own, device.point()
            self.gradients.append(whole)
            block_kept.clear()
        self._meet(first=False)

    def _meet(self, *, first: bool) -> None:
        """Let the other streams begin behind the current one, or this one continue behind them."""
        device = self._device
        for stream in self._streams[1:]:
            if first:
                point = device.point()
                with device.on(stream):
                    device.wait_for(point)
            else:
                with device.on(stream):
                    point = device.point()
                device.wait_for(point)
