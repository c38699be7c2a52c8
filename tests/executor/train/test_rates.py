"""Learning rates of every step, against arrays written from the definitions; and schedules that cannot be."""

import itertools
import math

import numpy as np
import pytest

from executor.train.rates import Rate
from plans.errors import TwofoldError


def by_definition(rate: Rate, steps: int) -> np.ndarray:
    """Warm-up from peak / warmup to the peak; from the step of the peak on the decay, whose last step has `final`."""
    rise = [rate.peak * (step + 1) / rate.warmup for step in range(rate.warmup)]
    if rate.kind == "constant":
        return np.array((rise + [rate.peak] * steps)[:steps])
    held = steps - rate.decay if rate.kind == "wsd" else max(1, rate.warmup)
    whole = np.array((rise + [rate.peak] * steps)[:held])
    falling = steps - held
    share = np.arange(1, falling + 1) / max(1, falling)
    left = np.cos(np.pi * share / 2) ** 2 if rate.kind == "cosine" else 1 - share
    return np.concatenate([whole, rate.final + (rate.peak - rate.final) * left])


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_every_step_has_the_rate_of_the_definition(kind):
    for steps, warmup, final in itertools.product((2, 3, 7, 12), (0, 1, 2), (0.0, 0.25)):
        for decay in (1, 3) if kind == "wsd" else (0,):
            if warmup + decay > steps:
                continue
            rate = Rate(kind=kind, peak=0.5, warmup=warmup, final=final, decay=decay)
            rate.check(steps)
            found = [rate.at(step, steps) for step in range(steps)]
            assert found == pytest.approx(by_definition(rate, steps), abs=1e-15), rate


def test_the_only_step_has_the_peak():
    assert [Rate(kind=kind, peak=0.5).at(0, 1) for kind in ("linear", "cosine")] == [0.5, 0.5]


FITS = Rate(kind="wsd", peak=1.0, warmup=2, decay=3)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"peak": 0.0}, "peak must be above 0"), ({"peak": math.inf}, "peak must be above 0"),
        ({"peak": 1.0, "final": -0.1}, "final from 0 to peak"), ({"peak": 1.0, "final": 1.1}, "final from 0 to peak"),
        ({"peak": 1.0, "warmup": -1}, "warmup -1 and decay 0"), ({"peak": 1.0, "warmup": 6}, "at most the 5 steps"),
        ({"peak": 1.0, "kind": "wsd", "warmup": 3, "decay": 3}, "at most the 5 steps"),
        ({"peak": 1.0, "kind": "wsd", "decay": -1}, "decay -1"), ({"peak": 1.0, "kind": "wsd"}, "state decay"),
        ({"peak": 1.0, "kind": "linear", "decay": 1}, "decay is for kind 'wsd'"),
    ],
)  # fmt: skip
def test_a_schedule_that_cannot_be_is_refused(values, says):
    FITS.check(5)
    Rate(peak=1.0, final=1.0, warmup=5).check(5)
    with pytest.raises(TwofoldError, match=says):
        Rate(**values).check(5)
