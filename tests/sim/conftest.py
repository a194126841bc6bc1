"""Support modules of the simulator are importable by name, as in tests/unit."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
