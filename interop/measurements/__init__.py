"""Reads published tables of measurements into configurations that can be predicted."""
