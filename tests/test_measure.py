import pytest

from costmodels.cpu import fit_cpu_machine
from costmodels.machine import COLLECTIVES, DISPATCH_CLASSES
from costmodels.points import load_points
from executor.launch import launch


@pytest.mark.ranks
def test_two_ranks_measure_what_a_machine_is_fitted_to(tmp_path):
    lines: list[str] = []
    launch(
        "executor.measure_main", num_ranks=2, args=[str(tmp_path / "points.json"), "0.5"], log_dir=tmp_path / "log",
        stream_rank=0, on_line=lambda rank, line: lines.append(line), timeout_s=120,
    )  # fmt: skip
    points, environment = load_points(tmp_path / "points.json")
    assert {point.call for point in points if point.kind == "dispatch"} == set(DISPATCH_CLASSES) - {"attention"}
    assert {point.call for point in points if point.kind in ("collective", "transfer")} == set(COLLECTIVES)
    assert all(0 < point.low_s <= point.seconds <= point.high_s for point in points)
    assert all(point.cpu_s > 0 for point in points if point.kind in ("collective", "transfer"))
    assert sum(line.startswith("[") for line in lines) == 7
    machine = fit_cpu_machine(points, environment).machine
    assert (machine.num_devices, machine.host_async) == (2, False)
    assert machine.cores_per_node == int(environment["cores"])
