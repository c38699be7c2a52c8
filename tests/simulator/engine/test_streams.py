"""Two compute streams in the engine: they share a device, and one computes while the other waits."""

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction

import msgspec
import numpy as np
import pytest

from costmodels import Machine
from costmodels.price.chip_share import chip_share
from costmodels.price.instruction import Cost
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower import lower
from plans.lower.lower import schedule_of
from plans.plan import Plan, Stage
from plans.program import Block, Body, GroupProgram, Instruction, Kind, Program, Value
from plans.streams import stream_order
from search import search
from simulator import simulate
from simulator.engine.order import Names, Order
from simulator.engine.run import run_program
from simulator.forecast.program import bodies_of_program
from simulator.timeline.critical_path import critical_path
from tests.plans.lower.test_interleave import SLICED, blocks_of_layers, tensor_parallel
from tests.support.random_plans import random_plan


def compute(name, stream, *, reads=(), writes=(), **rest):
    return Instruction(name=name, kind=Kind.COMPUTE, call="relu.forward", part="F", inputs=reads, outputs=writes,
                       stream=stream, **rest)  # fmt: skip


def program(*lines, values=()):
    block = Block(label="0F0", micro_batch=0, body=Body(name="0F", instructions=lines))
    known = {name: Value(name=name, shape=(), role="token" if name.startswith("token") else "activation")
             for name in values}  # fmt: skip
    group = GroupProgram(mesh=Layout((1,), ("dp",)), values=known, blocks=(block,))
    return Program(groups=(group,), num_micro_batches=1)


def ends(of, work, **options):
    """Name -> when it ends, in ps; no host times unless asked for."""
    timeline = run_program(of, lambda each, _: Cost(options.get("dispatch", {}).get(each.name, 0), work[each.name]),
                           **{key: value for key, value in options.items() if key != "dispatch"})  # fmt: skip
    return {span.id[4:]: span.end_ps for span in timeline.spans() if span.stream != "host"}


def test_two_streams_share_the_device_equally():
    both = program(compute("a", 0), compute("b", 1), compute("c", 1))
    # a and b at half the rate until a is done at 20, then b alone, then c
    assert ends(both, {"a": 10, "b": 25, "c": 5}) == {"a": 20, "b": 35, "c": 40}


def test_kernels_that_leave_the_device_partly_idle_gain_from_concurrency():
    both, work = program(compute("a", 0), compute("b", 1)), {"a": 12, "b": 12}
    shared = {share: ends(both, work, chip_share=lambda each, seconds, share=share: share) for share in (1, 0.75, 0.5)}
    assert shared == {1: {"a": 24, "b": 24}, 0.75: {"a": 18, "b": 18}, 0.5: {"a": 12, "b": 12}}
    with pytest.raises(TwofoldError, match="takes the share 2 of a device; shares are from 0 to 1"):
        ends(both, work, chip_share=lambda each, seconds: 2)


def product_of(rows, columns, depth=4096):
    """A linear layer with weights [columns, depth] on that many rows, in bfloat16."""
    shapes = ((rows, depth), (columns, depth), (rows, columns))
    return Instruction(name="fc", kind=Kind.COMPUTE, call="linear.forward", part="F", shapes=shapes, dtype="bfloat16")


def test_a_product_of_few_tiles_leaves_the_chip_to_others():
    machine = Machine.load("h200-x4")
    large = chip_share(machine, product_of(8192, 4096), 1.0)
    small = chip_share(machine, product_of(128, 128, depth=64), 1.0)  # too short to be cut into more parts
    assert large > 0.9 and small < 0.3
    start_s = machine.compute.kernel_s + machine.compute.tiled.start_s
    assert chip_share(machine, product_of(8192, 4096), 2 * start_s) == pytest.approx(large / 2, rel=1e-4)
    copy = replace(product_of(8, 8), call="relu.forward")
    assert chip_share(machine, copy, 1.0) == pytest.approx(1.0, abs=1e-5)
    assert chip_share(machine, copy, machine.compute.kernel_s / 2) == 0


def test_a_stream_waits_for_what_the_other_wrote():
    chain = program(compute("a", 0, writes=("x",)), compute("b", 0), compute("c", 1, reads=("x",)), values=("x",))
    assert ends(chain, {"a": 10, "b": 10, "c": 10}) == {"a": 10, "b": 30, "c": 30}


def reduced(slice_, stream, channel="tp"):
    """Compute, a reduction, a WAIT and compute of one slice."""
    token = f"token{slice_}"
    issue = Instruction(name=f"reduce{slice_}", kind=Kind.COLLECTIVE, call="all_reduce", part="C", axes=("dp",),
                        channel=channel, token=token, stream=stream)  # fmt: skip
    wait = Instruction(name=f"wait{slice_}", kind=Kind.WAIT, call="wait", part="C", waits=token, stream=stream)
    return compute(f"a{slice_}", stream), issue, wait, compute(f"b{slice_}", stream)


