"""The schedules that torch.distributed.pipelining has too: the same order of actions, and torch reads ours."""

import logging
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as pipelining

from plans.schedules import Schedule, make_schedule, schedule_names

Row = list["pipelining._Action | None"]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger=pipelining.__name__)


def pretend_stages(num_ranks: int, num_chunks: int) -> list[SimpleNamespace]:
    """What torch's schedules ask their stages about before they run, on rank 0; no process group is needed."""
    return [
        SimpleNamespace(
            stage_index=chunk * num_ranks,
            num_stages=num_ranks * num_chunks,
            group_rank=0,
            group_size=num_ranks,
            submod=None,
            is_last=False,
        )
        for chunk in range(num_chunks)
    ]


def torch_rows(name: str, num_ranks: int, num_micro_batches: int, num_chunks: int) -> tuple[list[Row], list[int]]:
    """Torch's rows with the idle cells, and its placement."""
    schedule = pipelining.get_schedule_class(name)(pretend_stages(num_ranks, num_chunks), num_micro_batches)
    rows = [schedule.pipeline_order[rank] for rank in range(num_ranks)]
    owners = schedule.stage_index_to_group_rank
    return rows, [owners[stage] for stage in range(num_ranks * num_chunks)]


def actions_of(rows: list[Row]) -> list[list[str]]:
    """The actions as text, overlapped pairs one after the other."""
    return [[str(part) for action in row if action for part in action.sub_actions or (action,)] for row in rows]


