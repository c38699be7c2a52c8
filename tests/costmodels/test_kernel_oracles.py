"""Times, bytes and operations of single steps against plain loops and closed forms written from their descriptions."""

import itertools
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest

from costmodels import Machine
from costmodels.fit.curves import product_rates
from costmodels.machine.machine import Compute
from costmodels.price.recurrent import recurrent_s
from costmodels.price.tiled import ProductTerms, Tiled, tiled_s
from executor.data.sources import usual_data
from plans.layout import Layout, TensorLayout
from plans.lower.symbolic.template import ParameterTemplate
from plans.model.flops import necessary_flops
from plans.model.graph import Tensor
from plans.model.transformer import transformer, transformer_config
from plans.operators.registry import declare
from plans.optimizer import Optimizer
from plans.redistribution.step import Step, StepKind
from search.devices import Pins, Problem, space
from simulator.estimate.memory import parameter_bytes
from simulator.stacks.dtensor_steps import whole_loss
from simulator.stacks.steps import Kernel, Message

SIDES = ((128, 64), (64, 64))


def plain_loops(shape, model, terms):
    """Seconds of the fastest tile and cut of one product (the docstring of `Tiled`)."""
    (m, n, k), least_s = shape, math.inf
    for (rows, columns), parts in itertools.product({*SIDES, *((c, r) for r, c in SIDES)}, (1, 2, 4, 8, 16, 32)):
        waves = terms.batch * math.ceil(m / rows) * math.ceil(n / columns) / terms.num_cores
        if parts > 1 and waves >= 1:
            continue
        arithmetic_s = terms.form_cost * terms.arithmetic_cost * 2 * 64 * rows * columns / terms.core_flops_per_s
        load_s = terms.memory_cost * 64 * (rows + columns) * terms.item_bytes / model.core_Bps
        hidden_s = terms.arithmetic_cost * model.hidden_s / terms.clock
        depth = math.ceil(k / (64 * parts))
        tile_s = depth * (max(arithmetic_s, load_s, hidden_s) + terms.arithmetic_cost * model.step_s / terms.clock)
        tile_s += model.tile_s / terms.clock + rows * columns * terms.item_bytes / model.core_store_Bps
        waves *= parts
        waves = max(1.0, (1 - model.quantisation) * waves + model.quantisation * math.ceil(waves))
        least_s = min(least_s, waves * tile_s + (model.split_s / terms.clock if parts > 1 else 0.0))
    return least_s


def test_products_in_tiles_take_what_plain_loops_say():
    draw = random.Random(5)
    for _ in range(300):
        model = Tiled(
            tiles=SIDES, tile_s=draw.uniform(0, 2e-6), step_s=draw.uniform(0, 2e-7), hidden_s=draw.uniform(0, 1e-6),
            core_Bps=draw.uniform(1e10, 1e11), core_store_Bps=draw.uniform(1e10, 1e11), split_s=draw.uniform(0, 5e-6),
            quantisation=draw.random(),
        )  # fmt: skip
        terms = ProductTerms(
            core_flops_per_s=draw.uniform(1e11, 5e12), num_cores=draw.choice((8, 132)), batch=draw.choice((1, 3)),
            item_bytes=draw.choice((2, 4)), form_cost=draw.uniform(1, 2), arithmetic_cost=draw.uniform(1, 2),
            memory_cost=draw.uniform(1, 2), clock=draw.uniform(0.5, 1),
        )  # fmt: skip
        shape = tuple(round(2 ** draw.uniform(4, 13)) for _ in range(3))
        (found,) = tiled_s(np.array([shape], dtype=float), terms, model)
        assert found == pytest.approx(plain_loops(shape, model, terms), rel=1e-12), (shape, model, terms)


def slow_memory(**rest):
    """A device on which every product waits for its memory."""
    return Compute(
        matrix_flops_per_s={"bfloat16": 1e18}, vector_flops_per_s={"float32": 1e18}, memory_Bps=1e9, sharpness=64.0,
        **rest,
    )  # fmt: skip


def test_rates_of_products_that_wait_for_memory_follow_from_their_bytes():
    for rows, flops_per_s in product_rates(slow_memory(), "bfloat16", 96, 160):
        seconds = 2 * (rows * 160 + 96 * 160 + rows * 96) / 1e9
        assert flops_per_s == pytest.approx(2 * rows * 96 * 160 / seconds, rel=1e-6)


def test_a_recurrent_layer_that_waits_for_memory_takes_the_time_of_its_bytes():
    """All inputs in one product; then the rows of a step, whose weights stay in the caches, read and written."""
    batch, length, width, hidden = 6, 10, 24, 40
    shapes = ((batch, length, width), (4 * hidden, width), (4 * hidden, hidden))
    inputs = batch * length * (4 * hidden + width) + 4 * hidden * width
    step = batch * (4 * hidden + hidden)
    found = recurrent_s(slow_memory(), "recurrent.forward", shapes, 1e18, 2)
    assert found == pytest.approx(2 * (inputs + length * step) / 1e9, rel=1e-6)


