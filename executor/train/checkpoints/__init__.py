"""Checkpoints of a run: written while it trains, checked, read by any plan of the model, exported."""
