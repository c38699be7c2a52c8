"""Several jobs on one machine: they share links, and nothing else."""

import numpy as np
import pytest

from plans.errors import TwofoldError
from plans.program import Program
from simulator import Job, WhatIf, composition, critical_path, simulate, simulate_jobs
from tests.simulator.engine.test_network import MS, Ranks
from tests.support.reports_example import small_program
from tests.support.small_machine import GB, small_machine


def one_transfer(size_bytes: int = 10**8) -> Program:
    ranks = Ranks(2)
    ranks.transfer([(0, 1)], size_bytes)
    return ranks.program()


def test_two_jobs_share_the_uplink_that_both_use():
    jobs = [Job(program=one_transfer(), ranks=(0, 4)), Job(program=one_transfer(2 * 10**8), ranks=(5, 1))]
    wide, narrow = small_machine(), small_machine(uplink_Bps=10 * GB)
    apart = simulate_jobs(jobs, wide, num_steps=1)
    assert [each.step_end_ps for each in apart] == [(10 * MS,), (20 * MS,)]
    # opposite ways: every direction of an uplink is apart
    assert [each.step_end_ps for each in simulate_jobs(jobs, narrow, num_steps=1)] == [(10 * MS,), (20 * MS,)]
    jobs[1] = Job(program=one_transfer(2 * 10**8), ranks=(1, 5))
    # both at half rate until the shorter has had its 10 ms of work, then the longer has 10 ms left for itself
    assert [each.step_end_ps for each in simulate_jobs(jobs, narrow, num_steps=1)] == [(20 * MS,), (30 * MS,)]
    # in three steps the short job is done after 60 ms, in which the long one got 30 of its 60
    late = simulate_jobs(jobs, narrow, num_steps=3)
    assert [each.step_end_ps[-1] for each in late] == [60 * MS, 90 * MS]


def test_jobs_that_share_nothing_take_what_they_take_alone():
    program, machine = small_program(), small_machine(24, uplink_Bps=10 * GB, latency_s=1e-6)
    alone = simulate(program, machine)
    places = (tuple(range(8)), tuple(range(12, 20)))  # with idle devices between and behind
    for job in simulate_jobs([Job(program=program, ranks=ranks) for ranks in places], machine):
        for column in ("rank", "stream", "step", "start_ps", "end_ps"):
            assert np.array_equal(getattr(job, column), getattr(alone, column))
        assert list(job.spans()) == list(alone.spans())
        assert (job.step_start_ps, job.step_end_ps) == (alone.step_start_ps, alone.step_end_ps)
        assert (job.memory, job.low_s, job.high_s) == (alone.memory, alone.low_s, alone.high_s)
        assert critical_path(job, program) == critical_path(alone, program)
        assert composition(job, program) == composition(alone, program)


def test_changes_name_devices_of_the_machine():
    program, machine = small_program(), small_machine(16, latency_s=1e-6)
    jobs = [Job(program=program, ranks=tuple(range(8))), Job(program=program, ranks=tuple(range(8, 16)))]
    first, second = simulate_jobs(jobs, machine, what_if=WhatIf(slowdown={9: 2.0}))
    assert second.step_interval_s > first.step_interval_s == simulate(program, machine).step_interval_s
    assert second.step_interval_s == simulate(program, machine, what_if=WhatIf(slowdown={1: 2.0})).step_interval_s


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        (list, "no jobs"),
        (lambda: [Job(program=one_transfer(), ranks=(0,))], "as many distinct devices"),
        (lambda: [Job(program=one_transfer(), ranks=(3, 3))], "as many distinct devices"),
        (lambda: [Job(program=one_transfer(), ranks=(0, 16))], "job 0 has device 16"),
        (
            lambda: [Job(program=one_transfer(), ranks=r) for r in ((0, 4), (4, 5))],
            "device 4 belongs to job 0 and to job 1",
        ),
    ],
)
def test_bad_jobs_are_refused(jobs, message):
    with pytest.raises(TwofoldError, match=message):
        simulate_jobs(jobs(), small_machine())
