"""One wording for events and states, the same in the job log and on the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_MAX_DATA = 240
_FOR_MACHINES = frozenset({"node_id", "completed_step", "value_json"})


def event_line(event: Mapping[str, Any]) -> str:
    """`  12.3 s  g2  step 500  kind  what`: a closed incident is its headline sentence."""
    seconds = event.get("t")
    when = f"{float(seconds):8.1f} s" if seconds is not None else " " * 10
    generation = f"g{event['gen']}" if event.get("gen") else ""
    step = f"step {event['step']}" if event.get("step") is not None else ""
    level = "" if event.get("level", "info") == "info" else f"{str(event['level']).upper()} "
    return f"{when}  {generation:<4} {step:<11} {level}{event.get('kind', '?')}{_what(event)}"


def _what(event: Mapping[str, Any]) -> str:
    data = event.get("data") or {}
    if data.get("headline"):
        return f": {data['headline']}"
    parts = [f"{key}={_value(value)}" for key, value in data.items() if _is_news(key, value)]
    text = " ".join(parts)
    return f"  {text[:_MAX_DATA]}" if text else ""


def _is_news(key: str, value: Any) -> bool:
    """Instants, long ids and tables are for machines: --json has them."""
    if value in (None, "", [], {}) or key.endswith("at_s") or key in _FOR_MACHINES:
        return False
    return not (isinstance(value, list) and isinstance(value[0], (dict, list)))


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def state_line(status: Mapping[str, Any]) -> str:
    """`run STATE at step a/b, loss x (reason)`."""
    text = f"{status.get('run_id', '?')} {status['state']}"
    if status.get("step") is not None:
        total = f"/{status['total_steps']}" if status.get("total_steps") else ""
        text += f" at step {status['step']}{total}"
    if isinstance(status.get("loss"), (int, float)):
        text += f", loss {status['loss']:.4f}"
    return f"{text} ({status['reason']})" if status.get("reason") else text


def committed_line(status: Mapping[str, Any]) -> str:
    """`memory 512, disk 500, object 400`: the newest committed step of each tier."""
    committed = status.get("committed") or {}
    tiers = [tier for tier in ("memory", "disk", "object") if committed.get(tier) is not None]
    return ", ".join(f"{tier} {committed[tier]}" for tier in tiers) or "none yet"


def spacing_line(status: Mapping[str, Any]) -> str:
    """`disk every 12.5 s, object every 75 s`: what `auto` has found; "" where it has nothing."""
    spacing = status.get("spacing") or {}
    found = [(tier, spacing.get(f"{tier}_every_s")) for tier in ("disk", "object")]
    parts = [f"{tier} every {s:.3g} s" for tier, s in found if isinstance(s, (int, float)) and s]
    return ", ".join(parts)
