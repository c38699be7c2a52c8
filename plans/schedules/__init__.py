"""Pipeline schedules: for every pipeline rank the order of forwards and backwards of one step.

* `Action`: one forward or (part of a) backward, written as in torch.distributed.pipelining: `2F0`, `1B3`, `1I3`, `1W3`;
* `Schedule`: the actions of every rank, which rank owns which virtual stage, and the text or CSV form;
* three families of generators (`looped`, `zero_bubble`, `v_shaped`), which `make_schedule` finds by name;
* `validate` shows where a schedule cannot run, `peak_in_flight` counts the activations that it keeps alive.

A schedule is an order without times and without communication: both follow from it.
"""

from plans.schedules.action import Action, ActionKind
from plans.schedules.errors import ScheduleError
from plans.schedules.in_flight import peak_in_flight
from plans.schedules.registry import chunks_per_rank, make_schedule, schedule_names
from plans.schedules.schedule import Schedule, ScheduleTable
from plans.schedules.validate import validate

__all__ = [
    "Action",
    "ActionKind",
    "Schedule",
    "ScheduleError",
    "ScheduleTable",
    "chunks_per_rank",
    "make_schedule",
    "peak_in_flight",
    "schedule_names",
    "validate",
]
