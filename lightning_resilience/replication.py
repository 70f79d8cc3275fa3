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
import queue
import random
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lightning_resilience import store
from lightning_resilience.engine import Folder
from lightning_resilience.errors import ResilienceError
from lightning_resilience.manifest import Manifest
from lightning_resilience.ranks import Board, Ranks, raise_first
from lightning_resilience.remote import RemoteTier
from lightning_resilience.retention import Keep, Ranking, judge
from lightning_resilience.tiers import LocalTier

log = logging.getLogger("lightning_resilience")

TICK = 1.0
"""Seconds between two looks at whether there is something to do, where nobody says so."""
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 300.0
"""Seconds before a copy that failed is tried again; the pause doubles with each failure in a row."""


@dataclass(frozen=True)
class Replicated:
    """A checkpoint that the cold tier has: its ``url`` and ``manifest``, how many ``bytes`` had to be sent, how long it
    took (``seconds``), and how long after its commit it was there (``lag``, in seconds)."""

    url: str
    manifest: Manifest
    bytes: int = 0
    seconds: float = 0.0
    lag: float = 0.0


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
        timeout: seconds that a rank may take for its part of one checkpoint.

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
        timeout: float = 1800.0,
    ) -> None:
        self.tier = tier
        self._ranks = ranks
        self._folder = folder
        self._keep = keep
        self._ranking = ranking
        self._timeout = timeout
        self._id: str = ranks.broadcast(f"copy-{random.getrandbits(48):012x}")
        self._lock = threading.Lock()
        self._known = _Known()
        self._in_use: set[str] = set()
        self._news: queue.SimpleQueue[Replicated] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._closing = False
        self._stop = threading.Event()
        self.tier.patience.stop = self._stop
        self._failures = 0
        self._current: str | None = None
        found = ranks.gathered(self._take_over)
        raise_first(found)
        self._known.cold = dict(found[0])  # type: ignore[arg-type]  # rank 0's is a dict
        self._thread = threading.Thread(target=self._run, name="resilience-replicate", daemon=True)
        self._thread.start()

    def _take_over(self) -> dict[str, Manifest] | None:
        if self._ranks.rank:
            return None
        self.tier.probe()
        self.tier.sweep_uploads()
        return store.list_checkpoints(self.tier).committed

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
            missing = {name: manifest for name, manifest in hot.items() if not _same(cold.get(name), manifest)}
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
        """Seconds since the oldest checkpoint was committed that is still on its way; 0 where none is."""
        waiting = self.pending()
        with self._lock:
            since = [self._known.since[name] for name in waiting if name in self._known.since]
        return time.monotonic() - min(since) if since else 0.0

    def close(self, seconds: float) -> bool:
        """Let what is on its way arrive, for so long at most; whether all did."""
        self._closing = True
        self._wake.set()
        waiting = self.pending()
        if waiting and self._ranks.rank == 0:
            size = sum(self._known.hot[name].size for name in waiting if name in self._known.hot)
            log.info("event=drain tier=cold checkpoints=%d bytes=%d", len(waiting), size)
        self._thread.join(seconds)
        self._stop.set()
        self._wake.set()
        left = self.pending()
        if left and self._ranks.rank == 0:
            log.warning(
                "event=drain tier=cold left=%d reason='not there yet: the next start goes on with them' url=%s",
                len(left),
                self.tier.where(),
            )
        return not left

    def abandon(self) -> None:
        """Stop at once, after an exception; the next start goes on."""
        self._stop.set()
        self._wake.set()

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
            name = self._current = self._next()
            if name is None and self._closing:
                break
            if name is None:
                self._wake.wait(TICK)
                self._wake.clear()
                continue
            with self._lock:
                manifest = self._known.hot[name]
            number += 1
            board.put_once(self._key(number), (name, manifest, self._failures == 0))
            done = self._copy(board, number, name, manifest)
            board.put_once(self._key(number, "end"), done)
            if not isinstance(done, Replicated) and name not in self.pending():
                self._drop(name)
                continue
            self._take_note(name, done)
            board.forget(*(self._key(number - 1, what) for what in ("", "end", *range(self._ranks.world_size))))
            if not isinstance(done, Replicated):
                if self._closing:
                    break
                self._pause()
        board.put_once(self._key(number + 1), None)

    def _copy(self, board: Board, number: int, name: str, manifest: Manifest) -> Replicated | str:
        """See one checkpoint through; why it did not get there, if it did not."""
        begin = time.monotonic()
        try:
            old = self._known.cold.get(name)
            if old is not None:  # another checkpoint had that name
                self.tier.remove(name)
            answers = [self._send_mine(name, manifest, self._failures == 0)]
            for rank in range(1, self._ranks.world_size):
                answers.append(board.wait(self._key(number, rank), self._timeout))
            failed = [answer for answer in answers if isinstance(answer, str)]
            if failed:
                return failed[0]
            self.tier.seal(name, manifest)
        except (ResilienceError, OSError) as error:
            return _said(error)
        now = time.monotonic()
        lag = now - self._known.since.get(name, now)
        sent = sum(answer for answer in answers if isinstance(answer, int))
        return Replicated(self.tier.where(name), manifest, sent, now - begin, lag)

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
            done = self._wait(board, self._key(number, "end"))
            if done is None:
                return
            self._take_note(name, done)

    def _wait(self, board: Board, key: str) -> Any:
        while not self._stop.is_set():
            with suppress(TimeoutError):
                return board.wait(key, 60)
        return None

    def _send_mine(self, name: str, manifest: Manifest, owners_only: bool) -> int | str:
        """Send the files that are this rank's to send; their bytes, or why not."""
        tier, sharing, rank = self._folder.tier, self._folder.sharing, self._ranks.rank
        assert isinstance(tier, LocalTier)
        sent = 0
        try:
            for index, entry in enumerate(manifest):
                # What a rank saved, that rank sends.  Where it is gone, or that failed, whoever has it beside it.
                saved_here = entry.rank in sharing if owners_only else False
                if owners_only and not saved_here and entry.rank < self._ranks.world_size:
                    continue
                sender = entry.rank if saved_here else sharing[index % len(sharing)]
                if sender == rank and (saved_here or tier.size(name, entry.path) == entry.size):
                    sent += self.tier.send(name, entry, tier.path(name, entry.path))
        except (ResilienceError, OSError) as error:
            return _said(error)
        return sent

    def _take_note(self, name: str, done: Replicated | str) -> None:
        if isinstance(done, Replicated):
            with self._lock:
                self._known.cold[name] = done.manifest
            self._news.put(done)
            if self._ranks.rank == 0:
                self._tell_of_success(done)
                self._retain()
        elif self._ranks.rank == 0:
            self._failures += 1
            if self._failures == 1:
                log.warning(
                    "event=replicate tier=cold outcome=failed name=%s backlog=%d lag=%.0f reason=%r"
                    " note='it is tried again; the local copies stay'",
                    name,
                    len(self.pending()),
                    self.lag,
                    done,
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
        """The oldest that is on its way."""
        waiting = self.pending()
        with self._lock:
            there = [name for name in waiting if name in self._known.hot]
            return min(there, key=lambda name: self._known.hot[name].order, default=None)

    def _pause(self) -> None:
        longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self._failures, 10))
        self._stop.wait(random.uniform(longest / 2, longest))

    def _retain(self) -> None:
        try:
            with self._lock:
                cold = dict(self._known.cold)
            removed = store.retain(self.tier, self._keep, self._ranking, self._in_use, committed=cold)
        except (ResilienceError, OSError) as error:
            log.warning("event=retain tier=cold url=%s error=%r", self.tier.where(), str(error))
            return
        with self._lock:
            for verdict in removed:
                self._known.cold.pop(verdict.name, None)

    def _key(self, number: int, what: object = "") -> str:
        return f"{self._ranks.session}/{self._id}/{number}/{what}"


def _same(one: Manifest | None, other: Manifest) -> bool:
    """Whether two manifests are of the same save."""
    return one is not None and (one.run, one.sequence, one.files) == (other.run, other.sequence, other.files)


def _said(error: BaseException) -> str:
    return error.message if isinstance(error, ResilienceError) else f"{type(error).__name__}: {error}"
