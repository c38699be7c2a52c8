"""Graphs written call by call, computed in float64, and all their near misses: graphs that differ in one place.

A rule that rewrites graphs may be right about the graphs that it is for, and wrong about one that looks similar. A near
miss swaps two operands, reads another tensor of the same shape, moves a number or a dim, or has a similar function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from plans.model.graph import Graph, Operator, Tensor

Values = dict[str, torch.Tensor]
DTYPES = {"float64": torch.float64, "float32": torch.float64, "bfloat16": torch.float64, "int64": torch.int64}
"""What a dtype is computed in: roundings are no subject here."""


@dataclass(frozen=True)
class Call:
    """One operator; `shape` is that of its output where the call decides it, `dtype` where it is not the input's."""

    kind: str
    inputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] | None = None
    dtype: str | None = None


def _number(call: Call, function: Callable[[Any, Any], Any]) -> Callable[..., torch.Tensor]:
    def run(x: Any, y: Any = None) -> torch.Tensor:
        y = call.attrs["number"] if y is None else y
        return function(y, x) if call.attrs.get("reverse") else function(x, y)

    return run


def _narrow(call: Call) -> Callable[..., torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        dim, start, step = call.attrs["dim"], call.attrs["start"], call.attrs.get("step", 1)
        size = call.shape[dim]
        index = torch.arange(size) * step + start
        assert dim < x.ndim and index[-1] < x.shape[dim]
        return x.index_select(dim, index)

    return run


def _rope(call: Call) -> Callable[..., torch.Tensor]:
    def run(x: torch.Tensor, *angles: torch.Tensor) -> torch.Tensor:
        if len(angles) == 1:
            turns = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * angles[0]
            angles = turns.cos(), turns.sin()
        cos, sin = (each[:, None, :] for each in angles)  # over heads
        rotary = 2 * cos.shape[-1]
        turned, rest = x[..., :rotary], x[..., rotary:]
        if call.attrs.get("interleaved"):
            a, b = turned[..., ::2], turned[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        else:
            a, b = turned.chunk(2, -1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        return torch.cat((turned, rest), -1)

    return run


def _attention(call: Call) -> Callable[..., torch.Tensor]:
    def run(*operands: torch.Tensor) -> torch.Tensor:
        first = call.attrs.get("layout") == "bshd"
        q, k, v = (each.transpose(1, 2) if first else each for each in operands[:3])
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        causal, scale = bool(call.attrs.get("causal")), call.attrs.get("scale")
        made = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
        return made.transpose(1, 2) if first else made

    return run


def _norm(call: Call) -> Callable[..., torch.Tensor]:
    def run(x: torch.Tensor, weight: Any = 1.0, bias: Any = 0.0) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True) if call.kind == "layer_norm" else x
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + call.attrs["eps"])
        return x * scale * (weight + call.attrs.get("offset", 0.0)) + bias

    return run


def _cross_entropy(call: Call) -> Callable[..., torch.Tensor]:
    def run(logits: torch.Tensor, labels: torch.Tensor, count: Any = None) -> torch.Tensor:
        ignored = call.attrs.get("ignore_index", -100)
        total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=ignored, reduction="sum")
        return total / (labels.numel() if count is None else count)

    return run


def _alone(function: Callable[..., Any]) -> Callable[[Call], Callable[..., Any]]:
    return lambda call: function


