"""The optimizer's communication in twofold's own programs, as `plans.lower` emits it for one piece.

A bucket of several parameters is packed, moved by one collective and unpacked; a single parameter is moved as it is. A
bucket that a block does not fill is continued by the next blocks, which share its price.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from costmodels import Machine
from costmodels.price.group import Group, axes_group
from costmodels.price.instruction import price_collective, price_compute, price_wait
from costmodels.price.traffic import plain_call
from plans.degrees import Degrees
from plans.degrees.groups import rank_groups
from plans.lower.completed import adds_alike
from plans.lower.symbolic import ParameterTemplate, PartTemplate, joined_gradients
from plans.model.graph import itemsize
from plans.optimizer import Optimizer
from simulator.lines import COLLECTIVE, COMPUTE, WAIT, Line

__all__ = ["OptimizerLines", "gradients_of"]

_FIRST_TOKEN = {"reduce": 2**20, "gather": 2**21}
"""Tokens that no template has."""


@lru_cache(maxsize=8192)
def gradients_of(part: PartTemplate) -> Mapping[str, int]:
    """The parameters whose gradients a body computes, with the time at which each starts."""
    found: dict[str, int] = {}
    for number, cell in enumerate(part.cells):
        if cell.gradient:
            found.setdefault(cell.gradient, number)
    return found


class _Parameter(NamedTuple):
    """A `ParameterTemplate` with its numbers."""

    name: str
    elements: int
    whole: int
    dtype: str
    summed: tuple[str, ...]
    same: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Bucket:
    parameters: tuple[_Parameter, ...]
    share: float = 1.0  # of a bucket that several blocks fill
    num_blocks: int = 1

    @property
    def is_single(self) -> bool:
        return len(self.parameters) == 1 and self.num_blocks == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerLines:
    """Lines of the optimizer for the parameters of one piece.

    Args:
        machine, degrees: of the configuration.
        numbers: values of the template's monomials.
    """

    machine: Machine
    degrees: Degrees
    numbers: Sequence[int]
    _lines: _Lines = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_lines", _lines(self.machine, self.degrees))

    def is_sharded(self, each: ParameterTemplate) -> bool:
        """Whether the parameter is sharded, as in `LocalParameter.axes`."""
        return self._lines.is_sharded(self._parameter(each))

    def adds_alike(self, dtype: str) -> bool:
        """Whether products add up the gradients of weights of a dtype."""
        only = self.degrees.num_micro_batches == 1
        return adds_alike(self.degrees.optimizer.accumulates_in(dtype), dtype, is_only=only)

    def reduced_per_micro_batch(self, each: ParameterTemplate) -> bool:
        """As in `LocalParameter.reduced_per_micro_batch`."""
        return self.degrees.optimizer.reduced_per_micro_batch and self.is_sharded(each)

    def sum_of(self, each: ParameterTemplate) -> Line:
        """Instructions that add the gradient of one micro-batch to the sum of earlier ones."""
        return self._lines.sum_of(self._parameter(each))

    def gathers(self, parameters: Iterable[ParameterTemplate]) -> tuple[tuple[Line, ...], tuple[Line, ...]]:
        """Instructions that issue the gathers of a piece's weights, and those that make them usable."""
        return self._lines.gathers(self._parameters(parameters))

    def reductions(self, parameters: Iterable[ParameterTemplate]) -> Mapping[str, tuple[Line, ...]]:
        """Parameter -> what follows once its gradient is whole; "": what ends the body.

        Args:
            parameters: in the order in which their gradients are whole.
        """
        return self._lines.reductions(self._parameters(parameters))

    def endings(self, parameters: Iterable[ParameterTemplate]) -> tuple[Line, ...]:
        """Instructions at the end of a step besides the updates: remaining gradients, views, casts, stored weights."""
        return self._lines.endings(self._parameters(parameters))

    def around(
        self, part: str, body: PartTemplate, own: Sequence[ParameterTemplate], *, gathers: bool, reduces: bool
    ) -> tuple[tuple[tuple[str, Line | None], ...], tuple[Any, ...], tuple[Any, ...]]:
        """The instructions that the optimizer adds to a body of a piece.

        Args:
            part, body: name and content of the body.
            own: parameters of the piece.
            gathers, reduces: whether the body's weights are gathered, its gradients reduced.

        Returns:
            for each gradient the instruction that adds it to those of earlier micro-batches (None: there is none);
            `gathers`, in the order in which the body reads the weights; the items of `reductions`.
        """
        order, joined = gradients_of(body), joined_gradients(body)
        due = sorted((each for each in own if each.name in order), key=lambda each: order[each.name])
        sums = tuple(
            (each.name, None) if self.reduced_per_micro_batch(each)
            or (each.name in joined and self.adds_alike(each.dtype))
            else (each.name, self.sum_of(each))
            for each in due
        )  # fmt: skip
        gathered = self.gathers(own if part == "F" else own[::-1]) if gathers else ()
        return sums, gathered, tuple(self.reductions(due).items()) if reduces else ()

    def _parameter(self, each: ParameterTemplate) -> _Parameter:
        numbers = self.numbers
        return _Parameter(
            each.name, numbers[each.elements], numbers[each.whole], each.dtype, each.summed, each.same
        )  # fmt: skip

    def _parameters(self, parameters: Iterable[ParameterTemplate]) -> tuple[_Parameter, ...]:
        return tuple([self._parameter(parameter) for parameter in parameters])


