"""Tensor parallelism by torch's own modules (DTensor), with and without sequence parallelism, the loss on split logits.

Products that share an input get it as one distributed tensor (`PrepareModuleInput`), so that its gradient is reduced
once, as torchtitan does it.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.peers.model import Decoder

__all__ = ["loss_parallel", "split"]


def split(model: Decoder, mesh: DeviceMesh, *, sequence_parallel: bool, compiles: bool) -> None:
    """Split the model over `mesh`, in place; its loss and backward belong inside of `loss_parallel`.

    Raises:
        ValueError: experts; learned positions with sequence parallelism. They are not written for this peer.
    """
    learned, first_block = model.pos_embeddings is not None, next(iter(model.layers.values()))
    if hasattr(first_block.feed_forward, "router") or (learned and sequence_parallel):
        raise ValueError("this peer splits no experts, and no learned positions by the sequence")
    between: Any = Shard(1) if sequence_parallel else Replicate()
    top: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "output": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    inside: dict[str, Any] = {
        "attention": PrepareModuleInput(
            input_layouts=(between, None), desired_input_layouts=(Replicate(), None)
        ),
        "feed_forward": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        "attention.wo": RowwiseParallel(output_layouts=between),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=between),
    }  # fmt: skip
    if getattr(first_block.feed_forward, "w3", None) is not None:
        inside["feed_forward.w3"] = ColwiseParallel()
    if sequence_parallel:
        top["norm"] = SequenceParallel()
        inside |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
    parallelize_module(model, mesh, top)
    for block in model.layers.values():
        parallelize_module(block, mesh, inside)
    if compiles and model.tok_embeddings is not None:
        # a compiled block cannot differentiate an input that is still being reduced; adding waits for it
        model.tok_embeddings.register_forward_hook(lambda module, inputs, x: x + 0)
