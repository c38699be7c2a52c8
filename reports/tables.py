"""Small tables, as text for the terminal and as HTML: the plan, its parameters, the verification, where time goes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest

import numpy as np

from plans.layout import Layout
from plans.lower import lower
from plans.plan import Plan
from plans.program import GroupProgram, Instruction, Kind, Program, Scope
from plans.timeline import PS_PER_S, Timeline
from reports.spans import read_label
from reports.units import format_bytes, format_seconds
from simulator import composition

__all__ = [
    "Check",
    "Table",
    "comparison_table",
    "composition_table",
    "format_axes",
    "format_ranks",
    "parameter_table",
    "plan_table",
    "timeline_table",
    "verification_table",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A title, column names and rows of texts; columns in `right` are set flush right, `notes` stand below.

    >>> print(Table(title="T", columns=("name", "n"), rows=(("a", "1"), ("bb", "10")), right=frozenset({"n"})).text())
    T
    name   n
    ----  --
    a      1
    bb    10
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def text(self, width: int | None = None) -> str:
        """Aligned columns; where they are wider than `width` characters the widest ones are broken into lines."""
        widths = [max(len(row[at]) for row in [self.columns, *self.rows]) for at in range(len(self.columns))]
        while width is not None and sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > 12:
            widths[widths.index(max(widths))] -= 1

        def lines(row: Sequence[str]) -> list[str]:
            cells = [textwrap.wrap(cell, size) or [""] for cell, size in zip(row, widths, strict=True)]
            shown = []
            for parts in zip_longest(*cells, fillvalue=""):
                placed = zip(parts, widths, self.columns, strict=True)
                shown.append("  ".join(part.rjust(size) if name in self.right else part.ljust(size) for part, size, name in placed).rstrip())  # fmt: skip
            return shown

        rule = "  ".join("-" * size for size in widths)
        body = [line for row in self.rows for line in lines(row)]
        return "\n".join([self.title, *lines(self.columns), rule, *body, *self.notes])

    def html(self, max_rows: int | None = None) -> str:
        """A table element; rows beyond `max_rows` are left out, and a note says so."""
        kept = self.rows if max_rows is None else self.rows[:max_rows]
        notes = list(self.notes)
        if len(kept) < len(self.rows):
            notes.append(f"{len(self.rows) - len(kept)} of {len(self.rows)} rows are left out here.")
        flush = [' class="number"' if name in self.right else "" for name in self.columns]
        head = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(self.columns, flush, strict=True))
        body = "".join(
            "<tr>" + "".join(_cell(cell, kind) for cell, kind in zip(row, flush, strict=True)) + "</tr>" for row in kept
        )
        below = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
        caption = f"<caption>{escape(self.title)}</caption>"
        return f'<div class="scroll"><table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{below}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One number of a verification and what it must keep to.

    Args:
        name: what is compared.
        value: the number found; True or False where there is nothing to count.
        low, high: what it must lie within; None is no bound. True and False need no bounds.
        unit: behind the number; "s" and "B" are scaled, "" is none.
        detail: where to look, how it was found.
    """

    name: str
    value: float | bool
    low: float | None = None
    high: float | None = None
    unit: str = ""
    detail: str = ""

    @property
    def passed(self) -> bool:
        """Whether it holds; a number that is not finite never does.

        >>> Check(name="loss", value=3e-7, high=2e-6).passed, Check(name="loss", value=float("nan"), high=1.0).passed
        (True, False)
        """
        if isinstance(self.value, bool):
            return self.value
        return bool(
            np.isfinite(self.value)
            and (self.low is None or self.value >= self.low)
            and (self.high is None or self.value <= self.high)
        )


def verification_table(checks: Iterable[Check]) -> Table:
    """Every check with its limit and whether it passed."""
    rows = []
    for check in checks:
        bounds = (check.low, check.high)
        if isinstance(check.value, bool) or bounds == (None, None):
            limit = ""
        elif check.low is None:
            limit = f"at most {_number(check.high, check.unit)}"
        elif check.high is None:
            limit = f"at least {_number(check.low, check.unit)}"
        else:
            limit = f"{_number(check.low, check.unit)} to {_number(check.high, check.unit)}"
        value = ("yes" if check.value else "no") if isinstance(check.value, bool) else _number(check.value, check.unit)
        rows.append((check.name, value, limit, "pass" if check.passed else "FAIL", check.detail))
    return Table(
        title="Verification", columns=("check", "value", "limit", "result", "detail"), rows=tuple(rows),
        right=frozenset({"value"}),
    )  # fmt: skip


