"""What the Ray job runs: `python -m relit.entrypoint --store URL --run-key KEY --job ID`.

It makes sure that the run has its supervisor, then prints the run's events until the run is over;
its exit code is the run's. Killing it harms nothing: the supervisor is detached. As long as it
lives it makes a new supervisor when the run has none, and turns SIGTERM and SIGINT (`ray job stop`,
the dashboard's button, Ctrl-C) into a stop at the next boundary.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import Any

from relit.commands import send_command
from relit.errors import USAGE, run_exit_code, state_exit_code
from relit.job_card import JobCard
from relit.reading import RunReader
from relit.run_writer import to_json
from relit.spec.secret_guard import Redactor
from relit.wording import event_line, state_line
from relit_storage.errors import StoreError
from relit_storage.run import layout
from relit_storage.stores.opening import open_store

_POLL_S = 0.5
_LOOK_S = 5.0
_SETTLE_S = 60.0  # for a new supervisor to take the lease or to be refused
_NAMESPACE = "relit"


class Entrypoint:
    """One life of the job's driver. `run` blocks until the run is over."""

    def __init__(self, store_url: str, run_key: str, submission_id: str = "") -> None:
        self._store_url = store_url
        self._run_key = run_key
        self._reader = RunReader(open_store(store_url), run_key)
        self._follower = self._reader.follower()
        self._redact = Redactor.from_environment()
        self._card = JobCard(submission_id)
        self._stop_signal = ""
        self._stop_sent = False
        self._actor: Any = None

    def run(self) -> int:
        """The run's exit code; 2 if another driver holds the run."""
        _connect()
        for number in (signal.SIGTERM, signal.SIGINT):  # after ray.init, which sets its own
            signal.signal(number, self._on_signal)
        self._skip_earlier_attempts()
        refused = self._ensure_supervisor()
        if refused and not self._reader.result():
            return self._refused(refused)
        look_s = time.monotonic() + _LOOK_S
        while True:
            try:
                if self._over():
                    return self._outcome()
                self._pass_stop_on()
                if time.monotonic() > look_s:
                    look_s = time.monotonic() + _LOOK_S
                    self._show()
                    if not self._reader.is_driven():
                        self._ensure_supervisor()
            except StoreError as error:
                self._say(f"the store is away, trying again: {error}")
            time.sleep(_POLL_S)

    def _on_signal(self, number: int, frame: object) -> None:
        self._stop_signal = signal.Signals(number).name

    def _over(self) -> bool:
        over = self._reader.result() is not None  # before reading: the last events come too
        for event in self._follower.poll():
            self._say(event_line(event))
        return over

    def _skip_earlier_attempts(self) -> None:
        """A resumed run's log begins with the resume."""
        attempts = len(self._reader.attempts())
        if attempts > 1:
            earlier = len(self._follower.poll())
            self._say(f"attempt {attempts} of {self._reader.run_id}; {earlier} earlier events")

    def _show(self) -> dict[str, Any]:
        status = self._reader.status()
        self._card.show(str(status["state"]), self._redact.text(state_line(status)))
        return status

    def _outcome(self) -> int:
        status = self._show()
        self._say(state_line(status))
        return run_exit_code(status)

    def _pass_stop_on(self) -> None:
        if not self._stop_signal or self._stop_sent:
            return
        reason = f"the job received {self._stop_signal}"
        self._say(f"{reason}: stopping at the next boundary")
        send_command(self._reader.store, "stop", reason, time.time())
        self._stop_sent = True
        self._actor.stop.remote(reason)

    def _ensure_supervisor(self) -> str:
        """Get or make the supervisor; why it may not run, or ''. A call that fails says ''."""
        import ray

        from relit_platform.control.supervisor import get_or_create_supervisor

        try:
            self._actor = get_or_create_supervisor(self._store_url, self._run_key)
            return str(ray.get(self._actor.refused.remote(_SETTLE_S), timeout=_SETTLE_S + 10))
        except ray.exceptions.RayError as error:
            self._say(f"the supervisor does not answer yet: {error}")
            return ""

    def _refused(self, why: str) -> int:
        """A run that another driver holds is left alone; one that cannot start says so for good."""
        self._say(f"refused: {why}")
        if self._reader.is_driven():
            return USAGE
        result = {
            "v": 1,
            "run_id": self._reader.run_id,
            "state": "FAILED",
            "reason": f"it could not start: {self._redact.text(why)[-4000:]}",
            "finished_at_s": time.time(),
        }
        self._reader.store.put_if_absent(layout.RESULT, to_json(result))
        return state_exit_code("FAILED")

    def _say(self, text: str) -> None:
        print(self._redact.text(text), flush=True)


def _connect() -> None:
    """Join the cluster that runs this job; Ray's own settings come from its environment."""
    import ray

    ray.init(
        address=os.environ.get("RAY_ADDRESS") or "auto",
        namespace=_NAMESPACE,
        log_to_driver=False,  # ranks write into the run directory; Ray would repeat it all here
        logging_level="WARNING",
    )


def main(arguments: list[str] | None = None) -> int:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(prog="relit.entrypoint", description=__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--run-key", required=True)
    parser.add_argument("--job", default="", help="the Ray job's submission id")
    options = parser.parse_args(arguments)
    return Entrypoint(options.store, options.run_key, options.job).run()


if __name__ == "__main__":
    sys.exit(main())
