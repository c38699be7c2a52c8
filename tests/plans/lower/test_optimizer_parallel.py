"""Optimizer parallel by level: what is held, what is sent, in which order; closed forms against counts."""

from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from costmodels.price.instruction import Cost
from costmodels.price.traffic import collective_traffic
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower import lower
from plans.lower.buckets import LocalParameter, filled
from plans.model.blocks import block_of
from plans.model.graph import Operator
from plans.model.mlp import mlp_graph
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage
from plans.program import Kind, Scope
from simulator.engine.run import run_program
from simulator.timeline.memory import memory_timeline, peak_of_order
from tests import ROOT
from tests.plans.lower.test_lowering import check_training, edited, random_values
from tests.pretend.program import Pretend
from tests.support.layered_training import ADAMW, graph, plan

DOCS = ROOT / "docs" / "optimizer-parallel.md"
LAYERS, MICRO_BATCHES = 4, 3


def layers(level, n=4, num_micro_batches=MICRO_BATCHES, schedule="1f1b", **rest):
    """A stack of layers of 8 x 8 weights, data parallel over `n` ranks, every parameter sharded evenly."""
    of = graph(LAYERS, width=8)
    optimizer = Optimizer(kind="adamw", settings=ADAMW, parallel_level=level, threshold_bytes=1, **rest)
    return plan(Layout((n,), ("dp",)), optimizer, of=of, num_micro_batches=num_micro_batches, schedule=schedule)


def one_group(plan):
    (group,) = lower(plan).groups
    return group


def flat(plan):
    return [(block, each) for block, each in one_group(plan).walk()]


def calls(plan):
    """Collectives of a step by call; the one that adds up the loss is left out."""
    return Counter(each.call for _, each in flat(plan) if each.axes and each.outputs != ("step_loss",))


# ----------------------------------------------------------------- closed forms

P = LAYERS * (64 + 8) * 4
"""Bytes of all parameters."""


def sent_bytes(plan, n):
    """What one rank sends in a step by ring algorithms, without the loss."""
    return sum(
        collective_traffic(each.call, n, each.message_bytes, 4, "nccl").moved_bytes
        for _, each in flat(plan)
        if each.axes and each.outputs != ("step_loss",)
    )


def expected_bytes(level, n, m, once):
    """The closed forms of the table in docs/optimizer-parallel.md, as if the backward read every weight."""
    part = (n - 1) / n * P
    if level in (0, 1):
        return 2 * part
    reductions = 1 if once else m
    return part * ((1 if level == 2 else 2 * m) + reductions)


def unread_bytes(level, n, m, bucket_bytes):
    """Not gathered for the backward: the first layer, whose input is data, and biases that are gathered alone."""
    unread = (64 + LAYERS * 8 if bucket_bytes == 0 else 64 + 8) * 4
    return (n - 1) / n * m * unread if level == 3 else 0


@pytest.mark.parametrize("bucket_bytes", [0, 300, 2**20])
@pytest.mark.parametrize("reduce_every", ["micro_batch", "step"])
@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("n", [2, 4])
def test_bytes_sent_in_a_step(level, n, reduce_every, bucket_bytes):
    one = layers(level, n, reduce_every=reduce_every, bucket_bytes=bucket_bytes)
    expected = expected_bytes(level, n, MICRO_BATCHES, reduce_every == "step")
    assert sent_bytes(one, n) == expected - unread_bytes(level, n, MICRO_BATCHES, bucket_bytes)


@pytest.mark.parametrize("level", range(4))
def test_bytes_kept_between_steps(level):
    n = 4
    kept = sum(value.size_bytes for value in one_group(layers(level, n)).values.values() if value.scope is Scope.KEPT)
    assert kept == 3 * P // (1 if level == 0 else n)  # weight and two states


