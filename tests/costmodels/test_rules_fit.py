import numpy as np
import pytest

from costmodels import Machine, price_compute
from costmodels.fit.points import Point
from costmodels.machine.catalogue import load_device
from costmodels.price.compute import Rule, rule_s
from costmodels.price.executor_kernels import fit_rules, rule_points

COMPUTE = load_device("h200").compute


def points_of(call, kernels, passes, sizes, *, held_out=False, noise=0.0, inputs="8;8", **options):
    rng = np.random.default_rng(3)
    return [
        Point(
            kind="rule", call=call, shape=(size,), size_bytes=size, dtype="bfloat16", stack="twofold",
            options={"class": "memory", "inputs": inputs, **options}, held_out=held_out,
            seconds=(kernels * COMPUTE.kernel_s + passes * size / COMPUTE.memory_Bps) * np.exp(rng.normal(0, noise)),
        )
        for size in sizes
    ]  # fmt: skip


SIZES = (2**12, 2**16, 2**20, 2**24, 2**28)


def test_kernels_and_passes_of_each_call_are_found_again():
    found = fit_rules(points_of("rope.forward", 12.0, 9.0, SIZES) + points_of("mul.grad0", 1.0, 1.5, SIZES), COMPUTE)
    assert found.rules["rope.forward"].kernels == pytest.approx(12.0, rel=0.02)
    assert found.rules["rope.forward"].passes == pytest.approx(9.0, rel=0.02)
    assert found.rules["mul.grad0"].passes == pytest.approx(1.5, rel=0.02)


def test_held_out_points_are_judged_and_not_fitted():
    kept = points_of("rope.forward", 4.0, 9.0, SIZES)
    other = points_of("rope.forward", 4.0, 18.0, SIZES[-2:], held_out=True)
    found = fit_rules(kept + other, COMPUTE)
    assert found.rules == fit_rules(kept, COMPUTE).rules
    assert found.held_out is not None
    assert found.held_out.bias == pytest.approx(-0.5, abs=0.03)
    assert found.fitted.median_error < 0.01


def test_views_and_calls_that_ran_no_kernel_make_no_rule():
    views = points_of("flat_unpack", 2.0, 1.0, SIZES, shares=1)
    nothing = [Point(kind="rule", call="slice", size_bytes=8, options={"class": "memory"}, seconds=1e-9)]
    assert rule_points(views + nothing) == []


def test_a_sum_of_more_tensors_has_a_rule_of_its_own():
    two, three = points_of("sum", 1.0, 1.0, SIZES), points_of("sum", 2.0, 2.0, SIZES, inputs="8;8;8")
    rules = fit_rules(two + three, COMPUTE).rules
    assert rules["sum:3"].passes == pytest.approx(2 * rules["sum:2"].passes, rel=0.02)


def test_host_times_go_with_the_rule_or_alone_where_a_class_has_its_own_form():
    said = {"kind": "dispatch", "stack": "twofold", "seconds": 7e-5}
    hosts = [
        Point(call="rope.forward", options={"class": "memory"}, **said),
        Point(call="linear.forward", options={"class": "matrix"}, **said),
        Point(call="all_reduce", options={"class": "collective"}, **said),
    ]
    rules = fit_rules(points_of("rope.forward", 4.0, 9.0, SIZES) + hosts, COMPUTE).rules
    assert rules["rope.forward"].dispatch_s == rules["linear.forward"].dispatch_s == 7e-5
    assert rules["linear.forward"].passes is None
    assert "all_reduce" not in rules


def test_rules_hold_for_the_executor_and_not_for_other_stacks():
    """The executor turns positions in one kernel, and takes the norm's gradient of the weight in several."""
    machine, shapes = Machine.load("h200-x4"), ((2, 1024, 2048), (2, 1024, 2048), (2048,), (2, 1024), (2048,))
    own = price_compute(machine, "rms_norm.grad1", shapes, "bfloat16", 2**24, 0, True)
    other = price_compute(machine, "rms_norm.grad1", shapes, "bfloat16", 2**24)
    rule = machine.compute.rules["rms_norm.grad1"]
    assert isinstance(rule, Rule)
    alone_s = rule_s(machine.compute, rule, 2**24, rows=2048)
    assert own.work_ps == pytest.approx(alone_s * (1 + machine.compute.longer_in_steps) * 1e12, abs=1)
    assert own.work_ps != other.work_ps


def test_a_product_keeps_its_form_and_takes_the_host_time_of_its_own_call():
    machine, shapes = Machine.load("h200-x4"), ((512, 1024), (2048, 1024), (512, 2048))
    own = price_compute(machine, "linear.forward", shapes, "bfloat16", 2**23, 0, True)
    other = price_compute(machine, "linear.forward", shapes, "bfloat16", 2**23)
    assert own.work_ps == round(other.work_ps * (1 + machine.compute.longer_in_steps))
    assert own.dispatch_ps == round(machine.compute.rules["linear.forward"].dispatch_s * machine.host_scale * 1e12)


def test_measurements_of_older_code_do_not_count():
    old, new = points_of("rope.forward", 12.0, 9.0, SIZES), points_of("rope.forward", 2.0, 3.0, SIZES, code="b")
    other = points_of("rope.forward", 5.0, 5.0, SIZES, code="a")
    rules = fit_rules([*old, *other, *new, *points_of("mul.grad0", 1.0, 1.5, SIZES)], COMPUTE).rules
    assert rules["rope.forward"].passes == pytest.approx(3.0, rel=0.02)
    assert rules["mul.grad0"].passes == pytest.approx(1.5, rel=0.02)  # of a time when no code was noted
