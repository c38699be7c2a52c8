"""torch's flex attention by its formula: its kernel has no graph on the meta device, and no backward on the CPU.

The functions of scores and masks are called once, with positions that broadcast against each other, instead of for
every pair under `vmap`.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from plans.errors import TwofoldError

__all__ = ["flex_attention_by_formula"]


def _call_attention(*args: Any, **kwargs: Any) -> Any:
    return twofold_attention(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


def _call_block_mask(*args: Any, **kwargs: Any) -> Any:
    return twofold_block_mask(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


@contextlib.contextmanager
def flex_attention_by_formula() -> Iterator[None]:
    """Within this context `flex_attention` and `create_block_mask` compute what they mean, by whatever name a module
    imported them."""
    flex: Any = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is None:  # nothing calls it; to import it takes a while
        yield
        return
    instead = {flex.flex_attention: _call_attention, flex.create_block_mask: _call_block_mask}
    before = {function: function.__code__ for function in instead}
    with (
        mock.patch.object(flex, "twofold_attention", _attention, create=True),
        mock.patch.object(flex, "twofold_block_mask", _block_mask, create=True),
    ):
        try:
            for function, other in instead.items():
                function.__code__ = other.__code__
            yield
        finally:
            for function, code in before.items():
                function.__code__ = code


def _block_mask(mask_mod: Callable[..., Tensor], *_: Any, **__: Any) -> Any:
    """What `flex_attention` reads of a block mask: its function."""
    return types.SimpleNamespace(mask_mod=mask_mod)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor] | None = None, block_mask: Any = None,
    scale: float | None = None, enable_gqa: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    """Attention of queries [batch, heads, queries, size] whose scores and mask are functions of the positions."""
    if options.get("return_lse") or options.get("return_aux") is not None:
        raise TwofoldError("flex_attention with return_lse or return_aux is not supported; read its result alone")
    batch, heads, queries, size = query.shape
    places = tuple(
        torch.arange(count, device=query.device).view([-1 if dim == at else 1 for dim in range(4)])
        for at, count in enumerate((batch, heads, queries, key.shape[2]))
    )
    seen = None if block_mask is None else block_mask.mask_mod(*places)
    if score_mod is None:
        return F.scaled_dot_product_attention(query, key, value, seen, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        key, value = (each.repeat_interleave(heads // key.shape[1], 1) for each in (key, value))
    scores = score_mod(query @ key.mT * (size**-0.5 if scale is None else scale), *places)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ value
