"""One configuration of a transformer under twofold's own executor: bodies, pipeline, times and memory.

All figures are those of the lowered program, without lowering every block and micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from costmodels.interval import step_interval
from costmodels.machine.machine import Machine
from costmodels.price.instruction import Cost, price_launch, price_pieces, price_transfer, price_wait
from costmodels.price.meetings import Event, meetings
from costmodels.price.power import Load
from plans.degrees import Degrees
from plans.degrees.groups import mesh_axes
from plans.layout import Layout
from plans.model.transformer import TransformerConfig
from plans.redistribution import Piece, TransferPieces
from plans.schedules import Schedule
from plans.schedules.arrivals import releases_of_rows
from plans.schedules.variants import VARIANTS, counts_of_variants, variant_of_rows
from plans.step_parts import PartsTally, mean_ps
from plans.timeline import PS_PER_S
from simulator.channels import MOST_MESSAGES, pair_rates
from simulator.engine.garbage import without_collection
from simulator.estimate.chunk import Chunk
from simulator.estimate.classes import class_seconds
from simulator.estimate.pieces import PricedPieces
from simulator.forecast.body import COMPUTE, ISSUE, WAIT, Op
from simulator.forecast.columns import PipelineCosts, PipelineTimes, action_times, pipeline_times
from simulator.forecast.contention import Contention
from simulator.forecast.parts import Turn
from simulator.forecast.pipeline_rank import PipelineRank, RankKey, pipeline_rank
from simulator.forecast.program import channel_axes
from simulator.forecast.rank import RankBodies, Transfers, pipeline_costs
from simulator.forecast.symbolic import Wanted
from simulator.result import Forecast

__all__ = ["StepForecast", "backward_kinds"]

_MUCH = 0.015
"""Largest share of a step lost to concurrent communication; above it, bodies are simulated in time order."""


@lru_cache(maxsize=256)
def backward_kinds(schedule: Schedule) -> tuple[Wanted, ...]:
    """Per stage its kinds of backward: ("B", "I" or "W", whether no later action of the stage adds to gradients)."""
    found: list[set[tuple[str, bool]]] = [set() for _ in range(schedule.num_stages)]
    for order in schedule.order:
        closed: set[int] = set()
        for action in reversed(order):
            kind = str(action.kind)
            if kind != "F":
                found[action.stage].add((kind, action.stage not in closed))
            if kind in "BW":
                closed.add(action.stage)
    return tuple(map(frozenset, found))


_STEADY = 1e-6
"""Share of a step. If the intervals of ranks differ by less, every further step is like the last."""

_EVENTS: Mapping[int, Literal["compute", "issue", "wait"]] = {COMPUTE: "compute", ISSUE: "issue", WAIT: "wait"}


class StepForecast:
    """The forecast of one configuration.

    Args:
        config: of the transformer.
        degrees: how it is spread.
        machine: that it runs on.
        costs: of its layout: templates, sizes and prices of cells.
        chunks: per stage of the pipeline.
    """

    def __init__(
        self,
        config: TransformerConfig,
        degrees: Degrees,
        machine: Machine,
        costs: PricedPieces,
        chunks: Sequence[Chunk],
    ) -> None:
        self.config = config
        self.degrees = degrees
        self.machine = machine
        self.costs = costs
        assert costs.numbers  # sizes that the degrees do not divide are refused here
        self.chunks = tuple(chunks)
        self.schedule = degrees.pipeline
        self.stages_of = [self.schedule.stages_of(rank) for rank in range(self.schedule.num_ranks)]

    @cached_property
    def ranks(self) -> list[PipelineRank]:
        """The bodies of each pipeline rank."""
        with without_collection():
            return [self._rank(number) for number in range(self.schedule.num_ranks)]

    def _rank(self, number: int) -> PipelineRank:
        stages, kinds = self.stages_of[number], backward_kinds(self.schedule)
        return pipeline_rank(
            RankKey(
                self.costs, tuple(self.chunks[stage] for stage in stages), tuple(kinds[stage] for stage in stages),
            )
        )  # fmt: skip

    @cached_property
    def bodies(self) -> list[RankBodies]:
        """The bodies of each pipeline rank, with compute and communication slowed by each other.

        The first forward of a rank begins when its input arrives. Gathers that opened the step are over then, or slow
        the rest of it.
        """
        found: dict[int, RankBodies] = {}
        arrival_ps = 0
        for stage, rank in enumerate(self.schedule.placement):
            if rank not in found:
                found[rank] = self.ranks[rank].bodies(arrival_ps)
            if len(found) == len(self.ranks):
                break
            number = self.stages_of[rank].index(stage)
            arrival_ps = found[rank].maps.first_sent_ps(number, arrival_ps) + self._transfers[stage, "F"].alone_ps
        return [found[rank] for rank in range(len(self.ranks))]

    @cached_property
    def pipeline_costs(self) -> PipelineCosts:
        """The input of the column evaluator."""
        return self._pipeline_costs(self.bodies, self._slowed_transfers)

    def _pipeline_costs(
        self, bodies: Sequence[RankBodies], transfers: Mapping[tuple[int, str], Transfers]
    ) -> PipelineCosts:
        return pipeline_costs(self.schedule, bodies, transfers, posts_ahead=self.degrees.posts_ahead)

    @cached_property
    def _transfers(self) -> dict[tuple[int, str], Transfers]:
        placement, stride = self.schedule.placement, self.degrees.strides[-1]
        size, wait_ps = self.costs.sizes.arrival_bytes, price_wait(self.machine).dispatch_ps
        found = {}
        for stage in range(self.schedule.num_stages - 1):
            here, there = placement[stage], placement[stage + 1]
            for key, (one, other) in (((stage, "F"), (here, there)), ((stage + 1, "B"), (there, here))):
                cost = self._transfer(one, other, size, stride)
                found[key] = Transfers(
                    work_ps=cost.together_ps, alone_ps=cost.work_ps, receive_dispatch_ps=cost.dispatch_ps,
                    wait_dispatch_ps=wait_ps,
                )  # fmt: skip
        return found

    @cached_property
    def _slowed_transfers(self) -> dict[tuple[int, str], Transfers]:
        """Transfers with their average time while kernels run on both ends. A tensor that is received only when it is
        needed overlaps with few kernels."""
        rates, placement = pair_rates(self.machine), self.schedule.placement
        if rates is None or not self.degrees.posts_ahead:
            return self._transfers
        found = {}
        for (stage, way), transfer in self._transfers.items():
            ends = {placement[stage], placement[stage + (1 if way == "F" else -1)]}
            held = (
                [self.ranks[rank].undisturbed.holds_ps(rates, transfer.work_ps) for rank in ends]
                if len(ends) > 1
                else []
            )
            found[stage, way] = replace(transfer, work_ps=transfer.work_ps + max(held, default=0))
        return found

    def _transfer(self, here: int, there: int, size_bytes: int, stride: int) -> Cost:
        """From one pipeline rank to another; on a graph of links what all pairs do to the links is found out."""
        if self.machine.graph is None or here == there:
            return price_transfer(self.machine, here * stride, there * stride, size_bytes, stride)
        ends = self.degrees.stage_ranks(here), self.degrees.stage_ranks(there)
        pieces = TransferPieces(
            Piece(src_rank=src, dst_rank=dst, region=((0, size_bytes),)) for src, dst in zip(*ends, strict=True)
        )
        return price_pieces(self.machine, pieces, 1)

    @cached_property
    def peaks(self) -> list[tuple[int, dict[str, int]]]:
        """Per pipeline rank the peak of its memory in bytes, and the bytes of each role then."""
        posts_ahead = self.degrees.posts_ahead
        return [
            rank.peak(self.schedule, stages, posts_ahead)
            for rank, stages in zip(self.ranks, self.stages_of, strict=True)
        ]

    @property
    def peak_bytes(self) -> int:
        """The largest peak of any rank."""
        return max(peak for peak, _ in self.peaks)

    def peak_above(self, limit_bytes: int) -> int | None:
        """The peak of a rank that exceeds a limit; None if all fit. Ranks are lowered until one is found."""
        with without_collection():
            for number, stages in enumerate(self.stages_of):
                peak, _ = self._rank(number).peak(self.schedule, stages, self.degrees.posts_ahead)
                if peak > limit_bytes:
                    return peak
        return None

    @cached_property
    def _first_step(self) -> PipelineTimes:
        return pipeline_times(self.schedule, self.pipeline_costs)

    @cached_property
    def _second_step(self) -> PipelineTimes:
        return self._after(self.pipeline_costs, self._first_step)

    @cached_property
    def _contention(self) -> Contention | None:
        """Whether concurrent communication costs much, and the step is not too long to be simulated in time order."""
        found = Contention(
            self.degrees, self.config.kv_heads, self.machine, [rank.undisturbed for rank in self.ranks],
            self._transfers, self.costs.sizes.arrival_bytes, posts_ahead=self.degrees.posts_ahead,
        )  # fmt: skip
        if found.num_messages > MOST_MESSAGES:
            return None
        return found if found.most_ps > _MUCH * int(self._first_step.step_ps) else None

    def end_ps(self) -> int:
        """Picoseconds from the start of the first step, which all ranks begin together, to its last end."""
        if self._contention is not None:
            return _last_interval(self._contention.steps(1))
        return int(self._first_step.step_ps) + price_launch(self.machine)

    def pace_ps(self) -> int:
        """Picoseconds from the end of the first step to the end of the second, which every rank begins when its first
        is over: in schedules whose ranks do not end together, steps overlap."""
        if self._contention is not None:
            return _last_interval(self._contended_steps)
        return self._interval_ps(self._first_step, self._second_step)

    @property
    def is_walked(self) -> bool:
        """Whether concurrent communication costs so much that the step is simulated in time order."""
        return self._contention is not None

    @cached_property
    def alone_s(self) -> float:
        """The step in seconds if communication of different kinds did not slow each other, and kernels did not slow
        transfers; computed without a walk.

        It is a lower bound on the step. The pace of a step that is not walked is no such bound: it gives every transfer
        the average time that kernels cost it, also where its ranks are idle.
        """
        if self._slowed_transfers == self._transfers:
            return self._interval_ps(self._first_step, self._second_step) / PS_PER_S
        return self._changed_pace_ps(self._pipeline_costs(self.bodies, self._transfers)) / PS_PER_S

    def _changed_pace_ps(self, costs: PipelineCosts) -> int:
        first = pipeline_times(self.schedule, costs)
        return self._interval_ps(first, self._after(costs, first))

    def _after(self, costs: PipelineCosts, step: PipelineTimes) -> PipelineTimes:
        """The step after one; without a pipeline all steps are equal."""
        return step if self.schedule.num_ranks == 1 else pipeline_times(self.schedule, costs, start_ps=step.end_ps)

    def _interval_ps(self, first: PipelineTimes, second: PipelineTimes) -> int:
        launch_ps = price_launch(self.machine)
        return int(second.end_ps.max() - (0 if second is first else first.end_ps.max())) + launch_ps

    @cached_property
    def _contended_steps(self) -> Sequence[Sequence[PartsTally]]:
        assert self._contention is not None
        return self._contention.steps(self._num_paced)

    @property
    def _num_paced(self) -> int:
        """The number of simulated steps from which the step time is taken."""
        return 1 if self.schedule.num_ranks == 1 else 2

    def changed_pace_ps(self, change: Callable[[str, Op], Op], transfers: float = 1.0) -> int:
        """The pace if operations took other times (`RankBodies.changed`), and transfers between stages longer."""
        if self._contention is not None:
            return _last_interval(self._contention.steps(self._num_paced, change, transfers))
        changed = {id(own): own.changed(change) for own in self.bodies}
        longer = {
            key: replace(slowed_transfer, work_ps=round(slowed_transfer.work_ps * transfers))
            for key, slowed_transfer in self._slowed_transfers.items()
        }
        costs = self._pipeline_costs([changed[id(own)] for own in self.bodies], longer)
        return self._changed_pace_ps(costs)

    def slowed_by_ps(self, factors: Mapping[int, float]) -> int:
        """The extra step time if some pipeline ranks take longer for their own work, compute and host.

        The cost of concurrent communication is assumed to stay the same.

        Args:
            factors: pipeline rank -> how many times as long.
        """
        rates = pair_rates(self.machine)

        def slower(bodies: RankBodies, factor: float) -> RankBodies:
            def longer(_: str, op: Op) -> Op:
                work_ps = round(op.work_ps * factor) if op.kind == COMPUTE else op.work_ps
                return op._replace(work_ps=work_ps, dispatch_ps=round(op.dispatch_ps * factor))

            return bodies.changed(longer).slowed(rates)

        costs = self._pipeline_costs(
            [
                slower(rank.undisturbed, factors[number]) if number in factors else own
                for number, (rank, own) in enumerate(zip(self.ranks, self.bodies, strict=True))
            ],
            self._slowed_transfers,
        )
        return self._changed_pace_ps(costs) - self._interval_ps(self._first_step, self._second_step)

    @property
    def kept_bytes(self) -> int:
        """Weights and optimizer states that the rank with most of them keeps from step to step."""
        return max(rank.kept_bytes for rank in self.ranks)

    @property
    def num_operations(self) -> int:
        """Kernels, collectives, sends and waits of a step, of one rank for each pipeline rank: no more than the
        instructions of its program, which also receives, and waits for what it sent."""
        return sum(
            rank.num_operations(counts)
            for rank, counts in zip(self.ranks, counts_of_variants(self.schedule), strict=True)
        )  # fmt: skip

    def forecast(self) -> Forecast:
        """The complete prediction; its step is the pace of training (`pace_ps`).

        The first rank keeps it for every configuration with the same ranks, transfers and schedule.
        """
        known, numbers = self.ranks[0].forecasts, tuple(rank.number for rank in self.ranks)
        key = self.schedule, self.degrees.posts_ahead, self.machine, numbers, tuple(self._transfers.items())
        if key not in known:
            with without_collection():
                known[key] = self._forecast()
        return known[key]

    def _forecast(self) -> Forecast:
        pace_ps = self.pace_ps()
        step_s = pace_ps / PS_PER_S
        work = [own.seconds(counts) for own, counts in zip(self.bodies, counts_of_variants(self.schedule), strict=True)]
        peaks = self.peaks
        peak_bytes, memory = max(peaks, key=lambda peak: peak[0])
        of_ranks = [tally.parts(pace_ps) for tally in self._tallies]
        exposed_s = [own.exposed_ps / PS_PER_S for own in of_ranks]
        busiest, busiest_exposed_s = max(
            zip(work, exposed_s, strict=True), key=lambda both: both[0].compute_s + both[1]
        )
        exposed_comm_s, host_wait_s, bubble_s = (
            mean_ps(part, ((own, 1) for own in of_ranks)) / PS_PER_S
            for part in ("exposed_ps", "host_wait_ps", "bubble_ps")
        )
        longest_s = max((transfer.work_ps for transfer in self._transfers.values()), default=0) / PS_PER_S
        parts = class_seconds(
            self.machine, step_s, busiest.kernels_s, busiest_exposed_s,
            2 * (self.schedule.num_ranks - 1) * longest_s, busiest.host_s,
        )  # fmt: skip
        low_s, high_s = step_interval(self.machine, step_s, parts)
        return Forecast(
            step_s=step_s, low_s=low_s, high_s=high_s, peak_bytes=peak_bytes, memory=memory,
            bubble_fraction=bubble_s / step_s if step_s else 0.0, exposed_comm_s=exposed_comm_s,
            host_wait_s=host_wait_s,
            rank_s=tuple(
                {
                    "compute": own.compute_ps / PS_PER_S,
                    **{call: time / PS_PER_S for call, time in own.exposed_by_call.items()},
                } for own in of_ranks
            ),
        )  # fmt: skip

    def load(self) -> Load:
        """The work of the rank that computes most in a step, as `costmodels.interval.program_load` counts it."""
        assert self.machine.compute.at_MHz is not None
        step_s, found = self.pace_ps() / PS_PER_S, []
        for rank, counts in zip(self.ranks, counts_of_variants(self.schedule), strict=True):
            work = dict.fromkeys(("matrix", "attention", "memory", "message"), 0)
            energy = dict.fromkeys(work, 0)
            own, met = rank.undisturbed, Counter[int]()
            for ops, count in ((own.begin, 1), (own.end, 1), *((own.action(*key), n) for key, n in counts.items())):
                for op in ops:
                    if op.kind in (COMPUTE, ISSUE):
                        name = op.name if op.kind == COMPUTE else "message"
                        work[name] += count * op.work_ps
                        energy[name] += count * op.energy_pJ
                met += Counter({members: count * each for members, each in meetings(self._events(ops)).items()})
            seconds, energy_J = ({name: each / PS_PER_S for name, each in some.items()} for some in (work, energy))
            found.append(Load(self.machine.compute.at_MHz, step_s, seconds, energy_J, met))
        return max(found, key=lambda load: load.compute_s)

    @cached_property
    def _mesh(self) -> Layout:
        degrees = self.degrees
        return mesh_axes(
            dp=degrees.dp, cp=degrees.cp, tp=degrees.tp, num_kv_heads=self.config.kv_heads, ep=degrees.ep
        ).mesh()

    def _events(self, ops: Iterable[Op]) -> Iterator[Event]:
        for op in ops:
            if op.kind in _EVENTS:
                members = self._mesh.size(channel_axes(op.channel)) if op.kind == ISSUE else 1
                yield Event(_EVENTS[op.kind], op.work_ps, op.token, members)

    @cached_property
    def _tallies(self) -> Sequence[PartsTally]:
        """The parts of the third step per pipeline rank; simulations report the third step too."""
        if self._contention is not None:
            *before, last = self._contended_steps
            lengths = [own.end_ps - first.end_ps for first, own in zip(*before, last, strict=True)] if before else []
            is_steady = max(lengths, default=0) - min(lengths, default=0) <= _STEADY * last[0].end_ps
            return last if is_steady else self._contention.steps(self._num_paced + 1)[-1]
        schedule, costs, ahead = self.schedule, self.pipeline_costs, self.degrees.posts_ahead
        start_ps = self._second_step.end_ps if schedule.num_ranks > 1 else np.zeros(1, dtype=np.int64)
        launch_ps = price_launch(self.machine)
        arrived = (action_times(schedule, costs, start_ps=start_ps).received_ps + launch_ps).tolist()
        names = [VARIANTS[number] for number in variant_of_rows(schedule).tolist()]
        posts = {way: np.asarray(each).tolist() for way, each in costs.receive_dispatch_ps.items()}
        send_wait_ps = np.asarray(costs.wait_dispatch_ps).tolist()
        releases = releases_of_rows(schedule).tolist()
        found, row = [], 0
        for number, (rank, own, stages) in enumerate(zip(self.ranks, self.bodies, self.stages_of, strict=True)):
            place = {stage: at for at, stage in enumerate(stages)}
            turns = []
            for action in schedule.order[number]:
                ops = own.action(place[action.stage], names[row])
                post_ps = posts["F" if names[row][0] == "F" else "B"][action.stage]
                turns.append(Turn(ops, arrived[row], post_ps, releases[row]))
                row += 1
            found.append(
                rank.walk.step(
                    own.begin, turns, own.end, start_ps=int(start_ps[number]), launch_ps=launch_ps,
                    posts_ahead=ahead, send_wait_ps=send_wait_ps[number],
                )
            )  # fmt: skip
        return found


def _last_interval(steps: Sequence[Sequence[PartsTally]]) -> int:
    ends = [0, *(round(max(rank.end_ps for rank in step)) for step in steps)]
    return ends[-1] - ends[-2]
