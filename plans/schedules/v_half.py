"""V-Half: two chunks per rank in a V, half the activation memory of 1F1B (Qi et al. 2024, arXiv 2405.15362)."""

from plans.schedules.building_block import Block, repeat_block
from plans.schedules.phases import check_counts
from plans.schedules.schedule import Schedule

__all__ = ["v_half"]


def v_half(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Rank i owns stages i and 2p - 1 - i; it keeps at most floor((p + 2) / 2) micro-batches of both chunks alive.

    A micro-batch takes two units per rank on the first chunk and one on the second, there and back, six for each
    rank that it passes. With T_F = T_B = T_W = T per chunk and m >= p a rank idles (3p - 4) T if p is odd,
    (3p - 5) T if it is even (2 ranks: 3 T), just under half of the 6 (p - 1) T of 1F1B. With T_W + 2 T_B >= 2 T_F and
    T_W + 2 T_F >= 2 T_B the idle time does not grow with the micro-batches.
    """
    check_counts("v_half", num_ranks, num_micro_batches)
    p = num_ranks
    # With an even p the backward must start later, or the passes leave no free unit right behind an input gradient and
    # weight gradients wait, which costs memory.
    turn = 4 if p % 2 == 0 else 1
    back = 3 * p - 2 + turn
    blocks = [Block(2 * i, 3 * p - 2 - i, back + 2 * i, back + 3 * p - 1 - i) for i in range(p)]
    return repeat_block("v_half", blocks, num_micro_batches, max_alive=2 * ((p + 2) // 2))
