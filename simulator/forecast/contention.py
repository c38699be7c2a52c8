"""The cost of concurrent communication, and the step simulated in time order where that cost is large.

A collective is priced together with its siblings, which run at the same time (`Cost.together_ps`), and clock maps
include how it slows the compute of its body. They leave out two effects: other communication on the same links
(collectives on other channels or of other pipeline ranks, transfers), and compute that is slowed by transfers and by
collectives of earlier bodies. `Contention.most_ps` estimates their largest cost. Where it is large, `ends_ps` simulates
the step in time order (`simulator.forecast.walk`) with the engine's claims on links, all siblings together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from costmodels.machine.machine import Machine
from costmodels.price.group import mesh_group
from costmodels.price.instruction import price_collective, price_launch, price_wait
from costmodels.price.links import collective_claims, transfer_claims
from costmodels.price.sharing import claims_of
from costmodels.price.traffic import plain_call
from plans.degrees import Degrees
from plans.degrees.groups import mesh_axes
from plans.layout import Layout
from plans.schedules import Schedule
from plans.schedules.arrivals import releases_of_rows
from plans.schedules.variants import VARIANTS, counts_of_variants, variant_of_rows
from plans.step_parts import PartsTally
from simulator.channels import PairRates, pair_rates
from simulator.forecast.body import ARRIVE, COMPUTE, ISSUE, SEND, WAIT, Op
from simulator.forecast.overlap import host_lead_ps
from simulator.forecast.program import channel_axes
from simulator.forecast.rank import RankBodies, Transfers
from simulator.forecast.run import Run
from simulator.forecast.walk import POST, Actions, Line, TransferQueue, Transmission, simulate_steps
from simulator.lines import Payload

__all__ = ["Contention"]

Needs = Mapping[Hashable, float]
"""Link -> the share of its bandwidth that all siblings together need at full speed."""

Ops = tuple[Op, ...]

_SLOWED = 0.3
"""The share of its speed that compute loses while transfers, or collectives that outlast a body, are in progress:
measured for matrix products. Clock maps ignore this loss after the end of the body."""

_ROOM = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class _Kind:
    """Communication of one kind on one stream, which runs one at a time; it occurs `count` times in a step."""

    stream: Hashable
    call: str
    alone_ps: int
    together_ps: int
    needs: Needs
    count: int


class Contention:
    """The communication that can be in progress at the same time on the ranks of a configuration.

    Args:
        degrees: degrees of the configuration.
        kv_heads: number of heads of keys and values of the model.
        machine: the machine that it runs on.
        bodies: the bodies of each pipeline rank, without the mutual slow-down of compute and communication.
        transfers: (sending stage, "F" or "B") -> the transfers between two stages.
        arrival_bytes: bytes that one rank sends to the next stage.
        posts_ahead: whether receives are posted one action ahead.
    """

    def __init__(
        self,
        degrees: Degrees,
        kv_heads: int,
        machine: Machine,
        bodies: Sequence[RankBodies],
        transfers: Mapping[tuple[int, str], Transfers],
        arrival_bytes: int,
        *,
        posts_ahead: bool = True,
    ) -> None:
        self._machine = machine
        self._schedule: Schedule = degrees.pipeline
        self._bodies = bodies
        self._transfers = transfers
        axes = mesh_axes(dp=degrees.dp, cp=degrees.cp, tp=degrees.tp, num_kv_heads=kv_heads, ep=degrees.ep)
        self._meshes = [axes.mesh(degrees.stage_ranks(rank)) for rank in range(degrees.pp)]
        self._arrival_bytes = arrival_bytes
        self._posts_ahead = posts_ahead

    @cached_property
    def _kinds(self) -> Mapping[Hashable, _Kind]:
        """By (pipeline rank, channel, payload) or (sending stage, direction)."""
        found = dict(self._moving)
        for rank, counts in enumerate(self._collectives):
            for (channel, payload), count in counts.items():
                axes = channel_axes(channel)
                alone_ps, together_ps, needs = _family(self._machine, self._meshes[rank], axes, payload)
                found[rank, channel, payload] = _Kind(
                    (rank, channel), plain_call(payload.call), alone_ps, together_ps, needs, count
                )
        return found

    @cached_property
    def _moving(self) -> Mapping[Hashable, _Kind]:
        """The transfers of a step."""
        found: dict[Hashable, _Kind] = {}
        for key, transfer in self._transfers.items():
            here, there = self._ends(key)
            if here != there:
                pairs = tuple(zip(self._meshes[here].rank_list, self._meshes[there].rank_list, strict=True))
                needs = _pairs_need(self._machine, pairs, self._arrival_bytes, transfer.alone_ps)
                count = self._schedule.num_micro_batches
                found[key] = _Kind(key, "transfer", transfer.alone_ps, transfer.work_ps, needs, count)
        return found

    @cached_property
    def _collectives(self) -> Sequence[Counter[tuple[str, Payload]]]:
        """Per pipeline rank the number of collectives of each kind in a step."""
        found = []
        for counts, bodies in zip(counts_of_variants(self._schedule), self._bodies, strict=True):
            total: Counter[tuple[str, Payload]] = Counter()
            for key, count in (*counts.items(), ((-1, "begin"), 1), ((-1, "end"), 1)):
                for kind, number in bodies.issued(*key)[0].items():
                    total[kind] += count * number
            found.append(total)
        return found

    def _ends(self, key: tuple[int, str]) -> tuple[int, int]:
        """The pipeline ranks at the ends of a transfer."""
        stage, way = key
        return self._schedule.placement[stage], self._schedule.placement[stage + (1 if way == "F" else -1)]

    @property
    def num_messages(self) -> int:
        """The number of collectives and transfers of a step, of one rank per pipeline rank; the time of a simulation is
        proportional to it.
        """
        moved = sum(kind.count for kind in self._moving.values())
        return moved + sum(sum(total.values()) for total in self._collectives)

    # ----------------------------------------------------------------------------------------- what it may cost

    @property
    def most_ps(self) -> float:
        """An estimate of the largest time per step that clock maps leave out.

        It is the sum of three terms:

        * Shared links: the busiest stream of a link is delayed at most by the time that all others take on it.
        * Slower compute: while transfers or collectives of earlier bodies are in progress, and where an earlier body
          has given the host a lead, so that more kernels overlap with collectives.
        * Slower transfers: clock maps know only their average time during kernels. A pipeline waits for a transfer
          once per boundary as it fills and drains, and once per micro-batch if receives are not posted ahead.
        """
        rates = pair_rates(self._machine)
        if rates is None:
            return self._shared_ps
        slowed_ps = _SLOWED * (self._moved_ps + self._carried_ps) + self._led_ps(rates)
        waits = 2 * (self._schedule.num_stages - 1)
        if not self._posts_ahead:
            waits += self._schedule.num_micro_batches
        return self._shared_ps + slowed_ps + waits * self._held_ps(rates)

    def _held_ps(self, rates: PairRates) -> int:
        """The largest extra time of a transfer during kernels."""
        held = [
            self._bodies[rank].holds_ps(rates, transfer.work_ps)
            for key, transfer in self._transfers.items() if len(ends := set(self._ends(key))) > 1 for rank in ends
        ]  # fmt: skip
        return max(held, default=0)

    @cached_property
    def _claiming(self) -> Mapping[Hashable, _Kind]:
        """The communication that may share links."""
        return self._kinds if self._machine.shares_ways else self._moving

    @property
    def _shared_ps(self) -> float:
        busy: dict[Hashable, dict[Hashable, float]] = {link: {} for link in self._links}
        for kind in self._claiming.values():
            for link, share in kind.needs.items():
                if link in busy:
                    filled_ps = kind.count * share * kind.alone_ps
                    busy[link][kind.stream] = busy[link].get(kind.stream, 0.0) + filled_ps
        return max([sum(own.values()) - max(own.values()) for own in busy.values()], default=0.0)

    @property
    def _moved_ps(self) -> int:
        """The time of the transfers of the busiest rank in a step."""
        total: Counter[int] = Counter()
        for key, transfer in self._transfers.items():
            here, there = self._ends(key)
            if here != there:
                moved_ps = self._schedule.num_micro_batches * transfer.work_ps
                total.update({here: moved_ps, there: moved_ps})
        return max(total.values(), default=0)

    @property
    def _carried_ps(self) -> int:
        """The time in a step for which collectives of the busiest rank outlast the bodies that issued them."""
        return max(
            sum(count * bodies.issued(*key)[1] for key, count in counts.items()) + bodies.issued(-1, "begin")[1]
            for counts, bodies in zip(counts_of_variants(self._schedule), self._bodies, strict=True)
        )

    def _led_ps(self, rates: PairRates) -> int:
        """The extra compute time of a rank whose host gains a lead in some bodies and loses it in others."""
        found = [0]
        for counts, bodies in zip(counts_of_variants(self._schedule), self._bodies, strict=True):
            own = [(count, *host_lead_ps(bodies.action(*key), rates)) for key, count in counts.items()]
            found.append(min(sum(count * lead for count, lead, _ in own), sum(count * more for count, _, more in own)))
        return max(found)

    @cached_property
    def _links(self) -> Sequence[Hashable]:
        """The links that may be overloaded; one of each set of links with equal loads."""
        most: dict[Hashable, dict[Hashable, float]] = {}
        needed: dict[Hashable, list[tuple[int, float]]] = {}
        for number, kind in enumerate(self._claiming.values()):
            for link, share in kind.needs.items():
                own = most.setdefault(link, {})
                own[kind.stream] = max(own.get(kind.stream, 0.0), share)
                needed.setdefault(link, []).append((number, share))
        found: dict[tuple[tuple[int, float], ...], Hashable] = {}
        for link, own in most.items():
            if sum(own.values()) > _ROOM:
                found.setdefault(tuple(needed[link]), link)
        return list(found.values())

    # -------------------------------------------------------------------------------------------- the simulation

    def steps(
        self, num_steps: int, change: Callable[[str, Op], Op] | None = None, longer: float = 1.0
    ) -> list[tuple[PartsTally, ...]]:
        """Simulate the step in time order; return the parts and the end of each step, per pipeline rank.

        Args:
            num_steps: number of consecutive steps.
            change: replaces operations (see `RankBodies.changed`).
            longer: factor on the time of transfers.
        """
        bodies = self._bodies if change is None else [own.changed(change) for own in self._bodies]
        transmissions = {key: self._transmission(kind) for key, kind in self._kinds.items()}
        queues = {}
        for key in self._transfers:
            transmission = transmissions.get(key)
            if transmission is not None and longer != 1.0:
                transmission = replace(transmission, work_ps=transmission.work_ps * longer)
            queues[key] = TransferQueue(transmission)
        ranks = [
            self._actions(_Writer(rank, self._kinds, transmissions, own), queues) for rank, own in enumerate(bodies)
        ]
        return simulate_steps(
            ranks, pair_rates(self._machine), launch_ps=price_launch(self._machine), num_steps=num_steps
        )

    def _transmission(self, kind: _Kind) -> Transmission:
        claims = ((number, kind.needs.get(link, 0.0)) for number, link in enumerate(self._links))
        return Transmission(kind.call, float(kind.alone_ps), tuple([claim for claim in claims if claim[1]]))

    def _actions(self, writer: _Writer, queues: Mapping[tuple[int, str], TransferQueue]) -> Actions:
        """A rank's step. A receive is posted one action ahead, or before its own action (`Plan.receives`).

        Complete sends are waited for after an action, the others at the end of the step.
        """
        schedule, rank = self._schedule, writer.rank
        first, variants = int(schedule.table.rank_start[rank]), variant_of_rows(schedule)
        numbers = {stage: number for number, stage in enumerate(schedule.stages_of(rank))}
        releases, wait = releases_of_rows(schedule), Line(WAIT, price_wait(self._machine).dispatch_ps)
        num_kept = 0
        actions: list[tuple[Sequence[Line], TransferQueue | None, TransferQueue | None]] = []
        posts: list[tuple[Sequence[Line], TransferQueue | None, TransferQueue | None]] = []
        for place, action in enumerate(schedule.order[rank]):
            stage, variant = action.stage, VARIANTS[variants[first + place]]
            source, target = ((stage - 1, "F"), (stage, "F")) if variant[0] == "F" else ((stage + 1, "B"), (stage, "B"))
            lines = writer.action(numbers[stage], variant)
            receives = [Line(POST, self._transfers[source].receive_dispatch_ps) for op in lines if op.kind == ARRIVE]
            posts.append((receives, queues.get(source), None))
            released = int(releases[first + place])
            num_kept += sum(line.kind == SEND for line in lines) - released
            actions.append(([*lines, *[wait] * released], queues.get(source), queues.get(target)))
        step: list[tuple[Sequence[Line], TransferQueue | None, TransferQueue | None]] = [(writer.begin, None, None)]
        if self._posts_ahead:
            step += posts[:1]
            posts = [*posts[1:], ((), None, None)]
        for own, before in zip(actions, posts, strict=True):
            step += [before, own]
        return [*step, ([*writer.end, *[wait] * num_kept], None, None)]


class _Writer:
    """Translates the bodies of a pipeline rank into lines of the simulation, each body once.

    A collective becomes part of a run if the stream waits for it at once, no link is short for it and its channel is
    free.
    """

    def __init__(
        self,
        rank: int,
        kinds: Mapping[Hashable, _Kind],
        transmissions: Mapping[Hashable, Transmission],
        bodies: RankBodies,
    ) -> None:
        self.rank = rank
        self._kinds = kinds
        self._transmissions = transmissions
        self._bodies = bodies
        self._known: dict[int, Sequence[Line]] = {}
        self._waited_at_once = _waited_at_once((bodies.begin, *bodies.actions.values(), bodies.end))

    @property
    def begin(self) -> Sequence[Line]:
        """The opening block of a step."""
        return self._lines(self._bodies.begin)

    @property
    def end(self) -> Sequence[Line]:
        """The closing block of a step."""
        return self._lines(self._bodies.end)

    def action(self, number: int, variant: str) -> Sequence[Line]:
        """An action of one of the rank's chunks."""
        ops = self._bodies.action(number, variant)
        if id(ops) not in self._known:
            self._known[id(ops)] = self._lines(ops)
        return self._known[id(ops)]

    def _lines(self, ops: Ops) -> Sequence[Line]:
        found: list[Line] = []
        run: list[Op] = []
        for op in ops:
            transmission, work_ps = None, 0.0
            if op.kind == ISSUE:
                key = self.rank, op.channel, op.payload
                transmission, kind = self._transmissions[key], self._kinds[key]
                work_ps = kind.alone_ps * op.work_ps / kind.together_ps  # in proportion if `change` replaced its time
            if op.kind == COMPUTE or (op.kind == WAIT and run and op.token == run[-1].token):
                run.append(op)
            elif transmission is not None and op.channel in self._waited_at_once and not transmission.claims:
                run.append(op._replace(name="", work_ps=round(work_ps)))
            else:
                if run:
                    found.append(Line(COMPUTE, run=Run(run)))
                    run = []
                found.append(Line(op.kind, op.dispatch_ps, work_ps, op.token, op.channel, transmission, call=op.name))
        if run:
            found.append(Line(COMPUTE, run=Run(run)))
        return found


