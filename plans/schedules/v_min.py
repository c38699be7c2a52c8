"""V-Min: two chunks per rank in a V, a third of the activation memory of 1F1B (Qi et al. 2024, arXiv 2405.15362)."""

from plans.schedules.building_block import Block, repeat_block
from plans.schedules.phases import check_counts
from plans.schedules.schedule import Schedule

__all__ = ["v_min"]


def v_min(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Rank i owns stages i and 2p - 1 - i; it keeps at most floor((p + 4) / 3) micro-batches of both chunks alive.

    A micro-batch goes from rank to rank without a pause, there and back, four units for each rank that it passes. With
    T_F = T_B = T_W = T per chunk and m >= p a rank idles (4p - 5) T, just under two thirds of the 6 (p - 1) T of
    1F1B. With unequal times the idle time grows with the micro-batches: nothing is left to take up the slack.
    """
    check_counts("v_min", num_ranks, num_micro_batches)
    p = num_ranks
    # With p a multiple of three, the passes would meet if the backward started at once.
    turn = 3 if p % 3 == 0 else 1
    back = 2 * p - 1 + turn
    blocks = [Block(i, 2 * p - 1 - i, back + i, back + 2 * p - 1 - i) for i in range(p)]
    return repeat_block("v_min", blocks, num_micro_batches, max_alive=2 * ((p + 4) // 3))
