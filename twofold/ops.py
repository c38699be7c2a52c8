"""Operators that `shard` can split, to build networks from: `from twofold import ops`. Needs torch."""

from executor.ops import Add, Flatten, GeLU, MatMul, Mul, Operator, ReLU, SiLU

__all__ = ["Add", "Flatten", "GeLU", "MatMul", "Mul", "Operator", "ReLU", "SiLU"]
