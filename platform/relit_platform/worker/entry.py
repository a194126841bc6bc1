"""The training function that Ray Train runs in every worker: user code between two handshakes.

    hello to this node's agent -> the run's code on sys.path -> train(run, cfg) -> finished

Returning normally means one of: the loop ended, a stop was agreed, or there was nothing left to
do. An exception of the user's code is reported to the manager, which decides whether it may be
tried again; the process group is closed first, so that the peers notice at once.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import io
import os
import shutil
import socket
import sys
import threading
import traceback
import zipfile
from collections.abc import Callable
from typing import Any, TextIO

import ray
import torch

from relit_platform.errors import PlatformError, StaleMemberError
from relit_platform.node.agent import get_or_create_agent
from relit_platform.node.standby import Seed
from relit_platform.run_config import RunConfig
from relit_platform.worker.context import RankContext, StopTraining, call_train
from relit_platform.worker.drill import Drill
from relit_platform.worker.manager_client import ActorLink, ManagerClient
from relit_platform.worker.member import Member
from relit_platform.worker.recorder import Recorder
from relit_storage.errors import FencedError
from relit_storage.run.redaction import Redactor
from relit_storage.stores.opening import open_store
from relit_storage.stores.prefixed import PrefixedStore
from relit_storage.stores.protocol import ObjectStore


class FinalUserError(PlatformError):
    """The user's code failed and must not be tried again. Fields: message, reason."""

    template = "{message} (not tried again: {reason})"


def train_worker(loop_config: dict[str, Any]) -> None:
    """Runs in a thread of the Ray Train worker; loop_config: {"run": RunConfig JSON, "epoch"}."""
    config = RunConfig.from_json(loop_config["run"])
    torch.set_num_threads(max(1, int(config.scaling.cpus_per_worker)))
    _require_secrets(config)
    try:
        run, member, recorder = _build(config, int(loop_config["epoch"]))
    except FencedError as fenced:
        print(f"relit: this worker leaves: {fenced}", flush=True)
        return
    try:
        train = load_entry(config, recorder.store)
        value = call_train(train, run, config.config)
        recorder.finish(member, value, stopped=False)
    except StopTraining:
        recorder.finish(member, None, stopped=True)
    except StaleMemberError as fenced:
        print(f"relit: this worker leaves: {fenced}", flush=True)
    except Exception as error:
        member.leave()
        raise _judged(error, member, recorder) from error
    finally:
        member.leave()
        recorder.close()


def _build(config: RunConfig, epoch: int) -> tuple[RankContext, Member, Recorder]:
    context = ray.get_runtime_context()
    node_id, pid = str(context.get_node_id()), os.getpid()
    worker_id = f"{node_id[:8]}-{pid}-{_start_ticks(pid)}"
    store = PrefixedStore(open_store(config.store), config.run_key)
    agent = ActorLink(lambda: get_or_create_agent(config, node_id), patience_s=60.0)
    seed = Seed(context.get_runtime_env_string(), str(context.get_job_id()))
    paths = agent.call("hello", worker_id, pid, epoch, seed)
    _tee(paths.log_path, Redactor.from_environment(config.secret_names))
    manager = ManagerClient(config.run_id)
    recorder = Recorder(
        config=config,
        worker_id=worker_id,
        store=store,
        agent=agent,
        manager=manager.link,
        heartbeat_path=paths.heartbeat_path,
        control_path=paths.control_path,
    )
    member = Member(
        config=config,
        worker_id=worker_id,
        epoch=epoch,
        node_id=node_id,
        pid=pid,
        host=_host(),
        manager=manager,
        recorder=recorder,
    )
    drill = Drill(config.faults, os.path.join(config.checkpoint.disk_dir, config.run_id, "drills"))
    recorder.drill = drill
    device = torch.device("cuda" if config.scaling.gpus_per_worker else "cpu")
    run = RankContext(
        member=member, recorder=recorder, drill=drill, seed=config.seed, device=device
    )
    return run, member, recorder


def load_entry(config: RunConfig, store: ObjectStore) -> Callable[..., Any]:
    """The user's function out of the run's own code archive, so that every life runs the same."""
    root = os.path.join(config.checkpoint.disk_dir, config.run_id, "code", config.code_sha[:16])
    if config.code_key and not os.path.isdir(root):
        _unpack(store.get(config.code_key), config.code_sha, root)
    if config.code_key and root not in sys.path:
        sys.path.insert(0, root)
    module_name, _, function = config.entry.partition(":")
    importlib.invalidate_caches()
    if module_name.endswith(".py"):
        path = os.path.join(root, module_name)
        name = "relit_user_" + os.path.basename(module_name)[:-3]
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"entry {config.entry!r}: no file {module_name} in the run's code")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(module_name)
    found: Callable[..., Any] = getattr(module, function)
    return found


def _unpack(archive: bytes, sha: str, root: str) -> None:
    found = hashlib.sha256(archive).hexdigest()
    if found != sha:
        raise PlatformError(f"the run's code archive is damaged: sha256 {found}, expected {sha}.")
    tmp = f"{root}.{os.getpid()}.tmp"
    with zipfile.ZipFile(io.BytesIO(archive)) as zipped:
        for name in zipped.namelist():
            if name.startswith("/") or ".." in name.split("/"):
                raise PlatformError(f"the run's code archive holds an unsafe path: {name!r}.")
        zipped.extractall(tmp)
    try:
        os.rename(tmp, root)
    except OSError:  # another rank of this node was first
        shutil.rmtree(tmp, ignore_errors=True)
        if not os.path.isdir(root):
            raise


def _judged(error: Exception, member: Member, recorder: Recorder) -> Exception:
    text = f"{type(error).__name__}: {error}"
    retry, reason = recorder.manager.call(
        "user_error",
        member.worker_id,
        member.rank,
        member.step,
        type(error).__name__,
        str(error)[:2000],
        "".join(traceback.format_exception(error))[-8000:],
    )
    if retry:
        return RuntimeError(f"{text} (tried again: {reason})")
    return FinalUserError(text, reason=reason)


def _require_secrets(config: RunConfig) -> None:
    gone = [name for name in config.secret_names if name not in os.environ]
    if gone:
        raise FinalUserError(
            f"environment variables {', '.join(gone)} (spec: env.secrets) are not set on this node",
            reason="set them where the Ray nodes are started",
        )


def _host() -> str:
    return str(ray.util.get_node_ip_address()) or socket.gethostname()


def _start_ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rsplit(")", 1)[1].split()[19])


class _Tee(io.TextIOBase):
    """Writes to Ray's worker log and to the run's own, secrets masked in both."""

    def __init__(self, stream: TextIO, path: str, redactor: Redactor) -> None:
        self._stream = stream
        self._redactor = redactor
        self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        masked = self._redactor.text(text)
        with self._lock:
            self._file.write(masked)
        self._stream.write(masked)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def _tee(path: str, redactor: Redactor) -> None:
    sys.stdout = _Tee(sys.stdout, path, redactor)
    sys.stderr = _Tee(sys.stderr, path, redactor)
