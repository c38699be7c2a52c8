"""Write and read a configuration as torchtitan's settings.

Settings as in torchtitan's job_config.py, stages as in its distributed/pipeline_parallel.py, both of late 2025. What
they cannot express, and what torchtitan refuses, raises an error here; nothing is approximated.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

from interop.shell_words import is_whole, shell_words
from interop.startup import (
    TORCHTITAN,
    TORCHTITAN_DENSE,
    TORCHTITAN_SCHEDULES,
    TORCHTITAN_SINGLE,
    check_rules,
    fewer_layers,
    stages_of,
)
from interop.unstated import check_stated_by
from plans.degrees import Degrees, check
from plans.errors import TwofoldError
from plans.model.transformer import TransformerConfig, sizes_of
from plans.reading import toml_of

__all__ = [
    "read_torchtitan", "read_torchtitan_launch", "stage_values", "torchtitan_flavor", "torchtitan_toml",
    "torchtitan_words",
]  # fmt: skip

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
"""Other keys of [parallelism], and the only values that degrees can express."""


_STATED = frozenset({
    "dp", "tp", "pp", "cp", "ep", "micro_batch", "schedule", "virtual", "recompute", "recompute_layers", "zero",
    "sequence_parallel", "layers", "order",
})  # fmt: skip
"""Degrees that torchtitan has words for, or that are refused with a separate reason."""


def torchtitan_settings(config: TransformerConfig, degrees: Degrees) -> dict[str, dict[str, Any]]:
    """torchtitan's settings that state the layout and the batch, by section and name.

    Raises:
        TwofoldError: what torchtitan has no setting for, or refuses.
    """
    check(degrees, sizes_of(config))
    check_stated_by("torchtitan", _STATED, degrees)
    check_rules(TORCHTITAN, degrees, sizes_of(config))
    level = degrees.optimizer.parallel_level
    local = degrees.global_batch // degrees.dp if degrees.pp > 1 else degrees.micro_batch
    spread: dict[str, Any] = {
        "data_parallel_replicate_degree": 1 if level else degrees.dp,
        "data_parallel_shard_degree": degrees.dp if level else 1,
        **({"fsdp_reshard_after_forward": "always" if level == 3 else "never"} if level else {}),
        "tensor_parallel_degree": degrees.tp, "context_parallel_degree": degrees.cp,
        "pipeline_parallel_degree": degrees.pp,
    }  # fmt: skip
    if config.experts is not None:
        spread["expert_parallel_degree"] = degrees.ep
    if degrees.pp > 1:
        spread |= _pipeline_settings(degrees, degrees.layers_of(config.num_layers))
    training = {"seq_len": config.seq, "local_batch_size": local, "global_batch_size": degrees.global_batch}
    return {"training": training, "parallelism": spread}


def torchtitan_toml(config: TransformerConfig, degrees: Degrees) -> str:
    """The settings as a TOML file, which torchtitan read until 0.2.

    Raises:
        TwofoldError: what torchtitan has no setting for, or refuses.
    """
    lines = [
        f"# num_layers = {config.num_layers}, as twofold's reader needs it: the model's flavor states it to torchtitan"
    ]
    if config.experts is not None:
        lines.append(
            "# torchtitan's experts drop no token; here they have places for "
            f"{config.experts.capacity_factor:g} times an even share"
        )
    settings = torchtitan_settings(config, degrees)
    if degrees.ep > 1:
        settings["parallelism"]["expert_tensor_parallel_degree"] = degrees.tp
    mode = _MODES[degrees.recompute]
    settings["activation_checkpoint"] = {"mode": mode} | ({"selective_ac_option": "op"} if mode == "selective" else {})
    for section, values in settings.items():
        lines += [f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items()), ""]
    return "\n".join(lines)


_MODES = {"none": "none", "selective_op": "selective", "full": "full"}
"""Our name of what recomputes -> torchtitan's."""

_FLAVORS = {
    (32, 4096, 32, 8, 14336, 128_256): ("llama3", "llama3_8b"),
    (80, 8192, 64, 8, 28672, 128_256): ("llama3", "llama3_70b"),
    (126, 16384, 128, 8, 53248, 128_256): ("llama3", "llama3_405b"),
}  # fmt: skip
"""Layers, width, heads, heads of keys, inner size and vocabulary -> --module and --config of torchtitan 0.3.0."""


