"""``python -m lightning_resilience`` is the console command."""

import sys

from lightning_resilience.cli import main

if __name__ == "__main__":
    sys.exit(main())
