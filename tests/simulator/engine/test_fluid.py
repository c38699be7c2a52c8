"""Fluid sharing against closed forms and against a simulation in small time slices."""

import random
from fractions import Fraction
from itertools import pairwise

import pytest
import simpy

from costmodels.price.sharing import max_min_rates
from simulator.engine.fluid import Activity, Cores, Fabric


def ends_on_cores(num_cores: int, jobs: list[tuple[int, int]]) -> list[int]:
    """Ends of jobs (arrival, work)."""
    env = simpy.Environment()
    cores, ends = Cores(env, num_cores), [-1] * len(jobs)

    def arrive(number: int, work: int):
        cores.add(work, lambda: ends.__setitem__(number, env.now))

    for number, (at, work) in enumerate(jobs):
        env.timeout(at).callbacks.append(lambda _, number=number, work=work: arrive(number, work))
    env.run()
    return ends


@pytest.mark.parametrize("num_jobs", range(1, 9))
def test_equal_jobs_on_two_cores(num_jobs):
    assert ends_on_cores(2, [(0, 1000)] * num_jobs) == [max(1000, 500 * num_jobs)] * num_jobs


def test_staggered_arrivals_by_hand():
    # alone to 10, two to 20 (still a core each), three from 20 at 2/3: the first has 10 left, done at 35; then two
    # with 10 and 20 left of which the second ends at 45 and the third, alone or not at full rate, at 55
    assert ends_on_cores(2, [(0, 30), (10, 30), (20, 30)]) == [35, 45, 55]


def test_an_end_falls_on_the_first_whole_picosecond():
    assert ends_on_cores(2, [(0, 1)] * 3) == [2] * 3  # 1.5 each
    assert ends_on_cores(1, [(0, 1), (0, 2), (0, 4)]) == [3, 5, 7]


def test_a_job_without_work_ends_at_once_and_disturbs_nobody():
    assert ends_on_cores(1, [(0, 10), (3, 0), (5, 0)]) == [10, 3, 5]


def test_random_jobs_against_exact_rationals():
    for seed in range(60):
        draw = random.Random(seed)
        num_cores = draw.randint(1, 3)
        jobs = [(draw.randint(0, 400), draw.randint(1, 300)) for _ in range(draw.randint(1, 9))]
        ends = ends_on_cores(num_cores, jobs)
        exact = processor_sharing(num_cores, jobs)
        # rounding up one end shifts the others by less than a picosecond each
        assert all(-1 <= end - true <= len(jobs) for end, true in zip(ends, exact, strict=True)), seed


def processor_sharing(num_cores: int, jobs: list[tuple[int, int]]) -> list[Fraction]:
    left = {number: Fraction(work) for number, (_, work) in enumerate(jobs)}
    ends, now = {}, Fraction(0)
    while left:
        busy = [number for number in left if jobs[number][0] <= now]
        rate = min(Fraction(1), Fraction(num_cores, max(1, len(busy))))
        coming = [jobs[number][0] for number in left if jobs[number][0] > now]
        until = min([now + left[number] / rate for number in busy] + [Fraction(at) for at in coming])
        for number in busy:
            left[number] -= (until - now) * rate
            if left[number] == 0:
                ends[number] = until
                del left[number]
        now = until
    return [ends[number] for number in range(len(jobs))]


@pytest.mark.parametrize("seed", range(20))
def test_work_is_conserved(seed):
    """The cores deliver min(c, n) per picosecond while n jobs are there, and that adds up to the work."""
    draw = random.Random(seed)
    jobs = [(draw.randint(0, 5000), draw.randint(1, 4000)) for _ in range(12)]
    ends = ends_on_cores(3, jobs)
    borders = sorted({at for at, _ in jobs} | set(ends))
    delivered = sum(
        (stop - start) * min(3, sum(at <= start and stop <= end for (at, _), end in zip(jobs, ends, strict=True)))
        for start, stop in pairwise(borders)
    )
    work = sum(work for _, work in jobs)
    assert 0 <= delivered - work <= 3 * len(jobs)  # each end is rounded up by less than one picosecond on 3 cores


def test_marks_are_passed_when_their_work_is_done():
    env, ends = simpy.Environment(), []
    activity = Activity(env, 10, lambda: ends.append(env.now), marks=(0, 4, 7, 10))
    activity.run_at(Fraction(1))
    env.timeout(5).callbacks.append(lambda _: activity.run_at(Fraction(1, 3)))  # 5 done, 5 left
    env.run()
    assert (activity.times, ends) == ([0, 4, 11, 20], [20])


