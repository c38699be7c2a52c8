"""Launching ranks with torchrun, and ending all of them when one fails."""
