"""Translation of an exported module, node by node, into the operators of a graph.

The rules (`executor.capture.rules`) translate single aten calls and add operators (`executor.capture.building`). This
module handles the inputs, the order of the calls and the finished graph.
"""

from __future__ import annotations

import inspect
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

from executor.capture.building import Building
from executor.capture.calls.masks import shape_only
from executor.capture.calls.straight import NO_GRADIENT
from executor.capture.places import NotAsTorchError
from executor.capture.values import Complex, Mean, Unreadable, Value
from executor.recompute import marked, recomputed
from plans.errors import TwofoldError
from plans.model.graph import Graph, Tensor

__all__ = ["Rule", "Translation", "of_means"]

_MEAN = (
    "the loss must be a mean over the samples (or a sum divided by their number), so that micro-batches average to it"
)
LOSSES = ("cross_entropy", "l1_loss", "mean_loss", "mse_loss")


SettingsT = TypeVar("SettingsT")

Rule = Callable[..., Value]
"""(translation, node, *arguments of the aten call) -> the translation of the node."""


class Translation(Building):
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
        super().__init__(module, grown)
        self.fallback = fallback
        self.computed = computed
        self.complex_rule = complex_rule
        self.rules = rules
        self.values: dict[fx.Node, Value] = {}
        self.shape_only = shape_only(exported.graph)
        placed = (
            node.meta["val"] for node in exported.graph.nodes if node.name in exported.graph_signature.user_inputs
        )
        self.batch_size = next(placed).shape[0]
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
                if not node.meta["val"].numel():
                    self.values[node] = Unreadable(reason=f"the parameter {path!r} has no elements")
                    continue
                if path in self.tensors and self.tensors[path].kind == "input":
                    raise TwofoldError(f"{path!r} names both an argument of forward and a parameter; rename one")
                if not self.module.get_parameter(path).requires_grad:
                    self.values[node] = self._enter_constant(path, node, "frozen parameter")
                    self._keep_before_change(node)
                else:
                    self.values[node] = self._enter(path, node, "parameter")
                    self.trained.add(path)
            elif spec.kind is InputKind.BUFFER:
                path = canonical[str(spec.target)]
                if path in self.tensors and self.tensors[path].kind == "input":
                    raise TwofoldError(f"{path!r} names both an argument of forward and a buffer; rename one")
                self.values[node] = self._enter_constant(path, node, "buffer")
                self._keep_before_change(node)
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

    def _keep_before_change(self, node: fx.Node) -> None:
        """Make reads of a buffer or frozen parameter that the forward changes use the value before the change."""
        name = self.values[node]
        changes = [user for user in node.users if user.target is torch.ops.twofold.assign.default]
        if changes and isinstance(name, str) and not self.is_counted_by_norm(name):
            kept = self.values[node] = self.make_as(changes[0], "buffer", name)
            self.changed[kept] = name

    def is_counted_by_norm(self, name: str) -> bool:
        """Whether a buffer is the number of micro-batches of a batch norm, whose statistics count them."""
        owner, _, last = name.rpartition(".")
        norms = nn.modules.batchnorm._BatchNorm
        return last == "num_batches_tracked" and isinstance(self.module.get_submodule(owner), norms)

    def _enter(self, name: str, node: fx.Node, kind: str) -> Value:
        shape, dtype = self.shape_dtype(node)
        is_complex = node.meta["val"].is_complex()
        if is_complex and kind != "constant":
            raise TwofoldError(f"the {kind} {name!r} is complex; give its real and imaginary parts")
        shape = (*shape, 2) if is_complex else shape
        self.tensors[name] = Tensor(name=name, shape=shape, dtype=dtype, kind=kind)
        return self.as_complex(node, name) if is_complex else name

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
        (result,) = output.args[0]
        return self.values[result]

    def _call_if_known(self, node: fx.Node) -> Value:
        """A call whose value follows from shapes. One that cannot be planned is an error only if its value is read."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return self._call(node)
            except TwofoldError as error:
                return Unreadable(reason=str(error))

    def _call(self, node: fx.Node) -> Value:
        target = str(node.target) if node.target is not python_operator.getitem else "getitem"
        is_complex = target != "getitem" and any(isinstance(each, Complex) for each in self._read_by(node))
        rule = self.complex_rule(target) if is_complex else self.rules.get(target)
        if rule is None and not self._reads_means(node, target):
            return self.fallback(self, node)
        args, kwargs = self.held(node, tuple(node.args)), self.held(node, dict(node.kwargs))
        rule, args = self._with_means(node, rule, args)
        try:
            inspect.signature(rule).bind(self, node, *args, **kwargs)
        except TypeError as error:
            return self._as_torch(node, self.refused(node, f"one of its settings is not supported: {error}"))
        try:
            return rule(self, node, *args, **kwargs)
        except NotAsTorchError:
            raise
        except TwofoldError as error:
            return self._as_torch(node, error)

    def _read_by(self, node: fx.Node) -> list[Value]:
        return [self.values.get(input_node) for input_node in node.all_input_nodes]

    def _reads_means(self, node: fx.Node, target: str) -> bool:
        """Whether a call reads a `Mean` and has a rule for that."""
        return of_means(target) in self.rules and any(isinstance(each, Mean) for each in self._read_by(node))

    def _with_means(self, node: fx.Node, rule: Rule | None, args: tuple[Any, ...]) -> tuple[Rule, tuple[Any, ...]]:
        """The rule of a call that may read values of all samples, and its arguments."""
        tensors = _flat(args)
        means = [tensor for tensor in tensors if isinstance(tensor, Mean)]
        meets = any(tensor in self.batched for tensor in tensors if isinstance(tensor, str))
        apart = meets and rule is not None and not str(node.target).startswith("aten.div")  # a mean over what counts
        if means and not apart and (of_means_rule := self.rules.get(of_means(str(node.target)))) is not None:
            return of_means_rule, args
        assert rule is not None  # otherwise there is a rule for means
        if not means and not (meets and any(tensor in self.shared for tensor in tensors if isinstance(tensor, str))):
            return rule, args
        if meets and torch.Tag.pointwise not in getattr(node.target, "tags", ()):
            return _of_all_samples, args
        args = _mapped(args, lambda each: self.of_batch(node, each) if isinstance(each, Mean) else each)
        if meets:
            self.warn_of_micro_batches(node)
        return rule, args

    def _as_torch(self, node: fx.Node, error: TwofoldError) -> Value:
        """A call in a form that its rule does not support, as torch's own operator.

        Raises:
            TwofoldError: the rule's error, where that does not work either.
        """
        if any(isinstance(each, Mean) for each in self._read_by(node)):
            raise error
        try:
            return self.fallback(self, node)
        except TwofoldError:
            raise error from None

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

    # -- the result

    def _loss(self, mean: Mean) -> str:
        """The operator that makes the mean which the forward returns."""
        if mean.is_sum:
            raise self.refused(mean.node, _MEAN)
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
            if loss in made:
                raise self.refused(self.made_by[made[loss].name], f"it makes the loss of all samples at once; {_MEAN}")
            raise TwofoldError(f"the loss of {kind} is made by no operator; {_MEAN}")
        needed, kept = {loss}, []
        for operator in reversed(self.operators):
            if operator.kind == "assign" or needed.intersection(operator.outputs):
                needed.update((*operator.inputs, *operator.outputs))
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
            recompute=recomputed(kept[::-1], loss, self.checkpoints, marked(self.module)),
        )
        wanted = graph.needs_gradient()
        untrained = [
            parameter for parameter in graph.parameters if parameter.name not in wanted
        ]  # read under no_grad alone
        constants = {tensor.name: msgspec.structs.replace(tensor, kind="constant") for tensor in untrained}
        return msgspec.structs.replace(graph, tensors=graph.tensors | constants)


def of_means(target: str) -> str:
    """The name of the rule for a call that reads a `Mean`."""
    return f"{target} of means"


def _flat(args: Any) -> list[Any]:
    return [inner for argument in args for inner in _flat(argument)] if isinstance(args, tuple) else [args]


def _mapped(args: Any, to: Callable[[Any], Any]) -> Any:
    return tuple(_mapped(argument, to) for argument in args) if isinstance(args, tuple) else to(args)


def _of_all_samples(build: Translation, node: fx.Node, *_: Any, **__: Any) -> Value:
    raise NotAsTorchError(str(build.samples_meet(node)))


def _canonical_names(module: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> its first name."""
    first: dict[int, str] = {}
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {path: first.setdefault(id(tensor), path) for path, tensor in named}
