"""The double recursive search for a plan (floor 4): one recursion over devices, one over the graph.

The result explains itself: the alternatives of each operator with their costs, the reason of each rejected plan, and
the gap to a lower bound.

It imports `plans`, `costmodels` and `simulator` only.
"""
