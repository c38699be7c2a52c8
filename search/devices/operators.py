"""Costs of every operator of a block in the best configuration and in its neighbours.

Seconds are those of one step on the mean pipeline rank: of one block and micro-batch, times micro-batches, times blocks
per rank. A redistribution counts for the operator that causes it: gathers for the reader, reductions for the producer.
Its exposed part is the time by which the step would be shorter without it. Sums of gradients over micro-batches count,
although levels 2 and 3 may do without.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from plans.degrees import Degrees
from plans.degrees.words import layout_words
from plans.errors import TwofoldError
from plans.lower.symbolic import Cell
from plans.program import Kind
from search.devices.problem import Problem
from simulator.channels import PairRates
from simulator.estimate.action import measure
from simulator.estimate.chunks import Chunks
from simulator.estimate.estimate import rates_of
from simulator.estimate.pricing import cell_work, priced_cells
from simulator.lines import COLLECTIVE, COMPUTE, Line

__all__ = ["OperatorCost", "operator_costs"]

_PS_PER_S = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCost:
    """One operator in one layout.

    Args:
        operator: its name within a block.
        layout: the degrees that decide how it is split, in words.
        compute_s: forward and gradients.
        redistribution_s: collectives for it, each alone.
        exposed_s: the part of them that nothing hides.
        flops: of its products and scores, with what is recomputed.
        moved_bytes: that its kernels read and write.
        chosen: whether this is the layout of the best.
    """

    operator: str
    layout: str
    compute_s: float
    redistribution_s: float
    exposed_s: float
    flops: float
    moved_bytes: float
    chosen: bool

    @property
    def total_s(self) -> float:
        """The time that the operator adds to the step: compute, and exposed communication."""
        return self.compute_s + self.exposed_s

    @property
    def flops_per_s(self) -> float:
        """The rate of its products while it computes; 0 without any."""
        return self.flops / self.compute_s if self.flops else 0.0

    @property
    def flops_per_byte(self) -> float:
        """Arithmetic intensity; 0 without products."""
        return self.flops / self.moved_bytes if self.flops else 0.0


_AMOUNTS = ("compute_s", "redistribution_s", "exposed_s", "flops", "moved_bytes")


def operator_costs(problem: Problem, best: Degrees, others: Iterable[Degrees]) -> list[OperatorCost]:
    """Costs of the operators of a block, in the order of the model; of each the chosen layout first, then the cheapest.

    Args:
        problem: what is asked.
        best: the configuration chosen.
        others: configurations next to it; of those with one layout the first counts, what cannot be is left out.
    """
    columns: dict[str, dict[str, OperatorCost]] = {layout_words(best): _costs(problem, best, True)}
    for degrees in others:
        if layout_words(degrees) not in columns:
            try:
                columns[layout_words(degrees)] = _costs(problem, degrees, False)
            except TwofoldError:
                continue
    found = []
    for name in next(iter(columns.values())):
        mine = [own[name] for own in columns.values() if name in own]
        found += sorted(mine, key=lambda each: (not each.chosen, each.total_s, each.layout))
    return found


def _costs(problem: Problem, degrees: Degrees, chosen: bool) -> dict[str, OperatorCost]:
    """By operator; where some blocks recompute and others do not, the mean of all."""
    blocks, some = problem.config.num_layers, degrees.recompute_layers
    if some is None:
        return _alike(problem, degrees, layout_words(degrees), chosen)
    share = sum(min(some, count) for count in degrees.layers_of(blocks)) / blocks
    mixed: dict[str, OperatorCost] = {}
    for mode, weight in ((degrees.recompute, share), ("none", 1.0 - share)):
        every = replace(degrees, recompute=mode, recompute_layers=None)
        for name, operator_cost in _alike(problem, every, layout_words(degrees), chosen).items():
            before = mixed.get(name)
            sums = {
                key: weight * getattr(operator_cost, key) + (getattr(before, key) if before else 0.0)
                for key in _AMOUNTS
            }
            mixed[name] = replace(operator_cost, **sums)
    return mixed


def _alike(problem: Problem, degrees: Degrees, words: str, chosen: bool) -> dict[str, OperatorCost]:
    """The operators of a block, if all blocks are equal."""
    config, machine = problem.config, problem.machine
    rates = rates_of(machine, problem.stack)
    pieces = Chunks(
        config=config, degrees=degrees, machine=machine, stack=problem.stack, rates=rates, split_backward=False
    )
    bodies = degrees.num_micro_batches * config.num_layers / degrees.pp
    runs = bodies / _PS_PER_S
    block = pieces.template.pieces["block"]
    compute: dict[str, float] = {}
    moved: dict[str, float] = {}
    exposed: dict[str, float] = {}
    flops: dict[str, float] = {}
    touched: dict[str, float] = {}
    sums = (
        {parameter.name: optimizer_lines.sum_of(parameter) for parameter in block.parameters}
        if (optimizer_lines := pieces.optimizer_lines)
        else {}
    )
    for letter in "FB":
        part = block.parts[letter]
        cells = [
            (cell, [sums[cell.gradient]] if cell.gradient in sums else own)
            for cell, own in priced_cells(part, pieces.numbers, pieces.groups, machine, problem.stack)
        ]
        lines = [line for _, own in cells for line in own]
        asking = _owners([cell for cell, _ in cells])
        owners = [owner for owner, (_, own) in zip(asking, cells, strict=True) for _ in own]
        for owner, (cell, _) in zip(asking, cells, strict=True):
            for into, amount in zip((flops, touched), cell_work(cell, pieces.numbers), strict=True):
                into[owner] = into.get(owner, 0.0) + amount * bodies
        for owner, line in zip(owners, lines, strict=True):
            into = compute if line.kind == COMPUTE else moved
            into[owner] = into.get(owner, 0.0) + line.work_ps * runs
        for owner in {owner for owner, line in zip(owners, lines, strict=True) if line.kind == COLLECTIVE}:
            spared = _spared_ps(lines, owners, owner, rates)
            exposed[owner] = exposed.get(owner, 0.0) + spared * runs
    return {
        name: OperatorCost(
            operator=name, layout=words, compute_s=compute.get(name, 0.0),
            redistribution_s=moved.get(name, 0.0), exposed_s=exposed.get(name, 0.0),
            flops=flops[name], moved_bytes=touched[name], chosen=chosen,
        )
        for name in dict.fromkeys((*compute, *moved))
        if compute.get(name, 0.0) + moved.get(name, 0.0) > 0.0
    }  # fmt: skip


def _owners(cells: Sequence[Cell]) -> list[str]:
    """The operator for which each cell stands: its own; before it for gathers, behind it for sums and reductions."""
    names = [cell.operator.split(".", 2)[-1] if cell.operator else "" for cell in cells]
    before, after = "", ""
    behind, ahead = [], []
    for name in names:
        before = name or before
        behind.append(before)
    for name in reversed(names):
        after = name or after
        ahead.append(after)
    ahead.reverse()
    found = []
    for cell, name, previous, following in zip(cells, names, behind, ahead, strict=True):
        reads = cell.kind is Kind.COLLECTIVE and not cell.call.startswith(("reduce", "all_reduce"))
        found.append(name or (following or previous if reads else previous or following))
    return found


def _spared_ps(lines: Sequence[Line], owners: Sequence[str], owner: str, rates: PairRates | None) -> float:
    """By how much a body is shorter if the collectives of one operator take no time."""
    free = [
        line._replace(work_ps=0) if line.kind == COLLECTIVE and name == owner else line
        for name, line in zip(owners, lines, strict=True)
    ]
    return max(0.0, measure(lines, rates).work_ps - measure(free, rates).work_ps)
