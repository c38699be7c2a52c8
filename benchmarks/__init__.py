"""Longer proofs and measurements; each module is a command."""
