"""`twofold whatif`, the sensitivity behind it, its tables and its picture; schedules from files."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from interop.chrome_trace import write_rank_traces, write_trace
from interop.statement import write_statement
from plans.degrees import Degrees
from plans.errors import TwofoldError
from plans.lower import lower
from plans.model.transformer import transformer_config
from plans.plan import save_plan
from plans.schedules import make_schedule
from plans.timeline import BUFFERS
from reports import sensitivity_table, tornado_picture, what_if_table
from simulator import Checkpoints, Failures, WhatIf, outcome
from simulator.study.scenarios import Scenarios
from simulator.study.sensitivity import sensitivity
from tests.support.reports_example import measured, predicted, small_plan, small_program
from tests.support.small_machine import small_machine
from twofold.cli import main


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    machine = small_machine(8, latency_s=1e-7, dispatch_s=dict.fromkeys(small_machine().dispatch_s, 1e-8))
    return str(save_plan(small_plan(), folder / "plan.json")), str(machine.save(folder / "machine.json"))


@pytest.fixture(scope="module")
def program():
    return lower(small_plan())


def answer(arguments, capsys) -> dict:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_values_of_one_knob_are_a_sweep(files, capsys):
    plan, machine = files
    found = answer(["whatif", plan, "--machine", machine, "--bandwidth", "0.25", "1", "4"], capsys)
    slow, fast = found["changed"]  # a factor of 1 is the row above
    assert [each["what_if"] for each in found["changed"]] == ["bandwidth x0.25", "bandwidth x4"]
    assert slow["step_s"] > found["base"]["step_s"] > fast["step_s"]
    assert slow["change"] == slow["step_s"] / found["base"]["step_s"] - 1


def test_every_row_says_all_of_its_changes_and_each_change_is_shown_alone(files, capsys):
    plan, machine = files
    found = answer(["whatif", plan, "--machine", machine, "--bandwidth", "0.25", "0.5", "--slow", "7=1.5"], capsys)
    rows = {each["what_if"]: each["step_s"] for each in found["changed"]}
    slow = "rank 7 x1.5 slower"
    assert list(rows) == [
        "bandwidth x0.25",
        "bandwidth x0.5",
        slow,
        f"bandwidth x0.25, {slow}",
        f"bandwidth x0.5, {slow}",
    ]
    for title, step_s in rows.items():
        alone = [
            step for other, step in rows.items() if other != title and set(other.split(", ")) < set(title.split(", "))
        ]
        assert all(step_s >= step for step in alone) and step_s > found["base"]["step_s"]


def test_files_of_degrees_are_forecast_at_any_number_of_devices(capsys, tmp_path):
    small = write_statement(
        tmp_path / "small.degrees.json", transformer_config("llama-3-8b", num_layers=4, seq=2048),
        Degrees(dp=2, tp=4, pp=2, global_batch=8), stack="twofold",
    )  # fmt: skip
    arguments = ["whatif", str(small), "--machine", "h100-sxm-x16", "--bandwidth", "0.5", "--link", "NVLink:latency=2"]
    forecast, simulated = answer(arguments, capsys), answer([*arguments, "--simulate"], capsys)
    for one, other in zip(forecast["changed"], simulated["changed"], strict=True):
        assert one["what_if"] == other["what_if"] and one["step_s"] == pytest.approx(other["step_s"], rel=0.01)
    large = write_statement(
        tmp_path / "large.degrees.json", transformer_config("llama-3.1-405b"),
        Degrees(dp=391, tp=8, pp=32, global_batch=391 * 64), stack="twofold",
    )  # fmt: skip
    page = tmp_path / "large.html"
    asked = ["whatif", str(large), "--machine", "h100-sxm-x100096", "--slow", "1/1000=1.1", "--report", str(page)]
    found = answer(asked, capsys)
    assert 0 < found["changed"][0]["change"] < 0.1 and "100 ranks (" in found["changed"][0]["what_if"]
    assert found["predicted_by"] == "forecast"  # a page of so many ranks has the tables without a pipeline
    text = page.read_text()
    assert 'id="what-if"' in text and 'id="pipeline"' not in text and "all times are forecasts" in text.lower()
    arguments += ["--report", str(tmp_path / "small.html")]
    assert answer(arguments, capsys)["changed"] == simulated["changed"]
    assert 'id="pipeline"' in (tmp_path / "small.html").read_text()
    long = write_statement(
        tmp_path / "long.degrees.json", transformer_config("llama-3-8b"),
        Degrees(dp=32, tp=8, pp=4, global_batch=4096), stack="twofold",
    )  # fmt: skip
    asked = ["whatif", str(long), "--machine", "h100-sxm-x1024", "--bandwidth", "2", "--report", str(page), "--force"]
    assert answer(asked, capsys)["predicted_by"] == "forecast"  # its page took 170 s in the engine


def test_settings_come_together(files, capsys):
    plan, machine = files
    arguments = ["--slow", "0-3=1.5", "--link", "wire:latency=2", "--jitter", "0.1", "--checkpoint-every", "10"]
    arguments += [
        "--checkpoint-GBps",
        "0.001",
        "--device-mtbf-hours",
        "1",
        "--restart-s",
        "0.5",
        "--device",
        f"7={machine}",
    ]
    found = answer(["whatif", plan, "--machine", machine, *arguments], capsys)
    *alone, changed = found["changed"]
    assert len(alone) == 5
    for part in ("ranks 0-3 x1.5 slower", "wire:latency=2", "jitter 0.1", "every 10 steps", "every 1 h", "rank 7 as"):
        assert part in changed["what_if"]
    assert changed["goodput"] < 1 and changed["effective_step_s"] > changed["step_s"] > found["base"]["step_s"]
    assert answer(["whatif", plan, "--machine", machine, *arguments], capsys) == found  # one seed, one result


def test_sensitivity_and_its_picture(files, capsys, tmp_path):
    plan, machine = files
    picture = tmp_path / "tornado.svg"
    found = answer(["whatif", plan, "--machine", machine, "--sensitivity", "--picture", str(picture)], capsys)
    effects = found["sensitivity"]
    assert [each["swing_s"] for each in effects] == sorted((each["swing_s"] for each in effects), reverse=True)
    assert {"bandwidth of node", "bandwidth of wire"} < {each["knob"] for each in effects}  # each tier by itself
    ElementTree.parse(picture)


def test_turning_a_knob_is_the_what_if_of_that_value(program):
    machine = small_machine(8)
    effects = {
        each.knob: each for each in sensitivity(Scenarios(program=program, machine=machine).outcome, machine, by=0.5)
    }
    one = effects["memory bandwidth of devices"]
    assert one.low_s == outcome(program, machine, WhatIf(memory=0.5)).step_s
    assert one.high_s == outcome(program, machine, WhatIf(memory=1.5)).step_s
    assert one.low_s > one.base_s > one.high_s
    assert one.swing_s == one.low_s - one.high_s


def test_checkpoints_and_failures_are_knobs_where_they_are_given(program):
    """Each is the what-if of its figure, a half less and a half more."""
    machine, figures = small_machine(8), {"every_steps": 10, "write_Bps": 1e9, "device_mtbf_s": 1e5, "restart_s": 60.0}
    of = Scenarios(program=program, machine=machine, num_steps=1).outcome

    def base(**changed):
        every, write, mtbf, restart = (figures | changed).values()
        return WhatIf(
            checkpoints=Checkpoints(every_steps=every, write_Bps=write),
            failures=Failures(device_mtbf_s=mtbf, restart_s=restart),
        )

    effects = {each.knob: each for each in sensitivity(of, machine, base(), by=0.5)}
    for knob, figure in {
        "steps between checkpoints": "every_steps", "speed of writing checkpoints": "write_Bps",
        "time between failures": "device_mtbf_s", "time of a restart": "restart_s",
    }.items():  # fmt: skip
        less, more = (
            of(base(**{figure: type(figures[figure])(figures[figure] * factor)})).goodput.effective_step_s
            for factor in (0.5, 1.5)
        )
        assert (effects[knob].low_s, effects[knob].high_s) == (less, more) and less != more


@pytest.mark.parametrize("by", [0.0, 1.0, -0.1, float("nan")])
def test_shares_to_turn_by_are_between_0_and_1(program, by):
    with pytest.raises(TwofoldError, match="above 0 and below 1"):
        sensitivity(Scenarios(program=program, machine=small_machine(8)).outcome, small_machine(8), by=by)


def test_the_tables_show_the_numbers(program):
    machine = small_machine(8)
    base, slow = (outcome(program, machine, WhatIf(memory=factor)) for factor in (1.0, 0.5))
    table = what_if_table(base, [("memory 0.5", slow)], "a note")
    assert table.rows[0][0] == "unchanged" and table.rows[1][2] == slow.step_s / base.step_s - 1
    assert table.notes == ("a note",) and "goodput" not in table.columns
    effects = sensitivity(Scenarios(program=program, machine=machine).outcome, machine)
    assert len(sensitivity_table(effects).rows) == len(effects)
    text = tornado_picture(effects).svg()
    assert text.count("<title>") == 2 * len(effects)
    assert sensitivity_table(()).rows == () and tornado_picture(()).alone()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bandwidth", "1", "2", "--latency", "1", "2"], "--latency has several values too"),
        (["--bandwidth", "0"], "--bandwidth must be above 0, not 0"),
        (["--slow", "x=2"], "cannot read --slow x=2"),
        (["--slow", "1=fast"], "cannot read --slow 1=fast; write --slow 3=1.2"),
        (["--slow", "9=2"], "rank 9"),
        (["--slow", "3-0=1.2"], "cannot read --slow 3-0=1.2"),
        (["--slow", "stage1-0=1.2"], "cannot read --slow stage1-0=1.2"),
        (["--link", "0:3-0:bandwidth=0.5"], "cannot read the link change '0:3-0:bandwidth=0.5'"),
        (["--report", "/"], "/"),
        (["--slow", "0-999999999=2"], "cannot read --slow"),
        (["--link", "rope:failed"], "its tiers are node"),
        (["--checkpoint-GBps", "1"], "needs --checkpoint-every"),
        (["--restart-s", "1"], "needs --device-mtbf-hours"),
        (["--device-mtbf-hours", "1"], "failures without checkpoints lose all work"),
        (["--device", "1=h300"], "machine 'h300' is not known"),
        (["--steps", "0"], "--steps must be at least 1, not 0"),
        (["--schedule", "nowhere.csv"], "nowhere.csv"),
        (["--schedule", "{folder}/empty.csv"], "empty.csv: the file is empty"),
        (["--schedule", "{folder}/hello.txt"], "hello.txt: rank 0, cell 0: 'hello' is not an action"),
        (["--schedule", "{folder}/short.csv"], "short.csv: the written schedule 'custom' is for 2 pipeline ranks"),
        (["--schedule", "{folder}"], "a schedule file must be named *.csv or *.txt"),
        (["--by", "2", "--sensitivity"], "--by must be above 0 and below 1, not 2"),
        (["--by", "0.1"], "--by changes nothing without --sensitivity"),
        (["--seed", "3"], "--seed changes nothing without --jitter"),
        (["--checkpoint-async"], "--checkpoint-async changes nothing without --checkpoint-every"),
        (["--slow", "0-1=2", "1=1"], "--slow 1=1: rank 1 already has a factor"),
    ],
)
def test_bad_input_exits_with_2_and_one_error(files, arguments, message, capsys, tmp_path):
    plan, machine = files
    for name, text in (("empty.csv", ""), ("hello.txt", "hello"), ("short.csv", "0F0,0B0\n1F0,1B0\n")):
        (tmp_path / name).write_text(text)
    arguments = [each.replace("{folder}", str(tmp_path)) for each in arguments]
    assert main(["whatif", plan, "--machine", machine, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("error:") == 1 and message in error


# ------------------------------------------------------------------------------ schedules from files


def test_a_written_schedule_is_the_named_one(files, tmp_path, capsys):
    plan, machine = files
    for name in ("gpipe", "1f1b"):
        written = tmp_path / f"{name}.csv"
        written.write_text(make_schedule(name, 2, 4).to_csv())
        by_name = answer(["simulate", plan, "--machine", machine, "--schedule", name], capsys)
        assert answer(["simulate", plan, "--machine", machine, "--schedule", str(written)], capsys) == by_name


def test_a_plan_with_a_written_schedule_round_trips(files, tmp_path, capsys):
    import msgspec

    text = "0F0,0F1,0B0,0F2,0F3,0B1,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"
    own = msgspec.structs.replace(small_plan(), schedule=text)
    assert "written by hand" in _plan_text(own)
    path = save_plan(own, tmp_path / "own.json")
    written = tmp_path / "own.txt"
    written.write_text(text)
    plan, machine = files
    from_plan = answer(["simulate", str(path), "--machine", machine], capsys)
    assert from_plan == answer(["simulate", plan, "--machine", machine, "--schedule", str(written)], capsys)


def _plan_text(plan) -> str:
    from reports import plan_table

    return plan_table(plan).text()


@pytest.mark.parametrize(
    ("rows", "message", "cell"),
    [
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1", "2 micro-batches", None),
        ("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3", "1 pipeline ranks", None),
        ("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3", "1B3 is missing", None),
        ("0F0,0F1,0F2,0B1,0B0,0F3,0B2,0B3\n1F0,1B0,1F1,1F3,1F2,1B1,1B2,1B3", "deadlock", ">0B1<"),
        ("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1B0,1F0,1F1,1B1,1F2,1B2,1F3,1B3", "before its forward", ">1B0<"),
        ("0F0,0F1;0B0,0F2,0F3,0B1,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3", "two actions at once", ">0F1;0B0<"),
        ("0F0,0X1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3", "0X1", ">0X1<"),
        ("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3,0F0\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3", "repeats the forward", ">0F0<"),
    ],
)
def test_a_bad_schedule_is_refused_with_its_cell(files, rows, message, cell, tmp_path, capsys):
    plan, machine = files
    written = tmp_path / "bad.csv"
    written.write_text(rows)
    assert main(["simulate", plan, "--machine", machine, "--schedule", str(written)]) == 2
    error = capsys.readouterr().err
    assert message in error and (cell is None or cell in error)


def test_simulate_says_where_time_and_memory_go(files, capsys):
    plan, machine = files
    found = answer(["simulate", plan, "--machine", machine], capsys)
    assert sum(found["critical_path_s"].values()) == pytest.approx(found["step_s"], rel=1e-9)
    assert [each["rank"] for each in found["ranks"]] == list(range(8))
    for each in found["ranks"]:
        parts = [each["compute_s"], each["host_wait_s"], each["bubble_s"]]
        parts += [*each["exposed_comm_s"].values(), *each["straggler_wait_s"].values()]
        assert sum(parts) == pytest.approx(found["step_s"], rel=1e-9)
        assert sum(each["peak_bytes_by_role"].values()) == each["peak_bytes"] <= found["peak_bytes"]
    fullest = found["ranks"][found["fullest_rank"]]
    assert fullest["peak_bytes"] == found["peak_bytes"]
    values = sum(size for role, size in fullest["peak_bytes_by_role"].items() if role != BUFFERS)
    assert sum(found["peak_bytes_by_action"].values()) == values
    assert {"begin", "0B0"} < set(found["peak_bytes_by_action"])
    assert main(["simulate", plan, "--machine", machine]) == 0
    shown = capsys.readouterr().out
    assert (
        "Peak memory of the fullest rank" in shown
        and "the actions that hold most are" in shown
        and "Critical path" in shown
    )


def test_stages_stand_for_their_ranks(files, capsys):
    plan, machine = files
    by_stage, by_ranks = (
        answer(["whatif", plan, "--machine", machine, "--slow", f"{ranks}=1.5"], capsys) for ranks in ("stage1", "4-7")
    )
    assert by_stage == by_ranks
    assert by_stage["changed"][0]["change"] > 0
    assert main(["whatif", plan, "--machine", machine, "--device", f"stage2={machine}"]) == 2
    assert "the plan's stages are 0 to 1, not 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("links", 0, "bandwidth_Bps"), 0, "bandwidth_Bps is 0"),
        (("links", 0, "latency_s"), -1.0, "latency_s is -1.0"),
        (("links", 1, "uplink_Bps"), -5.0, "uplink_Bps is -5.0"),
        (("compute", "matrix_flops_per_s", "float32"), -1.0, "matrix_flops_per_s.float32 is -1.0"),
        (("dispatch_s", "matrix"), float("nan"), "not a complete JSON file"),
        (("num_devices",), 4, "runs on 8 ranks, but machine 'small' has 4 devices"),
    ],
)
@pytest.mark.parametrize("command", ["simulate", "whatif"])
def test_bad_machines_are_refused_before_simulating(
    files, command, where, value, message, tmp_path, capsys, monkeypatch
):
    plan, machine = files
    document = json.loads(Path(machine).read_text())
    at = document
    for key in where[:-1]:
        at = at[key]
    at[where[-1]] = value
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(document))
    monkeypatch.setattr("simulator.predict.run_program", lambda *_, **__: pytest.fail("simulated"))
    assert main([command, plan, "--machine", str(path)]) == 2
    found = capsys.readouterr()
    assert message in found.err and found.err.count("error:") == 1 and found.out == ""


def test_checkpoints_may_be_varied_with_what_else_is_said_about_them(files, capsys):
    plan, machine = files
    arguments = [
        "--checkpoint-every", "100", "1000", "--checkpoint-GBps", "2", "--device-mtbf-hours", "500",
        "--restart-s", "60",
    ]  # fmt: skip
    found = answer(["whatif", plan, "--machine", machine, *arguments], capsys)
    alone = [
        answer(["whatif", plan, "--machine", machine, "--checkpoint-every", every, *arguments[3:]], capsys)
        for every in ("100", "1000")
    ]
    assert [each["goodput"] for each in found["changed"]] == [each["changed"][0]["goodput"] for each in alone]
    for each in found["changed"]:
        assert "2 GB/s a rank" in each["what_if"] and "restart 60 s" in each["what_if"]


def test_a_report_of_a_what_if(files, capsys, tmp_path):
    plan, machine = files
    path = tmp_path / "what_if.html"
    arguments = ["--slow", "stage1=1.5", "--sensitivity", "--report", str(path)]
    found = answer(["whatif", plan, "--machine", machine, *arguments], capsys)
    page = path.read_text()
    assert 'id="what-if"' in page and "What the step time of digits depends on" in page
    assert f"{100 * found['changed'][0]['change']:+.1f} %" in page
    assert "Peak memory of the fullest rank" in page and "show: ranks 4-7 x1.5 slower" in page
    again = tmp_path / "plain.html"
    assert main(["whatif", plan, "--machine", machine, "--bandwidth", "0.5", "2", "--report", str(again)]) == 0
    assert "show: bandwidth x0.5." in again.read_text()


def test_a_run_is_laid_beside_its_prediction(files, capsys, tmp_path):
    plan, machine = files
    run = measured(4)
    single = write_trace(tmp_path / "run.json.gz", [predicted(3), run], program=small_program())
    write_rank_traces(tmp_path / "ranks", run)
    for given in (single, tmp_path / "ranks"):
        found = answer(["simulate", plan, "--machine", machine, "--measured", str(given)], capsys)
        assert found["measured_step_s"] == pytest.approx(run.step_interval_s, rel=1e-12)
        assert main(["simulate", plan, "--machine", machine, "--measured", str(given)]) == 0
        shown = capsys.readouterr().out
        assert "Where the last step goes (measured)" in shown and "Time per call, rank and step" in shown
    only = write_trace(tmp_path / "predicted.json.gz", [predicted(3)])
    assert main(["simulate", plan, "--machine", machine, "--measured", str(only)]) == 2
    assert "predictions only" in capsys.readouterr().err
    assert main(["simulate", plan, "--machine", machine, "--measured", str(tmp_path / "none.json.gz")]) == 2
    assert "cannot read the trace file" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ jobs beside


@pytest.fixture(scope="module")
def shared_links(tmp_path_factory):
    """Four nodes of four devices, whose uplink is about as wide as one link."""
    folder = tmp_path_factory.mktemp("shared")
    machine = small_machine(16, uplink_Bps=11e9, latency_s=1e-7)
    return str(save_plan(small_plan(), folder / "plan.json")), str(machine.save(folder / "machine.json"))


def test_a_job_beside_slows_what_shares_the_uplink_with_it(shared_links, capsys):
    plan, machine = shared_links
    apart = ["whatif", plan, "--machine", machine, "--on", "0-1,4-5,8-9,12-13"]
    apart += ["--beside", f"{plan}=2-3,6-7,10-11,14-15"]
    within = ["whatif", plan, "--machine", machine, "--beside", f"{plan}=8-15"]
    (crossing,) = answer(apart, capsys)["changed"]
    (alone,) = answer(within, capsys)["changed"]
    assert crossing["what_if"] == f"beside {plan} on 2-3,6-7,10-11,14-15"
    assert crossing["change"] > 0.01 and alone["change"] == 0.0
    slower = answer([*within, "--slow", "2=1.5"], capsys)["changed"]
    assert [each["what_if"].partition(" ")[0] for each in slower] == ["rank", "beside", "rank"]
    assert slower[2]["what_if"].startswith("rank 2 x1.5 slower, beside") and slower[2]["change"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--beside", "other.json"], "write --beside other.json=4-7"),
        (["--beside", "{plan}=x"], "cannot read --beside"),
        (["--beside", "{plan}=0-7"], "device 0 belongs to job 0 and to job 1"),
        (["--beside", "{plan}=8-9"], "needs as many distinct devices"),
        (["--on", "0-6"], "needs as many distinct devices"),
        (["--on", "12-19"], "job 0 has device 16"),
    ],
)
def test_jobs_that_do_not_fit_are_refused(shared_links, arguments, message, capsys):
    plan, machine = shared_links
    arguments = [each.replace("{plan}", plan) for each in arguments]
    assert main(["whatif", plan, "--machine", machine, *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--trace", "--report", "--rank-traces"])
def test_files_that_cannot_be_written_are_refused_before_anything_is_simulated(files, option, tmp_path, capsys):
    plan, machine = files
    taken = tmp_path / "taken"
    taken.write_text("")
    wrong = {"--rank-traces": taken, "--trace": taken / "file.json", "--report": taken / "file.html"}[option]
    good = ["--trace", str(tmp_path / "good.json.gz")] if option != "--trace" else []
    assert main(["simulate", plan, "--machine", machine, *good, option, str(wrong)]) == 2
    said = capsys.readouterr()
    assert "its folder is a file; name another file" in said.err and said.out == ""
    assert list(tmp_path.iterdir()) == [taken]


def test_a_device_that_is_full_is_named(files, capsys):
    plan, machine = files
    assert main(["whatif", plan, "--machine", machine, "--picture", "/dev/full"]) == 2
    assert "/dev/full: No space left on device" in capsys.readouterr().err
