"""Committed checkpoints on their way to the cold tier, in a thread of their own on every rank.

What is on its way is nowhere written down: it is what the cold tier's rule would keep and the cold tier does not have
(``Backlog``).  So a restart goes on where a killed process was, an outage makes no queue that has to be worked off in
full, and a checkpoint that newer ones made redundant is passed over.  Until the cold copy is proven, the hot one stays.

::

    rank 0                                          every rank
    ──────                                          ──────────
    the oldest that is wanted there: name it  ──>   send this rank's files, each checked
    hear from all ranks  <───────────────────────   done, or why not
    all there at their size: the manifest
    say how it ended  ──────────────────────────>   take note; tell the training thread
    forget what the rule gives up

Nothing here is waited for by a save.  What is being sent is held by links of its own meanwhile, so that it may give way
to a newer save of its name and arrive all the same.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from lightning_resilience import store
from lightning_resilience.backlog import Backlog, Task
from lightning_resilience.errors import CheckpointCorrupt, ResilienceError, TierUnavailable
from lightning_resilience.manifest import FileEntry, Manifest, Outline, outlined
from lightning_resilience.ranks import Board, Ranks, attempt
from lightning_resilience.remote import RemoteTier
from lightning_resilience.retention import Keep, Ranking
from lightning_resilience.saves import Folder
from lightning_resilience.tiers import LocalTier, partial_name
from lightning_resilience.verdict import describe

log = logging.getLogger("lightning_resilience")
P = ParamSpec("P")
T = TypeVar("T")

TICK = 1.0
"""Seconds between two looks at whether there is something to do, where nobody says so."""
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 300.0
"""Seconds before a copy that failed is tried again; the pause doubles with each failure in a row."""
GIVE_UP = 60.0
"""Seconds after the end of a run at which a cold tier that does not answer is left to the next start."""
ABANDON = 5.0
"""Seconds that the thread gets to end in the middle of a request."""


@dataclass(frozen=True)
class Replicated:
    """A checkpoint that the cold tier has: its ``url`` and ``manifest``, how many ``bytes`` had to be sent, how long it
    took (``seconds``), and how long after this process knew of it it was there (``lag``, in seconds)."""

    url: str
    manifest: Manifest
    bytes: int = 0
    seconds: float = 0.0
    lag: float = 0.0


TELL_AFTER = 3
"""Checkpoints in a row that gave way before they were there, at which it is told of."""

Outcome = Replicated | BaseException
"""How the copy of one checkpoint ended."""


@dataclass(frozen=True)
class _Sent:
    """What a rank has seen to: the files that are there now (``paths``), and the bytes that had to be sent."""

    paths: frozenset[str]
    bytes: int


class _GaveWay(Exception):
    """The name of the checkpoint is a newer save's now."""


class _Incomplete(Exception):
    """These files are whole in no folder that was asked, nor in the cold tier: no outage, and no time mends it."""


