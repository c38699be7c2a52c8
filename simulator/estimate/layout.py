"""What all configurations of one layout share: clock maps, memory and seconds of chunks."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby

from plans.lower.symbolic import plain
from plans.schedules import Schedule
from plans.timeline import PS_PER_S
from simulator.estimate.action import ClockMap
from simulator.estimate.chunk import Chunk
from simulator.estimate.chunks import Chunks
from simulator.estimate.classes import device_classes, overlap_penalty_share
from simulator.estimate.exchanges import hidden_ps
from simulator.estimate.memory import Activations, chunk_activations
from simulator.estimate.pricing import priced_lines
from simulator.lines import COLLECTIVE

__all__ = ["LayoutCosts", "is_split"]


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

    def unpaired_ps(self, chunks: Sequence[Chunk]) -> int:
        """The messages of experts that nothing hides: those of the first forward and the last backward through all
        chunks, which no other micro-batch accompanies."""
        costs = self.costs
        if not costs.stack.hides_experts:
            return 0
        exposed = replace(costs.stack, hides_experts=False)

        def alone_ps(piece: str) -> int:
            owner, name = costs.owner_of(piece)
            parts = owner.template.pieces[name].parts
            return sum(
                hidden_ps(priced_lines(parts[part], owner.numbers, owner.groups, owner.machine, exposed))
                for part in ("F", "I" if costs.split_backward else "B")
            )

        return sum(count * alone_ps(piece) for chunk in chunks for piece, count in chunk.pieces)

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
            found = chunk_activations(
                [(self.costs.footprint(piece, gathers=self._gathers_weights), count) for piece, count in chunk.pieces]
            )
            forward, whole, inputs, weights = map(int, found.during)
            self._activations[chunk] = found._replace(during=(forward, whole, inputs, weights))
        return self._activations[chunk]

    @property
    def _gathers_weights(self) -> bool:
        """Whether full weights exist only while their piece computes: its own and the next one's."""
        return self.costs.degrees.optimizer.parallel_level >= 3 and self.costs.shards > 1

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
            if self._gathers_weights:
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
