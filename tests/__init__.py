"""The tests, in rooms that mirror the packages; `support`, `modules` and `pretend` are what several rooms share."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
