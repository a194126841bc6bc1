"""A real S3 server behind a proxy that injects faults: right, or an error in time, never wrong.

Every fault of the proxy against every verb that carries a run's data; then the public reports of
lost checkpoints that apply to a store, each as a test with the right behaviour. No Ray in here.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import real_s3

from relit_storage.errors import StoreError, StoreUnavailableError
from relit_storage.stores import multipart, obstore_verbs
from relit_storage.stores.bulk import get_many
from relit_storage.stores.multipart import part_spans
from relit_storage.stores.obstore_store import ObstoreStore
from relit_storage.stores.opening import open_store, probe

pytestmark = [
    pytest.mark.s3,
    pytest.mark.skipif(bool(real_s3.missing()), reason=real_s3.missing()),
]

MIB = 1 << 20
DEADLINE_S = 6.0
SLACK_S = 3.0  # a loaded machine's pauses between the deadline and the answer
PARTS = 3
SHARD_BYTES = 12 * MIB + 3
PART_BYTES = 5 * MIB
IMPATIENT_S = 3.0
SLOW_LINK_BYTES_PER_S = 16 * MIB  # what the deadline grants to an upload's bytes on top
UPLOAD_EXTRA_S = SHARD_BYTES / SLOW_LINK_BYTES_PER_S
STALL_S = 30.0

FAULTS: dict[str, dict[str, Any]] = {
    "error": {},
    "denied": {"fault": "error", "status": 403, "code": "AccessDenied"},
    "error in a 200": {"fault": "error", "status": 200, "code": "InternalError"},
    "expired token": {"fault": "error", "status": 400, "code": "ExpiredToken"},
    "lost": {},
    "lost_error": {},
    "reset": {},
    "cut_request": {"at": 3},
    "cut_response": {"at": 3},
    "truncate": {"at": 3},
    "stall_request": {"at": 3, "seconds": STALL_S},
    "stall_response": {"at": 3, "seconds": STALL_S},
    "corrupt_request": {"at": 3},
    "delay": {"seconds": 0.2, "jitter": 0.2},
    "throttle": {"rate": 16e6},
}
OPERATIONS = {
    "put": "PutObject",
    "put_if_absent": "PutObject",
    "put_file begins": "CreateMultipartUpload",
    "put_file sends": "UploadPart",
    "put_file ends": "CompleteMultipartUpload",
    "get": "GetObject",
    "get_range": "GetObject",
}
SMALL = b"a small object with nonce 1"


class Field:
    """The server, the proxy before it, and a fresh place in the bucket."""

    def __init__(self, proxy: Any, direct: str, shard: Path) -> None:
        self.proxy = proxy
        self.prefix = uuid.uuid4().hex
        self.direct = direct
        self.shard = shard
        self.data = shard.read_bytes()
        self.store = self.open(proxy.url)
        self.truth = self.open(direct)

    def open(self, endpoint: str, deadline_s: float = DEADLINE_S) -> ObstoreStore:
        url = f"s3://{real_s3.BUCKET}/{self.prefix}?endpoint_url={endpoint}"
        store = open_store(url, deadline_s=deadline_s)
        assert isinstance(store, ObstoreStore)
        return store

    def act(self, verb: str) -> None:
        """One call; reads are compared with what was written before, writes below."""
        if verb == "put":
            self.store.put("key", SMALL)
        elif verb == "put_if_absent":
            assert self.store.put_if_absent("key", SMALL)
        elif verb.startswith("put_file"):
            self.store.put_file("key", str(self.shard))
        elif verb == "get":
            assert self.store.get("seed") == self.data
        else:
            assert self.store.get_range("seed", MIB, 9 * MIB) == self.data[MIB : 10 * MIB]

    def written(self, verb: str) -> bytes:
        return self.data if verb.startswith("put_file") else SMALL

    def found(self) -> bytes | None:
        return None if self.truth.size("key") is None else self.truth.get("key")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with (
        pytest.MonkeyPatch.context() as patch,
        real_s3.server(tmp_path_factory.mktemp("s3")) as environment,
    ):
        for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE"):
            patch.delenv(name, raising=False)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
            patch.setenv(name, environment[name])
        patch.setattr(multipart, "part_spans", lambda num_bytes: part_spans(num_bytes, PART_BYTES))
        patch.setattr(obstore_verbs, "SLOW_LINK_BYTES_PER_S", SLOW_LINK_BYTES_PER_S)
        yield environment


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shard") / "shard"
    path.write_bytes(os.urandom(SHARD_BYTES))
    return path


@pytest.fixture(scope="module")
def proxy(server: dict[str, str]) -> Iterator[Any]:
    with real_s3.fault_proxy(server["AWS_ENDPOINT_URL"]) as proxy:
        yield proxy


@pytest.fixture
def field(proxy: Any, server: dict[str, str], shard: Path) -> Iterator[Field]:
    proxy.clear()
    proxy.log.clear()
    field = Field(proxy, server["AWS_ENDPOINT_URL"], shard)
    yield field
    proxy.mode = "up"
    proxy.clear()
    field.truth.abandon_uploads("", older_than_s=-60)
    for key in field.truth.list(""):
        field.truth.delete(key)


def test_the_real_server_passes_the_probe(field: Field) -> None:
    assert probe(field.truth).missing == ()


def test_the_contract_of_stores_holds_on_the_real_server(server: dict[str, str]) -> None:
    """Both backends, the same tests as over the server in tests/unit."""
    environment = os.environ | server | {"RELIT_TEST_S3": server["AWS_ENDPOINT_URL"]}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "s3"]
    done = subprocess.run(
        [*command, "tests/unit/test_stores.py"],
        env=environment,
        cwd=real_s3.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("verb", OPERATIONS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_passing_fault_ends_in_the_right_result(field: Field, fault: str, verb: str) -> None:
    """One fault, then none: only a refusal shows."""
    if verb.startswith("get"):
        field.truth.put("seed", field.data)
    rule = {"fault": fault, **FAULTS[fault], "op": OPERATIONS[verb], "times": 1}
    field.proxy.rule(**rule)
    if fault == "denied":
        with pytest.raises(StoreError, match="AccessDenied"):
            field.act(verb)
        assert field.found() is None
        return
    field.act(verb)
    if verb.startswith("put"):
        assert field.found() == field.written(verb)
        assert field.truth.abandon_uploads("", older_than_s=-60) == 0, "parts were left behind"


LASTING = [fault for fault in FAULTS if fault not in ("delay", "throttle")]


@pytest.mark.parametrize("verb", [verb for verb in OPERATIONS if verb not in ("put", "get")])
@pytest.mark.parametrize("fault", LASTING)
def test_a_lasting_fault_ends_in_time_and_never_in_a_wrong_object(
    field: Field, fault: str, verb: str
) -> None:
    if verb == "get_range":
        field.truth.put("seed", field.data)
    field.proxy.rule(**{"fault": fault, **FAULTS[fault], "op": OPERATIONS[verb]})
    patient, field.store = field.store, field.open(field.proxy.url, IMPATIENT_S)
    began = time.monotonic()
    try:
        field.act(verb)
        failed = False
    except StoreError:
        failed = True
    took_s = time.monotonic() - began
    assert took_s < IMPATIENT_S + (UPLOAD_EXTRA_S if "file" in verb else 0) + SLACK_S
    field.store = patient
    field.proxy.clear()
    if not verb.startswith("put"):
        return
    assert field.found() in ([None, field.written(verb)] if failed else [field.written(verb)])
    field.act(verb)  # repeating it is what a caller does, and it is right then
    assert field.found() == field.written(verb)
    assert field.truth.abandon_uploads("", older_than_s=-60) == 0, "parts were left behind"


@pytest.mark.parametrize("mode", ["down", "blackhole"])
def test_a_partition_ends_in_time(field: Field, mode: str) -> None:
    field.proxy.mode = mode
    calls: list[Callable[[], object]] = [
        lambda: field.store.put_if_absent("key", SMALL),
        lambda: field.store.get("key"),
        lambda: field.store.list(""),
        lambda: field.store.size("key"),
    ]
    for call in calls:
        began = time.monotonic()
        with pytest.raises(StoreUnavailableError):
            call()
        assert time.monotonic() - began < DEADLINE_S + SLACK_S


UPLOADER = """
import sys
from relit_storage.stores import multipart, obstore_verbs
from relit_storage.stores.multipart import part_spans
from relit_storage.stores.opening import open_store
multipart.part_spans = lambda num_bytes: part_spans(num_bytes, int(sys.argv[3]))
open_store(sys.argv[1]).put_file("key", sys.argv[2])
"""


def test_an_agent_killed_in_an_upload_is_finished_by_the_next(field: Field) -> None:
    """SIGKILL while the third part hangs; the next process sends only that one."""
    field.proxy.rule("stall_request", op="UploadPart", after=2, seconds=STALL_S)
    arguments = [field.store.url, str(field.shard), str(PART_BYTES)]
    victim = subprocess.Popen([sys.executable, "-c", UPLOADER, *arguments])
    wait_until(lambda: [e["status"] for e in field.proxy.ops("UploadPart")].count(200) == 2)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert field.found() is None
    field.proxy.clear()
    field.proxy.log.clear()
    field.store.put_file("key", str(field.shard))
    assert len(field.proxy.ops("UploadPart")) == PARTS - 2
    assert field.found() == field.data
    assert field.truth.abandon_uploads("", older_than_s=-60) == 0


def wait_until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


# ---- public reports: the symptom there, the right behaviour here


def test_report_ray_47939_and_physicsnemo_a_transient_error_is_not_the_end(field: Field) -> None:
    """Half of all requests are throttled for a while: everything arrives all the same."""
    field.proxy.rule("error", chance=0.5, times=12)
    field.store.put_file("key", str(field.shard))
    field.store.put("other", SMALL)
    assert field.found() == field.data
    assert field.store.get("other") == SMALL


def test_report_arrow_40502_and_ray_upload_a_failed_upload_publishes_nothing(field: Field) -> None:
    """403 on a part, 503 on Complete: an error is raised, and no object and no part is there."""
    field.proxy.rule("error", op="UploadPart", after=1, status=403, code="AccessDenied")
    with pytest.raises(StoreError, match="AccessDenied"):
        field.store.put_file("key", str(field.shard))
    assert field.found() is None
    assert field.truth.abandon_uploads("", older_than_s=-60) == 0
    field.proxy.clear()
    field.proxy.rule("error", op="CompleteMultipartUpload")
    with pytest.raises(StoreUnavailableError, match="SlowDown"):
        field.store.put_file("key", str(field.shard))
    assert field.found() is None


def test_report_ray_55350_a_store_that_travelled_is_as_patient(field: Field) -> None:
    """Retry settings were lost when a client was pickled to a worker: four 503 in a row."""
    travelled = pickle.loads(pickle.dumps(field.store))
    field.proxy.rule("error", op="PutObject", times=4)
    travelled.put("key", SMALL)
    assert field.found() == SMALL


def test_report_ray_41137_a_reset_look_is_repeated(field: Field) -> None:
    field.truth.put("key", SMALL)
    field.proxy.rule("reset", op="HeadObject", times=2)
    assert field.store.size("key") == len(SMALL)


def test_report_arrow_50188_a_process_that_used_the_store_ends(field: Field) -> None:
    arguments = [field.store.url, str(field.shard), str(PART_BYTES)]
    done = subprocess.run([sys.executable, "-c", UPLOADER, *arguments], timeout=60)
    assert done.returncode == 0
    assert field.found() == field.data


def test_report_s3_connector_368_throttled_readers_all_get_their_bytes(field: Field) -> None:
    for number in range(24):
        field.truth.put(f"log/{number:02}", SMALL + b"%d" % number)
    field.proxy.rule("error", op="GetObject", chance=0.3)
    found = get_many(field.store, field.store.list("log/"))
    assert found == [SMALL + b"%d" % number for number in range(24)]


def test_report_storj_89_no_trailer_is_sent_over_https(
    field: Field, server: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This server answers 411 to the checksum trailers that SDKs send by default over https."""
    monkeypatch.setenv("AWS_CA_BUNDLE", server["AWS_CA_BUNDLE"])
    for backend in ("obstore", "fsspec"):
        options = f"endpoint_url={server['S3_TLS_URL']}&backend={backend}"
        store = open_store(f"s3://{real_s3.BUCKET}/{field.prefix}?{options}", deadline_s=20)
        store.put("small", SMALL)
        store.put_file("key", str(field.shard))
        assert not store.put_if_absent("small", b"another")
        assert store.list("") == ["key", "small"]
        assert store.get("key") == field.found() == field.data
        store.delete("key")