KINDS: dict[str, Callable[[Call], Callable[..., Any]]] = {
    "add": lambda call: _number(call, torch.add), "sub": lambda call: _number(call, lambda x, y: x - y),
    "mul": lambda call: _number(call, torch.mul), "div": lambda call: _number(call, lambda x, y: x / y),
    "pow": lambda call: lambda x: x ** call.attrs["exponent"],
    **{name: _alone(getattr(torch, name)) for name in ("rsqrt", "sqrt", "neg", "abs", "cos", "sin", "tanh", "relu")},
    "silu": _alone(F.silu), "gelu": lambda call: lambda x: F.gelu(x, **call.attrs),
    "cast": lambda call: lambda x: x.to(DTYPES[call.dtype]),
    "reduce_mean": lambda call: lambda x: x.mean(call.attrs["dims"], call.attrs.get("keepdim", False)),
    "mean_loss": _alone(torch.mean),
    "reshape": lambda call: lambda x: x.reshape(call.shape), "expand": lambda call: lambda x: x.expand(call.shape),
    "permute": lambda call: lambda x: x.permute(call.attrs["dims"]),
    "narrow": _narrow, "concat": lambda call: lambda *all: torch.cat(all, call.attrs["dim"]),
    "arange": lambda call: lambda: torch.arange(call.shape[0]) * call.attrs["step"] + call.attrs["start"],
    "fill": lambda call: lambda *like: torch.full(call.shape, call.attrs["value"], dtype=DTYPES[call.dtype]),
    "matmul": _alone(torch.matmul), "linear": _alone(F.linear), "embedding": lambda call: lambda ids, rows: rows[ids],
    "rope": _rope, "attention": _attention, "rms_norm": _norm, "layer_norm": _norm, "cross_entropy": _cross_entropy,
    "count_labels": lambda call: lambda labels: (labels != call.attrs["ignore_index"]).sum().double(),
    "opaque": lambda call: lambda labels: F.pad(labels, (0, 1), value=-100),
}  # fmt: skip
"""Kind -> what its call computes, each by its definition."""


class Written:
    """A graph that is written call by call; every method returns the name of the tensor that the call makes."""

    def __init__(self) -> None:
        self.given: dict[str, tuple[str, torch.Tensor, str]] = {}
        self.calls: list[Call] = []
        self.draw = torch.Generator().manual_seed(3)

    def tensor(self, name: str, *shape: int, kind: str = "input", dtype: str = "float32") -> str:
        """An input, parameter or constant with random values."""
        self.given[name] = kind, torch.randn(shape, generator=self.draw, dtype=torch.float64), dtype
        return name

    def ids(self, name: str, high: int, *shape: int) -> str:
        self.given[name] = "input", torch.randint(high, shape, generator=self.draw), "int64"
        return name

    def constant(self, name: str, values: torch.Tensor) -> str:
        self.given[name] = "constant", values, "float32"
        return name

    def call(self, kind: str, *inputs: str, shape: Any = None, dtype: str | None = None, **attrs: Any) -> str:
        self.calls.append(Call(kind, inputs, attrs, shape, dtype))
        return f"t{len(self.calls) - 1}"

    def mean(self, x: str) -> str:
        return self.call("reduce_mean", x, dims=(-1,), keepdim=True)

    def cut(self, x: str, dim: int, start: int, shape: tuple[int, ...], **attrs: Any) -> str:
        return self.call("narrow", x, shape=shape, dim=dim, start=start, **attrs)

    def values(self, calls: Sequence[Call]) -> Values:
        """All tensors of these calls.

        Raises:
            Exception: a call cannot be made.
        """
        found = {name: value for name, (_, value, _) in self.given.items()}
        for at, call in enumerate(calls):
            made = KINDS[call.kind](call)(*(found[name] for name in call.inputs))
            assert torch.isfinite(made).all()
            found[f"t{at}"] = made
        return found

    def graph(self, calls: Sequence[Call], values: Values) -> Graph:
        """The calls as a graph; the last one makes the loss."""
        tensors = {
            name: Tensor(name=name, shape=tuple(value.shape), dtype=dtype, kind=kind)
            for name, (kind, value, dtype) in self.given.items()
        }
        for at, call in enumerate(calls):
            floats = [tensors[name].dtype for name in call.inputs if tensors[name].differentiable]
            dtype = call.dtype or (
                floats[0] if floats else "int64" if values[f"t{at}"].dtype == torch.int64 else "float32"
            )
            tensors[f"t{at}"] = Tensor(name=f"t{at}", shape=tuple(values[f"t{at}"].shape), dtype=dtype)
        operators = tuple(
            Operator(
                name=f"o{at}", kind=call.kind, inputs=call.inputs, outputs=(f"t{at}",), attrs=_attrs(call, tensors)
            )
            for at, call in enumerate(calls)
        )
        return Graph(name="written", batch_size=2, tensors=tensors, operators=operators, loss=f"t{len(calls) - 1}")

    def compute(self, graph: Graph) -> Values:
        """All tensors of a graph; parts of weights are taken from what they are parts of."""
        found = {name: value for name, (_, value, _) in self.given.items()}
        for name, part in graph.parts.items():
            whole = self.given[part.name][1]
            assert part.is_repeated(whole.numpy())
            found[name] = torch.from_numpy(part.take(whole.numpy(), graph.tensors[name].shape).copy())
        for name, ignored in graph.later.items():
            found[name] = F.pad(found[name][:, 1:], (0, 1), value=ignored)
        for operator in graph.operators:
            made = graph.tensors[operator.outputs[0]]
            call = Call(operator.kind, operator.inputs, operator.attrs, made.shape, made.dtype)
            found[made.name] = KINDS[call.kind](call)(*(found[name] for name in call.inputs))
            assert tuple(found[made.name].shape) == made.shape, operator
        return found

    def near_misses(self) -> Iterator[tuple[str, list[Call]]]:
        """(What differs, the calls), for every place; some cannot be computed."""
        for at, call in enumerate(self.calls[:-1]):
            for what, other in _others(call, [*self.given, *(f"t{number}" for number in range(at))]):
                yield f"o{at}: {what}", [*self.calls[:at], other, *self.calls[at + 1 :]]


