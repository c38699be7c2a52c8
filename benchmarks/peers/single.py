"""The peers' training step: micro-batches one after the other, then one fused AdamW; on one device nothing else.

`Placed` is what the parallel parts (ddp, fsdp, tensor) make of a model: where its gradients are reduced, and in which
context the loss is taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.peers.model import Decoder
from plans.optimizer import Optimizer

__all__ = ["Placed", "Rows", "adamw", "compile_blocks", "step_of"]

Around = Callable[[bool], contextlib.AbstractContextManager[object]]
"""A context for a micro-batch, which knows whether it is the last of its step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A model under torch's parallel parts.

    Args:
        module: to call.
        around: each micro-batch's forward and backward.
        loss_around: the loss and the backward of each micro-batch.
    """

    module: nn.Module
    around: Around = lambda last: contextlib.nullcontext()
    loss_around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Which samples of a step a data-parallel rank takes: of every micro-batch its part, as the plan has it.

    >>> Rows(micro_batch=1, dp=2, index=1, count=3).of(torch.arange(6)).tolist()
    [1, 3, 5]
    """

    micro_batch: int
    dp: int
    index: int
    count: int

    def of(self, batch: Tensor) -> Tensor:
        """Its rows of [batch, ...], those of the first micro-batch first."""
        parts = batch.unflatten(0, (self.count, self.dp, self.micro_batch))
        return parts[:, self.index].flatten(0, 1).contiguous()


def compile_blocks(model: Decoder) -> None:
    """Compile every block in place."""
    for block in model.layers.values():
        block.compile(dynamic=False)


def adamw(parameters: Iterable[Tensor], optimizer: Optimizer) -> torch.optim.AdamW:
    """torch's AdamW with the plan's settings, fused on accelerators.

    Distributed and plain tensors are separate groups: the fused update takes either.
    """
    groups: dict[type, list[Tensor]] = {}
    for weight in parameters:
        groups.setdefault(type(weight.data), []).append(weight)
    is_cpu = all(weight.device.type == "cpu" for group in groups.values() for weight in group)
    return torch.optim.AdamW(
        [{"params": group} for group in groups.values()],
        lr=optimizer.settings["lr"],
        betas=(optimizer.settings.get("beta1", 0.9), optimizer.settings.get("beta2", 0.999)),
        eps=optimizer.settings.get("eps", 1e-8),
        weight_decay=optimizer.settings.get("weight_decay", 1e-2),
        fused=not is_cpu,
    )


def step_of(
    placed: Placed, optimizer: Optimizer, loss: Callable[[Tensor, Tensor], Tensor], num_micro_batches: int
) -> Callable[[Sequence[Tensor]], Tensor]:
    """One training step on this rank's tokens and labels, [rows, seq] on its device; returns the mean of its losses."""
    update = adamw(placed.module.parameters(), optimizer)

    def step(batch: Sequence[Tensor]) -> Tensor:
        tokens, labels = (each.chunk(num_micro_batches) for each in batch)
        losses = []
        for number in range(num_micro_batches):
            with placed.around(number == num_micro_batches - 1):
                logits = placed.module(tokens[number])
                with placed.loss_around():
                    value = loss(logits, labels[number]) / num_micro_batches
                    del logits  # only the backward needs it
                    value.backward()
                losses.append(value.detach())
        update.step()
        update.zero_grad()
        return torch.stack(losses).sum()

    return step
