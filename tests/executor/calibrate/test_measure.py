from contextlib import redirect_stdout

import pytest

from costmodels.fit.cpu import fit_cpu_machine
from costmodels.fit.points import load_points
from costmodels.machine.machine import COLLECTIVES, DISPATCH_CLASSES
from executor.launch.job import Job, save_job
from tests.support.on_ranks import run_on_ranks


def run_job(rank, folder):
    from executor.launch.job_main import main

    with (folder / f"stdout.{rank}").open("a") as file, redirect_stdout(file):
        main([str(folder / "job.json")])


def measured(folder):
    save_job(Job(measure=str(folder / "points.jsonl"), measure_s=0.5, device="cpu"), folder / "job.json")
    run_on_ranks(run_job, 2, folder, joined=False)
    return load_points(folder / "points.jsonl")


@pytest.mark.ranks
def test_two_ranks_measure_the_points_of_a_machine_and_resume(tmp_path):
    points, environment = measured(tmp_path)
    lines = (tmp_path / "stdout.0").read_text().splitlines()
    assert {point.call for point in points if point.kind == "dispatch"} == set(DISPATCH_CLASSES) - {"attention"}
    assert {point.call for point in points if point.kind in ("collective", "transfer")} == set(COLLECTIVES)
    assert all(0 < point.low_s <= point.seconds <= point.high_s for point in points)
    assert all(point.cpu_s > 0 for point in points if point.kind in ("collective", "transfer"))
    assert [line.split("]")[0] for line in lines if line.startswith("[")] == [f"[{n}/7" for n in range(1, 8)]
    assert all("s left of measuring" in line for line in lines if line.startswith("["))
    machine = fit_cpu_machine(points, environment).machine
    assert (machine.num_devices, machine.host_async) == (2, False)
    assert machine.cores_per_node == int(environment["cores"])

    path, kept = tmp_path / "points.jsonl", 9
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[: 1 + kept]) + whole[1 + kept][:10])  # the header, nine points, part of a tenth
    again, _ = measured(tmp_path)
    assert f"{kept} points are measured already" in (tmp_path / "stdout.0").read_text().splitlines()
    assert again[:kept] == points[:kept]
    assert {point.key for point in again} == {point.key for point in points}
    assert len(again) == len(points)
