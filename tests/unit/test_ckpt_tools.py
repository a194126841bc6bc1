"""`relit ckpt`: what each tool says, changes and refuses, on real run directories."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cut_state import SPLITS
from run_files import Driver
from saved_run import Saved, Trained, make_run, write_step

from relit.checkpoints import Checkpoints
from relit.cli.main import main
from relit_platform.control.object_tier import ObjectTier
from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.checkpoint.pins import read_pins
from relit_storage.checkpoint.verifying import verify_copy
from relit_storage.run.layout import log_key, manifest_key, shard_key, step_prefix
from relit_storage.run.lease import read_lease

Shell = Callable[..., tuple[int, str, str]]


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saved:
    monkeypatch.setenv("RELIT_STORE", str(tmp_path / "store"))
    run = make_run(tmp_path)
    run.commit([10, 20, 30])
    run.over()
    return run


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = main(["ckpt", *map(str, arguments)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def answer(shell: Shell, *arguments: object, code: int = 0) -> Any:
    found, out, err = shell(*arguments, "--json")
    assert found == code, err
    return json.loads(out)


def steps(shell: Shell) -> list[int]:
    return [row["step"] for row in answer(shell, "ls", "r1") if row["tier"] == "object"]


def test_ls_and_show_say_where_a_step_lies(saved: Saved, shell: Shell) -> None:
    disk = saved.on_disk([30, 40])
    rows = answer(shell, "ls", "r1", "--disk", disk)
    places = [(row["step"], row["tier"]) for row in rows]
    assert places == [(40, "disk"), (30, "disk"), (30, "object"), (20, "object"), (10, "object")]
    assert answer(shell, "ls", "r1", "--disk", disk.parent) == rows
    shown = answer(shell, "show", "r1", 30, "--tensors")[0]
    assert shown["cursor"] == {"position": 240} and shown["ids"]["code"] == "d"
    assert shown["objects"]["model"]["tensors"] + shown["objects"]["optimizer"]["tensors"] == len(
        shown["tensor_list"]
    )
    assert shown["bytes"] == sum(s["bytes"] for s in shown["shards"]) + extras_bytes(saved, 30)
    code, out, _ = shell("show", "r1", 30)
    assert code == 0 and "object optimizer" in out and "position" in out
    assert "object" in shell("ls", "r1")[1]


def extras_bytes(saved: Saved, step: int) -> int:
    folder = saved.path(step_prefix(step, 1))
    return sum((folder / f"rank-{rank:05d}.json").stat().st_size for rank in (0, 1))


def flip(saved: Saved, step: int) -> None:
    """One bit of a tensor, which only a checksum can see."""
    path = saved.path(shard_key(step, 1, 1))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_verify_exits_by_what_it_finds(saved: Saved, shell: Shell) -> None:
    assert answer(shell, "verify", "r1", "--deep")["whole"]
    assert answer(shell, "verify", "r1", 20)["checked"][0]["step"] == 20
    flip(saved, 20)
    assert shell("verify", "r1")[0] == 0
    refused = answer(shell, "verify", "r1", "--deep", code=100)["refused"]
    assert [(r["step"], r["file"]) for r in refused] == [(20, shard_key(20, 1, 1))]
    assert "checksum" in refused[0]["reason"]
    assert shell("verify", "r1", 30, "--deep")[0] == 0
    code, out, _ = shell("verify", "r1", 20, "--deep")
    assert (code, "checksum" in out) == (100, True)


MISSING = [
    ("verify", "r1", 99),
    ("verify", "nope"),
    ("show", "r1", 99),
    ("diff", "r1", 10, 99),
    ("pin", "r1", 99),
    ("rm", "r1", 99),
    ("export", "r1", 99, "--to", "hf", "out"),
]


@pytest.mark.parametrize("arguments", MISSING)
def test_what_is_not_there_exits_102(
    saved: Saved, shell: Shell, arguments: tuple[object, ...]
) -> None:
    assert shell(*arguments)[0] == 102
    assert read_pins(saved.store) == frozenset()


def test_a_run_without_checkpoints_has_nothing_to_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    monkeypatch.setenv("RELIT_STORE", str(tmp_path / "store"))
    make_run(tmp_path)
    code, _, err = shell("verify", "r1")
    assert code == 102 and "nothing was committed" in err
    assert answer(shell, "ls", "r1") == []
    assert answer(shell, "gc", "r1") == {"deleted": False, "steps": []}


def test_an_unreadable_log_slot_fails_verify(saved: Saved, shell: Shell) -> None:
    saved.store.put(log_key(1), b"{}")
    refused = answer(shell, "verify", "r1", code=100)["refused"]
    assert [r["file"] for r in refused] == [log_key(1)]


def test_diff_counts_elements(saved: Saved, shell: Shell) -> None:
    saved.commit([40])
    same = answer(shell, "diff", "r1", 20, 20)
    assert same["equal"] and same["fields"] == {}
    found = answer(shell, "diff", "r1", 20, 40)
    changes = {change["name"]: change for change in found["tensors"]}
    a, b = Trained(20).flatten()[0], Trained(40).flatten()[0]
    for name, tensor in a.items():
        differing = int((tensor != b[name]).sum())
        assert changes[name]["differing"] if differing else name not in changes, name
        if differing:
            assert changes[name]["differing"] == differing
            most = float((tensor.double() - b[name].double()).abs().max())
            assert changes[name]["max_abs"] == pytest.approx(most)
    assert found["fields"]["step"] == [20, 40]
    code, out, _ = shell("diff", "r1", 20, 40)
    assert code == 0 and "elements differ, at most by" in out


def test_steps_of_other_worlds_are_compared_and_shown_as_whole_tensors(
    saved: Saved, shell: Shell, tmp_path: Path
) -> None:
    state = Trained(30).flatten()
    saved.commit([40], state=state, split=SPLITS["7 ranks"])
    saved.commit([50], state=state, split=SPLITS["mesh 2x3"])
    worlds = {row["step"]: row["world"] for row in answer(shell, "ls", "r1")}
    assert (worlds[30], worlds[40], worlds[50]) == (2, 7, 6)
    assert answer(shell, "verify", "r1", "--deep")["whole"]
    for a, b in ((30, 40), (40, 50), (50, 30)):
        assert answer(shell, "diff", "r1", a, b)["equal"]
    assert not answer(shell, "diff", "r1", 20, 50)["equal"]
    shown = {step: answer(shell, "show", "r1", step, "--tensors")[0] for step in (30, 40, 50)}
    assert shown[30]["objects"] == shown[40]["objects"] == shown[50]["objects"]
    pieces = {t["name"]: (t["shape"], t["pieces"]) for t in shown[40]["tensor_list"]}
    assert pieces["model.embed.weight"] == ([60, 8], 7)
    assert pieces["model.short"] == ([3, 5], 3), "four ranks have no row of it"
    assert "[60, 8], 7 pieces" in shell("show", "r1", 40, "--tensors")[1]
    assert shell("export", "r1", 50, "--to", "hf", tmp_path / "out")[0] == 0


def test_diff_of_damaged_bytes_exits_100(saved: Saved, shell: Shell) -> None:
    flip(saved, 30)
    code, _, err = shell("diff", "r1", 20, 30)
    assert code == 100 and shard_key(30, 1, 1) in err


def test_diff_between_runs(saved: Saved, shell: Shell, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other")
    other.commit([20])
    path = tmp_path / "other" / "store" / other.job.reader.run_key
    assert answer(shell, "diff", "r1", 20, 20, "--with", path)["equal"]
    assert not answer(shell, "diff", "r1", 10, 20, "--with", path)["equal"]


def test_the_nearest_tier_of_the_newest_step_is_exported(
    saved: Saved, shell: Shell, tmp_path: Path
) -> None:
    disk = saved.on_disk([30, 40])
    said = answer(shell, "export", "r1", "--disk", disk, "--to", "hf", tmp_path / "new")
    assert (said["step"], said["tier"]) == (40, "disk")
    (disk / shard_key(30, 1, 0)).unlink()
    said = answer(shell, "export", "r1", 30, "--disk", disk, "--to", "hf", tmp_path / "old")
    assert (said["step"], said["tier"]) == (30, "object")
    assert shell("ls", "r1", "--disk", tmp_path)[0] == 2


def test_the_tools_on_s3(
    s3_endpoint: str, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://relit/tools?endpoint_url={s3_endpoint}"
    monkeypatch.setenv("RELIT_STORE", url)
    saved = make_run(tmp_path, url)
    saved.commit([10, 20])
    saved.over()
    assert answer(shell, "verify", "r1", "--deep")["whole"]
    assert answer(shell, "export", "r1", 10, "--to", "hf", tmp_path / "out")["step"] == 10
    assert not answer(shell, "diff", "r1", 10, 20)["equal"]
    assert answer(shell, "rm", "r1", 10)["deleted"]
    assert steps(shell) == [20] and saved.store.list(step_prefix(10, 1)) == []
    saved.store.delete(shard_key(20, 1, 1))
    refused = answer(shell, "verify", "r1", code=100)["refused"]
    assert [(r["file"], r["reason"]) for r in refused] == [(shard_key(20, 1, 1), "is missing")]


def test_what_retention_took_meanwhile_is_not_broken(saved: Saved) -> None:
    checkpoints = Checkpoints(saved.job.reader)
    copies = checkpoints.copies(10)
    damaged = checkpoints.copies(30)
    saved.path(shard_key(30, 1, 0)).unlink()
    ObjectTier(saved.store, CommitLog(saved.store), time.time).retire(1, 10, 1)
    refusals = [r for c in (*copies, *damaged) for r in verify_copy(c, deep=True)]
    assert {r.step for r in refusals} == {10, 30}
    assert {r.step for r in checkpoints.still_broken(refusals)} == {30}


def test_rm_takes_the_replaced_commit_of_the_step_too(saved: Saved, shell: Shell) -> None:
    saved.commit([20, 50], generation=2)
    assert [s["generation"] for s in answer(shell, "rm", "r1", 20)["steps"]] == [1, 2]
    assert steps(shell) == [50, 30, 10]
    assert saved.store.list(step_prefix(20, 1)) == saved.store.list(step_prefix(20, 2)) == []


def test_pins_stay_through_rm_and_gc(saved: Saved, shell: Shell) -> None:
    assert answer(shell, "pin", "r1", 10, "--reason", "paper")["changed"]
    assert not answer(shell, "pin", "r1", 10)["changed"]
    assert b"paper" in saved.store.get("pins/000000000010.json")
    code, _, err = shell("rm", "r1", 10)
    assert code == 2 and "pinned" in err
    gone = answer(shell, "gc", "r1", "--yes", "--keep", 1)["steps"]
    assert [step["step"] for step in gone] == [20]
    assert steps(shell) == [30, 10]
    assert answer(shell, "pin", "r1", 10, "--remove")["changed"]
    assert answer(shell, "rm", "r1", 10)["deleted"]
    assert steps(shell) == [30]


def test_rm_retires_in_the_log_and_deletes(saved: Saved, shell: Shell) -> None:
    assert answer(shell, "rm", "r1", 20)["steps"][0]["files"] == 5
    assert saved.store.list(step_prefix(20, 1)) == []
    view = CommitLog(saved.store).replay()
    assert [record.step for record in view.retired] == [20]
    lease = read_lease(saved.store)
    assert lease is not None and lease.released and view.epoch == lease.epoch
    assert shell("rm", "r1", 20)[0] == 102
    assert shell("verify", "r1", "--deep")[0] == 0


@pytest.mark.parametrize("verb", [("rm", "r1", 30), ("rm", "r1", 20), ("gc", "r1", "--yes")])
def test_a_live_run_keeps_everything(saved: Saved, shell: Shell, verb: tuple[object, ...]) -> None:
    saved.store.delete("result.json")
    driver = Driver(saved.store, "r1", time.time())
    driver.status(state="RUNNING", step=31)
    before = saved.store.list("")
    code, _, err = shell(*verb)
    assert code == 2 and "r1 is RUNNING" in err
    assert saved.store.list("") == before
    assert shell("pin", "r1", 20)[0] == 0
    driver.lease.release(time.time())


def test_the_newest_whole_step_is_never_removed(saved: Saved, shell: Shell) -> None:
    assert "newest" in shell("rm", "r1", 30)[2]
    flip(saved, 30)
    for step in (20, 30):
        code, _, err = shell("rm", "r1", step)
        assert code == 2 and "newest" in err, step
    assert answer(shell, "gc", "r1", "--keep", 1, "--yes")["steps"][0]["step"] == 10
    assert steps(shell) == [30, 20]


def test_gc_finds_leftovers_and_only_says_so_first(saved: Saved, shell: Shell) -> None:
    write_step(saved.store, 15)  # an upload that was cut off
    write_step(saved.store, 35, 2)  # may still be on its way
    log = CommitLog(saved.store)
    log.append_retire(epoch=1, generation=1, step=10, at_s=0.0)  # killed before it deleted
    saved.commit([20], generation=2)  # the step again, after a rollback
    found = answer(shell, "gc", "r1")
    assert [(s["step"], s["generation"]) for s in found["steps"]] == [(10, 1), (15, 1), (20, 1)]
    assert not found["deleted"] and saved.store.size(manifest_key(15, 1)) is not None
    assert answer(shell, "gc", "r1", "--yes")["steps"] == found["steps"]
    left = {key.split("/")[2] for key in saved.store.list("checkpoints/steps/")}
    assert left == {f"{step:012d}" for step in (20, 30, 35)}
    assert saved.store.list(step_prefix(20, 1)) == []
    assert answer(shell, "gc", "r1") == {"deleted": False, "steps": []}
    assert shell("verify", "r1", "--deep")[0] == 0


def test_export_falls_back_and_says_what_it_passed_over(
    saved: Saved, shell: Shell, tmp_path: Path
) -> None:
    saved.commit([40])
    saved.path(shard_key(40, 1, 0)).unlink()
    flip(saved, 30)
    code, out, err = shell("export", "r1", "--to", "torch", tmp_path / "out")
    assert code == 0 and "step 20" in out
    assert shard_key(40, 1, 0) in err and shard_key(30, 1, 1) in err
    state = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    for name, tensor in Trained(20).model.state_dict().items():
        assert torch.equal(state["model"][name], tensor)
    for step, reason in ((30, "checksum"), (40, "is missing")):
        code, _, err = shell("export", "r1", step, "--to", "hf", tmp_path / "other")
        assert code == 100 and reason in err
        assert not (tmp_path / "other").exists()
    assert shell("export", "r1", "--to", "torch", tmp_path / "out")[0] == 2