_SIMILAR = {
    "add": ("sub", "mul"), "sub": ("add",), "mul": ("div", "add"), "div": ("mul",), "cos": ("sin",), "sin": ("cos",),
    "rsqrt": ("sqrt", "abs"), "sqrt": ("rsqrt", "abs"), "tanh": ("sin", "silu"), "neg": ("abs", "relu"),
    "relu": ("silu",),
}  # fmt: skip


def _others(call: Call, known: Sequence[str]) -> Iterator[tuple[str, Call]]:
    for kind in _SIMILAR.get(call.kind, ()):
        yield f"{kind} for {call.kind}", replace(call, kind=kind)
    if len(call.inputs) == 2:
        yield "operands swapped", replace(call, inputs=call.inputs[::-1])
    for place, name in enumerate(call.inputs):
        for other in known:
            if other != name:
                inputs = (*call.inputs[:place], other, *call.inputs[place + 1 :])
                yield f"{other} for {name}", replace(call, inputs=inputs)
    for key, value in call.attrs.items():
        for other in _moved(key, value) if call.kind != "opaque" else ():
            yield f"{key} {other} for {value}", replace(call, attrs={**call.attrs, key: other})
    if call.kind == "narrow":
        yield "every second", replace(call, attrs={**call.attrs, "step": 3 - call.attrs.get("step", 1)})
    if call.shape is not None and len(call.shape) > 1:
        for place in range(len(call.shape) - 1):
            shape = list(call.shape)
            shape[place], shape[place + 1] = shape[place + 1], shape[place]
            yield f"shape {shape}", replace(call, shape=tuple(shape))
    if call.kind == "narrow":
        for change in (-1, 1):
            shape = list(call.shape)
            shape[call.attrs["dim"]] += change
            yield f"shape {shape}", replace(call, shape=tuple(shape))


def _moved(key: str, value: Any) -> Iterator[Any]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
        yield value - 1
    elif isinstance(value, float):
        yield value * 1.25
        yield 1 - value
    elif isinstance(value, tuple) and key == "dims":
        yield value[::-1]
        yield (*value[1:], value[0]) if len(value) > 1 else (value[0] - 1,)


def _attrs(call: Call, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The attrs as capture writes them: dims counted from the left, the sizes of a concat."""
    attrs = dict(call.attrs)
    if call.kind == "reduce_mean":
        attrs["dims"] = tuple(dim % len(tensors[call.inputs[0]].shape) for dim in attrs["dims"])
    if call.kind == "concat":
        attrs["sizes"] = tuple(tensors[name].shape[attrs["dim"]] for name in call.inputs)
    return attrs