def test_attention_needs_three_times_the_operations_of_its_forward_in_training():
    """Each of its two products has two gradients; scores that the kernel computes again are not needed."""
    graph = transformer("llama-2-7b", batch_size=2, num_layers=2)
    needed = 0.0
    for operator in graph.operators:
        spec, trained = graph.spec(operator), graph.trained_inputs(operator)
        gradients = sum(spec.gradients[index].flops for index in trained)
        needed += 3 * spec.flops if operator.kind == "attention" else spec.flops + gradients
    assert sum(operator.kind == "attention" for operator in graph.operators) == 2
    assert sum(necessary_flops(graph).values()) == needed


@pytest.mark.parametrize("top_k", [1, 2])
def test_combining_experts_multiplies_and_adds_every_number_once_for_each_of_them(top_k):
    batch, tokens, hidden, experts, capacity = 3, 5, 7, 4, 6
    spec = declare(
        "combine", ((experts, batch * capacity, hidden), (batch, tokens, experts)), ((batch, tokens, hidden),),
        {"top_k": top_k, "capacity": capacity}, "y",
    )  # fmt: skip
    assert spec.flops == 2 * top_k * batch * tokens * hidden


def test_the_loss_on_gathered_logits_takes_those_of_all_ranks():
    columns, rows, ways = 96, 8, 4
    product = Kernel(
        call="linear.forward", shapes=((rows, 16), (columns, 16), (rows, columns)), dtype="bfloat16", touched_bytes=0
    )
    message = Message(call="all_reduce", axes=("tp",), size_bytes=4 * rows, item_bytes=4, operator="loss")
    _, gathered, wait, joined = whole_loss([product, message, Message(call="wait")], ways)
    whole_bytes = 2 * rows * columns * ways
    assert (gathered.size_bytes, gathered.item_bytes, wait.call) == (whole_bytes, 2, "wait")
    assert joined.touched_bytes == 2 * whole_bytes  # read and written


@pytest.mark.parametrize(("level", "master"), [*itertools.product(range(4), ["float32", None])])
def test_a_rank_keeps_the_bytes_that_its_optimizer_level_says(level, master):
    """ZeRO (Rajbhandari et al., arXiv 1910.02054): level 1 shards states, 2 gradients, 3 weights; what is gathered of a
    sharded weight is kept beside the shard, which is the master where there is one."""
    count, shards = 1000, 8
    optimizer = Optimizer(kind="adamw", parallel_level=level, master_dtype=master)
    parameter = ParameterTemplate(name="w", elements=0, dtype="bfloat16", whole=0, summed=(), same=())
    found = parameter_bytes([parameter], [count], optimizer, shards)
    shard = count // shards
    weight = 2 * ((count if level < 3 else 0) + (shard if level and master is None else 0))
    kept = shard if level else count
    states = {None: 2 * 2, "float32": 3 * 4}[master]
    assert (found["weight"], found["optimizer"]) == (weight, states * kept)


@pytest.mark.parametrize("num_layers", [16, 22])
def test_all_numbers_of_chunks_that_have_a_block_are_searched(num_layers):
    problem = Problem(
        config=transformer_config("llama-3-8b", num_layers=num_layers), machine=Machine.load("h200-x8"),
        num_devices=8, global_batch=16, pins=Pins(schedule="interleaved_1f1b"),
    )  # fmt: skip
    found = {each.virtual for each in space.shapes(problem, 2)}
    assert found == {virtual for virtual in range(2, space.MAX_VIRTUAL + 1) if 2 * virtual <= num_layers + 2}


def test_transfers_keep_terms_and_the_number_of_dims():
    def layout(ranks, dims, partial=()):
        return TensorLayout(mesh=Layout((2,), ("dp",), ranks), dims=dims, partial=partial)

    whole, other = layout((0, 1), ((), ())), layout((2, 3), (("dp",), ()))
    assert Step(kind=StepKind.TRANSFER, before=whole, after=other).is_consistent()
    for after in (layout((2, 3), ((),)), layout((2, 3), ((), ()), ("dp",))):
        assert not Step(kind=StepKind.TRANSFER, before=whole, after=after).is_consistent()


def test_digits_are_the_usual_data_of_their_shapes_alone():
    def graph(*shape):
        inputs = (Tensor(name="x", shape=(4, *shape)), Tensor(name="labels", shape=(4,), dtype="int64"))
        return SimpleNamespace(inputs=inputs)

    assert usual_data(graph(1, 28, 28)) == "digits"
    for shape in ((1, 28, 29), (1, 29, 28), (3, 28, 28), (28, 28), (784,)):
        assert usual_data(graph(*shape)) == "random"
