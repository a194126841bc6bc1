"""The copy beside the loop: what may wait, when it counts, and how a GPU's would be ordered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from relit_platform.worker.overlap import Overlap, Part, Staging
from relit_platform.worker.samples import Samples
from relit_platform.worker.staging import BackgroundCopy, HostMemory, same_bytes, still_names
from relit_platform.worker.state_tree import flatten


class Held(BackgroundCopy):
    """Copies only once it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def _copy(self, *what: Any) -> None:
        assert self.go.wait(30)
        super()._copy(*what)


@pytest.fixture
def held() -> Iterator[Held]:
    copy = Held()
    yield copy
    copy.go.set()
    copy.close()


def test_a_copy_commits_itself_and_only_when_all_is_there(held: Held) -> None:
    target, source, committed = torch.zeros(3), torch.arange(3.0), threading.Event()
    held.begin([target], [source], committed.set)
    assert held.busy and not committed.is_set()
    held.go.set()
    assert committed.wait(30)  # without anybody asking
    assert held.wait() == ""
    assert torch.equal(target, source)
    held.begin([target], [source], committed.set)
    assert held.wait() == ""


def test_the_thread_serves_one_copy_after_another(held: Held) -> None:
    held.go.set()
    target, count = torch.zeros(()), []
    for number in range(5):
        held.begin([target], [torch.tensor(float(number))], lambda: count.append(target.item()))
        assert held.wait() == ""
    assert count == [0.0, 1.0, 2.0, 3.0, 4.0]


def _in_place(source: Tensor) -> None:
    source.add_(1)


def _through_an_alias(source: Tensor) -> None:
    source.detach()[0] = 7.0


def _under_no_grad(source: Tensor) -> None:
    with torch.no_grad():
        source.copy_(torch.ones(3))


@pytest.mark.parametrize("change", [_in_place, _through_an_alias, _under_no_grad])
def test_a_source_that_changed_meanwhile_is_never_committed(
    held: Held, change: Callable[[Tensor], None]
) -> None:
    target, source, committed = torch.zeros(3), torch.arange(3.0), threading.Event()
    held.begin([target], [source], committed.set)
    change(source)
    held.go.set()
    assert "changed outside the update" in held.wait()
    assert not committed.is_set()


def test_a_copy_that_fails_says_why_and_the_next_one_works(held: Held) -> None:
    held.go.set()
    held.begin([torch.zeros(2)], [torch.zeros(3)], lambda: pytest.fail("committed"))
    assert "the copy failed" in held.wait()
    target = torch.zeros(3)
    held.begin([target], [torch.ones(3)], lambda: None)
    assert held.wait() == "" and target.sum() == 3


def test_closing_waits_for_the_copy_and_leaves_no_thread() -> None:
    copy, target = BackgroundCopy(), torch.zeros(1000)
    copy.begin([target], [torch.ones(1000)], lambda: None)
    copy.close()
    copy.close()
    assert target.sum() == 1000
    assert "relit-staging" not in [thread.name for thread in threading.enumerate()]


# ---- what stands still ----


