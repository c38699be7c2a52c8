import msgspec
import numpy as np
import pytest

from costmodels.fit.cpu import fit_cpu_machine
from costmodels.fit.forms import crowding, fit_collective, fit_compute, fit_overlap, overlapped_s
from costmodels.fit.points import Point, load_points, save_points
from costmodels.fit.probe import fit_probe, with_probe
from costmodels.machine.machine import COLLECTIVES, Compute, Link, Machine
from costmodels.price.traffic import collective_traffic
from plans.errors import TwofoldError

DISPATCH_S = {
    "matrix": 3e-6,
    "memory": 1e-6,
    "view": 1e-6,
    "update": 2e-6,
    "collective": 4e-5,
    "transfer": 4e-5,
    "wait": 4e-6,
}
TRUE = Compute(
    matrix_flops_per_s={"float32": 8e10}, vector_flops_per_s={"float32": 8e10}, memory_Bps=5e10,
    half_rows=4.0, half_depth=6.0, sharpness=2.0,
)  # fmt: skip
CPU_START_S, CPU_MESSAGE_S, CPU_BPS, START_S, HOP_S = 1e-4, 1.2e-4, 1.5e9, 3e-4, 1e-4
GLOO = Link(name="loopback", ranks=8, latency_s=0.0, bandwidth_Bps=1e15)


def noise(rng: np.random.Generator, share: float) -> float:
    return float(np.exp(rng.normal(0.0, share)))


def matrix_points(rng: np.random.Generator, share: float) -> list[Point]:
    points = []
    for m in (2, 8, 32, 128, 512):
        for n, k in ((512, 784), (784, 512), (512, 8), (1024, 1024)):
            arithmetic = 2 * m * n * k / 8e10 * (1 + 4 / min(m, n)) * (1 + 6 / k)
            traffic = 4 * (m * k + n * k + m * n) / 5e10
            seconds = (DISPATCH_S["matrix"] + np.hypot(arithmetic, traffic)) * noise(rng, share)
            points.append(Point(kind="matrix", call="linear", shape=(m, n, k), seconds=float(seconds)))
    for size in (10**4, 10**5, 10**6, 10**7):
        seconds = (DISPATCH_S["memory"] + size / 5e10) * noise(rng, share)
        points.append(Point(kind="memory", call="relu", size_bytes=size, seconds=seconds))
    return points


def gloo_points(rng: np.random.Generator, share: float, call: str) -> list[Point]:
    points = []
    kind = "transfer" if call == "transfer" else "collective"
    for ranks in (2,) if call == "transfer" else (2, 4, 8):
        for size in (64, 4096, 65_536, 2**20):
            for active in sorted({ranks, 8}):
                if call == "transfer":
                    messages, hops, moved = 1.0, 1, float(size)
                else:
                    traffic = collective_traffic(call, ranks, size, 4, "gloo")
                    messages, hops, moved = traffic.messages, traffic.hops, traffic.moved_bytes
                cpu = DISPATCH_S["collective"] + CPU_START_S + messages * CPU_MESSAGE_S + moved / CPU_BPS
                seconds = cpu * max(1.0, active / 2) + START_S + hops * HOP_S + moved / GLOO.bandwidth_Bps
                points.append(
                    Point(
                        kind=kind,
                        call=call,
                        size_bytes=size,
                        ranks=ranks,
                        active_ranks=active,
                        seconds=seconds * noise(rng, share),
                        cpu_s=cpu * noise(rng, share),
                    )
                )
    return points


def test_compute_rates_are_recovered():
    fitted, matrix, memory = fit_compute(
        matrix_points(np.random.default_rng(1), 0.03), dispatch_s=DISPATCH_S, host_async=False
    )
    assert fitted.matrix_flops_per_s["float32"] == pytest.approx(8e10, rel=0.05)
    assert fitted.memory_Bps == pytest.approx(5e10, rel=0.05)
    assert (fitted.half_rows, fitted.half_depth) == (pytest.approx(4, rel=0.25), pytest.approx(6, rel=0.25))
    assert matrix.median_error < 0.04 and memory.median_error < 0.06


