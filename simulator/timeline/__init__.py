"""What a timeline says: where time goes, the critical path, memory over time."""