class Odd(nn.Module):
    """A parameter that is trained, one that is not, a buffer, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("stats", torch.ones(3))
        self.tied = self.trained
        self.none = nn.Parameter(torch.empty(0))


def trained(model: Odd) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([model.trained, model.none])
    torch.autograd.backward(model.trained.sum())
    optimizer.step()
    return optimizer


def test_only_what_an_update_changes_stands_still() -> None:
    model = Odd()
    objects: dict[str, Any] = {
        "model": model,
        "optimizer": trained(model),
        "ema": (lambda: {"average": model.trained.detach().clone()}, lambda state: None),
    }
    tensors, _ = flatten(objects)
    assert still_names(objects, tensors) == {
        "model.trained",
        "model.tied",
        *(name for name in tensors if name.startswith("optimizer.state")),
    } & set(tensors)
    assert len([n for n in still_names(objects, tensors) if n.startswith("optimizer.")]) == 3


def test_without_an_optimizer_nothing_stands_still() -> None:
    objects = {"model": Odd()}
    assert still_names(objects, flatten(objects)[0]) == frozenset()


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor(True), torch.tensor(True), True),
        (torch.ones(2, 3), torch.ones(3, 2).t(), True),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16), True),
        (torch.empty(0, 4), torch.empty(0, 4), True),
        (torch.arange(6).view(2, 3), torch.arange(6).view(2, 3) + 1, False),
    ],
)
def test_same_bytes(left: Tensor, right: Tensor, same: bool) -> None:
    assert same_bytes(left, right) is same


# ---- what is overlapped ----

LAYOUT = object()


def part(sources: Sequence[Tensor]) -> Part:
    names = [f"t{i}" for i in range(len(sources))]
    return Part([torch.zeros_like(source) for source in sources], sources, names)


@pytest.mark.parametrize(
    ("mode", "numbers", "still", "later"),
    [
        ("overlap", 4, {"t1"}, ["t1"]),
        ("overlap", 4, {"t0", "t1", "elsewhere"}, ["t0", "t1"]),
        ("overlap", 4, set(), []),
        ("sync", 4, {"t1"}, []),
        ("auto", 4, {"t0", "t1"}, []),
        ("auto", 9 << 20, {"t1"}, ["t1"]),
    ],
)
def test_what_waits(mode: Staging, numbers: int, still: set[str], later: list[str]) -> None:
    whole = part([torch.empty(2), torch.empty(numbers)])
    now, rest = Overlap(mode).divide(whole, LAYOUT, frozenset(still))
    assert list(rest.names) == later
    assert sorted([*now.names, *rest.names]) == ["t0", "t1"]
    for source, name in zip(rest.sources, rest.names, strict=True):
        assert source is whole.sources[whole.names.index(name)]


def test_the_first_and_ever_rarer_snapshots_are_looked_at() -> None:
    overlap = Overlap("overlap")
    assert [n for n in range(1, 20) if overlap.look_due()] == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("moved", [False, True])
def test_a_write_past_autograd_ends_the_overlap(moved: bool) -> None:
    overlap, whole = Overlap("overlap"), part([torch.ones(3), torch.ones(3)])
    still = frozenset({"t0", "t1"})
    _, later = overlap.divide(whole, LAYOUT, still)
    for target, source in zip(later.targets, later.sources, strict=True):
        target.copy_(source)
    overlap.remember(later)
    if moved:
        whole.sources[1].data.clamp_(max=0.5)
    assert overlap.settle() == ""  # the snapshot itself was whole
    assert ("t1" in overlap.refused) is moved
    assert bool(overlap.divide(whole, LAYOUT, still)[1].names) is not moved


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3),
        torch.arange(600.0).view(2, 300).t(),
        torch.ones(40, 3, 5, 5).to(memory_format=torch.channels_last),
        torch.tensor(3.0),
        torch.tensor([float("nan")] * 20),
        torch.tensor([True, False]),
    ],
)
def test_samples_find_a_changed_tensor_of_any_layout(tensor: Tensor) -> None:
    live, other = tensor.clone(), torch.ones(3)
    image = [torch.empty(tensor.shape, dtype=tensor.dtype), torch.empty(3)]
    samples = Samples([live, other], ["changed", "other"])
    samples.keep()
    image[0].copy_(live)
    image[1].copy_(other)
    assert samples.moved(image) == ""
    image[0].copy_(~live if live.dtype == torch.bool else torch.full_like(live, 7.5))
    assert samples.moved(image) == "changed"
    live.copy_(image[0])
    samples.keep()
    assert samples.moved(image) == ""


# ---- on a GPU ----


class FakeCuda:
    """torch.cuda as far as it is used here; writes down who did what, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.on = "current"
        self.refuse = 0

    def is_initialized(self) -> bool:
        return True

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.said.append(f"register {num_bytes}")
        return self.refuse

    def cudaHostUnregister(self, address: int) -> int:
        self.said.append("unregister")
        return 0

    def current_stream(self, device: torch.device) -> str:
        return self.on

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.on = "side"
        yield
        self.on = "current"


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def record(self, stream: str) -> None:
        self.cuda.said.append(f"record on {stream}")


class FakeStream:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.said.append("side waits")

    def synchronize(self) -> None:
        self.cuda.said.append("side is through")


def test_a_gpus_copy_begins_behind_the_boundary_and_counts_when_it_is_through() -> None:
    cuda = FakeCuda()
    copy = BackgroundCopy(cuda, kind="cpu")
    target, source = torch.zeros(3), torch.ones(3)
    copy.begin([target], [source], lambda: cuda.said.append(f"commit on {cuda.on}"))
    assert cuda.said[0] == "record on current"
    assert copy.wait() == ""
    copy.close()
    assert cuda.said[1:] == ["side waits", "side is through", "commit on current"]
    assert torch.equal(target, source)


@pytest.mark.parametrize(("code", "registered"), [(0, True), (712, False)])
def test_host_memory_is_registered_once_and_given_back(code: int, registered: bool) -> None:
    cuda, image = FakeCuda(), torch.zeros(64, dtype=torch.uint8)
    cuda.refuse = code
    memory = HostMemory(cuda)
    assert memory.register(image) is registered
    if registered:
        memory.register(image)
    memory.forget(image)
    memory.forget(image)
    assert cuda.said == ["register 64"] + ["unregister"] * registered


def test_without_a_gpu_nothing_is_registered() -> None:
    assert HostMemory().register(torch.zeros(8, dtype=torch.uint8)) is False
