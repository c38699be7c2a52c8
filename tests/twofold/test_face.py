"""The public face: quick import, wrappers that act, errors that name the input."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import twofold as tf
from executor.networks import DenseNetwork
from plans.errors import TwofoldError
from plans.units import parse_bytes
from twofold.mindspore.context import get_auto_parallel_context, reset_auto_parallel_context
from twofold.mindspore.training import LossMonitor, RunContext
from twofold.mindspore.wrappers import unwrap


@pytest.fixture(autouse=True)
def fresh_context():
    reset_auto_parallel_context()
    yield
    reset_auto_parallel_context()


@pytest.fixture
def cell() -> nn.Module:
    with tf.no_init_parameters():
        return tf.WithLossCell(DenseNetwork(), tf.MAELoss())


def test_every_public_name_is_there() -> None:
    for name in tf.__all__:
        assert getattr(tf, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = tf.no_such_name


def test_works_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import twofold as tf\n"
        "from plans.model.mlp import mlp_graph\n"
        "machine = tf.Machine.load('h200-x8')\n"
        "plan = tf.search(mlp_graph([16, 8], 16), machine, num_devices=2).best\n"
        "assert tf.simulate(plan, machine).step_s > 0\n"
        "try:\n    tf.capture\nexcept ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "twofold.capture needs torch" in done.stdout


def test_a_file_in_the_place_of_a_package_is_noticed(tmp_path) -> None:
    (tmp_path / "search.py").write_text("")
    (tmp_path / "script.py").write_text("import twofold")
    done = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "twofold's package 'search' is" in done.stderr.splitlines()[-1]
    assert str(tmp_path / "search.py") in done.stderr.splitlines()[-1] and "start Python with -P" in done.stderr
    assert subprocess.run([sys.executable, "-P", str(tmp_path / "script.py")], check=False).returncode == 0


def test_results_show_themselves_in_a_line_a_picture_and_a_frame() -> None:
    machine = tf.Machine.load("h200-x8")
    plan = tf.uniform_plan(tf.transformer("llama-3-8b", batch_size=8, num_layers=1, seq=512), machine, dp=2, tp=4)
    timeline, forecast = tf.simulate(plan, machine), tf.predict("llama-3-8b", "h200-x8", tp=8, global_batch=8)
    graph = tf.transformer("llama-3-8b", batch_size=8, num_layers=1)
    found = tf.search(graph, machine, degrees={"tp": 8, "micro_batch": 1})
    assert (repr(machine), repr(graph).startswith("<Graph ")) == ("<Machine h200-x8: 8 cuda devices>", True)
    for result in (plan, timeline, forecast, found):
        line = repr(result)
        assert (
            line.startswith(f"<{type(result).__name__}") and line.endswith(">") and len(line) < 120 and "\n" not in line
        )
        page = result._repr_html_()
        assert ("data:image/svg" in page) == (result in (timeline, forecast)) and ("<table" in page) == (
            result in (plan, found)
        )
    assert plan.to_pandas().shape[0] == len(plan.graph.operators)
    spans = timeline.to_pandas()
    assert len(spans) == len(timeline.rank) and spans["end_s"].max() == pytest.approx(timeline.end_ps.max() / 1e12)
    assert forecast.to_pandas().iloc[0]["step_s"] == forecast.step_s
    assert found.to_pandas()["step_s"][0] == found.best.prediction.step_s


def test_predict_is_the_forecast_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    from twofold.cli import main

    assert main(["predict", "llama-3-8b", "--machine", "h200-x8", "--tp", "8", "--bandwidth", "0.5",
                 "--global-batch", "8", "--json"]) == 0  # fmt: skip
    said = json.loads(capsys.readouterr().out)
    found = tf.predict("llama-3-8b", "h200-x8", tp=8, bandwidth=0.5, global_batch=8)
    assert (said["step_s"], said["peak_bytes"]) == (found.step_s, found.peak_bytes)
    with pytest.raises(TwofoldError, match="spares is a setting of studies"):
        tf.predict("llama-3-8b", "h200-x8", spares=2)


def test_wrappers_carry_their_settings(cell: nn.Module) -> None:
    tf.set_memory(max_size="25GB")
    net = tf.AutoParallel(tf.Pipeline(cell, 4, stage_config={"_backbone.layer1": 0, "_backbone.layer2": 1}))
    net.hsdp(threshold=8)
    net.full_batch = True
    net.pipeline(stages=2, output_broadcast=True, scheduler="gpipe")
    wrapped = unwrap(net)
    assert wrapped.module is cell and wrapped.num_micro_batches == 4
    assert wrapped.stage_config == {"_backbone.layer1": 0, "_backbone.layer2": 1}
    settings = wrapped.settings
    assert (settings.num_stages, settings.schedule, settings.output_broadcast) == (2, "gpipe", True)
    assert (settings.optimizer_level, settings.threshold_bytes, settings.full_batch) == (1, 8192, True)
    assert settings.memory_limit_bytes == 25 * 10**9


def test_the_older_form_is_equivalent(cell: nn.Module) -> None:
    tf.set_auto_parallel_context(parallel_mode=tf.ParallelMode.AUTO_PARALLEL, search_mode="recursive_programming")
    tf.set_auto_parallel_context(pipeline_stages=2, enable_parallel_optimizer=True)
    settings = unwrap(tf.PipelineCell(cell, 4)).settings
    assert (settings.num_stages, settings.optimizer_level) == (2, 1)
    assert get_auto_parallel_context() is settings


def test_optimizers_are_read(cell: nn.Module) -> None:
    def kind(optimizer: torch.optim.Optimizer) -> tuple[str, dict[str, float]]:
        model = tf.Model(tf.AutoParallel(cell), optimizer=optimizer)
        return model.optimizer.kind, model.optimizer.settings

    given = tf.Optimizer(gradient_dtype="float32", clip_norm=1.0, parallel_level=2)
    net = tf.AutoParallel(cell)
    net.hsdp(threshold=8, optimizer_level="level3")
    taken = tf.Model(net, optimizer=given).optimizer
    assert (taken.parallel_level, taken.threshold_bytes) == (3, 8192)  # the network says how it is sharded
    assert (taken.gradient_dtype, taken.clip_norm) == ("float32", 1.0)
    parameters = list(cell.parameters())
    assert kind(torch.optim.SGD(parameters, 0.1)) == ("sgd", {"lr": 0.1, "weight_decay": 0.0})
    assert kind(torch.optim.SGD(parameters, 0.1, momentum=0.9))[0] == "momentum"
    adamw = kind(torch.optim.AdamW(parameters, 0.1, betas=(0.8, 0.9), eps=1e-7, weight_decay=0.2))
    assert adamw == ("adamw", {"lr": 0.1, "weight_decay": 0.2, "beta1": 0.8, "beta2": 0.9, "eps": 1e-7})
    names = [name for name, _ in cell.named_parameters()]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.05, "weight_decay": 0.0}]
    read = tf.Model(tf.AutoParallel(cell), torch.optim.AdamW(groups, lr=0.2, weight_decay=0.3)).optimizer
    rest = {"lr": 0.2, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "lr_scale": 0.25}
    assert read.settings_of(names[0]) == read.settings and read.settings["weight_decay"] == 0.3
    assert all(read.settings_of(name) == rest for name in names[1:])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda cell: tf.AutoParallel(cell, parallel_mode="recursive"), "parallel_mode 'recursive' is not known"),
        (lambda cell: tf.Pipeline(cell, 0), "micro_size must be .* not 0"),
        (lambda cell: tf.Pipeline(cell, 4, {"_backbone.layer9": 0}), r"layer9'.*its submodules are.*_backbone.layer1"),
        (lambda cell: tf.AutoParallel(cell).pipeline(stages=2, scheduler="1f2b"), "scheduler '1f2b' is not known"),
        (lambda cell: tf.AutoParallel(cell).pipeline(stages=0), "stages=.* must be .* not 0"),
        (lambda cell: tf.AutoParallel(cell).hsdp(optimizer_level="level9"), "level9"),
        (lambda cell: tf.AutoParallel(cell).hsdp(shard_size=3), "shard_size=3"),
        (lambda cell: setattr(tf.AutoParallel(cell), "full_batch", "yes"), "full_batch must be True or False"),
        (lambda cell: tf.set_memory(max_size="25 apples"), "25 apples"),
        (lambda cell: tf.set_auto_parallel_context(search_mode="guessing"), "search_mode 'guessing' is not known"),
        (lambda cell: tf.Model(cell, optimizer=None), "not parallel"),
        (lambda cell: tf.Model(tf.AutoParallel(cell)), "needs an optimizer"),
        (lambda cell: tf.Model(tf.AutoParallel(cell), torch.optim.Adagrad(cell.parameters())), "Adagrad is not"),
        (
            lambda cell: tf.Model(tf.AutoParallel(cell), torch.optim.SGD(cell.parameters(), 0.1, 0.9, nesterov=True)),
            "nesterov=True",
        ),
        (
            lambda cell: tf.Model(tf.AutoParallel(cell), torch.optim.SGD(list(cell.parameters())[1:], 0.1)),
            "the optimizer does not have the parameter",
        ),
        (
            lambda cell: tf.Model(
                tf.AutoParallel(cell),
                torch.optim.SGD([{"params": [each], "momentum": 0.1 * number} for number, each in
                                 enumerate(cell.parameters())], 0.1),
            ),
            "parameter group 2 of the optimizer has momentum=0.1",
        ),
        (lambda cell: tf.Model(tf.AutoParallel(cell), tf.Optimizer()).train(1, [([0], [0])]), "inside launched ranks"),
        (lambda cell: tf.Model(tf.AutoParallel(cell), tf.Optimizer()).eval(iter([])), "such as a list .*iterator"),
        (lambda cell: LossMonitor(0), "per_print_times must be .* not 0"),
        (lambda cell: tf.run(None, steps=0), "steps must be .* not 0"),
    ],
)  # fmt: skip
def test_bad_input_is_named(cell: nn.Module, make, message: str) -> None:
    with pytest.raises(TwofoldError, match=message):
        make(cell)


def test_parse_bytes() -> None:
    assert parse_bytes("1.5 KB") == 1500 and parse_bytes("2MiB") == 2 * 2**20 and parse_bytes(7) == 7


def test_loss_monitor_prints_the_line_of_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    def told(step: int, *, sink: bool, last: bool = False, loss: float | None = 2.5) -> str:
        monitor(RunContext(epoch=1, step=step, loss=loss, is_last_step=last, sink_mode=sink))
        return capsys.readouterr().out

    monitor = LossMonitor(100)
    assert told(100, sink=True) == "epoch: 1 step: 100, loss is 2.5\n"
    assert told(99, sink=True) == "" and told(100, sink=False, loss=None) == ""
    monitor = LossMonitor()
    assert told(3, sink=False) != "" and told(3, sink=True) == "" and told(3, sink=True, last=True) != ""
