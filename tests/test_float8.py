"""Linears in float8: which products, what is read to make their operands, what a table says of them."""

import math

import pytest
from test_tables import ROW

from costmodels import Machine
from interop.measurements.rows import Skip, case_of
from plans.degrees import Degrees
from plans.model.transformer import named_config
from simulator.forecast import forecast, stack_named
from simulator.stacks.base import Kernel, Message
from simulator.stacks.float8 import FLOAT8_RECIPES

X, WIDE, NARROW = (2, 64, 128), (256, 128), (128, 256)
MADE = (2, 64, 256)


def kernel(call, *shapes):
    return Kernel(call=call, shapes=shapes, dtype="bfloat16", touched_bytes=2 * sum(map(math.prod, shapes)))


BLOCK = [
    kernel("linear.forward", X, WIDE, MADE),
    kernel("attention.forward", MADE, MADE, MADE, MADE),
    Message(call="all_gather", axes=("tp",), size_bytes=4096, item_bytes=2, token=1),
    kernel("linear.forward", X, WIDE, MADE),
    kernel("linear.forward", X, WIDE, MADE),
    kernel("linear.grad0", MADE, WIDE, X),
    kernel("linear.grad1", MADE, X, WIDE),
]


def test_products_read_a_byte_and_write_two():
    products = [
        step for step in FLOAT8_RECIPES["tensorwise"].steps(BLOCK)
        if isinstance(step, Kernel) and step.call.startswith("linear")
    ]  # fmt: skip
    assert [step.dtype for step in products] == 3 * ["float8"] + 2 * ["float8_precise"]
    assert products[0].touched_bytes == math.prod(X) + math.prod(WIDE) + 2 * math.prod(MADE)


def test_an_input_that_several_products_share_is_cast_once():
    casts = [step for step in FLOAT8_RECIPES["rowwise"].steps(BLOCK[3:5] + BLOCK[1:2]) if step.call == "add.forward"]
    by_shape = [step.shapes[0] for step in casts]
    assert by_shape.count(X) == 1 and by_shape.count(WIDE) == 2
    assert casts[0].touched_bytes == 1.5 * 2 * math.prod(X)


def test_what_is_cast_is_gathered_in_half_the_bytes():
    gathers = {
        recipe: next(step for step in FLOAT8_RECIPES[recipe].steps(BLOCK) if isinstance(step, Message))
        for recipe in ("tensorwise", "rowwise")
    }
    assert gathers["tensorwise"].size_bytes == 2048 and gathers["rowwise"].size_bytes == 4096


def test_a_body_without_attention_stays_as_it_is():
    head = [kernel("linear.forward", X, WIDE, MADE)]
    assert FLOAT8_RECIPES["tensorwise"].steps(head) == head


@pytest.mark.parametrize(("stack", "base"), [("torchtitan-compile-float8", "torchtitan-compile"),
                                             ("megatron-float8", "megatron")])  # fmt: skip
def test_float8_gains_on_large_layers_and_less_than_twice(stack, base):
    config, degrees = named_config("llama-3-70b"), Degrees(dp=8, tp=8, micro_batch=1, global_batch=64, recompute="full")
    machine = Machine.load("h100-sxm-x64")
    slow, fast = (forecast(config, degrees, machine, stack=stack_named(name)).step_s for name in (base, stack))
    assert 1.1 < slow / fast < 2.0


@pytest.mark.parametrize(
    ("change", "stack"),
    [({"source": "pytorch/torchtitan", "precision": "float8 rowwise", "compile": "y"},
      "torchtitan-compile-float8-rowwise"),
     ({"source": "pytorch/torchtitan", "precision": "float8", "async_tp": "y"}, "torchtitan-async-float8"),
     ({"precision": "FP8 (hybrid)"}, "megatron-float8")],
)  # fmt: skip
def test_tables_name_recipes(change, stack):
    case = case_of(ROW | {"pp": "1", "dp": "8"} | change, 1)
    assert case.stack == stack and case.config.dtype == "bfloat16"
    assert any("float8" in told for told in case.assumed)


@pytest.mark.parametrize("text", ["MXFP8", "fp8 blockwise", "nvfp4"])
def test_scales_of_blocks_are_refused_by_name(text):
    with pytest.raises(Skip, match="not modelled"):
        case_of(ROW | {"precision": text}, 1)
