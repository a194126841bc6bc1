"""Damage to the files of a checkpoint, drawn from a seed: what disks, copies and people do.

`apply` draws one kind of damage and the files it falls on, does it, and answers what it has
touched. Kinds that only add something (a stray copy, say) touch nothing: the step stays whole.
What an earlier damage has made a link of is left alone: nothing is written outside the run.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPARSE_BYTES = 64 << 30  # reading it whole would not fit into the memory that the test allows
DEEP = b"[" * 100_000


class Evil:
    """Unpickled, it would leave a file: the sign that a checkpoint has run code."""

    def __init__(self, sign: str) -> None:
        self.sign = sign

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.sign,)


@dataclass(frozen=True)
class Victim:
    """One file of a checkpoint: which tier and which steps it matters to."""

    path: Path
    tier: str
    steps: tuple[int, ...]

    @property
    def kind(self) -> str:
        """image, extras, record, manifest or log."""
        if self.path.parent.name == "log":
            return "log"
        kinds = {".safetensors": "image", ".record": "record", ".json": "extras"}
        return "manifest" if self.path.name == "manifest.json" else kinds[self.path.suffix]


def victims(root: Path) -> list[Victim]:
    """Every file of the checkpoints below a run's root, sorted. Log slot 1 is of no step."""
    found = []
    for path in sorted(root.rglob("*")):
        if "checkpoints" not in path.parts or not path.is_file():
            continue
        tier = "object" if "store" in path.parts else "disk"
        if path.parent.name == "log":
            record = json.loads(path.read_bytes())
            steps = (record["step"],) if record["kind"] == "commit" else ()
        else:
            steps = (int(path.parent.parent.name),)
        found.append(Victim(path, tier, steps))
    return found


def apply(files: list[Victim], rng: random.Random) -> tuple[str, set[tuple[str, int]]]:
    """Do one damage; what it was, and the (tier, step) that may have lost something by it.

    files: the victims of the undamaged run.
    """
    name = rng.choice(list(KINDS))
    files = [v for v in files if _untouched(v)]
    if not [v for v in files if v.kind not in ("log", "image")]:
        return "nothing is left to damage", set()
    hit = KINDS[name](files, rng)
    told = ", ".join(f"{v.tier} {v.steps} {v.path.name}" for v in hit)
    return f"{name}: {told}", {(v.tier, step) for v in hit for step in v.steps}


def _untouched(victim: Victim) -> bool:
    path = victim.path
    links = path.is_symlink() or path.parent.is_symlink() or path.parent.parent.is_symlink()
    return not links and path.is_file() and 0 < path.stat().st_size < SPARSE_BYTES


# ---- bytes ----


def _flip(files: list[Victim], rng: random.Random) -> list[Victim]:
    victim = rng.choice(files)
    data = bytearray(victim.path.read_bytes())
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    victim.path.write_bytes(data)
    return [victim]


