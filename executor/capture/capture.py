"""Capture: the operator graph of any torch module, without its weights and without data.

`torch.export` runs the module's forward on the meta device (`executor.capture.tracing`) and records its aten calls.
They are rewritten (`executor.capture.calls`), and `executor.capture.rules` translates them into the operators of
`plans.operators`. The forward must return the scalar loss (see `executor.train.losscell.WithLossCell`). The user's
module is not changed.

A plan cuts the batch into micro-batches, so a model must treat the samples of a batch independently until the loss. To
check this, the module is exported for two batch sizes. One dim of every tensor computed from the inputs must grow with
the batch, no operator may work along it, and `Graph.with_batch` must predict every shape of the second export.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.export import ExportedProgram

from executor.autocast import autocast_as_casts
from executor.capture.calls.buffers import doubled_tables, known_masks, known_numbers
from executor.capture.calls.concatenated import split_concatenated
from executor.capture.calls.control_flow import drop_checks, numbers_from_shapes
from executor.capture.calls.counted_masks import rows_of_masks_counted
from executor.capture.calls.counts import state_counts
from executor.capture.calls.decompose import decompose_sized, divide_by_samples, square_norms
from executor.capture.calls.derivatives import derivatives_as_calls, write_derivatives
from executor.capture.calls.functional import line_of, without_in_place
from executor.capture.calls.histograms import count_by_sums
from executor.capture.calls.masked_rows import check_masks, write_masked_rows
from executor.capture.calls.masks import fix_sizes, state_masks
from executor.capture.calls.row_counts import check_row_counts
from executor.capture.calls.rows import choose_in_samples
from executor.capture.calls.straight import (
    drop_empty,
    drop_zeros,
    inline_nested,
    keep_batch_first,
    name_alike,
    take_stacked,
)
from executor.capture.calls.vmapped import vmap_in_one_piece, write_vmapped
from executor.capture.calls.written_attention import join_attention
from executor.capture.errors import FIXED, explained, where_in
from executor.capture.examples import batch_size_of, examples_of, with_batch
from executor.capture.repeats import Stack, shortened, stacks_of_equal_blocks, with_all_blocks
from executor.capture.rules.complex_numbers import complex_rule
from executor.capture.rules.functions import functions_as_calls
from executor.capture.rules.opaque import computed, opaque
from executor.capture.rules.rules import RULES
from executor.capture.tracing.attention import batch_first_attention
from executor.capture.tracing.export_contexts import (
    as_if_not_exported,
    buffers_changed_in_place,
    data_without_gradient,
    on_meta,
    silent,
)
from executor.capture.tracing.gradients import (
    check_hooks,
    check_memory,
    refusing_own_gradients,
    switching_gradients,
)
from executor.capture.tracing.library import in_other_forms
from executor.capture.tracing.python_state import (
    PythonState,
    attributes_kept,
    changed_in,
    check_python_state,
    python_state,
    restore,
    with_values,
)
from executor.capture.translation import Translation
from executor.flex import flex_attention_by_formula
from executor.loss_of import loss_of
from executor.recompute import noting_checkpoints
from plans.errors import TwofoldError
from plans.model.graph import Graph
from plans.model.whole import whole_operators
from plans.operators import factors

__all__ = ["capture"]

EXPORTED_BATCHES = (4, 5, 7)
"""Samples of an export; the next number if another dim, such as 4 experts, is as large."""


class _UnclearBatchError(TwofoldError):
    """The size of the batch equals the size of another factor of a dim."""


def capture(module: nn.Module, example_inputs: object, *, name: str | None = None) -> Graph:
    """Capture the operator graph of one training step of `module`, for the batch size of the examples.

    Args:
        module: a module whose forward takes a batch and returns the scalar loss, alone or with other results
            (`executor.loss_of`). Nothing is computed and no weight is read, so parameters may be on the meta device
            (`no_init_parameters`).
        example_inputs: one entry per argument of forward, as a tuple or as a dict by argument name; an entry is a
            tensor or array (its values are ignored), a shape (float32), or a pair (shape, dtype). Dim 0 is the batch in
            all of them.
        name: name of the graph; by default the class of the (wrapped) network.

    Returns:
        The graph. Operators are named by module path and kind ("layer1.linear"), parameters as in the state dict (a
        tied parameter by its first name), inputs as the arguments of forward, in that order. Buffers and frozen
        parameters that are read are constants. Norms and rotary positions written in parts become one operator
        (`plans.model.whole`).

    Raises:
        TwofoldError: what export cannot capture (data-dependent control flow), an operator that is not known, gradients
            of its own (autograd functions, hooks, inference_mode), dims that are not static, a batch mixed into other
            dims, a parameter that the forward changes, a forward that does not return a loss.

    Warns:
        UserWarning: parameters that the loss does not depend on; they are not part of the graph. Operators that twofold
            does not know: every rank computes all of them.

    >>> from executor.train.losscell import MAELoss, WithLossCell
    >>> net = WithLossCell(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), MAELoss())
    >>> graph = capture(net, ((32, 4), ((32,), "int64")))
    >>> [operator.name for operator in graph.operators][:3]
    ['_backbone.0.linear', '_backbone.1.relu', '_backbone.2.linear']
    """
    if not isinstance(module, nn.Module):
        raise TwofoldError(f"capture needs a torch.nn.Module, not {module!r}")
    check_hooks(module)
    check_memory(module)
    examples = examples_of(module, example_inputs)
    batch_size = batch_size_of(examples)
    name = name or type(getattr(module, "_backbone", module)).__name__
    graph = _graph(module, examples, batch_size, name)
    read = {parameter.name for parameter in graph.parameters}
    if not read:
        raise TwofoldError(f"the loss of {name} depends on no parameter that is trained; is it under torch.no_grad?")
    if unread := [
        path for path, parameter in module.named_parameters() if parameter.requires_grad and path not in read
    ]:
        warnings.warn(f"the loss does not depend on {', '.join(unread)}; they stay unchanged", stacklevel=2)
    return whole_operators(graph, doubled_tables(module, graph))


def _graph(module: nn.Module, examples: Mapping[str, torch.Tensor], batch_size: int, name: str) -> Graph:
    """The graph of the module's calls: equal blocks are exported once if possible."""
    stacks = _stacks(module, examples)
    if stacks:
        graph = None
        with (
            contextlib.suppress(TwofoldError),
            warnings.catch_warnings(record=True) as caught,
            shortened(module, stacks),
        ):
            short = _graph_of_exports(module, examples, batch_size, name)
            graph = with_all_blocks(short, stacks)
        if graph and not caught:
            return graph
    return _graph_of_exports(module, examples, batch_size, name)


