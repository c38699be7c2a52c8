"""The additive cost of a stage: one table per operator and one per tensor that is handed on.

Prices come from the very instructions that lowering would write: an operator's forward and gradients once per
micro-batch, its gradient reduction, weight gather and update once per step, and for every tensor the redistributions
between its maker's layout and each distinct layout its readers ask for, forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from plans.graph import Graph, Operator
from plans.layout import Layout, TensorLayout
from plans.lower import Choice
from plans.lower.chunk import LOSSES
from plans.lower.emit import Emitter, ValueTable, channel_of
from plans.lower.optimizer import padded_shard, shard_axes
from plans.lower.statistic import gather_statistic
from plans.operators import OperatorSpec, factors
from plans.plan import Optimizer, Strategy
from plans.program import Instruction, Kind, Value
from search.eliminate import Memory, Table, widest
from search.handed import Handed, Layouts
from search.moves import Moves
from search.space import strategies

__all__ = ["InstructionCost", "StageCosts"]

InstructionCost = Callable[[Instruction], float]
"""Seconds of one instruction on the machine, as the search counts them.

It may have a method `group_key(mesh, axes)`: sets of axes with equal keys make collectives of equal cost.
"""


@dataclass(slots=True)
class StageCosts:
    """Strategies and cost tables of the operators of one stage on one mesh.

    Args:
        micro: the graph of one micro-batch.
        operators: of the stage, in graph order.
        mesh: the stage's mesh.
        num_micro_batches: how often forward and backward run in a step.
        optimizer: what happens to the parameters.
        full_batch: whether inputs are fed whole (any layout is a free slice) or in parts.
        cost: seconds of an instruction.
        pinned: operator name -> strategy that must be kept.
        allowed: leaves only some strategies, where given.
        suggested: operator name -> strategies to choose from beside those on the stage's mesh.
        choice: of the steps of redistributions; those of least bytes where it is None.
        moves: seconds of redistributions, or bounds of them; by `choice`, all exact, where it is None.
        known: costs of single operators by all that they depend on; may be shared by stages and meshes.
    """

    micro: Graph
    operators: Sequence[Operator]
    mesh: Layout
    num_micro_batches: int
    optimizer: Optimizer
    full_batch: bool
    cost: InstructionCost
    pinned: dict[str, Strategy] = field(default_factory=dict)
    allowed: Callable[[Operator, OperatorSpec, Strategy, Layout], bool] | None = None
    suggested: Mapping[str, Sequence[Strategy]] = field(default_factory=dict)
    choice: Choice | None = None
    moves: Moves | None = None
    known: dict[object, tuple[float, ...]] = field(default_factory=dict)
    choices: list[list[Strategy]] = field(init=False)
    variable_of: list[int] = field(init=False)
    memory: Memory = field(init=False, default_factory=Memory)
    _signatures: dict[str, object] = field(init=False, default_factory=dict)
    _missing: dict[str, list[tuple[str, ...]]] = field(init=False, default_factory=dict)
    _groups: dict[frozenset[str], object] = field(init=False, default_factory=dict)
    _axis_sizes: dict[str, int] = field(init=False)
    _offered: dict[int, list[Strategy]] = field(init=False, default_factory=dict)
    _own: dict[object, np.ndarray] = field(init=False, default_factory=dict)
    _summed: dict[object, np.ndarray] = field(init=False, default_factory=dict)
    _kinds: dict[object, tuple[list[Layouts], np.ndarray]] = field(init=False, default_factory=dict)
    _handed: list[Handed] | None = field(init=False, default=None)
    _tables: dict[object, np.ndarray] = field(init=False, default_factory=dict)
    _version: dict[tuple[tuple[int, ...], str], int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.moves is None:
            self.moves = Moves(self.choice.seconds if self.choice is not None else self._lowered_s)
        self._axis_sizes = {axis: self.mesh.size((axis,)) for axis in self.mesh.alias_name}
        self.choices = [self._choices(operator) for operator in self.operators]
        self.variable_of = list(range(len(self.operators)))

    def _choices(self, operator: Operator) -> list[Strategy]:
        if operator.name in self.pinned:
            return [self.pinned[operator.name]]
        spec = self.micro.spec(operator)
        if id(spec) not in self._offered:
            self._offered[id(spec)] = strategies(spec, self.mesh)
        found = self._offered[id(spec)]  # equal operators share the list
        if suggested := self.suggested.get(operator.name):
            found = [*found, *suggested]
        if self.allowed is None:
            return found
        return [strategy for strategy in found if self.allowed(operator, spec, strategy, self.mesh)]

    def tie(self) -> bool:
        """Let operators of one kind that read the same tensor (queries, keys and values) have one strategy together.

        A beam, for graphs that are too entangled to be searched without it; whether it ties anything.
        """
        groups: dict[object, list[int]] = {}
        for position, operator in enumerate(self.operators):
            free = operator.name not in self.pinned and operator.name not in self.suggested
            dims = tuple(self.micro.spec(operator).sizes)
            key = (operator.kind, operator.inputs[0], dims) if free and operator.inputs else position
            groups.setdefault(key, []).append(position)
        shared: dict[object, list[Strategy]] = {}  # equal groups share the list, as equal operators do
        for members in groups.values():
            specs = [self.micro.spec(self.operators[at]) for at in members]
            alike = tuple((id(spec), id(self.choices[at])) for spec, at in zip(specs, members, strict=True))
            if len(members) > 1 and alike not in shared:
                offered = self.choices[members[0]]
                shared[alike] = [each for each in offered if all(s.fits(self.mesh, each.dims) for s in specs)]
            for at in members if len(members) > 1 else ():
                self.choices[at] = shared[alike]
        number = {members[0]: variable for variable, members in enumerate(groups.values())}
        for members in groups.values():
            for at in members:
                self.variable_of[at] = number[members[0]]
        self._handed, self.memory = None, Memory()
        return len(groups) < len(self.operators)

    def entangled(self) -> tuple[float, float]:
        """Cells of the largest table that elimination would join, and of all of them."""
        scopes = [tuple(dict.fromkeys(handed.variables)) for handed in self._tensors()]
        return widest(self.sizes, scopes)

    def picked(self, values: Sequence[int]) -> dict[str, Strategy]:
        """operator name -> strategy, for a value of every variable."""
        return {
            operator.name: self.choices[position][values[self.variable_of[position]]]
            for position, operator in enumerate(self.operators)
        }

    @property
    def sizes(self) -> list[int]:
        """Number of strategies per variable: per operator, or per operators that are tied."""
        sizes = dict(zip(self.variable_of, (len(choices) for choices in self.choices), strict=True))
        return [sizes[variable] for variable in range(len(sizes))]

    def tables(self, compute_only: bool = False) -> list[Table]:
        """All cost tables; `compute_only` leaves out communication (a lower bound on any choice).

        Where `moves` has bounds, the cells of tensors' tables are bounds too until `price` has been asked for them.
        """
        result = [self._own_table(position, compute_only) for position in range(len(self.operators))]
        if not compute_only:
            result += [self._tensor_table(handed) for handed in self._tensors()]
        return result

    def price(self, values: Sequence[int]) -> bool:
        """Make the tables exact for one choice of strategies; whether anything of it was a bound."""
        assert self.moves is not None
        changed = set()
        for handed in self._tensors():
            tensor = self.micro.tensors[handed.tensor]
            for source, target in self._moves_of(handed, values):
                if not self.moves.is_exact(source, target, tensor.shape, tensor.dtype):
                    self.moves.price(source, target, tensor.shape, tensor.dtype)
                    changed.add((tensor.shape, tensor.dtype))
        for each in changed:
            self._version[each] = self._version.get(each, 0) + 1
        return bool(changed)

    # ------------------------------------------------------------ one operator

    def _own_table(self, position: int, compute_only: bool) -> Table:
        compute, others, *_ = self._own_costs(position)
        if compute_only:
            return Table((self.variable_of[position],), compute)
        summed = self._summed.setdefault(self._key_of(position), compute + others)
        return Table((self.variable_of[position],), summed)

    def _key_of(self, position: int) -> object:
        return self._signature(self.operators[position]), id(self.choices[position])

    def least_parts_s(self, position: int) -> tuple[float, float, float]:
        """The least that an operator takes by itself in a step; its compute on the host, and on the device."""
        compute, others, host, device = self._own_costs(position)
        return float((compute + others).min()), float(host.min()), float(device.min())

    def _own_costs(self, position: int) -> np.ndarray:
        """[4, strategies]: seconds per step of compute, of all else it takes by itself; compute on host and device."""
        key = self._key_of(position)
        if key not in self._own:
            operator, spec = self.operators[position], self.micro.spec(self.operators[position])
            signature = self._signature(operator)
            found = [self._own_s(operator, spec, strategy, signature) for strategy in self.choices[position]]
            self._own[key] = np.array(found).T
        return self._own[key]

    def _own_s(
        self, operator: Operator, spec: OperatorSpec, strategy: Strategy, signature: object
    ) -> tuple[float, ...]:
        """A column of `_own_costs`; kept by all that it depends on."""
        key: object
        if strategy.out is not None or strategy.mesh is not None or spec.statistic is not None:
            key = (signature, self.mesh, strategy.mesh, tuple(strategy.dims.items()), strategy.out)
        else:
            key = (signature, self._cuts(operator, spec, strategy))
        if key not in self.known:
            compute_s, host_s, device_s = self._compute(operator, strategy)
            others_s = self.step_s(operator, strategy) + self.hand_on_s(operator, strategy)
            times = self.num_micro_batches
            self.known[key] = times * compute_s, others_s, times * host_s, times * device_s
        return self.known[key]

    def _signature(self, operator: Operator) -> object:
        if operator.name not in self._signatures:
            self._signatures[operator.name] = self._made_signature(operator)
        return self._signatures[operator.name]

    def _made_signature(self, operator: Operator) -> object:
        tensors = tuple(
            (tensor.shape, tensor.dtype, tensor.kind == "parameter")
            for tensor in (self.micro.tensors[name] for name in (*operator.inputs, *operator.outputs))
        )
        trained = self.micro.trained_inputs(operator)
        return operator.kind, repr(sorted(operator.attrs.items())), tensors, trained, self.num_micro_batches

    def _cuts(self, operator: Operator, spec: OperatorSpec, strategy: Strategy) -> object:
        """Into how many parts the dims are cut, and what kind of groups the parameters are summed or gathered over."""
        dims, sizes, group_key = strategy.dims, self._axis_sizes, getattr(self.cost, "group_key", None)
        parts = tuple([math.prod([sizes[axis] for axis in dims.get(dim, ())]) for dim in spec.sizes])
        groups: list[object] = []
        for missing in self._missing_dims(operator, spec):
            axes = [axis for dim in missing for axis in dims.get(dim, ())]
            own = {axis for dim, given in dims.items() if dim not in missing for axis in given}
            for some in (frozenset(axes), frozenset(sizes) - own):  # summed over; and all that hold the same weight
                if (some not in self._groups) and group_key:
                    self._groups[some] = group_key(self.mesh, tuple(sorted(some)))
                groups.append(self._groups[some] if group_key else (self.mesh, some))
        return parts, tuple(groups)

    def _missing_dims(self, operator: Operator, spec: OperatorSpec) -> list[tuple[str, ...]]:
        """For every trained parameter the dims that its gradient is summed over."""
        if operator.name not in self._missing:
            found = []
            for index, name in enumerate(operator.inputs):
                if self._is_parameter(name) and index in spec.gradients:
                    mine = {name for dim in spec.inputs[index] for name in factors(dim)}
                    outside = set(spec.contracted) if index in spec.additive else set()
                    found.append(tuple(dim for dim in spec.sizes if dim not in mine and dim not in outside))
            self._missing[operator.name] = found
        return self._missing[operator.name]

    def compute_s(self, operator: Operator, strategy: Strategy) -> float:
        """Seconds of an operator's forward and gradients for one micro-batch."""
        return self._compute(operator, strategy)[0]

    def _compute(self, operator: Operator, strategy: Strategy) -> tuple[float, float, float]:
        """Seconds of `compute_s`, and those of its kernels on the host and on the device."""
        spec, mesh, tensors = self.micro.spec(operator), self._mesh(strategy), self.micro.tensors
        fraction = spec.local_fraction(mesh, strategy.dims)
        inputs = [
            (spec.input_layout(index, mesh, strategy.dims).local_shape(tensors[name].shape), tensors[name].dtype)
            for index, name in enumerate(operator.inputs)
        ]
        outputs = [
            (spec.output_layout(index, mesh, strategy.dims).local_shape(tensors[name].shape), tensors[name].dtype)
            for index, name in enumerate(operator.outputs)
        ]
        saved = {f"x{index}": each for index, each in enumerate(inputs)}
        saved |= {f"y{index}": each for index, each in enumerate(outputs)}
        total = host_s = device_s = 0.0
        parts_of = getattr(self.cost, "parts", None)
        if spec.statistic_layout(mesh, strategy.dims) is not None:
            table, emitter = self._scratch(mesh)
            names = [
                table.add(Value(name=f"x{at}", shape=shape, dtype=dtype)) for at, (shape, dtype) in enumerate(inputs)
            ]
            made = gather_statistic(emitter, operator, spec, mesh, strategy.dims, names)
            assert made is not None
            emitter.flush()
            total += self._total(emitter)
            saved["s0"] = table[made].shape, table[made].dtype
            inputs.append(saved["s0"])
        attrs = dict(operator.attrs)

        def called(call: str, part: str, operands: Sequence[tuple[tuple[int, ...], str]], flops: int) -> None:
            nonlocal total, host_s, device_s
            instruction = Instruction(
                name=operator.name, kind=Kind.COMPUTE, call=f"{operator.kind}.{call}", part=part, flops=flops,
                shapes=tuple(shape for shape, _ in operands), dtype=operands[0][1], attrs=attrs,
            )  # fmt: skip
            total += self.cost(instruction)
            if parts_of is not None:
                host, device = parts_of(instruction)
                host_s, device_s = host_s + host, device_s + device

        called("forward", "F", [*inputs, *outputs], spec.flops // fraction)
        indices = self.micro.trained_inputs(operator)
        weights = [index for index in indices if self._is_parameter(operator.inputs[index])]
        groups = [(group, "B") for group in spec.gradient_groups(set(indices) - set(weights))]
        for group, part in groups + [(group, "W") for group in spec.gradient_groups(weights)]:
            operands = [] if operator.kind in LOSSES else outputs[:1]
            operands = operands + [saved[need] for need in spec.gradient_needs(group) if need in saved]
            results = [
                (
                    spec.gradient_layout(index, mesh, strategy.dims).local_shape(tensors[operator.inputs[index]].shape),
                    tensors[operator.inputs[index]].dtype,
                )
                for index in group
            ]
            which = "".join(str(index) for index in group)
            flops = sum(spec.gradients[index].flops for index in group) // fraction
            called(f"grad{which}", part, [*operands, *results], flops)
        return total, host_s, device_s

    def hand_on_s(self, operator: Operator, strategy: Strategy) -> float:
        """Seconds per step to bring an operator's output to the layout its strategy hands it on in, and back."""
        if strategy.out is None:
            return 0.0
        spec, mesh, name = self.micro.spec(operator), self._mesh(strategy), operator.outputs[0]
        made, handed_on = spec.output_layout(0, mesh, strategy.dims), strategy.handed_on(spec, 0, mesh)
        back = self._move_s(handed_on, made.without_partial(), name) if name in self.micro.needs_gradient() else 0.0
        return self.num_micro_batches * (self._move_s(made, handed_on, name) + back)

    def step_s(self, operator: Operator, strategy: Strategy) -> float:
        """Seconds per step for an operator's parameters, each alone: gathers, reductions, update."""
        again_s = 0.0
        spec, mesh = self.micro.spec(operator), self._mesh(strategy)
        table, emitter = self._scratch(mesh)
        for index, name in enumerate(operator.inputs):
            if not self._is_parameter(name) or index not in spec.gradients:
                continue
            tensor = self.micro.tensors[name]
            home = spec.input_layout(index, mesh, strategy.dims)
            axes = spec.gradient_layout(index, mesh, strategy.dims).partial
            weight = kept = self._value(table, name, home)
            optimizer, full = self.optimizer, table[weight]

            def collective(
                call: str, over: tuple[str, ...], other: str, times: int, full: Value = full, name: str = name
            ) -> None:
                nonlocal again_s
                if mesh.size(over) > 1:
                    emitter.add(
                        Instruction(
                            name=f"{name}.{call}", kind=Kind.COLLECTIVE, call=call, part="C", mesh=mesh, axes=over,
                            channel=channel_of(mesh, over), message_bytes=full.span_bytes, dtype=full.dtype,
                            shapes=(full.shape, table[other].shape),
                        )
                    )  # fmt: skip
                    again_s += (times - 1) * self.cost(emitter.instructions[-1])

            if optimizer.parallel_level >= 1 and tensor.size_bytes >= optimizer.threshold_bytes:
                over = shard_axes(home, axes)
                part = (padded_shard(math.prod(full.shape), mesh.size(over)),)
                kept = table.add(Value(name=f"{name}#shard", shape=part, dtype=tensor.dtype))
                gathers = 2 * self.num_micro_batches if optimizer.parallel_level == 3 else 1
                collective("all_gather_flat", over, kept, gathers)
                collective("reduce_scatter_flat", axes, kept, self.num_micro_batches if optimizer.reduces_each else 1)
                if mesh.size(over) > mesh.size(axes):
                    emitter.compute(f"{name}.slice", "flat_slice", "U", (weight,), (kept,))
            else:
                collective("all_reduce", axes, weight, 1)
            emitter.compute(f"{name}.U", f"{self.optimizer.kind}.update", "U", (kept, kept), (kept,))
        return again_s + self._total(emitter)

    # ------------------------------------------------------- tensors handed on

    def _tensors(self) -> list[Handed]:
        """The tensors whose layouts make a difference, announced to `moves`."""
        if self._handed is not None:
            return self._handed
        position = {operator.name: number for number, operator in enumerate(self.operators)}
        producers, consumers = self.micro.producers(), self.micro.consumers()
        wanted = self.micro.needs_gradient()
        self._handed = []
        for name in dict.fromkeys(
            name for operator in self.operators for name in (*operator.inputs, *operator.outputs)
        ):
            readers = [operator for operator in consumers[name] if operator.name in position]
            maker = producers.get(name)
            fed = self.full_batch and not self._is_parameter(name)
            if not readers or (maker is None and (fed or self.micro.tensors[name].kind == "constant")):
                continue  # nothing to move, or something whole, of which every rank takes its part
            inside = maker is not None and maker.name in position
            if not inside and len(readers) < 2:
                continue  # arrives in its reader's layout
            variables = ([position[maker.name]] if inside and maker is not None else []) + [
                position[reader.name] for reader in readers
            ]
            if len(set(variables)) < 2:
                continue
            self._handed.append(
                self._handed_on(name, maker if inside else None, readers, tuple(variables), name in wanted)
            )
        return self._handed

    def _handed_on(
        self, name: str, maker: Operator | None, readers: Sequence[Operator], variables: tuple[int, ...], wanted: bool
    ) -> Handed:
        """Strategies that hand the tensor on, or read it, in the same layouts cost the same: one kind."""
        assert self.moves is not None
        tensor = self.micro.tensors[name]
        kinds: list[list[Layouts]] = []
        kind_of: list[np.ndarray] = []
        for number, variable in enumerate(variables):
            made = maker is not None and number == 0
            operator = maker if made and maker is not None else readers[number - (maker is not None)]
            found, which = self._kinds_of(name, operator, variable, made)
            kind_of.append(which)
            kinds.append(found)
        every = dict.fromkeys(layout for known in kinds for pairs in known for pair in pairs for layout in pair)
        every |= dict.fromkeys(layout.without_partial() for layout in every)
        self.moves.add(tensor.shape, tensor.dtype, list(every))

        def numbers(layouts: Sequence[TensorLayout]) -> np.ndarray:
            assert self.moves is not None
            return self.moves.numbers(tensor.shape, tensor.dtype, layouts)

        first = [pairs[0][0] for pairs in kinds[0]]  # without a maker it arrives as its first reader wants it
        slots = []
        for number in range(maker is not None, len(variables)):
            for slot in range(len(kinds[number][0])):
                read = numbers([pairs[slot][0] for pairs in kinds[number]])
                back = numbers([pairs[slot][1] for pairs in kinds[number]])
                slots.append((number, read, back))
        handed = Handed(
            tensor=name, variables=tuple(self.variable_of[variable] for variable in variables), source=numbers(first),
            arrives=numbers([layout.without_partial() for layout in first]), slots=slots, kind_of=kind_of,
            sizes=tuple(len(known) for known in kinds), wanted=wanted and not self._is_parameter(name),
        )  # fmt: skip
        return handed.joined()

    def _kinds_of(self, name: str, operator: Operator, position: int, made: bool) -> tuple[list[Layouts], np.ndarray]:
        """The different layouts of a tensor at one operator, and which of them each strategy has."""
        side = operator.outputs if made else operator.inputs
        where = tuple(at for at, each in enumerate(side) if each == name)
        key = id(self.micro.spec(operator)), id(self.choices[position]), made, where
        if key not in self._kinds:
            known: dict[Layouts, int] = {}
            layouts = [self._layouts_of(name, operator, strategy, made) for strategy in self.choices[position]]
            which = np.array([known.setdefault(each, len(known)) for each in layouts])
            self._kinds[key] = list(known), which
        return self._kinds[key]

    def _tensor_table(self, handed: Handed) -> Table:
        assert self.moves is not None
        tensor = self.micro.tensors[handed.tensor]
        key = (tensor.shape, tensor.dtype), self._version.get((tensor.shape, tensor.dtype), 0), handed.key
        if key in self._tables:
            return Table(handed.variables, self._tables[key])
        if self.moves.floors is None:
            pairs = {pair for _, read, _ in handed.slots for pair in product(handed.source.tolist(), read.tolist())}
            if handed.wanted:
                pairs |= {
                    pair for _, _, back in handed.slots for pair in product(back.tolist(), handed.arrives.tolist())
                }
            self.moves.price_all(tensor.shape, tensor.dtype, sorted(pairs))
        seconds = self.moves.table(tensor.shape, tensor.dtype)

        spread = handed.costs(seconds) * self.num_micro_batches
        for at, kinds in enumerate(handed.kind_of):
            spread = spread.take(kinds, axis=at)
        last = key[0], key[1] - 1, key[2]
        self._tables.pop(last, None)
        self._tables[key] = spread
        return Table(handed.variables, spread)

    def _moves_of(self, handed: Handed, values: Sequence[int]) -> set[tuple[TensorLayout, TensorLayout]]:
        """The pairs of layouts that a choice of strategies moves the tensor, and its gradient, between."""
        assert self.moves is not None
        tensor = self.micro.tensors[handed.tensor]
        layouts = self.moves.layouts(tensor.shape, tensor.dtype)
        kinds = [
            int(kind_of[values[variable]]) for kind_of, variable in zip(handed.kind_of, handed.variables, strict=True)
        ]
        source, arrives = layouts[handed.source[kinds[0]]], layouts[handed.arrives[kinds[0]]]
        found = set()
        for variable, read, back in handed.slots:
            found.add((source, layouts[read[kinds[variable]]]))
            if handed.wanted:
                found.add((layouts[back[kinds[variable]]], arrives))
        return found

    def _layouts_of(self, name: str, operator: Operator, strategy: Strategy, made: bool) -> Layouts:
        """In which layout a strategy hands a tensor on; or in which it is read, and its gradient made, each time."""
        spec, mesh = self.micro.spec(operator), self._mesh(strategy)
        if made:
            layout = strategy.handed_on(spec, operator.outputs.index(name), mesh)
            return ((layout, layout),)
        return tuple(
            (spec.input_layout(index, mesh, strategy.dims), spec.gradient_layout(index, mesh, strategy.dims))
            for index, read in enumerate(operator.inputs)
            if read == name
        )

    def _move_s(self, source: TensorLayout, target: TensorLayout, name: str) -> float:
        assert self.moves is not None
        tensor = self.micro.tensors[name]
        return self.moves.price(source, target, tensor.shape, tensor.dtype)

    def _lowered_s(self, source: TensorLayout, target: TensorLayout, shape: tuple[int, ...], dtype: str) -> float:
        """Seconds of the steps of least bytes."""
        table, emitter = self._scratch(source.mesh)
        value = table.add(Value(name="before", shape=source.local_shape(shape), dtype=dtype))
        emitter.move(value, "moved", source, target, shape)
        emitter.flush()
        return self._total(emitter)

    # ----------------------------------------------------------------- helpers

    def _mesh(self, strategy: Strategy) -> Layout:
        return strategy.mesh or self.mesh

    def _is_parameter(self, name: str) -> bool:
        return self.micro.tensors[name].kind == "parameter"

    def _scratch(self, mesh: Layout) -> tuple[ValueTable, Emitter]:
        table = ValueTable()
        return table, Emitter(mesh=mesh, table=table)

    def _value(self, table: ValueTable, name: str, layout: TensorLayout) -> str:
        tensor = self.micro.tensors[name]
        label = f"{name}@{layout}{len(table.values)}"
        return table.add(Value(name=label, shape=layout.local_shape(tensor.shape), dtype=tensor.dtype))

    def _total(self, emitter: Emitter) -> float:
        return sum(self.cost(instruction) for instruction in emitter.instructions)