def _truncate(files: list[Victim], rng: random.Random) -> list[Victim]:
    victim = rng.choice(files)
    size = victim.path.stat().st_size
    os.truncate(victim.path, rng.choice((0, 1, 7, 8, size // 2, size - 1, rng.randrange(size))))
    return [victim]


def _append(files: list[Victim], rng: random.Random) -> list[Victim]:
    victim = rng.choice(files)
    with victim.path.open("ab") as file:
        file.write(rng.choice((b"\0", b"\n", b" " * 100, rng.randbytes(50), b"[" * 5000)))
    return [victim]


def _sparse(files: list[Victim], rng: random.Random) -> list[Victim]:
    victim = rng.choice([v for v in files if v.kind != "log"])
    os.truncate(victim.path, SPARSE_BYTES)
    return [victim]


def _zeroes(files: list[Victim], rng: random.Random) -> list[Victim]:
    """A hole where a block was never written, at the same size."""
    victim = rng.choice(files)
    data = bytearray(victim.path.read_bytes())
    begin = rng.randrange(len(data))
    data[begin : begin + 4096] = bytes(len(data[begin : begin + 4096]))
    victim.path.write_bytes(data)
    return [victim]


def _garbage(files: list[Victim], rng: random.Random) -> list[Victim]:
    victim = rng.choice(files)
    garbage = (rng.randbytes(200), b"", b"null", b"[]", b"{}", b"1", b'"x"', DEEP, b"\xff\xfe{")
    victim.path.write_bytes(rng.choice(garbage))
    return [victim]


def _pickle(files: list[Victim], rng: random.Random) -> list[Victim]:
    victim = rng.choice(files)
    victim.path.write_bytes(pickle.dumps(Evil(str(_root_of(victim) / "EXECUTED"))))
    return [victim]


def _root_of(victim: Victim) -> Path:
    parts = victim.path.parts
    return Path(*parts[: parts.index("store" if victim.tier == "object" else "disk")])


# ---- files ----


def _delete(files: list[Victim], rng: random.Random) -> list[Victim]:
    victim = rng.choice(files)
    victim.path.unlink()
    return [victim]


def _swap(files: list[Victim], rng: random.Random) -> list[Victim]:
    """Two files change places: between ranks, steps, tiers, kinds."""
    one = rng.choice(files)
    same = [v for v in files if v.kind == one.kind and v != one]
    other = rng.choice(same if same and rng.random() < 0.8 else [v for v in files if v != one])
    first, second = one.path.read_bytes(), other.path.read_bytes()
    one.path.write_bytes(second)
    other.path.write_bytes(first)
    return [one, other]


def _overwrite(files: list[Victim], rng: random.Random) -> list[Victim]:
    """A file gets the content of another: a whole step, too, that of the other step."""
    one = rng.choice(files)
    if rng.random() < 0.3:
        folder = [v for v in files if v.path.parent == one.path.parent and v.kind != "log"]
        others = [v for v in files if v.tier == one.tier and v.steps != one.steps]
        donors = {v.path.name: v for v in others}
        for victim in folder:
            if victim.path.name in donors:
                shutil.copyfile(donors[victim.path.name].path, victim.path)
        return folder
    other = rng.choice([v for v in files if v.kind == one.kind])
    one.path.write_bytes(other.path.read_bytes())
    return [one]


def _stray(files: list[Victim], rng: random.Random) -> list[Victim]:
    """Copies under other names, folders that are no steps: nothing of a step is touched."""
    one = rng.choice([v for v in files if v.kind != "log"])
    steps = one.path.parent.parent.parent
    stray = rng.choice(
        (
            one.path.with_name("rank-00007" + one.path.suffix),
            one.path.with_name(one.path.name + ".bak"),
            one.path.with_name(f".{one.path.name}.0a0a0a0a.tmp"),
            steps / "000000000099" / "g000001" / "rank-00000.safetensors",
            steps / "000000000099" / "g000009" / one.path.name,
            steps / "99" / "g1" / one.path.name,
            steps / "\u00b2" / "g\u00b2" / one.path.name,
            steps / "latest" / one.path.name,
        )
    )
    stray.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(one.path, stray)
    return []


def _stray_slot(files: list[Victim], rng: random.Random) -> list[Victim]:
    """Files in the folder of the log that are no slots, or not theirs."""
    logs = [v for v in files if v.kind == "log"]
    if not logs:
        return []
    one = rng.choice(logs)
    name = rng.choice(
        ("4", "00000000000000000009.json", "x.json", "\u00b2.json", "9" * 20 + ".json")
    )
    shutil.copyfile(one.path, one.path.with_name(name))
    return []


def _not_a_file(files: list[Victim], rng: random.Random) -> list[Victim]:
    victim = rng.choice(files)
    same = [v.path for v in files if v.kind == victim.kind and v != victim] or [victim.path]
    data = victim.path.read_bytes()
    victim.path.unlink()
    how = rng.randrange(7)
    if how == 0:
        os.mkfifo(victim.path)
    elif how == 1:
        victim.path.mkdir()
    elif how == 2:
        victim.path.mkdir()
        (victim.path / "inner").write_bytes(data)
    else:
        targets = ("/dev/zero", "/dev/null", victim.path.name, str(rng.choice(same)))
        victim.path.symlink_to(targets[how - 3])
    return [victim]


def _no_folder(files: list[Victim], rng: random.Random) -> list[Victim]:
    """A step's folder is a file, a loop of links, or gone."""
    one = rng.choice([v for v in files if v.kind != "log"])
    folder = rng.choice((one.path.parent, one.path.parent.parent))
    shutil.rmtree(folder)
    how = rng.randrange(3)
    if how == 0:
        folder.write_bytes(b"x")
    elif how == 1:
        folder.symlink_to(folder.name)
    return [one]


# ---- JSON ----

HOSTILE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2,
    20,
    2**31,
    10**9,
    2**63,
    10**30,
    10**4000,
    1.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "F32",
    "x" * 5000,
    "../../../../etc/passwd",
    "/etc/passwd",
    "checkpoints/steps/000000000020/g000001/rank-00000.safetensors",
    "\ud800",
    "\x00",
    [],
    {},
    [[]],
    [2**62, 2**62],
    [10**4000, 10**4000],
    [0, 2**63],
    [1] * 1000,
    {"__class__": "os.system"},
)


def edit(value: Any, rng: random.Random) -> Any:
    """A JSON value with one place changed: replaced, removed, doubled, renamed, exchanged."""
    place: Any = {"": value}
    key: Any = ""
    while isinstance(place[key], dict | list) and place[key] and rng.random() < 0.85:
        place = place[key]
        key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
    if key == "":
        return rng.choice(HOSTILE)
    how = rng.randrange(6)
    if how == 0:
        del place[key]
    elif how == 1 and isinstance(place, list):
        place.insert(key, place[key])
    elif how == 2 and isinstance(place, dict):
        place[rng.choice(("", "x", "v", "__metadata__", "../x"))] = place.pop(key)
    elif how == 3:
        other = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
        place[key], place[other] = place[other], place[key]
    elif how == 4 and type(place[key]) is int:
        place[key] += rng.choice((-1, 1, 10, 2**40))
    else:
        place[key] = rng.choice(HOSTILE)
    return value


def _edit_json(files: list[Victim], rng: random.Random) -> list[Victim]:
    """Re-written as relit writes it, so that it is not the form that is refused."""
    kinds = ("manifest", "record", "extras", "log")
    victim = rng.choice([v for v in files if v.kind == rng.choice(kinds)] or files[-1:])
    if victim.kind == "image":
        return _flip([victim], rng)
    try:
        value = json.loads(victim.path.read_bytes())
    except (ValueError, RecursionError):  # an earlier damage was here
        return _flip([victim], rng)
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = edit(value, rng)
    separators = (",", ":") if victim.kind in ("manifest", "log") else None
    text = json.dumps(value, sort_keys=True, separators=separators)
    victim.path.write_bytes(text.encode())
    return [victim]


def _raw_json(files: list[Victim], rng: random.Random) -> list[Victim]:
    """What no JSON library would write: depth, doubled names, numbers without end."""
    victim = rng.choice([v for v in files if v.kind != "image"])
    text = victim.path.read_bytes()
    deep = b"[" * 50_000 + b"]" * 50_000
    at = text.find(b":") + 1
    end = min(text.find(b",") % (len(text) + 1), len(text) - 1)
    new = rng.choice((deep, b"1" * 5000, b"-0", b"1e999", b"NaN", b"1,1", text, b"0x1"))
    how = rng.randrange(3)
    if how == 0:
        victim.path.write_bytes(text[:at] + new + text[end:])
    elif how == 1:
        victim.path.write_bytes(b'{"step": 40,' + text[1:])
    else:
        victim.path.write_bytes(deep)
    return [victim]


KINDS: dict[str, Callable[[list[Victim], random.Random], list[Victim]]] = {
    "flip": _flip,
    "flip again": _flip,
    "truncate": _truncate,
    "append": _append,
    "sparse": _sparse,
    "zeroes": _zeroes,
    "garbage": _garbage,
    "pickle": _pickle,
    "delete": _delete,
    "swap": _swap,
    "overwrite": _overwrite,
    "stray": _stray,
    "stray slot": _stray_slot,
    "not a file": _not_a_file,
    "no folder": _no_folder,
    "edit": _edit_json,
    "edit again": _edit_json,
    "edit thrice": _edit_json,
    "raw": _raw_json,
}