def _waited_at_once(bodies: Iterable[Ops]) -> Collection[str]:
    """The channels on which the stream waits at once for everything that is issued."""
    found, others = set[str](), set[str]()
    for ops in bodies:
        for op, following in zip(ops, (*ops[1:], *ops[:1]), strict=True):
            if op.kind == ISSUE:
                is_waited = following.kind == WAIT and following.token == op.token
                (found if is_waited else others).add(op.channel)
    return found - others


@lru_cache(maxsize=4096)
def _family(machine: Machine, mesh: Layout, axes: tuple[str, ...], payload: Payload) -> tuple[int, int, Needs]:
    """A collective of all groups along some axes: its time alone, next to its siblings, and their shares of links."""
    group = mesh_group(machine, mesh, axes)
    cost = price_collective(machine, payload.call, group, payload.size_bytes, payload.item_bytes, payload.copies)
    needs: dict[Hashable, float] = {}
    if cost.work_ps and machine.shares_ways:
        for members in mesh.groups(axes):
            filled = collective_claims(machine, payload.call, members, payload.size_bytes, payload.item_bytes, group)
            for link, share in claims_of(filled, cost.work_ps):
                needs[link] = needs.get(link, 0.0) + float(share)
    return cost.work_ps, cost.together_ps, needs


@lru_cache(maxsize=4096)
def _pairs_need(machine: Machine, pairs: tuple[tuple[int, int], ...], size_bytes: int, work_ps: int) -> Needs:
    """The shares of ports and links that transfers between the ranks of two stages need."""
    needs: dict[Hashable, float] = {}
    if machine.graph is None:  # the ports of one pair stand for those of all
        tier = machine.tier(pairs[0])
        needs["out", tier, pairs[0][0]] = needs["in", tier, pairs[0][1]] = 1.0
    for pair in pairs if machine.shares_ways else ():
        for link, share in claims_of(transfer_claims(machine, pair, size_bytes), work_ps):
            needs[link] = needs.get(link, 0.0) + float(share)
    return needs
