"""Write and read a configuration as torchtitan's settings.

Settings as in torchtitan's job_config.py, stages as in its distributed/pipeline_parallel.py, both of late 2025. What
they cannot express, and what torchtitan refuses, raises an error here; nothing is approximated.
"""

from __future__ import annotations

import re
from typing import Any

from interop.startup import check_torchtitan
from interop.unstated import check_stated_by
from plans.degrees import ORDER, Degrees, check
from plans.errors import TwofoldError
from plans.model.transformer import TransformerConfig, sizes_of
from plans.reading import toml_of

__all__ = ["read_torchtitan", "stage_values", "torchtitan_toml"]

_SCHEDULES = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved_1f1b": "Interleaved1F1B", "looped_bfs": "LoopedBFS",
    "interleaved_zb": "InterleavedZeroBubble", "zb_v": "ZBVZeroBubble", "dualpipe_v": "DualPipeV",
}  # fmt: skip

_SINGLE = ("1f1b", "gpipe")
"""One stage per rank; all others have two or more."""

_READ = frozenset({
    "data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward",
    "tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree", "pipeline_parallel_schedule",
    "expert_parallel_degree", "expert_tensor_parallel_degree",
    "pipeline_parallel_microbatch_size", "pipeline_parallel_layers_per_stage",
    "pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers",
})  # fmt: skip

_ONLY_SO: dict[str, tuple[Any, ...]] = {
    "expert_parallel_comm_backend": ("standard",), "pipeline_parallel_split_points": ([], ""),
    "module_fqns_per_model_part": ([],), "pipeline_parallel_schedule_csv": ("",), "disable_loss_parallel": (False,),
    "enable_async_tensor_parallel": (False,), "enable_compiled_autograd": (False,),
    "context_parallel_rotate_method": ("allgather",), "context_parallel_load_balancer": ("headtail",),
    "pipeline_parallel_expert_parallel_overlap": (True, False),
}  # fmt: skip
"""What else [parallelism] may state, and the only values that degrees can express."""


def _stages(num_layers: int, count: int, first: int, last: int) -> tuple[int, ...] | None:
    """Blocks per stage; embedding and head count as `first` and `last` layers, and the first stages take the rest."""
    share, rest = divmod(num_layers + first + last, count)
    if count == 1:
        return (num_layers,)
    if share == 0 or max(first, last) > share:
        return None
    counts = [share + (stage < rest) for stage in range(count)]
    counts[0] -= first
    counts[-1] -= last
    return tuple(counts)


def _settings_of(counts: tuple[int, ...]) -> tuple[int, int] | None:
    """How many layers fewer the first and the last stage must hold to make these stages; None if nothing makes them."""
    most = range(max(counts) + 1)
    pairs = [
        (first, last) for first in most for last in most if _stages(sum(counts), len(counts), first, last) == counts
    ]
    return min(pairs, key=lambda pair: ((sum(counts) + sum(pair)) % len(counts) > 0, sum(pair), pair), default=None)


_STATED = frozenset({
    "dp", "tp", "pp", "cp", "ep", "micro_batch", "schedule", "virtual", "recompute", "recompute_layers", "zero",
    "sequence_parallel", "layers", "order",
})  # fmt: skip
"""Degrees that torchtitan has words for, or that are refused with a reason of their own."""


