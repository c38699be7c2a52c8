"""What a session makes of a table of sections; the device is a CPU, most clocks are counters."""

import itertools

import msgspec
import pytest
import torch

from costmodels import Machine
from costmodels.fit.cpu import SECTIONS as CPU_FITS
from costmodels.fit.device import SECTIONS as DEVICE_FITS
from costmodels.fit.points import Point, PointLog
from executor.calibrate.cpu import cpu_sections
from executor.calibrate.device_sections import DEVICE_SECTIONS
from executor.calibrate.matrix import FLOAT8, matrix_job
from executor.calibrate.operands import Job, OperandPool
from executor.calibrate.rank_sync import RankSync
from executor.calibrate.sections import AloneSection, InStepSection, StreamSection
from executor.calibrate.session import Session, SessionOptions
from executor.calibrate.timing import Timer
from executor.device import Device
from plans.errors import TwofoldError


@pytest.mark.parametrize("dtype", FLOAT8)
def test_products_of_float8_are_those_of_their_numbers(dtype, monkeypatch):
    drawn = []
    taken = OperandPool.tensor

    def remembered(pool, *shape, **options):
        drawn.append(taken(pool, *shape, **options))
        return drawn[-1]

    monkeypatch.setattr(OperandPool, "tensor", remembered)
    job = matrix_job("nt", (32, 16, 64), dtype=dtype)
    made = job.make(OperandPool(device=Device(kind="cpu"), block_bytes=2**16))[0]()
    torch.testing.assert_close(made, (drawn[0].float() @ drawn[1].float().T).bfloat16(), rtol=1e-2, atol=1e-2)


@pytest.fixture
def lines() -> list[str]:
    return []


def session(folder, lines, *, clock_s=None, **options):
    device = Device(kind="cpu")
    ticks = itertools.count()
    return Session(
        Timer(device, repeats=1, window_s=1e-4), RankSync(device), PointLog(folder / "points.jsonl"),
        SessionOptions(minutes=1.0, **options), say=lines.append, clock_s=clock_s or (lambda: next(ticks) * 1e-3),
    )  # fmt: skip


def jobs(count, tier=0):
    return [
        Job(
            point=Point(kind="matrix", call="mm", shape=(size, 1, 1), seconds=0.0), tier=tier,
            make=lambda pool: [lambda: torch.ones(2).sum()],
        )
        for size in range(1, count + 1)
    ]  # fmt: skip


def taken_in_no_time(session, job, budget_s):
    return [msgspec.structs.replace(job.point, seconds=1e-6)]


def alone(name, made, **more):
    return AloneSection(name=name, jobs=lambda session: made, measure=taken_in_no_time, **more)


def test_sections_with_one_title_are_announced_once(tmp_path, lines):
    first = alone("dispatch", jobs(1), share=0.25, announced="one rank alone")
    second = alone("matrix", jobs(3), share=0.25, announced="one rank alone")
    third = StreamSection(name="load", share=0.5, stream=lambda session: iter(()))
    session(tmp_path, lines).run([first, second, third])
    assert [line.partition(" (")[0] for line in lines if not line.endswith("left in all")] == [
        "[1/2] one rank alone", "[1/2] one rank alone: 3 points", "[2/2] load", "[2/2] load: 0 points"
    ]  # fmt: skip


def test_required_sections_are_taken_whole_whatever_the_time(tmp_path, lines):
    seconds = itertools.count(0, 1000)
    started = session(tmp_path, lines, clock_s=lambda: float(next(seconds)), quick=True)
    started.run([alone("matrix", jobs(5, tier=2), share=1.0, required=True)])
    assert len(started.points) == 5
    assert lines[0].startswith("[1/1] matrix (about ")


def test_other_sections_end_when_their_time_is_up(tmp_path, lines):
    seconds = itertools.count(0, 1000)
    started = session(tmp_path, lines, clock_s=lambda: float(next(seconds)))
    stream = StreamSection(name="load", share=1.0, stream=lambda session: (job.point for job in jobs(5)))
    started.run([stream])
    assert len(started.points) == 1
    assert lines[-1] == "[1/1] load: 1 points; left out: 1 for lack of time"


def test_a_quick_session_measures_the_first_tier_and_requested_points(tmp_path, lines):
    started = session(tmp_path, lines, quick=True, requested=tmp_path)
    grid, asked = [*jobs(2), *jobs(4, tier=1)[2:]], [*jobs(6, tier=1)[4:]]
    started.run([alone("requested", asked, share=0.5, all_tiers=True), alone("matrix", grid, share=0.5)])
    assert sorted(point.shape[0] for point in started.points) == [1, 2, 5, 6]


def test_a_stream_measured_by_every_rank_records_the_rank_of_a_point(tmp_path, lines):
    started = session(tmp_path, lines)
    clock = Point(kind="clock", call="sustained", options={"window": 1}, seconds=1.0)
    started.run([StreamSection(name="load", share=1.0, ranks="every", stream=lambda session: iter([clock]))])
    assert [point.options for point in started.points] == [{"window": 1, "rank": 0}]


def test_a_failing_stream_ends_its_section_and_the_next_one_runs(tmp_path, lines):
    def fails(session):
        yield jobs(1)[0].point
        raise RuntimeError("no such kernel")

    started = session(tmp_path, lines)
    started.run([StreamSection(name="stacks", share=0.5, stream=fails), alone("matrix", jobs(2), share=0.5)])
    assert started.failures == ["[1/2] stacks: no such kernel"]
    assert len(started.points) == 2


def test_sections_of_several_ranks_are_not_taken_by_one(tmp_path, lines):
    started = session(tmp_path, lines)
    together = InStepSection(name="overlap", share=0.5, jobs=lambda session: jobs(1), measure=taken_in_no_time)
    assert [section.name for section in started.chosen([together, alone("matrix", jobs(1), share=0.5)])] == ["matrix"]
    assert "communication" not in {section.name for section in started.chosen(DEVICE_SECTIONS)}


def test_a_section_that_is_not_there_is_refused_with_those_that_are(tmp_path, lines):
    with pytest.raises(TwofoldError, match=r"unknown section 'matrx'; choose from control, allocation, .*matrix"):
        session(tmp_path, lines, sections=["matrx"]).run(DEVICE_SECTIONS)


@pytest.mark.parametrize(("measured", "fits"), [(DEVICE_SECTIONS, DEVICE_FITS), (cpu_sections((2, 4)), CPU_FITS)])
def test_every_part_of_the_machine_file_that_is_fitted_is_measured(measured, fits):
    parts = {section.fits.partition(".")[0] for section in measured} - {""}
    assert parts <= set(Machine.__struct_fields__)
    assert parts >= {"compute", "collectives", "dispatch_s"}
    assert ("overlap" in parts) == ("overlap" in {section.name for section in fits})


def test_shares_of_required_sections_are_shares_of_the_whole():
    assert sum(section.share for section in cpu_sections((2, 4))) == pytest.approx(1.0)
