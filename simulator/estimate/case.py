"""One configuration of a transformer: its pipeline, and the estimate from the times of the pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from costmodels import Machine
from costmodels.interval import step_interval
from costmodels.price.instruction import price_transfer
from costmodels.price.power import slowest_of
from costmodels.price.torch_hosts import later
from plans.degrees import Degrees
from plans.schedules import Schedule
from plans.timeline import PS_PER_S
from simulator.channels import MOST_MESSAGES
from simulator.estimate.action import ClockMap
from simulator.estimate.batch import action_columns, pipeline_ends_ps
from simulator.estimate.chunk import Chunk
from simulator.estimate.classes import class_seconds
from simulator.estimate.layout import LayoutCosts
from simulator.estimate.memory import peak_activations
from simulator.estimate.pipeline import Runtime, pipeline_end_ps
from simulator.result import Forecast
from simulator.stacks import Stack

__all__ = ["PipelineForecast", "RankKinds", "transfer_overlap_penalty_ps"]


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
        """As of the layout, for all micro-batches but one: what a rank sends and receives runs during its actions of
        other micro-batches. 0 if twofold's own forecast does not slow compute during transfers because the step is too
        long to be walked.
        """
        costs = self.layout.costs
        if costs.stack.runs_programs:
            own = sum(self.layout.num_collectives(chunk) for chunk in self.chunks)
            if (own + 2 * (self.schedule.num_stages - 1)) * self.degrees.num_micro_batches > MOST_MESSAGES:
                return 0.0
        return self.layout.overlap_penalty_share * (1.0 - 1.0 / self.degrees.num_micro_batches)

    def forecast(self, end_ps: float, activations: Sequence[int]) -> Forecast:
        """The prediction, given the end of the pipeline and the peaks of its ranks' activations."""
        costs = self.layout.costs
        step_s = (end_ps + self.layout.unpaired_ps(self.chunks) + costs.stack.step_s * PS_PER_S) / PS_PER_S
        count = self.degrees.num_micro_batches
        kinds, of_rank = self.ranks
        stack, share_of = costs.stack, [self.layout.seconds(chunks, count) for chunks in kinds]
        total_of = [sum(share.values()) for share in share_of]
        busiest = kinds[total_of.index(max(total_of))]
        parts = self._parts(step_s, busiest)
        if longer := stack.longer_on(costs.machine):
            host_s = parts.get("dispatch", 0.0)
            stretch = 1 + longer * (1 - host_s / step_s)
            step_s *= stretch
            parts = {name: seconds * (1 + longer * (name != "dispatch")) for name, seconds in parts.items()}
            share_of = [{call: stretch * seconds for call, seconds in share.items()} for share in share_of]
        compute = sum(share_of[kind]["compute"] for kind in of_rank) / len(of_rank)
        exposed = sum(sum(share_of[kind].values()) for kind in of_rank) / len(of_rank) - compute
        peak, memory = self._memory(activations)
        slower = stack.chip_spread * slowest_of(self.degrees.num_ranks)
        if slower:  # products and attention are bound by clocks, which differ from chip to chip
            added = {name: slower * parts.get(name, 0.0) for name in ("matrix", "attention")}
            step_s += sum(added.values())
            parts = {name: seconds + added.get(name, 0.0) for name, seconds in parts.items()}
        host_share = 0.0 if stack.runs_programs else self.layout.host_s(busiest, count) / max(total_of)
        low_s, high_s = step_interval(
            stack.known_to(costs.machine), step_s, parts, stack.unexplained, host_share, later(stack.host)
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
        """Whether a rank of other software does all forwards before its first backward, which makes the gradients."""
        stack = self.layout.costs.stack
        if stack.runs_programs or stack.holds_gradients or stack.reserves_gradients(self.degrees):
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
