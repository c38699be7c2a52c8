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

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.instead import called_instead
from plans.errors import TwofoldError

__all__ = ["flex_attention_by_formula"]


@contextlib.contextmanager
def flex_attention_by_formula() -> Iterator[None]:
    """Within this context `flex_attention` and `create_block_mask` run as the formula that they state."""
    flex: Any = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is None:  # nothing calls it; importing it takes a while
        yield
        return
    with called_instead({flex.flex_attention: _attention, flex.create_block_mask: _block_mask}):
        yield


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
    if seen is None:
        return scores.softmax(-1) @ value
    # a query that sees no key: torch's result is 0, the softmax of nothing but -inf would be NaN
    some = seen.any(-1, keepdim=True)
    weights = scores.masked_fill(~seen & some, -torch.inf).softmax(-1)
    return weights.masked_fill(~some, 0) @ value
