"""The reference engine: a program in virtual time, event by event, with SimPy."""
