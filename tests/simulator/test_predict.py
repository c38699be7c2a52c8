"""`simulate`: a real plan on shipped and changed machine files."""

import msgspec
import pytest

from costmodels import Machine, executing
from costmodels.machine.machine import Overlap
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower import lower
from plans.model.graph import Graph, Operator, Tensor
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage, Strategy
from plans.program import Instruction, Kind
from simulator import WhatIf, composition, peak_of_order, simulate
from simulator.predict import _overlap
from tests.support.small_machine import small_machine

BATCH = 32


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two linear layers on 2 stages of 2 x 2 ranks, 4 micro-batches, sharded optimizer."""
    shapes = {
        "input": {"x": (BATCH, 256), "y": (BATCH, 1)},
        "parameter": {"w1": (512, 256), "b1": (512,), "w2": (1, 512), "b2": (1,)},
        "activation": {"h": (BATCH, 512), "r": (BATCH, 512), "o": (BATCH, 1), "loss": ()},
    }
    tensors = {
        name: Tensor(name=name, shape=shape, kind=kind)
        for kind, named in shapes.items()
        for name, shape in named.items()
    }
    operators = tuple(
        Operator(name=name, kind=kind, inputs=inputs, outputs=(output,))
        for name, kind, inputs, output in [
            ("fc1", "linear", ("x", "w1", "b1"), "h"),
            ("act", "relu", ("h",), "r"),
            ("fc2", "linear", ("r", "w2", "b2"), "o"),
            ("mae", "l1_loss", ("o", "y"), "loss"),
        ]
    )
    return Plan(
        graph=Graph(name="two layers", batch_size=BATCH, tensors=tensors, operators=operators, loss="loss"),
        stages=(
            Stage(mesh=Layout((2, 2), ("dp", "mp"), (0, 1, 2, 3)), operators=("fc1", "act")),
            Stage(mesh=Layout((2, 2), ("dp", "mp"), (4, 5, 6, 7)), operators=("fc2", "mae")),
        ),
        strategies={
            "fc1": Strategy(dims={"b0": ("dp",), "n": ("mp",)}),
            "act": Strategy(dims={"d0": ("dp",), "d1": ("mp",)}),
            "fc2": Strategy(dims={"b0": ("dp",), "k": ("mp",)}),
            "mae": Strategy(dims={"d0": ("dp",)}),
        },
        num_micro_batches=4,
        optimizer=Optimizer(parallel_level=1),
    )


@pytest.fixture(scope="module")
def gpu() -> Machine:
    return Machine.load("h200-x8")


@pytest.fixture(scope="module")
def cpu(gpu) -> Machine:
    return msgspec.structs.replace(gpu, name="cores", device="cpu", host_async=False, cores_per_node=2)


@pytest.mark.parametrize("which", ["gpu", "cpu"])
def test_a_plan_and_its_program_give_the_same(plan, which, request):
    machine = request.getfixturevalue(which)
    timeline, of_program = simulate(plan, machine), simulate(lower(plan), executing(machine, plan.execution))
    assert timeline.step_end_ps == of_program.step_end_ps
    assert timeline.num_steps == 3 and timeline.num_ranks == 8
    assert timeline.low_s < timeline.step_interval_s * machine.interval.low  # errors of single prices widen it
    assert timeline.high_s > timeline.step_interval_s * machine.interval.high
    known = msgspec.structs.replace(machine, spreads={})
    assert simulate(plan, known).low_s == pytest.approx(timeline.step_interval_s * machine.interval.low)
    assert 0 < timeline.bubble_fraction < 1
    assert timeline.meta["machine"] == machine.name


def test_every_instruction_that_works_has_a_span_on_every_rank_and_step(plan, gpu):
    program, timeline = lower(plan), simulate(plan, gpu, num_steps=2)
    wanted = {
        (rank, step, f"{block.label}/{instruction.name}")
        for group in program.groups
        for rank in group.ranks
        for step in range(2)
        for block, instruction in group.walk()
        if instruction.kind in ("compute", "collective")
    }
    assert wanted <= {(span.rank, span.step, span.id) for span in timeline.spans()}


def test_memory_is_that_of_the_order(plan, gpu):
    program, timeline = lower(plan), simulate(plan, gpu)
    for group in program.groups:
        for rank in group.ranks:
            assert timeline.memory[rank].peak_bytes >= peak_of_order(group).peak_bytes
            assert timeline.memory_curve[rank][1].max() == timeline.memory[rank].peak_bytes
            assert sum(timeline.memory[rank].by_role.values()) == timeline.memory[rank].peak_bytes


def test_fewer_cores_take_longer(plan, cpu):
    ends = [
        simulate(plan, msgspec.structs.replace(cpu, cores_per_node=cores)).step_interval_s for cores in (1, 2, 4, 8)
    ]
    assert ends == sorted(ends, reverse=True) and ends[0] > ends[-1]


@pytest.mark.parametrize("cores", [1, 2, 8])
def test_pace_of_three_steps_is_that_of_many(plan, cpu, cores):
    """Also on shared cores, where the last step ends early, as nothing follows it."""
    shared = msgspec.structs.replace(cpu, cores_per_node=cores)
    many = simulate(plan, shared, num_steps=12, with_memory=False)
    pace_s = (many.step_end_ps[9] - many.step_end_ps[3]) / 6 / 1e12
    assert simulate(plan, shared, with_memory=False).step_interval_s == pytest.approx(pace_s, rel=1e-9)


def test_nodes_have_cores_of_their_own(plan, cpu):
    spread = msgspec.structs.replace(cpu, devices_per_node=1)
    assert simulate(plan, spread).step_interval_s < simulate(plan, cpu).step_interval_s


def test_overlap_of_the_machine_slows_what_overlaps(plan):
    fast = small_machine(8)  # dispatch of no length, so that compute and communication meet
    slow = msgspec.structs.replace(
        fast,
        overlap=tuple(
            Overlap(compute=kind, collective=collective, compute_rate=0.2, comm_rate=0.2)
            for kind in ("matrix", "memory")
            for collective in ("all_gather", "reduce_scatter", "transfer", "all_reduce")
        ),
    )
    assert simulate(plan, slow).step_interval_s > simulate(plan, fast).step_interval_s


def test_a_message_waits_for_a_long_kernel_and_not_for_short_ones():
    """One kernel of a whole step, or as much work in a hundred kernels: only the one holds the message up."""
    pair = Overlap(compute="matrix", collective="all_reduce", compute_rate=0.7, comm_rate=0.5, hold=0.8)
    rates = _overlap(msgspec.structs.replace(small_machine(2), overlap=(pair,)))
    mm = Instruction(name="fc.F", kind=Kind.COMPUTE, call="linear.forward", part="F")
    reduce = Instruction(name="fc.r", kind=Kind.COLLECTIVE, call="all_reduce", part="F")
    assert rates(mm, reduce, 1e-4, 1e-4) == pytest.approx((0.7, 0.5))
    long, short = rates(mm, reduce, 1e-2, 1e-4), rates(mm, reduce, 1e-6, 1e-4)
    # it moves for message_s / 0.8333 beside the end of a kernel, after 0.8 of the kernel have passed
    assert 1e-4 / long[1] == pytest.approx(0.8 * 1e-2 + 1e-4 / (0.5 / 0.6))
    assert short == pytest.approx((1 - 0.3 / 0.6, 0.5 / 0.6), rel=0.01)
    assert rates(mm, reduce, 1e9, 1e-12)[1] > 0
    other = Instruction(name="fc.g", kind=Kind.COLLECTIVE, call="all_gather", part="F")
    assert rates(mm, other, 1e-4, 1e-4) == (1.0, 1.0)


def test_jitter_is_repeatable_and_differs_by_seed(plan, cpu):
    steps = [simulate(plan, cpu, what_if=WhatIf(seed=seed, jitter=0.2)).step_end_ps for seed in (1, 1, 2)]
    assert steps[0] == steps[1] != steps[2]


def test_a_seed_without_jitter_changes_nothing(plan, cpu):
    assert simulate(plan, cpu, what_if=WhatIf(seed=5)).step_end_ps == simulate(plan, cpu).step_end_ps


def test_a_straggler_makes_the_others_wait(plan, gpu):
    even, uneven = simulate(plan, gpu), simulate(plan, gpu, what_if=WhatIf(slowdown={3: 3.0}))
    assert uneven.step_interval_s > even.step_interval_s
    assert composition(uneven)[0].bubble_ps > composition(even)[0].bubble_ps


def test_more_ranks_than_devices_are_refused(plan):
    with pytest.raises(TwofoldError, match="8 ranks, but machine 'h200-x4' has 4 devices"):
        simulate(plan, Machine.load("h200-x4"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"jitter": 0.1}, "needs a seed"),
        ({"jitter": -0.1, "seed": 1}, "jitter must be .* not -0.1"),
        ({"jitter": float("nan"), "seed": 1}, "jitter must be .* not nan"),
        ({"slowdown": {8: 2.0}}, "slowdown of rank 8: the program's ranks are 0 to 7"),
        ({"slowdown": {0: 0.0}}, "slowdown of rank 0 must be .* not 0.0"),
        ({"slowdown": {0: float("nan")}}, "slowdown of rank 0 must be .* not nan"),
        ({"num_steps": 0}, "num_steps must be .* not 0"),
    ],
)
def test_bad_settings_are_refused(plan, gpu, settings, message):
    changes = {name: value for name, value in settings.items() if name != "num_steps"}

    def predict():
        return simulate(plan, gpu, num_steps=settings.get("num_steps", 3), what_if=WhatIf(**changes))

    with pytest.raises(TwofoldError, match=message):
        predict()
