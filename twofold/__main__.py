"""`python -m twofold` is the command `twofold`."""

import os
import sys

from twofold.cli import main

try:
    sys.exit(main())
except BrokenPipeError:  # who reads has gone, as `head` does; nothing is left to say
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)
