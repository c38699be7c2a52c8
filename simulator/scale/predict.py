"""The prediction of a transformer in stated degrees, on thousands of devices in a millisecond.

Blocks are lowered and priced once and counted (`plans.scale`, `simulator.scale.chunks`), the schedule is simulated on
columns (`simulator.scale.pipeline`), memory follows from the same order. Nothing depends on the data-parallel width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from costmodels import Machine
from costmodels.interval import step_interval
from costmodels.price import price_transfer
from plans.errors import TwofoldError
from plans.scale import Degrees
from plans.schedules import Schedule
from plans.timeline import PS_PER_S
from plans.transformer import TransformerConfig
from simulator.scale.action import Rates, Stretch
from simulator.scale.chunks import Chunk, Chunks
from simulator.scale.memory import peak_activations
from simulator.scale.pipeline import pipeline_end_ps
from simulator.scale.stacks import Stack

__all__ = ["Forecast", "forecast"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is predicted of one configuration.

    Args:
        step_s: seconds of one step that all ranks begin together, until the last has ended it.
        low_s, high_s: its 90 % interval.
        peak_bytes: the largest peak of any rank.
        memory: role -> bytes on the pipeline rank of the peak; they add up to it.
        bubble_fraction: share of the step in which the compute streams stand idle, averaged over ranks.
        exposed_comm_s: seconds in which a rank waits for communication inside its actions, averaged over ranks.
        rank_s: per pipeline rank seconds of compute and of exposed communication by call.
    """

    step_s: float
    low_s: float
    high_s: float
    peak_bytes: int
    memory: Mapping[str, int]
    bubble_fraction: float
    exposed_comm_s: float
    rank_s: tuple[Mapping[str, float], ...]


def forecast(
    config: TransformerConfig,
    degrees: Degrees,
    machine: Machine,
    *,
    stack: Stack | None = None,
) -> Forecast:
    """Predict one configuration.

    Args:
        config: of a dense transformer.
        degrees: how it is spread.
        machine: with at least as many devices, whose compute runs behind the host.
        stack: the software that runs it; twofold's executor by default.

    Raises:
        TwofoldError: a machine whose hosts compute, too few devices, sizes that do not divide.

    >>> from plans.transformer import transformer_config
    >>> degrees = Degrees(dp=16, tp=8, pp=8, micro_batch=1, global_batch=512)
    >>> found = forecast(transformer_config("llama-3-70b"), degrees, Machine.load("h100-sxm-x1024"))
    >>> 5 < found.step_s < 60
    True
    """
    if not machine.host_async:
        raise TwofoldError(
            f"machine {machine.name!r} computes on its hosts; stated degrees are predicted for devices behind a host: "
            "simulate a plan instead"
        )
    schedule = degrees.pipeline
    split = _is_split(schedule)
    stack = stack or Stack()
    costs = Chunks(
        config=config, degrees=degrees, machine=machine, stack=stack, rates=_rates(machine), split_backward=split
    )
    layers = degrees.layers_of(config.num_layers)
    last = len(layers) - 1
    chunks = [
        Chunk(num_blocks=count, has_embedding=number == 0, has_head=number == last)
        for number, count in enumerate(layers)
    ]
    return _assemble(costs, schedule, chunks, split)


def _assemble(costs: Chunks, schedule: Schedule, chunks: list[Chunk], split: bool) -> Forecast:
    degrees, level = costs.degrees, costs.degrees.optimizer.parallel_level
    each = costs.degrees.optimizer.reduces_each
    backward = ("I", "W") if split else ("B",)
    closing = backward[-1]
    kinds: dict[Chunk, dict[str, Stretch]] = {}
    for chunk in dict.fromkeys(chunks):
        actions = {"F": costs.action(chunk, "F", gathers=level >= 3)}
        actions["F.first"] = costs.action(chunk, "F", gathers=level >= 1)
        for part in backward:
            reduces = part == closing
            actions[part] = costs.action(chunk, part, gathers=level >= 3, reduces=reduces and each)
            if reduces:
                actions[f"{part}.last"] = costs.action(chunk, part, gathers=level >= 3, reduces=True)
        kinds[chunk] = actions
    transfers = _Transfers.of(costs, schedule)
    ranks = range(schedule.num_ranks)
    updates = [_sum([costs.update(chunks[stage]) for stage in schedule.stages_of(rank)]) for rank in ranks]
    step_ps = pipeline_end_ps(
        schedule, [kinds[chunk] for chunk in chunks], updates, transfers.times, transfers.dispatch_ps,
        blocking=not costs.stack.overlaps_sends,
    ) + costs.stack.step_s * PS_PER_S  # fmt: skip
    count = degrees.num_micro_batches
    shares: list[dict[str, float]] = []
    for rank in ranks:
        parts = [updates[rank]]
        for stage in schedule.stages_of(rank):
            actions = kinds[chunks[stage]]
            for name, stretch in actions.items():
                if name.endswith((".first", ".last")):
                    parts.append(stretch)
                else:
                    has_special = f"{name}.first" in actions or f"{name}.last" in actions
                    parts.append(stretch.times(count - has_special))
        total = _sum(parts)
        shares.append(
            {"compute": total.compute_ps / PS_PER_S}
            | {call: time / PS_PER_S for call, time in sorted(total.exposed_ps.items())}
        )
    step_s = step_ps / PS_PER_S
    peak, memory = _memory(costs, schedule, chunks)
    compute = sum(share["compute"] for share in shares) / len(shares)
    exposed = sum(sum(share.values()) - share["compute"] for share in shares) / len(shares)
    low_s, high_s = _interval(costs.machine, step_s, shares)
    return Forecast(
        step_s=step_s, low_s=low_s, high_s=high_s, peak_bytes=peak, memory=memory,
        bubble_fraction=max(0.0, 1 - compute / step_s) if step_s else 0.0, exposed_comm_s=exposed, rank_s=tuple(shares),
    )  # fmt: skip


