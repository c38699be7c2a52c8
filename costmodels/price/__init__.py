"""The price of every instruction: seconds from shapes, bytes and a machine."""
