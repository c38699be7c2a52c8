"""Pipeline schedules against a replay in exact fractions that is written here and shares no code with the package."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plans.errors import TwofoldError
from plans.schedules import (
    Action,
    ActionKind,
    Schedule,
    ScheduleError,
    make_schedule,
    peak_in_flight,
    schedule_names,
    validate,
)
from plans.schedules.registry import form_of

CHOOSE_CHUNKS = {"interleaved_1f1b", "interleaved_zb", "looped_bfs"}
V_SHAPED = {"zb_v", "v_half", "v_min", "dualpipe_v"}
EQUAL = {"F": Fraction(1), "I": Fraction(1), "W": Fraction(1)}


@pytest.mark.parametrize("name", schedule_names())
def test_the_form_of_a_schedule_is_known_before_it_is_made(name):
    form, made = form_of(name), 0
    assert form is not None
    for num_ranks, count in [(1, 2), (2, 3), (2, 4), (3, 12), (4, 8), (5, 20)]:
        for virtual in (2, 3) if name in CHOOSE_CHUNKS else (None,):
            try:
                schedule = make_schedule(name, num_ranks, count, virtual=virtual)
            except ScheduleError:
                continue
            made += 1
            assert schedule.placement == form.placement(num_ranks, schedule.num_stages // num_ranks)
            assert form.is_split == any(action.kind in "IW" for order in schedule.order for action in order)
    assert made > 2


# --- the oracle ------------------------------------------------------------------------------------------------------


def needs(action: Action, num_stages: int) -> list[tuple[int, str, int]]:
    """What must be done before: (stage, "F" | "I" | "W", micro-batch); a whole backward gives I and W."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind == "F":
        return [(stage - 1, "F", micro_batch)] if stage > 0 else []
    if action.kind == "W":
        return [(stage, "I", micro_batch)]
    return [(stage, "F", micro_batch)] + ([(stage + 1, "I", micro_batch)] if stage < num_stages - 1 else [])


def replay(schedule: Schedule, times: dict[str, Fraction]) -> list[list[tuple[Fraction, Fraction]]] | None:
    """Per rank (start, end) of every action, each as early as it can; None if the ranks get stuck."""
    times = times | {"B": times["I"] + times["W"]}
    done: dict[tuple[int, str, int], Fraction] = {}
    spans: list[list[tuple[Fraction, Fraction]]] = [[] for _ in schedule.order]
    has_moved = True
    while has_moved:
        has_moved = False
        for row, actions in zip(spans, schedule.order, strict=True):
            while len(row) < len(actions):
                action = actions[len(row)]
                needed = needs(action, schedule.num_stages)
                if not all(key in done for key in needed):
                    break
                start = max([done[key] for key in needed] + [row[-1][1] if row else Fraction(0)])
                row.append((start, start + times[action.kind]))
                for letter in "IW" if action.kind == "B" else action.kind.value:
                    done[action.stage, letter, action.micro_batch] = row[-1][1]
                has_moved = True
    return spans if all(len(row) == len(actions) for row, actions in zip(spans, schedule.order, strict=True)) else None


def spans_of(schedule: Schedule, times: dict[str, Fraction]) -> list[list[tuple[Fraction, Fraction]]]:
    spans = replay(schedule, times)
    assert spans is not None, f"{schedule.name} gets stuck"
    return spans


def work_of_step(schedule: Schedule, times: dict[str, Fraction]) -> Fraction:
    """What a rank computes in a step; all have as many chunks."""
    chunks = schedule.num_stages // schedule.num_ranks
    return schedule.num_micro_batches * chunks * (times["F"] + times["I"] + times["W"])


def idle(schedule: Schedule, times: dict[str, Fraction]) -> Fraction:
    """The longest idle time of a rank between its first and its last action (the bubble of the zero-bubble paper)."""
    return max(row[-1][1] - row[0][0] for row in spans_of(schedule, times)) - work_of_step(schedule, times)


