from __future__ import annotations

import functools
import importlib
import io
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from rich.console import Console
from run_files import Driver, FakeJobs, write_code

from relit.cli import options, runs
from relit.cli.main import _VERBS, main
from relit.cli.watch import picture
from relit.client import Client


class Shell:
    """Runs verbs in this process, as the console script does, over one store."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys
        write_code(folder)
        self.spec = folder / "job.yaml"
        self.spec.write_text(f"name: job\nentry: train.py:train\nenv: {{working_dir: {folder}}}\n")

    def run(self, *arguments: str) -> tuple[int, str, str]:
        code = main([*arguments])
        said = self._capsys.readouterr()
        return code, said.out, said.err

    def json(self, *arguments: str) -> Any:
        code, out, _ = self.run(*arguments, "--json")
        assert code == 0, out
        return json.loads(out)

    def submit(self, *arguments: str) -> str:
        return str(self.json("submit", str(self.spec), *arguments)["run_id"])

    def driver(self, run: str) -> Driver:
        store = Client(transport=FakeJobs()).get(run).reader.store
        return Driver(store, run, time.time())


@pytest.fixture
def shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    monkeypatch.setenv("RELIT_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("HOME", str(tmp_path))
    jobs = FakeJobs()

    def make_client(store: str | None, address: str | None = None) -> Client:
        return Client(address, store=store, transport=jobs)

    monkeypatch.setattr(options, "make_client", make_client)
    monkeypatch.setattr("relit.cli.steering.make_client", make_client)
    monkeypatch.setattr("relit.cli.runs.make_client", make_client)
    return Shell(tmp_path / "code", capsys)


def test_a_run_s_life_with_its_exit_codes(shell: Shell) -> None:
    run = shell.submit("--run-id", "r1")
    assert (run, shell.run("result", run)[0]) == ("r1", 101)
    driver = shell.driver(run)
    spacing = {"disk_every_s": 12.0, "reason": "a save costs 0.2 s"}
    driver.status(
        state="RUNNING", step=5, total_steps=10, loss=0.5, committed={"disk": 4}, spacing=spacing
    )
    driver.event("generation.formed", time.time(), generation=1)
    code, out, _ = shell.run("status", "r")
    assert code == 0
    assert "r1 RUNNING at step 5/10, loss 0.5000" in out
    assert "disk 4" in out
    assert "disk every 12 s" in out and "a save costs 0.2 s" in out
    assert "generation.formed" in shell.run("events", run)[1]
    assert shell.run("stop", run, "--no-wait")[0] == 0
    assert shell.run("stop", run, "--timeout", "0.1")[0] == 101
    driver.result(time.time(), state="STOPPED", step=6)
    assert [shell.run(verb, run)[0] for verb in ("result", "watch")] == [103, 103]
    assert shell.run("stop", run)[0] == 2
    assert shell.json("resume", run)["run_id"] == run
    assert shell.json("status", run)["state"] == "PENDING"


@pytest.mark.parametrize(("state", "code"), [("SUCCEEDED", 0), ("FAILED", 100), ("STOPPED", 103)])
@pytest.mark.parametrize("wait", [(), ("--wait",)])
def test_a_submit_of_a_run_that_is_over_says_so(
    shell: Shell, state: str, code: int, wait: tuple[str, ...]
) -> None:
    run = shell.submit("--run-id", "r1")
    shell.driver(run).result(time.time(), state=state, step=6)
    again = ("submit", str(shell.spec), "--run-id", "r1", *wait)
    found, out, _ = shell.run(*again)
    assert found == code and f"r1 {state}" in out and "submitted" not in out
    assert ("relit resume r1" in out) == (state != "SUCCEEDED")
    found, out, _ = shell.run(*again, "--json")
    assert found == code and json.loads(out)["state"] == state


def test_a_submit_of_a_lost_run_goes_on_as_it_can(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray may be about to bring its supervisor back: nothing ends here but with the waiting."""
    run = shell.submit("--run-id", "r1")
    monkeypatch.setattr("relit.run_state.START_GRACE_S", -1.0)
    again = ("submit", str(shell.spec), "--run-id", run)
    code, out, _ = shell.run(*again)
    assert code == 0 and "submitted r1" in out and "relit resume r1" in out
    assert shell.run(*again, "--wait", "--timeout", "0.1")[0] == 101


@pytest.mark.parametrize(("state", "code"), [("SUCCEEDED", 0), ("FAILED", 100), ("STOPPED", 103)])
def test_result_exits_as_the_run_did(shell: Shell, state: str, code: int) -> None:
    run = shell.submit()
    shell.driver(run).result(time.time(), state=state, value={"a": 1})
    found, out, _ = shell.run("result", run, "--json")
    assert found == code
    assert json.loads(out)["value"] == {"a": 1}


