"""From measured points to a machine file."""
