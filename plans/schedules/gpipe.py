"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)."""

from plans.schedules.phases import backward, build, check_counts, forward, looped_placement
from plans.schedules.schedule import Schedule

__all__ = ["gpipe"]


def gpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Every rank keeps all micro-batches alive; bubble (p - 1)(T_F + T_B) of whole backwards.

    >>> print(gpipe(2, 2))
    0F0,0F1,0B0,0B1
    1F0,1F1,1B0,1B1
    """
    check_counts("gpipe", num_ranks, num_micro_batches)
    phases = [forward(0) * num_micro_batches + backward(0) * num_micro_batches] * num_ranks
    return build("gpipe", phases, num_micro_batches, looped_placement(num_ranks, 1))
