"""How ranks agree during training without waiting for each other.

What ranks may see differently (clocks, losses, signals) is put to a vote: about once a second one asynchronous
all-reduce of a few integers is started on the package's own group, and its answer is read some steps later, at the
same step on every rank.  No step waits for it, and no GPU is involved.
"""

from __future__ import annotations

import time

from lightning_resilience.ranks import PendingMax, Ranks


class Agreement:
    """Asks all ranks the same questions, over and over.

    Args:
        ranks: who is asked; all call ``ask`` once a batch.
        seconds: wanted time between two questions.
    """

    MOST_BATCHES = 1000

    def __init__(self, ranks: Ranks, seconds: float = 1.0) -> None:
        self._ranks = ranks
        self._seconds = seconds
        self._batch = 0
        self._every = 1
        self._pending: PendingMax | None = None
        self._due = 0
        self._asked_at = (0, time.monotonic())

    def ask(self, *votes: int) -> list[int] | None:
        """Hand in this rank's votes.

        Returns:
            The largest vote on each question over all ranks, at the steps where an answer is due; None at the others.
        """
        if self._ranks.world_size == 1:
            return list(votes)
        self._batch += 1
        answer = None
        if self._pending is not None and self._batch >= self._due:
            *answer, self._every = self._pending.result()
            self._pending = None
        if self._pending is None:
            self._pending = self._ranks.start_max(*votes, self._proposal())
            self._due = self._batch + self._every
        return answer

    def _proposal(self) -> int:
        """How many batches to let pass until the answer; rank 0's wish counts, so that all read it at the same step."""
        if self._ranks.rank != 0:
            return 0
        batch, then = self._asked_at
        now = time.monotonic()
        self._asked_at = (self._batch, now)
        passed = self._batch - batch
        if not passed or now <= then:
            return 1
        return max(1, min(self.MOST_BATCHES, round(self._seconds * passed / (now - then))))

    def close(self) -> None:
        """Let the question under way come to its end.  All ranks have asked it."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None