def torchtitan_toml(config: TransformerConfig, degrees: Degrees) -> str:
    """torchtitan's settings that state the layout, the batch and the recomputing.

    Raises:
        TwofoldError: what torchtitan has no setting for, or refuses.
    """
    check(degrees, sizes_of(config))
    check_stated_by("torchtitan", _STATED, degrees)
    check_torchtitan(degrees, config.seq)
    _check_expressible(degrees)
    level = degrees.optimizer.parallel_level
    lines = [
        f"# num_layers = {config.num_layers}, as twofold's reader needs it: the model's flavor states it to torchtitan",
        "[training]",
        f"seq_len = {config.seq}",
        f"local_batch_size = {degrees.global_batch // degrees.dp if degrees.pp > 1 else degrees.micro_batch}",
        f"global_batch_size = {degrees.global_batch}",
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {1 if level else degrees.dp}",
        f"data_parallel_shard_degree = {degrees.dp if level else 1}",
        *([f'fsdp_reshard_after_forward = "{"always" if level == 3 else "never"}"'] if level else []),
        f"tensor_parallel_degree = {degrees.tp}",
        f"context_parallel_degree = {degrees.cp}",
        f"pipeline_parallel_degree = {degrees.pp}",
    ]
    if config.experts is not None:
        lines += [
            "# torchtitan's experts drop no token; here they have places for "
            f"{config.experts.capacity_factor:g} times an even share",
            f"expert_parallel_degree = {degrees.ep}",
            f"expert_tensor_parallel_degree = {degrees.tp if degrees.ep > 1 else 1}",
        ]
    if degrees.pp > 1:
        lines += _pipeline_lines(degrees, degrees.layers_of(config.num_layers))
    mode = {"none": "none", "selective_op": "selective", "full": "full"}[degrees.recompute]
    lines += ["", "[activation_checkpoint]", f'mode = "{mode}"']
    if mode == "selective":
        lines.append('selective_ac_option = "op"')
    return "\n".join(lines) + "\n"


def _check_expressible(degrees: Degrees) -> None:
    """Refuse degrees that torchtitan has no setting for.

    Raises:
        TwofoldError: the first of them, with the flag of `twofold plan` that avoids it.
    """
    level, schedule = degrees.optimizer.parallel_level, degrees.schedule
    order, usual = ([axis for axis in axes if getattr(degrees, axis) > 1] for axes in (degrees.order, ORDER))
    refusals = (
        (
            level == 1 and degrees.dp * degrees.cp > 1,
            "cannot shard optimizer states alone (level 1); plan with --zero 0, 2 or 3",
        ),
        (
            level == 0 and degrees.cp > 1,
            "shards weights over context-parallel ranks; plan with --zero 2 or 3, or --cp 1",
        ),
        (
            level == 0 and degrees.dp > 1 and degrees.tp * degrees.pp > 1,
            "replicates weights (level 0) only without tensor and pipeline parallelism; plan with --zero 2 or 3",
        ),
        (
            degrees.tp > 1 and not degrees.sequence_parallel,
            "splits the sequence wherever it splits tensors; plan with --sequence-parallel True",
        ),
        (
            degrees.recompute == "selective",
            "recomputes by operator or all; plan with --recompute selective_op or full",
        ),
        (order != usual, f"cannot place ranks in the order {'-'.join(order)}; plan with --order {' '.join(ORDER)}"),
        (
            degrees.recompute_layers is not None,
            "recomputes in all blocks or in every k-th one; plan without --recompute-layers",
        ),
        (
            degrees.pp == 1 and schedule != "1f1b",
            f"has schedules of pipeline ranks only, not {schedule!r} on one rank; plan with --schedule 1f1b",
        ),
        (schedule not in _SCHEDULES, f"has no schedule {schedule!r}; plan with one of {', '.join(_SCHEDULES)}"),
        (
            degrees.ep > 1 and not level,
            "shares experts out among ranks that shard weights; plan with --zero 2 or 3, or --ep 1",
        ),
    )
    for is_refused, reason in refusals:
        if is_refused:
            raise TwofoldError(f"torchtitan {reason}")


