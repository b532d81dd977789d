"""Lets `python -m astrai` stand in for the `astrai` command."""

import sys

from astrai.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