def _stacks(module: nn.Module, examples: Mapping[str, torch.Tensor]) -> tuple[Stack, ...]:
    with _in_forms_to_capture(module, 1):
        return stacks_of_equal_blocks(module, lambda: module(*examples.values()))


def _graph_of_exports(module: nn.Module, examples: Mapping[str, torch.Tensor], batch_size: int, name: str) -> Graph:
    """The graph of `module`, exported for two small batches: values that follow from shapes alone stay small."""
    for count in EXPORTED_BATCHES[:-1]:
        with contextlib.suppress(_UnclearBatchError):
            return _graph_of_samples(module, examples, count, name).with_batch(batch_size)
    return _graph_of_samples(module, examples, EXPORTED_BATCHES[-1], name).with_batch(batch_size)


def _graph_of_samples(module: nn.Module, examples: Mapping[str, torch.Tensor], small: int, name: str) -> Graph:
    """The graph of a small batch."""
    sizes = (small, 2 * small)
    changed: dict[tuple[str, str], Any] = {}
    exports = [_exported(module, with_batch(examples, size), size, changed) for size in sizes]
    again = functools.partial(_exported, module, with_batch(examples, small), small, {}, changed)
    check_python_state(module, changed, exports[0].graph, lambda: again().graph)
    hiding: dict[str, bool | None] = {}
    for exported in exports:
        state_masks(exported.graph, hiding)
    fix_sizes(exports[0].graph, exports[1].graph, small)
    grown = _grown(exports[0], exports[1], small)
    if grown:
        check_masks(exports[0].graph, grown)
    for exported in exports:
        split_concatenated(exported.graph, grown)
        choose_in_samples(exported.graph, grown)
        count_by_sums(exported.graph, grown)
        drop_zeros(exported.graph)
        square_norms(exported.graph)
    divide_by_samples(exports[0].graph, exports[1].graph, small)
    decompose_sized(exports[0].graph, exports[1].graph, RULES)
    grown = _grown(exports[0], exports[1], small)
    small_batch, large_batch = (
        Translation(exported, module, tuple(examples), RULES, opaque, computed, complex_rule, grown)
        for exported in exports
    )
    graph, double = (
        translation.graph(name, size) for translation, size in zip((small_batch, large_batch), sizes, strict=True)
    )
    _check_batch(graph, double, small_batch.where_made)
    return graph


