"""Committed checkpoints on their way to the cold tier, in a thread of their own on every rank.

What is on its way is nowhere written down: it is what the cold tier's rule would keep and the cold tier does not have.
So a restart goes on where a killed process was, an outage makes no queue that has to be worked off in full, and a
checkpoint that newer ones made redundant is passed over.  Until the cold copy is proven, the hot one stays.

::

    rank 0                                          every rank
    ──────                                          ──────────
    the oldest that is wanted there: name it  ──>   send this rank's files, each checked
    hear from all ranks  <───────────────────────   done, or why not
    all there at their size: the manifest
    say how it ended  ──────────────────────────>   take note; tell the training thread
    forget what the rule gives up

Nothing here is waited for by a save.
"""

from __future__ import annotations

import logging
import math
import queue
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lightning_resilience import store
from lightning_resilience.engine import Folder
from lightning_resilience.errors import CheckpointCorrupt, ResilienceError, TierUnavailable
from lightning_resilience.manifest import Manifest
from lightning_resilience.ranks import Board, Ranks, attempt, raise_first
from lightning_resilience.remote import RemoteTier
from lightning_resilience.retention import Keep, Ranking, judge
from lightning_resilience.tiers import LocalTier
from lightning_resilience.verdict import describe

log = logging.getLogger("lightning_resilience")

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


Outcome = Replicated | BaseException
"""How the copy of one checkpoint ended."""


@dataclass
class _Known:
    """What is where, as far as this rank has heard; guarded by a lock."""

    hot: dict[str, Manifest] = field(default_factory=dict)
    cold: dict[str, Manifest] = field(default_factory=dict)
    since: dict[str, float] = field(default_factory=dict)

    def lacking(self) -> dict[str, str]:
        """What the cold tier lacks: the hot name by the one that it gets there.

        They differ where another save has that name there: nothing gives way in one step behind a URL, so the older
        one stays until the rule gives it up.
        """
        there = {(manifest.run, manifest.sequence): manifest for manifest in self.cold.values()}
        targets: dict[str, str] = {}
        for name, manifest in self.hot.items():
            copy = there.get((manifest.run, manifest.sequence))
            if copy is None or not manifest.is_same_save(copy):
                targets[store.free_name(name, {*self.cold, *targets}.__contains__)] = name
        return targets


@dataclass(frozen=True)
class _Task:
    """A checkpoint to copy: its ``name`` here and there (``target``), and whether each file is sent by the rank that
    saved it (``owners_only``)."""

    name: str
    target: str
    manifest: Manifest
    owners_only: bool


