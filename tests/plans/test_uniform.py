"""Plans of stated degrees for transformers: they train as one device does, and communicate what they should."""

from __future__ import annotations

import dataclasses
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import tests.pretend.transformer  # noqa: F401  (enters the rules of these operators)
from plans.errors import TwofoldError
from plans.lower import lower
from plans.model.transformer import Rope, TransformerConfig, transformer
from plans.optimizer import Optimizer
from plans.plan import Plan, plan_from_json, plan_to_json
from plans.program import Kind
from search import uniform_plan
from tests.modules.transformer import random_tokens, random_weights, trained
from tests.pretend.program import Pretend

LLAMA = TransformerConfig(
    num_layers=2, hidden=32, num_heads=4, num_kv_heads=2, ffn=48, vocab=32, seq=8, rope=Rope(base=50.0), dtype="float64"
)
GPT = TransformerConfig(
    num_layers=2, hidden=32, num_heads=4, ffn=48, vocab=32, seq=8, gated=False, norm="layer", qkv_bias=True,
    out_bias=True, mlp_bias=True, position="learned", dtype="float64",
)  # fmt: skip
SGD = Optimizer(settings={"lr": 0.1})
MACHINE = SimpleNamespace(name="any", num_devices=10**6, fuses=True)  # stated plans price nothing


def planned(config: TransformerConfig = LLAMA, batch: int = 8, **options) -> Plan:
    return uniform_plan(transformer(config, batch_size=batch), MACHINE, **{"optimizer": SGD} | options)


def check_training(plan: Plan, config: TransformerConfig) -> None:
    """One step, which leaves nothing but weights, and those are compared; two where ranks keep parts of them."""
    weights = random_weights(plan.graph)
    num_steps = 2 if plan.optimizer.parallel_level else 1
    batches = [random_tokens(plan.graph, config.vocab, seed) for seed in range(num_steps)]
    pretend = Pretend(lower(plan), {name: each.numpy() for name, each in weights.items()})
    losses = [pretend.step(lambda rank, batch=batch: {k: v.numpy() for k, v in batch.items()}) for batch in batches]
    expected, final = trained(config, weights, batches)
    for found, loss in zip(losses, expected, strict=True):
        known = [value for value in found.values() if value is not None]
        assert known and known == pytest.approx([loss] * len(known), rel=1e-10)
    for name, weight in pretend.parameters().items():
        torch.testing.assert_close(torch.from_numpy(weight), final[name], rtol=1e-9, atol=1e-11)


DEGREES = {
    "tp": {"tp": 2},
    "tp, sequence parallel": {"tp": 2, "sequence_parallel": True},
    "more ranks than kv heads": {"tp": 4, "sequence_parallel": True},
    "cp": {"cp": 2},
    "cp 2 tp 2, sequence parallel": {"cp": 2, "tp": 2, "sequence_parallel": True},
    "dp 2 tp 2 pp 2": {"dp": 2, "tp": 2, "pp": 2, "micro_batch": 1},
    "dp 2 tp 2 pp 2, sequence parallel": {
        "dp": 2, "tp": 2, "pp": 2, "micro_batch": 2, "sequence_parallel": True, "zero": 1,
        "optimizer": Optimizer(settings={"lr": 0.1}, threshold_bytes=1),
    },
    "dp 2 cp 2 tp 2": {"dp": 2, "cp": 2, "tp": 2, "micro_batch": 2},
}  # fmt: skip


RECOMPUTE = ["none", "memory_bound", "selective", "selective_op", "full"]


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("name", DEGREES)
def test_a_plan_trains_as_one_device_does(name, recompute):
    """Each of the two models meets all degrees and every recomputation, in turn."""
    config = (LLAMA, GPT)[(list(DEGREES).index(name) + RECOMPUTE.index(recompute)) % 2]
    check_training(planned(config, recompute=recompute, **DEGREES[name]), config)


