"""`twofold demo`: plan, simulate, run and verify an example."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twofold.commands.options import DemoOptions, Output

if TYPE_CHECKING:
    from twofold.console import Console

__all__ = ["Demo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """Plan, simulate, run on 8 processes and verify an example on real digits; writes a report and a trace."""

    example: DemoOptions = field(default_factory=DemoOptions)
    output: Output = field(default_factory=Output)

    def run(self, console: Console) -> tuple[dict[str, Any], bool]:
        """Run the example; it passes if loss, weights, communication and memory are correct."""
        from twofold.demo import demo

        result = demo(self.example, console)
        return result.to_json(), result.verification.passed