def gradient_bytes(plan):
    """The gradients alive at the end of the first of several backwards: what is accumulated."""
    group = one_group(plan)
    alive = set()
    for block, each in group.walk():
        alive.update(name for name in each.outputs if group.values[name].scope is not Scope.KEPT)
        alive.difference_update(each.frees)
        if block.label == "0B0" and each is block.body.instructions[-1]:
            break
    return sum(group.values[name].size_bytes for name in alive if group.values[name].role == "gradient")


@pytest.mark.parametrize(("level", "part"), [(0, 1), (1, 1), (2, 4), (3, 4)])
def test_bytes_of_accumulated_gradients(level, part):
    assert gradient_bytes(layers(level)) == P // part
    assert gradient_bytes(layers(level, reduce_every="step")) == P


def test_the_table_in_the_docs_is_these_forms():
    lines = [line.split("|")[1:-1] for line in DOCS.read_text().splitlines() if line.startswith("| ")]
    rows = {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}
    names = {"P": P, "n": 4, "m": MICRO_BATCHES, "s": 2}
    for level in range(4):
        weights, gradients, states, sent = rows[str(level)][:4]
        for once, formula in enumerate(sent.split(" or ")):
            assert eval(formula.strip("`"), names) == expected_bytes(level, 4, MICRO_BATCHES, bool(once)), level
        assert eval(gradients.strip("`"), names) == gradient_bytes(layers(level)), level
        kept = eval(weights.strip("`"), names) + eval(states.strip("`"), names)
        values = one_group(layers(level)).values.values()
        assert kept == sum(value.size_bytes for value in values if value.scope is Scope.KEPT), level


# ----------------------------------------------------------------- what is done


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_level_3_gathers_a_block_ahead_and_frees_it_after_its_last_use(prefetch):
    one = layers(3, prefetch=prefetch)
    group = one_group(one)
    for label, order in (("0F1", range(LAYERS)), ("0B1", range(LAYERS - 1, -1, -1))):
        lines = [each for block, each in group.walk() if block.label == label]
        operators = [each.operator for each in lines]
        # the gradient of the input of the first layer is not wanted, so its weight is not read in the backward
        read = [number for number in order if label == "0F1" or number]
        first = [operators.index(f"layers.{number}.{'linear' if label == '0F1' else 'gelu'}") for number in read]
        gathers = [at for at, each in enumerate(lines) if each.call == "all_gather_flat"]
        assert [lines[at].outputs[0] for at in gathers] == [f"layers.{number}.weight+1#whole" for number in read]
        for number, at in enumerate(gathers):
            before = first[number - prefetch] if number >= prefetch else first[0]
            assert at < before and (number <= prefetch or at > first[number - prefetch - 1])
        held, most = set(), 0
        for each in lines:
            held.update(name for name in each.outputs if group.values[name].role == "weight")
            most = max(most, len(held))
            held.difference_update(each.frees)
        assert not held and most <= 2 * (prefetch + 1)
    check_training(one)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_level_3_never_holds_all_weights(schedule):
    def cost(instruction, group):
        return Cost(10, 0 if instruction.kind is Kind.WAIT else 1000)

    peaks = {}
    for level in (2, 3):
        one = layers(level, schedule=schedule)
        program = lower(one)
        timeline = run_program(program, cost)
        _, curves = memory_timeline(program, timeline)
        (group,) = program.groups
        weights, most = Counter(), 0
        for _, each in group.walk():
            weights.update({name: group.values[name].size_bytes for name in each.outputs if is_weight(group, name)})
            most = max(most, sum(weights.values()))
            for name in each.frees:
                weights.pop(name, None)
        assert most == P if level == 2 else most <= 2 * P // LAYERS
        peaks[level] = max(int(curve.max()) for _, curve in curves.values())
        assert peaks[level] >= peak_of_order(group).peak_bytes
    assert peaks[3] < peaks[2]


def is_weight(group, name):
    return group.values[name].role == "weight" and group.values[name].scope is not Scope.KEPT


