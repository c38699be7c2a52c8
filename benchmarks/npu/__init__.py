"""Whole steps on the operators of the real torch-npu, without an Ascend device: on meta tensors.

    make check-npu FOLDER=/tmp/npu

makes an environment in FOLDER (`environment.sh`), plans in it (`plans`), and runs every instruction of every rank with
the kernels of an NPU (`check`). Operators have schemas and shape functions, which need no device; nothing is computed.
The result is benchmarks/results/npu_operators.json.
"""
