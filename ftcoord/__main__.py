"""`python -m ftcoord` is the command `ftcoord`."""

import sys

from ftcoord.cli import main

if __name__ == "__main__":
    sys.exit(main())