def test_prefetching_hides_the_gathers_behind_compute():
    """Layers of 1000 + 500 ps of compute whose gather takes 1000: all but the first hide, none without prefetch."""

    def cost(instruction, group):
        if instruction.kind is Kind.COMPUTE:
            return Cost(0, {"linear.forward": 1000, "gelu.forward": 500}.get(instruction.call, 0))
        return Cost(0, 1000 if instruction.call == "all_gather_flat" else 0)

    ends = {}
    for prefetch in (0, 1):
        apart = msgspec.structs.replace(layers(3, num_micro_batches=1, prefetch=prefetch), fused=False)
        timeline = run_program(lower(apart), cost)
        ends[prefetch] = next(span.end_ps for span in timeline.spans() if span.id == "0F0/loss.F")
    compute = LAYERS * 1500
    assert ends == {0: compute + LAYERS * 1000, 1: compute + 1000}


@pytest.mark.parametrize("level", [0, 1])
def test_a_bucket_is_reduced_as_soon_as_its_last_gradient_is_whole(level):
    """Buckets of two layers; in the last backward the first is under way while the other two layers compute."""
    one = layers(level, bucket_bytes=2 * 72 * 4)
    call = "all_reduce" if level == 0 else "reduce_scatter_flat"
    assert calls(one)[call] == LAYERS // 2
    last = [each for block, each in flat(one) if block.label == f"0B{MICRO_BATCHES - 1}"]
    issued = [at for at, each in enumerate(last) if each.call == call]
    ready = [at for at, each in enumerate(last) if each.call == "accumulate" and "layers.2" in each.outputs[0]]
    assert len(issued) == 2 and ready[-1] < issued[0] == ready[-1] + 2  # accumulated, packed, issued
    assert any("layers.1.linear" in each.operator for each in last[issued[0] :])
    assert not [each for block, each in flat(one) if each.call == call and block.label != last and block.label == "0B0"]
    check_training(one)


@pytest.mark.parametrize("level", [2, 3])
def test_sharded_gradients_are_reduced_in_every_backward_or_in_the_last(level):
    each, once = layers(level), layers(level, reduce_every="step")
    found = {
        name: Counter(block.label for block, line in flat(plan) if line.call == "reduce_scatter_flat")
        for name, plan in (("each", each), ("once", once))
    }
    buckets = LAYERS if level == 3 else 1
    assert found == {"each": {f"0B{number}": buckets for number in range(MICRO_BATCHES)}, "once": {"0B2": buckets}}
    check_training(each)
    check_training(once)


def test_at_most_two_reductions_of_sharded_gradients_are_under_way():
    lines = [each for block, each in flat(layers(3)) if block.label == "0B0"]
    under_way, most = set(), 0
    for each in lines:
        if each.call == "reduce_scatter_flat":
            under_way.add(each.token)
        under_way.discard(each.waits)
        most = max(most, len(under_way))
    assert most == 2 and not under_way  # the one before is waited for after the next has been issued


def test_every_rank_packs_its_own_part_of_a_gradient_that_all_have():
    """Weights on all of 2 x 2 ranks, the batch over two: half of the gradient is summed over pairs, not all of it."""
    of = graph(2, width=8)
    mesh = Layout((2, 2), ("dp", "same"))
    optimizer = Optimizer(kind="adamw", settings=ADAMW, parallel_level=2, threshold_bytes=1, bucket_bytes=0)
    one = plan(mesh, optimizer, of=of)
    scatter = [each for _, each in flat(one) if each.call == "reduce_scatter_flat"]
    sizes = {each.inputs[0]: each.message_bytes for each in scatter}
    assert sizes["g:layers.0.weight#flat"] == 64 * 4 // 2
    check_training(one)


@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("limit", [0.01, 1e6])
def test_clipping_by_the_norm_over_all_stages(level, limit):
    """Two stages and parameters below the threshold: each element is counted once. A high limit changes nothing."""
    of = mlp_graph([8, 16, 4, 4], 12)
    names = tuple(operator.name for operator in of.operators)
    optimizer = Optimizer(kind="sgd", parallel_level=level, threshold_bytes=100, clip_norm=limit, settings={"lr": 0.5})
    stages = (
        Stage(mesh=Layout((2,), ("dp",), (3, 1)), operators=names[:3]),
        Stage(mesh=Layout((1, 2), ("dp", "rest"), (0, 2)), operators=names[3:]),
    )
    one = Plan(graph=of, stages=stages, optimizer=optimizer, num_micro_batches=2)
    check_training(one)


