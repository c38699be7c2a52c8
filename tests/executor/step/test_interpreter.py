"""The interpreter on one rank: training equals plain torch, memory is the program's, errors name what is wrong."""

import itertools

import numpy as np
import pytest
import torch

from executor.device import Device, pick_device
from executor.step.count import Communication, compare
from executor.step.head_start import behind_weight_gradients
from executor.step.interpreter import Interpreter
from executor.step.memory import memory_peak
from executor.train.options import RunOptions
from executor.train.result import RankResult, spans_of
from executor.train.run import run_rank
from plans.degrees import Degrees
from plans.degrees.plan import plan_of
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower import lower
from plans.model.transformer import TransformerConfig, transformer
from plans.optimizer import Optimizer
from plans.program import Block, Body, GroupProgram, Instruction, Kind, Program, Scope, Value
from simulator.timeline.memory import peak_of_order
from tests.support.small_training import batches, one_rank, parameters, trained

CPU = Device(kind="cpu")


def interpreter(plan, **rest):
    made = Interpreter(lower(plan), 0, CPU, **rest)
    made.set_parameters(parameters())
    return made


def compute(name, call, inputs, outputs, frees=(), **attrs):
    return Instruction(
        name=name, kind=Kind.COMPUTE, call=call, part="F", inputs=inputs, outputs=outputs, frees=frees, attrs=attrs
    )


def program(*instructions, values, loss=None):
    body = Body(name="body", instructions=instructions)
    group = GroupProgram(
        mesh=Layout((1,), ("dp",)), values={value.name: value for value in values}, loss=loss,
        blocks=(Block(label="0F0", micro_batch=0, body=body),),
    )  # fmt: skip
    return Program(groups=(group,), num_micro_batches=1)


def value(name, size, **rest):
    return Value(name=name, shape=(size,), **rest)


def test_one_micro_batch_is_plain_torch_bit_for_bit():
    rank = interpreter(one_rank())
    losses = [rank.step(batch).item() for batch in batches(6)]
    expected, weights = trained(6)
    assert losses == expected
    for placement in rank.group.parameters:
        np.testing.assert_array_equal(rank.kept(placement).numpy(), weights[placement.name])


@pytest.mark.parametrize("num_micro_batches", [2, 4, 8])
@pytest.mark.parametrize("recompute", [(), ("act",)])
def test_micro_batches_and_recompute_change_only_rounding(num_micro_batches, recompute):
    rank = interpreter(one_rank(num_micro_batches=num_micro_batches, recompute=recompute))
    losses = [rank.step(batch).item() for batch in batches(6)]
    np.testing.assert_allclose(losses, trained(6)[0], rtol=2e-6)


def test_set_parameters_starts_again():
    rank = interpreter(one_rank(optimizer=Optimizer(kind="adamw", settings={"lr": 0.1})))
    first = [rank.step(batch).item() for batch in batches(3)]
    rank.set_parameters(parameters())
    assert [rank.step(batch).item() for batch in batches(3)] == first


def test_values_that_are_not_kept_are_gone_after_a_step():
    rank = interpreter(one_rank(num_micro_batches=2))
    rank.step(batches(1)[0])
    kept = {name for name, each in rank.group.values.items() if each.scope is Scope.KEPT}
    assert sum(each is not None for each in rank._env) == len(kept)


def test_recording_gives_one_compute_span_per_instruction_in_order():
    rank = interpreter(one_rank(num_micro_batches=2))
    loss, recorded = rank.record(batches(1)[0])
    spans = spans_of(rank.codes, [recorded])
    assert loss is not None
    assert [spans.names[each][0] for each in spans.name_index] == [code.id for code in rank.codes]
    assert (np.diff(spans.start_ns) >= 0).all() and (spans.start_ns[1:] >= spans.end_ns[:-1]).all()
    assert recorded.start_ns <= spans.start_ns[0] and spans.end_ns[-1] <= recorded.end_ns


# -- memory ------------------------------------------------------------------------------------------------------------


def test_peak_counts_outputs_before_frees_and_shared_memory_once():
    values = [
        value("w", 4, scope=Scope.KEPT, role="weight"),
        value("a", 10),
        value("b", 20),
        value("view", 20, shares="b"),
        value("c", 5, role="gradient"),
    ]
    made = program(
        compute("1", "relu.forward", ("w",), ("a",)),
        compute("2", "relu.forward", ("a",), ("b",), frees=("a",)),
        compute("3", "reshape.forward", ("b",), ("view",)),
        compute("4", "relu.forward", ("view",), ("c",), frees=("b", "view")),
        values=values,
    )
    peak = memory_peak(made.groups[0], rank=0)
    assert peak.peak_bytes == 4 * (4 + 10 + 20)
    assert peak.by_role == {"weight": 16, "activation": 120}


@pytest.mark.parametrize("plan", [one_rank(), one_rank(num_micro_batches=4, recompute=("act",))])
def test_peak_is_the_simulators(plan):
    (group,) = lower(plan).groups
    assert memory_peak(group, 0) == peak_of_order(group)


def test_memory_limit_names_the_instruction_that_exceeds_it():
    peak = interpreter(one_rank()).peak.peak_bytes
    assert interpreter(one_rank(), memory_limit_bytes=peak).peak.peak_bytes == peak
    with pytest.raises(TwofoldError, match=rf"limit of {peak - 1} bytes at '.*/.*'; the step needs {peak} bytes"):
        interpreter(one_rank(), memory_limit_bytes=peak - 1)