BAD: list[tuple[list[str], int, str]] = [
    (["status", "nope"], 102, "no run 'nope'"),
    (["status", "."], 102, "no run '.'"),
    (["ls", "--store", "{spec}"], 1, "a file, not a directory"),
    (["submit", "{spec}", "scalng.workers=2"], 2, "did you mean 'scaling'"),
    (["submit", "{spec}", "entry=train.py:nope"], 2, "no function 'nope'"),
    (["submit", "{spec}", "entry=gone.py:train"], 2, "no file"),
    (["submit", "{spec}", "scaling.workers=two"], 2, "scaling.workers"),
    (["submit", "{spec}", "config.api_key=abcdef"], 2, "config.api_key"),
    (["submit", "{folder}/none.yaml"], 2, "cannot read"),
    (["submit", "{spec}", "--store", "{spec}/x"], 2, "cannot be written"),
    (["submit", "{spec}", "--store", "s3://u:abcdef@bucket/x"], 2, "URL"),
    (["validate", "{spec}", "seed=-1"], 2, "seed"),
    (["frobnicate"], 2, "No such command"),
    (["status"], 2, "Missing argument"),
    (["submit"], 2, "Missing argument"),
]


@pytest.mark.parametrize(("arguments", "code", "words"), BAD)
def test_bad_input_is_one_clear_line(
    shell: Shell, arguments: list[str], code: int, words: str
) -> None:
    filled = [a.format(spec=shell.spec, folder=shell.folder) for a in arguments]
    found, out, err = shell.run(*filled)
    assert (found, out) == (code, "")
    assert words in err
    assert "Traceback" not in err
    assert "abcdef" not in err


def test_errors_are_json_too(shell: Shell) -> None:
    code, out, err = shell.run("status", "nope", "--json")
    said = json.loads(out)
    assert (code, said["error"], said["exit_code"]) == (102, "RunNotFoundError", 102)
    assert "no run" in err


def test_json_keeps_stdout_clean_on_every_reading_verb(shell: Shell) -> None:
    run = shell.submit()
    driver = shell.driver(run)
    driver.event("one", time.time())
    driver.store.put("logs/w/000000.log", b"hello\nthere\n")
    assert shell.json("ls")[0]["run_id"] == run
    assert shell.json("events", run)["kind"] == "one"
    assert shell.json("status", run)["run_id"] == run
    assert shell.json("logs", run, "--list") == ["w"]
    lines = shell.run("logs", run, "--json")[1].splitlines()
    assert [json.loads(line)["line"] for line in lines] == ["hello", "there"]
    assert shell.json("validate", str(shell.spec))["entry"] == "train:train"
    assert shell.json("doctor")
    assert shell.json("cluster", "status") == {"up": False}


def test_the_first_ctrl_c_stops_the_run(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[Driver] = []

    def nap(seconds: float) -> None:
        if not naps:
            naps.append(shell.driver("r1"))
            raise KeyboardInterrupt
        assert naps[0].store.list("control/") == ["control/000001-stop.json"]
        naps[0].result(time.time(), state="STOPPED", step=6)

    # Not time.sleep itself: subprocess naps too, while git tells its commit.
    clock = SimpleNamespace(sleep=nap, monotonic=time.monotonic, time=time.time)
    monkeypatch.setattr("relit.handle.time", clock)
    code, out, _ = shell.run("submit", str(shell.spec), "--run-id", "r1", "--wait")
    assert code == 103
    assert "r1 STOPPED at step 6" in out


def test_people_get_lines_and_a_table(shell: Shell) -> None:
    run = shell.submit()
    driver = shell.driver(run)
    driver.status(state="RUNNING", step=5, total_steps=10, world=2, recoveries=1)
    driver.store.put("logs/w/000000.log", b"hello\n")
    assert shell.run("logs", run)[1] == "hello\n"
    assert "nothing was written" in shell.run("logs", run, "--rank", "7")[2]
    listed = shell.run("ls")[1]
    for word in (run, "RUNNING", "5/10", "2"):
        assert word in listed
    assert "is valid" in shell.run("validate", str(shell.spec))[1]


def test_incidents_and_the_value_are_told(shell: Shell) -> None:
    run = shell.submit()
    driver = shell.driver(run)
    assert "No incident" in shell.run("incidents", run)[1]
    driver.store.put("incidents/000001.json", b'{"headline": "Incident 1: gone. Back."}')
    driver.result(time.time(), state="SUCCEEDED", value={"loss": 0.5, "text": "a\nb"})
    assert shell.run("incidents", run)[1] == "Incident 1: gone. Back.\n"
    assert shell.json("incidents", run)["headline"] == "Incident 1: gone. Back."
    told = shell.run("result", run)[1]
    assert "value       loss = 0.5\n" in told and 'text = "a\\nb"\n' in told


def test_events_can_be_chosen(shell: Shell) -> None:
    run = shell.submit()
    driver = shell.driver(run)
    for kind in ("ckpt.saved", "worker.exited", "ckpt.committed"):
        driver.event(kind, time.time())
    assert len(shell.run("events", run, "--kind", "ckpt")[1].splitlines()) == 2
    assert len(shell.run("events", run, "--since", "2")[1].splitlines()) == 1


def test_watch_follows_to_the_end(shell: Shell) -> None:
    run = shell.submit()
    driver = shell.driver(run)
    driver.result(time.time(), state="SUCCEEDED", step=9, loss=0.25)
    code, out, _ = shell.run("watch", run)
    assert (code, out) == (0, f"{run} SUCCEEDED at step 9, loss 0.2500\n")


def test_picture_shows_what_matters() -> None:
    console = Console(width=100, file=io.StringIO(), record=True)
    status = {
        "state": "RUNNING", "run_id": "r", "step": 5, "total_steps": 10, "loss": 0.5, "world": 2,
        "tokens_per_s": 12345.0, "committed": {"memory": 5}, "last_incident": "Incident 1: gone.",
        "spacing": {"disk_every_s": 30.0},
    }  # fmt: skip
    console.print(picture(status))
    text = console.export_text()
    for word in ("RUNNING", "5/10", "0.5000", "12,345", "memory 5", "Incident 1: gone."):
        assert word in text
    assert "disk every 30 s" in text
    assert "\nstep" in text  # the bar has a line of its own


def test_brackets_in_what_users_write_are_no_markup(shell: Shell) -> None:
    console = Console(width=100, file=io.StringIO(), record=True)
    incident = "Incident 1: rank 0 raised ValueError: no shard in [/data/a] [enforce fail]"
    console.print(picture({"state": "RUNNING", "run_id": "r", "last_incident": incident}))
    assert "no shard in [/data/a] [enforce fail]" in console.export_text()
    run = shell.submit('owner="[/ml]"')
    code, out, _ = shell.run("ls")
    assert code == 0 and run in out and "[/ml]" in out


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: Shell, name: str) -> None:
    code, out, _ = shell.run("completion", name)
    assert code == 0
    assert "_RELIT_COMPLETE" in out