def test_a_group_without_parameters_takes_part_in_the_norm():
    of = mlp_graph([8, 4], 12)
    names = tuple(operator.name for operator in of.operators)
    optimizer = Optimizer(clip_norm=0.1)
    stages = tuple(
        Stage(mesh=Layout((1,), ("a",), (rank,)), operators=names[rank : rank + 1]) for rank in range(len(names))
    )
    check_training(Plan(graph=of, stages=stages, optimizer=optimizer))


# ---------------------------------------------------------------------- pieces


def test_buckets_close_when_they_are_full_and_keep_apart_what_differs():
    mesh = Layout((2,), ("dp",))
    of = graph(6, width=8)
    found = [
        LocalParameter(tensor=tensor, home=mesh(*["None"] * len(tensor.shape)), summed=(), optimizer=Optimizer())
        for tensor in of.parameters
    ]

    def names(limit, key=lambda each: "", block=None):
        return [len(bucket.parameters) for bucket in filled(found, key, lambda each: "float32", limit, block)]

    assert names(0) == [1] * 12
    assert names(1) == [1] * 12
    assert names(64 * 4) == [1, 2, 2, 2, 2, 2, 1]  # weight; bias and weight; ...; bias
    assert names(2**30) == [12]
    assert names(2**30, key=lambda each: len(each.shape)) == [6, 6]
    assert names(1, block=lambda each: each.name[:8]) == [2] * 6


def test_blocks_are_modules_up_to_their_number():
    made = [Operator(name="x", kind="relu", inputs=(), outputs=(), module=name) for name in ("h.12.mlp.fc.3", "h", "")]
    assert [block_of(operator) for operator in made] == ["h.12", "h", "x"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parallel_level": 4}, "level 4 is not known; levels are 0, 1, 2 and 3"),
        ({"bucket_bytes": -1}, "bucket_bytes=-1 and prefetch=1 must not be negative"),
        ({"reduce_every": "epoch"}, "reduce_every 'epoch' is not known: micro_batch or step"),
        ({"clip_norm": 0.0}, r"clip_norm must be finite and above 0, not 0\.0; None disables clipping"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(TwofoldError, match=message):
        Optimizer(**settings)


def test_memory_of_levels_falls():
    of = graph(8, width=32, batch=8)
    peaks = []
    for level in range(4):
        optimizer = Optimizer(kind="adamw", parallel_level=level, threshold_bytes=1, bucket_bytes=2**12)
        one = plan(Layout((4,), ("dp",)), optimizer, of=of, num_micro_batches=2)
        peaks.append(peak_of_order(one_group(one)).peak_bytes)
    assert np.all(np.diff(peaks) < 0)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (
            r"keeps .*layers\.1\.weight.* after 0F0",
            lambda each: replace(each, frees=tuple(n for n in each.frees if n != "layers.1.weight")),
        ),
        (
            r"layers\.1\.weight', None\) is not there",
            lambda each: None if each.call == "flat_unpack" and "layers.1.weight" in each.outputs else each,
        ),
        (r"\{'float32'\}, not float64", lambda each: replace(each, dtype="float64") if each.axes else each),
    ],
)
def test_the_oracle_sees_faults_of_sharded_programs(message, change):
    one = layers(3, num_micro_batches=1, reduce_dtype="bfloat16", gradient_dtype="bfloat16")
    parameters, (batch,) = random_values(one.graph, 0, 1)
    Pretend(lower(one), parameters).step(lambda rank: batch)

    with pytest.raises(AssertionError, match=message):
        Pretend(edited(lower(one), change), parameters).step(lambda rank: batch)
