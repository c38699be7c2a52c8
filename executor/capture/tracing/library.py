"""Replacements for layers whose implementation a plan cannot express, used during capture.

torch's embedding bags flatten the batch, and the experts of transformers sort the tokens of all samples. The
replacements compute the same sample by sample and token by token; `executor.capture.rules.recurrent` has recurrent
layers. Overlapping windows that a forward reads by strides are taken along a dim.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import operator
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from executor.capture.rules.own_kernels import kernels_of_samples_as_products
from executor.capture.rules.recurrent import recurrent_layers_one_by_one
from executor.capture.tracing.written_numbers import numbers_as_calls
from executor.instead import called_instead
from plans.errors import TwofoldError

__all__ = ["in_other_forms"]

_LIBRARY = torch.library.Library("twofold", "FRAGMENT")
_LIBRARY.define(
    "ctc_loss(Tensor chances, Tensor labels, Tensor times, Tensor lengths, int blank, int reduction, bool infinite) "
    "-> Tensor"
)

_EXPERTS = "_experts_implementation_internal"
"""Attribute of transformers' configurations that selects the implementation of experts."""


@contextlib.contextmanager
def in_other_forms(module: nn.Module) -> Iterator[None]:
    """Within this context the layers of `module` that are named above run in a form that can be captured."""
    configs = {
        id(submodule.config): submodule.config
        for submodule in module.modules()
        if getattr(getattr(submodule, "config", None), _EXPERTS, None) is not None
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(recurrent_layers_one_by_one())
        stack.enter_context(kernels_of_samples_as_products())
        stack.enter_context(called_instead({F.embedding_bag: _bag}))
        with torch.device("meta"):
            torch.empty(0)  # torch then looks up, once, which functions a device is given to: torch's own torch.tensor
        for kind in {type(submodule) for submodule in module.modules()}:
            for name, forward in _SORTED_EXPERTS.items():
                if kind.__name__ == name and kind.__module__.startswith("transformers."):
                    stack.enter_context(mock.patch.object(kind, "forward", forward))
        stack.enter_context(mock.patch.object(torch, "ctc_loss", _ctc_loss))
        stack.enter_context(mock.patch.object(F, "gaussian_nll_loss", _gaussian_nll_loss))
        stack.enter_context(numbers_as_calls())
        stack.enter_context(mock.patch.object(Tensor, "as_strided", _windows))
        stack.enter_context(mock.patch.object(torch, "as_strided", _windows))
        stack.enter_context(mock.patch.object(torch.distributions.Distribution, "_validate_args", False))
        for config in configs.values():
            stack.enter_context(mock.patch.object(config, _EXPERTS, "batched_mm"))
        yield


_STRIDED = torch.as_strided
_TORCH = os.path.dirname(torch.__file__) + os.sep


def _windows(
    input: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:  # fmt: skip
    """Overlapping windows along a dim, such as the chunks of Longformer; all else as torch does it."""
    if sys._getframe(1).f_code.co_filename.startswith(_TORCH):  # which makes windows along a dim like this
        return _STRIDED(input, size, stride, storage_offset)
    size, stride = [operator.index(each) for each in size], [operator.index(each) for each in stride]
    own = list(input.stride())
    changed = [at for at in range(len(size) - 1) if len(own) == len(size) and stride[at] != own[at]]
    changed += [at for at in range(len(size) - 1) if stride[at] < size[at + 1] * stride[at + 1]]
    if (
        changed
        and not storage_offset
        and min((*size, *stride)) > 0
        and stride[changed[0]] % stride[changed[0] + 1] == 0
    ):
        at = changed[0]
        rows, window, step = _rows(input, size, stride, at), size[at + 1], stride[at] // stride[at + 1]
        if rows is not None and (rows.shape[at] - window) // step + 1 >= size[at]:
            windows = rows.unfold(at, window, step).narrow(at, 0, size[at])
            dims = list(range(windows.dim()))
            return windows.permute(*dims[: at + 1], dims[-1], *dims[at + 1 : -1])
    return _STRIDED(input, size, stride, storage_offset)


def _rows(input: Tensor, size: Sequence[int], stride: Sequence[int], at: int) -> Tensor | None:
    """The tensor whose dim `at` has windows of these strides; None if there is none."""
    around, inner = [*range(at), *range(at + 2, len(size))], stride[at + 1]
    if input.dim() == len(size) and input.stride(at) == input.shape[at + 1] * inner:  # cut into parts before
        held = [(input.shape[each], input.stride(each)) for each in around]
        rows = input.flatten(at, at + 1) if input.stride(at + 1) == inner else None
    else:
        outer = math.prod(size[:at])
        length = input.numel() // outer
        fits = input.is_contiguous() and length * outer == input.numel() and length % inner == 0
        rows = input.reshape(*size[:at], length // inner, *size[at + 2 :]) if fits else None
        dims = [dim for dim in range(len(size) - 1) if dim != at]
        held = [] if rows is None else [(rows.shape[dim], rows.stride(dim)) for dim in dims]
    return rows if held == [(size[each], stride[each]) for each in around] else None


@torch.library.impl(_LIBRARY, "ctc_loss", "CompositeExplicitAutograd")
def _shape_of_ctc_loss(chances: Tensor, *rest: Any) -> Tensor:
    return chances.new_empty(() if rest[4] else chances.shape[1:2])


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """torch's own has no shape on the meta device. Lengths are made a tensor."""
    if log_probs.dim() != 3 or targets.dim() != 2:
        raise TwofoldError("a CTC loss needs log_probs [time, batch, classes] and padded targets [batch, labels]")
    lengths = []
    for given in (input_lengths, target_lengths):
        if not isinstance(given, Tensor):
            if len(set(given)) != 1:
                raise TwofoldError("the lengths of a CTC loss must be a tensor, an input of the forward, unless equal")
            given = torch.full((len(given),), given[0], dtype=torch.int64, device=log_probs.device)
        lengths.append(given)
    return torch.ops.twofold.ctc_loss(log_probs, targets, *lengths, blank, reduction, zero_infinity)


def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """torch's formula, without its check that no variance is negative, which reads values."""
    spread = var if isinstance(var, Tensor) else torch.full_like(input, var)
    if spread.dim() == input.dim() - 1:
        spread = spread.unsqueeze(-1)
    spread = spread + (spread.clamp(min=eps) - spread).detach()  # as if there were no clamp to the gradient
    terms = 0.5 * (spread.log() + (input - target).square() / spread)
    if full:
        terms = terms + 0.5 * math.log(2 * math.pi)
    return terms.mean() if reduction == "mean" else terms.sum() if reduction == "sum" else terms


def _chosen_experts(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The router of JetMoE for tokens in their order: it sorts them by expert, and counts the tokens of each."""
    logits = self.layer(hidden_states).float()
    best, chosen = logits.topk(self.top_k, dim=1)
    gates = torch.softmax(best, dim=1).type_as(hidden_states)
    order = torch.arange(chosen.numel(), device=chosen.device)
    return order, order.div(self.top_k, rounding_mode="trunc"), gates.flatten(), chosen.flatten(), logits


def _of_chosen_experts(self: Any, inputs: Tensor, chosen: Tensor) -> Tensor:
    """The experts of JetMoE for tokens in their order, with the expert of each in place of the counts."""
    return torch.bmm(self.weight[chosen], inputs.unsqueeze(-1)).squeeze(-1)


_SORTED_EXPERTS = {"JetMoeTopKGating": _chosen_experts, "JetMoeParallelExperts": _of_chosen_experts}


_BAG_ARGUMENTS = inspect.signature(F.embedding_bag)


def _bag(*arguments: Any, **named: Any) -> Tensor:
    """Rows of every sample, and their sum, mean or maximum; those of `padding_idx` do not count. Takes the arguments of
    `F.embedding_bag`."""
    given = _BAG_ARGUMENTS.bind(*arguments, **named)
    given.apply_defaults()
    options = given.arguments
    input, weight, mode, padding_idx = (options[name] for name in ("input", "weight", "mode", "padding_idx"))
    if options["offsets"] is not None or input.dim() != 2 or options["max_norm"] is not None:
        raise TwofoldError(
            "bags of embeddings are supported for ids [batch, bag] only, without offsets and max_norm: pad bags of "
            "several lengths to one length with the id padding_idx"
        )
    rows = F.embedding(input, weight, scale_grad_by_freq=options["scale_grad_by_freq"])
    if options["per_sample_weights"] is not None:
        rows = rows * options["per_sample_weights"].unsqueeze(-1)
    if padding_idx is None:
        return rows.amax(1) if mode == "max" else rows.mean(1) if mode == "mean" else rows.sum(1)
    counts = (input != padding_idx % len(weight)).unsqueeze(-1)
    if mode == "max":  # 0 where all ids are padding
        return rows.masked_fill(~counts, -torch.inf).amax(1).masked_fill(~counts.any(1), 0)
    total = rows.masked_fill(~counts, 0).sum(1)
    return total / counts.sum(1).clamp(min=1) if mode == "mean" else total
