"""How the files of tests are shared among the workers of pytest-xdist."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadFileScheduling

__all__ = ["RanksOnOneWorker"]


@lru_cache(maxsize=1024)
def _has_ranks(scope: str) -> bool:
    """Whether some tests of a file start several processes, which only one worker may do at a time."""
    return "mark.ranks" in (Path(__file__).parents[1] / scope).read_text()


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
