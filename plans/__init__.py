"""Layouts, graphs, plans, schedules, programs and lowering (floor 1); all other packages build on these.

Layouts of tensors on a mesh of devices, the graph of operators, the plan that spreads it over devices, the schedule of
micro-batches, the program that a plan lowers to, and the timeline that either interpreter of a program returns.
Nothing here runs or prices anything: where a lower floor needs a price it takes a callable.

It imports numpy and msgspec and no other package of this project.
"""
