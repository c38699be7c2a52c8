"""Interleaved slices on two compute streams: what is ordered, what is not, and that nothing of it changes a value."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from executor.device import Device
from executor.step.emulate import EmulatedInterpreter, Emulation
from executor.step.interpreter import Interpreter
from executor.step.streams import Streams
from plans.errors import TwofoldError
from plans.lower import lower
from plans.optimizer import Optimizer
from plans.streams import stream_order
from tests.executor.step.races import StreamLog, races
from tests.plans.lower.test_interleave import SLICED, blocks_of_layers, tensor_parallel
from tests.support.random_plans import random_plan
from tests.support.small_training import batches, one_rank, parameters


def sliced_programs():
    """Random plans with as many slices as their batch can be cut into, lowered."""
    for seed in range(40):
        for count in (2, 3):
            with contextlib.suppress(TwofoldError):
                yield (
                    f"plan {seed}, {count} slices",
                    lower(msgspec.structs.replace(random_plan(seed), interleave=count)),
                )


def logged(group, order, **how):
    """What a device is told when the instructions of a group are issued in this order."""
    device = StreamLog()
    streams = Streams(order, device)
    streams.issue(device.ran, **how)
    return device.lines


def found(group, order, **how):
    return races(group, group.ranks[0], logged(group, order, **how))


def test_no_two_streams_use_memory_at_the_same_time():
    programs = dict(sliced_programs())
    assert len(programs) > 45
    for name, program in programs.items():
        for group in program.groups:
            order = stream_order(group)
            assert order is not None and order.count == 2, name
            assert found(group, order) == [], name
            assert found(group, order, one_by_one=True) == [], name


@pytest.mark.parametrize("name", SLICED)
def test_without_any_one_of_its_events_there_is_a_race(name):
    (group,) = lower(SLICED[name]).groups
    order = stream_order(group)
    assert found(group, order) == [] and order.waits
    for position, waits in order.waits.items():
        for missing in waits:
            fewer = {**order.waits, position: tuple(each for each in waits if each != missing)}
            assert found(group, replace(order, waits=fewer)), (position, missing)


def test_an_instruction_on_the_other_stream_without_new_events_races():
    (group,) = lower(SLICED["tensor"]).groups
    order = stream_order(group)
    moved = [at for at, (_, each) in enumerate(group.walk()) if each.stream == 1 and each.flops]
    assert len(moved) > 10
    for position in moved:
        streams = (*order.streams[:position], 0, *order.streams[position + 1 :])
        assert found(group, replace(order, streams=streams)), position


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_rank_issues_its_slices_on_two_streams_and_trains_as_on_one(micro_batches):
    plan = one_rank(optimizer=Optimizer(kind="adamw", settings={"lr": 0.1}), interleave=2,
                    num_micro_batches=micro_batches)  # fmt: skip
    program, device, losses = lower(plan), StreamLog(), []
    for each in (device, Device(kind="cpu")):
        rank = Interpreter(program, 0, each)
        rank.set_parameters(parameters())
        if each is device:
            rank.codes = tuple(
                replace(code, run=lambda code=code, at=at: (device.ran(at), code.run()))
                for at, code in enumerate(rank.codes)
            )
        losses.append([float(rank.step(batch)) for batch in batches(2)])
        assert (rank.stream_order is not None) == (each is device)
    assert losses[0] == losses[1]
    second = [at for at, line in enumerate(device.lines) if line[:2] == ("run", 0)][1]
    begin = max(at for at, line in enumerate(device.lines[:second]) if line[0] == "record")
    assert races(program.groups[0], 0, device.lines[begin:]) == []
    assert {line[2] for line in device.lines if line[0] == "run"} == {"main", "side 1"}


def test_a_step_that_fails_leaves_nothing_under_way_on_another_stream():
    (group,) = lower(SLICED["tensor"]).groups
    order, device = stream_order(group), StreamLog()
    last = max(at for at, stream in enumerate(order.streams) if stream == 1)

    def run(position):
        device.ran(position)
        if position == last:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        Streams(order, device).issue(run)
    assert device.current_stream() == "main"
    record, wait = device.lines[-2:]
    assert record[::2] == ("record", "side 1") and wait == ("wait", record[1], "main")


def test_no_stream_but_the_first_where_slices_follow_each_other_or_there_are_none():
    for more in ({}, {"interleave": 2, "interleave_order": "sequential"}):
        (group,) = lower(tensor_parallel(blocks_of_layers(), **more)).groups
        assert stream_order(group) is None


def test_emulation_of_two_streams_is_refused_with_the_way_out():
    plan = one_rank(optimizer=Optimizer(kind="sgd", settings={"lr": 0.1}), interleave=2)
    cost = SimpleNamespace(dispatch_ps=1, work_ps=1)
    for host_async in (True, False):
        emulation = Emulation(machine="some", dilate=1.0, cost_of=lambda *_: cost, host_async=host_async)
        refused = pytest.raises(TwofoldError, match="emulation has one") if host_async else contextlib.nullcontext()
        with refused:
            EmulatedInterpreter(lower(plan), 0, Device(kind="cpu"), emulation=emulation)
