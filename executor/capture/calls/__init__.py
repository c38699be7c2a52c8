"""Recorded calls, rewritten to calls that can be translated."""
