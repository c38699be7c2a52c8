"""Stacks of equal blocks: three blocks of a stack are exported, the others are derived from them.

`torch.export` takes a third of a second per block of a transformer, and all blocks of a stack are exported in the same
way. This is checked: the full forward runs on the meta device, which takes a millisecond per call, and all of its calls
are compared with those of the shortened module (`stacks_of_equal_blocks`). Blocks that differ are exported completely.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import msgspec
import torch
from torch import nn
from torch.fx import traceback
from torch.utils._pytree import tree_flatten

from executor.dispatch import EagerMode
from executor.kernels.random import seed_of
from executor.recompute import checkpointed, marked
from plans.model.graph import Graph, Operator, Tensor

__all__ = ["Stack", "shortened", "stacks_of_equal_blocks", "with_all_blocks"]

KEPT = 3
"""The first block reads what is before the stack, the second the first; what follows reads the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Blocks that are called one after the other.

    Args:
        path: path of the container in the module.
        keys: of the blocks in the container, in order.
    """

    path: str
    keys: tuple[str, ...]

    @property
    def kept(self) -> tuple[str, ...]:
        """The blocks that are exported."""
        return (*self.keys[: KEPT - 1], self.keys[-1])

    def prefix(self, key: str) -> str:
        """Prefixes of all names in a block."""
        return f"{self.path}.{key}." if self.path else f"{key}."


def stacks_of_equal_blocks(module: nn.Module, run: Callable[[], object]) -> tuple[Stack, ...]:
    """The stacks of `module` whose blocks issue equal calls; none if that is unknown.

    Args:
        module: with parameters and buffers on the meta device.
        run: calls the module's forward on meta tensors.

    Returns:
        Stacks in the order in which they are called, of more than three blocks each, none inside another.
    """
    stacks = _candidates(module)
    if not stacks:
        return ()
    try:
        whole = _recorded(module, stacks, run)
        with shortened(module, stacks):
            short = _recorded(module, stacks, run)
    except (Exception, SystemExit):  # whatever the user's forward or torch raises: the export says it better
        return ()
    if whole is None or short is None or whole.outside != short.outside:
        return ()
    for stack in stacks:
        first, *others = (whole.blocks[stack.path, key] for key in stack.keys)
        if [first, others[0], others[0]] != [short.blocks[stack.path, key] for key in stack.kept]:
            return ()
        if any(block != others[0] for block in others):
            return ()
    return tuple(sorted(stacks, key=lambda stack: whole.begins[stack.path]))


@contextlib.contextmanager
def shortened(module: nn.Module, stacks: Sequence[Stack]) -> Iterator[None]:
    """`module` with three blocks of every stack within this context; they keep their names."""
    containers = [(module.get_submodule(stack.path), stack) for stack in stacks]
    before = [dict(container._modules) for container, _ in containers]
    try:
        for container, stack in containers:
            for key in set(stack.keys) - set(stack.kept):
                del container._modules[key]
        yield
    finally:
        for (container, _), blocks in zip(containers, before, strict=True):
            container._modules.clear()
            container._modules.update(blocks)


def with_all_blocks(graph: Graph, stacks: Sequence[Stack]) -> Graph | None:
    """The graph of the complete module from that of the shortened one; None if its blocks differ."""
    for stack in stacks:
        longer = _with_blocks(graph, stack)
        if longer is None:
            return None
        graph = longer
    return graph


# -- which blocks could be equal ---------------------------------------------------------------------------------------


def _candidates(module: nn.Module) -> tuple[Stack, ...]:
    """Runs of children of one class with parameters of the same names, shapes and dtypes, none of them tied."""
    owners: dict[int, int] = {}
    for _, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)):
        owners[id(tensor)] = owners.get(id(tensor), 0) + 1
    found: list[Stack] = []
    for path, container in module.named_modules():
        if any(_is_inside(path, stack) for stack in found) or not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        described = [(key, _description(child, owners)) for key, child in container.named_children()]
        runs = [list(run) for what, run in itertools.groupby(described, key=lambda each: each[1]) if what is not None]
        longest = max(runs, key=len, default=[])
        if len(longest) > KEPT:
            found.append(Stack(path=path, keys=tuple(key for key, _ in longest)))
    return tuple(found)


def _is_inside(path: str, stack: Stack) -> bool:
    return any(f"{path}.".startswith(stack.prefix(key)) for key in stack.keys)


def _description(block: nn.Module, owners: Mapping[int, int]) -> object:
    """The part of a block that equal blocks have in common; None for a block without parameters or with tied ones."""
    tensors = [*block.named_parameters(), *block.named_buffers()]
    if not tensors or any(owners[id(tensor)] > 1 for _, tensor in tensors):
        return None
    return (
        tuple((name, type(part)) for name, part in block.named_modules()),
        tuple(marked(block)),
        tuple((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors),
    )


# -- what they call ----------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Recording:
    """The calls of a forward, in words that are equal for equal blocks and for stacks of any length.

    Args:
        outside: the calls outside of the stacks.
        blocks: (path of the stack, key) -> the calls of the block.
        begins: path of the stack -> how many calls outside of stacks are before it.
    """

    outside: list[object] = field(default_factory=list)
    blocks: dict[tuple[str, str], list[object]] = field(default_factory=dict)
    begins: dict[str, tuple[int, int]] = field(default_factory=dict)


class _Recorder(EagerMode):
    """Records every call: the operator, its settings, and the origins of the tensors that it reads."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.recording = _Recording()
        self.fault = False
        self.block: tuple[Stack, int] | None = None
        self.last_left: str | None = None
        self._made: dict[int, tuple[object, ...]] = {}
        self._alive: list[torch.Tensor] = []  # so that no other tensor takes its identity
        self._num_given = 0
        named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        for name, tensor in named:
            self._made.setdefault(id(tensor), ("named", name))
            self._alive.append(tensor)

    def enter(self, stack: Stack, index: int) -> None:
        """Note that a block begins."""
        key = (stack.path, stack.keys[index])
        if self.block is not None or key in self.recording.blocks:
            self.fault = True
        follows = index > 0 and (stack.path, stack.keys[index - 1]) in self.recording.blocks
        if index > 0 and not (follows and self.last_left == stack.path):
            self.fault = True
        if index == 0:
            self.recording.begins[stack.path] = (len(self.recording.outside), len(self.recording.begins))
        self.recording.blocks[key] = []
        self.block = (stack, index)

    def leave(self) -> None:
        """Note that the block ends."""
        assert self.block is not None
        self.last_left, self.block = self.block[0].path, None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read, structure = tree_flatten((args, kwargs or {}))
        made = [tensor for tensor in tree_flatten(result)[0] if isinstance(tensor, torch.Tensor)]
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in made)
        again = checkpointed(traceback.current_meta) is not None
        call = (str(func), str(structure), tuple(self._said(each) for each in read), shapes, again)
        if self.block is None:
            self.last_left = None
            place: tuple[object, ...] = ("outside", len(self.recording.outside))
            self.recording.outside.append(call)
        else:
            stack, index = self.block
            calls = self.recording.blocks[stack.path, stack.keys[index]]
            place = ("inside", stack, index, len(calls))
            calls.append(call)
        for number, tensor in enumerate(made):
            self._made.setdefault(id(tensor), (*place, number))
            self._alive.append(tensor)
        return result

    def _said(self, value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return repr(value)
        place = self._made.get(id(value))
        if not value.numel() and (place is None or place[0] != "named"):  # empty tensors are all alike: a block's cache
            return ("empty", tuple(value.shape), value.dtype)
        if place is None:  # an input of forward, or a tensor made before it
            place = self._made[id(value)] = ("given", self._num_given, tuple(value.shape), value.dtype)
            self._num_given += 1
            self._alive.append(value)
        if place[0] == "named":
            return self._said_of_name(str(place[1]))
        if place[0] != "inside":
            return place
        _, stack, index, *call = place
        assert isinstance(stack, Stack) and isinstance(index, int)
        if self.block is not None and self.block[0] == stack:
            if (age := self.block[1] - index) in (0, 1):
                return (("own", "previous")[age], *call)
        elif index == len(stack.keys) - 1:
            return ("last", stack.path, *call)
        self.fault = True
        return None

    def _said_of_name(self, name: str) -> object:
        if self.block is not None:
            stack, index = self.block
            prefix = stack.prefix(stack.keys[index])
            if name.startswith(prefix):
                return ("own name", name.removeprefix(prefix))
        return ("name", name)


@contextlib.contextmanager
def _told_of_export() -> Iterator[None]:
    """Within this context, `torch.compiler.is_exporting` is true."""
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    with mock.patch.object(torch.compiler, flags[0], True), mock.patch.object(torch.compiler, flags[1], True):
        yield


def _recorded(module: nn.Module, stacks: Sequence[Stack], run: Callable[[], object]) -> _Recording | None:
    """The calls of one forward; None unless every block is called exactly once, in order."""
    recorder, handles = _Recorder(module), []
    try:
        for stack in stacks:
            blocks = module.get_submodule(stack.path)._modules
            present = Stack(path=stack.path, keys=tuple(key for key in stack.keys if key in blocks))
            for index, key in enumerate(present.keys):
                block = blocks[key]
                assert block is not None
                entering = lambda *_, stack=present, index=index: recorder.enter(stack, index)  # noqa: E731
                handles.append(block.register_forward_pre_hook(entering))
                handles.append(block.register_forward_hook(lambda *_: recorder.leave()))
        with _told_of_export(), torch.no_grad(), recorder:
            run()
    finally:
        for handle in handles:
            handle.remove()
    expected = {(stack.path, key) for stack in stacks for key in stack.keys}
    kept = {(stack.path, key) for stack in stacks for key in stack.kept}
    complete = recorder.recording.blocks.keys() in (expected, kept)
    return None if recorder.fault or not complete else recorder.recording


# -- the graph ---------------------------------------------------------------------------------------------------------


def _with_blocks(graph: Graph, stack: Stack) -> Graph | None:
    first, second, last = (stack.prefix(key) for key in stack.kept)
    position = {
        prefix: [where for where, operator in enumerate(graph.operators) if operator.name.startswith(prefix)]
        for prefix in (first, second, last)
    }
    middle = [graph.operators[where] for where in position[second]]
    ends = [graph.operators[where] for where in position[last]]
    if not middle or position[first][-1:] > position[second][:1] or position[second][-1] > position[last][0]:
        return None
    back = {last: second, second: first}
    if [_renamed(end, back) for end in ends] != [_renamed(operator, {}) for operator in middle]:
        return None
    if _recomputed(graph, second) != _recomputed(graph, last):
        return None
    inside = {first: (first, second), second: (second, last)}
    for operator in graph.operators:
        for name in operator.inputs:
            for prefix, readers in inside.items():
                if name.startswith(prefix) and not operator.name.startswith(readers):
                    return None
    numbers = _numbers_of_seeds(graph)
    step = _first_number(ends, numbers) - _first_number(middle, numbers)
    operators = list(graph.operators[: position[second][-1] + 1])
    before = second
    for count, key in enumerate(stack.keys[KEPT - 1 : -1], start=1):
        names = {second: stack.prefix(key), first: before}
        operators += [_renamed(operator, names, numbers, count * step) for operator in middle]
        before = stack.prefix(key)
    added = (len(stack.keys) - KEPT) * step
    following = graph.operators[position[second][-1] + 1 :]
    operators += [_renamed(operator, {second: before}, numbers, added) for operator in following]
    return msgspec.structs.replace(
        graph, tensors=_with_tensors(graph, stack), operators=tuple(operators), recompute=_with_recompute(graph, stack)
    )


def _with_recompute(graph: Graph, stack: Stack) -> tuple[str, ...]:
    """The operators to recompute of all blocks, in the order of the blocks."""
    _, second, last = (stack.prefix(key) for key in stack.kept)
    found = list(graph.recompute)
    place = next((at for at, name in enumerate(found) if name.startswith(last)), len(found))
    inside = [name.removeprefix(second) for name in found if name.startswith(second)]
    found[place:place] = [stack.prefix(key) + name for key in stack.keys[KEPT - 1 : -1] for name in inside]
    return tuple(found)


def _recomputed(graph: Graph, prefix: str) -> set[str]:
    """The names within a block of the operators to recompute."""
    return {name.removeprefix(prefix) for name in graph.recompute if name.startswith(prefix)}


def _with_tensors(graph: Graph, stack: Stack) -> dict[str, Tensor]:
    """The tensors of all blocks: parameters, constants and activations in the order of the blocks."""
    _, second, last = (stack.prefix(key) for key in stack.kept)
    tensors: dict[str, Tensor] = {}
    added = set()
    for name, tensor in graph.tensors.items():
        if name.startswith(last) and tensor.kind not in added:
            added.add(tensor.kind)
            for key in stack.keys[KEPT - 1 : -1]:
                for old, each in graph.tensors.items():
                    if old.startswith(second) and each.kind == tensor.kind:
                        longer = stack.prefix(key) + old.removeprefix(second)
                        tensors[longer] = msgspec.structs.replace(each, name=longer)
        tensors[name] = tensor
    return tensors


def _renamed(
    operator: Operator, names: Mapping[str, str], numbers: Mapping[int, int] | None = None, added: int = 0
) -> Operator:
    """An operator under other names, its seed as many random operators later; without `numbers` it has none."""

    def renamed(name: str) -> str:
        for old, new in names.items():
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    attrs = dict(operator.attrs)
    seed = attrs.pop("seed", None)
    if numbers is not None and isinstance(seed, int):
        attrs["seed"] = seed_of(numbers[seed] + added)
    return msgspec.structs.replace(
        operator,
        name=renamed(operator.name),
        inputs=tuple(renamed(name) for name in operator.inputs),
        outputs=tuple(renamed(name) for name in operator.outputs),
        module=renamed(f"{operator.module}.").removesuffix("."),
        attrs=attrs,
    )


def _numbers_of_seeds(graph: Graph) -> dict[int, int]:
    """seed -> the number of its random operator in the forward, counted from 1."""
    wanted = {operator.attrs["seed"] for operator in graph.operators if "seed" in operator.attrs}
    found: dict[int, int] = {}
    for number in itertools.count(1):
        if len(found) == len(wanted):
            return found
        if (seed := seed_of(number)) in wanted:
            found[seed] = number
    raise AssertionError("seeds are of random operators")


def _first_number(operators: Sequence[Operator], numbers: Mapping[int, int]) -> int:
    return next((numbers[int(str(operator.attrs["seed"]))] for operator in operators if "seed" in operator.attrs), 0)
