"""Small cases are what they were (see `tests.kept`)."""

import pytest

from tests.kept.cases import CASES
from tests.kept.lines import check, kept
from tests.kept.searches import SEARCHES

ALL = CASES | SEARCHES


@pytest.mark.parametrize("name", ALL)
def test_small_cases_are_what_they_were(name: str) -> None:
    check(name, ALL[name]())


def test_every_kept_line_has_a_case() -> None:
    assert list(kept()) == list(ALL)
