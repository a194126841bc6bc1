"""A run directory with real checkpoints, as agents and supervisor leave them: no Ray, no keeper.

Two ranks hold a small model and its AdamW optimizer; each saves its share of the state through the
code that lays out, writes and commits in production.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from run_files import FakeJobs, submit, write_code
from torch import Tensor, nn

from relit.client import Client
from relit.handle import JobHandle
from relit_platform.control.object_tier import ObjectTier
from relit_platform.worker.ownership import owned
from relit_platform.worker.state_tree import DTYPES, dtype_name, flatten
from relit_storage.checkpoint.checksum import checksum, chunk_checksums
from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.checkpoint.image import ImageLayout, TensorSpec
from relit_storage.checkpoint.manifest import Manifest
from relit_storage.run.layout import extras_key, manifest_key, shard_key
from relit_storage.stores.local import LocalStore
from relit_storage.stores.protocol import ObjectStore

CHUNK_BYTES, WORLD = 1000, 2
BIG_CHUNK_BYTES = 256 << 10
Tensors = dict[str, Tensor]
Part = tuple[TensorSpec, Tensor]  # what a rank saves, and its content
Split = Callable[[Tensors], list[list[Part]]]  # the parts of each rank


class Tied(nn.Module):
    """A model with tied weights, a buffer, a scalar and a bfloat16 tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, 8)
        self.body = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.short = nn.Parameter(torch.ones(3, 5, dtype=torch.bfloat16))
        self.head = nn.Linear(8, 60, bias=False)
        self.head.weight = self.embed.weight


class Trained:
    """Model and optimizer as after `step` steps; the same for equal steps.

    The numbers are drawn, not trained: a first optimizer step imports torch's compiler.
    """

    def __init__(self, step: int) -> None:
        source = torch.Generator().manual_seed(step)
        self.model = Tied()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        for parameter in self.model.parameters():
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=source))
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": torch.randn(parameter.shape, generator=source),
                "exp_avg_sq": torch.rand(parameter.shape, generator=source),
            }

    def flatten(self) -> tuple[Tensors, Any]:
        tensors, skeleton = flatten({"model": self.model, "optimizer": self.optimizer})
        return tensors, skeleton


def dealt(tensors: Tensors) -> list[list[Part]]:
    """Replicated state: each tensor is saved whole, by one of WORLD ranks."""
    specs = [TensorSpec(k, dtype_name(t), tuple(t.shape)) for k, t in tensors.items()]
    shares = [owned(specs, rank, WORLD) for rank in range(WORLD)]
    return [[(spec, tensors[spec.name]) for spec in share] for share in shares]


def write_step(
    store: ObjectStore,
    step: int,
    generation: int = 1,
    state: tuple[Tensors, Any] | None = None,
    split: Split = dealt,
    run_id: str = "r1",
) -> Manifest:
    """Shards, extras and manifest of a step below `store`, not yet in the log.

    state: what `flatten` gave, by default of a Trained. split: who saves what of it.
    """
    tensors, skeleton = state or Trained(step).flatten()
    ranks = split(tensors)
    shards = [
        _write_rank(store, (step, generation, rank, len(ranks)), parts, skeleton)
        for rank, parts in enumerate(ranks)
    ]
    manifest = Manifest.from_shards(
        shards,
        run_id=run_id,
        epoch=1,
        cursor={"position": step * 8},
        ids={"config": "c", "code": "d", "data": "e"},
        created_at_s=float(step),
    )
    store.put(manifest_key(step, generation), manifest.to_bytes())
    return manifest


def _write_rank(
    store: ObjectStore, place: tuple[int, int, int, int], parts: list[Part], node: Any
) -> dict[str, Any]:
    step, generation, rank, world = place
    layout = ImageLayout.plan((spec for spec, _ in parts), {"relit": "1"})
    contents = {spec.name: content for spec, content in parts}
    image = bytearray(layout.total_bytes)
    image[: layout.header_bytes] = layout.header
    flat = torch.frombuffer(image, dtype=torch.uint8)
    for spec in layout.specs:
        if spec.num_bytes:
            begin = layout.offset(spec.name)
            room = flat[begin : begin + spec.num_bytes].view(DTYPES[spec.dtype])
            room.view(spec.shape).copy_(contents[spec.name])
    extras = json.dumps({"v": 1, "step": step, "rank": rank, "objects": node, "rows": []}).encode()
    chunk_bytes = CHUNK_BYTES if len(image) < 1 << 20 else BIG_CHUNK_BYTES
    store.put(shard_key(step, generation, rank), bytes(image))
    store.put(extras_key(step, generation, rank), extras)
    return {
        "step": step,
        "generation": generation,
        "rank": rank,
        "world": world,
        "node_id": f"n{rank}",
        "file": shard_key(step, generation, rank),
        "num_bytes": len(image),
        "chunk_bytes": chunk_bytes,
        "checksums": chunk_checksums(bytes(image), chunk_bytes),
        "extras_file": extras_key(step, generation, rank),
        "extras_bytes": len(extras),
        "extras_checksum": checksum(extras),
        "tensors": layout.index(),
    }


@dataclasses.dataclass
class Saved:
    """A submitted run over a fake cluster, and the folders its checkpoints lie in."""

    job: JobHandle
    client: Client
    root: Path

    @property
    def store(self) -> ObjectStore:
        return self.job.reader.store

    def commit(
        self,
        steps: Iterable[int],
        generation: int = 1,
        state: tuple[Tensors, Any] | None = None,
        split: Split = dealt,
    ) -> None:
        """Steps of the object tier, published by a supervisor's code."""
        tier = ObjectTier(self.store, CommitLog(self.store), time.time)
        for step in steps:
            data = write_step(self.store, step, generation, state, split).to_bytes()
            tier.commit(1, step, generation, data)

    def on_disk(self, steps: Iterable[int], node: str = "n1") -> Path:
        """Steps on a node's disk; the folder to hand to --disk."""
        folder = self.root / "disk" / "r1" / node
        for step in steps:
            write_step(LocalStore(str(folder)), step)
        return folder

    def over(self, state: str = "STOPPED") -> None:
        self.store.put("result.json", json.dumps({"state": state}).encode())

    def path(self, key: str) -> Path:
        return self.root / "store" / self.job.reader.run_key / key


def make_run(root: Path, store: str = "") -> Saved:
    """A run that was submitted and never driven, in a folder below `root` or in `store`."""
    client = Client(store=store or str(root / "store"), transport=FakeJobs())
    job = submit(client, write_code(root / "code"), run_id="r1")
    return Saved(job, client, root)
