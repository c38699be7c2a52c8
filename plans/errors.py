"""The one base exception of twofold."""


class TwofoldError(ValueError):
    """Bad input, said once: the message names the user's own input and the way out (exit code 2)."""
