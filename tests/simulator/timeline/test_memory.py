"""Memory against a replay instruction by instruction, byte by byte."""

import random
from collections import Counter

import numpy as np
import pytest

from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower import lower
from plans.program import BEGIN, END, Block, Body, GroupProgram, Instruction, Kind, Program, Scope, Value
from plans.schedules import make_schedule
from simulator import memory_peak, peak_of_order, run_program
from tests.support.handmade import Script, pipeline, program_of, written_price
from tests.support.random_plans import random_plan
from tests.support.reports_example import cost

ROLES = ["weight", "gradient", "optimizer", "activation", "input", "buffer"]


def group_of(values: list[Value], blocks: list[tuple[int, list[Instruction]]], ranks=(0,)) -> GroupProgram:
    return GroupProgram(
        mesh=Layout((len(ranks),), ("dp",), ranks),
        values={value.name: value for value in values},
        blocks=tuple(
            Block(label=f"b{number}", micro_batch=micro, body=Body(name="", instructions=tuple(instructions)))
            for number, (micro, instructions) in enumerate(blocks)
        ),
    )


def step(name: str, outputs=(), frees=(), work=10, **rest) -> Instruction:
    return Instruction(
        name=name, kind=Kind.COMPUTE, call="linear.forward", part="F", outputs=tuple(outputs), frees=tuple(frees),
        attrs={"price": (0, work)}, **rest,
    )  # fmt: skip


def value(name: str, size: int, **rest) -> Value:
    return Value(name=name, shape=(size,), dtype="uint8", **rest)


def replay(group: GroupProgram) -> tuple[int, dict[str, int]]:
    """The peak by holding, after every half-instruction, the storages that some live name refers to."""
    values = group.values

    def root(name: str) -> str:
        while values[name].shares is not None:
            name = values[name].shares
        return name

    def storage(name: str, micro: int) -> tuple[str, int]:
        base = root(name)
        return base, micro if values[base].scope is Scope.MICRO else 0

    kept = {(name, 0) for name, entry in values.items() if entry.scope is Scope.KEPT}
    names: set[tuple[str, int]] = set(kept)
    best, composition = -1, {}

    def measure():
        nonlocal best, composition
        live = {storage(name, micro) for name, micro in names} | kept
        sizes = Counter()
        for base, _ in live:
            sizes[values[base].role] += values[base].size_bytes
        if sum(sizes.values()) > best:
            best, composition = sum(sizes.values()), {role: size for role, size in sizes.items() if size}

    measure()
    for block, instruction in group.walk():
        micro = block.micro_batch
        key = {name: (name, micro if entry.scope is Scope.MICRO else 0) for name, entry in values.items()}
        names |= {key[name] for name in instruction.outputs}
        measure()
        names -= {key[name] for name in instruction.frees if values[name].scope is not Scope.KEPT}
    return best, composition


def random_group(seed: int) -> GroupProgram:
    draw = random.Random(seed)
    values: list[Value] = []
    for number in range(draw.randint(2, 12)):
        scope = draw.choice(list(Scope))
        bases = [entry.name for entry in values if entry.scope is scope]
        shares = draw.choice(bases) if bases and draw.random() < 0.3 else None
        values.append(value(f"v{number}", draw.randint(0, 50), scope=scope, role=draw.choice(ROLES), shares=shares))
    blocks, alive = [], set()
    for number in range(draw.randint(1, 12)):
        micro = draw.choice([BEGIN, 0, 1, 2, END])
        lines = []
        for line in range(draw.randint(1, 5)):
            outputs = draw.sample([entry.name for entry in values], draw.randint(0, 2))
            key = {entry.name: (entry.name, micro if entry.scope is Scope.MICRO else 0) for entry in values}
            alive |= {key[name] for name in outputs}
            mine = [entry.name for entry in values if key[entry.name] in alive and entry.scope is not Scope.KEPT]
            frees = draw.sample(mine, draw.randint(0, min(2, len(mine))))
            alive -= {key[name] for name in frees}
            lines.append(step(f"n{number}.{line}", outputs, frees, work=draw.choice([0, 7])))
        blocks.append((micro, lines))
    return group_of(values, blocks, ranks=(0, 1))


@pytest.mark.parametrize("block", range(4))
def test_peaks_and_their_composition_equal_a_replay(block):
    for seed in range(40 * block, 40 * block + 40):
        group = random_group(seed)
        peak = peak_of_order(group)
        assert (peak.peak_bytes, dict(peak.by_role)) == replay(group), seed


@pytest.mark.parametrize("host_async", [True, False])
def test_memory_in_time_equals_memory_in_order_without_asynchronous_communication(host_async):
    for seed in range(40):
        group = random_group(seed)
        program = Program(groups=(group,), num_micro_batches=1)
        timeline = run_program(program, written_price, num_steps=2, host_async=host_async)
        wanted = peak_of_order(group)
        assert [(peak.rank, peak.peak_bytes) for peak in timeline.memory] == [
            (0, wanted.peak_bytes),
            (1, wanted.peak_bytes),
        ]
        assert all(dict(peak.by_role) == dict(wanted.by_role) for peak in timeline.memory)
        times, live = timeline.memory_curve[1]
        assert live.max() == wanted.peak_bytes
        assert (times[1:] >= times[:-1]).all() and times[0] == timeline.step_start_ps[-1]


