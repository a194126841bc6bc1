"""What the user's loop holds: `run`, one per rank.

    def train(run, cfg):
        run.register(model=model, optimizer=optimizer)
        for batch in run.batches(data, global_batch=32, steps=1000):
            loss = loss_fn(model(batch["x"]), batch["y"])
            run.backward(loss)
            run.step(optimizer, loss=loss)

A step is a transaction. `backward` computes and reduces gradients, `step` updates, and the
boundary lies where control comes back to the `for`: only there is state kept, saved, stopped or
joined. A fault inside a step (a peer died, a generation ended) is handled inside `backward`: the
step is abandoned, the next generation is formed, and the `for` yields the same positions again;
the user's code does not notice. Everything here is called by the rank's own thread.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from relit_platform.errors import CollectiveBrokenError, UsageError
from relit_platform.facts import FaultReport
from relit_platform.worker.boundary import BoundaryState
from relit_platform.worker.cuts import NUM_VOTES
from relit_platform.worker.drill import Drill
from relit_platform.worker.gradient_sync import GradientSync
from relit_platform.worker.randomness import reseed

if TYPE_CHECKING:
    from relit_platform.worker.member import Member
    from relit_platform.worker.recorder import Recorder
from relit_storage.data.loader import Loader

# Places in the control vector that is summed over the ranks with each step; from VOTES on lies
# what decides when to save.
LOSS, STOP, VOTES = 0, 1, 2


class StopTraining(BaseException):
    """Leaves the user's loop at a boundary: stop asked for, or nothing left to do.

    Derived from BaseException so that `except Exception` in user code lets it pass.
    """


class RankContext:
    """One rank's handle on the run. Made by relit; users get it as the first argument."""

    def __init__(
        self, *, member: Member, recorder: Recorder, drill: Drill, seed: int, device: torch.device
    ) -> None:
        self._member = member
        self._recorder = recorder
        self._drill = drill
        self._seed = seed
        self._device = device
        self._objects: dict[str, Any] = {}
        self._sync: GradientSync | None = None
        self._kept: BoundaryState | None = None
        self._loader: Loader | None = None
        self._reduced = [0.0, 0.0]  # the newest step's control vector: loss, stop, votes to save
        self._micro = (0, 1, 0, 1)  # index, count, samples here, samples of the global batch
        self._loss_sum = 0.0
        self._reading = False  # between the first batch and the end of the loop
        self._abandoned = False
        self._stepped = False
        self._stop_agreed = False
        self._logged: dict[str, float] = {}

    # ---- what the user reads ----

    @property
    def rank(self) -> int:
        """This process's rank. Blocks until it has one: a hot spare waits here for its turn."""
        return self._entered().rank

    @property
    def world(self) -> int:
        """Number of ranks in the present generation. Blocks as `rank` does."""
        return self._entered().world

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    @property
    def step_no(self) -> int:
        """Completed steps of the whole run, over every recovery."""
        return self._member.step

    @property
    def epoch(self) -> int:
        """Epoch of the data that the next step reads; 0 before `batches`."""
        return self._loader.schedule.place(self._member.step)[0] if self._loader else 0

    @property
    def device(self) -> torch.device:
        """Where this rank's model belongs."""
        return self._device

    @property
    def seed(self) -> int:
        """The run's seed, the same on every rank."""
        return self._seed

    @property
    def stop_requested(self) -> bool:
        """True once a stop was asked for; the loop ends by itself at the next boundary."""
        return self._recorder.stop_requested

    # ---- what the user calls ----

    def register(self, **objects: Any) -> None:
        """Name what must survive: modules, optimizers, schedulers, scalers, anything with
        state_dict and load_state_dict, or a (get, set) pair of callables.

        Called once or several times before the first `batches`, with the same names in every life
        of the run. State is restored in place when the generation is formed, in `batches`.

        Raises UsageError for a second registration of a name or an object without state.
        """
        if self._member.entered:
            raise UsageError(message="run.register must come before run.batches and run.rank.")
        for name, obj in objects.items():
            if name in self._objects:
                raise UsageError(message=f"run.register: {name!r} is registered already.")
            _check_registrable(name, obj)
            self._objects[name] = obj

    def batches(
        self,
        data: Any,
        *,
        global_batch: int,
        steps: int | None = None,
        epochs: int | None = None,
        micro_batch: int | None = None,
        **order: Any,
    ) -> Iterator[dict[str, torch.Tensor]]:
        """This rank's share of each global batch, as tensors on `run.device`.

        data: a relit_storage data set, the same on every rank. global_batch: samples per step
        over all ranks. steps or epochs: when the run ends (of the whole run, not of this life).
        micro_batch: samples per yield at most (None: the whole share); gradients are synchronised
        with the last one only. order: lanes, window, mode, tail of the data order.

        Blocks at the first call until the generation is formed and state is restored.
        Raises UsageError when the loop body calls neither backward nor step.
        """
        if self._loader is not None:
            raise UsageError(message="run.batches is called once; pass steps or epochs to it.")
        self._loader = Loader(
            data, global_batch=global_batch, seed=self._seed, steps=steps, epochs=epochs, **order
        )
        self._member.bind_cursor(self._loader.state, self._loader.check_state)
        self._entered()
        self._recorder.announce(self._loader.num_steps, data, self._member)
        self._reading = True
        try:
            while True:
                while not self._finished(self._loader):
                    yield from self._one_step(self._loader, micro_batch)
                    self._end_step()
                self._save_the_end(self._loader)
                if self._all_here():
                    return
        finally:
            self._reading = False
            self._loader.close()  # its thread; whoever trains in a notebook goes on in the process

    def backward(self, loss: torch.Tensor, *, scaler: Any = None) -> None:
        """Gradients of `loss` (the mean over this micro-batch), weighted by samples and, with
        the last micro-batch, summed over all ranks; blocks until the sum is complete.

        scaler: a GradScaler, if losses are scaled; the loss that is recorded is not. Its update
        belongs into `step`: run.step(lambda: (scaler.step(optimizer), scaler.update())).

        A fault is recovered in here; then the step is abandoned: `step` does nothing and the loop
        gets the same positions again.
        """
        sync = self._sync
        if sync is None or not self._reading:
            raise UsageError(message="run.backward must be called inside run.batches.")
        if self._abandoned:
            return
        index, count, here, whole = self._micro
        last = index == count - 1
        weight = here / whole
        self._loss_sum += float(loss.detach()) * weight
        self._phase("backward", "forward")
        try:
            if last:
                sync.control[LOSS] = self._loss_sum
                sync.control[STOP] = float(self._recorder.stop_requested)
                for place, vote in enumerate(self._recorder.votes(), VOTES):
                    sync.control[place] = vote
            sync.begin(sync=last)
            with self._armed():
                weighted = loss * weight
                (weighted if scaler is None else scaler.scale(weighted)).backward()
            if last:
                self._recorder.settle(self._member)
                self._phase("sync", "sync")
                sync.finish()
                self._reduced = sync.control.tolist()
        except CollectiveBrokenError as broken:
            self._recover(
                FaultReport(
                    kind="collective",
                    message=str(broken)[:300],
                    at_s=time.time(),
                    step=self._member.step + 1,
                )
            )

    def step(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Callable[[], Any],
        *,
        loss: torch.Tensor | None = None,
        **scalars: float,
    ) -> None:
        """Update, with the last micro-batch of a step; nothing otherwise.

        optimizer: one, several, or a callable that performs the update (a scaler's, say). loss is
        accepted for readability; the loss recorded is the global mean that `backward` reduced.
        scalars are logged as by `log`. Never blocks on a save: the boundary follows at the `for`.
        """
        del loss
        index, count, _, _ = self._micro
        if self._abandoned or index < count - 1:
            return
        if self._stepped:
            raise UsageError(message="run.step was called twice for one step of run.batches.")
        if self._sync is None:
            raise UsageError(message="run.step must be called inside run.batches.")
        self._recorder.settle(self._member)
        self._recorder.phase("update", self._member.step)
        for update in _updates(optimizer):
            update()
        self._sync.zero()
        self._stepped = True
        self._stop_agreed = self._reduced[STOP] > 0
        self.log(**scalars)
        self._drill.check(self._member.rank, self._member.step + 1, "update")

    def log(self, **scalars: float) -> None:
        """Add numbers to this step's metric row (recorded by rank 0 when the step completes)."""
        for name, value in scalars.items():
            self._logged[name] = float(value)

    @contextmanager
    def eval(self, *, every: int) -> Iterator[bool]:
        """`with run.eval(every=100) as due:` due is True on rank 0 at each 100th step's body.

        Other ranks wait for nothing: they meet rank 0 again in the next all-reduce.
        """
        due = self.is_main and (self._member.step + 1) % every == 0 and not self._abandoned
        self._recorder.phase("wait" if due else "forward", self._member.step)
        yield due

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep rows of JSON values under tables/<name>/ in the run directory (rank 0 only)."""
        if self.is_main:
            self._recorder.table(name, self._member.step, rows)

    def save_artifact(self, name: str, content: bytes | str) -> None:
        """Keep bytes, or the file at a path, under artifacts/<name> (rank 0 only; blocks)."""
        if self.is_main:
            self._recorder.artifact(name, content)

    # ---- one step ----

    def _entered(self) -> Member:
        if not self._member.entered:
            self._recorder.phase("join", self._member.step)
            self._sync = self._member.make_sync(self._objects)
            self._kept = BoundaryState(self._objects)
            self._recorder.bind(self._objects)
            self._enter(None)
        return self._member

    def _one_step(self, loader: Loader, micro_batch: int | None) -> Iterator[dict[str, Any]]:
        member = self._member
        self._abandoned = self._stepped = False
        self._loss_sum = 0.0
        self._logged = {}
        step = member.step
        reseed(self._seed, step, member.rank)
        self._recorder.phase("data", step)
        parts = loader.micro_batches(step, member.rank, member.world, micro_batch)
        whole = loader.num_rows(step)
        if not parts:
            raise UsageError(
                message=f"step {step + 1} has {whole} samples for {member.world} ranks; "
                "give run.batches tail='carry' or tail='drop', or a larger global_batch."
            )
        for index, part in enumerate(parts):
            here = len(next(iter(part.values())))
            self._micro = (index, len(parts), here, whole)
            self._recorder.phase("forward", step)
            yield {k: torch.from_numpy(v).to(self._device) for k, v in part.items()}
            if self._abandoned:
                return

    def _end_step(self) -> None:
        member = self._member
        if self._abandoned:
            assert self._kept is not None and self._sync is not None
            self._kept.rollback()  # the rest of the body ran once with the abandoned step
            self._sync.zero()
            return
        if not self._stepped:
            raise UsageError(
                message=f"the body of run.batches did not call run.step for step {member.step + 1};"
                " each batch needs run.backward(loss) and run.step(optimizer)."
            )
        assert self._kept is not None and self._loader is not None
        ledger = self._loader.ledger_row(
            member.step, world=member.world, generation=member.generation
        )
        member.step += 1
        self._kept.capture()
        self._recorder.completed(
            member=member,
            ledger=ledger,
            loss=self._reduced[LOSS],
            logged=self._logged,
            cursor=self._loader.state(member.step),
            final=self._finished(self._loader),
            stopping=self._stop_agreed,
            agreed=self._reduced[VOTES : VOTES + NUM_VOTES],
        )
        if self._stop_agreed and self._all_here():
            raise StopTraining("stop asked for")

    def _finished(self, loader: Loader) -> bool:
        end = loader.num_steps
        return self._member.epilogue or (end is not None and self._member.step >= end)

    def _save_the_end(self, loader: Loader) -> None:
        """After a recovery at the very end nobody completes a step, and the last one is on no
        disk: who died had not saved its part of it.
        """
        if self._member.step and not self._member.epilogue:
            self._recorder.save_last(self._member, loader.state(self._member.step))

    def _all_here(self) -> bool:
        """True once every rank has completed this step; False after a recovery.

        Whoever leaves the loop takes the state in its memory along: not before the last step is
        whole somewhere else, for a peer may have died in the middle of it.
        """
        fault = self._member.meet()
        if fault is not None:
            self._enter(fault)
            return False
        self._drill.check(self._member.rank, self._member.step, "end")
        return True

    def _recover(self, fault: FaultReport) -> None:
        self._abandoned = True
        assert self._kept is not None
        self._recorder.settle(self._member)
        self._kept.rollback()
        self._enter(fault)

    def _enter(self, fault: FaultReport | None) -> None:
        assert self._sync is not None and self._kept is not None
        self._recorder.settle(self._member)
        if not self._member.enter(self._objects, self._sync, fault):
            raise StopTraining("nothing left to do")
        self._sync.zero()
        self._kept.capture()
        if self._loader is not None and not self._member.epilogue:
            self._recorder.rejoined(self._member, self._loader.state(self._member.step))

    def _phase(self, phase: str, drill_phase: str) -> None:
        self._recorder.phase(phase, self._member.step)
        self._drill.check(self._member.rank, self._member.step + 1, drill_phase)

    @contextmanager
    def _armed(self) -> Iterator[None]:
        """A drill in the middle of the backward pass hangs on the middle parameter's gradient."""
        rank, step = self._member.rank, self._member.step + 1
        if not self._drill.wants(rank, step, "backward"):
            yield
            return
        params = [
            p
            for obj in self._objects.values()
            if isinstance(obj, torch.nn.Module)
            for p in obj.parameters()
            if p.requires_grad
        ]
        register: Any = params[len(params) // 2].register_post_accumulate_grad_hook
        hook = register(lambda _: self._drill.check(rank, step, "backward"))
        try:
            yield
        finally:
            hook.remove()


def _updates(optimizer: Any) -> list[Callable[[], Any]]:
    if isinstance(optimizer, torch.optim.Optimizer):
        return [optimizer.step]
    if callable(optimizer):
        return [optimizer]
    return [one.step for one in optimizer]


def _check_registrable(name: str, obj: Any) -> None:
    pair = isinstance(obj, tuple) and len(obj) == 2 and all(callable(part) for part in obj)
    holder = hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")
    if not pair and not holder:
        raise UsageError(
            message=f"run.register: {name}={type(obj).__name__} has neither state_dict and "
            "load_state_dict nor is it a (get, set) pair of callables."
        )


def call_train(train: Callable[..., Any], run: Any, cfg: dict[str, Any]) -> Any:
    """train(run, cfg), or train(run) when it takes one argument."""
    takes = [
        p
        for p in inspect.signature(train).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return train(run) if len(takes) == 1 else train(run, cfg)