def test_runs_complete_from_the_store(shell: Shell) -> None:
    run = shell.submit()
    context = runs.status.make_context("status", ["x"])
    complete = functools.partial(options._complete_run, context, runs.status.params[0])
    assert (complete(run[:2]), complete("x")) == ([run], [])


def _tools_of(command: click.Command) -> list[click.Command]:
    if not isinstance(command, click.Group):
        return [command]
    context = click.Context(command)
    found = [command.get_command(context, name) for name in command.list_commands(context)]
    assert found and None not in found
    return [tool for tool in found if tool is not None]


def test_every_verb_answers_json() -> None:
    for verb, home in _VERBS.items():
        module, _, name = home.partition(":")
        command = getattr(importlib.import_module(module), name)
        for each in _tools_of(command):
            assert verb == "completion" or "--json" in {o for p in each.params for o in p.opts}


HOSTILE = {
    "status.json": '{"state":"SUCCEEDED","step":"x","committed":[1],"workers":[1],"epoch":"e",'
    '"spacing":[1]}',
    "result.json": "{}",
    "attempts/000001.json": '{"at_s":null}',
    "config.resolved.json": "{}",
    "run.json": "[" * 100_000,
    "incidents/000001.json": '{"headline":[1]}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_damaged_run_directory_is_read_as_far_as_it_goes(shell: Shell, name: str) -> None:
    run = shell.submit("--run-id", "r1")
    shell.driver(run).status(state="RUNNING", step=5)
    reader = Client(transport=FakeJobs()).get(run).reader
    reader.store.put(name, HOSTILE[name].encode())
    for verb in (["status"], ["logs", "--rank", "0"], ["incidents"], ["events"], ["result"]):
        code, _, err = shell.run(verb[0], run, *verb[1:])
        assert code == (101 if verb == ["result"] else 0), err


@pytest.mark.parametrize("entry", ["x", "[]", "{}", '{"run_key":5}', '{"run_key":"../r1"}'])
def test_an_index_entry_that_is_none_of_ours_is_no_run(shell: Shell, entry: str) -> None:
    shell.submit("--run-id", "r1")
    (shell.folder.parent / "store/index/r1.json").write_text(entry)
    assert shell.run("status", "r1")[0] == 102
    assert shell.json("ls") == []


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["status", "--nonsense"], 2),
        (["nosuch"], 2),
        (["stop", "x", "--timeout", "abc"], 2),
        (["status", "x", "--store", "nonsense://x"], 2),
        (["ls", "--store", "s3://"], 2),
    ],
)
def test_with_json_an_error_is_one_object_too(
    shell: Shell, arguments: list[str], code: int
) -> None:
    found, out, _ = shell.run(*arguments, "--json")
    assert (found, json.loads(out)["exit_code"]) == (code, code)


def test_the_unforeseen_is_one_line(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(run: str, store: str | None) -> None:
        raise KeyError("oops")

    monkeypatch.setattr(runs, "find_run", broken)
    code, out, err = shell.run("status", "r1", "--json")
    assert (code, json.loads(out)["exit_code"], err.count("\n")) == (1, 1, 1)
    monkeypatch.setenv("RELIT_TRACEBACK", "1")
    with pytest.raises(KeyError):
        shell.run("status", "r1")
