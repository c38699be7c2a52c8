"""Fuses runs of memory-bound instructions into one instruction, so that intermediate values are never written to
memory.

Memory-bound instructions of one block and one compute stream that share a tensor are moved next to each other where the
order of their reads and writes allows it, and become one "fused" instruction with the originals as its steps (attrs
"steps"). Values that only steps read are no longer values of the program (attrs "inner"). Cheap values, such as an
activation function or a cast of one tensor, are not kept for the backward: each run that reads them recomputes them
from kept values.

Nothing else is moved: products, communication and updates keep their order, and a run stays within a block of the
model, because symbolic lowering works block by block. This misses one fusion: the sum at the end of a block and the
norm at the start of the next read the same tensor, which costs one extra read, 0.1 % of a step of 8 layers of width
4096.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from plans.lower.emit import ValueTable
from plans.model.graph import Graph, Operator
from plans.operators.elementwise import UNARY
from plans.program import Instruction, Kind, Scope

__all__ = ["FUSIBLE", "MADE_AGAIN", "block_names", "fuse_runs", "fused_alone"]

_UNARY = (*UNARY, "cast")
_BINARY = ("add", "sub", "mul", "div")

FUSIBLE = frozenset({
    *(f"{kind}.{part}" for kind in _UNARY for part in ("forward", "grad0")),
    *(f"{kind}.forward" for kind in _BINARY),
    *(f"mul.grad{index}" for index in (0, 1)), *(f"div.grad{index}" for index in (0, 1)),
    "sum", "linear.grad2",
    *(f"rms_norm.{part}" for part in ("forward", "grad0", "grad1")),
    *(f"layer_norm.{part}" for part in ("forward", "grad0", "grad1", "grad2")),
    *(f"cross_entropy.{part}" for part in ("statistic", "forward", "grad0")),
})  # fmt: skip
"""Calls that may be steps of a run: bound by memory, they depend on nothing but their operands and write no other's."""

MADE_AGAIN = frozenset(f"{kind}.forward" for kind in _UNARY)
"""Calls whose result is recomputed rather than kept, where only runs read it and its operand takes no more bytes."""


def block_names(operators: Sequence[Operator]) -> dict[str, str]:
    """Operator -> the repeated block of the model that it is in, "" outside of them.

    >>> make = lambda module: Operator(name=module, kind="add", inputs=(), outputs=(), module=module)
    >>> block_names([make("layers.3.attention"), make("norm")])
    {'layers.3.attention': 'layers.3', 'norm': ''}
    """
    found = {}
    for operator in operators:
        parts = operator.module.split(".")
        number = next((at for at, part in enumerate(parts) if part.isdigit()), -1)
        found[operator.name] = ".".join(parts[: number + 1])
    return found


def fuse_runs(
    variants: Sequence[Sequence[Sequence[Instruction]]], table: ValueTable, blocks: Mapping[str, str], num_shared: int
) -> list[list[list[Instruction]]]:
    """The bodies of a chunk with their runs of memory-bound instructions fused.

    Args:
        variants: the bodies that follow each other for one micro-batch, for every kind of backward, without `frees`.
        table: of the values; those that no instruction names any more are taken out of it.
        blocks: see `block_names`.
        num_shared: how many bodies, from the first on, are the same in all variants.
    """
    before = {name for variant in variants for body in variant for name in _names(body)}
    found = [[_Runs.of(body, table, blocks) for body in variant] for variant in variants]
    _make_again(found, table, num_shared)
    made = []
    for number, variant in enumerate(found):
        lines = []
        for place, body in enumerate(variant):
            others = found if place < num_shared else found[number : number + 1]
            lines.append(body.fused(table, [each for other in others for each in other if each is not body]))
        made.append(lines)
    for name in before - {name for variant in made for body in variant for name in _names(body)}:
        del table.values[name]
    return made


def _names(body: Sequence[Instruction]) -> Iterator[str]:
    for line in body:
        yield from (*line.inputs, *line.outputs, *(each for each in (line.token, line.waits) if each))


