"""Settings that Megatron-LM or torchtitan would refuse when it starts are refused, with a way out that works."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as pipelining

from interop.megatron import megatron_flags
from interop.software import software_named
from interop.statement import read_statement
from interop.torchtitan import torchtitan_toml
from plans.degrees import Degrees
from plans.errors import TwofoldError
from plans.model.transformer import transformer_config
from plans.optimizer import Optimizer

CONFIG = transformer_config("llama-3-8b")
THEIRS = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved_1f1b": "Interleaved1F1B", "looped_bfs": "LoopedBFS",
    "interleaved_zb": "InterleavedZeroBubble", "zb_v": "ZBVZeroBubble", "dualpipe_v": "DualPipeV",
}  # fmt: skip
PINS = {"--micro-batch": "micro_batch", "--global-batch": "global_batch", "--schedule": "schedule", "--cp": "cp"}


def megatron_launch(config: Any, stated: Degrees) -> str:
    script = software_named("megatron").launch(config, stated, 8)
    assert script is not None
    return script


def degrees(*, zero: int = 0, **values: Any) -> Degrees:
    return Degrees(**values, optimizer=Optimizer(kind="adamw", settings={"lr": 1e-4}, parallel_level=zero))


def torch_takes(schedule: str, pp: int, virtual: int, num: int) -> bool:
    """Asks the class that torchtitan would build, which looks at no more of its stages than this."""
    stages = [
        SimpleNamespace(stage_index=chunk * pp, num_stages=pp * virtual, group_rank=0, group_size=pp, submod=None,
                        is_last=False, has_backward=True)
        for chunk in range(virtual)
    ]  # fmt: skip
    try:
        pipelining.get_schedule_class(THEIRS[schedule])(stages[0] if virtual == 1 else stages, num)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("schedule", THEIRS)
@pytest.mark.parametrize("pp", [2, 4])
def test_torchtitan_is_given_what_torch_takes_and_nothing_else(
    schedule: str, pp: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, logger=pipelining.__name__)
    virtual = 1 if schedule in ("1f1b", "gpipe") else 2
    written = []
    for num in range(1, 3 * pp + 2):
        try:
            stated = degrees(dp=2, pp=pp, global_batch=2 * num, schedule=schedule, virtual=virtual, zero=2)
            torchtitan_toml(CONFIG, stated)
        except TwofoldError:
            assert not torch_takes(schedule, pp, virtual, num)
        else:
            assert torch_takes(schedule, pp, virtual, num)
            written.append(num)
    assert 2 * pp in written


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_megatron_is_given_chunks_only_where_its_ranks_divide_the_micro_batches(pp: int) -> None:
    """Its groups of micro-batches are of pp; a last group of fewer it refuses, and fewer than one group, too."""
    for num in range(1, 3 * pp + 1):
        for virtual in (1, 2):
            schedule = "interleaved_1f1b" if virtual > 1 else "1f1b"
            try:
                stated = degrees(dp=2, pp=pp, global_batch=2 * num, schedule=schedule, virtual=virtual)
                megatron_flags(transformer_config("llama-3-8b", num_layers=48), stated)
                written = True
            except TwofoldError:
                written = False
            assert written is (virtual == 1 or num % pp == 0)


@pytest.mark.parametrize(
    ("write", "stated", "message"),
    [
        (
            torchtitan_toml,
            degrees(dp=2, pp=4, global_batch=16, micro_batch=4, zero=2),
            "as many micro-batches as stages",
        ),
        (torchtitan_toml, degrees(dp=2, pp=4, global_batch=4, zero=2), "2 are fewer than 4"),
        (
            megatron_flags,
            degrees(dp=2, pp=4, global_batch=16, micro_batch=4, schedule="interleaved_1f1b", virtual=2),
            "not 2 on 4 ranks",
        ),
        (
            megatron_flags,
            degrees(pp=4, global_batch=6, schedule="interleaved_1f1b", virtual=2),
            "not 6 on 4 ranks",
        ),
        (megatron_flags, degrees(global_batch=2, schedule="interleaved_1f1b", virtual=2), "only with pipeline ranks"),
        (torchtitan_toml, degrees(global_batch=2, schedule="gpipe"), "not 'gpipe' on one rank"),
    ],
)
def test_every_way_out_that_is_named_works(write: Any, stated: Degrees, message: str) -> None:
    with pytest.raises(TwofoldError, match=message) as refused:
        write(CONFIG, stated)
    ways = str(refused.value).partition("plan with ")[2].split(", or ")
    values = {name: getattr(stated, name) for name in ("dp", "pp", "cp", "global_batch", "micro_batch", "schedule")}
    for way in ways:
        pins = {PINS[flag]: value for flag, value in re.findall(r"(--[a-z-]+) (\w+)", way)}
        mended = values | {name: int(value) if value.isdigit() else value for name, value in pins.items()}
        one = mended["schedule"] in ("1f1b", "gpipe")
        write(CONFIG, degrees(**mended, virtual=1 if one else stated.virtual, zero=stated.optimizer.parallel_level))


@pytest.mark.parametrize(("write", "zero"), [(megatron_flags, 0), (torchtitan_toml, 3)])
def test_a_sequence_that_context_parallelism_cannot_split_is_refused(write: Any, zero: int) -> None:
    """Both give every rank two parts, one from either end."""
    stated = degrees(cp=2, global_batch=1, zero=zero)
    with pytest.raises(TwofoldError, match=r"4 parts|2 x 2 parts") as refused:
        write(transformer_config("llama-3-8b", seq=2050), stated)
    found = re.search(r"--seq (\d+)", str(refused.value))
    assert found is not None
    write(transformer_config("llama-3-8b", seq=int(found[1])), stated)


def test_a_batch_under_which_a_program_would_not_start_is_refused_when_costed_again(tmp_path: Path) -> None:
    file = tmp_path / "flags.sh"
    file.write_text(megatron_launch(CONFIG, degrees(pp=2, global_batch=4, schedule="interleaved_1f1b", virtual=2)))
    assert read_statement(file).degrees(8).num_micro_batches == 8
    with pytest.raises(TwofoldError, match="Megatron-LM interleaves"):
        read_statement(file).degrees(3)
    file = tmp_path / "train.toml"
    file.write_text(torchtitan_toml(CONFIG, degrees(pp=4, global_batch=4)))
    with pytest.raises(TwofoldError, match="torchtitan's 1F1B"):
        read_statement(file).degrees(3, num_layers=32)


def test_a_sequence_is_looked_at_when_costed_again(tmp_path: Path) -> None:
    file = tmp_path / "flags.sh"
    file.write_text(megatron_launch(CONFIG, degrees(cp=2, global_batch=1)))
    assert read_statement(file).degrees().cp == 2
    with pytest.raises(TwofoldError, match="2050 tokens"):
        read_statement(file).degrees(seq=2050)


def test_megatron_is_given_no_more_tensor_parallel_ranks_than_share_heads_of_keys() -> None:
    with pytest.raises(TwofoldError, match="tp 16 does not: plan with --tp 8"):
        megatron_flags(CONFIG, degrees(tp=16, global_batch=1))
    assert megatron_flags(CONFIG, degrees(tp=8, global_batch=1))


def test_torchtitan_refuses_odd_sequences_on_a_single_rank_even() -> None:
    """Its divisor is tp x 2 cp, whatever tp and cp are (seq_len_divisor in distributed/parallel_dims.py)."""
    with pytest.raises(TwofoldError, match="--seq 2050"):
        torchtitan_toml(transformer_config("llama-3-8b", seq=2049), degrees(global_batch=1))