# -- export ------------------------------------------------------------------------------------------------------------


def _exported(
    module: nn.Module, examples: Mapping[str, torch.Tensor], batch_size: int,
    changed: dict[tuple[str, str], Any], start: PythonState = MappingProxyType({}),
) -> ExportedProgram:  # fmt: skip
    """The calls of a forward that starts from the state `start`; what the forward changes is stored in `changed`."""
    masks, numbers = known_masks(module), known_numbers(module)
    exported = _recorded(module, examples, batch_size, changed, start)
    check_row_counts(exported.graph, lambda count: _recorded(module, examples, batch_size, {}, start, count).graph)
    name_alike(exported)
    write_vmapped(exported)
    _check_shapes(exported)
    without_in_place(exported)
    write_masked_rows(exported)
    write_derivatives(exported)
    drop_empty(exported)
    keep_batch_first(exported)
    take_stacked(exported)
    join_attention(exported, masks)
    state_counts(exported, numbers)
    return exported


def _recorded(
    module: nn.Module, examples: Mapping[str, torch.Tensor], batch_size: int,
    changed: dict[tuple[str, str], Any], start: PythonState, rows_of_masks: int | None = None,
) -> ExportedProgram:  # fmt: skip
    """The calls of a forward as torch.export records them, with nested graphs put into one."""

    def export() -> ExportedProgram:
        with (
            _in_forms_to_capture(module, batch_size, rows_of_masks),
            _returning_its_loss(module, changed, start),
        ):
            return torch.export.export(module, tuple(examples.values()), strict=False)

    try:
        try:
            exported = export()
        except TwofoldError:
            raise
        except (Exception, SystemExit) as error:  # whatever the user's forward or torch raises
            try:
                with as_if_not_exported():
                    exported = export()
            except (Exception, SystemExit):
                raise error from None
    except TwofoldError as error:
        raise TwofoldError(f"{error}{where_in(error, module)}") from None
    except (Exception, SystemExit) as error:
        raise TwofoldError(explained(error, module, batch_size)) from error
    inline_nested(exported)
    drop_checks(exported.graph)
    return exported


def _check_shapes(exported: ExportedProgram) -> None:
    """Refuse tensors whose shape depends on values."""
    for node in exported.graph.nodes:
        made = node.meta.get("val")
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor) and not all(type(size) is int for size in tensor.shape):
                raise TwofoldError(
                    f"{node.target} ({line_of(node)}) makes a tensor whose shape depends on values; {FIXED}"
                )


def _grown(exported: ExportedProgram, double: ExportedProgram, batch_size: int) -> dict[str, int]:
    """Call -> the dim of its result that is the batch, from exports of two batch sizes; empty if the calls differ."""
    pairs = list(zip(exported.graph.nodes, double.graph.nodes, strict=False))
    if len(exported.graph.nodes) != len(double.graph.nodes) or any(one.name != other.name for one, other in pairs):
        return {}
    found = {}
    for one, other in pairs:
        before, after = (getattr(node.meta.get("val"), "shape", ()) for node in (one, other))
        if (place := _place(before, after, batch_size)) is not None:
            found[one.name] = place
    return found


