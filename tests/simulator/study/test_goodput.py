"""Checkpoints and failures: closed forms against a play-out, against limits, and against Young's first order."""

import math

import pytest

from plans.errors import TwofoldError
from simulator import Checkpoints, Failures, goodput
from simulator.study.goodput import best_interval_s, sampled_goodput


def given(steps: int, write_s: int, restart_s: float, mean_s: float, blocking: bool, stall_s: float = 0.0):
    """A machine of 10 devices with 1 s steps that fails every `mean_s`."""
    return {
        "checkpoints": Checkpoints(
            every_steps=steps, write_Bps=1.0, blocking=blocking, size_bytes=write_s, stall_s=stall_s
        ),
        "failures": Failures(device_mtbf_s=10 * mean_s, restart_s=restart_s),
    }


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize(
    ("steps", "write_s", "restart_s", "mean_s"),
    [(100, 30, 50, 3000.0), (20, 60, 100, 1000.0), (10, 25, 10, 200.0), (200, 1, 1, 500.0), (50, 0, 0, 100.0)],
)
def test_the_closed_form_is_what_playing_it_out_gives(steps, write_s, restart_s, mean_s, blocking):
    case = given(steps, write_s, restart_s, mean_s, blocking, stall_s=0.2 * write_s)
    exact = goodput(1.0, 10, **case)
    played = [sampled_goodput(1.0, 10, **case, num_checkpoints=4000, seed=seed).effective_step_s for seed in range(8)]
    mean = sum(played) / 8
    error = math.sqrt(sum((one - mean) ** 2 for one in played) / 7 / 8)
    assert abs(mean - exact.effective_step_s) < 5 * error + 1e-12
    assert error < 0.02 * mean


def test_equal_seeds_give_equal_results():
    case = given(100, 30, 50, 3000.0, True)
    first, second, other = (sampled_goodput(1.0, 10, **case, num_checkpoints=50, seed=seed) for seed in (1, 1, 2))
    assert first == second != other


def test_rare_failures_cost_only_the_writing():
    blocking = goodput(1.0, 10, **given(100, 30, 50, 1e12, True))
    assert blocking.effective_step_s == pytest.approx(1.30, rel=1e-6)
    assert goodput(1.0, 10, **given(100, 30, 50, 1e12, False)).effective_step_s == pytest.approx(1.0, rel=1e-6)


def test_without_failures_a_checkpoint_costs_its_writing_over_its_steps():
    blocking = Checkpoints(every_steps=20, write_Bps=2e9)
    assert goodput(1.0, 8, checkpoints=blocking, failures=None, checkpoint_bytes=10**10).effective_step_s == 1.25
    beside = Checkpoints(every_steps=20, write_Bps=2e9, blocking=False)
    assert goodput(1.0, 8, checkpoints=beside, failures=None, checkpoint_bytes=10**10).fraction == 1.0
    copied = Checkpoints(every_steps=20, write_Bps=2e9, blocking=False, stall_s=0.4)
    assert goodput(1.0, 8, checkpoints=copied, failures=None, checkpoint_bytes=10**10).effective_step_s == 1.02
    slow = Checkpoints(every_steps=2, write_Bps=2e9, blocking=False)  # the next one waits for it
    assert goodput(1.0, 8, checkpoints=slow, failures=None, checkpoint_bytes=10**10).effective_step_s == 2.5
    slow = Checkpoints(every_steps=2, write_Bps=2e9, blocking=False, stall_s=0.5)  # and then copies
    assert goodput(1.0, 8, checkpoints=slow, failures=None, checkpoint_bytes=10**10).effective_step_s == 2.75
    assert goodput(1.0, 8, checkpoints=None, failures=None).fraction == 1.0


