"""What holds for every test: one thread per library, and no look-ups beyond this machine."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