def test_one_wild_point_does_not_decide():
    points = matrix_points(np.random.default_rng(2), 0.02)
    points[5] = msgspec.structs.replace(points[5], seconds=50 * points[5].seconds)
    fitted, *_ = fit_compute(points, dispatch_s=DISPATCH_S, host_async=False)
    assert fitted.matrix_flops_per_s["float32"] == pytest.approx(8e10, rel=0.08)


def test_rates_become_shares_of_the_peak():
    fitted, *_ = fit_compute(
        matrix_points(np.random.default_rng(3), 0.01), dispatch_s=DISPATCH_S, host_async=False,
        peak_flops_per_s=1e11, peak_memory_Bps=1e11,
    )  # fmt: skip
    assert fitted.matrix_flops_per_s == {"float32": 1e11}
    assert fitted.matrix_efficiency == pytest.approx(0.8, rel=0.05)
    assert fitted.memory_efficiency == pytest.approx(0.5, rel=0.05)


def test_processor_time_of_another_process_is_not_counted():
    points = [
        msgspec.structs.replace(point, seconds=2 * point.seconds, cpu_s=point.seconds)
        for point in matrix_points(np.random.default_rng(4), 0.01)
    ]
    fitted, *_ = fit_compute(points, dispatch_s=DISPATCH_S, host_async=False)
    assert fitted.matrix_flops_per_s["float32"] == pytest.approx(8e10, rel=0.05)


@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "all_to_all"])
def test_gloo_processor_time_and_waiting_are_separated(call):
    points = gloo_points(np.random.default_rng(5), 0.03, call)
    fitted, errors = fit_collective(points, link=GLOO, library="gloo", dispatch_s=DISPATCH_S["collective"], cores=2)
    assert fitted.cpu_message_s == pytest.approx(CPU_MESSAGE_S, rel=0.15)
    assert fitted.cpu_Bps == pytest.approx(CPU_BPS, rel=0.25)
    wait_s = fitted.start_s + 7 * fitted.hop_s
    assert wait_s == pytest.approx(START_S + 7 * HOP_S, rel=0.3)
    assert errors.median_error < 0.05


def test_links_latency_and_bandwidth_are_recovered():
    link, rng = Link(name="wire", ranks=8, latency_s=0.0, bandwidth_Bps=4e11), np.random.default_rng(6)
    points = []
    for ranks in (2, 4, 8):
        for power in range(10, 30, 2):
            moved = (ranks - 1) / ranks * 2**power
            seconds = max(1e-5, 2e-5 + moved / (4e11 * 0.7)) * noise(rng, 0.03)
            points.append(
                Point(kind="collective", call="all_gather", size_bytes=2**power, ranks=ranks, seconds=seconds)
            )
    fitted, errors = fit_collective(points, link=link, library="nccl", dispatch_s=1e-5)
    assert fitted.start_s == pytest.approx(2e-5, rel=0.1)
    assert fitted.link_fraction == pytest.approx(0.7, rel=0.1)
    assert errors.p95_error < 0.1


def test_overlap_rates_are_recovered_and_work_is_conserved():
    compute, comm = np.array([1.0, 3.0, 9.0, 1.0, 1.0]), np.array([1.0, 1.0, 1.0, 3.0, 9.0])
    both = overlapped_s(compute, comm, 0.6, 0.8)
    assert fit_overlap(compute, comm, both) == (pytest.approx(0.6, rel=1e-3), pytest.approx(0.8, rel=1e-3))
    np.testing.assert_allclose(overlapped_s(compute, comm, 1.0, 1.0), np.maximum(compute, comm))


def test_crowding_counts_other_processes():
    point = Point(kind="collective", call="all_reduce", ranks=2, active_ranks=8, seconds=1.0)
    assert crowding(point, 2) == 4
    assert crowding(msgspec.structs.replace(point, outside_cores=1.0), 2) == 8
    assert crowding(msgspec.structs.replace(point, active_ranks=2), 8) == 1


@pytest.fixture
def points() -> list[Point]:
    rng = np.random.default_rng(7)
    dispatch = [Point(kind="dispatch", call=call, seconds=s) for call, s in DISPATCH_S.items()]
    shared = Point(kind="sharing", call="matrix", shape=(512, 1024, 1024), active_ranks=8, seconds=0.06)
    communication = [point for call in COLLECTIVES for point in gloo_points(rng, 0.05, call)]
    return [*dispatch, *matrix_points(rng, 0.02), shared, *communication]


