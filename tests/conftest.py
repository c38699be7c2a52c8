"""What all tests share: reproducible examples, and one test with several processes at a time."""

import pytest
from hypothesis import settings

# No deadline and no random start: no test may depend on how fast or how often it is run.
settings.register_profile("twofold", deadline=None, derandomize=True, database=None)
settings.load_profile("twofold")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests marked `ranks` to one worker of pytest-xdist (--dist loadgroup), so that they never run at once."""
    for item in items:
        if item.get_closest_marker("ranks"):
            item.add_marker(pytest.mark.xdist_group("ranks"))
