"""The operator graph of one training step: tensors, operators and the loss.

A graph is the search's view of a model: it holds no weights and no devices. It is written into plan files, so every
type here is a `msgspec.Struct` that refuses unknown keys.
"""

from __future__ import annotations

import fnmatch
import glob
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

import msgspec

from plans.errors import TwofoldError
from plans.model.part import Part
from plans.operators import OperatorSpec, declare, factors

__all__ = ["Attr", "Graph", "Operator", "Tensor", "TensorKind", "itemsize", "matches_any", "patterns_of_parts"]

Attr = bool | int | float | str | tuple[int, ...]
"""A setting of an operator, such as the axis of a softmax."""

TensorKind = str
"""input (a batch comes in), parameter (trained), constant (no optimizer changes it), activation (of an operator)."""

_ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
             "uint8": 1, "bool": 1,
             "float8": 1, "float8_precise": 1, "float8_rowwise": 1, "float4": 1, "tf32": 4}  # fmt: skip


def itemsize(dtype: str) -> int:
    """The bytes of one element of a dtype.

    >>> itemsize("bfloat16")
    2
    """
    try:
        return _ITEMSIZE[dtype]
    except KeyError:
        raise TwofoldError(f"dtype {dtype!r} is not known; known: {', '.join(_ITEMSIZE)}") from None


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tensor with its whole (unsplit) shape for one micro-batch; inputs have the batch as dim 0."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    kind: TensorKind = "activation"

    def __post_init__(self) -> None:
        if self.kind not in ("input", "parameter", "constant", "activation"):
            raise TwofoldError(
                f"tensor {self.name!r} has the kind {self.kind!r}; it must be input, parameter, constant or activation"
            )
        if any(size < 1 for size in self.shape):
            raise TwofoldError(f"tensor {self.name!r} has a dim of size 0 in {self.shape}; all dims must be at least 1")
        itemsize(self.dtype)

    @property
    def num_elements(self) -> int:
        """Number of elements of the full tensor."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the full tensor."""
        return self.num_elements * itemsize(self.dtype)

    @property
    def differentiable(self) -> bool:
        """Whether a gradient can flow through it."""
        return self.dtype.startswith(("float", "bfloat"))


