"""Search a parallel plan, simulate a training step of it, and run the very same program on real devices (floor 7).

This package is the face of the project: the public functions of Python and the command line.
"""
