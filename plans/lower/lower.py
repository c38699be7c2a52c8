"""Lowers a plan to a program: the bodies of every stage in the order of the schedule."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from plans.errors import TwofoldError
from plans.layout import Layout, TensorLayout
from plans.lower.backward import lower_backward
from plans.lower.boundaries import find_boundaries, parameter_layouts
from plans.lower.chunk import ChunkLowering
from plans.lower.chunk_plan import StageBoundary
from plans.lower.emit import Emitter, ValueTable, Ways, transfer_pair
from plans.lower.fuse import block_names, fuse_runs
from plans.lower.gathering import Arrival, with_arrivals
from plans.lower.in_place import sum_in_place
from plans.lower.liveness import with_frees
from plans.lower.loss import accumulate_loss, loss_operator, step_loss_dtype, sum_loss
from plans.lower.optimizer import OptimizerLowering
from plans.lower.pairs import Pairing, units_of
from plans.lower.redistribution_policy import stored_ways
from plans.lower.sends import ReleasePlaces, SentBody, sent_bodies
from plans.lower.slices import Slices
from plans.model.graph import Graph, Operator
from plans.plan import Plan
from plans.program import BEGIN, END, Block, Body, GroupProgram, Instruction, Program, Scope, Value
from plans.schedules import Action, Schedule, make_schedule
from plans.schedules.pairs import overlapped_pairs

__all__ = ["lower", "lower_by", "schedule_of"]


@lru_cache(maxsize=16)  # a search needs up to 10, of a few MB each
def lower(plan: Plan) -> Program:
    """Lower a plan to the program of one training step.

    Raises:
        TwofoldError: a layout that does not divide a shape, a parameter that two groups of ranks read, a schedule that
            does not fit the stages.

    >>> from plans.model.mlp import mlp_graph
    >>> from plans.plan import Stage
    >>> graph = mlp_graph([64, 32, 8], batch_size=16)
    >>> names = tuple(operator.name for operator in graph.operators)
    >>> lower(Plan(graph=graph, stages=(Stage(mesh=Layout((2,), ("dp",)), operators=names),), num_micro_batches=4))
    <Program mlp: 2 ranks in 1 group, at most 64 instructions per rank>
    """
    return lower_by(plan, stored_ways(plan))


def lower_by(plan: Plan, ways: Ways) -> Program:
    """The program of a plan whose tensors are redistributed by the steps of `ways`."""
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


def _closing(order: Sequence[Action]) -> list[bool]:
    """For each action, whether it is the last of its stage that adds to weight gradients."""
    result, seen = list[bool](), set[int]()
    for action in reversed(order):
        result.append(action.stage not in seen)
        if str(action.kind) in "BW":
            seen.add(action.stage)
    return result[::-1]


def _check_updated(groups: Sequence[GroupProgram]) -> None:
    """Refuse copies of one tensor that the forwards of different stages change separately."""
    owners: dict[str, tuple[int, str]] = {}
    for number, group in enumerate(groups):
        for constant in group.constants:
            if constant.is_updated and owners.setdefault(constant.name, (number, constant.value)) != (
                number,
                constant.value,
            ):
                raise TwofoldError(
                    f"{constant.name!r}, which the forward changes, is used in two stages or in two layouts; put its "
                    "users into one stage with equal strategies, or use separate modules"
                )


@dataclass(slots=True)
class _Bodies:
    """The bodies of one chunk; `last` ones also start the reduction of gradients, `first` one waits for the gathers.

    `sent` has the WAITs for what the chunk sends, by channel.
    """

    forward: Body
    first: Body
    backward: dict[tuple[str, bool], Body]
    receive_forward: Body | None
    receive_backward: Body | None
    sent: Mapping[str, SentBody]


@dataclass(slots=True)
class _Lowering:
    plan: Plan
    ways: Ways
    micro: Graph = field(init=False)
    borders: list[StageBoundary] = field(init=False)
    releases: ReleasePlaces = field(init=False)
    group_of_stage: list[int] = field(init=False)
    stage_of: Mapping[str, int] = field(init=False)
    loss: Operator = field(init=False)
    num_ranks: int = field(init=False)

    def run(self) -> Program:
        plan = self.plan
        self.micro, self.num_ranks = plan.slice_graph, plan.num_ranks
        self.stage_of = plan.stage_of()
        schedule = schedule_of(plan)
        groups = _groups(plan)
        self.group_of_stage = [schedule.placement[number] for number in range(len(plan.stages))]
        self.borders = find_boundaries(plan, self.micro)
        self._check_parameters()
        self.loss = loss_operator(self.micro)
        pairs = overlapped_pairs(schedule) if plan.overlap_pairs else (frozenset[int](),) * len(groups)
        self.releases = ReleasePlaces(schedule, self.borders, pairs)
        programs = tuple(
            self._group(number, mesh, schedule.order[number], pairs[number]) for number, mesh in enumerate(groups)
        )
        _check_updated(programs)
        return Program(groups=programs, num_micro_batches=plan.num_micro_batches, name=plan.graph.name)

    def _mesh(self, operator: Operator) -> Layout:
        return self.plan.strategy(operator).mesh or self.plan.stages[self.stage_of[operator.name]].mesh

    def _check_parameters(self) -> None:
        stage_of = self.stage_of
        owner: dict[str, int] = {}
        for operator in self.micro.operators:
            group = self.group_of_stage[stage_of[operator.name]]
            for name in operator.inputs:
                if self.micro.tensors[name].kind == "parameter" and owner.setdefault(name, group) != group:
                    raise TwofoldError(
                        f"parameter {name!r} is read by stages on different ranks (the second is {operator.name!r}); "
                        "put its readers into one stage"
                    )

    def _group(self, number: int, mesh: Layout, order: Sequence[Action], pairs: Collection[int]) -> GroupProgram:
        table = ValueTable(ways=self.ways)
        stages = [stage for stage, group in enumerate(self.group_of_stage) if group == number]
        homes, reduced = parameter_layouts(self.plan, self.micro, stages)
        tensors = {tensor.name: tensor for tensor in self.micro.parameters if tensor.name in homes}
        optimizer = OptimizerLowering(
            optimizer=self.plan.optimizer, mesh=mesh, table=table, parameters=tensors, homes=homes, reduced=reduced,
            num_ranks=self.num_ranks, step_check=self.plan.step_check,
        )  # fmt: skip
        places, accumulators = optimizer.allocate_parameters(), optimizer.accumulators()
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
        closing = _closing(order)
        wanted: dict[int, set[tuple[str, bool]]] = {stage: set() for stage in stages}
        for action, closes in zip(order, closing, strict=True):
            if str(action.kind) != "F":
                wanted[action.stage].add((str(action.kind), closes))
        bodies = {
            stage: self._chunk(chunk, optimizer, gathered, slices, wanted[stage]) for stage, chunk in chunks.items()
        }
        loss = self._loss_value(table, stages)
        blocks = [Block(label="begin", micro_batch=BEGIN, body=Body(name="begin", instructions=tuple(gathers)))]
        sent = self.releases.blocks(
            number, {channel: body for chunk in bodies.values() for channel, body in chunk.sent.items()}
        )
        units = units_of(len(order), pairs)
        blocks += self._order(order, closing, bodies, units, Pairing(slices.values()), sent)
        blocks.append(Block(label="end", micro_batch=END, body=self._end(mesh, table, optimizer, places, loss)))
        blocks += sent.get(-1, [])
        return GroupProgram(
            mesh=mesh, values=dict(slices.values()), blocks=tuple(blocks), parameters=places, loss=loss,
            constants=tuple(table.constants.values()), step_check=optimizer.checks,
        )  # fmt: skip

    # ------------------------------------------------------------------- bodies

    def _chunk(
        self,
        chunk: ChunkLowering,
        optimizer: OptimizerLowering,
        gathered: Mapping[str, Arrival],
        slices: Slices,
        wanted: Collection[tuple[str, bool]],
    ) -> _Bodies:
        """The bodies of a chunk, of its backward those that are `wanted`: (kind, whether none comes after it)."""
        stage, table, arriving, leaving = chunk.number, chunk.table, chunk.arriving, chunk.leaving

        def crossing(
            border: StageBoundary, gradient: bool, value: str = "", result: str = ""
        ) -> tuple[Instruction, Instruction]:
            name, tensor = border.crossing(gradient), self.micro.tensors[border.tensor]
            ends = (border.target, border.source) if gradient else (border.source, border.target)
            pair = transfer_pair(name, value, result, *ends, tensor.shape, tensor.dtype, border.channel(gradient))
            table.add(Value(name=str(pair[0 if value else 1].token), shape=(), role="token"))
            return pair

        def send(emitter: Emitter, border: StageBoundary, value: str, gradient: bool) -> None:
            emitter.add(crossing(border, gradient, value=value)[0])

        def receive(border: StageBoundary, gradient: bool) -> Instruction:
            name, tensor = border.crossing(gradient), self.micro.tensors[border.tensor]
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
            forward += accumulate_loss(self.plan, self.micro, table, stage)

        def back(emitter: Emitter, border: StageBoundary, value: str) -> None:
            send(emitter, border, value, True)

        variants = sorted({(kind != "B", is_last) for kind, is_last in wanted or {("B", False)}})
        spread: list[list[list[Instruction]]] = []
        for split, is_last in variants:
            parts = lower_backward(chunk, back, optimizer.reduction(stage, is_last=is_last), split=split)
            own = [*parts] if split else [parts[0]]
            spread.append(slices.spread([incoming, forward, returning, *own]))
        if self.plan.fused:
            spread = fuse_runs(spread, table, block_names(chunk.operators()), 3)
        sum_in_place(spread, table)
        ways_back: dict[tuple[str, bool], Body] = {}
        sent: dict[str, SentBody] = {}
        incoming_, forward_, returning_ = [list[Instruction]() for _ in range(3)]
        for (split, is_last), found in zip(variants, spread, strict=True):
            gathered_ = [optimizer.with_gathers(stage, body) for body in found]
            kinds = "IW" if split else "B"
            waits = sent_bodies(list(zip(("", "F", "", *kinds), gathered_, strict=True)), table.values)
            incoming_, forward_, returning_, *bodies = with_frees(
                [*gathered_, *(lines for lines, _ in waits.values())], table.values
            )
            for kind, body in zip(kinds, bodies, strict=False):
                name = f"{stage}{kind}{'.last' * is_last}"
                ways_back[kind, is_last] = Body(name=name, instructions=tuple(body))
            for (channel, (_, read_by)), body in zip(waits.items(), bodies[len(kinds) :], strict=True):
                before = sent[channel].read_by if channel in sent else frozenset()
                sent[channel] = SentBody(Body(name=f"{channel}.sent", instructions=tuple(body)), before | read_by)
        return _Bodies(
            forward=Body(name=f"{stage}F", instructions=tuple(forward_)),
            first=Body(name=f"{stage}F.first", instructions=tuple(with_arrivals(forward_, gathered))),
            backward=ways_back,
            receive_forward=Body(name=f"{stage}F.recv", instructions=tuple(incoming_)) if incoming_ else None,
            receive_backward=Body(name=f"{stage}B.recv", instructions=tuple(returning_)) if returning_ else None,
            sent=sent,
        )

    def _read_elsewhere(self, stage: int) -> set[str]:
        """Tensors that other stages read: a parameter among them gets gradients from several chunks."""
        mine = set(self.plan.stages[stage].operators)
        return {name for operator in self.micro.operators if operator.name not in mine for name in operator.inputs}

    def _is_last(self, stage: int) -> bool:
        return self.loss.name in self.plan.stages[stage].operators

    def _loss_value(self, table: ValueTable, stages: Sequence[int]) -> str | None:
        if any(self._is_last(stage) for stage in stages):
            return "step_loss"
        if not self.plan.output_broadcast:
            return None
        dtype = step_loss_dtype(self.micro)
        return table.add(Value(name="step_loss", shape=(), dtype=dtype, scope=Scope.STEP, role="buffer"))

    # -------------------------------------------------------------------- order

    def _order(
        self,
        order: Sequence[Action],
        closing: Sequence[bool],
        bodies: Mapping[int, _Bodies],
        units: Sequence[tuple[int, ...]],
        pairing: Pairing,
        sent: Mapping[int, Sequence[Block]],
    ) -> list[Block]:
        """The blocks of one group's actions.

        The receives of a unit (an action or a pair) are posted one unit ahead, or before it (`Plan.receives`); the
        sends that it proves to have arrived are waited for behind it.
        """
        blocks: list[Block] = []
        seen: set[int] = set()

        def receives(unit: Sequence[int]) -> list[Block]:
            posted = []
            for action in (order[place] for place in unit):
                chunk = bodies[action.stage]
                body = {"F": chunk.receive_forward, "W": None}.get(str(action.kind), chunk.receive_backward)
                if body is not None:
                    posted.append(Block(label=f"{action}.recv", micro_batch=action.micro_batch, body=body))
            return posted

        for unit, following in zip(units, (*units[1:], ()), strict=True):
            if unit is units[0] or self.plan.receives == "needed":
                blocks += receives(unit)
            if self.plan.receives == "ahead":
                blocks += receives(following)
            own = []
            for place in unit:
                action = order[place]
                chunk, kind = bodies[action.stage], str(action.kind)
                if kind == "F":
                    body = chunk.forward if action.stage in seen else chunk.first
                    seen.add(action.stage)
                else:
                    body = chunk.backward[kind, closing[place]]
                own.append(Block(label=str(action), micro_batch=action.micro_batch, body=body))
            blocks += own if len(own) == 1 else pairing.blocks(*own)
            blocks += [block for place in unit for block in sent.get(place, ())]
        return blocks

    def _end(
        self,
        mesh: Layout,
        table: ValueTable,
        optimizer: OptimizerLowering,
        places: Sequence[object],
        loss: str | None,
    ) -> Body:
        emitter = Emitter(mesh=mesh, table=table)
        optimizer.reduce_rest(emitter)
        if loss is not None:
            self._share_loss(emitter, table, mesh)
        instructions = emitter.taken() + optimizer.updates(places)  # type: ignore[arg-type]
        emitter.flush()
        return Body(name="end", instructions=(*instructions, *emitter.taken()))

    def _share_loss(self, emitter: Emitter, table: ValueTable, mesh: Layout) -> None:
        """Sum the loss over the ranks that hold parts of it; with output_broadcast, send it to the other groups."""
        operator = self.loss
        stage = self.stage_of[operator.name]
        last = self.plan.stages[stage].mesh
        whole = TensorLayout(mesh=last, dims=())
        dtype = table["step_loss"].dtype
        if mesh.rank_list == last.rank_list:
            own = self._mesh(operator)
            layout = self.micro.spec(operator).output_layout(0, own, self.plan.strategy(operator).dims)
            sum_loss(emitter, own, layout.partial)
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
