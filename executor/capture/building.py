"""A graph under construction: its operators, and which tensors depend on the batch and on parameters.

It contains the code that the rules of all calls share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from executor.capture.places import Places
from executor.capture.values import Chosen, Complex, Mean, Transposed, Value
from executor.kernels.random import seed_of
from executor.recompute import checkpointed
from plans.model.graph import Attr, Operator, Tensor
from plans.operators import declare, factors, kinds

__all__ = ["NUMBER_OF_A_TENSOR", "Building"]

NUMBER_OF_A_TENSOR = "it takes a number out of a tensor (item(), float(), assert); compute with the tensor instead"


class Building(Places):
    """The operators and tensors that were created so far.

    Args:
        module: that was exported, for the names of its parts.
        grown: call -> the dim of its result that is the batch.
    """

    def __init__(self, module: nn.Module, grown: Mapping[str, int]) -> None:
        super().__init__(module)
        self.grown = grown
        self.batch_size = 0
        self.tensors: dict[str, Tensor] = {}
        self.operators: list[Operator] = []
        self.made_by: dict[str, fx.Node] = {}
        self.trained: set[str] = set()  # tensors that depend on a parameter
        self.batched: dict[str, int] = {}  # tensors that depend on an input -> their dim that is the batch
        self.shared: set[str] = set()  # tensors that are made of all samples of a micro-batch
        self.changed: dict[str, str] = {}  # copies of buffers and frozen parameters that the forward changes -> those
        self.num_random = 0
        self.checkpoints: dict[str, int] = {}
        self._names: dict[str, int] = {}

    def make(
        self,
        node: fx.Node,
        kind: str,
        inputs: Sequence[Value],
        *,
        shape: tuple[int, ...] | None = None,
        dtype: str | None = None,
        **attrs: Attr,
    ) -> str:
        """Add an operator whose output is the node's value; returns the name of its output."""
        if kind not in kinds():
            raise self.unknown(node)
        read = [self.plain(node, value) for value in inputs]
        if shape is None or dtype is None:
            own_shape, own_dtype = self.shape_dtype(node)
            shape, dtype = own_shape if shape is None else shape, dtype or own_dtype
        if 0 in shape:
            raise self.refused(
                node, f"it makes a tensor without elements, {shape}, of a small batch; compute all samples at once, "
                f"and give parts of a batch that are compared as separate inputs"
            )  # fmt: skip
        path = self.path(node)
        name = self._unique(f"{path}.{kind}" if path else kind)
        output = f"{name}.out"
        self.tensors[output] = Tensor(name=output, shape=shape, dtype=dtype, kind="activation")
        # a plan file is JSON, which has no infinite numbers: they are written as text ("-inf")
        held = {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in attrs.items()
        }
        self.operators.append(
            Operator(name=name, kind=kind, inputs=tuple(read), outputs=(output,), attrs=held, module=path)
        )
        self.made_by[name] = node
        if (checkpoint := checkpointed(node.meta)) is not None:
            self.checkpoints[name] = checkpoint
        if any(value in self.batched for value in read):
            known = self.grown.get(node.name) if getattr(node.meta.get("val"), "shape", None) == shape else None
            self.batched[output] = self._place(self.operators[-1]) if known is None else known
        elif any(value in self.shared for value in read):
            self.shared.add(output)
        if (
            self.tensors[output].differentiable
            and kind not in ("assign", "detach", "fill", "uniform", "normal")
            and any(value in self.trained for value in read)
        ):
            self.trained.add(output)
        return output

    def _place(self, operator: Operator) -> int:
        """The position of the batch among the dims of an operator's output, by their names; 0 if the names do not
        determine it.
        """
        before, after = (
            tuple(self.tensors[name].shape for name in names) for names in (operator.inputs, operator.outputs)
        )
        spec = declare(operator.kind, before, after, operator.attrs, operator.name)
        for name, dims in zip(operator.inputs, spec.inputs, strict=True):
            if name in self.batched and dims:
                inside = factors(dims[self.batched[name]])
                batch = next((each for each in inside if spec.sizes[each] == self.batch_size), inside[0])
                found = [at for at, each in enumerate(spec.outputs[0]) if batch in factors(each)]
                if found:
                    return found[0]
        return 0

    def plain(self, node: fx.Node, value: Value) -> str:
        """The tensor that a value represents; a lazily transposed parameter is transposed now."""
        if isinstance(value, Transposed):
            tensor = self.tensors[value.tensor]
            return self.make(
                node, "permute", (value.tensor,), shape=tensor.shape[::-1], dtype=tensor.dtype, dims=(1, 0),
            )  # fmt: skip
        if isinstance(value, Mean):
            return self.of_batch(node, value)
        if isinstance(value, Chosen):
            return self.rows_of(node, value.weights, value.ids)
        if not isinstance(value, str):
            raise self.refused(node, f"it takes tensors, not {value!r}")
        return value

    def of_batch(self, node: fx.Node, mean: Mean) -> str:
        """The value of a mean (or sum) without trained inputs, shared by all samples of a micro-batch.

        Raises:
            TwofoldError: something in it is trained.
        """
        terms = mean.terms()
        if self.is_trained(terms):
            raise self.samples_meet(node)
        kind = "batch_sum" if mean.is_sum else "batch_mean"
        return self.share(self.make(node, kind, (terms,), shape=mean.shape, dtype=self.tensors[terms].dtype))

    def share(self, made: str) -> str:
        """Mark a tensor that was computed from samples as one value shared by all samples of a micro-batch."""
        del self.batched[made]
        self.shared.add(made)
        return made

    def rows_of(self, node: fx.Node, table: str, ids: str) -> str:
        """table[ids] along dim 0."""
        rows, *rest = self.tensors[table].shape
        shape, dtype = self.tensors[ids].shape, self.tensors[table].dtype
        width = math.prod(rest)
        flat = self.reshaped(node, table, (rows, width))
        made = self.make(node, "embedding", (ids, flat), shape=(*shape, width), dtype=dtype)
        return self.reshaped(node, made, (*shape, *rest))

    def like_batch(
        self, node: fx.Node, shape: tuple[int, ...], dtype: str, value: bool | int | float, place: int = 0
    ) -> str:
        """A tensor filled with one value; dim `place` is the batch."""
        return self._like_input(node, "fill", shape, dtype, place, value=value)

    def random(self, node: fx.Node, kind: str, shape: tuple[int, ...], dtype: str, place: int | None) -> str:
        """A random tensor; dim `place` is the batch. With None all samples share it."""
        seed = self.next_seed()
        if place is None:
            return self.make(node, kind, (), shape=shape, dtype=dtype, seed=seed)
        return self._like_input(node, kind, shape, dtype, place, seed=seed)

    def _like_input(
        self, node: fx.Node, kind: str, shape: tuple[int, ...], dtype: str, place: int, **attrs: Attr
    ) -> str:
        """An operator whose size follows an input; the batch may be a factor of dim `place`."""
        anchor = next(name for name, tensor in self.tensors.items() if tensor.kind == "input")
        apart = (self.batch_size, shape[place] // self.batch_size) if shape[place] != self.batch_size else ()
        sizes = (*shape[:place], *apart, *shape[place + 1 :]) if apart else shape
        more = {"batch": place} if place else {}
        return self.reshaped(node, self.make(node, kind, (anchor,), shape=sizes, dtype=dtype, **attrs, **more), shape)

    def reshaped(self, node: fx.Node, value: Value, shape: tuple[int, ...]) -> str:
        """The value in another shape; the value itself if it already has that shape."""
        name = self.plain(node, value)
        tensor = self.tensors[name]
        if tensor.shape == shape:
            return name
        return self.make(node, "reshape", (name,), shape=shape, dtype=tensor.dtype)

    def detached(self, node: fx.Node, value: Value) -> Value:
        """The value without its gradient; the value itself if it has none."""
        if isinstance(value, tuple):
            return tuple(self.detached(node, each) for each in value)
        return self.make_as(node, "detach", self.plain(node, value)) if self.is_trained(value) else value

    def make_as(self, node: fx.Node, kind: str, value: str, *more: Value, **attrs: Any) -> str:
        """Add an operator whose output has the shape and the dtype of its first input."""
        tensor = self.tensors[value]
        return self.make(node, kind, (value, *more), shape=tensor.shape, dtype=tensor.dtype, **attrs)

    def cast(self, node: fx.Node, value: str, dtype: str) -> str:
        """The value in another dtype; the value itself if it already has that dtype."""
        tensor = self.tensors[value]
        return value if tensor.dtype == dtype else self.make(node, "cast", (value,), shape=tensor.shape, dtype=dtype)

    def next_seed(self) -> int:
        """The seed of the next random operator; the k-th of a forward has the same in
        `executor.reference.random`."""
        self.num_random += 1
        return seed_of(self.num_random)

    def is_trained(self, value: Value) -> bool:
        """Whether a value depends on a parameter."""
        if isinstance(value, Chosen):
            return value.weights in self.trained
        return (value.tensor if isinstance(value, Transposed) else value) in self.trained

    def shape_dtype(self, node: fx.Node) -> tuple[tuple[int, ...], str]:
        """The static shape and the dtype of a node's value."""
        return self.shape_dtype_of(node, node.meta.get("val"))

    def shape_dtype_of(self, node: fx.Node, made: object) -> tuple[tuple[int, ...], str]:
        """The static shape and the dtype of one of a node's results."""
        if isinstance(made, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise self.refused(node, NUMBER_OF_A_TENSOR)
        if not isinstance(made, torch.Tensor):
            raise self.refused(node, f"its value is {made!r}; operators return one tensor")
        if not all(type(size) is int for size in made.shape):
            raise self.refused(node, f"its shape {tuple(made.shape)} depends on values; shapes must be fixed")
        dtype = made.dtype.to_real() if made.is_complex() else made.dtype
        return tuple(made.shape), str(dtype).removeprefix("torch.")

    def _unique(self, name: str) -> str:
        count = self._names[name] = self._names.get(name, -1) + 1
        return name if not count else self._unique(f"{name}_{count}")

    def where_made(self, operator: str) -> str:
        """The module and the line that created an operator of the graph; "" if no single call of the model did."""
        node = self.made_by.get(operator)
        return "" if node is None else f" {self.where(node)}"

    # -- complex values

    def as_complex(self, node: fx.Node, x: str) -> Complex:
        """A tensor [.., 2] as complex numbers."""
        shape, dtype = self.tensors[x].shape[:-1], self.tensors[x].dtype

        def part(at: int) -> str:
            one = self.make(node, "narrow", (x,), shape=(*shape, 1), dtype=dtype, dim=len(shape), start=at)
            return self.reshaped(node, one, shape)

        return Complex(real=part(0), imaginary=part(1))

    def as_real(self, node: fx.Node, x: Complex) -> str:
        """Complex numbers as a tensor [.., 2], like `torch.view_as_real`."""
        tensor = self.tensors[x.real]
        thin = [self.reshaped(node, part, (*tensor.shape, 1)) for part in (x.real, x.imaginary)]
        shape, dim = (*tensor.shape, 2), len(tensor.shape)
        return self.make(node, "concat", thin, shape=shape, dtype=tensor.dtype, dim=dim, sizes=(1, 1))
