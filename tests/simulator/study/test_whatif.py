"""What if: factors on a machine, other devices, stragglers, checkpoints and failures."""

import msgspec
import pytest

from plans.errors import TwofoldError
from plans.lower import lower
from plans.timeline import PS_PER_S
from simulator import Checkpoints, Failures, LinkChange, WhatIf, outcome, simulate
from tests.support.reports_example import small_plan
from tests.support.small_machine import small_machine


@pytest.fixture(scope="module")
def program():
    return lower(small_plan())


@pytest.fixture(scope="module")
def machine():
    return small_machine(latency_s=1e-7, dispatch_s=dict.fromkeys(small_machine().dispatch_s, 1e-8))


def step_s(program, machine, **changes):
    return simulate(program, machine, what_if=WhatIf(**changes)).step_interval_s


def test_nothing_changed_is_the_machine_itself(program, machine):
    assert WhatIf().machine(machine) is machine
    assert simulate(program, machine, what_if=WhatIf()).step_end_ps == simulate(program, machine).step_end_ps
    assert WhatIf(seed=3).is_none and not WhatIf(seed=3, jitter=0.1).is_none


@pytest.mark.parametrize(
    ("knob", "better"), [("bandwidth", 2.0), ("latency", 0.5), ("compute", 2.0), ("memory", 2.0), ("dispatch", 0.5)]
)
def test_every_knob_turns_the_step(program, machine, knob, better):
    slow, base, fast = (step_s(program, machine, **{knob: factor}) for factor in (1 / better, 1.0, better))
    assert slow >= base >= fast and slow > fast


def test_all_knobs_together_scale_the_step(program, machine):
    """Everything twice as slow is a step twice as long, but for the rounding of each price to a picosecond."""
    everything = {"bandwidth": 0.5, "latency": 2.0, "compute": 0.5, "memory": 0.5, "dispatch": 2.0}
    slow, base = step_s(program, machine, **everything), step_s(program, machine)
    num_prices = sum(1 for group in program.groups for _ in group.walk())
    assert slow == pytest.approx(2 * base, abs=2 * num_prices / PS_PER_S)


def test_a_rank_with_the_device_of_another_machine(program, machine):
    slow = msgspec.structs.replace(
        machine, name="old", compute=msgspec.structs.replace(machine.compute, memory_Bps=1e11)
    )
    base, mixed = step_s(program, machine), step_s(program, machine, devices={5: slow})
    assert mixed > base
    every = step_s(program, machine, devices=dict.fromkeys(range(8), slow))
    assert every == simulate(program, slow).step_interval_s > mixed


def test_two_devices_of_one_name_are_distinguished(program, machine):
    first, second = (
        msgspec.structs.replace(machine, compute=msgspec.structs.replace(machine.compute, memory_Bps=rate))
        for rate in (1e11, 1e10)
    )
    times = [step_s(program, machine, devices={0: first, 1: each}) for each in (first, second)]
    assert times[1] > times[0]


def test_equal_devices_change_nothing(program, machine):
    assert step_s(program, machine, devices={5: machine}) == step_s(program, machine)


def test_hosts_that_compute_do_not_mix_with_devices_behind_hosts(program, machine):
    other = msgspec.structs.replace(machine, name="cores", host_async=False, cores_per_node=2)
    with pytest.raises(TwofoldError, match="rank 1 cannot have the device of 'cores'"):
        step_s(program, machine, devices={1: other})


def test_a_degraded_port_slows_a_real_plan(program, machine):
    change = LinkChange(tier="node", ranks=(2,), bandwidth=0.1)
    assert step_s(program, machine, links=(change,)) > step_s(program, machine)


def test_checkpoints_hold_weights_and_optimizer_state(program, machine):
    """Of layer 1, 512 x 784 in float32: columns split over two ranks, shards over two more; a whole bias."""
    timeline = simulate(program, machine)
    held = 4 * (512 * 784 // 2 // 2 + 512 // 2)
    found = outcome(program, machine, WhatIf(checkpoints=Checkpoints(every_steps=10, write_Bps=1e9)))
    assert found.goodput.checkpoint_s == pytest.approx(held / 1e9)
    assert found.goodput.effective_step_s == pytest.approx(found.step_s + held / 1e9 / 10)
    assert found.step_s == timeline.step_interval_s and found.peak_bytes == timeline.peak_bytes


def test_failures_lower_the_goodput(program, machine):
    checkpoints = Checkpoints(every_steps=1000, write_Bps=1e9)
    rare, frequent = (
        outcome(program, machine, WhatIf(checkpoints=checkpoints, failures=Failures(device_mtbf_s=mtbf, restart_s=1)))
        for mtbf in (1e6, 1e3)
    )
    assert 1 > rare.goodput.fraction > frequent.goodput.fraction > 0


def test_what_was_changed_stands_in_the_timeline(program, machine):
    assert simulate(program, machine, what_if=WhatIf(bandwidth=0.5)).meta["what_if"] == "bandwidth x0.5"
    assert "what_if" not in simulate(program, machine).meta


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bandwidth": 0.0}, "bandwidth must be .* not 0.0"),
        ({"latency": float("nan")}, "latency must be .* not nan"),
        ({"compute": -1.0}, "compute must be .* not -1.0"),
        ({"dispatch": float("inf")}, "dispatch must be .* not inf"),
        ({"slowdown": {-1: 2.0}}, "rank of slowdown must be .* not -1"),
        ({"slowdown": {0: "2"}}, "slowdown of rank 0 must be .* not '2'"),
        ({"bandwidth": "2"}, "bandwidth must be .* not '2'"),
        ({"seed": 1.5}, "seed must be .* not 1.5"),
        ({"jitter": 0.1}, "needs a seed"),
        ({"jitter": 0.1, "seed": -1}, "seed must be .* not -1"),
    ],
)
def test_bad_values_are_refused(changes, message):
    with pytest.raises(TwofoldError, match=message):
        WhatIf(**changes)


@pytest.mark.parametrize(
    ("changes", "what"), [({"slowdown": {8: 2.0}}, "slowdown"), ({"devices": {8: None}}, "device")]
)
def test_ranks_that_the_program_does_not_have_are_refused(program, machine, changes, what):
    with pytest.raises(TwofoldError, match=f"{what} of rank 8: the program's ranks are 0 to 7"):
        step_s(program, machine, **changes)
