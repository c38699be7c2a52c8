"""Programs that cannot be carried out are refused before anything is simulated."""

import pytest

from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower import lower
from plans.program import Block, Body, GroupProgram, Instruction, Kind, Program, Scope, Value
from simulator import check_program, simulate
from tests.support.handmade import Script, program_of
from tests.support.random_plans import random_plan
from tests.support.reports_example import small_program
from tests.support.small_machine import small_machine


def step(name: str, inputs: str = "", outputs: str = "", frees: str = "", **rest: object) -> Instruction:
    settings = {"kind": Kind.COMPUTE, "call": "relu.forward", "part": "F"} | rest
    return Instruction(name=name, inputs=(*inputs,), outputs=(*outputs,), frees=(*frees,), **settings)


def gather(name: str, inputs: str, outputs: str, token: str | None = "t") -> Instruction:
    return step(
        name, inputs, outputs, kind=Kind.COLLECTIVE, call="all_reduce", axes=("dp",), channel="c", token=token
    )  # fmt: skip


def wait(token: str = "t") -> Instruction:
    return step("wait", kind=Kind.WAIT, call="wait", waits=token)


def program(*lines: Instruction, num_micro_batches: int = 1) -> Program:
    """One block for every micro-batch; x is kept, s lives for a step, tokens are t and u."""
    values = {name: Value(name=name, shape=(4,)) for name in "abcde"}
    values["x"] = Value(name="x", shape=(4,), scope=Scope.KEPT, role="weight")
    values["s"] = Value(name="s", shape=(4,), scope=Scope.STEP)
    values |= {name: Value(name=name, shape=(), role="token") for name in "tu"}
    body = Body(name="0F", instructions=lines)
    blocks = tuple(Block(label=f"0F{micro}", micro_batch=micro, body=body) for micro in range(num_micro_batches))
    group = GroupProgram(mesh=Layout((2,), ("dp",)), values=values, blocks=blocks)
    return Program(groups=(group,), num_micro_batches=num_micro_batches)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([step("f", "a", "b")], "'0F0/f' of ranks (0, 1) reads 'a', which nothing writes"),
        ([step("f", "a", "b"), step("g", "x", "a")], "reads 'a', which '0F0/g' writes only later"),
        (
            [step("f", "c", "a"), step("g", "a", "b"), step("h", "b", "c")],
            "reads 'c', a cycle: '0F0/f' needs '0F0/h', '0F0/h' needs '0F0/g', '0F0/g' needs '0F0/f'",
        ),
        # of two ways round the shorter one is told
        (
            [step("f", "c", "ad"), step("g", "a", "b"), step("h", "bd", "c")],
            "a cycle: '0F0/f' needs '0F0/h', '0F0/h' needs '0F0/f'",
        ),
        ([step("f", "x", "a", "a"), step("g", "a", "b")], "of ranks (0, 1) reads 'a', which '0F0/f' has freed"),
        ([gather("f", "x", "a"), step("g", "a", "b"), wait()], "reads 'a' before the WAIT for 't', with which"),
        (
            [step("f", "x", "a"), gather("g", "a", "b"), step("h", "x", "a"), wait()],
            "writes 'a', which '0F0/g' uses until the WAIT for 't'",
        ),
        ([gather("f", "x", "a"), step("g", "x", "a"), wait()], "writes 'a', which '0F0/f' uses until"),
        ([step("f", "x", "z")], "'0F0/f' names 'z', which is not among the values"),
    ],
)  # fmt: skip
def test_values_that_are_not_there(lines, message):
    with pytest.raises(TwofoldError) as caught:
        simulate(program(*lines), small_machine(2))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "lines",
    [
        [gather("f", "x", "a"), wait(), step("g", "a", "b")],
        [gather("f", "x", "a", token=None), step("g", "a", "b")],
        [step("f", "x", "a"), gather("g", "a", "a", token=None), step("h", "a", "a")],
        [step("f", "x", "s"), step("g", "s", "s")],
        [step("f", "x", "a"), step("g", "a", "b", "a"), step("h", "x", "a")],
    ],
)
def test_runnable_programs_pass(lines):
    check_program(program(*lines))
    check_program(program(*lines, num_micro_batches=3))


def test_micro_batches_have_values_of_their_own():
    first = program(step("f", "x", "a")).groups[0]
    second = Body(name="0B", instructions=(step("g", "a", "b"),))
    blocks = (*first.blocks, Block(label="0B1", micro_batch=1, body=second))
    group = GroupProgram(mesh=first.mesh, values=first.values, blocks=blocks)
    with pytest.raises(TwofoldError, match=r"'0B1/g' of ranks .* reads 'a', which nothing writes"):
        check_program(Program(groups=(group,), num_micro_batches=2))


@pytest.mark.parametrize("block", range(5))
def test_whatever_is_lowered_passes(block):
    for seed in range(12 * block, 12 * (block + 1)):
        check_program(lower(random_plan(seed)))
    check_program(small_program())


def refused(scripts: list[Script]) -> str:
    with pytest.raises(TwofoldError) as caught:
        check_program(program_of(scripts))
    return str(caught.value)


def test_a_deadlock_is_found_without_times():
    scripts = [Script(0), Script(1), Script(2)]
    scripts[0].recv("back", [(1, 0)], ())
    scripts[0].send("forth", [(0, 1)], ())
    scripts[1].recv("forth", [(0, 1)], ())
    scripts[1].send("back", [(1, 0)], ())
    text = refused(scripts)
    assert "rank 0 waits in 'meet/back' for rank 1; rank 1 waits in 'meet/forth' for rank 0" in text


def test_a_send_without_a_receive_is_found_without_times():
    scripts = [Script(0), Script(1)]
    scripts[0].send("x", [(0, 1)], ())
    assert "rank 0 sends 1 times a step, but rank 1 receives 0 times" in refused(scripts)


def test_nothing_is_priced_or_simulated_before(monkeypatch):
    def never(*_: object, **__: object) -> None:
        raise AssertionError("simulated")

    monkeypatch.setattr("simulator.predict.run_program", never)
    monkeypatch.setattr("simulator.predict.ProgramPrices", never)
    with pytest.raises(TwofoldError, match="nothing writes"):
        simulate(program(step("f", "a", "b")), small_machine(2))