def test_one_slice_computes_while_the_other_waits_whatever_the_order():
    first, second = reduced(0, 0), reduced(1, 1)
    work = {"a0": 10, "reduce0": 30, "b0": 10, "a1": 10, "reduce1": 5, "b1": 10, "wait0": 0, "wait1": 0}
    # in turns on one stream, the second slice waits for the first one's reduction: a0 a1 . . b0 b1
    lines = (*first[:2], *second[:2], *first[2:], *second[2:])
    one = [replace(each, stream=0) for each in lines]
    tokens = ("token0", "token1")
    other_channel = [*reduced(1, 1, "other")]
    free = (*first[:2], *other_channel[:2], *first[2:], *other_channel[2:])
    # one stream: a0 10, a1 20, reduce0 10-40, b0 50, b1 60
    assert ends(program(*one, values=tokens), work)["b1"] == 60
    # two streams, one channel: a0 and a1 share until 20, reduce0 20-50, b0 60; reduce1 50-55, b1 shares from 55
    found = ends(program(*lines, values=tokens), work)
    assert (found["a0"], found["a1"], found["reduce0"], found["reduce1"]) == (20, 20, 50, 55)
    assert (found["b0"], found["b1"]) == (65, 70)
    # two channels: b1 runs while reduce0 is under way
    found = ends(program(*free, values=tokens), work)
    assert (found["reduce1"], found["b1"], found["reduce0"], found["b0"]) == (25, 35, 50, 60)


def test_an_instruction_does_not_begin_before_its_host_has_issued_it():
    both = program(compute("a", 0), compute("b", 1))
    assert ends(both, {"a": 10, "b": 10}, dispatch={"a": 3, "b": 30}) == {"a": 13, "b": 43}


def test_where_the_host_computes_there_are_no_streams():
    both = program(compute("a", 0), compute("b", 1))
    assert ends(both, {"a": 10, "b": 25}, host_async=False) == {"a": 10, "b": 35}


# -- a second engine, of one rank --------------------------------------------------------------------------------------


def plainly(group, work):
    """When a step ends, by moving all that runs ahead until the next thing is over: one rank of equal ones, no host.

    An independent oracle: rational numbers, no events, the order of streams by looking at it again each time.
    """
    order, walk = stream_order(group), [each for _, each in group.walk()]
    positions = Order(group, Names())
    slot_of = {position: slot for kind, position, slot in positions.segments if kind}
    queues = defaultdict(list)
    channels = defaultdict(list)
    for at, each in enumerate(walk):
        queues[order.streams[at]].append(at)
        if each.kind is Kind.COLLECTIVE:
            channels[each.channel].append(at)
    done, issued, over, left = set(), set(), {}, {at: Fraction(work(each)) for at, each in enumerate(walk)}
    current, now = {}, Fraction(0)  # slot -> what it stands for
    while any(queues.values()) or any(channels.values()):
        moved = True
        while moved:  # what takes no time
            moved = False
            for queue in queues.values():
                while queue and all(each in done for each in order.waits.get(queue[0], ())):
                    at, each = queue[0], walk[queue[0]]
                    if each.kind is Kind.COMPUTE and left[at]:
                        break
                    if each.kind is Kind.WAIT and current[slot_of[at]] not in over:
                        break
                    if each.kind is Kind.COLLECTIVE:
                        issued.add(at)
                        current[slot_of[at]] = at
                        if slot_of[at] < 0 and at not in over:
                            break
                    done.add(queue.pop(0))
                    moved = True
            for queue in channels.values():
                while queue and queue[0] in issued and not left[queue[0]]:
                    over[queue.pop(0)] = now
                    moved = True
        busy = [
            queue[0]
            for queue in queues.values()
            if queue and walk[queue[0]].kind is Kind.COMPUTE and all(e in done for e in order.waits.get(queue[0], ()))
        ]
        rates = {at: Fraction(1, len(busy)) for at in busy}
        rates |= {queue[0]: Fraction(1) for queue in channels.values() if queue and queue[0] in issued}
        if not rates:
            break
        step = min(left[at] / rate for at, rate in rates.items())
        now += step
        for at, rate in rates.items():
            left[at] -= rate * step
    assert not any(queues.values())
    return now


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", SLICED)
def test_the_engine_agrees_with_a_plain_one(name, seed):
    of = lower(SLICED[name])
    (group,) = of.groups
    draw = np.random.default_rng(seed)
    times = {}

    def work(each):
        if each.kind is Kind.WAIT:
            return 0
        return times.setdefault(each.name, int(draw.integers(0, 2)) * int(draw.integers(10**6, 10**9)))

    for _, each in group.walk():
        work(each)
    timeline = run_program(of, lambda each, _: Cost(0, work(each)))
    expected = plainly(group, work)
    assert timeline.step_end_ps[0] == pytest.approx(float(expected), abs=len(list(group.walk())))


