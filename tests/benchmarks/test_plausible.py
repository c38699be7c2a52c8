"""Predictions of tables obey laws that need no measurement, over all devices, software, precisions and sizes."""

import random

from benchmarks.accuracy.plausible import broken_laws, drawn_row


def test_predictions_obey_the_laws():
    draw = random.Random(5)
    tried, broken = zip(*(broken_laws(drawn_row(draw)) for _ in range(15)), strict=True)
    assert [each for exceptions in broken for each in exceptions] == []
    assert len({name for names in tried for name in names}) >= 45
