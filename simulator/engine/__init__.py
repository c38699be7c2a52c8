"""The reference engine: runs a program in virtual time, event by event, with SimPy."""
