"""How ranks agree during training without waiting for each other.

What ranks may see differently (clocks, for one) is decided by rank 0 and told to all, and what only some of them hear
(signals) reaches all: about once a second one asynchronous all-reduce of a few integers is started on the package's own
group, and its answer is read some steps later, at the same step on every rank.  No step waits for it, and no GPU is
involved.  Only where a step takes longer than two such periods, an answer is waited for: it takes a millisecond, and a
whole step of somebody's grace would be lost otherwise.
"""

from __future__ import annotations

import time

from lightning_resilience.ranks import PendingMax, Ranks


class Agreement:
    """Asks all ranks whether something is wanted, over and over.

    Args:
        ranks: who is asked; all call ``ask`` once a batch.
        seconds: wanted time between two questions.  What one rank hands in all have heard after twice that time, or
            after the step under way.
    """

    MOST_BATCHES = 1000

    def __init__(self, ranks: Ranks, seconds: float = 1.0) -> None:
        self._ranks = ranks
        self.seconds = seconds
        self._batch = 0
        self._every = 1
        self._pending: PendingMax | None = None
        self._due = 0
        self._asked: str | None = None
        self._asked_at: tuple[int, float] | None = None
        self.signal = 0
        """The largest number of a signal that any rank has handed in; the same on all ranks at the same step."""
        self.diverged = False
        """Whether any rank wants the run to go back; the same on all ranks at the same step."""

    def ask(self, wish: str | None, signum: int = 0, diverged: bool = False) -> str | None:
        """Hand in this rank's wish: why, or None; the signal that it has received, or 0; and whether the loss has left
        its course for so long that the run is to go back.

        Returns:
            At the steps where an answer is due, and if any rank had a wish: why (this rank's own words where it has
            some).  The same ranks get an answer at the same step; None at all other steps.
        """
        if self._ranks.world_size == 1:
            self.signal, self.diverged = signum, diverged
            return wish
        self._batch += 1
        answer = self._answer() if self._batch >= self._due else None
        if self._pending is None:
            self._asked = wish
            self._pending = self._ranks.start_max(wish is not None, self._proposal(), signum, diverged)
            self._due = self._batch + self._every
            if self._every == 0:
                answer = self._answer() or answer
        return answer

    def _answer(self) -> str | None:
        """The answer to the question under way."""
        if self._pending is None:
            return None
        wanted, self._every, self.signal, diverged = self._pending.result()
        self._pending, self.diverged = None, bool(diverged)
        return (self._asked or "another rank asked for it") if wanted else None

    @property
    def lag(self) -> int:
        """How many batches it may take from a wish to its answer."""
        return 0 if self._ranks.world_size == 1 else 2 * max(self._every, 1)

    def _proposal(self) -> int:
        """How many batches to let pass until the next answer, 0 to wait for it at once; rank 0's counts, so that all
        read it at the same step."""
        if self._ranks.rank != 0:
            return 0
        before, now = self._asked_at, time.monotonic()
        self._asked_at = (self._batch, now)
        if before is None or now <= before[1]:
            return 1
        wanted = round(self.seconds * (self._batch - before[0]) / (now - before[1]))
        # At most doubling: a few quick batches must not postpone the next question by hours of slow ones.
        return min(wanted, max(2 * self._every, 1), self.MOST_BATCHES)

    def forget(self) -> None:
        """The run was taken back: what was asked is of before."""
        self.close()
        self.diverged = False

    def close(self) -> None:
        """Let the question under way come to its end.  All ranks have asked it."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None
