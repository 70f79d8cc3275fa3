"""One Trainer's connection to the engine: what is saved, where a load comes from, and the doorway that leads here.

A session lives from a callback's ``setup`` to its ``teardown`` (or ``on_exception``), and is shared by all
``ResilientCheckpoint`` callbacks of a Trainer.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import tempfile
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_resilience import logged, run_state, scratch, slots, store, trainer_state
from lightning_resilience.arguments import identity
from lightning_resilience.attempts import Attempts, crash_loop, restarts_left, tried_in_vain
from lightning_resilience.data import DataPosition
from lightning_resilience.doorway import Doorway
from lightning_resilience.engine import OVERDUE, Engine, Facts, Folder, Save, Snapshot
from lightning_resilience.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    CheckpointUncommitted,
    ResilienceError,
    SaveFailed,
    SetupError,
)
from lightning_resilience.heal import make_whole
from lightning_resilience.manifest import MANIFEST, PINNED, WEIGHTS_ONLY, Manifest, newest_first, outlined
from lightning_resilience.memory import MemoryTier
from lightning_resilience.objects import Stat, shown
from lightning_resilience.places import Place, Source
from lightning_resilience.preemption import Preempted, Preemption, slurm_end
from lightning_resilience.ranks import Ranks, attempt, raise_first
from lightning_resilience.reader import canonical
from lightning_resilience.remote import RemoteTier
from lightning_resilience.resume import find_last, open_explicit, open_with_copies
from lightning_resilience.resumption import Resumption
from lightning_resilience.scratch import Scratch
from lightning_resilience.shards import PLAIN
from lightning_resilience.strategies import family_of, raw_optimizer
from lightning_resilience.tiers import LocalTier, local_path

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
        self.memory = MemoryTier(slots.check_memory(memory))
        """What killed processes of this run left on this node."""
        self.folders: dict[str, Folder] = {}
        self.resume_last: list[tuple[Place, list[str]]] = []
        """Where to look for ``ckpt_path="last"``, filled by callbacks that were asked for it: a place, and folders."""
        self.between_batches: list[Callable[[int, bool, bool], None]] = []
        """Called after each batch with its epoch, whether that has ended, and whether no gradients of a half-done
        accumulation window would be lost now; see ``Doorway.between_batches``."""
        self.preemption = Preemption(self.ranks)
        self.went_back: list[Callable[[Manifest], None]] = []
        """Called on all ranks when a run was taken back to an earlier checkpoint."""
        self.before_leaving: list[Callable[[], None]] = []
        """Called on all ranks, when training is about to stop for a signal and everything is saved."""
        self.save_seconds = 0.0
        """How long the slowest save so far took until it was committed."""
        self._boundary = (-1, False)
        self.places: dict[str, Place] = {}
        """The places that callbacks have, by their folder and by the URL behind it."""
        self.storage_options: list[dict[str, Any]] = []
        """What callbacks were given for their URLs."""
        self._shared: dict[str, Any] = {}
        """Arguments of callbacks that have to be the same for all of them."""
        self._starts_over = True
        self.max_attempts = math.inf
        self._attempts: Attempts | None = None
        self._scratches: dict[LocalTier, tuple[Scratch, bool]] = {}
        """Folders for what is fetched, and whether this rank is the one to remove each."""
        self._finished: list[Save] = []
        self._users = 0
        self._checked_meta = False
        self._doorway = Doorway(trainer)
        self.data = DataPosition(self._doorway, self.ranks.rank, self.ranks.world_size)
        self.resumption = Resumption(trainer, self.family, self.ranks, self._doorway, self.data, self.engine)
        self._attach()

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
        session = _sessions.get(id(trainer))
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
        session._starts_over &= on_unrestorable == "fresh"
        session.max_attempts = min(session.max_attempts, max_attempts)
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
            if self._attempts is not None:
                self._attempts.clear()
            if self.preempted:
                self.preemption.requeue()
                self._raise_preempted()

    def abandon(self, seconds: float, cause: BaseException) -> None:
        """Close the session without the other ranks, after the exception ``cause``: what is under way gets ``seconds``
        to finish.  What is in memory stays where the launcher starts the run again, here and now."""
        is_exit = isinstance(cause, SystemExit) and (isinstance(cause, Preempted) or not cause.code)
        if self._attempts is not None and (is_exit or isinstance(cause, (KeyboardInterrupt, ResilienceError))):
            self._attempts.forgive()
        self._users -= 1
        if self._users == 0:
            try:
                goes_on = restarts_left() and not isinstance(cause, (SystemExit, KeyboardInterrupt))
                self.engine.close(seconds, keep_memory=goes_on)
            finally:
                self._detach(abandoned=True)

    def _empty_scratches(self) -> None:
        for folder, is_mine in self._scratches.values():
            if is_mine:
                folder.empty()

    def _remove_scratches(self) -> None:
        for folder, is_mine in self._scratches.values():
            folder.close(remove=is_mine)
        self._scratches.clear()

    def _attach(self) -> None:
        door = self._doorway
        door.replace(door.strategy, "lightning_module_state_dict", lambda _: self.family.model_state)
        door.replace(door.strategy, "optimizer_state", lambda _: self._optimizer_state)
        door.replace(door.strategy, "save_checkpoint", lambda _: self._save_checkpoint)
        door.replace(door.strategy, "remove_checkpoint", lambda _: self._remove_checkpoint)
        door.replace(door.strategy, "load_checkpoint", self.resumption.make_load_checkpoint)
        door.replace(door.strategy, "load_model_state_dict", self.resumption.make_load_model_state_dict)
        door.replace(door.strategy, "load_optimizer_state_dict", self.resumption.make_load_optimizer_state_dict)
        door.replace(door.connector, "resume_start", self._make_resume_start)
        door.replace(door.connector, "resume_end", self._make_resume_end)
        if door.fitting:
            door.replace(door.strategy, "process_dataloader", self._make_process_dataloader)
            door.watch_set_up()
            door.before_first_batch(self._before_first_batch)
            door.between_batches(self._tell_between_batches)
            door.before_weights_change(self.engine.finish_staging)
            door.after_registering_signals(self._take_signals)

    def _before_first_batch(self) -> None:
        self._doorway.resume_batches()
        if self.resumption.exact_data:
            self.data.begun()

    def _tell_between_batches(self, epoch: int, epoch_ended: bool) -> None:
        batches = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if batches != self._boundary[0]:
            self._boundary = batches, self._doorway.at_step_boundary()
        for action in self.between_batches:
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

    def signal_to_ask(self, action: Callable[[int, bool, bool], None]) -> int:
        """What ``action``, one of ``between_batches``, has to ask the other ranks with: one of them asks for all."""
        return self.preemption.wanted(self.save_seconds) if action == self.between_batches[0] else 0

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
        raise self.preemption.stop(self.trainer.global_step, quietly=self._doorway.is_watched)

    def _detach(self, abandoned: bool = False) -> None:
        self._remove_scratches()
        self.memory.release()
        self.preemption.close()
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

    def place(self, tier: LocalTier | RemoteTier, cold: RemoteTier | None = None, *, find_out: bool = False) -> Place:
        """Where checkpoints of a tier are read from.  Collective.

        Args:
            tier: what is saved to; what has no local folder gets one for as long as this session lasts.
            cold: what is behind it.
            find_out: whether to find out which ranks share a folder that is not open, where they can write it;
                otherwise all are taken to.
        """
        cold = tier if isinstance(tier, RemoteTier) else cold
        if isinstance(tier, RemoteTier):
            place = Place(*self._scratch(), cold, self.memory, passing=True)
        else:
            place = Place(tier, self._sharing(tier, find_out), cold, self.memory)
        self.places[tier.where()] = place
        if cold is not None:
            self.places[cold.where()] = place
        return place

    def _sharing(self, tier: LocalTier, find_out: bool) -> tuple[int, ...]:
        """The ranks that share a folder; see ``place``."""
        if (folder := self.folders.get(tier.where())) is not None:
            return folder.sharing
        if find_out and self.ranks.world_size > 1:
            sharing = attempt(lambda: self.ranks.sharing(tier))  # fails on all ranks or on none
            if isinstance(sharing, tuple):
                return sharing
        return tuple(range(self.ranks.world_size))

    def remember(self, tier: LocalTier | RemoteTier) -> None:
        """Read what a killed process of the run whose folder is ``tier`` left in memory, and let the first such run be
        the one that this process leaves it to."""
        self.engine.belong_to(identity(tier))
        self.memory.look_for(identity(tier))

    def _scratch(self) -> tuple[LocalTier, tuple[int, ...]]:
        """A folder on this machine for what is fetched, and the ranks that share it."""
        token = self.ranks.broadcast(uuid.uuid4().hex[:12])
        opened: list[Scratch] = []
        raise_first(self.ranks.gathered(lambda: opened.append(Scratch(Path(tempfile.gettempdir()), token))))
        tier = LocalTier(opened[0].path)
        sharing = self.ranks.sharing(tier)
        self._scratches[tier] = opened[0], self.ranks.rank == sharing[0]
        return tier, sharing

    def ends_within_an_epoch(self) -> bool:
        """Whether training stops now, in the middle of an epoch that a longer run would go on with."""
        return self._doorway.ends_within_an_epoch()

    def finished(self, folder: Folder | None) -> list[Save]:
        """The saves to a folder that ended since the last call."""
        for save in self.engine.poll():
            self._finished.append(save)
            begun = self.resumption.resumed.manifest if self.resumption.resumed is not None else None
            is_newer = begun is None or save.step > begun.step  # by hand, and at a start's end, steps are saved again
            if self._attempts is not None and save.committed.exception() is None and is_newer:
                self._attempts.clear()
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
        *,
        reason: str,
        metrics: Mapping[str, float],
        epoch: int,
        settled: bool,
        weights_only: bool = False,
        replace: bool = False,
        labels: tuple[str, ...] = (),
        suspicion: str = "",
        off_since: int | None = None,
        overlap: bool = False,
    ) -> Save | None:
        """Start a save of the Trainer's state as it is now; None where one is under way.

        Args:
            folder: where to.
            name: of the checkpoint.
            reason: why, for the manifest.
            metrics: for the manifest.
            epoch: for the manifest.
            settled: whether Lightning is between two batches, with nothing of the last one left to do.
            weights_only: leave out all but the weights.
            replace: whether a checkpoint of that name gives way.
            labels: for the manifest; rank 0's count.
            suspicion: why it is not to be resumed from, if it is not; rank 0's counts.
            off_since: the step since which the loss is off its course, if it is; rank 0's counts.
            overlap: whether a forward and a backward pass follow, and copying may go on meanwhile.
        """
        facts = dataclasses.replace(
            self._facts(reason, epoch, metrics, weights_only, labels), suspicion=suspicion, off_since=off_since
        )

        def capture() -> Snapshot:
            return self._snapshot(self._doorway.dump_checkpoint(weights_only), settled)

        return self.engine.save(folder, name, facts, capture, replace=replace, overlap=overlap)

    def prepare(self, weights_only: bool) -> None:
        """Make ready for saves of the state as it is now, its optimizers' once they have stepped.  Collective."""

        def capture() -> Snapshot:
            state: dict[str, Any] = {self.family.prefix: self.family.model_state()}
            if not weights_only:
                for index, optimizer in enumerate(self.trainer.optimizers):
                    state[f"optimizer_{index}"] = self._optimizer_state(optimizer)
            return Snapshot(state, self.family.identical(state), b"", b"", lambda: self._trained(state))

        self.engine.prepare(capture)

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

    def _facts(
        self, reason: str, epoch: int, metrics: Mapping[str, float], weights_only: bool, labels: tuple[str, ...] = ()
    ) -> Facts:
        return Facts(
            step=trainer_state.step_of(self.trainer),
            epoch=epoch,
            reason=reason,
            strategy=type(self.trainer.strategy).__name__,
            labels=(*((WEIGHTS_ONLY,) if weights_only else ()), *labels),
            metrics=metrics,
            versions=trainer_state.VERSIONS,
        )

    def _snapshot(self, checkpoint: dict[str, Any], settled: bool = False) -> Snapshot:
        """Split a Trainer's checkpoint into tensors for DCP and the rest, which is serialised here and now."""
        state, rest = trainer_state.split(checkpoint, self.family.prefix)
        meta: bytes | Exception = b""
        if self.ranks.rank == 0:
            meta = self._dump(rest)
        _check_saveable(state)
        identical = self.family.identical(state)
        own: dict[str, Any] = {**run_state.capture(), "settled": settled}
        own["stop_is_wanted"] = self._doorway.stop_is_wanted
        if self._doorway.training:
            own["logged"] = logged.capture(self.trainer)
        if self.ranks.rank:
            names = {canonical(name) for name in state[self.family.prefix]}
            own["buffers"] = run_state.own_buffers(self.trainer.lightning_module, names)
        own["syncs_buffers"] = self._doorway.syncs_buffers
        if self.resumption.exact_data:
            own["data"] = self.data.state()
        return Snapshot(
            state,
            identical,
            meta,
            run_state.to_bytes(own),
            lambda: self._trained(state),
            lambda: self.family.still(state),
        )

    def _trained(self, state: Mapping[str, Any]) -> set[str]:
        """Flat keys of the model's parameters and their moments: no buffers, which may be infinite (masks are), and no
        frozen ones."""
        module, prefix = self.trainer.lightning_module, self.family.prefix
        frozen = {canonical(name) for name, parameter in module.named_parameters() if not parameter.requires_grad}
        frozen |= {canonical(name) for name, _ in module.named_buffers()}
        moments = {
            f"{part}.state.{name}.{key}"
            for part, content in state.items()
            if part.startswith("optimizer_")
            for name, of_parameter in content.get("state", {}).items()
            if isinstance(of_parameter, dict)
            for key, value in of_parameter.items()
            if isinstance(value, torch.Tensor) and value.dim()
        }
        return moments | {f"{prefix}.{name}" for name in state[prefix] if canonical(name) not in frozen}

    def _dump(self, rest: Mapping[str, Any]) -> bytes | Exception:
        """Serialise the rest.  What cannot be saved at all stops the run at its first save, before hours are at
        stake; later on it costs that save."""
        try:
            meta = trainer_state.dump(rest)
            if not self._checked_meta:
                trainer_state.check_loads(meta)
        except SaveFailed as error:
            if not self._checked_meta:
                raise
            return error
        self._checked_meta = True
        return meta

    def _optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return self.family.optimizer_state(raw_optimizer(optimizer))

    def _save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """In the place of ``Strategy.save_checkpoint``: for callers who expect the checkpoint to be there on return."""
        if storage_options is not None:
            raise TypeError("storage_options is not used: ResilientCheckpoint writes to a folder.")
        text: str = self.ranks.broadcast(os.fspath(filepath))
        if "://" in text and not text.startswith("file://"):
            raise SetupError(f"trainer.save_checkpoint takes no URL, but {shown(text)!r} is one.", hint="Use remote=.")
        path = local_path(text).absolute()
        weights_only = "optimizer_states" not in checkpoint
        facts = self._facts("trainer.save_checkpoint", self.trainer.current_epoch, {}, weights_only, (PINNED,))
        save = self.save_now(
            self.folder(LocalTier(path.parent)), path.name, facts, lambda: self._snapshot(checkpoint), replace=True
        )
        if self.ranks.rank == 0:
            log_save(save)

    def _remove_checkpoint(self, filepath: Any) -> None:
        """In the place of ``Strategy.remove_checkpoint``, for a stock ModelCheckpoint beside ours."""
        path = local_path(os.fspath(filepath)).absolute()
        folder = self.folder(LocalTier(path.parent))
        if self.ranks.rank == folder.sharing[0] and path.exists():
            folder.tier.remove(path.name)

    # -- resuming -----------------------------------------------------------------------------------------------------

    def _make_process_dataloader(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def process_dataloader(dataloader: Any) -> Any:
            loader = original(dataloader)
            return (
                self.data.track(loader)
                if self.resumption.exact_data and self._doorway.processes_training_data
                else loader
            )

        return process_dataloader

    def _make_resume_start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
            source = self._choose(checkpoint_path)
            self.resumption.take(source if isinstance(source, Source) else None)
            if isinstance(source, Source):
                original(str(source.path), weights_only=weights_only)
            else:
                original(source, weights_only=weights_only)

        return resume_start

    def _make_resume_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def resume_end() -> None:
            original()  # ends with a barrier: all ranks have read what they need
            self.resumption.end()
            self._empty_scratches()
            self._leave_memory()

        return resume_end

    def _leave_memory(self) -> None:
        """Give back what dead processes left, before there are new slots, or leave it to a run that trains."""
        self.memory.release()
        self.ranks.any_max(0)
        if self._doorway.fitting:
            self.memory.remove()
        self.ranks.any_max(0)

    def _choose(self, checkpoint_path: Any) -> Source | str | None:
        """What to load: a checkpoint of ours, a path for stock Lightning to load, or nothing."""
        if self.ranks.any_max(bool(self.resume_last))[0]:
            source = self._newest(self._places_to_search())
            if isinstance(source, Source):
                return source
            if source is not None:
                is_file = self.ranks.broadcast(Path(source).is_file())
                return source if is_file else open_explicit(self.ranks, Path(source), needs=self.resumption.needs)
            checkpoint_path = self.ranks.broadcast(self._doorway.last_of_stock_callbacks())
            if checkpoint_path is None and not self._doorway.fitting:
                raise CheckpointNotFound(
                    "ckpt_path='last' was given, and there is no checkpoint.", hint="Check dirpath=, or give a path."
                )
        text: str | None = self.ranks.broadcast(None if checkpoint_path is None else os.fspath(checkpoint_path))
        if text is None:
            return None
        if "://" in text and not text.startswith("file://"):
            return self._from_url(text)
        path = local_path(text).absolute()
        is_file, is_ours = self.ranks.broadcast((path.is_file(), (path.parent / MANIFEST).is_file()))
        if is_file and is_ours:
            raise CheckpointNotFound(f"{text!r} is a file of a checkpoint.", hint=f"Give {str(path.parent)!r}.")
        # Of a folder that is called differently on every node, each rank opens its own.
        known = {where: folder.tier for where, folder in self.folders.items()}
        known |= {where: place.tier for where, place in self.places.items() if where == place.tier.where()}
        roots, parent = list(known), str(path.parent)
        number = self.ranks.broadcast(roots.index(parent) if parent in roots else None)
        if number is not None:
            tier = known[roots[number]]
            assert isinstance(tier, LocalTier)
            return self._from_folder(tier, path.name)
        return str(path) if is_file else open_explicit(self.ranks, path, needs=self.resumption.needs)

    def _from_folder(self, tier: LocalTier, name: str) -> Source:
        """A checkpoint of a folder that is open, or of the cold tier behind it."""
        place = self.places.get(tier.where()) or self.place(tier)
        try:
            return open_explicit(self.ranks, tier.path(name), place, self.resumption.needs)
        except (CheckpointNotFound, CheckpointUncommitted, CheckpointCorrupt) as error:
            if place.cold is None and isinstance(error, CheckpointCorrupt):
                raise
            found: Source | str | None = open_with_copies(self.ranks, place, name, self.resumption.needs)
            if found is None and place.cold is not None:
                found = self._from_url(place.cold.where(name))
            if isinstance(found, Source):
                return found
            raise

    def _from_url(self, url: str) -> Source | str:
        """The checkpoint at a URL; the URL itself where stock Lightning can load what is there."""
        root, _, name = url.rstrip("/").rpartition("/")
        place = self.places.get(root)
        if place is None:
            options = next(iter(self.storage_options), None)
            place = self.place(RemoteTier(root, options))
        cold = place.cold
        assert cold is not None
        found = self.ranks.told(lambda: store.read_manifest(cold, name))
        if isinstance(found, Manifest):
            tier = place.tier
            here = attempt(lambda: store.read_manifest(tier, name))
            is_another = isinstance(here, Manifest) and not here.is_same_save(found)
            if self.ranks.any_max(is_another)[0]:
                place = Place(*self._scratch(), cold, self.memory, passing=True)
            copies = {name: found}
            return make_whole(self.ranks, place, name, save=found.save_id, copies=copies, needs=self.resumption.needs)
        if isinstance(found, (CheckpointNotFound, CheckpointUncommitted)):
            stat = self.ranks.told(lambda: cold.patience(lambda: cold.objects.stat(name)))
            if isinstance(stat, Stat):
                return url
            hint = self.ranks.told(lambda: store.available(cold))
            raise type(found)(found.message, hint=hint if isinstance(hint, str) else "")
        assert isinstance(found, BaseException)
        raise found

    def _places_to_search(self) -> list[Place]:
        others: list[str] = self.ranks.broadcast([path for _, paths in self.resume_last for path in paths])
        places = [place for place, _ in self.resume_last]
        self.resume_last = []
        known = {place.tier.root for place in places}
        for path in others:
            self.memory.look_for(identity(LocalTier(path)))
        return places + [self.place(LocalTier(path)) for path in others if Path(path) not in known]

    def _newest(self, places: list[Place]) -> Source | str | None:
        tried = self._tried_in_vain(places)
        search = find_last(self.ranks, places, self.resumption.needs, tried)
        if search.source is not None:
            self._begin_attempt(search.source, [name for _, name in tried])
            self._say(search.source, search.explain())
            return search.source
        if tried:
            raise crash_loop([place.tier for place in places], tried)
        if not search.skipped:
            stock = self.ranks.told(lambda: store.newest_stock(places[0].tier) if places else None)
            if isinstance(stock, BaseException):
                raise stock
            if stock is not None:
                rank_zero_warn(
                    f"There is no checkpoint of ResilientCheckpoint yet; resuming {stock}, of stock Lightning."
                )
                return stock
            if self.ranks.rank == 0:
                where = ", ".join(place.cold.where() if place.cold else place.tier.where() for place in places)
                log.info("event=start step=0 reason='no checkpoint yet in %s'", where)
            return None
        message = f"There are checkpoints, but none can be resumed from: {search.explain()}."
        if self._starts_over:
            rank_zero_warn(f"{message} Starting over from step 0, because on_unrestorable='fresh'.")
            return None
        raise CheckpointCorrupt(
            message,
            problems=tuple(f"{path}: {why}" for path, why in search.skipped.items()),
            hint="Repair or remove them, or set on_unrestorable='fresh' to start over.",
        )

    def _tried_in_vain(self, places: list[Place]) -> dict[tuple[int, str], str]:
        """The checkpoint that a run is not to be started from once more, and why, by number of the place and name.

        Raises:
            CrashLoop: there are two already.
        """
        asks = self.ranks.rank == 0 and self._doorway.fitting
        tiers = [place.tier for place in places]
        tried = self.ranks.broadcast(tried_in_vain(tiers, self.max_attempts) if asks else {})
        if len(tried) > 1:
            raise crash_loop(tiers, tried)
        return tried

    def _begin_attempt(self, source: Source, passed_over: list[str]) -> None:
        """Count this start, until something shows that it was no crash."""
        is_lasting = source.tier not in self._scratches
        if self.ranks.rank == 0 and self._doorway.fitting and self.max_attempts < math.inf and is_lasting:
            self._attempts = Attempts(source.tier.root)
            self._attempts.begin(source.name, passed_over)

    def _say(self, source: Source, skipped: str) -> None:
        """One line that says what is resumed."""
        if self.ranks.rank == 0 and source.manifest is not None:
            step, size = source.manifest.step, self.ranks.world_size
            note = f" skipped={skipped!r}" if skipped else ""
            log.info("event=resume step=%d from=%s %s ranks=%d%s", step, source.path, _origin(source), size, note)

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
        place = self.places.get(tier.where()) or self.place(tier)
        save = next((manifest.save_id for manifest in copies.values()), None)
        try:
            source = make_whole(self.ranks, place, name, save=save, copies=copies or None, needs=self.resumption.needs)
        except CheckpointCorrupt:
            healed = open_with_copies(self.ranks, place, name, self.resumption.needs)
            if healed is None:
                raise
            source = healed
        self.resumption.roll_back(source)
        return source

    def leave_behind(self, folder: Folder, left: Mapping[str, Manifest], newest: str | None) -> None:
        """Call checkpoints of a folder suspect, as ``left`` says by their names, so that no start leads to them; its
        link leads to the ``newest`` that is left."""
        if self.ranks.rank not in folder.leaders:
            return
        if left and newest is not None and folder.link is not None:
            try:
                folder.tier.point(folder.link, newest)
            except OSError as error:
                log.warning("event=link folder=%s error=%r", folder.tier.where(), error)
        for name in newest_first(left):
            manifest = left[name]
            try:
                store.suspect(folder.tier, name, manifest)
            except (OSError, ResilienceError) as error:
                log.warning("event=rollback name=%s outcome='it is still called healthy' error=%r", name, error)

    def skip_batches(self, count: int) -> int:
        """Leave out training batches of this epoch, its last one excepted; how many of ``count`` are left to do."""
        return self._doorway.skip_batches(count)


def _origin(source: Source) -> str:
    """From which tiers it is read, and how much."""
    here, all_of = source.shards_in_memory
    from_where = {"memory": here, "hot": source.from_folder, "cold": source.fetched}
    numbers = f" fetched={source.fetched}" if source.fetched else ""
    numbers += f" memory={here}/{all_of}" if here else ""
    return f"tier={','.join(tier for tier, some in from_where.items() if some)}{numbers}"


def _check_saveable(state: Mapping[str, Any]) -> None:
    """Stop at the first save where a tensor has no plain memory to copy."""
    for part in state.values():
        for name, value in part.items():
            if type(value) in PLAIN and (value.layout != torch.strided or value.is_quantized):
                raise SaveFailed(
                    f"{name} is a {'quantized' if value.is_quantized else value.layout} tensor, which cannot be saved.",
                    stage="plan",
                    hint="Keep it out of the state dict (persistent=False), or convert it in on_save_checkpoint.",
                )


def log_save(save: Save) -> None:
    """One line for a save that was committed."""
    committed = save.committed.result()
    log.info(
        "event=save step=%d name=%s bytes=%d stall=%.3f persist=%.3f reason=%r",
        save.step,
        committed.name,
        committed.manifest.size,
        save.stall,
        save.persist,
        committed.manifest.reason,
    )


def manifests_in(folder: Folder, ranks: Ranks) -> dict[str, Manifest]:
    """The committed checkpoints of a folder as its leader lists them, on all ranks; without their files but on rank 0,
    as after a save.  Collective."""
    found = attempt(lambda: store.list_checkpoints(folder.tier).committed) if ranks.rank == folder.sharing[0] else None
    answers = ranks.all_gather(outlined(found) if isinstance(found, dict) else found)
    raise_first([answer for answer in answers if answer is not None])
    listing: Any = found if ranks.rank == 0 else answers[folder.sharing[0]]
    assert isinstance(listing, dict)
    return listing
