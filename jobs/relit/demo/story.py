"""The demo from beginning to end: prepare, train through two SIGKILLs, compare with the twin."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

import relit
from relit.cluster import local_cluster
from relit.demo import twin
from relit.demo.compare import compare, losses_of
from relit.demo.data import DemoData, prepare
from relit.demo.display import RunDisplay
from relit.demo.faults import Fault, plan_faults
from relit.demo.report import DemoReport
from relit.demo.watching import Watched, Watcher, watch

HOME = "~/.relit/demo"  # prepared shards and the twin's losses; safe to delete
EXPERIMENT = "demo"
BATCH_PER_WORKER = 16
PATHS = ("data", "val_data")  # left out of the twin's key: the fingerprint stands for them


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The options of `relit demo`."""

    steps: int = 1500
    workers: int = 2
    faults: bool = True
    store: str | None = None


def run_demo(options: DemoOptions, console: Console) -> DemoReport:
    """Do all of it on a local cluster. Blocks for minutes; Ctrl-C stops the run and reports."""
    started_s = time.monotonic()
    home = Path(HOME).expanduser()
    data = prepare(home / "data", lambda text: console.print(Text(text)))
    spec = make_spec(options, data, name="gpt-lm-stdlib")
    faults = plan_faults(options.steps, options.workers) if options.faults else ()
    title = "with failures" if faults else "undisturbed"
    run, seen = _train(spec, options, console, title, faults)
    undisturbed, comparison = None, None
    if seen.state == "SUCCEEDED" and faults:
        undisturbed = _undisturbed(options, data, home / "twins", console)
        if undisturbed.losses is not None:
            comparison = compare(losses_of(run.metrics()), undisturbed.losses, options.steps)
    return DemoReport(
        run_id=run.id,
        run_directory=run.path,
        state=seen.state,
        reason=seen.reason,
        step=seen.step,
        steps=options.steps,
        seconds=time.monotonic() - started_s,
        value=seen.value,
        kills=tuple(seen.kills),
        planned_kills=len(faults),
        incidents=tuple(run.incidents()),
        comparison=comparison,
        twin=undisturbed.source if undisturbed else None,
        twin_state=undisturbed.state if undisturbed else "SUCCEEDED",
        store=options.store,
    )


def make_spec(options: DemoOptions, data: DemoData, name: str) -> relit.JobSpec:
    """The job of the demo; the twin differs from it by its name only."""
    fields: dict[str, Any] = {
        "name": name,
        "experiment": EXPERIMENT,
        "entry": "relit.examples.gpt:train",
        "config": {
            "data": str(data.train),
            "val_data": str(data.held_out),
            "steps": options.steps,
            "global_batch": BATCH_PER_WORKER * options.workers,
        },
        "scaling": {"workers": options.workers},
        "env": {"env_vars": {"OMP_NUM_THREADS": "1"}},
    }
    return relit.JobSpec.parse(fields, "the demo")


def _train(
    spec: relit.JobSpec,
    options: DemoOptions,
    console: Console,
    title: str,
    faults: Sequence[Fault],
) -> tuple[relit.JobHandle, Watched]:
    with RunDisplay(console, title, options.steps) as display:
        if local_cluster() is None:
            display.say("Starting a local Ray cluster, reachable from this machine only")
        run = relit.Client(store=options.store).submit(spec)
        display.say(f"Submitted {run.id}: {options.workers} ranks, {options.steps} steps")
        cluster = local_cluster()
        if cluster is not None:
            display.say(f"Ray's dashboard: {cluster.dashboard_url}")
        return run, watch(run, Watcher(display, faults), display)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Undisturbed:
    """The twin's losses (None if it did not succeed), where they are from, how it ended."""

    losses: dict[int, float] | None
    source: str
    state: str = "SUCCEEDED"


def _undisturbed(
    options: DemoOptions, data: DemoData, folder: Path, console: Console
) -> _Undisturbed:
    spec = make_spec(options, data, name="gpt-lm-stdlib-twin")
    config = {key: value for key, value in spec.config.items() if key not in PATHS}
    config["seed"] = spec.seed
    key = twin.twin_key(config, options.workers, data.fingerprint)
    cached = twin.load_losses(folder, key)
    if cached is not None:
        return _Undisturbed(losses=cached, source=f"cached in {folder / key}.json")
    run, seen = _train(spec, options, console, "undisturbed twin", ())
    if seen.state != "SUCCEEDED":
        return _Undisturbed(losses=None, source=f"run {run.id}", state=seen.state)
    losses = losses_of(run.metrics())
    if not run.incidents():  # what was disturbed after all is compared, but never kept as a twin
        twin.save_losses(folder, key, losses, run.id)
    return _Undisturbed(losses=losses, source=f"run {run.id}")
