"""Runs a program on real devices with torch (floor 5): gloo on CPU, NCCL on GPU, HCCL on Ascend.

Each rank computes on local tensors and issues the planned collectives itself, in program order. This is the only
package that imports torch; `executor.data.digits` and `executor.data.prefetch` work without it.

It imports `plans` and `costmodels` only.
"""

import os

# An installed torch-npu without the Ascend toolkit makes `import torch` itself fail through its entry point; with this
# the plug-in is loaded by `executor.device.pick_device` only, where the failure can be explained.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
# A CUDA kernel that is loaded when it is first used waits for what runs on the device, also for a receive whose sender
# waits for this rank: a deadlock in the first step (seen on 4 H200).
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
