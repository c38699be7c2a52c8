"""Software stacks: the kernels that they run for an instruction, and their host times.

`Stack` is twofold's own executor. `TorchNative` covers torch's parallel modules (DistributedDataParallel, FSDP2, tensor
parallelism with DTensor, torch.distributed.pipelining), eager or compiled. `Megatron` is Megatron-LM. `stack_named`
finds a stack by name.
"""

from simulator.stacks.base import PieceSizes, Stack
from simulator.stacks.megatron import Megatron
from simulator.stacks.names import stack_named, stack_names
from simulator.stacks.own_host import on_host
from simulator.stacks.steps import Kernel
from simulator.stacks.torch_native import TorchNative

__all__ = ["Kernel", "Megatron", "PieceSizes", "Stack", "TorchNative", "on_host", "stack_named", "stack_names"]