def fused_alone(graph: Graph) -> dict[str, tuple[bool, bool]]:
    """Operator -> whether its memory-bound instructions join no others and so stay in place, in forward and backward.

    Others may join them if they share a tensor and a block, or in any block if runs compute a cheap value again; and so
    may the sum of the gradients of a tensor that several operators read.

    >>> from plans.model.mlp import mlp_graph
    >>> graph = mlp_graph([8, 4, 2], 16)
    >>> {operator.kind: fused_alone(graph)[operator.name] for operator in graph.operators}
    {'linear': (True, False), 'relu': (True, False), 'mse_loss': (True, True)}
    """
    blocks, around = block_names(graph.operators), dict[str, list[Operator]]()
    readers: dict[str, list[Operator]] = {}
    for operator in graph.operators:
        for name in dict.fromkeys((*operator.inputs, *operator.outputs)):
            around.setdefault(name, []).append(operator)
        for name in operator.inputs:
            readers.setdefault(name, []).append(operator)
    again = {
        operator.name for operator in graph.operators
        if operator.kind in _UNARY and all(_fusible(other, forward=True) for other in readers[operator.outputs[0]])
    }  # fmt: skip
    found = {}
    for operator in graph.operators:
        tensors = (*operator.inputs, *operator.outputs)
        near = [other for name in tensors for other in around[name] if other is not operator]
        beside = [other for other in near if blocks[other.name] == blocks[operator.name]]
        is_again = any(other.name in again for other in (operator, *near))
        is_summed = any(len(readers.get(name, ())) > 1 for name in tensors if graph.tensors[name].kind == "activation")
        joins = [is_again or any(_fusible(other, forward=forward) for other in beside) for forward in (True, False)]
        joins[1] |= is_summed
        forward, backward = (
            not (joined and _fusible(operator, forward=way)) for joined, way in zip(joins, (True, False), strict=True)
        )
        found[operator.name] = forward, backward
    return found


def _fusible(operator: Operator, *, forward: bool) -> bool:
    """Whether an operator has memory-bound instructions in the forward, or in the backward."""
    parts = [call.split(".")[1] for call in FUSIBLE if call.startswith(f"{operator.kind}.")]
    return any(forward != part.startswith("grad") for part in parts)


class _Run:
    """Steps that are together at the place `at` of a body.

    Attributes:
        key: shape, block and stream that its steps have in common.
        made: values that its steps write, in order.
        read: values that it reads from outside, in order.
    """

    __slots__ = ("at", "key", "made", "read", "steps")

    def __init__(self, at: int, key: tuple[object, ...], steps: Sequence[Instruction] = ()) -> None:
        self.at = at
        self.key = key
        self._begin(steps)

    def _begin(self, steps: Sequence[Instruction]) -> None:
        self.steps: list[Instruction] = []
        self.made: dict[str, None] = {}
        self.read: dict[str, None] = {}
        for step in steps:
            self.append(step)

    def append(self, step: Instruction) -> None:
        """Append a step."""
        self.steps.append(step)
        self.read.update(dict.fromkeys([name for name in step.inputs if name not in self.made]))
        self.made.update(dict.fromkeys(step.outputs))

    def with_first(self, step: Instruction) -> None:
        """Prepend a step."""
        self._begin([step, *self.steps])


