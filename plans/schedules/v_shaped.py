"""V-shaped schedules: two chunks per rank, the model goes down the ranks and up again.

Rank i of p owns stages i and 2p - 1 - i, so the first and the last stage are on one rank. T_F, T_B and T_W are the
times of a forward, an input gradient and a weight gradient.
"""

from __future__ import annotations

from plans.schedules.building_block import Block, repeat_block
from plans.schedules.errors import ScheduleError
from plans.schedules.phases import backward, build, check_counts, forward, input_gradient, v_placement, weight_gradient
from plans.schedules.schedule import Schedule

__all__ = ["dualpipe_v", "v_half", "v_min", "zb_v"]


def zb_v(num_ranks: int, num_micro_batches: int) -> Schedule:
    """ZB-V: no bubble at the memory of 1F1B (Qi et al. 2023, arXiv 2401.10241, section 6).

    This is the handcrafted order; ranks idle nowhere if T_F = T_B = T_W and m >= 2p - 1. For fewer than 2p - 1 micro-
    batches the order for 2p - 1 is taken and the missing ones are left out, as in torch.distributed.pipelining.

    >>> print(zb_v(1, 2))
    0F0,1F0,1I0,1W0,0F1,0I0,0W0,1F1,1I1,1W1,0I1,0W1
    """
    check_counts("zb_v", num_ranks, num_micro_batches)
    (f0, f1), (i0, i1), (w0, w1) = ((step(0), step(1)) for step in (forward, input_gradient, weight_gradient))
    full = max(2 * num_ranks - 1, num_micro_batches)
    phases = []
    for rank in range(num_ranks):
        ahead = num_ranks - rank
        phases.append(
            f0 * (2 * ahead - 1)
            + (f1 + f0) * rank
            + (f1 + i1 + w1) * ahead
            + (f0 + i0 + w0 + f1 + i1 + w1) * (full - num_ranks - ahead + 1)
            + (i0 + w0 + f1 + i1 + w1) * (ahead - 1)
            + (i0 + i1) * rank
            + (i0 + w0) * ahead
            + w1 * rank
            + w0 * rank
        )
    return build("zb_v", phases, num_micro_batches, v_placement(num_ranks))


def v_half(num_ranks: int, num_micro_batches: int) -> Schedule:
    """V-Half: half the activation memory of 1F1B (Qi et al. 2024, arXiv 2405.15362).

    A rank keeps at most floor((p + 2) / 2) micro-batches of both chunks alive. A micro-batch takes two units per rank
    on the first chunk and one on the second, there and back, six for each rank that it passes. With T_F = T_B = T_W = T
    per chunk and m >= p a rank idles (3p - 4) T if p is odd, (3p - 5) T if it is even (2 ranks: 3 T), just under half
    of the 6 (p - 1) T of 1F1B. With T_W + 2 T_B >= 2 T_F and T_W + 2 T_F >= 2 T_B the idle time does not grow with the
    micro-batches.
    """
    check_counts("v_half", num_ranks, num_micro_batches)
    p = num_ranks
    # With an even p the backward must start later, or the passes leave no free unit right behind an input gradient and
    # weight gradients wait, which costs memory.
    turn = 4 if p % 2 == 0 else 1
    back = 3 * p - 2 + turn
    blocks = [Block(2 * i, 3 * p - 2 - i, back + 2 * i, back + 3 * p - 1 - i) for i in range(p)]
    return repeat_block("v_half", blocks, num_micro_batches, max_alive=2 * ((p + 2) // 2))


def v_min(num_ranks: int, num_micro_batches: int) -> Schedule:
    """V-Min: a third of the activation memory of 1F1B (Qi et al. 2024, arXiv 2405.15362).

    A rank keeps at most floor((p + 4) / 3) micro-batches of both chunks alive. A micro-batch goes from rank to rank
    without a pause, there and back, four units for each rank that it passes. With T_F = T_B = T_W = T per chunk and m
    >= p a rank idles (4p - 5) T, just under two thirds of the 6 (p - 1) T of 1F1B. With unequal times the idle time
    grows with the micro-batches: nothing is left to take up the slack.
    """
    check_counts("v_min", num_ranks, num_micro_batches)
    p = num_ranks
    # With p a multiple of three, the passes would meet if the backward started at once.
    turn = 3 if p % 3 == 0 else 1
    back = 2 * p - 1 + turn
    blocks = [Block(i, 2 * p - 1 - i, back + i, back + 2 * p - 1 - i) for i in range(p)]
    return repeat_block("v_min", blocks, num_micro_batches, max_alive=2 * ((p + 4) // 3))


def dualpipe_v(num_ranks: int, num_micro_batches: int) -> Schedule:
    """DualPipe-V, the V-shaped half of DualPipe (DeepSeek-AI, arXiv 2412.19437 and github.com/deepseek-ai/DualPipe).

    Forwards of one chunk overlap backwards of the other. The pairs (OVERLAP_F_B in torch.distributed.pipelining) are
    adjacent actions here, the forward first; `plans.schedules.pairs` finds them, and a plan with `overlap_pairs` runs
    the two of a pair at once.

    Raises:
        ScheduleError: fewer micro-batches than stages (2p).

    >>> print(dualpipe_v(1, 2))
    0F0,1F0,0F1,1B0,1F1,0B0,1B1,0I1,0W1
    """
    check_counts("dualpipe_v", num_ranks, num_micro_batches)
    if num_micro_batches < 2 * num_ranks:
        raise ScheduleError(
            f"dualpipe_v on {num_ranks} ranks has {2 * num_ranks} stages and needs as many micro-batches, not "
            f"{num_micro_batches}; zb_v takes any number of them"
        )
    (f0, f1), (b0, b1), (i0, i1), (w0, w1) = (
        (step(0), step(1)) for step in (forward, backward, input_gradient, weight_gradient)
    )
    phases = []
    for rank in range(num_ranks):
        behind = num_ranks - rank - 1
        half, is_even = (rank + 1) // 2, rank % 2 == 0
        # the backwards of the end are split halfway down this phase; their weight gradients are done in the same order
        ending = (b1 + b0) * half + (b1 + i0 if is_even else b"") + (i1 + i0) * half
        late = (w0 if is_even else b"") + (w1 + w0) * half + w0 * behind
        phases.append(
            f0 * (2 * behind)
            + (f0 + f1) * (rank + 1)
            + (i1 + w1 + f1) * behind
            + (f0 + b1 + f1 + b0) * (num_micro_batches - num_ranks - behind)
            + (b1 + f1 + b0) * behind
            + ending
            + b"".join(late[k : k + 1] + i0 for k in range(behind))
            + late[behind:]
        )
    return build("dualpipe_v", phases, num_micro_batches, v_placement(num_ranks))
