"""A configuration in words that other programs know: Megatron-LM's flags, torchtitan's settings, and our own JSON file.

Flags as in Megatron-LM's megatron/training/arguments.py and settings as in torchtitan's job_config.py, both of 2025.
What a program has no words for is refused, never rounded to something near.
"""

from __future__ import annotations

import json
import os
import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plans.errors import TwofoldError
from plans.files import write_atomically
from plans.plan import Optimizer
from plans.scale import Degrees
from plans.transformer import TransformerConfig
from plans.transformer.config import Experts, Latent, Rope

__all__ = ["Statement", "megatron_flags", "read_statement", "torchtitan_toml", "write_statement"]

_TITAN_SCHEDULES = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved_1f1b": "Interleaved1F1B", "looped_bfs": "LoopedBFS",
    "interleaved_zb": "InterleavedZeroBubble", "zb_v": "ZBVZeroBubble", "dualpipe_v": "DualPipeV",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What a file states.

    Args:
        values: degrees, as `Degrees` takes them; "zero" is the optimizer's level.
        global_batch: sequences of a step.
        seq: tokens of a sequence; None: the model's.
        config: of the model; None where the file does not say.
    """

    values: dict[str, Any]
    global_batch: int
    seq: int | None = None
    config: TransformerConfig | None = None

    def degrees(self, global_batch: int | None = None, *, half: bool = True) -> Degrees:
        """The degrees, under another batch where one is given.

        Raises:
            TwofoldError: a batch that they cannot take.
        """
        rest = {name: value for name, value in self.values.items() if name != "zero"}
        wide = "float32" if half else None
        return Degrees(
            **rest, global_batch=global_batch or self.global_batch,
            optimizer=Optimizer(
                kind="adamw", settings={"lr": 1e-4}, parallel_level=int(self.values.get("zero", 0)),
                gradient_dtype=wide, master_dtype=wide,
            ),
        )  # fmt: skip


# ------------------------------------------------------------------- our own file


def write_statement(path: str | os.PathLike[str], config: TransformerConfig, degrees: Degrees, **more: Any) -> Path:
    """Save a configuration as JSON, with whatever else is worth keeping."""
    made = {
        "twofold_degrees": 1,
        "config": {name: value for name, value in asdict(config).items() if name not in ("source",)},
        "degrees": {
            "dp": degrees.dp, "cp": degrees.cp, "tp": degrees.tp, "pp": degrees.pp, "ep": degrees.ep,
            "micro_batch": degrees.micro_batch, "schedule": degrees.schedule, "virtual": degrees.virtual,
            "recompute": degrees.recompute, "zero": degrees.optimizer.parallel_level,
            "sequence_parallel": degrees.sequence_parallel,
            "layers": None if degrees.layers is None else list(degrees.layers),
        },
        "global_batch": degrees.global_batch,
        **more,
    }  # fmt: skip
    target = Path(path)
    write_atomically(target, (json.dumps(made, indent=1) + "\n").encode())
    return target


def read_statement(path: str | os.PathLike[str]) -> Statement:
    """Read a file of ours (.json), torchtitan's settings (.toml), or a file with Megatron-LM's flags.

    Raises:
        TwofoldError: a file that cannot be read, or says something that has no meaning here.
    """
    source = Path(path)
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TwofoldError(f"cannot read {os.fspath(path)!r}: {error}") from None
    if source.suffix == ".toml":
        return _read_torchtitan(text, os.fspath(path))
    if source.suffix == ".json":
        return _read_own(text, os.fspath(path))
    return _read_megatron(text, os.fspath(path))


def _read_own(text: str, path: str) -> Statement:
    try:
        found = json.loads(text)
        assert found["twofold_degrees"] == 1
        fields = dict(found["config"])
        fields["rope"] = Rope(**fields["rope"])
        fields["experts"] = None if fields.get("experts") is None else Experts(**fields["experts"])
        fields["latent"] = None if fields.get("latent") is None else Latent(**fields["latent"])
        values = dict(found["degrees"])
        values["layers"] = None if values["layers"] is None else tuple(values["layers"])
        config = TransformerConfig(**fields)
        return Statement(values=values, global_batch=found["global_batch"], seq=config.seq, config=config)
    except TwofoldError:
        raise
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise TwofoldError(
            f"{path} states no degrees ({type(error).__name__}: {error}); `twofold plan` writes such files beside plans"
        ) from None


# ------------------------------------------------------------------- Megatron-LM


def megatron_flags(config: TransformerConfig, degrees: Degrees) -> list[str]:
    """The flags of Megatron-LM that state the layout, the batch and the recomputing.

    Raises:
        TwofoldError: what Megatron-LM has no flag for.

    >>> from plans.transformer import transformer_config
    >>> flags = megatron_flags(transformer_config("llama-3-8b"), Degrees(dp=4, tp=2, global_batch=8))
    >>> flags[:2]
    ['--tensor-model-parallel-size', '2']
    """
    _check_dense(config)
    if degrees.schedule not in ("1f1b", "interleaved_1f1b"):
        raise TwofoldError(
            f"Megatron-LM has no schedule {degrees.schedule!r}; plan with --schedule 1f1b or interleaved_1f1b"
        )
    if degrees.recompute == "selective_op":
        raise TwofoldError("Megatron-LM cannot recompute by operator; plan with --recompute none, selective or full")
    level = degrees.optimizer.parallel_level
    if level >= 2 and degrees.pp > 1:
        raise TwofoldError(
            f"Megatron-LM shards gradients and weights (level {level}) only without pipeline stages; plan with --zero 1"
        )
    flags = [
        "--tensor-model-parallel-size", degrees.tp, "--pipeline-model-parallel-size", degrees.pp,
        "--context-parallel-size", degrees.cp, "--micro-batch-size", degrees.micro_batch,
        "--global-batch-size", degrees.global_batch, "--seq-length", config.seq, "--num-layers", config.num_layers,
    ]  # fmt: skip
    if degrees.sequence_parallel:
        flags.append("--sequence-parallel")
    counts = degrees.layers_of(config.num_layers)
    if len(set(counts)) > 1:
        stages = ["t" * count for count in counts]
        stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
        flags += ["--pipeline-model-parallel-layout", "|".join(stages)]
    elif degrees.virtual > 1:
        flags += ["--num-layers-per-virtual-pipeline-stage", counts[0]]
    if level == 1:
        flags.append("--use-distributed-optimizer")
    elif level >= 2:
        strategy = "optim_grads" if level == 2 else "optim_grads_params"
        flags += ["--use-distributed-optimizer", "--use-megatron-fsdp", "--data-parallel-sharding-strategy", strategy]
    if degrees.recompute == "selective":
        flags += ["--recompute-granularity", "selective"]
    elif degrees.recompute == "full":
        flags += ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1]
    return [str(each) for each in flags]


def _check_dense(config: TransformerConfig) -> None:
    if config.experts is not None:
        raise TwofoldError(f"{config.name}: a mixture of experts is not exported yet; its degrees are in .degrees.json")


_MEGATRON = {
    "tensor-model-parallel-size": "tp", "pipeline-model-parallel-size": "pp", "context-parallel-size": "cp",
    "micro-batch-size": "micro_batch",
}  # fmt: skip

_MEGATRON_ON = frozenset(
    {"sequence-parallel", "use-distributed-optimizer", "use-megatron-fsdp", "bf16", "fp16", "use-flash-attn", "swiglu",
     "untie-embeddings-and-output-weights", "overlap-grad-reduce", "overlap-param-gather"}
)  # fmt: skip

_MEGATRON_REFUSED = ("expert-model-parallel-size", "num-experts", "rampup-batch-size", "pipeline-model-parallel-layout")


def _read_megatron(text: str, path: str) -> Statement:
    lines = (line.partition("#")[0].strip().removesuffix("\\") for line in text.splitlines())
    words = shlex.split(" ".join(lines))
    flags: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            flags[name] = [value] if value else []
        elif name:
            flags[name].append(word)
    if not flags:
        raise TwofoldError(f"{path} has no flags such as --tensor-model-parallel-size 8; nor is it .json or .toml")
    for refused in _MEGATRON_REFUSED:
        if refused in flags:
            raise TwofoldError(f"{path}: --{refused} has no meaning for a dense transformer in even stages")
    values: dict[str, Any] = {
        mine: _whole(flags[theirs], theirs, path) for theirs, mine in _MEGATRON.items() if theirs in flags
    }
    for needed in ("global-batch-size", "micro-batch-size", "world-size"):
        if needed not in flags:
            raise TwofoldError(
                f"{path} does not state --{needed}"
                + (
                    "; add it: torchrun's number of processes is no flag of Megatron-LM"
                    if needed == "world-size"
                    else ""
                )
            )
    world = _whole(flags["world-size"], "world-size", path)
    rest = values.get("tp", 1) * values.get("pp", 1) * values.get("cp", 1)
    if world % rest:
        raise TwofoldError(f"{path}: tp x pp x cp = {rest} does not divide --world-size {world}")
    values["dp"] = world // rest
    values["sequence_parallel"] = "sequence-parallel" in flags and values.get("tp", 1) > 1
    values["zero"] = 1 if "use-distributed-optimizer" in flags else 0
    if "use-megatron-fsdp" in flags:
        strategies = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
        strategy = (flags.get("data-parallel-sharding-strategy") or ["no_shard"])[0]
        if strategy not in strategies:
            raise TwofoldError(
                f"{path}: --data-parallel-sharding-strategy {strategy!r} is none of {', '.join(strategies)}"
            )
        values["zero"] = strategies[strategy]
    granularity = (flags.get("recompute-granularity") or ["none"])[0]
    if granularity not in ("none", "selective", "full"):
        raise TwofoldError(f"{path}: --recompute-granularity {granularity!r} is none of selective, full")
    values["recompute"] = granularity
    if "num-layers-per-virtual-pipeline-stage" in flags and values.get("pp", 1) > 1:
        if "num-layers" not in flags:
            raise TwofoldError(f"{path}: --num-layers-per-virtual-pipeline-stage needs --num-layers")
        each = _whole(flags["num-layers-per-virtual-pipeline-stage"], "num-layers-per-virtual-pipeline-stage", path)
        layers = _whole(flags["num-layers"], "num-layers", path)
        if layers % (each * values["pp"]):
            raise TwofoldError(f"{path}: {layers} layers do not divide by {values['pp']} stages of {each}")
        virtual = layers // (each * values["pp"])
        values |= {"virtual": virtual, "schedule": "interleaved_1f1b" if virtual > 1 else "1f1b"}
    seq = _whole(flags["seq-length"], "seq-length", path) if "seq-length" in flags else None
    return Statement(values=values, global_batch=_whole(flags["global-batch-size"], "global-batch-size", path), seq=seq)


def _whole(words: Sequence[str], name: str, path: str) -> int:
    if len(words) != 1 or not words[0].isdigit() or int(words[0]) < 1:
        raise TwofoldError(f"{path}: --{name} is {' '.join(words)!r}, not a whole number of at least 1")
    return int(words[0])


# ------------------------------------------------------------------- torchtitan


def torchtitan_toml(config: TransformerConfig, degrees: Degrees) -> str:
    """torchtitan's settings that state the layout, the batch and the recomputing.

    Raises:
        TwofoldError: what torchtitan has no setting for.
    """
    _check_dense(config)
    level = degrees.optimizer.parallel_level
    if level == 1 and degrees.dp * degrees.cp > 1:
        raise TwofoldError("torchtitan cannot shard optimizer states alone (level 1); plan with --zero 0, 2 or 3")
    if degrees.tp > 1 and not degrees.sequence_parallel:
        raise TwofoldError("torchtitan's tensor parallelism splits the sequence; plan with --sequence-parallel")
    if degrees.recompute == "selective":
        raise TwofoldError("torchtitan recomputes by operator or all; plan with --recompute selective_op or full")
    if degrees.pp > 1 and degrees.schedule not in _TITAN_SCHEDULES:
        raise TwofoldError(
            f"torchtitan has no schedule {degrees.schedule!r}; plan with one of {', '.join(_TITAN_SCHEDULES)}"
        )
    counts = degrees.layers_of(config.num_layers)
    inner = set(counts[1:-1]) or {max(counts)}
    most = max(inner)
    if len(inner) > 1 or counts[0] > most or counts[-1] > most:
        raise TwofoldError(
            f"torchtitan's stages are equal but for fewer layers on the first and the last, not {list(counts)}; pin "
            "others with --stage-layers"
        )
    lines = [
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
    if degrees.pp > 1:
        lines += [
            f'pipeline_parallel_schedule = "{_TITAN_SCHEDULES[degrees.schedule]}"',
            f"pipeline_parallel_microbatch_size = {degrees.micro_batch}",
            f"pipeline_parallel_layers_per_stage = {most}",
            f"pipeline_parallel_first_stage_less_layers = {most - counts[0]}",
            f"pipeline_parallel_last_stage_less_layers = {most - counts[-1]}",
        ]
    mode = {"none": "none", "selective_op": "selective", "full": "full"}[degrees.recompute]
    lines += ["", "[activation_checkpoint]", f'mode = "{mode}"']
    if mode == "selective":
        lines.append('selective_ac_option = "op"')
    return "\n".join(lines) + "\n"


def _read_torchtitan(text: str, path: str) -> Statement:
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TwofoldError(f"{path} is not TOML: {error}") from None
    spread, training = dict(found.get("parallelism", {})), dict(found.get("training", {}))
    if not spread or "local_batch_size" not in training:
        raise TwofoldError(
            f"{path} has no [parallelism] or no local_batch_size in [training]: not torchtitan's settings"
        )
    replicas = int(spread.get("data_parallel_replicate_degree", 1))
    shards = int(spread.get("data_parallel_shard_degree", -1))
    if shards == -1:
        raise TwofoldError(f"{path}: data_parallel_shard_degree -1 leaves the number open; state it")
    if replicas > 1 and shards > 1:
        raise TwofoldError(f"{path}: replicas of shards (HSDP) are not modelled; set one of both degrees to 1")
    if int(spread.get("expert_parallel_degree", 1)) > 1:
        raise TwofoldError(f"{path}: expert parallelism cannot be stated in degrees yet")
    dp, pp = replicas * shards, int(spread.get("pipeline_parallel_degree", 1))
    again = str(spread.get("fsdp_reshard_after_forward", "default"))
    level = 0 if shards == 1 else (2 if again == "never" or (again == "default" and pp > 1) else 3)
    local = int(training["local_batch_size"])
    batch = int(training.get("global_batch_size", -1))
    values: dict[str, Any] = {
        "dp": dp, "pp": pp, "tp": int(spread.get("tensor_parallel_degree", 1)),
        "cp": int(spread.get("context_parallel_degree", 1)), "zero": level,
        "micro_batch": int(spread.get("pipeline_parallel_microbatch_size", 1)) if pp > 1 else local,
    }  # fmt: skip
    values["sequence_parallel"] = values["tp"] > 1
    if pp > 1:
        names = {theirs.lower(): mine for mine, theirs in _TITAN_SCHEDULES.items()}
        name = str(spread.get("pipeline_parallel_schedule", "1F1B"))
        if name.lower() not in names:
            raise TwofoldError(f"{path}: pipeline_parallel_schedule {name!r} is none of {', '.join(names)}")
        values["schedule"] = names[name.lower()]
        values["virtual"] = 1 if values["schedule"] in ("1f1b", "gpipe") else 2
    settings = dict(found.get("activation_checkpoint", {}))
    mode = str(settings.get("mode", "none"))
    modes = {"none": "none", "full": "full", "selective": "selective_op"}
    if mode not in modes or (mode == "selective" and str(settings.get("selective_ac_option", "op")) != "op"):
        raise TwofoldError(f"{path}: activation_checkpoint {settings} is none of none, full, selective by op")
    values["recompute"] = modes[mode]
    seq = training.get("seq_len")
    return Statement(
        values=values, global_batch=local * dp if batch == -1 else batch, seq=None if seq is None else int(seq)
    )
