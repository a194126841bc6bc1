"""What `relit demo` says and how it exits."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from relit.demo import story
from relit.demo.command import demo
from relit.demo.compare import Comparison, Difference
from relit.demo.faults import Fault, Kill
from relit.demo.report import DemoReport, printable

EQUAL = Comparison(equal=9, total=9, first=None)
APART = Comparison(equal=8, total=9, first=Difference(step=4, ours=1.0, twin=2.0))
INCIDENT = {"headline": "Incident 1: rank 1 was killed by signal 9 at step 4", "lost": {"steps": 1}}


def report(**changes: Any) -> DemoReport:
    fields: dict[str, Any] = {
        "run_id": "r",
        "run_directory": "store/demo/r",
        "state": "SUCCEEDED",
        "reason": "",
        "step": 9,
        "steps": 9,
        "seconds": 1.5,
        "value": {"val_loss": 1.5, "sample": "def [x]"},
        "kills": (Kill(fault=Fault(target="rank", step=3, rank=1), pid=7, seen_step=4),),
        "planned_kills": 1,
        "incidents": (INCIDENT,),
        "comparison": EQUAL,
    }
    return DemoReport(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, 0),
        ({"comparison": APART}, 100),
        ({"state": "FAILED", "comparison": None}, 100),
        ({"state": "STOPPED", "comparison": None}, 103),
        ({"state": "RUNNING", "comparison": None}, 101),
        ({"comparison": None}, 0),
        ({"comparison": None, "twin_state": "STOPPED"}, 103),
        ({"comparison": None, "twin_state": "FAILED"}, 100),
    ],
)
def test_exit_codes(changes: dict[str, Any], code: int) -> None:
    assert report(**changes).exit_code == code


def test_people_are_told_everything() -> None:
    out = io.StringIO()
    report(comparison=APART, planned_kills=2).print_to(Console(file=out, width=120))
    for text in (
        "1 planned kill(s) came too late",
        "Incident 1: rank 1 was killed by signal 9 at step 4",
        "Steps lost: 1",
        "8 of 9 losses equal, bit for bit; first difference at step 4",
        "def [x]",
        "store/demo/r",
    ):
        assert text in out.getvalue()


def test_generated_bytes_cannot_steer_the_terminal() -> None:
    assert printable("a\n\tb\x1b[31m\r\x07") == "a\n        b\ufffd[31m\ufffd\ufffd"


def test_a_stopped_run_says_how_to_go_on() -> None:
    out = io.StringIO()
    report(state="STOPPED", comparison=None, store="s").print_to(Console(file=out, width=120))
    assert "relit resume r --store s" in out.getvalue()


def test_json_goes_to_stdout_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[story.DemoOptions] = []

    def run_demo(options: story.DemoOptions, console: Console) -> DemoReport:
        seen.append(options)
        return report(comparison=APART)

    monkeypatch.setattr(story, "run_demo", run_demo)
    done = CliRunner().invoke(demo, ["--json", "--steps", "9", "--no-faults", "--store", "s"])
    assert done.exit_code == 100
    told = json.loads(done.stdout)
    assert (told["steps_lost"], told["comparison"]["first_difference"]["step"]) == (1, 4)
    assert seen == [story.DemoOptions(steps=9, faults=False, store="s")]
