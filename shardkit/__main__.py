"""`python -m shardkit` runs the `shardkit` command."""

import sys

from shardkit.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
