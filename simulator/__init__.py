"""A program in virtual time (floor 3).

The SimPy engine is the reference and takes everything: contention, stragglers, jitter, shared links. The fast evaluator
serves the search. Inside both, time is integer picoseconds, so that where both apply they agree exactly.

It imports `plans` and `costmodels` only.
"""
