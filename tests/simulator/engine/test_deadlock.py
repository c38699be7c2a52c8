"""Programs that cannot end are refused, and the message names the smallest culprit."""

import pytest

from plans.errors import TwofoldError
from plans.layout import Layout
from plans.program import Block, Body, GroupProgram, Instruction, Kind, Program
from simulator import run_program
from tests.support.handmade import Script, program_of, written_price


def message(scripts: list[Script], **settings) -> str:
    with pytest.raises(TwofoldError) as caught:
        run_program(program_of(scripts), written_price, **settings)
    return str(caught.value)


SETTINGS = [{}, {"host_async": False}, {"host_async": False, "cores_per_node": 2}, {"overlap": lambda *_: (1.0, 1.0)}]


@pytest.mark.parametrize("settings", SETTINGS)
def test_two_ranks_that_both_receive_first(settings):
    scripts = [Script(0), Script(1), Script(2)]
    scripts[2].compute("unrelated", 5)
    scripts[0].recv("back", [(1, 0)], (0, 1))
    scripts[0].send("forth", [(0, 1)], (0, 1))
    scripts[1].recv("forth", [(0, 1)], (0, 1))
    scripts[1].send("back", [(1, 0)], (0, 1))
    text = message(scripts, **settings)
    assert "rank 0 waits in 'meet/back' for rank 1" in text
    assert "rank 1 waits in 'meet/forth' for rank 0" in text
    assert "rank 2" not in text


def test_the_smallest_circle_is_named():
    scripts = [Script(rank) for rank in range(6)]
    # 0 -> 1 -> 2 -> 0 is a circle of three, 3 <-> 4 one of two, 5 waits for the larger one
    for rank, after in [(0, 1), (1, 2), (2, 0), (3, 4), (4, 3), (5, 0)]:
        scripts[rank].recv(f"x{after}{rank}", [(after, rank)], (0, 1))
    for rank, after in [(0, 1), (1, 2), (2, 0), (3, 4), (4, 3), (5, 0)]:
        scripts[after].send(f"x{after}{rank}", [(after, rank)], (0, 1))
    text = message(scripts)
    assert text.count("waits") == 2
    assert "rank 3 waits" in text and "rank 4 waits" in text


def test_collectives_in_another_order():
    scripts = [Script(0), Script(1)]
    scripts[0].collective("a", (0, 1), (0, 1), None, "one")
    scripts[0].collective("b", (0, 1), (0, 1), None, "two")
    scripts[1].collective("b", (0, 1), (0, 1), None, "two")
    scripts[1].collective("a", (0, 1), (0, 1), None, "one")
    text = message(scripts)
    assert "'meet/a' for rank 1" in text and "'meet/b' for rank 0" in text


def test_a_channel_that_holds_up_what_is_waited_for():
    scripts = [Script(0), Script(1)]
    for script, names in zip(scripts, ("ab", "ba"), strict=True):
        for name in names:
            script.collective(name, (0, 1), (0, 1), f"token {name}")
        script.wait("token b")
    text = message(scripts)
    assert "rank 0 waits in 'meet/b' (held up by 'meet/a' on the same channel) for rank 1" in text


def test_a_rank_that_waits_for_itself():
    script = Script(0)
    script.recv("x", [(0, 0)], (0, 1))
    script.send("x", [(0, 0)], (0, 1))
    assert "rank 0 waits in 'meet/x' for rank 0" in message([script])


def test_a_send_that_nobody_receives():
    scripts = [Script(0), Script(1)]
    scripts[0].send("x", [(0, 1)], (0, 1), "t")
    assert message(scripts) == (
        "'meet/x' has no partner: on channel 'x:channel' rank 0 sends 1 times a step, but rank 1 receives 0 times"
    )


def test_one_receive_too_many():
    scripts = [Script(0), Script(1)]
    scripts[0].send("x", [(0, 1)], (0, 1), "t")
    scripts[1].recv("x", [(0, 1)], (0, 1), "t")
    scripts[1].recv("x", [(0, 1)], (0, 1), "t")
    assert "rank 1 receives 2 times a step, but rank 0 sends 1 times" in message(scripts)


def test_a_member_that_never_comes():
    scripts = [Script(0), Script(1)]
    scripts[0].collective("c", (0, 1), (0, 1))
    text = message(scripts)
    assert "rank 0 would wait forever in 'meet/c' for rank 1" in text


@pytest.mark.parametrize("member", [1, 7])  # the first that is outside, and one far from it
def test_a_member_outside_the_program(member):
    script = Script(0)
    script.collective("c", (0, member), (0, 1))
    assert f"member {member}, but the program has 1 ranks" in message([script])


def test_a_transfer_to_a_rank_outside_the_program():
    script = Script(0)
    script.send("x", [(0, 7)], (0, 1))
    assert "from rank 0 to 7, but the program has 1 ranks" in message([script])


def test_a_collective_that_occurs_twice():
    scripts = [Script(0), Script(1)]
    for script in scripts:
        script.collective("c", (0, 1), (0, 1))
        script.collective("c", (0, 1), (0, 1))
    assert "occurs twice in a step of rank 0" in message(scripts)


def test_a_wait_before_its_token():
    script = Script(0)
    script.token("t")
    script.wait("t")
    assert "waits for token 't', which nothing before it in the step issues" in message([script])


def test_a_token_that_is_no_value():
    script = Script(0)
    script.wait("t")
    assert "names the token 't', which is not among the values" in message([script])


@pytest.mark.parametrize("ranks", [(0, 2), (0, 0), (1, 2)])
def test_ranks_must_be_counted_from_zero_each_once(ranks):
    body = Body(name="b", instructions=(Instruction(name="a", kind=Kind.COMPUTE, call="linear.forward", part="F"),))
    groups = tuple(
        GroupProgram(
            mesh=Layout((1,), ("x",), (rank,)), values={}, blocks=(Block(label="0F0", micro_batch=0, body=body),)
        )
        for rank in ranks
    )
    with pytest.raises(TwofoldError, match="they must be 0 to n-1"):
        run_program(Program(groups=groups, num_micro_batches=1), written_price)
