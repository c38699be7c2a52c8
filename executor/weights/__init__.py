"""Weights: initial values that are equal on every rank, files, and weights of a module as tensors of a graph."""
