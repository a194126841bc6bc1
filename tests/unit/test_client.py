from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_files import Driver, FakeJobs, make_spec, submit, write_code

from relit import run_writer
from relit.client import Client
from relit.errors import (
    AmbiguousRunError,
    BadInputError,
    ClusterUnreachableError,
    DriftError,
    NotFinishedError,
    RunExistsError,
    RunFinishedError,
    RunNotFoundError,
    StoreUnwritableError,
)
from relit.spec.resolve import run_directory
from relit.transport import RayJobs
from relit_storage.errors import LeaseHeldError
from relit_storage.run import layout
from relit_storage.run.lease import Lease


@pytest.fixture
def jobs() -> FakeJobs:
    return FakeJobs()


@pytest.fixture
def client(tmp_path: Path, jobs: FakeJobs) -> Client:
    return Client(store=str(tmp_path / "store"), transport=jobs)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    return write_code(tmp_path / "code")


def test_submit_writes_the_run_then_hands_it_to_ray(
    client: Client, jobs: FakeJobs, code: Path, tmp_path: Path
) -> None:
    job = submit(client, code, owner="ann", config={"lr": 0.1})
    entrypoint, metadata = jobs.jobs[f"{job.id}-a1"]
    assert entrypoint == (
        f"python -m relit.entrypoint --store {tmp_path / 'store'}"
        f" --run-key default/{job.id} --job {job.id}-a1"
    )
    assert (metadata["run_id"], metadata["owner"]) == (job.id, "ann")
    assert (metadata["name"], metadata["job_name"]) == ("job", "job")
    config = job.reader.config()
    assert config is not None
    assert config.config == {"lr": 0.1}
    for key in (layout.CONFIG, layout.RUN, config.code_key, layout.attempt_key(1)):
        assert job.reader.store.size(key), key
    assert job.reader.about()["versions"]["ray"]
    assert job.status()["state"] == "PENDING"


def test_which_store_goes_first(
    tmp_path: Path, code: Path, jobs: FakeJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, named, environ = (str(tmp_path / name) for name in ("given", "named", "environ"))
    monkeypatch.setenv("RELIT_STORE", environ)
    paths = [
        submit(Client(store=given, transport=jobs), code, store=named).path,
        submit(Client(transport=jobs), code, store=named).path,
        submit(Client(transport=jobs), code).path,
    ]
    for path, store in zip(paths, (given, named, environ), strict=True):
        assert path.startswith(f"{store}/default/")


def test_the_same_submit_again_is_the_same_run(client: Client, jobs: FakeJobs, code: Path) -> None:
    first = submit(client, code, run_id="mine")
    second = submit(client, code, run_id="mine")
    assert (first.id, second.id) == ("mine", "mine")
    assert list(jobs.jobs) == ["mine-a1"]
    assert len(first.reader.attempts()) == 1


def test_a_submit_that_was_cut_off_is_completed(client: Client, jobs: FakeJobs, code: Path) -> None:
    job = submit(client, code, run_id="mine")
    jobs.jobs.clear()  # the call to Ray was lost
    for key in (layout.attempt_key(1), layout.RESOLVED, layout.RUN):
        submit(client, code, run_id="mine")
        assert list(jobs.jobs) == ["mine-a1"]
        job.reader.store.delete(layout.attempt_key(1))
        job.reader.store.delete(key)
    submit(client, code, run_id="mine")
    assert job.reader.config() is not None


def test_another_specification_under_a_taken_id_is_refused_with_the_difference(
    client: Client, code: Path
) -> None:
    submit(client, code, run_id="mine", config={"lr": 1})
    with pytest.raises(RunExistsError, match=r"config\.lr: 1 -> 2"):
        submit(client, code, run_id="mine", config={"lr": 2})
    write_code(code, "return 1")
    with pytest.raises(DriftError, match=r"train\.py changed"):
        submit(client, code, run_id="mine", config={"lr": 1})


def test_bad_address_and_bad_store_leave_nothing_behind(
    client: Client, jobs: FakeJobs, code: Path, tmp_path: Path
) -> None:
    jobs.down = True
    with pytest.raises(ClusterUnreachableError, match="RAY_ADDRESS"):
        submit(client, code)
    assert client.list() == []
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreUnwritableError, match="cannot be written"):
        submit(Client(store=str(tmp_path / "file" / "x"), transport=jobs), code)


