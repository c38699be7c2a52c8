"""The commands, one function each; arguments are flags."""
