"""Run every benchmark beside this file and write results/latest.json, a table on the screen.

    make bench                      all of them
    make bench ARGS='gradient_sync' one

A benchmark is a module of this folder with a `__main__` that ends its output with a JSON list of
rows {name, ours, peer, peer_name, ratio, floor, unit} (command and machine are added here when
they are missing). ratio is such that larger is better for us; floor is the least acceptable one.
Exit code 1 if a benchmark fails or a ratio is below its floor.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).resolve().parent
APART = ("run_all",)
LATEST = FOLDER / "results" / "latest.json"
TIMEOUT_S = 900
FIELDS = ("name", "ours", "peer", "peer_name", "ratio", "floor", "unit", "command", "machine")
Row = dict[str, Any]


def benchmark_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in APART)


def machine() -> str:
    """What the figures were measured on; no host name."""
    model = platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    load = f"load {os.getloadavg()[0]:.1f} before"
    return f"{os.cpu_count()} x {model}, {platform.system()}, {load}"


def run_one(name: str, machine_text: str) -> list[Row]:
    """Rows of one benchmark, run as a process of its own; its stderr goes to ours."""
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
    if done.returncode not in (0, 1):  # 1: below a floor, and the rows say which
        raise RuntimeError(f"{name} ended with exit code {done.returncode}")
    rows = parse_rows(done.stdout)
    said = f"python benchmarks/{name}.py"
    return [{"command": said, "machine": machine_text} | row for row in rows]


def parse_rows(output: str) -> list[Row]:
    """The JSON list that ends the output; ValueError if there is none or a row lacks a field."""
    start = max(output.rfind("\n["), 0)
    rows: list[Row] = json.loads(output[start:] or "null")
    for row in rows:
        missing = set(FIELDS[:7]) - set(row)
        if missing:
            raise ValueError(f"row {row.get('name')!r} lacks {', '.join(sorted(missing))}")
    return rows


def table_of(rows: Sequence[Row]) -> Table:
    peers = dict.fromkeys(f"{row['name']}: {row['peer_name']}" for row in rows)
    table = Table(
        title="relit against its peers",
        caption="\n".join(["Peers:", *peers]),
        caption_justify="left",
        box=SIMPLE,
    )
    for title in ("benchmark", "ours", "peer", "unit", "ratio", "floor", ""):
        table.add_column(
            title,
            justify="left" if title in ("benchmark", "unit", "") else "right",
            no_wrap=title == "benchmark",
        )
    for row in rows:
        table.add_row(
            str(row["name"]),
            _figure(row["ours"]),
            _figure(row["peer"]),
            str(row["unit"]),
            _figure(row["ratio"]),
            _figure(row["floor"]),
            "below floor" if is_below(row) else "",
        )
    return table


def is_below(row: Row) -> bool:
    return row["floor"] is not None and row["ratio"] is not None and row["ratio"] < row["floor"]


def _figure(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def main(names: Sequence[str]) -> int:
    known = benchmark_names()
    unknown = sorted(set(names) - set(known))
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    failed = []
    machine_text = machine()
    for name in names or known:
        print(f"running {name} ...", file=sys.stderr)
        try:
            rows += run_one(name, machine_text)
        except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
            failed.append(name)
            print(f"{name}: {error}", file=sys.stderr)
    LATEST.parent.mkdir(exist_ok=True)
    ordered = [{field: row[field] for field in FIELDS} for row in rows]
    LATEST.write_text(json.dumps(ordered, indent=1) + "\n")
    Console().print(table_of(rows))
    return 1 if failed or any(is_below(row) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
