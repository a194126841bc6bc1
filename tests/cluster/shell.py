"""The command line as a user has it: real processes, real exit codes, real signals."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import harness

import relit
from relit.errors import RunNotFoundError
from relit.handle import JobHandle
from relit.spec import files

RELIT = [sys.executable, "-m", "relit"]


@dataclass(frozen=True, slots=True)
class Said:
    """How a command ended and all that it printed."""

    code: int
    text: str


def relit_cli(*words: str) -> Said:
    """Run `relit ...` to its end."""
    done = subprocess.run(
        [*RELIT, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=harness.WAIT_S,
        check=False,
    )
    return Said(done.returncode, done.stdout)


def start(*words: str) -> subprocess.Popen[str]:
    """Run `relit ...` beside the test; `end` waits for it.

    It hears Ctrl-C, though a shell that starts a test run in the background has it ignored.
    """
    return subprocess.Popen(
        [*RELIT, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def end(process: subprocess.Popen[str]) -> Said:
    """Wait until such a command has ended."""
    text, _ = process.communicate(timeout=harness.WAIT_S)
    return Said(process.returncode, text)


def job_of(store: str, run_id: str) -> JobHandle:
    """The handle of a run that another process is about to submit."""
    deadline_s = time.monotonic() + harness.WAIT_S
    while True:
        try:
            return relit.Client(store=store).get(run_id)
        except RunNotFoundError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(harness.POLL_S)


def write_spec(folder: Path, spec: relit.JobSpec) -> str:
    """The specification as a YAML file; its path."""
    path = folder / f"{spec.run_id}.yaml"
    path.write_text(files.to_yaml(spec))
    return str(path)
