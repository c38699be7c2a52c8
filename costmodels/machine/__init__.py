"""The machine: devices, memory, links and host costs, as a value and as a file."""
