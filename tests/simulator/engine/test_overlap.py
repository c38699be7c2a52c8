"""What runs at the same time in programs as they are lowered, against formulas worked out on paper."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plans.layout import Layout
from plans.lower import lower
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage, Strategy
from plans.program import Kind, Program
from plans.timeline import Timeline
from simulator import composition, run_program
from tests.simulator.engine.test_longest_path import random_scripts
from tests.support.handmade import Price, Script, program_of, written_price
from tests.support.layered_training import ADAMW, graph, plan

few = settings(max_examples=50, deadline=None)
times = st.integers(1, 60)


def layers(num_layers: int, level: int, num_micro_batches: int = 1, recompute: tuple[str, ...] = ()) -> Program:
    """Layers of linear and gelu on two data-parallel ranks; every parameter is reduced and gathered alone."""
    optimizer = Optimizer(kind="adamw", settings=ADAMW, parallel_level=level, threshold_bytes=1, bucket_bytes=0)
    of = graph(num_layers, width=8)
    return lower(
        plan(
            Layout((2,), ("dp",)),
            optimizer,
            of=of,
            num_micro_batches=num_micro_batches,
            schedule="1f1b",
            recompute=recompute,
            fused=False,  # prices are those of calls
        )
    )


def priced(**calls: int):
    """Prices by call, in which a "_" stands for the dot; of communication only weights (256 bytes) cost anything."""

    def cost(instruction, group) -> Price:
        work = calls.get(instruction.call.replace(".", "_"), 0)
        if instruction.kind is not Kind.COMPUTE and instruction.message_bytes < 256:
            work = 0
        if instruction.call == "adamw.update" and instruction.outputs[0].endswith("bias"):
            work = 0
        return Price(0, work)

    return cost


def length(timeline: Timeline) -> int:
    return timeline.step_end_ps[-1] - timeline.step_start_ps[-1]


# ------------------------------------------------------------------------------------------------ data parallel


def after_backward(begin: int, num_layers: int, grad: int, weight: int, reduce: int) -> int:
    """When the last reduction ends, if the last backward begins at `begin`.

    The k-th layer from the end has its weight gradient after k (grad + weight), the first layer needs no input
    gradient. Its reduction and those behind it on the channel end no sooner than (L - k + 1) reductions later.
    """
    ready = [begin + k * (grad + weight) - (grad if k == num_layers else 0) for k in range(1, num_layers + 1)]
    return max(at + (num_layers - k) * reduce for k, at in enumerate(ready)) if reduce else ready[-1]


@few
@given(st.integers(1, 5), st.integers(1, 4), times, times, times, st.integers(1, 200), times)
def test_reductions_overlap_the_last_backward(num_layers, num_micro, forward, grad, weight, reduce, update):
    cost = priced(
        linear_forward=forward, linear_grad0=grad, linear_grad1=weight, all_reduce=reduce, adamw_update=update
    )
    timeline = run_program(layers(num_layers, 0, num_micro), cost)
    backward = num_layers * (grad + weight) - grad
    begin = num_micro * num_layers * forward + (num_micro - 1) * backward
    reduced = after_backward(begin, num_layers, grad, weight, reduce)
    # the first layer is updated first, and is the last to be reduced
    assert length(timeline) == reduced + num_layers * update
    exposed = reduced - begin - backward
    assert all(sum(part.exposed_ps.values()) == exposed for part in composition(timeline))


@few
@given(st.integers(1, 5), times, times, times, st.integers(1, 200), st.integers(1, 200))
def test_level_1_gathers_ahead_and_scatters_behind(num_layers, forward, grad, weight, gather, reduce):
    cost = priced(
        linear_forward=forward, linear_grad0=grad, linear_grad1=weight, all_gather_flat=gather,
        reduce_scatter_flat=reduce,
    )  # fmt: skip
    timeline = run_program(layers(num_layers, 1), cost)
    # layer k waits for k gathers and for the layers before it
    forwards = max(k * gather + (num_layers - k + 1) * forward for k in range(1, num_layers + 1))
    assert length(timeline) == after_backward(forwards, num_layers, grad, weight, reduce)


@pytest.mark.parametrize("num_micro", [1, 3])
def test_recompute_costs_what_is_made_again_and_saves_what_is_not_kept(num_micro):
    names = tuple(f"layers.{number}.gelu" for number in range(4))
    cost = priced(linear_forward=10, gelu_forward=7, linear_grad0=10, linear_grad1=10)
    plain, again = (run_program(layers(4, 0, num_micro, recompute), cost) for recompute in ((), names))
    made_again = [span for span in again.spans() if span.part == "R" and span.rank == 0 and span.stream == "compute"]
    # the output of the last layer's gelu is read by the loss alone, that of the others by the next linear's backward
    assert {span.id.split("/")[0] for span in made_again} == {f"0B{number}" for number in range(num_micro)}
    assert length(again) - length(plain) == sum(span.end_ps - span.start_ps for span in made_again) > 0
    assert max(p.by_role["activation"] for p in again.memory) < max(p.by_role["activation"] for p in plain.memory)


# ------------------------------------------------------------------------------------------------- the pipeline


def stages(num_ranks: int, num_micro: int, schedule: str) -> Program:
    """A layer per rank; receives are posted one action ahead."""
    of = graph(num_ranks, width=8)
    names = [operator.name for operator in of.operators]
    cuts = [0, *(names.index(f"layers.{number}.linear") for number in range(1, num_ranks)), len(names)]
    placed = tuple(
        Stage(mesh=Layout((1,), ("dp",), [rank]), operators=tuple(names[low:high]))
        for rank, (low, high) in enumerate(pairwise(cuts))
    )
    return lower(
        Plan(
            graph=of,
            stages=placed,
            strategies={name: Strategy() for name in names},
            optimizer=Optimizer(kind="adamw", settings=ADAMW),
            num_micro_batches=num_micro,
            schedule=schedule,
        )
    )


@few
@given(st.integers(2, 5), st.sampled_from([1, 2, 3, 4, 6, 8]), times, times, st.integers(0, 120))
def test_transfers_of_gpipe_overlap_compute(num_ranks, num_micro, forward, backward, hop):
    """A chain of p computing and p - 1 sending stations: what one micro-batch takes, and m - 1 times the slowest.

    The first stage has no input gradient, so only p - 1 stages take part in the way back.
    """
    cost = priced(linear_forward=forward, linear_grad0=backward)
    timeline = run_program(
        stages(num_ranks, num_micro, "gpipe"),
        lambda line, group: Price(0, hop) if line.kind in (Kind.SEND, Kind.RECV) else cost(line, group),
    )
    one = num_ranks * forward + (num_ranks - 1) * (backward + 2 * hop)
    more = (num_micro - 1) * (max(forward, hop) + max(backward, hop))
    assert length(timeline) == one + more


@few
@given(st.sampled_from([1, 2, 3, 4, 6, 8]), times, times, st.integers(0, 120))
def test_transfers_of_1f1b_on_two_ranks(num_micro, forward, backward, hop):
    """The two orders F0 F1 B0 F2 B1 ... and F0 B0 F1 B1 ... written out; rank 0's backwards take no time here."""
    sent, ends = [], []
    now = other = before = arrived = came_back = 0  # ranks 0 and 1, start of rank 0's last action, both channels
    for _ in range(min(2, num_micro)):
        before, now = now, now + forward
        sent.append(now)
    for number in range(num_micro):
        # a message starts when it is sent, the one before has come, and the receiver is at the action before its own
        arrived = max(sent[number], arrived, other - backward if number else 0) + hop
        other = max(other, arrived) + forward + backward
        ends.append(other)
        came_back = max(other, came_back, before) + hop
        before = now = max(now, came_back)
        if number + 2 < num_micro:
            before, now = now, now + forward
            sent.append(now)
    cost = priced(linear_forward=forward, linear_grad0=backward)
    timeline = run_program(
        stages(2, num_micro, "1f1b"),
        lambda line, group: Price(0, hop) if line.kind in (Kind.SEND, Kind.RECV) else cost(line, group),
    )
    found = [span.end_ps for span in timeline.spans() if span.rank == 1 and span.id.endswith("layers.1.linear.B0")]
    assert [end for end in found if end] == ends


