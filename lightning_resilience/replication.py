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


class Replicator:
    """Copies the checkpoints of one folder to a cold tier.

    Creating it is collective, as is ``close``.

    Args:
        ranks: the ranks that save together.
        folder: the hot tier.
        tier: the cold tier.
        keep: what the cold tier retains.
        ranking: what ``keep.top_k`` ranks by.
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
        tolerant: bool = False,
    ) -> None:
        self.tier = tier
        self._ranks = ranks
        self._folder = folder
        self._keep = keep
        self._ranking = ranking
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
        self._spoiled: set[str] = set()
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
            return store.list_checkpoints(self.tier).committed
        except TierUnavailable as error:
            if not tolerant:
                raise
            log.warning(
                "event=replicate tier=cold outcome=failed reason=%r note='it is tried again; training goes on'",
                error.message,
            )
            return None

    # -- the training thread ------------------------------------------------------------------------------------------

    def offer(self, committed: Mapping[str, Manifest], in_use: Collection[str] = ()) -> None:
        """Say what the hot tier has; on all ranks alike."""
        with self._lock:
            now = time.monotonic()
            self._known.hot = dict(committed)
            self._known.since = {name: self._known.since.get(name, now) for name in committed}
            self._in_use = set(in_use)
        self._wake.set()

    def known_cold(self) -> list[Manifest]:
        """The checkpoints that the cold tier has."""
        with self._lock:
            return list(self._known.cold.values())

    def pending(self) -> set[str]:
        """Names of the checkpoints that the cold tier should have and does not: their hot copy must stay."""
        with self._lock:
            hot, cold = dict(self._known.hot), self._known.cold
            missing = {
                name: manifest
                for name, manifest in hot.items()
                if name not in cold or not manifest.is_same_save(cold[name])
            }
            verdicts = judge({**cold, **missing}, self._keep, self._ranking)
        return {verdict.name for verdict in verdicts if verdict.keep and verdict.name in missing}

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
            name = self._current = self._next() if self._knows_what_is_there() else None
            if name is None:
                if self._is_over():
                    break
                self._wake.wait(TICK)
                self._wake.clear()
                continue
            with self._lock:
                manifest = self._known.hot[name]
            number += 1
            owners_only = name not in self._failed
            board.put_once(self._key(number), (name, manifest, owners_only))
            outcome = self._copy(board, number, name, manifest, owners_only)
            self._take_note(name, outcome)
            removed = self._retain() if isinstance(outcome, Replicated) else []
            board.put_once(self._key(number, "end"), (outcome, removed))
            # Who has answered this one has read all of the one before.
            board.forget(*(self._key(number - 1, what) for what in ("", "end", *range(self._ranks.world_size))))
            if not isinstance(outcome, Replicated):
                if name not in self.pending():
                    self._drop(name)
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
                found = store.list_checkpoints(self.tier).committed
            except (ResilienceError, OSError):
                self._failures += 1
                return False
            with self._lock:
                self._known.cold |= found
            self._has_listed = True
        return True

    def _copy(self, board: Board, number: int, name: str, manifest: Manifest, owners_only: bool) -> Outcome:
        """See one checkpoint through; why it did not get there, if it did not."""
        begin = time.monotonic()
        with self._lock:
            is_taken, since = name in self._known.cold, self._known.since.get(name, begin)
        ready = attempt(lambda: self.tier.remove(name)) if is_taken else None  # another checkpoint had that name
        answers: list[Any] = [self._send_mine(name, manifest, owners_only) if ready is None else ready]
        answers += [self._wait(board, self._key(number, rank)) for rank in range(1, self._ranks.world_size)]
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if self._stop.is_set() or None in answers:
            return TierUnavailable("the run ended before it was there")
        # A file that is damaged here says more than a store that does not answer.
        failures.sort(key=lambda failure: not isinstance(failure, CheckpointCorrupt))
        sealed = failures[0] if failures else attempt(lambda: self.tier.seal(name, manifest))
        if isinstance(sealed, BaseException):
            return sealed
        now = time.monotonic()
        return Replicated(self.tier.where(name), manifest, sum(answers), now - begin, now - since)

    def _drop(self, name: str) -> None:
        """Take away what was sent of a checkpoint that newer ones have made redundant meanwhile."""
        with suppress(ResilienceError, OSError):
            self.tier.remove(name)

    def _follow(self, board: Board) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            task = self._wait(board, self._key(number))
            if task is None:
                return
            name, manifest, owners_only = task
            self._current = name
            board.put_once(self._key(number, self._ranks.rank), self._send_mine(name, manifest, owners_only))
            end = self._wait(board, self._key(number, "end"))
            if end is None:
                return
            outcome, removed = end
            self._take_note(name, outcome)
            with self._lock:
                for gone in removed:
                    self._known.cold.pop(gone, None)

    def _wait(self, board: Board, key: str) -> Any:
        while not self._stop.is_set():
            with suppress(TimeoutError):
                return board.wait(key, 60)
        return None

    def _send_mine(self, name: str, manifest: Manifest, owners_only: bool) -> int | BaseException:
        """Send the files that are this rank's to send; their bytes, or why not."""
        tier, sharing, rank = self._folder.tier, self._folder.sharing, self._ranks.rank
        assert isinstance(tier, LocalTier)

        def send() -> int:
            sent = 0
            for index, entry in enumerate(manifest):
                # What a rank saved, that rank sends.  Where it is gone, or that failed, whoever has it beside it.
                saved_here = owners_only and entry.rank in sharing
                if owners_only and not saved_here and entry.rank < self._ranks.world_size:
                    continue
                sender = entry.rank if saved_here else sharing[index % len(sharing)]
                holder = store.holder(name, entry)
                if sender == rank and (saved_here or tier.size(holder, entry.path) == entry.size):
                    sent += self.tier.send(name, entry, tier.path(holder, entry.path))
            return sent

        return attempt(send)

    def _take_note(self, name: str, outcome: Outcome) -> None:
        """How one ended: for what is known here, for the training thread and, on rank 0, for people."""
        self._current = None
        if isinstance(outcome, Replicated):
            with self._lock:
                self._known.cold[name] = outcome.manifest
            self._failed.pop(name, None)
            if self._ranks.rank == 0:
                self._tell_of_success(outcome)
            self._news.put(outcome)
            return
        self._failed[name] = self._failed.get(name, 0) + 1
        if isinstance(outcome, CheckpointCorrupt):
            self._spoiled.add(name)
        if self._ranks.rank == 0:
            self._tell_of_failure(name, outcome)

    def _tell_of_failure(self, name: str, failure: BaseException) -> None:
        """Once for each checkpoint that is damaged here, and once for each outage."""
        if name in self._spoiled:
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

    def _next(self) -> str | None:
        """The oldest that is on its way, of those that failed least often."""
        waiting = self.pending() - self._spoiled
        with self._lock:
            there = [name for name in waiting if name in self._known.hot]
            return min(there, key=lambda name: (self._failed.get(name, 0), self._known.hot[name].order), default=None)

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
            cold = dict(self._known.cold)
        removed = store.retain(self.tier, self._keep, self._ranking, self._in_use, committed=cold)
        names = [verdict.name for verdict in removed]
        with self._lock:
            for name in names:
                self._known.cold.pop(name, None)
        return names

    def _key(self, number: int, what: object = "") -> str:
        return f"{self._ranks.session}/{self._id}/{number}/{what}"