def test_what_an_asynchronous_send_frees_is_alive_until_it_is_over():
    sender, receiver = Script(0), Script(1)
    sender.send("x", [(0, 1)], (0, 100), "t")
    receiver.recv("x", [(0, 1)], (0, 100))
    values = {**sender.values, **{name: value(name, size) for name, size in [("sent", 10), ("next", 7)]}}
    (send,) = sender.blocks[0].body.instructions
    blocks = [
        (0, [step("a", ["sent"])]),
        (0, [Instruction(**{**_fields(send), "frees": ("sent",)})]),
        (0, [step("b", ["next"], ["next"], work=50), step("c", ["next"], work=500)]),
    ]
    group = group_of(list(values.values()), blocks)
    timeline = run_program(Program(groups=(group, receiver.group()), num_micro_batches=1), written_price)
    assert peak_of_order(group).peak_bytes == 10
    assert timeline.memory[0].peak_bytes == 17
    times, live = timeline.memory_curve[0]
    assert list(zip(times.tolist(), live.tolist(), strict=True)) == [
        (0, 0), (0, 10), (10, 17), (60, 10), (60, 17), (110, 7),
    ]  # fmt: skip


def _fields(instruction: Instruction) -> dict:
    return {name: getattr(instruction, name) for name in Instruction.__dataclass_fields__}


def test_a_wait_frees_values_of_the_micro_batch_it_waits_for():
    script = Script(0)
    script.send("x", [(0, 0)], (0, 5), "t")
    script.recv("x", [(0, 0)], (0, 5))
    (send,) = script.blocks[0].body.instructions
    (recv,) = script.blocks[1].body.instructions
    token = Value(name="t", shape=(), role="token")
    wait = Instruction(
        name="w", kind=Kind.WAIT, call="wait", part="C", waits="t", frees=("v",), attrs={"micro_batch": 3}
    )
    group = group_of([token, value("v", 8)], [(3, [step("a", ["v"]), send, recv]), (END, [wait, step("b", ["v"])])])
    assert peak_of_order(group).peak_bytes == 8
    timeline = run_program(Program(groups=(group,), num_micro_batches=1), written_price)
    assert timeline.memory[0].peak_bytes == 8


def test_weights_and_states_always_count():
    values = [
        value("w", 100, scope=Scope.KEPT, role="weight"),
        value("m", 200, scope=Scope.KEPT, role="optimizer"),
        value("v", 100, scope=Scope.KEPT, role="weight", shares="w"),
        value("x", 1),
    ]
    peak = peak_of_order(group_of(values, [(0, [step("a", ["x"], ["x"]), step("b", ["w", "m"])])]))
    assert (peak.peak_bytes, dict(peak.by_role)) == (301, {"activation": 1, "optimizer": 200, "weight": 100})


@pytest.mark.parametrize("lines", [[step("a", [], ["x"])], [step("a", ["x"], ["x"]), step("b", [], ["x"])]])
def test_freeing_what_is_not_alive_is_refused(lines):
    group = group_of([value("x", 1)], [(0, lines)])
    with pytest.raises(TwofoldError, match="frees 'x', which is not alive"):
        peak_of_order(group)


def test_memory_can_be_left_out():
    script = Script(0)
    script.compute("a", 1)
    assert run_program(program_of([script]), written_price, with_memory=False).memory == ()


@pytest.mark.parametrize("block", range(4))
def test_the_values_at_the_peak_add_up_to_it(block):
    for seed in range(5 * block, 5 * (block + 1)):
        program = lower(random_plan(seed))
        timeline = run_program(program, cost)
        for each in timeline.memory:
            peak = memory_peak(program, timeline, each.rank)
            assert (peak.total_bytes, peak.by_role) == (each.peak_bytes, dict(each.by_role))
            assert sum(peak.by_action.values()) == each.peak_bytes
            times, sizes = timeline.memory_curve[each.rank]
            at = int(np.argmax(sizes))
            assert peak.time_ps == times[at] - timeline.step_start_ps[-1] and sizes[at] == each.peak_bytes


def test_activations_are_named_by_their_action():
    """1F1B on 3 ranks: rank 0 holds the activations of three micro-batches when the first backward begins."""
    schedule = make_schedule("1f1b", 3, 6)
    program = pipeline(schedule.order, schedule.placement, {"F": 10, "B": 20}, size=7)
    timeline = run_program(program, written_price)
    assert memory_peak(program, timeline, 0).by_action == {"0F0": 7, "0F1": 7, "0F2": 7}
    assert memory_peak(program, timeline, 0).time_ps == 20
    assert memory_peak(program, timeline, 2).by_action == {"2F0": 7}
    with pytest.raises(TwofoldError, match="ranks are 0 to 2"):
        memory_peak(program, timeline, 3)
