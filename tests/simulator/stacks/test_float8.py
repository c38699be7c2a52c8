"""Linears in float8: which products, what is read to make their operands, what a table says of them."""

import math

import pytest

from costmodels import Machine
from interop.measurements.cells import Skip
from interop.measurements.rows import case_of
from plans.degrees import Degrees
from plans.model.transformer import named_config
from simulator.forecast import forecast
from simulator.stacks import stack_named
from simulator.stacks.products import RECIPES
from simulator.stacks.steps import Kernel, Message
from tests.interop.measurements.test_tables import ROW

X, WIDE, NARROW = (2, 64, 128), (256, 128), (128, 256)
MADE = (2, 64, 256)
SMALL = {"gpu_count": "8", "pp": "1", "dp": "4"}


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
        step for step in RECIPES["torchao"]["float8"].steps(BLOCK)
        if isinstance(step, Kernel) and step.call.startswith("linear")
    ]  # fmt: skip
    assert [step.dtype for step in products] == 3 * ["float8"] + 2 * ["float8_precise"]
    assert products[0].touched_bytes == math.prod(X) + math.prod(WIDE) + 2 * math.prod(MADE)


def test_an_input_that_several_products_share_is_cast_once():
    casts = [
        step
        for step in RECIPES["torchao"]["float8-rowwise"].steps(BLOCK[3:5] + BLOCK[1:2])
        if step.call == "add.forward"
    ]
    by_shape = [step.shapes[0] for step in casts]
    assert by_shape.count(X) == 1 and by_shape.count(WIDE) == 2
    assert casts[0].touched_bytes == round(1.9 * 2 * math.prod(X))


def test_cast_weights_are_gathered_in_half_the_bytes():
    gathers = {
        recipe: next(step for step in RECIPES["torchao"][recipe].steps(BLOCK) if isinstance(step, Message))
        for recipe in ("float8", "float8-rowwise")
    }
    assert gathers["float8"].size_bytes == 2048 and gathers["float8-rowwise"].size_bytes == 4096


def test_transformer_engine_multiplies_experts_in_float8_and_torchao_does_not():
    """One matrix for each of 4 experts; the scores of attention, with a batch and heads, stay as they are."""
    experts = kernel("matmul.grad1", (4, 8, 64), (4, 8, 32), (4, 32, 64))
    scores = kernel("matmul.forward", (2, 4, 8, 64), (2, 4, 64, 8), (2, 4, 8, 8))
    made = {library: RECIPES[library]["float8"].steps([*BLOCK[1:2], experts, scores]) for library in RECIPES}
    assert made["torchao"][1:] == [experts, scores]
    assert [step.dtype for step in made["engine"] if step.call.startswith("matmul")] == ["float8_precise", "bfloat16"]


def test_a_body_without_attention_stays_as_it_is():
    head = [kernel("linear.forward", X, WIDE, MADE)]
    assert RECIPES["torchao"]["float8"].steps(head) == head


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


@pytest.mark.parametrize(
    ("text", "device", "stacks"),
    [("MXFP8", "B200", ("megatron-mxfp8",)), ("fp8 blockwise", "H100", ("megatron-float8-block",)),
     ("FP8-SC", "H100", ("megatron-float8-block",)), ("nvfp4", "GB300", ("megatron-nvfp4",)),
     ("FP8 (delayed scaling)", "H100", ("megatron-float8",)), ("FP8_CS", "H100", ("megatron-float8-current",)),
     ("fp8", "H100", ("megatron-float8", "megatron-float8-current")),
     ("FP8", "GB200", ("megatron-mxfp8", "megatron-float8-current")), ("TF32", "A100", ("megatron-tf32",)),
     ("fp32", "A100", ("megatron", "megatron-tf32"))],
)  # fmt: skip
def test_precisions_of_products_and_ambiguous_names(text, device, stacks):
    row = ROW | {
        "precision": text,
        "gpu_type": device,
        "gpu_count": "8",
        "pp": "1",
        "dp": "4",
        "source": "Megatron-core",
    }
    case = case_of(row, 1)
    assert (case.stack, *case.other_stacks) == stacks


@pytest.mark.parametrize(
    ("source", "device", "others"),
    [("NeMo", "H100", ("megatron-float8",)), ("NeMo", "A100", ()), ("Megatron-LM", "H100", ())],
)
def test_a_precision_that_is_not_stated_may_be_float8_where_software_and_device_often_are(source, device, others):
    case = case_of(ROW | SMALL | {"precision": "", "gpu_type": device, "source": source}, 1)
    assert case.config.dtype == "bfloat16" and tuple(each for each in case.other_stacks if "float8" in each) == others


@pytest.mark.parametrize(
    ("text", "device"), [("MXFP8", "H100"), ("fp8", "A100"), ("NVFP4", "H200"), ("float8 rowwise", "V100")]
)
def test_products_that_a_device_does_not_have_are_refused_by_name(text, device):
    row = ROW | SMALL | {"precision": text, "gpu_type": device}
    with pytest.raises(Skip, match="has no"):
        case_of(row, 1)


def test_narrower_products_are_faster():
    config, degrees = named_config("llama-3-70b"), Degrees(dp=8, tp=8, micro_batch=1, global_batch=64, recompute="full")
    machine = Machine.load("gb200-x72")
    found = [
        forecast(config, degrees, machine, stack=stack_named(name))
        for name in ("megatron", "megatron-mxfp8", "megatron-nvfp4")
    ]
    assert found[0].step_s > found[1].step_s > found[2].step_s > found[0].step_s / 4