def test_one_head_of_keys_and_values_serves_all_ranks():
    config = dataclasses.replace(LLAMA, num_kv_heads=1)
    check_training(planned(config, tp=4, sequence_parallel=True, recompute="full"), config)


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("interleaved_1f1b", 2), ("looped_bfs", 2), ("zb_v", 1), ("v_half", 1), ("dualpipe_v", 2)]
)
def test_chunks_train_as_one_device_does(schedule, virtual):
    config = dataclasses.replace(LLAMA, num_layers=4)
    plan = planned(config, pp=2, tp=2, micro_batch=1, schedule=schedule, virtual=virtual, sequence_parallel=True)
    owners = [stage.mesh.rank_list[0] // 2 for stage in plan.stages]
    assert owners == ([0, 1, 0, 1] if virtual == 2 and schedule != "dualpipe_v" else [0, 1, 1, 0])
    check_training(plan, config)


def test_a_tied_table_trains_on_a_v_shaped_pipeline():
    config = dataclasses.replace(GPT, num_layers=4, tied=True)
    check_training(planned(config, pp=2, tp=2, micro_batch=1, schedule="zb_v"), config)


def test_a_tied_table_on_two_stages_is_refused_with_a_way_out():
    with pytest.raises(TwofoldError, match=r"zb_v, or untie the head: tf.transformer\(..., tied=False\)"):
        planned(dataclasses.replace(GPT, tied=True), pp=2)
    assert len(uniform_plan(transformer("gpt3-125m", tied=False), MACHINE, pp=2).stages) == 2


# -- communication -----------------------------------------------------------------------------------------------------


def collectives(plan: Plan, label: str, prefix: str = "") -> Counter[tuple[str, tuple[str, ...]]]:
    """Collectives of the first group in one block, by call and axes, of tensors in the second transformer block."""
    group = lower(plan).groups[0]
    return Counter(
        (instruction.call, instruction.axes)
        for block, instruction in group.walk()
        if block.label == label and instruction.kind is Kind.COLLECTIVE and prefix in instruction.name
    )


THREE = dataclasses.replace(LLAMA, num_layers=3)


def per_block(label: str, **options) -> Counter[tuple[str, tuple[str, ...]]]:
    """What one more block adds to a body."""
    two, three = (planned(dataclasses.replace(LLAMA, num_layers=layers), **options) for layers in (2, 3))
    more = collectives(three, label)
    more.subtract(collectives(two, label))
    return +more


def test_tensor_parallel_has_two_all_reduces_forward_and_two_backward():
    assert per_block("0F0", tp=2) == {("all_reduce", ("tp",)): 2}
    assert per_block("0B0", tp=2) == {("all_reduce", ("tp",)): 2}


def test_sequence_parallel_has_two_gathers_and_two_scatters_instead():
    """Korthikanti et al. 2022, section 4.2.2; the backward also reduces the gradients of the norms' weights once."""
    forward = per_block("0F0", tp=2, sequence_parallel=True)
    assert forward == {("all_gather", ("tp",)): 2, ("reduce_scatter", ("tp",)): 2}
    backward = per_block("0B0", tp=2, sequence_parallel=True)
    norms = backward.pop(("all_reduce", ("tp",)), 0)
    assert backward == {("all_gather", ("tp",)): 2, ("reduce_scatter", ("tp",)): 2} and norms <= 2


def test_context_parallel_gathers_keys_and_values():
    assert per_block("0F0", cp=2) == {("all_gather", ("cp",)): 2}
    backward = per_block("0B0", cp=2)
    assert backward[("reduce_scatter", ("cp",))] == 2


def test_sequence_parallel_moves_as_many_bytes_as_tensor_parallel():
    """A ring all-reduce is a reduce-scatter and an all-gather: on the wire they are equal."""

    def on_the_wire(sequence_parallel: bool) -> int:
        group = lower(planned(tp=2, sequence_parallel=sequence_parallel)).groups[0]
        return sum(
            instruction.message_bytes * (2 if instruction.call == "all_reduce" else 1)
            for block, instruction in group.walk()
            if block.label == "0F0" and instruction.kind is Kind.COLLECTIVE and "layers." in instruction.name
        )

    assert on_the_wire(True) == on_the_wire(False) > 0


# -- stages ------------------------------------------------------------------------------------------------------------


def layers_of(plan: Plan) -> list[int]:
    return [len({name.split(".")[1] for name in stage.operators if "layers." in name}) for stage in plan.stages]


@pytest.mark.parametrize(
    ("num_layers", "options", "expected"),
    [
        (126, {"pp": 16}, [7] + [8] * 14 + [7]),  # as Llama 3 405B was trained (arXiv 2407.21783, section 3.3.2)
        (7, {"pp": 2}, [4, 3]),
        (8, {"pp": 2, "schedule": "interleaved_1f1b", "virtual": 2}, [2, 2, 2, 2]),
        (6, {"pp": 4, "layers_per_stage": [0, 3, 3, 0]}, [0, 3, 3, 0]),
    ],
)
def test_blocks_are_spread_over_chunks(num_layers, options, expected):
    plan = planned(dataclasses.replace(LLAMA, num_layers=num_layers), micro_batch=1, **options)
    assert layers_of(plan) == expected
    assert plan.stages[0].operators[0] == "tok_embeddings" and plan.stages[-1].operators[-1] == "loss"


def test_micro_batches_count_samples_of_one_data_parallel_rank():
    plan = planned(batch=24, dp=4, micro_batch=2)
    assert plan.num_micro_batches == 3 and plan.micro_graph.batch_size == 8
    assert planned(batch=24, dp=4).num_micro_batches == 1


def test_a_plan_file_keeps_a_stated_plan():
    plan = planned(dp=2, tp=2, pp=2, micro_batch=1, sequence_parallel=True, recompute="full")
    assert plan_from_json(plan_to_json(plan)) == plan


@pytest.mark.parametrize("degrees", [(128, 8, 16), (800, 8, 16)])
def test_ten_thousands_of_ranks(degrees):
    dp, tp, pp = degrees
    graph = transformer("llama-3-405b", batch_size=2 * dp)
    plan = uniform_plan(graph, MACHINE, dp=dp, tp=tp, pp=pp, micro_batch=1, sequence_parallel=True, recompute="full")
    assert plan.num_ranks == dp * tp * pp and len(plan.stages) == pp


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 3}, "4 query heads cannot be split over tp 3: 4 % 3 != 0"),
        ({"cp": 3}, "8 tokens per sample cannot be split over cp 3"),
        ({"cp": 4, "tp": 4, "sequence_parallel": True}, "8 tokens per sample cannot be split over cp 4 x tp 4"),
        ({"pp": 3}, "2 blocks cannot fill 3 chunks"),
        ({"pp": 2, "layers_per_stage": [1, 2]}, r"layers \(1, 2\) add up to 3; transformer has 2 blocks"),
        ({"pp": 3, "layers_per_stage": [1, 0, 1]}, "leaves nothing for chunk 1"),
        ({"dp": 3}, "a global batch of 8 does not divide by dp.3. .* 8 % 3 != 0; the next valid batch is 9"),
        ({"dp": 2, "micro_batch": 3}, "8 % 6 != 0; the next valid batch is 12"),
        ({"pp": 2, "virtual": 2}, "1f1b.* cannot take virtual=2"),
        ({"recompute": "all"}, "recompute must be one of none, memory_bound, selective"),
        ({"tp": 0}, "tp must be a whole number of at least 1, not 0"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(options, message):
    with pytest.raises(TwofoldError, match=message):
        planned(**options)


def test_an_unsplittable_vocabulary_suggests_padding():
    with pytest.raises(TwofoldError, match=r"50257 % 2 != 0; pad it.*vocab=50432"):
        uniform_plan(transformer("gpt2", num_layers=1), MACHINE, tp=2)


def test_the_optimizer_keeps_its_level_unless_another_is_given():
    sharded = Optimizer(kind="adamw", settings={"lr": 1e-4}, parallel_level=2)
    assert planned(dp=2, optimizer=sharded).optimizer.parallel_level == 2
    assert planned(dp=2, optimizer=sharded, zero=0).optimizer.parallel_level == 0
    assert planned(dp=2).optimizer.parallel_level == 0