def test_runs_are_found_by_id_prefix_and_directory(client: Client, code: Path) -> None:
    one, two = submit(client, code, name="gpt"), submit(client, code, name="digits")
    assert client.get(one.id).id == one.id
    assert client.get("dig").id == two.id
    assert Client(store="elsewhere", transport=FakeJobs()).get(one.path).id == one.id
    assert {run["run_id"] for run in client.list()} == {one.id, two.id}
    with pytest.raises(RunNotFoundError):
        client.get("nope")
    with pytest.raises(RunNotFoundError):
        client.get(f"{one.path}x")
    submit(client, code, name="gpt")
    with pytest.raises(AmbiguousRunError, match=one.id):
        client.get("gpt")


DIRECTORIES = [
    ("/a/b", "/a/b/e/r"),
    ("s3://b/p/", "s3://b/p/e/r"),
    ("s3://b/p?endpoint_url=http://h:1&region=x", "s3://b/p/e/r?endpoint_url=http://h:1&region=x"),
]


@pytest.mark.parametrize(("store", "directory"), DIRECTORIES)
def test_a_stores_options_stay_behind_the_directory(store: str, directory: str) -> None:
    assert run_directory(store, "e/r") == directory


def test_a_run_is_found_by_a_directory_with_options(code: Path, jobs: FakeJobs) -> None:
    store = "memory://options/p?region=x"
    job = submit(Client(store=store, transport=jobs), code)
    assert job.path == f"memory://options/p/default/{job.id}?region=x"
    assert Client(store="elsewhere", transport=jobs).get(job.path).id == job.id


def test_an_exact_id_wins_over_longer_ones(client: Client, code: Path) -> None:
    for run_id in ("a", "a-b"):
        submit(client, code, run_id=run_id)
    assert client.get("a").id == "a"


def test_stop_writes_numbered_commands_and_resume_overtakes_them(
    client: Client, jobs: FakeJobs, code: Path
) -> None:
    job = submit(client, code)
    driver = Driver(job.reader.store, job.id, time.time())
    driver.status(state="RUNNING", step=7)
    assert [job.stop("enough"), job.stop("again")] == [1, 2]
    body = json.loads(job.reader.store.get(layout.command_key(1, "stop")))
    assert (body["reason"], body["verb"]) == ("enough", "stop")
    driver.result(time.time(), state="STOPPED", step=7)
    with pytest.raises(RunFinishedError, match="STOPPED"):
        job.stop()
    again = job.resume(allow=["data"])
    assert again.reader.store.size(layout.command_key(3, "resume"))
    assert list(jobs.jobs) == [f"{job.id}-a1", f"{job.id}-a2"]
    assert again.status()["state"] == "PENDING"
    config = again.reader.config()
    assert config is not None
    assert config.allow_drift == ("data",)


def test_resume_needs_a_run_that_is_over_or_lost(client: Client, code: Path) -> None:
    job = submit(client, code)
    with pytest.raises(RunFinishedError, match="PENDING"):
        job.resume()
    driver = Driver(job.reader.store, job.id, time.time())
    driver.result(time.time(), state="SUCCEEDED")
    with pytest.raises(RunFinishedError, match="SUCCEEDED"):
        job.resume()
    with pytest.raises(BadInputError, match="allow 'weather'"):
        job.resume(allow=["weather"])


def test_resume_of_a_lost_run(client: Client, jobs: FakeJobs, code: Path) -> None:
    job = submit(client, code)
    long_ago = time.time() - 1000
    Driver(job.reader.store, job.id, long_ago).status(state="RUNNING", step=40)
    attempt = job.reader.attempts()[0]
    old = json.dumps({**attempt, "at_s": long_ago}).encode()
    job.reader.store.put(layout.attempt_key(1), old)
    status = job.status()
    assert status["state"] == "LOST"
    assert f"relit resume {job.id}" in status["reason"]
    job.resume()
    assert f"{job.id}-a2" in jobs.jobs


def stopped(client: Client, code: Path) -> tuple[Client, Path, str]:
    job = submit(client, code, config={"lr": 1, "depth": 2})
    Driver(job.reader.store, job.id, time.time()).result(time.time(), state="STOPPED")
    return client, code, job.id