_KNOWN: dict[tuple[object, ...], _Lines] = {}
_MOST_KNOWN = 4096


def _lines(machine: Machine, degrees: Degrees) -> _Lines:
    """The lines for a piece, shared by all layouts in which the optimizer does the same."""
    sizes = degrees.tp, degrees.cp, degrees.dp, degrees.ep
    key = (machine, sizes, degrees.num_ranks, degrees.strides, _key_of(degrees.optimizer))
    found = _KNOWN.get(key)
    if found is None:
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        found = _KNOWN[key] = _Lines(machine, degrees)
    return found


_OPTIMIZERS: dict[int, tuple[Optimizer, tuple[object, ...]]] = {}


def _key_of(optimizer: Optimizer) -> tuple[object, ...]:
    """Equal for equal optimizers, which have no hash; degrees mostly share a few objects."""
    found = _OPTIMIZERS.get(id(optimizer))
    if found is None:
        if len(_OPTIMIZERS) >= _MOST_KNOWN:
            _OPTIMIZERS.clear()
        fields = msgspec.structs.astuple(optimizer)
        own = tuple(tuple(sorted(each.items())) if isinstance(each, dict) else each for each in fields)
        found = _OPTIMIZERS[id(optimizer)] = optimizer, own  # kept, so that no other one gets its number
    return found[1]


