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
import queue
import threading
import time
import uuid
from collections.abc import Callable, Collection
from concurrent.futures import wait as wait_for
from contextlib import suppress
from functools import partial
from typing import Any

from lightning_resilience import store
from lightning_resilience.errors import SaveFailed
from lightning_resilience.manifest import (
    META,
    Manifest,
    rank_file,
)
from lightning_resilience.persistence import Job, Persistence, as_save_failed, tell_staged
from lightning_resilience.planning import Plan, Planner, Prepared
from lightning_resilience.ranks import Ranks, attempt, raise_first
from lightning_resilience.remote import RemoteTier
from lightning_resilience.retention import Keep, Ranking
from lightning_resilience.saves import OVERDUE, Facts, Folder, Save, Snapshot
from lightning_resilience.shards import collector_paused
from lightning_resilience.slots import dump_objects
from lightning_resilience.staging import Staging
from lightning_resilience.tiers import LocalTier

log = logging.getLogger("lightning_resilience")

MOST_PLANS = 2
"""Kinds of saves that are planned and have slots at a time: all of the state, and the weights alone."""


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
        # Made now: what goes wrong with memory on one rank alone is seen when there is nobody to wait for it.
        self._idle = [Planner(ranks, memory) for _ in range(MOST_PLANS)]
        self._planners: dict[tuple[str, ...], Planner] = {}
        """By the parts of the state, from old to new: weights alone follow a plan of their own."""
        self._in_flight: Save | None = None
        self._staging: Staging | None = None  # of the save in flight, until the slot holds everything
        self._persistence = Persistence(ranks, timeout)
        self._attempts = 0
        self._finished: queue.SimpleQueue[Save] = queue.SimpleQueue()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

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
        for planner in self._all_planners():
            planner.belong_to(run)

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
        job = Job(save, self.run, name, replace and isinstance(folder.tier, LocalTier))
        try:
            with collector_paused():
                self._stage(job, snapshot, overlap and self._persistence.overlaps)
            if job.staging is not None:
                job.staging.start()  # last: from here on its thread and this one take turns
        except Exception as error:
            job.error = error
        else:
            if job.staging is None:
                tell_staged(save)
        save.waited = time.perf_counter() - begin
        self._submit(partial(self._see_through, job))
        return save

    def finish_staging(self) -> None:
        """Return when weights may change.  To be called before they do, on the thread that will change them."""
        staging, save = self._staging, self._in_flight
        if staging is None or save is None:
            return
        begin = time.perf_counter()
        staging.let_go_on()
        save.waited += time.perf_counter() - begin
        if staging.is_done:
            self._staging = None

    def prepare(self, capture: Callable[[], Snapshot]) -> None:
        """Plan and allocate for the state as it is now, so that the first save finds it done.  Collective.

        Nothing is saved, and where there is a plan nothing happens.  What fails here fails again at the save, which
        tells of it.

        Args:
            capture: gives the state, and no more than that has to be in it.
        """
        if self.ranks.any_max(self.busy)[0]:
            return
        with collector_paused():
            snapshot = attempt(capture)
            if self.ranks.any_max(isinstance(snapshot, BaseException))[0]:
                return
            assert isinstance(snapshot, Snapshot)
            planner = self._planner_for(snapshot)
            if planner.plan is not None:
                return
            prepared = attempt(lambda: _prepare(planner, snapshot))
            if self.ranks.any_max(isinstance(prepared, BaseException))[0]:
                return
            assert isinstance(prepared, Prepared)
            try:
                plan = planner.replan(prepared, snapshot.trained)
            except Exception as error:
                log.warning("event=prepare error=%r", error)
                return
        self._submit(partial(_finish, planner, plan))

    def _planner_for(self, snapshot: Snapshot) -> Planner:
        """What plans saves of these parts of the state; the same on all ranks.  Not while a save is under way."""
        parts = tuple(snapshot.state)
        if parts not in self._planners:
            if not self._idle:
                oldest = self._planners.pop(next(iter(self._planners)))
                oldest.close()
                self._idle.append(oldest)
            self._planners[parts] = self._idle.pop()
        return self._planners[parts]

    def _all_planners(self) -> list[Planner]:
        return [*self._planners.values(), *self._idle]

    def _stage(self, job: Job, snapshot: Snapshot, overlap: bool) -> None:
        planner = self._planner_for(snapshot)
        prepared = attempt(lambda: _prepare(planner, snapshot))
        unprepared = isinstance(prepared, BaseException)
        outgrown = not isinstance(prepared, BaseException) and prepared.objects is None
        failed, replan = self.ranks.any_max(unprepared, outgrown)
        if isinstance(prepared, BaseException):
            raise prepared
        if failed:
            job.dropped = True  # another rank says why
            return
        plan = planner.replan(prepared, snapshot.trained) if replan else planner.plan
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
        for planner in self._all_planners():
            planner.close(keep_memory=keep_memory)

    # -- the background thread ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _see_through(self, job: Job) -> None:
        """Bring a save to its end, whichever that is, and tell of it."""
        save, begin = job.save, time.perf_counter()
        try:
            committed = self._persistence.persist(job)
        except BaseException as error:
            self._give_up(job, as_save_failed(error, save.step, self.ranks.rank))
            return
        self._failures[save.folder] = 0
        with suppress(RuntimeError):  # what a lost device says training hears too
            save.held = job.staging.held() if job.staging is not None else 0.0
        job.release()
        now = time.perf_counter()
        save.persist, save.seconds = now - begin, now - save.began
        self._finished.put(save)
        save.committed.set_result(committed)
        for planner in self._all_planners():
            planner.map_rest()

    def _give_up(self, job: Job, failure: SaveFailed) -> None:
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

    def _retain(self, save: Save) -> None:
        folder = save.folder
        assert folder.keep is not None
        try:
            must_stay = self.must_stay(folder)
            store.retain(folder.tier, folder.keep, folder.ranking, must_stay, run=self.run, up_to=save.sequence)
        except Exception as error:
            log.warning("event=retain folder=%s error=%r", folder.tier.where(), error)


def _prepare(planner: Planner, snapshot: Snapshot) -> Prepared:
    for content in (snapshot.meta, snapshot.rank_state):
        if isinstance(content, Exception):
            raise content
    return planner.prepare(snapshot.state, snapshot.identical)


def _finish(planner: Planner, plan: Plan) -> None:
    try:
        planner.finish(plan)
    except Exception as error:
        log.warning("event=prepare error=%r", error)


def _guarded(job: Callable[[], None]) -> None:
    """Do a job of the background thread, so that those after it are done whatever becomes of it."""
    try:
        job()
    except BaseException as error:
        log.warning("event=background error=%r", error)
