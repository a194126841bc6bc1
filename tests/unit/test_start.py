"""What the supervisor and Ray Train's controller load to start a run: neither of them trains."""

from __future__ import annotations

import subprocess
import sys

LOADED = """
import sys
import relit_platform.control.supervisor, relit_platform.worker.start
import relit_platform.ray_train.adapter
sys.exit("torch is loaded" if "torch" in sys.modules else 0)
"""


def test_those_who_do_not_train_do_not_load_torch() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


EARLY = """
import sys
import relit_platform.control.supervisor
sys.exit("Ray Train is loaded" if "ray.train" in sys.modules else 0)
"""


def test_a_supervisor_takes_its_lease_before_it_loads_ray_train() -> None:
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
