"""Translates torch optimizers, with their parameter groups, into the optimizer of a plan."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from plans.errors import TwofoldError
from plans.optimizer import Optimizer, ParameterGroup

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = ["optimizer_of_torch"]

_OWN = ("params", "lr", "weight_decay", "foreach", "fused", "param_names")
"""Keys of a parameter group that may differ from those of the first group."""


def optimizer_of_torch(given: Any, module: Module) -> Optimizer:
    """The optimizer of a plan for a torch optimizer over the parameters of a module.

    Args:
        given: torch.optim.SGD or AdamW; its parameter groups may differ in learning rate and weight decay.
        module: whose trained parameters the optimizer has.

    Raises:
        TwofoldError: another optimizer, unsupported settings, a trained parameter that the optimizer does not have.

    >>> import torch
    >>> net = torch.nn.Linear(2, 1)
    >>> groups = [{"params": [net.weight]}, {"params": [net.bias], "lr": 0.05}]
    >>> optimizer_of_torch(torch.optim.SGD(groups, lr=0.1), net).groups
    (ParameterGroup(parameters=('bias',), weight_decay=0.0, lr_scale=0.5),)
    """
    name = type(given).__name__
    if name not in ("SGD", "AdamW") or not hasattr(given, "param_groups"):
        raise TwofoldError(f"optimizer {name} is not supported; use torch.optim.SGD or torch.optim.AdamW")
    names = {id(parameter): name for name, parameter in module.named_parameters() if parameter.requires_grad}
    held = {id(parameter) for group in given.param_groups for parameter in group["params"]}
    if missing := [name for key, name in names.items() if key not in held]:
        raise TwofoldError(
            f"the optimizer does not have the parameter {missing[0]!r}; pass it too, or set its requires_grad to False"
        )
    first, *others = given.param_groups
    kind, settings = _kind_and_settings(name, first)
    groups = tuple(_group(number, group, first, names) for number, group in enumerate(others, 2))
    return Optimizer(kind=kind, settings=settings, groups=tuple(group for group in groups if group is not None))


def _group(
    number: int, group: Mapping[str, Any], first: Mapping[str, Any], names: Mapping[int, str]
) -> ParameterGroup | None:
    """A parameter group after the first one; None if it has no trained parameter of the module."""
    if odd := [key for key in first if key not in _OWN and group[key] != first[key]]:
        raise TwofoldError(
            f"parameter group {number} of the optimizer has {odd[0]}={group[odd[0]]!r}, group 1 has {first[odd[0]]!r}; "
            "groups may differ in lr and weight_decay only"
        )
    if not first["lr"]:
        raise TwofoldError("parameter group 1 of the optimizer has lr=0; set requires_grad of its parameters to False")
    parameters = tuple(glob.escape(names[id(each)]) for each in group["params"] if id(each) in names)
    if not parameters:
        return None
    return ParameterGroup(
        parameters=parameters, weight_decay=float(group["weight_decay"]),
        lr_scale=float(group["lr"]) / float(first["lr"]),
    )  # fmt: skip


def _kind_and_settings(name: str, group: Mapping[str, Any]) -> tuple[str, dict[str, float]]:
    """The kind and settings of a parameter group of torch.optim.SGD or AdamW."""
    for switch in ("nesterov", "amsgrad", "maximize"):
        if group.get(switch):
            raise TwofoldError(f"{name}({switch}=True) is not supported; omit it")
    values = {"lr": float(group["lr"]), "weight_decay": float(group.get("weight_decay", 0.0))}
    if name == "AdamW":
        beta1, beta2 = group["betas"]
        return "adamw", values | {"beta1": float(beta1), "beta2": float(beta2), "eps": float(group["eps"])}
    if group.get("dampening"):
        raise TwofoldError("SGD(dampening=...) is not supported; leave it at 0")
    if group.get("momentum"):
        return "momentum", values | {"momentum": float(group["momentum"])}
    return "sgd", values
