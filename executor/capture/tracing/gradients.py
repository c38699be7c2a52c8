"""Constructs that change the training without appearing in the graph: refused, or made to appear.

A plan makes each operator's gradient itself, from its forward, and updates each parameter separately. Hooks on
gradients, parts of a forward without gradients and parameters in shared memory leave no trace in what torch.export
writes down: the first forward would be right and the training silently another.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import nn

from plans.errors import TwofoldError

__all__ = ["check_hooks", "check_memory", "refusing_own_gradients", "switching_gradients"]

_WHY = "a plan derives gradients from the operators of the forward"


def check_hooks(module: nn.Module) -> None:
    """Refuse hooks on gradients.

    Raises:
        TwofoldError: a parameter or a part of the module has some.
    """
    for path, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise TwofoldError(f"the parameter {path!r} has hooks on its gradient, but {_WHY}; remove them")
    for path, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise TwofoldError(f"{type(part).__name__} {path!r} has backward hooks, but {_WHY}; remove them")


def check_memory(module: nn.Module) -> None:
    """Refuse trained parameters whose memory other parameters or buffers share.

    Raises:
        TwofoldError: an update of one would change the other.
    """
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    placed: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.layout is torch.strided and tensor.numel():
            first = int(tensor.storage_offset())
            last = first + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            placed.setdefault(tensor.untyped_storage()._cdata, []).append((first, int(last), name))
    for places in placed.values():
        for (first, last, name), (other_first, other_last, other) in itertools.combinations(places, 2):
            if not trained.isdisjoint((name, other)) and first <= other_last and other_first <= last:
                raise TwofoldError(
                    f"{name!r} and {other!r} share memory, so that an update of one changes the other; use one "
                    f"parameter for both, or copy: {other.rpartition('.')[2]} = {name.rpartition('.')[2]}.clone()"
                )


@contextlib.contextmanager
def refusing_own_gradients() -> Iterator[None]:
    """Within this context, refuse a forward that hooks, computes or disables gradients."""

    def hook(self: torch.Tensor, *_: Any, **__: Any) -> NoReturn:
        raise TwofoldError(
            f"the forward registers a hook on the gradient of a tensor {tuple(self.shape)}, but {_WHY}; omit it"
        )

    def run_backward(*_: Any, **__: Any) -> NoReturn:
        raise TwofoldError(f"the forward runs a backward, but {_WHY}; take derivatives with torch.autograd.grad")

    before = torch.inference_mode.__enter__

    def enter(self: torch.inference_mode) -> None:
        if self.mode:
            raise TwofoldError(
                "the forward uses torch.inference_mode, where nothing has a gradient; freeze the parameters instead: "
                "requires_grad_(False)"
            )
        before(self)

    with (
        mock.patch.object(torch.Tensor, "register_hook", hook),
        mock.patch.object(torch.autograd, "_engine_run_backward", run_backward),
        mock.patch.object(torch.inference_mode, "__enter__", enter),
    ):
        yield


_SWITCH = torch.Tensor.requires_grad_
_REQUIRES_GRAD: Any = torch._C.TensorBase.requires_grad


@contextlib.contextmanager
def switching_gradients(module: nn.Module) -> Iterator[None]:
    """Within this context, a parameter whose `requires_grad` the forward sets to False is read without gradients until
    it is set to True again, as a discriminator is where a generator is trained through it."""
    frozen: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters and what is read in their place

    def put(held: torch.Tensor, tensor: torch.Tensor) -> bool:
        places = [(part, name) for part in module.modules() for name, each in part._parameters.items() if each is held]
        for part, name in places:
            part._parameters[name] = tensor  # type: ignore[assignment]
        return bool(places)

    def is_switched(tensor: torch.Tensor, trains: bool) -> bool:
        for at, (parameter, without) in enumerate(frozen):
            if tensor is parameter or tensor is without:
                if trains:
                    put(*reversed(frozen.pop(at)))
                return True
        name = next((name for name, each in module.named_parameters() if each is tensor), None)
        if name is None or tensor.requires_grad == trains:
            return False
        if trains:
            raise TwofoldError(
                f"the forward starts to train {name!r}, which is frozen: requires_grad_(True) before the capture, and "
                f"detach() what is not trained"
            )
        frozen.append((tensor, tensor.detach()))
        put(*frozen[-1])
        return True

    def switch(tensor: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
        return tensor if is_switched(tensor, requires_grad) else _SWITCH(tensor, requires_grad)

    def write(tensor: torch.Tensor, requires_grad: bool) -> None:
        if not is_switched(tensor, requires_grad):
            _REQUIRES_GRAD.__set__(tensor, requires_grad)

    with (
        mock.patch.object(torch.Tensor, "requires_grad", property(_REQUIRES_GRAD.__get__, write)),
        mock.patch.object(torch.Tensor, "requires_grad_", switch),
        mock.patch.object(torch.Tensor, "__deepcopy__", _copied),
    ):
        yield
    for parameter, without in frozen:
        put(without, parameter)


def _copied(tensor: torch.Tensor, memo: dict[int, torch.Tensor]) -> torch.Tensor:
    """A copy that is trained by nobody, as `copy.deepcopy` makes it."""
    copy = tensor.detach().clone()
    memo[id(tensor)] = copy
    return copy.requires_grad_() if tensor.requires_grad else copy
