"""One configuration of a transformer: its pipeline, and the forecast from the times of the pipeline.

`LayoutCosts` computes once what all configurations of a layout share; a `PipelineForecast` adds the pipeline.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby, pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from costmodels import Machine
from costmodels.interval import step_interval
from costmodels.price.instruction import price_transfer
from costmodels.price.power import slowest_of
from plans.degrees import Degrees
from plans.lower.symbolic import plain
from plans.schedules import Schedule
from plans.shown import Shown
from plans.timeline import PS_PER_S
from simulator.forecast.action import ClockMap
from simulator.forecast.batch import action_columns, pipeline_ends_ps
from simulator.forecast.chunk import Chunk
from simulator.forecast.chunks import Chunks
from simulator.forecast.classes import class_seconds, device_classes, overlap_penalty_share
from simulator.forecast.memory import Activations, chunk_activations, peak_activations
from simulator.forecast.pipeline import Runtime, pipeline_end_ps
from simulator.forecast.walk import MOST_MESSAGES
from simulator.lines import COLLECTIVE
from simulator.stacks import Stack

__all__ = ["Forecast", "LayoutCosts", "PipelineForecast", "RankKinds", "is_split", "transfer_overlap_penalty_ps"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Forecast(Shown):
    """The prediction of one configuration.

    Args:
        step_s: seconds from the end of one step to the end of the next.
        low_s, high_s: its 90 % interval.
        peak_bytes: the largest peak of any rank.
        memory: role -> bytes on the pipeline rank of the peak; they add up to it.
        bubble_fraction: share of the step in which a rank waits for other ranks, averaged over ranks: what compute,
            exposed communication and the wait for its own host leave (`plans.step_parts`).
        exposed_comm_s: seconds in which a rank waits for collectives, averaged over ranks.
        host_wait_s: seconds in which a rank waits for its own host, averaged over ranks; an estimate does not tell it
            from the bubble.
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
    host_wait_s: float = 0.0

    def __repr__(self) -> str:
        low, high = self.low_s * 1e3, self.high_s * 1e3
        step = f"{self.step_s * 1e3:.4g} ms ({low:.4g} to {high:.4g})"
        return f"<Forecast: a step of {step}, peak {self.peak_bytes / 1e9:.4g} GB, {len(self.rank_s)} pipeline ranks>"


def is_split(schedule: Schedule) -> bool:
    """Whether the gradients of inputs and of weights are separate actions."""
    return bool((schedule.table.kind >= 2).any())


