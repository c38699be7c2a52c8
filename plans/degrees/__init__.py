"""Parallel degrees: the value and everything about it, each in one place.

* `value`: `Degrees`. Its fields declare every degree once: name, type, default, meaning, label, flag.
* `rules`: which degrees are possible; each mistake has one message. `check` applies them.
* `groups`: which ranks communicate with each other along which axis.
* `words`: one line for tables and messages. `file`: JSON.
* `plan`: the plan for given degrees. It needs models, so it is imported by its own name.
"""

from plans.degrees.check import check, check_stated
from plans.degrees.groups import ORDER
from plans.degrees.rules import MEMORY_BOUND, RECOMPUTE_MODES, ModelSizes
from plans.degrees.value import DEGREES, Degree, Degrees, even_layers
from plans.degrees.words import describe

__all__ = [
    "DEGREES",
    "MEMORY_BOUND",
    "ORDER",
    "RECOMPUTE_MODES",
    "Degree",
    "Degrees",
    "ModelSizes",
    "check",
    "check_stated",
    "describe",
    "even_layers",
]