# ------------------------------------------------------------------------------------------------ rates, exactly


def collectives_only(instruction, group) -> Price:
    own = written_price(instruction, group)
    return Price(own.dispatch_ps, 0 if instruction.kind in (Kind.SEND, Kind.RECV) else own.work_ps)


@pytest.mark.parametrize("seed", range(40))
def test_the_rates_over_a_span_add_up_to_its_work(seed):
    """Compute runs at 7/10 while the rank communicates, communication at 9/10 while a member computes: integrated.

    Transfers take no time here, so that every span of communication is one meeting.
    """
    program = program_of(random_scripts(seed))
    rates = (Fraction(7, 10), Fraction(9, 10))
    timeline = run_program(program, collectives_only, num_steps=2, overlap=lambda *_: (0.7, 0.9))
    works = {}
    for group in program.groups:
        for block, instruction in group.walk():
            works[group.ranks[0], f"{block.label}/{instruction.name}", instruction.kind] = instruction.attrs["price"]
    spans = [span for span in timeline.spans() if span.stream != "host" and span.end_ps > span.start_ps]
    meetings: dict[tuple, list] = {}
    for span in spans:
        if span.stream == "comm":
            meetings.setdefault((span.id, span.step, span.start_ps, span.end_ps), []).append(span.rank)
    computing = {rank: [] for rank in range(program.num_ranks)}
    talking = {rank: [] for rank in range(program.num_ranks)}
    for span in spans:
        if span.call != "transfer":
            (computing if span.stream == "compute" else talking)[span.rank].append((span.start_ps, span.end_ps))
    checked = 0
    for span in spans:
        if span.stream == "compute":
            _, work, *_ = works[span.rank, span.id, Kind.COMPUTE]
            assert_work(span.start_ps, span.end_ps, talking[span.rank], rates[0], work)
            checked += 1
        elif span.call == "all_reduce":
            members = meetings[span.id, span.step, span.start_ps, span.end_ps]
            beside = [each for rank in members for each in computing[rank]]
            work = max(works[rank, span.id, Kind.COLLECTIVE][1] for rank in members)
            assert_work(span.start_ps, span.end_ps, beside, rates[1], work)
            checked += 1
    assert checked


