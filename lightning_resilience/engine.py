"""A save, from the training thread to the commit.

::

    training thread                          background thread of each rank
    ───────────────                          ──────────────────────────────
    agree: is any rank busy?
    capture the state
    plan (first time, or its shape changed)
    stage: copy it into a slot  ──────────>  (the rest of the copy, see ``staging``)
    … training goes on …                     persist: write the slot's bytes as they come, digest, fsync
                                             report to the board
                                             leader of each folder: all reported? manifest, rename
                                             verdict on the board
    poll: hear of it
    tidy                     ──────────>     remove what the folder's rule gives up

All ranks call ``save`` at the same step.  What one rank cannot do reaches the others as a verdict: then the attempt
is dropped on all of them, nothing of it stays, and the checkpoints before it are as they were.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from lightning_resilience import points, retention, store
from lightning_resilience.errors import ResilienceError, SaveFailed
from lightning_resilience.flat import FlatState, State
from lightning_resilience.health import first_not_finite
from lightning_resilience.manifest import (
    HEALTHY,
    MANIFEST,
    META,
    METADATA,
    OFF_SINCE,
    PINNED,
    SUSPECT,
    Manifest,
    rank_file,
)
from lightning_resilience.planning import Plan, Planner, Prepared
from lightning_resilience.ranks import Board, Ranks, attempt, raise_first
from lightning_resilience.remote import RemoteTier
from lightning_resilience.retention import Keep, Ranking
from lightning_resilience.shards import collector_paused
from lightning_resilience.slots import Slot, dump_objects
from lightning_resilience.staging import Staging
from lightning_resilience.threads import give_way
from lightning_resilience.tiers import LocalTier, Ready, is_there, partial_name
from lightning_resilience.verdict import Report, Verdict, describe

log = logging.getLogger("lightning_resilience")


OVERDUE = 60.0
"""Seconds after its deadline at which a save that has not even failed is spoken of."""


Keys: TypeAlias = Callable[[FlatState], Collection[str]]
"""Gives some of the keys of a flat state."""


def no_keys(_: FlatState) -> Collection[str]:
    """No keys."""
    return ()


@dataclass(frozen=True)
class Snapshot:
    """What a save copies: references to the live state, and what is already serialised.

    Args:
        state: nested tensors and objects, as DCP takes them; this rank's part.
        identical: gives the keys of plain tensors that all ranks hold bit for bit, of the flat state.
        meta: content of ``meta.pt``, of which rank 0's is written; or why there is no_keys, which drops the save.
        rank_state: content of this rank's own file.
        trained: gives the keys of the parameters, which must be finite in a checkpoint to resume from.
        still: gives the keys of tensors that nothing but an optimizer's step changes.
    """

    state: State
    identical: Keys
    meta: bytes | Exception
    rank_state: bytes
    trained: Keys = no_keys
    still: Keys = no_keys


@dataclass(frozen=True)
class Facts:
    """What the manifest says of a save beside its files; rank 0's are written.  With a ``suspicion`` a run does not
    resume from it; ``off_since`` is the step since which the loss is off its course."""

    step: int
    epoch: int
    reason: str
    strategy: str
    suspicion: str = ""
    labels: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    off_since: int | None = None


@dataclass(frozen=True, eq=False)
class Folder:
    """A tier as this rank sees it: which ranks share it, and the rule of what it keeps."""

    tier: LocalTier | RemoteTier
    sharing: tuple[int, ...]
    leaders: tuple[int, ...]
    keep: Keep | None = None
    ranking: Ranking | None = None
    link: str | None = None
    remote_keep: Keep | None = None

    @property
    def leader(self) -> int:
        """The rank that acts for all that share it."""
        return self.sharing[0]

    def lead_to(self, name: str) -> None:
        """Let the link, where there is one, point to a checkpoint.  For leaders; a link is worth no failed save."""
        if self.link is not None:
            try:
                self.tier.point(self.link, name)
            except OSError as error:
                log.warning("event=link folder=%s error=%r", self.tier.where(), error)


@dataclass
class Save:
    """One save under way: futures for its stages, and how long they took in seconds: ``stall`` of the training thread,
    ``stage`` of copying, also behind it, and ``persist`` of writing, which goes on beside that."""

    step: int
    attempt: int
    sequence: int
    folder: Folder
    facts: Facts
    staged: Future[None] = field(default_factory=Future)
    committed: Future[Committed] = field(default_factory=Future)
    began: float = field(default_factory=time.perf_counter)
    stall: float = 0.0
    stage: float = 0.0
    persist: float = 0.0
    seconds: float = 0.0
    """How long it took from its beginning to the commit."""

    def wait(self, seconds: float | None = None) -> Committed:
        """Block until it is committed.

        Raises:
            SaveFailed: it was dropped, or is not done after ``seconds``.
        """
        if not wait_for([self.committed], seconds).done:
            raise SaveFailed(f"The save of step {self.step} is not done after {seconds:.0f} s.", step=self.step)
        return self.committed.result()


@dataclass(frozen=True)
class Committed:
    """A checkpoint that exists: its ``path`` (a text with its URL where there is no folder) and ``manifest``, on ranks
    other than 0 without the files."""

    path: Path | str
    manifest: Manifest

    @property
    def name(self) -> str:
        """Last component of the path."""
        return os.path.basename(self.path)


@dataclass
class _Job:
    """What the training thread hands to the background: the bytes of each file, or why there are none."""

    save: Save
    name: str
    replace: bool
    files: dict[str, Any] = field(default_factory=dict)
    ready: dict[str, Ready] = field(default_factory=dict)
    metadata: Callable[[], bytes] | None = None
    parameters: list[tuple[str, Tensor]] = field(default_factory=list)
    slot: Slot | None = None
    staging: Staging | None = None
    error: BaseException | None = None
    dropped: bool = False

    def release(self) -> None:
        """Refer to no slot any more."""
        self.staging = None
        self.files.clear()
        self.ready.clear()
        self.parameters.clear()
        self.slot = None


class Engine:
    """Saves of one run, on one rank.

    Creating it is collective, as are ``open_folder``, ``save`` and ``close``.

    Args:
        ranks: the ranks that save together.
        memory: where slots are; see ``SlotMemory``.
        timeout: seconds after which a save that some rank has not finished is dropped.
    """

    def __init__(self, ranks: Ranks, *, memory: Any = "auto", timeout: float = 1800.0) -> None:
        self.ranks = ranks
        self.run = ranks.broadcast(str(uuid.uuid4()))
        self.sequence = 0
        self._failures: dict[Folder, int] = {}
        self.in_use: set[str] = set()
        self._protected: dict[Folder, Callable[[], Collection[str]]] = {}
        self.timeout = timeout
        self._planner = Planner(ranks, memory)
        self._in_flight: Save | None = None
        self._staging: Staging | None = None  # of the save in flight, until the slot holds everything
        self.overlaps = True
        """Whether staging goes on behind the training thread where a save allows it."""
        self._attempts = 0
        self._finished: queue.SimpleQueue[Save] = queue.SimpleQueue()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._board: Board | None = None
        self._verdict: Verdict | None = None
        self._copied = "", b""  # the digest and content of the ``.metadata`` that was taken over last

    # -- folders ------------------------------------------------------------------------------------------------------

    def open_folder(
        self,
        tier: LocalTier | RemoteTier,
        *,
        keep: Keep | None = None,
        ranking: Ranking | None = None,
        link: str | None = None,
        remote_keep: Keep | None = None,
    ) -> Folder:
        """For saving: check that every rank can write its folder, find out who shares it, and clear what a killed run
        left there.

        Raises:
            TierUnavailable, TierDenied: a rank cannot use its folder; on all ranks.
        """
        if isinstance(tier, LocalTier):
            sharing = self.ranks.sharing(tier)
        else:
            raise_first(self.ranks.gathered(lambda: tier.check_writable() if self.ranks.rank == 0 else None))
            sharing = tuple(range(self.ranks.world_size))
        leaders = tuple(sorted(set(self.ranks.all_gather(sharing[0]))))
        folder = Folder(tier, sharing, leaders, keep, ranking, link, remote_keep)
        raise_first(self.ranks.gathered(lambda: self._take_over(folder)))
        return folder

    def go_on(self, last: Manifest, names: Collection[str]) -> None:
        """The run is one that was saved before, ``last`` under ``names``, which stay."""
        self.run = last.run
        self.sequence = max(self.sequence, last.sequence)
        self.in_use |= set(names)

    def belong_to(self, run: str) -> None:
        """Let what a kill leaves in memory be found by the next start of a run; see ``SlotMemory.belong_to``."""
        self._planner.belong_to(run)

    def protect(self, folder: Folder, names: Callable[[], Collection[str]]) -> None:
        """Ask ``names`` before each removal from a folder what must stay there, whatever its rule says."""
        self._protected[folder] = names

    def must_stay(self, folder: Folder) -> set[str]:
        """Names that must stay in a folder now: what was resumed from, what is on its way elsewhere."""
        return {*self.in_use, *self._protected.get(folder, tuple)()}

    def _take_over(self, folder: Folder) -> None:
        if self.ranks.rank == folder.leader:
            for sentence in store.sweep(folder.tier):
                log.warning("event=sweep folder=%s what=%r", folder.tier.where(), sentence)
            if isinstance(folder.tier, RemoteTier):
                folder.tier.sweep_uploads()
                folder.tier.sweep(store.list_checkpoints(folder.tier).uncommitted)

    def count_from(self, manifests: Collection[Manifest]) -> None:
        """Number the saves to come after those that are there, on all ranks alike."""
        newest = max((manifest.sequence for manifest in manifests), default=0)
        self.sequence = self.ranks.any_max(max(newest, self.sequence))[0]

    # -- the training thread ------------------------------------------------------------------------------------------

    def failures(self, folder: Folder) -> int:
        """How many saves to a folder have failed in a row."""
        return self._failures.get(folder, 0)

    @property
    def busy(self) -> bool:
        """Whether this rank still works on a save."""
        return self._in_flight is not None and not self._in_flight.committed.done()

    def save(
        self,
        folder: Folder,
        name: str,
        facts: Facts,
        capture: Callable[[], Snapshot],
        *,
        replace: bool = False,
        overlap: bool = False,
    ) -> Save | None:
        """Start a save: on return training may go on, as far as ``finish_staging`` where copying overlaps it.

        Args:
            folder: where to.
            name: wanted name of the checkpoint; rank 0's counts, and it gets a version if it is taken.
            facts: what the manifest says of it.
            capture: gives the state; called once it is certain that there is a save.
            replace: whether a checkpoint of that name gives way, instead.
            overlap: whether what a forward and a backward pass leave alone may be copied while they run.

        Returns:
            The save, which may already have failed; None where the one before it is not done on some rank.
        """
        begin = time.perf_counter()
        before = self._in_flight
        if before is not None and before.folder is not folder and before.step == facts.step:
            self.drain(self.timeout)  # two callbacks that save the same step take turns, or one would always be skipped
        if self.ranks.any_max(self.busy)[0]:
            if self.ranks.rank == 0:
                log.info("event=skip step=%d reason='the save before it is not done'", facts.step)
            return None
        with collector_paused():
            snapshot = capture()
        self._attempts += 1
        self.sequence += 1
        save = self._in_flight = Save(facts.step, self._attempts, self.sequence, folder, facts, began=begin)
        # Behind a URL nothing gives way in one step, so the new one gets a version there.
        job = _Job(save, name, replace and isinstance(folder.tier, LocalTier))
        try:
            with collector_paused():
                self._stage(job, snapshot, overlap and self.overlaps)
            if job.staging is not None:
                job.staging.start()  # last: from here on its thread and this one take turns
        except Exception as error:
            job.error = error
        else:
            if job.staging is None:
                _tell_staged(save)
        save.stall = time.perf_counter() - begin
        self._submit(partial(self._see_through, job))
        return save

    def finish_staging(self) -> None:
        """Return when weights may change.  To be called before they do, on the thread that will change them."""
        staging, save = self._staging, self._in_flight
        if staging is None or save is None:
            return
        begin = time.perf_counter()
        staging.let_go_on()
        save.stall += time.perf_counter() - begin
        if staging.is_done:
            self._staging = None

    def prepare(self, capture: Callable[[], Snapshot]) -> None:
        """Plan and allocate for the state as it is now, so that the first save finds it done.  Collective.

        Nothing is saved, and where there is a plan nothing happens.  What fails here fails again at the save, which
        tells of it.

        Args:
            capture: gives the state, and no more than that has to be in it.
        """
        if self._planner.plan is not None or self.ranks.any_max(self.busy)[0]:
            return
        with collector_paused():
            snapshot = attempt(capture)
            prepared = snapshot if isinstance(snapshot, BaseException) else attempt(partial(self._prepare, snapshot))
            if self.ranks.any_max(isinstance(prepared, BaseException))[0]:
                return
            assert isinstance(snapshot, Snapshot)
            assert isinstance(prepared, Prepared)
            try:
                plan = self._planner.replan(prepared, snapshot.trained)
            except Exception as error:
                log.warning("event=prepare error=%r", error)
                return
        self._submit(partial(self._finish, plan))

    def _stage(self, job: _Job, snapshot: Snapshot, overlap: bool) -> None:
        prepared = attempt(lambda: self._prepare(snapshot))
        unprepared = isinstance(prepared, BaseException)
        outgrown = not isinstance(prepared, BaseException) and prepared.objects is None
        failed, replan = self.ranks.any_max(unprepared, outgrown)
        if isinstance(prepared, BaseException):
            raise prepared
        if failed:
            job.dropped = True  # another rank says why
            return
        plan = self._planner.replan(prepared, snapshot.trained) if replan else self._planner.plan
        assert plan is not None
        slot = plan.next_slot()
        begin = time.perf_counter()
        objects = prepared.objects or dump_objects(plan.layout, prepared.flat) or {}
        job.staging = self._staging = slot.fill(
            prepared.flat, objects, snapshot.still(prepared.flat) if overlap else ()
        )
        job.save.stage = time.perf_counter() - begin
        rank = self.ranks.rank
        job.slot = slot
        job.parameters = slot.tensors(plan.trained)
        for file, where in plan.layout.files(rank).items():
            job.files[file] = slot.view()[where]
            if job.staging is not None:
                job.ready[file] = partial(job.staging.await_below, base=slot.address + where.start)
        job.files[rank_file(rank)] = snapshot.rank_state
        if rank == 0:
            job.files[META] = snapshot.meta
            job.metadata = plan.metadata

    def _prepare(self, snapshot: Snapshot) -> Prepared:
        if isinstance(snapshot.meta, Exception):
            raise snapshot.meta
        return self._planner.prepare(snapshot.state, snapshot.identical)

    def _submit(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="resilience-persist", daemon=True)
            self._thread.start()
        self._jobs.put(partial(_guarded, job))

    def poll(self) -> list[Save]:
        """The saves that were committed or dropped since the last call, oldest first."""
        finished = []
        while not self._finished.empty():  # nobody else takes from it
            finished.append(self._finished.get())
        return finished

    def tidy(self, save: Save) -> None:
        """Remove what the folder's rule gives up now that ``save`` is committed, in the background.

        Call it once the news of the save is out: until then, what users know of must stay.
        """
        if save.folder.keep is not None and self.ranks.rank in save.folder.leaders and self._thread is not None:
            self._submit(partial(self._retain, save))

    def drain(self, seconds: float) -> bool:
        """Wait for the save under way, if any; whether it is done."""
        save = self._in_flight
        return save is None or bool(wait_for([save.committed], seconds).done)

    @property
    def overdue(self) -> Save | None:
        """A save that its storage keeps from ending, long after it should have been dropped."""
        save = self._in_flight
        late = self.busy and save is not None and time.perf_counter() - save.began > self.timeout + OVERDUE
        return save if late else None

    def close(self, seconds: float | None = None, *, keep_memory: bool = False) -> None:
        """End the background work and give all memory back, or let the process after this one find it.  Not
        collective: rank 0 may leave only when all are done."""
        done = self.drain(self.timeout if seconds is None else seconds)
        if not done:
            log.warning("event=close reason='left while a save was under way; it is dropped'")
            if self._staging is not None:
                self._staging.cancel()
                self._staging.wait(5.0)  # its slot is about to go
        if self._thread is not None:
            self._jobs.put(None)
            if done:
                self._thread.join(timeout=30)
            self._thread = None
        self._planner.close(keep_memory=keep_memory)

    # -- the background thread ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _finish(self, plan: Plan) -> None:
        try:
            self._planner.finish(plan)
        except Exception as error:
            log.warning("event=prepare error=%r", error)

    def _see_through(self, job: _Job) -> None:
        """Bring a save to its end, whichever that is, and tell of it."""
        save, begin = job.save, time.perf_counter()
        try:
            committed = self._persist(job)
        except BaseException as error:
            self._give_up(job, _as_save_failed(error, save.step, self.ranks.rank))
            return
        self._failures[save.folder] = 0
        job.release()
        now = time.perf_counter()
        save.persist, save.seconds = now - begin, now - save.began
        self._finished.put(save)
        save.committed.set_result(committed)
        self._planner.map_rest()

    def _give_up(self, job: _Job, failure: SaveFailed) -> None:
        save = job.save
        self._failures[save.folder] = self.failures(save.folder) + 1
        try:
            if job.staging is not None:
                job.staging.cancel()
                job.staging.wait(self.timeout)  # the next save has a staging of its own
        finally:
            job.release()
            if not save.staged.done():
                save.staged.set_exception(failure)
            self._finished.put(save)
            save.committed.set_exception(failure)

    def _look_at_staged(self, job: _Job) -> str | None:
        """Once the slot holds everything: the first parameter that is not finite.

        Raises:
            SaveFailed: the slot does not hold what it should.
        """
        staging = job.staging
        if staging is not None:
            job.error = staging.wait(self.timeout)
            job.save.stage += staging.seconds
            if staging.changed is not None and self.overlaps:
                self.overlaps = False
                why = f"{staging.changed} was changed outside of an optimizer's step: all is copied at once from now on"
                log.warning("event=overlap rank=%d reason=%r", self.ranks.rank, why)
            if job.error is not None:
                raise job.error
            _tell_staged(job.save)
        return first_not_finite(job.parameters)

    def _persist(self, job: _Job) -> Committed:
        """Write this rank's files, then see the save through to its verdict."""
        if self._board is None:
            self._board = self.ranks.board()
        save, rank = job.save, self.ranks.rank
        tier, leads = save.folder.tier, rank in save.folder.leaders
        if isinstance(tier, LocalTier):  # a client of a store may start threads that its other users share
            give_way()
        prefix = f"{self.ranks.session}/{save.attempt}"
        verdict = Verdict(self._board, prefix, self.ranks, save.folder.leaders, self.timeout)
        if self._verdict is not None and rank == 0:
            self._verdict.clear()  # there would be no save now if any rank was not done with the one before
        self._verdict = verdict
        unfinished = name = ""
        whole: Manifest | None = None
        with ExitStack() as hold:
            try:
                if job.error is not None:
                    raise job.error
                if not job.dropped:
                    points.reach("persist.begin")
                    if rank == 0:
                        verdict.name(self._claim_name(job))
                    unfinished = partial_name(verdict.wait_name(), self.ranks.session, save.attempt)
                    tier.begin(unfinished)
                    hold.enter_context(tier.hold(unfinished))
                    if job.metadata is not None:
                        job.files[METADATA] = job.metadata()
                    verdict.report(self._write(job, unfinished))
                verdict.wait_reports()
                name = verdict.wait_name()
                if leads:
                    whole = self._commit(job, verdict, unfinished, name)
                outline = verdict.wait_commit()
            except BaseException as error:
                failure, dropped = verdict.fail("stage" if job.error is not None else "persist", error)
                if dropped and unfinished:
                    tier.withdraw(unfinished, {*job.files, MANIFEST, META, METADATA} if leads else job.files)
                if dropped and leads and name:
                    self._retract(save, name)
                if failure is error:
                    raise
                raise failure from error
        if leads and outline.health == HEALTHY:
            save.folder.lead_to(name)
        known = whole if whole is not None else outline
        return Committed(tier.path(name) if isinstance(tier, LocalTier) else tier.where(name), known)

    def _claim_name(self, job: _Job) -> str:
        """As rank 0: the name that a checkpoint gets.  One that is pinned gives way to none that is not: people pin, by
        hand or by ``trainer.save_checkpoint``, and only they take it back."""
        tier, is_pinned = job.save.folder.tier, PINNED in job.save.facts.labels
        gives_way = job.replace and (is_pinned or not store.is_pinned(tier, job.name))
        name = job.name if gives_way else store.free_name(job.name, tier.exists)
        tier.claim(name)
        return name

    def _retract(self, save: Save, name: str) -> None:
        """Take back a checkpoint that this rank published and that was dropped all the same, for all to agree."""
        tier = save.folder.tier
        with suppress(OSError, ResilienceError):
            manifest = store.read_manifest(tier, name)
            if (manifest.run, manifest.sequence) == (self.run, save.sequence):
                tier.remove(name)

    def _write(self, job: _Job, partial: str) -> Report:
        """Write this rank's files as they come into being, and look at its parameters meanwhile."""
        tier, rank = job.save.folder.tier, self.ranks.rank
        with ThreadPoolExecutor(1, "resilience-check") as pool:
            unsound = pool.submit(self._look_at_staged, job)
            try:
                written = [
                    tier.write(partial, file, data, rank, job.ready.get(file, is_there))
                    for file, data in job.files.items()
                ]
                tier.sync(partial)
            finally:
                unsound.result()  # what went wrong with the copy says more than what comes of it
        if job.slot is not None:
            job.slot.note(written, job.files)
        points.reach("persist.end")
        return Report(written, unsound.result())

    def _commit(self, job: _Job, verdict: Verdict, partial: str, name: str) -> Manifest | None:
        """As leader of a folder: the manifest, then the rename.  Rank 0, which knows it, goes last, so that its word
        covers every folder."""
        save, tier = job.save, job.save.folder.tier
        others = [leader for leader in save.folder.leaders if leader != 0]
        if self.ranks.rank != 0:
            content, metadata = verdict.take_over()
            if metadata != self._copied[0]:  # it is the same save after save, and of all ranks together
                self._copied = metadata, verdict.copy(METADATA)
            tier.write(partial, META, verdict.copy(META))
            tier.write(partial, METADATA, self._copied[1])
            store.commit(tier, partial, name, content, replace=job.replace)
            verdict.folder_done()
            return None
        manifest = self._manifest(save, verdict.reports())
        if others:
            verdict.hand_over(manifest, {file: bytes(job.files[file]) for file in (META, METADATA)})
            for leader in others:
                verdict.wait_folder(leader)
        store.commit(tier, partial, name, manifest, replace=job.replace)
        verdict.commit(manifest)
        return manifest

    def _manifest(self, save: Save, reports: list[Report]) -> Manifest:
        facts, folder = save.facts, save.folder
        unsound = [report.unsound for report in reports if report.unsound is not None]
        extra: dict[str, Any] = {}
        if folder.keep is not None:
            extra["retention"] = retention.stated(folder.keep, folder.remote_keep, folder.ranking)
        if facts.off_since is not None:
            extra[OFF_SINCE] = facts.off_since
        if suspicion := [*filter(None, [facts.suspicion]), *(f"{name} is not finite" for name in unsound[:1])]:
            extra["suspicion"] = "; ".join(suspicion)
        return Manifest(
            run=self.run,
            step=facts.step,
            epoch=facts.epoch,
            created=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            reason=facts.reason,
            files=tuple(entry for report in reports for entry in report.files),
            sequence=save.sequence,
            health=SUSPECT if suspicion else HEALTHY,
            labels=facts.labels,
            world_size=self.ranks.world_size,
            strategy=facts.strategy,
            metrics=facts.metrics,
            versions=facts.versions,
            extra=extra,
        )

    def _retain(self, save: Save) -> None:
        folder = save.folder
        assert folder.keep is not None
        try:
            store.retain(folder.tier, folder.keep, folder.ranking, self.must_stay(folder), up_to=save.sequence)
        except Exception as error:
            log.warning("event=retain folder=%s error=%r", folder.tier.where(), error)


def _guarded(job: Callable[[], None]) -> None:
    """Do a job of the background thread, so that those after it are done whatever becomes of it."""
    try:
        job()
    except BaseException as error:
        log.warning("event=background error=%r", error)


def _tell_staged(save: Save) -> None:
    save.staged.set_result(None)
    points.reach("staged")


def _as_save_failed(error: BaseException, step: int, rank: int) -> SaveFailed:
    message = f"The save of step {step} was dropped: {describe(error)}"
    of_rank = error.rank if isinstance(error, SaveFailed) else rank
    stage = error.stage if isinstance(error, SaveFailed) else ""
    failure = SaveFailed(message, step=step, rank=of_rank, stage=stage, hint=getattr(error, "hint", ""))
    failure.__cause__ = error
    return failure
