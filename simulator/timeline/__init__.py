"""What a timeline says: actions and groups of ranks, where time goes, the critical path, memory over time."""