# ------------------------------------------------------------------------------------ plan


def plan_table(plan: Plan) -> Table:
    """Per operator its stage, ranks, mesh, strategy (dims -> axes), layouts and communication per micro-batch.

    Raises:
        TwofoldError: the plan cannot be lowered.
    """
    micro, stage_of, moved = plan.micro_graph, plan.stage_of(), _communication(lower(plan))
    rows = []
    for operator in micro.operators:
        stage, strategy = plan.stages[stage_of[operator.name]], plan.strategy(operator)
        mesh, spec = strategy.mesh or stage.mesh, micro.spec(operator)
        rows.append(
            (
                str(stage_of[operator.name]),
                format_ranks(stage.mesh.rank_list),
                _mesh(mesh),
                operator.name + (" (recomputed)" if operator.name in plan.recompute else ""),
                ", ".join(f"{dim}→{format_axes(axes)}" for dim, axes in strategy.dims.items() if axes) or "whole",
                " ".join(f"{spec.input_layout(at, mesh, strategy.dims)}" for at in range(len(operator.inputs))),
                " ".join(f"{spec.output_layout(at, mesh, strategy.dims)}" for at in range(len(operator.outputs))),
                "; ".join(sorted(moved.get(operator.name, ()), key=lambda text: text[0] != "F")) or "none",
            )
        )
    sizes = f"{plan.num_micro_batches} micro-batches of {micro.batch_size}, schedule {plan.schedule}"
    optimizer = f"{plan.optimizer.kind}, optimizer parallel level {plan.optimizer.parallel_level}"
    return Table(
        title=f"Plan of {plan.graph.name!r} on {plan.num_ranks} ranks: {sizes}, {optimizer}",
        columns=(
            "stage",
            "ranks",
            "mesh",
            "operator",
            "strategy",
            "layouts in",
            "layouts out",
            "communication per micro-batch",
        ),
        rows=tuple(rows),
        notes=("F: forward, B: backward; bytes are of one rank and one collective.",),
    )


def parameter_table(plan: Plan) -> Table:
    """Per parameter where it lives, how its optimizer is cut, and its communication once a step.

    Raises:
        TwofoldError: the plan cannot be lowered.
    """
    rows = []
    for group in lower(plan).groups:
        per_step = _per_step(group)
        for home in group.parameters:
            local = group.values[home.weight]
            named = {home.weight, home.shard, f"g:{home.name}", f"g:{home.name}#shard"}
            rows.append(
                (
                    home.name,
                    "×".join(map(str, home.shape)),
                    format_ranks(group.ranks),
                    f"{home.layout}",
                    format_bytes(local.span_bytes),
                    f"cut over {format_axes(home.shard_axes)}" if home.shard else "whole",
                    "; ".join(text for text, touched in per_step if touched & named) or "none",
                )
            )
    return Table(
        title="Parameters",
        columns=("parameter", "shape", "ranks", "layout", "local weight", "optimizer", "communication per step"),
        rows=tuple(rows), right=frozenset({"local weight"}),
    )  # fmt: skip


def format_axes(axes: Sequence[str]) -> str:
    """Axes as one word: "tp" or "(dp, tp)"."""
    return axes[0] if len(axes) == 1 else f"({', '.join(axes)})"