def _interval(machine: Machine, step_s: float, shares: list[dict[str, float]]) -> tuple[float, float]:
    """From the spreads of what the busiest rank does."""
    busiest = max(shares, key=lambda share: sum(share.values()))
    seconds = {"matrix": busiest["compute"], "collective": sum(busiest.values()) - busiest["compute"]}
    return step_interval(machine, step_s, seconds)


def _is_split(schedule: Schedule) -> bool:
    return bool((schedule.table.kind >= 2).any())


def _sum(parts: list[Stretch]) -> Stretch:
    total = Stretch()
    for part in parts:
        total = total.then(part)
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transfers:
    """What crosses between stages on different ranks: (sending stage, receiving stage) -> picoseconds."""

    times: dict[tuple[int, int], float]
    dispatch_ps: int

    @classmethod
    def of(cls, costs: Chunks, schedule: Schedule) -> _Transfers:
        """Priced between the first ranks of the two groups."""
        times: dict[tuple[int, int], float] = {}
        dispatch, width = 0, costs.degrees.width
        for stage in range(schedule.num_stages - 1):
            here, there = schedule.placement[stage], schedule.placement[stage + 1]
            if here != there:
                size = costs.numbers[costs.template.pieces["block"].leaves]
                cost = price_transfer(costs.machine, here * width, there * width, size)
                dispatch = costs.stack.dispatch_ps(cost.dispatch_ps, "transfer", "C")
                times[stage, stage + 1] = times[stage + 1, stage] = cost.work_ps
        return cls(times=times, dispatch_ps=dispatch)


def _memory(costs: Chunks, schedule: Schedule, chunks: list[Chunk]) -> tuple[int, dict[str, int]]:
    """The largest peak over pipeline ranks, and what it consists of."""
    kept, later, extra = [], [], []
    for chunk in chunks:
        prints = [(costs.footprint(piece), count) for piece, count in chunk.pieces]
        kept.append(sum(own.kept * count for own, count in prints))
        later.append(sum(own.kept_for_weights * count for own, count in prints))
        forward = max(own.forward - own.kept for own, _ in prints)
        backward = max(own.backward for own, _ in prints)
        weights = max(own.weights for own, _ in prints)
        extra.append((forward, backward, backward, weights))  # during F, B, I, W
    activations = peak_activations(schedule, kept, later, extra)
    best: tuple[int, dict[str, int]] = (-1, {})
    for rank in range(schedule.num_ranks):
        roles = {"activation": int(activations[rank])}
        for stage in schedule.stages_of(rank):
            for role, size in costs.static_bytes(chunks[stage]).items():
                roles[role] = roles.get(role, 0) + size
        if costs.degrees.optimizer.parallel_level >= 3 and costs.shards > 1:
            # whole weights exist only while their block computes: its own and the next one's
            roles["weight"] += 2 * max(costs.weight_bytes(piece) for piece, _ in chunks[rank].pieces)
        roles = costs.stack.memory(roles, costs.degrees)
        total = sum(roles.values())
        if total > best[0]:
            best = total, dict(sorted(roles.items()))
    return best


@lru_cache(maxsize=64)
def _rates(machine: Machine) -> Rates | None:
    if not machine.overlap:
        return None
    pairs = {(entry.compute, entry.collective): (entry.compute_rate, entry.comm_rate) for entry in machine.overlap}

    def rates(compute: str, collective: str) -> tuple[float, float]:
        return pairs.get((compute, collective), (1.0, 1.0))  # type: ignore[arg-type]

    return rates
