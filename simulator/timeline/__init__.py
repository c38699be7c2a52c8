"""Analysis of timelines: actions and groups of ranks, composition, the critical path, memory over time."""
