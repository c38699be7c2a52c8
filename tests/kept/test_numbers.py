"""Numbers of made-up machines are what they were (see `tests.kept`)."""

import pytest

from tests.kept import fits
from tests.kept.lines import HOW
from tests.kept.numbers import CASES, computed, kept

KEPT = kept()


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_what_they_were(case: str) -> None:
    rel = 1e-5 if case in fits.CASES else 1e-9  # solvers stop where they no longer gain; libraries of a processor
    before, now = KEPT.get(case, {}), computed(case)
    differ = [
        f"{name}:\n  kept {before.get(name)}\n  now  {now.get(name)}"
        for name in before | now
        if name not in before or name not in now or before[name] != pytest.approx(now[name], rel=rel)
    ]
    assert not differ, "\n".join([f"{len(differ)} of {len(now)} rows of the {case} differ; {HOW}", *differ[:5]])


def test_every_kept_number_has_a_case() -> None:
    assert list(KEPT) == list(CASES)
