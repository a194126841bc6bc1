"""Copies into standing memory: whatever lies where, the values arrive."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from relit_platform.worker import copying
from relit_platform.worker.copying import copy_into

SHAPE = (6, 8)


class Wrapped(Tensor):
    """A class of somebody else's, whose memory is its own affair."""


def values(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(48).reshape(SHAPE).to(dtype)


SOURCES: dict[str, Callable[[], Tensor]] = {
    "plain": values,
    "parameter": lambda: nn.Parameter(values()),
    "bfloat16": lambda: values(torch.bfloat16),
    "bool": lambda: values(torch.bool),
    "complex": lambda: values(torch.complex64) * 1j,
    "conjugate view": lambda: (values(torch.complex64) * 1j).conj(),
    "negative view": lambda: (values(torch.complex64) * 1j).conj().imag,
    "transposed": lambda: values().reshape(8, 6).t(),
    "expanded": lambda: torch.ones(1, 8).expand(SHAPE),
    "every second": lambda: torch.arange(96.0).reshape(6, 16)[:, ::2],
    "part of another": lambda: torch.arange(96.0)[48:].view(SHAPE),
    "another class": lambda: values().as_subclass(Wrapped),
    "of no element": lambda: torch.empty(0, 8),
    "needs grad": lambda: values().requires_grad_() * 2,
}


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    """As a rank of one CPU has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 1 << 30], ids=["large", "small"])
def limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(copying, "LARGE_BYTES", request.param)
    return int(request.param)


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_source_arrives(kind: str) -> None:
    source = SOURCES[kind]()
    memory = torch.full((source.numel() + 2,), 7, dtype=source.dtype)
    target = memory[1:-1].view(source.shape)
    copy_into([target], [source])
    assert torch.equal(target, source.detach().as_subclass(Tensor).resolve_conj().resolve_neg())
    assert memory[0] == memory[-1] == torch.full((), 7, dtype=source.dtype)


@pytest.mark.usefixtures("limit")
def test_several_at_once_go_to_their_own_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "LARGE_BYTES", 100)
    sources = [torch.full((n,), float(n)) for n in (1, 50, 3, 80, 0)]
    targets = [torch.zeros_like(source) for source in sources]
    copy_into(targets, sources)
    assert all(map(torch.equal, targets, sources))


def test_a_large_one_is_a_block_copy_and_a_small_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks: list[int] = []
    real = ctypes.memmove

    def memmove(target: int, source: int, num_bytes: int) -> None:
        blocks.append(num_bytes)
        real(target, source, num_bytes)

    monkeypatch.setattr("ctypes.memmove", memmove)
    monkeypatch.setattr(copying, "LARGE_BYTES", 100)
    sources = [torch.ones(25), torch.ones(24), torch.ones(5, 20).t()]
    copy_into([torch.zeros_like(source).contiguous() for source in sources], sources)
    assert blocks == [100]


def test_with_many_threads_torch_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "LARGE_BYTES", 1)
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    monkeypatch.setattr("ctypes.memmove", None)
    target = torch.zeros(8)
    copy_into([target], [torch.ones(8)])
    assert torch.equal(target, torch.ones(8))


@pytest.mark.parametrize("target", [torch.zeros(4), torch.zeros(8, dtype=torch.float64)])
def test_no_block_is_copied_where_it_does_not_belong(
    target: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "LARGE_BYTES", 1)
    monkeypatch.setattr("ctypes.memmove", None)
    if target.shape == (8,):
        copy_into([target], [torch.ones(8)])
        assert torch.equal(target, torch.ones(8, dtype=torch.float64))
        return
    with pytest.raises(RuntimeError):
        copy_into([target], [torch.ones(8)])


def test_different_numbers_of_targets_and_sources_are_an_error() -> None:
    with pytest.raises(ValueError):
        copy_into([torch.zeros(1)], [])
