"""Small cases are what they were (see `tests/kept.py`)."""

import pytest

from tests.kept import check, kept
from tests.kept_cases import SECTIONS as CASES
from tests.kept_searches import SECTIONS as SEARCHES

SECTIONS = CASES | SEARCHES


@pytest.mark.parametrize("section", SECTIONS)
def test_small_cases_are_what_they_were(section: str) -> None:
    check(SECTIONS[section])


def test_every_kept_line_has_a_case() -> None:
    assert list(kept()) == [name for section in SECTIONS.values() for name in section]