def test_report_aws_sdk_pandas_2987_slowdown_at_create_leaves_all_or_nothing(field: Field) -> None:
    field.proxy.rule("error", op="CreateMultipartUpload", times=2)
    field.store.put_file("key", str(field.shard))
    assert field.found() == field.data


def test_report_s3fs_500_an_expired_token_resumes_the_same_upload(field: Field) -> None:
    field.proxy.rule("error", op="UploadPart", after=1, times=1, status=400, code="ExpiredToken")
    field.store.put_file("key", str(field.shard))
    assert len(field.proxy.ops("CreateMultipartUpload")) == 1
    assert field.found() == field.data


def test_report_s3fs_851_a_listing_is_never_stale(field: Field) -> None:
    assert field.store.list("") == []
    field.truth.put("a/1", SMALL)
    assert field.store.list("") == ["a/1"]
    field.truth.put("a/1", SMALL * 2)
    assert field.store.size("a/1") == 2 * len(SMALL)
    field.truth.delete("a/1")
    assert field.store.list("a/") == []


def test_report_unstructured_732_a_cut_range_is_never_zeros(field: Field) -> None:
    field.truth.put("seed", field.data)
    for fault in ("truncate", "cut_response"):
        field.proxy.rule(fault, op="GetObject", at=2 * MIB, times=2)
        assert field.store.get("seed") == field.data


