"""The commands that predict stated degrees: `twofold predict` and `twofold validate`."""

from __future__ import annotations

from typing import Any

from plans.errors import TwofoldError
from twofold.cli import run_command

__all__ = ["predict", "validate"]


def predict(
    model: str,
    machine: str,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    micro_batch: int = 1,
    global_batch: int | None = None,
    schedule: str = "1f1b",
    virtual: int = 1,
    recompute: str = "none",
    recompute_layers: int | None = None,
    zero: int = 0,
    sequence_parallel: bool = False,
    order: tuple[str, ...] = ("tp", "cp", "dp", "pp"),
    seq: int | None = None,
    layers: int | None = None,
    mixed_precision: bool = True,
    stack: str = "twofold",
    json: bool = False,
) -> int:
    """Predict step time and memory of a transformer in stated degrees, on any number of devices.

    Args:
        model: a name such as llama-3-8b, or a Hugging Face config.json.
        machine: a shipped machine such as h100-sxm-x1024, or a machine file.
        dp: data-parallel degree.
        tp: tensor-parallel degree.
        pp: pipeline-parallel degree.
        cp: context-parallel degree.
        ep: expert-parallel degree, a part of dp.
        micro_batch: sequences of a micro-batch on one data-parallel rank.
        global_batch: sequences of a step; one micro-batch per data-parallel and pipeline rank by default.
        schedule: of the pipeline.
        virtual: chunks per pipeline rank.
        recompute: none, selective, selective_op or full.
        recompute_layers: how many blocks of every chunk recompute, the first ones; all of them by default.
        zero: optimizer-parallel level, 0 to 3.
        sequence_parallel: split the sequence over tp between the tensor-parallel products.
        order: in which ranks count along the axes, the innermost first.
        seq: tokens of a sequence; the model's by default.
        layers: blocks; the model's by default.
        mixed_precision: float32 gradients, master weights and optimizer states beside half-precision weights.
        stack: the software that runs it: twofold, torch, torch-compile, torch-2024, torch-2024-compile, torchtitan,
            torchtitan-compile, torchtitan-async, megatron, megatron-2022 or zero-bubble.
        json: print one JSON object on stdout, progress on stderr.
    """
    from twofold.console import Console

    def work() -> tuple[Any, bool]:
        from costmodels import Machine
        from plans.degrees import Degrees
        from plans.model.transformer import transformer_config
        from plans.plan import Optimizer
        from simulator.forecast import forecast, stack_named

        config = transformer_config(model, seq=seq, num_layers=layers)
        wide = "float32" if mixed_precision and config.dtype in ("bfloat16", "float16") else None
        degrees = Degrees(
            dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, micro_batch=micro_batch,
            global_batch=dp * micro_batch * pp if global_batch is None else global_batch,
            schedule=schedule, virtual=virtual, recompute=recompute, recompute_layers=recompute_layers,
            sequence_parallel=sequence_parallel, order=order,
            optimizer=Optimizer(
                kind="adamw", settings={"lr": 1e-4}, parallel_level=zero, gradient_dtype=wide, master_dtype=wide
            ),
        )  # fmt: skip
        target = Machine.load(machine)
        found = forecast(config, degrees, target, stack=stack_named(stack))
        say = Console(json=json)
        tokens = degrees.global_batch * config.seq / found.step_s / degrees.num_ranks
        say.say(
            f"{config.name} on {degrees.num_ranks} devices of {target.name}: step {found.step_s:.4g} s "
            f"(90 %: {found.low_s:.4g} to {found.high_s:.4g}), {tokens:,.0f} tokens/s per device"
        )
        say.say(f"bubble {found.bubble_fraction:.1%}, exposed communication {found.exposed_comm_s:.4g} s")
        parts = ", ".join(f"{role} {size / 2**30:.2f}" for role, size in found.memory.items() if size)
        say.say(f"peak memory {found.peak_bytes / 2**30:.2f} GiB of {target.room_bytes / 2**30:.2f}: {parts}")
        if found.peak_bytes > target.room_bytes:
            say.say("it does not fit")
        return {
            "step_s": found.step_s,
            "step_low_s": found.low_s,
            "step_high_s": found.high_s,
            "peak_bytes": found.peak_bytes,
            "memory_bytes": dict(found.memory),
            "fits": found.peak_bytes <= target.room_bytes,
            "bubble_fraction": found.bubble_fraction,
            "exposed_comm_s": found.exposed_comm_s,
            "tokens_per_s_per_device": tokens,
            "num_ranks": degrees.num_ranks,
            "machine": target.name,
            "stack": stack,
        }, True

    return run_command(work, json)


def validate(table: str, /, stack: str | None = None, machine: str | None = None, json: bool = False) -> int:
    """Predict every row of a table of measurements and say how far off the predictions are.

    Args:
        table: CSV file with the columns source, model, layers, hidden, heads, kv_heads, ffn, vocab, seq, global_batch,
            micro_batch, tp, pp, dp, vpp, cp, ep, schedule, sequence_parallel, recompute, zero_level, gpu_type,
            gpu_count, interconnect, precision, compile, metric, value and so on, in the usual spellings. What a row
            does not state and has to be assumed stands beside its prediction (--json); rows that are not modelled are
            listed with the reason.
        stack: the software that ran all rows; found from each row by default.
        machine: the machine of all rows; found from each row by default.
        json: print one JSON object on stdout, progress on stderr.
    """
    from twofold.console import Console

    def work() -> tuple[Any, bool]:
        from collections import Counter

        from twofold.validation import validate as run

        found = run(table, stack=stack, machine=machine)
        if not found.rows:
            reasons = "; ".join(f"{reason} ({count})" for reason, count in Counter(
                skipped["reason"] for skipped in found.skipped).most_common(3))  # fmt: skip
            raise TwofoldError(f"no row of {table!r} can be predicted: {reasons}")
        say = Console(json=json)
        for score in found.sources:
            order = "" if score["pair_order"] is None else f", pair order {score['pair_order']:.0%}"
            say.say(
                f"{score['metric']}: {score['rows']} rows, mean error {score['mape']:.1%}, median "
                f"{score['median_ape']:.1%}, bias {score['bias']:+.1%}, {score['within_interval']:.0%} inside the "
                f"interval{order}  [{score['source'][:60]}]"
            )
        if large := [row["row"] for row in found.rows if not row["fits"]]:
            shown = ", ".join(map(str, large[:10])) + (", ..." if len(large) > 10 else "")
            say.say(f"{len(large)} rows are predicted to need more memory than their device has, yet they ran: {shown}")
        for reason, count in Counter(skipped["reason"] for skipped in found.skipped).most_common():
            say.say(f"skipped {count}: {reason}")
        return found.to_json(), True

    return run_command(work, json)
