"""When a stage receives: one action ahead, beside its compute, or as the action begins that needs it."""

from functools import cache

import msgspec
import numpy as np
import pytest

from costmodels import Machine
from costmodels.price.instruction import Cost
from executor.data.batches import rows_of_rank
from executor.train.run import run_rank
from plans.degrees import Degrees
from plans.degrees.plan import plan_of
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower import lower
from plans.model.transformer import transformer, transformer_config
from plans.optimizer import Optimizer
from plans.plan import RECEIVES
from simulator import simulate
from simulator.engine.run import run_program
from simulator.forecast.predict import step_forecast
from simulator.timeline.memory import peak_of_order
from tests.plans.lower.test_interleave import check_training
from tests.support.on_ranks import run_on_ranks
from tests.support.random_plans import random_plan
from tests.support.small_training import batches, parameters, plan, trained


def two_stages(receives, num_micro_batches=4, schedule="gpipe"):
    return plan(
        (Layout((1,), ("a",), (0,)), ("fc1", "act")), (Layout((1,), ("a",), (1,)), ("fc2", "loss")),
        num_micro_batches=num_micro_batches, schedule=schedule, receives=receives,
        optimizer=Optimizer(kind="adamw", settings={"lr": 0.1}),
    )  # fmt: skip


def last_forward_ps(of, forward_ps, transfer_ps):
    """When stage 1 ends its last forward, if products of the forward and transfers are all that takes time."""

    def cost_of(each, _):
        if each.call == "transfer":
            return Cost(0, transfer_ps)
        return Cost(0, forward_ps if each.call == "linear.forward" else 0)

    spans = run_program(lower(of), cost_of).spans()
    return max(span.end_ps for span in spans if span.rank == 1 and span.call == "linear.forward")


@pytest.mark.parametrize("count", [1, 4, 8])
def test_early_receives_overlap_compute_and_late_ones_do_not(count):
    ahead, needed = (last_forward_ps(two_stages(each, count), 10, 3) for each in ("ahead", "needed"))
    assert ahead == 10 + 3 + count * 10
    assert needed == 10 + count * (3 + 10)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_receive_directly_precedes_the_action_that_needs_it(schedule):
    for group in lower(two_stages("needed", schedule=schedule)).groups:
        labels = [block.label for block in group.blocks]
        received = [at for at, label in enumerate(labels) if label.endswith(".recv")]
        assert len(received) == 4
        assert all(labels[at] == f"{labels[at + 1]}.recv" for at in received)


@pytest.mark.parametrize("seed", [0, 4, 8, 12])
def test_random_plans_train_as_one_device_does(seed):
    of = msgspec.structs.replace(random_plan(seed), receives="needed")
    check_training(of)


def on_ranks(rank, folder):
    of = two_stages("needed", schedule="1f1b")
    result = run_rank(lower(of), of, rows_of_rank(of, rank, batches(4)), parameters(), 4, device="cpu")
    assert result.differences == ()
    np.save(folder / f"{rank}.npy", result.losses)


@pytest.mark.ranks
def test_ranks_that_receive_when_needed_train(tmp_path):
    run_on_ranks(on_ranks, 2, tmp_path)
    losses, _ = trained(4, "adamw")
    np.testing.assert_allclose(np.load(tmp_path / "1.npy"), losses, rtol=1e-5)


def test_unknown_words_are_refused():
    with pytest.raises(TwofoldError, match="receives 'late' is not known: ahead or needed"):
        two_stages("late")
    with pytest.raises(TwofoldError, match="receives must be ahead or needed, not 'late'"):
        Degrees(receives="late")


NINE_LAYERS = transformer_config("llama-3-8b", num_layers=9)


@cache
def program_of(degrees):
    return lower(plan_of(degrees, transformer(NINE_LAYERS, batch_size=degrees.global_batch)))


@pytest.mark.parametrize(
    ("schedule", "virtual", "num_micro_batches"),
    [
        ("gpipe", 1, 24), ("1f1b", 1, 5), ("1f1b", 1, 64), ("interleaved_1f1b", 2, 24), ("zb_h1", 1, 24),
        ("zb_v", 2, 8), ("looped_bfs", 2, 24), ("v_half", 2, 12),
    ],
)  # fmt: skip
@pytest.mark.parametrize("machine", ["quiet", "whole"])
def test_forecasts_of_receives_when_needed_are_the_engine(schedule, virtual, num_micro_batches, machine):
    on = Machine.load("h100-sxm-x8")
    on = msgspec.structs.replace(on, overlap=()) if machine == "quiet" else on
    steps, peaks = {}, {}
    for receives in RECEIVES:
        degrees = Degrees(
            pp=4, tp=2, global_batch=num_micro_batches, schedule=schedule, virtual=virtual, receives=receives
        )
        program, step = program_of(degrees), step_forecast(NINE_LAYERS, degrees, on)
        steps[receives] = int(simulate(program, on, num_steps=1, with_memory=False).step_end_ps[0])
        assert step.end_ps() == pytest.approx(steps[receives], rel=0 if machine == "quiet" else 0.02)
        peaks[receives] = [peak for peak, _ in step.peaks]
        assert peaks[receives] == [peak_of_order(group).peak_bytes for group in program.groups]
    if machine == "quiet":  # else receives beside compute slow it
        assert steps["needed"] > steps["ahead"]
    assert all(own <= other for own, other in zip(peaks["needed"], peaks["ahead"], strict=True))
