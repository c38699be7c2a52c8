"""Trains a program on one rank: the loop, evaluations between steps, metrics, and the result."""
