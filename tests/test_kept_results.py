"""Results on made-up machines are what they were (see kept_results.py, which also says how to keep new ones)."""

import pytest

from tests.kept_results import CASES, computed, kept

KEPT = kept()


@pytest.mark.parametrize("case", CASES)
def test_results_are_what_they_were(case: str) -> None:
    known, now = KEPT[case], computed(case)
    changed = [
        f"{name}: {known.get(name)} was kept, {now.get(name)} is computed"
        for name in known.keys() | now.keys()
        if known.get(name) != pytest.approx(now.get(name), rel=1e-12)
    ]
    assert not changed, (
        f"{len(changed)} of {len(known)} kept results of the {case} changed; if that is meant, run "
        f"`python -m tests.kept_results` and look at what differs.\n" + "\n".join(sorted(changed)[:5])
    )