def assert_work(start: int, end: int, beside: list[tuple[int, int]], rate: Fraction, work: int) -> None:
    """The work done from start to end is `work`, and was not done a picosecond earlier."""
    edges = sorted({start, end, *(each for span in beside for each in span if start < each < end)})
    done = before_last = Fraction(0)
    for low, high in pairwise(edges):
        pace = rate if any(a <= low and high <= b for a, b in beside) else Fraction(1)
        before_last = done + (high - low - 1) * pace
        done += (high - low) * pace
    assert before_last < work <= done


# ----------------------------------------------------------------------------------- collectives and their members


@few
@given(st.lists(st.integers(0, 100), min_size=2, max_size=6), st.integers(0, 50))
def test_a_collective_ends_its_length_after_its_last_member(works, reduce):
    scripts = [Script(rank) for rank in range(len(works))]
    for script, work in zip(scripts, works, strict=True):
        script.compute("a", work)
        script.collective("sum", range(len(works)), (0, reduce))
        script.compute("b", 1)
    timeline = run_program(program_of(scripts), written_price)
    ends = [span.end_ps for span in timeline.spans() if span.id.endswith("/b") and span.stream == "compute"]
    assert ends == [max(works) + reduce + 1] * len(works)
    assert np.all(timeline.start_ps[timeline.stream == 2] == max(works))