def random_times(seed):
    draw, known = np.random.default_rng(seed), {}

    def cost_of(each, _):
        if each.name not in known:
            work = 0 if each.kind is Kind.WAIT else int(draw.integers(0, 10**7))
            known[each.name] = Cost(int(draw.integers(0, 10**6)), work)
        return known[each.name]

    return cost_of


@pytest.mark.parametrize("seed", [0, 2, 3, 4, 13, 16, 21, 29])
def test_random_sliced_programs_run_to_their_end_in_order(seed):
    of = lower(msgspec.structs.replace(random_plan(seed), interleave=2))
    timeline = run_program(of, random_times(seed), num_steps=2)
    path = critical_path(timeline, of)
    begin, end = timeline.window_ps
    assert path.step_ps == end - begin
    names = Names()
    for group in of.groups:
        order, streams = Order(group, names), stream_order(group)
        rank = group.ranks[0]
        spans = {span.id: span for span in timeline.spans() if span.rank == rank and span.stream == "compute"
                 and span.step == 1}  # fmt: skip
        last = {}
        for position, id_ in enumerate(order.ids):
            if id_ not in spans:
                continue
            before = [last.get(streams.streams[position]), *(spans.get(order.ids[at])
                      for at in streams.waits.get(position, ()))]  # fmt: skip
            assert all(each is None or each.end_ps <= spans[id_].start_ps for each in before)
            last[streams.streams[position]] = spans[id_]


@pytest.mark.parametrize("name", SLICED)
def test_the_critical_path_of_two_streams_has_no_gaps(name):
    of = lower(SLICED[name])
    timeline = run_program(of, random_times(3), num_steps=3)
    path = critical_path(timeline, of)
    assert "gap" not in path.by_kind_ps
    assert path.step_ps == timeline.window_ps[1] - timeline.window_ps[0]


@pytest.mark.parametrize("name", SLICED)
def test_folded_ranks_take_as_long(name):
    of = lower(SLICED[name])
    for slow in (None, {0: 1.5}):
        every = run_program(of, random_times(1), num_steps=2, slowdown=slow)
        folded = run_program(of, random_times(1), num_steps=2, slowdown=slow, fold_ranks=True)
        assert folded.step_end_ps == every.step_end_ps and len(folded.represents) < 4


# -- where it gains ----------------------------------------------------------------------------------------------------


def slow_links(factor):
    machine = Machine.load("h200-x4")
    links = tuple(msgspec.structs.replace(each, bandwidth_Bps=each.bandwidth_Bps / factor) for each in machine.links)
    return msgspec.structs.replace(machine, links=links, name="slow")


def one_device(graph, count):
    names = tuple(operator.name for operator in graph.operators)
    return Plan(graph=graph, stages=(Stage(mesh=Layout((1,), ("one",)), operators=names),), interleave=count)


def test_interleaving_gains_on_a_slow_link_and_loses_without_communication():
    graph, machine = blocks_of_layers(batch=8192, width=4096), slow_links(16)
    one, two = (simulate(tensor_parallel(graph, interleave=count), machine) for count in (1, 2))
    assert two.exposed_comm_s < 0.5 * one.exposed_comm_s and two.step_s < 0.95 * one.step_s
    one, two = (simulate(one_device(graph, count), machine) for count in (1, 2))
    assert two.step_s > one.step_s


@pytest.mark.parametrize(("num_devices", "expected"), [(4, 2), (1, 1)])
def test_the_search_interleaves_only_where_it_gains(num_devices, expected):
    graph = blocks_of_layers(batch=8192, width=4096)
    pinned = tensor_parallel(graph).strategies if num_devices == 4 else {}
    pinned = {name: msgspec.structs.replace(strategy, mesh=Layout((4,), ("tp",))) for name, strategy in pinned.items()}
    options = {"num_devices": num_devices, "pinned": pinned}
    found = search(graph, slow_links(16), interleave=None, **options)
    assert found.best.interleave == expected
    one = search(graph, slow_links(16), **options).best.prediction.step_s
    both = found.best.prediction.step_s
    assert both < 0.95 * one if expected == 2 else both == one


def test_a_forecast_of_two_streams_is_refused_with_the_way_out():
    plan = SLICED["tensor"]
    with pytest.raises(TwofoldError, match=r"slices alternate, but .* simulate the plan"):
        bodies_of_program(lower(plan), schedule_of(plan), Machine.load("h200-x4"))