class LayoutCosts:
    """The costs and the memory of chunks of one layout; `costs` prices them."""

    def __init__(self, costs: Chunks) -> None:
        self.costs = costs
        self._actions: dict[Chunk, Mapping[str, ClockMap]] = {}
        self._updates: dict[tuple[Chunk, ...], ClockMap] = {}
        self._activations: dict[Chunk, Activations] = {}
        self._num_collectives: dict[Chunk, int] = {}
        self._update_of: dict[Chunk, ClockMap] = {}
        self._static_of: dict[Chunk, Mapping[str, int]] = {}
        self._held: dict[tuple[Chunk, ...], Mapping[str, int]] = {}
        self._seconds: dict[tuple[Chunk, ...], list[tuple[str, float, float]]] = {}
        self._hosts: dict[tuple[Chunk, ...], tuple[float, float]] = {}
        self._kernels: dict[tuple[Chunk, ...], tuple[dict[str, float], float]] = {}

    def actions(self, chunk: Chunk) -> Mapping[str, ClockMap]:
        """Actions by kind; "F.first" is the first of a step, "B.last" or "W.last" the last."""
        if chunk not in self._actions:
            costs, optimizer = self.costs, self.costs.degrees.optimizer
            level = optimizer.parallel_level
            every = costs.stack.gathers_each_forward(costs.degrees)
            actions = {"F": costs.action(chunk, "F", gathers=every)}
            first = costs.action(chunk, "F", gathers=level >= 1)
            if costs.stack.gathers_ahead and not every:  # they begin with the step, whenever the tensor arrives
                first = first._replace(prefetch_ps=max(0.0, first.work_ps - actions["F"].work_ps))
            actions["F.first"] = first
            for part in ("I", "W", "B") if costs.split_backward else ("B",):  # some schedules split only some
                reduces = part != "I"
                each = reduces and optimizer.reduced_per_micro_batch
                actions[part] = costs.action(chunk, part, gathers=level >= 3, reduces=each)
                if reduces:
                    actions[f"{part}.last"] = costs.action(chunk, part, gathers=level >= 3, reduces=True)
            self._actions[chunk] = actions
        return self._actions[chunk]

    def num_collectives(self, chunk: Chunk) -> int:
        """The number of collectives of a chunk in one micro-batch, without those of the optimizer."""
        if chunk not in self._num_collectives:
            parts = ("F", "I", "W") if self.costs.split_backward else ("F", "B")
            own = [(*self.costs.owner_of(piece), count) for piece, count in chunk.pieces]
            self._num_collectives[chunk] = sum(
                count * sum(line.kind == COLLECTIVE for part in parts for line in costs.lines(piece, part))
                for costs, piece, count in own
            )
        return self._num_collectives[chunk]

    def update(self, chunks: tuple[Chunk, ...]) -> ClockMap:
        """The optimizer's work on a rank with these chunks."""
        if chunks not in self._updates:
            parts = [self._update(chunk).times(len(list(equal))) for chunk, equal in groupby(chunks)]
            self._updates[chunks] = functools.reduce(ClockMap.then, parts, ClockMap())
        return self._updates[chunks]

    def _update(self, chunk: Chunk) -> ClockMap:
        if chunk not in self._update_of:
            self._update_of[chunk] = self.costs.update(chunk)
        return self._update_of[chunk]

    def activations(self, chunk: Chunk) -> Activations:
        """The bytes that a chunk keeps per micro-batch, and those that its actions need temporarily."""
        if chunk not in self._activations:
            found = chunk_activations([(self.costs.footprint(piece), count) for piece, count in chunk.pieces])
            forward, whole, inputs, weights = map(int, found.during)
            self._activations[chunk] = found._replace(during=(forward, whole, inputs, weights))
        return self._activations[chunk]

    def late_gradient_bytes(self, chunk: Chunk) -> int:
        """The bytes of a chunk's gradients that are allocated by the first action that computes them, as in twofold's
        programs.
        """
        return int(self._static(chunk)["gradient"]) if self.costs.stack.runs_programs else 0

    def held(self, chunks: tuple[Chunk, ...]) -> Mapping[str, int]:
        """Weights, gradients and states of a rank with these chunks, by role."""
        if chunks not in self._held:
            costs, roles = self.costs, dict[str, int]()
            for chunk, count in Counter(chunks).items():
                for role, size in self._static(chunk).items():
                    roles[role] = roles.get(role, 0) + count * size
            if costs.degrees.optimizer.parallel_level >= 3 and costs.shards > 1:
                # full weights exist only while their block computes: its own and the next one's
                held = {plain(piece) for chunk in chunks for piece, _ in chunk.pieces}
                whole = {piece: costs.weight_bytes(piece) for piece in sorted(held)}
                roles["weight"] += costs.stack.whole_bytes(whole)
            self._held[chunks] = roles
        return self._held[chunks]

    def _static(self, chunk: Chunk) -> Mapping[str, int]:
        if chunk not in self._static_of:
            self._static_of[chunk] = self.costs.static_bytes(chunk)
        return self._static_of[chunk]

    def seconds(self, chunks: tuple[Chunk, ...], num_micro_batches: int) -> dict[str, float]:
        """Compute and exposed communication by call, of a step of a rank with these chunks."""
        if chunks not in self._seconds:
            once, each = _Shares(), _Shares()
            once.add(self.update(chunks), 1)
            for chunk, count in Counter(chunks).items():
                actions = self.actions(chunk)
                for name, clock_map in actions.items():
                    if name[0] == "B" and "W" in actions:  # counted as what it consists of
                        continue
                    if name.endswith((".first", ".last")):
                        if clock_map is not actions[name[0]]:
                            once.add(clock_map, count)
                            once.add(actions[name[0]], -count)  # one of them is the first, or the last
                    else:
                        each.add(clock_map, count)
            self._hosts[chunks] = once.host_s, each.host_s
            calls = sorted({*once.seconds, *each.seconds} - {"compute"})
            self._seconds[chunks] = [
                (name, once.seconds.get(name, 0.0), each.seconds.get(name, 0.0)) for name in ("compute", *calls)
            ]
        found = {name: once_s + num_micro_batches * each_s for name, once_s, each_s in self._seconds[chunks]}
        if wait_s := self._end_wait_s(chunks, found, num_micro_batches):
            call = "reduce_scatter" if self.costs.degrees.optimizer.parallel_level else "all_reduce"
            found[call] = found.get(call, 0.0) + wait_s
        return found

    def _end_wait_s(self, chunks: tuple[Chunk, ...], found: Mapping[str, float], num_micro_batches: int) -> float:
        """Seconds for which a rank waits for reductions after its last backward, that of its first chunk."""
        actions = self.actions(chunks[0])
        last = actions["W.last"] if "W.last" in actions else actions["B.last"]
        if not last.tail_ps:
            return 0.0
        late = self.host_s(chunks, num_micro_batches) > sum(found.values())  # the channel catches up meanwhile
        return (min(last.tail_ps, last.tail_if_host_bound_ps) if late else last.tail_ps) / PS_PER_S

    @cached_property
    def overlap_penalty_share(self) -> float:
        """Seconds that the kernels of a block lose during one second of a transfer between stages."""
        seconds = device_classes(self.costs, (Chunk(num_blocks=1, has_embedding=False, has_head=False),))
        return overlap_penalty_share(self.costs.machine, seconds)

    def host_s(self, chunks: tuple[Chunk, ...], num_micro_batches: int) -> float:
        """Host seconds of a step of a rank with these chunks."""
        if chunks not in self._hosts:
            self.seconds(chunks, num_micro_batches)
        once_s, each_s = self._hosts[chunks]
        return once_s + num_micro_batches * each_s

    def kernels(self, chunks: tuple[Chunk, ...], num_micro_batches: int) -> dict[str, float]:
        """Seconds of kernels of a step of a rank with these chunks, by class."""
        if chunks not in self._kernels:
            update_s = self.update(chunks).compute_ps / PS_PER_S
            self._kernels[chunks] = device_classes(self.costs, chunks), update_s
        each, update_s = self._kernels[chunks]
        return {"update": update_s} | {name: num_micro_batches * seconds for name, seconds in each.items()}


