"""`python -m relit` and the `relit` command."""

from __future__ import annotations

import sys

from relit.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
