"""From bytes in memory to a committed checkpoint: what each rank does of a save behind its training thread.

Ranks report to the board with deadlines and never meet in a collective.  What one of them cannot do reaches the others
as a verdict: the attempt is dropped on all, and nothing of it stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from torch import Tensor

from lightning_resilience import points, retention, store
from lightning_resilience.errors import ResilienceError, SaveFailed
from lightning_resilience.health import first_not_finite
from lightning_resilience.manifest import HEALTHY, MANIFEST, META, METADATA, OFF_SINCE, PINNED, SUSPECT, Manifest
from lightning_resilience.ranks import Board, Ranks
from lightning_resilience.saves import Committed, Save
from lightning_resilience.slots import Slot
from lightning_resilience.staging import Staging
from lightning_resilience.threads import give_way
from lightning_resilience.tiers import LocalTier, Ready, is_there, partial_name
from lightning_resilience.verdict import Report, Verdict, describe

log = logging.getLogger("lightning_resilience")


@dataclass
class Job:
    """What the training thread hands over: a save of a ``run``, with the bytes of each file, or why there are none."""

    save: Save
    run: str
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


class Persistence:
    """Sees saves through on one rank, one after the other.

    Args:
        ranks: the ranks that save together.
        timeout: seconds after which a save that some rank has not finished is dropped.
    """

    def __init__(self, ranks: Ranks, timeout: float) -> None:
        self._ranks = ranks
        self._timeout = timeout
        self._board: Board | None = None
        self._verdict: Verdict | None = None
        self._copied = "", b""  # the digest and content of the ``.metadata`` that was taken over last
        self.overlaps = True
        """Whether copies behind the training thread have held what they should, so far."""

    def persist(self, job: Job) -> Committed:
        """Write this rank's files, then see the save through to its verdict."""
        if self._board is None:
            self._board = self._ranks.board()
        save, rank = job.save, self._ranks.rank
        tier, leads = save.folder.tier, rank in save.folder.leaders
        if isinstance(tier, LocalTier):  # a client of a store may start threads that its other users share
            give_way()
        prefix = f"{self._ranks.session}/{save.attempt}"
        verdict = Verdict(self._board, prefix, self._ranks, save.folder.leaders, self._timeout)
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
                    unfinished = partial_name(verdict.wait_name(), self._ranks.session, save.attempt)
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
                    self._retract(job, name)
                if failure is error:
                    raise
                raise failure from error
        if leads and outline.health == HEALTHY:
            save.folder.lead_to(name)
        known = whole if whole is not None else outline
        return Committed(tier.path(name) if isinstance(tier, LocalTier) else tier.where(name), known)

    def _claim_name(self, job: Job) -> str:
        """As rank 0: the name that a checkpoint gets.  One that is pinned gives way to none that is not: people pin, by
        hand or by ``trainer.save_checkpoint``, and only they take it back."""
        tier, is_pinned = job.save.folder.tier, PINNED in job.save.facts.labels
        gives_way = job.replace and (is_pinned or not store.is_pinned(tier, job.name))
        name = job.name if gives_way else store.free_name(job.name, tier.exists)
        tier.claim(name)
        return name

    def _retract(self, job: Job, name: str) -> None:
        """Take back a checkpoint that this rank published and that was dropped all the same, for all to agree."""
        tier = job.save.folder.tier
        with suppress(OSError, ResilienceError):
            manifest = store.read_manifest(tier, name)
            if (manifest.run, manifest.sequence) == (job.run, job.save.sequence):
                tier.remove(name)

    def _write(self, job: Job, partial: str) -> Report:
        """Write this rank's files as they come into being, and look at its parameters meanwhile."""
        tier, rank = job.save.folder.tier, self._ranks.rank
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

    def _look_at_staged(self, job: Job) -> str | None:
        """Once the slot holds everything: the first parameter that is not finite.

        Raises:
            SaveFailed: the slot does not hold what it should.
        """
        staging = job.staging
        if staging is not None:
            job.error = staging.wait(self._timeout)
            job.save.stage += staging.seconds
            if staging.changed is not None and self.overlaps:
                self.overlaps = False
                why = f"{staging.changed} was changed outside of an optimizer's step: all is copied at once from now on"
                log.warning("event=overlap rank=%d reason=%r", self._ranks.rank, why)
            if job.error is not None:
                raise job.error
            tell_staged(job.save)
        return first_not_finite(job.parameters)

    def _commit(self, job: Job, verdict: Verdict, partial: str, name: str) -> Manifest | None:
        """As leader of a folder: the manifest, then the rename.  Rank 0, which knows it, goes last, so that its word
        covers every folder."""
        save, tier = job.save, job.save.folder.tier
        others = [leader for leader in save.folder.leaders if leader != 0]
        if self._ranks.rank != 0:
            content, metadata = verdict.take_over()
            if metadata != self._copied[0]:  # it is the same save after save, and of all ranks together
                self._copied = metadata, verdict.copy(METADATA)
            tier.write(partial, META, verdict.copy(META))
            tier.write(partial, METADATA, self._copied[1])
            store.commit(tier, partial, name, content, replace=job.replace)
            verdict.folder_done()
            return None
        manifest = self._manifest(job, verdict.reports())
        if others:
            verdict.hand_over(manifest, {file: bytes(job.files[file]) for file in (META, METADATA)})
            for leader in others:
                verdict.wait_folder(leader)
        store.commit(tier, partial, name, manifest, replace=job.replace)
        verdict.commit(manifest)
        return manifest

    def _manifest(self, job: Job, reports: list[Report]) -> Manifest:
        save, facts, folder = job.save, job.save.facts, job.save.folder
        unsound = [report.unsound for report in reports if report.unsound is not None]
        extra: dict[str, Any] = {}
        if folder.keep is not None:
            extra["retention"] = retention.stated(folder.keep, folder.remote_keep, folder.ranking)
        if facts.off_since is not None:
            extra[OFF_SINCE] = facts.off_since
        if suspicion := [*filter(None, [facts.suspicion]), *(f"{name} is not finite" for name in unsound[:1])]:
            extra["suspicion"] = "; ".join(suspicion)
        return Manifest(
            run=job.run,
            step=facts.step,
            epoch=facts.epoch,
            created=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            reason=facts.reason,
            files=tuple(entry for report in reports for entry in report.files),
            sequence=save.sequence,
            health=SUSPECT if suspicion else HEALTHY,
            labels=facts.labels,
            world_size=self._ranks.world_size,
            strategy=facts.strategy,
            metrics=facts.metrics,
            versions=facts.versions,
            extra=extra,
        )


def tell_staged(save: Save) -> None:
    save.staged.set_result(None)
    points.reach("staged")


def as_save_failed(error: BaseException, step: int, rank: int) -> SaveFailed:
    message = f"The save of step {step} was dropped: {describe(error)}"
    of_rank = error.rank if isinstance(error, SaveFailed) else rank
    stage = error.stage if isinstance(error, SaveFailed) else ""
    failure = SaveFailed(message, step=step, rank=of_rank, stage=stage, hint=getattr(error, "hint", ""))
    failure.__cause__ = error
    return failure