def test_drift_at_resume_is_shown_and_allowed_only_by_name(client: Client, code: Path) -> None:
    _, _, run = stopped(client, code)
    job = client.get(run)
    with pytest.raises(DriftError, match=r"config\.lr: 1 -> 5.*--allow-config-change"):
        job.resume(overrides=["config.lr=5"])
    spec = make_spec(write_code(code, "return 2"), config={"lr": 1, "depth": 2})
    with pytest.raises(DriftError, match=r"train\.py changed.*--allow-code-change"):
        job.resume(spec)
    assert job.status()["state"] == "STOPPED"
    again = job.resume(spec, ["config.lr=5", "scaling.workers=3"], ["config", "code"])
    config = again.reader.config()
    assert config is not None
    assert (config.config["lr"], config.scaling.workers, config.run_id) == (5, 3, run)
    changes = again.reader.attempts()[-1]["changes"]
    assert changes["config.lr"] == [1, 5]


def test_settings_that_decide_no_loss_may_change_without_a_flag(client: Client, code: Path) -> None:
    _, _, run = stopped(client, code)
    before = client.get(run).reader.config()
    write_code(code, "return 'the working tree has moved on'")
    again = client.get(run).resume(overrides=["scaling.workers=2", "checkpoint.keep_disk=5"])
    config = again.reader.config()
    assert config is not None
    assert before is not None
    assert (config.scaling.workers, config.checkpoint.keep_disk) == (2, 5)
    assert (config.code_sha, config.config_sha) == (before.code_sha, before.config_sha)


