"""Plan to program: the bodies of every stage put in the order of the schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from plans.errors import TwofoldError
from plans.graph import Graph
from plans.layout import Layout, TensorLayout
from plans.lower.choose import stored_ways
from plans.lower.chunk import LOSSES, Border, ChunkLowering
from plans.lower.emit import Emitter, ValueTable, Ways, channel_of, transfer_pair, value_name
from plans.lower.gathering import Arrival, with_arrivals
from plans.lower.liveness import with_frees
from plans.lower.optimizer import OptimizerLowering
from plans.lower.slices import Slices
from plans.plan import Plan
from plans.program import BEGIN, END, Block, Body, GroupProgram, Instruction, Kind, Program, Scope, Value
from plans.schedules import Action, Schedule, make_schedule

__all__ = ["lower", "lower_by", "schedule_of"]


@lru_cache(maxsize=64)
def lower(plan: Plan) -> Program:
    """The program of one training step of `plan`.

    Raises:
        TwofoldError: a layout that does not divide a shape, a parameter that two groups of ranks read, a schedule that
            does not fit the stages.
    """
    return lower_by(plan, stored_ways(plan))


def lower_by(plan: Plan, ways: Ways) -> Program:
    """The program of a plan whose tensors are redistributed by the steps that `ways` says."""
    return _Lowering(plan, ways).run()


def schedule_of(plan: Plan) -> Schedule:
    """The plan's schedule for its stages and micro-batches.

    Raises:
        TwofoldError: the schedule places a stage on other ranks than the plan does.
    """
    groups = _groups(plan)
    num_stages, num_groups = len(plan.stages), len(groups)
    if num_stages % num_groups:
        raise TwofoldError(f"{num_stages} stages do not spread evenly over {num_groups} groups of ranks")
    schedule = make_schedule(plan.schedule, num_groups, plan.num_micro_batches, virtual=num_stages // num_groups)
    for number, stage in enumerate(plan.stages):
        owner = schedule.placement[number]
        if stage.mesh.rank_list != groups[owner].rank_list:
            raise TwofoldError(
                f"schedule {plan.schedule!r} runs stage {number} on ranks {list(groups[owner].rank_list)}, "
                f"the plan places it on {list(stage.mesh.rank_list)}"
            )
    return schedule


def _groups(plan: Plan) -> list[Layout]:
    """The groups of ranks in the order in which the pipeline first reaches them."""
    found: dict[frozenset[int], Layout] = {}
    for stage in plan.stages:
        found.setdefault(frozenset(stage.mesh.rank_list), stage.mesh)
    return list(found.values())


@dataclass(slots=True)
class _Bodies:
    """The bodies of one chunk; `last` ones also start the reduction of gradients, `first` one waits for the gathers."""

    forward: Body
    first: Body
    backward: dict[tuple[str, bool], Body]
    receive_forward: Body | None
    receive_backward: Body | None


@dataclass(slots=True)
class _Lowering:
    plan: Plan
    ways: Ways
    micro: Graph = field(init=False)
    borders: list[Border] = field(init=False)
    group_of_stage: list[int] = field(init=False)

    def run(self) -> Program:
        plan = self.plan
        self.micro = plan.slice_graph
        schedule = schedule_of(plan)
        groups = _groups(plan)
        self.group_of_stage = [schedule.placement[number] for number in range(len(plan.stages))]
        self.borders = self._find_borders()
        self._check_parameters()
        programs = tuple(self._group(number, mesh, schedule.order[number]) for number, mesh in enumerate(groups))
        return Program(groups=programs, num_micro_batches=plan.num_micro_batches, name=plan.graph.name)

    def _find_borders(self) -> list[Border]:
        stage_of, found = self.plan.stage_of(), {}
        trained = {
            (operator.inputs[index], stage_of[operator.name])
            for operator in self.micro.operators
            for index in self.micro.trained_inputs(operator)
        }
        producers = self.micro.producers()
        for operator in self.micro.operators:
            here = stage_of[operator.name]
            for index, name in enumerate(operator.inputs):
                maker = producers.get(name)
                if maker is None or stage_of[maker.name] == here or (name, here) in found:
                    continue
                there = stage_of[maker.name]
                source = self.plan.strategy(maker).handed_on(
                    self.micro.spec(maker), maker.outputs.index(name), self._mesh(maker)
                )
                target = self.micro.spec(operator).input_layout(
                    index, self._mesh(operator), self.plan.strategy(operator).dims
                )
                found[name, here] = Border(
                    tensor=name, from_stage=there, to_stage=here, source=source.without_partial(), target=target,
                    trained=(name, here) in trained,
                )  # fmt: skip
        return list(found.values())

    def _mesh(self, operator: object) -> Layout:
        stage = self.plan.stages[self.plan.stage_of()[operator.name]]  # type: ignore[attr-defined]
        return self.plan.strategy(operator).mesh or stage.mesh  # type: ignore[arg-type]

    def _check_parameters(self) -> None:
        stage_of = self.plan.stage_of()
        owner: dict[str, int] = {}
        for operator in self.micro.operators:
            group = self.group_of_stage[stage_of[operator.name]]
            for name in operator.inputs:
                if self.micro.tensors[name].kind == "parameter" and owner.setdefault(name, group) != group:
                    raise TwofoldError(
                        f"parameter {name!r} is read by stages on different ranks (the second is {operator.name!r}); "
                        "put its readers into one stage"
                    )

    def _group(self, number: int, mesh: Layout, order: Sequence[Action]) -> GroupProgram:
        table = ValueTable(ways=self.ways)
        stages = [stage for stage, group in enumerate(self.group_of_stage) if group == number]
        homes, reduced = self._parameter_layouts(stages)
        tensors = {tensor.name: tensor for tensor in self.micro.parameters if tensor.name in homes}
        optimizer = OptimizerLowering(
            optimizer=self.plan.optimizer, mesh=mesh, table=table, parameters=tensors, homes=homes, reduced=reduced,
            num_ranks=self.plan.num_ranks,
        )  # fmt: skip
        places, accumulators = optimizer.places(), optimizer.accumulators()
        chunks = {
            stage: ChunkLowering(
                plan=self.plan, micro=self.micro, number=stage, table=table, homes=homes, reduced=reduced,
                arriving=tuple(border for border in self.borders if border.to_stage == stage),
                leaving=tuple(border for border in self.borders if border.from_stage == stage),
                accumulators=accumulators,
            )
            for stage in stages
        }  # fmt: skip
        for stage, chunk in chunks.items():
            optimizer.arrange(stage, chunk.operators(), chunk.completed(), self._read_elsewhere(stage))
        gathers, gathered = optimizer.gathers()
        slices = Slices(self.plan.interleave, table, self.plan.interleave_order == "interleaved")
        bodies = {stage: self._chunk(chunk, optimizer, gathered, slices) for stage, chunk in chunks.items()}
        loss = self._loss_value(table, stages)
        blocks = self._order(order, bodies, gathers)
        blocks.append(
            Block(label="end", micro_batch=END, body=self._end(mesh, table, optimizer, places, blocks, bodies, loss))
        )
        return GroupProgram(
            mesh=mesh, values=dict(slices.values()), blocks=tuple(blocks), parameters=places, loss=loss,
            constants=tuple(table.constants.values()),
        )  # fmt: skip

    def _parameter_layouts(self, stages: Sequence[int]) -> tuple[dict[str, TensorLayout], dict[str, TensorLayout]]:
        """Where each parameter lives (as its first reader wants it), and the layout of its accumulated gradient."""
        homes: dict[str, TensorLayout] = {}
        partial: dict[str, tuple[str, ...]] = {}
        wanted = self.micro.needs_gradient()
        mine = {name for stage in stages for name in self.plan.stages[stage].operators}
        for operator in self.micro.operators:
            if operator.name not in mine:
                continue
            spec, dims = self.micro.spec(operator), self.plan.strategy(operator).dims
            for index, name in enumerate(operator.inputs):
                if self.micro.tensors[name].kind != "parameter":
                    continue
                if name not in wanted:
                    raise TwofoldError(f"parameter {name!r} does not reach the loss; freeze it or leave it out")
                mesh = self._mesh(operator)
                home = homes.setdefault(name, spec.input_layout(index, mesh, dims))
                if index not in self.micro.trained_inputs(operator):
                    continue
                axes = spec.gradient_layout(index, mesh, dims).partial
                if mesh != home.mesh:
                    axes = ()  # the same names mean other axes there
                partial[name] = tuple(axis for axis in partial.get(name, axes) if axis in axes)
        reduced = {}
        for name, home in homes.items():
            own = {axis for axes in home.dims for axis in axes}
            axes = tuple(axis for axis in home.mesh.alias_name if axis in partial[name] and axis not in own)
            reduced[name] = TensorLayout(mesh=home.mesh, dims=home.dims, partial=axes)
        return homes, reduced

    # ------------------------------------------------------------------- bodies

    def _chunk(
        self,
        chunk: ChunkLowering,
        optimizer: OptimizerLowering,
        gathered: Mapping[str, Arrival],
        slices: Slices,
    ) -> _Bodies:
        stage, table, arriving, leaving = chunk.number, chunk.table, chunk.arriving, chunk.leaving

        def crossing(
            border: Border, gradient: bool, value: str = "", result: str = ""
        ) -> tuple[Instruction, Instruction]:
            name, tensor = chunk.crossing(border, gradient), self.micro.tensors[border.tensor]
            ends = (border.target, border.source) if gradient else (border.source, border.target)
            pair = transfer_pair(
                name, value, result, *ends, tensor.shape, tensor.dtype, f"{name}:{'B' if gradient else 'F'}"
            )
            table.add(Value(name=str(pair[0 if value else 1].token), shape=(), role="token"))
            return pair

        def send(emitter: Emitter, border: Border, value: str, gradient: bool) -> None:
            emitter.add(crossing(border, gradient, value=value)[0])

        def receive(border: Border, gradient: bool) -> Instruction:
            name, tensor = chunk.crossing(border, gradient), self.micro.tensors[border.tensor]
            layout = border.source if gradient else border.target
            result = table.add(
                Value(
                    name=f"{name}@{layout}" if gradient else chunk.name_of(border.tensor, layout),
                    shape=layout.local_shape(tensor.shape), dtype=tensor.dtype,
                )
            )  # fmt: skip
            return crossing(border, gradient, result=result)[1]

        incoming = [receive(border, False) for border in arriving]
        returning = [receive(border, True) for border in leaving if border.trained]
        forward = chunk.forward(lambda emitter, border, value: send(emitter, border, value, False))
        if self._is_last(stage):
            forward += self._accumulate_loss(table)

        def back(emitter: Emitter, border: Border, value: str) -> None:
            send(emitter, border, value, True)

        whole, _ = chunk.backward(back, optimizer.reduction(stage, is_last=False))
        whole_last, _ = chunk.backward(back, optimizer.reduction(stage, is_last=True))
        first, second = chunk.backward(back, optimizer.reduction(stage, is_last=False), split=True)
        first_last, second_last = chunk.backward(back, optimizer.reduction(stage, is_last=True), split=True)

        def spread(*backward: list[Instruction]) -> list[list[Instruction]]:
            bodies = slices.spread([incoming, forward, returning, *backward])
            return with_frees([optimizer.with_gathers(stage, body) for body in bodies], table.values)

        incoming_, forward_, returning_, whole_ = spread(whole)
        *_, whole_last_ = spread(whole_last)
        *_, first_, second_ = spread(first, second)
        *_, first_last_, second_last_ = spread(first_last, second_last)
        return _Bodies(
            forward=Body(name=f"{stage}F", instructions=tuple(forward_)),
            first=Body(name=f"{stage}F.first", instructions=tuple(with_arrivals(forward_, gathered))),
            backward={
                ("B", False): Body(name=f"{stage}B", instructions=tuple(whole_)),
                ("B", True): Body(name=f"{stage}B.last", instructions=tuple(whole_last_)),
                ("I", False): Body(name=f"{stage}I", instructions=tuple(first_)),
                ("I", True): Body(name=f"{stage}I.last", instructions=tuple(first_last_)),
                ("W", False): Body(name=f"{stage}W", instructions=tuple(second_)),
                ("W", True): Body(name=f"{stage}W.last", instructions=tuple(second_last_)),
            },
            receive_forward=Body(name=f"{stage}F.recv", instructions=tuple(incoming_)) if incoming_ else None,
            receive_backward=Body(name=f"{stage}B.recv", instructions=tuple(returning_)) if returning_ else None,
        )

    def _read_elsewhere(self, stage: int) -> set[str]:
        """What other stages read: a parameter among it gets gradients from several chunks."""
        mine = set(self.plan.stages[stage].operators)
        return {name for operator in self.micro.operators if operator.name not in mine for name in operator.inputs}

    def _is_last(self, stage: int) -> bool:
        return self._loss_operator().name in self.plan.stages[stage].operators

    def _loss_operator(self):  # type: ignore[no-untyped-def]
        operator = self.micro.producers()[self.micro.loss]
        if operator.kind not in LOSSES:
            raise TwofoldError(
                f"the loss comes from {operator.name!r} ({operator.kind}); it must be one of {sorted(LOSSES)}"
            )
        return operator

    def _accumulate_loss(self, table: ValueTable) -> list[Instruction]:
        operator = self._loss_operator()
        layout = self.micro.spec(operator).output_layout(0, self._mesh(operator), self.plan.strategy(operator).dims)
        mesh = self.plan.stages[self.plan.stage_of()[operator.name]].mesh
        value, dtype = value_name(self.micro.loss, layout, mesh), self.micro.tensors[self.micro.loss].dtype
        total = table.add(Value(name="step_loss", shape=(), dtype=dtype, scope=Scope.STEP, role="buffer"))
        emitter = Emitter(mesh=self._mesh(operator), table=table)
        scale = {"scale": 1.0 / self.plan.num_slices}
        emitter.compute("step_loss.accumulate", "accumulate", "F", (value,), (total,), attrs=scale)
        return emitter.instructions

    def _loss_value(self, table: ValueTable, stages: Sequence[int]) -> str | None:
        if any(self._is_last(stage) for stage in stages):
            return "step_loss"
        if not self.plan.output_broadcast:
            return None
        dtype = self.micro.tensors[self.micro.loss].dtype
        return table.add(Value(name="step_loss", shape=(), dtype=dtype, scope=Scope.STEP, role="buffer"))

    # -------------------------------------------------------------------- order

    def _order(self, order: Sequence[Action], bodies: Mapping[int, _Bodies], gathers: list[Instruction]) -> list[Block]:
        """The blocks of one group: each action's receives are posted one action ahead."""
        blocks = [Block(label="begin", micro_batch=BEGIN, body=Body(name="begin", instructions=tuple(gathers)))]
        seen: set[int] = set()
        final: dict[tuple[int, str], Action] = {}
        for action in order:
            final[action.stage, str(action.kind)] = action

        def receives(action: Action) -> list[Block]:
            chunk = bodies[action.stage]
            body = {"F": chunk.receive_forward, "W": None}.get(str(action.kind), chunk.receive_backward)
            return [] if body is None else [Block(label=f"{action}.recv", micro_batch=action.micro_batch, body=body)]

        for position, action in enumerate(order):
            if position == 0:
                blocks += receives(action)
            if position + 1 < len(order):
                blocks += receives(order[position + 1])
            chunk, kind = bodies[action.stage], str(action.kind)
            if kind == "F":
                body = chunk.forward if action.stage in seen else chunk.first
                seen.add(action.stage)
            else:
                body = chunk.backward[kind, self._closes(action, order, position)]
            blocks.append(Block(label=str(action), micro_batch=action.micro_batch, body=body))
        return blocks

    @staticmethod
    def _closes(action: Action, order: Sequence[Action], position: int) -> bool:
        """Whether no later action of this stage adds to weight gradients."""
        return not any(later.stage == action.stage and str(later.kind) in "BW" for later in order[position + 1 :])

    def _end(
        self,
        mesh: Layout,
        table: ValueTable,
        optimizer: OptimizerLowering,
        places: Sequence[object],
        blocks: Sequence[Block],
        bodies: Mapping[int, _Bodies],
        loss: str | None,
    ) -> Body:
        emitter = Emitter(mesh=mesh, table=table)
        optimizer.reduce_rest(emitter)
        if loss is not None:
            self._share_loss(emitter, table, mesh)
        instructions = emitter.instructions + optimizer.updates(places)  # type: ignore[arg-type]
        emitter.instructions = []
        emitter.flush()
        instructions += emitter.instructions
        for block in blocks:
            for instruction in block.body.instructions:
                if instruction.kind is Kind.SEND and not instruction.channel.endswith(":within"):
                    instructions.append(
                        Instruction(
                            name=f"{instruction.token}.{block.label}.wait", kind=Kind.WAIT, call="wait", part="C",
                            waits=instruction.token, attrs={"micro_batch": block.micro_batch},
                        )
                    )  # fmt: skip
        return Body(name="end", instructions=tuple(instructions))

    def _share_loss(self, emitter: Emitter, table: ValueTable, mesh: Layout) -> None:
        """Sum the loss over the ranks that hold parts of it; with output_broadcast, hand it to the other groups."""
        operator = self._loss_operator()
        stage = self.plan.stage_of()[operator.name]
        last = self.plan.stages[stage].mesh
        whole = TensorLayout(mesh=last, dims=())
        dtype = table["step_loss"].dtype
        if mesh.rank_list == last.rank_list:
            own = self._mesh(operator)
            layout = self.micro.spec(operator).output_layout(0, own, self.plan.strategy(operator).dims)
            if own.size(layout.partial) > 1:
                emitter.add(
                    Instruction(
                        name="step_loss.all_reduce", kind=Kind.COLLECTIVE, call="all_reduce", part="C",
                        inputs=("step_loss",), outputs=("step_loss",), mesh=own, axes=layout.partial,
                        channel=channel_of(own, layout.partial), message_bytes=table["step_loss"].span_bytes,
                        token=emitter.token("step_loss.all_reduce", Scope.STEP), shapes=((), ()), dtype=dtype,
                    )
                )  # fmt: skip
        if not self.plan.output_broadcast:
            return
        for number, group in enumerate(_groups(self.plan)):
            if group.rank_list == last.rank_list:
                continue
            target = TensorLayout(mesh=group, dims=())
            name = f"step_loss:{number}"
            send, recv = transfer_pair(name, "step_loss", "step_loss", whole, target, (), dtype, f"{name}:L")
            mine = send if mesh.rank_list == last.rank_list else recv if mesh.rank_list == group.rank_list else None
            if mine is not None:
                table.add(Value(name=str(mine.token), shape=(), scope=Scope.STEP, role="token"))
                emitter.add(mine)
                if mine is send:
                    emitter.sent.append(str(send.token))
