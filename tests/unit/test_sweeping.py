"""Giving steps up, cut off at every call of the store: what the log lists is whole, always."""

from __future__ import annotations

import contextlib
import time

import pytest
from faulty_store import FAULTS, Fault, FaultyStore, every_call
from saved_run import write_step

from relit_platform.control.object_tier import ObjectTier
from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.checkpoint.copies import take_inventory
from relit_storage.checkpoint.sweeping import Garbage, give_up, plan_sweep
from relit_storage.checkpoint.verifying import verify_copy
from relit_storage.errors import FencedError, RetentionError, StoreUnavailableError
from relit_storage.run.layout import STEPS_PREFIX
from relit_storage.stores.memory import MemoryStore
from relit_storage.stores.protocol import ObjectStore

NEWEST = 30


@pytest.fixture(scope="module")
def template() -> MemoryStore:
    """Three commits, a replaced one and an upload that was cut off."""
    store = MemoryStore("template")
    tier = ObjectTier(store, CommitLog(store), time.time)
    for step, generation in ((10, 1), (20, 1), (20, 2), (NEWEST, 2)):
        tier.commit(1, step, generation, write_step(store, step, generation).to_bytes())
    write_step(store, 15)
    return store


def copy_of(template: MemoryStore) -> MemoryStore:
    store = MemoryStore("copy")
    for key in template.list(""):
        store.put(key, template.get(key))
    return store


def sweep(store: ObjectStore, epoch: int = 2) -> list[Garbage]:
    """All but the newest commit goes, as `gc --keep 1 --yes` does it."""
    log = CommitLog(store)
    log.append_epoch(epoch, at_s=0.0)
    found = plan_sweep(store, log.replay(), keep=1, spared=(), pins=())
    for garbage in found:
        give_up(store, log, garbage, epoch=epoch, at_s=0.0)
    return list(found)


def assert_listed_is_whole(store: ObjectStore) -> None:
    inventory = take_inventory(store)
    assert inventory.copies[0].step == NEWEST and not inventory.log_refusals
    for copy in inventory.copies:
        assert not verify_copy(copy, deep=True), copy


def test_all_garbage_goes_and_nothing_else(template: MemoryStore) -> None:
    store = copy_of(template)
    found = sweep(store)
    places = [(garbage.step, garbage.generation, garbage.in_log) for garbage in found]
    assert places == [(10, 1, True), (15, 1, False), (20, 1, True), (20, 2, True)]
    assert {key.split("/")[2] for key in store.list(STEPS_PREFIX)} == {f"{NEWEST:012d}"}
    assert sweep(store) == []


# A torn create of a log slot is worse than any store that passes the probe; see faulty_store.
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "torn"])
def test_cut_off_at_every_call(template: MemoryStore, fault: Fault) -> None:
    def scenario(store: FaultyStore) -> None:
        with contextlib.suppress(StoreUnavailableError):
            sweep(store)
        assert_listed_is_whole(store.inner)
        sweep(store.inner)
        assert_listed_is_whole(store.inner)
        assert {key.split("/")[2] for key in store.inner.list(STEPS_PREFIX)} == {f"{NEWEST:012d}"}

    assert every_call(lambda: copy_of(template), scenario, fault) > 40


def test_pins_and_spared_steps_stay(template: MemoryStore) -> None:
    view = CommitLog(template).replay()
    found = plan_sweep(template, view, keep=1, spared={(10, 1)}, pins={20})
    assert [(garbage.step, garbage.generation) for garbage in found] == [(15, 1), (20, 1)]
    found = plan_sweep(template, view, keep=None, spared=(), pins=())
    assert [(garbage.step, garbage.generation) for garbage in found] == [(15, 1), (20, 1)]


def test_a_newer_epoch_stops_it_before_the_first_file_goes(template: MemoryStore) -> None:
    store = copy_of(template)
    log = CommitLog(store)
    found = plan_sweep(store, log.replay(), keep=1, spared=(), pins=())
    CommitLog(store).append_epoch(9, at_s=0.0)
    before = store.list(STEPS_PREFIX)
    with pytest.raises(FencedError):
        give_up(store, log, found[0], epoch=2, at_s=0.0)
    newest = Garbage(step=NEWEST, generation=2, reason="", in_log=True, keys=(), num_bytes=0)
    with pytest.raises(RetentionError, match="newest"):
        give_up(store, log, newest, epoch=9, at_s=0.0)
    assert store.list(STEPS_PREFIX) == before
