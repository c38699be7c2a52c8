"""Tables of measurements as people publish them, read into configurations that can be predicted."""