class _Lines:
    """The content of `OptimizerLines`, computed once for equal parameters."""

    def __init__(self, machine: Machine, degrees: Degrees) -> None:
        self.machine = machine
        self.degrees = degrees
        self._sizes: dict[tuple[tuple[str, ...], bool], int] = {}
        self._groups: dict[tuple[str, ...], Group] = {}
        self._sharded: dict[_Parameter, bool] = {}
        self._made: dict[tuple[str, tuple[_Parameter, ...]], Any] = {}

    # ------------------------------------------------------------------- parameters

    def is_sharded(self, each: _Parameter) -> bool:
        found = self._sharded.get(each)
        if found is None:
            optimizer = self.degrees.optimizer
            large = each.whole * itemsize(each.dtype) >= optimizer.threshold_bytes
            found = optimizer.parallel_level >= 1 and large and self._size((*each.summed, *each.same), True) > 1
            self._sharded[each] = found
        return found

    def _size(self, axes: tuple[str, ...], copies: bool) -> int:
        """Ranks along axes of a stage, and along the data-parallel one."""
        found = self._sizes.get((axes, copies))
        if found is None:
            found = self._sizes[axes, copies] = self._count(axes, copies)
        return found

    def _count(self, axes: tuple[str, ...], copies: bool) -> int:
        degrees = self.degrees
        sizes = {"cp": degrees.cp, "ep": degrees.ep, "tp": degrees.tp, "tp_kv": 1, "tp_q": 1}
        if degrees.tp > 1 and "tp" not in axes and (spread := {"tp_kv", "tp_q"} & set(axes)):
            sizes[min(spread)] = degrees.tp  # both, of weights that every rank has
        return math.prod(sizes.get(axis, 1) for axis in axes) * (self._copies if copies else 1)

    @property
    def _copies(self) -> int:
        """Data-parallel ranks with the same experts: the axis "dp" of a mesh whose axis "ep" is the rest of them."""
        return self.degrees.dp // self.degrees.ep

    def _group(self, axes: tuple[str, ...]) -> Group:
        found = self._groups.get(axes)
        if found is None:
            groups = rank_groups(self.degrees, 1)
            along = list(groups["copies"] if "copies" in groups else groups["dp"][:1])
            for name, is_in in (("ep", "ep" in axes), ("tp", any(axis.startswith("tp") for axis in axes)),
                                ("cp", "cp" in axes)):  # fmt: skip
                along += groups.get(name, ()) if is_in else ()
            stages = self.degrees.pp, self.degrees.strides[-1]
            found = axes_group(self.machine, along, self.degrees.num_ranks, stages)
            self._groups[axes] = found
        return found

    def _buckets(self, parameters: Sequence[_Parameter], gradients: bool) -> list[_Bucket]:
        """As in `plans.lower.buckets.filled`, in the order in which they are complete."""
        optimizer = self.degrees.optimizer
        limit = optimizer.bucket_bytes
        if not limit:
            return [_Bucket((parameter,)) for parameter in parameters]
        open_: dict[object, list[_Parameter]] = {}
        sizes: dict[object, int] = {}
        closed: list[tuple[object, list[_Parameter]]] = []
        key: object
        for parameter in parameters:
            sharded = self.is_sharded(parameter)
            key = (parameter.summed, parameter.same if sharded else (), sharded)
            open_.setdefault(key, []).append(parameter)
            dtype = optimizer.reduces_in(parameter.dtype) if gradients else parameter.dtype
            sizes[key] = sizes.get(key, 0) + parameter.elements * itemsize(dtype)
            whole_block = optimizer.parallel_level == 3 and sharded
            if not whole_block and sizes[key] >= limit:
                sizes.pop(key)
                closed.append((key, open_.pop(key)))
        found = [_Bucket(tuple(held)) for _, held in closed]
        for key, held in open_.items():
            if optimizer.parallel_level == 3 and self.is_sharded(held[0]):
                found.append(_Bucket(tuple(held)))
                continue
            last = next((at for at in reversed(range(len(closed))) if closed[at][0] == key), None)
            if last is not None:  # goes into the first bucket of the next block
                found[last] = _Bucket((*found[last].parameters, *held))
            else:
                count = max(1, limit // sizes[key])
                found.append(_Bucket(tuple(held), 1 / count, count))
        return found

    # ------------------------------------------------------------------- lines

    def _compute(self, call: str, num_operands: int, touched: int, dtype: str, share: float = 1.0) -> Line:
        cost = price_compute(self.machine, call, ((1,),) * num_operands, dtype, touched, 0, True)
        return Line(COMPUTE, round(cost.dispatch_ps * share), round(cost.work_ps * share), "memory")

    def _collective(self, call: str, axes: tuple[str, ...], size: int, item: int, token: int, share: float) -> Line:
        cost = price_collective(self.machine, call, self._group(axes), size, item)
        # of one copy only, what is left to sum goes where tensor- or expert-parallel messages go
        channel = ".".join((*(["dp"] if self._copies > 1 else []), *axes))
        if call == "all_gather_flat" and self.degrees.optimizer.parallel_level >= 3:
            channel += ":weights"
        work, dispatch = round(cost.together_ps * share), round(cost.dispatch_ps * share)
        alone = round(cost.work_ps * share)
        return Line(COLLECTIVE, dispatch, work, plain_call(call), channel, token, alone_ps=alone)

    def sum_of(self, each: _Parameter) -> Line:
        item_bytes = itemsize(each.dtype) + itemsize(self.degrees.optimizer.accumulates_in(each.dtype))
        return self._compute("accumulate", 2, each.elements * item_bytes, each.dtype)

    def _wait(self, token: int, share: float = 1.0) -> Line:
        return Line(WAIT, round(price_wait(self.machine).dispatch_ps * share), 0, token=token)

    def gathers(self, parameters: tuple[_Parameter, ...]) -> tuple[tuple[Line, ...], tuple[Line, ...]]:
        key = ("gathers", parameters)
        if key not in self._made:
            self._made[key] = self._gathers(parameters)
        found: tuple[tuple[Line, ...], tuple[Line, ...]] = self._made[key]
        return found

    def _gathers(self, parameters: tuple[_Parameter, ...]) -> tuple[tuple[Line, ...], tuple[Line, ...]]:
        optimizer, issue, arrive = self.degrees.optimizer, list[Line](), list[Line]()
        mine = [parameter for parameter in parameters if self.is_sharded(parameter)]
        for number, bucket in enumerate(self._buckets(mine, False)):
            first, token = bucket.parameters[0], _FIRST_TOKEN["gather"] + number
            axes, own, share = (*first.summed, *first.same), itemsize(first.dtype), bucket.share
            members, kept = self._size(axes, True), itemsize(optimizer.updates_in(first.dtype))
            shards = sum(-(-parameter.elements // members) for parameter in bucket.parameters) * bucket.num_blocks
            count = 1 + len(bucket.parameters)
            if not bucket.is_single:
                issue.append(self._compute("flat_pack", count, shards * (kept + own), first.dtype, share))
            elif kept != own:
                issue.append(self._compute("cast.forward", 2, shards * (kept + own), first.dtype))
            issue.append(self._collective("all_gather_flat", axes, members * shards * own, own, token, share))
            arrive.append(self._wait(token, share))
            if not bucket.is_single:
                moved = 2 * members * shards * own
                arrive.append(self._compute("flat_unpack", count, moved, first.dtype, share))
        return tuple(issue), tuple(arrive)

    def reductions(self, parameters: tuple[_Parameter, ...]) -> Mapping[str, tuple[Line, ...]]:
        key = ("reductions", parameters)
        if key not in self._made:
            self._made[key] = self._reductions(parameters)
        found: Mapping[str, tuple[Line, ...]] = self._made[key]
        return found

    def _reductions(self, parameters: tuple[_Parameter, ...]) -> Mapping[str, tuple[Line, ...]]:
        optimizer = self.degrees.optimizer
        each_body = optimizer.reduced_per_micro_batch
        mine = [
            parameter
            for parameter in parameters
            if self._needs(parameter) and (self.is_sharded(parameter) or not each_body)
        ]
        turn = {parameter.name: number for number, parameter in enumerate(parameters)}
        result: dict[str, tuple[Line, ...]] = {}
        before: tuple[Line, ...] = ()
        buckets = self._buckets(mine, True)
        buckets.sort(key=lambda bucket: max(turn[parameter.name] for parameter in bucket.parameters))
        for number, bucket in enumerate(buckets):
            at = max(bucket.parameters, key=lambda each: turn[each.name]).name
            lines, after = self._reduction(bucket, _FIRST_TOKEN["reduce"] + number)
            waits = optimizer.parallel_level >= 2 and self.is_sharded(bucket.parameters[0])
            result[at] = (*result.get(at, ()), *lines, *before)
            before = after if waits else ()
        if before:
            result[""] = before
        return result

    def _needs(self, each: _Parameter) -> bool:
        sharded = self.is_sharded(each) and self.degrees.optimizer.parallel_level >= 2
        return self._size(each.summed, True) > 1 or sharded

    def _reduction(self, bucket: _Bucket, token: int) -> tuple[tuple[Line, ...], tuple[Line, ...]]:
        """The instructions that issue and settle it."""
        optimizer, first, share = self.degrees.optimizer, bucket.parameters[0], bucket.share
        sharded, rows = self.is_sharded(first), self._size(first.summed, True)
        axes = (*first.summed, *first.same) if sharded else ()
        whole = first.dtype if optimizer.reduced_per_micro_batch and sharded else optimizer.accumulates_in(first.dtype)
        made = itemsize(optimizer.reduces_in(first.dtype) if rows > 1 else whole)
        elements = sum(parameter.elements for parameter in bucket.parameters) * bucket.num_blocks
        shards = elements
        if sharded:
            ways = self._size(axes, True)
            shards = sum(-(-parameter.elements // ways) for parameter in bucket.parameters) * bucket.num_blocks
        packed = not bucket.is_single or itemsize(whole) != made
        packed = packed or bool(sharded and first.same and optimizer.parallel_level >= 2)
        lines: list[Line] = []
        flat = (rows * shards if sharded else elements) * made
        read = elements * itemsize(whole)
        if packed:
            count = 1 + len(bucket.parameters)
            moved = min(read, flat * itemsize(whole) // made) + flat
            lines.append(self._compute("flat_pack", count, moved, first.dtype, share))
        if rows > 1:
            call = "reduce_scatter_flat" if sharded else "all_reduce"
            size = flat if packed or not sharded else elements * made
            lines.append(self._collective(call, first.summed, size, made, token, share))
        after = [self._wait(token, share)] if rows > 1 else []
        if optimizer.reduced_per_micro_batch and sharded:
            total = itemsize(optimizer.accumulates_in(first.dtype))
            after.append(self._compute("accumulate", 2, shards * (made + total), first.dtype, share))
        return tuple(lines), tuple(after)

    def endings(self, parameters: tuple[_Parameter, ...]) -> tuple[Line, ...]:
        key = ("endings", parameters)
        if key not in self._made:
            self._made[key] = self._endings(parameters)
        found: tuple[Line, ...] = self._made[key]
        return found

    def _endings(self, parameters: tuple[_Parameter, ...]) -> tuple[Line, ...]:
        optimizer = self.degrees.optimizer
        lines: list[Line] = []
        late = [
            parameter
            for parameter in parameters
            if optimizer.reduced_per_micro_batch and not self.is_sharded(parameter)
        ]
        late = [each for each in late if self._needs(each)]
        waits: list[Line] = []
        for number, bucket in enumerate(self._buckets(late, True)):
            issued, settled = self._reduction(bucket, _FIRST_TOKEN["reduce"] + number)
            lines += issued
            waits += settled
        lines += waits
        for parameter in parameters:
            own, kept = optimizer.accumulates_in(parameter.dtype), optimizer.updates_in(parameter.dtype)
            sharded = self.is_sharded(parameter)
            axes = (*parameter.summed, *parameter.same) if sharded else ()
            elements = -(-parameter.elements // (self._size(axes, True) if sharded else 1))
            if optimizer.parallel_level < 2 and self._needs(parameter):
                own = optimizer.reduces_in(parameter.dtype)
                bucket_share = 1.0
                if optimizer.bucket_bytes:
                    whole = parameter.elements * itemsize(own)
                    bucket_share = min(1.0, whole / optimizer.bucket_bytes)
                lines.append(self._wait(-2, bucket_share))
            if own != kept:
                lines.append(
                    self._compute("cast.forward", 2, elements * (itemsize(own) + itemsize(kept)), parameter.dtype)
                )
        return tuple(lines)