@dataclass(slots=True, eq=False)
class _Runs:
    """A body, and the runs that its fusible instructions form: of one where nothing joins them.

    `read_alone` counts the readers, in no run, of every value.
    """

    body: Sequence[Instruction]
    runs: list[_Run] = field(default_factory=list)
    run_of: dict[str, _Run] = field(default_factory=dict)
    read_alone: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, body: Sequence[Instruction], table: ValueTable, blocks: Mapping[str, str]) -> _Runs:
        """Put every fusible instruction into the latest run of its shape that shares a tensor and can be joined."""
        found, block = cls(body), ""
        ready: dict[str, int] = {}
        readers: dict[str, list[str]] = {}
        for at, line in enumerate(body):
            block = blocks.get(line.operator, block) if line.operator else block
            if _is_fusible(line, table):
                first = table[line.inputs[0]]
                key = first.shape, block, line.stream
                run = next((run for run in reversed(found.runs) if run.key == key and _joins(
                    run, line, at, table, ready, readers)), None)  # fmt: skip
                if run is None:
                    run = _Run(at, key)
                    found.runs.append(run)
                run.append(line)
                found.run_of[line.name] = run
                ready.update(dict.fromkeys(run.made, run.at))
            else:
                arrived = line.inputs if line.kind is Kind.WAIT else ()
                ready.update(dict.fromkeys((*line.outputs, *arrived), at))
            for name in line.inputs:
                readers.setdefault(name, []).append(line.name)
        alone = (line for line in body if line.name not in found.run_of)
        found.read_alone.update(name for line in alone for name in dict.fromkeys(line.inputs))
        return found

    def reads(self) -> Counter[str]:
        """Values that its instructions and its runs read from outside: the number of readers of each."""
        found = self.read_alone.copy()
        for run in self.runs:
            found.update(list(run.read))
        return found

    def fused(self, table: ValueTable, others: Sequence[_Runs]) -> list[Instruction]:
        """The body with an instruction for each run; `others` are the bodies that may read what it makes."""
        read, here = set[str]().union(*(body.reads() for body in others)), self.reads()
        by_place = {run.at: run for run in self.runs}
        result = []
        for at, line in enumerate(self.body):
            if (run := by_place.get(at)) is not None:
                own = run.read
                elsewhere = {name for name in run.made if name in read or here[name] > (name in own)}
                result += self._instruction(run, table, elsewhere)
            elif line.name not in self.run_of:
                result.append(line)
        return result

    def _instruction(self, run: _Run, table: ValueTable, read: set[str]) -> list[Instruction]:
        """A run as one instruction; `read` are the values among those that it makes which others read."""
        steps, wanted = list[Instruction](), set(read)
        for step in reversed(run.steps):  # what nothing reads any more need not be made
            if any(name in wanted or not _is_droppable(name, table) for name in step.outputs):
                steps.insert(0, step)
                wanted.update(step.inputs)
        if len(steps) < 2:
            return steps
        kept = _Run(run.at, run.key, steps)
        outputs = tuple(name for name in kept.made if name in read or not _is_droppable(name, table))
        inputs, own = tuple(kept.read), next(step for step in steps if self.run_of.get(step.name) is run)
        inner = {name: table[name] for name in kept.made if name not in outputs}
        return [
            replace(
                own, name=f"{own.name}+{len(steps) - 1}", call="fused", inputs=inputs, outputs=outputs,
                shapes=tuple(table[name].shape for name in (*inputs, *outputs)), dtype=table[inputs[0]].dtype,
                flops=sum(step.flops for step in steps), attrs={"steps": tuple(steps), "inner": inner},
            )
        ]  # fmt: skip


def _is_fusible(line: Instruction, table: ValueTable) -> bool:
    lowered = bool(line.operator) or line.call == "sum"  # and not written by the optimizer
    alone = all(table[name].shares is None and table[name].scope is Scope.MICRO for name in line.outputs)
    return line.kind is Kind.COMPUTE and line.call in FUSIBLE and lowered and alone and bool(line.inputs)


def _is_droppable(name: str, table: ValueTable) -> bool:
    return table[name].role == "activation" and table[name].scope is Scope.MICRO


def _joins(
    run: _Run, line: Instruction, at: int, table: ValueTable, ready: Mapping[str, int],
    readers: Mapping[str, Sequence[str]],
) -> bool:  # fmt: skip
    """Whether a run can be moved after an instruction, or the instruction to the run."""
    made, read, shape = run.made, run.read, run.key[0]
    if not any((name in made or name in read) and table[name].shape == shape for name in line.inputs):
        return False
    mine = {step.name for step in run.steps}
    is_awaited = any(reader not in mine for name in made for reader in readers.get(name, ()))
    if not is_awaited and all(ready.get(name, -1) < run.at for name in read):  # written no more since
        run.at = at
        return True
    return all(name in made or ready.get(name, -1) < run.at for name in line.inputs)


def _make_again(found: Sequence[Sequence[_Runs]], table: ValueTable, num_shared: int) -> None:
    """Let runs recompute values that only they read, where recomputing is nearly free, starting with the last value."""
    for number, variant in enumerate(found):
        for place, body in reversed(list(enumerate(variant))):
            if place < num_shared and number:
                continue  # done with the first variant
            others = found if place < num_shared else found[number : number + 1]
            bodies = list(dict.fromkeys(each for other in others for each in other[place:]))
            for run in reversed(body.runs):
                for step in reversed(run.steps.copy()):
                    if step.call in MADE_AGAIN and body.run_of.get(step.name) is run:
                        _spread(step, [other[place].run_of[step.name] for other in others], bodies, table)


def _spread(step: Instruction, owners: Sequence[_Run], bodies: Sequence[_Runs], table: ValueTable) -> None:
    """Let the runs in `bodies` that read the result of a step of `owners` compute that step themselves."""
    (given,), (made,) = step.inputs, step.outputs
    if table[given].scope is not Scope.MICRO or table[given].span_bytes > table[made].span_bytes:
        return
    if not _is_droppable(made, table) or any(body.read_alone[made] for body in bodies):
        return
    for run in [run for body in bodies for run in body.runs if made in run.read]:
        assert run not in owners
        run.with_first(step)
