"""What-if studies: changed machines, stragglers, failures, several jobs."""
