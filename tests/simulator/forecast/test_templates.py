"""Folded transformers: templates against real lowering, predictions against the SimPy engine."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from costmodels import Machine, axes_group
from costmodels.fit.points import load_points
from costmodels.price.clock import at_usual_clock
from plans.degrees import Degrees
from plans.errors import TwofoldError
from plans.lower import lower
from plans.lower.symbolic import Symbols, model_template
from plans.model.transformer import (
    TransformerConfig,
    transformer,
    transformer_config,
)
from plans.optimizer import Optimizer
from plans.schedules import make_schedule
from search import uniform_plan
from simulator import simulate
from simulator.estimate import estimate
from simulator.estimate.action import ClockMap, measure
from simulator.estimate.chunks import Chunks
from simulator.estimate.memory import peak_activations
from simulator.estimate.pipeline import Runtime, pipeline_end_ps
from simulator.forecast import forecast
from simulator.forecast.predict import step_forecast
from simulator.lines import COLLECTIVE, COMPUTE, WAIT, Line
from simulator.stacks import Stack, TorchNative, stack_named, stack_names
from tests import ROOT
from tests.support.folded_lowering import check_template, small_plan

LLAMA = TransformerConfig(
    num_layers=4, hidden=96, num_heads=8, num_kv_heads=4, head_dim=16, ffn=192, vocab=512, seq=64, dtype="float32"
)
GPT = TransformerConfig(
    num_layers=4, hidden=96, num_heads=8, ffn=192, vocab=512, seq=64, gated=False, norm="layer", qkv_bias=True,
    out_bias=True, mlp_bias=True, position="learned", dropout=0.1, dtype="float32",
)  # fmt: skip


def test_numbers_are_read_as_products():
    symbols = Symbols(sizes={"heads": 3 * 11, "tp": 3, "seq": 13}, marks={"heads": 11, "tp": 3, "seq": 13})
    assert symbols.read(4 * 11 * 13) == (4, (1, -1, 1))
    with pytest.raises(AssertionError):
        symbols.read(17)


@pytest.mark.parametrize("recompute", ["none", "memory_bound", "selective", "selective_op", "full"])
@pytest.mark.parametrize(
    ("config", "tp", "cp", "sequence_parallel"),
    [
        (LLAMA, 1, 1, False),
        (LLAMA, 4, 1, False),
        (LLAMA, 8, 1, False),
        (LLAMA, 2, 2, True),
        (GPT, 2, 1, True),
        (GPT, 4, 2, False),
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_template_says_what_lowering_of_these_sizes_says(config, tp, cp, sequence_parallel, recompute, schedule):
    plan = small_plan(config, tp=tp, cp=cp, sequence_parallel=sequence_parallel, recompute=recompute, schedule=schedule)
    program = lower(plan)
    template = model_template(
        config, tp=tp, cp=cp, sequence_parallel=sequence_parallel, recompute=recompute,
    )  # fmt: skip
    check_template(template, program, config, tp=tp, cp=cp)


def _without_overlap(machine):
    return msgspec.structs.replace(machine, overlap=())


@pytest.mark.parametrize(
    ("tp", "pp", "schedule", "virtual", "micro_batch"),
    [(1, 1, "1f1b", 1, 2), (2, 2, "1f1b", 1, 1), (1, 4, "gpipe", 1, 1), (2, 2, "interleaved_1f1b", 2, 1),
     (1, 4, "zb_h1", 1, 2)],
)  # fmt: skip
def test_forecast_is_close_to_the_engine_on_the_whole_program(tp, pp, schedule, virtual, micro_batch):
    config = TransformerConfig(
        num_layers=4, hidden=2048, num_heads=16, ffn=5632, vocab=32_000, seq=2048, dtype="bfloat16"
    )
    machine = _without_overlap(Machine.load("h200-x4"))
    optimizer = Optimizer(kind="adamw", settings={"lr": 1e-4}, bucket_bytes=0)
    graph = transformer(config, batch_size=16)
    plan = uniform_plan(
        graph, machine, tp=tp, pp=pp, micro_batch=micro_batch, schedule=schedule, virtual=virtual, optimizer=optimizer,
        layers_per_stage=[4 // (pp * virtual)] * (pp * virtual),
    )  # fmt: skip
    degrees = Degrees(
        tp=tp, pp=pp, micro_batch=micro_batch, global_batch=16, schedule=schedule, virtual=virtual, optimizer=optimizer
    )
    # one step that all ranks begin together; of several in a row a rank that is ahead begins its next one earlier
    expected, found = simulate(lower(plan), machine, num_steps=3), forecast(config, degrees, machine)
    assert found.step_s == pytest.approx(expected.step_interval_s, rel=0.01)
    # tensors on their way between stages and buffers of messages are not counted
    assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.02)


@pytest.mark.parametrize(
    ("level", "pp", "virtual"), [(0, 1, 2), (0, 1, 4), (0, 2, 2), (1, 1, 4), (1, 2, 1), (1, 4, 1), (2, 2, 1)]
)
def test_on_slow_links_chunks_share_a_channel_and_gathers_begin_with_the_step(level, pp, virtual):
    config = TransformerConfig(
        num_layers=4, hidden=1024, num_heads=8, ffn=4096, vocab=4096, seq=1024, dtype="bfloat16", name="small"
    )
    machine = Machine.load("h200-x8")
    slow = [msgspec.structs.replace(link, bandwidth_Bps=link.bandwidth_Bps / 100) for link in machine.links]
    machine = _without_overlap(msgspec.structs.replace(machine, links=tuple(slow)))
    optimizer = Optimizer(kind="adamw", settings={"lr": 1e-4}, bucket_bytes=0, parallel_level=level)
    schedule = "1f1b" if virtual == 1 else "interleaved_1f1b"
    degrees = {"dp": 8 // pp, "pp": pp, "micro_batch": 1, "schedule": schedule, "virtual": virtual}
    graph, num_stages = transformer(config, batch_size=16), pp * virtual
    plan = uniform_plan(
        graph, machine, optimizer=optimizer, zero=level, layers_per_stage=[4 // num_stages] * num_stages, **degrees
    )
    expected = simulate(lower(plan), machine, num_steps=1)
    found = step_forecast(config, Degrees(global_batch=16, optimizer=optimizer, **degrees), machine)
    # of the first step: in later ones transfers meet the gathers of other ranks on links so slow (up to 8 % longer)
    # chunks side by side would be 20 to 50 % less; gathers that wait for the tensor 40 % more
    assert found.end_ps() / 1e12 == pytest.approx(expected.step_s, rel=0.03)


def test_maps_of_clocks_compose_as_the_walk_does():
    lines = [
        Line(COMPUTE, 3, 10, "matrix"), Line(COLLECTIVE, 4, 25, "all_reduce", "tp", 0), Line(COMPUTE, 2, 7, "memory"),
        Line(WAIT, 1, 0, token=0), Line(COMPUTE, 2, 5, "matrix"),
    ]  # fmt: skip
    once, thrice = measure(lines), measure(3 * [])
    assert (once.work_ps, once.exposed_ps) == (40, {"all_reduce": 18})
    assert once.times(3).work_ps == once.then(once).then(once).work_ps == 120
    assert once.times(3).cold_start_ps == once.then(once).then(once).cold_start_ps
    assert thrice == ClockMap()


def test_compute_during_a_collective_runs_at_the_rates_of_the_pair():
    lines = [Line(COLLECTIVE, 0, 10, "all_reduce", "dp", 0), Line(COMPUTE, 0, 10, "matrix")]
    # both at half speed for 20 ps; then nothing is left of either
    found = measure(lines, lambda *pair: (0.5, 0.5))
    assert found.work_ps == pytest.approx(20, abs=1)
    assert found.tail_ps == pytest.approx(0, abs=1)


@pytest.mark.parametrize(("name", "virtual"), [("1f1b", 1), ("gpipe", 1), ("zb_h1", 1), ("interleaved_1f1b", 2)])
def test_pipeline_of_equal_stages_follows_the_closed_form(name, virtual):
    ranks, count = 4, 8
    schedule = make_schedule(name, ranks, count, virtual=None if virtual == 1 else virtual)
    forward, back, weight = (ClockMap(work_ps=time / virtual) for time in (12, 12, 12))
    actions = {"F": forward, "B": ClockMap(work_ps=24 / virtual), "I": back, "W": weight}
    end = pipeline_end_ps(schedule, [actions] * schedule.num_stages, [ClockMap()] * ranks, {}, 0)
    bubble = {"1f1b": 3 * 36, "gpipe": 3 * 36, "zb_h1": 3 * 12, "interleaved_1f1b": 3 * 36 / 2}[name]
    assert end == count * 36 + bubble


def test_activations_in_flight():
    schedule = make_schedule("1f1b", 4, 8)
    assert peak_activations(schedule, [10] * 4, [0] * 4, [(0, 3, 0, 0)] * 4) == [43, 33, 23, 13]


@pytest.mark.parametrize(("size", "stride", "count"), [(8, 1, 64), (4, 8, 64), (2, 4, 64), (3, 2, 24), (16, 1, 64)])
def test_tiers_of_regular_groups_are_those_of_their_ranks(size, stride, count):
    machine = Machine.load("h100-sxm-x64")
    groups = [
        [base + offset + stride * number for number in range(size)]
        for base in range(0, count, size * stride)
        for offset in range(stride)
    ]
    tier = max(machine.tier(members) for members in groups)
    below = machine.links[tier - 1].ranks if tier else 1
    fewest = (
        min(min(sum(r // below == m // below for r in members) for m in members) for members in groups) if tier else 1
    )
    group = axes_group(machine, [(size, stride)], count)
    assert (group.top, group.together) == (tier, fewest)


def test_data_parallel_width_does_not_change_the_compute():
    config, machine = transformer_config("llama-3-8b"), Machine.load("h100-sxm-x1024")
    few, many = (forecast(config, Degrees(dp=dp, tp=8, micro_batch=1, global_batch=4 * dp), machine) for dp in (2, 128))
    # the same work; the reduction beside it takes longer and slows it a little more
    assert few.rank_s[0]["compute"] <= many.rank_s[0]["compute"] <= 1.1 * few.rank_s[0]["compute"]
    assert many.step_s >= few.step_s


def test_sharding_levels_save_memory():
    config, machine = transformer_config("llama-3-8b"), Machine.load("h100-sxm-x8")
    peaks = [
        forecast(
            config,
            Degrees(
                dp=8, global_batch=8, recompute="full",
                optimizer=Optimizer(kind="adamw", settings={"lr": 1e-4}, parallel_level=level, master_dtype="float32"),
            ),
            machine,
        ).peak_bytes
        for level in range(4)
    ]  # fmt: skip
    assert peaks == sorted(peaks, reverse=True) and peaks[3] < 0.5 * peaks[0]


def test_stacks_are_known_by_name():
    assert {stack_named(name).name for name in stack_names()} == set(stack_names())
    with pytest.raises(TwofoldError, match="did you mean"):
        stack_named("megatrn")
    assert isinstance(stack_named("twofold"), Stack)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"dp": 0}, "dp must be"), ({"global_batch": 3, "dp": 2}, "does not divide"), ({"recompute": "some"}, "one of"),
     ({"schedule": "1f2b"}, "unknown schedule"),
     ({"layers": (1, 2)}, "2 numbers, but pp 1 with 1 chunk each makes 1 chunk")],
)  # fmt: skip
def test_bad_degrees_are_refused(wrong, message):
    with pytest.raises(TwofoldError, match=message):
        forecast(LLAMA, Degrees(**{"global_batch": 2} | wrong), Machine.load("h200-x4"))


def test_machines_whose_hosts_compute_are_refused():
    with pytest.raises(TwofoldError, match="computes on its hosts"):
        forecast(LLAMA, Degrees(global_batch=2), Machine.load("cpu-2core-x8"))


def _layer_bytes(config, *, tp, sequence_parallel, recompute, batch):
    """Korthikanti et al. 2022, arXiv 2205.05198, equations 2, 4 and 6, and 2 s b h for a block made again."""
    tokens, scores = config.seq * batch * config.hidden, config.num_heads * config.seq**2 * batch
    core = 0 if recompute == "selective" else 5 * scores / tp
    if recompute == "full":
        return 2 * tokens / (tp if sequence_parallel else 1)
    return tokens * 34 / tp + core if sequence_parallel else tokens * (10 + 24 / tp) + core


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (8, False), (8, True)])
def test_megatron_keeps_what_its_paper_says(tp, sequence_parallel, recompute):
    config = TransformerConfig(
        num_layers=4, hidden=1024, num_heads=16, ffn=4096, vocab=512, seq=512, gated=False, norm="layer", qkv_bias=True,
        out_bias=True, mlp_bias=True, position="learned", dropout=0.1, attention_dropout=0.1, dtype="float16",
    )  # fmt: skip
    degrees = Degrees(
        tp=tp, micro_batch=2, global_batch=2, recompute=recompute, sequence_parallel=sequence_parallel
    )  # fmt: skip
    costs = Chunks(
        config=config, degrees=degrees, machine=Machine.load("a100-80gb-x8"), stack=stack_named("megatron-2022"),
        rates=None, split_backward=False,
    )  # fmt: skip
    expected = _layer_bytes(config, tp=tp, sequence_parallel=sequence_parallel, recompute=recompute, batch=2)
    # the paper leaves out what is small against s b h
    assert costs.footprint("block").kept == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize("stack", ["megatron", "zero-bubble"])
def test_a_split_backward_keeps_inputs_and_gradients_of_its_products(stack):
    """32 s b h (Qi et al. 2024, arXiv 2401.10241, table 1)."""
    config = TransformerConfig(
        num_layers=4, hidden=1024, num_heads=16, ffn=4096, vocab=512, seq=512, gated=False, norm="layer", qkv_bias=True,
        out_bias=True, mlp_bias=True, position="learned", dtype="float16",
    )  # fmt: skip
    costs = Chunks(
        config=config, degrees=Degrees(micro_batch=2, global_batch=2), machine=Machine.load("a100-80gb-x8"),
        stack=stack_named(stack), rates=None, split_backward=True,
    )  # fmt: skip
    assert costs.footprint("block").kept_for_weights == pytest.approx(32 * 512 * 2 * 1024, rel=0.001)


def _messages(stack, *, sequence_parallel=False):
    degrees = Degrees(tp=4, micro_batch=2, global_batch=2, sequence_parallel=sequence_parallel)
    costs = Chunks(
        config=replace(LLAMA, dtype="bfloat16"), degrees=degrees, machine=Machine.load("h200-x4"), stack=stack,
        rates=None, split_backward=False,
    )  # fmt: skip
    return [line.name for line in costs.lines("block", "B") if line.kind == COLLECTIVE]


def test_products_without_a_common_input_reduce_its_gradient_each():
    # queries, keys, values and the two products of the feed-forward
    assert _messages(TorchNative()) == ["all_reduce"] * 5
    assert _messages(TorchNative(one_input=True)) == ["all_reduce"] * 2
    assert _messages(TorchNative(), sequence_parallel=True) == ["all_gather", "reduce_scatter"] * 2


def test_asynchronous_tensor_parallelism_waits_after_the_products():
    degrees = Degrees(tp=4, micro_batch=2, global_batch=2, sequence_parallel=True)
    found = {}
    for async_tp in (False, True):
        costs = Chunks(
            config=replace(LLAMA, dtype="bfloat16"), degrees=degrees, machine=Machine.load("h200-x4"),
            stack=TorchNative(compiled=True, one_input=True, async_tp=async_tp), rates=None, split_backward=False,
        )  # fmt: skip
        found[async_tp] = costs.lines("block", "F")
    kinds = [[line.kind for line in lines if line.kind != COMPUTE or line.name == "matrix"] for lines in found.values()]
    first, beside = kinds[0], kinds[1]
    # norm, then the gather with the wait at once, or after queries, keys and values
    assert first[:5] == [COLLECTIVE, WAIT, COMPUTE, COMPUTE, COMPUTE]
    assert beside[:5] == [COLLECTIVE, COMPUTE, COMPUTE, COMPUTE, WAIT]
    assert sorted(first) == sorted(beside)
    assert measure(found[True]).work_ps < measure(found[False]).work_ps


def test_fsdp2_gathers_weights_in_every_forward_also_at_level_2():
    config, machine = transformer_config("llama-3-8b"), Machine.load("h100-sxm-x8")
    machine = msgspec.structs.replace(machine, links=tuple(link.scaled(0.1, 1.0) for link in machine.links))

    def gathered_s(stack, count):
        optimizer = Optimizer(kind="adamw", settings={"lr": 1e-4}, parallel_level=2, reduce_every="step")
        degrees = Degrees(dp=8, global_batch=8 * count, optimizer=optimizer, recompute="full")
        return forecast(config, degrees, machine, stack=stack_named(stack)).rank_s[0]["all_gather"]

    # what is not hidden: of every micro-batch, or of the first alone
    assert gathered_s("torch", 4) == pytest.approx(4 * gathered_s("torch", 1))
    assert gathered_s("twofold", 4) == pytest.approx(gathered_s("twofold", 1))


def test_a_host_that_waits_for_every_transfer_is_late_for_the_next_action():
    schedule = make_schedule("1f1b", 2, 4)
    action = ClockMap(work_ps=10, cold_start_ps=13, dispatch_ps=5)  # 3 late where the device is idle at first
    actions = [{"F": action, "B": action}] * 2
    travel = {(0, 1): 0.0, (1, 0): 0.0}
    ahead = pipeline_end_ps(schedule, actions, [ClockMap()] * 2, travel, 0)
    late = pipeline_end_ps(schedule, actions, [ClockMap()] * 2, travel, 0, Runtime(synchronises=True))
    # the last rank is late for each forward, which arrives, and ahead of the backward that follows at once
    assert (ahead, late) == (13 + 9 * 10, 13 + 4 * (13 + 10) + 13)


def test_a_host_that_fetches_data_waits_for_the_device_before_every_forward():
    action = ClockMap(work_ps=10, cold_start_ps=13, dispatch_ps=5)
    end = pipeline_end_ps(
        make_schedule("1f1b", 1, 4), [{"F": action, "B": action}], [ClockMap()], {}, 0, Runtime(fetch_ps=2)
    )  # fmt: skip
    assert end == 4 * (2 + 13 + 10)  # the backward's kernels are there before the forward has ended


def test_gathers_that_open_a_step_are_hidden_behind_the_forwards_of_earlier_chunks():
    """Two chunks, two forwards of 10 each; of the gathers, 12 each, the second is over 2 after the first forward."""
    schedule = make_schedule("interleaved_1f1b", 1, 2, virtual=2)
    one = ClockMap(work_ps=10)
    actions = [{"F": one, "B": one, "F.first": ClockMap(work_ps=22, prefetch_ps=12)}] * 2
    each, first = (
        pipeline_end_ps(schedule, actions, [ClockMap()], {}, 0, Runtime(opens_with_gathers=opens))
        for opens in (False, True)
    )
    assert (each, first) == (2 * 12 + 8 * 10, 2 * 12 + 7 * 10)


def test_ranks_that_do_not_begin_together_take_as_long_as_the_longest():
    schedule = make_schedule("zb_h2", 4, 12)
    one = ClockMap(work_ps=10)
    actions = [{"F": one, "I": one, "W": one}] * 4
    end = pipeline_end_ps(schedule, actions, [ClockMap()] * 4, {}, 0, Runtime(together=False))
    assert end == 12 * 30 < pipeline_end_ps(schedule, actions, [ClockMap()] * 4, {}, 0)


def test_a_tied_table_is_held_once_on_one_stage():
    machine = Machine.load("h100-sxm-x8")
    plain, tied = (replace(LLAMA, vocab=8192, tied=tied) for tied in (False, True))
    table = 8192 * 96 * (4 + 4 + 8)  # weight, gradient, two states
    for pp, fewer in ((1, table), (2, 0)):
        degrees = Degrees(pp=pp, global_batch=2)
        roles = [forecast(config, degrees, machine).memory for config in (plain, tied)]
        static = [sum(own[role] for role in ("weight", "gradient", "optimizer")) for own in roles]
        activations = roles[0]["activation"] - roles[1]["activation"]
        assert static[0] - static[1] + activations == fewer


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"tp": 3}, "8 query heads cannot be split over tp 3"), ({"tp": 5}, "the next valid tp is 8"),
     ({"cp": 3}, "64 tokens per sample cannot be split over cp 3"),
     ({"tp": 8, "sequence_parallel": True}, "key-value heads is not supported by forecasts")],
)  # fmt: skip
def test_sizes_that_degrees_do_not_divide_are_refused(wrong, message):
    with pytest.raises(TwofoldError, match=message):
        forecast(LLAMA, Degrees(**{"global_batch": 2} | wrong), Machine.load("h100-sxm-x8"))


@pytest.mark.parametrize("pp", [2, 4])
def test_estimates_are_of_the_pace_where_ranks_end_apart(pp):
    """A rank begins its next step when its own is over: the first step of zb_h2 takes over 1 % longer."""
    config, machine = transformer_config("llama-3-8b"), at_usual_clock(Machine.load("h100-sxm-x64"))
    degrees = Degrees(dp=64 // pp, pp=pp, micro_batch=1, global_batch=512, schedule="zb_h2")
    exact, estimated_s = step_forecast(config, degrees, machine), estimate(config, degrees, machine).step_s
    pace_s, first_s = exact.pace_ps() / 1e12, exact.end_ps() / 1e12
    assert first_s > 1.01 * pace_s
    assert estimated_s == pytest.approx(pace_s, rel=0.0075)


_DECODERS = [
    point
    for point in load_points(ROOT / "benchmarks" / "data" / "h200-x2.jsonl.gz")[0]
    if point.kind == "step" and point.call == "decoder_step"
]


@pytest.mark.parametrize("point", _DECODERS, ids=[f"{point.stack}-{len(point.options)}" for point in _DECODERS])
def test_torchs_parts_hold_what_was_measured(point):
    sizes, dp = point.options, 1 if point.stack == "dtensor" else point.ranks
    level = 2 + sizes["reshard"] if point.stack == "fsdp2" else 0
    optimizer = Optimizer(kind="adamw", settings={"lr": 1e-4}, parallel_level=level, reduce_every="step")
    config = TransformerConfig(
        num_layers=sizes["blocks"], hidden=sizes["hidden"], num_heads=sizes["heads"], ffn=sizes["ffn"],
        vocab=sizes["vocab"], seq=sizes["sequence"], dtype="bfloat16",
    )  # fmt: skip
    degrees = Degrees(
        dp=dp, tp=point.ranks // dp, micro_batch=sizes["batch"],
        global_batch=dp * sizes["batch"] * sizes["micro_batches"], optimizer=optimizer,
    )  # fmt: skip
    found = forecast(config, degrees, Machine.load("h200-x2"), stack=stack_named("torch"))
    assert found.peak_bytes == pytest.approx(point.figures["peak_bytes"], rel=0.03)
