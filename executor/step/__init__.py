"""One training step of a rank: the program interpreted with torch."""