def test_wait_gives_the_end_times_out_and_explains_a_failed_job(
    client: Client, jobs: FakeJobs, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relit.handle._JOB_LOOK_S", 0.0)
    job = submit(client, code)
    with pytest.raises(NotFinishedError, match="PENDING"):
        job.wait(timeout_s=0.1)
    with pytest.raises(NotFinishedError):
        job.result()
    jobs.statuses[f"{job.id}-a1"] = ("FAILED", "no module named relit")
    with pytest.raises(NotFinishedError, match="no module named relit"):
        job.wait(timeout_s=5)
    Driver(job.reader.store, job.id, time.time()).result(time.time(), state="FAILED", reason="r")
    assert job.wait(timeout_s=5)["state"] == "FAILED"
    assert job.result()["reason"] == "r"


def stopped_run(client: Client, code: Path, run_id: str = "mine") -> Any:
    """The handle of a run that was stopped at step 7."""
    job = submit(client, code, run_id=run_id)
    driver = Driver(job.reader.store, job.id, time.time())
    driver.event("run.state", time.time())
    driver.result(time.time(), state="STOPPED", step=7, reason="")
    return job


def test_a_resume_without_a_cluster_changes_nothing(
    client: Client, jobs: FakeJobs, code: Path
) -> None:
    job = stopped_run(client, code)
    before = {key: job.reader.store.get(key) for key in job.reader.store.list("")}
    jobs.down = True
    with pytest.raises(ClusterUnreachableError):
        job.resume(overrides=["config.lr=0.5"], allow=["config"])
    assert {key: job.reader.store.get(key) for key in job.reader.store.list("")} == before
    jobs.down = False
    job.resume()
    assert list(jobs.jobs) == ["mine-a1", "mine-a2"]


def test_a_resume_that_did_not_get_to_the_cluster_may_be_repeated(
    client: Client, jobs: FakeJobs, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = stopped_run(client, code)
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "connect", lambda: None)
        jobs.down = True

        def refuse(*job: Any) -> bool:
            raise ClusterUnreachableError(address="http://nowhere:1", cause="401")

        patch.setattr(jobs, "submit", refuse)
        with pytest.raises(ClusterUnreachableError):
            job.resume()
    jobs.down = False
    assert job.status()["state"] == "PENDING"
    with pytest.raises(RunFinishedError, match="PENDING"):  # another may be at it
        job.resume()
    monkeypatch.setattr("relit.resuming._HAND_OVER_S", -1.0)
    job.resume()
    assert list(jobs.jobs) == ["mine-a1", "mine-a3"]
    with pytest.raises(RunFinishedError, match="PENDING"):  # that one starts
        job.resume()
    jobs.statuses["mine-a3"] = ("FAILED", "")  # before its supervisor lived
    job.resume()
    assert list(jobs.jobs) == ["mine-a1", "mine-a3", "mine-a4"]


def test_a_tool_that_works_on_a_lost_run_is_named(client: Client, code: Path) -> None:
    job = submit(client, code, run_id="mine")
    long_ago = time.time() - 1000
    Driver(job.reader.store, job.id, long_ago).status(state="RUNNING", step=40)
    attempt = {**job.reader.attempts()[0], "at_s": long_ago}
    job.reader.store.put(layout.attempt_key(1), json.dumps(attempt).encode())
    held = Lease.take(job.reader.store, job.id, "relit ckpt gc on host, pid 1", time.time(), 20.0)
    status = job.status()
    assert status["state"] == "LOST" and "relit ckpt gc on host" in status["reason"]
    with pytest.raises(LeaseHeldError, match="relit ckpt gc"):
        job.resume()
    held.release(time.time())
    job.resume()


def test_a_resume_while_checkpoints_are_deleted_is_refused(
    client: Client, jobs: FakeJobs, code: Path
) -> None:
    job = stopped_run(client, code)
    held = Lease.take(job.reader.store, job.id, "relit ckpt gc on host, pid 1", time.time(), 20.0)
    with pytest.raises(LeaseHeldError, match="relit ckpt gc"):
        job.resume()
    assert job.status()["state"] == "STOPPED" and list(jobs.jobs) == ["mine-a1"]
    held.release(time.time())
    job.resume()
    # A supervisor that has written the result and not released its lease yet is no obstacle.
    other = stopped_run(client, code, run_id="other")
    Lease.take(other.reader.store, other.id, "cluster/actor", time.time(), 20.0)
    other.resume()


def test_a_run_id_belongs_to_one_experiment(client: Client, jobs: FakeJobs, code: Path) -> None:
    submit(client, code, run_id="mine")
    with pytest.raises(RunExistsError, match="it is default/mine, not b/mine"):
        submit(client, code, run_id="mine", experiment="b")
    assert client.get("mine").reader.run_key == "default/mine" and len(jobs.jobs) == 1


def test_a_job_that_the_cluster_remembers_as_over_is_not_this_one(
    client: Client, jobs: FakeJobs, code: Path
) -> None:
    """The store was emptied, or the driver ended before it could begin."""
    jobs.over = {"mine-a1", "mine-a2"}
    job = submit(client, code, run_id="mine")
    assert list(jobs.jobs) == ["mine-a3"]
    jobs.over.add("mine-a3")
    assert submit(client, code, run_id="mine").id == job.id
    assert list(jobs.jobs) == ["mine-a3", "mine-a4"]


def test_several_submitters_at_once_start_one_job(
    client: Client, jobs: FakeJobs, code: Path
) -> None:
    job = submit(client, code, run_id="mine")
    config = job.reader.config()
    assert config is not None
    run_writer.start_first(job.reader.store, config, jobs)  # one that saw no attempt either
    assert list(jobs.jobs) == ["mine-a1"] and len(job.reader.attempts()) == 1


def test_a_submit_into_a_home_of_imports_is_completed(
    client: Client, jobs: FakeJobs, code: Path
) -> None:
    job = submit(client, code, run_id="base")
    now = time.time()
    Lease.take(job.reader.store, "base", "relit ckpt import", now, 20.0).release(now)
    jobs.jobs.clear()  # the submit died before Ray heard of it
    submit(client, code, run_id="base")
    assert list(jobs.jobs) == ["base-a1"]


class RayClient:
    """Ray's job client, with one job of some run directory."""

    def __init__(self, status: str, directory: str) -> None:
        self.status, self.directory = status, directory

    def submit_job(self, **_: Any) -> str:
        raise RuntimeError("Request failed: job x-a1 already exists")

    def get_job_info(self, submission_id: str) -> Any:
        if self.status == "gone":
            raise ConnectionError("Connection refused")  # as requests' errors, an OSError
        metadata = {"run_directory": self.directory}
        return SimpleNamespace(status=self.status, message="", metadata=metadata)


@pytest.mark.parametrize(
    ("status", "directory", "outcome"),
    [
        ("RUNNING", "/s/x", True),
        ("FAILED", "/s/x", False),
        ("RUNNING", "/other/x", BadInputError),
        ("gone", "/s/x", ClusterUnreachableError),
    ],
)
def test_an_id_that_ray_knows_already(status: str, directory: str, outcome: Any) -> None:
    jobs = RayJobs("http://somewhere:8265")
    jobs._client = RayClient(status, directory)
    jobs._info = SimpleNamespace(dashboard_url="http://somewhere:8265")  # type: ignore[assignment]
    if isinstance(outcome, bool):
        assert jobs.submit("x-a1", "true", {"run_directory": "/s/x"}) is outcome
    else:
        with pytest.raises(outcome):
            jobs.submit("x-a1", "true", {"run_directory": "/s/x"})