_MANY_RANKS = 8
"""Pipeline ranks from which on columns are faster, even for one configuration."""


@lru_cache(maxsize=16_384)
def _transfers(
    machine: Machine, stack: Stack, placement: tuple[int, ...], stride: int, size_bytes: int
) -> tuple[Mapping[tuple[int, int], float], int]:
    times: dict[tuple[int, int], float] = {}
    dispatch = 0
    for stage, (here, there) in enumerate(pairwise(placement)):
        if here != there:
            cost = price_transfer(machine, here * stride, there * stride, size_bytes, stride)
            dispatch = stack.dispatch_ps(cost.dispatch_ps, "transfer", "C")
            times[stage, stage + 1] = times[stage + 1, stage] = cost.together_ps
    return MappingProxyType(times), dispatch


def transfer_overlap_penalty_ps(transfer_ps: npt.NDArray[np.float64], share: float) -> npt.NDArray[np.float64]:
    """Per stage the time by which an action is slowed by the tensors that its rank sends and receives meanwhile.

    Args:
        transfer_ps: between each stage and the next one; 0 within a rank and behind the last.
        share: of a transfer's time that is lost (`LayoutCosts.overlap_penalty_share`).
    """
    longest = np.maximum(transfer_ps, np.concatenate([[0.0], transfer_ps[:-1]]))
    return np.round(64 * share * longest) / 64  # sums of such times are exact, in whatever order


class _Shares:
    def __init__(self) -> None:
        self.seconds = {"compute": 0.0}
        self.host_s = 0.0

    def add(self, clock_map: ClockMap, times: int) -> None:
        seconds = self.seconds
        seconds["compute"] += times * clock_map.compute_ps / PS_PER_S
        self.host_s += times * clock_map.dispatch_ps / PS_PER_S
        for name, time in clock_map.exposed_ps.items():
            seconds[name] = seconds.get(name, 0.0) + times * time / PS_PER_S


class RankKinds(NamedTuple):
    """The chunks of pipeline ranks: the kinds that there are, and the number of its kind for each rank."""

    kinds: tuple[tuple[Chunk, ...], ...]
    of_rank: tuple[int, ...]

    @classmethod
    def of(cls, chunks: Sequence[Chunk], schedule: Schedule) -> RankKinds:
        """The kinds of ranks for the chunks of each stage, placed as in a schedule."""
        found: list[list[Chunk]] = [[] for _ in range(schedule.num_ranks)]
        for chunk, rank in zip(chunks, schedule.placement, strict=True):
            found[rank].append(chunk)
        numbers: dict[tuple[Chunk, ...], int] = {}
        of_rank = tuple(numbers.setdefault(tuple(own), len(numbers)) for own in found)
        return cls(tuple(numbers), of_rank)


