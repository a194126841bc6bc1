"""The run's state on the Ray job's own card: its metadata and message in Ray's dashboard.

Ray has no call that changes a job's metadata after the submit, so this writes the job's record in
Ray's key-value store, as Ray's own dashboard does. That record is an internal of Ray 2.60:
whatever is unexpected about it turns the card off for good, and nothing else happens.
"""

from __future__ import annotations

import json

_KEY = "_ray_internal_job_info_{}"
_NAMESPACE = b"job"
_LIVE = "RUNNING"  # at other times Ray itself writes the record


class JobCard:
    """Shows one Ray job's run. Used in the job's driver, after ray.init; a small call a change."""

    def __init__(self, submission_id: str) -> None:
        self._key = _KEY.format(submission_id).encode()
        self._shown: tuple[str, str] | None = None
        self._on = bool(submission_id)

    def show(self, state: str, message: str) -> None:
        """Put the run's state into the metadata and a sentence into the message."""
        if not self._on or (state, message) == self._shown:
            return
        try:
            self._on = self._write(state, message)
        except Exception:
            # An internal of Ray may fail in any way; the card is a convenience.
            self._on = False
        self._shown = (state, message)

    def _write(self, state: str, message: str) -> bool:
        from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

        record = json.loads(_internal_kv_get(self._key, namespace=_NAMESPACE))
        if record["status"] != _LIVE:
            return False
        record["metadata"] = {**(record["metadata"] or {}), "state": state}
        record["message"] = message
        _internal_kv_put(self._key, json.dumps(record).encode(), True, namespace=_NAMESPACE)
        return True