class _GaveWay(Exception):
    """The name of the checkpoint is a newer save's now."""


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
    ) -> None:
        self.tier = tier
        self._ranks = ranks
        self._folder = folder
        self._keep = keep
        self._ranking = ranking
        self._run_id = run
        self._id: str = ranks.broadcast(f"copy-{random.getrandbits(48):012x}")
        self._lock = threading.Lock()
        self._known = _Known()
        self._in_use: set[str] = set()
        self._news: queue.SimpleQueue[Replicated] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._hurry = threading.Event()
        self._stop = threading.Event()
        self.tier.patience.stop = self._stop
        self._failures = 0
        self._failed: dict[str, int] = {}
        self._spoiled: dict[str, tuple[int, int]] = {}
        self._unsealed: set[str] = set()
        self._has_offer = False
        self._closed_at = math.inf
        self._current: str | None = None
        found = ranks.gathered(lambda: self._take_over(tolerant))
        raise_first(found)
        cold: Any = found[0]  # rank 0's; None where it does not answer yet
        self._has_listed = cold is not None
        self._known.cold = dict(cold or {})
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
        return listing.committed

    # -- the training thread ------------------------------------------------------------------------------------------

    def offer(self, committed: Mapping[str, Manifest], in_use: Collection[str] = ()) -> None:
        """Say what the hot tier has; on all ranks alike."""
        with self._lock:
            now = time.monotonic()
            self._known.hot = dict(committed)
            self._known.since = {name: self._known.since.get(name, now) for name in committed}
            self._in_use = set(in_use)
            self._has_offer = True
        self._wake.set()

    def known_cold(self) -> list[Manifest]:
        """The checkpoints that the cold tier has."""
        with self._lock:
            return list(self._known.cold.values())

    def pending(self) -> set[str]:
        """Names of the checkpoints that the cold tier should have and does not: their hot copy must stay."""
        with self._lock:
            hot, cold, lacking = dict(self._known.hot), self._own(), self._known.lacking()
        verdicts = judge({**cold, **{target: hot[name] for target, name in lacking.items()}}, self._keep, self._ranking)
        return {lacking[verdict.name] for verdict in verdicts if verdict.keep and verdict.name in lacking}

    def _own(self) -> dict[str, Manifest]:
        """What the cold tier has of this run."""
        run = self._run_id()
        return {name: manifest for name, manifest in self._known.cold.items() if manifest.run == run}

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
        waiting = self.pending()
        with self._lock:
            since = [self._known.since[name] for name in waiting if name in self._known.since]
        return time.monotonic() - min(since) if since else 0.0

    def close(self, seconds: float, leave_by: Callable[[], float] = lambda: math.inf) -> None:
        """Let what is on its way arrive, for so long at most; not so long while the cold tier does not answer.

        Args:
            seconds: at most.
            leave_by: second of the monotonic clock at which to give up; asked again and again.
        """
        self._closed_at = time.monotonic()
        self._wake.set()
        self._hurry.set()
        waiting = self.pending()
        if waiting and self._ranks.rank == 0:
            with self._lock:
                size = sum(manifest.size for name, manifest in self._known.hot.items() if name in waiting)
            log.info("event=drain tier=cold checkpoints=%d bytes=%d", len(waiting), size)
        while self._thread.is_alive():
            left_over = min(self._closed_at + seconds, leave_by()) - time.monotonic()
            if left_over <= 0:
                break
            self._thread.join(min(left_over, TICK / 2))
        self.abandon()
        self._thread.join(max(min(ABANDON, leave_by() - time.monotonic()), 0.0))
        left = self.pending()
        if left and self._ranks.rank == 0:
            log.warning(
                "event=drain tier=cold left=%d reason='not there yet: the next start goes on with them' url=%s",
                len(left),
                self.tier.where(),
            )

    def abandon(self) -> None:
        """Stop at once, after an exception; the next start goes on."""
        self._stop.set()
        self._wake.set()
        self._hurry.set()

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
            task = self._next() if knows else None
            self._current = task.name if task is not None else None
            if task is None:
                if self._is_over():
                    break
                self._wake.wait(TICK)
                self._wake.clear()
                continue
            number += 1
            board.put_once(self._key(number), task)
            outcome = self._copy(board, number, task)
            self._take_note(task, outcome)
            removed = self._retain() if isinstance(outcome, Replicated) else []
            board.put_once(self._key(number, "end"), (outcome, removed))
            # Who has answered this one has read all of the one before.
            board.forget(*(self._key(number - 1, what) for what in ("", "end", *range(self._ranks.world_size))))
            if not isinstance(outcome, Replicated):
                if task.name not in self.pending():
                    self._drop(task.target)
                if self._is_over():
                    break
                self._pause()
        board.put_once(self._key(number + 1), None)

    def _is_over(self) -> bool:
        """Whether the run has ended, and there is nothing more to wait for: all is there, or nothing answers."""
        nothing_left = self._next() is None
        return time.monotonic() > self._closed_at + (0 if nothing_left else GIVE_UP if self._failures else math.inf)

    def _knows_what_is_there(self) -> bool:
        """Whether the cold tier has been listed; tries to, where it did not answer at the start."""
        if not self._has_listed:
            try:
                found = self._list()
            except (ResilienceError, OSError):
                self._failures += 1
                return False
            with self._lock:
                self._known.cold |= found
            self._has_listed = True
        return True

    def _sweep(self) -> None:
        """Delete the files of checkpoints that a kill kept from being whole and that no folder has any more; what is
        still on its way goes on from them."""
        if self._unsealed and self._has_offer:
            with self._lock:
                names, self._unsealed = self._unsealed - self._known.hot.keys(), set()
            with suppress(ResilienceError, OSError):  # the next start tries again
                self.tier.sweep(names)

    def _copy(self, board: Board, number: int, task: _Task) -> Outcome:
        """See one checkpoint through; why it did not get there, if it did not."""
        begin = time.monotonic()
        with self._lock:
            since = self._known.since.get(task.name, begin)
        answers: list[Any] = [self._send_mine(task)]
        answers += [self._wait(board, self._key(number, rank)) for rank in range(1, self._ranks.world_size)]
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if self._stop.is_set() or None in answers:
            return TierUnavailable("the run ended before it was there")
        # A file that is damaged here says more than a store that does not answer.
        failures.sort(key=lambda failure: not isinstance(failure, CheckpointCorrupt))
        sealed = failures[0] if failures else attempt(lambda: self.tier.seal(task.target, task.manifest))
        if isinstance(sealed, BaseException):
            return _GaveWay() if self._gave_way(task) else sealed
        now = time.monotonic()
        return Replicated(self.tier.where(task.target), task.manifest, sum(answers), now - begin, now - since)

    def _gave_way(self, task: _Task) -> bool:
        """Whether a newer save took the name of a checkpoint while it was being sent, rather than damage."""
        found = attempt(lambda: store.read_manifest(self._folder.tier, task.name))
        return isinstance(found, Manifest) and not found.is_same_save(task.manifest)

    def _drop(self, target: str) -> None:
        """Take away what was sent of a checkpoint that newer ones have made redundant meanwhile."""
        with suppress(ResilienceError, OSError):
            self.tier.remove(target)

    def _follow(self, board: Board) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            task = self._wait(board, self._key(number))
            if task is None:
                return
            self._current = task.name
            board.put_once(self._key(number, self._ranks.rank), self._send_mine(task))
            end = self._wait(board, self._key(number, "end"))
            if end is None:
                return
            outcome, removed = end
            self._take_note(task, outcome)
            with self._lock:
                for gone in removed:
                    self._known.cold.pop(gone, None)

    def _wait(self, board: Board, key: str) -> Any:
        while not self._stop.is_set():
            with suppress(TimeoutError):
                return board.wait(key, 60)
        return None

    def _send_mine(self, task: _Task) -> int | BaseException:
        """Send the files that are this rank's to send; their bytes, or why not."""
        name, owners_only = task.name, task.owners_only
        tier, sharing, rank = self._folder.tier, self._folder.sharing, self._ranks.rank
        assert isinstance(tier, LocalTier)

        def send() -> int:
            sent = 0
            for index, entry in enumerate(task.manifest):
                # What a rank saved, that rank sends.  Where it is gone, or that failed, whoever has it beside it.
                saved_here = owners_only and entry.rank in sharing
                if owners_only and not saved_here and entry.rank < self._ranks.world_size:
                    continue
                sender = entry.rank if saved_here else sharing[index % len(sharing)]
                holder = store.holder(name, entry)
                if sender == rank and (saved_here or tier.size(holder, entry.path) == entry.size):
                    sent += self.tier.send(task.target, entry, tier.path(holder, entry.path))
            return sent

        return attempt(send)

    def _take_note(self, task: _Task, outcome: Outcome) -> None:
        """How one ended: for what is known here, for the training thread and, on rank 0, for people."""
        name, self._current = task.name, None
        if isinstance(outcome, Replicated):
            with self._lock:
                self._known.cold[task.target] = outcome.manifest
            self._failed.pop(name, None)
            if self._ranks.rank == 0:
                self._tell_of_success(outcome)
            self._news.put(outcome)
            return
        self._failed[name] = self._failed.get(name, 0) + 1
        if isinstance(outcome, CheckpointCorrupt):
            self._spoiled[name] = task.manifest.order
        if self._ranks.rank == 0 and not isinstance(outcome, _GaveWay):
            self._tell_of_failure(name, outcome)

    def _tell_of_failure(self, name: str, failure: BaseException) -> None:
        """Once for each checkpoint that is damaged here, and once for each outage."""
        if isinstance(failure, CheckpointCorrupt):
            note = "it is damaged here and is not sent; verify it"
        else:
            self._failures += 1
            note = "it is tried again; the local copies stay"
            if self._failures > 1:
                return
        log.warning(
            "event=replicate tier=cold outcome=failed name=%s backlog=%d lag=%.0f reason=%r note=%r",
            name,
            len(self.pending()),
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
            len(self.pending()),
        )

    def _next(self) -> _Task | None:
        """The oldest that is on its way, of those that failed least often."""
        waiting = self.pending()
        with self._lock:
            tasks = [
                _Task(name, target, self._known.hot[name], owners_only=name not in self._failed)
                for target, name in self._known.lacking().items()
                if name in waiting and self._spoiled.get(name) != self._known.hot[name].order
            ]
        return min(tasks, key=lambda task: (self._failed.get(task.name, 0), task.manifest.order), default=None)

    def _pause(self) -> None:
        """Before the next try: longer after each failure, and short once the run has ended."""
        longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self._failures, 10))
        if self._hurry.is_set():
            self._stop.wait(random.uniform(0, FIRST_PAUSE))
        else:
            self._hurry.wait(random.uniform(longest / 2, longest))

    def _retain(self) -> list[str]:
        """Remove what the rule gives up; the names."""
        with self._lock:
            cold = self._own()
        removed = store.retain(self.tier, self._keep, self._ranking, self._in_use, committed=cold)
        names = [verdict.name for verdict in removed]
        with self._lock:
            for name in names:
                self._known.cold.pop(name, None)
        return names

    def _key(self, number: int, what: object = "") -> str:
        return f"{self._ranks.session}/{self._id}/{number}/{what}"