def test_first_step_catches_a_value_of_another_shape_than_declared():
    made = program(
        compute("go", "relu.forward", ("w",), ("a",)), values=[value("w", 4, scope=Scope.KEPT), value("a", 5)]
    )
    rank = Interpreter(made, 0, CPU)
    rank._env[0] = torch.zeros(4)
    with pytest.raises(AssertionError, match="0F0/go made a as"):
        rank.step({})


# -- errors ------------------------------------------------------------------------------------------------------------


def test_batch_that_lacks_an_input():
    with pytest.raises(TwofoldError, match="lacks the input 't'"):
        interpreter(one_rank()).step({"x": batches(1)[0]["x"]})


@pytest.mark.parametrize("bad", [np.zeros((7, 2), np.float32), np.zeros((8, 2))])
def test_batch_of_another_shape_or_dtype(bad):
    with pytest.raises(TwofoldError, match=r"input 't' was fed as .* the plan takes 8 rows of torch\.float32"):
        interpreter(one_rank()).step(batches(1)[0] | {"t": bad})


def test_parameter_that_is_missing_or_has_another_shape():
    rank = interpreter(one_rank())
    with pytest.raises(TwofoldError, match="parameter 'w1'"):
        rank.set_parameters({})
    with pytest.raises(TwofoldError, match=r"'b2' has the shape \(3,\)"):
        rank.set_parameters(parameters() | {"b2": np.zeros(3, np.float32)})


def test_an_error_names_its_instruction():
    made = program(
        compute("go", "linear.forward", ("w", "w"), ("a",)),
        values=[value("w", 4, scope=Scope.KEPT), value("a", 4)],
    )
    rank = Interpreter(made, 0, CPU)
    rank._env[0] = torch.zeros(4, 3)[:, :2]
    with pytest.raises(AssertionError) as caught:
        rank.step({})
    assert "in instruction 0F0/go (linear.forward) of step 1 on rank 0" in caught.value.__notes__


def test_wait_without_an_issuer():
    wait = Instruction(name="w", kind=Kind.WAIT, call="wait", part="C", waits="token")
    made = program(wait, values=[value("token", 0, role="token")])
    with pytest.raises(TwofoldError, match="0F0/w waits for 'token'"):
        Interpreter(made, 0, CPU)


def test_unknown_device_is_refused():
    with pytest.raises(TwofoldError, match="'tpu' is not known"):
        pick_device("tpu")


def test_more_steps_than_data():
    with pytest.raises(TwofoldError, match="ended after 2 of 3 steps"):
        run_rank(lower(one_rank()), None, batches(2), parameters(), 3, device="cpu")


# -- results and counts ------------------------------------------------------------------------------------------------


def test_run_of_one_rank_and_its_file(tmp_path):
    seen = []
    weights_path = tmp_path / "weights.npz"
    result = run_rank(
        lower(one_rank()), one_rank(), batches(4), parameters(), 4, device="cpu", weights_path=weights_path,
        options=RunOptions(record_steps=2, on_step=lambda step, loss: seen.append((step, loss))),
    )  # fmt: skip
    losses, weights = trained(4)
    assert result.losses.tolist() == losses and seen == list(enumerate(losses))
    assert result.differences == () and result.num_communications == 0
    with np.load(weights_path) as file:
        assert {name: file[name].tolist() for name in file.files} == {name: w.tolist() for name, w in weights.items()}
    again = RankResult.load(result.save(tmp_path / "rank.npz"))
    assert again.losses.tolist() == losses and again.peak == result.peak
    assert again.spans.names == result.spans.names and len(again.spans.step_start_ns) == 2
    assert (again.spans.end_ns == result.spans.end_ns).all() and (again.step_s == result.step_s).all()


def test_result_file_that_is_none(tmp_path):
    path = tmp_path / "rank.npz"
    path.write_bytes(b"no zip")
    with pytest.raises(TwofoldError, match=r"the result of a rank is not an \.npz file"):
        RankResult.load(path)


def test_compare_lists_missing_and_extra_communication():
    one = Communication(kind="all_reduce", num_bytes=8, ranks=(0, 1))
    two = Communication(kind="send", num_bytes=4, ranks=(0, 1))
    assert compare({one: 2, two: 1}, {one: 2, two: 1}, 0) == []
    assert compare({one: 2}, {one: 1, two: 3}, 0) == [
        "rank 0: all_reduce of 8 bytes on ranks [0, 1] planned 2 times, executed 1 times",
        "rank 0: send of 4 bytes on ranks [0, 1] planned 0 times, executed 3 times",
    ]


@pytest.mark.parametrize(("degrees", "per_layer"), [({"tp": 2}, 2), ({"dp": 2}, 0)])
def test_reductions_of_input_gradients_begin_before_all_weight_gradients_of_their_readers(degrees, per_layer):
    layers = 3
    config = TransformerConfig(
        name="small", num_layers=layers, hidden=16, num_heads=2, ffn=32, vocab=32, seq=8, dtype="float32"
    )
    degrees = Degrees(global_batch=2, micro_batch=1, **degrees)
    plan = plan_of(degrees, transformer(config, batch_size=2))
    group = lower(plan).groups[0]
    instructions = next(block.body.instructions for block in group.blocks if block.label.startswith("0B"))
    assert not behind_weight_gradients(instructions, group.values, 132)  # so small that they leave room
    ahead = sorted(behind_weight_gradients(instructions, group.values, 8))
    assert len(ahead) == per_layer * layers + (per_layer > 0)  # the head too
    hidden = [
        [
            each.operator.rsplit(".", 1)[-1]
            for each in itertools.takewhile(lambda each: each.part == "W", instructions[at + 1 :])
        ]
        for at in ahead[1:]
    ]
    assert [set(names) for names in hidden] == [{"w1", "w3"}, {"wq", "wk", "wv"}] * (len(ahead) // 2)
