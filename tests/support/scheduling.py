"""How the files of tests are shared among the workers of pytest-xdist, and shuffled with `--shuffle SEED`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from tests import ROOT

__all__ = ["RanksOnOneWorker", "shuffled"]


def shuffled(items: Sequence[pytest.Item], seed: int) -> list[pytest.Item]:
    """The tests in a random order of files, and a random order in each file: what a file's tests share is made once."""
    draw, files = random.Random(seed), dict[Path, list[pytest.Item]]()
    for item in items:
        files.setdefault(item.path, []).append(item)
    return [item for path in draw.sample([*files], len(files)) for item in draw.sample(files[path], len(files[path]))]


@lru_cache(maxsize=1024)
def _has_ranks(scope: str) -> bool:
    """Whether some tests of a file start several processes, which only one worker may do at a time."""
    return "mark.ranks" in (ROOT / scope).read_text()


class RanksOnOneWorker(LoadFileScheduling):
    """Gives files with tests marked `ranks` to one worker at a time and before all others, so that no worker waits."""

    def _assign_work_unit(self, node: Any) -> None:
        others = (scopes for other, scopes in self.assigned_work.items() if other is not node)
        taken = any(
            _has_ranks(scope) and not all(tests.values()) for scopes in others for scope, tests in scopes.items()
        )
        scope = next((scope for scope in self.workqueue if _has_ranks(scope) != taken), next(iter(self.workqueue)))
        self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)
