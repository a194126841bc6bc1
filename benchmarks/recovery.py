"""SIGKILL of one rank of two: seconds until the next new step, against stock Ray Train.

    python benchmarks/recovery.py [--kills N]

One local Ray cluster, one machine, and in the same run: how long one process takes to start (a
Ray actor, its imports, model, optimizer and data set, up to its first batch), a relit run that
waits for the replaced worker, stock Ray Train with its controller looking every 0.25 s (as
relit's does) and at its default, and a relit run with a hot spare. `wait` is a relit run with a
standby process, which has loaded when the rank is killed; `cold` is one without. Stock Ray Train
reports a checkpoint at every step. The model, the batches and the place of the kills, in the middle
of a step of rank 1, are the same.

Times are from just before the SIGKILL to the moment when rank 0 has done a step that nobody had
done before. Figures are medians; smallest, largest and steps lost go to stderr and into rows.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOOPS = Path(__file__).resolve().parent / "jobs" / "recovery_loops.py"
EVERY_STEPS = 25  # between kills of ours
EVERY_REPORTS = 3  # between kills of the peer, whose every step waits for its controller
WAIT_S = 300.0
HEALTH_S = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """seconds: kill to next new step, by kill. lost: completed steps done again, by kill."""

    seconds: list[float]
    lost: list[int]

    @property
    def median_s(self) -> float:
        """Of the kills."""
        return statistics.median(self.seconds)

    def say(self, name: str) -> None:
        """On stderr."""
        low, high = min(self.seconds), max(self.seconds)
        print(
            f"{name}: {len(self.seconds)} kills, {low:.2f} / {self.median_s:.2f} / {high:.2f} s"
            f" (min / median / max), steps lost {self.lost}",
            file=sys.stderr,
        )


def outcome(notes: Path) -> Outcome:
    """Read the notes of one run."""
    done: list[tuple[float, int]] = []
    kills: list[tuple[float, int]] = []
    for path in notes.glob("*.txt"):
        for line in path.read_text().splitlines():
            what, step, at_s = line.split()
            (kills if what == "kill" else done).append((float(at_s), int(step)))
    done.sort()
    kills.sort()
    times = Counter(step for _, step in done)
    seconds, lost, before = [], [], 0
    for killed_s, killed in kills:
        seconds.append(next(at_s for at_s, step in done if step >= killed) - killed_s)
        lost.append(sum(times[step] > 1 for step in range(before, killed)))
        before = killed
    return Outcome(seconds, lost)


def ours(root: Path, data: str, kills: int, hold: str) -> Outcome:
    """A relit run whose kills each wait for a "spare", a "standby" process, or "" for neither."""
    import relit

    name, spares = f"wait-{hold or 'cold'}", int(hold == "spare")
    kill_at = [EVERY_STEPS * (number + 1) for number in range(kills)]
    config: dict[str, Any] = {
        "data": data,
        "steps": kill_at[-1] + EVERY_STEPS,
        "kill_at": kill_at,
        "notes": _folder(root / f"notes-{name}"),
        "hold": hold,
        "status": str(root / "store" / "default" / name / "status.json"),
    }
    spec = relit.JobSpec.model_validate(
        {
            "name": name,
            "run_id": name,
            "entry": f"{LOOPS}:ours",
            "config": config,
            "store": str(root / "store"),
            "scaling": {"workers": 2, "spares": spares},
            "recovery": {
                "on_rank_loss": "spare" if spares else "wait",
                "standby_processes": int(hold == "standby"),
            },
            "checkpoint": {"disk_dir": str(root / "disk")},
        }
    )
    status = relit.submit(spec).wait(timeout_s=WAIT_S)
    if status["state"] != "SUCCEEDED":
        raise RuntimeError(f"{name}: {status['state']} {status['reason']}")
    return outcome(Path(config["notes"]))


def peer(root: Path, data: str, kills: int, health_s: str | None) -> Outcome:
    """A stock Ray Train run."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    os.environ.pop(HEALTH_S, None)
    if health_s:
        os.environ[HEALTH_S] = health_s
    name = f"peer-{health_s or 'default'}"
    kill_at = [EVERY_REPORTS * (number + 1) for number in range(kills)]
    config: dict[str, Any] = {
        "data": data,
        "steps": kill_at[-1] + 1,
        "kill_at": kill_at,
        "notes": _folder(root / f"notes-{name}"),
    }
    TorchTrainer(
        loops().peer,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=name,
            storage_path=str(root / "peer"),
            failure_config=FailureConfig(max_failures=-1),
        ),
    ).fit()
    return outcome(Path(config["notes"]))


def loops() -> Any:
    """The module with both loops; workers of the peer get it by value."""
    sys.path.insert(0, str(LOOPS.parent))
    return importlib.import_module(LOOPS.stem)