def _place(before: Sequence[int], after: Sequence[int], batch_size: int) -> int | None:
    """The dim that is the batch or contains it as a factor: the one that doubles with the batch."""
    if len(before) != len(after):
        return None
    changed = [at for at, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
    if len(changed) != 1 or before[changed[0]] % batch_size or after[changed[0]] != 2 * before[changed[0]]:
        return None
    return changed[0]


@contextlib.contextmanager
def _returning_its_loss(
    module: nn.Module, changed: dict[tuple[str, str], Any], start: PythonState
) -> Iterator[None]:  # fmt: skip
    """Within this context the forward returns its loss alone."""
    forward = module.forward

    @functools.wraps(forward)
    def loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        restore(module, start)
        before = python_state(module)
        with buffers_changed_in_place(module), switching_gradients(module):
            made = loss_of(forward(*args, **kwargs), type(module).__name__)
        changed.update(with_values(changed_in(before, python_state(module))))
        return made

    with mock.patch.object(module, "forward", loss):
        yield


@contextlib.contextmanager
def _in_forms_to_capture(module: nn.Module, batch_size: int, rows_of_masks: int | None = None) -> Iterator[None]:
    """Within this context the module computes on the meta device, with layers in forms that can be captured."""
    with (
        attributes_kept(module),
        data_without_gradient(),
        silent(),
        batch_first_attention(),
        flex_attention_by_formula(),
        in_other_forms(module),
        functions_as_calls(),
        noting_checkpoints(),
        vmap_in_one_piece(),
        numbers_from_shapes(),
        rows_of_masks_counted(module, batch_size, rows_of_masks),
        autocast_as_casts(),
        on_meta(module),
        refusing_own_gradients(),
        derivatives_as_calls(),
    ):
        yield


# -- the batch ---------------------------------------------------------------------------------------------------------


def _is_whole(dim: str) -> bool:
    return dim.startswith("_")


_WAY_OUT = (
    "a step cuts the batch into micro-batches, so each sample must be computed separately along "
    "dim 0: pass what it is compared with as a separate input, such as negatives of [batch, negatives, ...]"
)


def _check_batch(graph: Graph, double: Graph, where: Callable[[str], str]) -> None:
    """Refuse a model in which the samples of a batch meet before the loss, or whose shapes do not follow the batch.

    Args:
        graph: graph of a batch.
        double: the graph of the same module for a batch of twice the size.
    """
    size = graph.batch_size
    pairs = itertools.zip_longest(graph.operators, double.operators)
    for one, other in pairs:
        if one is None or other is None or (one.name, one.kind, one.attrs) != (other.name, other.kind, other.attrs):
            what = f"operator {one.name!r} ({one.kind}){where(one.name)}" if one else "the number of operators"
            raise TwofoldError(f"{what} changes with the number of samples; {_WAY_OUT}")
    batched = _batched(graph, double, where)
    for name, tensor in graph.tensors.items():
        if tensor.kind == "activation" and name != graph.loss:
            _check_growth(graph, double, name, name in batched, where)
    try:
        producers, expected = graph.producers(), graph.with_batch(2 * size)
    except TwofoldError as error:
        raise _UnclearBatchError(str(error)) from None
    for name, tensor in double.tensors.items():
        if expected.tensors[name].shape != tensor.shape:
            raise _UnclearBatchError(
                f"operator {producers[name].name!r} ({producers[name].kind}) cannot be resized with the batch: its "
                f"output is {tensor.shape} for a batch of {2 * size}, expected {expected.tensors[name].shape}"
            )


def _batched(graph: Graph, double: Graph, where: Callable[[str], str]) -> set[str]:
    """The tensors with a batch dim. Operators that work along it are refused."""
    batched = {tensor.name for tensor in graph.tensors.values() if tensor.kind == "input"}
    for operator in graph.operators:
        if graph.spec(operator).of_the_batch:
            continue
        if any(name in batched for name in operator.inputs):
            batched.update(operator.outputs)
        for dims, name in zip(graph.spec(operator).inputs, operator.inputs, strict=True):
            place = _place(graph.tensors[name].shape, double.tensors[name].shape, graph.batch_size)
            if (
                place is not None
                and operator.kind not in ("function", "opaque")  # which were tried
                and all(_is_whole(factor) for factor in factors(dims[place]))
            ):
                raise TwofoldError(
                    f"operator {operator.name!r} ({operator.kind}){where(operator.name)} works along dim {place} of "
                    f"{name!r}, the batch; {_WAY_OUT}"
                )
    return batched


def _check_growth(
    graph: Graph, double: Graph, name: str, is_batched: bool, where: Callable[[str], str]
) -> None:  # fmt: skip
    """Refuse an activation unless exactly one of its dims grows with the batch."""
    before, after = graph.tensors[name].shape, double.tensors[name].shape
    producer, size = graph.producers()[name], graph.batch_size
    called = producer.attrs.get("target", producer.kind)
    what = f"operator {producer.name!r} ({called}){where(producer.name)}"
    if is_batched and before == after:
        raise TwofoldError(f"{what} makes one {before} out of all samples of a batch; {_WAY_OUT}")
    follows = _place(before, after, size) is not None
    if not (follows if is_batched else before == after):
        raise TwofoldError(
            f"{what} mixes the batch into other dims: its output is {before} for a batch of {size} and {after} for "
            f"{2 * size}; {_WAY_OUT}"
        )
