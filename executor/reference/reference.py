"""Single-process training by autograd and torch.optim, and comparison of a run with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from executor.autocast import autocast_as_casts
from executor.flex import flex_attention_by_formula
from executor.kernels.context import torch_dtype
from executor.loss_of import loss_of
from executor.reference.random import PlannedRandom
from executor.weights.initial import initialised_copy
from plans.errors import TwofoldError
from plans.model.graph import Graph
from plans.optimizer import Optimizer

__all__ = ["Difference", "Reference", "compare_losses", "compare_weights", "train_reference"]


class Reference(NamedTuple):
    """The result of single-process training: the loss of every step, and the final weights and buffers by name."""

    losses: tuple[float, ...]
    weights: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Relative differences: the largest, its position, and all of them in order."""

    max_rel_diff: float
    where: str
    rel_diffs: Mapping[str, float]


def train_reference(
    module: nn.Module,
    batches: Iterable[Sequence[Any]],
    *,
    optimizer: Optimizer,
    num_steps: int,
    num_micro_batches: int = 1,
    seed: int | None = None,
    graph: Graph | None = None,
    nudge: int | None = None,
) -> Reference:
    """Train a copy of `module` in this process on the CPU; the module stays unchanged.

    Args:
        module: its forward returns the scalar loss, a mean over the batch (`executor.loss_of`).
        batches: one entry per step, each with the arrays or tensors of forward's arguments in order.
        optimizer: kind, settings, dtypes of gradients and master weights, clipping; how it is sharded and in which
            dtypes it reduces and keeps states has no meaning here.
        num_steps: how many batches to train on.
        num_micro_batches: into how many equal parts each batch is cut; loss and gradients are the mean over them, the
            same function as the full batch at once (1), summed in another order.
        seed: seed of the initial weights (`executor.weights.initial`).
        graph: graph of the module, to check that its dropouts are those of the graph. Dropout drops the elements that
            it drops in a run of a plan (`executor.reference.random`).
        nudge: begin with weights that are off by a few units in the last place, drawn with this seed: the difference to
            the result without it shows what rounding alone decides.

    Raises:
        TwofoldError: too few batches, a batch that is not divisible, dropouts that are not those of the graph.

    >>> from executor.train.losscell import MAELoss, WithLossCell
    >>> net = WithLossCell(nn.Linear(3, 1), MAELoss())
    >>> batch = (np.ones((4, 3), np.float32), np.zeros(4, np.float32))
    >>> len(train_reference(net, [batch] * 2, optimizer=Optimizer(), num_steps=2).losses)
    2
    """
    if num_steps < 0 or num_micro_batches < 1:
        raise TwofoldError(
            f"num_steps={num_steps} must be at least 0 and num_micro_batches={num_micro_batches} at least 1"
        )
    model = initialised_copy(module, seed)
    if nudge is not None:
        _nudge(model, nudge)
    updates = _Updates(
        optimizer, {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    )
    random = PlannedRandom(graph)
    losses: list[float] = []
    source = iter(batches)
    while len(losses) < num_steps:
        batch = next(source, None)
        if batch is None:
            raise TwofoldError(f"{num_steps} steps need {num_steps} batches, got {len(losses)}")
        total = 0.0
        for number, micro_batch in enumerate(_micro_batches(batch, num_micro_batches)):
            with (
                random.forward(step=len(losses) + 1, micro_batch=number),
                autocast_as_casts(only_absent=True),
                flex_attention_by_formula(),
            ):
                loss = loss_of(model(*micro_batch), type(model).__name__)
            (loss / num_micro_batches).backward()
            updates.accumulate()
            total += loss.item()
        updates.step()
        losses.append(total / num_micro_batches)
    weights = {name: updates.updated(parameter).clone() for name, parameter in model.named_parameters()}
    weights |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    return Reference(losses=tuple(losses), weights=weights)


_NUDGE_ULPS = 8
"""Units in the last place: the accumulated rounding of a few operators."""


def _nudge(model: nn.Module, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            ulps = torch.randint(-_NUDGE_ULPS, _NUDGE_ULPS + 1, parameter.shape, generator=random)
            parameter.mul_(1 + ulps.to(parameter.dtype) * torch.finfo(parameter.dtype).eps)


class _Updates:
    """Accumulates gradients in their dtype, clips them and updates (master) weights by torch.optim."""

    def __init__(self, optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> None:
        self.optimizer, self.parameters = optimizer, list(named.values())
        self.sums: dict[nn.Parameter, torch.Tensor] = {}
        self.masters = {parameter: self._master(parameter) for parameter in self.parameters}
        masters = {name: self.masters[parameter] for name, parameter in named.items()}
        self.update = _torch_optimizer(optimizer, masters)

    def _master(self, parameter: nn.Parameter) -> nn.Parameter:
        dtype = torch_dtype(self.optimizer.updates_in(_dtype_of(parameter)))
        return parameter if dtype == parameter.dtype else nn.Parameter(parameter.detach().to(dtype))

    def accumulate(self) -> None:
        """Add the gradients of a backward to the accumulated ones."""
        for parameter in self.parameters:
            if parameter.grad is None:
                continue
            if parameter in self.sums:
                self.sums[parameter].add_(parameter.grad)
            else:
                dtype = torch_dtype(self.optimizer.accumulates_in(_dtype_of(parameter)))
                self.sums[parameter] = parameter.grad.to(dtype, copy=True)
            parameter.grad = None

    def step(self) -> None:
        """Clip the gradients, update the master weights and round them to the weights' dtypes."""
        for parameter, master in self.masters.items():
            total = self.sums.pop(parameter, None)
            master.grad = None if total is None else total.to(master.dtype)
        if self.optimizer.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.masters.values(), self.optimizer.clip_norm, foreach=False)
        self.update.step()
        for parameter, master in self.masters.items():
            master.grad = None
            if master is not parameter:
                parameter.data.copy_(master.data)

    def updated(self, parameter: nn.Parameter) -> torch.Tensor:
        """The master weight of a parameter, or the weight itself."""
        return self.masters.get(parameter, parameter).detach()


def _dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def compare_losses(actual: Sequence[float], expected: Sequence[float]) -> Difference:
    """|actual - expected| / |expected| of every step; a loss that is not a number is infinitely far off.

    >>> compare_losses([2.0, 1.1], [2.0, 1.0]).where
    'step 2'
    """
    if len(actual) != len(expected) or not expected:
        raise TwofoldError(f"{len(actual)} losses cannot be compared with {len(expected)}")
    pairs = enumerate(zip(actual, expected, strict=True), start=1)
    return _greatest({f"step {step}": _relative(abs(one - other), abs(other)) for step, (one, other) in pairs})


def compare_weights(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> Difference:
    """Per tensor the norm of the difference over the norm of `expected`, in double precision.

    Args:
        actual: name -> tensor or array.
        expected: the same names and shapes.

    Raises:
        TwofoldError: other names or shapes.

    >>> compare_weights({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([3.0, 5.0])}).where
    'w'
    """
    if set(actual) != set(expected) or not expected:
        odd = sorted(set(actual) ^ set(expected))
        raise TwofoldError(f"weights can be compared only under equal names; in one of the two alone: {odd}")
    found: dict[str, float] = {}
    for name, reference in expected.items():
        mine, theirs = _array(actual[name]), _array(reference)
        if mine.shape != theirs.shape:
            raise TwofoldError(f"the weight {name!r} has the shape {mine.shape}, expected {theirs.shape}")
        found[name] = _relative(float(np.linalg.norm(mine - theirs)), float(np.linalg.norm(theirs)))
    return _greatest(found)


def _relative(difference: float, norm: float) -> float:
    if difference == 0:
        return 0.0
    return difference / norm if math.isfinite(difference) and math.isfinite(norm) and norm > 0 else math.inf


def _greatest(found: dict[str, float]) -> Difference:
    where = max(found, key=lambda name: found[name])
    return Difference(max_rel_diff=found[where], where=where, rel_diffs=found)


def _array(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach().to("cpu", torch.float64).numpy()
    return np.asarray(value, np.float64)


def _micro_batches(batch: Sequence[Any], count: int) -> list[tuple[torch.Tensor, ...]]:
    # Copied: a forward may write into its inputs, and torch warns of arrays that must not be written.
    tensors = [part.clone() if isinstance(part, torch.Tensor) else torch.from_numpy(np.array(part)) for part in batch]
    for tensor in tensors:
        if tensor.dim() == 0 or tensor.shape[0] % count:
            raise TwofoldError(f"{count} micro-batches do not divide a batch of shape {tuple(tensor.shape)}")
    return list(zip(*(tensor.chunk(count) for tensor in tensors), strict=True))


def _torch_optimizer(optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    settings: dict[str, Any] = dict(optimizer.settings)
    groups: dict[tuple[tuple[str, float], ...], list[nn.Parameter]] = {}
    for name, parameter in named.items():
        own = optimizer.settings_of(name)
        own["lr"] *= own.pop("lr_scale", 1.0)
        groups.setdefault(tuple((key, own[key]) for key in ("lr", "weight_decay") if key in own), []).append(parameter)
    parameters: list[dict[str, Any]] = [dict(own) | {"params": group} for own, group in groups.items()]
    if optimizer.kind == "adamw":
        betas = (settings.pop("beta1", 0.9), settings.pop("beta2", 0.999))
        return torch.optim.AdamW(parameters, betas=betas, **settings)
    if optimizer.kind == "momentum":
        nesterov = bool(settings.pop("nesterov", False))
        return torch.optim.SGD(parameters, **{"momentum": 0.9, **settings}, nesterov=nesterov)
    return torch.optim.SGD(parameters, **settings)