class Replicator:
    """Copies the checkpoints of one folder to a cold tier.

    Creating it is collective, as is ``close``.

    Args:
        ranks: the ranks that save together.
        folder: the hot tier.
        tier: the cold tier.
        keep: what the cold tier retains.
        ranking: what ``keep.top_k`` ranks by.
        run: gives the id of the run, to whose checkpoints the rule is applied: what other runs have there stays.
        tolerant: whether a cold tier that does not answer now is waited for in the background, because the hot tier
            has checkpoints already; otherwise it is an error.
        last_good: names the one of those in the cold tier that the run may have to go back to, and so stays.

    Raises:
        TierDenied, TierUnavailable: the cold tier cannot be written; on all ranks.
    """

    def __init__(
        self,
        ranks: Ranks,
        folder: Folder,
        tier: RemoteTier,
        keep: Keep,
        ranking: Ranking | None = None,
        *,
        run: Callable[[], str],
        tolerant: bool = False,
        last_good: Callable[[Mapping[str, Manifest]], str | None] = lambda committed: None,
    ) -> None:
        self.tier = tier
        self._ranks = ranks
        assert isinstance(folder.tier, LocalTier)  # beside a folder that is a URL itself there is no cold tier
        self._hot = folder.tier
        self._sharing = folder.sharing
        self._last_good = last_good
        self._id: str = ranks.broadcast(f"copy-{random.getrandbits(48):012x}")
        self._lock = threading.Lock()  # of the backlog alone; see _ask
        self._backlog = Backlog(keep, ranking, run)
        self._news: queue.SimpleQueue[Replicated] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._hurry = threading.Event()
        self._stop = threading.Event()
        self.tier.patience.stop = self._stop
        self._failures = 0
        self._gave_ways = 0
        self._has_links = True
        self._private: str | None = None
        self._unsealed: set[str] = set()
        self._has_offer = False
        self._closed_at = math.inf
        self._current: str | None = None
        found = attempt(lambda: self._take_over(tolerant))
        told = ranks.broadcast(outlined(found) if isinstance(found, dict) else found)
        if isinstance(told, BaseException):
            raise told
        cold = found if ranks.rank == 0 and isinstance(found, dict) else told
        self._has_listed = cold is not None  # None where it does not answer yet
        self._late: dict[str, Manifest] = {}  # what was listed since then, for the other ranks to know
        self._ask(Backlog.learn, cold or {})
        self._thread = threading.Thread(target=self._run, name="resilience-replicate", daemon=True)
        self._thread.start()

    def _take_over(self, tolerant: bool) -> dict[str, Manifest] | None:
        """As rank 0, make sure that the cold tier can be written, and list it."""
        if self._ranks.rank:
            return None
        try:
            self.tier.probe()
            self.tier.sweep_uploads()
            return self._list()
        except TierUnavailable as error:
            if not tolerant:
                raise
            log.warning(
                "event=replicate tier=cold outcome=failed reason=%r note='it is tried again; training goes on'",
                error.message,
            )
            return None

    def _list(self) -> dict[str, Manifest]:
        """What the cold tier has; takes note of what a killed process left there."""
        listing = store.list_checkpoints(self.tier)
        self._unsealed = listing.uncommitted
        self._ask(Backlog.reserve, listing.damaged)
        return listing.committed

    def _ask(self, question: Callable[Concatenate[Backlog, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Tell or ask the backlog something, while no other thread does."""
        with self._lock:
            return question(self._backlog, *args, **kwargs)

    # -- the training thread ------------------------------------------------------------------------------------------

    def offer(self, committed: Mapping[str, Manifest], in_use: Collection[str] = ()) -> None:
        """Say what the hot tier has; on all ranks alike."""
        self._ask(Backlog.offer, committed, in_use, time.monotonic())
        self._has_offer = True
        self._wake.set()

    def leave_behind(self, left: Collection[Manifest]) -> None:
        """Say that the run went back from these, which are called suspect by now."""
        self._ask(Backlog.leave_behind, left)
        self._wake.set()

    def known_cold(self) -> dict[str, Manifest]:
        """The checkpoints that the cold tier has, by name."""
        return self._ask(Backlog.there)

    def pending(self) -> set[str]:
        """Names of the checkpoints that the cold tier should have and does not: their hot copy must stay."""
        return self._ask(Backlog.pending)

    def protected(self) -> set[str]:
        """Names whose hot copy must stay: what is on its way, and what is being sent although newer ones have made it
        redundant, because otherwise a slow cold tier would never get any."""
        return {*self.pending(), *filter(None, [self._current])}

    def poll(self) -> list[Replicated]:
        """The checkpoints that the cold tier has got since the last call."""
        news = []
        with suppress(queue.Empty):
            while True:
                news.append(self._news.get_nowait())
        return news

    @property
    def lag(self) -> float:
        """Seconds for which this process has known of the oldest checkpoint that is on its way; 0 where none is."""
        return self._ask(Backlog.lag, time.monotonic())

    def close(self, seconds: float, leave_by: Callable[[], float] = lambda: math.inf) -> None:
        """Let what is on its way arrive, for so long at most; not so long while the cold tier does not answer.

        Args:
            seconds: at most.
            leave_by: second of the monotonic clock at which to give up; asked again and again.
        """
        self._closed_at = time.monotonic()
        self._wake.set()
        self._hurry.set()
        waiting = self._ask(Backlog.waiting)
        if waiting and self._ranks.rank == 0:
            log.info("event=drain tier=cold checkpoints=%d bytes=%d", len(waiting), self._ask(Backlog.size))
        while self._thread.is_alive():
            left_over = min(self._closed_at + seconds, leave_by()) - time.monotonic()
            if left_over <= 0:
                break
            self._thread.join(min(left_over, TICK / 2))
        self.abandon()
        self._thread.join(max(min(ABANDON, leave_by() - time.monotonic()), 0.0))
        left = self._ask(Backlog.waiting)
        if left and self._ranks.rank == 0:
            log.warning(
                "event=drain tier=cold left=%d reason='not there yet: the next start goes on with them' url=%s",
                len(left),
                self.tier.where(),
            )

    def drain(self, seconds: float) -> None:
        """After an exception: let what is on its way arrive, for so long at most, and stop.  Not collective: the other
        ranks may be anywhere, and what they do not answer is left to the next start, as is all of it in an outage."""
        deadline = time.monotonic() + seconds
        self._wake.set()
        self._hurry.set()
        while (
            self._thread.is_alive() and (self._ask(Backlog.waiting) or self._current) and not self._ask(Backlog.retries)
        ):
            if (left := deadline - time.monotonic()) <= 0:
                break
            self._thread.join(min(left, TICK / 20))
        self.abandon()

    def abandon(self) -> None:
        """Stop at once; the next start goes on."""
        self._stop.set()
        self._wake.set()
        self._hurry.set()
        if (private := self._private) is not None:
            self._hot.discard(private)  # the thread may hang in a request; what it has open stays open

    # -- the background thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            board = self._ranks.board()
            (self._lead if self._ranks.rank == 0 else self._follow)(board)
        except Exception as error:
            if not self._stop.is_set():
                log.warning("event=replicate tier=cold outcome=stopped error=%r", str(error))

    def _lead(self, board: Board) -> None:
        number = 0
        while not self._stop.is_set():
            if knows := self._knows_what_is_there():
                self._sweep()
            task = self._as_it_is(self._ask(Backlog.next)) if knows else None
            self._current = task.name if task is not None else None
            if task is None:
                if self._is_over():
                    break
                self._rest()
                continue
            number += 1
            late, self._late = self._late, {}
            board.put_once(self._key(number), (replace(task, manifest=task.manifest.outline()), late))
            outcome = self._copy(board, number, task)
            self._take_note(task, outcome)
            removed = self._retain() if isinstance(outcome, Replicated) else []
            told = replace(outcome, manifest=outcome.manifest.outline()) if isinstance(outcome, Replicated) else outcome
            board.put_once(self._key(number, "end"), (told, removed))
            # Who has answered this one has read all of the one before.
            board.forget(*(self._key(number - 1, what) for what in ("", "end", *range(self._ranks.world_size))))
            if not isinstance(outcome, Replicated):
                if task.name not in self.pending() and not task.restates:
                    self._drop(task.target)
                if self._is_over():
                    break
                if isinstance(outcome, _GaveWay):
                    self._rest()  # until what the folder has now is said
                elif not isinstance(outcome, _Incomplete):
                    self._pause()
        board.put_once(self._key(number + 1), None)

    def _is_over(self) -> bool:
        """Whether the run has ended, and there is nothing more to wait for: all is there, or nothing answers."""
        over_for = time.monotonic() - self._closed_at  # first: what is offered before the end is to be seen below
        return over_for > (0 if self._ask(Backlog.next) is None else GIVE_UP if self._failures else math.inf)

    def _knows_what_is_there(self) -> bool:
        """Whether the cold tier has been listed; tries to, where it did not answer at the start."""
        if not self._has_listed:
            try:
                found = self._list()
            except (ResilienceError, OSError):
                self._failures += 1
                return False
            self._ask(Backlog.learn, found)
            self._late = outlined(found)
            self._has_listed = True
        return True

    def _sweep(self) -> None:
        """Delete the files of checkpoints that a kill kept from being whole and that no folder has any more; what is
        still on its way goes on from them."""
        if self._unsealed and self._has_offer:
            names = self._unsealed - self._ask(Backlog.targets)
            self._unsealed = set()
            with suppress(ResilienceError, OSError):  # the next start tries again
                self.tier.sweep(names)

    def _copy(self, board: Board, number: int, task: Task) -> Outcome:
        """See one checkpoint through; why it did not get there, if it did not."""
        begin = time.monotonic()
        since = self._ask(Backlog.known_since, task.manifest, begin)
        answers: list[Any] = [self._send_mine(task)]
        answers += [self._wait(board, self._key(number, rank)) for rank in range(1, self._ranks.world_size)]
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if self._stop.is_set() or None in answers:
            return TierUnavailable("the run ended before it was there")
        # A file that is damaged here says more than a store that does not answer.
        failures.sort(key=lambda failure: not isinstance(failure, CheckpointCorrupt))
        sealed = failures[0] if failures else attempt(lambda: self._seal(task, answers))
        if isinstance(sealed, BaseException):
            return _GaveWay() if self._gave_way(task) else sealed
        now, sent = time.monotonic(), sum(answer.bytes for answer in answers)
        return Replicated(self.tier.where(task.target), sealed, sent, now - begin, now - since)

    def _seal(self, task: Task, answers: Sequence[_Sent]) -> Manifest:
        """Make it a checkpoint there, unless nobody had some file to send and none is there from before; what its
        manifest says now."""
        if task.restates:
            return store.suspect(self.tier, task.target, task.manifest) or task.manifest
        unsent = task.manifest.paths.difference(*(answer.paths for answer in answers))
        if unsent:
            there = self.tier.files(task.target)
            if missing := sorted(
                one.path for one in task.manifest if one.path in unsent and there.get(one.path) != one.size
            ):
                raise _Incomplete(*missing)
        self.tier.seal(task.target, task.manifest)
        return task.manifest

    def _gave_way(self, task: Task) -> bool:
        """Whether a newer save took the name of a checkpoint while it was being sent, rather than damage."""
        if task.restates:
            return False
        found = attempt(lambda: store.read_manifest(self._hot, task.name))
        return isinstance(found, Manifest) and not found.is_same_save(task.manifest)

    def _drop(self, target: str) -> None:
        """Take away what was sent of a checkpoint that newer ones have made redundant meanwhile."""
        with suppress(ResilienceError, OSError):
            self.tier.remove(target)

    def _follow(self, board: Board) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            told = self._wait(board, self._key(number))
            if told is None:
                return
            task, late = told
            self._ask(Backlog.learn, late)
            self._current = task.name
            board.put_once(self._key(number, self._ranks.rank), self._send_mine(task))
            end = self._wait(board, self._key(number, "end"))
            if end is None:
                return
            outcome, removed = end
            self._take_note(task, outcome)
            self._ask(Backlog.remove, removed)

    def _wait(self, board: Board, key: str) -> Any:
        while not self._stop.is_set():
            with suppress(TimeoutError):
                return board.wait(key, 60)
        return None

    def _send_mine(self, task: Task) -> _Sent | BaseException:
        """Send the files that are this rank's to send; which they are, or why not."""

        def send() -> _Sent:
            if task.restates:
                return _Sent(frozenset(), 0)
            with self._holding(task) as files:
                sent = [self.tier.send(task.target, entry, path) for entry, path in files]
            return _Sent(frozenset(entry.path for entry, _ in files), sum(sent))

        return attempt(send)

    def _mine(self, task: Task) -> tuple[str, list[tuple[FileEntry, Path]]]:
        """What a checkpoint is called in this rank's folder, and the files that are this rank's to send."""
        tier, sharing, rank = self._hot, self._sharing, self._ranks.rank
        name = self._ask(Backlog.name_of, task.manifest) or task.name
        manifest = task.manifest
        if isinstance(manifest, Outline):
            here = attempt(lambda: store.read_manifest(tier, name))
            if not isinstance(here, Manifest) or not here.is_same_save(manifest):
                return name, []  # others may have it
            manifest = here
        files = []
        for index, entry in enumerate(manifest):
            # What a rank saved, that rank sends.  Where it is gone, or that failed, whoever has it beside it.
            saved_here = task.owners_only and entry.rank in sharing
            if task.owners_only and not saved_here and entry.rank < self._ranks.world_size:
                continue
            sender = entry.rank if saved_here else sharing[index % len(sharing)]
            holder = store.holder(name, entry)
            if sender == rank and tier.size(holder, entry.path) == entry.size:
                files.append((entry, tier.path(holder, entry.path)))
        return name, files

    @contextmanager
    def _holding(self, task: Task) -> Iterator[list[tuple[FileEntry, Path]]]:
        """The files that are this rank's to send, by links that stay whatever becomes of their checkpoint meanwhile:
        in a folder that looks like a save under way, which no list shows and every start sweeps once this process is
        gone.  Where links cannot be made they are sent from where they are."""
        tier = self._hot
        name, files = self._mine(task)
        private = partial_name(name, number=self._ranks.rank)
        try:
            with suppress(OSError):
                tier.begin(private)
                self._private = private
            with tier.hold(private) if tier.exists(private) else nullcontext():
                yield [(entry, self._linked(path, tier.path(private, entry.path))) for entry, path in files]
        finally:
            tier.discard(private)
            self._private = None

    def _linked(self, path: Path, link: Path) -> Path:
        """A link to a file, or the file itself where there can be none."""
        try:
            os.link(path, link)
        except FileNotFoundError:
            return path
        except OSError:
            self._has_links = False
            return path
        return link

    def _take_note(self, task: Task, outcome: Outcome) -> None:
        """How one ended: for what is known here, for the training thread and, on rank 0, for people."""
        self._current, leads = None, self._ranks.rank == 0
        if isinstance(outcome, Replicated):
            self._ask(Backlog.arrive, task, outcome.manifest)
            self._gave_ways = 0
            if leads:
                self._tell_of_success(outcome)
            if not task.restates:
                self._news.put(outcome)
        elif isinstance(outcome, _GaveWay):
            self._gave_ways += 1
            if leads and self._gave_ways == TELL_AFTER:
                self._tell_of_giving_way(task.name)
        else:
            others_may_have_it = isinstance(outcome, _Incomplete) and task.owners_only
            is_spoiled = isinstance(outcome, (CheckpointCorrupt, _Incomplete)) and not others_may_have_it
            self._ask(Backlog.fail, task, for_good=is_spoiled)
            # What was left in the middle is told of by who left it.
            if leads and not others_may_have_it and not self._stop.is_set():
                self._tell_of_failure(task.name, outcome)

    def _tell_of_giving_way(self, name: str) -> None:
        why = "" if self._has_links else ", and this file system has no hard links to hold it by"
        log.warning(
            "event=replicate tier=cold outcome=gave-way name=%s times=%d reason=%r note=%r",
            name,
            self._gave_ways,
            f"the name is saved again before a copy is there{why}",
            "the cold tier gets none: save more rarely, or let names differ",
        )

    def _tell_of_failure(self, name: str, failure: BaseException) -> None:
        """Once for each checkpoint that is damaged here, and once for each outage."""
        if isinstance(failure, CheckpointCorrupt):
            note = "it is damaged here and is not sent; verify it"
        elif isinstance(failure, _Incomplete):
            note = "no folder has these files whole, so it is not sent; the local copies stay"
            failure = CheckpointCorrupt(", ".join(map(str, failure.args[:5])))
        else:
            self._failures += 1
            note = "it is tried again; the local copies stay"
            if self._failures > 1:
                return
        log.warning(
            "event=replicate tier=cold outcome=failed name=%s backlog=%d lag=%.0f reason=%r note=%r",
            name,
            len(self._ask(Backlog.waiting)),
            self.lag,
            describe(failure),
            note,
        )

    def _tell_of_success(self, done: Replicated) -> None:
        if self._failures:
            log.warning("event=replicate tier=cold outcome=back after=%d failures", self._failures)
        self._failures = 0
        log.info(
            "event=replicate step=%d url=%s bytes=%d seconds=%.3f lag=%.1f backlog=%d",
            done.manifest.step,
            done.url,
            done.bytes,
            done.seconds,
            done.lag,
            len(self._ask(Backlog.waiting)),
        )

    def _as_it_is(self, task: Task | None) -> Task | None:
        """The task for the save that has the name now, where a newer one took it that the training thread has not told
        of yet; None where that is there already."""
        if task is None or task.restates:
            return task
        found = attempt(lambda: store.read_manifest(self._hot, task.name))
        if not isinstance(found, Manifest) or found.is_same_save(task.manifest):
            return task
        done = self._ask(Backlog.is_done_with, found)
        return None if done else replace(task, manifest=found)

    def _rest(self) -> None:
        """Until there is news, or for a moment."""
        self._wake.wait(TICK)
        self._wake.clear()

    def _pause(self) -> None:
        """Before the next try: longer after each failure, and short once the run has ended."""
        longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self._failures, 10))
        if self._hurry.is_set():
            self._stop.wait(random.uniform(0, FIRST_PAUSE))
        else:
            self._hurry.wait(random.uniform(longest / 2, longest))

    def _retain(self) -> list[str]:
        """Remove what the rule gives up; the names."""
        own = self._ask(Backlog.own)
        in_use = {*self._ask(Backlog.in_use), *filter(None, [self._last_good(own)])}
        removed = store.retain(self.tier, self._backlog.keep, self._backlog.ranking, in_use, committed=own)
        names = [judgement.name for judgement in removed]
        self._ask(Backlog.remove, names)
        return names

    def _key(self, number: int, what: object = "") -> str:
        return f"{self._ranks.session}/{self._id}/{number}/{what}"
