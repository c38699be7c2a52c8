"""A device of the tests that records launches as an accelerator does, on the CPU.

While it records, every torch operation is noted with its tensors, and nothing of it lasts: what the operations wrote in
place is put back at the end. A replay carries the same operations out on the same memory. So whatever a step has from
the host, such as a learning rate or a batch in another place, is in the recording as it was, as in a CUDA graph; and
what asks for a value on the host is refused, as there.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from executor.device import Device, now_ns

REFUSED = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::unique_dim")


def storage(tensor):
    return tensor.untyped_storage()._cdata


def tensors_of(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Tape(TorchDispatchMode):
    """Notes operations."""

    def __init__(self):
        super().__init__()
        self.lines, self.made, self.before = [], set(), {}
        self.held = []  # a storage that is freed would give its name to another

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name
        if name in REFUSED:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        given = tensors_of((args, kwargs))
        sent = func.namespace == "c10d"
        for each in written(func, args, kwargs) if not sent else given:
            if storage(each) not in self.made and storage(each) not in self.before:
                self.before[storage(each)] = each, each.untyped_storage().clone()
        result = func(*args, **kwargs)
        new = [each for each in tensors_of(result) if storage(each) not in set(map(storage, given))]
        self.made |= set(map(storage, new))
        self.held += [given, tensors_of(result)]
        self.lines.append((func, args, kwargs, [any(each is one for one in new) for each in tensors_of(result)],
                           tensors_of(result)))  # fmt: skip
        return result

    def put_back(self):
        for tensor, content in self.before.values():
            tensor.untyped_storage().copy_(content)


def written(func, args, kwargs):
    """The tensors that an operation writes in place."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_of(args[place] if place < len(args) else kwargs.get(argument.name))
    return found


def works_of(result):
    return [dist.Work.unbox(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.ScriptObject)]


class TapeRecording:
    """What an accelerator's recording does, with the operations of a tape."""

    def __init__(self, tape, device):
        self.tape, self.device, self.pool, self.is_released = tape, device, SimpleNamespace(), False

    def replay(self):
        assert not self.is_released
        pending = {}
        with torch.inference_mode():
            for func, args, kwargs, is_new, outputs in self.tape.lines:
                if func == "mark":
                    args.ns = now_ns()
                    continue
                given = tensors_of((args, kwargs))
                for each in given:
                    if (work := pending.pop(storage(each), None)) is not None:
                        work.wait()
                result = func(*args, **kwargs)
                if func.namespace == "c10d":
                    (work,) = works_of(result)
                    pending |= {storage(each): work for each in given}
                    continue
                for new, out, again in zip(is_new, outputs, tensors_of(result), strict=True):
                    if new:
                        out.copy_(again)
        for work in pending.values():
            work.wait()
        self.device.log.append("replay")

    def release(self):
        self.is_released = True
        self.device.log.append("release")


def _unseen(wait):
    """gloo finishes some collectives with torch operations in `wait`, which are its own affair."""

    def quietly(work, *timeout):
        with _disable_current_modes():
            return wait(work, *timeout)

    return quietly


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingDevice(Device):
    """A CPU that records.

    Args:
        log: what it was asked to do.
        fails: raised inside the next recordings, one after the other.
    """

    kind: str = "cpu"
    log: list = field(default_factory=list)
    fails: list = field(default_factory=list)
    tapes: list = field(default_factory=list)

    @property
    def can_record(self):
        return True

    def use_own_stream(self):
        self.log.append("own stream")

    def release_memory(self):
        self.log.append("release memory")

    def synchronize(self):
        self.log.append("synchronize")

    def capture(self, run, pool=None):
        tape = Tape()
        self.tapes.append(tape)
        try:
            with tape, mock.patch.object(dist.Work, "wait", _unseen(dist.Work.wait)):
                run()
                if self.fails:
                    raise self.fails.pop(0)
        finally:
            self.tapes.pop()
            tape.put_back()
        self.log.append("capture" if pool is None else "capture in the same memory")
        return TapeRecording(tape, self)

    def recorded_mark(self):
        mark = SimpleNamespace(ns=0)
        self.tapes[-1].lines.append(("mark", mark, None, None, None))
        return mark

    def between_ns(self, first, second):
        return second.ns - first.ns if isinstance(second, SimpleNamespace) else second - first