@pytest.mark.parametrize(("write_s", "mean_s", "within"), [(60.0, 86_400.0, 1e-6), (60.0, 3600.0, 5e-5)])
def test_the_best_interval_is_where_the_exact_loss_is_least(write_s, mean_s, within):
    """The derivative of expm1((t + d) / M) / t, the exact time of a unit of work t, is 0 there."""

    def slope(work_s: float) -> float:
        return work_s / mean_s * math.exp((work_s + write_s) / mean_s) - math.expm1((work_s + write_s) / mean_s)

    low_s, high_s = 1e-3, 2 * mean_s
    while high_s - low_s > 1e-6:
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (middle_s, high_s) if slope(middle_s) < 0 else (low_s, middle_s)
    assert best_interval_s(write_s, mean_s) == pytest.approx(low_s, rel=within)


def test_the_best_interval_is_best_and_near_youngs():
    write_s, mean_s = 60.0, 86_400.0
    best = best_interval_s(write_s, mean_s)
    assert best == pytest.approx(math.sqrt(2 * write_s * mean_s), rel=0.02)

    def wasted(work_s: float) -> float:
        checkpoints = Checkpoints(every_steps=round(work_s), write_Bps=1.0, size_bytes=60)
        return goodput(1.0, 1, checkpoints=checkpoints, failures=Failures(device_mtbf_s=mean_s)).effective_step_s

    lengths = range(1000, 6000, 10)
    found = min(lengths, key=wasted)
    assert found == pytest.approx(best, rel=0.01)


def test_the_best_number_of_steps_is_that_of_all_numbers_tried():
    """Steps are not of one second, so that steps and seconds are told apart."""
    given = {"failures": Failures(device_mtbf_s=10 * 40_000.0, restart_s=120.0)}

    def passed_s(steps: int) -> float:
        checkpoints = Checkpoints(every_steps=steps, write_Bps=1.0, size_bytes=30)
        return goodput(2.5, 10, checkpoints=checkpoints, **given).effective_step_s

    said = goodput(2.5, 10, checkpoints=Checkpoints(every_steps=7, write_Bps=1.0, size_bytes=30), **given)
    assert said.best_every_steps == pytest.approx(min(range(50, 5000), key=passed_s), rel=5e-3)
    short = Checkpoints(every_steps=7, write_Bps=1e9, size_bytes=1)
    assert goodput(1e6, 10, checkpoints=short, failures=Failures(device_mtbf_s=1e9)).best_every_steps == 1
    beside = Checkpoints(every_steps=7, write_Bps=1.0, size_bytes=30, blocking=False)
    assert goodput(2.5, 10, checkpoints=beside, **given).best_every_steps is None


def test_more_devices_fail_more_often():
    case = given(100, 30, 50, 3000.0, True)
    fractions = [goodput(1.0, num_devices, **case).fraction for num_devices in (1, 10, 100, 1000)]
    assert fractions == sorted(fractions, reverse=True) and fractions[0] > 0.7


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Checkpoints(every_steps=0, write_Bps=1.0), "steps between checkpoints must be .* not 0"),
        (lambda: Checkpoints(every_steps=math.nan, write_Bps=1.0), "checkpoints must be .* not nan"),
        (
            lambda: Checkpoints(every_steps=1, write_Bps=1.0, size_bytes=1.5),
            "size_bytes of checkpoints must be .* not 1.5",
        ),
        (lambda: goodput(1.0, 0, checkpoints=None, failures=None), "num_devices must be .* not 0"),
        (lambda: Checkpoints(every_steps=1, write_Bps=0.0), "above 0"),
        (lambda: Checkpoints(every_steps=1, write_Bps=math.nan), "above 0"),
        (lambda: Checkpoints(every_steps=1, write_Bps=1.0, size_bytes=-1), "at least 0"),
        (lambda: Failures(device_mtbf_s=0.0), "above 0"),
        (lambda: Failures(device_mtbf_s=math.nan), "above 0"),
        (lambda: Failures(device_mtbf_s=1.0, restart_s=-1.0), "at least 0"),
        (lambda: goodput(1.0, 8, checkpoints=None, failures=Failures(device_mtbf_s=1.0)), "without checkpoints"),
        (lambda: goodput(1.0, 10, **given(10_000, 1, 1, 1.0, True)), "almost no progress is kept"),
    ],
)
def test_bad_figures_are_refused(make, message):
    with pytest.raises(TwofoldError, match=message):
        make()
