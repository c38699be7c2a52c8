"""Translation of an exported module, node by node, to operators of a graph.

The rules of `executor.capture.rules` translate single aten calls; here is everything they share: names, module paths,
dependence on the batch or on parameters, errors with their location.
"""

from __future__ import annotations

import inspect
import math
import operator as python_operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from executor.capture.functional import CHANGES
from executor.capture.masks import shape_only
from executor.capture.places import Places
from executor.capture.straight import NO_GRADIENT
from executor.capture.values import Chosen, Complex, Mean, Transposed, Unreadable, Value
from executor.kernels.random import seed_of
from executor.recompute import checkpointed, marked, recomputed
from plans.errors import TwofoldError
from plans.model.graph import Attr, Graph, Operator, Tensor
from plans.operators import declare, factors, kinds

__all__ = ["Rule", "Translation", "of_means"]

LOSSES = ("cross_entropy", "l1_loss", "mean_loss", "mse_loss")


SettingsT = TypeVar("SettingsT")

Rule = Callable[..., Value]
"""(translation, node, *arguments of the aten call) -> the translation of the node."""


class Translation(Places):
    """One translation of an exported module.

    Args:
        exported: the training form of `module`, its user inputs in the order of `arguments`.
        module: the user's module, for the names of its parts.
        arguments: the names of forward's arguments, one per input tensor.
        rules: aten call -> its rule.
        fallback: the rule, given no arguments, for calls without one.
        computed: the rule, given no arguments, for values that follow from shapes and have no separate operators.
        complex_rule: gives the rule of a call that reads complex values.
        grown: call -> the dim of its result that is the batch.

    Raises:
        TwofoldError: an operator that is not known, dims that are not static, or what is not a training step.
    """

    def __init__(
        self,
        exported: ExportedProgram,
        module: nn.Module,
        arguments: Sequence[str],
        rules: Mapping[str, Rule],
        fallback: Rule,
        computed: Rule,
        complex_rule: Callable[[str], Rule | None],
        grown: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.grown = grown
        super().__init__(module)
        self.fallback = fallback
        self.computed = computed
        self.complex_rule = complex_rule
        self.rules = rules
        self.values: dict[fx.Node, Value] = {}
        self.tensors: dict[str, Tensor] = {}
        self.operators: list[Operator] = []
        self.made_by: dict[str, fx.Node] = {}
        self.trained: set[str] = set()  # tensors that depend on a parameter
        self.batched: dict[str, int] = {}  # tensors that depend on an input -> their dim that is the batch
        self.shared: set[str] = set()  # tensors that are made of all samples of a micro-batch
        self.shape_only = shape_only(exported.graph)
        self.num_random = 0
        self._checkpoints: dict[str, int] = {}
        placed = (
            node.meta["val"] for node in exported.graph.nodes if node.name in exported.graph_signature.user_inputs
        )
        self.batch_size: int = next(placed).shape[0]
        self._names: dict[str, int] = {}
        self._enter_inputs(exported, arguments)
        self.output = self._run(exported)

    # -- what comes in

    def _enter_inputs(self, exported: ExportedProgram, arguments: Sequence[str]) -> None:
        nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
        canonical = _canonical_names(self.module)
        waiting = list(arguments)
        for spec in exported.graph_signature.input_specs:
            node = nodes[spec.arg.name]
            if spec.kind is InputKind.USER_INPUT:
                argument = waiting.pop(0)
                self.values[node] = self._enter(argument, node, "input")
                self.batched[argument] = 0
        for spec in exported.graph_signature.input_specs:
            node = nodes[spec.arg.name]
            if spec.kind is InputKind.PARAMETER:
                path = canonical[str(spec.target)]
                if path in self.tensors and self.tensors[path].kind == "input":
                    raise TwofoldError(f"{path!r} names both an argument of forward and a parameter; rename one")
                if not self.module.get_parameter(path).requires_grad:
                    self.values[node] = self._enter_constant(path, node, "frozen parameter")
                else:
                    self.values[node] = self._enter(path, node, "parameter")
                    self.trained.add(path)
            elif spec.kind is InputKind.BUFFER:
                path = canonical[str(spec.target)]
                if path in self.tensors and self.tensors[path].kind == "input":
                    raise TwofoldError(f"{path!r} names both an argument of forward and a buffer; rename one")
                self.values[node] = self._enter_constant(path, node, "buffer")
            elif spec.kind is not InputKind.USER_INPUT:
                self.values[node] = Unreadable(
                    reason=f"the tensor {str(spec.target)!r}, made outside of the graph, is neither parameter, buffer "
                    f"nor input; register it in its module: self.register_buffer(name, tensor)"
                )

    def _enter_constant(self, name: str, node: fx.Node, what: str) -> Value:
        try:
            return self._enter(name, node, "constant")
        except TwofoldError as error:  # matters only where it is read
            return Unreadable(reason=f"the {what} {name!r}: {error}")

    def _enter(self, name: str, node: fx.Node, kind: str) -> Value:
        shape, dtype = self.shape_dtype(node)
        is_complex = node.meta["val"].is_complex()
        if is_complex and kind != "constant":
            raise TwofoldError(f"the {kind} {name!r} is complex; give its real and imaginary parts")
        shape = (*shape, 2) if is_complex else shape
        self.tensors[name] = Tensor(name=name, shape=shape, dtype=dtype, kind=kind)
        return self.as_complex(node, name) if is_complex else name

    def as_complex(self, node: fx.Node, x: str) -> Complex:
        """A tensor [.., 2] as complex numbers."""
        shape, dtype = self.tensors[x].shape[:-1], self.tensors[x].dtype

        def part(at: int) -> str:
            one = self.make(node, "narrow", (x,), shape=(*shape, 1), dtype=dtype, dim=len(shape), start=at)
            return self.reshaped(node, one, shape)

        return Complex(real=part(0), imaginary=part(1))

    # -- the calls

    def _run(self, exported: ExportedProgram) -> Value:
        for node in exported.graph.nodes:
            if node in self.shape_only:
                self.values[node] = self._call_if_known(node)
            elif node.op == "call_function":
                self.values[node] = self._call(node)
            elif node.op == "get_attr":
                self.values[node] = Unreadable(reason=f"{node.target!r} is a constant or a nested graph")
        (output,) = [node for node in exported.graph.nodes if node.op == "output"]
        results = [result for result in output.args[0] if result is not None]
        if len(results) != 1 or not isinstance(results[0], fx.Node):
            raise TwofoldError(
                f"{type(self.module).__name__}.forward returns {len(results)} values; it must return the scalar loss "
                f"alone: wrap the network with its loss, WithLossCell(net, loss_fn)"
            )
        return self.values[results[0]]

    def _call_if_known(self, node: fx.Node) -> Value:
        """A call whose value follows from shapes: what cannot be planned matters only where it is read."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return self._call(node)
            except TwofoldError as error:
                return Unreadable(reason=str(error))

    def _call(self, node: fx.Node) -> Value:
        made, reads = node.meta.get("val"), [self.values.get(each) for each in node.all_input_nodes]
        is_complex = isinstance(made, torch.Tensor) and made.is_complex()
        is_known = str(node.target) in self.rules or any(isinstance(each, Complex) for each in reads)
        value = self._translated(node) if is_known or not is_complex else None
        if is_complex and not isinstance(value, Complex):
            raise self.refused(node, "it makes complex numbers, which only products, sums and views may make")
        return value

    def _translated(self, node: fx.Node) -> Value:
        target = str(node.target) if node.target is not python_operator.getitem else "getitem"
        if (changed := node.meta.get(CHANGES)) is not None:
            return self._change_of_state(node, str(self.values[changed]))
        rule = self.rules.get(target)
        if any(isinstance(self.values.get(each), Complex) for each in node.all_input_nodes) and target != "getitem":
            if (rule := self.complex_rule(target)) is None:
                raise self.refused(node, "it reads complex numbers, which only products, sums and views may read")
        elif rule is None:
            return self.fallback(self, node)
        args, kwargs = self.held(node, tuple(node.args)), self.held(node, dict(node.kwargs))
        if any(isinstance(each, Mean) for each in args):
            of_means_rule = self.rules.get(of_means(target))
            if of_means_rule is not None:
                rule = of_means_rule
            elif self.shape_dtype(node)[0] == ():
                args = tuple(self.of_batch(node, each) if isinstance(each, Mean) else each for each in args)
            else:
                rule = _of_all_samples
        elif any(each in self.shared for each in args if isinstance(each, str)) and self.shape_dtype(node)[0] != ():
            rule = _of_all_samples
        try:
            inspect.signature(rule).bind(self, node, *args, **kwargs)
        except TypeError as error:
            raise self.refused(node, f"one of its settings is not supported: {error}") from None
        return rule(self, node, *args, **kwargs)

    def settings(self, node: fx.Node, kind: Callable[..., SettingsT], given: Any, named: Any) -> SettingsT:
        """The settings of a call as one value of a class with a field per setting, in aten's order.

        Raises:
            TwofoldError: a setting that the class does not have.
        """
        try:
            return kind(*given, **named)
        except TypeError as error:
            raise self.refused(node, f"one of its settings is not supported: {error}") from None

    def held(self, node: fx.Node, argument: Any) -> Any:
        """An argument of a call with the values of nodes in place of the nodes."""
        if isinstance(argument, fx.Node):
            value = self.values[argument]
            if isinstance(value, Unreadable) and argument in self.shape_only and node not in self.shape_only:
                value = self.values[argument] = self.computed(self, argument)
            if isinstance(value, Unreadable):
                raise self.refused(node, f"it reads a value that a graph cannot hold: {value.reason}")
            return self.detached(node, value) if NO_GRADIENT in node.meta else value
        if isinstance(argument, tuple | list):
            return tuple(self.held(node, entry) for entry in argument)
        if isinstance(argument, dict):
            return {key: self.held(node, entry) for key, entry in argument.items()}
        return argument

    def _change_of_state(self, node: fx.Node, name: str) -> Value:
        """Refuse to change a parameter or buffer, but for a batch norm's count, which its statistics make."""
        owner, _, last = name.rpartition(".")
        norm = self.module.get_submodule(owner)
        if last == "num_batches_tracked" and isinstance(norm, nn.modules.batchnorm._BatchNorm):
            return name
        what = "parameter" if self.tensors[name].kind == "parameter" else "buffer"
        raise self.refused(
            node,
            f"it changes the {what} {name!r} in the forward, but a step changes only trained "
            f"parameters and running statistics of nn.BatchNorm; keep it out of the network",
        )

    # -- for the rules

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
            raise self.unknown(node, kind)
        read = [self.plain(node, value) for value in inputs]
        if shape is None or dtype is None:
            own_shape, own_dtype = self.shape_dtype(node)
            shape, dtype = own_shape if shape is None else shape, dtype or own_dtype
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
            self._checkpoints[name] = checkpoint
        if any(value in self.batched for value in read):
            self.batched[output] = self._place(self.operators[-1])
        elif any(value in self.shared for value in read):
            self.shared.add(output)
        if (
            self.tensors[output].differentiable
            and kind not in ("detach", "fill")
            and any(value in self.trained for value in read)
        ):
            self.trained.add(output)
        return output

    def _place(self, operator: Operator) -> int:
        """The dim of an operator's output that is the batch, by the names of its dims; 0 where they do not say."""
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
        """The tensor that a value stands for; a lazily transposed parameter is transposed now."""
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
        """The value of a mean (a sum) in which nothing is trained: a scalar that all samples of a micro-batch share.

        Raises:
            TwofoldError: something in it is trained.
        """
        terms = mean.terms()
        if self.is_trained(terms):
            raise self.samples_meet(node)
        made = self.make(
            node, "batch_sum" if mean.is_sum else "batch_mean", (terms,), shape=(), dtype=self.tensors[terms].dtype
        )
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
        """A tensor of one value whose dim `place` is the batch: it follows the size of an input."""
        anchor = next(name for name, tensor in self.tensors.items() if tensor.kind == "input")
        first = (shape[place], *shape[:place], *shape[place + 1 :])
        made = self.make(node, "fill", (anchor,), shape=first, dtype=dtype, value=value)
        if place == 0:
            return made
        order = (*range(1, place + 1), 0, *range(place + 1, len(shape)))
        return self.make(node, "permute", (made,), shape=shape, dtype=dtype, dims=order)

    def reshaped(self, node: fx.Node, value: Value, shape: tuple[int, ...]) -> str:
        """A value in another shape; itself where it has it."""
        name = self.plain(node, value)
        tensor = self.tensors[name]
        if tensor.shape == shape:
            return name
        return self.make(node, "reshape", (name,), shape=shape, dtype=tensor.dtype)

    def detached(self, node: fx.Node, value: Value) -> Value:
        """A value through which no gradient goes; itself where none would."""
        if isinstance(value, tuple):
            return tuple(self.detached(node, each) for each in value)
        return self.make_as(node, "detach", self.plain(node, value)) if self.is_trained(value) else value

    def make_as(self, node: fx.Node, kind: str, value: str, *more: Value, **attrs: Any) -> str:
        """Add an operator whose output has the shape and the dtype of its first input."""
        tensor = self.tensors[value]
        return self.make(node, kind, (value, *more), shape=tensor.shape, dtype=tensor.dtype, **attrs)

    def cast(self, node: fx.Node, value: str, dtype: str) -> str:
        """`value` in another dtype; itself where it has it."""
        tensor = self.tensors[value]
        return value if tensor.dtype == dtype else self.make(node, "cast", (value,), shape=tensor.shape, dtype=dtype)

    def next_seed(self) -> int:
        """The seed of the next random operator; the k-th of a forward has the same in
        `executor.reference.dropout`."""
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
        """The same of one of a node's results."""
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
        """The same of an operator of the graph; empty where no call of the model made it by itself."""
        node = self.made_by.get(operator)
        return "" if node is None else f" {self.where(node)}"

    # -- the result

    def _loss(self, mean: Mean) -> str:
        """The operator that makes the mean which the forward returns."""
        if mean.is_sum:
            raise self.refused(
                mean.node, "the loss must be a mean over the samples (or a sum divided by their number), so that "
                "micro-batches average to it"
            )  # fmt: skip
        if mean.own is not None:
            return mean.own()
        terms = mean.terms()
        return self.make(mean.node, "mean_loss", (terms,), shape=(), dtype=self.tensors[terms].dtype)

    def graph(self, name: str, batch_size: int) -> Graph:
        """Everything that the loss depends on; inputs stay in the order of forward's arguments."""
        loss = self._loss(self.output) if isinstance(self.output, Mean) else self.output
        made = {output: operator for operator in self.operators for output in operator.outputs}
        kind = type(self.module).__name__
        if not isinstance(loss, str) or self.tensors[loss].shape != ():
            shape = self.tensors[loss].shape if isinstance(loss, str) else "none"
            raise TwofoldError(
                f"{kind}.forward returns a tensor of shape {shape}; it must return the scalar loss: wrap the network "
                f"with its loss, WithLossCell(net, loss_fn)"
            )
        if loss not in made or made[loss].kind not in LOSSES:
            maker = made[loss].name if loss in made else "no operator"
            raise TwofoldError(f"the loss of {kind} is made by {maker}; a graph ends in one of {', '.join(LOSSES)}")
        needed, kept = {loss}, []
        for operator in reversed(self.operators):
            if needed.intersection(operator.outputs):
                needed.update(operator.inputs)
                kept.append(operator)
        if not needed & self.trained - set(made):
            raise TwofoldError(f"the loss of {kind} depends on no parameter; there is nothing to train")
        graph = Graph(
            name=name,
            batch_size=batch_size,
            tensors={
                tensor.name: tensor
                for tensor in self.tensors.values()
                if tensor.kind == "input" or tensor.name in needed
            },
            operators=tuple(reversed(kept)),
            loss=loss,
            recompute=recomputed(kept[::-1], loss, self._checkpoints, marked(self.module)),
        )
        wanted = graph.needs_gradient()
        untrained = [each for each in graph.parameters if each.name not in wanted]  # read under no_grad alone
        constants = {each.name: msgspec.structs.replace(each, kind="constant") for each in untrained}
        return msgspec.structs.replace(graph, tensors=graph.tensors | constants)


def of_means(target: str) -> str:
    """The name of the rule for a call that reads a `Mean`."""
    return f"{target} of means"


def _of_all_samples(build: Translation, node: fx.Node, *_: Any, **__: Any) -> Value:
    raise build.samples_meet(node)


def _canonical_names(module: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> its first name."""
    first: dict[int, str] = {}
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {path: first.setdefault(id(tensor), path) for path, tensor in named}
