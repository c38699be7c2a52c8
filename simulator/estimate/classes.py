"""The seconds of a step by class of instructions, from which its interval is computed.

Device work counts by class of kernel, communication as far as it is exposed, and the host as far as it sets the pace.
Host time H and device time D have errors: standard deviations of their logarithms s_h and s_d. The host is slower with
probability p = Phi(ln(H / D) / hypot(s_h, s_d)), which is also the derivative of the expected logarithm of max(H, D)
with respect to that of H (Clark 1961, Operations Research 9, the greatest of a finite set of random variables). The
share p of a step is the host's and the rest the device's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from costmodels import Machine
from plans.lower.symbolic import plain
from simulator.estimate.chunk import Chunk
from simulator.estimate.pieces import PricedPieces

__all__ = ["class_seconds", "device_classes", "overlap_penalty_share"]

_NAMES = ("attention", "matrix", "memory")


def device_classes(costs: PricedPieces, chunks: Sequence[Chunk]) -> dict[str, float]:
    """Seconds of kernels of one micro-batch on a rank, by class.

    Args:
        costs: of its layout.
        chunks: that the rank has.
    """
    found: dict[str, float] = {}
    for chunk, count in Counter(chunks).items():
        for piece, times in chunk.pieces:
            for name, seconds in _of_piece(costs, piece).items():
                found[name] = found.get(name, 0.0) + count * times * seconds
    return found


def _of_piece(costs: PricedPieces, piece: str) -> Mapping[str, float]:
    key = ("classes", piece, costs.split_backward)
    if plain(piece) != piece:
        assert costs.kept is not None
        return _of_piece(costs.kept, plain(piece))
    if key not in costs.known:
        own = dict.fromkeys(_NAMES, 0.0)
        for part in ("F", "I", "W") if costs.split_backward else ("F", "B"):
            for line in costs.lines(piece, part):
                if line.name in own:
                    own[line.name] += line.work_ps * 1e-12
        costs.known[key] = own
    found: Mapping[str, float] = costs.known[key]
    return found


def overlap_penalty_share(machine: Machine, kernels: Mapping[str, float]) -> float:
    """Seconds that kernels lose next to one second of a transfer, which itself is slowed.

    With the rates c of compute and k of the transfer while both run a transfer of a second takes 1 / k and compute
    loses (1 - c) / k meanwhile. The rates are those of a machine's pairs, measured between devices of one node; for
    transfers between nodes they are assumed.

    >>> 0 < overlap_penalty_share(Machine.load("h200-x8"), {"matrix": 3.0, "memory": 1.0}) < 1
    True
    """
    pairs = {entry.compute: entry for entry in machine.overlap if entry.collective == "transfer"}
    total = sum(kernels.values())
    lost = sum(
        seconds * (1 - pairs[name].compute_rate) / pairs[name].comm_rate
        for name, seconds in kernels.items() if name in pairs
    )  # fmt: skip
    return lost / total if total else 0.0


def class_seconds(
    machine: Machine, step_s: float, kernels: Mapping[str, float], exposed_s: float, transfer_s: float, host_s: float
) -> dict[str, float]:
    """Seconds by class that add up to the step.

    Args:
        machine: whose spreads give the uncertainty of host and device.
        step_s: the prediction.
        kernels: class -> seconds of the busiest rank's kernels.
        exposed_s: seconds in which it waits for collectives.
        transfer_s: seconds in which it waits for what other stages send.
        host_s: seconds of its host.

    A pipeline's bubble is made of the same work as the rest, so kernels are stretched over what is left of the step.

    >>> machine = Machine.load("h200-x2")
    >>> parts = class_seconds(machine, 1.0, {"matrix": 0.6, "memory": 0.2}, 0.1, 0.0, 0.3)
    >>> round(parts["matrix"], 3), parts["dispatch"] < 1e-3, round(sum(parts.values()), 3)
    (0.675, True, 1.0)
    """
    work_s = sum(kernels.values())
    if not work_s or not step_s:
        return {}
    device_s = work_s + exposed_s
    spreads = {name: machine.spreads.get(name, 0.0) for name in ("matrix", "dispatch")}
    width = max(math.hypot(*spreads.values()), 1e-3)
    late = 0.5 * (1 + math.erf(math.log(max(host_s, 1e-12) / device_s) / width / math.sqrt(2)))
    rest = (1 - late) * step_s
    transfer, exposed = min(transfer_s, 0.5 * step_s) * (1 - late), min(exposed_s, step_s) * (1 - late)
    found = {name: max(0.0, rest - exposed - transfer) * seconds / work_s for name, seconds in kernels.items()}
    return {**found, "collective": exposed, "transfer": transfer, "dispatch": late * step_s}
