"""`python -m roundelay` is the same as `roundelay`."""

import sys

from roundelay.cli import main

if __name__ == "__main__":
    sys.exit(main())