def torchtitan_flavor(config: TransformerConfig) -> tuple[str, str]:
    """The --module and --config of a model.

    Raises:
        TwofoldError: torchtitan has no such model; its sizes are not flags.

    >>> from plans.model.transformer import transformer_config
    >>> torchtitan_flavor(transformer_config("llama-3-8b"))
    ('llama3', 'llama3_8b')
    """
    sizes = (config.num_layers, config.hidden, config.num_heads, config.kv_heads, config.ffn, config.vocab)
    if sizes not in _FLAVORS:
        known = ", ".join(name for _, name in _FLAVORS.values())
        raise TwofoldError(
            f"torchtitan 0.3.0 has no configuration of {config.name} with {config.num_layers} layers, and no flags for "
            f"sizes; known are {known}: add yours to its config_registry, or plan for another software"
        )
    return _FLAVORS[sizes]


def torchtitan_words(config: TransformerConfig, degrees: Degrees, ranks_per_node: int) -> list[str]:
    """The words of a command that trains a model by torchtitan 0.3.0; CUDA graphs are off, as its pipelines need.

    Raises:
        TwofoldError: what torchtitan has no setting for, or refuses.
    """
    module, flavor = torchtitan_flavor(config)
    words = [
        "torchrun", "--nnodes", str(-(-degrees.num_ranks // ranks_per_node)), "--nproc-per-node", str(ranks_per_node),
        "-m", "torchtitan.train", "--module", module, "--config", flavor, "--training.disable_cuda_graphs",
        "--compile.no-enable",
    ]  # fmt: skip
    for section, values in torchtitan_settings(config, degrees).items():
        for name, value in values.items():
            words += [f"--{section}.{name}", str(value)]
    return [*words, f"activation_checkpoint:{_MODES[degrees.recompute]}"]


def _pipeline_settings(degrees: Degrees, counts: tuple[int, ...]) -> dict[str, Any]:
    fewer = fewer_layers(counts)
    assert fewer is not None, "refused by the rules"
    each = -(-(sum(counts) + sum(fewer)) // len(counts))
    found: dict[str, Any] = {
        "pipeline_parallel_schedule": TORCHTITAN_SCHEDULES[degrees.schedule],
        "pipeline_parallel_microbatch_size": degrees.micro_batch,
        "pipeline_parallel_first_stage_less_layers": fewer[0],
        "pipeline_parallel_last_stage_less_layers": fewer[1],
    }
    if -(-(sum(counts) + sum(fewer)) // each) == len(counts):
        found["pipeline_parallel_layers_per_stage"] = each
    return found


def _usual_chunks(schedule: str) -> int:
    return 1 if schedule in TORCHTITAN_SINGLE else 2


# ------------------------------------------------------------------- reading


def read_torchtitan_launch(text: str, path: str) -> dict[str, Any]:
    """The fields of a `Statement` that a command of torchtitan 0.3.0 gives.

    Raises:
        TwofoldError: no such command, or what has no meaning here.
    """
    words = shell_words(text, path)
    document: dict[str, dict[str, Any]] = {}
    for word, value in itertools.pairwise([*words, ""]):
        section, _, name = word.removeprefix("--").partition(".")
        if word.startswith("--") and name and section in _SECTIONS:
            name = name.partition("=")[0].replace("-", "_")
            given = word.partition("=")[2] or value
            document.setdefault(section, {})[name] = int(given) if is_whole(given) else given
        elif found := re.fullmatch(r"activation[_-]checkpoint:(\S+)", word):
            document["activation_checkpoint"] = {"mode": found[1], "selective_ac_option": "op"}
    document.get("training", {}).pop("disable_cuda_graphs", None)
    return _read_settings(document, text, path) | {"stack": "torchtitan", "rules": TORCHTITAN + TORCHTITAN_DENSE}


def read_torchtitan(text: str, path: str) -> dict[str, Any]:
    """The fields of a `Statement` that settings give.

    Raises:
        TwofoldError: no such settings, or what has no meaning here.
    """
    return _read_settings(_document(text, path), text, path)


def _read_settings(document: dict[str, Any], text: str, path: str) -> dict[str, Any]:
    """The fields of a `Statement` that settings by section give; a comment in `text` has the number of layers.

    Raises:
        TwofoldError: no such settings, or what has no meaning here.
    """
    _check_document(document, path)
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
        _layers_per_stage(spread, path)  # refused where it is not a number
    values |= {"zero": level, "sequence_parallel": values["tp"] > 1, "recompute": _recompute(checkpoint, path)}
    layers = re.search(r"^#.*\bnum_layers *= *(\d+)", text, re.MULTILINE)
    assumed = ("places for some tokens at each expert, as the model says; torchtitan's experts drop no token",)
    return {
        "values": values, "global_batch": batch,
        "seq": _whole(training, "seq_len", None, path) if "seq_len" in training else None,
        "unread": _unread(document), "rules": TORCHTITAN, "assumed": assumed if values["ep"] > 1 else (),
        "stages": stages, "num_layers": int(layers[1]) if layers else None,
    }  # fmt: skip


_SECTIONS = ("parallelism", "training", "activation_checkpoint")
"""Sections that are read."""


def _document(text: str, path: str) -> dict[str, Any]:
    """The settings by section."""
    return toml_of(text, path)


def _check_document(document: dict[str, Any], path: str) -> None:
    for name in _SECTIONS:
        if not isinstance(document.get(name, {}), dict):
            raise TwofoldError(f"{path}: {name} is {document[name]!r}, no section [{name}]")
    if not document.get("parallelism") or "local_batch_size" not in document.get("training", {}):
        raise TwofoldError(
            f"{path} has no [parallelism] or no local_batch_size in [training]: not torchtitan's settings; "
            "name a plan, its .degrees.json or such settings"
        )


def _level(spread: dict[str, Any], values: dict[str, Any], path: str) -> int:
    """The optimizer-parallel level: FSDP2 keeps gathered weights (2) or gathers them again for the backward (3)."""
    if values["shards"] * values["cp"] == 1:
        return 0
    reshards = str(spread.get("fsdp_reshard_after_forward", "default"))
    if reshards not in ("default", "always", "never"):
        raise TwofoldError(f"{path}: fsdp_reshard_after_forward must be default, always or never, not {reshards!r}")
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
                    f"{path}: {name} = {value!r} cannot be expressed in degrees; only {_ONLY_SO[name][0]!r}"
                )
        elif name not in _READ:
            raise TwofoldError(
                f"{path}: {name} in [parallelism] is unknown; remove it if it does not change the layout"
            )


def _layout(spread: dict[str, Any], path: str) -> dict[str, Any]:
    if spread.get("data_parallel_shard_degree", -1) == -1:
        raise TwofoldError(f"{path}: data_parallel_shard_degree -1 is ambiguous; set it")
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
            "split differently cannot be expressed in degrees"
        )
    return degree


def _pipeline(spread: dict[str, Any], path: str) -> dict[str, Any]:
    names = {theirs.lower(): mine for mine, theirs in TORCHTITAN_SCHEDULES.items()}
    name = str(spread.get("pipeline_parallel_schedule", "1F1B"))
    if name.lower() not in names:
        raise TwofoldError(
            f"{path}: pipeline_parallel_schedule must be one of {', '.join(TORCHTITAN_SCHEDULES.values())}, "
            f"not {name!r}"
        )
    schedule = names[name.lower()]
    size = _whole(spread, "pipeline_parallel_microbatch_size", 1, path)
    return {"schedule": schedule, "virtual": _usual_chunks(schedule), "micro_batch": size}


def stage_values(values: dict[str, Any], stages: tuple[int | None, int, int], num_layers: int | None) -> dict[str, Any]:
    """The chunks per rank and the layers of every chunk, as torchtitan finds them.

    Args:
        values: with pp and the schedule.
        stages: layers per stage, if stated, and how many fewer the first and the last stage hold.
        num_layers: number of layers of the model.

    Raises:
        TwofoldError: what torchtitan refuses; an unknown number of layers.

    >>> stage_values({"pp": 4, "schedule": "1f1b", "virtual": 1}, (9, 2, 2), 32)["layers"]
    (7, 9, 9, 7)
    """
    each, first, last = stages
    pp, virtual, name = values["pp"], values["virtual"], TORCHTITAN_SCHEDULES[values["schedule"]]
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
    single, paired = values["schedule"] in TORCHTITAN_SINGLE, values["schedule"] in ("zb_v", "dualpipe_v")
    if (virtual == 1) is not single or (paired and virtual != 2):
        wanted = "1 stage" if single else "2 stages" if paired else "at least 2 stages"
        raise TwofoldError(
            f"torchtitan's {name} has {wanted} per rank; pipeline_parallel_layers_per_stage makes {virtual}"
        )
    counts = stages_of(num_layers, pp * virtual, first, last)
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
            f"{path}: activation_checkpoint must be mode none, full, or selective with selective_ac_option "
            "op, not mode "
            f"{mode!r} with selective_ac_option {option!r}; set [activation_checkpoint]"
        )
    return modes[mode]


def _whole(section: dict[str, Any], name: str, default: int | None, path: str, *, least: int = 1) -> int:
    value = section.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise TwofoldError(f"{path}: {name} is {value!r}, not a whole number of at least {least}")
    return value
