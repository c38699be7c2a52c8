"""`python -m twofold` is the command `twofold`."""

import sys

from twofold.cli import main

sys.exit(main())
