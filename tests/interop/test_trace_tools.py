"""Meta's HolisticTraceAnalysis 0.5.0 on the files that we write.

Its critical_path_analysis, which needs pandas 2, was last run by hand with pandas 2.3.
"""

import pytest

from interop.chrome_trace import write_rank_traces
from simulator import run_program
from tests.support.handmade import Script, program_of, written_price
from tests.support.reports_example import predicted, small_program

MS = 10**9


def analysis_of(folder):
    """What is imported takes a second; the tests of other files need not wait for it when tests are collected."""
    from hta.trace_analysis import TraceAnalysis

    return TraceAnalysis(trace_dir=str(folder))


@pytest.fixture
def analysis(tmp_path):
    scripts = [Script(rank) for rank in range(4)]
    for script in scripts:
        for number in range(2):
            script.compute(f"a{number}", (3 if script.rank == 2 else 2) * MS)
            script.collective(f"r{number}", range(4), (0, 1 * MS), "t")
            script.compute(f"b{number}", MS // 2)
            script.wait("t")
    program = program_of(scripts)
    timeline = run_program(program, written_price, num_steps=3)
    assert timeline.step_end_ps[-1] - timeline.step_start_ps[-1] == 8 * MS
    write_rank_traces(tmp_path, timeline, program=program)
    return analysis_of(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_hta_finds_what_we_put_in(analysis):
    found = analysis.get_temporal_breakdown(visualize=False).set_index("rank")
    # 2 or 3 ms of compute and half a millisecond beside the collective, twice a step, three steps
    assert found["compute_time(us)"].tolist() == [15000, 15000, 21000, 15000]
    assert found["kernel_time(us)"].tolist() == [24000] * 4
    overlap = analysis.get_comm_comp_overlap(visualize=False).set_index("rank")["comp_comm_overlap_pctg"]
    # of a collective's 2 ms (1 ms of it waiting; 1 ms on the late rank) half a millisecond is beside compute
    assert overlap.tolist() == pytest.approx([25, 25, 50, 25])
    assert analysis.get_potential_stragglers(num_candidates=1) == [2]


@pytest.mark.filterwarnings("ignore")
def test_hta_reads_a_real_plan(tmp_path):
    write_rank_traces(tmp_path, predicted(3), program=small_program())
    analysis = analysis_of(tmp_path)
    idle, _ = analysis.get_idle_time_breakdown(ranks=[0], visualize=False)
    assert set(idle["stream"]) >= {7, 20}
    launches = analysis.get_cuda_kernel_launch_stats(ranks=[0], visualize=False)[0]
    assert len(launches) and not launches["launch_delay"].isna().any()
