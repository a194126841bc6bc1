"""Names inside a run directory, the same on every tier and store.

    <experiment>/<run_id>/                    = RunConfig.run_key
      config.yaml               as submitted             config.resolved.json   RunConfig
      run.json                  owner, versions, git     code/<sha>.zip         the code that runs
      lease/<epoch>.json        put-if-absent; the highest is in force
      control/<n>-<verb>.json   commands from clients    status.json            newest live state
  attempts/<n>.json         one for each submit and resume, created once
      events/<epoch>-<n>.jsonl  closed segments          incidents.jsonl parts: incidents/<n>.json
      metrics/<epoch>-<n>.jsonl committed rows only
      tables/<name>/<step>.jsonl      artifacts/<name>   logs/<worker>/<n>.log
      checkpoints/log/<seq>.json      numbered commit log (object tier)
      pins/<step>.json          retention leaves this step alone (object tier)
      checkpoints/steps/<step>/g<generation>/   rank-00000.safetensors, rank-00000.json, and
                                manifest.json: without it the step does not exist
      initial_state.json        which names a run began with that had no checkpoint of its own
      result.json               written last: the commit of the whole run

The disk tier of a node uses `checkpoints/steps/...` below `<disk_dir>/<run_id>/`, byte for byte
the same files.
"""

from __future__ import annotations

CONFIG = "config.yaml"
RESOLVED = "config.resolved.json"
RUN = "run.json"
STATUS = "status.json"
RESULT = "result.json"
INITIAL = "initial_state.json"
ATTEMPT_PREFIX = "attempts/"
LOG_PREFIX = "checkpoints/log/"
STEPS_PREFIX = "checkpoints/steps/"
PIN_PREFIX = "pins/"


def step_prefix(step: int, generation: int) -> str:
    """The folder of one step's files, with a trailing slash."""
    return f"{STEPS_PREFIX}{step:012d}/g{generation:06d}/"


def shard_key(step: int, generation: int, rank: int) -> str:
    """A rank's safetensors image of a step."""
    return f"{step_prefix(step, generation)}rank-{rank:05d}.safetensors"


def extras_key(step: int, generation: int, rank: int) -> str:
    """A rank's JSON beside its image."""
    return f"{step_prefix(step, generation)}rank-{rank:05d}.json"


def manifest_key(step: int, generation: int) -> str:
    """The manifest: published last; without it the step does not exist."""
    return f"{step_prefix(step, generation)}manifest.json"


def parse_step_prefix(key: str) -> tuple[int, int] | None:
    """(step, generation) of any key below a folder that `step_prefix` names, else None."""
    if not key.startswith(STEPS_PREFIX):
        return None
    parts = key[len(STEPS_PREFIX) :].split("/")
    if len(parts) < 2 or not parts[0].isdecimal() or not parts[1][1:].isdecimal():
        return None
    step, generation = int(parts[0]), int(parts[1][1:])
    # "7" is not "000000000007": what another name leads to is not ours.
    return (step, generation) if key.startswith(step_prefix(step, generation)) else None


def log_key(seq: int) -> str:
    """Slot `seq` of the commit log."""
    return f"{LOG_PREFIX}{seq:020d}.json"


def pin_key(step: int) -> str:
    """The pin of a step: while it is there, no retention takes the step."""
    return f"{PIN_PREFIX}{step:012d}.json"


def lease_key(epoch: int) -> str:
    """The lease of one supervisor life."""
    return f"lease/{epoch:08d}.json"


def event_key(epoch: int, segment: int) -> str:
    """A closed segment of the event log."""
    return f"events/{epoch:08d}-{segment:06d}.jsonl"


def metric_key(epoch: int, segment: int) -> str:
    """A closed segment of committed metric rows."""
    return f"metrics/{epoch:08d}-{segment:06d}.jsonl"


def incident_key(number: int) -> str:
    """One recovery's record."""
    return f"incidents/{number:06d}.json"


def command_key(number: int, verb: str) -> str:
    """A client's command; acknowledged by an event that carries this key."""
    return f"control/{number:06d}-{verb}.json"


def attempt_key(number: int) -> str:
    """One submit or resume: {n, submission_id, at_s, owner, changes, allow}."""
    return f"{ATTEMPT_PREFIX}{number:06d}.json"


def index_key(run_id: str) -> str:
    """At the root of a store, beside the experiments: where to find a run by its id."""
    return f"index/{run_id}.json"


def checked_name(name: str) -> str:
    """A user's name of a table or an artifact; ValueError if it would leave its folder."""
    parts = name.split("/")
    if not name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"name {name!r} must be a relative path without '.' or '..'")
    return name
