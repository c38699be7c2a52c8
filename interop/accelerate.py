"""Reads and writes launches of FSDP2 (torch's `fully_shard`) by Hugging Face's accelerate.

Flags are those of accelerate 1.15.0's commands/launch.py and of transformers' example run_clm.py.
"""

from __future__ import annotations

import re
from typing import Any

from interop.shell_words import is_whole, shell_words
from interop.startup import FSDP2, check_rules
from interop.unstated import check_stated_by
from plans.degrees import Degrees, check
from plans.errors import TwofoldError
from plans.model.transformer import TransformerConfig, sizes_of

__all__ = ["fsdp2_words", "read_fsdp2"]

_STATED = frozenset({"dp", "tp", "pp", "cp", "ep", "micro_batch", "schedule", "recompute", "recompute_layers", "zero",
                     "sequence_parallel", "layers", "order"})  # fmt: skip
"""Degrees that the flags state, or that the rules refuse; one rank without tp has no sequence to split."""


def fsdp2_words(config: TransformerConfig, degrees: Degrees, ranks_per_node: int) -> list[str]:
    """The words of a command that trains a model by `fully_shard`.

    Raises:
        TwofoldError: what accelerate has no flag for.
    """
    check(degrees, sizes_of(config))
    check_stated_by("accelerate", _STATED, degrees)
    check_rules(FSDP2, degrees, sizes_of(config))
    flags = {
        "num_machines": -(-degrees.num_ranks // ranks_per_node), "num_processes": degrees.num_ranks,
        "mixed_precision": "bf16" if config.dtype == "bfloat16" else "no", "use_fsdp": None, "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": str(degrees.optimizer.parallel_level == 3).lower(),
        "fsdp_activation_checkpointing": str(degrees.recompute == "full").lower(),
    }  # fmt: skip
    script = {
        "config_name": config.name, "block_size": config.seq, "per_device_train_batch_size": degrees.micro_batch,
        "gradient_accumulation_steps": degrees.num_micro_batches,
    }  # fmt: skip
    words = ["accelerate launch"]
    for part in (flags, {"": "run_clm.py"}, script):
        for name, value in part.items():
            words += [f"--{name}"] if name else []
            words += [] if value is None else [str(value)]
    return words


def read_fsdp2(text: str, path: str) -> dict[str, Any]:
    """The fields of a `Statement` that a launch by accelerate gives.

    Raises:
        TwofoldError: a flag that is missing, or has a value that has no meaning here.
    """
    words = shell_words(text, path)
    flags = {name[2:]: value for name, value in zip(words, [*words[1:], ""], strict=True) if name.startswith("--")}

    def whole(name: str) -> int:
        value = flags.get(name, "")
        if not is_whole(value) or int(value) < 1:
            raise TwofoldError(f"{path}: --{name} is {value!r}, not a whole number of at least 1")
        return int(value)

    def is_on(name: str) -> bool:
        value = flags.get(name, "false").lower()
        if value not in ("true", "false"):
            raise TwofoldError(f"{path}: --{name} is {value!r}, not true or false")
        return value == "true"

    if flags.get("fsdp_version") != "2" or "use_fsdp" not in flags:
        raise TwofoldError(f"{path} launches without --use_fsdp --fsdp_version 2: only FSDP2 is supported")
    ranks, size = whole("num_processes"), whole("per_device_train_batch_size")
    level = 0 if ranks == 1 else 3 if is_on("fsdp_reshard_after_forward") else 2
    values = {
        "dp": ranks, "micro_batch": size, "zero": level,
        "recompute": "full" if is_on("fsdp_activation_checkpointing") else "none",
    }  # fmt: skip
    layers = re.search(r"\bnum_layers *= *(\d+)", text)
    return {
        "values": values, "global_batch": ranks * size * whole("gradient_accumulation_steps"),
        "seq": whole("block_size") if "block_size" in flags else None, "stack": "torch", "rules": FSDP2,
        "num_layers": int(layers[1]) if layers else None,
        "unread": tuple(f"--{name}" for name in flags if name not in _READ),
    }  # fmt: skip


_READ = ("num_machines", "num_processes", "mixed_precision", "use_fsdp", "fsdp_version", "fsdp_auto_wrap_policy",
         "fsdp_reshard_after_forward", "fsdp_activation_checkpointing", "config_name", "block_size",
         "per_device_train_batch_size", "gradient_accumulation_steps")  # fmt: skip