@pytest.mark.parametrize(
    ("theirs", "ours", "chunk_counts"),
    [
        ("Interleaved1F1B", "interleaved_1f1b", (2, 3, 4)),
        ("InterleavedZeroBubble", "interleaved_zb", (1, 2, 3)),
        ("LoopedBFS", "looped_bfs", (1, 2, 3)),
        ("ZBVZeroBubble", "zb_v", (2,)),
        ("DualPipeV", "dualpipe_v", (2,)),
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_order_is_that_of_torch(theirs: str, ours: str, chunk_counts: tuple[int, ...], num_ranks: int) -> None:
    num_compared = 0
    for num_chunks in chunk_counts:
        for num_micro_batches in (1, num_ranks, 2 * num_ranks, 2 * num_ranks + 2, 3 * num_ranks, 5 * num_ranks + 1):
            try:
                rows, placement = torch_rows(theirs, num_ranks, num_micro_batches, num_chunks)
            except ValueError:
                with pytest.raises(ValueError, match=ours):
                    make_schedule(ours, num_ranks, num_micro_batches, virtual=num_chunks)
                continue
            schedule = make_schedule(ours, num_ranks, num_micro_batches, virtual=num_chunks)
            assert schedule.cells() == actions_of(rows)
            assert list(schedule.placement) == placement
            num_compared += 1
    assert num_compared >= 3


def test_zb_h1_is_torch_zero_bubble_with_one_chunk() -> None:
    for num_ranks in (1, 2, 4, 5):
        for rounds in (1, 2, 3):
            rows, _ = torch_rows("InterleavedZeroBubble", num_ranks, rounds * num_ranks, 1)
            assert make_schedule("zb_h1", num_ranks, rounds * num_ranks).cells() == actions_of(rows)


class RecordingStage:
    """A stage that computes and sends nothing and writes down what it is told to do."""

    has_backward = True
    is_first = False
    is_last = False

    def __init__(self, stage_index: int, num_stages: int) -> None:
        self.stage_index, self.num_stages = stage_index, num_stages
        self.group_size, self.group_rank = num_stages, stage_index
        self.done: list[str] = []

    def forward_one_chunk(self, index: int, *args: object, **kwargs: object) -> None:
        self.done.append(f"{self.stage_index}F{index}")

    def backward_one_chunk(self, index: int, **kwargs: object) -> None:
        self.done.append(f"{self.stage_index}B{index}")

    def no_transfers(self, index: int) -> list[object]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_transfers

    def perform_reduce_grad(self, factor: int) -> None:
        pass


@pytest.mark.parametrize(("theirs", "ours"), [("GPipe", "gpipe"), ("1F1B", "1f1b")])
def test_single_stage_schedules_do_what_torch_does(theirs: str, ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's classes with one chunk per rank have no order to read (1F1B writes down one that skips the last stage's
    first forward), so they run on stages that only record."""
    schedule_class = pipelining.get_schedule_class(theirs)
    monkeypatch.setattr(schedule_class, "_initialize_stage", lambda *args: None)
    for num_ranks, num_micro_batches in ((1, 1), (1, 3), (2, 2), (2, 5), (4, 4), (4, 9), (8, 8)):
        rows = []
        for rank in range(num_ranks):
            stage = RecordingStage(rank, num_ranks)
            schedule_class(stage, num_micro_batches)._step_microbatches()
            rows.append(stage.done)
        assert make_schedule(ours, num_ranks, num_micro_batches).cells() == rows


@pytest.mark.parametrize("name", schedule_names())
def test_torch_reads_our_csv_and_can_run_it(name: str, tmp_path: Path) -> None:
    """Torch adds the transfers itself and replays the result, which fails if a rank would get stuck."""
    for num_ranks, num_micro_batches in ((2, 4), (4, 8), (4, 12)):
        num_chunks = {"1f1b": 1, "gpipe": 1, "zb_h1": 1, "zb_h2": 1}.get(name, 2)
        ours = make_schedule(name, num_ranks, num_micro_batches, virtual=num_chunks)
        path = tmp_path / "schedule.csv"
        path.write_text(ours.to_csv())
        runtime = pipelining._PipelineScheduleRuntime(pretend_stages(num_ranks, num_chunks), num_micro_batches)
        runtime._load_csv(str(path))
        # torch's replay knows transfers and actions, not the gathers and reductions of FSDP that it also puts in
        order = {
            rank: [
                action for action in row if action.computation_type.value not in ("UNSHARD", "RESHARD", "REDUCE_GRAD")
            ]
            for rank, row in runtime.pipeline_order_with_comms.items()
        }
        pipelining._simulate_comms_compute(order, runtime.stage_index_to_group_rank.__getitem__, ours.num_stages)
        assert [runtime.stage_index_to_group_rank[stage] for stage in range(ours.num_stages)] == list(ours.placement)
        assert actions_of([runtime.pipeline_order[rank] for rank in range(num_ranks)]) == ours.cells()


@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_we_read_the_csv_of_torch(name: str, tmp_path: Path) -> None:
    theirs = pipelining.get_schedule_class(name)(pretend_stages(3, 2), 6)
    path = tmp_path / "schedule.csv"
    theirs._dump_csv(str(path), format="compute_only")
    schedule = Schedule.from_text(path.read_text(), name=make_schedule(name, 3, 6, virtual=2).name)
    assert schedule == make_schedule(name, 3, 6, virtual=2)


def idle_with_pairs(rows: list[Row], times: dict[str, Fraction], num_stages: int) -> Fraction:
    """The longest idle time of a rank when the two actions of an overlapped pair begin and end together."""
    done: dict[tuple[int, str, int], Fraction] = {}
    next_of, clock, begin = [0] * len(rows), [Fraction(0)] * len(rows), [Fraction(-1)] * len(rows)
    work = [Fraction(0)] * len(rows)
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, row in enumerate(rows):
            while next_of[rank] < len(row):
                action = row[next_of[rank]]
                parts = () if action is None else action.sub_actions or (action,)
                needed = [key for part in parts for key in needs(part, num_stages)]
                if any(key not in done for key in needed):
                    break
                next_of[rank] += 1
                has_moved = True
                if not parts:
                    continue
                start = max([clock[rank], *(done[key] for key in needed)])
                begin[rank] = start if begin[rank] < 0 else begin[rank]
                taken = sum(times[part.computation_type.value] for part in parts)
                clock[rank], work[rank] = start + taken, work[rank] + taken
                for part in parts:
                    for letter in "IW" if part.computation_type.value == "B" else part.computation_type.value:
                        done[part.stage_index, letter, part.microbatch_index] = clock[rank]
    assert all(position == len(row) for position, row in zip(next_of, rows, strict=True))
    return max(clock[rank] - begin[rank] - work[rank] for rank in range(len(rows)))


def needs(action: "pipelining._Action", num_stages: int) -> list[tuple[int, str, int]]:
    stage, kind, micro_batch = action.stage_index, action.computation_type.value, action.microbatch_index
    if kind == "F":
        return [(stage - 1, "F", micro_batch)] if stage else []
    if kind == "W":
        return [(stage, "I", micro_batch)]
    return [(stage, "F", micro_batch)] + ([(stage + 1, "I", micro_batch)] if stage < num_stages - 1 else [])


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("share_of_weights", [Fraction(0), Fraction(1, 3), Fraction(1)])
def test_dualpipe_v_bubble_with_overlapped_pairs(num_ranks: int, share_of_weights: Fraction) -> None:
    """(p - 1)(T_F&B + T_B - 3 T_W) of the DualPipe readme (there PP / 2 ranks), whole backwards, T_F = T_I."""
    forward = Fraction(5)
    weights = share_of_weights * forward
    backward = forward + weights
    times = {"F": forward, "I": forward, "W": weights, "B": backward}
    for num_micro_batches in (2 * num_ranks, 3 * num_ranks + 1):
        rows, _ = torch_rows("DualPipeV", num_ranks, num_micro_batches, 2)
        expected = (num_ranks - 1) * (forward + backward + backward - 3 * weights)
        assert idle_with_pairs(rows, times, 2 * num_ranks) == expected
