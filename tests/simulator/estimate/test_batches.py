"""Estimates of many configurations at once against each of them alone, and memory against a count action by action."""

import random

import numpy as np
import pytest

from plans.schedules import Schedule, chunks_per_rank, make_schedule, schedule_names
from plans.schedules.variants import VARIANTS
from simulator.estimate.action import ClockMap
from simulator.estimate.batch import action_columns, peak_bytes, pipeline_ends_ps
from simulator.estimate.memory import peak_activations
from simulator.estimate.pipeline import Runtime, pipeline_end_ps

PIPELINES = [(name, ranks, micro) for name in schedule_names() for ranks, micro in ((1, 3), (2, 4), (3, 6))]


def schedule_of(name: str, ranks: int, micro: int) -> Schedule:
    return make_schedule(name, ranks, micro, virtual=2 if chunks_per_rank(name) is None else None)


def drawn_map(draw: random.Random, trails: bool) -> ClockMap:
    work, tail = draw.uniform(0, 9), draw.uniform(0, 9) * trails
    return ClockMap(
        work_ps=work, cold_start_ps=work + draw.uniform(0, 3), dispatch_ps=draw.uniform(0, 5), tail_ps=tail,
        tail_if_host_bound_ps=draw.uniform(0, 9) * trails, prefetch_ps=draw.uniform(0, work / 2),
        channel_busy_ps=draw.uniform(0, work + tail) * trails,  # it begins with the action, and ends with its tail
    )  # fmt: skip


def drawn_actions(draw: random.Random, trails: bool) -> dict[str, ClockMap]:
    names = [name for name in VARIANTS if "." not in name or draw.random() < 0.5]
    return {name: drawn_map(draw, trails) for name in names}


@pytest.mark.parametrize("trails", [False, True])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("blocking", [False, True])
def test_pipelines_at_once_end_when_each_of_them_ends(
    blocking: bool, opens: bool, together: bool, trails: bool
) -> None:
    draw = random.Random(f"{blocking}{opens}{together}{trails}")
    for name, ranks, micro in PIPELINES:
        schedule = schedule_of(name, ranks, micro)
        stages, batch = schedule.num_stages, 3
        penalties = None if draw.random() < 0.3 else np.array([[draw.uniform(0, 2)] * stages for _ in range(batch)]).T
        runtime = Runtime(blocking=blocking, together=together, opens_with_gathers=opens)
        actions = [[drawn_actions(draw, trails) for _ in range(stages)] for _ in range(batch)]
        updates = [[drawn_map(draw, False) for _ in range(ranks)] for _ in range(batch)]
        send_ps = [draw.uniform(0, 2) for _ in range(batch)]
        travel = np.array([[draw.uniform(0, 6) for _ in range(batch)] for _ in range(stages)])
        found = pipeline_ends_ps(
            schedule, np.stack([np.stack([action_columns(own) for own in each], axis=-1) for each in actions], axis=-1),
            np.array([[(own.work_ps, own.cold_start_ps) for own in each] for each in updates]).transpose(2, 1, 0),
            travel, np.array(send_ps), runtime, penalties,
        )  # fmt: skip
        for number in range(batch):
            between = {
                pair: travel[min(pair), number]
                for stage in range(stages - 1)
                for pair in ((stage, stage + 1), (stage + 1, stage))
                if schedule.placement[stage] != schedule.placement[stage + 1]
            }
            own = () if penalties is None else penalties[:, number].tolist()
            alone = pipeline_end_ps(
                schedule, actions[number], updates[number], between, send_ps[number],
                Runtime(blocking=blocking, together=together, opens_with_gathers=opens, overlap_penalty_ps=own),
            )  # fmt: skip
            assert found[number] == pytest.approx(alone, rel=1e-12), (name, ranks, number)


def counted_peak(schedule, rank, kept, late, during, gradients) -> int:
    """The bytes on a rank, by going through its actions."""
    alive, peak, made = 0, 0, set()
    to_come = sum(gradients[stage] for stage in schedule.stages_of(rank))
    for action in schedule.order[rank]:
        kind, stage = str(action.kind), action.stage
        alive += kept[stage] if kind == "F" else 0
        peak = max(peak, alive + during[stage]["FBIW".index(kind)])
        alive -= {"F": 0, "B": kept[stage], "I": kept[stage] - late[stage], "W": late[stage]}[kind]
        if kind in "BW" and stage not in made:
            made.add(stage)
            alive += gradients[stage]
    return max(0, peak - to_come)


@pytest.mark.parametrize("name", schedule_names())
def test_activations_of_all_configurations_are_counted_at_once(name: str) -> None:
    draw = random.Random(name)
    for ranks, micro in ((1, 3), (2, 4), (4, 8)):
        schedule = schedule_of(name, ranks, micro)
        stages, batch = schedule.num_stages, 3
        kept, gradients = (np.array([[draw.randrange(99) for _ in range(batch)] for _ in range(stages)]) for _ in "kg")
        late = kept // draw.choice((2, 3))
        during = np.array([[[draw.randrange(50) for _ in range(batch)] for _ in range(stages)] for _ in "FBIW"])
        found = peak_bytes(schedule, kept, late, during, gradients)
        for number in range(batch):
            own = [tuple(during[:, stage, number].tolist()) for stage in range(stages)]
            columns = [each[:, number].tolist() for each in (kept, late, gradients)]
            counted = [counted_peak(schedule, rank, columns[0], columns[1], own, columns[2]) for rank in range(ranks)]
            assert found[:, number].tolist() == counted
            assert peak_activations(schedule, columns[0], columns[1], own, columns[2]) == counted
            plain = [counted_peak(schedule, rank, columns[0], columns[1], own, [0] * stages) for rank in range(ranks)]
            assert peak_activations(schedule, columns[0], columns[1], own) == plain


def test_clock_maps_in_a_row_are_those_of_their_instructions() -> None:
    """When a stream ends that was busy until any time before, and its host, by running one action after the other."""
    draw = random.Random(5)
    for _ in range(50):
        maps = [drawn_map(draw, False) for _ in range(4)]
        whole = maps[0].then(maps[1]).then(maps[2]).then(maps[3])
        for busy in (-np.inf, 0.0, 3.0, 10.0, 1000.0):
            host, stream = 0.0, busy
            for own in maps:
                stream = max(stream + own.work_ps, host + own.cold_start_ps)
                host += own.dispatch_ps
            assert max(busy + whole.work_ps, whole.cold_start_ps) == pytest.approx(stream, rel=1e-12)
            assert whole.dispatch_ps == pytest.approx(host, rel=1e-12)
