"""Calibration: measures this machine, fits its model and writes its machine file."""
