"""A configuration that is stated somewhere, forecast under another batch, sequence, model or machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plans.errors import TwofoldError

if TYPE_CHECKING:
    from twofold.console import Console

__all__ = ["recost"]


def recost(
    path: str,
    machine: str,
    *,
    model: str | None,
    global_batch: int | None,
    seq: int | None,
    stack: str | None,
    say: Console,
) -> tuple[dict[str, Any], bool]:
    """Read, forecast, print; returns the JSON object and whether it fits the machine's memory."""
    from costmodels import Machine
    from interop.statement import read_statement
    from plans.model.transformer import transformer_config
    from search.devices import Candidate, describe
    from search.devices.result_json import candidate_json
    from simulator.forecast import forecast, stack_named

    beside = Path(f"{path.removesuffix('.json')}.degrees.json")
    statement = read_statement(beside if path.endswith(".json") and beside.is_file() else path)
    if model is not None:
        named = transformer_config(model, seq=statement.seq if seq is None else seq)
        config = statement.model(named)
        if config.num_layers != named.num_layers:
            say.say(f"{config.num_layers} layers, as {path} states, instead of the {named.num_layers} of {model}")
    elif statement.config is not None:
        config = statement.config if seq is None else replace(statement.config, seq=seq)
    else:
        raise TwofoldError(f"{path} does not say which model it is for; add --model, such as --model llama-3-8b")
    half = config.dtype in ("bfloat16", "float16")
    degrees = statement.degrees(global_batch, half=half, num_layers=config.num_layers, seq=config.seq)
    for each in statement.assumed:
        say.say(f"assumed: {each}")
    if statement.unread:
        say.say(f"not taken into account: {', '.join(statement.unread)}")
    target = Machine.load(machine)
    if degrees.num_ranks > target.num_devices:
        raise TwofoldError(
            f"{path} is for {degrees.num_ranks} ranks, machine {target.name!r} has {target.num_devices} devices; name "
            "a larger one with --machine"
        )
    runs = stack_named(stack or statement.stack or "twofold")
    found = forecast(config, degrees, target, stack=runs)
    fits = found.peak_bytes <= target.room_bytes
    tokens = degrees.global_batch * config.seq / found.step_s / degrees.num_ranks
    say.say(
        f"{config.name} on {degrees.num_ranks} devices of {target.name}, as {runs.name} runs it: {describe(degrees)}"
    )
    say.say(
        f"step {found.step_s:.4g} s (90 %: {found.low_s:.4g} to {found.high_s:.4g}), {tokens:,.0f} tokens/s "
        f"per device, idle {found.bubble_fraction:.1%}, exposed communication {found.exposed_comm_s:.3g} s"
    )
    say.say(
        f"peak memory {found.peak_bytes / 2**30:.2f} GiB of {target.room_bytes / 2**30:.2f}"
        + ("" if fits else ": it does not fit")
    )
    told = candidate_json(Candidate(degrees=degrees, forecast=found))
    more = {"model": config.name, "machine": target.name, "stack": runs.name, "tokens_per_s_per_device": tokens}
    return {**told, **more, "fits": fits}, True
