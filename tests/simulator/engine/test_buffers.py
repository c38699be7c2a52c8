"""Buffers of communication beside the values of a program, counted by hand."""

import numpy as np
import pytest

from plans.layout import Layout
from plans.lower import lower
from plans.program import Block, Body, GroupProgram, Instruction, Kind, Program, Value
from plans.redistribution import Piece, Step, StepKind, TransferPieces
from simulator import run_program, simulate
from simulator.timeline.buffers import buffers_of, peak_of_sum
from simulator.timeline.memory import with_buffers
from tests.support.random_plans import random_plan
from tests.support.reports_example import cost
from tests.support.small_machine import small_machine

MESH = Layout((4,), ("dp",))
BACKWARDS = Layout((4,), ("dp",), (3, 2, 1, 0))


def collective(call: str, before: tuple[int, ...], after: tuple[int, ...], mesh: Layout = MESH, **attrs: object):
    """The buffers of rank 0 in float32 elements: (in flight, at the end)."""
    values = {"x": Value(name="x", shape=before), "y": Value(name="y", shape=after)}
    instruction = Instruction(
        name="c", kind=Kind.COLLECTIVE, call=call, part="C", inputs=("x",), outputs=("y",), axes=("dp",), attrs=attrs
    )
    found = buffers_of(instruction, GroupProgram(mesh=mesh, values=values, blocks=()), 0)
    return found.in_flight_bytes / 4, found.joining_bytes / 4


def step(kind: StepKind, before: tuple, after: tuple, **dims: int) -> Step:
    return Step(kind=kind, axes=("dp",), before=MESH(*before), after=MESH(*after), **dims)


ROWS, COLUMNS, WHOLE = (("dp",), "None"), ("None", ("dp",)), ("None", "None")
GATHER_ROWS = step(StepKind.ALL_GATHER, ROWS, WHOLE, dim=0)
GATHER_COLUMNS = step(StepKind.ALL_GATHER, COLUMNS, WHOLE, dim=1)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (lambda: collective("all_reduce", (8, 8), (8, 8)), (0, 0)),
        # the first dim is where messages lie one behind the other
        (lambda: collective("all_gather", (2, 8), (8, 8), step=GATHER_ROWS), (0, 0)),
        (lambda: collective("all_gather", (8, 2), (8, 8), step=GATHER_COLUMNS), (0, 64)),
        # ... unless the members stand in another order than their ranks
        (
            lambda: collective("all_gather", (2, 8), (8, 8), BACKWARDS, step=GATHER_ROWS),
            (0, 64),
        ),
        # rows to columns: cut along the second dim (laid out again), joined along the first
        (
            lambda: collective(
                "all_to_all", (2, 8), (8, 2), step=step(StepKind.ALL_TO_ALL, ROWS, COLUMNS, dim=0, to_dim=1)
            ),
            (16, 0),
        ),
        (
            lambda: collective(
                "all_to_all", (8, 2), (2, 8), step=step(StepKind.ALL_TO_ALL, COLUMNS, ROWS, dim=1, to_dim=0)
            ),
            (0, 16),
        ),
        (lambda: collective("all_gather_flat", (4,), (4, 4)), (0, 0)),
        (lambda: collective("reduce_scatter_flat", (4, 4), (4,)), (0, 0)),
        (lambda: collective("reduce_scatter_flat", (3, 5), (4,)), (16, 0)),  # padded from 15
    ],
)  # fmt: skip
def test_buffers_of_collectives(found, expected):
    assert found() == expected


def transfer(kind: Kind, region: tuple[tuple[int, int], ...], *more: tuple[tuple[int, int], ...]) -> int:
    """Buffers of the one sender or receiver of an 8 x 8 tensor that rank 0 holds and rank 1 gets, in elements."""
    pieces = TransferPieces(Piece(src_rank=0, dst_rank=1, region=each) for each in (region, *more))
    one, other = (Layout((1,), ("a",), (rank,))("None", "None") for rank in (0, 1))
    instruction = Instruction(
        name="t", kind=kind, call="transfer", part="C", pieces=pieces, channel="x", transfer=(one, other, (8, 8))
    )
    group = GroupProgram(mesh=Layout((1,), ("a",), (0,)), values={}, blocks=())
    return buffers_of(instruction, group, 0 if kind is Kind.SEND else 1).in_flight_bytes // 4


def test_messages_that_are_one_whole_piece_are_not_copied():
    whole, left, right = ((0, 8), (0, 8)), ((0, 8), (0, 4)), ((0, 8), (4, 8))
    for kind in (Kind.SEND, Kind.RECV):
        assert transfer(kind, whole) == 0
        assert transfer(kind, left) == 32
        assert transfer(kind, left, right) == 64


def test_what_buffers_add_to_a_step_by_hand():
    """x of 10 floats is made (40 bytes), scattered over two ranks padded to 5 + 5: nothing; over four: 12 of 3."""
    peaks = {}
    for num_ranks, size in ((2, 5), (4, 3)):
        values = {"x": Value(name="x", shape=(10,)), "mine": Value(name="mine", shape=(size,))}
        make = Instruction(name="m", kind=Kind.COMPUTE, call="relu.forward", part="F", outputs=("x",))
        scatter = Instruction(
            name="s", kind=Kind.COLLECTIVE, call="reduce_scatter_flat", part="C", inputs=("x",), outputs=("mine",),
            frees=("x",), axes=("dp",), message_bytes=40, channel="g",
        )  # fmt: skip
        block = Block(label="0F0", micro_batch=0, body=Body(name="0F", instructions=(make, scatter)))
        group = GroupProgram(mesh=Layout((num_ranks,), ("dp",)), values=values, blocks=(block,))
        program = Program(groups=(group,), num_micro_batches=1)
        (peaks[num_ranks],) = {
            (each.peak_bytes, each.by_role.get("communication", 0))
            for each in simulate(program, small_machine(4)).memory
        }
    assert peaks == {2: (40 + 20, 0), 4: (40 + 12 + 48, 48)}


def test_the_peak_of_a_sum_is_that_of_every_moment():
    draw = np.random.default_rng(3)
    for _ in range(50):
        times = np.sort(draw.integers(0, 20, 12))
        sizes = draw.integers(0, 50, 12)
        spans = [
            (int(start), int(start + draw.integers(1, 6)), int(draw.integers(1, 30)))
            for start in draw.integers(0, 20, 5)
        ]
        changes = [change for start, end, size in spans for change in ((start, size), (end, -size))]
        # at a moment between whole times, and at one: everything that holds somewhere around it
        expected = 0
        for moment in np.arange(-0.5, 30, 0.5):
            near = [int(size) for time, size in zip(times, sizes, strict=True) if time == moment]
            before = [int(size) for time, size in zip(times, sizes, strict=True) if time < moment]
            values = max([*near, *(before[-1:] or [0])])
            beside = sum(size for start, end, size in spans if start <= moment <= end)
            expected = max(expected, values + beside)
        assert peak_of_sum(times, sizes, changes) == expected


def test_buffers_only_add_to_real_plans():
    added = 0
    for seed in range(8):
        program = lower(random_plan(seed))
        timeline = run_program(program, cost)
        peaks = with_buffers(timeline, program).memory
        for alone, peak in zip(timeline.memory, peaks, strict=True):
            more = peak.by_role.get("communication", 0)
            assert (peak.values_bytes, peak.peak_bytes) == (alone.peak_bytes, alone.peak_bytes + more)
            added += more
    assert added > 0