ENVIRONMENT = {"ranks": "8", "cores": "2", "memory_bytes": "8000000000", "date": "2026-11-21", "torch": "2.13.0"}


def test_a_cpu_machine_survives_its_file(points, tmp_path):
    calibration = fit_cpu_machine(points, ENVIRONMENT)
    machine = calibration.machine
    assert (machine.num_devices, machine.cores_per_node, machine.memory_bytes) == (8, 2, 10**9)
    assert Machine.load(machine.save(tmp_path / "m.json")) == machine
    assert {quality.section for quality in calibration.residuals} >= {"all_reduce", "transfer", "processor sharing"}


def test_missing_points_are_named(points):
    with pytest.raises(TwofoldError, match="measured 0 times"):
        fit_cpu_machine([point for point in points if point.call != "all_to_all"], ENVIRONMENT)
    with pytest.raises(TwofoldError, match="wait"):
        fit_cpu_machine([point for point in points if point.call != "wait"], ENVIRONMENT)
    with pytest.raises(TwofoldError, match="cores"):
        fit_cpu_machine(points, {"ranks": "8"})


def test_points_survive_their_file(points, tmp_path):
    save_points(tmp_path / "p.json", points, ENVIRONMENT)
    assert load_points(tmp_path / "p.json") == (tuple(points), ENVIRONMENT)
    (tmp_path / "p.json").write_bytes((tmp_path / "p.json").read_bytes()[:-30])
    with pytest.raises(TwofoldError, match=r"p\.json"):
        load_points(tmp_path / "p.json")


def test_probe_scale_is_the_geometric_mean():
    fit = fit_probe([1.0, 1.0], [2.0, 8.0])
    assert fit.host_scale == pytest.approx(4.0)


def test_probe_interval_narrows_with_agreeing_probes_down_to_the_floor():
    widths = [fit_probe([1.0] * count, [1.2] * count).high for count in (1, 2, 4, 8, 64, 512)]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] == pytest.approx(np.exp(0.10))


def test_probe_interval_widens_with_spread():
    assert fit_probe([1, 1, 1], [1.0, 1.5, 0.7]).high > fit_probe([1, 1, 1], [1.0, 1.05, 0.95]).high


@pytest.mark.parametrize("count", [2, 3, 5])
def test_probe_interval_holds_nine_of_ten_programs_of_its_prior(count):
    rng = np.random.default_rng(8)
    held = 0
    for _ in range(2000):
        # spread drawn from the scaled inverse chi-squared distribution that the prior stands for
        spread = 0.12 * np.sqrt(6 / rng.chisquare(6))
        ratios = np.exp(rng.normal(0.3, spread, count + 1))
        fit = fit_probe(np.ones(count).tolist(), ratios[:-1].tolist(), floor=0.0)
        held += fit.low <= ratios[-1] / fit.host_scale <= fit.high
    assert held / 2000 == pytest.approx(0.9, abs=0.02)


def test_a_probed_machine_multiplies_its_factor_and_records_it():
    machine = with_probe(Machine.load("h200-x4"), fit_probe([1.0], [1.5]), date="2026-11-21")
    machine = with_probe(machine, fit_probe([1.0], [2.0]), date="2026-11-21")
    assert machine.host_scale == pytest.approx(3.0)
    assert machine.provenance["interval"].status == "measured"


@pytest.mark.parametrize(("predicted", "measured"), [([], []), ([1.0], []), ([0.0], [1.0]), ([1.0], [float("nan")])])
def test_bad_probes_are_refused(predicted, measured):
    with pytest.raises(TwofoldError):
        fit_probe(predicted, measured)


def test_operations_of_attention_are_those_of_its_two_products():
    """Two products of 2 b h q k d operations; half of them if causal, 5 products instead of 2 in the backward."""
    shape = (2, 3, 1, 5, 7, 11)  # batch, heads, key-value heads, queries, keys, elements of a head
    forward = Point(kind="attention", call="attention.forward", shape=shape, seconds=1.0)
    assert forward.flops == 2 * 2 * 2 * 3 * 5 * 7 * 11
    causal = msgspec.structs.replace(forward, call="attention.backward", options={"causal": True})
    assert causal.flops == 5 * 2 * 2 * 3 * 5 * 7 * 11 / 2
