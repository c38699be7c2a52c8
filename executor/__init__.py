"""Runs a program on real devices with torch (floor 5): gloo on CPU, NCCL on GPU, HCCL on Ascend.

Each rank computes on local tensors and issues the planned collectives itself, in program order. This is the only
package that imports torch; `executor.data` (digits, batches, prefetching) works without it.

It imports `plans` and `costmodels` only.
"""
