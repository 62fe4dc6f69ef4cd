"""Run the command line: `python -m deferred_init`."""

from __future__ import annotations

import sys

from deferred_init.cli import main

if __name__ == "__main__":
    sys.exit(main())
