"""One Trainer's connection to the engine: where Lightning's calls lead, saving, preemption, and leaving.

A session lives from a callback's ``setup`` to its ``teardown`` (or ``on_exception``), and is shared by all
``ResilientCheckpoint`` callbacks of a Trainer.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch import Trainer

from lightning_resilience import scratch, slots, store
from lightning_resilience.attempts import restarts_left
from lightning_resilience.capture import Capture
from lightning_resilience.data import DataPosition
from lightning_resilience.doorway import Doorway
from lightning_resilience.engine import Engine
from lightning_resilience.errors import (
    CheckpointCorrupt,
    ResilienceError,
    SaveFailed,
    SetupError,
)
from lightning_resilience.lookup import Lookup
from lightning_resilience.loops import Loops
from lightning_resilience.manifest import PINNED, Manifest, newest_first
from lightning_resilience.memory import MemoryTier
from lightning_resilience.places import Source
from lightning_resilience.preemption import Preempted, Preemption, slurm_end
from lightning_resilience.ranks import Ranks
from lightning_resilience.remote import RemoteTier
from lightning_resilience.resumption import Resumption
from lightning_resilience.saves import OVERDUE, Facts, Folder, Save, Snapshot, log_save
from lightning_resilience.strategies import family_of
from lightning_resilience.tiers import LocalTier, local_path
from lightning_resilience.turns import Turns
from lightning_resilience.urls import is_url, shown

log = logging.getLogger("lightning_resilience")

_sessions: dict[int, Session] = {}


class Session:
    """The engine of one Trainer on this rank.  Opening, saving and loading are collective.

    Args:
        trainer: the Trainer; its process group must exist.
        memory: where slots are; see ``SlotMemory``.
        timeout: seconds after which a save that some rank has not finished is dropped.

    Raises:
        SetupError: the strategy is not supported.
    """

    def __init__(self, trainer: Trainer, *, memory: Any = "auto", timeout: float = 1800.0) -> None:
        self.trainer = trainer
        self.family = family_of(trainer.strategy)
        scratch.sweep(Path(tempfile.gettempdir()))
        self.ranks = Ranks(
            trainer.global_rank,
            trainer.world_size,
            timeout=timeout + 1800.0,  # a rank may come to a collective that much later than one that gave its save up
            address=getattr(getattr(trainer.strategy, "cluster_environment", None), "main_address", None),
        )
        self.engine = Engine(self.ranks, memory=memory, timeout=timeout)
        root = slots.check_memory(memory)
        if root is not None and not slots.is_in_memory(root):
            log.warning("event=memory folder=%s reason='it is not on tmpfs: each save goes to a disk twice'", root)
        left = MemoryTier(root)
        self.folders: dict[str, Folder] = {}
        self._between_batches: list[Callable[[int, bool, bool], None]] = []
        self.preemption = Preemption(self.ranks)
        self.went_back: list[Callable[[Manifest], None]] = []
        """Called on all ranks when a run was taken back to an earlier checkpoint."""
        self.before_leaving: list[Callable[[], None]] = []
        """Called on all ranks, when training is about to stop for a signal and everything is saved."""
        self.turns = Turns()
        self.save_seconds = 0.0
        """How long the slowest save so far took until it was committed."""
        self._has_begun = False
        self._boundary = (-1, False)
        self._shared: dict[str, Any] = {}
        """Arguments of callbacks that have to be the same for all of them."""
        self._finished: list[Save] = []
        self._users = 0
        self._doorway = Doorway(trainer)
        self._loops = Loops(trainer)
        self.data = DataPosition(self._loops, self.ranks.rank, self.ranks.world_size)
        self.resumption = Resumption(trainer, self.family, self.ranks, self._doorway, self.data, self.engine)
        self.lookup = Lookup(self.ranks, self._doorway, self.engine, left, self.folders, self.resumption.needs)
        self.capture = Capture(trainer, self.family, self.ranks, self._doorway, self.data, self._has_exact_data)
        self._attach()

    @classmethod
    def of(cls, trainer: Trainer) -> Session | None:
        """The session of a Trainer, where one is open."""
        return _sessions.get(id(trainer))

    @classmethod
    def join(
        cls,
        trainer: Trainer,
        *,
        exact_data: bool,
        on_unrestorable: str,
        restore_optimizers: bool,
        signals: Collection[int] = (),
        grace: float = math.inf,
        max_attempts: float = math.inf,
        memory: Any = "auto",
        timeout: float = 1800.0,
    ) -> Session:
        """The Trainer's session, opened for its first user; see ``ResilientCheckpoint`` for the arguments.

        Raises:
            SetupError: two callbacks want what there is one of for both to be different.
        """
        session = cls.of(trainer)
        if session is None:
            session = _sessions[id(trainer)] = cls(trainer, memory=memory, timeout=timeout)
            session._shared = {"memory": memory, "save_timeout": timeout}
        for argument, value in (("memory", memory), ("save_timeout", timeout)):
            if (other := session._shared[argument]) != value:
                raise SetupError(
                    f"Two checkpoint callbacks of one Trainer have {argument}={other!r} and {argument}={value!r}.",
                    hint=f"They share it: give both the same {argument}=.",
                )
        session._users += 1
        session.resumption.exact_data &= exact_data
        session.resumption.restores_optimizers &= restore_optimizers
        session.lookup.starts_over &= on_unrestorable == "fresh"
        session.lookup.max_attempts = min(session.lookup.max_attempts, max_attempts)
        session.preemption.signals.update(signals)
        session.preemption.grace = min(session.preemption.grace, grace)
        return session

    def leave(self) -> None:
        """Close the session if this was its last user.  Collective: waits for the background work of all ranks.

        Raises:
            Preempted: a signal came when training was over already; on all ranks.
        """
        self._users -= 1
        if self._users == 0:
            try:
                self.engine.close()
                # Rank 0 takes the board down, so it goes last.
                self.preemption.agree(self.ranks.any_max(self.preemption.call)[0])
            finally:
                self._detach()
            self.lookup.succeeded()
            if self.preempted:
                self.preemption.requeue()
                self._raise_preempted()

    def abandon(self, seconds: float, cause: BaseException) -> None:
        """Close the session without the other ranks, after the exception ``cause``: what is under way gets ``seconds``
        to finish.  What is in memory stays where the launcher starts the run again, here and now."""
        is_exit = isinstance(cause, SystemExit) and (isinstance(cause, Preempted) or not cause.code)
        if is_exit or isinstance(cause, (KeyboardInterrupt, ResilienceError)):
            self.lookup.forgive()
        self._users -= 1
        if self._users == 0:
            try:
                goes_on = restarts_left() and not isinstance(cause, (SystemExit, KeyboardInterrupt))
                self.engine.close(seconds, keep_memory=goes_on)
            finally:
                self._detach(abandoned=True)

    def _attach(self) -> None:
        door = self._doorway
        door.replace(door.strategy, "lightning_module_state_dict", lambda _: self.family.model_state)
        door.replace(door.strategy, "optimizer_state", lambda _: self.capture.optimizer_state)
        door.replace(door.strategy, "save_checkpoint", lambda _: self._save_checkpoint)
        door.replace(door.strategy, "remove_checkpoint", lambda _: self._remove_checkpoint)
        door.replace(door.strategy, "load_checkpoint", self.resumption.make_load_checkpoint)
        door.replace(door.strategy, "load_model_state_dict", self.resumption.make_load_model_state_dict)
        door.replace(door.strategy, "load_optimizer_state_dict", self.resumption.make_load_optimizer_state_dict)
        door.replace(door.connector, "resume_start", self._make_resume_start)
        door.replace(door.connector, "resume_end", self._make_resume_end)
        if door.fitting:
            door.replace(door.strategy, "process_dataloader", self._make_process_dataloader)
            door.replace(self.trainer.fit_loop, "setup_data", self._loops.make_setup_data)
            door.replace(door.connector, "restore", self._make_restore)
            door.between_batches(self._tell_between_batches)
            door.before_weights_change(self.engine.finish_staging)
            door.after_registering_signals(self._take_signals)

    def _has_exact_data(self) -> bool:
        return self.resumption.exact_data

    def _before_batches(self) -> None:
        is_first, self._has_begun = not self._has_begun, True
        if is_first:
            self._doorway.resume_batches()
            self.family.begin()
        if self.resumption.exact_data and (is_first or self.data.is_left_empty):
            self.data.begun()

    def _tell_between_batches(self, epoch: int, epoch_ended: bool) -> None:
        if self._doorway.tries_something:
            return
        self.resumption.look_at_what_is_trained()
        batches = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if batches != self._boundary[0]:
            self._boundary = batches, self._doorway.at_step_boundary()
        for action in self._between_batches:
            action(epoch, epoch_ended, self._boundary[1])
        if self.preempted and self._boundary[1]:
            self._stop()

    # -- preemption ---------------------------------------------------------------------------------------------------

    def _take_signals(self) -> None:
        told = self.preemption
        told.requeue_signal = self._doorway.requeue_signal if told.signals else None
        if told.requeue_signal is not None:
            told.signals.add(told.requeue_signal)
        told.install(self._doorway.take_signals(told.signals))
        if told.signals and (ends := slurm_end()) is not None:
            told.ends_at(ends)

    @property
    def preempted(self) -> bool:
        """Whether all ranks have agreed to stop at the next step boundary."""
        return self.preemption.agreed > 0

    def ask_between_batches(self, action: Callable[[int, bool, bool], None]) -> bool:
        """Call ``action`` after each batch with its epoch, whether that has ended, and whether no gradients of a
        half-done accumulation window would be lost now; see ``Doorway.between_batches``.

        Returns:
            Whether it is the one that is to ask the other ranks for their signals, which is enough for all.
        """
        if not self._between_batches:  # not before: a Tuner trains, too, as the fit begins
            self._doorway.before_batches(self._before_batches)
        self._between_batches.append(action)
        return len(self._between_batches) == 1

    def signal_to_ask(self) -> int:
        """What to ask the other ranks with, by the one that asks for all; see ``ask_between_batches``."""
        return self.preemption.wanted(self.save_seconds)

    def stop_before_training(self) -> None:
        """Raise Preempted where any rank was signalled before there is anything to save.  Collective."""
        self.preemption.agree(self.ranks.any_max(self.preemption.call)[0])
        if self.preempted:
            self._stop()

    def _stop(self) -> None:
        """Everything that can be is saved: see to it that the run goes on elsewhere, and end this process."""
        self.preemption.requeue()
        for action in self.before_leaving:
            action()
        with suppress(RuntimeError):  # a rank that was killed meanwhile
            self.ranks.any_max(0)  # rank 0 takes the board down, so it goes last
        self._raise_preempted()

    def _raise_preempted(self) -> NoReturn:
        raise self.preemption.stop(self.trainer.global_step, quietly=self._doorway.is_lightnings_child)

    def _detach(self, abandoned: bool = False) -> None:
        self.lookup.close()
        self.preemption.close()
        self._loops.close()
        self._doorway.close()
        self.data.close()
        self.ranks.close(abandoned)
        self.resumption.forget()
        _sessions.pop(id(self.trainer), None)

    def folder(self, tier: LocalTier | RemoteTier, **rules: Any) -> Folder:
        """The folder that is ``tier``, opened when it is first asked for.  Collective."""
        if tier.where() not in self.folders:
            self.folders[tier.where()] = self.engine.open_folder(tier, **rules)
        return self.folders[tier.where()]

    def ends_within_an_epoch(self) -> bool:
        """Whether training stops now, in the middle of an epoch that a longer run would go on with."""
        return self._doorway.ends_within_an_epoch()

    def finished(self, folder: Folder | None) -> list[Save]:
        """The saves to a folder that ended since the last call."""
        for save in self.engine.poll():
            self._finished.append(save)
            if save.committed.exception() is None:
                self.lookup.succeeded(save.step)
            self.save_seconds = max(self.save_seconds, save.seconds)
        if not self._finished:
            return []
        mine = [save for save in self._finished if save.folder is folder]
        self._finished = [save for save in self._finished if save.folder is not folder]
        return mine

    # -- saving -------------------------------------------------------------------------------------------------------

    def save(
        self,
        folder: Folder,
        name: str,
        facts: Facts,
        *,
        settled: bool,
        weights_only: bool = False,
        replace: bool = False,
        overlap: bool = False,
    ) -> Save | None:
        """Start a save of the Trainer's state as it is now; None where one is under way.

        Args:
            folder: where to.
            name: of the checkpoint.
            facts: for the manifest; see ``Capture.facts``.
            settled: whether Lightning is between two batches, with nothing of the last one left to do.
            weights_only: leave out all but the weights.
            replace: whether a checkpoint of that name gives way.
            overlap: whether a forward and a backward pass follow, and copying may go on meanwhile.
        """
        capture = partial(self.capture.now, weights_only, settled)
        return self.engine.save(folder, name, facts, capture, replace=replace, overlap=overlap)

    def prepare(self, weights_only: bool) -> None:
        """Make ready for saves of the state as it is now, its optimizers' once they have stepped.  Collective."""
        self.engine.prepare(partial(self.capture.tensors, weights_only))

    def save_now(
        self, folder: Folder, name: str, facts: Facts, capture: Callable[[], Snapshot], *, replace: bool
    ) -> Save:
        """Save and wait until it is committed; saves under way are finished first.

        Raises:
            SaveFailed: it was dropped; on all ranks.
        """
        self.engine.drain(self.engine.timeout)
        save = self.engine.save(folder, name, facts, capture, replace=replace)
        if save is None:
            raise SaveFailed(f"The save before step {facts.step} is not done on some rank.", step=facts.step)
        save.wait(self.engine.timeout + OVERDUE)
        return save

    def _save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """In the place of ``Strategy.save_checkpoint``: for callers who expect the checkpoint to be there on return."""
        if storage_options is not None:
            raise TypeError("storage_options is not used: ResilientCheckpoint writes to a folder.")
        text: str = self.ranks.broadcast(os.fspath(filepath))
        if is_url(text):
            raise SetupError(f"trainer.save_checkpoint takes no URL, but {shown(text)!r} is one.", hint="Use remote=.")
        path = local_path(text).absolute()
        weights_only = "optimizer_states" not in checkpoint
        facts = self.capture.facts("trainer.save_checkpoint", self.trainer.current_epoch, {}, weights_only, (PINNED,))
        capture = partial(self.capture.snapshot, checkpoint, settled=False)
        save = self.save_now(self.folder(LocalTier(path.parent)), path.name, facts, capture, replace=True)
        if self.ranks.rank == 0 and save.folder.keep is None:  # otherwise a callback tells of it
            log_save(save)

    def _remove_checkpoint(self, filepath: Any) -> None:
        """In the place of ``Strategy.remove_checkpoint``, for a stock ModelCheckpoint beside ours."""
        path = local_path(os.fspath(filepath)).absolute()
        folder = self.folder(LocalTier(path.parent))
        if self.ranks.rank == folder.leader and path.exists():
            folder.tier.remove(path.name)

    # -- resuming -----------------------------------------------------------------------------------------------------

    def _make_process_dataloader(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def process_dataloader(dataloader: Any) -> Any:
            loader = original(dataloader)
            return (
                self.data.track(loader)
                if self.resumption.exact_data and self._loops.processes_training_data
                else loader
            )

        return process_dataloader

    def _make_resume_start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
            def load(source: Source | str | None) -> None:
                self.resumption.take(source if isinstance(source, Source) else None)
                original(str(source.path) if isinstance(source, Source) else source, weights_only=weights_only)

            replaces_all = self._doorway.fitting and self.trainer.lightning_module.strict_loading
            source = self.lookup.choose(checkpoint_path, reading_checks=replaces_all)
            try:
                load(source)
            except CheckpointCorrupt:  # on all ranks
                if not isinstance(source, Source) or source.is_checked:
                    raise
                if (checked := self.lookup.choose_checked()) is None:
                    raise
                load(checked)
            if not self.resumption.is_aside:
                self.lookup.say()

        return resume_start

    def _make_resume_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def resume_end() -> None:
            original()  # ends with a barrier: all ranks have read what they need
            if not self.resumption.is_aside:
                self.resumption.end()
                self.lookup.end()

        return resume_end

    def _make_restore(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A Tuner's callback puts back what it saved before it tried something, while the fit begins: no resume, and
        one that is under way goes on."""

        def restore(*args: Any, **kwargs: Any) -> None:
            with self.resumption.aside(), self._doorway.loaded_kept():
                original(*args, **kwargs)

        return restore

    def roll_back(self, tier: LocalTier | RemoteTier, name: str, copies: Mapping[str, Manifest]) -> Source:
        """Take the run back to a checkpoint; see ``Resumption.roll_back``.  Collective.

        Args:
            tier: where it is, or is brought to.
            name: of it.
            copies: what it is called behind a URL, where there is no folder that has it.

        Raises:
            CheckpointCorrupt: it is damaged.
            CheckpointIncompatible: it does not fit what is trained now.
        """
        self.engine.finish_staging()
        source = self.lookup.open_again(tier, name, copies)
        self.resumption.roll_back(source)
        return source

    def leave_behind(self, folder: Folder, left: Mapping[str, Manifest], newest: str | None) -> None:
        """Call checkpoints of a folder suspect, as ``left`` says by their names, so that no start leads to them; its
        link leads to the ``newest`` that is left."""
        if self.ranks.rank not in folder.leaders:
            return
        if left and newest is not None:
            folder.lead_to(newest)
        for name in newest_first(left):
            manifest = left[name]
            try:
                store.suspect(folder.tier, name, manifest)
            except (OSError, ResilienceError) as error:
                log.warning("event=rollback name=%s outcome='it is still called healthy' error=%r", name, error)

    def skip_batches(self, count: int) -> int:
        """Leave out training batches of this epoch, its last one excepted; how many of ``count`` are left to do."""
        return self._doorway.skip_batches(count)