class Operator(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One operator: its kind (a name of `plans.operators`), tensors in and out, settings, and its module."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: dict[str, Attr] = {}
    module: str = ""

    def __hash__(self) -> int:
        return hash((self.name, self.kind, self.inputs, self.outputs, self.module))


class Graph(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Operators in topological order, the tensors they read and write, and the name of the loss.

    Shapes are those of one full batch of `batch_size` samples on one device; `with_batch` gives the same graph for
    another batch size, which is how micro-batches are made. `parts` maps parameters and constants to larger tensors of
    the captured module of which they are parts. `later` has inputs [batch, length] whose samples are shifted: without
    their first element, and with this number after the last one. `recompute` names the operators that the module itself
    recomputes in the backward (`torch.utils.checkpoint`).

    Raises:
        TwofoldError: a tensor that is read before it is written, written twice or unknown, or a loss that is not a
            scalar.

    >>> from plans.model.mlp import mlp_graph
    >>> graph = mlp_graph([64, 32, 8], batch_size=16)
    >>> graph.batch_size, [operator.name for operator in graph.operators][:2], graph.with_batch(4).tensors["x"].shape
    (16, ['layer1.linear', 'layer1.relu'], (4, 64))
    """

    name: str
    batch_size: int
    tensors: dict[str, Tensor]
    operators: tuple[Operator, ...]
    loss: str
    parts: dict[str, Part] = {}
    later: dict[str, int] = {}
    recompute: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        made = {tensor.name for tensor in self.tensors.values() if tensor.kind != "activation"}
        for operator in self.operators:
            for name in operator.inputs:
                if name not in self.tensors:
                    raise TwofoldError(
                        f"operator {operator.name!r} reads the tensor {name!r}, which the graph does not list"
                    )
                if name not in made:
                    raise TwofoldError(f"operator {operator.name!r} reads {name!r} before any operator writes it")
            for name in operator.outputs:
                if name in made or name not in self.tensors:
                    raise TwofoldError(
                        f"operator {operator.name!r} writes {name!r}, which is written twice or not listed"
                    )
                made.add(name)
        names = [operator.name for operator in self.operators]
        if len(set(names)) != len(names):
            raise TwofoldError(f"operator names are not unique: {sorted({n for n in names if names.count(n) > 1})}")
        if self.loss not in self.tensors or self.tensors[self.loss].shape != ():
            raise TwofoldError(f"the loss {self.loss!r} must be a scalar tensor of the graph")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # kept: graphs are keys of caches, and hashing thousands of operators each time is most of a look-up
        return hash((self.name, self.batch_size, self.operators, self.loss))

    @cached_property
    def _specs(self) -> dict[str, tuple[Operator, OperatorSpec]]:
        return {}

    def spec(self, operator: Operator) -> OperatorSpec:
        """The declaration of one operator for its shapes in this graph."""
        known, found = self._specs.get(operator.name, (None, None))
        if found is None or (known is not operator and known != operator):
            found = declare(
                operator.kind,
                tuple(self.tensors[name].shape for name in operator.inputs),
                tuple(self.tensors[name].shape for name in operator.outputs),
                operator.attrs,
                operator.name,
            )
            self._specs[operator.name] = operator, found
        return found

    def __repr__(self) -> str:
        size = f"{len(self.operators)} operators, {len(self.parameters)} parameters, batch {self.batch_size}"
        return f"<Graph {self.name}: {size}>"

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The trained tensors, in the order in which operators first read them."""
        return self._first_read("parameter")

    @property
    def constants(self) -> tuple[Tensor, ...]:
        """Buffers and frozen parameters, in the order in which operators first read them."""
        return self._first_read("constant")

    @cached_property
    def updated(self) -> frozenset[str]:
        """The constants that the forward changes: running statistics and other buffers."""
        return frozenset(operator.inputs[index] for operator in self.operators for index in self.spec(operator).updated)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The input tensors, in the order in which operators first read them."""
        return self._first_read("input")

    def of_module(self, tensor: Tensor) -> str:
        """The name of the module's tensor that a parameter or constant is, or is a part of."""
        part = self.parts.get(tensor.name)
        return tensor.name if part is None else part.name

    def _first_read(self, kind: str) -> tuple[Tensor, ...]:
        names = dict.fromkeys(name for operator in self.operators for name in operator.inputs)
        return tuple(self.tensors[name] for name in names if self.tensors[name].kind == kind)

    @cached_property
    def by_name(self) -> Mapping[str, Operator]:
        """Name -> operator."""
        return {operator.name: operator for operator in self.operators}

    def position(self, operator: Operator) -> int:
        """The place of an operator in `operators`."""
        return self._positions[operator.name]

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {operator.name: at for at, operator in enumerate(self.operators)}

    @cached_property
    def _producers(self) -> dict[str, Operator]:
        return {name: operator for operator in self.operators for name in operator.outputs}

    @cached_property
    def batch_dims(self) -> Mapping[str, str]:
        """The dim that holds the batch, by operator; operators without the batch are absent.

        >>> from plans.model.mlp import mlp_graph
        >>> mlp_graph([64, 8], batch_size=16).batch_dims
        {'layer1.linear': 'b0', 'loss.mse_loss': 'd0'}
        """
        return _followed(self, 2 * self.batch_size)[1]

    @cached_property
    def _trained(self) -> dict[str, tuple[int, ...]]:
        return {}

    def producers(self) -> Mapping[str, Operator]:
        """The operator that writes each tensor, by tensor name."""
        return MappingProxyType(self._producers)

    def consumers(self) -> Mapping[str, tuple[Operator, ...]]:
        """The operators that read each tensor, in order, by tensor name."""
        readers: dict[str, list[Operator]] = {name: [] for name in self.tensors}
        for operator in self.operators:
            for name in dict.fromkeys(operator.inputs):
                readers[name].append(operator)
        return {name: tuple(found) for name, found in readers.items()}

    def needs_gradient(self) -> frozenset[str]:
        """The tensors whose gradient a step computes: parameters and values between them and the loss.

        Raises:
            TwofoldError: a trained tensor is read where no gradient is computed, such as the labels of a loss.
        """
        return self._needs_gradient

    @cached_property
    def _needs_gradient(self) -> frozenset[str]:
        return _needs_gradient(self)

    def trained_inputs(self, operator: Operator) -> tuple[int, ...]:
        """The inputs of an operator that get a gradient; none if its output does not reach the loss."""
        found = self._trained.get(operator.name)
        if found is None or self.by_name.get(operator.name) is not operator:
            wanted = self.needs_gradient()
            found = ()
            if any(name in wanted for name in operator.outputs):
                mine = self.spec(operator).gradients
                found = tuple(index for index in sorted(mine) if operator.inputs[index] in wanted)
            if self.by_name.get(operator.name) is operator:
                self._trained[operator.name] = found
        return found

    def with_batch(self, batch_size: int) -> Graph:
        """The same graph for another batch size: every dim that is the batch follows.

        Raises:
            TwofoldError: an operator mixes the batch into a dim in a way that cannot be resized.
        """
        if batch_size == self.batch_size:
            return self
        return _resized(self, batch_size)


def matches_any(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name of a parameter is of one of some patterns, as of fnmatch.

    >>> matches_any("head.bias", ("*norm*", "*bias"))
    True
    """
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def patterns_of_parts(graph: Graph, patterns: Sequence[str]) -> tuple[str, ...]:
    """Patterns for the parameters of a graph from patterns for the tensors of its module, of which some are parts.

    These are the given ones if they match the same parameters.
    """
    named = {tensor.name: graph.of_module(tensor) for tensor in graph.parameters}
    wanted = {name for name, of_module in named.items() if matches_any(of_module, patterns)}
    if wanted == {name for name in named if matches_any(name, patterns)}:
        return tuple(patterns)
    return tuple(glob.escape(name) for name in sorted(wanted))


def _needs_gradient(graph: Graph) -> frozenset[str]:
    needed = {tensor.name for tensor in graph.parameters}
    for operator in graph.operators:
        if any(name in needed for name in operator.inputs) and not graph.spec(operator).blind:
            needed.update(name for name in operator.outputs if graph.tensors[name].differentiable)
    useful = {graph.loss}
    for operator in reversed(graph.operators):
        if not any(name in useful and graph.tensors[name].differentiable for name in operator.outputs):
            continue
        for index, name in enumerate(operator.inputs):
            if index in graph.spec(operator).gradients:
                useful.add(name)
            elif name in needed and not graph.spec(operator).blind and index not in graph.spec(operator).discrete:
                raise TwofoldError(
                    f"operator {operator.name!r} ({operator.kind}) computes no gradient for its input {name!r}, which "
                    "is trained or depends on trained tensors; detach it"
                )
    return frozenset(needed & useful)


def _followed(graph: Graph, batch_size: int) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """The shapes of all tensors for another batch size, and the dim of every operator that changes with it."""
    shapes: dict[str, tuple[int, ...]] = {}
    followed: dict[str, str] = {}
    for name, tensor in graph.tensors.items():
        if tensor.kind == "input":
            if not tensor.shape or tensor.shape[0] != graph.batch_size:
                raise TwofoldError(
                    f"input {name!r} {tensor.shape} does not have the batch {graph.batch_size} as its dim 0"
                )
            shapes[name] = (batch_size, *tensor.shape[1:])
        elif tensor.kind in ("parameter", "constant"):
            shapes[name] = tensor.shape
    for operator in graph.operators:
        spec = graph.spec(operator)
        sizes = dict(spec.sizes)
        for dims, name in zip(spec.inputs, operator.inputs, strict=True):
            for position, (dim, old, new) in enumerate(zip(dims, graph.tensors[name].shape, shapes[name], strict=True)):
                if old != new:
                    names = factors(dim)
                    # the batch is the factor of its size, or else one that it divides
                    sized = [name for name in names if spec.sizes[name] == graph.batch_size]
                    sized += [name for name in names if spec.sizes[name] % graph.batch_size == 0]
                    which = (*sized, *names)[0]
                    rest = old // spec.sizes[which]
                    if new % rest:
                        raise TwofoldError(
                            f"operator {operator.name!r} ({operator.kind}) reads {name!r} {graph.tensors[name].shape}; "
                            f"for a batch of {batch_size} its dim {position} would be {new}, which is not a multiple "
                            f"of {rest}"
                        )
                    sizes[which] = new // rest
                    followed.setdefault(operator.name, which)
        for dims, name in zip(spec.outputs, operator.outputs, strict=True):
            shapes[name] = tuple(math.prod(sizes[factor] for factor in factors(dim)) for dim in dims)
    return shapes, followed


def _resized(graph: Graph, batch_size: int) -> Graph:
    shapes, _ = _followed(graph, batch_size)
    tensors = {
        name: msgspec.structs.replace(tensor, shape=shapes.get(name, tensor.shape))
        for name, tensor in graph.tensors.items()
    }
    return msgspec.structs.replace(graph, batch_size=batch_size, tensors=tensors)