def _pipeline_lines(degrees: Degrees, counts: tuple[int, ...]) -> list[str]:
    fewer = _settings_of(counts)
    if fewer is None:
        raise TwofoldError(
            f"torchtitan's stages are equal but for fewer layers on the first and the last, not {list(counts)}; pin "
            "others with --stage-layers"
        )
    effective = sum(counts) + sum(fewer)
    each = -(-effective // len(counts))
    lines = [
        f'pipeline_parallel_schedule = "{_SCHEDULES[degrees.schedule]}"',
        f"pipeline_parallel_microbatch_size = {degrees.micro_batch}",
        f"pipeline_parallel_first_stage_less_layers = {fewer[0]}",
        f"pipeline_parallel_last_stage_less_layers = {fewer[1]}",
    ]
    if -(-effective // each) == len(counts):
        lines.append(f"pipeline_parallel_layers_per_stage = {each}")
    elif degrees.virtual != _usual_chunks(degrees.schedule):
        raise TwofoldError(
            f"torchtitan makes {-(-effective // each)} stages of {each} layers, not {len(counts)}; plan with --virtual "
            f"{_usual_chunks(degrees.schedule)}, or pin others with --stage-layers"
        )
    return lines


def _usual_chunks(schedule: str) -> int:
    return 1 if schedule in _SINGLE else 2


# ------------------------------------------------------------------- reading


def read_torchtitan(text: str, path: str) -> dict[str, Any]:
    """The fields of a `Statement` that settings give.

    Raises:
        TwofoldError: no such settings, or what has no meaning here.
    """
    document = _document(text, path)
    spread, training, checkpoint = (document.get(name, {}) for name in _SECTIONS)
    _check_known(spread, path)
    values = _layout(spread, path)
    values["ep"] = _experts(spread, values, path)
    level = _level(spread, values, path)
    values["dp"] = values.pop("replicas") * values.pop("shards")
    local = _whole(training, "local_batch_size", None, path)
    batch = local * values["dp"]
    if training.get("global_batch_size", -1) != -1:
        batch = _whole(training, "global_batch_size", None, path)
    stages = None
    if values["pp"] > 1:
        if batch != local * values["dp"]:
            raise TwofoldError(
                f"{path}: local_batch_size {local} x {values['dp']} data-parallel ranks make {local * values['dp']}, "
                f"global_batch_size {batch} takes several passes of the pipeline in one step: not modelled"
            )
        values |= _pipeline(spread, path)
        stages = _stage_settings(spread, path)
    else:
        values["micro_batch"] = local
        _layers_per_stage(spread, path)  # refused where it is no number
    values |= {"zero": level, "sequence_parallel": values["tp"] > 1, "recompute": _recompute(checkpoint, path)}
    layers = re.search(r"^#.*\bnum_layers *= *(\d+)", text, re.MULTILINE)
    assumed = ("places for some tokens at each expert, as the model says; torchtitan's experts drop no token",)
    return {
        "values": values, "global_batch": batch,
        "seq": _whole(training, "seq_len", None, path) if "seq_len" in training else None,
        "unread": _unread(document), "refuses": check_torchtitan, "assumed": assumed if values["ep"] > 1 else (),
        "stages": stages, "num_layers": int(layers[1]) if layers else None,
    }  # fmt: skip


_SECTIONS = ("parallelism", "training", "activation_checkpoint")
"""Sections that are read."""


def _document(text: str, path: str) -> dict[str, Any]:
    """The settings by section."""
    document = toml_of(text, path)
    for name in _SECTIONS:
        if not isinstance(document.get(name, {}), dict):
            raise TwofoldError(f"{path}: {name} is {document[name]!r}, no section [{name}]")
    if not document.get("parallelism") or "local_batch_size" not in document.get("training", {}):
        raise TwofoldError(
            f"{path} has no [parallelism] or no local_batch_size in [training]: not torchtitan's settings"
        )
    return document


def _level(spread: dict[str, Any], values: dict[str, Any], path: str) -> int:
    """The optimizer-parallel level: FSDP2 keeps gathered weights (2) or gathers them again for the backward (3)."""
    if values["shards"] * values["cp"] == 1:
        return 0
    reshards = str(spread.get("fsdp_reshard_after_forward", "default"))
    if reshards not in ("default", "always", "never"):
        raise TwofoldError(f"{path}: fsdp_reshard_after_forward {reshards!r} is none of default, always, never")
    return 2 if reshards == "never" or (reshards == "default" and values["pp"] > 1) else 3


def _layers_per_stage(spread: dict[str, Any], path: str) -> int | None:
    name = "pipeline_parallel_layers_per_stage"
    return None if spread.get(name) is None else _whole(spread, name, None, path)


def _stage_settings(spread: dict[str, Any], path: str) -> tuple[int | None, int, int]:
    """Layers per stage, if stated, and how many fewer the first and the last stage hold."""
    first, last = (
        _whole(spread, f"pipeline_parallel_{end}_stage_less_layers", 1, path, least=0) for end in ("first", "last")
    )
    return _layers_per_stage(spread, path), first, last


def _unread(document: dict[str, Any]) -> tuple[str, ...]:
    """Settings that are ignored, though they may change a step."""
    training, checkpoint = document.get("training", {}), document.get("activation_checkpoint", {})
    unread = [f"training.{name}" for name in training if name not in _TRAINING]
    unread += [f"[{name}]" for name in document if name not in _SECTIONS and name not in _OTHER_SECTIONS]
    unread += ["model.converters"] if dict(document.get("model", {})).get("converters") else []
    unread += [f"activation_checkpoint.{name}" for name in checkpoint if name not in ("mode", "selective_ac_option")]
    return tuple(unread)


_OTHER_SECTIONS = ("job", "profiling", "metrics", "model", "lr_scheduler", "checkpoint", "validation", "debug", "comm")
"""Sections that change no step."""

_TRAINING = ("local_batch_size", "global_batch_size", "seq_len", "steps", "dataset", "dataset_path", "seed", "max_norm")


def _check_known(spread: dict[str, Any], path: str) -> None:
    for name, value in spread.items():
        if name in _ONLY_SO:
            if value not in _ONLY_SO[name]:
                raise TwofoldError(
                    f"{path}: {name} = {value!r} cannot be stated in degrees; only {_ONLY_SO[name][0]!r}"
                )
        elif name not in _READ:
            raise TwofoldError(f"{path}: {name} in [parallelism] is not known here; drop it if it changes no layout")


def _layout(spread: dict[str, Any], path: str) -> dict[str, Any]:
    if spread.get("data_parallel_shard_degree", -1) == -1:
        raise TwofoldError(f"{path}: data_parallel_shard_degree -1 leaves the number open; state it")
    names = {
        "replicas": "data_parallel_replicate_degree", "shards": "data_parallel_shard_degree",
        "tp": "tensor_parallel_degree", "cp": "context_parallel_degree", "pp": "pipeline_parallel_degree",
    }  # fmt: skip
    found = {mine: _whole(spread, theirs, 1, path) for mine, theirs in names.items()}
    if found["replicas"] > 1 and found["shards"] * found["cp"] > 1:
        raise TwofoldError(
            f"{path}: replicas of shards (HSDP) are not modelled; set data_parallel_replicate_degree, or both the "
            "shard and the context degree, to 1"
        )
    if found["replicas"] > 1 and found["tp"] * found["pp"] > 1:
        raise TwofoldError(
            f"{path}: torchtitan refuses data_parallel_replicate_degree above 1 with tensor or pipeline parallelism; "
            "shard instead"
        )
    return found


def _experts(spread: dict[str, Any], values: dict[str, Any], path: str) -> int:
    """Over how many ranks experts are shared out; each is split as the rest of the model."""
    degree = _whole(spread, "expert_parallel_degree", 1, path)
    tensor = _whole(spread, "expert_tensor_parallel_degree", 1, path)
    if degree > 1 and values["shards"] * values["cp"] % degree:
        raise TwofoldError(
            f"{path}: expert_parallel_degree {degree} does not divide the {values['shards'] * values['cp']} ranks that "
            "shard weights: torchtitan refuses it"
        )
    if degree > 1 and tensor != values["tp"]:
        raise TwofoldError(
            f"{path}: expert_tensor_parallel_degree {tensor} is not tensor_parallel_degree {values['tp']}; experts "
            "split otherwise than the rest cannot be stated in degrees"
        )
    return degree


def _pipeline(spread: dict[str, Any], path: str) -> dict[str, Any]:
    names = {theirs.lower(): mine for mine, theirs in _SCHEDULES.items()}
    name = str(spread.get("pipeline_parallel_schedule", "1F1B"))
    if name.lower() not in names:
        raise TwofoldError(f"{path}: pipeline_parallel_schedule {name!r} is none of {', '.join(_SCHEDULES.values())}")
    schedule = names[name.lower()]
    size = _whole(spread, "pipeline_parallel_microbatch_size", 1, path)
    return {"schedule": schedule, "virtual": _usual_chunks(schedule), "micro_batch": size}


def stage_values(values: dict[str, Any], stages: tuple[int | None, int, int], num_layers: int | None) -> dict[str, Any]:
    """The chunks per rank and the layers of every chunk, as torchtitan finds them.

    Args:
        values: with pp and the schedule.
        stages: layers per stage, if stated, and how many fewer the first and the last stage hold.
        num_layers: of the model.

    Raises:
        TwofoldError: what torchtitan refuses; an unknown number of layers.

    >>> stage_values({"pp": 4, "schedule": "1f1b", "virtual": 1}, (9, 2, 2), 32)["layers"]
    (7, 9, 9, 7)
    """
    each, first, last = stages
    pp, virtual, name = values["pp"], values["virtual"], _SCHEDULES[values["schedule"]]
    if num_layers is None:
        raise TwofoldError("torchtitan's stages depend on the model's number of layers; name the model")
    if each is not None:
        count = -(-(num_layers + first + last) // each)
        if count % pp:
            raise TwofoldError(
                f"{num_layers} layers with pipeline_parallel_layers_per_stage {each} make {count} stages, which "
                f"torchtitan cannot share out to {pp} ranks"
            )
        virtual = count // pp
    single, paired = values["schedule"] in _SINGLE, values["schedule"] in ("zb_v", "dualpipe_v")
    if (virtual == 1) is not single or (paired and virtual != 2):
        wanted = "1 stage" if single else "2 stages" if paired else "at least 2 stages"
        raise TwofoldError(
            f"torchtitan's {name} has {wanted} per rank; pipeline_parallel_layers_per_stage makes {virtual}"
        )
    counts = _stages(num_layers, pp * virtual, first, last)
    if counts is None:
        raise TwofoldError(
            f"{num_layers} layers cannot fill {pp * virtual} stages with {first} fewer on the first and {last} on the "
            "last, which torchtitan's settings state (1 each unless given)"
        )
    whole, rest = divmod(num_layers, len(counts))
    even = tuple(whole + (stage < rest) for stage in range(len(counts)))
    return {"virtual": virtual, "layers": None if counts == even and whole else counts}


def _recompute(settings: dict[str, Any], path: str) -> str:
    mode = str(settings.get("mode", "selective"))
    modes = {"none": "none", "full": "full", "selective": "selective_op"}
    option = str(settings.get("selective_ac_option", "2"))  # torchtitan's own defaults: every second layer
    if mode not in modes or (mode == "selective" and option != "op"):
        raise TwofoldError(
            f"{path}: activation_checkpoint mode {mode!r}, selective_ac_option {option!r} is none of none, full, "
            "selective by op; state [activation_checkpoint]"
        )
    return modes[mode]


def _whole(section: dict[str, Any], name: str, default: int | None, path: str, *, least: int = 1) -> int:
    value = section.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise TwofoldError(f"{path}: {name} is {value!r}, not a whole number of at least {least}")
    return value
