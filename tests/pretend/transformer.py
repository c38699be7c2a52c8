"""The operators of a transformer for `pretend`: formulas on float64 tensors, gradients by autograd of the formula.

They know of their place only what `attrs["part"]` says: which part of a named dim a rank has.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tests.pretend.operators import RULES

Array = np.ndarray
Attrs = Mapping[str, Any]
Formula = Callable[..., torch.Tensor]


def norm(kind: str) -> Formula:
    def layer(attrs: Attrs, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], *rest, eps=attrs["eps"])

    def rms(attrs: Attrs, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + attrs["eps"]) * weight

    return layer if kind == "layer_norm" else rms


def rope(attrs: Attrs, x: torch.Tensor) -> torch.Tensor:
    """As a product of complex numbers."""
    rotary, length = attrs.get("rotary", x.shape[-1]), x.shape[-3]
    positions = torch.arange(length) + attrs["part"].get("s", 0) * length
    angles = torch.outer(positions, attrs["base"] ** (-torch.arange(0, rotary, 2) / rotary).double())
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    first, second = x[..., : rotary // 2], x[..., rotary // 2 : rotary]
    made = torch.complex(first, second) * turn
    return torch.cat([made.real, made.imag, x[..., rotary:]], -1)


def scores_of(attrs: Attrs, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Of [b, s, heads, d]: [b, heads, rows, columns]."""
    k, length = k.repeat_interleave(q.shape[2] // k.shape[2], 2), q.shape[1]
    scores = torch.einsum("bshd,bthd->bhst", q, k) / q.shape[-1] ** 0.5
    if attrs.get("causal"):
        rows = torch.arange(length)[:, None] + attrs["part"].get("s", 0) * length
        scores = scores.masked_fill(torch.arange(k.shape[1]) > rows, -torch.inf)
    return scores


def attention(attrs: Attrs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Of [b, s, heads, d]."""
    v = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    return torch.einsum("bhst,bthd->bshd", scores_of(attrs, q, k).softmax(-1), v)


def norm_figures(kind: str, attrs: Attrs, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What the forward of a norm keeps: the mean (of a layer norm) and the scale of every row."""
    if kind == "layer_norm":
        return x.mean(-1), (x.var(-1, correction=0) + attrs["eps"]).rsqrt()
    return (((x * x).mean(-1) + attrs["eps"]).rsqrt(),)


def made(formula: Formula) -> Callable[..., Array]:
    return lambda attrs, *inputs: formula(attrs, *map(torch.tensor, inputs)).numpy()


def gradients(formula: Formula, *wanted: int) -> Callable[..., Array | tuple[Array, ...]]:
    """Of (gradient of the output, every input)."""

    def rule(attrs: Attrs, dy: Array, *inputs: Array) -> Array | tuple[Array, ...]:
        leaves = [torch.tensor(each, requires_grad=True) for each in inputs]
        found = torch.autograd.grad(formula(attrs, *leaves), [leaves[index] for index in wanted], torch.tensor(dy))
        return found[0].numpy() if len(wanted) == 1 else tuple(each.numpy() for each in found)

    return rule


def attention_with_sums(attrs: Attrs, *inputs: Array) -> tuple[Array, Array]:
    q, k, v = map(torch.tensor, inputs)
    return attention(attrs, q, k, v).numpy(), scores_of(attrs, q, k).logsumexp(-1).numpy()


def attention_gradients(attrs: Attrs, dy: Array, *inputs: Array) -> tuple[Array, ...]:
    """Of q, k, v, the output and the sums that the forward kept, which are checked."""
    for found, made_again in zip(inputs[3:], attention_with_sums(attrs, *inputs[:3]), strict=True):
        np.testing.assert_allclose(found, made_again, rtol=1e-9)
    return gradients(attention, 0, 1, 2)(attrs, dy, *inputs[:3])  # type: ignore[return-value]


def norm_forward(kind: str) -> Callable[..., tuple[Array, ...]]:
    def rule(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
        x, *rest = map(torch.tensor, inputs)
        figures = norm_figures(kind, attrs, x)
        return norm(kind)(attrs, x, *rest).numpy(), *(each.numpy() for each in figures)

    return rule


def check_figures(kind: str, attrs: Attrs, x: Array, figures: tuple[Array, ...]) -> None:
    for found, made_again in zip(figures, norm_figures(kind, attrs, torch.tensor(x)), strict=True):
        np.testing.assert_allclose(found, made_again.numpy(), rtol=1e-9, atol=1e-12)


def norm_weight_gradient(kind: str) -> Callable[..., Array]:
    def rule(attrs: Attrs, dy: Array, x: Array, *figures: Array) -> Array:
        check_figures(kind, attrs, x, figures)
        one = np.ones(x.shape[-1])
        rest = (one, one) if kind == "layer_norm" else (one,)
        return gradients(norm(kind), 1)(attrs, dy, x, *rest)  # type: ignore[return-value]

    return rule


def norm_input_gradient(kind: str) -> Callable[..., Array]:
    def rule(attrs: Attrs, dy: Array, x: Array, weight: Array, *figures: Array) -> Array:
        check_figures(kind, attrs, x, figures)
        rest = (weight, np.zeros_like(weight)) if kind == "layer_norm" else (weight,)
        return gradients(norm(kind), 0)(attrs, dy, x, *rest)  # type: ignore[return-value]

    return rule


def rows(attrs: Attrs, ids: Array, count: int) -> tuple[Array, Array]:
    local = ids - attrs["part"].get("v", 0) * count
    mine = (local >= 0) & (local < count)
    return np.where(mine, local, 0), mine


def embedding(attrs: Attrs, ids: Array, table: Array) -> Array:
    local, mine = rows(attrs, ids, len(table))
    return table[local] * mine[..., None]


def embedding_gradient(attrs: Attrs, dy: Array, ids: Array) -> Array:
    table = np.zeros(attrs["shape"])
    local, mine = rows(attrs, ids, len(table))
    np.add.at(table, local, dy * mine[..., None])
    return table


def arange(attrs: Attrs) -> Array:
    (count,) = attrs["shape"]
    return attrs["start"] + attrs["step"] * (np.arange(count) + attrs["part"].get("d0", 0) * count)


RULES.update(  # type: ignore[attr-defined]
    {
        "rope.forward": made(rope),
        "rope.grad0": lambda attrs, dy: gradients(rope, 0)(attrs, dy, np.zeros_like(dy)),
        "attention.forward": attention_with_sums,
        "attention.grad012": attention_gradients,
        "embedding.forward": embedding,
        "embedding.grad1": embedding_gradient,
        "arange.forward": arange,
    }
)
for _kind in ("rms_norm", "layer_norm"):
    RULES.update(  # type: ignore[attr-defined]
        {
            f"{_kind}.forward": norm_forward(_kind),
            f"{_kind}.grad0": norm_input_gradient(_kind),
            f"{_kind}.grad1": norm_weight_gradient(_kind),
            f"{_kind}.grad2": RULES["linear.grad2"],
        }
    )