@dataclass(frozen=True, kw_only=True)
class PipelineForecast:
    """The forecast of one configuration.

    Args:
        layout: the costs of its layout.
        degrees: how it is spread.
        chunks: per stage of the pipeline.
        ranks: the same by pipeline rank.
    """

    layout: LayoutCosts
    degrees: Degrees
    chunks: tuple[Chunk, ...]
    ranks: RankKinds

    @property
    def schedule(self) -> Schedule:
        """The schedule of the pipeline."""
        return self.degrees.pipeline

    def updates(self) -> list[ClockMap]:
        """Per pipeline rank the work after its last action."""
        return [self.layout.update(self.ranks.kinds[kind]) for kind in self.ranks.of_rank]

    def transfers(self) -> tuple[Mapping[tuple[int, int], float], int]:
        """(sending stage, receiving stage) -> picoseconds on the link, and the host time of each end.

        Priced between the first ranks of the two groups; stages of one rank pass tensors in place.
        """
        costs = self.layout.costs
        size = costs.numbers[costs.template.pieces["block"].leaves]
        return _transfers(costs.machine, costs.stack, self.schedule.placement, self.degrees.strides[-1], size)

    def end_ps(self) -> float:
        """The end of the pipeline on the stack.

        Raises:
            TwofoldError: a schedule whose ranks wait for each other.
        """
        transfer_ps, send_ps = self.transfers()
        column = np.array([transfer_ps.get((stage, stage + 1), 0.0) for stage in range(self.schedule.num_stages)])
        overlap_penalty_ps = transfer_overlap_penalty_ps(column, self.overlap_penalty_share)
        if not self.runtime.holds_host and self.schedule.num_ranks >= _MANY_RANKS:
            kinds = dict.fromkeys(self.chunks)
            columns = {chunk: action_columns(self.layout.actions(chunk)) for chunk in kinds}
            ends = pipeline_ends_ps(
                self.schedule, np.stack([columns[chunk] for chunk in self.chunks], axis=-1)[..., None],
                np.array([(update.work_ps, update.cold_start_ps) for update in self.updates()]).T[..., None],
                column[:, None], np.array([float(send_ps)]), self.runtime, overlap_penalty_ps[:, None],
            )  # fmt: skip
            return float(ends[0])
        return pipeline_end_ps(
            self.schedule, [self.layout.actions(chunk) for chunk in self.chunks], self.updates(), transfer_ps, send_ps,
            replace(self.runtime, overlap_penalty_ps=overlap_penalty_ps.tolist()),
        )  # fmt: skip

    @property
    def runtime(self) -> Runtime:
        """The sends and starts of the stack, without the time that transfers cost compute."""
        stack, degrees = self.layout.costs.stack, self.degrees
        return Runtime(
            blocking=stack.waits_for_sends(degrees), synchronises=stack.synchronises(degrees),
            fetch_ps=stack.fetch_s * PS_PER_S, together=stack.steps_together(degrees),
            opens_with_gathers=self.opens_with_gathers,
        )  # fmt: skip

    @property
    def opens_with_gathers(self) -> bool:
        """As in `Runtime`. It holds for twofold's programs if weights are gathered once per step."""
        stack = self.layout.costs.stack
        return stack.runs_programs and not stack.gathers_each_forward(self.degrees)

    @property
    def overlap_penalty_share(self) -> float:
        """As of the layout; 0 if twofold's own forecast does not slow compute during transfers because the step is too
        long to be walked.
        """
        costs = self.layout.costs
        if costs.stack.runs_programs:
            own = sum(self.layout.num_collectives(chunk) for chunk in self.chunks)
            if (own + 2 * (self.schedule.num_stages - 1)) * self.degrees.num_micro_batches > MOST_MESSAGES:
                return 0.0
        return self.layout.overlap_penalty_share

    def forecast(self, end_ps: float, activations: Sequence[int]) -> Forecast:
        """The prediction, given the end of the pipeline and the peaks of its ranks' activations."""
        costs = self.layout.costs
        step_s = (end_ps + costs.stack.step_s * PS_PER_S) / PS_PER_S
        count = self.degrees.num_micro_batches
        kinds, of_rank = self.ranks
        stack, share_of = costs.stack, [self.layout.seconds(chunks, count) for chunks in kinds]
        total_of = [sum(share.values()) for share in share_of]
        busiest = kinds[total_of.index(max(total_of))]
        parts = self._parts(step_s, busiest)
        if stack.longer:
            host_s = parts.get("dispatch", 0.0)
            stretch = 1 + stack.longer * (1 - host_s / step_s)
            step_s *= stretch
            parts = {name: seconds * (1 + stack.longer * (name != "dispatch")) for name, seconds in parts.items()}
            share_of = [{call: stretch * seconds for call, seconds in share.items()} for share in share_of]
        compute = sum(share_of[kind]["compute"] for kind in of_rank) / len(of_rank)
        exposed = sum(sum(share_of[kind].values()) for kind in of_rank) / len(of_rank) - compute
        peak, memory = self._memory(activations)
        slower = stack.chip_spread * slowest_of(self.degrees.num_ranks)
        if slower:  # products and attention are bound by clocks, which differ from chip to chip
            added = {name: slower * parts.get(name, 0.0) for name in ("matrix", "attention")}
            step_s += sum(added.values())
            parts = {name: seconds + added.get(name, 0.0) for name, seconds in parts.items()}
        slower = stack.slower_hosts
        low_s, high_s = step_interval(
            stack.known_to(costs.machine), step_s, parts, stack.unexplained,
            self.layout.host_s(busiest, count) * math.exp(slower) if slower else 0.0,
        )  # fmt: skip
        return Forecast(
            step_s=step_s, low_s=low_s, high_s=high_s, peak_bytes=peak, memory=memory,
            bubble_fraction=max(0.0, 1 - (compute + exposed) / step_s) if step_s else 0.0, exposed_comm_s=exposed,
            rank_s=tuple(share_of[kind] for kind in of_rank),
        )  # fmt: skip

    def _parts(self, step_s: float, chunks: tuple[Chunk, ...]) -> dict[str, float]:
        """Seconds of the step by class of instructions, from the busiest rank."""
        layout, count = self.layout, self.degrees.num_micro_batches
        machine, stack, times = layout.costs.machine, layout.costs.stack, layout.seconds(chunks, count)
        exposed_s = sum(times.values()) - times["compute"]
        transfer_s = 0.0
        if self.schedule.num_ranks > 1:
            hops = 2 * count * len(chunks) if stack.waits_for_sends(self.degrees) else 2 * (self.schedule.num_ranks - 1)
            transfer_s = hops * self.longest_transfer_ps / PS_PER_S
        return class_seconds(
            machine, step_s, layout.kernels(chunks, count), exposed_s, transfer_s, layout.host_s(chunks, count)
        )

    @cached_property
    def longest_transfer_ps(self) -> float:
        """The longest time on the link for one tensor between two stages."""
        return max(self.transfers()[0].values(), default=0.0)

    def activations(self) -> list[int]:
        """The peaks of activations on each pipeline rank, as of `peak_activations`."""
        kept, kept_for_weights, during = zip(*(self.layout.activations(chunk) for chunk in self.chunks), strict=True)
        gradients = [self.layout.late_gradient_bytes(chunk) for chunk in self.chunks]
        return peak_activations(self.schedule, kept, kept_for_weights, during, gradients)

    @property
    def _forwards_first(self) -> bool:
        """Whether a rank of other software does all forwards before its first backward."""
        if self.layout.costs.stack.runs_programs:
            return False
        alone = self.schedule.num_stages == self.schedule.num_ranks
        return alone and (self.degrees.num_micro_batches == 1 or self.degrees.schedule == "gpipe")

    def _memory(self, activations: Sequence[int]) -> tuple[int, dict[str, int]]:
        """The largest peak over pipeline ranks, and its composition."""
        largest = [0] * len(self.ranks.kinds)
        for kind, size in zip(self.ranks.of_rank, activations, strict=True):
            largest[kind] = max(largest[kind], int(size))
        best: tuple[int, dict[str, int]] = (-1, {})
        costs, forwards_first = self.layout.costs, self._forwards_first
        for chunks, size in zip(self.ranks.kinds, largest, strict=True):
            outputs = costs.outputs_bytes if any(chunk.has_head for chunk in chunks) else 0
            received = costs.sizes.arrival_bytes * sum(2 - chunk.has_embedding - chunk.has_head for chunk in chunks)
            roles = costs.stack.memory(
                {"activation": size, **self.layout.held(chunks)}, self.degrees, outputs,
                received if self.degrees.pp > 1 else 0,
            )  # fmt: skip
            if forwards_first and "gradient" in roles:
                # gradients come while the first backward frees what its forward kept
                freed = sum(self.layout.activations(chunk).kept for chunk in chunks)
                gone = min(roles["gradient"], freed)
                roles = {**roles, "gradient": roles["gradient"] - gone}
            total = sum(roles.values())
            if total > best[0]:
                best = total, roles
        return best[0], dict(sorted(best[1].items()))