def test_report_olmo_142_the_connections_of_a_node_are_bounded(field: Field) -> None:
    """Three shards at once over one store: never more parts under way than it has streams."""
    field.proxy.rule("delay", op="UploadPart", seconds=0.2)
    under_way: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            open_now = [e for e in field.proxy.ops("UploadPart") if "ms" not in e]
            under_way.append(len(open_now))

    watcher = threading.Thread(target=watch)
    watcher.start()
    uploads = [
        threading.Thread(target=field.store.put_file, args=(f"key-{n}", str(field.shard)))
        for n in range(3)
    ]
    for upload in uploads:
        upload.start()
    for upload in uploads:
        upload.join()
    done.set()
    watcher.join()
    assert 1 < max(under_way) <= 4
    assert all(field.truth.size(f"key-{n}") == SHARD_BYTES for n in range(3))


def test_report_ray_47937_no_directory_and_no_marker_objects(field: Field) -> None:
    field.store.put_file("a/b/c/key", str(field.shard))
    field.store.put("a/b/other", SMALL)
    written = field.proxy.ops("PutObject") + field.proxy.ops("CreateMultipartUpload")
    assert [e["key"] for e in written if e["key"].endswith("/")] == []
    assert field.proxy.ops("CreateBucket") == []
    assert field.truth.list("") == ["a/b/c/key", "a/b/other"]


def test_report_arrow_34363_parts_are_equal_except_the_last(field: Field) -> None:
    field.store.put_file("key", str(field.shard))
    sizes = {int(e["part"]): e["up"] for e in field.proxy.ops("UploadPart")}
    assert sizes == {1: PART_BYTES, 2: PART_BYTES, 3: SHARD_BYTES - 2 * PART_BYTES}


def test_report_boto3_4435_no_framing_of_checksums_is_stored(field: Field) -> None:
    for key, data in (("small", SMALL), ("empty", b""), ("large", field.data)):
        field.store.put(key, data)
        assert field.truth.get(key) == data


def test_errors_hold_no_secret(field: Field, monkeypatch: pytest.MonkeyPatch) -> None:
    key_id, secret = os.environ["AWS_ACCESS_KEY_ID"], uuid.uuid4().hex
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    store = field.open(field.proxy.url)
    for call in (
        lambda: store.put("key", SMALL),
        lambda: store.get("key"),
        lambda: store.put_file("key", str(field.shard)),
    ):
        with pytest.raises(StoreError, match="SignatureDoesNotMatch") as caught:
            call()
        assert secret not in str(caught.value)
        assert key_id not in str(caught.value)
