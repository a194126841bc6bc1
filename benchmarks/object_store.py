"""Upload and restore over S3: our store against obstore by itself, boto3 and s3fs.

    python benchmarks/object_store.py [--mib N] [--rounds N]

A real S3 server on loopback (tests/store/real_s3.py says which) gets one file from each client
and gives it back into memory, in rotating order, 16 MiB parts and four at a time for all. Rates
are MiB/s, medians over the rounds; CPU is user and system time of this process, the lowest of the
rounds, in seconds a gibibyte: the server's does not count. A peer's figure is that of the best
client. Without the server there are no rows.

    upload_vs_fastest           file to object        restore_object_vs_fastest   object to memory
    upload_cpu_vs_least         CPU of the upload     restore_object_cpu_vs_least
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "store"))

import real_s3

from relit_storage.stores.opening import open_store

MIB = 1 << 20
PART_BYTES = 16 * MIB
STREAMS = 4
SERVER_BYTES = 12 << 30  # overwritten objects are given back a few seconds later
OURS = "relit"
Row = dict[str, Any]
Client = tuple[Callable[[str, str], None], Callable[[str], bytes | bytearray]]


def relit_client(endpoint: str) -> Client:
    store = open_store(f"s3://{real_s3.BUCKET}/bench?endpoint_url={endpoint}")
    return lambda path, key: store.put_file(key, path), store.get


def obstore_client(endpoint: str) -> Client:
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        real_s3.BUCKET,
        endpoint=endpoint,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )

    def upload(path: str, key: str) -> None:
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data,
            memoryview(data) as view,
        ):
            obstore.put(store, key, view, chunk_size=PART_BYTES, max_concurrency=STREAMS)

    def restore(key: str) -> bytes:
        num_bytes = obstore.head(store, key)["size"]
        spans = [(at, min(at + PART_BYTES, num_bytes)) for at in range(0, num_bytes, PART_BYTES)]
        with ThreadPoolExecutor(STREAMS) as pool:
            parts = pool.map(lambda s: obstore.get_range(store, key, start=s[0], end=s[1]), spans)
            return b"".join(parts)

    return upload, restore


def boto3_client(endpoint: str) -> Client:
    import boto3
    from boto3.s3.transfer import TransferConfig

    client = boto3.client("s3", endpoint_url=endpoint)
    config = TransferConfig(
        multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=STREAMS
    )

    def restore(key: str) -> bytearray:
        where = {"Bucket": real_s3.BUCKET, "Key": key}
        target = bytearray(client.head_object(**where)["ContentLength"])

        def read(at: int) -> None:
            part = memoryview(target)[at : at + PART_BYTES]
            span = f"bytes={at}-{at + len(part) - 1}"
            body = client.get_object(**where, Range=span)["Body"]
            done = 0
            while done < len(part):
                done += body.readinto(part[done:])

        with ThreadPoolExecutor(STREAMS) as pool:
            list(pool.map(read, range(0, len(target), PART_BYTES)))
        return target

    return lambda path, key: client.upload_file(path, real_s3.BUCKET, key, Config=config), restore


def s3fs_client(endpoint: str) -> Client:
    import s3fs

    fs = s3fs.S3FileSystem(endpoint_url=endpoint, use_listings_cache=False)
    options = {"chunksize": PART_BYTES, "max_concurrency": STREAMS}

    def restore(key: str) -> bytes:
        found: bytes = fs.cat_file(f"{real_s3.BUCKET}/{key}")
        return found

    return lambda path, key: fs.put_file(path, f"{real_s3.BUCKET}/{key}", **options), restore


def measure(endpoint: str, num_bytes: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """figure -> client -> one number for each round; every restored byte is compared."""
    clients = {
        OURS: relit_client(endpoint),
        "obstore": obstore_client(endpoint),
        "boto3": boto3_client(endpoint),
        "s3fs": s3fs_client(endpoint),
    }
    took: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory(prefix="relit-bench-") as folder:
        data = os.urandom(num_bytes)
        path = os.path.join(folder, "shard")
        Path(path).write_bytes(data)
        for number in range(rounds + 1):  # the first warms connections and is not counted
            order = list(clients)
            for name in order[number % len(order) :] + order[: number % len(order)]:
                upload, restore = clients[name]
                key = f"shard-{name}"
                _, *put = timed(partial(upload, path, key))
                found, *got = timed(partial(restore, key))
                if found != data:
                    raise AssertionError(f"{name} gave back other bytes")
                del found
                if number:
                    for figure, value in zip(("upload", "upload_cpu"), put, strict=True):
                        took[figure][name].append(value)
                    for figure, value in zip(("restore", "restore_cpu"), got, strict=True):
                        took[figure][name].append(value)
    return took


def timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """What it returns, seconds, CPU seconds of this process."""
    began, cpu = time.perf_counter(), time.process_time()
    value = call()
    return value, time.perf_counter() - began, time.process_time() - cpu


def table_rows(took: dict[str, dict[str, list[float]]], num_bytes: int) -> list[Row]:
    rows = []
    for figure, name, floor in (
        ("upload", "upload_vs_fastest", 0.8),
        ("restore", "restore_object_vs_fastest", 0.8),
    ):
        rates = {c: num_bytes / MIB / statistics.median(s) for c, s in took[figure].items()}
        ours = rates.pop(OURS)
        best = max(rates, key=lambda client: rates[client])
        more: Row = {"ratio": ours / rates[best], "floor": floor, "unit": "MiB/s"}
        rows.append(row(name, ours, rates[best], best, **more))
        cpus = {c: min(s) * (1 << 30) / num_bytes for c, s in took[f"{figure}_cpu"].items()}
        print(f"{figure}: MiB/s {rates | {OURS: ours}}, CPU s/GiB {cpus}", file=sys.stderr)
        ours = cpus.pop(OURS)
        best = min(cpus, key=lambda client: cpus[client])
        name = name.replace("_vs_fastest", "_cpu_vs_least")
        least = 1 / 1.1 if figure == "upload" else None
        more = {"ratio": cpus[best] / ours, "floor": least, "unit": "CPU s/GiB"}
        rows.append(row(name, ours, cpus[best], best, **more))
    return rows


def row(name: str, ours: float, peer: float, peer_name: str, **more: Any) -> Row:
    return {"name": name, "ours": ours, "peer": peer, "peer_name": peer_name, **more}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    reason = real_s3.missing()
    if reason:
        print(f"no real S3 server: {reason}", file=sys.stderr)
        print("[]")
        return 0
    with (
        tempfile.TemporaryDirectory(prefix="relit-s3-") as folder,
        real_s3.server(Path(folder), SERVER_BYTES) as environment,
    ):
        os.environ |= environment
        took = measure(environment["AWS_ENDPOINT_URL"], options.mib * MIB, options.rounds)
    rows = table_rows(took, options.mib * MIB)
    print(json.dumps(rows, indent=1))
    return 0 if all(r["floor"] is None or r["ratio"] >= r["floor"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
