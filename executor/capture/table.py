"""The table of capture rules, filled by the files of the families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from executor.capture.translation import Rule

__all__ = ["RULES", "Number", "rule"]

RULES: dict[str, Rule] = {}
"""aten call (as torch prints it) -> its rule."""

Number = bool | int | float


def rule(*targets: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a rule under the names of aten calls."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        for target in targets:
            RULES[target if target == "getitem" else f"aten.{target}"] = function
        return function

    return enter
