"""The table of capture rules, filled by the files of the families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from executor.capture.translation import Rule, of_means

__all__ = ["RULES", "Number", "mean_rule", "rule"]

RULES: dict[str, Rule] = {}
"""aten call (as torch prints it) -> its rule."""

Number = bool | int | float


def rule(*targets: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a rule under the names of aten calls."""
    own = ("getitem", "twofold.")
    return _enter([target if target.startswith(own) else f"aten.{target}" for target in targets])


def mean_rule(*targets: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a rule for calls that read a `Mean`."""
    return _enter([of_means(f"aten.{target}") for target in targets])


def _enter(names: list[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(names, function))
        return function

    return enter