def format_ranks(ranks: Iterable[int]) -> str:
    """Ranks with runs joined.

    >>> format_ranks([0, 1, 2, 3, 6])
    '0-3, 6'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _mesh(mesh: Layout) -> str:
    return " ".join(f"{axis}={size}" for axis, size in zip(mesh.alias_name, mesh.device_matrix, strict=True))


def _describe(instruction: Instruction) -> str:
    call = {Kind.SEND: "send", Kind.RECV: "receive"}.get(instruction.kind, instruction.call.removesuffix("_flat"))
    over = f" over {format_axes(instruction.axes)}" if instruction.axes else ""
    return f"{call}{over} {format_bytes(instruction.message_bytes)}"


def _communication(program: Program) -> Mapping[str, list[str]]:
    """operator -> what it causes for one micro-batch: of the operator that reads what arrives, else of the one that made it."""
    found: dict[str, list[str]] = {}
    last = program.num_micro_batches - 1
    for group in program.groups:
        reader, maker = _neighbours(group)
        for block, instruction in group.walk():
            label = read_label(block.label)
            wanted = (
                last if label.action == "F" else 0
            )  # the other bodies of the first and last differ by work per step
            if instruction.kind not in (Kind.COLLECTIVE, Kind.SEND, Kind.RECV) or label.micro_batch != wanted:
                continue
            if any(group.values[name].scope is not Scope.MICRO for name in instruction.outputs):
                continue
            owner = next((reader[name] for name in instruction.outputs if name in reader), "")
            owner = owner or next((maker[name] for name in instruction.inputs if name in maker), "")
            found.setdefault(owner, []).append(f"{'F' if label.action == 'F' else 'B'}: {_describe(instruction)}")
    return found


def _neighbours(group: GroupProgram) -> tuple[dict[str, str], dict[str, str]]:
    """value -> the first operator that reads it, value -> the operator that made it; both through moves and sums."""
    reader: dict[str, str] = {}
    maker: dict[str, str] = {}
    instructions = list({id(block.body): block.body for block in group.blocks}.values())
    flat = [instruction for body in instructions for instruction in body.instructions]
    for instruction in flat:
        if instruction.kind is Kind.COMPUTE and instruction.operator and instruction.call != "slice":
            for name in instruction.inputs:
                reader.setdefault(name, instruction.operator)
            for name in instruction.outputs:
                maker.setdefault(name, instruction.operator)
    for _ in range(4):  # moves follow one another at most a few times
        for instruction in flat:
            for name in instruction.inputs:
                if name not in reader and (
                    owner := next((reader[each] for each in instruction.outputs if each in reader), "")
                ):
                    reader[name] = owner
            for name in instruction.outputs:
                if name not in maker and (
                    owner := next((maker[each] for each in instruction.inputs if each in maker), "")
                ):
                    maker[name] = owner
    return reader, maker


def _per_step(group: GroupProgram) -> list[tuple[str, set[str]]]:
    """What a group moves once a step, with the values each one touches."""
    return [
        (_describe(instruction), {*instruction.inputs, *instruction.outputs})
        for _, instruction in group.walk()
        if instruction.kind is Kind.COLLECTIVE
        and any(group.values[name].scope is not Scope.MICRO for name in instruction.outputs)
    ]


# ------------------------------------------------------------------------------------ time


def timeline_table(timelines: Sequence[Timeline]) -> Table:
    """Step time, pace, bubble, exposed communication and peak memory, a column per timeline.

    With a prediction first, the difference of the second one is given in per cent.
    """
    quantities = (
        ("step time", [each.step_s for each in timelines], format_seconds),
        ("from step to step (median)", [each.step_interval_s for each in timelines], format_seconds),
        ("bubble", [each.bubble_fraction for each in timelines], _percent),
        ("exposed communication", [each.exposed_comm_s for each in timelines], format_seconds),
        ("peak memory of a rank", [each.peak_bytes or None for each in timelines], format_bytes),
    )
    compared = len(timelines) == 2
    rows = []
    for name, values, form in quantities:
        cells = ["not known" if value is None else form(value) for value in values]
        if compared:
            first, second = values
            cells.append("" if not first or second is None else _percent(second / first - 1, sign=True))
        rows.append((name, *cells))
    if any(each.low_s is not None for each in timelines):
        spans = [
            ""
            if each.low_s is None or each.high_s is None
            else f"{format_seconds(each.low_s)} to {format_seconds(each.high_s)}"
            for each in timelines
        ]
        rows.insert(1, ("90 % interval of the step", *spans, *([""] if compared else [])))
    columns = ("quantity", *(each.kind for each in timelines), *(["difference"] if compared else []))
    if len(set(columns)) < len(columns):  # two timelines of one kind
        columns = ("quantity", *(f"{each.kind} {number}" for number, each in enumerate(timelines, 1)), *columns[1 + len(timelines) :])  # fmt: skip
    return Table(title="Step", columns=columns, rows=tuple(rows), right=frozenset(columns[1:]))


def composition_table(timeline: Timeline) -> Table:
    """Where the last step's time goes on every rank; the columns add up to the step (see `simulator.composition`)."""
    parts = composition(timeline)
    calls = sorted({call for part in parts for call in part.exposed_ps})
    rows = []
    for part in parts:
        cells = [
            part.step_ps,
            part.compute_ps,
            *(part.exposed_ps.get(call, 0) for call in calls),
            part.host_ps,
            part.bubble_ps,
        ]
        rows.append((str(part.rank), *(format_seconds(cell / PS_PER_S) for cell in cells)))
    if parts:
        step = max(1, sum(part.step_ps for part in parts))
        sums = [sum(part.compute_ps for part in parts)]
        sums += [sum(part.exposed_ps.get(call, 0) for part in parts) for call in calls]
        sums += [sum(part.host_ps for part in parts), sum(part.bubble_ps for part in parts)]
        rows.append(("share", _percent(1.0), *(_percent(total / step) for total in sums)))
    columns = ("rank", "step", "compute", *(f"exposed {call.removesuffix('_flat')}" + (" (flat)" if call.endswith("_flat") else "") for call in calls), "host", "bubble")  # fmt: skip
    return Table(
        title=f"Where the last step goes ({timeline.kind})",
        columns=columns,
        rows=tuple(rows),
        right=frozenset(columns[1:]),
    )