def whole_bubble(schedule: Schedule, times: dict[str, Fraction]) -> Fraction:
    """Idle time when all ranks begin and end the step together."""
    return max(row[-1][1] for row in spans_of(schedule, times)) - work_of_step(schedule, times)


def every_action_once(schedule: Schedule) -> bool:
    parts = Counter(
        (action.stage, letter, action.micro_batch)
        for row in schedule.order
        for action in row
        for letter in ("IW" if action.kind == "B" else action.kind.value)
    )
    expected = {
        (stage, letter, micro_batch)
        for stage in range(schedule.num_stages)
        for letter in "FIW"
        for micro_batch in range(schedule.num_micro_batches)
    }
    return parts.keys() == expected and set(parts.values()) == {1}


def chunks_of(name: str, virtual: int = 2) -> int:
    return virtual if name in CHOOSE_CHUNKS else 2 if name in V_SHAPED else 1


positive = st.fractions(min_value=Fraction(1, 8), max_value=8, max_denominator=8)
any_times = st.fixed_dictionaries({"F": positive, "I": positive, "W": positive})


@st.composite
def schedules(draw: st.DrawFn, names: tuple[str, ...] = schedule_names(), max_ranks: int = 6) -> Schedule:
    name = draw(st.sampled_from(names))
    num_ranks = draw(st.integers(1, max_ranks))
    num_micro_batches = draw(st.integers(2 * num_ranks if name == "dualpipe_v" else 1, 4 * num_ranks + 3))
    if name.startswith("interleaved"):
        num_micro_batches = num_ranks * max(1, num_micro_batches // num_ranks)
    return make_schedule(name, num_ranks, num_micro_batches, virtual=chunks_of(name, draw(st.integers(1, 4))))


# --- what every schedule keeps ---------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(schedule=schedules(), times=any_times)
def test_every_action_is_done_once_and_nobody_gets_stuck(schedule: Schedule, times: dict[str, Fraction]) -> None:
    assert every_action_once(schedule)
    assert all(schedule.placement[action.stage] == rank for rank, row in enumerate(schedule.order) for action in row)
    assert replay(schedule, times) is not None
    validate(schedule)


@settings(max_examples=40)
@given(schedule=schedules(), times=any_times, factor=positive)
def test_scaling_all_times_scales_the_result(schedule: Schedule, times: dict[str, Fraction], factor: Fraction) -> None:
    scaled = {letter: factor * time for letter, time in times.items()}
    assert whole_bubble(schedule, scaled) == factor * whole_bubble(schedule, times)


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_share_of_the_bubble_falls_with_micro_batches(name: str, num_ranks: int) -> None:
    shares = []
    for rounds in range(2, 6):
        schedule = make_schedule(name, num_ranks, rounds * num_ranks, virtual=chunks_of(name))
        bubble, work = whole_bubble(schedule, EQUAL), work_of_step(schedule, EQUAL)
        shares.append(bubble / (bubble + work))
    assert all(later < earlier for earlier, later in pairwise(shares))


@given(schedule=schedules())
def test_text_round_trip(schedule: Schedule) -> None:
    again = Schedule.from_text(schedule.to_text())
    assert again == schedule and hash(again) == hash(schedule)
    assert again.order == schedule.order
    assert Schedule.from_text(schedule.to_csv(), name=schedule.name) == schedule


@given(schedule=schedules(), kept=st.fractions(0, 1, max_denominator=5))
def test_peak_in_flight_counts_what_is_alive(schedule: Schedule, kept: Fraction) -> None:
    peaks = []
    for row in schedule.order:
        alive: dict[tuple[int, int], Fraction] = {}
        peak = Fraction(0)
        for action in row:
            key = (action.stage, action.micro_batch)
            if action.kind == "F":
                alive[key] = Fraction(1)
            elif action.kind == "I":
                alive[key] = kept
            else:
                del alive[key]
            peak = max(peak, sum(alive.values(), Fraction(0)))
        peaks.append(peak)
    assert peak_in_flight(schedule, kept_for_weights=kept) == tuple(peaks)


# --- closed forms ----------------------------------------------------------------------------------------------------

ranks = st.integers(1, 7)


@settings(max_examples=40)
@given(p=ranks, m=st.integers(1, 16), times=any_times)
def test_gpipe_and_1f1b_take_m_plus_p_minus_1_slots(p: int, m: int, times: dict[str, Fraction]) -> None:
    slot = times["F"] + times["I"] + times["W"]
    for name in ("gpipe", "1f1b"):
        schedule = make_schedule(name, p, m)
        assert max(row[-1][1] for row in spans_of(schedule, times)) == (m + p - 1) * slot
        assert idle(schedule, times) == whole_bubble(schedule, times) == (p - 1) * slot
    assert peak_in_flight(make_schedule("gpipe", p, m)) == (m,) * p
    assert peak_in_flight(make_schedule("1f1b", p, m)) == tuple(min(p - i, m) for i in range(p))


@settings(max_examples=40)
@given(p=ranks, rounds=st.integers(1, 4), v=st.integers(1, 4), times=any_times)
def test_interleaving_divides_the_bubble(p: int, rounds: int, v: int, times: dict[str, Fraction]) -> None:
    """Times are those of a chunk, 1/v of a stage's: (p - 1)(T_F + T_B) / v."""
    for name in ("interleaved_1f1b", "looped_bfs"):
        schedule = make_schedule(name, p, rounds * p, virtual=v)
        assert whole_bubble(schedule, times) == (p - 1) * (times["F"] + times["I"] + times["W"])


@given(p=ranks, m=st.integers(1, 12))
def test_one_chunk_interleaved_is_1f1b(p: int, m: int) -> None:
    schedule = make_schedule("interleaved_1f1b", p, p * m, virtual=1)
    assert schedule.order == make_schedule("1f1b", p, p * m).order


@st.composite
def short_weight_gradients(draw: st.DrawFn) -> dict[str, Fraction]:
    """T_W at most T_F and T_B."""
    times = draw(any_times)
    return times | {"W": draw(st.fractions(0, 1, max_denominator=8)) * min(times["F"], times["I"])}


@settings(max_examples=40)
@given(p=ranks, extra=st.integers(0, 8), v=st.integers(1, 3), times=short_weight_gradients())
def test_zb_h1_bubble(p: int, extra: int, v: int, times: dict[str, Fraction]) -> None:
    """(p - 1)(T_F + T_B - T_W), also over v chunks of times 1/v; without weight gradients that of 1F1B."""
    expected = (p - 1) * (times["F"] + times["I"] - times["W"])
    assert whole_bubble(make_schedule("zb_h1", p, p + extra), times) == expected
    assert whole_bubble(make_schedule("interleaved_zb", p, p * (1 + extra % 3), virtual=v), times) == expected


@settings(max_examples=40)
@given(p=ranks, extra=st.integers(0, 8), times=short_weight_gradients())
def test_zb_h2_bubble(p: int, extra: int, times: dict[str, Fraction]) -> None:
    expected = (p - 1) * max(Fraction(0), times["F"] + times["I"] - 2 * times["W"])
    assert idle(make_schedule("zb_h2", p, 2 * p - 1 + extra), times) == expected


@given(p=ranks, extra=st.integers(0, 8), kept=st.fractions(0, 1, max_denominator=6))
def test_zero_bubble_memory(p: int, extra: int, kept: Fraction) -> None:
    """Per worker, zero-bubble paper section 2.3, with M_B = 1 and M_W = kept; worker i counts from 0 here."""
    h1, h2 = make_schedule("zb_h1", p, p + extra), make_schedule("zb_h2", p, 2 * p - 1 + extra)
    assert peak_in_flight(h1) == (p,) * p
    assert peak_in_flight(h2) == (2 * p - 1,) * p
    assert peak_in_flight(h1, kept_for_weights=kept) == tuple(p - i + i * kept for i in range(p))
    assert peak_in_flight(h2, kept_for_weights=kept) == tuple(2 * (p - i) - 1 + 2 * i * kept for i in range(p))


@given(p=ranks, extra=st.integers(0, 8))
def test_zb_v_has_no_bubble_at_the_memory_of_1f1b(p: int, extra: int) -> None:
    schedule = make_schedule("zb_v", p, 2 * p - 1 + extra)
    assert idle(schedule, EQUAL) == 0
    assert peak_in_flight(schedule) == (2 * p,) * p  # p micro-batches of two chunks


@pytest.mark.parametrize("p", range(2, 13))
@pytest.mark.parametrize("extra", [0, 1, 7, 40])
def test_v_half_bubble_and_memory(p: int, extra: int) -> None:
    """Below half of 1F1B's (p - 1)(T_F + T_B + T_W) of two chunks, 6 (p - 1); memory floor((p + 2) / 2) of 1F1B's p."""
    schedule = make_schedule("v_half", p, p + extra)
    expected = 3 if p == 2 else 3 * p - 4 if p % 2 else 3 * p - 5
    assert idle(schedule, EQUAL) == whole_bubble(schedule, EQUAL) == expected <= Fraction(6 * (p - 1), 2)
    assert max(peak_in_flight(schedule)) == 2 * ((p + 2) // 2)


@pytest.mark.parametrize("p", range(2, 13))
@pytest.mark.parametrize("extra", [0, 1, 7, 40])
def test_v_min_bubble_and_memory(p: int, extra: int) -> None:
    """Below two thirds of 1F1B's bubble of 6 (p - 1); memory floor((p + 4) / 3) of 1F1B's p."""
    schedule = make_schedule("v_min", p, p + extra)
    assert idle(schedule, EQUAL) == whole_bubble(schedule, EQUAL) == 4 * p - 5 <= Fraction(2 * 6 * (p - 1), 3)
    assert max(peak_in_flight(schedule)) == 2 * ((p + 4) // 3)


@settings(max_examples=40)
@given(p=st.integers(2, 6), times=any_times)
def test_v_half_keeps_pace_under_the_papers_conditions(p: int, times: dict[str, Fraction]) -> None:
    """If T_W + 2 T_B >= 2 T_F and T_W + 2 T_F >= 2 T_B, more micro-batches add no idle time."""
    weights = max(times["W"], 2 * abs(times["F"] - times["I"]))
    few, many = (idle(make_schedule("v_half", p, m), times | {"W": weights}) for m in (5 * p, 8 * p))
    assert few == many


@given(p=ranks, extra=st.integers(0, 8), backward=positive, weights=st.fractions(0, 1, max_denominator=8))
def test_dualpipe_v_without_overlap(p: int, extra: int, backward: Fraction, weights: Fraction) -> None:
    """One action after the other, T_F = T_B >= T_W: the bubble of ZB-H1; 2p + 1 activations of one chunk."""
    schedule = make_schedule("dualpipe_v", p, 2 * p + extra)
    times = {"F": backward, "I": backward, "W": weights * backward}
    assert idle(schedule, times) == (p - 1) * (2 * backward - times["W"])
    assert peak_in_flight(schedule) == (2 * p + 1,) * p


# --- names and arguments ---------------------------------------------------------------------------------------------


def test_schedule_names_are_sorted_and_make_themselves() -> None:
    assert list(schedule_names()) == sorted(schedule_names())
    for name in schedule_names():
        assert make_schedule(name, 2, 4, virtual=chunks_of(name)).name == name


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("1F1B", "1f1b"), ("GPipe", "gpipe"), ("ZBVZeroBubble", "zb_v"), ("ZB-H1", "zb_h1"), ("DualPipeV", "dualpipe_v")],
)
def test_other_spellings_mean_the_same_schedule(theirs: str, ours: str) -> None:
    assert make_schedule(theirs, 2, 4) is make_schedule(ours, 2, 4)


@pytest.mark.parametrize(
    ("name", "p", "m", "virtual", "message"),
    [
        ("1f1", 2, 4, None, "unknown schedule '1f1'; did you mean '1f1b'"),
        ("banana", 2, 4, None, "known are 1f1b, dualpipe_v, gpipe"),
        ("1f1b", 0, 4, None, "0 ranks and 4 micro-batches"),
        ("v_half", 4, 0, None, "4 ranks and 0 micro-batches"),
        ("1f1b", 2, 4, 2, "has one chunk per rank and cannot take virtual=2; these can: dualpipe_v, interleaved_1f1b"),
        ("zb_v", 2, 4, 1, "has 2 chunks per rank and cannot take virtual=1"),
        ("interleaved_1f1b", 2, 4, None, "needs the number of chunks per rank, e.g. virtual=2"),
        ("looped_bfs", 2, 4, 65, "give 1 to 64 chunks per rank"),
        ("interleaved_1f1b", 4, 9, 2, "2 does not divide 9; 8 or 12 micro-batches work"),
        ("interleaved_zb", 4, 13, 2, "3 does not divide 13; 12 or 16 micro-batches work"),
        ("dualpipe_v", 4, 7, None, "has 8 stages and needs as many micro-batches, not 7"),
    ],
)
def test_impossible_schedules_name_valid_values(name: str, p: int, m: int, virtual: int | None, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        make_schedule(name, p, m, virtual=virtual)
    assert message in str(caught.value)


# --- actions and text ------------------------------------------------------------------------------------------------


@given(stage=st.integers(0, 10**6), kind=st.sampled_from(ActionKind), micro_batch=st.integers(0, 10**6))
def test_action_round_trip(stage: int, kind: ActionKind, micro_batch: int) -> None:
    action = Action(stage=stage, kind=kind, micro_batch=micro_batch)
    assert Action.parse(str(action)) == Action.parse(f" {action}\t") == action
    assert str(action) == f"{stage}{kind}{micro_batch}"


def test_actions_are_values() -> None:
    first, second = Action.parse("1F0"), Action.parse("1F1")
    assert first < second and len({first, Action.parse("1F0")}) == 1
    with pytest.raises(AttributeError):
        first.stage = 2  # type: ignore[misc]
    with pytest.raises(ScheduleError, match="count from 0"):
        Action(stage=-1, kind=ActionKind.FORWARD, micro_batch=0)


@pytest.mark.parametrize(
    ("text", "position"),
    [("", 0), ("F0", 0), ("2X0", 1), ("2", 1), ("2F", 2), ("2F-1", 2), ("2F0a", 3), (" 12f3", 3), ("²F0", 0)],
)
def test_unreadable_action_is_pointed_at(text: str, position: int) -> None:
    with pytest.raises(ScheduleError) as caught:
        Action.parse(text)
    message = str(caught.value)
    assert repr(text) in message and f"at position {position};" in message
    assert message.splitlines()[-1] == "  " + " " * position + "^"


def test_csv_with_idle_cells_and_overlapped_pairs() -> None:
    schedule = Schedule.from_text("0F0,,(0F1;0B0)OVERLAP_F_B,0B1\r\n,1F0, 1B0 ,1F1,1B1\r\n\r\n", name="mine")
    assert schedule.cells() == [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    assert (schedule.name, schedule.num_stages, schedule.num_micro_batches) == ("mine", 2, 2)


def test_text_keeps_what_cells_cannot_express() -> None:
    order = [[Action.parse("0F0")], []]
    schedule = Schedule.from_order(order, name="half done", num_stages=3, num_micro_batches=5, placement=(0, 1, 1))
    assert Schedule.from_text(schedule.to_text()) == schedule
    assert schedule.stages_of(1) == (1, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1Q0", "rank 1, cell 1: '1Q0' is not an action: expected F, B, I or W at position 1"),
        ("0F0,0B0\n1F0 1B0", "rank 1, cell 0: '1F0 1B0' is two actions at once"),
        ("0F0,0F1;0B0", "rank 0, cell 1: '0F1;0B0' is two actions at once"),
        ("0F0,0SEND_F0", "'0SEND_F0' is communication"),
        ("0F0,0REDUCE_GRAD", "'0REDUCE_GRAD' is communication"),
        ("0F0,0B0\n\n1F0,1B0", "the line of rank 1 is empty"),
        ("", "has no actions"),
        ("0F0,2F0", "no action of stage 1 on any rank"),
        ("# schedule stages=2 placement=0\n0F0", "cannot read the line '# schedule stages=2 placement=0'"),
        ("# schedule stages=1 micro_batches=1 placement=0 name=x\n0F0,1F0", "has 1 stages; 1F0 is outside them"),
        ("# schedule stages=1 micro_batches=1 placement=0 name=x\n0F0,0F1", "has 1 micro-batches; 0F1 is outside"),
        ("# schedule stages=1 micro_batches=1 placement=1 name=x\n0F0", "places stage 0 on rank 1"),
        ("# schedule stages=2 micro_batches=1 placement=0 name=x\n0F0", "has 2 stages and a placement for 1: (0,)"),
        ("99999999999F0", "numbers end at"),
        ("9" * 5000 + "F0", "has more than 18 digits"),
        (f"# schedule stages={'9' * 5000} micro_batches=1 placement=0 name=x\n0F0", "cannot read the line"),
        ("0F0" + " " * 140_000, "is not a table"),
    ],
)
def test_unreadable_text_names_the_place(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_text(text)
    assert message in str(caught.value)


def test_unreadable_cell_is_shown_in_the_grid() -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_text("0F0,0B0\n,1F0,1Q0")
    assert str(caught.value).splitlines()[-1] == "rank 1  .    1F0 >1Q0<"


def test_a_name_is_one_line() -> None:
    with pytest.raises(ScheduleError, match="name of one line"):
        Schedule.from_text("0F0,0B0", name="two\nlines")


# --- validation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message", "marked"),
    [
        ("0F0,0B0,1F0\n1B0", "1B0 is on rank 1, but rank 0 owns its stage", ">1B0<"),
        ("0F0,0F0,0B0", "0F0 repeats the forward of micro-batch 0 on stage 0", ">0F0<"),
        ("0F0,0B0,0I0", "0I0 repeats the input gradient of micro-batch 0 on stage 0", ">0I0<"),
        ("0F0,0I0,0W0,0W0", "0W0 repeats the weight gradient", ">0W0<"),
        ("0F0,0B0,0F1", "no input gradient of micro-batch 1 on stage 0: 0I1 or 0B1 is missing", ">0F1<"),
        ("0F0,0I0", "no weight gradient of micro-batch 0 on stage 0: 0W0 or 0B0 is missing", ">0I0<"),
        ("0B0", "no forward of micro-batch 0 on stage 0: 0F0 is missing", ">0B0<"),
        ("0F0,0B0,0F2,0B2", "no forward of micro-batch 1 on stage 0: 0F1 is missing", ">.<"),
        ("0B0,0F0", "rank 0 does 0B0 before its forward 0F0", ">0B0<"),
        ("0F0,0W0,0I0", "rank 0 does 0W0 before its input gradient 0I0", ">0W0<"),
        (
            "0F0,0B0,2F0,2B0\n1F0,1B0",
            "deadlock: rank 0 waits at 0B0 for 1B0, at which rank 1 waits itself; rank 1 waits at 1B0 for 2B0, which",
            ">0B0<",
        ),
        ("1F0,0F0,1B0,0B0", "deadlock: rank 0 waits at 1F0 for 0F0, which rank 0 does after 1F0", ">1F0<"),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1",
            "deadlock: rank 0 waits at 0B0 for 1B0, which rank 1 does after 1F1; "
            "rank 1 waits at 1F1 for 0F1, which rank 0 does after 0B0",
            ">0B0<",
        ),
    ],
)
def test_bad_schedule_is_pointed_at(text: str, message: str, marked: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(Schedule.from_text(text))
    assert message in str(caught.value)
    assert str(caught.value).count(">") == 1 and marked in str(caught.value)


@pytest.mark.parametrize("counts", [(2.0, 4), ("2", 4), (2, None)])
def test_counts_are_whole_numbers(counts):
    with pytest.raises(ScheduleError, match="give whole numbers"):
        make_schedule("1f1b", *counts)


def test_a_memory_limit_is_a_whole_number_of_any_kind():
    schedule = make_schedule("1f1b", 2, 4)
    validate(schedule, memory_limit=np.int64(2))
    validate(schedule, memory_limit=np.array([2, 1]))
    with pytest.raises(ScheduleError, match="the limit is 1"):
        validate(schedule, memory_limit=np.int64(1))
    with pytest.raises(TwofoldError, match=r"memory_limit must be a whole number.* not 1\.5"):
        validate(schedule, memory_limit=1.5)


def test_deadlock_shows_the_smallest_circle() -> None:
    """Ranks 1 and 2 wait for each other; rank 0 waits for rank 1 and is not to blame."""
    text = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2F0,2F1,2B0,2B1"
    with pytest.raises(ScheduleError) as caught:
        validate(Schedule.from_text(text))
    assert "deadlock: rank 1 waits at 1B0 for 2B0, which rank 2 does after 2F1" in str(caught.value)
    assert "rank 0 waits" not in str(caught.value)


@given(schedule=schedules(max_ranks=4), data=st.data())
def test_validate_refuses_exactly_what_cannot_run(schedule: Schedule, data: st.DataObject) -> None:
    order = [list(row) for row in schedule.order]
    for _ in range(data.draw(st.integers(1, 2))):
        row = order[data.draw(st.integers(0, len(order) - 1))]
        i, j = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
        if data.draw(st.booleans()):
            row[i], row[j] = row[j], row[i]
        elif data.draw(st.booleans()):
            row[i] = row[j]
        else:
            row.insert(i, row.pop(j))
    changed = Schedule.from_order(
        order,
        num_stages=schedule.num_stages,
        num_micro_batches=schedule.num_micro_batches,
        placement=schedule.placement,
    )
    if every_action_once(changed) and replay(changed, EQUAL) is not None:
        validate(changed)
    else:
        with pytest.raises(ScheduleError, match=">"):
            validate(changed)


@given(schedule=schedules(max_ranks=4))
def test_memory_limit_is_the_peak(schedule: Schedule) -> None:
    peaks = peak_in_flight(schedule)
    validate(schedule, memory_limit=max(peaks))
    validate(schedule, memory_limit=peaks)
    with pytest.raises(ScheduleError, match=f"the limit is {max(peaks) - 1}; this order needs {max(peaks)}"):
        validate(schedule, memory_limit=max(peaks) - 1)


def test_memory_limit_points_at_the_first_excess_in_time() -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(make_schedule("gpipe", 2, 4), memory_limit=[4, 2])
    lines = str(caught.value).splitlines()
    assert "1F2 keeps 3 activations on rank 1, and the limit is 2; this order needs 4" in lines[0]
    assert lines[1].split()[:5] == ["time", "0", "1", "2", "3"]
    assert lines[3].split()[:7] == ["rank", "1", ".", "1F0", "1F1", ">1F2<", "1F3"]


def test_memory_limit_needs_one_number_per_rank() -> None:
    with pytest.raises(ScheduleError, match="3 numbers for 2 ranks"):
        validate(make_schedule("gpipe", 2, 2), memory_limit=[1, 2, 3])


def test_large_grid_shows_only_the_surroundings() -> None:
    schedule = make_schedule("1f1b", 32, 64)
    with pytest.raises(ScheduleError) as caught:
        validate(schedule, memory_limit=[32] * 15 + [3] + [32] * 16)
    lines = str(caught.value).splitlines()
    assert len(lines) <= 20 and max(map(len, lines)) <= 120
    assert sum(">" in line for line in lines) == 1


def test_huge_number_of_micro_batches_is_refused_at_once() -> None:
    with pytest.raises(ScheduleError, match="0F1 is missing"):
        validate(Schedule.from_text("0F0,0F2000000000,0B0,0B2000000000"))
