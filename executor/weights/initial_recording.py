"""Recorded initialisation: the calls that would write into tensors without memory.

While a module is built on the meta device, a `Recording` logs every aten call by the memory that it reads and writes.
One tensor's values can then be made alone: the calls that lead to it are played again on the CPU, in order, with a
generator of their own. So the values do not depend on which other tensors are made, where, or when.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from executor.dispatch import EagerMode

__all__ = ["Recorded", "Recording"]

# torch 2.13 draws a truncated normal by rejection, which looks at values, and so does nothing on meta: this one
# initialiser is logged as a whole. Everything that torch.nn.init.trunc_normal_ is imported as goes through this name.
_TRUNCATED_NORMAL = "_no_grad_trunc_normal_"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _View:
    """A meta tensor as a part of its memory; holding the storage keeps its key from being used again."""

    storage: torch.UntypedStorage
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _View:
        return cls(
            storage=tensor.untyped_storage(),
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
            dtype=tensor.dtype,
        )

    @property
    def key(self) -> int:
        """An identifier of the memory."""
        return self.storage._cdata


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Call:
    """One call; `args` and `kwargs` hold views in place of meta tensors."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[int]
    writes: frozenset[int]
    outputs: tuple[_View, ...] = ()
    leaves_unwritten: bool = False  # torch.empty and its like


class Recording(EagerMode):
    """Logs the aten calls on meta tensors made inside `with recording:`.

    >>> with Recording() as recording, torch.device("meta"):
    ...     weight = torch.empty(2, 3).fill_(7)
    >>> recording.of(weight).values(seed=0)
    tensor([[7., 7., 7.],
            [7., 7., 7.]])
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Call] = []
        self._writers: dict[int, list[int]] = {}  # memory -> positions of the calls that write it
        self._truncated_normal: Any = None

    def __enter__(self) -> Self:
        """Start to record; see `_no_grad_trunc_normal_` below."""
        self._truncated_normal = getattr(nn.init, _TRUNCATED_NORMAL, None)
        if self._truncated_normal is not None:
            setattr(nn.init, _TRUNCATED_NORMAL, self._log_truncated_normal)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Stop recording."""
        super().__exit__(*error)
        if self._truncated_normal is not None:
            setattr(nn.init, _TRUNCATED_NORMAL, self._truncated_normal)

    def _log_truncated_normal(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if tensor.is_meta:
            touched = frozenset({_key(tensor)})
            arguments = _as_views((tensor, *args))
            self._log(
                _Call(function=self._truncated_normal, args=arguments, kwargs=kwargs, reads=touched, writes=touched)
            )
            return tensor
        return self._truncated_normal(tensor, *args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry out a call and log it if it writes."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        outputs = tuple(_View.of(tensor) for tensor in _tensors(result) if tensor.is_meta)
        if not outputs:
            return result
        reads = frozenset(_key(tensor) for tensor in _tensors((args, kwargs)) if tensor.is_meta)
        made = {view.key for view in outputs} - reads
        changed = {
            _key(tensor)
            for argument, given in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(given)
        }
        changed |= {
            _key(tensor)
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in kwargs
            for tensor in _tensors(kwargs[argument.name])
        }
        if writes := frozenset(made | changed):
            self._log(
                _Call(
                    function=func, args=_as_views(tuple(args)), kwargs=_as_views(dict(kwargs)), reads=reads,
                    writes=writes, outputs=outputs, leaves_unwritten="empty" in func._schema.name,
                )
            )  # fmt: skip
        return result

    def _log(self, call: _Call) -> None:
        for key in call.writes:
            self._writers.setdefault(key, []).append(len(self._calls))
        self._calls.append(call)

    def of(self, tensor: torch.Tensor) -> Recorded:
        """The recorded initialisation of a meta tensor."""
        return Recorded(recording=self, view=_View.of(tensor), version=tensor._version)

    def leading_to(self, key: int) -> Iterator[_Call]:
        """The calls that the contents of a memory depend on, in order."""
        needed: set[int] = set()
        seen: dict[int, int] = {}  # memory -> up to which call its writers are taken already
        waiting = [(key, len(self._calls))]
        while waiting:
            memory, before = waiting.pop()
            done = seen.get(memory, 0)
            if before <= done:
                continue
            seen[memory] = before
            for position in self._writers.get(memory, []):
                if done <= position < before:
                    needed.add(position)
                    waiting.extend((read, position) for read in self._calls[position].reads)
        return (self._calls[position] for position in sorted(needed))


@dataclass(slots=True, kw_only=True, eq=False)
class Recorded:
    """How one tensor is initialised. `version` tells whether it was written after the recording."""

    recording: Recording
    view: _View
    version: int

    def values(self, seed: int) -> torch.Tensor:
        """The values on the CPU; elements that nothing was written to are NaN (of a floating dtype).

        Args:
            seed: seed of a generator that serves this tensor alone.
        """
        memories: dict[int, torch.UntypedStorage] = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(seed)
            for call in self.recording.leading_to(self.view.key):
                result = call.function(*_as_tensors(call.args, memories), **_on_cpu(_as_tensors(call.kwargs, memories)))
                if call.leaves_unwritten:
                    result = _unwritten(result)
                for view, tensor in zip(call.outputs, _tensors(result) if call.outputs else [], strict=True):
                    if view.key not in memories:
                        memories[view.key] = tensor.untyped_storage()
            return _placed(self.view, memories).clone(memory_format=torch.contiguous_format)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for entry in value for tensor in _tensors(entry)]
    return [tensor for entry in value.values() for tensor in _tensors(entry)] if isinstance(value, dict) else []


def _as_views(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _View.of(value) if value.is_meta else value.detach().clone()
    if isinstance(value, tuple | list):
        return type(value)(_as_views(entry) for entry in value)
    return {key: _as_views(entry) for key, entry in value.items()} if isinstance(value, dict) else value


def _as_tensors(value: Any, memories: dict[int, torch.UntypedStorage]) -> Any:
    if isinstance(value, _View):
        return _placed(value, memories)
    if isinstance(value, tuple | list):
        return type(value)(_as_tensors(entry, memories) for entry in value)
    return {key: _as_tensors(entry, memories) for key, entry in value.items()} if isinstance(value, dict) else value


def _placed(view: _View, memories: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    if view.key not in memories:  # made where no call was seen, as torch.tensor does on meta: contents unknown
        count = -(-view.storage.nbytes() // view.dtype.itemsize)
        memories[view.key] = _unwritten(torch.empty(count, dtype=view.dtype)).untyped_storage()
    return torch.empty(0, dtype=view.dtype).set_(memories[view.key], view.offset, view.shape, view.stride)


def _unwritten(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.zero_()


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: torch.device("cpu") if isinstance(value, torch.device) else value for key, value in kwargs.items()}