class Starter:
    """An actor that does what any worker of this job does before its first batch."""

    def started(self, folder: str, data: str) -> str:
        """Blocks for the imports, the model, the optimizer and the data set."""
        import ray.train

        import relit_platform.worker.entry

        sys.path.insert(0, folder)
        loops = importlib.import_module(LOOPS.stem)
        model, optimizer = loops.made()
        rows = loops.TableDataset.open(data).rows_per_block
        parts = ray.train, relit_platform.worker.entry, model, optimizer, rows
        return " ".join(type(part).__name__ for part in parts)


def process_start(number: int, data: str) -> float:
    """Seconds until a fresh process of Ray's could take its first batch."""
    import ray

    # A variable of its own: Ray must not hand out a process that it has started in advance.
    env = {"env_vars": {"RELIT_BENCH_START": str(number)}}
    began_s = time.monotonic()
    actor: Any = ray.remote(Starter).options(num_cpus=1, runtime_env=env).remote()
    ray.get(actor.started.remote(str(LOOPS.parent), data))
    took_s = time.monotonic() - began_s
    ray.kill(actor)
    return took_s


def measure(root: Path, kills: int) -> list[Row]:
    """Everything, on a cluster that is running."""
    # Read when Ray is imported: without it Ray looks for a loopback cluster at the host's address.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray

    from relit import cluster
    from relit.examples import digits

    info = cluster.local_cluster()
    assert info is not None
    cluster.set_auth_mode(local=True)
    ray.init(address=info.gcs_address, log_to_driver=False, logging_level="ERROR")
    ray.cloudpickle.register_pickle_by_value(loops())
    data = str(digits.prepare(root / "digits") / "train.parquet")
    start_s = statistics.median(process_start(number, data) for number in range(kills))
    print(f"one process start: {start_s:.2f} s (median of {kills})", file=sys.stderr)
    runs: dict[str, Callable[[], Outcome]] = {
        "cold": lambda: ours(root, data, kills, ""),
        "wait": lambda: ours(root, data, kills, "standby"),
        "peer": lambda: peer(root, data, kills, "0.25"),
        "spare": lambda: ours(root, data, kills, "spare"),
        "peer, default": lambda: peer(root, data, kills, None),
    }
    found = {}
    for name, run in runs.items():
        found[name] = run()
        found[name].say(name)
    ray.shutdown()
    return rows(found, start_s)


def rows(found: dict[str, Outcome], start_s: float) -> list[Row]:
    """The rows of the table. The bars: a process start + 1 s for wait, 0.5 s for spare."""
    stock = "Ray Train, a checkpoint each step, looks every"
    peers = {"": ("peer", f"{stock} 0.25 s"), "_default": ("peer, default", f"{stock} 2 s")}
    table = []
    for ours_name in ("cold", "wait", "spare"):
        for suffix, (peer_name, text) in peers.items():
            name = f"recovery_{ours_name}_vs_ray_train{suffix}"
            mine, other = found[ours_name], found[peer_name]
            table.append(_row(name, mine.median_s, other.median_s, text, "s", 1.0))
    bars = {"cold": start_s + 1, "wait": start_s + 1, "spare": 0.5}
    for ours_name, bar_s in bars.items():
        name, slowest_s = f"recovery_{ours_name}_slowest", max(found[ours_name].seconds)
        text = "the bar, 0.5 s" if ours_name == "spare" else "a process start + 1 s"
        table.append(_row(name, slowest_s, bar_s, text, "s", 1.0))
    mine_lost = max(lost for name in bars for lost in found[name].lost)
    peer_lost = max(found["peer"].lost + found["peer, default"].lost)
    table.append(_row("recovery_steps_lost", mine_lost, peer_lost, "Ray Train", "steps", None))
    return table


def _row(name: str, mine: float, other: float, peer_name: str, unit: str, floor: Any) -> Row:
    return {
        "name": name,
        "ours": round(mine, 3),
        "peer": round(other, 3),
        "peer_name": peer_name,
        "ratio": round(other / mine, 3) if mine else None,
        "floor": floor,
        "unit": unit,
    }


def _folder(path: Path) -> str:
    path.mkdir()
    return str(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start a cluster of its own, measure, print the rows; 1 if one is below its floor."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=3, help="kills of each of the four runs")
    options = parser.parse_args(arguments)
    from relit import cluster

    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RELIT_STORE"):
        os.environ.pop(name, None)
    with tempfile.TemporaryDirectory(prefix="rb") as folder:
        os.environ["HOME"] = folder
        cluster.ensure_cluster()
        try:
            table = measure(Path(folder), options.kills)
        finally:
            cluster.stop_local_cluster()
    print(json.dumps(table, indent=1))
    return 0 if all(r["floor"] is None or r["ratio"] >= r["floor"] for r in table) else 1


if __name__ == "__main__":
    sys.exit(main())
