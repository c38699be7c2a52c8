"""One value for degrees: one sentence for a mistake at every door, and what is proven is what is saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from costmodels import Machine
from interop.megatron import megatron_flags
from interop.plan_file import read_plan
from interop.statement import read_statement, write_statement
from interop.torchtitan import torchtitan_toml
from plans.degrees import DEGREES, Degrees, check, describe, even_layers
from plans.degrees.file import degrees_to_json, values_from_json
from plans.degrees.groups import rank_groups, stage_ranks
from plans.degrees.plan import plan_of
from plans.errors import TwofoldError
from plans.model.transformer import TransformerConfig, sizes_of, transformer, transformer_config
from plans.plan import Plan, load_plan
from search import uniform_plan
from search.devices import Pins, Problem, solve
from simulator.forecast import forecast, forecast_grid
from twofold.cli import main

MACHINE = Machine.load("h100-sxm-x8")
LLAMA = transformer_config("llama-3-8b", num_layers=4, seq=1024)
MIXTURE = transformer_config("mixtral-8x7b", num_layers=2, seq=1024)
BATCH = 24

MISTAKES: dict[str, tuple[TransformerConfig, dict[str, Any], str]] = {
    "heads": (LLAMA, {"tp": 3}, "32 query heads cannot be split over tp 3: 32 % 3 != 0; the next valid tp is 4"),
    "batch": (LLAMA, {"dp": 5}, "= 5: 24 % 5 != 0; the next valid batch is 25"),
    "micro-batch": (LLAMA, {"dp": 2, "micro_batch": 5}, "= 10: 24 % 10 != 0; the next valid batch is 30"),
    "no experts": (LLAMA, {"dp": 2, "ep": 2}, "has no experts to split over ep 2"),
    "parts of dp": (LLAMA, {"dp": 4, "ep": 3}, "4 % 3 != 0, and experts are split over data-parallel ranks; the next"),
    "experts": (MIXTURE, {"dp": 6, "ep": 6}, "8 experts cannot be split over ep 6: 8 % 6 != 0; the next valid ep"),
    "samples of experts": (MIXTURE, {"cp": 2}, "experts need complete samples, but cp 2 splits them"),
    "sequence": (LLAMA, {"cp": 3}, "1024 tokens per sample cannot be split over cp 3: 1024 % 3 != 0; the next"),
    "devices": (LLAMA, {"dp": 2, "tp": 8}, "dp(2) * tp(8) = 16 ranks; machine 'h100-sxm-x8' has 8 devices"),
    "no count": (LLAMA, {"tp": 0}, "tp must be a whole number of at least 1, not 0"),
    "schedule": (LLAMA, {"schedule": "1f2b"}, "unknown schedule '1f2b'"),
    "chunks": (LLAMA, {"schedule": "1f1b", "virtual": 2, "pp": 2}, "cannot take virtual=2; these can: dualpipe_v"),
    "micro-batches": (
        LLAMA, {"schedule": "dualpipe_v", "virtual": 2, "pp": 2, "dp": 1, "micro_batch": 8},
        "dualpipe_v on 2 ranks has 4 stages and needs as many micro-batches, not 3",
    ),
    "recompute": (LLAMA, {"recompute": "some"}, "recompute must be one of none, memory_bound, selective"),
    "recompute layers": (LLAMA, {"recompute": "none", "recompute_layers": 2}, "set recompute, for example to full"),
    "level": (LLAMA, {"zero": 4}, "zero must be 0, 1, 2 or 3, not 4"),
    "order": (LLAMA, {"order": ("tp", "pp")}, "must list tp, cp, dp, pp once each"),
    "sum of layers": (LLAMA, {"pp": 2, "schedule": "1f1b", "layers": (2, 1)}, "add up to 3; llama-3-8b has 4 blocks"),
    "counts of layers": (
        LLAMA, {"pp": 2, "schedule": "1f1b", "layers": (2, 1, 1)}, "pp 2 with 1 chunk each makes 2 chunks",
    ),
    "an empty chunk": (
        LLAMA, {"pp": 4, "schedule": "1f1b", "layers": (4, 0, 0, 0)},
        "layers (4, 0, 0, 0) leaves nothing for chunk 1: only the first chunk, which has the embedding, and the last",
    ),
}  # fmt: skip


def as_flags(values: dict[str, Any], names: dict[str, str]) -> list[str]:
    flags: list[str] = []
    for name, value in values.items():
        flags += [f"--{names[name].replace('_', '-')}", *map(str, value if isinstance(value, tuple) else [value])]
    return flags


def sentences(config: TransformerConfig, values: dict[str, Any], tmp_path: Path, capsys: Any) -> dict[str, str]:
    """What every door says of degrees that cannot be."""

    def made() -> Degrees:
        return Degrees.of(values, global_batch=BATCH)

    def of_uniform() -> Plan:
        given = {"layers_per_stage" if name == "layers" else name: value for name, value in values.items()}
        return uniform_plan(transformer(config, batch_size=BATCH), MACHINE, **given)

    def of_file(use: Callable[[Path], object]) -> object:
        file = write_statement(tmp_path / "a.degrees.json", config, Degrees(), stack="twofold")
        found = json.loads(file.read_text())
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        found |= {"global_batch": BATCH, "degrees": found["degrees"] | plain}
        file.write_text(json.dumps(found))
        try:
            return use(file)
        except TwofoldError as error:
            raise TwofoldError(str(error).removeprefix(f"{file}: ")) from None

    doors: dict[str, Callable[[], object]] = {
        "forecast": lambda: forecast(config, made(), MACHINE),
        "forecast_grid": lambda: forecast_grid(config, [made()], MACHINE),
        "uniform_plan": of_uniform,
        "file": lambda: of_file(lambda file: forecast(config, read_statement(file).degrees(), MACHINE)),
        "plan of a file": lambda: of_file(lambda file: read_plan(file, MACHINE)),
        "pins": lambda: solve(
            Problem(config=config, machine=MACHINE, num_devices=8, global_batch=BATCH, pins=Pins(**values))
        ),
    }  # fmt: skip
    told = {}
    for name, door in doors.items():
        with pytest.raises(TwofoldError) as caught:
            door()
        told[name] = str(caught.value)
    shape = ["--layers", str(config.num_layers), "--seq", str(config.seq), "--global-batch", str(BATCH)]
    model = ["mixtral-8x7b" if config is MIXTURE else "llama-3-8b", "--machine", MACHINE.name]
    for command, names in (
        (["predict", *model], {name: degree.flag for name, degree in DEGREES.items()}),
        (["plan", *model, "--devices", "8", "--out", str(tmp_path / "p.json")],
         {name: degree.flag for name, degree in DEGREES.items()}),
    ):  # fmt: skip
        capsys.readouterr()
        assert main([*command, *shape, *as_flags(values, names)]) == 2
        said = capsys.readouterr().err.strip().removeprefix("error: ")
        if said.startswith("--"):  # the limit of an option itself, checked before the others
            said = said.removeprefix("--").replace("must be at least", "must be a whole number of at least")
        told[command[0]] = said
    return told


@pytest.mark.parametrize("name", MISTAKES)
def test_one_mistake_has_one_sentence_at_every_door(name: str, tmp_path: Path, capsys: Any) -> None:
    config, values, sentence = MISTAKES[name]
    told = sentences(config, values, tmp_path, capsys)
    assert len(told) == 8 and set(told.values()) == {told["forecast"]}, told
    assert sentence in told["forecast"]


def test_exports_refuse_degrees_with_the_same_message() -> None:
    config = transformer_config("llama-3-8b", num_layers=4)
    wrong = Degrees(tp=3, sequence_parallel=True)
    with pytest.raises(TwofoldError) as expected:
        check(wrong, sizes_of(config))
    for write in (megatron_flags, torchtitan_toml):
        with pytest.raises(TwofoldError) as caught:
            write(config, wrong)
        assert str(caught.value) == str(expected.value)


def blocks_per_stage(plan: Plan) -> tuple[int, ...]:
    return tuple(
        len({name.split(".")[1] for name in stage.operators if name.startswith("layers.")}) for stage in plan.stages
    )


@pytest.mark.parametrize("layers", [None, (2, 2, 1, 1), (1, 2, 2, 1), (3, 1, 2, 0)])
def test_the_proven_plan_is_the_saved_plan(layers: tuple[int, ...] | None, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    pinned = [] if layers is None else ["--stage-layers", *map(str, layers)]
    assert main([
        "plan", "llama-3-8b", "--layers", "6", "--machine", "h200-x8", "--devices", "4", "--global-batch", "8", "--pp",
        "4", "--schedule", "1f1b", "--micro-batch", "1", "--recompute", "none", "--out", str(out), *pinned,
    ]) == 0  # fmt: skip
    saved = read_statement(tmp_path / "plan.degrees.json").degrees()
    assert saved.layers is not None and layers in (None, saved.layers)
    assert blocks_per_stage(load_plan(out)) == saved.layers


def test_a_searched_configuration_always_states_its_layers() -> None:
    config = transformer_config("gpt2", tied=False, num_layers=6, seq=128)
    answer = solve(
        Problem(
            config=config,
            machine=MACHINE,
            num_devices=8,
            global_batch=8,
            pins=Pins(pp=4, recompute="none", micro_batch=1),
        ),
        keep=5,
    )
    for each in answer.plans:
        assert each.degrees.layers is not None
        plan = plan_of(each.degrees, transformer(config, batch_size=8))
        assert blocks_per_stage(plan) == each.degrees.layers


def test_absent_layers_have_one_reading() -> None:
    """A plan of degrees that do not state layers is the plan of those that state them evenly spread."""
    config = transformer_config("llama-3-8b", num_layers=6)
    graph = transformer(config, batch_size=4)
    degrees = Degrees(pp=4, global_batch=4)
    stated = degrees.spelled_out(6)
    assert stated.layers == even_layers(6, 4) == (1, 2, 2, 1)
    assert plan_of(degrees, graph) == plan_of(stated, graph)
    assert forecast(config, degrees, MACHINE).step_s == forecast(config, stated, MACHINE).step_s


EVERYTHING = Degrees(
    dp=4, tp=2, pp=2, cp=2, micro_batch=2, global_batch=64, schedule="interleaved_1f1b", virtual=2, recompute="full",
    recompute_layers=1, sequence_parallel=True, layers=(1, 2, 2, 1), order=("tp", "cp", "pp", "dp"),
    interleave=2, overlap_pairs=True,
)  # fmt: skip


def test_json_holds_every_degree() -> None:
    """Everything but what is seldom stated together differs from its default, and comes back."""
    plain = degrees_to_json(EVERYTHING)
    assert plain.keys() == DEGREES.keys()
    assert Degrees.of(values_from_json(json.loads(json.dumps(plain)), "a.json"), global_batch=64) == EVERYTHING
    with pytest.raises(TwofoldError, match=r"degrees\.dq is not a degree"):
        values_from_json({"dq": 2}, "a.json")


def test_words_name_every_degree_that_is_not_usual() -> None:
    for name, degree in DEGREES.items():
        if name in ("ep", "virtual", "recompute_layers", "order"):
            continue  # told with others
        changed: Any = {
            "schedule": "gpipe", "recompute": "full", "zero": 1, "sequence_parallel": True, "layers": (3, 1),
            "overlap_pairs": True, "receives": "needed",
        }.get(name, 2)  # fmt: skip
        usual: dict[str, Any] = {"layers": {"pp": 2}, "interleave": {"micro_batch": 2}}.get(name, {})
        batch = 2 if name in ("dp", "micro_batch", "interleave") else 1
        given = usual | {name: changed}
        assert describe(Degrees.of(given, global_batch=batch)) != describe(Degrees.of(usual, global_batch=batch)), (
            degree
        )


def test_groups_cover_a_stage() -> None:
    """Every rank of a stage is in one group of each kind, and the groups of all axes together are the stage."""
    degrees = Degrees(dp=4, ep=2, tp=4, pp=2, global_batch=4, order=("tp", "pp", "cp", "dp"))
    groups, stage = rank_groups(degrees, 2), stage_ranks(degrees, 1)
    (ep,), (copies,), (kv,), (served,) = (groups[name] for name in ("ep", "copies", "tp_kv", "tp_q"))
    offsets = {0}
    for axis in (copies, ep, kv, served):
        offsets = {offset + step * axis.stride for offset in offsets for step in range(axis.size)}
    assert sorted(stage[0] + offset for offset in offsets) == sorted(stage)
    assert [axis.size for axis in groups["dp"]] == [4, 1] and groups["tp_kv+tp_q"] == groups["tp"]


def test_buckets_are_a_degree_everywhere(tmp_path: Path, capsys: Any) -> None:
    config = transformer_config("llama-3-8b", num_layers=2, seq=1024)
    values = {"dp": 8, "zero": 1, "bucket_bytes": 2**20}
    small = Degrees.of(values, global_batch=8)
    usual = Degrees.of({"dp": 8, "zero": 1}, global_batch=8)
    assert forecast(config, small, MACHINE).step_s != forecast(config, usual, MACHINE).step_s
    assert plan_of(small, transformer(config, batch_size=8)).optimizer.bucket_bytes == 2**20
    out = tmp_path / "plan.json"
    asked = ["plan", "llama-3-8b", "--layers", "2", "--seq", "1024", "--machine", MACHINE.name, "--global-batch", "8"]
    assert main([*asked, *as_flags(values, {name: name for name in values}), "--out", str(out)]) == 0
    assert "bucket bytes 1048576" in capsys.readouterr().out
    assert load_plan(out).optimizer.bucket_bytes == 2**20
    assert read_statement(tmp_path / "plan.degrees.json").degrees().optimizer.bucket_bytes == 2**20
    assert main([*asked, "--bucket-bytes", "-1", "--out", str(out)]) == 2
    assert "bucket_bytes must be a whole number of bytes (0: none), not -1" in capsys.readouterr().err
    with pytest.raises(TwofoldError, match="Megatron-LM cannot state bucket bytes 1048576; plan with --bucket-bytes"):
        megatron_flags(config, small)


def test_key_value_heads_that_tp_cannot_split_name_the_next_tp():
    model = sizes_of(replace(LLAMA, num_heads=12, num_kv_heads=4, head_dim=128, vocab=12_000))
    with pytest.raises(TwofoldError, match=r"4 heads of keys and values and tp 6: .*; the next valid tp is 8$"):
        check(Degrees(tp=6, global_batch=1), model)
