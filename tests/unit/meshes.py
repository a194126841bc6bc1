"""A job of any sharding in one process: each rank in turn is this process, in a world of ghosts.

Nothing here communicates, so torch's fake process group is enough: it knows rank and world, and
whoever waited for another rank's bytes would get garbage, which the tests would see.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, debug, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """This process is a rank of a world that is not there."""
    dist.init_process_group(backend="fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget: Any = debug._clear_sharding_prop_cache
        forget()  # it keeps meshes, and these know which rank they are on


class Net(nn.Module):
    """Tied weights, uneven and tiny shapes, buffers, scalars, float32 and bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.thin = nn.Parameter(torch.empty(1, 3))
        self.short = nn.Parameter(torch.empty(3, 5, dtype=torch.bfloat16))
        self.register_buffer("scale", torch.tensor(0.5))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def drawn(name: str, like: Any, seed: int) -> Tensor:
    """Values for a whole tensor of this name, the same on every rank."""
    source = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    if not like.dtype.is_floating_point:
        return torch.randint(0, 100, tuple(like.shape), generator=source).to(like.dtype)
    return torch.randn(tuple(like.shape), generator=source).to(like.dtype)


def spread(whole: Tensor, like: Any) -> Tensor:
    """The same values where `like` lies, by torch's own distribution."""
    if not isinstance(like, DTensor):
        return whole.clone()
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


class Job:
    """Model, AdamW, a float32 master copy and a counter, as after some steps. One rank's part.

    seed: of all values. fresh: the optimizer has made no state yet.
    """

    def __init__(self, shard: Callable[[nn.Module], object], seed: int, *, fresh: bool) -> None:
        self.model = Net()
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                tensor.copy_(drawn(name, tensor, seed))
            self.model.head.weight.copy_(drawn("embed.weight", self.model.head.weight, seed))
        shard(self.model)
        thick = [p for p in self.model.parameters() if p is not self.model.thin]
        groups: list[dict[str, Any]] = [
            {"params": thick},
            {"params": [self.model.thin], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.1 / seed)
        short = self.model.short
        self.extra: dict[str, Any] = {
            "seen": seed,
            "master": {"short": spread(drawn("master", torch.empty(3, 5), seed), short)},
        }
        if not fresh:
            self._step(seed)

    def _step(self, seed: int) -> None:
        for number, param in enumerate([*self._params()]):
            state = self.optimizer.state[param]
            state["step"] = torch.tensor(float(seed))
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = spread(drawn(f"{name}{number}", param, seed), param)

    def _params(self) -> Iterator[nn.Parameter]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    @property
    def objects(self) -> dict[str, Any]:
        """What the loop would register."""
        extra = (lambda: self.extra, lambda state: setattr(self, "extra", state))
        return {"model": self.model, "optimizer": self.optimizer, "extra": extra}

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by a name of its own."""
        found: dict[str, Tensor] = dict(self.model.state_dict())
        for number, param in enumerate(self._params()):
            for name, tensor in self.optimizer.state[param].items():
                found[f"optimizer.{number}.{name}"] = tensor
        return found | {"extra.master.short": self.extra["master"]["short"]}


def local(tensor: Any) -> Tensor:
    """This rank's part, without autograd."""
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach()


def assert_same(found: Job, expected: Job) -> None:
    """Bit for bit the same on this rank, on the same meshes, and tied where it was."""
    ours, theirs = found.tensors(), expected.tensors()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        other = theirs[name]
        assert type(tensor) is type(other), name
        if isinstance(tensor, DTensor) and isinstance(other, DTensor):
            assert tensor.placements == other.placements, name
            assert tensor.shape == other.shape, name
        assert local(tensor).dtype == local(other).dtype, name
        assert torch.equal(local(tensor), local(other)), name
    assert found.model.head.weight is found.model.embed.weight
    settings = [
        [{k: v for k, v in group.items() if k != "params"} for group in job.optimizer.param_groups]
        for job in (found, expected)
    ]
    assert settings[0] == settings[1]
    assert found.extra["seen"] == expected.extra["seen"]


def _whole(model: nn.Module) -> None:
    """Data parallel: every rank has everything."""


def _fsdp(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def _hsdp(model: nn.Module) -> None:
    names = ("replicate", "shard")
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=names))


def _fsdp_tp(model: Any) -> None:
    """The embedding is cut by rows twice, the body by columns and rows, the rest by FSDP2 only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for module, dim in ((model.embed, 0), (model.body, 1)):
        whole = module.weight.detach()
        cut = distribute_tensor(whole, mesh["tp"], [Shard(dim)], src_data_rank=None)
        module.weight = nn.Parameter(cut)
    model.head.weight = model.embed.weight
    fully_shard(model, mesh=mesh["dp"])


@dataclass(frozen=True)
class Arrangement:
    """How a job lies on its ranks."""

    world: int
    shard: Callable[[nn.Module], object]

    def ranks(self) -> Iterator[int]:
        """Every rank in turn, while this process is it."""
        for rank in range(self.world):
            with as_rank(rank, self.world):
                yield rank

    def job(self, seed: int, *, fresh: bool = False) -> Job:
        """This rank's part of a job; inside of `ranks`."""
        return Job(self.shard, seed, fresh=fresh)


ARRANGEMENTS = {
    "whole-1": Arrangement(1, _whole),
    "whole-2": Arrangement(2, _whole),
    "whole-3": Arrangement(3, _whole),
    "fsdp-1": Arrangement(1, _fsdp),
    "fsdp-2": Arrangement(2, _fsdp),
    "fsdp-3": Arrangement(3, _fsdp),
    "hsdp-2x2": Arrangement(4, _hsdp),
    "fsdp-tp-2x2": Arrangement(4, _fsdp_tp),
}