def test_many_changes_of_the_rate_lose_nothing():
    env, ends = simpy.Environment(), []
    activity = Activity(env, 700, lambda: ends.append(env.now))
    rates = [Fraction(1, 3), Fraction(1, 7), Fraction(2, 5)]
    for at in range(300):
        env.timeout(at).callbacks.append(lambda _, at=at: activity.run_at(rates[at % 3]))
    env.run()
    done = 99 * sum(rates) + rates[0] + rates[1]  # after 299 ps
    assert ends == [299 + -(-(700 - done) // rates[2])]


def fabric_ends(rates, compute, comm):
    """Compute and communication on device 0, each (start, work)."""
    env, ends = simpy.Environment(), {}
    fabric = Fabric(env, rates)
    for name, (at, work) in (("compute", compute), ("comm", comm)):

        def start(_, name=name, work=work):
            done = lambda: ends.__setitem__(name, env.now)  # noqa: E731
            if name == "compute":
                fabric.compute(0, "matrix", work, done)
            else:
                fabric.communicate((0, 1), "all_reduce", work, done)

        env.timeout(at).callbacks.append(start)
    env.run()
    return ends["compute"], ends["comm"]


def test_overlap_rates_need_not_add_to_one():
    half = lambda *_: (Fraction(1, 2), Fraction(1, 4))  # noqa: E731
    # both from 0: at 80 the communication has 20 of 40, compute is done (40); the rest goes at full rate
    assert fabric_ends(half, (0, 40), (0, 40)) == (80, 100)
    assert fabric_ends(half, (0, 40), (40, 40)) == (40, 80)  # they do not meet
    assert fabric_ends(half, (0, 100), (60, 10)) == (120, 100)  # 60 alone, 40 beside: 20 done, 20 left
    assert fabric_ends(None, (0, 40), (0, 40)) == (40, 40)


def test_a_collective_runs_at_the_pace_of_its_slowest_member():
    env, ends = simpy.Environment(), []
    rates = {"fast": (Fraction(1), Fraction(1, 2)), "slow": (Fraction(1), Fraction(1, 4))}
    fabric = Fabric(env, lambda compute, _work, comm, _left: rates[compute])
    fabric.compute(0, "fast", 1000, lambda: None)
    fabric.compute(1, "slow", 40, lambda: None)
    fabric.communicate((0, 1), "all_reduce", 100, lambda: ends.append(env.now))
    env.run()
    assert ends == [40 + 180]  # a quarter for 40, then a half


def test_transfers_share_the_link_they_leave_or_enter_by():
    env, ends = simpy.Environment(), {}
    fabric = Fabric(env, None)
    for source, target in [(0, 1), (0, 2), (3, 2), (4, 5)]:
        fabric.communicate(
            (source, target), "transfer", 60, lambda pair=(source, target): ends.__setitem__(pair, env.now),
            links=((("out", source), Fraction(1)), (("in", target), Fraction(1))),
        )  # fmt: skip
    env.run()
    assert ends == {(0, 1): 120, (0, 2): 120, (3, 2): 120, (4, 5): 60}


def test_compute_that_runs_ahead_is_woken_by_a_communication_and_else_at_its_end():
    env, woken = simpy.Environment(), {}
    fabric = Fabric(env, lambda *_: (Fraction(1, 2), Fraction(1, 4)))
    for device in (0, 1, 2):
        assert fabric.is_quiet(device)
        ahead = fabric.run_ahead(device, 50)
        ahead.callbacks.append(lambda _, device=device: woken.__setitem__(device, (env.now, fabric.is_quiet(device))))
    env.timeout(20).callbacks.append(lambda _: fabric.communicate((0, 1), "all_reduce", 40, lambda: None))
    env.run()
    assert woken == {0: (20, False), 1: (20, False), 2: (50, True)}


def test_what_is_left_of_a_computation_goes_at_the_rates_of_the_whole():
    asked, ends = [], {}

    def rates(kind, work_ps, other, other_ps):
        asked.append((kind, work_ps, other, other_ps))
        return Fraction(1, 2), Fraction(1, 4)

    env = simpy.Environment()
    fabric = Fabric(env, rates)
    fabric.communicate((0,), "all_reduce", 100, lambda: ends.__setitem__("comm", env.now))
    fabric.compute(0, "matrix", 60, lambda: ends.__setitem__("compute", env.now), left_ps=10)
    env.run()
    assert ends == {"compute": 20, "comm": 115}  # 20 at a quarter, then alone
    assert set(asked) == {("matrix", 60, "all_reduce", 100)}


# ------------------------------------------------------------------------------------------------- shared links

ONE = Fraction(1)


def network_ends(loads, law=None):
    """Ends of loads (start, devices, is compute, work, claims)."""
    env, ends = simpy.Environment(), [-1] * len(loads)
    fabric = Fabric(env, law)

    def begin(number, devices, is_compute, work, claims):
        done = lambda: ends.__setitem__(number, env.now)  # noqa: E731
        if is_compute:
            fabric.compute(devices[0], "kernel", work, done)
        else:
            fabric.communicate(devices, "all_reduce", work, done, claims)

    for number, (at, *rest) in enumerate(loads):
        env.timeout(at).callbacks.append(lambda _, number=number, rest=rest: begin(number, *rest))
    env.run()
    return ends


def filled(flows, limits, claims):
    """Max-min rates by raising all open flows by equal steps until a link is full or a limit is met."""
    rate, still_open = dict.fromkeys(flows, Fraction(0)), set(flows)
    room = {link: ONE for flow in flows for link, _ in claims[flow]}
    while still_open:
        need = {link: sum((s for f in still_open for x, s in claims[f] if x == link), Fraction(0)) for link in room}
        steps = [room[link] / each for link, each in need.items() if each] + [limits[f] - rate[f] for f in still_open]
        for flow in still_open:
            rate[flow] += min(steps)
        room = {link: room[link] - min(steps) * need[link] for link in room}
        full = {link for link in room if room[link] == 0}
        still_open = {
            f for f in still_open if rate[f] < limits[f] and not any(link in full for link, _ in claims[f])
        }  # fmt: skip
    return rate


def integrated_ends(loads, law):
    """The same as `network_ends`, integrated from change to change; an end falls on the next whole picosecond."""
    left = {number: Fraction(load[3]) for number, load in enumerate(loads)}
    ends, now = [-1] * len(loads), 0
    while left:
        here = [number for number in left if loads[number][0] <= now]
        limits = {}
        for number in here:
            _, devices, is_compute, _, _ = loads[number]
            beside = any(loads[x][2] is not is_compute and set(loads[x][1]) & set(devices) for x in here)
            limits[number] = law[0 if is_compute else 1] if law and beside else ONE
        rates = filled(here, limits, {number: loads[number][4] for number in here})
        stops = [now - int(-left[number] // rates[number]) for number in here]
        until = min(stops + [loads[number][0] for number in left if loads[number][0] > now])
        for number in here:
            left[number] -= (until - now) * rates[number]
            if left[number] <= 0:
                ends[number] = until
                del left[number]
        now = until
    return ends


def test_what_a_flow_cannot_use_on_a_link_the_others_get():
    """A on link 1, B on 1 and 2, four more on 2: B has a fifth of link 2 only, so A has four fifths of link 1."""
    one, two = (("1", ONE),), (("2", ONE),)
    loads = [(0, (0, 1), False, 1000, one), (0, (2, 3), False, 1000, (*one, *two))]
    loads += [(0, (4 + 2 * n, 5 + 2 * n), False, 1000, two) for n in range(4)]
    assert network_ends(loads) == [1250, *[5000] * 5]


def test_a_collective_slowed_by_compute_leaves_the_rest_of_its_link_to_others():
    law = lambda *_: (Fraction(7, 10), Fraction(1, 2))  # noqa: E731
    link = (("x", ONE),)
    loads = [(0, (0,), True, 10**6, ()), (0, (0, 1), False, 1000, link), (0, (2, 3), False, 1000, link)]
    assert network_ends(loads, law)[1:] == [2000, 2000]
    # with a quarter for the slowed one the other has three quarters; then 2/3 of the slowed one's work is left
    slow = lambda *_: (Fraction(7, 10), Fraction(1, 4))  # noqa: E731
    assert network_ends(loads, slow)[1:] == [4000, 1334]


@pytest.mark.parametrize("seed", range(150))
def test_random_networks_against_progressive_filling(seed):
    draw = random.Random(seed)
    law = draw.choice((None, (Fraction(7, 10), Fraction(1, 2)), (Fraction(9, 10), Fraction(3, 7))))
    loads = []
    for number in range(draw.randint(2, 12)):
        links = draw.sample("abcd", draw.randint(0, 3))
        claims = tuple((link, Fraction(draw.randint(1, 6), draw.choice((1, 4, 6)))) for link in links)
        # a device has one compute at a time; communications as they come
        is_compute = law is not None and draw.random() < 0.3
        devices = (number,) if is_compute else tuple(draw.sample(range(14), 2))
        start = draw.choice((0, 0, draw.randint(0, 3000)))
        loads.append((start, devices, is_compute, draw.randint(1, 3000), () if is_compute else claims))
    rates = None if law is None else lambda *_: law
    assert network_ends(loads, rates) == integrated_ends(loads, law)


def test_max_min_rates_fill_links_and_are_the_same_in_floating_point():
    """No link is over-full, and each flow is at its limit or has a full link on which none is faster."""
    for seed in range(200):
        draw = random.Random(seed)
        limits = [Fraction(draw.randint(1, 10), 10) for _ in range(draw.randint(1, 8))]
        claims = [
            [(link, Fraction(draw.randint(1, 20), 10)) for link in draw.sample("uvwxyz", draw.randint(0, 4))]
            for _ in limits
        ]
        rates = max_min_rates(limits, claims)
        load = {link: Fraction(0) for link in "uvwxyz"}
        for rate, own in zip(rates, claims, strict=True):
            for link, share in own:
                load[link] += rate * share
        assert max(load.values()) <= 1
        for rate, limit, own in zip(rates, limits, claims, strict=True):
            fastest = [
                max(other for other, its in zip(rates, claims, strict=True) if link in dict(its))
                for link, _ in own if load[link] == 1
            ]  # fmt: skip
            assert rate == limit or rate in fastest
        quick = max_min_rates(
            [float(limit) for limit in limits], [[(link, float(share)) for link, share in own] for own in claims]
        )
        assert quick == pytest.approx([float(rate) for rate in rates], rel=1e-12)
