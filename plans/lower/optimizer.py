"""The optimizer of one group of ranks: placement of parameters, gathers, reductions and updates.

* Level 0: every rank that reads a weight holds it in full, with its gradient and states. Gradients are all-reduced once
  per step.
* Level 1: a parameter above the threshold is stored as a shard of its flattened local weight, split over all axes along
  which ranks hold the same weight. It is gathered once at the start of the step, and the update touches only the shard.
  Its gradient is reduce-scattered once over those of the axes along which it is a partial sum (the batch is split
  there); along the others every rank has the same gradient already and keeps its part of it.
* Level 2: gradients are sharded too (`plans.lower.reduction`).
* Level 3: weights too; they are gathered block by block in every body that reads them (`plans.lower.gathering`).

AdamW updates the parameters of a block together, with one kernel on a GPU. With `master_dtype` the update works on a
master weight: the shard, or a copy next to the full weight, which is then rounded from it. A `StepCheck` decides from
the norm of all gradients whether the step updates anything. Every update reads the decision on the device, so the host
never waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from plans.layout import Layout, TensorLayout
from plans.lower.buckets import Bucket, LocalParameter, filled, padded_shard, shard_axes
from plans.lower.emit import Emitter, ValueTable
from plans.lower.gathering import Arrival, collective, gather, wait, with_gathers
from plans.lower.reduction import Reduced, Reduction
from plans.model.blocks import block_of
from plans.model.graph import Operator, Tensor
from plans.optimizer import Optimizer
from plans.program import Instruction, ParameterPlacement, Scope, StepCheckPlacement, Value
from plans.step_check import Held, StepCheck

__all__ = ["ChunkParameters", "OptimizerLowering", "padded_shard", "shard_axes"]


@dataclass(slots=True, kw_only=True)
class ChunkParameters:
    """The parameters of one chunk that only it reads.

    Args:
        gathers: buckets that are gathered once a step, in the order of reading.
        blocks: block -> buckets that are gathered for each use.
        reductions: parameter -> the bucket in which its gradient is reduced.
        block_of: operator -> its block.
    """

    gathers: list[Bucket]
    blocks: dict[str, list[Bucket]]
    reductions: dict[str, Bucket]
    block_of: dict[str, str]


@dataclass(slots=True)
class OptimizerLowering:
    """Gathers, reductions and updates of the parameters of one group.

    `homes` gives each parameter's layout, `reduced` the layout of its accumulated gradient, `num_ranks` the ranks of
    the program, over which the norm of all gradients is summed, `step_check` which steps are skipped. Call
    `allocate_parameters` and, for each chunk, `arrange` first.
    """

    optimizer: Optimizer
    mesh: Layout
    table: ValueTable
    parameters: Mapping[str, Tensor]
    homes: Mapping[str, TensorLayout]
    reduced: Mapping[str, TensorLayout]
    num_ranks: int = 1
    step_check: StepCheck | None = None
    checks: StepCheckPlacement | None = None
    local: dict[str, LocalParameter] = field(init=False)
    chunks: dict[int, ChunkParameters] = field(default_factory=dict)
    found: dict[str, Reduced] = field(default_factory=dict)
    block_of: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.local = {
            name: LocalParameter(
                tensor=tensor, home=self.homes[name], summed=self.reduced[name].partial, optimizer=self.optimizer
            )
            for name, tensor in self.parameters.items()
        }

    # ------------------------------------------------------------------- places

    def allocate_parameters(self) -> tuple[ParameterPlacement, ...]:
        """Enter the weights, shards, master weights and states, and return their placements."""
        if (check := self.step_check) is not None:
            held = self._keep("step_check.held", (len(Held),), "float32", "optimizer")
            norms = None
            if check.spike is not None:
                norms = self._keep("step_check.norms", (check.spike.window,), "float32", "optimizer")
            self.checks = StepCheckPlacement(check=check, held=held, norms=norms)
            self.table.loss_scale = (held,) if check.loss_scale is not None else ()
        return tuple(self._place(parameter) for parameter in self.local.values())

    def _place(self, parameter: LocalParameter) -> ParameterPlacement:
        optimizer, name, dtype, axes = self.optimizer, parameter.name, parameter.tensor.dtype, parameter.axes
        kept_shape = (parameter.shard_size,) if axes else parameter.shape
        shard = master = None
        if axes:
            shard = self._keep(f"{name}#shard", kept_shape, optimizer.updates_in(dtype), "weight")
        scope = Scope.KEPT if not axes else Scope.BODY if parameter.gathered_per_use else Scope.STEP
        self.table.add(Value(name=name, shape=parameter.shape, dtype=dtype, scope=scope, role="weight"))
        if optimizer.has_master(dtype) and not axes:
            master = self._keep(f"{name}#master", kept_shape, optimizer.updates_in(dtype), "optimizer")
        states = tuple(
            self._keep(f"{name}#state{number}", kept_shape, optimizer.keeps_states_in(dtype), "optimizer")
            for number in range(optimizer.num_states)
        )
        return ParameterPlacement(
            name=name, shape=parameter.tensor.shape, dtype=dtype, layout=parameter.home, weight=name, shard=shard,
            shard_axes=axes, reduce_axes=parameter.summed, states=states, master=master,
        )  # fmt: skip

    def _keep(self, name: str, shape: tuple[int, ...], dtype: str, role: str) -> str:
        return self.table.add(Value(name=name, shape=shape, dtype=dtype, scope=Scope.KEPT, role=role))

    def accumulators(self) -> dict[str, Value]:
        """Parameter -> the value in which its gradient is accumulated, over the step or over one body."""
        return {
            name: Value(
                name=f"g:{name}", shape=self.reduced[name].local_shape(parameter.tensor.shape), role="gradient",
                dtype=self.optimizer.accumulates_in(parameter.tensor.dtype),
                scope=Scope.BODY if parameter.reduced_per_micro_batch else Scope.STEP,
            )
            for name, parameter in self.local.items()
        }  # fmt: skip

    # ------------------------------------------------------------------ buckets

    def arrange(
        self, chunk: int, operators: Sequence[Operator], completed: Sequence[tuple[str, str]], shared: Iterable[str]
    ) -> None:
        """Put the parameters of a chunk into buckets.

        Args:
            chunk: its number.
            operators: of the chunk, in order.
            completed: (parameter, the operator whose gradient makes its gradient whole), in that order.
            shared: parameters that other chunks read as well; each is alone, and reduced at the end of the step.
        """
        limit, others = self.optimizer.bucket_bytes, set(shared)
        blocks = {operator.name: block_of(operator) for operator in operators}
        readers = {name: operator.name for operator in reversed(operators) for name in operator.inputs}
        self.block_of = {name: blocks[reader] for name, reader in readers.items()} | self.block_of
        read = [name for operator in operators for name in operator.inputs if name in self.local]
        sharded = [self.local[name] for name in dict.fromkeys(read) if self.local[name].axes]
        once = [
            local_parameter
            for local_parameter in sharded
            if not local_parameter.gathered_per_use and local_parameter.name not in others
        ]
        in_blocks: dict[str, list[Bucket]] = {}
        per_use = [local_parameter for local_parameter in sharded if local_parameter.gathered_per_use]
        for bucket in self._filled(per_use, others, False, limit, readers, blocks):
            in_blocks.setdefault(blocks[readers[bucket.first.name]], []).append(bucket)
        reductions = self._reductions(completed, others, blocks)
        self.chunks[chunk] = ChunkParameters(
            gathers=self._filled(once, set(), False, limit), blocks=in_blocks, block_of=blocks,
            reductions={name: bucket for bucket in reductions for name in bucket.names},
        )  # fmt: skip

    def _reductions(
        self, completed: Sequence[tuple[str, str]], others: set[str], blocks: Mapping[str, str]
    ) -> list[Bucket]:
        """The buckets in which the gradients of a chunk are reduced within its bodies."""
        limit = self.optimizer.bucket_bytes
        due = [
            self.local[name] for name, _ in completed if name not in others or self.local[name].reduced_per_micro_batch
        ]
        due = [local_parameter for local_parameter in due if local_parameter.needs_reduction]
        whole = self._filled(
            [local_parameter for local_parameter in due if not local_parameter.gathered_per_use], others, True, limit
        )
        per_use = [local_parameter for local_parameter in due if local_parameter.gathered_per_use]
        return whole + self._filled(per_use, others, True, limit, dict(completed), blocks)

    def _filled(
        self,
        parameters: Sequence[LocalParameter],
        alone: set[str],
        gradients: bool,
        limit: int,
        operator_of: Mapping[str, str] | None = None,
        blocks: Mapping[str, str] | None = None,
    ) -> list[Bucket]:
        def key_of(parameter: LocalParameter) -> object:
            own = parameter.name if parameter.name in alone else ""
            return parameter.mesh, parameter.axes, parameter.summed, parameter.tensor.dtype, own

        def dtype_of(parameter: LocalParameter) -> str:
            dtype = parameter.tensor.dtype
            return self.optimizer.reduces_in(dtype) if gradients else dtype

        def block(parameter: LocalParameter) -> str:
            assert operator_of is not None and blocks is not None
            return blocks[operator_of[parameter.name]]

        return filled(parameters, key_of, dtype_of, limit, block if operator_of is not None else None)

    # ------------------------------------------------------------------ weights

    def gathers(self) -> tuple[list[Instruction], dict[str, Arrival]]:
        """The gathers at the start of a step, and the instructions that make each gathered weight usable
        (`with_arrivals`)."""
        emitter = Emitter(mesh=self.mesh, table=self.table)
        buckets = {name: bucket for chunk in self.chunks.values() for bucket in chunk.gathers for name in bucket.names}
        arrivals: dict[str, Arrival] = {}
        for name, parameter in self.local.items():
            if not parameter.axes or parameter.gathered_per_use or name in arrivals:
                continue
            alone = name not in buckets  # several chunks wait for it: none can free what it was rounded into
            bucket = buckets.get(name, Bucket(parameters=(parameter,)))
            blocking = alone and self.optimizer.has_master(parameter.tensor.dtype)
            arrival = gather(emitter, bucket, Scope.STEP, blocking=blocking)
            arrivals |= dict.fromkeys(bucket.names, arrival)
        return emitter.instructions, arrivals

    def with_gathers(self, chunk: int, body: Sequence[Instruction]) -> list[Instruction]:
        """The same body of a chunk with the gathers of weights that do not outlive it (level 3)."""
        mine = self.chunks[chunk]
        if not mine.blocks:
            return list(body)
        return with_gathers(body, mine.blocks, mine.block_of, self.optimizer.prefetch, self.mesh, self.table)

    # ---------------------------------------------------------------- gradients

    def reduction(self, chunk: int, *, is_last: bool) -> Reduction:
        """The reductions of one backward body of a chunk."""
        return Reduction(self.chunks[chunk].reductions, self.table, self.found, is_last)

    def reduce_rest(self, emitter: Emitter) -> None:
        """Reduce the remaining gradients at the end of the step."""
        rest = [
            local_parameter
            for name, local_parameter in self.local.items()
            if name not in self.found and local_parameter.needs_reduction
        ]
        buckets = self._filled(
            [local_parameter for local_parameter in rest if not local_parameter.reduced_per_micro_batch],
            set(),
            True,
            self.optimizer.bucket_bytes,
        )
        late = Reduction({}, self.table, self.found, True)
        for bucket in buckets:
            late.start(emitter, bucket, {name: f"g:{name}" for name in bucket.names})
        late.finish(emitter)

    # ------------------------------------------------------------------ updates

    def updates(self, homes: Iterable[ParameterPlacement]) -> list[Instruction]:
        """The end of a step: wait for each gradient, update, free. Those that were reduced first come first."""
        reduced, others = self.updates_in_turn(homes)
        return reduced + others

    def updates_in_turn(self, homes: Iterable[ParameterPlacement]) -> tuple[list[Instruction], list[Instruction]]:
        """The updates in two parts: those that have a turn, which are all without buckets, and those whose gradients
        nothing reduced."""
        emitter = Emitter(mesh=self.mesh, table=self.table)
        ordered = list(homes)
        if self.optimizer.bucket_bytes:
            turn = {name: number for number, name in enumerate(self.found)}
            ordered.sort(key=lambda home: turn.get(home.name, len(turn)))
        gradients = _Gradients(emitter, self.found)
        prepared: dict[str, tuple[str, list[str]]] = {}
        decided, left = _Decided(), len(ordered)
        if self.optimizer.clip_norm is not None or self.step_check is not None:
            prepared = {home.name: gradients.of(self.local[home.name], home) for home in ordered}
            decided = self._norm(emitter, {name: gradient for name, (gradient, _) in prepared.items()})
        cast_first = bool(self.table.loss_scale)  # divided by the scale in the digits of the update
        parts = emitter.taken(), list[Instruction]()
        for homes_ in self._joined(ordered):
            ready: list[tuple[ParameterPlacement, str, list[str]]] = []
            for home in homes_:
                gradient, freed = prepared.get(home.name) or gradients.of(self.local[home.name], home)
                if cast_first:
                    gradient, freed = self._as_kept(emitter, home, gradient, freed)
                left -= 1
                if scale := decided.scale:
                    emitter.compute(
                        f"{gradient}.clip", "scale", "U", (gradient, scale), (gradient,), frees=() if left else (scale,)
                    )
                if not cast_first:
                    gradient, freed = self._as_kept(emitter, home, gradient, freed)
                ready.append((home, gradient, freed))
            self._update(emitter, ready, decided, is_last=not left)
            has_turn = not self.optimizer.bucket_bytes or homes_[0].name in self.found
            parts[0 if has_turn else 1].extend(emitter.taken())
        return parts

    def _joined(self, homes: Sequence[ParameterPlacement]) -> list[list[ParameterPlacement]]:
        """The parameters that one update handles together: those of a block and of a dtype, if one kernel can.

        A gradient that is cast for its update stays alone, so that one such copy is alive at a time.
        """
        found: dict[object, list[ParameterPlacement]] = {}
        for home in homes:
            dtype = self.table[home.kept].dtype
            gradient = self.optimizer.reduces_in(home.dtype) if self.local[home.name].needs_reduction else None
            is_cast = (gradient or self.optimizer.accumulates_in(home.dtype)) != dtype
            alone = self.optimizer.kind != "adamw" or is_cast
            settings = tuple(self.optimizer.settings_of(home.name).items())
            key = (
                home.name if alone else (self.block_of.get(home.name, home.name), dtype, home.master is None, settings)
            )
            found.setdefault(key, []).append(home)
        return list(found.values())

    def _as_kept(
        self, emitter: Emitter, home: ParameterPlacement, gradient: str, freed: list[str]
    ) -> tuple[str, list[str]]:
        """The gradient in the dtype of the updated weight, and the values that the update frees."""
        kept = self.table[home.kept]
        if self.table[gradient].dtype != kept.dtype:
            like = self.table[gradient]
            cast = self.table.add(
                Value(
                    name=f"g:{home.name}#update", shape=like.shape, dtype=kept.dtype, scope=Scope.STEP, role="gradient"
                )
            )
            emitter.compute(
                f"{cast}.make", "cast.forward", "U", (gradient,), (cast,), frees=tuple(dict.fromkeys(freed))
            )
            gradient, freed = cast, [cast]
        if home.shard is not None and not self.local[home.name].gathered_per_use:
            freed = [*freed, home.weight]
        return gradient, freed

    def _update(
        self, emitter: Emitter, ready: Sequence[tuple[ParameterPlacement, str, list[str]]], decided: _Decided, *,
        is_last: bool,
    ) -> None:  # fmt: skip
        """One update of several parameters: operands and results of one behind those of the other.

        If steps are checked, the decision and the stored state follow.
        """
        first, more = ready[0][0], f"+{len(ready) - 1}" if len(ready) > 1 else ""
        homes = [home for home, _, _ in ready]
        elements = sum(math.prod(self.table[home.kept].shape) for home in homes)
        emitter.compute(
            f"{first.name}{more}.U", f"{self.optimizer.kind}.update", "U",
            (*(name for home, gradient, _ in ready for name in (home.kept, gradient, *home.states)), *decided.reads),
            tuple(name for home in homes for name in (home.kept, *home.states)),
            attrs=self.optimizer.settings_of(first.name) | ({"checked": True} if decided.reads else {}),
            flops=2 * (1 + len(first.states)) * elements,
            frees=(*dict.fromkeys(name for _, _, freed in ready for name in freed), *decided.reads[: int(is_last)]),
        )  # fmt: skip
        if first.master is not None:
            masters = tuple(str(home.master) for home in homes)
            emitter.compute(f"{first.name}{more}.store", "store", "U", masters, tuple(home.weight for home in homes))

    def _norm(self, emitter: Emitter, gradients: Mapping[str, str]) -> _Decided:
        """The instructions that depend on the norm of all gradients; each element is counted on one of its ranks.

        With no parameter of its own a group adds nothing.
        """
        table, groups = self.table, dict[tuple[Layout, tuple[str, ...]], list[str]]()
        for name, gradient in gradients.items():
            parameter = self.local[name]
            groups.setdefault((parameter.mesh, parameter.repeated), []).append(gradient)
        dtype = "float64" if any(table[gradient].dtype == "float64" for gradient in gradients.values()) else "float32"

        def scalar(name: str) -> str:
            return table.add(Value(name=name, shape=(), dtype=dtype, scope=Scope.STEP, role="buffer"))

        total, parts = scalar("gradients.square"), []  # the same name in every group: one collective
        for number, ((mesh, repeated), names) in enumerate(groups.items() or [((self.mesh, ()), [])]):
            parts.append(scalar(f"gradients.square{number}") if len(groups) > 1 else total)
            emitter.compute(
                f"{parts[-1]}.make", "sum_squares", "U", tuple(names), (parts[-1],), mesh=mesh, attrs={"axes": repeated}
            )
        if len(parts) > 1:
            emitter.compute(f"{total}.make", "sum", "U", tuple(parts), (total,), frees=tuple(parts))
        if self.num_ranks > 1:
            everyone = Layout((self.num_ranks,), ("rank",))
            line = collective(emitter, "all_reduce", total, total, (everyone, everyone.alias_name), Scope.STEP)
            emitter.pending.pop(total)
            wait(emitter, total, str(line.token))
        clip, checks, scale = self.optimizer.clip_norm, self.checks, ""
        if clip is not None or table.loss_scale:
            scale = scalar("gradients.scale")
        if checks is None:
            emitter.compute(
                f"{scale}.make", "clip_scale", "U", (total,), (scale,), attrs={"clip_norm": clip},
                frees=(total,) if gradients else (total, scale),
            )  # fmt: skip
            return _Decided(scale)
        skips = table.add(Value(name="step_check.skips", shape=(), scope=Scope.STEP, role="buffer"))
        held = (checks.held, *filter(None, (checks.norms,)))
        unread = [] if gradients else [*filter(None, (skips, scale))]
        emitter.compute(
            "step_check.make", "step_check", "U", (total, *held), (skips, *held, *filter(None, (scale,))),
            attrs={"clip_norm": clip, "check": checks.check}, frees=(total, *unread),
        )  # fmt: skip
        return _Decided(scale, (skips, checks.held))


@dataclass(frozen=True, slots=True)
class _Decided:
    """The factor of all gradients, "" for none, and what updates of checked steps read, the decision first."""

    scale: str = ""
    reads: tuple[str, ...] = ()


@dataclass(slots=True)
class _Gradients:
    """The values that updates read, written one after the other."""

    emitter: Emitter
    found: Mapping[str, Reduced]
    left: dict[Reduced, int] = field(default_factory=dict)

    def of(self, parameter: LocalParameter, home: ParameterPlacement) -> tuple[str, list[str]]:
        """The gradient of the updated weight, and the values to free with it."""
        name, reduced = parameter.name, self.found.get(parameter.name)
        gradient = f"g:{name}"
        if reduced is None or not reduced.is_flat:
            freed = [gradient]
            if reduced is not None:
                gradient = reduced.value
                wait(self.emitter, gradient, str(reduced.token))
                freed.append(gradient)
            if not parameter.same:
                return gradient, freed
            part = self._enter(f"g:{name}#part", (parameter.shard_size,), gradient)
            self.emitter.compute(
                f"{part}.slice", "flat_slice", "U", (gradient,), (part,), mesh=parameter.mesh,
                attrs={"axes": parameter.same},
            )  # fmt: skip
            return part, [*freed, part]
        bucket = reduced.bucket
        if reduced not in self.left:
            self.left[reduced] = len(bucket.parameters)
            if reduced.token is not None:
                wait(self.emitter, reduced.value, reduced.token, reduced.frees)
            if self._is_viewed(reduced):
                views = tuple(self._view(member, reduced.value) for member in bucket.parameters)
                self.emitter.compute(
                    f"{reduced.value}.unpack", "flat_unpack", "U", (reduced.value,), views,
                    attrs={
                        "rows": 1,
                        "sizes": bucket.sizes,
                        "shapes": tuple(self.emitter.table[view].shape for view in views),
                    },
                )  # fmt: skip
        self.left[reduced] -= 1
        gradient = f"g:{name}#view" if self._is_viewed(reduced) else reduced.value
        return gradient, [gradient] if self.left[reduced] else [gradient, reduced.value]

    def _is_viewed(self, reduced: Reduced) -> bool:
        return not reduced.bucket.is_single or not reduced.bucket.first.axes

    def _view(self, parameter: LocalParameter, flat: str) -> str:
        shape = (parameter.shard_size,) if parameter.axes else parameter.shape
        return self._enter(f"g:{parameter.name}#view", shape, flat, shares=flat)

    def _enter(self, name: str, shape: tuple[int, ...], like: str, shares: str | None = None) -> str:
        table = self.emitter.table
        return table.add(
            Value(
                name=name, shape=shape, dtype=table[like].dtype, scope=Scope.STEP, role="gradient", shares=shares
            )
        )  # fmt: skip
