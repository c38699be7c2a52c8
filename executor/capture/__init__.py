"""Capture: the operator graph of a torch module."""
