"""The priced bodies of a lowered program."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from costmodels.machine.machine import Machine
from costmodels.price.instruction import Cost, copies_of, overlap_class, price
from costmodels.price.traffic import plain_call
from plans.errors import TwofoldError
from plans.lower.pairs import is_part
from plans.model.graph import itemsize
from plans.program import Block, GroupProgram, Instruction, Kind, Program
from plans.schedules import Schedule
from simulator.forecast.body import ARRIVE, COMPUTE, ISSUE, SEND, WAIT, Op
from simulator.forecast.rank import RankBodies, Transfers
from simulator.lines import Payload

__all__ = ["bodies_of_program", "channel_axes", "channel_name", "is_boundary", "ops_of"]

CostOf = Callable[[Instruction], Cost]


def bodies_of_program(
    program: Program, schedule: Schedule, machine: Machine
) -> tuple[list[RankBodies], dict[tuple[int, str], Transfers]]:
    """Per pipeline rank its bodies, and what goes over the boundaries of stages.

    Raises:
        TwofoldError: stages that send more than one tensor, or to other stages than the next one; ranks of a stage that
            send pieces to each other; slices and pairs, which take turns.
    """
    transfers: dict[tuple[int, str], Transfers] = {}
    ranks = []
    for group in program.groups:
        if turns := _turns(group):
            raise TwofoldError(
                f"{turns} alternate, but bodies run one after the other; "
                f"forecast its degrees, or simulate the plan instead"
            )
        reader = _Reader(program, group, machine)
        ranks.append(reader.bodies())
        transfers |= reader.transfers
    return ranks, transfers


def _turns(group: GroupProgram) -> str:
    """The actions or slices that run interleaved on a rank, "" if there are none."""
    bodies = {id(block.body): block.body for block in group.blocks}.values()
    if any(line.stream for body in bodies for line in body.instructions):
        return "interleaved slices"
    return "the two actions of pairs" if any(is_part(body) for body in bodies) else ""


class _Reader:
    """Reads the blocks of one group."""

    def __init__(self, program: Program, group: GroupProgram, machine: Machine) -> None:
        self._group = group
        self._known: dict[int, Cost] = {}
        self._machine = machine
        self._num_ranks = program.num_ranks
        self.transfers: dict[tuple[int, str], Transfers] = {}

    def _cost(self, instruction: Instruction) -> Cost:
        found = self._known.get(id(instruction))
        if found is None:
            found = self._known[id(instruction)] = price(instruction, self._group, self._machine, self._num_ranks)
        return found

    def bodies(self) -> RankBodies:
        """The bodies of the group."""
        begin: tuple[Op, ...] = ()
        end: tuple[Op, ...] = ()
        actions: dict[tuple[int, str], tuple[Op, ...]] = {}
        for block in self._group.blocks:
            if block.label == "begin":
                begin = ops_of(block.body.instructions, self._cost)
            elif block.label == "end":
                end = ops_of(block.body.instructions, self._cost)
            elif block.label.endswith(".recv"):
                self._receives(block)
            elif not block.label.endswith(".sent"):
                key = _action(block)
                if key not in actions:
                    actions[key] = ops_of(block.body.instructions, self._cost)
                    self._sends(key, block.body.instructions)
        stages = sorted({stage for stage, _ in actions})
        numbered = {(stages.index(stage), variant): ops for (stage, variant), ops in actions.items()}
        return RankBodies(begin=begin, actions=numbered, end=end)

    def _receives(self, block: Block) -> None:
        if len(block.body.instructions) > 1:
            raise TwofoldError(
                f"{block.label!r} receives {len(block.body.instructions)} tensors; forecasts "
                f"support stages that send one: simulate the plan instead"
            )

    def _sends(self, key: tuple[int, str], instructions: Sequence[Instruction]) -> None:
        stage, variant = key
        for line in instructions:
            if line.kind is Kind.SEND:
                cost = self._cost(line)
                way = "F" if variant[0] == "F" else "B"
                self.transfers[stage, way] = Transfers(
                    work_ps=cost.together_ps, alone_ps=cost.work_ps, receive_dispatch_ps=cost.dispatch_ps,
                    wait_dispatch_ps=self._cost(_WAIT).dispatch_ps,
                )  # fmt: skip


_WAIT = Instruction(name="wait", kind=Kind.WAIT, call="wait", part="C")


def _action(block: Block) -> tuple[int, str]:
    """(stage, variant) of the body of a block: "3B.last" -> (3, "B.last")."""
    name = block.body.name
    number = len(name) - len(name.lstrip("0123456789"))
    return int(name[:number]), name[number:]


def is_boundary(token: str | None) -> bool:
    """Whether a token is that of a tensor from another stage."""
    return token is not None and token.endswith(".recv") and not token.endswith(":within.recv")


def channel_name(instruction: Instruction) -> str:
    """A channel without its ranks: its axes, and what sets it apart from others along them."""
    end = ":weights" if instruction.channel.endswith(":weights") else ""
    return ".".join(instruction.axes) + end


def channel_axes(name: str) -> tuple[str, ...]:
    """The axes of a channel by its name."""
    return tuple(name.removesuffix(":weights").split("."))


def ops_of(instructions: Sequence[Instruction], cost_of: CostOf) -> tuple[Op, ...]:
    """Instructions of a body as priced operations.

    Raises:
        TwofoldError: pieces that ranks of a stage send to each other.
    """
    found: list[Op] = []
    for line in instructions:
        cost = cost_of(line)
        if line.kind is Kind.COMPUTE:
            name = overlap_class(line.call)
            found.append(Op(COMPUTE, cost.dispatch_ps, cost.work_ps, name, energy_pJ=cost.energy_pJ))
        elif line.kind is Kind.WAIT:
            if is_boundary(line.waits):
                found.append(Op(ARRIVE, cost.dispatch_ps))
            else:
                found.append(Op(WAIT, cost.dispatch_ps, token=str(line.waits)))
        elif line.kind is Kind.COLLECTIVE:
            token = line.token or f"{line.name}.blocking"
            payload = Payload(line.call, line.message_bytes, itemsize(line.dtype), copies_of(line))
            call, channel = plain_call(line.call), channel_name(line)
            issue = Op(ISSUE, cost.dispatch_ps, cost.together_ps, call, channel, token, payload, alone_ps=cost.work_ps)
            found.append(issue)
            if line.token is None:
                found.append(Op(WAIT, 0, token=token))
        elif line.channel.endswith(":within"):
            raise TwofoldError(
                f"{line.name!r}: ranks of a stage send pieces to each other, which forecasts do not support; "
                "simulate the plan instead"
            )
        elif line.kind is Kind.SEND:
            found.append(Op(SEND, cost.dispatch_ps))
    return tuple(found)
