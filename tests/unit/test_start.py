"""What the supervisor and Ray Train's controller load to start a run: neither of them trains."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from relit_platform.worker.start import uncollected

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


RANK = """
import sys
import relit_platform.ray_train.backend
sys.exit("the trainer is loaded" if "ray.train.v2.api.data_parallel_trainer" in sys.modules else 0)
"""


def test_a_rank_does_not_load_the_trainer_with_its_backend() -> None:
    done = subprocess.run([sys.executable, "-c", RANK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_supervisors_second_thread_loads_no_half_of_ray_train() -> None:
    """Another thread imports it at that time, and its modules import each other in circles."""
    code = (
        "import sys; import relit_platform.control.pump, relit_platform.control.supervisor;"
        "import relit_platform.ray_train.groups; assert 'ray.train' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Made:
    """Can be told apart in what the collector looks at."""


def test_nothing_is_collected_during_imports_and_what_they_made_is_left_alone() -> None:
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    try:
        with uncollected():
            assert not gc.isenabled()
            made = Made()
            made.itself = made  # type: ignore[attr-defined]
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
        assert made not in [found for found in gc.get_objects() if isinstance(found, Made)]
    finally:
        gc.unfreeze()


def test_the_collector_is_on_again_after_an_import_that_failed() -> None:
    try:
        with pytest.raises(ImportError), uncollected():
            raise ImportError
        assert gc.isenabled()
    finally:
        gc.unfreeze()
