"""Refuses programs that cannot run, before anything is simulated, and names the first instruction at fault.

A value that a rank reads must have been written earlier in the step on that rank and not have been freed. The result of
a communication exists after a WAIT for its token; until then its input must not be written. Program order is itself a
dependency, so a program in which an instruction needs a later one, directly or indirectly, has a cycle. Every
communication must have its partners (`simulator.engine.matching`), and ranks must not deadlock
(`simulator.engine.deadlock`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from plans.errors import TwofoldError
from plans.program import Block, GroupProgram, Instruction, Kind, Program, Scope
from simulator.engine.deadlock import refuse_deadlock
from simulator.engine.matching import match
from simulator.engine.order import Names, Order

__all__ = ["check_program"]

_Key = tuple[str, int]


def check_program(program: Program, *, between_ranks: bool = True) -> None:
    """Check one step of a program.

    Args:
        program: to check.
        between_ranks: also check that communication has its partners and no rank waits forever, which takes a
            considerable part of a simulation's time; `run_program` refuses such programs as well, the latter at its
            end.

    Raises:
        TwofoldError: a value that is read before it is written, after it is freed or while communication brings it, one
            that is written while communication reads or writes it, a name that is not a value, communication without
            partner, ranks that wait for each other, a rank in no group or in two.

    >>> from plans.layout import Layout
    >>> from plans.program import Body, Value
    >>> line = Instruction(name="a", kind=Kind.COMPUTE, call="relu.forward", part="F", inputs=("x",), outputs=("y",))
    >>> block = Block(label="0F0", micro_batch=0, body=Body(name="0F", instructions=(line,)))
    >>> values = {name: Value(name=name, shape=(8,)) for name in "xy"}
    >>> group = GroupProgram(mesh=Layout((1,), ("dp",)), values=values, blocks=(block,))
    >>> check_program(Program(groups=(group,), num_micro_batches=1))
    Traceback (most recent call last):
        ...
    plans.errors.TwofoldError: '0F0/a' of ranks (0,) reads 'x', which nothing writes
    """
    for group in program.groups:
        _check_values(group)
    if not between_ranks:
        return
    names = Names()
    orders = [Order(group, names) for group in program.groups]
    refuse_deadlock(orders, match(orders))


def _check_values(group: GroupProgram) -> None:
    values = group.values
    under_way: dict[_Key, list[tuple[str, Instruction, int]]] = {}  # token -> communications that it stands for
    bringing: dict[_Key, _Key] = {}  # a value that communication under way writes -> its token
    sending: dict[_Key, dict[_Key, None]] = {}  # a value that it reads -> tokens
    written: set[_Key] = set()

    def key_of(name: str, micro_batch: int, block: Block, instruction: Instruction) -> _Key:
        if name not in values:
            raise TwofoldError(f"{_id(block, instruction)} names {name!r}, which is not among the values of its group")
        return name, micro_batch if values[name].scope is Scope.MICRO else 0

    for block, instruction in group.walk():
        micro_batch = block.micro_batch
        if instruction.kind is Kind.WAIT:
            micro_batch = instruction.attrs.get("micro_batch", micro_batch)
            if instruction.waits is not None:
                token = key_of(instruction.waits, micro_batch, block, instruction)
                for _, comm, at in under_way.pop(token, ()):
                    for name in comm.outputs:
                        key = (name, at if values[name].scope is Scope.MICRO else 0)
                        bringing.pop(key, None)
                    for name in comm.inputs:
                        sending.get((name, at if values[name].scope is Scope.MICRO else 0), {}).pop(token, None)
        for name in instruction.inputs:
            key = key_of(name, micro_batch, block, instruction)
            if key in bringing:
                raise _refused(
                    group, block, instruction,
                    f"reads {name!r} before the WAIT for {bringing[key][0]!r}, with which it comes",
                )  # fmt: skip
            if key not in written and values[name].scope is not Scope.KEPT:
                raise _refused(group, block, instruction, f"reads {name!r}, {_why(group, key, block, instruction)}")
        for name in instruction.outputs:
            key = key_of(name, micro_batch, block, instruction)
            if key in bringing or sending.get(key):
                token = bringing.get(key) or next(iter(sending[key]))
                issuer = under_way[token][0][0]
                raise _refused(
                    group, block, instruction, f"writes {name!r}, which {issuer} uses until the WAIT for {token[0]!r}"
                )
            written.add(key)
        if instruction.token is not None:
            token = key_of(instruction.token, micro_batch, block, instruction)
            under_way.setdefault(token, []).append((_id(block, instruction), instruction, micro_batch))
            for name in instruction.outputs:
                bringing[key_of(name, micro_batch, block, instruction)] = token
            for name in instruction.inputs:
                sending.setdefault(key_of(name, micro_batch, block, instruction), {})[token] = None
        for name in instruction.frees:
            key = key_of(name, micro_batch, block, instruction)
            if values[name].scope is not Scope.KEPT:
                written.discard(key)


def _id(block: Block, instruction: Instruction) -> str:
    return f"'{block.label}/{instruction.name}'"


def _refused(group: GroupProgram, block: Block, instruction: Instruction, what: str) -> TwofoldError:
    ranks = f"{group.ranks}" if len(group.ranks) <= 4 else f"{group.ranks[0]} and {len(group.ranks) - 1} more"
    return TwofoldError(f"{_id(block, instruction)} of ranks {ranks} {what}")


def _why(group: GroupProgram, key: _Key, block: Block, instruction: Instruction) -> str:
    """Where the value is written instead, for the message."""
    steps = list(group.walk())
    here = next(at for at, (own, each) in enumerate(steps) if own is block and each is instruction)
    writers = [at for at, (own, each) in enumerate(steps) if _writes(group, own, each, key)]
    before = [at for at in writers if at < here]
    if before:
        freeing = [
            _id(own, step)
            for own, step in steps[before[-1] : here]
            if any(_key(group, own, step, name) == key for name in step.frees)
        ]
        return f"which {freeing[-1]} has freed" if freeing else "which is gone"
    if not writers:
        return "which nothing writes"
    circle = _circle(group, steps, here, writers[0])
    if circle:
        return f"a cycle: {', '.join(circle)}"
    return f"which {_id(*steps[writers[0]])} writes only later"


def _circle(group: GroupProgram, steps: Sequence[tuple[Block, Instruction]], here: int, writer: int) -> list[str]:
    """The shortest chain through which the later writer depends on what `here` writes; empty if there is none."""
    makers: dict[_Key, int] = {}
    for at, (block, instruction) in enumerate(steps):
        for name in instruction.outputs:
            makers.setdefault(_key(group, block, instruction, name), at)
    before: dict[int, int] = {writer: -1}
    front = [writer]
    while front:
        following: list[int] = []
        for at in front:
            block, instruction = steps[at]
            for name in instruction.inputs:
                maker = makers.get(_key(group, block, instruction, name), -1)
                if maker < 0 or maker in before:
                    continue
                before[maker] = at
                if maker == here:
                    way = [here]
                    while before[way[-1]] >= 0:
                        way.append(before[way[-1]])
                    named = [_id(*steps[each]) for each in way[::-1]]  # the writer first, `here` last
                    return [f"{_id(*steps[here])} needs {named[0]}"] + [
                        f"{one} needs {other}" for one, other in pairwise(named)
                    ]
                following.append(maker)
        front = following
    return []


def _key(group: GroupProgram, block: Block, instruction: Instruction, name: str) -> _Key:
    micro_batch = block.micro_batch
    if instruction.kind is Kind.WAIT:
        micro_batch = instruction.attrs.get("micro_batch", micro_batch)
    return name, micro_batch if group.values[name].scope is Scope.MICRO else 0


def _writes(group: GroupProgram, block: Block, instruction: Instruction, key: _Key) -> bool:
    return any(_key(group, block, instruction, name) == key for name in instruction.outputs)
