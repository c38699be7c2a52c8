"""The short form of `python -m benchmarks.verification`: the first steps of one study, and what is found wrong."""

from __future__ import annotations

import dataclasses
import math

import pytest

from benchmarks.verification.studies import STUDIES, Outcome, conducted


@pytest.mark.ranks
def test_a_study_trains_as_one_process_does(tmp_path):
    study = STUDIES["digits"]
    outcome = conducted(study, tmp_path, steps=40)
    assert outcome.plan.num_ranks == 4 and len(outcome.plan.stages) == 2
    assert len(outcome.losses) == len(outcome.alone) == 40
    assert outcome.losses[0] == pytest.approx(math.log(10), rel=0.05) and outcome.losses[-1] < 1  # it learns
    assert outcome.losses == pytest.approx(outcome.alone, rel=1e-5)
    assert outcome.test_losses[0] == pytest.approx(outcome.test_losses[1], rel=1e-5)
    assert outcome.accuracies[0] == pytest.approx(outcome.accuracies[1])
    assert not outcome.wrong(dataclasses.replace(study, accuracy=0.5))
    assert outcome.wrong(dataclasses.replace(study, accuracy=0.999)) == [
        f"the accuracy is {outcome.accuracies[0]:.2%}, not above 100%"
    ]


def test_what_differs_from_one_process_is_wrong():
    losses = (2.0,) * 30
    outcome = Outcome(plan=None, losses=losses, alone=losses, test_losses=(1.0, 1.0), accuracies=None)
    study = STUDIES["gpt"]
    assert outcome.wrong(study) == []
    other = dataclasses.replace(outcome, losses=(2.0,) * 5 + (2.001,) + (2.0,) * 24)
    assert other.wrong(study) == ["losses of the first 20 steps differ by 5.0e-04"]
    assert dataclasses.replace(outcome, losses=(*losses[:29], 3.0)).wrong(study) == []  # rounding may do that
    assert "test loss is 1.1000" in dataclasses.replace(outcome, test_losses=(1.1, 1.0)).wrong(study)[0]
    assert dataclasses.replace(outcome, test_losses=(math.nan, 1.0)).wrong(study)