def comparison_table(predicted: Timeline, measured: Timeline) -> Table:
    """Per call the time that a rank spends in it in a step (mean over ranks and steps), predicted and measured.

    Communication counts from its start on a rank to its end there, waiting for others included, so on a run it may be
    longer than its price although the step is not.
    """
    first, second = _time_by_call(predicted), _time_by_call(measured)
    rows = []
    for call in sorted({*first, *second}, key=lambda call: -max(first.get(call, 0.0), second.get(call, 0.0))):
        a, b = first.get(call), second.get(call)
        cells = ["none" if value is None else format_seconds(value) for value in (a, b)]
        rows.append((call, *cells, "" if a is None or b is None or not a else _percent(b / a - 1, sign=True)))
    columns = (
        "call",
        predicted.kind,
        measured.kind if measured.kind != predicted.kind else f"{measured.kind} 2",
        "difference",
    )
    return Table(title="Time per call, rank and step", columns=columns, rows=tuple(rows), right=frozenset(columns[1:]))


def _time_by_call(timeline: Timeline) -> dict[str, float]:
    """call -> seconds per rank and step on its streams, waits and issuing left out; the first of several steps too."""
    steps = np.unique(timeline.step)
    steps = steps[1:] if len(steps) > 2 else steps
    used = np.isin(timeline.step, steps) & (timeline.stream != 0)
    total = np.bincount(
        timeline.name_index[used],
        weights=(timeline.end_ps[used] - timeline.start_ps[used]).astype(float),
        minlength=len(timeline.names),
    )
    result: dict[str, float] = {}
    for (_, call, _), time_ps in zip(timeline.names, total, strict=True):
        if call != "wait" and time_ps:
            result[call] = result.get(call, 0.0) + time_ps / PS_PER_S / timeline.num_ranks / max(1, len(steps))
    return result


def _percent(fraction: float, sign: bool = False) -> str:
    return f"{100 * fraction:+.1f} %" if sign else f"{100 * fraction:.1f} %"


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if unit in ("s", "B"):
        return (format_seconds if unit == "s" else format_bytes)(value)
    return f"{value:.3g}{' ' if unit else ''}{unit}"


def _cell(cell: str, kind: str) -> str:
    mark = {"pass": ' class="pass"', "FAIL": ' class="fail"'}.get(cell, kind)
    return f"<td{mark}>{escape(cell)}</td>"
